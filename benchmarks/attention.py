"""Time forward attention: the ladder's versions, the version that `attention` chooses, cuDNN, FlashAttention-2 and -3.

The kernels take turns. A batch has 16384 tokens, and all heads together have 2048 columns. Calls with grouped heads
have 32 query heads and 8 KV heads. Operands are normally distributed. cuDNN and FlashAttention-2 run through torch.
FlashAttention-3 runs if a package provides its library. Rows of each result are compared with a float64 reference.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # The checkout need not be installed.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.contest import (
    AUTO,
    BEST,
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
    with_best,
)
from benchmarks.harness import Contender, measuring_stream, quick, require_gpu, require_torch
from benchmarks.report import Cell, Result, Table, failure, make_parser, shown
from cudatma.dtypes import ACTIVATION_TYPES
from cudatma.errors import ArgumentError, TargetError, duration
from cudatma.kernels.attention.attention import attention, attention_explain
from cudatma.kernels.attention.config import VERSIONS

LADDER = VERSIONS.names
CUDNN, FA2, FA3, FA4, FLASHINFER = RIVALS = ("cuDNN", "FA2", "FA3", "FA4", "FlashInfer")
#: Number of queries and keys per sequence. A batch contains TOKENS tokens or a single sequence. All heads together have
#: HIDDEN columns.
LENGTHS, TOKENS, HIDDEN = (512, 1024, 2048, 4096, 8192, 16384, 32768), 16384, 2048
LONGEST = 1 << 17
HEAD_DIMS = (64, 128, 256)
#: Grouped heads: number of query heads, number of KV heads, and head dimension.
GROUPED = (32, 8, 128)
#: Range of lengths in the summary of all calls.
SUMMED = (512, 16384)
#: Duration and maximum number of launches of a graph. A contender is not timed if its launch takes at least _MAX_US.
_GRAPH_US, _MAX_LAUNCHES, _MAX_US = 3000.0, 200, 250e3
#: Idle time of the GPU before a turn, in seconds.
REST_S = 0.006
#: Number of rows per head, and number of heads, that are compared with float64.
_ROWS, _HEADS = 256, 4
#: Allowed error relative to the result's root mean square. Probabilities and the result are rounded.
ALLOWED = {"float16": 2e-3, "bfloat16": 1.2e-2}

EXAMPLES = """examples:
  cudatma bench attention --json attention.json
  cudatma bench attention --head-dim 128 --length 8192 --causal --version a4 --rivals fa4
"""


# ---- Calls ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shape:
    """A call with ``length`` queries and keys."""

    batch: int
    heads: int
    kv_heads: int
    length: int
    head_dim: int
    is_causal: bool
    dtype: str

    def __str__(self) -> str:
        mask = "causal" if self.is_causal else "full"
        return f"{self.batch} x {self.length}, {heads_of(self.facts)} heads of {self.head_dim}, {mask}, {self.dtype}"

    @property
    def flops(self) -> float:
        """Number of floating-point operations in both matrix products, halved for a causal call."""
        whole = 4.0 * self.batch * self.heads * self.length**2 * self.head_dim
        return whole / 2 if self.is_causal else whole

    @property
    def facts(self) -> Cell:
        names = ("batch", "heads", "kv_heads", "length", "head_dim", "dtype", "flops")
        return {name: getattr(self, name) for name in names} | {"mask": "causal" if self.is_causal else "full"}


def shapes(
    lengths: Sequence[int], head_dims: Sequence[int], masks: Sequence[bool], dtypes: Sequence[str], is_grouped: bool
) -> list[Shape]:
    """Return calls with TOKENS tokens. If ``is_grouped``, include GROUPED heads if their dimension is measured."""
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
    """Normally distributed q, k and v for a call, as torch tensors (batch, length, heads, dim)."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.q = _random(shape, shape.heads)
        self.k, self.v = (_random(shape, shape.kv_heads) for _ in range(2))

    def out(self) -> Any:
        """Return an array like q filled with NaN, which reveals elements that are not written."""
        import torch

        return torch.full_like(self.q, math.nan)

    def heads_first(self) -> tuple[Any, Any, Any]:
        """Return q, k and v as views (batch, heads, length, dim)."""
        return self.q.transpose(1, 2), self.k.transpose(1, 2), self.v.transpose(1, 2)


def _random(shape: Shape, heads: int) -> Any:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = shape.batch, shape.length, heads, shape.head_dim
    return torch.randn(sizes, device=device, dtype=torch.float32).to(getattr(torch, shape.dtype))


def entrant(stream: Any, name: str, run: Callable[[int], object], out: Any) -> Entrant:
    """Return an entrant. Its number of launches per graph is computed from the time of its first launch.

    Raises RuntimeError if the launch fails or takes too long.
    """
    timing = quick(stream, Contender(name, run, 1, 1), 1, 1)
    us = timing.us(name)
    if us is None:
        raise RuntimeError(timing.errors.get(name, "not measured"))
    if us > _MAX_US:
        raise RuntimeError(f"not timed because one launch takes {duration(1e-6 * us)}")
    launches = max(1, min(_MAX_LAUNCHES, round(_GRAPH_US / max(us, 1.0))))
    return Entrant(name, Contender(name, run, 1, launches), out)


def errors(operands: Operands, outs: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Return the RMS and maximum error of each result, relative to the RMS of the exact result.

    Results are compared with float64. Errors are NaN if the result contains a NaN. The comparison covers evenly spaced
    rows of a few heads, including the first and the last row.
    """
    import torch

    shape, relative_errors = operands.shape, {}
    rows = torch.linspace(0, shape.length - 1, min(shape.length, _ROWS), dtype=torch.float64).round().long()
    rows = rows.to(operands.q.device)
    places = _places(shape)
    exact = [_rows(operands, batch, head, rows) for batch, head in places]
    rms = math.sqrt(sum(float(each.square().mean()) for each in exact) / len(exact)) or 1.0
    for name, out in outs.items():
        if bool(out.isnan().any()):
            relative_errors[name] = (math.nan, math.nan)
            continue
        pairs = zip(places, exact, strict=True)
        differences = [out[batch, rows, head].double() - each for (batch, head), each in pairs]
        squared = sum(float(each.square().mean()) for each in differences) / len(differences)
        relative_errors[name] = (math.sqrt(squared) / rms, max(float(each.abs().max()) for each in differences) / rms)
    return relative_errors


def _places(shape: Shape) -> list[tuple[int, int]]:
    """Return a few evenly spaced pairs (sequence, head), including the first and the last."""
    total = shape.batch * shape.heads
    count = min(_HEADS, total)
    spread = [round(index * (total - 1) / max(1, count - 1)) for index in range(count)]
    return [divmod(place, shape.heads) for place in spread]


def _rows(operands: Operands, batch: int, head: int, rows: Any) -> Any:
    """Return rows of one head of the result, in float64."""
    import torch

    shape = operands.shape
    kv_head = head * shape.kv_heads // shape.heads
    q, k, v = operands.q[batch, rows, head], operands.k[batch, :, kv_head], operands.v[batch, :, kv_head]
    logits = q.double() @ k.double().T * shape.head_dim**-0.5
    if shape.is_causal:
        logits.masked_fill_(torch.arange(shape.length, device=rows.device) > rows[:, None], -math.inf)
    return logits.softmax(-1) @ v.double()


# ---- A cell ---------------------------------------------------------------------------------------------------------


def measure(stream: Any, shape: Shape, field: Mapping[str, Rival], versions: Sequence[str], replays: int) -> Cell:
    """Measure one call with all contenders."""
    operands = Operands(shape)
    entrants, refused = find_entrants(stream, operands, field)
    configs = configs_of(shape, versions, refused)
    ours, unable = find_entrants(stream, operands, {name: partial(_ours, name) for name in configs})
    refused |= unable
    cell: Cell = {**shape.facts}
    add_times(timing_method(stream, replays, REST_S), [*entrants, *ours], cell, refused, (AUTO,))
    add_errors(cell, errors(operands, chosen_results(cell, [*entrants, *ours])), ALLOWED[shape.dtype])
    cell["entries"] = {name: config.entry for name, config in configs.items() if name in cell["us"]}
    return cell


def configs_of(shape: Shape, versions: Sequence[str], refused: dict[str, str]) -> dict[str, Any]:
    """Return the configuration of each version. Versions without a kernel for the call are added to ``refused``."""
    import torch

    sizes = shape.batch, shape.length, shape.head_dim
    dtype, configs = getattr(torch, shape.dtype), {}
    q, k = (
        torch.empty((*sizes[:2], heads, sizes[2]), dtype=dtype, device="cuda")
        for heads in (shape.heads, shape.kv_heads)
    )
    for name in (*versions, AUTO):
        try:
            configs[name] = attention_explain(q, k, k, causal=shape.is_causal, version=name).config
        except (ArgumentError, TargetError) as error:
            refused[name] = failure(error)
    return configs


def _ours(name: str, stream: Any, operands: Operands) -> list[Entrant]:
    out, (q, k, v) = operands.out(), (operands.q, operands.k, operands.v)

    def run(index: int) -> None:
        attention(q, k, v, causal=operands.shape.is_causal, out=out, version=name)

    return [entrant(stream, name, run, out)]


# ---- The report -----------------------------------------------------------------------------------------------------


def tflops(cell: Cell, name: str) -> float | None:
    us = cell.get("us", {}).get(name)
    return None if not us else 1e-6 * cell["flops"] / us


def heads_of(cell: Cell) -> str:
    heads, kv_heads = cell["heads"], cell["kv_heads"]
    return str(heads) if heads == kv_heads else f"{heads}/{kv_heads}"


def kind_of(cell: Cell) -> str:
    """Return a description of a cell without its length."""
    return f"{cell['dtype']}, {heads_of(cell)} heads of {cell['head_dim']}, {cell['mask']}"


def attention_table(cells: Sequence[Cell]) -> Table:
    """Return the TFLOP/s of each contender, and the speedup of our choice over the fastest competing library."""
    names = [*present(cells, RIVALS), *present(cells, LADDER), *present(cells, (AUTO,))]
    rows = []
    for cell in cells:
        facts = cell["head_dim"], heads_of(cell), cell["mask"], cell["dtype"], f"{cell['batch']} x {cell['length']}"
        rates = [shown(tflops(cell, name), 0) for name in names]
        rows.append((*facts, *rates, shown(times_as_fast(with_best(cell, RIVALS), BEST), 3)))
    columns = ("head dim", "heads", "mask", "dtype", "batch x length", *names, f"{AUTO} / {BEST}")
    return Table(columns, tuple(rows), "TFLOP/s; causal calls count half of the operations")


def rates_line(cell: Cell, beginning: str) -> str:
    """Return a line with a cell's TFLOP/s, our error, and the reasons for missing contenders."""
    rates = ", ".join(f"{name} {shown(tflops(cell, name), 0)}" for name in cell.get("us", {}))
    line = f"{beginning}: {rates} TFLOP/s" if rates else f"{beginning}: nothing measured"
    if (over := times_as_fast(with_best(cell, RIVALS), BEST)) is not None:
        line += f", {AUTO} / {BEST} {over:.3f}"
    if (error := cell.get("rms_error", {}).get(AUTO)) is not None:
        line += f", {AUTO} {error:.1e} off"
    return line + refusals(cell)


def attention_summary(cells: Sequence[Cell]) -> list[str]:
    """Compare ``auto`` with the fastest competing library of each cell and with each competing library.

    The groups are all calls with lengths in SUMMED, and each kind of call.
    """
    cells = [with_best(cell, RIVALS) for cell in cells]
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        if SUMMED[0] <= cell["length"] <= SUMMED[1]:
            groups.setdefault(f"{cell['dtype']}, all, {SUMMED[0]} to {SUMMED[1]}", []).append(cell)
    for cell in cells:
        groups.setdefault(kind_of(cell), []).append(cell)
    return [
        line
        for group, members in groups.items()
        for rival in (BEST, *present(members, RIVALS))
        for line in summary_line(group, members, rival, lambda cell: f"{cell['length']}, {kind_of(cell)}")
    ]


# ---- The script -----------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``cudatma bench attention`` and return the exit status (1 if our kernel failed or a result was wrong)."""
    parser = _parser()
    options = parser.parse_args(argv)
    require_gpu(parser)
    require_torch(parser)
    from benchmarks.rivals.attention import OPTIONAL, always

    field, versions_of_rivals = field_of(always(options.fa3), OPTIONAL, options.rivals)
    calls, versions = calls_of(options), options.version or LADDER
    settings = {"replays": options.replays, "rivals": versions_of_rivals}
    result = Result(settings, attention_table, options.json, attention_summary)
    with measuring_stream() as stream:
        result.say(precompile(lambda: [config for call in calls for config in configs_of(call, versions, {}).values()]))
        measure_calls(
            result,
            calls,
            lambda call: measure(stream, call, field, versions, options.replays),
            lambda call: call.facts,
            rates_line,
        )
    return result.finish("Attention, forward")


def calls_of(options: argparse.Namespace) -> list[Shape]:
    """Return the calls that the command line selects."""
    masks = [is_causal for is_causal in (True, False) if options.mask in (None, is_causal)]
    head_dims, lengths = options.head_dim or HEAD_DIMS, options.length or LENGTHS
    return shapes(lengths, head_dims, masks, options.dtype or ("bfloat16",), not options.no_gqa)


def parse_length(text: str) -> int:
    """Parse a length, or raise argparse's ArgumentTypeError."""
    if not text.isdigit() or not 1 <= int(text) <= LONGEST:
        raise argparse.ArgumentTypeError(f"must be an integer from 1 to {LONGEST}, got {text}")
    return int(text)


def add_rivals(parser: argparse.ArgumentParser) -> None:
    """Add the options for competing libraries from other packages."""
    add = parser.add_argument
    add("--rivals", choices=("fa4", "flashinfer"), nargs="+", default=[], help="additional libraries to compare")
    add(
        "--fa3",
        type=Path,
        metavar="FILE.so",
        help="path of FlashAttention-3's library (default: the library in the installed packages)",
    )
    add("--replays", type=int, default=11, help="number of timed turns (default: 11)")


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("attention", __doc__, EXAMPLES)
    add = parser.add_argument
    dims, lengths = (", ".join(map(str, each)) for each in (HEAD_DIMS, LENGTHS))
    add_rivals(parser)
    add(
        "--head-dim", type=int, choices=HEAD_DIMS, action="append", help=f"head dimension, repeatable (default: {dims})"
    )
    help_length = f"number of queries and keys per sequence, repeatable (default: {lengths})"
    add("--length", type=parse_length, action="append", metavar="N", help=help_length)
    help_dtype = "dtype of q, k and v, repeatable (default: bfloat16)"
    add("--dtype", choices=tuple(ACTIVATION_TYPES), action="append", help=help_dtype)
    mask = parser.add_mutually_exclusive_group()
    mask.add_argument("--causal", dest="mask", action="store_const", const=True, help="only causal calls")
    mask.add_argument("--full", dest="mask", action="store_const", const=False, help="only calls without a mask")
    add("--no-gqa", action="store_true", help="omit calls with 32 query heads and 8 KV heads")
    add("--version", choices=LADDER, action="append", help="versions to measure, repeatable (default: all)")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
