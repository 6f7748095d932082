"""cudatma in PyTorch: the operators ``torch.ops.cudatma.*``, which importing it registers, and int4 modules."""

from cudatma.integrations.torch.linear import MarlinLinear
from cudatma.integrations.torch.operators import register

__all__ = ["MarlinLinear"]

register()
