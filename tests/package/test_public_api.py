"""The public names, and the order of the packages: each imports only from those below it."""

from __future__ import annotations

import ast
import enum
import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest

import cudatma
from cudatma.emulator import EmulatedModule
from tools.dev import import_graph
from tools.dev.import_graph import EMULATOR, LAYERS, cycle, emulator_part, imported, layer_of

#: Option -> its defaults, where it is one. All are keyword-only.
OPTIONS: dict[str, tuple[object, ...]] = {
    "out": (None,),
    "stream": (None,),
    "backend": (None,),
    "encoder": ("auto",),
    "target": (None, inspect.Parameter.empty),
    "device": (None,),
}
#: Where an option's name is the very thing that the function is about, it is the first argument.
SUBJECTS = {
    ("detect", "device"),
    ("get_target", "target"),
    ("selected_backend", "backend"),
    ("workspace_bytes", "device"),
    ("Kernel.is_loaded", "device"),
    ("Kernel.load", "device"),
    ("LaunchPlan.launch", "stream"),
    ("MarlinLinear.to_device", "device"),
    ("Workspace", "device"),
    ("PackedExperts.to_device", "device"),
    ("PackedWeight.to_device", "device"),
    ("PipelineSpec.check_fits", "target"),
}
#: Data that may be left out.
OPTIONAL_DATA = {
    ("Inspection.at", "offsets"),
    ("Inspection.html", "coords"),
    ("Inspection.html", "offsets"),
    ("Inspection.place", "coords"),
    ("Inspection.place", "offsets"),
    ("Inspection.svg", "coords"),
    ("Inspection.svg", "offsets"),
    ("Kernel.emulate", "args"),
    ("Kernel.launch", "args"),
    ("Kernel.plan", "args"),
    ("EmulatedModule.launch", "args"),
    ("MarlinLinear", "bias"),
    ("MarlinLinear.from_dense", "bias"),
    ("compile", "config"),
    ("create_activation_tma_desc", "tile_k"),
    ("create_scale_tma_desc", "block_groups"),
    ("debugging", "debug"),
    ("from_compressed_tensors", "weight_g_idx"),
    ("from_compressed_tensors", "weight_zero_point"),
    ("from_gptq", "g_idx"),
}
#: Made by a function of the facade, not by users.
NOT_CALLED = {"Inspection", "Kernel", "LaunchPlan", "Workspace.within"}
#: Other words for the options, and the names that they had.
OTHER_NAMES = {"arch", "architecture", "cuda_stream", "destination", "device_id", "explicit", "output", "queue"}
#: What has a backend computes; what has an encoder makes tensor maps.
ENCODERS = {
    "TensorMap",
    *(f"TensorMap.{name}" for name in ("from_address", "from_array", "im2col", "tiled")),
    *(f"create_{name}_tma_desc" for name in ("activation", "scale", "weight")),
}


def functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """(name, callable) of what users call: functions, constructors except records' own, and methods."""
    for name in [*cudatma.__all__, "EmulatedModule"]:
        found = EmulatedModule if name == "EmulatedModule" else getattr(cudatma, name)
        if not inspect.isclass(found):
            if callable(found):
                yield name, found
            continue
        if issubclass(found, BaseException | enum.Enum):
            continue
        if not is_dataclass(found):
            yield name, found
        for method in vars(found):
            bound = getattr(found, method)
            if (method == "__call__" or not method.startswith("_")) and callable(bound):
                yield f"{name}.{method}", bound


def parameters(name: str, function: Callable[..., Any]) -> list[inspect.Parameter]:
    found = list(inspect.signature(function).parameters.values())
    return found[1:] if found and found[0].name == "self" else found


CALLS = [(name, parameters(name, function)) for name, function in functions() if name not in NOT_CALLED]
IDS = [name for name, _ in CALLS]


def test_the_table_names_only_what_there_is() -> None:
    known = {(name, each.name) for name, found in CALLS for each in found}
    assert known >= SUBJECTS | OPTIONAL_DATA
    assert len(CALLS) > 80


@pytest.mark.parametrize(("name", "found"), CALLS, ids=IDS)
def test_data_comes_first_and_options_are_keyword_only(name: str, found: list[inspect.Parameter]) -> None:
    positional = [each for each in found if each.kind is each.POSITIONAL_OR_KEYWORD]
    for index, each in enumerate(positional):
        pair = name, each.name
        if pair in SUBJECTS:
            assert index == 0
        else:
            assert each.name not in OPTIONS, pair
            assert each.default is each.empty or pair in OPTIONAL_DATA, pair
    assert not [each for each in found if each.kind in (each.VAR_POSITIONAL, each.POSITIONAL_ONLY)]


@pytest.mark.parametrize(("name", "found"), CALLS, ids=IDS)
def test_an_option_has_one_name_and_one_default(name: str, found: list[inspect.Parameter]) -> None:
    for each in found:
        assert each.name not in OTHER_NAMES
        if each.name in OPTIONS and (name, each.name) not in SUBJECTS:
            assert each.default in OPTIONS[each.name], each.name
    names = {each.name for each in found}
    assert not {"backend", "encoder"} <= names
    assert ("encoder" in names) == (name in ENCODERS)


def test_targets_are_named_or_given() -> None:
    for name, found in CALLS:
        for each in found:
            if each.name == "target" and name != "PipelineSpec.check_fits":
                assert {"str", "Target"} <= set(str(each.annotation).replace("|", " ").split()), name


# ---- Layers


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


def test_imports_are_found_wherever_they_stand() -> None:
    known = (
        "cudatma",
        "cudatma.errors",
        "cudatma.target",
        "cudatma.descriptor",
        "cudatma.descriptor.spec",
        "tools.checks",
    )

    def found(text: str, importer: str, is_package: bool = False) -> set[str]:
        return imported(text, importer, is_package, known)

    code = "import numpy\nimport cudatma.target\ndef f():\n    from cudatma import errors, Anything\n"
    assert found(code, "tools.x") == {"cudatma.target", "cudatma.errors", "cudatma"}
    assert found("from .checks import f", "tools.doctor") == {"tools.checks"}
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
