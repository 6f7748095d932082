"""examples/llama.py on the CPU: both models decode, and the int4 model agrees with its dequantized weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.17")


@pytest.fixture(scope="module")
def llama(load_example: Callable[[str], ModuleType]) -> Any:
    """Return the example. Importing transformers' models takes seconds, and every pytest process collects this file."""
    return load_example("llama")


@pytest.mark.slow
def test_the_tiny_model_runs(
    llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDATMA_BACKEND", "reference")
    assert llama.main(["--size", "tiny", "--batch", "1,3", "--tokens", "2", "--json", str(tmp_path / "r.json")]) == 0
    told = capsys.readouterr()
    assert "batch 3: fp16" in told.out
    assert "llama: batch 3, int4: " in told.err
    report = json.loads((tmp_path / "r.json").read_text())
    assert [speed["batch"] for speed in report["speeds"]] == [1, 3]
    assert all(speed["int4_tokens_per_s"] > 0 for speed in report["speeds"])
    assert report["int4_bytes"] < 0.4 * report["fp16_bytes"]
    assert report["to_dequantized"]["max_relative"] < 0.01
    assert 0.01 < report["to_fp16"]["max_relative"] < 0.5
    assert report["to_dequantized"]["same_choice"] > 0.9


def test_an_interrupted_run_leaves_what_was_measured(
    llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def speed(model: object, batch: int, options: object) -> float:
        if batch == 3:
            raise KeyboardInterrupt
        return 2.0 * batch

    monkeypatch.setenv("CUDATMA_BACKEND", "reference")
    monkeypatch.setattr(llama, "tokens_per_second", speed)
    with pytest.raises(KeyboardInterrupt):
        llama.main(["--size", "tiny", "--batch", "1,3", "--json", str(tmp_path / "r.json")])
    report = json.loads((tmp_path / "r.json").read_text())
    assert [speed["int4_tokens_per_s"] for speed in report["speeds"]] == [2.0]
    assert report["to_dequantized"]["max_relative"] < 0.01


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would run")
def test_a_gpu_is_needed_for_the_others(llama: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert llama.main(["--size", "8b"]) == 2
    assert "got cuda" in capsys.readouterr().err
