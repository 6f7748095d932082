"""The Marlin GEMM among other work: repetition, streams, graphs, dependent launches, workspaces. Needs CuPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from marlin_builders import BY_CP_ASYNC
from marlin_operands import (
    Options,
    activations,
    bits,
    compare,
    differences,
    make_weight,
    new_stream,
    partials_bytes,
    poisoned,
    to_float64,
    use_load_path,
)
from this_gpu import TARGET, cupy

from cudatma import LaunchError, MarlinLinear, Workspace, marlin_gemm, release_workspaces
from cudatma.kernels.gpu import gpu_of
from cudatma.kernels.marlin.candidates import choose_mma_sync
from cudatma.kernels.marlin.problem import Problem
from cudatma.kernels.tuning import pinned
from cudatma.kernels.workspace import stream_workspace

pytestmark = pytest.mark.gpu


def flags(space: Workspace) -> Any:
    memory = cupy.cuda.UnownedMemory(space.flags_pointer, space.flags_bytes, space)
    return cupy.ndarray(space.flags_bytes // 4, np.uint32, cupy.cuda.MemoryPointer(memory, 0))


@pytest.mark.parametrize(
    ("k", "n", "m", "shared", "options"),
    [
        (4096, 1024, 16, True, Options(load_path="cp_async")),
        (4096, 1024, 16, False, Options()),
        (4096, 512, 333, True, Options("bfloat16", 64, False, load_path="cp_async")),
        (4096, 512, 333, False, Options("bfloat16", 64, False)),
        (2048, 2048, 333, False, Options("bfloat16", 64, False)),
        (8192, 10240, 512, True, Options()),
        (512, 128 * 132, 1, False, Options(group_size=-1)),
    ],
)
def test_a_thousand_runs_give_the_same_bits(k: int, n: int, m: int, shared: bool, options: Options) -> None:
    """The tiles are shared by several CTAs, through the workspace or within a cluster, or not shared."""
    weight = make_weight(k, n, options)
    x = activations((m, k), options.dtype)
    with use_load_path(weight.packed, m, options.load_path):
        if TARGET.name == "sm_90a" and cupy.cuda.Device().attributes["MultiProcessorCount"] == 132:
            assert (partials_bytes(weight.packed, m) > 0) == shared
        wanted = marlin_gemm(x, weight.packed)
        assert not compare(wanted, to_float64(x) @ weight.dense).problem(options.dtype)
        wrong, out = cupy.zeros((), np.int64), poisoned((m, n), options.dtype)
        for _ in range(1000):
            bits(out).fill(0xFFFF)
            marlin_gemm(x, weight.packed, out=out)
            wrong += differences(out, wanted)
    assert int(wrong) == 0
    assert not flags(stream_workspace(0, cupy.cuda.get_current_stream().ptr)).any()


@pytest.mark.parametrize(
    ("m", "k", "act_order"), [(16, 2048, False), (100, 2048, True), (3, 1001, False), (3, 2048, True)]
)
def test_graph_capture(m: int, k: int, act_order: bool) -> None:
    weight, bias = make_weight(k, 1024, Options(act_order=act_order)), activations((1024,), "float16", 5)
    layer = MarlinLinear(weight.packed, bias)
    batches = [activations((m, k), "float16", seed) for seed in (1, 2, 3)]
    references = [to_float64(x) @ weight.dense + to_float64(bias) for x in batches]
    x, out, stream = cupy.empty((m, k), np.float16), poisoned((m, 1024), "float16"), new_stream()
    layer.warm_up([m], stream=stream)
    with stream:
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
        layer(x, out=out)
        graph = stream.end_capture()
        assert bool((bits(out) == 0xFFFF).all()), "the capture ran the kernel"
        # A larger batch needs more memory; the graph keeps what it was captured with.
        layer(activations((4000, k), "float16"))
        for batch, reference in zip(batches, references, strict=True):
            x[...] = batch
            bits(out).fill(0xFFFF)
            graph.launch(stream)
            assert not compare(out, reference).problem("float16")


def test_a_capture_refuses_what_is_not_ready_and_goes_on() -> None:
    weight, unknown = make_weight(1024, 512), make_weight(1024, 512, Options("bfloat16", 64, False))
    x, out = activations((16, 1024), "float16"), poisoned((16, 512), "float16")
    other, other_out = activations((16, 1024), "bfloat16"), poisoned((16, 512), "bfloat16")
    wanted, stream, space = marlin_gemm(x, weight.packed), new_stream(), Workspace(0)
    release_workspaces()
    own = poisoned((16, 512), "float16")
    # Load paths that no other test asks for, so that their kernel cannot be there yet.
    config = choose_mma_sync(Problem.of(unknown.packed, 16), gpu_of(0), **BY_CP_ASYNC | {"scale_load_path": "tma"})
    with stream:
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
        marlin_gemm(x, weight.packed, out=own)  # its workspace is made now
        with pinned(config), pytest.raises(LaunchError, match="before the capture"):
            marlin_gemm(other, unknown.packed, out=other_out, workspace=space)
        marlin_gemm(x, weight.packed, out=out, workspace=space)
        graph = stream.end_capture()
        graph.launch(stream)
    stream.synchronize()
    assert int(differences(out, wanted)) == int(differences(own, wanted)) == 0


class Chain:
    """GEMMs that each read the result of the previous one. The results alternate between two buffers."""

    def __init__(self, m: int, load_path: str) -> None:
        options = Options("bfloat16", 128, False)
        self.weights = [make_weight(2048, 2048, options, seed) for seed in range(6)]
        self.inputs = [activations((m, 2048), "bfloat16", seed) for seed in (10, 11)]
        self.x, self.buffers = cupy.empty_like(self.inputs[0]), [cupy.empty_like(self.inputs[0]) for _ in range(2)]
        self.m, self.load_path, self.space = m, load_path, Workspace(0)

    def run(self, programmatic: bool) -> Any:
        source = self.x
        for i, weight in enumerate(self.weights):
            target = self.buffers[i % 2]
            with use_load_path(weight.packed, self.m, self.load_path):
                source = marlin_gemm(source, weight.packed, out=target, workspace=self.space, programmatic=programmatic)
        return source

    def start(self, which: int) -> None:
        """Write new activations with a kernel before the first GEMM, so that no values of an earlier run remain."""
        for buffer in self.buffers:
            bits(buffer).fill(0xFFFF)
        bits(self.x)[...] = bits(self.inputs[which])


@pytest.mark.parametrize(("m", "load_path"), [(1, "tma"), (16, "tma"), (100, "tma"), (16, "cp_async")])
def test_programmatic_dependent_launches(m: int, load_path: str) -> None:
    chain, wanted = Chain(m, load_path), []
    for which in (0, 1):
        chain.start(which)
        wanted.append(chain.run(False).copy())
    assert int(differences(*wanted)) > 0
    assert not bool(cupy.isnan(to_float64(wanted[0])).any())
    wrong, stream = cupy.zeros((), np.int64), new_stream()
    with stream:
        for i in range(50):
            chain.start(i % 2)
            wrong += differences(chain.run(True), wanted[i % 2])
        stream.synchronize()
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
        out = chain.run(True)
        graph = stream.end_capture()
        for i in range(50):
            chain.start(i % 2)
            graph.launch(stream)
            wrong += differences(out, wanted[i % 2])
        # Without anything between them: each replay begins while the one before may still run.
        for _ in range(50):
            graph.launch(stream)
        bits(out).fill(0xFFFF)
        graph.launch(stream)
        wrong += differences(out, wanted[1])
    stream.synchronize()
    assert int(wrong) == 0
    assert not flags(chain.space).any()
