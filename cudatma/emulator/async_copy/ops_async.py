"""Emitters for mbarrier, cp.async*, cp.reduce.async*, st.async, fences and tensormap.

Source: PTX ISA, "Asynchronous copy", "mbarrier", "membar, fence".
"""

from __future__ import annotations

import cudatma.emulator.async_copy.bulk
import cudatma.emulator.async_copy.cp_async
import cudatma.emulator.async_copy.groups
import cudatma.emulator.async_copy.mbarrier
import cudatma.emulator.async_copy.remote
import cudatma.emulator.async_copy.tensor
import cudatma.emulator.async_copy.tensor_map  # noqa: F401
from cudatma.emulator.machine.ops_memory import address_of, atom, shared_address_of, st, state_space
from cudatma.emulator.ptx.model import Imm, Instruction, Mem, Operand, Sink, Vec
from cudatma.emulator.ptx.types import CODES, SCOPES, unsigned
from cudatma.emulator.ptx.writer import SegmentWriter, emitter


def _lane_loop(e: SegmentWriter) -> None:
    """Emit a loop over the active lanes, for an instruction that each thread executes separately."""
    e.line(f"for lane in groups.active_lanes({e.mask}):")
    e.indent += 1


@emitter("mbarrier")
def mbarrier(e: SegmentWriter, i: Instruction) -> None:
    form = i.parts[1]
    ops = list(i.operands)
    if form == "pending_count":
        e.dst(ops[0], f"pending_count({e.src(ops[1], 'u64')})", "u32")
        return
    to = ops.pop(0) if ops and not isinstance(ops[0], Mem) else None
    e.need(bool(ops), "mbarrier must have an address operand")
    head = f"w, {e.at}, {shared_address_of(e, i, ops[0])}"
    rest = ops[1:]
    is_partial, has_token = "noComplete" in i.parts, not (to is None or isinstance(to, Sink))
    space, remote = state_space(i)
    # A generic address may refer to another CTA if the instruction has a .shared::cluster form. This form returns no
    # token.
    remote = remote or not (space or is_partial or has_token)
    sem = "relaxed" if "relaxed" in i.parts else "acquire" if "wait" in form else "release"
    order = f"{sem}.{next((part for part in i.parts if part in SCOPES), 'cta')}"
    if form == "init":
        e.line(f"mbarrier.init({head}, {e.src(rest[0], 'u32')}, {e.mask})")
    elif form == "inval":
        e.line(f"mbarrier.inval({head}, {e.mask})")
    elif form in ("arrive", "arrive_drop"):
        expects = "expect_tx" in i.parts
        count = e.src(rest[0], "u32") if rest and not expects else "None"
        size = e.src(rest[0], "u32") if expects else "None"
        drop = form == "arrive_drop"
        how = f"drop={drop}, order={order!r}, remote={remote}, is_partial={is_partial}"
        text = f"mbarrier.arrive({head}, {count}, {size}, {e.mask}, {how})"
        if to is not None and has_token:
            e.dst(to, text, "u64")
        else:
            e.line(text)
    elif form in ("expect_tx", "complete_tx"):
        e.line(f"mbarrier.{form}({head}, {e.src(rest[0], 'u32')}, {e.mask}, {remote})")
    elif form in ("test_wait", "try_wait"):
        parity = "parity" in i.parts
        phase = e.src(rest[0], "u32" if parity else "u64")
        text = f"mbarrier.wait({head}, {phase}, {parity}, {form == 'try_wait'}, {e.mask}, {order!r})"
        value = e.temporary(text)
        e.line(f"if {value} is None: return -1")
        if to is None:
            raise e.error(f"the destination of mbarrier.{form} must be a predicate")
        e.dst(to, value, "pred")
    else:
        raise e.error(f"mbarrier.{form} is not supported")


@emitter("cp")
def cp(e: SegmentWriter, i: Instruction) -> None:
    """Emit code for all forms of cp.async and cp.reduce.async."""
    parts = i.parts
    if parts[1:3] == ("reduce", "async") or parts[1] == "async":
        names = set(parts)
        if "commit_group" in names:
            e.line(f"groups.commit(w, {'bulk' if 'bulk' in names else 'cp'!r}, {e.mask})")
        elif "wait_group" in names or "wait_all" in names:
            _wait_group(e, i, names)
        elif "mbarrier" in names and "arrive" in names:
            address = shared_address_of(e, i, i.operands[0])
            e.line(f"cp_async.arrive(w, {e.at}, {address}, {e.mask}, {'noinc' in names})")
        elif "prefetch" in names:
            _prefetch(e, i, names)
        elif "tensor" in names:
            _tensor(e, i, names)
        elif "bulk" in names:
            _bulk(e, i, names)
        else:
            _copy(e, i)
        return
    raise e.error("this form of the instruction is not supported")


def _wait_group(e: SegmentWriter, i: Instruction, names: set[str]) -> None:
    count = i.operands[0] if i.operands else Imm(0)
    if not isinstance(count, Imm):
        raise e.error("the number of groups must be an immediate")
    kind = "bulk" if "bulk" in names else "cp"
    head = f"w, {e.at}, {kind!r}, {count.bits}, {'read' in names}, {e.mask}, {'wait_all' in names}"
    e.line(f"if groups.wait({head}): return -1")


def _copy(e: SegmentWriter, i: Instruction) -> None:
    """Emit code for cp.async.{ca,cg}.shared.global [to], [from], size{, source size | ignore}{, policy}."""
    size = i.operands[2]
    if not isinstance(size, Imm):
        raise e.error("the size must be an immediate")
    e.need(size.bits in (4, 8, 16), "the size must be 4, 8 or 16")
    take = "None"
    has_policy = "L2::cache_hint" in i.parts
    if len(i.operands) > 3 + has_policy:
        extra: Operand = i.operands[3]
        try:
            take = e.src(extra, "u32")
        except ValueError:
            take = f"where({e.src(extra, 'pred')}, {e.splat(0, 'u32')}, {e.splat(size.bits, 'u32')})"
    to, source = address_of(e, i.operands[0]), address_of(e, i.operands[1])
    e.line(f"cp_async.copy(w, {e.at}, {to}, {source}, {size.bits}, {take}, {e.mask})")


_OPERATIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")


def _directions(e: SegmentWriter, i: Instruction) -> tuple[str, str]:
    """Return the state spaces of the destination and the source of a bulk copy."""
    spaces = [p for p in i.parts if p.split("::")[0] in ("global", "shared")]
    e.need(len(spaces) == 2, "a bulk copy must have two state spaces")
    return spaces[0].split("::")[0], spaces[1].split("::")[0]


def _bulk(e: SegmentWriter, i: Instruction, names: set[str]) -> None:
    to_space, from_space = _directions(e, i)
    ops = i.operands
    to = e.temporary(address_of(e, ops[0]))
    source = e.temporary(address_of(e, ops[1]))
    size = e.temporary(e.src(ops[2], "u32"))
    if to_space == "global":
        operation = next((p for p in i.parts if p in _OPERATIONS), "")
        e.need("cp_mask" not in names, ".cp_mask is not supported")
        _lane_loop(e)
        e.line(
            f"bulk.store(w, {e.at}, lane, int({to}[lane]), int({source}[lane]), int({size}[lane]), "
            f"{operation!r}, {i.parts[-1]!r})"
        )
        e.indent -= 1
        return
    bar = e.temporary(address_of(e, ops[3]))
    multicast = "None"
    if "multicast::cluster" in names:
        multicast = f"int({e.temporary(e.src(ops[4], 'u16'))}[lane])"
    _lane_loop(e)
    head = f"w, {e.at}, int({to}[lane]), int({source}[lane]), int({size}[lane]), int({bar}[lane])"
    if i.parts[1] == "reduce":
        operation = next((p for p in i.parts if p in _OPERATIONS), "")
        e.line(f"remote.reduce_shared({head}, {operation!r}, {i.parts[-1]!r})")
    else:
        e.line(f"bulk.load({head}, {multicast}, {from_space == 'shared'})")
    e.indent -= 1


def _coordinates(e: SegmentWriter, operand: Operand) -> tuple[str, str]:
    """Return the address of the tensor map, and a list expression for the coordinates, from ``[map, {c0, ...}]``."""
    if not isinstance(operand, Mem) or not operand.extra:
        raise e.error("the operand must be a tensor map with coordinates")
    address = e.temporary(address_of(e, operand))
    return f"int({address}[lane])", _vector(e, operand.extra[0], "i32")


def _vector(e: SegmentWriter, operand: Operand, code: str) -> str:
    items = operand.items if isinstance(operand, Vec) else (operand,)
    names = [e.temporary(e.src(item, code)) for item in items]
    return "[" + ", ".join(f"int({name}[lane])" for name in names) + "]"


def _mode(e: SegmentWriter, i: Instruction) -> str:
    for part in i.parts:
        if part.startswith("im2col"):
            e.need(part in ("im2col", "im2col_no_offs"), f".{part} is not supported")
            return "im2col"
        if part.startswith("tile::"):
            e.need(part in ("tile::gather4", "tile::scatter4"), f".{part} is not supported")
            return part
    return "tile"


def _tensor(e: SegmentWriter, i: Instruction, names: set[str]) -> None:
    to_space, _ = _directions(e, i)
    mode = _mode(e, i)
    e.need("cta_group" not in "".join(i.parts), ".cta_group is not supported")
    if to_space == "global":
        address, coords = _coordinates(e, i.operands[0])
        source = e.temporary(address_of(e, i.operands[1]))
        operation = next((p for p in i.parts if p in _OPERATIONS), "") if i.parts[1] == "reduce" else ""
        _lane_loop(e)
        e.line(f"tensor.store(w, {e.at}, lane, {address}, {coords}, int({source}[lane]), {operation!r}, {mode!r})")
        e.indent -= 1
        return
    ops = list(i.operands)
    to = e.temporary(address_of(e, ops.pop(0)))
    address, coords = _coordinates(e, ops.pop(0))
    bar = e.temporary(address_of(e, ops.pop(0)))
    offsets = "[]"
    if mode == "im2col" and ops and isinstance(ops[0], Vec):
        offsets = _vector(e, ops.pop(0), "u16")
    multicast = "None"
    if "multicast::cluster" in names:
        multicast = f"int({e.temporary(e.src(ops.pop(0), 'u16'))}[lane])"
    _lane_loop(e)
    e.line(
        f"tensor.load(w, {e.at}, {address}, {coords}, {offsets}, int({to}[lane]), int({bar}[lane]), {multicast}, "
        f"{mode!r}, lane)"
    )
    e.indent -= 1


def _prefetch(e: SegmentWriter, i: Instruction, names: set[str]) -> None:
    if "tensor" not in names:
        e.line("pass")
        return
    mode = _mode(e, i)
    address, coords = _coordinates(e, i.operands[0])
    offsets = "[]"
    if mode == "im2col" and len(i.operands) > 1 and isinstance(i.operands[1], Vec):
        offsets = _vector(e, i.operands[1], "u16")
    _lane_loop(e)
    e.line(f"tensor.prefetch(w, {e.at}, {address}, {coords}, {offsets}, {mode!r})")
    e.indent -= 1


@emitter("prefetch")
def prefetch(e: SegmentWriter, i: Instruction) -> None:
    """Emit code for prefetch.tensormap, which checks the address. Other prefetches have no effect."""
    if i.parts[1:] != ("tensormap",):
        e.line("pass")
        return
    address = e.temporary(address_of(e, i.operands[0]))
    _lane_loop(e)
    e.line(f"tensor.check_map_place(w, {e.at}, int({address}[lane]))")
    e.indent -= 1


@emitter("st.async")
def st_async(e: SegmentWriter, i: Instruction) -> None:
    """Emit code for st.async.weak.shared::cluster.mbarrier::complete_tx::bytes{.v2,.v4}.type [to], value, [barrier]."""
    # A store to global memory is a release store without an mbarrier.
    if "shared::cluster" not in i.parts:
        st(e, i)
        return
    code = unsigned(CODES[i.parts[-1]])
    value = i.operands[1]
    items = value.items if isinstance(value, Vec) else (value,)
    values = ", ".join(e.src(item, code) for item in items)
    to, bar = address_of(e, i.operands[0]), address_of(e, i.operands[2])
    e.line(f"remote.store(w, {e.at}, {to}, {code!r}, ({values},), {bar}, {e.mask})")


@emitter("red.async")
def red_async(e: SegmentWriter, i: Instruction) -> None:
    """Emit code for red.async.relaxed.cluster...op.type [to], value, [barrier]."""
    if "shared::cluster" not in i.parts:
        atom(e, i)
        return
    code = unsigned(CODES[i.parts[-1]])
    operation = next((p for p in i.parts if p in _OPERATIONS), "")
    value = e.src(i.operands[1], code)
    to, bar = address_of(e, i.operands[0]), address_of(e, i.operands[2])
    e.line(f"remote.reduce(w, {e.at}, {to}, {operation!r}, {i.parts[-1]!r}, {value}, {bar}, {e.mask})")


@emitter("st.bulk")
def st_bulk(e: SegmentWriter, i: Instruction) -> None:
    """Emit code for st.bulk{.weak}{.shared::cta} [address], size, 0."""
    value = i.operands[2]
    e.need(isinstance(value, Imm) and value.bits == 0, "the value of st.bulk must be 0")
    size = e.src(i.operands[1], "u64")
    e.line(f"remote.fill(w, {e.at}, {shared_address_of(e, i, i.operands[0])}, {size}, {e.mask})")


@emitter("fence", "membar")
def fence(e: SegmentWriter, i: Instruction) -> None:
    """Emit code for memory fences, which only notify observers."""
    if i.operands:
        scope = next(SCOPES[part] for part in i.parts if part in SCOPES)
        e.line(f"remote.fence_map(w, {e.at}, {address_of(e, i.operands[0])}, {scope}, {e.mask})")
        return
    e.line(f"remote.fence(w, {e.at}, {'.'.join(i.parts[1:])!r})")


@emitter("createpolicy")
def createpolicy(e: SegmentWriter, i: Instruction) -> None:
    """Emit a policy of zero, because cache policies do not affect results."""
    e.dst(i.operands[0], e.splat(0, "u64"), "u64")


@emitter("tensormap")
def tensormap(e: SegmentWriter, i: Instruction) -> None:
    """Emit code for tensormap.replace and tensormap.cp_fenceproxy."""
    if i.parts[1] == "replace":
        wide = "b64" in i.parts
        field = i.parts[3]
        address = address_of(e, i.operands[0])
        ordinal = "None"
        value = i.operands[-1]
        if len(i.operands) == 3:
            index = i.operands[1]
            if not isinstance(index, Imm):
                raise e.error("the ordinal must be an immediate")
            if not 0 <= index.bits <= (max_ordinal := 3 if field == "global_stride" else 4):
                raise e.error(f"the ordinal must be from 0 to {max_ordinal}")
            ordinal = str(index.bits)
        text = e.src(value, "u64" if wide else "u32")
        space = "shared" if "shared::cta" in i.parts else "global" if "global" in i.parts else ""
        e.line(f"tensor_map.replace(w, {e.at}, {address}, {space!r}, {field!r}, {ordinal}, {text}, {e.mask})")
    elif i.parts[1] == "cp_fenceproxy":
        to, source = address_of(e, i.operands[0]), address_of(e, i.operands[1])
        e.line(f"tensor_map.copy_fence(w, {e.at}, {to}, {source}, {e.mask})")
    else:
        raise e.error("this form of tensormap is not supported")


@emitter("clusterlaunchcontrol")
def clusterlaunchcontrol(e: SegmentWriter, i: Instruction) -> None:
    """Emit code for try_cancel.async [answer], [barrier], and for query_cancel of the 128-bit answer."""
    if i.parts[1] == "try_cancel":
        to, bar = (shared_address_of(e, i, operand) for operand in i.operands)
        e.line(f"remote.try_cancel(w, {e.at}, {to}, {bar}, {e.mask}, {'multicast::cluster::all' in i.parts})")
        return
    answer = e.temporary(f"unpack({e.src(i.operands[1], 'b128')}.T, u32, 4)")
    if "is_canceled" in i.parts:
        e.dst(i.operands[0], f"{answer}[3] != 0", "pred")
    elif "v4" in i.parts and isinstance(i.operands[0], Vec):
        for axis, item in enumerate(i.operands[0].items):
            if not isinstance(item, Sink):
                e.dst(item, f"{answer}[{axis}]", "u32")
    else:
        named = [k for k, name in enumerate("xyz") if f"get_first_ctaid::{name}" in i.parts]
        e.need(bool(named), "this form of clusterlaunchcontrol.query_cancel is not supported")
        e.dst(i.operands[0], f"{answer}[{named[0]}]", "u32")
