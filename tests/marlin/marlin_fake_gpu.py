"""A GPU made of host memory: launches run in the emulator at once, the driver hands out NumPy buffers.

What the plans do on a gpu (addresses, arguments, workspaces, captures, two launches in a row) is run as it stands.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from stub_driver import Array, use_as_cupy

from cudatma import PackedWeight, context, target
from cudatma.descriptor import codec, driver
from cudatma.kernels import plans, stream_workspaces
from cudatma.kernels.gpu import imagined_gpu
from cudatma.runtime import streams
from cudatma.runtime.launch import Kernel
from cudatma.runtime.launch_args import marshal
from cudatma.target import get_target

PROCESSORS = 4


@dataclass
class Launch:
    """One launch: the kernel's name, and whether it was a programmatic dependent one."""

    entry: str
    programmatic: bool
    stream: int


class LaunchPlan:
    """A plan whose launch runs the kernel's PTX with the arguments as they are then."""

    def __init__(self, gpu: FakeGpu, kernel: Kernel, arguments: list[Any], shape: dict[str, Any]) -> None:
        self.gpu, self.kernel, self.arguments, self.shape = gpu, kernel, arguments, shape

    def reshape(self, grid: Any, shared_bytes: int, programmatic: bool) -> None:
        self.shape = self.shape | {"grid": grid, "shared_bytes": shared_bytes, "programmatic": programmatic}

    def twin(self) -> LaunchPlan:
        copies = [type(value).from_buffer_copy(value) for value in self.arguments]
        return LaunchPlan(self.gpu, self.kernel, copies, self.shape)

    def launch(self, stream: int) -> None:
        gpu, shape = self.gpu, self.shape
        gpu.launches.append(Launch(self.kernel.entry, shape["programmatic"], stream))
        if stream in gpu.capturing:
            return
        self.kernel.emulate(
            shape["grid"],
            shape["block"],
            [bytes(value) for value in self.arguments],
            cluster=shape["cluster"],
            shared_bytes=shape["shared_bytes"],
            schedules=1,
            arrays=gpu.buffers(),
        )


@dataclass
class FakeGpu:
    """The driver calls that a GEMM makes, and what came of them."""

    memory: dict[int, Any] = field(default_factory=dict)
    known: list[Any] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    capturing: set[int] = field(default_factory=set)
    waited: list[int] = field(default_factory=list)

    class CUstream_flags:  # noqa: N801
        CU_STREAM_NON_BLOCKING = 1

    class CUstreamCaptureMode:
        CU_STREAM_CAPTURE_MODE_RELAXED = 2

    def cuThreadExchangeStreamCaptureMode(self, mode: int) -> tuple[int, int]:  # noqa: N802
        return 0, 0

    def cuMemAlloc(self, size: int) -> tuple[int, int]:  # noqa: N802
        whole = np.full(size + 256, 0xEE, np.uint8)
        start = -whole.ctypes.data % 256
        buffer = whole[start : start + size]
        self.memory[buffer.ctypes.data] = buffer
        return 0, buffer.ctypes.data

    def cuMemFree(self, pointer: int) -> tuple[int]:  # noqa: N802
        return (0 if self.memory.pop(pointer, None) is not None else 1,)

    def cuMemsetD8Async(self, pointer: int, value: int, size: int, stream: int) -> tuple[int]:  # noqa: N802
        ctypes.memset(pointer, value, size)
        return (0,)

    def cuStreamCreate(self, flags: int) -> tuple[int, int]:  # noqa: N802
        return 0, 77

    def cuStreamDestroy(self, stream: int) -> tuple[int]:  # noqa: N802
        return (0,)

    def cuStreamSynchronize(self, stream: int) -> tuple[int]:  # noqa: N802
        self.waited.append(stream)
        return (0,)

    def cuStreamIsCapturing(self, stream: int) -> tuple[int, int]:  # noqa: N802
        return 0, int(stream in self.capturing)

    def array(self, values: Any) -> Array:
        """Host values as an array of this GPU."""
        self.known.append(values)
        address = values.__array_interface__["data"][0]
        return Array(values.shape, values.dtype, address, strides=values.strides, values=values)

    def device_of(self, weight: PackedWeight) -> int:
        """The ordinal of this GPU, which holds the arrays of every weight."""
        arrays = weight.qweight, weight.scales, weight.zeros, weight.perm
        self.known += [array for array in arrays if array is not None]
        return 0

    def buffers(self) -> list[Any]:
        """All memory that a kernel may reach, each buffer once."""
        buffers = {}
        for values in [*self.memory.values(), *self.known]:
            whole = values
            while isinstance(whole.base, np.ndarray):
                whole = whole.base
            buffers[whole.ctypes.data] = whole
        return list(buffers.values())


class Life:
    """A graph that is never gone."""

    def __init__(self, graph: int) -> None: ...

    def has_ended(self) -> bool:
        return False


def tell_streams(monkeypatch: pytest.MonkeyPatch, capturing: set[int]) -> None:
    """Tell streams apart by their handles. capturing: those that capture, into one graph."""

    def identity(device: int, stream: int) -> int | None:
        return None if stream in capturing else stream

    monkeypatch.setattr(streams, "identity", identity)
    monkeypatch.setattr(streams, "capture_of", lambda device, stream: streams.Capture(1, 1, stream))
    monkeypatch.setattr(streams, "GraphLife", Life)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """Device 0 is a GPU of 4 SMs; every packed weight lies on it. Arrays are made by ``gpu.array``."""
    made = FakeGpu()

    @contextlib.contextmanager
    def using(ordinal: int) -> Iterator[FakeGpu]:
        yield made

    def plan(self: Kernel, grid: Any, block: Any, args: Any = (), **options: Any) -> LaunchPlan:
        return LaunchPlan(made, self, marshal(self.parameters, args).values, {"grid": grid, "block": block} | options)

    tell_streams(monkeypatch, made.capturing)
    monkeypatch.setattr(stream_workspaces, "_SLAB_BYTES", 6 << 20)  # the emulator looks at all memory of a launch
    monkeypatch.setattr(stream_workspaces, "_LEAST_BYTES", 3 << 20)
    monkeypatch.setattr(context, "using", using)
    monkeypatch.setattr(context, "device", lambda o: context.Device(o, (9, 0), 232_448, PROCESSORS))
    monkeypatch.setattr(plans, "gpu_of", lambda device: imagined_gpu("sm_90a", PROCESSORS))
    monkeypatch.setattr(target, "_detect", lambda device: get_target("sm_90a"))
    monkeypatch.setattr(driver, "encode", lambda spec, device: codec.encode(spec))
    monkeypatch.setattr(PackedWeight, "device", property(made.device_of))
    monkeypatch.setattr(Kernel, "load", lambda self, device=None: self._functions.setdefault(0, None))
    monkeypatch.setattr(Kernel, "occupancy", lambda self, *_, **__: 1)
    monkeypatch.setattr(Kernel, "plan", plan)
    use_as_cupy(monkeypatch, lambda shape, dtype: made.array(np.empty(shape, dtype)))
    return made
