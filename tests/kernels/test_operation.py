"""The engine with a driver that launches nothing: repeated calls, calls with a new M, and changed calls."""

from __future__ import annotations

import gc
import os
import random
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from stub_driver import RESULT, Array, Launch, StubDriver, fresh, packed_weight
from stub_driver import checked as checked
from stub_driver import stub as stub

from cudatma import LaunchError, attention, copy, gemm, marlin_gemm
from cudatma.context import Cache, using_runtime
from cudatma.descriptor import codec
from cudatma.dtypes import BFLOAT16
from cudatma.errors import ArgumentError, ArgumentTypeError
from cudatma.kernels.calls import calls_of, facts_of
from cudatma.kernels.gemm.gemm import GEMM_CALL
from cudatma.kernels.marlin.gemm import MARLIN_GEMM
from cudatma.quantization.scale_range import ScaleFit

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
A, B, OUT, BIAS, A_SCALE, B_SCALE = (0x10_0000_0000 * (index + 1) for index in range(6))


def rows(m: int, k: int, dtype: Any = np.float16, *, pitch: int = 0, address: int = A) -> Array:
    """Return a matrix (m, k) with ``pitch`` elements from one row to the next."""
    size = np.dtype(dtype).itemsize
    return Array((m, k), dtype, address, strides=((pitch or k) * size, size))


def columns(k: int, n: int, dtype: Any = np.float16, *, pitch: int = 0, address: int = B) -> Array:
    """Return a matrix (k, n) with contiguous columns."""
    size = np.dtype(dtype).itemsize
    return Array((k, n), dtype, address, strides=(size, (pitch or k) * size))


def vector(n: int, dtype: Any, address: int) -> Array:
    return Array((n,), dtype, address)


Call = Callable[[int], object]


def marlin_calls(**options: Any) -> dict[str, Call]:
    """Return calls of marlin_gemm as functions of M."""
    k, n = 1024, 1536
    plain, ordered = packed_weight(k, n), packed_weight(k, n, act_order=True)
    small, odd = packed_weight(1000, 200, group_size=-1), packed_weight(1000, 201, zeros=True, dtype="bfloat16")
    exponents = [packed_weight(k, n, fit=ScaleFit("shifted", p), address=(p + 1) << 40) for p in (0, 1, 2)]
    return {
        "plain": lambda m: marlin_gemm(rows(m, k), plain),
        "out": lambda m: marlin_gemm(rows(m, k), plain, out=rows(m, n, pitch=n + 8, address=OUT)),
        "bias": lambda m: marlin_gemm(rows(m, k), plain, bias=vector(n, np.float16, BIAS)),
        "act-order": lambda m: marlin_gemm(rows(m, k), ordered),
        "odd pitch": lambda m: marlin_gemm(rows(m, k, pitch=k + 1), plain),
        "programmatic": lambda m: marlin_gemm(rows(m, k), plain, programmatic=True),
        "batch-invariant": lambda m: marlin_gemm(rows(m, k), plain, batch_invariant=True),
        "whole columns": lambda m: marlin_gemm(rows(m, 1000), small),
        "zeros, odd N": lambda m: marlin_gemm(rows(m, 1000, BFLOAT16), odd),
        "other exponents": lambda m: marlin_gemm(rows(m, k), exponents[m % 3]),
        "(B, T, K)": lambda m: marlin_gemm(Array((2, m, k), np.float16, A), plain),
        "(1, T, K), strides": lambda m: marlin_gemm(
            Array((1, m, k), np.float16, A, strides=(1 << 24, 2 * k, 2)), plain
        ),
        "(A, 1, T, K), strides": lambda m: marlin_gemm(
            Array((m % 3 + 1, 1, m, k), np.float16, A, strides=(2 * k * m, 7, 2 * k, 2)), plain
        ),
    }


def gemm_calls() -> dict[str, Call]:
    """Return calls of gemm as functions of M."""
    k, n = 1024, 1000
    right, bias = columns(k, n), vector(n, np.float16, BIAS)
    fp8 = columns(k, n, E4M3)
    blocks = rows(8, 8, np.float32, address=B_SCALE)
    scales = {"b_scale": vector(n, np.float32, B_SCALE)}
    return {
        "RC": lambda m: gemm(rows(m, k), right),
        "RR": lambda m: gemm(rows(m, k), rows(k, n, address=B)),
        "CR": lambda m: gemm(columns(m, k, pitch=4096, address=A), rows(k, n, address=B)),
        "CC": lambda m: gemm(columns(m, k, pitch=4096, address=A), right),
        "pitches": lambda m: gemm(rows(m, k, pitch=k + 8), right, out=rows(m, n, pitch=n + 3, address=OUT)),
        "epilogue": lambda m: gemm(rows(m, k), right, bias=bias, alpha=0.5, activation="gelu"),
        "beta": lambda m: gemm(rows(m, k), right, beta=2.0, out=rows(m, n, np.float32, address=OUT)),
        "bf16": lambda m: gemm(rows(m, k, BFLOAT16), columns(k, n, BFLOAT16), batch_invariant=True),
        "fp8, one scale": lambda m: gemm(rows(m, k, E4M3), fp8, a_scale=vector(1, np.float32, A_SCALE), b_scale=2.0),
        "fp8, 0-d scale": lambda m: gemm(rows(m, k, E4M3), fp8, a_scale=Array((), np.float32, A_SCALE)),
        "fp8, rows": lambda m: gemm(rows(m, k, E4M3), fp8, a_scale=vector(m, np.float32, A_SCALE), **scales),
        "fp8, blocks": lambda m: gemm(
            rows(m, k, E4M3), fp8, a_scale=columns(m, 8, np.float32, pitch=4096, address=A_SCALE), b_scale=blocks
        ),
        "large": lambda m: gemm(rows(m, 2048), columns(2048, 16384)),
        "version": lambda m: gemm(rows(m, k), right, version="v3"),
        "(B, T, K)": lambda m: gemm(Array((3, m, k), np.float16, A), right),
        "(B, T, K), strides": lambda m: gemm(Array((2, m, k), np.float16, A, strides=(1 << 24, 2 * k, 2)), right),
        "batch": lambda m: gemm(Array((2, m, k), np.float16, A), Array((2, k, n), np.float16, B)),
    }


CALLS: dict[str, Callable[[], dict[str, Call]]] = {
    "marlin": marlin_calls,
    "gemm": gemm_calls,
}


def launched(stub: StubDriver, call: Call, m: int) -> list[Launch]:
    """Return the launches of a call."""
    stub.launches.clear()
    call(m)
    return list(stub.launches)


def sizes(count: int, seed: int) -> list[int]:
    """Return small and large values of M, including neighbors and all of 1 to 8.

    They include 181 and 182, between which the largest GEMM ceases to be memory-bound.
    """
    rng = random.Random(seed)
    found = [int(2 ** rng.uniform(0, 11.5)) for _ in range(count)]
    found = [*range(1, 9), 181, 182, *found, *(m + 1 for m in found[: count // 3])]
    rng.shuffle(found)
    return found


@pytest.mark.sweep(10)
@pytest.mark.parametrize(("family", "name"), [(family, name) for family, calls in CALLS.items() for name in calls()])
def test_a_new_m_gets_the_arguments_of_a_first_call(stub: StubDriver, family: str, name: str) -> None:
    """After all other values of M, each M launches what it would launch in a new process."""
    call, warm = CALLS[family]()[name], fresh()
    for m in sizes(24, seed=len(name)):
        with using_runtime(fresh()):
            wanted = launched(stub, call, m)
        with using_runtime(warm):
            assert launched(stub, call, m) == wanted, f"M = {m}"
            assert launched(stub, call, m) == wanted, f"M = {m}, repeated"


#: Calls whose checks look at each new M.
NOT_RESIZED = ("batch", "fp8, blocks", "(B, T, K), strides", "(A, 1, T, K), strides")


@pytest.mark.parametrize(("family", "name"), [(family, name) for family, calls in CALLS.items() for name in calls()])
def test_a_new_m_of_a_loaded_kernel_is_not_checked(
    stub: StubDriver, checked: list[str], family: str, name: str
) -> None:
    call = CALLS[family]()[name]
    known = [m for m in sizes(12, seed=1) if m > 1]
    for m in known:
        call(m)
    plans = stub.plans
    checked.clear()
    for operation_of_call in (MARLIN_GEMM, GEMM_CALL):
        calls_of(operation_of_call).calls.clear()
    for m in known:
        call(m)
    assert stub.plans == plans
    assert bool(checked) == (name in NOT_RESIZED)


def test_a_new_length_whose_results_are_too_far_apart_is_refused(stub: StubDriver) -> None:
    """TMA's strides are limited to 2**40 bytes, and the stride of the result depends on the length."""
    kv = Array((3, 330, 4, 128))

    def call(length: int) -> list[Launch]:
        attention(Array((3, length, 4, 128), address=A, strides=(1024, 3072, 256, 2)), kv, kv)
        return stub.last()

    first = call(1000)
    call(1001)
    for _ in range(2):
        with pytest.raises(ArgumentError, match=r"q\.shape must be .*stay below 2\*\*40 bytes"):
            call(1 << 30)
    assert call(1000) == first


WEIGHT = packed_weight(128, 64)


def marlin(**changes: Any) -> Any:
    """Call marlin_gemm for 4 rows, with these arguments changed."""
    given: dict[str, Any] = {"x": rows(4, 128), "w": WEIGHT, "out": rows(4, 64, address=OUT)} | changes
    return marlin_gemm(**given)


def dense(**changes: Any) -> Any:
    """Call gemm for 4 rows with a bias and scales, with these arguments changed."""
    given: dict[str, Any] = {
        "a": rows(4, 128),
        "b": columns(128, 64),
        "bias": vector(64, np.float16, BIAS),
        "b_scale": vector(64, np.float32, B_SCALE),
        "alpha": 2.0,
        "out": rows(4, 64, address=OUT),
    }
    return gemm(**given | changes)


@pytest.mark.parametrize("call", [marlin, dense])
def test_a_repeated_call_launches_for_the_new_addresses(stub: StubDriver, checked: list[str], call: Any) -> None:
    moved, first = 0x40_0000, "x" if call is marlin else "a"
    call()
    checked.clear()
    given, out = rows(4, 128, address=A + moved), rows(4, 64, address=OUT + moved)
    assert call(**{first: given}, out=out, stream=7) is out
    (one, other), replaced = stub.last(2), {A: A + moved, OUT: OUT + moved}
    assert not checked
    assert (one.stream, other.stream) == (0, 7)
    assert {A, OUT} <= set(one.words())
    assert other.words() == [replaced.get(word, word) for word in one.words()]


def test_weights_of_one_format_share_a_launch(stub: StubDriver, checked: list[str]) -> None:
    weights = [packed_weight(128, 64, address=(one + 1) << 44) for one in range(2)]
    marlin(w=weights[0])
    checked.clear()
    marlin(w=weights[1])
    marlin(w=weights[0])
    first, second, third = stub.last(3)
    assert first == third
    places = [(w.qweight.data.ptr, w.scales.data.ptr) for w in weights]
    moved = dict(zip(*places, strict=True))
    assert second.words() == [moved.get(word, word) for word in first.words()]
    assert (stub.plans, checked) == (1, [])


def test_results_are_made_on_the_stream_of_the_launch(stub: StubDriver) -> None:
    for stream in (None, 9):
        results = [marlin(out=None, stream=stream) for _ in range(2)]
        assert all((one.shape, one.dtype, one.data.ptr) == ((4, 64), np.float16, RESULT) for one in results)
        assert [launch.stream for launch in stub.last(2)] == [stream or 0] * 2


#: Changes of a call that was made before, and the error of each; None if the changed call is valid, too.
CHANGES: list[tuple[Any, dict[str, Any], type[Exception] | None]] = [
    (marlin, {"x": rows(4, 128, address=A + 2)}, None),
    (marlin, {"x": rows(4, 128, address=0)}, ArgumentError),
    (marlin, {"out": rows(4, 64, address=0)}, ArgumentError),
    (marlin, {"x": rows(4, 128, pitch=136)}, None),
    (marlin, {"x": rows(4, 128, pitch=129)}, None),
    (marlin, {"x": Array((4, 128), np.float16, A, device=1)}, ArgumentError),
    (marlin, {"x": rows(4, 128, BFLOAT16)}, ArgumentTypeError),
    (marlin, {"x": rows(4, 120)}, ArgumentError),
    (marlin, {"x": rows(4, 128, address=OUT)}, ArgumentError),
    (marlin, {"out": rows(4, 64, address=A + 4 * 256 - 16)}, ArgumentError),
    (marlin, {"out": rows(4, 64, address=OUT + 2)}, ArgumentError),
    (marlin, {"out": rows(4, 64, pitch=72, address=OUT)}, None),
    (marlin, {"bias": vector(64, np.float16, BIAS)}, None),
    (marlin, {"programmatic": True}, None),
    (marlin, {"batch_invariant": True}, None),
    (marlin, {"w": packed_weight(128, 64, act_order=True)}, None),
    (marlin, {"w": packed_weight(128, 64, fit=ScaleFit("shifted", 1))}, None),
    (dense, {"a": rows(4, 128, address=OUT + 8)}, ArgumentError),
    (dense, {"b": rows(128, 64, address=B)}, None),
    (dense, {"b": columns(128, 64, address=OUT - 8)}, ArgumentError),
    (dense, {"out": rows(4, 64, address=BIAS - 16)}, ArgumentError),
    (dense, {"out": rows(4, 64, address=OUT + 2)}, None),
    (dense, {"out": rows(4, 64, np.float32, address=OUT)}, ArgumentTypeError),
    (dense, {"bias": vector(64, np.float16, BIAS + 1)}, ArgumentError),
    (dense, {"b_scale": vector(64, np.float32, B_SCALE + 2)}, ArgumentError),
    (dense, {"b_scale": vector(1, np.float32, B_SCALE)}, None),
    (dense, {"b_scale": 2.0}, None),
    (dense, {"alpha": 2}, None),
    (dense, {"alpha": np.float32(2)}, None),
    (dense, {"alpha": [2.0]}, ArgumentTypeError),
    (dense, {"beta": True}, ArgumentTypeError),
    (dense, {"activation": "relu"}, None),
    (dense, {"version": "v3"}, None),
    (dense, {"batch_invariant": 0}, ArgumentTypeError),
]


@pytest.mark.parametrize(
    ("call", "changes", "error"), CHANGES, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_a_changed_call_is_checked(
    stub: StubDriver, checked: list[str], call: Any, changes: dict[str, Any], error: type[Exception] | None
) -> None:
    for _ in range(2):
        call()
    (before,) = stub.last()
    checked.clear()
    stub.launches.clear()
    if error is None:
        call(**changes)
        assert stub.launches
    else:
        with pytest.raises(error):
            call(**changes)
        assert not stub.launches
    assert checked
    call()
    assert stub.last() == [before]


@pytest.mark.parametrize(("k", "pitch"), [(1, 0), (64, 1024)])
def test_columns_of_a_that_overlap_at_a_larger_m_are_copied(stub: StubDriver, k: int, pitch: int) -> None:
    """With K = 1 there is only one column, so the pitch is meaningless."""

    def call(m: int) -> list[Launch]:
        stub.launches.clear()
        gemm(columns(m, k, pitch=pitch or m, address=A), rows(k, 64, address=B))
        return list(stub.launches)

    for m in (8, 1200):
        with using_runtime(fresh()):
            expected = call(m)
        assert call(m) == expected


def test_calls_with_other_factors_share_a_plan(stub: StubDriver) -> None:
    for alpha in (0.5, 0.25, float("nan"), float("nan")):
        dense(alpha=alpha)
    assert stub.plans == 1
    with using_runtime(fresh()):
        dense(alpha=0.25)
    assert stub.last() == [stub.launches[1]]


def test_a_call_that_torch_records_is_not_a_repeated_one() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(4, 128, requires_grad=True)
    assert facts_of("torch", (tensor, None)) is None
    with torch.no_grad():
        assert facts_of("torch", (tensor, None)) is not None


def test_a_tensor_whose_memory_holds_other_values_is_checked() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(4, 4, dtype=torch.complex64)
    assert facts_of("torch", (tensor, tensor.imag)) is not None
    for lazy in (tensor.conj(), tensor.conj().imag):
        assert facts_of("torch", (tensor, lazy)) is None


def test_a_result_with_negative_strides_does_not_overlap_in_a_repeated_call(stub: StubDriver) -> None:
    source = Array((64,), np.float16, A)
    copy(source, out=Array((64,), np.float16, A + 4096, strides=(-2,)))
    with pytest.raises(ArgumentError, match=r"^out must be "):
        copy(source, out=Array((64,), np.float16, A + 128, strides=(-2,)))
    assert len(stub.launches) == 1


@pytest.mark.parametrize("part", ["qweight", "scales"])
def test_a_result_in_the_memory_of_the_weight_in_a_repeated_call(stub: StubDriver, part: str) -> None:
    marlin()
    with pytest.raises(ArgumentError, match=f"overlaps {part} of the weight"):
        marlin(out=rows(4, 64, address=getattr(WEIGHT, part).data.ptr))
    assert len(stub.launches) == 1


def test_the_sign_of_a_zero_does_not_depend_on_earlier_calls(stub: StubDriver) -> None:
    for alpha in (0.0, -0.0):
        gemm(rows(4, 128), columns(128, 64), alpha=alpha)
    first, second = stub.last(2)
    with using_runtime(fresh()):
        gemm(rows(4, 128), columns(128, 64), alpha=-0.0)
    assert first == second == stub.last()[0]


@pytest.mark.parametrize("call", [marlin, dense])
def test_results_without_elements_launch_nothing(stub: StubDriver, call: Any) -> None:
    first = "x" if call is marlin else "a"
    for _ in range(2):
        assert call(**{first: rows(0, 128)}, out=None).shape == (0, 64)
        assert call(**{first: rows(0, 128)}, out=rows(0, 64, address=OUT)).shape == (0, 64)
    call()
    assert len(stub.launches) == 1


def test_threads_have_arguments_of_their_own(stub: StubDriver) -> None:
    """A second thread makes a call with another M after the first thread has written its arguments."""
    marlin()
    marlin(x=rows(3, 128), out=rows(3, 64, address=OUT))
    four, three = stub.last(2)
    assert four.entry == three.entry

    def meanwhile() -> None:
        stub.during_launch = bool
        other = threading.Thread(target=lambda: marlin(x=rows(3, 128), out=rows(3, 64, address=OUT)))
        other.start()
        other.join()

    for _ in range(2):
        stub.during_launch = meanwhile
        marlin()
        assert stub.last(2) == [three, four]


@pytest.mark.parametrize("writes_well", [True, False])
def test_the_driver_encodes_where_the_codec_differs(
    stub: StubDriver, monkeypatch: pytest.MonkeyPatch, writes_well: bool
) -> None:
    """If they agree, the driver encodes only the first new M."""
    field_writer = codec.field_writer

    def wrong(words: Any, *others: Any) -> Callable[[Sequence[int]], None]:
        write = field_writer(words, *others)

        def written(values: Sequence[int]) -> None:
            write(values)
            words[20] ^= 1

        return written

    if not writes_well:
        monkeypatch.setattr(codec, "field_writer", wrong)
    # Rows of one box, so that M differs in the tensor maps alone.
    weight, encoded = packed_weight(1024, 1536), []
    for m in (1000, 1001, 1002, 1003):
        before = stub.encoded
        marlin_gemm(rows(m, 1024), weight)
        encoded.append(stub.encoded - before)
    launches = stub.last(4)
    assert len({launch.entry for launch in launches}) == 1
    assert encoded[1:] == ([1, 0, 0] if writes_well else [1, 1, 1])
    for m, launch in zip((1000, 1001, 1002, 1003), launches, strict=True):
        with using_runtime(fresh()):
            marlin_gemm(rows(m, 1024), weight)
        assert stub.last() == [launch]


def test_a_weight_lives_no_longer_than_its_caller(stub: StubDriver) -> None:
    weight = packed_weight(128, 64, act_order=True)
    arrays = [weakref.ref(array) for array in (weight, weight.qweight, weight.scales, weight.perm)]
    x, out = rows(4, 128), rows(4, 64, address=OUT)
    for _ in range(2):
        marlin_gemm(x, weight, out=out)
    arrays += [weakref.ref(x), weakref.ref(out)]
    gc.disable()
    try:
        del weight, x, out
        assert not any(array() for array in arrays)
    finally:
        gc.enable()


@pytest.mark.parametrize("call", [marlin, dense])
def test_a_capture_finds_loaded_kernels_only(stub: StubDriver, call: Any) -> None:
    stub.loaded, stub.capturing = False, True
    with pytest.raises(LaunchError, match=r"^stream must be .*got a stream under graph capture; .* before the capture"):
        call()
    assert not stub.launches
    stub.loaded = True
    call()
    stub.loaded = False
    call()  # a repeated call looks for no kernel
    assert len(stub.launches) == 2


def test_a_forked_child_starts_with_an_empty_runtime(stub: StubDriver) -> None:
    marlin()
    assert calls_of(MARLIN_GEMM).calls
    child = os.fork()
    if not child:
        os._exit(len(calls_of(MARLIN_GEMM).calls) + len(calls_of(MARLIN_GEMM).plans))
    assert os.waitpid(child, 0)[1] == 0


def test_the_newest_plans_stay() -> None:
    cache: Cache[int] = Cache(4)
    for key in range(6):
        cache.put(key, 10 * key)
        assert len(cache) <= 4
    assert cache == {2: 20, 3: 30, 4: 40, 5: 50}
    cache.put(5, 51)
    assert cache[5] == 51
