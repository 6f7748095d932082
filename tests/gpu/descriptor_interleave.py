"""Measures interleaved boxes: what the driver accepts, what the barrier counts, what shared memory they take, and where
its 16-byte chunks come from.

    python tests/gpu/descriptor_interleave.py [FIRST]       one JSON line for each case, from the one numbered FIRST

The cases run in a process of their own, which a trap ends; measure_all() goes on behind the case that trapped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# The checkout's package, where this file is run by itself.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from descriptor_probe import POISON, run

from cudatma.descriptor import Im2colSpec, TensorMap, TiledSpec, codec
from cudatma.errors import DriverError
from cudatma.layout import Interleave, Swizzle

#: More than any of the boxes counts, so that the barrier does not complete by itself.
EXPECTED_BYTES = 1 << 17
WATCHED_BYTES = 64 << 10
SOURCE_BYTES = 4 << 20

#: dtype, interleave, swizzle, box (im2col: channels, pixels), element strides, coordinates.
Case = tuple[str, str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
_ONES, _ORIGIN = (1, 1, 1), (0, 0, 0)
CASES: list[Case] = [
    ("float16", "16B", "none", (8, 4, 2), _ONES, _ORIGIN),
    ("float16", "16B", "none", (8, 3, 5), _ONES, _ORIGIN),
    ("float16", "16B", "none", (8, 3, 1), _ONES, _ORIGIN),
    ("float16", "16B", "none", (8, 1, 5), _ONES, _ORIGIN),
    ("float16", "16B", "none", (16, 3, 5), _ONES, _ORIGIN),
    ("float16", "16B", "none", (24, 3, 5), _ONES, _ORIGIN),
    ("float16", "16B", "none", (64, 3, 5), _ONES, _ORIGIN),
    ("uint8", "16B", "none", (16, 3, 5), _ONES, _ORIGIN),
    ("uint8", "16B", "none", (32, 3, 5), _ONES, _ORIGIN),
    ("float32", "16B", "none", (4, 3, 5), _ONES, _ORIGIN),
    ("float32", "16B", "none", (8, 3, 5), _ONES, _ORIGIN),
    ("float16", "16B", "32B", (8, 3, 5), _ONES, _ORIGIN),
    ("float16", "16B", "32B", (16, 3, 5), _ONES, _ORIGIN),
    ("float16", "16B", "64B", (16, 3, 5), _ONES, _ORIGIN),
    ("float16", "16B", "128B", (8, 3, 5), _ONES, _ORIGIN),
    ("float16", "16B", "128B", (64, 3, 5), _ONES, _ORIGIN),
    ("float16", "32B", "32B", (8, 3, 5), _ONES, _ORIGIN),
    ("float16", "32B", "32B", (16, 3, 5), _ONES, _ORIGIN),
    ("float16", "32B", "32B", (32, 3, 5), _ONES, _ORIGIN),
    ("uint8", "32B", "32B", (32, 3, 5), _ONES, _ORIGIN),
    ("float32", "32B", "32B", (8, 3, 5), _ONES, _ORIGIN),
    ("float16", "16B", "none", (16, 3, 5), (2, 1, 1), _ORIGIN),
    ("float16", "16B", "none", (16, 3, 5), (1, 2, 1), _ORIGIN),
    ("float16", "32B", "32B", (32, 3, 5), (2, 1, 1), _ORIGIN),
    ("float16", "16B", "none", (8, 3, 2, 2), (1, 1, 1, 1), (0, 0, 0, 0)),
    ("float16", "16B", "none", (8, 24), _ONES, _ORIGIN),
    ("float16", "16B", "none", (16, 24), _ONES, _ORIGIN),
    ("float16", "32B", "32B", (16, 24), _ONES, _ORIGIN),
    ("float16", "16B", "none", (8, 3, 5), _ONES, (0, 1, 0)),
    ("float16", "16B", "none", (8, 3, 5), _ONES, (0, 0, 1)),
    ("float16", "16B", "none", (8, 3, 5), _ONES, (8, 0, 0)),
    ("float16", "16B", "none", (8, 3, 5), _ONES, (1, 0, 0)),
    ("float16", "16B", "none", (8, 3, 5), _ONES, (0, -1, 0)),
]
HEADING = (
    "dtype interleave swizzle box steps coords: counted (computed), written, end (computed), bits 512-543, 576-591; "
    "chunks as shared offset<global offset (z zeros, ? mixed)"
)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: a case, and whether it came out as computed."""

    text: str
    as_computed: bool


def make_spec(case: Case, address: int) -> TiledSpec | Im2colSpec:
    """The spec of a case, with pitches that tell the dimensions apart."""
    dtype, interleave, swizzle, box, steps, _ = case
    rank = len(steps)
    common: dict[str, Any] = {
        "dtype": dtype,
        "dims": (64, 16, 16, 2)[:rank],
        "strides_bytes": (4096, 65536, 1 << 20)[: rank - 1],
        "element_strides": steps,
        "interleave": Interleave.parse(interleave, "interleave"),
        "swizzle": Swizzle.parse(swizzle, "swizzle"),
        "address": address,
    }
    if len(box) == rank:
        return TiledSpec(**common, box=box)
    corner = (0,) * (rank - 2)
    return Im2colSpec(
        **common, lower_corner=corner, upper_corner=corner, channels_per_pixel=box[0], pixels_per_column=box[1]
    )


def chunk_sources(image: np.ndarray[Any, Any]) -> dict[int, str]:
    """Shared offset of each 16-byte chunk that was written -> global offset of its bytes, "z" or "?"."""
    found: dict[int, str] = {}
    for offset in range(0, len(image), 16):
        chunk = image[offset : offset + 16]
        if (chunk == POISON).all():
            continue
        words = chunk.view(np.uint32).astype(np.int64) - (1 << 30)
        whole = words[0] >= 0 and (np.diff(words) == 1).all()
        found[offset] = str(4 * int(words[0])) if whole else "z" if not chunk.any() else "?"
    return found


def measure(case: Case) -> Row:
    """Load the box of one case. Word n of the source holds 2**30 + n, so that every chunk says where it comes from."""
    import cupy as cp

    source = cp.arange(SOURCE_BYTES // 4, dtype=cp.uint32) + (1 << 30)
    spec = make_spec(case, int(source.data.ptr))
    name = " ".join(str(part).replace(" ", "") for part in case)
    try:
        made = TensorMap(spec, owner=source)
    except DriverError as error:
        return Row(f"! {name}: {error.detail}", False)
    seen = run(made, case[-1], EXPECTED_BYTES, WATCHED_BYTES)
    counted = EXPECTED_BYTES - seen.missing_bytes
    chunks = chunk_sources(seen.image)
    touched = np.nonzero(seen.image != POISON)[0]
    end = int(touched.max()) + 1 if touched.size else 0
    fields = codec.read_fields(bytes(made))[1]
    good = counted == spec.expected_bytes and end <= spec.footprint_bytes < 2 * max(end, 1)
    shown = " ".join(f"{at}<{source}" for at, source in list(chunks.items())[:9])
    derived = f"{fields['smem_bytes']:#x}, {fields['smem_pattern']:#x}"
    text = f"{counted} ({spec.expected_bytes}), {touched.size}, {end} ({spec.footprint_bytes}), {derived}; {shown}"
    return Row(f"{' ' if good else '!'} {name}: {text}", good)


def measure_all() -> list[Row]:
    """All cases, in as many processes as it takes."""
    rows: list[Row] = []
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    while len(rows) < len(CASES):
        command = [sys.executable, __file__, str(len(rows))]
        result = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment)
        rows += [Row(**json.loads(line)) for line in result.stdout.splitlines() if line.startswith("{")]
        if len(rows) < len(CASES):
            reason = (result.stderr.strip().splitlines() or [f"exit status {result.returncode}"])[-1]
            rows.append(Row(f"! {' '.join(map(str, CASES[len(rows)]))}: {reason}", False))
    return rows


if __name__ == "__main__":
    for chosen in CASES[int(sys.argv[1]) if sys.argv[1:] else 0 :]:
        row = measure(chosen)
        print(json.dumps({"text": row.text, "as_computed": row.as_computed}), flush=True)
