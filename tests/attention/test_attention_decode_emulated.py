"""attention_decode on the emulator, against float64 and without hazards: tails, pages, parts, and rings that wrap."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ptx_of import kernel_for_emulator

import cudatma
from cudatma.arrays import describe
from cudatma.dtypes import activation_type
from cudatma.errors import ArgumentError
from cudatma.kernels.arguments import FLAGS
from cudatma.kernels.attention.arguments import decode_sizes, launch_arguments
from cudatma.kernels.attention.check import check_decode
from cudatma.kernels.attention.choose import decode_config
from cudatma.kernels.attention.decode import DECODE_CALL
from cudatma.kernels.attention.reference import reference
from cudatma.kernels.attention.sample import decode_sample, small_config
from cudatma.kernels.engine import host_workspace
from cudatma.kernels.gpu import imagined_gpu
from cudatma.kernels.host import host_array
from cudatma.target import Target, get_target

SM90A, SM120A = get_target("sm_90a"), get_target("sm_120a")
#: ||out - reference|| / ||reference|| that rounding the probabilities and the result keeps.
LIMITS = {"float16": 1e-3, "bfloat16": 6e-3}
SINK = {"sink": np.array([6, -np.inf], np.float32)}
#: No page of the cache, in the table behind a sequence's end: it is not read.
NO_PAGES = (-7, 2**31 - 1)


def make(
    *,
    lengths: list[int],
    heads: int = 2,
    kv_heads: int = 1,
    dims: tuple[int, int] = (64, 64),
    q_length: int = 1,
    page_size: int = 0,
    dtype: str = "float16",
    capacity: int = 300,
) -> dict[str, Any]:
    """Return a call whose cache contains NaNs after the end of each sequence."""
    random, kind, capacity = np.random.default_rng(len(lengths)), activation_type(dtype).numpy, max(capacity, *lengths)
    caches = [np.full((len(lengths), capacity, kv_heads, dim), np.nan, kind) for dim in dims]
    for index, length in enumerate(lengths):
        for cache in caches:
            cache[index, :length] = random.standard_normal(cache[index, :length].shape, np.float32)
    q = random.standard_normal((len(lengths), q_length, heads, dims[0]), np.float32).astype(kind)
    given = {"q": q, "k_cache": caches[0], "v_cache": caches[1], "seqlens": np.array(lengths, np.int32)}
    return in_pages(given, page_size) if page_size else given


def in_pages(given: dict[str, Any], page_size: int) -> dict[str, Any]:
    """Return the call with its cache in pages in random order, with three surplus pages."""
    batch, capacity = given["k_cache"].shape[:2]
    count = -(-capacity // page_size)
    table = np.random.default_rng(5).permutation(batch * count + 3)[: batch * count].reshape(batch, count)
    paged = dict(given)
    for name in ("k_cache", "v_cache"):
        cache = given[name]
        pages = np.full((batch * count + 3, page_size, *cache.shape[2:]), np.nan, cache.dtype)
        padded = np.full((batch, count * page_size, *cache.shape[2:]), np.nan, cache.dtype)
        padded[:, :capacity] = cache
        pages[table] = padded.reshape(batch, count, page_size, *cache.shape[2:])
        paged[name] = pages
    table = table.astype(np.int32)
    for index, length in enumerate(given["seqlens"]):
        behind = table[index, -(-length // page_size) if length else 0 :]
        behind[:] = np.resize(NO_PAGES, behind.shape)
    return paged | {"page_table": table}


def check(
    given: dict[str, Any],
    *,
    parts: int = 0,
    schedules: int = 1,  # tests/mutants runs each kernel in others
    fields: dict[str, Any] | None = None,
    target: Target = SM90A,
    **options: Any,
) -> Any:
    """Return the result after checking the result, lse and that nothing else changes."""
    q, dim = given["q"], given["v_cache"].shape[3]
    whole = np.full((*q.shape[:3], dim + 8), 7, q.dtype)
    out, exact = whole[..., :dim], np.empty((*q.shape[:3], dim), q.dtype)
    lse, sums = (np.full((q.shape[0], q.shape[2], q.shape[1]), np.nan, np.float32) for _ in range(2))
    checked = check_decode(**given, out=out, return_lse=True, **options)
    problem = checked.problem
    config = replace(decode_config(problem, target), **(fields or {}))
    sizes = decode_sizes(problem, config, imagined_gpu(target, 4), parts)(problem)
    launch = launch_arguments(problem, config, target, sizes)
    space = host_workspace(launch.sizes)
    arrays = DECODE_CALL.named(checked) | {"lse": describe(lse)} | space
    kernel = kernel_for_emulator(launch.template, launch.config, target)
    report = launch.emulate(target, arrays, kernel=kernel, schedules=schedules)
    assert report.is_clean, str(report)
    reference(problem, arrays | {"out": describe(exact), "lse": describe(sums)})
    difference = out.astype(np.float64) - exact.astype(np.float64)
    assert np.linalg.norm(difference) <= LIMITS[q.dtype.name] * np.linalg.norm(exact.astype(np.float64))
    np.testing.assert_allclose(lse, sums, rtol=1e-5, atol=1e-5)
    assert (whole[..., dim:] == 7).all()
    assert FLAGS not in space or not host_array(space[FLAGS]).any()
    return out


#: Arguments of make(), parts of a tile, and options of the call.
CASES: dict[str, dict[str, Any]] = {
    "grouped": {"lengths": [300, 65], "heads": 8, "dims": (128, 128), "parts": 3},
    "many_parts": {"lengths": [640], "dims": (32, 32), "parts": 10},
    "short": {"lengths": [0, 1, 63, 64, 65]},
    "every_head": {"lengths": [130], "heads": 4, "kv_heads": 4, "parts": 1},
    "pages_of_16": {"lengths": [304, 65, 0], "heads": 8, "page_size": 16, "parts": 2},  # the first fills its pages
    "pages_of_24": {"lengths": [300, 63], "heads": 8, "page_size": 24, "parts": 2},
    "large_pages": {"lengths": [300, 1], "heads": 4, "kv_heads": 2, "page_size": 128},
    "pages_of_5": {"lengths": [200, 65], "page_size": 5, "parts": 2},
    "pages_of_1": {"lengths": [70], "dims": (32, 32), "page_size": 1, "parts": 1},
    "some_queries": {"lengths": [300, 2, 65], "heads": 4, "kv_heads": 2, "q_length": 3, "parts": 2},
    "window": {
        "lengths": [300, 70],
        "heads": 4,
        "kv_heads": 2,
        "q_length": 2,
        "page_size": 16,
        "parts": 2,
        "options": {"window": (70, 0)},
    },
    "softcap": {"lengths": [130], "heads": 8, "parts": 2, "options": {"softcap": 2.0, "scale": 0.5}},
    "two_tiles_of_rows": {"lengths": [100, 66], "heads": 40, "dims": (32, 32), "q_length": 2, "parts": 2},
    "wide": {"lengths": [130], "dims": (256, 256), "page_size": 16},
    "sinks": {
        "lengths": [0, 1, 130],
        "heads": 4,
        "kv_heads": 2,
        "q_length": 2,
        "parts": 2,
        "options": {"sink": np.array([3, -np.inf, 0, -2], np.float32)},
    },
    "wider_keys": {"lengths": [130], "dims": (192, 128)},
}


#: Cases of both kernels, with and without wgmma, and cases of mma.sync; the others are cases of wgmma.
ON_BOTH = ("pages_of_5", "sinks")
ON_SM120 = (*ON_BOTH, "softcap", "many_parts", "short", "pages_of_24", "pages_of_1", "wider_keys")


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("case", "target"),
    [
        *((case, SM90A) for case in CASES if case not in ON_SM120 or case in ON_BOTH),
        *((case, SM120A) for case in ON_SM120),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_results_are_right_and_clean(case: str, target: Target) -> None:
    given: dict[str, Any] = {"dtype": ("float16", "bfloat16")[len(case) % 2]} | CASES[case]
    parts, options = given.pop("parts", 0), given.pop("options", {})
    check(make(**given), parts=parts, target=target, **options)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("page_size", "target"), [(0, SM90A), (5, SM120A)])
def test_rings_wrap(page_size: int, target: Target) -> None:
    """tests/mutants covers rings of pages."""
    given = make(lengths=[300, 230], dims=(32, 32), page_size=page_size)
    check(given, parts=1, schedules=2, fields={"stages": 2}, target=target)


@pytest.mark.slow
def test_pages_and_a_contiguous_cache_give_the_same_bits() -> None:
    given = make(lengths=[200, 65], heads=4, kv_heads=2, dtype="bfloat16")
    first = check(given, parts=3)
    assert (check(in_pages(given, 5), parts=3) == first).all()


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("target", "scale", "options"),
    [(SM90A, 0.5, {}), (SM90A, 8.0, SINK), (SM120A, 8.0, {"window": (140, 0)}), (SM120A, 0.5, SINK)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_rows_whose_maximum_rises_again_and_again(target: Target, scale: float, options: dict[str, Any]) -> None:
    """Blocks are processed from the last to the first, and logits grow towards earlier keys, within parts and across
    parts."""
    given = make(lengths=[300], page_size=16)
    given["q"][..., 0] = np.abs(given["q"][..., 0]) + 1
    contiguous = given["page_table"][0, :19]
    ramp = np.linspace(60, 0, 19 * 16).reshape(19, 16)
    given["k_cache"][contiguous, ..., 0] = ramp[..., None]
    given["q"] *= np.float16(0.5 / scale)
    check(given, parts=2, target=target, scale=scale, **options)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("target", [SM90A, SM120A], ids=lambda target: target.name)
def test_blocks_of_logits_of_minus_infinity(target: Target) -> None:
    """Such keys count as masked, whether they fill a block, a part or all parts."""
    for parts, *infinite in ((1, slice(64, None), slice(0, 128)), (3, slice(64, 192), slice(0, None))):
        given = make(lengths=[230, 150])
        given["q"][..., 0] = np.abs(given["q"][..., 0]) + 1
        for sequence, keys in enumerate(infinite):
            given["k_cache"][sequence, keys, :, 0] = -np.inf
        check(given, parts=parts, target=target)


def in_e4m3(given: dict[str, Any]) -> dict[str, Any]:
    """Return the call with its cache rounded to e4m3."""
    names = ("k_cache", "v_cache")
    return given | {name: given[name].astype(np.float32).astype(ml_dtypes.float8_e4m3fn) for name in names}


#: Scales of an e4m3 cache with two heads.
SCALES: list[dict[str, Any]] = [
    {},
    {"k_scale": np.float32(0.5), "v_scale": np.int64(3)},
    {"k_scale": np.array([0.3, 1.5], np.float32), "v_scale": np.array(0.7, np.float32)},
    {"k_scale": np.array([0.4], np.float32), "v_scale": np.array([2, 0.25], np.float32)},
]
#: The same for eight heads, two of k and v.
FP8_CASES: dict[str, dict[str, Any]] = {
    "contiguous": {"lengths": [300, 65], "dims": (128, 128), "parts": 2},
    "pages_of_16": {"lengths": [300, 65, 0, 1], "dims": (128, 128), "page_size": 16, "parts": 3},
    "one_block_of_a_page": {"lengths": [300, 127], "dims": (96, 96), "page_size": 128, "parts": 1},
    "three_tiles_of_rows": {"lengths": [200, 3], "dims": (32, 32), "q_length": 12, "parts": 2},
    "window": {
        "lengths": [300, 200],
        "dims": (192, 128),
        "q_length": 2,
        "page_size": 16,
        "parts": 2,
        "options": {"window": (140, 0)},
    },
    "softcap": {"lengths": [300, 128], "page_size": 24, "parts": 1, "options": {"softcap": 2.0, "scale": 0.5}},
    "sinks": {
        "lengths": [0, 1, 130],
        "dims": (192, 192),
        "q_length": 2,
        "parts": 2,
        "options": {"sink": np.array([3, -np.inf, 0, -2] * 2, np.float32)},
    },
    "wide": {"lengths": [300], "dims": (256, 256), "page_size": 16, "parts": 1},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "target"),
    [*((case, SM90A) for case in FP8_CASES), ("window", SM120A)],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_an_e4m3_cache(case: str, target: Target) -> None:
    number = list(FP8_CASES).index(case)
    given: dict[str, Any] = {"heads": 8, "kv_heads": 2, "dtype": ("float16", "bfloat16")[number % 2]} | FP8_CASES[case]
    parts, options = given.pop("parts", 0), given.pop("options", {})
    check(in_e4m3(make(**given)) | SCALES[number % 4], parts=parts, target=target, **options)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}], ids=str)
def test_a_scale_of_keys_that_is_zero_or_less_counts_as_zero(options: dict[str, Any]) -> None:
    """A scale is zero if it comes from the largest element of a head of zeros."""
    given = in_e4m3(make(lengths=[3, 200], heads=8, kv_heads=2))
    check(given | {"k_scale": np.array([0.0, -1.0], np.float32)}, parts=1, **options)


@pytest.mark.slow
@pytest.mark.parametrize(("page_size", "fields"), [(0, {}), (16, {"tile_n": 64, "box_rows": 16})])
def test_the_ring_of_an_e4m3_cache_wraps(page_size: int, fields: dict[str, Any]) -> None:
    given = in_e4m3(make(lengths=[400, 270], dims=(32, 32), page_size=page_size))
    check(given, parts=1, schedules=4, fields={"stages": 2} | fields)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_finite_e4m3_number_is_exact(dtype: str) -> None:
    """Each sequence has one key. Each head selects one of its columns, and all heads read its values, including
    subnormal numbers."""
    numbers = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    numbers[np.isnan(numbers.astype(np.float32))] = 0
    k = numbers.reshape(8, 1, 1, 32)
    q = np.broadcast_to(np.eye(32, dtype=activation_type(dtype).numpy), (8, 1, 32, 32)).copy()
    given = {"q": q, "k_cache": k, "v_cache": k[::-1].copy(), "seqlens": np.ones(8, np.int32), "scale": 1.0}
    out, lse = cudatma.attention_decode(**given, return_lse=True, backend="emulator")
    np.testing.assert_allclose(lse.ravel(), numbers.astype(np.float32), rtol=2e-7)  # to base 2 and back
    np.testing.assert_array_equal(out.astype(np.float32), np.repeat(k[::-1].astype(np.float32), 32, axis=2))


def test_lengths_and_pages_that_a_device_must_not_trust() -> None:
    """Nothing outside the cache is read: pages that do not exist are zeros, and lengths are clamped."""
    for page_size in (16, 5):
        given = make(lengths=[100, 100], dims=(32, 32), page_size=page_size, capacity=100)
        given["k_cache"][np.isnan(given["k_cache"])] = 0
        given["v_cache"][np.isnan(given["v_cache"])] = 0
        out = np.full(given["q"].shape, np.nan, np.float16)
        checked = check_decode(**given, out=out)
        given["page_table"][0, 2], given["page_table"][1, 1] = NO_PAGES
        given["seqlens"][:] = 2**31 - 1, -5
        config = decode_config(checked.problem, SM90A)
        (launch,) = DECODE_CALL.arguments(checked.problem, config, imagined_gpu(SM90A, 4), ())
        arrays = DECODE_CALL.named(checked) | host_workspace(launch.sizes)
        assert launch.emulate(SM90A, arrays, schedules=1).is_clean
        assert np.isfinite(out).all()
        assert not out[1].any()


def test_the_public_function_on_the_emulator() -> None:
    given = make(lengths=[65, 0], heads=4, kv_heads=2, page_size=16)
    out, lse = cudatma.attention_decode(**given, return_lse=True, backend="emulator")
    exact, sums = cudatma.attention_decode(**given, return_lse=True, backend="reference")
    np.testing.assert_allclose(out.astype(np.float64), exact.astype(np.float64), atol=2e-3)
    np.testing.assert_allclose(lse, sums, rtol=1e-5, atol=1e-5)
    assert not out[1].any()
    empty = {name: array[:0] if name in ("k_cache", "v_cache") else array for name, array in given.items()}
    empty["seqlens"] = np.zeros(2, np.int32)
    out, lse = cudatma.attention_decode(**empty, return_lse=True, backend="emulator")
    assert not out.any()
    assert np.isneginf(lse).all()


def test_parts_fill_the_gpu_and_fit_the_workspace() -> None:
    h200 = imagined_gpu(SM90A, 132)
    for batch, length, heads, kv_heads, most in (
        (1, 16384, 32, 8, 264),
        (8, 4096, 32, 8, 264),
        (1, 100000, 64, 1, 132),
    ):
        shapes = (batch, 1, heads, 128), (batch, length, kv_heads, 128)
        q, cache = (np.broadcast_to(np.float16(0), shape) for shape in shapes)
        problem = check_decode(q.copy(), cache.copy(), cache.copy(), np.zeros(batch, np.int32)).problem
        sizes = decode_sizes(problem, decode_config(problem, SM90A), h200)(problem)
        tiles, parts = sizes.grid
        assert tiles * parts <= most
        assert tiles * parts >= 0.4 * most
        assert sizes.partials_bytes <= 132 * 128 * 1024


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"box_rows": 16}, r"^box_rows must be 64 \(the number of keys per block.*got 16"),
        ({"box_rows": 4, "is_paged": True}, "^box_rows must be .*got 4"),
        ({"tile_m": 128}, "^tile_m must be .*got 128"),
        ({"version": "decode_fp8", "box_rows": 0, "is_paged": True}, "^box_rows must be .*got 0"),
        ({"version": "decode_fp8", "tile_m": 64}, "^tile_m must be .*got 64"),
        ({"version": "decode_fp8", "tile_n": 32}, "^tile_n must be .*got 32"),
    ],
)
def test_configs_that_cannot_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        small_config(**{"version": "decode", **fields})


@pytest.mark.slow
def test_the_sample() -> None:
    for version, dtype in (("decode", "bfloat16"), ("decode_fp8", "float16")):
        made = decode_sample(version, SM90A, k_length=100, page_size=16, dtype=dtype)
        assert made.run(schedules=2).is_clean
        assert made.error() <= made.limit
