"""cudatma in PyTorch: the operators ``torch.ops.cudatma.*``, which importing it registers, and int4 modules."""

from cudatma.integrations.torch.linear import MarlinLinear
from cudatma.integrations.torch.operators import register
from cudatma.integrations.torch.parallel import ColumnParallel, RowParallel
from cudatma.integrations.torch.weights import forget

__all__ = ["ColumnParallel", "MarlinLinear", "RowParallel", "forget"]

register()
