"""One rank's launch for `cudatma emulate all_reduce`: the packets of the other ranks are there before it begins."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from cudatma.arrays import describe
from cudatma.dtypes import activation_type
from cudatma.errors import ArgumentError
from cudatma.kernels.all_reduce.spec import (
    PACKET_WORDS,
    STATE_BYTES,
    WORD_BYTES,
    AllReduceSpec,
    Inbox,
    all_reduce_launch,
    initial_state,
)
from cudatma.kernels.sample import Sample, relative_error
from cudatma.target import Target

Array = np.ndarray[Any, Any]


def memory(inbox: Inbox) -> Array:
    """A rank's memory before the first launch, (n,) uint32."""
    state = np.frombuffer(initial_state(), np.uint32)
    return np.concatenate([state, np.zeros(inbox.nbytes // WORD_BYTES - state.size, np.uint32)])


def packets(message: Array, launch: int) -> Array:
    """A message as a rank sends it, (packets, 4) uint32."""
    words = message.reshape(-1).view(np.uint32)
    count = -(-words.size // PACKET_WORDS)
    sent = np.full((count, PACKET_WORDS + 1), launch, np.uint32)
    sent[:, :PACKET_WORDS] = np.pad(words, (0, count * PACKET_WORDS - words.size)).reshape(count, PACKET_WORDS)
    return sent


def received(memory: Array, inbox: Inbox, launch: int, sender: int) -> Array:
    """The part of a rank's memory for packets of a sender, (slot_packets, 4) uint32, a view."""
    slots = memory[STATE_BYTES // WORD_BYTES :].reshape(2, inbox.ranks, inbox.slot_packets, PACKET_WORDS + 1)
    part: Array = slots[launch % 2, sender]
    return part


def sample(
    target: Target, *, elements: int = 1030, ranks: int = 3, rank: int = 1, dtype: str = "float16", blocks: int = 2
) -> Sample:
    """The first launch of a rank. blocks: CTAs. Raises ArgumentError."""
    spec = AllReduceSpec(ranks, dtype, threads=64)
    spec.check_target(target)
    if elements < 2 or elements % 2:
        raise ArgumentError("elements", elements, "an even number, 2 or more")
    if not 0 <= rank < ranks or blocks < 1:
        raise ArgumentError("rank, blocks", (rank, blocks), f"a rank of 0 to {ranks - 1}, and 1 block or more")
    random, inbox = np.random.default_rng(0), Inbox(ranks, elements * 2)
    messages = random.standard_normal((ranks, elements)).astype(activation_type(dtype).numpy)
    memories = [memory(inbox) for _ in range(ranks)]
    for peer in set(range(ranks)) - {rank}:
        sent = packets(messages[peer], 1)
        received(memories[rank], inbox, 1, peer)[: len(sent)] = sent
    failure, result = np.zeros(1, np.uint64), messages[rank].copy()
    member = inbox.member(rank, [each.ctypes.data for each in memories], failure.ctypes.data, 10**9)
    launch = all_reduce_launch(spec, member, describe(result), blocks)
    kernel = launch.kernel(target)

    # As behind a GEMM of a programmatic chain, which writes the message.
    given = {"arrays": (*memories, failure, result), "produced_by_previous": (result,)}
    run = partial(launch.emulate, target, kernel=kernel, **given)
    error = partial(relative_error, result, messages.astype(np.float64).sum(0))
    title = f"all-reduce of {elements} {dtype} by rank {rank} of {ranks}, {blocks} CTAs"
    return Sample(title, kernel, run, error, 2e-3 if dtype == "float16" else 1e-2)
