"""A call of attention_decode, checked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

from cudatma.arrays import ArrayInfo
from cudatma.errors import ArgumentError
from cudatma.kernels.attention.decode_spec import LEAST_BOX_ROWS
from cudatma.kernels.attention.problem import CACHE_TYPE, OPERAND_TYPES
from cudatma.kernels.attention.request import (
    NO_LIMITS,
    Mask,
    check_result,
    check_types,
    checked_limits,
    checked_scale,
    checked_sink,
    checked_softcap,
    dense_result,
    positive,
    reduced,
)
from cudatma.kernels.attention.tensors import Layout, Operand, addressable, check_shapes, operand, plain_array
from cudatma.kernels.checks import check_place, checked_flag
from cudatma.kernels.host import host_array

NAME = "attention_decode"


@dataclass(frozen=True, slots=True)
class DecodeRequest:
    """q: (batch, q_length, heads, head_dim). k, v: (batch, capacity, kv_heads, dim), or (pages, page_size, kv_heads,
    dim) with a page_table (batch, pages of a sequence). seqlens: (batch,). sink: (heads,), fp32. Each as
    a kernel sees it. k_scale, v_scale: of an e4m3 cache, numbers or arrays of one for each head or for all."""

    q: Operand
    k: Operand
    v: Operand
    seqlens: Operand
    page_table: Operand | None
    scale: float
    mask: Mask
    softcap: float = 0.0
    has_lse: bool = False
    sink: Operand | None = None
    k_scale: float | Operand = 1.0
    v_scale: float | Operand = 1.0
    result: Operand | None = None
    limits: Mask = NO_LIMITS

    @property
    def out(self) -> Operand:
        """The result, (batch, q_length, heads, v_head_dim); by default without gaps."""
        return self.result or dense_result(self.q, self.v)

    @property
    def operands(self) -> tuple[Operand, Operand, Operand, Operand]:
        """The arrays that a kernel addresses by strides: q, k, v and out."""
        return self.q, self.k, self.v, self.out

    @property
    def without_memory(self) -> DecodeRequest:
        """The same of layouts, which a plan may keep."""
        arrays = {name: info for name, info in (self.read | {"result": self.result}).items() if info is not None}
        layouts: dict[str, Any] = {name: Layout.of(info) for name, info in arrays.items()}
        return replace(self, **layouts)

    @property
    def capacity(self) -> int:
        """Keys that a sequence may have."""
        return self.k.shape[1] * (1 if self.page_table is None else self.page_table.shape[1])

    @property
    def has_keys(self) -> bool:
        return bool(self.k.shape[0] and self.capacity)

    @property
    def read(self) -> dict[str, Any]:
        """What a launch reads, by the kernel's names, with None for what this one does not."""
        cache = {"q": self.q, "k": self.k, "v": self.v}
        scales = {"k_scale": self.k_scale, "v_scale": self.v_scale}
        arrays = {name: None if isinstance(scale, float) else scale for name, scale in scales.items()}
        return {**cache, "seqlens": self.seqlens, "page_table": self.page_table, "sink": self.sink, **arrays}

    @property
    def has_fp8_cache(self) -> bool:
        return self.k.dtype.itemsize == 1  # no other type of a cache has one byte

    @property
    def rows(self) -> int:
        """Queries of a sequence, of all heads that share one of k and v."""
        return self.q.shape[1] * (self.q.shape[2] // self.k.shape[2])

    def arrays(self) -> dict[str, Any]:
        """Those that a kernel reads, by the names of the function's arguments."""
        of_function = {"k": "k_cache", "v": "v_cache"}
        return {of_function.get(name, name): info for name, info in self.read.items() if info is not None}


def check_decode(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    seqlens: Any,
    *,
    page_table: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    scale: Any = None,
    window: Any = None,
    softcap: Any = None,
    sink: Any = None,
    out: Any = None,
    return_lse: Any = False,
) -> tuple[DecodeRequest, tuple[int, ...], ArrayInfo | None]:
    """The request, the shape of the result, and ``out`` if there is one. Lengths and pages are compared in host memory
    only. Raises ArgumentError, ArgumentTypeError."""
    caches = {
        name: operand(array, name, types=(*OPERAND_TYPES, CACHE_TYPE))
        for name, array in (("k_cache", k_cache), ("v_cache", v_cache))
    }
    named = {"q": operand(q, "q"), **caches}
    query, key, value = named.values()
    check_types(caches if key.dtype.name == CACHE_TYPE else named)
    check_shapes(query.shape, key.shape, value.shape, has_batch=page_table is None, is_cache=True)
    batch = query.shape[0]
    lengths = f"({batch},), a length for each sequence of q"
    found = {"seqlens": plain_array(seqlens, "seqlens", "int32", [(batch,)], lengths)}
    if page_table is not None:
        found["page_table"] = plain_array(page_table, "page_table", "int32")
        if len(shape := found["page_table"].shape) != 2 or shape[0] != batch:
            raise ArgumentError(
                "page_table.shape", shape, f"({batch}, pages of a sequence), a row for each sequence of q"
            )
    for name, info in (named | found).items():
        check_place(info, name, query, "q", NAME)
    query, key, value = (addressable(info, name) for name, info in named.items())
    table = found.get("page_table")
    capacity = key.shape[1] * (1 if table is None else table.shape[1])
    request = DecodeRequest(
        query,
        key,
        value,
        found["seqlens"],
        table,
        factor := checked_scale(scale, query.shape[3]),
        reduced(limits := checked_limits(True, window), query.shape[1], capacity),
        checked_softcap(softcap, factor),
        checked_flag(return_lse, "return_lse"),
        checked_sink(sink, query, NAME),
        _checked_kv_scale(k_scale, "k_scale", key, query),
        _checked_kv_scale(v_scale, "v_scale", key, query),
        limits=limits,
    )
    if request.has_fp8_cache and table is not None and key.shape[1] % LEAST_BOX_ROWS:
        raise ArgumentError(
            "k_cache.shape", key.shape, f"pages of a multiple of {LEAST_BOX_ROWS} keys, in {CACHE_TYPE}"
        )
    if query.device is None:
        _check_content(request)
    shape = *query.shape[:3], value.shape[3]
    result = None if out is None else check_result(out, shape, request.arrays(), NAME)
    return replace(request, result=result), shape, result


def _checked_kv_scale(scale: Any, field: str, cache: ArrayInfo, q: ArrayInfo) -> float | ArrayInfo:
    """A finite number above 0, or an array that the kernel reads: one for each head of the cache, or one for all."""
    if scale is None:
        return 1.0
    if cache.dtype.name != CACHE_TYPE:
        raise ArgumentError(field, "a scale", f"None for a cache of {cache.dtype}")
    if isinstance(scale, Real):
        return positive(scale, field, "None for 1")
    heads = cache.shape[2:3]
    allowed = f"{heads}, a number for each head of the cache, or (1,)"
    info = plain_array(scale, field, "float32", [(), (1,), heads], allowed, "None, a number above 0, or ")
    check_place(info, field, q, "q", NAME)
    return info


def _check_content(request: DecodeRequest) -> None:
    """Raise ArgumentError for a length beyond the capacity, or a page that the cache does not have."""
    named = {name: host_array(info) for name, info in request.arrays().items()}
    lengths, table = named["seqlens"], named.get("page_table")
    pages, page_size = request.k.shape[:2]
    if not pages and lengths.any():
        raise ArgumentError("k_cache.shape", request.k.shape, "a page and more, for seqlens has keys")
    for index, length in enumerate(lengths.tolist()):
        if not 0 <= length <= request.capacity:
            allowed = f"0 to {request.capacity}, the keys that a sequence may have in the cache"
            raise ArgumentError(f"seqlens[{index}]", length, allowed)
        if table is None:
            continue
        for place, page in enumerate(table[index, : -(-length // page_size) if length else 0].tolist()):
            if not 0 <= page < pages:
                allowed = f"0 to {pages - 1}, a page of the cache"
                raise ArgumentError(f"page_table[{index}, {place}]", page, allowed)
