"""Time the dense GEMM: the ladder's versions, the version that `gemm` chooses, and cuBLAS.

The kernels take turns in one run. Operands are normally distributed, and bitwise identical for all kernels. Operands
may still be in L2 from the previous launch, unless --cold is passed. The GPU is idle before each turn. With --seconds,
the GPU is not idle, so its power limit determines the times. cuBLAS runs through torch.mm and with the fastest
algorithm that cuBLASLt's heuristic returns. Every result is compared with a float64 reference. --fp8 measures scaled
fp8 products instead.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # The checkout need not be installed.
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
    add_errors,
    add_times,
    chosen_results,
    field_of,
    find_entrants,
    measure_calls,
    precompile,
    present,
    refusals,
    summary_line,
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
#: Values of M = N = K unless --size specifies other sizes, up to LARGEST. The sizes of a single product may be up to
#: LONGEST.
SIZES, LARGEST, LONGEST = (256, 512, 1024, 2048, 4096, 8192), 16384, 131072
#: Minimum size of squares in the summary, because smaller squares take no longer than the launch itself.
SQUARES_FROM = 512
#: Layers of decoders with M rows of activations, for prefill and for decode.
_LAYERS = (
    *((8192, "llama3-8b", "qkv"), (8192, "llama3-8b", "gate_up"), (8192, "llama3-8b", "down")),
    *((2048, "llama3-70b", "qkv"), (2048, "llama3-70b", "o"), (2048, "llama3-70b", "gate_up")),
    *((2048, "llama3-70b", "down"), (2048, "qwen2.5-7b", "gate_up")),
    *((128, "llama3-70b", "down"), (64, "llama3-8b", "o"), (16, "llama3-8b", "gate_up"), (16, "qwen2.5-7b", "down")),
)
#: TFLOP/s, bytes per microsecond, and microseconds of the shortest launch, for estimating times.
_GUESS_FLOPS, _GUESS_BYTES, _LAUNCH_US = 600e6, 3e6, 2.0
#: Duration and maximum number of launches of a graph.
_GRAPH_US, _MAX_LAUNCHES = 3000.0, 400
#: Idle time of the GPU before a turn, in seconds. The third value applies to launches that are shorter than the second
#: value (in microseconds).
_REST_S, _SHORT_US, _SHORT_REST_S = 0.006, 10.0, 0.002
#: Number of evenly spaced rows of a result that are compared with float64, and number of elements of B that are
#: converted to float64 at a time.
_ROWS, _ELEMENTS = 4096, 1 << 27
#: Minimum duration of a contender's long run, in seconds.
_MIN_SECONDS = MIN_ROUNDS * BLOCK_S
#: Allowed error relative to the product's root mean square. A result is rounded once.
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
    """The product y (m, n) = a (m, k) b (k, n). ``name`` is the layer's name, or "" for a square."""

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
        """Estimated microseconds of a launch, used only to choose the number of launches."""
        moved = self.operand_bytes + 2 * self.m * self.n
        return _LAUNCH_US + max(2 * self.m * self.n * self.k / _GUESS_FLOPS, moved / _GUESS_BYTES)

    @property
    def rest_s(self) -> float:
        return _SHORT_REST_S if self.expected_us < _SHORT_US else _REST_S

    def copies(self, is_cold: bool) -> int:
        """Return the number of operand pairs over which launches rotate.

        A single pair stays in L2 to the extent that it fits.
        """
        return copies_for(self.operand_bytes) if is_cold else 1

    def launches(self, copies: int = 1) -> int:
        """Return the number of launches per graph, a multiple of ``copies``."""
        return max(1, round(max(1.0, min(_MAX_LAUNCHES, _GRAPH_US / self.expected_us)) / copies)) * copies


def squares(sizes: Sequence[int], layouts: Sequence[str], dtype: str) -> list[Product]:
    return [Product(size, size, size, layout, dtype) for size in sizes for layout in layouts]


def transformer(layouts: Sequence[str], dtype: str) -> list[Product]:
    """Return twelve layers of public decoders, in each layout."""
    products = []
    for m, model, projection in _LAYERS:
        k, n = MODELS[model].projections[projection]
        products += [Product(m, n, k, layout, dtype, f"{model} {projection}") for layout in layouts]
    return products


class Operands:
    """Operands of one product, as torch tensors with ``copies`` copies of the same normally distributed numbers."""

    def __init__(self, product: Product, is_cold: bool) -> None:
        self.product, self.copies = product, product.copies(is_cold)
        a = _random(product.m, product.k, product.layout[0], product.dtype)
        b = _random(product.k, product.n, product.layout[1], product.dtype)
        self.a, self.b = ([each, *(each.clone() for _ in range(self.copies - 1))] for each in (a, b))

    def pair(self, index: int) -> tuple[Any, Any]:
        """Return the operands of launch ``index``."""
        return self.a[index % self.copies], self.b[index % self.copies]

    def out(self) -> Any:
        """Return an array (m, n) filled with NaN, which reveals elements that are not written."""
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
    """Return the RMS and maximum error of each result, relative to the RMS of the exact result.

    Results are compared with float64. Errors are NaN if the result contains a NaN. At most _ROWS evenly spaced rows are
    compared.
    """
    import torch

    (m, k), n = a.shape, b.shape[1]
    rows = torch.linspace(0, m - 1, min(m, _ROWS), dtype=torch.float64, device=a.device).round().long()
    left, step = a[rows].double(), max(1, _ELEMENTS // k)
    total, squared, maximum = 0.0, dict.fromkeys(outs, 0.0), dict.fromkeys(outs, 0.0)
    for begin in range(0, n, step):
        part = slice(begin, begin + step)
        exact = left @ b[:, part].double()
        total += float(exact.square().sum())
        for name, out in outs.items():
            difference = out[rows, part].double() - exact
            squared[name] += float(difference.square().sum())
            largest = float(difference.abs().max())
            maximum[name] = largest if math.isnan(largest) else max(maximum[name], largest)
    rms = math.sqrt(total / (len(rows) * n)) or 1.0
    return {name: (math.sqrt(squared[name] / (len(rows) * n)) / rms, maximum[name] / rms) for name in outs}


# ---- A cell ---------------------------------------------------------------------------------------------------------


def measure(
    stream: Any, product: Product, field: Mapping[str, Rival], names: Sequence[str], method: Method, is_cold: bool
) -> Cell:
    """Measure one product with the libraries in ``field`` and with our versions."""
    operands = Operands(product, is_cold)
    entrants, refused = find_entrants(stream, operands, field)
    configs = _configs(*operands.pair(0), names, refused)
    entrants += [_ours(operands, name) for name in configs]
    cell: Cell = {**product.facts}
    add_times(method, entrants, cell, refused, (TORCH, *configs))
    add_errors(cell, errors(operands.a[0], operands.b[0], chosen_results(cell, entrants)), ALLOWED[product.dtype])
    cell["entries"] = {name: config.entry for name, config in configs.items() if name in cell["us"]}
    return cell


def _configs(a: Any, b: Any, names: Sequence[str], refused: dict[str, str]) -> dict[str, Any]:
    """Return the configuration of each contender, and add versions without a kernel to ``refused``."""
    configs = {}
    for name in names:
        try:
            configs[name] = gemm_explain(a, b, version=name).config
        except (ArgumentError, TargetError) as error:
            refused[name] = failure(error)
    return configs


def _ours(operands: Operands, name: str) -> Entrant:
    out = operands.out()

    def run(index: int) -> None:
        a, b = operands.pair(index)
        gemm(a, b, out=out, version=name)

    return Entrant(name, operands.contender(name, run), out)


def all_configs(products: Sequence[Product], names: Sequence[str]) -> list[Any]:
    """Return the configurations of all products, so that their kernels compile together."""
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
    """Return the TFLOP/s of products and contenders, averaged over layouts, and the speedups over cuBLAS."""
    names = [*present(cells, RIVALS), *present(cells, LADDER), *present(cells, (AUTO,))]
    over = [name for name in (CUBLASLT, TORCH) if name in names and AUTO in names]
    products: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        products.setdefault((size_of(cell), cell["dtype"]), []).append(cell)
    rows = []
    for (size, dtype), members in products.items():
        rates = [shown(_mean([tflops(cell, name) for cell in members]), 0) for name in names]
        times = [[times_as_fast(cell, name) for cell in members] for name in over]
        ratios = [shown(part, 3) for each in times for part in (_mean(each), min(filter(None, each), default=None))]
        rows.append((size, dtype, " ".join(cell["layout"] for cell in members), *rates, *ratios))
    columns = ("M x N x K", "dtype", "layouts", *names)
    columns += tuple(title for name in over for title in (f"auto / {name}", "least"))
    note = "TFLOP/s, geometric mean over the layouts"
    return Table(columns, tuple(rows), f"{note}; {operands}" if operands else note)


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the geometric mean of the measured values."""
    known = [value for value in values if value]
    return geometric_mean(known) if known else None


def rates_line(cell: Cell, beginning: str) -> str:
    """Return a line with a cell's TFLOP/s, the libraries' algorithms, and the reasons for missing contenders."""
    rates = ", ".join(f"{name} {shown(tflops(cell, name), 0)}" for name in cell.get("us", {}))
    line = f"{beginning}: {rates} TFLOP/s" if rates else f"{beginning}: nothing measured"
    if (over := times_as_fast(cell, CUBLASLT)) is not None:
        line += f", {AUTO} / {CUBLASLT} {over:.3f}"
    line += "".join(f"; {name}: {detail}" for name, detail in cell.get("chosen", {}).items())
    return line + refusals(cell)


def gemm_summary(cells: Sequence[Cell]) -> list[str]:
    """Compare ``auto`` with each competing library over squares and over layers of transformers, for each type."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell.get("layer"):
            groups.setdefault(f"{cell['dtype']}, transformer layers", []).append(cell)
        elif cell["m"] == cell["n"] == cell["k"] >= SQUARES_FROM:
            groups.setdefault(f"{cell['dtype']}, squares from {SQUARES_FROM} upward", []).append(cell)
    return [
        line
        for group, members in groups.items()
        for rival in present(members, RIVALS)
        for line in summary_line(group, members, rival, lambda cell: f"{size_of(cell)} {cell['layout']}")
    ]


# ---- The script -----------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``cudatma bench gemm`` and return the exit status (1 if gemm or torch.mm failed or a result was wrong)."""
    parser = _parser()
    options = parser.parse_args(argv)
    shaped = options.size or options.product or options.layout or options.dtype or options.transformer
    if options.fp8 and (shaped or options.version):
        parser.error(
            "--fp8 cannot be combined with --size, --product, --layout, --dtype, --transformer or --version, because "
            "it has its own shapes and contenders"
        )
    if 0 < options.seconds < _MIN_SECONDS:
        parser.error(
            f"--seconds must be at least {_MIN_SECONDS} (the time of {MIN_ROUNDS} blocks), got {options.seconds}"
        )
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
        measure_calls(
            result,
            products,
            lambda product: measure(stream, product, field, names, method_of(stream, product), options.cold),
            lambda product: product.facts,
            rates_line,
        )
    return result.finish(f"Dense GEMM, {operands}")


def _products(options: argparse.Namespace) -> list[Product]:
    """Return the squares, the transformer layers and single products, grouped by type.

    --transformer without --size also measures the squares.
    """
    products, layouts = [], options.layout or LAYOUTS
    sizes = options.size or (() if options.product and not options.transformer else SIZES)
    for dtype in options.dtype or ("float16",):
        products += squares(sizes, layouts, dtype)
        products += transformer(layouts, dtype) if options.transformer else []
        products += [Product(m, n, k, layout, dtype) for m, n, k in options.product for layout in layouts]
    return products


def _size(text: str, largest: int = LARGEST) -> int:
    if not text.isdigit() or not 1 <= int(text) <= largest:
        raise argparse.ArgumentTypeError(f"must be an integer from 1 to {largest}, got {text}")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("gemm", __doc__, EXAMPLES)
    add = parser.add_argument
    sizes = ", ".join(map(str, SIZES))
    long_run = f"measure S seconds per contender at the power limit, in blocks of {BLOCK_S} s, instead of turns"
    add("--replays", type=int, default=11, help="number of timed turns (default: 11)")
    add("--size", type=_size, action="append", metavar="N", help=f"value of M = N = K, repeatable (default: {sizes})")
    length = partial(_size, largest=LONGEST)
    shape = ("M", "N", "K")
    add("--product", type=length, nargs=3, action="append", default=[], metavar=shape, help="other size, repeatable")
    help_layout = f"layout of A and of B, repeatable (default: {', '.join(LAYOUTS)})"
    add("--layout", choices=LAYOUTS, action="append", help=help_layout)
    help_dtype = "dtype of the operands, repeatable (default: float16)"
    add("--dtype", choices=tuple(ACTIVATION_TYPES), action="append", help=help_dtype)
    add(
        "--transformer",
        action="store_true",
        help="also measure twelve layers of Llama-3 and Qwen2.5 in prefill and decode",
    )
    add("--version", choices=LADDER, action="append", help="versions to measure, repeatable (default: all)")
    add("--seconds", type=seconds, default=0.0, metavar="S", help=long_run)
    add("--cold", action="store_true", help="rotate over copies of the operands whose total size exceeds L2")
    add("--rivals", choices=("deepgemm", "quack"), nargs="+", default=[], help="additional libraries to compare")
    add("--fp8", action="store_true", help="measure scaled fp8 products instead, and compare with torch and DeepGEMM")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
