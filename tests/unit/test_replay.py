"""A launch that is repeated follows the arrays of each call; a cache of plans keeps the newest."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np

from cudatma.descriptor import TensorMap
from cudatma.kernels import launch as launching
from cudatma.kernels.launch import Launch, PlanCache, Replay

HOST = np.zeros((64, 64), np.float32)


def planned(launch: Launch, arguments: list[Any], sent: list[Any], *, knows_allocation: bool = False) -> Any:
    """A kernel whose plan has these marshalled arguments, and notes their first words at each launch."""

    def send(stream: int) -> None:
        sent.append((stream, *(ctypes.c_uint64.from_buffer(value).value for value in arguments)))

    plan = SimpleNamespace(arguments=arguments, launch=send)
    target = SimpleNamespace(tensormap_knows_allocation=knows_allocation)
    return SimpleNamespace(plan=lambda *args, **options: plan, target=target)


def test_addresses_keep_their_offsets() -> None:
    """One array lies 0x40 in front of what its argument points at; the second has no argument; the third is a map."""
    sent: list[Any] = []
    amap = TensorMap.from_array(HOST, (8, 8))
    launch = Launch("t", SimpleNamespace(threads=32, smem_bytes=0), 1, (0x1040, amap, 5), ())
    marshalled = [ctypes.c_uint64(0x1040), (ctypes.c_uint64 * 16)(*range(16)), ctypes.c_uint64(5)]
    made = Replay(launch, planned(launch, marshalled, sent), 0, (0x1000, 0, amap.address), (0, None, 1))
    made.run((0x2000, 77, 0x3000), 3)
    made.run((0x4000, 78, 0x5000), 4)
    assert sent == [(3, 0x2040, 0x3000, 5), (4, 0x4040, 0x5000, 5)]
    assert list(marshalled[1][1:]) == list(range(1, 16))


def test_a_launch_during_another_one_has_arguments_of_its_own() -> None:
    """A second thread launches while the first one is between writing its addresses and launching."""
    sent: list[Any] = []
    launch = Launch("t", SimpleNamespace(threads=32, smem_bytes=0), 1, (0x1000, 0x2000), ())

    def plan(values: list[Any], meanwhile: Any) -> Any:
        def send(stream: int) -> None:
            meanwhile()
            sent.append((stream, *(value.value for value in values)))

        copies = [ctypes.c_uint64(value.value) for value in values]
        return SimpleNamespace(arguments=values, launch=send, twin=lambda: plan(copies, lambda: None))

    first = plan([ctypes.c_uint64(1), ctypes.c_uint64(2)], lambda: made.run((0x5000,), 8, (0x6000,)))
    kernel = SimpleNamespace(
        plan=lambda *args, **options: first, target=SimpleNamespace(tensormap_knows_allocation=False)
    )
    made: Replay = Replay(launch, kernel, 0, (0x1000, 0x2000), (0, 1), steady=1)  # type: ignore[arg-type]
    made.run((0x3000,), 7, (0x4000,))
    made.run((0x3000,), 7, (0x4000,))
    assert sent == [(8, 0x5000, 0x6000), (7, 0x3000, 0x4000)] * 2


def test_the_driver_changes_maps_that_know_their_allocation(monkeypatch: Any) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(launching, "replace_address", lambda place, address: asked.append((place, address)))
    monkeypatch.setattr(launching.context, "using", lambda device: __import__("contextlib").nullcontext())
    amap = TensorMap.from_array(HOST, (8, 8))
    launch = Launch("t", SimpleNamespace(threads=32, smem_bytes=0), 1, (amap,), ())
    words = (ctypes.c_uint64 * 16)()
    made = Replay(launch, planned(launch, [words], [], knows_allocation=True), 0, (amap.address - 16,), (0,))
    made.run((0x3000,), 0)
    assert asked == [(ctypes.addressof(words), 0x3010)]


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
