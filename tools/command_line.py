"""The command-line parser of all subcommands, which raises cudatma's errors."""

from __future__ import annotations

import argparse
import importlib
import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from cudatma.errors import ArgumentError, similar, whole_number

#: Description of build.default_target(), for help texts.
DEFAULT_TARGET = "default: $CUDATMA_TARGET if it is set, otherwise the GPU's target, otherwise sm_90a"
_OF_ARGUMENT = re.compile(r"argument (?P<field>\S+): (?P<got>.*)", re.DOTALL)
_WRONG_VALUE = re.compile(r"invalid (?P<kind>\w+) value: '(?P<got>.*)'", re.DOTALL)
_KINDS = {"int": "an integer", "float": "a number"}
_EXCLUDED = "not allowed with argument "
#: The message of an ArgumentTypeError that a type of this module raises.
_REFUSED = re.compile(r"must be (?P<allowed>.+), got (?P<got>.*?)(?:; (?P<remedy>.+))?", re.DOTALL)
_MISSING = "the following arguments are required: "


class Parser(argparse.ArgumentParser):
    """An ArgumentParser for a subcommand that raises ArgumentError if the command line is invalid."""

    def __init__(self, prog: str, description: str | None = None, epilog: str | None = None) -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    @property
    def options(self) -> list[argparse.Action]:
        """The command's options, without its positional arguments."""
        return [action for action in self._actions if action.option_strings]

    @property
    def positionals(self) -> list[argparse.Action]:
        """The command's positional arguments."""
        return [action for action in self._actions if not action.option_strings]

    def parse_args(self, args: Any = None, namespace: Any = None) -> argparse.Namespace:  # type: ignore[override]
        """Parse the arguments. Raise ArgumentError for an unknown option."""
        options, rest = self.parse_known_args(args, namespace)
        if rest:
            self.refuse(rest)
        result: argparse.Namespace = options
        return result

    def first_positional(self, words: Sequence[str]) -> int | None:
        """Return the position of the first word that is neither an option nor the value of an option, or None."""
        position = 0
        while position < len(words):
            word = words[position]
            if word == "-" or not word.startswith("-"):
                return position
            action = self._option_string_actions.get(word)
            position += 2 if action is not None and action.nargs != 0 else 1
        return None

    def require_only(self, options: argparse.Namespace, allowed: Sequence[str], purpose: str) -> None:
        """Raise ArgumentError if an option is given that is not allowed for this purpose."""
        for action in self.options:
            if action.dest not in ("help", *allowed) and getattr(options, action.dest) != action.default:
                known = ", ".join(each.option_strings[0] for each in self.options if each.dest in allowed)
                remedy = f"the options for {purpose} are {known}"
                raise ArgumentError(action.option_strings[0], ..., f"omitted with {purpose}", remedy)

    def refuse(self, rest: Sequence[str], *others: Parser) -> NoReturn:
        """Raise ArgumentError for the first of some arguments that no parser accepts."""
        known = [name for parser in (self, *others) for action in parser._actions for name in action.option_strings]
        got = "an unexpected argument" if not rest[0].startswith("-") else "an unknown option"
        words = [name.lstrip("-") for name in known]
        meant = similar(rest[0].partition("=")[0].lstrip("-"), words)
        raise ArgumentError(
            rest[0],
            f"{got} (did you mean --{meant}?)" if meant else got,
            f"an argument that `{self.prog} --help` lists",
        )

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            field = "/".join(action.option_strings) or action.metavar or action.dest
            raise ArgumentError(str(field), str(value), ", ".join(map(str, action.choices)))

    def error(self, message: str) -> NoReturn:
        """Raise ArgumentError for any other error from argparse."""
        match = _OF_ARGUMENT.fullmatch(message)
        if message.startswith(_MISSING):
            raise ArgumentError(message[len(_MISSING) :], ..., "passed", f"see `{self.prog} --help`")
        field, got = (match["field"], match["got"]) if match else (self.prog, message)
        refused = _REFUSED.fullmatch(got)
        allowed, got, remedy = refused.group("allowed", "got", "remedy") if refused else ("", got, None)
        action = next((action for action in self._actions if field in action.option_strings), None)
        if action is not None and not allowed:
            allowed = _KINDS.get(getattr(action.type, "__name__", ""), str(action.metavar or ""))
        allowed = allowed or f"called as `{self.prog} --help` shows"
        if value := _WRONG_VALUE.fullmatch(got):
            got, allowed = value["got"], _KINDS.get(value["kind"], value["kind"])
        elif got.startswith(_EXCLUDED):
            raise ArgumentError(field, ..., f"omitted if {got[len(_EXCLUDED) :]} is passed")
        elif got == "expected one argument":
            got = "no value"
        raise ArgumentError(field, got, allowed, remedy or "")


def add_source_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the compilation of a .cu or .j2 file."""
    group = parser.add_argument_group("source options")
    add = group.add_argument
    add(
        "-I",
        "--include-dir",
        action="append",
        default=[],
        metavar="DIR",
        help="folder to search for included files; repeatable",
    )
    add("-D", "--define", action="append", default=[], metavar="NAME[=VALUE]", help="define a macro; repeatable")
    add("--std", metavar="STD", help="language standard, such as c++20 (default: c++17)")
    add("--include", action="append", default=[], metavar="FILE", help="include a file before the source; repeatable")
    add("--template", action="store_true", help="treat the .cu file as a template, like a .j2 file")


def source_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Return the values of add_source_options() as keyword arguments of ptx_source() and cudatma.compile()."""
    flags = [f"--pre-include={file}" for file in options.include]
    if options.std is not None:
        flags.append(f"--std={options.std}")
    return {
        "include_dirs": options.include_dir,
        "defines": options.define,
        "options": flags,
        "template": options.template,
    }


def parser_of(module: str) -> Parser:
    """Return the parser of the subcommand in a module of this package."""
    parser: Parser = importlib.import_module(f"{__package__}.{module}").parser()
    return parser


# ---- types of options, which raise argparse's ArgumentTypeError


def integer(minimum: int, maximum: int | None = None) -> Callable[[str], int]:
    """Return a parser of integers in a range."""
    allowed = f"an integer from {minimum} to {maximum}" if maximum is not None else whole_number(minimum)

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if value < minimum or (maximum is not None and value > maximum):
            raise argparse.ArgumentTypeError(f"must be {allowed}, got {text}")
        return value

    parse.__name__ = "int"  # for Parser.error()
    return parse


def seconds(text: str) -> float:
    """Parse a number of seconds."""
    value = _number(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0 and below 1000000, got {text}")
    return value


def tolerance(text: str) -> float:
    """Parse a relative error."""
    value = _number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a nonnegative, finite number, got {text}")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def output_file(text: str) -> Path:
    """Return the path of a writable file. Its folder need not exist."""
    return _output(text, is_folder=False)


def output_folder(text: str) -> Path:
    """Return the path of a writable folder. It need not exist."""
    return _output(text, is_folder=True)


def _output(text: str, is_folder: bool) -> Path:
    path = Path(text)
    if problem := output_problem(path, is_folder):
        kind = "folder" if is_folder else "file"
        raise argparse.ArgumentTypeError(f"must be a writable {kind}, got {text} ({problem})")
    return path


def output_problem(path: Path, is_folder: bool = False) -> str:
    """Return why a file or folder cannot be written, or "" if it can. Its parent folders may be missing."""
    try:
        existing = next(place for place in (path, *path.absolute().parents) if place.exists())
        if existing.is_dir() != (is_folder or existing != path):
            return f"{existing} is {'a' if existing.is_dir() else 'not a'} folder"
        return "" if os.access(existing, os.W_OK) else f"{existing} is read-only"
    except OSError as error:
        return str(error.strerror)
