"""marlin_moe on a GPU: results against float64, equal bits, new sizes, and CUDA graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from moe_cases import LAYERS, Layer, check
from this_gpu import cupy

import cudatma

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
    if values is None or values.dtype.kind in "if":
        return values if values is None else cupy.asarray(values)
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
