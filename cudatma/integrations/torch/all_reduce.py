"""The class AllReduce, which sums small tensors across the GPUs of a host."""

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
    """Return this process's rank in a group, and the ranks of all members in the default group.

    ``group`` may be None for the default group. Raises ArgumentError if the group does not exist or does not contain
    this process, and ArgumentTypeError if ``group`` is not a process group.
    """
    if not dist.is_available() or not dist.is_initialized():
        remedy = "call torch.distributed.init_process_group(), for example in a program started by torchrun"
        raise ArgumentError("group", "no process group", "a torch.distributed process group", remedy)
    if type(group) is int and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ArgumentError("group", "a group without this process", "a group that contains this process")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ArgumentTypeError("group", type(group).__name__, "None or a torch.distributed.ProcessGroup")
    return dist.get_rank(group), list(dist.get_process_group_ranks(dist.group.WORLD if group is None else group))


_MAX_BYTES, _ALLOWED_BYTES = 1 << 30, "None or an int from 0 to 2**30"
#: Maps the operator's ``number`` argument to an AllReduce. An object remains here until close(), because peers write to
#: its memory.
_known: dict[int, AllReduce] = {}
#: Counter of the objects. Numbers are never reused, because a compiled graph may outlive its object.
_numbers = itertools.count(1)
#: Libraries are kept until the process ends, even if this module is reloaded, because deleting a library removes its
#: operators.
_libraries: list[Any] = globals().get("_libraries", [])


class AllReduce:
    """Sum tensors across the ranks of a process group, in place and with bitwise identical results on every rank.

    A one-shot kernel sums fp16 and bf16 tensors of up to ``max_bytes``. The kernel writes the tensor to the memory of
    all peers and adds the tensors of all ranks in fp32, in rank order. Other tensors are summed by the group's
    all-reduce. All ranks must create, call and close the object in the same order. A rank's calls must be made on one
    stream or be ordered by events.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup, optional
        Group of at most 8 ranks on one host. Their GPUs must be able to access each other's memory. Default: torch's
        default group.
    device : int, optional
        Device ordinal. Default: torch's current device. If CUDA is not available, all calls use the group's all-reduce.
    max_bytes : int, optional
        Maximum size of a tensor for the one-shot kernel, in bytes, up to 2**30. The inboxes take 8/3 * ranks *
        max_bytes of device memory. By default, a performance model of the kernel and of NCCL determines the size, and
        the inboxes take 49 MB for two ranks, 13 MB for four ranks and 9 MB for eight ranks.
    timeout_s : float, default 30.0
        Maximum time, in seconds, that a kernel waits for a peer. After a timeout, calls and check() raise PeerTimeout.
        The missing sums and all later results, including those of graph replays, are NaN.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If an argument is invalid.
    DriverError
        If any rank cannot access a peer's memory. All ranks then raise this error.
    """

    def __init__(
        self, group: Any = None, *, device: int | None = None, max_bytes: int | None = None, timeout_s: float = 30.0
    ) -> None:
        self.rank, self.members = rank_and_members(group)
        self.group, self.ranks = group, len(self.members)
        if self.ranks > MAX_RANKS:
            raise ArgumentError("group", f"{self.ranks} ranks", f"a group of at most {MAX_RANKS} ranks")
        self.timeout_s = real_number(timeout_s, "timeout_s")
        if not 0 < self.timeout_s < 2**32:
            raise ArgumentError("timeout_s", timeout_s, "a positive number of seconds below 2**32")
        limit = longest_message_bytes(max(2, self.ranks))
        if max_bytes is not None and (limit := checked_count(max_bytes, "max_bytes", _ALLOWED_BYTES)) > _MAX_BYTES:
            raise ArgumentError("max_bytes", max_bytes, _ALLOWED_BYTES)
        self.max_bytes = limit if self.ranks > 1 and torch.cuda.is_available() else 0
        if device is not None:
            device = checked_count(device, "device", "None or the ordinal of a GPU")
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
        """Raise ArgumentError on every rank unless all ranks have the same limit.

        If the limits differed, a rank could write beyond the end of a peer's inbox, or wait for a rank that has no
        inbox.
        """
        limits = [int(limit) for limit, _, _ in self._gather((str(self.max_bytes), b"", ""))]
        if len(set(limits)) > 1:
            raise ArgumentError("max_bytes", self.max_bytes, f"the same on all ranks (the values are {limits})")

    def _connect(self) -> None:
        """Create the inbox and map the peers' inboxes. All ranks raise an error if one rank fails."""
        inbox = Inbox(self.ranks, self.max_bytes)
        handle, error = self._attempt(lambda: self._create_inbox(inbox))
        everyone = self._gather((socket.gethostname(), handle, error))
        if not any(error for _, _, error in everyone):
            _, error = self._attempt(lambda: self._map_peers(inbox, [(host, peer) for host, peer, _ in everyone]))
            everyone = self._gather((socket.gethostname(), b"", error))
        if errors := [f"rank {rank}: {error}" for rank, (_, _, error) in enumerate(everyone) if error]:
            self._disconnect()
            raise DriverError(
                "AllReduce",
                None,
                "; ".join(errors),
                "pass max_bytes=0 to use the process group's all-reduce for all tensors",
            )

    def _attempt(self, function: Callable[[], bytes]) -> tuple[bytes, str]:
        """Return the function's result and "", or b"" and the text of the error."""
        try:
            return function(), ""
        except Exception as error:  # Catch any error, because the other ranks wait for this rank.
            return b"", str(error)

    def _gather(self, own: tuple[str, bytes, str]) -> list[tuple[str, bytes, str]]:
        everyone: list[Any] = [None] * self.ranks
        dist.all_gather_object(everyone, own, group=self.group)
        return everyone

    def _create_inbox(self, inbox: Inbox) -> bytes:
        """Allocate this rank's memory and return its IPC handle."""
        self._memory = shareable_memory(inbox.nbytes, self._device)
        self._memory.write(initial_state())
        return memory_handle(self._memory)

    def _map_peers(self, inbox: Inbox, everyone: Sequence[tuple[str, bytes]]) -> bytes:
        """Map the peers' memory and load the kernels, because kernels cannot be loaded during graph capture."""
        memories = []
        for peer, (host, handle) in enumerate(everyone):
            if host != socket.gethostname():
                raise ArgumentError(
                    "group", f"ranks on {host} and {socket.gethostname()}", "a group of ranks on one host"
                )
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
        """Replace ``x`` with its sum over all ranks, and return ``x``.

        Parameters
        ----------
        x : torch.Tensor
            Contiguous tensor with the same shape and dtype on every rank.

        Returns
        -------
        torch.Tensor
            The input tensor.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            If ``x`` is not a contiguous tensor. torch's all_reduce may raise other errors.
        PeerTimeout
            If an earlier launch waited too long for a peer.
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
            got = f"strides {x.stride()} and address {x.data_ptr():#x} on {x.device}"
            raise ArgumentError("x", got, f"a contiguous, 4-byte-aligned tensor on cuda:{self._device}")
        check_gradient(x, "x", "AllReduce")
        run(ALL_REDUCE, (x,), None, (self._number,), resource=self._reduced)
        torch.autograd.graph.increment_version(x)

    def _is_one_shot(self, x: Any, nbytes: int) -> bool:
        """Return whether to use the one-shot kernel. The result must be the same on all ranks."""
        is_16_bit = x.dtype in (torch.float16, torch.bfloat16) and x.is_cuda
        return is_16_bit and 0 < nbytes <= self.max_bytes and nbytes % 4 == 0

    def check(self) -> None:
        """Raise PeerTimeout if a finished launch waited too long for a peer."""
        if self.max_bytes and (state := int(self._failed[0]) & (1 << 64) - 1):
            raise PeerTimeout((state & 0xFFFFFFFF) - 1, state >> 32, self.timeout_s)

    def close(self) -> None:
        """Free the inboxes.

        All ranks must call this method after the last launch, including replays of captured graphs.
        """
        if _known.pop(self._number, None) is None or not self.max_bytes:
            return
        torch.cuda.synchronize(self._device)
        dist.barrier(self.group)  # After this barrier, no rank writes to a peer's memory.
        self._disconnect()

    def _disconnect(self) -> None:
        for pointer in self._peers:
            close_memory(pointer, self._device)
        dist.barrier(self.group)  # After this barrier, no rank maps this rank's memory.
        self._peers.clear()
        self.max_bytes, self._memory = 0, None


def _all_reduce(x: Any, number: int) -> None:
    if number not in _known:
        raise ArgumentError(
            "number", number, "the number of an open AllReduce", "recompile the graph with a new AllReduce"
        )
    _known[number]._run(x)


def _register() -> None:
    """Register the operator for torch.compile, once per process."""
    if hasattr(torch.ops.cudatma, "all_reduce_"):
        return
    library = torch.library.Library("cudatma", "FRAGMENT")
    library.define("all_reduce_(Tensor(a!) x, int number) -> ()", tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CPU", "CUDA"):
        library.impl("all_reduce_", _all_reduce, key)
    torch.library.register_fake("cudatma::all_reduce_", lambda x, number: None, lib=library)
    _libraries.append(library)


_register()
