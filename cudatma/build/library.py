"""Primitives, the shared functions of templates. A rendered source begins with the primitives that it calls.

    //% use "mbarrier_init", "cp_async_bulk_tensor_" ~ config.rank ~ "d_load"    in a template that calls them
    //% primitive "mbarrier_init"    ...    //% endprimitive                   around a function
    //% family    ...    //% endfamily                                         around functions that share a comment

LIBRARY includes the files of all primitives in the order of the output. render() renders LIBRARY after the template,
when all uses are known. The block of a primitive may use other primitives. A template that includes a file of the
library uses all primitives of the file, and the types. Any other file is rendered only at its first include in an
output. The top level of an imported file (``from ... import``) runs once per process, so ``use`` must be inside the
file's macros.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.lexer import Token, TokenStream
from jinja2.parser import Parser

from cudatma.errors import TemplateError
from cudatma.target import get_target

LIBRARY, TYPES = "primitives/library.j2", "primitives/types.cuh.j2"
IF_COMMENT = 'If it is a comment, write "// %", or compile the text without template=True (--template)'


@dataclass(slots=True)
class Uses:
    """State of the current render().

    Attributes
    ----------
    library : frozenset of str
        Names of the library's files.
    included : set of str
        Names of the files that were rendered.
    names : dict of str to str
        Place of the first use of each name.
    files : set of str
        Library files whose primitives are all used.
    known : set of str
        Names of all primitives.
    shown : int
        Number of primitives in the output.
    """

    library: frozenset[str]
    included: set[str]
    names: dict[str, str] = field(default_factory=dict)
    files: set[str] = field(default_factory=set)
    known: set[str] = field(default_factory=set)
    shown: int = 0


running: ContextVar[Uses] = ContextVar("cudatma_uses")


def _targets_with(name: str, environment: jinja2.Environment, values: dict[str, Any]) -> str:
    """Return the name of a target that supports a primitive, or "" if there is none."""
    uses = running.get()
    known, uses.known = uses.known, set()
    try:
        for target in ("sm_90a", "sm_100a", "sm_120a"):
            uses.included, uses.library = {LIBRARY}, frozenset()
            environment.get_template(LIBRARY).render(values | {"target": get_target(target)})
            if name in uses.known:
                return target
        return ""
    finally:
        uses.known = known


def render_library(environment: jinja2.Environment, values: dict[str, Any]) -> str:
    """Return the text of the primitives that the running render() uses, with their dependencies.

    The text is empty if the render uses no primitives. Raises TemplateError if a name is not a primitive of the target.
    """
    uses = running.get()
    if not uses.names and not uses.files:
        return ""
    text, counted = "", -1
    while counted != len(uses.names):  # a primitive may use another primitive that precedes it in the library
        counted = len(uses.names)
        uses.included, uses.library = {LIBRARY}, frozenset()
        text = environment.get_template(LIBRARY).render(values)
    for name, place in uses.names.items():
        if name not in uses.known:
            if others := _targets_with(name, environment, values):
                lacking = f"a primitive that {values['target'].name} supports"
                raise TemplateError(f"{place}: {name!r} must be {lacking}; compile for {others}")
            near = difflib.get_close_matches(name, uses.known)
            remedy = f"did you mean {' or '.join(near)}?" if near else f"see the files that {LIBRARY} includes"
            raise TemplateError(f"{place}: {name!r} is not the name of a primitive; {remedy}")
    return text


def primitive_names(environment: jinja2.Environment, values: dict[str, Any]) -> set[str]:
    """Return the names of all primitives of a target."""
    uses = Uses(frozenset(), {LIBRARY})
    token = running.set(uses)
    try:
        environment.get_template(LIBRARY).render(values)
    finally:
        running.reset(token)
    return uses.known


class Library(Extension):
    """Jinja extension with the tags ``use``, ``primitive`` and ``family``, and an ``include`` of a literal name."""

    # Jinja parses ``include`` itself, so filter_stream() renames it.
    tags = {"use", "primitive", "family", "include_once"}  # noqa: RUF012  (jinja2 declares it this way)

    def filter_stream(self, stream: TokenStream) -> Iterator[Token]:
        """Rename the ``include`` keyword to this extension's tag."""
        opened = False
        for token in stream:
            if opened and token.type == "name" and token.value == "include":
                yield Token(token.lineno, "name", "include_once")
            else:
                yield token
            opened = token.type == "block_begin"

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        tag = next(parser.stream)
        parse: Callable[[Parser, int], nodes.Node] = getattr(self, f"_parse_{tag.value}")
        return parse(parser, tag.lineno)

    def _parse_include_once(self, parser: Parser, lineno: int) -> nodes.Node:
        if parser.stream.current.type != "string":
            parser.fail(
                f"`include` must be followed by a path in quotes, relative to ptx_templates. {IF_COMMENT}", lineno
            )
        name = next(parser.stream).value
        include = nodes.Include(nodes.Const(name), True, False, lineno=lineno)
        is_first = self.call_method("is_first", [nodes.Const(name)], lineno=lineno)
        return nodes.If(is_first, [include], [], [], lineno=lineno)

    def _parse_use(self, parser: Parser, lineno: int) -> nodes.Node:
        names = parser.parse_tuple()
        place = nodes.Const(f"{parser.name}:{lineno}")
        items = names.items if isinstance(names, nodes.Tuple) else [names]
        return nodes.ExprStmt(self.call_method("use", [place, *items], lineno=lineno), lineno=lineno)

    def _parse_primitive(self, parser: Parser, lineno: int) -> nodes.Node:
        name = parser.parse_expression()
        body = parser.parse_statements(("name:endprimitive",), drop_needle=True)
        is_used = self.call_method("is_used", [name, nodes.Const(parser.name)], lineno=lineno)
        blank_line = nodes.Output([nodes.TemplateData("\n")])
        return nodes.If(is_used, [*body, blank_line], [], [], lineno=lineno)

    def _parse_family(self, parser: Parser, lineno: int) -> nodes.Node:
        body = parser.parse_statements(("name:endfamily",), drop_needle=True)
        return nodes.CallBlock(self.call_method("family", [], lineno=lineno), [], [], body, lineno=lineno)

    def is_first(self, name: str) -> bool:
        """Return whether an include renders its file.

        For a library file, select the file's primitives and return False.
        """
        uses = running.get()
        if name in uses.library:
            uses.files |= {name, TYPES}
            return False
        is_new = name not in uses.included
        uses.included.add(name)
        return is_new

    def use(self, place: str, *names: str) -> None:
        for name in names:
            if not isinstance(name, str):
                raise TemplateError(f"{place}: `use` must be followed by names in quotes, got {name!r}")
            running.get().names.setdefault(name, place)

    def is_used(self, name: str, file: str) -> bool:
        uses = running.get()
        uses.known.add(name)
        is_used = name in uses.names or file in uses.files
        uses.shown += is_used
        return is_used

    def family(self, caller: Callable[[], str]) -> str:
        """Return the block if any of its primitives is used, otherwise an empty string."""
        uses = running.get()
        before = uses.shown
        text = caller()
        return text if uses.shown > before else ""
