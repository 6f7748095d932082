"""attention and attention_varlen: softmax(scale q k^T) v in fp16 or bf16."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from cudatma.arrays import ArrayInfo
from cudatma.errors import ArgumentError
from cudatma.kernels.arguments import Arguments, Sizes
from cudatma.kernels.attention.arguments import attention_arguments, sizes_for
from cudatma.kernels.attention.choose import ATTENTION, times
from cudatma.kernels.attention.empty import fill_empty
from cudatma.kernels.attention.problem import size_class
from cudatma.kernels.attention.reference import reference
from cudatma.kernels.attention.request import (
    Request,
    Sequences,
    check_call,
    check_result,
    check_types,
    checked_limits,
    checked_scale,
    checked_sink,
    checked_softcap,
    masks_up_to,
    reduced,
)
from cudatma.kernels.attention.spec import AttentionSpec
from cudatma.kernels.attention.tensors import (
    addressable,
    check_shapes,
    contiguous,
    operand,
    plain_array,
    resized,
)
from cudatma.kernels.attention.versions import chosen_version
from cudatma.kernels.checks import check_place, checked_count, checked_flag
from cudatma.kernels.choice_table import choice_table
from cudatma.kernels.engine import run
from cudatma.kernels.gpu import Gpu
from cudatma.kernels.host import host_array
from cudatma.kernels.operation import Checked, Operation
from cudatma.kernels.overrides import every_entry_spec, pinned_spec
from cudatma.kernels.version import naming
from cudatma.target import get_target

NAME = "attention_varlen"


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
    """Compute softmax(scale q k^T) v for each head, in fp32, rounded once.

    There is no backward pass: tensors that require grad raise while torch records. The result has the same bits in
    every call.

    Parameters
    ----------
    q : array (batch, q_length, heads, dim)
        Queries in fp16 or bf16: CuPy, torch, DLPack or ``__cuda_array_interface__``; NumPy on the emulator. The last
        dimension is contiguous; the other strides are multiples of 16 bytes, so a transposed view is read in place.
    k : array (batch, k_length, kv_heads, dim)
        Keys. ``heads`` is a multiple of ``kv_heads``: neighboring heads of q share a head of k and v.
    v : array (batch, k_length, kv_heads, v_dim)
        Values. ``dim`` is 32, 64, 96, 128, 192 or 256; ``v_dim`` is the same, or 128 for 192.
    causal : bool, default False
        Query i sees keys up to i + k_length - q_length, so that the last query sees all.
    scale : float, optional
        Factor of the products, above 0. Default: 1 / sqrt(dim).
    window : (left, right), optional
        A query sees keys from ``left`` before its own position to ``right`` after it; None for no limit.
    softcap : float, optional
        Logits x become softcap tanh(x / softcap).
    sink : array (heads,), optional
        fp32 logits, one for each head, of one more key that all queries see and whose value is zero.
    out : array (batch, q_length, heads, v_dim), optional
        The result. Default: a new array of q's library.
    return_lse : bool, default False
        Also return the logarithm of the sum of the exponentials of each query's logits.
    version : str, default "auto"
        Version of the kernel (docs/attention.md). The environment or a file may set it, too (kernels/version.py).
    backend : str, optional
        As for ``marlin_gemm``.
    stream : stream, optional
        Default: the current stream of q's library.

    Returns
    -------
    out : array (batch, q_length, heads, v_dim)
        A query that sees no key has a result of zeros.
    lse : array (batch, heads, q_length)
        fp32, only with ``return_lse``. It is -inf, or the head's sink, for a query that sees no key.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        For arguments that do not fit each other.
    TargetError
        If no kernel serves the problem on the GPU.
    LaunchError, CompileError, DriverError, HazardError
        As for ``marlin_gemm``.
    """
    number, asked_by = chosen_version(version)
    kinds = kinds_of(window, causal, scale, softcap, return_lse)
    options = causal, window, scale, softcap, return_lse, number, kinds
    with naming(asked_by):
        return run(ATTENTION_CALL, (q, k, v, sink), out, options, stream, backend)


def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sink: Any = None,
    out: Any = None,
    return_lse: bool = False,
    backend: str | None = None,
    stream: Any = None,
) -> Any:
    """Compute attention() of sequences of different lengths, each by itself.

    On SM90 by version a3, on SM120 by p1.

    Parameters
    ----------
    q : array (total_q, heads, dim)
        Queries of all sequences, one sequence after the other.
    k : array (total_k, kv_heads, dim)
        Keys.
    v : array (total_k, kv_heads, v_dim)
        Values.
    cu_seqlens_q, cu_seqlens_k : int32 array (sequences + 1,)
        Sequence i has the rows cu_seqlens[i] to cu_seqlens[i + 1]. The offsets begin with 0, never fall, and end with
        the total. In device memory they are read by the kernel, which limits them to the totals, and lengths to the
        longest; rows of the result that then belong to no sequence are not written.
    max_seqlen_q, max_seqlen_k : int
        No sequence is longer.
    causal, scale, window, softcap, sink, out, return_lse, backend, stream
        As for attention(). ``lse`` is (heads, total_q).

    Returns
    -------
    array (total_q, heads, v_dim), or that and lse
        As attention().

    Raises
    ------
    ArgumentError, ArgumentTypeError, TargetError, LaunchError, CompileError, DriverError, HazardError
        As attention().
    """
    kinds = kinds_of(window, causal, scale, softcap, return_lse, max_seqlen_q, max_seqlen_k)
    options = causal, window, scale, softcap, return_lse, kinds
    inputs, longest = (q, k, v, cu_seqlens_q, cu_seqlens_k, sink), (max_seqlen_q, max_seqlen_k)
    return run(VARLEN_CALL, inputs, out, options, stream, backend, numbers=longest)


def kinds_of(window: Any, *options: Any) -> tuple[type, ...]:
    """Return the types of options: 1 may be valid where True, which is equal, is not."""
    kinds = [option.__class__ for option in options]
    if isinstance(window, tuple):
        kinds += [side.__class__ for side in window]
    return tuple(kinds)


class Attention(Operation[Request, AttentionSpec]):
    """attention as an operation."""

    name: ClassVar[str] = "attention"
    inputs: ClassVar[tuple[str, ...]] = ("q", "k", "v", "sink")
    fixed_axes: ClassVar[tuple[int | None, ...]] = (2, 2, 2, None, 2)
    joins_axes: ClassVar[bool] = False

    def check(self, inputs: tuple[Any, ...], out: Any, options: tuple[Any, ...], subject: Any) -> Checked[Request]:
        """Validate a call."""
        causal, window, scale, softcap, return_lse, version, _ = options
        q, k, v, sink = inputs
        request, shape, _ = check_call(q, k, v, causal, scale, window, softcap, sink, out, return_lse)
        return checked_request(replace(request, version=version), shape)

    def resized(
        self, problem: Request, shapes: Sequence[Any], strides_bytes: Sequence[Any], numbers: tuple[int, ...]
    ) -> tuple[Request, tuple[int, ...], tuple[int, ...] | None] | None:
        """Return the request with other lengths and another batch."""
        q, k, v, _, out = shapes
        if k[0] != q[0] or v[:2] != k[:2] or (out is not None and out[:2] != q[:2]):
            return None
        request = _resized(problem, (q, k, v, out), (*strides_bytes[:3], strides_bytes[-1]), (q[1], k[1]), None)
        if request is None:
            return None
        return request, (*q[:3], v[3]), (q[0], q[2], q[1]) if problem.has_lse else None

    def masks(self, problem: Request) -> tuple[int, ...]:
        """TMA reads q, k and v and vectors write out; the others are read by elements."""
        return (15, 15, 15, *(3,) * (len(self.inputs) - 3), 15)

    def plan_key(self, problem: Request) -> Hashable:
        """All that a kernel and its tensor maps depend on, besides sizes."""
        q, k, v, out = problem.operands
        mask, dims = problem.mask, (q.shape[2:], v.shape[2:])
        flags = mask.is_causal, mask.has_window, problem.softcap > 0, problem.sink is not None, problem.has_lse
        return q.dtype, dims, *[info.strides_bytes[1] for info in (q, k, v, out)], flags, problem.version

    def without_kernel(self, problem: Request, arrays: Mapping[str, ArrayInfo], stream: int | None) -> bool:
        """Write the results of queries that see no key."""
        if problem.has_keys:
            return False
        fill_empty(arrays, stream)
        return True

    def configure(self, problem: Request, gpu: Gpu, memo: dict[Any, Any]) -> AttentionSpec:
        """Return the kernel for a request."""
        q_length, k_length = problem.lengths
        key = size_class(problem.batch, q_length, k_length, problem.sequences is not None)
        table = memo.get(key)
        if table is None or q_length > table.max_m:
            asked = problem.problem()
            pinned = pinned_spec(ATTENTION, asked, gpu)
            if pinned is not None:
                return pinned
            table = memo[key] = choice_table(ATTENTION, asked, gpu, q_length)
        return table.at(q_length)  # type: ignore[no-any-return]

    def kernels(self, problem: Request, config: AttentionSpec) -> tuple[tuple[str, Any], ...]:
        """Return the one kernel."""
        return ((config.template, config),)

    def kernels_up_to(self, checked: Checked[Request], max_m: int, gpu: Gpu) -> Iterator[tuple[str, Any]]:
        """Yield every configuration that may be chosen: they are few, and most serve some lengths and batch."""
        request = checked.problem
        check_not_empty(request)
        for mask in masks_up_to(request.limits, max_m):
            problem = replace(request, mask=mask).problem()
            candidates = [spec for spec, _ in times(problem, np.ones(1, np.int64), gpu)]
            for spec in (*candidates, *every_entry_spec(ATTENTION, problem, gpu)):
                yield spec.template, spec

    def arguments(
        self, problem: Request, config: AttentionSpec, gpu: Gpu, resident: tuple[int, ...]
    ) -> tuple[Arguments, ...]:
        """Return the launch of a request."""
        return (attention_arguments(problem, config, get_target(gpu.target), gpu.sm_count),)

    def sizes(
        self, problem: Request, config: AttentionSpec, gpu: Gpu, resident: tuple[int, ...], memo: dict[Any, Any]
    ) -> tuple[Sizes, ...]:
        """Return the sizes of the launch."""
        of_request = memo.get("sizes")
        if of_request is None:
            of_request = memo["sizes"] = sizes_for(problem, config, gpu.sm_count)
        return (of_request(problem),)

    def reference(self, problem: Request, arrays: Mapping[str, ArrayInfo]) -> None:
        """Compute the result in float64, rounded once."""
        reference(problem, arrays)


class AttentionVarlen(Attention):
    """attention_varlen as an operation. The longest lengths are numbers."""

    name: ClassVar[str] = "attention_varlen"
    inputs: ClassVar[tuple[str, ...]] = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "sink")
    fixed_axes: ClassVar[tuple[int | None, ...]] = (2, 2, 2, 0, 0, None, 2)

    def check(self, inputs: tuple[Any, ...], out: Any, options: tuple[Any, ...], subject: Any) -> Checked[Request]:
        """Validate a call."""
        max_q, max_k, causal, window, scale, softcap, return_lse, _ = options
        q, k, v, of_q, of_k, sink = inputs
        asked = {"causal": causal, "window": window, "scale": scale, "softcap": softcap, "sink": sink}
        request, shape = check_varlen(q, k, v, of_q, of_k, max_q, max_k, **asked, out=out, return_lse=return_lse)
        return checked_request(request, shape)

    def resized(
        self, problem: Request, shapes: Sequence[Any], strides_bytes: Sequence[Any], numbers: tuple[int, ...]
    ) -> tuple[Request, tuple[int, ...], tuple[int, ...] | None] | None:
        """Return the request with other totals, other longest lengths, and another number of sequences."""
        q, k, v, of_q, of_k, _, out = shapes
        if of_q != of_k or v[0] != k[0] or (out is not None and out[0] != q[0]) or problem.sequences is None:
            return None
        if not all(number.__class__ is int and number > 0 for number in numbers):
            return None
        longest = min(numbers[0], q[0]), min(numbers[1], k[0])
        offsets = contiguous(problem.sequences.q, of_q)
        rows = [None if shape is None else (1, *shape) for shape in (q, k, v, out)]
        steps = [None if step is None else (0, *step) for step in (*strides_bytes[:3], strides_bytes[-1])]
        request = _resized(problem, rows, steps, longest, Sequences(offsets, offsets, *longest))
        if request is None:
            return None
        return request, (*q[:2], v[2]), (q[1], q[0]) if problem.has_lse else None


def _resized(
    problem: Request,
    shapes: Sequence[Any],
    strides_bytes: Sequence[Any],
    lengths: tuple[int, int],
    sequences: Sequences | None,
) -> Request | None:
    """Return a request for q, k, v and out of these shapes and strides, None if check() has to look at the call."""
    mask = reduced(problem.limits, *lengths)
    if (mask.is_causal, mask.has_window) != (problem.mask.is_causal, problem.mask.has_window):
        return None
    layouts = resized((problem.q, problem.k, problem.v, problem.result), shapes, strides_bytes)
    if layouts is None:
        return None
    q, k, v, out = layouts
    facts = problem.softcap, problem.has_lse, sequences, problem.sink, out, problem.limits, problem.version
    return Request(q, k, v, problem.scale, mask, *facts)


def checked_request(request: Any, shape: tuple[int, ...]) -> Checked[Any]:
    """Return a checked call with this request, whose result has this shape."""
    lse = (*shape[:-3], shape[-2], shape[-3]) if request.has_lse else None
    infos = tuple(request.read.values())
    return Checked(request.without_memory, infos, request.result, shape, request.q.dtype, lse)


def check_not_empty(request: Any) -> None:
    """Raise ArgumentError if a call has nothing to compute."""
    if 0 in request.q.shape or not request.has_keys:
        shapes = request.q.shape, request.k.shape
        raise ArgumentError("q.shape, k.shape", shapes, "a batch and lengths above 0", "nothing is launched here")


ATTENTION_CALL, VARLEN_CALL = Attention(), AttentionVarlen()


def check_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    *,
    causal: Any = False,
    scale: Any = None,
    window: Any = None,
    softcap: Any = None,
    sink: Any = None,
    out: Any = None,
    return_lse: Any = False,
) -> tuple[Request, tuple[int, ...]]:
    """Return the request and the shape of the result. Lengths are compared in host memory only.

    Raises ArgumentError, ArgumentTypeError.
    """
    named = {name: operand(array, name, 3) for name, array in (("q", q), ("k", k), ("v", v))}
    check_types(named)
    shapes = [info.shape for info in named.values()]
    check_shapes(shapes[0], shapes[1], shapes[2], has_batch=False)
    offsets = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    found = {name: plain_array(array, name, "int32") for name, array in offsets.items()}
    for name, info in (named | found).items():
        check_place(info, name, named["q"], "q", NAME)
    named = {name: addressable(info, name) for name, info in named.items()}
    of_q, of_k = found.values()
    if len(of_q.shape) != 1 or not of_q.size_elems:
        raise ArgumentError("cu_seqlens_q.shape", of_q.shape, "(sequences + 1,)")
    if of_k.shape != of_q.shape:
        raise ArgumentError("cu_seqlens_k.shape", of_k.shape, f"{of_q.shape}, as cu_seqlens_q")
    whole = "an int from 0 on"
    longest = [checked_count(max_seqlen_q, "max_seqlen_q", whole), checked_count(max_seqlen_k, "max_seqlen_k", whole)]
    for letter, info, most, shape in zip("qk", (of_q, of_k), longest, shapes, strict=False):
        if info.device is None:
            _check_offsets(host_array(info), letter, most, shape[0])
    longest = [min(most, shape[0]) for most, shape in zip(longest, shapes, strict=False)]
    request = Request(
        named["q"],
        named["k"],
        named["v"],
        factor := checked_scale(scale, shapes[0][-1]),
        reduced(limits := checked_limits(causal, window), *longest),
        checked_softcap(softcap, factor),
        checked_flag(return_lse, "return_lse"),
        Sequences(of_q, of_k, *longest),
        checked_sink(sink, named["q"], NAME),
        limits=limits,
    )
    shape = *shapes[0][:2], shapes[2][-1]
    result = None if out is None else check_result(out, shape, request.arrays(), NAME)
    return replace(request, result=result), shape


def _check_offsets(offsets: Any, letter: str, most: int, total: int) -> None:
    field = f"cu_seqlens_{letter}"
    if len(offsets) == 1 and total:
        raise ArgumentError(f"{field}.shape", (1,), f"(sequences + 1,), for {letter} has {total} rows")
    if offsets[0]:
        raise ArgumentError(f"{field}[0]", int(offsets[0]), "0")
    lengths = np.diff(offsets.astype(np.int64))
    for index in np.flatnonzero(lengths < 0)[:1].tolist():
        allowed = f"{offsets[index]} and more, as {field}[{index}]"
        raise ArgumentError(f"{field}[{index + 1}]", int(offsets[index + 1]), allowed)
    if offsets[-1] != total:
        raise ArgumentError(f"{field}[{len(offsets) - 1}]", int(offsets[-1]), f"{total}, the length of {letter}")
    if (longest := int(lengths.max(initial=0))) > most:
        allowed = f"{longest} and more, the length of sequence {int(lengths.argmax())}"
        raise ArgumentError(f"max_seqlen_{letter}", most, allowed)
