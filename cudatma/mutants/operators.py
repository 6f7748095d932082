"""Operators, each of which removes a synchronization instruction or changes its operands or its memory order.

Each operator lists the hazards that the change should cause. Source: PTX ISA, "mbarrier", "Async proxy", "bar,
barrier", "wgmma.fence", "Memory Consistency Model".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from cudatma.mutants.mutant import EARLY_READ, HANG, RACE, REFILL, Mutant
from cudatma.mutants.ptx_text import Site, sites_of

#: Hazards of a missing barrier.
_UNORDERED = RACE | EARLY_READ | REFILL | {"missing_proxy_fence", "missing_init_sync"}
_UNORDERED |= {"store_source_reused", "read_before_store"}
#: Hazards of a bulk store that is not waited for in time.
_LATE_STORE = frozenset({"store_source_reused", "exit_with_pending_store", "read_before_store", "write_race"})
_TX_STEP = 16

#: Maps each operator to its description.
OPERATORS: dict[str, str] = {
    "drop_fence": "a fence (mbarrier_init, proxy, acq_rel, membar, wgmma) is removed",
    "drop_init": "an mbarrier.init is removed",
    "drop_arrive": "an arrive on an mbarrier, named barrier or cluster barrier is removed",
    "repeat_arrive": "an arrive on an mbarrier is executed twice",
    "drop_expect": "an arrive.expect_tx arrives without expecting bytes, or an expect_tx is removed",
    "drop_wait": "a wait on an mbarrier or cluster barrier returns immediately",
    "drop_barrier": "a bar.sync is removed",
    "drop_warp_sync": "a bar.warp.sync is removed",
    "drop_commit": "a commit_group (bulk, cp.async, wgmma) is removed",
    "drop_group_wait": "a wait_group (bulk, cp.async, wgmma) is removed",
    "drop_dependency_wait": "a griddepcontrol.wait is removed",
    "weaken_group_wait": "a wait_group leaves one more group pending",
    "relax": "an arrive, wait, flag store or flag load loses its release or acquire semantics",
    "flip_parity": "a wait uses the other parity",
    "expect_less": "an expect_tx expects 16 bytes too few",
    "expect_more": "an expect_tx expects 16 bytes too many",
    "count_less": "an mbarrier is initialized with one arrival too few",
    "count_more": "an mbarrier is initialized with one arrival too many",
    "stages_less": "a ring wraps one slot early on one side",
    "stages_more": "a ring wraps one slot late on one side",
    "other_barrier": "a wait uses the mbarrier 8 bytes after its own",
    "barrier_count": "a named barrier expects one more warp",
    "multicast_mask": "a multicast reaches only the first CTA",
    "wgmma_swizzle": "a wgmma descriptor has another swizzle mode",
    "move_base": "a shared array starts at a misaligned address",
    "map_swizzle": "a tensor map has another swizzle mode",
    "map_box": "a tensor map's box is one row shorter or longer",
    "map_base": "a tensor map's address is not a multiple of 16",
    "less_shared": "the launch requests less shared memory",
}


def mutants_of(ptx: str) -> list[Mutant]:
    """Return all mutants that change the text of a PTX module, in the order of the text.

    ``mutants_of_call`` returns the mutants that change the launch. Raises PtxError if the PTX is invalid.
    """
    sites = sites_of(ptx)
    mutants = [
        _mutant(operator, site, replacement, expected)
        for site in sites
        for operator, replacement, expected in _changes(site)
    ]
    return sorted([*mutants, *_ring_wraps(sites)], key=lambda mutant: (mutant.edits[0][0], mutant.operator))


def _mutant(operator: str, site: Site, replacement: str, expected: frozenset[str]) -> Mutant:
    text = " ".join(site.instruction.text.split())
    return Mutant(
        operator,
        site.line,
        text,
        f"{OPERATORS[operator]}: `{text}`",
        expected,
        site.function.name,
        site.at,
        ((site.start, site.end, replacement),),
    )


Change = tuple[str, str, frozenset[str]]


def _changes(site: Site) -> Iterator[Change]:
    """Yield the operator, new text and hazard kinds of each mutant of an instruction."""
    make = _BY_ROOT.get(site.parts[0])
    if make is not None:
        yield from make(site)


def _fence(site: Site) -> Iterator[Change]:
    kind = site.opcode.partition(".")[2]
    if kind.startswith("mbarrier_init"):
        expected = frozenset({"missing_init_fence"})
    elif kind.startswith("proxy.async"):
        expected = frozenset({"missing_proxy_fence", "missing_init_fence"})
    elif kind.startswith("proxy.tensormap"):
        expected = frozenset({"tensor_map_fence"})
    else:
        expected = RACE | REFILL
    yield "drop_fence", "", expected


def _mbarrier(site: Site) -> Iterator[Change]:
    form, operands = site.parts[1], site.operands
    if form == "init":
        yield "drop_init", "", frozenset({"barrier_uninitialized"})
        for step, name in ((-1, "count_less"), (1, "count_more")):
            expected = HANG if step > 0 else _UNORDERED | {"arrival_overflow", "deadlock", "trap"}
            yield name, _moved(site, 1, step), expected
    elif form in ("arrive", "arrive_drop"):
        yield "drop_arrive", "", HANG
        if "expect_tx" in site.parts:
            # Only the copies need the order of the release, and complete_tx also orders them.
            plain = site.opcode.replace(".expect_tx", "")
            yield "drop_expect", site.spelled(operands[:-1], plain), HANG | EARLY_READ
            yield from _bytes(site)
        else:
            # If the arrival is the last of its phase, the next phase completes early. Otherwise, the second arrival
            # exceeds the count of this phase.
            yield "repeat_arrive", site.spelled(operands) * 2, _UNORDERED | HANG | {"arrival_overflow"}
            if "relaxed" not in site.parts:
                published = EARLY_READ | REFILL | RACE | {"missing_proxy_fence"}
                yield "relax", site.spelled(operands, _relaxed(site)), published
    elif form == "expect_tx":
        yield "drop_expect", "", HANG | EARLY_READ
        yield from _bytes(site)
    elif form in ("try_wait", "test_wait"):
        moved = site.spelled((operands[0], f"{operands[1][:-1]}+8]", *operands[2:]))
        yield "other_barrier", moved, _UNORDERED | HANG | {"arrival_overflow", "barrier_uninitialized", "out_of_bounds"}
        passes = f"{site.guard}setp.eq.u32 {operands[0]}, 0, 0;"
        yield "drop_wait", passes, _UNORDERED | {"arrival_overflow", "block_gone", "barrier_uninitialized"}
        if "relaxed" not in site.parts:
            yield "relax", site.spelled(operands, _relaxed(site)), _UNORDERED
        if "parity" in site.parts:
            yield "flip_parity", _with(site, 2, "xor", 1), _UNORDERED | HANG | {"arrival_overflow"}


def _relaxed(site: Site) -> str:
    """Return the opcode with .relaxed and a scope instead of release or acquire."""
    parts = [part for part in site.parts if part not in ("release", "acquire")]
    scoped = any(part in ("cta", "cluster") for part in parts)
    place = next(i for i, part in enumerate(parts) if part.startswith(("shared", "b64", "cta", "cluster")))
    return ".".join([*parts[:place], "relaxed", *([] if scoped else ["cta"]), *parts[place:]])


def _bytes(site: Site) -> Iterator[Change]:
    last = len(site.operands) - 1
    # A CTA that receives no data expects 0 bytes. The reduced number then wraps around and traps.
    yield "expect_less", _moved(site, last, -_TX_STEP), frozenset({"byte_count", "trap"})
    yield "expect_more", _moved(site, last, _TX_STEP), frozenset({"byte_count"})


def _moved(site: Site, position: int, step: int) -> str:
    return _with(site, position, "add", step)


def _with(site: Site, position: int, operation: str, value: int) -> str:
    """Return the statement with an operand replaced by ``operand operation value``."""
    operand = site.operands[position]
    if re.fullmatch(r"-?\d+", operand):
        number = int(operand) + value if operation == "add" else int(operand) ^ value
        return site.spelled((*site.operands[:position], str(number), *site.operands[position + 1 :]))
    kind = "b32" if operation == "xor" else "s32"
    statement = site.spelled((*site.operands[:position], "%mutant", *site.operands[position + 1 :]))
    return f"{{ .reg .b32 %mutant; {operation}.{kind} %mutant, {operand}, {value}; {statement} }}"


def _barrier(site: Site) -> Iterator[Change]:
    parts = set(site.parts)
    if "warp" in parts:
        yield "drop_warp_sync", "", _UNORDERED | {"divergent_warp"}
    elif "cluster" in parts:
        gone = frozenset({"block_gone", "barrier_uninitialized", "arrival_overflow"})
        yield ("drop_wait" if "wait" in parts else "drop_arrive"), "", _UNORDERED | gone | {"deadlock", "trap"}
    elif "arrive" in parts:
        yield "drop_arrive", "", frozenset({"deadlock"})
    else:
        # divergent_warp and register_pool occur if setmaxnregs depends on the barrier.
        unset = {"uninitialized_shared", "barrier_uninitialized"}
        yield "drop_barrier", "", _UNORDERED | unset | {"deadlock", "divergent_warp", "register_pool"}
        if len(site.operands) == 2 and "sync" in parts:
            yield "barrier_count", _moved(site, 1, 32), frozenset({"deadlock", "barrier_count"})


def _copy(site: Site) -> Iterator[Change]:
    parts = set(site.parts)
    bulk = "bulk" in parts
    if "commit_group" in parts:
        # Uncommitted operations join the next group, if there is one. The wait then covers them too late.
        yield "drop_commit", "", _LATE_STORE | {"uncommitted_group"} if bulk else EARLY_READ
    elif "wait_group" in parts or "wait_all" in parts:
        expected = (_LATE_STORE if bulk else EARLY_READ) | REFILL | RACE
        yield "drop_group_wait", "", expected
        if site.operands:
            yield "weaken_group_wait", _moved(site, 0, 1), expected
    elif "mbarrier" in parts and "arrive" in parts:
        yield "drop_arrive", "", HANG
    elif "multicast::cluster" in parts:
        place = len(site.operands) - 1 - ("L2::cache_hint" in parts)
        yield "multicast_mask", _first_block_only(site, place), HANG


def _first_block_only(site: Site, place: int) -> str:
    statement = site.spelled((*site.operands[:place], "%mutant", *site.operands[place + 1 :]))
    return f"{{ .reg .b16 %mutant; and.b16 %mutant, {site.operands[place]}, 1; {statement} }}"


def _wgmma(site: Site) -> Iterator[Change]:
    form = site.parts[1]
    if form == "fence":
        yield "drop_fence", "", frozenset({"wgmma_missing_fence"})
    elif form == "commit_group":
        yield "drop_commit", "", frozenset({"wgmma_uncommitted", "wgmma_registers", "overwritten_while_read"})
    elif form == "wait_group":
        expected = frozenset({"wgmma_registers"}) | REFILL
        yield "drop_group_wait", "", expected
        if site.operands == ("0",):
            yield "weaken_group_wait", _moved(site, 0, 1), expected
    elif form == "mma_async":
        operand = site.operands[2]
        turned = site.spelled((*site.operands[:2], "%mutant", *site.operands[3:]))
        text = f"{{ .reg .b64 %mutant; xor.b64 %mutant, {operand}, 0x4000000000000000; {turned} }}"
        yield "wgmma_swizzle", text, frozenset({"swizzle_mismatch", "out_of_bounds"})


def _dependency(site: Site) -> Iterator[Change]:
    if site.parts[1] == "wait":
        yield "drop_dependency_wait", "", frozenset({"grid_dependency"})


def _ordered(site: Site) -> Iterator[Change]:
    """Yield mutants of a flag access to global or shared memory: ld.acquire, st.release, and ordered atom and red."""
    orders = [part for part in site.parts if part in ("acquire", "release", "acq_rel")]
    if orders:
        opcode = ".".join("relaxed" if part in orders else part for part in site.parts)
        yield "relax", site.spelled(site.operands, opcode), RACE | REFILL


def _tensor_map(site: Site) -> Iterator[Change]:
    """Yield a mutant without tensormap.cp_fenceproxy, which copies and publishes a tensor map."""
    if site.parts[1] == "cp_fenceproxy":
        yield "drop_fence", "", frozenset({"tensor_map_fence", "out_of_bounds", "trap"})


_BY_ROOT: dict[str, Callable[[Site], Iterator[Change]]] = {
    "fence": _fence,
    "membar": _fence,
    "mbarrier": _mbarrier,
    "bar": _barrier,
    "barrier": _barrier,
    "cp": _copy,
    "wgmma": _wgmma,
    "griddepcontrol": _dependency,
    "ld": _ordered,
    "st": _ordered,
    "atom": _ordered,
    "red": _ordered,
    "tensormap": _tensor_map,
}


def _ring_wraps(sites: list[Site]) -> Iterator[Mutant]:
    """Yield mutants of ``stage + 1 == STAGES ? 0 : stage + 1``, which compiles to setp with a constant and selp."""
    expected = _UNORDERED | HANG | {"arrival_overflow", "out_of_bounds", "barrier_uninitialized", "barrier_misaligned"}
    for place, site in enumerate(sites):
        if site.parts[0] != "setp" or len(site.operands) != 3 or not site.operands[2].isdigit():
            continue
        predicate, counter, limit = site.operands
        near = [later.operands for later in sites[place + 1 : place + 6] if later.parts[0] == "selp"]
        wraps = any(operands[3:] == (predicate,) and {"0", counter} == set(operands[1:3]) for operands in near)
        if wraps and int(limit) > 1:
            for operator, step in (("stages_less", -1), ("stages_more", 1)):
                text = site.spelled((predicate, counter, str(int(limit) + step)))
                yield _mutant(operator, site, text, expected)
