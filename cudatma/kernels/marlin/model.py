"""How long a GEMM takes, from first principles: what must be moved, multiplied and issued, over what a card can do.

It is no simulation. Five streams run side by side on the busiest multiprocessor: bytes out of memory, out of L2, in and
out of shared memory, tensor-core operations, issue slots. Each by itself is arithmetic; together they take longer than
the longest, as docs/performance/marlin_wgmma.md found (products alone 41 us, feed alone 36, both 52): a norm of order
2.7. Before and behind stand the launch, the epilogue and, where tiles are divided, the partial sums.

The constants below were fitted once to the committed measurements; docs/performance/model.md lists prediction beside
measurement.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cudatma.kernels.marlin.card import Card, rates
from cudatma.kernels.marlin.layer import AnyMarlinSpec, Choice, Layer
from cudatma.kernels.marlin.problem import Schedule, ceil_div, schedule
from cudatma.kernels.marlin.spec import MarlinSpec
from cudatma.kernels.marlin.strip_spec import STRIP_CHANNELS, StripSpec
from cudatma.kernels.marlin.wgmma_spec import WgmmaSpec
from cudatma.target import SMEM_RESERVED_BYTES, Target

#: Streams side by side: (sum of t ** p) ** (1 / p). 1 would be no overlap, infinity a perfect one.
_OVERLAP = 2.7
#: A kernel's ramp up and drain in a chain of plain launches. [H200; an empty kernel takes 0.97]
_LAUNCH_US = 2.2
#: From the last product of a tile to its result, beside the bytes of the result.
_EPILOGUE_US = 0.35
#: Sums within a cluster.
_MEETING_US = 0.3
#: Partial sums out, a flag, partial sums in; and the rate of one multiprocessor at which each contribution comes.
_DIVIDED_US, _PARTIAL_BYTES_PER_US = 1.4, 150e3
#: Four schedulers issue one instruction a clock each; waits for fixed latencies leave so much of it.
_ISSUE_SLOTS, _ISSUE_EFFICIENCY = 4, 0.85
#: Instructions for one weight: 9 for 8 values in fp16, 11 in bf16; a zero point 1 more, a group's scale 4. Fused with
#: their scale 9 in either type, or 10 where nibbles are shifted first. [docs/performance/marlin_portable.md]
_DEQUANTIZE = {"float16": 9 / 8, "bfloat16": 11 / 8}
_ZERO_POINT, _SCALE = 1 / 8, 4 / 8
_FUSED = {"as_stored": 9 / 8, "shifted": 10 / 8}
#: Instructions of a warp to wait for a stage, find its way in it and give it back.
_FOR_STAGE = 50
#: mma.sync in the portable kernel idles for a quarter of the time. [ncu, docs/performance/marlin_portable.md]
_PORTABLE_MMA = 0.76
#: What one thread needs to wait for a slot, announce bytes and issue a stage's copies. [the read floor, 4 KB copies]
_PRODUCER_US = 0.2
#: From a load's issue to its bytes: what a ring must cover. [33 KB a multiprocessor at 4.4 TB/s]
_LATENCY_US = 1.0
#: With fewer warps mma.sync does not reach its rate: 559 of 628 TFLOP/s with four. [H200]
_MMA_WARPS, _FEW_WARPS = 8, 559 / 628

#: Fewer tokens are measured on a card that rests between. [docs/performance/method.md]
_SUSTAINED_FROM = 256

#: Bytes a clock that a multiprocessor's shared memory reads or writes: 32 banks of 4.
_SMEM_BYTES_PER_CLOCK = 128

MEMORY, L2, SMEM, TENSOR, ISSUE = "memory", "L2", "shared memory", "tensor cores", "instruction issue"
PRODUCER = "producer"


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the model says of one launch. Times in microseconds.

    us: altogether. bound: what takes longest: a name of ``streams``, or ``"launch and epilogue"``.
    streams: each stream's time by itself. launch_us, epilogue_us, partials_us: before and behind them.
    memory_bytes: each operand once, and the result. l2_bytes: with what several blocks read again. operations: of the
    padded problem. waves: tiles over the blocks that run at the same time. fill: part of the multiprocessors' time
    that the longest share leaves in use. blocks_per_sm: resident on the busiest multiprocessor.
    """

    us: float
    bound: str
    streams: Mapping[str, float]
    launch_us: float
    epilogue_us: float
    partials_us: float
    memory_bytes: int
    l2_bytes: int
    operations: int
    waves: float
    fill: float
    blocks_per_sm: int
    divided_tiles: int

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {name: getattr(self, name) for name in self.__slots__} | {"streams": dict(self.streams)}


@dataclass(frozen=True, slots=True)
class _Shares:
    """How the work lies on the card. stages: of the busiest multiprocessor. chain: of its longest block. tiles: whose
    results that block writes. pieces: blocks that work on one divided tile. residents: blocks of that multiprocessor.
    active: multiprocessors that have any."""

    stages: int
    chain: int
    tiles: int
    pieces: int
    residents: int
    active: int


def resident_blocks(choice: Choice[AnyMarlinSpec], target: Target) -> int:
    """Blocks that a multiprocessor holds at the same time: as many as asked for, if shared memory allows."""
    return max(1, min(choice.blocks_per_sm, target.smem_per_sm_bytes // (choice.spec.smem_bytes + SMEM_RESERVED_BYTES)))


def plan_of(
    choice: Choice[AnyMarlinSpec], layer: Layer, m: int, target: Target, multiprocessors: int, *, divide: bool = True
) -> Schedule:
    """The schedule that a launch of this choice would have. divide: as for schedule()."""
    resident = multiprocessors * resident_blocks(choice, target)
    return schedule(choice.spec, m, layer.n, layer.k, resident, divide=divide)


def predict(
    layer: Layer, m: int, choice: Choice[AnyMarlinSpec], target: Target, card: Card, *, divide: bool = True
) -> Prediction:
    """The time of ``m`` tokens through ``layer``, weights cold in L2. Pure; every ArgumentError is schedule()'s."""
    spec, work = choice.spec, plan_of(choice, layer, m, target, card.multiprocessors, divide=divide)
    shares = _shares(spec, work, card.multiprocessors)
    weight_bytes = spec.weight_stage_bytes + spec.scale_stage_bytes + spec.zero_stage_bytes
    stage_bytes = weight_bytes + spec.activation_stage_bytes // spec.cluster
    operations = 2 * spec.columns * spec.block_n * spec.block_k
    memory_bytes = _weight_bytes(layer) + 2 * m * (layer.k + layer.n)
    # What is asked for and has not arrived limits how fast bytes can come: all rings together, each latency.
    in_flight = shares.active * shares.residents * spec.stages * (weight_bytes + spec.activation_stage_bytes)
    streams = {
        MEMORY: memory_bytes / min(card.memory_bytes_per_us, in_flight / _LATENCY_US),
        L2: shares.stages * stage_bytes / card.l2_bytes_per_us,
        SMEM: shares.stages * _smem_bytes(spec) / (_SMEM_BYTES_PER_CLOCK * card.sm_clock_mhz),
        TENSOR: shares.stages * operations / _tensor_rate(spec, shares, target, card, m),
        ISSUE: shares.stages * _instructions(layer, spec) / (_ISSUE_SLOTS * _ISSUE_EFFICIENCY * card.sm_clock_mhz),
    }
    together = sum(time**_OVERLAP for time in streams.values()) ** (1 / _OVERLAP)
    # One warpgroup leaves the tensor cores pauses of its own, in which the other streams go on.
    streams[TENSOR] = max(streams[TENSOR], shares.stages * _alone_us(spec, operations, shares, target, card))
    streams[PRODUCER] = shares.chain * _PRODUCER_US
    loop_us = max(together, streams[TENSOR], streams[PRODUCER])
    epilogue_us = shares.tiles * _EPILOGUE_US
    partials_us = _partials_us(spec, work, shares)
    outside_us = _LAUNCH_US + epilogue_us + partials_us
    longest = max(streams, key=lambda name: streams[name])
    tiles = work.tiles_m * work.tiles_n
    all_stages = tiles * work.cluster * work.k_iterations
    slots = card.multiprocessors * resident_blocks(choice, target)
    return Prediction(
        us=loop_us + outside_us,
        bound=longest if streams[longest] >= outside_us else "launch and epilogue",
        streams=streams,
        launch_us=_LAUNCH_US,
        epilogue_us=epilogue_us,
        partials_us=partials_us,
        memory_bytes=memory_bytes,
        l2_bytes=all_stages * stage_bytes,
        operations=all_stages * operations,
        waves=tiles * spec.launch_cluster / slots,
        fill=min(1.0, all_stages / (shares.stages * card.multiprocessors)),
        blocks_per_sm=shares.residents,
        divided_tiles=work.stream_tiles,
    )


def _shares(spec: AnyMarlinSpec, work: Schedule, multiprocessors: int) -> _Shares:
    active = min(multiprocessors, work.blocks)
    if not spec.partial_bytes:  # a block a tile, and the next wave where one ends
        residents = min(spec.blocks_per_sm, ceil_div(work.blocks, multiprocessors))
        waves = ceil_div(work.blocks, multiprocessors * residents)
        chain = waves * ceil_div(work.k_iterations, spec.launch_cluster)  # a cluster divides the depth
        return _Shares(chain * residents, chain, waves, 1, residents, active)
    residents = ceil_div(work.blocks, multiprocessors)
    whole = ceil_div(work.tiles_m * work.tiles_n - work.stream_tiles, work.shares)
    streamed = ceil_div(work.stream_units, work.shares)
    pieces = max(2, ceil_div(work.k_iterations, streamed)) if streamed else 1
    chain = whole * work.k_iterations + streamed
    return _Shares(chain * residents, chain, whole + bool(streamed), pieces, residents, active)


def _weight_bytes(layer: Layer) -> int:
    groups = 1 if layer.group_size == -1 else ceil_div(layer.k, layer.group_size)
    return layer.k * layer.n // 2 + groups * layer.n * (3 if layer.has_zeros else 2)


def _tensor_rate(spec: AnyMarlinSpec, shares: _Shares, target: Target, card: Card, m: int) -> float:
    """Operations a microsecond of one multiprocessor."""
    known = rates(target)
    if isinstance(spec, WgmmaSpec):
        power = known.sustained if m >= _SUSTAINED_FROM else known.rested
        return _interpolated(known.wgmma, spec.block_m) * power * card.sm_clock_mhz
    rate = known.mma_sync * card.sm_clock_mhz
    if spec.consumer_warps * shares.residents < _MMA_WARPS:
        rate *= _FEW_WARPS
    return rate * _PORTABLE_MMA if isinstance(spec, MarlinSpec) else rate


def _alone_us(spec: AnyMarlinSpec, operations: int, shares: _Shares, target: Target, card: Card) -> float:
    """What one consumer warpgroup by itself needs for so many; too slow for the power limit to matter. 0: it is not."""
    if not isinstance(spec, WgmmaSpec) or spec.consumer_warps // 4 * shares.residents > 1:
        return 0.0
    return operations / (_interpolated(rates(target).wgmma_alone, spec.block_m) * card.sm_clock_mhz)


def _interpolated(table: Mapping[int, float], columns: int) -> float:
    """Between the instruction widths that were measured, by the width's logarithm."""
    if columns in table:
        return table[columns]
    below = max((n for n in table if n < columns), default=min(table))
    above = min((n for n in table if n > columns), default=max(table))
    if below >= above:
        return table[below] * min(1.0, columns / below)
    part = math.log(columns / below) / math.log(above / below)
    return math.exp((1 - part) * math.log(table[below]) + part * math.log(table[above]))


def _instructions(layer: Layer, spec: AnyMarlinSpec) -> float:
    """Of one stage, for all consumer warps of a block."""
    weights = spec.block_n * spec.block_k / 32
    on_weight = isinstance(spec, WgmmaSpec) or (isinstance(spec, MarlinSpec) and spec.scale_on == "weight")
    if isinstance(spec, WgmmaSpec) and spec.is_fused:
        for_weight = _FUSED[spec.fused]
    else:
        for_weight = _DEQUANTIZE[layer.dtype] + (_ZERO_POINT if spec.has_stage_zeros else 0)
        for_weight += _SCALE if spec.has_stage_scales and on_weight else 0
    for_stage = _FOR_STAGE * spec.consumer_warps
    if isinstance(spec, WgmmaSpec):
        return weights * for_weight + for_stage
    tokens8, channels16 = spec.columns / 8, spec.block_n / 16
    mmas = channels16 * tokens8 * spec.block_k / 16
    ldmatrix = _activation_readers(spec) * tokens8 * spec.block_k / 32
    sums = 0.0 if on_weight else 4 * channels16 * tokens8 * max(1, spec.groups_per_stage)
    return weights * for_weight + mmas + ldmatrix + sums + for_stage


def _activation_readers(spec: AnyMarlinSpec) -> float:
    """How often a stage's activations are read: once by the warps, or the wgmmas, of each of these channel groups."""
    if isinstance(spec, WgmmaSpec):
        return spec.block_n / 64
    return spec.block_n / (spec.warp_n if isinstance(spec, MarlinSpec) else STRIP_CHANNELS)


def _smem_bytes(spec: AnyMarlinSpec) -> float:
    """In and out of shared memory, of one stage."""
    weights, activations = spec.weight_stage_bytes, spec.activation_stage_bytes
    return 2 * weights + activations * (1 + _activation_readers(spec))


def _partials_us(spec: AnyMarlinSpec, work: Schedule, shares: _Shares) -> float:
    """Its owner collects a divided tile's contributions, one behind the other. The blocks of a cluster meet."""
    if spec.blocks_k > 1:
        return _MEETING_US
    if not work.stream_tiles:
        return 0.0
    return _DIVIDED_US + shares.pieces * spec.partial_bytes / _PARTIAL_BYTES_PER_US


def kernel_name(spec: AnyMarlinSpec) -> str:
    """``"strip"``, ``"wgmma"`` or ``"portable"``."""
    return "strip" if isinstance(spec, StripSpec) else "wgmma" if isinstance(spec, WgmmaSpec) else "portable"
