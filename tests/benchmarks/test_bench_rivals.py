"""Competing libraries without a GPU: the search for cuBLASLt, libraries that fail, and wrong results."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest

from benchmarks import rivals
from benchmarks.harness import Contender
from benchmarks.rivals import cublaslt


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
