"""The tuner on a GPU: it measures, keeps correct configurations, and marlin_gemm then runs them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import cudatma
from cudatma.build import kernel as build
from cudatma.build.kernel import Kernels
from cudatma.context import runtime
from cudatma.kernels import choice
from cudatma.kernels.choice import Listed, shortlist
from cudatma.kernels.gpu import gpu_of
from cudatma.kernels.marlin.choose import MARLIN, decide, marlin_explain
from cudatma.kernels.marlin.problem import LinearShape, Problem
from cudatma.kernels.marlin.sample import MarlinTrial, random_weight
from cudatma.kernels.tuning import usable_entries
from tools import tune
from tools.tune_check import difference
from tools.tune_measure import GpuBench

pytestmark = pytest.mark.gpu
#: An N that is no multiple of 64, and a K that is: TMA loads x directly.
LAYER = LinearShape(1024, 1544, 128, False, "float16")
M_VALUES = (5, 64, 300)


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    path = tmp_path / "tuned.json"
    monkeypatch.setenv("CUDATMA_TUNE_FILE", str(path))
    choice.forget()
    return path


def test_the_gpu_tells_its_clocks_and_bus() -> None:
    gpu = gpu_of(0)
    assert gpu.sm_count > 0
    assert 500 < gpu.sm_clock_mhz < 5000
    assert 500 < gpu.memory_clock_mhz < 50_000
    assert gpu.memory_bus_bits >= 64
    assert 1e5 < gpu.memory_bytes_per_us < 2e7, "0.1 to 20 TB/s"


def test_it_tunes_and_the_gemm_follows(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import cupy

    shape = ["--shape", f"{LAYER.k}x{LAYER.n}", "--m", ",".join(map(str, M_VALUES))]
    assert tune.main([*shape, "--candidates", "6", "--seconds", "0.5", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["cells"]
    wrong = {label: why for cell in told for label, why in cell["dropped"].items() if "wrong" in why or "bits" in why}
    assert not wrong
    gpu = gpu_of(0)
    entries, problems = usable_entries(file, MARLIN, gpu)
    assert not problems
    assert {entry.problem.m for entry in entries} == set(M_VALUES)
    assert all(0 < entry.us <= entry.rule_us for entry in entries)

    choice.forget()
    weight = random_weight(LAYER)
    dense = weight.dequantize(dtype=np.float64)
    on_gpu = weight.to_device(0)
    for entry in entries:
        assert decide(Problem(LAYER, entry.problem.m), gpu).config == entry.config
        said = marlin_explain(on_gpu, entry.problem.m)
        # A weight says whether scale and offset are one multiply-add; entries do not.
        assert (said.decision.source, said.config.in_form("none")) == ("tuned", entry.config)
        x = np.random.default_rng(entry.problem.m).standard_normal((entry.problem.m, LAYER.k)).astype(np.float16)
        out = cupy.asnumpy(cudatma.marlin_gemm(cupy.asarray(x), on_gpu))
        wanted = (x.astype(np.float64) @ dense).astype(np.float16)
        assert difference(wanted, out) == ""

    assert tune.main([*shape, "--json"]) == 0
    assert [cell["status"] for cell in json.loads(capsys.readouterr().out)["cells"]] == ["known"] * len(M_VALUES)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_candidate_computes_the_same(dtype: str, file: Path) -> None:
    """The test runs ten candidates per M, with zero points and without timing."""
    layer = LinearShape(2048, 4096, 64, True, dtype)
    gpu = gpu_of(0)
    with GpuBench(MarlinTrial(0)).opened() as bench:
        for m in (1, 16, 48, 513):
            bench.prepare(Problem(layer, m))
            reference = None
            for candidate in shortlist(MARLIN, Problem(layer, m), gpu, 10):
                result = _result(bench, candidate)
                if reference is None:
                    reference = bench.keep(result)
                elif result is not None:
                    assert difference(reference, result) == "", candidate.label


def test_what_was_compiled_before_is_what_a_launch_looks_for(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other processes compile into an empty cache while this process has a context. Afterwards nothing is compiled."""
    monkeypatch.setenv("CUDATMA_CACHE_DIR", str(tmp_path / "cache"))
    runtime().parts[Kernels] = Kernels()
    shape = ["--shape", f"{LAYER.k}x{LAYER.n}", "--m", "7,64", "--candidates", "4", "--json"]
    with GpuBench(MarlinTrial(0)).opened():
        assert tune.main([*shape, "--compile-only", "--jobs", "2"]) == 0
    refused = set(json.loads(capsys.readouterr().out)["refused"])

    def compile_nothing(*args: object, **options: object) -> None:
        raise RuntimeError("compiled again")

    monkeypatch.setattr(build, "compile_source", compile_nothing)
    assert tune.main([*shape, "--jobs", "1", "--seconds", "0.3"]) == 0
    told = json.loads(capsys.readouterr().out)["cells"]
    again = {label for cell in told for label, why in cell["dropped"].items() if "compiled again" in why}
    assert again <= refused
    assert all(cell["times_us"] for cell in told)


def _result(bench: GpuBench, candidate: Listed) -> object:
    """Return None if there is no result because ptxas fails or because the configuration would not run as requested."""
    try:
        return bench.result(candidate)
    except (cudatma.CompileError, cudatma.ArgumentError):
        return None
    except cudatma.LaunchError as error:
        if "must be the candidate " in str(error):
            return None
        raise
