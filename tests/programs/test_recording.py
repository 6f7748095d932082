"""Recording launches to a folder, reading the folder, and running its launches. The emulator takes the GPU's place."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_blocks import in_threads
from test_driver import VALUES, as_tuples, driver, ok, scale_function

import cudatma
from cudatma import Kernel
from cudatma.cli import main
from cudatma.emulator import Report
from cudatma.errors import ArgumentError, ArgumentTypeError, DriverError, RecordingError
from cudatma.programs import Recording
from cudatma.programs.recording import FILE, write_memory

REVERSE = """
extern "C" __global__ void reverse(const float* x, float* y, int n) {
    __shared__ float tile[64];
    tile[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    if (threadIdx.x < n) y[threadIdx.x] = tile[63 - threadIdx.x] + 1.0f;
}
"""


def launch_driver() -> None:
    x = VALUES.copy()
    ok(driver.cuLaunchKernel(scale_function(), 1, 1, 1, 64, 1, 1, 0, 0, as_tuples(x.ctypes.data), 0))
    config = driver.CUlaunchConfig()
    config.gridDimX = config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
    config.blockDimX = 64
    ok(driver.cuLaunchKernelEx(config, scale_function(), as_tuples(x.ctypes.data), 0))
    assert (x == 4 * VALUES).all()


def launch_cupy() -> None:
    cupy = pytest.importorskip("cupy")
    x, y = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    cupy.RawKernel(REVERSE, "reverse")((1,), (64,), (x, y, 64))
    y[:] = 0
    cupy.RawModule(code=REVERSE).get_function("reverse")((1,), (64,), (x, y, np.int32(60)))
    assert (y[:60] == x[:3:-1] + 1).all()


def launch_cuda_core() -> None:
    core = pytest.importorskip("cuda.core")
    device = core.Device()
    kernel = core.Program(REVERSE, "c++").compile("cubin").get_kernel("reverse")
    x, y = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    memory = device.allocate(x.nbytes, stream=device.default_stream)
    values = np.from_dlpack(memory).view(np.float32)
    values[:] = x
    core.launch(device.default_stream, core.LaunchConfig(grid=1, block=64), kernel, memory, y, 64)
    assert (y == x[::-1] + 1).all()


def launch_triton() -> None:
    pytest.importorskip("triton")
    torch = pytest.importorskip("torch")
    from triton_kernels import softmax

    x = torch.randn(4, 50)
    y = torch.empty_like(x)
    softmax[(4,)](y, x, 50, BLOCK=64)
    assert torch.allclose(y, torch.softmax(x, dim=1))


def launch_gluon() -> None:
    gl = pytest.importorskip("triton.experimental.gluon.language")
    torch = pytest.importorskip("torch")
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    from triton_kernels import double_tiles

    x = torch.randn(32, 64, dtype=torch.float16)
    y = torch.empty_like(x)
    layout = gl.NVMMASharedLayout.get_default_for([32, 64], gl.float16)
    double_tiles[(1,)](*(TensorDescriptor.from_tensor(array, [32, 64], layout) for array in (x, y)), num_warps=4)
    assert torch.equal(y, x + x)


def launch_cudatma() -> None:
    compiled = cudatma.compile(REVERSE, target="sm_90a")
    # The emulated driver loads PTX in the place of a cubin.
    kernel = Kernel(compiled.ptx.encode(), "reverse", compiled.target, ptx=compiled.ptx, source=compiled.source)
    x, y = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    kernel.launch(1, 64, (x.ctypes.data, y.ctypes.data, 64), backend="cuda", stream=0)
    assert (y == x[::-1] + 1).all()


def recorded(folder: Path, program: Callable[[], None], **options: Any) -> Recording:
    with cudatma.emulate_launches(), cudatma.record(folder, **options):
        program()
    return cudatma.read_recording(folder)


@pytest.mark.parametrize(
    ("program", "library", "launches", "result"),
    [
        (launch_driver, "cuda-python", 2, "args[0]"),
        (launch_cupy, "cupy", 2, "args[1]"),
        (launch_cuda_core, "cuda.core", 1, "args[1]"),
        (launch_triton, "triton", 1, "y_ptr"),
        (launch_gluon, "triton", 1, "y_desc"),
        (launch_cudatma, "cudatma", 1, "args[1]"),
    ],
)
def test_launches_of_every_library_run_again(
    tmp_path: Path, program: Callable[[], None], library: str, launches: int, result: str
) -> None:
    recording = recorded(tmp_path / "rec", program)
    assert [launch.library for launch in recording] == [library] * launches
    assert not recording.refused
    for launch in recording:
        replay = launch.run()
        assert replay.passes(), replay
        assert [comparison.name for comparison in replay.comparisons] == [result]
        assert replay.comparisons[0].dtype in ("float32", "float16")
        assert Path(__file__).name in launch.place


def test_wrong_results_are_found(tmp_path: Path) -> None:
    recording = recorded(tmp_path / "rec", launch_cupy)
    wrong = write_memory(tmp_path / "rec", np.full(64, 2.0, np.float32).view(np.uint8))
    description = json.loads((tmp_path / "rec" / FILE).read_text())
    description["launches"][0]["memory"][1]["after"] = wrong
    (tmp_path / "rec" / FILE).write_text(json.dumps(description))
    (comparison,) = cudatma.read_recording(recording.folder)[0].run().comparisons
    assert (comparison.different, comparison.max_difference) == (63, 62.0)
    assert not comparison.passes(1.0)
    assert comparison.passes(100.0)
    assert "63 of 64 float32 elements differ (max. 62, relative error " in str(comparison)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"limit_mib": 1},
            "memory must be at most 1 MiB, got 1.5 MiB; increase --limit-mib (limit_mib in Python), which is 1",
        )
    ],
)
def test_a_launch_that_is_too_large_is_listed(tmp_path: Path, options: dict[str, Any], reason: str) -> None:
    def large() -> None:
        x = np.zeros(3 << 17, np.float32)
        ok(driver.cuLaunchKernel(scale_function(), 1, 1, 1, 64, 1, 1, 0, 0, as_tuples(x.ctypes.data), 0))

    recording = recorded(tmp_path / "rec", large, **options)
    assert len(recording) == 0
    assert recording.refused[0][1] == reason
    assert "scale (cuda-python)" in recording.refused[0][0]


def test_a_module_without_ptx_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with cudatma.emulate_launches():
        load = driver.cuModuleLoadData
        # A module that was loaded before the recording, so that its PTX is not known.
        function = scale_function()
        with cudatma.record(tmp_path / "rec"):
            x = VALUES.copy()
            driver.cuLaunchKernel(function, 1, 1, 1, 64, 1, 1, 0, 0, as_tuples(x.ctypes.data), 0)
        assert driver.cuModuleLoadData == load
    recording = cudatma.read_recording(tmp_path / "rec")
    assert (x == 2 * VALUES).all()
    assert "a module without PTX" in recording.refused[0][1]


def test_only_records_kernels_by_name(tmp_path: Path) -> None:
    def both() -> None:
        launch_driver()
        launch_cupy()

    assert {launch.entry for launch in recorded(tmp_path / "rec", both, only="rev")} == {"reverse"}


def test_memory_that_two_parameters_share_is_one_memory(tmp_path: Path) -> None:
    def shifted() -> None:
        cupy = pytest.importorskip("cupy")
        x = np.arange(128, dtype=np.float32)
        cupy.RawKernel(REVERSE, "reverse")((1,), (64,), (x[:64], x[64:], 64))

    launch = recorded(tmp_path / "rec", shifted)[0]
    assert [memory.size_bytes for memory in launch.memory] == [512]
    assert launch.parameters[1].pointers[0].offset == 256
    assert launch.run().passes()


@cache
def driver_recording(folder: Path) -> Path:
    return recorded(folder, launch_driver).folder


def damage(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        description = json.loads((folder / FILE).read_text())
        change(description["launches"][0])
        (folder / FILE).write_text(json.dumps(description))

    return apply


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda folder: (folder / FILE).unlink(), "a folder that contains launches.json"),
        (lambda folder: (folder / FILE).write_text("{"), "must be a readable JSON file"),
        (lambda folder: (folder / FILE).write_text('{"format": "x", "version": 9}'), "'x' version 9"),
        (damage(lambda launch: launch.update(module="../../secret")), "must be a digest.*got ../../secret"),
        (damage(lambda launch: launch.update(grid=[1, 0, 1])), "grid must be a list of 3 integers, each at least 1"),
        (
            damage(lambda launch: launch["memory"][0].update(size_bytes=4)),
            "must be an array of 4 bytes, as stated in launches.json",
        ),
        (damage(lambda launch: launch["memory"][0].update(dtype="object")), "dtype must be .*got object"),
        (
            damage(lambda launch: launch["parameters"][0].update(pointers=[[4, 0, 0]])),
            "must be an offset in the 8 bytes",
        ),
        (damage(lambda launch: launch["parameters"][0].update(pointers=[[0, 7, 0]])), "the index of an allocation"),
        (lambda folder: next(folder.glob("memory/*")).unlink(), "No such file or directory"),
        (lambda folder: next(folder.glob("text/*")).write_text("x"), "must be the recorded file"),
    ],
)
def test_damage_is_named(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, change: Callable[[Path], None], text: str
) -> None:
    shutil.copytree(driver_recording(tmp_path_factory.getbasetemp() / "driver"), tmp_path / "rec")
    change(tmp_path / "rec")
    with pytest.raises(RecordingError, match=text):
        [launch.run() for launch in cudatma.read_recording(tmp_path / "rec")]


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"limit_mib": 0}, ArgumentError, "limit_mib must be a positive integer.*got 0"),
        ({"folder": Path(__file__) / "rec"}, ArgumentError, "must be a folder that can be created"),
        ({"only": 3}, ArgumentTypeError, "only must be a str.*got int"),
        ({"folder": Path(__file__).parent}, ArgumentError, "must be a new or empty folder"),
    ],
)
def test_wrong_arguments_are_named(tmp_path: Path, options: dict[str, Any], error: type[Exception], text: str) -> None:
    with cudatma.emulate_launches(), pytest.raises(error, match=text), cudatma.record(**{"folder": tmp_path} | options):
        pass


def test_a_recording_that_is_interrupted_contains_the_earlier_launches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def write(*args: Any) -> str:
        calls.append(args)
        if len(calls) == 4:  # the second launch has one memory before and after it
            raise KeyboardInterrupt
        return write_memory(*args)

    monkeypatch.setattr("cudatma.programs.recorder.write_memory", write)
    with pytest.raises(KeyboardInterrupt):
        recorded(tmp_path / "rec", launch_driver)
    (launch,) = cudatma.read_recording(tmp_path / "rec")
    assert launch.run().passes()


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_bytes(path: Path, data: bytes) -> int:
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    with pytest.raises(RecordingError, match=r"launches.json must be .*got .*No space left on device"):
        recorded(tmp_path / "rec", launch_driver)
    assert not [path for path in (tmp_path / "rec").rglob("*") if path.is_file()]


def test_launches_of_all_threads_are_recorded(tmp_path: Path) -> None:
    recording = recorded(tmp_path / "rec", lambda: in_threads(launch_driver))
    assert (len(recording), recording.refused) == (6, ())
    assert all(launch.run(schedules=1).passes() for launch in recording)


def test_a_recording_needs_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "cuInit", lambda flags: (driver.CUresult.CUDA_ERROR_NO_DEVICE,))
    with pytest.raises(DriverError, match="cuInit failed: CUDA_ERROR_NO_DEVICE"), cudatma.record(tmp_path / "rec"):
        pass
    assert not (tmp_path / "rec").exists()


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import test_recording; test_recording.launch_driver(); raise SystemExit(int(sys.argv[1]))\n"
    )
    monkeypatch.chdir(tmp_path)
    with cudatma.emulate_launches():
        assert main(["record", "program.py", "3"]) == 3
    assert "wrote program.rec; run it with: cudatma emulate program.rec" in capsys.readouterr().err
    assert main(["emulate", "program.rec", "--html", "program.html"]) == 0
    assert capsys.readouterr().out.count("args[0]: 40 float32 elements, equal to the recording") == 2
    assert main(["emulate", "program.rec", "--launch", "1", "--json"]) == 0
    (launch,) = json.loads(capsys.readouterr().out)["launches"]
    assert (launch["number"], launch["compared"][0]["passed"]) == (1, True)
    assert launch.keys() >= Report("k", 1).as_dict().keys()
    assert main(["emulate", "program.rec", "--launch", "2"]) == 2
