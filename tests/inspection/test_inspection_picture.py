"""The picture of a tensor map as data: cells where the geometry says, banks as colors; and the advice about it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from html_text import assert_alone, assert_closed, assert_fragment

import cudatma
from cudatma import cli
from cudatma.descriptor import Im2colSpec, Im2colWideSpec, TiledSpec, codec
from cudatma.descriptor.access import check_target
from cudatma.errors import ArgumentError, CudaTmaError, DescriptorError, TargetError
from cudatma.inspection.banks import markdown, swizzle_rows
from cudatma.inspection.lint import SEVERITIES, Finding, lint
from cudatma.inspection.picture import CELL, LEFT_CELLS, RIGHT_CELLS, ROW, THEMES
from cudatma.inspection.placement import Placement
from cudatma.layout import Swizzle
from cudatma.target import TARGETS, get_target

NARROW = TiledSpec(
    dtype="float16", dims=(100, 64), strides_bytes=(208,), box=(16, 12), swizzle="128B", address=0x7F0000001000
)
MAPS: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...] | None]] = {
    "swizzle": (
        TiledSpec(dtype="float16", dims=(4096, 4096), strides_bytes=(8192,), box=(64, 64), swizzle="128B", address=256),
        (128, 256),
        None,
    ),
    "narrow": (NARROW, (88, 56), None),
    "rank 1": (TiledSpec(dtype="uint8", dims=(1000,), box=(256,)), (-16,), None),
    "rank 3": (
        TiledSpec(dtype="bfloat16", dims=(256, 32, 16), strides_bytes=(512, 16384), box=(32, 4, 4), swizzle="64B"),
        (64, 8, 2),
        None,
    ),
    "rank 5": (
        TiledSpec(
            dtype="float64", dims=(8, 4, 4, 4, 4), strides_bytes=(64, 256, 1024, 4096), box=(8, 2, 2, 2, 2),
            element_strides=(1, 2, 1, 1, 1),
        ),
        (0, 1, 2, 3, 3),
        None,
    ),
    "wide rows": (TiledSpec(dtype="float64", dims=(256, 99), strides_bytes=(2048,), box=(256, 9)), (0, 0), None),
    "interleave": (
        TiledSpec(
            dtype="float16", dims=(64, 16, 16), strides_bytes=(4096, 65536), box=(16, 3, 5), interleave="32B",
            swizzle="32B",
        ),
        (60, 0, 0),
        None,
    ),
    "im2col": (
        Im2colSpec(
            dtype="float16", dims=(64, 14, 9, 4), strides_bytes=(128, 1792, 16128), lower_corner=(-1, -1),
            upper_corner=(-1, -1), channels_per_pixel=64, pixels_per_column=40, swizzle="128B",
        ),
        (0, -1, -1, 0),
        (2, 1),
    ),
    "im2col of 3": (
        Im2colSpec(
            dtype="uint8", dims=(32, 9000, 4), strides_bytes=(32, 288000), lower_corner=(-1,), upper_corner=(1,),
            channels_per_pixel=32, pixels_per_column=1024,
        ),
        (0, 8990, 0),
        None,
    ),
    "packed": (
        TiledSpec(dtype="16u6_align16b", dims=(256, 64), strides_bytes=(192,), box=(128, 8), swizzle="128B"),
        (128, 60),
        None,
    ),
    "flip": (
        TiledSpec(dtype="float16", dims=(64, 64), strides_bytes=(128,), box=(64, 8), swizzle="128B_ATOM_32B_FLIP_8B"),
        (0, 0),
        None,
    ),
}  # fmt: skip
SVG = "{http://www.w3.org/2000/svg}"


def cells(svg: str) -> list[tuple[tuple[int, int], float, float, int, str]]:
    """(row, column), x, y, colour and hover text of every cell of both grids."""
    found = []
    for group in ElementTree.fromstring(svg).iter(f"{SVG}g"):
        if "data-key" in group.attrib:
            row, column = map(int, group.attrib["data-key"].split(","))
            rect, title = group.find(f"{SVG}rect"), group.find(f"{SVG}title")
            assert rect is not None
            assert title is not None
            colour = re.search(r"\bb(\d)\b", rect.attrib["class"])
            assert colour is not None
            found.append(
                ((row, column), float(rect.attrib["x"]), float(rect.attrib["y"]), int(colour[1]), title.text or "")
            )
    return found


@pytest.mark.parametrize("name", MAPS)
def test_cells_stand_where_their_bytes_land(name: str) -> None:
    spec, coords, offsets = MAPS[name]
    base = 1024
    svg = cudatma.inspect(spec).svg(coords, offsets, base=base)
    placed = Placement(spec, coords, offsets, base)
    left = [cell for cell in cells(svg) if cell[1] < RIGHT_CELLS]
    right = [cell for cell in cells(svg) if cell[1] >= RIGHT_CELLS]
    assert left
    assert right
    top = min(cell[2] for cell in right)
    for (row, column), x, y, colour, text in right:
        found = placed.element(row, column * placed.chunk_elems)
        chunk = int(placed.box.smem[row, column])
        line, group = divmod(chunk - base, 128)
        assert (x, y) == (RIGHT_CELLS + group // 16 * CELL + 1, top + ROW * line)
        assert colour == chunk // 16 % 8 == found.bank // 4
        assert f"shared {chunk:#x}, banks {colour * 4} to {colour * 4 + 3}" in text
        assert f"coordinates ({', '.join(map(str, found.coords))})" in text
    by_key = {cell[0]: cell[3:] for cell in right}
    top = min(cell[2] for cell in left)
    for key, x, y, colour, text in left:
        assert (y - top) / ROW == key[0]
        assert x >= LEFT_CELLS
        assert by_key.get(key, (colour, text)) == (colour, text), "twins have one colour and one hover text"


def test_padding_outside_and_clipped_bytes_are_drawn() -> None:
    svg = cudatma.inspect(NARROW).svg((88, 56))
    assert svg.count("padding at 0x") == 12 * 6, "six of eight chunks in each of twelve lines"
    assert len([text for *_, text in cells(svg) if "outside the tensor" in text]) == 2 * 2 * 4
    assert len([text for *_, text in cells(svg) if "stores overwrite 8 bytes" in text]) == 2 * 8
    for word in ("padding, not written", "outside the tensor", "overwritten by stores"):
        assert word in svg
    plain = cudatma.inspect(MAPS["swizzle"][0]).svg((128, 256))
    assert "padding at" not in plain
    assert "overwritten by stores" not in plain
    assert "48 more rows" in plain
    assert "6144 more bytes" in plain


def test_an_element_is_marked_in_both_grids() -> None:
    svg = cudatma.inspect(NARROW).svg((88, 56), element=(3, 9))
    assert svg.count('class="clear s-ink"') == 2
    assert "(3, 9) is at 0x1a2, bank 8" in svg
    with pytest.raises(ArgumentError, match=r"row from 0 to 11"):
        cudatma.inspect(NARROW).svg(element=(12, 0))


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("theme", THEMES)
def test_pictures_and_pages_are_well_formed_and_closed(name: str, theme: str) -> None:
    spec, coords, offsets = MAPS[name]
    found = cudatma.inspect(spec)
    svg = found.svg(coords, offsets, theme=theme)
    root = ElementTree.fromstring(svg)
    assert svg == found.svg(coords, offsets, theme=theme)
    assert ("prefers-color-scheme" in svg) == (theme == "auto")
    used = {c for element in root.iter() for c in element.attrib.get("class", "").split()}
    style = root.findtext(f"{SVG}style") or ""
    assert all(f".{name}" in style for name in used), "every class has a rule"
    width = float(root.attrib["width"])
    for text in root.iter(f"{SVG}text"):
        size = 0.62 * float(text.attrib["font-size"]) * len(text.text or "")
        if text.attrib.get("text-anchor") is None:
            assert float(text.attrib["x"]) + size < width + 40, text.text
    page = found.html(coords, offsets, theme=theme)
    assert_closed(page)
    assert_alone(page)
    assert page.count("<svg") == 1
    assert "All bits" in page


def test_a_notebook_shows_the_map() -> None:
    shown = cudatma.inspect(NARROW)._repr_html_()
    assert_fragment(shown)
    assert "<svg" in shown
    assert repr(cudatma.inspect(NARROW)).splitlines()[0] == "tiled float16 100 × 64, box 16 × 12, swizzle 128B"


def test_text_is_escaped_and_wrong_arguments_are_typed() -> None:
    found = cudatma.inspect(NARROW)
    with pytest.raises(ArgumentError, match="theme"):
        found.svg(theme="<b>")
    with pytest.raises(ArgumentError, match="theme"):
        found.html(theme="blue")
    with pytest.raises(DescriptorError, match=r"coords\[0\]"):
        found.svg((1, 0))
    assert "a multiple of 8" in found.html((1, 0)), "a page says why there is no picture"


def test_files_and_standard_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    svg, page = tmp_path / "box.svg", tmp_path / "box.html"
    text = codec.encode(NARROW).hex()
    arguments = ["inspect", text, "--at", "88,56", "--element", "3,9"]
    assert cli.main([*arguments, "--svg", str(svg), "--html", str(page), "--theme", "dark"]) == 1
    found = cudatma.inspect(NARROW)
    assert svg.read_text(encoding="utf-8") == found.svg((88, 56), element=(3, 9), theme="dark")
    assert page.read_text(encoding="utf-8") == found.html((88, 56), element=(3, 9), theme="dark")
    shown = capsys.readouterr().out
    assert "overwrites 64 bytes" in shown
    assert shown.endswith(f"wrote {svg}\nwrote {page}\n")
    assert cli.main(["inspect", text, "--svg", str(svg), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)
    assert cli.main(["inspect", text, "--svg", "-"]) == 0
    assert capsys.readouterr().out == found.svg()
    for option in ("--svg", "--html"):
        assert cli.main(["inspect", text, option, str(tmp_path / "no" / "folder")]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


# The table of swizzle modes


def test_the_table_names_every_mode_and_the_bits_of_the_field_notes() -> None:
    rows = {row.mode: row for row in swizzle_rows()}
    assert list(rows) == [mode.label for mode in Swizzle]
    assert [(rows[m].span_bytes, rows[m].alignment_bytes, rows[m].xor) for m in ("none", "32B", "64B", "128B")] == [
        (0, 128, "-"), (32, 256, "4 ^= 7"), (64, 512, "4-5 ^= 7-8"), (128, 1024, "4-6 ^= 7-9"),
    ]  # fmt: skip
    assert [rows[m].ldmatrix_wavefronts for m in ("none", "32B", "64B", "128B")] == [8, 1, 1, 1]
    assert {row.evidence for row in rows.values() if "ATOM" in row.mode} == {"documentation"}
    assert len(markdown().splitlines()) == 2 + len(rows)


def test_the_table_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", "--table"]) == 0
    shown = capsys.readouterr().out
    assert all(len(line.rstrip()) <= 80 for line in shown.splitlines())
    assert re.search(r"128B\s+128 B\s+1024 B\s+4-6 \^= 7-9\s+free\s+H200", shown)


def tiled(**change: Any) -> TiledSpec:
    """A map without a risk but the alignment that its swizzle needs, and a column read of 4 ways."""
    base: dict[str, Any] = {"dtype": "float16", "dims": (4096, 4096), "strides_bytes": (8192,), "box": (64, 64)}
    return TiledSpec(**(base | {"swizzle": "128B", "l2_promotion": "128B", "address": 1 << 20} | change))


def im2col(**change: Any) -> Im2colSpec:
    base: dict[str, Any] = {
        "dtype": "float16", "dims": (64, 14, 9, 4), "strides_bytes": (128, 1792, 16128), "swizzle": "128B",
        "lower_corner": (0, 0), "upper_corner": (0, 0), "channels_per_pixel": 64, "pixels_per_column": 64,
        "l2_promotion": "128B", "address": 1 << 20,
    }  # fmt: skip
    return Im2colSpec(**(base | change))


WIDE = Im2colWideSpec(
    dtype="bfloat16", dims=(64, 14, 4), strides_bytes=(128, 1792), swizzle="64B", lower_corner_w=-3, upper_corner_w=3,
    channels_per_pixel=32, pixels_per_column=16, address=1 << 20,
)  # fmt: skip


def findings(spec: Any, target: str | None = None, flips: int = 0) -> dict[str, Finding]:
    """Name -> finding; flips: bits that are changed in the bytes."""
    decoded = None
    if not isinstance(spec, Im2colWideSpec):
        raw = (int.from_bytes(codec.encode(spec), "little") ^ flips).to_bytes(128, "little")
        decoded = codec.decode(raw)
    found = lint(spec, decoded, None if target is None else get_target(target)).findings
    assert [SEVERITIES.index(f.severity) for f in found] == sorted(SEVERITIES.index(f.severity) for f in found)
    for finding in found:
        assert finding.severity in SEVERITIES
        assert finding.message
        assert finding.rule
        assert finding.source
    return {finding.name: finding for finding in found}


QUIET = {"smem-alignment", "column-conflicts"}
SLICES: dict[str, Any] = {
    "dims": (64, 16, 16), "strides_bytes": (4096, 65536), "box": (16, 8, 5), "swizzle": "none", "interleave": "16B",
}  # fmt: skip


def test_a_plain_map_has_two_notes() -> None:
    found = findings(tiled())
    assert set(found) == QUIET
    assert {finding.severity for finding in found.values()} == {"note"}


@pytest.mark.parametrize(
    ("name", "severity", "spec", "words"),
    [
        ("padded-rows", "warning", tiled(box=(16, 64)), "the box occupies 8192 bytes but the mbarrier counts 2048"),
        ("padded-rows", "warning", im2col(channels_per_pixel=16), "rows of 32 bytes have a pitch of 128 bytes"),
        ("stage-alignment", "warning", tiled(box=(64, 9)), "1152 bytes, which is not a multiple of 1024"),
        ("stage-alignment", "warning", tiled(box=(8, 9), swizzle="none"), "144 bytes, which is not a multiple of 128"),
        ("ldmatrix-conflicts", "warning", tiled(swizzle="none"), "8-way"),
        ("column-conflicts", "warning", tiled(swizzle="none"), "32-way"),
        ("inner-step-ignored", "warning", tiled(element_strides=(2, 1)), "element_strides[0] is 2"),
        ("small-box", "note", tiled(box=(64, 8)), "1024 bytes"),
        ("box-beyond-tensor", "note", tiled(dims=(4096, 32)), "box[1] is 64, dims[1] is 32"),
        ("stride-zero", "note", tiled(strides_bytes=(0,)), "strides_bytes[0] is 0"),
        ("overlapping-strides", "warning", tiled(strides_bytes=(4096,)), "span 8192 bytes"),
        ("no-l2-promotion", "note", tiled(l2_promotion="none"), "128 bytes"),
        ("rows-across-sectors", "note", tiled(strides_bytes=(8208,)), "strides_bytes 8208"),
        ("rows-across-sectors", "note", tiled(address=(1 << 20) + 16), "address 0x100010"),
        ("tail-boxes", "note", tiled(dims=(4096, 4000)), "dims[1] is 4000, box[1] is 64"),
        ("nan-fill", "note", tiled(oob_fill="nan"), "0x7FF7"),
        ("null-address", "warning", tiled(address=0), "address is 0"),
        ("store-clips-at-16-bytes", "warning", tiled(dims=(4092, 4096)), "end of a row"),
        ("loads-only", "note", tiled(swizzle="128B_ATOM_32B_FLIP_8B"), "stores are illegal"),
        ("stores-only", "note",
         tiled(dtype="16u6_align16b", box=(128, 64), swizzle="128B_ATOM_64B"), "which loads do not support"),
        ("im2col-store-traps", "note", im2col(lower_corner=(-1, 0)), "stores trap"),
        ("every-access-traps", "error", tiled(dims=(4096, (1 << 31) + 64)), "every access traps"),
        ("target", "error", tiled(swizzle="none", box=(256, 256), dtype="float32"), "262144 bytes"),
        ("target", "error", tiled(**SLICES | {"box": (16, 9, 5)}), "box[1]"),
        ("target", "note", tiled(box=(64, 256), swizzle="128B_ATOM_64B"), "not supported on sm_90, sm_90a"),
        ("documents-only", "note", tiled(swizzle="128B_ATOM_64B"), "not verified on a GPU"),
        ("documents-only", "note", WIDE, "based on NVIDIA's documentation"),
    ],
)  # fmt: skip
def test_each_rule_finds_its_risk(name: str, severity: str, spec: Any, words: str) -> None:
    found = findings(spec)
    assert name in found, found
    assert found[name].severity == severity
    assert words in found[name].message
    assert found[name].remedy
    assert name not in findings(tiled()) or name in QUIET


def test_maps_without_the_risk() -> None:
    assert "smem-alignment" not in findings(tiled(swizzle="none"))
    assert "column-conflicts" not in findings(tiled(swizzle="none", box=(64, 1)))
    assert "ldmatrix-conflicts" not in findings(tiled())
    assert "box-beyond-tensor" not in findings(tiled(**SLICES | {"box": (16, 8, 5)})), "a slice has eight channels"
    assert "inner-step-ignored" not in findings(tiled(**SLICES | {"element_strides": (2, 1, 1)}))
    assert "im2col-store-traps" not in findings(im2col(lower_corner=(1, 0), upper_corner=(0, -2)))
    assert "stride-zero" not in findings(tiled(dims=(64, 1), strides_bytes=(0,)))


def test_bits_that_nobody_asked_for() -> None:
    assert not {"allocation-bit", "unknown-bits", "version", "derived-fields"} & set(findings(tiled()))
    found = findings(tiled(), flips=1 << 85)
    assert found["allocation-bit"].severity == "warning"
    assert "595.71.05" in found["allocation-bit"].source
    assert "unknown-bits" not in found
    found = findings(tiled(), flips=1 << 85 | 0xFFFFF << 700)
    assert "bits 700, 701, 702, 703, 704, 705, 706, 707 and 12 more" in found["unknown-bits"].message
    assert "version is 5" in findings(tiled(), flips=5 << 65)["version"].message
    raw = int.from_bytes(codec.encode(tiled()), "little")
    replaced = raw & ((0xFFFFFFFF << 512) | (0xFFFF << 576))  # as tensormap.replace leaves it
    assert "smem_bytes 0 and smem_pattern 0" in findings(tiled(), flips=replaced)["derived-fields"].message


def test_small_allocations_matter_on_blackwell() -> None:
    sparse = tiled(dims=(64, 64), strides_bytes=(256,))
    assert "small-allocation" in findings(sparse, "sm_120a")
    assert "small-allocation" not in findings(sparse, "sm_90a")
    assert "small-allocation" not in findings(tiled(dims=(64, 64), strides_bytes=(128,)), "sm_120a"), "dense"
    assert "small-allocation" not in findings(tiled(), "sm_120a"), "large"


@pytest.mark.parametrize("target", list(TARGETS))
@pytest.mark.parametrize("spec", [tiled(), tiled(box=(64, 256), swizzle="128B_ATOM_64B"), WIDE, im2col()], ids=repr)
def test_a_target_refuses_what_check_target_refuses(spec: Any, target: str) -> None:
    try:
        check_target(spec, get_target(target))
        refused = False
    except CudaTmaError:
        refused = True
    found = findings(spec, target)
    assert ("target" in found) == refused
    if refused:
        assert found["target"].severity == "error"


def test_what_a_caller_gets() -> None:
    found = cudatma.inspect(tiled(address=0)).lint(target="120a")
    assert (found.target, found.worst) == ("sm_120a", "warning")
    data = json.loads(json.dumps(found.to_json()))
    assert data["findings"][0]["name"] == "null-address"
    assert set(data["findings"][0]) == {"name", "severity", "message", "rule", "source", "remedy"}
    with pytest.raises(TargetError):
        cudatma.inspect(tiled()).lint(target="sm_75")
