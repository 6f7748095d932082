"""The dense GEMM: versions, choice, tuning, and the loss compared with the fastest measured kernels."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_bench import FakeBench
from gemm_builders import config as config_of
from gemm_builders import problem
from gemm_builders import problem as problem_of
from marlin_builders import mma_sync
from measured_gpus import readings

from cudatma import gemm
from cudatma.context import Runtime, using_runtime
from cudatma.errors import ArgumentError, ArgumentTypeError, TargetError
from cudatma.kernels import choice, tuning
from cudatma.kernels.choice import choice_table, decide, shortlist
from cudatma.kernels.cost import cheapest_first
from cudatma.kernels.gemm.choose import GEMM, dump_configs, times
from cudatma.kernels.gemm.config import PRESETS, VERSIONS, WITH_BLOCK_SCALES, GemmConfig
from cudatma.kernels.gemm.gemm import gemm_explain
from cudatma.kernels.gemm.problem import LAYOUTS, Problem
from cudatma.kernels.gemm.sample import sample
from cudatma.kernels.gpu import H200, Gpu, clusters_at_once, imagined_gpu
from cudatma.kernels.tuning import Entry, GpuClass, parse_entry, pinned, store_entry
from cudatma.target import get_target
from tools import dump_kernels, tune

SM90A = get_target("sm_90a")

# ---- Versions


def test_who_asks_for_a_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The call takes precedence over the environment, and the environment over the file. Errors name the source."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("CUDATMA_GEMM_VERSION", raising=False)

    def found() -> tuple[str, str]:
        with using_runtime(Runtime()):
            return VERSIONS.chosen("auto")

    assert found() == ("", "")
    mine, here = tmp_path / "home" / "cudatma" / "cudatma.toml", tmp_path / "cudatma.toml"
    mine.parent.mkdir(parents=True)
    mine.write_text('[gemm]\nversion = "v3"\n')
    assert found() == ("v3", str(mine))
    here.write_text('[gemm]\nversion = "mma_sync"\n')
    assert found() == ("mma_sync", str(here))
    monkeypatch.setenv("CUDATMA_GEMM_VERSION", "v4")
    assert found() == ("v4", "$CUDATMA_GEMM_VERSION")
    assert VERSIONS.chosen("v5") == ("v5", "the call")
    monkeypatch.setenv("CUDATMA_GEMM_VERSION", "auto")
    assert found() == ("", "$CUDATMA_GEMM_VERSION")
    monkeypatch.setenv("CUDATMA_GEMM_VERSION", "4")
    with pytest.raises(ArgumentError, match=r"^CUDATMA_GEMM_VERSION must be .*got '4'"):
        found()
    for former in (4, "p1"):
        with pytest.raises(ArgumentError, match=r'^version must be "auto", "v1", .* or "mma_sync", got '):
            VERSIONS.chosen(former)
    monkeypatch.delenv("CUDATMA_GEMM_VERSION")
    for text, field in (
        ("[gemm]\nversion = 3\n", "gemm.version must be .*got 3"),
        ("gemm = 3\n", "gemm"),
        ("[gemm", "TOML"),
        ("[gem]\nversion = 3\n", r"section name must be gemm or attention, got gem "),
        ("version = 3\n", "section name must be .*got version"),
        ("[gemm]\nVersion = 3\n", r"key in \[gemm\] must be version, got Version"),
    ):
        here.write_text(text)
        with pytest.raises(ArgumentError, match=field):
            found()
    here.unlink()
    monkeypatch.setenv("XDG_CONFIG_HOME", "/dev/null")
    assert found() == ("", "")


def test_a_version_without_a_kernel_is_blamed_on_who_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = np.zeros((40, 64), np.float16), np.zeros((64, 24), np.float16)
    monkeypatch.setenv("CUDATMA_GEMM_VERSION", "v6")
    for call in (gemm, gemm_explain):
        with pytest.raises(
            ArgumentError, match=r"^version of \$CUDATMA_GEMM_VERSION must be .*got v6; .* pass the version argument"
        ):
            call(a, b, backend="emulator")
        with pytest.raises(ArgumentError, match=r'^version must be .*got v6; .* version="auto"'):
            call(a, b, backend="emulator", version="v6")


def test_an_explanation_names_who_asked() -> None:
    a, b = np.zeros((64, 4096), np.float16), np.zeros((4096, 4096), np.float16)
    said = gemm_explain(a, b, version="v2")
    assert (said.kernel, said.config.layout, said.decision.why) == ("v2", "RR", "version v2 is selected by the call")
    free = gemm_explain(a, b.T)
    assert (free.config.layout, free.decision.source) == ("RC", "rule")
    assert f"gemm_{free.config.version}_" in str(free)


# ---- Choosing


PROBLEM = problem_of()


@pytest.mark.parametrize(("dtype", "layout"), [("float16", "RC"), ("bfloat16", "RR"), ("float16", "CR")])
@pytest.mark.parametrize("m", [1, 129, 5000])
@pytest.mark.parametrize(("n", "k"), [(8, 8), (4096, 4096), (28672, 8192)])
def test_every_candidate_can_run_and_the_cheapest_comes_first(m: int, n: int, k: int, dtype: str, layout: str) -> None:
    problem = problem_of(m=m, n=n, k=k, dtype=dtype, layout=layout)
    found = cheapest_first(times, problem, H200)
    assert len({config.entry for config, _ in found}) == len(found) > 0
    for config, us in found:
        config.check(problem, SM90A)
        assert (config.dtype, config.layout) == (dtype, layout)
        assert us == pytest.approx(config.cost(problem, H200).us)
    assert decide(GEMM, problem, H200).source == "rule"
    for name in PRESETS:
        if name != "v6" or k >= 128:  # a stage cannot be divided
            assert decide(GEMM, replace(problem, version=name), H200).config.version == name


@pytest.mark.parametrize("name", ["sm_90", "sm_100a", "sm_120a"])
def test_a_version_by_wgmma_names_a_target_without_it_as_the_cause(name: str) -> None:
    said = rf"a target with wgmma \(sm_90a\), got {name}; choose another target for version v3 of gemm"
    with pytest.raises(TargetError, match=rf"^target must be {said}"):
        decide(GEMM, replace(PROBLEM, version="v3"), imagined_gpu(name, 132))
    with pytest.raises(TargetError, match="wgmma"):
        sample("v3", get_target(name))
    assert dump_configs("v3", get_target(name)) == []


@pytest.mark.parametrize("name", ["sm_90", "sm_120a", "sm_121a"])
@pytest.mark.parametrize("m", [1, 300, 8192])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_wgmma_mma_sync_is_chosen(layout: str, m: int, name: str) -> None:
    problem, gpu, target = replace(PROBLEM, m=m, layout=layout), imagined_gpu(name, 48), get_target(name)
    found = cheapest_first(times, problem, gpu)
    assert found
    for config, _ in found:
        assert config.version == "mma_sync"
        config.check(problem, target)
    assert decide(GEMM, problem, gpu).config.version == "mma_sync"


def test_with_wgmma_mma_sync_is_chosen_on_request_only() -> None:
    for m in (1, 128, 8192):
        problem = replace(PROBLEM, m=m)
        assert all(config.version != "mma_sync" for config, _ in cheapest_first(times, problem, H200))
        asked = decide(GEMM, replace(problem, version="mma_sync"), H200)
        assert (asked.config.version, asked.why) == ("mma_sync", "version mma_sync is selected")


def test_ctas_that_share_an_sm_share_its_shared_memory() -> None:
    config = config_of("mma_sync", tile_m=128, tile_n=128, tile_k=64, stages=4, ctas_per_sm=2)
    with pytest.raises(
        ArgumentError,
        match=r"^stages must be small enough for the ring to fit in .* for each of 2 CTAs on an SM, got 4",
    ):
        config.check_target(SM90A)
    replace(config, stages=3).check_target(SM90A)


def test_warps_divide_a_tile_by_mma_sync() -> None:
    for config in dump_configs("mma_sync", SM90A):
        assert (config.warps_m * config.warp_m, config.warps_n * config.warp_n) == (config.tile_m, config.tile_n)
        assert config.warps_m * config.warps_n == config.consumer_warps
        assert config.warp_m % 16 == config.warp_n % 32 == 0


@pytest.mark.parametrize("version", PRESETS)
def test_the_dumped_configurations_are_every_tile_layout_and_dtype(version: str) -> None:
    configs = dump_configs(version, SM90A)
    assert len(set(configs)) == len(configs)
    free = replace(PROBLEM, version=version)
    tiles = {(config.tile_m, config.tile_n, config.tile_k) for config, _ in cheapest_first(times, free, H200)}
    assert {(config.tile_m, config.tile_n, config.tile_k) for config in configs} >= tiles
    assert {config.dtype for config in dump_configs(version, get_target("sm_120a")) + configs} >= {
        "float16",
        "bfloat16",
        "float8_e4m3fn",
    }
    assert {config.out_dtype for config in configs} >= {"", "float32"}
    assert any(config.block_scales for config in configs) == (version in WITH_BLOCK_SCALES)
    assert {config.layout for config in configs} == set(LAYOUTS)
    assert all(config.entry.startswith(f"gemm_{version}_") for config in configs)


@pytest.mark.parametrize(
    ("version", "fields", "error"),
    [
        ("v5", {"dtype": "float32"}, "dtype must be .*got float32"),
        ("v5", {"layout": "rc"}, "layout must be .*got rc"),
        ("v5", {"tile_m": 96}, "tile_m must be .*got 96"),
        ("v5", {"tile_m": 64.0, "warpgroups": 1}, r"tile_m must be .*got 64\.0"),
        ("v5", {"tile_n": 100}, "tile_n must be .*got 100"),
        ("v5", {"warpgroups": 4}, "warpgroups must be .*got 4"),
        ("v5", {"stages": 1}, "stages must be .*got 1"),
        ("v5", {"stages": True}, "stages must be .*got True"),
        ("v5", {"cluster_m": 1}, r"cluster_m, cluster_n must be \(2, 1\) for version v5 with a tile.*got \(1, 1\)"),
        ("v4", {"cluster_n": 2}, r"cluster_m, cluster_n must be \(1, 1\) for version v4.*got \(1, 2\)"),
        ("v4", {"tile_m": 128, "warpgroups": 3}, "tile_m must be a multiple of 192.*got 128"),
        ("v4", {"tile_k": 64, "dtype": "float8_e5m2"}, "tile_k must be a multiple of 128.*got 64"),
        ("v6", {"tile_n": 192}, "tile_n must be .*got 192"),  # the CTAs of a cluster could not share the columns evenly
        ("v6", {"cluster_k": 8}, "cluster_k must be 2 or 4.*got 8"),
        (
            "mma_sync",
            {"tile_m": 128, "tile_n": 256},
            r"warpgroups must be at least 2 \(a thread holds at most 128 accumulators.*got 1",
        ),
        # ptxas gives each thread of 13 warps 128 registers.
        ("v3", {"tile_m": 192, "tile_n": 208}, "tile_n must be at most 192 for three warpgroups.*got 208"),
        ("v4", {"tile_m": 192, "tile_n": 208}, "tile_n must be at most 192 for three warpgroups.*got 208"),
        (
            "v3",
            {"dtype": "float8_e4m3fn", "block_scales": True},
            'version must be "v4" or "v5" for block scales.*got v3',
        ),
        (
            "v4",
            {"dtype": "float8_e4m3fn", "block_scales": True, "tile_n": 256},
            "tile_n must be 64 or 128 for block scales, got 256",
        ),
        (
            "v4",
            {"dtype": "float8_e4m3fn", "block_scales": True, "tile_n": 128, "tile_k": 256},
            "tile_k must be 128 for block scales, got 256",
        ),
    ],
)
def test_what_a_configuration_refuses(version: str, fields: dict[str, Any], error: str) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError), match=f"^{error}"):
        config_of(version, **fields)


def test_version_v6_is_not_batch_invariant() -> None:
    problem = replace(PROBLEM, batch_invariant=True)
    with pytest.raises(ArgumentError, match=r"^version must be a version with a kernel for .*batch-invariant.*got v6"):
        decide(GEMM, replace(problem, version="v6"), H200)
    with (
        pinned(config_of("v6")),
        pytest.raises(ArgumentError, match=r"batch_invariant must be .*got True"),
    ):
        decide(GEMM, problem, H200)


def test_fp8_needs_tensor_cores_for_it() -> None:
    problem = problem_of(dtype="float8_e4m3fn")
    assert decide(GEMM, problem, imagined_gpu("sm_120a", 48)).config.version == "mma_sync"
    for name in ("sm_90", "sm_100a"):
        with pytest.raises(TargetError, match=rf"^target must be a target with mma_sync_fp8.*got {name}"):
            decide(GEMM, problem, imagined_gpu(name, 48))
    with pytest.raises(TargetError, match="mma_sync_fp8"):
        decide(GEMM, replace(problem, version="mma_sync"), H200)


@pytest.mark.parametrize(
    ("field", "value"), [("m", 0), ("n", 2**31), ("k", 8.0), ("m", True), ("dtype", "int8"), ("layout", "")]
)
def test_what_a_problem_refuses(field: str, value: Any) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError)) as caught:
        Problem(**{**PROBLEM.as_json(), field: value})
    assert caught.value.field == field


def test_what_is_pinned_serves_its_own_family_only() -> None:
    own = config_of("v4")
    with pinned(own):
        assert decide(GEMM, PROBLEM, H200).config is own
    with pinned(mma_sync(tile_m=8, tile_n=128, tile_k=256, warps_n=4, stages=4, scale_on="accumulator")):
        assert decide(GEMM, PROBLEM, H200).source == "rule"


def test_what_is_pinned_must_fit_the_problem() -> None:
    with (
        pinned(config_of("v3", dtype="bfloat16")),
        pytest.raises(ArgumentError, match=r"pinned config: dtype must be .*got bfloat16"),
    ):
        decide(GEMM, PROBLEM, H200)
    large = config_of("v3", tile_m=256, tile_n=128, stages=8)
    with pinned(large), pytest.raises(ArgumentError, match=r"stages must be .*got 8"):
        decide(GEMM, PROBLEM, H200)
    with pytest.raises(ArgumentTypeError, match=r"config must be .*got str"), pinned("wgmma"):
        pass


@pytest.mark.parametrize("field", ["block_scales", "scales_by_tma", "batch_invariant"])
def test_a_flag_must_be_a_bool(field: str) -> None:
    """A damaged tuning entry contains such values."""
    with pytest.raises(ArgumentTypeError, match=f"{field} must be bool.*got list"):
        problem_of(**{field: []})


# ---- The tuner's parts, which know no family


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Use a user's file that does not exist yet, and no shipped table."""
    path = tmp_path / "tuned.json"
    monkeypatch.setenv("CUDATMA_TUNE_FILE", str(path))
    monkeypatch.setattr(tuning, "shipped", lambda family: None)
    choice.forget()
    yield path
    choice.forget()


MEASURED = config_of("v3", tile_n=128, stages=5)
GPU = GpuClass.of(H200)


def test_a_problem_and_its_entry_go_through_json() -> None:
    assert Problem.from_json(PROBLEM.as_json()) == PROBLEM
    for one in shortlist(GEMM, PROBLEM, H200, 8):
        entry = Entry(PROBLEM, one.config, 8.0, 10.0)
        assert parse_entry(entry.as_json(GEMM), GEMM, SM90A) == entry


def test_a_file_holds_the_entries_of_several_families(file: Path) -> None:
    class Other(Problem):
        """A problem of another family with the same fields."""

    other = replace(GEMM, name="other", read_problem=Other.from_json)
    theirs: Entry[Problem, GemmConfig] = Entry(Other(**PROBLEM.as_json()), replace(MEASURED, stages=4), 7.0, 10.0)
    store_entry(file, GPU, GEMM, Entry(PROBLEM, MEASURED, 8.0, 10.0))
    store_entry(file, GPU, other, theirs)
    ours, found = tuning.lookup(GEMM, PROBLEM, H200), tuning.lookup(other, theirs.problem, H200)
    assert ours is not None
    assert found is not None
    assert (ours.entry.config, found.entry.config) == (MEASURED, theirs.config)


def test_tuning_measures_it_and_later_calls_follow(file: Path) -> None:
    wanted = shortlist(GEMM, replace(PROBLEM, dtype="bfloat16"), H200, 12)[2].config
    bench = FakeBench(lambda one: 5.0 if one.config == wanted else 9.0)
    shape = ["gemm", "--shape", f"{PROBLEM.k}x{PROBLEM.n}", "--m", str(PROBLEM.m), "--dtype", "bfloat16", "--jobs", "1"]
    assert tune.main(shape, bench=bench, gpu=H200) == 0
    assert bench.prepared == [replace(PROBLEM, dtype="bfloat16")]
    choice.forget()
    decision = decide(GEMM, bench.prepared[0], H200)
    assert (decision.source, decision.config) == ("tuned", wanted)
    with pytest.raises(
        ArgumentError, match=r"--zeros must be an option of gemm \(--dtype, --layout.*got an option of marlin"
    ):
        tune.main([*shape, "--zeros"], bench=bench, gpu=H200)


def test_the_kernel_of_a_problem_is_dumped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--m", str(PROBLEM.m), "--n", str(PROBLEM.n), "--k", str(PROBLEM.k), "--dtype", "bfloat16"]
    dump = ["gemm", *sizes, "--target", "sm_90a", "--no-sass", "--json", "--out", str(tmp_path)]
    assert dump_kernels.main(dump) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert report["name"] == f"{decide(GEMM, replace(PROBLEM, dtype='bfloat16'), H200).config.entry}_sm_90a"


@pytest.mark.parametrize(("m", "n", "ctas"), [(4096, 4096, 128), (2048, 2304, 72), (1024, 128, 8)])
def test_persistent_ctas_are_as_few_as_need_no_more_turns(m: int, n: int, ctas: int) -> None:
    """On 132 SMs, 512, 144 and 8 tiles take 4, 2 and 1 turns."""
    assert config_of("v4", tile_m=128, tile_n=256).divide_tiles(problem_of(m=m, n=n), 132).ctas == ctas


@pytest.mark.parametrize(("k", "version"), [(1536, "v7"), (7168, "v4")])
def test_short_k_has_a_tile_for_each_warpgroup(k: int, version: str) -> None:
    problem = problem_of(m=4096, n=24576, k=k, dtype="float8_e4m3fn", epilogue="linear")
    assert decide(GEMM, problem, H200).config.version == version


@pytest.mark.parametrize(("m", "n"), [(1, 2048), (64, 2048), (128, 1024), (256, 1024)])
def test_clusters_run_at_the_same_time(m: int, n: int) -> None:
    """An H200 has room for 30 clusters of four CTAs, not 33."""
    problem = problem_of(m=m, n=n)
    config = decide(GEMM, problem, H200).config
    assert config.version == "v6"
    assert config.divide_tiles(problem, 132).ctas <= config.cluster_k * clusters_at_once(config.cluster_k, 132)


def test_one_sm_is_enough_to_choose() -> None:
    assert decide(GEMM, PROBLEM, imagined_gpu("sm_90a", 1)).config.tile_m in (64, 128, 256)


FP8 = "float8_e4m3fn"
#: With candidates of every version, and tiles that serve at some M only.
SHAPES = (
    problem(m=1),
    problem(m=1, n=1000, k=3000, layout="CC"),
    problem(m=1, n=128, k=128, dtype="bfloat16", layout="CR", batch=8),
    problem(m=1, n=28672, k=8192, layout="RR", epilogue="gelu", out_dtype="float32"),
    problem(m=1, n=2048, k=7168, dtype=FP8),
    problem(m=1, n=7168, k=16384, dtype=FP8, block_scales=True, scales_by_tma=True),
    problem(m=1, version="mma_sync"),
)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.description)
def test_times_at_many_m_are_the_costs_at_each(shape: Problem) -> None:
    ms = [1, 7, 64, 65, 300, 1000, 5000]
    for config, us in times(shape, np.array(ms), H200):
        costs = np.array([config.cost(replace(shape, m=m), H200).us for m in ms])
        np.testing.assert_allclose(us, np.where(np.isfinite(us), costs, np.inf), rtol=1e-9)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.description)
def test_few_kernels_serve_small_m_and_none_loses_3_percent(shape: Problem) -> None:
    table = choice_table(GEMM, shape, H200, 8192)
    ms = np.array([*range(1, 256, 8), *range(257, 8192, 64)])
    by_spec = dict(times(shape, ms, H200))
    cheapest = np.min(list(by_spec.values()), axis=0)
    for index, m in enumerate(ms.tolist()):
        assert by_spec[table.at(m)][index] <= 1.03 * cheapest[index], m
    assert len(table.configs_up_to(255)) <= 24


def lost(measured: Problem, gpu: Gpu, us: dict[str, float]) -> float:
    """Return the time of the measured kernel that the model ranks first, divided by the time of the fastest one."""
    entry = next(config.entry for config, _ in cheapest_first(times, measured, gpu) if config.entry in us)
    return us[entry] / min(us.values())


@pytest.mark.parametrize(
    ("name", "most", "average"),
    [("gemm.json", 1.04, 1.005), ("gemm_h200.json", 1.04, 1.005), ("gemm_waves.json", 1.1, 1.01)],
)
def test_the_choice_loses_little_against_the_versions(name: str, most: float, average: float) -> None:
    """Each version has the tile with which it was measured (cudatma bench gemm). If `auto` and a version are the same
    kernel, the mean of the two measurements counts."""
    found, of_few_rows = [], []
    cells, gpu = readings(name)
    for cell in cells:
        measured = Problem(**{name: cell[name] for name in ("m", "n", "k", "dtype", "layout")})
        times: dict[str, list[float]] = {}
        for preset, entry in cell["entries"].items():
            times.setdefault(entry, []).append(cell["us"][preset])
        us = {entry: sum(each) / len(each) for entry, each in times.items()}
        found.append(lost(measured, gpu, us))
        if measured.m <= 128:
            of_few_rows.append(found[-1])
    assert max(found) < most
    assert sum(found) / len(found) < average
    assert sum(of_few_rows) <= 1.005 * len(of_few_rows)


@pytest.mark.parametrize(
    ("name", "most", "mean"),
    [
        ("gemm_tiles.json", 1.12, 1.012),
        ("gemm_middle.json", 1.08, 1.01),
        ("gemm_tiles_h100.json", 1.14, 1.013),
        ("gemm_few_rows.json", 1.03, 1.01),
        ("gemm_block_scales_tiles.json", 1.1, 1.012),
    ],
)
def test_the_choice_loses_little_against_every_tile(name: str, most: float, mean: float) -> None:
    """The products are small, odd, middle-sized (some with rows that split sectors) and large, have few rows, or have
    block scales."""
    found = []
    cells, gpu = readings(name)
    for cell in cells:
        us = cell.pop("us")
        found.append(lost(Problem(**cell), gpu, us))
    assert max(found) < most
    assert sum(found) / len(found) < mean


def test_a_second_shape_of_a_kind_builds_no_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates depend only on dtype, layout, epilogue and GPU, and are cached."""
    ms, built = np.array([1, 300]), []
    check = GemmConfig.__post_init__
    monkeypatch.setattr(GemmConfig, "__post_init__", lambda config: (built.append(config), check(config)))
    kind = {"m": 1, "dtype": "bfloat16", "layout": "CC", "epilogue": "silu"}
    first = times(problem(n=1504, k=1216, **kind), ms, H200)
    built.clear()
    second = times(problem(n=3008, k=2432, **kind), ms, H200)
    assert [config for config, _ in second] == [config for config, _ in first]
    assert not built
