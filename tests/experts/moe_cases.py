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
    """A call of marlin_moe. mapped: half of the experts are on another GPU. skipped: fraction of skipped choices."""

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
    ids: str = "int32"

    def operands(self, seed: int = 0) -> dict[str, Any]:
        """Return the arguments of the call in host memory."""
        random = np.random.default_rng(seed)

        def pack(*shape: int, gated: bool) -> PackedExperts:
            dense = random.standard_normal(shape, np.float32) * 0.05
            options = {"group_size": self.group_size, "dtype": self.dtype, "symmetric": self.symmetric}
            return quantize_experts(dense, gated=gated, **options)

        total = 2 * self.experts if self.mapped else self.experts
        ids = np.argsort(random.random((self.m, total)))[:, : self.top_k]
        if self.same_expert:
            ids = np.full_like(ids, self.experts - 1)
        ids[random.random(ids.shape) < self.skipped] = -1
        expert_map = None
        if self.mapped:
            expert_map = np.full(total, -1, np.int32)
            expert_map[random.permutation(total)[: self.experts]] = np.arange(self.experts)
        x = random.standard_normal((self.m, self.k), np.float32).astype(activation_type(self.dtype).numpy)
        return {
            "x": x,
            "w1": pack(self.experts, self.k, 2 * self.intermediate, gated=True),
            "w2": pack(self.experts, self.intermediate, self.k, gated=False),
            "topk_weights": random.random(ids.shape, np.float32),
            "topk_ids": np.ascontiguousarray(ids, self.ids),
            "expert_map": expert_map,
        }


def exact(operands: dict[str, Any]) -> Any:
    """Return the result in float64, without rounding."""
    x, expert_map = operands["x"].astype(np.float64), operands["expert_map"]
    first, second = operands["w1"].dequantize(), operands["w2"].dequantize()
    half = second.shape[1]
    out = np.zeros((len(x), second.shape[2]))
    for token, (ids, factors) in enumerate(zip(operands["topk_ids"], operands["topk_weights"], strict=True)):
        for expert, factor in zip(ids, factors, strict=True):
            index = -1 if expert < 0 else expert if expert_map is None else expert_map[expert]
            if index < 0:
                continue
            both = x[token] @ first[index]
            gate, up = both[:half], both[half:]
            out[token] += factor * (gate / (1 + np.exp(-gate)) * up @ second[index])
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
    "mapped": Layer(24, 272, 80, 3, 2, 64, mapped=True, ids="int64"),
    "top_1": Layer(17, 128, 64, 2, 1, 128),
    "skipped": Layer(12, 128, 64, 4, 2, 64, skipped=0.5),
    "all_skipped": Layer(5, 128, 64, 4, 2, 64, skipped=1.0),
    "same_expert": Layer(40, 128, 64, 3, 2, 64, same_expert=True),
    "many_rows": Layer(70, 192, 96, 3, 2, 64, "bfloat16", symmetric=False),
    "many_rows_whole_columns": Layer(45, 208, 80, 4, 2, -1, symmetric=False, mapped=True),
}
