"""Scale and offset in one multiply-add: which configs and weights take it; calls, tables and explanations agree."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from marlin_builders import mma_sync, wgmma
from stub_driver import Array, StubDriver, packed_weight
from stub_driver import stub as stub  # the fixture
from test_marlin_gemm import make

from cudatma import ArgumentError, PackedWeight, marlin_gemm
from cudatma.kernels.marlin.arguments import sizes_for
from cudatma.kernels.marlin.config import MarlinConfig
from cudatma.kernels.marlin.problem import LinearShape, Problem
from cudatma.kernels.marlin.sample import random_weight
from cudatma.kernels.schedule import schedule
from cudatma.quantization.scale_range import FORMS, ScaleFit
from cudatma.target import get_target

SM90A = get_target("sm_90a")
BASE = wgmma(tile_m=64, tile_n=128, tile_k=128, warpgroups=2, stages=4)
FORMS_OF = {"as_stored": ScaleFit("as_stored", 3), "shifted": ScaleFit("shifted", 1), "none": ScaleFit()}


def weight(form: str) -> PackedWeight:
    """Return a weight whose scales allow this form and no better one."""
    w, _ = make(128, 64)
    scales = w.scales.copy()
    scales[0, 0] = {"as_stored": 0.01, "shifted": 2.0**-12, "none": 2.0**-14}[form]
    w = replace(w, scales=scales)
    assert w.scale_fit == FORMS_OF[form]
    return w


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("fields", [{"has_zeros": True}, {"group_size": -1}], ids=lambda fields: next(iter(fields)))
@pytest.mark.parametrize("form", FORMS)
def test_what_cannot_be_fused(fields: dict[str, Any], form: str, dtype: str) -> None:
    refuses(replace(BASE, dtype=dtype, **fields), form)


def test_bf16_has_one_form() -> None:
    brain = replace(BASE, dtype="bfloat16")
    refuses(brain, "shifted")
    assert (brain.in_form("as_stored").scale_form, brain.in_form("as_stored").nibble_shift) == ("as_stored", 0)
    assert brain.in_form("as_stored").in_form("shifted") == brain


def refuses(config: MarlinConfig, form: str) -> None:
    assert config.in_form(form) is config
    with pytest.raises(ArgumentError, match='"none", or, for symmetric group-wise weights, "as_stored"') as caught:
        replace(config, scale_form=form)
    assert (caught.value.field, caught.value.got) == ("scale_form", form)


def test_other_kernels_stay_as_they_are() -> None:
    other = mma_sync(tile_m=16, tile_n=64, tile_k=128, warps_n=2, stages=3)
    assert other.in_form("as_stored") is other


@pytest.mark.parametrize("form", FORMS)
def test_forms_are_told_apart_and_can_be_taken_back(form: str) -> None:
    fused = BASE.in_form(form)
    assert (fused.scale_form, fused.is_fused, fused.nibble_shift) == (form, True, FORMS[form])
    assert len({fused.entry, BASE.entry, *(BASE.in_form(one).entry for one in FORMS)}) == 3
    assert fused.in_form(form) is fused
    assert fused.in_form("none") == BASE
    assert fused.smem_bytes == BASE.smem_bytes


def form_of(entry: str) -> str:
    """Return the form of the scales that a kernel's name shows."""
    return "as_stored" if "_fused_" in entry else "shifted" if "_shifted_" in entry else "none"


@pytest.mark.parametrize("form", FORMS_OF)
def test_a_call_takes_the_weights_form(stub: StubDriver, form: str) -> None:
    w = packed_weight(128, 64, group_size=32, fit=FORMS_OF[form])
    marlin_gemm(Array((33, 128), address=1 << 36), w)
    (launch,) = stub.launches
    assert launch.entry.startswith("marlin_wgmma_f16_g32_")
    assert form_of(launch.entry) == form


@pytest.mark.parametrize("asked", ["as_stored", "shifted"])
def test_another_form_than_the_weights_is_refused(asked: str) -> None:
    w = weight("shifted" if asked == "as_stored" else "as_stored")
    config, problem = replace(BASE, group_size=32), Problem.of(w, 33)
    work = schedule(config, problem.m, problem.n, problem.k, 4)
    with pytest.raises(ArgumentError, match="for the range of this weight's scales") as caught:
        sizes_for(problem, config.in_form(asked), lambda m: work, SM90A)
    assert caught.value.field == "scale_form"
    sizes_for(problem, config, lambda m: work, SM90A)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("k", [1, 100, 4096, 28672, 131072])
def test_the_tuner_measures_fused_kernels(k: int, dtype: str) -> None:
    assert random_weight(LinearShape(k, 64, 128, False, dtype)).scale_fit.form == "as_stored"
