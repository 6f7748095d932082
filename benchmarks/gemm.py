"""The dense GEMM: each version of the ladder and what `gemm` chooses, and cuBLAS, in one run, taking turns.

Operands are normally distributed and the same bits for all; they are as warm in L2 as a launch leaves them, with --cold
they come from memory. The GPU rests before each turn; with --seconds it does not, and its power limit decides. cuBLAS
takes part through torch.mm and as the fastest of the algorithms that cuBLASLt's heuristic returns. Every result is
compared with float64. --fp8 measures scaled fp8 products instead.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # the checkout need not be installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import geometric_mean
from typing import Any

from benchmarks.contest import (
    AUTO,
    Entrant,
    Rival,
    chosen,
    entered,
    field_of,
    judged,
    measured,
    precompile,
    present,
    refusals,
    summary_line,
    timed,
    times_as_fast,
    timing_method,
)
from benchmarks.harness import (
    BLOCK_S,
    MIN_ROUNDS,
    Contender,
    Method,
    copies_for,
    measuring_stream,
    require_gpu,
    require_torch,
)
from benchmarks.report import Cell, Result, Table, failure, make_parser, shown
from cudatma.dtypes import ACTIVATION_TYPES
from cudatma.errors import ArgumentError, TargetError
from cudatma.kernels.gemm.config import PRESETS
from cudatma.kernels.gemm.gemm import gemm, gemm_explain
from cudatma.kernels.gemm.problem import LAYOUTS
from tools.command_line import seconds
from tools.model_layers import MODELS

LADDER = tuple(PRESETS)
TORCH, CUBLASLT = "torch.mm", "cuBLASLt"
RIVALS = (TORCH, CUBLASLT, "DeepGEMM", "QuACK")
WARM, COLD = "operands warm in L2", "operands cold in L2"
#: M = N = K unless --size names others, which go up to LARGEST; the sizes of a single product go up to LONGEST.
SIZES, LARGEST, LONGEST = (256, 512, 1024, 2048, 4096, 8192), 16384, 131072
#: The summary leaves out smaller squares, which take as long as a launch.
SQUARES_FROM = 512
#: Layers of decoders with M rows of activations: prefill, then decode.
_LAYERS = (
    *((8192, "llama3-8b", "qkv"), (8192, "llama3-8b", "gate_up"), (8192, "llama3-8b", "down")),
    *((2048, "llama3-70b", "qkv"), (2048, "llama3-70b", "o"), (2048, "llama3-70b", "gate_up")),
    *((2048, "llama3-70b", "down"), (2048, "qwen2.5-7b", "gate_up")),
    *((128, "llama3-70b", "down"), (64, "llama3-8b", "o"), (16, "llama3-8b", "gate_up"), (16, "qwen2.5-7b", "down")),
)
#: TFLOP/s and bytes per microsecond from which times are guessed, and the shortest launch.
_GUESS_FLOPS, _GUESS_BYTES, _LAUNCH_US = 600e6, 3e6, 2.0
#: A graph takes about this long, and has no more launches.
_GRAPH_US, _MAX_LAUNCHES = 3000.0, 400
#: Seconds that the GPU rests before a turn; the third number if a launch takes less than the second.
_REST_S, _SHORT_US, _SHORT_REST_S = 0.006, 10.0, 0.002
#: Rows of a result that are compared with float64, spread evenly, and elements of B that are float64 at a time.
_ROWS, _ELEMENTS = 4096, 1 << 27
#: The shortest long run of a contender.
_MIN_SECONDS = MIN_ROUNDS * BLOCK_S
#: Allowed error as a part of the product's root mean square; a result is rounded once.
ALLOWED = {"float16": 1e-3, "bfloat16": 6e-3}

EXAMPLES = """examples:
  cudatma bench gemm --transformer --dtype float16 --dtype bfloat16 --json gemm.json
  cudatma bench gemm --size 4096 --size 16384 --layout RC --rivals deepgemm quack
  cudatma bench gemm --product 1024 5120 5120 --layout RC --dtype bfloat16
  cudatma bench gemm --size 8192 --version v4 --seconds 2
  cudatma bench gemm --fp8 --rivals deepgemm
"""


# ---- Products -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Product:
    """y (m, n) = a (m, k) b (k, n). name: of the layer, empty for a square."""

    m: int
    n: int
    k: int
    layout: str
    dtype: str
    name: str = ""

    def __str__(self) -> str:
        layer = f" ({self.name})" if self.name else ""
        return f"{self.m} x {self.n} x {self.k} {self.layout} {self.dtype}{layer}"

    @property
    def facts(self) -> Cell:
        facts = {"m": self.m, "n": self.n, "k": self.k, "layout": self.layout, "dtype": self.dtype}
        return {**facts, "layer": self.name} if self.name else facts

    @property
    def operand_bytes(self) -> int:
        return (self.m + self.n) * self.k * (1 if self.dtype.startswith("float8") else 2)

    @property
    def expected_us(self) -> float:
        """About the time of a launch; it decides how many launches are timed, and nothing else."""
        moved = self.operand_bytes + 2 * self.m * self.n
        return _LAUNCH_US + max(2 * self.m * self.n * self.k / _GUESS_FLOPS, moved / _GUESS_BYTES)

    @property
    def rest_s(self) -> float:
        return _SHORT_REST_S if self.expected_us < _SHORT_US else _REST_S

    def copies(self, is_cold: bool) -> int:
        """Return the pairs of operands that launches rotate over; 1 leaves them as warm in L2 as a launch does."""
        return copies_for(self.operand_bytes) if is_cold else 1

    def launches(self, copies: int = 1) -> int:
        """Return the launches of a graph, a multiple of ``copies``."""
        return max(1, round(max(1.0, min(_MAX_LAUNCHES, _GRAPH_US / self.expected_us)) / copies)) * copies


def squares(sizes: Sequence[int], layouts: Sequence[str], dtype: str) -> list[Product]:
    return [Product(size, size, size, layout, dtype) for size in sizes for layout in layouts]


def transformer(layouts: Sequence[str], dtype: str) -> list[Product]:
    """Return twelve layers of public decoders, in each layout."""
    found = []
    for m, model, projection in _LAYERS:
        k, n = MODELS[model].projections[projection]
        found += [Product(m, n, k, layout, dtype, f"{model} {projection}") for layout in layouts]
    return found


class Operands:
    """One product's operands on the GPU: torch tensors, ``copies`` of the same normally distributed numbers."""

    def __init__(self, product: Product, is_cold: bool) -> None:
        self.product, self.copies = product, product.copies(is_cold)
        a = _random(product.m, product.k, product.layout[0], product.dtype)
        b = _random(product.k, product.n, product.layout[1], product.dtype)
        self.a, self.b = ([each, *(each.clone() for _ in range(self.copies - 1))] for each in (a, b))

    def pair(self, index: int) -> tuple[Any, Any]:
        """Return the operands of the launch with this number."""
        return self.a[index % self.copies], self.b[index % self.copies]

    def out(self) -> Any:
        """Return an array (m, n) full of NaN, so that elements that are not written are noticed."""
        import torch

        return torch.full((self.product.m, self.product.n), math.nan, dtype=self.a[0].dtype, device=self.a[0].device)

    def contender(self, name: str, run: Any) -> Contender:
        return Contender(name, run, self.copies, self.product.launches(self.copies))


def _random(rows: int, columns: int, letter: str, dtype: str) -> Any:
    import torch

    shape = (rows, columns) if letter == "R" else (columns, rows)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    values = torch.randn(shape, device=device, dtype=torch.float32).to(getattr(torch, dtype))
    return values if letter == "R" else values.T


def errors(a: Any, b: Any, outs: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Return the errors of results by name, against the product in float64: root mean square and largest difference, as
    parts of the product's root mean square, NaN if a result has one.

    At most _ROWS rows are compared, spread evenly.
    """
    import torch

    (m, k), n = a.shape, b.shape[1]
    rows = torch.linspace(0, m - 1, min(m, _ROWS), dtype=torch.float64, device=a.device).round().long()
    left, step = a[rows].double(), max(1, _ELEMENTS // k)
    total, squared, most = 0.0, dict.fromkeys(outs, 0.0), dict.fromkeys(outs, 0.0)
    for begin in range(0, n, step):
        part = slice(begin, begin + step)
        exact = left @ b[:, part].double()
        total += float(exact.square().sum())
        for name, out in outs.items():
            off = out[rows, part].double() - exact
            squared[name] += float(off.square().sum())
            largest = float(off.abs().max())
            most[name] = largest if math.isnan(largest) else max(most[name], largest)
    rms = math.sqrt(total / (len(rows) * n)) or 1.0
    return {name: (math.sqrt(squared[name] / (len(rows) * n)) / rms, most[name] / rms) for name in outs}


# ---- A cell ---------------------------------------------------------------------------------------------------------


def measure(
    stream: Any, product: Product, field: Mapping[str, Rival], names: Sequence[str], method: Method, is_cold: bool
) -> Cell:
    """Measure one product: the rivals of the field, and ours by the names of the versions."""
    operands = Operands(product, is_cold)
    entrants, refused = entered(stream, operands, field)
    configs = _configs(*operands.pair(0), names, refused)
    entrants += [_ours(operands, name) for name in configs]
    cell: Cell = {**product.facts}
    timed(method, entrants, cell, refused, (TORCH, *configs))
    judged(cell, errors(operands.a[0], operands.b[0], chosen(cell, entrants)), ALLOWED[product.dtype])
    cell["entries"] = {name: config.entry for name, config in configs.items() if name in cell["us"]}
    return cell


def _configs(a: Any, b: Any, names: Sequence[str], refused: dict[str, str]) -> dict[str, Any]:
    """Return the configuration of each contender; put versions without a kernel for the product into ``refused``."""
    found = {}
    for name in names:
        try:
            found[name] = gemm_explain(a, b, version=name).config
        except (ArgumentError, TargetError) as error:
            refused[name] = failure(error)
    return found


def _ours(operands: Operands, name: str) -> Entrant:
    out = operands.out()

    def run(index: int) -> None:
        a, b = operands.pair(index)
        gemm(a, b, out=out, version=name)

    return Entrant(name, operands.contender(name, run), out)


def all_configs(products: Sequence[Product], names: Sequence[str]) -> list[Any]:
    """Return the configurations of all products, so that their kernels are compiled together."""
    import torch

    configs: list[Any] = []
    for product in products:
        dtype, shapes = getattr(torch, product.dtype), ((product.m, product.k), (product.k, product.n))
        a, b = (
            torch.empty(shape, dtype=dtype, device="cuda")
            if letter == "R"
            else torch.empty(shape[::-1], dtype=dtype, device="cuda").T
            for letter, shape in zip(product.layout, shapes, strict=True)
        )
        configs += _configs(a, b, names, {}).values()
    return configs


# ---- The report -----------------------------------------------------------------------------------------------------


def tflops(cell: Cell, name: str) -> float | None:
    us = cell.get("us", {}).get(name)
    return None if not us else 2e-6 * cell["m"] * cell["n"] * cell["k"] / us


def size_of(cell: Cell) -> str:
    return f"{cell['m']} x {cell['n']} x {cell['k']}"


def gemm_table(cells: Sequence[Cell], operands: str = "") -> Table:
    """Return TFLOP/s of each contender by product, over its layouts, and how many times as fast as cuBLAS the choice
    is, in the mean and at least."""
    names = [*present(cells, RIVALS), *present(cells, LADDER), *present(cells, (AUTO,))]
    over = [name for name in (CUBLASLT, TORCH) if name in names and AUTO in names]
    products: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        products.setdefault((size_of(cell), cell["dtype"]), []).append(cell)
    rows = []
    for (size, dtype), its in products.items():
        rates = [shown(_mean([tflops(cell, name) for cell in its]), 0) for name in names]
        times = [[times_as_fast(cell, name) for cell in its] for name in over]
        ratios = [shown(found, 3) for each in times for found in (_mean(each), min(filter(None, each), default=None))]
        rows.append((size, dtype, " ".join(cell["layout"] for cell in its), *rates, *ratios))
    columns = ("M x N x K", "dtype", "layouts", *names)
    columns += tuple(title for name in over for title in (f"auto / {name}", "least"))
    note = "TFLOP/s, geometric mean over the layouts"
    return Table(columns, tuple(rows), f"{note}; {operands}" if operands else note)


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the geometric mean of the values that were measured."""
    known = [value for value in values if value]
    return geometric_mean(known) if known else None


def rates_line(cell: Cell, beginning: str) -> str:
    """Describe a cell: TFLOP/s, the algorithms that rivals have chosen, and why contenders were not measured."""
    rates = ", ".join(f"{name} {shown(tflops(cell, name), 0)}" for name in cell.get("us", {}))
    line = f"{beginning}: {rates} TFLOP/s" if rates else f"{beginning}: nothing measured"
    if (over := times_as_fast(cell, CUBLASLT)) is not None:
        line += f", {AUTO} / {CUBLASLT} {over:.3f}"
    line += "".join(f"; {name}: {detail}" for name, detail in cell.get("chosen", {}).items())
    return line + refusals(cell)


def gemm_summary(cells: Sequence[Cell]) -> list[str]:
    """Compare ``auto`` with each rival, over the squares and over the layers of transformers, by type."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell.get("layer"):
            groups.setdefault(f"{cell['dtype']}, transformer layers", []).append(cell)
        elif cell["m"] == cell["n"] == cell["k"] >= SQUARES_FROM:
            groups.setdefault(f"{cell['dtype']}, squares from {SQUARES_FROM} on", []).append(cell)
    return [
        line
        for group, its in groups.items()
        for rival in present(its, RIVALS)
        for line in summary_line(group, its, rival, lambda cell: f"{size_of(cell)} {cell['layout']}")
    ]


# ---- The script -----------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """``cudatma bench gemm``; returns the exit status: 1 if ours or torch.mm failed, or a result was wrong."""
    parser = _parser()
    options = parser.parse_args(argv)
    shaped = options.size or options.product or options.layout or options.dtype or options.transformer
    if options.fp8 and (shaped or options.version):
        parser.error(
            "--fp8 has its own shapes and contenders, and neither --size, --product, --layout, --dtype, --transformer "
            "nor --version"
        )
    if 0 < options.seconds < _MIN_SECONDS:
        parser.error(f"argument --seconds: {options.seconds}; allowed: {_MIN_SECONDS} and more, {MIN_ROUNDS} blocks")
    require_gpu(parser)
    require_torch(parser)
    from benchmarks.rivals.dense import ALWAYS, OPTIONAL

    field, versions = field_of(ALWAYS, OPTIONAL, options.rivals)
    operands = COLD if options.cold else WARM
    settings: dict[str, Any] = {"replays": options.replays}
    if options.seconds:
        operands += ", in long runs"
        settings = {"sustained_seconds": options.seconds, "block_seconds": BLOCK_S}
    settings |= {"operands": operands, "rivals": versions}

    def method_of(stream: Any, product: Product) -> Method:
        return timing_method(stream, options.replays, product.rest_s, options.seconds)

    if options.fp8:
        from benchmarks import gemm_fp8

        return gemm_fp8.run(options, settings, method_of)
    result = Result(settings, partial(gemm_table, operands=operands), options.json, gemm_summary)
    products, names = _products(options), [AUTO, *(options.version or LADDER)]
    with measuring_stream() as stream:
        result.say(precompile(lambda: all_configs(products, names)))
        measured(
            result,
            products,
            lambda product: measure(stream, product, field, names, method_of(stream, product), options.cold),
            lambda product: product.facts,
            rates_line,
        )
    return result.finish(f"Dense GEMM, {operands}")


def _products(options: argparse.Namespace) -> list[Product]:
    """Return, by type, the squares, then the transformer layers, then single products. --transformer without --size
    measures the squares, too."""
    found, layouts = [], options.layout or LAYOUTS
    sizes = options.size or (() if options.product and not options.transformer else SIZES)
    for dtype in options.dtype or ("float16",):
        found += squares(sizes, layouts, dtype)
        found += transformer(layouts, dtype) if options.transformer else []
        found += [Product(m, n, k, layout, dtype) for m, n, k in options.product for layout in layouts]
    return found


def _size(text: str, largest: int = LARGEST) -> int:
    if not text.isdigit() or not 1 <= int(text) <= largest:
        raise argparse.ArgumentTypeError(f"{text}: 1 to {largest}")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("gemm", __doc__, EXAMPLES)
    add = parser.add_argument
    sizes = ", ".join(map(str, SIZES))
    long_run = f"instead of turns a long run at the power limit, S for each contender, in blocks of {BLOCK_S} s"
    add("--replays", type=int, default=11, help="timed turns of each (default: 11)")
    add("--size", type=_size, action="append", metavar="N", help=f"N cubed, repeatable (default: {sizes})")
    length = partial(_size, largest=LONGEST)
    shape = ("M", "N", "K")
    add("--product", type=length, nargs=3, action="append", default=[], metavar=shape, help="a shape, repeatable")
    add("--layout", choices=LAYOUTS, action="append", help=f"repeatable (default: {', '.join(LAYOUTS)})")
    add("--dtype", choices=tuple(ACTIVATION_TYPES), action="append", help="repeatable (default: float16)")
    add("--transformer", action="store_true", help="also twelve layers of Llama-3 and Qwen2.5, prefill and decode")
    add("--version", choices=LADDER, action="append", help="which versions take part, repeatable (default: all)")
    add("--seconds", type=seconds, default=0.0, metavar="S", help=long_run)
    add("--cold", action="store_true", help="launches rotate over copies of the operands that L2 cannot hold")
    add("--rivals", choices=("deepgemm", "quack"), nargs="+", default=[], help="further rivals, if they are installed")
    add("--fp8", action="store_true", help="scaled fp8 products instead, against torch's and DeepGEMM's")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
