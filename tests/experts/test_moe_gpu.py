"""marlin_moe on a GPU: results against float64, equal bits, new sizes, and CUDA graphs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from moe_cases import LAYERS, Layer, check
from this_gpu import cupy

import cudatma
from cudatma.kernels import choice
from tools import tune

pytestmark = pytest.mark.gpu

LARGE = {
    "qwen": Layer(64, 2048, 768, 16, 4, 128, "bfloat16"),
    "many_rows": Layer(600, 512, 256, 4, 2, 128),
    "many_experts": Layer(33, 256, 64, 300, 8, 64),
    "128_rows": Layer(1030, 1024, 512, 8, 2, 128, "bfloat16", symmetric=False),
}


def upload(values: Any) -> Any:
    if isinstance(values, cudatma.PackedExperts):
        return values.to_device()
    if values is None or isinstance(values, str):
        return values
    if values.dtype.kind in "if":
        return cupy.asarray(values)
    return cupy.asarray(values.view(np.uint16)).view(values.dtype)


def download(array: Any) -> Any:
    return cupy.asnumpy(array.view(np.uint16)).view(array.dtype)


@pytest.mark.parametrize("name", [*LAYERS, *LARGE])
def test_the_result(name: str) -> None:
    operands = (LAYERS | LARGE)[name].operands()
    device = {field: upload(value) for field, value in operands.items()}
    first = download(cudatma.marlin_moe(**device))
    check(first, operands)
    np.testing.assert_array_equal(download(cudatma.marlin_moe(**device)).view(np.uint16), first.view(np.uint16))


def test_500_calls_give_equal_bits() -> None:
    device = {field: upload(value) for field, value in LARGE["qwen"].operands().items()}
    first = download(cudatma.marlin_moe(**device)).view(np.uint16)
    out = cupy.empty_like(device["x"])
    for _ in range(500):
        cudatma.marlin_moe(**device, out=out)
        np.testing.assert_array_equal(download(out).view(np.uint16), first)


def test_new_numbers_of_tokens() -> None:
    operands = LARGE["many_rows"].operands()
    device = {field: upload(value) for field, value in operands.items()}
    for m in (600, 1, 7, 8, 100, 599):
        part = {name: operands[name][:m] for name in ("x", "topk_weights", "topk_ids")}
        on_device = {name: device[name][:m] for name in part}
        check(download(cudatma.marlin_moe(**device | on_device)), operands | part)


def test_ids_that_are_too_large_are_skipped() -> None:
    operands = LAYERS["top_1"].operands()
    device = {field: upload(value) for field, value in operands.items()}
    device["topk_ids"][3] = 1 << 30
    operands["topk_ids"][3] = -1
    check(download(cudatma.marlin_moe(**device)), operands)


def test_a_graph_reads_the_ids_at_replay() -> None:
    layer = LARGE["qwen"]
    operands, others = layer.operands(0), layer.operands(1)
    device = {field: upload(value) for field, value in operands.items()}
    out = cupy.empty_like(device["x"])
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        cudatma.marlin_moe(**device, out=out)
        stream.begin_capture()
        cudatma.marlin_moe(**device, out=out)
        graph = stream.end_capture()
        changed = {name: others[name] for name in ("x", "topk_weights", "topk_ids")}
        for name, value in changed.items():
            device[name][...] = upload(value)
        graph.launch(stream)
        stream.synchronize()
    check(download(out), operands | changed)


@pytest.mark.parametrize("name", ["many_rows", "128_rows", "gpt_oss_many_rows"])
def test_other_tokens_do_not_change_the_bits_of_a_batch_invariant_result(name: str) -> None:
    operands = (LAYERS | LARGE)[name].operands()
    device = {field: upload(value) for field, value in operands.items()}
    whole = download(cudatma.marlin_moe(**device, batch_invariant=True))
    check(whole, operands)
    for tokens in (slice(0, 1), slice(1, 8), slice(2, 31), slice(0, 60)):
        part = {field: upload(operands[field][tokens]) for field in ("x", "topk_weights", "topk_ids")}
        alone = download(cudatma.marlin_moe(**device | part, batch_invariant=True))
        np.testing.assert_array_equal(alone.view(np.uint16), whole[tokens].view(np.uint16))


def test_a_programmatic_launch_and_a_workspace() -> None:
    operands = LARGE["many_rows"].operands()
    device = {field: upload(value) for field, value in operands.items()}
    expected = download(cudatma.marlin_moe(**device)).view(np.uint16)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    spaces = [cudatma.Workspace(), None]
    outs = [cupy.full_like(device["x"], np.nan) for _ in range(2)]
    cupy.cuda.Device().synchronize()
    for _ in range(20):
        for stream, space, out in zip(streams, spaces, outs, strict=True):
            with stream:
                cudatma.marlin_moe(**device, out=out, workspace=space, programmatic=True)
    for stream, out in zip(streams, outs, strict=True):
        stream.synchronize()
        np.testing.assert_array_equal(download(out).view(np.uint16), expected)


def test_calls_use_the_fastest_candidate_of_the_tuner(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDATMA_TUNE_FILE", str(tmp_path / "tuned.json"))
    choice.forget()
    arguments = "experts --shape 512x256 --experts 6 --top-k 2 --m 5,300 --candidates 5 --seconds 0.3 --json"
    assert tune.main(arguments.split()) == 0
    cells = json.loads(capsys.readouterr().out)["cells"]
    assert not [why for cell in cells for why in cell["dropped"].values()]
    assert all(len(cell["times_us"]) == 5 for cell in cells)
    choice.forget()
    for cell in cells:
        operands = Layer(cell["m"], 512, 256, 6, 2, 128).operands()
        device = {field: upload(value) for field, value in operands.items()}
        explanation = cudatma.moe_explain(**device)
        assert (explanation.decision.source, explanation.config.entry) == ("tuned", cell["winner"])
        check(download(cudatma.marlin_moe(**device)), operands)
    choice.forget()


def test_a_debug_build() -> None:
    for name in ("mapped", "gpt_oss_many_rows"):
        operands = LAYERS[name].operands()
        check(
            download(cudatma.marlin_moe(**{field: upload(value) for field, value in operands.items()}, debug=True)),
            operands,
        )
