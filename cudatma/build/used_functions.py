"""Device functions that a rendered source never calls, and constants that it never names, are left out of it. Pure.

Templates include whole files of primitives. In their text a function is `__device__ __forceinline__` at the beginning
of a line, perhaps after a `template <..>` line, and ends with a `}` there; a member function is indented by four
spaces. The comment of a function stands right above it, or above the first of several whose names differ in numbers
alone.
"""

from __future__ import annotations

import re
from collections import Counter

_FUNCTION = re.compile(
    r"^(?P<indent>(?:    )?)(?P<comment>(?:(?!// ----)//.*\n(?P=indent))*)(?:template <.*>\s(?P=indent))?"
    r"__device__ __forceinline__ [^;{}]*?(?P<name>\w+)\([^{}]*\{"
    r"(?:.*\}(?: *//.*)?\n|.*\n(?:(?!(?P=indent)\}).*\n)*(?P=indent)\}\n)\n?",
    re.MULTILINE,
)
_NO_CODE = re.compile(r'//.*|"(?:[^"\\\n]|\\.)*"')  # comments and strings: `asm` names instructions, not functions
_NAME = re.compile(r"[A-Za-z_]\w*")
#: Constants of one line at its beginning; a comment behind them goes with them.
_CONSTANTS = re.compile(r"^constexpr \w+ [^;\n]*;.*\n", re.MULTILINE)
_DECLARED = re.compile(r"(\w+) = ")
_DIGITS = re.compile(r"\d+")
_EMPTY = re.compile(r"namespace cudatma \{\n\s*\}  // namespace cudatma\n")
_BETWEEN = re.compile(r"\n*\}  // namespace cudatma\n\s*namespace cudatma \{\n+")


def without_unused(source: str) -> str:
    """The source without the functions and member functions that nothing calls, nor what calls them; namespaces that
    follow each other are one.

    Goes by names: all overloads stay, and so does everything where a pasted name (``##``) might call it.
    """
    if "##" in source:
        return source
    functions: dict[str, list[str]] = {}

    def note(found: re.Match[str]) -> str:
        functions.setdefault(found["name"], []).append(found[0])
        return ""

    waiting, used = [_FUNCTION.sub(note, source)], set[str]()
    while waiting:
        called = set(_NAME.findall(_NO_CODE.sub("", waiting.pop()))) & functions.keys() - used
        used |= called
        waiting.extend(text for name in called for text in functions[name])
    kept = _without_constants(_without_functions(source, functions.keys() - used))
    return _BETWEEN.sub("\n\n", _EMPTY.sub("", kept))


def _without_constants(source: str) -> str:
    """A line stays as it is if any of its constants is used."""
    while True:
        counts = Counter(_NAME.findall(_NO_CODE.sub("", source)))

        def leave(found: re.Match[str], counts: Counter[str] = counts) -> str:
            names = _DECLARED.findall(_NO_CODE.sub("", found[0]))
            return "" if names and all(counts[name] == 1 for name in names) else found[0]

        kept = _CONSTANTS.sub(leave, source)
        if kept == source:
            return kept
        source = kept


def _without_functions(source: str, names: set[str]) -> str:
    """A comment above several functions moves to the first of them that stays."""
    owner, comment = "", ""

    def leave(found: re.Match[str]) -> str:
        nonlocal owner, comment
        alike = _DIGITS.sub("", found["name"])
        if found["comment"] or alike != owner:
            owner, comment = alike, found["comment"]
        if found["name"] in names:
            return ""
        above, comment = "" if found["comment"] else comment, ""
        return above + found[0]

    return _FUNCTION.sub(leave, source)
