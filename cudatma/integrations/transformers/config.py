"""The class CudatmaConfig, the quantization_config of models with MarlinLinear layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from cudatma.errors import ArgumentError, ArgumentTypeError, QuantizationError
from cudatma.quantization.conversion.folder import METHOD, quantization_config
from cudatma.quantization.layout_v1 import LAYOUT_VERSION
from cudatma.quantization.packed import check_group_size
from cudatma.quantization.storage import supported_versions
from cudatma.quantization.weight_format import weight_format

_FACTS = ("group_size", "symmetric", "act_order", "format", "tensor_scale")


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
        Whether to also quantize the encoders of images, video and audio.
    dtype, act_order, format, tensor_scale, layers, source, bits, layout_version : optional
        Fields that `cudatma convert` and save_pretrained() write. ``dtype`` is the type of the scales. ``format``, by
        default "int4", is the format of the weights; see ``cudatma.quantize``. ``layers`` maps the name of each packed
        layer to the facts that differ from group_size, symmetric, act_order, format and tensor_scale. ``source`` is the
        quantization_config of the model that load() packs.
    quant_method : str
        Ignored. Accepted because config.json contains this key.

    Raises
    ------
    ArgumentError, ArgumentTypeError, QuantizationError
        If a value is invalid.
    """

    def __init__(
        self,
        group_size: int = 128,
        symmetric: bool = True,
        clip_search: bool = False,
        modules_to_not_convert: Sequence[str] | None = None,
        vision_tower: bool = False,
        *,
        dtype: str | None = None,
        act_order: bool = False,
        format: str = "int4",
        tensor_scale: float = 1.0,
        layers: Mapping[str, Mapping[str, Any]] | None = None,
        source: Mapping[str, Any] | None = None,
        bits: int | None = None,
        layout_version: int = LAYOUT_VERSION,
        quant_method: str = METHOD,
    ) -> None:
        check_group_size(group_size, format)
        flags = {"symmetric": symmetric, "clip_search": clip_search, "act_order": act_order}
        for name, flag in (flags | {"vision_tower": vision_tower}).items():
            if type(flag) is not bool:
                raise ArgumentTypeError(name, type(flag).__name__, "bool")
        expected = weight_format(format).bits
        if bits not in (None, expected):
            raise QuantizationError("bits", repr(bits), f"{expected} for format {format!r}")
        if layout_version not in supported_versions():
            supported = ", ".join(map(str, supported_versions()))
            raise QuantizationError("layout_version", layout_version, supported, "convert the checkpoint again")
        names = () if modules_to_not_convert is None else modules_to_not_convert
        if isinstance(names, str) or not isinstance(names, Sequence) or any(type(name) is not str for name in names):
            raise ArgumentTypeError("modules_to_not_convert", repr(names)[:80], "a list of names")
        if layers is not None and not isinstance(layers, Mapping):
            raise ArgumentTypeError("layers", repr(layers)[:80], "a mapping of layer names to facts")
        for name, facts in (layers or {}).items():
            if not isinstance(facts, Mapping) or not set(facts) <= set(_FACTS):
                raise ArgumentError(
                    f"layers[{name!r}]", repr(facts)[:80], f"a mapping with keys from {', '.join(_FACTS)}"
                )
        self.quant_method = METHOD
        self.bits, self.layout_version, self.dtype = expected, layout_version, dtype
        self.format, self.tensor_scale = format, tensor_scale
        self.group_size, self.symmetric, self.act_order = group_size, symmetric, act_order
        self.clip_search, self.vision_tower = clip_search, vision_tower
        self.modules_to_not_convert = None if modules_to_not_convert is None else list(modules_to_not_convert)
        self.layers = None if layers is None else {name: dict(facts) for name, facts in layers.items()}
        self.source = None if source is None else dict(source)

    def facts(self, layer: str) -> dict[str, Any]:
        """Return group_size, symmetric, act_order, format and tensor_scale of a packed layer.

        Parameters
        ----------
        layer : str
            The layer's name.

        Returns
        -------
        dict
            The values by name.
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
            for name in ("dtype", "layers", "bits", *_FACTS):
                setattr(self, name, section.get(name, getattr(self, name)))
        self.source = None

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as a dict for config.json.

        Returns
        -------
        dict
            The options, without values that are None and without the defaults of ``vision_tower`` and ``format``.
        """
        content: dict[str, Any] = super().to_dict()
        if not self.vision_tower:
            del content["vision_tower"]
        if self.format == "int4":
            del content["format"], content["tensor_scale"]
        return {name: value for name, value in content.items() if value is not None}
