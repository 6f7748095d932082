"""Write the tables of README.md and of some pages of docs from the files of benchmarks/results.

A marker pair ``<!-- table: NAME -->`` .. ``<!-- end table -->`` shows the contents of benchmarks/results/NAME.json
under ``"table"``: ``{"columns": [text], "rows": [[text or number]], "note": text}``, and the machine under
``"machine"``. ``<!-- table: NAME, first 5 rows -->`` shows only the first rows.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # the checkout need not be installed
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import argparse
import json
import re
from collections.abc import Sequence
from typing import Any

from cudatma.errors import ArgumentError, CudaTmaError

ROOT = Path(__file__).resolve().parents[2]
MISSING = "*Not measured yet.*"
PAGES = (
    "README.md",
    "docs/lab/benchmarks.md",
    "docs/lab/emulator.md",
    "docs/lab/gemm.md",
    "docs/lab/attention.md",
    "docs/lab/pytorch.md",
)
_MARKED = re.compile(
    r"(?P<open><!-- table: (?P<name>[\w.-]+)(?:, first (?P<rows>\d+) rows)? -->\n)"
    r"(?P<body>.*?)(?P<close><!-- end table -->)",
    re.DOTALL,
)

#: Names of the entries of "machine" on a page.
_NAMES = {"card": ""}

EXAMPLES = """examples:
  python tools/dev/readme_tables.py            rewrite the tables of all pages
  python tools/dev/readme_tables.py --check    only report whether they are current
"""


def table_text(name: str, result: Any, rows: int | None = None) -> str:
    """Return a result as a Markdown table, with its note and its machine below it.

    ``rows`` limits the number of rows. Raise ArgumentError if the file holds no such table.
    """
    table = result.get("table") if isinstance(result, dict) else None
    if not isinstance(table, dict) or not {"columns", "rows"} <= set(table):
        raise ArgumentError(f"{name}.json", "no table", '{"table": {"columns": [..], "rows": [..]}, "machine": ..}')
    columns = [str(column) for column in table["columns"]]
    for index, row in enumerate(table["rows"]):
        if len(row) != len(columns):
            raise ArgumentError(f"{name}.json: rows[{index}]", f"{len(row)} cells", f"{len(columns)}, one a column")
    lines = [columns, ["---"] + ["---:"] * (len(columns) - 1), *table["rows"][:rows]]
    text = "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)
    below = [str(table.get("note", "")), _machine(result.get("machine"))]
    return "\n\n".join([text, *(part for part in below if part)])


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")


def _machine(machine: object) -> str:
    if isinstance(machine, dict):
        facts = {_NAMES.get(name, name): value for name, value in machine.items() if value != "none"}
        measured = "Measured on " if machine.get("card") != "none" else "Compiled without a GPU: "
        return measured + ", ".join(f"{name} {value}".strip() for name, value in facts.items()) + "."
    return f"Measured on {machine}." if machine else ""


def filled(page: str, results: Path) -> str:
    """Return the page with every marked table rewritten; a missing result becomes a note.

    Raise ArgumentError for a result file that is not JSON or holds no table.
    """

    def replace(match: re.Match[str]) -> str:
        path = results / f"{match['name']}.json"
        if not path.is_file():
            return f"{match['open']}{MISSING}\n{match['close']}"
        try:
            result = json.loads(path.read_text())
        except ValueError as error:
            raise ArgumentError(path.name, str(error), "JSON") from error
        rows = int(match["rows"]) if match["rows"] else None
        return f"{match['open']}{table_text(match['name'], result, rows)}\n{match['close']}"

    return _MARKED.sub(replace, page)


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Rewrite the pages, or with ``--check`` return 1 if one differs from the results."""
    parser = argparse.ArgumentParser(
        prog="readme_tables.py",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true", help="change nothing; exit status 1 if a table is not current")
    options = parser.parse_args(argv)
    old = {name: (root / name).read_text() for name in PAGES}
    new = {name: filled(page, root / "benchmarks" / "results") for name, page in old.items()}
    changed = [name for name in PAGES if new[name] != old[name]]
    for name in changed:
        if options.check:
            print(f"{name} is not current: run python tools/dev/readme_tables.py", file=sys.stderr)
        else:
            (root / name).write_text(new[name])
            print(f"{name}: tables written")
    return 1 if options.check and changed else 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except CudaTmaError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from error
