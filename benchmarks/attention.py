"""Attention, forward: each version of the ladder and what `attention` chooses, cuDNN, FlashAttention-2 and -3, in one
run, taking turns.

A batch has 16384 tokens, all heads together 2048 columns; grouped heads are 32 of q and 8 of k and v. Operands are
normally distributed. cuDNN and FA2 take part through torch, FA3 where a package brings its library. Rows of each result
are compared with float64.
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

from benchmarks.attention_counters import launch_once, run_counters
from benchmarks.attention_decode import run_decode
from benchmarks.attention_plot import picture
from benchmarks.attention_shapes import HEAD_DIMS, LENGTHS, REST_S, Operands, Shape, entrant, errors, shapes
from benchmarks.attention_table import LADDER, attention_summary, attention_table, rates_line
from benchmarks.compare import AUTO
from benchmarks.contest import finished, measured
from benchmarks.harness import measuring_stream, require_gpu
from benchmarks.report import Cell, Result, failure
from benchmarks.rivals.attention import ALWAYS, FA3, OPTIONAL, fa3
from benchmarks.turns import Rival, chosen, entered, field_of, judged, precompile, timed, timing_method
from cudatma.dtypes import ACTIVATION_TYPES
from cudatma.errors import ArgumentError, TargetError, duration
from cudatma.kernels.attention.attention import attention, attention_explain

#: Part of the result's root mean square by which it may be off; weights and the result are rounded.
ALLOWED = {"float16": 2e-3, "bfloat16": 1.2e-2}
#: Longer sequences are not measured.
LONGEST = 1 << 17

EXAMPLES = """examples:
  cudatma bench attention --json attention.json --plot attention.svg
  cudatma bench attention --head-dim 128 --length 8192 --causal --version a4 --rivals fa4
  cudatma bench attention --head-dim 128 --length 4096 --full --counters
  cudatma bench attention --decode --batch 8 --length 4096 --rivals fa4 flashinfer
"""


def measure(stream: Any, shape: Shape, field: Mapping[str, Rival], versions: Sequence[str], replays: int) -> Cell:
    """One call, by all contenders. A rival that cannot run it is named with the reason."""
    operands = Operands(shape)
    entrants, refused = entered(stream, operands, field)
    specs = specs_of(shape, versions, refused)
    ours, unable = entered(stream, operands, {name: partial(_ours, name) for name in specs})
    refused |= unable
    cell: Cell = {**facts(shape), "us": {}, "entries": {}}
    timed(timing_method(stream, replays, REST_S), [*entrants, *ours], cell, refused, (AUTO,))
    judged(cell, errors(operands, chosen(cell, [*entrants, *ours])), ALLOWED[shape.dtype])
    cell["entries"] = {name: spec.entry for name, spec in specs.items() if name in cell["us"]}
    return cell


def facts(shape: Shape) -> Cell:
    """What a cell says of its call."""
    names = ("batch", "heads", "kv_heads", "length", "head_dim", "dtype", "flops")
    return {name: getattr(shape, name) for name in names} | {"mask": "causal" if shape.is_causal else "full"}


def specs_of(shape: Shape, versions: Sequence[str], refused: dict[str, str]) -> dict[str, Any]:
    """What attention runs by the name of the contender. A version that has no kernel for the GPU or the call goes to
    ``refused``."""
    import torch

    sizes = shape.batch, shape.length, shape.head_dim
    kind, found = getattr(torch, shape.dtype), {}
    q, k = (
        torch.empty((*sizes[:2], heads, sizes[2]), dtype=kind, device="cuda") for heads in (shape.heads, shape.kv_heads)
    )
    for name in (*versions, AUTO):
        try:
            said = attention_explain(q, k, k, causal=shape.is_causal, version=name)
        except (ArgumentError, TargetError) as error:
            refused[name] = failure(error)
        else:
            found[name] = said.spec
    return found


def _ours(name: str, stream: Any, operands: Operands) -> list[Any]:
    out, (q, k, v) = operands.out(), (operands.q, operands.k, operands.v)

    def run(index: int) -> None:
        attention(q, k, v, causal=operands.shape.is_causal, out=out, version=name)

    return [entrant(stream, name, run, out)]


def main(argv: Sequence[str] | None = None) -> int:
    """``cudatma bench attention``; returns the exit status: 1 if ours failed, or a result was wrong."""
    parser = _parser()
    options = parser.parse_args(argv)
    require_gpu(parser)
    try:
        import torch  # before measuring_stream(), which makes its stream current for torch too

        torch.cuda.init()
        torch.set_grad_enabled(False)
    except Exception as error:
        parser.exit(2, f"{parser.prog} compares with torch: {failure(error)}\n")
    if options.decode:
        return run_decode(options)
    if options.launch:
        launch_once(calls_of(options)[0], options.launch)
        return 0
    if options.counters:
        options.no_gqa = True
        wanted = options.version or LADDER
        calls = [(call, facts(call), specs_of(call, wanted, {})) for call in calls_of(options)]
        return run_counters([(call, its, _without_auto(specs)) for call, its, specs in calls], options.json)
    return _run(options)


def _without_auto(specs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: spec for name, spec in specs.items() if name != AUTO}


def _run(options: argparse.Namespace) -> int:
    field, told = field_of({**ALWAYS, FA3: partial(fa3, options.fa3)}, OPTIONAL, options.rivals)
    calls, versions = calls_of(options), options.version or LADDER
    settings = {"replays": options.replays, "rivals": told}
    result = Result(settings, attention_table, options.json, lambda cells: {"summary": attention_summary(cells)})
    for name, what in told.items():
        result.say(f"{name}: {what}")
    began = time.monotonic()
    with measuring_stream() as stream:
        try:
            result.say(precompile(spec for call in calls for spec in specs_of(call, versions, {}).values()))
        except Exception as error:  # each call compiles its own then
            result.say(f"nothing compiled beforehand: {failure(error)}")
        measured(result, calls, lambda call: measure(stream, call, field, versions, options.replays), facts, rates_line)
    result.say(duration(time.monotonic() - began))
    return finished(result, "Attention, forward", picture, options.plot)


def calls_of(options: argparse.Namespace) -> list[Shape]:
    """What the command line asks for."""
    masks = [is_causal for is_causal in (True, False) if options.mask in (None, is_causal)]
    head_dims, lengths = options.head_dim or HEAD_DIMS, options.length or LENGTHS
    return shapes(lengths, head_dims, masks, options.dtype or ("bfloat16",), not options.no_gqa)


def _length(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= LONGEST:
        raise argparse.ArgumentTypeError(f"{text}: 1 to {LONGEST}")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cudatma bench attention",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    dims, lengths = (", ".join(map(str, each)) for each in (HEAD_DIMS, LENGTHS))
    add("--json", type=Path, metavar="FILE", help="also write the results there, anew after every call")
    add("--plot", type=Path, metavar="FILE.svg", help="draw TFLOP/s over the length")
    add("--replays", type=int, default=11, help="timed turns of each (default: 11)")
    add("--head-dim", type=int, choices=HEAD_DIMS, action="append", help=f"repeatable (default: {dims})")
    add("--length", type=_length, action="append", metavar="N", help=f"repeatable (default: {lengths})")
    add("--dtype", choices=tuple(ACTIVATION_TYPES), action="append", help="repeatable (default: bfloat16)")
    mask = parser.add_mutually_exclusive_group()
    mask.add_argument("--causal", dest="mask", action="store_const", const=True, help="causal calls only")
    mask.add_argument("--full", dest="mask", action="store_const", const=False, help="calls without a mask only")
    add("--no-gqa", action="store_true", help="no calls with 32 heads of q and 8 of k and v")
    add("--version", choices=LADDER, action="append", help="which versions take part, repeatable (default: all)")
    add("--rivals", choices=tuple(OPTIONAL), nargs="+", default=[], help="who else takes part, where it is installed")
    add("--counters", action="store_true", help="hardware counters of each version instead, by ncu; no grouped heads")
    add("--decode", action="store_true", help="one query a sequence to a cache instead: --length are its keys")
    add("--batch", type=_length, action="append", metavar="N", help="sequences, with --decode, repeatable")
    add(
        "--launch",
        choices=(*LADDER, AUTO),
        action="append",
        help="launch the first call once, for a profiler; repeatable",
    )
    add("--fa3", type=Path, metavar="FILE.so", help="FlashAttention-3's library (default: found in the packages)")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
