"""The GPU's clock and power while something runs on it, sampled by a thread; nothing where neither way can read them.

NVML (the package nvidia-ml-py) where it is installed, else lines of ``nvidia-smi``.
Source: NVML API reference, nvmlDeviceGetClockInfo (MHz), nvmlDeviceGetPowerUsage (milliwatts, averaged over a second on
Ampere and later); nvidia-smi --help-query-gpu.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

#: Seconds between two samples.
PERIOD_S = 0.05
_SMI = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw,temperature.gpu", "--format=csv,noheader,nounits"]

#: SM clock in MHz, power in watts, degrees Celsius.
Sample = tuple[float, float, float]


def nvml_reader(bus_id: str | None) -> Callable[[], Sample] | None:
    """A function that reads one sample through NVML, None where there is none. bus_id: of the GPU; None: the first."""
    try:
        import pynvml as nvml  # nvidia-ml-py

        nvml.nvmlInit()
        gpu: Any = nvml.nvmlDeviceGetHandleByPciBusId(bus_id.encode()) if bus_id else nvml.nvmlDeviceGetHandleByIndex(0)
    except Exception:  # not installed, no driver, no permission: the benchmark runs without
        return None

    def read() -> Sample:
        clock = nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)
        degrees = nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)
        return float(clock), nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3, float(degrees)

    with contextlib.suppress(Exception):
        read()
        return read
    return None


def smi_reader(bus_id: str | None) -> Callable[[], Sample] | None:
    """The same through ``nvidia-smi``, a process a sample; None where it is absent or does not tell."""
    command = [*_SMI, f"--id={bus_id}"] if bus_id else _SMI

    def read() -> Sample:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
        clock, watts, degrees = (float(part) for part in done.stdout.splitlines()[0].split(","))
        return clock, watts, degrees

    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError, IndexError):
        read()
        return read
    return None


def gpu_bus_id() -> str | None:
    """PCI bus id of CuPy's current device, None if it is not known."""
    with contextlib.suppress(Exception):
        import cupy

        return str(cupy.cuda.Device().pci_bus_id)
    return None


def find_reader() -> Callable[[], Sample] | None:
    """NVML or nvidia-smi on the current device; None where neither answers."""
    bus_id = gpu_bus_id()
    return nvml_reader(bus_id) or smi_reader(bus_id)


class PowerLog:
    """Samples from entering to leaving its ``with`` block. reader: as from find_reader(); None: samples nothing."""

    def __init__(self, reader: Callable[[], Sample] | None, period_s: float = PERIOD_S) -> None:
        self._reader, self._period_s = reader, period_s
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self.samples: list[Sample] = []

    def __enter__(self) -> PowerLog:
        if self._reader is not None:
            self._thread = threading.Thread(target=self._run, args=(self._reader,), daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join(timeout=15)

    def _run(self, read: Callable[[], Sample]) -> None:
        while not self._done.is_set():
            try:
                self.samples.append(read())
            except Exception:  # a sample is never worth a failed run
                return
            self._done.wait(self._period_s)

    def summary(self) -> dict[str, float | int] | None:
        """Medians over the second half of the samples, as with the timings; None where there are none."""
        late = self.samples[len(self.samples) // 2 :]
        if not late:
            return None
        clock, watts, degrees = (statistics.median(column) for column in zip(*late, strict=True))
        return {"sm_mhz": clock, "watts": watts, "celsius": degrees, "samples": len(late)}
