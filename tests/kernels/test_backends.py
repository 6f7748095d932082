"""Public functions on NumPy arrays: Kernel.launch and .emulate, tile_copy and MarlinLinear with backend="emulator"."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import cudatma
from cudatma import ArgumentError, BackendWarning, HazardError, LaunchError, MarlinLinear, TensorMap, backend, tile_copy

SCALE = """
extern "C" __global__ void scale(float* x, float factor, const int* skip) {
    if (skip == nullptr) x[blockIdx.x * blockDim.x + threadIdx.x] *= factor;
}"""
RACE = """
extern "C" __global__ void race(float* x) {
    __shared__ float tile[64];
    tile[threadIdx.x] = x[threadIdx.x];
    x[threadIdx.x] = tile[63 - threadIdx.x];
}"""


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_has_usable_gpu", lambda: False)
    monkeypatch.delenv("CUDATMA_BACKEND", raising=False)


# ---- kernels of one's own


def test_without_a_gpu_a_launch_on_host_arrays_says_where_it_runs(no_gpu: None) -> None:
    kernel, x = cudatma.compile(SCALE, target="sm_90a"), np.ones(32, np.float32)
    with pytest.warns(BackendWarning, match=r"Kernel\.launch computes on the CPU \(emulator\)") as caught:
        kernel.launch(1, 32, (x, 3.0, None))
    assert caught[0].filename == __file__
    assert (x == 3).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernel.launch(1, 32, (x, 3.0, None), backend="emulator")


def test_with_a_gpu_host_arrays_are_refused_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_has_usable_gpu", lambda: True)
    monkeypatch.delenv("CUDATMA_BACKEND", raising=False)
    with pytest.raises(LaunchError, match="host memory"):
        cudatma.compile(SCALE, target="sm_90a").launch(1, 32, (np.ones(32, np.float32), 3.0, None))


def test_hazards_and_wrong_backends_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, x = cudatma.compile(RACE, target="sm_90a"), np.ones(64, np.float32)
    with pytest.raises(HazardError, match="data_race"):
        kernel.launch(1, 64, (x,), backend="emulator")
    assert "data_race" in kernel.emulate(1, 64, (x,), hazards="collect").kinds
    with pytest.raises(TypeError, match="unexpected keyword argument 'hazard'"):
        kernel.emulate(1, 64, (x,), hazard="collect")
    for named in ("reference", "gpu"):
        with pytest.raises(ArgumentError, match=f"backend must be .*got {named}"):
            kernel.launch(1, 64, (x,), backend=named)
    monkeypatch.setenv("CUDATMA_BACKEND", "reference")
    with pytest.raises(ArgumentError, match=r"CUDATMA_BACKEND must be .*got reference"):
        kernel.launch(1, 64, (x,))


# ---- tile_copy


def test_tile_copy_takes_the_emulator_by_itself(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    source, destination = np.ones((8, 16), np.float32), np.zeros((8, 16), np.float32)
    with pytest.warns(BackendWarning, match="tile_copy"):
        tile_copy(source, destination)
    assert (destination == 1).all()
    assert tile_copy(source[:0], destination[:0], backend="emulator").shape == (0, 16)
    monkeypatch.setenv("CUDATMA_BACKEND", "cuda")
    with pytest.raises(ArgumentError, match="unset CUDATMA_BACKEND, which is cuda"):
        tile_copy(source, destination)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda a: (a, a[:, :8], {}), "dst"),
        (lambda a: (a, a.astype(np.float64), {}), "dst"),
        (lambda a: (a, a, {}), "dst"),
        (lambda a: (a, np.frombuffer(a.tobytes(), a.dtype).reshape(a.shape), {}), "dst"),
        (lambda a: (a[0], a[0].copy(), {}), "src.shape"),
        (lambda a: (a, a.copy(), {"stages": 1}), "stages"),
        (lambda a: (a, a.copy(), {"backend": "cuda"}), "src.device"),
        (lambda a: (a[:, :5], a[:, :5].copy(), {}), None),
    ],
)
def test_what_tile_copy_refuses(make: Any, field: str | None) -> None:
    source, destination, options = make(np.ones((8, 16), np.float32))
    with pytest.raises(cudatma.CudaTmaError) as caught:
        tile_copy(source, destination, **({"backend": "emulator"} | options))
    assert field is None or caught.value.field == field  # type: ignore[attr-defined]


# ---- layers


def test_marlin_linear(no_gpu: None) -> None:
    random = np.random.default_rng(0)
    dense, bias = random.standard_normal((64, 128), np.float32), random.standard_normal(64).astype(np.float16)
    layer = MarlinLinear.from_dense(dense, bias)
    x = random.standard_normal((2, 3, 128), np.float32).astype(np.float16)
    reference = layer(x, backend="reference").astype(np.float64)
    with pytest.warns(BackendWarning, match="marlin_gemm"):
        out = layer(x)
    assert out.shape == (2, 3, 64)
    assert np.linalg.norm(out - reference) < 1e-3 * np.linalg.norm(reference)
    assert np.array_equal(layer(x, backend="emulator"), out)
    layer.warm_up([1, 16])  # nothing to do


# ---- SM120

CLUSTER = 'extern "C" __global__ void k(int* x) { x[blockIdx.x] = 1; }'
MULTICAST = """
//% include "primitives/tma_load.cuh.j2"
//% include "primitives/mbarrier.cuh.j2"
using namespace cudatma;
extern "C" __global__ void k(const __grid_constant__ TensorMap map) {
    __shared__ __align__(128) float tile[64];
    __shared__ u64 barrier;
    const u32 bar = shared_address(&barrier);
    if (threadIdx.x == 0) {
        mbarrier_init(bar, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(bar, 256);
        cp_async_bulk_tensor_1d_load_multicast(shared_address(tile), &map, bar, 0, (u16)1);
    }
    __syncthreads();
    mbarrier_wait_parity(bar, 0);
}"""
WGMMA = """
extern "C" __global__ void k() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }"""


@pytest.mark.parametrize(
    ("options", "field"), [({"cluster": 2}, "cluster"), ({"shared_bytes": 99 * 1024 + 16}, "shared_bytes")]
)
def test_launches_that_sm120_cannot_run_are_refused(options: dict[str, int], field: str) -> None:
    x = np.zeros(2, np.int32)
    cudatma.compile(CLUSTER, target="sm_90a").emulate(2, 32, (x,), **options)
    with pytest.raises(ArgumentError) as caught:
        cudatma.compile(CLUSTER, target="sm_120a").emulate(2, 32, (x,), **options)
    assert caught.value.field == field
    assert "sm_120a" in str(caught.value)


@pytest.mark.parametrize("source", [MULTICAST, WGMMA], ids=["multicast", "wgmma"])
def test_instructions_that_sm120_lacks_are_reported(source: str) -> None:
    kernel = cudatma.compile(source, target="sm_90a", template=source is MULTICAST)
    x = np.zeros(64, np.float32)
    args = (TensorMap.from_array(x, (64,), encoder="codec"),) if source is MULTICAST else ()
    assert kernel.emulate(1, 128, args, arrays=(x,), hazards="collect").is_clean
    report = kernel.emulate(1, 128, args, arrays=(x,), hazards="collect", target="sm_120a")
    assert report.kinds == {"target"}
