"""Public docstrings follow numpydoc, and the examples in them run on a machine without a GPU."""

from __future__ import annotations

import doctest
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import cudatma

validate = pytest.importorskip("numpydoc.validate", reason="Sphinx needs Python 3.11").validate

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference"
#: Extended summary, See Also and Examples are optional.
OPTIONAL = ("ES01", "SA01", "EX01")
#: Names that examples need not import, as in NumPy's documentation.
NAMESPACE = {"np": np, "cudatma": cudatma}
#: Module -> the names in it that docs/reference shows.
LISTED: dict[str, set[str]] = {}
for page in REFERENCE.rglob("*.rst"):
    for path in re.findall(r"^\.\. auto(?:function|class|exception):: (\S+)$", page.read_text(), re.MULTILINE):
        LISTED.setdefault(path.rpartition(".")[0], set()).add(path.rpartition(".")[2])

of_each_module = pytest.mark.parametrize("name", sorted(LISTED))


def public_objects(module: ModuleType, listed: set[str]) -> Iterator[tuple[str, object]]:
    """Yield (path, object) for each public class and function of a module, and for each public method and property."""
    for name in sorted(listed | set(getattr(module, "__all__", ()))):
        value = getattr(module, name)
        if not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        yield f"{module.__name__}.{name}", value
        for member, method in vars(value).items() if inspect.isclass(value) else ():
            is_method = inspect.isfunction(method) or isinstance(method, property | classmethod | staticmethod)
            if is_method and not member.startswith("_"):
                yield f"{module.__name__}.{name}.{member}", method


def is_inherited(code: str, value: object) -> bool:
    """Return whether a base class documents what numpydoc misses: the constructor's parameters, or the method."""
    if inspect.isclass(value):
        return code.startswith("PR") and "__init__" not in vars(value)
    return code == "GL08" and bool(inspect.getdoc(value))


@of_each_module
def test_docstrings_are_valid(name: str) -> None:
    module = pytest.importorskip(name)
    findings = [
        f"{path}: {code} {message}"
        for path, value in public_objects(module, LISTED[name])
        for code, message in validate(path)["errors"]
        if code not in OPTIONAL and not is_inherited(code, value)
    ]
    assert not findings, "\n".join(findings)


@of_each_module
def test_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = pytest.importorskip(name)
    monkeypatch.chdir(tmp_path)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    report: list[str] = []
    for path, value in public_objects(module, LISTED[name]):
        examples = doctest.DocTestParser().get_doctest(inspect.getdoc(value) or "", NAMESPACE, path, None, None)
        runner.run(examples, out=report.append)
    assert not runner.failures, "".join(report)
