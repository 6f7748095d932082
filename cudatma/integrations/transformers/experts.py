"""The experts implementation "cudatma" for transformers, which computes packed experts with marlin_moe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from cudatma.integrations.torch import ExpertWeights, marlin_moe
from cudatma.integrations.torch.weights import known_experts
from cudatma.kernels.experts.moe import marlin_moe as marlin_moe_of_arrays


def experts_forward(module: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
    """Compute a module of experts. Modules with float weights use transformers' "grouped_mm".

    Parameters
    ----------
    module : torch.nn.Module
        Module of experts of transformers.
    hidden_states : torch.Tensor, shape (tokens, K)
        Activations.
    top_k_index : torch.Tensor, shape (tokens, top_k)
        Expert of each choice.
    top_k_weights : torch.Tensor, shape (tokens, top_k)
        Weight of each choice.

    Returns
    -------
    torch.Tensor, shape (tokens, K)
        The result.
    """
    first, second = module.gate_up_proj, module.down_proj
    if not isinstance(first, ExpertWeights):
        return ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, hidden_states, top_k_index, top_k_weights)
    return marlin_moe(hidden_states, first, second, top_k_weights.float(), top_k_index)


def replace_experts(module: Any, name: str, facts: dict[str, Any]) -> ExpertWeights:
    """Replace a float weight of a module of experts with ExpertWeights on the meta device.

    ``name`` is gate_up_proj or down_proj. ``facts`` contains group_size and symmetric.
    """
    weight = module._parameters[name]
    experts, *sizes = weight.shape
    weights = ExpertWeights(
        experts,
        *(sizes if module.is_transposed else sizes[::-1]),
        gated=name == "gate_up_proj",
        dtype=weight.dtype,
        device="meta",
        **{fact: value for fact, value in facts.items() if fact != "act_order"},
    )
    del module._parameters[name]
    setattr(module, name, weights)
    # transformers initializes every module without this attribute.
    module._is_hf_initialized = weights._is_hf_initialized = True
    module.config._experts_implementation_internal = "cudatma"
    return weights


def expert_calls(model: Any) -> list[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Return a call of marlin_moe (function, operands) for each kind of packed experts of a model on a GPU.

    The activations are uninitialized.
    """
    kinds: dict[tuple[Any, ...], Any] = {}
    for module in model.modules():
        first, second = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
        top_k = getattr(getattr(module, "config", None), "num_experts_per_tok", None)
        if isinstance(first, ExpertWeights) and first.qweight.is_cuda and type(top_k) is int:
            kinds[repr(first), repr(second), first.qweight.device, top_k] = first, second, top_k
    return [_call_of(*kind) for kind in kinds.values()]


def _call_of(first: ExpertWeights, second: ExpertWeights, top_k: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
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
    return marlin_moe_of_arrays, (x, *packed, choices, choices.long())
