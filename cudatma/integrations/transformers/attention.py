"""The attention "cudatma" of transformers: our kernels for the masks of masks.py, sdpa for the rest."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import cudatma.integrations.torch  # noqa: F401  (defines torch.ops.cudatma)
from cudatma.dtypes import ACTIVATION_TYPES
from cudatma.errors import ArgumentError
from cudatma.integrations.transformers.masks import dense_mask, is_causal, is_decode
from cudatma.kernels.attention.problem import HEAD_DIMS

#: Reasons that were told.
_told: set[str] = set()


def attention_forward(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Any = None,
    **options: Any,
) -> tuple[Any, None]:
    """transformers' interface of attention: q (batch, heads, q_length, dim), k and v (batch, kv_heads, kv_length, dim),
    s_aux (heads,), the attention sinks.

    Returns (batch, q_length, heads, dim) and None. The views of q, k and v are read as they are, except with padding.
    What our kernels do not compute goes to sdpa, or where sdpa would ignore an option to the model's own eager
    function, with one warning for each reason. Raises ArgumentError where the model has no such function.
    """
    wanted = options.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if wanted is None else wanted)
    if attention_mask is not None and attention_mask.dtype == torch.int32:
        causal = is_causal(attention_mask)
    why = _why_not(query, key, value, attention_mask, dropout, options)
    if why:
        call = {"dropout": dropout, "scaling": scaling, "sliding_window": sliding_window, "softcap": softcap, **options}
        call |= {} if s_aux is None else {"s_aux": s_aux}
        return _elsewhere(why, module, query, key, value, attention_mask, causal, call)
    limits = {"scale": scaling, "softcap": softcap or None}
    if s_aux is not None:
        limits["sink"] = s_aux.detach().float()
    if causal and sliding_window is not None:
        limits["left"] = sliding_window - 1
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    ours = torch.ops.cudatma
    if attention_mask is None:
        return ours.attention(q, k, v, causal=causal, **limits), None
    if is_decode(attention_mask):
        return ours.attention_decode(q, k, v, attention_mask.view(-1), **limits), None
    q_offsets, k_offsets = attention_mask.flatten(0, 2).unbind()
    rows = ours.attention_varlen(
        *(tensor.flatten(0, 1) for tensor in (q, k, v)),
        q_offsets,
        k_offsets,
        max_seqlen_q=q.shape[1],
        max_seqlen_k=k.shape[1],
        causal=causal,
        **limits,
    )
    return rows.unflatten(0, q.shape[:2]), None


def _why_not(query: Any, key: Any, value: Any, mask: Any, dropout: float, options: dict[str, Any]) -> str:
    """Why our kernels do not compute this; "" where they do."""
    if mask is not None and mask.dtype != torch.int32:
        return "a mask that is neither causal, sliding nor padding at one end"
    if dropout:
        return "dropout"
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value)):
        return "a backward pass"
    if str(query.dtype).removeprefix("torch.") not in ACTIVATION_TYPES:
        return f"tensors of {query.dtype}"
    if (query.shape[-1], value.shape[-1]) not in HEAD_DIMS:
        return f"a head dimension of {query.shape[-1]}"
    given = [name for name in ("position_bias", "head_mask") if options.get(name) is not None]
    return given[0] if given else ""


def _elsewhere(
    why: str, module: Any, query: Any, key: Any, value: Any, mask: Any, causal: bool, call: dict[str, Any]
) -> tuple[Any, None]:
    """sdpa, or the model's eager attention for softcap and attention sinks, which sdpa ignores."""
    name = "sdpa"
    if call.get("softcap") or call.get("s_aux") is not None:
        name = "eager"
    if not torch.compiler.is_compiling() and why not in _told:
        _told.add(why)
        warnings.warn(f"cudatma attention: {why} goes to {name}", RuntimeWarning, stacklevel=3)
    if mask is None or mask.dtype == torch.int32:
        mask = dense_mask(mask, query, key, causal, call["sliding_window"])
    if name == "sdpa":
        done: tuple[Any, None] = sdpa_attention_forward(module, query, key, value, mask, **call)
        return done
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        raise ArgumentError("attn_implementation", "cudatma", "sdpa, eager", f"{why} with this model needs them")
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill(
            ~mask, torch.finfo(query.dtype).min
        )
    return eager(module, query, key, value, mask, **call)[0], None
