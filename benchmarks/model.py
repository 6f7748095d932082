"""The cost model of the Marlin GEMM against the committed measurements: the table of docs/performance/model.md."""

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
PAGE = ROOT / "docs" / "performance" / "model.md"
_MARKED = re.compile(r"(<!-- table: model -->\n).*?(<!-- end table -->)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Row:
    """One measured cell, and the cost of the configuration that the cost model chooses."""

    layer: LinearShape
    m: int
    us: float
    kernel: str
    said: Cost

    @property
    def error(self) -> float:
        """Prediction over measurement, less one."""
        return self.said.us / self.us - 1


def rows(results: Sequence[Path] = RESULTS) -> list[Row]:
    """Every cell of the results that was measured."""
    found = []
    for path in results:
        for cell in json.loads(path.read_text())["cells"]:
            if cell.get("us"):
                layer = LinearShape(cell["k"], cell["n"], 128, False, cell["dtype"])
                config = choose_by_cost(Problem(layer, cell["m"]), H200)
                cost = config.cost(Problem(layer, cell["m"]), H200)
                found.append(Row(layer, cell["m"], cell["us"], config.version, cost))
    return found


def summary(found: Sequence[Row]) -> str:
    errors = [abs(row.error) for row in found]
    median, most = statistics.median(errors), max(errors)
    return f"{len(found)} cells: median error {median:.1%}, largest {most:.1%}."


def table(found: Sequence[Row]) -> str:
    """As Markdown: a row a layer and batch size, fp16 and bf16 side by side."""
    lines = ["| K x N | M | kernel | bound by | fp16 predicted | measured | bf16 predicted | measured |",
             "|---|---:|---|---|---:|---:|---:|---:|"]  # fmt: skip
    by_cell: dict[tuple[int, int, int], dict[str, Row]] = {}
    for row in found:
        by_cell.setdefault((row.layer.k, row.layer.n, row.m), {})[row.layer.dtype] = row
    for (k, n, m), both in by_cell.items():
        first = next(iter(both.values()))
        times = " | ".join(
            f"{both[dtype].said.us:.3g} | {both[dtype].us:.3g}" if dtype in both else "- | -"
            for dtype in ("float16", "bfloat16")
        )
        lines.append(f"| {k} x {n} | {m} | {first.kernel} | {first.said.bound} | {times} |")
    return "\n".join(lines)


def filled(page: str, found: Sequence[Row]) -> str:
    """The page with its table written anew. ArgumentError for a page without one."""
    if not _MARKED.search(page):
        raise ArgumentError("page", "no <!-- table: model -->", "a page with the two marks of the table")
    text = f"{summary(found)}\n\n{table(found)}\n"
    return _MARKED.sub(lambda match: f"{match[1]}{text}{match[2]}", page)


def main(argv: Sequence[str] | None = None) -> int:
    """``cudatma bench model``: print the comparison, or with ``--write`` put it into the page."""
    parser = argparse.ArgumentParser(prog="cudatma bench model", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    options = parser.parse_args(argv)
    found = rows()
    if options.write:
        PAGE.write_text(filled(PAGE.read_text(), found))
    print(summary(found) if options.write else f"{table(found)}\n\n{summary(found)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
