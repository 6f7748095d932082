"""The experts implementation "cudatma" for transformers, which computes packed experts with marlin_moe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from cudatma.integrations.torch import ExpertWeights, marlin_moe
from cudatma.integrations.torch.weights import known_experts
from cudatma.kernels.experts.moe import marlin_moe as marlin_moe_of_arrays
from cudatma.quantization.conversion.model_class import experts_activation


def experts_forward(module: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
    """Compute a module of experts. Modules with float weights use transformers' "grouped_mm".

    Parameters
    ----------
    module : torch.nn.Module
        The experts module of a transformers model.
    hidden_states : torch.Tensor, shape (tokens, K)
        Activations.
    top_k_index : torch.Tensor, shape (tokens, top_k)
        Indices of the experts selected for each token.
    top_k_weights : torch.Tensor, shape (tokens, top_k)
        Router weights of the experts selected for each token.

    Returns
    -------
    torch.Tensor, shape (tokens, K)
        The result.
    """
    first, second = module.gate_up_proj, module.down_proj
    if not isinstance(first, ExpertWeights):
        return ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, hidden_states, top_k_index, top_k_weights)
    activation = module.cudatma_activation
    return marlin_moe(hidden_states, first, second, top_k_weights.float(), top_k_index, activation=activation)


def replace_experts(module: Any, name: str, facts: dict[str, Any], *, packs_bias: bool = False) -> ExpertWeights:
    """Replace a float weight of a module of experts with ExpertWeights on the meta device.

    ``name`` is gate_up_proj or down_proj. ``facts`` contains group_size and symmetric. If ``packs_bias`` is True, the
    checkpoint stores the biases with the packed weights. Otherwise, take_biases() moves the loaded biases.
    """
    has_bias = packs_bias and module.has_bias
    weight = module._parameters[name]
    experts, *sizes = weight.shape
    weights = ExpertWeights(
        experts,
        *(sizes if module.is_transposed else sizes[::-1]),
        gated=name == "gate_up_proj",
        dtype=weight.dtype,
        device="meta",
        bias=has_bias,
        **{fact: value for fact, value in facts.items() if fact != "act_order"},
    )
    module.cudatma_activation = experts_activation(module)
    del module._parameters[name]
    if has_bias:
        del module._parameters[f"{name}_bias"]
    setattr(module, name, weights)
    # transformers initializes the parameters of every module that lacks this attribute.
    module._is_hf_initialized = weights._is_hf_initialized = True
    module.config._experts_implementation_internal = "cudatma"
    return weights


def take_biases(module: Any) -> None:
    """Move the loaded biases of a module of experts to its ExpertWeights, in the order of the outputs."""
    for name in ("gate_up_proj", "down_proj"):
        weights, bias = getattr(module, name, None), module._parameters.get(f"{name}_bias")
        if isinstance(weights, ExpertWeights) and bias is not None:
            del module._parameters[f"{name}_bias"]
            weights.bias = concatenated(module, name, bias.detach())


def concatenated(module: Any, name: str, columns: Any) -> Any:
    """Separate the outputs of gate and up if they alternate in the last dimension of a weight or bias."""
    if name != "gate_up_proj" or module.is_concatenated:
        return columns
    return torch.cat([columns[..., ::2], columns[..., 1::2]], dim=-1)


def expert_calls(model: Any) -> list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]:
    """Return a call (marlin_moe, operands, options) for each kind of packed experts in a model on a GPU.

    The activations are uninitialized.
    """
    kinds: dict[tuple[Any, ...], Any] = {}
    for module in model.modules():
        first, second = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
        top_k = getattr(getattr(module, "config", None), "num_experts_per_tok", None)
        if isinstance(first, ExpertWeights) and first.qweight.is_cuda and type(top_k) is int:
            activation = module.cudatma_activation
            kinds[repr(first), repr(second), first.qweight.device, top_k, activation] = first, second, top_k, activation
    return [_call_of(*kind) for kind in kinds.values()]


def _call_of(
    first: ExpertWeights, second: ExpertWeights, top_k: int, activation: str
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    packed = known_experts(
        (first.qweight, first.scales, first.zeros),
        (second.qweight, second.scales, second.zeros),
        first.experts,
        first.in_features,
        second.in_features,
        (first.group_size, second.group_size),
        first.format,
        (first.tensor_scale, second.tensor_scale),
    )
    device = first.qweight.device
    x = torch.empty(2, first.in_features, dtype=first.dtype, device=device)
    choices = torch.empty(2, top_k, device=device)
    options = {"bias1": first.bias, "bias2": second.bias, "activation": activation}
    return marlin_moe_of_arrays, (x, *packed, choices, choices.long()), options
