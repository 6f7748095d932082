"""The host side of AllReduce, with threads as ranks and host memory as GPU memory. The emulator runs the recorded
launches."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from threads import in_threads

torch = pytest.importorskip("torch")

from cudatma.arrays import describe
from cudatma.errors import ArgumentError, DriverError, LaunchError, PeerTimeout
from cudatma.integrations.torch import AllReduce, all_reduce
from cudatma.kernels.all_reduce.config import ALL_REDUCE, Inbox, packets, received
from cudatma.kernels.gpu import imagined_gpu
from cudatma.target import get_target

RANKS, LONGEST_BYTES = 3, 400
TARGET = get_target("sm_90a")


class Memory:
    """A rank's memory. Its handle is the rank's number."""

    def __init__(self, nbytes: int) -> None:
        self.words = np.zeros(nbytes // 4, np.uint32)
        self.pointer = self.words.ctypes.data

    def write(self, data: bytes) -> None:
        self.words.view(np.uint8)[: len(data)] = np.frombuffer(data, np.uint8)


class OnGpu(torch.Tensor):  # type: ignore[misc,name-defined]
    """A host tensor that pretends to be on a GPU."""

    is_cuda = True


class Ranks:
    """Fakes of torch.distributed, CUDA and the driver for ranks that are threads."""

    def __init__(self) -> None:
        self.local, self.meeting = threading.local(), threading.Barrier(RANKS, timeout=60)
        self.given: list[Any] = [None] * RANKS
        self.memories: dict[int, Memory] = {}
        self.opened: list[tuple[int, int]] = []
        self.closed: list[tuple[int, int]] = []
        self.launches: list[tuple[int, Any, Any]] = []
        self.by_group = 0

    @property
    def rank(self) -> int:
        return int(self.local.rank)

    def gather(self, everyone: list[Any], mine: Any, *, group: Any) -> None:
        self.given[self.rank] = mine
        self.meeting.wait()
        everyone[:] = self.given
        self.meeting.wait()

    def sum_by_group(self, x: Any, *, group: Any) -> None:
        self.by_group += 1

    def share(self, nbytes: int, device: Any) -> Memory:
        self.memories[self.rank] = Memory(nbytes)
        return self.memories[self.rank]

    def open(self, handle: bytes, device: Any) -> int:
        self.opened.append((self.rank, handle[0]))
        return self.memories[handle[0]].pointer

    def close(self, pointer: int, device: Any) -> None:
        owner = next(rank for rank, memory in self.memories.items() if memory.pointer == pointer)
        self.closed.append((self.rank, owner))

    def run(self, work: Callable[[], Any]) -> list[Any]:
        """Return the result or the exception of each rank."""

        def of_rank(rank: int) -> Any:
            self.local.rank = rank
            try:
                return work()
            except Exception as error:
                return error

        return in_threads(RANKS, of_rank)


class FakeTorch:
    """torch with a GPU whose memory is host memory. Like the device of a CPU tensor, its number is None."""

    cuda = SimpleNamespace(is_available=lambda: True, current_device=lambda: None, synchronize=lambda device: None)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *shape: int, dtype: Any, pin_memory: bool) -> Any:
        return torch.zeros(*shape, dtype=dtype)

    def empty(self, *shape: int, dtype: Any, device: str) -> Any:
        return torch.empty(*shape, dtype=dtype)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    fake = Ranks()

    def recorded(operation: Any, inputs: Any, out: Any, options: Any, *, resource: Any) -> None:
        fake.launches.append((fake.rank, operation.check(inputs, out, options, resource).problem, inputs[0]))

    group = SimpleNamespace(
        all_gather_object=fake.gather,
        all_reduce=fake.sum_by_group,
        barrier=lambda group: fake.meeting.wait(),
    )
    for name, value in {
        "dist": group,
        "rank_and_members": lambda group: (fake.rank, list(range(RANKS))),
        "torch": FakeTorch(),
        "run": recorded,
        "launch_of": lambda operation, problem, device, stream: None,
        "shareable_memory": fake.share,
        "memory_handle": lambda memory: bytes([fake.rank]),
        "open_memory": fake.open,
        "close_memory": fake.close,
        "current_stream": lambda library, device: 0,
    }.items():
        monkeypatch.setattr(all_reduce, name, value)
    return fake


def test_the_launch_of_each_rank_reaches_the_memory_of_all(ranks: Ranks) -> None:
    made = ranks.run(lambda: AllReduce(max_bytes=LONGEST_BYTES))
    assert sorted(ranks.opened) == [(a, b) for a in range(RANKS) for b in range(RANKS) if a != b]
    inbox = Inbox(RANKS, LONGEST_BYTES)
    memories = [ranks.memories[rank].words for rank in range(RANKS)]
    for number, (size, dtype) in enumerate(((200, torch.float16), (2, torch.bfloat16), (96, torch.float16)), 1):
        parts = [torch.randn(size).to(dtype) for _ in range(RANKS)]
        total = (parts[0].float() + parts[1].float() + parts[2].float()).to(dtype)
        ranks.launches.clear()
        ranks.run(lambda parts=parts: made[ranks.rank](parts[ranks.rank].as_subclass(OnGpu)))
        assert len(ranks.launches) == RANKS
        sent = [packets(part.view(torch.int16).numpy().copy(), number) for part in parts]
        gpu = imagined_gpu(TARGET, 2)
        for rank, problem, x in ranks.launches:
            for peer in range(RANKS):
                received(memories[rank], inbox, number, peer)[: len(sent[peer])] = sent[peer]
            others = (*memories, made[rank]._failed)
            arrays = {"x": describe(x)} | {f"other {i}": describe(other) for i, other in enumerate(others)}
            (launch,) = ALL_REDUCE.arguments(problem, ALL_REDUCE.configure(problem, gpu, {}), gpu, ())
            launch.emulate(TARGET, arrays, schedules=1, produced_by_previous=())
        assert all(torch.equal(part, total) for part in parts)
    assert ranks.by_group == 0
    ranks.run(lambda: made[ranks.rank].close())
    assert sorted(ranks.closed) == sorted(ranks.opened)


def test_what_the_group_adds_up_instead(ranks: Ranks) -> None:
    made = ranks.run(lambda: AllReduce(max_bytes=LONGEST_BYTES))
    ranks.local.rank = 0
    half = {"dtype": torch.float16}
    others = (
        torch.ones(8, **half),
        torch.ones(202, **half),
        torch.ones(3, **half),
        torch.ones(0, **half),
        torch.ones(8),
    )
    for count, x in enumerate(others):
        made[0](x if count == 0 else x.as_subclass(OnGpu))
        assert ranks.by_group == count + 1
    for x in (torch.ones(4, 4, **half).t(), torch.ones(9, **half)[1:]):
        with pytest.raises(ArgumentError, match=r"^x must be a contiguous, .*aligned tensor"):
            made[0](x.as_subclass(OnGpu))
    assert ranks.launches == []


def test_after_a_timeout_no_call_goes_to_the_group(ranks: Ranks) -> None:
    made = ranks.run(lambda: AllReduce(max_bytes=LONGEST_BYTES))
    ranks.local.rank = 0
    made[0]._failed[0] = 7 << 32 | 2
    for x in (torch.ones(8), torch.ones(8, dtype=torch.float16).as_subclass(OnGpu)):
        with pytest.raises(PeerTimeout, match=r"^rank 1 did not send its part of all-reduce number 7"):
            made[0](x)
    assert (ranks.by_group, ranks.launches) == (0, [])


def test_what_fails_on_one_rank_is_an_error_of_all(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_memory(handle: bytes, device: Any) -> int:
        if (ranks.rank, handle[0]) == (1, 2):
            raise DriverError("cuIpcOpenMemHandle", 217, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED")
        return ranks.open(handle, device)

    monkeypatch.setattr(all_reduce, "open_memory", open_memory)
    for found in ranks.run(AllReduce):
        assert isinstance(found, DriverError)
        assert "rank 1: cuIpcOpenMemHandle failed: CUDA_ERROR_PEER_ACCESS_UNSUPPORTED; pass max_bytes=0" in str(found)
    assert sorted(ranks.closed) == sorted(ranks.opened)

    def share(nbytes: int, device: Any) -> Memory:
        if ranks.rank == 0:
            raise LaunchError("device", 9, "0..1")
        return ranks.share(nbytes, device)

    ranks.opened.clear()
    monkeypatch.setattr(all_reduce, "shareable_memory", share)
    for found in ranks.run(AllReduce):
        assert "got 9" in str(found)
    assert ranks.opened == []


@pytest.mark.parametrize("least", [3600, 0])
def test_ranks_with_different_limits_are_refused(ranks: Ranks, least: int) -> None:
    for rank, found in enumerate(ranks.run(lambda: AllReduce(max_bytes=4000 if ranks.rank else least))):
        assert isinstance(found, ArgumentError)
        assert str(found).startswith("max_bytes must be the same on all ranks")
        assert str(found).endswith(f"got {4000 if rank else least}")
    assert ranks.opened == []


def test_what_torch_raises_on_one_rank_is_an_error_of_all(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    def share(nbytes: int, device: Any) -> Memory:
        if ranks.rank == 1:
            raise torch.OutOfMemoryError("no memory is left")
        return ranks.share(nbytes, device)

    monkeypatch.setattr(all_reduce, "shareable_memory", share)
    for found in ranks.run(AllReduce):
        assert isinstance(found, DriverError)
        assert "rank 1: no memory is left" in str(found)


def test_ranks_of_two_hosts_are_refused(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_reduce, "socket", SimpleNamespace(gethostname=lambda: f"host{ranks.rank // 2}"))
    for found in ranks.run(AllReduce):
        assert "ranks on host1 and host0" in str(found)
