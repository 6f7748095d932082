"""The members of the ``Problem`` struct of the attention kernels, and the members that each kernel reads."""

from __future__ import annotations

from collections.abc import Mapping

from cudatma.kernels.attention.problem import OPTIONS
from cudatma.kernels.launch_struct import MEMBERS as WORK_MEMBERS
from cudatma.kernels.launch_struct import Member

#: Offsets of variable-length sequences.
OFFSETS = ("cu_seqlens_q", "cu_seqlens_k")


def _named(*members: Member) -> dict[str, Member]:
    return {member.name: member for member in members}


#: The members of the struct, in order.
MEMBERS: Mapping[str, Member] = WORK_MEMBERS | _named(
    Member("tiles_m", "u32", "number of query heads in all sequences"),
    Member("tiles_n", "u32", "number of query tiles per head"),
    Member("raster_heads", "u32", "number of heads per raster group"),
    Member("last_group", "u32", "first head of the last raster group"),
    Member("by_tiles_n", "Divisor", "divides by tiles_n"),
    Member("by_raster_tiles", "Divisor", "divides by the number of tiles per raster group"),
    Member("by_raster_heads", "Divisor", "divides by raster_heads"),
    Member("by_last_heads", "Divisor", "divides by the number of heads in the last raster group"),
    Member("q_length", "u32", "number of queries per sequence"),
    Member("k_length", "u32", "number of keys per sequence"),
    Member("heads", "u32", "number of query heads"),
    Member("q_total", "u32", "total number of queries across all sequences"),
    Member("k_total", "u32", "total number of keys across all sequences"),
    Member("scale_log2", "float", "multiplier for the scores (or their cap) before exp2"),
    *(member for option in OPTIONS for member in option.members),
    Member("by_heads", "Divisor", "divides by heads"),
    Member("by_group", "Divisor", "divides by the number of query heads per KV head"),
    Member("output_head", "u64", "stride between heads of the result, in elements"),
    Member("output_batch", "u64", "stride between sequences of the result, in elements"),
    *(
        Member(f"{name}_{step}", "u64", f"stride between {what}s of {name}, in elements")
        for name in ("q", "k", "v")
        for step, what in (("pitch", "row"), ("head", "head"), ("batch", "sequence"))
    ),
)
#: Members for attention_decode(). A row of a tile is one query of one of the query heads that share a KV head.
DECODE_MEMBERS: Mapping[str, Member] = {**MEMBERS} | _named(
    Member("q_length", "u32", "number of rows per sequence and KV head, which is queries * group"),
    Member("k_length", "u32", "maximum number of keys per sequence"),
    Member("upper", "u32", "row r attends to keys below r / group + upper + the sequence's number of keys; signed"),
    Member("lower", "u32", "row r attends to keys from r / group + lower + the sequence's number of keys; signed"),
    Member("queries", "u32", "number of queries per sequence and query head"),
    Member("group", "u32", "number of query heads per KV head"),
    Member("kv_heads", "u32", "number of KV heads"),
    Member("row_tiles", "u32", "number of row tiles per sequence and KV head"),
    Member("partial_rows", "u32", "number of rows per tile in the workspace"),
    Member("by_kv_heads", "Divisor", "divides by kv_heads"),
    Member("by_row_tiles", "Divisor", "divides by row_tiles"),
    Member("page_size", "u32", "number of keys per page"),
    Member("by_page_size", "Divisor", "divides by page_size"),
    Member("pages", "u32", "number of pages in the cache"),
    Member("v_scale", "float", "scale of v if there is no array of scales"),
    Member("k_scale_step", "u32", "stride between the scales of heads of k, in elements"),
    Member("v_scale_step", "u32", "stride between the scales of heads of v, in elements"),
    Member("table_pitch", "u32", "stride between rows of the page table, in entries"),
)

# Names of the members that the kernels read.
#: Members for sizes and scale, except in attention_decode().
TILES = ("tiles_m", "tiles_n", "q_length", "k_length", "heads", "by_heads", "by_group", "scale_log2")
#: Members for the order of causal tiles, and for the order of all other tiles.
RASTER = ("raster_heads", "last_group", "by_raster_tiles", "by_raster_heads", "by_last_heads")
HEAD_BY_HEAD = ("by_tiles_n",)
VARLEN = ("q_total", "k_total")
#: Members for results that threads store.
OUTPUT_ROWS = ("output_pitch", "output_head", "output_batch")
#: Members for operands that threads load.
Q_ROWS, KV_ROWS = (
    tuple(f"{name}_{step}" for name in names for step in ("pitch", "head", "batch")) for names in ("q", "kv")
)
DECODE = (
    *("q_length", "k_length", "queries", "heads", "group", "kv_heads", "row_tiles", "partial_rows", "scale_log2"),
    *("by_kv_heads", "by_row_tiles", "by_group", *Q_ROWS, *OUTPUT_ROWS),
)
PAGES = ("page_size", "by_page_size", "table_pitch")
KV_SCALES = ("v_scale", "k_scale_step", "v_scale_step")
