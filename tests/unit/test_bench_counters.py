"""Nsight Compute's CSV, ncu run by a fake, clocks and watts sampled by a thread, the code of load paths in a cell."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import energy, load_paths, ncu, power, subjects
from benchmarks.plan import CellKey
from benchmarks.power import PowerLog, Sample
from cudatma.target import get_target
from tools.sass import find_program

COLUMNS = {
    "ID": ("", "0"),
    "Kernel Name": ("", "marlin_skinny_f16(unsigned int, int)"),
    "gpu__time_duration.sum": ("ns", "35,520"),
    "smsp__inst_executed.sum": ("inst", "1,234,567"),
    "sm__inst_executed_pipe_lsu.sum": ("inst", "1000"),
    "sm__inst_executed_pipe_alu.sum": ("inst", "n/a"),
    "sm__inst_issued.avg.pct_of_peak_sustained_active": ("%", "41.5"),
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": ("%", "79.25"),
    "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active": ("%", "12"),
    "launch__registers_per_thread": ("register/thread", "168"),
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio": ("inst", "5.1"),
    "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio": ("inst", "0.5"),
    "smsp__average_warps_issue_stalled_wait_per_issue_active.ratio": ("inst", "1.5"),
    "smsp__average_warps_issue_stalled_selected_per_issue_active.ratio": ("inst", "1.0"),
    "smsp__average_warps_issue_stalled_sleeping_per_issue_active.ratio": ("inst", "0.7"),
    "smsp__average_warps_issue_stalled_wait_not_issued_per_issue_active.ratio": ("inst", "9.0"),
}


def csv_of(**changed: str) -> str:
    """A log as ncu writes it: lines of its own, header, units, one kernel."""

    def line(cells: list[str]) -> str:
        return ",".join(f'"{cell}"' for cell in cells)

    values = {name: changed.get(name, value) for name, (_, value) in COLUMNS.items()}
    rows = [line(list(COLUMNS)), line([unit for unit, _ in COLUMNS.values()]), line(list(values.values()))]
    return "\n".join(["==PROF== Connected to process 12 (/usr/bin/python3)", *rows, ""])


def test_the_figures_of_a_kernel() -> None:
    (row,) = ncu.parse_csv(csv_of())
    found = ncu.figures(row)
    assert (found["us"], found["instructions"], found["lsu_instructions"]) == (35.52, 1234567.0, 1000.0)
    assert found["alu_instructions"] is None, "n/a is not nothing"
    assert (found["issue_slots_pct"], found["dram_pct"], found["tensor_pct"]) == (41.5, 79.25, 12.0)
    assert found["registers"] == 168
    assert list(found["stalls"].items()) == [("long_scoreboard", 5.1), ("wait", 1.5), ("sleeping", 0.7)]
    assert ncu.stalls_text(found) == "long_scoreboard 5.1, wait 1.5, sleeping 0.7"
    assert ncu.parse_csv("==ERROR== nothing\n") == []


def test_the_tensor_pipe_is_found_under_any_name() -> None:
    cycles = "sm__pipe_tensor_op_{}_cycles_active.avg.pct_of_peak_sustained_active"
    row = {cycles.format("hmma"): "3", cycles.format("gmma"): "81.5", "sm__pipe_fma_cycles_active.avg": "99"}
    assert ncu.figures(row)["tensor_pct"] == 81.5
    instructions = "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active"
    assert ncu.figures(row | {instructions: "95"})["tensor_pct"] == 81.5, "cycles come first"
    assert ncu.figures({instructions: "95"})["tensor_pct"] == 95
    assert ncu.figures({})["tensor_pct"] is None


class FakeNcu:
    """Writes what ``logs`` says into the log file of each run, one after the other; an empty one is a failure."""

    def __init__(self, *logs: str) -> None:
        self.logs, self.commands = list(logs), list[list[str]]()

    def __call__(self, command: list[str], **options: Any) -> SimpleNamespace:
        self.commands.append(command)
        log = self.logs.pop(0)
        Path(command[command.index("--log-file") + 1]).write_text(log)
        ok = "==ERROR==" not in log
        return SimpleNamespace(returncode=0 if ok else 1, stderr="" if ok else "trouble")


@pytest.fixture
def has_ncu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ncu.shutil, "which", lambda name: f"/opt/{name}")


KEY = CellKey(8192, 28672, 16)


@pytest.mark.usefixtures("has_ncu")
def test_ncu_is_run_on_one_launch() -> None:
    run = FakeNcu(csv_of())
    found = ncu.profile_cell("cp_async", KEY, run)
    assert found["us"] == 35.52
    (command,) = run.commands
    assert command[0] == "/opt/ncu"
    text = " ".join(command)
    assert "--section SpeedOfLight" in text
    assert "--clock-control none" in text, "the GPU's settings are left alone"
    assert text.endswith("ncu.py --launch cp_async --cells 8192x28672:16")
    assert ncu.parse_cells("8192x28672:16,64x64:1") == (KEY, CellKey(64, 64, 1))


@pytest.mark.usefixtures("has_ncu")
def test_an_unknown_metric_is_left_out_and_a_failure_is_said() -> None:
    run = FakeNcu("==ERROR== Failed to find metric smsp__x\n", csv_of())
    assert ncu.profile_cell("ours", KEY, run)["us"] == 35.52
    assert [("--metrics" in command) for command in run.commands] == [True, False]
    broken = ncu.profile_cell("ours", KEY, FakeNcu("==ERROR== No permission\n", "==ERROR== No permission\n"))
    assert "No permission" in broken["error"]
    nothing = ncu.profile_cell("ours", KEY, FakeNcu("==PROF== done\n", "==PROF== done\n"))
    assert "==PROF== done" in nothing["error"]

    def slow(command: list[str], **options: Any) -> None:
        raise subprocess.TimeoutExpired(command, 1)

    assert "TimeoutExpired" in ncu.profile_cell("ours", KEY, slow)["error"]


def test_without_ncu_the_reason_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(ncu.shutil, "which", lambda name: None)
    assert "not on the PATH" in ncu.profile_cell("ours", KEY)["error"]
    with pytest.raises(SystemExit) as ended:
        ncu.main([])
    assert ended.value.code == 2
    assert "ncu" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--cells", "64x64"], ["--cells", "64x65:1"], ["--subjects", "marlin"]])
def test_wrong_cells_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        ncu.main(arguments)
    assert ended.value.code == 2


# ---- Clocks and watts -----------------------------------------------------------------------------------------------


def test_the_second_half_of_the_samples_counts() -> None:
    enough = threading.Event()
    values = iter([(1980.0, 300.0, 40.0)] * 10 + [(1500.0, 700.0, 60.0)] * 10)

    def read() -> Sample:
        found = next(values, None)
        if found is None:
            enough.set()
            raise RuntimeError("the driver is gone")
        return found

    with PowerLog(read, period_s=0.0) as log:
        assert enough.wait(10)
    assert log.summary() == {"sm_mhz": 1500.0, "watts": 700.0, "celsius": 60.0, "samples": 10}


def test_without_a_reader_nothing_is_sampled() -> None:
    with PowerLog(None) as log:
        pass
    assert log.summary() is None


@pytest.mark.parametrize(
    ("answer", "expected"),
    [("1755, 512.31, 55\n", (1755.0, 512.31, 55.0)), ("[N/A], [N/A], 55\n", None), ("", None)],
)
def test_nvidia_smi_is_read(answer: str, expected: object, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def run(command: list[str], **options: Any) -> SimpleNamespace:
        seen.append(command)
        return SimpleNamespace(stdout=answer)

    monkeypatch.setattr(power.subprocess, "run", run)
    reader: Callable[[], Sample] | None = power.smi_reader("0000:04:00.0")
    assert (None if reader is None else reader()) == expected
    assert seen[0][-1] == "--id=0000:04:00.0"


def test_nvml_is_asked_about_the_right_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    nvml = SimpleNamespace(
        NVML_CLOCK_SM=1,
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByPciBusId=lambda bus: asked.append(bus) or "gpu",
        nvmlDeviceGetClockInfo=lambda gpu, kind: 1980,
        nvmlDeviceGetPowerUsage=lambda gpu: 512_345,
        nvmlDeviceGetTemperature=lambda gpu, kind: 50,
    )
    monkeypatch.setitem(__import__("sys").modules, "pynvml", nvml)
    reader = power.nvml_reader("0000:04:00.0")
    assert reader is not None
    assert reader() == (1980.0, 512.345, 50.0)
    assert asked == [b"0000:04:00.0"]

    def refused(gpu: str) -> int:
        raise RuntimeError("not supported")

    nvml.nvmlDeviceGetPowerUsage = refused
    assert power.nvml_reader(None) is None


# ---- Load paths ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(
    find_program("nvdisasm") is None, reason="nvdisasm is not installed: pip install nvidia-cuda-nvdisasm"
)
def test_a_cell_of_load_paths_holds_their_code() -> None:
    code = load_paths.code_of(8192, 28672, 16, get_target("sm_90a"))
    assert set(code) == set(subjects.LOAD_PATHS)
    assert code["tma"]["copies"] < code["cp_async"]["copies"]
    assert code["tma"]["slots"] < code["cp_async"]["slots"]


def test_energy_is_the_counters_difference_over_all_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of 500 W on which a replay takes 20 ms."""
    clock = {"now": 0.0}
    monkeypatch.setattr(energy.time, "perf_counter", lambda: clock["now"])

    def replay() -> float:
        clock["now"] += 0.02
        return 0.02

    count, seconds = energy.run_for(replay, 1.0)
    assert count in (50, 51)
    assert seconds == pytest.approx(count * 0.02)
    made = {"what": "ours", "k": 64, "n": 128, "m": 1, "us": 20.04, "mj": 10.06, "watts": 500.0, "power": None}
    table = energy.energy_table([made, {"what": "cuBLAS", "k": 64, "n": 128, "m": 1, "error": "none"}])
    assert table.rows[0] == ("ours", "64 x 128", 1, "20.0", "10.1", "500", "-")
    assert table.rows[1] == ("cuBLAS", "64 x 128", 1, "-", "-", "-", "-")


def test_no_counter_no_energy(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert energy.energy_counter(None) is None
    monkeypatch.setattr(energy, "require_gpu", lambda parser: None)
    with pytest.raises(SystemExit) as ended:
        energy.main([])
    assert ended.value.code == 2
    assert "does not count" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        energy.main(["--m", "1,x"])
    assert "write values of M with commas" in capsys.readouterr().err
