"""The dense GEMM's benchmark without a GPU: products, turns, tables, summary, arguments, operands and errors."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_gpu import FakeGpu
from gemm_builders import problem

from benchmarks import contest, gemm, gemm_fp8, tiles
from benchmarks.contest import Entrant
from benchmarks.gemm import Operands, Product, errors, squares
from benchmarks.harness import Contender, Measured, Timing
from cudatma.kernels.gemm.choose import GEMM
from cudatma.kernels.gpu import H200


def cell(size: int = 1024, layout: str = "RC", **more: Any) -> dict[str, Any]:
    """Return the cell of a square that takes torch.mm 10 us, cuBLASLt 8 us and our kernel 5 us."""
    us = {"torch.mm": 10.0, "cuBLASLt": 8.0, "v1": 20.0, "auto": 5.0}
    off = {"torch.mm": 2e-4, "cuBLASLt": 2e-4, "auto": 2.2e-4}
    made = {"m": size, "n": size, "k": size, "layout": layout, "dtype": "float16", "us": us}
    return {**made, "rms_error": off, "largest_error": {name: 5 * each for name, each in off.items()}, **more}


# ---- Turns ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    fake = FakeGpu()
    monkeypatch.setitem(sys.modules, "cupy", fake.module)
    return fake


def entrant(gpu: FakeGpu, rival: str, us: float | None, detail: str = "") -> Entrant:
    def run(index: int) -> None:
        if us is None:
            raise RuntimeError("refused")
        gpu.launch(us)

    return Entrant(rival, Contender(f"{rival} {detail}".strip(), run, 1, 10), f"result {detail}", detail)


def take_turns(gpu: FakeGpu, entrants: list[Entrant], refused: dict[str, str], seconds: float = 0.0) -> dict[str, Any]:
    cell: dict[str, Any] = {}
    product = Product(64, 64, 64, "RC", "float16")
    run = contest.timing_method(gpu, 3, product.rest_s, seconds)
    contest.add_times(run, entrants, cell, refused, ("torch.mm", "auto"))
    return cell


def test_the_faster_entrant_of_a_rival_counts(gpu: FakeGpu) -> None:
    entrants = [entrant(gpu, "torch.mm", 7.0), *(entrant(gpu, "cuBLASLt", us, f"way {us}") for us in (6.0, 4.0))]
    cell = take_turns(gpu, [*entrants, entrant(gpu, "auto", 5.0)], {"DeepGEMM": "TypeError: no fp16"})
    assert cell["us"] == {"torch.mm": 7.0, "cuBLASLt": 4.0, "auto": 5.0}
    assert list(cell["us"]) == ["torch.mm", "cuBLASLt", "auto"]
    assert cell["chosen"] == {"cuBLASLt": "way 4.0"}
    assert cell["refused"] == {"DeepGEMM": "TypeError: no fp16"}
    assert "error" not in cell


def test_only_ours_and_torch_have_to_run(gpu: FakeGpu) -> None:
    entrants = [entrant(gpu, "torch.mm", 7.0), entrant(gpu, "QuACK", None), entrant(gpu, "auto", None)]
    cell = take_turns(gpu, entrants, {})
    assert cell["error"] == "auto: RuntimeError: refused"
    assert cell["refused"] == {"QuACK": "RuntimeError: refused"}
    assert cell["us"] == {"torch.mm": 7.0}


# ---- What is said ---------------------------------------------------------------------------------------------------


def test_a_summary_has_means_and_the_least_by_group() -> None:
    slow = cell(2048, "CC", us={"torch.mm": 10.0, "cuBLASLt": 9.0, "auto": 10.0})
    layer = {**cell(), "m": 16, "layer": "llama3-8b o"}
    unmeasured = cell(4096, us={"torch.mm": 10.0}, error="auto: failed")
    lines = gemm.gemm_summary([cell(256), cell(), slow, unmeasured, layer])
    assert [line.split(":")[0] for line in lines] == [
        *["float16, squares from 512 upward"] * 2,
        *["float16, transformer layers"] * 2,
    ]
    assert lines[1] == (
        "float16, squares from 512 upward: auto / cuBLASLt: geometric mean 1.200, least 0.900 at 2048 x 2048 x 2048 CC"
        ", 2 cells (1 more not measured); errors at most 1.10 times those of cuBLASLt"
    )


# ---- Arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--size", "0"], "1 to 16384"),
        (["--size", "16385"], "1 to 16384"),
        (["--product", "1", "1", "131073"], "1 to 131072"),
        (["--layout", "XX"], "invalid choice"),
        (["--rivals", "nobody"], "invalid choice"),
        (["--rivals"], "expected at least one argument"),
        (["--fp8", "--size", "512"], "--fp8 cannot be combined with --size"),
        (["--fp8", "--transformer"], "--fp8 cannot be combined with --size"),
        (["--fp8", "--version", "v4"], "--fp8 cannot be combined with --size"),
        (["--seconds", "nan"], "must be a number of seconds above 0 and below 1000000, got nan"),
        (["--seconds", "1"], "--seconds must be at least 1.2"),
        (["--version", "v9"], "invalid choice"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        gemm.main(arguments)
    assert ended.value.code == 2
    assert why in capsys.readouterr().err


# ---- With torch alone -----------------------------------------------------------------------------------------------


def test_operands_lie_as_the_layout_says() -> None:
    layout = "CR"
    torch = pytest.importorskip("torch", reason="torch is not installed")
    operands = Operands(Product(48, 32, 2048, layout, "bfloat16"), True)
    assert operands.copies == len(operands.a) == len({a.data_ptr() for a in operands.a}) > 1
    for part, shape, letter in zip(operands.pair(1), ((48, 2048), (2048, 32)), layout, strict=True):
        assert part.shape == shape
        assert part.stride() == ((shape[1], 1) if letter == "R" else (1, shape[0]))
    assert torch.equal(operands.b[0], operands.b[1])
    assert operands.out().isnan().all()


def test_results_are_compared_with_float64() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    operands = Operands(Product(40, 24, 64, "CR", "float16"), False)
    a, b = operands.pair(0)
    right = (a.float() @ b.float()).half()
    wrong, broken = right.clone(), right.clone()
    wrong[39, 23] += 64
    broken[0, 0] = math.nan
    found = errors(a, b, {"right": right, "wrong": wrong, "broken": broken})
    assert 1e-5 < found["right"][0] < 4e-4
    assert found["wrong"][0] > 0.1
    assert found["wrong"][1] > 5
    assert all(math.isnan(each) for each in found["broken"])
    made: dict[str, Any] = {"us": {"right": 1.0, "broken": 1.0}}
    contest.add_errors(made, errors(a, b, {"right": right, "broken": broken}), 1e-3)
    assert list(made["us"]) == list(made["rms_error"]) == ["right"]
    assert made["error"] == "broken: wrong result, relative RMS error nan"
    assert torch.isfinite(right).all()


@pytest.mark.parametrize("scaling", gemm_fp8.SCALINGS)
def test_fp8_operands_stand_for_normal_numbers(scaling: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    operands = gemm_fp8.Fp8Operands(gemm_fp8.Fp8Product(64, 256, 384, "RC", gemm_fp8.FP8, scaling=scaling), False)
    a, b = operands.pair(0)
    assert (a.shape, b.shape, b.stride()) == ((64, 384), (384, 256), (1, 384))
    whole = scaling == gemm_fp8.TENSOR
    assert operands.a_scale.shape == ((1, 1) if whole else (64, 3))
    assert operands.b_scale.shape == ((1, 1) if whole else (3, 2))
    wide = operands.wide
    assert all(0.9 < float(each.std()) < 1.1 for each in wide)
    calls: dict[str, Any] = {}

    def fake(left: Any, right: Any, *, out: Any, **options: Any) -> None:
        calls.update(options)
        out.copy_(wide[0] @ wide[1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gemm_fp8, "gemm", fake)
        mine = gemm_fp8.ours(operands)
        mine.contender.run(0)
    assert errors(*wide, {"auto": mine.out})["auto"][0] < 6e-3
    assert calls["out_dtype"] == "bfloat16"
    assert calls["b_scale"].shape == (() if whole else (3, 2))
    assert calls["b_scale"].dtype == torch.float32


def test_a_product_of_the_users_is_measured_alone_unless_sizes_are_named() -> None:
    given = ["--product", "1024", "100000", "512", "--layout", "RC"]
    product = Product(1024, 100000, 512, "RC", "float16")
    assert gemm._products(gemm._parser().parse_args(given)) == [product]
    found = gemm._products(gemm._parser().parse_args([*given, "--size", "512"]))
    assert found == [*squares([512], ["RC"], "float16"), product]


PROBLEM = problem(m=64, n=512, k=512, version="mma_sync")


def test_products_come_from_the_cells_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"cells": [{**PROBLEM.as_json(), "version": "mma_sync", "us": {"an entry": 1.0}}]}))
    assert tiles.products(path, GEMM) == [PROBLEM]


class Trial:
    """A trial that launches every configuration except one."""

    device = 0

    def prepare(self, problem: Any) -> None:
        self.problem = problem

    def launcher(self, candidate: Any, copies: int, stream: int) -> Any:
        if candidate.config.tile_m == 256:
            raise MemoryError("no room")
        return lambda index: None


def test_every_configuration_is_timed_and_those_that_cannot_be_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(stream: Any, contenders: list[Contender], replays: int) -> Measured:
        us = {each.name: float(10 + number) for number, each in enumerate(reversed(contenders))}
        return Measured({name: Timing(each, each, each, replays) for name, each in us.items()})

    monkeypatch.setattr(tiles, "cold", timed)
    monkeypatch.setattr(tiles, "gpu_of", lambda device: H200)
    monkeypatch.setattr(tiles, "stream_handle", lambda *_: 0)
    cell = tiles.measure(SimpleNamespace(), GEMM, Trial(), PROBLEM, 3)
    assert list(cell["us"].values()) == sorted(cell["us"].values())
    assert set(cell["us"]) == set(cell["predicted_us"])
    assert len(cell["us"]) > 5
    assert set(cell["refused"].values()) == {"MemoryError: no room"}
    assert (cell["m"], cell["version"]) == (64, "mma_sync")
    (row,) = tiles.tiles_table([cell]).rows
    assert row[:3] == ("64 x 512 x 512", next(iter(cell["us"])), "10.00")
    assert float(row[4]) > 1, "the one that the cost model takes was the slowest"


def test_a_file_without_products_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other.json"
    path.write_text("{}")
    with pytest.raises(SystemExit):
        tiles.main(["gemm", str(path)])
    assert "other.json: KeyError: 'cells'" in capsys.readouterr().err
