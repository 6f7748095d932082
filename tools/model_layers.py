"""Linear layers of public models, with the names that the tuner and the benchmarks use.

K is the input width of a projection, and N is its output width. Projections with the same input are one GEMM, as in
inference engines: query, key and value (qkv), and gate and up of the feed-forward network (gate_up).
"""

from __future__ import annotations

from dataclasses import dataclass

from cudatma.errors import ArgumentError

Shape = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Model:
    """Widths of a decoder, from its public config.json on the Hugging Face Hub.

    Attributes
    ----------
    hidden : int
        hidden_size.
    heads : int
        num_attention_heads.
    kv_heads : int
        num_key_value_heads.
    ffn : int
        intermediate_size. In a mixture-of-experts model, the value for one expert.
    source : str
        Repository that contains the config.json.
    head_dim : int
        Number of elements per head. 0 means hidden / heads.
    """

    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    source: str
    head_dim: int = 0

    @property
    def projections(self) -> dict[str, Shape]:
        """(K, N) of each linear layer of a block, by name."""
        head = self.head_dim or self.hidden // self.heads
        return {
            "qkv": (self.hidden, (self.heads + 2 * self.kv_heads) * head),
            "o": (self.heads * head, self.hidden),
            "gate_up": (self.hidden, 2 * self.ffn),
            "down": (self.ffn, self.hidden),
        }


#: Models that the benchmarks measure, the most important first.
BENCHMARKED: dict[str, Model] = {
    "llama3-70b": Model(8192, 64, 8, 28672, "meta-llama/Meta-Llama-3-70B"),
    "llama3-8b": Model(4096, 32, 8, 14336, "meta-llama/Meta-Llama-3-8B"),
    "qwen2.5-7b": Model(3584, 28, 4, 18944, "Qwen/Qwen2.5-7B"),
    "qwen2.5-72b": Model(8192, 64, 8, 29568, "Qwen/Qwen2.5-72B"),
    # These are the widths of one of the eight experts.
    "mixtral-8x7b": Model(4096, 32, 8, 14336, "mistralai/Mixtral-8x7B-v0.1"),
}
#: All named models.
MODELS: dict[str, Model] = BENCHMARKED | {
    "llama2-7b": Model(4096, 32, 32, 11008, "meta-llama/Llama-2-7b-hf"),
    "llama2-13b": Model(5120, 40, 40, 13824, "meta-llama/Llama-2-13b-hf"),
    "llama3.2-1b": Model(2048, 32, 8, 8192, "meta-llama/Llama-3.2-1B"),
    "llama3.2-3b": Model(3072, 24, 8, 8192, "meta-llama/Llama-3.2-3B"),
    "qwen2.5-1.5b": Model(1536, 12, 2, 8960, "Qwen/Qwen2.5-1.5B"),
    "qwen2.5-3b": Model(2048, 16, 2, 11008, "Qwen/Qwen2.5-3B"),
    "qwen2.5-14b": Model(5120, 40, 8, 13824, "Qwen/Qwen2.5-14B"),
    "qwen2.5-32b": Model(5120, 40, 8, 27648, "Qwen/Qwen2.5-32B"),
    "qwen3-4b": Model(2560, 32, 8, 9728, "Qwen/Qwen3-4B", 128),
    "qwen3-8b": Model(4096, 32, 8, 12288, "Qwen/Qwen3-8B"),
    "qwen3-14b": Model(5120, 40, 8, 17408, "Qwen/Qwen3-14B"),
    "qwen3-32b": Model(5120, 64, 8, 25600, "Qwen/Qwen3-32B", 128),
    "mistral-nemo-12b": Model(5120, 32, 8, 14336, "mistralai/Mistral-Nemo-Base-2407", 128),
    "mistral-small-24b": Model(5120, 32, 8, 32768, "mistralai/Mistral-Small-24B-Base-2501", 128),
    "mixtral-8x22b": Model(6144, 48, 8, 16384, "mistralai/Mixtral-8x22B-v0.1"),
    "gemma2-9b": Model(3584, 16, 8, 14336, "google/gemma-2-9b", 256),
    "gemma2-27b": Model(4608, 32, 16, 36864, "google/gemma-2-27b", 128),
    "phi3-mini": Model(3072, 32, 32, 8192, "microsoft/Phi-3-mini-4k-instruct"),
    "phi4-14b": Model(5120, 40, 10, 17920, "microsoft/phi-4"),
}
#: Tensor parallelism shards these projections along K and all others along N.
_DIVIDED_ALONG_K = ("o", "down")


def model_shapes(name: str, gpus: int = 1) -> tuple[Shape, ...]:
    """Return the distinct (K, N) of a model's projections on one of ``gpus`` GPUs with tensor parallelism.

    Raise ArgumentError unless ``gpus`` divides all of them.
    """
    shapes = []
    for part, (k, n) in MODELS[name].projections.items():
        divided = k if part in _DIVIDED_ALONG_K else n
        if divided % gpus:
            raise ArgumentError("gpus", gpus, f"a divisor of {divided} ({name}'s {part} is {k} x {n})")
        shapes.append((k // gpus, n) if part in _DIVIDED_ALONG_K else (k, n // gpus))
    return tuple(dict.fromkeys(shapes))
