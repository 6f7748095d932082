"""Explain the 128 bytes of a tensor map: its fields, where its elements land, what an access does, and its risks.

SOURCE is 256 hex digits in memory order; what cuda-gdb prints for x/16gx, x/32wx or p/x; the repr of bytes; a file that
holds one of these or the 128 bytes themselves; or - for standard input. Everything is in TMA order, innermost first.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import BinaryIO

from cudatma.descriptor.bits import explain
from cudatma.descriptor.spec import AnySpec
from cudatma.errors import ArgumentError, DescriptorError
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

exit status: 0 done; 1 a line of --batch is no tensor map, --diff found a difference, --lint an error, --at a trap or an
overwrite, --bits a map that is not valid; 2 a wrong call, or a source that is no tensor map.
"""


def read_source(source: str) -> bytes:
    """The 128 bytes that SOURCE names. Raises DescriptorError, or ArgumentError for a file that cannot be read."""
    text = source.encode("ascii", "replace")
    is_hex = looks_like_hex(text)
    # No file name has as many characters as a descriptor has digits: a complete row of digits is never a file.
    if source == "-" or (os.path.lexists(source) and not (is_hex and len(text) >= HEX_DIGITS)):
        with open_source(source, "SOURCE") as stream:
            content = stream.read(MAX_INPUT_BYTES + 1)
        return parse_content(content)
    if is_hex:
        return parse_hex(text)
    found = parse_text(source) if len(source) <= MAX_INPUT_BYTES else None
    if found is not None:
        return found
    shown = source if len(source) <= 60 else f"{source[:60]}..."
    raise ArgumentError("SOURCE", ascii(shown), f"{HEX_DIGITS} hex digits, a dump, a file that exists, or -")


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
        if isinstance(error, DescriptorError | ArgumentError):
            raise
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


def _print_difference(one: str, other: str, as_json: bool) -> int:
    found = Inspection(read_source(one)).compare(Inspection(read_source(other)))
    print(json.dumps(found.to_json(), indent=2) if as_json else found)
    return 0 if found.equal else 1


def _print_table(as_json: bool) -> int:
    from cudatma.inspection.banks import COLUMNS, swizzle_rows
    from cudatma.inspection.console import print_rows

    if as_json:
        print(json.dumps([asdict(row) for row in swizzle_rows()], indent=2))
    else:
        # What a mode is for is left to docs/reference/tensor_map_format.md: the rest fits 80 columns.
        print_rows([row.cells()[:-1] for row in swizzle_rows()], COLUMNS[:-1])
    return 0


def _print_bits(data: bytes, wide: bool, as_json: bool) -> int:
    """Every bit, of maps too that break a rule; 1 for those."""
    from cudatma.inspection.console import print_bits
    from cudatma.inspection.fields import WIDE_NOTE

    ranges, broken = explain(data, wide=wide), ""
    if not wide:
        try:
            describe_descriptor(data)
        except DescriptorError as error:
            broken = str(error)
    if as_json:
        rows = [asdict(part) | {"evidence": part.evidence.value} for part in ranges]
        print(json.dumps({"bits": rows, "error": broken or None, "note": WIDE_NOTE if wide else None}, indent=2))
    else:
        print_bits(ranges)
        print(*(line for line in (WIDE_NOTE if wide else "", f"not valid: {broken}" if broken else "") if line))
    return 1 if broken else 0


def _write(path: str, text: str, field: str) -> None:
    """A file, or standard output for ``-``. ArgumentError where it cannot be written."""
    if path == "-":
        sys.stdout.write(text)
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ArgumentError(field, ascii(path), "a file that can be written, or -", str(error)) from error


def _numbers(text: str, field: str, count: int = 0) -> tuple[int, ...]:
    """``3,-4`` or ``0x10,0`` as ints; ArgumentError otherwise. count: how many are wanted, any number if 0."""
    try:
        values = tuple(int(part, 0) for part in text.split(","))
    except ValueError:
        values = ()
    if not 1 <= len(values) <= 5 or (count and len(values) != count):
        wanted = f"{count} integers, as in 3,9" if count else "1 to 5 integers, innermost first, as in 0,64"
        raise ArgumentError(field, ascii(text[:60]), wanted)
    return values


def _explain(found: Inspection, options: argparse.Namespace) -> int:
    """Fields, and whatever else is asked for; returns the exit status."""
    coords = None if options.at is None else _numbers(options.at, "--at")
    offsets = None if options.offsets is None else _numbers(options.offsets, "--offsets")
    base = _numbers(options.base, "--base", 1)[0]
    element = None if options.element is None else _numbers(options.element, "--element", 2)
    mark = None if element is None else found.place(coords, offsets, base=base).element(*element)
    report = None if coords is None else found.at(coords, offsets)
    lint = found.lint(target=options.target) if options.lint or options.target else None

    drawn = {"base": base, "element": element, "theme": options.theme}
    if options.svg is not None:
        _write(options.svg, found.svg(coords, offsets, **drawn), "--svg")
    if options.html is not None:
        _write(options.html, found.html(coords, offsets, target=options.target, **drawn), "--html")
    if "-" in (options.svg, options.html):
        pass  # standard output is the file
    elif options.json:
        asked = {"at": report and report.to_json(), "element": mark and asdict(mark), "lint": lint and lint.to_json()}
        extra = {name: value for name, value in asked.items() if value is not None}
        print(json.dumps({"fields": found.fields, **extra} if extra else found.fields, indent=2))
    else:
        from cudatma.inspection import console

        console.print_rows(found.rows())
        if report is not None:
            console.print_access(found.spec, report)
        if mark is not None:
            console.print_element(mark, found.spec)
        if lint is not None:
            console.print_lint(lint)
        for path in filter(None, (options.svg, options.html)):
            print(f"wrote {path}")
    return 1 if (lint and lint.worst == "error") or (report and not report.is_clean) else 0


def _parser() -> Parser:
    parser = Parser("cudatma inspect", __doc__, EXAMPLES)
    add = parser.add_argument
    add("source", nargs="?", metavar="SOURCE", help="hex digits, a dump, a file or - (default: -, unless a terminal)")
    add("--object", metavar="MODULE:NAME", help="inspect a Python object; imports the module, which is code you trust")
    add("--json", action="store_true", help="print JSON")
    add("--at", metavar="C0,C1,..", help="say what a load or a store at these coordinates does")
    add("--offsets", metavar="W,..", help="im2col: the filter's offsets of that load")
    add("--element", metavar="R,C", help="say where element C of row R of the box lands")
    add("--base", default="0", metavar="BYTES", help="shared address of the box (default: 0)")
    add("--lint", action="store_true", help="list risks, each with rule, source and remedy")
    add("--target", metavar="sm_XXX", help="the architecture to judge risks for; with it, --lint is implied")
    add("--svg", metavar="FILE", help="draw the box in the tensor and in shared memory; - for standard output")
    add("--html", metavar="FILE", help="the picture, fields, accesses, risks and bits on one page")
    add(
        "--theme",
        default="auto",
        choices=("auto", "light", "dark"),
        help="colors of the picture (default: the reader's)",
    )
    add("--bits", action="store_true", help="name every one of the 1024 bits and say how it is known")
    add("--wide", action="store_true", help="with --bits: an im2col wide map, whose own bits are not published")
    add("--diff", nargs=2, metavar=("A", "B"), help="compare two maps by field and bit")
    add("--table", action="store_true", help="the swizzle modes: span, alignment, address bits")
    add("--batch", action="store_true",
        help=f"SOURCE is a file or -, with {HEX_DIGITS} hex digits a line; print one JSON object a line")  # fmt: skip
    return parser


def _source(given: str | None) -> str:
    """SOURCE, by default standard input. ArgumentError where that is a terminal, which would wait without a word."""
    if given is None and sys.stdin is not None and sys.stdin.isatty():
        allowed = "hex digits, a dump, a file, or - for standard input"
        raise ArgumentError("SOURCE", "none", allowed, "`cudatma inspect --help` shows examples")
    return "-" if given is None else given


def _joined(argv: Sequence[str]) -> list[str]:
    """``--at -8,0`` as ``--at=-8,0``: argparse takes a list of numbers that begins with a minus for an option."""
    words: list[str] = []
    for word in argv:
        if words and words[-1] in ("--at", "--offsets") and word[:1] == "-" and word[1:2].isdigit():
            words[-1] += f"={word}"
        else:
            words.append(word)
    return words


def main(argv: Sequence[str] | None = None) -> int:
    """``cudatma inspect``; returns the exit status, as the help describes it."""
    options = _parser().parse_args(_joined(sys.argv[1:] if argv is None else argv))
    if options.table:
        return _print_table(options.json)
    if options.batch:
        return _print_batch(_source(options.source))
    if options.diff is not None:
        one, other = options.diff
        return _print_difference(one, other, options.json)
    content: bytes | AnySpec
    if options.object is not None:
        sys.path.insert(0, os.getcwd())  # as `python -m` would
        content = content_of(load_object(options.object))
    else:
        content = read_source(_source(options.source))
    if options.bits and isinstance(content, bytes):
        return _print_bits(content, options.wide, options.json)
    found = Inspection(content) if isinstance(content, bytes) else inspect(content)
    if options.bits and found.data is not None:
        return _print_bits(found.data, options.wide, options.json)
    return _explain(found, options)
