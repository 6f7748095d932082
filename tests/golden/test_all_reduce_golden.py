"""The source of the one-shot all-reduce, as text that is reviewed."""

from __future__ import annotations

from collections.abc import Callable

from cudatma.build.render import render
from cudatma.kernels.all_reduce.config import TEMPLATE, AllReduceConfig


def test_the_all_reduce(golden: Callable[[str, str], None]) -> None:
    golden("all_reduce.cu", render(TEMPLATE, AllReduceConfig(2, "float16"), "sm_90a"))
