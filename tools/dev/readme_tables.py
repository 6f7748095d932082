"""Write the figures of README.md: each table between markers comes from a file of benchmarks/results.

A marker pair ``<!-- table: NAME -->`` .. ``<!-- end table -->`` holds what benchmarks/results/NAME.json says under
``"table"``: ``{"columns": [text], "rows": [[text or number]], "note": text}``, and the machine under ``"machine"``.
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
_MARKED = re.compile(
    r"(?P<open><!-- table: (?P<name>[\w.-]+) -->\n)(?P<body>.*?)(?P<close><!-- end table -->)", re.DOTALL
)

EXAMPLES = """examples:
  python tools/dev/readme_tables.py            rewrite the tables of README.md
  python tools/dev/readme_tables.py --check    only say whether they are current
"""


def table_text(name: str, result: Any) -> str:
    """A result as a Markdown table, its note and its machine below it. ArgumentError if the file has no such table."""
    table = result.get("table") if isinstance(result, dict) else None
    if not isinstance(table, dict) or not {"columns", "rows"} <= set(table):
        raise ArgumentError(f"{name}.json", "no table", '{"table": {"columns": [..], "rows": [..]}, "machine": ..}')
    columns = [str(column) for column in table["columns"]]
    for index, row in enumerate(table["rows"]):
        if len(row) != len(columns):
            raise ArgumentError(f"{name}.json: rows[{index}]", f"{len(row)} cells", f"{len(columns)}, one a column")
    lines = [columns, ["---"] + ["---:"] * (len(columns) - 1), *table["rows"]]
    text = "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)
    below = [str(table.get("note", "")), _machine(result.get("machine"))]
    return "\n\n".join([text, *(part for part in below if part)])


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")


def _machine(machine: object) -> str:
    if isinstance(machine, dict):
        return "Measured on " + ", ".join(f"{name} {value}" for name, value in machine.items()) + "."
    return f"Measured on {machine}." if machine else ""


def filled(page: str, results: Path) -> str:
    """The page with every marked table written anew; a result that is not there yet is said to be missing.

    Raises ArgumentError for a result file that is no JSON or holds no table.
    """

    def replace(match: re.Match[str]) -> str:
        path = results / f"{match['name']}.json"
        if not path.is_file():
            return f"{match['open']}{MISSING}\n{match['close']}"
        try:
            result = json.loads(path.read_text())
        except ValueError as error:
            raise ArgumentError(path.name, str(error), "JSON") from error
        return f"{match['open']}{table_text(match['name'], result)}\n{match['close']}"

    return _MARKED.sub(replace, page)


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Rewrite README.md, or with ``--check`` return 1 where it differs from the results."""
    parser = argparse.ArgumentParser(
        prog="readme_tables.py",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true", help="change nothing; exit status 1 if a table is not current")
    options = parser.parse_args(argv)
    path = root / "README.md"
    page = path.read_text()
    new = filled(page, root / "benchmarks" / "results")
    if new == page:
        return 0
    if options.check:
        print("README.md is not current: run python tools/dev/readme_tables.py", file=sys.stderr)
        return 1
    path.write_text(new)
    print("README.md: tables written")
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except CudaTmaError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from error
