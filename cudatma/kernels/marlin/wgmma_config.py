"""Which instance of the wgmma kernel serves a problem: of a list of tiles the one that tile_clocks.py puts first.

docs/performance/marlin_wgmma.md holds the measurements that the list comes from.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cudatma.kernels.marlin.layer import Choice, Feeds, Layer, weight_policy
from cudatma.kernels.marlin.raster import least_traffic
from cudatma.kernels.marlin.tile_clocks import launch_clocks
from cudatma.kernels.marlin.wgmma_spec import WgmmaSpec
from cudatma.target import KIB, Target

#: Up to so many tokens the others are faster: wgmma with few columns runs at half of mma.sync's rate. With so many
#: bytes of weights for each multiprocessor it is ahead earlier: mma.sync is the bound, or the card's power.
_OTHERS_TOKENS, _OTHERS_TOKENS_WIDE, _WIDE_BYTES = 32, 16, 200 * KIB


@dataclass(frozen=True, slots=True)
class _Tile:
    """Fields of WgmmaSpec; stages: at most, fewer where scales and zero points take their room.

    by_traffic: band and weight_policy are what raster.py predicts the least traffic for, instead of what was measured.
    """

    block_m: int
    block_k: int
    warpgroups: int
    stages: int
    stack: int = 1
    warpgroups_k: int = 1
    steps: int = 1
    in_flight: int = 3
    consumer_registers: int = 0
    cluster: int = 1
    store_tokens: int = 0
    by_traffic: bool = False

    @property
    def block_n(self) -> int:
        return 64 * self.warpgroups * self.stack

    @property
    def is_short(self) -> bool:
        return self.block_m <= _OTHERS_TOKENS


#: In the narrowest, warpgroups divide a stage's depth. 192 channels are for layers that 128 or 256 cut into a wave and
#: a bit; so are the odd numbers of tokens.
_TILES = (
    _Tile(32, 256, 1, 8, warpgroups_k=2),
    _Tile(32, 256, 2, 6),
    _Tile(32, 256, 3, 5),
    _Tile(32, 256, 2, 4, stack=2, steps=2, in_flight=1),
    _Tile(64, 256, 1, 5, warpgroups_k=2),
    _Tile(64, 256, 2, 4),
    _Tile(64, 256, 3, 3),
    _Tile(64, 256, 2, 3, stack=2, in_flight=1),  # with more in flight ptxas spills
    _Tile(96, 128, 3, 5),
    _Tile(104, 128, 3, 5),
    _Tile(128, 128, 2, 5, steps=2, in_flight=1),
    _Tile(128, 128, 3, 4),
    _Tile(128, 128, 2, 4, stack=2, consumer_registers=232, cluster=2),
    _Tile(152, 128, 2, 4),
    _Tile(176, 128, 2, 4),
    _Tile(256, 64, 2, 6, steps=2, in_flight=1, consumer_registers=232, cluster=2),
    _Tile(256, 128, 2, 3, consumer_registers=232),
)


def wgmma_serves(layer: Layer, m: int, target: Target, multiprocessors: int, feeds: Feeds) -> bool:
    """Whether the wgmma kernel takes ``m`` tokens: it has no other feed than TMA."""
    able = target.has_wgmma and target.has_setmaxnreg and target.has_multicast
    is_wide = _bytes_each(layer, multiprocessors) >= _WIDE_BYTES
    return able and feeds.all_tma and m > (_OTHERS_TOKENS_WIDE if is_wide else _OTHERS_TOKENS)


def choose_wgmma(layer: Layer, m: int, target: Target, multiprocessors: int) -> Choice[WgmmaSpec]:
    """The spec for ``m`` tokens on a card that wgmma_serves(). Deterministic; looks at no device."""
    tile = _fastest(layer.k, layer.n, m, multiprocessors)
    spec = _fitting(_spec(tile, layer, m), target)
    if not tile.by_traffic or m <= tile.block_m:  # one token tile: there is one order, and nothing is read again
        return Choice(spec, 1)
    band, policy = least_traffic(spec, m, layer.n, layer.k, multiprocessors // spec.cluster)
    return Choice(replace(spec, weight_policy=policy), 1, band)


def _fastest(k: int, n: int, m: int, multiprocessors: int) -> _Tile:
    """The tile that takes the fewest clocks; of equals the first. Tiles of few tokens are for one of them alone."""

    def clocks(tile: _Tile) -> float:
        shape = (tile.block_m, tile.block_n, tile.block_k, tile.cluster)
        return launch_clocks(*shape, m, n, k, multiprocessors)

    return min((tile for tile in _TILES if not tile.is_short or m <= tile.block_m), key=clocks)


def _bytes_each(layer: Layer, multiprocessors: int) -> int:
    """Bytes of weights for each multiprocessor."""
    return layer.k * layer.n // 2 // multiprocessors


def _spec(tile: _Tile, layer: Layer, m: int) -> WgmmaSpec:
    return WgmmaSpec(
        dtype=layer.dtype,
        group_size=layer.group_size,
        has_zeros=layer.has_zeros,
        block_m=tile.block_m,
        block_k=tile.block_k,
        warpgroups=tile.warpgroups,
        warpgroups_k=tile.warpgroups_k,
        stack=tile.stack,
        stages=tile.stages,
        cluster=tile.cluster,
        steps=tile.steps,
        in_flight=tile.in_flight,
        consumer_registers=tile.consumer_registers,
        store_tokens=tile.store_tokens,
        # Weights that several token tiles read should stay in L2.
        weight_policy=weight_policy(m, tile.block_m),
    )


def _fitting(spec: WgmmaSpec, target: Target) -> WgmmaSpec:
    """The spec, with fewer stages where shared memory does not hold them."""
    while spec.stages > 2 and spec.smem_bytes > target.smem_per_block_bytes:
        spec = replace(spec, stages=spec.stages - 1)
    spec.check_target(target)
    return spec


def dump_specs(target: Target) -> list[WgmmaSpec]:
    """The instances that stand for all in dumps and compile checks: each tile, and each feature once."""
    large, small = Layer(8192, 28672, 128, False, "float16"), Layer(4096, 4096, 128, False, "float16")
    if not wgmma_serves(large, 64, target, 132, Feeds()):
        return []
    specs = [_fitting(_spec(tile, large, tile.block_m), target) for tile in _TILES]
    cases = [
        (replace(large, dtype="bfloat16", has_zeros=True), 64),
        (replace(large, group_size=32, has_zeros=True), 128),
        (replace(large, dtype="bfloat16", group_size=64, has_zeros=True), 1024),
        (replace(large, group_size=-1, has_zeros=True), 256),
        (replace(small, group_size=-1, dtype="bfloat16"), 64),
    ]
    specs += [choose_wgmma(layer, m, target, 132).spec for layer, m in cases]
    by_tma = [(large, 1024, 32), (large, 128, 16), (replace(large, dtype="bfloat16", group_size=-1), 256, 64)]
    for layer, m, tokens in by_tma:
        specs.append(_fitting(replace(choose_wgmma(layer, m, target, 132).spec, store_tokens=tokens), target))
    # Most weights have the one form; the others with tiles that differ most.
    others = [specs[i].in_form(form) for form in ("shifted", "none") for i in (3, 4, 15)]
    return list(dict.fromkeys([*(spec.in_form("as_stored") for spec in specs), *others]))
