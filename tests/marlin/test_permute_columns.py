"""The kernel that copies rows in the order of a permutation: exact, clean, and never outside of its arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ptx_of import ptx_of_template

from cudatma.arrays import describe
from cudatma.emulator import Report, load
from cudatma.errors import ArgumentError
from cudatma.kernels.host import host_bytes
from cudatma.kernels.marlin.permute_columns import (
    TEMPLATE,
    PermuteColumnsConfig,
    choose_permute,
    permute_arguments,
    permute_grid,
    permute_sizes,
    result_pitch_bytes,
    sample,
)
from cudatma.target import get_target

POISON = 0xDEAD
SM90A, SM120A = get_target("sm_90a"), get_target("sm_120a")


def run(
    config: PermuteColumnsConfig, x: Any, order: Any, *, target: str = "sm_90a", blocks: int = 3, **options: Any
) -> tuple[Any, Report]:
    """(the result's memory with one poisoned row after it; the report)."""
    rows, columns = x.shape
    result = np.full((rows + 1, result_pitch_bytes(columns) // 2), POISON, np.uint16)
    planned = permute_arguments(config, permute_sizes(config, rows, columns, x.strides[0], blocks))
    arrays = {"x": describe(x), "rows": describe(result)} | ({} if order is None else {"perm": describe(order)})
    options = {"produced_by_previous": (host_bytes(arrays["x"]),)} | options
    return result, planned.emulate(get_target(target), arrays, **options)


def rows_of(shape: tuple[int, int], pitch: int, offset: int = 0) -> Any:
    """Random rows in the midst of a poisoned buffer."""
    random = np.random.default_rng(shape)
    buffer = np.full((shape[0], pitch), POISON, np.uint16)
    buffer[:, offset : offset + shape[1]] = random.integers(0, 1 << 16, shape, np.uint16)
    return buffer[:, offset : offset + shape[1]]


STAGED = PermuteColumnsConfig(True, 192, rows=2, consumers=64)
DIRECT = PermuteColumnsConfig(True, rows=2, consumers=64)
COPY = PermuteColumnsConfig(False, rows=2, consumers=64)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("target", ["sm_90a", "sm_120a"])
@pytest.mark.parametrize(
    ("config", "shape", "pitch", "offset"),
    [
        (STAGED, (9, 192), 192, 0),  # the ring wraps; an odd row at the end
        (STAGED, (1, 136), 200, 8),
        (PermuteColumnsConfig(True, 192, rows=1, stages=1, consumers=32), (7, 184), 192, 0),
        (DIRECT, (5, 77), 77, 0),
        (DIRECT, (4, 64), 81, 3),
        (COPY, (5, 77), 79, 1),
        (COPY, (1, 1), 1, 0),
    ],
    ids=str,
)
def test_every_element_goes_to_its_place(
    config: PermuteColumnsConfig, shape: tuple[int, int], pitch: int, offset: int, target: str
) -> None:
    x = rows_of(shape, pitch, offset)
    order = np.random.default_rng(1).permutation(shape[1]).astype(np.int32) if config.has_permutation else None
    result, report = run(config, x, order, target=target, schedules=6)
    assert report.is_clean
    np.testing.assert_array_equal(result[:-1, : shape[1]], x if order is None else x[:, order])
    assert (result[-1] == POISON).all()
    # The last chunk is written whole; what follows it in the pitch is left alone.
    assert (result[:-1, -(-shape[1] // 8) * 8 :] == POISON).all()


@pytest.mark.parametrize("config", [STAGED, DIRECT], ids=str)
def test_a_hostile_order_reads_nothing_outside(config: PermuteColumnsConfig) -> None:
    """Weights are checked when they are made, but their arrays can be written to afterwards."""
    x = rows_of((4, 64), 64)
    order = np.arange(64, dtype=np.int32)
    order[[0, 9, 63]] = (-1, 64, 2**31 - 1)
    result, report = run(config, x, order, schedules=4)
    assert report.is_clean
    np.testing.assert_array_equal(result[:-1, :64], x[:, np.where((order < 0) | (order > 63), 63, order)])


def test_one_row_read_many_times() -> None:
    x = np.broadcast_to(np.arange(64, dtype=np.uint16), (5, 64))
    order = np.random.default_rng(2).permutation(64).astype(np.int32)
    result, report = run(STAGED, x, order)
    assert report.is_clean
    np.testing.assert_array_equal(result[:-1, :64], x[:, order])


def test_the_wait_for_the_kernel_before_is_needed() -> None:
    """Without it, in a programmatic chain, both the reading of x and the writing of the rows come too early."""
    x, order = rows_of((4, 64), 64), np.arange(64, dtype=np.int32)
    ptx = ptx_of_template(TEMPLATE, STAGED, "sm_90a").replace("griddepcontrol.wait;", "")
    result = np.zeros((4, 64), np.uint16)
    planned = permute_arguments(STAGED, permute_sizes(STAGED, 4, 64, 128, 2, programmatic=True))
    arrays = {"x": describe(x), "perm": describe(order), "rows": describe(result)}
    report = load(ptx).launch(
        *(STAGED.entry, planned.sizes.grid, STAGED.threads, planned.filled(arrays)),
        shared_bytes=STAGED.smem_bytes,
        arrays=(x, order, result),
        produced_by_previous=(x,),
        hazards="collect",
    )
    assert not report.is_clean


@pytest.mark.parametrize("options", [{}, {"path": "direct"}, {"path": "copy", "columns": 77}, {"rows": 1}], ids=str)
def test_the_sample(options: dict[str, Any]) -> None:
    made = sample(SM90A, **options)
    assert made.run(schedules=2).is_clean
    assert made.error() == 0


def test_which_instance_serves() -> None:
    def chosen(rows: int, columns: int, target: Any = SM90A, **options: Any) -> PermuteColumnsConfig:
        facts = {"has_permutation": True, "is_aligned": True} | options
        return choose_permute(rows, columns, target=target, sm_count=132, **facts)

    assert chosen(1, 8192) == PermuteColumnsConfig(True, 8192)
    assert chosen(4096, 4096).rows == 4
    assert chosen(4096, 8192).rows == 2
    assert chosen(4096, 28672).stages == 1
    for target in (SM90A, SM120A):
        for columns in range(8, 140_000, 4088):
            config = chosen(600, columns, target)
            config.check_target(target)
            assert not config.is_staged or config.staged_columns >= columns
    # What only element loads can bring.
    for config in (chosen(9, 8191), chosen(9, 8192, is_aligned=False), chosen(9, 8192, has_permutation=False)):
        assert not config.is_staged
    assert not chosen(9, 65544).is_staged
    assert not chosen(9, 65536, SM120A).is_staged
    assert chosen(9, 65536).is_staged


@pytest.mark.parametrize("rows", [1, 3, 16, 100, 5000])
@pytest.mark.parametrize("columns", [1, 64, 8192, 65536])
def test_no_more_blocks_than_run_at_a_time(rows: int, columns: int) -> None:
    for config in (DIRECT, STAGED, PermuteColumnsConfig(True, 8192)):
        across, down = permute_grid(config, rows, columns, 132)
        assert 1 <= across * down <= 132
        assert down <= -(-rows // config.rows)
        assert across <= -(-columns // 8 // config.consumers) or across == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [("staged_columns", 100), ("staged_columns", 1 << 17), ("rows", 0), ("stages", 0), ("consumers", 48)],
)
def test_what_a_config_refuses(field: str, value: int) -> None:
    with pytest.raises(ArgumentError) as caught:
        PermuteColumnsConfig(**{"has_permutation": True, field: value})
    assert caught.value.field == field
    with pytest.raises(ArgumentError, match="staged_columns"):
        PermuteColumnsConfig(False, 64)
