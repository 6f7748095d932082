"""Hazards, and the rules that group them into causes and consequences.

One mistake can have several effects. For example, a consumer that reads without a wait also releases the slot too
early. The producer then refills the slot while a consumer reads it, and finally both sides wait for each other. Reports
list each cause, followed by its consequences in the same bytes or at the same mbarrier.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from cudatma.errors import counted

CAUSES: dict[str, str] = {
    "deadlock": "a path omits an arrival, expect_tx does not match the number of delivered bytes, a wait uses the "
    "wrong parity, or no thread sets a flag",
    "byte_count": "the kernel passes a number of elements instead of bytes to expect_tx, or omits the bytes of a copy",
    "arrival_overflow": "the count passed to mbarrier.init is too low, or a thread arrives twice in one phase",
    "barrier_limit": "a phase expects more than 2^20 - 1 bytes, a wait uses a token that is older than the previous "
    "phase, or an arrival with .noComplete completes a phase",
    "barrier_uninitialized": "the kernel omits mbarrier.init, executes mbarrier.inval too early, or uses the wrong "
    "address",
    "barrier_reinitialized": "the kernel executes mbarrier.init in a loop, or reuses the memory without "
    "mbarrier.inval; initialize an mbarrier once, before the loop",
    "barrier_misaligned": "the mbarrier is declared as two 32-bit words, or its offset was computed by hand; declare "
    "it as uint64_t",
    "barrier_overwritten": "a buffer overlaps the mbarrier, or the kernel reuses the memory of the mbarrier without "
    "mbarrier.inval",
    "missing_init_fence": "the thread that executes mbarrier.init does not execute fence.mbarrier_init (or "
    "fence.proxy.async) afterward",
    "missing_init_sync": "mbarrier.init is not followed by __syncthreads, or by barrier.cluster if other CTAs use the "
    "mbarrier",
    "read_before_load": "the reader does not wait on the load's mbarrier, or its wait returns because an earlier "
    "phase is complete",
    "wrong_parity": "the wait always uses the same parity, or the kernel toggles the parity at the wrong time; toggle "
    "it after each pass through the ring",
    "overwritten_while_read": "the producer does not wait on the empty barrier, or a reader arrives on the empty "
    "barrier before its last read",
    "write_race": "two writers use the same slot, or the second writer does not wait for the first",
    "missing_proxy_fence": "the threads that stored do not execute fence.proxy.async before the barrier that precedes "
    "the asynchronous access",
    "store_source_reused": "the kernel reuses the source of a bulk copy without a wait; execute "
    "cp.async.bulk.wait_group.read after a store, or wait for an arrival by the destination CTA after a copy between "
    "CTAs",
    "exit_with_pending_store": "the thread that issued the bulk stores does not execute cp.async.bulk.wait_group.read "
    "before it exits",
    "exit_with_pending_load": "an early return skips the wait for the copy, or the producer loads one tile too many; "
    "wait for every copy",
    "uncommitted_group": "the thread that issued the bulk stores does not execute cp.async.bulk.commit_group before "
    "the wait",
    "wgmma_registers": "the kernel uses accumulators or fragments before it executes wgmma.wait_group",
    "wgmma_missing_fence": "the kernel omits wgmma.fence between the instructions that write the registers and the "
    "next wgmma",
    "wgmma_operands": "a matrix descriptor or scale-d is computed from values that differ among the threads of a "
    "warpgroup",
    "wgmma_uncommitted": "the kernel omits wgmma.commit_group between the last wgmma of a group and wgmma.wait_group",
    "swizzle_mismatch": "the reader's swizzle or offsets do not match the tensor map; wgmma descriptors number the "
    "swizzle modes in reverse order",
    "swizzle_alignment": "the offset of the tile or the start of dynamic shared memory is not aligned to the swizzle "
    "pattern (256, 512 or 1024 bytes)",
    "register_pool": "a warpgroup omits setmaxnreg.dec, or the warpgroups together request more registers than the "
    "CTA started with",
    "divergent_barrier": "bar.sync is inside a branch that some lanes of a warp do not take; move it out of the branch",
    "divergent_warp": "the instruction is inside a branch that some threads do not take, or its mask includes lanes "
    "that do not execute it",
    "block_gone": "a CTA exits before the other CTAs have finished using its shared memory; execute barrier.cluster "
    "before the exit",
    "barrier_count": "the counts of bar.sync and bar.arrive differ, or the count excludes the threads that only arrive",
    "data_race": "the two threads do not execute a barrier between their accesses",
    "global_race": "the two threads do not synchronize between their accesses; use a barrier that both execute, or "
    "fences and a flag whose scope includes both",
    "lane_race": "the code relies on lockstep execution of a warp; execute __syncwarp between the accesses",
    "read_before_store": "the kernel waits with cp.async.bulk.wait_group.read or does not wait; use "
    "cp.async.bulk.wait_group without .read",
    "grid_dependency": "the kernel omits griddepcontrol.wait or executes it after the access",
    "out_of_bounds": "an index or a size is wrong, an address belongs to another CTA or state space, or a buffer is "
    "too small for the padding of its rows",
    "uninitialized_shared": "the kernel does not write every element that it reads, such as the padding after the last "
    "element",
    "uninitialized_register": "a path does not initialize the variable, or a shuffle reads from a lane outside its "
    "mask",
    "tensor_map_fence": "the editing thread does not release the tensor map, or the thread that issues the copy does "
    "not acquire it",
    "tensor_map_in_use": "the kernel does not wait for the copies that use the tensor map before it edits the map; "
    "alternate between maps to avoid the wait",
    "target": 'the code was written for another architecture, or the target\'s name lacks the suffix "a"; choose a '
    "target that supports the instruction, or compile the code conditionally",
    "trap": "an operand has a value that the hardware does not allow, or the kernel executes trap",
}


#: Shared bytes, as ("bytes", CTA rank, first, last), or an mbarrier, as ("mbarrier", CTA rank, offset).
Place = tuple[str, int, int] | tuple[str, int, int, int]


@dataclass(frozen=True, slots=True)
class Access:
    """Another instruction involved in a hazard, such as an earlier access to the same bytes.

    Parameters
    ----------
    verb : str
        "read", "last written", "copied" (by a copy in flight), or "waits" (in a deadlock).
    ptx_line : int
        Line of the instruction in the PTX text.
    source : str
        Source line, such as ``"file.cu:12"``, or "" if the PTX does not name one.
    instruction : str
        Text of the instruction.
    """

    verb: str
    ptx_line: int
    source: str
    instruction: str

    def __str__(self) -> str:
        by = f" by `{opcode_of(self.instruction)}`" if self.verb == "read" else ""
        return f"{self.verb} at {placed(self.ptx_line, self.source)}{by}"


def opcode_of(instruction: str) -> str:
    """Return the opcode in an instruction's text, without the guard."""
    return next((word for word in instruction.split() if not word.startswith("@")), "").rstrip(";")


def placed(ptx_line: int, source: str) -> str:
    """Return the PTX line, followed by the source line if it is known."""
    return f"PTX line {ptx_line}" + (f" ({source})" if source else "")


@dataclass(frozen=True, slots=True)
class Hazard:
    """A mistake in a kernel, reported at one instruction.

    Parameters
    ----------
    kind : str
        A key of `CAUSES`.
    message : str
        Description of the hazard in one sentence.
    kernel : str
        Name of the kernel.
    ptx_line : int
        Line of the instruction in the PTX text.
    source : str
        Source line, such as ``"file.cu:12"``, or "" if the PTX does not name one.
    instruction : str
        Text of the instruction.
    block, warp : tuple of int, int
        CTA and warp in which the hazard was found.
    schedule, seed : int
        Arguments of `EmulatedModule.launch` that reproduce the hazard (pass `schedule` as `replay`).
    count : int, default 1
        Number of occurrences.
    blocks : int, default 1
        Number of CTAs in which the hazard occurred.
    advice : str, default ""
        The missing call, if it is known.
    consequences : tuple of Hazard
        Hazards that result from this hazard.
    source_text : str, default ""
        Text of the source line, if it is available.
    known_cause : str, default ""
        The cause of this hazard, if it differs from the usual cause.
    others : tuple of Access
        Earlier accesses to the same bytes, or the other waits of a deadlock, if they are known.
    also : tuple of Hazard
        Hazards at other places with the same cause.
    where : str, default ""
        Name of the first affected byte or element, such as ``"x[3, 17]"``, or "" if the hazard affects no memory.
    address : int, optional
        Generic address of the first affected byte.
    places : tuple
        Affected shared bytes and mbarriers.
    """

    kind: str
    message: str
    kernel: str
    ptx_line: int
    source: str
    instruction: str
    block: tuple[int, int, int]
    warp: int
    schedule: int
    seed: int
    count: int = 1
    blocks: int = 1
    advice: str = ""
    consequences: tuple[Hazard, ...] = ()
    source_text: str = ""
    known_cause: str = ""
    others: tuple[Access, ...] = ()
    also: tuple[Hazard, ...] = ()
    where: str = ""
    address: int | None = None
    places: tuple[Place, ...] = ()

    @property
    def cause(self) -> str:
        """The known cause, or the usual cause of this kind of hazard."""
        return self.known_cause or CAUSES[self.kind]

    def as_dict(self) -> dict[str, Any]:
        """Return the content as JSON-serializable data.

        Returns
        -------
        dict
            ``cause`` and the attributes, except ``known_cause``, ``address`` and ``places``.
        """
        data = asdict(self) | {"cause": self.cause}
        data |= {name: [other.as_dict() for other in getattr(self, name)] for name in ("consequences", "also")}
        for name in ("known_cause", "address", "places"):
            del data[name]
        return data

    def __str__(self) -> str:
        lines = [
            f"{self.kind}: {self.message}",
            f"  at {self.place} `{self.instruction}`, kernel {self.kernel}, "
            f"block {self.block}, warp {self.warp}{self._elsewhere}, schedule {self.schedule} of seed {self.seed}",
            *([f"  source: {self.source_text}"] if self.source_text else []),
            *(f"  {note}" for note in self.notes),
            f"  usual cause: {self.cause}",
        ]
        return "\n".join(lines)

    @property
    def _elsewhere(self) -> str:
        return f" and in {counted(self.blocks - 1, 'more block')}" if self.blocks > 1 else ""

    @property
    def notes(self) -> list[str]:
        """Lines that state the missing call (if known), other places with the same cause, and the consequences."""
        missing = [f"missing: {self.advice}"] if self.advice else []
        also = [f"also at {other.place}, {counted(other.count, 'time')}" for other in self.also]
        return missing + also + [f"then {c.kind} at {c.place}, {counted(c.count, 'time')}" for c in self.consequences]

    @property
    def place(self) -> str:
        """The PTX line, followed by the source line if it is known."""
        return placed(self.ptx_line, self.source)


#: Maximum number of places per Finding.
_MAX_PLACES = 64

#: Kinds after which the behavior is undefined, in order of precedence.
_SETUP = (
    "target",
    "barrier_misaligned",
    "missing_init_sync",
    "barrier_uninitialized",
    "barrier_reinitialized",
    "barrier_overwritten",
    "missing_init_fence",
)
#: Kinds that violate a protocol.
_PROTOCOL = (
    "barrier_limit",
    "uncommitted_group",
    "wgmma_uncommitted",
    "wgmma_missing_fence",
    "wgmma_operands",
    "barrier_count",
    "divergent_barrier",
    "divergent_warp",
    "register_pool",
)
#: Kinds that usually appear after producer and consumer have lost synchronization.
_LATE = ("lane_race", "uninitialized_shared", "block_gone")
#: Kinds that end the kernel.
_LAST = ("exit_with_pending_store", "exit_with_pending_load", "deadlock", "trap")
_TIERS: dict[str, float] = {kind: tier for tier, kinds in ((1, _PROTOCOL), (3, _LATE), (4, _LAST)) for kind in kinds}
_TIERS |= {kind: number / len(_SETUP) for number, kind in enumerate(_SETUP)}
_ORDERING, _DERIVED = 2, 3
#: Kinds whose tier depends on whether another hazard preceded them.
_EITHER = {"byte_count": 1, "arrival_overflow": 1, "write_race": _ORDERING, "overwritten_while_read": _ORDERING}

_EARLY_READS = {"read_before_load", "wrong_parity"}
_SLOTS = _EARLY_READS | {"uninitialized_shared", "overwritten_while_read", "write_race", "data_race", "lane_race"}
_SLOTS |= {"store_source_reused", "block_gone"}
#: Kinds that any misuse of a pipeline can cause at any place.
_STUCK = {"deadlock", "arrival_overflow", "exit_with_pending_load", "trap"}
_PIPELINE = _SLOTS | _STUCK
#: Pairs of causes and the kinds that can be consequences of each of these causes.
_FOLLOWS: tuple[tuple[tuple[str, ...], set[str]], ...] = (
    (("missing_init_sync", "barrier_uninitialized"), {"byte_count", *_SETUP, *_PIPELINE}),
    (("barrier_reinitialized", "barrier_overwritten"), {"byte_count", *_PIPELINE}),
    (("byte_count", "barrier_count", "divergent_barrier"), _PIPELINE),
    (("arrival_overflow", "barrier_limit", "overwritten_while_read", "write_race"), {"byte_count", *_PIPELINE}),
    (tuple(_EARLY_READS), {"byte_count", *_PIPELINE}),
    (("uncommitted_group",), {"store_source_reused", "exit_with_pending_store", "read_before_store"}),
    (("wgmma_uncommitted",), {"wgmma_registers", "overwritten_while_read"}),
    (("divergent_warp",), {"lane_race", "register_pool", "uninitialized_register", *_STUCK}),
    (("data_race",), {"store_source_reused", "byte_count", *_SLOTS}),
    (("block_gone",), _STUCK),
    (("lane_race",), {"uninitialized_shared", "byte_count"}),
    (("global_race",), {"byte_count"}),
    (("out_of_bounds", "barrier_misaligned", "target"), {"trap"}),
)
FOLLOWS = {cause: kinds for causes, kinds in _FOLLOWS for cause in causes}


@dataclass(slots=True, eq=False)
class Finding:
    """A hazard during collection.

    `places` contains the affected bytes and mbarriers. `blocks` contains the CTAs in which the hazard occurred.
    `is_derived` is True if another hazard preceded every occurrence.
    """

    hazard: Hazard
    places: set[Place] = field(default_factory=set)
    blocks: set[tuple[int, int, int]] = field(default_factory=set)
    is_derived: bool = True

    def __post_init__(self) -> None:
        self.blocks.add(self.hazard.block)

    def touch(self, places: Iterable[Place], is_derived: bool) -> None:
        """Add an occurrence."""
        if len(self.places) < _MAX_PLACES:
            self.places.update(places)
        self.is_derived = self.is_derived and is_derived

    def result(self) -> Hazard:
        """Return the hazard with the affected places and the number of CTAs."""
        return replace(self.hazard, blocks=len(self.blocks), places=tuple(sorted(self.places, key=repr)))

    @property
    def tier(self) -> float:
        kind = self.hazard.kind
        if kind in _EITHER:
            return _DERIVED if self.is_derived else _EITHER[kind]
        return _TIERS.get(kind, _ORDERING)


def by_cause(findings: list[Finding]) -> list[Hazard]:
    """Group findings in order of occurrence, and return the causes with their consequences."""
    first = {id(finding): float(number) for number, finding in enumerate(findings)}
    for finding in findings:
        if finding.hazard.kind == "overwritten_while_read" and finding.tier == _ORDERING:
            # A premature refill also causes reads without a wait, so the refill is the cause. However, if a thread
            # reads the slot before the first fill, the missing wait is the cause, because the thread then also
            # releases the slot too early.
            early = [f for f in findings if f.hazard.kind in _EARLY_READS and _meet(f.places, finding.places)]
            empty = [f for f in findings if f.hazard.kind == "uninitialized_shared"]
            if any(_meet(read.places, unfilled.places) for read in early for unfilled in empty):
                first[id(finding)] = len(findings)
                continue
            first[id(finding)] = min([first[id(finding)], *(first[id(f)] - 0.5 for f in early)])
    causes: list[tuple[Finding, set[Place], list[Hazard]]] = []
    for finding in sorted(findings, key=lambda f: (f.tier, first[id(f)])):
        kind = finding.hazard.kind
        for cause, places, consequences in causes:
            if kind == cause.hazard.kind or kind not in FOLLOWS.get(cause.hazard.kind, ()):
                continue
            if kind in _STUCK or not places or not finding.places or _meet(finding.places, places):
                places |= finding.places
                consequences.append(finding.result())
                break
        else:
            causes.append((finding, set(finding.places), []))
    return _merged(replace(cause.result(), consequences=tuple(consequences)) for cause, _, consequences in causes)


def _merged(hazards: Iterable[Hazard]) -> list[Hazard]:
    """Merge hazards of the same kind with the same earlier accesses and the same missing synchronization."""
    result: dict[object, Hazard] = {}
    for hazard in hazards:
        earlier = tuple((other.verb, other.source or other.ptx_line) for other in hazard.others)
        key = (hazard.kind, earlier, hazard.advice, hazard.known_cause) if earlier else id(hazard)
        first = result.setdefault(key, hazard)
        if first is not hazard:
            alone = replace(hazard, consequences=())
            result[key] = replace(
                first, also=(*first.also, alone), consequences=(*first.consequences, *hazard.consequences)
            )
    return list(result.values())


def _meet(some: set[Place], others: set[Place]) -> bool:
    """Return whether two sets of places share an mbarrier or overlapping bytes."""
    if not some.isdisjoint(others):
        return True
    return any(
        a[:2] == b[:2] and a[2] <= b[-1] and b[2] <= a[-1]
        for a in some
        if a[0] == "bytes"
        for b in others
        if b[0] == "bytes"
    )
