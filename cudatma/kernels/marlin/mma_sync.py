"""What the Marlin template needs to know: one frozen dataclass, every rule stated once.

The GEMM is computed transposed, C^T = W^T X^T: N is the M dimension of mma.m16n8k16, and M its N dimension. A warp
dequantizes its own weights into operand A's registers and reads activations as operand B with ldmatrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from cudatma.dtypes import activation_type
from cudatma.errors import ArgumentError
from cudatma.kernels.cost import Cost
from cudatma.kernels.gpu import Gpu
from cudatma.kernels.launch_struct import RESULT, STREAM_K
from cudatma.kernels.marlin.cost import mma_sync_cost
from cudatma.kernels.marlin.problem import GROUP_SIZES, Problem
from cudatma.kernels.marlin.staged_tile import StagedTile
from cudatma.target import Target

#: Load paths. A GEMM takes TMA; docs/lab/marlin_mma_sync.md compares both.
LOAD_PATHS = ("tma", "cp_async")


@dataclass(frozen=True, slots=True)
class LoadPaths:
    """Load path of each operand of the mma.sync kernel, ``"tma"`` or ``"cp_async"``; the other kernels take TMA."""

    weight: str = "tma"
    scale: str = "tma"
    activation: str = "tma"


@dataclass(frozen=True, slots=True)
class MmaSyncSpec(StagedTile):
    """One instance of ``kernels/marlin_mma_sync.cu.j2``.

    dtype: ``"float16"`` or ``"bfloat16"``, of activations, scales and results.
    group_size: elements of K that share a scale; -1: one scale for each column of N.
    has_zeros: zero points are loaded; otherwise the offset is 8.
    block_m, block_n, block_k: M, N and K of a CTA's tile.
    warps_n, slice_k: warps that divide N, and warps that divide the K of each stage, each with all rows of the tile;
    with slice_k > 1 the partial sums are added up in shared memory.
    stages: slots of the ring.
    weight_load_path, scale_load_path (zero points too), activation_load_path: how each operand reaches shared memory.
    scale_on: ``"accumulator"`` multiplies fp32 partial sums once a group (cheap for small M), ``"weight"`` the
    dequantized weights, ``"epilogue"`` the result (whole-column scales only).
    consumer_registers: registers that setmaxnreg gives a consumer thread, from the producer's warpgroup; 0: none.
    """

    dtype: str
    group_size: int
    has_zeros: bool
    block_m: int
    block_n: int
    block_k: int
    warps_n: int
    slice_k: int
    stages: int
    weight_load_path: str = "tma"
    scale_load_path: str = "tma"
    activation_load_path: str = "tma"
    scale_on: str = "weight"
    consumer_registers: int = 0

    template: ClassVar[str] = "kernels/marlin_mma_sync.cu.j2"
    revision: ClassVar[int] = 1
    cluster: ClassVar[int] = 1
    cluster_k: ClassVar[int] = 1
    blocks_per_sm: ClassVar[int] = 1

    def __post_init__(self) -> None:
        activation_type(self.dtype)
        one_of = {
            "group_size": GROUP_SIZES,
            "weight_load_path": LOAD_PATHS,
            "scale_load_path": LOAD_PATHS,
            "activation_load_path": LOAD_PATHS,
            "scale_on": ("epilogue",) if self.group_size == -1 else ("accumulator", "weight"),
            "block_m": (8, 16, 32, 48, 64, 128),
            "block_n": (64, 128, 256),
            "block_k": (64, 128, 256),
            "consumer_registers": (0, 208, 216, 224, 232),
            "warps_n": (1, 2, 4, 8),
            "slice_k": (1, 2, 4),
        }
        self.check_values(one_of)
        if type(self.stages) is not int:
            raise ArgumentError("stages", self.stages, "an int")
        if self.warp_n not in (16, 32, 64):
            raise ArgumentError("warps_n", self.warps_n, "one that leaves a warp 16, 32 or 64 columns")
        if (self.block_k // 64) % self.slice_k:
            raise ArgumentError(
                "slice_k", self.slice_k, "a divisor of block_k / 64", "each warp takes a multiple of 64 of K"
            )
        if not 2 <= self.stages <= 16:
            raise ArgumentError("stages", self.stages, "2 to 16")
        if self.consumer_registers and self.consumer_warps != 8:
            raise ArgumentError(
                "consumer_registers",
                self.consumer_registers,
                "0 unless 8 warps consume",
                "setmaxnreg moves registers between whole warpgroups",
            )
        if self.consumer_warps > 16:
            raise ArgumentError("warps_n * slice_k", self.consumer_warps, "at most 16 warps")

    @property
    def parameter_names(self) -> tuple[str, ...]:
        by_tma = {
            "weight_map": self.weight_load_path == "tma",
            **dict.fromkeys(self.table_maps(), self.scale_load_path == "tma"),
            "activation_map": self.activation_load_path == "tma",
        }
        arrays = {
            "weight": self.weight_load_path == "cp_async",
            **dict.fromkeys(self.tables(), not self.has_stage_scales or self.scale_load_path == "cp_async"),
            "activations": self.activation_load_path == "cp_async",
        }
        read = (name for name, is_read in (by_tma | arrays).items() if is_read)
        return (*read, "bias", "output", "partials", "flags", "problem")

    @property
    def copies_scales(self) -> bool:
        """Whether scales, and zero points, come with their stage by cp.async."""
        return self.has_stage_scales and self.scale_load_path == "cp_async"

    @property
    def problem_names(self) -> tuple[str, ...]:
        copies_weights, copies_scales = self.weight_load_path == "cp_async", self.copies_scales
        copies_activations = self.activation_load_path == "cp_async"
        read = {
            "prefetch_stages": self.all_tma,
            "weight_row_blocks": True,
            "weight_rows": copies_weights,
            "scale_rows": copies_scales,
            "scale_pitch": copies_scales or not self.has_stage_scales,
            "k": copies_activations,
            "activation_pitch": copies_activations,
        }
        return (*STREAM_K, *(name for name, is_read in read.items() if is_read), *RESULT)

    # What a reader of the generated source finds as named constants.

    @property
    def slices(self) -> int:
        return self.slice_k

    @property
    def entry(self) -> str:
        scales = "column" if self.group_size == -1 else f"g{self.group_size}"
        paths = (self.weight_load_path, self.scale_load_path, self.activation_load_path)
        load_path = paths[0] if len(set(paths)) == 1 else "w_{}_s_{}_x_{}".format(*paths)
        zeros = "_zeros" if self.has_zeros else ""
        tile = f"{self.block_m}x{self.block_n}x{self.block_k}"
        warps = f"w1{self.warps_n}{self.slice_k}"
        registers = f"_r{self.consumer_registers}" if self.consumer_registers else ""
        name = f"marlin_mma_sync_{self.activation.short}_{scales}{zeros}"
        return f"{name}_{tile}_{warps}_s{self.stages}{registers}_{load_path}"

    @property
    def warp_n(self) -> int:
        return self.block_n // self.warps_n

    @property
    def warp_tiles(self) -> int:
        return self.warps_n

    @property
    def consumer_warps(self) -> int:
        return self.warps_n * self.slice_k

    @property
    def producer_warps(self) -> int:
        """TMA needs one thread; per-thread copies need many, or the loads of a stage would not keep up, and setmaxnreg
        a whole warpgroup to take registers from."""
        return 1 if self.all_tma and not self.consumer_registers else 4

    @property
    def producer_threads(self) -> int:
        return 32 * self.producer_warps

    @property
    def all_tma(self) -> bool:
        return self.weight_load_path == self.scale_load_path == self.activation_load_path == "tma"

    def loaded_by_tma(self, operand: str) -> bool:
        """Whether TMA loads activations, weights, scales or zeros."""
        load_paths = {"activations": self.activation_load_path, "weights": self.weight_load_path}
        return load_paths.get(operand, self.scale_load_path) == "tma"

    @property
    def full_arrivals(self) -> int:
        """Arrivals that complete a stage: one expect_tx where TMA takes part, one of each producer thread where
        cp.async does."""
        return int(self.uses_tma) + self.producer_threads * self.uses_cp_async

    @property
    def uses_cp_async(self) -> bool:
        return "cp_async" in self._stage_load_paths

    @property
    def uses_tma(self) -> bool:
        return "tma" in self._stage_load_paths

    @property
    def _stage_load_paths(self) -> list[str]:
        scales = [self.scale_load_path] if self.has_stage_scales else []
        return [self.weight_load_path, self.activation_load_path, *scales]

    def epilogue_parts(self) -> tuple[tuple[str, int], ...]:
        return (
            ("staging", self.warp_tiles * self.staging_bytes),
            ("slice_sums", (self.slice_k - 1) * self.block_m * self.block_n * 4),
        )

    @property
    def staging_pitch_bytes(self) -> int:
        """One row of a warp's result, and 16 bytes that keep stmatrix free of bank conflicts."""
        return self.warp_n * 2 + 16

    @property
    def staging_bytes(self) -> int:
        return 8 * self.staging_pitch_bytes

    @property
    def fix_up_unroll(self) -> int:
        """Partial sums whose loads are in flight together in a fix-up: what some 64 registers hold."""
        return max(1, 16 // (self.block_m // 8 * self.warp_n // 16))

    def cost_at(self, m: Any, problem: Problem, gpu: Gpu) -> Cost:
        return mma_sync_cost(self, m, problem.n, problem.k, gpu)

    def adapted(self, problem: Problem) -> None:
        """None: ``scale_on`` and the ring depend on the groups."""

    @property
    def loads_weight_tiles(self) -> bool:
        return False

    def check_target(self, target: Target) -> None:
        """Raise unless the target has what the kernel uses and a CTA's shared memory fits."""
        for feature in ("tma", "shared_cta_destination", "mma_sync", "stmatrix", "griddepcontrol"):
            target.require(feature, "the mma.sync kernel")
        if self.consumer_registers:
            target.require("setmaxnreg", "consumer_registers")
        self.check_smem(target)
