"""attention: softmax(scale q k^T) v in fp16 or bf16. Reads downwards: checks, plan, launch."""

from __future__ import annotations

from typing import Any

from cudatma.backend import backend_for
from cudatma.kernels.attention.call import first_call, planner, repeated
from cudatma.kernels.attention.reference import reference
from cudatma.kernels.attention.request import check_call
from cudatma.kernels.attention.versions import chosen_version


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sink: Any = None,
    out: Any = None,
    return_lse: bool = False,
    version: str = "auto",
    backend: str | None = None,
    stream: Any = None,
) -> Any:
    """softmax(scale q k^T) v for each head by itself, in fp32, rounded once; with return_lse (the result, lse).

    q: (batch, q_length, heads, dim), k: (batch, k_length, kv_heads, dim), v: (batch, k_length, kv_heads, v_dim), all
    fp16 or all bf16, of one library and device: CuPy, torch, DLPack or ``__cuda_array_interface__``; NumPy on the
    emulator. heads is a multiple of kv_heads: neighbors share a head of k and v. dim is 32, 64, 96, 128, 192 or 256,
    v_dim the same, or 128 for 192. Elements of the last dimension lie side by side, the other strides are multiples of
    16 bytes: a transposed view is read as it is.
    causal: query i sees keys up to i + k_length - q_length: the last query sees all. window: (left, right): it sees
    keys from ``left`` before that one to ``right`` behind it, None for all. A query that sees no key has a result of
    zeros and an lse of -inf, or of its head's sink.
    scale: above 0, None: 1 / sqrt(dim). softcap: logits x become softcap tanh(x / softcap).
    sink: (heads,) in fp32, for each head the logit of one more key, which all its queries see and whose value is zero.
    out: (batch, q_length, heads, v_dim), made by q's library if None. lse: (batch, heads, q_length) in fp32, the
    logarithm of the sum of the exponentials of a query's logits.
    version: ``"auto"``, or one of docs/attention.md; see kernels/version.py for where else it may be set. backend: as
    in marlin_gemm. stream: None is the current stream of q's library. The result is the same bits in every call. There
    is no backward pass: tensors that require grad raise while torch records.

    Raises ArgumentError, ArgumentTypeError, TargetError (no kernel for the GPU), CompileError, DriverError,
    LaunchError, HazardError (emulator).
    """
    number, _ = chosen_version(version)
    options = causal, scale, softcap, return_lse, number
    key, done = repeated((q, k, v, sink, out), window, options, backend, stream)
    if done is not None:
        return done
    chosen = backend_for("attention", backend)
    checked = check_call(q, k, v, causal, scale, window, softcap, sink, out, return_lse)
    return first_call(checked, out, (number,), chosen, stream, key, reference, planner(number))
