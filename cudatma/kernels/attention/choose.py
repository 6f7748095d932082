"""Which version and configuration of attention serves a problem, and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cudatma.arrays import describe
from cudatma.backend import backend_for
from cudatma.errors import ArgumentError
from cudatma.kernels.attention.check import check_attention
from cudatma.kernels.attention.problem import HEAD_DIMS, OPERAND_TYPES, Problem
from cudatma.kernels.attention.spec import SPEC_FIELDS, AttentionSpec
from cudatma.kernels.attention.versions import (
    CHOICE,
    VERSIONS,
    AttentionA3,
    AttentionA4,
    AttentionP1,
    AttentionPhase1,
    AttentionWithProducer,
    chosen_version,
)
from cudatma.kernels.checks import check_backend
from cudatma.kernels.cost import no_kernel, runs
from cudatma.kernels.explain import Explanation, explained, explained_gpu
from cudatma.kernels.family import Family, Option, Times
from cudatma.kernels.gpu import Gpu
from cudatma.kernels.schedule import Schedule, ceil_div
from cudatma.kernels.version import naming
from cudatma.target import Target, get_target

#: Head dims of q and k, and of v -> (warpgroups, block_n) of versions a3 and a4. Registers of a thread hold
#: the scores and the probabilities of a block, and the output.
_TILES: Mapping[tuple[int, int], tuple[tuple[int, int], ...]] = {
    (32, 32): ((3, 128), (2, 192), (2, 128)),
    (64, 64): ((3, 128), (2, 128), (1, 128), (1, 192)),
    (96, 96): ((2, 176), (2, 128), (3, 96)),
    (128, 128): ((2, 176), (2, 160), (2, 128), (3, 80), (2, 112), (1, 80), (1, 96)),
    (192, 192): ((2, 112), (2, 96), (2, 80)),
    (192, 128): ((2, 128), (2, 112), (2, 96)),
    (256, 256): ((2, 80), (2, 64)),
}
#: The same for the versions without: of heads up to this dim, and of wider ones. [H100, attention_tiles.json]
_NARROW_HEAD_DIM = 64
_NARROW_TILES: tuple[tuple[int, int], ...] = ((1, 64),)
_WIDE_TILES = ((2, 64), (1, 64))
#: The same of version p1, within 99 KB.
_P1_TILES: Mapping[tuple[int, int], tuple[tuple[int, int], ...]] = {
    (32, 32): ((2, 128), (1, 64)),
    (64, 64): ((2, 64), (1, 64)),
    (96, 96): ((2, 64), (1, 64)),
    (128, 128): ((2, 64), (1, 64)),
    (192, 192): ((1, 32),),
    (192, 128): ((1, 32),),
    (256, 256): ((1, 32),),
}
_MOST_STAGES = 4
#: What "auto" chooses from; of versions that are predicted to be equal, the first one.
_LADDER, _MMA_SYNC = ("a4", "a3", "a2", "a1"), ("p1",)


def _tiles(problem: Problem, versions: Iterable[str]) -> Iterator[AttentionSpec]:
    """Every tile of these versions that can serve the problem, with the shortest ring."""
    given: dict[str, Any] = {name: getattr(problem, name) for name in SPEC_FIELDS}
    for version in versions:
        kind = VERSIONS[version]
        if problem.has_sink in kind.allowed["has_sink"]:
            yield from (kind(**given, **fields) for fields in _tiles_of(kind, problem))


def _tiles_of(kind: type[AttentionSpec], problem: Problem) -> Iterator[dict[str, Any]]:
    """The fields of a version's spec that the problem does not give."""
    if kind is AttentionPhase1:
        block_n = 32 if problem.head_dim <= _NARROW_HEAD_DIM else 16  # its loops are unrolled
        yield {"block_m": 32, "block_n": block_n, "stages": 1, "warpgroups": 1}
        return
    is_a3_or_a4 = issubclass(kind, AttentionA3)
    dims = problem.head_dim, problem.v_head_dim
    tiles = _NARROW_TILES if problem.head_dim <= _NARROW_HEAD_DIM else _WIDE_TILES
    if is_a3_or_a4 or kind is AttentionP1:
        tiles = (_TILES if is_a3_or_a4 else _P1_TILES)[dims]
    for warpgroups, block_n in tiles:
        fields: dict[str, Any] = {"block_m": 64 * warpgroups, "block_n": block_n, "warpgroups": warpgroups}
        if issubclass(kind, AttentionWithProducer):
            fields["is_varlen"] = problem.is_varlen and True in kind.allowed["is_varlen"]
        if not is_a3_or_a4:
            yield fields
            continue
        if warpgroups == 1 and kind is AttentionA4:
            continue  # two CTAs that share an SM do what a persistent one does
        fields["blocks_per_sm"] = 2 if warpgroups == 1 else 1
        slots: list[dict[str, Any]] = [{"q_stages": 2}, {"q_stages": 1}] if kind is AttentionA4 else [{}]
        yield from ({**fields, **slot} for slot in slots)


def _deepest(spec: AttentionSpec, target: Target) -> AttentionSpec | None:
    """Return the spec with the longest ring that fits shared memory, None if two stages do not fit.

    Two stages are enough, because each has its own keys and values. Versions without a producer keep two, so that
    several CTAs share an SM.
    """
    stages = range(_MOST_STAGES, 1, -1) if isinstance(spec, AttentionWithProducer) else (spec.stages,)
    for longer in (replace(spec, stages=count) for count in stages):
        if longer.smem_bytes <= target.smem_share_bytes(spec.blocks_per_sm):
            return longer
    return None


def _pays(spec: AttentionSpec, problem: Problem, target: Target) -> bool:
    """Whether it is worth ranking: persistent CTAs, where a version may be chosen, for tiles of several warpgroups (a3
    is up to 4.5 % faster in 4 of 48 measured calls, slower in most [H100]); one slot of queries for tiles that leave no
    place for two."""
    if isinstance(spec, AttentionA4):
        return spec.q_stages > 1 or not runs(replace(spec, q_stages=2), problem, target)
    return not isinstance(spec, AttentionA3) or bool(problem.version) or spec.warpgroups == 1 or problem.is_varlen


def times(problem: Problem, ms: NDArray[np.int64], gpu: Gpu) -> Times[AttentionSpec]:
    """Return ``Family.times``: each tile of each version, with as deep a ring as shared memory holds.

    The problem may name a version. Otherwise the ladder's versions compete, or p1 on targets without wgmma. Raises
    TargetError if the target lacks a feature of the version, and ArgumentError if the version has no kernel for the
    problem.
    """
    target = get_target(gpu.target)
    versions = (problem.version,) if problem.version else _LADDER if target.has_wgmma else _MMA_SYNC
    kind, user = VERSIONS[versions[0]], f"version {problem.version} of attention" if problem.version else "attention"
    for feature in kind.features:
        target.require(feature, user)
    if problem.has_sink and True not in kind.allowed["has_sink"]:
        raise ArgumentError("sink", "an array", f"None for version {problem.version}", 'version="auto"')
    tiles = (spec for spec in _tiles(problem, versions) if _pays(spec, problem, target) and runs(spec, problem, target))
    specs = [spec for tile in tiles if (spec := _deepest(tile, target)) is not None]
    if not specs:
        raise no_kernel(problem, gpu)
    everywhere = np.ones(len(ms), np.bool_)
    return [(spec, spec.times_at(ms, everywhere, problem, gpu)) for spec in specs]


ATTENTION: Family[Problem, AttentionSpec] = Family(
    name="attention",
    kernels=dict(VERSIONS),
    read_problem=Problem.from_json,
    times=times,
    with_m=Problem.with_queries,
    shape=Problem.shape,
    index=("keys", "n", "head_dim", "heads", "kv_heads", "batch"),
    spec_fields=SPEC_FIELDS,
    options=(
        Option("dtype", "bfloat16", tuple(OPERAND_TYPES), "of q, k, v and the result"),
        Option("is_causal", False, (False, True), "queries see keys up to their own"),
        Option("batch", 1, (), "sequences"),
        Option("heads", 1, (), "of q"),
        Option("kv_heads", 0, (), "of k and v; 0: as many as of q"),
    ),
    trial="cudatma.kernels.attention.sample:AttentionTrial",
    versions=CHOICE,
    sizes="keys x head dim",
)


def dump_specs(version: str, target: Target) -> list[AttentionSpec]:
    """The instances of a version that stand for all in dumps and compile checks: each pair of head dims with
    every other tile, of the versions without a producer with one; each kind of mask."""
    found: list[AttentionSpec] = []
    masks = ((False, False, False), (True, False, False), (True, True, False), (False, True, True))
    can_sink = True in VERSIONS[version].allowed["has_sink"]
    for index, (head_dim, v_head_dim) in enumerate(HEAD_DIMS):
        dtype = tuple(OPERAND_TYPES)[index % 2]
        problem = Problem(1, 1, 1, 1024, 1024, head_dim, v_head_dim, dtype)
        tiles = {(spec.block_m, spec.block_n): spec for spec in _tiles(problem, [version])}
        chosen = list(tiles.values())
        chosen = chosen[index % 2 :: 2] or chosen
        if not issubclass(VERSIONS[version], AttentionA3):
            chosen = [chosen[index % len(chosen)]]
        for number, spec in enumerate(chosen):
            is_causal, has_window, has_softcap = masks[(index + number) % len(masks)]
            masked = replace(spec, is_causal=is_causal, has_window=has_window, has_softcap=has_softcap)
            masked = replace(masked, has_sink=can_sink and has_window and not has_softcap)
            longest = _deepest(masked, target)
            if longest is not None and runs(longest, problem, target):
                found.append(longest)
    # Sequences of different lengths add little: a few stand for all.
    some = [spec for spec in found[::4] if isinstance(spec, AttentionWithProducer)]
    return found + [replace(spec, is_varlen=True) for spec in some if True in spec.allowed["is_varlen"]]


def attention_explain(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sink: Any = None,
    out: Any = None,
    return_lse: bool = False,
    version: str = "auto",
    backend: str | None = None,
    stream: Any = None,
    target: str | Target | None = None,
) -> Explanation:
    """What attention() would run with these arguments, why, and how long it should take. Launches and compiles nothing.

    target: of an imagined GPU, "sm_120a", instead of the arrays'. Host arrays: for an H200, or a GPU of
    $CUDATMA_TARGET. backend, stream: as attention takes them; they change nothing here. Raises as attention does, and
    ArgumentError where there is nothing to compute.
    """
    name, asked_by = chosen_version(version)
    options = {"causal": causal, "window": window, "scale": scale, "softcap": softcap, "return_lse": return_lse}
    problem = check_attention(q, k, v, sink, out=out, version=name, **options).problem
    first = describe(q, "q")
    if backend is not None:
        check_backend(first, "q", backend_for("attention", backend))
    problem.check_not_empty()
    gpu = explained_gpu(first.device, target)

    def cut(spec: Any) -> Schedule:
        tiles = ceil_div(problem.q_length, spec.block_m), problem.batch * problem.heads
        return Schedule(spec.ctas(problem, gpu.sm_count), *tiles, ceil_div(problem.k_length, spec.block_n), 0)

    with naming(asked_by):
        found = explained(ATTENTION, problem, gpu, cut=cut)
    if not name:
        return found
    return replace(found, decision=replace(found.decision, why=f"{found.decision.why} by {asked_by}"))
