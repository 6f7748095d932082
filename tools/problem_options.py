"""Command-line options that describe a family's problem."""

from __future__ import annotations

import argparse
from typing import Any

from cudatma.errors import ArgumentError
from cudatma.kernels.family import Option
from cudatma.kernels.registry import FAMILIES, family
from cudatma.quantization.weight_format import weight_format

from .command_line import integer

_SIZES = {"m": ("--m", "--q-length"), "n": ("--n", "--head-dim"), "k": ("--k", "--k-length")}


def add_size_options(add: Any) -> None:
    """Add the sizes of a problem, and the size of the GPU, through an argument group's ``add_argument``."""
    for size, names in _SIZES.items():
        add(*names, type=int, metavar="SIZE", help=meanings(size))
    help = "number of SMs of the GPU (default: 132 (H200) for sm_90a, 170 (RTX 5090) for sm_120a)"
    add("--sm-count", type=integer(1), metavar="N", help=help)


def meanings(*sizes: str) -> str:
    """Return the meanings of sizes ("m", "n" or "k"), with the families to which each meaning applies."""
    families: dict[str, list[str]] = {}
    for name in FAMILIES:
        families.setdefault(" x ".join(getattr(family(name).sizes, size) for size in sizes), []).append(name)
    return ", ".join(f"{meaning} ({', '.join(names)})" for meaning, names in families.items())


def given_sizes(namespace: argparse.Namespace) -> dict[str, int] | None:
    """Return m, n and k, or None if the command line has none of them. Raise ArgumentError if one is missing."""
    sizes = {name: getattr(namespace, name) for name in ("m", "n", "k")}
    missing = [f"--{name}" for name, size in sizes.items() if size is None]
    if len(missing) == len(sizes):
        if given := given_options(namespace):
            raise ArgumentError(given[0], ..., "combined with --m, --n and --k")
        return None
    if missing:
        raise ArgumentError(missing[0], ..., "passed", "pass all of --m, --n and --k")
    return sizes


def add_problem_options(add: Any) -> None:
    """Add the other options of all families to a parser through an argument group's ``add_argument``."""
    for flag, options in _by_flag().items():
        first, *_ = options.values()
        help = "; ".join(f"{name}: {option.help}" for name, option in options.items())
        if isinstance(first.default, bool):
            add(flag, dest=first.name, action="store_true", default=None, help=help)
        else:
            allowed = list(dict.fromkeys(value for option in options.values() for value in option.allowed)) or None
            defaults = {name: option.default for name, option in options.items() if option.default != first.default}
            others = "".join(f"; {name}: {default}" for name, default in defaults.items())
            help += f" (default: {first.default}{others})" if first.default != "" else ""
            shown = f"{{{','.join(str(value) for value in allowed if value != '')}}}" if allowed else "N"
            add(flag, dest=first.name, type=type(first.default), choices=allowed, metavar=shown, help=help)


def given_options(namespace: argparse.Namespace) -> list[str]:
    """Return the flags of problem options on a command line."""
    flags = _by_flag()
    return [
        flag for flag, options in flags.items() if getattr(namespace, next(iter(options.values())).name) is not None
    ]


def problem_options(name: str, namespace: argparse.Namespace) -> dict[str, Any]:
    """Return the values of a family's options by name. Raise ArgumentError if an option of another family is given."""
    options = {option.flag: option for option in family(name).options}
    for flag in given_options(namespace):
        if flag not in options:
            own = f"an option of {' or '.join(_by_flag()[flag])}"
            raise ArgumentError(flag, own, f"an option of {name} ({', '.join(options)})")
    given = {option.name: getattr(namespace, option.name) for option in options.values()}
    values = {option.name: option.default for option in options.values()}
    values |= {name: value for name, value in given.items() if value is not None}
    if "group_size" in values and given["group_size"] is None:
        values["group_size"] = weight_format(values["format"]).default_group_size
    return values


def _by_flag() -> dict[str, dict[str, Option]]:
    """Return, for each flag, the option of each family that has this flag."""
    flags: dict[str, dict[str, Option]] = {}
    for name in FAMILIES:
        for option in family(name).options:
            flags.setdefault(option.flag, {})[name] = option
    return flags
