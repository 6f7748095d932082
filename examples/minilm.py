"""MiniLM with every linear layer in int4: sentence embeddings through MarlinLinear, compared with the fp32 model.

    python examples/minilm.py                              # the installed package's weights, on the GPU or the CPU
    python examples/minilm.py --export minilm              # an fp16 copy (45 MB) for a machine without the package
    python examples/minilm.py --model minilm --json minilm.json

Each sentence's embedding is compared with (a) the fp32 model, which shows what four bits cost, and (b) the fp32 model
run on the dequantised weights, which shows what the kernels cost. Exit status: 0 within both bounds, 1 beyond one,
2 for a wrong call. Needs the package tokenizers.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from minilm_files import DISTRIBUTION, Model, Tokens, export_model, load_model, read_sentences, tokenize
from minilm_model import DenseLinear, Encoder, HalfLinear, Linear

import cudatma
from cudatma.errors import ArgumentError, CudaTmaError

#: The mean cosine against the fp32 model, and every sentence's against the dequantised weights, must reach these.
MEAN_LIMIT, EACH_LIMIT = 0.95, 0.9995
GROUP_SIZES = (128, 64, 32)
SENTENCES = Path(__file__).with_name("sentences.txt")

Embeddings = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Choice:
    """How linear layers are quantized. group_size: the largest to use; symmetric: no zero points; clip_search: try
    narrower ranges for each group and keep the best."""

    group_size: int = 128
    symmetric: bool = True
    clip_search: bool = True

    def group_size_for(self, k: int) -> int:
        """The largest group size that divides K. ArgumentError where none does."""
        for size in GROUP_SIZES:
            if size <= self.group_size and k % size == 0:
                return size
        raise ArgumentError("K", k, f"a multiple of {GROUP_SIZES[-1]}", "quantize this layer with group_size=-1")


@dataclass(frozen=True, slots=True)
class Row:
    """One sentence: its tokens and its cosines against the fp32 model and the model of dequantised weights."""

    sentence: str
    tokens: int
    cosine_fp32: float
    cosine_dequantised: float


def quantize_layers(model: Model, choice: Choice, *, show: bool = False) -> dict[str, cudatma.PackedWeight]:
    """All linear layers in int4 by name, on the host; a progress bar on stderr where ``show``."""
    from rich.console import Console
    from rich.progress import track

    names, packed = model.config.linear_names, {}
    for name in track(names, "quantize", console=Console(stderr=True), transient=True, disable=not show):
        weight = model.tensors[f"{name}.weight"]
        packed[name] = cudatma.quantize_linear(
            weight,
            group_size=choice.group_size_for(weight.shape[1]),
            symmetric=choice.symmetric,
            clip_search=choice.clip_search,
        )
    return packed


def dense_layers(weights: Mapping[str, Any], biases: Mapping[str, Any], xp: Any) -> dict[str, Linear]:
    """fp32 layers by name from weights (N, K) and biases (N,)."""
    return {name: DenseLinear(xp.asarray(weight), xp.asarray(biases[name])) for name, weight in weights.items()}


def int4_layers(packed: Mapping[str, cudatma.PackedWeight], biases: Mapping[str, Any], xp: Any) -> dict[str, Linear]:
    """MarlinLinear layers by name, on the GPU where ``xp`` is CuPy, else on the CPU; activations, biases in fp16."""
    layers: dict[str, Linear] = {}
    for name, weight in packed.items():
        bias = biases[name].astype(np.float16)
        if xp is np:
            layers[name] = HalfLinear(partial(cudatma.MarlinLinear(weight, bias), backend="reference"))
        else:
            layers[name] = HalfLinear(cudatma.MarlinLinear(weight.to_device(), xp.asarray(bias)))
    return layers


def embed(encoder: Encoder, tokens: Tokens, batch: int) -> Embeddings:
    """Embeddings of all sentences, (sentences, hidden), on the host; each batch is padded to its own longest."""
    parts = []
    for first in range(0, len(tokens.ids), batch):
        mask = tokens.mask[first : first + batch]
        longest = int(mask.sum(axis=1).max())
        ids = encoder.xp.asarray(tokens.ids[first : first + batch, :longest])
        found = encoder.embed(ids, encoder.xp.asarray(mask[:, :longest]))
        parts.append(found if isinstance(found, np.ndarray) else found.get())
    return np.concatenate(parts)


def cosines(a: Embeddings, b: Embeddings) -> list[float]:
    """The cosine of each pair of rows, in float64."""
    left, right = a.astype(np.float64), b.astype(np.float64)
    products = (left * right).sum(axis=1)
    return [float(c) for c in products / np.linalg.norm(left, axis=1) / np.linalg.norm(right, axis=1)]


def compare(
    model: Model, sentences: Sequence[str], choice: Choice, *, xp: Any, batch: int = 32, show: bool
) -> dict[str, Any]:
    """Quantize, run the three models and compare: everything that is printed, as JSON types."""
    tokens = tokenize(sentences, model.folder)
    began = time.perf_counter()
    packed = quantize_layers(model, choice, show=show)
    seconds = {"quantize": time.perf_counter() - began}
    weights = {name: model.tensors[f"{name}.weight"] for name in packed}
    biases = {name: model.tensors[f"{name}.bias"] for name in packed}
    dequantised = {name: np.ascontiguousarray(weight.dequantize(dtype=np.float32).T) for name, weight in packed.items()}
    models = {
        "fp32": dense_layers(weights, biases, xp),
        "dequantised": dense_layers(dequantised, biases, xp),
        "int4": int4_layers(packed, biases, xp),
    }
    others = model.tensors.keys() - {f"{name}.{part}" for name in packed for part in ("weight", "bias")}
    shared = {name: xp.asarray(model.tensors[name]) for name in others}
    embeddings = {}
    for kind, linears in models.items():
        began = time.perf_counter()
        embeddings[kind] = embed(Encoder(model.config, shared, linears, xp), tokens, batch)
        seconds[kind] = time.perf_counter() - began
    columns = [cosines(embeddings["int4"], embeddings[kind]) for kind in ("fp32", "dequantised")]
    rows = [Row(*row) for row in zip(sentences, tokens.lengths, *columns, strict=True)]
    return _summary(rows) | {
        "weights": str(model.weights),
        "linear_layers": len(packed),
        "group_sizes": sorted({weight.group_size for weight in packed.values()}),
        "choice": asdict(choice),
        "fp16_bytes": sum(2 * weight.size for weight in weights.values()),
        "int4_bytes": sum(weight.nbytes for weight in packed.values()),
        "seconds": seconds,
    }


def _summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The rows, their means and minima, the bounds, and whether both hold (a NaN fails)."""
    mean = sum(row.cosine_fp32 for row in rows) / len(rows)
    each_holds = all(row.cosine_dequantised >= EACH_LIMIT for row in rows)
    return {
        "sentences": [asdict(row) for row in rows],
        "mean_cosine_fp32": mean,
        "min_cosine_fp32": min(row.cosine_fp32 for row in rows),
        "min_cosine_dequantised": min(row.cosine_dequantised for row in rows),
        "limits": {"mean_cosine_fp32": MEAN_LIMIT, "min_cosine_dequantised": EACH_LIMIT},
        "passed": mean >= MEAN_LIMIT and each_holds,
    }


def _print(found: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table(title="cosine of the int4 model's embedding with that of", title_justify="left", expand=True)
    table.add_column("sentence", no_wrap=True, overflow="ellipsis", ratio=1)
    for column in ("tokens", "fp32", "dequantised"):
        table.add_column(column, justify="right")
    for row in found["sentences"]:
        each = f"{row['cosine_dequantised']:.7f}"
        table.add_row(Text(row["sentence"]), str(row["tokens"]), f"{row['cosine_fp32']:.4f}", each)
    console.print(table)
    saved = 100 * (1 - found["int4_bytes"] / found["fp16_bytes"])
    sizes = ", ".join(str(size) for size in found["group_sizes"])
    console.print(f"backend   {found['backend']} ({found['device']})")
    console.print(f"weights   {found['weights']}", soft_wrap=True)
    console.print(f"layers    {found['linear_layers']} in int4, group size {sizes}: {saved:.1f} % smaller than fp16")
    console.print(f"mean      {found['mean_cosine_fp32']:.4f} against fp32, at least {MEAN_LIMIT} is asked for")
    console.print(f"least     {found['min_cosine_dequantised']:.7f} against dequantised, at least {EACH_LIMIT}")
    console.print("Both bounds hold." if found["passed"] else "A bound is MISSED.")


def _place(backend: str) -> tuple[Any, str]:
    """The array module of a backend, and the device's name. DriverError for "cuda" without a GPU."""
    if backend == "reference":
        return np, "the CPU"
    cudatma.detect()
    try:
        import cupy
    except ImportError as error:
        remedy = "run: pip install cupy-cuda13x, or cupy-cuda12x for CUDA 12"
        raise ArgumentError("cupy", f"not installed ({error})", "CuPy, for arrays on the GPU", remedy) from error
    return cupy, cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, metavar="DIR", help=f"a folder with weights; default: {DISTRIBUTION}")
    parser.add_argument("--export", type=Path, metavar="DIR", help="write the fp16 copy there and stop")
    parser.add_argument("--sentences", type=Path, default=SENTENCES, metavar="FILE", help="one sentence a line")
    parser.add_argument("--group-size", type=int, choices=GROUP_SIZES, default=128, help="the largest; default: 128")
    parser.add_argument("--asymmetric", action="store_true", help="quantize with zero points")
    parser.add_argument("--no-clip-search", action="store_true", help="round to nearest over each group's whole range")
    parser.add_argument("--backend", choices=("auto", "cuda", "reference"), default="auto", help="default: auto")
    parser.add_argument("--batch", type=int, default=32, metavar="N", help="sentences at once; default: 32")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")
    return parser


def _run(options: argparse.Namespace) -> int:
    if options.batch < 1:
        raise ArgumentError("--batch", options.batch, "1 and up")
    model = load_model(options.model)
    if options.export is not None:
        for path in export_model(model, options.export):
            print(f"{path}  {path.stat().st_size:,} bytes")
        return 0
    backend = cudatma.selected_backend(None if options.backend == "auto" else options.backend)
    if backend == "emulator":
        backend = "reference"  # the emulator would need hours for a whole model
    xp, device = _place(backend)
    choice = Choice(options.group_size, not options.asymmetric, not options.no_clip_search)
    sentences = read_sentences(options.sentences)
    found = compare(model, sentences, choice, xp=xp, batch=options.batch, show=True)
    found |= {"backend": backend, "device": device}
    _print(found)
    if options.json is not None:
        try:
            options.json.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise ArgumentError("--json", f"{error}", "a file that can be written") from error
    return 0 if found["passed"] else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; returns the exit status."""
    try:
        return _run(_parser().parse_args(argv))
    except CudaTmaError as error:
        print(f"minilm: {type(error).__name__}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
