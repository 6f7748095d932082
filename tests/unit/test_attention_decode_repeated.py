"""attention_decode and attention_varlen on a device: which argument holds which address, the workspace, and calls like
an earlier one."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cudatma.arrays import ArrayInfo, dense_strides
from cudatma.kernels import known_call
from cudatma.kernels.attention import attention, call, decode
from cudatma.kernels.gpu import imagined_gpu
from cudatma.kernels.launch import Launch, _address
from cudatma.target import get_target

SM90A = get_target("sm_90a")
SHAPES = {"q": (2, 1, 8, 64), "k_cache": (2, 4096, 2, 64), "v_cache": (2, 4096, 2, 64), "seqlens": (2,)}
PAGED = {"k_cache": (512, 16, 2, 64), "v_cache": (512, 16, 2, 64), "page_table": (2, 256)}
SPACE = SimpleNamespace(partials_pointer=0x5000, flags_pointer=0x6000)


@dataclass
class FakeReplay:
    launch: Any = None
    kernel: Any = None
    device: int = 0
    bases: tuple[int, ...] = ()
    moving: tuple[int | None, ...] = ()
    runs: list[tuple[tuple[int, ...], int]] = field(default_factory=list)

    def run(self, addresses: tuple[int, ...], stream: int) -> None:
        self.runs.append((addresses, stream))


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[FakeReplay]:
    """Those that calls make, in order."""
    made: list[FakeReplay] = []

    def replay(*given: Any) -> FakeReplay:
        made.append(FakeReplay(*given))
        return made[-1]

    monkeypatch.setattr(call, "Replay", replay)
    monkeypatch.setattr(call, "detect", lambda device: SM90A)
    monkeypatch.setattr(call, "gpu_of", lambda device: imagined_gpu(SM90A, 132))
    monkeypatch.setattr(call, "stream_handle", lambda stream, kind, device: 7)
    monkeypatch.setattr(call, "order_after_producers", lambda *given: None)
    for module in (attention, decode):
        monkeypatch.setattr(module, "backend_for", lambda name, backend: "cuda")
    monkeypatch.setattr(call, "stream_workspace", lambda device, stream, size: SPACE)
    monkeypatch.setattr(Launch, "loaded", lambda *given: None)
    call._PLANS.clear()
    return made


def on_device(shapes: dict[str, tuple[int, ...]], of_cache: Any = np.float16) -> dict[str, ArrayInfo]:
    found, kinds = {}, dict.fromkeys(("k_cache", "v_cache"), of_cache)
    kinds |= dict.fromkeys(("sink", "k_scale", "v_scale"), np.float32)
    for index, (name, shape) in enumerate(shapes.items()):
        is_integer = "seqlens" in name or name == "page_table"
        dtype = np.dtype(np.int32 if is_integer else kinds.get(name, np.float16))
        strides = dense_strides(shape, dtype)
        found[name] = ArrayInfo(0x7F0000000000 + (index << 32), shape, strides, dtype, 0, None, "cai")
    return found


@pytest.mark.parametrize(("page_size", "has_sink"), [(0, False), (16, True), (5, False), (0, True)])
@pytest.mark.parametrize("scales", [(), ("k_scale",), ("v_scale", "k_scale")])
def test_each_address_goes_to_its_argument(
    replays: list[FakeReplay], page_size: int, has_sink: bool, scales: tuple[str, ...]
) -> None:
    shapes = SHAPES | (PAGED if page_size else {}) | {"out": SHAPES["q"]}
    shapes |= {"sink": SHAPES["q"][2:3]} if has_sink else {}
    if page_size == 5:
        shapes |= dict.fromkeys(("k_cache", "v_cache"), (512, 5 if not scales else 8, 2, 64))
    given: Any = on_device(shapes | dict.fromkeys(scales, (2,)), ml_dtypes.float8_e4m3fn if scales else np.float16)
    for _ in range(2):
        assert decode.attention_decode(**given) is given["out"]
    (replay,) = replays
    names = replay.launch.spec.parameter_names
    wanted = ["q", "k_cache", "v_cache", "seqlens", "page_table", "sink", "k_scale", "v_scale", "out"]
    for base, index, name in zip(replay.bases, replay.moving, wanted, strict=False):
        if index is None:
            assert name not in given
        elif name in given:
            assert _address(replay.launch.args[index]) == base == given[name].pointer
        else:
            assert (name, replay.launch.args[index], base) == ("v_scale", 0, 0)
    assert replay.moving[9] is None  # no lse
    assert [names[index] for index in replay.moving[10:] if index is not None] == ["partials", "counters"]
    addresses = tuple(given[name].pointer if name in given else 0 for name in wanted)
    assert replay.runs == [((*addresses, 0, 0x5000, 0x6000), 7)] * 2


def test_a_scale_of_keys_is_not_one_of_values(replays: list[FakeReplay]) -> None:
    given: Any = on_device(SHAPES | {"out": SHAPES["q"], "k_scale": (2,)}, ml_dtypes.float8_e4m3fn)
    scale = given.pop("k_scale")
    for name in ("k_scale", "v_scale"):
        decode.attention_decode(**given, **{name: scale})
    assert len(replays) == 2


@pytest.mark.parametrize(("capacity", "of_cache", "overlaps"), [
    (200000, np.float16, True), (200000, ml_dtypes.float8_e4m3fn, True), (210000, ml_dtypes.float8_e4m3fn, False),
])  # fmt: skip
def test_a_large_e4m3_cache_is_read_alone(
    replays: list[FakeReplay], capacity: int, of_cache: Any, overlaps: bool
) -> None:
    """From 50 MiB on."""
    caches = dict.fromkeys(("k_cache", "v_cache"), (1, capacity, 2, 64))
    decode.attention_decode(
        **on_device({"q": (1, 1, 8, 64)} | caches | {"seqlens": (1,), "out": (1, 1, 8, 64)}, of_cache)
    )
    assert replays[0].launch.programmatic == overlaps


def test_one_part_needs_no_workspace(replays: list[FakeReplay]) -> None:
    short = on_device(SHAPES | dict.fromkeys(("k_cache", "v_cache"), (2, 64, 2, 64)) | {"out": SHAPES["q"]})
    decode.attention_decode(**short)
    ((addresses, _),) = replays[0].runs
    read = [short[name].pointer for name in ("q", "k_cache", "v_cache", "seqlens")]
    assert addresses == replays[0].bases == (*read, 0, 0, 0, 0, short["out"].pointer, 0)
    assert len(replays[0].moving) == len(addresses)


def test_sequences_of_other_greatest_lengths_are_another_plan(replays: list[FakeReplay]) -> None:
    shapes = {"q": (40, 8, 64), "k": (40, 2, 64), "v": (40, 2, 64), "cu_seqlens_q": (3,), "cu_seqlens_k": (3,)}
    given: Any = on_device(shapes | {"out": shapes["q"]})
    for longest in (20, 30, 20):
        assert attention.attention_varlen(**given, max_seqlen_q=longest, max_seqlen_k=40) is given["out"]
    assert [len(replay.runs) for replay in replays] == [2, 1]
    addresses = (*(given[name].pointer for name in shapes), 0, given["out"].pointer, 0)
    for replay in replays:
        assert replay.runs[0] == (addresses, 7)
        held = [index if index is None else _address(replay.launch.args[index]) for index in replay.moving]
        assert held == [address or None for address in addresses]


def known(monkeypatch: pytest.MonkeyPatch, **addresses: int) -> tuple[Any, FakeReplay]:
    """What a known call gives for arrays of 4 KB at these addresses, and its launches."""
    replay: Any = FakeReplay()
    monkeypatch.setattr(known_call, "current_stream", lambda library, device: 9)
    places = {
        "q": 0x10000,
        "k": 0x20000,
        "v": 0x30000,
        "seqlens": 0x40004,
        "table": 0x50004,
        "out": 0x60000,
    } | addresses
    arrays = tuple(SimpleNamespace(data=SimpleNamespace(ptr=place)) for place in places.values())
    one = known_call.KnownCall(replay, (1,), None, None, 4096, (*[4096] * 5, 0), (15, 15, 15, 3, 3, 15))
    return one.run("cupy", arrays, None), replay


def test_a_known_call_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    done, replay = known(monkeypatch)
    assert done is not None
    assert replay.runs == [((0x10000, 0x20000, 0x30000, 0x40004, 0x50004, 0x60000, 0x60000), 9)]


@pytest.mark.parametrize("moved", [{"q": 0x10008}, {"seqlens": 0x40002}, {"out": 0x4F00}, {"out": 0x50000}])
def test_addresses_that_may_be_wrong_are_left_to_the_full_checks(
    monkeypatch: pytest.MonkeyPatch, moved: dict[str, int]
) -> None:
    if moved == {"out": 0x4F00}:
        moved = {"out": 0x10000 - 16}
    done, replay = known(monkeypatch, **moved)
    assert done is None
    assert not replay.runs
