"""The benchmarks of the GEMMs on a GPU, in short runs that measure every part of a cell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import attention, attention_decode, data_movement, experts, gemm, gemm_fp8, host_cost, marlin
from benchmarks.gemm import LADDER
from benchmarks.harness import measuring_stream
from benchmarks.layer import make_layer
from benchmarks.rivals.common import check

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("torch", reason="the rivals are reached through torch")
    path = tmp_path_factory.mktemp("bench") / "marlin.json"
    short = ["--shapes", "4096x4096", "--m", "1,16,256", "--seconds", "0.4", "--replays", "3"]
    arguments = [*short, "--dtype", "bfloat16", "--rivals", "cublas,tinygemm", "--json", str(path)]
    assert marlin.main([*arguments, "--plot", str(path.with_suffix(".svg"))]) == 0
    assert path.with_suffix(".svg").is_file()
    return json.loads(path.read_text())


def test_every_part_of_a_cell_is_measured(stored: dict[str, Any]) -> None:
    cells = {cell["m"]: cell for cell in stored["cells"]}
    assert set(cells) == {1, 16, 256}
    for m, cell in cells.items():
        assert "error" not in cell
        assert "errors" not in cell, cell.get("errors")
        assert cell["us"] > 0
        assert cell["x_cublas"] > 0
        assert ("tinygemm" in cell["rivals"]) == (m <= 128)
    for m in (1, 16):
        assert {"x_floor", "x_floor_programmatic", "programmatic_us"} <= set(cells[m])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_algorithm_of_cublaslt_computes_the_product(dtype: str) -> None:
    torch = pytest.importorskip("torch", reason="cuBLASLt comes with torch")
    torch.cuda.init()
    from benchmarks.rivals.cublas import ORIENTATIONS, Cublas

    with measuring_stream():
        layer = make_layer(1024, 512, dtype, 48)
        rival = Cublas(layer, (48,))
        assert rival.lt is not None, rival.errors
        for orientation in ORIENTATIONS:
            ways = rival._lt(rival.lt, 48, orientation)
            assert ways, orientation
            for way in ways:
                rival.out.zero_()
                way.run(1)
                check(rival.out, rival.x, rival.weights[orientation][1])


@pytest.mark.parametrize("options", [["--layout", "RC", "--layout", "CR"], ["--cold", "--layout", "CC"]])
def test_the_dense_gemm_and_cublas_take_turns(options: list[str], tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch.mm is what the dense GEMM is measured against")
    path = tmp_path / "gemm.json"
    short = ["--size", "512", "--replays", "3", "--json", str(path)]
    assert gemm.main([*short, *options]) == 0
    stored = json.loads(path.read_text())
    for cell in stored["cells"]:
        assert {"torch.mm", "cuBLASLt", "auto", "v1", "v5"} <= set(cell["us"]), cell
        assert cell["rms_error"]["auto"] < 1.2 * cell["rms_error"]["cuBLASLt"]
        assert cell["chosen"]["cuBLASLt"].startswith("algorithm ")
        assert set(cell["entries"]) == {"auto", *LADDER}


def test_scaled_fp8_products_are_what_torch_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="scaled_mm is torch's")
    monkeypatch.setattr(gemm_fp8, "SHAPES", ((256, 512, 1024),))
    path = tmp_path / "fp8.json"
    gemm.main(["--fp8", "--replays", "3", "--json", str(path)])
    tensor, blocks = json.loads(path.read_text())["cells"]
    assert {"scaled_mm", "scaled_mm fast"} <= set(tensor["us"])
    assert "scaled_mm blocks" in {*blocks["us"], *blocks.get("refused", {})}


@pytest.mark.parametrize(
    ("script", "arguments", "contenders"),
    [
        (attention, ["--head-dim", "64", "--length", "512", "--causal"], {"cuDNN", "FA2", "a2", "auto"}),
        (attention_decode, ["--batch", "2", "--length", "1024"], {"contiguous", "pages of 16", "in e4m3"}),
        (data_movement, ["--case", "copy, contiguous"], {"cudatma", "cupy"}),
        (experts, ["--model", "qwen3-30b", "-m", "4"], {"auto"}),
    ],
)
def test_other_benchmarks_time_all_contenders(
    script: Any, arguments: list[str], contenders: set[str], tmp_path: Path
) -> None:
    pytest.importorskip("torch", reason="the rivals are reached through torch")
    path = tmp_path / "it.json"
    assert script.main([*arguments, "--replays", "3", "--json", str(path)]) == 0
    (cell,) = json.loads(path.read_text())["cells"]
    assert contenders <= set(cell["us"])


def test_host_times_of_calls_and_operators(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="operators are torch's")
    path = tmp_path / "host.json"
    assert host_cost.main(["--calls", "50", "--json", str(path)]) == 0
    cells = {cell["case"]: cell["median_us"] for cell in json.loads(path.read_text())["cells"]}
    assert {"CuPy", "torch.mm, fp16, out given", "gemm, out given, operator"} <= set(cells)
    assert all(us > 0 for us in cells.values())
