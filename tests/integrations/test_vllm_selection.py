"""vLLM's selection of a kernel on fake GPUs, with our plugin loaded through its entry point.

vllm_layers.pretended_gpu() fakes only the platform and its compute capability, so vLLM's kernels answer as on such a
GPU.
"""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

import vllm.envs
import vllm.plugins
import vllm_layers
from vllm.model_executor.kernels import linear
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.platforms import PlatformEnum
from vllm.scalar_type import scalar_types

from cudatma.errors import ArgumentError
from cudatma.integrations.vllm import register
from cudatma.integrations.vllm.kernel import CudatmaWNA16LinearKernel

OURS = "CudatmaWNA16LinearKernel"


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return vLLM's list of kernels for CUDA devices, without the changes of the plugin."""
    own = [kernel for kernel in linear._POSSIBLE_KERNELS[PlatformEnum.CUDA] if kernel is not CudatmaWNA16LinearKernel]
    monkeypatch.setitem(linear._POSSIBLE_KERNELS, PlatformEnum.CUDA, own)
    monkeypatch.setattr(vllm.envs, "environment_variables", dict(vllm.envs.environment_variables))
    vllm.envs.environment_variables.pop("CUDATMA_VLLM", None)
    monkeypatch.setattr(vllm.plugins, "plugins_loaded", False)
    return own


def config(**changes: Any) -> Any:
    facts: dict[str, Any] = {
        "full_weight_shape": (4096, 4096),
        "partition_weight_shape": (4096, 4096),
        "weight_type": scalar_types.uint4b8,
        "act_type": torch.bfloat16,
        "group_size": 128,
        "zero_points": False,
    }
    return linear.MPLinearLayerConfig(**(facts | changes))


def chosen(capability: int = 90, **changes: Any) -> str:
    with vllm_layers.pretended_gpu(*divmod(capability, 10)):
        name: str = linear.choose_mp_linear_kernel(config(**changes)).__name__
    return name


def test_the_entry_point_puts_our_kernel_first_once(kernels: list[Any]) -> None:
    before = list(kernels)
    vllm.plugins.load_general_plugins()
    assert kernels == [CudatmaWNA16LinearKernel, *before]
    register()
    assert kernels == [CudatmaWNA16LinearKernel, *before]


def test_vllm_asks_our_kernel_first_where_it_prefers_humming(kernels: list[Any]) -> None:
    vllm.plugins.load_general_plugins()
    assert linear.prefers_humming(90)
    assert linear.prioritize_humming(kernels, 90)[0] is CudatmaWNA16LinearKernel


@pytest.mark.parametrize("capability", [90, 120, 121])
@pytest.mark.parametrize("act_type", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [32, 64, 128, -1])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_vllm_takes_our_kernel(capability: int, act_type: Any, size: int, asymmetric: bool) -> None:
    vllm.plugins.load_general_plugins()
    weight_type = scalar_types.uint4 if asymmetric else scalar_types.uint4b8
    facts = {"act_type": act_type, "group_size": size, "zero_points": asymmetric, "weight_type": weight_type}
    assert chosen(capability, **facts) == OURS


@pytest.mark.parametrize("capability", [90, 120])
@pytest.mark.parametrize("form", ["gptq", "awq", "compressed-tensors"])
def test_vllm_makes_layers_of_checkpoints_with_our_kernel(form: str, capability: int) -> None:
    vllm.plugins.load_general_plugins()
    vllm_layers.join_one_rank()
    quant_config = vllm_layers.quant_config(form, 128, form == "awq")
    with vllm_layers.configured(), vllm_layers.pretended_gpu(*divmod(capability, 10)):
        layer = ReplicatedLinear(256, 256, quant_config=quant_config, params_dtype=torch.float16, prefix="up_proj")
    assert type(vllm_layers.kernel_of(layer)).__name__ == OURS


REFUSED = {
    "8-bit weights with zero points": {"weight_type": scalar_types.uint8, "zero_points": True},
    "half a word of 8-bit weights": {
        "weight_type": scalar_types.uint8b128,
        "full_weight_shape": (6, 64),
        "partition_weight_shape": (6, 64),
        "group_size": -1,
    },
    "no zero points": {"weight_type": scalar_types.uint4},
    "zero points and a bias": {"zero_points": True},
    "group of 256": {"group_size": 256},
    "8-bit activations": {"act_type": torch.float8_e4m3fn},
    "float32": {"act_type": torch.float32},
    "another result": {"out_type": torch.float32},
    "half a group": {"full_weight_shape": (4160, 64), "partition_weight_shape": (2080, 64)},
    "half a word": {"full_weight_shape": (12, 64), "partition_weight_shape": (12, 64), "group_size": -1},
}


@pytest.mark.parametrize("changes", REFUSED.values(), ids=REFUSED)
def test_what_our_kernel_cannot_compute_is_refused_with_a_reason(changes: dict[str, Any]) -> None:
    with vllm_layers.pretended_gpu(9):
        able, reason = CudatmaWNA16LinearKernel.can_implement(config(**changes))
    assert not able
    assert reason


def test_a_weight_in_activation_order_is_refused_as_earlier_versions_of_vllm_describe_it() -> None:
    described = config()
    described.has_g_idx = True
    with vllm_layers.pretended_gpu(9):
        assert CudatmaWNA16LinearKernel.can_implement(described) == (False, "the weight is in activation order")


def test_vllm_takes_its_next_kernel_where_ours_refuses() -> None:
    without = chosen(group_size=256)
    vllm.plugins.load_general_plugins()
    assert chosen(group_size=256) == without != OURS


@pytest.mark.parametrize("capability", [75, 80, 89, 100, 103, 110])
def test_vllm_takes_its_own_kernels_on_other_gpus(capability: int) -> None:
    without = chosen(capability)
    vllm.plugins.load_general_plugins()
    assert chosen(capability) == without != OURS


def test_the_switch_leaves_vllm_as_it_is(kernels: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    before = list(kernels)
    monkeypatch.setenv("CUDATMA_VLLM", "0")
    vllm.plugins.load_general_plugins()
    assert kernels == before
    monkeypatch.setenv("CUDATMA_VLLM", "off")
    with pytest.raises(ArgumentError, match=r"CUDATMA_VLLM must be 0 or 1.*got off"):
        register()


def test_vllm_disables_our_kernel_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    without = chosen()
    vllm.plugins.load_general_plugins()
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", f"{OURS},SomeOther")
    assert chosen() == without != OURS


def test_a_backend_that_the_user_asks_vllm_for_is_taken() -> None:
    vllm.plugins.load_general_plugins()
    with vllm_layers.configured() as vllm_config:
        vllm_config.kernel_config.linear_backend = "marlin"
        assert chosen() == "MarlinLinearKernel"


def test_without_cupy_vllm_keeps_its_kernels(
    kernels: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = list(kernels)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "cupy" else found(name, *rest))
    vllm.plugins.load_general_plugins()
    assert kernels == before
    assert "CuPy is not installed; run pip install" in caplog.text


def test_models_that_vllm_compiled_for_its_own_kernels_are_not_loaded_with_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM looks up compiled models on disk by a digest of these values and the model's configuration."""
    own = vllm.envs.compile_factors()
    monkeypatch.setenv("CUDATMA_VLLM", "0")
    register()
    assert vllm.envs.compile_factors() == own
    monkeypatch.delenv("CUDATMA_VLLM")
    register()
    with_ours = vllm.envs.compile_factors()
    assert with_ours != own
    register()
    assert vllm.envs.compile_factors() == with_ours


def test_a_vllm_without_such_a_list_keeps_its_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(linear, "_POSSIBLE_KERNELS")
    with caplog.at_level(logging.WARNING):
        register()
    assert "this version of vLLM is not supported: AttributeError" in caplog.text


def test_vllm_itself_refuses_activation_order() -> None:
    said = {"bits": 4, "group_size": 128, "desc_act": True, "sym": True}
    with pytest.raises(ValueError, match="desc_act=True"):
        vllm_layers.AutoGPTQConfig.from_config(said)
