"""Kernels of a few PTX lines, which load registers from arrays, run one instruction, and store its result."""

from __future__ import annotations

from typing import Any

import numpy as np

from cudatma.emulator import EmulatedModule, load

HEADER = ".version 8.6\n.target sm_90a\n.address_size 64\n"
_BITS = {
    "u8": 8,
    "b8": 8,
    "s8": 8,
    "b16": 16,
    "u16": 16,
    "s16": 16,
    "f16": 16,
    "bf16": 16,
    "b32": 32,
    "u32": 32,
    "s32": 32,
    "f32": 32,
    "f16x2": 32,
    "bf16x2": 32,
    "b64": 64,
    "u64": 64,
    "s64": 64,
    "f64": 64,
}


def kernel(body: str, params: int = 4, declarations: str = "") -> EmulatedModule:
    """Return an entry ``k`` with pointer parameters p0.., the lane in %lane, and a body of PTX."""
    formal = ", ".join(f".param .u64 p{k}" for k in range(params))
    return load(
        f"{HEADER}{declarations}\n.visible .entry k({formal}) {{\n.reg .pred %p<16>; .reg .b16 %h<32>; "
        ".reg .b32 %r<64>; "
        f".reg .b64 %d<64>; .reg .f32 %f<32>; .reg .f64 %g<32>;\nmov.u32 %r63, %tid.x;\n{body}\nret;\n}}"
    )


def register(kind: str, number: int) -> str:
    """Return the name of a register with the width of this type."""
    return {8: "%h", 16: "%h", 32: "%r", 64: "%d"}[_BITS[kind]] + str(number)


def run(body: str, results: list[str], sources: list[tuple[str, Any]]) -> list[Any]:
    """Run ``body`` on 32 lanes and return its results as unsigned integers.

    ``sources`` has the PTX type and 32 unsigned values of registers 1, 2, and so on. ``results`` has the PTX types of
    registers 20, 21, and so on. Names of registers begin with %h (8 and 16 bits), %r (32 bits) or %d (64 bits).
    """
    lines = []
    for k, (kind, _) in enumerate(sources):
        move = {8: "u8", 16: "b16", 32: "b32", 64: "b64"}[_BITS[kind]]
        lines += [*_place(k, _BITS[kind]), f"ld.global.{move} {register(kind, k + 1)}, [%d42];"]
    lines.append(body)
    for k, kind in enumerate(results):
        lines += _place(len(sources) + k, _BITS[kind])
        lines.append(f"st.global.b{_BITS[kind]} [%d42], {register(kind, 20 + k)};")
    arrays = [np.asarray(values, dtype=f"u{_BITS[kind] // 8}") for kind, values in sources]
    out = [np.zeros(32, f"u{_BITS[kind] // 8}") for kind in results]
    kernel("\n".join(lines), len(arrays) + len(out)).launch("k", 1, 32, (*arrays, *out), schedules=1)
    return out


def _place(parameter: int, bits: int) -> list[str]:
    """Return lines that compute the address of the lane's element of a parameter in %d42."""
    return [
        f"ld.param.u64 %d40, [p{parameter}];",
        f"mul.wide.u32 %d41, %r63, {bits // 8};",
        "add.u64 %d42, %d40, %d41;",
    ]


def apply(opcode: str, result: str, sources: list[tuple[str, Any]], tail: str = "") -> Any:
    """Return the result of ``opcode d, a, b, ...{, tail}`` on 32 lanes as unsigned integers.

    ``result`` is the PTX type of d. ``sources`` has the PTX type and 32 unsigned values of each operand.
    """
    names = [register(kind, k + 1) for k, (kind, _) in enumerate(sources)]
    (out,) = run(
        f"{opcode} {register(result, 20)}, {', '.join(names)}{', ' + tail if tail else ''};", [result], sources
    )
    return out
