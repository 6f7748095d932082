"""Which calls of attention the benchmark measures, their operands, and how far a result is off."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import Contender, quick
from benchmarks.turns import Entrant
from cudatma.errors import duration

#: Queries and keys of a sequence; a batch has TOKENS of them, or one sequence, and all heads together HIDDEN columns.
LENGTHS, TOKENS, HIDDEN = (512, 1024, 2048, 4096, 8192, 16384, 32768), 16384, 2048
HEAD_DIMS = (64, 128, 256)
#: Of grouped heads: of q, of k and v, and their dim.
GROUPED = (32, 8, 128)
#: A graph takes about this long, and has no more launches. Who takes longer for one is not timed.
_GRAPH_US, _MAX_LAUNCHES, _LONGEST_US = 3000.0, 200, 250e3
#: The GPU rests this long before a turn.
REST_S = 0.006
#: Rows of a head, and heads, that are compared with float64.
_ROWS, _HEADS = 256, 4


@dataclass(frozen=True, slots=True)
class Shape:
    """As many queries as keys."""

    batch: int
    heads: int
    kv_heads: int
    length: int
    head_dim: int
    is_causal: bool
    dtype: str

    def __str__(self) -> str:
        heads = str(self.heads) if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        mask = "causal" if self.is_causal else "full"
        return f"{self.batch} x {self.length}, {heads} heads of {self.head_dim}, {mask}, {self.dtype}"

    @property
    def flops(self) -> float:
        """Of both products; of a causal call half."""
        whole = 4.0 * self.batch * self.heads * self.length**2 * self.head_dim
        return whole / 2 if self.is_causal else whole


def shapes(
    lengths: Sequence[int], head_dims: Sequence[int], masks: Sequence[bool], dtypes: Sequence[str], is_grouped: bool
) -> list[Shape]:
    """Calls of TOKENS tokens. is_grouped: also with GROUPED heads, where their head dim is among those measured."""
    kinds = [(HIDDEN // dim, HIDDEN // dim, dim) for dim in head_dims]
    kinds += [GROUPED] if is_grouped and GROUPED[2] in head_dims else []
    return [
        Shape(max(1, TOKENS // length), heads, kv_heads, length, dim, is_causal, dtype)
        for dtype in dtypes
        for heads, kv_heads, dim in kinds
        for is_causal in masks
        for length in lengths
    ]


class Operands:
    """q, k and v of a call, torch tensors (batch, length, heads, dim) of normally distributed numbers."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.q = _random(shape, shape.heads)
        self.k, self.v = (_random(shape, shape.kv_heads) for _ in range(2))

    def out(self) -> Any:
        """Like q, full of NaN: what is not written is seen."""
        import torch

        return torch.full_like(self.q, math.nan)

    def heads_first(self) -> tuple[Any, Any, Any]:
        """q, k and v as (batch, heads, length, dim), views."""
        return self.q.transpose(1, 2), self.k.transpose(1, 2), self.v.transpose(1, 2)


def _random(shape: Shape, heads: int) -> Any:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = shape.batch, shape.length, heads, shape.head_dim
    return torch.randn(sizes, device=device, dtype=torch.float32).to(getattr(torch, shape.dtype))


def entrant(stream: Any, name: str, run: Callable[[int], object], out: Any) -> Entrant:
    """Who takes part in the turns; a first launch decides how many launches its graph has. Raises RuntimeError where it
    does not run, or takes too long."""
    found = quick(stream, Contender(name, run, 1, 1), 1, 1)
    us = found.us(name)
    if us is None:
        raise RuntimeError(found.errors.get(name, "not measured"))
    if us > _LONGEST_US:
        raise RuntimeError(f"not timed, one launch takes {duration(1e-6 * us)}")
    launches = max(1, min(_MAX_LAUNCHES, round(_GRAPH_US / max(us, 1.0))))
    return Entrant(name, Contender(name, run, 1, launches), out)


def errors(operands: Operands, outs: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """By name of a result, how far it is from float64, as parts of the result's root mean square: the root mean square
    and the largest difference. NaN where a result has one anywhere.

    Rows of a few heads are compared, spread evenly, the first and the last row among them.
    """
    import torch

    shape, found = operands.shape, {}
    rows = torch.linspace(0, shape.length - 1, min(shape.length, _ROWS), dtype=torch.float64).round().long()
    rows = rows.to(operands.q.device)
    places = _places(shape)
    wanted = [_rows(operands, batch, head, rows) for batch, head in places]
    rms = math.sqrt(sum(float(each.square().mean()) for each in wanted) / len(wanted)) or 1.0
    for name, out in outs.items():
        if bool(out.isnan().any()):
            found[name] = (math.nan, math.nan)
            continue
        pairs = zip(places, wanted, strict=True)
        off = [out[batch, rows, head].double() - each for (batch, head), each in pairs]
        squared = sum(float(each.square().mean()) for each in off) / len(off)
        found[name] = (math.sqrt(squared) / rms, max(float(each.abs().max()) for each in off) / rms)
    return found


def _places(shape: Shape) -> list[tuple[int, int]]:
    """A few (sequence, head), from the first to the last."""
    total = shape.batch * shape.heads
    count = min(_HEADS, total)
    spread = [round(index * (total - 1) / max(1, count - 1)) for index in range(count)]
    return [divmod(place, shape.heads) for place in spread]


def _rows(operands: Operands, batch: int, head: int, rows: Any) -> Any:
    """Rows of a head of the result, in float64."""
    import torch

    shape = operands.shape
    of_kv = head * shape.kv_heads // shape.heads
    q, k, v = operands.q[batch, rows, head], operands.k[batch, :, of_kv], operands.v[batch, :, of_kv]
    logits = q.double() @ k.double().T * shape.head_dim**-0.5
    if shape.is_causal:
        logits.masked_fill_(torch.arange(shape.length, device=rows.device) > rows[:, None], -math.inf)
    return logits.softmax(-1) @ v.double()
