"""The check of registers of wgmmas in flight on small SASS written here; and against a walk over all paths."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sass_program import Line, assemble

from cudatma.errors import ArgumentError
from tools.sass import without_encodings
from tools.sass_flow import parse_encoded
from tools.sass_wgmma import registers_written, wgmma_hazards

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


def test_just_its_own_registers_count() -> None:
    at_fault = [r for r in range(80) if found(wgmma(56), write(r), EXIT)]
    assert at_fault == [*range(24, 32), *range(56, 60)]
    from_shared = Line("HGMMA.64x16x16.F16 R24, gdesc[UR4], R24, gsb0")
    assert [r for r in range(80) if found(from_shared, write(r), EXIT)] == [*range(24, 28)]


def test_a_wait_leaves_the_newest_groups_in_flight() -> None:
    groups = (wgmma(40), wgmma(44), wgmma(48))
    for left in range(4):
        at_fault = [r for r in (40, 44, 48) if found(*groups, wait(left), write(r), EXIT)]
        assert at_fault == [40, 44, 48][3 - left :]


def test_a_group_ends_as_a_whole() -> None:
    pair = (wgmma(40, last=False), wgmma(44))
    assert found(*pair, wgmma(48), wait(1), write(40), write(44), EXIT) == []
    assert found(*pair, wait(1), write(40), EXIT) == [(3, 0)]
    # A group that is still open is not waited for.
    assert found(wgmma(40, last=False), wait(0), write(40), EXIT) == [(2, 0)]


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


def test_one_path_without_a_wait_is_enough() -> None:
    assert found(wgmma(40), JUMP, wait(0), write(40, label=".L_x_1"), EXIT) == [(3, 0)]
    assert found(wgmma(40), JUMP, wait(1), wait(0, label=".L_x_1"), write(40), EXIT) == []
    # On one path the group is the newest one.
    assert found(wgmma(40), JUMP, wgmma(44), wait(1, label=".L_x_1"), write(40), EXIT) == [(4, 0)]
    assert found(wgmma(40), JUMP, wgmma(44), wait(1, label=".L_x_1"), write(36), EXIT) == []


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
