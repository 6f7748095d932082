"""The generator behind the capture of driver tensor maps: its valid specs are valid, its mutations break what they say.

The capture itself needs a driver (tests/gpu/capture_descriptors.py).
"""

from __future__ import annotations

import importlib.util
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from cudatma.descriptor import Im2colSpec, TiledSpec, codec
from cudatma.target import get_target

GPU_TESTS = Path(__file__).resolve().parents[1] / "gpu"
#: Mutations that no rule forbids, and what each of the others may break.
LEGAL = {"stride_zero", "address_null", "box_huge"}
BROKEN = {
    "dim_zero": "dims",
    "dim_over": "dims",
    "stride_off_8": "strides_bytes[0]",
    "stride_off_16": "strides_bytes[0]",  # only with interleave 32B
    "stride_2_40": "strides_bytes",
    "address_off_8": "address",
    "address_off_16": "address",  # only with interleave 32B
    "inner_zero": "inner",
    "inner_257_up": "inner",
    "inner_not_16_bytes": "inner",
    "inner_over_span": "inner",  # not with interleave
    "box_zero": "box[1]",
    "box_257": "box[1]",
    "element_stride_zero": "element_strides[1]",
    "element_stride_9": "element_strides[1]",
    "element_stride_0_zero": "element_strides[0]",
    "element_stride_0_9": "element_strides[0]",
    "nan_on_int": "oob_fill",
    "interleave_low_rank": "rank",
    "interleave_32_swizzle": "swizzle",
    "swizzle_atom": "target",
    "packed_type": "target",
    "rank_too_high": "rank",
    "corner_over": "lower_corner[0]",
    "corner_empty": "upper_corner",
    "pixels_zero": "pixels_per_column",
    "pixels_1025": "pixels_per_column",
}
SOMETIMES = {"stride_off_16", "address_off_16", "inner_over_span"}


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, GPU_TESTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def modules() -> Any:
    return SimpleNamespace(cases=load("descriptor_cases"), capture=load("capture_descriptors"))


def test_valid_and_mutated_specs(modules: Any) -> None:
    target, verdicts = get_target("sm_90a"), defaultdict(set)
    for fields, mutation, memory in modules.cases.cases(3000, 0.5, 7, {"here": [0, 1 << 33]}):
        verdict, spec = modules.capture.ask_rules(fields, target)
        verdicts[mutation].add(verdict)
        assert memory == "here"
        if verdict in ("ok", "smem"):
            assert isinstance(spec, TiledSpec if fields["kind"] == "tiled" else Im2colSpec)
            assert codec.decode(codec.encode(spec)).spec == spec
    assert verdicts[None] == {"ok", "smem"}
    assert set(verdicts) == LEGAL | set(BROKEN) | {None}
    for mutation, found in verdicts.items():
        refused = found - {"ok", "smem"}
        if mutation in LEGAL or mutation is None:
            assert not refused
        else:
            prefix = ("box[0]", "channels_per_pixel") if BROKEN[mutation] == "inner" else BROKEN[mutation]
            assert refused
            assert all(field.startswith(prefix) for field in refused), (mutation, found)
            assert mutation in SOMETIMES or found == refused, (mutation, found)


def test_the_summary_sees_a_wrong_field(modules: Any) -> None:
    spec = TiledSpec(dtype="float16", dims=(256, 64), strides_bytes=(512,), box=(64, 8), swizzle="128B")
    good = modules.capture.Summary()
    value = int.from_bytes(codec.encode(spec, 2), "little") | 1024 << 512 | 0x400 << 576 | 1 << 85
    assert good.compare_bytes(spec, value.to_bytes(128, "little"), "here")
    counts = good.as_dict()["counts"]
    assert counts["bits 512-543, tiled: guesses that hold"]["expected_bytes"] == 1
    assert counts["set bits that the spec does not account for"] == {"bit   85, tiled": 1}
    bad = modules.capture.Summary()
    assert not bad.compare_bytes(spec, (value ^ 1 << 440).to_bytes(128, "little"), "here")
    assert bad.as_dict()["counts"]["codec: fields that differ from the driver"] == {"tiled box_minus_1[0]": 1}
