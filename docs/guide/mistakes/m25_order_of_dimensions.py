"""TiledSpec and the driver count dimensions from the innermost; NumPy from the outermost."""

from __future__ import annotations

from mistake import HostMistake

WRONG = """
from cudatma import TiledSpec

# 512 rows of 100 columns, in boxes of 64 rows and 32 columns
TiledSpec(dtype="float32", dims=(512, 100), strides_bytes=(400,), box=(64, 32), swizzle="128B")
"""
RIGHT = """
from cudatma import TiledSpec

TiledSpec(dtype="float32", dims=(100, 512), strides_bytes=(400,), box=(32, 64), swizzle="128B")
"""
MISTAKE = HostMistake(WRONG, RIGHT, "DescriptorError")

if __name__ == "__main__":
    MISTAKE.main()
