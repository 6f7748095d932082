"""The examples in docstrings of public functions run, on a machine without a GPU."""

from __future__ import annotations

import doctest
import inspect

import numpy as np
import pytest

import cudatma

DOCUMENTED = [name for name in cudatma.__all__ if ">>> " in (inspect.getdoc(getattr(cudatma, name)) or "")]


@pytest.mark.parametrize("name", DOCUMENTED)
def test_an_example_prints_what_it_shows(name: str) -> None:
    text = inspect.getdoc(getattr(cudatma, name)) or ""
    example = doctest.DocTestParser().get_doctest(text, {"cudatma": cudatma, "np": np}, name, None, None)
    assert doctest.DocTestRunner(verbose=False).run(example).failed == 0
