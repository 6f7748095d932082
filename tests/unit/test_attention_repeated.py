"""Calls of attention like an earlier one: what their key tells apart, and when the full checks have to look again."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cudatma.kernels import known_call
from cudatma.kernels.attention.call import argument_indices, repeated
from cudatma.kernels.attention.sample import SMALL
from cudatma.kernels.attention.versions import VERSIONS
from cudatma.kernels.known_call import KnownCall

SHAPES = {"q": (1, 4, 2, 32), "k": (1, 6, 1, 32), "v": (1, 6, 1, 32), "out": (1, 4, 2, 32)}


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


OPTIONS = (False, None, None, False, "")


def arrays(**changes: Any) -> Any:
    given = {name: Array(0x1000 * (index + 1), shape) for index, (name, shape) in enumerate(SHAPES.items())}
    return tuple((given | changes).values())


def key(window: Any = None, options: tuple[Any, ...] = OPTIONS, **changes: Any) -> Any:
    return repeated(arrays(**changes), window, options, None, None)[0]


def test_addresses_do_not_count() -> None:
    assert key(q=Array(0x9000, SHAPES["q"]), out=Array(0xA000, SHAPES["out"])) == key() is not None


@pytest.mark.parametrize(
    "changes",
    [
        {"q": Array(0x1000, (1, 5, 2, 32))},
        {"k": Array(0x2000, SHAPES["k"], np.int16)},
        {"out": None},
        {"out": Array(0x4000, SHAPES["out"], device=1)},
    ],
    ids=str,
)
def test_what_lies_otherwise_is_another_call(changes: dict[str, Any]) -> None:
    assert key(**changes) not in (None, key())


def test_other_options_are_another_call() -> None:
    changed = [key(options=(*OPTIONS[:place], value, *OPTIONS[place + 1 :])) for place in range(5) for value in (1, "")]
    changed += [key(window) for window in ((1, None), (None, 1), (1, 0), (0, 1), (True, 0))]
    assert len({*changed, key()}) == len(changed)  # "" is a version already
    assert key((None, None)) == key()


@pytest.mark.parametrize("window", [[1, 2], 3, (np.int64(1), 0), (1.5, [0])], ids=str)
def test_a_window_that_is_no_pair_of_ints_is_checked(window: Any) -> None:
    known = key(window)
    assert known is None or known != key((1, 0))


def test_arrays_of_several_libraries_are_checked() -> None:
    assert key(q=np.zeros(SHAPES["q"])) is None
    assert key(v=np.zeros(SHAPES["v"])) is None


def call(lse_dtype: Any = None) -> KnownCall:
    lse = None if lse_dtype is None else ((1, 2, 4), lse_dtype)
    return KnownCall(FakeReplay(), SHAPES["q"], np.dtype(np.float16), lse, 512, (512, 384, 384, 0), (15,) * 4)


def test_it_launches_for_the_new_addresses() -> None:
    known, given = call(), arrays()
    assert known.run("cupy", given, 7) is given[3]
    assert known.replay.runs == [((0x1000, 0x2000, 0x3000, 0x4000, 0x4000), 7)]  # type: ignore[attr-defined]


def test_it_makes_what_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Array] = []

    def empty(shape: tuple[int, ...], dtype: Any) -> Array:
        made.append(Array(0x8000 + 0x1000 * len(made), shape, dtype))
        return made[-1]

    cuda = SimpleNamespace(Device=lambda device: contextlib.nullcontext())
    cuda.get_current_stream = lambda device=0: SimpleNamespace(ptr=7)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda, empty=empty))
    known = call(np.dtype(np.float32))
    out, lse = known.run("cupy", arrays(out=None), 7)
    assert made == [out, lse]
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (SHAPES["q"], np.float16, (1, 2, 4), np.float32)
    assert known.replay.runs == [((0x1000, 0x2000, 0x3000, 0x8000, 0x9000), 7)]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "changes",
    [
        *({name: Array(0x5008, SHAPES[name])} for name in SHAPES),
        {"out": Array(0x11F0, SHAPES["out"])},  # in q
        {"out": Array(0x1E10, SHAPES["out"])},  # ends in k
        {"out": Array(0x3000, SHAPES["out"])},  # v
    ],
    ids=str,
)
def test_addresses_that_need_a_look_launch_nothing(changes: dict[str, Any]) -> None:
    known = call()
    assert known.run("cupy", arrays(**changes), 7) is None
    assert not known.replay.runs  # type: ignore[attr-defined]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_address_of_a_launch_is_an_argument(version: str) -> None:
    kind = VERSIONS[version]
    names = kind("float16", 64, 64, **SMALL[version]).parameter_names
    read, workspace = ("q", "k", "v", "sink"), [None, 5 if kind.is_persistent else None]
    assert argument_indices(names, read, True) == [0, 1, 2, None, 3, 4, *workspace]
    assert argument_indices(names, read, False) == [0, 1, 2, None, 3, None, *workspace]
    with_sink = argument_indices((*names[:-1], "sink", "problem"), read, True)
    assert with_sink == [0, 1, 2, len(names) - 1, 3, 4, *workspace]
