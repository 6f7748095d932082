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
    "deadlock": "an arrival is missing on one path, expect_tx does not match the delivered bytes, a parity is wrong, "
    "or a flag is never set",
    "byte_count": "expect_tx does not match the bytes that the copies deliver; it must count bytes, not elements",
    "arrival_overflow": "more threads arrive than mbarrier.init expects, or one thread arrives twice in a phase",
    "barrier_limit": "a phase expects more than 2^20 - 1 bytes, a token is older than the previous phase, or "
    ".noComplete completes a phase",
    "barrier_uninitialized": "mbarrier.init is missing, mbarrier.inval came too early, or the address is wrong",
    "barrier_reinitialized": "mbarrier.init runs again while the barrier is in use; execute mbarrier.inval first",
    "barrier_misaligned": "the barrier is not aligned to 8 bytes",
    "barrier_overwritten": "ordinary stores or copies overwrite the 8 bytes of a live mbarrier",
    "missing_init_fence": "fence.mbarrier_init (or fence.proxy.async) is missing between mbarrier.init and the copies",
    "missing_init_sync": "no CTA or cluster barrier separates mbarrier.init from other threads that use the mbarrier",
    "read_before_load": "the wait on the load's mbarrier is missing, or the wait passed because of an earlier phase",
    "wrong_parity": "the wait's parity does not match the phase that the load completes, so the wait returns early",
    "overwritten_while_read": "the producer refills the slot before all readers have arrived on the empty barrier",
    "write_race": "no barrier orders two writers of the same bytes",
    "missing_proxy_fence": "fence.proxy.async is missing between plain stores and an asynchronous access",
    "store_source_reused": "the source of a bulk copy is written while the copy may still read it; use "
    "cp.async.bulk.wait_group.read for a store, or a synchronization with the destination CTA for a copy between CTAs",
    "exit_with_pending_store": "cp.async.bulk.wait_group.read is missing after the bulk stores",
    "exit_with_pending_load": "no thread waits for the copy's phase before the CTA exits or the mbarrier is "
    "invalidated",
    "uncommitted_group": "bulk stores are issued but never committed with cp.async.bulk.commit_group",
    "wgmma_registers": "accumulators or fragments are accessed before wgmma.wait_group",
    "wgmma_missing_fence": "wgmma.fence is missing between register writes and the next wgmma",
    "wgmma_operands": "a matrix descriptor or scale-d depends on values that differ among the threads of a warpgroup",
    "wgmma_uncommitted": "wgmma.commit_group is missing before wgmma.wait_group",
    "swizzle_mismatch": "the reader's swizzle or offsets differ from the tile's (wgmma numbers the swizzle modes in "
    "reverse order)",
    "swizzle_alignment": "a swizzled tile does not begin at a multiple of its pattern's size (256, 512 or 1024 bytes)",
    "register_pool": "setmaxnreg.inc needs more registers than the CTA started with and setmaxnreg.dec has freed",
    "divergent_barrier": "bar.sync is inside a branch that not all lanes of a warp take",
    "divergent_warp": "only some threads execute an instruction that the whole warp or warpgroup must execute",
    "block_gone": "a CTA exits while another CTA may use its shared memory; barrier.cluster is missing before the exit",
    "barrier_count": "threads pass different thread counts to a named barrier",
    "data_race": "no barrier orders the two accesses to shared memory",
    "global_race": "the accesses are not ordered: both threads must join a barrier, or use fences and a flag whose "
    "scope includes both",
    "lane_race": "the lanes of a warp run independently, and no __syncwarp orders their accesses",
    "read_before_store": "cp.async.bulk.wait_group (without .read) is missing before a bulk store's result is used",
    "grid_dependency": "griddepcontrol.wait is missing or comes too late in a programmatic dependent launch",
    "out_of_bounds": "an index, a size, or the CTA or state space of an address is wrong, or the size of a buffer "
    "ignores the padding of rows",
    "uninitialized_shared": "shared memory is read before it is written",
    "uninitialized_register": "no path to the instruction writes the register, or a shuffle reads from a lane outside "
    "its mask",
    "tensor_map_fence": "no tensormap proxy fence separates the edit of a tensor map from its use",
    "tensor_map_in_use": "a tensor map is edited before copies that use it have completed; alternate between maps",
    "target": "the target architecture does not support the instruction",
    "trap": "the hardware stops the kernel at this instruction",
}


#: Shared bytes, as ("bytes", CTA rank, first, last), or an mbarrier, as ("mbarrier", CTA rank, offset).
Place = tuple[str, int, int] | tuple[str, int, int, int]


@dataclass(frozen=True, slots=True)
class Access:
    """Another instruction involved in a hazard, such as an earlier access to the same bytes.

    Parameters
    ----------
    verb : str
        "read", "last written", "copied" (by a copy in flight), or "waits" for a deadlock.
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
    """Return the opcode of an instruction's text, without a guard."""
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
        Description of the event in one sentence.
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
            The attributes except ``known_cause``, ``address`` and ``places``, and ``cause``.
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
        """Lines with the missing call if it is known, other places of the same cause, and the consequences."""
        missing = [f"missing: {self.advice}"] if self.advice else []
        also = [f"also at {other.place}, {counted(other.count, 'time')}" for other in self.also]
        return missing + also + [f"then {c.kind} at {c.place}, {counted(c.count, 'time')}" for c in self.consequences]

    @property
    def place(self) -> str:
        """The PTX line, followed by the source line if it is known."""
        return placed(self.ptx_line, self.source)


#: Maximum number of places per Finding.
_MAX_PLACES = 64

#: Kinds after which the behavior is undefined, in order of precedence, and kinds that violate a protocol.
_SETUP = (
    "target",
    "barrier_misaligned",
    "missing_init_sync",
    "barrier_uninitialized",
    "barrier_reinitialized",
    "barrier_overwritten",
    "missing_init_fence",
)
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
#: Kinds that usually appear after producer and consumer lose synchronization, and kinds that then end the kernel.
_LATE = ("lane_race", "uninitialized_shared", "block_gone")
_LAST = ("exit_with_pending_store", "exit_with_pending_load", "deadlock", "trap")
_TIERS: dict[str, float] = {kind: tier for tier, kinds in ((1, _PROTOCOL), (3, _LATE), (4, _LAST)) for kind in kinds}
_TIERS |= {kind: number / len(_SETUP) for number, kind in enumerate(_SETUP)}
_ORDERING, _DERIVED = 2, 3
#: Kinds whose tier depends on whether another hazard preceded them.
_EITHER = {"byte_count": 1, "arrival_overflow": 1, "write_race": _ORDERING, "overwritten_while_read": _ORDERING}

_EARLY_READS = {"read_before_load", "wrong_parity"}
_SLOTS = _EARLY_READS | {"uninitialized_shared", "overwritten_while_read", "write_race", "data_race", "lane_race"}
_SLOTS |= {"store_source_reused", "block_gone"}
#: Kinds that any misuse of a pipeline may cause, at any place.
_STUCK = {"deadlock", "arrival_overflow", "exit_with_pending_load", "trap"}
_PIPELINE = _SLOTS | _STUCK
#: Kinds of causes -> kinds that any of these causes may have as a consequence.
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

    `places` holds the affected bytes and mbarriers. `blocks` holds the CTAs in which the hazard occurred. `is_derived`
    is True if another hazard preceded every occurrence.
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
        """Return the hazard with its places and the number of its CTAs."""
        return replace(self.hazard, blocks=len(self.blocks), places=tuple(sorted(self.places, key=repr)))

    @property
    def tier(self) -> float:
        kind = self.hazard.kind
        if kind in _EITHER:
            return _DERIVED if self.is_derived else _EITHER[kind]
        return _TIERS.get(kind, _ORDERING)


def by_cause(findings: list[Finding]) -> list[Hazard]:
    """Group findings, which are in order of occurrence, and return the causes with their consequences."""
    first = {id(finding): float(number) for number, finding in enumerate(findings)}
    for finding in findings:
        if finding.hazard.kind == "overwritten_while_read" and finding.tier == _ORDERING:
            # A refill that comes too early also causes reads without a wait, so the refill is the cause. But if a
            # thread reads the slot before the first fill, the missing wait is the cause, because the thread also
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
    """Merge hazards of the same kind that share the earlier access and the missing synchronization."""
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
