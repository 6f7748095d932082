"""One instance of the wgmma GEMM: what its template needs to know, and what it should take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from cudatma.dtypes import ActivationType, activation_type
from cudatma.errors import ArgumentError
from cudatma.kernels.cost import Cost
from cudatma.kernels.gemm.problem import Problem
from cudatma.kernels.gpu import Gpu
from cudatma.kernels.schedule import ceil_div
from cudatma.kernels.tiled_kernel import PROBLEM, TENSOR_MAP, TiledKernel
from cudatma.kernels.work_struct import RASTER, RESULT
from cudatma.pipeline import Operand
from cudatma.target import Target

#: Multiply-adds that the tensor cores of an SM do in a clock. [H100 white paper]
_MACS = 2048
#: Microseconds of a launch with its first loads and last stores, and bytes a clock that an SM reads from L2. [H200]
_LAUNCH_US, _L2_BYTES = 4.0, 64
_ROW_BYTES = 128


@dataclass(frozen=True, slots=True)
class WgmmaSpec(TiledKernel):
    """One instance of ``kernels/gemm_wgmma.cu.j2``.

    dtype: of operands and result. block_m: rows of M of a tile, 64, 128 or 256. warpgroups: 1 or 2, of 64 columns of N
    each. stages: of the ring, each 64 of K. Raises ArgumentError.
    """

    dtype: str
    block_m: int = 128
    warpgroups: int = 2
    stages: int = 4

    template: ClassVar[str] = "kernels/gemm_wgmma.cu.j2"
    revision: ClassVar[int] = 1
    block_k: ClassVar[int] = 64
    cluster: ClassVar[int] = 1
    cluster_k: ClassVar[int] = 1
    blocks_per_sm: ClassVar[int] = 1
    producer_warps: ClassVar[int] = 1
    partial_bytes: ClassVar[int] = 0
    staging_rows: ClassVar[int] = 32
    parameter_names: ClassVar[tuple[str, ...]] = ("a_map", "b_map", "output", "problem")
    parameter_types: ClassVar[Mapping[str, str]] = {
        "a_map": TENSOR_MAP,
        "b_map": TENSOR_MAP,
        "output": "cudatma::u16*",
        "problem": PROBLEM,
    }
    problem_names: ClassVar[tuple[str, ...]] = ("k_iterations", *RASTER, *RESULT)

    def __post_init__(self) -> None:
        activation_type(self.dtype)
        for field, allowed in (("block_m", (64, 128, 256)), ("warpgroups", (1, 2)), ("stages", range(2, 9))):
            if type(getattr(self, field)) is not int or getattr(self, field) not in allowed:
                raise ArgumentError(field, getattr(self, field), ", ".join(map(str, allowed)))

    @property
    def entry(self) -> str:
        return f"gemm_wgmma_{self.element.short}_{self.block_m}x{self.block_n}x{self.block_k}_s{self.stages}"

    @property
    def element(self) -> ActivationType:
        return activation_type(self.dtype)

    @property
    def is_bf16(self) -> bool:
        return self.dtype == "bfloat16"

    @property
    def block_n(self) -> int:
        return 64 * self.warpgroups

    @property
    def consumer_warps(self) -> int:
        return 4 * self.warpgroups

    @property
    def warp_tiles(self) -> int:
        return self.consumer_warps

    @property
    def a_stage_bytes(self) -> int:
        return self.block_m * _ROW_BYTES

    @property
    def b_stage_bytes(self) -> int:
        return self.block_n * _ROW_BYTES

    @property
    def loaded_stage_bytes(self) -> int:
        return self.a_stage_bytes + self.b_stage_bytes

    @property
    def staging_pitch_bytes(self) -> int:
        """64 columns, and 16 bytes that keep stmatrix free of bank conflicts."""
        return 64 * 2 + 16

    @property
    def staging_bytes(self) -> int:
        return self.staging_rows * self.staging_pitch_bytes

    def stage_operands(self) -> tuple[Operand, ...]:
        return tuple(
            Operand(name, size, size, 1024) for name, size in (("a", self.a_stage_bytes), ("b", self.b_stage_bytes))
        )

    def epilogue_parts(self) -> tuple[tuple[str, int], ...]:
        return (("staging", self.warpgroups * self.staging_bytes),)

    def stage_layout(self) -> list[tuple[str, int]]:
        """(what, bytes) that one stage holds."""
        return [
            (f"a {self.block_m} x {self.block_k} {self.dtype}, 128B swizzle", self.a_stage_bytes),
            (f"b {self.block_n} x {self.block_k} {self.dtype}, 128B swizzle", self.b_stage_bytes),
        ]

    def check_target(self, target: Target) -> None:
        """Raise unless the target has what the kernel uses and a CTA's shared memory fits."""
        for feature in ("tma", "wgmma", "stmatrix"):
            target.require(feature, "the wgmma GEMM")
        self.check_smem(target)

    def adapted(self, problem: Problem) -> WgmmaSpec:
        """The same tile for another dtype."""
        return replace(self, dtype=problem.dtype)

    def cost(self, problem: Problem, gpu: Gpu) -> Cost:
        """Predicted time: waves of tiles, each stage bound by the tensor cores or by what it loads from L2."""
        tiles = ceil_div(problem.m, self.block_m) * ceil_div(problem.n, self.block_n)
        products = self.block_m * self.block_n * self.block_k / _MACS
        stage_clocks = max(products, self.loaded_stage_bytes / _L2_BYTES)
        clocks = ceil_div(tiles, gpu.sm_count) * ceil_div(problem.k, self.block_k) * stage_clocks
        operands = 2 * problem.k * (problem.m + problem.n)
        memory_us = max(0.0, operands / gpu.memory_bytes_per_us - clocks / gpu.sm_clock_mhz)
        return Cost(_LAUNCH_US, clocks / gpu.sm_clock_mhz, 0.0, memory_us, 0.0)
