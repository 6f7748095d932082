"""What cuda-gdb prints of a CUtensorMap: ``x/16gx &map``, ``x/32wx``, ``x/64hx``, ``x/128bx``, and ``p/x map``.

Addresses, symbols, prompts and line breaks are taken off, a break inside of a word too; the size of the words follows
from their number. Where addresses are printed they have to go up as the words do, so that a lost line is noticed.
Source: GDB manual, "Examining Memory" and "Output Formats".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from cudatma.descriptor.codec import DESCRIPTOR_BYTES
from cudatma.errors import DescriptorError

#: Words of a dump by how many there are: bytes each.
WIDTHS = {16: 8, 32: 4, 64: 2, 128: 1}
_COUNTS = "16 words of 8 bytes, 32 of 4, 64 of 2 or 128 of 1"
_REMEDY = "print it with x/16gx or x/32wx"
_PROMPT = re.compile(r"^[^\S\n]*(?:>>>|\((?:cuda-)?gdb\))[^\n]*$", re.MULTILINE)
#: One item of a dump whose white space is gone: an address with its symbol, or a word.
_ITEM = re.compile(r"0x(?P<digits>(?:(?!0x)[0-9a-fA-F])+)(?P<address>(?:<[^:]*(?:::[^:]*)*>)?:)?")
_ARRAY = re.compile(r"\{([^{}]*)\}")
_DECIMAL = re.compile(r"-?\d+(?: <repeats \d+ times>)?")
_ENTRY = re.compile(r"(?P<word>0x[0-9a-fA-F]+|\d+)(?:\s*<repeats (?P<times>\d+) times>)?")


def looks_like_dump(text: str) -> bool:
    """Whether the text looks like a debugger's dump: words with 0x and addresses or braces around them, or many
    words."""
    array = _ARRAY.search(text)
    return text.count("0x") > 1 or (array is not None and ("0x" in text or _is_decimal(array[1])))


def parse_dump(text: str) -> bytes:
    """The 128 bytes of a dump. DescriptorError where words are missing, too many or too wide, addresses do not follow
    each other, or something else is between the words."""
    body = _PROMPT.sub("", text)
    array = _ARRAY.search(body)
    if array is not None:
        return _parse_array(array[1])
    body = "".join(body.split())
    words: list[int] = []
    addresses: list[tuple[int, int]] = []  # address, words before it
    at = 0
    for item in _ITEM.finditer(body):
        if item.start() != at:
            break
        at = item.end()
        number = int(item["digits"], 16)
        if item["address"]:
            addresses.append((number, len(words)))
        else:
            words.append(number)
    if at != len(body):
        found = ascii(body[at : at + 12])
        raise DescriptorError("dump", f"{found} after {len(words)} words", "addresses and words with 0x", _REMEDY)
    width = _width(len(words))
    for (low, before), (high, after) in pairwise(addresses):
        if high - low != (after - before) * width:
            raise DescriptorError(
                "dump", f"{hex(high)} after {hex(low)}", f"{hex(low + (after - before) * width)}", "a line is missing"
            )
    return words_to_bytes(words, width)


def _is_decimal(inside: str) -> bool:
    """Whether the words between braces are what ``p`` prints without ``/x``."""
    return all(_DECIMAL.fullmatch(part.strip()) for part in inside.split(","))


def _parse_array(inside: str) -> bytes:
    """``{0x1, 0x2, 0x0 <repeats 14 times>}``, what is between the braces."""
    if _is_decimal(inside):
        got = f"decimal words, {inside.strip()[:20]!a}"
        raise DescriptorError("dump", got, "words with 0x", "print it with p/x")
    words: list[int] = []
    for part in inside.split(","):
        entry = _ENTRY.fullmatch(part.strip())
        if entry is None:
            raise DescriptorError("dump", ascii(part.strip()[:20]), "words, or words <repeats N times>", _REMEDY)
        times = int(entry["times"] or 1) if len(entry["times"] or "") < 4 else DESCRIPTOR_BYTES + 1
        # int() refuses text of thousands of digits; no word is as wide.
        if len(entry["word"]) > 20 or len(words) + times > DESCRIPTOR_BYTES:
            raise DescriptorError("dump", ascii(part.strip()[:20]), _COUNTS, _REMEDY)
        words += [int(entry["word"], 0 if entry["word"].startswith("0x") else 10)] * times
    return words_to_bytes(words, _width(len(words)))


def _width(count: int) -> int:
    if count not in WIDTHS:
        raise DescriptorError("dump", f"{count} words", _COUNTS, _REMEDY)
    return WIDTHS[count]


def words_to_bytes(words: Sequence[int], width: int) -> bytes:
    """Little-endian words as bytes; DescriptorError that names a word which does not fit into ``width`` bytes."""
    for index, word in enumerate(words):
        if not 0 <= word < 1 << 8 * width:
            shown = hex(word) if abs(word) < 1 << 128 else "a number of more than 128 bits"
            raise DescriptorError(f"word {index}", shown, f"{width} bytes where there are {len(words)} words", _REMEDY)
    return b"".join(word.to_bytes(width, "little") for word in words)
