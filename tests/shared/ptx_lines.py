"""Kernels of a few PTX lines: registers filled from arrays, one instruction, its result stored."""

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
    """An entry ``k`` with pointer parameters p0.. and the lane in %lane; the body is PTX."""
    formal = ", ".join(f".param .u64 p{k}" for k in range(params))
    return load(
        f"{HEADER}{declarations}\n.visible .entry k({formal}) {{\n.reg .pred %p<16>; .reg .b16 %h<32>; "
        ".reg .b32 %r<64>; "
        f".reg .b64 %d<64>; .reg .f32 %f<32>; .reg .f64 %g<32>;\nmov.u32 %r63, %tid.x;\n{body}\nret;\n}}"
    )


def register(kind: str, number: int) -> str:
    """The register of a kind's width with a number."""
    return {8: "%h", 16: "%h", 32: "%r", 64: "%d"}[_BITS[kind]] + str(number)


def run(body: str, results: list[str], sources: list[tuple[str, Any]]) -> list[Any]:
    """The results (as raw unsigned integers) that ``body`` makes on 32 lanes.

    sources: (PTX type, 32 raw unsigned values) of registers 1, 2, ...; results: PTX types of registers 20, 21, ...;
    the registers' names say their width: %h 8 and 16 bits, %r 32, %d 64.
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
    """Lines that put the address of the lane's element of a parameter into %d42."""
    return [
        f"ld.param.u64 %d40, [p{parameter}];",
        f"mul.wide.u32 %d41, %r63, {bits // 8};",
        "add.u64 %d42, %d40, %d41;",
    ]


def apply(opcode: str, result: str, sources: list[tuple[str, Any]], tail: str = "") -> Any:
    """The result (as raw unsigned integers) of ``opcode d, a, b, ...{, tail}`` on 32 lanes.

    result: PTX type of d; sources: (PTX type, 32 raw unsigned values) of each operand.
    """
    names = [register(kind, k + 1) for k, (kind, _) in enumerate(sources)]
    (out,) = run(
        f"{opcode} {register(result, 20)}, {', '.join(names)}{', ' + tail if tail else ''};", [result], sources
    )
    return out
