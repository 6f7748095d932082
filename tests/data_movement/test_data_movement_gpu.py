"""The operations over arrays on a GPU: the table of calls, other libraries, streams, graphs, threads and devices."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from movement_cases import CASES, Case, check, numbers, on_host

import cudatma as c
from cudatma.target import detect

pytestmark = pytest.mark.gpu


def upload(array: np.ndarray[Any, Any]) -> Any:
    import cupy

    return cupy.asarray(array)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_call_gives_what_numpy_gives(case: Case) -> None:
    import cupy

    if not detect().has(case.needs):
        pytest.skip(f"this card has no {case.needs}")
    check(case, cupy)


def test_reductions_of_two_streams_add_up() -> None:
    import cupy

    into, one = cupy.zeros((2048, 2048), cupy.int32), cupy.ones((2048, 2048), cupy.int32)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    cupy.cuda.get_current_stream().synchronize()
    for _ in range(10):
        for stream in streams:
            c.reduce_into(into, one, "add", stream=stream)
    for stream in streams:
        stream.synchronize()
    assert (on_host(into) == 20).all()


def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    source = torch.arange(300 * 528, device="cuda", dtype=torch.float32).reshape(300, 528)
    assert torch.equal(c.copy(source), source)
    part = c.copy(source, offset=(1, 8), shape=(200, 500))
    assert torch.equal(part, source[1:201, 8:508])
    assert torch.equal(c.transpose(source.bfloat16()), source.bfloat16().T)
    assert torch.equal(
        c.gather(source, [(0, 8), (3, 16)], (2, 8)), torch.stack([source[0:2, 8:16], source[3:5, 16:24]])
    )
    into = torch.ones_like(source)
    assert torch.equal(c.reduce_into(into, source, "add"), source + 1)
    with torch.cuda.stream(torch.cuda.Stream()):
        result = c.transpose(source)
        torch.cuda.current_stream().synchronize()
    assert torch.equal(result, source.T)


def test_calls_in_a_graph() -> None:
    """After a first call, which loads the kernels, nothing but launches is recorded, each with its own addresses."""
    import cupy

    sources = [upload(numbers((256, 1040), np.float32, seed)) for seed in range(5)]
    moved = [cupy.zeros((256, 1024), cupy.float32) for _ in sources]
    turned = [cupy.zeros((1024, 256), cupy.float32) for _ in sources]
    sums = cupy.zeros((256, 1024), cupy.float32)

    def chain(source: Any, between: Any, out: Any) -> None:
        c.copy(source, out=between, offset=(0, 8), shape=(256, 1024))
        c.transpose(between, out=out)
        c.reduce_into(sums, between, "add")

    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    with stream:
        chain(sources[0], moved[0], turned[0])
        sums.fill(0)
        stream.synchronize()
        stream.begin_capture()
        for arrays in zip(sources, moved, turned, strict=True):
            chain(*arrays)
        graph = stream.end_capture()
        for source in sources:
            source += 1
        for _ in range(3):
            graph.launch(stream)
        stream.synchronize()
    expected = [numbers((256, 1040), np.float32, seed)[:, 8:1032] + 1 for seed in range(5)]
    assert all((on_host(out) == one.T).all() for out, one in zip(turned, expected, strict=True))
    assert (on_host(sums) == 3 * sum(expected)).all()


def test_repeated_calls_of_many_threads() -> None:
    import cupy

    wrong: list[object] = []
    device = cupy.cuda.runtime.getDevice()
    c.copy(upload(numbers((128, 528), np.float32)), offset=(3, 4), shape=(100, 512))

    def work(thread: int) -> None:
        try:
            with cupy.cuda.Device(device), cupy.cuda.Stream(non_blocking=True) as stream:
                hosts = [numbers((128, 528), np.float32, 100 * thread + turn) for turn in range(30)]
                arrays = [upload(host) for host in hosts]
                results = [c.copy(array, offset=(3, 4), shape=(100, 512)) for array in arrays]
                stream.synchronize()
                for turn, (host, result) in enumerate(zip(hosts, results, strict=True)):
                    if not (on_host(result) == host[3:103, 4:516]).all():
                        wrong.append((thread, turn))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert wrong == []


def test_repeated_calls_on_two_cards() -> None:
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two cards")
    for seed in range(2):
        for ordinal in range(2):
            with cupy.cuda.Device(ordinal):
                host = numbers((128, 528), np.float32, 2 * seed + ordinal)
                x, out = upload(host), cupy.zeros((100, 512), cupy.float32)
                cupy.cuda.get_current_stream().synchronize()
            # Whichever card is current.
            c.copy(x, out=out, offset=(3, 4), shape=(100, 512))
            with cupy.cuda.Device(ordinal):
                cupy.cuda.Device(ordinal).synchronize()
                assert (on_host(out) == host[3:103, 4:516]).all()


def test_prefetch_changes_nothing() -> None:
    source = numbers((3000, 1040), np.float32)
    device = upload(source)
    c.prefetch(device)
    c.prefetch(device, offset=(3, 4), shape=(2000, 800))
    c.prefetch(device[:, :1000])
    assert (on_host(device) == source).all()


def test_wrong_calls_write_nothing_and_leave_the_context_usable() -> None:
    import cupy

    host, room = numbers((64, 80), np.float32), cupy.zeros(65 * 80, cupy.float32)
    device, out = upload(host), room[: 64 * 80].reshape(64, 80)
    c.copy(device, out=out, via="tma")
    off = room[1 : 1 + 64 * 80].reshape(64, 80)
    for wrong, error in (
        (lambda: c.copy(device, out=off, via="tma"), c.DescriptorError),
        (lambda: c.copy(device[:, 1:61], via="tma"), c.DescriptorError),
        (lambda: c.copy(out, out=room[80:].reshape(64, 80), via="tma"), c.ArgumentError),
        (lambda: c.copy(device, out=np.zeros((64, 80), np.float32)), c.ArgumentError),
        (lambda: c.gather(device, [(0, 1)], (4, 8)), c.ArgumentError),
        (lambda: c.gather(device, cupy.asarray(np.array([(0, 1)], np.int32)), (4, 8)), c.ArgumentError),
        (lambda: c.reduce_into(device, device, "xor"), c.ArgumentTypeError),
    ):
        with pytest.raises(error):
            wrong()
    assert (on_host(out) == host).all()
    assert (on_host(c.copy(device, out=off)) == host).all()
