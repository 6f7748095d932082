"""Parsers for tensor maps in the form of bytes, hex digits, a debugger's dump or a Python literal.

The parsers never execute code. They reject pickles, because loading a pickle can run code. Every invalid input raises a
DescriptorError with a one-line message.

A dump (``x/16gx &map``, ``x/32wx``, ``x/64hx``, ``x/128bx``, ``p/x map``) may contain addresses, symbols, prompts and
line breaks, even inside a word. The number of words determines the word size. Addresses must be consecutive so that a
missing line is detected. Source: GDB manual, "Examining Memory" and "Output Formats".
"""

from __future__ import annotations

import ast
import ctypes
import importlib
import re
import string
import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from cudatma.descriptor.codec import DESCRIPTOR_BYTES
from cudatma.descriptor.encode import TensorMap
from cudatma.descriptor.spec import AnySpec, Im2colSpec, Im2colWideSpec, TiledSpec
from cudatma.errors import ArgumentError, ArgumentTypeError, DescriptorError, check

#: Maps the number of words in a dump to the number of bytes per word.
WIDTHS = {16: 8, 32: 4, 64: 2, 128: 1}
_COUNTS = "16 words of 8 bytes, 32 words of 4 bytes, 64 words of 2 bytes or 128 words of 1 byte"
_PRINT_IT = "print the tensor map with x/16gx or x/32wx"
_PROMPT = re.compile(r"^[^\S\n]*(?:>>>|\((?:cuda-)?gdb\))[^\n]*$", re.MULTILINE)
#: An item of a dump without white space: a word, or an address with its symbol.
_ITEM = re.compile(r"0x(?P<digits>(?:(?!0x)[0-9a-fA-F])+)(?P<address>(?:<[^:]*(?:::[^:]*)*>)?:)?")
_ARRAY = re.compile(r"\{([^{}]*)\}")
_DECIMAL = re.compile(r"-?\d+(?: <repeats \d+ times>)?")
_ENTRY = re.compile(r"(?P<word>0x[0-9a-fA-F]+|\d+)(?:\s*<repeats (?P<times>\d+) times>)?")


def looks_like_dump(text: str) -> bool:
    """Return whether a text looks like a debugger's dump.

    A dump contains several words with the prefix 0x, or an array of words in braces.
    """
    array = _ARRAY.search(text)
    return text.count("0x") > 1 or (array is not None and ("0x" in text or _is_decimal(array[1])))


def parse_dump(text: str) -> bytes:
    """Return the 128 bytes of a dump.

    Raises DescriptorError if the number or width of the words is invalid, if addresses are not consecutive, or if the
    text contains anything else.
    """
    body = _PROMPT.sub("", text)
    array = _ARRAY.search(body)
    if array is not None:
        return _parse_array(array[1])
    body = "".join(body.split())
    words: list[int] = []
    addresses: list[tuple[int, int]] = []  # Each address and the number of words before it.
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
        rest = ascii(body[at : at + 12])
        raise DescriptorError(
            "dump",
            f"{rest} after {len(words)} words",
            "a sequence of addresses and words with the prefix 0x",
            _PRINT_IT,
        )
    width = _width(len(words))
    for (low, before), (high, after) in pairwise(addresses):
        if high - low != (after - before) * width:
            raise DescriptorError(
                "dump",
                f"address {hex(high)} after {hex(low)}",
                "contiguous",
                f"add the missing line for {hex(low + (after - before) * width)}",
            )
    return words_to_bytes(words, width)


def _is_decimal(inside: str) -> bool:
    """Return whether the words between braces are decimal, as in the output of ``p`` without ``/x``."""
    return all(_DECIMAL.fullmatch(part.strip()) for part in inside.split(","))


def _parse_array(inside: str) -> bytes:
    """Return the bytes of an array, given without its braces, such as ``0x1, 0x2, 0x0 <repeats 14 times>``."""
    if _is_decimal(inside):
        got = f"decimal words, {inside.strip()[:20]!a}"
        raise DescriptorError("dump", got, "a sequence of words with the prefix 0x", "print the map with p/x")
    words: list[int] = []
    for part in inside.split(","):
        entry = _ENTRY.fullmatch(part.strip())
        if entry is None:
            raise DescriptorError(
                "dump",
                ascii(part.strip()[:20]),
                "a list of hexadecimal words, each optionally followed by <repeats N times>",
                _PRINT_IT,
            )
        times = int(entry["times"] or 1) if len(entry["times"] or "") < 4 else DESCRIPTOR_BYTES + 1
        # int() rejects strings of thousands of digits. Valid words are much shorter.
        if len(entry["word"]) > 20 or len(words) + times > DESCRIPTOR_BYTES:
            got = f"a word that is too large or repeated too often: {part.strip()[:20]!a}"
            raise DescriptorError("dump", got, _COUNTS, _PRINT_IT)
        words += [int(entry["word"], 0 if entry["word"].startswith("0x") else 10)] * times
    return words_to_bytes(words, _width(len(words)))


def _width(count: int) -> int:
    if count not in WIDTHS:
        raise DescriptorError("dump", f"{count} words", _COUNTS, _PRINT_IT)
    return WIDTHS[count]


def words_to_bytes(words: Sequence[int], width: int) -> bytes:
    """Return little-endian words as bytes. Raises DescriptorError if a word exceeds ``width`` bytes."""
    for index, word in enumerate(words):
        if not 0 <= word < 1 << 8 * width:
            shown = hex(word) if abs(word) < 1 << 128 else "a number of more than 128 bits"
            raise DescriptorError(
                f"word {index}",
                shown,
                f"{'an' if width == 8 else 'a'} {width}-byte word (the input has {len(words)} words)",
                _PRINT_IT,
            )
    return b"".join(word.to_bytes(width, "little") for word in words)


HEX_DIGITS = 2 * DESCRIPTOR_BYTES
#: Maximum size of a file, or of a line in a batch. A tensor map has 256 hex digits and some white space.
MAX_INPUT_BYTES = 1 << 16
_HEX_TEXT = frozenset((string.hexdigits + string.whitespace).encode())
_FORMS = f"{DESCRIPTOR_BYTES} bytes, {HEX_DIGITS} hex digits, a cuda-gdb dump or a Python bytes literal"
_REMEDY = "dump the CUtensorMap byte by byte, lowest address first"
#: Maps the number of words in a literal list to the number of bytes per word.
_LITERAL_WIDTHS = {128: 1, 64: 2, 32: 4, 16: 8}


def parse_hex(text: bytes) -> bytes:
    """Return the 128 bytes that 256 hex digits in memory order encode. White space and a prefix 0x are ignored.

    Raises DescriptorError for any other text.
    """
    if len(text) > MAX_INPUT_BYTES:
        raise DescriptorError(
            "descriptor", f"more than {MAX_INPUT_BYTES} characters", f"a string of {HEX_DIGITS} hex digits"
        )
    digits = b"".join(text.split())
    digits = digits[2:] if digits[:2] in (b"0x", b"0X") else digits
    wrong = next((i for i, digit in enumerate(digits) if digit not in _HEX_TEXT), None)
    if wrong is not None:
        raise DescriptorError(f"digit {wrong}", ascii(chr(digits[wrong])), "a hex digit", _REMEDY)
    if len(digits) != HEX_DIGITS:
        raise DescriptorError(
            "descriptor", f"{len(digits)} hex digits", f"a string of {HEX_DIGITS} hex digits", _REMEDY
        )
    return bytes.fromhex(digits.decode("ascii"))


def looks_like_hex(text: bytes) -> bool:
    """Return whether a text consists of hex digits."""
    body = text.lstrip()
    body = body[2:] if body[:2] in (b"0x", b"0X") else body
    return bool(body) and _HEX_TEXT.issuperset(body)


def parse_content(content: bytes) -> bytes:
    """Return the 128 bytes of a map from the contents of a file in any supported format.

    The formats are:

    - the 128 bytes themselves
    - hex digits in memory order
    - the output of cuda-gdb for ``x/16gx``, ``x/32wx``, ``x/64hx``, ``x/128bx`` or ``p/x``
    - the repr of bytes or a bytearray
    - a list of 16, 32, 64 or 128 integers

    Raises DescriptorError for any other format.
    """
    if len(content) == DESCRIPTOR_BYTES:
        return content
    if len(content) > MAX_INPUT_BYTES:
        raise DescriptorError("descriptor", f"more than {MAX_INPUT_BYTES} bytes", _FORMS, _REMEDY)
    if looks_like_hex(content):
        return parse_hex(content)
    if _is_pickle(content):
        remedy = "write bytes(tensor_map) to the file instead of a pickle, or use --object MODULE:NAME"
        raise DescriptorError("descriptor", "a pickle", _FORMS, remedy)
    data = parse_text(content.decode("utf-8", "replace"))
    if data is not None:
        return data
    raise DescriptorError("descriptor", f"{len(content)} bytes", _FORMS, _REMEDY)


def parse_text(text: str) -> bytes | None:
    """Return the 128 bytes of a debugger's dump or a Python literal, or None for other text.

    Raises DescriptorError for an invalid dump or literal.
    """
    return parse_dump(text) if looks_like_dump(text) else _parse_literal(text)


def _is_pickle(content: bytes) -> bool:
    """Return whether the first bytes and the final period indicate a pickle of protocol 2 or later."""
    return len(content) > 2 and content[0] == 0x80 and 2 <= content[1] <= 5 and content.endswith(b".")


def _parse_literal(text: str) -> bytes | None:
    """Return the bytes of ``b'...'``, ``bytearray(b'...')``, or a list or tuple of integers, or None for other text."""
    body = text.strip()
    if body.startswith("bytearray(") and body.endswith(")"):
        body = body.removeprefix("bytearray(")[:-1]
    if body[:2] not in ("b'", 'b"', "B'", 'B"') and body[:1] not in ("[", "("):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Do not warn about invalid escape sequences.
            value = ast.literal_eval(body)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise DescriptorError("descriptor", "an invalid Python literal", _FORMS, _REMEDY) from None
    if isinstance(value, bytes):
        if len(value) != DESCRIPTOR_BYTES:
            raise DescriptorError("descriptor", f"{len(value)} bytes", f"{DESCRIPTOR_BYTES} bytes", _REMEDY)
        return value
    if not isinstance(value, list | tuple) or not all(type(word) is int for word in value):
        raise DescriptorError("descriptor", f"a literal of type {type(value).__name__}", _FORMS, _REMEDY)
    width = _LITERAL_WIDTHS.get(len(value))
    if width is None:
        raise DescriptorError("descriptor", f"{len(value)} integers", "a list of 16, 32, 64 or 128 integers", _REMEDY)
    return words_to_bytes(value, width)


_ACCEPTED = "a TensorMap, a spec, 128 bytes, an array of 128 bytes, text in a supported format, or a device pointer"


def content_of(source: object, device: int | None = None) -> bytes | AnySpec:
    """Return the 128 bytes of a tensor map, or the object itself if it is a spec.

    ``source`` may be any of the following:

    - a TensorMap, TiledSpec, Im2colSpec or Im2colWideSpec
    - bytes, a bytearray, a memoryview or a ctypes object
    - a CuPy, torch or NumPy array of 128 bytes that contains the map
    - a CUtensorMap of cuda.bindings
    - text in any format that this module parses
    - a pointer (int) to memory on CUDA device ``device``

    Raises ArgumentTypeError, ArgumentError, DescriptorError or DriverError if the map cannot be read.
    """
    if isinstance(source, bool) or source is None:
        raise ArgumentTypeError("source", repr(source), _ACCEPTED)
    if isinstance(source, TensorMap):
        return bytes(source)
    if isinstance(source, TiledSpec | Im2colSpec | Im2colWideSpec):
        return source
    if isinstance(source, int):
        return _at_pointer(source, device)
    if device is not None:
        raise ArgumentError("device", device, "None unless the source is a pointer", "omit device")
    if isinstance(source, str):
        return parse_content(source.encode("utf-8", "surrogatepass"))
    words = getattr(source, "opaque", None)
    if isinstance(words, Sequence):  # A CUtensorMap of cuda.bindings has sixteen words.
        return b"".join(int(word).to_bytes(8, "little") for word in words)
    if hasattr(source, "__array_interface__") or not _has_buffer(source):
        return _of_array(source)
    data = memoryview(source).tobytes()  # type: ignore[arg-type]
    # Contents of any other length may be text.
    return data if len(data) == DESCRIPTOR_BYTES else parse_content(data)


def load_object(name: str) -> object:
    """Import a module and return the object that ``module:attribute`` names. Pass only names of trusted modules.

    Raises ArgumentError if the name has another form, or if the module or the attribute does not exist.
    """
    module, separator, attribute = name.partition(":")
    if not separator or not all(part.isidentifier() for part in (*module.split("."), *attribute.split("."))):
        raise ArgumentError("--object", ascii(name), "in the form MODULE:NAME, such as my_kernels.gemm:weight_map")
    try:
        value: Any = importlib.import_module(module)
        for part in attribute.split("."):
            value = getattr(value, part)
    except (Exception, SystemExit) as error:  # An import may raise any exception.
        detail = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ArgumentError("--object", f"{name!a} ({detail})", "an attribute of an importable module") from error
    return value


def _has_buffer(source: object) -> bool:
    try:
        memoryview(source)  # type: ignore[arg-type]
    except (TypeError, BufferError):
        return False
    return True


def _of_array(source: object) -> bytes:
    """Return the bytes of an array that contains a tensor map."""
    from cudatma.arrays import describe

    try:
        info = describe(source, "source")
    except ArgumentTypeError as error:
        raise ArgumentTypeError("source", type(source).__name__, _ACCEPTED, error.remedy) from error
    size = info.size_elems * info.dtype.itemsize
    if size != DESCRIPTOR_BYTES or not info.is_contiguous:
        raise DescriptorError(
            "source",
            f"{'an' if info.is_contiguous else 'a noncontiguous'} array of {size} bytes",
            f"a contiguous array of {DESCRIPTOR_BYTES} bytes that contains a tensor map",
            "pass TensorMap.from_array(array, box) to inspect a map over the array",
        )
    if info.device is None:
        return ctypes.string_at(info.pointer, DESCRIPTOR_BYTES)
    return _at_pointer(info.pointer, info.device)


def _at_pointer(pointer: int, device: int | None) -> bytes:
    """Copy 128 bytes from device memory. [CUDA driver API, cuMemcpyDtoH]"""
    if device is None:
        raise ArgumentError("device", None, "the CUDA ordinal of the device that holds the memory")
    if isinstance(device, bool) or not isinstance(device, int) or device < 0:
        raise ArgumentError("device", device, "a nonnegative CUDA ordinal")
    if not 0 < pointer < 1 << 64:
        raise ArgumentError("source", hex(pointer), "a device address")
    from cudatma import context

    raw = ctypes.create_string_buffer(DESCRIPTOR_BYTES)
    with context.using(device) as driver:
        check(driver.cuCtxSynchronize(), "cuCtxSynchronize")
        check(driver.cuMemcpyDtoH(ctypes.addressof(raw), pointer, DESCRIPTOR_BYTES), "cuMemcpyDtoH")
    return raw.raw
