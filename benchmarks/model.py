"""The Marlin GEMM's cost model against the committed measurements: the table of docs/lab/cost_model.md."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # the checkout need not be installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from cudatma.errors import ArgumentError
from cudatma.kernels.cost import Cost
from cudatma.kernels.gpu import H200
from cudatma.kernels.marlin.choose import choose_by_cost
from cudatma.kernels.marlin.problem import LinearShape, Problem

ROOT = Path(__file__).resolve().parents[1]
RESULTS = (ROOT / "benchmarks" / "results" / "marlin.json", ROOT / "benchmarks" / "results" / "marlin_bf16.json")
PAGE = ROOT / "docs" / "lab" / "cost_model.md"
_MARKED = re.compile(r"(<!-- table: model -->\n).*?(<!-- end table -->)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Row:
    """A measured cell, and the cost of the configuration that the cost model chooses."""

    layer: LinearShape
    m: int
    us: float
    predicted: Cost

    @property
    def error(self) -> float:
        """Prediction over measurement, minus one."""
        return self.predicted.us / self.us - 1


def rows(results: Sequence[Path] = RESULTS) -> list[Row]:
    """Return every measured cell of the results."""
    measured = []
    for path in results:
        for cell in json.loads(path.read_text())["cells"]:
            if cell.get("us"):
                layer = LinearShape(cell["k"], cell["n"], 128, False, cell["dtype"])
                config = choose_by_cost(Problem(layer, cell["m"]), H200)
                cost = config.cost(Problem(layer, cell["m"]), H200)
                measured.append(Row(layer, cell["m"], cell["us"], cost))
    return measured


def summary(cells: Sequence[Row]) -> str:
    errors = [abs(row.error) for row in cells]
    median, largest = statistics.median(errors), max(errors)
    return f"{len(cells)} cells: median error {median:.1%}, largest {largest:.1%}."


def table(measured: Sequence[Row]) -> str:
    """Return Markdown with a row for each layer and dtype, and a column for each M."""
    ms = sorted({row.m for row in measured})
    cells: dict[str, dict[int, str]] = {}
    for row in measured:
        layer = f"{row.layer.k} x {row.layer.n}" + (", bf16" if row.layer.dtype == "bfloat16" else "")
        times = (f"{us:.3g}" if us < 1000 else f"{us:.0f}" for us in (row.predicted.us, row.us))
        cells.setdefault(layer, {})[row.m] = " / ".join(times)
    head = " | ".join(["K x N", *(f"M = {m}" for m in ms)])
    lines = [" | ".join([layer, *(times_by_m.get(m, "") for m in ms)]) for layer, times_by_m in cells.items()]
    return "\n".join(f"| {line} |" for line in (head, " | ".join(["---", *["---:"] * len(ms)]), *lines))


def filled(page: str, measured: Sequence[Row]) -> str:
    """Return the page with its table rewritten. Raise ArgumentError for a page without a table."""
    if not _MARKED.search(page):
        raise ArgumentError("page", "no <!-- table: model -->", "a page with the two markers of the table")
    text = f"{summary(measured)}\n\n{table(measured)}\n"
    return _MARKED.sub(lambda match: f"{match[1]}{text}{match[2]}", page)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``cudatma bench model``: print the comparison, or with ``--write`` put it into the page."""
    parser = argparse.ArgumentParser(prog="cudatma bench model", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    options = parser.parse_args(argv)
    measured = rows()
    if options.write:
        PAGE.write_text(filled(PAGE.read_text(), measured))
    print(summary(measured) if options.write else f"{table(measured)}\n\n{summary(measured)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
