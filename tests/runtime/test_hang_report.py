"""Records of a debug kernel, the listener that collects them, and the report that a person reads."""

from __future__ import annotations

# ruff: noqa: N802  (the driver's names)
import contextlib
import ctypes
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from cudatma import context
from cudatma.build.render import render
from cudatma.context import Device
from cudatma.descriptor.access import REDUCE_TYPES
from cudatma.dtypes import TMA_TYPES
from cudatma.errors import ArgumentError, CudaTmaError, DriverError, LaunchError, PipelineHang
from cudatma.mbarrier_bits import BarrierBits, encode
from cudatma.runtime.hang import Names, hang_of, is_debug_ptx, listeners, timeout_seconds
from cudatma.runtime.hang import records as shared
from cudatma.runtime.hang.listeners import Listener
from cudatma.runtime.hang.report import RULES

BASE = 0x400
NAMES = Names(
    "k", "line one;\n    wait(full);\nwait(empty);\n", [("tiles", 0, 64), ("full", 64, 16), ("empty", 80, 16)]
)
DEBUG_TEXT = '//% include "parts/debug_tma.cuh.j2"\n//% include "primitives/tma_reduce.cuh.j2"\n'


def record(kind: int, offset: int = 64, **fields: Any) -> np.ndarray[Any, Any]:
    made = np.zeros(1, shared.RECORD)
    state = fields.pop("state", BarrierBits(1, 1, 0, 0))
    raw = encode(state)
    values = {"address": BASE + offset, "dynamic_base": BASE, "line": 2, "lanes": 1, "first": state.arrivals, **fields}
    values |= {"kind": kind, "bits_low": raw & 0xFFFFFFFF, "bits_high": raw >> 32}
    if kind in (shared.WAIT_EXPIRED, shared.WAITED):
        values.setdefault("second", shared.STATE_READ)
    for name, value in values.items():
        made[name] = value
    return made


def hang(*made: np.ndarray[Any, Any], verified: bool = True, taken: int = 0) -> PipelineHang:
    all_records = np.concatenate([*made, np.zeros(3, shared.RECORD)])
    found = hang_of(all_records, NAMES, verified=verified, where="a GPU", reserved=taken)
    assert found is not None
    return found


def test_no_record_is_no_hang() -> None:
    assert hang_of(np.zeros(8, shared.RECORD), NAMES, verified=True, where="a GPU") is None


def test_a_wait_is_told_with_array_stage_place_and_line() -> None:
    state = BarrierBits(2, 1, 4096, 1)
    made = record(
        shared.WAIT_EXPIRED, 72, wanted=1, state=state, waited_us=2_000_000, thread=70, lanes=1 << 6, block=(3, 1, 2)
    )
    error = hang(made, verified=False)
    (wait,) = error.waits
    assert (wait.state, wait.barrier, wait.address, wait.parity) == ("expired", "full[1]", BASE + 72, 1)
    assert (wait.block, wait.warp, wait.lane, wait.lanes) == ((3, 1, 2), 2, 6, 64)
    assert (wait.arrivals, wait.bits, wait.raw) == (2, state, encode(state))
    assert (wait.line, wait.text, wait.waited_seconds) == (2, "wait(full);", 2.0)
    shown = str(error)
    for part in (
        "k on a GPU: a wait of 2 s expired",
        "full[1], parity 1, by warp 2 lane 6 of block (3, 1, 2)",
        "line 2: wait(full);",
        f"raw {encode(state):#018x}, decoded (not verified on this GPU): 1 arrival and 4096 bytes pending, parity 1",
        "initialized with 2 arrivals",
        "1 arrival is missing, and 4096 bytes",
    ):
        assert part in shown
    assert "not verified" not in str(hang(made, verified=True))
    assert isinstance(error, CudaTmaError)
    assert isinstance(error, RuntimeError)


@pytest.mark.parametrize(
    ("state", "cause"),
    [
        (BarrierBits(4, 0, 512, 0), "512 announced bytes never arrived"),
        (BarrierBits(4, 0, -512, 0), "512 more bytes arrived"),
        (BarrierBits(4, 4, -512, 0), "512 bytes arrived that no expect_tx had announced, and 4 arrivals are missing"),
        (BarrierBits(4, 3, 512, 0), "3 arrivals are missing, and 512 bytes"),
        (BarrierBits(4, 3, 0, 0), "3 of 4 arrivals are missing"),
        (BarrierBits(4, 4, 0, 0), "no thread has arrived"),
    ],
)
def test_the_state_of_the_barrier_suggests_the_cause(state: BarrierBits, cause: str) -> None:
    (wait,) = hang(record(shared.WAIT_EXPIRED, state=state)).waits
    assert wait.cause.startswith(cause)
    assert wait.is_half_done == (cause != "no thread has arrived")


def test_one_record_of_a_barrier_has_its_state_for_all() -> None:
    state, waits = BarrierBits(2, 1, 0, 0), (shared.WAITED, shared.WAIT_EXPIRED)
    without = [record(kind, 80, second=0, state=BarrierBits(7, 7, 7, 1), thread=32 * kind) for kind in waits]
    elsewhere = record(shared.WAITED, 80, second=0, block=(1, 0, 0))
    error = hang(*without, record(shared.WAITED, 80, state=state), elsewhere)
    assert [wait.raw for wait in error.waits if wait.block == (0, 0, 0)] == [encode(state)] * 3
    (unread,) = (wait for wait in error.waits if wait.block == (1, 0, 0))
    assert (unread.raw, unread.bits) == (None, None)
    assert unread.cause.startswith("the state of the barrier was not read")
    assert "1 of 2 arrivals are missing" in str(error)
    assert unread.cause in str(error)


def test_a_refusal_or_a_named_barrier_is_no_barriers_state() -> None:
    for kind in (shared.REFUSED, shared.NAMED_EXPIRED):
        other = record(kind, 64, wanted=1, first=1, second=shared.STATE_READ)
        assert shared.states(other) == {}


def test_a_wait_that_is_over_stands_last() -> None:
    over = record(shared.WAIT_EXPIRED, 64, wanted=0, waited_us=9_000_000, state=BarrierBits(2, 1, 0, 1))
    idle = record(shared.WAITED, 80, wanted=1, waited_us=5, state=BarrierBits(2, 2, 0, 1), thread=32)
    error = hang(over, idle)
    assert [wait.is_over for wait in error.waits] == [False, True]
    assert (
        error.waits[1].cause
        == "the phase has completed since then, because the missing arrivals or bytes were still in flight"
    )
    assert not error.waits[1].is_half_done


def test_what_something_has_come_to_leads_and_equal_waits_are_one_group() -> None:
    idle = [record(shared.WAIT_EXPIRED, 64, thread=32 * warp, lanes=0xFFFFFFFF) for warp in (1, 0)]
    half = record(shared.WAITED, 80, line=3, state=BarrierBits(2, 1, 0, 0), waited_us=5, thread=64, block=(1, 0, 0))
    error = hang(*idle, half)
    assert [wait.barrier for wait in error.waits] == ["empty[0]", "full[0]", "full[0]"]
    assert [wait.warp for wait in error.waits] == [2, 0, 1]
    assert "expired: full[0], parity 0, by warps 0, 1 of block (0, 0, 0)" in str(error)
    assert "waiting: empty[0]" in str(error)


def test_a_named_barrier_counts_threads() -> None:
    made = record(shared.NAMED_EXPIRED, address=3, wanted=96, first=64)
    (wait,) = hang(made).waits
    assert (wait.barrier, wait.arrivals, wait.cause, wait.raw) == (
        "named barrier 3",
        96,
        "64 of 96 threads have arrived",
        None,
    )


def test_a_barrier_of_which_nothing_was_noted_is_judged_by_its_bits() -> None:
    made = record(shared.WAIT_EXPIRED, first=0xFFFFFFFF, state=BarrierBits(4, 3, 0, 0))
    (wait,) = hang(made).waits
    assert (wait.arrivals, wait.is_half_done) == (0, True)
    assert "initialized with" not in str(hang(made))


def test_every_rule_has_words() -> None:
    for number, (name, _) in RULES.items():
        (wait,) = hang(record(shared.REFUSED, wanted=number, first=5, second=1)).waits
        assert (wait.state, wait.rule) == ("refused", name)
        assert len(wait.detail) > 10
    (wait,) = hang(record(shared.REFUSED, wanted=99, first=5, second=1)).waits
    assert wait.rule == "rule 99"


def test_addresses_outside_of_the_layout_are_told_as_such() -> None:
    assert NAMES.barrier(BASE + 68, BASE) == "full[0] + 4 B"
    assert NAMES.barrier(BASE + 96, BASE) == f"mbarrier at {BASE + 96:#x} (dynamic shared memory + 0x60)"
    assert NAMES.barrier(BASE - 8, BASE) == "mbarrier at 0x3f8 (static shared memory)"
    assert NAMES.barrier((1 << 24) + BASE + 72, BASE) == "full[1] of rank 1 of the cluster"
    assert NAMES.barrier((1 << 24) + BASE + 72, (1 << 24) + BASE) == "full[1]"
    assert NAMES.line(99) == NAMES.line(0) == ""


def test_what_was_not_kept_is_counted_and_long_lists_are_cut() -> None:
    many = [record(shared.WAIT_EXPIRED, line=n, thread=32 * n) for n in range(40)]
    shown = str(hang(*many, taken=50))
    assert "and 24 more groups of waits" in shown
    assert "and 10 waits without a record" in shown


def test_the_error_travels_between_processes() -> None:
    error = hang(record(shared.WAIT_EXPIRED))
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.waits, again.kernel) == (str(error), error.waits, "k")


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf", "5000"])
def test_a_timeout_that_is_none_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(shared.TIMEOUT_VARIABLE, text)
    with pytest.raises(ArgumentError, match=shared.TIMEOUT_VARIABLE):
        timeout_seconds()


def test_the_timeout_reaches_the_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(shared.TIMEOUT_VARIABLE, raising=False)
    assert timeout_seconds() == 2
    monkeypatch.setenv(shared.TIMEOUT_VARIABLE, "0.25")
    panel = shared.panel_bytes(0x1000, 0x2000, 1 << 30)
    aborted, nanoseconds, records, notes = np.frombuffer(panel[:32], np.uint64).tolist()
    assert (aborted, nanoseconds, records, notes) == (0, 250_000_000, 0x1000, 0x2000)
    assert np.frombuffer(panel[32:], np.uint32).tolist() == [shared.CAPACITY, 0, shared.MAX_NOTED_BLOCKS, 0]


# ---- the template's side


def debug_text() -> str:
    return render(DEBUG_TEXT, None, "sm_90a", is_source=True, debug=True)


def enum(name: str) -> dict[str, int]:
    body = re.search(rf"enum {name} : u32 \{{([^}}]*)\}}", debug_text())
    assert body is not None
    return {key: int(value) for key, value in re.findall(r"(\w+) = (\d+)", body[1])}


def test_rules_and_kinds_have_the_same_numbers_on_both_sides() -> None:
    assert enum("Rule") == {name.upper(): number for number, (name, _) in RULES.items()}
    assert enum("Kind") == {name: getattr(shared, name) for name in enum("Kind")}
    assert len(enum("Kind")) == 5


def test_the_structures_have_the_same_size_on_both_sides() -> None:
    text = debug_text()
    assert "constexpr u32 RECORD_WORDS = 16;" in text
    assert shared.RECORD.itemsize == 64
    counts = [re.search(rf"{what}\[(\d+)\];", text) for what in ("u64 barriers", "u64 named", "Polls polls")]
    barriers, named, warps = (int(count[1]) for count in counts if count is not None)
    assert "u64 what, eighths, since, last;" in text
    assert 8 * (barriers + named + 1 + 4 * warps) == shared.BLOCK_NOTES_BYTES
    assert shared.PANEL_BYTES == 8 * 4 + 4 * 4


def test_reductions_are_allowed_for_the_types_of_the_rule() -> None:
    call = r"cp_reduce_async_bulk_tensor_2d_(\w+)\(.*?may_reduce\(map, src, \{c0, c1\}, (0x\w+)u, line\)"
    found = re.findall(call, debug_text(), re.S)
    assert len(found) == len(REDUCE_TYPES)
    for op, mask in found:
        formats = {TMA_TYPES[name].descriptor_format for name in REDUCE_TYPES[op]}
        assert int(mask, 16) == sum(1 << number for number in formats), op


def test_element_bytes_are_those_of_the_types() -> None:
    digits = re.search(r"\(u32\)\(0x(\w+)ull >> 4 \* format\(\)", debug_text())
    assert digits is not None
    table = {number: int(digit, 16) for number, digit in enumerate(reversed(digits[1]))}
    for kind in TMA_TYPES.values():
        assert table.get(kind.descriptor_format, 0) == (0 if kind.packed else kind.element_bytes), kind.name


def test_a_module_tells_whether_it_listens() -> None:
    assert is_debug_ptx(f".visible .global .align 8 .b8 {shared.PANEL_NAME}[48] = {{0}};")
    assert not is_debug_ptx(".visible .entry k()")


STREAM = 0x77


class FakeDriver:
    """Device memory is host memory; ``calls`` has the names of all calls in order."""

    CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTALLOC_DEVICEMAP = 1, 2

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.kept: dict[int, Any] = {}
        self.panel = ctypes.create_string_buffer(shared.PANEL_BYTES)
        self.panel_size, self.sync_codes = shared.PANEL_BYTES, [0] * 100
        self.capturing = self.capture_code = 0

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("cu"):
            self.calls.append(name)
        return super().__getattribute__(name)

    def _make(self, size: int) -> int:
        buffer = ctypes.create_string_buffer(b"\xff" * size, size)
        self.kept[ctypes.addressof(buffer)] = buffer
        return ctypes.addressof(buffer)

    def cuModuleGetGlobal(self, module: Any, name: bytes) -> tuple[Any, ...]:
        assert name == b"cudatma_debug_panel"
        return 0, ctypes.addressof(self.panel), self.panel_size

    def cuMemHostAlloc(self, size: int, flags: int) -> tuple[Any, ...]:
        assert flags == 3
        return 0, self._make(size)

    def cuMemHostGetDevicePointer(self, host: int, flags: int) -> tuple[Any, ...]:
        return 0, host

    def cuMemAlloc(self, size: int) -> tuple[Any, ...]:
        return 0, self._make(size)

    def cuMemFree(self, pointer: int) -> tuple[Any, ...]:
        del self.kept[pointer]
        return (0,)

    def cuMemsetD8Async(self, pointer: int, value: int, size: int, stream: int) -> tuple[Any, ...]:
        assert stream == STREAM
        ctypes.memset(pointer, value, size)
        return (0,)

    def cuMemcpyHtoDAsync(self, pointer: int, source: int, size: int, stream: int) -> tuple[Any, ...]:
        assert stream == STREAM
        ctypes.memmove(pointer, source, size)
        return (0,)

    def cuMemcpyDtoH(self, host: int, pointer: int, size: int) -> tuple[Any, ...]:
        ctypes.memmove(host, pointer, size)
        return (0,)

    def cuStreamSynchronize(self, stream: int) -> tuple[Any, ...]:
        assert stream == STREAM
        return (self.sync_codes.pop(0),)

    def cuStreamIsCapturing(self, stream: int) -> tuple[Any, ...]:
        return self.capture_code, self.capturing


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()

    @contextlib.contextmanager
    def using(*_: Any) -> Iterator[FakeDriver]:
        yield fake

    monkeypatch.setattr(context, "using", using)
    monkeypatch.setattr(context, "outside_captures", using)
    monkeypatch.setattr(context, "initialize", lambda: fake)
    monkeypatch.setattr(context, "device", lambda ordinal: Device(ordinal, (9, 0), 232448, 132))
    return fake


def listener(names: str = "k") -> Listener:
    return Listener("module", Names(names), 0)


def kernel_that_hangs(driver: FakeDriver, blocks: int = 4) -> Callable[[], None]:
    """What a debug kernel would do: find the records through the panel, and write one."""

    def launch() -> None:
        aborted, timeout, records, notes, sizes = np.frombuffer(driver.panel.raw[:40], np.uint64).tolist()
        assert (aborted, timeout) == (0, 2_000_000_000)
        assert sizes & 0xFFFFFFFF == shared.CAPACITY
        assert bytes(driver.kept[notes].raw[: blocks * shared.BLOCK_NOTES_BYTES]).count(0) == shared.notes_bytes(blocks)
        record = np.zeros(1, shared.RECORD)
        record["kind"], record["address"], record["first"] = shared.WAIT_EXPIRED, 0x400, 1
        record["second"] = shared.STATE_READ
        ctypes.memmove(records, record.ctypes.data, shared.RECORD.itemsize)
        ctypes.memset(ctypes.addressof(driver.panel) + 36, 1, 1)  # taken

    return launch


def test_a_launch_that_hangs_raises_and_the_next_one_starts_afresh(driver: FakeDriver) -> None:
    host = listener()
    with pytest.raises(PipelineHang, match="k on device 0") as caught:
        host.run(kernel_that_hangs(driver), 4, STREAM)
    assert len(caught.value.waits) == 1
    assert caught.value.waits[0].verified is True  # compute capability 9.0, whose barriers' layout was measured
    assert "not verified" not in str(caught.value)
    launched: list[int] = []
    host.run(lambda: launched.append(1), 4, STREAM)
    assert launched == [1]


def test_the_order_of_calls_is_that_of_the_stream(driver: FakeDriver) -> None:
    host = listener()
    driver.calls.clear()
    host.run(lambda: driver.calls.append("launch"), 1000, STREAM)
    wanted = [
        "cuStreamSynchronize",
        "cuMemAlloc",
        "cuMemsetD8Async",
        "cuMemcpyHtoDAsync",
        "launch",
        "cuStreamSynchronize",
    ]
    assert [call for call in driver.calls if call in wanted] == wanted
    driver.calls.clear()
    host.run(lambda: None, 10, STREAM)  # the notes of the larger grid are enough
    assert "cuMemAlloc" not in driver.calls
    host.run(lambda: None, 2000, STREAM)
    assert driver.calls.count("cuMemFree") == 1


def test_a_lost_context_still_shows_the_records(driver: FakeDriver) -> None:
    host = listener()
    driver.sync_codes = [0, 719]
    with pytest.raises(PipelineHang) as caught:
        host.run(kernel_that_hangs(driver), 4, STREAM)
    assert isinstance(caught.value.__cause__, DriverError)
    driver.sync_codes = [0, 719]
    with pytest.raises(DriverError, match="cuStreamSynchronize"):
        host.run(lambda: None, 4, STREAM)


def test_a_capture_is_refused_before_anything_is_touched(driver: FakeDriver) -> None:
    host = listener()
    driver.capturing = 1
    with pytest.raises(LaunchError, match="a stream under graph capture"):
        host.run(lambda: pytest.fail("launched"), 1, STREAM)


def test_a_stream_that_cannot_be_asked_about_captures_is_an_error_of_its_own(driver: FakeDriver) -> None:
    host = listener()
    driver.capture_code = 906  # CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
    with pytest.raises(
        LaunchError, match=r"^stream must be .*got the legacy default stream while another stream is capturing"
    ):
        host.run(lambda: pytest.fail("launched"), 1, STREAM)
    driver.capture_code = 700
    with pytest.raises(DriverError, match=r"^cuStreamIsCapturing failed"):
        host.run(lambda: pytest.fail("launched"), 1, STREAM)


def test_a_panel_of_another_version_is_refused(driver: FakeDriver) -> None:
    driver.panel_size = 40
    with pytest.raises(LaunchError, match="40 bytes"):
        listener()


def test_what_a_gpu_means_is_asked_of_its_capability(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "is_verified", lambda capability: capability != (9, 0))
    with pytest.raises(PipelineHang) as caught:
        listener().run(kernel_that_hangs(driver), 4, STREAM)
    assert caught.value.waits[0].verified is False
    assert "decoded (not verified on this GPU)" in str(caught.value)
