"""Warnings that name the user's line, and the former forms of calls, which work for one release."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
_PACKAGE = __name__.partition(".")[0]


def user_stacklevel() -> int:
    """Return the ``stacklevel`` for a warnings.warn() in the calling function that names the nearest frame outside of
    cudatma and of torch, which calls cudatma's operators and modules."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in (_PACKAGE, "torch"):
        frame, level = frame.f_back, level + 1
    return level


def warn_deprecated(text: str) -> None:
    """A DeprecationWarning at the user's line. text: begins with ``cudatma`` and names the new form."""
    warnings.warn(text, DeprecationWarning, stacklevel=user_stacklevel())


def former_arguments(*positional: str, **renamed: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function take arguments in their former form too, with a DeprecationWarning that names the new form.

    positional: arguments, now keyword-only, that could follow the function's positional ones, in their former order.
    renamed: former name = present name; the function's ``former_names``. On a class method, below ``@classmethod``.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        count = function.__code__.co_argcount
        name = f"{_PACKAGE}.{function.__qualname__.removesuffix('.__init__')}"

        @functools.wraps(function)
        def call(*args: Any, **keywords: Any) -> R:
            if count < len(args) <= count + len(positional):
                extra = dict(zip(positional, args[count:], strict=False))
                args, keywords = args[:count], _joined(name, extra, keywords)
                form = ", ".join(f"{argument}=..." for argument in extra)
                warn_deprecated(f"{name}: pass keyword-only arguments by name: {form}")
            if renamed and not renamed.keys().isdisjoint(keywords):
                keywords = _present(name, keywords, renamed)
            return function(*args, **keywords)

        call.former_names = renamed  # type: ignore[attr-defined]
        return call

    return decorate


def _present(name: str, keywords: dict[str, Any], renamed: Mapping[str, str]) -> dict[str, Any]:
    """Keywords under their present names."""
    former = {argument: keywords[argument] for argument in renamed if argument in keywords}
    for argument in former:
        warn_deprecated(f"{name}: {argument}= is now called {renamed[argument]}=")
    rest = {argument: value for argument, value in keywords.items() if argument not in former}
    return _joined(name, {renamed[argument]: value for argument, value in former.items()}, rest)


def _joined(name: str, some: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """Both. TypeError, as Python's own, for an argument that is in both."""
    for argument in some.keys() & others.keys():
        raise TypeError(f"{name}() got multiple values for argument {argument!r}")
    return {**some, **others}
