"""The numbers that one launch passes to a Marlin kernel, besides its tensor maps and pointers. Pure.

Those of every kernel that computes tiles are in ``work_struct``; these are of packed weights and their scales.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

from cudatma.dtypes import activation_type
from cudatma.kernels import work_struct
from cudatma.kernels.launch_struct import Member
from cudatma.kernels.schedule import Schedule, ceil_div
from cudatma.kernels.work_struct import work_values
from cudatma.quantization.layout_v1 import SYMMETRIC_ZERO

_MEMBERS = work_struct.MEMBERS | {
    member.name: member
    for member in (
        Member("weight_rows", "u32", "64 x 64 blocks of packed weights"),
        Member("weight_row_blocks", "u32", "of them, blocks along K"),
        Member("scale_rows", "u32", "groups of scales along K"),
        Member("scale_pitch", "u32", "columns of a row of scales, padded"),
        Member("prefetch_stages", "u32", "stages whose weights a dependent launch loads before it waits"),
        Member("scale_offset", "u32", "-8 2^-p in both halves: scales are multiplied by it"),
        Member("scale_back", "float", "2^p: sums are multiplied by it"),
        Member("activation_pitch", "u64", "elements from one row to the next"),
    )
}


class ProblemSpec(Protocol):
    """What the numbers depend on, of a spec."""

    @property
    def dtype(self) -> str: ...
    @property
    def block_m(self) -> int: ...
    def prefetch_stages(self, weight_bytes: int) -> int: ...


def members(names: Iterable[str]) -> tuple[Member, ...]:
    """The members of these names, in the struct's order."""
    return work_struct.in_order(_MEMBERS, names)


def problem_values(
    spec: ProblemSpec,
    work: Schedule,
    m: int,
    n: int,
    k: int,
    scale_rows: int,
    *,
    activation_pitch: int = 0,
    output_pitch: int = 0,
    output_vectors: bool = False,
    programmatic: bool = False,
    scale_exponent: int = 0,
) -> dict[str, Any]:
    """Every member's value by name.

    activation_pitch, output_pitch: elements. output_vectors: whether the result's rows are aligned to 16 bytes.
    programmatic: a dependent launch. scale_exponent: p of 2^-p, by which a fused kernel multiplies scales
    (``PackedWeight.scale_fit``).
    """
    weight_row_blocks = ceil_div(k, 64)
    offset = np.array(-SYMMETRIC_ZERO * 2.0**-scale_exponent, activation_type(spec.dtype).numpy).view(np.uint16)
    common = work_values(work, m, n, k, spec.block_m, output_pitch=output_pitch, output_vectors=output_vectors)
    return common | {
        "weight_rows": ceil_div(n, 64) * weight_row_blocks,
        "weight_row_blocks": weight_row_blocks,
        "scale_rows": scale_rows,
        "scale_pitch": 64 * ceil_div(n, 64),
        "prefetch_stages": spec.prefetch_stages(k * n // 2) if programmatic else 0,
        "scale_offset": int(offset) << 16 | int(offset),
        "scale_back": 2.0**scale_exponent,
        "activation_pitch": activation_pitch,
    }
