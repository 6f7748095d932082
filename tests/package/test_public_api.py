"""Public functions take data first, then keyword-only out, stream and options, which have one name each."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from typing import Any

import pytest

import cudatma
from cudatma.emulator import EmulatedModule

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
    ("PackedWeight.to_device", "device"),
    ("PipelineSpec.check_fits", "target"),
}
#: Positional as long as a wrapper would cost a repeated call time.
HOT = {
    ("marlin_gemm", "out"),
    ("marlin_gemm", "stream"),
    ("MarlinLinear.__call__", "out"),
    ("MarlinLinear.__call__", "stream"),
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
    ("marlin_gemm", "bias"),
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
    assert known >= SUBJECTS | HOT | OPTIONAL_DATA
    assert len(CALLS) > 80


@pytest.mark.parametrize(("name", "found"), CALLS, ids=IDS)
def test_data_comes_first_and_options_are_keyword_only(name: str, found: list[inspect.Parameter]) -> None:
    positional = [each for each in found if each.kind is each.POSITIONAL_OR_KEYWORD]
    for index, each in enumerate(positional):
        pair = name, each.name
        if pair in SUBJECTS:
            assert index == 0
        elif pair not in HOT:
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
