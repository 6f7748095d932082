"""Convert docstrings for the documentation site: cudatma's are plain text with ``code``, Sphinx reads reStructuredText.

A description of a parameter or field ("name: text") becomes an item of a list, everything else paragraphs. Public names
of cudatma become links.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

#: A docstring line that had room for the next line's first word ends a paragraph.
LINE_WIDTH = 108
_CODE = re.compile(r"(``.+?``)", re.DOTALL)
_SPECIAL = re.compile(r"[\\*|]|_(?=_*(?!\w))")
_PARAMETER = r"\w+(?: \([^()]*\))?"
_ITEM = re.compile(
    rf"(?:^|(?<=[.)]\s)|(?<=\n))({_PARAMETER}(?:,\s+{_PARAMETER})*):\s+|(?:(?<=[.)]\s)|(?<=\n))(?=Raises )"
)
_PAGE = re.compile(r"\b(docs/[\w/]+)\.md\b")
_NAME = re.compile(r"(?<![\w.])([A-Za-z]\w+)(\(\))?(?![\w(])")


def to_rst(docstring: Sequence[str], parameters: Collection[str], public: Mapping[str, str]) -> list[str]:
    """Convert the lines of a docstring to reStructuredText.

    ``parameters`` are the names of parameters and fields. ``public`` maps each public name to its role ("func",
    "class", "exc"); functions are linked if they are written with parentheses.
    """
    lines: list[str] = []
    for paragraph in _paragraphs(docstring):
        if paragraph[0].startswith((" ", ">>>", "- ")):
            lines += [*paragraph, ""]
            continue
        for names, text in _items("\n".join(paragraph), parameters):
            shown = inline(" ".join(text.split()), public)
            lines += [f"- {re.sub(_PARAMETER, _bold, names)}: {shown}" if names else shown, ""]
    return lines


def _paragraphs(docstring: Sequence[str]) -> list[list[str]]:
    """Split lines at empty lines, and after a sentence that ends before the end of its line."""
    paragraphs: list[list[str]] = [[]]
    for line, after in zip(docstring, [*docstring[1:], ""], strict=True):
        if line.strip():
            paragraphs[-1].append(line)
        word = after.partition(" ")[0]
        ends_early = line.endswith(".") and word[:1].isupper() and len(line) + 1 + len(word) <= LINE_WIDTH
        if paragraphs[-1] and (not line.strip() or ends_early):
            paragraphs.append([])
    return [paragraph for paragraph in paragraphs if paragraph]


def _bold(parameter: re.Match[str]) -> str:
    name, space, rest = parameter[0].partition(" ")
    return f"**{name}**{space}{rest}"


def _items(text: str, parameters: Collection[str]) -> list[tuple[str, str]]:
    """Return the names and the text about them, in order; no names if the text is not about parameters."""
    items: list[tuple[str, str]] = []
    names, begin = "", 0
    for match in _ITEM.finditer(text):
        label = " ".join((match[1] or "").split())
        if {name.partition(" ")[0] for name in re.findall(_PARAMETER, label)} <= set(parameters):
            items.append((names, text[begin : match.start()]))
            names, begin = label, match.end()
    items.append((names, text[begin:]))
    return [(names, text) for names, text in items if text.strip()]


def inline(text: str, public: Mapping[str, str]) -> str:
    """Convert plain text with ``code`` to reStructuredText, with links for public names."""
    parts = _CODE.split(text)
    for index in range(0, len(parts), 2):
        pieces = re.split(r"(`[^`]+`)", parts[index])
        plain = [_linked(piece, public) if i % 2 == 0 else f"`{piece}`" for i, piece in enumerate(pieces)]
        parts[index] = "".join(plain)
    return "".join(parts)


def _linked(text: str, public: Mapping[str, str]) -> str:
    def link(match: re.Match[str]) -> str:
        role = public.get(match[1])
        if role is None or (role == "func") != bool(match[2]):
            return match[0]
        return rf":py:{role}:`~cudatma.{match[1]}`"

    return _PAGE.sub(r":doc:`/\1`", _NAME.sub(link, _SPECIAL.sub(r"\\\g<0>", text)))
