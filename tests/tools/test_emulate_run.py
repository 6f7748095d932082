"""``cudatma emulate KERNEL``: launches of files and of registry kernels, exit status, JSON, traces, wrong calls."""

from __future__ import annotations

import importlib
import io
import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cudatma import cli
from cudatma.build.ptx_source import ptx_source
from cudatma.emulator.machine import scheduler
from cudatma.errors import ArgumentError
from cudatma.kernels.registry import REGISTRY
from tools.emulate_launch import LaunchFile, make_operands

pytestmark = pytest.mark.usefixtures("without_ptxas")

REVERSE = """\
extern "C" __global__ void reverse(const float* x, float* y, int n) {
    __shared__ float tile[64];
    tile[threadIdx.x] = x[threadIdx.x];
    SYNC
    if (threadIdx.x < n) y[threadIdx.x] = tile[n - 1 - threadIdx.x];
}
extern "C" __global__ void other(float* x) { x[0] = 1; }
"""
CALL = ["--entry", "rev", "--block", "64", "--arg", "x:float32[64]=arange", "--arg", "y:float32[64]"]
CALL += ["--arg", "n:int32=64", "--schedules", "3"]
FETCH = """\
//% include "primitives/tma_load.cuh.j2"
//% include "primitives/mbarrier.cuh.j2"
using namespace cudatma;
extern "C" __global__ void fetch(const __grid_constant__ TensorMap map, float* out, int row) {
    __shared__ __align__(128) float tile[8 * 16];
    __shared__ u64 barrier;
    const u32 bar = shared_address(&barrier);
    if (threadIdx.x == 0) {
        mbarrier_init(bar, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(bar, sizeof(tile));
        cp_async_bulk_tensor_2d_load(shared_address(tile), &map, bar, 0, row);
    }
    __syncthreads();
    mbarrier_wait_parity(bar, 0);
    out[threadIdx.x] = tile[threadIdx.x];
}
"""
LAUNCH: dict[str, Any] = {
    "kernel": "fetch.cu.j2",
    "grid": [1],
    "block": 128,
    "target": "sm_120a",
    "arrays": {
        "x": {"dtype": "float32", "shape": [64, 16], "fill": "random", "seed": 5, "save": "x.npy"},
        "out": {"shape": [8, 16], "fill": -1, "save": "out.npy"},
    },
    "args": [{"map": "x", "box": [8, 16]}, {"array": "out"}, "row:int32=3"],
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Kernels in the working directory."""
    monkeypatch.chdir(tmp_path)
    Path("reverse.cu").write_text(REVERSE.replace("SYNC", "__syncthreads();"))
    Path("racy.cu").write_text(REVERSE.replace("SYNC", ""))
    Path("fetch.cu.j2").write_text(FETCH)
    return tmp_path


def emulate(*arguments: str) -> int:
    return cli.main(["emulate", *arguments])


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    status = emulate(*arguments, "--json")
    return status, json.loads(capsys.readouterr().out)


def test_a_clean_kernel_with_the_expected_result(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save("wanted.npy", np.arange(64, dtype=np.float32)[::-1])
    assert emulate("reverse.cu", *CALL, "--expect", "y=wanted.npy", "--save", "y=y.npy") == 0
    shown = capsys.readouterr().out
    assert "no hazards in 3 schedules" in shown
    assert "y: relative error 0.00e+00, within 0" in shown
    assert np.array_equal(np.load("y.npy"), np.load("wanted.npy"))


def test_a_wrong_result_is_a_failure(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save("wanted.npy", np.arange(64, dtype=np.float32) + 1)
    status, found = as_json(capsys, "reverse.cu", *CALL, "--expect", "x=wanted.npy")
    assert (status, found["passed"], found["hazards"]) == (1, False, [])
    assert found["compared"][0]["error"] == pytest.approx(8 / np.linalg.norm(np.arange(65)))
    assert emulate("reverse.cu", *CALL, "--expect", "x=wanted.npy", "--tolerance", "0.1") == 0


def test_a_race_is_a_table_and_a_failure(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert emulate("racy.cu", *CALL) == 1
    shown = capsys.readouterr().out
    for part in ("data_race", "racy.cu:5", "PTX line", "--replay", "a barrier between their accesses"):
        assert part in shown
    status, found = as_json(capsys, "racy.cu", *CALL)
    assert status == 1
    race = next(hazard for hazard in found["hazards"] if hazard["source"] == "racy.cu:5")
    assert race["source_text"].startswith("if (threadIdx.x < n)")
    assert {"kind", "message", "cause", "ptx_line", "block", "warp", "schedule", "seed"} <= set(race)


SWIZZLED = ["--block", "128", "--schedules", "3", "--array", "x:float32[64,16]=arange", "--arg", "out:float32[8,16]"]
SWIZZLED[4:4] = ["--arg", "map(x, box=8x16, swizzle=64B)"]


def test_a_warning_is_shown_and_leaves_the_run_clean(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tile is swizzled and read linearly."""
    Path("linear.cu.j2").write_text(FETCH.replace("__align__(128)", "__align__(1024)"))
    call = ["linear.cu.j2", *SWIZZLED, "--arg", "row:int32=0"]
    status, found = as_json(capsys, *call)
    assert (status, found["passed"], found["hazards"]) == (0, True, [])
    (warning,) = found["warnings"]
    assert warning["kind"] == "swizzle_mismatch"
    assert warning["source_text"] == "out[threadIdx.x] = tile[threadIdx.x];"
    assert emulate(*call) == 0
    assert "warning: swizzle_mismatch" in capsys.readouterr().out


def test_what_follows_from_a_hazard_is_shown_with_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Warp 1 reads the tile before its copy is issued."""
    early = FETCH.replace("    __syncthreads();\n    mbarrier_wait_parity(bar, 0);\n", "")
    Path("early.cu.j2").write_text(early.replace("threadIdx.x == 0", "threadIdx.x == 127"))
    call = ["early.cu.j2", *SWIZZLED, "--arg", "row:int32=0"]
    status, found = as_json(capsys, *call)
    cause = found["hazards"][0]
    assert (status, cause["kind"]) == (1, "read_before_load")
    assert "mbarrier.try_wait.parity" in cause["advice"]
    assert "uninitialized_shared" in [consequence["kind"] for consequence in cause["consequences"]]
    assert emulate(*call) == 1
    assert "then uninitialized_shared" in capsys.readouterr().out


NO_TOML = pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 reads no TOML")


@pytest.mark.parametrize("suffix", [".json", pytest.param(".toml", marks=NO_TOML)])
def test_a_launch_file(suffix: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toml = """
kernel = "fetch.cu.j2"
grid = [1]
block = 128
target = "sm_120a"
args = [{ map = "x", box = "8x16" }, { array = "out" }, "row:int32=3"]
[arrays.x]
dtype = "float32"
shape = [64, 16]
fill = "random"
seed = 5
save = "x.npy"
[arrays.out]
shape = [8, 16]
fill = -1
save = "out.npy"
"""
    Path(f"launch{suffix}").write_text(json.dumps(LAUNCH) if suffix == ".json" else toml)
    status, found = as_json(capsys, f"launch{suffix}")
    assert (status, found["kernel"]) == (0, "fetch")
    assert np.array_equal(np.load("out.npy"), np.load("x.npy")[3:11])


def test_tensor_maps_on_the_command_line_and_traces(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--block", "128", "--array", "x:float32[64,16]=arange", "--arg", "map(x, box=8x16)"]
    arguments += ["--arg", "out:float32[8,16]", "--arg", "row:int32=8", "--save", "out=out.npy"]
    assert emulate("fetch.cu.j2", *arguments, "--trace", "sub/t.svg", "--trace", "t.json") == 0
    assert "wrote sub/t.svg" in capsys.readouterr().out
    ElementTree.parse("sub/t.svg")
    assert {event["ph"] for event in json.loads(Path("t.json").read_text())["traceEvents"]} >= {"M", "X", "b", "e", "C"}
    assert np.load("out.npy").ravel().tolist() == list(range(128, 256))


def test_names_and_printed_lines_are_shown_as_they_are(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Brackets are no markup, and a long line is not folded."""
    monkeypatch.setenv("COLUMNS", "80")
    line = " ".join(["0123456789"] * 9)
    source = f'extern "C" int printf(const char*, ...);\nextern "C" __global__ void k() {{ printf("{line}\\n"); }}'
    Path("a[b].cu").write_text(source)
    assert emulate("a[b].cu", "--block", "1", "--schedules", "1", "--trace", "t[red].svg") == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("a[b].cu, k")
    assert f"printed   {line}" in shown
    assert shown[-1] == "wrote t[red].svg"


def test_an_endless_loop_shows_progress_and_exits_1(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cli.tools_package()
    monkeypatch.setattr(importlib.import_module("cudatma.tools.emulate_run"), "_FIRST_S", 0.0)
    monkeypatch.setattr(scheduler, "LOOK_PERIOD", 4000)
    Path("spin.cu").write_text('extern "C" __global__ void spin(volatile int* x) { for (int i = 0;; i++) x[0] = i; }')
    assert emulate("spin.cu", "--arg", "x:int32[1]", "--step-limit", "5000") == 1
    shown, error = capsys.readouterr().err.splitlines()
    assert re.match(r"cudatma: 0 of 10 schedules, [\d,]+ steps of the next schedule, ", shown)
    assert "an infinite loop through spin.cu:1" in error
    assert error.endswith("or step_limit is too low")


def test_a_cu_file_is_a_template_only_where_it_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("fetch.cu").write_text(FETCH)
    arguments = ["fetch.cu", "--block", "128", "--array", "x:float32[64,16]", "--arg", "map(x, box=8x16)"]
    arguments += ["--arg", "out:float32[8,16]", "--arg", "row:int32=8", "--schedules", "1"]
    assert emulate(*arguments) == 2
    assert "--template" in capsys.readouterr().err
    assert emulate(*arguments, "--template") == 0


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("tile_copy", ["--rows", "70", "--columns", "40", "--dtype", "float16"]),
        ("marlin_mma_sync", ["--m", "3", "--n", "64", "--k", "256", "--dtype", "bfloat16", "--target", "sm_120a"]),
        ("marlin_mma_sync", ["--m", "16", "--n", "64", "--k", "256"]),
    ],
)
def test_registry_kernels(name: str, sizes: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    status, found = as_json(capsys, name, *sizes, "--schedules", "2")
    assert (status, found["hazards"]) == (0, [])
    assert found["compared"][0]["passed"]
    assert ("sm_120a" if "--target" in sizes else "sm_90a") in found["title"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "KERNEL must be passed if --coverage is omitted"),
        (["reverse.cu", "--coverage", "x.ptx"], "KERNEL must be omitted if --coverage is passed"),
        (["reverse.cu", "--rows", "3"], "got an unknown option"),
        (["marlin_mma_sync", "--rows", "3"], "got an unknown option"),
        (["marlin_mma_sync", "--schedule", "3"], "got an unknown option (did you mean --schedules?)"),
        (["marlin_wgmma", "--target", "sm_120a"], "target must be a target with wgmma"),
        (["marlin_mma_sync", "--m", "many"], "--m must be an integer"),
        (["attention_a3", "--causal", "0"], "--causal must be true or false"),
        (["reverse.cu", "--block"], "--block must be X[,Y[,Z]]"),
        (["marlin_mma", "--m", "16"], "got marlin_mma (did you mean marlin_mma_sync?)"),
        (["reverse.cu", *CALL[:-4]], "--arg must be passed 3 times for kernel reverse (reverse_param_0: "),
        (["reverse.cu", "--grid", "0"], "must be one to three positive integers"),
        (["reverse.cu", "--grid", "1,2,3,4"], "must be one to three positive integers"),
    ],
)
def test_wrong_options_of_the_parser(
    arguments: list[str], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert emulate(*arguments) == 2
    assert said in capsys.readouterr().err


def test_folders_that_are_not_the_kernel_do_not_change_the_command(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("include", "tile_copy"):
        (folder / name).mkdir()
    assert emulate("-I", "include", "reverse.cu", *CALL) == 0
    assert emulate("tile_copy", "--schedules", "1") == 0
    capsys.readouterr()
    assert emulate("--launch", "1", "tile_copy") == 2
    assert "--launch must be " in capsys.readouterr().err


def test_the_help_of_a_kernel_lists_its_sizes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert emulate("--seed", "3", "attention_a3", "--help") == 0
    said = capsys.readouterr().out
    assert "--head-dim int" in said
    assert "--causal [true]  whether queries attend only to keys up to their own" in said
    for entry in REGISTRY.values():
        if entry.sample is not None:
            assert emulate(entry.name, "--help") == 0
    assert "  (default:" not in capsys.readouterr().out, "an option without a description"
    with pytest.raises(SystemExit):
        emulate("foo.cu", "--entry", "attention_a3", "--help")
    assert "--coverage" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["nothing"], "KERNEL"),
        (["marlin_mma_sync", "--grid", "3"], "KERNEL"),
        (["marlin_mma_sync", "--m", "0"], "m"),
        (["tile_copy", "--dtype", "tensor"], "dtype"),
        (["nowhere.cu"], "kernel"),
        (["nowhere.toml"], "launch file"),
        (["reverse.cu", "--arg", "x"], "--arg"),
        (["reverse.cu", "--arg", "x:float32[4]=many"], "arrays.x.fill"),
        (["reverse.cu", "--arg", "x:float32[0]"], "arrays.x.shape"),
        (["reverse.cu", "--arg", "x:float32[9999999,999999]"], "arrays.x.shape"),
        (["reverse.cu", "--arg", "x:string[4]"], "arrays.x.dtype"),
        (["reverse.cu", "--arg", "x:float[4]"], "arrays.x.dtype"),
        (["reverse.cu", "--arg", "factor=2"], "args[0].type"),
        (["reverse.cu", "--arg", "n=512"], "args[0].type"),
        (["gemm_v4", "--dtype", "float8_e4m3fn"], "dtype"),
        (["reverse.cu", "--arg", "n:int32=x"], "args[0].value"),
        (["reverse.cu", "--arg", "map(x, box=4x4)"], "args[0]"),
        (["reverse.cu", "--array", "x:float32[8,8]", "--arg", "map(x)"], "args[0].box"),
        (["reverse.cu", "--array", "x:float32[8,8]", "--arg", "map(x, box=ax4)"], "args[0].box"),
        (["reverse.cu", "--array", "x:float32[8,8]", "--arg", "map(x, box=4x4, swizle=64B)"], "--arg.swizle"),
        (["reverse.cu", "--save", "z=z.npy"], "--save"),
        (["reverse.cu", *CALL, "--save", "y=reverse.cu/y.npy"], "arrays.y.save"),
        (["reverse.cu", *CALL, "--expect", "y=nowhere.npy"], "arrays.y.expect"),
        (["reverse.cu", *CALL, "--trace", "t.png"], "--trace"),
        (["reverse.cu", *CALL, "--schedules", "0"], "--schedules"),
        (["reverse.cu", *CALL, "--cluster", "2"], "cluster"),
        (["reverse.cu", *CALL, "--shared-bytes", "-1"], "--shared-bytes"),
    ],
)
def test_wrong_calls_are_one_line(
    arguments: list[str], field: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert emulate(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert captured.err.startswith("cudatma: ")
    assert " must be " in captured.err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "must be reverse or other, found no name; select one of the 2 kernels in the PTX"),
        (["--entry", "revers_"], "must be reverse or other, got revers_ (did you mean reverse?)"),
        (["--entry", "er"], "must be reverse or other, got er; pass a longer part of the name because 2 names match"),
        (["--entry", "x"], "must be reverse or other, got x"),
    ],
)
def test_the_entry_has_to_name_one_kernel(
    given: list[str], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert emulate("reverse.cu", *given, *CALL[2:]) == 2
    assert capsys.readouterr().err == f"cudatma: ArgumentError: --entry {said}\n"


INCLUDING = """\
#include "own.h"
#include <factor.h>
template <int K> concept Small = K < 9;
extern "C" __global__ void scale(float* x) { x[threadIdx.x] *= Small<FACTOR> ? FACTOR * OWN : 0; }
"""


@pytest.mark.parametrize("command", ["emulate", "mutants"])
@pytest.mark.parametrize("is_file", [False, True], ids=["options", "launch file"])
def test_a_file_that_includes(command: str, is_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {
        "k/scale.cu": INCLUDING,
        "k/own.h": "#define OWN 1",
        "inc/factor.h": "#define FACTOR (N * M)",
        "first.h": "#define M 2",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    if is_file:  # its folders are relative to it
        described: dict[str, Any] = {"kernel": "k/scale.cu", "block": 32, "include_dirs": ["inc"], "defines": ["N=3"]}
        described |= {"options": ["--std=c++20", f"--pre-include={tmp_path / 'first.h'}"]}
        described |= {"arrays": {"x": {"dtype": "float32", "shape": [32], "fill": "ones"}}, "args": [{"array": "x"}]}
        (tmp_path / "launch.json").write_text(json.dumps(described))
        words = [str(tmp_path / "launch.json")]
    else:
        monkeypatch.chdir(tmp_path)
        words = ["k/scale.cu", "-Iinc", "-D", "N=3", "--std", "c++20", "--include", "first.h"]
        words += ["--block", "32", "--arg", "x:float32[32]=ones"]
    if command == "mutants":
        assert cli.main(["mutants", *words, "--list"]) == 0
        return
    np.save(tmp_path / "six.npy", np.full(32, 6, np.float32))
    assert cli.main(["emulate", *words, "--schedules", "2", "--expect", f"x={tmp_path / 'six.npy'}"]) == 0


def test_a_file_without_a_kernel(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty.cu").write_text("__device__ int x;")
    assert emulate("empty.cu") == 2
    assert "ptx must be a module that contains kernels, found no kernels" in capsys.readouterr().err


def test_a_report_without_source_lines_says_how_to_get_them(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ptx = ptx_source(Path("racy.cu")).ptx
    Path("with.ptx").write_text(ptx)
    Path("without.ptx").write_text(re.sub(r"^\s*\.loc.*\n", "", ptx, flags=re.MULTILINE))
    for kernel, is_hinted in (("with.ptx", False), ("without.ptx", True)):
        assert emulate(kernel, *CALL) == 1
        assert ("nvcc -lineinfo" in capsys.readouterr().out) == is_hinted


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"grids": 1}, "launch file.grids"),
        ({"kernel": None}, "launch file.kernel"),
        ({"args": {}}, "args"),
        ({"args": [{"array": "z"}]}, "args[0]"),
        ({"args": [{"pointer": "x"}]}, "args[0].pointer"),
        ({"arrays": []}, "arrays"),
        ({"arrays": {"x": {"fills": 1}}}, "arrays.x.fills"),
        ({"arrays": {"x": {"shape": 8, "fill": "random", "seed": -1}}}, "arrays.x.seed"),
        ({"arrays": {"x": {"shape": 8, "save": None}}}, "arrays.x.save"),
        ({"args": [{"array": []}]}, "args[0]"),
    ],
)
def test_wrong_launch_files(
    change: dict[str, Any], field: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("launch.json").write_text(json.dumps(LAUNCH | change))
    assert emulate("launch.json") == 2
    assert "got " in capsys.readouterr().err


def test_fills() -> None:
    launch = LaunchFile()
    for text in ("a:int8[3]=arange", "b:float16[2]=ones", "c:bfloat16[2]=1.5", "d:uint32[2]=7", "e:bool[64]=random"):
        launch.add_argument(text)
    launch.add_argument("d")
    launch.add_argument("float64=0.5")
    launch.add_argument("uint64=0xff")
    found = make_operands(launch)
    shown = [found.arrays[name].astype(np.float64).tolist() for name in "abcd"]
    assert shown == [[0, 1, 2], [1, 1], [1.5, 1.5], [7, 7]]
    assert set(found.arrays["e"].tolist()) == {True, False}
    assert found.values[5] is found.arrays["d"]
    assert (type(found.values[6]), found.values[6], found.values[7]) == (np.float64, 0.5, 255)
    with pytest.raises(ArgumentError, match="--arg"):
        launch.add_argument("nonsense")


KERNEL = """.version 8.0
.target sm_90a
.address_size 64
.visible .entry twice(.param .u64 p) {
    .reg .b32 %r<3>;
    .reg .b64 %rd<2>;
    ld.param.u64 %rd1, [p];
    ld.global.u32 %r1, [%rd1];
    add.u32 %r2, %r1, %r1;
    add.u32 %r2, %r2, %r1;
    EXTRA
    st.global.u32 [%rd1], %r2;
    ret;
}
"""
COVERED = {"ld.param.u64": 1, "ld.global.u32": 1, "add.u32": 2, "st.global.u32": 1, "ret": 1}


@pytest.fixture
def ptx(tmp_path: Path) -> Path:
    """A kernel that is covered."""
    path = tmp_path / "twice.ptx"
    path.write_text(KERNEL.replace("EXTRA", "// größe"), encoding="utf-8")
    return path


@pytest.fixture
def strange(tmp_path: Path) -> Path:
    """The same with an instruction that no PTX has, in line 11."""
    path = tmp_path / "strange.ptx"
    path.write_text(KERNEL.replace("EXTRA", "frobnicate.b32 %r2, %r1;"))
    return path


def test_a_covered_file(ptx: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["emulate", "--coverage", str(ptx)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("6 instructions of 5 kinds are supported, 0 are not\n")
    assert "     2  add.u32" in shown
    assert cli.main(["emulate", "--coverage", str(ptx), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "complete": True,
        "covered_instructions": 6,
        "missing_instructions": 0,
        "covered": COVERED,
        "missing": [],
    }


def test_an_unknown_instruction_is_named_with_its_line(strange: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["emulate", "--coverage", str(strange)]) == 1
    shown = capsys.readouterr().out
    assert ", 1 are not" in shown
    assert "not supported in twice: PTX line 11" in shown
    assert cli.main(["emulate", "--coverage", str(strange), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["covered"] == COVERED
    assert (found["complete"], found["missing_instructions"]) == (False, 1)
    (missing,) = found["missing"]
    assert (missing["function"], missing["line"]) == ("twice", 11)
    assert "frobnicate" in missing["text"] + missing["why"]


def test_standard_input(ptx: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(ptx.read_bytes())))
    assert cli.main(["emulate", "--coverage", "-", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["covered"] == COVERED


@pytest.mark.parametrize("content", [b"", b"\x7fELF\x02\x01\x01\0\0", b"int main() {}\n", b"\xff" * 100, b".version"])
def test_what_is_no_ptx_is_one_line(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other.ptx"
    path.write_bytes(content)
    assert cli.main(["emulate", "--coverage", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert captured.err.startswith("cudatma: PtxError: PTX")


@pytest.mark.parametrize("name", ["nowhere.ptx", ".", "a\0b"])
def test_a_file_that_cannot_be_read(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["emulate", "--coverage", f"{tmp_path}/{name}"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("cudatma: ArgumentError: --coverage must be ")
    assert len(captured.err.splitlines()) == 1


def test_more_than_the_emulator_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tools import emulate

    monkeypatch.setattr(emulate, "MAX_CHARS", 100)
    path = tmp_path / "big.ptx"
    path.write_bytes(b" " * 101)
    with pytest.raises(ValueError, match="more than 100 bytes"):
        emulate.read_ptx(str(path))
    path.write_bytes(b" " * 100)
    assert emulate.read_ptx(str(path)) == " " * 100
