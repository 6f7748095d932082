"""The box is given in bytes; it counts elements."""

from __future__ import annotations

from mistake import HostMistake

WRONG = """
import numpy as np
from cudatma import TensorMap

x = np.zeros((1024, 1024), np.float16)
TensorMap.from_array(x, box=(64, 128), swizzle="128B")  # 128 bytes a row were meant
"""
RIGHT = """
import numpy as np
from cudatma import TensorMap

x = np.zeros((1024, 1024), np.float16)
TensorMap.from_array(x, box=(64, 64), swizzle="128B")  # 64 halves are 128 bytes
"""
MISTAKE = HostMistake(WRONG, RIGHT, "DescriptorError")

if __name__ == "__main__":
    MISTAKE.main()
