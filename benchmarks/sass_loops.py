"""Loops in SASS: dominators, natural loops, and what they hold. Pure functions of a disassembly.

ptxas puts the slow path of a wait after the end of a kernel; address ranges do not separate loops, but the control
flow graph of tools/sass_flow.py does. Source: CUDA Binary Utilities, "Instruction Set Reference".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tools.sass_flow import Step, parse_encoded, successors

#: Integer work, which is what addresses cost: on registers and, with a U before it, on uniform registers.
INTEGER = frozenset(
    ("IMAD", "IADD", "IADD3", "LEA", "LOP3", "SHF", "PRMT", "ISETP", "IMNMX", "VIADD", "VIMNMX", "SEL", "BMSK", "SGXT")
)


def is_integer(step: Step) -> bool:
    """Whether an instruction computes integers."""
    return step.mnemonic in INTEGER or (step.mnemonic.startswith("U") and step.mnemonic[1:] in INTEGER)


@dataclass(frozen=True, slots=True)
class Loop:
    """A natural loop: the address of its header, and its instructions in order, those of inner loops included."""

    header: int
    steps: tuple[Step, ...]

    @property
    def counts(self) -> Counter[str]:
        return Counter(step.mnemonic for step in self.steps)

    @property
    def integer(self) -> int:
        return sum(map(is_integer, self.steps))

    def contains(self, other: Loop) -> bool:
        return {step.address for step in other.steps} < {step.address for step in self.steps}


def _dominators(following: Sequence[Sequence[int]]) -> list[int | None]:
    """The immediate dominator of each instruction (None where nothing leads), after Cooper, Harvey and Kennedy."""
    order, seen, stack = [], {0}, [(0, iter(following[0]))]
    while stack:
        node, rest = stack[-1]
        for after in rest:
            if after not in seen:
                seen.add(after)
                stack.append((after, iter(following[after])))
                break
        else:
            order.append(node)
            stack.pop()
    order.reverse()
    rank = {node: position for position, node in enumerate(order)}
    before: dict[int, list[int]] = {node: [] for node in order}
    for node in order:
        for after in following[node]:
            before[after].append(node)
    dominator: list[int | None] = [None] * len(following)
    dominator[0] = 0

    def meet(a: int, b: int) -> int:
        while a != b:
            while rank[a] > rank[b]:
                a = dominator[a] or 0
            while rank[b] > rank[a]:
                b = dominator[b] or 0
        return a

    changed = True
    while changed:
        changed = False
        for node in order[1:]:
            known = [each for each in before[node] if dominator[each] is not None]
            new = known[0]
            for each in known[1:]:
                new = meet(new, each)
            if dominator[node] != new:
                dominator[node], changed = new, True
    return dominator


def _dominates(above: int, below: int, dominator: Sequence[int | None]) -> bool:
    while below != above:
        parent = dominator[below]
        if parent is None or parent == below:
            return False
        below = parent
    return True


def natural_loops(text: str) -> list[Loop]:
    """The natural loops of a disassembled kernel (the first in the text), largest first; NOPs are left out. Loops with
    one header are one loop. Raises ArgumentError for a disassembly without encodings."""
    codes = [code for code in parse_encoded(text) if code.steps]
    if not codes:
        return []
    steps, following = codes[0].steps, successors(codes[0])
    before: list[list[int]] = [[] for _ in steps]
    for index, after in enumerate(following):
        for each in after:
            before[each].append(index)
    dominator = _dominators(following)
    bodies: dict[int, set[int]] = {}
    for tail, after in enumerate(following):
        for header in after:
            if dominator[tail] is not None and _dominates(header, tail, dominator):
                bodies.setdefault(header, {header}).update(_body(header, tail, before))
    loops = [
        Loop(steps[header].address, tuple(steps[i] for i in sorted(body) if steps[i].mnemonic != "NOP"))
        for header, body in bodies.items()
    ]
    return sorted(loops, key=lambda loop: -len(loop.steps))


def _body(header: int, tail: int, before: Sequence[Iterable[int]]) -> set[int]:
    """What reaches the back edge tail -> header without passing the header."""
    body, stack = {header}, [tail]
    while stack:
        node = stack.pop()
        if node not in body:
            body.add(node)
            stack.extend(before[node])
    return body
