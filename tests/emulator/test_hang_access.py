"""A debug kernel refuses exactly the TMA accesses that would trap."""

from __future__ import annotations

from functools import lru_cache

import pytest
from access_kernel import ACCESS, ACCESSES, SHARED_BYTES, Access, operands

import cudatma
from cudatma.descriptor import TiledSpec, check_load, check_store
from cudatma.descriptor.codec import encode
from cudatma.errors import DescriptorError, PipelineHang
from cudatma.layout import Swizzle, required_alignment


@lru_cache(maxsize=1)
def kernel() -> cudatma.Kernel:
    return cudatma.compile(ACCESS, None, target="sm_90a", template=True, debug=True)


def run(access: Access) -> None:
    kernel().emulate(1, 32, operands(access), shared_bytes=SHARED_BYTES, schedules=1, hazards="collect")


@pytest.mark.parametrize("access", [a for a in ACCESSES if not a.rule], ids=lambda access: access.name)
def test_a_right_access_goes_through(access: Access) -> None:
    run(access)


@pytest.mark.parametrize("access", [a for a in ACCESSES if a.rule], ids=lambda access: access.name)
def test_a_wrong_access_is_refused(access: Access) -> None:
    with pytest.raises(PipelineHang, match="an operation was refused") as caught:
        run(access)
    first = caught.value.waits[0]
    assert (first.state, first.rule, first.block, first.warp, first.lanes) == ("refused", access.rule, (0, 0, 0), 0, 1)
    assert access.detail in first.detail
    assert first.cause == first.detail
    assert "(bar" in first.text or "(box" in first.text or "map" in first.text or "memory" in first.text


@pytest.mark.parametrize("what", ["LOAD", "STORE"])
@pytest.mark.parametrize(("dtype", "columns"), [("uint8", 64), ("uint16", 64), ("float32", 32), ("int64", 16)])
def test_coordinates_are_refused_as_python_refuses_them(what: str, dtype: str, columns: int) -> None:
    check = check_load if what == "LOAD" else check_store
    for c0, c1 in ((0, 0), (1, 0), (2, 5), (4, -1), (8, 1), (16, 63), (-16, 0), (-2, 2), (48, -7)):
        size = {"uint8": 1, "uint16": 2, "float32": 4, "int64": 8}[dtype]
        access = Access("any", what, c0=c0, c1=c1, dtype=dtype, bytes=16 * columns * size, map={"box": (16, columns)})
        try:
            check(operands(access)[0].spec, (c0, c1))
        except DescriptorError:
            with pytest.raises(PipelineHang) as caught:
                run(access)
            assert caught.value.waits[0].rule in ("coordinate_alignment", "negative_coordinate")
        else:
            run(access)


def test_a_map_with_a_dimension_beyond_reach_is_refused() -> None:
    spec = TiledSpec(dtype="uint8", dims=((1 << 31) + 16, 4), strides_bytes=(1 << 33,), address=1 << 20, box=(64, 4))
    arguments = (encode(spec), *operands(Access("far", "LOAD"))[1:])
    with pytest.raises(PipelineHang) as caught:
        kernel().emulate(1, 32, arguments, shared_bytes=SHARED_BYTES, schedules=1)
    assert caught.value.waits[0].rule == "dimension"
    assert f"dimension 0 of the tensor map has {(1 << 31) + 16} elements" in caught.value.waits[0].detail


def test_the_alignments_are_those_of_the_layout() -> None:
    """A whole pattern in the slot begins only at multiples of required_alignment()."""
    for swizzle, columns in ((Swizzle.NONE, 64), (Swizzle.B32, 16), (Swizzle.B64, 32), (Swizzle.B128, 64)):
        for shift in (0, 64, 128, 256, 512, 1024):
            options = {"swizzle": swizzle.label, "box": (16, columns)}
            access = Access("any", "STORE", shift=shift, map=options)
            if shift % required_alignment(swizzle):
                with pytest.raises(PipelineHang, match="aligned"):
                    run(access)
            else:
                run(access)
