"""What the versions of attention have in common: the tile, shared memory, and what a launch should take."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from cudatma.errors import ArgumentError, ArgumentTypeError
from cudatma.kernels.attention.problem import CACHE_TYPE, HEAD_DIMS, OPERAND_TYPES, Problem
from cudatma.kernels.cost import Cost
from cudatma.kernels.gpu import Gpu
from cudatma.kernels.launch_struct import MEMBERS as WORK_MEMBERS
from cudatma.kernels.launch_struct import Member
from cudatma.kernels.schedule import ceil_div
from cudatma.kernels.tiled_kernel import PROBLEM, TENSOR_MAP, TiledKernel
from cudatma.pipeline import Operand
from cudatma.target import Target, get_target

#: Multiplications that the tensor cores of an SM do in a clock. [H100 white paper]
_MACS = 2048
#: CTAs that an SM has registers for, by their warpgroups. [a1 and a2 with 96 registers of a thread]
_MOST_CTAS: Mapping[int, int] = {1: 5, 2: 2}
#: Microseconds of a launch. [H100]
_LAUNCH_US = 1.0
#: Part of the highest clock that long launches keep, as their power is limited. [H200]
_CLOCK = 0.886
MEMBERS = WORK_MEMBERS | {
    member.name: member
    for member in (
        Member("tiles_m", "u32", "heads of all sequences"),
        Member("tiles_n", "u32", "tiles of queries of each of them"),
        Member("raster_heads", "u32", "heads of a raster group"),
        Member("last_group", "u32", "first head of the last raster group"),
        Member("by_tiles_n", "Divisor", "divides by tiles_n"),
        Member("by_raster_tiles", "Divisor", "divides by the tiles of a raster group"),
        Member("by_raster_heads", "Divisor", "divides by raster_heads"),
        Member("by_last_heads", "Divisor", "divides by the heads of the last raster group"),
        Member("q_length", "u32", "queries of a sequence"),
        Member("k_length", "u32", "keys of a sequence"),
        Member("heads", "u32", "of q, in a sequence"),
        Member("q_total", "u32", "queries of all sequences"),
        Member("k_total", "u32", "keys of all sequences"),
        Member("upper", "u32", "query i sees keys below i + upper, a signed number"),
        Member("lower", "u32", "query i sees keys from i + lower on, a signed number"),
        Member("scale_log2", "float", "scale of the scores, or the cap's, in powers of 2"),
        Member("cap_scale", "float", "scale of the scores in the cap's tanh"),
        Member("by_heads", "Divisor", "divides by heads"),
        Member("by_group", "Divisor", "divides by the heads of q that share one of k and v"),
        Member("output_head", "u64", "elements from one head of the result to the next"),
        Member("output_batch", "u64", "elements from one sequence of the result to the next"),
        *(
            Member(f"{name}_{step}", "u64", f"elements from one {what} of {name} to the next")
            for name in ("q", "k", "v")
            for step, what in (("pitch", "row"), ("head", "head"), ("batch", "sequence"))
        ),
    )
}
#: What every version reads.
_PLACES = ("tiles_m", "tiles_n", "q_length", "k_length", "heads", "by_heads", "by_group", "scale_log2")
#: What the order of causal tiles needs, and that of others.
_RASTER, _HEAD_BY_HEAD = (
    ("raster_heads", "last_group", "by_raster_tiles", "by_raster_heads", "by_last_heads"),
    ("by_tiles_n",),
)
#: Where the sequences begin.
_OFFSETS = ("cu_seqlens_q", "cu_seqlens_k")
#: What results by vectors need.
OUTPUT_ROWS = ("output_pitch", "output_head", "output_batch")
#: Fields of a spec that the problem gives.
SPEC_FIELDS = ("dtype", "head_dim", "v_head_dim", "is_causal", "has_window", "has_softcap", "has_sink")
_PARAMETER_TYPES: Mapping[str, str] = {
    **dict.fromkeys(("q_map", "k_map", "v_map", "output_map"), TENSOR_MAP),
    **dict.fromkeys(("q", "k", "v"), "const cudatma::u16*"),
    **dict.fromkeys((*_OFFSETS, "seqlens", "page_table"), "const int*"),
    **dict.fromkeys(("sink", "k_scale", "v_scale"), "const float*"),
    **dict.fromkeys(("lse", "partials"), "float*"),
    **dict.fromkeys(("tile_counter", "counters"), "cudatma::u32*"),
    "output_rows": "cudatma::u16*",
    "problem": PROBLEM,
}
_ALLOWED: Mapping[str, tuple[Any, ...]] = {
    "is_causal": (False, True),
    "has_window": (False, True),
    "has_softcap": (False, True),
    "has_sink": (False, True),
    "block_m": (64, 128, 192),
    "block_n": tuple(range(16, 257, 16)),
    "stages": tuple(range(2, 9)),
    "warpgroups": (1, 2, 3),
}


@dataclass(frozen=True, slots=True)
class Clocks:
    """What an SM takes for a tile. around: before the first and after the last block. products: parts of the tensor
    cores' time that are not hidden. scores: for 2^14 of them, of what comes between the products. block: for each.
    start: once a launch. shared: n CTAs that share an SM are n to this power times as fast as one; 0: not counted."""

    around: float
    products: float
    scores: float = 0.0
    block: float = 0.0
    start: float = 0.0
    shared: float = 0.0


@dataclass(frozen=True, slots=True)
class AttentionSpec(TiledKernel):
    """One instance of a version's template. head_dim: of q and k. dtype, v_head_dim, is_causal, has_window,
    has_softcap, has_sink: as Problem has them. block_m: queries of a CTA's tile. block_n: keys of a stage. warpgroups:
    that multiply, 64 queries each. Raises ArgumentError, ArgumentTypeError."""

    dtype: str
    head_dim: int
    v_head_dim: int
    is_causal: bool = False
    has_window: bool = False
    has_softcap: bool = False
    has_sink: bool = False
    block_m: int = 128
    block_n: int = 128
    stages: int = 2
    warpgroups: int = 2

    parameter_types: ClassVar[Mapping[str, str]] = _PARAMETER_TYPES
    struct_members: ClassVar[Mapping[str, Member]] = MEMBERS
    version: ClassVar[str]
    template: ClassVar[str]
    allowed: ClassVar[Mapping[str, tuple[Any, ...]]] = _ALLOWED
    revision: ClassVar[int] = 4
    cluster: ClassVar[int] = 1
    cluster_k: ClassVar[int] = 1
    blocks_per_sm: ClassVar[int] = 1
    producer_warps: ClassVar[int] = 0
    partial_bytes: ClassVar[int] = 0
    #: Slots of q.
    q_stages: ClassVar[int] = 1
    #: Whether wgmma multiplies, else mma.sync.
    has_wgmma: ClassVar[bool] = True
    #: Whether it is attention_decode()'s kernel.
    is_decode: ClassVar[bool] = False
    #: Whether it is attention_varlen()'s kernel.
    is_varlen: ClassVar[bool] = False
    #: Bytes of an element of k and v.
    kv_bytes: ClassVar[int] = 2
    #: Whether TMA writes the result.
    stores_by_tma: ClassVar[bool] = False
    #: By warpgroups that multiply and slots of q. [fitted to benchmarks/results/attention_tiles.json]
    clocks_of: ClassVar[Mapping[tuple[int, int], Clocks]]
    operand_names: ClassVar[tuple[str, ...]] = ("q_map", "k_map", "v_map")
    work_names: ClassVar[tuple[str, ...]] = OUTPUT_ROWS
    features: ClassVar[tuple[str, ...]] = ("griddepcontrol", "tma", "wgmma", "stmatrix")

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, str) or self.dtype not in OPERAND_TYPES:
            raise ArgumentTypeError("dtype", self.dtype, ", ".join(OPERAND_TYPES))
        if (self.head_dim, self.v_head_dim) not in HEAD_DIMS:
            dims = self.head_dim, self.v_head_dim
            raise ArgumentError("head_dim, v_head_dim", dims, ", ".join(map(str, HEAD_DIMS)))
        self.check_values(self.allowed)
        self.check_block_m()

    def check_block_m(self) -> None:
        """Raise ArgumentError unless the warpgroups divide the tile."""
        if self.block_m != 64 * self.warpgroups:
            raise ArgumentError("block_m", self.block_m, f"{64 * self.warpgroups}, 64 a warpgroup")

    # What the kernel is launched with.

    @property
    def parameter_names(self) -> tuple[str, ...]:
        output = "output_map" if self.stores_by_tma else "output_rows"
        offsets = _OFFSETS if self.is_varlen else ()
        counter = ("tile_counter",) if self.is_persistent else ()
        return (*self.operand_names, *offsets, output, "lse", *self.sink_names, *counter, "problem")

    @property
    def sink_names(self) -> tuple[str, ...]:
        """The kernel's parameter for sinks, if it has one."""
        return ("sink",) if self.has_sink else ()

    @property
    def log_sums(self) -> str:
        """The kernel's LogSums in CUDA."""
        return f"LogSums{{{', '.join(('lse', *self.sink_names))}}}"

    @property
    def has_upper(self) -> bool:
        """Whether queries do not see all later keys."""
        return self.is_causal or self.has_window

    @property
    def problem_names(self) -> tuple[str, ...]:
        names = (*_PLACES, *(_RASTER if self.is_causal else _HEAD_BY_HEAD), *self.work_names)
        return names + self.mask_names + (("q_total", "k_total") if self.is_varlen else ())

    @property
    def mask_names(self) -> tuple[str, ...]:
        """What the masks and the cap need."""
        wanted = {"upper": self.has_upper, "lower": self.has_window, "cap_scale": self.has_softcap}
        return tuple(name for name, has in wanted.items() if has)

    @property
    def entry(self) -> str:
        dims = str(self.head_dim) if self.head_dim == self.v_head_dim else f"{self.head_dim}_{self.v_head_dim}"
        kinds = {"causal": self.is_causal, "window": self.has_window, "softcap": self.has_softcap}
        kinds |= {"sink": self.has_sink, "varlen": self.is_varlen}
        told = [self.version, self.mma_type, f"d{dims}", *(name for name, has in kinds.items() if has)]
        return f"attention_{'_'.join(told)}_{self.tile_name}"

    @property
    def tile_name(self) -> str:
        """Of the entry: what distinguishes instances for the same problem."""
        return f"{self.block_m}x{self.block_n}_s{self.stages}"

    # What it computes with.

    @property
    def mma_type(self) -> str:
        """Of q, k and v, as wgmma names it."""
        return OPERAND_TYPES[self.dtype]

    @property
    def is_bf16(self) -> bool:
        return self.dtype == "bfloat16"

    @property
    def span_bytes(self) -> int:
        """Width of the swizzle: rows of a head are whole spans."""
        return 64 if self.head_dim % 64 else 128

    @property
    def span(self) -> int:
        """Elements of a span."""
        return self.span_bytes // self.kv_bytes

    @property
    def swizzle(self) -> str:
        """As a tensor map names it."""
        return f"{self.span_bytes}B"

    @property
    def swizzle_number(self) -> int:
        """In a matrix descriptor."""
        return {128: 1, 64: 2}[self.span_bytes]

    @property
    def scores_mma(self) -> str:
        """The name of q k^T's wgmma, as primitives/wgmma_shapes.j2 has it."""
        return f"wgmma_m64n{self.block_n}k16_f32_{self.mma_type}_ss"

    @property
    def output_mma(self) -> str:
        """The same of p v, whose first operand is in registers; keys are the rows of the second."""
        return f"wgmma_m64n{self.v_head_dim}k16_f32_{self.mma_type}_nt"

    @property
    def q_box(self) -> tuple[int, int, int, int]:
        """Sequences, rows, heads and columns of a box of q, as the array has its axes."""
        return (1, self.block_m, 1, self.span)

    @property
    def kv_box(self) -> tuple[int, int, int, int]:
        """The same of k and v."""
        return (1, self.block_n, 1, self.span)

    @property
    def block_k(self) -> int:
        """Keys of one stage: the products of a tile run along them."""
        return self.block_n

    def tiles(self, problem: Problem) -> int:
        """Tiles of all heads of the batch."""
        return problem.batch * problem.heads * ceil_div(problem.q_length, self.block_m)

    def ctas(self, problem: Problem, sm_count: int) -> int:
        """CTAs of a launch: one a tile."""
        del sm_count
        return self.tiles(problem)

    # Shared memory.

    @property
    def consumer_warps(self) -> int:
        return 4 * self.warpgroups

    @property
    def warp_tiles(self) -> int:
        return self.consumer_warps

    @property
    def loaded_stage_bytes(self) -> int:
        return self.kv_bytes * self.block_n * (self.head_dim + self.v_head_dim)

    def stage_operands(self) -> tuple[Operand, ...]:
        dims = {"k": self.head_dim, "v": self.v_head_dim}
        sizes = [(name, self.kv_bytes * self.block_n * dim) for name, dim in dims.items()]
        return tuple(Operand(name, size, size, 1024) for name, size in sizes)

    @property
    def smem_bytes(self) -> int:
        _, offset, size = self.smem_layout()[-1]
        return offset + size

    def epilogue_parts(self) -> tuple[tuple[str, int], ...]:
        """What a tile keeps besides the ring: its queries, whose place the results take, and their barrier."""
        return (("q", 2 * self.block_m * self.head_dim), ("q_barrier", 8))

    def stage_layout(self) -> list[tuple[str, int]]:
        """(what, bytes) that one stage holds."""
        k, v = (operand.footprint_bytes for operand in self.stage_operands())
        dtype = self.dtype if self.kv_bytes == 2 else CACHE_TYPE
        return [
            (f"k {self.block_n} x {self.head_dim} {dtype}, {self.swizzle} swizzle", k),
            (f"v {self.block_n} x {self.v_head_dim} {dtype}, {self.swizzle} swizzle", v),
        ]

    def check_target(self, target: Target) -> None:
        """Raise unless the target has what the kernel uses and a CTA's shared memory fits."""
        for feature in self.features:
            target.require(feature, "attention")
        self.check_smem(target)

    def check(self, problem: Problem, target: Target) -> None:
        """Raise ArgumentError or TargetError unless the kernel can run the problem on the target."""
        if problem.is_varlen != self.is_varlen:
            raise ArgumentError("is_varlen", problem.is_varlen, f"{self.is_varlen} for {self.entry}")
        super(AttentionSpec, self).check(problem, target)

    # What the choice and the tuner read.

    def variants(self, problem: Any) -> Iterator[Mapping[str, Any]]:
        """Shorter rings."""
        del problem
        if self.stages > 2:
            yield {"stages": self.stages - 1}

    def adapted(self, problem: Problem) -> AttentionSpec | None:
        """The same tile for another dtype and masks."""
        if (problem.head_dim, problem.v_head_dim) != (self.head_dim, self.v_head_dim):
            return None
        return replace(self, **{name: getattr(problem, name) for name in SPEC_FIELDS})

    @property
    def clocks(self) -> Clocks:
        """Of a tile."""
        return self.clocks_of[self.warpgroups, self.q_stages]

    def tile_clocks(self, keys: Any) -> Any:
        """Return the cycles per SM for a tile that sees this many keys, a number or an array."""
        clocks, scores = self.clocks, self.block_m * keys
        products = scores * (self.head_dim + self.v_head_dim) / _MACS * clocks.products
        return clocks.around + products + scores / 2**14 * clocks.scores + keys / self.block_n * clocks.block

    def waves(self, tiles: Any, gpu: Gpu) -> tuple[Any, Any]:
        """Return how often an SM takes the time of one tile for all of its tiles, and for those that share it.

        Several CTAs share an SM: there are parts of waves.
        """
        of_sm = np.maximum(1.0, tiles / gpu.sm_count)
        if not self.clocks.shared:
            return of_sm, 1.0
        target, smem_bytes = get_target(gpu.target), self.smem_bytes
        counts = range(1, _MOST_CTAS[self.warpgroups] + 1)
        at_a_time = np.minimum(of_sm, sum(smem_bytes <= target.smem_share_bytes(count) for count in counts))
        faster = at_a_time**self.clocks.shared
        return of_sm / faster, at_a_time / faster

    def cost_at(self, m: Any, problem: Problem, gpu: Gpu) -> Cost:
        """Return the predicted time with ``m`` queries, an int or an int64 array, instead of the problem's.

        An SM's tiles bound it, each with the mean of their keys, or the longest tile does.
        """
        k_length = m if problem.keys == 0 else problem.k_length
        keys = 1.0 * ceil_div(k_length, self.block_n) * self.block_n
        if problem.is_causal:
            # A triangle is left out. Tiles end with their own last query, in whole blocks.
            beyond = self.block_m + self.block_n - math.gcd(self.block_m, self.block_n)
            keys = np.minimum(keys, keys - 0.5 * np.minimum(keys, m) + 0.5 * beyond)
        waves, at_least = self.waves(problem.batch * problem.heads * ceil_div(m, self.block_m), gpu)
        longest = at_least * self.tile_clocks(k_length)
        clocks = self.clocks.start + np.maximum(waves * self.tile_clocks(keys), longest)
        sm_us = clocks / (_CLOCK * gpu.sm_clock_mhz)
        rows = problem.batch * (m * problem.heads + k_length * problem.kv_heads)
        memory_us = 2.0 * rows * (self.head_dim + self.v_head_dim) / gpu.memory_bytes_per_us
        return Cost(_LAUNCH_US, sm_us, 0.0, np.maximum(0.0, memory_us - sm_us), 0.0)
