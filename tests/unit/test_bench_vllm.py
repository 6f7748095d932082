"""vLLM's kernels as rivals, without a GPU: C functions written in NumPy, called through ctypes."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import types
from ctypes import CFUNCTYPE, c_char_p, c_void_p, create_string_buffer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import rivals
from benchmarks.harness import Contender, Measured, Timing
from benchmarks.layer import Layer
from benchmarks.rivals import fastest, vllm
from cudatma.dtypes import BFLOAT16

K, N, GROUP, SMS = 256, 128, 128, 3


def array(address: int, shape: tuple[int, ...], dtype: Any) -> Any:
    """The memory at an address as an array."""
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_uint8 * count).from_address(address), dtype).reshape(shape)


def product(x: Any, codes: Any, scales: Any) -> Any:
    """x (M, K) times the weight of codes (K, N) and scales (K / 128, N), element by element."""
    weight = np.zeros(codes.shape)
    for k in range(codes.shape[0]):
        weight[k] = (codes[k].astype(int) - 8) * scales[k // GROUP].astype(np.float64)
    return x.astype(np.float64) @ weight


def codes_of(words: Any, axis: int) -> Any:
    """Eight codes a word, the first in the low nibble, along an axis of a 2D array."""
    parts = [(words.view(np.uint32) >> np.uint32(4 * i)) & 15 for i in range(8)]
    stacked = np.stack(parts, axis=axis + 1)
    shape = list(words.shape)
    shape[axis] *= 8
    return stacked.reshape(shape)


class NumpyLibrary:
    """Functions of both libraries. Their packings keep the words as they come, so that what is packed can be read."""

    def __init__(
        self, schedules: dict[str, int] | None = None, failing: dict[str, int] | None = None, dtype: Any = np.float16
    ) -> None:
        self.schedules, self.failing, self.dtype = schedules or {}, failing or {}, dtype
        self.names = [create_string_buffer(name.encode()) for name in self.schedules]
        self.reason = create_string_buffer(b"check failed: thread_k")
        self.workspaces: list[tuple[int, ...]] = []
        self.weights_read: list[int] = []
        for name, (result, arguments) in (vllm._MARLIN | vllm._MACHETE).items():
            # A callback cannot return text that somebody would own: it returns where the text is.
            kind = CFUNCTYPE(c_void_p if result is c_char_p else result, *arguments)
            setattr(self, name, kind(getattr(self, "_" + name)))

    def _marlin_error(self) -> int:
        return ctypes.addressof(self.reason)

    def _marlin_repack(self, source: int, to: int, k: int, n: int, stream: int) -> int:
        assert stream == 77
        array(to, (k // 8, n), np.uint32)[...] = array(source, (k // 8, n), np.uint32)
        return 0

    def _marlin_gemm(
        self, x: int, weight: int, out: int, partials: int, scales: int, locks: int, *sizes_and_stream: int
    ) -> int:
        m, n, k, group, sms, stream = sizes_and_stream
        assert (group, sms, stream) == (GROUP, SMS, 77)
        assert not array(locks, (4 * sms,), np.int32).any()
        assert array(partials, (sms * 64 * 256,), np.float32).size
        if self.failing.get("marlin"):
            return self.failing["marlin"]
        self.weights_read.append(weight)
        permuted = array(scales, (k // group, n), np.float16)
        restored = np.zeros_like(permuted)
        for column in range(n):  # vLLM's scale_perm: [i + 8 * j for i in range(8) for j in range(8)]
            place = column % 64
            restored[:, column - place + (place // 8 + 8 * (place % 8))] = permuted[:, column]
        codes = codes_of(array(weight, (k // 8, n), np.uint32), 0)
        array(out, (m, n), np.float16)[...] = product(array(x, (m, k), np.float16), codes, restored)
        return 0

    def _machete_count(self) -> int:
        return len(self.names)

    def _machete_name(self, number: int) -> int:
        return ctypes.addressof(self.names[number])

    def _machete_tokens(self, number: int) -> int:
        return list(self.schedules.values())[number]

    def _machete_workspace(self, *problem: int) -> int:
        self.workspaces.append(problem)
        return 4096

    def _machete_prepack(self, source: int, to: int, n: int, k: int, stream: int) -> int:
        assert stream == 77
        array(to, (n, k // 8), np.uint32)[...] = array(source, (n, k // 8), np.uint32)
        return 0

    def _machete_run(self, number: int, x: int, weight: int, scales: int, out: int, *rest: int) -> int:
        m, n, k, group, workspace, stream = rest
        assert (group, stream) == (GROUP, 77)
        array(workspace, (4096,), np.uint8)[...] = 1
        name = self.names[number].value.decode()
        self.weights_read.append(weight)
        codes = codes_of(array(weight, (n, k // 8), np.uint32), 1).T
        result = product(array(x, (m, k), self.dtype), codes, array(scales, (k // group, n), self.dtype))
        array(out, (m, n), self.dtype)[...] = result if name != "wrong" else 0
        return self.failing.get(name, 0)


def check(out: Any, x: Any, weight: Any) -> None:
    reference = x.astype(np.float64) @ weight.astype(np.float64)
    if not np.allclose(out, reference, rtol=1e-2, atol=1e-2 * abs(reference).max()):
        raise ArithmeticError("wrong result")


@pytest.fixture
def layer(monkeypatch: pytest.MonkeyPatch) -> Layer:
    monkeypatch.setitem(sys.modules, "cupy", np)
    monkeypatch.setattr(vllm, "address", lambda array: array.ctypes.data)
    monkeypatch.setattr(vllm, "processors", lambda: SMS)
    monkeypatch.setattr(vllm, "current_stream", lambda: 77)
    monkeypatch.setattr(vllm, "to_torch", lambda array: array)
    monkeypatch.setattr(vllm, "check", check)
    monkeypatch.setattr(vllm, "copies_for", lambda nbytes: 3)
    x = np.random.default_rng(1).standard_normal((600, K)).astype(np.float16)
    return Layer(K, N, "float16", [], [], x, np.zeros((600, N), np.float16))


def test_a_weight_is_what_its_words_mean() -> None:
    values = np.random.default_rng(2)
    words = values.integers(0, 1 << 32, (64, K // 8), dtype=np.uint32).view(np.int32)
    scales = values.uniform(0.01, 0.02, (K // GROUP, 64)).astype(np.float16)
    weight = vllm.dense_weight(np, words, scales)
    assert weight.shape == (K, 64)
    for k, n in ((0, 0), (7, 3), (8, 3), (127, 63), (128, 63), (255, 1)):
        code = (int(words.view(np.uint32)[n, k // 8]) >> (4 * (k % 8))) & 15
        assert weight[k, n] == np.float16(code - 8) * scales[k // GROUP, n]


def test_marlin_gets_its_layouts_and_rotates_over_its_copies(layer: Layer) -> None:
    library = NumpyLibrary()
    rival = vllm.Marlin(layer, (5,), None, library)
    (way,) = rival.contenders(None, 5, 3)
    assert (way.name, way.copies, way.launches % 3) == ("marlin", 3, 0)
    for index in range(4):
        layer.out.fill(0)
        way.run(index)
        check(layer.out[:5], layer.x[:5], rival.weights.reference)
        assert not layer.out[5:].any()
    assert len(set(library.weights_read)) == 3
    assert library.weights_read[-1] == library.weights_read[1], "the fourth launch reads the first copy again"


def test_what_marlin_refuses_is_said(layer: Layer) -> None:
    rival = vllm.Marlin(layer, (5,), None, NumpyLibrary(failing={"marlin": -1}))
    with pytest.raises(RuntimeError, match="marlin_gemm returned -1 check failed: thread_k"):
        rival.contenders(None, 5, 3)


def test_the_fastest_schedules_of_machete_take_part(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    speed = {"machete small": 9.0, "machete middle": 4.0, "machete large": 5.0, "machete other": 6.0}
    schedules = {"small": 16, "middle": 64, "large": 256, "other": 128, "wrong": 64, "unable": 64}
    asked: list[str] = []

    def quick(stream: Any, way: Contender, launches: int) -> Measured:
        asked.append(way.name)
        assert launches >= 2
        us = speed[way.name]
        return Measured({way.name: Timing(us, us, us, 1)})

    monkeypatch.setattr(fastest, "quick", quick)
    library = NumpyLibrary(schedules, {"unable": 1000})
    rival = vllm.Machete(layer, (5, 600), None, library)
    ways = rival.contenders(None, 5, 2)
    assert [way.name for way in ways] == ["machete middle", "machete large"]
    assert asked == list(speed), "a schedule that is wrong or cannot run is not timed"
    assert set(rival.errors) == {"machete wrong", "machete unable"}
    assert "wrong result" in rival.errors["machete wrong"]
    assert "machete_run returned 1000" in rival.errors["machete unable"]
    assert library.workspaces[0] == (0, 5, N, K, GROUP)
    layer.out.fill(0)
    ways[0].run(2)
    check(layer.out[:5], layer.x[:5], rival.weights.reference)
    # A tile of 16 tokens is not asked for 600 of them.
    asked.clear()
    assert [way.name for way in rival.contenders(None, 600, 9)] == [
        f"machete {n}" for n in ("middle", "large", "other")
    ]
    assert "machete small" not in asked


def test_machete_takes_bf16(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    took = {"machete small": Timing(2.0, 2.0, 2.0, 1)}
    monkeypatch.setattr(fastest, "quick", lambda stream, way, launches: Measured(took))
    other = Layer(K, N, "bfloat16", [], [], layer.x.astype(BFLOAT16), layer.out.astype(BFLOAT16))
    rival = vllm.Machete(other, (5,), None, NumpyLibrary({"small": 16}, dtype=BFLOAT16))
    (way,) = rival.contenders(None, 5, 1)
    other.out.fill(0)
    way.run(1)
    check(other.out[:5], other.x[:5], rival.weights.reference)
    codes, scales = codes_of(rival.weights.arrays[0][0].view(np.uint32), 1).T, rival.weights.arrays[0][1]
    exact = (codes.astype(np.float64) - 8) * np.repeat(scales, GROUP, axis=0).astype(np.float64)
    np.testing.assert_array_equal(rival.weights.reference, exact.astype(BFLOAT16))
    field = rivals.make_field(("machete",), other, (5,), Path("no such folder"))
    assert "libmachete_bf16.so" in field.errors["machete"]


@pytest.mark.parametrize(("k", "n"), [(192, 128), (256, 64)])
def test_other_layers_are_refused(layer: Layer, k: int, n: int) -> None:
    other = Layer(k, n, "float16", [], [], layer.x, layer.out)
    with pytest.raises(ValueError, match="no multiple"):
        vllm.Machete(other, (1,), None, NumpyLibrary({"small": 16}))
    with pytest.raises(ValueError, match="fp16 only"):
        vllm.Marlin(Layer(K, N, "bfloat16", [], [], layer.x, layer.out), (1,), None, NumpyLibrary())


def test_without_a_folder_or_a_library_the_cell_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", np)
    monkeypatch.setattr(vllm, "processors", lambda: SMS)
    layer: Any = types.SimpleNamespace(k=K, n=N, dtype="float16")
    field = rivals.make_field(rivals.VLLM, layer, (1,))
    assert set(field.errors) == {"marlin", "machete"}
    assert all("--vllm" in why for why in field.errors.values())
    field = rivals.make_field(rivals.VLLM, layer, (1,), tmp_path)
    assert "libmachete.so" in field.errors["machete"]
    assert vllm.version_of(tmp_path) == vllm.version_of(None) == ""
    (tmp_path / "VERSION").write_text("vLLM 0.33.0\n")
    assert vllm.version_of(tmp_path) == "vLLM 0.33.0"


def test_the_sources_export_what_is_called() -> None:
    folder = Path(vllm.__file__).parent / "vllm_build"
    text = "".join((folder / name).read_text() for name in ("marlin.cu", "machete.cu", "machete_table.cu"))
    for name, (_, arguments) in (vllm._MARLIN | vllm._MACHETE).items():
        (declared,) = [part.split("{")[0] for part in text.split('extern "C" ') if f" {name}(" in part.split("{")[0]]
        inside = declared.partition("(")[2].rpartition(")")[0]
        assert len([each for each in inside.split(",") if each.strip()]) == len(arguments), name
    subprocess.run(["bash", "-n", str(folder / "build.sh")], check=True, timeout=30)
