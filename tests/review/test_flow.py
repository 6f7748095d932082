"""Encodings, control flow and the release check on small SASS written here; the check against a walk over all paths."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sass_program import Line, assemble, assembled

from cudatma.errors import ArgumentError
from cudatma.review.flow import natural_loops, successors
from cudatma.review.release_hazards import release_hazards
from cudatma.review.sass import parse_sass, without_encodings
from cudatma.review.tables import loops_of

#: As nvdisasm prints it: a kernel for sm_90a in which the arrival does not wait for the load before it.
NVDISASM = """
	.section	.text.k,"ax",@progbits
k:
.text.k:
        /*0000*/         LDSM.16.M88.4 R172, [R9+0x1800] ;                             /* 0x0018000009ac783b */
                                                                                       /* 0x000fe80000000200 */
        /*0010*/         LDS.128 R8, [R226+0xa600] ;                                   /* 0x00a60000e2087984 */
                                                                                       /* 0x000e220000000c00 */
.L_x_1:
        /*0020*/    @!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R220+URZ+0x15c28], RZ ;        /* 0x015c28ffdcff89a7 */
                                                                                       /* 0x0003e2000810003f */
        /*0030*/         SHF.R.U32.HI R12, RZ, 0x8, R8 ;                               /* 0x00000008ff0c7819 */
                                                                                       /* 0x001fe20000011608 */
        /*0040*/    @!P1 BRA `(.L_x_1) ;                                               /* 0xfffffff800609947 */
                                                                                       /* 0x004fea000383ffff */
        /*0050*/         EXIT ;                                                        /* 0x000000000000794d */
                                                                                       /* 0x000fea0003800000 */
"""


def found(*lines: Line) -> list[tuple[int, int]]:
    """(line of the arrival, line of the load) of each hazard."""
    return [(hazard.arrive // 16, hazard.load // 16) for hazard in release_hazards(assembled(*lines))]


def load(write: int = 7, *wait: int, guard: str = "") -> Line:
    return Line(f"{guard}LDS.128 R8, [R2]", write, wait)


ARRIVE = Line("@!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR5], RZ")
EXIT = Line("EXIT")


def use(*wait: int) -> Line:
    return Line("HADD2 R8, R8, R9", 7, wait)


def test_control_bits() -> None:
    (code,) = parse_sass(NVDISASM)
    assert code.function == "k"
    assert [(s.opcode, s.predicate, s.write_scoreboard, s.waits) for s in code.steps] == [
        ("LDSM.16.M88.4", "", None, 0),
        ("LDS.128", "", 0, 0),
        ("SYNCS.ARRIVE.TRANS64.A1T0", "!P0", None, 0),
        ("SHF.R.U32.HI", "", None, 0b1),
        ("BRA", "!P1", None, 0b100),
        ("EXIT", "", None, 0),
    ]
    assert successors(code) == [(1,), (2,), (3,), (4,), (2, 5), ()]
    hazards = release_hazards(code)
    assert [(h.function, h.arrive, h.load) for h in hazards] == [("k", 0x20, 0), ("k", 0x20, 0x10)]
    assert str(hazards[1]) == "SYNCS.ARRIVE.TRANS64.A1T0 at 0x20 does not wait for LDS.128 at 0x10"


WAIT = Line("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R9")
PRODUCT = Line("HGMMA.64x64x16.F32 R24, R8, gdesc[UR4], R24")


def test_reads_of_the_next_stage_are_of_another_slot() -> None:
    """Where a slot is given back amid the next stage's products; a read that was issued before the wait for that stage
    is of the slot, and so is any where no product follows."""

    def of_previous(*lines: Line) -> list[int]:
        hazards = release_hazards(assembled(*lines), releases_one_stage_late=True)
        return [hazard.load // 16 for hazard in hazards]

    amid = (WAIT, load(0), ARRIVE, use(0), PRODUCT, EXIT)
    assert found(*amid) == [(2, 1)]
    assert of_previous(*amid) == []
    assert of_previous(load(0), WAIT, load(1), ARRIVE, use(0, 1), PRODUCT, EXIT) == [0]
    assert of_previous(WAIT, load(0), ARRIVE, use(0), EXIT) == [1]
    assert of_previous(WAIT, load(0), ARRIVE, use(0), WAIT, PRODUCT, EXIT) == [1]
    assert of_previous(WAIT, load(0), ARRIVE, use(0), EXIT, PRODUCT, EXIT) == [1]


def test_text_for_readers_has_no_encodings() -> None:
    plain = without_encodings(NVDISASM)
    assert "/* 0x" not in plain
    assert len(plain.splitlines()) == len(NVDISASM.splitlines()) - 6
    with pytest.raises(ArgumentError, match="print-instruction-encoding"):
        parse_sass(plain)


def test_a_text_that_is_cut_off_is_refused() -> None:
    with pytest.raises(ArgumentError, match="truncated"):
        parse_sass(NVDISASM[: NVDISASM.rindex("/*")])
    assert parse_sass("") == ()


def test_jumps_by_address_as_cuobjdump_prints_them() -> None:
    lines = assemble(Line("@P0 BRA 0x20"), Line("NOP"), EXIT).splitlines()[2:]
    (code,) = parse_sass("\t\tFunction : k\n" + "\n".join(lines))
    assert (code.function, successors(code)) == ("k", [(1, 2), (2,), ()])


@pytest.mark.parametrize(
    ("jump", "following"),
    [
        ("BRA `(.L_x_1)", (3,)),
        ("@P0 BRA `(.L_x_1)", (1, 3)),
        ("BRA.U !UP0, `(.L_x_1)", (1, 3)),
        ("BRA.DIV UR4, `(.L_x_1)", (1, 3)),
        ("@P0 BRA.U.ANY `(.L_x_1)", (1, 3)),
        ("WARPSYNC.COLLECTIVE R8, `(.L_x_1)", (1, 3)),
        ("CALL.REL.NOINC `(.L_x_1)", (3,)),
        ("CALL.ABS.NOINC R2", (1,)),
        ("BSSY B0, `(.L_x_1)", (1,)),
        ('BRX R2 -0x340 (*"BRANCH_TARGETS .L_x_1,.L_x_2"*)', (2, 3)),
        ("BRX R2 -0x340", (0, 2, 3)),
        ("@P0 EXIT", (1,)),
        ("@P0 BREAK B0", (1,)),
        ("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R9", (1,)),
    ],
)
def test_what_follows_a_jump(jump: str, following: tuple[int, ...]) -> None:
    lines = (Line(jump), Line("NOP"), Line("NOP", label=".L_x_2"), Line("EXIT", label=".L_x_1"))
    code = assembled(*lines)
    assert successors(code)[0] == following


def test_threads_meet_where_their_bssy_said() -> None:
    inner = (Line("BSSY B0, `(.L_x_1)"), Line("@P0 BRA `(.L_x_1)"), Line("BSYNC B0"))
    code = assembled(*inner, Line("EXIT", label=".L_x_1"))
    assert successors(code)[2] == (3,)
    code = assembled(*inner, Line("NOP"), Line("EXIT", label=".L_x_1"))
    assert successors(code)[2] == (4,)


def test_a_return_goes_after_every_call() -> None:
    program = (Line("CALL.REL.NOINC `(f)"), Line("CALL.REL.NOINC `(f)"), EXIT, Line("RET.REL.NODEC R4 `(k)", label="f"))
    code = assembled(*program)
    assert successors(code) == [(3,), (3,), (), (1, 2)]


def test_depbar_waits_for_what_it_lists() -> None:
    assert found(load(0), Line("DEPBAR.LE SB0, 0x0"), ARRIVE, EXIT) == []
    assert found(load(0), Line("DEPBAR.LE SB0, 0x1"), ARRIVE, EXIT) == [(2, 0)]
    assert found(load(0), load(3), Line("DEPBAR.LE SB5, 0x1, {3,2}"), ARRIVE, EXIT) == []


def in_flight_on_paths(program: Sequence[Line]) -> set[tuple[int, int]]:
    """Walks each path of a program without backward jumps, with the queue of reads that a warp would have."""
    hazards: set[tuple[int, int]] = set()

    def walk(index: int, queue: list[tuple[int, int]]) -> None:
        line = program[index]
        ended = max((i for i, (_, scoreboard) in enumerate(queue) if scoreboard in line.wait), default=-1)
        queue = queue[ended + 1 :]
        if "ARRIVE" in line.text:
            hazards.update((index, read) for read, _ in queue)
        if "LDS" in line.text:
            queue = [*queue, (index, line.write)]
        if "BRA" in line.text:
            walk(int(line.text.split("_")[-1].rstrip(")")), queue)
        if line.text != "EXIT":
            walk(index + 1, queue)

    walk(0, [])
    return hazards


SCOREBOARD = st.integers(0, 5)
WAITS = st.lists(SCOREBOARD, max_size=2).map(tuple)
STRAIGHT = st.one_of(
    st.builds(Line, st.just("LDS.64 R8, [R2]"), st.sampled_from([0, 1, 2, 7]), WAITS),
    st.builds(Line, st.just("LDSM.16.M88.4 R8, [R2]"), st.sampled_from([0, 3, 4, 5]), WAITS),
    st.builds(Line, st.just("IMAD R8, R8, R9, R10"), st.just(7), WAITS),
    st.builds(Line, st.just(ARRIVE.text), st.just(7), WAITS),
)


@given(st.lists(STRAIGHT, max_size=20))
def test_straight_code_is_judged_exactly(lines: list[Line]) -> None:
    program = [*lines, EXIT]
    assert set(found(*program)) == in_flight_on_paths(program)


@given(st.lists(STRAIGHT, min_size=2, max_size=12), st.data())
def test_no_path_is_overlooked(lines: list[Line], data: st.DataObject) -> None:
    program = [Line(line.text, line.write, line.wait, f".L_x_{i}") for i, line in enumerate([*lines, EXIT])]
    for at in data.draw(st.sets(st.integers(0, len(lines) - 1), max_size=3)):
        target = data.draw(st.integers(at + 1, len(lines)))
        program[at] = Line(f"@P0 BRA `(.L_x_{target})", 7, program[at].wait, f".L_x_{at}")
    assert set(found(*program)) >= in_flight_on_paths(program)


def test_reads_end_in_order() -> None:
    assert found(load(), load(1), use(1), ARRIVE, EXIT) == []
    assert found(load(1), load(), use(1), ARRIVE, EXIT) == [(3, 1)]
    assert found(load(0), load(1), use(0), ARRIVE, EXIT) == [(3, 1)]
    # The second read may not run; what it says then says nothing about the first.
    assert found(load(0), load(1, guard="@P0 "), use(1), ARRIVE, EXIT) == [(3, 0)]


def test_loops_and_what_they_wait_for() -> None:
    code = assembled(
        Line("LDC R1, c[0x0][0x28]", 0),
        Line("IADD3 R2, R2, R1, RZ", 7, (0,), ".L_x_0"),  # outer loop
        Line("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R9", 1),
        Line("@!P0 BRA `(.L_x_3)", 7, (1,)),  # the wait is repeated behind the loops
        Line("LDS R3, [R2]", 2, label=".L_x_2"),
        Line("LDG.E R4, desc[UR4][R2.64]", 3),
        Line("FADD R5, R3, R4", 7, (2, 3)),
        Line("@P1 BRA `(.L_x_2)"),
        Line("@P2 BRA `(.L_x_0)"),
        Line("EXIT"),
        Line("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R9", 1, label=".L_x_3"),
        Line("@!P0 BRA `(.L_x_3)", 7, (1,)),
        Line("BRA `(.L_x_2)"),
    )
    outer, inner, spin = loops_of(code)
    assert (outer.first, outer.last, outer.depth, outer.instructions) == (0x10, 0xC0, 0, 11)
    assert outer.waits == {"mbarrier": 2, "LDC": 1}, "the inner loop's waits are its own"
    assert (inner.first, inner.last, inner.depth, inner.classes) == (0x40, 0x70, 1, {"shared": 1, "global": 1})
    assert inner.waits == {"LDG": 1, "LDS": 1}
    assert (spin.first, spin.last, spin.is_spin, spin.waits) == (0xA0, 0xB0, True, {"mbarrier": 1})


@given(st.lists(st.tuples(st.integers(0, 11), st.booleans()), min_size=2, max_size=12))
def test_each_natural_loop_is_entered_at_its_header_only(jumps: list[tuple[int, bool]]) -> None:
    last = len(jumps)
    lines = [
        Line(f"{'@P0 ' if guarded else ''}BRA `(.L_x_{target % (last + 1)})", label=f".L_x_{index}")
        for index, (target, guarded) in enumerate(jumps)
    ]
    code = assembled(*lines, Line("EXIT", label=f".L_x_{last}"))
    following = successors(code)
    for body in natural_loops(code):
        entered, reached, queue = {0} & body, {0} - body, [*({0} - body)]
        while queue:
            new = set(following[queue.pop()])
            entered |= new & body
            queue += new - reached - body
            reached |= new - body
        assert len(entered) == 1
