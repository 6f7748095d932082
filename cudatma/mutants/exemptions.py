"""Rules that exempt equivalent mutants, in which another instruction of the PTX enforces the same order.

Each rule names this other instruction. A rule applies only if the emulator reports no hazard for the mutant. Source:
PTX ISA, "Memory Consistency Model", "mbarrier.arrive" (release by default), "bar.warp.sync", "Async proxy",
"wgmma.fence".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from cudatma.emulator.ptx.early_uses import unfenced_wgmmas
from cudatma.emulator.ptx.flow import Flow
from cudatma.emulator.ptx.model import Imm, Instruction
from cudatma.emulator.ptx.parser import parse
from cudatma.mutants.mutant import Mutant
from cudatma.mutants.ptx_text import (
    Graph,
    is_bulk_copy,
    is_copy,
    is_load,
    is_release,
    synchronizes_warp,
    touches_memory,
    touches_shared,
)


class Exemptions:
    """Search for another instruction that enforces the same order as the mutated one."""

    def __init__(self, ptx: str) -> None:
        self.functions = {name: function for name, function in parse(ptx).functions.items() if function.is_defined}
        self.all = [instruction for function in self.functions.values() for instruction in function.body]
        self._graphs: dict[str, Graph] = {}

    def reason(self, mutant: Mutant) -> str:
        """Return the instruction that enforces the same order and the reason as text, or "" if there is none."""
        if mutant.operator == "map_base":
            return self._replaced_address()
        if mutant.operator == "wgmma_swizzle":
            return self._no_map_loads_tiles()
        rules = _RULES.get(mutant.operator, ())
        if mutant.function not in self.functions:
            return ""
        graph = self._graphs.get(mutant.function)
        if graph is None:
            graph = self._graphs[mutant.function] = Graph(self.functions[mutant.function])
        return next((text for rule in rules if (text := rule(self, graph, mutant.at))), "")

    def _replaced_address(self) -> str:
        for instruction in self.all:
            if instruction.parts[0] == "tensormap" and "global_address" in instruction.parts:
                return f"`{instruction.opcode}` overwrites the address"
        return ""

    def _no_map_loads_tiles(self) -> str:
        """Return a reason if no tensor map loads tiles, so that no swizzle can differ from the descriptor's."""
        copies = [instruction for instruction in self.all if instruction.parts[:2] == ("cp", "async")]
        if not copies or any("tensor" in instruction.parts for instruction in copies):
            return ""
        return f"`{copies[0].opcode}` writes elements to explicit addresses, without a swizzle"


def _no_asynchronous_user(exemptions: Exemptions, graph: Graph, at: int) -> str:
    """Exempt fence.mbarrier_init if neither the async proxy nor another CTA uses the mbarriers."""
    if "mbarrier_init" not in graph.body[at].parts:
        return ""
    for other in exemptions.all:
        parts = set(other.parts)
        if is_bulk_copy(other) or ("async" in parts and other.parts[0] in ("st", "red")) or "shared::cluster" in parts:
            return ""
    return "`bar.sync` orders mbarrier.init within the CTA; neither the async proxy nor another CTA uses the mbarriers"


def _proxy_fence_follows(exemptions: Exemptions, graph: Graph, at: int) -> str:
    """Exempt an init fence before fence.proxy.async, because fence.proxy.async also publishes mbarrier.init."""
    if "mbarrier_init" not in graph.body[at].parts:
        return ""
    fence: Instruction | None = None
    for instruction, halts in graph.walk(at, True, lambda i: _is_proxy_fence(i) or synchronizes_warp(i) or is_copy(i)):
        if halts and not _is_proxy_fence(instruction):
            return ""
        fence = instruction if halts else fence
    return f"`{fence.opcode}` after this instruction also publishes mbarrier.init" if fence else ""


def _is_proxy_fence(instruction: Instruction) -> bool:
    return instruction.parts[:3] == ("fence", "proxy", "async") and instruction.guard is None


def _another_wgmma_fence(exemptions: Exemptions, graph: Graph, at: int) -> str:
    """Exempt wgmma.fence if every path passes an earlier one, after which only wgmmas write the accumulator registers.

    Wgmmas of the same shape accumulate into the same registers in order.
    """
    mine, body = graph.body[at], graph.body
    if mine.parts[:2] != ("wgmma", "fence"):
        return ""
    fence: Instruction | None = None
    for other, halts in graph.walk(at, False, lambda i: i.parts[:2] == ("wgmma", "fence") and i is not mine):
        if other is body[0] and not halts:
            return ""
        fence = other if halts else fence
    nothing = replace(mine, parts=("membar", "cta"))
    without = replace(graph.function, body=[*body[:at], nothing, *body[at + 1 :]])
    if fence is None or unfenced_wgmmas(Flow(without)):
        return ""
    return f"`{fence.opcode}` before this instruction is sufficient: only wgmmas have written the registers since then"


def _release_follows(exemptions: Exemptions, graph: Graph, at: int) -> str:
    """Exempt a fence immediately before a release, because the release publishes the same writes."""
    if graph.body[at].parts[1].startswith(("proxy", "mbarrier_init", "fence")):
        return ""
    release = graph.ends_on(at, True, is_release)
    return f"`{release.opcode}` after this instruction is a release" if release else ""


def _fence_precedes(exemptions: Exemptions, graph: Graph, at: int) -> str:
    """Exempt a relaxed write after a fence, because the two form a release pattern."""
    instruction = graph.body[at]
    if instruction.parts[0] not in ("st", "atom", "red"):
        return ""
    fence = graph.ends_on(at, False, _is_fence)
    return f"`{fence.opcode}` before this instruction and the relaxed write form a release pattern" if fence else ""


def _is_fence(instruction: Instruction) -> bool:
    parts = instruction.parts
    return parts[0] == "membar" or (parts[0] == "fence" and bool({"acq_rel", "sc"} & set(parts)))


def _nothing_to_publish(exemptions: Exemptions, graph: Graph, at: int) -> str:
    """Exempt an arrival if it follows only copies into shared memory."""
    mine = graph.body[at].parts
    arrives = mine[0] == "mbarrier" and mine[1].startswith("arrive")
    if not arrives or graph.any_before(at, lambda i: touches_shared(i) and not is_load(i)):
        return ""
    return "`mbarrier complete_tx` orders the copies, which are the only earlier accesses to shared memory"


def _nothing_left_to_order(exemptions: Exemptions, graph: Graph, at: int) -> str:
    """Exempt an instruction if neither this thread nor a thread that waits for it accesses memory afterward."""
    mine = graph.body[at]
    if mine.parts[:2] == ("barrier", "cluster") or _touches_later(graph, at):
        return ""
    publishes = is_release(mine) or (mine.parts[0] in ("bar", "barrier") and "warp" not in mine.parts)
    if publishes and any(_could_wait_elsewhere(graph, at, wait) for wait in graph.places(_waits)):
        return ""
    cluster = graph.any_after(at, lambda i: i.parts[:2] == ("barrier", "cluster"))
    return f"no memory access follows this instruction before `{'barrier.cluster' if cluster else 'ret'}`"


def _touches_later(graph: Graph, at: int) -> bool:
    return graph.any_after(at, lambda i: touches_memory(i) or "inval" in i.parts)


def _waits(instruction: Instruction) -> bool:
    return _is_mbarrier_wait(instruction) or instruction.parts[0] in ("bar", "barrier")


def _could_wait_elsewhere(graph: Graph, at: int, wait: int) -> bool:
    """Return whether other threads may wait at ``wait`` for data that ``at`` publishes, and then access memory.

    They cannot do so if every thread passes the wait before it reaches ``at``.
    """
    return wait != at and _touches_later(graph, wait) and not graph.reaches(wait, at)


def _other_warp_sync(exemptions: Exemptions, graph: Graph, at: int) -> str:
    """Exempt a warp barrier if no memory access separates it from another instruction that synchronizes the warp.

    An instruction that synchronizes the warp and also accesses memory (stmatrix) orders only earlier accesses, because
    its access follows the synchronization.
    """
    after = graph.ends_on(at, True, synchronizes_warp)
    if after:
        return f"`{after.opcode}` after this instruction synchronizes the lanes of the warp"
    before = graph.ends_on(at, False, lambda i: synchronizes_warp(i) and not touches_memory(i))
    return f"`{before.opcode}` before this instruction has synchronized the lanes of the warp" if before else ""


def _warp_sync_in_loop(exemptions: Exemptions, graph: Graph, at: int) -> str:
    """Exempt a warp barrier in a loop if an earlier instruction of the loop synchronizes the lanes.

    The first iteration needs no exemption, because no slot has been released yet.
    """
    for instruction in graph.main_path_before(at):
        if synchronizes_warp(instruction) and not touches_memory(instruction):
            return f"`{instruction.opcode}` before this instruction synchronizes the lanes after their last access"
        if touches_memory(instruction):
            return ""
    return ""


def _every_lane_waits(exemptions: Exemptions, graph: Graph, at: int) -> str:
    """Exempt a warp barrier next to an mbarrier wait by every lane, with only copies and arrivals in between."""

    def halts(instruction: Instruction) -> bool:
        plain = touches_memory(instruction) and not is_copy(instruction)
        return plain or synchronizes_warp(instruction) or _is_mbarrier_wait(instruction)

    after = [i for i, halted in graph.walk(at, True, halts) if halted]
    before = [i for i, halted in graph.walk(at, False, halts) if halted]
    if any(touches_memory(i) and not synchronizes_warp(i) for i in before):
        return ""
    wait = next((i for i in [*before, *after] if _is_mbarrier_wait(i)), None)
    if wait is None or not (all(map(_is_mbarrier_wait, before)) or all(map(_is_mbarrier_wait, after))):
        return ""
    return f"`{wait.opcode}` is executed by every lane, with only copies and arrivals in between"


def _cluster_barrier_follows(exemptions: Exemptions, graph: Graph, at: int) -> str:
    """Exempt a barrier before barrier.cluster, which also synchronizes the threads of the CTA."""
    barrier = graph.ends_on(at, True, lambda i: i.parts[:2] == ("barrier", "cluster") and "relaxed" not in i.parts)
    return f"`{barrier.opcode}` after this instruction also synchronizes the threads of the CTA" if barrier else ""


def _other_wait(exemptions: Exemptions, graph: Graph, at: int) -> str:
    """Exempt one of two waits for the same groups if no access to shared memory separates the two waits."""
    mine = graph.body[at]
    if "bulk" not in mine.parts:
        return ""

    def same(other: Instruction) -> bool:
        parts = set(other.parts)
        return other.parts[0] == "cp" and {"bulk", "wait_group"} <= parts and _count(other) <= _count(mine)

    wait = graph.ends_on(at, True, same) or graph.ends_on(at, False, same)
    if wait and "read" in wait.parts and "read" not in mine.parts and _touches_later(graph, at):
        return ""  # After a wait with .read, the source may be reused, but the results must not be read yet.
    return f"`{wait.opcode} {_count(wait)}` next to this instruction waits for the same groups" if wait else ""


def _count(instruction: Instruction) -> int:
    operand = instruction.operands[0] if instruction.operands else Imm(0)
    return operand.bits if isinstance(operand, Imm) else 0


def _other_wgmma_wait(exemptions: Exemptions, graph: Graph, at: int) -> str:
    """Exempt wgmma.wait_group if the next one, or the previous one in the loop, precedes the release of a slot.

    Accumulator registers need no rule, because the emulator checks the registers of all pending groups.
    """
    mine = graph.body[at]
    if mine.parts[0] != "wgmma":
        return ""

    def waits(other: Instruction) -> bool:
        return other.parts[:2] == ("wgmma", "wait_group") and _count(other) <= _count(mine)

    def publishes(other: Instruction) -> bool:
        return is_release(other) or other.parts[0] in ("bar", "barrier")

    after = [i for i, halted in graph.walk(at, True, lambda i: waits(i) or publishes(i)) if halted]
    if after and all(map(waits, after)):
        return f"`{after[0].opcode} {_count(after[0])}` follows this instruction before a slot is released"
    for instruction in graph.main_path_before(at):
        if publishes(instruction):
            return ""
        if waits(instruction):
            return f"`{instruction.opcode} {_count(instruction)}` ensures that older groups have read the released slot"
    return ""


def _arrivals_cover_copies(exemptions: Exemptions, graph: Graph, at: int) -> str:
    """Exempt a wait if cp.async.mbarrier.arrive follows every copy, because the readers then wait for the mbarrier."""
    if "bulk" in graph.body[at].parts:
        return ""
    arrival: Instruction | None = None
    for instruction, halts in graph.walk(at, False, lambda i: is_copy(i) or _is_copy_arrival(i)):
        if halts and is_copy(instruction):
            return ""
        arrival = instruction if halts else arrival
    if arrival is None or graph.any_after(at, touches_shared):
        return ""
    return f"`{arrival.opcode}` follows every copy, and the readers wait for its mbarrier"


def _is_copy_arrival(instruction: Instruction) -> bool:
    return instruction.parts[0] == "cp" and "arrive" in instruction.parts


def _mbarrier_wait_precedes(exemptions: Exemptions, graph: Graph, at: int) -> str:
    """Exempt the last barrier.cluster.wait if an mbarrier wait follows every remote access."""
    if "wait" not in graph.body[at].parts or graph.body[at].parts[0] != "barrier":
        return ""
    if graph.any_after(at, lambda i: touches_memory(i) or i.parts[0] == "mbarrier"):
        return ""
    wait: Instruction | None = None
    for instruction, halts in graph.walk(at, False, lambda i: _is_mbarrier_wait(i) or "shared::cluster" in i.parts):
        if halts and not _is_mbarrier_wait(instruction):
            return ""
        wait = instruction if halts else wait
    return f"`{wait.opcode}` before this instruction waits for the other CTAs' arrivals" if wait else ""


def _producer_has_waited(exemptions: Exemptions, graph: Graph, at: int) -> str:
    """Exempt griddepcontrol.wait in a warp that waits for ring slots if the producer warp also executes it."""
    others = [place for place in graph.places(lambda i: i.parts[:2] == ("griddepcontrol", "wait")) if place != at]
    fills = any(graph.any_after(place, lambda i: is_copy(i) or is_release(i)) for place in others)
    after = (i for i, _ in graph.walk(at, True, lambda i: _is_mbarrier_wait(i) or touches_memory(i)))
    wait = next((i for i in (*after, *graph.main_path_before(at)) if _is_mbarrier_wait(i)), None)
    if not fills or wait is None or any(graph.reaches(at, place) for place in others):
        return ""
    return f"`griddepcontrol.wait` in the producer warp precedes the copies for which `{wait.opcode}` waits"


def _is_mbarrier_wait(instruction: Instruction) -> bool:
    return instruction.parts[0] == "mbarrier" and instruction.parts[1] in ("try_wait", "test_wait")


Rule = Callable[[Exemptions, Graph, int], str]
_RULES: dict[str, tuple[Rule, ...]] = {
    "drop_fence": (_no_asynchronous_user, _proxy_fence_follows, _release_follows, _another_wgmma_fence),
    "relax": (_fence_precedes, _nothing_to_publish, _nothing_left_to_order),
    "drop_warp_sync": (
        _other_warp_sync,
        _nothing_left_to_order,
        _every_lane_waits,
        _warp_sync_in_loop,
    ),
    "drop_barrier": (_cluster_barrier_follows, _nothing_left_to_order),
    "drop_wait": (_nothing_left_to_order, _mbarrier_wait_precedes),
    "drop_dependency_wait": (_producer_has_waited,),
    "drop_group_wait": (_other_wait, _other_wgmma_wait, _arrivals_cover_copies),
    "weaken_group_wait": (_other_wait, _arrivals_cover_copies),
}
