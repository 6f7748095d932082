"""The class CudatmaConfig, the quantization_config of models with MarlinLinear layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from cudatma.errors import ArgumentError, ArgumentTypeError, QuantizationError, alternatives
from cudatma.quantization.conversion.folder import METHOD, quantization_config
from cudatma.quantization.layout_v1 import LAYOUT_VERSION
from cudatma.quantization.storage import supported_versions
from cudatma.quantization.weight_format import weight_format

_FACTS = ("group_size", "symmetric", "act_order", "format")


class CudatmaConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """Options for quantizing a float model while transformers loads it, or the description of a converted model.

    Parameters
    ----------
    group_size, symmetric, clip_search : int, bool, bool
        Options of ``cudatma.quantize``.
    modules_to_not_convert : sequence of str, optional
        Modules that stay float. An entry matches the whole name of a module, the end of the name or a prefix, as in
        transformers. The head and tied weights always stay float.
    vision_tower : bool, default False
        Whether to also quantize the image, video and audio encoders.
    format : str, default "int4"
        Format of the weights, as for ``cudatma.quantize``.
    dtype, act_order, layers, source, bits, layout_version : optional
        Fields that `cudatma convert` and save_pretrained() write. ``dtype`` is the type of the scales. ``layers`` maps
        the name of each packed layer to the facts that differ from group_size, symmetric, act_order and format.
        ``source`` is the quantization_config of the model that load() packs.
    quant_method : str
        Ignored. Accepted because config.json contains this key.

    Raises
    ------
    ArgumentError, ArgumentTypeError, QuantizationError
        If a value is invalid.
    """

    def __init__(
        self,
        group_size: int | None = None,
        symmetric: bool = True,
        clip_search: bool = False,
        modules_to_not_convert: Sequence[str] | None = None,
        vision_tower: bool = False,
        *,
        format: str = "int4",
        dtype: str | None = None,
        act_order: bool = False,
        layers: Mapping[str, Mapping[str, Any]] | None = None,
        source: Mapping[str, Any] | None = None,
        bits: int | None = None,
        layout_version: int = LAYOUT_VERSION,
        quant_method: str = METHOD,
    ) -> None:
        kind = weight_format(format)
        group_size = kind.default_group_size if group_size is None else group_size
        kind.check_group_size(group_size)
        flags = {"symmetric": symmetric, "clip_search": clip_search, "act_order": act_order}
        for name, flag in (flags | {"vision_tower": vision_tower}).items():
            if type(flag) is not bool:
                raise ArgumentTypeError(name, type(flag).__name__, "bool")
        kind.check_symmetric(symmetric)
        if bits not in (None, kind.bits):
            raise QuantizationError("bits", repr(bits), f"{kind.bits} for format {format!r}")
        if layout_version not in supported_versions():
            supported = alternatives(supported_versions())
            raise QuantizationError("layout_version", layout_version, supported, "convert the checkpoint again")
        names = () if modules_to_not_convert is None else modules_to_not_convert
        if isinstance(names, str) or not isinstance(names, Sequence) or any(type(name) is not str for name in names):
            raise ArgumentTypeError("modules_to_not_convert", repr(names)[:80], "a list of names")
        if layers is not None and not isinstance(layers, Mapping):
            raise ArgumentTypeError("layers", repr(layers)[:80], "None or a mapping from layer names to settings")
        for name, facts in (layers or {}).items():
            if not isinstance(facts, Mapping) or not set(facts) <= set(_FACTS):
                raise ArgumentError(
                    f"layers[{name!r}]", repr(facts)[:80], f"a mapping with no keys other than {alternatives(_FACTS)}"
                )
        self.quant_method = METHOD
        self.format, self.bits, self.layout_version, self.dtype = format, kind.bits, layout_version, dtype
        self.group_size, self.symmetric, self.act_order = group_size, symmetric, act_order
        self.clip_search, self.vision_tower = clip_search, vision_tower
        self.modules_to_not_convert = None if modules_to_not_convert is None else list(modules_to_not_convert)
        self.layers = None if layers is None else {name: dict(facts) for name, facts in layers.items()}
        self.source = None if source is None else dict(source)

    def facts(self, layer: str) -> dict[str, Any]:
        """Return group_size, symmetric, act_order and format of a packed layer.

        Parameters
        ----------
        layer : str
            The layer's name.

        Returns
        -------
        dict
            The four values, by name.
        """
        own = (self.layers or {}).get(layer, {})
        return {name: own.get(name, getattr(self, name)) for name in _FACTS}

    def describe(self, layers: Mapping[str, Mapping[str, Any]], dtype: str) -> None:
        """Record the layers of a loaded model for save_pretrained().

        Parameters
        ----------
        layers : mapping of str to mapping
            Results of facts() for all packed layers, by name.
        dtype : str
            Type of the scales.
        """
        if layers:
            section = quantization_config({name: dict(facts) for name, facts in layers.items()}, dtype)
            section = {"format": "int4", **section}
            for name in ("dtype", "layers", "bits", *_FACTS):
                setattr(self, name, section[name])
        self.source = None

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as a dict for config.json.

        Returns
        -------
        dict
            The options, except those that are None and the defaults ``vision_tower=False`` and ``format="int4"``.
        """
        content: dict[str, Any] = super().to_dict()
        omitted = {"vision_tower": False, "format": "int4"}
        return {name: value for name, value in content.items() if value != omitted.get(name)}
