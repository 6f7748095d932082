"""The pytest plugin, run by pytest itself on small test files."""

from __future__ import annotations

import json

import pytest

pytest_plugins = ("pytester",)

KERNEL = """\
extern "C" __global__ void reverse(const float* x, float* y) {
    __shared__ float tile[64];
    tile[threadIdx.x] = x[threadIdx.x];
    SYNC
    y[threadIdx.x] = tile[63 - threadIdx.x];
}
"""
TEST = """\
import numpy as np

def test_reverse(emulate):
    x, y = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    report = emulate("reverse.cu", 1, 64, (x, y))
    assert np.array_equal(y, x[::-1])
    assert report.schedules == 10
"""


@pytest.fixture
def files(pytester: pytest.Pytester) -> pytest.Pytester:
    """A test of a kernel that is right; the plugin is loaded as an installed cudatma has it loaded."""
    pytester.makeini("[pytest]\naddopts = -p cudatma.pytest_plugin -p no:cacheprovider")
    pytester.makepyfile(test_reverse=TEST)
    (pytester.path / "reverse.cu").write_text(KERNEL.replace("SYNC", "__syncthreads();"))
    return pytester


def break_kernel(files: pytest.Pytester) -> None:
    (files.path / "reverse.cu").write_text(KERNEL.replace("SYNC", "// no barrier"))


def test_a_right_kernel_passes(files: pytest.Pytester) -> None:
    files.runpytest_inprocess().assert_outcomes(passed=1)


def test_a_race_fails_with_its_line_its_cause_and_how_to_see_it_again(files: pytest.Pytester) -> None:
    break_kernel(files)
    result = files.runpytest_inprocess("--emulator-schedules", "4")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "reverse: data_race at reverse.cu:* on the emulator",
            "*data_race: warp * wrote these bytes, but this read does not wait for the write*",
            "*(reverse.cu:5)*kernel reverse, block (0, 0, 0), warp *, schedule * of seed 0",
            "*source: y[[]threadIdx.x] = tile[[]63 - threadIdx.x];",
            "*usual cause: the two threads do not execute a barrier between their accesses*",
            '*pytest "test_reverse.py::test_reverse" --emulator-seed 0 --emulator-replay * --emulator-trace traces',
        ]
    )
    assert "Traceback" not in result.stdout.str()


def test_a_failing_launch_leaves_its_trace(files: pytest.Pytester) -> None:
    break_kernel(files)
    result = files.runpytest_inprocess(
        "--emulator-trace", "traces", "--emulator-html", "traces", "--emulator-seed", "3"
    )
    result.assert_outcomes(failed=1)
    found = {path.suffix: path for path in (files.path / "traces").iterdir()}
    assert found[".svg"].name == "test_reverse.py_test_reverse.svg"
    result.stdout.fnmatch_lines([f"wrote traces/{found['.json'].name}"])
    assert "hazard" in found[".svg"].read_text()
    assert "// no barrier" in found[".html"].read_text()
    assert json.loads(found[".json"].read_text())["otherData"]["seed"] == 3


def test_a_right_launch_leaves_none(files: pytest.Pytester) -> None:
    files.runpytest_inprocess("--emulator-trace", "traces").assert_outcomes(passed=1)
    assert not (files.path / "traces").exists()


def test_one_schedule_is_replayed(files: pytest.Pytester) -> None:
    break_kernel(files)
    result = files.runpytest_inprocess("--emulator-replay", "7", "--emulator-seed", "2")
    result.stdout.fnmatch_lines(["*schedule 7 of seed 2"])


FORMS = """\
import numpy as np
import pytest
import cudatma
from cudatma.emulator import load

SOURCE = open("reverse.cu").read()
RACY = SOURCE.replace("__syncthreads();", "")

def kernel():
    return cudatma.compile(SOURCE, target="sm_120a")

@pytest.mark.parametrize("make", [lambda: SOURCE, kernel, lambda: kernel().ptx, lambda: load(kernel().ptx)])
def test_forms(emulate, make):
    x, y = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    assert emulate(make(), 1, 64, (x, y), schedules=3, entry="reverse").schedules == 3
    assert np.array_equal(y, x[::-1])

def test_collected(emulate):
    report = emulate(RACY, 1, 64, (np.ones(64, np.float32), np.ones(64, np.float32)), hazards="collect")
    assert "data_race" in report.kinds

def test_errors(emulate):
    with pytest.raises(cudatma.ArgumentError, match="hazards"):
        emulate(SOURCE, 1, 64, (), hazards="loud")
    with pytest.raises(cudatma.ArgumentError, match="a readable file"):
        emulate("nowhere.ptx", 1, 64)
    with pytest.raises(cudatma.ArgumentTypeError, match="kernel"):
        emulate(7, 1, 64)
    with pytest.raises(cudatma.CompileError):
        emulate("this is no kernel", 1, 64)
"""


def test_every_form_of_a_kernel_and_wrong_calls(files: pytest.Pytester) -> None:
    files.makepyfile(test_forms=FORMS)
    files.runpytest_inprocess("test_forms.py").assert_outcomes(passed=6)


def test_a_kernel_that_includes_a_header_of_the_tests_folder(pytester: pytest.Pytester) -> None:
    folder = pytester.mkdir("sub")
    (folder / "inc").mkdir()
    (folder / "inc" / "barrier.h").write_text("#define BARRIER __syncthreads();\n")
    (folder / "reverse.cu").write_text(f"#include <barrier.h>\n{KERNEL.replace('SYNC', 'BARRIER NOTHING')}")
    more = '(x, y), include_dirs=["inc"], defines={"NOTHING": ""})'
    (folder / "test_reverse.py").write_text(TEST.replace("(x, y))", more))
    pytester.makeini("[pytest]\naddopts = -p cudatma.pytest_plugin -p no:cacheprovider")
    pytester.runpytest_inprocess().assert_outcomes(passed=1)
