"""``cudatma inspect`` against an H200's driver, on input that is no tensor map, and how values are read."""

from __future__ import annotations

import ctypes
import gzip
import io
import json
import math
import os
import pickle
import random
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cudatma
from cudatma import cli, context
from cudatma.arrays import ArrayInfo
from cudatma.descriptor import Im2colWideSpec, TensorMap, TiledSpec, codec
from cudatma.descriptor.bits import explain
from cudatma.errors import ArgumentError, ArgumentTypeError, CudaTmaError, DescriptorError
from cudatma.inspection import Inspection
from cudatma.inspection import reading as objects
from cudatma.inspection.reading import MAX_INPUT_BYTES, parse_content
from cudatma.layout import Interleave
from tools import inspect_descriptor as tool

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "tests" / "fixtures" / "descriptors" / "h200.jsonl.gz"
Case = dict[str, Any]

CONFIG = TiledSpec(
    dtype="float16", dims=(64, 1000), strides_bytes=(144,), box=(16, 8), swizzle="128B", address=0x7F0000001000
)
RAW = codec.encode(CONFIG)
HEX = RAW.hex()


@lru_cache(maxsize=1)
def driver_maps() -> list[Case]:
    """Maps that the driver made."""
    with gzip.open(SAMPLE, "rt", encoding="utf-8") as lines:
        cases = [json.loads(line) for line in lines]
    return [c for c in cases if c["code"] == 0]


def feed(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def expected_bytes_of(fields: Case) -> int:
    """What a load delivers, from the driver's arguments alone: whole elements of every traversed dimension."""
    bits = {"8": 8, "16": 16, "32": 32, "64": 64}
    name = "".join(filter(str.isdigit, fields["dtype"].split("_")[0]))
    if fields["kind"] == "im2col":
        elems = fields["channels_per_pixel"] * fields["pixels_per_column"]
    else:
        counts = [math.ceil(b / s) for b, s in zip(fields["box"], fields["element_strides"], strict=True)]
        elems = fields["box"][0] * math.prod(counts[1:])
    return elems * bits[name] // 8


# What is decoded


def test_batch_reads_back_what_the_driver_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = driver_maps()
    feed(monkeypatch, "".join(f"{case['hex']}\n" for case in cases).encode())
    assert cli.main(["inspect", "--batch", "--json", "-"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(cases) > 250
    assert {case["fields"]["kind"] for case in cases} == {"tiled", "im2col"}
    for case, line in zip(cases, lines, strict=True):
        want, got = case["fields"], json.loads(line)
        same = ["kind", "dtype", "address", "element_strides"]
        same += (
            ["box"]
            if want["kind"] == "tiled"
            else ["lower_corner", "upper_corner", "channels_per_pixel", "pixels_per_column"]
        )
        assert {name: got[name] for name in same} == {name: want[name] for name in same}
        assert (got["shape"], got["strides"]) == (want["dims"], want["strides_bytes"])
        assert got["rank"] == len(want["dims"])
        assert got["interleave"] == ("none", "16B", "32B")[want["interleave"]]
        assert got["swizzle"] == ("none", "32B", "64B", "128B")[want["swizzle"]]
        assert got["l2_promotion"] == ("none", "64B", "128B", "256B")[want["l2_promotion"]]
        assert got["oob_fill"] == ("zeros", "nan")[want["oob_fill"]]
        assert got["unknown_bits"] == []
        assert (got["box"] is None) == (want["kind"] == "im2col")
        if want["interleave"] == Interleave.NONE:
            assert got["expected_bytes"] == expected_bytes_of(want)
        assert got["footprint_bytes"] >= got["expected_bytes"]


def test_narrow_rows_are_padded_to_the_swizzle() -> None:
    fields = tool.describe_descriptor(RAW)
    assert (fields["expected_bytes"], fields["footprint_bytes"]) == (16 * 8 * 2, 8 * 128)
    assert fields["smem_alignment_bytes"] == 1024


def test_unknown_bits_are_shown_by_number() -> None:
    value = int.from_bytes(RAW, "little") | 1 << 85 | 1 << 1023 | 1 << (256 + 32 * 4)
    fields = tool.describe_descriptor(value.to_bytes(128, "little"))
    assert fields["unknown_bits"] == [85, 256 + 32 * 4, 1023]
    assert {**fields, "unknown_bits": []} == tool.describe_descriptor(RAW)


# Where it is read from


def test_argument_hex_file_binary_file_and_standard_input_say_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    binary, text = tmp_path / "map.bin", tmp_path / "map.txt"
    binary.write_bytes(RAW)
    text.write_text("0x" + "\n".join(HEX[at : at + 32].upper() for at in range(0, 256, 32)) + "\n")
    for source in (HEX, f"0x{HEX}", " ".join(HEX[at : at + 2] for at in range(0, 256, 2)), str(binary), str(text)):
        assert cli.main(["inspect", source, "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == tool.describe_descriptor(RAW)
    for data in (RAW, HEX.encode()):
        for arguments in (["--json", "-"], ["--json"]):
            feed(monkeypatch, data)
            assert cli.main(["inspect", *arguments]) == 0
            assert json.loads(capsys.readouterr().out) == tool.describe_descriptor(RAW)


def test_a_file_with_a_name_of_hex_digits_and_one_with_a_long_path(tmp_path: Path) -> None:
    folder = tmp_path / ("d" * 200) / ("e" * 100)
    folder.mkdir(parents=True)
    for path in (folder / "map.bin", tmp_path / "cafe"):
        path.write_bytes(RAW)
        assert tool.read_source(str(path)) == RAW
    here = Path.cwd()
    try:
        os.chdir(tmp_path)
        assert tool.read_source("cafe") == RAW
    finally:
        os.chdir(here)


def test_table_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", HEX]) == 0
    shown = capsys.readouterr().out
    rows = dict(line.split(maxsplit=1) for line in shown.splitlines())
    assert rows["shape"].strip() == "64, 1000"
    assert rows["address"].strip() == "0x7f0000001000"
    assert rows["footprint_bytes"].strip() == "1024"
    assert all(len(line) <= 80 for line in shown.splitlines())


# What else it says


def answer(arguments: list[str], capsys: pytest.CaptureFixture[str], status: int = 0) -> Any:
    """The JSON that ``cudatma inspect HEX --json`` prints with further arguments."""
    assert cli.main(["inspect", HEX, "--json", *arguments]) == status
    return json.loads(capsys.readouterr().out)


def test_json_has_what_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer([], capsys) == tool.describe_descriptor(RAW)
    at = answer(["--at", "56,996"], capsys)
    assert set(at) == {"fields", "at"}
    assert at["fields"] == tool.describe_descriptor(RAW)
    assert (at["at"]["expected_bytes"], at["at"]["inside"], at["at"]["outside"]) == (256, 8 * 4, 128 - 8 * 4)
    assert at["at"]["is_clean"]
    everything = answer(["--at=0,0", "--element", "3,9", "--lint", "--target", "sm_120a"], capsys)
    assert set(everything) == {"fields", "at", "element", "lint"}
    assert everything["element"]["smem_address"] == (3 * 128 + 18) ^ (3 << 4)
    assert everything["lint"]["target"] == "sm_120a"


def test_exit_status_of_accesses_and_risks(capsys: pytest.CaptureFixture[str]) -> None:
    assert "in a store" in answer(["--at", "-8,0"], capsys, 1)["at"]["store_refusal"]["rule"]
    assert "a multiple of 8" in answer(["--at", "1,0"], capsys, 1)["at"]["load_refusal"]["rule"]
    assert answer(["--lint"], capsys)["lint"]["worst"] == "warning"
    large = codec.encode(TiledSpec(dtype="float32", dims=(256, 256), strides_bytes=(1024,), box=(256, 256)))
    assert cli.main(["inspect", large.hex(), "--lint"]) == 1
    assert "error" in capsys.readouterr().out
    assert cli.main(["inspect", HEX, "--target", "sm_75"]) == 2


def test_text_of_accesses_elements_and_risks(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", HEX, "--at", "56,996", "--element", "0,9", "--lint"]) == 0
    shown = capsys.readouterr().out
    assert all(len(line) <= 80 for line in shown.splitlines())
    for words in ("access at (56, 996)", "32 of 128 elements", "are filled", "element (0, 9)", "outside the"):
        assert words in shown
    assert "padded-rows" in shown
    assert "remedy:" in shown


@pytest.mark.parametrize(
    "arguments",
    [
        ["--at", "0"], ["--at", "0,0,0"], ["--at", "x,0"], ["--at", "0,99999999999"], ["--at", "1,2,3,4,5,6"],
        ["--at", "0,0", "--offsets", "1"], ["--element", "1"], ["--element", "99,0"], ["--element", "0,-1"],
        ["--base", "64", "--svg", "-"], ["--base", "-128", "--element", "0,0"], ["--base", "x"],
        ["--at", "1,0", "--svg", "-"],
        ["--diff", HEX, "ff"], ["--diff", HEX, "/"],
    ],
)  # fmt: skip
def test_wrong_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", HEX, *arguments]) == 2
    captured = capsys.readouterr()
    assert (captured.out, len(captured.err.splitlines())) == ("", 1)


def test_difference_of_two_maps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.bin"
    other.write_bytes(codec.encode(TiledSpec(
        dtype="float16", dims=(64, 1001), strides_bytes=(144,), box=(16, 8), swizzle="64B", address=0x7F0000001000
    )))  # fmt: skip
    assert cli.main(["inspect", "--diff", HEX, str(other)]) == 1
    shown = capsys.readouterr().out
    for words in (
        "swizzle (bits 77-78): 0x3 and 0x2",
        "dim_minus_1[1] (bits 288-319): 0x3e7 and 0x3e8",
        "smem_pattern",
    ):
        assert words in shown
    assert cli.main(["inspect", "--json", "--diff", HEX, str(other)]) == 1
    assert [field["name"] for field in json.loads(capsys.readouterr().out)["fields"]] == [
        "swizzle", "dim_minus_1[1]", "smem_pattern",
    ]  # fmt: skip
    assert cli.main(["inspect", "--diff", HEX, HEX]) == 0
    assert "are equal in all 1024 bits" in capsys.readouterr().out


def test_every_bit_of_maps_that_are_not_valid_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", HEX, "--bits"]) == 0
    assert "dim_minus_1[1]" in capsys.readouterr().out
    assert cli.main(["inspect", "ff" * 128, "--bits", "--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert sum(part["value"] << part["first"] for part in shown["bits"]) == (1 << 1024) - 1
    assert "rank" in shown["error"]
    assert cli.main(["inspect", HEX, "--bits", "--wide"]) == 0
    wide = capsys.readouterr().out
    assert "box_minus_1" not in wide
    assert "not verified on a GPU" in wide


# What is refused


def test_a_bad_line_is_an_object_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    endless = HEX.encode() + b" " * tool.MAX_INPUT_BYTES + b"ff" * 200_000
    lines = [HEX.encode(), b"zz", b"", HEX.encode() + b"\r", endless, b"ff" * 128, b"\xff\x00" * 64, HEX[:-2].encode()]
    feed(monkeypatch, b"\n".join([*lines, HEX.encode()]))
    assert cli.main(["inspect", "--batch", "-"]) == 1
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(answer["line"] == number for number, answer in enumerate(answers, 1) if "error" in answer)
    refused = [set(answer) == {"error", "line"} for answer in answers]
    assert refused == [False, True, True, False, True, True, True, True, False]
    assert answers[0] == answers[3] == answers[8] == tool.describe_descriptor(RAW)
    assert answers[7]["error"].startswith("descriptor must be a string of 256")


@pytest.mark.parametrize(
    ("source", "error", "words"),
    [
        ("", ArgumentError, "got ''"),
        ("cafe", DescriptorError, "4 hex digits"),
        (HEX + "00", DescriptorError, "258 hex digits"),
        ("no_such_file", ArgumentError, "no_such_file"),
        ("\0", ArgumentError, "an existing file"),
        ("\ud800\n", ArgumentError, "an existing file"),
        ("x" * 5000, ArgumentError, r"xxx\.\.\."),
        ("/", ArgumentError, "readable file"),
        ("/dev/null", DescriptorError, "0 bytes"),
        ("/dev/zero", DescriptorError, "more than 65536 bytes"),
    ],
)
def test_wrong_sources(source: str, error: type[Exception], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(error, match=words):
        tool.read_source(source)
    assert cli.main(["inspect", source]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1


def test_no_source_at_a_terminal_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    feed(monkeypatch, b"")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    for arguments in ([], ["--batch"]):
        assert cli.main(["inspect", *arguments]) == 2
        assert "found no value" in capsys.readouterr().err


def test_a_closed_standard_input_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    for arguments in ([], ["--batch"]):
        assert cli.main(["inspect", *arguments]) == 2
        assert "standard input is closed" in capsys.readouterr().err


def answer_of(read: Any, data: Any) -> dict[str, Any] | DescriptorError:
    """Fields, or the typed error; any other exception fails the test."""
    try:
        return tool.describe_descriptor(read(data))
    except DescriptorError as error:
        return error


#: Characters that parsers treat differently, with digits of other scripts and a lone surrogate. Hypothesis takes
#: seconds to prepare an alphabet of all characters.
ANY_TEXT = st.text("09afxX²٣é\ud800\U0001f600\0\n\t \u2028{}[]()<>:,;.-+'\"\\$#=", max_size=300)


@given(text=st.one_of(ANY_TEXT, st.text("0123456789abcdefABCDEF xX\n", max_size=300)))
def test_random_text_is_a_typed_error(text: str) -> None:
    """As an argument, as a file and as a line; none of it is 256 digits long and valid."""
    if text in ("-", ".", "..") or "/" in text:
        text = "q"
    with pytest.raises((DescriptorError, ArgumentError)) as caught:
        tool.read_source(text)
    assert len(cli.one_line(caught.value).splitlines()) == 1
    assert isinstance(answer_of(tool.parse_hex, text.encode("utf-8", "surrogatepass")), DescriptorError)


def test_nearly_valid_maps_survive_every_question() -> None:
    """Maps with a few flipped bits: fields, risks, accesses and pictures, or one line that says why not."""
    chance = random.Random(11)
    cases = [bytes.fromhex(case["hex"]) for case in driver_maps()]
    answered = 0
    for number in range(300):
        value = int.from_bytes(chance.choice(cases), "little")
        for _ in range(chance.choice((0, 1, 2, 3, 8))):
            value ^= 1 << chance.randrange(1024 if number % 3 == 0 else 592)
        raw = value.to_bytes(128, "little")
        assert sum(part.value << part.first for part in explain(raw)) == value
        try:
            found = Inspection(raw)
        except DescriptorError:
            continue
        answered += 1
        json.dumps([found.to_json(), found.lint().to_json(), found.lint(target="sm_120a").to_json()])
        coords = [chance.choice((0, 8, -8, 64, 3, (1 << 31) - 1, -(1 << 31), 1 << 31)) for _ in range(found.spec.rank)]
        with suppress(CudaTmaError):
            json.dumps(found.at(coords).to_json())
        if number % 25 == 0:
            assert "<svg" in found.html() or "no picture" in found.html()
    assert 100 < answered < 300


def test_runs_as_a_file_and_ends_quietly_with_its_reader(tmp_path: Path) -> None:
    many = tmp_path / "many.txt"
    many.write_text(f"{HEX}\n" * 3000)
    script = f"{sys.executable} {ROOT}/tools/inspect_descriptor.py --batch {many} | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.stderr == ""
    first, status = done.stdout.splitlines()
    assert json.loads(first) == tool.describe_descriptor(RAW)
    assert status == "1"


READING = TiledSpec(
    dtype="float16", dims=(64, 1000), strides_bytes=(144,), box=(16, 8), swizzle="128B", address=0x7F1000
)
READING_RAW = codec.encode(READING)
FORMATS = {8: "g", 4: "w", 2: "h", 1: "b"}


def dump(data: bytes, width: int, *, start: int | None = 0x7FFE0010, per_line: int = 2, symbol: str = "") -> str:
    """What gdb prints for x/NNgx and the like: its own layout, written here a second time."""
    words = struct.unpack(f"<{128 // width}{ {8: 'Q', 4: 'I', 2: 'H', 1: 'B'}[width] }", data)
    lines = []
    for at in range(0, len(words), per_line):
        shown = "\t".join(f"0x{word:0{2 * width}x}" for word in words[at : at + per_line])
        head = "" if start is None else f"0x{start + at * width:x}{f' <{symbol}+{at * width}>' if symbol else ''}:\t"
        lines.append(head + shown)
    return "\n".join(lines) + "\n"


# Debugger dumps


@given(
    data=st.binary(min_size=128, max_size=128),
    width=st.sampled_from([1, 2, 4, 8]),
    per_line=st.sampled_from([1, 2, 4, 8]),
    start=st.none() | st.integers(0, 2**48),
    symbol=st.sampled_from(["", "map", "ns::weights", "Foo<int, 3>::map", "operator()(int)::map"]),
    prompt=st.booleans(),
)
def test_a_dump_gives_back_its_bytes(
    data: bytes, width: int, per_line: int, start: int | None, symbol: str, prompt: bool
) -> None:
    text = dump(data, width, start=start, per_line=per_line, symbol=symbol)
    if prompt:
        text = f"(cuda-gdb) x/{128 // width}{FORMATS[width]}x &map\n{text}(cuda-gdb) "
    assert parse_content(text.encode()) == data


@given(columns=st.integers(20, 100), width=st.sampled_from([4, 8]))
def test_lines_that_a_terminal_broke(columns: int, width: int) -> None:
    wrapped = []
    for line in dump(READING_RAW, width, symbol="map").expandtabs(8).splitlines():
        wrapped += [line[at : at + columns] for at in range(0, len(line), columns)]
    assert parse_content("\r\n".join(wrapped).encode()) == READING_RAW


def test_p_x_with_repeats() -> None:
    words = struct.unpack("<16Q", READING_RAW)
    parts: list[str] = []
    at = 0
    while at < 16:
        end = at
        while end < 16 and words[end] == words[at]:
            end += 1
        parts.append(f"0x{words[at]:x}" + (f" <repeats {end - at} times>" if end - at > 1 else ""))
        at = end
    assert any("repeats" in part for part in parts)
    assert parse_content(f"(cuda-gdb) p/x map\n$3 = {{opaque = {{{', '.join(parts)}}}}}\n".encode()) == READING_RAW


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: "\n".join(text.splitlines()[:-1]), "14 words"),
        (lambda text: text + text, "contiguous"),
        (lambda text: "".join([*text.splitlines(True)[1:], text.splitlines()[0]]), "missing"),
        (lambda text: text.replace("0x7ffe0020", "0x7ffe0030"), "add the missing line"),
        (lambda text: text.replace("\t0x", "\t0x1", 1), "got 0x1"),
        (lambda text: text.replace(":", ": oops", 1), "'oops"),
        (lambda text: text.replace("0x7ffe0020:", "Cannot access memory at address 0x7ffe0020"), "after 2 words"),
        (lambda text: "$1 = {0x1, zwei}", "zwei"),
        (lambda text: "$1 = {0x0 <repeats 99999999999 times>}", "must be 16 words"),
        (lambda text: "$1 = {opaque = {140737353, -12, 0 <repeats 14 times>}}", "decimal words.*p/x"),
        (lambda text: "{1, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}", "decimal words.*p/x"),
        (lambda text: "$1 = {0x0, 0x0 <repeats 15 times>, 0x1}", "17 words"),
        (lambda text: "{" + "0x0, " * 400 + "0x0}", "must be 16 words"),
        (lambda text: "0x" + "f" * 3000 + " 0x1" * 15, "more than 128 bits"),
    ],
)  # fmt: skip
def test_broken_dumps(change: Callable[[str], str], words: str) -> None:
    with pytest.raises(DescriptorError, match=words) as caught:
        parse_content(change(dump(READING_RAW, 8)).encode())
    assert len(cli.one_line(caught.value).splitlines()) == 1


# Python literals, and pickles


def test_literals() -> None:
    for text in (
        repr(READING_RAW),
        repr(bytearray(READING_RAW)),
        f"  {READING_RAW!r}\n",
        repr(list(READING_RAW)),
        str(struct.unpack("<16Q", READING_RAW)),
        repr(list(struct.unpack("<32I", READING_RAW))),
        repr(list(struct.unpack("<64H", READING_RAW))),
    ):
        assert parse_content(text.encode()) == READING_RAW


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("b'abc'", "3 bytes"),
        ("b'abc", "an invalid Python literal"),
        ("[1, 2, 3]", "3 integers"),
        ("[1.5]", "type list"),
        ("[True] * 3", "an invalid Python literal"),
        ("[" * 30000, "an invalid Python literal"),
        ("(((((1)))))", "type int"),
        ("[-1" + ", 0" * 15 + "]", "got -0x1"),
        ("[300" + ", 0" * 127 + "]", "got 0x12c"),
        ("[" + "9" * 5000 + ", 0]", "literal|integers"),
        ("bytearray(open('/etc/passwd').read())", "bytes"),
        ("(__import__('os').system('true'))", "an invalid Python literal"),
    ],
)
def test_broken_literals(text: str, words: str) -> None:
    with pytest.raises(DescriptorError, match=words):
        parse_content(text.encode())


class _Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("a pickle was loaded",))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_are_never_loaded(protocol: int) -> None:
    for value in (_Bomb(), READING_RAW):
        with pytest.raises(DescriptorError):
            parse_content(pickle.dumps(value, protocol))
    if protocol >= 2:
        with pytest.raises(DescriptorError, match=r"got a pickle; write bytes\(tensor_map\)"):
            parse_content(pickle.dumps(_Bomb(), protocol))


# Objects


def test_objects_of_every_kind_say_the_same() -> None:
    expected = tool.describe_descriptor(READING_RAW)
    made = TensorMap.tiled(READING, encoder="codec")
    words = struct.unpack("<16Q", READING_RAW)
    for source in (
        made,
        READING,
        READING_RAW,
        bytearray(READING_RAW),
        memoryview(READING_RAW),
        (ctypes.c_ubyte * 128).from_buffer_copy(READING_RAW),
        np.frombuffer(READING_RAW, np.uint8),
        np.frombuffer(READING_RAW, np.uint64),
        np.frombuffer(READING_RAW, np.uint32).reshape(4, 8),
        SimpleNamespace(opaque=list(words)),
        READING_RAW.hex(),
        dump(READING_RAW, 4),
        READING_RAW.hex().encode(),
    ):
        found = cudatma.inspect(source)
        assert found.fields == expected
        assert found.data == READING_RAW


@pytest.mark.parametrize(
    ("source", "device", "error", "words"),
    [
        (None, None, ArgumentTypeError, "got None"),
        (True, None, ArgumentTypeError, "True"),
        (4096, None, ArgumentError, "got None"),
        (4096, -1, ArgumentError, "got -1"),
        (0, 0, ArgumentError, "a device address"),
        (-5, 0, ArgumentError, "a device address"),
        (READING_RAW, 0, ArgumentError, "got 0"),
        (object(), None, ArgumentTypeError, "got object"),
        (3.5, None, ArgumentTypeError, "got float"),
        (np.zeros(64, np.uint8), None, DescriptorError, "an array of 64 bytes"),
        (np.zeros((64, 64), np.float16), None, DescriptorError, "TensorMap.from_array"),
        (np.zeros(256, np.uint8)[::2], None, DescriptorError, "contiguous"),
        (READING_RAW[:-1], None, DescriptorError, "127 bytes"),
        ("no map", None, DescriptorError, "6 bytes"),
        ([1, 2], None, ArgumentTypeError, "got list"),
    ],
)
def test_wrong_objects(source: object, device: int | None, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        cudatma.inspect(source, device=device)


def test_memory_of_a_gpu_is_copied_after_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def copy(to: int, pointer: int, size: int) -> tuple[int]:
        calls.append(("copy", pointer, size))
        ctypes.memmove(to, READING_RAW, size)
        return (0,)

    def wait() -> tuple[int]:
        calls.append(("wait",))
        return (0,)

    class Using:
        def __init__(self, device: int) -> None:
            calls.append(("device", device))

        def __enter__(self) -> Any:
            return SimpleNamespace(cuMemcpyDtoH=copy, cuCtxSynchronize=wait)

        def __exit__(self, *error: object) -> None:
            calls.append(("left",))

    monkeypatch.setattr(context, "using", Using)
    expected = [("device", 1), ("wait",), ("copy", 0x7000, 128), ("left",)]
    assert cudatma.inspect(0x7000, device=1).data == READING_RAW
    assert calls == expected
    calls.clear()
    info = ArrayInfo(0x7000, (128,), (1,), np.dtype(np.uint8), 1, None, "cupy")
    assert objects.content_of(info) == READING_RAW
    assert calls == expected


def test_im2col_wide_is_described_from_documents_only() -> None:
    wide = Im2colWideSpec(
        dtype="bfloat16", dims=(64, 14, 4), strides_bytes=(128, 1792), swizzle="64B", mode="W128",
        lower_corner_w=-3, upper_corner_w=3, channels_per_pixel=32, pixels_per_column=16,
    )  # fmt: skip
    found = cudatma.inspect(wide)
    assert found.data is None
    assert found.bits == ()
    assert (found.fields["kind"], found.fields["mode"]) == ("im2col_wide", "w128")
    assert found.fields["expected_bytes"] == 128 * 32 * 2
    for text in (repr(found), found.html(), str(found.at((0, -3, 0)).note), str(found.lint().to_json())):
        assert "not verified on a GPU" in text
    with pytest.raises(DescriptorError, match="not documented"):
        found.svg()
    with pytest.raises(DescriptorError, match="bytes"):
        found.compare(READING)


# --object


def test_object_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my_maps.py").write_text(
        "from cudatma import Im2colWideSpec, TiledSpec\n"
        f"class Holder:\n    weights = bytes.fromhex('{READING_RAW.hex()}')\n"
        "    spec = TiledSpec(dtype='uint8', dims=(64,), box=(64,), address=16)\n"
        "    wide = Im2colWideSpec(dtype='uint8', dims=(64, 9, 4), strides_bytes=(64, 576), swizzle='64B',\n"
        "        lower_corner_w=0, upper_corner_w=0, channels_per_pixel=64, pixels_per_column=8)\n"
        "broken = 3.5\n",
        encoding="utf-8",
    )
    (tmp_path / "raises_at_import.py").write_text("raise SystemExit('two\\nlines')\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    assert cli.main(["inspect", "--object", "my_maps:Holder.weights"]) == 0
    assert "64, 1000" in capsys.readouterr().out
    assert cli.main(["inspect", "--object", "my_maps:Holder.weights", "--bits"]) == 0
    assert "dim_minus_1[1]" in capsys.readouterr().out
    assert cli.main(["inspect", "--object", "my_maps:Holder.spec", "--bits", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bits"][0]["value"] == 16
    assert cli.main(["inspect", "--object", "my_maps:Holder.wide", "--bits", "--lint"]) == 0
    assert "not verified on a GPU" in " ".join(capsys.readouterr().out.split())
    for name in (
        "my_maps:nothing",
        "my_maps:broken",
        "my_maps",
        "no_such_module:x",
        "a b:c",
        "raises_at_import:x",
        ":",
    ):
        assert cli.main(["inspect", "--object", name]) == 2
        captured = capsys.readouterr()
        assert (captured.out, len(captured.err.splitlines())) == ("", 1)


# Hostile input


def mutations(seed: int, count: int) -> list[bytes]:
    """Dumps, digits, literals and junk, each a little wrong."""
    chance = random.Random(seed)
    forms = [dump(READING_RAW, width).encode() for width in (1, 2, 4, 8)]
    forms += [
        READING_RAW.hex().encode(),
        repr(READING_RAW).encode(),
        repr(list(READING_RAW)).encode(),
        b"{0x1, 0x2 <repeats 15 times>}",
        READING_RAW,
    ]
    made = []
    for _ in range(count):
        data = bytearray(chance.choice(forms))
        for _ in range(chance.randrange(6)):
            at = chance.randrange(len(data) + 1)
            match chance.randrange(4):
                case 0:
                    data[at:at] = chance.randbytes(chance.randrange(1, 9))
                case 1:
                    del data[at : at + chance.randrange(1, 40)]
                case 2:
                    data[at : at + 1] = chance.choice([b"0x", b"{", b"<", b":", b"\n", b"'", b"\\", b"[", b"\x80\x04"])
                case 3:
                    data = data[at:] + data[:at]
        made.append(bytes(data))
    return made


def refusal(data: bytes) -> str:
    """What the command line would print of the error; empty where the text is a map."""
    try:
        tool.describe_descriptor(parse_content(data))
    except CudaTmaError as error:
        return cli.one_line(error)
    return ""


def test_hostile_text_is_a_map_or_one_line() -> None:
    refused = [refusal(data) for data in mutations(7, 1500)]
    assert max(len(text.splitlines()) for text in refused) == 1
    assert 0 < refused.count("") < len(refused), "some mutations leave a map that can be read"


@given(data=st.binary(max_size=300) | ANY_TEXT.map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_junk_is_a_typed_error(data: bytes) -> None:
    assert len(refusal(data).splitlines()) <= 1


def test_huge_files_directories_and_links(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    huge, loop, gone = tmp_path / "huge", tmp_path / "loop", tmp_path / "gone"
    with huge.open("wb") as stream:
        stream.truncate(1 << 40)  # a file without content that is larger than memory
    loop.symlink_to(loop)
    gone.symlink_to(tmp_path / "nowhere")
    good = tmp_path / "good"
    good.write_bytes(READING_RAW)
    (tmp_path / "link").symlink_to(good)
    for path in (huge, loop, gone, tmp_path):
        for arguments in ([], ["--json"], ["--bits"], ["--lint"]):
            assert cli.main(["inspect", str(path), *arguments]) == 2
            captured = capsys.readouterr()
            assert (captured.out, len(captured.err.splitlines())) == ("", 1)
    assert cli.main(["inspect", str(tmp_path / "link")]) == 0
    dots = dump(READING_RAW, 8) + " " * MAX_INPUT_BYTES
    with pytest.raises(DescriptorError, match="more than 65536 bytes"):
        parse_content(dots.encode())
