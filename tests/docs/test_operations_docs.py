"""The page of the operations: its tables name what there is."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

import cudatma
from cudatma.dtypes import BFLOAT16
from cudatma.kernels.data_movement.reduce import OPS, check_dtype

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "operations.md").read_text()


def test_every_function_is_named_and_offered() -> None:
    named = set(re.findall(r"`(\w+)\(", PAGE.split("```python")[0]))
    offered = {name for name, module in cudatma._MODULE_OF.items() if module.startswith("kernels.data_movement.")}
    assert named == offered - {"RaggedCopy", "ragged_copy", "tile_copy"}, "the last three have examples of their own"


def test_the_table_of_reductions() -> None:
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| ([a-z0-9 ]+) \|$", PAGE, re.MULTILINE)
    found = {op: dtypes for ops, dtypes in rows for op in re.findall(r"`(\w+)`", ops)}
    assert set(found) == set(OPS)
    for op, dtypes in found.items():
        if op not in ("and", "or", "xor"):
            for name in dtypes.split():
                check_dtype(BFLOAT16 if name == "bfloat16" else np.dtype(name), op)
