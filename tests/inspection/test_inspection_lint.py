"""Every rule of the linter on a map that has its risk and on one that has not; severities, sources, remedies."""

from __future__ import annotations

import json
from typing import Any

import pytest

import cudatma
from cudatma.descriptor import Im2colSpec, Im2colWideSpec, TiledSpec, codec
from cudatma.descriptor.access import check_target
from cudatma.errors import CudaTmaError, TargetError
from cudatma.inspection.lint import SEVERITIES, Finding, lint
from cudatma.target import TARGETS, get_target


def tiled(**change: Any) -> TiledSpec:
    """A map without a risk but the alignment that its swizzle needs, and a column read of 4 ways."""
    base: dict[str, Any] = {"dtype": "float16", "dims": (4096, 4096), "strides_bytes": (8192,), "box": (64, 64)}
    return TiledSpec(**(base | {"swizzle": "128B", "l2_promotion": "128B", "address": 1 << 20} | change))


def im2col(**change: Any) -> Im2colSpec:
    base: dict[str, Any] = {
        "dtype": "float16", "dims": (64, 14, 9, 4), "strides_bytes": (128, 1792, 16128), "swizzle": "128B",
        "lower_corner": (0, 0), "upper_corner": (0, 0), "channels_per_pixel": 64, "pixels_per_column": 64,
        "l2_promotion": "128B", "address": 1 << 20,
    }  # fmt: skip
    return Im2colSpec(**(base | change))


WIDE = Im2colWideSpec(
    dtype="bfloat16", dims=(64, 14, 4), strides_bytes=(128, 1792), swizzle="64B", lower_corner_w=-3, upper_corner_w=3,
    channels_per_pixel=32, pixels_per_column=16, address=1 << 20,
)  # fmt: skip


def findings(spec: Any, target: str | None = None, flips: int = 0) -> dict[str, Finding]:
    """Name -> finding; flips: bits that are changed in the bytes."""
    decoded = None
    if not isinstance(spec, Im2colWideSpec):
        raw = (int.from_bytes(codec.encode(spec), "little") ^ flips).to_bytes(128, "little")
        decoded = codec.decode(raw)
    found = lint(spec, decoded, None if target is None else get_target(target)).findings
    assert [SEVERITIES.index(f.severity) for f in found] == sorted(SEVERITIES.index(f.severity) for f in found)
    for finding in found:
        assert finding.severity in SEVERITIES
        assert finding.message
        assert finding.rule
        assert finding.source
    return {finding.name: finding for finding in found}


QUIET = {"smem-alignment", "column-conflicts"}
SLICES: dict[str, Any] = {
    "dims": (64, 16, 16), "strides_bytes": (4096, 65536), "box": (16, 8, 5), "swizzle": "none", "interleave": "16B",
}  # fmt: skip


def test_a_plain_map_has_two_notes() -> None:
    found = findings(tiled())
    assert set(found) == QUIET
    assert {finding.severity for finding in found.values()} == {"note"}


@pytest.mark.parametrize(
    ("name", "severity", "spec", "words"),
    [
        ("padded-rows", "warning", tiled(box=(16, 64)), "the box needs 8192 bytes, the mbarrier counts 2048"),
        ("padded-rows", "warning", im2col(channels_per_pixel=16), "rows of 32 bytes are 128 bytes apart"),
        ("stage-alignment", "warning", tiled(box=(64, 9)), "1152 bytes are not a multiple of 1024"),
        ("stage-alignment", "warning", tiled(box=(8, 9), swizzle="none"), "144 bytes are not a multiple of 128"),
        ("ldmatrix-conflicts", "warning", tiled(swizzle="none"), "8-way"),
        ("column-conflicts", "warning", tiled(swizzle="none"), "32-way"),
        ("inner-step-ignored", "warning", tiled(element_strides=(2, 1)), "element_strides[0] is 2"),
        ("small-box", "note", tiled(box=(64, 8)), "1024 bytes"),
        ("box-beyond-tensor", "note", tiled(dims=(4096, 32)), "box[1] 64 of 32"),
        ("stride-zero", "note", tiled(strides_bytes=(0,)), "strides_bytes[0] is 0"),
        ("overlapping-strides", "warning", tiled(strides_bytes=(4096,)), "steps over 8192 bytes"),
        ("no-l2-promotion", "note", tiled(l2_promotion="none"), "128 bytes"),
        ("rows-across-sectors", "note", tiled(strides_bytes=(8208,)), "strides_bytes 8208"),
        ("rows-across-sectors", "note", tiled(address=(1 << 20) + 16), "address 0x100010"),
        ("tail-boxes", "note", tiled(dims=(4096, 4000)), "dims[1] 4000 by 64"),
        ("nan-fill", "note", tiled(oob_fill="nan"), "0x7FF7"),
        ("null-address", "warning", tiled(address=0), "address is 0"),
        ("store-clips-at-16-bytes", "warning", tiled(dims=(4092, 4096)), "end of a row"),
        ("loads-only", "note", tiled(swizzle="128B_ATOM_32B_FLIP_8B"), "stores are ruled out"),
        ("stores-only", "note",
         tiled(dtype="16u6_align16b", box=(128, 64), swizzle="128B_ATOM_64B"), "loads are ruled out"),
        ("im2col-store-traps", "note", im2col(lower_corner=(-1, 0)), "stores trap"),
        ("every-access-traps", "error", tiled(dims=(4096, (1 << 31) + 64)), "every access traps"),
        ("target", "error", tiled(swizzle="none", box=(256, 256), dtype="float32"), "262144 bytes"),
        ("target", "error", tiled(**SLICES | {"box": (16, 9, 5)}), "box[1]"),
        ("target", "note", tiled(box=(64, 256), swizzle="128B_ATOM_64B"), "not for sm_90, sm_90a"),
        ("documents-only", "note", tiled(swizzle="128B_ATOM_64B"), "no GPU"),
        ("documents-only", "note", WIDE, "documents only"),
    ],
)  # fmt: skip
def test_each_rule_finds_its_risk(name: str, severity: str, spec: Any, words: str) -> None:
    found = findings(spec)
    assert name in found, found
    assert found[name].severity == severity
    assert words in found[name].message
    assert found[name].remedy
    assert name not in findings(tiled()) or name in QUIET


def test_maps_without_the_risk() -> None:
    assert "smem-alignment" not in findings(tiled(swizzle="none"))
    assert "column-conflicts" not in findings(tiled(swizzle="none", box=(64, 1)))
    assert "ldmatrix-conflicts" not in findings(tiled())
    assert "box-beyond-tensor" not in findings(tiled(**SLICES | {"box": (16, 8, 5)})), "a slice has eight channels"
    assert "inner-step-ignored" not in findings(tiled(**SLICES | {"element_strides": (2, 1, 1)}))
    assert "im2col-store-traps" not in findings(im2col(lower_corner=(1, 0), upper_corner=(0, -2)))
    assert "stride-zero" not in findings(tiled(dims=(64, 1), strides_bytes=(0,)))


def test_bits_that_nobody_asked_for() -> None:
    assert not {"allocation-bit", "unknown-bits", "version", "derived-fields"} & set(findings(tiled()))
    found = findings(tiled(), flips=1 << 85)
    assert found["allocation-bit"].severity == "warning"
    assert "595.71.05" in found["allocation-bit"].source
    assert "unknown-bits" not in found
    found = findings(tiled(), flips=1 << 85 | 0xFFFFF << 700)
    assert "bits 700, 701, 702, 703, 704, 705, 706, 707 and 12 more" in found["unknown-bits"].message
    assert "version is 5" in findings(tiled(), flips=5 << 65)["version"].message
    raw = int.from_bytes(codec.encode(tiled()), "little")
    replaced = raw & ((0xFFFFFFFF << 512) | (0xFFFF << 576))  # as tensormap.replace leaves it
    assert "smem_bytes 0 and smem_pattern 0" in findings(tiled(), flips=replaced)["derived-fields"].message


def test_small_allocations_matter_on_blackwell() -> None:
    sparse = tiled(dims=(64, 64), strides_bytes=(256,))
    assert "small-allocation" in findings(sparse, "sm_120a")
    assert "small-allocation" not in findings(sparse, "sm_90a")
    assert "small-allocation" not in findings(tiled(dims=(64, 64), strides_bytes=(128,)), "sm_120a"), "dense"
    assert "small-allocation" not in findings(tiled(), "sm_120a"), "large"


@pytest.mark.parametrize("target", list(TARGETS))
@pytest.mark.parametrize("spec", [tiled(), tiled(box=(64, 256), swizzle="128B_ATOM_64B"), WIDE, im2col()], ids=repr)
def test_a_target_refuses_what_check_target_refuses(spec: Any, target: str) -> None:
    try:
        check_target(spec, get_target(target))
        refused = False
    except CudaTmaError:
        refused = True
    found = findings(spec, target)
    assert ("target" in found) == refused
    if refused:
        assert found["target"].severity == "error"


def test_what_a_caller_gets() -> None:
    found = cudatma.inspect(tiled(address=0)).lint(target="120a")
    assert (found.target, found.worst) == ("sm_120a", "warning")
    data = json.loads(json.dumps(found.to_json()))
    assert data["findings"][0]["name"] == "null-address"
    assert set(data["findings"][0]) == {"name", "severity", "message", "rule", "source", "remedy"}
    with pytest.raises(TargetError):
        cudatma.inspect(tiled()).lint(target="sm_75")
