"""vLLM's layers of experts with our kernel, from loaded tensors to results, on the CPU with the reference backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

import vllm.model_executor.layers.quantization.auto_gptq as auto_gptq
import vllm_layers
from vllm.model_executor.layers.fused_moe.oracle import int_wna16
from vllm.model_executor.model_loader.reload import layerwise
from vllm.v1.worker.workspace import init_workspace_manager
from vllm_layers import EXPERTS, HIDDEN, Experts, apply, batch

from cudatma.integrations.vllm import moe, register
from cudatma.integrations.vllm.moe import CudatmaWNA16Experts

INTERMEDIATE = 192
CASES = [
    ("gptq", 32, False),
    ("gptq", 64, False),
    ("gptq", -1, False),
    ("awq", 64, True),
    ("compressed-tensors", 32, False),
    ("compressed-tensors", 64, True),
    ("moe_wna16", 64, True),
    ("moe_wna16", 32, False),
]


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("CUDATMA_BACKEND", "reference")
    register()
    vllm_layers.join_one_rank()
    init_workspace_manager(torch.device("cpu"))
    with vllm_layers.configured(), vllm_layers.pretended_gpu(9):
        yield


def empty_layer(form: str, size: int, asymmetric: bool, dtype: Any = torch.float16, **options: Any) -> Any:
    """Return vLLM's module with the parameters of the experts, which has loaded nothing."""
    facts: dict[str, Any] = {"intermediate_size": INTERMEDIATE}
    return vllm_layers.experts_layer(form, size, asymmetric, dtype, **(facts | options))


def check(layer: Any, experts: Experts, dtype: Any) -> None:
    x, factors, ids = batch(dtype)
    y = apply(layer, x, factors, ids)
    assert y.dtype == dtype
    expected = experts.result(x, factors, ids)
    assert np.abs(y.double().numpy() - expected).max() < 2e-2 * np.abs(expected).max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("form", "size", "asymmetric"), CASES)
def test_a_layer_computes_the_results_of_its_checkpoint(form: str, size: int, asymmetric: bool, dtype: Any) -> None:
    layer = empty_layer(form, size, asymmetric, dtype)
    assert layer.quant_method.experts_cls is CudatmaWNA16Experts
    experts = Experts(INTERMEDIATE, size, asymmetric, dtype)
    experts.fill(layer, form, asymmetric)
    layer.quant_method.process_weights_after_loading(layer)
    assert type(layer.quant_method.moe_kernel.fused_experts) is CudatmaWNA16Experts
    check(layer, experts, dtype)


@pytest.mark.parametrize(("form", "size"), [("gptq", 64), ("gptq", -1), ("compressed-tensors", 32)])
def test_a_layer_of_int8(form: str, size: int) -> None:
    layer = empty_layer(form, size, False, bits=8)
    assert layer.quant_method.experts_cls is CudatmaWNA16Experts
    experts = Experts(INTERMEDIATE, size, False, torch.float16, bits=8)
    experts.fill(layer, form, False)
    layer.quant_method.process_weights_after_loading(layer)
    check(layer, experts, torch.float16)


def loaded_layer(**options: Any) -> tuple[Any, Experts]:
    layer, experts = empty_layer("gptq", 64, False, **options), Experts(INTERMEDIATE, 64, False, torch.float16)
    experts.fill(layer, "gptq", False)
    layer.quant_method.process_weights_after_loading(layer)
    return layer, experts


def test_weights_that_vllm_applied_to_the_input_are_not_applied_again() -> None:
    layer, experts = loaded_layer(top_k=1, apply_router_weight_on_input=True)
    x, factors, ids = batch(torch.float16, top_k=1)
    expected = experts.result(x * factors.half(), torch.ones_like(factors), ids)
    y = apply(layer, x, factors, ids).double().numpy()
    assert np.abs(y - expected).max() < 2e-2 * np.abs(expected).max()


def test_choices_of_other_ranks_are_skipped() -> None:
    layer, experts = loaded_layer()
    x, factors, ids = batch(torch.float16)
    layer._expert_map = torch.tensor([-1, 0, 1, -1, 2], dtype=torch.int32)
    local = {1: 0, 2: 1, 4: 2}
    experts.weights = [experts.weights[local.get(expert, 0)] for expert in range(EXPERTS)]
    is_local = torch.isin(ids, torch.tensor(list(local), dtype=torch.int32))
    expected = experts.result(x, factors * is_local, ids)
    y = apply(layer, x, factors, ids).double().numpy()
    assert np.abs(y - expected).max() < 2e-2 * np.abs(expected).max()


def test_a_layer_holds_the_packed_weights_and_nothing_else() -> None:
    layer, _ = loaded_layer()
    held = {tensor.data_ptr(): tensor.nbytes for tensor in layer.parameters()}
    values = EXPERTS * HIDDEN * 3 * INTERMEDIATE
    assert sum(held.values()) == values // 2 + values // 64 * 2


def test_weights_reloaded_in_place_keep_their_memory() -> None:
    layer, first, second = (
        empty_layer("gptq", 64, False),
        *(Experts(INTERMEDIATE, 64, False, torch.float16, seed=s) for s in (1, 2)),
    )
    model = torch.nn.Sequential(layer)
    layerwise.record_metadata_for_reloading(model)
    first.fill(layer, "gptq", False)
    layer.quant_method.process_weights_after_loading(layer)
    check(layer, first, torch.float16)
    places = {name: tensor.data_ptr() for name, tensor in layer.named_parameters()}
    layerwise.initialize_layerwise_reload(model)
    second.fill(layer, "gptq", False)
    layerwise.finalize_layerwise_processing(model, None)
    assert {name: tensor.data_ptr() for name, tensor in layer.named_parameters()} == places
    check(layer, second, torch.float16)


REFUSED = {
    "whole columns of compressed-tensors": ({"form": "compressed-tensors", "size": -1}, "must be group, got channel"),
    "gelu": ({"activation": "gelu"}, "activation"),
    "sizes": ({"form": "compressed-tensors", "size": 16}, "the group size must be 32, 64, 128 or -1"),
    "limit": ({"swiglu_limit": 7.0}, "limit"),
}


@pytest.mark.parametrize(("changes", "reason"), REFUSED.values(), ids=REFUSED)
def test_vllm_uses_its_own_kernel_for_other_layers(
    changes: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(int_wna16.logger, "info_once", lambda line, *_, **__: lines.append(line))
    facts = {"form": "gptq", "size": 64, "asymmetric": False} | changes
    layer = empty_layer(**facts)
    assert layer.quant_method.experts_cls is not CudatmaWNA16Experts
    assert "'CUDATMA' (WNA16Experts) does not support the layer because" in lines[0]
    assert reason in lines[0]


def test_a_disabled_kernel_and_a_named_backend_are_left_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    assert empty_layer("gptq", 64, False).quant_method.experts_cls is CudatmaWNA16Experts
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", "CudatmaWNA16Experts")
    own = empty_layer("gptq", 64, False).quant_method.experts_cls
    assert own is not CudatmaWNA16Experts
    monkeypatch.delenv("VLLM_DISABLED_KERNELS")
    with vllm_layers.configured() as vllm_config:
        vllm_config.kernel_config.moe_backend = "marlin"
        layer = empty_layer("gptq", 64, False)
    assert layer.quant_method.experts_cls.__name__ == "MarlinExperts"


@pytest.mark.parametrize("capability", [80, 89, 100])
def test_vllm_uses_its_own_kernel_on_other_gpus(capability: int) -> None:
    with vllm_layers.pretended_gpu(*divmod(capability, 10)):
        layer = empty_layer("gptq", 64, False)
    assert layer.quant_method.experts_cls is not CudatmaWNA16Experts


def test_registration_is_idempotent_and_reaches_modules_that_were_imported_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (int_wna16, auto_gptq):
        monkeypatch.setattr(module, "select_wna16_moe_backend", moe._vllm_select)
    for _ in range(2):
        register()
        assert int_wna16.select_wna16_moe_backend is auto_gptq.select_wna16_moe_backend is moe.select


def test_biases_of_the_checkpoint_are_added() -> None:
    layer, experts = empty_layer("gptq", 64, False), Experts(INTERMEDIATE, 64, False, torch.float16)
    experts.fill(layer, "gptq", False)
    rng = np.random.default_rng(1)
    sizes = {"w1": INTERMEDIATE, "w3": INTERMEDIATE, "w2": HIDDEN}
    experts.biases = [{shard: rng.standard_normal(n) / 4 for shard, n in sizes.items()} for _ in range(EXPERTS)]
    for expert, biases in enumerate(experts.biases):
        for shard, bias in biases.items():
            name = "w2_bias" if shard == "w2" else "w13_bias"
            parameter = getattr(layer, name)
            parameter.weight_loader(parameter, torch.from_numpy(bias).half(), f"experts.{name}", shard, expert)
    layer.quant_method.process_weights_after_loading(layer)
    check(layer, experts, torch.float16)


def test_vllm_asks_for_results_that_do_not_depend_on_their_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    layer, experts = loaded_layer()
    assert layer.quant_method.moe_kernel.fused_experts.batch_invariant is True
    check(layer, experts, torch.float16)
