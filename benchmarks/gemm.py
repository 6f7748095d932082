"""The dense GEMM: each version of the ladder and what `gemm` chooses, and cuBLAS, in one run, taking turns.

Operands are normally distributed and the same bits for all; they are as warm in L2 as a launch leaves them, with --cold
they come from memory. The GPU rests before each turn; with --seconds it does not, and its power limit decides. cuBLAS
takes part through torch.mm, through CuPy and as the fastest of the algorithms that cuBLASLt's heuristic returns. Every
result is compared with float64. --fp8 measures scaled fp8 products instead.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # the checkout need not be installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.compare import AUTO
from benchmarks.contest import finished, measured
from benchmarks.gemm_plot import picture
from benchmarks.gemm_products import LARGEST, LONGEST, SIZES, Operands, Product, errors, squares, transformer
from benchmarks.gemm_table import COLD, LADDER, WARM, gemm_summary, gemm_table, rates_line
from benchmarks.harness import BLOCK_S, LEAST_ROUNDS, measuring_stream, require_gpu
from benchmarks.report import Cell, Result, failure
from benchmarks.rivals.dense import ALWAYS, CUPY, OPTIONAL, TORCH
from benchmarks.turns import Entrant, Method, Rival, chosen, entered, field_of, judged, precompile, timed, timing_method
from cudatma.dtypes import ACTIVATION_TYPES
from cudatma.errors import ArgumentError, TargetError, duration
from cudatma.kernels.gemm.gemm import gemm, gemm_explain
from cudatma.kernels.gemm.problem import LAYOUTS
from tools.command_line import seconds

#: Of a long run, for each contender.
_LEAST_SECONDS = LEAST_ROUNDS * BLOCK_S
#: Part of the product's root mean square by which a result may be off; it is rounded once.
ALLOWED = {"float16": 1e-3, "bfloat16": 6e-3}

EXAMPLES = """examples:
  cudatma bench gemm --transformer --dtype float16 --dtype bfloat16 --json gemm.json --plot gemm.svg
  cudatma bench gemm --size 4096 --size 16384 --layout RC --rivals triton deepgemm quack
  cudatma bench gemm --product 1024 5120 5120 --layout RC --dtype bfloat16
  cudatma bench gemm --size 8192 --version v4 --seconds 2
  cudatma bench gemm --fp8 --rivals deepgemm
"""


def measure(
    stream: Any, product: Product, field: Mapping[str, Rival], names: Sequence[str], run: Method, is_cold: bool
) -> Cell:
    """One product, by all contenders, ours by their names. A rival that cannot run it is named with the reason."""
    operands = Operands(product, is_cold)
    entrants, refused = entered(stream, operands, field)
    specs = _specs(*operands.pair(0), names, refused)
    entrants += [_ours(operands, name) for name in specs]
    cell: Cell = {**product.facts, "us": {}, "entries": {}}
    timed(run, entrants, cell, refused, (TORCH, *specs))
    judged(cell, errors(operands.a[0], operands.b[0], chosen(cell, entrants)), ALLOWED[product.dtype])
    cell["entries"] = {name: spec.entry for name, spec in specs.items() if name in cell["us"]}
    return cell


def _specs(a: Any, b: Any, names: Sequence[str], refused: dict[str, str]) -> dict[str, Any]:
    """What gemm runs by the name of the contender. A version that has no kernel for the GPU or the product goes to
    ``refused``."""
    found = {}
    for name in names:
        try:
            said = gemm_explain(a, b, version=name)
        except (ArgumentError, TargetError) as error:
            refused[name] = failure(error)
        else:
            found[name] = said.spec
    return found


def _ours(operands: Operands, name: str) -> Entrant:
    out = operands.out()

    def run(index: int) -> None:
        a, b = operands.pair(index)
        gemm(a, b, out=out, version=name)

    return Entrant(name, operands.contender(name, run), out)


def compile_before(products: Sequence[Product], names: Sequence[str]) -> str:
    """Have the kernels of all products in the cache, compiled on all cores; says how that went."""
    import torch

    specs: list[Any] = []
    for product in products:
        a, b = (
            torch.empty(shape, dtype=getattr(torch, product.dtype), device="cuda")
            if letter == "R"
            else torch.empty(shape[::-1], dtype=getattr(torch, product.dtype), device="cuda").T
            for letter, shape in zip(product.layout, ((product.m, product.k), (product.k, product.n)), strict=True)
        )
        specs += _specs(a, b, names, {}).values()
    return precompile(specs)


def rivals_of(names: Sequence[str]) -> tuple[dict[str, Rival], dict[str, str]]:
    """field_of() the rivals of products."""
    return field_of(ALWAYS, OPTIONAL, names)


def main(argv: Sequence[str] | None = None) -> int:
    """``cudatma bench gemm``; returns the exit status: 1 if ours or torch.mm failed, or a result was wrong."""
    parser = _parser()
    options = parser.parse_args(argv)
    shaped = options.size or options.product or options.layout or options.dtype or options.transformer
    if options.fp8 and (shaped or options.plot or options.version):
        parser.error(
            "--fp8 has its own shapes and contenders, and neither --size, --product, --layout, --dtype, --transformer, "
            "--version nor --plot"
        )
    if 0 < options.seconds < _LEAST_SECONDS:
        allowed = f"{_LEAST_SECONDS} and more, {LEAST_ROUNDS} blocks"
        parser.error(f"argument --seconds: {options.seconds}; allowed: {allowed}")
    require_gpu(parser)
    try:
        import torch  # before measuring_stream(), which makes its stream current for torch too

        torch.cuda.init()
    except Exception as error:
        parser.exit(2, f"{parser.prog} compares with torch: {failure(error)}\n")
    return _run(options)


def _run(options: argparse.Namespace) -> int:
    field, told = rivals_of(options.rivals)
    operands = COLD if options.cold else WARM
    settings: dict[str, Any] = {"replays": options.replays}
    if options.seconds:
        operands += ", in long runs"
        settings = {"sustained_seconds": options.seconds, "block_seconds": BLOCK_S}
    settings |= {"operands": operands, "rivals": told}

    def method_of(stream: Any, product: Product) -> Method:
        return timing_method(stream, options.replays, product.rest_s, options.seconds)

    if options.fp8:
        from benchmarks import gemm_fp8

        return gemm_fp8.run(options, settings, method_of)
    if options.seconds:
        del field[CUPY]
        told[CUPY] = "absent: its calls cannot be captured, and the driver's queue does not hold those of a long run"
    table = partial(gemm_table, operands=operands)
    result = Result(settings, table, options.json, lambda cells: {"summary": gemm_summary(cells)})
    for name, what in told.items():
        result.say(f"{name}: {what}")
    began, products, names = time.monotonic(), _products(options), [AUTO, *(options.version or LADDER)]
    with measuring_stream() as stream:
        try:
            result.say(compile_before(products, names))
        except Exception as error:  # each product compiles its own then
            result.say(f"nothing compiled beforehand: {failure(error)}")
        measured(
            result,
            products,
            lambda product: measure(stream, product, field, names, method_of(stream, product), options.cold),
            lambda product: product.facts,
            rates_line,
        )
    result.say(duration(time.monotonic() - began))
    return finished(result, f"Dense GEMM, {operands}", picture, options.plot)


def _products(options: argparse.Namespace) -> list[Product]:
    """By type: the squares, then the transformer layers, then single products. --transformer without --size measures
    the squares, too."""
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
    parser = argparse.ArgumentParser(
        prog="cudatma bench gemm",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    sizes = ", ".join(map(str, SIZES))
    long_run = f"instead of turns a long run at the power limit, S for each contender, in blocks of {BLOCK_S} s"
    add("--json", type=Path, metavar="FILE", help="also write the results there, anew after every product")
    add("--plot", type=Path, metavar="FILE.svg", help="draw TFLOP/s over the size of the squares")
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
    add("--rivals", choices=tuple(OPTIONAL), nargs="+", default=[], help="who else takes part, where it is installed")
    add("--fp8", action="store_true", help="scaled fp8 products instead, against torch's and DeepGEMM's")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
