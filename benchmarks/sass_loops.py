"""Loops in SASS: basic blocks, dominators, natural loops, and what stands in them. Pure functions of a disassembly.

ptxas puts the slow path of a wait behind the end of a kernel, so address ranges do not tell loops apart; the control
flow graph does. Source: CUDA Binary Utilities, "Instruction Set Reference".
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_LINE = re.compile(
    r"^\s*/\*(?P<address>[0-9a-f]{4,})\*/\s+\{?\s*(?:@(?P<predicate>!?U?P\w+)\s+)?(?P<opcode>[A-Z][\w.]*)(?P<rest>[^;]*);"
)
_LABEL = re.compile(r"^\s*(\.L_x?_?\d+):")
_TARGET = re.compile(r"`\((?P<label>\.L[\w]*)\)|(?P<address>0x[0-9a-f]+)\s*$")
_CONVERGENCE = re.compile(r"\bB\d+\b")

#: Integer work, which is what addresses cost: on registers and on uniform registers.
INTEGER = frozenset(
    ("IMAD", "IADD", "IADD3", "LEA", "LOP3", "SHF", "PRMT", "ISETP", "IMNMX", "VIADD", "VIMNMX", "SEL", "BMSK", "SGXT")
)


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction: address in bytes, guard predicate ("" if none), opcode, operands."""

    address: int
    predicate: str
    opcode: str
    operands: str

    @property
    def mnemonic(self) -> str:
        return self.opcode.partition(".")[0]

    @property
    def is_integer(self) -> bool:
        return self.mnemonic in INTEGER or (self.mnemonic.startswith("U") and self.mnemonic[1:] in INTEGER)


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
        return sum(step.is_integer for step in self.steps)

    def contains(self, other: Loop) -> bool:
        return self is not other and {s.address for s in other.steps} < {s.address for s in self.steps}


def parse(text: str) -> tuple[list[Step], dict[str, int]]:
    """The instructions of one kernel (NOPs included) and the address of each label, from nvdisasm or cuobjdump."""
    steps: list[Step] = []
    labels: dict[str, int] = {}
    waiting: list[str] = []
    for line in text.splitlines():
        if label := _LABEL.match(line):
            waiting.append(label[1])
        elif part := _LINE.match(line):
            address = int(part["address"], 16)
            labels.update(dict.fromkeys(waiting, address))
            waiting.clear()
            steps.append(Step(address, part["predicate"] or "", part["opcode"], part["rest"].strip()))
    return steps, labels


def _target(step: Step, labels: dict[str, int]) -> int | None:
    found = _TARGET.search(step.operands)
    if found is None:
        return None
    return labels.get(found["label"]) if found["label"] else int(found["address"], 16)


def successors(steps: Sequence[Step], labels: dict[str, int]) -> list[list[int]]:
    """For each instruction the indices of those that may follow it.

    BSYNC goes to where the nearest BSSY before it with the same convergence register said.
    """
    index_of = {step.address: index for index, step in enumerate(steps)}
    meeting: dict[str, int] = {}
    found = []
    for index, step in enumerate(steps):
        following = [index + 1] if index + 1 < len(steps) else []
        target = _target(step, labels)
        register = _CONVERGENCE.search(step.operands)
        if step.mnemonic == "BSSY" and register and target is not None:
            meeting[register[0]] = target
        elif step.mnemonic == "BRA" and target is not None:
            # BRA.DIV and a branch on a predicate may also fall through.
            conditional = bool(step.predicate) or step.opcode.startswith("BRA.DIV") or step.operands.count(",") > 0
            following = ([*following] if conditional else []) + [index_of[target]]
        elif step.mnemonic == "BSYNC" and register and register[0] in meeting:
            following = [index_of[meeting[register[0]]]]
        elif step.mnemonic in ("EXIT", "RET", "BRX", "JMX") and not step.predicate:
            following = []
        found.append(following)
    return found


def _dominators(following: Sequence[Sequence[int]]) -> list[int | None]:
    """The immediate dominator of each instruction (None where nothing leads), by Cooper, Harvey and Kennedy's way."""
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
    """All natural loops of a kernel, outer ones first; NOPs are left out. Loops with one header are one loop."""
    steps, labels = parse(text)
    if not steps:
        return []
    following = successors(steps, labels)
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
