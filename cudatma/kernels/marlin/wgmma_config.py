"""Which instance of the wgmma kernel serves a problem: of a list of forms, cut to the number of tokens, the one that
tile_clocks.py puts first.

docs/performance/marlin_wgmma.md holds the measurements that the list comes from.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from cudatma.kernels.marlin.clusters import BLOCKS_K, clusters_at_once
from cudatma.kernels.marlin.layer import Choice, Layer, weight_policy
from cudatma.kernels.marlin.problem import ceil_div
from cudatma.kernels.marlin.tile_clocks import Tile, launch_clocks
from cudatma.kernels.marlin.wgmma_spec import WgmmaSpec
from cudatma.target import Target

#: Up to so many tokens strips are faster: few columns are half of wgmma's rate, and the weight's bytes decide.
_OTHERS_TOKENS = 16
#: The same for layers of so many channels a multiprocessor, five strips of a block: at 16 tokens 1 to 16 % faster than
#: strips (19 layers of 136 to 559 channels), at 8 tokens 1 to 7 % slower. At 26 layers of 54 to 124 channels it is 4 %
#: slower to 1 % faster. [H200]
_OTHERS_TOKENS_WIDE, _WIDE_CHANNELS = 8, 130
#: Tokens of a tile: fine where they are few, so that little of the last one is empty.
_SIZES = (*range(8, 65, 8), *range(80, 257, 16))
#: Tiles of fewer tokens are for one of them alone.
_LEAST_OF_SEVERAL = 48
#: Tiles of so many have the pipeline of few.
_FEW_TOKENS = 64
#: What dumps show of a form, beside its most: the last eight of them are alone where results leave by sixteens.
_DUMPED_TOKENS = 40
#: Tables of small groups, and a cluster's sums, take room from the ring: a shorter one stands still (a third slower at
#: 128 x 64 x 256 and two stages), unless the depth is as short. [H200]
_LEAST_STAGES = 3
#: With more accumulators a thread, setmaxnreg has to make room; and with so many where two blocks of channels are
#: stacked, whose weights take registers too. ptxas spills otherwise.
_PLAIN_ACCUMULATORS, _STACKED_ACCUMULATORS, _REGISTERS = 96, 88, 232


@dataclass(frozen=True, slots=True)
class _Form:
    """Fields of WgmmaSpec that go with any number of tokens from ``least`` to ``most``. stages: at most, fewer where
    shared memory does not hold them. few: (steps, in_flight) of tiles of few tokens, where not ``many``."""

    block_k: int
    warpgroups: int
    stages: int
    least: int
    most: int
    stack: int = 1
    warpgroups_k: int = 1
    cluster: int = 1
    few: tuple[int, int] | None = None
    many: tuple[int, int] = (1, 3)

    @property
    def block_n(self) -> int:
        return 64 * self.warpgroups * self.stack

    def pipeline(self, block_m: int) -> tuple[int, int]:
        """(steps, in_flight)"""
        return self.few if self.few and block_m <= _FEW_TOKENS else self.many

    def sizes(self, m: int) -> list[int]:
        """Tokens of a tile: the fewest for each number of tiles that ``m`` tokens can be cut into; none where all of
        the form's tiles are longer than one needs to be."""
        enough = next((size for size in _SIZES if size >= m), _SIZES[-1])
        most = min(self.most, enough)
        able = [size for size in _SIZES if self.least <= size <= most and size % (8 * self.cluster) == 0]
        able = [size for size in able if size >= min(m, _LEAST_OF_SEVERAL)]
        fewest = {ceil_div(m, size): size for size in reversed(able)}
        return list(fewest.values())


#: In the first, warpgroups divide the depth. 64 channels of one warpgroup want many tokens, for which it dequantises
#: once. 192 channels are for layers that 128 or 256 cut into a wave and a bit, and ptxas spills with more than 128
#: tokens. Few tokens: products are short, and fewer commit groups are 1 to 4 % faster. [H200]
_FORMS = (
    _Form(256, 1, 8, 8, 64, warpgroups_k=2, few=(4, 1)),
    _Form(256, 1, 8, 80, 128),
    _Form(256, 2, 6, 8, 96, few=(2, 1)),
    _Form(256, 3, 4, 8, 80, few=(2, 1)),
    _Form(256, 2, 4, 8, 64, stack=2, few=(2, 1)),
    _Form(128, 1, 8, 80, 256),
    _Form(128, 2, 6, 48, 192),
    _Form(128, 2, 6, 128, 192, cluster=2),
    _Form(128, 3, 5, 48, 128),
    _Form(128, 2, 5, 64, 128, stack=2),
    _Form(128, 2, 3, 256, 256),
    _Form(64, 2, 6, 128, 256, cluster=2, many=(2, 1)),
)


def wgmma_serves(m: int, target: Target, channels: int = 0) -> bool:
    """Whether the wgmma kernel takes ``m`` tokens. channels: a multiprocessor's."""
    able = target.has_wgmma and target.has_setmaxnreg and target.has_multicast
    return able and m > (_OTHERS_TOKENS_WIDE if channels >= _WIDE_CHANNELS else _OTHERS_TOKENS)


def choose_wgmma(layer: Layer, m: int, target: Target, multiprocessors: int) -> Choice[WgmmaSpec]:
    """The spec for ``m`` tokens on a card that wgmma_serves(). Deterministic; looks at no device."""
    choice = next(_in_order(layer, m, target, multiprocessors))
    choice.spec.check_target(target)
    return choice


def best_tiles(layer: Layer, m: int, target: Target, multiprocessors: int, count: int) -> list[Choice[WgmmaSpec]]:
    """The ``count`` that take the fewest clocks, as tile_clocks.py says, the first first."""
    return list(itertools.islice(_in_order(layer, m, target, multiprocessors), count))


def _in_order(layer: Layer, m: int, target: Target, multiprocessors: int) -> Iterator[Choice[WgmmaSpec]]:
    """The fastest first, as the formula says, which knows nothing of rings: those that are too short come last."""
    short = []
    for form, block_m, blocks_k in _ranked(layer.k, layer.n, m, multiprocessors):
        spec = _shortened(replace(_spec(form, block_m, layer, m), blocks_k=blocks_k), target)
        enough = min(_LEAST_STAGES, ceil_div(ceil_div(layer.k, form.block_k), blocks_k))
        if spec.stages >= enough and spec.smem_bytes <= target.smem_per_block_bytes:
            yield Choice(spec, 1)
        elif blocks_k == 1:
            short.append(Choice(spec, 1))
    yield from short


def _ranked(k: int, n: int, m: int, multiprocessors: int) -> list[tuple[_Form, int, int]]:
    """Forms, their tokens, and blocks that divide the depth: those that take the fewest clocks first."""

    def clocks(way: tuple[_Form, int, int]) -> float:
        form, block_m, blocks_k = way
        warpgroups = (form.warpgroups, form.warpgroups_k)
        tile = Tile(block_m, form.block_n, form.block_k, *warpgroups, form.cluster, blocks_k)
        return launch_clocks(tile, m, n, k, multiprocessors)

    def is_at_once(form: _Form, block_m: int, blocks_k: int) -> bool:
        """Clusters that wait for others take twice as long; and each block has a stage."""
        tiles = ceil_div(m, block_m) * ceil_div(n, form.block_n)
        return tiles <= clusters_at_once(blocks_k, multiprocessors) and k > form.block_k * (blocks_k - 1)

    tiles = [(form, size, 1) for form in _FORMS for size in form.sizes(m)]
    divided = ((form, size, blocks_k) for form, size, _ in tiles if form.cluster == 1 for blocks_k in BLOCKS_K[1:])
    return sorted([*tiles, *(tile for tile in divided if is_at_once(*tile))], key=clocks)


def _spec(form: _Form, block_m: int, layer: Layer, m: int) -> WgmmaSpec:
    plain = _PLAIN_ACCUMULATORS if form.stack == 1 else _STACKED_ACCUMULATORS
    steps, in_flight = form.pipeline(block_m)
    makes_room = form.warpgroups > 1 and form.stack * block_m // 2 > plain  # one warpgroup has them anyway
    return WgmmaSpec(
        dtype=layer.dtype,
        group_size=layer.group_size,
        has_zeros=layer.has_zeros,
        block_m=block_m,
        block_k=form.block_k,
        warpgroups=form.warpgroups,
        warpgroups_k=form.warpgroups_k,
        stack=form.stack,
        stages=form.stages,
        cluster=form.cluster,
        steps=steps,
        in_flight=in_flight,
        consumer_registers=_REGISTERS if makes_room else 0,
        # Weights that several token tiles read should stay in L2.
        weight_policy=weight_policy(m, block_m),
    )


def _shortened(spec: WgmmaSpec, target: Target) -> WgmmaSpec:
    """The spec, with fewer stages where shared memory does not hold them."""
    while spec.stages > 2 and spec.smem_bytes > target.smem_per_block_bytes:
        spec = replace(spec, stages=spec.stages - 1)
    return spec


def _fitting(spec: WgmmaSpec, target: Target) -> WgmmaSpec:
    """The same, and it has to fit then."""
    spec = _shortened(spec, target)
    spec.check_target(target)
    return spec


def dump_specs(target: Target) -> list[WgmmaSpec]:
    """The instances that stand for all in dumps and compile checks: each tile, and each feature once."""
    large, small = Layer(8192, 28672, 128, False, "float16"), Layer(4096, 4096, 128, False, "float16")
    if not wgmma_serves(64, target):
        return []
    sizes = ((form, size) for form in _FORMS for size in dict.fromkeys((max(form.least, _DUMPED_TOKENS), form.most)))
    specs = [_fitting(_spec(form, size, large, size), target) for form, size in sizes]
    cases = [
        (replace(large, dtype="bfloat16", has_zeros=True), 64),
        (replace(large, group_size=32, has_zeros=True), 128),
        (replace(large, dtype="bfloat16", group_size=64, has_zeros=True), 1024),
        (replace(large, group_size=-1, has_zeros=True), 256),
        (replace(small, group_size=-1, dtype="bfloat16"), 64),
        (replace(small, k=8192, n=1280), 100),
        (replace(small, n=2048, has_zeros=True, dtype="bfloat16"), 200),
    ]
    specs += [choose_wgmma(layer, m, target, 132).spec for layer, m in cases]
    cases = [(large, 1024), (large, 128), (replace(large, dtype="bfloat16", group_size=-1), 256)]
    specs += [choose_wgmma(layer, m, target, 132).spec for layer, m in cases]
    # Most weights have the one form; the others with tiles that differ most.
    others = [specs[i].in_form(form) for form in ("shifted", "none") for i in (2, 6, -9)]
    return list(dict.fromkeys([*(spec.in_form("as_stored") for spec in specs), *others]))
