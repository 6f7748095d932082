"""Compare mixture-of-experts layers with other libraries. The int4 weights are cold in L2.

Each launch computes a whole layer: routing, both products with the activation, and the weighted sum. Each token's
experts are selected at random. Launches rotate over copies of the layer and over several selections of experts. Humming
runs as in vLLM if the packages humming-kernels and vllm are installed.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # The checkout need not be installed.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from benchmarks.contest import (
    AUTO,
    BEST,
    Entrant,
    Rival,
    add_errors,
    add_times,
    field_of,
    find_entrants,
    measure_calls,
    present,
    summary_line,
    times_as_fast,
    timing_method,
    with_best,
)
from benchmarks.harness import (
    MAX_LAUNCHES,
    MIN_COPIES,
    REPLAYS,
    ROTATION_BYTES,
    Contender,
    measuring_stream,
    require_gpu,
    require_torch,
)
from benchmarks.operands import GROUP_SIZE, random_packed
from benchmarks.report import Cell, Result, Table, make_parser, shown
from cudatma.kernels.experts.moe import activated, marlin_moe
from cudatma.quantization import PackedExperts, PackedWeight
from cudatma.quantization.layout_v1 import BLOCK, blocks

HUMMING = "Humming"
#: Idle time of the GPU before a turn, in seconds.
REST_S = 0.01
#: Number of launches per graph if each launch reads all experts. A graph has more launches if they read fewer experts.
_LAUNCHES = 8
#: Number of different selections of experts, and number of tokens that are compared with float64.
_CHOICES, _TOKENS = 8, 4
#: Allowed error relative to the result's root mean square.
_ALLOWED = 1.2e-2


@dataclass(frozen=True, slots=True)
class Model:
    """Sizes of a layer: number of experts, K, I (the number of gate columns), and number of experts per token."""

    experts: int
    k: int
    intermediate: int
    top_k: int

    @property
    def expert_bytes(self) -> int:
        """Size of an expert's weights in bytes."""
        weights = 3 * self.k * self.intermediate
        return weights // 2 + weights // GROUP_SIZE * 2


MODELS = {
    "qwen3-30b": Model(128, 2048, 768, 8),
    "mixtral": Model(8, 4096, 14336, 2),
    "deepseek-v3-tp8": Model(256, 7168, 256, 8),
    "gpt-oss-20b": Model(32, 2880, 2880, 4),
}
M_VALUES = (1, 4, 16, 64, 256, 1024, 4096)


@dataclass(frozen=True, slots=True)
class Call:
    """A layer of a model for M tokens."""

    name: str
    m: int

    def __str__(self) -> str:
        return f"{self.name}, M = {self.m}"

    @property
    def model(self) -> Model:
        return MODELS[self.name]

    @property
    def bytes(self) -> int:
        """Expected size of the selected experts' weights in bytes."""
        model = self.model
        return round(model.expert_bytes * model.experts * (1 - (1 - model.top_k / model.experts) ** self.m))


class Operands:
    """Activations, selections of experts, and copies of the weights."""

    def __init__(self, call: Call) -> None:
        import torch

        self.call, model = call, call.model
        self.copies = max(MIN_COPIES, ROTATION_BYTES // (model.experts * model.expert_bytes) + 1)
        launches = max(_LAUNCHES, min(MAX_LAUNCHES, _LAUNCHES * model.experts * model.expert_bytes // call.bytes))
        self.launches = -(-launches // self.copies) * self.copies
        generator = torch.Generator("cuda").manual_seed(call.m)
        random = partial(torch.rand, device="cuda", generator=generator)
        self.x = torch.randn((call.m, model.k), device="cuda", generator=generator).to(torch.bfloat16)
        self.weights = random((call.m, model.top_k))
        self.ids = [
            random((call.m, model.experts)).topk(model.top_k, 1).indices.to(torch.int32) for _ in range(_CHOICES)
        ]

    def entrant(self, name: str, run: Any, out: Any) -> Entrant:
        return Entrant(name, Contender(name, run, self.copies, self.launches), out)


@cache
def _layers(model: Model, copies: int) -> list[tuple[PackedExperts, PackedExperts]]:
    """Return copies of a layer on the GPU. Only the copies for the latest arguments stay in memory."""
    import cupy

    _layers.cache_clear()

    def packed(k: int, n: int, gated: bool) -> list[PackedExperts]:
        columns = model.experts * blocks(n) * BLOCK
        return [PackedExperts(w, model.experts, n, gated) for w in random_packed(cupy, k, columns, "bfloat16", copies)]

    first, second = packed(model.k, 2 * model.intermediate, True), packed(model.intermediate, model.k, False)
    return list(zip(first, second, strict=True))


def _ours(stream: Any, operands: Operands) -> list[Entrant]:
    import torch

    layers, out = _layers(operands.call.model, operands.copies), torch.full_like(operands.x, math.nan)

    def run(index: int) -> None:
        w1, w2 = layers[index % len(layers)]
        marlin_moe(operands.x, w1, w2, operands.weights, operands.ids[index % _CHOICES], out=out)

    run(0)
    return [operands.entrant(AUTO, run, out)]


@cache
def _humming_layers(model: Model, copies: int) -> Any:
    from benchmarks.rivals.humming_experts import HummingExperts

    _humming_layers.cache_clear()
    return HummingExperts(model.experts, model.k, model.intermediate, copies)


def _humming(stream: Any, operands: Operands) -> list[Entrant]:
    import torch

    layers = _humming_layers(operands.call.model, operands.copies)
    x = torch.nn.functional.pad(operands.x, (0, layers.k - operands.x.shape[1]))
    callers = [layers.caller(x, operands.weights, ids, torch.empty_like(x)) for ids in operands.ids]

    def run(index: int) -> None:
        callers[index % _CHOICES](index)

    run(0)
    return [operands.entrant(HUMMING, run, None)]


#: Values of --rivals, each with its name in the table, its package and its function.
OPTIONAL: dict[str, tuple[str, str, Rival]] = {"humming": (HUMMING, "humming", _humming)}


def _expert(weights: PackedExperts, index: int) -> Any:
    """Return the values (K, N) of an expert in float64, with the columns in stored order."""
    import numpy as np
    import torch

    w, rows = weights.weight, blocks(weights.columns) * blocks(weights.shape[1])
    begin = index * weights.padded_columns
    # Copy the bits as integers, because copying bf16 would require a compiler.
    scales = w.scales.view(np.uint16)[:, begin : begin + weights.padded_columns].copy().view(w.scales.dtype)
    part = PackedWeight(
        w.qweight[index * rows : (index + 1) * rows],
        scales,
        None,
        None,
        (weights.shape[1], weights.padded_columns),
        w.group_size,
        w.dtype,
    )
    return torch.from_numpy(part.to_host().dequantize()[:, : weights.columns]).cuda()


def errors(operands: Operands, out: Any) -> dict[str, tuple[float, float]]:
    """Return the RMS and maximum error of a few tokens, relative to the RMS of the result in float64."""
    import numpy as np
    import torch

    w1, w2 = _layers(operands.call.model, operands.copies)[0]
    tokens = sorted({round(i * (operands.call.m - 1) / (_TOKENS - 1)) for i in range(_TOKENS)})
    exact = torch.zeros((len(tokens), out.shape[1]), dtype=torch.float64, device="cuda")
    for row, token in enumerate(tokens):
        for factor, expert in zip(operands.weights[token].tolist(), operands.ids[0][token].tolist(), strict=True):
            both = (operands.x[token].double() @ _expert(w1, expert)).reshape(-1, 2, 8)
            hidden = activated("silu_glu", *np.moveaxis(both.cpu().numpy(), 1, 0))
            exact[row] += factor * (torch.from_numpy(hidden.reshape(-1)).cuda() @ _expert(w2, expert))
    differences, rms = out[tokens].double() - exact, math.sqrt(float(exact.square().mean()))
    if bool(out.isnan().any()):
        return {AUTO: (math.nan, math.nan)}
    return {AUTO: (math.sqrt(float(differences.square().mean())) / rms, float(differences.abs().max()) / rms)}


def measure(stream: Any, call: Call, field: Mapping[str, Rival], replays: int) -> Cell:
    """Measure one call with all contenders."""
    operands = Operands(call)
    ours, unable = find_entrants(stream, operands, {AUTO: _ours})
    relative = errors(operands, ours[0].out) if ours else {}
    rivals, refused = find_entrants(stream, operands, field)
    cell = _facts(call)
    add_times(timing_method(stream, replays, REST_S), [*rivals, *ours], cell, refused | unable, (AUTO,))
    add_errors(cell, {name: error for name, error in relative.items() if name in cell["us"]}, _ALLOWED)
    return cell


def _facts(call: Call) -> Cell:
    model = call.model
    pairs = call.m * model.top_k
    return {
        "model": call.name,
        "m": call.m,
        "bytes": call.bytes,
        "flops": 6 * pairs * model.k * model.intermediate,
    }


def _line(cell: Cell, begin: str) -> str:
    parts = [
        f"{name} {us:.1f} us ({1e-6 * cell['bytes'] / us:.2f} TB/s, {1e-6 * cell['flops'] / us:.0f} TFLOP/s)"
        for name, us in cell["us"].items()
    ]
    return f"{begin}: {', '.join(parts)}"


def experts_table(cells: Sequence[Cell]) -> Table:
    """Return the microseconds of each contender and the speedup over the fastest competing library."""
    names = present(cells, (*(name for name, _, _ in OPTIONAL.values()), AUTO))
    rows = []
    for cell in cells:
        us = cell.get("us", {})
        over = shown(times_as_fast(with_best(cell, [HUMMING]), BEST, AUTO), 3)
        rows.append((cell["model"], cell["m"], *(shown(us.get(name), 1) for name in names), over))
    return Table(("model", "M", *names, f"{AUTO} / {BEST}"), tuple(rows), "us")


def experts_summary(cells: Sequence[Cell]) -> list[str]:
    """Compare marlin_moe with each library at small M and at large M."""
    groups = {"M <= 256": [c for c in cells if c["m"] <= 256], "M > 256": [c for c in cells if c["m"] > 256]}
    return [
        line
        for group, members in groups.items()
        for line in summary_line(group, members, HUMMING, lambda cell: f"{cell['model']}, M = {cell['m']}")
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``cudatma bench experts`` and return the exit status.

    The status is 1 if our kernel failed or a result was wrong.
    """
    parser = make_parser("experts", __doc__)
    add = parser.add_argument
    add(
        "--model",
        choices=tuple(MODELS),
        action="append",
        help="model whose layer is measured, repeatable (default: all)",
    )
    values = ", ".join(map(str, M_VALUES))
    add("-m", type=int, action="append", metavar="N", help=f"number of tokens, repeatable (default: {values})")
    add("--replays", type=int, default=REPLAYS, metavar="N", help="number of measurements (default: %(default)s)")
    add(
        "--rivals",
        nargs="*",
        choices=tuple(OPTIONAL),
        default=tuple(OPTIONAL),
        help="libraries to compare (default: all)",
    )
    options = parser.parse_args(argv)
    require_gpu(parser)
    require_torch(parser)
    field, versions = field_of({}, OPTIONAL, options.rivals)
    result = Result({"replays": options.replays, "rivals": versions}, experts_table, options.json, experts_summary)
    calls = [Call(name, m) for name in options.model or MODELS for m in options.m or M_VALUES]
    with measuring_stream() as stream:
        measure_calls(result, calls, lambda call: measure(stream, call, field, options.replays), _facts, _line)
    return result.finish("Mixture-of-experts layers")


if __name__ == "__main__":
    raise SystemExit(main())
