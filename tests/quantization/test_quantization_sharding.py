"""Parts of packed weights have the values of the whole, in memory of their own; what cannot be divided is named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cudatma.dtypes import BFLOAT16
from cudatma.errors import ArgumentError, ArgumentTypeError, QuantizationError
from cudatma.quantization import PackedWeight, pack, shard, unpack


def weight_of(
    k: int, n: int, group_size: int, *, zeros: bool = True, perm: bool = False, dtype: Any = np.float16
) -> PackedWeight:
    draw = np.random.default_rng(k + n)
    groups = 1 if group_size == -1 else -(-k // group_size)
    q = draw.integers(0, 16, (k, n), dtype=np.uint8)
    scales = draw.uniform(-1, 1, (groups, n)).astype(dtype)
    points = draw.integers(0, 17, (groups, n), dtype=np.uint8) if zeros else None
    return pack(q, scales, points, group_size=group_size, perm=draw.permutation(k) if perm else None)


# Whole blocks of 64; parts that begin within one; a tail within the last block; a last group that is shorter.
COLUMNS = [(128, 256, 2), (100, 384, 3), (128, 72, 3), (64, 10, 5), (130, 200, 1)]
ROWS = [(256, 100, 64, 2), (384, 64, 128, 3), (192, 70, 32, 6), (96, 64, 32, 3), (90, 64, -1, 3), (256, 64, -1, 2)]


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16])
@pytest.mark.parametrize(("zeros", "perm"), [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize(("k", "n", "count"), COLUMNS)
def test_parts_by_columns_are_slices_of_the_whole(
    k: int, n: int, count: int, zeros: bool, perm: bool, dtype: Any
) -> None:
    weight = weight_of(k, n, 32, zeros=zeros, perm=perm, dtype=dtype)
    parts = [shard(weight, index, count, by="columns") for index in range(count)]
    assert {part.shape for part in parts} == {(k, n // count)}
    assert all(part.symmetric == weight.symmetric and part.dtype == weight.dtype for part in parts)
    np.testing.assert_array_equal(np.concatenate([part.dequantize() for part in parts], 1), weight.dequantize())


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("k", "n", "group_size", "count"), ROWS)
def test_parts_by_rows_are_slices_of_the_whole(k: int, n: int, group_size: int, count: int, zeros: bool) -> None:
    weight = weight_of(k, n, group_size, zeros=zeros)
    parts = [shard(weight, index, count, by="rows") for index in range(count)]
    assert {part.shape for part in parts} == {(k // count, n)}
    assert {part.group_size for part in parts} == {group_size}
    np.testing.assert_array_equal(np.concatenate([part.dequantize() for part in parts]), weight.dequantize())


@pytest.mark.parametrize(("k", "n", "by"), [(128, 256, "columns"), (256, 100, "rows")])
def test_a_part_of_whole_blocks_is_what_packing_its_values_gives(k: int, n: int, by: str) -> None:
    whole = unpack(weight_of(k, n, 64))
    part = (slice(None), slice(n // 2, n)) if by == "columns" else (slice(k // 2, k), slice(None))
    groups = (slice(None), part[1]) if by == "columns" else (slice(k // 128, None), slice(None))
    wanted = pack(whole.q[part], whole.scales[groups], whole.zeros[groups], group_size=64)
    found = shard(weight_of(k, n, 64), 1, 2, by=by)
    for name in ("qweight", "scales", "zeros"):
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name))


@pytest.mark.parametrize("by", ["columns", "rows"])
def test_a_part_has_memory_of_its_own(by: str) -> None:
    weight = weight_of(128, 128, 64)
    part = shard(weight, 0, 2, by=by)
    pairs = ((getattr(weight, name), getattr(part, name)) for name in ("qweight", "scales", "zeros"))
    assert not any(np.shares_memory(whole, own) for whole, own in pairs)


@pytest.mark.parametrize(
    ("arguments", "by", "error", "message"),
    [
        ((0, 3), "columns", ArgumentError, r"^count: got 3; allowed: a divisor of the 128 columns"),
        ((2, 2), "columns", ArgumentError, r"^index: got 2; allowed: 0\.\.1"),
        ((0, 0), "columns", ArgumentError, r"^count: got 0"),
        ((0, 2.0), "columns", ArgumentError, r"^count: got 2\.0"),
        ((0, 2), "N", ArgumentError, r"^by: got N; allowed: columns, rows"),
        (
            (0, 4),
            "rows",
            QuantizationError,
            r"parts of 48 rows; allowed: .* of 64 rows.*group_size of -1, or use fewer",
        ),
    ],
)
def test_wrong_divisions_are_named(arguments: tuple[Any, Any], by: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        shard(weight_of(192, 128, 64), *arguments, by=by)


def test_group_sizes_that_would_fit_are_named() -> None:
    with pytest.raises(QuantizationError, match=r"group_size of 32 or -1, or use fewer GPUs"):
        shard(weight_of(384, 64, 64), 0, 4, by="rows")


def test_activation_order_by_rows_is_refused_with_a_remedy() -> None:
    weight = weight_of(128, 64, 32, perm=True)
    with pytest.raises(QuantizationError, match=r"^weight: got a weight with activation order.*shard it by columns"):
        shard(weight, 0, 2, by="rows")
    np.testing.assert_array_equal(shard(weight, 0, 1, by="rows").dequantize(), weight.dequantize())
    with pytest.raises(ArgumentTypeError, match=r"^weight: got ndarray"):
        shard(weight.qweight, 0, 2, by="rows")  # type: ignore[arg-type]
