"""Configurations of marlin_moe's kernels: route, gather, the grouped GEMMs, and sum."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from cudatma.dtypes import activation_type
from cudatma.errors import ArgumentError
from cudatma.kernels.checks import check_field_types
from cudatma.kernels.config import Preset
from cudatma.kernels.cost import Cost
from cudatma.kernels.experts.problem import MEMBERS
from cudatma.kernels.gpu import Gpu
from cudatma.kernels.launch_struct import Member, in_order
from cudatma.kernels.marlin.config import PRESETS as MARLIN_PRESETS
from cudatma.kernels.marlin.config import MarlinConfig
from cudatma.target import Target

_SKINNY, _WGMMA = (MARLIN_PRESETS[version].allowed for version in ("skinny", "wgmma"))
#: Maximum number of stages. There is a record for each, so that the size of the records does not depend on the stages.
MAX_STAGES = 8
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
        summary="grouped W4A16 GEMM over experts, wgmma, operands by TMA",
        schedule="persistent",
        allowed={**_WGMMA, **_ALLOWED, "slice_k": (1,), "scale_form": ("none",), "pingpong": (False,)},
    ),
}
#: "up" is the first GEMM, whose epilogue applies the gated activation. "down" is the second one.
PRODUCTS = ("up", "down")
_LINE_BYTES, _RECORD_BYTES = 128, 16
#: Numbers of threads of the routing kernel. A thread divides the rows of one expert.
ROUTE_THREADS = (256, 512, 1024)
MAX_EXPERTS = ROUTE_THREADS[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig(MarlinConfig):
    """A configuration of the grouped GEMM, which has the fields of marlin_gemm's kernel of the same version.

    product: one of PRODUCTS. Rows of a stage are an odd number of 128-byte lines apart. deep_box: whether one
    three-dimensional box loads a row of a stage, which requires a K that is a multiple of 64. Raises ArgumentError or
    ArgumentTypeError."""

    product: str

    function: ClassVar[str] = "marlin_moe"
    presets: ClassVar[Mapping[str, Preset]] = PRESETS
    struct_members: ClassVar[Mapping[str, Member]] = MEMBERS

    def __post_init__(self) -> None:
        if self.product not in PRODUCTS:
            raise ArgumentError("product", self.product, ", ".join(PRODUCTS))
        super(ExpertsConfig, self).__post_init__()

    def _check_boxes(self) -> None:
        """Allow every tile, because rows are loaded one by one."""

    def check_problem(self, problem: Any) -> None:
        """Raise ArgumentError if the kernel cannot run a problem."""
        if self.deep_box and (k := problem.product(self.product).k) % 64:
            raise ArgumentError("deep_box", True, f"False: K = {k} is not a multiple of 64")

    @property
    def features(self) -> tuple[str, ...]:
        registers = ("setmaxnreg",) if self.consumer_registers else ()
        return ("tma", "shared_cta_destination", self.preset.mma, "griddepcontrol", *registers)

    # ---- Kernel

    @property
    def template(self) -> str:
        return f"kernels/experts_{self.version}.cu.j2"

    @property
    def entry(self) -> str:
        names = [self.version, self.product, self.activation.short]
        names += ["column" if self.group_size == -1 else f"g{self.group_size}"]
        names += ["zeros"] if self.has_zeros else []
        names += [] if self.format == "int4" else [self.format]
        names += [f"{self.tile_m}x{self.tile_n}x{self.tile_k}", f"k{self.slice_k}", f"s{self.stages}"]
        names += [f"b{self.ctas_per_sm}"] if self.ctas_per_sm > 1 else []
        names += ["d"] if self.deep_box else []
        names += [f"w{self.warpgroups}", f"g{self.mmas_per_commit}{self.commits_in_flight}"] if self.has_wgmma else []
        names += [f"r{self.consumer_registers}"] if self.consumer_registers else []
        return f"experts_{'_'.join(names)}"

    @property
    def has_staging(self) -> bool:
        return False

    @property
    def gathers_rows(self) -> bool:
        """Whether rows are loaded one by one. The wgmma kernel loads boxes of rows, which experts_gather has sorted."""
        return self.is_skinny

    # ---- Launch parameters

    @property
    def parameter_names(self) -> tuple[str, ...]:
        read = {
            "weight_map": True,
            "scale_map": self.has_stage_scales,
            "zero_map": self.has_stage_zeros,
            "activation_map": True,
            "scales": not self.has_stage_scales,
            "zeros": self.has_zeros and not self.has_stage_scales,
            "space": True,
            "problem": True,
        }
        return tuple([name for name, is_read in read.items() if is_read])

    @property
    def problem_names(self) -> tuple[str, ...]:
        names = ["n", "tiles_n", "by_tiles_n", "k_iterations", "expert_rows", "result_at", "blocks_at", "pairs_at"]
        reads_pairs = self.gathers_rows and self.product == "up"
        names += ["pairs"] if self.gathers_rows else []
        names += ["by_top_k"] if reads_pairs else ["source_row"]
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
        """Number of bytes that the loads of a stage deliver."""
        padding = self.activation_stage_bytes - self.tile_m * self.tile_k * 2
        return sum(size for _, size in self._stage_bytes()) - padding

    def epilogue_parts(self) -> tuple[tuple[str, int], ...]:
        """Return the sums of slices, and the records with which the producer passes tiles to the consumers."""
        sums = super(ExpertsConfig, self).epilogue_parts()[:1]
        return (*sums, ("tiles", MAX_STAGES * _RECORD_BYTES))

    # ---- Choice

    def adapted(self, problem: Any) -> ExpertsConfig | None:
        """Return None: no configurations of this kernel were measured."""
        return None

    def cost_at(self, m: Any, problem: Any, gpu: Gpu) -> Cost:
        """Raise NotImplementedError: choose.py does not compare costs."""
        raise NotImplementedError

    def variants(self, problem: Any) -> Iterator[Mapping[str, Any]]:
        """Yield nothing: the kernel is not tuned."""
        yield from ()


class _Plain(ABC):
    """Properties of kernels without a ring and without dynamic shared memory."""

    __slots__ = ()

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
        """Return (description, bytes) of each array of a stage."""
        return []

    def check_target(self, target: Target) -> None:
        """Raise TargetError unless the target supports programmatic dependent launch."""
        target.require("griddepcontrol", "marlin_moe")


@dataclass(frozen=True, slots=True)
class RouteConfig(_Plain):
    """A configuration of ``kernels/experts_route.cu.j2``.

    tile_m: maximum number of rows of a block, as in the grouped GEMM. threads: number of threads, at least the number
    of experts. Raises ArgumentError or ArgumentTypeError for an invalid field."""

    tile_m: int
    threads: int = 256
    entry: str = "experts_route"

    def __post_init__(self) -> None:
        check_field_types(self)
        if self.threads not in ROUTE_THREADS:
            raise ArgumentError("threads", self.threads, ", ".join(map(str, ROUTE_THREADS)))

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
class GatherConfig(_Plain):
    """A configuration of ``kernels/experts_gather.cu.j2``.

    threads: number of threads, which copy a row together. Raises ArgumentTypeError."""

    threads: int = 256
    entry: str = "experts_gather"

    def __post_init__(self) -> None:
        check_field_types(self)

    @property
    def parameter_names(self) -> tuple[str, ...]:
        return ("activations", "space", "problem")

    @property
    def problem_members(self) -> tuple[Member, ...]:
        return in_order(MEMBERS, ("k", "by_top_k", "activation_pitch", "blocks_at", "pairs_at"))

    @property
    def notes(self) -> tuple[str, ...]:
        """Description for the opening comment of the generated source."""
        return ("no ring: rows are copied from global memory to global memory",)


@dataclass(frozen=True, slots=True)
class SumConfig(_Plain):
    """A configuration of ``kernels/experts_sum.cu.j2``. Raises ArgumentError or ArgumentTypeError."""

    dtype: str
    threads: int = 128
    entry: str = "experts_sum"

    def __post_init__(self) -> None:
        check_field_types(self)
        activation_type(self.dtype)

    @property
    def is_bf16(self) -> bool:
        return self.dtype == "bfloat16"

    @property
    def parameter_names(self) -> tuple[str, ...]:
        return ("topk_weights", "space", "output", "problem")

    @property
    def problem_members(self) -> tuple[Member, ...]:
        return in_order(MEMBERS, ("m", "n", "top_k", "output_pitch", "result_at", "places_at"))

    @property
    def notes(self) -> tuple[str, ...]:
        """Description for the opening comment of the generated source."""
        return ("no ring: results are read from global memory",)
