"""Compare the cost model of the Marlin GEMM with the committed measurements, for the table in docs/lab/marlin.md."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # The checkout need not be installed.
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
from cudatma.kernels.marlin.choose import choose_untuned
from cudatma.kernels.marlin.problem import LinearShape, Problem

ROOT = Path(__file__).resolve().parents[1]
RESULTS = (ROOT / "benchmarks" / "results" / "marlin.json", ROOT / "benchmarks" / "results" / "marlin_bf16.json")
PAGE = ROOT / "docs" / "lab" / "marlin.md"
_MARKED = re.compile(r"(<!-- cost model -->\n).*?(<!-- end cost model -->)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Row:
    """A measured cell, and the cost of the configuration that the cost model chooses."""

    layer: LinearShape
    m: int
    us: float
    predicted: Cost

    @property
    def error(self) -> float:
        """Prediction divided by measurement, minus one."""
        return self.predicted.us / self.us - 1


def rows(results: Sequence[Path] = RESULTS) -> list[Row]:
    """Return all measured cells of the results."""
    collected = []
    for path in results:
        for cell in json.loads(path.read_text())["cells"]:
            if cell.get("us"):
                layer = LinearShape(cell["k"], cell["n"], 128, False, cell["dtype"])
                config = choose_untuned(Problem(layer, cell["m"]), H200)
                cost = config.cost(Problem(layer, cell["m"]), H200)
                collected.append(Row(layer, cell["m"], cell["us"], cost))
    return collected


def summary(results: Sequence[Row]) -> str:
    errors = [abs(row.error) for row in results]
    median, largest = statistics.median(errors), max(errors)
    return f"{len(results)} cells: median error {median:.1%}, largest {largest:.1%}."


def table(results: Sequence[Row]) -> str:
    """Return a Markdown table with a row per layer and dtype, and a column per M."""
    ms = sorted({row.m for row in results})
    cells: dict[str, dict[int, str]] = {}
    for row in results:
        layer = f"{row.layer.k} x {row.layer.n}" + (", bf16" if row.layer.dtype == "bfloat16" else "")
        times = (f"{us:.3g}" if us < 1000 else f"{us:.0f}" for us in (row.predicted.us, row.us))
        cells.setdefault(layer, {})[row.m] = " / ".join(times)
    head = " | ".join(["K x N", *(f"M = {m}" for m in ms)])
    lines = [" | ".join([layer, *(of_layer.get(m, "") for m in ms)]) for layer, of_layer in cells.items()]
    return "\n".join(f"| {line} |" for line in (head, " | ".join(["---", *["---:"] * len(ms)]), *lines))


def errors_by_m(results: Sequence[Row]) -> str:
    """Return a Markdown table with, for each M, the median error, the largest error and the layer of the latter."""
    columns = [["M", "---", "median error", "largest error", "at"]]
    for m in sorted({row.m for row in results}):
        of_m = [row for row in results if row.m == m]
        median = statistics.median(abs(row.error) for row in of_m)
        worst = max(of_m, key=lambda row: abs(row.error))
        layer = f"{worst.layer.k} x {worst.layer.n}"
        columns.append([str(m), "---:", f"{median:.1%}", f"{worst.error:+.1%}", layer])
    return "\n".join(f"| {' | '.join(line)} |" for line in zip(*columns, strict=True))


def filled(page: str, results: Sequence[Row]) -> str:
    """Return the page with a new table. Raises ArgumentError if the page does not contain the table's markers."""
    if not _MARKED.search(page):
        raise ArgumentError("page", "no <!-- cost model -->", "a page with the two markers of the table")
    text = f"{summary(results)}\n\n{errors_by_m(results)}\n"
    return _MARKED.sub(lambda match: f"{match[1]}{text}{match[2]}", page)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``cudatma bench model``, which prints the comparison or, with ``--write``, writes the errors to the page."""
    parser = argparse.ArgumentParser(prog="cudatma bench model", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    options = parser.parse_args(argv)
    results = rows()
    if options.write:
        PAGE.write_text(filled(PAGE.read_text(), results))
    print(summary(results) if options.write else f"{table(results)}\n\n{summary(results)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
