"""A call of attention, checked: q, k and v, scale, what each query sees, and whether lse is a result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from cudatma.arrays import ArrayInfo, describe
from cudatma.errors import ArgumentError, ArgumentTypeError
from cudatma.kernels.attention.problem import Problem
from cudatma.kernels.attention.tensors import (
    Layout,
    Operand,
    addressable,
    check_disjoint,
    check_shapes,
    operand,
    plain_array,
)
from cudatma.kernels.checks import check_out, check_place, checked_count, checked_flag, real_number

#: What softcap may be at most; what other numbers are below, so that they are finite times log2(e), too.
MOST_SOFTCAP, MOST_NUMBER = 4096, 2.0**127


@dataclass(frozen=True, slots=True)
class Sequences:
    """Sequences of different lengths, one after the other. q, k: int32 arrays of where each begins, and the end.
    max_q, max_k: their greatest lengths, or more."""

    q: Operand
    k: Operand
    max_q: int
    max_k: int

    @property
    def count(self) -> int:
        return self.q.shape[0] - 1


@dataclass(frozen=True, slots=True)
class Mask:
    """The keys that a query sees. Query i of a sequence is at p = i + k_length - q_length, which aligns the last query
    with the last key; it sees keys p - left to p + right. None: all keys on that side."""

    left: int | None = None
    right: int | None = None

    @property
    def is_causal(self) -> bool:
        return self.right == 0

    @property
    def has_window(self) -> bool:
        """Whether there is a limit besides the causal one."""
        return self.left is not None or bool(self.right)


NO_LIMITS = Mask()


@dataclass(frozen=True, slots=True)
class Request:
    """q: (batch, q_length, heads, head_dim), k: (batch, k_length, kv_heads, head_dim), v: (batch, k_length, kv_heads,
    v_head_dim), of strides that tensor maps accept. Of sequences that lie one after the other batch is 1, and the
    lengths are the totals. scale: above 0, of the products of q and k. softcap: 0 for none. sink: (heads,), fp32.
    result: None for one without gaps. limits: the mask of the call; ``mask`` keeps only limits that exclude keys.
    version: of the kernel, "" for any."""

    q: Operand
    k: Operand
    v: Operand
    scale: float
    mask: Mask = Mask()
    softcap: float = 0.0
    has_lse: bool = False
    sequences: Sequences | None = None
    sink: Operand | None = None
    result: Operand | None = None
    limits: Mask = NO_LIMITS
    version: str = ""

    @property
    def out(self) -> Operand:
        """The result, (batch, q_length, heads, v_head_dim); by default without gaps."""
        return self.result or dense_result(self.q, self.v)

    @property
    def operands(self) -> tuple[Operand, Operand, Operand, Operand]:
        """The arrays that a kernel addresses by strides: q, k, v and out."""
        return self.q, self.k, self.v, self.out

    @property
    def heads(self) -> int:
        return self.q.shape[2]

    @property
    def kv_heads(self) -> int:
        return self.k.shape[2]

    @property
    def batch(self) -> int:
        """Sequences."""
        return self.sequences.count if self.sequences else self.q.shape[0]

    @property
    def has_keys(self) -> bool:
        return bool(self.k.shape[1] and self.batch and all(self.lengths))

    @property
    def read(self) -> dict[str, Any]:
        """What a launch reads, by the kernel's names, with None for what this one does not."""
        named = {"q": self.q, "k": self.k, "v": self.v}
        if self.sequences:
            named |= {"cu_seqlens_q": self.sequences.q, "cu_seqlens_k": self.sequences.k}
        return {**named, "sink": self.sink}

    @property
    def lengths(self) -> tuple[int, int]:
        """Queries and keys of a sequence, of the longest where they differ."""
        return (self.sequences.max_q, self.sequences.max_k) if self.sequences else (self.q.shape[1], self.k.shape[1])

    @property
    def without_memory(self) -> Request:
        """The same of layouts, which a plan may keep."""
        of, sequences = Layout.of, self.sequences
        return replace(
            self,
            q=of(self.q),
            k=of(self.k),
            v=of(self.v),
            sink=self.sink and of(self.sink),
            result=self.result and of(self.result),
            sequences=sequences and replace(sequences, q=of(sequences.q), k=of(sequences.k)),
        )

    def problem(self, version: str = "") -> Problem:
        """What has to be computed. ArgumentError where there is nothing: a batch or a length of 0."""
        return Problem(
            self.batch,
            self.heads,
            self.kv_heads,
            *self.lengths,
            self.q.shape[3],
            self.v.shape[3],
            self.q.dtype.name,
            self.mask.is_causal,
            self.mask.has_window,
            self.softcap > 0,
            self.sink is not None,
            self.has_lse,
            self.sequences is not None,
            version or self.version,
        )

    def arrays(self) -> dict[str, Any]:
        """Those that a kernel reads, by the names of the function's arguments."""
        return {name: info for name, info in self.read.items() if info is not None}


def check_call(
    q: Any,
    k: Any,
    v: Any,
    causal: Any = False,
    scale: Any = None,
    window: Any = None,
    softcap: Any = None,
    sink: Any = None,
    out: Any = None,
    return_lse: Any = False,
) -> tuple[Request, tuple[int, ...], ArrayInfo | None]:
    """The request, the shape of the result, and ``out`` if there is one. Raises ArgumentError, ArgumentTypeError."""
    named = {"q": operand(q, "q"), "k": operand(k, "k"), "v": operand(v, "v")}
    query, key, value = named.values()
    check_types(named)
    check_shapes(query.shape, key.shape, value.shape)
    for name, info in named.items():
        check_place(info, name, query, "q", "attention")
    named = {name: addressable(info, name) for name, info in named.items()}
    request = Request(
        named["q"],
        named["k"],
        named["v"],
        factor := checked_scale(scale, query.shape[3]),
        reduced(limits := checked_limits(causal, window), query.shape[1], key.shape[1]),
        checked_softcap(softcap, factor),
        checked_flag(return_lse, "return_lse"),
        sink=checked_sink(sink, query, "attention"),
        limits=limits,
    )
    shape, read = (*query.shape[:3], value.shape[3]), request.arrays()
    result = None if out is None else check_result(out, shape, read, "attention")
    return replace(request, result=result), shape, result


def check_types(named: dict[str, ArrayInfo]) -> None:
    """ArgumentTypeError unless all have the first one's dtype."""
    (first, its), *others = named.items()
    for name, info in others:
        if info.dtype != its.dtype:
            raise ArgumentTypeError(f"{name}.dtype", str(info.dtype), f"{its.dtype}, as {first}")


def check_result(out: Any, shape: tuple[int, ...], named: dict[str, ArrayInfo], function: str) -> ArrayInfo:
    """``out`` of a call whose arrays are these, the first of which it is like, as (batch, length, heads, dim)."""
    info, (first, its) = describe(out, "out"), next(iter(named.items()))
    check_out(info, its.dtype, f"{its.dtype}, as {first}", shape, named, function)
    check_disjoint(info, "out")
    return addressable(info, "out")


def checked_sink(sink: Any, q: ArrayInfo, function: str) -> ArrayInfo | None:
    """Of a call with these queries."""
    if sink is None:
        return None
    heads = q.shape[-2:-1]
    info = plain_array(sink, "sink", "float32", [heads], f"{heads}, a number for each head of q", "None, or ")
    check_place(info, "sink", q, "q", function)
    return info


def checked_scale(scale: Any, head_dim: int) -> float:
    """In fp32; None is 1 / sqrt(head_dim)."""
    return head_dim**-0.5 if scale is None else positive(scale, "scale", "None for 1 / sqrt(head dim)")


def checked_softcap(softcap: Any, scale: float) -> float:
    """In fp32, 0 for none. Kernels multiply by scale / softcap, and compute tanh within 2**-22, of which a larger cap
    would make an error of the scores."""
    number = 0.0 if softcap is None else real_number(softcap, "softcap")
    if softcap is not None and not 0 < number <= MOST_SOFTCAP:
        raise ArgumentError("softcap", softcap, f"above 0, at most {MOST_SOFTCAP}", "None for no cap")
    if number and scale / number >= MOST_NUMBER:
        raise ArgumentError("softcap", softcap, f"above {scale / MOST_NUMBER:.3g}, scale / 2**127")
    return number


def positive(value: Any, field: str, remedy: str) -> float:
    """A number in fp32."""
    number = real_number(value, field)
    if not 0 < number < MOST_NUMBER:
        raise ArgumentError(field, value, "a number above 0 and below 2**127", remedy)
    return number


def checked_limits(causal: Any, window: Any) -> Mask:
    """Return the limits that a call asks for."""
    right = 0 if checked_flag(causal, "causal") else None
    left = None
    if window is not None:
        left, right_of_window = _sides(window)
        right = right_of_window if right is None else right
    return Mask(left, right)


def reduced(limits: Mask, q_length: int, k_length: int) -> Mask:
    """Return the mask of a call with these lengths, or at most these, without limits that exclude no key."""
    left, right = limits.left, limits.right
    left = None if left is not None and left >= k_length - 1 else left
    return Mask(left, None if right is not None and right >= q_length - 1 else right)


def masks_up_to(limits: Mask, length: int) -> Iterator[Mask]:
    """Yield the masks that reduced() returns for lengths up to this one, each kind once."""
    kinds = {}
    for q_length, k_length in product((1, length), repeat=2):
        mask = reduced(limits, q_length, k_length)
        kinds[mask.is_causal, mask.has_window] = mask
    yield from kinds.values()


def dense_result(q: Operand, v: Operand) -> Layout:
    """Return the layout of a result without gaps."""
    batch, length, heads, _ = q.shape
    dim, element = v.shape[3], q.dtype.itemsize
    row = heads * dim * element
    return Layout((batch, length, heads, dim), (length * row, row, dim * element, element), q.dtype)


def _sides(window: Any) -> tuple[int | None, int | None]:
    if not isinstance(window, Sequence) or isinstance(window, (str, bytes)):
        raise ArgumentTypeError("window", type(window).__name__, "None or (left, right)", "(left, 0) ends at the query")
    if len(window) != 2:
        raise ArgumentError("window", tuple(window), "(left, right)")
    return _side(window[0], 0), _side(window[1], 1)


def _side(value: Any, index: int) -> int | None:
    if value is None:
        return None
    return checked_count(value, f"window[{index}]", "a number of keys from 0 on, or None for all")
