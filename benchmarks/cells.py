"""What a cell of the Marlin benchmark says, and the tables made of cells. Pure functions of timings.

us: ours. x_...: how many times faster ours is than that rival, in the same turns or blocks. x_floor: ours / F.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.harness import Measured
from benchmarks.operands import packed_bytes
from benchmarks.plan import CellKey
from benchmarks.report import Cell, Table, ratio, shown

OURS, CHAINED = "ours", "ours chained"
FLOOR, FLOOR_CHAINED = "floor", "floor chained"
#: Names of cuBLAS's variants in tables; contenders are named "cublas kn", "cublaslt nk 3".
_ORIENTATIONS = {"kn": "weight (K, N)", "nk": "weight (N, K), transposed"}
_LIBRARIES = {"cublas": "torch.mm", "cublaslt": "cuBLASLt"}


@dataclass(slots=True)
class Rivalry:
    """What was measured of one rival: its contenders' timings, and ours in the same turns or blocks."""

    measured: Measured
    contenders: Sequence[str]

    def best(self) -> tuple[str, float] | None:
        known = [(name, us) for name in self.contenders if (us := self.measured.us(name)) is not None]
        return min(known, key=lambda item: item[1], default=None)


@dataclass(slots=True)
class CellFacts:
    """All that was measured of one cell.

    together: what took turns (below M = 256), with ours, F and all rivals; else the first pair. rivalries: by rival.
    errors: by rival or contender. power: by rival, clock and watts of its blocks.
    """

    key: CellKey
    dtype: str
    regime: str
    together: Measured
    chained: Measured = field(default_factory=Measured)
    rivalries: Mapping[str, Rivalry] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)
    power: Mapping[str, Any] = field(default_factory=dict)


def described_way(name: str) -> str:
    """A cuBLAS contender in words: ``"cublaslt nk 3"`` -> ``"cuBLASLt, weight (N, K), transposed, algorithm 3"``."""
    library, _, rest = name.partition(" ")
    orientation, _, number = rest.partition(" ")
    if library not in _LIBRARIES:
        return name
    words = f"{_LIBRARIES[library]}, {_ORIENTATIONS.get(orientation, orientation)}"
    return f"{words}, algorithm {number}" if number else words


def make_cell(facts: CellFacts) -> Cell:
    """The cell as it is stored. error: why there is no time of ours; errors: what else could not run, by name."""
    k, n, m = facts.key.k, facts.key.n, facts.key.m
    us = facts.together.us(OURS)
    cell: Cell = {"k": k, "n": n, "m": m, "dtype": facts.dtype, "regime": facts.regime, "us": us}
    rivals = {name: _rival(rivalry) for name, rivalry in facts.rivalries.items()}
    cublas = rivals.get("cublas", {})
    cell |= {"cublas_us": cublas.get("us"), "cublas_layout": cublas.get("way", ""), "x_cublas": cublas.get("x")}
    floor_us = facts.together.us(FLOOR)
    cell |= {"floor_us": floor_us, "x_floor": ratio(us, floor_us)}
    chained, floor_chained = facts.chained.us(CHAINED), facts.chained.us(FLOOR_CHAINED)
    if chained is not None or floor_chained is not None:
        cell |= {"programmatic_us": chained, "programmatic_floor_us": floor_chained}
        cell["x_floor_programmatic"] = ratio(chained, floor_chained)
    cell["rivals"] = rivals
    against = {name: rival["x"] for name, rival in rivals.items() if rival["x"] is not None}
    best = min(against, key=lambda name: against[name], default="")
    cell |= {"best_rival": best, "x_best": against.get(best)}
    cell |= {"tb_s": ratio(packed_bytes(k, n) / 1e6, us), "tflop_s": ratio(2 * m * n * k / 1e6, us)}
    timings = facts.together.timings | facts.chained.timings
    cell["spread_us"] = {name: (each.low_us, each.high_us, each.samples) for name, each in timings.items()}
    if facts.power:
        cell["power"] = dict(facts.power)
    errors = {**facts.together.errors, **facts.chained.errors, **facts.errors}
    for rivalry in facts.rivalries.values():
        errors |= rivalry.measured.errors
    if errors:
        cell["errors"] = errors
    if us is None:
        cell["error"] = "; ".join(f"{name}: {text}" for name, text in errors.items()) or "not measured"
    return cell


def _rival(rivalry: Rivalry) -> dict[str, Any]:
    ours, best = rivalry.measured.us(OURS), rivalry.best()
    if best is None:
        return {"us": None, "ours_us": ours, "x": None, "way": ""}
    name, us = best
    ways = {each: took for each in rivalry.contenders if (took := rivalry.measured.us(each)) is not None}
    return {"us": us, "ours_us": ours, "x": ratio(us, ours), "way": described_way(name), "ways": ways}


def failed_cell(key: CellKey, dtype: str, error: str) -> Cell:
    """A cell of which nothing was measured."""
    return {"k": key.k, "n": key.n, "m": key.m, "dtype": dtype, "error": error}


def key_of(cell: Mapping[str, Any]) -> CellKey:
    return CellKey(cell["k"], cell["n"], cell["m"])


def rival_x(cell: Mapping[str, Any], name: str) -> float | None:
    """How many times faster ours is than a rival; None where that was not measured."""
    x = cell.get("rivals", {}).get(name, {}).get("x")
    return None if x is None else float(x)


def line_of(cell: Cell) -> str:
    """A cell as it is printed when it comes."""
    line = (
        f"{cell['k']:>6} x {cell['n']:<6} M {cell['m']:<5} {shown(cell.get('us')):>9} us"
        f"  {shown(cell.get('x_floor')):>5} F  chained {shown(cell.get('x_floor_programmatic')):>5} F"
        f"  {shown(cell.get('tb_s')):>5} TB/s  {shown(cell.get('tflop_s'), 1):>6} TFLOP/s"
    )
    for name, rival in cell.get("rivals", {}).items():
        line += f"  {name} {shown(rival['us'])} us {shown(rival['x'])}x"
    return line + "".join(f"  {name}: {why}" for name, why in cell.get("errors", {}).items() if not cell.get("error"))


def _in_order(cells: Sequence[Cell]) -> list[Cell]:
    """Layers in the order in which they were first measured; within a layer by M."""
    shapes = list(dict.fromkeys((cell["k"], cell["n"]) for cell in cells))
    return sorted(cells, key=lambda cell: (shapes.index((cell["k"], cell["n"])), cell["m"]))


_DETAIL = ("K x N", "M", "us", "F us", "x F", "chained us", "x F chained", "cuBLAS us", "x cuBLAS")


def detail_table(cells: Sequence[Cell]) -> Table:
    """Every cell with its figures; a column more for each further rival."""
    others = sorted({name for cell in cells for name in cell.get("rivals", {})} - {"cublas"})
    rows = [
        (
            *(f"{c['k']} x {c['n']}", c["m"], shown(c.get("us")), shown(c.get("floor_us")), shown(c.get("x_floor"))),
            *(shown(c.get("programmatic_us")), shown(c.get("x_floor_programmatic"))),
            *(shown(c.get("cublas_us")), shown(c.get("x_cublas"))),
            *(shown(rival_x(c, name)) for name in others),
            *(shown(c.get("x_best")), shown(c.get("tb_s")), shown(c.get("tflop_s"), 1)),
        )
        for c in _in_order(cells)
    ]
    columns = (*_DETAIL, *(f"x {name}" for name in others), "x best", "TB/s", "TFLOP/s")
    note = (
        "x NAME: how many times faster than it, in the same turns, or from M = 256 on in alternating blocks; "
        "x best: than the fastest of all. F: the time to stream the int4 weights and scales; TB/s counts those."
    )
    return Table(columns, tuple(rows), note)


def summary_table(cells: Sequence[Cell]) -> Table:
    """A row a layer and a column a batch size: microseconds, and in brackets the speed-up over cuBLAS, then over the
    other rivals. F per layer."""
    shapes = list(dict.fromkeys((c["k"], c["n"]) for c in cells))
    m_values = sorted({c["m"] for c in cells})
    found = {(c["k"], c["n"], c["m"]): c for c in cells}

    def value(k: int, n: int, m: int) -> str:
        cell = found.get((k, n, m))
        if cell is None or cell.get("us") is None:
            return "-"
        us = float(f"{cell['us']:.3g}")
        over = [shown(cell.get("x_cublas"))]
        over += [f"{name} {shown(rival['x'])}" for name, rival in cell.get("rivals", {}).items() if name != "cublas"]
        return f"{us:g} ({', '.join(over)})"

    rows = []
    for k, n in shapes:
        floors = [c["floor_us"] for c in cells if (c["k"], c["n"]) == (k, n) and c.get("floor_us") is not None]
        rows.append((f"{k} x {n}", shown(min(floors, default=None), 1), *(value(k, n, m) for m in m_values)))
    note = (
        "Microseconds, in brackets the speed-up over cuBLAS in the same run (torch.mm or the fastest algorithm of "
        "cuBLASLt, the better of both weight orientations); weights cold in L2, group 128, symmetric. Below M = 256 "
        "the GPU rests before each turn; from there on, where power bounds it, both alternate in blocks. F: the "
        "time to merely stream the int4 weights and scales."
    )
    return Table(("K x N", "F", *(f"M = {m}" for m in m_values)), tuple(rows), note)
