"""Every fenced block of README.md and docs/**/*.md runs as it stands: alone, in a folder of its own.

The paragraph before a block says how:

- "`name`:" or "`name`, in the same folder:" makes the block a file, which the page's other blocks find;
  `test_*.py` is run by pytest.
- "needs a GPU": where there is none, Python ends in an error of cudatma's, and a command's options are parsed only.
- "takes minutes": a command's options are parsed only.

Blocks without a language show output. One that begins with `$ cudatma` shows a command and what it prints; `...` stands
for the first lines. test_guide.py runs the pages of docs/guide, whose blocks continue each other. The site
writes docs/reference/hazards.
"""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, NoReturn

import pytest
from shown_output import comparable

from cudatma import cli
from cudatma.build.ptx_source import ptx_source
from cudatma.emulator.trace.svg import text_width
from cudatma.errors import CudaTmaError
from cudatma.target import detect
from tools.dev import call_picture, pipeline_picture
from tools.dev.drawing import Drawing
from tools.emulate_launch import read_launch

pytest_plugins = ["pytester"]

ROOT = Path(__file__).resolve().parents[2]
ELSEWHERE = {page for folder in ("guide", "reference/hazards") for page in (ROOT / "docs" / folder).glob("*.md")}
PAGES = [ROOT / "README.md", *sorted(set((ROOT / "docs").rglob("*.md")) - ELSEWHERE)]
#: Commands of a shell that are not cudatma's to check.
FOREIGN = ("cp", "export", "pip", "vllm")


@dataclass(frozen=True)
class Block:
    """before: the paragraph before it. file: what the page calls it, or ""."""

    page: str
    line: int
    language: str
    text: str
    before: str

    @property
    def file(self) -> str:
        named = re.fullmatch(r"`([\w.]+)`(?:, in the same folder)?:", self.before)
        return named[1] if named else ""

    @property
    def needs_gpu(self) -> bool:
        return "needs a GPU" in self.before

    @property
    def takes_minutes(self) -> bool:
        return "takes minutes" in self.before


def blocks_of(path: Path) -> list[Block]:
    text, found = path.read_text(encoding="utf-8"), []
    for block in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        before = text[: block.start()].rstrip().rpartition("\n\n")[2]
        line = text.count("\n", 0, block.start()) + 1
        page = path.relative_to(ROOT).as_posix()
        found.append(Block(page, line, block[1], block[2], " ".join(before.split())))
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def of_language(*languages: str, are_tests: bool = False) -> Callable[[Any], Any]:
    """are_tests: files of tests, or all others."""
    found = [block for block in BLOCKS if block.language in languages]
    chosen = [block for block in found if block.file.startswith("test_") == are_tests]
    return pytest.mark.parametrize("block", [pytest.param(b, id=f"{b.page}:{b.line}") for b in chosen])


@pytest.fixture
def folder(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with the page's files."""
    for other in BLOCKS:
        if other.page == block.page and other.file:
            (tmp_path / other.file).write_text(other.text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDATMA_BACKEND", "")  # none; what a block sets is gone afterwards
    return tmp_path


def is_triton(block: Block) -> bool:
    return "import triton" in block.text


def has_gpu() -> bool:
    try:
        detect()
    except (CudaTmaError, ImportError):
        return False
    return True


def execute(code: str, name: str) -> None:
    exec(compile(code, name, "exec"), {"__name__": "__main__"})


def test_every_language_is_run() -> None:
    assert {block.language for block in BLOCKS} == {"", "cuda", "python", "sh", "toml"}


def test_the_first_python_of_the_readme_needs_numpy_alone() -> None:
    first = next(block for block in BLOCKS if block.page == "README.md" and block.language == "python")
    assert set(re.findall(r"^(?:import|from) (\w+)", first.text, re.MULTILINE)) == {"cudatma", "numpy"}
    assert not first.needs_gpu


@of_language("python", are_tests=True)
def test_test_files(block: Block, folder: Path, pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_inprocess("-p", "cudatma.pytest_plugin", "-p", "no:cacheprovider", folder / block.file)
    result.assert_outcomes(passed=block.text.count("\ndef test_"))


@pytest.mark.sweep(8)
@of_language("python")
@pytest.mark.usefixtures("folder")
@pytest.mark.filterwarnings("ignore::cudatma.BackendWarning")
def test_python(block: Block) -> None:
    if "cudatma.integrations" in block.text:
        pytest.importorskip("torch")
    if "cudatma.integrations.transformers" in block.text:
        pytest.importorskip("transformers", minversion="5.17")
    name = f"{block.page}:{block.line}"
    if is_triton(block):
        compile(block.text, name, "exec")  # another block runs it with `cudatma emulate`
        return
    if block.needs_gpu and not has_gpu():
        with pytest.raises(CudaTmaError):
            execute(block.text, name)
        return
    if block.needs_gpu and "import torch" in block.text:
        pytest.importorskip("torch")
    execute(block.text, name)


@pytest.mark.sweep(5)
@of_language("sh")
@pytest.mark.usefixtures("folder")
def test_commands(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    if ".toml" in block.text and sys.version_info < (3, 11):
        pytest.skip("Python 3.10 reads no TOML")
    commands = commands_of(block.text)
    assert commands
    for words in commands:
        run_command(words, block.needs_gpu or block.takes_minutes, monkeypatch)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.text.startswith("$ cudatma ")], ids=lambda block: block.page)
@pytest.mark.usefixtures("folder")
def test_a_command_prints_what_the_page_shows(block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    if any(is_triton(other) and f" {other.file}" in block.text for other in BLOCKS if other.page == block.page):
        pytest.importorskip("triton")
    command, shown = re.findall(r"^\$ cudatma (.*?[^\\])\n(.*)", block.text, re.DOTALL)[0]
    assert cli.main(shlex.split(command.replace("\\\n", ""))) in (0, 1)
    printed, end = comparable(capsys.readouterr().out), comparable(shown.removeprefix("...\n"))
    assert printed.endswith(end) if shown.startswith("...") else printed == end


def commands_of(text: str) -> list[list[str]]:
    """The words of each command; one may go over several lines."""
    found: list[list[str]] = []
    pending = ""
    for line in text.splitlines():
        pending += line
        if pending.endswith("\\"):
            pending = pending[:-1]
            continue
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:  # a quotation goes on
            pending += "\n"
            continue
        for part in " ".join(map(shlex.quote, words)).split(" '&&' "):
            found += [shlex.split(part)] if part else []
        pending = ""
    assert not pending, f"unfinished: {pending}"
    return found


def run_command(words: list[str], parse_only: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    name, arguments = Path(words[0]).name, words[1:]
    if name == "cudatma" and parse_only:
        benchmark = arguments[0] == "bench" and not arguments[1].startswith("-")
        module = f"benchmarks.{arguments.pop(1)}" if benchmark else f"cudatma.tools.{cli.COMMANDS[arguments[0]][0]}"
        check_options(module, arguments[1:], monkeypatch)
    elif name == "cudatma":
        assert cli.main(arguments) == 0, shlex.join(words)
    elif name == "make":
        makefile = (ROOT / "Makefile").read_text()
        assert all(f"\n{target}:" in makefile for target in arguments if "=" not in target)
    elif name in ("python", "python3") and arguments[0] == "-c":
        execute(arguments[1], "-c")
    elif name in ("python", "python3") and arguments[0] != "-m":
        script = ROOT / arguments[0]
        assert script.is_file()
        if script.parent.name == "benchmarks":
            check_options(f"benchmarks.{script.stem}", arguments[1:], monkeypatch)
    elif name == "pytest":
        assert all((ROOT / path).exists() for path in arguments if not path.startswith("-"))
    else:
        assert name in (*FOREIGN, "python3"), f"nothing is known of {name}"


def check_options(module: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """That main() of a tool takes these arguments, without doing what they say."""
    parse = argparse.ArgumentParser.parse_args

    class Parsed(Exception):  # noqa: N818
        pass

    def parse_alone(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> NoReturn:
        parse(self, args, namespace)
        raise Parsed

    with monkeypatch.context() as patched:
        patched.setattr(argparse.ArgumentParser, "parse_args", parse_alone)
        patched.setattr(importlib.import_module("cudatma.tools.command_line").Parser, "parse_args", parse_alone)
        with pytest.raises(Parsed):
            importlib.import_module(module).main(arguments)


@of_language("cuda", "toml")
def test_files(block: Block, folder: Path) -> None:
    if block.language == "toml":
        if sys.version_info < (3, 11):
            pytest.skip("Python 3.10 reads no TOML")
        assert read_launch(folder / block.file).arrays
    else:
        assert ".entry" in ptx_source(folder / block.file).ptx


SVG = "{http://www.w3.org/2000/svg}"
SCRIPTS = pytest.mark.parametrize("script", [pipeline_picture, call_picture], ids=lambda script: script.__name__)


@SCRIPTS
def test_the_picture_is_what_the_script_draws(script: Any) -> None:
    assert script.main(["--check"]) == 0, f"run: python -m {script.__name__}"


@SCRIPTS
def test_texts_are_inside_of_the_picture_and_do_not_overlap(script: Any) -> None:
    root = ElementTree.fromstring(script.picture())
    boxes = []
    for text in root.iter(f"{SVG}text"):
        size, x, y = (float(text.attrib[name]) for name in ("font-size", "x", "y"))
        wide = text_width(text.text or "", size)
        left = x - wide / 2 * (text.attrib["text-anchor"] == "middle")
        boxes.append((left, y - 0.75 * size, left + wide, y + 0.2 * size, text.text))
    for left, above, right, below, text_of in boxes:
        assert 0 <= left < right <= float(root.attrib["width"]), text_of
        assert 0 <= above < below <= float(root.attrib["height"]), text_of
    for one, other in combinations(boxes, 2):
        apart = one[0] >= other[2] or other[0] >= one[2] or one[1] >= other[3] or other[1] >= one[3]
        assert apart, (one[4], other[4])


def test_a_text_wider_than_its_box_is_refused() -> None:
    with pytest.raises(ValueError, match="wider than its box"):
        Drawing().box(0, 0, 40, 40, "#ffffff", "#000000", "a long headline")
