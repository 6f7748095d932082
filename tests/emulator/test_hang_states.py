"""The state of the barriers in a hang report: read once, when nobody uses a barrier any more, and the same for all."""

from __future__ import annotations

import numpy as np
import pytest
from hang_kernels import BLOCKS, NUMBERS, PLANTED, RING, THREADS, TILES, Planted, RingSpec, operands

import cudatma
from cudatma.emulator.hazards.findings import Findings
from cudatma.errors import PipelineHang
from cudatma.runtime.hang import StuckWait

HANGS = [p for p in PLANTED if p.name in ("WRONG_BYTES", "MISSING_ARRIVE", "UNINITIALISED", "PEER")]


@pytest.fixture(scope="module")
def ring() -> cudatma.Kernel:
    return cudatma.compile(RING, RingSpec(), target="sm_90a", template=True, debug=True)


@pytest.fixture
def traps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What ended a schedule; a report would hide it."""
    found: list[str] = []
    monkeypatch.setattr(Findings, "trapped", lambda self, launch, text: found.append(text))
    return found


def waits_of(kernel: cudatma.Kernel, planted: Planted, schedule: int) -> tuple[StuckWait, ...]:
    source, sums, _ = operands()
    arguments = (source, sums, TILES, NUMBERS[planted.name])
    with pytest.raises(PipelineHang) as caught:
        kernel.emulate(
            BLOCKS,
            THREADS,
            arguments,
            cluster=planted.cluster,
            shared_bytes=RingSpec().smem_bytes,
            replay=schedule,
        )
    waits: tuple[StuckWait, ...] = caught.value.waits
    return waits


@pytest.mark.sweep(1)
@pytest.mark.parametrize("planted", HANGS, ids=lambda planted: planted.name.lower())
def test_no_schedule_uses_a_barrier_that_was_read(planted: Planted, ring: cudatma.Kernel, traps: list[str]) -> None:
    """Of all that wait at a barrier one reads it, which ends it; everybody else has polled it for the last time."""
    for schedule in range(4):
        states: dict[tuple[object, ...], set[int | None]] = {}
        for wait in waits_of(ring, planted, schedule):
            if wait.parity is not None:
                states.setdefault((wait.block, wait.address), set()).add(wait.raw)
        assert states or planted.rule  # where an operation is refused, nobody need wait
        assert all(len(found) == 1 and None not in found for found in states.values())
    assert not traps


def test_waits_that_are_over_when_the_kernel_is_quiet_stand_last(ring: cudatma.Kernel) -> None:
    """A refusal ends the kernel while copies are under way; they land before the state is read."""
    planted = next(p for p in PLANTED if p.name == "UNINITIALISED")
    waits = waits_of(ring, planted, 1)  # most delayed
    assert waits[0].rule == "barrier_uninitialised"
    over = [wait.is_over for wait in waits]
    assert True in over
    assert over == sorted(over)
    assert all(wait.state == "waiting" and "under way" in wait.cause for wait in waits if wait.is_over)


def test_a_barrier_that_the_kernel_itself_initialises_is_read_too(traps: list[str]) -> None:
    source = """
    //% include "primitives/mbarrier.cuh.j2"
    extern "C" __global__ void k() {
        __shared__ unsigned long long barrier;
        const unsigned bar = cudatma::shared_address(&barrier);
        if (threadIdx.x == 0) asm volatile("mbarrier.init.shared::cta.b64 [%0], 5;" : : "r"(bar) : "memory");
        __syncthreads();
        if (threadIdx.x == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(bar) : "memory");
        cudatma::mbarrier_wait_parity(bar, 0);
    }
    """
    with pytest.raises(PipelineHang) as caught:
        cudatma.compile(source, None, target="sm_90a", template=True, debug=True).emulate(1, 96, ())
    assert [(wait.warp, wait.arrivals) for wait in caught.value.waits] == [(0, 0), (1, 0), (2, 0)]
    for wait in caught.value.waits:
        assert wait.bits is not None
        assert (wait.bits.arrivals, wait.bits.pending_arrivals, wait.bits.parity) == (5, 4, 0)
    assert not traps


@pytest.mark.parametrize(("barriers", "waited", "is_read"), [(64, 63, True), (66, 0, True), (66, 65, False)])
def test_of_more_barriers_than_the_notes_hold_some_are_not_read(barriers: int, waited: int, is_read: bool) -> None:
    source = """
    //% include "primitives/mbarrier.cuh.j2"
    extern "C" __global__ void k(unsigned count, unsigned waited) {
        __shared__ unsigned long long barriers[66];
        const unsigned first = cudatma::shared_address(barriers);
        if (threadIdx.x == 0)
            for (unsigned i = 0; i < count; ++i) cudatma::mbarrier_init(first + 8 * i, 7);
        __syncthreads();
        cudatma::mbarrier_wait_parity(first + 8 * waited, 0);
    }
    """
    kernel = cudatma.compile(source, None, target="sm_90a", template=True, debug=True)
    with pytest.raises(PipelineHang) as caught:
        kernel.emulate(1, 64, (np.uint32(barriers), np.uint32(waited)), schedules=1)
    assert [wait.warp for wait in caught.value.waits] == [0, 1]
    for wait in caught.value.waits:
        assert (wait.raw is not None) is is_read
        assert ("nobody has read the state" in wait.cause) is not is_read
