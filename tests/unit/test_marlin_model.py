"""The model of a GEMM's time: near the committed measurements, and right in what follows from arithmetic alone."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import model as comparison
from cudatma.errors import ArgumentError
from cudatma.kernels.marlin import card as card_module
from cudatma.kernels.marlin import model
from cudatma.kernels.marlin.candidates import candidates
from cudatma.kernels.marlin.card import H200, Card, card_of, imagined_card, rates
from cudatma.kernels.marlin.config import Layer, choose_untuned
from cudatma.kernels.marlin.layer import Choice
from cudatma.kernels.marlin.model import Prediction, kernel_name, predict
from cudatma.kernels.marlin.shortlist import ranked
from cudatma.kernels.marlin.strip_spec import StripSpec
from cudatma.kernels.marlin.wgmma_spec import WgmmaSpec
from cudatma.render import render
from cudatma.target import TARGETS, get_target

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
SM90A = get_target("sm_90a")
LARGE = Layer(8192, 28672, 128, False, "float16")
SMALL = Layer(4096, 4096, 128, False, "float16")


def of_rule(layer: Layer, m: int) -> Prediction:
    return predict(layer, m, choose_untuned(layer, m, SM90A, 132), SM90A, H200)


def cells() -> list[dict[str, Any]]:
    files = (RESULTS / name for name in ("marlin.json", "marlin_bf16.json"))
    return [cell for file in files for cell in json.loads(file.read_text())["cells"] if cell["us"]]


def test_the_page_has_every_measured_cell_and_the_models_numbers() -> None:
    found = comparison.rows()
    assert len(found) == len(cells())
    page = comparison.PAGE.read_text()
    for row in found:
        assert f"| {row.layer.k} x {row.layer.n} | {row.m} |" in page
    assert "| wgmma | tensor cores |" in page
    again = comparison.filled(page, found)
    assert again.partition("<!-- table")[0] == page.partition("<!-- table")[0]
    assert comparison.summary(found) in again
    with pytest.raises(ArgumentError, match="a page with the two marks"):
        comparison.filled("no table", found)
    for number in (model._OVERLAP, model._LAUNCH_US, model._EPILOGUE_US, model._DIVIDED_US, model._ISSUE_EFFICIENCY):
        assert str(number) in page
    assert str(rates(SM90A).sustained) in page
    assert str(rates(SM90A).rested) in page


def test_it_is_near_the_committed_measurements() -> None:
    errors = {}
    for cell in cells():
        layer = Layer(cell["k"], cell["n"], 128, False, cell["dtype"])
        errors[(layer, cell["m"])] = abs(of_rule(layer, cell["m"]).us / cell["us"] - 1)
    assert len(errors) >= 100
    assert statistics.median(errors.values()) < 0.06
    assert max(errors.values()) < 0.25, max(errors, key=lambda cell: errors[cell])


@pytest.mark.parametrize(
    ("layer", "m", "bound"),
    [
        (LARGE, 1, "memory"),
        (replace(LARGE, k=28672, n=8192), 16, "memory"),
        (SMALL, 1, "launch and epilogue"),
        (LARGE, 4096, "tensor cores"),
        (SMALL, 1024, "tensor cores"),
    ],
)
def test_what_bounds_it(layer: Layer, m: int, bound: str) -> None:
    assert of_rule(layer, m).bound == bound


def test_strips_are_predicted_ahead_of_the_portable_kernel_for_one_token() -> None:
    """As docs/performance/marlin_strip.md measured: 31.1 us against 35.3 at (8192, 28672), 5.2 against 7.7."""
    for layer in (SMALL, LARGE):
        first = {}
        for candidate in ranked(layer, 1, SM90A, H200):
            first.setdefault(kernel_name(candidate.choice.spec), candidate.prediction.us)
        assert first["strip"] < first["portable"] - 1.5
        assert first["strip"] <= first["wgmma"]


def wgmma(block_m: int, block_k: int, stack: int, stages: int, steps: int, in_flight: int, registers: int = 0) -> Any:
    spec = WgmmaSpec(
        "float16", 128, False, block_m, block_k, 2, stack, stages, 1, steps, in_flight, consumer_registers=registers
    )
    return Choice(spec, 1)


@pytest.mark.parametrize(
    ("layer", "m", "better", "worse"),
    [
        (SMALL, 64, wgmma(64, 256, 1, 4, 2, 1), wgmma(64, 128, 2, 6, 2, 1)),
        (LARGE, 64, wgmma(64, 128, 2, 6, 2, 1), wgmma(64, 256, 1, 4, 2, 1)),
        (replace(SMALL, n=12288), 128, wgmma(128, 128, 1, 4, 1, 3), wgmma(256, 64, 1, 5, 1, 3, 232)),
        (replace(LARGE, n=8192), 256, wgmma(128, 128, 1, 4, 1, 3), wgmma(256, 64, 1, 5, 1, 3, 232)),
        (replace(SMALL, k=14336), 256, wgmma(128, 128, 1, 4, 1, 3), wgmma(256, 64, 1, 5, 1, 3, 232)),
        (replace(LARGE, n=8192), 1, Choice(StripSpec("float16", 128, False, 8, 2, 512, 4, 8), 1),
         Choice(StripSpec("float16", 128, False, 8, 2, 256, 4, 12), 1)),
    ],
)  # fmt: skip
def test_it_ranks_as_was_measured(layer: Layer, m: int, better: Any, worse: Any) -> None:
    """The pairs that docs/performance/marlin_wgmma.md and marlin_strip.md compare, of which the fit saw one each."""
    times = [predict(layer, m, choice, SM90A, H200).us for choice in (better, worse)]
    assert times[0] < times[1]


def test_wide_wgmma_tiles_are_predicted_ahead_of_mma_sync_for_many_tokens() -> None:
    best = ranked(LARGE, 4096, SM90A, H200)
    assert kernel_name(best[0].choice.spec) == "wgmma"
    portable = next(one for one in best if kernel_name(one.choice.spec) == "portable")
    # 0.65 of wgmma's rate at best. [docs/performance/marlin_portable.md]
    assert portable.prediction.us > 1.3 * best[0].prediction.us


def test_bytes_and_operations_are_those_of_the_problem() -> None:
    said = of_rule(LARGE, 1)
    weight = 8192 * 28672 // 2 + 64 * 28672 * 2
    assert said.memory_bytes == weight + 2 * (8192 + 28672)
    assert said.operations >= 2 * 8192 * 28672 * 8, "8 tokens are the least that an instruction takes"
    zeros = of_rule(replace(LARGE, has_zeros=True), 1)
    assert zeros.memory_bytes == said.memory_bytes + 64 * 28672
    column = of_rule(replace(LARGE, group_size=-1), 1)
    assert column.memory_bytes == said.memory_bytes - 63 * 28672 * 2


def test_a_faster_card_is_predicted_faster() -> None:
    choice = choose_untuned(LARGE, 16, SM90A, 132)
    slow = predict(LARGE, 16, choice, SM90A, replace(H200, memory_clock_mhz=1600))
    half = predict(LARGE, 4096, choose_untuned(LARGE, 4096, SM90A, 132), SM90A, replace(H200, sm_clock_mhz=990))
    assert slow.us > 1.5 * of_rule(LARGE, 16).us
    assert half.us > 1.8 * of_rule(LARGE, 4096).us


def test_a_ring_that_does_not_cover_the_latency_is_slower() -> None:
    spec = StripSpec("float16", 128, False, 8, 1, 128, 2, 2)
    choice = replace(choose_untuned(SMALL, 1, SM90A, 132), spec=spec)
    shallow, deep = (predict(SMALL, 1, replace(choice, spec=replace(spec, stages=s)), SM90A, H200) for s in (2, 12))
    assert shallow.streams["memory"] > 3 * deep.streams["memory"]


layers = st.builds(
    Layer,
    k=st.integers(1, 40_000),
    n=st.integers(1, 70_000),
    group_size=st.sampled_from((32, 64, 128, -1)),
    has_zeros=st.booleans(),
    dtype=st.sampled_from(("float16", "bfloat16")),
)


@settings(max_examples=60, deadline=None)
@given(layers, st.integers(1, 5000), st.sampled_from(("sm_90a", "sm_120a")), st.sampled_from((1, 20, 132, 188)))
def test_every_prediction_is_a_time(layer: Layer, m: int, name: str, processors: int) -> None:
    target, card = get_target(name), imagined_card(name, processors)
    said = predict(layer, m, choose_untuned(layer, m, target, processors), target, card)
    assert 0 < max(said.streams.values()) < said.us < float("inf")
    assert said.us >= said.launch_us + said.epilogue_us + said.partials_us
    assert 0 < said.fill <= 1
    assert said.waves > 0
    assert said.l2_bytes * 1.01 >= layer.k * layer.n // 2
    json.dumps(said.as_dict())


def test_an_imagined_card_is_the_known_one_or_scaled_from_it() -> None:
    assert imagined_card("sm_90a", 132) == H200
    small = imagined_card("sm_120a", 85)
    assert small.multiprocessors == 85
    assert small.memory_bytes_per_us == pytest.approx(imagined_card("sm_120a", 170).memory_bytes_per_us / 2)
    assert imagined_card("sm_90", 132).target == "sm_90"
    assert replace(H200, sm_clock_mhz=1965).clock_class_mhz == H200.clock_class_mhz == 2000


@pytest.mark.parametrize(
    ("answers", "wanted"),
    [
        ((1980000, 3201000, 6144), H200),
        ((1755000, 2619000, 5120), Card("sm_90a", 132, 1755, 2619, 5120)),
        ((1980000, 0, 0), H200),  # what a driver may say of memory that is the host's
    ],
)
def test_an_installed_card_is_asked_in_khz(
    monkeypatch: pytest.MonkeyPatch, answers: tuple[int, int, int], wanted: Card
) -> None:
    names = ("CLOCK_RATE", "MEMORY_CLOCK_RATE", "GLOBAL_MEMORY_BUS_WIDTH")
    attributes = SimpleNamespace(**{f"CU_DEVICE_ATTRIBUTE_{name}": name for name in names})
    driver = SimpleNamespace(
        CUdevice_attribute=attributes,
        cuDeviceGet=lambda ordinal: (0, ordinal),
        cuDeviceGetAttribute=lambda name, handle: (0, answers[names.index(name)]),
    )
    monkeypatch.setattr(card_module, "detect", lambda device: SM90A)
    monkeypatch.setattr(card_module.context, "initialise", lambda: driver)
    monkeypatch.setattr(card_module.context, "device", lambda device: SimpleNamespace(multiprocessors=132))
    card_of.cache_clear()
    try:
        assert card_of(0) == wanted
    finally:
        card_of.cache_clear()


def test_every_running_target_has_rates() -> None:
    for target in TARGETS.values():
        known = rates(target)
        assert known.mma_sync > 0
        assert not target.has_wgmma or known.wgmma[64] > known.mma_sync


@pytest.mark.parametrize(
    ("dtype", "form", "fewer"), [("float16", "as_stored", 4), ("float16", "shifted", 3), ("bfloat16", "as_stored", 6)]
)
def test_fused_weights_take_the_instructions_of_their_template(dtype: str, form: str, fewer: int) -> None:
    """Of eight weights: masks, multiply-adds and shifts as the source has them; fewer by so many than unfused."""
    plain = WgmmaSpec(dtype, 128, False, 64, 128, 2, 1, 4)
    fused = plain.in_form(form)
    body = render(fused.template, fused, SM90A).split("void dequantize_fused", 1)[1].split("\n}", 1)[0]
    counted = body.count("& MASK") + body.count("multiply_add(") + body.count(">>") + (form == "shifted")
    eights = plain.block_n * plain.block_k / 32 / 8
    others = model._FOR_STAGE * plain.consumer_warps
    layer = replace(LARGE, dtype=dtype)
    assert (model._instructions(layer, fused) - others) / eights == pytest.approx(counted)
    assert (model._instructions(layer, plain) - others) / eights == pytest.approx(counted + fewer)


def test_one_warpgroup_alone_is_slower() -> None:
    found = [c for c in candidates(LARGE, 128, SM90A, 132) if kernel_name(c.spec) == "wgmma"]
    alone = next(c for c in found if c.spec.consumer_warps == 4 and c.blocks_per_sm == 1 and c.spec.block_m == 64)
    two = next(c for c in found if c.spec.consumer_warps == 8 and c.blocks_per_sm == 1 and c.spec.block_m == 64)
    times = [predict(LARGE, 128, choice, SM90A, H200).streams["tensor cores"] for choice in (alone, two)]
    assert times[0] > 1.2 * times[1]
