"""The tables of docs/reference/tensor_map_format.md agree with the code.

Run `python tests/descriptor/test_descriptor_docs.py` to regenerate the marked tables.
"""

from __future__ import annotations

import re
from pathlib import Path

from cudatma.descriptor import codec
from cudatma.descriptor.bits import DIFFERENCES
from cudatma.inspection.banks import markdown

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "tensor_map_format.md"

MEANINGS = {
    "address": "global address in bytes",
    "im2col": "0 tiled, 1 im2col",
    "version": "0",
    "rank_minus_1": "rank - 1",
    "format": "element format, `TmaType.descriptor_format`",
    "interleave": "0 none, 1 16B, 2 32B",
    "swizzle": "0 none, 1 32B, 2 64B, 3 128B",
    "nan_fill": "fill value outside the tensor, 0 zero, 1 NaN",
    "tf32": "1 if loads round fp32 to tf32",
    "l2_promotion": "0 none, 1 64B, 2 128B, 3 256B",
    "swizzle_atomicity": "1 32B, 2 32B with flip of 8B, 3 64B; sm_100 and later",
    "stride_low": "low 32 bits of the pitch of dimension i + 1 in units of 16 bytes",
    "stride_high": "high 4 bits of this pitch",
    "dim_minus_1": "size of dimension i in elements, minus 1",
    "element_stride_minus_1": "step of dimension i in elements, minus 1",
    "box_minus_1": "size of the box in dimension i in elements, minus 1",
    "channels_minus_1": "channels per pixel, minus 1",
    "lower_corner": "one number of 16 bits, two of 8 bits or three of 5 bits, signed; W in the lowest bits, then H, D",
    "upper_corner": "same format as `lower_corner`",
    "pixels_minus_1": "pixels per column, minus 1",
    "smem_bytes": "product of floor(box / step) over all dimensions, times the element size in bytes",
    "smem_pattern": "period of the swizzle in bytes: 16 without swizzle, 256, 512 or 1024 (8 spans) with swizzle",
}


def table() -> str:
    """Return a Markdown table with a row per field in bit order, and one row for an array of equal fields."""
    rows: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for kind, fields in codec.FIELDS.items():
        for name, place in fields.items():
            both = all(other.get(name) == place for other in codec.FIELDS.values())
            places = rows.setdefault(("both" if both else kind, name.partition("[")[0]), [])
            if place not in places:
                places.append(place)
    lines = ["| bits | field | maps | value |", "|---|---|---|---|"]
    for (kind, name), places in sorted(rows.items(), key=lambda row: (row[1][0], row[0])):
        (first, bits), count = places[0], len(places)
        span = f"{first}-{first + bits * count - 1}" if bits * count > 1 else str(first)
        assert places == [(first + bits * i, bits) for i in range(count)], "an array has no gaps"
        shown = f"`{name}[0..{count - 1}]`, {bits} bits each" if count > 1 else f"`{name}`"
        lines.append(f"| {span} | {shown} | {kind} | {MEANINGS[name]} |")
    return "\n".join(lines)


def test_the_table_is_the_codecs() -> None:
    assert table() in PAGE.read_text(encoding="utf-8"), f"{PAGE.name} should have this table:\n{table()}"


def differences() -> str:
    """Return a Markdown table of the known differences on other GPUs."""
    rows = [f"| {row.what} | {row.h200} | {row.others} |" for row in DIFFERENCES]
    return "\n".join(["| | H200, driver 580.159 | sm_100a, sm_120a |", "|---|---|---|", *rows])


TABLES = {"differences": differences, "swizzle": markdown}
_MARKED = r"(<!-- table: {} -->\n)(.*?)(<!-- end table -->)"


def filled(page: str) -> str:
    """Return the page with its marked tables generated from the code."""
    for name, text in TABLES.items():
        inside = text()
        page, count = re.subn(_MARKED.format(name), rf"\g<1>{inside}\n\g<3>", page, flags=re.DOTALL)
        assert count == 1, f"docs/reference/tensor_map_format.md has one table {name}"
    return page


def test_the_marked_tables_are_the_codes() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert filled(page) == page, f"run python {Path(__file__).relative_to(PAGE.parents[1])}"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
