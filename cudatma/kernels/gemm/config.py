"""Configurations of the dense GEMM's kernels. PRESETS describes the versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from cudatma.errors import ArgumentError, quoted
from cudatma.kernels.config import KernelConfig, Preset
from cudatma.kernels.cost import Cost
from cudatma.kernels.gemm.cost import cost_model
from cudatma.kernels.gemm.problem import (
    MEMBERS,
    OPERAND_TYPES,
    PROBLEM_FIELDS,
    SCALE_BLOCK,
    WGMMA_M,
    Problem,
    check_kind,
    default_result,
    element_bytes,
    is_fp8,
)
from cudatma.kernels.gpu import Gpu
from cudatma.kernels.launch_struct import RASTER, RESULT, Member
from cudatma.kernels.schedule import Schedule, ceil_div, whole_tiles
from cudatma.kernels.version import Versions
from cudatma.pipeline import align_up
from cudatma.target import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmPreset(Preset):
    """A version of gemm's kernel.

    Attributes
    ----------
    cluster : int
        Number of CTAs per cluster that share the loads of the operand with the larger tile.
    has_block_scales : bool
        Whether the kernel has a mainloop for fp8 with block scales.
    """

    cluster: int = 1
    has_block_scales: bool = False


_MULTIPLES_OF_16 = range(64, 257, 16)
#: Allowed values of fields, unless a version overrides them.
_ALLOWED: Mapping[str, Sequence[int]] = {
    "tile_m": (64, 128, 192, 256),
    "tile_n": (64, 128, 192, 256),
    "tile_k": (64, 128, 256),
    "stages": range(2, 13),
    "warpgroups": (1, 2, 3),
    "cluster_k": (1,),
    "ctas_per_sm": (1,),
}
#: Every version, keyed by name. Calls, dumps, tuning files and docs/design/gemm.md use these names.
PRESETS: Mapping[str, GemmPreset] = {
    "v1": GemmPreset(
        summary="dense GEMM, wgmma, version v1: operands by cp.async", loader="cp_async", allowed=_ALLOWED
    ),
    "v2": GemmPreset(
        summary="dense GEMM, wgmma, version v2: a ring filled by TMA", loader="consumers", allowed=_ALLOWED
    ),
    "v3": GemmPreset(
        summary="dense GEMM, wgmma, version v3: a producer warp", allowed={**_ALLOWED, "tile_n": _MULTIPLES_OF_16}
    ),
    "v4": GemmPreset(
        summary="dense GEMM, wgmma, version v4: persistent, results by TMA where the tile allows it",
        schedule="persistent",
        has_block_scales=True,
        allowed={**_ALLOWED, "tile_n": _MULTIPLES_OF_16},
    ),
    "v5": GemmPreset(
        summary="dense GEMM, wgmma, version v5: clusters that share tiles of A or B",
        schedule="persistent",
        cluster=2,
        has_block_scales=True,
        allowed={**_ALLOWED, "tile_n": _MULTIPLES_OF_16},
    ),
    "v6": GemmPreset(
        summary="dense GEMM, wgmma, version v6: clusters that split K",
        # The CTAs of a cluster share the columns of the tile evenly.
        allowed={**_ALLOWED, "tile_n": (64, 128, 256), "cluster_k": (2, 4)},
    ),
    "v7": GemmPreset(
        summary="dense GEMM, wgmma, version v7: a tile for each warpgroup",
        schedule="pingpong",
        allowed={**_ALLOWED, "warpgroups": (1,)},
    ),
    "mma_sync": GemmPreset(
        summary="dense GEMM, mma.sync: for SM120, a producer warp, persistent",
        schedule="persistent",
        mma="mma_sync",
        allowed={
            **_ALLOWED,
            "tile_m": (64, 128, 256),
            "tile_n": (64, 128, 256),
            "tile_k": (32, 64, 128, 256),
            "warpgroups": (1, 2),
            "ctas_per_sm": (1, 2),
        },
    ),
}
WITH_BLOCK_SCALES = tuple(version for version, preset in PRESETS.items() if preset.has_block_scales)
#: The names of the versions and the ways in which a caller can select a version.
VERSIONS = Versions("gemm", "CUDATMA_GEMM_VERSION", tuple(PRESETS))

_SPAN_BYTES = 128
#: Maximum number of useful stages.
_MAX_USEFUL_STAGES = 8
#: Maximum number of bytes of shared memory that leave 60 KiB to L1. The next larger size leaves 28 KiB, which is too
#: little for block scales: tiles of 256 x 128 are then 12% slower at K = 16384, 11% slower at K = 7168, and not
#: slower at K = 1536. [H100]
_MAX_BYTES_BESIDE_L1 = 195 << 10
#: Maximum number of fp32 sums per thread. A persistent wgmma kernel without an epilogue has registers for more sums.
MAX_SUMS, _MAX_SUMS_WITHOUT_EPILOGUE = 128, 208
#: Maximum number of columns of a tile with three warpgroups and a producer. Each thread then has 128 registers, which
#: include the sums.
_MAX_COLUMNS_OF_THREE = 192
#: Registers per consumer thread after setmaxnreg, keyed by the number of consumer warpgroups, and registers per
#: producer thread. With setmaxnreg, the producer is a whole warpgroup. Without setmaxnreg, each thread of two consumer
#: warpgroups and a producer has 168 registers.
_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = {1: 232, 2: 240}, 24
#: Maximum time in ns for which a thread is suspended while it waits for a stage. The barrier wakes the thread earlier.
_SUSPEND_NS = 10_000_000
_SHORT = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}


def _clusters(version: str, tile_m: int, tile_n: int) -> tuple[int, int]:
    """Return cluster_m and cluster_n for a tile."""
    cluster = PRESETS[version].cluster
    return (1, cluster) if tile_m > tile_n else (cluster, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmConfig(KernelConfig):
    """A configuration of a version's template.

    Attributes
    ----------
    version : str
        A key of PRESETS.
    dtype, layout, out_dtype, epilogue, block_scales, scales_by_tma
        See Problem.
    tile_m, tile_n : int
        Tile size of a CTA, or of a warpgroup if the schedule is "pingpong".
    tile_k : int
        Number of elements of K per stage.
    stages : int
        Number of stages of the ring.
    warpgroups : int
        Number of consumer warpgroups per tile, which divide the tile along M, or in both directions with mma.sync.
    cluster_m : int
        Number of CTAs per cluster along M, which share loads of B.
    cluster_n : int
        Number of CTAs per cluster along N, which share loads of A.
    cluster_k : int
        Number of CTAs per cluster that split K.
    ctas_per_sm : int
        Number of CTAs per SM.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If a field is invalid.
    """

    version: str
    dtype: str
    layout: str
    tile_m: int
    tile_n: int
    tile_k: int
    stages: int
    warpgroups: int
    cluster_m: int = 1
    cluster_n: int = 1
    cluster_k: int = 1
    ctas_per_sm: int = 1
    out_dtype: str = ""
    epilogue: str = "none"
    block_scales: bool = False
    scales_by_tma: bool = False

    function: ClassVar[str] = "gemm"
    presets: ClassVar[Mapping[str, GemmPreset]] = PRESETS
    struct_members: ClassVar[Mapping[str, Member]] = MEMBERS
    revision: ClassVar[int] = 7
    #: Only the CTAs of a cluster divide a tile.
    partial_bytes: ClassVar[int] = 0

    @classmethod
    def of(cls, version: str, **fields: Any) -> GemmConfig:
        """Return a configuration of a version, by default with its smallest clusters."""
        cluster_m, cluster_n = _clusters(version, fields["tile_m"], fields["tile_n"])
        clusters = {
            "cluster_m": cluster_m,
            "cluster_n": cluster_n,
            "cluster_k": PRESETS[version].allowed["cluster_k"][0],
        }
        return cls(version=version, **clusters | fields)

    def __post_init__(self) -> None:
        self.check_values()
        check_kind(self)
        clusters, fitting = (self.cluster_m, self.cluster_n), _clusters(self.version, self.tile_m, self.tile_n)
        if clusters != fitting:
            tile = f"version {self.version} with a tile of {self.tile_m} x {self.tile_n}"
            raise ArgumentError("cluster_m, cluster_n", clusters, f"{fitting} for {tile}")
        if self.tile_m % (rows := WGMMA_M * self.warpgroups):
            raise ArgumentError("tile_m", self.tile_m, f"a multiple of {rows} ({WGMMA_M} per warpgroup)")
        max_sums = _MAX_SUMS_WITHOUT_EPILOGUE if self.stores_asynchronously and not self.has_epilogue else MAX_SUMS
        if (min_warpgroups := ceil_div(self.tile_m * self.tile_n, max_sums * 128)) > self.warpgroups:
            allowed = f"at least {min_warpgroups} (a thread holds at most {max_sums} accumulators)"
            remedy = "use a smaller tile" if min_warpgroups > max(self.preset.allowed["warpgroups"]) else ""
            raise ArgumentError("warpgroups", self.warpgroups, allowed, remedy)
        if self.warpgroups == 3 and self.producer_warps and self.tile_n > _MAX_COLUMNS_OF_THREE:
            allowed = f"at most {_MAX_COLUMNS_OF_THREE} for three warpgroups (each thread has 128 registers)"
            raise ArgumentError("tile_n", self.tile_n, allowed)
        if self.tile_k * self.element_bytes % (row_bytes := _SPAN_BYTES if self.has_wgmma else _SPAN_BYTES // 2):
            raise ArgumentError("tile_k", self.tile_k, f"a multiple of {row_bytes // self.element_bytes}")
        if self.block_scales:
            if not self.preset.has_block_scales:
                raise ArgumentError("version", self.version, f"{quoted(WITH_BLOCK_SCALES)} for block scales")
            if self.tile_k != SCALE_BLOCK:
                raise ArgumentError("tile_k", self.tile_k, f"{SCALE_BLOCK} for block scales")
            if SCALE_BLOCK % self.tile_n:
                raise ArgumentError("tile_n", self.tile_n, f"64 or {SCALE_BLOCK} for block scales")
            if self.warpgroups > 2:
                allowed = "1 or 2 (three warpgroups lack the registers for a second set of accumulators)"
                raise ArgumentError("warpgroups", self.warpgroups, allowed)

    def check_problem(self, problem: Problem) -> None:
        """Raise ArgumentError if the kernel cannot run a problem."""
        if self.cluster_k > 1 and problem.batch_invariant:  # Splitting K changes the order of the additions.
            allowed = f"False for version {self.version} with cluster_k = {self.cluster_k}"
            raise ArgumentError("batch_invariant", True, allowed, "choose a config that does not split K")
        if ceil_div(problem.k, self.tile_k) < self.cluster_k:
            raise ArgumentError("cluster_k", self.cluster_k, f"at most the number of stages along K = {problem.k}")

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features that the target must have."""
        names = ["cluster"] if self.launch_cluster > 1 else []
        names += ["multicast"] if self.cluster > 1 else []
        names += ["tma", "wgmma", "stmatrix"] if self.has_wgmma else ["tma", "mma_sync"]
        names += ["mma_sync_fp8"] if is_fp8(self.dtype) and not self.has_wgmma else []
        names += ["setmaxnreg"] if self.consumer_registers else []
        return tuple(names)

    # ---- Version

    @property
    def preset(self) -> GemmPreset:
        """Preset of this version."""
        return PRESETS[self.version]

    @property
    def template(self) -> str:
        return f"kernels/gemm_{self.version}.cu.j2"

    @property
    def is_persistent(self) -> bool:
        """Whether a CTA computes several tiles."""
        return self.preset.schedule != "one_tile"

    @property
    def stores_asynchronously(self) -> bool:
        """Whether the kernel stores a tile while it computes the next one."""
        return self.is_persistent and self.has_wgmma

    @property
    def releases_one_stage_late(self) -> bool:
        """Whether a slot is released during the MMAs of the next stage (see cudatma/review/release_hazards.py)."""
        return not self.has_wgmma

    @property
    def suspend_ns(self) -> int:
        """Maximum time in ns for which a thread is suspended while it waits for a slot. 0 selects the GPU's default."""
        return _SUSPEND_NS if self.stores_asynchronously else 0

    @property
    def entry(self) -> str:
        tile = f"{self.tile_m}x{self.tile_n}x{self.tile_k}_w{self.warpgroups}_s{self.stages}"
        tile += f"_b{self.ctas_per_sm}" if self.ctas_per_sm > 1 else ""
        tile += f"_c{self.cluster}" if self.cluster > 1 else ""
        tile += f"_k{self.cluster_k}" if self.cluster_k > 1 else ""
        kinds = [self.mma_type]
        kinds += [_SHORT[self.out_dtype]] if self.out_dtype else []
        kinds += [self.layout.lower()]
        kinds += [self.epilogue] if self.has_epilogue else []
        kinds += ["blocks"] if self.block_scales else []
        kinds += ["tma"] if self.ring_has_scales else []
        return f"gemm_{self.version}_{'_'.join(kinds)}_{tile}"

    # ---- Operands and the result

    @property
    def mma_type(self) -> str:
        """Name of the type of A and B in MMA instructions."""
        return OPERAND_TYPES[self.dtype]

    @property
    def element_bytes(self) -> int:
        """Bytes per element of A and B."""
        return element_bytes(self.dtype)

    @property
    def result_dtype(self) -> str:
        """Name of C's dtype."""
        return self.out_dtype or default_result(self.dtype)

    @property
    def out_bytes(self) -> int:
        return 4 if self.result_dtype == "float32" else 2

    @property
    def is_bf16(self) -> bool:
        """Whether C is bf16."""
        return self.result_dtype == "bfloat16"

    @property
    def has_epilogue(self) -> bool:
        """Whether an epilogue is applied to the accumulators before rounding."""
        return self.epilogue != "none"

    @property
    def has_scales(self) -> bool:
        """Whether the kernel takes scales of A and B."""
        return self.has_epilogue or self.block_scales

    @property
    def ring_has_scales(self) -> bool:
        """Whether TMA loads A's block scales with each stage.

        Otherwise the threads of 64-row warpgroups load the scales of their own rows.
        """
        return self.scales_by_tma and self.tile_m > WGMMA_M * self.warpgroups

    @property
    def is_a_k_major(self) -> bool:
        """Whether K is contiguous in A. Otherwise, M is contiguous."""
        return self.layout[0] == "R"

    @property
    def is_b_k_major(self) -> bool:
        """Whether K is contiguous in B. Otherwise, N is contiguous."""
        return self.layout[1] == "C"

    # ---- Launch parameters

    @property
    def parameter_names(self) -> tuple[str, ...]:
        names: tuple[str, ...] = ("a", "b") if self.preset.loader == "cp_async" else ("a_map", "b_map")
        names += ("output_map",) if self.stores_by_tma else ()
        names += ("output", "bias") if self.has_epilogue else ("output",)
        names += ("a_scale_map" if self.ring_has_scales else "a_scale", "b_scale") if self.has_scales else ()
        return (*names, "problem")

    @property
    def problem_names(self) -> tuple[str, ...]:
        names = ["k_iterations", *RASTER, *RESULT, "matrix_tiles_m", "by_matrix_tiles_m", "output_batch"]
        if self.preset.loader == "cp_async":
            names += ["k", "a_pitch", "b_pitch", "a_batch", "b_batch"]
        else:
            names += ["a_box_rows", "stage_bytes"]
        names += ["work_ranges"] if self.is_persistent else []
        names += ["alternates"] if self.stores_asynchronously else []
        names += ["output_by_tma"] if self.stores_by_tma else []
        names += ["alpha", "beta"] if self.has_epilogue else []
        if self.block_scales:
            names += ["b_scale_column", "b_scale_k", "b_scale_batch"]
            names += [] if self.ring_has_scales else ["a_scale_row", "a_scale_k", "a_scale_batch"]
        elif self.has_scales:
            names += ["a_scale_row", "b_scale_column"]
        return tuple(names)

    # ---- Warps and registers

    @property
    def consumer_warps(self) -> int:
        return 8 if self.preset.schedule == "pingpong" else 4 * self.warpgroups

    @property
    def producer_warps(self) -> int:
        """Number of producer warps. setmaxnreg requires a whole warpgroup."""
        return (4 if self.consumer_registers else 1) if self.preset.loader == "producer_warp" else 0

    @property
    def consumer_registers(self) -> int:
        """Number of registers per consumer thread after setmaxnreg, or 0 without setmaxnreg."""
        if self.has_wgmma:
            return _CONSUMER_REGISTERS[2] if self.is_persistent and self.consumer_warps == 8 else 0
        # Two warps with 64 x 64 sums each, and a third warp, need more than a quarter of the SM's registers.
        if self.warp_m * self.warp_n < 64 * 64 or self.warpgroups * self.ctas_per_sm == 1:
            return 0
        return _CONSUMER_REGISTERS[self.warpgroups]

    @property
    def producer_registers(self) -> int:
        return _PRODUCER_REGISTERS

    @property
    def warps_n(self) -> int:
        """Number of warps along N with mma.sync.

        Nearly square parts of the tile minimize the number of operand elements to read.
        """
        fits = [n for n in (1, 2, 4, 8) if n <= self.consumer_warps and self.tile_n // n >= 32]
        return min(fits, key=lambda n: self.tile_m * n // self.consumer_warps + self.tile_n // n)

    @property
    def warps_m(self) -> int:
        return self.consumer_warps // self.warps_n

    @property
    def warp_m(self) -> int:
        """Number of rows of the tile per warp."""
        return self.tile_m // self.warps_m

    @property
    def warp_n(self) -> int:
        """Number of columns of the tile per warp."""
        return self.tile_n // self.warps_n

    # ---- TMA boxes

    @property
    def span(self) -> int:
        """Number of operand elements in a row of the 128-byte swizzle."""
        return _SPAN_BYTES // self.element_bytes

    @property
    def span_k(self) -> int:
        """Number of elements of K per row in a box of a K-major operand."""
        return min(self.span, self.tile_k)

    @property
    def slot_n(self) -> int:
        """Number of columns of B per slot, rounded up to whole boxes if B is N-major."""
        return self.tile_n if self.is_b_k_major else ceil_div(self.tile_n, self.span) * self.span

    @property
    def loaded_rows(self) -> tuple[int, int]:
        """Number of rows of A's tile, and of B's transposed tile, that one CTA loads."""
        return self.tile_m // self.cluster_n, self.slot_n // self.cluster_m

    @property
    def loaded_stage_bytes(self) -> int:
        return self.element_bytes * self.tile_k * sum(self.loaded_rows)

    @property
    def max_a_box_rows(self) -> int:
        """Number of rows in a box of A if A has enough rows."""
        return self.loaded_rows[0] if self.is_a_k_major else self.span

    def a_box_rows(self, m: int) -> int:
        """Return the number of rows in a box of A, which is at most M rounded up to a multiple of 8."""
        return min(self.max_a_box_rows, ceil_div(m, 8) * 8)

    def a_box(self, m: int) -> tuple[int, int, int]:
        """Return the box size (matrices, rows, columns) of A with M rows, or of A transposed if A is M-major."""
        if not self.is_a_k_major:
            return (1, self.tile_k // self.cluster_n, self.a_box_rows(m))
        return (1, self.a_box_rows(m), self.span_k)

    @property
    def b_box(self) -> tuple[int, int, int]:
        """Box size (matrices, rows, columns) of B transposed, or of B if B is N-major."""
        if not self.is_b_k_major:
            return (1, self.tile_k // self.cluster_m, self.span)
        return (1, self.loaded_rows[1], self.span_k)

    def boxes_bytes(self, a_box_rows: int) -> int:
        """Return the number of bytes that the boxes of a stage deliver to a CTA.

        ``a_box_rows`` is the number of rows in a box of A.
        """
        rows = a_box_rows * (self.tile_m // self.max_a_box_rows)
        scales = 4 * self.tile_m if self.ring_has_scales else 0
        return self.element_bytes * self.tile_k * (rows + self.slot_n) + scales

    def swizzle(self, is_k_major: bool) -> str:
        """Return the swizzle of an operand. TMA pads the rows of narrow M-major and N-major boxes to 128 bytes."""
        return f"{self.span_k * self.element_bytes if is_k_major else _SPAN_BYTES}B"

    @property
    def staged_n(self) -> int:
        """Number of columns of the result that are staged at a time, at most the number that a CTA stores."""
        return min(_SPAN_BYTES // self.out_bytes, self.tile_n // self.cluster_k)

    @property
    def stores_by_tma(self) -> bool:
        """Whether TMA stores the result if the result's layout allows it. Boxes have whole rows of 128 bytes."""
        return self.stores_asynchronously and self.tile_n % self.staged_n == 0

    @property
    def stages_whole_tile(self) -> bool:
        """Whether a kernel with block scales stages a whole tile of the result in shared memory.

        A tile of 4-byte elements would take the memory of one stage of the ring.
        """
        return self.ring_has_scales and self.stores_by_tma and self.out_bytes == 2

    @property
    def staging_buffers(self) -> int:
        """Number of staging buffers, 64 rows x 128 bytes each, per warpgroup.

        With two buffers, TMA reads one while the warpgroup fills the other.
        """
        if self.stages_whole_tile:
            return self.tile_m // (WGMMA_M * self.warpgroups) * self.tile_n // self.staged_n
        return 2 if self.stores_by_tma else 1

    @property
    def alternates_buffers(self) -> bool:
        """Whether the TMA stores of a warpgroup alternate between its staging buffers."""
        return self.stores_by_tma and not self.stages_whole_tile

    @property
    def output_box(self) -> tuple[int, int, int]:
        """Size (matrices, rows, columns) of a box that TMA stores for a warpgroup."""
        return (1, self.tile_m // self.warpgroups if self.stages_whole_tile else WGMMA_M, self.staged_n)

    # ---- Shared memory

    def stage_arrays(self) -> tuple[tuple[str, int], ...]:
        k_bytes = self.element_bytes * self.tile_k
        arrays = (("a", align_up(k_bytes * self.tile_m, 1024)), ("b", align_up(k_bytes * self.slot_n, 1024)))
        return (*arrays, ("a_scale", self.a_scale_slot_bytes)) if self.ring_has_scales else arrays

    @property
    def a_scale_slot_bytes(self) -> int:
        """Bytes per slot for the scales of A's rows."""
        return align_up(4 * self.tile_m, 1024)

    @property
    def barriers(self) -> tuple[str, ...]:
        return () if self.preset.loader == "cp_async" else ("full", "empty")

    def epilogue_parts(self) -> tuple[tuple[str, int], ...]:
        if not self.has_wgmma:
            return ()  # Lanes exchange results by shuffles instead of through shared memory.
        staging = ("staging", self.consumer_warps * self.staging_buffers * 16 * _SPAN_BYTES)
        if self.cluster_k == 1:
            return (staging,)
        sums = (self.cluster_k - 1) * self.tile_m * self.tile_n // self.cluster_k * 4
        return (staging, ("cluster_sums", sums), ("cluster_barrier", 8))

    def stage_layout(self) -> list[tuple[str, int]]:
        """Return (description, bytes) for each array in a stage."""
        a, b, *scales = (size for _, size in self.stage_arrays())
        majors = "K" if self.is_a_k_major else "M", "K" if self.is_b_k_major else "N"
        swizzles = [self.swizzle(is_k_major) for is_k_major in (self.is_a_k_major, self.is_b_k_major)]
        return [
            (f"A {self.tile_m} x {self.tile_k} {self.dtype}, {majors[0]}-major, {swizzles[0]} swizzle", a),
            (f"B {self.tile_k} x {self.slot_n} {self.dtype}, {majors[1]}-major, {swizzles[1]} swizzle", b),
            *((f"scales of {self.tile_m} rows of A, float32", size) for size in scales),
        ]

    def useful_stages(self, target: Target) -> int:
        """Return the number of useful stages that fit in shared memory, less than 2 if the tile does not fit."""
        share = target.smem_share_bytes(self.ctas_per_sm)
        if self.block_scales and not self.ring_has_scales:
            share = min(share, _MAX_BYTES_BESIDE_L1)
        return min(_MAX_USEFUL_STAGES, self.max_stages(share))

    # ---- Choice and tuning

    def divide_tiles(self, problem: Problem, sm_count: int) -> Schedule:
        """Return how the tiles of all matrices in the batch are distributed among CTAs."""
        m = problem.batch * ceil_div(problem.m, self.cluster_tile_m) * self.cluster_tile_m
        resident_ctas = sm_count * self.ctas_per_sm if self.is_persistent else None
        return whole_tiles(self, m, problem.n, problem.k, resident_ctas)

    def adapted(self, problem: Problem) -> GemmConfig:
        """Return the config with this tile for another problem."""
        return replace(self, **{name: getattr(problem, name) for name in PROBLEM_FIELDS})

    def cost_at(self, m: Any, problem: Problem, gpu: Gpu) -> Cost:
        """Return the predicted time for M = ``m``, an int or int64 array. The problem's own M is ignored."""
        return cost_model(self, gpu)(m, problem)
