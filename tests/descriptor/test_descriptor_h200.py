"""The codec and the rules against the answers of an H200's driver (580.159) in 600 of 20000 captured cases.

tests/fixtures/descriptors/make_sample.py drew the sample; tests/descriptor/test_descriptor_gpu.py uses a real driver.
"""

from __future__ import annotations

import gzip
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from cudatma.descriptor import Im2colSpec, TiledSpec, codec
from cudatma.descriptor.access import check_described_bytes, check_target
from cudatma.errors import DescriptorError, TargetError
from cudatma.target import get_target

SAMPLE = Path(__file__).resolve().parents[1] / "fixtures" / "descriptors" / "h200.jsonl.gz"
Case = dict[str, Any]


@lru_cache(maxsize=1)
def sample() -> list[Case]:
    with gzip.open(SAMPLE, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def make(case: Case) -> TiledSpec | Im2colSpec:
    values = {name: value for name, value in case["fields"].items() if name != "kind"}
    return TiledSpec(**values) if case["fields"]["kind"] == "tiled" else Im2colSpec(**values)


def refused_field(case: Case) -> str | None:
    """Return the field that breaks a driver rule, or None."""
    target = get_target("sm_90a")
    try:
        spec = make(case)
        check_described_bytes(spec, target)
        # The driver of a GPU refuses what the GPU lacks.
        for needed, feature in ((spec.dtype.packed, "packed_types"), (spec.swizzle.is_atom, "swizzle_atoms")):
            if needed:
                target.require(feature, "the map")
    except (DescriptorError, TargetError) as error:
        return error.field
    return None


def undocumented(case: Case) -> bool:
    """Return whether a case has interleave 32B without swizzle 32B, which the driver encodes but its documentation
    excludes."""
    return case["fields"]["interleave"] == 2 and case["fields"]["swizzle"] != 1


def test_the_rules_say_what_the_driver_said() -> None:
    wrong = [
        (case["fields"], case["code"], field)
        for case in sample()
        if ((field := refused_field(case)) is None) is not (case["code"] == 0)
    ]
    assert not wrong, wrong[:3]


def test_what_the_documentation_rules_out_is_described_but_not_used() -> None:
    for case in sample():
        if undocumented(case) and case["code"] == 0:
            with pytest.raises(DescriptorError):
                check_target(make(case), get_target("sm_90a"))


def test_all_128_bytes_are_the_drivers() -> None:
    compared = 0
    for case in sample():
        if case["code"] != 0:
            continue
        spec, raw = make(case), bytes.fromhex(case["hex"])
        assert codec.encode(spec).hex() == case["hex"], case["fields"]
        decoded = codec.decode(raw)
        assert decoded.spec == spec
        assert (decoded.version, decoded.unknown) == (0, 0)
        compared += 1
    assert compared > 300
