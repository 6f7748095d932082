"""The generator of tensor map cases: its valid configs are valid, and its mutations break the named rule.

The capture itself needs a driver (tests/descriptor/capture_descriptors.py).
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from capture_descriptors import ask_driver, ask_rules
from descriptor_cases import cases
from descriptor_report import Answer, report

from cudatma.descriptor import Im2colSpec, TiledSpec, codec
from cudatma.descriptor.bits import DIFFERENCES
from cudatma.inspection.banks import markdown
from cudatma.target import get_target

#: Mutations that no rule forbids, and what each of the others may break.
LEGAL = {"stride_zero", "address_null", "box_huge", "interleave_32_swizzle"}
BROKEN = {
    "dim_zero": "dims",
    "dim_over": "dims",
    "stride_off_8": "strides_bytes[0]",
    "stride_off_16": "strides_bytes[0]",  # only with interleave 32B
    "stride_2_40": "strides_bytes",
    "address_off_8": "address",
    "address_off_16": "address",  # only with interleave 32B
    "inner_zero": "inner",
    "inner_257_up": "inner",
    "inner_not_16_bytes": "inner",
    "inner_over_span": "inner",  # not with interleave
    "box_zero": "box[1]",
    "box_257": "box[1]",
    "element_stride_zero": "element_strides[1]",
    "element_stride_9": "element_strides[1]",
    "element_stride_0_zero": "element_strides[0]",
    "element_stride_0_9": "element_strides[0]",
    "nan_on_int": "oob_fill",
    "interleave_low_rank": "rank",
    "swizzle_atom": "target",
    "packed_type": "target",
    "rank_too_high": "rank",
    "corner_over": "lower_corner[0]",
    "corner_empty": "upper_corner",
    "pixels_zero": "pixels_per_column",
    "pixels_1025": "pixels_per_column",
}
SOMETIMES = {"stride_off_16", "address_off_16", "inner_over_span", "corner_empty"}  # the last not with interleave
#: What any random spec may be refused for: its size, and its bounding box.
INCIDENTAL = {"box", "pixels_per_column", "upper_corner[0]", "upper_corner[1]", "upper_corner[2]"}


def test_valid_and_mutated_configs() -> None:
    target, verdicts = get_target("sm_90a"), defaultdict(set)
    for fields, mutation, memory in cases(3000, 0.5, 7, {"here": [0, 1 << 33]}):
        verdict, spec = ask_rules(fields, target)
        verdicts[mutation].add(verdict)
        assert memory == "here"
        if verdict in ("ok", "access"):
            assert isinstance(spec, TiledSpec if fields["kind"] == "tiled" else Im2colSpec)
            assert codec.decode(codec.encode(spec)).spec == spec
    assert {"ok", "access"} <= verdicts[None]
    assert set(verdicts) == LEGAL | set(BROKEN) | {None}
    for mutation, found in verdicts.items():
        refused = found - {"ok", "access"}
        if mutation in LEGAL or mutation is None:
            assert refused <= INCIDENTAL, (mutation, found)
        else:
            prefix = ("box[0]", "channels_per_pixel") if BROKEN[mutation] == "inner" else BROKEN[mutation]
            meant = {field for field in refused if field.startswith(prefix)}
            assert meant, (mutation, found)
            assert refused - meant <= INCIDENTAL, (mutation, found)
            assert mutation in SOMETIMES or found == refused, (mutation, found)


FIELDS: dict[str, Any] = {
    "kind": "tiled",
    "dtype": "float16",
    "dims": [256, 64],
    "strides_bytes": [512],
    "element_strides": [1, 1],
    "interleave": 0,
    "swizzle": 3,
    "l2_promotion": 0,
    "oob_fill": 0,
    "address": 0,
    "box": [64, 8],
}
COLUMN: dict[str, Any] = {name: value for name, value in FIELDS.items() if name != "box"} | {
    "kind": "im2col",
    "dims": [64, 14, 9, 4],
    "strides_bytes": [128, 1792, 16128],
    "element_strides": [1] * 4,
    "lower_corner": [-1, -2],
    "upper_corner": [-1, -1],
    "channels_per_pixel": 16,
    "pixels_per_column": 24,
}


def answer(fields: dict[str, Any], flipped: int = 0, code: int | str = 0) -> Answer:
    """Return an answer that agrees with the codec except for the flipped bits."""
    verdict, spec = ask_rules(fields, get_target("sm_90a"))
    raw = None
    if code == 0:
        value = int.from_bytes(codec.encode(spec), "little") if spec else 0
        raw = (value ^ flipped).to_bytes(128, "little")
    return Answer(fields, None, "made_up", code, verdict, spec, raw)


@pytest.mark.parametrize(
    ("fields", "flipped", "code", "difference"),
    [
        (FIELDS, 0, 0, None),
        (FIELDS, 1 << 440, 0, "box_minus_1[0]: 0x3e, not 0x3f"),
        (FIELDS, 1 << 66, 0, "version"),
        (FIELDS, 1 << 513, 0, "smem_bytes"),
        (FIELDS, 1 << 591, 0, "smem_pattern"),
        (FIELDS, 1 << 85, 0, "bits that no field has"),
        (FIELDS | {"box": [63, 8]}, 0, 0, "the driver says 0, the rules say box[0]"),
        (FIELDS | {"box": [63, 8]}, 0, 1, None),
        (FIELDS | {"dims": [16] * 6}, 0, "bindings", None),
        (FIELDS, 0, "bindings", "the driver says bindings, the rules say ok"),
        # Undocumented, but the driver encodes it.
        (COLUMN | {"interleave": 2, "swizzle": 0}, 0, 0, None),
        (COLUMN | {"interleave": 2, "swizzle": 0}, 0, 1, "the driver says 1"),
    ],
)
def test_an_answer_agrees_in_every_bit_or_not(
    fields: dict[str, Any], flipped: int, code: int | str, difference: str | None
) -> None:
    given = answer(fields, flipped, code)
    assert given.agrees == (difference is None)
    assert (difference or "1 cases") in report([given])


def test_what_the_bindings_refuse_is_no_crash() -> None:
    def refuse(*arguments: Any) -> None:
        raise ValueError("Argument 'elementStrides' too long, must be <= 5")

    names = ["cuuint64_t", "cuuint32_t", "CUtensorMapDataType", "CUtensorMapInterleave", "CUtensorMapSwizzle"]
    names += ["CUtensorMapL2promotion", "CUtensorMapFloatOOBfill"]
    driver = SimpleNamespace(**dict.fromkeys(names, int), cuTensorMapEncodeTiled=refuse)
    assert ask_driver(driver, FIELDS | {"dims": [16] * 6}) == ("bindings", None)


PAGE = Path(__file__).resolve().parents[2] / "docs" / "descriptors.md"


def differences() -> str:
    """Markdown: what is known to differ on other GPUs."""
    rows = [f"| {row.what} | {row.h200} | {row.others} | {row.source} |" for row in DIFFERENCES]
    return "\n".join(["| | H200, driver 580.159 | sm_100a, sm_120a | source |", "|---|---|---|---|", *rows])


TABLES = {"differences": differences, "swizzle": markdown}
_MARKED = r"(<!-- table: {} -->\n)(.*?)(<!-- end table -->)"


def filled(page: str) -> str:
    """The page with its marked tables as the code has them."""
    for name, text in TABLES.items():
        inside = text()
        page, count = re.subn(_MARKED.format(name), rf"\g<1>{inside}\n\g<3>", page, flags=re.DOTALL)
        assert count == 1, f"docs/descriptors.md has one table {name}"
    return page


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
