"""The rungs of the ladder, each with the one idea that it adds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cudatma.errors import ArgumentError
from cudatma.kernels.gemm.spec import GemmSpec
from cudatma.kernels.work_struct import RASTER, RESULT, STREAM_K
from cudatma.target import Target


@dataclass(frozen=True, slots=True)
class GemmV1(GemmSpec):
    """cp.async fills the slots."""

    version: ClassVar[int] = 1
    template: ClassVar[str] = "kernels/gemm_v1.cu.j2"
    producer_warps: ClassVar[int] = 0
    stage_gap: ClassVar[int] = 400
    parameter_names: ClassVar[tuple[str, ...]] = ("a", "b", "output", "problem")
    problem_names: ClassVar[tuple[str, ...]] = ("k_iterations", "k", "a_pitch", "b_pitch", *RASTER, *RESULT)

    def smem_layout(self) -> list[tuple[str, int, int]]:
        """As TiledKernel's, without the ring's barriers."""
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


@dataclass(frozen=True, slots=True)
class GemmV4(GemmSpec):
    """Persistent CTAs; results leave by TMA while the next tile is computed."""

    version: ClassVar[int] = 4
    template: ClassVar[str] = "kernels/gemm_v4.cu.j2"
    launch_us: ClassVar[float] = 1.4
    staging_buffers: ClassVar[int] = 2
    is_persistent: ClassVar[bool] = True
    parameter_names: ClassVar[tuple[str, ...]] = ("a_map", "b_map", "output_map", "output", "problem")
    problem_names: ClassVar[tuple[str, ...]] = tuple(dict.fromkeys((*STREAM_K, *RESULT)))


@dataclass(frozen=True, slots=True)
class GemmV5(GemmV4):
    """Clusters: CTAs side by side along M load a tile of B together."""

    cluster: int = 2  # type: ignore[misc]

    version: ClassVar[int] = 5
    template: ClassVar[str] = "kernels/gemm_v5.cu.j2"
    launch_us: ClassVar[float] = 2.1
    stage_gap: ClassVar[int] = 250

    def check_target(self, target: Target) -> None:
        """As GemmSpec's, and clusters; each CTA loads whole spans of 64 columns of an N-major B."""
        if not self.is_b_k_major and self.block_n // self.cluster % 64:
            raise ArgumentError("block_n", self.block_n, f"a multiple of {64 * self.cluster} for {self.layout}")
        for feature in ("cluster", "multicast"):
            target.require(feature, "gemm")
        super(GemmV5, self).check_target(target)


VERSIONS: dict[int, type[GemmSpec]] = {kind.version: kind for kind in (GemmV1, GemmV2, GemmV3, GemmV4, GemmV5)}
