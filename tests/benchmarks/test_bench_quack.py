"""QuACK's W4A16 GEMM as a rival, without a GPU: its functions written with torch on the CPU."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest

from benchmarks.harness import Contender, Measured, Timing
from benchmarks.layer import Layer
from benchmarks.rivals import common, quack
from cudatma.dtypes import BFLOAT16

torch = pytest.importorskip("torch", reason="torch is not installed")

K, N, GROUP = 256, 128, 128


def as_torch(array: Any) -> Any:
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


class TorchQuack(types.ModuleType):
    """quack.gemm_w4. Its packing keeps the codes as they come: the even k in the low nibble."""

    def __init__(self) -> None:
        super().__init__("quack.gemm_w4")
        self.asked: list[dict[str, int]] = []
        self.read: list[int] = []

    def prepare_w4_weight(self, codes: Any, scales: Any, wformat: str) -> tuple[Any, Any]:
        assert (codes.shape, codes.dtype, scales.shape) == ((N, K // 2), torch.uint8, (N, K // GROUP))
        assert wformat == "int4"
        return codes, scales

    def gemm_w4a16(self, x: Any, blob: Any, strips: Any, *, out: Any, wformat: str, **options: int) -> Any:
        assert wformat == "int4"
        if options.get("tile_n") == 192:
            raise RuntimeError("no such tile")
        weight = torch.empty(N, K, dtype=torch.float64)
        weight[:, 0::2], weight[:, 1::2] = (blob & 15).double() - 8, (blob >> 4).double() - 8
        weight *= strips.double().repeat_interleave(GROUP, dim=1)
        out.copy_(x.double() @ weight.t() if options.get("cluster_n") != 2 else torch.zeros(len(x), N))
        self.asked.append(options)
        self.read.append(blob.data_ptr())
        return out


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> TorchQuack:
    made = TorchQuack()
    monkeypatch.setitem(sys.modules, "cupy", np)
    monkeypatch.setitem(sys.modules, "quack", types.ModuleType("quack"))
    monkeypatch.setitem(sys.modules, "quack.gemm_w4", made)
    monkeypatch.setattr(common, "to_torch", as_torch)
    monkeypatch.setattr(common, "copies_for", lambda nbytes: 3)
    return made


def layer_of(k: int = K, n: int = N, dtype: str = "bfloat16") -> Layer:
    x = np.random.default_rng(1).standard_normal((130, k)).astype(BFLOAT16)
    return Layer(k, n, dtype, [], [], x, np.zeros((130, n), BFLOAT16))


def timed_as(us: dict[str, float]) -> Any:
    def quick(stream: Any, way: Contender, launches: int) -> Measured:
        return Measured({way.name: Timing(us[way.name], us[way.name], us[way.name], 1)})

    return quick


def test_few_tokens_run_what_quack_chooses(package: TorchQuack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "quick", timed_as({"quack": 3.0}))
    rival = quack.Quack(layer_of(), (5,))
    (way,) = rival.contenders(None, 5, 3)
    assert (way.name, way.copies, way.launches % 3) == ("quack", 3, 0)
    assert package.asked == [{}]
    package.read.clear()
    for index in range(4):
        way.run(index)
    assert len(set(package.read)) == 3
    assert package.read[3] == package.read[0], "the fourth launch reads the first copy again"
    assert not rival.errors


def test_many_tokens_run_the_fastest_tile(package: TorchQuack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "quick", timed_as({"quack": 3.0, "quack 128x128 c1x1": 4.0, "quack 128x256 c1x1": 2.0}))
    rival = quack.Quack(layer_of(), (130,))
    assert [way.name for way in rival.contenders(None, 130, 2)] == ["quack 128x256 c1x1", "quack"]
    assert {"tile_m": 128, "tile_n": 256, "cluster_n": 1, "split_k": 1} in package.asked
    assert "no such tile" in rival.errors["quack 128x192 c1x1"]
    assert "wrong result" in rival.errors["quack 128x256 c1x2"], "a wrong result is not timed"


@pytest.mark.parametrize(("k", "n", "dtype"), [(192, 128, "bfloat16"), (256, 64, "bfloat16"), (256, 128, "float16")])
def test_other_layers_are_refused(package: TorchQuack, k: int, n: int, dtype: str) -> None:
    with pytest.raises(ValueError, match=r"no multiple|bf16 only"):
        quack.Quack(layer_of(k, n, dtype), (1,))
