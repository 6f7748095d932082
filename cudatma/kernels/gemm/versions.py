"""The rungs of the ladder, each with the one idea that it adds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from cudatma.errors import ArgumentError
from cudatma.kernels.gemm.p1 import GemmP1
from cudatma.kernels.gemm.problem import WGMMA_M, Problem
from cudatma.kernels.gemm.spec import GemmSpec
from cudatma.kernels.version import Versions
from cudatma.target import Target

#: Versions 3, 4 and 5 allow tiles of any multiple of 16 columns.
_ANY_COLUMNS: Mapping[str, tuple[Any, ...]] = {**GemmSpec.allowed, "block_n": tuple(range(64, 257, 16))}


@dataclass(frozen=True, slots=True)
class GemmV1(GemmSpec):
    """cp.async fills the slots."""

    version: ClassVar[int] = 1
    template: ClassVar[str] = "kernels/gemm_v1.cu.j2"
    producer_warps: ClassVar[int] = 0
    stage_gap: ClassVar[int] = 400
    operand_names: ClassVar[tuple[str, ...]] = ("a", "b", "output")
    work_names: ClassVar[tuple[str, ...]] = ("k_iterations", "k", "a_pitch", "b_pitch", "a_batch", "b_batch")
    box_names: ClassVar[tuple[str, ...]] = ()

    def smem_layout(self) -> list[tuple[str, int, int]]:
        """Return TiledKernel's layout without the ring's barriers."""
        return [part for part in super(GemmV1, self).smem_layout() if not part[0].endswith("_barriers")]

    @property
    def smem_bytes(self) -> int:
        _, offset, size = self.smem_layout()[-1]
        return offset + size


@dataclass(frozen=True, slots=True)
class GemmV2(GemmSpec):
    """TMA fills a ring of slots; the warps that multiply also ask for the loads."""

    version: ClassVar[int] = 2
    template: ClassVar[str] = "kernels/gemm_v2.cu.j2"
    producer_warps: ClassVar[int] = 0
    stage_gap: ClassVar[int] = 250


@dataclass(frozen=True, slots=True)
class GemmV3(GemmSpec):
    """A warp of its own loads."""

    version: ClassVar[int] = 3
    template: ClassVar[str] = "kernels/gemm_v3.cu.j2"
    allowed: ClassVar[Mapping[str, tuple[Any, ...]]] = _ANY_COLUMNS


@dataclass(frozen=True, slots=True)
class GemmV4(GemmSpec):
    """Persistent CTAs; results leave by TMA while the next tile is computed."""

    version: ClassVar[int] = 4
    template: ClassVar[str] = "kernels/gemm_v4.cu.j2"
    features: ClassVar[tuple[str, ...]] = ("setmaxnreg", *GemmSpec.features)
    launch_us: ClassVar[float] = 0.5
    is_persistent: ClassVar[bool] = True
    suspend_ns: ClassVar[int] = 10_000_000  # a barrier wakes who waits for it
    scales_blocks: ClassVar[bool] = True
    allowed: ClassVar[Mapping[str, tuple[Any, ...]]] = _ANY_COLUMNS
    #: Registers of a thread that setmaxnreg asks for, of two warpgroups that multiply and one that loads: without it
    #: ptxas has 168 for each.
    consumer_register_count: ClassVar[int] = 240
    producer_registers: ClassVar[int] = 24
    operand_names: ClassVar[tuple[str, ...]] = ("a_map", "b_map", "output_map", "output")
    work_names: ClassVar[tuple[str, ...]] = ("k_iterations", "work_ranges", "alternates")

    @property
    def consumer_registers(self) -> int:
        """0: registers stay as they are launched."""
        return self.consumer_register_count if self.consumer_warps == 8 else 0

    @property
    def output_map(self) -> str:
        """The address of the result's tensor map, in CUDA."""
        return "&output_map" if self.stores_by_tma else "nullptr"

    @property
    def staging_buffers(self) -> int:  # type: ignore[override]
        """TMA reads one of two while the other is filled; for a whole tile where scales of blocks leave room."""
        if self.stages_whole_tile:
            return self.block_m // (WGMMA_M * self.warpgroups) * self.block_n // self.staged_n
        return 2 if self.stores_by_tma else 1

    @property
    def stages_whole_tile(self) -> bool:  # type: ignore[override]
        """Whether there are buffers for a whole tile."""
        return self.ring_has_scales and self.stores_by_tma and self.out_bytes == 2  # of 4 bytes it costs a stage

    @property
    def most_sums(self) -> int:  # type: ignore[override]
        """More than GemmSpec's where nothing is applied to them."""
        return 128 if self.has_epilogue else 208

    @property
    def producer_warps(self) -> int:  # type: ignore[override]
        """One loads; setmaxnreg acts on whole warpgroups."""
        return 4 if self.consumer_registers else 1


@dataclass(frozen=True, slots=True)
class GemmV5(GemmV4):
    """Clusters: two CTAs share the loads of the larger operand, B for neighbors along M or A for neighbors along N."""

    cluster: int = 2  # type: ignore[misc]

    version: ClassVar[int] = 5
    template: ClassVar[str] = "kernels/gemm_v5.cu.j2"
    features: ClassVar[tuple[str, ...]] = ("cluster", "multicast", *GemmV4.features)

    @property
    def launch_us(self) -> float:  # type: ignore[override]
        """The CTAs of a cluster wait for each other. [H100 with scales of blocks, else H200]"""
        return 2.2 if self.block_scales else 0.9


@dataclass(frozen=True, slots=True)
class GemmV6(GemmSpec):
    """Clusters whose CTAs divide K, which serve products with few tiles."""

    cluster_k: int = 2  # type: ignore[misc]

    version: ClassVar[int] = 6
    template: ClassVar[str] = "kernels/gemm_v6.cu.j2"
    features: ClassVar[tuple[str, ...]] = ("cluster", *GemmSpec.features)
    launch_us: ClassVar[float] = 0.5
    slices: ClassVar[int] = 1
    allowed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **GemmSpec.allowed,
        "block_n": (64, 128, 256),
        "cluster_k": (2, 4),
    }

    @property
    def staged_n(self) -> int:
        """GemmSpec's columns, but no more than a CTA stores of a tile."""
        return min(super(GemmV6, self).staged_n, self.block_n // self.cluster_k)

    def epilogue_parts(self) -> tuple[tuple[str, int], ...]:
        """Return GemmSpec's parts, the sums that other CTAs send, and the barrier at which they arrive."""
        sums = (self.cluster_k - 1) * self.block_m * self.block_n // self.cluster_k * 4
        return (*super(GemmV6, self).epilogue_parts(), ("cluster_sums", sums), ("cluster_barrier", 8))

    def check(self, problem: Problem, target: Target) -> None:
        """Check TiledKernel's requirements. Dividing K changes the order of the sums, and with it a row's bits."""
        if problem.batch_invariant:
            raise ArgumentError("batch_invariant", True, "False for version 6", "choose another version")
        super(GemmV6, self).check(problem, target)


@dataclass(frozen=True, slots=True)
class GemmV7(GemmV4):
    """Two warpgroups, each with tiles of its own: one stores while the other multiplies. warpgroups: of a tile."""

    block_n: int = 128
    stages: int = 4
    warpgroups: int = 1

    version: ClassVar[int] = 7
    template: ClassVar[str] = "kernels/gemm_v7.cu.j2"
    stage_gap: ClassVar[int] = 40
    scales_blocks: ClassVar[bool] = False
    allowed: ClassVar[Mapping[str, tuple[Any, ...]]] = {**GemmSpec.allowed, "warpgroups": (1,)}

    @property
    def consumer_warps(self) -> int:
        return 8

    def store_clocks(self, tiles: Any, stored: float, products: Any) -> Any:
        """Return the last tile's clocks, and what the other warpgroup's products do not hide."""
        return stored + tiles * np.maximum(0.0, stored - products) / 2


VERSIONS: dict[int | str, type[GemmSpec]] = {
    kind.version: kind for kind in (GemmV1, GemmV2, GemmV3, GemmV4, GemmV5, GemmV6, GemmV7, GemmP1)
}


#: 0: any.
CHOICE: Versions[int | str] = Versions("gemm", "CUDATMA_GEMM_VERSION", tuple(VERSIONS), 0)
chosen_version = CHOICE.chosen
