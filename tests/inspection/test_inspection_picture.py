"""The picture as data: well-formed, cells where the geometry says, colours that are banks, both themes, no links."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import cudatma
from cudatma import cli
from cudatma.descriptor import Im2colSpec, TiledSpec, codec
from cudatma.errors import ArgumentError, DescriptorError
from cudatma.inspection.banks import markdown, swizzle_rows
from cudatma.inspection.picture import CELL, LEFT_CELLS, RIGHT_CELLS, ROW, THEMES
from cudatma.inspection.placement import Placement
from cudatma.layout import Swizzle

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
    assert len([text for *_, text in cells(svg) if "outside of the tensor" in text]) == 2 * 2 * 4
    assert len([text for *_, text in cells(svg) if "stores overwrite 8 bytes" in text]) == 2 * 8
    for word in ("padding, not written", "outside of the tensor", "overwritten by stores"):
        assert word in svg
    plain = cudatma.inspect(MAPS["swizzle"][0]).svg((128, 256))
    assert "padding at" not in plain
    assert "overwritten by stores" not in plain
    assert "48 more rows" in plain
    assert "6144 more bytes" in plain


def test_an_element_is_marked_in_both_grids() -> None:
    svg = cudatma.inspect(NARROW).svg((88, 56), element=(3, 9))
    assert svg.count('class="clear s-ink"') == 2
    assert "(3, 9) lands at 0x1a2, bank 8" in svg
    with pytest.raises(ArgumentError, match=r"r in 0\.\.11"):
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
    links = re.findall(r'(?:src|href|url)\s*[=(]\s*["\']?([^"\')\s>]+)', page)
    assert set(links) <= {"#cudatma-hatch", "#cudatma-clip"}
    assert page.count("<svg") == 1
    assert "Every bit" in page


def assert_closed(page: str) -> None:
    """Every element of a page is closed in its order."""
    void = {"meta", "br"}
    opened: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: Any) -> None:
            if tag not in void:
                opened.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert opened.pop() == tag

    reader = Reader()
    reader.feed(page)
    reader.close()
    assert not opened


def test_a_notebook_shows_the_map() -> None:
    shown = cudatma.inspect(NARROW)._repr_html_()
    assert_closed(shown)
    assert shown.startswith('<div class="cudatma-page">')
    assert "<script" not in shown
    assert "<svg" in shown
    rules = re.findall(r"([^{}]+)\{", "".join(re.findall(r"<style>(.*?)</style>", shown, re.DOTALL)))
    assert all(rule.startswith((".cudatma-", "@media")) for rule in rules), "nothing outside is touched"
    assert repr(cudatma.inspect(NARROW)).splitlines()[0] == "tiled float16 100 × 64, box 16 × 12, swizzle 128B"


def test_text_is_escaped_and_wrong_arguments_are_typed() -> None:
    found = cudatma.inspect(NARROW)
    with pytest.raises(ArgumentError, match="theme"):
        found.svg(theme="<b>")
    with pytest.raises(ArgumentError, match="theme"):
        found.html(theme="blue")
    with pytest.raises(DescriptorError, match=r"coords\[0\]"):
        found.svg((1, 0))
    assert "multiples of 8" in found.html((1, 0)), "a page says why there is no picture"


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
    assert {row.evidence for row in rows.values() if "ATOM" in row.mode} == {"documents"}
    assert len(markdown().splitlines()) == 2 + len(rows)


def test_the_table_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", "--table"]) == 0
    shown = capsys.readouterr().out
    assert all(len(line.rstrip()) <= 80 for line in shown.splitlines())
    assert re.search(r"128B\s+128 B\s+1024 B\s+4-6 \^= 7-9\s+free\s+H200", shown)
