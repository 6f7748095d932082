"""Schemas and functions of the operators ``torch.ops.cudatma.*``.

The operators have no backward pass. This module defines them with torch.library.Library, because
torch.library.custom_op adds four microseconds to each call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cudatma.integrations.torch import fakes
from cudatma.integrations.torch.weights import known_experts, known_weight
from cudatma.kernels.attention.attention import attention, attention_varlen
from cudatma.kernels.attention.decode import attention_decode
from cudatma.kernels.engine import run
from cudatma.kernels.experts import moe
from cudatma.kernels.gemm.gemm import gemm
from cudatma.kernels.marlin.gemm import MARLIN_GEMM as MARLIN
from cudatma.kernels.marlin.gemm import MarlinOptions

_WEIGHT = "Tensor qweight, Tensor scales, Tensor? zeros, Tensor? perm"
_MARLIN = (
    f"Tensor x, {_WEIGHT}, Tensor? bias, SymInt k, SymInt n, int group_size, bool batch_invariant=False, "
    "str format='int4', Tensor? tensor_scale=None"
)
_MOE = (
    "Tensor x, Tensor topk_weights, Tensor topk_ids, Tensor w1, Tensor w1_scales, Tensor? w1_zeros, Tensor w2, "
    "Tensor w2_scales, Tensor? w2_zeros, int experts, SymInt intermediate, int w1_group_size, int w2_group_size, *, "
    "Tensor? expert_map=None, str format='int4', Tensor? w1_tensor_scale=None, Tensor? w2_tensor_scale=None, "
    "Tensor? bias1=None, Tensor? bias2=None, str activation='silu_glu'"
)
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
_DECODE = (
    "Tensor q, Tensor k_cache, Tensor v_cache, Tensor seqlens, *, Tensor? page_table=None, "
    f"Tensor? k_scale=None, Tensor? v_scale=None, {_MASK}"
)
_OUT = ", Tensor(a!) out"

#: Libraries are kept until the process ends, even if this module is reloaded, because deleting a library removes its
#: operators.
_libraries: list[Any] = globals().get("_libraries", [])


def register() -> None:
    """Define the operators, once per process."""
    if hasattr(torch.ops.cudatma, "marlin_gemm"):
        return
    library = torch.library.Library("cudatma", "FRAGMENT")
    _define(library, "marlin_moe", _MOE, marlin_moe, fakes.marlin_moe)
    _define(library, "marlin_moe_out", f"{_MOE}{_OUT}", marlin_moe, fakes.into(fakes.marlin_moe))
    gemm_schema = _GEMM.format(beta="", out_dtype="ScalarType? out_dtype=None, ")
    gemm_out_schema = _GEMM.format(beta="float beta=0.0, ", out_dtype="")
    _define(library, "marlin_gemm", _MARLIN, marlin_gemm, fakes.marlin_gemm)
    _define(library, "marlin_gemm_out", f"{_MARLIN}, *{_OUT}", marlin_gemm, fakes.into(fakes.marlin_gemm))
    _define(library, "gemm", gemm_schema, gemm, fakes.gemm)
    _define(library, "gemm_out", f"{gemm_out_schema}{_OUT}", gemm, fakes.gemm_out)
    for name, schema, function, fake in (
        ("attention", _ATTENTION, attention, fakes.attention),
        ("attention_varlen", _VARLEN, attention_varlen, fakes.attention_varlen),
        ("attention_decode", _DECODE, attention_decode, fakes.attention_decode),
    ):
        _define(library, name, schema, _with_sides(function), fake)
        _define(library, f"{name}_out", f"{schema}{_OUT}", _with_sides(function), fakes.into(fake))
    _libraries.append(library)


def _define(library: Any, name: str, arguments: str, function: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define an operator for the CPU and CUDA.

    An operator with ``out`` returns no tensor, as functionalization requires.
    """
    has_out = name.endswith("_out")
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
    library.define(f"{name}({arguments}) -> {'()' if has_out else 'Tensor'}", tags=tags)
    for key in ("CPU", "CUDA"):
        library.impl(name, _writes(function) if has_out else function, key)
    torch.library.register_fake(f"cudatma::{name}", fake, lib=library)


def _writes(function: Callable[..., Any]) -> Callable[..., None]:
    """Return a variant of a function that writes to ``out`` and increments the version counter of ``out``.

    Autograd and packed_weight() read the version counter.
    """

    def write(*operands: Any, out: Any, **options: Any) -> None:
        function(*operands, out=out, **options)
        torch.autograd.graph.increment_version(out)

    return write


def _with_sides(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a variant of an attention function that takes ``left`` and ``right`` instead of ``window``."""

    def call(*arrays: Any, left: int | None = None, right: int | None = None, **options: Any) -> Any:
        window = None if left is None and right is None else (left, right)
        return function(*arrays, window=window, **options)

    return call


def marlin_gemm(
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
    format: str = "int4",
    tensor_scale: Any = None,
    out: Any = None,
) -> Any:
    weight, launched = known_weight(qweight, scales, zeros, perm, k, n, group_size, format, tensor_scale)
    return run(MARLIN, (x, bias), out, MarlinOptions(False, batch_invariant), None, None, launched, weight)


def marlin_moe(
    x: Any,
    topk_weights: Any,
    topk_ids: Any,
    w1: Any,
    w1_scales: Any,
    w1_zeros: Any,
    w2: Any,
    w2_scales: Any,
    w2_zeros: Any,
    experts: int,
    intermediate: int,
    w1_group_size: int,
    w2_group_size: int,
    *,
    expert_map: Any = None,
    format: str = "int4",
    w1_tensor_scale: Any = None,
    w2_tensor_scale: Any = None,
    bias1: Any = None,
    bias2: Any = None,
    activation: str = "silu_glu",
    out: Any = None,
) -> Any:
    first, second = (w1, w1_scales, w1_zeros), (w2, w2_scales, w2_zeros)
    sizes, tensor_scales = (w1_group_size, w2_group_size), (w1_tensor_scale, w2_tensor_scale)
    weights = known_experts(first, second, experts, x.shape[-1], intermediate, sizes, format, tensor_scales)
    options = {"bias1": bias1, "bias2": bias2, "activation": activation}
    return moe.marlin_moe(x, *weights, topk_weights, topk_ids, expert_map=expert_map, out=out, **options)


register()
#: Operators. They are stored here because a lookup in torch.ops takes 0.2 us.
MARLIN_GEMM = torch.ops.cudatma.marlin_gemm.default
MOE = torch.ops.cudatma.marlin_moe.default
