"""Wrong calls of attention and their errors, and the checked problem of correct calls."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cudatma.arrays import ArrayInfo, dense_strides
from cudatma.errors import ArgumentError, ArgumentTypeError, FieldError
from cudatma.kernels.attention.attention import VARLEN_CALL, attention, attention_explain, attention_varlen
from cudatma.kernels.attention.check import check_attention, check_varlen
from cudatma.kernels.attention.decode import attention_decode

BF16, E4M3 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
B, LQ, LK, H, KV, D = 2, 5, 7, 4, 2, 64
SHAPES = {"q": (B, LQ, H, D), "k": (B, LK, KV, D), "v": (B, LK, KV, D), "out": (B, LQ, H, D)}
ADDRESSES = {name: 0x7F0000000000 + (index << 32) for index, name in enumerate(SHAPES)}
Wrong = tuple[str, dict[str, Any], type[FieldError], str]


def on_device(field: str, **changes: Any) -> ArrayInfo:
    """Return a valid array on device 0 with ``changes``. Mistakes must be found before the driver is called."""
    dtype = np.dtype(changes.pop("dtype", np.float16))
    shape = changes.pop("shape", SHAPES[field])
    strides = changes.pop("strides", dense_strides(shape, dtype))
    return replace(ArrayInfo(ADDRESSES[field], shape, strides, dtype, 0, None, "cai"), **changes)


def is_told(error: FieldError, field: str) -> None:
    """The first line names the field, what it got and what is allowed."""
    assert error.field == field
    first = str(error).splitlines()[0]
    assert first.startswith(f"{field} must be ")
    assert ", got " in first


def label(value: Any) -> str:
    """Return a test id that says what is changed, and to which value."""
    if isinstance(value, dict):
        return ",".join(f"{name}={one}" for name, one in value.items() if not isinstance(one, np.ndarray)) or "array"
    return value.__name__ if isinstance(value, type) else str(value)


# ---- attention

WRONG: list[Wrong] = [
    # What is wrong of which array; the error, and the field that it names.
    *[("q", {"dtype": kind}, ArgumentTypeError, "q.dtype") for kind in ("f4", "f8", "i2", ">f2", "c8", "?", E4M3)],
    *[("k", {"dtype": kind}, ArgumentTypeError, "k.dtype") for kind in (np.float32, BF16, E4M3, np.int16)],
    *[("v", {"dtype": kind}, ArgumentTypeError, "v.dtype") for kind in (np.float32, BF16, E4M3, np.uint8)],
    *[("out", {"dtype": kind}, ArgumentTypeError, "out.dtype") for kind in (np.float32, BF16, np.float64)],
    *[
        ("q", {"shape": shape}, ArgumentError, "q.shape")
        for shape in ((), (D,), (LQ, H, D), (1, B, LQ, H, D), (B, LQ, 0, D), (B, LQ, H, 0), (B, LQ, H, 48))
    ],
    *[("q", {"shape": (B, LQ, H, dim)}, ArgumentError, "q.shape") for dim in (16, 65, 80, 112, 160, 224, 320, 512)],
    *[
        ("k", {"shape": shape}, ArgumentError, "k.shape")
        for shape in ((LK, KV, D), (B, LK, KV, 32), (B, LK, KV, 128), (B, LK, 3, D), (B, LK, 8, D), (B, LK, 0, D))
    ],
    *[("k", {"shape": (batch, LK, KV, D)}, ArgumentError, "k.shape") for batch in (0, 1, B + 1)],
    *[
        ("v", {"shape": shape}, ArgumentError, "v.shape")
        for shape in ((LK, KV, D), (B, LK, KV, 128), (B, LK, KV, 32), (B, LK, 1, D), (B, LK, H, D), (B, LK - 1, KV, D))
    ],
    ("v", {"shape": (1, LK, KV, D)}, ArgumentError, "v.shape"),
    *[
        ("out", {"shape": shape}, ArgumentError, "out.shape")
        for shape in ((B, H, LQ, D), (LQ, H, D), (B, LK, H, D), (B, LQ, KV, D), (1, LQ, H, D), ())
    ],
    *[
        (name, {"strides": strides}, ArgumentError, f"{name}.strides")
        for name in ("q", "k", "v", "out")
        for strides in (
            (D * 100, D * 8, 2, 8),  # dim is not contiguous
            (D * 100, D * 8, D * 2 + 2, 2),  # heads off 16 bytes
            (D * 100 + 8, D * 8, D * 2, 2),  # sequences off 16 bytes
            (D * 100, -D * 8, D * 2, 2),  # backwards
            (1 << 40, D * 8, D * 2, 2),  # farther than TMA steps
            (D * 100, D * 8, D * 2, 0),
        )
    ],
    ("out", {"strides": (0, D * 8, D * 2, 2)}, ArgumentError, "out.strides"),
    ("out", {"strides": (D * 8, D * 8, D * 2, 2)}, ArgumentError, "out.strides"),
    ("out", {"strides": (D * 100, D * 2, D * 2, 2)}, ArgumentError, "out.strides"),
    *[(name, {"pointer": ADDRESSES[name] + 8}, ArgumentError, f"{name}.pointer") for name in SHAPES],
    *[("out", {"pointer": ADDRESSES[name]}, ArgumentError, "out") for name in ("q", "k", "v")],
    ("out", {"pointer": ADDRESSES["q"] + 16 * D}, ArgumentError, "out"),
    ("out", {"readonly": True}, ArgumentError, "out"),
    *[(name, {"device": 1}, ArgumentError, f"{name}.device") for name in SHAPES if name != "q"],
    *[(name, {"device": None}, ArgumentError, f"{name}.device") for name in SHAPES if name != "q"],
]


@pytest.mark.parametrize(("name", "changes", "error", "field"), WRONG, ids=label)
def test_a_wrong_array_is_named(name: str, changes: dict[str, Any], error: type[FieldError], field: str) -> None:
    arrays: dict[str, Any] = {each: on_device(each) for each in SHAPES} | {name: on_device(name, **changes)}
    for function in (attention, attention_explain):
        with pytest.raises(error) as caught:
            function(**arrays, backend="cuda", stream=0)
        is_told(caught.value, field)


Q, K = (np.zeros(SHAPES[name], np.float16) for name in "qk")
OPTIONS: list[tuple[dict[str, Any], type[FieldError], str]] = [
    *[({"scale": scale}, ArgumentError, "scale") for scale in (math.nan, math.inf, 0, -1.0, 1e-60, 3e38, 10**400)],
    *[({"scale": scale}, ArgumentTypeError, "scale") for scale in ("1", True, 1j, [1.0], np.ones(2))],
    *[({"softcap": cap}, ArgumentError, "softcap") for cap in (0, -30.0, math.nan, math.inf, 4097.0)],
    ({"softcap": 1e-39, "scale": 1e30}, ArgumentError, "softcap"),
    *[({"softcap": cap}, ArgumentTypeError, "softcap") for cap in ("30", False, [30.0])],
    ({"sink": [0.0]}, ArgumentTypeError, "sink"),
    ({"sink": np.zeros(SHAPES["q"][2], np.float16)}, ArgumentTypeError, "sink.dtype"),
    *[
        ({"sink": np.zeros(shape, np.float32)}, ArgumentError, "sink.shape")
        for shape in ((), (1,), (1, SHAPES["q"][2]))
    ],
    ({"sink": np.zeros(2 * SHAPES["q"][2], np.float32)[::2]}, ArgumentError, "sink.strides"),
    *[({"window": window}, ArgumentTypeError, "window") for window in (3, 3.0, "ab", {1, 2}, True)],
    *[({"window": window}, ArgumentError, "window") for window in ((), (1,), [1, 2, 3])],
    ({"window": (-1, 0)}, ArgumentError, "window[0]"),
    ({"window": (0, -1)}, ArgumentError, "window[1]"),
    ({"window": (1.0, 0)}, ArgumentTypeError, "window[0]"),
    ({"window": ("3", 0)}, ArgumentTypeError, "window[0]"),
    ({"window": (0, True)}, ArgumentTypeError, "window[1]"),
    ({"window": (0, math.inf)}, ArgumentTypeError, "window[1]"),
    *[({"causal": causal}, ArgumentTypeError, "causal") for causal in (1, None, "yes", np.int64(1))],
    *[({"return_lse": wanted}, ArgumentTypeError, "return_lse") for wanted in (1, None)],
    *[
        ({"version": version}, ArgumentError, "version")
        for version in ("a9", "A1", "phase1", "p1", "decode", 1, None, True, ["a1"], "")
    ],
    *[({"backend": backend}, ArgumentError, "backend") for backend in ("cpu", "torch", "")],
    ({"k": [1.0]}, ArgumentTypeError, "k"),
    ({"v": None}, ArgumentTypeError, "v"),
    ({"out": 1.0}, ArgumentTypeError, "out"),
    ({"out": np.zeros(SHAPES["out"], np.float32)}, ArgumentTypeError, "out.dtype"),
    ({"out": Q}, ArgumentError, "out"),
    ({"out": np.broadcast_to(np.float16(0), SHAPES["out"])}, ArgumentError, "out"),
    ({"k": K[..., ::-1]}, ArgumentError, "k.strides"),
    ({"k": K[:, ::-1]}, ArgumentError, "k.strides"),
    ({"v": np.ma.masked_array(K, mask=True)}, ArgumentTypeError, "v"),
]


@pytest.mark.parametrize(("options", "error", "field"), OPTIONS, ids=label)
def test_a_wrong_option_is_named(options: dict[str, Any], error: type[FieldError], field: str) -> None:
    given: dict[str, Any] = {"q": Q, "k": K, "v": K, "backend": "reference"} | options
    for function in (attention, attention_explain):
        with pytest.raises(error) as caught:
            function(**given)
        is_told(caught.value, field)


def test_a_head_dim_of_v_of_its_own_is_for_192_only() -> None:
    q, k = (np.zeros((1, 3, 2, 192), np.float16) for _ in range(2))
    assert attention(q, k, k[..., :128], backend="reference").shape == (1, 3, 2, 128)
    with pytest.raises(
        ArgumentError, match=r"^v\.shape must be a shape with a head dim of 192 or 128 \(q and k have 192\).*got .*"
    ):
        attention(q, k, k[..., :64], backend="reference")


# ---- What a call asks for


def test_a_problem_says_what_a_call_asks_for() -> None:
    arrays = {each: on_device(each) for each in ("q", "k", "v")}
    asked = {"causal": np.True_, "window": (2, 3), "softcap": 5, "return_lse": True, "version": "a2"}
    problem = check_attention(**arrays, **asked).problem
    assert (problem.batch, problem.heads, problem.kv_heads, problem.q_length, problem.k_length) == (B, H, KV, LQ, LK)
    assert (problem.head_dim, problem.v_head_dim, problem.dtype, problem.version) == (D, D, "float16", "a2")
    assert problem.is_causal
    assert problem.has_window
    assert problem.has_softcap
    assert problem.has_lse
    plain = check_attention(**arrays).problem
    assert not any(getattr(plain, name) for name in ("is_causal", "has_window", "has_softcap", "has_lse"))
    assert plain.scale == D**-0.5


@pytest.mark.parametrize(
    ("causal", "window", "is_causal", "has_window"),
    [
        (False, None, False, False),
        (True, None, True, False),
        (False, (None, 0), True, False),
        (True, (None, None), True, False),
        (True, (2, 5), True, True),
        (False, (LK - 1, LQ - 1), False, False),
        (False, (LK - 1, LQ - 2), False, True),
        (False, (LK - 2, LQ - 1), False, True),
        (True, (LK - 1, None), True, False),
        (False, [np.int64(2), 1], False, True),
    ],
    ids=str,
)
def test_limits_that_exclude_no_key_are_left_out(causal: bool, window: Any, is_causal: bool, has_window: bool) -> None:
    problem = check_attention(Q, K, K, causal=causal, window=window).problem
    assert (problem.is_causal, problem.has_window) == (is_causal, has_window)


def test_a_single_query_needs_no_causal_limit() -> None:
    assert not check_attention(Q[:, :1], K, K, causal=True).problem.is_causal


def test_strides_of_dimensions_of_one_element_are_those_of_a_dense_array() -> None:
    strides = (3, 64 * H * 2, 7, 2)
    problem = check_attention(on_device("q", shape=(1, LQ, 1, D), strides=strides), K1, K1).problem
    assert problem.layouts.q.strides_bytes == (LQ * D * 2, 64 * H * 2, D * 2, 2)


K1 = on_device("k", shape=(1, LK, 1, D))


def test_an_explanation_names_what_runs_and_who_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDATMA_ATTENTION_VERSION", raising=False)
    said = attention_explain(Q, K, K, causal=True, version="a3")
    assert (said.kernel, said.decision.why) == ("a3", "version a3 is selected by the call")
    assert said.problem.is_causal
    assert (said.launches[0].schedule.tiles_m, said.launches[0].schedule.tiles_n) == (1, B * H)
    assert "5 queries, 7 keys" in str(said)
    assert attention_explain(Q, K, K, target="sm_120a").config.entry.startswith("attention_mma_sync_")
    free = attention_explain(Q, K, K)
    assert free.decision.source == "rule"
    assert free.as_dict()["layer"]["heads"] == H
    with pytest.raises(ArgumentError, match=r"^q\.shape, k\.shape must be .*got"):
        attention_explain(Q[:, :0], K, K)
    with pytest.raises(ArgumentError, match=r"^sink must be None for version scalar.*got an array"):
        attention_explain(Q, K, K, version="scalar", sink=np.zeros(H, np.float32))


# ---- attention_varlen

OF_Q, OF_K = (np.array(each, np.int32) for each in ([0, 3, 10], [0, 8, 14]))
VARLEN: dict[str, Any] = {
    "q": np.zeros((10, H, D), np.float16),
    "k": np.zeros((14, KV, D), np.float16),
    "v": np.zeros((14, KV, D), np.float16),
    "cu_seqlens_q": OF_Q,
    "cu_seqlens_k": OF_K,
    "max_seqlen_q": 7,
    "max_seqlen_k": 8,
    "backend": "reference",
}
WRONG_VARLEN: list[tuple[dict[str, Any], type[FieldError], str]] = [
    ({"q": Q}, ArgumentError, "q.shape"),
    ({"k": K}, ArgumentError, "k.shape"),
    ({"v": VARLEN["v"][:-1]}, ArgumentError, "v.shape"),
    ({"v": VARLEN["v"][:, :1]}, ArgumentError, "v.shape"),
    ({"q": np.zeros((10, H, 48), np.float16)}, ArgumentError, "q.shape"),
    ({"k": np.zeros((14, 3, D), np.float16)}, ArgumentError, "k.shape"),
    ({"q": np.zeros((10, 2 * H, D), np.float16)[:, ::-2]}, ArgumentError, "q.strides"),
    ({"k": np.zeros((14, KV, 2 * D), np.float16)[..., ::2]}, ArgumentError, "k.strides"),
    ({"k": VARLEN["k"].astype(BF16)}, ArgumentTypeError, "k.dtype"),
    *[({"cu_seqlens_q": OF_Q.astype(kind)}, ArgumentTypeError, "cu_seqlens_q.dtype") for kind in ("i8", "u4", "f4")],
    *[({"cu_seqlens_k": OF_K.astype(kind)}, ArgumentTypeError, "cu_seqlens_k.dtype") for kind in ("i8", "i2", ">i4")],
    ({"cu_seqlens_q": [0, 3, 10]}, ArgumentTypeError, "cu_seqlens_q"),
    ({"cu_seqlens_q": OF_Q[None]}, ArgumentError, "cu_seqlens_q.shape"),
    ({"cu_seqlens_q": OF_Q[:0]}, ArgumentError, "cu_seqlens_q.shape"),
    ({"cu_seqlens_k": OF_K[:2]}, ArgumentError, "cu_seqlens_k.shape"),
    ({"cu_seqlens_k": np.repeat(OF_K, 2)[::2]}, ArgumentError, "cu_seqlens_k.strides"),
    ({"cu_seqlens_q": np.array([1, 3, 10], np.int32)}, ArgumentError, "cu_seqlens_q[0]"),
    ({"cu_seqlens_q": np.array([0, 11, 10], np.int32)}, ArgumentError, "cu_seqlens_q[2]"),
    ({"cu_seqlens_k": np.array([0, -1, 14], np.int32)}, ArgumentError, "cu_seqlens_k[1]"),
    ({"cu_seqlens_k": np.array([0, 2**31 - 1, -(2**31)], np.int32)}, ArgumentError, "cu_seqlens_k[2]"),
    ({"cu_seqlens_q": np.array([0, 3, 9], np.int32)}, ArgumentError, "cu_seqlens_q[2]"),
    ({"cu_seqlens_k": np.array([0, 8, 15], np.int32)}, ArgumentError, "cu_seqlens_k[2]"),
    ({"max_seqlen_q": 6}, ArgumentError, "max_seqlen_q"),
    ({"max_seqlen_k": 7}, ArgumentError, "max_seqlen_k"),
    ({"max_seqlen_k": -1}, ArgumentError, "max_seqlen_k"),
    *[({"max_seqlen_q": most}, ArgumentTypeError, "max_seqlen_q") for most in (7.0, None, True, "7")],
    ({"out": np.zeros((10, KV, D), np.float16)}, ArgumentError, "out.shape"),
    ({"out": VARLEN["q"]}, ArgumentError, "out"),
    ({"window": (1, -2)}, ArgumentError, "window[1]"),
    ({"scale": math.nan}, ArgumentError, "scale"),
    ({"backend": "cuda"}, ArgumentError, "q.device"),
    ({"backend": "gpu"}, ArgumentError, "backend"),
]


@pytest.mark.parametrize(("options", "error", "field"), WRONG_VARLEN, ids=label)
def test_a_wrong_call_of_sequences_is_named(options: dict[str, Any], error: type[FieldError], field: str) -> None:
    with pytest.raises(error) as caught:
        attention_varlen(**(VARLEN | options))
    is_told(caught.value, field)


def test_a_problem_of_sequences_has_their_count_and_the_longest() -> None:
    given = {name: value for name, value in VARLEN.items() if name != "backend"}
    checked = check_varlen(**given, causal=True)
    problem = checked.problem
    assert (problem.batch, problem.q_length, problem.k_length, problem.is_varlen) == (2, 7, 8, True)
    assert checked.shape == (10, H, D)
    assert problem.layouts.q.shape == (1, 10, H, D)
    assert set(VARLEN_CALL.named(checked)) == {"q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"}


# ---- attention_decode

TABLE = np.array([[0, 1, 2], [3, 4, 5]], np.int32)
DECODE: dict[str, Any] = {
    "q": np.zeros((2, 1, H, D), np.float16),
    "k_cache": np.zeros((6, 16, KV, D), np.float16),
    "v_cache": np.zeros((6, 16, KV, D), np.float16),
    "seqlens": np.array([48, 20], np.int32),
    "page_table": TABLE,
    "backend": "reference",
}
CONTIGUOUS: dict[str, Any] = {"k_cache": DECODE["k_cache"][:2], "v_cache": DECODE["v_cache"][:2], "page_table": None}
FP8: dict[str, Any] = {name: DECODE[name].astype(ml_dtypes.float8_e4m3fn) for name in ("k_cache", "v_cache")}
WRONG_DECODE: list[tuple[dict[str, Any], type[FieldError], str]] = [
    ({"q": np.zeros((2, H, D), np.float16)}, ArgumentError, "q.shape"),
    ({"q": np.zeros((2, 1, 3, D), np.float16)}, ArgumentError, "k_cache.shape"),
    ({"q": np.zeros((2, 1, H, 80), np.float16)}, ArgumentError, "q.shape"),
    ({"k_cache": DECODE["k_cache"][0]}, ArgumentError, "k_cache.shape"),
    ({"v_cache": DECODE["v_cache"][:5]}, ArgumentError, "v_cache.shape"),
    ({"v_cache": DECODE["v_cache"][:, :8]}, ArgumentError, "v_cache.shape"),
    ({"v_cache": DECODE["v_cache"][:, :, :1]}, ArgumentError, "v_cache.shape"),
    ({"k_cache": DECODE["k_cache"].astype(BF16)}, ArgumentTypeError, "k_cache.dtype"),
    ({"page_table": None}, ArgumentError, "k_cache.shape"),
    ({"page_table": TABLE.astype(np.int64)}, ArgumentTypeError, "page_table.dtype"),
    ({"page_table": TABLE[0]}, ArgumentError, "page_table.shape"),
    ({"page_table": TABLE[:1]}, ArgumentError, "page_table.shape"),
    ({"page_table": TABLE[:, ::2]}, ArgumentError, "page_table.strides"),
    ({"page_table": np.array([[0, 1, 6], [3, 4, 5]], np.int32)}, ArgumentError, "page_table[0, 2]"),
    ({"page_table": np.array([[0, 1, 2], [3, -1, 5]], np.int32)}, ArgumentError, "page_table[1, 1]"),
    ({"page_table": np.array([[2**31 - 1, 1, 2], [3, 4, 5]], np.int32)}, ArgumentError, "page_table[0, 0]"),
    ({"seqlens": [48, 20]}, ArgumentTypeError, "seqlens"),
    ({"seqlens": np.array([48, 20])}, ArgumentTypeError, "seqlens.dtype"),
    ({"seqlens": np.array([48], np.int32)}, ArgumentError, "seqlens.shape"),
    ({"seqlens": np.array([[48], [20]], np.int32)}, ArgumentError, "seqlens.shape"),
    ({"seqlens": np.array([49, 20], np.int32)}, ArgumentError, "seqlens[0]"),
    ({"seqlens": np.array([48, -1], np.int32)}, ArgumentError, "seqlens[1]"),
    ({**CONTIGUOUS, "seqlens": np.array([16, 17], np.int32)}, ArgumentError, "seqlens[1]"),
    ({"out": np.zeros((2, H, D), np.float16)}, ArgumentError, "out.shape"),
    ({"out": DECODE["q"]}, ArgumentError, "out"),
    ({"window": 5}, ArgumentTypeError, "window"),
    ({"scale": -1}, ArgumentError, "scale"),
    ({"softcap": 0.0}, ArgumentError, "softcap"),
    ({"sink": np.zeros(H + 1, np.float32)}, ArgumentError, "sink.shape"),
    ({"return_lse": 1}, ArgumentTypeError, "return_lse"),
    ({"backend": "cuda"}, ArgumentError, "q.device"),
    ({"backend": "gpu"}, ArgumentError, "backend"),
    ({"k_scale": 2.0}, ArgumentError, "k_scale"),
    ({"k_cache": FP8["k_cache"]}, ArgumentTypeError, "v_cache.dtype"),
    ({"q": FP8["k_cache"][:2, :1]}, ArgumentTypeError, "q.dtype"),
    ({**FP8, "k_scale": 0.0}, ArgumentError, "k_scale"),
    ({**FP8, "v_scale": float("nan")}, ArgumentError, "v_scale"),
    ({**FP8, "v_scale": True}, ArgumentTypeError, "v_scale"),
    ({**FP8, "v_scale": np.ones(KV, np.float64)}, ArgumentTypeError, "v_scale.dtype"),
    ({**FP8, "k_scale": np.ones(KV + 1, np.float32)}, ArgumentError, "k_scale.shape"),
    ({**FP8, "k_scale": np.ones(2 * KV, np.float32)[::2]}, ArgumentError, "k_scale.strides"),
    ({name: cache[:, :12] for name, cache in FP8.items()}, ArgumentError, "k_cache.shape"),
]


@pytest.mark.parametrize(("options", "error", "field"), WRONG_DECODE, ids=label)
def test_a_wrong_call_of_a_cache_is_named(options: dict[str, Any], error: type[FieldError], field: str) -> None:
    with pytest.raises(error) as caught:
        attention_decode(**(DECODE | options))
    is_told(caught.value, field)
