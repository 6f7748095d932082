"""128 bytes from any common source: the bytes, hex digits, a debugger's dump, a Python literal.

Nothing is executed, and a pickle is refused: loading one runs what it says. Every wrong input is a DescriptorError of
one line.
"""

from __future__ import annotations

import ast
import string
import warnings

from cudatma.descriptor.codec import DESCRIPTOR_BYTES
from cudatma.errors import DescriptorError
from cudatma.inspection.gdb import looks_like_dump, parse_dump, words_to_bytes

HEX_DIGITS = 2 * DESCRIPTOR_BYTES
#: More than this of a file, or of a line of a batch, is not read: a descriptor is 256 digits and some white space.
MAX_INPUT_BYTES = 1 << 16
_HEX_TEXT = frozenset((string.hexdigits + string.whitespace).encode())
_FORMS = f"{DESCRIPTOR_BYTES} bytes, {HEX_DIGITS} hex digits, a dump of cuda-gdb or a Python literal of bytes"
_REMEDY = "dump the CUtensorMap byte by byte, lowest address first"
#: Words of a literal list by how many there are: bytes each.
_LITERAL_WIDTHS = {128: 1, 64: 2, 32: 4, 16: 8}


def parse_hex(text: bytes) -> bytes:
    """128 bytes from 256 hex digits in memory order; white space and a leading 0x are skipped. DescriptorError."""
    if len(text) > MAX_INPUT_BYTES:
        raise DescriptorError("descriptor", f"more than {MAX_INPUT_BYTES} characters", f"{HEX_DIGITS} hex digits")
    digits = b"".join(text.split())
    digits = digits[2:] if digits[:2] in (b"0x", b"0X") else digits
    wrong = next((i for i, digit in enumerate(digits) if digit not in _HEX_TEXT), None)
    if wrong is not None:
        raise DescriptorError(f"digit {wrong}", ascii(chr(digits[wrong])), f"{HEX_DIGITS} hex digits", _REMEDY)
    if len(digits) != HEX_DIGITS:
        raise DescriptorError("descriptor", f"{len(digits)} hex digits", f"{HEX_DIGITS} hex digits", _REMEDY)
    return bytes.fromhex(digits.decode("ascii"))


def looks_like_hex(text: bytes) -> bool:
    """Whether the text looks like hex digits, of any number."""
    body = text.lstrip()
    body = body[2:] if body[:2] in (b"0x", b"0X") else body
    return bool(body) and _HEX_TEXT.issuperset(body)


def parse_content(content: bytes) -> bytes:
    """128 bytes from what a file holds, in any form that is known. DescriptorError.

    The bytes themselves; hex digits in memory order; what cuda-gdb prints for ``x/16gx``, ``x/32wx``, ``x/64hx``,
    ``x/128bx`` or ``p/x`` (gdb.py); the repr of bytes or a bytearray; a list of 16, 32, 64 or 128 integers.
    """
    if len(content) == DESCRIPTOR_BYTES:
        return content
    if len(content) > MAX_INPUT_BYTES:
        raise DescriptorError("descriptor", f"more than {MAX_INPUT_BYTES} bytes", _FORMS, _REMEDY)
    if looks_like_hex(content):
        return parse_hex(content)
    if _is_pickle(content):
        remedy = "a pickle can run anything when it is loaded: write bytes(tensor_map), or use --object MODULE:NAME"
        raise DescriptorError("descriptor", "a pickle", _FORMS, remedy)
    found = parse_text(content.decode("utf-8", "replace"))
    if found is not None:
        return found
    raise DescriptorError("descriptor", f"{len(content)} bytes", _FORMS, _REMEDY)


def parse_text(text: str) -> bytes | None:
    """128 bytes of a debugger's dump or a Python literal; None for text that is neither. DescriptorError."""
    return parse_dump(text) if looks_like_dump(text) else _parse_literal(text)


def _is_pickle(content: bytes) -> bool:
    """Protocols 2 and up begin with their number and end with a full stop."""
    return len(content) > 2 and content[0] == 0x80 and 2 <= content[1] <= 5 and content.endswith(b".")


def _parse_literal(text: str) -> bytes | None:
    """128 bytes of a literal, ``b'...'``, ``bytearray(b'...')``, a list or tuple of integers; None for other text."""
    body = text.strip()
    if body.startswith("bytearray(") and body.endswith(")"):
        body = body.removeprefix("bytearray(")[:-1]
    if body[:2] not in ("b'", 'b"', "B'", 'B"') and body[:1] not in ("[", "("):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escape sequences, on the way to an error or not
            value = ast.literal_eval(body)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise DescriptorError("descriptor", "a broken Python literal", _FORMS, _REMEDY) from None
    if isinstance(value, bytes):
        if len(value) != DESCRIPTOR_BYTES:
            raise DescriptorError("descriptor", f"{len(value)} bytes", f"{DESCRIPTOR_BYTES} bytes", _REMEDY)
        return value
    if not isinstance(value, list | tuple) or not all(type(word) is int for word in value):
        raise DescriptorError("descriptor", f"a literal of type {type(value).__name__}", _FORMS, _REMEDY)
    width = _LITERAL_WIDTHS.get(len(value))
    if width is None:
        raise DescriptorError("descriptor", f"{len(value)} integers", "16, 32, 64 or 128 integers", _REMEDY)
    return words_to_bytes(value, width)
