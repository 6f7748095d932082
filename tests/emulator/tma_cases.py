"""Random TMA operations as JSON records: the tensor map, the operation, coordinates, and offsets in memory.

A case has n, tag ("random" or why it is special), op (a name of tma_kernel.OPERATIONS), dtype, style and seed (of
memory's contents), window (bytes of shared memory that are compared), to and from (offsets in it), gmem_bytes and base
(the tensor's offset in the global buffer), map (fields of the spec except the address), coords, offsets; size and
gmem_at for copies without a map; edits for tensormap.replace.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from tma_kernel import BULK_TYPES, EDITS, IMMEDIATE_FIELDS, REDUCTIONS, SHARED_TYPES
from tma_specs import PLAIN, Fields, extent_bytes, im2col, interleaved, tiled

from cudatma.descriptor.access import REDUCE_TYPES
from cudatma.descriptor.rules import CORNER_RANGE
from cudatma.dtypes import TMA_TYPES
from cudatma.layout import Swizzle

Case = dict[str, Any]
MARGIN = 512
MAX_GMEM = 1 << 20
MAX_WINDOW = 200 << 10
EDGES = (-(1 << 31), (1 << 31) - 1)


def _round(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _coordinate(rng: random.Random, dim: int, box: int, unit: int, writes: bool) -> int:
    """Return a multiple of ``unit`` that is inside, across the start or the end, just outside or far away."""
    choice = rng.random()
    if choice < 0.3:
        value = 0
    elif choice < 0.6:
        value = rng.randint(0, max(0, dim - 1))
    elif choice < 0.75:
        value = dim - rng.randint(0, box)
    elif choice < 0.85:
        value = -rng.randint(1, box)
    elif choice < 0.95:
        value = dim + rng.randint(0, 3)
    else:
        value = rng.choice((*EDGES, rng.randint(*EDGES), -dim - box, 1 << 16, -(1 << 16)))
    value = value // unit * unit
    if writes:
        value = abs(value) if rng.random() < 0.5 else max(0, value)
    return max(EDGES[0], min(EDGES[1] // unit * unit, value))


def tile_coords(rng: random.Random, fields: Fields, writes: bool) -> list[int]:
    """Return coordinates of a box of a tiled map."""
    size = TMA_TYPES[fields["dtype"]].element_bytes
    unit = 1 if fields["interleave"] else 16 // size
    near = rng.random() < 0.35
    coords = []
    for axis, (dim, box) in enumerate(zip(fields["dims"], fields["box"], strict=True)):
        one = unit if axis == 0 else 1
        if near:
            coords.append(rng.randint(0, max(0, min(dim, EDGES[1]) - 1)) // one * one)
        else:
            coords.append(_coordinate(rng, min(dim, EDGES[1]), box, one, writes))
    return coords


def im2col_coords(rng: random.Random, fields: Fields, writes: bool) -> tuple[list[int], list[int]]:
    """Return (coordinates, offsets) of a column of an im2col map."""
    rank, dims = len(fields["dims"]), fields["dims"]
    first = 0 if fields["interleave"] else 1
    size = TMA_TYPES[fields["dtype"]].element_bytes
    spatial = []
    for i in range(rank - 2):
        low, high = fields["lower_corner"][i], dims[i + first] - 1 + fields["upper_corner"][i]
        spatial.append(rng.randint(low, high))  # elsewhere it traps
    image = rng.randint(0, dims[-1] - 1) if rng.random() < 0.85 else rng.randint(-2, dims[-1] + 2)
    image = max(0, image) if writes else image
    if fields["interleave"]:
        coords = [
            *spatial,
            rng.randint(0, dims[-2] - 1) if rng.random() < 0.8 else rng.randint(-1, dims[-2] + 1),
            image,
        ]
    else:
        channel = _coordinate(rng, dims[0], fields["channels_per_pixel"], 16 // size, writes)
        coords = [0 if rng.random() < 0.4 else channel, *spatial, image]
    most = CORNER_RANGE[rank][1] * 2 + 1
    small = rng.random() < 0.9
    offsets = [rng.randint(0, 4 if small else most) for _ in spatial]
    return [max(0, c) for c in coords] if writes else coords, offsets


def _footprint(fields: Fields) -> int:
    """Return an upper bound of the shared memory that a box uses."""
    size, span = TMA_TYPES[fields["dtype"]].element_bytes, Swizzle(fields["swizzle"]).span_bytes
    unit = 16 * fields["interleave"]
    if fields["kind"] == "im2col":
        return int(fields["pixels_per_column"] * max(fields["channels_per_pixel"] * size, span, unit))
    steps = [1, *fields["element_strides"][1:]]
    rows = 1
    for axis in range(1, len(fields["box"])):
        if not (unit and axis == len(fields["box"]) - 2):
            rows *= -(-fields["box"][axis] // steps[axis])
    if unit:
        slices = -(-fields["box"][-2] * size // unit)
        return int(rows * slices * max(fields["box"][0] * unit, span))
    return int(rows * max(fields["box"][0] * size, span))


def _place(rng: random.Random, case: Case, fields: Fields) -> bool:
    """Choose offsets of the box and the tensor; return False if they are too large."""
    at = 128 * rng.choice((8, 8, 8, 9, 10, 11, 12, 15))
    footprint = _round(_footprint(fields), 128)
    case["window"] = _round(at + footprint + 2048, 16)
    case["to"] = case["from"] = at
    case["base"] = MARGIN + 32 * rng.randint(0, 9) + (16 if fields["interleave"] != 2 and rng.random() < 0.4 else 0)
    case["gmem_bytes"] = _round(case["base"] + extent_bytes(fields) + MARGIN, 64)
    return case["window"] <= MAX_WINDOW and case["gmem_bytes"] <= MAX_GMEM


def _style(rng: random.Random, op: str, dtype: str) -> str:
    if op in REDUCTIONS:
        return rng.choice(("special", "special", "near", "random"))
    if TMA_TYPES[dtype].is_float and ("tf" in dtype or "ftz" in dtype):
        return rng.choice(("special", "special", "near", "index"))
    return rng.choice(("special", "random", "index", "index"))


def map_case(rng: random.Random, action: str | None = None, dtype: str | None = None, mode: str | None = None) -> Case:
    """Return a random operation through a tensor map."""
    action = action or rng.choice(
        ("load",) * 5 + ("store",) * 2 + ("reduce",) * 4 + ("prefetch",) * (rng.random() < 0.2)
    )
    mode = mode or rng.choice(("tile",) * 6 + ("im2col",) * 3 + ("interleave",) * 2)
    op = rng.choice(REDUCTIONS) if action == "reduce" else action
    writes = action not in ("load", "prefetch")
    while True:
        rank = rng.randint(1 if mode == "tile" else 3, 5)
        chosen = dtype or rng.choice(REDUCE_TYPES[op] if action == "reduce" else PLAIN)
        make = {"tile": tiled, "im2col": im2col, "interleave": interleaved}[mode]
        fields = make(rng, rank, chosen, writes)
        family = "im2col" if mode == "im2col" else "tile"
        case: Case = {"tag": "random", "op": f"{family}_{op}_{rank}", "dtype": chosen, "map": fields}
        case["style"], case["seed"] = _style(rng, op, chosen), rng.randrange(1 << 30)
        if family == "im2col":
            case["coords"], case["offsets"] = im2col_coords(rng, fields, writes)
        else:
            case["coords"] = tile_coords(rng, fields, writes)
        if _place(rng, case, fields):
            return case


def bulk_case(rng: random.Random, mode: str | None = None) -> Case:
    """Return a copy or reduction without a tensor map."""
    family = rng.choice(("bulk_load", "bulk_store", "bulk_reduce", "bulk_reduce", "bulk_reduce", "bulk_multicast"))
    family = family if mode is None else mode
    size = 16 * rng.randint(1, rng.choice((2, 16, 256)))
    kind, op = "u32", family
    if family == "bulk_reduce":
        name = rng.choice(REDUCTIONS)
        kind = rng.choice(BULK_TYPES[name])
        op = f"bulk_{name}_{kind}"
    elif family == "shared":
        name = rng.choice((*REDUCTIONS, "copy"))
        kind = rng.choice(SHARED_TYPES[name]) if name != "copy" else "u32"
        op = f"shared_{name}_{kind}" if name != "copy" else "shared_copy"
    dtype = {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64"}.get(kind, kind)
    case: Case = {} if family not in ("shared", "bulk_multicast") else _cluster(rng, family == "bulk_multicast")
    return case | {
        "tag": "random",
        "op": op,
        "dtype": dtype,
        "style": rng.choice(("special", "near", "random")) if "_" in op[5:] else "random",
        "seed": rng.randrange(1 << 30),
        "size": size,
        "to": 1024 + 16 * rng.randint(0, 20),
        "from": 2048 + 4096 + 16 * rng.randint(0, 20),
        "window": 6144 + 4096 + 1024,
        "gmem_at": MARGIN + 16 * rng.randint(0, 9),
        "gmem_bytes": MARGIN * 2 + 256 + 4096,
    }


def _cluster(rng: random.Random, multicast: bool) -> Case:
    """Return a cluster of two blocks, with the receivers of a multicast or the peer of a copy."""
    return {"cluster": 2, "targets": rng.randint(1, 3)} if multicast else {"cluster": 2, "peer": 1, "targets": 2}


def multicast_case(rng: random.Random) -> Case:
    """Return a tile load that several blocks of a cluster receive."""
    case = map_case(rng, "load", mode=rng.choice(("tile", "tile", "interleave")))
    return case | {"op": case["op"].replace("load", "multicast")} | _cluster(rng, True)


#: PTX's numbers of element types in tensormap.replace. [PTX ISA, tensormap.replace, table of .elemtype]
PTX_ELEMTYPE = {
    "uint8": 0,
    "uint16": 1,
    "uint32": 2,
    "int32": 3,
    "uint64": 4,
    "int64": 5,
    "float16": 6,
    "float32": 7,
    "float32_ftz": 8,
    "float64": 9,
    "bfloat16": 10,
    "tfloat32": 11,
    "tfloat32_ftz": 12,
}


#: The map that is edited: every field of it is replaced.
ORIGINAL: Fields = {
    "kind": "tiled",
    "dtype": "uint8",
    "dims": [16] * 5,
    "strides_bytes": [16] * 4,
    "box": [16, 1, 1, 1, 1],
    "element_strides": [1] * 5,
    "interleave": 0,
    "swizzle": 0,
    "l2_promotion": 0,
    "oob_fill": 0,
}


def edit_case(rng: random.Random) -> Case:
    """Return an operation through a map that tensormap.replace derived from another one."""
    case = map_case(
        rng, rng.choice(("load", "load", "store", "reduce")), mode=rng.choice(("tile", "tile", "interleave"))
    )
    wanted = case["map"]
    edits: list[list[Any]] = [["global_address", 0, case["base"]], ["rank", 0, len(wanted["dims"]) - 1]]
    for field, name in (("box_dim", "box"), ("global_dim", "dims"), ("element_stride", "element_strides")):
        edits += [[field, i, value] for i, value in enumerate(wanted[name])]
    edits += [["global_stride", i, value] for i, value in enumerate(wanted["strides_bytes"])]
    edits += [["elemtype", 0, PTX_ELEMTYPE[wanted["dtype"]]], ["swizzle_mode", 0, wanted["swizzle"]]]
    edits += [["fill_mode", 0, wanted["oob_fill"]], ["interleave_layout", 0, wanted["interleave"]]]
    rng.shuffle(edits)
    return case | {"tag": "edit", "edits": edits, "original": ORIGINAL}


def edit_bits_case(rng: random.Random) -> Case:
    """Return edits with values that fit no field, or no map, to compare the resulting bits. The map is not used."""
    case = map_case(rng, "load", mode="tile")
    edits: list[list[Any]] = []
    for _ in range(rng.randint(1, 6)):
        field, ordinal = rng.choice(sorted(EDITS))
        wide = field in ("global_address", "global_stride")
        value = rng.choice((0, 1, rng.randint(0, 300), rng.getrandbits(64 if wide else 32)))
        if field in IMMEDIATE_FIELDS:
            ordinal, value = 0, ordinal
        edits.append([field, ordinal, value])
    original = ORIGINAL if rng.random() < 0.5 else case["map"]
    return case | {"tag": "edit_bits", "op": "nothing", "edits": edits, "original": original}


_MAKERS: list[tuple[Callable[[random.Random], Case], float]] = [
    (bulk_case, 0.09),
    (lambda rng: bulk_case(rng, "shared"), 0.03),
    (multicast_case, 0.02),
    (edit_case, 0.06),
    (edit_bits_case, 0.02),
    (map_case, 0.78),
]


def cases(count: int, seed: int, bad: int = 300) -> Iterator[Case]:
    """Return ``count`` random cases with the bad cases spread among them, the same for the same arguments."""
    from tma_bad import bad_cases

    rng = random.Random(seed)
    special = bad_cases(random.Random(seed + 1))[:bad]
    every = max(1, count // max(1, len(special)))
    number = 0
    for index in range(count):
        if index % every == 0 and special:
            yield special.pop(0) | {"n": number}
            number += 1
        yield rng.choices([make for make, _ in _MAKERS], [share for _, share in _MAKERS])[0](rng) | {"n": number}
        number += 1
