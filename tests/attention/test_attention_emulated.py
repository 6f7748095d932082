"""Attention's versions on the emulator, against float64 and without hazards: tails, masks, and rings that wrap."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from attention_cases import CASES
from ptx_of import kernel_for_emulator

import cudatma
from cudatma.arrays import describe
from cudatma.dtypes import activation_type
from cudatma.errors import ArgumentError
from cudatma.kernels.arguments import FLAGS
from cudatma.kernels.attention import arguments
from cudatma.kernels.attention.attention import ATTENTION_CALL, VARLEN_CALL
from cudatma.kernels.attention.check import check_attention, check_varlen
from cudatma.kernels.attention.config import VERSIONS, AttentionConfig
from cudatma.kernels.attention.reference import attend
from cudatma.kernels.attention.sample import sample, small_config
from cudatma.kernels.engine import host_workspace
from cudatma.kernels.gpu import imagined_gpu
from cudatma.kernels.host import host_array
from cudatma.target import Target, get_target

SM90A, SM120A = get_target("sm_90a"), get_target("sm_120a")
#: ||out - reference|| / ||reference|| that rounding the probabilities and the result keeps.
LIMITS = {"float16": 1e-3, "bfloat16": 6e-3}
#: An SM or two, so that persistent CTAs take several tiles.
SMS = 2


def operand(*, length: int, seed: int, batch: int = 1, heads: int = 1, dim: int = 64, dtype: str = "float16") -> Any:
    """Return random heads of a transposed array, surrounded by NaNs."""
    kind = activation_type(dtype).numpy
    whole = np.full((batch, heads, length, dim + 8), np.nan, kind)
    whole[..., :dim] = np.random.default_rng(seed).standard_normal((batch, heads, length, dim), np.float32)
    return whole[..., :dim].swapaxes(1, 2)


def emulated(checked: Any, config: AttentionConfig, target: Target, lse: Any = None, schedules: int = 1) -> Any:
    """Return the report of a launch on the emulator, and its workspace."""
    (launch,) = ATTENTION_CALL.arguments(checked.problem, config, imagined_gpu(target, SMS), ())
    space = host_workspace(launch.sizes)
    arrays = ATTENTION_CALL.named(checked) | space | ({} if lse is None else {"lse": describe(lse)})
    assert launch.sizes.programmatic
    kernel = kernel_for_emulator(launch.template, launch.config, target)
    return launch.emulate(target, arrays, kernel=kernel, schedules=schedules), space


def check(
    version: str,
    *,
    q_length: int,
    k_length: int,
    batch: int = 1,
    heads: int = 1,
    kv_heads: int = 1,
    dims: tuple[int, int] = (64, 64),
    dtype: str = "float16",
    fields: dict[str, Any] | None = None,
    schedules: int = 1,  # tests/mutants runs each kernel in others
    target: Target = SM90A,
    sink: Any = None,
    **options: Any,
) -> None:
    q = operand(batch=batch, length=q_length, heads=heads, dim=dims[0], dtype=dtype, seed=0)
    k = operand(batch=batch, length=k_length, heads=kv_heads, dim=dims[0], dtype=dtype, seed=1)
    v = operand(batch=batch, length=k_length, heads=kv_heads, dim=dims[1], dtype=dtype, seed=2)
    whole = np.full((batch, q_length, heads, dims[1] + 8), 7, q.dtype)
    out, lse = whole[..., : dims[1]], np.full((batch, heads, q_length), np.nan, np.float32)
    checked = check_attention(q, k, v, out=out, return_lse=True, sink=sink, **options)
    problem = checked.problem
    config = small_config(version, problem, **fields or {})
    report, space = emulated(checked, config, target, lse, schedules=schedules)
    assert report.is_clean, str(report)
    assert FLAGS not in space or not host_array(space[FLAGS]).any(), "the next launch would begin with a later tile"
    for index in range(batch):
        wanted, sums = attend(q[index], k[index], v[index], problem.scale, problem.limits, problem.softcap, sink)
        difference = out[index].astype(np.float64) - wanted
        assert np.linalg.norm(difference) <= LIMITS[dtype] * np.linalg.norm(wanted)
        np.testing.assert_allclose(lse[index], sums, rtol=1e-5, atol=1e-5)
    assert (whole[..., dims[1] :] == 7).all()


#: Version a4 runs all cases. The other versions, which share its masks, each run a third of them.
RUNS = [
    (version, case)
    for index, version in enumerate(VERSIONS.names)
    for number, case in enumerate(CASES)
    if version == "a4" or number % 3 == index % 3
]


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("version", "case"), RUNS)
def test_results_are_right_and_clean(version: str, case: str) -> None:
    dtype = ("float16", "bfloat16")[len(case) % 2]
    check(version, dtype=dtype, **CASES[case])


@pytest.mark.sweep(1)
@pytest.mark.parametrize("version", ["a2", "a4", "mma_sync"])
def test_sinks(version: str) -> None:
    """Sinks are greater than all scores, less, or absent. Queries that see no key have only the sink."""
    sink = np.array([9, -4, -np.inf, 0.5], np.float32)
    check(
        version,
        heads=4,
        kv_heads=2,
        q_length=70,
        k_length=65,
        causal=True,
        sink=sink,
        target=SM120A if version == "mma_sync" else SM90A,
    )


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("version", "dims", "fields"),
    [
        ("a3", (32, 32), {"tile_n": 128}),
        ("a4", (96, 96), {"tile_n": 80}),
        ("a4", (128, 128), {"tile_n": 176}),
        ("a4", (192, 128), {"tile_n": 48}),
        ("a4", (256, 256), {"tile_n": 80}),
        ("a3", (64, 64), {"stages": 4}),
    ],
    ids=str,
)
def test_every_head_dim(version: str, dims: tuple[int, int], fields: dict[str, Any]) -> None:
    check(
        version,
        q_length=100,
        k_length=230,
        dims=dims,
        fields=fields,
        causal=fields["tile_n"] < 100 if "tile_n" in fields else True,
    )


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("version", "dims"),
    [("a1", (32, 32)), ("scalar", (192, 128)), ("a1", (256, 256)), ("a2", (192, 128))],
    ids=str,
)
def test_every_head_dim_of_the_first_versions(version: str, dims: tuple[int, int]) -> None:
    """The head dims cover spans of 64 and 128 bytes, with one and with two warpgroups."""
    fields: dict[str, Any] = {"tile_n": 32}
    if version != "scalar" and dims[0] > 64:
        fields = {"tile_m": 128, "tile_n": 64}
    check(version, q_length=40, k_length=70, dims=dims, fields=fields, dtype="bfloat16")


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("dims", "fields"),
    [
        ((128, 128), {"tile_m": 128}),
        ((32, 32), {"tile_m": 128, "tile_n": 128}),
        ((96, 96), {}),
        ((192, 128), {"tile_n": 32}),
        ((256, 256), {"tile_n": 32}),
    ],
    ids=str,
)
def test_every_head_dim_on_sm120(dims: tuple[int, int], fields: dict[str, Any]) -> None:
    check("mma_sync", q_length=40, k_length=100, dims=dims, fields=fields, target=SM120A, causal=True, dtype="bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize(("version", "last"), [("a4", 2), ("a1", 1)])
def test_causal_tiles_in_raster_groups(version: str, last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A raster group has one head of k with the two heads of q that share it; the last group is longer."""
    monkeypatch.setattr(arguments, "_GROUP_BYTES", 1)
    monkeypatch.setattr(arguments, "_LAST_GROUPS", last)
    check(version, heads=6, kv_heads=3, q_length=70, k_length=70, dims=(32, 32), batch=2, causal=True)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("q_stages", [1, 2])
def test_persistent_ctas_take_several_tiles(q_stages: int) -> None:
    check(
        "a4",
        heads=2,
        kv_heads=2,
        q_length=200,
        k_length=70,
        dims=(32, 32),
        causal=True,
        batch=2,
        fields={"q_stages": q_stages, "tile_n": 32},
    )


@pytest.mark.sweep(1)
@pytest.mark.parametrize("tile_m", [64, 192])
def test_one_warpgroup_and_three(tile_m: int) -> None:
    check("a3", q_length=200, k_length=100, dims=(32, 32), fields={"tile_m": tile_m, "tile_n": 32})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"version": "p1"}, '^version must be "scalar", "a1".*got p1'),
        ({"tile_m": 96}, "^tile_m must be 64, 128 or 192.*got 96"),
        ({"tile_m": 128, "ctas_per_sm": 2}, "^ctas_per_sm must be 1 for a tile with several.*got 2"),
        ({"q_stages": 2}, "^q_stages must be 1.*got 2"),
        ({"box_rows": 16}, "^box_rows must be 0 for a kernel that does not read a cache, got 16"),
        ({"tile_n": 72}, "^tile_n must be .*got 72"),
        ({"head_dim": 80}, "^head_dim must be .*got 80 for q and k"),
    ],
)
def test_configs_that_cannot_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        replace(small_config("a3"), **fields)


def test_large_logits() -> None:
    q, k = (operand(length=70, seed=seed) * np.float16(30) for seed in (0, 1))
    v = operand(length=70, seed=2)
    out = np.empty(v.shape, np.float16)
    checked = check_attention(q, k, v, out=out, scale=1.0)
    problem = checked.problem
    assert emulated(checked, small_config("a4", problem), SM90A)[0].is_clean
    wanted, _ = attend(q[0], k[0], v[0], problem.scale, problem.limits, problem.softcap)
    np.testing.assert_allclose(out[0].astype(np.float64), wanted, rtol=2e-3, atol=2e-3)


def test_the_sample() -> None:
    made = sample("a4", SM90A, heads=1, q_length=70, k_length=100, dtype="bfloat16")
    assert made.run(schedules=1).is_clean
    assert made.error() <= made.limit
    with pytest.raises(ArgumentError, match=r"^kv_heads must be .*got 3"):
        sample("a4", SM90A, kv_heads=3)


def check_operands(
    version: str, q: Any, k: Any, v: Any, *, sink: Any = None, fields: dict[str, Any] | None = None, **options: Any
) -> tuple[Any, Any]:
    """Return the result and lse of one sequence after checking them, with blocks of 16 keys."""
    out, lse = np.empty(q.shape, q.dtype), np.empty((1, q.shape[2], q.shape[1]), np.float32)
    checked = check_attention(q, k, v, out=out, return_lse=True, sink=sink, **options)
    problem = checked.problem
    config = small_config(version, problem, **{"tile_n": 16} | (fields or {}))
    target = SM120A if version == "mma_sync" else SM90A
    assert emulated(checked, config, target, lse)[0].is_clean
    wanted, sums = attend(q[0], k[0], v[0], problem.scale, problem.limits, problem.softcap, sink)
    np.testing.assert_allclose(out[0].astype(np.float64), wanted, rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(lse[0], sums, rtol=1e-5, atol=1e-4)
    return out, lse


SINK = {"sink": np.array([6, -np.inf], np.float32)}


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("version", "scale", "options"),
    [
        ("a1", 0.5, SINK),
        ("a3", 8, SINK),
        ("a4", 8, {"causal": True}),
        ("a4", 0.5, SINK),
        ("mma_sync", 0.5, {}),
        ("mma_sync", 8, {"window": (50, 20)}),
    ],
    ids=str,
)
def test_rows_whose_maximum_rises_again_and_again(version: str, scale: float, options: dict[str, Any]) -> None:
    """Blocks are processed from the last to the first, and logits grow towards earlier keys, some only slightly."""
    q, k, v = (operand(length=140, heads=2, seed=seed) for seed in (0, 1, 2))
    q[..., 0] = np.abs(q[..., 0]) + 1
    k[..., 0] = np.linspace(60, 0, 140)[None, :, None]
    q *= np.float16(0.5 / scale)
    check_operands(version, q, k, v, scale=scale, **options)


#: Keys with logits of minus infinity, and the scale: the last blocks (which come first), the first, some in between, or
#: all.
INFINITE = [(slice(32, None), 1e-6), (slice(0, 32), 1e6), (slice(16, 48), 1.0), (slice(0, None), 1.0)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "infinite", "scale"),
    [
        (version, *case)
        for index, version in enumerate(VERSIONS.names)
        for number, case in enumerate(INFINITE)
        if version == "a4" or number % 2 == index % 2
    ],
    ids=str,
)
def test_blocks_of_logits_of_minus_infinity(version: str, infinite: slice, scale: float) -> None:
    """Such keys count as masked."""
    q, k, v = (operand(length=length, seed=seed) for seed, length in enumerate((20, 70, 70)))
    q[..., 0] = np.abs(q[..., 0]) + 1
    k[:, infinite, :, 0] = -np.inf
    fields = {"tile_n": 32} if version == "scalar" else {}
    check_operands(version, q, k, v, scale=scale, fields=fields)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("version", ["a4", "a1", "mma_sync"])
def test_rows_with_a_nan_or_a_logit_of_plus_infinity_are_nan(version: str) -> None:
    """inf - inf is NaN, as with torch.softmax. The other rows of the tile do not change."""
    q, k, v = (operand(length=70, seed=seed) for seed in (0, 1, 2))
    k[:, 50, :, 0] = np.inf
    q[0, 3, 0, 5] = np.nan
    out, lse = cudatma.attention(q, k, v, causal=True, return_lse=True, version=version, backend="emulator")
    exact, sums = cudatma.attention(q, k, v, causal=True, return_lse=True, backend="reference")
    rows = np.isnan(exact).all((0, 2, 3))
    assert 6 < rows.sum() < 16
    assert rows[3]
    np.testing.assert_allclose(out, exact, atol=2e-3)
    np.testing.assert_allclose(lse, sums, atol=1e-3)


def test_logits_that_overflow_to_minus_infinity() -> None:
    """They overflow in fp32. In float64, they are so small that they have almost no weight."""
    q, k, v = (operand(length=70, dtype="bfloat16", seed=seed) for seed in (0, 1, 2))
    q[..., 0], k[..., 0] = 1e30, 0
    k[:, 32:, :, 0] = -1e30
    check_operands("a4", q, k, v)


# ---- attention_varlen


#: Arguments of sequences(), and options of the call.
VARLEN_CASES: dict[str, dict[str, Any]] = {
    "full": {"q_lengths": [65, 1, 130], "k_lengths": [130, 64, 65], "heads": 2},
    "causal": {
        "q_lengths": [130, 0, 70, 1],
        "k_lengths": [130, 40, 200, 300],
        "heads": 2,
        "kv_heads": 2,
        "options": {"causal": True},
    },
    "without_keys": {"q_lengths": [65, 130], "k_lengths": [0, 65], "options": {"causal": True}},
    "window": {"q_lengths": [140, 65], "k_lengths": [200, 65], "options": {"window": (60, 10)}},
    "sinks": {
        "q_lengths": [65, 20],
        "k_lengths": [70, 0],
        "heads": 2,
        "options": {"sink": np.array([4, -1], np.float32)},
    },
    "softcap": {"q_lengths": [65, 20], "k_lengths": [70, 90], "options": {"softcap": 2.0, "causal": True}},
}


def sequences(
    *,
    q_lengths: list[int],
    k_lengths: list[int],
    heads: int = 1,
    kv_heads: int = 1,
    dim: int = 64,
    dtype: str = "float16",
) -> dict[str, Any]:
    random, kind = np.random.default_rng(0), activation_type(dtype).numpy
    sizes = (sum(q_lengths), heads), (sum(k_lengths), kv_heads), (sum(k_lengths), kv_heads)
    q, k, v = (random.standard_normal((*size, dim), np.float32).astype(kind) for size in sizes)
    begins = [np.cumsum([0, *lengths]).astype(np.int32) for lengths in (q_lengths, k_lengths)]
    given = {"q": q, "k": k, "v": v, "cu_seqlens_q": begins[0], "cu_seqlens_k": begins[1]}
    return given | {"max_seqlen_q": max(q_lengths), "max_seqlen_k": max(k_lengths) + 3}


def run_varlen(
    given: dict[str, Any],
    schedules: int = 1,
    fields: dict[str, Any] | None = None,
    version: str = "a3",
    **options: Any,
) -> Any:
    """Return the result, lse and the checked call."""
    q = given["q"]
    whole = np.full((*q.shape[:2], q.shape[2] + 8), 7, q.dtype)
    out, lse = whole[..., : q.shape[2]], np.full((q.shape[1], q.shape[0]), np.nan, np.float32)
    checked = check_varlen(**given, out=out, return_lse=True, **options)
    problem = checked.problem
    config = small_config(version, problem, is_varlen=True, **fields or {})
    target = SM90A if version == "a3" else SM120A
    arrays = VARLEN_CALL.named(checked) | {"lse": describe(lse)}
    (launch,) = VARLEN_CALL.arguments(problem, config, imagined_gpu(target, 2), ())
    kernel = kernel_for_emulator(launch.template, launch.config, target)
    report = launch.emulate(target, arrays, kernel=kernel, schedules=schedules)
    assert report.is_clean, str(report)
    assert (whole[..., q.shape[2] :] == 7).all()
    return out, lse, checked


def is_right(given: dict[str, Any], out: Any, lse: Any, checked: Any, sequences: list[int] | None = None) -> None:
    problem, sink = checked.problem, checked.arrays[-1]
    begins = given["cu_seqlens_q"], given["cu_seqlens_k"]
    for index in range(len(begins[0]) - 1) if sequences is None else sequences:
        rows, keys = (slice(begin[index], begin[index + 1]) for begin in begins)
        asked = problem.scale, problem.limits, problem.softcap, sink and sink.owner
        wanted, sums = attend(given["q"][rows], given["k"][keys], given["v"][keys], *asked)
        difference = out[rows].astype(np.float64) - wanted
        assert np.linalg.norm(difference) <= LIMITS[out.dtype.name] * np.linalg.norm(wanted)
        np.testing.assert_allclose(lse[:, rows], sums, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "version"),
    [
        *((case, "a3") for case in ("causal", "without_keys", "window")),
        *((case, "mma_sync") for case in ("full", "sinks", "softcap")),
    ],
)
def test_varlen_results_are_right_and_clean(case: str, version: str) -> None:
    sizes: dict[str, Any] = {"dtype": ("float16", "bfloat16")[len(case) % 2]} | VARLEN_CASES[case]
    options = sizes.pop("options", {})
    given = sequences(**sizes)
    is_right(given, *run_varlen(given, version=version, **options))


@pytest.mark.slow
def test_varlen_with_one_warpgroup_and_three() -> None:
    given = sequences(q_lengths=[130, 20], k_lengths=[100, 130], dim=32)
    for tile_m in (64, 192):
        is_right(given, *run_varlen(given, fields={"tile_m": tile_m, "tile_n": 32}, causal=True))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("version", ["a3", "mma_sync"])
def test_a_sequence_does_not_see_what_the_next_one_holds(version: str) -> None:
    given = sequences(q_lengths=[70, 70], k_lengths=[70, 70])
    for name in ("q", "k", "v"):
        given[name][70:] = np.nan
    is_right(given, *run_varlen(given, version=version), sequences=[0])


@pytest.mark.sweep(1)
@pytest.mark.parametrize("version", ["a3", "mma_sync"])
def test_varlen_blocks_of_logits_of_minus_infinity(version: str) -> None:
    """Such keys count as masked. They fill the last block of one sequence and all blocks of another."""
    given = sequences(q_lengths=[70, 70], k_lengths=[200, 70])
    given["q"][..., 0] = np.abs(given["q"][..., 0]) + 1
    given["k"][100:, :, 0] = -np.inf
    is_right(given, *run_varlen(given, version=version))


def test_offsets_that_a_device_must_not_trust() -> None:
    given = sequences(q_lengths=[70, 70], k_lengths=[70, 70], dim=32)
    out, lse = np.full_like(given["q"], 7), np.zeros((1, 140), np.float32)
    checked = check_varlen(**given, out=out, return_lse=True)
    given["cu_seqlens_q"][:] = -5, 2**31 - 1, 60
    given["cu_seqlens_k"][:] = 139, 2**31 - 1, -1
    config = small_config("a3", checked.problem, is_varlen=True)
    arrays = VARLEN_CALL.named(checked) | {"lse": describe(lse)}
    (launch,) = VARLEN_CALL.arguments(checked.problem, config, imagined_gpu(SM90A, 2), ())
    assert launch.emulate(SM90A, arrays, schedules=1).is_clean
    assert np.isfinite(out).all()
    assert (out[70:] == 7).all()  # the first sequence has 70 queries at most, the second one has none


def test_the_public_function_of_varlen() -> None:
    given = sequences(q_lengths=[65, 0], k_lengths=[70, 5], heads=2)
    out, lse = cudatma.attention_varlen(**given, causal=True, return_lse=True, backend="emulator")
    exact, sums = cudatma.attention_varlen(**given, causal=True, return_lse=True, backend="reference")
    np.testing.assert_allclose(out.astype(np.float64), exact.astype(np.float64), atol=2e-3)
    np.testing.assert_allclose(lse, sums, rtol=1e-5, atol=1e-5)
    none = sequences(q_lengths=[3], k_lengths=[0], heads=2)
    assert not cudatma.attention_varlen(**none, backend="emulator").any()
