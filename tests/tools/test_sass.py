"""SASS and ptxas text against small samples whose counts were taken by hand, and the check of wgmma registers."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sass_program import Line, assemble

from cudatma.errors import ArgumentError
from tools import sass
from tools.report import config_fields, maxntid
from tools.sass import without_encodings
from tools.sass_flow import parse_encoded
from tools.sass_wgmma import registers_written, wgmma_hazards

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
	.target	sm_120a
//--------------------- .text.k                   --------------------------
	.section	.text.k,"ax",@progbits
	.align	128
        .type           k,@function
k:
.text.k:
        /*0000*/                   LDC R1, c[0x0][0x37c] ;
.L_x_7:
        /*0010*/                   UCGABAR_ARV ;
        /*0020*/              @!UP0 ULOP3.LUT UR7, UR9, UR8, URZ, 0xc0, !UPT ;
        /*0030*/                   LOP3.LUT R7, R2, 0x1fc, RZ, 0x3c, !PT ;
        /*0040*/                   LDGSTS.E.BYPASS.128 [R7], desc[UR4][R2.64] ;
        /*0050*/                   LDG.E R4, desc[UR14][R4.64] ;
        /*0060*/               @P2 BRA.U.ANY `(.L_x_7) ;
        /*0070*/                   STL [R1], R4 ;
"""

PTXAS = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'first' for 'sm_90a'
ptxas info    : Function properties for first
ptxas         .     16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 3 barriers, 16 bytes cumulative stack size, 512 bytes smem
ptxas info    : Compiling entry function 'second' for 'sm_90a'
ptxas info    : Function properties for second
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
"""


def test_cuobjdump_text() -> None:
    found = sass.parse_sass(CUOBJDUMP)
    assert [i.opcode for i in found if i.function == "copy"] == [
        *("LDC", "SYNCS.EXCH.64", "UTMALDG.2D", "UTMALDG.2D.MULTICAST", "HMMA.16816.F32")
    ]
    assert [(i.address, i.predicate) for i in found[1:4]] == [(0x10, "!P0"), (0x20, ""), (0x30, "!UP1")]
    assert found[-1] == sass.Instruction("other", 0, "", "EXIT")
    assert sass.count_mnemonics(found) == {"UTMALDG": 2, "EXIT": 1, "HMMA": 1, "LDC": 1, "SYNCS": 1}
    assert sass.uses_cluster(found) == ["UTMALDG.2D.MULTICAST"]


def test_nvdisasm_text() -> None:
    found = sass.parse_sass(NVDISASM)
    assert {i.function for i in found} == {"k"}
    assert [i.mnemonic for i in found] == [*("LDC", "UCGABAR_ARV", "ULOP3", "LOP3", "LDGSTS", "LDG", "BRA", "STL")]
    classes = sass.by_class(sass.count_mnemonics(found))
    assert classes["arithmetic"]["LOP3"] == 2  # the uniform form is counted with the plain one
    assert (classes["global"]["LDG"], classes["global"]["LDGSTS"]) == (1, 1)
    assert classes["local"] == {"LDL": 0, "STL": 1}
    assert sass.uses_cluster(found) == ["UCGABAR_ARV"]


def test_no_mnemonic_is_counted_twice() -> None:
    members = [mnemonic for counts in sass.CLASSES.values() for mnemonic in counts]
    assert len(members) == len(set(members))
    assert not {f"U{mnemonic}" for mnemonic in members} & set(members)


@given(st.lists(st.sampled_from(["LDG.E", "UTMALDG.3D", "HMMA.16816.F32.BF16", "BAR.SYNC", "NOP"]), max_size=40))
def test_every_instruction_is_counted(opcodes: list[str]) -> None:
    text = "\t\tFunction : k\n" + "".join(f"        /*{16 * i:04x}*/   {op} R1 ;\n" for i, op in enumerate(opcodes))
    found = sass.parse_sass(text)
    assert [i.opcode for i in found] == [op for op in opcodes if op != "NOP"]
    assert sum(sass.count_mnemonics(found).values()) == len(found)


def test_ptxas_log() -> None:
    found = sass.parse_ptxas(PTXAS)
    assert found["first"] == sass.Resources("first", 168, 16, 8, 12, 512, 3)
    assert found["second"] == sass.Resources("second", 8, 0, 0, 0, 0, 0)
    assert sass.parse_ptxas("nothing here") == {}


def test_threads_from_ptx() -> None:
    assert maxntid(".visible .entry k()\n.maxntid 128, 2, 1\n{") == 256
    assert maxntid(".maxntid 96\n") == 96
    assert maxntid(".entry k()") is None


def test_fields_of_something_that_is_no_config() -> None:
    assert config_fields(object()) == {}


def _program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without disassemblers: no pip packages, no CUDA_HOME, an empty PATH."""
    monkeypatch.setattr(sass.sysconfig, "get_paths", lambda: dict.fromkeys(("purelib", "platlib"), str(tmp_path / "s")))
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


def test_programs_are_searched_in_order(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sass.find_program("nvdisasm") is None
    on_path = _program(bare / "bin" / "nvdisasm", "exit 0")
    assert sass.find_program("nvdisasm") == on_path
    monkeypatch.setenv("CUDA_HOME", str(bare / "cuda"))
    toolkit = _program(bare / "cuda" / "bin" / "nvdisasm", "exit 0")
    assert sass.find_program("nvdisasm") == toolkit
    package = _program(bare / "s" / "nvidia" / "cu13" / "bin" / "nvdisasm", "exit 0")
    assert sass.find_program("nvdisasm") == package


def test_a_missing_disassembler_says_what_to_install(bare: Path) -> None:
    result = sass.disassemble(bare / "k.cubin")
    assert result.text is None
    assert "pip install nvidia-cuda-nvdisasm" in result.note


def test_a_disassembler_that_refuses_is_quoted_and_the_next_one_asked(bare: Path) -> None:
    old = _program(bare / "bin" / "nvdisasm", "echo 'unknown architecture' >&2; exit 1")
    assert f"{old}: unknown architecture" in sass.disassemble(bare / "k.cubin").note
    _program(bare / "bin" / "cuobjdump", "echo 'Function : k'")
    assert sass.disassemble(bare / "k.cubin") == sass.Disassembly("Function : k\n")


def test_the_installed_disassembler_is_executable() -> None:
    for name in ("nvdisasm", "cuobjdump"):
        program = sass.find_program(name)
        if program is None:
            pytest.skip(f"{name} is not installed here")
        assert os.access(program, os.X_OK)


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
    return [(hazard.write // 16, hazard.wgmma // 16) for hazard in wgmma_hazards(assemble(*lines))]


def test_what_a_hazard_says() -> None:
    program = assemble(wgmma(56), write(59), Line("LDS.128 R22, [R2]"), EXIT)
    fragment, accumulators = wgmma_hazards(program)
    assert (fragment.function, fragment.write, fragment.register, fragment.operand) == ("k", 0x10, 59, "A")
    assert str(fragment) == "HADD2 at 0x10 writes R59, operand A of HGMMA.64x16x16.F32 at 0x0"
    assert str(accumulators) == "LDS.128 at 0x20 writes R24, operand D of HGMMA.64x16x16.F32 at 0x0"
    with pytest.raises(ArgumentError, match="print-instruction-encoding"):
        wgmma_hazards(without_encodings(program))


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
    (code,) = parse_encoded(assemble(Line(text)))
    assert list(registers_written(code.steps[0])) == written


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
