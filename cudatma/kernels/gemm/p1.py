"""The dense GEMM's version for GPUs without wgmma: mma.sync out of the same TMA ring."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from cudatma.errors import ArgumentError
from cudatma.kernels.cost import Cost
from cudatma.kernels.gemm.cost import CostModel
from cudatma.kernels.gemm.problem import Problem, is_fp8
from cudatma.kernels.gemm.spec import GemmSpec
from cudatma.kernels.gpu import Gpu
from cudatma.kernels.schedule import ceil_div
from cudatma.target import Target, get_target

#: (block_m, block_n, block_k, warpgroups, blocks_per_sm)
TILES = (
    (64, 64, 64, 1, 1), (64, 128, 64, 1, 1), (128, 128, 32, 1, 1), (128, 128, 64, 1, 1), (128, 128, 64, 1, 2),
    (128, 256, 32, 2, 1), (256, 128, 32, 2, 1), (128, 256, 64, 2, 1),
)  # fmt: skip
#: The most accumulators of a warp, fp32: 128 registers of each lane.
_MOST_WARP_ELEMS = 64 * 64
#: Floating-point operations a clock that the MMAs of one warp reach [H200: 559 TFLOP/s of four warps an SM], and the
#: part of the tensor cores' rate that loads and waits leave (an estimate).
_WARP_FLOPS, _BESIDE_LOADS = 535, 0.92
#: The part of it that two CTAs of an SM reach; clocks of a stage in which its warps do not multiply. [H200]
_TWO_CTAS, _STAGE_CLOCKS = 0.94, 60
#: Until the first stage of a tile is there.
_FIRST_STAGE_CLOCKS = 1900
#: Bytes a clock that an SM reads from shared memory, from L2, and from L2 of a GeForce (estimate: 5 TB/s, 170 SMs);
#: that it stores.
_SMEM_BYTES, _L2_BYTES, _GEFORCE_L2_BYTES, _STORED_BYTES = 128, 56, 12, 32


@dataclass(frozen=True, slots=True)
class GemmP1(GemmSpec):
    """TMA, a warp of its own that loads, and mma.sync; persistent CTAs.

    warpgroups: of four consumer warps each; together they divide the tile as evenly as they can in both directions.
    blocks_per_sm: CTAs that share an SM.
    """

    block_k: int = 32
    stages: int = 4
    blocks_per_sm: int = 1  # type: ignore[misc]

    version: ClassVar[str] = "p1"
    template: ClassVar[str] = "kernels/gemm_p1.cu.j2"
    #: A slot is released amid the products of the next stage: see tools/sass_hazards.py.
    gives_back_previous: ClassVar[bool] = True
    launch_us: ClassVar[float] = 0.9
    is_persistent: ClassVar[bool] = True
    work_names: ClassVar[tuple[str, ...]] = ("k_iterations", "work_ranges")
    least_k_bytes: ClassVar[int] = 64
    allowed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **GemmSpec.allowed,
        "block_m": (64, 128, 256),
        "block_n": (64, 128, 256),
        "block_k": (32, 64, 128, 256),
        "warpgroups": (1, 2),
        "blocks_per_sm": (1, 2),
    }

    @property
    def warps_n(self) -> int:
        """The number of warps along N: with nearly square tiles, warps read the least."""
        fits = [n for n in (1, 2, 4, 8) if n <= self.consumer_warps and self.block_n // n >= 32]
        return min(fits, key=lambda n: self.block_m * n // self.consumer_warps + self.block_n // n)

    @property
    def warps_m(self) -> int:
        return self.consumer_warps // self.warps_n

    @property
    def warp_m(self) -> int:
        """Rows of a warp's part of the tile."""
        return self.block_m // self.warps_m

    @property
    def warp_n(self) -> int:
        """Columns of it."""
        return self.block_n // self.warps_n

    @property
    def consumer_registers(self) -> int:
        """The registers of a consumer thread if setmaxnreg moves some from the producer to the consumers, else 0.

        Two warps of 64 x 64 and a third one do not fit the registers of a quarter of an SM.
        """
        if self.warp_m * self.warp_n < _MOST_WARP_ELEMS or self.warpgroups * self.blocks_per_sm == 1:
            return 0
        return {1: 232, 2: 240}[self.warpgroups]

    @property
    def producer_registers(self) -> int:
        return 24

    @property
    def producer_warps(self) -> int:  # type: ignore[override]
        """One loads; setmaxnreg is for whole warpgroups."""
        return 4 if self.consumer_registers else 1

    @property
    def mma(self) -> str:
        """The name of the MMA in primitives/mma.cuh.j2."""
        return f"mma_m16n8k{32 // self.element_bytes}_{self.mma_type}"

    def epilogue_parts(self) -> tuple[tuple[str, int], ...]:
        """None: lanes exchange results by shuffles."""
        return ()

    def check_target(self, target: Target) -> None:
        """Raise unless the target has what the kernel uses and the shared memory of an SM's CTAs fits."""
        for feature in ("tma", "mma_sync", *(("setmaxnreg",) if self.consumer_registers else ())):
            target.require(feature, "gemm")
        if is_fp8(self.dtype):
            target.require("mma_sync_fp8", "version p1 of gemm for fp8")
        self.check_smem(target)
        if self.smem_bytes > (most := target.smem_share_bytes(self.blocks_per_sm)):
            raise ArgumentError("stages", self.stages, f"stages of at most {most} bytes, an SM's for each CTA")

    def cost_model(self, gpu: Gpu) -> CostModel:
        """Return the predicted time as a function of M and a problem.

        Tiles run in waves. The tensor cores, the warps' reads of shared memory, or the loads from L2 bound each stage.
        """
        read = self.element_bytes * self.block_k * self.consumer_warps * (self.warp_m + self.warp_n) / _SMEM_BYTES
        l2_bytes = _L2_BYTES if get_target(gpu.target).has("cluster") else _GEFORCE_L2_BYTES
        waiting = max(read, self.loaded_stage_bytes / l2_bytes)
        stored = self.out_bytes * self.block_m * self.block_n / _STORED_BYTES

        def cost(m: Any, problem: Problem) -> Cost:
            tiles = problem.batch * ceil_div(m, self.block_m) * ceil_div(problem.n, self.block_n)
            sharing = np.minimum(self.blocks_per_sm, ceil_div(tiles, gpu.sm_count))
            waves = ceil_div(tiles, gpu.sm_count * sharing)
            flops = np.minimum(gpu.mma_sync_flops, _WARP_FLOPS * sharing * self.consumer_warps)
            rate = _BESIDE_LOADS * np.where(sharing > 1, _TWO_CTAS, 1.0) * flops / self.element_bytes
            stage = sharing * np.maximum(self.block_m * self.block_n * self.block_k / rate, waiting) + _STAGE_CLOCKS
            mainloop_us = waves * ceil_div(problem.k, self.block_k) * stage / gpu.sm_clock_mhz
            # If two CTAs share an SM, one multiplies while the other one stores.
            around: Any = _FIRST_STAGE_CLOCKS + np.where(sharing > 1, 1, waves) * stored
            operands = float(problem.batch * self.element_bytes * problem.k) * (m + problem.n)
            memory_us = np.maximum(0.0, operands / gpu.memory_bytes_per_us - mainloop_us)
            return Cost(self.launch_us + around / gpu.sm_clock_mhz, mainloop_us, 0.0, memory_us, 0.0)

        return cost
