"""Writes ../mistakes.md: each mistake of this folder, what to write instead, and what cudatma says of it.

python docs/guide/mistakes/page.py
"""

from __future__ import annotations

import importlib
import re
import textwrap
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
PAGE = FOLDER.parent / "mistakes.md"
_HEAD = """# The most common mistakes, and the reports of cudatma

Each mistake has a file in `docs/guide/mistakes`. `python docs/guide/mistakes/m06_parity.py` prints the whole report,
with lines, CTAs, warps and bytes; `--mended` runs the corrected kernel. None needs a GPU. `mistakes/page.py` writes
this page.
"""
#: Places: they differ from run to run, or with the primitives' line numbers.
_PLACE = re.compile(r" \((shared address|bytes from) .*$|, address 0x[0-9a-f]+|; PTX line .*$")


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("m[0-9]*.py"))


def text() -> str:
    return _HEAD + "".join(f"\n{_section(name)}" for name in names())


def _section(name: str) -> str:
    module: Any = importlib.import_module(name)
    mistake = module.MISTAKE
    title = " ".join((module.__doc__ or "").split())
    language = "cuda" if hasattr(mistake, "kernel") else "python"
    lines = [f"## {int(name[1:3])}. {title}", "", f"`mistakes/{name}.py`", ""]
    lines += [f"```{language}", *_code(mistake.wrong), "```", "", "Instead:", ""]
    lines += [f"```{language}", *_code(mistake.right), "```", "", f"> {_said(mistake)}", ""]
    return "\n".join(lines)


def _code(code: str) -> list[str]:
    lines = textwrap.dedent(code.strip("\n")).splitlines()
    if (
        len(lines) > 1
        and not lines[0].startswith(" ")
        and lines[1].startswith(" ")
        and not lines[0].endswith(("{", ")"))
    ):
        return [lines[0], *textwrap.dedent("\n".join(lines[1:])).splitlines()]  # it began in the midst of a line
    return lines


def _said(mistake: Any) -> str:
    """The finding that the mistake is known by: its first line, and the usual cause."""
    lines = mistake.try_it().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(mistake.says))
    cause = next((line.strip() for line in lines[first:] if line.strip().startswith("usual cause")), "")
    kind, _, said = _PLACE.sub("", lines[first]).partition(":")
    said = said.strip().rstrip(":") + (f". Usual{cause.removeprefix('usual')}" if cause else "")
    return f"`{kind}`: {said}."


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
    print(PAGE)
