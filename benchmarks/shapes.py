"""Which layers the benchmarks measure: five that everything is measured on, and the projections of public models.

K is a projection's input width, N its output width. Projections that read the same input are one GEMM, as inference
engines run them: query, key and value (qkv); gate and up of the feed-forward network (gate_up).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

Shape = tuple[int, int]

#: (K, N) of the layers that everything is measured on.
FIVE: tuple[Shape, ...] = ((4096, 4096), (4096, 12288), (8192, 8192), (8192, 28672), (28672, 8192))
#: Tokens of a call.
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
#: The layers that hold most of a 70B model's weights; bars name them.
LARGE: tuple[Shape, ...] = ((8192, 28672), (8192, 57344), (28672, 8192))


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder's widths, as its public config.json on the Hugging Face hub has them.

    hidden: hidden_size. heads: num_attention_heads. kv_heads: num_key_value_heads. ffn: intermediate_size (of one
    expert where there are several). source: the repository whose config.json says so.
    """

    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    source: str

    @property
    def projections(self) -> dict[str, Shape]:
        """Name -> (K, N) of each linear layer of a block."""
        head = self.hidden // self.heads
        return {
            "qkv": (self.hidden, (self.heads + 2 * self.kv_heads) * head),
            "o": (self.heads * head, self.hidden),
            "gate_up": (self.hidden, 2 * self.ffn),
            "down": (self.ffn, self.hidden),
        }


MODELS: dict[str, Model] = {
    "llama3-70b": Model(8192, 64, 8, 28672, "meta-llama/Meta-Llama-3-70B"),
    "llama3-8b": Model(4096, 32, 8, 14336, "meta-llama/Meta-Llama-3-8B"),
    "qwen2.5-7b": Model(3584, 28, 4, 18944, "Qwen/Qwen2.5-7B"),
    "qwen2.5-72b": Model(8192, 64, 8, 29568, "Qwen/Qwen2.5-72B"),
    "mixtral-8x7b": Model(4096, 32, 8, 14336, "mistralai/Mixtral-8x7B-v0.1"),
}


def model_shapes(name: str) -> tuple[Shape, ...]:
    """The distinct (K, N) of a model's projections."""
    return tuple(dict.fromkeys(MODELS[name].projections.values()))


def all_shapes() -> tuple[Shape, ...]:
    """The five, then what each model adds, in the order of MODELS: the most important first."""
    return tuple(dict.fromkeys((*FIVE, *(shape for name in MODELS for shape in model_shapes(name)))))


def uses(shape: Shape) -> list[str]:
    """Where a shape occurs: ``["llama3-8b qkv", ...]``."""
    return [f"{name} {part}" for name, model in MODELS.items() for part, at in model.projections.items() if at == shape]


def parse_shape(text: str) -> Shape:
    """``"8192x28672"`` -> (8192, 28672); multiples of 64. Raises ArgumentTypeError of argparse."""
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.isdigit() and int(part) and int(part) % 64 == 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text}: write KxN, both multiples of 64, as in 8192x28672")
    return int(parts[0]), int(parts[1])


def parse_shapes(text: str) -> tuple[Shape, ...]:
    """``"five"``, ``"all"``, a model's name, KxN, or several of them with commas between; each shape once.

    Raises ArgumentTypeError of argparse.
    """
    found: list[Shape] = []
    for part in text.split(","):
        if part == "five":
            found += FIVE
        elif part == "all":
            found += all_shapes()
        elif part in MODELS:
            found += model_shapes(part)
        elif part[:1].isdigit():
            found.append(parse_shape(part))
        else:
            raise argparse.ArgumentTypeError(f"{part!r}: five, all, {', '.join(MODELS)}, or KxN")
    return tuple(dict.fromkeys(found))


def parse_tokens(text: str) -> tuple[int, ...]:
    """``"1,16,64"`` -> (1, 16, 64), ascending, each once; ``"all"`` -> TOKENS. Raises ArgumentTypeError of argparse."""
    if text == "all":
        return TOKENS
    parts = text.split(",")
    if not all(part.isdigit() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text}: write tokens with commas between, as in 1,16,64, or all")
    return tuple(sorted({int(part) for part in parts}))
