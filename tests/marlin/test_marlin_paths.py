"""marlin_gemm's paths on a GPU of host memory: activations that are copied first, weights that are dequantized."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from marlin_fake_gpu import FakeGpu
from marlin_fake_gpu import gpu as gpu  # the fixture
from stub_driver import Array
from test_marlin_gemm import close, make, values

from cudatma import ArgumentError, LaunchError, MarlinLinear, MarlinWorkspace, marlin_gemm
from cudatma.kernels import choice_table
from cudatma.kernels import warm_up as shared
from cudatma.kernels.calls import calls_of
from cudatma.kernels.gpu import imagined_gpu
from cudatma.kernels.marlin import warm_up as warming
from cudatma.kernels.marlin.gemm import MARLIN_GEMM
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
    assert len(calls_of(MARLIN_GEMM).calls) == 1


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


def test_weights_of_one_shape_share_their_plans(gpu: FakeGpu, fast: None) -> None:
    made = [make(K, N, act_order=act_order, seed=seed) for act_order in (False, True) for seed in (0, 1)]
    for _ in range(2):
        for weight, reference in made:
            x = values((5, K))
            assert close(gemm(gpu, x, weight, backend=None), x.astype(np.float64) @ reference)
    assert len(calls_of(MARLIN_GEMM).plans) == len(calls_of(MARLIN_GEMM).calls) == 2


def test_warming_up_to_a_bound_compiles_what_is_missing_and_loads_the_rest(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = [make(K, N, seed=seed)[0] for seed in (0, 1)]
    compiled, loaded = [], []

    def compile_all(orders: Any, target: Any, jobs: int, tell: Any) -> None:
        for order in orders:
            compiled.append(order)
            tell(order[1], None)

    def load_kernel(template: str, spec: Any, target: Any) -> Any:
        return SimpleNamespace(load=lambda device: loaded.append((template, spec)))

    monkeypatch.setattr(shared, "is_cached", lambda template, spec, target: "permute" in template)
    monkeypatch.setattr(shared, "compile_all", compile_all)
    monkeypatch.setattr(shared, "load_kernel", load_kernel)
    monkeypatch.setattr(shared, "gpu_of", lambda device: imagined_gpu("sm_90a", 4))
    monkeypatch.setattr(shared, "launch_of", lambda *_, **__: None)
    warming.warm_up(weights, 100)
    assert len(set(loaded)) == len(loaded)
    assert set(compiled) == {one for one in loaded if "permute" not in one[0]}
    assert len(compiled) > 3
    warming.warm_up(weights, 100)
    assert len(set(loaded)) == len(loaded), "the second time there is nothing to do"
    choice_table.forget()
    warming.warm_up(weights[:1], 100)
    assert len(loaded) == 2 * len(set(loaded)), "another tuning file may have come"
    both, loaded[:] = set(loaded), []
    shared.warm_up(marlin_gemm, (gpu.array(values((5, K))), weights[0]), max_m=100)
    assert set(loaded) == both, "of the call, it is the same"
    for wrong in (0, 1 << 20):
        with pytest.raises(ArgumentError, match=r"max_m: got \d+; allowed: 1 to 131072"):
            warming.warm_up(weights, wrong)
