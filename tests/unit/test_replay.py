"""A launch that is repeated uses the addresses of each call; a cache of plans keeps the newest."""

from __future__ import annotations

import contextlib
import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from cudatma.descriptor import TiledSpec
from cudatma.kernels import replay as replay_module
from cudatma.kernels.arguments import Arguments, At, Map, Sizes, Value
from cudatma.kernels.operation import PlanCache
from cudatma.kernels.replay import Replay
from cudatma.target import get_target

CONFIG = SimpleNamespace(threads=32, smem_bytes=0)
MAP = Map("m", TiledSpec(dtype="float32", dims=(64, 64), strides_bytes=(256,), box=(8, 8)), offset_bytes=16)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Encode maps as zeros; return the (place, address) that the driver was asked to write."""
    asked: list[tuple[int, int]] = []
    fake = SimpleNamespace(
        encode=lambda spec, device: bytes(128),
        replace_address=lambda place, address: asked.append((place, address)),
    )
    monkeypatch.setattr(replay_module, "driver", fake)
    monkeypatch.setattr(replay_module.context, "using", lambda device: contextlib.nullcontext())
    return asked


def kernel(marshalled: list[Any], sent: list[Any], *, knows_allocation: bool = False) -> Any:
    """Return a kernel whose plan has these marshalled arguments, and notes their first words at each launch."""

    def send(stream: int) -> None:
        sent.append((stream, *(int.from_bytes(bytes(value)[:8], "little") for value in marshalled)))

    plan = SimpleNamespace(arguments=marshalled, launch=send, reshape=lambda *sizes: sent.append(sizes))
    target = get_target("sm_120a" if knows_allocation else "sm_90a")
    return SimpleNamespace(plan=lambda *args, **options: plan, target=target)


def test_addresses_keep_their_offsets() -> None:
    """One array is used from byte 64 on; no argument holds the second; the third has a map with an offset."""
    sent: list[Any] = []
    arguments = Arguments("t", CONFIG, (At("a", 64), MAP, 5), Sizes(1))
    marshalled = [ctypes.c_uint64(), (ctypes.c_uint64 * 16)(*range(16)), ctypes.c_uint64(5)]
    replay = Replay(arguments, kernel(marshalled, sent), 0, ("a", "b", "m"), (0x1000, 0, 0x2000))
    replay.run(arguments.sizes, (0x2000, 77, 0x3000), 3)
    replay.run(arguments.sizes, (0x4000, 78, 0x5000), 4)
    assert sent == [(3, 0x2040, 0x3010, 5), (4, 0x4040, 0x5010, 5)]
    assert list(marshalled[1][1:]) == list(range(1, 16))


def test_other_sizes_change_the_grid_and_the_values() -> None:
    sent: list[Any] = []
    arguments = Arguments("t", CONFIG, (At("a"), Value(0)), Sizes(1, (7,)))
    replay = Replay(arguments, kernel([ctypes.c_uint64(), ctypes.c_uint64(7)], sent), 0, ("a",), (0x1000,))
    for sizes in (arguments.sizes, other := Sizes(3, (9,)), other, arguments.sizes):
        replay.run(sizes, (0x1000,), 0)
    assert sent == [(0, 4096, 7), (3, 0, False), (0, 4096, 9), (0, 4096, 9), (1, 0, False), (0, 4096, 7)]


def test_a_launch_during_another_one_has_arguments_of_its_own() -> None:
    """A second thread launches while the first one is between writing its addresses and launching."""
    sent: list[Any] = []
    arguments = Arguments("t", CONFIG, (At("a"), At("w")), Sizes(1))

    def plan(values: list[Any], meanwhile: Any) -> Any:
        def send(stream: int) -> None:
            meanwhile()
            sent.append((stream, *(value.value for value in values)))

        copies = [ctypes.c_uint64(value.value) for value in values]
        twin = lambda: plan(copies, lambda: None)  # noqa: E731
        return SimpleNamespace(arguments=values, launch=send, twin=twin, reshape=lambda *_: None)

    first = plan([ctypes.c_uint64(1), ctypes.c_uint64(2)], lambda: made.run(sizes, (0x5000,), 8, (0x6000,)))
    target = SimpleNamespace(tensormap_knows_allocation=False)
    one: Any = SimpleNamespace(plan=lambda *args, **options: first, target=target)
    sizes: Sizes = arguments.sizes
    made: Replay = Replay(arguments, one, 0, ("a", "w"), (0x1000, 0x2000), steady=1)
    made.run(sizes, (0x3000,), 7, (0x4000,))
    made.run(sizes, (0x3000,), 7, (0x4000,))
    assert sent == [(8, 0x5000, 0x6000), (7, 0x3000, 0x4000)] * 2


def test_the_driver_changes_maps_that_know_their_allocation(driver: list[tuple[int, int]]) -> None:
    arguments, words = Arguments("t", CONFIG, (MAP,), Sizes(1)), (ctypes.c_uint64 * 16)()
    replay = Replay(arguments, kernel([words], [], knows_allocation=True), 0, ("m",), (0x1000,))
    replay.run(arguments.sizes, (0x3000,), 0)
    assert driver == [(ctypes.addressof(words), 0x3010)]


def test_the_newest_plans_stay() -> None:
    cache: PlanCache[int] = PlanCache(4)
    for key in range(6):
        cache.put(key, 10 * key)
        assert len(cache) <= 4
    assert cache == {2: 20, 3: 30, 4: 40, 5: 50}
    cache.put(5, 51)
    assert cache[5] == 51
    cache.clear()
    assert not cache
