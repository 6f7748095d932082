"""SASS text against small samples with counts taken by hand, NVIDIA's programs, and the check of wgmma registers."""

from __future__ import annotations

import stat
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sass_program import Line, assembled

from cudatma import toolkit
from cudatma.review import nvidia_programs, sass
from cudatma.review.wgmma_hazards import registers_written, wgmma_hazards

CUOBJDUMP = """
	code for sm_90a
	.target	sm_90a

		Function : copy
	.headerflags	@"EF_CUDA_ACCELERATORS EF_CUDA_SM90 EF_CUDA_VIRTUAL_SM(EF_CUDA_SM90)"
        /*0000*/                   LDC R1, c[0x0][0x28] ;                        /* 0x00000a00ff017b82 */
                                                                                 /* 0x000fe20000000800 */
        /*0010*/              @!P0 SYNCS.EXCH.64 URZ, [UR8], UR4 ;               /* 0x00000004083f75b2 */
                                                                                 /* 0x0003e20008000100 */
        /*0020*/                   UTMALDG.2D [UR8], [UR6], desc[UR12] ;         /* 0x00000c08060075b4 */
                                                                                 /* 0x0001e40008011000 */
        /*0030*/             @!UP1 UTMALDG.2D.MULTICAST [UR8], [UR6], UR9 ;      /* 0x00000c08060075b4 */
                                                                                 /* 0x0001e40008011000 */
        /*0040*/                   HMMA.16816.F32 R4, R8, R12, R4 ;              /* 0x0000000c0804723c */
                                                                                 /* 0x000fe20000001804 */
        /*0050*/                   NOP ;                                         /* 0x0000000000007918 */
                                                                                 /* 0x000fc00000000000 */
		..........
		Function : other
        /*0000*/                   EXIT ;                                        /* 0x000000000000794d */
                                                                                 /* 0x000fea0003800000 */
"""

NVDISASM = """
	.section	.text.k,"ax",@progbits
k:
.text.k:
	//## File "/src/ring.cuh", line 7 inlined at "/src/gemm.cu", line 20
	//## File "/src/gemm.cu", line 20
        /*0000*/                   LDC R1, c[0x0][0x37c] ;                    /* 0x00000a00ff017b82 */
                                                                              /* 0x000fe20000000800 */
	//## File "/src/gemm.cu", line 21
.L_x_7:
        /*0010*/              @!UP0 ULOP3.LUT UR7, UR9, UR8, URZ, 0xc0, !UPT ; /* 0x00000008090772b2 */
                                                                              /* 0x000fe20000000800 */
        /*0020*/                   LOP3.LUT R7, R2, 0x1fc, RZ, 0x3c, !PT ;    /* 0x000001fc02077812 */
                                                                              /* 0x000fe20000000800 */
        /*0030*/                   STL [R1], R4 ;                             /* 0x0000000401007387 */
                                                                              /* 0x000fe20000000800 */
"""


def test_cuobjdump_text() -> None:
    copy, other = sass.parse_sass(CUOBJDUMP)
    assert (copy.function, other.function) == ("copy", "other")
    assert [step.opcode for step in copy.steps] == [
        *("LDC", "SYNCS.EXCH.64", "UTMALDG.2D", "UTMALDG.2D.MULTICAST", "HMMA.16816.F32", "NOP")
    ]
    assert [(step.address, step.predicate) for step in copy.steps[1:4]] == [(0x10, "!P0"), (0x20, ""), (0x30, "!UP1")]
    assert sass.count_mnemonics([*copy.steps, *other.steps]) == {
        "UTMALDG": 2,
        "EXIT": 1,
        "HMMA": 1,
        "LDC": 1,
        "SYNCS": 1,
    }
    assert sass.uses_cluster(copy.steps) == ["UTMALDG.2D.MULTICAST"]


def test_nvdisasm_text_with_lines() -> None:
    (code,) = sass.parse_sass(NVDISASM)
    assert (code.function, code.labels) == ("k", {".text.k": 0, ".L_x_7": 1, "k": 0})
    assert [step.places for step in code.steps[:2]] == [(("ring.cuh", 7), ("gemm.cu", 20)), (("gemm.cu", 21),)]
    classes = sass.by_class(sass.count_mnemonics(code.steps))
    assert classes["arithmetic"]["LOP3"] == 2  # the uniform form is counted with the plain one
    assert classes["local"] == {"LDL": 0, "STL": 1}
    assert [sass.class_of(name) for name in ("ULOP3", "UTMALDG", "NOP")] == ["arithmetic", "TMA", ""]


def test_no_mnemonic_is_counted_twice() -> None:
    members = [mnemonic for counts in sass.CLASSES.values() for mnemonic in counts]
    assert len(members) == len(set(members))
    assert not {f"U{mnemonic}" for mnemonic in members} & set(members)


def _program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without disassemblers: no pip packages, no CUDA_HOME, an empty PATH."""
    monkeypatch.setattr(sys, "path", [str(tmp_path / "s")])
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(toolkit, "_SYSTEM_TOOLKIT", str(tmp_path / "system"))
    return tmp_path


def test_programs_are_searched_in_order(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert toolkit.find_program("nvdisasm") is None
    monkeypatch.setenv("CUDA_HOME", str(bare / "cuda"))
    expected: list[Path] = []
    for folder in ("s/triton/backends/nvidia/bin", "system/bin", "bin", "s/nvidia/cu13/bin", "cuda/bin"):
        expected = [_program(bare / folder / "nvdisasm", "exit 0"), *expected]
        toolkit._matches.cache_clear()
        assert list(toolkit.find_programs("nvdisasm")) == expected


def test_a_missing_disassembler_says_what_to_install(bare: Path) -> None:
    result = nvidia_programs.disassemble(b"")
    assert result.text is None
    assert "pip install nvidia-cuda-nvdisasm" in result.note


def test_a_disassembler_that_refuses_is_quoted_and_the_next_one_asked(bare: Path) -> None:
    old = _program(bare / "bin" / "nvdisasm", "echo 'unknown architecture' >&2; exit 1")
    assert f"{old}: unknown architecture" in nvidia_programs.disassemble(b"").note
    _program(bare / "bin" / "cuobjdump", "echo 'Function : k'")
    assert nvidia_programs.disassemble(b"").text == "Function : k\n"


EXIT = Line("EXIT")
JUMP = Line("@P0 BRA `(.L_x_1)")


def wgmma(a: int, *, last: bool = True, guard: str = "", label: str = "") -> Line:
    """Accumulators R24 to R31, operand A from R<a>."""
    group_end = ", gsb0" if last else ""
    return Line(f"{guard}HGMMA.64x16x16.F32 R24, R{a}, gdesc[UR4], R24{group_end}", label=label)


def wait(groups: int, guard: str = "", label: str = "") -> Line:
    return Line(f"{guard}WARPGROUP.DEPBAR.LE gsb0, {groups:#x}", label=label)


def write(register: int, label: str = "") -> Line:
    return Line(f"HADD2 R{register}, R0, R1", label=label)


def found(*lines: Line) -> list[tuple[int, int]]:
    """(line of the write, line of the wgmma) of each hazard."""
    return [(hazard.write // 16, hazard.wgmma // 16) for hazard in wgmma_hazards(assembled(*lines))]


def test_what_a_hazard_says() -> None:
    program = assembled(wgmma(56), write(59), Line("LDS.128 R22, [R2]"), EXIT)
    fragment, accumulators = wgmma_hazards(program)
    assert (fragment.function, fragment.write, fragment.register, fragment.operand) == ("k", 0x10, 59, "A")
    assert str(fragment) == "HADD2 at 0x10 writes R59, operand A of HGMMA.64x16x16.F32 at 0x0"
    assert str(accumulators) == "LDS.128 at 0x20 writes R24, operand D of HGMMA.64x16x16.F32 at 0x0"


def test_a_wgmma_may_write_the_accumulators_of_another_one() -> None:
    assert found(wgmma(40), wgmma(44), EXIT) == []
    assert found(wgmma(31), wgmma(44), wait(0), EXIT) == [(1, 0)]


def test_under_a_guard_nothing_is_sure() -> None:
    assert found(wgmma(40), wait(0, "@P0 "), write(40), EXIT) == [(2, 0)]
    assert found(wgmma(40), wgmma(44, guard="@P0 "), wait(1), write(40), EXIT) == [(3, 0)]
    assert found(wgmma(40, guard="@P0 "), write(40), EXIT) == [(1, 0)]
    assert found(wgmma(40, guard="@!PT "), Line("@!PT LDS R40, [RZ]"), write(40), EXIT) == []
    assert found(wgmma(40), Line("@!PT LDS R40, [RZ]"), EXIT) == []


def test_a_group_in_flight_over_the_back_edge() -> None:
    start = write(40, label=".L_x_1")
    assert found(start, wgmma(40), wait(1), JUMP, wait(0), EXIT) == [(0, 1)]
    assert found(start, wgmma(40), wait(0), JUMP, EXIT) == []
    # Two groups a turn of which one is left: only the second's registers are in use at the start.
    assert found(start, wgmma(40), wait(1), write(44), wgmma(44), wait(1), JUMP, EXIT) == []
    assert found(start, wgmma(44), wait(1), wgmma(40), wait(1), JUMP, EXIT) == [(0, 3)]


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("LOP3.LUT R23, R13.reuse, 0xf000f, R64.reuse, 0xea, !PT", [23]),
        ("LOP3.LUT P0, RZ, R4, 0x1, RZ, 0xc0, !PT", []),
        ("SHFL.IDX PT, R84, R83, RZ, 0x1f", [84]),
        ("IADD3 R9, P0, R84, R9, RZ", [9]),
        ("IMAD.WIDE.U32 R8, R13, 0x100, R8", [8, 9]),
        ("CS2R R46, SRZ", [46, 47]),
        ("CS2R.32 R46, SR_CLOCKLO", [46]),
        ("LDS.128 R12, [R13+0x8000]", [12, 13, 14, 15]),
        ("LDS.U16 R12, [R13]", [12]),
        ("LDG.E.64 R4, desc[UR8][R6.64]", [4, 5]),
        ("LDG.E.STRONG.GPU R4, desc[UR8][R6.64]", [4]),
        ("LDSM.16.M88.4 R172, [R9+0x1800]", [172, 173, 174, 175]),
        ("LDSM.16.MT88.4 R172, [R9+0x1800]", [172, 173, 174, 175]),
        ("LDSM.16.M88.2 R172, [R9+0x1800]", [172, 173]),
        ("HMMA.16816.F32 R4, R8, R12, R4", [4, 5, 6, 7]),
        ("DADD R4, R8, R12", [4, 5]),
        ("ISETP.NE.AND P0, PT, R84, RZ, PT", []),
        ("STG.E.128 desc[UR8][R12.64], R24", []),
        ("STSM.16.MT88.4 [R15], R4", []),
        ("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R13+URZ+0x38900], R10", []),
        ("SYNCS.ARRIVE.TRANS64 RZ, [UR9+0x38900], R6", []),
        ("ATOMG.E.ADD.STRONG.GPU PT, R3, desc[UR4][R6.64], R5", [3]),
        ("R2UR P0, UR10, R6", []),
        ("WARPSYNC.COLLECTIVE R4, `(.L_x_61)", []),
        ("BAR.SYNC R5, 0x80", []),
        ("RET.REL.NODEC R4 `(k)", []),
        ("WARPGROUP.ARRIVE", []),
        ("HGMMA.64x16x16.F32.BF16 R24, R88, gdesc[UR12], R24, gsb0", [*range(24, 32)]),
    ],
)
def test_which_registers_an_instruction_writes(text: str, written: list[int]) -> None:
    assert list(registers_written(assembled(Line(text)).steps[0])) == written


def hazards_on_paths(program: Sequence[Line]) -> set[tuple[int, int]]:
    """Walks each path of a program without backward jumps, with the groups of a warp in flight, the open one last."""
    hazards: set[tuple[int, int]] = set()

    def walk(index: int, groups: list[list[int]]) -> None:
        text = program[index].text
        if "HADD2" in text:
            used = f" R{text.split()[1].strip(',R')},"
            hazards.update((index, at) for group in groups for at in group if used in program[at].text)
        if "HGMMA" in text:
            groups = [*groups[:-1], [*groups[-1], index], *([[]] if "gsb0" in text else [])]
        if "DEPBAR" in text:
            groups = groups[max(0, len(groups) - 1 - int(text[-1])) :]
        if "BRA" in text:
            walk(int(text.split("_")[-1].rstrip(")")), groups)
        if text != "EXIT":
            walk(index + 1, groups)

    walk(0, [[]])
    return hazards


# Operand A's first register stands for all of them.
FRAGMENT = st.sampled_from([40, 44, 48])
STRAIGHT = st.one_of(
    st.builds(wgmma, FRAGMENT, last=st.booleans()), st.builds(wait, st.integers(0, 3)), st.builds(write, FRAGMENT)
)


@given(st.lists(STRAIGHT, max_size=20))
def test_straight_code_is_judged_exactly(lines: list[Line]) -> None:
    program = [*lines, EXIT]
    assert set(found(*program)) == hazards_on_paths(program)


@given(st.lists(STRAIGHT, min_size=2, max_size=12), st.data())
def test_no_path_is_overlooked(lines: list[Line], data: st.DataObject) -> None:
    program = [Line(line.text, label=f".L_x_{i}") for i, line in enumerate([*lines, EXIT])]
    for at in data.draw(st.sets(st.integers(0, len(lines) - 1), max_size=3)):
        target = data.draw(st.integers(at + 1, len(lines)))
        program[at] = Line(f"@P0 BRA `(.L_x_{target})", label=f".L_x_{at}")
    assert set(found(*program)) >= hazards_on_paths(program)
