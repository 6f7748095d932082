"""Calls of gemm like an earlier one: what their key tells apart, and when the full checks have to look again."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cudatma.arrays import ArrayInfo, dense_strides
from cudatma.dtypes import BFLOAT16
from cudatma.errors import ArgumentError
from cudatma.kernels import known_call
from cudatma.kernels.choosing import decide
from cudatma.kernels.gemm.choose import GEMM
from cudatma.kernels.gemm.gemm import _moving
from cudatma.kernels.gemm.plan import plan_gemm
from cudatma.kernels.gemm.request import check_call_into
from cudatma.kernels.gpu import imagined_gpu
from cudatma.kernels.known_call import KnownCall, addresses, call_key
from cudatma.kernels.launch import _address
from cudatma.target import get_target


class Array:
    """As CuPy's, with the attributes that are read."""

    def __init__(self, address: int, shape: tuple[int, ...], dtype: Any = np.float16, device: int = 0) -> None:
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.strides = np.empty(shape, dtype).strides
        self.data = SimpleNamespace(ptr=address, device_id=device)

    def __repr__(self) -> str:
        return f"{self.dtype}{self.shape} at {self.data.ptr:#x} of {self.data.device_id}"


@dataclass
class FakeReplay:
    device: int = 0
    runs: list[tuple[tuple[int, ...], int]] = field(default_factory=list)

    def run(self, addresses: tuple[int, ...], stream: int) -> None:
        self.runs.append((addresses, stream))


@pytest.fixture(autouse=True)
def _known_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(known_call._libraries, Array, "cupy")


OPTIONS = (1.0, 0.0, None, None, False, 0)


def arrays(**changes: Any) -> tuple[Any, ...]:
    given = {"a": Array(0x1000, (4, 64)), "b": Array(0x2000, (64, 8)), "bias": Array(0x4002, (8,)), "a_scale": None}
    given |= {"b_scale": Array(0x5000, (8,), np.float32), "out": Array(0x3000, (4, 8))}
    return tuple((given | changes).values())


def key(options: tuple[Any, ...] = OPTIONS, **changes: Any) -> Any:
    return call_key(arrays(**changes), options)


def test_addresses_do_not_count() -> None:
    assert key(a=Array(0x9000, (4, 64)), out=Array(0xA000, (4, 8))) == key() is not None


@pytest.mark.parametrize(
    "changes",
    [
        {"a": Array(0x1000, (5, 64))},
        {"b": Array(0x2000, (64, 8), np.int16)},
        {"out": None},
        {"out": Array(0x3000, (4, 8), device=1)},
        {"bias": None},
        {"a_scale": Array(0x6000, (4,), np.float32)},
        {"b_scale": Array(0x5000, (1,), np.float32)},
    ],
    ids=str,
)
def test_what_lies_otherwise_is_another_call(changes: dict[str, Any]) -> None:
    assert key(**changes) not in (None, key())


@pytest.mark.parametrize("place", range(len(OPTIONS)))
def test_other_options_are_another_call(place: int) -> None:
    for value in ("relu", 2.0, True, 1):
        changed = (*OPTIONS[:place], value, *OPTIONS[place + 1 :])
        assert (key(changed) == key()) == (value is OPTIONS[place])
    assert key((True, *OPTIONS[1:])) != key((1, *OPTIONS[1:])) != key()  # equal numbers of other types


@pytest.mark.parametrize("changes", [{"a": np.zeros((4, 64))}, {"b": np.zeros((64, 8))}, {"a_scale": 2.0}], ids=list)
def test_arrays_of_several_libraries_are_checked(changes: dict[str, Any]) -> None:
    assert key(**changes) is None
    assert key(([1.0], *OPTIONS[1:])) is None


def call() -> KnownCall:
    extents = (4 * 64 * 2, 64 * 8 * 2, 16, 0, 32, 0)
    return KnownCall(FakeReplay(), (4, 8), np.dtype(np.float16), None, 4 * 8 * 2, extents, (15, 15, 1, 0, 3, 15))


def test_it_launches_for_the_new_addresses() -> None:
    known, given = call(), arrays()
    assert known.run("cupy", given, 7) is given[-1]
    assert known.replay.runs == [((0x1000, 0x2000, 0x4002, 0, 0x5000, 0x3000, 0x3000), 7)]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "changes",
    [
        {"a": Array(0x1008, (4, 64))},
        {"b": Array(0x2002, (64, 8))},
        {"out": Array(0x3002, (4, 8))},
        {"bias": Array(0x4001, (8,))},
        {"b_scale": Array(0x5002, (8,), np.float32)},
        {"out": Array(0x11F0, (4, 8))},  # in a
        {"out": Array(0x1FD0, (4, 8))},  # ends in b
        {"out": Array(0x3FF0, (4, 8))},  # over bias
        {"out": Array(0x5010, (4, 8))},  # in b_scale
    ],
    ids=str,
)
def test_addresses_that_need_a_look_launch_nothing(changes: dict[str, Any]) -> None:
    known = call()
    assert known.run("cupy", arrays(**changes), 7) is None
    assert not known.replay.runs  # type: ignore[attr-defined]


@pytest.mark.parametrize("version", [1, 3, 4, "p1"])
@pytest.mark.parametrize("options", [(), ("bias",), ("bias", "a_scale", "b_scale")], ids=len)
def test_every_address_of_a_launch_is_an_argument(version: int | str, options: tuple[str, ...]) -> None:
    shapes = {"a": (128, 64), "b": (64, 64), "out": (128, 64), "bias": (64,), "a_scale": (128,), "b_scale": (64,)}
    given: dict[str, Any] = {}
    for index, name in enumerate(("a", "b", "out", *options)):
        dtype, shape = np.dtype(np.float32 if "scale" in name else np.float16), shapes[name]
        given[name] = ArrayInfo(0x10000 * (index + 1), shape, dense_strides(shape, dtype), dtype, 0, None, "cai")
    request, result = check_call_into(**given)
    target = get_target("sm_120a" if version == "p1" else "sm_90a")
    spec = decide(GEMM, request.problem(version), imagined_gpu(target, 132)).spec
    launch = plan_gemm(request, result, spec, target, 132)
    bases = addresses((*request.read.values(), result, result))
    moving = _moving(spec, launch, result)
    held = [None if index is None else _address(launch.args[index]) for index in moving]
    has_map = "output_map" in spec.parameter_names
    assert held == [*(base or None for base in bases[:-1]), bases[-1] if has_map else None]


def test_the_address_of_scales_by_tma_is_an_argument() -> None:
    """A map's, and that of b's scales a number."""
    e4m3, fp32 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(np.float32)
    a = ArrayInfo(0x10000000, (4096, 4096), (4096, 1), e4m3, 0, None, "cai")
    b = replace(a, pointer=0x20000000, strides_bytes=(1, 4096))
    out = ArrayInfo(0x30000000, (4096, 4096), (8192, 2), BFLOAT16, 0, None, "cai")
    a_scale = ArrayInfo(0x40000000, (4096, 32), (4, 4 * 4096), fp32, 0, None, "cai")
    b_scale = ArrayInfo(0x50000000, (32, 32), (128, 4), fp32, 0, None, "cai")
    request, result = check_call_into(a, b, out, a_scale=a_scale, b_scale=b_scale)
    spec = decide(GEMM, request.problem(), imagined_gpu(get_target("sm_90a"), 132)).spec
    assert spec.ring_has_scales
    launch = plan_gemm(request, result, spec, get_target("sm_90a"), 132)
    moving = _moving(spec, launch, result)
    held = [None if index is None else _address(launch.args[index]) for index in moving]
    assert held == [0x10000000, 0x20000000, 0x40000000, 0x50000000, None, 0x30000000, 0x30000000]
    elsewhere, _ = check_call_into(a, b, out, a_scale=replace(a_scale, pointer=0x40000004), b_scale=b_scale)
    with pytest.raises(ArgumentError, match=r"^spec.scales_by_tma: got True; allowed: False for scales that TMA"):
        plan_gemm(elsewhere, result, spec, get_target("sm_90a"), 132)
