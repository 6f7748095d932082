"""What the emulator found: one Hazard each, and the Report of a launch.

Each kind has a sentence on its usual cause.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cudatma.errors import counted

CAUSES: dict[str, str] = {
    "deadlock": "an arrive is missing on one path, expect_tx differs from the delivered bytes, or a parity is wrong",
    "byte_count": "expect_tx differs from the bytes that the copies deliver (bytes mistaken for elements)",
    "arrival_overflow": "more threads arrive than mbarrier.init expects, or one arrives twice in a phase",
    "barrier_uninitialised": "mbarrier.init is missing, mbarrier.inval came too early, or another address is used",
    "barrier_reinitialised": "mbarrier.init runs again while the barrier is in use; invalidate it first",
    "barrier_misaligned": "the barrier is not aligned to 8 bytes",
    "barrier_overwritten": "ordinary stores or copies hit the 8 bytes of a live mbarrier",
    "missing_init_fence": "fence.mbarrier_init (or fence.proxy.async) is missing between mbarrier.init and the copies",
    "missing_init_sync": "other threads use the barrier with no block- or cluster-wide barrier after mbarrier.init",
    "read_before_load": "the wait on the load's mbarrier is missing, or it let the reader through in an earlier phase",
    "wrong_parity": "the wait's parity does not match the phase that the load completes, so that it passed too early",
    "overwritten_while_read": "the slot is refilled before its readers arrived on the empty barrier, or without a wait",
    "write_race": "two writers of the same bytes are not ordered by a barrier",
    "missing_proxy_fence": "fence.proxy.async is missing between plain stores and an asynchronous access",
    "store_source_reused": "the source of a bulk store is written before cp.async.bulk.wait_group.read",
    "exit_with_pending_store": "the kernel ends without cp.async.bulk.wait_group.read for its bulk stores",
    "exit_with_pending_load": "nobody waits for the copy's phase before the CTA ends or the mbarrier is invalidated",
    "uncommitted_group": "bulk stores are issued but never committed with cp.async.bulk.commit_group",
    "wgmma_registers": "accumulators or fragments are touched before wgmma.wait_group",
    "wgmma_missing_fence": "wgmma.fence is missing before the first wgmma after registers were written",
    "wgmma_uncommitted": "wgmma.commit_group is missing before wgmma.wait_group",
    "swizzle_mismatch": "the reader's swizzle differs from the tensor map's (wgmma's codes run the other way)",
    "swizzle_alignment": "a swizzled tile does not begin at a multiple of its pattern (256, 512 or 1024 bytes)",
    "register_pool": "setmaxnreg.inc asks for more registers than the CTA began with and setmaxnreg.dec has freed",
    "divergent_barrier": "bar.sync is inside a branch that not all lanes of a warp take",
    "divergent_warp": "a warp-wide instruction is executed by a part of the lanes that it names",
    "block_gone": "barrier.cluster arrive and wait are missing at the end of the kernel",
    "barrier_count": "threads disagree on how many take part in a named barrier",
    "data_race": "no barrier orders the two accesses to shared memory",
    "global_race": "no barrier of both threads, and no fence with a flag at a wide enough scope, orders the accesses",
    "lane_race": "__syncwarp is missing: lanes of a warp run independently, that they ran together orders nothing",
    "read_before_store": "cp.async.bulk.wait_group (without .read) is missing before a bulk store's result is used",
    "grid_dependency": "griddepcontrol.wait is missing or comes too late in a programmatic dependent launch",
    "out_of_bounds": "an index or a size is wrong, or a buffer was sized by byte count where rows are padded",
    "uninitialised_shared": "shared memory is read that nobody wrote",
    "uninitialised_register": "a register is read that no path has written",
    "tensor_map_fence": "a tensor map was edited without the tensormap proxy fence before its use",
    "tensor_map_in_use": "a tensor map is edited before copies that use it were waited for; let several take turns",
    "target": "the architecture lacks it",
    "trap": "the hardware stops the kernel here",
}


@dataclass(frozen=True, slots=True)
class Hazard:
    """One finding. kind: a key of CAUSES. block, warp: of the access that exposed it. schedule, seed: to replay it.

    advice: the call that is missing, where that is known. consequences: what follows from it.
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
    advice: str = ""
    consequences: tuple[Hazard, ...] = ()

    @property
    def cause(self) -> str:
        return CAUSES[self.kind]

    def __str__(self) -> str:
        lines = [
            f"{self.kind}: {self.message}",
            f"  at {self.place} `{self.instruction}`, kernel {self.kernel}, "
            f"block {self.block}, warp {self.warp}, schedule {self.schedule} of seed {self.seed}",
            *(f"  {note}" for note in self.notes),
            f"  usual cause: {self.cause}",
        ]
        return "\n".join(lines)

    @property
    def notes(self) -> list[str]:
        """The missing call, where it is known, and what follows from the hazard, a line each."""
        missing = [f"missing: {self.advice}"] if self.advice else []
        return missing + [f"then {c.kind} at {c.place}, {c.count} time{'s' * (c.count > 1)}" for c in self.consequences]

    @property
    def place(self) -> str:
        """Its PTX line, and its source line where that is known."""
        return f"PTX line {self.ptx_line}" + (f" ({self.source})" if self.source else "")


@dataclass(slots=True)
class Report:
    """What a launch showed over all its schedules. steps: segments executed; printed: what vprintf wrote.

    hazards: causes, the first one first; what follows from one is in its ``consequences``. warnings: what may be
    meant as it is; they leave a report clean. unchecked: what of the kernel could not be checked, and why.
    """

    kernel: str
    schedules: int
    hazards: list[Hazard] = field(default_factory=list)
    steps: int = 0
    printed: list[str] = field(default_factory=list)
    warnings: list[Hazard] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        return not self.hazards

    @property
    def findings(self) -> list[Hazard]:
        """Each hazard and what follows from it, one after the other."""
        return [finding for hazard in self.hazards for finding in (hazard, *hazard.consequences)]

    @property
    def kinds(self) -> set[str]:
        """The kinds of hazard that were found, consequences too."""
        return {finding.kind for finding in self.findings}

    def __str__(self) -> str:
        lines = [str(hazard) for hazard in self.hazards]
        if self.is_clean:
            lines.append(f"{self.kernel}: no hazard in {counted(self.schedules, 'schedule')}")
        lines += [f"warning: {warning}" for warning in self.warnings]
        return "\n".join([*lines, *(f"unchecked: {what}" for what in self.unchecked)])
