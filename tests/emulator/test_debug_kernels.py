"""Kernels rendered with debug=True compute what they compute without, and show no hazard."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import probe_subjects
import pytest

from cudatma.compiler import compile_source
from cudatma.emulator import load
from cudatma.errors import PipelineHang
from cudatma.hang import Names
from cudatma.hang.emulated import ListeningModule
from cudatma.mutants.call import Call
from cudatma.mutants.registry_subjects import registry_subjects
from cudatma.mutants.subject import Subject
from cudatma.render import render
from cudatma.target import get_target

SUBJECTS = {subject.name: subject for subject in (*registry_subjects(), *probe_subjects.subjects())}
#: One of each way to wait: rings, clusters, named barriers, flags in global memory, bulk and tensor copies.
CHOSEN = (
    "marlin/tma",
    "marlin_wgmma/cluster",
    "marlin_wgmma/store",
    "marlin_strip/even",
    "tile_copy/2d",
    "ring/3x4",
    "multicast/2",
    "tile_move/128B_store",
    "im2col/3d",
    "sync/plain",
)


def module(subject: Subject, *changes: tuple[str, str]) -> ListeningModule:
    """The subject with debug=True; changes: texts of the source that become others."""
    target = get_target(subject.target)
    text = render(subject.template, subject.spec, target, debug=True)
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    layout = getattr(subject.spec, "smem_layout", tuple)()
    entry = getattr(subject.spec, "entry", subject.kernel)
    return ListeningModule(load(str(compile_source(text, target).ptx)), Names(entry, text, layout))


def arrays(call: Call) -> Iterator[np.ndarray[Any, Any]]:
    for value in (*call.args, *call.arrays):
        if isinstance(value, np.ndarray):
            yield value.reshape(-1).view(np.uint8)


@pytest.mark.parametrize("name", CHOSEN)
def test_the_result_is_the_same(name: str) -> None:
    subject = SUBJECTS[name]
    plain, debug = subject.make(), subject.make()
    plain.run(load(subject.ptx()), schedules=1, hazards="off")
    debug.run(module(subject), schedules=2)
    for here, there in zip(arrays(plain), arrays(debug), strict=True):
        np.testing.assert_array_equal(here, there)


EXPECT = "mbarrier_arrive_expect_tx(full + 8 * slot, TRANSACTION_BYTES"
#: Subject, a text of its source, what it becomes, and how the hang is known then.
PLANTED = (
    ("marlin_wgmma/cluster", EXPECT, f"{EXPECT} + 16", "full_barriers[0]", "16 announced bytes"),
    ("marlin_wgmma/setmaxnreg", "stage, EMPTY_ARRIVALS)", "stage, EMPTY_ARRIVALS + 1)", "empty_barriers[0]", "1 of 9"),
    ("marlin_strip/even", "empty + 8 * stage, CONSUMER_WARPS)", "empty + 8 * stage, 9)", "empty_barriers[0]", "of 9"),
)


@pytest.mark.parametrize(("name", "old", "new", "barrier", "cause"), PLANTED, ids=[name for name, *_ in PLANTED])
def test_a_hang_in_a_kernel_of_the_registry_ends(name: str, old: str, new: str, barrier: str, cause: str) -> None:
    """With clusters, named barriers, setmaxnreg and stream-K flags around it."""
    with pytest.raises(PipelineHang) as caught:
        SUBJECTS[name].make().run(module(SUBJECTS[name], (old, new)), schedules=1)
    first = caught.value.waits[0]
    assert first.barrier == barrier
    assert cause in first.cause
    assert "mbarrier_wait_parity(" in first.text
