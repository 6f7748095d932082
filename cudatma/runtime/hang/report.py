"""Text of a hang report: the waiting threads, their source lines, their barriers, and the missing arrivals and bytes.

The rule numbers are those of ``enum Rule`` in parts/debug_panel.cuh.j2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cudatma.errors import PipelineHang, counted
from cudatma.mbarrier_bits import MAX_COUNT, BarrierBits, decode
from cudatma.runtime.compiler_log import own_lines
from cudatma.runtime.hang import records as shared

_INT32 = 1 << 32


def _signed(value: int) -> int:
    return value - _INT32 if value >> 31 else value


def _mode(number: int) -> str:
    return ("tiled", "im2col", "im2col wide")[number] if number < 3 else f"mode {number}"


#: Maps each rule to its name and to a function that returns its text for the two numbers in a record.
RULES: dict[int, tuple[str, Callable[[int, int], str]]] = {
    1: ("barrier_alignment", lambda a, b: f"an mbarrier must be {a}-byte aligned"),
    2: ("barrier_uninitialized", lambda a, b: "mbarrier_init was not called for this address in this block"),
    3: ("barrier_count", lambda a, b: f"the count of mbarrier_init is {a}; it must be 1 to {b}"),
    4: ("expected_bytes", lambda a, b: f"the size of expect_tx is {a} bytes; it must be at most {b}"),
    5: ("map_alignment", lambda a, b: f"the tensor map at {b << 32 | a:#x} must be 64-byte aligned"),
    6: ("map_rank", lambda a, b: f"the tensor map has rank {a}, but the instruction is for rank {b}"),
    7: ("map_mode", lambda a, b: f"the tensor map is {_mode(a)}, but the instruction is for {_mode(b)} maps"),
    8: (
        "coordinate_alignment",
        lambda a, b: (
            f"coordinate 0 is {_signed(a)} with elements of {b} bytes; a box must begin at a multiple of 16 bytes"
        ),
    ),
    9: (
        "negative_coordinate",
        lambda a, b: f"coordinate {b} is {_signed(a)}; it must be at least 0 in stores and reductions",
    ),
    10: ("shared_alignment", lambda a, b: f"a box in shared memory must be {a}-byte aligned"),
    11: (
        "swizzle_alignment",
        lambda a, b: f"a box with swizzle {16 << b}B must be aligned to the swizzle's pattern of {a} bytes",
    ),
    12: ("reduce_type", lambda a, b: f"the reduction does not support element format {a} of the tensor map"),
    13: ("bulk_shared", lambda a, b: f"the shared address of a bulk copy must be a multiple of {a}"),
    14: (
        "bulk_global",
        lambda a, b: f"the global address of a bulk copy is {b << 32 | a:#x}; it must be a multiple of 16",
    ),
    15: ("bulk_bytes", lambda a, b: f"the size of a bulk copy is {a} bytes; it must be a multiple of {b}"),
    16: (
        "dimension",
        lambda a, b: f"dimension {b} of the tensor map has {a + 1} elements; it must have at most 2**31 for an access",
    ),
    17: (
        "bounding_box",
        lambda a, b: f"coordinate {b} is {_signed(a)}; it must be inside the im2col map's bounding box",
    ),
    18: (
        "padded_store",
        lambda a, b: (
            f"the corners of the im2col map are {_signed(a)} and {_signed(b)}; a store must stay inside the tensor"
        ),
    ),
}


_BARRIER_BYTES = 8
#: First bit of the CTA's rank in a shared::cluster address.
_RANK_SHIFT = 24


@dataclass(frozen=True, slots=True)
class Names:
    """Names of a kernel's addresses and lines.

    Attributes
    ----------
    entry : str
        Name of the kernel.
    source : str, default: ""
        CUDA text of the kernel.
    layout : sequence of tuple, default: ()
        (name, offset, bytes) of each part of dynamic shared memory, from the config's ``smem_layout()``.
    """

    entry: str
    source: str = ""
    layout: Sequence[tuple[str, int, int]] = ()

    def barrier(self, address: int, dynamic_base: int) -> str:
        """Return a barrier's array and stage, such as ``full_barriers[2]``, or its address if there is no layout."""
        rank, low = address >> _RANK_SHIFT, (1 << _RANK_SHIFT) - 1
        if rank != dynamic_base >> _RANK_SHIFT:
            return f"{self.barrier(address & low, dynamic_base & low)} of rank {rank} of the cluster"
        offset = address - dynamic_base
        for name, start, size in self.layout:
            if start <= offset < start + size:
                stage, inside = divmod(offset - start, _BARRIER_BYTES)
                return f"{name}[{stage}]" + (f" + {inside} B" if inside else "")
        where = f"dynamic shared memory + {offset:#x}" if offset >= 0 else "static shared memory"
        return f"mbarrier at {address:#x} ({where})"

    def line(self, number: int) -> str:
        """Return the text of a source line without indentation, or "" if the line does not exist.

        The line number refers to the text passed to compile(), or to the generated source of one of cudatma's
        templates.
        """
        (lines,) = own_lines(self.source).values()
        return lines.get(number, "").strip()


_WARP = 32
_RANK = {"refused": 0, "expired": 1, "waiting": 2}
_UNREAD = "the state of the barrier was not read, because its block has no notes or there were too many records"
#: Maximum number of groups of equal waits in a message.
_LISTED = 16
_STATES = {
    shared.WAIT_EXPIRED: "expired",
    shared.WAITED: "waiting",
    shared.NAMED_EXPIRED: "expired",
    shared.NAMED_WAITED: "waiting",
    shared.REFUSED: "refused",
}


@dataclass(frozen=True, slots=True)
class StuckWait:
    """A warp that was stuck.

    Attributes
    ----------
    state : str
        "expired" if the wait timed out, "waiting" if the warp was still waiting when the kernel was aborted, or
        "refused" if the warp attempted an operation that the hardware would trap.
    barrier : str
        Array and stage of the barrier, or "named barrier 3".
    address : int
        Address of the barrier in the shared window, or number of the named barrier.
    block : tuple of int
        Position of the CTA in the grid.
    warp : int
        Index of the warp in the CTA.
    lanes : int
        Mask of the lanes that waited together.
    parity : int or None
        Parity that the warp waited for, or None for named barriers and refused operations.
    arrivals : int
        Argument of mbarrier_init, or number of threads of a named barrier; 0 if unknown.
    raw : int or None
        The 8 bytes of the mbarrier when no copies or arrivals were in flight, or None if they were not read.
    bits : BarrierBits or None
        State that ``raw`` encodes.
    verified : bool
        Whether the encoding was verified on GPUs of this compute capability.
    waited_seconds : float
        Duration of the wait in seconds.
    line : int
        Number of the source line, or 0 if unknown.
    text : str
        Text of the source line.
    rule : str, default: ""
        Name of the rule that a refused operation violates.
    detail : str, default: ""
        Description of an invalid operation or of a named barrier's state.
    """

    state: str
    barrier: str
    address: int
    block: tuple[int, int, int]
    warp: int
    lanes: int
    parity: int | None
    arrivals: int
    raw: int | None
    bits: BarrierBits | None
    verified: bool
    waited_seconds: float
    line: int
    text: str
    rule: str = ""
    detail: str = ""

    @property
    def lane(self) -> int:
        """Index of the lowest lane that waits."""
        return (self.lanes & -self.lanes).bit_length() - 1

    @property
    def is_over(self) -> bool:
        """Whether the phase completed during the abort of the kernel."""
        return self.bits is not None and self.parity is not None and self.bits.parity != self.parity & 1

    @property
    def is_half_done(self) -> bool:
        """Whether the barrier has received some, but not all, of this phase's arrivals or bytes."""
        if self.bits is None:
            return not self.rule
        if self.is_over:
            return False
        return self.bits.tx_bytes != 0 or self.bits.pending_arrivals != (self.arrivals or self.bits.arrivals)

    @property
    def cause(self) -> str:
        """Likely cause, derived from the state of the barrier, or "" if the cause is unknown."""
        if self.rule:
            return self.detail
        if self.bits is None:
            return self.detail
        if self.is_over:
            return "the phase has completed since then, because the missing arrivals or bytes were still in flight"
        pending, tx = self.bits.pending_arrivals, self.bits.tx_bytes
        lack = f"{counted(pending, 'arrival')} {'is' if pending == 1 else 'are'} missing"
        if pending == 0 and tx > 0:
            why = "expect_tx announces more than the copies deliver, or a copy or st.async is missing"
            return f"{tx} announced bytes never arrived, because {why}"
        if pending == 0:
            return f"{-tx} more bytes arrived than were announced"
        if tx < 0:
            return f"{-tx} bytes arrived that no expect_tx had announced, and {lack}"
        if tx > 0:
            return f"{lack}, and {tx} bytes"
        if self.arrivals and pending < self.arrivals:
            return f"{pending} of {self.arrivals} arrivals are missing"
        return "no thread has arrived in this phase, because of a wrong parity, a skipped stage or a missing arrive"


def hang_of(
    records: np.ndarray[Any, Any], names: Names, *, verified: bool, where: str, reserved: int = 0
) -> PipelineHang | None:
    """Return a PipelineHang for the records of a launch, or None if there are none.

    ``records`` has shape (n,) and dtype RECORD. ``verified`` states whether the encoding of an mbarrier was verified on
    this GPU, ``where`` is the name of the GPU or the emulator, and ``reserved`` is the number of records that the
    launch would have written without a limit.
    """
    states = shared.states(records)
    stuck = sorted((_wait(record, names, verified, states) for record in shared.complete(records)), key=_order)
    if not stuck:
        return None
    return PipelineHang(_text(stuck, names, where, reserved - len(stuck)), tuple(stuck), names.entry)


def _order(wait: StuckWait) -> tuple[Any, ...]:
    """Return the sort key of a wait.

    Refused operations come first. Waits on barriers with some, but not all, arrivals or bytes follow, because these
    barriers cause most other waits. Waits whose phase has completed come last. Within each of these groups, expired
    waits come first, beginning with the longest, and waits of one block are ordered by warp.
    """
    follows = not wait.rule and not wait.is_half_done
    return (follows, wait.is_over, _RANK[wait.state], -round(wait.waited_seconds, 2), wait.block[::-1], wait.warp)


def _wait(record: Any, names: Names, verified: bool, states: Mapping[tuple[tuple[int, ...], int], int]) -> StuckWait:
    kind, line, address = int(record["kind"]), int(record["line"]), int(record["address"])
    expected, first, second = int(record["wanted"]), int(record["first"]), int(record["second"])
    common: dict[str, Any] = {
        "state": _STATES.get(kind, "waiting"),
        "address": address,
        "block": tuple(int(part) for part in record["block"]),
        "warp": int(record["thread"]) // _WARP,
        "lanes": int(record["lanes"]),
        "verified": verified,
        "waited_seconds": int(record["waited_us"]) / 1e6,
        "line": line,
        "text": names.line(line),
    }
    barrier = names.barrier(address, int(record["dynamic_base"]))
    if kind == shared.REFUSED:
        rule, say = RULES.get(expected, (f"rule {expected}", lambda a, b: f"values {a}, {b}"))
        common |= {"parity": None, "arrivals": 0, "raw": None, "bits": None}
        return StuckWait(**common, barrier=barrier, rule=rule, detail=say(first, second))
    if kind in (shared.NAMED_EXPIRED, shared.NAMED_WAITED):
        detail = f"{first} of {expected} threads have arrived"
        common |= {"parity": None, "raw": None, "bits": None}
        return StuckWait(**common, arrivals=expected, barrier=f"named barrier {address}", detail=detail)
    raw = states.get((common["block"], address))
    common |= {"parity": expected, "arrivals": first if first <= MAX_COUNT else 0}
    if raw is None:
        return StuckWait(**common, barrier=barrier, raw=None, bits=None, detail=_UNREAD)
    return StuckWait(**common, barrier=barrier, raw=raw, bits=decode(raw))


def _text(stuck: Sequence[StuckWait], names: Names, where: str, lost: int) -> str:
    first = stuck[0]
    what = "an invalid operation was attempted" if first.rule else f"a wait of {first.waited_seconds:.3g} s expired"
    groups: dict[tuple[Any, ...], list[StuckWait]] = {}
    for wait in stuck:
        groups.setdefault((wait.state, wait.barrier, wait.parity, wait.raw, wait.line, wait.cause), []).append(wait)
    lines = [f"{names.entry} on {where}: {what}, and the kernel was ended; its results are not valid"]
    for waits in list(groups.values())[:_LISTED]:
        lines += _group(waits)
    if len(groups) > _LISTED:
        lines.append(f"and {counted(len(groups) - _LISTED, 'more group')} of waits")
    if lost > 0:
        lines.append(f"and {counted(lost, 'wait')} without a record")
    return "\n".join(lines)


def _group(waits: Sequence[StuckWait]) -> list[str]:
    """Return the lines of a message for waits that differ only in block and warp."""
    first = waits[0]
    parity = "" if first.parity is None else f", parity {first.parity}"
    place = f"line {first.line}: {first.text}" if first.line else "line unknown (NVRTC 12.9 or later reports it)"
    lines = [f"  {first.state}: {first.barrier}{parity}, by {_who(waits)}", f"    {place}"]
    if first.raw is not None and first.bits is not None:
        initial = f"initialized with {counted(first.arrivals, 'arrival')}; " if first.arrivals else ""
        caveat = "" if first.verified else " (not verified on this GPU)"
        bits = first.bits
        pending = f"{counted(bits.pending_arrivals, 'arrival')} and {counted(bits.tx_bytes, 'byte')} pending"
        state = f"{pending}, parity {bits.parity}"
        lines.append(f"    {initial}raw {first.raw:#018x}, decoded{caveat}: {state}")
    return [*lines, f"    {first.cause}"]


def _who(waits: Sequence[StuckWait]) -> str:
    blocks: dict[tuple[int, int, int], set[int]] = {}
    for wait in waits:
        blocks.setdefault(wait.block, set()).add(wait.warp)
    block, warps = next(iter(blocks.items()))
    lanes = {wait.lanes for wait in waits}
    only = f" lane {waits[0].lane}" if len(lanes) == 1 and bin(waits[0].lanes).count("1") == 1 else ""
    warp_text = f"warp {min(warps)}" if len(warps) == 1 else f"warps {', '.join(map(str, sorted(warps)))}"
    more = f", and in {counted(len(blocks) - 1, 'more block')}" if len(blocks) > 1 else ""
    return f"{warp_text}{only} of block {block}{more}"
