"""Copy rows of 16-bit elements to aligned rows with permuted columns, so that out[t, k] = x[t, perm[k]].

The kernel runs before a GEMM whose weight was quantized in activation order, or whose activations TMA cannot read
because their rows are not aligned to 16 bytes. The GEMM uses programmatic dependent launch, and loads its weights while
the copy runs. The same GEMM multiplies aligned and misaligned activations, so the results are bitwise equal. The copy
kernel is memory-bound (docs/design/marlin.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from cudatma.arrays import describe
from cudatma.errors import ArgumentError, quoted
from cudatma.kernels.arguments import ROWS, Arguments, At, Sizes, Value
from cudatma.kernels.checks import check_field_types
from cudatma.kernels.marlin.problem import Problem
from cudatma.kernels.sample import Sample
from cudatma.pipeline import Operand, PipelineSpec, align_up
from cudatma.target import KIB, Target

TEMPLATE = "kernels/permute_columns.cu.j2"
ELEMENT_BYTES = 2
#: Number of elements in a 16-byte chunk. A thread writes one chunk at a time.
CHUNK_ELEMS = 8
#: The pitch of the result is a multiple of this number of bytes, so that no row splits a cache line.
PITCH_ALIGNMENT_BYTES = 128
#: Maximum number of staged columns, which is a row of 128 KiB. Longer rows are read from global memory.
MAX_STAGED_COLUMNS = 65536
#: Shared memory of a CTA with several stages. Every target provides this size, and two such CTAs fit on an SM of SM90.
_SMEM_BYTES = 97 * KIB
#: The number of columns per slot is a multiple of this number, so that layers with similar K share a kernel.
_COLUMN_STEP = 4096
#: Number of rows that share one read of the permutation, if there are enough rows for every SM.
_ROWS = 4


@dataclass(frozen=True, slots=True)
class PermuteColumnsConfig:
    """A configuration of ``kernels/permute_columns.cu.j2``.

    Attributes
    ----------
    has_permutation : bool
        Whether columns are permuted.
    staged_columns : int
        Number of columns per row that bulk copies load into shared memory, a multiple of 64, or 0 to read elements of
        any alignment one by one from global memory.
    rows : int
        Number of rows that are copied at a time.
    stages : int
        Number of groups of rows in flight.
    consumers : int
        Number of threads that write, in whole warps.

    Raises
    ------
    ArgumentError
        If a field is invalid.
    """

    has_permutation: bool
    staged_columns: int = 0
    rows: int = 1
    stages: int = 2
    consumers: int = 512
    entry: str = "permute_columns"

    def __post_init__(self) -> None:
        check_field_types(self)
        if self.staged_columns % 64 or not 0 <= self.staged_columns <= MAX_STAGED_COLUMNS:
            raise ArgumentError(
                "staged_columns", self.staged_columns, f"a multiple of 64 from 0 to {MAX_STAGED_COLUMNS}"
            )
        if self.staged_columns and not self.has_permutation:
            raise ArgumentError("staged_columns", self.staged_columns, "0 for a copy without permutation")
        if not 1 <= self.rows <= 16:
            raise ArgumentError("rows", self.rows, "1 to 16")
        if not 1 <= self.stages <= 8:
            raise ArgumentError("stages", self.stages, "1 to 8")
        if self.consumers % 32 or not 32 <= self.consumers <= 960:
            raise ArgumentError("consumers", self.consumers, "a multiple of 32 from 32 to 960")

    @property
    def is_staged(self) -> bool:
        """Whether rows are copied through shared memory."""
        return self.staged_columns > 0

    @property
    def row_bytes(self) -> int:
        """Row pitch in a slot, in bytes."""
        return self.staged_columns * ELEMENT_BYTES

    @property
    def warps(self) -> int:
        return self.consumers // 32

    @property
    def threads(self) -> int:
        """Number of threads, including one producer warp."""
        return self.consumers + 32 * self.is_staged

    @property
    def ring(self) -> PipelineSpec:
        """Ring with one group of rows per stage. One thread loads the group, and each consumer warp releases it.

        A launch with shorter or fewer rows expects fewer bytes.
        """
        size = self.rows * self.row_bytes
        return PipelineSpec(self.stages, (Operand("rows", size, size),), consumer_arrivals=self.warps)

    @property
    def notes(self) -> tuple[str, ...]:
        """Description of the ring in the opening comment of the generated source."""
        return self.ring.notes() if self.is_staged else ("no ring; threads read elements from global memory",)

    @property
    def smem_bytes(self) -> int:
        return self.ring.smem_bytes if self.is_staged else 0

    def smem_layout(self) -> list[tuple[str, int, int]]:
        """Return (name, offset, bytes) of each array in dynamic shared memory."""
        if not self.is_staged:
            return []
        ring = self.ring
        return [
            ("rows", 0, ring.stages * ring.stage_bytes),
            ("barriers", ring.barriers_offset, ring.barrier_bytes),
        ]

    def stage_layout(self) -> list[tuple[str, int]]:
        """Return (description, bytes) for each array in a stage."""
        shape = f"{self.rows} x {self.staged_columns}"
        return [(f"rows {shape} of 2-byte elements", self.ring.stage_bytes)] if self.is_staged else []

    def check_target(self, target: Target) -> None:
        """Raise TargetError unless the target has TMA, and ArgumentError unless the ring fits in shared memory."""
        target.require("tma", "the permutation of columns")
        target.require("griddepcontrol", "the permutation of columns")
        if self.is_staged:
            self.ring.check_fits(target)


def choose_permute(
    rows: int, columns: int, *, has_permutation: bool, is_aligned: bool, target: Target, sm_count: int
) -> PermuteColumnsConfig:
    """Return the configuration for (rows, columns).

    ``is_aligned`` is True if every row begins at a multiple of 16 bytes.

    Aligned rows that fit in shared memory are staged there before they are permuted.
    """
    group = _ROWS if rows >= _ROWS * sm_count else 1
    direct = PermuteColumnsConfig(has_permutation, rows=group)
    if not has_permutation or not is_aligned or columns % CHUNK_ELEMS:
        return direct
    staged = align_up(columns, _COLUMN_STEP)
    if staged <= MAX_STAGED_COLUMNS:
        for group_rows, stages in ((group, 2), (min(group, 2), 2), (1, 2), (1, 1)):
            config = PermuteColumnsConfig(True, staged, rows=group_rows, stages=stages)
            limit = _SMEM_BYTES if stages > 1 else target.smem_per_block_bytes
            if config.smem_bytes <= min(limit, target.smem_per_block_bytes):
                return config
    return direct


def permute_grid(config: PermuteColumnsConfig, rows: int, columns: int, resident_ctas: int) -> tuple[int, int]:
    """Return the number of CTAs along the columns, and the number of CTAs along the rows.

    All CTAs run at the same time. The columns are divided among CTAs only if there are fewer rows than CTAs.
    """
    down = min(-(-rows // config.rows), resident_ctas)
    chunks = -(-columns // CHUNK_ELEMS)
    return max(1, min(-(-chunks // config.consumers), resident_ctas // down)), down


def result_pitch_bytes(columns: int) -> int:
    """Return the row pitch of the result in bytes."""
    return align_up(columns * ELEMENT_BYTES, PITCH_ALIGNMENT_BYTES)


def permute_arguments(config: PermuteColumnsConfig, sizes: Sizes) -> Arguments:
    """Return the arguments of the launch that copies "x" to the workspace.

    The columns are in the order of "perm" if the config has a permutation.
    """
    order = (At("perm"),) if config.has_permutation else ()
    parameters = *order, At("x"), At(ROWS), *(Value(index) for index in range(4))
    return Arguments(TEMPLATE, config, parameters, sizes, early=("perm",))


def permute_sizes(
    config: PermuteColumnsConfig,
    rows: int,
    columns: int,
    source_pitch_bytes: int,
    resident_ctas: int,
    *,
    programmatic: bool = False,
) -> Sizes:
    """Return the sizes of the launch for (rows, columns)."""
    pitch = result_pitch_bytes(columns)
    values = rows, columns, source_pitch_bytes // ELEMENT_BYTES, pitch // (ELEMENT_BYTES * CHUNK_ELEMS)
    grid = permute_grid(config, rows, columns, resident_ctas)
    return Sizes(grid, values, programmatic=programmatic, rows_bytes=rows * pitch)


def dump_configs(target: Target) -> list[PermuteColumnsConfig]:
    """Return configs of each path for 8192 and 28672 columns, or an empty list if the target has no TMA."""
    if not target.has("tma") or not target.has("griddepcontrol"):
        return []
    cases = [(1, 8192, True, True), (4096, 8192, True, True), (4096, 28672, True, True), (4096, 8192, True, False)]
    cases += [(16, 8191, False, False)]
    configs = [
        choose_permute(m, k, has_permutation=order, is_aligned=aligned, target=target, sm_count=132)
        for m, k, order, aligned in cases
    ]
    return list(dict.fromkeys(configs))


def sample(target: Target, *, rows: int = 9, columns: int = 520, path: str = "staged", blocks: int = 2) -> Sample:
    """Return a copy of random rows with at most ``blocks`` CTAs, for `cudatma emulate permute_columns`.

    The path "staged" permutes through shared memory if the number of columns is a multiple of 8, otherwise from global
    memory; "direct" permutes from global memory; "copy" does not permute. Raises ArgumentError for an invalid argument.
    """
    if path not in ("staged", "direct", "copy"):
        raise ArgumentError("path", path, quoted(("staged", "direct", "copy")))
    if min(rows, columns, blocks) < 1:
        raise ArgumentError("rows, columns, blocks", (rows, columns, blocks), "at least 1 each")
    permute = path != "copy"
    through = align_up(columns, 64) if path == "staged" and columns % CHUNK_ELEMS == 0 else 0
    config = PermuteColumnsConfig(permute, through, rows=2, consumers=64)
    config.check_target(target)
    random = np.random.default_rng(0)
    source = random.integers(0, 1 << 16, (rows, columns), np.uint16)
    order = random.permutation(columns).astype(np.int32)
    result = np.zeros((rows, result_pitch_bytes(columns) // ELEMENT_BYTES), np.uint16)
    planned = permute_arguments(config, permute_sizes(config, rows, columns, source.strides[0], blocks))
    arrays = {"x": describe(source), "perm": describe(order), ROWS: describe(result)}
    run = partial(planned.emulate, target, arrays)

    def error() -> float:
        return float((result[:, :columns] != (source[:, order] if permute else source)).mean())

    what = "copied" if path == "copy" else "permuted, staged" if config.is_staged else "permuted, direct"
    across, down = permute_grid(config, rows, columns, blocks)
    title = f"columns {what}, {rows} x {columns}, {across} x {down} CTAs of {config.threads} threads"
    return Sample(title, planned.kernel(target), run, error, 0.0)


def choose_copy(problem: Problem, target: Target, sm_count: int) -> PermuteColumnsConfig:
    """Return the configuration of the kernel that copies a problem's activations."""
    return choose_permute(
        problem.m,
        problem.layer.k,
        has_permutation=problem.has_perm,
        is_aligned=problem.has_aligned_x,
        target=target,
        sm_count=sm_count,
    )
