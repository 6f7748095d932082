"""Build fragments of mma.sync element by element from the PTX ISA's figures, and run one mma on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from ptx_lines import kernel

Place = Callable[[int, int], tuple[int, int]]


def a16(lane: int, i: int) -> tuple[int, int]:
    """m16n8k16, 16-bit: row = group for i in 0, 1, 4, 5, else group + 8; column = 2 thread + (i & 1), plus 8 for i >=
    4.
    """
    return lane // 4 + (0 if i in (0, 1, 4, 5) else 8), lane % 4 * 2 + (i & 1) + (8 if i >= 4 else 0)


def b16(lane: int, i: int) -> tuple[int, int]:
    return lane % 4 * 2 + (i & 1) + (8 if i >= 2 else 0), lane // 4


def a8(lane: int, i: int) -> tuple[int, int]:
    """m16n8k32, 8-bit: row = group for i < 4 and 8 <= i < 12, column = 4 thread + (i & 3), + 16 from i = 8."""
    return lane // 4 + (0 if i < 4 or 8 <= i < 12 else 8), lane % 4 * 4 + (i & 3) + (16 if i >= 8 else 0)


def b8(lane: int, i: int) -> tuple[int, int]:
    return lane % 4 * 4 + (i & 3) + (16 if i >= 4 else 0), lane // 4


def a32(lane: int, i: int) -> tuple[int, int]:
    """m16n8k8, tf32: a0 (g, t), a1 (g + 8, t), a2 (g, t + 4), a3 (g + 8, t + 4)."""
    return lane // 4 + 8 * (i & 1), lane % 4 + 4 * (i >> 1)


def b32(lane: int, i: int) -> tuple[int, int]:
    return lane % 4 + 4 * i, lane // 4


def c4(lane: int, i: int) -> tuple[int, int]:
    return lane // 4 + 8 * (i >> 1), lane % 4 * 2 + (i & 1)


def fragment(matrix: Any, place: Place, count: int, width: int) -> Any:
    """Return raw words of ``width`` bytes, shape (registers, 32)."""
    out = np.zeros((32, count), matrix.dtype)
    for lane in range(32):
        for i in range(count):
            out[lane, i] = matrix[place(lane, i)]
    return np.ascontiguousarray(out).view(f"u{width}").T.copy()


def run_mma(opcode: str, a: Any, b: Any, c: Any, width: int = 4, extra: Any = (), tail: str = "") -> Any:
    """Return the raw results of one mma on raw fragments, shape (registers, 32); c and d have the same registers.

    ``extra`` are further (32,) words, which ``tail`` (the operands after c) names {0}, {1}, ...
    """
    letter, bits = ("%r", 32) if width == 4 else ("%d", 64)
    lines = [f"mul.wide.u32 %d62, %r63, {width};"]
    names: list[list[str]] = []
    at = 1
    parts = [a, b, c, *(np.asarray(words, np.uint32)[None] for words in extra)]
    for k, part in enumerate(parts):
        names.append([f"{letter}{at + i}" for i in range(len(part))])
        lines.append(f"ld.param.u64 %d61, [p{k}];\nadd.u64 %d61, %d61, %d62;")
        lines += [f"ld.global.b{bits} {name}, [%d61+{32 * width * i}];" for i, name in enumerate(names[-1])]
        at += len(part)
    to = [f"{letter}{at + i}" for i in range(len(c))]
    groups = ", ".join("{" + ", ".join(group) + "}" for group in (to, *names[:3]))
    behind = f", {tail.format(*(name[0] for name in names[3:]))}" if tail else ""
    lines.append(f"{opcode} {groups}{behind};")
    lines.append(f"ld.param.u64 %d61, [p{len(parts)}];\nadd.u64 %d61, %d61, %d62;")
    lines += [f"st.global.b{bits} [%d61+{32 * width * i}], {name};" for i, name in enumerate(to)]
    out = np.zeros_like(c)
    assert kernel("\n".join(lines), len(parts) + 1).launch("k", 1, 32, (*parts, out)).is_clean
    return out
