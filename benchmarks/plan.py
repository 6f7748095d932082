"""Which cells of the Marlin benchmark to measure in the time there is: an estimate of each, the important ones first.

A run may have a GPU for minutes only. The estimates are rough; the run keeps to its budget by the clock, and chooses
again among what is left whenever it comes to another layer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from benchmarks.harness import copies_for, launches_for
from benchmarks.operands import packed_bytes
from benchmarks.shapes import FIVE, LARGE
from tools.model_layers import Shape, model_shapes

#: From here on clocks fall in long runs: ours and each rival alternate in blocks for seconds.
SUSTAINED_FROM = 256
#: Up to here F is measured for chains of programmatic launches too.
PROGRAMMATIC_UP_TO = 16
#: Values of M and layers by importance: those that the bars ask for come first.
_M_TIERS = ((1, 16, 64, 256, 1024), (32, 128, 512, 4096), (2048, 8192))
_SHAPE_TIERS = ((*FIVE, *LARGE), (*model_shapes("llama3-70b"), *model_shapes("llama3-8b")))
#: What a GPU of the H200's kind does: bytes and floating-point operations in a microsecond.
_BYTES_PER_US, _FLOP_PER_US, _LAUNCH_US = 4.0e6, 6.0e8, 4.0
#: Seconds for a layer's operands and its F; for what a rival compiles; for a cell's captures and checks.
_SHAPE_S, _CELL_S = 3.0, 0.4
_RIVAL_S = {"cublas": 0.5, "humming": 15.0, "marlin": 0.5, "machete": 0.5, "quack": 3.0, "tinygemm": 1.0}
#: Takes part at small M only.
_SMALL_M = "tinygemm"
#: Ways among which cuBLAS' fastest is chosen, and Machete's, and how often each runs.
_CUBLAS_WAYS, _MACHETE_WAYS, _CHOOSING_S = 34, 9, 0.02


@dataclass(frozen=True, slots=True, order=True)
class CellKey:
    """A cell: (K, N) of a layer, and M."""

    k: int
    n: int
    m: int

    @property
    def shape(self) -> Shape:
        return self.k, self.n

    def __str__(self) -> str:
        return f"{self.k}x{self.n} M={self.m}"


def expected_us(k: int, n: int, m: int, weight_bytes: int | None = None) -> float:
    """About what one launch takes: the larger of its weight's bytes (int4 unless given) and its arithmetic."""
    nbytes = packed_bytes(k, n) if weight_bytes is None else weight_bytes
    return max(nbytes / _BYTES_PER_US, 2 * m * n * k / _FLOP_PER_US) + _LAUNCH_US


@dataclass(frozen=True, slots=True)
class Costs:
    """What a run is asked for. replays: timed ones of a cold cell. seconds: of one pair. rivals: by name."""

    replays: int
    seconds: float
    rivals: tuple[str, ...]

    def shape_s(self) -> float:
        """Seconds for a layer before its first cell."""
        return _SHAPE_S + sum(_RIVAL_S.get(name, 0.0) for name in self.rivals)

    def cell_s(self, key: CellKey) -> float:
        """Seconds for one cell."""
        k, n, m = key.k, key.n, key.m
        took = _CELL_S
        if "cublas" in self.rivals:
            took += _CUBLAS_WAYS * (_CHOOSING_S + 3e-6 * expected_us(k, n, m, 2 * k * n))
        if "machete" in self.rivals:
            took += _MACHETE_WAYS * (_CHOOSING_S + 2e-5 * expected_us(k, n, m))
        if m >= SUSTAINED_FROM:
            return took + self.seconds * max(1, sum(name != _SMALL_M for name in self.rivals))
        us, copies = expected_us(k, n, m), copies_for(packed_bytes(k, n))
        graphs = 2 + len(self.rivals) * 2 + (2 if m <= PROGRAMMATIC_UP_TO else 0)
        return took + graphs * (2 * self.replays + 2) * launches_for(packed_bytes(k, n), copies, us) * us * 1e-6

    def total_s(self, keys: Collection[CellKey]) -> float:
        """Seconds for all of them."""
        return sum(map(self.cell_s, keys)) + self.shape_s() * len({key.shape for key in keys})


def importance(key: CellKey) -> int:
    """0 for the cells to measure first; larger, later."""
    m_values = next((tier for tier, each in enumerate(_M_TIERS) if key.m in each), len(_M_TIERS))
    shape = next((tier for tier, each in enumerate(_SHAPE_TIERS) if key.shape in each), len(_SHAPE_TIERS))
    return m_values + shape


def all_cells(shapes: Iterable[Shape], m_values: Sequence[int]) -> list[CellKey]:
    """Every cell of these layers, layer by layer."""
    return [CellKey(k, n, m) for k, n in shapes for m in m_values]


def choose(
    keys: Sequence[CellKey], costs: Costs, budget_s: float | None, begun: Collection[Shape] = ()
) -> tuple[list[CellKey], list[CellKey]]:
    """The cells that fit into ``budget_s`` seconds (None: all), the most important first, and those left out.

    Both come in the order of ``keys``. begun: layers whose operands are already there.
    """
    if budget_s is None:
        return list(keys), []
    taken: set[CellKey] = set()
    ready, left = set(begun), budget_s
    for key in sorted(keys, key=importance):  # sorting is stable: within a tier the order of the layers
        price = costs.cell_s(key) + (0.0 if key.shape in ready else costs.shape_s())
        if price <= left:
            taken.add(key)
            ready.add(key.shape)
            left -= price
    return [key for key in keys if key in taken], [key for key in keys if key not in taken]


def grouped(keys: Iterable[CellKey]) -> dict[Shape, list[CellKey]]:
    """By layer, in the order in which each first comes."""
    found: dict[Shape, list[CellKey]] = {}
    for key in keys:
        found.setdefault(key.shape, []).append(key)
    return found


def described(keys: Sequence[CellKey]) -> str:
    """Cells in few words: ``"4096x4096 M=1,16; 8192x8192 M=1"``."""
    return "; ".join(f"{k}x{n} M={','.join(str(key.m) for key in cells)}" for (k, n), cells in grouped(keys).items())
