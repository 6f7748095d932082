"""The project's only Jinja environment, which renders a template for a config and a target as CUDA source.

Templates look like CUDA. Jinja's default delimiters collide with C++ and PTX, so these delimiters replace them:

    ${ config.stages }                                prints a value, which must be a str or int
    //% include "primitives/mbarrier.cuh.j2"        a statement on its own line
    //# why                                         a comment that the output omits
    /*% if x %*/ ... /*% endif %*/  /*# why #*/     a statement and a comment within a line

The environment is sandboxed. A template can use `config`, `target` and `debug`, but cannot access other Python objects
through them. An unknown name is an error. Filters that would hide errors or give random values (`default`, `random`)
are removed. Templates select primitives by name, as library.py describes.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from jinja2.ext import Extension
from jinja2.lexer import Token, TokenStream
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cudatma.build.files import content
from cudatma.build.library import IF_COMMENT, LIBRARY, Library, Uses, primitive_names, render_library, running
from cudatma.errors import TemplateError, similar
from cudatma.target import Target, get_target

#: Filters that templates may use. They preserve the order of their input and print only str and int values.
_FILTERS = ("first", "indent", "join", "last", "length", "list", "lower", "map", "replace", "reverse", "upper")
_GLOBALS = ("range",)
_SOURCE_NAME = "<source>"

#: Matches include, import, from ... import and extends with a literal name, as a line statement or a block, and the
#: statements use and primitive, which refer to the library. The pattern begins with a literal character so that re can
#: skip most of a file.
_REFERENCE = re.compile(
    r"""/[/*]%[-+]?[ \t]*(?:(?:include|import|from|extends)[ \t]+(["'])(?P<name>[^"'\n]+)\1|(?:use|primitive)\b)""",
)
#: Matches syntax that is common in templates and does not occur in CUDA. A ${ in a // comment does not match.
_TEMPLATE_SYNTAX = re.compile(
    r"^[ \t]*//%[-+]?[ \t]*(?:include|import|from|use|set|if|for|macro)\b|^(?:(?!//).)*\$\{|/\*%", re.MULTILINE
)

#: Matches a section heading directly after code, and code directly after a function or a struct. The blank lines are
#: missing because Jinja removes them after a line statement.
_SECTION = re.compile(r"(?<!\n)\n(?=// ---- )|(?<=\n\})\n(?=[^\n}])|(?<=\n\};)\n(?=[^\n}])")


class LineDirectives(Extension):
    """Extension that inserts a #line directive wherever the line numbers of output and template diverge.

    The compiler, and therefore PTX, hazards and hang reports, then use the line numbers of the user's file. The body of
    a macro has no directive, because it may be printed in the middle of a line.
    """

    def filter_stream(self, stream: TokenStream) -> Iterator[Token]:
        name = line_name(stream.name or _SOURCE_NAME)
        is_lost, at_line_start, expected = False, True, 1
        statement: list[str] = []
        bodies = 0
        yield Token(1, "data", f'\n#line 1 "{name}"\n')
        for token in stream:
            if token.type == "data":
                is_lost = is_lost or token.lineno != expected
                expected = token.lineno + token.value.count("\n")
                if is_lost and not bodies:
                    value, is_lost = _with_line(token.value, token.lineno, name, at_line_start)
                    token = Token(token.lineno, "data", value)
                at_line_start = token.value.endswith("\n")
            elif token.type in ("block_begin", "variable_begin"):
                statement = []
            elif token.type == "block_end":
                bodies += _opens_body(statement)
                is_lost, at_line_start = True, "\n" in token.value
            elif token.type == "variable_end":
                is_lost, at_line_start = is_lost or "(" in statement, False
                expected = token.lineno
            else:
                statement.append(str(token.value))
            yield token


def _opens_body(statement: list[str]) -> int:
    """Return 1 for a statement that begins to capture text, -1 for a statement that ends the capture, otherwise 0."""
    if not statement:
        return 0  # Jinja reports the error
    if statement[0] in ("macro", "call", "filter") or (statement[0] == "set" and "=" not in statement):
        return 1
    return -int(statement[0] in ("endmacro", "endcall", "endfilter", "endset"))


def _with_line(text: str, number: int, name: str, at_line_start: bool) -> tuple[str, bool]:
    """Return the text with a directive at the first line start, and whether no line start can take a directive."""
    if at_line_start:
        return f'#line {number} "{name}"\n{text}', False
    end = text.find("\n")
    while text[:end].endswith("\\"):  # a directive must not interrupt the continued line
        end = text.find("\n", end + 1)
    if end < 0:
        return text, True
    after = number + text.count("\n", 0, end + 1)
    return f'{text[: end + 1]}#line {after} "{name}"\n{text[end + 1 :]}', False


def line_name(name: str) -> str:
    """Return an absolute name for a #line directive (NVRTC prepends its working directory to relative names)."""
    quoted = name.replace("\\", "/").replace('"', "'")
    return f"/{quoted}"


def _printable(value: Any) -> Any:
    """Return a value that ``${ }`` may print (Jinja's finalize).

    The type must be exactly str or int, because a bool or an IntEnum is an int that would be printed as a name.
    """
    if type(value) in (str, int) or isinstance(value, jinja2.Undefined):
        return value  # Jinja raises an error with the name of an undefined variable
    raise TypeError(
        f"a value in ${{ }} must be a str or an int, got {value!r} ({type(value).__name__}); convert it in the config"
    )


@lru_cache(maxsize=1)
def template_root() -> Path:
    """Return the template folder.

    The folder is next to the package's modules in a wheel, and next to the package in a checkout. Raises TemplateError
    if neither folder exists.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "ptx_templates", package.parent / "ptx_templates"):
        if (folder / "primitives").is_dir():
            return folder
    raise TemplateError(f"the template folder is missing in {package} and {package.parent}; reinstall cudatma")


class _Loader(jinja2.FileSystemLoader):
    """Loader of the templates in a folder, which reuses a parsed template only while its text stays the same."""

    def get_source(self, environment: jinja2.Environment, template: str) -> tuple[str, str, Callable[[], bool]]:
        text, filename, _ = super().get_source(environment, template)
        data = text.encode(self.encoding)

        def is_the_same() -> bool:
            try:
                return content(filename) == data
            except OSError:
                return False

        return text, filename, is_the_same


@lru_cache(maxsize=8)
def _environment(root: Path, has_lines: bool = False) -> jinja2.Environment:
    """Return the environment for a template folder.

    ``has_lines`` states whether the environment adds #line directives.
    """
    environment = ImmutableSandboxedEnvironment(
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
        extensions=[Library, LineDirectives] if has_lines else [Library],
        loader=_Loader(root),
    )
    environment.filters = {name: environment.filters[name] for name in _FILTERS}
    environment.globals = {name: environment.globals[name] for name in _GLOBALS}
    return environment


def render(
    template: str,
    config: Any,
    target: str | Target,
    *,
    is_source: bool = False,
    name: str | None = None,
    debug: bool = False,
) -> str:
    """Render a template for a config and a target.

    Equal arguments produce equal text.

    Parameters
    ----------
    template : str
        A name below ``ptx_templates/`` (``"kernels/tile_copy.cu.j2"``), or the text of the template if ``is_source`` is
        true.
    config : dataclass instance or None
        ``config`` in the template. Its ``notes``, an iterable of str, become lines of the opening comment.
    target : str or Target
        ``target`` in the template.
    is_source : bool, default False
        Whether ``template`` is the text of the template.
    name : str, optional
        File name of the text. The source then has #line directives with this name.
    debug : bool, default False
        ``debug`` in the template. If it is true, primitives limit the duration of their waits and check their
        arguments, as docs/howto/debug_a_hang.md describes.

    Returns
    -------
    str
        CUDA C++ source.

    Raises
    ------
    TemplateError
        If the template cannot be rendered. The error has the name and line of the template.
    TargetError
        If the target is unknown.
    """
    chosen, folder = get_target(target), template_root()
    shown = (name or _SOURCE_NAME) if is_source else template
    token = running.set(Uses(_library_files(), {shown}))
    values = {"config": config, "target": chosen, "debug": bool(debug)}
    try:
        environment = _environment(folder, is_source and name is not None)
        if is_source:
            code = environment.compile(template, shown)
            loaded = jinja2.Template.from_code(environment, code, environment.make_globals(None))
        else:
            loaded = environment.get_template(template)
        body = loaded.render(values)
        if is_source and "shared_address" in template and (uses := running.get().names):
            uses.setdefault("shared_address", shown)  # the arguments of primitives are shared-memory addresses
        library = render_library(environment, values)
    except TemplateError:
        raise
    except Exception as error:  # an expression in the template may raise any error
        raise TemplateError(_explain(shown, error, folder)) from error
    finally:
        running.reset(token)
    if library and name is not None:  # continue at line 1 of the user's file
        library = f'#line 1 "{line_name(name)}"\n\n{library}'
    body = f"{library}\n{body}".strip("\n")
    if name is None:  # #line directives also count blank lines
        body = re.sub(r"\n{3,}", "\n\n", body)
    opening, body = _opening_comment(shown, config, chosen, debug), f"\n{body}\n"
    # Keep a user's text unchanged, line by line.
    return opening + (body if is_source else _SECTION.sub(r"\n\n", body))


def primitives_of(target: Target) -> set[str]:
    """Return the names of the primitives that a template for this target may use."""
    return primitive_names(_environment(template_root()), {"config": None, "target": target, "debug": False})


def is_like_template(text: str) -> bool:
    """Return whether a text contains template syntax: an include or another statement, ``${`` or ``/*%``."""
    return _TEMPLATE_SYNTAX.search(text) is not None


def template_texts(*templates: str) -> dict[str, bytes]:
    """Return the current contents of templates and of all files that they can include, for the cache key.

    The given templates come first, followed by the other files in the order of their names. Nothing is parsed or
    rendered. Raises TemplateError if a file is missing.
    """
    root, texts = str(template_root()), dict[str, bytes]()
    waiting = [(template, "") for template in reversed(templates)]
    while waiting:
        name, user = waiting.pop()
        if name not in texts:
            texts[name] = text = _template_text(root, name, user)
            waiting.extend((other, name) for other in _references(text))
    others = sorted(texts.keys() - set(templates))
    return {name: texts[name] for name in (*templates, *others)}


def template_files(template: str) -> tuple[Path, ...]:
    """Return the paths of the files that template_texts() returns."""
    return tuple(template_root() / name for name in template_texts(template))


def _library_files() -> frozenset[str]:
    """Return the names of the files that define primitives, or an empty set if the template folder has no library."""
    root = template_root()
    return frozenset(_references(content(f"{root}/{LIBRARY}"))) if (root / LIBRARY).is_file() else frozenset()


@lru_cache(maxsize=512)
def _references(text: bytes) -> tuple[str, ...]:
    """Return the template names to which a template refers."""
    names = []
    decoded = text.decode("utf-8")
    for match in _REFERENCE.finditer(decoded):
        begin = match.start()
        is_block = decoded[begin + 1] == "*"
        if is_block or not decoded[decoded.rfind("\n", 0, begin) + 1 : begin].strip():
            names.append(match["name"] or LIBRARY)
    return tuple(names)


def _template_text(root: str, name: str, user: str) -> bytes:
    if name and not any(part in ("", ".", "..") for part in name.split("/")):
        with suppress(OSError, ValueError):  # ValueError: the name contains a null character
            return content(f"{root}/{name}")
    where = f", included by {user}" if user else ""
    raise TemplateError(f"template must be the path of a file in {root}, got {name!r}{where}")


def _explain(name: str, error: Exception, root: Path) -> str:
    """Return ``template:line: reason``, where the line is that of the innermost template in the traceback."""
    if isinstance(error, jinja2.TemplateSyntaxError):
        remedy = f" {IF_COMMENT}" if (error.message or "").startswith("Encountered unknown tag") else ""
        return f"{error.name or name}:{error.lineno}: {error.message}{remedy}"
    place = name
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        if path.is_relative_to(root):
            place = f"{path.relative_to(root).as_posix()}:{frame.lineno}"
        elif frame.filename in ("<template>", "<unknown>"):
            place = f"{name}:{frame.lineno}"
    if isinstance(error, jinja2.TemplateNotFound):
        files = (path.relative_to(root).as_posix() for path in root.rglob("*.j2"))
        meant = similar(str(error.name), files)
        hint = f" (did you mean {meant}?)" if meant else ""
        return f"{place}: template {error.name!r} does not exist in {root}{hint}"
    reason = "rendering the template exhausts the available memory" if isinstance(error, MemoryError) else str(error)
    return f"{place}: {reason}"


def _opening_comment(name: str, config: Any, target: Target, debug: bool = False) -> str:
    lines = [f"cudatma: {name} for {target.name}"]
    if debug:
        lines.append("debug: every wait has a timeout, and a wait that times out writes a record")
    if config is not None:
        lines.append(f"config: {type(config).__name__}")
        if is_dataclass(config):
            # Omit defaults, so that a new field does not change the sources of existing configs.
            shown = [
                (f.name, value) for f in fields(config) if f.init and (value := getattr(config, f.name)) != f.default
            ]
            lines += [f"  {field} = {_shown(value, field)}" for field, value in shown]
        notes: Iterable[str] = getattr(config, "notes", ())
        lines += [line for note in notes for line in str(note).splitlines()]
    # A backslash at the end of a // comment would continue the comment on the next line.
    return "".join(f"// {line.rstrip()}".rstrip("\\ ") + "\n" for line in lines)


def _shown(value: Any, field: str) -> str:
    """Return a config's value as text that is the same in every process.

    Raises TemplateError if no such text is defined for the type.
    """
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
        f"config.{field} must be an int, float, str, bool, None, enum or NumPy dtype, or a tuple or dataclass of them,"
        f" got {type(value).__name__}; use a type whose text is the same in every process"
    )
