"""vLLM's kernels as competing libraries, without a GPU: torch on the CPU implements vLLM's operators."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import rivals
from benchmarks.harness import Contender, Measured, Timing
from benchmarks.layer import Layer
from benchmarks.rivals import common, vllm
from cudatma.dtypes import BFLOAT16

torch = pytest.importorskip("torch", reason="torch is not installed")

K, N, GROUP = 256, 128, 128
UINT4B8 = 1125899907892224  # vllm.scalar_type.scalar_types.uint4b8.id


def as_torch(array: Any) -> Any:
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16 if array.dtype == BFLOAT16 else torch.float16)


def product(x: Any, words: Any, scales: Any) -> Any:
    """Return x (M, K) times the weight that words (N, K / 8), lowest nibble first, and scales (K / 128, N) define."""
    codes = torch.stack([(words >> (4 * i)) & 15 for i in range(8)], dim=2).flatten(1)
    weight = (codes.double() - 8).t() * scales.double().repeat_interleave(GROUP, dim=0)
    return (x.double() @ weight).to(x.dtype)


class TorchOps:
    """The operators in torch.ops._C that are called. Their packing functions leave the words unchanged."""

    def __init__(self, *schedules: str) -> None:
        self.schedules = schedules
        self.weights_read: list[int] = []

    def gptq_marlin_repack(self, words: Any, order: Any, k: int, n: int, bits: int, is_a_8bit: bool) -> Any:
        assert (words.shape, words.dtype, words.is_contiguous()) == ((k // 8, n), torch.int32, True)
        assert (order.numel(), bits, is_a_8bit) == (0, 4, False)
        return words.clone()

    def marlin_gemm(self, x: Any, out: Any, weight: Any, bias: None, scales: Any, *rest: Any) -> Any:
        *absent, locks, kind, m, n, k, k_is_complete, atomics, fp32_reduction, float_zeros = rest
        assert absent == [None] * 5
        assert (kind, m, n, k) == (UINT4B8, len(x), N, K)
        assert (k_is_complete, atomics, fp32_reduction, float_zeros) == (True, False, True, False)
        assert not locks.any()
        self.weights_read.append(weight.data_ptr())
        restored = torch.zeros_like(scales)
        order = [i + 8 * j for i in range(8) for j in range(8)]  # vLLM's marlin_permute_scales
        for column in range(n):
            restored[:, column - column % 64 + order[column % 64]] = scales[:, column]
        return out.copy_(product(x, weight.t(), restored))

    def machete_prepack_B(self, words: Any, x_type: Any, kind: int, scale_type: Any) -> Any:  # noqa: N802
        assert (words.shape, words.stride(), x_type, kind) == ((K // 8, N), (1, K // 8), scale_type, UINT4B8)
        return words.clone()

    def machete_supported_schedules(self, x_type: Any, kind: int, scale_type: Any, *absent: None) -> list[str]:
        assert (x_type, kind, absent) == (scale_type, UINT4B8, (None,) * 4)
        return list(self.schedules)

    def machete_mm(self, x: Any, weight: Any, kind: int, out_type: None, scales: Any, *rest: Any) -> Any:
        assert (kind, out_type, rest[:-1]) == (UINT4B8, None, (None, GROUP, None, None))
        if "unable" in rest[-1]:
            raise RuntimeError("no kernel for this problem")
        self.weights_read.append(weight.data_ptr())
        return product(x, weight.t(), scales) * (0 if "wrong" in rest[-1] else 1)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", np)
    monkeypatch.setattr(common, "to_torch", as_torch)
    monkeypatch.setattr(common, "copies_for", lambda nbytes: 3)


def layer_of(dtype: str, k: int = K, n: int = N) -> Layer:
    kind = BFLOAT16 if dtype == "bfloat16" else np.float16
    x = np.random.default_rng(1).standard_normal((600, k)).astype(kind)
    return Layer(k, n, dtype, [], [], x, np.zeros((600, n), kind))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_marlin_gets_its_layouts_and_rotates_over_its_copies(dtype: str) -> None:
    ops, layer = TorchOps(), layer_of(dtype)
    rival = vllm.Marlin(layer, (5,), None, ops)
    (way,) = rival.contenders(None, 5, 3)
    assert (way.name, way.copies, way.launches % 3) == ("marlin", 3, 0)
    assert layer.out[:5].any()
    assert not layer.out[5:].any()
    ops.weights_read.clear()
    for index in range(4):
        way.run(index)
    assert len(set(ops.weights_read)) == 3
    assert ops.weights_read[3] == ops.weights_read[0], "the fourth launch reads the first copy again"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_fastest_schedules_of_machete_take_part(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    speed = {"128x16_a": 9.0, "128x64_a": 4.0, "128x256_a": 5.0, "128x128_a": 6.0}
    timed: list[str] = []

    def quick(stream: Any, way: Contender, launches: int) -> Measured:
        timed.append(way.name.removeprefix("machete "))
        us = speed[timed[-1]]
        return Measured({way.name: Timing(us, us, us, 1)})

    monkeypatch.setattr(common, "quick", quick)
    rival = vllm.Machete(layer_of(dtype), (5, 600), None, TorchOps(*speed, "128x64_wrong", "128x64_unable"))
    ways = rival.contenders(None, 5, 2)
    assert [way.name for way in ways] == ["machete 128x64_a", "machete 128x256_a"]
    assert timed == list(speed), "a schedule that is wrong or cannot run is not timed"
    assert "relative error of the result" in rival.errors["machete 128x64_wrong"]
    assert "no kernel for this problem" in rival.errors["machete 128x64_unable"]
    timed.clear()
    rival.contenders(None, 600, 9)
    assert timed == ["128x64_a", "128x256_a", "128x128_a"], "a tile of 16 tokens is not tried for 600 of them"


@pytest.mark.parametrize(("k", "n"), [(192, 128), (256, 32)])
def test_other_layers_are_refused(k: int, n: int) -> None:
    for rival in (vllm.Marlin, vllm.Machete):
        with pytest.raises(ValueError, match="must be a multiple"):
            rival(layer_of("float16", k, n), (1,), None, TorchOps())


def test_without_a_folder_or_a_library_the_cell_says_so(tmp_path: Path) -> None:
    layer = layer_of("float16")
    field = rivals.make_field(rivals.VLLM, layer, (1,))
    assert set(field.errors) == {"marlin", "machete"}
    assert all("--vllm" in why for why in field.errors.values())
    field = rivals.make_field(rivals.VLLM, layer, (1,), tmp_path)
    assert all(vllm.LIBRARY in why for why in field.errors.values())


def test_the_version_is_that_of_the_wheel(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    assert vllm.version_of(tmp_path / "vllm") == vllm.version_of(None) == ""
    metadata = tmp_path / "vllm-0.25.1.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.25.1\n")
    assert vllm.version_of(tmp_path / "vllm") == vllm.version_of(tmp_path) == "0.25.1"
