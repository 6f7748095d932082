"""Measures interleaved boxes: the driver's verdict, the counted bytes, the shared memory, and the source of each chunk.

    python tests/descriptor/descriptor_interleave.py [FIRST]       one JSON line a case, from the one numbered FIRST

The cases run in a process of their own, which a trap ends; measure_all() goes on after the case that trapped.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

# The checkout's package and the shared helpers, where this file is run by itself.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

from descriptor_probe import POISON, run

from cudatma.descriptor import Im2colSpec, TiledSpec, codec
from cudatma.descriptor import driver as map_driver
from cudatma.errors import DriverError
from cudatma.layout import Interleave, Swizzle

#: More than any of the boxes counts, so that the barrier does not complete by itself.
EXPECTED_BYTES = 1 << 17
WATCHED_BYTES = 64 << 10
SOURCE_BYTES = 4 << 20

#: dtype, interleave, swizzle, box (im2col: channels, pixels), element strides, coordinates.
Case = tuple[str, str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
_ONES, _ORIGIN = (1, 1, 1), (0, 0, 0)
#: Sizes and pitches by rank; the pitches tell the dimensions apart. Innermost first: W, (H, (D,)) C, N.
_DIMS = {3: (64, 16, 16), 4: (64, 16, 16, 2), 5: (64, 16, 4, 4, 2)}
_STRIDES = {3: (4096, 65536), 4: (4096, 65536, 1 << 20), 5: (4096, 65536, 1 << 18, 1 << 20)}
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
    # A whole slice of channels, all five dimensions, rows narrower than the span, more channels than a slice in im2col.
    ("float16", "16B", "none", (8, 8, 5), _ONES, _ORIGIN),
    ("uint8", "16B", "none", (16, 16, 5), _ONES, _ORIGIN),
    ("uint8", "16B", "none", (16, 3, 2, 2, 2), (1,) * 5, (0,) * 5),
    ("float32", "16B", "128B", (4, 3, 5), _ONES, _ORIGIN),
    ("float16", "16B", "128B", (8, 24), _ONES, _ORIGIN),
    ("float16", "32B", "32B", (32, 24), _ONES, _ORIGIN),
]
#: Boxes of more channels than one slice, which check_target() refuses: shown, not judged.
OPEN_CASES: list[Case] = [("float16", "16B", "none", (8, channels, 5), _ONES, _ORIGIN) for channels in (9, 16, 24)]
HEADING = (
    "dtype interleave swizzle box steps coords: counted (computed), written, end (computed), bits 512-543, 576-591; "
    "chunks as shared offset<global offset (z zeros, ? mixed)"
)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table and the verdict. The line is marked ! if it differs from the computation, and ? if it is
    not judged."""

    text: str
    as_computed: bool


def make_spec(case: Case, address: int) -> TiledSpec | Im2colSpec:
    """Return the spec of a case."""
    dtype, interleave, swizzle, box, steps, _ = case
    rank = len(steps)
    common: dict[str, Any] = {
        "dtype": dtype,
        "dims": _DIMS[rank],
        "strides_bytes": _STRIDES[rank],
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
    """Map the shared offset of each written 16-byte chunk to the global offset of its bytes, to "z" or to "?"."""
    found: dict[int, str] = {}
    for offset in range(0, len(image), 16):
        chunk = image[offset : offset + 16]
        if (chunk == POISON).all():
            continue
        words = chunk.view(np.uint32).astype(np.int64) - (1 << 30)
        whole = words[0] >= 0 and (np.diff(words) == 1).all()
        found[offset] = str(4 * int(words[0])) if whole else "z" if not chunk.any() else "?"
    return found


def ended_as_computed(spec: TiledSpec | Im2colSpec, end: int) -> bool:
    """Return whether the last written byte is the last of the footprint. Rows narrower than the span may end
    earlier."""
    layout = spec.box_layout
    return 0 < end <= layout.footprint_bytes if layout.pitch_bytes > layout.row_bytes else end == layout.footprint_bytes


def measure(case: Case) -> Row:
    """Load the box of one case. Word n of the source contains 2**30 + n, so every chunk shows its source."""
    import cupy as cp

    source = cp.arange(SOURCE_BYTES // 4, dtype=cp.uint32) + (1 << 30)
    spec = make_spec(case, int(source.data.ptr))
    name = " ".join(str(part).replace(" ", "") for part in case)
    try:
        raw = map_driver.encode(spec)
    except DriverError as error:
        return Row(f"! {name}: {error.detail}", False)
    made = SimpleNamespace(spec=spec, data=(ctypes.c_ubyte * codec.DESCRIPTOR_BYTES).from_buffer_copy(raw))
    seen = run(made, case[-1], EXPECTED_BYTES, WATCHED_BYTES)
    counted = EXPECTED_BYTES - seen.missing_bytes
    chunks = chunk_sources(seen.image)
    touched = np.nonzero(seen.image != POISON)[0]
    end = int(touched.max()) + 1 if touched.size else 0
    fields = codec.read_fields(raw)[1]
    good = counted == spec.expected_bytes and ended_as_computed(spec, end)
    shown = " ".join(f"{at}<{source}" for at, source in list(chunks.items())[:9])
    derived = f"{fields['smem_bytes']:#x}, {fields['smem_pattern']:#x}"
    text = f"{counted} ({spec.expected_bytes}), {touched.size}, {end} ({spec.footprint_bytes}), {derived}; {shown}"
    if case in OPEN_CASES:
        return Row(f"? {name}: {text}", True)
    return Row(f"{' ' if good else '!'} {name}: {text}", good)


def measure_all() -> list[Row]:
    """Measure all cases, in several processes if necessary. Unjudged cases come last."""
    rows: list[Row] = []
    cases = CASES + OPEN_CASES
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    while len(rows) < len(cases):
        command = [sys.executable, __file__, str(len(rows))]
        result = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment)
        rows += [Row(**json.loads(line)) for line in result.stdout.splitlines() if line.startswith("{")]
        if len(rows) < len(cases):
            reason = (result.stderr.strip().splitlines() or [f"exit status {result.returncode}"])[-1]
            lost = cases[len(rows)]
            judged = lost not in OPEN_CASES
            rows.append(Row(f"{'!' if judged else '?'} {' '.join(map(str, lost))}: {reason}", not judged))
    return rows


if __name__ == "__main__":
    for chosen in (CASES + OPEN_CASES)[int(sys.argv[1]) if sys.argv[1:] else 0 :]:
        row = measure(chosen)
        print(json.dumps({"text": row.text, "as_computed": row.as_computed}), flush=True)
