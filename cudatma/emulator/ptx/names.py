"""Resolve names of kernels and variables: mangled, plain, qualified, or an unambiguous part of a name.

Source: Itanium C++ ABI, "External Names (a.k.a. Mangling)".
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from cudatma.emulator.ptx.types import Array
from cudatma.errors import ArgumentError, ArgumentTypeError

_LENGTH = re.compile(r"\d+")
#: Maximum number of names that an error lists.
_LISTED = 8


def plain_name(symbol: str) -> str:
    """Return ``space::kernel`` for ``_ZN5space6kernelILi4EEvPf``, without template arguments.

    A symbol that is not mangled is returned unchanged.
    """
    if not symbol.startswith("_Z"):
        return symbol
    at = 2
    while symbol[at : at + 1] in ("N", "L", "K"):
        at += 1
    parts = []
    while length := _LENGTH.match(symbol, at):
        at = length.end() + int(length[0][:6])
        parts.append(symbol[length.end() : at])
    return "::".join(parts) or symbol


def find_name(name: str, symbols: Sequence[str], field: str, what: str) -> str:
    """Return the symbol that ``name`` refers to, by a whole name, a plain name, a prefix, or any other part.

    An empty ``name`` refers to the only symbol. If no symbol or more than one matches, raises an ArgumentError that
    names ``field`` and lists candidates. ``what`` is the plural noun for the names in the message.
    """
    if not isinstance(name, str):
        raise ArgumentTypeError(field, type(name).__name__, "a str")
    if not symbols:
        raise ArgumentError(field, name or "none", f"none: the PTX has no {what}")
    if name in symbols:
        return name
    if not name and len(symbols) == 1:
        return symbols[0]
    stem = name.partition("(")[0].partition("<")[0]
    plain = {symbol: plain_name(symbol) for symbol in symbols}
    for fits in (
        lambda symbol: plain[symbol] == stem or plain[symbol].endswith("::" + stem),
        lambda symbol: plain[symbol].rpartition("::")[2].startswith(stem) or symbol.startswith(stem),
        lambda symbol: name in symbol or stem in plain[symbol],
    ):
        matches = [symbol for symbol in symbols if stem and fits(symbol)]
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise ArgumentError(field, name, _some(matches), f"{len(matches)} names match; give more of the name")
    if not name:
        raise ArgumentError(field, "none", _some(symbols), f"the PTX has {len(symbols)} {what}; name one")
    near = difflib.get_close_matches(stem, symbols, _LISTED, 0.3)
    raise ArgumentError(field, name, _some([*near, *(symbol for symbol in symbols if symbol not in near)]))


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


class Variables(Mapping[str, Array]):
    """A mapping from names of a module's global and constant variables to their bytes, as writable uint8 arrays.

    Names are resolved by find_name(). ``variables["table"].view(np.float32)[3]`` reads an element; ``variables["table"]
    = array`` copies the bytes of an array of the same size. Values persist until they are changed or the module is
    loaded again.
    """

    def __init__(self, arrays: dict[str, Array]) -> None:
        self._arrays = arrays

    def __getitem__(self, name: str) -> Array:
        return self._arrays[find_name(name, list(self._arrays), "name", "variables")]

    def __setitem__(self, name: str, value: Any) -> None:
        variable = self[name]
        raw = value if isinstance(value, bytes | bytearray | memoryview) else np.ascontiguousarray(value).tobytes()
        data = np.frombuffer(raw, np.uint8)
        if data.size != variable.size:
            raise ArgumentError(name, f"{data.size} bytes", f"{variable.size} bytes")
        variable[:] = data

    def __contains__(self, name: object) -> bool:
        try:
            return isinstance(name, str) and self[name] is not None
        except ArgumentError:
            return False

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)
