"""Which kernel serves a problem, and for the portable one which tile: what was tuned, else a short table and one rule.

docs/performance/marlin_portable.md holds the measurements, on an H200, that the table comes from. wgmma_config has the
other table, tuning what `cudatma tune` found.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cudatma.kernels.marlin.card import Card
from cudatma.kernels.marlin.invariant import choose_invariant
from cudatma.kernels.marlin.layer import AnyMarlinSpec, Choice, Feeds, Layer
from cudatma.kernels.marlin.problem import ceil_div
from cudatma.kernels.marlin.spec import MarlinSpec
from cudatma.kernels.marlin.strip_config import choose_strip, strip_serves
from cudatma.kernels.marlin.tuning import lookup, pinned_scope
from cudatma.kernels.marlin.wgmma_config import choose_wgmma, wgmma_serves
from cudatma.target import KIB, Target

__all__ = [
    "Choice",
    "Decision",
    "Feeds",
    "Layer",
    "choose",
    "choose_portable",
    "choose_untuned",
    "decide",
    "dump_specs",
]

#: Shared memory of a block that every target has (SM120: 99 KiB).
_PORTABLE_SMEM_BYTES = 99 * KIB
_MAX_STAGES = 12
#: Below this many stages for each multiprocessor, the wide tile's partial sums cost more than its traffic saves.
_WIDE_FROM_STAGES = 16
#: (most tokens, bytes): with fewer bytes of weights for each multiprocessor, a second resident block only adds partial
#: sums. More tokens give it more to do.
_SECOND_BLOCK_FROM_BYTES = ((16, 400 * KIB), (2**31 - 1, 160 * KIB))


_BY_TMA = Feeds()


@dataclass(frozen=True, slots=True)
class _Tile:
    m: int
    n: int
    k: int
    warps_n: int
    warps_k: int
    blocks_per_sm: int = 1
    scale_on: str = "weight"
    consumer_registers: int = 0


_ACC = "accumulator"
#: (most tokens, tile for layers that do not fill the card, tile for those that do).
_TILES: tuple[tuple[int, _Tile, _Tile], ...] = (
    (8, _Tile(8, 128, 256, 4, 1, 2, _ACC), _Tile(8, 128, 256, 4, 1, 2, _ACC)),
    (16, _Tile(16, 64, 256, 2, 2, 3, _ACC), _Tile(16, 64, 256, 2, 2, 3, _ACC)),
    (32, _Tile(32, 64, 256, 2, 2, 2, _ACC), _Tile(32, 256, 128, 8, 1, 1, _ACC)),
    (64, _Tile(64, 64, 128, 4, 2), _Tile(64, 128, 128, 4, 1, 2)),
    (128, _Tile(64, 128, 128, 8, 1), _Tile(128, 256, 64, 8, 1, 1, "weight", 232)),
    (2**31 - 1, _Tile(64, 256, 128, 8, 1), _Tile(128, 256, 64, 8, 1, 1, "weight", 232)),
)
#: Takes the place of a tile that needs setmaxnreg where the target has none.
_WITHOUT_SETMAXNREG = _Tile(64, 256, 128, 8, 1)


@dataclass(frozen=True, slots=True)
class Decision:
    """A choice, where it comes from (``"pinned"``, ``"tuned"``, ``"shipped"``, ``"rule"``), and why, in words."""

    choice: Choice[AnyMarlinSpec]
    source: str
    why: str


def choose(
    layer: Layer, m: int, target: Target, multiprocessors: int, *, batch_invariant: bool = False
) -> Choice[AnyMarlinSpec]:
    """The spec for ``m`` tokens on a card, and how many blocks of it to run: decide() without the reasons."""
    return decide(layer, m, target, multiprocessors, batch_invariant=batch_invariant).choice


def decide(
    layer: Layer,
    m: int,
    target: Target,
    multiprocessors: int,
    card: Card | None = None,
    *,
    batch_invariant: bool = False,
) -> Decision:
    """The choice and its reason, the same for as long as a process lives.

    For batch invariance what invariant.py allows. Else what the tuner pins; else a tuned cell of the user's file or of
    a shipped table; else choose_untuned(). card: as in tuning.lookup().
    """
    if batch_invariant:
        why = "batch invariance: one order of additions, whatever the number of tokens"
        return Decision(choose_invariant(layer, m, target, multiprocessors), "rule", why)
    if (choice := pinned_scope.get()) is not None:
        return Decision(choice, "pinned", "pinned by the caller")
    if (found := lookup(layer, m, target, multiprocessors, card)) is not None:
        cell, source = found.cell, "shipped" if found.shipped else "tuned"
        gain = f"{cell.us:.4g} us, where the rules' choice took {cell.rule_us:.4g}"
        which = "this layer" if found.exact else f"a layer of this K and N ({cell.layer})"
        return Decision(cell.choice, source, f"{found.path} has {which}, measured at {cell.m} tokens: {gain}")
    choice, why = _by_rule(layer, m, target, multiprocessors)
    return Decision(choice, "rule", why)


def choose_untuned(layer: Layer, m: int, target: Target, multiprocessors: int) -> Choice[AnyMarlinSpec]:
    """The choice by rules and tables alone. Deterministic; looks at no device and no file."""
    return _by_rule(layer, m, target, multiprocessors)[0]


def _by_rule(layer: Layer, m: int, target: Target, multiprocessors: int) -> tuple[Choice[AnyMarlinSpec], str]:
    """The choice, and the rule that it follows."""
    by_strips = strip_serves(layer, m, target, multiprocessors)
    by_wgmma = wgmma_serves(m, target, layer.n // multiprocessors)
    if by_strips and not by_wgmma:
        why = f"few tokens: {layer.n} channels in strips, whose depth clusters divide where there"
        why += f" are few, keep {multiprocessors} multiprocessors busy"
        return choose_strip(layer, m, target, multiprocessors), why
    if by_wgmma:
        why = f"more tokens than mma.sync is faster for, and {target.name} has wgmma"
        why += ": of its tiles the one that takes the fewest clocks"
        return choose_wgmma(layer, m, target, multiprocessors), why
    choice = choose_portable(layer, m, target, multiprocessors)
    why = f"too many tokens, or too few channels, for strips, and {target.name} has no wgmma"
    return choice, f"{why}: the portable kernel's table of tiles measured on an H200"


def choose_portable(
    layer: Layer, m: int, target: Target, multiprocessors: int, feeds: Feeds = _BY_TMA
) -> Choice[MarlinSpec]:
    """The same among the portable kernel's instances."""
    tile = _pick(layer, m, multiprocessors)
    if tile.consumer_registers and not target.has_setmaxnreg:
        tile = _WITHOUT_SETMAXNREG
    blocks = tile.blocks_per_sm if feeds.all_tma else min(2, tile.blocks_per_sm)
    fitting = target.smem_per_sm_bytes // (_PORTABLE_SMEM_BYTES * 3 // 4)
    if blocks > fitting:
        # One block alone on the multiprocessor: it gets the warps that the others would have brought.
        blocks, tile = fitting, replace(tile, warps_k=min(tile.warps_k * 2, tile.k // 64))
    spec = _with_stages(tile, layer, blocks, target, feeds)
    enough = next(size for most, size in _SECOND_BLOCK_FROM_BYTES if m <= most)
    return Choice(spec, blocks if layer.k * layer.n // 2 // multiprocessors >= enough else 1)


def _pick(layer: Layer, m: int, multiprocessors: int) -> _Tile:
    narrow, wide = next((narrow, wide) for most, narrow, wide in _TILES if m <= most)
    tiles = ceil_div(m, wide.m) * ceil_div(layer.n, wide.n)
    stages_per_sm = tiles * ceil_div(layer.k, wide.k) // multiprocessors
    return wide if stages_per_sm >= _WIDE_FROM_STAGES else narrow


def _with_stages(tile: _Tile, layer: Layer, blocks: int, target: Target, feeds: Feeds) -> MarlinSpec:
    """The spec with as many stages as its share of shared memory holds."""
    budget = min(_PORTABLE_SMEM_BYTES, target.smem_share_bytes(blocks))

    def spec(stages: int) -> MarlinSpec:
        return MarlinSpec(
            dtype=layer.dtype,
            group_size=layer.group_size,
            has_zeros=layer.has_zeros,
            block_m=tile.m,
            block_n=tile.n,
            block_k=tile.k,
            warps_n=tile.warps_n,
            warps_k=tile.warps_k,
            stages=stages,
            feed_weight=feeds.weight,
            feed_scale=feeds.scale,
            feed_activation=feeds.activation,
            scale_on="epilogue" if layer.group_size == -1 else tile.scale_on,
            # Weights that several token tiles read should stay in L2.
            weight_policy="evict_first" if tile.m < 128 else "evict_normal",
            blocks_per_sm=blocks,
            consumer_registers=tile.consumer_registers,
        )

    deepest = max((s for s in range(2, _MAX_STAGES + 1) if spec(s).smem_bytes <= budget), default=2)
    chosen = spec(deepest)
    chosen.check_target(target)
    return chosen


def dump_specs(target: Target) -> list[MarlinSpec]:
    """The portable instances that stand for all in dumps and compile checks: each tile, and each feature once."""
    if not target.has("mma_sync") or not target.has("tma"):
        return []
    processors = 132
    large, small = Layer(8192, 28672, 128, False, "float16"), Layer(4096, 4096, 128, False, "float16")
    cases = [(large, m, Feeds()) for m in (1, 16, 32, 64, 1024)] + [(small, m, Feeds()) for m in (32, 64, 128, 256)]
    cases += [
        (replace(large, dtype="bfloat16", has_zeros=True), 16, Feeds()),
        (replace(large, group_size=32, has_zeros=True), 64, Feeds()),
        (replace(large, group_size=-1), 1024, Feeds()),
        (large, 16, Feeds("cp_async", "cp_async", "cp_async")),
        (large, 1024, Feeds("cp_async", "cp_async", "cp_async")),
        (large, 16, Feeds(scale="cp_async")),
    ]
    specs = [choose_portable(layer, m, target, processors, feeds).spec for layer, m, feeds in cases]
    return list(dict.fromkeys(specs))
