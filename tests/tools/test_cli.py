"""The console script and ``cudatma doctor``: dispatch, one-line errors, pipes, and the subcommands that print data."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cudatma import __version__, cli
from cudatma.emulator import EmulatorError
from cudatma.errors import INSTALL_CUDA, ArgumentError, CacheError, CompileError, DriverError, TargetError, similar
from cudatma.target import FEATURES, TARGETS, Target
from tools import artifacts, bench, doctor, dump_kernels
from tools import checks as module
from tools.checks import Check, Gpu, Machine, examine

ROOT = Path(__file__).resolve().parents[2]
ALWAYS = {
    "convert",
    "doctor",
    "demo",
    "dump",
    "inspect",
    "emulate",
    "header",
    "bench",
    "tune",
    "targets",
    "cache",
    "completion",
    "explain",
    "version",
}


def cudatma(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command line as a person runs it, from a plain checkout."""
    return subprocess.run(
        [sys.executable, "-m", "cudatma.cli", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
        check=False,
    )


def test_commands_exist_where_their_module_does() -> None:
    assert set(cli.available()) >= ALWAYS


@pytest.mark.parametrize("command", sorted(ALWAYS))
def test_each_command_helps_with_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert f"usage: cudatma {command}" in shown
    assert "examples:" in shown


def test_no_command_and_an_unknown_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "commands:" in capsys.readouterr().out
    assert cli.main(["juggle"]) == 2
    assert "COMMAND must be one of doctor" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["tragets"], "COMMAND must be "),
        (["--juggle"], "COMMAND must be "),
        (
            ["dump", "marlin_skinn", "--target", "sm_90a"],
            "kernel must be ",
        ),
        (["emulate", "tile_cpy"], "KERNEL must be "),
        (["targets", "sm90a"], "target must be "),
        (["inspect", "--theme", "drak"], "--theme must be one of auto, light, dark"),
        (["tune", "--model", "llama3-8"], "--model must be "),
        (
            ["header", "--tagret", "x"],
            "--tagret must be an argument that",
        ),
        (["bench", "marlon"], "benchmark must be "),
        (["mutants", "tile_copy"], "FILE must be a .ptx, .cu, .toml or .json file"),
        (["mutants", "--schedules", "x"], "--schedules must be a positive integer"),
        (["emulate", "marlin_mma_sync", "--seed"], "--seed must be an integer"),
        (["cache", "more"], "more must be "),
        (["emulate"], "KERNEL must be passed if --coverage is omitted; see"),
        (["dump"], "kernel must be one of marlin"),
        (
            ["tune", "--shape", "64x64", "--dry-run", "--compile-only"],
            "--compile-only must be omitted if --dry-run is passed",
        ),
        (["emulate", "tile_copy", "--schedules", "0"], "--schedules must be a positive integer"),
        (["emulate", "tile_copy", "--tolerance", "nan"], "--tolerance must be a nonnegative, finite number"),
        (["emulate", "x.cu", "--html", "/dev/null/x"], "--html must be a writable file"),
        (["emulate", "x.cu", "--sarif", "."], "--sarif must be a writable file, got . (. is a folder)"),
        (["dump", "tile_copy", "--out", "/dev/null"], "--out must be a writable folder"),
        (["dump", "x.cu", "--block", "1025"], "--block must be an integer from 1 to 1024"),
    ],
)
def test_every_wrong_command_line_is_one_typed_line(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("cudatma: ")
    assert f"Error: {says}" in line


@pytest.mark.parametrize(("got", "known"), [("sm_80", "sm_90"), ("float64", "float16"), ("x", "marlin")])
def test_other_numbers_and_other_names_are_no_suggestion(got: str, known: str) -> None:
    assert similar(got, [known]) == ""


def test_the_list_of_mutants_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kernel = tmp_path / "kernel.cu"
    kernel.write_text('extern "C" __global__ void meet() { __syncthreads(); }')
    assert cli.main(["mutants", "--list", str(kernel)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert cli.main(["mutants", "--list", "--json", str(kernel)]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert len(listed) == len(shown) > 0
    assert listed[0]["operator"] == shown[0].split()[0]


def test_python_m_cudatma_is_the_console_script() -> None:
    done = subprocess.run([sys.executable, "-m", "cudatma", "version"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0
    assert done.stdout.startswith("cudatma ")


def test_an_error_is_one_line_and_no_traceback() -> None:
    done = cudatma("targets", "sm_75")
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("cudatma: TargetError: target must be one of sm_90")


def test_a_failed_compile_shows_the_first_complaint_and_the_folder() -> None:
    log = "k.cu(3): warning #1: unused\nk.cu(7): error: identifier x is undefined\nk.cu(9): error: another"
    line = cli.one_line(CompileError("NVRTC refused k.cu", log, "source\nof\nmany\nlines", "/tmp/k"))
    assert line == (
        "cudatma: CompileError: NVRTC refused k.cu | k.cu(7): error: identifier x is undefined | artifacts: /tmp/k"
    )


@pytest.mark.parametrize("closing", ["sys.stdout.close()", "os.close(1)"])
def test_a_program_may_close_its_output(closing: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(f"import os, sys\nprint('end', flush=True)\n{closing}\n")
    done = cudatma("emulate", str(tmp_path / "program.py"))
    assert done.stdout.startswith("end\n")
    assert "launched no kernel" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_program_that_fails_before_its_launches(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import no_such_library\n")
    done = cudatma("emulate", str(tmp_path / "program.py"))
    assert (done.returncode, done.stdout) == (1, "")
    assert "No module named 'no_such_library'" in done.stderr
    assert "program.py launched no kernel" in done.stderr


def test_output_to_a_full_disk_is_an_error_of_one_line() -> None:
    command = [sys.executable, "-m", "cudatma.cli", "targets"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (2, "cudatma: [Errno 28] No space left on device\n")


def test_a_closed_pipe_is_quiet() -> None:
    command = f"{sys.executable} -m cudatma.cli targets --json | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.stderr == ""
    assert done.stdout.splitlines()[0] == "["


@pytest.mark.parametrize("script", ["targets.py", "version.py", "dump_kernels.py", "doctor.py", "bench.py"])
def test_each_tool_runs_as_a_file_from_anywhere(script: str, tmp_path: Path) -> None:
    """Without the package installed and without PYTHONPATH."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(ROOT / "tools" / script), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: cudatma ")


def test_targets_as_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["targets", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == list(TARGETS)
    assert all(set(row["features"]) == set(FEATURES) for row in rows)
    assert cli.main(["targets", "sm_120a"]) == 0
    table = capsys.readouterr().out
    assert "sm_120a" in table
    assert "sm_90a" not in table


def test_version_as_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cudatma"] == __version__


def test_cache_is_measured_and_cleared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from cudatma.build.cache import Cache

    root = tmp_path / "cache"
    assert artifacts.usage(root).entries == 0
    assert artifacts.clear(root) == 0
    assert not root.exists(), "looking must not create the folder"
    cache = Cache(root)
    cache.put("a" * 64, {"kernel.cu": b"x" * 1000})
    cache.keep_failure("b" * 64, {"log.txt": b"y" * 10})
    used = artifacts.usage(root)
    assert (used.entries, used.failures) == (1, 1)
    assert used.size_bytes > 1010  # the manifests count too
    os.environ["CUDATMA_CACHE_DIR"], before = str(root), os.environ.get("CUDATMA_CACHE_DIR")
    try:
        assert cli.main(["cache", "--clear", "--json"]) == 0
    finally:
        os.environ.pop("CUDATMA_CACHE_DIR") if before is None else os.environ.update(CUDATMA_CACHE_DIR=before)
    assert json.loads(capsys.readouterr().out)["removed"] == 2
    assert cache.get("a" * 64) is None
    assert list((root / "tmp").iterdir()) == []


def test_a_cache_of_somebody_else_is_not_cleared(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    root.mkdir()
    root.chmod(0o777)
    with pytest.raises(CacheError):
        artifacts.clear(root)


def test_bench_lists_and_runs_scripts_with_a_main(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text('"""First.\n\nMore."""\nimport sys\ndef main(): return int(sys.argv[1])\n'
                                     'if __name__ == "__main__": raise SystemExit(main())\n')  # fmt: skip
    (tmp_path / "harness.py").write_text('"""No script."""\n')
    assert bench.benchmarks(tmp_path) == {"one": "First."}
    assert bench.run_benchmark("one", ["3"], tmp_path) == 3
    with pytest.raises(ArgumentError, match="must be one"):
        bench.run_benchmark("two", [], tmp_path)
    with pytest.raises(ArgumentError, match="pip install -e"):
        bench.benchmarks(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (["no_such_kernel", "--target", "sm_90a"], ArgumentError, "must be one of marlin"),
        (["marlin_mma_sync", "--target", "sm_75"], TargetError, "sm_90a"),
        (["marlin_mma_sync", "--target", "sm_90a", "--config", "stages"], ArgumentError, "FIELD=VALUE"),
    ],
)
def test_wrong_dumps(arguments: list[str], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        dump_kernels.main(arguments)


def test_config_values_are_literals_else_text() -> None:
    assert dump_kernels.parse_config(["stages=3", "load_path=tma", "split=None", "name="]) == {
        "stages": 3,
        "load_path": "tma",
        "split": None,
        "name": "",
    }


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
NO_PACKAGES = {
    "cuda.bindings.driver": ImportError("gone"),
    "nvrtc_version": DriverError("nvrtcVersion", None, f"no NVRTC in this environment. {INSTALL_CUDA}"),
    "cupy": ImportError("gone"),
}


@pytest.mark.parametrize(
    ("changes", "line", "status", "words"),
    [
        ({"cuda_version": NO_DRIVER, "gpus": NO_DRIVER}, "driver", "warn", "no kernel can be launched"),
        ({"cuda_version": (11, 8)}, "driver", "fail", "TMA requires CUDA 12.0"),
        ({"gpus": []}, "GPU", "warn", "no GPU"),
        ({"gpus": [OLD]}, "GPU", "warn", "compute capability 7.5"),
        ({"cuda_version": (12, 9)}, "NVRTC", "fail", "might not load"),
        (
            {"nvrtc_version": DriverError("nvrtcVersion", None, "no library")},
            "NVRTC",
            "fail",
            "kernels cannot be compiled",
        ),
        ({"sm_90a": CompileError("NVRTC refused probe.cu")}, "sm_90a", "fail", "refused"),
        ({"sm_121a": CompileError("NVRTC refused probe.cu")}, "sm_121a", "warn", "refused"),
        ({"cupy": ImportError("No module named 'cupy'")}, "CuPy", "warn", "cannot be imported"),
        ({"cuda.bindings.driver": ImportError("gone")}, "cuda-bindings", "fail", "cannot be compiled"),
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
    assert "at most 100000 bytes" in check.remedy
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
    assert "is not writable" in check.found


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
    assert doctor.abilities(examine(Sound(**NO_PACKAGES), root))["run PTX on the emulator"] == (True, "")
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


def test_packages_that_are_absent_are_named_once(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "Machine", lambda: Sound(**NO_PACKAGES))
    monkeypatch.setenv("CUDATMA_CACHE_DIR", str(root))
    assert doctor.main([]) == 1
    assert capsys.readouterr().out.count("cupy-cuda13x") == 1


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


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes_commands_options_kernels_kinds_and_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "reader of.ptx").touch()
    assert cli.main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    cases = {
        "em": "emulate",
        "emulate marlin_sk": "marlin_skinny",
        "emulate x.cu --sh": "--shared-bytes",
        "emulate marlin_skinny --gr": "--grid|--group-size",
        "emulate --target sm_120": "sm_120a|sm_120f",
        "explain --json read": "read_before_load|read_before_store|reader of.ptx",
        "inspect --theme d": "dark",
    }
    ask = "COMP_WORDS=(cudatma {}); COMP_CWORD={}; _cudatma; (IFS='|'; echo \"${{COMPREPLY[*]}}\")\n"
    asked = "".join(ask.format(line, len(line.split())) for line in cases)
    done = subprocess.run(["bash", "-c", script + asked], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == list(cases.values())
    assert done.stderr == ""
