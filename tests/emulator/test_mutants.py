"""Kernels with one synchronisation removed or changed: the emulator reports them, and what the documentation says of
all of them is what was stored.

The full run is ``cudatma mutants --update-docs``; here a sample of it runs, the same every time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import probe_specs
import pytest
from probe_subjects import subjects as probe_subjects
from ptx_lines import HEADER

from cudatma.cli import main
from cudatma.emulator import load
from cudatma.emulator.parser import parse
from cudatma.kernels.registry import REGISTRY
from cudatma.mutants import EXEMPT, REPORTED, SURVIVED, Call, Trial, mutants_of
from cudatma.mutants.exemptions import Exemptions
from cudatma.mutants.registry_subjects import registry_subjects
from cudatma.mutants.sites import sites_of
from cudatma.mutants.subject import Subject
from cudatma.mutants.tally import is_enough, total
from tools import mutants as tool

SUBJECTS = {subject.name: subject for subject in [*registry_subjects(), *probe_subjects()]}
#: One mutant in so many is tried here.
STEP = 37
#: Probes without a synchronisation, the one that only takes requests of the hardware capture, and the one that looks at
#: a barrier's bits, which are no data.
_WITHOUT = {"mma", "every_primitive", "tma_case", "mbarrier_bits"}


def test_every_kernel_and_probe_is_a_subject() -> None:
    kernels = {subject.kernel for subject in SUBJECTS.values()}
    assert set(REGISTRY) <= kernels
    assert {name for name, _, _ in probe_specs.PROBES} - _WITHOUT <= kernels


@pytest.mark.parametrize("name", SUBJECTS)
def test_unchanged_kernels_are_clean_and_mutants_are_reported(name: str) -> None:
    """As the stored run has it: what was reported is reported, what was exempt or survived still has its note."""
    trial = SUBJECTS[name].trial()
    report = trial.unchanged(2, seed=5)
    assert report.is_clean, str(report)
    stored, schedules = tool.stored_results()
    notes = next(result.notes for result in stored if result.subject == name)
    expected = {(note["operator"], note["text"]): note["verdict"] for note in notes}
    first = list(SUBJECTS).index(name) % STEP
    for outcome in trial.outcomes(schedules, trial.mutants[first::STEP]):
        mutant = outcome.mutant
        known = expected.get((mutant.operator, mutant.text), REPORTED)
        assert outcome.verdict in (REPORTED, known), f"{mutant.description}: {outcome.verdict} {outcome.kinds}"


def test_the_stored_run_is_enough_and_the_page_shows_it() -> None:
    results, schedules = tool.stored_results()
    assert {result.subject for result in results} == set(SUBJECTS)
    assert is_enough(results)
    assert all(result.clean_schedules >= 50 for result in results)
    assert all(note["note"] for result in results for note in result.notes if note["verdict"] == EXEMPT)
    page = tool.PAGE.read_text()
    assert tool.page_with(results, schedules, page) == page
    assert total(results)[SURVIVED] <= 37


@pytest.mark.parametrize("name", ["marlin/tma", "wgmma_gemm/cluster2", "tile_copy/2d"])
def test_sites_are_exact_and_mutants_parse(name: str) -> None:
    ptx = SUBJECTS[name].ptx()
    sites = sites_of(ptx)
    assert len(sites) == sum(len(function.body) for function in parse(ptx).functions.values())
    for site in sites:
        assert ptx[site.start : site.end].endswith(";")
        assert ptx[: site.start].count("\n") + 1 <= site.line <= ptx[: site.end].count("\n") + 1
        assert site.opcode in ptx[site.start : site.end]
    for mutant in mutants_of(ptx)[::7]:
        changed = mutant.apply(ptx)
        assert changed != ptx
        assert changed.count("\n") == ptx.count("\n")
        parse(changed)


SMALL = """.visible .entry k(.param .u64 p0) {
.reg .pred %p<4>; .reg .b32 %r<9>; .reg .b64 %d<4>;
.shared .align 8 .b64 bar;
mov.u32 %r1, bar; mov.u32 %r2, %tid.x;
setp.ne.u32 %p1, %r2, 0;
@!%p1 mbarrier.init.shared::cta.b64 [%r1], 2; // once: bar.sync 0;
bar.sync 0;
@!%p1 mbarrier.arrive.shared::cta.b64 _, [%r1], 2;
again: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1], 0;
@!%p2 bra again;
ret;
}"""


def test_each_mutant_is_one_change() -> None:
    ptx = HEADER + SMALL
    found = {(mutant.operator, mutant.line): mutant for mutant in mutants_of(ptx)}
    assert set(found) == {
        ("drop_init", 9),
        ("count_less", 9),
        ("count_more", 9),
        ("drop_barrier", 10),
        ("drop_arrive", 11),
        ("repeat_arrive", 11),
        ("relax", 11),
        ("drop_wait", 12),
        ("relax", 12),
        ("flip_parity", 12),
        ("other_barrier", 12),
    }
    assert "[%r1], 1;" in found["count_less", 9].apply(ptx)
    assert "[%r1], 1;" in found["flip_parity", 12].apply(ptx)
    assert "// once: bar.sync 0;" in found["drop_barrier", 10].apply(ptx)
    assert "setp.eq.u32 %p2, 0, 0;" in found["drop_wait", 12].apply(ptx)


@pytest.mark.parametrize(
    ("operator", "verdict"),
    [("drop_barrier", REPORTED), ("drop_init", REPORTED), ("drop_arrive", REPORTED), ("drop_wait", EXEMPT)],
)
def test_a_kernel_of_ones_own(operator: str, verdict: str) -> None:
    ptx = HEADER + SMALL

    def make() -> Call:
        return Call("k", 1, 64, (np.zeros(4, np.uint32),))

    trial = Trial(ptx, make)
    assert trial.unchanged(8).is_clean
    chosen = [mutant for mutant in trial.mutants if mutant.operator == operator]
    assert [outcome.verdict for outcome in trial.outcomes(8, chosen)] == [verdict] * len(chosen)


def _reason(body: str, operator: str) -> str:
    registers = ".reg .pred %p<9>; .reg .b16 %h<9>; .reg .b32 %r<9>; .reg .f32 %f<9>; .reg .b64 %d<9>;"
    ptx = f"{HEADER}.visible .entry k(.param .u64 p0) {{\n{registers}\n{body}\nret;\n}}"
    load(ptx)
    known = Exemptions(ptx)
    return next(known.reason(mutant) for mutant in mutants_of(ptx) if mutant.operator == operator)


STORE, LOAD, FENCE = "st.shared.u32 [%r1], %r2;", "ld.shared.u32 %r3, [%r1];", "fence.acq_rel.gpu;"
WAIT = "mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r4], 0;"
ARRIVE, SYNC = "mbarrier.arrive.shared::cta.b64 _, [%r4];", "bar.warp.sync -1;"


@pytest.mark.parametrize(
    ("operator", "same_order", "another"),
    [
        ("drop_fence", f"{STORE} {FENCE} {ARRIVE}", f"{STORE} {FENCE} {STORE} {ARRIVE}"),
        ("drop_fence", f"{FENCE} st.release.gpu.global.u32 [%d1], 1;", f"{FENCE} st.relaxed.gpu.global.u32 [%d1], 1;"),
        ("drop_warp_sync", f"{STORE} {SYNC} shfl.sync.idx.b32 %r5, %r2, 0, 31, -1; {LOAD}", f"{STORE} {SYNC} {LOAD}"),
        ("drop_warp_sync", f"{STORE} bar.sync 0; {SYNC} {LOAD}", f"bar.sync 0; {STORE} {SYNC} {LOAD}"),
        (
            "drop_group_wait",
            "cp.async.bulk.wait_group.read 0; cp.async.bulk.wait_group 0;",
            f"cp.async.bulk.wait_group.read 0; {STORE} cp.async.bulk.wait_group 0;",
        ),
        (
            "drop_fence",
            "fence.mbarrier_init.release.cluster; bar.sync 0;",
            "fence.mbarrier_init.release.cluster; cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes "
            "[%r1], [%d1], 16, [%r4];",
        ),
        ("relax", ARRIVE, f"{STORE} {ARRIVE} {LOAD}"),
        (
            "relax",
            f"{STORE} {ARRIVE}",
            f"setp.eq.u32 %p1, %r6, 0; @%p1 bra READ; {STORE} {ARRIVE} ret; READ: {WAIT} {LOAD}",
        ),
    ],
)
def test_exemptions_name_what_gives_the_same_order(operator: str, same_order: str, another: str) -> None:
    assert "`" in _reason(same_order, operator)
    assert _reason(another, operator) == ""


def test_the_tool_lists_and_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["mutants", "--list", "sync"]) == 0
    assert "sync/plain" in capsys.readouterr().out
    assert main(["mutants", "no_such_kernel"]) == 2
    assert "no_such_kernel" in capsys.readouterr().err
    assert main(["mutants", "--schedules", "0"]) == 2
    monkeypatch.setattr(tool, "UNCHANGED_SCHEDULES", 4)
    results = tool.run(["sync"], 4, 1, show=False)
    assert [result.subject for result in results] == ["sync/plain"]
    assert is_enough(results)
    shown: Any = tool.to_json(results, 4)
    assert shown["results"][0]["counts"]["drop_dependency_wait"] == {"reported": 1}


def test_a_subject_says_what_it_is() -> None:
    subject: Subject = SUBJECTS["ring/3x4"]
    assert subject.kernel == "ring"
    assert ".entry ring" in subject.ptx()
