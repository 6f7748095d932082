"""Calls of marlin_moe: errors of wrong calls, the reference against float64, and calls without tokens."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from moe_cases import LAYERS, Layer, check

from cudatma.arrays import describe
from cudatma.errors import ArgumentError, ArgumentTypeError, FieldError
from cudatma.kernels.experts.moe import marlin_moe
from cudatma.quantization import PackedExperts, pack, quantize, quantize_experts

BF16 = np.dtype(ml_dtypes.bfloat16)
LAYER = Layer(6, 128, 64, 4, 2)
OPERANDS = LAYER.operands()
MAP = np.arange(4, dtype=np.int32)
BIASES = {1: np.ones((4, 128), np.float16), 2: np.ones((4, 128), np.float16)}


@pytest.mark.parametrize("name", LAYERS)
def test_the_reference(name: str) -> None:
    operands = LAYERS[name].operands()
    check(marlin_moe(**operands, backend="reference"), operands)


def test_a_call_without_tokens() -> None:
    empty = {name: OPERANDS[name][:0] for name in ("x", "topk_weights", "topk_ids")}
    assert marlin_moe(**OPERANDS | empty, backend="emulator").shape == (0, 128)


def gate_up(*shape: int, **options: Any) -> Any:
    return quantize_experts(np.ones(shape, np.float32), **{"group_size": 64, "gated": True} | options)


def many_experts(k: int, n: int, **options: Any) -> PackedExperts:
    """Return more experts than marlin_moe accepts, with the same columns."""
    weight = pack(np.zeros((k, 1025 * 64), np.uint8), np.ones((1, 1025 * 64), np.float16), group_size=-1)
    return PackedExperts(weight, 1025, n, **options)


def wrong(name: str, value: Any) -> dict[str, Any]:
    return {name: value}


def inside(array: Any) -> Any:
    """Return an output in the memory of an array."""
    return array.reshape(-1).view(np.float16)[:768].reshape(6, 128)


W1, W2 = OPERANDS["w1"].weight, OPERANDS["w2"].weight


#: What is wrong, the error, and the field that it names.
WRONG: list[tuple[dict[str, Any], type[FieldError], str]] = [
    *((wrong("x", OPERANDS["x"].astype(kind)), ArgumentTypeError, "x.dtype") for kind in ("f4", "f8", "i2", BF16)),
    *((wrong("x", OPERANDS["x"].reshape(shape)), ArgumentError, "x.shape") for shape in ((-1,), (12, 64), (1, 6, 128))),
    (wrong("x", np.asfortranarray(OPERANDS["x"])), ArgumentError, "x.strides"),
    (wrong("x", np.zeros((6, 132), np.float16)[:, :128]), ArgumentError, "x.strides"),
    (wrong("x", np.zeros((7, 128), np.float16)), ArgumentError, "topk_weights.shape"),
    (wrong("x", None), ArgumentTypeError, "x"),
    (wrong("x", [[1.0]]), ArgumentTypeError, "x"),
    (wrong("w1", quantize(np.ones((128, 128), np.float32))), ArgumentTypeError, "w1"),
    (wrong("w2", None), ArgumentTypeError, "w2"),
    (wrong("w1", gate_up(4, 128, 128, gated=False)), ArgumentError, "w1.gated"),
    (wrong("w2", gate_up(4, 64, 128)), ArgumentError, "w2.gated"),
    (wrong("w2", gate_up(4, 64, 192, gated=False)), ArgumentError, "w2.shape"),
    (wrong("w2", gate_up(3, 64, 128, gated=False)), ArgumentError, "w2.shape"),
    (wrong("w2", gate_up(4, 96, 128, gated=False)), ArgumentError, "w2.shape"),
    (wrong("w2", gate_up(4, 64, 128, gated=False, dtype="bfloat16")), ArgumentError, "w2.dtype"),
    ({"w1": gate_up(4, 72, 128), "w2": gate_up(4, 64, 72, gated=False)}, ArgumentError, "w1.shape"),
    (
        {"w1": gate_up(4, 128, 48), "w2": gate_up(4, 24, 128, gated=False, group_size=32)},
        ArgumentError,
        "w1.shape",
    ),
    ({"w1": many_experts(64, 32, gated=True), "w2": many_experts(16, 64, gated=False)}, ArgumentError, "w1.shape"),
    *(
        (wrong("topk_weights", OPERANDS["topk_weights"].astype(kind)), ArgumentTypeError, "topk_weights.dtype")
        for kind in ("f2", "f8", ">f4")
    ),
    (wrong("topk_weights", OPERANDS["topk_weights"][:5]), ArgumentError, "topk_weights.shape"),
    (wrong("topk_weights", OPERANDS["topk_weights"][:, :0]), ArgumentError, "topk_weights.shape"),
    (wrong("topk_weights", OPERANDS["topk_weights"].T.copy().T), ArgumentError, "topk_weights.strides"),
    *(
        (wrong("topk_ids", OPERANDS["topk_ids"].astype(kind)), ArgumentTypeError, "topk_ids.dtype")
        for kind in ("i2", "u4", "f4")
    ),
    (wrong("topk_ids", OPERANDS["topk_ids"][:, :1]), ArgumentError, "topk_ids.shape"),
    (wrong("topk_ids", OPERANDS["topk_ids"].T.copy().T), ArgumentError, "topk_ids.strides"),
    (wrong("topk_ids", OPERANDS["topk_ids"] + 4), ArgumentError, "topk_ids"),
    (wrong("topk_ids", OPERANDS["topk_ids"] - 5), ArgumentError, "topk_ids"),
    (wrong("topk_ids", None), ArgumentTypeError, "topk_ids"),
    (wrong("expert_map", MAP.astype(np.int64)), ArgumentTypeError, "expert_map.dtype"),
    (wrong("expert_map", MAP[None]), ArgumentError, "expert_map.shape"),
    (wrong("expert_map", MAP[:0]), ArgumentError, "expert_map.shape"),
    (wrong("expert_map", MAP[:2]), ArgumentError, "topk_ids"),
    (wrong("expert_map", MAP + 1), ArgumentError, "expert_map"),
    (wrong("expert_map", np.arange(8, dtype=np.int32)[::2]), ArgumentError, "expert_map.strides"),
    (wrong("activation", "gelu"), ArgumentError, "activation"),
    (wrong("activation", None), ArgumentError, "activation"),
    (wrong("activation", ["silu_glu"]), ArgumentError, "activation"),
    (wrong("programmatic", 1), ArgumentTypeError, "programmatic"),
    (wrong("batch_invariant", 1), ArgumentTypeError, "batch_invariant"),
    *((wrong(f"bias{i}", BIASES[i].astype(np.float32)), ArgumentTypeError, f"bias{i}.dtype") for i in (1, 2)),
    *((wrong(f"bias{i}", BIASES[i][:, :16]), ArgumentError, f"bias{i}.shape") for i in (1, 2)),
    *((wrong(f"bias{i}", BIASES[i].T.copy().T), ArgumentError, f"bias{i}.strides") for i in (1, 2)),
    (wrong("bias1", BIASES[1][0]), ArgumentError, "bias1.shape"),
    (wrong("bias2", [[1.0]]), ArgumentTypeError, "bias2"),
    (wrong("out", np.zeros((6, 64), np.float16)), ArgumentError, "out.shape"),
    (wrong("out", np.zeros((6, 128), np.float32)), ArgumentTypeError, "out.dtype"),
    (wrong("out", np.zeros((6, 132), np.float16)[:, :128]), ArgumentError, "out.strides"),
    (wrong("out", np.zeros((128, 6), np.float16).T), ArgumentError, "out.strides"),
    *(
        (wrong("out", inside(array)), ArgumentError, "out")
        for array in (OPERANDS["x"], W1.qweight, W1.scales, W2.qweight)
    ),
    (wrong("backend", "gpu"), ArgumentError, "backend"),
    (wrong("backend", "cuda"), ArgumentError, "x.device"),
    (wrong("workspace", object()), ArgumentTypeError, "workspace"),
    (wrong("debug", 1), ArgumentTypeError, "debug"),
    (wrong("stream", "0"), ArgumentTypeError, "stream"),
]


@pytest.mark.parametrize(("changes", "error", "field"), WRONG, ids=[f"{i}-{case[2]}" for i, case in enumerate(WRONG)])
def test_an_error_names_the_field(changes: dict[str, Any], error: type[FieldError], field: str) -> None:
    with pytest.raises(error) as caught:
        marlin_moe(**{"backend": "reference"} | OPERANDS | changes)
    assert caught.value.field.split("[")[0] == field
    assert re.match(rf"{re.escape(caught.value.field)} must be .+, (got|found) .+", str(caught.value).splitlines()[0])


def test_arrays_on_another_device_than_the_weights() -> None:
    with pytest.raises(ArgumentError, match=r"^x\.device"):
        marlin_moe(**OPERANDS | {"x": replace(describe(OPERANDS["x"]), device=0)}, backend="cuda")
