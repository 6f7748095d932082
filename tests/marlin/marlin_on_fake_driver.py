"""Run by test_marlin_workspace.py: which memory marlin_gemm gives to launches on which streams, on the fake driver.

Usage: python marlin_on_fake_driver.py [CASE]. Prints what went wrong. The mma.sync kernel's tiles are
divided, and their CTAs leave partial sums, where the wgmma kernel of a small weight would not.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from typing import Any

import numpy as np
from fake_card import (
    Array,
    Foreign,
    counts,
    cupy,
    current,
    library,
    record,
    set_stream,
    streams,
    waits,
)
from fake_driver import in_a_forked_child, raises, run_cases
from threads import in_threads

import cudatma as c
from cudatma.kernels import plans, workspace
from cudatma.kernels.gpu import imagined_gpu
from cudatma.kernels.marlin import gemm as marlin
from cudatma.kernels.marlin.candidates import choose_mma_sync
from cudatma.kernels.marlin.problem import Problem
from cudatma.kernels.replay import Replay
from cudatma.quantization.packed import pack
from cudatma.runtime import loading
from cudatma.runtime import streams as stream_queries
from cudatma.runtime.launch import Kernel

K, N, M = 2048, 128, 16
PROCESSORS = 132
#: (flags, partial sums) of any launch.
WHOLE_BYTES = PROCESSORS * (1024 * 128 + 256)
#: The smallest part of a slab that holds a workspace.
LEAST_BYTES = PROCESSORS * (1024 * 2 + 256)
current[0] = 0
c.PackedWeight.device = property(lambda self: 0)  # type: ignore[assignment, method-assign]


class AnyKernel:
    """A loaded kernel that accepts any arguments, because NVRTC does not run with the fake driver."""

    def __init__(self, template: str, config: Any, target: Any) -> None:
        self.config, self.target = config, target

    def load(self, device: int) -> None: ...

    def is_loaded(self, device: int) -> bool:
        return True

    def occupancy(self, *_: Any, **__: Any) -> int:
        return 1

    def plan(self, grid: Any, block: Any, args: Any, **options: Any) -> Any:
        kinds = [f".align 64 .b8 p[{len(value)}]" if isinstance(value, bytes) else ".u64 p" for value in args]
        ptx = f".visible .entry {self.config.entry}({', '.join(f'.param {kind}' for kind in kinds)})\n{{\n}}\n"
        return Kernel(b"\177ELF", self.config.entry, self.target, ptx=ptx).plan(grid, block, args, **options)


loading._compare_parameters = lambda *_: None
plans.load_kernel = plans.known_kernel = AnyKernel  # type: ignore[assignment]


def choose(family: Any, problem: Any, *_: Any) -> Any:
    """Choose a kernel whose tiles are divided."""
    return choose_mma_sync(Problem(problem.layer, problem.n // 8), imagined_gpu("sm_120a", PROCESSORS))


marlin.choose = choose  # type: ignore[assignment]

#: ``last``: (stream, address of partial sums, of copied activations) of the thread's last launch.
used: Any = threading.local()
run = Replay.run


def note(self: Replay, sizes: Any, addresses: Any, stream: int, spaces: tuple[int, ...], weight_addresses: Any) -> None:
    partials, _, rows = spaces
    used.last = stream, partials, rows
    run(self, sizes, addresses, stream, spaces, weight_addresses)


Replay.run = note  # type: ignore[method-assign, assignment]


def weight(n: int = N, *, act_order: bool = False) -> Any:
    groups = K // 128
    perm = np.random.default_rng(0).permutation(K) if act_order else None
    made = pack(np.zeros((K, n), np.uint8), np.ones((groups, n), np.float16), None, group_size=128, perm=perm)
    for name in ("qweight", "scales", "perm"):
        host = getattr(made, name)
        if host is not None:
            object.__setattr__(made, name, Array(host.shape, host.dtype))
    return made


w = weight()
x, out = Array((M, K), np.float16), Array((M, N), np.float16)


def call(stream: Any = None, packed: Any = None, **options: Any) -> int:
    """Return the address of the partial sums in the launch of a call."""
    packed = w if packed is None else packed
    c.marlin_gemm(x, packed, out=out if packed.shape[1] == N else None, stream=stream, **options)
    return int(used.last[1])


def case_a_capture_needs_no_workspace_of_its_stream() -> None:
    eager = [call(0x50) for _ in range(3)]
    assert len(set(eager)) == 1
    allocations = counts.allocations
    set_stream(0, 0x60, 6, capture=100)
    captured = call(0x60)
    assert captured not in eager
    assert call(0x60) == captured, "one for the branch, not for each call"
    assert (counts.allocations, counts.in_capture) == (allocations, 0)
    assert call(0x50) == eager[0]


def case_graphs_and_branches_share_nothing() -> None:
    call(0x50)
    set_stream(0, 0x60, 6, capture=100)
    set_stream(1, 0x61, 7, capture=100)
    found = [call(0x60), call(0x61), call(0x60), call(0x61)]
    assert found[:2] == found[2:]
    streams[0].capture = 101  # the same stream captures the next graph
    found.append(call(0x60))
    streams[0].capture = streams[1].capture = 0
    found += [call(0x60), call(0x61)]
    assert len(set(found)) == 5


def case_graphs_of_a_stream_share_a_workspace_if_asked_to() -> None:
    call(0x50)
    workspace.share_captured_workspaces()
    set_stream(0, 0x60, 6, capture=100)
    set_stream(1, 0x61, 7, capture=100)
    first, other = call(0x60), call(0x61)
    streams[0].capture = 101
    assert call(0x60) == first != other
    streams[0].capture = streams[1].capture = 0
    library.fake_destroy_graph(ctypes.c_uint64(100))
    assert call(0x60) not in (first, other), "an ordinary launch has the workspace of its stream"
    assert len(c.workspace_bytes().graphs) == 2, "kept for the next graph"


def case_memory_goes_with_the_graph() -> None:
    call(0x50)
    before = c.workspace_bytes()
    assert before.graphs == ()
    assert len(before.streams) == 1
    assert before.streams[0] == WHOLE_BYTES
    for graph in range(100, 140):
        set_stream(0, 0x60, 6, capture=graph)
        call(0x60)
    set_stream(0, 0x60, 6)
    kept = c.workspace_bytes()
    assert len(kept.graphs) == 40
    assert set(kept.graphs) == {LEAST_BYTES}, "64 KiB of partial sums"
    for graph in range(100, 139):
        library.fake_destroy_graph(ctypes.c_uint64(graph))
    assert len(c.workspace_bytes().graphs) == 1
    c.release_workspaces()
    assert c.workspace_bytes() == workspace.WorkspaceBytes((), (LEAST_BYTES,), workspace._SLAB_BYTES - LEAST_BYTES)
    assert counts.allocations - counts.frees == 1, "what the last graph lies in"
    library.fake_destroy_graph(ctypes.c_uint64(139))
    assert c.workspace_bytes().total == 0
    gc.collect()
    assert counts.allocations == counts.frees


def case_captures_in_a_row() -> None:
    """What was reserved is used up without a call in between; allocations then leave the captures as they are."""
    call(0x50)
    wide = weight(1024)
    (reserve,), found, graph = workspace.owners()._reserves.values(), set(), 100
    while graph < 200 or reserve._has_left(workspace._MIN_LEFT_BYTES):
        set_stream(0, 0x60, 6, capture=graph)
        found.add(call(0x60, wide))
        graph += 1
    assert len(found) == graph - 100
    set_stream(0, 0x60, 6)
    assert 0 < counts.in_capture <= 4
    # A call outside refills the reserve, though it has been made before.
    allocations = counts.allocations
    call(0x50)
    assert reserve._has_left(workspace._MIN_LEFT_BYTES)
    assert counts.allocations == allocations + 1
    spent = counts.in_capture
    set_stream(0, 0x60, 6, capture=graph)
    call(0x60, wide)
    assert counts.in_capture == spent


def capture(graph: int, *partials_bytes: int | None) -> list[int]:
    """Return the addresses of the partial sums that the launches of a complete capture receive."""
    set_stream(0, 0x60, 6, capture=graph)
    found = [workspace.stream_workspace(0, 0x60, nbytes).partials_pointer for nbytes in partials_bytes]
    set_stream(0, 0x60, 6)
    return found


def destroy(*graphs: int) -> None:
    for graph in graphs:
        library.fake_destroy_graph(ctypes.c_uint64(graph))


def require_all_counted() -> int:
    """Check that all device memory is counted, and return its size less the workspace of one stream."""
    assert c.workspace_bytes().total == counts.held_bytes
    return int(counts.held_bytes) - WHOLE_BYTES


def case_many_graphs_live() -> None:
    """With a call between captures, which refills the reserve: what is left of its slabs is used, too."""
    for size in (3 << 20, (5 << 20) - 1, None):
        asked = WHOLE_BYTES if size is None else size
        call(0x50)
        first = [pointer for graph in range(67) for pointer in (*capture(100 + graph, size), call(0x50))]
        assert len(set(first)) == 68
        assert require_all_counted() <= 2 * 67 * asked + workspace._SLAB_BYTES
        destroy(*range(100, 167))
        assert require_all_counted() == workspace._SLAB_BYTES, "slabs of graphs that are gone are freed"


def case_captures_and_destroyed_graphs_in_a_row() -> None:
    """Without a call between them. Nothing is freed in a capture, and what comes back is handed out again."""
    call(0x50)
    allocations, frees = counts.allocations, counts.frees
    for graph in range(100, 400):
        capture(graph, 4 << 20, (1 << 20) << graph % 5)
        destroy(graph)
    assert (counts.allocations - allocations, counts.frees) == (counts.in_capture, frees)
    assert counts.held_bytes - WHOLE_BYTES <= 4 * workspace._SLAB_BYTES
    call(0x50)
    assert require_all_counted() == workspace._SLAB_BYTES


def case_rows_and_flags_do_not_mix() -> None:
    """Flags are zero, and lie where rows of activations were written only after that has been cleared."""
    call(0x50)
    size = 2 << 20
    for graph in range(100, 160):
        set_stream(0, 0x60, 6, capture=graph)
        space = workspace.stream_workspace(0, 0x60, size)
        assert ctypes.string_at(space.flags_pointer, space.flags_bytes) == bytes(space.flags_bytes)
        ctypes.memset(space.partials_pointer, 0xFF, space.partials_bytes)
        ctypes.memset(space.rows.room(size * (1 + graph % 2)), 0xFF, size)
        set_stream(0, 0x60, 6)
        if graph % 3:
            destroy(graph)
        if graph % 7 == 0:
            destroy(*range(100, graph + 1))
            call(0x50)
    destroy(*range(100, 160))
    del space
    assert require_all_counted() == workspace._SLAB_BYTES


def case_nothing_is_freed_under_a_lock_or_in_a_capture() -> None:
    call(0x50)
    (reserve,) = workspace.owners()._reserves.values()
    free, seen = workspace.DeviceMemory.__del__, []

    def noted(memory: Any) -> None:
        seen.append((workspace.owners()._lock.locked(), reserve._lock.locked(), streams[0].capture))
        free(memory)

    workspace.DeviceMemory.__del__ = noted  # type: ignore[method-assign]
    for graph in range(100, 140):
        in_threads(1, lambda _: call(2))  # a workspace of a thread that has ended is to be freed, too
        capture(graph, None)
        if graph % 4 == 3:
            destroy(*range(100, graph + 1))
    c.workspace_bytes()
    capture(140, None, 1 << 20)
    call(0x51)
    c.release_workspaces()
    destroy(140)
    assert c.workspace_bytes().total == 0
    assert counts.allocations == counts.frees
    assert set(seen) == {(False, False, 0)}


def case_activation_order() -> None:
    ordered = weight(act_order=True)
    for _ in range(2):
        call(0x50, ordered)
    eager = used.last
    set_stream(0, 0x60, 6, capture=100)
    set_stream(1, 0x61, 7, capture=100)
    branches = []
    for stream in (0x60, 0x61):
        for _ in range(2):
            call(stream, ordered)
            branches.append(used.last[1:])
    assert branches[0] == branches[1]
    assert branches[2] == branches[3]
    for part in (0, 1):
        assert len({eager[1 + part], branches[0][part], branches[2][part]}) == 3
    assert counts.in_capture == 0


def case_more_partial_sums_in_one_branch() -> None:
    wide = weight(1024)
    call(0x50)
    call(0x50, wide)
    set_stream(0, 0x60, 6, capture=100)
    small, large = call(0x60), call(0x60, wide)
    assert small != large
    assert call(0x60) == large


def case_a_workspace_of_ones_own() -> None:
    mine = c.Workspace(0)
    assert ctypes.string_at(mine.flags_pointer, mine.flags_bytes) == bytes(mine.flags_bytes)
    assert mine.partials_pointer % 16 == mine.flags_pointer % 4 == 0
    assert mine.flags_pointer + mine.flags_bytes <= mine.partials_pointer
    assert counts.held_bytes == mine.partials_pointer + mine.partials_bytes - mine.flags_pointer
    set_stream(0, 0x60, 6, capture=100)
    assert call(0x60, workspace=mine) == mine.partials_pointer
    assert c.workspace_bytes().total == 0
    raises(c.LaunchError, "device 1", lambda: call(0x60, workspace=c.Workspace(1)))
    raises(c.ArgumentTypeError, "Workspace", lambda: call(0x60, workspace=b""))
    set_stream(0, 0x60, 6)
    del mine
    gc.collect()
    assert counts.allocations == counts.frees


def case_a_capture_after_a_warm_up_allocates_nothing() -> None:
    c.MarlinLinear(w).warm_up([1, M], stream=0x60)
    launches, allocations = record.launches, counts.allocations
    assert launches == 0
    set_stream(0, 0x60, 6, capture=100)
    call(0x60)
    assert (record.launches, counts.allocations, counts.in_capture) == (launches + 1, allocations, 0)


def case_an_invalidated_capture() -> None:
    call(0x50)
    set_stream(0, 0x60, 6, capture=100)
    status = stream_queries._libcuda().cuStreamGetCaptureInfo_v2

    def invalidated(stream: int, at: int, *others: Any) -> int:
        ctypes.c_int.from_address(at).value = 2
        return 0

    stream_queries._libcuda().cuStreamGetCaptureInfo_v2 = invalidated
    before = record.launches
    raises(c.LaunchError, "invalidated", lambda: call(0x60))
    assert record.launches == before
    stream_queries._libcuda().cuStreamGetCaptureInfo_v2 = status
    call(0x60)


def case_threads_on_their_default_streams() -> None:
    shared = [call(0), call(1)]
    assert shared[0] == shared[1], "the legacy default stream has two handles"
    mine = call(2)
    spaces = in_threads(6, lambda _: [call(2) for _ in range(3)])
    assert all(len(set(of_one)) == 1 for of_one in spaces)
    assert len({mine, shared[0], *(of_one[0] for of_one in spaces)}) == 8
    # Memory of threads that have ended is given back; this thread's stays.
    assert len(c.workspace_bytes().streams) == 2
    assert call(2) == mine
    assert set(in_threads(3, lambda _: call(0))) == {shared[0]}


def case_threads_come_and_go() -> None:
    call(0)
    for _ in range(100):
        in_threads(1, lambda _: call(2))
        assert len(workspace.owners()._recent) <= 3
    assert counts.allocations - counts.frees <= 3


def case_a_thread_captures_its_default_stream() -> None:
    eager = call(2)
    set_stream(0, 2, 2, capture=100)
    assert call(2) != eager
    assert counts.in_capture == 0
    set_stream(0, 2, 2)
    assert call(2) == eager


def case_a_handle_that_is_used_again() -> None:
    set_stream(0, 0x60, 6)
    first = call(0x60)
    set_stream(0, 0x60, 7)  # destroyed; the next stream has its handle
    second = call(0x60)
    assert first != second
    assert call(0x60) == second


def case_streams_come_and_go() -> None:
    alive = call(0x50)
    for number in range(1000):
        set_stream(0, 0x60, 10 + number)
        call(0x60)
        assert call(0x50) == alive, "a stream that is used keeps its workspace"
        assert counts.allocations - counts.frees <= 33
    assert len(c.workspace_bytes().streams) == 32
    assert c.workspace_bytes().total <= 34 * WHOLE_BYTES + workspace._SLAB_BYTES


def case_a_launch_of_another_thread_keeps_its_workspace() -> None:
    space = workspace.stream_workspace(0, 0x50)
    frees = counts.frees
    c.release_workspaces()
    gc.collect()
    assert counts.frees == frees + 1, "the slab of the reserve alone"
    assert workspace.stream_workspace(0, 0x50) is not space
    del space
    gc.collect()
    assert counts.frees == frees + 2


def case_what_a_repeated_call_asks_the_driver() -> None:
    call(0x50)
    call(0x50)
    for stream, questions in ((0x50, 2), (0, 0), (None, 0)):
        call(stream)
        before = counts.questions
        call(stream)
        assert counts.questions - before == questions
    assert record.events == 0


def case_no_wait_between_a_graph_and_what_is_outside_of_it() -> None:
    given = Foreign((M, K), 0x66, np.float16)
    call(0x50)
    set_stream(0, 0x60, 6, capture=100)
    assert waits(lambda: c.marlin_gemm(given, w, out=out, stream=0x60)) is None
    set_stream(1, 0x66, 7, capture=101)
    assert waits(lambda: c.marlin_gemm(given, w, out=out, stream=0x60)) is None
    assert waits(lambda: c.marlin_gemm(given, w, out=out, stream=0x50)) is None
    set_stream(1, 0x66, 7, capture=100)  # two branches of one graph
    assert waits(lambda: c.marlin_gemm(given, w, out=out, stream=0x60)) == (0x60, 0x66)


def case_fork() -> None:
    for stream in (0x50, 0, 2):
        call(stream)
    questions = counts.questions

    def refused() -> None:
        for stream in (0x50, 0, 2):
            raises(c.LaunchError, "spawn", lambda stream=stream: call(stream))
        assert counts.questions == questions, "the driver of a forked process was asked"

    in_a_forked_child(refused)
    call(0x50)


class Shared:
    """A producer that speaks DLPack alone; CuPy makes its current stream wait for it."""

    def __dlpack__(self, **_: object) -> None: ...

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0


def case_a_dlpack_array_is_read_behind_cupys_current_stream() -> None:
    cupy.from_dlpack = lambda _: Array((M, K), np.float16)
    current[0] = 0x40
    for _ in range(2):
        assert waits(lambda: c.marlin_gemm(Shared(), w, out=out, stream=0x50)) == (0x50, 0x40)
        assert waits(lambda: c.marlin_gemm(Shared(), w, out=out, stream=0x40)) is None
        assert waits(lambda: c.marlin_gemm(Shared(), w, out=out)) is None


if __name__ == "__main__":
    run_cases(globals(), sys.argv[1:])
