"""Layers of experts for the emulator and for a GPU, and their results in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cudatma.dtypes import activation_type
from cudatma.kernels.sample import relative_error
from cudatma.quantization import PackedExperts, quantize_experts

#: Limits of relative_error() for activations and results that are rounded to the dtype.
LIMITS = {"float16": 1e-3, "bfloat16": 8e-3}


@dataclass(frozen=True)
class Layer:
    """A call of marlin_moe.

    mapped: half of the experts are on another GPU. skipped: fraction of skipped choices. duplicates: a token may choose
    an expert several times. zero: all weights are 0. biased: both products have biases. In the format nvfp4, the tensor
    scales of all experts, gates and ups differ.
    """

    m: int
    k: int
    intermediate: int
    experts: int
    top_k: int
    group_size: int = 64
    dtype: str = "float16"
    symmetric: bool = True
    mapped: bool = False
    skipped: float = 0.0
    same_expert: bool = False
    duplicates: bool = False
    zero: bool = False
    ids: str = "int32"
    biased: bool = False
    activation: str = "silu_glu"
    format: str = "int4"

    def operands(self, seed: int = 0) -> dict[str, Any]:
        """Return the arguments of the call in host memory."""
        random = np.random.default_rng(seed)

        def pack(*shape: int, gated: bool) -> PackedExperts:
            dense = random.standard_normal(shape, np.float32) * (0 if self.zero else 0.05)
            if self.format == "nvfp4":
                factors = np.exp(random.standard_normal((shape[0], 1, 1 + gated, 1)))
                dense = (dense.reshape(*shape[:2], 1 + gated, -1) * factors).reshape(shape)
            options = {"group_size": self.group_size, "dtype": self.dtype, "symmetric": self.symmetric}
            return quantize_experts(dense, gated=gated, format=self.format, **options)

        total = 2 * self.experts if self.mapped else self.experts
        ids = np.argsort(random.random((self.m, total)))[:, : self.top_k]
        if self.duplicates:
            ids = random.integers(0, total, ids.shape)
        if self.same_expert:
            ids = np.full_like(ids, self.experts - 1)
        ids[random.random(ids.shape) < self.skipped] = -1
        expert_map = None
        if self.mapped:
            expert_map = np.full(total, -1, np.int32)
            expert_map[random.permutation(total)[: self.experts]] = np.arange(self.experts)
        dtype = activation_type(self.dtype).numpy
        x = random.standard_normal((self.m, self.k), np.float32).astype(dtype)
        columns = 2 * self.intermediate, self.k
        biases = [random.standard_normal((self.experts, n), np.float32).astype(dtype) for n in columns]
        return {
            "x": x,
            "w1": pack(self.experts, self.k, 2 * self.intermediate, gated=True),
            "w2": pack(self.experts, self.intermediate, self.k, gated=False),
            "topk_weights": random.random(ids.shape, np.float32),
            "topk_ids": np.ascontiguousarray(ids, self.ids),
            "expert_map": expert_map,
            "bias1": biases[0] if self.biased else None,
            "bias2": biases[1] if self.biased else None,
            "activation": self.activation,
        }


def exact(operands: dict[str, Any]) -> Any:
    """Return the result in float64, without rounding."""
    x, expert_map = operands["x"].astype(np.float64), operands["expert_map"]
    first, second = operands["w1"].dequantize(), operands["w2"].dequantize()
    half = second.shape[1]
    experts = first.shape[0]
    bias1, bias2 = (np.zeros((experts, 1)) if operands[name] is None else operands[name] for name in ("bias1", "bias2"))
    is_silu = operands["activation"] == "silu_glu"
    out = np.zeros((len(x), second.shape[2]))
    for token, (ids, factors) in enumerate(zip(operands["topk_ids"], operands["topk_weights"], strict=True)):
        for expert, factor in zip(ids, factors, strict=True):
            index = -1 if expert < 0 else expert if expert_map is None else expert_map[expert]
            if index < 0:
                continue
            both = x[token] @ first[index] + bias1[index].astype(np.float64)
            gate, up = both[:half], both[half:]
            if is_silu:
                hidden = gate / (1 + np.exp(-gate)) * up
            else:
                gate = np.minimum(gate, 7)
                hidden = gate / (1 + np.exp(-1.702 * gate)) * (np.clip(up, -7, 7) + 1)
            out[token] += factor * (hidden @ second[index] + bias2[index].astype(np.float64))
    return out


def check(result: Any, operands: dict[str, Any]) -> None:
    """Compare a result with float64."""
    expected = exact(operands)
    if not expected.any():
        assert not np.asarray(result, np.float64).any()
        return
    assert relative_error(result, expected) < LIMITS[operands["w1"].dtype]


#: Name -> call. Together they have every option, tails of both products, and blocks of one row to 32 rows.
LAYERS = {
    "one_token": Layer(1, 256, 128, 4, 2),
    "three_tokens": Layer(3, 192, 96, 5, 3, 32, "bfloat16", symmetric=False),
    "tails": Layer(9, 208, 48, 4, 3, -1, "bfloat16", symmetric=False),
    "mapped": Layer(24, 272, 80, 3, 2, 64, mapped=True, ids="int64", biased=True),
    "few_pairs": Layer(3, 192, 96, 12, 2, 64, mapped=True, skipped=0.3, biased=True),
    "top_1": Layer(17, 128, 64, 2, 1, 128),
    "skipped": Layer(12, 128, 64, 4, 2, 64, skipped=0.5),
    "all_skipped": Layer(5, 128, 64, 4, 2, 64, skipped=1.0),
    "same_expert": Layer(40, 128, 64, 3, 2, 64, same_expert=True),
    "many_rows": Layer(70, 192, 96, 3, 2, 64, "bfloat16", symmetric=False),
    "gpt_oss": Layer(5, 192, 96, 4, 2, 32, "bfloat16", biased=True, activation="swiglu_oai", format="mxfp4"),
    "gpt_oss_many_rows": Layer(66, 144, 80, 3, 2, 64, biased=True, activation="swiglu_oai"),
    "nvfp4": Layer(3, 208, 96, 4, 2, 16, "bfloat16", mapped=True, format="nvfp4"),
    "nvfp4_many_rows": Layer(50, 160, 80, 3, 2, 16, biased=True, format="nvfp4"),
    "one_expert": Layer(5, 64, 16, 1, 1, 32),
    "every_expert": Layer(3, 80, 16, 7, 7, 32, "bfloat16", biased=True),
    "61_experts": Layer(7, 128, 48, 61, 3, ids="int64"),
    "100_experts": Layer(1, 64, 16, 100, 1, 32, mapped=True),
    "duplicates": Layer(11, 64, 48, 3, 5, 32, symmetric=False, duplicates=True, skipped=0.1),
    "zero_weights": Layer(9, 64, 32, 3, 2, 32, zero=True, biased=True),
    "many_rows_whole_columns": Layer(45, 208, 80, 4, 2, -1, symmetric=False, mapped=True),
}
