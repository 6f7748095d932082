"""The linear layers of public models, as the tuner and the benchmarks name them.

K is a projection's input width, N its output width. Projections that read the same input are one GEMM, as inference
engines run them: query, key and value (qkv); gate and up of the feed-forward network (gate_up).
"""

from __future__ import annotations

from dataclasses import dataclass

Shape = tuple[int, int]


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
    # Each of the eight experts; how many tokens it gets, the router decides.
    "mixtral-8x7b": Model(4096, 32, 8, 14336, "mistralai/Mixtral-8x7B-v0.1"),
}


def model_shapes(name: str) -> tuple[Shape, ...]:
    """The distinct (K, N) of a model's projections."""
    return tuple(dict.fromkeys(MODELS[name].projections.values()))
