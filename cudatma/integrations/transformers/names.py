"""Names of layers in a checkpoint and in the model: transformers renames tensors of some architectures as it loads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from cudatma.errors import WeightFileError
from cudatma.quantization.checkpoint import Checkpoint
from cudatma.quantization.safetensors_file import open_safetensors

_ARRAYS = ("qweight", "scales", "zeros", "perm")


def opened_files(files: Iterable[str] | None) -> Checkpoint:
    """The headers of the files that transformers is about to load. Raises WeightFileError."""
    opened = [open_safetensors(file) for file in files or ()]
    found = {name: file for file in opened for name in file.tensors}
    return Checkpoint(opened[0].path if opened else Path(), found)


def renaming(model: Any) -> Callable[[str], str]:
    """A function from a layer's name in a checkpoint to that in a model whose layers are still nn.Linear."""
    known = model.state_dict()
    rules = [rule for rule in deepcopy(get_model_conversion_mapping(model)) if isinstance(rule, WeightRenaming)]

    def renamed(layer: str) -> str:
        key, _ = rename_source_key(f"{layer}.weight", rules, [], model.base_model_prefix, known)
        if key not in known and f"{layer}.weight" in known:  # it has the model's name already
            return layer
        return str(key).removesuffix(".weight")

    return renamed


def require_linear(layer: str, module: str, linears: Mapping[str, Any]) -> None:
    """WeightFileError where a checkpoint's layer belongs to no nn.Linear of the model."""
    if module not in linears:
        known = ", ".join(list(linears)[:3])
        remedy = "this model class has other modules than the checkpoint"
        raise WeightFileError(layer, "no nn.Linear of the model", f"one of its layers: {known} ...", remedy)


def require_arrays(
    checkpoint: Checkpoint, layers: Mapping[str, Mapping[str, Any]], renamed: Callable[[str], str]
) -> None:
    """WeightFileError where a packed layer, by the model's name and with its facts, lacks a tensor: transformers would
    make one up."""
    held = {f"{renamed(layer)}.{part}" for layer, _, part in (name.rpartition(".") for name in checkpoint.files)
            if part in _ARRAYS}  # fmt: skip
    for layer, facts in layers.items():
        left_out = {"zeros": facts["symmetric"], "perm": not facts["act_order"]}
        wanted = [part for part in _ARRAYS if not left_out.get(part)]
        missing = [part for part in wanted if f"{layer}.{part}" not in held]
        if missing:
            raise WeightFileError(layer, f"no {' and no '.join(missing)}", ", ".join(wanted), "convert the model again")
