"""Look up kernels and variables by mangled name, plain name, qualified name or an unambiguous part of a name.

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
#: Maximum number of names in an error message.
_LISTED = 8


def plain_name(symbol: str) -> str:
    """Return the plain name of a symbol without template arguments.

    For example, the plain name of ``_ZN5space6kernelILi4EEvPf`` is ``space::kernel``. A symbol that is not mangled is
    returned unchanged.
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
    """Return the symbol whose full name, plain name, prefix or other part is ``name``.

    An empty ``name`` selects the only symbol. Raise an ArgumentError with candidates if ``name`` does not match
    exactly one symbol. ``field`` is the argument's name in the message, and ``what`` is the plural noun for the
    symbols.
    """
    if not isinstance(name, str):
        raise ArgumentTypeError(field, type(name).__name__, "a str")
    if not symbols:
        raise ArgumentError("ptx", f"no {what}", f"a module that contains {what}")
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
            raise ArgumentError(
                field, name, _some(matches), f"pass a longer part of the name because {len(matches)} names match"
            )
    if not name:
        raise ArgumentError(field, "no name", _some(symbols), f"select one of the {len(symbols)} {what} in the PTX")
    near = difflib.get_close_matches(stem, symbols, _LISTED, 0.3)
    raise ArgumentError(field, name, _some([*near, *(symbol for symbol in symbols if symbol not in near)]))


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


class Variables(Mapping[str, Array]):
    """Mapping from the names of a module's global and constant variables to writable uint8 arrays of their bytes.

    find_name() resolves names. ``variables["table"].view(np.float32)[3]`` reads an element, and ``variables["table"] =
    array`` copies the bytes of an array of the same size. Values persist until they are changed or the module is loaded
    again.
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
