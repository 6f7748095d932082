"""What the versions of the dense GEMM have in common: the tile, what a stage holds, and what a launch should take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from cudatma.dtypes import ActivationType, activation_type
from cudatma.errors import ArgumentError
from cudatma.kernels.cost import Cost
from cudatma.kernels.gemm.problem import LAYOUTS, Problem
from cudatma.kernels.gpu import Gpu
from cudatma.kernels.launch_struct import Member
from cudatma.kernels.schedule import ceil_div
from cudatma.kernels.tiled_kernel import PROBLEM, TENSOR_MAP, TiledKernel
from cudatma.kernels.work_struct import MEMBERS, RASTER, RESULT, in_order
from cudatma.pipeline import Operand
from cudatma.target import Target

#: Multiply-adds that the tensor cores of an SM do in a clock. [H100 white paper]
_MACS = 2048
#: The part of them that wgmmas of so many columns reach, and that one warpgroup alone reaches of it. [H200]
_RATE = {64: 0.8, 128: 0.93, 192: 0.97, 256: 1.0}
_ONE_WARPGROUP = 0.8
#: Clocks until the first stage is there; bytes a clock that an SM reads from L2, and writes. [H200]
_FIRST_STAGE, _L2_BYTES, _STORED_BYTES = 1000, 56, 32
_SPAN_BYTES = 128
_MEMBERS = MEMBERS | {
    name: Member(name, "u64", f"elements from one row of {letter} to the next, or from one column")
    for name, letter in (("a_pitch", "A"), ("b_pitch", "B"))
}
_ALLOWED: Mapping[str, tuple[Any, ...]] = {
    "layout": LAYOUTS,
    "block_m": (64, 128, 192, 256),
    "block_n": tuple(_RATE),
    "block_k": (64, 128),
    "stages": tuple(range(2, 13)),
    "warpgroups": (1, 2, 3),
    "cluster": (1, 2),
}


@dataclass(frozen=True, slots=True)
class GemmSpec(TiledKernel):
    """One instance of a version's template. layout: of A and B, as Problem has it. block_m, block_n: of a CTA's tile.
    stages: of the ring, block_k of K each. warpgroups: that multiply, side by side along M. Raises ArgumentError,
    ArgumentTypeError."""

    dtype: str
    layout: str
    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    stages: int = 3
    warpgroups: int = 2

    version: ClassVar[int]
    template: ClassVar[str]
    revision: ClassVar[int] = 1
    #: CTAs side by side along M that load a tile of B together.
    cluster: ClassVar[int] = 1
    cluster_k: ClassVar[int] = 1
    blocks_per_sm: ClassVar[int] = 1
    producer_warps: ClassVar[int] = 1
    partial_bytes: ClassVar[int] = 0
    #: Of 16 rows x 64 columns, for each consumer warp.
    staging_buffers: ClassVar[int] = 1
    #: Microseconds of a launch, and clocks between two stages of one warpgroup in which it does not multiply. [H200]
    launch_us: ClassVar[float] = 1.2
    stage_gap: ClassVar[int] = 0
    parameter_names: ClassVar[tuple[str, ...]] = ("a_map", "b_map", "output", "problem")
    parameter_types: ClassVar[Mapping[str, str]] = {
        "a": "const cudatma::u16*",
        "b": "const cudatma::u16*",
        "a_map": TENSOR_MAP,
        "b_map": TENSOR_MAP,
        "output_map": TENSOR_MAP,
        "output": "cudatma::u16*",
        "problem": PROBLEM,
    }
    problem_names: ClassVar[tuple[str, ...]] = ("k_iterations", *RASTER, *RESULT)

    @property
    def problem_members(self) -> tuple[Member, ...]:
        return in_order(_MEMBERS, self.problem_names)

    def __post_init__(self) -> None:
        activation_type(self.dtype)
        for field in fields(self):
            value, allowed = getattr(self, field.name), _ALLOWED.get(field.name)
            if allowed is not None and (type(value) is not type(allowed[0]) or value not in allowed):
                raise ArgumentError(field.name, value, ", ".join(map(str, allowed)))
        if self.block_m % (64 * self.warpgroups):
            raise ArgumentError("block_m", self.block_m, f"a multiple of {64 * self.warpgroups}, 64 a warpgroup")

    @property
    def entry(self) -> str:
        tile = f"{self.block_m}x{self.block_n}x{self.block_k}_w{self.warpgroups}_s{self.stages}"
        cluster = f"_c{self.cluster}" if self.cluster > 1 else ""
        return f"gemm_v{self.version}_{self.element.short}_{self.layout.lower()}_{tile}{cluster}"

    @property
    def element(self) -> ActivationType:
        return activation_type(self.dtype)

    @property
    def is_bf16(self) -> bool:
        return self.dtype == "bfloat16"

    @property
    def is_a_k_major(self) -> bool:
        """Whether A's elements along K lie side by side; else those along M."""
        return self.layout[0] == "R"

    @property
    def is_b_k_major(self) -> bool:
        """Whether B's elements along K lie side by side; else those along N."""
        return self.layout[1] == "C"

    @property
    def mma_suffix(self) -> str:
        """Of the wgmma's name, as primitives/wgmma_shapes.j2 has it."""
        suffix = "_" + ("n" if self.is_a_k_major else "t") + ("n" if self.is_b_k_major else "t")
        return "" if suffix == "_nn" else suffix

    @property
    def a_box(self) -> tuple[int, int]:
        """Rows and columns of a box of A, or of A transposed where that has the contiguous rows."""
        return (self.block_m, 64) if self.is_a_k_major else (self.block_k, 64)

    @property
    def b_box(self) -> tuple[int, int]:
        """Rows and columns of a box of B transposed, or of B where that has the contiguous rows."""
        return (self.block_n // self.cluster, 64) if self.is_b_k_major else (self.block_k, 64)

    @property
    def cluster_m(self) -> int:
        """Rows of M of a cluster's tile."""
        return self.block_m * self.cluster

    @property
    def cluster_n(self) -> int:
        """Columns of N of a cluster's tile."""
        return self.block_n

    @property
    def consumer_warps(self) -> int:
        return 4 * self.warpgroups

    @property
    def warp_tiles(self) -> int:
        return self.consumer_warps

    @property
    def loaded_stage_bytes(self) -> int:
        return 2 * self.block_k * (self.block_m + self.block_n // self.cluster)

    def stage_operands(self) -> tuple[Operand, ...]:
        sizes = (("a", 2 * self.block_k * self.block_m), ("b", 2 * self.block_k * self.block_n))
        return tuple(Operand(name, size, size, 1024) for name, size in sizes)

    def epilogue_parts(self) -> tuple[tuple[str, int], ...]:
        return (("staging", self.consumer_warps * self.staging_buffers * 16 * _SPAN_BYTES),)

    def stage_layout(self) -> list[tuple[str, int]]:
        """(what, bytes) that one stage holds."""
        a, b = (operand.footprint_bytes for operand in self.stage_operands())
        majors = "K" if self.is_a_k_major else "M", "K" if self.is_b_k_major else "N"
        return [
            (f"a {self.block_m} x {self.block_k} {self.dtype}, {majors[0]}-major, 128B swizzle", a),
            (f"b {self.block_k} x {self.block_n} {self.dtype}, {majors[1]}-major, 128B swizzle", b),
        ]

    def check_target(self, target: Target) -> None:
        """Raise unless the target has what the kernel uses and a CTA's shared memory fits."""
        for feature in ("tma", "wgmma", "stmatrix"):
            target.require(feature, "gemm")
        self.check_smem(target)

    def adapted(self, problem: Problem) -> GemmSpec:
        """The same tile for another dtype and layout."""
        return replace(self, dtype=problem.dtype, layout=problem.layout)

    def cost(self, problem: Problem, gpu: Gpu) -> Cost:
        """Predicted time: waves of tiles, each stage bound by the tensor cores or by what it loads from L2."""
        tiles = ceil_div(problem.m, self.cluster_m) * ceil_div(problem.n, self.block_n)
        waves = ceil_div(tiles, max(1, gpu.sm_count // self.cluster))
        rate = _MACS * _RATE[self.block_n] * (_ONE_WARPGROUP if self.warpgroups == 1 else 1)
        products = self.block_m * self.block_n * self.block_k / rate
        gap = self.stage_gap / self.warpgroups**2  # others multiply meanwhile
        stage = max(products, self.loaded_stage_bytes / _L2_BYTES) + gap
        mainloop = waves * ceil_div(problem.k, self.block_k) * stage
        stored = 2 * self.block_m * self.block_n / _STORED_BYTES
        around = _FIRST_STAGE + (stored if self.is_persistent else waves * stored + (waves - 1) * _FIRST_STAGE)
        operands = 2 * problem.k * (problem.m + problem.n)
        memory_us = max(0.0, operands / gpu.memory_bytes_per_us - mainloop / gpu.sm_clock_mhz)
        return Cost(self.launch_us + around / gpu.sm_clock_mhz, mainloop / gpu.sm_clock_mhz, 0.0, memory_us, 0.0)
