"""The choice of marlin_moe's kernels: predictions, tuning entries, explanations and dumps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_bench import FakeBench
from moe_cases import LAYERS

import cudatma
from cudatma.errors import ArgumentError, ArgumentTypeError, TargetError
from cudatma.kernels import choice
from cudatma.kernels.choice import choice_table, decide, shortlist
from cudatma.kernels.experts.choose import EXPERTS, rule
from cudatma.kernels.experts.moe import MARLIN_MOE, MoeOptions
from cudatma.kernels.experts.problem import MoeProblem
from cudatma.kernels.gpu import H200, imagined_gpu
from cudatma.kernels.registry import FAMILIES, entry_of, family_entries
from cudatma.kernels.tuning import Entry, GpuClass, parse_entry, pinned, read_sections, shipped, store_entry
from cudatma.target import get_target
from tools import tune
from tools.dump_kernels import jobs_of_problem

#: k, n, experts, top_k of a layer.
MODELS = {
    "qwen3": (2048, 768, 128, 8),
    "mixtral": (4096, 14336, 8, 2),
    "deepseek": (7168, 256, 256, 8),
    "gpt-oss": (2880, 2880, 32, 4),
}


def problem_of(model: str, m: int, **options: Any) -> MoeProblem:
    sizes = dict(zip(("k", "n", "experts", "top_k"), MODELS[model], strict=True))
    kind = {"dtype": "bfloat16", "group_size": 128, "has_zeros": False, "format": "int4"}
    return EXPERTS.read_problem(sizes | kind | {"m": m} | options)


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    path = tmp_path / "tuned.json"
    monkeypatch.setenv("CUDATMA_TUNE_FILE", str(path))
    choice.forget()
    yield path
    choice.forget()


@pytest.mark.parametrize(
    ("model", "m", "us"),
    [
        ("qwen3", 1, 14.1),
        ("qwen3", 16, 67),
        ("qwen3", 4096, 581),
        ("mixtral", 4096, 4482),
        ("deepseek", 1, 17.9),
        ("deepseek", 16, 101),
        ("deepseek", 4096, 875),
        ("gpt-oss", 4096, 1337),
    ],
)
def test_a_prediction_is_near_the_measured_time(model: str, m: int, us: float) -> None:
    """The times are those of docs/lab/marlin.md on an H200."""
    problem = problem_of(model, m)
    assert rule(problem, H200).cost(problem, H200).us == pytest.approx(us, rel=0.2)


def test_every_entry_that_ships_can_be_used_and_pays() -> None:
    table = shipped(EXPERTS)
    assert table is not None
    for section in read_sections(table):
        for raw in section["entries"]:
            entry = parse_entry(raw, EXPERTS, get_target(section["gpu"]["target"]))
            assert entry.rule_us >= 1.02 * entry.us, entry.problem


@pytest.mark.parametrize("model", MODELS)
def test_the_table_contains_the_rule(model: str) -> None:
    problem = problem_of(model, 1)
    table = choice_table(EXPERTS, problem, H200, 5000)
    for m in (*range(1, 33), *(2**i for i in range(5, 14))):
        assert table.at(m) == rule(problem.with_m(m), H200), m


@pytest.mark.parametrize("target", ["sm_90a", "sm_120a"])
@pytest.mark.parametrize("m", [1, 48, 2000])
def test_candidates_have_distinct_names_fit_and_survive_a_file(target: str, m: int) -> None:
    gpu = imagined_gpu(target)
    problem = problem_of("qwen3", m)
    listed = shortlist(EXPERTS, problem, gpu, 12)
    assert listed[0].config == rule(problem, gpu)
    assert len({candidate.label for candidate in listed}) == len(listed) > 6
    for candidate in listed:
        candidate.config.check(problem, get_target(target))
        entry = Entry(problem, candidate.config, 5.0, 6.0)
        assert parse_entry(json.loads(json.dumps(entry.as_json(EXPERTS))), EXPERTS, get_target(target)) == entry


def test_a_tuned_layer_is_used_for_nearby_sizes_and_other_formats(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = shortlist(EXPERTS, problem_of("qwen3", 64), H200, 12)[3]
    bench = FakeBench(lambda candidate: 5.0 if candidate.config == other.config else 9.0)
    options = "experts --shape 2048x768 --experts 128 --top-k 8 --m 64 --dtype bfloat16 --jobs 1"
    assert tune.main([*options.split(), "--json"], bench=bench, gpu=H200) == 0
    assert json.loads(capsys.readouterr().out)["cells"][0]["winner"] == other.label
    choice.forget()
    problem = problem_of("qwen3", 60)
    for tuned in (problem, problem_of("qwen3", 60, group_size=64, has_zeros=True)):
        assert decide(EXPERTS, tuned, H200).source == "tuned"
        up = MARLIN_MOE.configure(tuned, H200, {}).up
        assert up.tile_n == other.config.up_tile_n
    for ruled in (
        replace(problem, global_experts=256),
        replace(problem, batch_invariant=True),
        problem_of("qwen3", 60, top_k=4),
        problem_of("qwen3", 60, format="fp8"),
        problem.with_m(200),
    ):
        assert decide(EXPERTS, ruled, H200).source == "rule"
    assert tune.main(options.split(), bench=bench, gpu=H200) == 0
    assert "already measured" in capsys.readouterr().err


def test_an_entry_that_does_not_fit_is_not_used(file: Path) -> None:
    problem, target = problem_of("qwen3", 64), get_target("sm_90a")
    raw = Entry(problem, rule(problem, H200), 5.0, 6.0).as_json(EXPERTS)
    for changes, error, field in (
        ({"kernel": "mma_sync"}, ArgumentError, "kernel"),
        ({"config": raw["config"] | {"up_tile_k": 1024}}, ArgumentError, "stages"),
        ({"config": raw["config"] | {"tile_m": 7}}, ArgumentError, "tile_m"),
        ({"config": raw["config"] | {"direct": True}}, ArgumentError, "direct"),
        ({"config": raw["config"] | {"direct": 1}}, ArgumentTypeError, "direct"),
        ({"k": 2049}, ArgumentError, "k"),
        ({"n": 8}, ArgumentError, "n"),
        ({"experts": 1025}, ArgumentError, "experts"),
        ({"top_k": 0}, ArgumentError, "top_k"),
        ({"top_k": 129}, ArgumentError, "top_k"),
        ({"m": 1.5}, ArgumentTypeError, "m"),
        ({"m": 2**29}, ArgumentError, "m"),
    ):
        with pytest.raises(error, match=f"^{field} must be .*, got "):
            parse_entry(raw | changes, EXPERTS, target)
    store_entry(file, GpuClass.of(H200), EXPERTS, Entry(problem, rule(problem, H200), 5.0, 6.0))
    file.write_text(file.read_text().replace('"tile_m": 8', '"tile_m": 7'))
    with pytest.warns(cudatma.TuneFileWarning, match="tile_m must be"):
        assert decide(EXPERTS, problem, H200).source == "rule"


def test_a_pinned_configuration_is_used(file: Path) -> None:
    problem = problem_of("qwen3", 64)
    config = shortlist(EXPERTS, problem, H200, 12)[-1].config
    with pinned(config):
        assert MARLIN_MOE.configure(problem, H200, {}) == config.kernels(problem, get_target("sm_90a"))
    assert MARLIN_MOE.configure(problem, H200, {}) == rule(problem, H200).kernels(problem, get_target("sm_90a"))
    with pinned(rule(problem_of("qwen3", 1024), H200)), pytest.raises(TargetError, match="wgmma"):
        MARLIN_MOE.configure(problem, imagined_gpu("sm_120a"), {})


@pytest.mark.parametrize("name", ["mapped", "many_rows", "one_token"])
def test_an_explanation_describes_the_launches_of_a_call(name: str) -> None:
    operands = LAYERS[name].operands()
    explanation = cudatma.moe_explain(**operands, target="sm_90a")
    inputs = tuple([operands[field] for field in MARLIN_MOE.inputs])
    checked = MARLIN_MOE.check(inputs, None, MoeOptions(), (operands["w1"], operands["w2"]))
    config = MARLIN_MOE.configure(checked.problem, H200, {})
    assert [launch.config for launch in explanation.launches] == [kernel for _, kernel in config.kernels]
    grids = [
        launch.sizes.grid
        for launch in MARLIN_MOE.arguments(
            checked.problem, config, H200, tuple([132 * getattr(each, "ctas_per_sm", 1) for _, each in config.kernels])
        )
    ]
    ctas = [grid if isinstance(grid, int) else grid[0] * grid[1] for grid in grids]
    assert [launch.schedule.ctas for launch in explanation.launches] == ctas
    text, data = str(explanation), json.loads(json.dumps(explanation.as_dict()))
    for launch, stored in zip(explanation.launches, data["launches"], strict=True):
        assert f"launch     {launch.config.entry}\n" in text
        assert (stored["entry"], stored["smem_bytes"]) == (launch.config.entry, launch.config.smem_bytes)
    assert [one["label"] for one in data["candidates"] if one["chosen"]] == [explanation.config.entry]


def test_a_dump_of_a_problem_contains_the_kernels_of_the_call() -> None:
    sizes = problem_of("qwen3", 64).as_json()
    jobs = jobs_of_problem("experts", sizes, get_target("sm_90a"), None)
    assert [job.entry.name for job in jobs] == [
        "experts_route",
        "experts_skinny_up",
        "experts_skinny_down",
        "experts_sum",
    ]
    assert all(job.entry.template == job.config.template for job in jobs)
    entries = [entry for name in FAMILIES for entry in family_entries(name)]
    assert all(entry_of(config) is entry for entry in entries for config in entry.configs("sm_90a"))
