"""The doctor on machines that are not this one: each kind of trouble gives its line, its remedy and its exit status."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cudatma.emulator import EmulatorError
from cudatma.errors import CompileError, DriverError
from cudatma.target import Target
from tools import checks as module
from tools import doctor
from tools.checks import Check, Gpu, Machine, examine

H200 = Gpu(0, "NVIDIA H200", (9, 0), 232448, 141 * 2**30)
OLD = Gpu(1, "Tesla T4", (7, 5), 65536, 15 * 2**30)


class Sound(Machine):
    """A machine on which everything is there."""

    def __init__(self, **changes: Any) -> None:
        self.changes = changes

    def _answer(self, name: str, usual: Any) -> Any:
        value = self.changes.get(name, usual)
        if isinstance(value, Exception):
            raise value
        return value

    def python(self) -> tuple[int, int, int]:
        return self._answer("python", (3, 12, 3))

    def import_module(self, name: str) -> Any:
        return self._answer(name, SimpleNamespace(__version__="14.2.0"))

    def cuda_version(self) -> tuple[int, int]:
        return self._answer("cuda_version", (13, 0))

    def gpus(self) -> list[Gpu]:
        return self._answer("gpus", [H200])

    def nvrtc_version(self) -> tuple[int, int]:
        return self._answer("nvrtc_version", (13, 0))

    def emulate_probe(self) -> list[int]:
        return self._answer("emulate_probe", list(range(32)))

    def compile_probe(self, target: Target) -> float:
        return self._answer(target.name, 0.02)


def lines(machine: Machine, root: Path) -> dict[str, Check]:
    return {check.name.strip(): check for check in examine(machine, root)}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def test_a_sound_machine_passes(root: Path) -> None:
    found = examine(Sound(), root)
    assert doctor.passed(found, gpu=True)
    assert "target sm_90a" in next(check.found for check in found if check.name == "GPU")
    able = doctor.abilities(found)
    assert able["launch kernels"] == (True, "")
    assert able["render, compile and dump"] == (True, "")


NO_DRIVER = DriverError("cuInit", None, "no CUDA driver on this machine")


@pytest.mark.parametrize(
    ("changes", "line", "status", "words"),
    [
        ({"cuda_version": NO_DRIVER, "gpus": NO_DRIVER}, "driver", "warn", "no kernel can be launched"),
        ({"cuda_version": (11, 8)}, "driver", "fail", "TMA needs 12.0"),
        ({"gpus": []}, "GPU", "warn", "no GPU"),
        ({"gpus": [OLD]}, "GPU", "warn", "compute capability 7.5"),
        ({"cuda_version": (12, 9)}, "NVRTC", "fail", "may not load"),
        ({"nvrtc_version": DriverError("nvrtcVersion", None, "no library")}, "NVRTC", "fail", "nothing compiles"),
        ({"sm_90a": CompileError("NVRTC refused probe.cu")}, "sm_90a", "fail", "refused"),
        ({"sm_121a": CompileError("NVRTC refused probe.cu")}, "sm_121a", "warn", "refused"),
        ({"cupy": ImportError("No module named 'cupy'")}, "CuPy", "warn", "cannot be imported"),
        ({"cuda.bindings.driver": ImportError("gone")}, "cuda-bindings", "fail", "nothing compiles"),
        ({"python": (3, 9, 1)}, "python", "fail", "3.9.1"),
        ({"emulate_probe": [0] * 32}, "emulator", "fail", "wrong results"),
        ({"emulate_probe": EmulatorError("no such form")}, "emulator", "fail", "no such form"),
        ({"gpus": ValueError("surprise")}, "gpus", "fail", "ValueError: surprise"),
    ],
)
def test_trouble_is_named(changes: dict[str, Any], line: str, status: str, words: str, root: Path) -> None:
    found = examine(Sound(**changes), root)
    check = {check.name.strip(): check for check in found}[line]
    assert check.status == status
    assert words in check.found
    assert doctor.passed(found, gpu=False) == (status != "fail")


@pytest.mark.parametrize("changes", [{"gpus": []}, {"gpus": [OLD]}, {"cupy": ImportError("gone")}])
def test_gpu_makes_a_machine_that_cannot_launch_fail(changes: dict[str, Any], root: Path) -> None:
    found = examine(Sound(**changes), root)
    assert doctor.passed(found, gpu=False)
    assert not doctor.passed(found, gpu=True)
    works, why = doctor.abilities(found)["launch kernels"]
    assert not works
    assert why


def test_one_usable_gpu_is_enough(root: Path) -> None:
    assert doctor.passed(examine(Sound(gpus=[H200, OLD]), root), gpu=True)


def test_a_backend_asked_for_by_name_must_be_there(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDATMA_BACKEND", "cuda")
    assert lines(Sound(cuda_version=NO_DRIVER, gpus=NO_DRIVER), root)["driver"].status == "fail"


def test_less_shared_memory_than_the_target_counts_on(root: Path) -> None:
    small = Gpu(0, "NVIDIA H200 MIG", (9, 0), 100_000, 2**34)
    check = lines(Sound(gpus=[small]), root)["GPU"]
    assert check.status == "warn"
    assert "will not launch" in check.remedy
    assert not check.missing


def test_a_cache_that_others_may_write_fails(root: Path) -> None:
    root.mkdir()
    root.chmod(0o777)
    check = lines(Sound(), root)["cache"]
    assert check.status == "fail"
    assert "CUDATMA_CACHE_DIR" in check.remedy


def test_a_cache_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    check = lines(Sound(), tmp_path / "file" / "cache")["cache"]
    assert check.status == "warn"
    assert "cannot be written" in check.found


def test_missing_disassemblers_only_cost_the_sass(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_program", lambda name: None)
    found = examine(Sound(), root)
    assert doctor.passed(found, gpu=True)
    assert not doctor.abilities(found)["dump SASS"][0]
    assert doctor.abilities(found)["launch kernels"][0]


def test_without_a_gpu_kernels_run_on_the_emulator(root: Path) -> None:
    found = examine(Sound(cuda_version=NO_DRIVER, gpus=NO_DRIVER), root)
    able = doctor.abilities(found)
    assert able["run kernels on the emulator"] == (True, "")
    assert "emulator" in next(check.remedy for check in found if check.name == "driver")
    broken = doctor.abilities(examine(Sound(emulate_probe=[1] * 32), root))
    assert broken["run kernels on the emulator"] == (False, "emulator: a probe gave wrong results")


def test_lines_fit_the_terminal_but_no_path_is_folded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A path that is longer than a line can be copied."""
    root = tmp_path / ("long_name_" * 12)
    monkeypatch.setattr(doctor, "Machine", Sound)
    monkeypatch.setenv("CUDATMA_CACHE_DIR", str(root))
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(module, "find_program", lambda name: None)
    assert doctor.main([]) == 0
    printed = capsys.readouterr().out
    assert f"{root}:" in printed
    assert all(len(line) <= 60 for line in printed.splitlines() if str(root) not in line)
    assert "run kernels on the emulator" in printed


def test_json_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDATMA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CUDATMA_BACKEND", raising=False)
    status = doctor.main(["--json"])
    printed = json.loads(capsys.readouterr().out)
    assert printed["ok"] == (status == 0)
    assert {check["name"] for check in printed["checks"]} >= {
        "python",
        "driver",
        "NVRTC",
        "emulator",
        "cache",
        "templates",
    }
    assert all(check["remedy"] or check["status"] != "fail" for check in printed["checks"])
    assert os.stat(tmp_path / "cache").st_mode & 0o077 == 0
