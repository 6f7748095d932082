"""Stores clip at 16 bytes: rows that end inside of 16 bytes are overrun by up to 15."""

from __future__ import annotations

import numpy as np
from mistake import HostMistake

from cudatma import TensorMap
from cudatma.descriptor import check_store

WRONG = """
out = np.zeros((64, 104), np.float32)[:, :101]
check_store(TensorMap.from_array(out, box=(64, 64)).spec)
"""
RIGHT = """
out = np.zeros((64, 104), np.float32)
check_store(TensorMap.from_array(out, box=(64, 64)).spec)
"""
MISTAKE = HostMistake(WRONG, RIGHT, "DescriptorError", {"np": np, "TensorMap": TensorMap, "check_store": check_store})

if __name__ == "__main__":
    MISTAKE.main()
