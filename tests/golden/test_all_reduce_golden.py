"""The source of the one-shot all-reduce, as text that is reviewed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cudatma.kernels.all_reduce.spec import TEMPLATE, AllReduceSpec


def test_the_all_reduce(golden: Callable[[str, str], None], kernel_source: Callable[[str, Any, str], str]) -> None:
    golden("all_reduce_sm_90a.cu", kernel_source(TEMPLATE, AllReduceSpec(2, "float16"), "sm_90a"))
