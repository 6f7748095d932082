"""Functions that decode, display, draw, check and compare tensor maps."""

from cudatma.inspection.fields import describe_descriptor
from cudatma.inspection.inspection import Inspection, inspect

__all__ = ["Inspection", "describe_descriptor", "inspect"]
