"""Stores clip at 16 bytes: rows that end inside a 16-byte chunk are overrun by up to 15 bytes."""

from __future__ import annotations

from mistake import HostMistake

WRONG = """
import numpy as np
from cudatma import TensorMap
from cudatma.descriptor import check_store

out = np.zeros((64, 104), np.float32)[:, :101]
check_store(TensorMap.from_array(out, box=(64, 64)).spec)
"""
RIGHT = """
import numpy as np
from cudatma import TensorMap
from cudatma.descriptor import check_store

out = np.zeros((64, 104), np.float32)
check_store(TensorMap.from_array(out, box=(64, 64)).spec)
"""
MISTAKE = HostMistake(WRONG, RIGHT, "DescriptorError")

if __name__ == "__main__":
    MISTAKE.main()
