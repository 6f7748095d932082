"""Records -> the text of a report: which threads wait where, for which barrier, and what is missing there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cudatma.errors import PipelineHang, counted
from cudatma.mbarrier_bits import MAX_COUNT, BarrierBits, decode
from cudatma.runtime.hang import records as shared
from cudatma.runtime.hang.names import Names
from cudatma.runtime.hang.rules import RULES

_WARP = 32
_RANK = {"refused": 0, "expired": 1, "waiting": 2}
_UNREAD = "nobody has read the state of the barrier: its block has no notes, or too many records were left"
#: Groups of equal waits that a message lists.
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
    """One warp that could not go on.

    state: "expired" (its own time was up), "waiting" (it waited when the kernel was ended), "refused" (it asked for
    what the hardware would stop; ``rule`` names it, ``detail`` says it). barrier: array and stage, "named barrier 3".
    address: the barrier's, in the shared window, or the named barrier's number. block, warp: of the grid and CTA.
    lanes: mask of the lanes that came together. parity: what was waited for, None for named barriers and refusals.
    arrivals: the argument of mbarrier_init, or how many threads a named barrier waits for; 0 where it is not known.
    raw: the mbarrier's 8 bytes once the kernel was quiet; bits: decoded, None where there are none. verified: whether
    that decoding has been checked on such a GPU. line, text: of the generated source.
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
        """The lowest lane that waits."""
        return (self.lanes & -self.lanes).bit_length() - 1

    @property
    def is_over(self) -> bool:
        """Whether the phase that was waited for has ended after all, while the kernel was ended."""
        return self.bits is not None and self.parity is not None and self.bits.parity != self.parity & 1

    @property
    def is_half_done(self) -> bool:
        """Whether something has come to the barrier in this phase, but not all."""
        if self.bits is None:
            return not self.rule
        if self.is_over:
            return False
        return self.bits.tx_bytes != 0 or self.bits.pending_arrivals != (self.arrivals or self.bits.arrivals)

    @property
    def cause(self) -> str:
        """What the state of the barrier suggests; "" where nothing is known of it."""
        if self.rule:
            return self.detail
        if self.bits is None:
            return self.detail
        if self.is_over:
            return "the phase has ended since: what this wait needed was under way"
        pending, tx = self.bits.pending_arrivals, self.bits.tx_bytes
        lack = f"{counted(pending, 'arrival')} {'is' if pending == 1 else 'are'} missing"
        if pending == 0 and tx > 0:
            why = "expect_tx says more than the copies deliver, or a copy or st.async is missing"
            return f"{tx} announced bytes never came: {why}"
        if pending == 0:
            return f"{-tx} bytes more came than were announced"
        if tx < 0:
            return f"{-tx} bytes came that no expect_tx announced, and {lack}"
        if tx > 0:
            return f"{lack}, and {tx} bytes"
        if self.arrivals and pending < self.arrivals:
            return f"{pending} of {self.arrivals} arrivals are missing"
        return "nobody has arrived in this phase: a wrong parity, a stage that was skipped, or a path without an arrive"


def hang_of(
    records: np.ndarray[Any, Any], names: Names, *, verified: bool, where: str, taken: int = 0
) -> PipelineHang | None:
    """The error that the records of a launch describe, None where there are none.

    records: (n,) of RECORD. verified: whether the mbarrier's layout is known on that GPU. where: the GPU's name, or
    the emulator. taken: how many records there would be if all had been kept.
    """
    states = shared.states(records)
    found = sorted((_wait(record, names, verified, states) for record in shared.written(records)), key=_order)
    if not found:
        return None
    return PipelineHang(_text(found, names, where, taken - len(found)), tuple(found), names.entry)


def _order(wait: StuckWait) -> tuple[Any, ...]:
    """Refusals first, then barriers at which something but not everything has come: the other waits mostly result from
    them. What is over comes last. Among equals what expired, longest first; in a CTA by warp."""
    follows = not wait.rule and not wait.is_half_done
    return (follows, wait.is_over, _RANK[wait.state], -round(wait.waited_seconds, 2), wait.block[::-1], wait.warp)


def _wait(record: Any, names: Names, verified: bool, states: Mapping[tuple[tuple[int, ...], int], int]) -> StuckWait:
    kind, line, address = int(record["kind"]), int(record["line"]), int(record["address"])
    wanted, first, second = int(record["wanted"]), int(record["first"]), int(record["second"])
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
        rule, say = RULES.get(wanted, (f"rule {wanted}", lambda a, b: f"values {a}, {b}"))
        common |= {"parity": None, "arrivals": 0, "raw": None, "bits": None}
        return StuckWait(**common, barrier=barrier, rule=rule, detail=say(first, second))
    if kind in (shared.NAMED_EXPIRED, shared.NAMED_WAITED):
        detail = f"{first} of {wanted} threads have come"
        common |= {"parity": None, "raw": None, "bits": None}
        return StuckWait(**common, arrivals=wanted, barrier=f"named barrier {address}", detail=detail)
    raw = states.get((common["block"], address))
    common |= {"parity": wanted, "arrivals": first if first <= MAX_COUNT else 0}
    if raw is None:
        return StuckWait(**common, barrier=barrier, raw=None, bits=None, detail=_UNREAD)
    return StuckWait(**common, barrier=barrier, raw=raw, bits=decode(raw))


def _text(found: Sequence[StuckWait], names: Names, where: str, lost: int) -> str:
    first = found[0]
    what = "an operation was refused" if first.rule else f"a wait of {first.waited_seconds:.3g} s expired"
    groups: dict[tuple[Any, ...], list[StuckWait]] = {}
    for wait in found:
        groups.setdefault((wait.state, wait.barrier, wait.parity, wait.raw, wait.line, wait.cause), []).append(wait)
    lines = [f"{names.entry} on {where}: {what}, and the kernel was ended; what it wrote is not valid"]
    for waits in list(groups.values())[:_LISTED]:
        lines += _group(waits)
    if len(groups) > _LISTED:
        lines.append(f"and {counted(len(groups) - _LISTED, 'more group')} of waits")
    if lost > 0:
        lines.append(f"and {counted(lost, 'wait')} of which no record was kept")
    return "\n".join(lines)


def _group(waits: Sequence[StuckWait]) -> list[str]:
    """Two or three lines for waits that differ in CTA and warp only."""
    first = waits[0]
    asked = "" if first.parity is None else f", parity {first.parity}"
    place = f"line {first.line}: {first.text}" if first.line else "line not known: NVRTC tells it from 12.9 on"
    lines = [f"  {first.state}: {first.barrier}{asked}, by {_who(waits)}", f"    {place}"]
    if first.raw is not None and first.bits is not None:
        told = f"initialised with {counted(first.arrivals, 'arrival')}; " if first.arrivals else ""
        sure = "" if first.verified else " (not verified on this GPU)"
        bits = first.bits
        pending = f"{counted(bits.pending_arrivals, 'arrival')} and {counted(bits.tx_bytes, 'byte')} pending"
        state = f"{pending}, parity {bits.parity}"
        lines.append(f"    {told}raw {first.raw:#018x}, decoded{sure}: {state}")
    return [*lines, f"    {first.cause}"]


def _who(waits: Sequence[StuckWait]) -> str:
    blocks: dict[tuple[int, int, int], set[int]] = {}
    for wait in waits:
        blocks.setdefault(wait.block, set()).add(wait.warp)
    block, warps = next(iter(blocks.items()))
    lanes = {wait.lanes for wait in waits}
    only = f" lane {waits[0].lane}" if len(lanes) == 1 and bin(waits[0].lanes).count("1") == 1 else ""
    named = f"warp {min(warps)}" if len(warps) == 1 else f"warps {', '.join(map(str, sorted(warps)))}"
    more = f", and in {counted(len(blocks) - 1, 'more block')}" if len(blocks) > 1 else ""
    return f"{named}{only} of block {block}{more}"
