"""Control flow of a function: segments, reconvergence points, and the registers that are live across segments.

A segment is a sequence of instructions that a warp executes without interacting with other warps. An instruction that
may block or that interacts with other warps forms its own segment. Lanes reconverge at immediate post-dominators.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from cudatma.emulator.errors import PtxError
from cudatma.emulator.ptx.model import MEMBERS, Function, Imm, Instruction, Mem, Not, Operand, Pair, Part, Reg, Sym, Vec

#: Maximum number of instructions in a segment. Longer sequences are divided to limit the duration of a step.
MAX_SEGMENT = 256
_ALONE = {
    "bar",
    "barrier",
    "mbarrier",
    "cp",
    "wgmma",
    "fence",
    "membar",
    "call",
    "nanosleep",
    "griddepcontrol",
    "setmaxnreg",
    "tensormap",
    "trap",
    "brkpt",
    "elect",
    "atom",
    "red",
    "multimem",
    "st.async",
    "red.async",
    "clusterlaunchcontrol",
}
_ENDS = {"bra", "brx", "ret", "exit", "trap"}
#: Opcodes with a member mask, and bar, which behaves as .aligned even without the modifier.
_COLLECTIVE = {*MEMBERS, "bar"}
#: Opcodes whose first operand is not a destination.
_NO_DESTINATION = {
    "st",
    "red",
    "bar",
    "barrier",
    "fence",
    "membar",
    "cp",
    "bra",
    "brx",
    "ret",
    "exit",
    "trap",
    "brkpt",
    "prefetch",
    "prefetchu",
    "call",
    "nanosleep",
    "griddepcontrol",
    "setmaxnreg",
    "tensormap",
    "stmatrix",
    "stackrestore",
    "pmevent",
    "applypriority",
    "discard",
    "multimem",
    "clusterlaunchcontrol",
}


def registers_of(operand: Operand) -> tuple[int, ...]:
    """Return the indices of all registers in an operand."""
    if isinstance(operand, Reg):
        return (operand.index,)
    if isinstance(operand, Imm | Sym):
        return ()
    if isinstance(operand, Mem):
        inner: tuple[Operand, ...] = (operand.base, *operand.extra)
    elif isinstance(operand, Vec):
        inner = operand.items
    elif isinstance(operand, Pair):
        inner = (operand.first, operand.second)
    elif isinstance(operand, Not | Part):
        inner = (operand.reg,)
    else:
        return ()
    return tuple(register for part in inner for register in registers_of(part))


def bit_set(registers: Iterable[int]) -> int:
    result = 0
    for register in registers:
        result |= 1 << register
    return result


def destinations(instruction: Instruction) -> tuple[list[int], list[int]]:
    """Return the registers that an instruction writes and reads. The guard counts as read."""
    parts, operands = instruction.parts, instruction.operands
    written: list[int] = []
    read: list[int] = [instruction.guard[0]] if instruction.guard else []
    has_destination = parts[0] not in _NO_DESTINATION
    if parts[0] == "mbarrier":
        has_destination = bool(operands) and not isinstance(operands[0], Mem)
    if parts[0] in ("bar", "barrier"):
        has_destination = "red" in parts
    if parts[0] == "clusterlaunchcontrol":
        has_destination = parts[1] == "query_cancel"
    if parts[0] == "multimem":
        has_destination = parts[1] == "ld_reduce"
    for position, operand in enumerate(operands):
        if position == 0 and has_destination and not isinstance(operand, Mem):
            written.extend(registers_of(operand))
            if parts[:2] == ("wgmma", "mma_async"):
                read.extend(registers_of(operand))
        else:
            read.extend(registers_of(operand))
    return written, read


@dataclass(slots=True)
class Segment:
    """The instructions ``start..stop`` of a function's body.

    ``next`` lists the successors, where -1 is the end of the function. ``reconverge`` is the segment at which lanes
    that diverge at the end of this segment reconverge. ``live_in``, ``live_out`` and ``touched`` are bit sets of
    registers.
    """

    index: int
    start: int
    stop: int
    next: list[int] = field(default_factory=list)
    reconverge: int = -1
    live_in: int = 0
    live_out: int = 0
    touched: int = 0


class Flow:
    """The segments of a function. ``crossing`` is the bit set of the registers that are live across segments."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.has_shuffles = any(instruction.parts[0] == "shfl" for instruction in function.body)
        #: The (written, read) registers of each instruction.
        self.accesses = [destinations(instruction) for instruction in function.body]
        self.segments: list[Segment] = []
        self._cut()
        self._connect()
        self._post_dominators()
        self.crossing = 0
        self._liveness()

    def _cut(self) -> None:
        body, function = self.function.body, self.function
        starts = {0, *function.labels.values()}
        joined = False
        for index, instruction in enumerate(body):
            root = instruction.parts[0]
            joined = joined and index not in starts
            # Diverged lanes wait for each other at the start of a segment. Every instruction with a member mask starts
            # a segment because its lanes may synchronize with lanes at another instruction. In a sequence of
            # whole-warp instructions, only the first must start a segment.
            is_collective = root in _COLLECTIVE or "aligned" in instruction.parts
            members = instruction.members if is_collective else None
            if members is not None:
                starts.add(index)
                joined = instruction.names_all
                if not isinstance(members, Imm):
                    # Lanes with different masks diverge here and reconverge after the instruction.
                    starts.add(index + 1)
            elif is_collective and instruction.guard is None and instruction.is_whole_warp and not joined:
                starts.add(index)
                joined = True
            if root in _ENDS:
                starts.add(index + 1)
            elif root in _ALONE or (root in ("st", "red") and "async" in instruction.parts):
                starts.update((index, index + 1))
        points = sorted(s for s in starts if s <= len(body))
        for start, stop in zip(points, [*points[1:], len(body)], strict=True):
            for cut in range(start, max(stop, start + 1), MAX_SEGMENT):
                end = min(cut + MAX_SEGMENT, stop)
                if end > cut or start == len(body):
                    self.segments.append(Segment(len(self.segments), cut, end))
        if not self.segments or self.segments[-1].stop > self.segments[-1].start:
            self.segments.append(Segment(len(self.segments), len(body), len(body)))
        self.at_start = {segment.start: segment.index for segment in self.segments}

    def target(self, name: str, instruction: Instruction) -> int:
        """Return the index of the segment that starts at a label."""
        if name not in self.function.labels:
            raise PtxError(f"label `{name}` is not declared", instruction.line, text=instruction.text)
        return self.at_start[self.function.labels[name]]

    def _connect(self) -> None:
        body = self.function.body
        for segment in self.segments:
            if segment.start == segment.stop:
                segment.next = [-1]
                continue
            last = body[segment.stop - 1]
            root = last.parts[0]
            following = segment.index + 1
            if root == "bra":
                label = last.operands[0] if last.operands else None
                if not isinstance(label, Sym):
                    raise PtxError("the branch has no label", last.line, text=last.text)
                segment.next = [self.target(label.name, last)]
            elif root == "brx":
                segment.next = [self.target(name, last) for name in self.branch_targets(last)]
            elif root in ("ret", "exit", "trap"):
                segment.next = [-1]
            else:
                segment.next = [following]
            if last.guard and root in _ENDS and following not in segment.next:
                segment.next.append(following)

    def branch_targets(self, instruction: Instruction) -> tuple[str, ...]:
        """Return the labels of a ``brx.idx`` instruction."""
        table = instruction.operands[1] if len(instruction.operands) > 1 else None
        if not isinstance(table, Sym) or table.name not in self.function.branch_targets:
            raise PtxError("brx.idx has no .branchtargets", instruction.line, text=instruction.text)
        names = self.function.branch_targets[table.name]
        scope = table.name.partition("@")[2]
        return tuple(f"{n}@{scope}" if f"{n}@{scope}" in self.function.labels else n for n in names)

    def _continuing(self, segment: Segment) -> list[int]:
        """Return the successors of a segment, except the end of the function if ``@p exit`` leads there."""
        last = self.function.body[segment.stop - 1] if segment.stop > segment.start else None
        ends_lanes = last is not None and last.guard and last.parts[0] in ("exit", "trap")
        return [s for s in segment.next if s >= 0] if ends_lanes else segment.next

    def _post_dominators(self) -> None:
        """Compute immediate post-dominators (Cooper, Harvey, Kennedy) on the reversed graph with a virtual end."""
        end = len(self.segments)
        successors = [[end if s < 0 else s for s in self._continuing(seg)] for seg in self.segments] + [[]]
        predecessors: list[list[int]] = [[] for _ in range(end + 1)]
        for index, outs in enumerate(successors):
            for out in outs:
                predecessors[out].append(index)
        order = _post_order(end, predecessors)
        rank = {node: position for position, node in enumerate(order)}
        parent: dict[int, int] = {end: end}

        def meet(a: int, b: int) -> int:
            while a != b:
                while rank[a] < rank[b]:
                    a = parent[a]
                while rank[b] < rank[a]:
                    b = parent[b]
            return a

        changed = True
        while changed:
            changed = False
            for node in reversed(order):
                if node == end:
                    continue
                done = [s for s in successors[node] if s in parent]
                dominator = done[0]
                for other in done[1:]:
                    dominator = meet(dominator, other)
                if parent.get(node) != dominator:
                    parent[node], changed = dominator, True
        for segment in self.segments:
            meeting = parent.get(segment.index, end)
            segment.reconverge = -1 if meeting == end or self._only_leaves(meeting) else meeting

    def _only_leaves(self, index: int) -> bool:
        """Return whether a segment only ends the kernel.

        Lanes that return early do not wait for other lanes in such a segment.
        """
        segment = self.segments[index]
        body = self.function.body[segment.start : segment.stop]
        return self.function.is_entry and bool(body) and body[0].parts[0] in ("ret", "exit") and body[0].guard is None

    def _liveness(self) -> None:
        used, killed = [], []
        for segment in self.segments:
            use = kill = touched = 0
            for at in range(segment.start, segment.stop):
                written, read = self.accesses[at]
                instruction = self.function.body[at]
                for register in read:
                    touched |= 1 << register
                    if not kill >> register & 1:
                        use |= 1 << register
                for register in written:
                    touched |= 1 << register
                    if instruction.guard and not kill >> register & 1:
                        use |= 1 << register
                    elif not instruction.guard:
                        kill |= 1 << register
            segment.touched = touched
            used.append(use)
            killed.append(kill)
        changed = True
        while changed:
            changed = False
            for segment in reversed(self.segments):
                out = 0
                for follower in segment.next:
                    if follower >= 0:
                        out |= self.segments[follower].live_in
                live = used[segment.index] | (out & ~killed[segment.index])
                segment.live_out = out
                if live != segment.live_in:
                    segment.live_in, changed = live, True
        for segment in self.segments:
            self.crossing |= segment.live_in


def _post_order(root: int, edges: list[list[int]]) -> list[int]:
    """Return the nodes of a depth-first traversal from ``root`` in post-order."""
    seen, order = {root}, []
    stack = [(root, iter(edges[root]))]
    while stack:
        node, rest = stack[-1]
        for following in rest:
            if following not in seen:
                seen.add(following)
                stack.append((following, iter(edges[following])))
                break
        else:
            order.append(node)
            stack.pop()
    return order
