"""MiniLM's forward pass (BERT, post-norm) in plain fp32 array code for NumPy and CuPy.

The caller passes the linear layers and the attention, so that one encoder runs in fp32 and another on cudatma's
kernels. The sentences of a batch are concatenated without padding. Sources: Devlin et al., "BERT"; Wang et al.,
"MiniLM"; the model's config.json; sentence-transformers' pooling (mean over the tokens of a sentence, normalized to
unit length).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from cudatma.errors import ArgumentError, WeightFileError

#: A linear layer, from fp32 (tokens, K) to fp32 (tokens, N).
Linear = Callable[[Any], Any]

#: Attention within each sentence. It takes q, k and v, fp32 (tokens, heads, dim), and the first token of each sentence
#: followed by the number of tokens, and returns fp32 (tokens, heads, dim).
Attention = Callable[[Any, Any, Any, Sequence[int]], Any]

#: Linear layers of one encoder layer, by their names in BERT checkpoints.
LINEARS = (
    "attention.self.query",
    "attention.self.key",
    "attention.self.value",
    "attention.output.dense",
    "intermediate.dense",
    "output.dense",
)
_NORMS = ("attention.output.LayerNorm", "output.LayerNorm")
_TABLES = ("word", "position", "token_type")


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """Configuration of the encoder.

    Attributes
    ----------
    layers, heads : int
        Number of encoder layers, and of attention heads per layer.
    hidden, intermediate : int
        Width of the hidden state, and of the feed-forward network.
    vocabulary, positions, token_types : int
        Number of rows in each embedding table. ``positions`` is also the maximum number of tokens in a sentence.
    norm_eps : float
        Number that layer norm adds to the variance.
    """

    layers: int
    heads: int
    hidden: int
    intermediate: int
    vocabulary: int
    positions: int
    token_types: int
    norm_eps: float

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            allowed = f"a multiple of num_attention_heads, {self.heads}"
            raise WeightFileError("config.json: hidden_size", self.hidden, allowed)

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Prefix of the tensor names of each layer."""
        return tuple(f"encoder.layer.{layer}" for layer in range(self.layers))

    @property
    def linear_names(self) -> tuple[str, ...]:
        """Linear layers of all encoder layers, in the order of the forward pass."""
        return tuple(f"{prefix}.{name}" for prefix in self.prefixes for name in LINEARS)

    def linear_shape(self, name: str) -> tuple[int, int]:
        """Return the shape (N, K) = (out, in) of a linear layer."""
        wide = name.endswith("intermediate.dense")
        narrow = name.endswith(".output.dense") and "attention" not in name
        out = self.intermediate if wide else self.hidden
        return out, self.intermediate if narrow else self.hidden

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor that the forward pass reads."""
        rows = dict(zip(_TABLES, (self.vocabulary, self.positions, self.token_types), strict=True))
        shapes: dict[str, tuple[int, ...]] = {
            f"embeddings.{table}_embeddings.weight": (count, self.hidden) for table, count in rows.items()
        }
        norms = ["embeddings.LayerNorm", *(f"{prefix}.{norm}" for prefix in self.prefixes for norm in _NORMS)]
        shapes |= {f"{norm}.{part}": (self.hidden,) for norm in norms for part in ("weight", "bias")}
        for name in self.linear_names:
            shapes[f"{name}.weight"] = self.linear_shape(name)
            shapes[f"{name}.bias"] = self.linear_shape(name)[:1]
        return shapes


def erf(x: Any, xp: Any) -> Any:
    """Return the error function of an fp32 array, with an absolute error below 5e-7.

    NumPy has no such function, and CuPy's needs SciPy. Source: Abramowitz and Stegun, "Handbook of Mathematical
    Functions", 7.1.26.
    """
    magnitude = xp.abs(x)
    t = 1.0 / (1.0 + 0.3275911 * magnitude)  # Python floats do not promote an fp32 array.
    polynomial = xp.zeros_like(x)
    for coefficient in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592):
        polynomial = (polynomial + coefficient) * t
    return xp.copysign(1.0 - polynomial * xp.exp(-magnitude * magnitude), x)


def gelu(x: Any, xp: Any) -> Any:
    """Return x times the cumulative normal distribution, the exact form that config.json calls "gelu"."""
    return 0.5 * x * (1.0 + erf(x * math.sqrt(0.5), xp))


def softmax(scores: Any, xp: Any) -> Any:
    """Return exp(scores) / sum over the last axis, shifted by the row's maximum, which must be finite."""
    weights = xp.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


@dataclass(frozen=True, slots=True, eq=False)
class DenseLinear:
    """Linear layer x W^T + b in fp32, with weight (N, K) and bias (N,)."""

    weight: Any
    bias: Any

    def __call__(self, x: Any) -> Any:
        return x @ self.weight.T + self.bias


@dataclass(frozen=True, slots=True, eq=False)
class HalfLinear:
    """Layer that computes in fp16, as MarlinLinear and gemm do, with fp32 input and output."""

    layer: Callable[[Any], Any]

    def __call__(self, x: Any) -> Any:
        return self.layer(x.astype(np.float16)).astype(np.float32)


@dataclass(frozen=True, slots=True)
class DenseAttention:
    """Attention in fp32, one sentence at a time. ``xp`` is the array module."""

    xp: Any

    def __call__(self, q: Any, k: Any, v: Any, starts: Sequence[int]) -> Any:
        heads = [array.swapaxes(0, 1) for array in (q, k, v)]
        mixed = []
        for first, end in pairwise(starts):
            query, key, value = (array[:, first:end] for array in heads)
            scores = query @ key.swapaxes(1, 2) / math.sqrt(query.shape[-1])
            mixed.append(softmax(scores, self.xp) @ value)
        return self.xp.concatenate(mixed, axis=1).swapaxes(0, 1)


@dataclass(frozen=True, slots=True, eq=False)
class Encoder:
    """Encoder that turns sentences into embeddings.

    Attributes
    ----------
    config : EncoderConfig
        Sizes of the model.
    tensors : mapping of str to array
        fp32 arrays of ``xp``, by the checkpoint's names.
    linears : mapping of str to callable
        Linear layers by name.
    attention : callable
        Attention within each sentence.
    xp : module
        ``numpy`` or ``cupy``, the module of all arrays.
    """

    config: EncoderConfig
    tensors: Mapping[str, Any]
    linears: Mapping[str, Linear]
    attention: Attention
    xp: Any

    def embed(self, ids: Any, mask: Any) -> Any:
        """Return sentence embeddings, fp32 (batch, hidden), of unit length.

        ``ids`` are integers (batch, tokens), and ``mask`` is False at padding. Raise ArgumentError if a shape is wrong
        or a sentence contains no tokens.
        """
        self._check(ids, mask)
        hidden = self._embeddings(ids, mask)
        starts = [0, *np.cumsum(mask.sum(axis=1).tolist()).tolist()]
        for prefix in self.config.prefixes:
            hidden = self._layer(prefix, hidden, starts)
        mean = self.xp.stack([hidden[first:end].mean(axis=0) for first, end in pairwise(starts)])
        return mean / self.xp.sqrt((mean * mean).sum(axis=-1, keepdims=True))

    def _check(self, ids: Any, mask: Any) -> None:
        if ids.ndim != 2 or not 1 <= ids.shape[1] <= self.config.positions:
            raise ArgumentError("ids", tuple(ids.shape), f"(batch, tokens) with 1 to {self.config.positions} tokens")
        if mask.shape != ids.shape or mask.dtype != np.bool_:
            raise ArgumentError("mask", f"{mask.dtype} {tuple(mask.shape)}", f"bool {tuple(ids.shape)}, like ids")
        if not bool(mask.any(axis=1).all()):
            raise ArgumentError(
                "mask", "a row without True", "True for at least one token per row", "omit empty sentences"
            )

    def _embeddings(self, ids: Any, mask: Any) -> Any:
        """Return the tokens of all sentences, (tokens, hidden), without padding."""
        word, position, kind = (self.tensors[f"embeddings.{table}_embeddings.weight"] for table in _TABLES)
        _, at = self.xp.nonzero(mask)
        return self._norm("embeddings.LayerNorm", word[ids[mask]] + position[at] + kind[0])

    def _layer(self, prefix: str, hidden: Any, starts: Sequence[int]) -> Any:
        linears = self.linears
        q, k, v = (
            linears[f"{prefix}.attention.self.{part}"](hidden).reshape(len(hidden), self.config.heads, -1)
            for part in ("query", "key", "value")
        )
        mixed = self.attention(q, k, v, starts).reshape(hidden.shape)
        attended = linears[f"{prefix}.attention.output.dense"](mixed)
        hidden = self._norm(f"{prefix}.attention.output.LayerNorm", hidden + attended)
        inner = gelu(linears[f"{prefix}.intermediate.dense"](hidden), self.xp)
        return self._norm(f"{prefix}.output.LayerNorm", hidden + linears[f"{prefix}.output.dense"](inner))

    def _norm(self, name: str, x: Any) -> Any:
        """Return the layer norm over the last axis, with the biased variance."""
        centered = x - x.mean(axis=-1, keepdims=True)
        variance = (centered * centered).mean(axis=-1, keepdims=True)
        normal = centered / self.xp.sqrt(variance + self.config.norm_eps)
        return normal * self.tensors[f"{name}.weight"] + self.tensors[f"{name}.bias"]
