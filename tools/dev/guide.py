"""Run the pages of docs/guide, and write them as notebooks.

python -m tools.dev.guide                    # run every page; update the output and the pictures that it shows
python -m tools.dev.guide --notebooks DIR    # write DIR/01_descriptor.ipynb ...

The Python blocks of a page are the cells of its notebook. They run in order, in one namespace. If a block without a
language follows a Python block, it shows the output of the Python block. A page draws its own pictures. It writes SVG
files into the current folder, and shows them from docs/pictures.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs" / "pictures"
PAGES = sorted((ROOT / "docs" / "guide").glob("[0-9]*.md"))
#: Numbers, which comparisons ignore because they differ between NVRTC releases or between runs.
_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Cell:
    """A Python block of a page, or the text between two Python blocks.

    Attributes
    ----------
    start, end : int
        Position of `text` in the page.
    output : Cell or None
        The block that shows the output of this block.
    """

    is_code: bool
    text: str
    start: int
    end: int
    output: Cell | None = None


def cells_of(page: str) -> list[Cell]:
    """Split the text of a page into cells."""
    cells: list[Cell] = []
    at = 0
    blocks = list(_BLOCK.finditer(page))
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        if block[1] != "python":
            continue
        cells.append(Cell(False, page[at : block.start()], at, block.start()))
        output, at = None, block.end()
        if following and not following[1] and not page[at : following.start()].strip():
            output, at = Cell(False, following[2], following.start(2), following.end(2)), following.end()
        cells.append(Cell(True, block[2], block.start(2), block.end(2), output))
    return [*cells, Cell(False, page[at:], at, len(page))]


def run(page: Path) -> tuple[list[str], dict[str, str]]:
    """Run the cells of a page.

    Returns
    -------
    list of str
        Output of each code cell.
    dict of str to str
        Pictures that the page wrote, by file name.
    """
    printed: list[str] = []
    namespace: dict[str, Any] = {"__name__": "__main__"}
    code = [cell.text for cell in cells_of(page.read_text(encoding="utf-8")) if cell.is_code]
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for number, text in enumerate(code, 1):
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    exec(compile(text, f"{page.name}, cell {number}", "exec"), namespace)
                printed.append(out.getvalue())
        finally:
            os.chdir(before)
        return printed, {path.name: path.read_text(encoding="utf-8") for path in Path(folder).glob("*.svg")}


def without_numbers(output: str) -> str:
    return _NUMBERS.sub("#", output)


def update(page: Path) -> None:
    """Write the output and the pictures of a page into the repository."""
    text = page.read_text(encoding="utf-8")
    printed, pictures = run(page)
    code = [cell for cell in cells_of(text) if cell.is_code]
    for cell, output in reversed(list(zip(code, printed, strict=True))):
        if cell.output and without_numbers(cell.output.text) != without_numbers(output):
            text = text[: cell.output.start] + output + text[cell.output.end :]
        elif output and not cell.output:
            raise SystemExit(f"{page.name}: no block shows the output of this cell:\n{cell.text}")
    page.write_text(text, encoding="utf-8")
    for name, picture in pictures.items():
        (PICTURES / name).write_text(picture, encoding="utf-8")


def notebook(page: Path) -> dict[str, Any]:
    """Return a page as a notebook in format 4.5."""
    cells: list[dict[str, Any]] = []
    is_solution = False
    for number, cell in enumerate(cells_of(page.read_text(encoding="utf-8"))):
        entry: dict[str, Any] = {"id": f"cell-{number}", "metadata": {}}
        if cell.is_code:
            printed = [cell.output.text] if cell.output else []
            outputs = [{"output_type": "stream", "name": "stdout", "text": text} for text in printed]
            entry |= {"cell_type": "code", "execution_count": None, "outputs": outputs, "source": cell.text.rstrip()}
            if is_solution:
                entry["metadata"] = {"jupyter": {"source_hidden": True, "outputs_hidden": True}}
        else:
            is_solution = cell.text.rfind("<details>") > cell.text.rfind("</details>")
            entry |= {"cell_type": "markdown", **_markdown(cell.text, page.parent)}
        cells.append(entry)
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    shown = [cell for cell in cells if cell["source"]]
    return {"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": kernel}, "cells": shown}


def _markdown(text: str, folder: Path) -> dict[str, Any]:
    """Return a Markdown cell with pictures as attachments and without links to files that the reader might not have."""
    attachments = {}
    for picture in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text):
        name = Path(picture).name
        attachments[name] = {"image/svg+xml": base64.b64encode((folder / picture).read_bytes()).decode()}
        text = text.replace(f"({picture})", f"(attachment:{name})")
    text = re.sub(r"(?<!!)\[([^\]]+)\]\((\d\d_\w+)\.md\)", r"[\1](\2.ipynb)", text)
    text = re.sub(r"(?<!!)\[([^\]]+)\]\((?!https?:|\d\d_\w+\.ipynb)[^)]+\)", r"\1", text)
    text = re.sub(r"</?details>\n*", "", re.sub(r"<summary>(.*)</summary>", r"**\1**", text))
    return {"source": text.strip(), **({"attachments": attachments} if attachments else {})}


def write_notebooks(folder: Path) -> None:
    """Write every page into a folder as a notebook."""
    folder.mkdir(parents=True, exist_ok=True)
    for page in PAGES:
        text = json.dumps(notebook(page), indent=1, ensure_ascii=False)
        (folder / f"{page.stem}.ipynb").write_text(text + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run the pages of docs/guide, and update the output that they show.")
    parser.add_argument("--notebooks", type=Path, metavar="DIR", help="write notebooks into DIR instead")
    options = parser.parse_args(argv)
    if options.notebooks:
        write_notebooks(options.notebooks)
        return 0
    os.environ["CUDATMA_BACKEND"] = "emulator"
    for page in PAGES:
        update(page)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
