"""Generate the table of instructions in docs/reference/emulator_coverage.md; run as a script, rewrite it."""

from __future__ import annotations

import textwrap
from pathlib import Path

from cudatma.emulator.instructions import coverage
from cudatma.emulator.ptx import forms
from cudatma.emulator.ptx.forms import REFUSED

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "reference" / "emulator_coverage.md"
BEGIN, END = "<!-- instructions: begin -->", "<!-- instructions: end -->"
HEAD = """## Instructions

A form is an instruction of the PTX ISA 9.1 with its types and modifiers. A test covers every form."""


def missing(form: str) -> str:
    """Return the reason why a form is not supported, or ""."""
    instructions = coverage(forms.module_of(form)).missing
    return str(instructions[0][1]) if instructions else ""


def section() -> str:
    """Return the generated part of the page."""
    rows = ["| chapter | instructions | forms | not supported |", "|---|---|---|---|"]
    unsupported: list[str] = []
    for chapter in forms.FORMS:
        every = list(forms.forms(chapter))
        missing_forms = [form for form in every if missing(form)]
        unsupported += missing_forms
        roots = sorted({form.split(" ")[0].split(".")[0] for form in every})
        shown = ", ".join(f"`{root}`" for root in roots)
        rows.append(f"| {chapter} | {shown} | {len(every)} | {len(missing_forms)} |")
    lines = [f"- `{form.split(' ')[0]}`" for form in unsupported]
    for reason in dict.fromkeys(REFUSED.values()):
        names = ", ".join(f"`{root}`" for root in REFUSED if REFUSED[root] == reason)
        lines.append(textwrap.fill(f"- {names}: {reason}", 120, subsequent_indent="  "))
    return "\n".join([BEGIN, HEAD, "", *rows, "", "Not supported:", "", *lines, END])


def current() -> str:
    """Return the generated part as the page contains it."""
    text = DOCUMENT.read_text() if DOCUMENT.exists() else ""
    begin, end = text.find(BEGIN), text.find(END)
    return text[begin : end + len(END)] if begin >= 0 and end >= 0 else ""


def main() -> None:
    text = DOCUMENT.read_text() if DOCUMENT.exists() else "# What the emulator covers\n"
    old = current()
    DOCUMENT.write_text(text.replace(old, section()) if old else f"{text.rstrip()}\n\n{section()}\n")


if __name__ == "__main__":
    main()
