"""Quantize, pack, import, save and load four- and eight-bit weights."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cudatma.quantization.awq import from_awq, load_awq
    from cudatma.quantization.checkpoint import Checkpoint, open_checkpoint
    from cudatma.quantization.compressed_tensors import from_compressed_tensors, load_compressed_tensors
    from cudatma.quantization.experts import PackedExperts, pack_experts, quantize_experts
    from cudatma.quantization.gguf_file import load_gguf
    from cudatma.quantization.gptq import from_gptq, load_gptq
    from cudatma.quantization.layout_v1 import LAYOUT_VERSION
    from cudatma.quantization.marlin_layout import from_marlin, load_marlin
    from cudatma.quantization.packed import GROUP_SIZES, LogicalWeight, PackedWeight, pack, unpack
    from cudatma.quantization.rounding import quantize, quantize_linear
    from cudatma.quantization.sharding import shard
    from cudatma.quantization.weights_file import load_weights, save_weights

__all__ = [
    "GROUP_SIZES",
    "LAYOUT_VERSION",
    "Checkpoint",
    "LogicalWeight",
    "PackedExperts",
    "PackedWeight",
    "from_awq",
    "from_compressed_tensors",
    "from_gptq",
    "from_marlin",
    "load_awq",
    "load_compressed_tensors",
    "load_gguf",
    "load_gptq",
    "load_marlin",
    "load_weights",
    "open_checkpoint",
    "pack",
    "pack_experts",
    "quantize",
    "quantize_experts",
    "quantize_linear",
    "save_weights",
    "shard",
    "unpack",
]

#: Public names of each module. A module is imported when one of its names is first used (PEP 562).
_PUBLIC = {
    "awq": "from_awq load_awq",
    "checkpoint": "Checkpoint open_checkpoint",
    "compressed_tensors": "from_compressed_tensors load_compressed_tensors",
    "experts": "PackedExperts pack_experts quantize_experts",
    "gguf_file": "load_gguf",
    "gptq": "from_gptq load_gptq",
    "layout_v1": "LAYOUT_VERSION",
    "marlin_layout": "from_marlin load_marlin",
    "packed": "pack GROUP_SIZES LogicalWeight PackedWeight unpack",
    "rounding": "quantize quantize_linear",
    "sharding": "shard",
    "weights_file": "load_weights save_weights",
}
_MODULE_OF = {name: module for module, names in _PUBLIC.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
