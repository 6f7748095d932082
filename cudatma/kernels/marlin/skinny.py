"""The spec of the skinny GEMM: what its template needs to know, and every rule about it.

For small M, loading the weight bounds the time. A CTA therefore computes its N tiles over all of K, and takes as many
of them as let one wave cover N; its warps add up their partial sums in shared memory. The product is transposed, as in
the mma.sync kernel: N is the M dimension of the mma.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from cudatma.dtypes import activation_type
from cudatma.errors import ArgumentError
from cudatma.kernels.cost import Cost
from cudatma.kernels.gpu import Gpu
from cudatma.kernels.launch_struct import RESULT
from cudatma.kernels.marlin.cost import skinny_cost
from cudatma.kernels.marlin.problem import GROUP_SIZES, Problem
from cudatma.kernels.marlin.staged_tile import MAX_CLUSTER_K, StagedTile
from cudatma.kernels.schedule import ceil_div
from cudatma.target import Target

#: Columns of W of one N tile: two fragments of 16, which a warp keeps.
N_TILE = 32
#: A box of scales has at most 256 columns.
MAX_N_TILES = 8
#: Columns of an mma: rows of x.
MMA_COLUMNS = 8
_MAX_WARPS = 16
#: The longest ring that is worth measuring.
_MAX_STAGES = 12
_SCALE_ROW = 64
#: The 128-byte swizzle repeats after so many rows of 128 bytes, which hold 64 elements of a row of x each.
_SWIZZLE_ROWS = 8
#: fp32 sums of 16 columns of W x 8 rows of x: four of each lane.
_FRAGMENT_BYTES = 32 * 16


def least_block_m(block_k: int) -> int:
    """The least block_m for a block_k: a stage holds whole periods of the swizzle."""
    return max(1, _SWIZZLE_ROWS * 64 // block_k)


@dataclass(frozen=True, slots=True)
class SkinnySpec(StagedTile):
    """One instance of ``kernels/marlin_skinny.cu.j2``. Every operand comes by TMA.

    dtype, group_size, has_zeros, blocks_per_sm: as in MmaSyncSpec.
    block_m: rows of x: 8, 16 or 32; or 1, 2 or 4, which the other columns of the mma repeat, and which need a deep box
    and stages of whole periods of the swizzle (``least_block_m()``).
    n_tiles: N tiles of a CTA, of 32 columns of W each. block_k: K of a stage. stages: slots of the ring.
    slice_k: warps that share an N tile and divide the K of each stage.
    deep_box: one box of three dimensions loads a stage's activations, which needs a K that is a multiple of 64;
    otherwise each 64 of K are a box.
    cluster_k: CTAs of a cluster, which share a tile and divide K by whole stages; each N tile belongs to one of them,
    which adds up the sums of all. For layers of small N.
    """

    dtype: str
    group_size: int
    has_zeros: bool
    block_m: int
    n_tiles: int
    block_k: int
    slice_k: int
    stages: int
    blocks_per_sm: int = 1
    deep_box: bool = False
    cluster_k: int = 1

    template: ClassVar[str] = "kernels/marlin_skinny.cu.j2"
    revision: ClassVar[int] = 1
    cluster: ClassVar[int] = 1

    def __post_init__(self) -> None:
        activation_type(self.dtype)
        one_of = {
            "group_size": GROUP_SIZES,
            "block_m": (1, 2, 4, 8, 16, 32),
            "n_tiles": tuple(range(1, MAX_N_TILES + 1)),
            "block_k": (128, 256, 512, 1024),
            "slice_k": (1, 2, 4, 8, 16),
            "blocks_per_sm": (1, 2),
            "cluster_k": tuple(range(1, MAX_CLUSTER_K + 1)),
        }
        self.check_values(one_of)
        if type(self.deep_box) is not bool:
            raise ArgumentError("deep_box", self.deep_box, "a bool")
        if type(self.stages) is not int or not 2 <= self.stages <= 16:
            raise ArgumentError("stages", self.stages, "2 to 16")
        if self.consumer_warps > _MAX_WARPS:
            raise ArgumentError("n_tiles * slice_k", self.consumer_warps, f"at most {_MAX_WARPS} warps")
        if self.block_k // 64 % self.slice_k:
            why = "each warp takes a multiple of 64 of K"
            raise ArgumentError("slice_k", self.slice_k, f"a divisor of block_k / 64 = {self.block_k // 64}", why)
        if self.block_m < MMA_COLUMNS and not self.deep_box:
            why = "only such a box may have fewer rows than the mma has columns"
            raise ArgumentError("deep_box", self.deep_box, f"True for block_m < {MMA_COLUMNS}", why)
        if self.block_m < (least := least_block_m(self.block_k)):
            why = "each stage begins with a period of the 128-byte swizzle, eight rows of 64 elements"
            raise ArgumentError("block_m", self.block_m, f"at least {least} for block_k = {self.block_k}", why)

    @property
    def parameter_names(self) -> tuple[str, ...]:
        weights = ("weight_map",) * (self.whole_rows > 0) + ("half_weight_map",) * self.has_half_row
        tables = () if self.has_stage_scales else self.tables()
        return (*weights, *self.table_maps(), "activation_map", *tables, "bias", "output", "problem")

    @property
    def map_names(self) -> tuple[str, ...]:
        """The launch parameters that are tensor maps."""
        return tuple(name for name in self.parameter_names if name.endswith("_map"))

    @property
    def map_addresses(self) -> str:
        """Their addresses in CUDA, in the same order."""
        return ", ".join(f"&{name}" for name in self.map_names)

    @property
    def problem_names(self) -> tuple[str, ...]:
        scales = () if self.has_stage_scales else ("scale_pitch",)
        return ("k_iterations", "tiles_n", "prefetch_stages", *scales, *RESULT)

    # What a reader of the generated source finds as named constants.

    @property
    def slices(self) -> int:
        return self.slice_k

    @property
    def entry(self) -> str:
        scales = "column" if self.group_size == -1 else f"g{self.group_size}"
        zeros = "_zeros" if self.has_zeros else ""
        tile = f"{self.block_m}x{self.block_n}x{self.block_k}_k{self.slice_k}_s{self.stages}"
        blocks = f"_b{self.blocks_per_sm}" if self.blocks_per_sm > 1 else ""
        box = "_d" if self.deep_box else ""
        cluster = f"_c{self.cluster_k}" if self.cluster_k > 1 else ""
        return f"marlin_skinny_{self.activation.short}_{scales}{zeros}_{tile}{blocks}{box}{cluster}"

    @property
    def block_n(self) -> int:
        return N_TILE * self.n_tiles

    @property
    def whole_rows(self) -> int:
        """Rows of packed weights, 64 columns of W each, that a CTA computes as a whole."""
        return self.n_tiles // 2

    @property
    def has_half_row(self) -> bool:
        """An odd number of N tiles begins or ends in the middle of a row of packed weights."""
        return self.n_tiles % 2 == 1

    @property
    def columns(self) -> int:
        """Columns of the mmas: fewer rows of x than 8 are repeated, and the repetitions are not stored."""
        return max(MMA_COLUMNS, self.block_m)

    @property
    def sums(self) -> int:
        """fp32 sums that a consumer thread keeps: over K, and over the current group of scales."""
        sets = 2 if self.has_stage_scales else 1
        return sets * N_TILE * self.columns // 32

    @property
    def consumer_warps(self) -> int:
        return self.n_tiles * self.slice_k

    @property
    def producer_warps(self) -> int:
        return 1

    @property
    def warp_tiles(self) -> int:
        return self.consumer_warps

    @property
    def scale_row(self) -> int:
        """Columns of one row of a stage's scales: whole rows of packed weights, because their order is permuted."""
        return _SCALE_ROW * (self.whole_rows + self.has_half_row)

    @property
    def column_bytes(self) -> int:
        """Partial sums of an N tile, which warps and then CTAs write to shared memory to add them up."""
        return 2 * self.columns // 8 * _FRAGMENT_BYTES

    @property
    def partial_bytes(self) -> int:
        """The workspace is not used."""
        return 0

    def epilogue_parts(self) -> tuple[tuple[str, int], ...]:
        owned = -(-self.n_tiles // self.cluster_k)
        cluster = (self.cluster_k - 1) * owned * self.column_bytes
        barrier = 8 if self.cluster_k > 1 else 0
        return (
            ("slice_sums", (self.slice_k - 1) * self.n_tiles * self.column_bytes),
            ("cluster_sums", cluster),
            ("cluster_barrier", barrier),
        )

    def cost_at(self, m: Any, problem: Problem, gpu: Gpu) -> Cost:
        return skinny_cost(self, m, problem.n, problem.k, gpu)

    def check_k(self, k: int) -> None:
        if self.deep_box and k % 64:
            raise ArgumentError("spec.deep_box", True, f"false: k = {k} is no multiple of 64")

    def variants(self, problem: Problem) -> Iterator[Mapping[str, Any]]:
        k = problem.k
        if k % 64 == 0:
            yield {"deep_box": not self.deep_box}
        # A ring that wraps at least once; more outstanding weights delay the first stage.
        deepest = max(self.stages, min(_MAX_STAGES, ceil_div(ceil_div(k, self.cluster_k), self.block_k) - 1))
        yield from ({"stages": self.stages + more} for more in (1, -1, 2) if self.stages + more <= deepest)

    @property
    def activation_box_blocks(self) -> int:
        return self.block_k // 64 if self.deep_box else 1

    def check_target(self, target: Target) -> None:
        """Raise unless the target has what the kernel uses and a CTA's shared memory fits."""
        for feature in ("tma", "shared_cta_destination", "mma_sync", "griddepcontrol"):
            target.require(feature, "the skinny GEMM")
        if self.cluster_k > 1:
            target.require("cluster", "the skinny GEMM with cluster_k > 1")
        self.check_smem(target)
