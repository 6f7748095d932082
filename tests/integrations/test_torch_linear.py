"""MarlinLinear of torch against the dequantized weight, on the CPU by the reference backend."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cudatma.integrations.torch import MarlinLinear

K, N = 160, 136  # no multiples of a block


@pytest.fixture(autouse=True)
def _reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDATMA_BACKEND", "reference")


def linear(dtype: Any = torch.float16, bias: bool = True) -> Any:
    torch.manual_seed(0)
    return torch.nn.Linear(K, N, bias=bias, dtype=dtype)


def rows(*shape: int, dtype: Any = torch.float16) -> Any:
    return torch.randn(*shape, K, generator=torch.Generator().manual_seed(1)).to(dtype)


def expected(layer: MarlinLinear, x: Any) -> Any:
    """In float64, by torch."""
    y = x.double() @ torch.from_numpy(layer.packed.dequantize())
    return y if layer.bias is None else y + layer.bias.double()


def check(layer: MarlinLinear, x: Any) -> None:
    y = layer(x)
    assert y.dtype == x.dtype
    assert y.shape == (*x.shape[:-1], layer.out_features)
    torch.testing.assert_close(y.double(), expected(layer, x), rtol=1e-2, atol=1e-2)


@pytest.mark.filterwarnings("ignore::cudatma.BackendWarning")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("group_size", "symmetric", "bias"), [(32, True, True), (-1, False, False)])
def test_a_quantized_linear_computes_its_dequantized_weight(
    dtype: Any, group_size: int, symmetric: bool, bias: bool
) -> None:
    dense = linear(dtype, bias)
    layer = MarlinLinear.from_linear(dense, group_size=group_size, symmetric=symmetric)
    for shape in ((), (3,), (2, 5), (0,)):
        check(layer, rows(*shape, dtype=dtype))
    worst = (layer(rows(8, dtype=dtype)) - dense(rows(8, dtype=dtype))).abs().max()
    assert worst < 0.5
