"""Kernels with planted hangs and wrong accesses: the report of debug=True names each cause."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from access_kernel import ACCESS, ACCESSES, SHARED_BYTES, Access
from access_kernel import operands as access_operands
from hang_kernels import BLOCKS, NUMBERS, PLANTED, RING, THREADS, TILES, Planted, RingSpec, matches, operands
from shown_output import comparable

import cudatma
from cudatma.descriptor import TiledSpec, check_load, check_store
from cudatma.descriptor.codec import encode
from cudatma.emulator.hazards.findings import Findings
from cudatma.errors import DescriptorError, PipelineHang
from cudatma.layout import Swizzle, required_alignment
from cudatma.runtime.hang import StuckWait

pytestmark = pytest.mark.usefixtures("without_ptxas")


@lru_cache(maxsize=2)
def ring(debug: bool = True) -> cudatma.Kernel:
    return cudatma.compile(RING, RingSpec(), target="sm_90a", template=True, debug=debug)


def run(
    bug: str, *, cluster: int | None = None, debug: bool = True, **options: object
) -> tuple[np.ndarray, np.ndarray]:
    source, sums, right = operands()
    ring(debug).emulate(
        BLOCKS,
        THREADS,
        (source, sums, TILES, NUMBERS[bug]),
        cluster=cluster,
        shared_bytes=RingSpec().smem_bytes,
        **options,
    )
    return sums, right


@pytest.mark.sweep(5)
@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name.lower())
def test_a_planted_hang_is_named(planted: Planted) -> None:
    with pytest.raises(PipelineHang) as caught:
        run(planted.name, cluster=planted.cluster)
    shown = str(caught.value)
    first = next((wait for wait in caught.value.waits if matches(planted, wait)), None)
    assert first is not None, shown
    assert first == caught.value.waits[0] or not planted.leads, shown
    assert shown.startswith("ring on the emulator")
    assert f"line {first.line}: {first.text}" in shown
    assert RING.splitlines()[first.line - 1].strip() == first.text


def test_the_raw_bits_are_shown_with_what_they_mean() -> None:
    with pytest.raises(PipelineHang, match=r"raw 0x[0-9a-f]{16}, decoded: 0 arrivals and 1024 bytes pending") as caught:
        run("WRONG_BYTES")
    first = caught.value.waits[0]
    assert first.bits is not None
    assert (first.bits.arrivals, first.bits.pending_arrivals, first.bits.tx_bytes, first.bits.parity) == (1, 0, 1024, 0)
    assert first.waited_seconds >= 2.0
    page = (Path(__file__).resolve().parents[2] / "docs" / "howto" / "debug_a_hang.md").read_text()
    (shown,) = re.findall(r"copy delivers:\n\n```\n(.*?)```", page, re.DOTALL)
    assert comparable(str(caught.value)) == comparable(shown)


def test_everybody_who_waited_is_listed() -> None:
    with pytest.raises(PipelineHang) as caught:
        run("MISSING_ARRIVE")
    found = {(wait.block, wait.warp, wait.barrier) for wait in caught.value.waits}
    for block in ((0, 0, 0), (1, 0, 0)):  # the producer, and the consumers of the next lap
        assert {(block, 2, "empty[1]"), (block, 0, "full[1]"), (block, 1, "full[1]")} <= found
    producer = next(wait for wait in caught.value.waits if wait.warp == 2)
    assert (producer.lanes, producer.lane) == (1, 0)


def test_the_timeout_is_settable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDATMA_DEBUG_TIMEOUT", "0.01")
    with pytest.raises(PipelineHang) as caught:
        run("WRONG_PARITY")
    assert caught.value.waits[0].waited_seconds >= 0.01


def test_a_good_kernel_is_as_without() -> None:
    for debug in (False, True):
        sums, right = run("NONE", debug=debug, schedules=3)
        np.testing.assert_array_equal(sums, right)


def test_a_hang_leaves_the_arrays_and_the_module_as_they_were() -> None:
    source, sums, right = operands()
    sums[:] = 7
    arguments = (source, sums, TILES, NUMBERS["WRONG_BYTES"])
    with pytest.raises(PipelineHang):
        ring().emulate(BLOCKS, THREADS, arguments, shared_bytes=RingSpec().smem_bytes)
    assert (sums == 7).all()
    ring().emulate(BLOCKS, THREADS, (source, sums, TILES, 0), shared_bytes=RingSpec().smem_bytes)
    np.testing.assert_array_equal(sums, right)


def test_without_debug_the_same_hang_is_a_deadlock_of_the_emulator() -> None:
    with pytest.raises(cudatma.HazardError, match="deadlock") as caught:
        run("WRONG_BYTES", debug=False)
    assert not isinstance(caught.value, PipelineHang)


def test_a_kernel_that_only_glances_at_a_clock_still_deadlocks() -> None:
    """Time passes for those who look at it again and again; one look bounds no wait."""
    source = """
    //% include "primitives/mbarrier.cuh.j2"
    extern "C" __global__ void k(long long* out) {
        __shared__ unsigned long long barrier;
        const unsigned bar = cudatma::shared_address(&barrier);
        if (threadIdx.x == 0) { cudatma::mbarrier_init(bar, 1); cudatma::fence_mbarrier_init(); }
        __syncthreads();
        out[threadIdx.x] = clock64();
        cudatma::mbarrier_wait_parity(bar, 0);
    }
    """
    kernel = cudatma.compile(source, None, target="sm_90a", template=True)
    with pytest.raises(cudatma.HazardError, match="deadlock"):
        kernel.emulate(1, 32, (np.zeros(32, np.int64),))


@pytest.mark.parametrize(("slot", "text"), [(0, "ring.wait();   // here"), (1, "ring.wait(1);   // there")])
def test_the_line_of_a_wait_is_that_of_the_rings_caller(slot: int, text: str) -> None:
    source = """
    //% include "parts/pipeline.cuh.j2"
    extern "C" __global__ void waits(unsigned slot) {
        __shared__ unsigned long long barriers[4];
        cudatma::TmaPipeline<2> ring;
        ring.init(cudatma::shared_address(barriers), 1, 1);
        ring.acquire();
        if (slot == 0) {
            ring.wait();   // here
        } else {
            ring.wait(1);   // there
        }
    }
    """
    kernel = cudatma.compile(source, None, target="sm_90a", template=True, debug=True)
    with pytest.raises(PipelineHang) as caught:
        kernel.emulate(1, 32, (slot,))
    (wait,) = caught.value.waits
    assert wait.text == text
    assert wait.barrier.endswith("(static shared memory)")


@pytest.mark.parametrize("call", ["mbarrier_try_wait_parity(bar, 0)", "mbarrier_test_wait_parity(bar, 0)"])
def test_a_loop_of_the_kernels_own_ends_too(call: str) -> None:
    source = f"""
    //% include "primitives/mbarrier.cuh.j2"
    extern "C" __global__ void polls(unsigned* out, unsigned arrives) {{
        using namespace cudatma;
        __shared__ u64 barrier;
        const u32 bar = shared_address(&barrier);
        if (threadIdx.x == 0) {{ mbarrier_init(bar, 1); fence_mbarrier_init(); }}
        __syncthreads();
        if (threadIdx.x == 32 && arrives) mbarrier_arrive(bar);
        if (threadIdx.x < 32) {{
            while (!{call}) {{}}   // its own loop
        }}
        out[threadIdx.x] = 1;
    }}
    """
    kernel = cudatma.compile(source, None, target="sm_90a", template=True, debug=True)
    out = np.zeros(64, np.uint32)
    kernel.emulate(1, 64, (out, 1), schedules=3)
    assert out.all()
    with pytest.raises(PipelineHang) as caught:
        kernel.emulate(1, 64, (out, 0), schedules=3)
    (wait,) = caught.value.waits
    assert (wait.state, wait.warp, wait.parity) == ("expired", 0, 0)
    assert wait.text.endswith("// its own loop")
    assert wait.waited_seconds >= 2


@pytest.mark.parametrize("leaving", [0, 3])
def test_lanes_meet_again_after_an_exit_that_not_all_take(leaving: int) -> None:
    """A GPU removes lanes that exit from the convergence barrier."""
    source = """
    extern "C" __global__ void meets(unsigned* out, unsigned leaving) {
        const unsigned lane = threadIdx.x;
        if (lane < 8) {
            const unsigned gone = lane < leaving;
            asm volatile("{.reg .pred p; setp.ne.u32 p, %0, 0; @p exit;}" : : "r"(gone));
            out[lane] = 7;
        }
        out[32 + lane] = __activemask();
    }
    """
    out = np.zeros(64, np.uint32)
    cudatma.compile(source, None, target="sm_90a", template=True, debug=False).emulate(1, 32, (out, leaving))
    assert (out[:8] == 7).tolist() == [lane >= leaving for lane in range(8)]
    assert set(out[32 + leaving :].tolist()) == {0xFFFFFFFF & ~((1 << leaving) - 1)}


# ---- the state of the barriers in a hang report: read once, when nobody uses a barrier any more, and the same for all


HANGS = [p for p in PLANTED if p.name in ("WRONG_BYTES", "MISSING_ARRIVE", "UNINITIALIZED", "PEER")]


@pytest.fixture
def traps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the traps that ended a schedule, which a report would hide."""
    found: list[str] = []
    monkeypatch.setattr(Findings, "trapped", lambda self, launch, text: found.append(text))
    return found


def waits_of(planted: Planted, schedule: int) -> tuple[StuckWait, ...]:
    source, sums, _ = operands()
    arguments = (source, sums, TILES, NUMBERS[planted.name])
    with pytest.raises(PipelineHang) as caught:
        ring().emulate(
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
def test_no_schedule_uses_a_barrier_that_was_read(planted: Planted, traps: list[str]) -> None:
    """One of the waiting threads reads a barrier, which ends it; all others have polled it for the last time."""
    for schedule in (1, 2):  # copies are most delayed, and at random
        states: dict[tuple[object, ...], set[int | None]] = {}
        for wait in waits_of(planted, schedule):
            if wait.parity is not None:
                states.setdefault((wait.block, wait.address), set()).add(wait.raw)
        assert states or planted.rule  # where an operation is refused, nobody need wait
        assert all(len(found) == 1 and None not in found for found in states.values())
    assert not traps


def test_waits_that_are_over_when_the_kernel_is_quiet_stand_last() -> None:
    """A refusal ends the kernel while copies are in flight; they complete before the state is read."""
    planted = next(p for p in PLANTED if p.name == "UNINITIALIZED")
    waits = waits_of(planted, 1)  # most delayed
    assert waits[0].rule == "barrier_uninitialized"
    over = [wait.is_over for wait in waits]
    assert True in over
    assert over == sorted(over)
    assert all(wait.state == "waiting" and "still in flight" in wait.cause for wait in waits if wait.is_over)


def test_a_barrier_that_the_kernel_itself_initializes_is_read_too(traps: list[str]) -> None:
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
        assert ("the state of the barrier was not read" in wait.cause) is not is_read


@lru_cache(maxsize=1)
def kernel() -> cudatma.Kernel:
    return cudatma.compile(ACCESS, None, target="sm_90a", template=True, debug=True)


def run_access(access: Access) -> None:
    kernel().emulate(1, 32, access_operands(access), shared_bytes=SHARED_BYTES, schedules=1, hazards="collect")


@pytest.mark.parametrize("access", [a for a in ACCESSES if not a.rule], ids=lambda access: access.name)
def test_a_right_access_goes_through(access: Access) -> None:
    run_access(access)


@pytest.mark.parametrize("access", [a for a in ACCESSES if a.rule], ids=lambda access: access.name)
def test_a_wrong_access_is_refused(access: Access) -> None:
    with pytest.raises(PipelineHang, match="an invalid operation was attempted") as caught:
        run_access(access)
    first = caught.value.waits[0]
    assert (first.state, first.rule, first.block, first.warp, first.lanes) == ("refused", access.rule, (0, 0, 0), 0, 1)
    assert access.detail in first.detail
    assert first.cause == first.detail
    assert "(bar" in first.text or "(box" in first.text or "map" in first.text or "memory" in first.text


@pytest.mark.parametrize("what", ["LOAD", "STORE"])
@pytest.mark.parametrize(("dtype", "columns"), [("uint8", 64), ("uint16", 64), ("float32", 32), ("int64", 16)])
def test_coordinates_are_refused_as_python_refuses_them(what: str, dtype: str, columns: int) -> None:
    check = check_load if what == "LOAD" else check_store
    for c0, c1 in ((0, 0), (1, 0), (2, 5), (4, -1), (8, 1), (16, 63), (-16, 0), (-2, 2), (48, -7)):
        size = {"uint8": 1, "uint16": 2, "float32": 4, "int64": 8}[dtype]
        access = Access("any", what, c0=c0, c1=c1, dtype=dtype, bytes=16 * columns * size, map={"box": (16, columns)})
        try:
            check(access_operands(access)[0].spec, (c0, c1))
        except DescriptorError:
            with pytest.raises(PipelineHang) as caught:
                run_access(access)
            assert caught.value.waits[0].rule in ("coordinate_alignment", "negative_coordinate")
        else:
            run_access(access)


def test_a_map_with_a_dimension_beyond_reach_is_refused() -> None:
    spec = TiledSpec(dtype="uint8", dims=((1 << 31) + 16, 4), strides_bytes=(1 << 33,), address=1 << 20, box=(64, 4))
    arguments = (encode(spec), *access_operands(Access("far", "LOAD"))[1:])
    with pytest.raises(PipelineHang) as caught:
        kernel().emulate(1, 32, arguments, shared_bytes=SHARED_BYTES, schedules=1)
    assert caught.value.waits[0].rule == "dimension"
    assert f"dimension 0 of the tensor map has {(1 << 31) + 16} elements" in caught.value.waits[0].detail


def test_the_alignments_are_those_of_the_layout() -> None:
    """By Python's own rule: a whole pattern in the slot begins where required_alignment() says, and nowhere else."""
    for swizzle, columns in ((Swizzle.NONE, 64), (Swizzle.B32, 16), (Swizzle.B64, 32), (Swizzle.B128, 64)):
        for shift in (0, 64, 128, 256, 512, 1024):
            options = {"swizzle": swizzle.label, "box": (16, columns)}
            access = Access("any", "STORE", shift=shift, map=options)
            if shift % required_alignment(swizzle):
                with pytest.raises(PipelineHang, match="aligned"):
                    run_access(access)
            else:
                run_access(access)
