"""The kernels of attention_decode: four warps for all queries of a head of k and v, and one that loads.

decode_spec() returns the one that serves a problem.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from cudatma.errors import ArgumentError
from cudatma.kernels.attention.problem import DecodeProblem
from cudatma.kernels.attention.spec import MEMBERS, OUTPUT_ROWS, SPEC_FIELDS
from cudatma.kernels.attention.versions import AttentionWithProducer
from cudatma.kernels.launch_struct import Member
from cudatma.target import Target

#: Rows of a box at least: the swizzle repeats after as many.
LEAST_BOX_ROWS = 8
#: (CTAs of an SM, keys of a block): the first that holds _ENOUGH_STAGES is chosen, else the first that holds two.
_SHAPES, _ENOUGH_STAGES, _MOST_STAGES = ((2, 64), (1, 64), (1, 32), (1, 16)), 3, 8
_FP8_SHAPES = ((2, 128), (1, 128), (1, 64))
_MEMBERS = MEMBERS | {
    member.name: member
    for member in (
        Member("q_length", "u32", "rows of a sequence and a head of k: queries of all heads that share it"),
        Member("k_length", "u32", "keys that a sequence may have"),
        Member("upper", "u32", "row r sees keys below r / group + upper + keys of the sequence, a signed number"),
        Member("lower", "u32", "row r sees keys from r / group + lower + keys of the sequence on, a signed number"),
        Member("queries", "u32", "of a sequence and a head"),
        Member("group", "u32", "heads of q that share one of k and v"),
        Member("kv_heads", "u32", "of k and v"),
        Member("row_tiles", "u32", "tiles of rows"),
        Member("partial_rows", "u32", "rows of a tile that the workspace holds"),
        Member("by_kv_heads", "Divisor", "divides by kv_heads"),
        Member("by_row_tiles", "Divisor", "divides by row_tiles"),
        Member("page_size", "u32", "keys of a page"),
        Member("by_page_size", "Divisor", "divides by page_size"),
        Member("pages", "u32", "of the cache"),
        Member("v_scale", "float", "scale of v, if the kernel is given no array of them"),
        Member("k_scale_step", "u32", "from the scale of a head of k to that of the next"),
        Member("v_scale_step", "u32", "from the scale of a head of v to that of the next"),
        Member("table_pitch", "u32", "entries from one sequence's pages to the next one's"),
    )
}
_NAMES = (
    *("q_length", "k_length", "queries", "heads", "group", "kv_heads", "row_tiles", "partial_rows", "scale_log2"),
    *("by_kv_heads", "by_row_tiles", "by_group", "q_pitch", "q_head", "q_batch", *OUTPUT_ROWS),
)
_PAGES = ("page_size", "by_page_size", "table_pitch")
_ROWS = ("pages", *(f"{name}_{step}" for name in ("k", "v") for step in ("pitch", "head", "batch")))


@dataclass(frozen=True, slots=True)
class AttentionDecode(AttentionWithProducer):
    """A CTA has 64 rows: queries of the heads that share a head of k and v, and a part of a sequence's keys. By wgmma.

    is_paged: whether the cache consists of pages. box_rows: keys of one box of TMA, which lie in one page; 0: cp.async
    copies each row by itself."""

    block_m: int = 64
    block_n: int = 64
    warpgroups: int = 1
    blocks_per_sm: int = 1  # type: ignore[misc]
    is_paged: bool = False
    box_rows: int = 64

    version: ClassVar[str] = "decode"
    template: ClassVar[str] = "kernels/attention_decode.cu.j2"
    is_decode: ClassVar[bool] = True
    struct_members: ClassVar[Mapping[str, Member]] = _MEMBERS
    allowed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **AttentionWithProducer.allowed,
        "blocks_per_sm": (1, 2),
        "is_varlen": (False,),
        "is_paged": (False, True),
    }

    def __post_init__(self) -> None:
        super(AttentionDecode, self).__post_init__()
        if not self.is_paged and self.box_rows != self.block_n:
            raise ArgumentError("box_rows", self.box_rows, f"{self.block_n}, all keys of a block, without pages")
        if self.box_rows and (self.box_rows < LEAST_BOX_ROWS or self.block_n % self.box_rows):
            raise ArgumentError("box_rows", self.box_rows, f"0, or {LEAST_BOX_ROWS} and more that divide block_n")

    @property
    def by_tma(self) -> bool:
        """Whether TMA loads keys and values."""
        return self.box_rows > 0

    @property
    def table(self) -> str:
        """The table of pages, in CUDA."""
        return "page_table" if self.is_paged else "nullptr"

    @property
    def kv_box(self) -> tuple[int, int, int, int]:
        """Pages or sequences, keys, heads and columns of a box of k and v, as the array has its axes."""
        return (1, self.box_rows, 1, self.span)

    @property
    def parameter_names(self) -> tuple[str, ...]:
        cache = ("k_map", "v_map") if self.by_tma else ("k", "v")
        table = ("page_table",) if self.is_paged else ()
        written = ("output_rows", "lse", *self.sink_names, "partials", "counters")
        return ("q", *cache, "seqlens", *table, *written, "problem")

    @property
    def problem_names(self) -> tuple[str, ...]:
        return _NAMES + (_PAGES if self.is_paged else ()) + (() if self.by_tma else _ROWS) + self.mask_names

    @property
    def tile_name(self) -> str:
        pages = (f"_paged{self.box_rows}" if self.by_tma else "_rows") if self.is_paged else ""
        return f"n{self.block_n}_s{self.stages}_b{self.blocks_per_sm}{pages}"

    def epilogue_parts(self) -> tuple[tuple[str, int], ...]:
        """Queries, whose place the results take, and whether the CTA is the last one of its tile."""
        return (("q", 2 * self.block_m * self.head_dim), ("is_last", 8))

    def partial_row_bytes(self) -> int:
        """Of a row that the workspace holds: sums, their maximum and the sum of exponentials."""
        return 4 * (self.v_head_dim + 2)


@dataclass(frozen=True, slots=True)
class AttentionDecodeP1(AttentionDecode):
    """AttentionDecode by mma.sync, for SM120."""

    version: ClassVar[str] = "decode_p1"
    has_wgmma: ClassVar[bool] = False
    features: ClassVar[tuple[str, ...]] = ("griddepcontrol", "tma", "mma_sync", "stmatrix")


@dataclass(frozen=True, slots=True)
class AttentionDecodeFp8(AttentionDecode):
    """AttentionDecode of e4m3 keys and values, by mma.sync: a CTA has 16 rows, and each warp a quarter of a block's
    keys, which it converts in registers."""

    block_m: int = 16
    block_n: int = 128
    box_rows: int = 128

    version: ClassVar[str] = "decode_fp8"
    template: ClassVar[str] = "kernels/attention_decode_fp8.cu.j2"
    kv_bytes: ClassVar[int] = 1
    has_wgmma: ClassVar[bool] = False
    features: ClassVar[tuple[str, ...]] = ("griddepcontrol", "tma", "mma_sync")
    allowed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **AttentionDecode.allowed,
        "block_m": (16,),
        "block_n": (64, 128),
        "warpgroups": (1,),
    }

    def __post_init__(self) -> None:
        super(AttentionDecodeFp8, self).__post_init__()
        if not self.by_tma:
            raise ArgumentError("box_rows", self.box_rows, "rows that TMA loads")

    def check_block_m(self) -> None:
        """All warps have the same rows."""

    @property
    def span_bytes(self) -> int:
        """The widest swizzle of which rows of both operands are multiples."""
        return math.gcd(self.head_dim, self.v_head_dim, 128)

    @property
    def parameter_names(self) -> tuple[str, ...]:
        *others, problem = super(AttentionDecodeFp8, self).parameter_names
        return (*others, "k_scale", "v_scale", problem)

    @property
    def problem_names(self) -> tuple[str, ...]:
        return (*super(AttentionDecodeFp8, self).problem_names, "v_scale", "k_scale_step", "v_scale_step")

    def epilogue_parts(self) -> tuple[tuple[str, int], ...]:
        """Each warp's maxima and sums, and whether the CTA is the last one of its tile."""
        return (("warp_sums", 8 * self.consumer_warps * self.block_m), ("is_last", 8))


def decode_spec(problem: DecodeProblem, target: Target) -> AttentionDecode:
    """Return the kernel for a problem."""
    fields = tuple(getattr(problem, name) for name in SPEC_FIELDS)
    return fitted_spec(fields, problem.page_size, target, problem.has_fp8_cache)


@lru_cache(maxsize=1024)
def fitted_spec(
    fields: tuple[Any, ...], page_size: int, target: Target, has_fp8_cache: bool = False
) -> AttentionDecode:
    """Return the kernel with the longest ring that fits shared memory.

    ``fields`` holds the SPEC_FIELDS of the problem; ``page_size`` is 0 without pages. Two CTAs share an SM if each has
    enough stages.
    """
    kind = AttentionDecodeFp8 if has_fp8_cache else AttentionDecode if target.has("wgmma") else AttentionDecodeP1
    fitting: list[AttentionDecode] = []
    for blocks_per_sm, block_n in _FP8_SHAPES if has_fp8_cache else _SHAPES:
        common = math.gcd(page_size, block_n)
        box_rows = block_n if not page_size else common if common >= LEAST_BOX_ROWS else 0
        rest: dict[str, Any] = {"is_paged": page_size > 0, "box_rows": box_rows, "block_n": block_n}
        rest["blocks_per_sm"] = blocks_per_sm
        for stages in range(_MOST_STAGES, 1, -1):
            spec = kind(*fields, **rest | {"stages": stages})
            if spec.smem_bytes <= target.smem_share_bytes(blocks_per_sm):
                if stages >= _ENOUGH_STAGES:
                    return spec
                fitting.append(spec)
                break
    return fitting[0]
