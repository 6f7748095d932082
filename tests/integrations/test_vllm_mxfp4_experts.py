"""gpt-oss's experts in vLLM with our kernel, from loaded tensors to results, on the CPU with the reference backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

import vllm_layers
from vllm.model_executor.layers.fused_moe.oracle import mxfp4 as oracle
from vllm.model_executor.layers.quantization import mxfp4
from vllm.model_executor.layers.quantization.utils.quant_utils import kMxfp8Dynamic
from vllm.model_executor.model_loader.reload import layerwise
from vllm.v1.worker.workspace import init_workspace_manager
from vllm_layers import EXPERTS, HIDDEN, GptOssExperts, apply, batch

from cudatma.errors import QuantizationError
from cudatma.integrations.vllm import moe_mxfp4, register
from cudatma.integrations.vllm.moe_mxfp4 import CudatmaMxfp4Experts

#: vLLM rounds this size up to 128.
INTERMEDIATE = 96


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("CUDATMA_BACKEND", "reference")
    monkeypatch.setattr(oracle, "_user_moe_activation_override", lambda: None)
    register()
    vllm_layers.join_one_rank()
    init_workspace_manager(torch.device("cpu"))
    with vllm_layers.configured(), vllm_layers.pretended_gpu(9):
        yield


def empty_layer(**changes: Any) -> Any:
    """Return vLLM's module with the parameters of the experts, which has loaded nothing."""
    return vllm_layers.gpt_oss_layer(**({"intermediate_size": INTERMEDIATE} | changes))


def check(layer: Any, experts: GptOssExperts) -> None:
    x, factors, ids = batch(torch.bfloat16)
    y = apply(layer, x, factors, ids)
    expected = experts.result(x, factors, ids)
    assert np.abs(y.double().numpy() - expected).max() < 2e-2 * np.abs(expected).max()


def loaded_layer() -> tuple[Any, GptOssExperts]:
    layer, experts = empty_layer(), GptOssExperts(INTERMEDIATE)
    experts.fill(layer)
    layer.quant_method.process_weights_after_loading(layer)
    return layer, experts


def test_a_layer_computes_the_results_of_its_checkpoint() -> None:
    layer, experts = loaded_layer()
    assert type(layer.quant_method.moe_kernel.fused_experts) is CudatmaMxfp4Experts
    assert layer.moe_config.hidden_dim == HIDDEN
    assert layer.moe_config.intermediate_size_per_partition == 128
    check(layer, experts)


def test_a_layer_holds_the_packed_weights_and_nothing_else() -> None:
    layer, _ = loaded_layer()
    values = EXPERTS * HIDDEN * 3 * 128
    biases = EXPERTS * (2 * 128 + HIDDEN) * 2
    assert sum(tensor.nbytes for tensor in layer.parameters()) == values // 2 + values // 32 * 2 + biases


def test_choices_of_other_ranks_are_skipped() -> None:
    layer, experts = loaded_layer()
    x, factors, ids = batch(torch.bfloat16)
    layer._expert_map = torch.tensor([0, -1, 2, -1, 4], dtype=torch.int32)
    expected = experts.result(x, factors * (ids % 2 == 0), ids)
    y = apply(layer, x, factors, ids).double().numpy()
    assert np.abs(y - expected).max() < 2e-2 * np.abs(expected).max()


def test_weights_reloaded_in_place_keep_their_memory_and_their_range() -> None:
    layer = empty_layer(intermediate_size=128)  # vLLM does not initialize the padding of reloaded weights.
    model = torch.nn.Sequential(layer)
    layerwise.record_metadata_for_reloading(model)
    GptOssExperts(128).fill(layer)
    layer.quant_method.process_weights_after_loading(layer)
    places = {name: tensor.data_ptr() for name, tensor in layer.named_parameters()}
    layerwise.initialize_layerwise_reload(model)
    second = GptOssExperts(128, seed=1)
    second.fill(layer)
    layerwise.finalize_layerwise_processing(model, None)
    assert {name: tensor.data_ptr() for name, tensor in layer.named_parameters()} == places
    check(layer, second)
    GptOssExperts(INTERMEDIATE, exponent=130).fill(other := empty_layer())
    other.cudatma_scale_fits = layer.cudatma_scale_fits
    message = r"^w13_weight_scale must be .* before the reload.*VLLM_DISABLED_KERNELS=CudatmaMxfp4Experts"
    with pytest.raises(QuantizationError, match=message):
        other.quant_method.process_weights_after_loading(other)


REFUSED = {
    "silu": ({"activation": "silu"}, "activation"),
    "half a group": ({"hidden_size": 272}, "the hidden size must be a multiple of 32"),
}


@pytest.mark.parametrize(("changes", "reason"), REFUSED.values(), ids=REFUSED)
def test_vllm_uses_its_own_kernel_for_other_layers(
    changes: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(oracle.logger, "info_once", lambda line, *_, **__: lines.append(line))
    assert empty_layer(**changes).quant_method.experts_cls is not CudatmaMxfp4Experts
    assert "'CUDATMA' (Mxfp4Experts) does not support the layer because" in lines[0]
    assert reason in lines[0]


def test_quantized_activations_are_left_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, "_user_moe_activation_override", lambda: kMxfp8Dynamic)
    assert empty_layer().quant_method.experts_cls is not CudatmaMxfp4Experts


def test_a_changed_vllm_uses_its_own_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(oracle, "mxfp4_round_up_hidden_size_and_intermediate_size")
    assert moe_mxfp4.select_mxfp4_moe_backend is mxfp4.select_mxfp4_moe_backend
    assert empty_layer().quant_method.experts_cls is not CudatmaMxfp4Experts


def test_a_disabled_kernel_and_a_named_backend_are_left_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("VLLM_DISABLED_KERNELS", "CudatmaMxfp4Experts")
        assert empty_layer().quant_method.experts_cls is not CudatmaMxfp4Experts
    with vllm_layers.configured() as vllm_config:
        vllm_config.kernel_config.moe_backend = "marlin"
        assert empty_layer().quant_method.experts_cls.__name__ == "MarlinExperts"


@pytest.mark.parametrize("capability", [80, 100, 120])
def test_vllm_uses_its_own_kernel_on_other_gpus(capability: int) -> None:
    with vllm_layers.pretended_gpu(*divmod(capability, 10)):
        assert empty_layer().quant_method.experts_cls is not CudatmaMxfp4Experts
