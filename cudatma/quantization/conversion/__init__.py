"""Convert a Hugging Face checkpoint into a folder with packed linear layers."""

from cudatma.quantization.conversion.convert import convert_checkpoint
from cudatma.quantization.conversion.report import Conversion, LayerReport

__all__ = ["Conversion", "LayerReport", "convert_checkpoint"]
