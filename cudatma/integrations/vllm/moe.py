"""vLLM kernels that compute int4 and int8 experts with marlin_moe, and their registration. This module imports vLLM.

vLLM selects a kernel in its module oracle/int_wna16.py, which has no list of kernels to extend. install() therefore
replaces three functions of this module. For layers that marlin_moe does not support, they call vLLM's functions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import Enum
from typing import Any

import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm import envs
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
from vllm.model_executor.layers.fused_moe.oracle import int_wna16
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.utils import replace_parameter

from cudatma.integrations.vllm.experts import LoadedFormat, PackedExpertsLayer, pack_layer, prepare_layer, refusal
from cudatma.integrations.vllm.kernel import unfit_platform

_vllm_select = int_wna16.select_wna16_moe_backend
_vllm_convert = int_wna16.convert_to_wna16_moe_kernel_format
_vllm_make = int_wna16.make_wna16_moe_kernel


class Backend(Enum):
    """A backend in addition to vLLM's WNA16MoEBackend."""

    CUDATMA = "CUDATMA"


class CudatmaExperts(PackedExpertsLayer, mk.FusedMoEExpertsModular):  # type: ignore[misc]  # not typed here
    """Experts for vLLM. vLLM creates one object for each layer.

    VLLM_DISABLED_KERNELS disables a subclass by name. ``--moe-backend`` with another kernel disables all subclasses.
    """

    @staticmethod
    def activation_format() -> Any:
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        return unfit_platform() is None

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        """Return whether vLLM passes tokens as rows with expert ids, which the kernel maps to local experts."""
        p = moe_parallel_config
        if p.enable_eplb or getattr(p, "use_passthrough_all2all", False):
            return False
        return not p.use_all2all_kernels or p.use_ag_rs_all2all_kernels or p.use_deepep_ht_kernels

    @staticmethod
    def _supports_batch_invariance() -> bool:
        return True

    @property
    def batch_invariant(self) -> bool:
        """Whether the result of a token must be independent of its batch (VLLM_BATCH_INVARIANT)."""
        return bool(envs.VLLM_BATCH_INVARIANT)

    def finalize_weight_and_reduce_impl(self) -> Any:
        """Return the implementation for kernels that apply the router weights and add the experts' results."""
        return TopKWeightAndReduceNoOP()

    def moe_problem_size(self, a1: Any, w1: Any, w2: Any, topk_ids: Any) -> tuple[int, int, int, int, int]:
        """Return the number of local experts, tokens, columns of w1, columns of a1, and experts per token."""
        return len(w1), len(a1), 2 * self.moe_config.intermediate_size_per_partition, a1.shape[1], topk_ids.shape[1]

    def workspace_shapes(self, M: int, N: int, K: int, *_: Any, **__: Any) -> tuple[tuple[int, ...], ...]:  # noqa: N803
        """Return the shapes of two workspaces, which cudatma allocates itself, and of the result."""
        return (0,), (0,), (M, K)

    def apply(
        self,
        output: Any,
        hidden_states: Any,
        w1: Any,
        w2: Any,
        topk_weights: Any,
        topk_ids: Any,
        *,
        expert_map: Any,
        apply_router_weight_on_input: bool,
        **_: Any,
    ) -> None:
        self.run(output, hidden_states, w1, w2, topk_weights, topk_ids, expert_map, apply_router_weight_on_input)


class CudatmaW4A16Experts(CudatmaExperts):
    """Experts with int4 or int8 weights."""

    @property
    def format(self) -> str:
        """Format of the weights."""
        return "int8" if self.quant_config.use_int8_w8a16 else "int4"

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return bool(activation == MoEActivation.SILU)

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        types = "uint4", "uint4b8", "uint8b128"
        return activation_key is None and str(weight_key.dtype) in types and weight_key.scale2 is None


def install() -> None:
    """Make vLLM select CudatmaW4A16Experts first. Repeated calls have no effect."""
    for name, function in (
        ("select_wna16_moe_backend", select),
        ("convert_to_wna16_moe_kernel_format", convert),
        ("make_wna16_moe_kernel", make),
    ):
        original = getattr(int_wna16, name)
        if original is function:
            continue
        # Modules that were imported earlier hold their own references.
        for module_name, module in list(sys.modules.items()):
            if module_name.startswith("vllm.") and vars(module).get(name) is original:
                setattr(module, name, function)


def select(config: Any, weight_key: Any, *rest: Any, **options: Any) -> tuple[Any, Any]:
    """Return the backend and the class for a layer, as vLLM's select_wna16_moe_backend() does."""

    def layout_refusal() -> str | None:
        quant_config = rest[0] if rest else options.get("quant_config")
        if quant_config is None:  # vLLM before 0.33 does not pass quant_config.
            vllm_config = get_current_vllm_config_or_none()
            quant_config = None if vllm_config is None else vllm_config.quant_config
        loaded = _loaded_format(quant_config, config)
        return loaded if isinstance(loaded, str) else refusal(config, loaded)

    if is_selected(CudatmaW4A16Experts, config, weight_key, layout_refusal, int_wna16.logger):
        return Backend.CUDATMA, CudatmaW4A16Experts
    return _vllm_select(config, weight_key, *rest, **options)  # type: ignore[no-any-return]


def is_selected(
    experts: type[CudatmaExperts], config: Any, weight_key: Any, layout_refusal: Callable[[], str | None], log: Any
) -> bool:
    """Return whether vLLM must use a class for a layer, and log the decision.

    ``layout_refusal`` returns the reason why the class does not support the loaded weights, or None if it does.
    """
    if config.moe_backend != "auto" or experts.__name__ in envs.VLLM_DISABLED_KERNELS:
        return False
    try:
        reason = _refusal(experts, config, weight_key) or layout_refusal()
    except (ImportError, AttributeError) as error:
        reason = f"this version of vLLM is not supported: {type(error).__name__}: {error}"
    name = f"MoE backend '{Backend.CUDATMA.value}' ({experts.__name__.removeprefix('Cudatma')})"
    line = f"Using {name}." if reason is None else f"{name} does not support the layer because {reason}."
    log.info_once(line, scope="local")
    return reason is None


def convert(backend: Any, layer: Any, quant_config: Any, *rest: Any, **options: Any) -> Any:
    """Pack a loaded layer in place and return None, or call vLLM's convert_to_wna16_moe_kernel_format()."""
    if backend is not Backend.CUDATMA:
        return _vllm_convert(backend, layer, quant_config, *rest, **options)
    loaded: Any = _loaded_format(quant_config, layer.moe_config)  # select() has accepted the format.
    pack_layer(layer, loaded, replace_parameter)
    prepare_layer(layer, loaded, max_tokens(layer.moe_config), batch_invariant=bool(envs.VLLM_BATCH_INVARIANT))
    return None


def make(moe_quant_config: Any, moe_config: Any, experts_cls: Any, *rest: Any, **options: Any) -> Any:
    """Return vLLM's kernel object for a layer, as vLLM's make_wna16_moe_kernel() does."""
    if experts_cls is not CudatmaW4A16Experts:
        return _vllm_make(moe_quant_config, moe_config, experts_cls, *rest, **options)
    prepare_finalize = maybe_make_prepare_finalize(
        moe=moe_config,
        quant_config=moe_quant_config,
        routing_tables=options.get("routing_tables"),
        allow_new_interface=True,
        use_monolithic=False,
    )
    return mk.FusedMoEKernel(prepare_finalize, CudatmaW4A16Experts(moe_config, moe_quant_config))


def _refusal(experts: type[CudatmaExperts], config: Any, weight_key: Any) -> str | None:
    """Return the reason why a class does not support a layer, or None if it does."""
    is_batched = config.moe_parallel_config.use_batched_activation_format
    form = mk.FusedMoEActivationFormat.BatchedExperts if is_batched else mk.FusedMoEActivationFormat.Standard
    is_supported, reason = experts.is_supported_config(experts, config, weight_key, None, form)
    return None if is_supported else str(reason)


def _loaded_format(quant_config: Any, config: Any) -> LoadedFormat | str:
    """Return how vLLM loads the experts of a checkpoint, or the reason why this format is not supported."""
    from compressed_tensors.quantization import QuantizationArgs
    from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig
    from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig
    from vllm.model_executor.layers.quantization.moe_wna16 import MoeWNA16Config

    names = "qweight", "scales", "qzeros"
    if isinstance(quant_config, AutoGPTQConfig):
        if quant_config.desc_act:
            return "the weights are in activation order"
        if not quant_config.is_sym:
            return "GPTQ weights with zero points are not supported"
        return LoadedFormat("gptq", names, quant_config.group_size, False, _integers(quant_config.weight_bits))
    if isinstance(quant_config, AutoAWQConfig):
        if not quant_config.zero_point:
            return "AWQ weights without zero points are not supported"
        return LoadedFormat("awq", names, quant_config.group_size, True)
    if isinstance(quant_config, MoeWNA16Config):
        size = quant_config.group_size
        while size > 1 and (config.hidden_dim % size or config.intermediate_size_per_partition % size):
            size //= 2  # vLLM splits groups in this way and repeats their scales.
        if quant_config.has_zp and quant_config.weight_bits == 8:
            return _NO_ZEROS
        return LoadedFormat("n_major", names, size, quant_config.has_zp, _integers(quant_config.weight_bits))
    if isinstance(quant_config, QuantizationArgs):
        if quant_config.actorder == "group":
            return "the weights are in activation order"
        if quant_config.strategy != "group":  # vLLM accepts whole columns only for its Marlin kernel.
            return f"the strategy of the scales must be group, got {quant_config.strategy}"
        if quant_config.num_bits == 8 and not quant_config.symmetric:
            return _NO_ZEROS
        names, format = ("weight_packed", "weight_scale", "weight_zero_point"), _integers(quant_config.num_bits)
        return LoadedFormat("n_major", names, quant_config.group_size, not quant_config.symmetric, format)
    return f"checkpoints with {type(quant_config).__name__} are not supported"


_NO_ZEROS = "8-bit weights with zero points are not supported"


def _integers(bits: int) -> str:
    return "int8" if bits == 8 else "int4"


def max_tokens(config: Any) -> int | None:
    """Return the maximum number of tokens in a batch, summed over all ranks that send tokens to this rank."""
    vllm_config = get_current_vllm_config_or_none()
    if vllm_config is None:
        return None
    return int(vllm_config.scheduler_config.max_num_batched_tokens) * int(config.moe_parallel_config.dp_size)
