"""The one-shot all-reduce on the emulator: one rank with simulated peers, and ranks that run concurrently as rows of
CTAs."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

import cudatma
from cudatma.arrays import describe
from cudatma.build.render import render
from cudatma.errors import ArgumentError, HazardError
from cudatma.kernels.all_reduce.config import (
    ALL_REDUCE,
    GAVE_UP_BYTES,
    TEMPLATE,
    AllReduceConfig,
    Group,
    Inbox,
    Problem,
    longest_message_bytes,
    memory,
    packets,
    received,
    sample,
)
from cudatma.kernels.gpu import imagined_gpu
from cudatma.runtime.launch import Kernel
from cudatma.target import get_target

TARGET = get_target("sm_90a")
RANKS = 3
#: Launches of a rank one after another, in one kernel: ranks get ahead of each other, and each row of CTAs is a rank.
ROUNDS = """
using namespace cudatma;
extern "C" __global__ void ranks(const Member* members, u32* const* messages, const u32* words, u32 rounds) {
    const Member member = members[blockIdx.y];
    u32* message = messages[blockIdx.y];
    for (u32 round = 0; round < rounds; ++round) {
        cudatma::all_reduce(member, message, words[round]);
        message += words[round];
        __syncthreads();   // the next launch begins when this one has ended
    }
}
"""


def drawn(ranks: int, elements: int, dtype: str, seed: int = 0) -> Any:
    """Return random messages whose first two ranks cancel, so that any other order of additions loses bits of the
    sum."""
    values = np.random.default_rng(seed).standard_normal((ranks, elements), np.float32)
    if ranks > 2:
        values[0] *= 2.0**13
        values[1] = -values[0]
        values[2:] *= 2.0**-6
    return values.astype(cudatma.dtypes.activation_type(dtype).numpy)


def in_order(messages: Any) -> Any:
    """Return the fp32 sum in rank order."""
    total = messages[0].astype(np.float32)
    for message in messages[1:]:
        total = total + message.astype(np.float32)
    return total.astype(messages.dtype)


def emulate(config: AllReduceConfig, member: bytes, result: Any, ctas: int, others: tuple[Any, ...]) -> None:
    """Run a rank's launch. ``others``: memory to which its struct refers."""
    problem = Problem(Group(config.ranks, member), config.dtype, result.size // 2)
    (launch,) = ALL_REDUCE.arguments(problem, config, imagined_gpu(TARGET, ctas), ())
    arrays = {"x": describe(result)} | {f"other {i}": describe(other) for i, other in enumerate(others)}
    launch.emulate(TARGET, arrays, produced_by_previous=(result,), schedules=4)


@pytest.mark.parametrize(("ranks", "rank", "elements", "dtype"), [
    (2, 0, 2, "float16"), (2, 1, 1300, "bfloat16"), (3, 1, 1030, "float16"), (4, 3, 6, "bfloat16"),
    (8, 5, 770, "float16"),
])  # fmt: skip
def test_a_rank_sends_its_message_and_adds_up_what_it_gets(ranks: int, rank: int, elements: int, dtype: str) -> None:
    messages, inbox = drawn(ranks, elements, dtype), Inbox(ranks, 2 * elements + 24)
    memories, failure = [memory(inbox) for _ in range(ranks)], np.zeros(1, np.uint64)
    for peer in range(ranks):
        sent = packets(messages[peer], 1)
        received(memories[rank], inbox, 1, peer)[: len(sent)] = sent
    wanted = [each.copy() for each in memories]
    for each in wanted:
        sent = packets(messages[rank], 1)
        received(each, inbox, 1, rank)[: len(sent)] = sent
    ctas = 3
    wanted[rank][:ctas] = 2  # launches that each CTA has counted
    result = messages[rank].copy()
    member = inbox.member(rank, [each.ctypes.data for each in memories], failure.ctypes.data, 10**9)
    received(memories[rank], inbox, 1, rank)[:] = 0  # it sends to itself, too
    emulate(AllReduceConfig(ranks, dtype, threads=32), member, result, ctas, (*memories, failure))
    assert np.array_equal(result.view(np.uint16), in_order(messages).view(np.uint16))
    for got, want in zip(memories, wanted, strict=True):
        assert np.array_equal(got, want)
    assert failure[0] == 0


@cache
def kernel(*changes: tuple[str, str]) -> Kernel:
    """Return the kernel for RANKS ranks with ROUNDS appended and with changes to its text."""
    source = render(TEMPLATE, AllReduceConfig(RANKS, "float16", threads=32), TARGET) + ROUNDS
    for before, after in changes:
        assert before in source
        source = source.replace(before, after)
    return cudatma.compile(source, target=TARGET, entry="ranks")


def run_ranks(tested: Kernel, schedule: int, *, ctas: int = 2, first: int = 1) -> bool:
    """Run rounds of several lengths on all ranks at once, beginning with this launch number. Return whether all sums
    are right. Raises HazardError."""
    words = np.array([40, 1, 40, 7, 41, 41], np.uint32)
    messages, inbox = drawn(RANKS, 2 * int(words.sum()), "float16"), Inbox(RANKS, 4 * 41)
    memories, failure = [memory(inbox) for _ in range(RANKS)], np.zeros(1, np.uint64)
    for each in memories:
        each[:ctas] = first
    pointers = [each.ctypes.data for each in memories]
    members = [inbox.member(rank, pointers, failure.ctypes.data, 10**9) for rank in range(RANKS)]
    structs = np.frombuffer(b"".join(members), np.uint8).copy()
    results = [message.copy() for message in messages]
    places = np.array([result.ctypes.data for result in results], np.uint64)
    tested.emulate(
        (ctas, RANKS), 32, (structs, places, words, len(words)),
        arrays=(*memories, failure, *results), replay=schedule,
    )  # fmt: skip
    wanted = in_order(messages).view(np.uint16)
    return all(np.array_equal(result.view(np.uint16), wanted) for result in results)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("ctas", [1, 2])
def test_ranks_that_get_ahead_of_each_other_all_get_the_sum(ctas: int) -> None:
    assert all(run_ranks(kernel(), schedule, ctas=ctas) for schedule in range(8))


def test_the_number_of_the_launch_wraps() -> None:
    """The number skips 0, which empty inboxes contain, and 1, because even and odd numbers must alternate."""
    assert all(run_ranks(kernel(), schedule, first=0xFFFFFFFD) for schedule in range(5))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_after_a_peer_did_not_send_results_are_nans_and_nobody_waits(dtype: str) -> None:
    """The launch that waits in vain reports to the host. Later launches, longer or shorter, then end without
    waiting."""
    messages, inbox = drawn(3, 400, dtype), Inbox(3, 800)
    memories, failure = [memory(inbox) for _ in range(3)], np.zeros(1, np.uint64)
    arrays = [each.ctypes.data for each in memories]
    sent = packets(messages[1][:12], 1)
    received(memories[0], inbox, 1, 1)[: len(sent)] = sent  # rank 2 sends nothing
    wanted = memories[1].copy()
    received(wanted, inbox, 1, 0)[: len(sent)] = packets(messages[0][:12], 1)
    for elements, timeout_ns in ((12, 1000), (400, 2**63), (2, 2**63)):
        result = messages[0][:elements].copy()
        member = inbox.member(0, arrays, failure.ctypes.data, timeout_ns)
        emulate(AllReduceConfig(3, dtype, threads=32), member, result, 3, (*memories, failure))
        assert np.isnan(result.astype(np.float32)).all()
        assert failure[0] == 1 << 32 | 3  # of launch 1: rank 2, plus 1
        assert memories[0][GAVE_UP_BYTES // 4] == 1
        assert np.array_equal(memories[1], wanted)  # later launches send nothing


@pytest.mark.slow
def test_one_rank_that_is_gone_ends_the_waits_of_all_others() -> None:
    gone = ("u32 rounds) {", "u32 rounds) { if (blockIdx.y == 1) return;")
    assert not run_ranks(kernel(gone), schedule=1)


def test_the_message_is_read_after_the_kernel_in_front_has_written_it() -> None:
    messages, inbox = drawn(2, 10, "float16"), Inbox(2, 20)
    memories, failure = [memory(inbox) for _ in range(2)], np.zeros(1, np.uint64)
    received(memories[0], inbox, 1, 1)[:] = packets(messages[1], 1)
    member = inbox.member(0, [each.ctypes.data for each in memories], failure.ctypes.data, 10**9)
    source = render(TEMPLATE, AllReduceConfig(2, "float16", threads=32), TARGET)
    early = source.replace("    griddepcontrol_wait();", "")
    assert early != source
    given: dict[str, Any] = {"arrays": (*memories, failure, messages), "produced_by_previous": (messages,)}
    for text, allowed in ((source, True), (early, False)):
        tested = cudatma.compile(text, target=TARGET, entry="all_reduce")
        report = tested.emulate(1, 32, (member, messages.ctypes.data, 5), hazards="collect", **given)
        assert report.is_clean == allowed


PLANTED = {
    "packets of another launch are taken": (
        ("packet.w != launch;", "packet.w == 0;"), ("if (packet.w == launch && launch != 0)", "if (packet.w)"),
    ),
    "one slot for all launches": (("const u32 slot = launch % 2 * RANKS", "const u32 slot = 0 * RANKS"),),
    "the number of the launch stays": (("number == 0xffffffffu ? 2 : number + 1", "number"),),
    "packets are stored as four words": (
        ("st.relaxed.sys.global.b128 [%0], packet;", "st.global.v2.b64 [%0], {low, high};"),
    ),
    "the launch is counted before all have read its number": (("    __syncthreads();   // all threads must have read", "    //"),),
    "nobody waits": (("if (packet.w == launch && launch != 0) return;", "return;"),),
}  # fmt: skip


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_is_found(name: str) -> None:
    """The mistake causes a hazard or a wrong sum (NaNs after a launch that waits in vain)."""
    for schedule in range(30):
        try:
            if not run_ranks(kernel(*PLANTED[name]), schedule):
                return
        except HazardError:
            return
    pytest.fail("30 schedules were clean, and every sum right")


def test_the_model_sends_long_messages_to_the_group() -> None:
    limits = [longest_message_bytes(ranks) for ranks in range(2, 9)]
    assert limits == sorted(limits, reverse=True)
    assert limits[0] >= 64 * 8192 * 2  # 64 rows of 8192 columns
    assert limits[-1] >= 16 * 8192 * 2


def test_what_the_config_and_the_sample_refuse() -> None:
    for fields, field in (((1, "float16"), "ranks"), ((9, "float16"), "ranks"), ((2, "float16", 33), "threads")):
        with pytest.raises(ArgumentError, match=f"^{field}"):
            AllReduceConfig(*fields)
    for options, field in (({"elements": 3}, "elements"), ({"rank": 3}, "rank"), ({"blocks": 0}, "rank, blocks")):
        with pytest.raises(ArgumentError, match=f"^{field}"):
            sample(TARGET, **options)
