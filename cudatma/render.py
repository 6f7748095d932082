"""The only Jinja environment: (template, spec, target) -> CUDA source text.

Templates look like CUDA. Jinja's own delimiters collide with C++ and PTX, so these stand in their place:

    ${ spec.stages }                                a value; only str and int may be printed
    //% include "primitives/mbarrier.cuh.j2"        a statement that takes a whole line
    //# why                                         a note that does not reach the output
    /*% if x %*/ .. /*% endif %*/   /*# why #*/     the same inside a line

An include names its file in quotes and renders once an output: whoever needs a primitive includes it, and the second
include of the same file renders nothing. `spec`, `target` and `debug` are all that a template sees; an unknown name is
an error, and the filters that would hide or scramble values (`default`, `random`) are not there.
"""

from __future__ import annotations

import hashlib
import os
import re
import traceback
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.lexer import Token, TokenStream
from jinja2.parser import Parser

from cudatma.errors import TemplateError
from cudatma.target import Target, get_target
from cudatma.used_functions import without_unused

#: What a template may use; every filter keeps the order of its input and prints nothing that is not str or int.
_FILTERS = ("first", "indent", "join", "last", "length", "list", "lower", "map", "replace", "reverse", "upper")
_GLOBALS = ("range",)
_SOURCE_NAME = "<source>"

#: include, import, from .. import and extends, as a line statement or a block; the names are literals, see IncludeOnce.
_REFERENCE = re.compile(
    r"""(?:^[ \t]*//%|/\*%)[-+]?[ \t]*(?:include|import|from|extends)[ \t]+(["'])(?P<name>[^"'\n]+)\1""", re.MULTILINE
)

#: Files that the running render() has included so far.
_included: ContextVar[set[str]] = ContextVar("cudatma_included")


class IncludeOnce(Extension):
    """Jinja's include, restricted to a literal name and to the first use of that name in an output."""

    tags = {"include_once"}  # noqa: RUF012  (jinja2 declares it this way)

    def filter_stream(self, stream: TokenStream) -> Iterator[Token]:
        """Rename the ``include`` keyword, which a parser extension may not take over, to this extension's tag."""
        opened = False
        for token in stream:
            if opened and token.type == "name" and token.value == "include":
                yield Token(token.lineno, "name", "include_once")
            else:
                yield token
            opened = token.type == "block_begin"

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        name = parser.stream.expect("string").value
        include = nodes.Include(nodes.Const(name), True, False, lineno=lineno)
        first = self.call_method("first_use", [nodes.Const(name)], lineno=lineno)
        return nodes.If(first, [include], [], [], lineno=lineno)

    def first_use(self, name: str) -> bool:
        """Whether the running render() includes ``name`` for the first time; from now on it has."""
        included = _included.get()
        known = name in included
        included.add(name)
        return not known


def _printable(value: Any) -> Any:
    """Jinja's finalize: what ``${ }`` may print. Exact types: a bool or an IntEnum is an int that prints as a name."""
    if type(value) in (str, int) or isinstance(value, jinja2.Undefined):
        return value  # an Undefined raises by itself, and names the variable
    raise TypeError(f"${{ }} got {value!r} ({type(value).__name__}); allowed: str, int. Let the spec convert it")


@lru_cache(maxsize=1)
def template_root() -> Path:
    """The folder of the templates: beside the package's modules in a wheel, beside the package in a checkout.

    Raises TemplateError where neither exists.
    """
    package = Path(__file__).resolve().parent
    for folder in (package / "ptx_templates", package.parent / "ptx_templates"):
        if (folder / "primitives").is_dir():
            return folder
    raise TemplateError(
        f"template folder: got none beside {package}; allowed: an installed cudatma or a whole checkout."
        " Reinstall cudatma"
    )


@lru_cache(maxsize=4)
def _environment(root: Path) -> jinja2.Environment:
    environment = jinja2.Environment(
        block_start_string="/*%",
        block_end_string="%*/",
        variable_start_string="${",
        variable_end_string="}",
        comment_start_string="/*#",
        comment_end_string="#*/",
        line_statement_prefix="//%",
        line_comment_prefix="//#",
        trim_blocks=False,
        keep_trailing_newline=True,
        autoescape=False,
        undefined=jinja2.StrictUndefined,
        finalize=_printable,
        extensions=[IncludeOnce],
        loader=jinja2.FileSystemLoader(root),
    )
    environment.filters = {name: environment.filters[name] for name in _FILTERS}
    environment.globals = {name: environment.globals[name] for name in _GLOBALS}
    return environment


def render(
    template: str,
    spec: Any,
    target: str | Target,
    *,
    is_source: bool = False,
    debug: bool = False,
    root: Path | None = None,
) -> str:
    """The CUDA source of a template for a spec and a target.

    template: a name below ``ptx_templates/`` (``"kernels/tile_copy.cu.j2"``), or the text itself with ``is_source``.
    spec: a frozen dataclass, or None; the template sees it as ``spec``. If it has ``notes`` (an iterable of str), these
    lines stand in the opening comment: what each stage holds.
    debug: the template sees it as ``debug``; the primitives then bound their waits and check what they are asked for,
    see docs/debugging.md. Without it nothing of that is in the text.
    root: another folder of templates, as those of another version; None: template_root().
    The same arguments give the same bytes. Raises TemplateError, which names template and line, and TargetError.
    """
    chosen, folder = get_target(target), root or template_root()
    name = _SOURCE_NAME if is_source else template
    token = _included.set({name})
    try:
        environment = _environment(folder)
        loaded = environment.from_string(template) if is_source else environment.get_template(template)
        body = loaded.render(spec=spec, target=chosen, debug=bool(debug))
    except TemplateError:
        raise
    except Exception as error:  # whatever an expression of the template raised
        raise TemplateError(_explain(name, error, folder)) from error
    finally:
        _included.reset(token)
    opening = _opening_comment(name, spec, chosen, debug)
    body = re.sub(r"\n{3,}", "\n\n", "\n" + body.strip("\n")) + "\n"
    # A user's text stays as it is, line by line.
    return opening + (body if is_source else without_unused(body))


def template_files(template: str) -> tuple[Path, ...]:
    """The template and every file that it can include, for the cache key: the template first, the others by name.

    Reads the text only: nothing is parsed or rendered. Raises TemplateError for a name that has no file.
    """
    found: dict[str, Path] = {}
    waiting = [(template, "")]
    while waiting:
        name, user = waiting.pop()
        if name in found:
            continue
        found[name] = path = _template_path(name, user)
        state = path.stat()
        waiting.extend((other, name) for other in _references(path, state.st_mtime_ns, state.st_size))
    others = sorted(name for name in found if name != template)
    return (found[template], *(found[name] for name in others))


def template_fingerprint() -> str:
    """64 hexadecimal digits over path, size and modification time (ns) of every file below ``ptx_templates/``.

    As long as they are the same, so is what is made from them; to look costs a tenth of reading.
    """
    found, waiting = [], [str(template_root())]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_dir():
                    waiting.append(entry.path)
                else:
                    state = entry.stat()
                    found.append(f"{entry.path}\0{state.st_size}\0{state.st_mtime_ns}\n")
    return hashlib.sha256("".join(sorted(found)).encode(errors="surrogateescape")).hexdigest()


@lru_cache(maxsize=512)
def _references(path: Path, _changed_ns: int, _bytes: int) -> tuple[str, ...]:
    """What a file can include, as long as it is the same: kernels share most of their files."""
    return tuple(match["name"] for match in _REFERENCE.finditer(path.read_text(encoding="utf-8")))


@lru_cache(maxsize=512)
def _place(root: Path, name: str) -> Path:
    return root.joinpath(*name.split("/"))


def _template_path(name: str, user: str) -> Path:
    path = _place(template_root(), name)
    if not name or any(part in ("", ".", "..") for part in name.split("/")) or not path.is_file():
        where = f", included by {user}" if user else ""
        raise TemplateError(f"template {name!r}{where}: got no such file; allowed: a path below {template_root()}")
    return path


def _explain(name: str, error: Exception, root: Path) -> str:
    """``template:line: reason``; the line is that of the innermost template the error passed through."""
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"{error.name or name}:{error.lineno}: {error.message}"
    place = name
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        if path.is_relative_to(root):
            place = f"{path.relative_to(root).as_posix()}:{frame.lineno}"
        elif frame.filename in ("<template>", "<unknown>"):
            place = f"{_SOURCE_NAME}:{frame.lineno}"
    if isinstance(error, jinja2.TemplateNotFound):
        return f"{place}: got no template {error.name!r}; allowed: a path below {root}"
    return f"{place}: {error}"


def _opening_comment(name: str, spec: Any, target: Target, debug: bool = False) -> str:
    lines = [f"cudatma: {name} for {target.name}"]
    if debug:
        lines.append("debug: every wait ends after a time and says what it waited for")
    if spec is not None:
        lines.append(f"spec: {type(spec).__name__}")
        if is_dataclass(spec):
            lines += [f"  {f.name} = {_shown(getattr(spec, f.name), f.name)}" for f in fields(spec) if f.init]
        notes: Iterable[str] = getattr(spec, "notes", ())
        lines += [line for note in notes for line in str(note).splitlines()]
    # A backslash at the end of a // comment would swallow the next line.
    return "".join(f"// {line.rstrip()}".rstrip("\\ ") + "\n" for line in lines)


def _shown(value: Any, field: str) -> str:
    """A spec's value as text that is the same in every process; TemplateError for what has none."""
    if value is None or type(value) in (bool, int, float, str, bytes):
        return repr(value)
    if isinstance(value, (Enum, np.dtype)):
        return value.name
    if isinstance(value, (tuple, list)):
        return f"({', '.join(_shown(item, field) for item in value)})"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(_shown(item, field) for item in value))}}}"
    if is_dataclass(value) and not isinstance(value, type):
        name = getattr(value, "name", None)
        if isinstance(name, str):
            return name
        inner = (f"{f.name}={_shown(getattr(value, f.name), field)}" for f in fields(value) if f.init)
        return f"{type(value).__name__}({', '.join(inner)})"
    raise TemplateError(
        f"spec.{field}: got {type(value).__name__}; allowed: int, float, str, bool, None, an enum, a NumPy dtype, or a"
        " tuple or dataclass of them. A spec's text must not depend on the process"
    )
