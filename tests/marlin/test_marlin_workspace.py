"""MarlinWorkspace: large enough for every launch, one for each stream. A recorder is the driver."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from marlin_fake_gpu import tell_streams

from cudatma import ArgumentTypeError, LaunchError, MarlinWorkspace, context, release_workspaces
from cudatma.kernels.gpu import imagined_gpu
from cudatma.kernels.marlin.arguments import sizes_for
from cudatma.kernels.marlin.choose import choose_by_cost
from cudatma.kernels.marlin.problem import GROUP_SIZES, LinearShape, Problem
from cudatma.kernels.schedule import FLAGS_PER_SM_BYTES, PARTIALS_PER_SM_BYTES, schedule
from cudatma.kernels.stream_workspaces import stream_workspace
from cudatma.kernels.workspace import check_workspace
from cudatma.target import TARGETS, Target

PROCESSORS = 132


class Driver:
    """Hands out addresses and notes what was asked of it."""

    #: No two drivers give the same address, whatever of an earlier one is still to be freed.
    addresses = itertools.count(1 << 30, 1 << 30)

    def __init__(self) -> None:
        self.allocated: dict[int, int] = {}
        self.cleared: list[tuple[int, int, int]] = []
        self.synchronised = self.mode = 0
        self.capturing: set[int] = set()

    def cuMemAlloc(self, size: int) -> tuple[int, int]:  # noqa: N802
        pointer = next(self.addresses)
        self.allocated[pointer] = size
        return 0, pointer

    def cuMemFree(self, pointer: int) -> tuple[int]:  # noqa: N802
        if self.mode == self.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED:
            self.allocated.pop(pointer, None)
        return (0,)

    class CUstream_flags:  # noqa: N801
        CU_STREAM_NON_BLOCKING = 1

    class CUstreamCaptureMode:
        CU_STREAM_CAPTURE_MODE_RELAXED = 2

    def cuThreadExchangeStreamCaptureMode(self, mode: int) -> tuple[int, int]:  # noqa: N802
        self.mode, previous = mode, self.mode
        return 0, previous

    def cuStreamCreate(self, flags: int) -> tuple[int, int]:  # noqa: N802
        assert flags == self.CUstream_flags.CU_STREAM_NON_BLOCKING
        return 0, 77

    def cuStreamDestroy(self, stream: int) -> tuple[int]:  # noqa: N802
        return (0,)

    def cuMemsetD8Async(self, pointer: int, value: int, size: int, stream: int) -> tuple[int]:  # noqa: N802
        assert self.mode == self.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self.cleared.append((pointer, value, size))
        return (0,)

    def cuStreamSynchronize(self, stream: int) -> tuple[int]:  # noqa: N802
        self.synchronised += 1
        return (0,)

    def cuStreamIsCapturing(self, stream: int) -> tuple[int, int]:  # noqa: N802
        return 0, int(stream in self.capturing)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    made = Driver()

    @contextlib.contextmanager
    def using(ordinal: int) -> Iterator[Driver]:
        yield made

    # A run on a GPU has workspaces of its own, which must not be dropped through this driver.
    tell_streams(monkeypatch, made.capturing)
    monkeypatch.setattr(context, "using", using)
    monkeypatch.setattr(context, "current_device", lambda: 0)
    monkeypatch.setattr(context, "device", lambda o: context.Device(o, (9, 0), 232_448, PROCESSORS))
    yield made
    release_workspaces()
    gc.collect()


def test_flags_are_cleared_before_anybody_uses_them(driver: Driver) -> None:
    space = MarlinWorkspace()
    assert driver.cleared == [(space.flags_pointer, 0, space.flags_bytes)]
    assert driver.synchronised == 1
    (start, size), *more = driver.allocated.items()
    assert not more
    assert {space.partials_pointer, space.flags_pointer} >= {start}
    ends = {space.partials_pointer + space.partials_bytes, space.flags_pointer + space.flags_bytes}
    assert max(ends) == start + size
    assert space.flags_pointer + space.flags_bytes <= space.partials_pointer
    assert space.partials_pointer % 16 == space.flags_pointer % 4 == 0


def test_it_is_freed_with_the_object(driver: Driver) -> None:
    space = MarlinWorkspace(3)
    assert space.device == 3
    assert driver.allocated
    del space
    gc.collect()
    assert not driver.allocated


def test_one_for_each_stream_of_a_device(driver: Driver) -> None:
    spaces = [stream_workspace(device, stream) for device in (0, 1) for stream in (0, 7, 8)]
    assert len({id(space) for space in spaces}) == len({space.flags_pointer for space in spaces}) == 6
    assert spaces == [stream_workspace(device, stream) for device in (0, 1) for stream in (0, 7, 8)]
    assert [space.device for space in spaces] == [0, 0, 0, 1, 1, 1]
    assert len(driver.allocated) == 8, "one for each stream, and a slab of the reserve for each device"


def test_released_workspaces_live_as_long_as_they_are_held(driver: Driver) -> None:
    stream_workspace(0, 8)
    held = stream_workspace(0, 7)
    release_workspaces()
    gc.collect()
    assert list(driver.allocated) == [held.flags_pointer]
    assert stream_workspace(0, 7) is not held


def test_check_workspace(driver: Driver) -> None:
    space = MarlinWorkspace(1)
    assert check_workspace(space, 1) is space
    with pytest.raises(LaunchError, match="device 1"):
        check_workspace(space, 0)
    with pytest.raises(ArgumentTypeError, match="MarlinWorkspace"):
        check_workspace(b"", 0)


@pytest.fixture(scope="module")
def sizes() -> MarlinWorkspace:
    """One whose memory nobody asks for, of the size for a GPU of PROCESSORS SMs."""
    space = object.__new__(MarlinWorkspace)
    space.partials_bytes = PROCESSORS * PARTIALS_PER_SM_BYTES
    space.flags_bytes = PROCESSORS * FLAGS_PER_SM_BYTES
    return space


@given(
    layer=st.builds(
        LinearShape,
        k=st.integers(1, 40_000),
        n=st.integers(1, 70_000),
        group_size=st.sampled_from(GROUP_SIZES),
        has_zeros=st.booleans(),
        dtype=st.sampled_from(("float16", "bfloat16")),
    ),
    m=st.integers(1, 5000),
    target=st.sampled_from([t for t in TARGETS.values() if t.runs_here]),
)
def test_every_launch_finds_room(sizes: MarlinWorkspace, layer: LinearShape, m: int, target: Target) -> None:
    """A workspace then never grows, and a graph may hold one."""
    spec = choose_by_cost(Problem(layer, m), imagined_gpu(target, PROCESSORS))
    work = schedule(spec, m, layer.n, layer.k, PROCESSORS * spec.blocks_per_sm)
    launch = sizes_for(Problem(layer, m), spec, lambda m: work, target)(m, 0)
    sizes.require_room(launch.partials_bytes, launch.flags_bytes)


def test_a_launch_without_room_is_refused(sizes: MarlinWorkspace) -> None:
    sizes.require_room(sizes.partials_bytes, sizes.flags_bytes)
    for partials, flags in ((sizes.partials_bytes + 1, 0), (0, sizes.flags_bytes + 1)):
        with pytest.raises(LaunchError, match="workspace"):
            sizes.require_room(partials, flags)
