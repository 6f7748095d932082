"""Which products the dense GEMM's benchmark measures, their operands, and how far a result is off."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import Contender, copies_for
from tools.model_layers import MODELS

#: M = N = K, measured unless --size names others, which go up to LARGEST; a single product's M, N, K go up to LONGEST.
SIZES, LARGEST, LONGEST = (256, 512, 1024, 2048, 4096, 8192), 16384, 131072
#: Layers of decoders with M rows of activations: prefill, then decode.
_LAYERS = (
    *((8192, "llama3-8b", "qkv"), (8192, "llama3-8b", "gate_up"), (8192, "llama3-8b", "down")),
    *((2048, "llama3-70b", "qkv"), (2048, "llama3-70b", "o"), (2048, "llama3-70b", "gate_up")),
    *((2048, "llama3-70b", "down"), (2048, "qwen2.5-7b", "gate_up")),
    *((128, "llama3-70b", "down"), (64, "llama3-8b", "o"), (16, "llama3-8b", "gate_up"), (16, "qwen2.5-7b", "down")),
)
#: TFLOP/s and bytes per microsecond by which times are guessed, and the least time of a launch.
_GUESS_FLOPS, _GUESS_BYTES, _LAUNCH_US = 600e6, 3e6, 2.0
#: A graph takes about this long, and has no more launches.
_GRAPH_US, _MAX_LAUNCHES = 3000.0, 400
#: Before its turn a contender's GPU rests this long, and where a launch takes less than the second number, the third.
_REST_S, _SHORT_US, _SHORT_REST_S = 0.006, 10.0, 0.002
#: Rows of a result that are compared with float64, spread evenly, and elements of B that are float64 at a time.
_ROWS, _ELEMENTS = 4096, 1 << 27


@dataclass(frozen=True, slots=True)
class Product:
    """y (m, n) = a (m, k) b (k, n). name: of the layer that it is, empty for a square."""

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
    def facts(self) -> dict[str, Any]:
        """What a cell says of it."""
        facts = {"m": self.m, "n": self.n, "k": self.k, "layout": self.layout, "dtype": self.dtype}
        return {**facts, "layer": self.name} if self.name else facts

    @property
    def operand_bytes(self) -> int:
        return (self.m + self.n) * self.k * (1 if self.dtype.startswith("float8") else 2)

    @property
    def expected_us(self) -> float:
        """About what a launch takes; it decides how many launches are timed, and nothing else."""
        moved = self.operand_bytes + 2 * self.m * self.n
        return _LAUNCH_US + max(2 * self.m * self.n * self.k / _GUESS_FLOPS, moved / _GUESS_BYTES)

    @property
    def rest_s(self) -> float:
        return _SHORT_REST_S if self.expected_us < _SHORT_US else _REST_S

    def copies(self, is_cold: bool) -> int:
        """Pairs of operands that launches rotate over; 1 leaves them as warm in L2 as a launch does."""
        return copies_for(self.operand_bytes) if is_cold else 1

    def launches(self, copies: int = 1, most: int = _MAX_LAUNCHES, graph_us: float = _GRAPH_US) -> int:
        """Launches of a graph, a multiple of ``copies``."""
        return max(1, round(max(1.0, min(most, graph_us / self.expected_us)) / copies)) * copies


def squares(sizes: Sequence[int], layouts: Sequence[str], dtype: str) -> list[Product]:
    return [Product(size, size, size, layout, dtype) for size in sizes for layout in layouts]


def transformer(layouts: Sequence[str], dtype: str) -> list[Product]:
    """Twelve layers of public decoders, in each layout."""
    found = []
    for m, model, projection in _LAYERS:
        k, n = MODELS[model].projections[projection]
        found += [Product(m, n, k, layout, dtype, f"{model} {projection}") for layout in layouts]
    return found


class Operands:
    """One product's operands on the GPU, torch tensors: ``copies`` of the same normally distributed numbers."""

    def __init__(self, product: Product, is_cold: bool) -> None:
        self.product, self.copies = product, product.copies(is_cold)
        a = _random(product.m, product.k, product.layout[0], product.dtype)
        b = _random(product.k, product.n, product.layout[1], product.dtype)
        self.a, self.b = ([each, *(each.clone() for _ in range(self.copies - 1))] for each in (a, b))

    def pair(self, index: int) -> tuple[Any, Any]:
        """What the launch of this number reads."""
        return self.a[index % self.copies], self.b[index % self.copies]

    def out(self) -> Any:
        """(m, n) of the operands' dtype, full of NaN: what is not written is seen."""
        import torch

        return torch.full((self.product.m, self.product.n), math.nan, dtype=self.a[0].dtype, device=self.a[0].device)

    def contender(self, name: str, run: Any, delay: Any = None, most: int = _MAX_LAUNCHES) -> Contender:
        """A contender in the turns. run: is given the number of a launch."""
        return Contender(name, run, self.copies, self.product.launches(self.copies, most), delay)


def _random(rows: int, columns: int, letter: str, dtype: str) -> Any:
    import torch

    shape = (rows, columns) if letter == "R" else (columns, rows)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    made = torch.randn(shape, device=device, dtype=torch.float32).to(getattr(torch, dtype))
    return made if letter == "R" else made.T


def errors(a: Any, b: Any, outs: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """By name of a result, how far it is from the product in float64, as parts of the product's root mean square: the
    root mean square and the largest difference. NaN where a result has one.

    Every row is compared, up to _ROWS of them; of more rows, as many that are spread evenly.
    """
    import torch

    (m, k), n = a.shape, b.shape[1]
    rows = torch.linspace(0, m - 1, min(m, _ROWS), dtype=torch.float64, device=a.device).round().long()
    left, step = a[rows].double(), max(1, _ELEMENTS // k)
    total, squared, most = 0.0, dict.fromkeys(outs, 0.0), dict.fromkeys(outs, 0.0)
    for begin in range(0, n, step):
        part = slice(begin, begin + step)
        wanted = left @ b[:, part].double()
        total += float(wanted.square().sum())
        for name, out in outs.items():
            off = out[rows, part].double() - wanted
            squared[name] += float(off.square().sum())
            largest = float(off.abs().max())
            most[name] = largest if math.isnan(largest) else max(most[name], largest)
    rms = math.sqrt(total / (len(rows) * n)) or 1.0
    return {name: (math.sqrt(squared[name] / (len(rows) * n)) / rms, most[name] / rms) for name in outs}
