"""Where a tensor map may come from: debugger dumps, literals, objects; and what is refused, in one line."""

from __future__ import annotations

import ctypes
import json
import pickle
import random
import re
import struct
from collections.abc import Callable
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
from cudatma.errors import ArgumentError, ArgumentTypeError, CudaTmaError, DescriptorError
from cudatma.inspection import reading as objects
from cudatma.inspection.reading import MAX_INPUT_BYTES, parse_content
from tools import inspect_descriptor as tool

CONFIG = TiledSpec(
    dtype="float16", dims=(64, 1000), strides_bytes=(144,), box=(16, 8), swizzle="128B", address=0x7F1000
)
RAW = codec.encode(CONFIG)
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
    for line in dump(RAW, width, symbol="map").expandtabs(8).splitlines():
        wrapped += [line[at : at + columns] for at in range(0, len(line), columns)]
    assert parse_content("\r\n".join(wrapped).encode()) == RAW


def test_p_x_with_repeats() -> None:
    words = struct.unpack("<16Q", RAW)
    parts: list[str] = []
    at = 0
    while at < 16:
        end = at
        while end < 16 and words[end] == words[at]:
            end += 1
        parts.append(f"0x{words[at]:x}" + (f" <repeats {end - at} times>" if end - at > 1 else ""))
        at = end
    assert any("repeats" in part for part in parts)
    assert parse_content(f"(cuda-gdb) p/x map\n$3 = {{opaque = {{{', '.join(parts)}}}}}\n".encode()) == RAW


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: "\n".join(text.splitlines()[:-1]), "14 words"),
        (lambda text: text + text, "32 words|allowed"),
        (lambda text: "".join([*text.splitlines(True)[1:], text.splitlines()[0]]), "missing"),
        (lambda text: text.replace("0x7ffe0020", "0x7ffe0030"), "line is missing"),
        (lambda text: text.replace("\t0x", "\t0x1", 1), "word 0: got 0x1"),
        (lambda text: text.replace(":", ": oops", 1), "'oops"),
        (lambda text: text.replace("0x7ffe0020:", "Cannot access memory at address 0x7ffe0020"), "after 2 words"),
        (lambda text: "$1 = {0x1, zwei}", "zwei"),
        (lambda text: "$1 = {0x0 <repeats 99999999999 times>}", "allowed: 16 words"),
        (lambda text: "$1 = {opaque = {140737353, -12, 0 <repeats 14 times>}}", "decimal words.*p/x"),
        (lambda text: "{1, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}", "decimal words.*p/x"),
        (lambda text: "$1 = {0x0, 0x0 <repeats 15 times>, 0x1}", "17 words"),
        (lambda text: "{" + "0x0, " * 400 + "0x0}", "allowed: 16 words"),
        (lambda text: "0x" + "f" * 3000 + " 0x1" * 15, "more than 128 bits"),
    ],
)  # fmt: skip
def test_broken_dumps(change: Callable[[str], str], words: str) -> None:
    with pytest.raises(DescriptorError, match=words) as caught:
        parse_content(change(dump(RAW, 8)).encode())
    assert len(cli.one_line(caught.value).splitlines()) == 1


# Python literals, and pickles


def test_literals() -> None:
    for text in (
        repr(RAW),
        repr(bytearray(RAW)),
        f"  {RAW!r}\n",
        repr(list(RAW)),
        str(struct.unpack("<16Q", RAW)),
        repr(list(struct.unpack("<32I", RAW))),
        repr(list(struct.unpack("<64H", RAW))),
    ):
        assert parse_content(text.encode()) == RAW


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("b'abc'", "3 bytes"),
        ("b'abc", "broken Python literal"),
        ("[1, 2, 3]", "3 integers"),
        ("[1.5]", "type list"),
        ("[True] * 3", "broken Python literal"),
        ("[" * 30000, "broken Python literal"),
        ("(((((1)))))", "type int"),
        ("[-1" + ", 0" * 15 + "]", "word 0: got -0x1"),
        ("[300" + ", 0" * 127 + "]", "word 0: got 0x12c"),
        ("[" + "9" * 5000 + ", 0]", "literal|integers"),
        ("bytearray(open('/etc/passwd').read())", "bytes"),
        ("(__import__('os').system('true'))", "broken Python literal"),
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
    for value in (_Bomb(), RAW):
        with pytest.raises(DescriptorError):
            parse_content(pickle.dumps(value, protocol))
    if protocol >= 2:
        with pytest.raises(DescriptorError, match="a pickle can run code"):
            parse_content(pickle.dumps(_Bomb(), protocol))


# Objects


def test_objects_of_every_kind_say_the_same() -> None:
    expected = tool.describe_descriptor(RAW)
    made = TensorMap.tiled(CONFIG, encoder="codec")
    words = struct.unpack("<16Q", RAW)
    for source in (
        made,
        CONFIG,
        RAW,
        bytearray(RAW),
        memoryview(RAW),
        (ctypes.c_ubyte * 128).from_buffer_copy(RAW),
        np.frombuffer(RAW, np.uint8),
        np.frombuffer(RAW, np.uint64),
        np.frombuffer(RAW, np.uint32).reshape(4, 8),
        SimpleNamespace(opaque=list(words)),
        RAW.hex(),
        dump(RAW, 4),
        RAW.hex().encode(),
    ):
        found = cudatma.inspect(source)
        assert found.fields == expected
        assert found.data == RAW


@pytest.mark.parametrize(
    ("source", "device", "error", "words"),
    [
        (None, None, ArgumentTypeError, "source: got None"),
        (True, None, ArgumentTypeError, "True"),
        (4096, None, ArgumentError, "device: got None"),
        (4096, -1, ArgumentError, "device: got -1"),
        (0, 0, ArgumentError, "a device address"),
        (-5, 0, ArgumentError, "a device address"),
        (RAW, 0, ArgumentError, "device: got 0"),
        (object(), None, ArgumentTypeError, "got object"),
        (3.5, None, ArgumentTypeError, "got float"),
        (np.zeros(64, np.uint8), None, DescriptorError, "an array of 64 bytes"),
        (np.zeros((64, 64), np.float16), None, DescriptorError, "TensorMap.from_array"),
        (np.zeros(256, np.uint8)[::2], None, DescriptorError, "contiguous"),
        (RAW[:-1], None, DescriptorError, "127 bytes"),
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
        ctypes.memmove(to, RAW, size)
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
    assert cudatma.inspect(0x7000, device=1).data == RAW
    assert calls == expected
    calls.clear()
    info = ArrayInfo(0x7000, (128,), (1,), np.dtype(np.uint8), 1, None, "cupy")
    assert objects.content_of(info) == RAW
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
        assert "documents only" in text
    with pytest.raises(DescriptorError, match="layout is not documented"):
        found.svg()
    with pytest.raises(DescriptorError, match="bytes"):
        found.compare(CONFIG)


# --object


def test_object_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my_maps.py").write_text(
        "from cudatma import Im2colWideSpec, TiledSpec\n"
        f"class Holder:\n    weights = bytes.fromhex('{RAW.hex()}')\n"
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
    assert "verified on no GPU" in " ".join(capsys.readouterr().out.split())
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
    forms = [dump(RAW, width).encode() for width in (1, 2, 4, 8)]
    forms += [RAW.hex().encode(), repr(RAW).encode(), repr(list(RAW)).encode(), b"{0x1, 0x2 <repeats 15 times>}", RAW]
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
    refused = [refusal(data) for data in mutations(7, 3000)]
    assert max(len(text.splitlines()) for text in refused) == 1
    assert 0 < refused.count("") < len(refused), "some mutations leave a map that can be read"


@given(data=st.binary(max_size=300) | st.text(max_size=300).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_junk_is_a_typed_error(data: bytes) -> None:
    assert len(refusal(data).splitlines()) <= 1


def test_huge_files_directories_and_links(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    huge, loop, gone = tmp_path / "huge", tmp_path / "loop", tmp_path / "gone"
    with huge.open("wb") as stream:
        stream.truncate(1 << 40)  # a file without content that is larger than memory
    loop.symlink_to(loop)
    gone.symlink_to(tmp_path / "nowhere")
    good = tmp_path / "good"
    good.write_bytes(RAW)
    (tmp_path / "link").symlink_to(good)
    for path in (huge, loop, gone, tmp_path):
        for arguments in ([], ["--json"], ["--bits"], ["--lint"]):
            assert cli.main(["inspect", str(path), *arguments]) == 2
            captured = capsys.readouterr()
            assert (captured.out, len(captured.err.splitlines())) == ("", 1)
    assert cli.main(["inspect", str(tmp_path / "link")]) == 0
    dots = dump(RAW, 8) + " " * MAX_INPUT_BYTES
    with pytest.raises(DescriptorError, match="more than 65536 bytes"):
        parse_content(dots.encode())
