"""The Marlin GEMM's results on a GPU, for every shape, option and layout. Needs CuPy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import marlin_cases as cases
import numpy as np
import pytest
from marlin_builders import skinny
from marlin_cases import Job
from marlin_operands import (
    DTYPES,
    LOAD_PATHS,
    POISON,
    Options,
    activations,
    bits,
    compare,
    is_poison,
    make_weight,
    poisoned,
    serve_with,
    to_float64,
    use_load_path,
)
from this_gpu import TARGET, cupy

from cudatma import marlin_gemm
from cudatma.build.kernel import compile as compile_kernel
from cudatma.build.render import render
from cudatma.dtypes import activation_type
from cudatma.kernels import choice, plans
from cudatma.kernels.gpu import Gpu, imagined_gpu
from cudatma.kernels.marlin.candidates import choose_mma_sync, dump_configs
from cudatma.kernels.marlin.choose import MARLIN
from cudatma.kernels.marlin.config import MarlinConfig
from cudatma.kernels.marlin.problem import Problem
from cudatma.kernels.schedule import ceil_div
from cudatma.quantization.weight_format import WEIGHT_FORMATS
from cudatma.target import Target, get_target

pytestmark = pytest.mark.gpu

#: Each format with each kind of scales.
FORMAT_JOBS = [
    Job(1000, 136, Options(dtype, group_size, bias=True, format=weight_format), ("tma",), (1, 16, 100, 333))
    for weight_format, kind in WEIGHT_FORMATS.items()
    if weight_format != "int4"
    for group_size in kind.group_sizes
    for dtype in ("float16", "bfloat16")
]
JOBS = cases.rotated_jobs() + cases.pairwise_jobs() + FORMAT_JOBS
#: For the kernels of a GPU with less shared memory: each tile of its table, and each option once.
SM120_JOBS = [
    Job(2048, 2048, Options(), ("tma",), (1, 16, 17, 64, 128, 333)),
    Job(8192, 12288, Options(), ("tma",), (32, 64, 333)),
    Job(1000, 136, Options("bfloat16", 32, False), ("tma",), (7, 100)),
    Job(1000, 136, Options("bfloat16", -1, False, act_order=True), ("tma",), (16, 100)),
    Job(333, 77, Options("float16", 64, False, bias=True), ("tma",), (8, 64)),
]


#: For the mma.sync kernel, with M for which another kernel is chosen.
MMA_SYNC_JOBS = [
    Job(2048, 2048, Options(), ("tma",), (1, 8, 16, 17, 32, 64, 100, 128, 333, 1024)),
    Job(8192, 12288, Options(), ("tma",), (1, 16, 32, 64, 333)),
    Job(1000, 136, Options("bfloat16", 32, False), ("tma",), (100,)),
    Job(1000, 136, Options("bfloat16", -1, False, bias=True), ("tma",), (100,)),
]
#: Whether scale and offset are one multiply-add is for each weight to decide.
WGMMA_CONFIGS = list(dict.fromkeys(config.in_form("none") for config in dump_configs("wgmma", TARGET)))
SKINNY_CONFIGS = dump_configs("skinny", TARGET)
#: One box for a stage's activations: more blocks than K has, whole stages, one that K ends in, two M tiles.
DEEP_JOBS = [
    (skinny(tile_m=8, tile_n=32, tile_k=1024, slice_k=8, stages=2, deep_box=True), 960, 4096),
    (
        skinny(
            dtype="bfloat16",
            group_size=32,
            has_zeros=True,
            tile_m=16,
            tile_n=96,
            tile_k=256,
            slice_k=4,
            stages=3,
            deep_box=True,
        ),
        8192,
        12290,
    ),
    (skinny(group_size=-1, tile_m=32, tile_n=64, tile_k=512, slice_k=2, stages=3, deep_box=True), 4160, 8136),
    (
        skinny(dtype="bfloat16", group_size=64, tile_m=16, tile_n=96, tile_k=128, slice_k=2, stages=4, deep_box=True),
        64,
        300,
    ),
]


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compile all kernels in parallel. Otherwise, each test would compile its own, one after another."""
    cases.precompile(JOBS)


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    yield
    cases.free_memory()


def check(out: Any, reference: Any, what: object = "") -> None:
    problem = compare(out, reference).problem(out.dtype.name)
    assert not problem, f"{what}: {problem}"


def use(monkeypatch: pytest.MonkeyPatch, config: MarlinConfig) -> None:
    """Make every GEMM run this config."""
    serve_with(monkeypatch, lambda *_: config)


def check_job(job: Job) -> None:
    problems = []
    for load_path, m, outcome in cases.run_job(job):
        if problem := outcome.problem(job.options.dtype):
            problems.append(f"M={m} {load_path}: {problem}")
    assert not problems, "\n".join([str(job), *problems])


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_against_float64(job: Job) -> None:
    check_job(job)


@pytest.mark.parametrize("job", MMA_SYNC_JOBS, ids=str)
def test_the_mma_sync_kernel_with_a_large_m(monkeypatch: pytest.MonkeyPatch, job: Job) -> None:
    serve_with(monkeypatch, choose_mma_sync)
    check_job(job)


@pytest.mark.parametrize("config", WGMMA_CONFIGS, ids=lambda config: config.entry)
def test_each_wgmma_tile(monkeypatch: pytest.MonkeyPatch, config: MarlinConfig) -> None:
    """The cases have a small M, tails, tiles with and without several CTAs, short rows, and more tiles than CTAs."""
    use(monkeypatch, config)
    options = Options(config.dtype, config.group_size, not config.has_zeros, bias=True, format=config.format)
    for k, n, m_values in (
        (1000, 136, (1, config.tile_m - 3)),
        (4096, 2056, (7, 2 * config.tile_m + 5)),
        (512, 20000, (700,)),
    ):
        if ceil_div(k, config.tile_k) >= config.cluster_k:  # else a block would have no stage, and the call is refused
            check_job(Job(k, n, options, ("tma",), m_values))


@pytest.mark.parametrize("config", SKINNY_CONFIGS, ids=lambda config: config.entry)
def test_each_skinny_tile(monkeypatch: pytest.MonkeyPatch, config: MarlinConfig) -> None:
    """The cases have tails in every dimension, rings with more stages than K, several M tiles, and more CTAs than fit
    on the GPU."""
    use(monkeypatch, config)
    options = Options(config.dtype, config.group_size, not config.has_zeros, bias=True, format=config.format)
    for k, n, m_values in (
        (1000, 136, (1, config.tile_m - 3)),
        (4096, 2056, (7, 2 * config.tile_m + 5)),
        (200, 40000, (5,)),
        (9000, 4097, (3, config.tile_m)),
    ):
        whole_k = k // 64 * 64 if config.deep_box else k
        if ceil_div(whole_k, config.tile_k) >= config.cluster_k:
            check_job(Job(whole_k, n, options, ("tma",), m_values))


@pytest.mark.parametrize(("config", "k", "n"), DEEP_JOBS, ids=lambda value: getattr(value, "entry", str(value)))
def test_a_stage_in_one_box(monkeypatch: pytest.MonkeyPatch, config: MarlinConfig, k: int, n: int) -> None:
    """The result is compared with float64, and bitwise with a box per 64 elements of K. NaNs follow the rows of a
    window."""
    weight = make_weight(k, n, Options(config.dtype, config.group_size, not config.has_zeros))
    m, found = config.tile_m + 5, []
    values, buffer = activations((m, k), config.dtype), poisoned((m, k + 8), config.dtype)
    bits(buffer)[:, :k] = bits(values)
    for deep in (True, False):
        of = replace(config, deep_box=deep)
        planned = serve_with(monkeypatch, lambda *_, of=of: of)
        out = marlin_gemm(buffer[:, :k], weight.packed)
        assert planned == [of]
        check(out, to_float64(values) @ weight.dense)
        found.append(bits(out).get())
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("job", SM120_JOBS, ids=str)
def test_the_sm120_form_on_this_gpu(monkeypatch: pytest.MonkeyPatch, job: Job) -> None:
    """Configuration and source are sm_120a's; only the compiler is told this GPU's name."""
    sm120, rendered = get_target("sm_120a"), []

    def as_sm120(problem: Problem, gpu: Gpu) -> MarlinConfig:
        return choice.choose(MARLIN, problem, imagined_gpu(sm120, gpu.sm_count), {})

    def load_kernel(template: str, config: Any, target: Target) -> Any:
        rendered.append(config.entry)
        return compile_kernel(render(template, config, sm120), target=target, entry=config.entry)

    serve_with(monkeypatch, as_sm120)
    monkeypatch.setattr(plans, "load_kernel", load_kernel)
    monkeypatch.setattr(plans, "known_kernel", lambda *_: None)  # it may know this GPU's form of the same config
    check_job(job)
    assert rendered


@pytest.mark.parametrize("load_path", LOAD_PATHS)
@pytest.mark.parametrize(("x_gap", "out_gap"), [(1, 1), (4, 8), (0, 3), (12, 0)])
def test_pitches(x_gap: int, out_gap: int, load_path: str) -> None:
    """x and out are windows of wider buffers; NaNs lie to the right of x and below it, and all around out."""
    k, n, rows = 100, 72, 21
    weight = make_weight(k, n, Options(group_size=32))
    values = activations((rows, k), "float16")
    x_buffer = poisoned((rows + 2, k + x_gap), "float16")
    x_buffer[:rows, :k] = values
    buffer = poisoned((rows + 2, n + out_gap), "float16")
    out = buffer[:rows, :n]
    with use_load_path(weight.packed, rows, load_path):
        assert marlin_gemm(x_buffer[:rows, :k], weight.packed, out=out) is out
    check(out, to_float64(values) @ weight.dense)
    assert is_poison(bits(buffer)[:rows, n:])
    assert is_poison(bits(buffer)[rows:])


@pytest.mark.parametrize("lead", [(), (1,), (3,), (2, 3, 5), (1, 4, 1), (2, 0, 3)], ids=str)
def test_leading_dimensions(lead: tuple[int, ...]) -> None:
    weight = make_weight(96, 40, Options(group_size=32))
    x = activations((*lead, 96), "float16")
    out = marlin_gemm(x, weight.packed)
    assert (type(out), out.shape, out.dtype) == (cupy.ndarray, (*lead, 40), np.float16)
    check(out, to_float64(x) @ weight.dense)


def test_leading_dimensions_that_fold_into_one_pitch() -> None:
    weight = make_weight(96, 40, Options(group_size=32))
    whole = activations((4, 6, 2, 96), "float16")
    x = whole[:, :, 1]
    out = poisoned((4, 6, 3, 40), "float16")
    marlin_gemm(x, weight.packed, out=out[:, :, 1])
    check(out[:, :, 1], to_float64(cupy.ascontiguousarray(x)) @ weight.dense)
    assert is_poison(bits(out)[:, :, 0::2])


@pytest.mark.parametrize("load_path", ["tma", "cp_async"])
@pytest.mark.parametrize("k", [128, 100])
def test_rows_that_are_one_row(k: int, load_path: str) -> None:
    weight = make_weight(k, 136)
    row = activations((k,), "float16")
    with use_load_path(weight.packed, 40, load_path):
        out = marlin_gemm(cupy.broadcast_to(row, (40, k)), weight.packed)
    check(out, cupy.broadcast_to(to_float64(row) @ weight.dense, (40, 136)))
    assert bool((bits(out) == bits(out)[0]).all())


@pytest.mark.parametrize("load_path", ["tma", "cp_async"])
@pytest.mark.parametrize("m", [3, 100])
def test_a_row_of_nans_spoils_no_other(m: int, load_path: str) -> None:
    weight = make_weight(1000, 136)
    x = activations((m, 1000), "float16")
    reference = to_float64(x) @ weight.dense
    x[1] = np.nan
    with use_load_path(weight.packed, m, load_path):
        out = marlin_gemm(x, weight.packed)
    assert bool(cupy.isnan(out[1]).all())
    check(out[2:], reference[2:])
    check(out[:1], reference[:1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_tensors_on_torchs_stream(dtype: str) -> None:
    """torch writes x after a long wait on its own stream, so a launch on any other stream would read zeros."""
    torch = pytest.importorskip("torch")
    weight = make_weight(256, 200, Options(dtype))
    values = activations((2, 9, 256), dtype)
    as_torch = torch.from_dlpack(values.view(np.int16)).view(getattr(torch, dtype))
    x, stream = torch.zeros_like(as_torch), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        marlin_gemm(x, weight.packed)  # compiles, and makes the stream's workspace
        torch.cuda.synchronize()
        torch.cuda._sleep(100_000_000)
        x.copy_(as_torch)
        out = marlin_gemm(x, weight.packed)
        again = torch.empty_like(out)
        assert marlin_gemm(x, weight.packed, out=again) is again
        assert marlin_gemm(x, weight.packed, out=again) is again
        assert not stream.query(), "the wait was too short to tell one stream from another"
    torch.cuda.synchronize()
    assert (type(out), out.dtype, tuple(out.shape)) == (torch.Tensor, as_torch.dtype, (2, 9, 200))
    assert torch.equal(out, again)
    found = cupy.from_dlpack(out.view(torch.int16)).view(activation_type(dtype).numpy)
    check(found, to_float64(values) @ weight.dense)


def test_a_result_of_more_than_2_to_31_elements() -> None:
    m, k, n = 270_000, 64, 8192
    if cupy.cuda.runtime.memGetInfo()[0] < 8 << 30:
        pytest.skip("needs 8 GiB of free memory")
    weight = make_weight(k, n, Options(group_size=64))
    x = activations((m, k), "float16")
    out = poisoned((m + 1, n), "float16")
    marlin_gemm(x, weight.packed, out=out[:m])
    edge = 2**31 // n
    sampled = [0, 1, *range(edge - 65, edge + 65), *range(m - 130, m), *range(777, m, 1009)]
    found, read = (cupy.stack([array[row] for row in sampled]) for array in (out, x))
    check(found, to_float64(read) @ weight.dense)
    for first in range(0, m, 16384):
        assert not bool((bits(out[first : min(m, first + 16384)]) == POISON).any()), f"rows from {first} on"
    assert is_poison(out[m:])
