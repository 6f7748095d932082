"""Quantized modules for PyTorch. Importing this package also registers the operators ``torch.ops.cudatma.*``."""

from cudatma.integrations.torch.all_reduce import AllReduce
from cudatma.integrations.torch.experts import ExpertWeights, marlin_moe
from cudatma.integrations.torch.linear import MarlinLinear, warm_up
from cudatma.integrations.torch.parallel import ColumnParallel, RowParallel
from cudatma.integrations.torch.weights import forget

__all__ = [
    "AllReduce",
    "ColumnParallel",
    "ExpertWeights",
    "MarlinLinear",
    "RowParallel",
    "forget",
    "marlin_moe",
    "warm_up",
]
