"""The options that name a family's problem on a command line, besides its sizes."""

from __future__ import annotations

import argparse
from typing import Any

from cudatma.errors import ArgumentError
from cudatma.kernels.family import Option
from cudatma.kernels.registry import FAMILIES, family


def add_problem_options(add: Any) -> None:
    """Give a parser the options of all families. add: an argument group's ``add_argument``."""
    for of in _by_flag().values():
        option = next(iter(of.values()))
        help = f"{option.help} ({', '.join(of)}"
        if option.default is False:
            add(option.flag, dest=option.name, action="store_true", default=None, help=f"{help})")
        else:
            allowed = list(dict.fromkeys(value for one in of.values() for value in one.allowed))
            add(
                option.flag,
                dest=option.name,
                type=type(option.default),
                choices=allowed,
                help=f"{help}; default: {option.default})",
            )


def problem_options(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """A family's options by name, as given or by default. Raises ArgumentError for one that it does not have."""
    options = {option.flag: option for option in family(name).options}
    for flag, of in _by_flag().items():
        value = getattr(given, next(iter(of.values())).name)
        if value is None:
            continue
        if flag not in options:
            raise ArgumentError(flag, f"an option of {', '.join(of)}", f"for {name}: {', '.join(options)}")
        if value not in options[flag].allowed:
            raise ArgumentError(flag, value, ", ".join(map(str, options[flag].allowed)))
    found = ((option.name, getattr(given, option.name), option.default) for option in options.values())
    return {name: default if value is None else value for name, value, default in found}


def _by_flag() -> dict[str, dict[str, Option]]:
    """Flag -> families that have it -> their option."""
    flags: dict[str, dict[str, Option]] = {}
    for name in FAMILIES:
        for option in family(name).options:
            flags.setdefault(option.flag, {})[name] = option
    return flags
