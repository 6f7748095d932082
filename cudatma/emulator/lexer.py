"""PTX text to tokens. Source: PTX ISA, "Syntax": identifiers, constants, statements."""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

from cudatma.emulator.errors import PtxError
from cudatma.emulator.model import Imm

#: Most characters of PTX that are read; larger text is refused instead of filling the memory.
MAX_CHARS = 64 << 20

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\f\v]+|//[^\n]*)
    |(?P<newline>\n)
    |(?P<comment>/\*.*?\*/)
    |(?P<string>"(?:[^"\\\n]|\\.)*")
    |(?P<number>0[fF][0-9a-fA-F]{8}(?![\w])|0[dD][0-9a-fA-F]{16}(?![\w])|0[xX][0-9a-fA-F]+U?|0[bB][01]+U?
        |\d+\.\d*(?:[eE][+-]?\d+)?|\d+U?)
    |(?P<word>[A-Za-z_$%][\w$]*(?:(?:\.|::)[\w$]+)*)
    |(?P<directive>\.[A-Za-z_][\w]*(?:::\w+)*)
    |(?P<punct>[-+*/(){}\[\],;:|!@=<>&^~?])""",
    re.VERBOSE | re.DOTALL,
)


class Token(NamedTuple):
    """kind: "string", "number", "word", "directive", "punct" or "end"; line: from 1."""

    kind: str
    text: str
    line: int


def tokenize(text: str) -> list[Token]:
    """All tokens of a module, with an "end" token last. Raises PtxError at a character that no token begins with."""
    if len(text) > MAX_CHARS:
        raise PtxError(f"{len(text)} characters; at most {MAX_CHARS} are read")
    text = text.rstrip("\0")
    tokens: list[Token] = []
    line, position, end = 1, 0, len(text)
    match = _TOKEN.match
    while position < end:
        found = match(text, position)
        if found is None:
            raise PtxError(f"unexpected character {text[position]!r}", line)
        kind = found.lastgroup or ""
        if kind == "newline":
            line += 1
        elif kind == "comment":
            line += found.group().count("\n")
        elif kind != "space":
            tokens.append(Token(kind, found.group(), line))
        position = found.end()
    tokens.append(Token("end", "", line))
    return tokens


def number(token: Token, negative: bool = False) -> Imm:
    """The immediate that a number token spells; a minus sign in front is applied to it."""
    text = token.text
    if text[:2] in ("0f", "0F"):
        bits = int(text[2:], 16)
        return Imm(bits ^ (1 << 31) if negative else bits, "f32")
    if text[:2] in ("0d", "0D"):
        bits = int(text[2:], 16)
        return Imm(bits ^ (1 << 63) if negative else bits, "f64")
    if "." in text:
        value = -float(text) if negative else float(text)
        return Imm(int.from_bytes(struct.pack("<d", value), "little"), "f64")
    digits = text.rstrip("U")
    if digits[:2] in ("0x", "0X"):
        value_int = int(digits, 16)
    elif digits[:2] in ("0b", "0B"):
        value_int = int(digits, 2)
    elif len(digits) > 1 and digits[0] == "0" and all(c in "01234567" for c in digits):
        value_int = int(digits, 8)
    else:
        if len(digits) > 40:
            raise PtxError(f"a constant of {len(digits)} digits", token.line)
        value_int = int(digits)
    return Imm(-value_int if negative else value_int)
