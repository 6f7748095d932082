"""Generate the documentation site's pages about errors from the code.

Each error class has a page with its docstring and its messages, so that a search for a message finds the class.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import cudatma
from cudatma import emulator, errors
from tools.dev.site_docstrings import inline

ROOT = Path(__file__).resolve().parents[2]
_FIELD_ERRORS = {k.__name__ for k in vars(errors).values() if isinstance(k, type) and issubclass(k, errors.FieldError)}
#: Text that replaces a value in a message.
_VALUE = "\N{HORIZONTAL ELLIPSIS}"


def classes() -> dict[str, type[BaseException]]:
    """Return the public error and warning classes by the name that autodoc uses."""
    modules = (("cudatma.errors", errors), ("cudatma.emulator", emulator))
    kinds = {
        name: kind
        for module, content in modules
        for name, kind in vars(content).items()
        if isinstance(kind, type) and issubclass(kind, BaseException) and not name.startswith("_")
        if kind.__module__ in ("cudatma.errors", "cudatma.emulator.errors")
    }
    return {_full_name(name): kind for name, kind in kinds.items()}


def _full_name(name: str) -> str:
    if name in cudatma.__all__:
        return f"cudatma.{name}"
    return f"cudatma.emulator.{name}" if name in emulator.__all__ else f"cudatma.errors.{name}"


@cache
def error_pages() -> dict[str, str]:
    """Return a page for each class, as reStructuredText, by the name of the class."""
    by_class = messages()
    return {full.rpartition(".")[2]: _page(full, by_class) for full in classes()}


def _page(full: str, by_class: dict[str, dict[str, list[str]]]) -> str:
    name = full.rpartition(".")[2]
    lines = [name, "=" * len(name), "", f".. autoexception:: {full}", "   :show-inheritance:", ""]
    if by_class[name]:
        lines += ["Messages", "--------", "", f"{_VALUE} stands for a value.", ""]
    for module, texts in sorted(by_class[name].items()):
        lines += [f"``{module}``", "", *(f"- {inline(text, {})}" for text in sorted(set(texts))), ""]
    return "\n".join(lines)


def messages() -> dict[str, dict[str, list[str]]]:
    """Return the messages of each error class, by the module that raises them."""
    by_class: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted((ROOT / "cudatma").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("Error"):
                text = _message(node.func.id, node.args)
                if text:
                    by_class[node.func.id][path.relative_to(ROOT).as_posix()].append(text)
    return by_class


def _message(name: str, arguments: list[ast.expr]) -> str:
    """Return the message of an error with these arguments, or "" if the message has only values."""
    texts = [" ".join("".join(_parts(argument)).split()) for argument in arguments]
    if name not in _FIELD_ERRORS:
        return ": ".join(text for text in texts if re.search(r"\w", text))
    field, got, allowed, remedy = (*texts, *("",) * (4 - len(texts)))
    text = f"{field} must be {allowed}, got {got}{f'; {remedy}' if remedy else ''}"
    return text if re.search(r"\w", allowed) else ""


def _parts(node: ast.expr) -> Iterator[str]:
    """Yield the constant parts of an expression, and an ellipsis for each other part."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        for part in node.values:
            yield from _parts(part)
    else:
        yield _VALUE


def index_page() -> str:
    """Return the page that lists the classes, as reStructuredText."""
    title = "Errors and warnings"
    lines = [title, "=" * len(title), ""]
    lines += [
        "The first line of an error states the field, its value, the allowed values and the remedy. Each class is also",
        "a ValueError, TypeError or RuntimeError. To find the page of a message, paste the message into the search.",
        "",
        ".. list-table::",
        "",
    ]
    for full, kind in classes().items():
        name = full.rpartition(".")[2]
        summary = " ".join((kind.__doc__ or "").partition("\n\n")[0].split())
        lines += [f"   * - :doc:`errors/{name}`", f"     - {inline(summary, {})}"]
    return "\n".join(lines) + "\n"
