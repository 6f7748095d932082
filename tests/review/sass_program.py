"""Small programs in SASS, written as nvdisasm prints them."""

from __future__ import annotations

from dataclasses import dataclass

from cudatma.review.sass import Code, parse_sass


@dataclass(frozen=True)
class Line:
    """An instruction of a small program: text, scoreboard of its result, scoreboards it waits for, label before it."""

    text: str
    write: int = 7
    wait: tuple[int, ...] = ()
    label: str = ""


def assemble(*lines: Line) -> str:
    """The program as nvdisasm prints it; line i stands at address 16 i."""
    printed = ['\t.section\t.text.k,"ax",@progbits', "k:"]
    for index, line in enumerate(lines):
        upper = line.write << 46 | 7 << 49 | sum(1 << 52 + scoreboard for scoreboard in set(line.wait))
        if line.label:
            printed.append(f"{line.label}:")
        printed.append(f"        /*{16 * index:04x}*/                   {line.text} ;      /* 0x{0x7919:016x} */")
        printed.append(f"                                                   /* 0x{upper:016x} */")
    return "\n".join(printed) + "\n"


def assembled(*lines: Line) -> Code:
    """The program's code."""
    (code,) = parse_sass(assemble(*lines))
    return code
