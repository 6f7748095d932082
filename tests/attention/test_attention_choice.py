"""The choice of a version and a tile for attention."""

from __future__ import annotations

import heapq
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from measured_gpus import readings

from cudatma.errors import ArgumentError, TargetError
from cudatma.kernels import choice
from cudatma.kernels.attention.arguments import raster
from cudatma.kernels.attention.choose import ATTENTION, decode_config, times
from cudatma.kernels.attention.config import VERSIONS, AttentionConfig
from cudatma.kernels.attention.decode import DECODE_CALL
from cudatma.kernels.attention.problem import HEAD_DIMS, DecodeProblem, Problem
from cudatma.kernels.attention.sample import small_config
from cudatma.kernels.choice import decide
from cudatma.kernels.gpu import H200, imagined_gpu
from cudatma.kernels.tuning import FILE_VARIABLE, Entry, GpuClass, parse_entry, pinned, store_entry
from cudatma.target import get_target


def problem_of(**fields: Any) -> Problem:
    """Return a problem, by default with 1024 queries and keys and one head of 64 columns."""
    return Problem.of(**{"q_length": 1024, "head_dim": 64, "dtype": "bfloat16"} | fields)


@pytest.mark.parametrize("version", ["", "a1", "a2", "a3", "a4"])
def test_the_choice_loses_little_against_stored_measurements(version: str) -> None:
    """The choice is compared with the fastest tile of the version or, if all versions were measured, with the fastest
    of all."""
    lost, of_many_tokens = [], []
    cells, gpu = readings("attention_tiles.json")
    for cell in cells:
        measured = cell["us"]
        if (version or "a4") not in {entry.split("_")[1] for entry in measured}:
            continue
        problem = replace(Problem.from_json(cell), version=version)
        entry = decide(ATTENTION, problem, gpu).config.entry
        assert entry in measured, f"{entry} for {problem.description}: measure again (cudatma bench tiles)"
        us = {name: each for name, each in measured.items() if name.startswith(f"attention_{version}")}
        lost.append(us[entry] / min(us.values()))
        if cell["batch"] * cell["q_length"] >= 16384:
            of_many_tokens.append(lost[-1])
    assert len(lost) >= 9
    assert max(of_many_tokens) < 1.12
    assert sum(of_many_tokens) / len(of_many_tokens) < 1.01
    assert sorted(lost)[len(lost) * 9 // 10] < 1.09
    assert max(lost) < 1.2  # few tiles on many SMs
    assert sum(lost) / len(lost) < 1.02


@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("version", VERSIONS.names)
def test_every_version_has_a_tile_for_every_head_dim(version: str, dims: tuple[int, int]) -> None:
    fields = {"head_dim": dims[0], "v_head_dim": dims[1], "is_causal": True, "has_softcap": True, "version": version}
    problem = problem_of(heads=8, **fields)
    assert times(problem, np.array([1024]), H200)


@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_where_there_is_no_wgmma_mma_sync_runs(dims: tuple[int, int]) -> None:
    gpu = imagined_gpu("sm_120a", 170)
    sizes = {"batch": 2, "heads": 16, "kv_heads": 4, "q_length": 4096, "head_dim": dims[0], "v_head_dim": dims[1]}
    problem = problem_of(**sizes, is_causal=True)
    for one in (problem, replace(problem, q_length=1, k_length=16)):
        assert decide(ATTENTION, one, gpu).config.version == "mma_sync"
    assert decide(ATTENTION, problem, H200).config.version != "mma_sync"
    with pytest.raises(TargetError, match=r"wgmma.*version a3 of attention"):
        times(replace(problem, version="a3"), np.array([4096]), gpu)


@pytest.mark.parametrize(("head_dim", "tile_m"), [(64, 128), (96, 64)])
def test_all_threads_of_a1_copy_whole_rows(head_dim: int, tile_m: int) -> None:
    config = small_config("a1", head_dim=head_dim, v_head_dim=head_dim, tile_m=tile_m, tile_n=64)
    with pytest.raises(ArgumentError, match=r"^tile_n must be a multiple of 32.*got 80"):
        replace(config, tile_n=80)


SELF = problem_of(batch=4, heads=16, q_length=512, head_dim=128, is_causal=True)
CROSS = replace(SELF, k_length=3000)


@pytest.mark.parametrize("version", ["", "mma_sync"])
@pytest.mark.parametrize("problem", [SELF, replace(SELF, is_causal=False), CROSS], ids=lambda one: one.description)
def test_times_at_many_lengths_are_the_costs_at_each(problem: Problem, version: str) -> None:
    problem, lengths = replace(problem, version=version), [1, 64, 65, 200, 1000, 5000]
    for config, us in times(problem, np.array(lengths), H200):
        costs = [config.cost(problem.with_queries(length), H200).us for length in lengths]
        np.testing.assert_allclose(us, costs, rtol=1e-9)


@pytest.mark.parametrize(
    ("problem", "other", "is_same"),
    [
        (SELF, replace(SELF, q_length=77, k_length=77), True),
        (CROSS, replace(CROSS, q_length=77), True),
        (CROSS, replace(CROSS, k_length=3070), True),
        (CROSS, replace(CROSS, k_length=3200), False),
        (CROSS, SELF, False),
        (replace(SELF, q_length=1, k_length=1), replace(SELF, q_length=2, k_length=1), False),
        (replace(SELF, batch=33, is_varlen=True), replace(SELF, batch=36, is_varlen=True), True),
        (replace(SELF, batch=33), replace(SELF, batch=36), False),
    ],
)
def test_which_problems_share_a_table(problem: Problem, other: Problem, is_same: bool) -> None:
    assert (problem.fixed == other.fixed) == is_same
    assert (problem.shape() == other.shape()) == is_same
    assert problem.shape().fixed == problem.fixed


def test_a_pinned_kernel_of_attention_decode_serves_no_call_of_attention() -> None:
    problem = problem_of(is_causal=True)
    for version, source in (("a2", "pinned"), ("decode", "rule")):
        with pinned(small_config(version, problem)):
            assert decide(ATTENTION, problem, H200).source == source


def test_a_pinned_kernel_serves_attention_decode_if_it_can_read_the_cache() -> None:
    problem = DecodeProblem.of(q_length=1, head_dim=128, dtype="float16")
    config = replace(decode_config(problem, get_target("sm_90a")), stages=2)
    with pinned(small_config("a2")):
        assert DECODE_CALL.configure(problem, H200, {}) != config
    with pinned(config):
        assert DECODE_CALL.configure(problem, H200, {}) is config
        for other, field in (
            (replace(problem, page_size=64), "is_paged"),
            (replace(problem, has_fp8_cache=True), "version"),
            (replace(problem, is_causal=True), "pinned config: is_causal"),
        ):
            with pytest.raises(ArgumentError) as caught:
                DECODE_CALL.configure(other, H200, {})
            assert caught.value.field == field


@pytest.mark.parametrize(
    ("measured", "near", "far"),
    [
        (SELF, replace(SELF, q_length=510, k_length=510), replace(SELF, k_length=3000)),
        (CROSS, replace(CROSS, q_length=510, k_length=3050), SELF),
    ],
)
def test_a_tuning_entry_serves_nearby_lengths(
    measured: Problem, near: Problem, far: Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = times(measured, np.array([512]), H200)[-1][0]
    store_entry(tmp_path / "tuned.json", GpuClass.of(H200), ATTENTION, Entry(measured, config, 8.0, 10.0))
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "tuned.json"))
    choice.forget()
    for problem in (measured, near):
        decision = decide(ATTENTION, problem, H200)
        assert (decision.source, decision.config) == ("tuned", config)
    assert decide(ATTENTION, far, H200).source == "rule"
    choice.forget()


@pytest.mark.parametrize("changes", [{"kernel": "p1"}, {"kernel": "decode"}, {"revision": 4}], ids=str)
def test_entries_for_former_kernels_are_refused_with_a_remedy(changes: dict[str, Any]) -> None:
    raw = Entry(SELF, times(SELF, np.array([512]), H200)[0][0], 8.0, 10.0).as_json(ATTENTION)
    assert parse_entry(raw, ATTENTION, get_target("sm_90a")).problem == SELF
    with pytest.raises(ArgumentError, match=r"run `cudatma tune attention --shape 512x128"):
        parse_entry(raw | changes, ATTENTION, get_target("sm_90a"))


SMS = 132


def problem(**sizes: int) -> Problem:
    return Problem.of(head_dim=128, dtype="float16", is_causal=True, **sizes)


def causal(tile_m: int = 128, tile_n: int = 128) -> AttentionConfig:
    return small_config("a4", head_dim=128, v_head_dim=128, is_causal=True, tile_m=tile_m, tile_n=tile_n)


@pytest.mark.parametrize("length", [512, 1024, 2048, 4096, 16384])
@pytest.mark.parametrize(("tile_m", "tile_n"), [(128, 128), (192, 80)])
def test_sms_that_take_the_next_tile_end_together(length: int, tile_m: int, tile_n: int) -> None:
    config, asked = causal(tile_m, tile_n), problem(batch=16384 // length, heads=16, q_length=length)
    (heads, last), rows = raster(config, asked), 16 * 16384 // length
    ends = [min(length, row0 + tile_m) for row0 in range(0, length, tile_m)]
    blocks = [-(-end // tile_n) for end in reversed(ends)]
    busy = [0] * SMS
    for count in [*[heads] * (last // heads), rows - last]:
        for length_in_blocks in blocks:
            for _ in range(count):
                heapq.heapreplace(busy, busy[0] + length_in_blocks)
    assert max(busy) <= 1.04 * sum(busy) / SMS


@pytest.mark.parametrize("kv_heads", [1, 4, 16])
@pytest.mark.parametrize(("batch", "length"), [(1, 512), (9, 2048), (3, 16384), (1, 1 << 20)])
def test_keys_and_values_of_a_raster_group_are_few_bytes(batch: int, length: int, kv_heads: int) -> None:
    (heads, last), group = (
        raster(causal(), problem(batch=batch, heads=16, kv_heads=kv_heads, q_length=length)),
        16 // kv_heads,
    )
    assert heads % group == last % heads == 0
    assert heads == group or heads // group * length * 512 <= 4 << 20
    assert heads <= 16 * batch - last <= 4 * heads


def test_the_last_raster_group_has_more_heads() -> None:
    """With few heads in the last group, its longest tiles would come last and would be too few for all SMs."""
    assert raster(causal(), problem(batch=5, heads=7, q_length=2048)) == (4, 20)  # of 35
