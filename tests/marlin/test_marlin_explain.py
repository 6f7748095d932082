"""marlin_explain: a GEMM's configuration, the reason and the predicted time, as text and as JSON, without a GPU."""

from __future__ import annotations

import builtins
import json
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from marlin_builders import skinny

from cudatma import backend
from cudatma.errors import ArgumentError, ArgumentTypeError, DriverError, LaunchError, TargetError, duration
from cudatma.kernels import choice
from cudatma.kernels.explain import Explanation, plain_table, table_text
from cudatma.kernels.gpu import H200, imagined_gpu
from cudatma.kernels.marlin import choose
from cudatma.kernels.marlin.choose import MARLIN, choose_by_cost, launched, marlin_explain
from cudatma.kernels.marlin.linear import MarlinLinear
from cudatma.kernels.marlin.problem import LinearShape, Problem
from cudatma.kernels.tuning import Entry, GpuClass, store_entry
from cudatma.quantization import quantize

LAYER = LinearShape(4096, 4096, 128, False, "float16")
LARGE = LinearShape(8192, 28672, 128, False, "bfloat16")


def explained(layer: Any = LAYER, m: int = 16, **options: Any) -> Explanation:
    return marlin_explain(layer, m, **({"target": "sm_90a", "sm_count": 132} | options))


def test_a_prediction_for_another_division_says_so() -> None:
    """The cost model divides as in one row of tiles where the schedule divides the partial wave alone."""
    alone = explained(LinearShape(28672, 8192, 128, False, "bfloat16"), 4096)
    assert 0 < alone.schedule.stream_tiles < alone.schedule.work_ranges
    assert "; predicted as if tiles were divided as in one row of them" in str(alone)
    whole = explained(LinearShape(16512, 20480, 128, False, "float16"), 1024)
    assert whole.schedule.stream_tiles == 0 == whole.prediction.reduction_us
    assert "predicted as if" not in str(whole)
    assert "predicted as if" not in str(explained(LARGE, 128))


@pytest.mark.parametrize(
    ("layer", "m", "target", "kernel"),
    [(LAYER, 1, "sm_90a", "skinny"), (LAYER, 64, "sm_90a", "wgmma"), (LARGE, 512, "sm_120a", "mma_sync")],
)
def test_it_tells_the_choice_and_why(layer: LinearShape, m: int, target: str, kernel: str) -> None:
    said = explained(layer, m, target=target)
    assert said.kernel == kernel
    assert said.config == launched(choose_by_cost(Problem(layer, m), imagined_gpu(target, 132)))
    assert said.decision.source == "rule"
    us = duration(1e-6 * said.prediction.us)
    assert said.decision.why.startswith(f"the cheapest by the cost model, {us}, of the ")
    assert said.considered >= len(said.candidates) > 1


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        ({"n": 0}, ArgumentError, r"n: got 0; allowed: 1 to"),
        ({"k": -1}, ArgumentError, r"k: got -1; allowed: 1 to"),
        ({"k": 2**31}, ArgumentError, r"k: got 2147483648"),
        ({"k": "64"}, ArgumentTypeError, r"k: got '64'; allowed: int"),
        ({"group_size": 64.0}, ArgumentTypeError, r"group_size: got 64\.0; allowed: int"),
        ({"group_size": 100}, ArgumentError, r"group_size: got 100; allowed: 32, 64, 128, -1"),
        ({"has_zeros": "x"}, ArgumentTypeError, r"has_zeros: got 'x'; allowed: bool"),
        ({"dtype": "int8"}, ArgumentTypeError, r"dtype: got int8; allowed: float16, bfloat16"),
    ],
)
def test_a_layer_that_is_none_is_refused(wrong: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=f"^{said}"):
        replace(LAYER, **wrong)


def test_a_tuning_entry_is_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path, config = tmp_path / "tuned.json", skinny(tile_m=16, tile_n=32, tile_k=256, slice_k=4, stages=5)
    monkeypatch.setenv("CUDATMA_TUNE_FILE", str(path))
    store_entry(path, GpuClass.of(H200), MARLIN, Entry(Problem(LAYER, 16), config, 5.5, 5.9))
    choice.forget()
    said = explained(LAYER, 13)
    choice.forget()
    assert (said.decision.source, said.config) == ("tuned", config)
    gain = "5.50 us, where the cost model's choice took 5.90 us"
    assert f"{path} has this problem, measured at M = 16: {gain}" in str(said)
    assert "marlin_skinny_f16_g128_16x32x256_k4_s5" in str(said)


def test_as_json() -> None:
    said = explained(LARGE, 200)
    data = json.loads(json.dumps(said.as_dict()))
    assert data["layer"] == asdict(LARGE)
    assert data["config"]["tile_m"] == said.config.tile_m
    assert data["kernel"] == "wgmma"
    assert data["entry"] == said.config.entry
    assert data["prediction"]["us"] == said.prediction.us
    terms = [data["prediction"][f"{term}_us"] for term in ("launch", "sm", "reduction", "memory", "tensor")]
    assert sum(terms) == pytest.approx(said.prediction.us)
    assert data["prediction"]["bound"] == said.prediction.bound
    assert data["schedule"]["tiles_n"] == said.schedule.tiles_n
    best = [one["us"] for one in data["candidates"]][:8]
    assert best == sorted(best)
    assert [one["label"] for one in data["candidates"] if one["chosen"]] == [said.config.entry]
    assert data["considered"] == said.considered


def test_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_has_usable_gpu", lambda: False)
    text = str(explained(LAYER, 1))
    lines = text.splitlines()
    assert lines[0] == "M = 1, K = 4096, N = 4096, int4 weights, float16, groups of 128, symmetric"
    assert lines[1].startswith("on sm_90a (assumed; this machine has no usable GPU), 132 SMs")
    assert " 0 s" not in text
    assert any(line.startswith("predicted  ") and "main loop" in line for line in lines)
    marked = [line for line in lines if line.startswith("->")]
    assert len(marked) == 1, "the choice is among the candidates"
    assert re.search(rf"  skinny  +\d  +{explained(LAYER, 1).config.entry}$", marked[0])
    assert "\x1b" not in text
    assert all(len(line) <= 160 for line in lines)
    assert "zero points" in str(explained(LinearShape(512, 512, -1, True, "float16"), 4))


def test_without_rich_the_table_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [("->", "5.1", "memory"), ("", "12.5", "L2")]
    shown = plain_table("Title", ("", "us", "bound by"), rows)
    assert shown.splitlines() == ["Title", "    us    bound by", "->  5.1   memory", "    12.5  L2"]
    real = builtins.__import__

    def without_rich(name: str, *rest: Any) -> Any:
        if name.split(".")[0] == "rich":
            raise ImportError(name)
        return real(name, *rest)

    for name in [name for name in sys.modules if name.split(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without_rich)
    assert table_text("Title", ("", "us", "bound by"), rows) == shown


def test_it_takes_weights_and_linear_layers() -> None:
    packed = quantize(np.ones((256, 192), np.float32), group_size=64, symmetric=False)
    wanted = LinearShape(256, 192, 64, True, "float16")
    assert explained(packed, 3).problem.layer == explained(MarlinLinear(packed), 3).problem.layer == wanted


def test_without_a_gpu_an_h200_is_imagined(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> int:
        raise DriverError("cuInit", None, "no driver")

    monkeypatch.setattr(choose.context, "current_device", none)
    assert marlin_explain(LAYER, 1).gpu == H200
    monkeypatch.setenv("CUDATMA_TARGET", "sm_120a")
    assert marlin_explain(LAYER, 1).gpu.target == "sm_120a"
    assert marlin_explain(LAYER, 1, sm_count=20).gpu.sm_count == 20


def test_what_is_asked_for_wrongly() -> None:
    for m in (0, -1):
        with pytest.raises(ArgumentError, match=r"^m: "):
            explained(LAYER, m)
    for wrong in (1.5, "4", True):
        with pytest.raises(ArgumentTypeError, match=r"^m: "):
            explained(LAYER, wrong)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match=r"PackedWeight, cudatma\.MarlinLinear or LinearShape"):
        explained(np.ones((4, 4)))
    with pytest.raises(TargetError):
        explained(target="sm_75")
    with pytest.raises(ArgumentError, match="sm_count"):
        explained(sm_count=0)
    with pytest.raises(ArgumentError, match=r"^device: "):
        explained(device=0)
    with pytest.raises((DriverError, LaunchError, TargetError)):
        marlin_explain(LAYER, 1, device=77)
