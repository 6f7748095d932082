"""vLLM's linear layers with our kernel, from loaded tensors to results, on the CPU with the reference backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

import vllm_layers
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, ReplicatedLinear
from vllm.model_executor.model_loader.reload import layerwise
from vllm_layers import Integers, fill, integers, kernel_of, load

from cudatma.errors import QuantizationError
from cudatma.integrations.vllm import register
from cudatma.integrations.vllm.kernel import CudatmaWNA16LinearKernel

K, N = 256, 144
CASES = [
    *[("gptq", size, False) for size in (32, 64, 128, -1)],
    *[("awq", size, True) for size in (32, 64, 128, -1)],
    *[("compressed-tensors", size, False) for size in (32, 64, 128, -1)],
    *[("compressed-tensors", size, True) for size in (32, -1)],
]


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("CUDATMA_BACKEND", "reference")
    register()
    vllm_layers.join_one_rank()
    with vllm_layers.configured(), vllm_layers.pretended_gpu(9):
        yield


def empty_layer(form: str, size: int, asymmetric: bool, dtype: Any = torch.float16, **options: Any) -> Any:
    quant_config = vllm_layers.quant_config(form, size, asymmetric)
    layer = ReplicatedLinear(K, N, quant_config=quant_config, params_dtype=dtype, prefix="model.up_proj", **options)
    assert type(kernel_of(layer)) is CudatmaWNA16LinearKernel
    return layer


def rows(count: int, k: int = K, dtype: Any = torch.float16) -> Any:
    return torch.randn(count, k, generator=torch.Generator().manual_seed(1)).to(dtype)


def check(layer: Any, x: Any, weight: Integers) -> None:
    y, _ = layer(x)
    assert y.dtype == x.dtype
    expected = weight.product(x) + (0 if layer.bias is None else layer.bias.double().numpy())
    np.testing.assert_allclose(y.double().numpy(), expected, rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("form", "size", "asymmetric"), CASES)
def test_a_layer_computes_the_product_of_its_checkpoint(form: str, size: int, asymmetric: bool, dtype: Any) -> None:
    weight = integers(K, N, size, asymmetric, dtype)
    layer = empty_layer(form, size, asymmetric, dtype)
    layer.bias.data = rows(1, N, dtype)[0]
    load(layer, weight.tensors(form))
    check(layer, rows(5, dtype=dtype), weight)


@pytest.mark.parametrize(("form", "asymmetric"), [("gptq", False), ("awq", True), ("compressed-tensors", True)])
def test_the_layer_holds_the_packed_weight_and_nothing_else(form: str, asymmetric: bool) -> None:
    layer = empty_layer(form, 128, asymmetric, bias=False)
    load(layer, integers(K, N, 128, asymmetric, torch.float16).tensors(form))
    held = sum(tensor.nbytes for tensor in layer.parameters()) + sum(tensor.nbytes for tensor in layer.buffers())
    padded, groups, shape = 192, K // 128, 16 * (form == "compressed-tensors")
    assert held == K * padded // 2 + groups * padded * (2 + asymmetric) + shape


def test_a_merged_layer_loads_each_of_its_parts() -> None:
    halves = [integers(K, N, 128, False, torch.float16, seed=seed) for seed in (1, 2)]
    quant_config = vllm_layers.quant_config("gptq", 128, False)
    layer = MergedColumnParallelLinear(
        K, [N, N], bias=False, quant_config=quant_config, params_dtype=torch.float16, prefix="model.gate_up_proj"
    )
    for number, half in enumerate(halves):
        for name, tensor in half.tensors("gptq").items():
            parameter = getattr(layer, name)
            parameter.weight_loader(parameter, tensor.contiguous(), number)
    layer.quant_method.process_weights_after_loading(layer)
    q, scales = (np.concatenate([getattr(half, name) for half in halves], 1) for name in ("q", "scales"))
    check(layer, rows(3), Integers(q, scales, None, 128))


def test_torch_compiles_a_layer_without_a_graph_break() -> None:
    weight = integers(K, N, 128, True, torch.float16)
    layer = empty_layer("awq", 128, True)
    load(layer, weight.tensors("awq"))
    layer.bias.data.zero_()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for count in (1, 5, 16):
        check(compiled, rows(count), weight)


def reload(model: Any, layer: Any, weight: Integers) -> None:
    """Reload weights as vLLM's reload_weights() does, and copy the packed weights to their previous memory."""
    layerwise.initialize_layerwise_reload(model)
    fill(layer, weight.tensors("gptq"))
    layerwise.finalize_layerwise_processing(model, None)


def test_weights_reloaded_in_place_keep_their_memory() -> None:
    first, second = (integers(K, N, 128, False, torch.float16, seed=seed) for seed in (1, 2))
    layer = empty_layer("gptq", 128, False, bias=False)
    model = torch.nn.Sequential(layer)
    layerwise.record_metadata_for_reloading(model)
    load(layer, first.tensors("gptq"))
    check(layer, rows(3), first)
    places = [tensor.data_ptr() for tensor in layer.parameters()]
    reload(model, layer, second)
    assert [tensor.data_ptr() for tensor in layer.parameters()] == places
    check(layer, rows(3), second)


def test_reloaded_scales_of_another_range_are_refused() -> None:
    weight = integers(K, N, 128, False, torch.float16)
    larger = Integers(weight.q, (weight.scales * 64).astype(np.float16), None, 128)
    layer = empty_layer("gptq", 128, False, bias=False)
    model = torch.nn.Sequential(layer)
    layerwise.record_metadata_for_reloading(model)
    load(layer, weight.tensors("gptq"))
    with pytest.raises(
        QuantizationError, match=r"^scales must be .*got .* VLLM_DISABLED_KERNELS=CudatmaWNA16LinearKernel"
    ):
        reload(model, layer, larger)


def test_vllm_asks_for_rows_that_do_not_depend_on_their_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = empty_layer("gptq", 128, False)
    assert kernel_of(layer).batch_invariant is False
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert kernel_of(layer).batch_invariant is True
