"""vLLM kernel that computes gpt-oss's experts with marlin_moe, and its registration. This module imports vLLM.

Several of vLLM's quantization methods select their kernels in the module oracle/mxfp4.py. install() replaces three
functions only in quantization/mxfp4.py, the module of gpt-oss's method. For layers that marlin_moe does not support,
the replacements call vLLM's functions.
"""

from __future__ import annotations

from typing import Any

from vllm import envs
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.oracle import mxfp4 as oracle
from vllm.model_executor.layers.quantization import mxfp4
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import current_platform

from cudatma.integrations.vllm.experts import LoadedFormat, concatenated_bias, pack_layer, prepare_layer, refusal
from cudatma.integrations.vllm.moe import Backend, CudatmaExperts, is_selected, max_tokens

_LOADED = LoadedFormat("gpt_oss", ("weight", "weight_scale", "weight_zero_point"), 32, False, "mxfp4")

_vllm_select = oracle.select_mxfp4_moe_backend
_vllm_convert = oracle.convert_gpt_oss_weight_to_mxfp4_moe_kernel_format
_vllm_describe = oracle.make_mxfp4_moe_quant_config


class CudatmaMxfp4Experts(CudatmaExperts):
    """Experts of gpt-oss, with MXFP4 weights and 16-bit activations."""

    format = "mxfp4"
    activation_name = "swiglu_oai"

    @staticmethod
    def _supports_current_device() -> bool:
        """Return whether the GPU is a Hopper GPU. On newer GPUs, vLLM's other kernels use fp4 Tensor Cores."""
        capability = current_platform.get_device_capability() if current_platform.is_cuda() else None
        return capability is not None and capability.to_int() == 90

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return bool(activation == MoEActivation.SWIGLUOAI)

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return activation_key is None and bool(weight_key == oracle.kMxfp4Static)


def install() -> None:
    """Make vLLM select CudatmaMxfp4Experts first for gpt-oss. Repeated calls have no effect."""
    replaced = {
        function.__name__: function
        for function in (
            select_mxfp4_moe_backend,
            convert_gpt_oss_weight_to_mxfp4_moe_kernel_format,
            make_mxfp4_moe_quant_config,
        )
    }
    for name in replaced:
        getattr(mxfp4, name)  # An AttributeError means that this version of vLLM is not supported.
    vars(mxfp4).update(replaced)


def select_mxfp4_moe_backend(config: Any, activation_key: Any = None) -> tuple[Any, Any]:
    """Return the backend and the class for a layer, like vLLM's function."""

    def layout_refusal() -> str | None:
        if oracle._resolve_activation_key(activation_key) is not None:
            return "the activations are quantized"
        sizes = config.hidden_dim, config.intermediate_size_per_partition
        sizes = oracle.mxfp4_round_up_hidden_size_and_intermediate_size(Backend.CUDATMA, *sizes)
        return refusal(config, _LOADED, sizes)

    if is_selected(CudatmaMxfp4Experts, config, oracle.kMxfp4Static, layout_refusal, oracle.logger):
        return Backend.CUDATMA, CudatmaMxfp4Experts
    return _vllm_select(config, activation_key)  # type: ignore[no-any-return]


def convert_gpt_oss_weight_to_mxfp4_moe_kernel_format(
    mxfp4_backend: Any, layer: Any, *tensors: Any, **options: Any
) -> Any:
    """Pack a loaded layer in place and return its weights, scales and biases, or call vLLM's function."""
    if mxfp4_backend is not Backend.CUDATMA:
        return _vllm_convert(mxfp4_backend, layer, *tensors, **options)
    pack_layer(layer, _LOADED, replace_parameter)
    prepare_layer(
        layer,
        _LOADED,
        max_tokens(layer.moe_config),
        activation=CudatmaMxfp4Experts.activation_name,
        batch_invariant=bool(envs.VLLM_BATCH_INVARIANT),
        switch=CudatmaMxfp4Experts.__name__,
    )
    names = "w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale"
    biases = [getattr(layer, name, None) for name in ("w13_bias", "w2_bias")]
    first, second = [None if bias is None else bias.data.to(layer.moe_config.in_dtype) for bias in biases]
    first = None if first is None else concatenated_bias(first)
    return *[getattr(layer, name).data for name in names], first, second


def make_mxfp4_moe_quant_config(mxfp4_backend: Any, *rest: Any, **options: Any) -> Any:
    """Return vLLM's configuration of a layer's weights and activations.

    For cudatma's backend, this is the configuration of vLLM's Marlin backend, which has 16-bit activations.
    """
    is_ours = mxfp4_backend is Backend.CUDATMA
    return _vllm_describe(oracle.Mxfp4MoeBackend.MARLIN if is_ours else mxfp4_backend, *rest, **options)
