"""Convert docstrings, which are plain text with ``code``, to the reStructuredText that Sphinx reads.

Public names of cudatma become links. Docstrings with numpydoc sections keep these sections for Sphinx's napoleon. In
other docstrings, the description of a parameter or field ("name: text") becomes an item of a list.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

#: A docstring line ends a paragraph if the first word of the next line would have fit within this width.
LINE_WIDTH = 108
_CODE = re.compile(r"(``.+?``)", re.DOTALL)
_SPECIAL = re.compile(r"[\\*|]|_(?=_*(?!\w))")
_PARAMETER = r"\w+(?: \([^()]*\))?"
_ITEM = re.compile(
    rf"(?:^|(?<=[.)]\s)|(?<=\n))({_PARAMETER}(?:,\s+{_PARAMETER})*):\s+|(?:(?<=[.)]\s)|(?<=\n))(?=Raises )"
)
_PAGE = re.compile(r"\b(docs/[\w/]+)\.md\b")
#: The heading of a numpydoc section.
_HEADLINE = re.compile(r"(Parameters|Returns|Yields|Raises|Warns|Notes|References|Examples|Attributes|See Also)\n-+")
#: Sections whose lines without indentation name parameters, types or errors.
_FIELD_LISTS = ("Parameters", "Returns", "Yields", "Raises", "Warns", "Attributes", "See Also")
_NAME = re.compile(r"(?<![\w.])([A-Za-z]\w+)(\(\))?(?![\w(])")


def to_rst(docstring: Sequence[str], parameters: Collection[str], public: Mapping[str, str]) -> list[str]:
    """Return a docstring as lines of reStructuredText.

    ``parameters`` contains the names of parameters and fields. ``public`` maps each public name to its role ("func",
    "class" or "exc"). Names of functions become links only if parentheses follow them.
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


def has_sections(docstring: Sequence[str]) -> bool:
    """Return whether a docstring has numpydoc sections."""
    return bool(_HEADLINE.search("\n".join(docstring)))


def linked_sections(docstring: Sequence[str], public: Mapping[str, str]) -> list[str]:
    """Return a docstring with numpydoc sections, and with its prose as reStructuredText.

    Examples and the lines that name a parameter, type or error are not changed.
    """
    lines: list[str] = []
    section = ""
    for paragraph in re.split(r"(\n\s*\n|(?<=----)\n)", "\n".join(docstring)):
        if headline := _HEADLINE.fullmatch(paragraph):
            section = headline[1]
        is_example = section == "Examples" or ">>>" in paragraph
        is_code = is_example or (paragraph.startswith("    ") and section not in _FIELD_LISTS)
        if headline or is_code or not paragraph.strip():
            lines.append(paragraph)
        elif section in _FIELD_LISTS:
            lines += re.sub(r"(?:^[ \t]+.*\n?)+", lambda text: inline(text[0], public), paragraph, flags=re.MULTILINE)
        else:
            lines.append(inline(paragraph, public))
    return "".join(lines).splitlines()


def _paragraphs(docstring: Sequence[str]) -> list[list[str]]:
    """Return the paragraphs of a docstring. A line that ends early after a sentence also ends its paragraph."""
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
    """Return pairs of parameter names and their description. Text that describes no parameters has empty names."""
    items: list[tuple[str, str]] = []
    names, begin = "", 0
    for match in _ITEM.finditer(text):
        label = " ".join((match[1] or "").split())
        if {name.partition(" ")[0] for name in re.findall(_PARAMETER, label)} <= set(parameters):
            items.append((names, text[begin : match.start()]))
            names, begin = label, match.end()
    items.append((names, text[begin:]))
    return [(names, label) for names, label in items if label.strip()]


def inline(text: str, public: Mapping[str, str]) -> str:
    """Return plain text with ``code`` as reStructuredText in which public names are links."""
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
