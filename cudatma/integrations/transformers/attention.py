"""The attention "cudatma" of transformers: our kernels for the masks that they can serve, sdpa for the rest.

transformers calls attention_mask() once a forward pass with the pattern and the padding, and hands what it returns to
attention_forward() in each layer. Tensors of four dimensions go through transformers as they are; those of int32 are
ours:

- None: causal, sliding or full attention, as the layer says, of sequences whose last query belongs to the last key.
- (1, 1, 1, batch): one query a sequence, and how many keys it sees. attention_decode() takes it.
- (1, 1, 2, 3 batch + 1): offsets of queries and of keys, as attention_varlen() takes them. Each row of the batch is
  three sequences: the padding before, the valid tokens, and what lies after them. Full attention: (1, 2, 1, ...).
- bools (batch, 1, q_length, kv_length): any other pattern.
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
    """transformers' interface of masks; attention_mask: bools (batch, tokens), False where a token is padding.

    Padding that lies between valid tokens gives a mask for sdpa, and so does any padding that cannot be looked at:
    while torch.compile traces, or a CUDA graph is captured.
    """
    first = q_offset - kv_offset  # the first query, counted as keys are
    causal = _causality(mask_function, local_size, allow_is_causal_skip, options.get("config"))
    if causal is not None:
        end = first + q_length if causal else kv_length
        if attention_mask is None:
            return _without_padding(causal, batch_size, q_length, kv_length, end, device)
        if not _cannot_look(device):
            valid = _padding(attention_mask, kv_length, kv_offset)
            keys = torch.arange(kv_length, device=device)
            valid = valid & (keys < end)
            begin, count = valid.int().argmax(dim=1), valid.sum(dim=1)
            inside = (keys >= begin[:, None]) & (keys < (begin + count)[:, None])
            whole, joined = torch.stack([(count == end).all(), (valid == inside).all()]).tolist()
            if whole:
                return _without_padding(causal, batch_size, q_length, kv_length, end, device)
            if joined:
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
        allow_is_causal_skip=False,  # its None would mean another alignment than ours
        use_vmap=use_vmap,
        device=device,
        **options,
    )


def dense_mask(mask: Any, query: Any, key: Any, causal: bool, window: int | None) -> Any:
    """What a mask of ours, or None, means: bools (batch or 1, 1, q_length, kv_length), as sdpa takes them."""
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
    seen = (keys >= begin) & (keys < end)
    behind = (keys - end) - (queries - last)  # of the key that belongs to the query: 0
    if causal:
        seen = seen & (behind <= 0)
        seen = seen if window is None else seen & (behind > -window)
    return seen.expand(seen.shape[0], q_length, kv_length)[:, None]


def is_decode(mask: Any) -> bool:
    """Whether a mask of ours holds lengths for attention_decode(); otherwise it holds offsets."""
    return bool(mask.shape[1] == mask.shape[2] == 1)


def is_causal(mask: Any) -> bool:
    """Whether a mask of ours belongs to causal attention."""
    return bool(mask.shape[1] == 1)


def _causality(
    mask_function: Callable[..., Any], local_size: int | None, allow_is_causal_skip: bool, config: Any
) -> bool | None:
    """True for causal attention, sliding or not, False for full attention, None for other patterns."""
    if mask_function is causal_mask_function:
        return True
    if mask_function is bidirectional_mask_function:
        return False
    if local_size is None or local_size == getattr(config, "attention_chunk_size", None):
        return None
    if allow_is_causal_skip:  # transformers has added nothing to the pattern
        return True
    if torch.compiler.is_compiling():
        return None
    parts, sliding = _parts(mask_function), _parts(sliding_window_causal_mask_function(local_size))
    codes = [[getattr(part, "__code__", None) for part in functions] for functions in (parts, sliding)]
    return True if parts and codes[0] == codes[1] else None


def _parts(mask_function: Callable[..., Any]) -> tuple[Any, ...]:
    """The functions that transformers' and_masks() has joined."""
    held = [cell.cell_contents for cell in getattr(mask_function, "__closure__", None) or ()]
    return held[0] if len(held) == 1 and isinstance(held[0], tuple) else ()


def _cannot_look(device: Any) -> bool:
    if torch.compiler.is_compiling():
        return True
    return torch.device(device).type == "cuda" and bool(torch.cuda.is_current_stream_capturing())


def _padding(attention_mask: Any, kv_length: int, kv_offset: Any) -> Any:
    """The padding of the keys alone, bools (batch, kv_length); keys that the mask does not reach are none."""
    missing = kv_length + kv_offset - attention_mask.shape[1]
    if missing > 0:
        attention_mask = torch.nn.functional.pad(attention_mask, (0, int(missing)))
    if isinstance(kv_offset, int) and kv_offset == 0 and attention_mask.shape[1] == kv_length:
        return attention_mask.bool()
    keys = torch.arange(kv_length, device=attention_mask.device) + kv_offset
    return attention_mask[:, keys].bool()


def _without_padding(causal: bool, batch: int, q_length: int, kv_length: int, end: Any, device: Any) -> Any:
    """end: how many of the keys there are; a static cache, which has more, gives it as a tensor."""
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
    """begin, count: of each row's valid keys, (batch,). first: the first query, counted as keys are."""
    before, until = torch.zeros_like(begin), torch.full_like(begin, q_length)
    if causal:
        before, until = (begin - first).clamp(0, q_length), (begin + count - first).clamp(0, q_length)
    rows = torch.arange(len(begin), device=begin.device)[:, None]
    queries = torch.stack([before, until, torch.full_like(begin, q_length)], 1) + rows * q_length
    keys = torch.stack([begin, begin + count, torch.full_like(begin, kv_length)], 1) + rows * kv_length
    both = torch.nn.functional.pad(torch.stack([queries.flatten(), keys.flatten()]), (1, 0)).to(torch.int32)
    return both[None, None] if causal else both[None, :, None]


def attention_calls(model: Any) -> list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]:
    """Return a call (function, operands, options) for each kind of kernel that a model's attention layers may launch.

    The operands are uninitialized. Layers are recognized by the attributes that transformers' attention modules share.
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
    """Yield a call of each function for one kind of layer."""
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
