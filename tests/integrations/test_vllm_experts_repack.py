"""Experts in vLLM's formats repacked by torch, against quantization.pack_experts. vLLM is not needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

torch = pytest.importorskip("torch")

import cudatma
from cudatma.errors import QuantizationError
from cudatma.integrations.vllm.experts import (
    LoadedFormat,
    PackedExpertsLayer,
    pack_layer,
    pack_tensors,
    prepare_layer,
    refusal,
)
from cudatma.quantization import pack

NAMES = "qweight", "scales", "qzeros"
EXPERTS = 3
#: The column that AWQ stores in each nibble of a word.
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


class Loaded:
    """The integers, scales and zero points of all experts, and the tensors that hold them."""

    def __init__(self, layout: str, k: int, n: int, group_size: int, asymmetric: bool) -> None:
        rng = np.random.default_rng(k + n)
        groups = 1 if group_size == -1 else k // group_size
        self.q = rng.integers(0, 16, (EXPERTS, k, n), dtype=np.uint8)
        self.scales = rng.uniform(0.01, 0.02, (EXPERTS, groups, n)).astype(np.float16)
        self.zeros = rng.integers(0, 16, (EXPERTS, groups, n), dtype=np.uint8) if asymmetric else None
        self.layout, self.group_size = layout, group_size

    def tensors(self) -> tuple[Any, Any, Any]:
        q, zeros, scales = self.q, self.zeros, torch.from_numpy(self.scales)
        if self.layout == "gptq":
            return words(q.swapaxes(1, 2)).swapaxes(1, 2).contiguous(), scales, None if zeros is None else words(zeros)
        if self.layout == "awq":
            return words(awq_order(q)), scales, None if zeros is None else words(awq_order(zeros))
        n_major = words(q.swapaxes(1, 2)), scales.transpose(1, 2).contiguous()
        return *n_major, None if zeros is None else words(zeros).transpose(1, 2).contiguous()

    def packed(self, gated: bool) -> Any:
        zeros: Any = [None] * EXPERTS if self.zeros is None else self.zeros
        parts = zip(self.q, self.scales, zeros, strict=True)
        return cudatma.pack_experts([pack(*part, group_size=self.group_size) for part in parts], gated=gated)


def words(values: NDArray[np.uint8]) -> Any:
    """Pack uint8 (..., 8 C) into int32 (..., C), lowest nibble first."""
    parts = [values[..., place::8].astype(np.uint32) << np.uint32(4 * place) for place in range(8)]
    return torch.from_numpy(np.bitwise_or.reduce(parts).view(np.int32))


def awq_order(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return values.reshape(*values.shape[:-1], -1, 8)[..., AWQ_COLUMNS].reshape(values.shape)


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize(
    ("layout", "k", "n", "group_size", "asymmetric"),
    [
        ("gptq", 128, 96, 32, False),
        ("gptq", 80, 48, -1, True),
        ("awq", 128, 160, 64, True),
        ("n_major", 256, 64, 128, False),
        ("n_major", 96, 144, 32, True),
    ],
)
def test_repacked_experts_equal_packed_ones(
    layout: str, k: int, n: int, group_size: int, asymmetric: bool, is_gated: bool
) -> None:
    loaded = Loaded(layout, k, n, group_size, asymmetric)
    expected = loaded.packed(is_gated).weight
    qweight, scales, zeros = pack_tensors(layout, *loaded.tensors(), is_gated=is_gated)
    np.testing.assert_array_equal(qweight.reshape(expected.qweight.shape).numpy(), expected.qweight)
    np.testing.assert_array_equal(scales.numpy(), expected.scales)
    assert (zeros is None) == (expected.zeros is None)
    if zeros is not None:
        np.testing.assert_array_equal(zeros.numpy(), expected.zeros)


@pytest.mark.parametrize("layout", ["gptq", "n_major"])
def test_repacked_int8_experts_equal_packed_ones(layout: str) -> None:
    rng = np.random.default_rng(0)
    q = rng.integers(0, 256, (EXPERTS, 96, 80), dtype=np.uint8)
    scales = rng.uniform(0.001, 0.002, (EXPERTS, 3, 80)).astype(np.float16)
    parts = zip(q, scales, strict=True)
    expected = cudatma.pack_experts([pack(*part, group_size=32, format="int8") for part in parts], gated=True).weight
    rows = torch.from_numpy(np.ascontiguousarray(q.swapaxes(1, 2)).view(np.int32))
    loaded = torch.from_numpy(scales)
    if layout == "gptq":
        rows = rows.transpose(1, 2).contiguous()
    else:
        loaded = loaded.transpose(1, 2).contiguous()
    qweight, packed_scales, zeros = pack_tensors(layout, rows, loaded, None, is_gated=True, format="int8")
    np.testing.assert_array_equal(qweight.reshape(expected.qweight.shape).numpy(), expected.qweight)
    np.testing.assert_array_equal(packed_scales.numpy(), expected.scales)
    assert zeros is None


@pytest.mark.parametrize("is_gated", [False, True])
def test_repacked_experts_of_gpt_oss_equal_packed_ones(is_gated: bool) -> None:
    rng = np.random.default_rng(0)
    k, n = 192, 128  # Padding has other codes of 0.
    q = rng.integers(0, 16, (EXPERTS, k, n), dtype=np.uint8)
    scales = np.exp2(rng.integers(-8, -4, (EXPERTS, k // 32, n))).astype(ml_dtypes.bfloat16)
    q[:, 32:64, 5], scales[:, 1, 5] = 0, 0  # padding, whose loaded scales are 2^-127
    parts = zip(q, scales, strict=True)
    packed = [pack(*part, group_size=32, format="mxfp4") for part in parts]
    expected = cudatma.pack_experts(packed, gated=is_gated).weight
    if is_gated:  # Gate and up alternate.
        q, scales = (array.reshape(EXPERTS, -1, 2, n // 2).swapaxes(2, 3).reshape(array.shape) for array in (q, scales))
    codes, factors = q.swapaxes(1, 2), torch.from_numpy(scales.astype(np.float32)).transpose(1, 2).contiguous()
    factors[factors == 0] = 2.0**-127
    loaded = torch.from_numpy(np.ascontiguousarray(codes[..., ::2] | codes[..., 1::2] << 4))
    qweight, packed_scales, zeros = pack_tensors(
        "n_major_interleaved", loaded, factors.bfloat16(), None, is_gated=is_gated, format="mxfp4"
    )
    np.testing.assert_array_equal(qweight.reshape(expected.qweight.shape).numpy(), expected.qweight)
    np.testing.assert_array_equal(packed_scales.float().numpy(), expected.scales.astype(np.float32))
    assert zeros is None


def test_bytes_hold_the_same_values_as_words() -> None:
    q, scales, zeros = Loaded("n_major", 96, 144, 32, True).tensors()
    pairs = zeros.transpose(1, 2).contiguous().view(torch.uint8).transpose(1, 2).contiguous()
    expected = pack_tensors("n_major", q, scales, zeros, is_gated=True)
    for part, value in zip(
        pack_tensors("n_major", q.view(torch.uint8), scales, pairs, is_gated=True), expected, strict=True
    ):
        assert torch.equal(part, value)


def test_tensors_that_contradict_each_other_are_refused() -> None:
    q, scales, _ = Loaded("gptq", 128, 96, 32, False).tensors()
    with pytest.raises(QuantizationError, match=r"^scales\[0\] must be \(4, 96\).*got \(4, 95\)"):
        pack_tensors("gptq", q, scales[:, :, 1:], None, is_gated=True)


def config(**changes: Any) -> Any:
    facts = {
        "hidden_dim": 2048,
        "intermediate_size_per_partition": 768,
        "num_local_experts": 128,
        "experts_per_token": 8,
    }
    facts |= {"in_dtype": torch.bfloat16}
    return SimpleNamespace(**(facts | changes))


REFUSED = {
    "fp32": ({"in_dtype": torch.float32}, 128, "activations must be"),
    "group of 256": ({}, 256, "the group size must be"),
    "half a group": (
        {"intermediate_size_per_partition": 192},
        128,
        "the intermediate size must be a multiple of 128 on each rank, got 192",
    ),
    "8 columns": ({"hidden_dim": 2056}, -1, "the hidden size must be a multiple of 16"),
    "experts": ({"num_local_experts": 4096}, 128, "at most 1024 experts"),
    "limit": ({"swiglu_limit": 7.0}, 128, "limit"),
}


@pytest.mark.parametrize(("changes", "group_size", "reason"), REFUSED.values(), ids=REFUSED)
def test_layers_that_the_kernel_cannot_compute_are_refused(
    changes: dict[str, Any], group_size: int, reason: str
) -> None:
    loaded = LoadedFormat("gptq", NAMES, group_size, False)
    assert refusal(config(), loaded._replace(group_size=128)) is None
    message = refusal(config(**changes), loaded)
    assert message is not None
    assert reason in message


def test_a_layer_packs_its_weights_and_computes_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDATMA_BACKEND", "reference")
    hidden, intermediate, tokens = 128, 64, 5
    first, second = Loaded("awq", hidden, 2 * intermediate, 32, True), Loaded("awq", intermediate, hidden, 64, True)
    layer = torch.nn.Module()
    for prefix, loaded in (("w13", first), ("w2", second)):
        for name, tensor in zip(NAMES, loaded.tensors(), strict=True):
            layer.register_parameter(f"{prefix}_{name}", torch.nn.Parameter(tensor, requires_grad=False))
    pack_layer(layer, LoadedFormat("awq", NAMES, 32, True), replace)
    layer.moe_config = config(hidden_dim=hidden, intermediate_size_per_partition=intermediate)
    prepare_layer(layer, LoadedFormat("awq", NAMES, 32, True), None)
    kernel = PackedExpertsLayer()
    kernel.moe_config = layer.moe_config
    kernel.w1_bias, kernel.w2_bias = None, torch.rand(EXPERTS, hidden).half()
    kernel.w1_scale, kernel.w1_zp, kernel.w2_scale, kernel.w2_zp = (
        getattr(layer, name) for name in ("w13_scales", "w13_qzeros", "w2_scales", "w2_qzeros")
    )
    x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(1)).half()
    ids = torch.tensor([[0, 1], [2, 0], [1, 2], [2, -1], [1, 0]], dtype=torch.int16)  # as of another type
    factors = torch.rand(tokens, 2, dtype=torch.float64)
    y = torch.empty(tokens, hidden, dtype=torch.float16)
    kernel.run(y, x, layer.w13_weight, layer.w2_weight, factors, ids, None, False)
    expected = cudatma.marlin_moe(
        x.numpy(),
        first.packed(True),
        second.packed(False),
        factors.float().numpy(),
        ids.int().numpy(),
        bias2=kernel.w2_bias.numpy(),
        backend="reference",
    )
    np.testing.assert_array_equal(y.numpy(), expected)
    layer.w2_scales[0, 0] = 60000
    with pytest.raises(QuantizationError, match=r"^w2_scales must be .* before the reload, got scales with"):
        prepare_layer(layer, LoadedFormat("awq", NAMES, 32, True), None)


def replace(layer: Any, name: str, tensor: Any) -> None:
    setattr(layer, name, torch.nn.Parameter(tensor, requires_grad=False))
