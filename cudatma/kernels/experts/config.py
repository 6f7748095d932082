"""Configurations of marlin_moe's kernels: route, the grouped GEMMs, and sum."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from cudatma.dtypes import activation_type
from cudatma.errors import ArgumentError, alternatives, quoted
from cudatma.kernels.checks import check_field_types
from cudatma.kernels.config import Preset
from cudatma.kernels.experts.problem import MAX_EXPERTS, MEMBERS
from cudatma.kernels.launch_struct import Member, in_order
from cudatma.kernels.marlin.config import PRESETS as MARLIN_PRESETS
from cudatma.kernels.marlin.config import MarlinConfig
from cudatma.kernels.schedule import ceil_div
from cudatma.quantization.experts import GATES
from cudatma.target import Target

_SKINNY, _WGMMA = (MARLIN_PRESETS[version].allowed for version in ("skinny", "wgmma"))
#: Maximum number of stages. There is a record for each, so that the size of the records does not depend on the stages.
MAX_STAGES = 8
#: Number of rows of a box. The wgmma kernel has main loops for one box, two boxes and a whole block, because the last
#: block of an expert usually has fewer rows than the others.
ROW_BOX = 32
_ALLOWED: Mapping[str, Sequence[Any]] = {"cluster_n": (1,), "cluster_k": (1,), "stages": range(2, MAX_STAGES + 1)}
#: Every kernel, keyed by name.
PRESETS: Mapping[str, Preset] = {
    "skinny": Preset(
        summary="grouped W4A16 GEMM over experts, mma.sync, rows gathered by TMA",
        schedule="persistent",
        mma="mma_sync",
        allowed={**_SKINNY, **_ALLOWED, "tile_n": range(64, 257, 64)},
    ),
    "wgmma": Preset(
        summary="grouped W4A16 GEMM over experts, wgmma, weights by TMA, rows of x gathered by cp.async",
        schedule="persistent",
        allowed={
            **_WGMMA,
            **_ALLOWED,
            "tile_m": range(ROW_BOX, 4 * ROW_BOX + 1, ROW_BOX),
            "tile_n": (128, 256),
            "slice_k": (1,),
            "warpgroups": (1, 2),
            "pingpong": (False,),
        },
    ),
}
#: "up" is the first GEMM, whose epilogue applies the gated activation. "down" is the second one.
PRODUCTS = ("up", "down")
_LINE_BYTES, _RECORD_BYTES = 128, 20
#: Number of rows of x whose blocks share weights in L2, because their tiles are computed one after another.
_RASTER_ROWS = 1024
#: Numbers of threads of the routing kernel. A thread divides the rows of one expert into blocks.
ROUTE_THREADS = (256, 512, MAX_EXPERTS)
#: Number of CTAs of the routing kernel if there are many pairs.
ROUTE_CTAS = 8
#: Number of columns that a thread of the sum adds up, and the maximum number of rows of its grid.
_CHUNK_ELEMS, _MAX_GRID_ROWS = 8, 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig(MarlinConfig):
    """A configuration of the grouped GEMM, which has the fields of marlin_gemm's kernel of the same version.

    product: one of PRODUCTS. gate: a key of GATES, the activation after the first product. tile_m: maximum number of
    rows of a block. direct: whether each pair is a block, so that no routing kernel is needed. In the skinny kernel,
    rows of a stage are an odd number of 128-byte lines apart, and deep_box is whether one three-dimensional box loads a
    row of a stage, which requires a K that is a multiple of 64. Raises ArgumentError or ArgumentTypeError."""

    product: str
    gate: str = "silu_glu"
    direct: bool = False

    function: ClassVar[str] = "marlin_moe"
    presets: ClassVar[Mapping[str, Preset]] = PRESETS
    struct_members: ClassVar[Mapping[str, Member]] = MEMBERS

    def __post_init__(self) -> None:
        if self.product not in PRODUCTS:
            raise ArgumentError("product", self.product, quoted(PRODUCTS))
        if self.gate not in GATES:
            raise ArgumentError("gate", self.gate, quoted(GATES))
        super(ExpertsConfig, self).__post_init__()
        if self.has_wgmma and self.stack != 2:
            raise ArgumentError("tile_n", self.tile_n, f"{128 * self.warpgroups} (128 columns per warpgroup)")
        if self.direct and (self.has_wgmma or self.tile_m > 1):
            raise ArgumentError("direct", True, "False except in the skinny kernel with tile_m = 1")

    def _check_boxes(self) -> None:
        """Allow every tile, because rows are loaded one by one."""

    def check_problem(self, problem: Any) -> None:
        """Raise ArgumentError if the kernel cannot run a problem."""
        if self.deep_box and (k := problem.product(self.product).k) % 64:
            raise ArgumentError("deep_box", True, f"False (K = {k} is not a multiple of 64)")

    @property
    def features(self) -> tuple[str, ...]:
        registers = ("setmaxnreg",) if self.consumer_registers else ()
        stores = ("stmatrix",) if self.has_wgmma else ()
        return ("tma", "shared_cta_destination", self.preset.mma, "griddepcontrol", *stores, *registers)

    # ---- Kernel

    @property
    def template(self) -> str:
        return f"kernels/experts_{self.version}.cu.j2"

    @property
    def entry(self) -> str:
        names = [self.version, self.product, *([] if self.gate == "silu_glu" else [self.gate]), self.activation.short]
        names += ["column" if self.group_size == -1 else f"g{self.group_size}"]
        names += ["zeros"] if self.has_zeros else []
        names += [] if self.format == "int4" else [self.format]
        names += {"none": [], "as_stored": ["fused"], "shifted": ["shifted"]}[self.scale_form]
        names += [f"{self.tile_m}x{self.tile_n}x{self.tile_k}", f"k{self.slice_k}", f"s{self.stages}"]
        names += [f"b{self.ctas_per_sm}"] if self.ctas_per_sm > 1 else []
        names += ["d"] if self.deep_box else []
        names += ["pairs"] if self.direct else []
        names += [f"w{self.warpgroups}", f"g{self.mmas_per_commit}{self.commits_in_flight}"] if self.has_wgmma else []
        names += [f"r{self.consumer_registers}"] if self.consumer_registers else []
        return f"experts_{'_'.join(names)}"

    @property
    def gathers_rows(self) -> bool:
        """Whether TMA loads rows one by one."""
        return self.is_skinny

    @property
    def copies_rows(self) -> bool:
        """Whether cp.async copies rows of x in the order of the sorted pairs."""
        return self.has_wgmma and self.product == "up"

    def in_form(self, form: str) -> ExpertsConfig:
        """Return the config with this ``scale_form`` if it is allowed, otherwise with "none"."""
        return cast("ExpertsConfig", super(ExpertsConfig, self).in_form(form))

    @property
    def loads_row_boxes(self) -> bool:
        """Whether TMA loads boxes of rows, which the first product has stored in the order of the sorted pairs."""
        return self.has_wgmma and self.product == "down"

    @property
    def row_box(self) -> int:
        return ROW_BOX

    @property
    def row_counts(self) -> tuple[int, ...]:
        # A fourth main loop would leave too few registers for 128 rows, so that ptxas would serialize the wgmmas.
        counts = (ROW_BOX, 2 * ROW_BOX, self.tile_m)
        return tuple(sorted({rows for rows in counts if rows <= self.tile_m})) if self.has_wgmma else ()

    @property
    def raster_blocks(self) -> int:
        """Number of blocks of an expert whose tiles with the same columns are computed one after another."""
        return _RASTER_ROWS // self.tile_m

    @property
    def record_count(self) -> int:
        return MAX_STAGES

    @property
    def producer_warps(self) -> int:
        return 4 if self.copies_rows else super(ExpertsConfig, self).producer_warps

    @property
    def full_arrivals(self) -> int:
        """Number of arrivals per stage: one with the expected bytes, and one from each thread that copies rows."""
        return 1 + 32 * self.producer_warps if self.copies_rows else 1

    # ---- Launch parameters

    @property
    def parameter_names(self) -> tuple[str, ...]:
        read = {
            "weight_map": True,
            "scale_map": self.has_stage_scales,
            "zero_map": self.has_stage_zeros,
            "activation_map": not self.copies_rows,
            "activations": self.copies_rows,
            "scales": not self.has_stage_scales,
            "zeros": self.has_zeros and not self.has_stage_scales,
            "bias": True,
            "tensor_scales": self.weight.has_tensor_scale,
            "topk_ids": self.direct,
            "expert_map": self.direct,
            "space": True,
            "problem": True,
        }
        return tuple([name for name, is_read in read.items() if is_read])

    @property
    def problem_names(self) -> tuple[str, ...]:
        names = ["n", "tiles_n", "by_tiles_n", "k_iterations", "expert_rows", "result_at"]
        names += ["experts", "global_experts", "id_words"] if self.direct else ["blocks_at", "pairs_at"]
        names += ["pairs"] if self.gathers_rows else []
        names += ["by_top_k"] if self.product == "up" else []
        names += ["k", "activation_pitch"] if self.copies_rows else []
        names += [] if self.has_stage_scales else ["scale_pitch"]
        names += ["scale_offset", "scale_back"] if self.has_scale_back else []
        return tuple(names)

    # ---- Shared memory

    @property
    def row_pitch_bytes(self) -> int:
        """Bytes from one row of a stage to the next, if rows are loaded one by one."""
        return (self.tile_k // 64 | 1) * _LINE_BYTES

    @property
    def activation_stage_bytes(self) -> int:
        return self.tile_m * (self.row_pitch_bytes if self.gathers_rows else self.tile_k * 2)

    @property
    def transaction_bytes(self) -> int:
        """Number of bytes that the loads of a stage deliver, without the rows of the wgmma kernel."""
        rows = self.tile_m * self.tile_k * 2 if self.gathers_rows else 0
        return sum(size for name, size in self._stage_bytes() if name != "activations") + rows

    @property
    def staging_pitch_bytes(self) -> int:
        columns = self.warp_n // 2 if self.product == "up" else self.warp_n
        return columns * 2 + 16

    def epilogue_parts(self) -> tuple[tuple[str, int], ...]:
        """Return the sums of slices or the staging rows, and the records with which producers pass tiles.

        There is a record for each stage, and two that a producer passes to the others.
        """
        parts = super(ExpertsConfig, self).epilogue_parts()[: 1 if self.is_skinny else 2]
        return (*parts, ("tiles", (MAX_STAGES + 2 * self.copies_rows) * _RECORD_BYTES))


class _Plain(ABC):
    """Properties of kernels without a ring and without dynamic shared memory."""

    __slots__ = ()

    @property
    @abstractmethod
    def template(self) -> str:
        """Path of the template below ptx_templates/."""

    @property
    def smem_bytes(self) -> int:
        """Bytes of dynamic shared memory per CTA."""
        return 0

    @property
    @abstractmethod
    def problem_members(self) -> tuple[Member, ...]:
        """Members of ``Problem`` that the kernel reads, in the order of the struct."""

    @property
    def problem_has_divisor(self) -> bool:
        return any(member.type == "Divisor" for member in self.problem_members)

    def smem_layout(self) -> list[tuple[str, int, int]]:
        """Return (name, offset, bytes) of each array in dynamic shared memory."""
        return []

    def stage_layout(self) -> list[tuple[str, int]]:
        """Return (description, bytes) for each array in a stage."""
        return []

    def check_target(self, target: Target) -> None:
        """Raise TargetError unless the target supports programmatic dependent launch."""
        target.require("griddepcontrol", "marlin_moe")


@dataclass(frozen=True, slots=True)
class RouteConfig(_Plain):
    """A configuration of ``kernels/experts_route.cu.j2``.

    tile_m: maximum number of rows of a block, as in the grouped GEMM. short_rows: blocks with at most this number of
    rows come after all other blocks, because they take less time. threads: number of threads per CTA, at least the
    number of experts. ctas: number of CTAs, which form a cluster. Raises ArgumentError or ArgumentTypeError for an
    invalid field.
    """

    tile_m: int
    short_rows: int = 0
    threads: int = 256
    ctas: int = 1
    entry: str = "experts_route"

    def __post_init__(self) -> None:
        check_field_types(self)
        if self.threads not in ROUTE_THREADS:
            raise ArgumentError("threads", self.threads, alternatives(ROUTE_THREADS))
        if self.ctas not in (1, ROUTE_CTAS):
            raise ArgumentError("ctas", self.ctas, f"1 or {ROUTE_CTAS}")
        if not 0 <= self.short_rows < self.tile_m:
            raise ArgumentError("short_rows", self.short_rows, f"0 to {self.tile_m - 1} (less than tile_m)")

    def check_target(self, target: Target) -> None:
        """Raise TargetError unless the target supports programmatic dependent launch, and clusters if there is one."""
        super(RouteConfig, self).check_target(target)
        if self.ctas > 1:
            target.require("cluster", "marlin_moe")

    @property
    def template(self) -> str:
        return "kernels/experts_route.cu.j2"

    @property
    def parameter_names(self) -> tuple[str, ...]:
        return ("topk_ids", "expert_map", "space", "problem")

    @property
    def problem_members(self) -> tuple[Member, ...]:
        names = ("pairs", "experts", "global_experts", "id_words", "blocks_at", "pairs_at", "places_at")
        return in_order(MEMBERS, names)

    @property
    def notes(self) -> tuple[str, ...]:
        """Description for the opening comment of the generated source."""
        return ("no ring: ids are read from global memory, and experts are counted in static shared memory",)


@dataclass(frozen=True, slots=True)
class SumConfig(_Plain):
    """A configuration of ``kernels/experts_sum.cu.j2``.

    direct: whether the results are in the order of the pairs. Raises ArgumentError or ArgumentTypeError."""

    dtype: str
    direct: bool = False
    threads: int = 128
    entry: str = "experts_sum"

    def __post_init__(self) -> None:
        check_field_types(self)
        activation_type(self.dtype)

    @property
    def template(self) -> str:
        return "kernels/experts_sum.cu.j2"

    def grid(self, m: int, n: int) -> tuple[int, int]:
        """Return the grid for a result (m, n)."""
        return ceil_div(n, self.threads * _CHUNK_ELEMS), min(m, _MAX_GRID_ROWS)

    @property
    def is_bf16(self) -> bool:
        return self.dtype == "bfloat16"

    @property
    def parameter_names(self) -> tuple[str, ...]:
        ids = ("topk_ids", "expert_map") if self.direct else ()
        return ("topk_weights", *ids, "space", "output", "problem")

    @property
    def problem_members(self) -> tuple[Member, ...]:
        places = ("experts", "global_experts", "id_words") if self.direct else ("places_at",)
        return in_order(MEMBERS, ("m", "n", "top_k", "output_pitch", "result_at", *places))

    @property
    def notes(self) -> tuple[str, ...]:
        """Description for the opening comment of the generated source."""
        return ("no ring: results are read from global memory",)
