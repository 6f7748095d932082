"""Tokenizer of PTX text, and a cursor over the tokens.

Source: PTX ISA, "Syntax" (identifiers, constants, statements).
"""

from __future__ import annotations

import re
import string
import struct
from typing import NamedTuple

from cudatma.emulator.errors import PtxError
from cudatma.emulator.ptx.model import Imm

#: Maximum length of the PTX text in characters, which limits the memory that malicious input can use.
MAX_CHARS = 64 << 20
#: Maximum number of tokens and comments, which corresponds to about 25 MB of PTX from a compiler.
MAX_TOKENS = 1 << 22

#: Matches a newline, comment, string, number, word, .loc directive with its numbers, other directive, or any other
#: single character except blanks.
_TOKEN = re.compile(
    r"""\n|//[^\n]*|/\*.*?\*/
    |"(?:[^"\\\n]|\\.)*"
    |0[fF][0-9a-fA-F]{8}(?![\w])|0[dD][0-9a-fA-F]{16}(?![\w])|0[xX][0-9a-fA-F]+U?|0[bB][01]+U?
    |\d+\.\d*(?:[eE][+-]?\d+)?|\d+U?
    |[A-Za-z_$%][\w$]*(?:(?:\.|::)[\w$]+)*
    |\.loc(?:[ \t]+\d+){3}(?:[ \t]*,[ \t]*(?:function_name|inlined_at)\b[ \t\w$+]*)*
    |\.[A-Za-z_][\w]*(?:::\w+)*
    |[^ \t\r\f\v]""",
    re.VERBOSE | re.DOTALL,
)
#: Maps the first character of a token to the kind of the token.
_KINDS: dict[str, str] = {
    **dict.fromkeys(string.ascii_letters + "_$%", "word"),
    **dict.fromkeys(string.digits, "number"),
    **dict.fromkeys("-+*/(){}[],;:|!@=<>&^~?", "punct"),
    ".": "directive",
    '"': "string",
}


class Token(NamedTuple):
    """A token. ``kind`` is "string", "number", "word", "directive", "punct" or "end". ``line`` starts at 1."""

    kind: str
    text: str
    line: int


def tokenize(text: str) -> list[Token]:
    """Return all tokens of a module, followed by an "end" token.

    Raise PtxError if the text is too large or contains a character that cannot start a token.
    """
    if len(text) > MAX_CHARS:
        raise PtxError(f"the PTX text must have at most {MAX_CHARS} characters, got {len(text)}")
    text = text.rstrip("\0")
    pieces = _TOKEN.findall(text)
    if len(pieces) - pieces.count("\n") > MAX_TOKENS:
        raise PtxError(f"the PTX text must have at most {MAX_TOKENS} tokens")
    tokens: list[Token] = []
    new, line = tuple.__new__, 1  # Token() would take twice as long.
    for piece in pieces:
        kind = _KINDS.get(piece[0])
        if kind is None:
            if piece != "\n":
                raise PtxError(f"unexpected character {piece!r}", line)
            line += 1
        elif kind == "punct" and len(piece) > 1:  # The piece is a comment.
            line += piece.count("\n")
        elif piece in (".", '"'):
            raise PtxError(f"unexpected character {piece!r}", line)
        else:
            tokens.append(new(Token, (kind, piece, line)))
    tokens.append(Token("end", "", line))
    return tokens


def number(token: Token, negative: bool = False) -> Imm:
    """Return the immediate that a number token represents, with its sign inverted if ``negative`` is true."""
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
            raise PtxError(f"a constant must have at most 40 digits, got {len(digits)}", token.line)
        value_int = int(digits)
    return Imm(-value_int if negative else value_int)


TYPE_BYTES = {
    "pred": 1,
    **{f"{kind}8": 1 for kind in "bus"},
    **{f"{kind}16": 2 for kind in "busf"},
    **{f"{kind}32": 4 for kind in "busf"},
    **{f"{kind}64": 8 for kind in "busf"},
    "f16x2": 4,
    "bf16": 2,
    "bf16x2": 4,
    "tf32": 4,
    "b128": 16,
    "e4m3": 1,
    "e5m2": 1,
    "e4m3x2": 2,
    "e5m2x2": 2,
    "b1024": 128,
}


class Cursor:
    """A position in a token list."""

    def __init__(self, text: str) -> None:
        self.tokens = tokenize(text)
        self.at = 0

    @property
    def token(self) -> Token:
        return self.tokens[self.at]

    def peek(self, ahead: int = 1) -> Token:
        return self.tokens[min(self.at + ahead, len(self.tokens) - 1)]

    def next(self) -> Token:
        token = self.tokens[self.at]
        if token.kind == "end":
            raise self.error("the text ends inside a statement")
        self.at += 1
        return token

    def accept(self, text: str) -> bool:
        """If the text of the current token is ``text``, advance and return True."""
        token = self.tokens[self.at]
        if token.text == text and token.kind != "string":
            self.at += 1
            return True
        return False

    def expect(self, text: str) -> Token:
        token = self.tokens[self.at]
        if token.text != text:
            raise self.error(f"expected `{text}`, got `{token.text or 'end of text'}`")
        return self.next()

    def expect_kind(self, kind: str) -> Token:
        token = self.tokens[self.at]
        if token.kind != kind:
            raise self.error(f"expected a {kind}, got `{token.text or 'end of text'}`")
        return self.next()

    def integer(self) -> int:
        """Parse an integer constant with an optional minus sign."""
        negative = self.accept("-")
        token = self.expect_kind("number")
        text = token.text.rstrip("U")
        if len(text) > 40 or "." in text or text[:2].lower() in ("0f", "0d"):
            raise self.error(f"`{text[:40]}` is not an integer")
        try:
            value = int(text, 8 if len(text) > 1 and text.isdigit() and text[0] == "0" else 0)
        except ValueError:
            raise self.error(f"`{text}` is not an integer") from None
        return -value if negative else value

    def skip_statement(self) -> None:
        """Advance to the token after the next semicolon."""
        while not self.accept(";"):
            self.next()

    def skip_braces(self) -> None:
        """Advance to the token after a balanced ``{ ... }``."""
        self.expect("{")
        depth = 1
        while depth:
            text = self.next().text
            depth += (text == "{") - (text == "}")

    def error(self, message: str) -> PtxError:
        return PtxError(message, self.token.line)
