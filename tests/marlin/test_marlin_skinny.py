"""The skinny GEMM on the CPU: right, and free of hazards in several schedules, however the N tiles lie."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from marlin_builders import skinny
from marlin_runner import TOLERANCE, launch_programmatically, operands, relative_error, run_marlin

from cudatma.errors import ArgumentError, DescriptorError
from cudatma.kernels.marlin.config import MarlinConfig

SCHEDULES = 1  # tests/mutants runs these kernels in others


def config(**fields: Any) -> MarlinConfig:
    base: dict[str, Any] = {"tile_m": 8, "tile_n": 64}
    base |= {"tile_k": 128, "slice_k": 1, "stages": 2, "deep_box": fields.get("tile_m", 8) < 8}
    return skinny(**{**base, **fields})


#: Whole rows, half rows at either end of a CTA's tile, a ring that wraps, one longer than K, tails in M, N and K.
CASES = {
    "whole_rows": (5, 640, 200, config(tile_n=128, slice_k=2)),
    "half_a_row": (8, 384, 96, config(tile_n=32, slice_k=2)),
    "odd_n_tiles": (3, 520, 290, config(tile_n=96, stages=3)),
    "ring_deeper_than_k": (8, 136, 64, config(tile_n=32, stages=4)),
    "two_token_tiles": (19, 384, 64, config(tile_m=16)),
    "32_tokens": (29, 256, 96, config(tile_m=32, tile_n=96)),
    "bf16_zeros_64": (8, 392, 160, config(dtype="bfloat16", group_size=64, has_zeros=True, tile_n=160)),
    "zeros_32": (7, 328, 130, config(group_size=32, has_zeros=True, tile_n=96, tile_k=256, slice_k=4)),
    "column_zeros": (9, 304, 98, config(group_size=-1, has_zeros=True, tile_m=16, tile_n=32, dtype="bfloat16")),
    "column_zeros_short": (7, 264, 192, config(tile_n=96, group_size=-1, has_zeros=True, tile_k=256, slice_k=4)),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", CASES)
def test_products_are_right_and_clean(name: str) -> None:
    m, k, n, of = CASES[name]
    x, w, bias = operands(m, k, n, of)
    out, report = run_marlin(x, w, config=of, processors=1, bias=bias, schedules=SCHEDULES)
    assert report.is_clean
    assert relative_error(out, x, w, bias) < TOLERANCE[of.dtype]


#: A cluster divides K: evenly or not, into a stage each, into rings that wrap; columns of warps for each of its
#: blocks, for some, of several, more for one than for another.
CLUSTERS = {
    "2_columns_for_2": (5, 1096, 200, config(tile_n=128, slice_k=2, cluster_k=2)),
    "1_column_for_4": (8, 1024, 64, config(tile_n=32, cluster_k=4, deep_box=True)),
    "3_columns_for_8": (3, 2184, 290, config(tile_n=96, stages=2, cluster_k=8)),
    "a_stage_each": (4, 264, 96, config(tile_n=64, cluster_k=3)),
    "3_columns_for_2_zeros": (6, 776, 130, config(group_size=32, has_zeros=True, tile_n=96, slice_k=2, cluster_k=2)),
    "32_tokens_bf16_zeros": (
        29, 768, 96, config(tile_m=32, dtype="bfloat16", has_zeros=True, group_size=64, cluster_k=6),
    ),
}  # fmt: skip


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", CLUSTERS)
def test_blocks_of_a_cluster_divide_k(name: str) -> None:
    m, k, n, of = CLUSTERS[name]
    x, w, bias = operands(m, k, n, of)
    out, report = run_marlin(x, w, config=of, processors=1, bias=bias, schedules=SCHEDULES)
    assert report.is_clean
    assert relative_error(out, x, w, bias) < TOLERANCE[of.dtype]


@pytest.mark.slow
def test_a_cluster_adds_up_in_a_fixed_order() -> None:
    """Whoever comes first: sums wait in places of their own."""
    m, k, n, of = CLUSTERS["a_stage_each"]
    x, w, _ = operands(m, k, n, of)
    runs = [run_marlin(x, w, config=of, processors=1, schedules=1, replay=replay)[0] for replay in (0, 1, 7)]
    assert len({out.tobytes() for out in runs}) == 1


def test_no_block_of_a_cluster_is_without_a_stage() -> None:
    of = config(tile_n=64, cluster_k=4)
    x, w, _ = operands(4, 264, 96, of)
    with pytest.raises(ArgumentError, match=r"at most 3 \(the number of stages along K\)") as caught:
        run_marlin(x, w, config=of, processors=1, schedules=1)
    assert caught.value.field == "cluster_k"


#: Values of K that are multiples of 64: stages that K fills, one that it ends in, and more stages than it has.
DEEP = {
    "whole_rows": CASES["whole_rows"],
    "half_a_stage": (8, 320, 96, config(tile_n=32, slice_k=2)),
    "ring_deeper_than_k": (3, 64, 290, config(tile_n=96, tile_k=256, slice_k=4, stages=4)),
    "32_tokens_16_blocks": (29, 1088, 96, config(tile_m=32, tile_k=1024, slice_k=4)),
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", DEEP)
def test_one_box_brings_what_several_do(name: str) -> None:
    m, k, n, of = DEEP[name]
    x, w, bias = operands(m, k, n, of)
    wide = np.full((m, k + 8), np.nan).astype(x.dtype)  # a window of a larger array
    wide[:, :k] = x
    deep, report = run_marlin(
        wide[:, :k], w, config=replace(of, deep_box=True), processors=1, bias=bias, schedules=SCHEDULES
    )
    assert report.is_clean
    flat, _ = run_marlin(x, w, config=of, processors=1, bias=bias, schedules=1)
    assert deep.tobytes() == flat.tobytes()
    assert relative_error(deep, x, w, bias) < TOLERANCE[of.dtype]


#: A smaller M than the mma has columns: rows of 64 elements of K are side by side under the swizzle, which repeats
#: after eight. A K of 64 for each warp or more; tiles with a row less; several M tiles.
FEW = {
    "1_in_1024": (1, 2048, 64, config(tile_m=1, tile_k=1024, slice_k=8, tile_n=32)),
    "2": (2, 576, 230, config(tile_m=2, tile_k=256, slice_k=4, tile_n=96, stages=3)),
    "3_of_4_bf16_zeros": (
        3, 832, 160,
        config(tile_m=4, tile_k=256, dtype="bfloat16", group_size=64, has_zeros=True, tile_n=160, slice_k=2),
    ),
    "5_in_tiles_of_2": (5, 512, 96, config(tile_m=2, tile_k=256, slice_k=2, tile_n=96)),
    "cluster": (1, 2112, 96, config(tile_m=1, tile_k=512, slice_k=2, tile_n=96, cluster_k=3)),
}  # fmt: skip


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", FEW)
def test_a_tile_of_smaller_m_than_the_mma_has_columns(name: str) -> None:
    """The same bits as with eight, of which TMA fills most with zeros; what repeated columns hold goes nowhere."""
    m, k, n, of = FEW[name]
    x, w, bias = operands(m, k, n, of)
    few, report = run_marlin(x, w, config=of, processors=1, bias=bias, schedules=SCHEDULES)
    assert report.is_clean
    eight, _ = run_marlin(x, w, config=replace(of, tile_m=8), processors=1, bias=bias, schedules=1)
    assert few.tobytes() == eight.tobytes()
    assert relative_error(few, x, w, bias) < TOLERANCE[of.dtype]


def test_one_box_takes_whole_blocks_of_k() -> None:
    of = config(deep_box=True)
    x, w, _ = operands(8, 136, 64, of)
    with pytest.raises(DescriptorError, match="a divisor of K = 136") as caught:
        run_marlin(x, w, config=of, processors=1, schedules=1)
    assert caught.value.field == "tile_k"


#: Cases whose weights are prefetched, and the number of stages.
PREFETCHED = {
    "ring_deeper_than_k": (CASES["ring_deeper_than_k"], 16),
    "column_zeros_short": (CASES["column_zeros_short"], 2),
    "cluster": (CLUSTERS["2_columns_for_2"], 2),
    "deep_box": ((3, 640, 290, config(tile_n=96, stages=3, deep_box=True)), 2),
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", PREFETCHED)
def test_prefetched_weights(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A programmatic dependent launch: the first stages' weights come before the wait, and are not asked for twice."""
    (m, k, n, of), stages = PREFETCHED[name]
    monkeypatch.setattr(MarlinConfig, "prefetch_stages", lambda config, weight_bytes: stages)
    launch_programmatically(monkeypatch)
    x, w, _ = operands(m, k, n, of)
    out, report = run_marlin(x, w, config=of, processors=1, schedules=SCHEDULES)
    assert report.is_clean
    assert relative_error(out, x, w) < TOLERANCE[of.dtype]
