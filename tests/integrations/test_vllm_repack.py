"""vLLM's weights repacked by torch, against quantization.pack. vLLM is not needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

torch = pytest.importorskip("torch")

from cudatma.errors import QuantizationError
from cudatma.integrations.vllm.layer import PackedLayer, repack
from cudatma.quantization.packed import pack


def words(values: NDArray[np.uint8]) -> Any:
    """Pack uint8 (R, C) into int32 (R, ceil(C / 8)), eight columns per word, lowest nibble first."""
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % 8))).astype(np.uint32)
    parts = [padded[:, place::8] << np.uint32(4 * place) for place in range(8)]
    return torch.from_numpy(np.bitwise_or.reduce(parts).view(np.int32))


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize(
    ("k", "n", "group_size", "asymmetric"),
    [
        (128, 64, 32, False),
        (256, 192, 128, True),
        (96, 72, 32, True),
        (64, 100, 64, False),
        (40, 20, -1, True),
        (8, 3, -1, False),
        (64, 1, 32, True),
    ],
)
def test_repacked_weights_equal_packed_ones(
    k: int, n: int, group_size: int, asymmetric: bool, is_transposed: bool
) -> None:
    rng = np.random.default_rng(k + n)
    groups = 1 if group_size == -1 else k // group_size
    q = rng.integers(0, 16, (k, n), dtype=np.uint8)
    scales = rng.standard_normal((groups, n)).astype(np.float16)
    zeros = rng.integers(0, 16, (groups, n), dtype=np.uint8) if asymmetric else None
    loaded = [words(q.T).T, torch.from_numpy(scales), None if zeros is None else words(zeros)]
    loaded = [part if part is None else part.contiguous() for part in loaded]
    if is_transposed:  # compressed-tensors has N first
        loaded = [part if part is None else part.t().contiguous().t() for part in loaded]
    expected = pack(q, scales, zeros, group_size=group_size)
    qweight, stored_scales, stored_zeros = repack(*loaded, n=n, group_size=group_size)
    np.testing.assert_array_equal(qweight.numpy(), expected.qweight)
    np.testing.assert_array_equal(stored_scales.numpy(), expected.scales)
    assert (stored_zeros is None) == (expected.zeros is None)
    if stored_zeros is not None:
        np.testing.assert_array_equal(stored_zeros.numpy(), expected.zeros)


def test_tensors_that_contradict_each_other_are_refused() -> None:
    weight, scales = torch.zeros((16, 64), dtype=torch.int32), torch.ones((1, 64), dtype=torch.float16)
    for loaded, n, field in (
        ((weight, scales), 72, r"words must be .*got \(16, 64\)"),
        ((weight, scales[:, :32]), 64, r"scales must be .*got \(1, 32\)"),
        ((weight, scales, weight[:1]), 64, r"zero_words must be \(1, 8\).*got \(1, 64\)"),
    ):
        with pytest.raises(QuantizationError, match=field):
            repack(*loaded, n=n, group_size=128)


def parameters(q: NDArray[np.uint8], scales: NDArray[Any], zeros: NDArray[np.uint8]) -> Any:
    """Return a vLLM layer that has loaded a compressed-tensors weight (N first)."""
    layer = torch.nn.Module()
    tensors = {"q": words(q.T), "s": torch.from_numpy(scales).t().contiguous(), "z": words(zeros).t().contiguous()}
    for name, tensor in tensors.items():
        layer.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
        getattr(layer, name).output_dim = 0
    return layer


def test_a_layer_packs_its_weight_and_refuses_scales_of_another_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDATMA_BACKEND", "reference")
    rng = np.random.default_rng(1)
    q, zeros = (rng.integers(0, 16, shape, dtype=np.uint8) for shape in ((128, 64), (1, 64)))
    scales = rng.uniform(0.01, 0.02, (1, 64)).astype(np.float16)
    kernel = PackedLayer()
    kernel.config = SimpleNamespace(partition_weight_shape=(128, 64), group_size=128, zero_points=True)
    kernel.w_q_name, kernel.w_s_name, kernel.w_zp_name = "q", "s", "z"
    layer = parameters(q, scales, zeros)
    kernel.process_weights_after_loading(layer)
    expected = pack(q, scales, zeros, group_size=128)
    np.testing.assert_array_equal(layer.q.numpy(), expected.qweight)
    np.testing.assert_array_equal(layer.z.numpy(), expected.zeros)
    x = torch.from_numpy(rng.standard_normal((3, 128)).astype(np.float16))
    bias = torch.ones(64, dtype=torch.float16)
    exact = x.double().numpy() @ expected.dequantize() + 1
    np.testing.assert_allclose(kernel.apply_weights(layer, x, bias).double().numpy(), exact, atol=2e-2)
    scales[0, 0] = 60000
    with pytest.raises(QuantizationError, match=r"^s must be .* before the reload.*got scales with"):
        kernel.process_weights_after_loading(parameters(q, scales, zeros))
