"""cudatma in Hugging Face's transformers: int4 models and attention, after register()."""

from cudatma.integrations.transformers.config import CudatmaConfig
from cudatma.integrations.transformers.registration import load, register

__all__ = ["CudatmaConfig", "load", "register"]
