"""Run benchmarks/NAME.py from a checkout. The installed package does not contain the benchmarks."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # run the subcommand, even if the checkout is not installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from cudatma.cli import main as cudatma_main

    raise SystemExit(cudatma_main(["bench", *sys.argv[1:]]))

import argparse
import ast
import json
import os
import subprocess
from collections.abc import Sequence

from cudatma.errors import ArgumentError

from .command_line import Parser

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"

EXAMPLES = """examples:
  cudatma bench --list
  cudatma bench NAME --help
"""


def benchmarks(folder: Path = FOLDER) -> dict[str, str]:
    """Return the first line of the docstring of each script that defines main(), by name.

    Raise ArgumentError if the folder contains no benchmark.
    """
    summaries = {}
    for path in sorted(folder.glob("*.py")):
        tree = ast.parse(path.read_text())
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body):
            summaries[path.stem] = (ast.get_docstring(tree) or "").partition("\n")[0]
    if not summaries:
        remedy = "install the checkout with `pip install -e .`, or run `python -m cudatma bench` in it"
        raise ArgumentError("cudatma bench", f"no scripts in {folder}", "run from a checkout of cudatma", remedy)
    return summaries


def run_benchmark(name: str, arguments: Sequence[str], folder: Path = FOLDER) -> int:
    """Run a benchmark as ``python benchmarks/NAME.py`` would, and return its exit status.

    Raise ArgumentError if the folder does not contain the benchmark.
    """
    names = benchmarks(folder)
    if name not in names:
        raise ArgumentError("benchmark", name, ", ".join(names))
    # The benchmarks import each other as `benchmarks.x`.
    paths = os.pathsep.join(part for part in (str(folder.parent), os.environ.get("PYTHONPATH")) if part)
    command = [sys.executable, str(folder / f"{name}.py"), *arguments]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, check=False).returncode


def parser() -> Parser:
    """Return the parser of ``cudatma bench``."""
    result = Parser("cudatma bench", __doc__, EXAMPLES)
    result.add_argument("name", nargs="?", metavar="NAME", help="name of the benchmark")
    result.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the benchmark")
    result.add_argument("--list", action="store_true", help="list the benchmarks")
    result.add_argument("--json", action="store_true", help="list the benchmarks as JSON")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``cudatma bench`` and return the exit status of the benchmark."""
    options = parser().parse_args(argv)
    if options.name is not None:
        return run_benchmark(options.name, options.arguments)
    summaries = benchmarks()
    if options.json:
        print(json.dumps(summaries, indent=2))
    else:
        for name, summary in summaries.items():
            print(f"{name:<20} {summary}")
    return 0
