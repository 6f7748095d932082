"""cudatma.pipeline: offsets, parities against a model of mbarriers, and contradictions."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudatma.errors import ArgumentError, ArgumentTypeError
from cudatma.pipeline import MBARRIER_MAX_COUNT, Operand, PipelineSpec, align_up, max_stages
from cudatma.target import TARGETS, get_target

WEIGHT = Operand("weight", 8192, 8192)
SCALE = Operand("scale", 256, 256)
HAND = Operand("activation", 5000, 0, 16)

operands = st.lists(
    st.builds(
        lambda units, padding, shift: (16 * units + padding, 16 * units, 16 << shift),
        st.integers(0, 600),
        st.integers(1, 100),
        st.integers(0, 6),
    ),
    min_size=1,
    max_size=5,
).map(lambda rows: tuple(Operand(f"op{i}", *row) for i, row in enumerate(rows)))


@dataclass
class Mbarrier:
    """The arrivals of an mbarrier in the PTX ISA: a phase completes after the number of arrivals passed to init()."""

    count: int
    pending: int = 0
    completed_phases: int = 0

    def __post_init__(self) -> None:
        self.pending = self.count

    def arrive(self) -> None:
        assert self.pending > 0
        self.pending -= 1
        if not self.pending:
            self.pending, self.completed_phases = self.count, self.completed_phases + 1

    def wait_returns(self, parity: int) -> bool:
        """Return the result of try_wait.parity: true unless the current, incomplete phase has this parity."""
        return self.completed_phases % 2 != parity


@given(stages=st.integers(1, 5), consumers=st.integers(1, 3), iterations=st.integers(0, 23), seed=st.integers(0, 999))
def test_parities_never_let_anybody_pass_too_early_or_wait_for_ever(
    stages: int, consumers: int, iterations: int, seed: int
) -> None:
    config = PipelineSpec(stages, (SCALE,), 1, consumers)
    full = [Mbarrier(config.producer_arrivals) for _ in range(stages)]
    empty = [Mbarrier(config.consumer_arrivals) for _ in range(stages)]
    slots: list[int | None] = [None] * stages
    readers = [0] * stages  # consumers that still have to read what is in the slot
    at = [0] * (1 + consumers)  # iteration of the producer, then of each consumer
    chance = random.Random(seed)
    while any(i < iterations for i in at):
        ready = []
        for who, i in enumerate(at):
            if i >= iterations:
                continue
            slot = config.slot(i)
            passes = (
                empty[slot].wait_returns(config.producer_parity(i))
                if who == 0
                else full[slot].wait_returns(config.consumer_parity(i))
            )
            if passes:
                ready.append(who)
        assert ready, "deadlock"
        who = chance.choice(ready)
        slot = config.slot(at[who])
        if who == 0:
            assert readers[slot] == 0, "a slot was filled before everybody had read it"
            slots[slot], readers[slot] = at[0], consumers
            full[slot].arrive()
        else:
            assert slots[slot] == at[who], "a consumer read another iteration's data"
            readers[slot] -= 1
            empty[slot].arrive()
        at[who] += 1


@given(stages=st.integers(1, 7), ring=operands, by_operand=st.booleans())
def test_operands_are_aligned_and_never_overlap(stages: int, ring: tuple[Operand, ...], by_operand: bool) -> None:
    config = PipelineSpec(stages, ring, by_operand=by_operand)
    taken: list[tuple[int, int]] = []
    for slot in range(stages):
        for operand in ring:
            start = config.address(operand.name, slot)
            assert start % operand.alignment == 0
            taken.append((start, start + operand.footprint_bytes))
    taken.append((config.barriers_offset, config.barriers_offset + 16 * stages))
    assert config.barriers_offset % 8 == 0
    assert all(a[1] <= b[0] for a, b in pairwise(sorted(taken)))
    assert taken[-1][1] == config.smem_bytes
    assert config.stage_tx_bytes == sum(o.expected_bytes for o in ring)
    assert config.stage_bytes - sum(o.footprint_bytes for o in ring) < sum(o.alignment for o in ring) + config.alignment


@given(ring=operands, other=st.integers(0, 100_000), name=st.sampled_from(sorted(TARGETS)))
def test_max_stages_is_the_largest_number_that_fits(ring: tuple[Operand, ...], other: int, name: str) -> None:
    target = get_target(name)
    most = max_stages(target, ring, other)
    if most:
        PipelineSpec(most, ring).check_fits(target, other_bytes=other)
    with pytest.raises(ArgumentError, match=f"use at most {most} stages" if most else "not even one stage fits"):
        PipelineSpec(most + 1, ring).check_fits(target, other_bytes=other)


def test_a_ring_by_hand() -> None:
    config = PipelineSpec(3, (HAND, WEIGHT, SCALE), 33, 4, expect_tx_bytes=8448)
    assert [config.offset(n) for n in ("activation", "weight", "scale")] == [0, 5120, 13312]
    assert (config.alignment, config.stage_bytes, config.barriers_offset, config.smem_bytes) == (
        128,
        13568,
        40704,
        40752,
    )
    assert [config.slot(i) for i in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert [config.consumer_parity(i) for i in range(7)] == [0, 0, 0, 1, 1, 1, 0]
    assert [config.producer_parity(i) for i in range(7)] == [1, 1, 1, 0, 0, 0, 1]
    assert config.notes()[1:] == (
        "  +0 activation: 5000 bytes, written by threads",
        "  +5120 weight: 8192 bytes, 8192 loaded by TMA",
        "  +13312 scale: 256 bytes, 256 loaded by TMA",
        "  barriers at +40704: full[3], empty[3]",
    )
    assert align_up(1, 8) == 8
    assert align_up(16, 8) == 16


def test_a_ring_by_operand_by_hand() -> None:
    config = PipelineSpec(3, (HAND, WEIGHT, SCALE), by_operand=True)
    assert [config.offset(n) for n in ("activation", "weight", "scale")] == [0, 15104, 39680]
    assert [config.slot_distance(n) for n in ("activation", "weight", "scale")] == [5008, 8192, 256]
    assert (config.address("weight", 2), config.barriers_offset) == (15104 + 2 * 8192, 39680 + 3 * 256)


def test_a_ring_without_empty_barriers_takes_one_barrier_a_stage() -> None:
    config = PipelineSpec(3, (WEIGHT,), consumer_arrivals=0)
    assert (config.barrier_bytes, config.smem_bytes) == (24, config.barriers_offset + 24)
    assert config.barrier_layout(base=8) == [("full_barriers", 8, 24)]
    assert config.notes()[-1].endswith("full[3]")
    both = PipelineSpec(3, (WEIGHT,))
    assert both.barrier_layout(base=8) == [("full_barriers", 8, 24), ("empty_barriers", 32, 24)]
    least = replace(config, stages=1).smem_bytes
    assert max_stages(replace(get_target("sm_90a"), smem_per_block_bytes=least), (WEIGHT,)) == 0
    replace(config, stages=1).check_fits(replace(get_target("sm_90a"), smem_per_block_bytes=least))


def test_every_consumer_of_a_cluster_frees_a_slot() -> None:
    config = PipelineSpec(3, (WEIGHT,), 1, 4, cluster=2)
    assert (config.consumer_arrivals, config.empty_arrivals) == (4, 8)
    assert "8 consumer arrivals" in config.notes()[0]


@pytest.mark.parametrize(("told", "fate"), [(8449, "never end"), (8447, "end too early")])
def test_a_wrong_byte_count_is_named_with_its_consequence(told: int, fate: str) -> None:
    with pytest.raises(ArgumentError, match=r"8448 = 8192 \(weight\) \+ 256 \(scale\)") as caught:
        PipelineSpec(2, (WEIGHT, SCALE, HAND), expect_tx_bytes=told)
    assert caught.value.field == "expect_tx_bytes"
    assert fate in str(caught.value)


def test_arrivals_that_differ_from_the_kernels_are_named_with_their_consequence() -> None:
    config = PipelineSpec(2, (WEIGHT,), 1, 4, cluster=2)
    config.check_arrivals(produced=1, released=4)
    with pytest.raises(ArgumentError, match="the producer would otherwise wait forever"):
        config.check_arrivals(released=3)
    with pytest.raises(ArgumentError, match="consumers would otherwise continue too early"):
        config.check_arrivals(produced=2)


@pytest.mark.parametrize(
    ("arguments", "error", "field"),
    [
        ((0, (WEIGHT,)), ArgumentError, "stages"),
        ((True, (WEIGHT,)), ArgumentTypeError, "stages"),
        ((2.0, (WEIGHT,)), ArgumentTypeError, "stages"),
        ((2, [WEIGHT]), ArgumentTypeError, "operands"),
        ((2, ()), ArgumentError, "operands"),
        ((2, (WEIGHT, WEIGHT)), ArgumentError, "operands"),
        ((2, (WEIGHT,), 0), ArgumentError, "producer_arrivals"),
        ((2, (WEIGHT,), 1, -1), ArgumentError, "consumer_arrivals"),
        ((2, (WEIGHT,), 1, MBARRIER_MAX_COUNT + 1), ArgumentError, "consumer_arrivals"),
        ((2, (WEIGHT,), 1, 1, None, 0), ArgumentError, "cluster"),
        ((2, (WEIGHT,), 1, 1, None, 17), ArgumentError, "cluster"),
        ((2, (WEIGHT,), 1, MBARRIER_MAX_COUNT, None, 2), ArgumentError, "consumer_arrivals * cluster"),
        ((2, (WEIGHT,), 1, 0, None, 2), ArgumentError, "consumer_arrivals"),
        ((2, (WEIGHT,), 1, 1, 8192.0), ArgumentTypeError, "expect_tx_bytes"),
        ((2, (WEIGHT,), 1, 1, None, 1, "no"), ArgumentTypeError, "by_operand"),
        ((2, (Operand("big", 1 << 20, 1 << 20),)), ArgumentError, "operands"),
    ],
)
def test_a_ring_that_cannot_work_is_refused(arguments: tuple[object, ...], error: type[Exception], field: str) -> None:
    with pytest.raises(error) as caught:
        PipelineSpec(*arguments)  # type: ignore[arg-type]
    assert caught.value.field == field  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("two words", 16, 16), "operand.name"),
        (("x", 0, 0), "operand x.footprint_bytes"),
        (("x", 16, -16), "operand x.expected_bytes"),
        (("x", 16, 8), "operand x.expected_bytes"),
        (("x", 16, 32), "operand x.footprint_bytes"),
        (("x", 16, 16, 8), "operand x.alignment"),
        (("x", 16, 16, 48), "operand x.alignment"),
    ],
)
def test_an_operand_that_cannot_work_is_refused(arguments: tuple[object, ...], field: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        Operand(*arguments)  # type: ignore[arg-type]
    assert caught.value.field == field


def test_unknown_names_and_slots_are_refused() -> None:
    config = PipelineSpec(2, (WEIGHT,))
    with pytest.raises(ArgumentError, match='must be "weight"'):
        config.offset("bias")
    with pytest.raises(ArgumentError, match='must be "weight"'):
        PipelineSpec(2, (WEIGHT,), by_operand=True).slot_distance("bias")
    with pytest.raises(ArgumentError, match=r"must be from 0 to 1"):
        config.address("weight", 2)
