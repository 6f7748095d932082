"""The kernels that run with the GEMM as subjects: columns permuted before it, weights dequantized instead of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from data_movement_subjects import call_of
from subject import Subject

from cudatma.kernels.marlin.dequantize import TEMPLATE as DEQUANTIZE
from cudatma.kernels.marlin.dequantize import DequantizeConfig, dense_pitch_bytes, on_host
from cudatma.kernels.marlin.permute_columns import TEMPLATE as PERMUTE
from cudatma.kernels.marlin.permute_columns import (
    PermuteColumnsConfig,
    permute_arguments,
    permute_sizes,
    result_pitch_bytes,
)
from cudatma.mutants.mutant import Call
from cudatma.quantization import quantize

_TARGET = "sm_90a"
_ROWS, _COLUMNS = 13, 128
#: A K with which a CTA's ring and the two buffers of a warp are used several times.
_K, _N = 400, 200


def _permute_call(config: PermuteColumnsConfig) -> Callable[[], Call]:
    def make() -> Call:
        random = np.random.default_rng(3)
        x = random.integers(0, 1 << 16, (_ROWS, _COLUMNS), np.uint16)
        order = random.permutation(_COLUMNS).astype(np.int32)
        result = np.zeros((_ROWS, result_pitch_bytes(_COLUMNS) // 2), np.uint16)
        planned = permute_arguments(config, permute_sizes(config, _ROWS, _COLUMNS, x.strides[0], 1))
        # As after another kernel of a programmatic chain, which writes the rows that are permuted.
        return call_of(planned, {"x": x, "perm": order, "rows": result}, options=(("produced_by_previous", (x,)),))

    return make


def _dequantize_call(config: DequantizeConfig) -> Callable[[], Call]:
    def make() -> Call:
        random = np.random.default_rng(4)
        values = random.standard_normal((_K, _N), np.float32)
        w = quantize(values, group_size=config.group_size, symmetric=not config.has_zeros, dtype=config.dtype)
        if config.has_permutation:
            w = replace(w, perm=random.permutation(_K).astype(np.int32))
        out = np.zeros((_K, dense_pitch_bytes(_N) // 2), w.scales.dtype)
        return call_of(*on_host(w, out[:, :_N], config=config, resident=1))

    return make


def path_subjects() -> list[Subject]:
    """Each kernel, with each path of its operands and its result."""
    permute = {"staged": PermuteColumnsConfig(True, 128, rows=2, consumers=64), "direct": PermuteColumnsConfig(True)}
    dense = {
        "tiles": DequantizeConfig("float16", 128, False, warps=2),
        "rows_zeros": DequantizeConfig("bfloat16", 32, True, True),
    }
    return [
        *(Subject(f"permute_columns/{name}", PERMUTE, s, _permute_call(s), _TARGET) for name, s in permute.items()),
        *(Subject(f"dequantize/{name}", DEQUANTIZE, s, _dequantize_call(s), _TARGET) for name, s in dense.items()),
    ]
