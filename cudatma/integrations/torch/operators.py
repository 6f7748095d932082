"""``torch.ops.cudatma.*``: schemas, and what they call. Operators take tensors and numbers, and compute forward only.

Defined by torch.library.Library: torch.library.custom_op costs four microseconds more at each call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cudatma.integrations.torch import fakes
from cudatma.integrations.torch.weights import packed_weight
from cudatma.kernels.attention.attention import attention
from cudatma.kernels.attention.decode import attention_decode
from cudatma.kernels.attention.varlen import attention_varlen
from cudatma.kernels.gemm.gemm import gemm
from cudatma.kernels.marlin.gemm import marlin_gemm

_WEIGHT = "Tensor qweight, Tensor scales, Tensor? zeros, Tensor? perm"
_MARLIN = f"Tensor x, {_WEIGHT}, Tensor? bias, SymInt k, SymInt n, int group_size, bool batch_invariant=False"
_GEMM = (
    "Tensor a, Tensor b, *, Tensor? bias=None, float alpha=1.0, {beta}str? activation=None, {out_dtype}"
    "Tensor? a_scale=None, Tensor? b_scale=None, bool batch_invariant=False"
)
_MASK = "float? scale=None, SymInt? left=None, SymInt? right=None, float? softcap=None, Tensor? sink=None"
_ATTENTION = f"Tensor q, Tensor k, Tensor v, *, bool causal=False, {_MASK}"
_VARLEN = (
    "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, *, SymInt max_seqlen_q, "
    f"SymInt max_seqlen_k, bool causal=False, {_MASK}"
)
_DECODE = f"Tensor q, Tensor k_cache, Tensor v_cache, Tensor seqlens, *, Tensor? page_table=None, {_MASK}"
_OUT = ", Tensor(a!) out"

#: Held for as long as the process lives, also where this module is loaded again: the operators go with it.
_libraries: list[Any] = globals().get("_libraries", [])


def register() -> None:
    """Define the operators, once a process."""
    if hasattr(torch.ops.cudatma, "marlin_gemm"):
        return
    library = torch.library.Library("cudatma", "FRAGMENT")
    gemm_schema = _GEMM.format(beta="", out_dtype="ScalarType? out_dtype=None, ")
    gemm_out_schema = _GEMM.format(beta="float beta=0.0, ", out_dtype="")
    _define(library, "marlin_gemm", _MARLIN, _marlin_gemm, fakes.marlin_gemm)
    _define(library, "marlin_gemm_out", f"{_MARLIN}, *{_OUT}", _writes(_marlin_gemm), fakes.marlin_gemm_out)
    _define(library, "gemm", gemm_schema, _gemm, fakes.gemm)
    _define(library, "gemm_out", f"{gemm_out_schema}{_OUT}", _writes(_gemm), fakes.gemm_out)
    _define(library, "attention", _ATTENTION, _attention, fakes.attention)
    _define(library, "attention_out", f"{_ATTENTION}{_OUT}", _writes(_attention), fakes.attention_out)
    _define(library, "attention_varlen", _VARLEN, _attention_varlen, fakes.attention_varlen)
    _define(library, "attention_varlen_out", f"{_VARLEN}{_OUT}", _writes(_attention_varlen), fakes.attention_varlen_out)
    _define(library, "attention_decode", _DECODE, _attention_decode, fakes.attention_decode)
    _define(library, "attention_decode_out", f"{_DECODE}{_OUT}", _writes(_attention_decode), fakes.attention_decode_out)
    _libraries.append(library)


def _define(library: Any, name: str, arguments: str, function: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """An operator on the CPU and on CUDA devices; one with ``out`` returns nothing, as functionalization wants it."""
    result = "()" if name.endswith("_out") else "Tensor"
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
    library.define(f"{name}({arguments}) -> {result}", tags=tags)
    for key in ("CPU", "CUDA"):
        library.impl(name, function, key)
    torch.library.register_fake(f"cudatma::{name}", fake, lib=library)


def _writes(function: Callable[..., Any]) -> Callable[..., None]:
    """The function's variant that writes to ``out``, whose version counter tells autograd and packed_weight() so."""

    def write(*operands: Any, out: Any, **options: Any) -> None:
        function(*operands, out=out, **options)
        torch.autograd.graph.increment_version(out)

    return write


def _marlin_gemm(
    x: Any,
    qweight: Any,
    scales: Any,
    zeros: Any,
    perm: Any,
    bias: Any,
    k: int,
    n: int,
    group_size: int,
    batch_invariant: bool = False,
    *,
    out: Any = None,
) -> Any:
    weight = packed_weight(qweight, scales, zeros, perm, k, n, group_size)
    return marlin_gemm(x, weight, out, _plain(bias), batch_invariant=batch_invariant)


def _plain(tensor: Any) -> Any:
    """A Parameter as the tensor that it is, unless it wants a gradient: repeated calls know torch.Tensor alone."""
    return tensor.detach() if type(tensor) is torch.nn.Parameter and not tensor.requires_grad else tensor


def _gemm(a: Any, b: Any, **options: Any) -> Any:
    return gemm(a, b, **options)


def _attention(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return attention(q, k, v, **_windowed(options))


def _attention_varlen(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, **options: Any) -> Any:
    return attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **_windowed(options))


def _attention_decode(q: Any, k_cache: Any, v_cache: Any, seqlens: Any, **options: Any) -> Any:
    return attention_decode(q, k_cache, v_cache, seqlens, **_windowed(options))


def _windowed(options: dict[str, Any]) -> dict[str, Any]:
    """``left`` and ``right`` as the window that they are."""
    left, right = options.pop("left", None), options.pop("right", None)
    if left is not None or right is not None:
        options["window"] = (left, right)
    return options
