"""Write the tables in README.md and in some pages of docs from the files in benchmarks/results.

Between the markers ``<!-- table: NAME -->`` and ``<!-- end table -->``, this tool writes the table and the machine from
benchmarks/results/NAME.json. In this file, ``"table"`` is ``{"columns": [text], "rows": [[text or number]], "note":
text}``, and ``"machine"`` is the machine. ``<!-- table: NAME, first 5 rows -->`` selects the first rows, ``every 3rd
row`` selects the first of every three rows, and ``without A; B`` at the end drops the columns A and B. The table
``summary`` has one row for each comparison with competing libraries. ``summary()`` computes it from several results.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # the checkout need not be installed
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import argparse
import json
import re
from collections.abc import Collection, Mapping, Sequence
from statistics import geometric_mean
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
    "docs/lab/models.md",
    "docs/lab/marlin.md",
)
#: The results that the table ``summary`` needs.
SUMMARIZED = ("marlin_rivals", "gemm", "attention", "attention_decode")
_MARKED = re.compile(
    r"(?P<open><!-- table: (?P<name>[\w.-]+)(?:, first (?P<rows>\d+) rows)?(?:, every (?P<step>\d+)(?:nd|rd|th) row)?"
    r"(?:, without (?P<without>[^>]+))? -->\n)"
    r"(?P<body>.*?)(?P<close><!-- end table -->)",
    re.DOTALL,
)
#: Label on a page for each entry of "machine".
_NAMES = {"card": ""}

EXAMPLES = """examples:
  python tools/dev/readme_tables.py            rewrite the tables of all pages
  python tools/dev/readme_tables.py --check    only check whether they are current
"""


def table_text(name: str, result: Any, rows: slice = slice(None), without: Collection[str] = ()) -> str:
    """Return a result as a Markdown table, with its note and its machine below it.

    ``rows`` selects rows, and ``without`` names columns to drop. Raise ArgumentError if the result has no table or
    lacks one of these columns.
    """
    table = result.get("table") if isinstance(result, dict) else None
    if not isinstance(table, dict) or not {"columns", "rows"} <= set(table):
        raise ArgumentError(f"{name}.json", "no table", '{"table": {"columns": [...], "rows": [...]}, "machine": ...}')
    columns = [str(column) for column in table["columns"]]
    for index, row in enumerate(table["rows"]):
        if len(row) != len(columns):
            raise ArgumentError(
                f"{name}.json: rows[{index}]", f"{len(row)} cells", f"a list of {len(columns)} cells, one per column"
            )
    for column in without:
        if column not in columns:
            raise ArgumentError(f"{name}.json: without", column, " or ".join(columns))
    kept = [index for index, column in enumerate(columns) if column not in without]
    selected = [[line[index] for index in kept] for line in (columns, *table["rows"][rows])]
    lines = [selected[0], ["---"] + ["---:"] * (len(kept) - 1), *selected[1:]]
    text = "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)
    below = [str(table.get("note", "")), _machine(result.get("machine"))]
    return "\n\n".join([text, *(part for part in below if part)])


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")


def _machine(machine: object) -> str:
    if isinstance(machine, dict):
        known = {_NAMES.get(name, name): value for name, value in machine.items() if value != "none"}
        measured = "Measured on " if machine.get("card") != "none" else "Compiled without a GPU: "
        return measured + ", ".join(f"{name} {value}".strip() for name, value in known.items()) + "."
    return f"Measured on {machine}." if machine else ""


def summary(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return README's table as a result, with each operation's speed relative to the fastest competing library."""
    marlin = results["marlin_rivals"]["cells"]
    rows = [
        _summary_row(
            f"W4A16 GEMM, M = {low} to {high}",
            "cuBLAS (fp16), Humming, Machete, vLLM's Marlin",
            results["marlin_rivals"],
            [min(r["us"] for r in cell["rivals"].values()) / cell["us"] for cell in marlin if low <= cell["m"] <= high],
        )
        for low, high in ((1, 128), (256, 4096))
    ]
    products = [cell["us"] for cell in results["gemm"]["cells"]]
    dense = [min(us[rival] for rival in ("cuBLASLt", "torch.mm") if rival in us) / us["auto"] for us in products]
    rows.append(_summary_row("dense GEMM, fp16 and bf16", "cuBLASLt, torch.mm", results["gemm"], dense))
    for what, name in (("attention, prefill", "attention"), ("attention, decoding", "attention_decode")):
        ratios = [float(row[-1]) for row in results[name]["table"]["rows"]]
        rows.append(_summary_row(what, "cuDNN, FlashAttention-2 and -3", results[name], ratios))
    columns = ["operation, and the libraries compared", "GPU", "mean", "lowest", "cases"]
    note = "Speed relative to the fastest rival in each case; values above 1 mean that cudatma is faster."
    note += " M is the number of tokens. The mean is geometric. The dense GEMM's rivals were measured on an H100 only."
    return {"table": {"columns": columns, "rows": rows, "note": note}}


def _summary_row(what: str, rivals: str, result: Any, ratios: list[float]) -> list[str]:
    gpu = result["machine"]["card"].split()[1]
    return [f"{what}: {rivals}", gpu, f"{geometric_mean(ratios):.2f}", f"{min(ratios):.2f}", str(len(ratios))]


def filled(page: str, results: Path) -> str:
    """Return the page with all marked tables rewritten. A table whose result is missing becomes MISSING.

    Raise ArgumentError for a result file that is not JSON or has no table.
    """

    def replace(match: re.Match[str]) -> str:
        name = match["name"]
        rows = slice(None, int(match["rows"]) if match["rows"] else None, int(match["step"] or 1))
        without = match["without"].split("; ") if match["without"] else ()
        needed = SUMMARIZED if name == "summary" else (name,)
        loaded = {needed_name: _load(results / f"{needed_name}.json") for needed_name in needed}
        if None in loaded.values():
            return f"{match['open']}{MISSING}\n{match['close']}"
        result = summary(loaded) if name == "summary" else loaded[name]
        return f"{match['open']}{table_text(name, result, rows, without)}\n{match['close']}"

    return _MARKED.sub(replace, page)


def _load(path: Path) -> Any:
    """Return the content of a result, or None if there is no such file."""
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ArgumentError(path.name, str(error), "JSON") from error


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Rewrite all pages, or with ``--check`` return 1 if a page differs from the results."""
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
