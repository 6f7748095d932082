"""Configurations of the attention kernels. PRESETS describes the versions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

from cudatma.errors import ArgumentError, quoted
from cudatma.kernels.attention.cost import Clocks, cost_at
from cudatma.kernels.attention.parameters import (
    DECODE,
    DECODE_MEMBERS,
    HEAD_BY_HEAD,
    KV_ROWS,
    KV_SCALES,
    MEMBERS,
    OFFSETS,
    OUTPUT_ROWS,
    PAGES,
    Q_ROWS,
    RASTER,
    TILES,
    VARLEN,
)
from cudatma.kernels.attention.problem import (
    CACHE_TYPE,
    HEAD_DIMS,
    OPERAND_TYPES,
    OPTIONS,
    PROBLEM_FIELDS,
    KernelOption,
    Problem,
    check_kind,
)
from cudatma.kernels.config import KernelConfig, Preset
from cudatma.kernels.cost import Cost
from cudatma.kernels.gpu import Gpu
from cudatma.kernels.launch_struct import Member
from cudatma.kernels.schedule import ceil_div
from cudatma.kernels.version import Versions
from cudatma.pipeline import MBARRIER_BYTES


class Tile(NamedTuple):
    """Fields of a configuration that the choice ranks: queries per tile (m), keys per block (n), and CTAs per SM."""

    m: int
    n: int
    ctas_per_sm: int = 1


#: Tiles, keyed by (head_dim, v_head_dim).
Tiles = Mapping[tuple[int, int], tuple[Tile, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPreset(Preset):
    """A version of the kernel of attention() or attention_decode().

    Attributes
    ----------
    is_decode : bool
        Whether attention_decode() launches this version.
    kv_bytes : int
        Bytes per element of k and v.
    tiles : Tiles
        Tiles that the choice ranks. Among tiles with equal cost, the first one is chosen.
    clocks : tuple[Clocks, ...]
        Clock cycles in the cost model for each tile_m.
    """

    is_decode: bool = False
    kv_bytes: int = 2
    tiles: Tiles
    clocks: tuple[Clocks, ...] = ()


#: Allowed values of fields, unless a version overrides them.
_ALLOWED: Mapping[str, Sequence[Any]] = {
    "tile_m": (64, 128),
    "tile_n": range(16, 257, 16),
    "stages": range(2, 9),
    "q_stages": (1,),
    "ctas_per_sm": (1,),
    "is_causal": (False, True),
    "has_window": (False, True),
    "has_softcap": (False, True),
    "has_sink": (False, True),
    "is_varlen": (False,),
    "is_paged": (False,),
}
_DECODE_ALLOWED = {**_ALLOWED, "tile_m": (64,), "ctas_per_sm": (1, 2), "is_paged": (False, True)}
_DECODE_TILES: Tiles = dict.fromkeys(
    HEAD_DIMS, (Tile(m=64, n=64, ctas_per_sm=2), Tile(m=64, n=64), Tile(m=64, n=32), Tile(m=64, n=16))
)
_WIDE_TILES = (Tile(m=128, n=64), Tile(m=64, n=64))
#: Tiles of versions without a producer. [H100, attention_tiles.json]
_SIMPLE_TILES: Tiles = {dims: _WIDE_TILES if dims[0] > 64 else (Tile(m=64, n=64),) for dims in HEAD_DIMS}
#: Tiles of versions with a producer and wgmma. Each thread must hold its share of the output, and of a block's scores
#: and probabilities, in registers.
_PRODUCER_TILES: Tiles = {
    (32, 32): (Tile(m=192, n=128), Tile(m=128, n=192), Tile(m=128, n=128)),
    (64, 64): (
        Tile(m=192, n=128),
        Tile(m=128, n=128),
        Tile(m=64, n=128, ctas_per_sm=2),
        Tile(m=64, n=192, ctas_per_sm=2),
    ),
    (96, 96): (Tile(m=128, n=176), Tile(m=128, n=128), Tile(m=192, n=96)),
    (128, 128): (
        *(Tile(m=128, n=176), Tile(m=128, n=160), Tile(m=128, n=128), Tile(m=192, n=80)),
        *(Tile(m=128, n=112), Tile(m=64, n=80, ctas_per_sm=2), Tile(m=64, n=96, ctas_per_sm=2)),
    ),
    (192, 192): (Tile(m=128, n=112), Tile(m=128, n=96), Tile(m=128, n=80)),
    (192, 128): (Tile(m=128, n=128), Tile(m=128, n=112), Tile(m=128, n=96)),
    (256, 256): (Tile(m=128, n=80), Tile(m=128, n=64)),
}
#: Tiles of the mma.sync version, which fit in 99 KB of shared memory.
_MMA_SYNC_TILES: Tiles = {
    (32, 32): (Tile(m=128, n=128), Tile(m=64, n=64)),
    **dict.fromkeys([(64, 64), (96, 96), (128, 128)], (Tile(m=128, n=64), Tile(m=64, n=64))),
    **dict.fromkeys([(192, 192), (192, 128), (256, 256)], (Tile(m=64, n=32),)),
}
#: The clock cycles were fitted to benchmarks/results/attention_tiles.json. Those of mma.sync are estimates for a
#: GeForce GPU, whose tensor cores run at one eighth of the rate.
PRESETS: Mapping[str, AttentionPreset] = {
    "scalar": AttentionPreset(
        summary="attention, scalar loops: the baseline",
        loader="threads",
        mma="scalar",
        allowed={**_ALLOWED, "tile_m": (32,), "tile_n": (16, 32), "stages": (1,), "has_sink": (False,)},
        # The kernel unrolls its loops over the keys of a block.
        tiles={dims: (Tile(m=32, n=16 if dims[0] > 64 else 32),) for dims in HEAD_DIMS},
        clocks=(Clocks(tile_m=32, around=2000, products=40),),
    ),
    "a1": AttentionPreset(
        summary="attention, wgmma, version a1: keys and values by cp.async",
        loader="cp_async",
        allowed={**_ALLOWED, "stages": (2,)},
        tiles=_SIMPLE_TILES,
        clocks=(
            Clocks(tile_m=64, around=2307, products=1.943, scores=345, block=227, shared=0.373),
            Clocks(tile_m=128, around=3954, products=1.75, shared=0.274),
        ),
    ),
    "a2": AttentionPreset(
        summary="attention, wgmma, version a2: keys and values by TMA",
        loader="consumers",
        allowed=_ALLOWED,
        tiles=_SIMPLE_TILES,
        clocks=(
            Clocks(tile_m=64, around=2572, products=1.867, scores=1678, block=13, shared=0.448),
            Clocks(tile_m=128, around=4662, products=1.486, shared=0.15),
        ),
    ),
    "a3": AttentionPreset(
        summary="attention, wgmma, version a3: a producer warp, softmax overlapped with MMAs",
        allowed={**_ALLOWED, "tile_m": (64, 128, 192), "ctas_per_sm": (1, 2), "is_varlen": (False, True)},
        tiles=_PRODUCER_TILES,
        clocks=(
            Clocks(tile_m=64, around=1842, products=1.139, scores=682, block=70, start=1067),
            Clocks(tile_m=128, around=5880, products=0.904, scores=314, block=442),
            Clocks(tile_m=192, around=4972, products=0.473, scores=750, block=590),
        ),
    ),
    "a4": AttentionPreset(
        summary="attention, wgmma, version a4: persistent, stores by TMA",
        schedule="persistent",
        allowed={**_ALLOWED, "tile_m": (128, 192), "q_stages": (1, 2)},
        tiles=_PRODUCER_TILES,
        # With a second slot of queries, a tile can begin while the previous tile is stored.
        clocks=(
            Clocks(tile_m=128, q_stages=1, around=7149, products=1.06, scores=244),
            Clocks(tile_m=128, q_stages=2, around=2575, products=0.62, scores=1063, block=135, start=3209),
            Clocks(tile_m=192, q_stages=1, around=4972, products=0.473, scores=750, block=590),
            Clocks(tile_m=192, q_stages=2, around=2228, products=0.768, scores=711, block=100, start=3840),
        ),
    ),
    "mma_sync": AttentionPreset(
        summary="attention, mma.sync: for SM120, a producer warp",
        template="a3",
        mma="mma_sync",
        allowed={**_ALLOWED, "is_varlen": (False, True)},
        tiles=_MMA_SYNC_TILES,
        clocks=(Clocks(tile_m=64, around=2000, products=12), Clocks(tile_m=128, around=2000, products=10)),
    ),
    "decode": AttentionPreset(
        summary="attention of a few queries to a cache, wgmma, keys split among CTAs",
        template="decode",
        is_decode=True,
        allowed=_DECODE_ALLOWED,
        tiles=_DECODE_TILES,
    ),
    "decode_mma_sync": AttentionPreset(
        summary="attention of a few queries to a cache, mma.sync: for SM120, keys split among CTAs",
        mma="mma_sync",
        template="decode",
        is_decode=True,
        allowed=_DECODE_ALLOWED,
        tiles=_DECODE_TILES,
    ),
    "decode_fp8": AttentionPreset(
        summary="attention of a few queries to an e4m3 cache, mma.sync, keys split among CTAs and warps",
        mma="mma_sync",
        template="decode",
        is_decode=True,
        kv_bytes=1,
        allowed={**_DECODE_ALLOWED, "tile_m": (16,), "tile_n": (64, 128)},
        tiles=dict.fromkeys(HEAD_DIMS, (Tile(m=16, n=128, ctas_per_sm=2), Tile(m=16, n=128), Tile(m=16, n=64))),
    ),
}
#: The versions that attention_decode() can launch.
DECODE_VERSIONS = tuple(version for version, preset in PRESETS.items() if preset.is_decode)
#: The ways in which a caller of attention() can select a version.
VERSIONS = Versions(
    "attention",
    "CUDATMA_ATTENTION_VERSION",
    tuple(version for version in PRESETS if version not in DECODE_VERSIONS),
)

#: Number of rows of a wgmma.
_WARPGROUP_ROWS = 64
#: Minimum number of rows per box, because the swizzle repeats every 8 rows.
MIN_BOX_ROWS = 8
#: Maximum number of registers for scores, probabilities and output without spills, keyed by the number of consumer
#: warpgroups. With capped scores, the number is smaller.
_MAX_HELD, _MAX_HELD_WITH_CAP = {1: 176, 2: 200, 3: 128}, {1: 160, 2: 188, 3: 120}
#: Number of registers per thread after setmaxnreg, keyed by the number of consumer warpgroups. A single warpgroup needs
#: setmaxnreg only if CTAs share the SM.
_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = {1: 208, 2: 240, 3: 160}, {1: 40, 2: 24, 3: 32}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig(KernelConfig):
    """A configuration of a version's template.

    Attributes
    ----------
    version : str
        A key of PRESETS.
    dtype, head_dim, v_head_dim, is_causal, has_window, has_softcap, has_sink
        See Problem.
    tile_m : int
        Number of queries in a CTA's tile, 64 per consumer warpgroup.
    tile_n : int
        Number of keys per stage.
    stages : int
        Number of stages of the ring.
    q_stages : int
        Number of query tiles in shared memory.
    ctas_per_sm : int
        Number of CTAs per SM.
    is_varlen : bool
        Whether variable-length sequences are concatenated.
    is_paged : bool
        Whether the cache consists of pages.
    box_rows : int
        Number of keys in a TMA box, which must be in one page of the cache, or 0 if cp.async copies each row.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If a field is invalid.
    """

    version: str
    dtype: str
    head_dim: int
    v_head_dim: int
    is_causal: bool = False
    has_window: bool = False
    has_softcap: bool = False
    has_sink: bool = False
    tile_m: int
    tile_n: int
    stages: int = 2
    q_stages: int = 1
    ctas_per_sm: int = 1
    is_varlen: bool = False
    is_paged: bool = False
    box_rows: int = 0

    function: ClassVar[str] = "attention"
    presets: ClassVar[Mapping[str, AttentionPreset]] = PRESETS
    revision: ClassVar[int] = 5

    def __post_init__(self) -> None:
        self.check_values()
        check_kind(self)
        if self.ctas_per_sm > 1 and self.warpgroups > 1:
            raise ArgumentError("ctas_per_sm", self.ctas_per_sm, "1 for a tile with several warpgroups")
        limit = (_MAX_HELD_WITH_CAP if self.has_softcap else _MAX_HELD)[self.warpgroups]
        if self.reallocates_registers and self.held_registers > limit:
            allowed = f"small enough that scores, probabilities and output need at most {limit} registers"
            remedy = f"reduce tile_n; this tile needs {self.held_registers} registers"
            raise ArgumentError("tile_n", self.tile_n, allowed, remedy)
        if self.preset.loader == "cp_async":
            rows = 128 * self.warpgroups // (self.span_bytes // 16)
            if self.tile_n % rows:
                allowed = f"a multiple of {rows} (the number of rows that all threads copy at a time)"
                raise ArgumentError("tile_n", self.tile_n, allowed)
        if not self.is_decode:
            if self.box_rows:
                raise ArgumentError("box_rows", self.box_rows, "0 for a kernel that does not read a cache")
            return
        if not self.is_paged and self.box_rows != self.tile_n:
            raise ArgumentError(
                "box_rows",
                self.box_rows,
                f"{self.tile_n} (the number of keys per block) for a cache without pages",
            )
        if self.box_rows and (self.box_rows < MIN_BOX_ROWS or self.tile_n % self.box_rows):
            raise ArgumentError("box_rows", self.box_rows, f"0 or a divisor of tile_n that is at least {MIN_BOX_ROWS}")
        if self.kv_bytes == 1 and not self.box_rows:
            allowed = f"at least {MIN_BOX_ROWS} for an e4m3 cache (TMA must load it)"
            raise ArgumentError("box_rows", self.box_rows, allowed)

    def check_problem(self, problem: Problem) -> None:
        """Raise ArgumentError if the kernel cannot run a problem."""
        if problem.is_varlen != self.is_varlen:
            raise ArgumentError("is_varlen", problem.is_varlen, f"{self.is_varlen} for {self.entry}")
        if self.is_decode:
            self._check_cache(problem)

    def _check_cache(self, problem: Any) -> None:
        """Raise ArgumentError if the kernel cannot read the cache of a DecodeProblem."""
        if problem.has_fp8_cache != (self.kv_bytes == 1):
            dtype = CACHE_TYPE if problem.has_fp8_cache else problem.dtype
            serving = [name for name in DECODE_VERSIONS if (PRESETS[name].kv_bytes == 1) == problem.has_fp8_cache]
            raise ArgumentError("version", self.version, f"{quoted(serving)} for a cache of {dtype}")
        if (problem.page_size > 0) != self.is_paged:
            raise ArgumentError("is_paged", self.is_paged, f"{not self.is_paged} to match the cache")
        if self.is_paged and self.box_rows and problem.page_size % self.box_rows:
            allowed = f"0 or a divisor of {problem.page_size} (the number of keys per page)"
            raise ArgumentError("box_rows", self.box_rows, allowed)

    # ---- Version

    @property
    def preset(self) -> AttentionPreset:
        """Preset of this version."""
        return PRESETS[self.version]

    @property
    def template(self) -> str:
        return f"kernels/attention_{self.preset.template or self.version}.cu.j2"

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features that the target must have."""
        tma = ("tma",) if self.preset.loader in ("consumers", "producer_warp") else ()
        mma = () if self.preset.mma == "scalar" else (self.preset.mma, "stmatrix")
        return ("griddepcontrol", *tma, *mma, *(("setmaxnreg",) if self.reallocates_registers else ()))

    @property
    def is_decode(self) -> bool:
        return self.preset.is_decode

    @property
    def kv_bytes(self) -> int:
        """Bytes per element of k and v."""
        return self.preset.kv_bytes

    @property
    def is_persistent(self) -> bool:
        """Whether a CTA computes several tiles and TMA stores their results."""
        return self.preset.schedule == "persistent"

    @property
    def reallocates_registers(self) -> bool:
        """Whether setmaxnreg moves registers from a producer warpgroup to the consumers.

        The consumers then overlap softmax with MMAs.
        """
        return self.preset.loader == "producer_warp" and self.has_wgmma and not self.is_decode

    @property
    def by_tma(self) -> bool:
        """Whether TMA loads keys and values."""
        return "tma" in self.features and not (self.is_decode and self.box_rows == 0)

    @property
    def options(self) -> tuple[KernelOption, ...]:
        """Options of the generated kernel."""
        return tuple(option for option in OPTIONS if getattr(self, option.field))

    @property
    def has_upper(self) -> bool:
        """Whether the mask excludes keys after a query's position."""
        return self.is_causal or self.has_window

    @property
    def entry(self) -> str:
        dims = str(self.head_dim) if self.head_dim == self.v_head_dim else f"{self.head_dim}_{self.v_head_dim}"
        names = [self.version, self.mma_type, f"d{dims}", *(option.name for option in self.options)]
        names += ["varlen"] if self.is_varlen else []
        names += [f"n{self.tile_n}" if self.is_decode else f"{self.tile_m}x{self.tile_n}", f"s{self.stages}"]
        names += [f"b{self.ctas_per_sm}"] if self.is_decode or self.ctas_per_sm > 1 else []
        names += [f"q{self.q_stages}"] if self.is_persistent else []
        names += [f"paged{self.box_rows}" if self.by_tma else "rows"] if self.is_paged else []
        return f"attention_{'_'.join(names)}"

    # ---- Launch parameters

    @property
    def parameter_names(self) -> tuple[str, ...]:
        q_by_tma = "tma" in self.features and not self.is_decode
        names = ["q_map" if q_by_tma else "q", *(("k_map", "v_map") if self.by_tma else ("k", "v"))]
        names += OFFSETS if self.is_varlen else ()
        names += ["seqlens"] if self.is_decode else []
        names += ["page_table"] if self.is_paged else []
        names += ["output_map" if self.is_persistent else "output_rows", "lse"]
        names += [name for option in self.options for name in option.parameters]
        names += ["tile_counter"] if self.is_persistent else []
        names += ["partials", "counters"] if self.is_decode else []
        names += ["k_scale", "v_scale"] if self.kv_bytes == 1 else []
        return (*names, "problem")

    @property
    def problem_names(self) -> tuple[str, ...]:
        names = [member.name for option in self.options for member in option.members]
        names += () if self.by_tma else KV_ROWS
        if self.is_decode:
            names += DECODE
            names += PAGES if self.is_paged else ()
            names += () if self.by_tma else ("pages",)
            names += KV_SCALES if self.kv_bytes == 1 else ()
            return tuple(names)
        names += (*TILES, *(RASTER if self.is_causal else HEAD_BY_HEAD))
        names += () if self.by_tma else Q_ROWS
        names += () if self.is_persistent else OUTPUT_ROWS
        names += VARLEN if self.is_varlen else ()
        return tuple(names)

    @property
    def struct_members(self) -> Mapping[str, Member]:
        """Members of ``Problem``, in the order of the struct."""
        return DECODE_MEMBERS if self.is_decode else MEMBERS

    # ---- Warps and registers

    @property
    def warpgroups(self) -> int:
        """Number of consumer warpgroups."""
        return int(ceil_div(self.tile_m, _WARPGROUP_ROWS))

    @property
    def consumer_warps(self) -> int:
        return 4 * self.warpgroups

    @property
    def producer_warps(self) -> int:
        """Number of producer warps: 4 with setmaxnreg, which applies to whole warpgroups, otherwise 1."""
        return (4 if self.reallocates_registers else 1) if self.preset.loader == "producer_warp" else 0

    @property
    def consumer_registers(self) -> int:
        """Number of registers per consumer thread after setmaxnreg, or 0 without setmaxnreg."""
        is_set = self.reallocates_registers and (self.warpgroups > 1 or self.ctas_per_sm > 1)
        return _CONSUMER_REGISTERS[self.warpgroups] if is_set else 0

    @property
    def producer_registers(self) -> int:
        return _PRODUCER_REGISTERS[self.warpgroups]

    @property
    def held_registers(self) -> int:
        """Number of registers per consumer thread for the output and for the scores and probabilities of a block."""
        return self.tile_n // 2 + self.tile_n // 4 + self.v_head_dim // 2

    # ---- Operands and their boxes

    @property
    def mma_type(self) -> str:
        """Name of q's type in MMA instructions."""
        return OPERAND_TYPES[self.dtype]

    @property
    def is_bf16(self) -> bool:
        return self.dtype == "bfloat16"

    @property
    def span_bytes(self) -> int:
        """Width in bytes of the widest swizzle that divides the rows of all operands."""
        return math.gcd(self.kv_bytes * self.head_dim, self.kv_bytes * self.v_head_dim, 128)

    @property
    def span(self) -> int:
        """Number of elements in a row of the swizzle."""
        return self.span_bytes // self.kv_bytes

    @property
    def swizzle(self) -> str:
        """Name of the swizzle in a tensor map."""
        return f"{self.span_bytes}B"

    @property
    def q_box(self) -> tuple[int, int, int, int]:
        """Box size of q and of the result as (sequences, rows, heads, columns)."""
        return (1, self.tile_m, 1, self.span)

    @property
    def kv_box(self) -> tuple[int, int, int, int]:
        """Box size of k and v as (sequences or pages, keys, heads, columns)."""
        return (1, self.box_rows if self.is_decode else self.tile_n, 1, self.span)

    @property
    def tile_k(self) -> int:
        """Number of keys per stage, the mainloop's equivalent of elements of K."""
        return self.tile_n

    @property
    def partial_row_bytes(self) -> int:
        """Bytes per row of attention_decode()'s workspace: output sums, maximum logit and sum of exponentials."""
        return 4 * (self.v_head_dim + 2)

    # ---- Shared memory

    @property
    def block_bytes(self) -> tuple[int, int]:
        """Bytes of a block of keys, and bytes of a block of values."""
        row_bytes = self.kv_bytes * self.tile_n
        return row_bytes * self.head_dim, row_bytes * self.v_head_dim

    @property
    def loaded_stage_bytes(self) -> int:
        return sum(self.block_bytes)

    def epilogue_parts(self) -> tuple[tuple[str, int], ...]:
        """Return (name, bytes) of the array of queries and of the arrays that accompany it.

        The result reuses the memory of the queries.
        """
        slots = self.q_stages * MBARRIER_BYTES
        if self.preset.mma == "scalar":
            return ()
        if self.kv_bytes == 1:  # The queries are in registers.
            return (("warp_sums", 8 * self.consumer_warps * self.tile_m), ("is_last", 8))
        queries = ("q", self.q_stages * 2 * self.tile_m * self.head_dim)
        if self.is_decode:
            return (queries, ("is_last", 8))
        if self.is_persistent:
            barriers = (("q_full_barriers", slots), ("q_empty_barriers", slots), ("staged_barriers", slots))
            return (queries, ("tiles", 8), *barriers)
        return (queries, ("q_barrier", slots)) if self.by_tma else (queries,)

    def stage_arrays(self) -> tuple[tuple[str, int], ...]:
        k_bytes, v_bytes = self.block_bytes
        return (("k", k_bytes), ("v", v_bytes))

    @property
    def barriers(self) -> tuple[str, ...]:
        rings = {"consumers": ("full", "empty"), "producer_warp": ("k_full", "k_empty", "v_full", "v_empty")}
        return rings.get(self.preset.loader, ())

    def stage_layout(self) -> list[tuple[str, int]]:
        """Return (description, bytes) for each array in a stage."""
        k, v = self.block_bytes
        dtype = self.dtype if self.kv_bytes == 2 else CACHE_TYPE
        return [
            (f"keys {self.tile_n} x {self.head_dim} {dtype}, {self.swizzle} swizzle", k),
            (f"values {self.tile_n} x {self.v_head_dim} {dtype}, {self.swizzle} swizzle", v),
        ]

    # ---- Choice and tuning

    def ctas(self, problem: Problem, sm_count: int) -> int:
        """Return the number of CTAs of a launch: one per tile, or one per SM if CTAs are persistent."""
        tiles = problem.batch * problem.heads * int(ceil_div(problem.q_length, self.tile_m))
        return min(tiles, sm_count) if self.is_persistent else tiles

    def variants(self, problem: Problem) -> Iterator[Mapping[str, Any]]:
        """Yield changes of fields that shorten the ring."""
        if self.stages > 2:
            yield {"stages": self.stages - 1}

    def adapted(self, problem: Problem) -> AttentionConfig | None:
        """Return this tile with the problem's dtype and options."""
        if (problem.head_dim, problem.v_head_dim) != (self.head_dim, self.v_head_dim):
            return None
        return replace(self, **{name: getattr(problem, name) for name in PROBLEM_FIELDS})

    def cost_at(self, m: Any, problem: Problem, gpu: Gpu) -> Cost:
        """Return the predicted time for M = ``m``, an int or int64 array. The problem's own M is ignored."""
        return cost_at(self, m, problem, gpu)
