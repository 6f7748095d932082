"""Imports go one way and nowhere in a ring: tools/dev/import_graph.py names the layers, the code is held to them."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import cudatma
from tools.dev import import_graph
from tools.dev.import_graph import EMULATOR, LAYERS, cycle, emulator_part, imported, layer_of

ROOT = Path(__file__).resolve().parents[2]
ORDER = [name for name, _ in LAYERS]


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    return import_graph.import_graph()


def test_every_module_has_a_layer(graph: dict[str, set[str]]) -> None:
    assert {layer_of(module) for module in graph} - {""} == set(ORDER)


def test_packages_import_only_from_those_before_them(graph: dict[str, set[str]]) -> None:
    wrong = [
        f"{importer} imports {target}"
        for importer, targets in graph.items()
        for target in targets
        if layer_of(importer) and layer_of(target) and ORDER.index(layer_of(importer)) < ORDER.index(layer_of(target))
    ]
    assert not wrong, "\n".join(wrong)


def test_only_tools_import_the_facade(graph: dict[str, set[str]]) -> None:
    assert not [m for m, targets in graph.items() if "cudatma" in targets and layer_of(m) != "tools"]


def test_the_emulators_packages_import_only_from_those_before_them(graph: dict[str, set[str]]) -> None:
    wrong = [
        f"{importer} imports {target}"
        for importer, targets in graph.items()
        for target in targets
        if layer_of(importer) == layer_of(target) == "emulator"
        and EMULATOR.index(emulator_part(importer)) < EMULATOR.index(emulator_part(target))
    ]
    assert not wrong, "\n".join(wrong)


def test_no_modules_import_each_other_in_a_ring(graph: dict[str, set[str]]) -> None:
    assert cycle(graph) == []


def test_the_picture_shows_the_code() -> None:
    assert import_graph.main(["--check"]) == 0, "run: python -m tools.dev.import_graph"


def test_a_ring_is_found() -> None:
    assert cycle({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert set(cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}})) == {"b", "c"}


def test_imports_are_found_wherever_they_stand() -> None:
    known = (
        "cudatma",
        "cudatma.errors",
        "cudatma.target",
        "cudatma.descriptor",
        "cudatma.descriptor.spec",
        "tools.sass",
    )

    def found(text: str, importer: str, is_package: bool = False) -> set[str]:
        return imported(text, importer, is_package, known)

    code = "import numpy\nimport cudatma.target\ndef f():\n    from cudatma import errors, Anything\n"
    assert found(code, "tools.x") == {"cudatma.target", "cudatma.errors", "cudatma"}
    assert found("from .sass import f", "tools.report") == {"tools.sass"}
    assert found("from . import spec", "cudatma.descriptor", True) == {"cudatma.descriptor.spec"}
    assert found("from ..target import Target", "cudatma.descriptor.spec") == {"cudatma.target"}


def test_the_facade_finds_what_it_tells_type_checkers() -> None:
    tree = ast.parse((ROOT / "cudatma" / "__init__.py").read_text())
    told = {
        alias.name: (node.module or "").removeprefix("cudatma.")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("cudatma.")
        for alias in node.names
    }
    assert told == cudatma._MODULE_OF
    assert {*told, "__version__"} == set(cudatma.__all__)
    assert all(hasattr(cudatma, name) for name in cudatma.__all__)


def test_importing_the_facade_loads_no_library() -> None:
    code = "import sys, cudatma; print([n for n in ('numpy', 'jinja2', 'cudatma.errors') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def test_importing_cudatma_loads_no_gpu_library(graph: dict[str, set[str]]) -> None:
    names = sorted(name for name in graph if layer_of(name) not in ("integrations", "tools"))
    code = (
        "import sys, importlib\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "print([n for n in ('cuda.bindings', 'cupy', 'torch') if n in sys.modules])\n"
    )
    command = [sys.executable, "-c", code, *names, "cudatma.cli", "cudatma.pytest_plugin"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
