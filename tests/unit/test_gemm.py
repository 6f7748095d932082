"""The dense GEMM: versions, what choosing and tuning do with a family."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_bench import FakeBench

from cudatma import gemm
from cudatma.errors import ArgumentError, ArgumentTypeError, TargetError
from cudatma.kernels import choice_table, overrides, version
from cudatma.kernels.choosing import decide, pinned, shortlist
from cudatma.kernels.cost import cheapest_first
from cudatma.kernels.gemm.choose import GEMM, dump_specs, times
from cudatma.kernels.gemm.gemm import gemm_explain
from cudatma.kernels.gemm.p1 import TILES, GemmP1
from cudatma.kernels.gemm.problem import LAYOUTS, Problem, kernel_name
from cudatma.kernels.gemm.sample import v3_sample
from cudatma.kernels.gemm.spec import GemmSpec
from cudatma.kernels.gemm.versions import VERSIONS, GemmV2, GemmV3, GemmV4, GemmV5, GemmV6, chosen_version
from cudatma.kernels.gpu import H200, clusters_at_once, imagined_gpu
from cudatma.kernels.marlin.mma_sync import MmaSyncSpec
from cudatma.kernels.tuning_file import Entry, GpuClass, parse_entry, store_entry
from cudatma.target import get_target
from tools import dump_kernels, tune

SM90A = get_target("sm_90a")

# ---- Versions


def test_who_asks_for_a_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The call before the environment, and that before the file; each is named where it is wrong."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("CUDATMA_GEMM_VERSION", raising=False)

    def found() -> tuple[int | str, str]:
        version._file.cache_clear()
        return chosen_version("auto")

    assert found() == (0, "")
    mine, here = tmp_path / "home" / "cudatma" / "cudatma.toml", tmp_path / "cudatma.toml"
    mine.parent.mkdir(parents=True)
    mine.write_text("[gemm]\nversion = 3\n")
    assert found() == (3, str(mine))
    here.write_text("[gemm]\nversion = 2\n")
    assert found() == (2, str(here))
    here.write_text('[gemm]\nversion = "p1"\n')
    assert found() == ("p1", str(here))
    monkeypatch.setenv("CUDATMA_GEMM_VERSION", "4")
    assert found() == (4, "$CUDATMA_GEMM_VERSION")
    assert chosen_version(5) == (5, "the call")
    assert chosen_version("p1") == ("p1", "the call")
    monkeypatch.setenv("CUDATMA_GEMM_VERSION", "p1")
    assert found() == ("p1", "$CUDATMA_GEMM_VERSION")
    monkeypatch.setenv("CUDATMA_GEMM_VERSION", "auto")
    assert found() == (0, "$CUDATMA_GEMM_VERSION")
    monkeypatch.setenv("CUDATMA_GEMM_VERSION", "six")
    with pytest.raises(ArgumentError, match=r"^CUDATMA_GEMM_VERSION: got 'six'; allowed"):
        found()
    monkeypatch.delenv("CUDATMA_GEMM_VERSION")
    for text, field in (
        ("[gemm]\nversion = '3'\n", "gemm.version"),
        ("gemm = 3\n", "gemm"),
        ("[gemm", "TOML"),
        ("[gem]\nversion = 3\n", r"gem: got an unknown name; allowed: \[gemm\]"),
        ("version = 3\n", "version: got an unknown"),
        ("[gemm]\nVersion = 3\n", r"gemm\.Version: got an unknown name; allowed: version"),
    ):
        here.write_text(text)
        with pytest.raises(ArgumentError, match=field):
            found()
    here.unlink()
    monkeypatch.setenv("XDG_CONFIG_HOME", "/dev/null")
    assert found() == (0, "")
    version._file.cache_clear()


def test_a_version_without_a_kernel_is_blamed_on_who_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = np.zeros((40, 64), np.float16), np.zeros((64, 24), np.float16)
    monkeypatch.setenv("CUDATMA_GEMM_VERSION", "6")
    for call in (gemm, gemm_explain):
        with pytest.raises(ArgumentError, match=r"^version of \$CUDATMA_GEMM_VERSION: got 6; .* pass one as version="):
            call(a, b, backend="emulator")
        with pytest.raises(ArgumentError, match=r'^version: got 6; .* version="auto"'):
            call(a, b, backend="emulator", version=6)


def test_an_explanation_names_who_asked() -> None:
    a, b = np.zeros((64, 4096), np.float16), np.zeros((4096, 4096), np.float16)
    said = gemm_explain(a, b, version=2)
    assert (said.spec.version, said.spec.layout, said.decision.why) == (2, "RR", "version 2 is asked for by the call")
    free = gemm_explain(a, b.T)
    assert (free.spec.layout, free.decision.source) == ("RC", "rule")
    assert f"gemm_v{free.spec.version}" in str(free)


# ---- Choosing


PROBLEM = Problem(100, 4096, 4096, "float16", "RC")


@pytest.mark.parametrize(("dtype", "layout"), [("float16", "RC"), ("bfloat16", "RR"), ("float16", "CR")])
@pytest.mark.parametrize("m", [1, 64, 129, 300, 5000])
@pytest.mark.parametrize(("n", "k"), [(8, 8), (4096, 4096), (28672, 8192)])
def test_every_candidate_can_run_and_the_cheapest_comes_first(m: int, n: int, k: int, dtype: str, layout: str) -> None:
    problem = Problem(m, n, k, dtype, layout)
    found = cheapest_first(times, problem, H200)
    assert len({spec.entry for spec, _ in found}) == len(found) > 0
    for spec, us in found:
        spec.check(problem, SM90A)
        assert (spec.dtype, spec.layout) == (dtype, layout)
        assert us == pytest.approx(spec.cost(problem, H200).us)
    assert decide(GEMM, problem, H200).source == "rule"
    for number, kind in VERSIONS.items():
        if number == 6 and k < 128:  # a stage cannot be divided
            continue
        assert isinstance(decide(GEMM, replace(problem, version=number), H200).spec, kind)


@pytest.mark.parametrize("name", ["sm_90", "sm_100a", "sm_120a"])
def test_a_version_of_the_ladder_names_a_target_without_wgmma_as_the_cause(name: str) -> None:
    allowed = r"a target with wgmma \(sm_90a\)\. version 3 of gemm needs it"
    with pytest.raises(TargetError, match=rf"^target: got {name}; allowed: {allowed}"):
        decide(GEMM, replace(PROBLEM, version=3), imagined_gpu(name, 132))
    with pytest.raises(TargetError, match="wgmma"):
        v3_sample(get_target(name))
    assert dump_specs(3, get_target(name)) == []


@pytest.mark.parametrize("name", ["sm_90", "sm_120a", "sm_121a"])
@pytest.mark.parametrize("m", [1, 300, 8192])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_wgmma_p1_is_chosen(layout: str, m: int, name: str) -> None:
    problem, gpu, target = replace(PROBLEM, m=m, layout=layout), imagined_gpu(name, 48), get_target(name)
    found = cheapest_first(times, problem, gpu)
    assert found
    for spec, _ in found:
        assert isinstance(spec, GemmP1)
        spec.check(problem, target)
    assert isinstance(decide(GEMM, problem, gpu).spec, GemmP1)


def test_with_wgmma_p1_is_chosen_on_request_only() -> None:
    for m in (1, 128, 8192):
        problem = replace(PROBLEM, m=m)
        assert not any(isinstance(spec, GemmP1) for spec, _ in cheapest_first(times, problem, H200))
        asked = decide(GEMM, replace(problem, version="p1"), H200)
        assert isinstance(asked.spec, GemmP1)
        assert asked.why == "version p1 is asked for"


def test_a_p1_tile_of_more_than_64_x_64_for_a_warp_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"^warpgroups: got 1; allowed: 2: a thread holds at most 128 sums"):
        GemmP1("float16", "RC", 128, 256, warpgroups=1)


def test_ctas_that_share_an_sm_share_its_shared_memory() -> None:
    spec = GemmP1("float16", "RC", 128, 128, 64, 4, 1, blocks_per_sm=2)
    with pytest.raises(ArgumentError, match=r"^stages: got 4; allowed: stages of at most"):
        spec.check_target(SM90A)
    replace(spec, stages=3).check_target(SM90A)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_the_warps_of_p1_divide_its_tile(tile: tuple[int, ...]) -> None:
    block_m, block_n, block_k, warpgroups, blocks_per_sm = tile
    spec = GemmP1("float16", "RC", block_m, block_n, block_k, 2, warpgroups, blocks_per_sm=blocks_per_sm)
    assert (spec.warps_m * spec.warp_m, spec.warps_n * spec.warp_n) == (spec.block_m, spec.block_n)
    assert spec.warps_m * spec.warps_n == spec.consumer_warps
    assert spec.warp_m % 16 == spec.warp_n % 32 == 0


@pytest.mark.parametrize("number", VERSIONS)
def test_the_dumped_instances_are_every_tile_layout_and_dtype(number: int | str) -> None:
    specs = dump_specs(number, SM90A)
    assert len(set(specs)) == len(specs)
    free = replace(PROBLEM, version=number)
    tiles = {(spec.block_m, spec.block_n, spec.block_k) for spec, _ in cheapest_first(times, free, H200)}
    assert {(spec.block_m, spec.block_n, spec.block_k) for spec in specs} >= tiles
    assert {spec.dtype for spec in dump_specs(number, get_target("sm_120a")) + specs} >= {
        "float16",
        "bfloat16",
        "float8_e4m3fn",
    }
    assert {spec.out_dtype for spec in specs} >= {"", "float32"}
    assert any(spec.block_scales for spec in specs) == VERSIONS[number].scales_blocks
    assert {spec.layout for spec in specs} == set(LAYOUTS)
    assert all(spec.entry.startswith(f"gemm_{kernel_name(number)}_") for spec in specs)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "float32"), ("layout", "rc"), ("block_m", 96), ("block_m", 64.0), ("block_n", 100), ("warpgroups", 4),
        ("stages", 1), ("stages", True), ("cluster", 3),
    ],
)  # fmt: skip
def test_what_a_spec_refuses(field: str, value: Any) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError)) as caught:
        GemmV5(**{"dtype": "float16", "layout": "RC", field: value})
    assert caught.value.field == field


def test_three_warpgroups_beside_a_producer_have_few_registers() -> None:
    """ptxas gives each thread of 13 warps 128."""
    for kind in (GemmV3, GemmV4):
        kind("float16", "RC", 192, 192, warpgroups=3)
        with pytest.raises(ArgumentError, match=r"^block_n: got 208; allowed: at most 192 for three warpgroups"):
            kind("float16", "RC", 192, 208, warpgroups=3)
    GemmV2("float16", "RC", 192, 256, warpgroups=3)


@pytest.mark.parametrize(("field", "value"), [("block_n", 192), ("cluster_k", 1), ("cluster_k", 8)])
def test_what_version_6_refuses(field: str, value: int) -> None:
    """Columns that the CTAs of a cluster could not share evenly."""
    with pytest.raises(ArgumentError) as caught:
        GemmV6(**{"dtype": "float16", "layout": "RC", "block_m": 64, "warpgroups": 1, field: value})
    assert caught.value.field == field


def test_version_6_is_not_batch_invariant() -> None:
    problem = replace(PROBLEM, batch_invariant=True)
    with pytest.raises(ArgumentError, match=r"^version: got 6; allowed: one with a kernel for .*batch-invariant"):
        decide(GEMM, replace(problem, version=6), H200)
    with (
        pinned(GemmV6("float16", "RC", 64, 128, 64, 4, 1)),
        pytest.raises(ArgumentError, match="batch_invariant: got True"),
    ):
        decide(GEMM, problem, H200)


def test_fp8_needs_tensor_cores_for_it() -> None:
    problem = Problem(64, 64, 256, "float8_e4m3fn")
    assert decide(GEMM, problem, imagined_gpu("sm_120a", 48)).spec.version == "p1"
    for name in ("sm_90", "sm_100a"):
        with pytest.raises(TargetError, match=rf"^target: got {name}; allowed: a target with mma_sync_fp8"):
            decide(GEMM, problem, imagined_gpu(name, 48))
    with pytest.raises(TargetError, match="mma_sync_fp8"):
        decide(GEMM, replace(problem, version="p1"), H200)


@pytest.mark.parametrize(
    ("field", "value"), [("m", 0), ("n", 2**31), ("k", 8.0), ("m", True), ("dtype", "int8"), ("layout", "")]
)
def test_what_a_problem_refuses(field: str, value: Any) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError)) as caught:
        Problem(**{**PROBLEM.as_json(), field: value})
    assert caught.value.field == field


def test_a_tile_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"^stages: got 8"):
        GemmV3("float16", "RC", 256, 128, stages=8).check_target(SM90A)


def test_what_is_pinned_serves_its_own_family_only() -> None:
    own = GemmV4("float16", "RC", 64, 64, warpgroups=1)
    with pinned(own):
        assert decide(GEMM, PROBLEM, H200).spec is own
    with pinned(MmaSyncSpec("float16", 128, False, 8, 128, 256, 4, 1, 4, scale_on="accumulator")):
        assert decide(GEMM, PROBLEM, H200).source == "rule"


def test_what_is_pinned_must_fit_the_problem() -> None:
    with (
        pinned(GemmV3("bfloat16", "RC")),
        pytest.raises(ArgumentError, match="pinned spec: dtype: got bfloat16"),
    ):
        decide(GEMM, PROBLEM, H200)
    with pinned(GemmV3("float16", "RC", 256, 128, stages=8)), pytest.raises(ArgumentError, match="stages: got 8"):
        decide(GEMM, PROBLEM, H200)
    with pytest.raises(ArgumentTypeError, match="spec: got str"), pinned("wgmma"):
        pass


# ---- The tuner's parts, which know no family


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A user's file that is not there yet, and no table that ships."""
    path = tmp_path / "tuned.json"
    monkeypatch.setenv("CUDATMA_TUNE_FILE", str(path))
    monkeypatch.setattr(overrides, "shipped", lambda family: None)
    choice_table.forget()
    yield path
    choice_table.forget()


MEASURED: GemmSpec = GemmV3("float16", "RC", 64, 128, stages=5, warpgroups=1)
GPU = GpuClass.of(H200)


def test_a_problem_and_its_entry_go_through_json() -> None:
    assert Problem.from_json(PROBLEM.as_json()) == PROBLEM
    for one in shortlist(GEMM, PROBLEM, H200, 8):
        entry = Entry(PROBLEM, one.spec, 8.0, 10.0)
        assert parse_entry(entry.as_json(GEMM), GEMM, SM90A) == entry


def test_a_tuning_entry_comes_before_the_cost_model(file: Path) -> None:
    store_entry(file, GPU, GEMM, Entry(PROBLEM, MEASURED, 8.0, 10.0))
    found = overrides.lookup(GEMM, PROBLEM, H200)
    assert found is not None
    assert (found.entry, found.path, found.shipped, found.exact) == (
        Entry(PROBLEM, MEASURED, 8.0, 10.0),
        file,
        False,
        True,
    )
    decision = decide(GEMM, PROBLEM, H200)
    assert (decision.source, decision.spec) == ("tuned", MEASURED)
    # One alike, for the other dtype; none for other sizes.
    assert decide(GEMM, replace(PROBLEM, dtype="bfloat16"), H200).spec == replace(MEASURED, dtype="bfloat16")
    assert decide(GEMM, replace(PROBLEM, n=4104), H200).source == "rule"


def test_a_file_holds_the_entries_of_several_families(file: Path) -> None:
    class Other(Problem):
        """A problem of another family with the same fields."""

    other = replace(GEMM, name="other", read_problem=Other.from_json)
    theirs: Entry[Problem, GemmSpec] = Entry(Other(**PROBLEM.as_json()), replace(MEASURED, stages=4), 7.0, 10.0)
    store_entry(file, GPU, GEMM, Entry(PROBLEM, MEASURED, 8.0, 10.0))
    store_entry(file, GPU, other, theirs)
    ours, found = overrides.lookup(GEMM, PROBLEM, H200), overrides.lookup(other, theirs.problem, H200)
    assert ours is not None
    assert found is not None
    assert (ours.entry.spec, found.entry.spec) == (MEASURED, theirs.spec)


def test_tuning_measures_it_and_later_calls_follow(file: Path) -> None:
    wanted = shortlist(GEMM, replace(PROBLEM, dtype="bfloat16"), H200, 12)[2].spec
    bench = FakeBench(lambda one: 5.0 if one.spec == wanted else 9.0)
    shape = ["gemm", "--shape", f"{PROBLEM.k}x{PROBLEM.n}", "--m", str(PROBLEM.m), "--dtype", "bfloat16", "--jobs", "1"]
    assert tune.main(shape, bench=bench, gpu=H200) == 0
    assert bench.prepared == [replace(PROBLEM, dtype="bfloat16")]
    choice_table.forget()
    decision = decide(GEMM, bench.prepared[0], H200)
    assert (decision.source, decision.spec) == ("tuned", wanted)
    with pytest.raises(
        ArgumentError, match="--zeros: got an option of marlin; allowed: options of gemm: --dtype, --layout"
    ):
        tune.main([*shape, "--zeros"], bench=bench, gpu=H200)


def test_a_changed_kernels_entry_names_the_command_that_measures_it_again() -> None:
    raw = Entry(replace(PROBLEM, dtype="bfloat16"), replace(MEASURED, dtype="bfloat16"), 8.0, 10.0).as_json(GEMM)
    command = f"cudatma tune gemm --shape {PROBLEM.k}x{PROBLEM.n} --m {PROBLEM.m} --dtype bfloat16$"
    with pytest.raises(ArgumentError, match=command):
        parse_entry(raw | {"revision": GemmSpec.revision + 1}, GEMM, SM90A)


def test_the_kernel_of_a_problem_is_dumped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--m", str(PROBLEM.m), "--n", str(PROBLEM.n), "--k", str(PROBLEM.k), "--dtype", "bfloat16"]
    dump = ["gemm", *sizes, "--target", "sm_90a", "--no-sass", "--json", "--out", str(tmp_path)]
    assert dump_kernels.main(dump) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert report["name"] == f"{decide(GEMM, replace(PROBLEM, dtype='bfloat16'), H200).spec.entry}_sm_90a"


@pytest.mark.parametrize(("m", "n", "ctas"), [(4096, 4096, 128), (2048, 2304, 72), (1024, 128, 8)])
def test_persistent_ctas_are_as_few_as_need_no_more_turns(m: int, n: int, ctas: int) -> None:
    """On 132 SMs 512, 144 and 8 tiles take 4 turns, 2, and 1."""
    assert GemmV4("float16", "RC", 128, 256).schedule(Problem(m, n, 4096, "float16"), 132).ctas == ctas


@pytest.mark.parametrize(("k", "version"), [(1536, 7), (7168, 4)])
def test_short_k_has_a_tile_for_each_warpgroup(k: int, version: int) -> None:
    problem = Problem(4096, 24576, k, "float8_e4m3fn", "RC", epilogue="linear")
    assert decide(GEMM, problem, H200).spec.version == version


@pytest.mark.parametrize(("m", "n"), [(1, 2048), (64, 2048), (128, 1024), (256, 1024)])
def test_clusters_run_at_the_same_time(m: int, n: int) -> None:
    """An H200 holds 30 clusters of four, not 33."""
    problem = Problem(m, n, 4096, "float16")
    spec = decide(GEMM, problem, H200).spec
    assert spec.version == 6
    assert spec.schedule(problem, 132).ctas <= spec.cluster_k * clusters_at_once(spec.cluster_k, 132)


def test_one_sm_is_enough_to_choose() -> None:
    assert decide(GEMM, PROBLEM, imagined_gpu("sm_90a", 1)).spec.block_m in (64, 128, 256)
