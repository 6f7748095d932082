"""Control flow of SASS: successors of instructions, data-flow analysis, and loops."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from typing import TypeVar

from .sass import Code, Step

_TARGET = re.compile(r"`\((?P<label>[^)]+)\)|\b0x(?P<address>[0-9a-fA-F]+)\s*$")
_JUMP_TABLE = re.compile(r"BRANCH_TARGETS\s+([^\"]+)")
_BARRIER = re.compile(r"\bB\d+\b")

State = TypeVar("State")


def successors(code: Code) -> list[tuple[int, ...]]:
    """Return, for each step, the indices of the steps that the same thread may issue next.

    The result may contain too many successors. The steps after all calls are successors of each return, and all labels
    are successors of each jump with an unknown target.
    """
    by_address = {step.address: index for index, step in enumerate(code.steps)}
    after_calls = [index + 1 for index, step in enumerate(code.steps) if step.mnemonic == "CALL"]
    joins: dict[str, set[int]] = {}
    for step in code.steps:
        if step.mnemonic == "BSSY" and (barrier := _BARRIER.search(step.operands)):
            joins.setdefault(barrier[0], set()).update(_targets(step, code, by_address))
    following: list[tuple[int, ...]] = []
    for index, step in enumerate(code.steps):
        after = set(_after(index, step, code, by_address, after_calls, joins))
        following.append(tuple(sorted(other for other in after if other < len(code.steps))))
    return following


def states_before(
    code: Code, nothing: State, after: Callable[[Step, State], State], merge: Callable[[State, State], State]
) -> list[State]:
    """Return the state before each step, computed by a forward data-flow analysis.

    ``nothing`` is the state at the beginning of the code and at unreachable steps. ``merge`` combines the states of two
    paths. ``nothing`` must be the neutral element of ``merge``, and repeated merging must converge.
    """
    following = successors(code)
    before = [nothing] * len(code.steps)
    reached = [False] * len(code.steps)
    queue = [0] if code.steps else []
    while queue:
        index = heappop(queue)
        state = after(code.steps[index], before[index])
        for other in following[index]:
            merged = merge(before[other], state)
            if not reached[other] or merged != before[other]:
                reached[other], before[other] = True, merged
                if other not in queue:
                    heappush(queue, other)
    return before


def _after(
    index: int,
    step: Step,
    code: Code,
    by_address: dict[int, int],
    after_calls: list[int],
    joins: dict[str, set[int]],
) -> Iterator[int]:
    guarded = bool(step.predicate)
    match step.mnemonic:
        case "EXIT":
            pass
        case "RET":
            yield from after_calls
        case "CALL":
            # A function that is not in this code returns to the next instruction.
            yield from _targets(step, code, by_address) or [index + 1]
        case "BRA" | "BRX" | "BRXU" | "JMP" | "JMX" | "JMXU":
            yield from _targets(step, code, by_address) or code.labels.values()
            # The operands of `BRA.U UP0, `(x)` and `BRA.DIV UR4, `(x)` include the condition.
            guarded = guarded or (step.mnemonic == "BRA" and "," in _TARGET.sub("", step.operands))
        case "WARPSYNC":
            yield from _targets(step, code, by_address)
            yield index + 1
        case "BSYNC":
            # Threads continue at the target of their BSSY. In ptxas's layout, this is the instruction after the BSYNC.
            barrier = _BARRIER.search(step.operands)
            named = joins.get(barrier[0], set()) if barrier else set()
            yield from {index + 1} if not named or index + 1 in named else named
        case _:
            yield index + 1
    if guarded:
        yield index + 1


def _targets(step: Step, code: Code, by_address: dict[int, int]) -> list[int]:
    """Return the targets in the operands: a label, a jump table's labels, an address, or nothing."""
    if table := _JUMP_TABLE.search(step.operands):
        return [code.labels[name] for name in re.split(r"[,\s]+", table[1].strip()) if name in code.labels]
    if match := _TARGET.search(step.operands):
        if match["label"]:
            return [code.labels[match["label"]]] if match["label"] in code.labels else []
        address = int(match["address"], 16)
        return [by_address[address]] if address in by_address else []
    return []


def natural_loops(code: Code) -> list[frozenset[int]]:
    """Return the natural loops as sets of step indices, in order of the first instruction, outer loops first.

    Loops with the same first instruction are merged.
    """
    following = successors(code)
    order, before = _reverse_postorder(following)
    dominator = _dominators(order, before)
    bodies: dict[int, set[int]] = {}
    for index in order:
        for header in following[index]:
            if _dominates(dominator, order, header, index):
                body = bodies.setdefault(header, {header})
                stack = [index]
                while stack:
                    if (step := stack.pop()) not in body:
                        body.add(step)
                        stack += before[step]
    return [frozenset(bodies[header]) for header in sorted(bodies, key=lambda header: (header, -len(bodies[header])))]


def _reverse_postorder(following: list[tuple[int, ...]]) -> tuple[dict[int, int], dict[int, list[int]]]:
    """Return the position of each reachable step in reverse postorder, and the steps before each step."""
    finished: list[int] = []
    before: dict[int, list[int]] = {0: []} if following else {}
    stack = [(0, iter(following[0]))] if following else []
    while stack:
        index, rest = stack[-1]
        for other in rest:
            is_new = other not in before
            before.setdefault(other, []).append(index)
            if is_new:
                stack.append((other, iter(following[other])))
                break
        else:
            finished.append(index)
            stack.pop()
    return {index: position for position, index in enumerate(reversed(finished))}, before


def _dominators(order: dict[int, int], before: dict[int, list[int]]) -> dict[int, int]:
    """Return the immediate dominator of each reachable step [Cooper, Harvey, Kennedy, 2001]."""
    dominator = {0: 0} if order else {}
    changed = True
    while changed:
        changed = False
        for index in order:
            known = [other for other in before[index] if other in dominator]
            if index == 0 or not known:
                continue
            nearest = known[0]
            for other in known[1:]:
                while nearest != other:
                    if order[nearest] > order[other]:
                        nearest = dominator[nearest]
                    else:
                        other = dominator[other]
            if dominator.get(index) != nearest:
                dominator[index], changed = nearest, True
    return dominator


def _dominates(dominator: dict[int, int], order: dict[int, int], header: int, index: int) -> bool:
    while order[index] > order[header]:
        index = dominator[index]
    return index == header
