"""Rows that do not begin at multiples of 16 bytes."""

from __future__ import annotations

from mistake import HostMistake

WRONG = """
import numpy as np
from cudatma import TensorMap

x = np.zeros((1000, 1001), np.float32)
TensorMap.from_array(x, box=(64, 64))
"""
RIGHT = """
import numpy as np
from cudatma import TensorMap

padded = np.zeros((1000, 1004), np.float32)
TensorMap.from_array(padded[:, :1001], box=(64, 64))  # a view of rows that do
"""
MISTAKE = HostMistake(WRONG, RIGHT, "DescriptorError")

if __name__ == "__main__":
    MISTAKE.main()
