"""The memory that a debug kernel and its host share, byte for byte as ``parts/debug_panel.cuh.j2`` has it."""

from __future__ import annotations

import math
import os
import struct
from typing import Any

import numpy as np

from cudatma.errors import ArgumentError

#: The module's variable that the host sets before each launch. [CUDA driver API, cuModuleGetGlobal]
PANEL_NAME = "cudatma_debug_panel"
#: aborted, timeout in ns, addresses of records and CTA notes; capacity, taken, blocks, reserved.
_PANEL = struct.Struct("<QQQQIIII")
PANEL_BYTES = _PANEL.size
RECORD = np.dtype(
    [
        ("kind", "<u4"),
        ("line", "<u4"),
        ("address", "<u4"),
        ("dynamic_base", "<u4"),
        ("wanted", "<u4"),
        ("bits_low", "<u4"),
        ("bits_high", "<u4"),
        ("first", "<u4"),
        ("second", "<u4"),
        ("waited_us", "<u4"),
        ("thread", "<u4"),
        ("lanes", "<u4"),
        ("block", "<u4", (3,)),
        ("cluster_rank", "<u4"),
    ]
)
#: Records that a launch can leave; more are counted, not kept.
CAPACITY = 4096
#: 64 barriers, 16 named barriers, a flag and four numbers for each of 32 warps, 8 bytes each.
BLOCK_NOTES_BYTES = (64 + 16 + 1 + 4 * 32) * 8
#: CTAs after these have no notes: an uninitialized mbarrier is not recognized there, and bar.sync waits without end.
MAX_NOTED_BLOCKS = 1 << 16

WAIT_EXPIRED, WAITED, NAMED_EXPIRED, NAMED_WAITED, REFUSED = 1, 2, 3, 4, 5
#: ``second`` of a wait for an mbarrier whose record has the barrier's state; one of all that wait there has it.
STATE_READ = 1
TIMEOUT_VARIABLE = "CUDATMA_DEBUG_TIMEOUT"
DEFAULT_TIMEOUT_SECONDS = 2.0
_LONGEST_SECONDS = 4000.0  # a record counts microseconds in 32 bits


def is_debug_ptx(ptx: str) -> bool:
    """Whether a module was rendered with debug=True."""
    return f" {PANEL_NAME}[" in ptx


def timeout_seconds() -> float:
    """$CUDATMA_DEBUG_TIMEOUT, else 2 s: how long a wait may last. ArgumentError unless it is a number up to 4000."""
    text = os.environ.get(TIMEOUT_VARIABLE)
    if not text:
        return DEFAULT_TIMEOUT_SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= _LONGEST_SECONDS:
        raise ArgumentError(TIMEOUT_VARIABLE, text, f"seconds, more than 0 and at most {_LONGEST_SECONDS:g}")
    return seconds


def panel_bytes(records: int, notes: int, blocks: int) -> bytes:
    """A panel before a launch. records, notes: device addresses; blocks: of the grid."""
    nanoseconds = int(timeout_seconds() * 1e9)
    return _PANEL.pack(0, nanoseconds, records, notes, CAPACITY, 0, min(blocks, MAX_NOTED_BLOCKS), 0)


def taken_of(panel: bytes) -> int:
    """How many records a launch has reserved, from its panel."""
    return int(_PANEL.unpack(panel)[5])


def notes_bytes(blocks: int) -> int:
    """Bytes of the CTA notes of a grid."""
    return min(blocks, MAX_NOTED_BLOCKS) * BLOCK_NOTES_BYTES


def states(records: np.ndarray[Any, Any]) -> dict[tuple[tuple[int, ...], int], int]:
    """(block, barrier's address) -> its 8 bytes when the kernel was quiet, of all barriers whose state was read."""
    waits = np.isin(records["kind"], (WAIT_EXPIRED, WAITED)) & (records["second"] == STATE_READ)
    found = {}
    for record in records[waits]:
        place = tuple(record["block"].tolist()), int(record["address"])
        found[place] = int(record["bits_high"]) << 32 | int(record["bits_low"])
    return found


def written(records: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The records that are whole, in the order in which their threads came."""
    whole: np.ndarray[Any, Any] = records[records["kind"] != 0]
    return whole
