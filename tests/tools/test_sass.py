"""SASS and ptxas text against small samples whose counts were taken by hand."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools import sass
from tools.report import config_fields, maxntid

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


def test_fields_of_something_that_is_no_spec() -> None:
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
