"""Four-bit weights: quantize, pack, import from other tools, save and load."""

from cudatma.quantization.awq import from_awq, load_awq
from cudatma.quantization.checkpoint import Checkpoint, open_checkpoint
from cudatma.quantization.compressed_tensors import from_compressed_tensors, load_compressed_tensors
from cudatma.quantization.gptq import from_gptq, load_gptq
from cudatma.quantization.layout_v1 import LAYOUT_VERSION
from cudatma.quantization.marlin_layout import from_marlin, load_marlin
from cudatma.quantization.packed import GROUP_SIZES, LogicalWeight, PackedWeight, unpack
from cudatma.quantization.packing import pack
from cudatma.quantization.rounding import quantize, quantize_linear
from cudatma.quantization.sharding import shard
from cudatma.quantization.weights_file import load_weights, save_weights

__all__ = [
    "GROUP_SIZES",
    "LAYOUT_VERSION",
    "Checkpoint",
    "LogicalWeight",
    "PackedWeight",
    "from_awq",
    "from_compressed_tensors",
    "from_gptq",
    "from_marlin",
    "load_awq",
    "load_compressed_tensors",
    "load_gptq",
    "load_marlin",
    "load_weights",
    "open_checkpoint",
    "pack",
    "quantize",
    "quantize_linear",
    "save_weights",
    "shard",
    "unpack",
]
