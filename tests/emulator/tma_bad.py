"""Operations that the hardware is expected (or suspected) to stop, and maps that the driver is expected to refuse.

Each is tried only a few times, because a trap costs its process.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tma_cases import MARGIN, bulk_case, map_case
from tma_kernel import REDUCTIONS
from tma_specs import PLAIN

from cudatma.descriptor.access import REDUCE_TYPES
from cudatma.dtypes import TMA_TYPES

Case = dict[str, Any]


def bad_cases(rng: random.Random) -> list[Case]:
    """Return all bad cases, alternating between the kinds."""
    found: list[Case] = []
    for make, times in _KINDS:
        for _ in range(times):
            found.append(make(rng))
    for op in REDUCTIONS:
        found += [_reduce_type(rng, op, dtype) for dtype in PLAIN if dtype not in REDUCE_TYPES[op]]
    rng.shuffle(found)
    return found


def _reduce_type(rng: random.Random, op: str, dtype: str) -> Case:
    """A reduction on a type that it does not know: does it stop, and if not, what does it do?"""
    case = map_case(rng, "store", dtype, "tile")
    case |= {"tag": "reduce_type", "op": case["op"].replace("store", op), "style": rng.choice(("special", "near"))}
    # Something is to be reduced, at an aligned place.
    case["coords"] = [0] * len(case["coords"])
    return case


def _inner_unaligned(rng: random.Random) -> Case:
    """A box that starts inside a 16-byte chunk."""
    dtype = rng.choice([name for name in PLAIN if TMA_TYPES[name].element_bytes < 16])
    case = map_case(rng, rng.choice(("load", "load", "store", "prefetch")), dtype, "tile")
    case["coords"][0] += rng.randint(1, 16 // TMA_TYPES[dtype].element_bytes - 1)
    return case | {"tag": "inner_unaligned"}


def _negative(rng: random.Random) -> Case:
    """A store or reduction at a negative coordinate."""
    case = map_case(rng, rng.choice(("store", "reduce")), mode=rng.choice(("tile", "tile", "interleave", "im2col")))
    axis = rng.randrange(len(case["coords"]))
    unit = 16 // TMA_TYPES[case["dtype"]].element_bytes if axis == 0 and case["map"]["kind"] == "tiled" else 1
    case["coords"][axis] = -unit * rng.choice((1, 1, 2, 1000))
    return case | {"tag": "store_negative"}


def _smem_unaligned(rng: random.Random) -> Case:
    """Shared memory that is aligned to less than 128 bytes."""
    case = map_case(
        rng, rng.choice(("load", "load", "store")), mode=rng.choice(("tile", "tile", "im2col", "interleave"))
    )
    case["to"] = case["from"] = case["to"] + rng.choice((16, 32, 64, 96, 112, 8, 4))
    return case | {"tag": "smem_unaligned"}


def _wrong_rank(rng: random.Random) -> Case:
    """An instruction of another rank than the map's."""
    case = map_case(rng, rng.choice(("load", "store", "prefetch")), mode=rng.choice(("tile", "tile", "im2col")))
    family, op, rank = case["op"].rsplit("_", 2)
    least = 3 if family == "im2col" else 1
    other = rng.choice([r for r in range(least, 6) if r != int(rank)])
    if family == "im2col":
        case["offsets"] = [0] * (other - 2)
    case["coords"] = ([max(0, c) for c in case["coords"]] + [0] * 5)[:other]
    return case | {"tag": "wrong_rank", "op": f"{family}_{op}_{other}"}


def _wrong_mode(rng: random.Random) -> Case:
    """An im2col instruction with a tiled map, or the other way round."""
    while True:
        mode = rng.choice(("tile", "im2col"))
        case = map_case(rng, rng.choice(("load", "store", "prefetch")), mode=mode)
        if len(case["coords"]) >= 3:
            break
    other = "im2col" if mode == "tile" else "tile"
    case["op"] = case["op"].replace(mode, other)
    case["coords"] = [max(0, c) for c in case["coords"]]
    if mode == "im2col":
        unit = 16 // TMA_TYPES[case["dtype"]].element_bytes
        case["coords"][0] = case["coords"][0] // unit * unit
    return case | {"tag": "wrong_mode", "offsets": [0] * (len(case["coords"]) - 2)}


def _im2col_unaligned(rng: random.Random) -> Case:
    """An im2col column that starts inside a 16-byte chunk of channels."""
    while True:
        case = map_case(rng, rng.choice(("load", "load", "load", "store")), mode="im2col")
        per_chunk = 16 // TMA_TYPES[case["dtype"]].element_bytes
        if per_chunk > 1 and not case["map"]["interleave"]:
            break
    case["coords"][0] += rng.randint(1, per_chunk - 1)
    return case | {"tag": "im2col_unaligned"}


def _raw(rng: random.Random) -> Case:
    """A map with a field set to what the driver never writes. raw_bits: [first bit, bits, value]."""
    case = map_case(rng, "load", rng.choice(("float32", "uint16", "float16")), "tile")
    rank = len(case["coords"])
    bits = rng.choice(
        (
            [71, 4, rng.choice((11, 12, 13, 14, 15))],  # element format
            [68, 3, rng.choice((5, 6, 7))],  # rank
            [65, 3, rng.randint(1, 7)],  # version
            [75, 2, 3],  # interleave
            [83, 2, rng.randint(1, 3)],  # swizzle atomicity
            [80, 1, 1],  # tf32 bit with any type
            [79, 1, 1],  # NaN fill with any type
            [85, 11, 1 << rng.randrange(11)],  # bits without a name
            [490, 22, 1 << rng.randrange(22)],
            [592, 432, 1 << rng.randrange(432)],
            [256 + 32 * rank, 32, 7] if rank < 5 else [431, 9, 1],  # the size of a dimension beyond the rank
            [0, 4, 8],  # the address
            [512, 32, rng.choice((0, 16, 1 << 20))],
            [576, 16, rng.choice((0, 16, 256, 1024))],
        )
    )
    return case | {"tag": "raw", "raw_bits": bits}


def _unmapped(rng: random.Random) -> Case:
    """A map of memory that is not there."""
    case = map_case(rng, rng.choice(("load", "store", "prefetch")), mode="tile")
    case["coords"] = [0] * len(case["coords"])
    return case | {"tag": "unmapped", "raw_bits": [0, 64, 1 << 46]}


def _bulk_unaligned(rng: random.Random) -> Case:
    """A copy without a map whose size or addresses are no multiples of 16."""
    case = bulk_case(rng)
    field = rng.choice(("size", "to", "from", "gmem_at"))
    case[field] += rng.choice((1, 4, 8))
    return case | {"tag": "bulk_unaligned"}


def _bulk_empty(rng: random.Random) -> Case:
    return bulk_case(rng) | {"tag": "bulk_empty", "size": 0}


def _past_window(rng: random.Random) -> Case:
    """A box that reaches past the block's shared memory (the window is all there is but its last kilobyte)."""
    case = map_case(rng, rng.choice(("load", "store")), "uint8", "tile")
    case["map"] |= {"dims": [64, 300], "strides_bytes": [64], "box": [64, 256], "element_strides": [1, 1], "swizzle": 0}
    case["op"] = f"tile_{case['op'].split('_')[1]}_2"
    case |= {"coords": [0, 0], "window": 4096, "to": 1024, "from": 1024, "base": MARGIN, "gmem_bytes": 1 << 15}
    return case | {"tag": "past_window"}


def _refused(rng: random.Random) -> Case:
    """A map that the driver refuses."""
    case = map_case(rng, "load", mode=rng.choice(("tile", "im2col", "interleave")))
    fields = case["map"]
    change: Callable[[], Any] = rng.choice(
        (
            lambda: fields["dims"].__setitem__(-1, 0),
            lambda: fields["element_strides"].__setitem__(0, 9),
            lambda: fields["strides_bytes"].append(24) or fields["strides_bytes"].__delitem__(0),
            lambda: fields.update(interleave=0, swizzle=4),
            lambda: case.update(base=case["base"] + 4),
        )
    )
    change()
    return case | {"tag": "refused"}


def _huge(rng: random.Random) -> Case:
    """A dimension of more than 2**31 elements."""
    while True:
        case = map_case(
            rng, rng.choice(("load", "store", "prefetch")), mode=rng.choice(("tile", "interleave", "im2col"))
        )
        rank = len(case["coords"])
        if rank > 1:
            break
    axis = rng.randrange(1, rank)
    fields = case["map"]
    fields["dims"][axis] = rng.choice(((1 << 31) + 1, (1 << 32) - 1, 1 << 32))
    fields["strides_bytes"][axis - 1] = 0
    if fields["kind"] == "im2col":
        fields["dims"][axis], fields["dims"][-1] = fields["dims"][-1], fields["dims"][axis]
        fields["strides_bytes"][-1] = 0
    case["coords"] = [0 if c < 0 or axis == i else c for i, c in enumerate(case["coords"])]
    return case | {"tag": "huge"}


def _outside_bounding_box(rng: random.Random) -> Case:
    """An im2col column that begins outside of the bounding box."""
    case = map_case(rng, rng.choice(("load", "load", "store", "prefetch")), mode="im2col")
    fields = case["map"]
    first, rank = 0 if fields["interleave"] else 1, len(case["coords"])
    i = rng.randrange(rank - 2)
    beyond = fields["dims"][first + i] + fields["upper_corner"][i] + rng.choice((0, 1, 5))
    before = fields["lower_corner"][i] - rng.choice((1, 2))
    case["coords"][first + i] = before if before >= 0 and rng.random() < 0.5 else max(0, beyond)
    return case | {"tag": "outside_bounding_box"}


def _store_corner(rng: random.Random) -> Case:
    """A store through an im2col map whose bounding box reaches out of the tensor."""
    case = map_case(rng, rng.choice(("store", "reduce")), mode="im2col")
    if rng.random() < 0.5:
        case["map"]["lower_corner"][-1] = -1
    else:
        case["map"]["upper_corner"][-1] = 1
    return case | {"tag": "store_corner"}


def _atomicity(rng: random.Random) -> Case:
    """Swizzle atomicity, which is sm_100's: does an H200 look at it?"""
    case = map_case(rng, rng.choice(("load", "store")), mode="tile")
    return case | {"tag": "atomicity", "raw_bits": [83, 2, rng.randint(1, 3)]}


def _odd_swizzle(rng: random.Random) -> Case:
    """Interleave 32B with another swizzle than 32B: the driver takes it, the documentation does not."""
    while True:
        case = map_case(rng, rng.choice(("load", "load", "store")), mode=rng.choice(("interleave", "im2col")))
        if case["map"]["interleave"] == 2:
            case["map"]["swizzle"] = rng.choice((0, 2, 3))
            return case | {"tag": "odd_swizzle"}


def _shared_alone(rng: random.Random) -> Case:
    """A copy between shared memories to the block itself, with and without a cluster."""
    return bulk_case(rng, "shared") | {"tag": "shared_alone", "peer": 0, "targets": 1, "cluster": rng.choice((0, 1, 2))}


_KINDS: list[tuple[Callable[[random.Random], Case], int]] = [
    (_inner_unaligned, 6),
    (_negative, 10),
    (_smem_unaligned, 14),
    (_huge, 6),
    (_outside_bounding_box, 8),
    (_store_corner, 6),
    (_shared_alone, 9),
    (_odd_swizzle, 12),
    (_atomicity, 12),
    (_wrong_rank, 10),
    (_wrong_mode, 8),
    (_im2col_unaligned, 6),
    (_raw, 40),
    (_unmapped, 4),
    (_bulk_unaligned, 8),
    (_bulk_empty, 6),
    (_past_window, 4),
    (_refused, 30),
]
