"""Loops in SASS: of code written by hand, and of real compilations."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import (
    load_path_code,
    load_paths,
)
from benchmarks.sass_loops import natural_loops
from cudatma.kernels.gpu import H200
from cudatma.kernels.marlin.mma_sync_candidates import choose_mma_sync
from cudatma.kernels.marlin.problem import LinearShape, Problem
from cudatma.target import get_target
from tools.sass import find_program

#: A loop whose inner loop runs first, and whose wait has its slow path after the end of the kernel.
SASS = """
        /*0000*/                   MOV R1, RZ ;
.L_x_0:
        /*0010*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R2], R3 ;
        /*0020*/              @!P0 BRA `(.L_x_9) ;
.L_x_1:
        /*0030*/                   LDGSTS.E.BYPASS.128 [R4], desc[UR4][R6.64] ;
        /*0040*/                   LDGSTS.E.BYPASS.128 [R4+0x10], desc[UR4][R6.64+0x10] ;
        /*0050*/                   IADD3 R4, R4, 0x20, RZ ;
        /*0060*/               @P1 BRA `(.L_x_1) ;
        /*0070*/                   UIADD3 UR5, UR5, 0x1, URZ ;
        /*0080*/                   NOP ;
        /*0090*/               @P2 BRA `(.L_x_0) ;
        /*00a0*/                   BSSY B0, `(.L_x_4) ;
        /*00b0*/               @P3 BRA `(.L_x_3) ;
        /*00c0*/                   STG.E desc[UR4][R2.64], R8 ;
.L_x_3:
        /*00d0*/                   BSYNC B0 ;
.L_x_4:
        /*00e0*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
        /*00f0*/               @P4 BRA `(.L_x_4) ;
        /*0100*/                   EXIT ;
.L_x_9:
        /*0110*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R2], R3 ;
        /*0120*/               @P0 BRA `(.L_x_1) ;
        /*0130*/                   BRA `(.L_x_9) ;
.L_x_10:
        /*0140*/                   BRA `(.L_x_10) ;
"""


def encoded(code: str) -> str:
    """The code as nvdisasm prints it, with two words for each instruction; what they say does not matter here."""
    words = f"/* 0x{0:016x} */"
    return "".join(f"{line}  {words}\n  {words}\n" if line.endswith(";") else f"{line}\n" for line in code.splitlines())


def test_natural_loops() -> None:
    loops = {loop.header: loop for loop in natural_loops(encoded(SASS))}
    assert sorted(loops) == [0x10, 0x30, 0xE0, 0x110], "the loop behind the end is never entered"
    outer, inner, tail, slow = (loops[header] for header in (0x10, 0x30, 0xE0, 0x110))
    assert [step.address for step in inner.steps] == [0x30, 0x40, 0x50, 0x60]
    assert [step.address for step in slow.steps] == [0x110, 0x120, 0x130]
    assert [step.address for step in outer.steps] == [*range(0x10, 0x80, 0x10), 0x90, 0x110, 0x120, 0x130]
    assert outer.contains(inner)
    assert outer.contains(slow)
    assert not inner.contains(outer)
    assert not outer.contains(tail)
    assert outer.integer == 2, "IADD3 and UIADD3"
    assert outer.counts["LDGSTS"] == 2


def test_addresses_as_branch_targets() -> None:
    text = (
        "        /*0000*/   MOV R1, RZ ;\n        /*0010*/   IADD3 R1, R1, 1, RZ ;\n        /*0020*/  @P0 BRA 0x10 ;\n"
    )
    assert [(loop.header, len(loop.steps)) for loop in natural_loops(encoded(text))] == [(0x10, 2)]
    assert natural_loops("") == []


def test_the_steady_loops_are_found() -> None:
    loops = natural_loops(encoded(SASS))
    assert load_path_code.producer_loop(loops).header == 0x10
    assert load_path_code.consumer_loop(loops).header == 0xE0
    with pytest.raises(LookupError):
        load_path_code.producer_loop([])
    with pytest.raises(LookupError):
        load_path_code.consumer_loop([])


def test_producer_slots_scale_with_the_copies() -> None:
    # 11 instructions, 4 of them in the copy loop: 2 for a copy, 7 besides for each warp.
    loops = natural_loops(encoded(SASS))
    assert load_path_code.producer_slots(loops, [], 1) == 11
    assert load_path_code.producer_slots(loops, [10], 4) == 4 * 7 + 10 * 2
    assert load_path_code.producer_slots(loops, [10, 20], 4) == 4 * 7 + 30 * 2, "one loop for two operands: its mean"


def spec_of(load_path: str, m: int = 16) -> Any:
    layer = LinearShape(8192, 28672, 128, False, "float16")
    return choose_mma_sync(Problem(layer, m), H200, load_paths.LOAD_PATHS[load_path])


def test_copies_of_a_stage() -> None:
    spec = spec_of("tma")
    boxes = spec.block_n // 64 + 1 + spec.block_k // 64
    assert sum(load_path_code.copies_by_operand(spec).values()) == boxes
    pieces = load_path_code.copies_by_operand(spec_of("cp_async"))
    assert pieces["weight"] * 512 == spec.block_n * spec.block_k // 2
    assert pieces["activation"] * 512 == spec.block_m * spec.block_k * 2
    assert load_path_code.copies_by_operand(spec_of("scales")) == pieces | {"scale": 1}


@pytest.mark.slow
@pytest.mark.skipif(
    find_program("nvdisasm") is None, reason="nvdisasm is not installed: pip install nvidia-cuda-nvdisasm"
)
def test_real_code_shows_what_tma_saves() -> None:
    target = get_target("sm_90a")
    tma, pieces = (load_path_code.compile_and_analyse(spec_of(name), target) for name in ("tma", "cp_async"))
    assert tma.threads == 1
    assert pieces.threads == 128
    assert tma.copies < pieces.copies
    assert tma.loop_integer < pieces.loop_integer < pieces.loop
    assert tma.slots < pieces.slots
    assert 32 < tma.registers <= 255
