"""attention_decode: attention of a few new queries to a cache of keys and values."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any, ClassVar

from cudatma.arrays import ArrayInfo
from cudatma.kernels.arguments import Arguments, Sizes
from cudatma.kernels.attention.attention import check_not_empty, checked_request, kinds_of
from cudatma.kernels.attention.decode_plan import decode_arguments, decode_spec, divide, sizes_for
from cudatma.kernels.attention.decode_request import NAME, DecodeRequest, check_decode
from cudatma.kernels.attention.decode_spec import AttentionDecode
from cudatma.kernels.attention.empty import fill_empty
from cudatma.kernels.attention.reference import decode_reference
from cudatma.kernels.attention.request import masks_up_to, reduced
from cudatma.kernels.attention.tensors import contiguous, resized
from cudatma.kernels.engine import run
from cudatma.kernels.gpu import Gpu
from cudatma.kernels.operation import Checked, Operation
from cudatma.target import get_target


def attention_decode(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    seqlens: Any,
    *,
    page_table: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sink: Any = None,
    out: Any = None,
    return_lse: bool = False,
    backend: str | None = None,
    stream: Any = None,
) -> Any:
    """Compute attention() of new queries to a cache that holds their keys and values already.

    Sequences are divided by the capacity and parts are added up in a fixed order: the result has the same bits in every
    call. TMA loads pages of a multiple of 8 keys; others are copied row by row.

    Parameters
    ----------
    q : array (batch, q_length, heads, dim)
        The last queries of each sequence, each of which sees the keys up to its own.
    k_cache : array (batch, capacity, kv_heads, dim), or (pages, page_size, kv_heads, dim) with a page_table
        Keys of q's dtype, or float8_e4m3fn; pages then have a multiple of 8 keys.
    v_cache : array, as k_cache with v_dim
        Values.
    seqlens : int32 array (batch,)
        Keys of each sequence, the new ones included. The kernel reads them and the page table, so a captured graph sees
        their contents when it runs. In device memory a length below 0 counts as 0 and one beyond the capacity as the
        capacity.
    page_table : int32 array (batch, pages), optional
        page_table[i, j] is the page of the keys from j page_size on of sequence i. Keys and values of a page that the
        cache does not have are zeros. Entries of pages after a sequence's end are not read.
    k_scale, v_scale : float or fp32 array, optional
        Factors of an e4m3 cache: a number, or an array of one element or of one for each head of the cache.
    scale, window, softcap, sink, out, return_lse, backend, stream
        As for attention(). ``lse`` is (batch, heads, q_length).

    Returns
    -------
    array (batch, q_length, heads, v_dim), or that and lse
        As attention().

    Raises
    ------
    ArgumentError, ArgumentTypeError, TargetError, LaunchError, CompileError, DriverError, HazardError
        As attention().
    """
    k_number, k_array = _factor(k_scale)
    v_number, v_array = _factor(v_scale)
    inputs = q, k_cache, v_cache, seqlens, page_table, sink, k_array, v_array
    kinds = kinds_of(window, scale, softcap, return_lse, k_number, v_number)
    options = window, scale, softcap, return_lse, k_number, v_number, kinds
    return run(DECODE_CALL, inputs, out, options, stream, backend)


def _factor(scale: Any) -> tuple[Any, Any]:
    """Return a scale as a number or as an array."""
    return (scale, None) if scale is None or isinstance(scale, Real) else (None, scale)


class AttentionDecodeCall(Operation[DecodeRequest, AttentionDecode]):
    """attention_decode as an operation."""

    name: ClassVar[str] = NAME
    inputs: ClassVar[tuple[str, ...]] = ("q", "k", "v", "seqlens", "page_table", "sink", "k_scale", "v_scale")
    fixed_axes: ClassVar[tuple[int | None, ...]] = (2, 2, 2, 0, 1, None, None, None, 2)
    joins_axes: ClassVar[bool] = False

    def check(
        self, inputs: tuple[Any, ...], out: Any, options: tuple[Any, ...], subject: Any
    ) -> Checked[DecodeRequest]:
        """Validate a call."""
        window, scale, softcap, return_lse, k_number, v_number, _ = options
        q, k, v, seqlens, page_table, sink, k_scale, v_scale = inputs
        request, shape, _ = check_decode(
            q,
            k,
            v,
            seqlens,
            page_table=page_table,
            k_scale=k_number if k_scale is None else k_scale,
            v_scale=v_number if v_scale is None else v_scale,
            scale=scale,
            window=window,
            softcap=softcap,
            sink=sink,
            out=out,
            return_lse=return_lse,
        )
        return checked_request(request, shape)

    def resized(
        self, problem: DecodeRequest, shapes: Sequence[Any], strides_bytes: Sequence[Any], numbers: tuple[int, ...]
    ) -> tuple[DecodeRequest, tuple[int, ...], tuple[int, ...] | None] | None:
        """Return the request with other numbers of sequences, queries, pages, or keys in a cache without pages."""
        q, k, v, seqlens, table, *_, out = shapes
        batch, length, *_ = q
        if seqlens[0] != batch or v[:2] != k[:2] or (out and out[:2] != q[:2]):
            return None
        if (k if table is None else table)[0] != batch or (table and k[1] != problem.k.shape[1]):
            return None
        mask = reduced(problem.limits, length, k[1] * (table[1] if table else 1))
        if (mask.is_causal, mask.has_window) != (problem.mask.is_causal, problem.mask.has_window):
            return None
        layouts = problem.q, problem.k, problem.v, problem.result
        changed = resized(layouts, (q, k, v, out), (*strides_bytes[:3], strides_bytes[-1]))
        if changed is None:
            return None
        table = problem.page_table and contiguous(problem.page_table, table)
        request = DecodeRequest(
            *changed[:3],
            contiguous(problem.seqlens, seqlens),
            table,
            problem.scale,
            mask,
            problem.softcap,
            problem.has_lse,
            problem.sink,
            problem.k_scale,
            problem.v_scale,
            changed[3],
            problem.limits,
        )
        return request, (*q[:3], v[3]), (batch, q[2], q[1]) if problem.has_lse else None

    def masks(self, problem: DecodeRequest) -> tuple[int, ...]:
        """TMA or vectors read q, k and v and write out; the others are read by elements."""
        return 15, 15, 15, 3, 3, 3, 3, 3, 15

    def plan_key(self, problem: DecodeRequest) -> Hashable:
        """All that a kernel and its tensor maps depend on, besides sizes."""
        mask, (q, k, v, out), table = problem.mask, problem.operands, problem.page_table
        flags = mask.is_causal, mask.has_window, problem.softcap > 0, problem.sink is not None, problem.has_lse
        scales = [None if isinstance(one, float) else one.shape for one in (problem.k_scale, problem.v_scale)]
        shapes = q.shape[2:], None if table is None else k.shape[1], k.shape[2:], v.shape[2:]
        return q.dtype, k.dtype, shapes, *[info.strides_bytes[1] for info in (q, k, v, out)], flags, *scales

    def without_kernel(self, problem: DecodeRequest, arrays: Mapping[str, ArrayInfo], stream: int | None) -> bool:
        """Write the results of queries that see no key."""
        if problem.has_keys:
            return False
        fill_empty(arrays, stream)
        return True

    def configure(self, problem: DecodeRequest, gpu: Gpu, memo: dict[Any, Any]) -> AttentionDecode:
        """Return the kernel for a request."""
        spec: AttentionDecode | None = memo.get("spec")
        if spec is None:
            spec = memo["spec"] = decode_spec(problem, get_target(gpu.target))
        return spec

    def kernels(self, problem: DecodeRequest, config: AttentionDecode) -> tuple[tuple[str, Any], ...]:
        """Return the one kernel."""
        return ((config.template, config),)

    def kernels_up_to(self, checked: Checked[DecodeRequest], max_m: int, gpu: Gpu) -> Iterator[tuple[str, Any]]:
        """Yield the kernel for each kind of mask; it depends on no other size."""
        request = checked.problem
        check_not_empty(request)
        for mask in masks_up_to(request.limits, max_m):
            spec = decode_spec(replace(request, mask=mask), get_target(gpu.target))
            yield spec.template, spec

    def arguments(
        self, problem: DecodeRequest, config: AttentionDecode, gpu: Gpu, resident: tuple[int, ...]
    ) -> tuple[Arguments, ...]:
        """Return the launch of a request."""
        return (decode_arguments(problem, divide(problem, gpu, config), get_target(gpu.target)),)

    def sizes(
        self,
        problem: DecodeRequest,
        config: AttentionDecode,
        gpu: Gpu,
        resident: tuple[int, ...],
        memo: dict[Any, Any],
    ) -> tuple[Sizes, ...]:
        """Return the sizes of the launch."""
        of_request = memo.get("sizes")
        if of_request is None:
            of_request = memo["sizes"] = sizes_for(problem, config)
        return (of_request(problem, divide(problem, gpu, config)),)

    def reference(self, problem: DecodeRequest, arrays: Mapping[str, ArrayInfo]) -> None:
        """Compute the result in float64, rounded once."""
        decode_reference(problem, arrays)


DECODE_CALL = AttentionDecodeCall()
