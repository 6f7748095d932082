"""Time marlin_gemm with every weight format, and Humming (package humming-kernels) with its formats.

Weights are random and cold in L2. The kernels of all formats take turns in one run.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # The checkout need not be installed.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import contextlib
import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from benchmarks.harness import Contender, cold, copies_for, launches_for, measuring_stream, require_gpu, require_torch
from benchmarks.operands import filled, random_numbers, random_words, to_torch
from benchmarks.report import Cell, Result, Table, failure, make_parser, ratio, shown
from cudatma.quantization import PackedWeight
from cudatma.quantization.layout_v1 import BLOCK_BYTES, row_blocks
from cudatma.quantization.weight_format import WEIGHT_FORMATS

LAYERS = ((4096, 28672), (14336, 4096))
M_VALUES = (1, 16, 64, 256, 1024, 4096)
#: Each format with its group size, and Humming's configuration or None.
FORMATS: Mapping[tuple[str, int], Mapping[str, Any] | None] = {
    ("int4", 128): {"dtype": "int4", "group_size": 128},
    ("mxfp4", 32): {"dtype": "float4e2m1", "group_size": 32, "scale_dtype": "float8e8m0"},
    ("nvfp4", 16): {"dtype": "float4e2m1", "group_size": 16, "scale_dtype": "float8e4m3", "scale_2_type": "tensor"},
    ("fp8", 128): {"dtype": "float8e4m3", "group_size": 128},
    ("fp8", -1): {"dtype": "float8e4m3"},
    ("int8", 128): None,
    ("int8", -1): {"dtype": "int8"},
}
_DTYPE = "bfloat16"


def packed(k: int, n: int, name: str, group_size: int) -> list[PackedWeight]:
    """Return copies of a random weight that together exceed L2."""
    import cupy

    kind, groups = WEIGHT_FORMATS[name], 1 if group_size == -1 else k // group_size
    codes = random_words(cupy, 1 << 22, 1).view(cupy.uint8)
    if name == "fp8":
        codes[codes & 127 == 127] = 0
    # Scales of MXFP4 are powers of two.
    mask = cupy.uint16(0x7F80 if name == "mxfp4" else 0x7FFF)
    numbers = random_numbers(cupy, 1 << 16, _DTYPE, 2, 1 / 64)
    scales = (numbers.view(cupy.uint16) & mask).view(numbers.dtype)
    weights: list[PackedWeight] = []
    while not weights or len(weights) < copies_for(weights[0].nbytes):
        weights.append(
            PackedWeight(
                filled(cupy, (n // 64 * row_blocks(k, kind.bits), BLOCK_BYTES), codes),
                filled(cupy, (groups, n), scales),
                None,
                None,
                (k, n),
                group_size,
                _DTYPE,
                format=name,
            )
        )
    return weights


def humming(k: int, n: int, config: Mapping[str, Any], copies: int, m_values: Sequence[int]) -> list[Any]:
    """Return copies of a Humming layer, with its kernels compiled."""
    import cupy
    import torch
    from humming.kernel.humming import HummingKernel
    from humming.layer import HummingLayer

    dense = to_torch(filled(cupy, (n, k), random_numbers(cupy, 1 << 22, _DTYPE, 3, 0.02)))
    layer = HummingLayer(shape_n=n, shape_k=k, weight_config=dict(config), torch_dtype=torch.bfloat16).cuda()
    schema = layer.weight_schema
    tensors = type(schema).quant_tensor(dense.float(), schema, torch.bfloat16, allow_negative_scale=False)
    layer.load_from_tensors(tensors)
    layer.transform()
    tunings = {tuning(layer, m) for m in m_values}
    ranges = [[0, 1 << 30, json.loads(text)] for text in sorted(tunings)]
    with contextlib.suppress(Exception):  # A kernel that is not prepared is compiled at its first use.
        HummingKernel.prepare_kernels(layer.humming_config.to_str(), None, ranges)
    return [layer, *(copy.deepcopy(layer) for _ in range(copies - 1))]


def tuning(layer: Any, m: int) -> str:
    """Return the configuration that Humming's heuristic chooses, as JSON."""
    from humming.tune import get_heuristics_config

    return json.dumps(get_heuristics_config(layer_config=layer.humming_config, shape_m=m), sort_keys=True)


def contenders(
    k: int, n: int, m: int, weights: Mapping[Any, Any], rivals: Mapping[Any, Any], x: Any, out: Any
) -> Iterator[Contender]:
    """Yield our kernel and Humming's for each format."""
    import cudatma

    def ours(own: Sequence[PackedWeight], index: int) -> None:
        cudatma.marlin_gemm(x[:m], own[index % len(own)], out=out[:m])

    def theirs(layers: Sequence[Any], config: str, index: int) -> None:
        layers[index % len(layers)](to_torch(x)[:m], outputs=to_torch(out)[:m], tuning_config=config)

    for key, own in weights.items():
        expected_us = max(own[0].nbytes / 4e6, 2 * m * n * k / 6e8) + 4
        launches = launches_for(own[0].nbytes, len(own), expected_us)
        yield Contender(_name("ours", key), partial(ours, own), len(own), launches)
        if key in rivals:
            layers = rivals[key]
            run = partial(theirs, layers, tuning(layers[0], m))
            yield Contender(_name("humming", key), run, len(layers), launches)


def _name(library: str, key: tuple[str, int]) -> str:
    return f"{library} {key[0]} {key[1]}"


def measure(result: Result, stream: Any, k: int, n: int, m_values: Sequence[int]) -> None:
    """Add a cell for each M and format of a layer."""
    import cupy

    import cudatma

    x = filled(cupy, (max(m_values), k), random_numbers(cupy, (1 << 22) - 8, _DTYPE, 4))
    out = cupy.zeros((max(m_values), n), cupy.uint16).view(x.dtype)
    weights = {key: packed(k, n, *key) for key in FORMATS}
    with ThreadPoolExecutor(16) as pool:  # Compile the kernels in parallel.
        calls = [pool.submit(cudatma.marlin_gemm, x[:m], own[0]) for own in weights.values() for m in m_values]
        for call in calls:
            call.result()
    rivals: dict[Any, Any] = {}
    for key, config in FORMATS.items():
        if config is not None:
            try:
                rivals[key] = humming(k, n, config, len(weights[key]), m_values)
            except Exception as error:
                result.say(f"humming {key[0]} {key[1]} cannot run: {failure(error)}")
    for m in m_values:
        measured = cold(stream, list(contenders(k, n, m, weights, rivals, x, out)))
        for key, own in weights.items():
            name, rival = _name("ours", key), _name("humming", key)
            us, rival_us = measured.us(name), measured.us(rival)
            cell: Cell = {"k": k, "n": n, "m": m, "format": key[0], "group_size": key[1], "us": us, "humming": rival_us}
            cell |= {"bytes": own[0].nbytes, "error": measured.errors.get(name)}
            result.add(cell, f"{k} x {n}, M = {m}, {key[0]} {key[1]}: {shown(us)} us, Humming {shown(rival_us)}")


def table(cells: Sequence[Cell]) -> Table:
    """Return a row for each layer and format."""
    m_values = list(dict.fromkeys(cell["m"] for cell in cells))
    rows: dict[tuple[Any, ...], dict[int, str]] = {}
    for cell in cells:
        faster = ratio(cell["humming"], cell["us"])
        text = f"{shown(cell['us'], 1)} ({shown(faster)})" if faster else shown(cell["us"], 1)
        rows.setdefault((f"{cell['k']} x {cell['n']}", cell["format"], cell["group_size"]), {})[cell["m"]] = text
    columns = ("K x N", "format", "group size", *(f"M = {m}" for m in m_values))
    note = "Times are microseconds. The number in parentheses is the time of Humming divided by ours."
    return Table(columns, tuple((*key, *(row.get(m, "-") for m in m_values)) for key, row in rows.items()), note)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``cudatma bench formats``."""
    parser = make_parser("formats", __doc__)
    parser.add_argument("--m", type=int, nargs="+", default=list(M_VALUES), help="values of M, the number of rows of x")
    options = parser.parse_args(argv)
    require_gpu(parser)
    require_torch(parser)
    result = Result({"dtype": _DTYPE, "m": options.m}, table, options.json)
    with measuring_stream() as stream:
        for k, n in LAYERS:
            measure(result, stream, k, n, options.m)
    return result.finish("Weight formats")


if __name__ == "__main__":
    sys.exit(main())
