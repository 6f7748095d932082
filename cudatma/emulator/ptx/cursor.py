"""Walks over tokens: what every part of the parser needs."""

from __future__ import annotations

from cudatma.emulator.errors import PtxError
from cudatma.emulator.ptx.lexer import Token, tokenize

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
            raise self.error("the text ends in the middle of a statement")
        self.at += 1
        return token

    def accept(self, text: str) -> bool:
        """Step over the token if it is this one."""
        if self.token.text == text and self.token.kind != "string":
            self.at += 1
            return True
        return False

    def expect(self, text: str) -> Token:
        if self.token.text != text:
            raise self.error(f"expected `{text}`, found `{self.token.text or 'end of text'}`")
        return self.next()

    def expect_kind(self, kind: str) -> Token:
        if self.token.kind != kind:
            raise self.error(f"expected a {kind}, found `{self.token.text or 'end of text'}`")
        return self.next()

    def integer(self) -> int:
        """A constant integer, perhaps with a minus sign."""
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
        """Step over everything up to and with the next semicolon."""
        while not self.accept(";"):
            self.next()

    def skip_braces(self) -> None:
        """Step over a balanced ``{ ... }``."""
        self.expect("{")
        depth = 1
        while depth:
            text = self.next().text
            depth += (text == "{") - (text == "}")

    def error(self, message: str) -> PtxError:
        """An error at the current token, to be raised."""
        return PtxError(message, self.token.line)
