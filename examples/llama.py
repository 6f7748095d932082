"""Compare an fp16 Llama with random weights and its int4 version in cudatma: tokens/s, memory and logits.

    python examples/llama.py --size tiny                    # on the CPU, with the reference backend
    python examples/llama.py --size 8b --batch 1,16,64      # the sizes of Llama-3-8B, on a GPU with 48 GB
    python examples/llama.py --size 8b --compile --json llama.json

The fp16 model uses sdpa. The int4 model is created by from_pretrained(quantization_config=CudatmaConfig(...)) from the
same weights, and uses cudatma's attention. The int4 model's logits for a prompt are compared with those of (a) the fp16
model, which shows the quantization error for random weights, and (b) the fp16 model with dequantized weights, which
shows the error of the kernels. Then the int4 model and the fp16 model with dequantized weights decode with a static
cache. On a GPU, the measurement replays a CUDA graph of one step. The duration of each stage is printed to stderr.

The exit status is 0 if the largest difference in (b) is at most 2% of the largest logit, 2 if the command line is
invalid, and 1 otherwise. The example requires torch and transformers. If accelerate is installed, the int4 model is
loaded onto the GPU without a copy in host memory, and shares the tensors that stay in fp16 with the fp16 model.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import is_accelerate_available

from cudatma.errors import ArgumentError, BackendWarning, CudaTmaError
from cudatma.integrations.torch import MarlinLinear
from cudatma.integrations.transformers import CudatmaConfig, register

#: Hidden size, intermediate size, number of layers, query heads and KV heads, and vocabulary size.
SIZES = {
    "tiny": (128, 192, 2, 4, 2, 96),
    "1b": (2048, 8192, 16, 32, 8, 128256),
    "8b": (4096, 14336, 32, 32, 8, 128256),
}
#: Maximum difference in (b), relative to the largest logit.
KERNEL_LIMIT = 0.02
_WARM_UPS = 3


@dataclass(frozen=True, slots=True)
class Speed:
    """Decoding speed for a batch size: tokens/s of both models, and the speedup of int4."""

    batch: int
    fp16_tokens_per_s: float
    int4_tokens_per_s: float
    ratio: float


@dataclass(frozen=True, slots=True)
class Difference:
    """Differences between two models' logits.

    Attributes
    ----------
    max_relative : float
        Largest difference divided by the largest logit.
    mean_cosine : float
        Mean cosine similarity over all positions.
    same_choice : float
        Fraction of positions with the same most probable token.
    """

    max_relative: float
    mean_cosine: float
    same_choice: float


@dataclass(frozen=True, slots=True)
class Report:
    """Results of the example.

    Attributes
    ----------
    fp16_bytes, int4_bytes : int
        Size of all parameters and buffers in bytes.
    peak_bytes : int
        Peak memory that torch allocated while the int4 model decoded the last batch, including both models, in bytes. 0
        on the CPU.
    """

    size: str
    device: str
    compiled: bool
    group_size: int
    fp16_bytes: int
    int4_bytes: int
    to_fp16: Difference
    to_dequantized: Difference
    peak_bytes: int = 0
    speeds: tuple[Speed, ...] = ()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example and return the exit status."""
    try:
        options = _parse(argv)
        report = measure(options)
    except CudaTmaError as error:
        print(f"llama: {error}", file=sys.stderr)
        return 2
    print(_text(report))
    return int(report.to_dequantized.max_relative > KERNEL_LIMIT)


def measure(options: argparse.Namespace) -> Report:
    """Compare both models' logits, then measure their speed for each batch size. Write --json after each step."""
    register()
    device = torch.device(options.device)
    if device.type == "cpu":
        os.environ.setdefault("CUDATMA_BACKEND", "reference")
        warnings.simplefilter("ignore", BackendWarning)
    elif options.size == "tiny":
        raise ArgumentError("--size", "tiny", "1b or 8b on a GPU", "pass --device cpu to use tiny")
    with _stage("random fp16 model", device):
        dense = _random_model(options.size, device)
    with _stage("int4 model", device):
        packed = _quantized(dense, options.group_size, device)
    with _stage("logits", device):
        prompt = torch.randint(3, dense.config.vocab_size, (1, options.prompt), device=device)
        logits = _logits(packed, prompt)
        to_fp16 = _difference(logits, _logits(dense, prompt))
    with _stage("logits of the dequantized weights", device):
        _dequantize_into(dense, packed)
        to_dequantized = _difference(logits, _logits(dense, prompt))
    report = Report(
        size=options.size,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        compiled=options.compile,
        group_size=options.group_size,
        fp16_bytes=_bytes_of(dense),
        int4_bytes=_bytes_of(packed),
        to_fp16=to_fp16,
        to_dequantized=to_dequantized,
    )
    _write(report, options.json)
    for batch in options.batch:
        report = _with_batch(report, dense, packed, batch, options)
        _write(report, options.json)
    return report


def _write(report: Report, path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(asdict(report), indent=1) + "\n", encoding="utf-8")


def _with_batch(report: Report, dense: Any, packed: Any, batch: int, options: argparse.Namespace) -> Report:
    """Return the report with the speed of both models for another batch size."""
    device, peak = dense.device, 0
    with _stage(f"batch {batch}, fp16", device):
        fp16 = tokens_per_second(dense, batch, options)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with _stage(f"batch {batch}, int4", device):
        int4 = tokens_per_second(packed, batch, options)
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    return replace(report, speeds=(*report.speeds, Speed(batch, fp16, int4, int4 / fp16)), peak_bytes=peak)


@contextmanager
def _stage(name: str, device: Any) -> Iterator[None]:
    """Print the duration of the body of the with statement to stderr."""
    begin = time.perf_counter()
    yield
    _wait(device)
    print(f"llama: {name}: {time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)


def _random_model(size: str, device: Any) -> Any:
    hidden, ffn, layers, heads, kv_heads, vocabulary = SIZES[size]
    config = transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        max_position_embeddings=8192,
        rope_theta=500000.0,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float16)
    model.set_attn_implementation("sdpa")
    return model.eval()


def _quantized(dense: Any, group_size: int, device: Any) -> Any:
    """Return an int4 version of a model. transformers quantizes the model as if it were loaded from a folder."""
    location = {"device_map": device} if is_accelerate_available() else {}
    model = type(dense).from_pretrained(
        None,
        config=dense.config,
        state_dict=dense.state_dict(),
        quantization_config=CudatmaConfig(group_size=group_size),
        dtype=torch.float16,
        attn_implementation="cudatma",
        **location,
    )
    return model.to(device).eval()


def tokens_per_second(model: Any, batch: int, options: argparse.Namespace) -> float:
    """Return the tokens/s of options.tokens decoding steps for ``batch`` sequences with a static cache."""
    device, graph = model.device, None
    length = options.prompt + options.tokens + 2 * _WARM_UPS
    cache = transformers.StaticCache(config=model.config, max_cache_len=length)
    token = torch.randint(3, model.config.vocab_size, (batch, 1), device=device)
    forward = torch.compile(model, fullgraph=True, dynamic=False) if options.compile else model

    def step() -> None:
        token.copy_(forward(token, past_key_values=cache).logits[:, -1:].argmax(-1))

    with torch.no_grad():
        prompt = torch.randint(3, model.config.vocab_size, (batch, options.prompt), device=device)
        model(prompt, past_key_values=cache, logits_to_keep=1)
        if device.type == "cuda":
            side = torch.cuda.Stream(device)
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                for _ in range(_WARM_UPS):
                    step()
            torch.cuda.current_stream(device).wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
        run = step if graph is None else graph.replay
        for _ in range(_WARM_UPS):
            run()
        _wait(device)
        begin = time.perf_counter()
        for _ in range(options.tokens):
            run()
        _wait(device)
    return float(batch * options.tokens / (time.perf_counter() - begin))


def _wait(device: Any) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _logits(model: Any, prompt: Any) -> Any:
    with torch.no_grad():
        return model(prompt).logits[0].float()


def _difference(logits: Any, others: Any) -> Difference:
    return Difference(
        max_relative=float((logits - others).abs().max() / others.abs().max()),
        mean_cosine=float(torch.nn.functional.cosine_similarity(logits, others).mean()),
        same_choice=float((logits.argmax(-1) == others.argmax(-1)).float().mean()),
    )


def _dequantize_into(dense: Any, packed: Any) -> None:
    """Copy the values of the int4 weights into the fp16 model."""
    with torch.no_grad():
        for name, layer in packed.named_modules():
            if isinstance(layer, MarlinLinear):
                dense.get_submodule(name).weight.copy_(layer.dequantize())


def _bytes_of(model: Any) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def _text(report: Report) -> str:
    lines = [f"Llama {report.size} on {report.device}, groups of {report.group_size}{', compiled' * report.compiled}"]
    lines.append(f"weights: fp16 {report.fp16_bytes / 1e9:.3f} GB, int4 {report.int4_bytes / 1e9:.3f} GB")
    if report.device == "cpu":
        lines.append("on the CPU, tokens/s do not show the speed of the kernels")
    for speed in report.speeds:
        rates = f"fp16 {speed.fp16_tokens_per_s:.1f}, int4 {speed.int4_tokens_per_s:.1f} tokens/s"
        lines.append(f"batch {speed.batch}: {rates}, speedup {speed.ratio:.2f}")
    for what, difference in (("fp16", report.to_fp16), ("dequantized", report.to_dequantized)):
        lines.append(
            f"logits compared with {what}: largest difference {difference.max_relative:.2%}, "
            f"mean cosine {difference.mean_cosine:.5f}, same token {difference.same_choice:.1%}"
        )
    return "\n".join(lines)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else "",
        epilog=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--size", choices=SIZES, default="tiny", help="size of the model (default: tiny)")
    add("--batch", type=_numbers, default=None, metavar="N,N,...", help="batch sizes (default: 1,16,64; tiny: 1,2)")
    add("--prompt", type=int, default=None, metavar="N", help="tokens in the prompt (default: 128; tiny: 12)")
    add("--tokens", type=int, default=None, metavar="N", help="tokens to decode (default: 128; tiny: 4)")
    add("--group-size", type=int, choices=(32, 64, 128, -1), default=128, metavar="N", help="32, 64, 128 or -1")
    add("--device", default=None, help="torch device (default: cuda; tiny: cpu)")
    add("--compile", action="store_true", help="compile the decoding step of both models with torch.compile")
    add("--json", type=Path, metavar="FILE", help="also write the report to this file")
    options = parser.parse_args(argv)
    on_cpu = options.size == "tiny"
    options.device = options.device or ("cpu" if on_cpu else "cuda")
    options.batch = options.batch or ([1, 2] if on_cpu else [1, 16, 64])
    options.prompt = options.prompt or (12 if on_cpu else 128)
    options.tokens = options.tokens or (4 if on_cpu else 128)
    if options.device != "cpu" and not torch.cuda.is_available():
        raise ArgumentError("--device", options.device, "a GPU that torch can use", "pass --size tiny for the CPU")
    return options


def _numbers(text: str) -> list[int]:
    if not all(part.isdecimal() and int(part) > 0 for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"must be a list of integers above 0, separated by commas, got {text}")
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
