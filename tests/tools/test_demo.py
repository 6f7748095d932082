"""The demo: its layer, its choice of backend, and that it fails where results are wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cudatma
from cudatma.errors import ArgumentError, DriverError, no_driver
from tools import demo

pytestmark = pytest.mark.usefixtures("without_ptxas")


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "MODEL_PACKAGE", "no_such_package_of_weights")


@pytest.fixture
def small_layer(no_model: None, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = demo.load_layer()
    layer = replace(whole, weight=np.ascontiguousarray(whole.weight[:512, :64]), bias=whole.bias[:64])
    monkeypatch.setattr(demo, "load_layer", lambda: layer)


def test_without_the_model_a_seeded_layer_takes_its_place(no_model: None) -> None:
    first, second = demo.load_layer(), demo.load_layer()
    assert first.weight.shape == (1536, 384)
    assert "random" in first.name
    assert np.array_equal(first.weight, second.weight)


def test_the_reference_keeps_the_limit(no_model: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--backend", "reference", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["backend"] == "reference"
    assert found["shape"] == [1536, 384]
    assert found["packed_bytes"] < 0.3 * found["fp16_bytes"]
    assert 0.01 < found["weight_error"] < 0.2
    assert [result["tokens"] for result in found["results"]] == list(demo.M_VALUES)
    assert all(0 < result["error"] <= demo.ERROR_LIMIT for result in found["results"])


def test_wrong_results_are_a_failure(
    no_model: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = cudatma.marlin_gemm

    def wrong(x: Any, w: Any, **options: Any) -> Any:
        return right(x, w, **options) * np.float16(1.01)

    monkeypatch.setattr(cudatma, "marlin_gemm", wrong)
    assert demo.main(["--backend", "reference"]) == 1
    assert "BEYOND" in capsys.readouterr().out


def test_without_a_gpu_the_emulator_runs_the_kernel_and_draws_its_pipeline(
    small_layer: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.delenv("CUDATMA_BACKEND", raising=False)
    monkeypatch.setattr(demo, "selected_backend", lambda wanted: "emulator")
    monkeypatch.setattr(demo, "M_VALUES", (3,))
    monkeypatch.setattr(demo, "CHECKED", 3)
    assert demo.main(["--json", "--out", str(tmp_path / "out")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["backend"] == "emulator"
    assert 0 < found["results"][0]["error"] <= demo.ERROR_LIMIT
    picture, trace = map(Path, found["pictures"])
    assert picture == tmp_path / "out" / "marlin_pipeline.svg"
    assert "M = 3, N = 64, K = 512" in picture.read_text()
    assert json.loads(trace.read_text())["traceEvents"]


def test_the_gemm_that_ran_is_drawn_and_its_hazards_are_checked(
    small_layer: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(demo, "M_VALUES", (33,))
    monkeypatch.setattr(demo, "CHECKED", 33)
    assert demo.main(["--backend", "emulator", "--json", "--out", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    checked = found["checked"]
    assert (checked["tokens"], checked["schedules"], checked["hazards"]) == (33, demo.SCHEDULES, [])
    picture = Path(found["pictures"][0]).read_text()
    assert "random layer, seed 0: M = 33, N = 64, K = 512" in picture
    assert checked["kernel"] in picture
    assert "ring of stages" in picture


def test_a_hazard_is_a_failure(
    small_layer: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    hazard = SimpleNamespace(kind="read_before_load", message="a tile is read too early")
    report = SimpleNamespace(kernel="k", schedules=3, hazards=[hazard], is_clean=False)
    monkeypatch.setattr(demo, "M_VALUES", (77,))
    monkeypatch.setattr(demo, "_gemm", lambda x, weight, bias, backend: x @ weight.dequantize(dtype=np.float32) + bias)
    monkeypatch.setattr(demo, "check_and_draw", lambda *args: report)
    assert demo.main(["--backend", "emulator", "--out", str(tmp_path)]) == 1
    assert "read_before_load: a tile is read too early" in capsys.readouterr().out


def test_the_folder_of_pictures_is_checked_before_anything_is_computed(
    no_model: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(cudatma, "quantize", lambda *args, **options: pytest.fail("quantized first"))
    with pytest.raises(ArgumentError, match=r"--out must be a writable folder.*got .*file"):
        demo.main(["--backend", "emulator", "--out", str(tmp_path / "file")])


def test_the_environment_decides_before_the_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDATMA_BACKEND", "reference")
    assert demo.choose_backend("auto")[0] == "reference"
    monkeypatch.setattr(demo, "detect", lambda: no_driver("cuInit", OSError("no library")))
    monkeypatch.setenv("CUDATMA_BACKEND", "cuda")
    with pytest.raises(
        DriverError, match=r"pass --backend emulator to compute on the CPU, because .*CUDATMA_BACKEND requests"
    ):
        demo.choose_backend("auto")


def test_the_text_names_progress_errors_and_the_picture(
    small_layer: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(demo, "M_VALUES", (1,))
    monkeypatch.setattr(demo, "CHECKED", 1)
    assert demo.main(["--backend", "emulator", "--out", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert "100%" in captured.err
    assert "relative error" in captured.out
    assert "hazards  none (M = 1, 3 schedules" in captured.out
    assert str(tmp_path / "marlin_pipeline.svg") in captured.out
