"""Decode the 128 bytes of a tensor map: what it describes, and what a box of it costs in shared memory.

SOURCE is 256 hex digits in memory order, a file that holds them or the 128 bytes themselves, or - for standard input.
Everything is in TMA order, innermost dimension first.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # as a file it is the subcommand; the checkout need not be installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from cudatma.cli import main as cudatma_main

    raise SystemExit(cudatma_main(["inspect", *sys.argv[1:]]))

import argparse
import json
import os
import string
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO

from cudatma.descriptor.codec import DESCRIPTOR_BYTES, decode
from cudatma.descriptor.spec import TiledSpec
from cudatma.errors import ArgumentError, DescriptorError

EXAMPLES = """examples:
  cudatma inspect descriptor.bin
  cudatma inspect --json 0000e05b9d7f0000b021...
  cuda_program | cudatma inspect -
  cudatma inspect --batch --json - < one_descriptor_a_line.txt
"""

HEX_DIGITS = 2 * DESCRIPTOR_BYTES
#: More than this of a file, or of a line of a batch, is not read: a descriptor is 256 digits and some white space.
MAX_INPUT_BYTES = 1 << 16
_HEX_TEXT = frozenset((string.hexdigits + string.whitespace).encode())
_REMEDY = "dump the CUtensorMap byte by byte, lowest address first"


def describe_descriptor(data: bytes) -> dict[str, Any]:
    """The fields of a tensor map as plain data.

    data: its 128 bytes. Lists are in TMA order; ``strides`` are rank - 1 pitches in bytes, ``shape``, ``box`` and the
    corners are in elements. ``box`` is None for im2col, which has corners, channels and pixels instead.
    ``unknown_bits``: numbers of the set bits that no field accounts for. Raises DescriptorError.
    """
    decoded = decode(data)
    spec = decoded.spec
    fields: dict[str, Any] = {
        "kind": "tiled" if isinstance(spec, TiledSpec) else "im2col",
        "dtype": spec.dtype.name,
        "rank": spec.rank,
        "address": spec.address,
        "shape": list(spec.dims),
        "strides": list(spec.strides_bytes),
        "box": list(spec.box) if isinstance(spec, TiledSpec) else None,
        "element_strides": list(spec.element_strides),
        "interleave": spec.interleave.label,
        "swizzle": spec.swizzle.label,
        "l2_promotion": spec.l2_promotion.label,
        "oob_fill": spec.oob_fill.label,
    }
    if not isinstance(spec, TiledSpec):
        fields |= {
            "lower_corner": list(spec.lower_corner),
            "upper_corner": list(spec.upper_corner),
            "channels_per_pixel": spec.channels_per_pixel,
            "pixels_per_column": spec.pixels_per_column,
        }
    return fields | {
        "expected_bytes": spec.expected_bytes,
        "footprint_bytes": spec.footprint_bytes,
        "smem_alignment_bytes": spec.smem_alignment_bytes,
        "version": decoded.version,
        "smem_bytes": decoded.smem_bytes,
        "smem_pattern": decoded.smem_pattern,
        "unknown_bits": [bit for bit in range(8 * DESCRIPTOR_BYTES) if decoded.unknown >> bit & 1],
    }


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


def _looks_like_hex(text: bytes) -> bool:
    """Whether somebody meant hex digits, however many."""
    body = text.lstrip()
    body = body[2:] if body[:2] in (b"0x", b"0X") else body
    return bool(body) and _HEX_TEXT.issuperset(body)


def parse_content(content: bytes) -> bytes:
    """128 bytes from what a file holds: the bytes themselves, or hex digits. DescriptorError."""
    if len(content) == DESCRIPTOR_BYTES:
        return content
    if _looks_like_hex(content):
        return parse_hex(content)
    shown = f"{len(content)} bytes" if len(content) <= MAX_INPUT_BYTES else f"more than {MAX_INPUT_BYTES} bytes"
    raise DescriptorError("descriptor", shown, f"{DESCRIPTOR_BYTES} bytes or {HEX_DIGITS} hex digits", _REMEDY)


def read_source(source: str) -> bytes:
    """The 128 bytes that SOURCE names. Raises DescriptorError, or ArgumentError for a file that cannot be read."""
    text = source.encode("ascii", "replace")
    is_hex = _looks_like_hex(text)
    # No file name has as many characters as a descriptor has digits, so digits that are complete are never a file.
    if source == "-" or (os.path.lexists(source) and not (is_hex and len(text) >= HEX_DIGITS)):
        with open_source(source, "SOURCE") as stream:
            content = stream.read(MAX_INPUT_BYTES + 1)
        return parse_content(content)
    if is_hex:
        return parse_hex(text)
    shown = source if len(source) <= 60 else f"{source[:60]}..."
    raise ArgumentError("SOURCE", ascii(shown), f"{HEX_DIGITS} hex digits, a file that exists, or -")


@contextmanager
def open_source(source: str, field: str) -> Iterator[BinaryIO]:
    """The bytes of standard input for ``-``, else of a file. ArgumentError that names ``field`` where it cannot be
    opened, or read in the body of the ``with``."""
    try:
        if source != "-":
            with open(source, "rb") as stream:
                yield stream
        elif sys.stdin is None:
            raise OSError("standard input is closed")
        else:
            yield sys.stdin.buffer
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        raise ArgumentError(field, ascii(source), "a file that can be read, or -", str(error)) from error


def _lines(source: str) -> Iterator[bytes]:
    """Lines without their end; one longer than MAX_INPUT_BYTES is cut, but stays longer."""
    with open_source(source, "SOURCE") as stream:
        while line := stream.readline(MAX_INPUT_BYTES + 1):
            rest = line
            while not rest.endswith(b"\n") and (rest := stream.readline(MAX_INPUT_BYTES)):
                pass
            yield line


def _print_batch(source: str) -> int:
    """One JSON object for each line, ``{"error": text, "line": from 1}`` for a bad one; returns the exit status."""
    status = 0
    for number, line in enumerate(_lines(source), 1):
        try:
            answer = describe_descriptor(parse_hex(line))
        except DescriptorError as error:
            answer, status = {"error": str(error), "line": number}, 1
        print(json.dumps(answer))
    return status


def _cell(name: str, value: Any) -> str:
    """A value as the table shows it."""
    if name == "address":
        return hex(value)
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value)


def _print_table(fields: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in fields.items():
        if value is not None:
            table.add_row(name, _cell(name, value))
    Console(markup=False, highlight=False).print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """``cudatma inspect``; returns the exit status: 1 where a line of a batch is no tensor map."""
    parser = argparse.ArgumentParser(
        prog="cudatma inspect",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", nargs="?", default="-", metavar="SOURCE", help="hex digits, file or - (default: -)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--batch",
        action="store_true",
        help=f"SOURCE is a file or -, with {HEX_DIGITS} hex digits a line; print one JSON object a line",
    )
    options = parser.parse_args(argv)
    if options.batch:
        return _print_batch(options.source)
    fields = describe_descriptor(read_source(options.source))
    if options.json:
        print(json.dumps(fields, indent=2))
    else:
        _print_table(fields)
    return 0
