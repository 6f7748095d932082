"""Report on compiled kernels and compare two builds.

A report contains resources, occupancy, instructions with their source lines, loops, and hazards that are visible only
in machine code.
"""

from cudatma.review.difference import Difference, compare
from cudatma.review.images import Image, assembled, disassembled, read_images
from cudatma.review.report import KernelReport, reports

__all__ = ["Difference", "Image", "KernelReport", "assembled", "compare", "disassembled", "read_images", "reports"]
