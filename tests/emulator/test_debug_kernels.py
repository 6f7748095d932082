"""Kernels rendered with debug=True compute what they compute without, and show no hazard."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import probe_subjects
import pytest
from ptx_of import ptx_alone
from registry_subjects import registry_subjects
from subject import Subject

from cudatma.build.render import render
from cudatma.emulator import load
from cudatma.errors import PipelineHang
from cudatma.mutants.mutant import Call
from cudatma.runtime.hang import Names
from cudatma.runtime.hang.listeners import ListeningModule
from cudatma.target import get_target

SUBJECTS = {subject.name: subject for subject in (*registry_subjects(), *probe_subjects.subjects())}
#: One of each way to wait: rings, clusters, named barriers, flags in global memory, bulk and tensor copies.
CHOSEN = (
    "ring/3x4",
    "marlin_mma_sync/tma",
    "marlin_wgmma/cluster",
    "multicast/2",
    "box_copy/128B_store",
    "sync/plain",
)


def module(subject: Subject, *changes: tuple[str, str]) -> ListeningModule:
    """Return the subject with debug=True; ``changes`` are replacements in its source."""
    target = get_target(subject.target)
    text = render(subject.template, subject.config, target, debug=True)
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    layout = getattr(subject.config, "smem_layout", tuple)()
    entry = getattr(subject.config, "entry", subject.kernel)
    return ListeningModule(load(ptx_alone(text, target)), Names(entry, text, layout))


def arrays(call: Call) -> Iterator[np.ndarray[Any, Any]]:
    for value in (*call.args, *call.arrays):
        if isinstance(value, np.ndarray):
            yield value.reshape(-1).view(np.uint8)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", CHOSEN)
def test_the_result_is_the_same(name: str) -> None:
    subject = SUBJECTS[name]
    plain, debug = subject.make(), subject.make()
    plain.run(load(subject.ptx()), schedules=1, hazards="off")
    debug.run(module(subject), schedules=1)
    for here, there in zip(arrays(plain), arrays(debug), strict=True):
        np.testing.assert_array_equal(here, there)


EXPECT = "ring.expect_tx(slot, TRANSACTION_BYTES"
#: Subject, a text of its source, what it becomes, and how the hang is known then.
PLANTED = (
    ("marlin_wgmma/cluster", EXPECT, f"{EXPECT} + 16", "full_barriers[0]", "16 announced bytes"),
    ("marlin_skinny/even", "init_barriers(1, CONSUMER_WARPS)", "init_barriers(1, 9)", "empty_barriers[0]", "of 9"),
)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "old", "new", "barrier", "cause"), PLANTED, ids=[name for name, *_ in PLANTED])
def test_a_hang_in_a_kernel_of_the_registry_ends(name: str, old: str, new: str, barrier: str, cause: str) -> None:
    """The kernel also uses clusters, named barriers, setmaxnreg, stream-K flags and stores to other blocks."""
    with pytest.raises(PipelineHang) as caught:
        SUBJECTS[name].make().run(module(SUBJECTS[name], (old, new)), schedules=1)
    first = caught.value.waits[0]
    assert first.barrier == barrier
    assert cause in first.cause
    assert re.search(r"mbarrier_wait_parity|ring\.(acquire|wait)\(", first.text)


@pytest.mark.slow
def test_who_waits_for_another_blocks_sums_is_told_apart() -> None:
    """Block 1 of each cluster waits for bytes that never come; what the others wait for is what it did not send."""
    subject = SUBJECTS["marlin_skinny/cluster"]
    with pytest.raises(PipelineHang) as caught:
        subject.make().run(module(subject, (EXPECT, f"{EXPECT} + (blockIdx.x % 3 == 1 ? 16 : 0)")), schedules=1)
    waits = caught.value.waits
    assert {wait.block[0] % 3 for wait in waits if wait.barrier == "full_barriers[0]"} == {1}
    owner = [wait for wait in waits if wait.barrier == "cluster_barrier[0]" and wait.block[0] % 3 == 0]
    assert owner
    assert all("2048 announced bytes never arrived" in wait.cause for wait in owner)


@pytest.mark.slow
@pytest.mark.parametrize(
    # The two warps of a column send a fragment each, of 128 sums.
    ("moved", "what"),
    [("bar += 4;", r"cluster_barrier\[0\]"), ("addr += 4;", r"cluster_sums\[(0|128)\]")],
)
def test_a_misplaced_store_to_another_block_is_refused(moved: str, what: str) -> None:
    subject = SUBJECTS["marlin_skinny/cluster"]
    old = "    if (!debug::may_store_remotely("
    with pytest.raises(PipelineHang, match="refused") as caught:
        subject.make().run(module(subject, (old, f"    {moved}\n{old}")), schedules=1)
    first = caught.value.waits[0]
    assert re.match(rf"{what} \+ 4 B of rank", first.barrier)
    assert "st_async_v4_f32(" in first.text
