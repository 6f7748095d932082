"""Candidates, short lists, choices and explanations: every candidate can run, and ranking them is cheap."""

from __future__ import annotations

import builtins
import json
import re
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from marlin_builders import skinny

from cudatma import backend
from cudatma.errors import ArgumentError, ArgumentTypeError, DriverError, LaunchError, TargetError, duration
from cudatma.kernels import choice, tuning
from cudatma.kernels.choice import shortlist, variants
from cudatma.kernels.cost import cheapest_first
from cudatma.kernels.explain import Explanation, plain_table, table_text
from cudatma.kernels.gpu import H200, Gpu, clusters_at_once, imagined_gpu
from cudatma.kernels.marlin import choose
from cudatma.kernels.marlin.candidates import MMA_SYNC_TILES, choose_mma_sync, dump_configs
from cudatma.kernels.marlin.choose import (
    MARLIN,
    choose_untuned,
    decide,
    marlin_explain,
    times,
)
from cudatma.kernels.marlin.config import LOAD_PATHS, MarlinConfig
from cudatma.kernels.marlin.linear import MarlinLinear
from cudatma.kernels.marlin.problem import LinearShape, Problem
from cudatma.kernels.schedule import PARTIALS_PER_SM_BYTES, ceil_div, schedule
from cudatma.kernels.tuning import Entry, GpuClass, parse_entry, store_entry
from cudatma.quantization import GROUP_SIZES, quantize
from cudatma.target import KIB, TARGETS, get_target

layers = st.builds(
    LinearShape,
    k=st.integers(1, 40_000),
    n=st.integers(1, 70_000),
    group_size=st.sampled_from(GROUP_SIZES),
    has_zeros=st.booleans(),
    dtype=st.sampled_from(("float16", "bfloat16")),
)
rows = st.one_of(st.integers(1, 300), st.integers(1, 10_000))
gpus = st.builds(
    imagined_gpu, st.sampled_from(("sm_90a", "sm_90", "sm_120a", "sm_121a")), st.sampled_from((1, 20, 84, 132, 188))
)


@given(layers, rows, gpus)
def test_every_candidate_can_run(layer: LinearShape, m: int, gpu: Gpu) -> None:
    target = get_target(gpu.target)
    found = [config for config, us in times(Problem(layer, 1), np.array([m]), gpu) if us[0] < np.inf]
    assert len({config.entry for config in found}) == len(found) > 0
    for config in found:
        config.check_target(target)
        assert (config.dtype, config.group_size, config.has_zeros) == (layer.dtype, layer.group_size, layer.has_zeros)
        assert config.smem_bytes <= target.smem_share_bytes(config.ctas_per_sm)
        assert config.ctas_per_sm * config.threads <= 1536, "SM120 holds 1536 threads an SM"
        assert config.partial_bytes * config.ctas_per_sm <= PARTIALS_PER_SM_BYTES
        assert config.version != "skinny" or layer.k % 64 == 0 or not config.deep_box
        assert ceil_div(layer.k, config.tile_k) >= config.cluster_k, "each CTA of a cluster has a stage"
        work = schedule(config, m, layer.n, layer.k, gpu.sm_count * config.ctas_per_sm)
        assert work.tiles_m * config.tile_m >= m
        assert work.tiles_n * config.tile_n * config.cluster >= layer.n
        clusters = work.tiles_n * (1 if config.version == "skinny" else work.tiles_m)
        assert config.cluster_k == 1 or clusters <= clusters_at_once(config.cluster_k, gpu.sm_count)


@given(layers, rows, gpus)
def test_the_cost_model_divides_tiles_where_the_schedule_does(layer: LinearShape, m: int, gpu: Gpu) -> None:
    """An exception is the wgmma kernel with several rows of tiles: its cost model was fitted before the schedule
    treated them differently."""
    for config, _ in cheapest_first(times, Problem(layer, m), gpu):
        cost = config.cost(Problem(layer, m), gpu)
        if config.cluster_k == 1 and not (config.version == "wgmma" and m > config.tile_m):
            work = schedule(config, m, layer.n, layer.k, gpu.sm_count * config.ctas_per_sm)
            assert bool(work.stream_tiles) == (cost.reduction_us > 0), config.entry


@given(layers, rows, gpus)
def test_a_short_list_has_the_choice_first_and_labels_that_differ(layer: LinearShape, m: int, gpu: Gpu) -> None:
    target = get_target(gpu.target)
    listed = shortlist(MARLIN, Problem(layer, m), gpu, 12)
    assert listed[0].config == choose_untuned(Problem(layer, m), gpu)
    assert len({one.label for one in listed}) == len({one.config for one in listed}) == len(listed) <= 12
    for one in listed:
        one.config.check_target(target)
        assert one.cost == one.config.cost(Problem(layer, m), gpu)
        # What the tuner measures, its file must hold and give back.
        entry = Entry(Problem(layer, m), one.config, 2.0, 3.0)
        assert parse_entry(entry.as_json(MARLIN), MARLIN, target) == entry


@given(layers, rows)
def test_variants_compute_the_same_tile(layer: LinearShape, m: int) -> None:
    config = choose_untuned(Problem(layer, m), H200)
    for other in variants(config, Problem(layer, m), get_target("sm_90a")):
        other.check_target(get_target("sm_90a"))
        assert other != config
        assert (other.tile_m, other.tile_n, other.tile_k) == (config.tile_m, config.tile_n, config.tile_k)


def test_rows_and_target_decide_which_kernels_there_are() -> None:
    def kinds(m: int, gpu: Gpu) -> set[str]:
        problem = Problem(LinearShape(4096, 4096, 128, False, "float16"), m)
        return {config.version for config, _ in cheapest_first(times, problem, gpu)}

    assert [kinds(m, H200) for m in (1, 16, 500)] == [{"skinny"}, {"skinny", "wgmma"}, {"wgmma"}]
    without = imagined_gpu("sm_120a", 132)
    assert [kinds(m, without) for m in (16, 500)] == [{"skinny", "mma_sync"}, {"mma_sync"}]


# ---- The mma.sync kernel alone

load_paths = st.fixed_dictionaries(
    {f"{operand}_load_path": st.sampled_from(LOAD_PATHS) for operand in ("weight", "scale", "activation")}
)


@given(layers, rows, gpus, load_paths)
def test_the_mma_sync_kernel_runs_on_every_target_by_every_load_path(
    layer: LinearShape, m: int, gpu: Gpu, paths: dict[str, str]
) -> None:
    config = choose_mma_sync(Problem(layer, m), gpu, **paths)
    assert config.smem_bytes <= 99 * KIB
    config.check_target(get_target(gpu.target))
    assert {name: getattr(config, name) for name in paths} == paths


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_dump_configs_hold_every_tile_and_every_feature(name: str) -> None:
    target = get_target(name)
    configs = dump_configs("mma_sync", target)
    assert dump_configs("mma_sync", target) == configs
    assert len(set(configs)) == len(configs) > 0
    for config in configs:
        config.check_target(target)
    for operand in ("weight", "scale", "activation"):
        assert {getattr(config, f"{operand}_load_path") for config in configs} == set(LOAD_PATHS)
    assert {config.dtype for config in configs} == {"float16", "bfloat16"}
    assert {config.has_zeros for config in configs} == {False, True}
    assert {32, 128, -1} <= {config.group_size for config in configs}
    tiles = {
        (tile.m, tile.n, tile.k, tile.warps_n, tile.slice_k)
        for tile in MMA_SYNC_TILES
        if not tile.registers or target.has_setmaxnreg
    }
    assert tiles <= {(s.tile_m, s.tile_n, s.tile_k, s.warps_n, s.slice_k) for s in configs}


# ---- Tables and menus


@given(layers, st.one_of(rows, st.integers(8000, 70_000)), gpus, st.booleans())
def test_all_ways_to_a_choice_agree(layer: LinearShape, m: int, gpu: Gpu, batch_invariant: bool) -> None:
    problem = Problem(layer, m, batch_invariant)
    table = choice.choice_table(MARLIN, problem, gpu, m)
    assert choice.choose(MARLIN, problem, gpu, {}) == decide(problem, gpu).config == table.at(m)
    assert table.at(m) in table.configs_up_to(m)


def test_the_table_that_ships_comes_before_the_menu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDATMA_TUNE_FILE", "/nowhere/tuned.json")
    layer = LinearShape(28672, 8192, 128, False, "float16")
    for m in range(1, 400):
        found, decision = tuning.lookup(MARLIN, Problem(layer, m), H200), decide(Problem(layer, m), H200)
        expected = choose_untuned(Problem(layer, m), H200) if found is None else found.entry.config
        assert (decision.source, decision.config) == ("rule" if found is None else "shipped", expected)


LLAMA = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096))


def menu_of(k: int, n: int, ms: Iterable[int], **layer: Any) -> set[MarlinConfig]:
    shape = replace(LinearShape(k, n, 128, False, "float16"), **layer)
    return {choose_untuned(Problem(shape, m), H200).in_form("as_stored") for m in ms}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_four_shapes_of_a_model_share_kernels(dtype: str) -> None:
    found = [menu_of(k, n, {*range(1, 257), *range(256, 8193, 8)}, dtype=dtype) for k, n in LLAMA]
    assert len(set.union(*found)) <= 48


@pytest.mark.parametrize(
    ("k", "n", "group_size", "has_zeros"),
    [
        *((k, n, 128, False) for k, n in LLAMA),
        (8192, 28672, 32, True),
        (18944, 3584, 64, False),
        (1000, 3000, -1, False),
        (4096, 1280, 128, True),
        (333, 777, 128, False),
    ],
)
def test_a_menu_has_few_kernels_and_loses_little(k: int, n: int, group_size: int, has_zeros: bool) -> None:
    """With a small N, a menu has more kernels from M = 256 upwards, because eight kernels would be more than 10 %
    slower."""
    layer = LinearShape(k, n, group_size, has_zeros, "float16")
    ms = np.array([*range(1, 256), *range(256, 8193, 13), 512, 1024, 2048, 4096, 8192])
    cheapest = np.min([us for _, us in times(Problem(layer, 1), ms, H200)], axis=0)
    chosen = [choose_untuned(Problem(layer, m), H200) for m in ms.tolist()]
    us = np.array([config.cost(Problem(layer, m), H200).us for config, m in zip(chosen, ms.tolist(), strict=True)])
    loss = us / cheapest - 1
    assert loss.min() >= 0
    assert loss[ms < 256].max() <= 0.05
    assert loss.max() <= 0.105
    assert loss[np.isin(ms, 2 ** np.arange(14))].max() <= 0.01
    assert np.exp(np.log1p(loss).mean()) <= 1.025
    assert len(set(chosen[:255])) <= 24
    assert len(set(chosen[255:])) <= (8 if n >= 3584 else 16)


# ---- Batch invariance


@pytest.mark.parametrize("name", ["sm_90", "sm_90a", "sm_120a"])
@given(layers, st.integers(1, 100_000), st.sampled_from((1, 20, 132)))
def test_a_batch_invariant_kernel_adds_in_one_order(name: str, layer: LinearShape, m: int, processors: int) -> None:
    target = get_target(name)
    config = choose_untuned(Problem(layer, m, True), imagined_gpu(target, processors))
    config.check_target(target)
    work = schedule(config, m, layer.n, layer.k, processors, divide=False)
    assert work.stream_tiles == 0
    assert work.ctas <= processors
    if config.version == "wgmma":
        assert config.slice_k == 1
    else:
        assert config.version == "mma_sync"
        assert config.slice_k == 1
        assert config.scale_on != "accumulator"


@given(layers, st.integers(1, 10_000), st.integers(1, 10_000))
def test_the_batch_invariant_kernel_does_not_depend_on_m(layer: LinearShape, few: int, many: int) -> None:
    kernels = {choose_untuned(Problem(layer, m, True), H200).template for m in (few, many)}
    assert len(kernels) == 1


# ---- Explanations


LAYER = LinearShape(4096, 4096, 128, False, "float16")
LARGE = LinearShape(8192, 28672, 128, False, "bfloat16")


def explained(layer: Any = LAYER, m: int = 16, **options: Any) -> Explanation:
    return marlin_explain(layer, m, **({"target": "sm_90a", "sm_count": 132} | options))


def test_a_prediction_for_another_division_says_so() -> None:
    """The cost model assumes the division of one row of tiles, but the schedule divides only the partial wave."""
    alone = explained(LinearShape(28672, 8192, 128, False, "bfloat16"), 4096)
    assert 0 < alone.launches[0].schedule.stream_tiles < alone.launches[0].schedule.work_ranges
    assert "; the prediction assumes the work division of a single row of tiles" in str(alone)
    whole = explained(LinearShape(16512, 20480, 128, False, "float16"), 1024)
    assert whole.launches[0].schedule.stream_tiles == 0 == whole.prediction.reduction_us
    assert "predicted as if" not in str(whole)
    assert "predicted as if" not in str(explained(LARGE, 128))


@pytest.mark.parametrize(
    ("layer", "m", "target", "kernel"),
    [(LAYER, 1, "sm_90a", "skinny"), (LAYER, 64, "sm_90a", "wgmma"), (LARGE, 512, "sm_120a", "mma_sync")],
)
def test_it_tells_the_choice_and_why(layer: LinearShape, m: int, target: str, kernel: str) -> None:
    said = explained(layer, m, target=target)
    assert said.kernel == kernel
    assert said.config.in_form("none") == choose_untuned(Problem(layer, m), imagined_gpu(target, 132))
    assert said.decision.source == "rule"
    us = duration(1e-6 * said.prediction.us)
    assert said.decision.why.endswith(f" for this shape; the cost model predicts {us}")
    assert said.considered >= len(said.candidates) > 1


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        ({"n": 0}, ArgumentError, r"n must be from 1 to.*got 0"),
        ({"k": -1}, ArgumentError, r"k must be from 1 to.*got -1"),
        ({"k": 2**31}, ArgumentError, r"k must be .*got 2147483648"),
        ({"k": "64"}, ArgumentTypeError, r"k must be int.*got '64'"),
        ({"group_size": 64.0}, ArgumentTypeError, r"group_size must be int.*got 64\.0"),
        ({"group_size": 100}, ArgumentError, r"group_size must be 32, 64, 128 or -1.*got 100"),
        ({"has_zeros": "x"}, ArgumentTypeError, r"has_zeros must be bool.*got 'x'"),
        ({"dtype": "int8"}, ArgumentTypeError, r"dtype must be float16 or bfloat16.*got int8"),
    ],
)
def test_a_layer_that_is_none_is_refused(wrong: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=f"^{said}"):
        replace(LAYER, **wrong)


def test_a_tuning_entry_is_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path, config = tmp_path / "tuned.json", skinny(tile_m=16, tile_n=32, tile_k=256, slice_k=4, stages=5)
    monkeypatch.setenv("CUDATMA_TUNE_FILE", str(path))
    store_entry(path, GpuClass.of(H200), MARLIN, Entry(Problem(LAYER, 16), config, 5.5, 5.9))
    choice.forget()
    said = explained(LAYER, 13)
    choice.forget()
    assert (said.decision.source, said.config) == ("tuned", config)
    gain = "5.50 us; the untuned choice took 5.90 us"
    assert f"{path} contains this problem, measured at M = 16: {gain}" in str(said)
    assert "marlin_skinny_f16_g128_16x32x256_k4_s5" in str(said)


def test_as_json() -> None:
    said = explained(LARGE, 200)
    data = json.loads(json.dumps(said.as_dict()))
    assert data["layer"] == asdict(LARGE)
    assert data["config"]["tile_m"] == said.config.tile_m
    assert data["kernel"] == "wgmma"
    assert data["entry"] == said.config.entry
    assert data["prediction"]["us"] == said.prediction.us
    terms = [data["prediction"][f"{term}_us"] for term in ("launch", "mainloop", "reduction", "memory", "tensor")]
    assert sum(terms) == pytest.approx(said.prediction.us)
    assert data["prediction"]["bound"] == said.prediction.bound
    assert data["launches"][0]["schedule"]["tiles_n"] == said.launches[0].schedule.tiles_n
    best = [one["us"] for one in data["candidates"]][:8]
    assert best == sorted(best)
    assert [one["label"] for one in data["candidates"] if one["chosen"]] == [said.config.entry]
    assert data["considered"] == said.considered


def test_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_has_usable_gpu", lambda: False)
    text = str(explained(LAYER, 1))
    lines = text.splitlines()
    assert lines[0] == "M = 1, K = 4096, N = 4096, int4 weights, float16, groups of 128, symmetric"
    assert lines[1].startswith("on sm_90a (assumed; this machine has no usable GPU), 132 SMs")
    assert " 0 s" not in text
    assert any(line.startswith("predicted  ") and "mainloop" in line for line in lines)
    marked = [line for line in lines if line.startswith("->")]
    assert len(marked) == 1, "the choice is among the candidates"
    assert re.search(rf"  skinny  +{explained(LAYER, 1).config.entry}$", marked[0])
    assert "\x1b" not in text
    assert all(len(line) <= 160 for line in lines)
    assert "zero points" in str(explained(LinearShape(512, 512, -1, True, "float16"), 4))


def test_without_rich_the_table_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [("->", "5.1", "memory"), ("", "12.5", "L2")]
    shown = plain_table("Title", ("", "us", "bound by"), rows)
    assert shown.splitlines() == ["Title", "    us    bound by", "->  5.1   memory", "    12.5  L2"]
    real = builtins.__import__

    def without_rich(name: str, *rest: Any) -> Any:
        if name.split(".")[0] == "rich":
            raise ImportError(name)
        return real(name, *rest)

    for name in [name for name in sys.modules if name.split(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without_rich)
    assert table_text("Title", ("", "us", "bound by"), rows) == shown


def test_it_takes_weights_and_linear_layers() -> None:
    packed = quantize(np.ones((256, 192), np.float32), group_size=64, symmetric=False)
    wanted = LinearShape(256, 192, 64, True, "float16")
    assert explained(packed, 3).problem.layer == explained(MarlinLinear(packed), 3).problem.layer == wanted


def test_without_a_gpu_an_h200_is_imagined(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> int:
        raise DriverError("cuInit", None, "no driver")

    monkeypatch.setattr(choose.context, "current_device", none)
    assert marlin_explain(LAYER, 1).gpu == H200
    monkeypatch.setenv("CUDATMA_TARGET", "sm_120a")
    assert marlin_explain(LAYER, 1).gpu.target == "sm_120a"
    assert marlin_explain(LAYER, 1, sm_count=20).gpu.sm_count == 20


def test_what_is_asked_for_wrongly() -> None:
    for m in (0, -1):
        with pytest.raises(ArgumentError, match=r"^m must be "):
            explained(LAYER, m)
    for wrong in (1.5, "4", True):
        with pytest.raises(ArgumentTypeError, match=r"^m must be "):
            explained(LAYER, wrong)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match=r"PackedWeight, cudatma\.MarlinLinear or LinearShape"):
        explained(np.ones((4, 4)))
    with pytest.raises(TargetError):
        explained(target="sm_75")
    with pytest.raises(ArgumentError, match="sm_count"):
        explained(sm_count=0)
    with pytest.raises(ArgumentError, match=r"^device must be "):
        explained(device=0)
    with pytest.raises((DriverError, LaunchError, TargetError)):
        marlin_explain(LAYER, 1, device=77)
