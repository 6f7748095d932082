"""Whole models: a Hugging Face checkpoint's folder to one whose linear layers are packed."""

from cudatma.quantization.conversion.convert import convert_checkpoint
from cudatma.quantization.conversion.report import Conversion, LayerReport

__all__ = ["Conversion", "LayerReport", "convert_checkpoint"]
