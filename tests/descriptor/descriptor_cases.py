"""Random tensor map configs as plain values, and mutations of them that break or bend one rule each."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from cudatma.descriptor.rules import CORNER_RANGE
from cudatma.dtypes import TMA_TYPES
from cudatma.layout import Swizzle

Fields = dict[str, Any]
PLAIN = [name for name, dtype in TMA_TYPES.items() if not dtype.packed]


def random_dims(rng: random.Random, rank: int) -> list[int]:
    """Return small, odd and huge dimensions."""
    return [min(1 << 32, max(1, int(2 ** rng.uniform(0, rng.choice((6, 12, 33)))))) for _ in range(rank)]


def random_strides(rng: random.Random, dims: list[int], element_bytes: int, multiple: int) -> list[int]:
    """Return dense pitches with padding or any multiple; some are 0 or overlap."""
    style, strides, extent = rng.random(), [], dims[0] * element_bytes
    for dim in dims[1:]:
        if style < 0.6 and extent < 1 << 39:
            stride = -(-extent // multiple) * multiple + multiple * rng.choice((0, 0, 1, 5))
        else:
            stride = multiple * rng.choice((0, 1, 3, rng.randrange(1 << 20), rng.randrange((1 << 40) // multiple)))
        strides.append(stride)
        extent = max(extent, stride * dim)
    return strides


def random_fields(rng: random.Random, addresses: dict[str, list[int]]) -> tuple[Fields, str]:
    """Return a spec for sm_90 as plain values, and the source of its address.

    Valid but for two things that both sides should notice: the box may be larger than shared memory, and the bounding
    box of im2col may be empty with interleave (the sizes are made to fit the dimensions that it has without) or beyond
    31 bits.
    """
    kind = rng.choice(("tiled", "tiled", "im2col"))
    rank = rng.randint(3, 5) if kind == "im2col" else rng.randint(1, 5)
    dtype = TMA_TYPES[rng.choice(PLAIN)]
    interleave = rng.choice((0, 0, 0, 1, 2)) if rank >= 3 else 0
    swizzle = 1 if interleave == 2 else rng.randint(0, 3)
    memory = rng.choice(sorted(addresses))
    dims = random_dims(rng, rank)
    multiple = 32 if interleave == 2 else 16
    fields: Fields = {
        "kind": kind,
        "dtype": dtype.name,
        "dims": dims,
        "strides_bytes": random_strides(rng, dims, dtype.element_bytes, multiple),
        "element_strides": [rng.choice((1, 1, 1, 2, 3, 8)) for _ in range(rank)],
        "interleave": interleave,
        "swizzle": swizzle,
        "l2_promotion": rng.randint(0, 3),
        "oob_fill": rng.randint(0, 1) if dtype.is_float else 0,
        "address": rng.choice(addresses[memory]),
    }
    widest = 2048 if interleave else Swizzle(swizzle).span_bytes or 2048
    most = min(256, widest // dtype.element_bytes)
    if interleave and rng.random() < 0.6:
        most = min(most, 64 // dtype.element_bytes)  # about the size of a slice
    inner = 16 // dtype.element_bytes * rng.randint(1, max(1, most * dtype.element_bytes // 16))
    if kind == "tiled":
        small = rng.random() < 0.8
        fields["box"] = [inner, *(rng.randint(1, rng.choice((4, 16)) if small else 256) for _ in dims[1:])]
    else:
        low, high = CORNER_RANGE[rank]
        lower, upper = ([rng.choice((0, -1, 1, rng.randint(low, high))) for _ in range(rank - 2)] for _ in range(2))
        for i in range(rank - 2):
            dims[i + 1] = max(dims[i + 1], lower[i] - upper[i] + 1)
        fields |= {
            "lower_corner": lower,
            "upper_corner": upper,
            "channels_per_pixel": inner,
            "pixels_per_column": rng.choice((1, 64, 128, rng.randint(1, 1024))),
        }
    return fields, memory


def _put(fields: Fields, name: str, index: int, value: int) -> bool:
    if index >= len(fields[name]):
        return False
    fields[name][index] = value
    return True


def _inner(fields: Fields, elems: int) -> bool:
    if fields["kind"] == "tiled":
        fields["box"][0] = elems
    else:
        fields["channels_per_pixel"] = elems
    return True


def _only(kind: str, change: Callable[[Fields, random.Random], Any]) -> Callable[[Fields, random.Random], Any]:
    return lambda fields, rng: fields["kind"] == kind and change(fields, rng)


def _any_index(name: str, value: int) -> Callable[[Fields, random.Random], Any]:
    return lambda f, r: bool(f[name]) and _put(f, name, r.randrange(len(f[name])), value)


def _empty_corner(fields: Fields, rng: random.Random) -> bool:
    """Make the bounding box empty in only one of several different dimensions, which shows the order of the corners."""
    rank, chosen = len(fields["dims"]), rng.randrange(len(fields["dims"]) - 2)
    for i in range(rank - 2):
        fields["dims"][i + 1] = 3 if i == chosen else 12
        fields["lower_corner"][i] = 2 if i == chosen else 0
        fields["upper_corner"][i] = -2 if i == chosen else 0
    return True


def _elem_bytes(fields: Fields) -> int:
    return int(TMA_TYPES[fields["dtype"]].element_bytes)


MUTATIONS: dict[str, Callable[[Fields, random.Random], Any]] = {
    "dim_zero": _any_index("dims", 0),
    "dim_over": _any_index("dims", (1 << 32) + 1),
    "stride_off_8": lambda f, r: bool(f["strides_bytes"]) and _put(f, "strides_bytes", 0, 1024 + 8),
    "stride_off_16": lambda f, r: bool(f["strides_bytes"]) and _put(f, "strides_bytes", 0, 1024 + 16),
    "stride_2_40": _any_index("strides_bytes", 1 << 40),
    "stride_zero": _any_index("strides_bytes", 0),
    "address_off_8": lambda f, r: f.update(address=f["address"] + 8) or True,
    "address_off_16": lambda f, r: f.update(address=(f["address"] & ~31) + 16) or True,
    "address_null": lambda f, r: f.update(address=0) or True,
    "inner_zero": lambda f, r: _inner(f, 0),
    "inner_257_up": lambda f, r: _inner(f, 272),
    "inner_not_16_bytes": lambda f, r: _elem_bytes(f) < 16 and _inner(f, 16 // _elem_bytes(f) * 2 - 1),
    "inner_over_span": lambda f, r: (
        f["swizzle"] > 0 and _inner(f, Swizzle(f["swizzle"]).span_bytes // _elem_bytes(f) + 16 // _elem_bytes(f))
    ),
    "box_zero": _only("tiled", lambda f, r: _put(f, "box", 1, 0)),
    "box_257": _only("tiled", lambda f, r: _put(f, "box", 1, 257)),
    "box_huge": _only("tiled", lambda f, r: f.update(box=[f["box"][0], *[256] * (len(f["box"]) - 1)]) or True),
    "element_stride_zero": lambda f, r: _put(f, "element_strides", 1, 0),
    "element_stride_9": lambda f, r: _put(f, "element_strides", 1, 9),
    "element_stride_0_zero": lambda f, r: _put(f, "element_strides", 0, 0),
    "element_stride_0_9": lambda f, r: _put(f, "element_strides", 0, 9),
    "nan_on_int": lambda f, r: (
        f.update(dtype=r.choice(("uint8", "int32", "uint64")), oob_fill=1) or _inner(f, 16 // _elem_bytes(f))
    ),
    "interleave_low_rank": _only(
        "tiled", lambda f, r: len(f["dims"]) < 3 and (f.update(interleave=1, swizzle=0) or True)
    ),
    "interleave_32_swizzle": lambda f, r: (
        len(f["dims"]) >= 3
        and (f.update(interleave=2, swizzle=r.choice((0, 2, 3)), strides_bytes=[64] * (len(f["dims"]) - 1)) or True)
    ),
    "swizzle_atom": lambda f, r: f.update(interleave=0, swizzle=r.choice((4, 5, 6))) or _inner(f, 16 // _elem_bytes(f)),
    "packed_type": lambda f, r: (
        f.update(dtype="16u4_align8b", oob_fill=0, interleave=0, swizzle=0)
        or (_put(f, "dims", 0, 4096) and _inner(f, 32))
    ),
    "rank_too_high": _only(
        "tiled",
        lambda f, r: f.update(dims=[16] * 6, strides_bytes=[16] * 5, box=[16] * 6, element_strides=[1] * 6) or True,
    ),
    "corner_over": _only("im2col", lambda f, r: _put(f, "lower_corner", 0, CORNER_RANGE[len(f["dims"])][0] - 1)),
    "corner_empty": _only("im2col", _empty_corner),
    "pixels_zero": _only("im2col", lambda f, r: f.update(pixels_per_column=0) or True),
    "pixels_1025": _only("im2col", lambda f, r: f.update(pixels_per_column=1025) or True),
}


def cases(
    count: int, invalid: float, seed: int, addresses: dict[str, list[int]]
) -> Iterator[tuple[Fields, str | None, str]]:
    """Yield (fields, mutation or None, memory), which depend only on the seed and the addresses.

    ``addresses``: by where they come from, all multiples of 32. ``invalid``: share of mutated cases.
    """
    rng = random.Random(seed)
    for _ in range(count):
        fields, memory = random_fields(rng, addresses)
        mutation = mutate(fields, rng) if rng.random() < invalid else None
        yield fields, mutation, memory


def mutate(fields: Fields, rng: random.Random) -> str:
    """Change ``fields`` by a mutation that applies to them, and name it."""
    while True:
        name = rng.choice(sorted(MUTATIONS))
        if MUTATIONS[name](fields, rng):
            return name
