"""Convert a Hugging Face checkpoint to one with packed linear layers for marlin_gemm.

CHECKPOINT is a folder with config.json and safetensors files. The model must be in fp8 or MXFP4, or quantized with
GPTQ, AWQ, AutoRound, Marlin, compressed-tensors or ModelOpt. With --quantize, it must be a float model. OUT is a new
folder, which transformers can load after a call to cudatma.integrations.transformers.register(). To continue an
interrupted conversion, run the same command again. The conversion needs neither a GPU nor torch, and keeps only one
layer in memory. If torch and transformers are installed, the command first compares the layers with the model class.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # run the subcommand, even if the checkout is not installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from cudatma.cli import main as cudatma_main

    raise SystemExit(cudatma_main(["convert", *sys.argv[1:]]))

import json
from collections import defaultdict
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from cudatma.errors import ArgumentError, alternatives, counted
from cudatma.kernels.explain import table_text
from cudatma.quantization.conversion import Conversion, LayerReport, convert_checkpoint
from cudatma.quantization.weight_format import WEIGHT_FORMATS

from .command_line import Parser

EXAMPLES = """examples:
  cudatma convert Llama-3.1-8B-Instruct-GPTQ-INT4 llama-cudatma
  cudatma convert Llama-3.1-8B-Instruct llama-cudatma --quantize --group-size 64 --asymmetric
  cudatma convert Qwen2.5-7B-Instruct qwen-cudatma --quantize --exclude 'model.layers.0.*' --json
"""
#: Options that apply only to float models.
_QUANTIZING = {
    "format": "--format", "group_size": "--group-size", "asymmetric": "--asymmetric", "clip_search": "--clip-search",
    "exclude": "--exclude", "vision_tower": "--vision-tower",
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``cudatma convert`` and return the exit status. Raise the errors of convert_checkpoint()."""
    options = parser().parse_args(argv)
    if not options.quantize:
        float_options = [name for field, name in _QUANTIZING.items() if getattr(options, field)]
        if float_options:
            raise ArgumentError(
                float_options[0],
                ...,
                "combined with --quantize",
                f"omit {float_options[0]} if the model is already quantized",
            )
    console = Console(stderr=True)
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), *times)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("reading", total=None)

        def show(what: str, done: int, total: int) -> None:
            progress.update(bar, description=what, completed=done, total=total)

        try:
            done = convert_checkpoint(
                options.checkpoint,
                options.out,
                quantize=options.quantize,
                format=options.format or "int4",
                group_size=options.group_size,
                symmetric=not options.asymmetric,
                clip_search=options.clip_search,
                dtype=options.dtype,
                exclude=options.exclude,
                vision_tower=options.vision_tower,
                progress=show,
            )
        except KeyboardInterrupt:
            progress.stop()
            print(
                "cudatma: interrupted; run the same command to continue after the last finished file", file=sys.stderr
            )
            return 130
    print(json.dumps(done.as_dict(), indent=1) if options.json else _text(done))
    return 0


def _text(done: Conversion) -> str:
    """Return the report: the packed layers by name, the omitted layers and files, and the totals."""
    kinds: dict[tuple[str, ...], list[LayerReport]] = defaultdict(list)
    for layer in done.layers:
        kinds[_kind(layer)].append(layer)
    rows = []
    for (name, shape, group, zeros, order), layers in kinds.items():
        size = sum(layer.source_bytes for layer in layers), sum(layer.packed_bytes for layer in layers)
        mean = sum(layer.mean_error for layer in layers) / len(layers)
        errors = _error(max(layer.max_error for layer in layers)), _error(mean)
        rows.append((name, str(len(layers)), shape, group, zeros, order, _bytes(size[0]), _bytes(size[1]), *errors))
    header = ("name", "count", "K x N", "group", "zeros", "order", "before", "after", "max error", "mean error")
    lines = [table_text("packed layers", header, rows), _errors_explained(done)]
    for what, reasons_by_name in (("not packed", done.skipped), ("left out", done.left_out)):
        reasons: dict[str, list[str]] = defaultdict(list)
        for name, reason in reasons_by_name.items():
            reasons[reason].append(name)
        lines += [f"{what}, {reason}: {_names(names)}" for reason, names in reasons.items()]
    if done.ignored:
        lines.append(f"packed, but left out by the model class when it loads the folder: {_names(done.ignored)}")
    if done.not_compared:
        lines.append(f"layers not compared with the model class: {done.not_compared}")
    lines += [f"not copied: {name} ({reason})" for name, reason in done.not_copied.items()]
    lines += done.notes
    kept = f", {done.kept_shards} of them from an earlier run" if done.kept_shards else ""
    lines += [
        f"{counted(len(done.layers), 'layer')} of {done.source} ({done.method}) packed, scales in {done.dtype}",
        f"{_bytes(done.source_bytes)} became {_bytes(done.out_bytes)} in {counted(done.shards, 'file')}{kept}",
        f"wrote {done.out}",
    ]
    return "\n".join(line for line in lines if line)


def _error(value: float) -> str:
    """Format an error with two digits, even if the second digit is 0."""
    return f"{value:#.2g}" if value else "0"


def _kind(layer: LayerReport) -> tuple[str, ...]:
    """Return the properties that the layers in a row of the table have in common."""
    group = "column" if layer.group_size == -1 else str(layer.group_size)
    zeros, order = "no" if layer.symmetric else "yes", "yes" if layer.act_order else "no"
    return layer.name.rpartition(".")[2], " x ".join(map(str, layer.shape)), group, zeros, order


def _errors_explained(done: Conversion) -> str:
    if done.method == "float":
        return "errors: the maximum is relative to the layer's largest weight, the mean to its mean weight"
    if any(layer.max_error for layer in done.layers):
        return f"errors: relative errors of scales rounded to {done.dtype}; the integers are unchanged"
    return "integers, zero points and scales are unchanged"


def _names(layers: Sequence[str]) -> str:
    return ", ".join(layers[:4]) + (f" and {len(layers) - 4} more" if len(layers) > 4 else "")


def _bytes(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"


def parser() -> Parser:
    """Return the parser of ``cudatma convert``."""
    result = Parser("cudatma convert", __doc__, EXAMPLES)
    add = result.add_argument
    add("checkpoint", metavar="CHECKPOINT", type=Path, help="folder of the model to convert")
    add("out", metavar="OUT", type=Path, help="new folder, or folder of an interrupted conversion")
    add("--quantize", action="store_true", help="quantize the weights of a float model to --format")
    help_format = f"format of the weights: {alternatives(WEIGHT_FORMATS)} (default: int4)"
    add("--format", choices=tuple(WEIGHT_FORMATS), metavar="FORMAT", help=help_format)
    help_size = "number of weights that share a scale, or -1 for one scale per output (default: 128 if possible)"
    add("--group-size", type=int, metavar="N", help=help_size)
    add("--asymmetric", action="store_true", help="quantize with zero points (int4 only)")
    add("--clip-search", action="store_true", help="search for the range with the least squared error (20x slower)")
    help_exclude = "quoted name pattern of layers to leave unchanged, such as 'model.layers.0.*'; repeatable"
    add("--exclude", action="append", default=[], metavar="PATTERN", help=help_exclude)
    add("--vision-tower", action="store_true", help="also quantize the image, video and audio encoders")
    help_dtype = "type of scales and activations, float16 or bfloat16 (default: the model's type)"
    add("--dtype", choices=("float16", "bfloat16"), metavar="TYPE", help=help_dtype)
    add("--json", action="store_true", help="print the report as JSON")
    return result
