"""A GPU with a scripted clock that implements the few CuPy calls of the benchmarks' harness."""

from __future__ import annotations

import types
from collections.abc import Callable


class FakeGpu:
    """A GPU with one stream. A graph takes the sum of its launches' microseconds; ``log`` records all events."""

    def __init__(self) -> None:
        self.now_us, self.log, self.capturing = 0.0, [], False
        self.captured: list[float] = []
        cuda = types.SimpleNamespace(Event=lambda: FakeEvent(self), get_elapsed_time=lambda a, b: (b.at - a.at) / 1e3)
        self.module = types.SimpleNamespace(cuda=cuda)
        self.slowdown: Callable[[float], float] = lambda now_us: 1.0

    def launch(self, us: float) -> None:
        if self.capturing:
            self.captured.append(us)
        else:
            self.now_us += us

    def begin_capture(self) -> None:
        self.capturing, self.captured = True, []

    def end_capture(self) -> FakeGraph:
        self.capturing = False
        return FakeGraph(self, sum(self.captured))

    def synchronize(self) -> None:
        assert not self.capturing, "a synchronization invalidates a capture"


class FakeEvent:
    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu, self.at = gpu, 0.0

    def record(self, stream: object) -> None:
        self.at = self.gpu.now_us


class FakeGraph:
    def __init__(self, gpu: FakeGpu, us: float) -> None:
        self.gpu, self.us = gpu, us

    def upload(self, stream: object) -> None:
        self.gpu.log.append("upload")

    def launch(self, stream: object) -> None:
        self.gpu.log.append(self.us)
        self.gpu.now_us += self.us * self.gpu.slowdown(self.gpu.now_us)
