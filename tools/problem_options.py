"""The options that name a family's problem on a command line, besides its sizes."""

from __future__ import annotations

import argparse
from typing import Any

from cudatma.errors import ArgumentError
from cudatma.kernels.family import Option
from cudatma.kernels.registry import FAMILIES, family


def add_problem_options(add: Any) -> None:
    """Give a parser the options of all families. add: an argument group's ``add_argument``."""
    for flag, of in _by_flag().items():
        first, *_ = of.values()
        help = "; ".join(f"{name}: {option.help}" for name, option in of.items())
        if isinstance(first.default, bool):
            add(flag, dest=first.name, action="store_true", default=None, help=help)
        else:
            allowed = list(dict.fromkeys(value for option in of.values() for value in option.allowed)) or None
            defaults = {name: option.default for name, option in of.items() if option.default != first.default}
            others = "".join(f"; {name}: {default}" for name, default in defaults.items())
            help += f" (default: {first.default}{others})" if first.default != "" else ""
            shown = f"{{{','.join(str(value) for value in allowed if value != '')}}}" if allowed else "N"
            add(flag, dest=first.name, type=type(first.default), choices=allowed, metavar=shown, help=help)


def given_options(given: argparse.Namespace) -> list[str]:
    """The flags of problem options that a command line has."""
    return [flag for flag, of in _by_flag().items() if getattr(given, next(iter(of.values())).name) is not None]


def problem_options(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """A family's options by name, as given or by default. Raises ArgumentError for one that it does not have."""
    options = {option.flag: option for option in family(name).options}
    for flag in given_options(given):
        if flag not in options:
            own = f"an option of {' or '.join(_by_flag()[flag])}"
            raise ArgumentError(flag, own, f"options of {name}: {', '.join(options)}")
    found = ((option.name, getattr(given, option.name), option.default) for option in options.values())
    return {name: default if value is None else value for name, value, default in found}


def _by_flag() -> dict[str, dict[str, Option]]:
    """Flag -> families that have it -> their option."""
    flags: dict[str, dict[str, Option]] = {}
    for name in FAMILIES:
        for option in family(name).options:
            flags.setdefault(option.flag, {})[name] = option
    return flags
