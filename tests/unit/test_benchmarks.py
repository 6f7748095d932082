"""The benchmarks without a GPU: the harness on a scripted clock, tables as the README takes them, operands with NumPy,
SASS loops on code written by hand and on one real compilation. test_bench_*.py hold the rest."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_gpu import FakeGpu
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import (
    cells,
    first_call,
    harness,
    host_cost,
    load_path_code,
    load_paths,
    marlin,
    ncu,
    operands,
    quantize,
    read_floor,
    report,
)
from benchmarks.harness import Contender, Timing
from benchmarks.sass_loops import natural_loops
from cudatma.errors import DriverError
from cudatma.kernels.gpu import H200
from cudatma.kernels.marlin.mma_sync_candidates import choose_mma_sync
from cudatma.kernels.marlin.problem import LinearShape, Problem
from cudatma.target import get_target
from tools import bench
from tools.dev.readme_tables import table_text
from tools.sass import find_program

# ---- The harness on a GPU whose clock is scripted ------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    fake = FakeGpu()
    monkeypatch.setitem(sys.modules, "cupy", fake.module)
    return fake


def steady(gpu: FakeGpu, name: str, us: float, copies: int = 4, launches: int = 20) -> Contender:
    return Contender(name, lambda i: gpu.launch(us), copies, launches)


def test_cold_takes_turns_and_gives_the_time_of_one_launch(gpu: FakeGpu) -> None:
    measured = harness.cold(gpu, [steady(gpu, "a", 5.0), steady(gpu, "b", 7.0, launches=40)], replays=3)
    assert measured.timings == {"a": Timing(5.0, 5.0, 5.0, 3), "b": Timing(7.0, 7.0, 7.0, 3)}
    a, b = [100.0] * 2, [280.0] * 2
    assert gpu.log == ["upload", "upload", *a, *b, *b, *a, *b, *a], "each replays once untimed"


def test_orders_are_shuffled_and_reversed() -> None:
    names = ["a", "b", "c", "d"]
    orders = list(itertools.islice(harness._orders(names), 40))
    assert all(orders[i + 1] == orders[i][::-1] and sorted(orders[i]) == names for i in range(0, 40, 2))
    assert len({tuple(order) for order in orders}) > 10


def test_a_library_that_refuses_capture_is_called_behind_a_delay(gpu: FakeGpu) -> None:
    delays: list[float] = []

    def delay(us: float) -> None:
        delays.append(us)
        gpu.launch(1000.0)

    way = Contender("calls", lambda index: gpu.launch(5.0), 2, 4, delay)
    measured = harness.cold(gpu, [way, steady(gpu, "a", 7.0)], replays=3)
    assert measured.timings == {"calls": Timing(5.0, 5.0, 5.0, 3), "a": Timing(7.0, 7.0, 7.0, 3)}
    assert len(delays) == 3, "before each turn"
    assert min(delays) > 0


def test_cold_does_not_time_the_first_replay_of_a_turn(gpu: FakeGpu) -> None:
    # Whatever follows a switch takes three times as long.
    def slowdown(now_us: float) -> float:
        return 3.0 if len(gpu.log) < 2 or gpu.log[-1] != gpu.log[-2] else 1.0

    gpu.slowdown = slowdown
    measured = harness.cold(gpu, [steady(gpu, "a", 5.0), steady(gpu, "b", 7.0)], replays=4)
    assert (measured.us("a"), measured.us("b")) == (5.0, 7.0)


@pytest.fixture
def rests(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, bool]]:
    """Seconds of each rest, and whether the GPU had nothing to do; a rest stands in the GPU's log too."""
    found: list[tuple[float, bool]] = []
    at = [-1.0]  # the GPU's time when it was last waited for

    def sleep(seconds: float) -> None:
        found.append((seconds, at[0] == gpu.now_us))
        gpu.log.append("rest")

    monkeypatch.setattr(gpu, "synchronize", lambda: at.__setitem__(0, gpu.now_us))
    monkeypatch.setattr(harness, "time", types.SimpleNamespace(sleep=sleep))
    return found


def test_the_gpu_rests_before_each_turn(gpu: FakeGpu, rests: list[tuple[float, bool]]) -> None:
    contenders = [steady(gpu, "a", 5.0), steady(gpu, "b", 7.0)]
    measured = harness.cold(gpu, contenders, replays=2)
    assert (measured.us("a"), measured.us("b")) == (5.0, 7.0)
    a, b = ["rest", 100.0, 100.0], ["rest", 140.0, 140.0]
    assert gpu.log == ["upload", "upload", *a, *b, *b, *a]
    assert rests == [(harness.REST_S, True)] * 4
    harness.cold(gpu, contenders, replays=1, rest_s=0.5)
    assert rests[4:] == [(0.5, True)] * 2


def test_long_and_quick_runs_do_not_rest(gpu: FakeGpu, rests: list[tuple[float, bool]]) -> None:
    harness.quick(gpu, steady(gpu, "a", 5.0), launches=3)
    harness.sustained(gpu, [steady(gpu, "a", 100.0)], seconds=0.5)
    harness.cold(gpu, [steady(gpu, "a", 5.0)], replays=2, rest_s=0.0)
    assert rests == []


def test_quick_takes_fewer_launches(gpu: FakeGpu) -> None:
    measured = harness.quick(gpu, steady(gpu, "a", 5.0, launches=200), launches=3)
    assert measured.us("a") == 5.0
    assert gpu.log == ["upload", *[15.0] * 4]


def test_cold_touches_every_buffer_before_the_capture(gpu: FakeGpu) -> None:
    seen: list[tuple[bool, int]] = []

    def run(index: int) -> None:
        seen.append((gpu.capturing, index))
        gpu.launch(1.0)

    harness.cold(gpu, [Contender("a", run, 3, 6)], replays=1)
    assert seen == [(False, i) for i in range(3)] + [(True, i) for i in range(6)]


@pytest.mark.parametrize("in_capture", [False, True])
def test_a_contender_that_fails_stops_nobody(gpu: FakeGpu, in_capture: bool) -> None:
    def run(index: int) -> None:
        if gpu.capturing or not in_capture:
            raise ValueError("no such kernel\nsecond line")

    measured = harness.cold(gpu, [Contender("broken", run, 4, 20), steady(gpu, "a", 5.0)], replays=1)
    assert measured.errors == {"broken": "ValueError: no such kernel"}
    assert measured.us("a") == 5.0
    assert measured.us("broken") is None
    assert not gpu.capturing


def test_sustained_counts_the_second_half(gpu: FakeGpu) -> None:
    # A cold GPU is twice as fast for the first half second.
    gpu.slowdown = lambda now_us: 1.0 if now_us < 0.5e6 else 2.0
    measured = harness.sustained(gpu, [steady(gpu, "a", 100.0), steady(gpu, "b", 200.0)], seconds=1.0, block_s=0.04)
    assert (measured.us("a"), measured.us("b")) == (200.0, 400.0)
    assert measured.timings["a"].samples >= 3
    replays = [entry for entry in gpu.log if entry != "upload"]
    switches = sum(replays[i] != replays[i - 1] for i in range(1, len(replays)))
    assert switches > 6, "contenders alternate in blocks of 40 ms"


def test_sustained_without_anything_to_run(gpu: FakeGpu) -> None:
    def run(index: int) -> None:
        raise RuntimeError("gone")

    assert harness.sustained(gpu, [Contender("a", run, 4, 20)]).errors == {"a": "RuntimeError: gone"}


@given(st.integers(1, 2**34))
def test_graphs_rotate_over_more_than_l2(nbytes: int) -> None:
    copies = harness.copies_for(nbytes)
    launches = harness.launches_for(nbytes, copies)
    assert copies * nbytes > 350_000_000
    assert copies >= 2
    assert launches >= 20
    assert launches % copies == 0, "each buffer is read equally often"


@given(st.integers(1, 2**31), st.floats(1.0, 1e6))
def test_graphs_of_long_launches_are_short(nbytes: int, us: float) -> None:
    copies = harness.copies_for(nbytes)
    launches = harness.launches_for(nbytes, copies, us)
    assert launches % copies == 0
    assert launches == copies or launches * us <= harness.GRAPH_S * 1e6
    assert launches <= harness.launches_for(nbytes, copies)


# ---- Operands -------------------------------------------------------------------------------------------------------


def test_random_operands() -> None:
    numbers = operands.random_numbers(np, 1 << 16, "float16", 3, 0.5).astype(float)
    assert abs(numbers.mean()) < 0.01
    assert abs(numbers.std() - 0.5) < 0.01
    assert not np.array_equal(operands.random_words(np, 100, 1), operands.random_words(np, 100, 2))
    counts = np.bincount(operands.random_words(np, 1 << 16, 1).view(np.uint8), minlength=256)
    assert counts.min() > 800, "about 1024 of each byte"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_packed_weights_are_valid_and_apart(dtype: str) -> None:
    first, second = operands.random_packed(np, 256, 192, dtype, 2)
    assert first.nbytes == operands.packed_bytes(256, 192)
    assert not np.shares_memory(first.qweight, second.qweight)
    assert not np.shares_memory(first.scales, second.scales)
    values = first.dequantize()
    assert np.isfinite(values).all()
    assert values.std() > 0.01


@given(st.integers(0, 40), st.integers(1, 12))
def test_filled_repeats_its_block(size: int, block: int) -> None:
    pattern = np.arange(block, dtype=np.uint16)
    assert operands.filled(np, (size,), pattern).tolist() == [i % block for i in range(size)]


# ---- Tables ---------------------------------------------------------------------------------------------------------


def cell(m: int, x_cublas: float | None, x_floor: float | None = None, k: int = 8192, n: int = 28672) -> dict[str, Any]:
    return {"k": k, "n": n, "m": m, "us": 10.0, "x_cublas": x_cublas, "x_floor": x_floor, "floor_us": 8.0}


FAILED = {"k": 4096, "n": 4096, "m": 1, "case": "torch", "load_path": "tma", "bytes": 1, "error": "x"}
CODE = dict.fromkeys(
    ("registers", "copies", "threads", "loop", "loop_integer", "producer_slots", "consumer_slots", "slots"), 7
)


@pytest.mark.parametrize(
    ("table", "rows", "expected"),
    [
        (cells.summary_table, [cell(1, 2.5, 1.3), cell(16, None)], "| 8192 x 28672 | 8.0 | 10 (2.50) | 10 (-) |"),
        (
            cells.detail_table,
            [cell(1, 2.5, 1.3) | {"rivals": {"humming": {"us": 12.0, "x": 1.2}}}],
            "| 8192 x 28672 | 1 | 10.00 | 8.00 | 1.30 | - | - | - | 2.50 | 1.20 | - | - | - |",
        ),
        (
            read_floor.floor_table,
            [{"k": 1, "n": 2, "bytes": 1e6, "us": 3.0, "tb_s": 4.0, "config": "c"}],
            "| 1 x 2 | 1.0 | 3.00 | 4.00 | c | - |",
        ),
        (
            load_paths.load_paths_table,
            [{"k": 1, "n": 2, "m": 3, "us": {"tma": 1.0, "scales": None, "cp_async": 2.0}, "speed_up": 2.0}],
            "| 1 x 2 | 3 | 1.00 | - | 2.00 | 2.00 |",
        ),
        (
            load_paths.load_paths_table,
            [{"k": 1, "n": 2, "m": 3, "us": {}, "code": {"tma": {"registers": 83, "copies": 7, "slots": 99}}}],
            "| 1 x 2 | 3 | - | - | - | - | 83 / - | 7 / - | 99 / - |",
        ),
        (
            ncu.counters_table,
            [{"k": 1, "n": 2, "m": 3, "ncu": {"tma": {"us": 4.0, "instructions": 2e6, "stalls": {"wait": 1.5}}}}],
            "| 1 x 2 | 3 | TMA | 4.00 | 2.00 | - | - | - | - | wait 1.5 |",
        ),
        (
            load_path_code.code_table,
            [{"m": 1, "load_path": "tma", **CODE}],
            "| M = 1 | TMA | 7 | 7 | 7 | 7 | 7 | 7 | 7 | 7 |",
        ),
        (
            host_cost.host_table,
            [{"case": "CuPy", "median_us": 8.0, "p90_us": 9.0, "p99_us": 12.5, "least_us": 7.0}],
            "| CuPy | 8.00 | 9.00 | 12.50 | 7.00 |",
        ),
        (
            first_call.first_call_table,
            [{"m": 1, "compile_ms": 217.0, "cold_ms": {"load": 275.0}, "warm_ms": {"load": 4.3}}],
            "275.00 | 4.30 |",
        ),
    ],
)
def test_tables_are_what_the_readme_takes(
    table: Callable[[list[dict[str, Any]]], report.Table], rows: list[dict[str, Any]], expected: str
) -> None:
    assert expected in table_text("x", {"table": table(rows).as_json()})
    assert table_text("x", {"table": table([]).as_json()})
    assert table_text("x", {"table": table([*rows, FAILED]).as_json()}), "a failed cell breaks no table"


# ---- Results --------------------------------------------------------------------------------------------------------


def test_a_result_is_written_as_it_comes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "marlin.json"
    result = report.Result({"dtype": "float16"}, cells.summary_table, path, machine={"card": "H200"})
    result.add(cell(1, 2.5), "first")
    early = json.loads(path.read_text())
    result.add({**cell(16, None), "us": None, "error": "broken"}, "second")
    late = json.loads(path.read_text())
    assert set(late) == {"machine", "commit", "date", "settings", "cells", "table"}
    assert (len(early["cells"]), len(late["cells"])) == (1, 2)
    assert late["table"]["rows"] == [["8192 x 28672", "8.0", "10 (2.50)", "-"]]
    assert [entry.name for entry in path.parent.iterdir()] == ["marlin.json"]
    assert capsys.readouterr().out.splitlines() == ["first", "second  FAILED: broken"]
    result.more = lambda found: {"bars": len(found)}
    assert result.as_json()["bars"] == 2


def test_machine_facts_name_everything() -> None:
    facts = report.machine_facts()
    assert list(facts) == ["card", "driver", "cuda", "nvrtc", "cupy", "torch", "python"]
    assert all(isinstance(fact, str) and fact for fact in facts.values())


def test_commit_comes_from_git_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(report.COMMIT_VARIABLE, "abc123")
    assert report.commit(tmp_path) == "abc123"
    monkeypatch.delenv(report.COMMIT_VARIABLE)
    assert report.commit(tmp_path) == "unknown"
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    (tmp_path / "file").write_text("1")
    for arguments in (["init", "-q"], ["add", "file"], ["commit", "-q", "-m", "m"]):
        subprocess.run([*git, *arguments], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout
    assert report.commit(tmp_path) == head[:12]
    (tmp_path / "file").write_text("2")
    assert report.commit(tmp_path) == f"{head[:12]}+changes"
    monkeypatch.setenv(report.COMMIT_VARIABLE, "abc123")
    assert report.commit(tmp_path) == "abc123"
    monkeypatch.delenv(report.COMMIT_VARIABLE)
    (tmp_path / ".git" / "HEAD").write_text("nonsense")
    assert report.commit(tmp_path) == "unknown"


# ---- Scripts --------------------------------------------------------------------------------------------------------

NAMES = {
    "emulator",
    "load_path_code",
    "load_paths",
    "first_call",
    "host_cost",
    "marlin",
    "ncu",
    "plot",
    "quantize",
    "read_floor",
}


def test_the_scripts_are_found_with_a_summary() -> None:
    found = bench.benchmarks()
    assert set(found) >= NAMES
    assert all(found.values())


@pytest.mark.parametrize("module", [load_paths, host_cost, marlin, read_floor])
def test_without_a_gpu_the_reason_is_said(
    module: types.ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_gpu() -> None:
        raise DriverError("cuInit", None, "no CUDA driver on this machine")

    monkeypatch.setattr(harness, "detect", no_gpu)
    with pytest.raises(SystemExit) as ended:
        module.main([])
    assert ended.value.code == 2
    assert "no CUDA driver" in capsys.readouterr().err


def test_quantizing_is_timed_and_its_memory_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "quantize.json"
    assert quantize.main(["--k", "256", "--n", "192", "--libraries", "numpy", "--json", str(path)]) == 0
    cells = json.loads(path.read_text())["cells"]
    assert [cell["dtype"] for cell in cells] == list(quantize.TYPES)
    assert all(cell["memory"] * (2 if cell["dtype"] == "float32" else 1) > 0.25 and cell["ms"] > 0 for cell in cells)
    assert "| numpy, float16 |" in table_text("x", {"table": quantize.quantize_table(cells).as_json()})


def test_calls_are_timed_without_the_drains() -> None:
    now, order = [0], []

    def call(index: int) -> None:
        order.append(index)
        now[0] += 1000 + index

    def drain() -> None:
        order.append("drain")
        now[0] += 10**9

    samples = host_cost.time_calls(call, drain, 1200, lambda: now[0])
    assert samples == [1000 + index for index in range(1200)]
    assert [i for i, entry in enumerate(order) if entry == "drain"] == [0, 501, 1002, 1203]


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=300))
def test_quantiles(samples: list[int]) -> None:
    found = host_cost.quantiles_us(samples)
    assert found["median_us"] == pytest.approx(np.median(samples) / 1e3)
    assert found["least_us"] == min(samples) / 1e3
    assert found["median_us"] <= found["p90_us"] * (1 + 1e-9)
    assert found["p90_us"] <= found["p99_us"] <= max(samples) / 1e3
    assert sum(sample / 1e3 <= found["p90_us"] for sample in samples) >= 0.9 * len(samples)


def test_first_call_bars() -> None:
    good = {"m": 1, "compile_ms": 1999.0, "warm_ms": {"load": 9.9}}
    assert first_call.misses([good]) == []
    assert len(first_call.misses([good | {"compile_ms": 2001.0}, good | {"warm_ms": {"load": 11.0}}, FAILED])) == 3


def test_first_call_in_fresh_processes() -> None:
    found = first_call.measure(1, "sm_90a", warm_runs=1)
    assert "error" not in found, found
    assert found["compile_ms"] > 50
    assert found["warm_ms"]["load"] < found["cold_ms"]["load"] / 2
    assert set(found["cold_ms"]) == {"load"}, "nothing touches a GPU where a target is named"


def test_first_call_keeps_a_child_that_fails() -> None:
    assert "sm_1" in first_call.measure(1, "sm_1", warm_runs=1)["error"]


# ---- The read floor's kernel and configurations ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sm_90a", "sm_120a"])
def test_floor_configurations_fit(name: str) -> None:
    target = get_target(name)
    found = read_floor.configurations(target.smem_per_block_bytes, target.smem_per_sm_bytes)
    assert len(found) == len(set(found)) > 10
    for config in found:
        block = config.ring_bytes + 1024  # what the system keeps
        assert config.ring_bytes + 512 <= target.smem_per_block_bytes
        assert block * config.blocks_per_sm <= target.smem_per_sm_bytes
        assert 2 <= config.stages <= 32, "the kernel's barriers"


@pytest.mark.parametrize("name", ["sm_90a", "sm_120a"])
def test_the_floor_kernel_compiles(name: str) -> None:
    from cudatma.build.kernel import compile

    kernel = compile(read_floor.SOURCE, target=name, template=True)
    assert [parameter.size_bytes for parameter in kernel.parameters] == [8, 8, 8, 4, 4, 4]
    assert "cp.async.bulk.shared::cta.global" in kernel.ptx
    assert kernel.ptx.count("griddepcontrol.") == 2, "launched in a chain, it lets the next one in and waits"
    assert f".maxntid {read_floor.THREADS}" in kernel.ptx


def test_the_floor_kernel_has_no_hazard() -> None:
    from cudatma.build.kernel import compile

    kernel = compile(read_floor.SOURCE, target="sm_90a", template=True)
    source, sink = np.arange(8192, dtype=np.uint32).view(np.uint8), np.zeros(1, np.uint32)
    nbytes = source.nbytes - 48  # the last copy is shorter; two blocks go round a ring of two slots
    for interleaved in (0, 1):
        arguments = (source, sink, nbytes, 4096, 2, interleaved)
        report = kernel.emulate(2, read_floor.THREADS, arguments, shared_bytes=2 * 4096, schedules=3)
        assert not report.hazards, str(report)
    assert sink[0] == 0


# ---- Loops in SASS --------------------------------------------------------------------------------------------------

#: A loop whose inner loop runs first, and whose wait has its slow path after the end of the kernel.
SASS = """
        /*0000*/                   MOV R1, RZ ;
.L_x_0:
        /*0010*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R2], R3 ;
        /*0020*/              @!P0 BRA `(.L_x_9) ;
.L_x_1:
        /*0030*/                   LDGSTS.E.BYPASS.128 [R4], desc[UR4][R6.64] ;
        /*0040*/                   LDGSTS.E.BYPASS.128 [R4+0x10], desc[UR4][R6.64+0x10] ;
        /*0050*/                   IADD3 R4, R4, 0x20, RZ ;
        /*0060*/               @P1 BRA `(.L_x_1) ;
        /*0070*/                   UIADD3 UR5, UR5, 0x1, URZ ;
        /*0080*/                   NOP ;
        /*0090*/               @P2 BRA `(.L_x_0) ;
        /*00a0*/                   BSSY B0, `(.L_x_4) ;
        /*00b0*/               @P3 BRA `(.L_x_3) ;
        /*00c0*/                   STG.E desc[UR4][R2.64], R8 ;
.L_x_3:
        /*00d0*/                   BSYNC B0 ;
.L_x_4:
        /*00e0*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
        /*00f0*/               @P4 BRA `(.L_x_4) ;
        /*0100*/                   EXIT ;
.L_x_9:
        /*0110*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R2], R3 ;
        /*0120*/               @P0 BRA `(.L_x_1) ;
        /*0130*/                   BRA `(.L_x_9) ;
.L_x_10:
        /*0140*/                   BRA `(.L_x_10) ;
"""


def encoded(code: str) -> str:
    """The code as nvdisasm prints it, with two words for each instruction; what they say does not matter here."""
    words = f"/* 0x{0:016x} */"
    return "".join(f"{line}  {words}\n  {words}\n" if line.endswith(";") else f"{line}\n" for line in code.splitlines())


def test_natural_loops() -> None:
    loops = {loop.header: loop for loop in natural_loops(encoded(SASS))}
    assert sorted(loops) == [0x10, 0x30, 0xE0, 0x110], "the loop behind the end is never entered"
    outer, inner, tail, slow = (loops[header] for header in (0x10, 0x30, 0xE0, 0x110))
    assert [step.address for step in inner.steps] == [0x30, 0x40, 0x50, 0x60]
    assert [step.address for step in slow.steps] == [0x110, 0x120, 0x130]
    assert [step.address for step in outer.steps] == [*range(0x10, 0x80, 0x10), 0x90, 0x110, 0x120, 0x130]
    assert outer.contains(inner)
    assert outer.contains(slow)
    assert not inner.contains(outer)
    assert not outer.contains(tail)
    assert outer.integer == 2, "IADD3 and UIADD3"
    assert outer.counts["LDGSTS"] == 2


def test_addresses_as_branch_targets() -> None:
    text = (
        "        /*0000*/   MOV R1, RZ ;\n        /*0010*/   IADD3 R1, R1, 1, RZ ;\n        /*0020*/  @P0 BRA 0x10 ;\n"
    )
    assert [(loop.header, len(loop.steps)) for loop in natural_loops(encoded(text))] == [(0x10, 2)]
    assert natural_loops("") == []


def test_the_steady_loops_are_found() -> None:
    loops = natural_loops(encoded(SASS))
    assert load_path_code.producer_loop(loops).header == 0x10
    assert load_path_code.consumer_loop(loops).header == 0xE0
    with pytest.raises(LookupError):
        load_path_code.producer_loop([])
    with pytest.raises(LookupError):
        load_path_code.consumer_loop([])


def test_producer_slots_scale_with_the_copies() -> None:
    # 11 instructions, 4 of them in the copy loop: 2 for a copy, 7 besides for each warp.
    loops = natural_loops(encoded(SASS))
    assert load_path_code.producer_slots(loops, [], 1) == 11
    assert load_path_code.producer_slots(loops, [10], 4) == 4 * 7 + 10 * 2
    assert load_path_code.producer_slots(loops, [10, 20], 4) == 4 * 7 + 30 * 2, "one loop for two operands: its mean"


def spec_of(load_path: str, m: int = 16) -> Any:
    layer = LinearShape(8192, 28672, 128, False, "float16")
    return choose_mma_sync(Problem(layer, m), H200, load_paths.LOAD_PATHS[load_path])


def test_copies_of_a_stage() -> None:
    spec = spec_of("tma")
    boxes = spec.block_n // 64 + 1 + spec.block_k // 64
    assert sum(load_path_code.copies_by_operand(spec).values()) == boxes
    pieces = load_path_code.copies_by_operand(spec_of("cp_async"))
    assert pieces["weight"] * 512 == spec.block_n * spec.block_k // 2
    assert pieces["activation"] * 512 == spec.block_m * spec.block_k * 2
    assert load_path_code.copies_by_operand(spec_of("scales")) == pieces | {"scale": 1}


@pytest.mark.skipif(
    find_program("nvdisasm") is None, reason="nvdisasm is not installed: pip install nvidia-cuda-nvdisasm"
)
def test_real_code_shows_what_tma_saves() -> None:
    target = get_target("sm_90a")
    tma, pieces = (load_path_code.compile_and_analyse(spec_of(name), target) for name in ("tma", "cp_async"))
    assert tma.threads == 1
    assert pieces.threads == 128
    assert tma.copies < pieces.copies
    assert tma.loop_integer < pieces.loop_integer < pieces.loop
    assert tma.slots < pieces.slots
    assert 32 < tma.registers <= 255
