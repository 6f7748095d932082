"""Competing libraries without a GPU: a cuBLASLt that is written in NumPy, and libraries that fail."""

from __future__ import annotations

import ctypes
import re
import types
from ctypes import CFUNCTYPE, POINTER, c_float, c_int, cast
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import rivals
from benchmarks.harness import Contender
from benchmarks.rivals import cublaslt
from benchmarks.rivals.cublaslt import CublasLt

WORKSPACE = 1 << 20


class NumpyLt:
    """cuBLASLt's C functions as callbacks. Descriptors are numbers, and operands are accessed by address.

    Each function is called through the C interface, with the argument types that the binding declares.
    """

    def __init__(self, states: tuple[int, ...] = (0, 0), failing: str = "") -> None:
        self.objects: list[dict[Any, Any]] = [{}]
        self.states, self.failing = states, failing
        self.launches: list[tuple[int, int, int, int]] = []
        for name, arguments in cublaslt._SIGNATURES.items():
            method = re.sub("(?=[A-Z])", "_", name.removeprefix("cublasLt")).lower()
            setattr(self, name, CFUNCTYPE(c_int, *arguments)(self._answer(name, getattr(self, method))))

    def _answer(self, name: str, function: Any) -> Any:
        def call(*arguments: Any) -> int:
            function(*arguments)
            return 7 if name == self.failing else 0

        return call

    def _make(self, out: Any, **fields: Any) -> None:
        self.objects.append(fields)
        out[0] = len(self.objects) - 1

    def _create(self, out: Any) -> None:
        self._make(out)

    def _matmul_desc_create(self, out: Any, compute: int, scale: int) -> None:
        assert (compute, scale) == (68, 0), "CUBLAS_COMPUTE_32F, CUDA_R_32F"
        self._make(out, transposed=set())

    def _matmul_desc_set_attribute(self, operation: int, attribute: int, value: int, size: int) -> None:
        assert attribute in (3, 4), "CUBLASLT_MATMUL_DESC_TRANSA, CUBLASLT_MATMUL_DESC_TRANSB"
        assert (size, cast(value, POINTER(c_int))[0]) == (4, 1), "CUBLAS_OP_T"
        self.objects[operation]["transposed"].add("ab"[attribute - 3])

    def _matrix_layout_create(self, out: Any, kind: int, rows: int, columns: int, leading: int) -> None:
        assert kind == 2, "CUDA_R_16F"
        assert leading == rows, "dense"
        self._make(out, rows=rows, columns=columns, leading=leading)

    def _matmul_preference_create(self, out: Any) -> None:
        self._make(out)

    def _matmul_preference_set_attribute(self, preference: int, attribute: int, value: int, size: int) -> None:
        assert (attribute, size) == (1, 8), "CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES"
        assert cast(value, POINTER(ctypes.c_uint64))[0] == WORKSPACE

    def _matmul_algo_get_heuristic(self, *arguments: Any) -> None:
        *_, wanted, results, returned = arguments
        for index, state in enumerate(self.states[:wanted]):
            results[index].state = state
            results[index].algo.data[0] = 100 + index
        returned[0] = min(wanted, len(self.states))

    def _matmul_algo_config_get_attribute(
        self, algorithm: Any, attribute: int, value: int, size: int, written: Any
    ) -> None:
        assert size == {0: 4, 1: 4, 2: 4, 6: 4, 8: 2}[attribute]
        cast(value, POINTER(ctypes.c_uint16))[0] = algorithm[0].data[0] + attribute

    def _matmul(
        self,
        handle: int,
        operation: int,
        alpha: int,
        a: int,
        a_map: int,
        b: int,
        b_map: int,
        beta: int,
        c: int,
        c_map: int,
        d: int,
        d_map: int,
        algorithm: Any,
        space: int,
        size: int,
        stream: int,
    ) -> None:
        assert (cast(alpha, POINTER(c_float))[0], cast(beta, POINTER(c_float))[0]) == (1.0, 0.0)
        transposed = self.objects[operation]["transposed"]
        left, right = self._matrix(a, a_map), self._matrix(b, b_map)
        left, right = left.T if "a" in transposed else left, right.T if "b" in transposed else right
        product = left.astype(np.float64) @ right.astype(np.float64)
        self._matrix(d, d_map)[...] = product
        self.launches.append((algorithm[0].data[0], space, size, stream))

    def _matrix(self, address: int, number: int) -> Any:
        """Return the column-major matrix of a layout as a NumPy array over the same memory."""
        layout = self.objects[number]
        count = layout["leading"] * layout["columns"]
        memory = np.ctypeslib.as_array((ctypes.c_uint16 * count).from_address(address)).view(np.float16)
        return memory.reshape(layout["columns"], layout["leading"])[:, : layout["rows"]].T


@pytest.mark.parametrize("layout", ["RR", "RC", "CR", "CC"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 8, 16), (5, 24, 8), (16, 8, 40)])
def test_a_row_major_product_is_what_cublaslt_is_asked_for(m: int, n: int, k: int, layout: str) -> None:
    values = np.random.default_rng(1)
    a, b = (values.integers(-4, 5, shape).astype(np.float16) for shape in ((m, k), (k, n)))
    stored = [
        np.asarray(each, order="F" if letter == "C" else "C") for each, letter in zip((a, b), layout, strict=True)
    ]
    out = np.zeros((m, n), np.float16)
    library = NumpyLt()
    problem = CublasLt(library).problem(m, n, k, "float16", layout)
    algorithms = problem.algorithms(16, WORKSPACE)
    problem.run(algorithms[1], stored[0].ctypes.data, stored[1].ctypes.data, out.ctypes.data, 4096, WORKSPACE, 77)
    np.testing.assert_array_equal(out, a.astype(np.float64) @ b.astype(np.float64))
    assert library.launches == [(101, 4096, WORKSPACE, 77)]


def test_the_library_that_the_process_has_loaded_comes_first(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    line = "7f0-7f1 r-xp 0 08:01 123456 {}\n"
    maps.write_text(line.format("/usr/lib/libc.so.6") + line.format("/opt/my libs/libcublasLt.so.13.1") * 2)
    assert cublaslt.loaded_library(maps)[:2] == ["/opt/my libs/libcublasLt.so.13.1", "libcublasLt.so.13"]
    assert cublaslt.loaded_library(tmp_path / "none")[0] == "libcublasLt.so.13"
    with pytest.raises(OSError, match=r"cuBLASLt cannot be loaded.*libnothing\.so\.1"):
        cublaslt.load_library(["libnothing.so.1"])


# ---- The field ------------------------------------------------------------------------------------------------------


class Good:
    name = "good"

    def __init__(self, layer: Any, tokens: Any) -> None:
        self.errors: dict[str, str] = {"part": "of it is missing"}

    def contenders(self, stream: Any, m: int, count: int) -> list[Contender]:
        return [Contender(f"good {number}", lambda index: None, 1, 1) for number in range(count)] if m < 100 else []


class Wrong(Good):
    name = "wrong"

    def contenders(self, stream: Any, m: int, count: int) -> list[Contender]:
        raise ArithmeticError("wrong result: the relative error is 1")


def test_a_rival_that_fails_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    here = types.ModuleType("a_rival")
    vars(here).update(Good=Good, Wrong=Wrong)
    monkeypatch.setitem(__import__("sys").modules, "a_rival", here)
    names = {"good": ("a_rival", "Good"), "wrong": ("a_rival", "Wrong"), "absent": ("no_such_module", "X")}
    monkeypatch.setattr(rivals, "RIVALS", names)
    field = rivals.make_field(tuple(names), None, (1,))  # type: ignore[arg-type]
    assert list(field.errors) == ["absent"]
    assert "no_such_module" in field.errors["absent"]
    found, errors = field.contenders(None, 1, 2)
    assert [each.name for each in found["good"]] == ["good 0", "good 1"]
    assert errors["wrong"] == "ArithmeticError: wrong result: the relative error is 1"
    assert set(errors) == {"absent", "wrong", "part"}
    assert field.contenders(None, 100, 2)[0] == {}, "it takes no part in so many tokens"


def test_the_named_rivals_can_be_imported() -> None:
    # Without torch or humming: what they need they import when they are made.
    for module, kind in rivals.RIVALS.values():
        assert hasattr(__import__(module, fromlist=[kind]), kind)


# ---- Wrong results (with torch alone) -------------------------------------------------------------------------------


def test_a_wrong_result_is_refused() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from benchmarks.rivals.common import check, dense_weight

    codes = torch.randint(0, 256, (64, 128), dtype=torch.uint8)
    scales = (torch.rand(2, 64) / 50 + 0.01).to(torch.bfloat16)
    weight = dense_weight(codes, scales)
    assert weight[3, 5] == ((int(codes[5, 1]) >> 4) - 8) * scales[0, 5]
    assert weight[128, 5] == ((int(codes[5, 64]) & 15) - 8) * scales[1, 5]
    x = torch.randn(40, 256).to(torch.bfloat16)
    out = x @ weight
    check(out, x, weight)
    check(out[:1], x[:1], weight)
    out[39] = 0
    with pytest.raises(ArithmeticError, match="relative error"):
        check(out, x, weight)
    out[39] = float("nan")
    with pytest.raises(ArithmeticError, match="nan"):
        check(out, x, weight)


def test_cublas_keeps_the_fastest_of_all_its_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from benchmarks.harness import Measured, Timing
    from benchmarks.layer import Layer
    from benchmarks.rivals import common, cublas

    monkeypatch.setattr(cublas, "to_torch", torch.from_numpy)
    monkeypatch.setattr(cublas, "current_stream", lambda: 77)
    speed = {"cublas kn": 9.0, "cublas nk": 5.0, "cublaslt kn 0": 7.0, "cublaslt kn 1": 8.0, "cublaslt nk 1": 4.0}

    def quick(stream: Any, way: Contender, launches: int) -> Measured:
        way.run(0)
        us = speed.get(way.name)
        return Measured({}, {way.name: "cannot"}) if us is None else Measured({way.name: Timing(us, us, us, 1)})

    monkeypatch.setattr(common, "quick", quick)
    values = np.random.default_rng(2)
    x = values.standard_normal((4, 64)).astype(np.float16)
    dense = [torch.from_numpy(values.standard_normal(64 * 64).astype(np.float16)) for _ in range(2)]
    layer = Layer(64, 64, "float16", [], dense, x, np.zeros((4, 64), np.float16))
    library = NumpyLt()
    monkeypatch.setattr(cublas, "WORKSPACE_BYTES", WORKSPACE)
    rival = cublas.Cublas(layer, (4,), CublasLt(library))
    chosen = rival.contenders(None, 4, 3)
    assert [way.name for way in chosen] == ["cublaslt nk 1", "cublas nk", "cublaslt kn 0"]
    assert rival.errors == {}
    assert {launch[3] for launch in library.launches} == {77}
    out = rival.out.numpy()
    for way, weight in ((chosen[0], dense[1].view(64, 64).t()), (chosen[2], dense[1].view(64, 64))):
        way.run(1)
        np.testing.assert_allclose(out, (torch.from_numpy(x).float() @ weight.float()).numpy(), rtol=2e-2, atol=1e-1)
    # Without cuBLASLt torch.mm alone takes part, and the cell says why.
    rival = cublas.Cublas(layer, (4,), CublasLt(NumpyLt(failing="cublasLtMatmulAlgoGetHeuristic")))
    assert [way.name for way in rival.contenders(None, 4, 3)] == ["cublas nk", "cublas kn"]
    assert "cublasLtMatmulAlgoGetHeuristic" in rival.errors["cublaslt"]
