"""Repeated calls of attention, attention_varlen and attention_decode, with a driver that launches nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from itertools import combinations
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from stub_driver import RESULT, Array, Launch, StubDriver, fresh
from stub_driver import checked as checked
from stub_driver import stub as stub

from cudatma import attention, attention_decode, attention_varlen
from cudatma.arrays import dense_strides
from cudatma.context import using_runtime
from cudatma.dtypes import BFLOAT16
from cudatma.errors import ArgumentError, ArgumentTypeError
from cudatma.kernels.attention.attention import ATTENTION_CALL, VARLEN_CALL
from cudatma.kernels.attention.decode import DECODE_CALL
from cudatma.kernels.calls import calls_of

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
NAMES = ("q", "k", "v", "out", "sink", "seqlens", "page_table", "cu_seqlens_q", "cu_seqlens_k", "k_scale", "v_scale")
AT = {name: 0x10_0000_0000 * (index + 1) for index, name in enumerate(NAMES)}
Sizes = tuple[int, ...]
Call = Callable[[Sizes], Any]


def rows(name: str, *shape: int, dtype: Any = np.float16, pitch: int = 0) -> Array:
    """Return an array (..., length, heads, dim). With ``pitch``, there are gaps between the rows."""
    size, strides = np.dtype(dtype).itemsize, dense_strides(shape, np.dtype(dtype))
    if pitch:
        step = pitch * size
        strides = ((shape[-3] + 3) * step, step, *strides[-2:])[-len(shape) :]
    return Array(shape, dtype, AT[name], strides=strides)


def heads_first(name: str, batch: int, length: int, heads: int, dim: int) -> Array:
    """Return an array (batch, length, heads, dim) in which the heads axis is outside the rows."""
    _, head, row, one = dense_strides((batch, heads, length, dim), np.dtype(np.float16))
    return Array((batch, length, heads, dim), np.float16, AT[name], strides=(heads * head, row, head, one))


def vector(name: str, size: int, dtype: Any = np.float32) -> Array:
    return Array((size,), dtype, AT[name])


def plain(
    sizes: Sizes, heads: int = 4, kv_heads: int = 2, dims: tuple[int, int] = (64, 64), dtype: Any = np.float16
) -> list[Array]:
    batch, q_length, k_length = sizes
    q = rows("q", batch, q_length, heads, dims[0], dtype=dtype)
    k, v = (rows(name, batch, k_length, kv_heads, dim, dtype=dtype) for name, dim in zip("kv", dims, strict=True))
    return [q, k, v]


def packed(sizes: Sizes) -> dict[str, Array]:
    """Return arrays that are parts of larger arrays, and a result with gaps."""
    batch, q_length, k_length = sizes
    q, out = (rows(name, batch, q_length, 4, 64, pitch=pitch) for name, pitch in (("q", 3 * 4 * 64), ("out", 512)))
    k, v = (rows(name, batch, k_length, 4, 64, pitch=2 * 4 * 64) for name in "kv")
    return {"q": q, "k": k, "v": v, "out": out}


def sequences(sizes: Sizes, dim: int = 64, **options: Any) -> Any:
    count, q_total, k_total, max_q, max_k = sizes
    arrays = rows("q", q_total, 4, dim), rows("k", k_total, 2, dim), rows("v", k_total, 2, dim)
    begins = [vector(f"cu_seqlens_{name}", count + 1, np.int32) for name in "qk"]
    return attention_varlen(*arrays, *begins, max_seqlen_q=max_q, max_seqlen_k=max_k, **options)


def paged(sizes: Sizes, page_size: int = 16, pages: int = 64, cache: Any = np.float16, **options: Any) -> Any:
    batch, q_length = sizes
    k, v = (rows(name, 500, page_size, 2, 64, dtype=cache) for name in "kv")
    q = options.pop("q", None) or rows("q", batch, q_length, 8, 64)
    table = Array((batch, pages), np.int32, AT["page_table"])
    return attention_decode(q, k, v, vector("seqlens", batch, np.int32), page_table=table, **options)


def contiguous(sizes: Sizes, **options: Any) -> Any:
    """Return calls with a contiguous cache, whose capacity is one of the sizes."""
    batch, q_length, capacity = (*sizes, 4096)[:3]
    k, v = (heads_first(name, batch, capacity, 2, 64) for name in "kv")
    return attention_decode(rows("q", batch, q_length, 8, 64), k, v, vector("seqlens", batch, np.int32), **options)


#: Calls as functions of batch, q_length and k_length.
ATTENTION: dict[str, Call] = {
    "full": lambda sizes: attention(*plain(sizes)),
    "causal, lse": lambda sizes: attention(*plain(sizes), causal=True, return_lse=True),
    "window": lambda sizes: attention(*plain(sizes), window=(100, 30)),
    "causal, window, sink": lambda sizes: attention(
        *plain(sizes), causal=True, window=(100, 0), sink=vector("sink", 4), return_lse=True
    ),
    "softcap": lambda sizes: attention(*plain(sizes, 1, 1), softcap=30.0, scale=0.5),
    "bf16, 192 and 128": lambda sizes: attention(*plain(sizes, 2, 2, (192, 128), BFLOAT16), causal=True),
    "version": lambda sizes: attention(*plain(sizes), version="a2"),
    "out, gaps": lambda sizes: attention(**packed(sizes), causal=True),
    "one head, any stride": lambda sizes: attention(
        *(
            Array((*shape, 1, 64), np.float16, AT[name], strides=(shape[1] * 128, 128, -6, 2))
            for name, shape in zip("qkv", (sizes[:2], sizes[::2], sizes[::2]), strict=True)
        )
    ),
    "heads first": lambda sizes: attention(
        *(heads_first(name, sizes[0], length, 4, 64) for name, length in zip("qkv", sizes[1:2] + sizes[2:] * 2))  # noqa: B905
    ),
}
#: Calls as functions of the number of sequences, their total lengths, and the longest ones.
VARLEN: dict[str, Call] = {
    "full": sequences,
    "causal, lse": lambda sizes: sequences(sizes, causal=True, return_lse=True),
    "window, sink": lambda sizes: sequences(sizes, window=(100, 30), sink=vector("sink", 4)),
    "out": lambda sizes: sequences(sizes, dim=128, out=rows("out", sizes[1], 4, 128, pitch=1024)),
}
#: Calls as functions of batch and q_length.
DECODE: dict[str, Call] = {
    "pages": paged,
    "pages of 5 keys": lambda sizes: paged(sizes, 5, return_lse=True),
    "window, sink, out": lambda sizes: paged(
        sizes, window=(100, 0), sink=vector("sink", 8), out=rows("out", *sizes, 8, 64, pitch=1024)
    ),
    "q in a larger array": lambda sizes: paged(sizes, q=rows("q", *sizes, 8, 64, pitch=768)),
    "e4m3": lambda sizes: paged(sizes, cache=E4M3, k_scale=0.5, v_scale=vector("v_scale", 2)),
    "contiguous": contiguous,
    "contiguous, capacities": lambda sizes: contiguous((*sizes, 40 + sizes[0]), window=(80, 0)),
}
CALLS = {"attention": ATTENTION, "attention_varlen": VARLEN, "attention_decode": DECODE}
ALL = [(family, name) for family, calls in CALLS.items() for name in calls]
#: Sizes with which windows exclude keys.
LARGER: dict[str, list[Sizes]] = {
    "attention": [(2, 700, 900), (3, 701, 905), (20, 2000, 120), (4, 70, 9000)],
    "attention_varlen": [(3, 700, 900, 300, 400), (4, 710, 904, 301, 402), (90, 8000, 8001, 120, 130)],
    "attention_decode": [(200, 2), (203, 2), (2, 2), (1000, 2)],
}


def all_sizes(family: str, count: int) -> list[Sizes]:
    """Return random tuples of sizes, each with neighbors that differ in only one size."""
    rng = random.Random(count)
    choices: dict[str, list[list[int]]] = {
        "attention": [[1, 2, 3, 40], [1, 2, 30, 64, 129, 700, 5000], [1, 2, 65, 101, 102, 700, 5000]],
        "attention_varlen": [[1, 2, 9], [1, 65, 700, 5000], [1, 90, 700, 9000], [1, 31, 64, 600], [1, 101, 102, 8000]],
        "attention_decode": [[1, 2, 3, 17, 200, 2000], [1, 1, 2, 5]],
    }
    found: list[Sizes] = []
    for _ in range(count):
        sizes = [rng.choice(values) for values in choices[family]]
        found.append(tuple(sizes))
        changed = rng.randrange(len(sizes))
        sizes[changed] = rng.choice(choices[family][changed])
        found.append(tuple(sizes))
    return found


def launched(stub: StubDriver, call: Call, sizes: Sizes) -> tuple[list[Launch], list[tuple[int, ...]]]:
    """Return the launches of a call, and the shapes of its results."""
    stub.launches.clear()
    done = call(sizes)
    return list(stub.launches), [one.shape for one in (done if isinstance(done, tuple) else (done,))]


@pytest.mark.sweep(10)
@pytest.mark.parametrize(("family", "name"), ALL)
def test_other_sizes_get_the_arguments_of_a_first_call(stub: StubDriver, family: str, name: str) -> None:
    """After all other calls, each call launches what it would launch in a new process."""
    call, warm = CALLS[family][name], fresh()
    for sizes in all_sizes(family, 20):
        with using_runtime(fresh()):
            expected = launched(stub, call, sizes)
        assert len(expected[0]) == 1
        with using_runtime(warm):
            assert launched(stub, call, sizes) == expected, sizes
            assert launched(stub, call, sizes) == expected, f"{sizes}, repeated"


@pytest.mark.parametrize(("family", "name"), ALL)
def test_other_sizes_of_a_loaded_kernel_are_not_checked(
    stub: StubDriver, checked: list[str], family: str, name: str
) -> None:
    call, known = CALLS[family][name], LARGER[family]
    for sizes in known:
        call(sizes)
    plans = stub.plans
    checked.clear()
    for which in (ATTENTION_CALL, VARLEN_CALL, DECODE_CALL):
        calls_of(which).calls.clear()
    for sizes in known:
        call(sizes)
    assert (stub.plans, checked) == (plans, [])


@pytest.mark.parametrize("call", [ATTENTION["heads first"], contiguous])
def test_keys_whose_heads_are_outside_of_rows_may_grow(stub: StubDriver, checked: list[str], call: Call) -> None:
    """The stride between heads depends on the length of the sequence."""
    for k_length in (900, 901, 902):
        call((2, 1, k_length))
    assert (stub.plans, len(checked)) == (1, 1)


#: Arguments of valid calls with all kinds of arrays.
GIVEN: dict[Any, dict[str, Any]] = {
    attention: {
        "q": rows("q", 2, 70, 4, 64),
        "k": rows("k", 2, 90, 2, 64),
        "v": rows("v", 2, 90, 2, 64),
        "sink": vector("sink", 4),
        "out": rows("out", 2, 70, 4, 64),
        "return_lse": True,
        "window": (1, None),
        "scale": 1.0,
    },
    attention_varlen: {
        "q": rows("q", 70, 4, 64),
        "k": rows("k", 90, 2, 64),
        "v": rows("v", 90, 2, 64),
        "cu_seqlens_q": vector("cu_seqlens_q", 4, np.int32),
        "cu_seqlens_k": vector("cu_seqlens_k", 4, np.int32),
        "max_seqlen_q": 1,
        "max_seqlen_k": 90,
        "out": rows("out", 70, 4, 64),
    },
    attention_decode: {
        "q": rows("q", 2, 1, 4, 64),
        "k_cache": rows("k", 9, 16, 2, 64, dtype=E4M3),
        "v_cache": rows("v", 9, 16, 2, 64, dtype=E4M3),
        "seqlens": vector("seqlens", 2, np.int32),
        "page_table": Array((2, 64), np.int32, AT["page_table"]),
        "k_scale": vector("k_scale", 2),
        "v_scale": 1.0,
        "out": rows("out", 2, 1, 4, 64),
    },
}


@pytest.mark.parametrize("function", GIVEN)
def test_a_repeated_call_launches_for_the_new_addresses(stub: StubDriver, checked: list[str], function: Any) -> None:
    moved, given = 0x40_0000, GIVEN[function]
    function(**given)
    checked.clear()
    arrays = {name: one.at(one.data.ptr + moved) for name, one in given.items() if isinstance(one, Array)}
    done = function(**given | arrays, stream=7)
    assert (done[0] if isinstance(done, tuple) else done) is arrays["out"]
    (one, other), replaced = stub.last(2), {address: address + moved for address in AT.values()}
    assert not checked
    assert (one.stream, other.stream) == (0, 7)
    assert {array.data.ptr - moved for array in arrays.values()} <= set(one.words())
    assert other.words() == [replaced.get(word, word) for word in one.words()]


@pytest.mark.parametrize("function", GIVEN)
def test_both_results_are_made(stub: StubDriver, function: Any) -> None:
    given = GIVEN[function] | {"out": None, "return_lse": True}
    *outer, length, heads, dim = given["q"].shape
    for _ in range(2):
        out, lse = function(**given)
        assert (out.shape, out.dtype, out.data.ptr) == (given["q"].shape, np.float16, RESULT)
        assert (lse.shape, lse.dtype, lse.data.ptr) == ((*outer, heads, length), np.float32, RESULT)
        assert stub.last()[0].words().count(RESULT) >= 2
    assert dim == 64


def batches(name: str, step_bytes: int) -> Array:
    """Return q or out for a call of attention with this stride between sequences."""
    return Array((2, 70, 4, 64), np.float16, AT[name], strides=(step_bytes, 512, 128, 2))


#: Changes of an earlier call and the error of each, None if the changed call is also valid.
CHANGES: list[tuple[Any, dict[str, Any], type[Exception] | None]] = [
    *((attention, {name: GIVEN[attention][name].at(0x5008)}, ArgumentError) for name in ("q", "k", "v", "out")),
    (attention, {"sink": vector("sink", 4).at(0x5002)}, ArgumentError),
    (attention, {"out": GIVEN[attention]["out"].at(AT["q"])}, ArgumentError),
    (attention, {"out": GIVEN[attention]["out"].at(AT["k"] - 16)}, ArgumentError),
    (attention, {"out": GIVEN[attention]["out"].at(AT["sink"] - 16)}, ArgumentError),
    (attention, {"v": Array((2, 90, 2, 64), np.float16, AT["v"], device=1)}, ArgumentError),
    (attention, {"k": rows("k", 2, 90, 2, 64, dtype=BFLOAT16)}, ArgumentTypeError),
    (attention, {"q": rows("q", 2, 70, 4, 64, pitch=260)}, ArgumentError),
    *((attention, {"q": batches("q", step)}, ArgumentError) for step in (70 * 512 + 8, -70 * 512, 1 << 40)),
    (attention, {"out": batches("out", 512)}, ArgumentError),
    (attention, {"causal": True}, None),
    (attention, {"causal": 0}, ArgumentTypeError),
    (attention, {"return_lse": 1}, ArgumentTypeError),
    (attention, {"scale": np.float32(1)}, None),
    (attention, {"scale": True}, ArgumentTypeError),
    (attention, {"window": (True, None)}, ArgumentTypeError),
    (attention, {"window": (1.0, None)}, ArgumentTypeError),
    (attention, {"window": [1, None]}, None),
    (attention, {"version": "a3"}, None),
    (attention_varlen, {"cu_seqlens_k": vector("cu_seqlens_k", 4, np.int32).at(0x5002)}, ArgumentError),
    (attention_varlen, {"out": rows("out", 70, 4, 64).at(AT["cu_seqlens_q"])}, ArgumentError),
    (attention_varlen, {"max_seqlen_q": -1}, ArgumentError),
    (attention_varlen, {"max_seqlen_q": True}, ArgumentTypeError),
    (attention_varlen, {"max_seqlen_k": 90.0}, ArgumentTypeError),
    (attention_decode, {"page_table": Array((2, 65), np.int32, AT["page_table"])}, None),
    (attention_decode, {"page_table": GIVEN[attention_decode]["page_table"].at(0x5002)}, ArgumentError),
    (attention_decode, {"out": GIVEN[attention_decode]["out"].at(AT["v"])}, ArgumentError),
    (attention_decode, {"out": GIVEN[attention_decode]["out"].at(AT["k_scale"])}, ArgumentError),
    (attention_decode, {"v_scale": True}, ArgumentTypeError),
    (attention_decode, {"v_scale": vector("v_scale", 3)}, ArgumentError),
    (attention_decode, {"k_scale": None, "v_scale": vector("k_scale", 2)}, None),
]


def label(value: Any) -> str:
    return getattr(value, "__name__", str(value))


@pytest.mark.parametrize(("function", "changes", "error"), CHANGES, ids=label)
def test_a_changed_call_is_checked(
    stub: StubDriver, checked: list[str], function: Any, changes: dict[str, Any], error: type[Exception] | None
) -> None:
    for _ in range(2):
        function(**GIVEN[function])
    (before,) = stub.last()
    checked.clear()
    stub.launches.clear()
    if error is None:
        function(**GIVEN[function] | changes)
        assert stub.launches
    else:
        with pytest.raises(error):
            function(**GIVEN[function] | changes)
        assert not stub.launches
    assert checked
    function(**GIVEN[function])
    assert stub.last() == [before]


#: Changes of a call's arrays that make another valid call only if all of them are made.
TOGETHER: list[tuple[Any, dict[str, Array]]] = [
    (attention, {name: rows(name, 3, *GIVEN[attention][name].shape[1:]) for name in ("q", "k", "v", "out")}),
    (attention, {name: rows(name, 2, 71, 4, 64) for name in ("q", "out")}),
    (attention, {name: rows(name, 2, 91, 2, 64) for name in ("k", "v")}),
    (attention_varlen, {name: rows(name, 71, 4, 64) for name in ("q", "out")}),
    (attention_varlen, {name: rows(name, 91, 2, 64) for name in ("k", "v")}),
    (attention_varlen, {name: vector(name, 5, np.int32) for name in ("cu_seqlens_q", "cu_seqlens_k")}),
    (attention_decode, {name: rows(name, 2, 2, 4, 64) for name in ("q", "out")}),
    (
        attention_decode,
        {
            "q": rows("q", 3, 1, 4, 64),
            "seqlens": vector("seqlens", 3, np.int32),
            "page_table": Array((3, 64), np.int32, AT["page_table"]),
            "out": rows("out", 3, 1, 4, 64),
        },
    ),
]


@pytest.mark.parametrize(("function", "changes"), TOGETHER, ids=label)
def test_arrays_of_two_calls_do_not_mix(stub: StubDriver, function: Any, changes: dict[str, Array]) -> None:
    """The kernels of both calls are loaded."""
    given = GIVEN[function]
    for _ in range(2):
        function(**given)
        function(**given | changes)
    stub.launches.clear()
    for count in range(1, len(changes)):
        for some in combinations(changes.items(), count):
            with pytest.raises(ArgumentError):
                function(**given | dict(some))
    assert not stub.launches


def test_rows_of_a_longer_result_must_not_reach_the_next_head(stub: StubDriver) -> None:
    """The stride between heads is the same in both calls."""
    for q_length, error in ((70, None), (80, None), (81, ArgumentError)):
        strides = 4 * 80 * 128, 128, 80 * 128, 2
        out = Array((2, q_length, 4, 64), np.float16, AT["out"], strides=strides)
        one = Array((q_length, 4, 64), np.float16, AT["out"], strides=strides[1:])
        for call in (
            lambda out=out, length=q_length: attention(*plain((2, length, 900)), out=out),
            lambda out=one, length=q_length: sequences((9, length, 900, 60, 900), out=out),
        ):
            with nullcontext() if error is None else pytest.raises(error, match=r"^out\.strides"):
                call()


def test_lengths_beyond_32_bits_are_refused(stub: StubDriver) -> None:
    """Rows may be views of a single row, so memory does not limit their number."""
    for k_length, error in ((700, None), (701, None), (2**31, ArgumentError)):
        k, v = (Array((1, k_length, 2, 64), np.float16, AT[name], strides=(256, 0, 128, 2)) for name in "kv")
        with nullcontext() if error is None else pytest.raises(error, match=r"^k_length must be .*got 2147483648"):
            attention(rows("q", 1, 70, 4, 64), k, v)


def test_queries_that_see_no_key_launch_nothing(stub: StubDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    filled: list[str] = []
    monkeypatch.setattr("cudatma.kernels.attention.attention.fill_empty", lambda arrays, _: filled.extend(arrays))
    for _ in range(2):
        attention(*plain((2, 70, 0)), return_lse=True)
        attention(*plain((2, 0, 70)))
    assert not stub.launches
    assert filled == ["q", "k", "v", "out", "lse"] * 2


@pytest.mark.parametrize(
    ("capacity", "cache", "overlaps"), [(200000, np.float16, True), (200000, E4M3, True), (210000, E4M3, False)]
)
def test_a_large_e4m3_cache_is_read_alone(stub: StubDriver, capacity: int, cache: Any, overlaps: bool) -> None:
    """If the cache has 50 MiB or more, the launch waits for the previous one."""
    k, v = (rows(name, 1, capacity, 2, 64, dtype=cache) for name in "kv")
    attention_decode(rows("q", 1, 1, 8, 64), k, v, vector("seqlens", 1, np.int32))
    assert stub.last()[0].programmatic == overlaps
