"""Tensor maps explained: read from many sources, listed field by field and bit by bit, drawn, checked and compared."""

from cudatma.inspection.fields import describe_descriptor
from cudatma.inspection.inspection import Inspection, inspect

__all__ = ["Inspection", "describe_descriptor", "inspect"]
