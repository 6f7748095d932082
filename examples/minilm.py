"""Compute MiniLM sentence embeddings in int4 and fp16 with cudatma's kernels, and compare them with fp32.

    python examples/minilm.py                              # use the installed package's weights, on the GPU or the CPU
    python examples/minilm.py --export minilm              # write an fp16 copy (45 MB) for another machine
    python examples/minilm.py --model minilm --json minilm.json

The int4 model uses MarlinLinear and attention_varlen. The fp16 model uses gemm and attention_varlen. The example prints
three cosines for each sentence. The cosine of int4 and fp32 shows the quantization error. The cosine of int4 and fp32
with dequantized weights, and the cosine of fp16 and fp32, show the error of the kernels. The exit status is 0 if all
bounds hold, 2 if the command line is invalid, and 1 otherwise. The example requires the package tokenizers.
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
from minilm_model import Attention, DenseAttention, DenseLinear, Encoder, HalfLinear, Linear

import cudatma
from cudatma.errors import ArgumentError, CudaTmaError

#: Lower bounds on the mean cosine of int4 with fp32, and on each cosine that shows the error of the kernels.
MEAN_LIMIT, EACH_LIMIT = 0.95, 0.9995
GROUP_SIZES = (128, 64, 32)
SENTENCES = Path(__file__).with_name("sentences.txt")

Embeddings = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Choice:
    """Quantization of the linear layers.

    Attributes
    ----------
    group_size : int
        Maximum group size.
    symmetric : bool
        Whether to quantize without zero points.
    clip_search : bool
        Whether to try narrower ranges for each group and keep the best.
    """

    group_size: int = 128
    symmetric: bool = True
    clip_search: bool = True

    def group_size_for(self, k: int) -> int:
        """Return the largest group size that divides K. Raise ArgumentError if none does."""
        for size in GROUP_SIZES:
            if size <= self.group_size and k % size == 0:
                return size
        raise ArgumentError("K", k, f"a multiple of {GROUP_SIZES[-1]}", "quantize this layer with group_size=-1")


@dataclass(frozen=True, slots=True)
class Place:
    """Device of the models, with the array module ``xp`` (numpy or cupy) and the argument ``backend`` of functions."""

    xp: Any
    backend: str | None
    device: str


@dataclass(frozen=True, slots=True)
class Row:
    """A sentence: its tokens, and the cosines of int4 with fp32 and with dequantized weights, and of fp16 with fp32."""

    sentence: str
    tokens: int
    cosine_fp32: float
    cosine_dequantized: float
    cosine_fp16: float


def quantize_layers(model: Model, choice: Choice, *, show: bool = False) -> dict[str, cudatma.PackedWeight]:
    """Quantize all linear layers to int4, on the host. ``show`` enables a progress bar on stderr."""
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
    """Return fp32 layers by name from weights (N, K) and biases (N,)."""
    return {name: DenseLinear(xp.asarray(weight), xp.asarray(biases[name])) for name, weight in weights.items()}


def fp16_layers(weights: Mapping[str, Any], biases: Mapping[str, Any], place: Place) -> dict[str, Linear]:
    """Return layers that call gemm with weights (N, K) and biases (N,) in fp16, by name."""

    def layer(name: str) -> Linear:
        weight, bias = (place.xp.asarray(array[name].astype(np.float16)) for array in (weights, biases))
        return HalfLinear(partial(cudatma.gemm, b=weight.T, bias=bias, backend=place.backend))

    return {name: layer(name) for name in weights}


def int4_layers(
    packed: Mapping[str, cudatma.PackedWeight], biases: Mapping[str, Any], place: Place
) -> dict[str, Linear]:
    """Return MarlinLinear layers by name, with activations and biases in fp16."""

    def layer(name: str) -> Linear:
        weight = packed[name] if place.xp is np else packed[name].to_device()
        bias = place.xp.asarray(biases[name].astype(np.float16))
        return HalfLinear(partial(cudatma.MarlinLinear(weight, bias), backend=place.backend))

    return {name: layer(name) for name in packed}


def fp16_attention(place: Place) -> Attention:
    """Return attention_varlen in fp16."""

    def attend(q: Any, k: Any, v: Any, starts: Sequence[int]) -> Any:
        q, k, v = (array.astype(np.float16) for array in (q, k, v))
        offsets, longest = place.xp.asarray(starts, dtype=np.int32), int(np.diff(starts).max())
        mixed = cudatma.attention_varlen(
            q, k, v, offsets, offsets, max_seqlen_q=longest, max_seqlen_k=longest, backend=place.backend
        )
        return mixed.astype(np.float32)

    return attend


def embed(encoder: Encoder, tokens: Tokens, batch: int) -> Embeddings:
    """Return the embeddings of all sentences, (sentences, hidden), on the host."""
    parts = []
    for first in range(0, len(tokens.ids), batch):
        ids, mask = (encoder.xp.asarray(array[first : first + batch]) for array in (tokens.ids, tokens.mask))
        embeddings = encoder.embed(ids, mask)
        parts.append(embeddings if isinstance(embeddings, np.ndarray) else embeddings.get())
    return np.concatenate(parts)


def cosines(a: Embeddings, b: Embeddings) -> list[float]:
    """Return the cosine of each pair of rows, in float64."""
    left, right = a.astype(np.float64), b.astype(np.float64)
    products = (left * right).sum(axis=1)
    return [float(c) for c in products / np.linalg.norm(left, axis=1) / np.linalg.norm(right, axis=1)]


def compare(
    model: Model, sentences: Sequence[str], choice: Choice, *, place: Place, batch: int = 32, show: bool
) -> dict[str, Any]:
    """Quantize, run the four models and compare them. Return the results as JSON types."""
    tokens = tokenize(sentences, model.folder)
    began = time.perf_counter()
    packed = quantize_layers(model, choice, show=show)
    seconds = {"quantize": time.perf_counter() - began}
    weights = {name: model.tensors[f"{name}.weight"] for name in packed}
    biases = {name: model.tensors[f"{name}.bias"] for name in packed}
    dequantized = {name: np.ascontiguousarray(weight.dequantize(dtype=np.float32).T) for name, weight in packed.items()}
    xp, dense, half = place.xp, DenseAttention(place.xp), fp16_attention(place)
    models: dict[str, tuple[dict[str, Linear], Attention]] = {
        "fp32": (dense_layers(weights, biases, xp), dense),
        "dequantized": (dense_layers(dequantized, biases, xp), dense),
        "fp16": (fp16_layers(weights, biases, place), half),
        "int4": (int4_layers(packed, biases, place), half),
    }
    others = model.tensors.keys() - {f"{name}.{part}" for name in packed for part in ("weight", "bias")}
    shared = {name: xp.asarray(model.tensors[name]) for name in others}
    embeddings = {}
    for kind, (linears, attention) in models.items():
        began = time.perf_counter()
        embeddings[kind] = embed(Encoder(model.config, shared, linears, attention, xp), tokens, batch)
        seconds[kind] = time.perf_counter() - began
    compared = ("int4", "fp32"), ("int4", "dequantized"), ("fp16", "fp32")
    columns = [cosines(embeddings[kind], embeddings[exact]) for kind, exact in compared]
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
    """Return the rows, their means and minima, the bounds, and whether all hold (a NaN fails)."""
    mean = sum(row.cosine_fp32 for row in rows) / len(rows)
    each_holds = all(cosine >= EACH_LIMIT for row in rows for cosine in (row.cosine_dequantized, row.cosine_fp16))
    return {
        "sentences": [asdict(row) for row in rows],
        "mean_cosine_fp32": mean,
        "min_cosine_fp32": min(row.cosine_fp32 for row in rows),
        "min_cosine_dequantized": min(row.cosine_dequantized for row in rows),
        "min_cosine_fp16": min(row.cosine_fp16 for row in rows),
        "limits": {"mean_cosine_fp32": MEAN_LIMIT, "min_cosine_dequantized": EACH_LIMIT, "min_cosine_fp16": EACH_LIMIT},
        "passed": mean >= MEAN_LIMIT and each_holds,
    }


def _print(results: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table(title="cosines of embeddings", title_justify="left", expand=True)
    table.add_column("sentence", no_wrap=True, overflow="ellipsis", ratio=1)
    for column in ("tokens", "int4, fp32", "int4, dequantized", "fp16, fp32"):
        table.add_column(column, justify="right")
    for row in results["sentences"]:
        each = (f"{row[name]:.7f}" for name in ("cosine_dequantized", "cosine_fp16"))
        table.add_row(Text(row["sentence"]), str(row["tokens"]), f"{row['cosine_fp32']:.4f}", *each)
    console.print(table)
    saved = 100 * (1 - results["int4_bytes"] / results["fp16_bytes"])
    sizes = ", ".join(str(size) for size in results["group_sizes"])
    console.print(f"backend   {results['backend']} ({results['device']})")
    console.print(f"weights   {results['weights']}", soft_wrap=True)
    console.print(f"layers    {results['linear_layers']} in int4, group size {sizes}: {saved:.1f}% smaller than fp16")
    console.print(f"mean      {results['mean_cosine_fp32']:.4f} (int4, fp32), must be at least {MEAN_LIMIT}")
    minimum = results["min_cosine_dequantized"]
    console.print(f"minimum   {minimum:.7f} (int4, dequantized), must be at least {EACH_LIMIT}")
    console.print(f"minimum   {results['min_cosine_fp16']:.7f} (fp16, fp32), must be at least {EACH_LIMIT}")
    console.print("All bounds hold." if results["passed"] else "A bound is MISSED.")


def _place(backend: str) -> Place:
    """Return the place for a backend. Raise DriverError for "cuda" if there is no GPU."""
    if backend == "reference":
        return Place(np, backend, "the CPU")
    cudatma.detect()
    try:
        import cupy
    except ImportError as error:
        remedy = "run: pip install cupy-cuda13x, or cupy-cuda12x for CUDA 12"
        raise ArgumentError("cupy", f"an ImportError ({error})", "importable", remedy) from error
    return Place(cupy, None, cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, metavar="DIR", help=f"folder with weights (default: {DISTRIBUTION})")
    parser.add_argument("--export", type=Path, metavar="DIR", help="write an fp16 copy to this folder and exit")
    parser.add_argument("--sentences", type=Path, default=SENTENCES, metavar="FILE", help="one sentence per line")
    parser.add_argument("--group-size", type=int, choices=GROUP_SIZES, default=128, help="maximum (default: 128)")
    parser.add_argument("--asymmetric", action="store_true", help="quantize with zero points")
    parser.add_argument("--no-clip-search", action="store_true", help="always quantize the full range of each group")
    parser.add_argument("--backend", choices=("auto", "cuda", "reference"), default="auto", help="default: auto")
    parser.add_argument("--batch", type=int, default=32, metavar="N", help="sentences per batch (default: 32)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    return parser


def _run(options: argparse.Namespace) -> int:
    if options.batch < 1:
        raise ArgumentError("--batch", options.batch, "at least 1")
    model = load_model(options.model)
    if options.export is not None:
        for path in export_model(model, options.export):
            print(f"{path}  {path.stat().st_size:,} bytes")
        return 0
    backend = cudatma.selected_backend(None if options.backend == "auto" else options.backend)
    if backend == "emulator":
        backend = "reference"  # The emulator would take hours for a whole model.
    place = _place(backend)
    choice = Choice(options.group_size, not options.asymmetric, not options.no_clip_search)
    sentences = read_sentences(options.sentences)
    results = compare(model, sentences, choice, place=place, batch=options.batch, show=True)
    results |= {"backend": backend, "device": place.device}
    _print(results)
    if options.json is not None:
        try:
            options.json.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise ArgumentError("--json", f"{error}", "a writable file") from error
    return 0 if results["passed"] else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example and return the exit status."""
    try:
        return _run(_parser().parse_args(argv))
    except CudaTmaError as error:
        print(f"minilm: {type(error).__name__}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
