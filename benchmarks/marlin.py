"""W4A16 Marlin GEMM against cuBLAS and the read floor, weights cold in L2, group 128, symmetric."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # the checkout need not be installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.bars import verdicts
from benchmarks.harness import (
    Contender,
    Measured,
    cold,
    copies_for,
    launches_for,
    measuring_stream,
    require_card,
    sustained,
)
from benchmarks.operands import SHAPES, filled, packed_bytes, random_numbers, random_packed, to_torch
from benchmarks.read_floor import Floor, FloorBench
from benchmarks.report import Cell, Result, Table, failure, print_table, ratio, shown

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
QUICK_SHAPES, QUICK_TOKENS = ((4096, 4096), (8192, 28672)), (1, 16, 64, 256, 1024)
#: From here on clocks fall in long runs: each rival runs for long, by itself and in turns with the other.
SUSTAINED_FROM = 256
_ALTERNATING = "alternating "
_CUBLAS = {"cublas kn": "weight (K, N)", "cublas nk": "weight (N, K), transposed"}
#: Turns for choosing cuBLAS' better orientation before a long run.
_CHOOSING_REPLAYS = 3
_DETAIL = ("K x N", "M", "us", "cuBLAS us", "x cuBLAS", "in turns", "F us", "x F", "TB/s", "TFLOP/s")


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's operands: packed weights and dense ones, each several times, and activations for the most tokens.

    dense: torch tensors (K * N,), none where cuBLAS is no rival; cublas_out then is None.
    """

    k: int
    n: int
    packed: list[Any]
    dense: list[Any]
    x: Any
    out: Any
    cublas_out: Any


def make_layer(k: int, n: int, dtype: str, most_tokens: int, *, with_dense: bool = True) -> Layer:
    """Random operands on the current device."""
    import cupy

    nbytes, dense_bytes = packed_bytes(k, n), 2 * k * n
    numbers = random_numbers(cupy, 1 << 22, dtype, 3, 0.02)
    x = filled(cupy, (most_tokens, k), random_numbers(cupy, (1 << 22) - 8, dtype, 4))
    packed = random_packed(cupy, k, n, dtype, copies_for(nbytes))
    out = cupy.zeros((most_tokens, n), cupy.uint16).view(x.dtype)
    if not with_dense:
        return Layer(k, n, packed, [], x, out, None)
    dense = [to_torch(filled(cupy, (k * n,), numbers)) for _ in range(copies_for(dense_bytes))]
    return Layer(k, n, packed, dense, x, out, to_torch(cupy.zeros_like(out)))


def ours(layer: Layer, m: int, feed: Any = "tma", name: str = "ours") -> Contender:
    """marlin_gemm on CuPy arrays, rotating over the packed weights."""
    import cudatma

    x, out, weights = layer.x[:m], layer.out[:m], layer.packed

    def run(index: int) -> None:
        cudatma.marlin_gemm(x, weights[index % len(weights)], out=out, feed=feed)

    return Contender(name, run, len(weights), launches_for(packed_bytes(layer.k, layer.n), len(weights)))


def cublas(layer: Layer, m: int) -> list[Contender]:
    """torch.mm into an out tensor, for both orientations of the weight."""
    import torch

    x, out, count = to_torch(layer.x[:m]), layer.cublas_out[:m], len(layer.dense)
    views = (
        [w.view(layer.k, layer.n) for w in layer.dense],
        [w.view(layer.n, layer.k).t() for w in layer.dense],
    )

    def contender(name: str, weights: list[Any]) -> Contender:
        def run(index: int) -> None:
            torch.mm(x, weights[index % count], out=out)

        return Contender(name, run, count, launches_for(2 * layer.k * layer.n, count))

    return [contender(name, weights) for name, weights in zip(_CUBLAS, views, strict=True)]


def measure(stream: Any, layer: Layer, m: int, floor: Contender | None, replays: int, seconds: float) -> Measured:
    """All rivals of one cell, taking turns."""
    rivals = cublas(layer, m)
    if m < SUSTAINED_FROM:
        return cold(stream, [ours(layer, m), *rivals, *([floor] if floor else [])], replays)
    chosen = cold(stream, rivals, _CHOOSING_REPLAYS)
    faster = min(rivals, key=lambda rival: chosen.us(rival.name) or float("inf"))
    together = sustained(stream, [ours(layer, m), faster], seconds)
    timings = {_ALTERNATING + name: timing for name, timing in together.timings.items()}
    errors = chosen.errors | together.errors
    for rival in (ours(layer, m), faster):
        alone = sustained(stream, [rival], seconds / 2)
        timings, errors = timings | alone.timings, errors | alone.errors
    return Measured(timings, errors)


def make_cell(k: int, n: int, m: int, dtype: str, measured: Measured, floor: Floor | None) -> Cell:
    """What one cell says. us: ours; x_cublas: cuBLAS / ours; x_floor: ours / F; tb_s: weight bytes over time.

    Sustained: each by itself; x_alternating: cuBLAS / ours where both take turns in blocks.
    """
    us = measured.us("ours")
    known = [(name, took) for name in _CUBLAS if (took := measured.us(name)) is not None]
    layout, cublas_us = min(known, key=lambda item: item[1], default=("", None))
    floor_us = measured.us("floor") or (floor.us if floor else None)
    cell: Cell = {"k": k, "n": n, "m": m, "dtype": dtype, "us": us, "cublas_us": cublas_us, "floor_us": floor_us}
    cell["cublas_layout"] = _CUBLAS.get(layout, "")
    cell["regime"] = "cold" if m < SUSTAINED_FROM else "sustained"
    if m >= SUSTAINED_FROM:
        alternating = measured.us(_ALTERNATING + "ours"), measured.us(_ALTERNATING + layout)
        cell |= {"alternating_us": alternating[0], "alternating_cublas_us": alternating[1]}
        cell["x_alternating"] = ratio(alternating[1], alternating[0])
    cell |= {"x_cublas": ratio(cublas_us, us), "x_floor": ratio(us, floor_us)}
    cell |= {"tb_s": ratio(packed_bytes(k, n) / 1e6, us), "tflop_s": ratio(2 * m * n * k / 1e6, us)}
    cell["spread_us"] = {name: (t.low_us, t.high_us, t.samples) for name, t in measured.timings.items()}
    if measured.errors:
        cell["error"] = "; ".join(f"{name}: {text}" for name, text in measured.errors.items())
    return cell


def line_of(cell: Cell) -> str:
    """A cell as it is printed when it comes."""
    return (
        f"{cell['k']:>6} x {cell['n']:<6} M {cell['m']:<5} {shown(cell.get('us')):>9} us"
        f"  cuBLAS {shown(cell.get('cublas_us')):>9} us  {shown(cell.get('x_cublas')):>5}x"
        f"  {shown(cell.get('x_floor')):>7} F  {shown(cell.get('tb_s')):>5} TB/s"
        f"  {shown(cell.get('tflop_s'), 1):>6} TFLOP/s"
    )


def detail_table(cells: Sequence[Cell]) -> Table:
    """Every cell with all its figures."""
    rows = [
        (
            *(f"{c['k']} x {c['n']}", c["m"], shown(c.get("us")), shown(c.get("cublas_us")), shown(c.get("x_cublas"))),
            shown(c.get("x_alternating")),
            *(shown(c.get("floor_us")), shown(c.get("x_floor")), shown(c.get("tb_s")), shown(c.get("tflop_s"), 1)),
        )
        for c in cells
    ]
    note = (
        "x cuBLAS: cuBLAS time / ours, from M = 256 on each by itself; in turns: in alternating blocks of 40 ms. "
        "x F: ours / F; TB/s: int4 weights and scales."
    )
    return Table(_DETAIL, tuple(rows), note)


def summary_table(cells: Sequence[Cell]) -> Table:
    """A row a layer and a column a batch size: microseconds, and behind them the speed-up over cuBLAS. F per layer."""
    shapes = list(dict.fromkeys((c["k"], c["n"]) for c in cells))
    tokens = sorted({c["m"] for c in cells})
    found = {(c["k"], c["n"], c["m"]): c for c in cells}

    def value(k: int, n: int, m: int) -> str:
        cell = found.get((k, n, m))
        if cell is None or cell.get("us") is None:
            return "-"
        us = float(f"{cell['us']:.3g}")
        return f"{us:g} ({shown(cell.get('x_cublas'))})"

    rows = []
    for k, n in shapes:
        floors = [c["floor_us"] for c in cells if (c["k"], c["n"]) == (k, n) and c.get("floor_us") is not None]
        rows.append((f"{k} x {n}", shown(min(floors, default=None), 1), *(value(k, n, m) for m in tokens)))
    note = (
        "Microseconds, in brackets the speed-up over cuBLAS (torch.mm, the faster of both weight orientations) in the "
        "same run; weights cold in L2, group 128, symmetric. From M = 256 on, where power bounds the card, each runs "
        "by itself for half a second. F: the time to merely stream the int4 weights and scales."
    )
    return Table(("K x N", "F", *(f"M = {m}" for m in tokens)), tuple(rows), note)


def main(argv: Sequence[str] | None = None) -> int:
    """``cudatma bench marlin``; returns the exit status: with --check 1 unless every bar is met."""
    parser = _parser()
    options = parser.parse_args(argv)
    require_card(parser)
    shapes = options.shape or (QUICK_SHAPES if options.quick else SHAPES)
    tokens = options.m or (QUICK_TOKENS if options.quick else TOKENS)
    seconds = min(options.seconds, 0.3) if options.quick else options.seconds
    settings = {"dtype": options.dtype, "group_size": 128, "symmetric": True, "replays": options.replays}
    result = Result({**settings, "sustained_seconds": seconds}, summary_table, options.json)
    began = time.monotonic()
    try:
        import torch
    except ImportError as error:
        parser.exit(2, f"cuBLAS is reached through torch: {error}\n")
    torch.cuda.init()
    with measuring_stream() as stream:
        floor_bench = None
        try:
            floor_bench = FloorBench(max(packed_bytes(k, n) for k, n in shapes))
        except Exception as error:
            result.say(f"no F: {failure(error)}")
        for k, n in shapes:
            _measure_layer(stream, result, floor_bench, (k, n), tokens, options.replays, seconds)
    print_table(result.console, detail_table(result.cells), f"Marlin W4A16, {options.dtype}")
    found = verdicts(result.cells)
    for verdict in found:
        result.say(str(verdict))
    result.say(f"{time.monotonic() - began:.0f} s")
    return int(options.check and any(verdict.status != "met" for verdict in found))


def _measure_layer(
    stream: Any,
    result: Result,
    floor_bench: FloorBench | None,
    shape: tuple[int, int],
    tokens: Sequence[int],
    replays: int,
    seconds: float,
) -> None:
    import cupy

    k, n = shape
    dtype, floor = str(result.settings["dtype"]), None
    again = None
    try:
        if floor_bench is not None:
            floor, _ = floor_bench.search(stream, packed_bytes(k, n), replays)
            again = floor_bench.contender(floor.nbytes, floor.config)
            result.say(f"{k} x {n}: F = {floor.us:.2f} us ({floor.terabytes_per_second:.2f} TB/s, {floor.config})")
    except Exception as error:
        result.say(f"{k} x {n}: no F: {failure(error)}")
    try:
        layer = make_layer(k, n, dtype, max(tokens))
    except Exception as error:
        for m in tokens:
            cell = {"k": k, "n": n, "m": m, "dtype": dtype, "error": failure(error)}
            result.add(cell, line_of(cell))
        return
    for m in tokens:
        try:
            cell = make_cell(k, n, m, dtype, measure(stream, layer, m, again, replays, seconds), floor)
        except Exception as error:
            cell = {"k": k, "n": n, "m": m, "dtype": dtype, "error": failure(error)}
        result.add(cell, line_of(cell))
    del layer
    with contextlib.suppress(Exception):  # after a trap not even memory can be given back
        cupy.get_default_memory_pool().free_all_blocks()


def parse_shape(text: str) -> tuple[int, int]:
    """``"8192x28672"`` -> (8192, 28672); multiples of 64. Raises ArgumentTypeError of argparse."""
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.isdigit() and int(part) and int(part) % 64 == 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text}: write KxN, both multiples of 64, as in 8192x28672")
    return int(parts[0]), int(parts[1])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cudatma bench marlin", description=__doc__)
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="also write the results there")
    add("--dtype", choices=("float16", "bfloat16"), default="float16", help="of activations and scales")
    add("--quick", action="store_true", help="two layers, five batch sizes, short runs")
    add("--shape", type=parse_shape, action="append", metavar="KxN", help="a layer, repeatable (default: five)")
    add("--m", type=int, action="append", metavar="M", help="tokens, repeatable (default: 1 to 4096)")
    add("--replays", type=int, default=11, help="timed replays for M < 256 (default: 11)")
    add("--seconds", type=float, default=1.0, help="how long rivals alternate from M = 256 on (default: 1)")
    add("--check", action="store_true", help="exit status 1 unless every bar is met")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
