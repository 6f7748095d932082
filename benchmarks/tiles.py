"""Time every configuration of a family for the products in a file, to fit and check a cost model.

The cells of a result file describe products in the same way as tuning entries. Operands may still be in L2 from the
previous launch. Configurations take turns in CUDA graphs.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # The checkout need not be installed.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import json
from collections.abc import Sequence
from dataclasses import replace
from pkgutil import resolve_name
from typing import Any

from benchmarks.contest import precompile
from benchmarks.harness import Contender, cold, measuring_stream, require_gpu
from benchmarks.report import Cell, Result, Table, failure, make_parser, shown
from cudatma.kernels.choice import Listed
from cudatma.kernels.cost import cheapest_first
from cudatma.kernels.gpu import gpu_of
from cudatma.kernels.registry import FAMILIES, family
from cudatma.library_streams import stream_handle

#: Duration and maximum number of launches of a graph.
_GRAPH_US, _MAX_LAUNCHES = 1500.0, 200

EXAMPLES = """examples:
  python benchmarks/tiles.py gemm benchmarks/results/gemm_tiles.json --json new.json
"""


def measure(stream: Any, kernel_family: Any, trial: Any, problem: Any, replays: int) -> Cell:
    """Measure one product with every possible configuration, and record the reason if a configuration cannot run."""
    trial.prepare(problem)
    handle = stream_handle(stream, "cupy", trial.device)
    contenders, refused, costs = [], {}, {}
    gpu = gpu_of(trial.device)
    for config, _ in cheapest_first(kernel_family.times, problem, gpu):
        cost = config.cost(problem, gpu)
        try:
            launch = trial.launcher(Listed(config, cost, (config,)), 1, handle)
        except Exception as error:
            refused[config.entry] = failure(error)
            continue
        contenders.append(Contender(config.entry, launch, 1, max(1, min(_MAX_LAUNCHES, round(_GRAPH_US / cost.us)))))
        costs[config.entry] = round(cost.us, 3)
    measured = cold(stream, contenders, replays)
    us = {name: round(timing.us, 3) for name, timing in sorted(measured.timings.items(), key=lambda item: item[1].us)}
    cell: Cell = {**problem.as_json(), "us": us, "predicted_us": costs}
    if getattr(problem, "version", ""):
        cell["version"] = problem.version
    return cell | ({"refused": refused | measured.errors} if refused or measured.errors else {})


def products(path: Path, kernel_family: Any) -> list[Any]:
    """Return the problems of a file's cells, with the version of each cell.

    Raises OSError, ValueError or KeyError if the file is unreadable or invalid.
    """
    problems = []
    for cell in json.loads(path.read_text())["cells"]:
        problem = kernel_family.read_problem(cell)
        problems.append(replace(problem, version=cell["version"]) if "version" in cell else problem)
    return problems


def tiles_table(cells: Sequence[Cell]) -> Table:
    """Return the fastest configuration of each product, and the relative time of the untuned choice."""
    rows = []
    for cell in cells:
        if not cell["us"]:
            continue
        best, us = next(iter(cell["us"].items()))
        chosen = next(name for name in cell["predicted_us"] if name in cell["us"])
        size = " x ".join(str(cell[name]) for name in ("m", "n", "k") if name in cell)
        rows.append((size, best, shown(us), chosen, shown(cell["us"][chosen] / us, 3)))
    return Table(("product", "fastest", "us", "chosen", "times the fastest"), tuple(rows))


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``cudatma bench tiles`` and return the exit status (1 if a configuration could not be measured)."""
    parser = make_parser("tiles", __doc__, EXAMPLES)
    parser.add_argument("family", choices=tuple(FAMILIES), help="kernel family")
    parser.add_argument("products", type=Path, metavar="FILE", help="result file whose cells describe the products")
    parser.add_argument("--replays", type=int, default=5, help="number of timed turns (default: 5)")
    options = parser.parse_args(argv)
    kernel_family = family(options.family)
    try:
        problems = products(options.products, kernel_family)
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.exit(2, f"{parser.prog}: {options.products}: {failure(error)}\n")
    require_gpu(parser)
    result = Result({"replays": options.replays, "operands": "warm in L2"}, tiles_table, options.json)
    trial = resolve_name(kernel_family.trial)(0)
    with measuring_stream() as stream:
        gpu = gpu_of(trial.device)
        result.say(
            precompile(
                lambda: (
                    config for problem in problems for config, _ in cheapest_first(kernel_family.times, problem, gpu)
                )
            )
        )
        for number, problem in enumerate(problems, 1):
            cell = measure(stream, kernel_family, trial, problem, options.replays)
            best = next(iter(cell["us"].items()), ("nothing measured", 0.0))
            result.add(cell, f"[{number}/{len(problems)}] {problem.description}: {best[0]} {best[1]} us")
    return int(any(cell.get("refused") for cell in result.cells))


if __name__ == "__main__":
    raise SystemExit(main())
