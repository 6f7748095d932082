"""Configs of the probe kernels in ptx_templates/probes, for the tests that compile or run them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cudatma.pipeline import Operand, PipelineSpec, align_up


@dataclass(frozen=True, slots=True)
class Plain:
    """Config of a probe without fields."""

    entry: str


@dataclass(frozen=True, slots=True)
class BoxCopy:
    rank: int
    expected_bytes: int
    footprint_bytes: int
    write: str = "store"
    policy: str = ""
    entry: str = "box_copy"


@dataclass(frozen=True, slots=True)
class Matrix:
    count: int
    load_suffix: str = ""
    store_suffix: str = ""
    entry: str = "matrix"


@dataclass(frozen=True, slots=True)
class Mma:
    type: str
    entry: str = "mma"


@dataclass(frozen=True, slots=True)
class Wgmma:
    type: str
    n: int
    a_source: str = "registers"
    entry: str = "wgmma"


@dataclass(frozen=True, slots=True)
class Ring:
    stages: int
    consumers: int
    tile_bytes: int = 1024
    entry: str = "ring"

    @property
    def ring(self) -> PipelineSpec:
        tile = Operand("tile", self.tile_bytes, self.tile_bytes)
        return PipelineSpec(self.stages, (tile,), 1, self.consumers)


@dataclass(frozen=True, slots=True)
class Im2col:
    rank: int
    expected_bytes: int
    entry: str = "im2col"

    @property
    def offsets(self) -> int:
        return self.rank - 2


@dataclass(frozen=True, slots=True)
class Multicast:
    half_bytes: int
    half_rows: int
    entry: str = "multicast"


@dataclass(frozen=True, slots=True)
class TensorMapEdit:
    expected_bytes: int
    entry: str = "tensormap_edit"


@dataclass(frozen=True, slots=True)
class WgmmaGemm:
    """Config with tiles of 64 * warpgroups rows and tile_n columns. A row of a slot is 128 bytes of fp16."""

    warpgroups: int = 2
    tile_n: int = 128
    stages: int = 4
    cluster: int = 1
    entry: str = "wgmma_gemm"

    tile_k: ClassVar[int] = 64

    @property
    def tile_m(self) -> int:
        return 64 * self.warpgroups

    @property
    def loaded_m(self) -> int:
        return self.tile_m // self.cluster

    @property
    def ring(self) -> PipelineSpec:
        a, b = (Operand(name, rows * 128, rows * 128, 1024) for name, rows in (("a", self.tile_m), ("b", self.tile_n)))
        return PipelineSpec(self.stages, (a, b), 1, 4 * self.warpgroups, cluster=self.cluster)

    @property
    def out_offset(self) -> int:
        return align_up(self.ring.smem_bytes, 128)

    @property
    def smem_bytes(self) -> int:
        return self.out_offset + self.tile_m * self.tile_n * 4

    @property
    def threads(self) -> int:
        return 128 * self.warpgroups + 32


#: Template, config, and required feature in addition to TMA.
PROBES: tuple[tuple[str, object, str], ...] = (
    *(("box_copy", BoxCopy(rank, 1024, 1024), "tma") for rank in (1, 2, 3, 4, 5)),
    ("box_copy", BoxCopy(2, 1024, 2048, "add", "evict_last"), "tma"),
    ("box_copy", BoxCopy(3, 1024, 1024, "store", "evict_first"), "tma"),
    ("bulk_copy", Plain("bulk_copy"), "tma"),
    ("matrix", Matrix(4, "_trans", "_trans"), "stmatrix"),
    ("matrix", Matrix(1), "stmatrix"),
    ("mma", Mma("f16"), "mma_sync"),
    ("mma", Mma("bf16"), "mma_sync"),
    ("wgmma", Wgmma("f16", 8), "wgmma"),
    ("wgmma", Wgmma("bf16", 256, "shared"), "wgmma"),
    ("cp_async", Plain("cp_async"), "mbarrier_expect_tx"),
    ("ring", Ring(3, 4), "tma"),
    *(("im2col", Im2col(rank, 1024), "tma") for rank in (3, 4, 5)),
    ("multicast", Multicast(1024, 8), "multicast"),
    ("sync", Plain("sync"), "griddepcontrol"),
    ("tensormap_edit", TensorMapEdit(1024), "tensormap_replace"),
    ("mbarrier_bits", Plain("mbarrier_bits"), "mbarrier_expect_tx"),
    ("wgmma_gemm", WgmmaGemm(), "wgmma"),
    ("wgmma_gemm", WgmmaGemm(1, 64, 3), "wgmma"),
    ("wgmma_gemm", WgmmaGemm(cluster=2), "wgmma"),
)
