"""Layout of the memory that a debug kernel shares with the host, which must match ``parts/debug_panel.cuh.j2``."""

from __future__ import annotations

import math
import os
import struct
from typing import Any

import numpy as np

from cudatma.errors import ArgumentError

#: Name of the module variable that the host sets before each launch. [CUDA driver API, cuModuleGetGlobal]
PANEL_NAME = "cudatma_debug_panel"
#: Format of the panel: abort time, timeout in ns, addresses of records and notes, capacity, taken, blocks, reserved.
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
#: Maximum number of records per launch. The kernel counts further waits but does not record them.
CAPACITY = 4096
#: Size of a CTA's notes in bytes. There are 8 bytes for each of 64 mbarriers, 16 named barriers, a flag, and four
#: numbers per warp of 32 warps.
BLOCK_NOTES_BYTES = (64 + 16 + 1 + 4 * 32) * 8
#: Maximum number of CTAs with notes. Further CTAs do not detect uninitialized mbarriers, and their bar.sync may wait
#: forever.
MAX_NOTED_BLOCKS = 1 << 16

WAIT_EXPIRED, WAITED, NAMED_EXPIRED, NAMED_WAITED, REFUSED = 1, 2, 3, 4, 5
#: Value of ``second`` in a record that contains the state of the mbarrier. Only one record per mbarrier contains the
#: state.
STATE_READ = 1
TIMEOUT_VARIABLE = "CUDATMA_DEBUG_TIMEOUT"
DEFAULT_TIMEOUT_SECONDS = 2.0
_LONGEST_SECONDS = 4000.0  # records count microseconds in 32 bits


def is_debug_ptx(ptx: str) -> bool:
    """Return whether a module was rendered with debug=True."""
    return f" {PANEL_NAME}[" in ptx


def timeout_seconds() -> float:
    """Return the maximum duration of a wait in seconds.

    The duration is $CUDATMA_DEBUG_TIMEOUT if this variable is set, otherwise 2 seconds. Raises ArgumentError if the
    value is invalid.
    """
    text = os.environ.get(TIMEOUT_VARIABLE)
    if not text:
        return DEFAULT_TIMEOUT_SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= _LONGEST_SECONDS:
        raise ArgumentError(
            TIMEOUT_VARIABLE, text, f"a number of seconds greater than 0 and at most {_LONGEST_SECONDS:g}"
        )
    return seconds


def panel_bytes(records: int, notes: int, blocks: int) -> bytes:
    """Return the contents of the panel before a launch of ``blocks`` CTAs.

    ``records`` and ``notes`` are the device addresses of the records and the CTA notes.
    """
    nanoseconds = int(timeout_seconds() * 1e9)
    return _PANEL.pack(0, nanoseconds, records, notes, CAPACITY, 0, min(blocks, MAX_NOTED_BLOCKS), 0)


def reserved_records(panel: bytes) -> int:
    """Return the number of records that a launch reserved, from the launch's panel."""
    return int(_PANEL.unpack(panel)[5])


def notes_bytes(blocks: int) -> int:
    """Return the size of a grid's CTA notes in bytes."""
    return min(blocks, MAX_NOTED_BLOCKS) * BLOCK_NOTES_BYTES


def states(records: np.ndarray[Any, Any]) -> dict[tuple[tuple[int, ...], int], int]:
    """Return the 8 bytes of each barrier, keyed by CTA and address.

    The kernel read the bytes when no copies or arrivals were in flight.
    """
    waits = np.isin(records["kind"], (WAIT_EXPIRED, WAITED)) & (records["second"] == STATE_READ)
    by_barrier = {}
    for record in records[waits]:
        place = tuple(record["block"].tolist()), int(record["address"])
        by_barrier[place] = int(record["bits_high"]) << 32 | int(record["bits_low"])
    return by_barrier


def complete(records: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the complete records in the order in which their threads wrote them."""
    whole: np.ndarray[Any, Any] = records[records["kind"] != 0]
    return whole
