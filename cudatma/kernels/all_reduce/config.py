"""Configuration, receive buffers, operation and emulator sample of the one-shot all-reduce."""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, ClassVar, NamedTuple

import numpy as np

from cudatma.arrays import ArrayInfo, describe
from cudatma.dtypes import activation_type
from cudatma.errors import ArgumentError
from cudatma.kernels.arguments import Arguments, At, Sizes, Value
from cudatma.kernels.checks import check_field_types
from cudatma.kernels.gpu import Gpu, imagined_gpu
from cudatma.kernels.operation import Checked, Operation
from cudatma.kernels.sample import Sample, relative_error
from cudatma.kernels.schedule import ceil_div
from cudatma.target import Target

TEMPLATE = "kernels/all_reduce.cu.j2"
#: Maximum number of ranks, which is the number of GPUs in a host.
MAX_RANKS = 8
#: Number of bytes and of words per packet. A packet holds three words of the message, with two elements each, and the
#: launch number.
PACKET_BYTES, PACKET_WORDS = 16, 3
WORD_BYTES = 4
_SLOTS = 2
#: Maximum number of CTAs per launch. The state precedes the packets and contains the next launch number of each CTA,
#: and 16 bytes that record whether a launch has timed out.
_MAX_CTAS = 256
GAVE_UP_BYTES = _MAX_CTAS * WORD_BYTES
STATE_BYTES = GAVE_UP_BYTES + 16
#: Number of threads per CTA for messages up to _SHORT_BYTES, and for longer messages. The CTAs of a dependent launch
#: are placed on the first SMs with enough room. With 512 threads, up to four CTAs share an SM while other SMs get none.
#: After a GEMM on an H200, and with a rank that sends its packets to itself, 1 MiB takes 4.2 us with 512 threads and
#: 2.7 us with 1024 threads; 16 KiB take 1.7 us and 2.2 us.
_SHORT_THREADS, _LONG_THREADS = 512, 1024
_SHORT_BYTES = 512 << 10
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class AllReduceConfig:
    """A configuration of ``kernels/all_reduce.cu.j2``.

    Attributes
    ----------
    ranks : int
        Number of ranks, 2 to 8.
    dtype : str
        Dtype of the message.

    Raises
    ------
    ArgumentError
        If a field is invalid.
    """

    ranks: int
    dtype: str
    threads: int = _SHORT_THREADS
    entry: str = "all_reduce"

    def __post_init__(self) -> None:
        check_field_types(self)
        activation_type(self.dtype)
        if not 2 <= self.ranks <= MAX_RANKS:
            raise ArgumentError("ranks", self.ranks, f"2 to {MAX_RANKS}")
        if self.threads % 32 or not 32 <= self.threads <= 1024:
            raise ArgumentError("threads", self.threads, "a multiple of 32 from 32 to 1024")

    @property
    def is_bf16(self) -> bool:
        return self.dtype == "bfloat16"

    @property
    def batch(self) -> int:
        """Number of packets per rank that a thread can hold without spilling. A packet takes four registers."""
        return max(1, 4 // self.ranks)

    @property
    def smem_bytes(self) -> int:
        return 0

    def check_target(self, target: Target) -> None:
        """Raise TargetError unless the target supports programmatic dependent launch."""
        target.require("griddepcontrol", self.entry)


@dataclass(frozen=True, slots=True)
class Inbox:
    """Layout of the memory in which a rank receives messages: the state, followed by packets [slot][rank][packet].

    Attributes
    ----------
    ranks : int
        Number of ranks in the group.
    message_bytes : int
        Size of the longest message in bytes.
    """

    ranks: int
    message_bytes: int

    @property
    def slot_packets(self) -> int:
        """Number of packets per rank in a slot."""
        return ceil_div(self.message_bytes, PACKET_WORDS * WORD_BYTES)

    @property
    def nbytes(self) -> int:
        return STATE_BYTES + _SLOTS * self.ranks * self.slot_packets * PACKET_BYTES

    def member(self, rank: int, memories: Sequence[int], failure: int, timeout_ns: int) -> bytes:
        """Return the bytes of the kernel's ``Member`` struct.

        ``memories`` holds the addresses of all ranks' memory in this rank's address space. Each memory begins with
        initial_state(). ``failure`` is the address of 8 bytes of host memory.
        """

        class Member(ctypes.Structure):
            _fields_ = (
                ("inboxes", ctypes.c_uint64 * self.ranks),
                ("next_launch", ctypes.c_uint64),
                ("gave_up", ctypes.c_uint64),
                ("failure", ctypes.c_uint64),
                ("timeout_ns", ctypes.c_uint64),
                ("slot_packets", ctypes.c_uint32),
                ("rank", ctypes.c_uint32),
            )

        inboxes = (ctypes.c_uint64 * self.ranks)(*(memory + STATE_BYTES for memory in memories))
        state = memories[rank], memories[rank] + GAVE_UP_BYTES
        return bytes(Member(inboxes, *state, failure, timeout_ns, self.slot_packets, rank))


def initial_state() -> bytes:
    """Return the initial bytes of a rank's memory. All other bytes must be zero."""
    return (1).to_bytes(WORD_BYTES, "little") * _MAX_CTAS


class Group(NamedTuple):
    """A rank's view of its group. ``member`` contains the bytes of the kernel's ``Member`` struct."""

    ranks: int
    member: bytes


class Problem(NamedTuple):
    """One rank's message. ``words`` is the number of pairs of elements."""

    group: Group
    dtype: str
    words: int


class AllReduceInPlace(Operation[Problem, AllReduceConfig]):
    """Operation that sums the messages of all ranks in place.

    ``resource`` is the Group. The only option is a number that is unique to the group.
    """

    name: ClassVar[str] = "AllReduce"
    inputs: ClassVar[tuple[str, ...]] = ("x",)

    def check(self, inputs: tuple[Any, ...], out: Any, options: tuple[Any, ...], resource: Any) -> Checked[Problem]:
        """Validate a call. The message must be contiguous and nonempty and have an even number of elements."""
        info = describe(inputs[0], "x")
        return Checked(Problem(resource, info.dtype.name, info.size_elems // 2), (info,), None, None, None)

    def alignment_masks(self, problem: Problem) -> tuple[int, ...]:
        """Require word-aligned addresses, because the kernel reads whole words."""
        return WORD_BYTES - 1, 0

    def plan_key(self, problem: Problem) -> Hashable:
        """Return the fields of the problem except the message length."""
        return problem[:-1]

    def configure(self, problem: Problem, gpu: Gpu, memo: dict[Any, Any]) -> AllReduceConfig:
        """Return the configuration for a message."""
        return _spec(problem.group.ranks, problem.dtype, problem.words * WORD_BYTES <= _SHORT_BYTES)

    def kernels(self, problem: Problem, config: AllReduceConfig) -> tuple[tuple[str, Any], ...]:
        """Return the template and the configuration of the kernel."""
        return ((TEMPLATE, config),)

    def arguments(
        self, problem: Problem, config: AllReduceConfig, gpu: Gpu, resident: tuple[int, ...]
    ) -> tuple[Arguments, ...]:
        """Return the arguments of the launch, which uses programmatic dependent launch.

        The grid depends only on the GPU, because each CTA counts launches. All CTAs must be co-resident, because a CTA
        that waits for a peer must not prevent another CTA from sending to that peer.
        """
        sizes = Sizes(min(gpu.sm_count, _MAX_CTAS), (problem.words,), programmatic=True)
        return (Arguments(TEMPLATE, config, (problem.group.member, At("x"), Value(0)), sizes),)

    def reference(self, problem: Problem, arrays: Mapping[str, ArrayInfo]) -> None:
        """Raise ArgumentError, because the messages of other ranks are on other GPUs."""
        raise ArgumentError("backend", "reference", "cuda", "pass CUDA tensors")


ALL_REDUCE = AllReduceInPlace()


@lru_cache(maxsize=64)
def _spec(ranks: int, dtype: str, is_short: bool) -> AllReduceConfig:
    return AllReduceConfig(ranks, dtype, _SHORT_THREADS if is_short else _LONG_THREADS)


def longest_message_bytes(ranks: int) -> int:
    """Return the predicted maximum size for which the one-shot algorithm is faster than NCCL's all-reduce.

    The one-shot algorithm sends 4/3 (ranks - 1) bytes per byte of the message, including the overhead of the packets. A
    ring, or a reduce-scatter followed by an all-gather, sends 2 (ranks - 1) / ranks bytes, but needs additional fixed
    time to start, signal and end. The two constants are assumptions. For two H100s, the model predicts 8.7 MiB. The
    measured speedup is 1.07 at 8 MiB and 0.99 at 16 MiB. Larger groups were not measured.
    """
    sooner_us, link_bytes_per_us = 8.0, 380e3
    more_bytes = (ranks - 1) * (4 / 3 - 2 / ranks)
    return int(sooner_us * link_bytes_per_us / more_bytes)


def dump_configs(target: Target) -> list[AllReduceConfig]:
    """Return configs with both dtypes and several numbers of ranks, or an empty list if the target cannot run them."""
    if not target.has("griddepcontrol"):
        return []
    configs = [_spec(2, "float16", is_short) for is_short in (True, False)]
    return [*configs, AllReduceConfig(2, "bfloat16"), AllReduceConfig(8, "bfloat16")]


def memory(inbox: Inbox) -> Array:
    """Return a rank's memory before the first launch, as uint32 (n,)."""
    state = np.frombuffer(initial_state(), np.uint32)
    return np.concatenate([state, np.zeros(inbox.nbytes // WORD_BYTES - state.size, np.uint32)])


def packets(message: Array, launch: int) -> Array:
    """Return the packets of a message as uint32 (packets, 4)."""
    words = message.reshape(-1).view(np.uint32)
    count = -(-words.size // PACKET_WORDS)
    sent = np.full((count, PACKET_WORDS + 1), launch, np.uint32)
    sent[:, :PACKET_WORDS] = np.pad(words, (0, count * PACKET_WORDS - words.size)).reshape(count, PACKET_WORDS)
    return sent


def received(memory: Array, inbox: Inbox, launch: int, sender: int) -> Array:
    """Return a view of a sender's packets in a rank's memory, as uint32 (slot_packets, 4)."""
    slots = memory[STATE_BYTES // WORD_BYTES :].reshape(2, inbox.ranks, inbox.slot_packets, PACKET_WORDS + 1)
    part: Array = slots[launch % 2, sender]
    return part


def sample(
    target: Target, *, elements: int = 1030, ranks: int = 3, rank: int = 1, dtype: str = "float16", blocks: int = 2
) -> Sample:
    """Return the first launch of a rank with ``blocks`` CTAs. Raises ArgumentError."""
    config = AllReduceConfig(ranks, dtype, threads=64)
    config.check_target(target)
    if elements < 2 or elements % 2:
        raise ArgumentError("elements", elements, "a positive even number")
    if not 0 <= rank < ranks or blocks < 1:
        raise ArgumentError("rank, blocks", (rank, blocks), f"a rank from 0 to {ranks - 1} and at least 1 block")
    random, inbox = np.random.default_rng(0), Inbox(ranks, elements * 2)
    messages = random.standard_normal((ranks, elements)).astype(activation_type(dtype).numpy)
    memories = [memory(inbox) for _ in range(ranks)]
    for peer in set(range(ranks)) - {rank}:
        sent = packets(messages[peer], 1)
        received(memories[rank], inbox, 1, peer)[: len(sent)] = sent
    failure, result = np.zeros(1, np.uint64), messages[rank].copy()
    member = inbox.member(rank, [each.ctypes.data for each in memories], failure.ctypes.data, 10**9)
    problem = Problem(Group(ranks, member), dtype, elements // 2)
    (launch,) = ALL_REDUCE.arguments(problem, config, imagined_gpu(target, blocks), (blocks,))
    arrays = {"x": describe(result), "failure": describe(failure)}
    arrays |= {f"inbox {i}": describe(each) for i, each in enumerate(memories)}
    # In a chain of programmatic launches, the previous kernel writes the message.
    run = partial(launch.emulate, target, arrays, produced_by_previous=(result,))
    error = partial(relative_error, result, messages.astype(np.float64).sum(0))
    title = f"all-reduce of {elements} {dtype} by rank {rank} of {ranks}, {blocks} CTAs"
    return Sample(title, launch.kernel(target), run, error, 2e-3 if dtype == "float16" else 1e-2)
