"""Members and device layout of the struct that a launch passes to its kernel by value.

A kernel's config lists the members that the kernel reads. The template declares the struct from this list
(``parts/problem.cuh.j2``), and ``pack()`` lays out the values as C does. MEMBERS lists the
members for kernels that compute tiles of a result: sizes, schedule, raster order and rows. ``parts/schedule.cuh.j2``
and ``parts/store_vector.cuh.j2`` read these members.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from cudatma.kernels.schedule import DivisorStruct, Schedule, divisor

_TYPES: dict[str, Any] = {
    "u32": ctypes.c_uint32,
    "u64": ctypes.c_uint64,
    "float": ctypes.c_float,
    "Divisor": DivisorStruct,
}
#: Members that parts/raster.cuh.j2 and parts/schedule.cuh.j2 read.
RASTER = ("tiles_m", "tiles_n", "raster_m", "by_raster_group", "by_raster_group_rows", "by_last_rows")
STREAM_K = ("k_iterations", "work_ranges", "stream_tiles", "stream_stages", "stream_extra", "by_k_iterations", *RASTER)
#: Members that parts/store_vector.cuh.j2 reads.
RESULT = ("m", "n", "output_vectors", "output_pitch")
_FORMATS = {"u32": "I", "u64": "Q", "float": "f", "Divisor": "II"}
_ORDER = ("u32", "float", "Divisor", "u64")


@dataclass(frozen=True, slots=True)
class Member:
    """A member of a launch struct.

    Attributes
    ----------
    type : str
        "u32", "u64", "float" or "Divisor".
    meaning : str
        Comment for the member in the template.
    """

    name: str
    type: str
    meaning: str

    @property
    def declaration(self) -> str:
        """Declaration in CUDA, padded so that comments line up."""
        return f"{self.type} {self.name};".ljust(32)


#: Number of rows of the result in a raster group of tiles. A wave computes a group column by column, so that the tiles
#: of A and B stay in L2.
_RASTER_GROUP_M = 2048
MEMBERS: dict[str, Member] = {
    member.name: member
    for member in (
        Member("m", "u32", "number of rows of the result"),
        Member("n", "u32", "number of columns of the result"),
        Member("k", "u32", "size of the K dimension"),
        Member("tiles_m", "u32", "number of output tiles along M"),
        Member("tiles_n", "u32", "number of output tiles along N (a CTA or a cluster computes one tile)"),
        Member("raster_m", "u32", "number of rows of tiles per raster group"),
        Member("k_iterations", "u32", "number of stages per tile"),
        Member("work_ranges", "u32", "number of work ranges, one per cluster or, without clusters, per CTA"),
        Member("stream_tiles", "u32", "number of leading tiles that are split among all work ranges"),
        Member("stream_stages", "u32", "number of stages per work range in the split tiles"),
        Member("stream_extra", "u32", "number of leading work ranges that have one additional stage"),
        Member("output_vectors", "u32", "1 if every row of the result is aligned to 16 bytes"),
        Member("by_k_iterations", "Divisor", "divides by k_iterations"),
        Member("by_raster_group", "Divisor", "divides by the number of tiles per raster group"),
        Member("by_raster_group_rows", "Divisor", "divides by raster_m"),
        Member("by_last_rows", "Divisor", "divides by the number of rows of tiles in the last raster group"),
        Member("output_pitch", "u64", "stride between rows of the result, in elements"),
    )
}


@lru_cache(maxsize=64)
def _structure(members: tuple[Member, ...]) -> type[ctypes.Structure]:
    fields = [(member.name, _TYPES[member.type]) for member in members]
    return type("LaunchStruct", (ctypes.Structure,), {"_fields_": fields})


def pack(members: tuple[Member, ...], values: Mapping[str, Any]) -> bytes:
    """Return the bytes of the struct, with each member at its alignment, as in C.

    ``values`` contains each value by name. The value of a ``Divisor`` is the divisor itself. Other names are
    ignored.
    """
    return packer(members)(values)


def packer(members: tuple[Member, ...], fixed: Mapping[str, Any] | None = None) -> Callable[[Mapping[str, Any]], bytes]:
    """Return a fast version of pack() for these members.

    ``fixed`` contains values that are the same in every call. The returned function does not look them up.
    """
    structure, layout, at = _structure(members), "<", 0
    flat: list[Any] = []
    plain: list[tuple[int, str]] = []
    divisors: list[tuple[int, str]] = []
    for member in members:
        offset = getattr(structure, member.name).offset
        layout += f"{offset - at}x" if offset > at else ""
        layout += _FORMATS[member.type]
        at = offset + ctypes.sizeof(_TYPES[member.type])
        is_divisor = member.type == "Divisor"
        if fixed is not None and member.name in fixed:
            flat += divisor(fixed[member.name]) if is_divisor else (fixed[member.name],)
        else:
            (divisors if is_divisor else plain).append((len(flat), member.name))
            flat += (0, 0) if is_divisor else (0,)
    pack_values = struct.Struct(layout + f"{ctypes.sizeof(structure) - at}x").pack

    def packed(values: Mapping[str, Any]) -> bytes:
        given = flat[:]
        for place, name in plain:
            given[place] = values[name]
        for place, name in divisors:
            given[place], given[place + 1] = divisor(values[name])
        return pack_values(*given)

    return packed


def offsets(members: tuple[Member, ...]) -> dict[str, int]:
    """Return the offset of each member in bytes."""
    structure = _structure(members)
    return {member.name: getattr(structure, member.name).offset for member in members}


def size_bytes(members: tuple[Member, ...]) -> int:
    """Return the size of the struct in bytes."""
    return ctypes.sizeof(_structure(members))


def in_order(known: Mapping[str, Member], names: Iterable[str]) -> tuple[Member, ...]:
    """Return the members with these names: 32-bit members, divisors, then 64-bit members, each in ``known``'s order."""
    selected = set(names)
    members = [member for member in known.values() if member.name in selected]
    return tuple(sorted(members, key=lambda member: _ORDER.index(member.type)))


def work_values(
    work: Schedule, m: int, n: int, k: int, tile_m: int, *, output_pitch: int = 0, output_vectors: bool = False
) -> dict[str, Any]:
    """Return the value of every member, by name.

    ``output_pitch`` is the row pitch of the result in elements. ``output_vectors`` is True if the rows of the result
    are aligned to 16 bytes.
    """
    raster_m = min(max(1, _RASTER_GROUP_M // tile_m), work.tiles_m)
    stream_stages, stream_extra = divmod(work.stream_units, work.work_ranges)
    return {
        "m": m,
        "n": n,
        "k": k,
        "tiles_m": work.tiles_m,
        "tiles_n": work.tiles_n,
        "raster_m": raster_m,
        "k_iterations": work.k_iterations,
        "work_ranges": work.work_ranges,
        "stream_tiles": work.stream_tiles,
        "stream_stages": stream_stages,
        "stream_extra": stream_extra,
        "output_vectors": int(output_vectors),
        "by_k_iterations": work.k_iterations,
        "by_raster_group": raster_m * work.tiles_n,
        "by_raster_group_rows": raster_m,
        "by_last_rows": (work.tiles_m - 1) % raster_m + 1,
        "output_pitch": output_pitch,
    }
