"""Write the table in docs/reference/hazards.md from the explanations of hazards.

python -m tools.dev.site_hazards

The documentation site has a page for each explanation.
"""

from __future__ import annotations

import re
from pathlib import Path

from cudatma.emulator.hazards.explanation import FOLDER, explain, groups
from cudatma.emulator.hazards.hazard import CAUSES

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "hazards.md"
#: Path to the explanations in the links of the pages in docs/. On the site, the links lead to the generated pages.
EXPLANATIONS = f"../../{FOLDER.relative_to(ROOT).as_posix()}/"
GENERATED = "../reference/hazards/"
_TABLE = re.compile(r"(?<=\| kind \| meaning \|\n\|---\|---\|\n)(?:\|.*\n)*")


def hazard_pages() -> dict[str, str]:
    """Return the page of each kind of hazard, as Markdown."""
    return {kind: explain(kind)._repr_markdown_() for kind in CAUSES}


def with_table(page: str) -> str:
    """Return hazards.md with a current table."""
    rows = []
    for group, members in groups().items():
        rows.append(f"| **{group}** | |\n")
        rows += [f"| [`{m.kind}`]({EXPLANATIONS}{m.kind}.md) | {m.meaning} |\n" for m in members]
    return _TABLE.sub(lambda _: "".join(rows), page)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
