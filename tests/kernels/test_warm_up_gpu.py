"""After warm_up() no call compiles a kernel, and results have the same bits as without it, on a GPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from this_gpu import cupy

import cudatma
from cudatma.build import kernel as build
from cudatma.context import Runtime, using_runtime

pytestmark = pytest.mark.gpu

MAX_M = 300
Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def values(*shape: int) -> Any:
    return cupy.asarray(np.random.default_rng(len(shape)).standard_normal(shape, np.float32).astype(np.float16))


def gemm(m: int, shift: int) -> Call:
    """Run gemm with rows that begin ``shift`` elements after a multiple of 16 bytes."""
    return cudatma.gemm, (values(m, 512 + shift)[:, shift:], values(512, 768)), {"activation": "relu"}


def attention(length: int, shift: int) -> Call:
    heads = values(1, length, 4, 64)
    return cudatma.attention, (heads, heads, heads), {"causal": True, "window": (100, 0)}


def varlen(length: int, shift: int) -> Call:
    heads, ends = values(2 * length, 4, 64), cupy.asarray([0, length, 2 * length], np.int32)
    longest = {"max_seqlen_q": length, "max_seqlen_k": length}
    return cudatma.attention_varlen, (heads, heads, heads, ends, ends), {"causal": True, **longest}


def decode(length: int, shift: int) -> Call:
    cache = values(2, MAX_M, 4, 64)
    lengths = cupy.asarray([length, 1], np.int32)
    return cudatma.attention_decode, (values(2, 1 + shift, 8, 64), cache, cache, lengths), {}


@pytest.mark.parametrize("call", [gemm, attention, varlen, decode])
def test_no_call_compiles(call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(0)
    calls = [
        call(m, shift) for m in (1, 2, 17, MAX_M, *(draw.randint(1, MAX_M) for _ in range(20))) for shift in (0, 1)
    ]
    expected = [function(*operands, **options) for function, operands, options in calls]
    monkeypatch.setenv("CUDATMA_CACHE_DIR", str(tmp_path / "cache"))
    with using_runtime(Runtime()):
        function, operands, options = call(5, 0)
        cudatma.warm_up(function, operands, max_m=MAX_M, **options)
        monkeypatch.setattr(build, "compile_source", lambda *_, **__: pytest.fail("it compiles a kernel"))
        for (function, operands, options), result in zip(calls, expected, strict=True):
            assert (function(*operands, **options) == result).all()
