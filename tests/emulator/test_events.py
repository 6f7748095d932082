"""Observers receive the machine's events in order, and see the state of memory before each event."""

from __future__ import annotations

from typing import Any

import pytest
from ptx_lines import kernel

from cudatma.emulator import api
from cudatma.emulator.machine.events import UNOBSERVED, Observer, combined

BODY = """
shl.b32 %r1, %r63, 2;
mov.u32 %r2, buffer;
add.u32 %r1, %r1, %r2;
st.shared.u32 [%r1], %r63;
bar.sync 0;
ld.shared.u32 %r3, [%r1];
"""


class Log(Observer):
    """Records all events."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def note(self, what: str) -> None:
        self.log.append(f"a: {what}")

    def warp_started(self, w: Any) -> None:
        self.note("start")

    def shared_write(self, w: Any, at: int, block: Any, offsets: Any, *rest: Any) -> None:
        self.note(f"write over {block.shared.data[int(offsets[5])]:#x}")

    def shared_read(self, w: Any, at: int, block: Any, offsets: Any, *rest: Any) -> None:
        self.note(f"read {block.shared.data[int(offsets[5])]:#x}")

    def barrier_completed(self, barrier: Any, warps: list[Any]) -> None:
        self.note(f"barrier {barrier.number}")

    def cluster_ended(self) -> None:
        self.note("cluster ends")

    def block_ended(self, block: Any) -> None:
        self.note("block ends")

    def warp_ended(self, w: Any) -> None:
        self.note("warp ends")


class Barriers(Observer):
    """Receives events of barriers only."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def barrier_completed(self, barrier: Any, warps: list[Any]) -> None:
        self.log.append(f"b: barrier {barrier.number}")


def test_observers_are_called_in_their_order_before_each_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    monkeypatch.setattr(api, "checks_of", lambda *of: [Log(log), Barriers(log)])
    kernel(BODY, declarations=".shared .align 4 .b8 buffer[128];").launch("k", 1, 32, (0,) * 4, schedules=1)
    assert log == [
        "a: start",
        "a: write over 0xa5",
        "a: barrier 0",
        "b: barrier 0",
        "a: read 0x5",
        "a: cluster ends",
        "a: block ends",
        "a: warp ends",
    ]


def test_nobody_observes_a_launch_without_hazards_and_trace() -> None:
    assert combined(()) is UNOBSERVED
