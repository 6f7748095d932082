"""How a checkpoint's linear layers are quantized: read from its quantization_config, without any of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cudatma.errors import QuantizationError, WeightFileError
from cudatma.quantization.awq import from_awq
from cudatma.quantization.compressed_tensors import from_compressed_tensors
from cudatma.quantization.gptq import configured_format, from_gptq
from cudatma.quantization.importing import check_bits
from cudatma.quantization.packed import PackedWeight

#: quant_method -> the tensors of a layer, the first of which names it, and those that a layer may have.
_TENSORS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "gptq": (("qweight", "qzeros", "scales"), ("g_idx",)),
    "awq": (("qweight", "qzeros", "scales"), ()),
    "compressed-tensors": (
        ("weight_packed", "weight_scale", "weight_shape"),
        ("weight_zero_point", "weight_g_idx"),
    ),
}
METHODS = tuple(_TENSORS)


@dataclass(frozen=True, slots=True)
class Scheme:
    """method: one of METHODS. zero_point_format: as from_gptq()'s. act_order: each layer has to have its g_idx."""

    method: str
    zero_point_format: str = "v1"
    act_order: bool = False

    @property
    def required(self) -> tuple[str, ...]:
        """The tensors that each layer has; the first is found in no other module."""
        return _TENSORS[self.method][0]

    @property
    def optional(self) -> tuple[str, ...]:
        """The tensors that a layer may have."""
        return _TENSORS[self.method][1]

    @property
    def scales(self) -> str:
        """The name of a layer's scales."""
        return "weight_scale" if self.method == "compressed-tensors" else "scales"

    def missing(self, names: Mapping[str, Any]) -> list[str]:
        """What a layer with tensors of these names lacks."""
        order = self.optional[-1:] if self.act_order else ()
        return [name for name in (*self.required, *order) if name not in names]

    def extent(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int, int]:
        """(K, N, G) of a layer by the shapes of its tensors; K may be up to 7 too large. QuantizationError for shapes
        that are no matrices."""
        matrices = (self.required[0], self.scales)
        for name in matrices:
            if len(shapes[name]) != 2 and not (name == "weight_scale" and len(shapes[name]) == 1):
                raise QuantizationError(name, shapes[name], "two dimensions")
        words, scales = (shapes[name] for name in matrices)
        if self.method == "gptq":
            return 8 * words[0], words[1], scales[0]
        if self.method == "awq":
            return words[0], 8 * words[1], scales[0]
        return 8 * words[1], words[0], scales[1] if len(scales) == 2 else 1

    def pack(self, tensors: Mapping[str, Any], *, dtype: Any = None) -> PackedWeight:
        """A layer's PackedWeight from its tensors (NumPy or torch) by their names without the layer's.

        dtype: of the scales; None keeps theirs. Raises QuantizationError, ArgumentTypeError.
        """
        values = [tensors.get(name) for name in (*self.required, *self.optional)]
        if self.method == "gptq":
            return from_gptq(*values, zero_point_format=self.zero_point_format, dtype=dtype)
        if self.method == "awq":
            return from_awq(*values, dtype=dtype)
        return from_compressed_tensors(*values, dtype=dtype)


def read_scheme(section: Mapping[str, Any], where: str) -> Scheme:
    """The Scheme that a quantization_config asks for.

    where: the file and key that it came from, for errors. Raises QuantizationError for bits other than 4,
    WeightFileError for other methods, and for variants of these methods that cannot be packed.
    """
    method = section.get("quant_method", "gptq" if "desc_act" in section else None)
    if method == "gptq":
        check_bits(_value(section, "bits", int, where, 4))
        grouped = _value(section, "group_size", int, where, 128) != -1
        order = bool(section.get("desc_act")) and grouped
        return Scheme("gptq", configured_format(section, where), order)
    if method == "awq":
        check_bits(_value(section, "bits", int, where, _value(section, "w_bit", int, where, 4)))
        version = str(section.get("version", "gemm")).lower()
        if version != "gemm":
            raise WeightFileError(f"{where}: version", version, "gemm", "quantize the model again in that version")
        return Scheme("awq")
    if method == "compressed-tensors":
        return _compressed(section, where)
    remedy = "quantize the original float checkpoint: cudatma convert --quantize"
    raise WeightFileError(f"{where}: quant_method", str(method), ", ".join(METHODS), remedy)


def _compressed(section: Mapping[str, Any], where: str) -> Scheme:
    groups = section.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise WeightFileError(f"{where}: config_groups", repr(groups)[:80], "an object of groups")
    act_order = False
    for name, group in groups.items():
        field = f"{where}: config_groups.{name}"
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise WeightFileError(f"{field}.weights", repr(weights)[:80], "an object with num_bits, type, strategy")
        stored = group.get("format") or section.get("format")
        if stored != "pack-quantized" or weights.get("type", "int") != "int":
            got = f"format {stored}, type {weights.get('type')}"
            raise WeightFileError(field, got, "format pack-quantized, type int", "quantize the float checkpoint")
        check_bits(_value(weights, "num_bits", int, f"{field}.weights", 4))
        if group.get("input_activations") is not None:
            raise WeightFileError(f"{field}.input_activations", "quantized", "null: fp16 or bf16 activations (W4A16)")
        act_order |= weights.get("actorder") == "group"
    return Scheme("compressed-tensors", act_order=act_order and len(groups) == 1)


def _value(section: Mapping[str, Any], name: str, kind: type, where: str, default: Any) -> Any:
    value = section.get(name, default)
    if type(value) is not kind:
        raise WeightFileError(f"{where}: {name}", repr(value)[:80], kind.__name__)
    return value
