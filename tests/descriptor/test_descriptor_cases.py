"""The generator of the capture of driver tensor maps: its valid specs are valid, its mutations break what they say.

The capture itself needs a driver (tests/descriptor/capture_descriptors.py).
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

HERE = Path(__file__).resolve().parent
#: Mutations that no rule forbids, and what each of the others may break.
LEGAL = {"stride_zero", "address_null", "box_huge", "interleave_32_swizzle"}
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
    "swizzle_atom": "target",
    "packed_type": "target",
    "rank_too_high": "rank",
    "corner_over": "lower_corner[0]",
    "corner_empty": "upper_corner",
    "pixels_zero": "pixels_per_column",
    "pixels_1025": "pixels_per_column",
}
SOMETIMES = {"stride_off_16", "address_off_16", "inner_over_span", "corner_empty"}  # the last not with interleave
#: What any random spec may be refused for: its size, and its bounding box.
INCIDENTAL = {"box", "pixels_per_column", "upper_corner[0]", "upper_corner[1]", "upper_corner[2]"}


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def modules() -> Any:
    names = ("descriptor_cases", "descriptor_guesses", "descriptor_report", "capture_descriptors")
    return SimpleNamespace(**{name.split("_")[-1] if name != names[-1] else "capture": load(name) for name in names})


def test_valid_and_mutated_specs(modules: Any) -> None:
    target, verdicts = get_target("sm_90a"), defaultdict(set)
    for fields, mutation, memory in modules.cases.cases(3000, 0.5, 7, {"here": [0, 1 << 33]}):
        verdict, spec = modules.capture.ask_rules(fields, target)
        verdicts[mutation].add(verdict)
        assert memory == "here"
        if verdict in ("ok", "access"):
            assert isinstance(spec, TiledSpec if fields["kind"] == "tiled" else Im2colSpec)
            assert codec.decode(codec.encode(spec)).spec == spec
    assert {"ok", "access"} <= verdicts[None]
    assert set(verdicts) == LEGAL | set(BROKEN) | {None}
    for mutation, found in verdicts.items():
        refused = found - {"ok", "access"}
        if mutation in LEGAL or mutation is None:
            assert refused <= INCIDENTAL, (mutation, found)
        else:
            prefix = ("box[0]", "channels_per_pixel") if BROKEN[mutation] == "inner" else BROKEN[mutation]
            meant = {field for field in refused if field.startswith(prefix)}
            assert meant, (mutation, found)
            assert refused - meant <= INCIDENTAL, (mutation, found)
            assert mutation in SOMETIMES or found == refused, (mutation, found)


FIELDS: dict[str, Any] = {
    "kind": "tiled",
    "dtype": "float16",
    "dims": [256, 64],
    "strides_bytes": [512],
    "element_strides": [1, 1],
    "interleave": 0,
    "swizzle": 3,
    "l2_promotion": 0,
    "oob_fill": 0,
    "address": 0,
    "box": [64, 8],
}
COLUMN: dict[str, Any] = {name: value for name, value in FIELDS.items() if name != "box"} | {
    "kind": "im2col",
    "dims": [64, 14, 9, 4],
    "strides_bytes": [128, 1792, 16128],
    "element_strides": [1] * 4,
    "lower_corner": [-1, -2],
    "upper_corner": [-1, -1],
    "channels_per_pixel": 16,
    "pixels_per_column": 24,
}


def answer(modules: Any, fields: dict[str, Any], flipped: int = 0, code: int | str = 0) -> Any:
    """What a driver would answer that agrees with the codec but for the flipped bits."""
    verdict, spec = modules.capture.ask_rules(fields, get_target("sm_90a"))
    raw = None
    if code == 0:
        value = int.from_bytes(codec.encode(spec), "little") if spec else 0
        raw = (value ^ flipped).to_bytes(128, "little")
    return modules.report.Answer(fields, None, "made_up", code, verdict, spec, raw)


def test_an_answer_agrees_in_every_bit_or_not(modules: Any) -> None:
    good = answer(modules, FIELDS)
    assert good.agrees
    assert good.known.unknown_bits == set()
    assert good.known.guesses("smem_bytes")["expected"]
    assert not good.known.guesses("smem_bytes")["row"]
    assert good.known.guesses("smem_pattern")["row * 8"]
    bad = answer(modules, FIELDS, 1 << 440)
    assert not bad.agrees
    assert modules.report.wrong_fields(bad.known) == {"box_minus_1[0]": (62, 63)}
    for bit, name in ((66, "version"), (513, "smem_bytes"), (591, "smem_pattern")):
        bad = answer(modules, FIELDS, 1 << bit)
        assert not bad.agrees
        assert set(modules.report.wrong_fields(bad.known)) == {name}
    unknown = answer(modules, FIELDS, 1 << 85)
    assert not unknown.agrees
    assert unknown.known.unknown_bits == {85}
    assert not answer(modules, FIELDS | {"box": [63, 8]}).agrees
    assert answer(modules, FIELDS | {"box": [63, 8]}, code=1).agrees
    assert answer(modules, FIELDS | {"dims": [16] * 6}, code="bindings").agrees
    assert not answer(modules, FIELDS, code="bindings").agrees
    # Undocumented, but the driver encodes it.
    odd = COLUMN | {"interleave": 2, "swizzle": 0, "strides_bytes": [128, 1792, 16128]}
    assert answer(modules, odd).agrees
    assert not answer(modules, odd, code=1).agrees


def test_the_report_names_each_disagreement_and_stays_short(modules: Any) -> None:
    answers = [answer(modules, FIELDS, 1 << 85) for _ in range(300)]
    answers += [answer(modules, FIELDS | {"box": [32, rows]}, 1 << 440) for rows in range(1, 101)]
    answers += [answer(modules, FIELDS | {"box": [63, 8]}), answer(modules, FIELDS, code=1)]
    answers += [answer(modules, COLUMN) for _ in range(7)]
    text = modules.report.report(answers)
    assert len(text) <= modules.report.REPORT_CHARACTERS
    for expected in (
        "409 cases: im2col rank 4: 7; tiled rank 2: 402",
        "1 driver accepts, we refuse box[0]",
        "1 driver refuses (1), we accept: valid tiled interleave 0",
        "100 tiled box_minus_1[0]",
        "driver=0x1e ours=0x1f",
        "best overall: expected 407;",
        "lower_corner 7/7; upper_corner 7/7; pixels_minus_1 7/7; W lowest 7/7; W highest 0/7",
        "## unaccounted bits of 407: 85: 300",
    ):
        assert expected in text, text
    assert len(modules.report.report(answers, limit=600)) <= 620


def test_what_the_bindings_refuse_is_no_crash(modules: Any) -> None:
    def refuse(*arguments: Any) -> None:
        raise ValueError("Argument 'elementStrides' too long, must be <= 5")

    names = ["cuuint64_t", "cuuint32_t", "CUtensorMapDataType", "CUtensorMapInterleave", "CUtensorMapSwizzle"]
    names += ["CUtensorMapL2promotion", "CUtensorMapFloatOOBfill"]
    driver = SimpleNamespace(**dict.fromkeys(names, int), cuTensorMapEncodeTiled=refuse)
    assert modules.capture.ask_driver(driver, FIELDS | {"dims": [16] * 6}) == ("bindings", None)
