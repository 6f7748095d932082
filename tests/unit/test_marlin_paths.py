"""marlin_gemm's paths on a GPU of host memory: activations that are copied first, weights that are dequantized."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from marlin_fake_gpu import Array, FakeGpu
from marlin_fake_gpu import gpu as gpu  # the fixture
from test_marlin_gemm import close, make, values

from cudatma import LaunchError, MarlinLinear, MarlinWorkspace, marlin_gemm
from cudatma.dtypes import activation_type
from cudatma.kernels.marlin import cublas, dense
from cudatma.kernels.stream_workspaces import stream_workspace
from cudatma.runtime.launch import Kernel

K, N = 128, 64
STREAM = 5


def gemm(gpu: FakeGpu, x: Any, w: Any, **options: Any) -> Any:
    """The result's values, of a call with arrays on the GPU."""
    out = gpu.array(np.full((*x.shape[:-1], w.shape[1]), np.nan, x.dtype))
    given = x if isinstance(x, Array) else gpu.array(x)
    call = {"backend": "cuda", "stream": STREAM} | options
    if call["backend"] is None:
        del call["backend"]
    assert marlin_gemm(given, w, out, **call) is out
    return out.values


def entries(gpu: FakeGpu) -> list[tuple[bool, bool]]:
    """(is the copy, is programmatic) of each launch since the last question."""
    found = [(launch.entry == "permute_columns", launch.programmatic) for launch in gpu.launches]
    gpu.launches.clear()
    return found


def bits(array: Any) -> Any:
    return array.view(np.uint16)


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """marlin_gemm without backend= asks nobody, so that calls can be repeated ones."""
    monkeypatch.setenv("CUDATMA_BACKEND", "cuda")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("programmatic", [False, True])
def test_act_order_takes_two_launches_and_gives_the_ordered_weights_bits(
    gpu: FakeGpu, dtype: str, programmatic: bool
) -> None:
    weight, reference = make(K, N, dtype=dtype, act_order=True)
    x = values((9, K), dtype)
    out = gemm(gpu, x, weight, programmatic=programmatic)
    # The copy is what the caller asked for; the GEMM always is a dependent of the copy.
    assert entries(gpu) == [(True, programmatic), (False, True)]
    assert close(out, x.astype(np.float64) @ reference)
    ordered = gemm(gpu, np.ascontiguousarray(x[:, weight.perm]), replace(weight, perm=None))
    assert entries(gpu) == [(False, False)]
    np.testing.assert_array_equal(bits(out), bits(ordered))


@pytest.mark.parametrize(("offset", "width"), [(0, K + 1), (1, K + 8), (8, K + 8), (3, K + 5)])
def test_pitches_and_addresses_off_16_bytes(gpu: FakeGpu, offset: int, width: int) -> None:
    weight, reference = make(K, N)
    buffer = values((7, width))
    x = buffer[:, offset : offset + K]
    out = gemm(gpu, x, weight)
    aligned = offset % 8 == 0 and width % 8 == 0
    assert entries(gpu) == ([] if aligned else [(True, False)]) + [(False, not aligned)]
    assert close(out, x.astype(np.float64) @ reference)
    np.testing.assert_array_equal(bits(out), bits(gemm(gpu, np.ascontiguousarray(x), weight)))


def test_repeated_calls_write_the_new_addresses(gpu: FakeGpu, fast: None) -> None:
    weight, reference = make(K, N, act_order=True)
    for seed in range(4):
        x = values((5, K), seed=seed)
        assert close(gemm(gpu, x, weight, backend=None), x.astype(np.float64) @ reference)
        assert entries(gpu) == [(True, False), (False, True)]
    plans = {id(plan) for plan in weight.attachments["plans"].values()}
    assert len(plans) == 1


def test_an_unaligned_call_leaves_aligned_ones_their_plan(gpu: FakeGpu, fast: None) -> None:
    weight, reference = make(K, N)
    # The same shape and pitch each time; only the address differs.
    for offset, launches in ((1, 2), (0, 1), (3, 2), (0, 1), (0, 1)):
        x = values((4, K + 8), seed=offset)[:, offset : offset + K]
        assert close(gemm(gpu, x, weight, backend=None), x.astype(np.float64) @ reference)
        assert len(entries(gpu)) == launches


def test_the_workspace_grows_and_keeps_what_graphs_may_hold(gpu: FakeGpu) -> None:
    weight, _ = make(K, N, act_order=True)
    rows = stream_workspace(0, STREAM).rows
    assert rows.nbytes == 0
    gemm(gpu, values((3, K)), weight)
    first, size = rows.room(1), rows.nbytes
    assert size % (2 << 20) == 0
    assert rows.room(size) == first
    second = rows.room(size + 1)
    assert rows.nbytes >= 2 * size
    assert {first, second} <= set(gpu.memory)
    assert stream_workspace(0, STREAM + 1).rows is not rows


def test_a_capture_needs_kernels_but_no_call_on_its_stream(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, _ = make(K, N, act_order=True)
    x = values((3, K))
    gpu.capturing |= {STREAM, 9}
    with monkeypatch.context() as patch:
        patch.setattr(Kernel, "is_loaded", lambda self, device: False)
        with pytest.raises(LaunchError, match="before the capture"):
            gemm(gpu, x, weight)
    gpu.capturing.clear()
    gemm(gpu, x, weight)
    gpu.launches.clear()
    gpu.capturing |= {STREAM, 9}
    for options in ({}, {"stream": 9}, {"workspace": MarlinWorkspace(0)}):
        gemm(gpu, x, weight, **options)
        assert entries(gpu) == [(True, False), (False, True)]


def test_a_branch_has_rows_of_its_own(gpu: FakeGpu) -> None:
    eager = stream_workspace(0, STREAM).rows
    gpu.capturing |= {STREAM, 9}
    rows = [stream_workspace(0, stream).rows for stream in (STREAM, 9, STREAM)]
    assert rows[0] is rows[2]
    first = rows[0].room(100)
    assert rows[0].room(100) == first
    assert len({id(one) for one in (eager, *rows)}) == len({eager.room(100), first, rows[1].room(100)}) == 3


def test_warm_up_makes_a_capture_possible(gpu: FakeGpu) -> None:
    weight, _ = make(K, N, act_order=True)
    layer = MarlinLinear(weight)
    layer.warm_up([1, 9], stream=STREAM)
    held = set(gpu.memory)
    assert not gpu.launches
    gpu.capturing |= {STREAM}
    x = gpu.array(values((9, K)))
    layer(x, gpu.array(np.empty((9, N), np.float16)), STREAM, backend="cuda")
    assert entries(gpu) == [(True, False), (False, True)]
    assert set(gpu.memory) == held


def test_threads_of_one_stream_do_not_mix_their_rows(gpu: FakeGpu) -> None:
    """Each copy is followed by its own GEMM, though both threads write to the same rows."""
    weight, reference = make(K, N, act_order=True)
    xs = [values((2, K), seed=seed) for seed in (1, 2)]
    for x in xs:
        gemm(gpu, x, weight)
    gpu.launches.clear()
    outs: dict[int, Any] = {}

    def work(number: int) -> None:
        outs[number] = gemm(gpu, xs[number], weight)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [is_copy for is_copy, _ in entries(gpu)] == [True, False, True, False]
    for number, x in enumerate(xs):
        assert close(outs[number], x.astype(np.float64) @ reference)


# ---- The dense path ----


@pytest.fixture
def product(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From M = 8 on; cuBLAS is NumPy, on the memory at the addresses. Yields the M of each product."""
    seen: list[int] = []

    def by_numpy(x: Any, weight: Any, out: Any, bias: Any, stream: int) -> None:
        seen.append(x.rows)
        k, n = weight.shape
        pitch = weight.strides_bytes[0] // 2
        raw = (ctypes.c_uint16 * (k * pitch)).from_address(weight.pointer)
        whole = np.frombuffer(raw, weight.dtype).reshape(k, pitch)[:, :n].astype(np.float32)
        sums = x.info.owner.values.reshape(x.rows, k).astype(np.float32) @ whole
        out.info.owner.values[...] = sums if bias is None else sums + bias.owner.values

    monkeypatch.setitem(dense.FROM_M, "sm_90a", 8)
    monkeypatch.setattr(dense, "choose_product", lambda *_: by_numpy)
    monkeypatch.setattr(dense, "_recent", {})
    return seen


def nbytes(w: Any) -> int:
    return dense.dense_nbytes(w)


@pytest.mark.parametrize(("n", "act_order", "zeros"), [(N, False, False), (77, True, True)])
def test_the_dense_path_gives_the_product_of_the_dequantised_weight(
    gpu: FakeGpu, product: list[int], n: int, act_order: bool, zeros: bool
) -> None:
    weight, reference = make(K, n, act_order=act_order, zeros=zeros)
    x, bias = values((8, K)), gpu.array(values((n,), seed=3))
    budget = nbytes(weight)
    out = gemm(gpu, x, weight, bias=bias, dense_bytes=budget)
    assert close(out, x.astype(np.float64) @ reference + bias.values.astype(np.float64))
    assert ([launch.entry for launch in gpu.launches], product) == (["dequantize"], [8])
    # Once only; the copy is there on every stream, since the first call waited for it.
    assert gpu.waited[-1:] == [STREAM]
    gemm(gpu, x, weight, dense_bytes=budget, stream=8)
    assert ([launch.entry for launch in gpu.launches], product) == (["dequantize"], [8, 8])


def test_tokens_and_budget_alone_decide(gpu: FakeGpu, product: list[int], fast: None) -> None:
    weight, _ = make(K, N)
    budget = nbytes(weight)
    for m, allowed, expected in ((8, budget, 1), (7, budget, 0), (8, budget - 1, 0), (8, 0, 0), (8, budget, 1)):
        for _ in range(2):  # the second one is a repeated call
            product.clear()
            gemm(gpu, values((m, K)), weight, dense_bytes=allowed, backend=None)
            assert len(product) == expected
    assert dense.DEFAULT_FROM_M == 2048


def test_the_budget_is_shared_and_the_least_recently_used_goes(gpu: FakeGpu, product: list[int]) -> None:
    weights = [make(K, N, seed=seed)[0] for seed in range(3)]
    size = nbytes(weights[0])
    x = values((8, K))
    made = lambda: [launch.entry for launch in gpu.launches].count("dequantize")  # noqa: E731
    for number, copies in ((0, 1), (1, 2), (0, 2), (2, 3), (0, 3), (1, 4)):
        # 2 drives out 1, which was used before 0; then 1 drives out 2.
        gemm(gpu, x, weights[number], dense_bytes=2 * size)
        assert made() == copies
        assert dense.dense_bytes_in_use(0) <= 2 * size
    held = sum(buffer.nbytes == size for buffer in gpu.memory.values())
    assert held == 2
    weights.clear()
    gc.collect()
    assert dense.dense_bytes_in_use(0) == 0
    assert not any(buffer.nbytes == size for buffer in gpu.memory.values())


def test_captures(gpu: FakeGpu, product: list[int]) -> None:
    weights = [make(K, N, seed=seed)[0] for seed in range(2)]
    size, x = nbytes(weights[0]), values((8, K))
    gpu.capturing |= {STREAM}
    with pytest.raises(LaunchError, match="dequantized"):
        gemm(gpu, x, weights[0], dense_bytes=size)
    assert not gpu.launches
    gpu.capturing.clear()
    layer = MarlinLinear(weights[0], dense_bytes=size)
    layer.warm_up([8, 1], stream=STREAM)
    assert [launch.entry for launch in gpu.launches] == ["dequantize"]
    gpu.capturing |= {STREAM}
    gemm(gpu, x, weights[0], dense_bytes=size)
    gpu.capturing.clear()
    # The graph reads the copy, which stays; the budget has no room for another one.
    with pytest.raises(LaunchError, match="captured graphs"):
        gemm(gpu, x, weights[1], dense_bytes=size)
    gemm(gpu, x, weights[1], dense_bytes=2 * size)
    assert dense.dense_bytes_in_use(0) == 2 * size


def test_a_weight_with_many_plans_keeps_its_copy(
    gpu: FakeGpu, product: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from cudatma.kernels.marlin import gemm as module

    monkeypatch.setattr(module, "_MOST_PLANS", 2)
    weight, _ = make(K, N)
    gemm(gpu, values((8, K)), weight, dense_bytes=nbytes(weight))
    for m in (1, 2, 3):
        gemm(gpu, values((m, K)), weight)
    assert dense.dense_bytes_in_use(0) == nbytes(weight)


def test_a_layer_passes_its_budget(gpu: FakeGpu, product: list[int]) -> None:
    weight, reference = make(K, N)
    layer = MarlinLinear(weight, dense_bytes=nbytes(weight))
    assert f"dense_bytes={nbytes(weight)}" in repr(layer)
    x, out = gpu.array(values((8, K))), gpu.array(np.empty((8, N), np.float16))
    layer(x, out, STREAM, backend="cuda")
    assert product == [8]
    assert close(out.values, x.values.astype(np.float64) @ reference)


# ---- cuBLAS's own conventions ----


class Cublas:
    """cublasGemmEx in column-major order, by NumPy, on host memory."""

    CUBLAS_POINTER_MODE_HOST = 0

    class CUBLASError(RuntimeError):
        status = 7

    def __init__(self) -> None:
        self.calls = 0

    def setPointerMode(self, handle: int, mode: int) -> None:  # noqa: N802
        assert (handle, mode) == (99, 0)

    def gemmEx(self, handle: int, *arguments: int) -> None:  # noqa: N802
        ta, tb, m, n, k, alpha, a, a_type, lda, b, b_type, ldb, beta, c, c_type, ldc, compute, algo = arguments
        assert (ta, tb, compute, algo) == (0, 0, 68, -1)
        assert a_type == b_type == c_type
        assert lda >= m
        assert ldb >= k
        assert ldc >= m
        kind = values((0,), {2: "float16", 14: "bfloat16"}[a_type]).dtype

        def columns(address: int, rows: int, count: int, leading: int) -> Any:
            size = (count - 1) * leading + rows
            flat = np.frombuffer((ctypes.c_uint16 * size).from_address(address), kind)
            return np.lib.stride_tricks.as_strided(flat, (rows, count), (2, 2 * leading))

        one, other = (np.frombuffer((ctypes.c_float * 1).from_address(p), np.float32)[0] for p in (alpha, beta))
        result = columns(c, m, n, ldc)
        product = one * (columns(a, m, k, lda).astype(np.float32) @ columns(b, k, n, ldb).astype(np.float32))
        result[...] = product if other == 0 else product + other * result.astype(np.float32)
        self.calls += 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layout", ["dense", "pitch", "one row"])
def test_the_arguments_of_gemm_ex(monkeypatch: pytest.MonkeyPatch, dtype: str, bias: bool, layout: str) -> None:
    fake = FakeCupy()
    library = Cublas()
    monkeypatch.setattr(cublas, "_cublas", lambda: library)
    monkeypatch.setattr(cublas, "with_cupy", lambda call, function: function(fake))
    m, k, n = 6, 24, 16
    x = values((m, k + 4), dtype)[:, :k] if layout == "pitch" else values((m, k), dtype)
    x = np.broadcast_to(x[0], (m, k)) if layout == "one row" else x
    weight, added = values((k, n + 8), dtype, 2)[:, :n], values((n,), dtype, 3)
    out = np.full((m, n + 2), np.nan, x.dtype)[:, :n]
    rows = [cublas.Rows(Array(a).info, m, a.strides[0]) for a in (x, out)]
    cublas.by_cupy(rows[0], Array(weight).info, rows[1], Array(added).info if bias else None, STREAM)
    wanted = x.astype(np.float64) @ weight.astype(np.float64) + (added.astype(np.float64) if bias else 0)
    assert close(out, wanted)
    assert library.calls == 1
    assert fake.stream == (STREAM, 0)


class FakeCupy:
    """As much of CuPy as the product uses, on host memory."""

    def __init__(self) -> None:
        self.stream: Any = None
        self.cuda = self
        self.device = self
        self.ascontiguousarray = lambda array: Array(np.ascontiguousarray(array))

    def get_cublas_handle(self) -> int:
        return 99

    def Device(self, ordinal: int) -> Any:  # noqa: N802
        return self

    def ExternalStream(self, handle: int, device: int) -> Any:  # noqa: N802
        self.stream = handle, device
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def UnownedMemory(self, pointer: int, size: int, owner: object, device: int) -> Any:  # noqa: N802
        return (ctypes.c_uint8 * size).from_address(pointer)

    def MemoryPointer(self, memory: Any, offset: int) -> Any:  # noqa: N802
        return memory

    def ndarray(self, shape: Any, dtype: Any, memory: Any, strides: Any) -> Any:
        return np.ndarray(shape, dtype, memory, strides=strides)


def test_captures_are_torchs_alone(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublas, "_cublas", Cublas)
    x, out = (cublas.Rows(Array(a).info, 1, 64) for a in (values((1, 32)), values((1, 16))))
    assert cublas.choose_product(x, out, None, STREAM) is cublas.by_cupy
    gpu.capturing |= {STREAM}
    with pytest.raises(LaunchError, match="CuPy"):
        cublas.choose_product(x, out, None, STREAM)
    torchs = [cublas.Rows(replace(rows.info, kind="torch"), 1, 64) for rows in (x, out)]
    assert cublas.choose_product(*torchs, None, STREAM) is cublas.by_torch  # type: ignore[call-arg]


class Tensor:
    """As much of a torch tensor as the product uses, on host memory."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def detach(self) -> Tensor:
        return self

    def view(self, kind: Any) -> Tensor:
        return Tensor(self.values.view(kind))

    def as_strided(self, shape: Any, strides: Any) -> Tensor:
        return Tensor(np.lib.stride_tricks.as_strided(self.values, shape, [2 * step for step in strides]))


class FakeTorch:
    """torch.mm, torch.addmm and streams; notes which stream the products ran on."""

    def __init__(self, current: int) -> None:
        self.cuda, self.streams, self.ran = self, [current], []
        self.float16 = np.dtype(np.float16)
        self.bfloat16 = activation_type("bfloat16").numpy

    def no_grad(self) -> Any:
        return contextlib.nullcontext()

    def current_stream(self, device: int) -> Any:
        return SimpleNamespace(cuda_stream=self.streams[-1])

    def default_stream(self, device: int) -> Any:
        return SimpleNamespace(cuda_stream=0)

    def ExternalStream(self, handle: int, device: int) -> Any:  # noqa: N802
        assert handle, "the default stream is no external one"
        return SimpleNamespace(cuda_stream=handle)

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.streams.append(stream.cuda_stream)
        yield
        self.streams.pop()

    def as_tensor(self, made: Any, device: str) -> Tensor:
        interface = made.__cuda_array_interface__
        (rows, columns), (pitch, _) = interface["shape"], interface["strides"]
        memory = (ctypes.c_uint8 * ((rows - 1) * pitch + 2 * columns)).from_address(interface["data"][0])
        assert (device, interface["typestr"]) == ("cuda:0", "<i2")
        return Tensor(np.ndarray((rows, columns), np.int16, memory, strides=(pitch, 2)))

    def mm(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        self.addmm(Tensor(np.zeros(1)), a, b, out)

    def addmm(self, bias: Tensor, a: Tensor, b: Tensor, out: Tensor) -> None:
        self.ran.append(self.streams[-1])
        out.values[...] = a.values.astype(np.float32) @ b.values.astype(np.float32) + bias.values.astype(np.float32)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("current", [0, STREAM])
@pytest.mark.parametrize("stream", [0, STREAM])
def test_torchs_product(monkeypatch: pytest.MonkeyPatch, dtype: str, current: int, stream: int) -> None:
    fake = FakeTorch(current)
    monkeypatch.setitem(sys.modules, "torch", fake)
    x, weight = values((2, 3, 24), dtype), values((24, 24), dtype, 2)[:, :16]
    added, wide = values((16,), dtype, 3), np.full((6, 20), np.nan, x.dtype)
    for bias in (None, added):
        rows = [cublas.Rows(replace(Array(a).info, owner=Tensor(a)), 6, pitch) for a, pitch in ((x, 48), (wide, 40))]
        rows[1] = replace(rows[1], info=replace(rows[1].info, shape=(6, 16)))
        addend = None if bias is None else replace(Array(bias).info, owner=Tensor(bias))
        cublas.by_torch(rows[0], Array(weight).info, rows[1], addend, stream)
        out = wide[:, :16]
        wanted = x.reshape(6, 24).astype(np.float64) @ weight.astype(np.float64)
        assert close(out, wanted if bias is None else wanted + bias.astype(np.float64))
        assert np.isnan(wide[:, 16:]).all()
    assert fake.ran == [stream, stream]
    assert fake.streams == [current]
