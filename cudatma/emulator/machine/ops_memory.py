"""Emitters for ld, st, atom and red.

Source: PTX ISA, "Data Movement and Conversion Instructions", "atom", "red".
"""

from __future__ import annotations

import cudatma.emulator.machine.access
import cudatma.emulator.machine.atomics
import cudatma.emulator.machine.windows  # noqa: F401
from cudatma.emulator.ptx.model import Instruction, Mem, Reg, Sink, Sym, Vec
from cudatma.emulator.ptx.types import BYTES, CODES, SCOPES, unsigned
from cudatma.emulator.ptx.writer import SegmentWriter, emitter

_SPACES = ("global", "shared", "local", "const", "param")


def state_space(i: Instruction) -> tuple[str, bool]:
    """Return the state space of an instruction, and whether it has ::cluster. "" means generic addresses."""
    for part in i.parts[1:]:
        name, _, detail = part.partition("::")
        if name in _SPACES:
            return name, detail == "cluster"
    return "", False


def order_of(i: Instruction) -> str:
    """Return the memory order and scope of an access, such as "acquire.gpu", or "" for a weak access.

    Atomic operations without an explicit order are relaxed.
    """
    order = next((p for p in i.parts[1:] if p in ("relaxed", "acquire", "release", "acq_rel", "volatile")), "")
    scope = next((p for p in i.parts[1:] if p in SCOPES), "")
    if not order and i.parts[0] in ("atom", "red"):
        order = "relaxed"
    if not order:
        return "nc" if "nc" in i.parts else ""
    return f"{order}.{scope}" if scope else order


def _width(e: SegmentWriter, mem: Mem) -> str:
    """Return the type for address arithmetic. For u32 addresses, the type has 32 bits so that they wrap as on a GPU."""
    return "u32" if isinstance(mem.base, Reg) and BYTES[e.classes[mem.base.index]] == 4 else "u64"


def address_of(e: SegmentWriter, mem: object) -> str:
    """Return an expression for the lane addresses of a memory operand, as uint64."""
    if not isinstance(mem, Mem):
        raise e.error("the operand must be an address in brackets")
    width = _width(e, mem)
    text = e.convert(e.address(mem, width), width, "u64")
    return f"({text} + w.launch.param_shift)" if is_kernel_parameter(e, mem.base) else text


def shared_address_of(e: SegmentWriter, i: Instruction, mem: object) -> str:
    """Return an expression for the lane addresses of a shared-memory operand.

    The addresses are generic if the instruction does not specify a state space.
    """
    text = address_of(e, mem)
    return text if state_space(i)[0] else f"from_generic({text})"


def is_kernel_parameter(e: SegmentWriter, base: object) -> bool:
    """Return whether an operand is a kernel parameter, which has an address in the .param space."""
    function = e.flow.function
    return isinstance(base, Sym) and function.is_entry and any(p.name == base.name for p in function.params)


def _param_name(e: SegmentWriter, mem: Mem, space: str) -> tuple[str, int] | None:
    """Return the name and offset of a .param variable of the current call, or None for other operands."""
    if space != "param" or not isinstance(mem.base, Sym):
        return None
    function = e.flow.function
    name = mem.base.name
    if function.is_entry and any(p.name == name for p in function.params):
        return None
    known = name in function.param_locals or any(p.name == name for p in (*function.params, *function.returns))
    e.need(known, f"parameter `{name}` is not declared")
    return name, mem.base.offset + mem.offset


def _kernel_parameter(e: SegmentWriter, mem: Mem, space: str, size: int) -> str | None:
    """Return arguments that describe an aligned part of a kernel parameter, or None for other loads."""
    function = e.flow.function
    base = mem.base
    if space != "param" or not function.is_entry or not isinstance(base, Sym):
        return None
    inside = base.offset + mem.offset
    param = next((p for p in function.params if p.name == base.name), None)
    if param is None or inside % size or param.align % size or not 0 <= inside <= param.size_bytes - size:
        return None
    return f"{base.name!r}, {inside}"


def _elements(e: SegmentWriter, i: Instruction) -> tuple[str, int]:
    """Return the element type and the number of elements of .v2, .v4, .v8 and .b128."""
    e.need(i.parts[-1] in CODES, f"type `.{i.parts[-1]}` is unknown")
    code = CODES[i.parts[-1]]
    count = next((int(p[1:]) for p in i.parts if p in ("v2", "v4", "v8")), 1)
    return ("u64", 2 * count) if code == "b128" else (code, count)


@emitter("ld", "ldu")
def ld(e: SegmentWriter, i: Instruction) -> None:
    code, count = _elements(e, i)
    space, remote = state_space(i)
    e.need(len(i.operands) >= 2, "ld must have a destination and an address")
    mem = i.operands[1]
    if not isinstance(mem, Mem):
        raise e.error("the operand must be an address in brackets")
    raw = unsigned(code) if code in ("f16",) else code
    param = _param_name(e, mem, space)
    fixed = _kernel_parameter(e, mem, space, BYTES[raw] * count)
    if fixed:
        text = f"w.launch.parameter({fixed}, {raw!r}, {count})"
    elif param:
        text = f"ld_param(w, {param[0]!r}, {param[1]}, {raw!r}, {count}, {e.mask})"
    else:
        address = address_of(e, mem)
        if space == "param" and not is_kernel_parameter(e, mem.base):
            address = f"({address} + w.launch.param_shift)"
        head = f"w, {e.at}, {address}, {raw!r}, {count}, {e.mask}"
        if space == "shared":
            text = f"ld_shared({head}, {remote}, {order_of(i)!r})"
        elif space == "local":
            text = f"ld_local({head})"
        elif space:
            text = f"ld_global({head}, {order_of(i)!r})"
        else:
            text = f"ld_generic({head}, {order_of(i)!r})"
    value = e.temporary(text)
    to = i.operands[0]
    if i.parts[-1] == "b128":
        targets = to.items if isinstance(to, Vec) else (to,)
        for k, target in enumerate(targets):
            e.dst(target, f"pack128({value}[{2 * k}], {value}[{2 * k + 1}])", "b128")
        return
    targets = to.items if isinstance(to, Vec) else (to,)
    e.need(len(targets) == count, f"the instruction must have {count} destinations")
    for k, target in enumerate(targets):
        if not isinstance(target, Sink):
            e.dst(target, f"{value}[{k}]", raw)


@emitter("st")
def st(e: SegmentWriter, i: Instruction) -> None:
    code, count = _elements(e, i)
    space, remote = state_space(i)
    e.need(len(i.operands) >= 2, "st must have an address and a value")
    mem = i.operands[0]
    if not isinstance(mem, Mem):
        raise e.error("the operand must be an address in brackets")
    raw = unsigned(code)
    source = i.operands[1]
    items = source.items if isinstance(source, Vec) else (source,)
    if i.parts[-1] == "b128":
        whole = [e.temporary(e.src(item, "b128")) for item in items]
        values = ", ".join(f"{name}[0], {name}[1]" for name in whole)
    else:
        e.need(len(items) == count, f"the instruction must have {count} values")
        values = ", ".join(e.src(item, raw) for item in items)
    param = _param_name(e, mem, space)
    if param:
        e.line(f"st_param(w, {param[0]!r}, {param[1]}, {raw!r}, ({values},), {e.mask})")
        return
    head = f"w, {e.at}, {address_of(e, mem)}, {raw!r}, ({values},), {e.mask}"
    if space == "shared":
        e.line(f"st_shared({head}, {remote}, {order_of(i)!r})")
    elif space == "local":
        e.line(f"st_local({head})")
    elif space:
        e.line(f"st_global({head}, {order_of(i)!r})")
    else:
        e.line(f"st_generic({head}, {order_of(i)!r})")


_ATOMIC = {"add", "min", "max", "inc", "dec", "and", "or", "xor", "exch", "cas"}


@emitter("atom", "red")
def atom(e: SegmentWriter, i: Instruction) -> None:
    """Emit code for atom and red on scalars and vectors. atom returns the values before the operation."""
    operation = next((p for p in i.parts[1:] if p in _ATOMIC), "")
    e.need(bool(operation), "this atomic operation is not supported")
    name = next((p for p in reversed(i.parts) if p in CODES), "")
    e.need(bool(name), "the atomic operation has no type")
    space, remote = state_space(i)
    is_wide = name == "b128"
    raw = "u64" if is_wide else unsigned(CODES[name])
    shift = 1 if i.parts[0] == "atom" else 0
    address = address_of(e, i.operands[shift])
    sources = []
    for operand in i.operands[shift + 1 :][: 2 if operation == "cas" else 1]:
        items = operand.items if isinstance(operand, Vec) else (operand,)
        if is_wide:
            whole = e.temporary(e.src(operand, "b128"))
            sources.append(f"({whole}[0], {whole}[1])")
        else:
            sources.append("(" + ", ".join(e.src(item, raw) for item in items) + ",)")
    text = (
        f"atomic(w, {e.at}, {address}, {space!r}, {operation!r}, {name!r}, ({', '.join(sources)},), {e.mask}, "
        f"{order_of(i)!r}, {remote or not space}, {bool(shift) and not isinstance(i.operands[0], Sink)})"
    )
    if not shift:
        e.line(text)
        return
    value = e.temporary(text)
    to = i.operands[0]
    if is_wide:
        e.dst(to, f"pack128({value}[0], {value}[1])", "b128")
        return
    for k, target in enumerate(to.items if isinstance(to, Vec) else (to,)):
        if not isinstance(target, Sink):
            e.dst(target, f"{value}[{k}]", raw)
