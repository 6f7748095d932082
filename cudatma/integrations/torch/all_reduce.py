"""AllReduce: sums of small tensors over the GPUs of a host, by one kernel that writes to the other GPUs' memory."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from cudatma.dtypes import ACTIVATION_TYPES
from cudatma.errors import ArgumentError, ArgumentTypeError, DriverError, PeerTimeout
from cudatma.kernels.all_reduce.config import (
    ALL_REDUCE,
    MAX_RANKS,
    WORD_BYTES,
    Group,
    Inbox,
    Problem,
    initial_state,
    longest_message_bytes,
)
from cudatma.kernels.checks import check_gradient, checked_count, real_number
from cudatma.kernels.engine import launch_of, run
from cudatma.library_streams import current_stream
from cudatma.runtime.device_memory import close_memory, memory_handle, open_memory, shareable_memory


def rank_and_members(group: Any) -> tuple[int, list[int]]:
    """This process's rank in a group, and all members' ranks in the default group. None is the default group.

    ArgumentError without a group, and outside of it; ArgumentTypeError.
    """
    if not dist.is_available() or not dist.is_initialized():
        remedy = "call torch.distributed.init_process_group(), or run under torchrun and do so"
        raise ArgumentError("group", "no process group", "one of torch.distributed", remedy)
    if type(group) is int and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ArgumentError("group", "a group without this process", "one that it is in")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ArgumentTypeError("group", type(group).__name__, "None, or a ProcessGroup of torch.distributed")
    return dist.get_rank(group), list(dist.get_process_group_ranks(dist.group.WORLD if group is None else group))


_MOST_BYTES, _ALLOWED_BYTES = 1 << 30, "None, or 0 to 2**30"
#: By the number that the operator gets. An object stays until close(): peers write to its memory.
_known: dict[int, AllReduce] = {}
#: Never one twice: a compiled graph may outlive the object that it calls.
_numbers = itertools.count(1)
#: Kept for the life of the process, even if this module is reloaded: a library takes its operators with it.
_libraries: list[Any] = globals().get("_libraries", [])


class AllReduce:
    """Adds up tensors over the ranks of a process group, in place: each rank gets the same bits.

    Up to ``max_bytes`` of fp16 or bf16 in one shot: one kernel writes the tensor to the memory of all peers, and adds
    up what the peers wrote, in fp32 and in the order of the ranks. Anything else by the group's all-reduce.

    All ranks make the object, call it and close it in the same order. group: None is torch's default group, of 2 to 8
    ranks on one host whose GPUs reach each other's memory. device: an ordinal, None is torch's current device; without
    CUDA every call is the group's. max_bytes: None chooses by a model of one shot and of NCCL. Inboxes take
    8/3 ranks max_bytes of device memory: by default 49 MB for two ranks, 13 MB for four, 9 MB for eight. timeout_s: how
    long a kernel waits for a peer. The sums that it lacks and the results of all later launches, replays of graphs too,
    are then NaNs; calls and check() raise PeerTimeout. The calls of a rank are in one stream, or ordered by events.

    Raises ArgumentError, ArgumentTypeError; DriverError on every rank if any of them cannot reach a peer's memory.
    """

    def __init__(
        self, group: Any = None, *, device: int | None = None, max_bytes: int | None = None, timeout_s: float = 30.0
    ) -> None:
        self.rank, self.members = rank_and_members(group)
        self.group, self.ranks = group, len(self.members)
        if self.ranks > MAX_RANKS:
            raise ArgumentError("group", f"one of {self.ranks} ranks", f"1 to {MAX_RANKS} ranks")
        self.timeout_s = real_number(timeout_s, "timeout_s")
        if not 0 < self.timeout_s < 2**32:
            raise ArgumentError("timeout_s", timeout_s, "seconds, above 0")
        limit = longest_message_bytes(max(2, self.ranks))
        if max_bytes is not None and (limit := checked_count(max_bytes, "max_bytes", _ALLOWED_BYTES)) > _MOST_BYTES:
            raise ArgumentError("max_bytes", max_bytes, _ALLOWED_BYTES)
        self.max_bytes = limit if self.ranks > 1 and torch.cuda.is_available() else 0
        if device is not None:
            device = checked_count(device, "device", "None, or a GPU's ordinal")
        self._peers: list[int] = []
        self._memory: Any = None
        if self.ranks > 1:
            self._check_limits()
        if self.max_bytes:
            self._device = torch.cuda.current_device() if device is None else device
            self._connect()
        self._number = next(_numbers)
        _known[self._number] = self

    def _check_limits(self) -> None:
        """Raise ArgumentError on every rank unless all have the same limit: one would write beyond another's inbox, or
        wait for a rank that has none."""
        limits = [int(limit) for limit, _, _ in self._gathered((str(self.max_bytes), b"", ""))]
        if len(set(limits)) > 1:
            raise ArgumentError("max_bytes", self.max_bytes, f"the same on all ranks, which have {limits}")

    def _connect(self) -> None:
        """Make the inbox and map those of the peers. What fails on one rank is an error on all of them."""
        inbox = Inbox(self.ranks, self.max_bytes)
        own, error = self._attempt(lambda: self._make(inbox))
        everyone = self._gathered((socket.gethostname(), own, error))
        if not any(error for _, _, error in everyone):
            _, error = self._attempt(lambda: self._map(inbox, [(host, handle) for host, handle, _ in everyone]))
            everyone = self._gathered((socket.gethostname(), b"", error))
        if found := [f"rank {rank}: {error}" for rank, (_, _, error) in enumerate(everyone) if error]:
            self._disconnect()
            raise DriverError("AllReduce", None, "; ".join(found), "max_bytes=0 leaves all to the group's all-reduce")

    def _attempt(self, function: Callable[[], bytes]) -> tuple[bytes, str]:
        """What it returns, and what went wrong."""
        try:
            return function(), ""
        except Exception as error:  # torch's, too: the other ranks wait for this one
            return b"", str(error)

    def _gathered(self, mine: tuple[str, bytes, str]) -> list[tuple[str, bytes, str]]:
        everyone: list[Any] = [None] * self.ranks
        dist.all_gather_object(everyone, mine, group=self.group)
        return everyone

    def _make(self, inbox: Inbox) -> bytes:
        """This rank's memory; its handle."""
        self._memory = shareable_memory(inbox.nbytes, self._device)
        self._memory.write(initial_state())
        return memory_handle(self._memory)

    def _map(self, inbox: Inbox, everyone: Sequence[tuple[str, bytes]]) -> bytes:
        """The peers' memory, and launches of the kernels: a capture then finds them loaded."""
        memories = []
        for peer, (host, handle) in enumerate(everyone):
            if host != socket.gethostname():
                raise ArgumentError("group", f"ranks on {host} and {socket.gethostname()}", "ranks on one host")
            if peer == self.rank:
                memories.append(self._memory.pointer)
            else:
                memories.append(open_memory(handle, self._device))
                self._peers.append(memories[-1])
        self._failure = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        self._failed = self._failure.numpy()
        member = inbox.member(self.rank, memories, self._failure.data_ptr(), int(self.timeout_s * 1e9))
        self._reduced = Group(self.ranks, member)
        stream = current_stream("torch", self._device)
        for name in ACTIVATION_TYPES:
            for nbytes in (WORD_BYTES, self.max_bytes):
                launch_of(ALL_REDUCE, Problem(self._reduced, name, max(1, nbytes // WORD_BYTES)), self._device, stream)
        return b""

    def __call__(self, x: Any) -> Any:
        """x, a contiguous tensor of the same shape and dtype on every rank, which becomes the sum of all.

        Raises ArgumentError, ArgumentTypeError, PeerTimeout, and what torch's all_reduce raises.
        """
        if not isinstance(x, torch.Tensor):
            raise ArgumentTypeError("x", type(x).__name__, "a torch tensor")
        if torch.compiler.is_compiling():
            torch.ops.cudatma.all_reduce_(x, self._number)
        else:
            self._run(x)
        return x

    def _run(self, x: Any) -> None:
        self.check()
        nbytes = x.numel() * x.element_size()
        if not self._is_one_shot(x, nbytes):
            if self.ranks > 1:
                dist.all_reduce(x, group=self.group)
            return
        if not x.is_contiguous() or x.data_ptr() % 4 or x.device.index != self._device:
            got = f"strides {x.stride()} on {x.device}"
            raise ArgumentError("x", got, f"a contiguous tensor on cuda:{self._device}, at a multiple of 4 bytes")
        check_gradient(x, "x", "AllReduce")
        run(ALL_REDUCE, (x,), None, (self._number,), subject=self._reduced)
        torch.autograd.graph.increment_version(x)

    def _is_one_shot(self, x: Any, nbytes: int) -> bool:
        """Only what is the same on all ranks decides."""
        known = x.dtype in (torch.float16, torch.bfloat16) and x.is_cuda
        return known and 0 < nbytes <= self.max_bytes and nbytes % 4 == 0

    def check(self) -> None:
        """Raise PeerTimeout if a launch that has run waited too long for a peer."""
        if self.max_bytes and (what := int(self._failed[0]) & (1 << 64) - 1):
            raise PeerTimeout((what & 0xFFFFFFFF) - 1, what >> 32, self.timeout_s)

    def close(self) -> None:
        """Free the inboxes, when no launch and no captured graph needs them any more. All ranks call it."""
        if _known.pop(self._number, None) is None or not self.max_bytes:
            return
        torch.cuda.synchronize(self._device)
        dist.barrier(self.group)  # no rank writes to another one's memory any more
        self._disconnect()

    def _disconnect(self) -> None:
        for pointer in self._peers:
            close_memory(pointer, self._device)
        dist.barrier(self.group)  # no rank has this one's memory mapped any more
        self._peers.clear()
        self.max_bytes, self._memory = 0, None


def _all_reduce(x: Any, number: int) -> None:
    if number not in _known:
        raise ArgumentError(
            "number", number, "that of an AllReduce which is not closed", "compile again with a new one"
        )
    _known[number]._run(x)


def _register() -> None:
    """The operator for torch.compile, once a process."""
    if hasattr(torch.ops.cudatma, "all_reduce_"):
        return
    library = torch.library.Library("cudatma", "FRAGMENT")
    library.define("all_reduce_(Tensor(a!) x, int number) -> ()", tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CPU", "CUDA"):
        library.impl("all_reduce_", _all_reduce, key)
    torch.library.register_fake("cudatma::all_reduce_", lambda x, number: None, lib=library)
    _libraries.append(library)


_register()
