"""Operations and arguments of the kernel that executes one TMA operation (ptx_templates/probes/tma_case.cu.j2)."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from typing import Any

TEMPLATE = "probes/tma_case.cu.j2"
REDUCTIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")
MAX_EDITS = 32
#: Operations and types of cp.reduce.async.bulk into global and into shared memory. [PTX ISA, cp.reduce.async.bulk]
BULK_TYPES: dict[str, tuple[str, ...]] = {
    "add": ("u32", "s32", "u64", "f16", "bf16", "f32", "f64"),
    "min": ("u32", "s32", "u64", "s64", "f16", "bf16"),
    "max": ("u32", "s32", "u64", "s64", "f16", "bf16"),
    "inc": ("u32",),
    "dec": ("u32",),
    "and": ("b32", "b64"),
    "or": ("b32", "b64"),
    "xor": ("b32", "b64"),
}
SHARED_TYPES: dict[str, tuple[str, ...]] = {
    "add": ("u32", "s32", "u64"),
    "min": ("u32", "s32"),
    "max": ("u32", "s32"),
    "inc": ("u32",),
    "dec": ("u32",),
    "and": ("b32",),
    "or": ("b32",),
    "xor": ("b32",),
}
#: Fields of tensormap.replace whose value is an immediate, and the values that ptxas takes for sm_90a.
IMMEDIATE_FIELDS = {
    "elemtype": range(13),
    "interleave_layout": range(3),
    "swizzle_mode": range(4),
    "fill_mode": range(2),
}
ORDINAL_FIELDS = {"box_dim": 5, "global_dim": 5, "element_stride": 5, "global_stride": 4}


def _bulk_reductions() -> list[tuple[str, str]]:
    found = []
    for op, types in BULK_TYPES.items():
        for kind in types:
            noftz = ".noftz" if op == "add" and kind in ("f16", "bf16") else ""
            text = f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{op}{noftz}.{kind}"
            found.append((f"bulk_{op}_{kind}", text))
    return found


def _shared_copies() -> list[tuple[str, str]]:
    end = "shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
    found = [("shared_copy", f"cp.async.bulk.{end}")]
    for op, types in SHARED_TYPES.items():
        found += [(f"shared_{op}_{kind}", f"cp.reduce.async.bulk.{end}.{op}.{kind}") for kind in types]
    return found


def _operations() -> dict[str, str]:
    """Return the call for each operation by name."""
    calls: dict[str, str] = {}
    for rank in range(1, 6):
        at = ", ".join(f"c[{i}]" for i in range(rank))
        calls[f"tile_load_{rank}"] = f"cp_async_bulk_tensor_{rank}d_load(dst, map, bar, {at})"
        calls[f"tile_store_{rank}"] = f"cp_async_bulk_tensor_{rank}d_store(map, src, {at})"
        calls[f"tile_prefetch_{rank}"] = f"cp_async_bulk_prefetch_tensor_{rank}d(map, {at})"
        calls[f"tile_multicast_{rank}"] = f"cp_async_bulk_tensor_{rank}d_load_multicast(dst, map, bar, {at}, r.targets)"
        for op in REDUCTIONS:
            calls[f"tile_{op}_{rank}"] = f"cp_reduce_async_bulk_tensor_{rank}d_{op}(map, src, {at})"
        if rank >= 3:
            off = ", ".join(f"o{i}" for i in range(rank - 2))
            calls[f"im2col_load_{rank}"] = f"cp_async_bulk_tensor_{rank}d_im2col_load(dst, map, bar, {at}, {off})"
            calls[f"im2col_store_{rank}"] = f"cp_async_bulk_tensor_{rank}d_im2col_store(map, src, {at})"
            calls[f"im2col_prefetch_{rank}"] = f"cp_async_bulk_prefetch_tensor_{rank}d_im2col(map, {at}, {off})"
            for op in REDUCTIONS:
                calls[f"im2col_{op}_{rank}"] = f"im2col_{op}_{rank}(map, src, c)"
    pointer = "reinterpret_cast<u8*>(r.global)"
    calls["nothing"] = ""
    calls["bulk_load"] = f"cp_async_bulk_load(dst, {pointer}, r.size, bar)"
    calls["bulk_multicast"] = f"cp_async_bulk_load_multicast(dst, {pointer}, r.size, bar, r.targets)"
    calls["bulk_store"] = f"cp_async_bulk_store({pointer}, src, r.size)"
    calls["bulk_prefetch"] = f"cp_async_bulk_prefetch({pointer}, r.size)"
    calls |= {name: f"{name}(r.global, src, r.size)" for name, _ in _bulk_reductions()}
    calls |= {name: f"{name}(there, src, r.size, there_bar)" for name, _ in _shared_copies()}
    return calls


def _edits() -> dict[tuple[str, int], str]:
    """Return the call for each (field, ordinal or immediate value) of tensormap.replace."""
    calls = {("global_address", 0): "tensormap_replace_global_address(map, reinterpret_cast<const void*>(value))"}
    calls["rank", 0] = "tensormap_replace_rank(map, value)"
    for field, count in ORDINAL_FIELDS.items():
        calls |= {(field, i): f"tensormap_replace_{field}<{i}>(map, value)" for i in range(count)}
    for field, values in IMMEDIATE_FIELDS.items():
        calls |= {(field, i): f"tensormap_replace_{field}<{i}>(map)" for i in values}
    return calls


OPERATIONS = {name: code for code, name in enumerate(_operations())}
EDITS = {key: code for code, key in enumerate(_edits())}


@dataclass(frozen=True)
class TmaCase:
    """The config of the kernel."""

    entry: str = "tma_case"

    @cached_property
    def reductions(self) -> tuple[str, ...]:
        return REDUCTIONS

    @cached_property
    def bulk_reductions(self) -> list[tuple[str, str]]:
        return _bulk_reductions()

    @cached_property
    def shared_copies(self) -> list[tuple[str, str]]:
        return _shared_copies()

    @cached_property
    def calls(self) -> list[tuple[int, str]]:
        return list(enumerate(_operations().values()))

    @cached_property
    def edits(self) -> list[tuple[int, str]]:
        return list(enumerate(_edits().values()))


def request_bytes(case: dict[str, Any], expected: int, gmem: int, settle: int) -> bytes:
    """Return the Request of a case. ``expected`` is in bytes, ``gmem`` an address, and ``settle`` in ns."""
    edits = case.get("edits", [])
    coords = [*case.get("coords", []), 0, 0, 0, 0, 0][:5]
    offsets = [*case.get("offsets", []), 0, 0, 0][:3]
    codes, values = [], []
    for field, ordinal, value in edits:
        codes.append(EDITS[field, value if field in IMMEDIATE_FIELDS else ordinal])
        values.append((gmem + value if field == "global_address" else value) & (1 << 64) - 1)
    codes += [0] * (MAX_EDITS - len(codes))
    values += [0] * (MAX_EDITS - len(values))
    head = (OPERATIONS[case["op"]], case["window"], case.get("to", 0), case.get("from", 0), case.get("size", 0))
    cluster = (case.get("cluster", 0), case.get("peer", 0), case.get("targets", 1), 0)
    tail = (*coords, *offsets, *values, *codes)
    return struct.pack(
        f"<12IQ5i3I{MAX_EDITS}Q{MAX_EDITS}I",
        *head,
        expected,
        settle,
        len(edits),
        *cluster,
        gmem + case.get("gmem_at", 0),
        *tail,
    )
