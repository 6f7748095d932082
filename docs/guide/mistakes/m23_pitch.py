"""Rows that do not begin at multiples of 16 bytes."""

from __future__ import annotations

import numpy as np
from mistake import HostMistake

from cudatma import TensorMap

WRONG = """
x = np.zeros((1000, 1001), np.float32)
TensorMap.from_array(x, box=(64, 64))
"""
RIGHT = """
padded = np.zeros((1000, 1004), np.float32)
TensorMap.from_array(padded[:, :1001], box=(64, 64))  # a view of rows that do
"""
MISTAKE = HostMistake(WRONG, RIGHT, "DescriptorError", {"np": np, "TensorMap": TensorMap})

if __name__ == "__main__":
    MISTAKE.main()
