"""marlin_gemm's ways to a result on a GPU: activations that are arranged first, weights made dense. Needs CuPy.

The kernels by themselves against NumPy, bit for bit; the calls against float64 and against the direct path.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from marlin_operands import (
    DTYPES,
    Options,
    activations,
    bits,
    compare,
    differences,
    is_poison,
    make_weight,
    poisoned,
    to_float64,
)
from this_gpu import TARGET, cupy

import cudatma
from cudatma import marlin_gemm
from cudatma.arrays import describe
from cudatma.build.kernel import load_kernel
from cudatma.kernels.marlin.permute_columns import (
    TEMPLATE,
    choose_permute,
    permute_arguments,
    permute_sizes,
    result_pitch_bytes,
)

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    yield
    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()


def check(out: Any, reference: Any) -> None:
    problem = compare(out, reference).problem(out.dtype.name)
    assert not problem, problem


def contiguous(array: Any) -> Any:
    """Return a dense copy. It is made from the bits, because not every CuPy supports bf16."""
    return cupy.ascontiguousarray(bits(array)).view(array.dtype)


@pytest.mark.parametrize(
    ("rows", "columns", "gap", "offset"),
    [
        (1, 8192, 0, 0),
        (700, 4096, 0, 0),
        (3000, 8192, 8, 0),
        (300, 28672, 0, 0),
        (40, 65536, 0, 0),
        (9, 70000, 0, 0),
        (33, 8191, 0, 0),
        (700, 4096, 1, 3),
        (5, 1, 0, 0),
    ],
)
@pytest.mark.parametrize("permute", [True, False])
def test_columns_are_permuted(rows: int, columns: int, gap: int, offset: int, permute: bool) -> None:
    buffer = poisoned((rows, columns + gap + offset), "float16")
    x = buffer[:, offset : offset + columns]
    x[...] = activations((rows, columns), "float16")
    order = cupy.asarray(np.random.default_rng(0).permutation(columns).astype(np.int32)) if permute else None
    pitch = result_pitch_bytes(columns) // 2
    result = poisoned((rows + 1, pitch), "float16")
    processors = cupy.cuda.Device().attributes["MultiProcessorCount"]
    aligned = x.data.ptr % 16 == 0 and x.strides[0] % 16 == 0
    config = choose_permute(
        rows, columns, has_permutation=permute, is_aligned=aligned, target=TARGET, sm_count=processors
    )
    kernel = load_kernel(TEMPLATE, config, TARGET)
    resident = processors * kernel.occupancy(config.threads, shared_bytes=config.smem_bytes)
    planned = permute_arguments(config, permute_sizes(config, rows, columns, x.strides[0], resident))
    arrays = {"x": describe(x), "rows": describe(result)}
    if order is not None:
        arrays["perm"] = describe(order)
    args = planned.filled(arrays)
    kernel.launch(planned.sizes.grid, config.threads, args, shared_bytes=config.smem_bytes)
    wanted = bits(contiguous(x))
    wanted = wanted if order is None else wanted[:, order]
    assert bool((bits(result)[:rows, :columns] == wanted).all())
    assert is_poison(result[rows:])
    assert is_poison(contiguous(result[:rows, -(-columns // 8) * 8 :]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("act_order", [True, False])
def test_dequantised_bit_for_bit(dtype: str, group_size: int, symmetric: bool, act_order: bool) -> None:
    for k, n in ((333, 77), (1024, 2056)):
        weight = make_weight(k, n, Options(dtype, group_size, symmetric, act_order=act_order)).packed
        wanted = weight.dequantize(dtype=dtype).view(np.uint16)
        found = cudatma.dequantize(weight)
        assert (found.shape, found.dtype.name) == ((k, n), dtype)
        np.testing.assert_array_equal(cupy.asnumpy(bits(contiguous(found))), wanted)
        if n % 8 == 0:
            buffer = poisoned((k + 2, n + 8), dtype)
            out = buffer[1 : k + 1, :n]
            assert cudatma.dequantize(weight, out=out) is out
            np.testing.assert_array_equal(cupy.asnumpy(bits(buffer)[1 : k + 1, :n]), wanted)
            assert is_poison(contiguous(buffer[:, n:]))
            assert is_poison(buffer[0])
            assert is_poison(buffer[k + 1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("programmatic", [False, True])
@pytest.mark.parametrize("m", [1, 7, 16, 64, 100, 1000])
def test_act_order_gives_the_bits_of_permuted_activations(m: int, dtype: str, programmatic: bool) -> None:
    weight = make_weight(2048, 1024, Options(dtype, 64, False, act_order=True))
    x = activations((m, 2048), dtype)
    ordered = cupy.ascontiguousarray(bits(x)[:, weight.packed.perm]).view(x.dtype)
    straight = cudatma.PackedWeight(
        *(weight.packed.qweight, weight.packed.scales, weight.packed.zeros, None, weight.packed.shape, 64, dtype)
    )
    wanted = marlin_gemm(ordered, straight)
    for _ in range(3):
        out = marlin_gemm(x, weight.packed, programmatic=programmatic)
        assert bool((bits(out) == bits(wanted)).all())
    check(out, to_float64(x) @ weight.dense)


@pytest.mark.parametrize("m", [1, 5, 100, 600])
@pytest.mark.parametrize(("offset", "gap"), [(1, 0), (0, 3), (3, 5), (8, 8)])
def test_any_address_and_pitch(m: int, offset: int, gap: int) -> None:
    weight = make_weight(1024, 512)
    buffer = poisoned((m, offset + 1024 + gap), "float16")
    x = buffer[:, offset : offset + 1024]
    x[...] = activations((m, 1024), "float16")
    out = marlin_gemm(x, weight.packed)
    wanted = marlin_gemm(contiguous(x), weight.packed)
    assert bool((bits(out) == bits(wanted)).all())
    check(out, to_float64(x) @ weight.dense)


def test_a_thousand_calls_in_a_programmatic_chain_give_the_same_bits() -> None:
    """Without a wait, each call's copy would write rows that the previous GEMM may still read."""
    weight = make_weight(2048, 2048, Options(act_order=True))
    xs = [activations((16, 2048), "float16", seed) for seed in (1, 2)]
    wanted = [marlin_gemm(x, weight.packed) for x in xs]
    assert bool((bits(wanted[0]) != bits(wanted[1])).any())
    outs, wrong = [cupy.empty_like(out) for out in wanted], cupy.zeros((), np.int64)
    for _ in range(500):
        for x, out in zip(xs, outs, strict=True):
            marlin_gemm(x, weight.packed, out=out, programmatic=True)
        for out, good in zip(outs, wanted, strict=True):
            wrong += differences(out, good)
    assert int(wrong) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k", "n"), [(4096, 4096), (3584, 1000), (8192, 28672)])
def test_a_row_has_the_same_bits_in_every_batch(k: int, n: int, dtype: str) -> None:
    """The test covers several tiles of 8 to 256 rows, and every position of the row in its tile."""
    weight = make_weight(k, n, Options(dtype=dtype))
    x = activations((700, k), dtype, seed=3)
    whole = marlin_gemm(x, weight.packed, batch_invariant=True)
    check(whole[:40], to_float64(x[:40]) @ weight.dense)
    for start, stop in ((0, 1), (0, 8), (3, 19), (5, 37), (0, 64), (11, 139), (100, 356), (0, 700)):
        part = marlin_gemm(contiguous(x[start:stop]), weight.packed, batch_invariant=True)
        assert bool((bits(part) == bits(whole[start:stop])).all()), (start, stop)
