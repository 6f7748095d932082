"""Emitters for control flow, barriers of CTAs and clusters, instructions without effect, and unsupported instructions.

Source: PTX ISA, "Control Flow Instructions", "bar, barrier", "barrier.cluster", "griddepcontrol", "setmaxnreg".
"""

from __future__ import annotations

import numpy as np

import cudatma.emulator.machine.register_pool  # noqa: F401
from cudatma.emulator.errors import TrapError
from cudatma.emulator.machine import divergence
from cudatma.emulator.machine.ops_warp import gather_members
from cudatma.emulator.machine.state import Warp
from cudatma.emulator.ptx.forms import REFUSED
from cudatma.emulator.ptx.model import Imm, Instruction, Reg, Sym, Vec
from cudatma.emulator.ptx.types import CODES, LANES, Array
from cudatma.emulator.ptx.writer import SegmentWriter, emitter, runtime


def _guard_lanes(e: SegmentWriter, i: Instruction) -> str | None:
    """Emit the mask of lanes whose guard is true, and return the mask's name, or None if there is no guard."""
    if i.guard is None:
        return None
    register, negated = i.guard
    predicate = ("~" if negated else "") + e._register(register)
    return e.temporary(f"{predicate} & m" if e.masked else predicate)


@emitter("bra")
def bra(e: SegmentWriter, i: Instruction) -> None:
    label = i.operands[0]
    if not isinstance(label, Sym):
        raise e.error("the branch has no label")
    target = e.flow.target(label.name, i)
    taken = _guard_lanes(e, i)
    if taken is None:
        e.line(f"return {target}")
        return
    following = e.segment.index + 1
    count = e.temporary(f"count({taken})")
    e.line(f"if {count} == 0: return {following}")
    e.line(f"if {count} == {'count(m)' if e.masked else 32}: return {target}")
    e.line(f"return diverge(w, {taken}, {target}, {following}, {e.segment.reconverge})")


@emitter("brx")
def brx(e: SegmentWriter, i: Instruction) -> None:
    targets = [e.flow.target(name, i) for name in e.flow.branch_targets(i)]
    taken = _guard_lanes(e, i)
    if taken is not None:
        e.line(f"if not count({taken}): return {e.segment.index + 1}")
        e.line(
            f"if not {taken}[m].all(): return diverge(w, {taken}, {e.segment.index}, {e.segment.index + 1}, "
            f"{e.segment.reconverge})"
        )
    e.line(f"return indexed_branch(w, {e.src(i.operands[0], 'u32')}, {targets}, {e.segment.reconverge}, m)")


@runtime
def indexed_branch(w: Warp, index: Array, targets: list[int], meet: int, mask: Array) -> int:
    """Branch to the target of each lane. Lanes with different indices diverge."""
    first = int(index[mask.argmax()])
    if first >= len(targets):
        raise TrapError(f"the index of brx.idx must be less than {len(targets)}, got {first}")
    same = (index == first) & mask
    if (same == mask).all():
        return targets[first]
    return divergence.diverge(w, same, targets[first], w.split.pc, meet)


@emitter("ret", "exit")
def leave(e: SegmentWriter, i: Instruction) -> None:
    do = "quit" if i.parts[0] == "exit" else "leave"
    taken = _guard_lanes(e, i)
    if taken is None:
        e.line(f"return {do}(w, m)")
        return
    following = e.segment.index + 1
    count = e.temporary(f"count({taken})")
    e.line(f"if {count} == 0: return {following}")
    e.line(f"if {count} == count(m): return {do}(w, m)")
    e.line(f"{do}(w, {taken})")
    e.line(f"return {following}")


@emitter("trap", "brkpt")
def trap(e: SegmentWriter, i: Instruction) -> None:
    taken = _guard_lanes(e, i)
    if taken is not None:
        e.line(f"if not count({taken}): return {e.segment.index + 1}")
    e.line(f"raise_trap({i.parts[0]!r}, {e.at})")
    e.line("return -2")


@runtime
def raise_trap(name: str, at: int) -> None:
    raise TrapError(f"the kernel executed {name}", at=at)


@emitter("call")
def call(e: SegmentWriter, i: Instruction) -> None:
    """Emit code for call{.uni} (results), function, (arguments).

    Results and arguments are .param variables of the caller.
    """
    parts = list(i.operands)
    results = parts.pop(0) if parts and isinstance(parts[0], Vec) else Vec(())
    e.need(bool(parts), "the call has no function")
    callee = parts.pop(0)
    arguments = parts.pop(0) if parts and isinstance(parts[0], Vec) else Vec(())
    names: list[list[str]] = []
    for group in (arguments, results):
        items = group.items if isinstance(group, Vec) else ()
        e.need(all(isinstance(item, Sym) for item in items), "the operands of a call must be .param variables")
        names.append([item.name for item in items if isinstance(item, Sym)])
    following = e.segment.index + 1
    taken = _guard_lanes(e, i)
    if taken is not None:
        e.line(f"if not count({taken}): return {following}")
        e.line(f"if not {taken}[m].all(): return diverge(w, {taken}, {e.segment.index}, {following}, {following})")
    if isinstance(callee, Sym):
        e.line(f"return call_function(w, {callee.name!r}, {names[0]}, {names[1]}, {following})")
    elif isinstance(callee, Reg):
        target = e.src(callee, "u64")
        e.line(f"return call_pointer(w, {target}, {names[0]}, {names[1]}, {following}, m)")
    else:
        raise e.error("the target of the call must be a function")


@runtime
def call_function(w: Warp, name: str, arguments: list[str], results: list[str], following: int) -> int:
    from cudatma.emulator.machine.builtins import BUILTINS

    if name in BUILTINS:
        BUILTINS[name](w, arguments, results)
        return following
    program = w.launch.image.program(name)
    expected = (len(program.function.params), len(program.function.returns))
    if expected != (len(arguments), len(results)):
        message = f"the call of {name} has {len(arguments)} arguments and {len(results)} results"
        raise TrapError(f"{message}, but {name} declares {expected[0]} and {expected[1]}")
    return divergence.call(w, program, arguments, results, following)


@runtime
def call_pointer(w: Warp, target: Array, arguments: list[str], results: list[str], following: int, mask: Array) -> int:
    """Call functions through a pointer. Lanes with different targets diverge."""
    first = int(target[mask.argmax()])
    same = (target == np.uint64(first)) & mask
    if not (same == mask).all():
        return divergence.diverge(w, same, w.split.pc, w.split.pc, following)
    name = w.launch.image.function_at(first)
    if name is None:
        raise TrapError(f"the target {first:#x} of an indirect call is not a function")
    return call_function_typed(w, name, arguments, results, following)


def call_function_typed(w: Warp, name: str, arguments: list[str], results: list[str], following: int) -> int:
    return int(call_function(w, name, arguments, results, following))


@emitter("bar", "barrier")
def bar(e: SegmentWriter, i: Instruction) -> None:
    """Emit code for bar.sync/.arrive/.red, barrier, bar.warp.sync and barrier.cluster.arrive/.wait."""
    following = e.segment.index + 1
    parts = set(i.parts)
    if "warp" in parts:
        gather_members(e, i, "None")
        return
    if "cluster" in parts:
        if "wait" in parts:
            e.line(f"if sync.cluster_wait(w, {e.at}, {'acquire' in parts or 'relaxed' not in parts}): return -1")
        else:
            e.line(f"sync.cluster_arrive(w, {e.at}, {'relaxed' not in parts})")
        return
    aligned = i.parts[0] == "bar" or "aligned" in parts
    position = 1 if "red" in parts else 0
    number = e.src(i.operands[position], "u32")
    if "red" in parts:
        has_count = len(i.operands) == 4
        count = e.src(i.operands[2], "u32") if has_count else "None"
        predicate = e.src(i.operands[-1], "pred")
        kind = next(p for p in ("popc", "and", "or") if p in parts)
        result = e.temporary(f"sync.named_reduce(w, {e.at}, {number}, {count}, {predicate}, {kind!r}, {aligned})")
        e.line(f"if {result} is None: return -1")
        e.dst(i.operands[0], result, "u32" if kind == "popc" else "pred")
        return
    count = e.src(i.operands[1], "u32") if len(i.operands) > 1 else "None"
    if "arrive" in parts:
        e.line(f"sync.named_arrive(w, {e.at}, {number}, {count}, {aligned})")
    elif "sync" in parts:
        e.line(f"if sync.named_sync(w, {e.at}, {number}, {count}, {aligned}): return -1")
        del following
    else:
        raise e.error("this form of bar is not supported")


@emitter("nanosleep")
def nanosleep(e: SegmentWriter, i: Instruction) -> None:
    e.line("w.launch.scheduler.poll(w.split)")


@emitter("setmaxnreg", "pmevent", "prefetchu", "applypriority", "discard")
def no_effect(e: SegmentWriter, i: Instruction) -> None:
    """Emit code for instructions that affect only caches, counters or the number of registers.

    setmaxnreg.inc can block until the CTA's register pool has enough registers.
    """
    if i.parts[0] == "setmaxnreg":
        count = i.operands[0]
        if not isinstance(count, Imm):
            raise e.error("the operand of setmaxnreg must be an immediate")
        e.line(f"if register_pool.set_registers(w, {e.at}, {count.bits}, {'inc' in i.parts}): return -1")
    else:
        e.line("pass")


@emitter("griddepcontrol")
def griddepcontrol(e: SegmentWriter, i: Instruction) -> None:
    """Emit code for griddepcontrol. Launches are sequential, so the previous grid has already finished."""
    e.need(i.parts[1] in ("wait", "launch_dependents"), "this form of griddepcontrol is not supported")
    e.line("sync.grid_wait(w)" if i.parts[1] == "wait" else "pass")


@emitter("alloca", "stacksave", "stackrestore")
def stack(e: SegmentWriter, i: Instruction) -> None:
    """Emit code for alloca, stacksave and stackrestore.

    alloca allocates memory after the function's local memory. All lanes of a warp share one stack pointer.
    """
    code = CODES[i.parts[1]]
    if i.parts[0] == "stackrestore":
        e.line(f"restore_stack(w, {e.src(i.operands[0], code)}, {e.mask})")
        return
    if i.parts[0] == "stacksave":
        e.dst(i.operands[0], "local_address(w.allocate(0, 1))", "u64")
        return
    align = i.operands[2] if len(i.operands) > 2 else Imm(8)
    e.need(isinstance(align, Imm) and 1 <= align.bits <= 1 << 16, "the alignment must be an immediate from 1 to 65536")
    size = e.src(i.operands[1], code)
    bits = align.bits if isinstance(align, Imm) else 8
    e.dst(i.operands[0], f"local_address(w.allocate(largest({size}, {e.mask}), {bits}))", "u64")


@runtime
def largest(value: Array, mask: Array | None) -> int:
    """Return the maximum of the active lanes' values."""
    return int((value if mask is None else value[mask]).max())


@runtime
def local_address(address: int) -> Array:
    return np.full(LANES, address, np.uint64)


@runtime
def restore_stack(w: Warp, top: Array, mask: Array | None) -> None:
    w.stack_top = min(w.stack_top, largest(top, mask))


@emitter(*REFUSED)
def refuse(e: SegmentWriter, i: Instruction) -> None:
    raise e.error(f"`{i.parts[0]}` is not supported ({REFUSED[i.parts[0]]})")
