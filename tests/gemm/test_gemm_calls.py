"""Calls of the dense GEMM: errors of wrong calls, operands that are copied, and the reference against float64."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gemm_builders import config

from cudatma.arrays import ArrayInfo, dense_strides
from cudatma.errors import ArgumentError, ArgumentTypeError, FieldError, TargetError
from cudatma.kernels.gemm.arguments import gemm_arguments
from cudatma.kernels.gemm.gemm import gemm, gemm_explain
from cudatma.kernels.gemm.problem import ACTIVATIONS, LAYOUTS
from cudatma.kernels.gemm.sample import checked_call
from cudatma.kernels.gpu import H200

BF16, E4M3, E5M2 = (np.dtype(getattr(ml_dtypes, name)) for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"))
M, N, K, BATCH = 4, 24, 256, 3
SHAPES = {
    "a": (M, K),
    "b": (K, N),
    "out": (M, N),
    "bias": (N,),
    "a_scale": (M,),
    "b_scale": (N,),
}
ADDRESSES = {name: 0x7F0000000000 + (index << 32) for index, name in enumerate(SHAPES)}


def on_device(field: str, **changes: Any) -> ArrayInfo:
    """Return a valid array on device 0 with ``changes``. Mistakes must be found before the driver is called."""
    dtype = np.dtype(changes.pop("dtype", np.float32 if field.endswith("scale") else np.float16))
    shape = changes.pop("shape", SHAPES[field])
    strides = changes.pop("strides", dense_strides(shape, dtype))
    return replace(ArrayInfo(ADDRESSES[field], shape, strides, dtype, 0, None, "cai"), **changes)


WRONG: list[tuple[str, dict[str, Any], type[FieldError], str]] = [
    # What is wrong of which array; the error, and the field that it names.
    *[("a", {"dtype": kind}, ArgumentTypeError, "a.dtype") for kind in ("f4", "f8", "i1", ">f2", "c8", "?")],
    *[("b", {"dtype": kind}, ArgumentTypeError, "b.dtype") for kind in (np.float32, np.int16, BF16, E4M3, ">f2")],
    *[("out", {"dtype": kind}, ArgumentTypeError, "out.dtype") for kind in (np.float64, np.int16, E4M3)],
    *[("a", {"shape": shape}, ArgumentError, "a.shape") for shape in ((), (K,), (M, 0), (1, 1, M, K), (2, M, 0))],
    *[("b", {"shape": shape}, ArgumentError, "b.shape") for shape in ((), (N,), (0, N), (K + 8, N), (N, K), (1, K))],
    *[("out", {"shape": shape}, ArgumentError, "out.shape") for shape in ((N, M), (M * N,), (1, M, N), (M, N + 1), ())],
    ("a", {"strides": (2 * K + 1, 2)}, ArgumentError, "a.strides"),
    ("b", {"strides": (2 * N, 3)}, ArgumentError, "b.strides"),
    ("a", {"pointer": ADDRESSES["a"] + 1}, ArgumentError, "a.pointer"),
    ("b", {"pointer": ADDRESSES["b"] + 1}, ArgumentError, "b.pointer"),
    ("out", {"strides": (2, 2 * M)}, ArgumentError, "out.strides"),
    ("out", {"strides": (2 * N - 2, 2)}, ArgumentError, "out.strides"),
    ("out", {"strides": (0, 2)}, ArgumentError, "out.strides"),
    ("out", {"strides": (-2 * N, 2)}, ArgumentError, "out.strides"),
    ("out", {"strides": (2 * N + 1, 2)}, ArgumentError, "out.strides"),
    ("out", {"pointer": ADDRESSES["out"] + 1}, ArgumentError, "out.pointer"),
    *[("out", {"pointer": ADDRESSES[name]}, ArgumentError, "out") for name in ("a", "b", "bias", "a_scale", "b_scale")],
    ("out", {"pointer": ADDRESSES["b"] + 16}, ArgumentError, "out"),
    ("out", {"readonly": True}, ArgumentError, "out"),
    *[(name, {"device": 1}, ArgumentError, f"{name}.device") for name in SHAPES if name != "a"],
    *[(name, {"device": None}, ArgumentError, f"{name}.device") for name in SHAPES if name != "a"],
    *[("bias", {"dtype": kind}, ArgumentTypeError, "bias.dtype") for kind in (np.float32, BF16, np.int16)],
    *[("bias", {"shape": shape}, ArgumentError, "bias.shape") for shape in ((), (M,), (1, N), (N, 1), (N + 1,))],
    ("bias", {"strides": (4,)}, ArgumentError, "bias.strides"),
    ("bias", {"strides": (0,)}, ArgumentError, "bias.strides"),
    ("bias", {"pointer": ADDRESSES["bias"] + 1}, ArgumentError, "bias.pointer"),
    *[("a_scale", {"dtype": kind}, ArgumentTypeError, "a_scale.dtype") for kind in ("f2", "f8", "i4")],
    *[("b_scale", {"dtype": kind}, ArgumentTypeError, "b_scale.dtype") for kind in ("f2", "f8", BF16)],
    *[("a_scale", {"shape": shape}, ArgumentError, "a_scale.shape") for shape in ((N,), (M, 3), (2,), (1, M), (M, M))],
    *[("b_scale", {"shape": shape}, ArgumentError, "b_scale.shape") for shape in ((M,), (N, 1), (N, N))],
    ("a_scale", {"strides": (-4,)}, ArgumentError, "a_scale.strides"),
    ("b_scale", {"strides": (6,)}, ArgumentError, "b_scale.strides"),
    ("a_scale", {"pointer": ADDRESSES["a_scale"] + 2}, ArgumentError, "a_scale.pointer"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "error", "field"), WRONG, ids=str)
def test_a_wrong_array_is_named(name: str, changes: dict[str, Any], error: type[FieldError], field: str) -> None:
    arrays = {each: on_device(each) for each in SHAPES} | {name: on_device(name, **changes)}
    for function in (gemm, gemm_explain):
        with pytest.raises(error) as caught:
            function(**arrays, backend="cuda", stream=0)  # type: ignore[operator]
        assert caught.value.field == field
        assert str(caught.value).startswith(f"{field} must be ")
        assert "must be " in str(caught.value).splitlines()[0]


HOST = np.zeros((M, K), np.float16)
OPTIONS: list[tuple[dict[str, Any], type[FieldError], str]] = [
    ({"alpha": "2"}, ArgumentTypeError, "alpha"),
    ({"alpha": None}, ArgumentTypeError, "alpha"),
    ({"alpha": 1j}, ArgumentTypeError, "alpha"),
    ({"alpha": True}, ArgumentTypeError, "alpha"),
    ({"beta": [1.0]}, ArgumentTypeError, "beta"),
    ({"beta": 1.0}, ArgumentError, "out"),
    ({"beta": math.nan}, ArgumentError, "out"),
    ({"activation": "tanh"}, ArgumentError, "activation"),
    ({"activation": "RELU"}, ArgumentError, "activation"),
    ({"activation": 1}, ArgumentError, "activation"),
    ({"activation": ["relu"]}, ArgumentError, "activation"),
    ({"out_dtype": "float64"}, ArgumentTypeError, "out_dtype"),
    ({"out_dtype": np.int32}, ArgumentTypeError, "out_dtype"),
    ({"out_dtype": E4M3}, ArgumentTypeError, "out_dtype"),
    ({"out_dtype": 3}, ArgumentTypeError, "out_dtype"),
    ({"out_dtype": "torch.float"}, ArgumentTypeError, "out_dtype"),
    ({"out": np.zeros((M, M), np.float16), "out_dtype": "float32"}, ArgumentTypeError, "out.dtype"),
    ({"batch_invariant": 1}, ArgumentTypeError, "batch_invariant"),
    ({"batch_invariant": None}, ArgumentTypeError, "batch_invariant"),
    ({"version": 9}, ArgumentError, "version"),
    ({"version": "3"}, ArgumentError, "version"),
    ({"version": True}, ArgumentError, "version"),
    ({"version": None}, ArgumentError, "version"),
    ({"version": [3]}, ArgumentError, "version"),
    ({"version": np.array([1, 2])}, ArgumentError, "version"),
    ({"alpha": 10**400}, ArgumentError, "alpha"),
    ({"a_scale": 10**400}, ArgumentError, "a_scale"),
    ({"out_dtype": ("f4", (-1,))}, ArgumentTypeError, "out_dtype"),
    ({"backend": "cpu"}, ArgumentError, "backend"),
    ({"a_scale": "1"}, ArgumentTypeError, "a_scale"),
    ({"a_scale": True}, ArgumentTypeError, "a_scale"),
    ({"b_scale": [1.0]}, ArgumentTypeError, "b_scale"),
    ({"bias": 1.0}, ArgumentTypeError, "bias"),
    ({"out": [0.0]}, ArgumentTypeError, "out"),
    ({"a_scale": np.ones((M, 2), np.float32), "b_scale": np.ones((2, 1), np.float32)}, ArgumentError, "a_scale.shape"),
    ({"a_scale": np.ones((M, 2), np.float32)}, ArgumentError, "b_scale"),
]


@pytest.mark.parametrize(("options", "error", "field"), OPTIONS, ids=str)
def test_a_wrong_option_is_named(options: dict[str, Any], error: type[FieldError], field: str) -> None:
    for function in (gemm, gemm_explain):
        with pytest.raises(error) as caught:
            function(HOST, HOST.T, **({"backend": "reference"} | options))  # type: ignore[operator]
        assert caught.value.field == field
        assert str(caught.value).startswith(f"{field} must be ")


@pytest.mark.parametrize(
    ("a", "b"), [((2, M, K), (3, K, N)), ((0, M, K), (2, K, N)), ((2, M, K), (2, K + 1, N)), ((2, M, K), (1, 1, K, N))]
)
def test_batches_must_agree(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    with pytest.raises(ArgumentError, match=r"^b\.shape must be .*got"):
        gemm(np.zeros(a, np.float16), np.zeros(b, np.float16), backend="reference")


@pytest.mark.parametrize("backend", ["emulator", "reference"])
def test_arrays_and_backend_must_be_in_the_same_place(backend: str) -> None:
    with pytest.raises(ArgumentError, match=r"^a\.device must be .*got device 0"):
        gemm(on_device("a"), on_device("b"), backend=backend)
    with pytest.raises(ArgumentError, match=r"^a\.device must be .*got the host"):
        gemm(HOST, HOST.T, backend="cuda")


def test_a_list_is_no_array() -> None:
    with pytest.raises(ArgumentTypeError, match=r"^a must be .*got list"):
        gemm([1.0], HOST, backend="reference")


@pytest.mark.parametrize("name", ["a", "b", "bias", "a_scale", "out"])
def test_a_tensor_that_requires_grad_is_refused_while_grad_is_enabled(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    torch = SimpleNamespace(is_grad_enabled=lambda: True)
    monkeypatch.setitem(sys.modules, "torch", torch)
    arrays = {each: on_device(each) for each in SHAPES}
    arrays[name] = on_device(name, kind="torch", owner=SimpleNamespace(requires_grad=True))
    with pytest.raises(ArgumentError, match=rf"^{name} must be .*got a tensor that requires grad; .*no_grad"):
        gemm_explain(**arrays)
    torch.is_grad_enabled = lambda: False
    with pytest.raises(ArgumentError, match=r"^a\.device"):
        gemm(**arrays, backend="reference")


def test_scales_of_blocks_need_wgmma(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDATMA_TARGET", "sm_120a")
    a, b = (np.zeros(shape, E4M3) for shape in ((M, K), (N, K)))
    scales = {"a_scale": np.ones((M, 2), np.float32), "b_scale": np.ones((2, 1), np.float32)}
    with pytest.raises(TargetError, match=r"^target must be a target with wgmma .*got sm_120a.*block scales"):
        gemm_explain(a, b.T, **scales)
    assert gemm_explain(a, b.T, a_scale=2.0).config.version == "mma_sync"
    assert gemm_explain(a, b.T, a_scale=2.0, target="sm_90a").gpu.target == "sm_90a"


def test_a_version_without_a_kernel_for_the_problem_is_named() -> None:
    a, b = (np.zeros(shape, E4M3) for shape in ((M, K), (N, K)))
    scales = {"a_scale": np.ones((M, 2), np.float32), "b_scale": np.ones((2, 1), np.float32)}
    with pytest.raises(ArgumentError, match=r'^version must be "v4" or "v5" for block scales.*got v3'):
        gemm_explain(a, b.T, version="v3", **scales)
    assert gemm_explain(a, b.T, **scales).config.version in ("v4", "v5")


# ---- What is copied


@pytest.mark.parametrize(
    ("a", "told"),
    [
        (np.zeros((M, K + 1), np.float16)[:, :K], "rows that do not start at multiples of 16 bytes"),
        (np.zeros((M, K + 8), np.float16)[:, 1 : K + 1], "rows that do not start at multiples of 16 bytes"),
        (np.zeros((M, 2 * K), np.float16)[:, ::2], "non-contiguous elements"),
        (np.zeros((M, K), np.float16)[::-1], "overlapping or reversed rows"),
        (np.zeros((2, M, K), np.float16)[::-1], "matrices in reverse order"),
        (np.zeros((K, M), E4M3).T, "non-contiguous elements"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_an_explanation_says_what_is_copied(a: Any, told: str) -> None:
    b = np.zeros((N, K), a.dtype).T
    assert gemm_explain(a, b).decision.why.endswith(f"; a is copied first because it has {told}")
    assert "copied" not in gemm_explain(np.zeros((M, K), a.dtype), b).decision.why


def test_a_batch_that_shares_b_is_one_matrix() -> None:
    a, b = np.zeros((BATCH, M, K), np.float16), np.zeros((K, N), np.float16)
    assert gemm_explain(a, b).problem.batch == 1
    assert gemm_explain(a, b).problem.m == BATCH * M
    assert gemm_explain(a, np.stack([b] * BATCH)).problem.batch == BATCH
    assert gemm_explain(a, b, out=np.zeros((BATCH, M + 1, N), np.float16)[:, :M]).problem.batch == BATCH
    assert gemm_explain(a, b, a_scale=np.ones(M, np.float32)).problem.batch == BATCH
    of_matrices = np.ones((BATCH, 1, 1), np.float32)
    scales = {"a_scale": np.ones((1, 1), np.float32), "b_scale": of_matrices}
    assert gemm_explain(np.zeros((BATCH, 1, 8), E4M3), np.zeros((8, 8), E4M3), **scales).problem.batch == BATCH


# ---- The reference


def matrix(rows: int, columns: int, letter: str, dtype: Any, seed: int) -> Any:
    """Return a row-major or column-major matrix."""
    if letter == "C":
        return matrix(columns, rows, "R", dtype, seed).T
    return np.random.default_rng(seed).standard_normal((rows, columns), np.float32).astype(dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float16", BF16, E4M3, E5M2], ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (5, 24, 64), (33, 7, 136), (1, 9, 3), (40, 1, 1)])
def test_the_reference_agrees_with_float64(m: int, n: int, k: int, dtype: Any, layout: str) -> None:
    a, b = matrix(m, k, layout[0], dtype, 0), matrix(k, n, layout[1], dtype, 1)
    y = gemm(a, b, backend="reference")
    assert (y.shape, y.dtype) == ((m, n), BF16 if a.dtype.itemsize == 1 else a.dtype)
    wanted = a.astype(np.float64) @ b.astype(np.float64)
    step = float(ml_dtypes.finfo(y.dtype).eps)
    np.testing.assert_allclose(y.astype(np.float64), wanted, rtol=step, atol=step)


EXACT = {
    None: lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: x * np.vectorize(lambda one: math.erfc(-one / math.sqrt(2)) / 2)(x),
    "gelu_tanh": lambda x: x / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x * (np.tanh(x / 2) + 1) / 2,
}


@pytest.mark.parametrize("backend", ["emulator", "reference"])
def test_gelu_of_minus_infinity_is_its_limit(backend: str) -> None:
    a, b = np.full((1, 8), -np.inf, np.float16), np.ones((8, 8), np.float16)
    assert not gemm(a, b, activation="gelu", backend=backend).any()


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_the_reference_applies_everything_in_order(activation: str | None) -> None:
    a, b = matrix(9, 40, "R", "float16", 0), matrix(40, 11, "C", "float16", 1)
    bias, out = matrix(1, 11, "R", np.float32, 2)[0], matrix(9, 11, "R", np.float32, 3)
    a_scale, b_scale = np.linspace(0.5, 1, 9, dtype=np.float32), np.linspace(1, 2, 11, dtype=np.float32)
    wanted = 0.3 * (a.astype(np.float64) @ b.astype(np.float64)) * np.outer(a_scale, b_scale) + 0.5 * out + bias
    options: dict[str, Any] = {"a_scale": a_scale, "b_scale": b_scale, "bias": bias, "activation": activation}
    gemm(a, b, out=out, alpha=0.3, beta=0.5, backend="reference", **options)
    np.testing.assert_allclose(out, EXACT[activation](wanted), rtol=1e-5, atol=1e-5)


def test_the_reference_applies_scales_of_blocks() -> None:
    a, b = matrix(BATCH * 5, 300, "R", E4M3, 0).reshape(BATCH, 5, 300), matrix(300, 140, "C", E4M3, 1)
    random = np.random.default_rng(2)
    a_scale, b_scale = random.random((BATCH, 5, 3), np.float32), random.random((3, 2), np.float32)
    y = gemm(a, b, a_scale=a_scale, b_scale=b_scale, out_dtype=np.float32, backend="reference")
    wanted = np.zeros((BATCH, 5, 140))
    for k in range(300):
        rows = a[:, :, k].astype(np.float64) * a_scale[:, :, k // 128]
        columns = b[k].astype(np.float64) * b_scale[k // 128, np.arange(140) // 128]
        wanted += rows[:, :, None] * columns
    np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-4)


def test_a_scale_of_one_element_may_have_any_shape() -> None:
    a, b = matrix(5, 24, "R", "float16", 0), matrix(24, 6, "R", "float16", 1)
    y = gemm(a, b, a_scale=np.full((1, 1, 1, 1), 2, np.float32), b_scale=np.float32(0.5), backend="reference")
    np.testing.assert_array_equal(y, gemm(a, b, backend="reference"))


@pytest.mark.parametrize(
    ("a", "b"), [((2, 5, 8), (2, 8, 6)), ((2, 5, 8), (8, 6)), ((5, 8), (2, 8, 6)), ((1, 5, 8), (3, 8, 6))]
)
def test_batches_are_numpys(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    left, right = (np.arange(math.prod(shape), dtype=np.float16).reshape(shape) % 7 for shape in (a, b))
    np.testing.assert_array_equal(gemm(left, right, backend="reference"), left @ right)


def test_a_beta_that_fp32_rounds_to_zero_reads_nothing() -> None:
    a, b = np.ones((M, K), np.float16), np.ones((K, N), np.float16)
    out = np.full((M, N), np.nan, np.float16)
    assert (gemm(a, b, out=out, beta=1e-50, backend="reference") == K).all()


def test_the_reference_takes_one_scale_as_that_of_a_block() -> None:
    a, b = matrix(15, 128, "R", E4M3, 0).reshape(3, 5, 128), matrix(128, 100, "C", E4M3, 1)
    given = {"a_scale": np.full((3, 5, 1), 2, np.float32), "backend": "reference"}
    np.testing.assert_array_equal(
        gemm(a, b, b_scale=np.full(1, 0.5, np.float32), **given), gemm(a, b, backend="reference")
    )


def test_the_callers_out_is_returned_and_its_gaps_are_left_alone() -> None:
    a, b = np.ones((M, K), np.float16), np.ones((K, N), np.float16)
    whole = np.full((M, N + 3), -1, np.float16)
    out = whole[:, 1 : N + 1]
    assert gemm(a, b, out=out, backend="reference") is out
    assert (out == K).all()
    assert (whole[:, [0, N + 1, N + 2]] == -1).all()


def test_what_out_held_is_read_for_beta_alone() -> None:
    a, b = np.ones((M, K), np.float16), np.ones((K, N), np.float16)
    out = np.full((M, N), np.nan, np.float16)
    assert (gemm(a, b, out=out, alpha=2, backend="reference") == 2 * K).all()


@pytest.mark.parametrize("backend", ["emulator", "reference"])
def test_no_rows_are_no_work(backend: str) -> None:
    a, b = np.ones((0, K), np.float16), np.ones((K, N), np.float16)
    assert gemm(a, b, backend=backend).shape == (0, N)
    assert gemm(b.T, a.T, backend=backend).shape == (N, 0)
    assert gemm(np.ones((0, M, K), np.float16), b, backend=backend).shape == (0, M, N)


def test_an_out_of_another_type_gives_the_result_its_type() -> None:
    out = np.zeros((M, N), np.float32)
    checked = checked_call(HOST, np.zeros((K, N), np.float16), out)
    assert checked.out is not None
    assert (checked.problem.out_dtype, checked.out.shape) == ("float32", (1, M, N))
    checked = checked_call(HOST, np.zeros((2, K, N), np.float16), out_dtype=BF16)
    assert (checked.shape, checked.dtype, checked.out) == ((2, M, N), BF16, None)


@pytest.mark.parametrize(
    ("shape", "strides", "pointer", "batch", "by_tma"),
    [
        ((40, 3), (4, 160), 0, 1, True),
        ((40, 3), (12, 4), 0, 1, False),  # row-major
        ((37, 3), (4, 160), 0, 1, True),  # padded columns
        ((37, 3), (4, 148), 0, 1, False),
        ((40, 3), (4, 160), 4, 1, False),
        ((2, 40, 3), (480, 4, 160), 0, 2, True),
        ((40, 3), (4, 160), 0, 2, True),  # all matrices have the same
        ((2, 40, 3), (484, 4, 160), 0, 2, False),
        ((1, 3), (12, 4), 0, 1, False),
    ],
    ids=str,
)
def test_which_scales_of_blocks_tma_reads(
    shape: tuple[int, ...], strides: tuple[int, ...], pointer: int, batch: int, by_tma: bool
) -> None:
    m, k, n = shape[-2], 384, 64
    memory = np.zeros(4096, np.uint8)
    at = -memory.ctypes.data % 16 + pointer
    a_scale = np.ndarray(shape, np.float32, memory.data, at, strides)
    a, b = np.zeros((batch, m, k), E4M3), np.zeros((batch, n, k), E4M3).swapaxes(1, 2)
    checked = checked_call(a, b, a_scale=a_scale, b_scale=np.ones((3, 1), np.float32))
    assert checked.problem.scales_by_tma == by_tma


def test_a_kernel_that_reads_scales_by_tma_refuses_others() -> None:
    a, b = np.zeros((40, 384), E4M3), np.zeros((64, 384), E4M3).T
    scales = {"a_scale": np.ones((40, 3), np.float32), "b_scale": np.ones((3, 1), np.float32)}
    problem = checked_call(a, b, **scales).problem
    made = config("v4", dtype=problem.dtype, tile_m=128, warpgroups=1).adapted(problem)
    with pytest.raises(ArgumentError, match=r"^scales_by_tma must be False .TMA.*got True"):
        gemm_arguments(problem, replace(made, scales_by_tma=True), H200)


def test_one_scale_for_all_rows_of_a_folded_batch_is_not_read_by_tma() -> None:
    a, b = np.zeros((8, 1, 128), E4M3), np.zeros((200, 128), E4M3).T
    scales = {"a_scale": np.ones((1, 1), np.float32), "b_scale": np.ones((1, 2), np.float32)}
    problem = checked_call(a, b, **scales).problem
    assert problem.m == 8
    assert not problem.scales_by_tma
