"""The attention implementation "cudatma" for transformers.

cudatma's own kernels compute attention for the masks that they support. For all other masks, sdpa computes attention.

transformers calls attention_mask() once per forward pass, with the pattern and the padding, and passes the result to
attention_forward() in each layer. transformers does not modify four-dimensional masks, so attention_mask() can return
int32 encodings. The result of attention_mask() is one of these values:

- None, for attention(): causal, sliding or full attention, depending on the layer. The last query of each sequence is
  aligned with the last key.
- int32 (1, 1, 1, batch), for attention_decode(): each sequence has one query. Each element is the number of keys that
  the query attends to.
- int32 (1, 1, 2, 3 batch + 1), for attention_varlen(): the query offsets and the key offsets. Each row
  of the batch becomes three sequences: the padding before the valid tokens, the valid tokens, and the padding after
  them.
- int32 (1, 2, 1, 3 batch + 1), for attention_varlen() with full attention: the same offsets.
- bool (batch, 1, q_length, kv_length), for sdpa: any other pattern.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

import cudatma.integrations.torch  # noqa: F401  (defines torch.ops.cudatma)
from cudatma.dtypes import ACTIVATION_TYPES
from cudatma.errors import ArgumentError
from cudatma.kernels.attention.attention import attention, attention_varlen
from cudatma.kernels.attention.decode import attention_decode
from cudatma.kernels.attention.problem import HEAD_DIMS


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Any = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: Any = "cpu",
    **options: Any,
) -> Any:
    """Return a mask for attention_forward(). The parameters are those of transformers' mask interface.

    ``attention_mask`` is a bool tensor (batch, tokens) that is False for padding. The result is a mask for sdpa if
    there is padding between valid tokens, or if the padding cannot be read because torch.compile is tracing or a CUDA
    graph is being captured.
    """
    first = q_offset - kv_offset  # Position of the first query among the keys.
    causal = _causality(mask_function, local_size, allow_is_causal_skip, options.get("config"))
    if causal is not None:
        end = first + q_length if causal else kv_length
        if attention_mask is None:
            return _without_padding(causal, batch_size, q_length, kv_length, end, device)
        if not _is_tracing(device):
            valid = _padding(attention_mask, kv_length, kv_offset)
            keys = torch.arange(kv_length, device=device)
            valid = valid & (keys < end)
            begin, count = valid.int().argmax(dim=1), valid.sum(dim=1)
            expected = (keys >= begin[:, None]) & (keys < (begin + count)[:, None])
            whole, contiguous = torch.stack([(count == end).all(), (valid == expected).all()]).tolist()
            if whole:
                return _without_padding(causal, batch_size, q_length, kv_length, end, device)
            if contiguous:
                return _offsets(causal, begin, count, first, q_length, kv_length)
    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=False,  # sdpa aligns queries and keys differently if the mask is None.
        use_vmap=use_vmap,
        device=device,
        **options,
    )


def dense_mask(mask: Any, query: Any, key: Any, causal: bool, window: int | None) -> Any:
    """Convert an int32 mask, or None, to a bool mask (batch or 1, 1, q_length, kv_length) for sdpa."""
    q_length, kv_length = query.shape[2], key.shape[2]
    queries = torch.arange(q_length, device=query.device)[None, :, None]
    keys = torch.arange(kv_length, device=query.device)[None, None, :]
    if mask is None:
        begin, end, last = 0, kv_length, q_length
    elif is_decode(mask):
        begin, end, last = 0, mask.view(-1, 1, 1), 1
    else:
        q_offsets, k_offsets = (offsets.view(-1, 3) for offsets in (mask.flatten(0, 2)[:, 1:]))
        start = torch.arange(len(k_offsets), device=query.device)[:, None, None]
        begin, end = (k_offsets[:, place, None, None] - start * kv_length for place in (0, 1))
        last = q_offsets[:, 1, None, None] - start * q_length
    visible = (keys >= begin) & (keys < end)
    distance = (keys - end) - (queries - last)  # 0 for the key at the query's position.
    if causal:
        visible = visible & (distance <= 0)
        visible = visible if window is None else visible & (distance > -window)
    return visible.expand(visible.shape[0], q_length, kv_length)[:, None]


def is_decode(mask: Any) -> bool:
    """Return whether an int32 mask contains lengths for attention_decode(), not offsets."""
    return bool(mask.shape[1] == mask.shape[2] == 1)


def is_causal(mask: Any) -> bool:
    """Return whether an int32 mask is a causal mask."""
    return bool(mask.shape[1] == 1)


def _causality(
    mask_function: Callable[..., Any], local_size: int | None, allow_is_causal_skip: bool, config: Any
) -> bool | None:
    """Return True for causal or sliding attention, False for full attention, and None for other patterns."""
    if mask_function is causal_mask_function:
        return True
    if mask_function is bidirectional_mask_function:
        return False
    if local_size is None or local_size == getattr(config, "attention_chunk_size", None):
        return None
    if allow_is_causal_skip:  # transformers has not modified the pattern.
        return True
    if torch.compiler.is_compiling():
        return None
    parts, sliding = _parts(mask_function), _parts(sliding_window_causal_mask_function(local_size))
    codes = [[getattr(part, "__code__", None) for part in functions] for functions in (parts, sliding)]
    return True if parts and codes[0] == codes[1] else None


def _parts(mask_function: Callable[..., Any]) -> tuple[Any, ...]:
    """Return the functions that transformers' and_masks() combined."""
    contents = [cell.cell_contents for cell in getattr(mask_function, "__closure__", None) or ()]
    return contents[0] if len(contents) == 1 and isinstance(contents[0], tuple) else ()


def _is_tracing(device: Any) -> bool:
    """Return whether torch.compile is tracing or a CUDA graph is being captured, so that values cannot be read."""
    if torch.compiler.is_compiling():
        return True
    return torch.device(device).type == "cuda" and bool(torch.cuda.is_current_stream_capturing())


def _padding(attention_mask: Any, kv_length: int, kv_offset: Any) -> Any:
    """Return a bool tensor (batch, kv_length) that is False for padding keys.

    Keys beyond the end of the mask are padding.
    """
    missing = kv_length + kv_offset - attention_mask.shape[1]
    if missing > 0:
        attention_mask = torch.nn.functional.pad(attention_mask, (0, int(missing)))
    if isinstance(kv_offset, int) and kv_offset == 0 and attention_mask.shape[1] == kv_length:
        return attention_mask.bool()
    keys = torch.arange(kv_length, device=attention_mask.device) + kv_offset
    return attention_mask[:, keys].bool()


def _without_padding(causal: bool, batch: int, q_length: int, kv_length: int, end: Any, device: Any) -> Any:
    """Return the mask for a batch without padding.

    ``end`` is the number of keys in use. If the cache is static, ``end`` is a tensor, and its value can be less than
    the cache's length.
    """
    if not causal:
        return None
    if q_length == 1:
        if isinstance(end, torch.Tensor):
            return end.to(torch.int32).reshape(1, 1, 1, 1).expand(1, 1, 1, batch).contiguous()
        return torch.full((1, 1, 1, batch), end, dtype=torch.int32, device=device)
    if not isinstance(end, torch.Tensor) and end == kv_length:
        return None
    count = torch.zeros(batch, dtype=torch.int64, device=device) + end
    return _offsets(True, torch.zeros_like(count), count, end - q_length, q_length, kv_length)


def _offsets(causal: bool, begin: Any, count: Any, first: Any, q_length: int, kv_length: int) -> Any:
    """Return the mask with the offsets of the sequences.

    ``begin`` and ``count`` (batch,) are the index of the first valid key and the number of valid keys in each row.
    ``first`` is the position of the first query among the keys.
    """
    before, until = torch.zeros_like(begin), torch.full_like(begin, q_length)
    if causal:
        before, until = (begin - first).clamp(0, q_length), (begin + count - first).clamp(0, q_length)
    rows = torch.arange(len(begin), device=begin.device)[:, None]
    queries = torch.stack([before, until, torch.full_like(begin, q_length)], 1) + rows * q_length
    keys = torch.stack([begin, begin + count, torch.full_like(begin, kv_length)], 1) + rows * kv_length
    both = torch.nn.functional.pad(torch.stack([queries.flatten(), keys.flatten()]), (1, 0)).to(torch.int32)
    return both[None, None] if causal else both[None, :, None]


def attention_calls(model: Any) -> list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]:
    """Return a call (function, operands, options) for each kind of kernel that a model's attention layers may use.

    The operands are uninitialized. Attention layers are recognized by attributes that all attention modules of
    transformers have.
    """
    kinds: dict[tuple[Any, ...], None] = {}
    for module in model.modules():
        config, dim = getattr(module, "config", None), getattr(module, "head_dim", None)
        heads = getattr(config, "num_attention_heads", None)
        if getattr(config, "_attn_implementation", None) != "cudatma" or type(heads) is not int or type(dim) is not int:
            continue
        tensor = next(iter([*module.buffers(), *module.parameters()]), None)
        if tensor is None or model.dtype not in (torch.float16, torch.bfloat16) or (dim, dim) not in HEAD_DIMS:
            continue
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        window = getattr(module, "sliding_window", getattr(config, "sliding_window", None))
        softcap, has_sink = getattr(module, "attn_logit_softcapping", None), getattr(module, "sinks", None) is not None
        causal = getattr(module, "is_causal", None) is not False
        kind = tensor.device, model.dtype, heads, kv_heads, dim, causal, window, softcap, has_sink
        kinds[kind] = None
    return [call for kind in kinds for call in _calls_of(*kind)]


def _calls_of(
    device: Any,
    dtype: Any,
    heads: int,
    kv_heads: int,
    dim: int,
    causal: bool,
    window: int | None,
    softcap: float | None,
    has_sink: bool,
) -> Iterator[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]:
    """Yield one call to each attention function for one kind of layer."""
    q = torch.empty(1, 2, heads, dim, dtype=dtype, device=device)
    k = v = torch.empty(1, 2, kv_heads, dim, dtype=dtype, device=device)
    ends = torch.tensor([0, 2], dtype=torch.int32, device=device)
    options: dict[str, Any] = {"softcap": softcap or None}
    if causal and window is not None:
        options["window"] = window - 1, None
    if has_sink:
        options["sink"] = torch.empty(heads, device=device)
    yield attention, (q, k, v), {"causal": causal, **options}
    longest = {"max_seqlen_q": 2, "max_seqlen_k": 2}
    yield attention_varlen, (q[0], k[0], v[0], ends, ends), {"causal": causal, **longest, **options}
    if causal:
        yield attention_decode, (q[:, :1], k, v, ends[1:]), options


#: Reasons for which a warning has already been issued.
_warned: set[str] = set()


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
    """Compute attention with cudatma's own kernels, or with sdpa if the kernels do not support the call.

    The parameters are those of transformers' attention interface. Views are copied only if there is padding. If sdpa
    would ignore an option, the model's own eager function computes attention. A warning is issued once for each reason.

    Parameters
    ----------
    module : torch.nn.Module
        The attention layer.
    query : torch.Tensor, shape (batch, heads, q_length, dim)
        Queries.
    key, value : torch.Tensor, shape (batch, kv_heads, kv_length, dim)
        Keys and values.
    attention_mask : torch.Tensor or None
        Result of attention_mask().
    dropout : float, default 0.0
        Dropout probability. The kernels support only 0.
    scaling : float, optional
        Multiplier for the scores. Default: dim ** -0.5.
    sliding_window : int, optional
        Maximum number of keys that a query attends to. Default: no limit.
    softcap : float, optional
        Cap on the scores. Each score becomes softcap * tanh(score / softcap). Default: no cap.
    s_aux : torch.Tensor, shape (heads,), optional
        Attention sinks. Default: no sinks.
    **options
        Other options of transformers' attention interface.

    Returns
    -------
    tuple of torch.Tensor, shape (batch, q_length, heads, dim), and None
        The result, without attention weights.

    Raises
    ------
    ArgumentError
        If the call requires an eager function and the model has none.
    """
    requested = options.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if requested is None else requested)
    if attention_mask is not None and attention_mask.dtype == torch.int32:
        causal = is_causal(attention_mask)
    reason = _unsupported(query, key, value, attention_mask, dropout, options)
    if reason:
        call = {"dropout": dropout, "scaling": scaling, "sliding_window": sliding_window, "softcap": softcap, **options}
        call |= {} if s_aux is None else {"s_aux": s_aux}
        return _fall_back(reason, module, query, key, value, attention_mask, causal, call)
    settings = {"scale": scaling, "softcap": softcap or None}
    if s_aux is not None:
        settings["sink"] = s_aux.detach().float()
    if causal and sliding_window is not None:
        settings["left"] = sliding_window - 1
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    operators = torch.ops.cudatma
    if attention_mask is None:
        return operators.attention(q, k, v, causal=causal, **settings), None
    if is_decode(attention_mask):
        return operators.attention_decode(q, k, v, attention_mask.view(-1), **settings), None
    q_offsets, k_offsets = attention_mask.flatten(0, 2).unbind()
    rows = operators.attention_varlen(
        *(tensor.flatten(0, 1) for tensor in (q, k, v)),
        q_offsets,
        k_offsets,
        max_seqlen_q=q.shape[1],
        max_seqlen_k=k.shape[1],
        causal=causal,
        **settings,
    )
    return rows.unflatten(0, q.shape[:2]), None


def _unsupported(query: Any, key: Any, value: Any, mask: Any, dropout: float, options: dict[str, Any]) -> str:
    """Return the reason why the kernels do not support a call, or "" if they do."""
    if mask is not None and mask.dtype != torch.int32:
        return "a mask that is not causal, sliding or padded at one end"
    if dropout:
        return "dropout"
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value)):
        return "a backward pass"
    if str(query.dtype).removeprefix("torch.") not in ACTIVATION_TYPES:
        return f"tensors of {query.dtype}"
    if (query.shape[-1], value.shape[-1]) not in HEAD_DIMS:
        return f"a head dimension of {query.shape[-1]}"
    unsupported = [name for name in ("position_bias", "head_mask") if options.get(name) is not None]
    return unsupported[0] if unsupported else ""


def _fall_back(
    reason: str, module: Any, query: Any, key: Any, value: Any, mask: Any, causal: bool, call: dict[str, Any]
) -> tuple[Any, None]:
    """Call sdpa, or the model's eager attention if sdpa would ignore an option (softcap or attention sinks)."""
    name = "sdpa"
    if call.get("softcap") or call.get("s_aux") is not None:
        name = "eager"
    if not torch.compiler.is_compiling() and reason not in _warned:
        _warned.add(reason)
        warnings.warn(
            f"cudatma does not support attention with {reason}, so this call uses {name}", RuntimeWarning, stacklevel=3
        )
    if mask is None or mask.dtype == torch.int32:
        mask = dense_mask(mask, query, key, causal, call["sliding_window"])
    if name == "sdpa":
        result: tuple[Any, None] = sdpa_attention_forward(module, query, key, value, mask, **call)
        return result
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        raise ArgumentError(
            "attn_implementation",
            "cudatma",
            f'"sdpa" or "eager" for {reason}',
            "pass one of these names to from_pretrained()",
        )
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill(
            ~mask, torch.finfo(query.dtype).min
        )
    return eager(module, query, key, value, mask, **call)[0], None
