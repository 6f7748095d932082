"""Mutants are single changes of exact places, exemptions name what gives the same order, and the tool tries a file's
kernel."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from ptx_lines import HEADER
from trials import trials

from cudatma.cli import main
from cudatma.emulator import load
from cudatma.emulator.ptx.parser import parse
from cudatma.mutants import EXEMPT, REPORTED, SURVIVED, Call, Trial, mutants_of
from cudatma.mutants.exemptions import Exemptions
from cudatma.mutants.ptx_text import sites_of


@pytest.mark.parametrize("name", ["marlin_mma_sync/tma", "wgmma_gemm/cluster2", "tile_copy/2d"])
def test_sites_are_exact_and_mutants_parse(name: str) -> None:
    ptx = trials()[name]().ptx
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


@pytest.mark.parametrize(("line", "verdict"), [(7, EXEMPT), (8, SURVIVED)])
def test_a_mutant_is_exempt_if_no_warp_reaches_its_instruction(line: int, verdict: str) -> None:
    body = f""".reg .pred %p<2>; .reg .b32 %r<3>; .reg .b64 %d<2>;
    mov.u32 %r1, %tid.x; setp.gt.u32 %p1, %r1, 99; @!%p1 bra after;
{FENCE.replace("gpu", "cta")}
after: bar.sync 0;
    ld.param.u64 %d1, [p0]; st.global.u32 [%d1], 1;
    ret;"""
    ptx = f"{HEADER}.visible .entry k(.param .u64 p0) {{\n{body}\n}}"
    trial = Trial(ptx, lambda: Call("k", 1, 32, (np.zeros(4, np.uint32),)))
    (mutant,) = [m for m in trial.mutants if m.operator in ("drop_fence", "drop_barrier") and m.line == line]
    (outcome,) = trial.outcomes(2, [mutant])
    assert outcome.verdict == verdict, outcome


def _reason(body: str, operator: str, number: int = 0) -> str:
    registers = ".reg .pred %p<9>; .reg .b16 %h<9>; .reg .b32 %r<9>; .reg .f32 %f<9>; .reg .b64 %d<9>;"
    ptx = f"{HEADER}.visible .entry k(.param .u64 p0) {{\n{registers}\n{body}\nret;\n}}"
    load(ptx)
    known = Exemptions(ptx)
    return [known.reason(mutant) for mutant in mutants_of(ptx) if mutant.operator == operator][number]


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


def test_a_wgmma_fence_is_spare_while_only_wgmmas_write_their_registers() -> None:
    fence, write = "wgmma.fence.sync.aligned;", "add.f32 %f1, %f5, %f5;"
    products = "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f1, %f2, %f3, %f4}, %d1, %d2, 1, 1, 1, 0, 0;"
    group = f"{fence} {products} wgmma.commit_group.sync.aligned;"
    assert "`wgmma.fence.sync.aligned`" in _reason(group + group, "drop_fence", 1)
    assert _reason(group + group, "drop_fence", 0) == ""
    assert _reason(group + write + group, "drop_fence", 1) == ""


@pytest.fixture
def small(tmp_path: Path) -> list[str]:
    """The arguments of the small kernel's launch, its entry named by its beginning."""
    path = tmp_path / "small.ptx"
    path.write_text(HEADER + SMALL.replace("entry k(", "entry kernel("))
    return [str(path), "--entry", "ker", "--block", "64", "--arg", "x:uint32[4]"]


def test_the_tool_lists_the_mutants_of_a_file(small: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mutants", *small, "--list"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 11
    assert shown[0].split()[:2] == ["count_less", "9"]
    assert "mbarrier.init.shared::cta.b64" in shown[0]
    assert main(["mutants", *small, "--list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [row["operator"] for row in listed] == [line.split()[0] for line in shown]
    assert listed[0]["line"] == 9


def test_the_tool_tries_the_mutants_of_a_file(small: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mutants", *small, "--schedules", "8"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("small.ptx, kernel: 11 mutants; the unchanged kernel has no hazards\n")
    assert "exempt: PTX line 12: " in shown
    assert main(["mutants", *small, "--schedules", "8", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["passed"] is True
    assert data["unclean"] == []
    assert sum(data["counts"].values()) == len(data["mutants"]) == 11
    (initless,) = (row for row in data["mutants"] if row["operator"] == "drop_init")
    assert initless["verdict"] == REPORTED
    assert "barrier_uninitialized" in initless["kinds"]


def test_the_tool_runs_no_mutant_of_a_kernel_that_is_not_clean(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "small.ptx"
    path.write_text(HEADER + SMALL.replace("b64 [%r1], 2;", "b64 [%r1], 3;"))
    arguments = ["mutants", str(path), "--block", "64", "--arg", "x:uint32[4]"]
    assert main(arguments) == 1
    shown = capsys.readouterr().out
    assert shown.startswith("small.ptx, k: the unchanged kernel has hazards (deadlock), so no mutant was run\n")
    assert "PTX line" in shown
    assert main([*arguments, "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert (data["unclean"], data["mutants"]) == (["deadlock"], [])


def test_the_tool_refuses_wrong_calls(small: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mutants", *small, "--schedules", "0"]) == 2
    assert "--schedules" in capsys.readouterr().err
    assert main(["mutants", "no_such_kernel"]) == 2
    assert "no_such_kernel" in capsys.readouterr().err
