"""Protocols of the running launch and its scheduler, as the machine uses them.

Parameters for the machine's objects have type ``Any``, because state.py defines these objects and depends on the
protocols. ``w`` is a state.Warp, ``block`` is a state.Block, and ``split`` is a state.Split.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from cudatma.emulator.machine.memory import GlobalMemory
from cudatma.emulator.machine.program import Image, Program
from cudatma.emulator.ptx.types import Array

Dim = tuple[int, int, int]


class Schedule(Protocol):
    """The order in which splits run and asynchronous work completes (scheduler.Scheduler)."""

    schedule: int
    seed: int
    steps: int
    progress: int
    has_stalled: bool
    is_polling: bool
    running: Any
    retries: Any
    pending: list[Callable[[], None]]

    def add(self, split: Any) -> None: ...
    def drop(self, split: Any) -> None: ...
    def block(self, split: Any, reason: Any) -> int: ...
    def wake(self, waiters: list[Any]) -> None: ...
    def synchronize(self, waiters: list[Any]) -> None: ...
    def store(self, is_same: Callable[[], bool]) -> None: ...
    def poll(self, split: Any) -> None: ...
    def spin(self, split: Any, wait: Any) -> None: ...
    def synchronized(self) -> None: ...
    def submit(self, action: Callable[[], None]) -> None: ...


class Launch(Protocol):
    """A running grid (launch.GridLaunch)."""

    setup: Any
    image: Image
    program: Program
    memory: GlobalMemory
    grid: Dim
    block: Dim
    cluster: Dim
    threads: int
    dynamic_bytes: int
    shared_bytes: int
    shared_offsets: dict[str, int]
    dynamic_start: int
    workspace_base: int
    reserved_start: int
    reserved_bytes: int
    param_base: int
    param_span: tuple[int, int]
    param_shift: Array
    heap: dict[int, int]
    printed: list[str]
    unchecked: list[str]
    lane_values: dict[tuple[str, int], Array]
    decoded_maps: dict[bytes, Any]
    resident: list[Any]
    started: list[Dim]

    @property
    def scheduler(self) -> Schedule: ...
    @property
    def has_idled(self) -> bool: ...
    def parameter(self, name: str, offset: int, code: str, count: int) -> Array: ...
    def clock(self, name: str) -> int: ...
    def take_cluster(self) -> Dim | None: ...
    def block_ended(self, block: Any) -> None: ...
