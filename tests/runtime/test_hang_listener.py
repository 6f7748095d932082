"""The host of a debug kernel on a GPU, with a driver made of host memory in the GPU's place."""

# ruff: noqa: N802  (the driver's names)

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from cudatma import context
from cudatma.context import Device
from cudatma.errors import DriverError, LaunchError, PipelineHang
from cudatma.runtime.hang import Names, listeners
from cudatma.runtime.hang import records as shared
from cudatma.runtime.hang.listeners import Listener

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
    monkeypatch.setattr(context, "initialise", lambda: fake)
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
    with pytest.raises(LaunchError, match="a stream that captures a graph"):
        host.run(lambda: pytest.fail("launched"), 1, STREAM)


def test_a_stream_that_cannot_be_asked_about_captures_is_an_error_of_its_own(driver: FakeDriver) -> None:
    host = listener()
    driver.capture_code = 906  # CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
    with pytest.raises(LaunchError, match=r"^stream: got the legacy default stream while another stream captures"):
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
