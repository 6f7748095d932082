"""Explain the 128 bytes of a tensor map: fields, layout, accesses and risks.

SOURCE is one of the following:

- 256 hex digits in memory order;
- the output of x/16gx, x/32wx or p/x in cuda-gdb;
- the repr() of a Python bytes object;
- a file that contains one of these or the 128 bytes, or - for standard input.

Dimensions and coordinates are in TMA order, innermost first.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # run the subcommand, even if the checkout is not installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from cudatma.cli import main as cudatma_main

    raise SystemExit(cudatma_main(["inspect", *sys.argv[1:]]))

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import BinaryIO

from cudatma.descriptor.bits import explain
from cudatma.descriptor.spec import AnySpec
from cudatma.errors import ArgumentError, DescriptorError, reason_of
from cudatma.inspection import Inspection, describe_descriptor, inspect
from cudatma.inspection.reading import (
    HEX_DIGITS,
    MAX_INPUT_BYTES,
    content_of,
    load_object,
    looks_like_hex,
    parse_content,
    parse_hex,
    parse_text,
)

from .command_line import Parser

EXAMPLES = """examples:
  cudatma inspect descriptor.bin
  cudatma inspect --json 0000e05b9d7f0000b021...
  cuda_program | cudatma inspect -
  cudatma inspect dump_of_gdb.txt --lint --target sm_120a
  cudatma inspect descriptor.bin --at 64,128 --element 3,17
  cudatma inspect descriptor.bin --svg box.svg --html box.html
  cudatma inspect --object my_kernels:weight_map --bits
  cudatma inspect --diff before.bin after.bin
  cudatma inspect --batch --json - < one_descriptor_a_line.txt
  cudatma inspect --table

The exit status is 1 if a line of --batch is not a tensor map, --diff finds a difference, --lint finds an error, --at
finds a trap or an overwrite, or --bits finds an invalid map; 2 if the command line is invalid or SOURCE is not a tensor
map; and 0 otherwise.
"""


def read_source(source: str) -> bytes:
    """Return the 128 bytes that SOURCE names. Raise DescriptorError, or ArgumentError for an unreadable file."""
    text = source.encode("ascii", "replace")
    is_hex = looks_like_hex(text)
    # File names are shorter than the digits of a descriptor, so a complete row of digits is never a file name.
    if source == "-" or (os.path.lexists(source) and not (is_hex and len(text) >= HEX_DIGITS)):
        with open_source(source, "SOURCE") as stream:
            content = stream.read(MAX_INPUT_BYTES + 1)
        return parse_content(content)
    if is_hex:
        return parse_hex(text)
    data = parse_text(source) if len(source) <= MAX_INPUT_BYTES else None
    if data is not None:
        return data
    shown = source if len(source) <= 60 else f"{source[:60]}..."
    raise ArgumentError("SOURCE", ascii(shown), f"a string of {HEX_DIGITS} hex digits, a dump, an existing file or -")


@contextmanager
def open_source(source: str, field: str) -> Iterator[BinaryIO]:
    """Open a file, or standard input for ``-``. Raise ArgumentError for ``field`` if that fails."""
    try:
        if source != "-":
            with open(source, "rb") as stream:
                yield stream
        elif sys.stdin is None:
            raise OSError("standard input is closed")
        else:
            yield sys.stdin.buffer
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        if isinstance(error, DescriptorError | ArgumentError):
            raise
        raise ArgumentError(field, f"{source!a} ({reason_of(error)})", "a readable file or -") from error


def _lines(source: str) -> Iterator[bytes]:
    """Yield lines, each truncated to at most MAX_INPUT_BYTES + 1 bytes."""
    with open_source(source, "SOURCE") as stream:
        while line := stream.readline(MAX_INPUT_BYTES + 1):
            rest = line
            while not rest.endswith(b"\n") and (rest := stream.readline(MAX_INPUT_BYTES)):
                pass
            yield line


def _print_batch(source: str) -> int:
    """Print a JSON object for each line, with the error if the line is invalid, and return the exit status."""
    status = 0
    for number, line in enumerate(_lines(source), 1):
        try:
            answer = describe_descriptor(parse_hex(line))
        except DescriptorError as error:
            answer, status = {"error": str(error), "line": number}, 1
        print(json.dumps(answer))
    return status


def _print_difference(first: str, second: str, as_json: bool) -> int:
    difference = Inspection(read_source(first)).compare(Inspection(read_source(second)))
    print(json.dumps(difference.to_json(), indent=2) if as_json else difference)
    return 0 if difference.equal else 1


def _print_table(as_json: bool) -> int:
    from cudatma.inspection.banks import COLUMNS, swizzle_rows
    from cudatma.inspection.console import print_rows

    if as_json:
        print(json.dumps([asdict(row) for row in swizzle_rows()], indent=2))
    else:
        # Omit the purpose of each mode (see docs/reference/tensor_map_format.md), so that the table fits 80 columns.
        print_rows([row.cells()[:-1] for row in swizzle_rows()], COLUMNS[:-1])
    return 0


def _print_bits(data: bytes, wide: bool, as_json: bool) -> int:
    """Print every bit of a map, even if the map is invalid, and return 1 for an invalid map."""
    from cudatma.inspection.console import print_bits
    from cudatma.inspection.fields import WIDE_NOTE

    ranges, problem = explain(data, wide=wide), ""
    if not wide:
        try:
            describe_descriptor(data)
        except DescriptorError as error:
            problem = str(error)
    if as_json:
        rows = [asdict(part) | {"evidence": part.evidence.value} for part in ranges]
        print(json.dumps({"bits": rows, "error": problem or None, "note": WIDE_NOTE if wide else None}, indent=2))
    else:
        print_bits(ranges)
        print(*(line for line in (WIDE_NOTE if wide else "", f"not valid: {problem}" if problem else "") if line))
    return 1 if problem else 0


def _write(path: str, text: str, field: str) -> None:
    """Write a file, or standard output for ``-``. Raise ArgumentError if it cannot be written."""
    if path == "-":
        sys.stdout.write(text)
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ArgumentError(field, f"{path!a} ({reason_of(error)})", "a writable file or -") from error


def _numbers(text: str, field: str, count: int = 0) -> tuple[int, ...]:
    """Parse ``3,-4`` or ``0x10,0``. Raise ArgumentError unless there are ``count`` numbers, or 1 to 5 if it is 0."""
    try:
        values = tuple(int(part, 0) for part in text.split(","))
    except ValueError:
        values = ()
    if not 1 <= len(values) <= 5 or (count and len(values) != count):
        allowed = (
            f"a list of {count} integers, such as 3,9"
            if count
            else "a list of 1 to 5 integers, innermost first, such as 0,64"
        )
        raise ArgumentError(field, ascii(text[:60]), allowed)
    return values


def _explain(inspection: Inspection, options: argparse.Namespace) -> int:
    """Print the fields and all requested details, and return the exit status."""
    coords = None if options.at is None else _numbers(options.at, "--at")
    offsets = None if options.offsets is None else _numbers(options.offsets, "--offsets")
    base = _numbers(options.base, "--base", 1)[0]
    element = None if options.element is None else _numbers(options.element, "--element", 2)
    mark = None if element is None else inspection.place(coords, offsets, base=base).element(*element)
    report = None if coords is None else inspection.at(coords, offsets)
    lint = inspection.lint(target=options.target) if options.lint or options.target else None

    drawn = {"base": base, "element": element, "theme": options.theme}
    if options.svg is not None:
        _write(options.svg, inspection.svg(coords, offsets, **drawn), "--svg")
    if options.html is not None:
        _write(options.html, inspection.html(coords, offsets, target=options.target, **drawn), "--html")
    if "-" in (options.svg, options.html):
        pass  # Standard output contains the picture or page.
    elif options.json:
        details = {"at": report and report.to_json(), "element": mark and asdict(mark), "lint": lint and lint.to_json()}
        extra = {name: value for name, value in details.items() if value is not None}
        print(json.dumps({"fields": inspection.fields, **extra} if extra else inspection.fields, indent=2))
    else:
        from cudatma.inspection import console

        console.print_rows(inspection.rows())
        if report is not None:
            console.print_access(inspection.spec, report)
        if mark is not None:
            console.print_element(mark, inspection.spec)
        if lint is not None:
            console.print_lint(lint)
        for path in filter(None, (options.svg, options.html)):
            print(f"wrote {path}")
    return 1 if (lint and lint.worst == "error") or (report and not report.is_clean) else 0


def parser() -> Parser:
    """Return the parser of ``cudatma inspect``."""
    result = Parser("cudatma inspect", __doc__, EXAMPLES)
    add = result.add_argument
    add("source", nargs="?", metavar="SOURCE", help="hex digits, a dump, a file or - (default: standard input)")
    add("--object", metavar="MODULE:NAME", help="inspect a Python object (imports, and thereby runs, the module)")
    add("--json", action="store_true", help="print JSON")
    add("--at", metavar="C0,C1,...", help="show the effect of a load and of a store at these coordinates")
    add("--offsets", metavar="W,...", help="im2col offsets of the load, W first")
    add("--element", metavar="R,C", help="show the address of element C in row R of the box")
    add("--base", default="0", metavar="BYTES", help="shared-memory address of the box (default: 0)")
    add("--lint", action="store_true", help="list risks, each with its rule, source and remedy")
    add("--target", metavar="sm_XXX", help="architecture for --lint; implies --lint")
    add(
        "--svg",
        metavar="FILE",
        help="write a picture of the box in the tensor and in shared memory; - for standard output",
    )
    add(
        "--html",
        metavar="FILE",
        help="write a page with all results; - for standard output",
    )
    add(
        "--theme",
        default="auto",
        choices=("auto", "light", "dark"),
        help="color scheme of the picture (default: the viewer's system setting)",
    )
    add("--bits", action="store_true", help="list the meaning of each of the 1024 bits and the evidence for it")
    add(
        "--wide",
        action="store_true",
        help="with --bits: decode an im2col wide map (some bits are undocumented)",
    )
    add("--diff", nargs=2, metavar=("A", "B"), help="compare two maps field by field and bit by bit")
    add("--table", action="store_true", help="list the swizzle modes with their spans, alignments and address bits")
    add("--batch", action="store_true",
        help=f"read {HEX_DIGITS} hex digits from each line of SOURCE and print one JSON object per line")  # fmt: skip
    return result


def _source(source: str | None) -> str:
    """Return SOURCE, by default standard input. Raise ArgumentError if the default is a terminal."""
    if source is None and sys.stdin is not None and sys.stdin.isatty():
        allowed = "hex digits, a dump, a file or - for standard input"
        raise ArgumentError("SOURCE", "no value", allowed, "see `cudatma inspect --help` for examples")
    return "-" if source is None else source


def _joined(argv: Sequence[str]) -> list[str]:
    """Replace ``--at -8,0`` with ``--at=-8,0``, because argparse interprets ``-8,0`` as an option."""
    words: list[str] = []
    for word in argv:
        if words and words[-1] in ("--at", "--offsets") and word[:1] == "-" and word[1:2].isdigit():
            words[-1] += f"={word}"
        else:
            words.append(word)
    return words


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``cudatma inspect`` and return the exit status that the help describes."""
    options = parser().parse_args(_joined(sys.argv[1:] if argv is None else argv))
    if options.table:
        return _print_table(options.json)
    if options.batch:
        return _print_batch(_source(options.source))
    if options.diff is not None:
        first, second = options.diff
        return _print_difference(first, second, options.json)
    content: bytes | AnySpec
    if options.object is not None:
        sys.path.insert(0, os.getcwd())  # like `python -m`
        content = content_of(load_object(options.object))
    else:
        content = read_source(_source(options.source))
    if options.bits and isinstance(content, bytes):
        return _print_bits(content, options.wide, options.json)
    inspection = Inspection(content) if isinstance(content, bytes) else inspect(content)
    if options.bits and inspection.data is not None:
        return _print_bits(inspection.data, options.wide, options.json)
    return _explain(inspection, options)
