"""The dense GEMM on a GPU: against float64, called again with other arrays, for torch, and in a CUDA graph."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gemm_builders import problem

from cudatma.errors import DriverError, LaunchError, TargetError
from cudatma.kernels import choice_table
from cudatma.kernels.choosing import decide, pinned
from cudatma.kernels.gemm.choose import GEMM, times
from cudatma.kernels.gemm.config import PRESETS
from cudatma.kernels.gemm.gemm import gemm
from cudatma.kernels.gemm.problem import LAYOUTS
from cudatma.kernels.gpu import gpu_of
from cudatma.kernels.tuning_file import usable_entries
from cudatma.runtime.launch import Kernel
from cudatma.target import detect
from tools import tune

pytestmark = pytest.mark.gpu

try:
    TARGET = detect()
except (DriverError, TargetError, ImportError) as reason:
    pytest.skip(f"no usable GPU: {reason}", allow_module_level=True)

cupy = pytest.importorskip("cupy")

DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
#: ||y - reference|| / ||reference|| that one rounding after fp32 accumulation keeps.
LIMITS = {"float16": 1e-3, "bfloat16": 6e-3}
#: What the GPU runs.
USABLE = [version for version in PRESETS if version == "mma_sync" or TARGET.has_wgmma]


def numbers(rows: int, columns: int, dtype: str, seed: int) -> Any:
    return np.random.default_rng(seed).standard_normal((rows, columns), np.float32).astype(DTYPES[dtype])


def upload(values: Any, pitch: int = 0) -> Any:
    """Rows of this pitch, in elements, between NaNs."""
    rows, columns = values.shape
    whole = np.full((rows, pitch or -(-columns // 8) * 8), np.nan, values.dtype)
    whole[:, :columns] = values
    return cupy.asarray(whole.view(np.uint16)).view(values.dtype)[:, :columns]


def download(array: Any) -> Any:
    return cupy.asnumpy(cupy.ascontiguousarray(array).view(np.uint16)).view(array.dtype)


def check(y: Any, a: Any, b: Any) -> None:
    wanted = a.astype(np.float64) @ b.astype(np.float64).T
    found = y.astype(np.float64)
    assert found.shape == wanted.shape
    assert np.linalg.norm(found - wanted) <= LIMITS[a.dtype.name] * np.linalg.norm(wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 1, 1), (7, 130, 72), (64, 4096, 4096), (300, 1111, 513), (2048, 3000, 1024)]
)
def test_products_are_right(m: int, n: int, k: int, dtype: str) -> None:
    a, b = numbers(m, k, dtype, 0), numbers(n, k, dtype, 1)
    check(download(gemm(upload(a), upload(b).T)), a, b)


def stored(rows: int, columns: int, letter: str, dtype: str, seed: int) -> tuple[Any, Any]:
    """On the host, and on the GPU row-major or column-major."""
    if letter == "C":
        host, device = stored(columns, rows, "R", dtype, seed)
        return host.T, device.T
    host = numbers(rows, columns, dtype, seed)
    return host, upload(host)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("version", ["auto", *USABLE])
@pytest.mark.parametrize("size", [1, 127, 128, 256, 333, 512, 1000, 1024])
def test_every_version_and_layout_is_right(size: int, version: Any, layout: str) -> None:
    if version == "v6" and size < 128:
        pytest.skip("version v6 divides K, which has to have two stages")
    dtype = "bfloat16" if size == 333 else "float16"
    (a, left), (b, right) = stored(size, size, layout[0], dtype, 0), stored(size, size, layout[1], dtype, 1)
    check(download(gemm(left, right, version=version)), a, b.T)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_large_odd_size(layout: str) -> None:
    (a, left), (b, right) = stored(4097, 4097, layout[0], "float16", 0), stored(4097, 4097, layout[1], "float16", 1)
    exact = cupy.asarray(a.astype(np.float64)) @ cupy.asarray(b.astype(np.float64))
    for version in USABLE:
        found = gemm(left, right, version=version).astype(np.float64)
        assert float(cupy.linalg.norm(found - exact) / cupy.linalg.norm(exact)) <= LIMITS["float16"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("version", USABLE)
def test_every_tile_is_right(version: str, layout: str) -> None:
    dtype = "float16"
    (a, left), (b, right) = stored(700, 1000, layout[0], dtype, 0), stored(1000, 904, layout[1], dtype, 1)
    for spec, _ in times(
        problem(m=700, n=904, k=1000, dtype=dtype, layout=layout, version=version), np.array([700]), gpu_of(0)
    ):
        with pinned(spec):
            check(download(gemm(left, right)), a, b.T)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("m", [1, 16, 20, 57])
def test_few_rows_with_every_tile(m: int, layout: str) -> None:
    """Boxes of A hold no more rows than A has."""
    (a, left), (b, right) = stored(m, 1000, layout[0], "float16", 0), stored(1000, 904, layout[1], "float16", 1)
    for version in USABLE:
        for spec, _ in times(problem(m=m, n=904, k=1000, layout=layout, version=version), np.array([m]), gpu_of(0)):
            with pinned(spec):
                check(download(gemm(left, right)), a, b.T)


@pytest.mark.parametrize(("pitch", "offset"), [(272, 8), (272, 1), (261, 0)])
@pytest.mark.parametrize("version", ["auto", "mma_sync"])
def test_what_surrounds_the_result_is_left_alone(version: str, pitch: int, offset: int) -> None:
    a, b = numbers(200, 128, "float16", 0), numbers(250, 128, "float16", 1)
    whole = cupy.full((200, pitch), 7, np.float16)
    out = whole[:, offset : offset + 250]
    assert gemm(upload(a), upload(b).T, out=out, version=version) is out
    check(download(out), a, b)
    assert bool((whole[:, :offset] == 7).all())
    assert bool((whole[:, offset + 250 :] == 7).all())


def test_a_repeated_call_reads_and_writes_the_other_arrays() -> None:
    """The result is off 16 bytes every second time."""
    for seed in range(6):
        a, b = numbers(130, 256, "float16", seed), numbers(200, 256, "float16", seed + 10)
        whole = cupy.full((130, 208), 7, np.float16)
        out = whole[:, seed % 2 : seed % 2 + 200]
        gemm(upload(a), upload(b).T, out=out)
        check(download(out), a, b)


def test_on_a_stream_of_the_caller() -> None:
    a, b = numbers(64, 128, "float16", 0), numbers(64, 128, "float16", 1)
    stream = cupy.cuda.Stream(non_blocking=True)
    left, right = upload(a), upload(b).T
    cupy.cuda.Device().synchronize()
    out = gemm(left, right, stream=stream)
    stream.synchronize()
    check(download(out), a, b)


def test_in_a_graph() -> None:
    """After a first call nothing but the launch is recorded."""
    a, b = numbers(100, 512, "float16", 0), numbers(300, 512, "float16", 1)
    left, right = upload(a), upload(b).T
    out = cupy.empty((100, 300), np.float16)
    gemm(left, right, out=out)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        gemm(left, right, out=out)
        graph = stream.end_capture()
        out.fill(0)
        left *= 2
        graph.launch(stream)
    stream.synchronize()
    check(download(out), 2 * a, b)


def test_a_first_call_in_a_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kernel, "is_loaded", lambda self, device: False)  # other tests may have loaded it
    left, right = upload(numbers(33, 64, "float16", 0)), upload(numbers(8, 64, "float16", 1)).T
    out = cupy.empty((33, 8), np.float16)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        with pytest.raises(LaunchError, match="under graph capture"):
            gemm(left, right, out=out)
        stream.end_capture()


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_tensors(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    a, b = numbers(70, 264, dtype, 0), numbers(90, 264, dtype, 1)
    left, right = (torch.from_numpy(x.view(np.int16)).cuda().view(getattr(torch, dtype)) for x in (a, b))
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        y = gemm(left, right.T)
        torch.cuda.current_stream().synchronize()
    assert y.dtype == left.dtype
    assert y.device == left.device
    check(y.view(torch.int16).cpu().numpy().view(DTYPES[dtype]), a, b)


def test_the_tuner_measures_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDATMA_TUNE_FILE", str(tmp_path / "tuned.json"))
    shape = ["gemm", "--shape", "1028x1544", "--m", "5,300", "--seconds", "0.3", "--dtype", "bfloat16", "--json"]
    assert tune.main(shape) == 0
    told = json.loads(capsys.readouterr().out)["cells"]
    assert [cell["m"] for cell in told] == [5, 300]
    assert all(cell["times_us"] and not cell["dropped"] for cell in told)
    choice_table.forget()
    entries, problems = usable_entries(tmp_path / "tuned.json", GEMM, gpu_of(0))
    assert not problems
    for entry in entries:
        assert decide(GEMM, entry.problem, gpu_of(0)).source == "tuned"
        a, b = (numbers(rows, 1028, "bfloat16", rows) for rows in (entry.problem.m, 1544))
        check(download(gemm(upload(a), upload(b).T)), a, b)
    choice_table.forget()
