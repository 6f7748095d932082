"""Open the checkpoint to convert, check it, and select the matrices to pack."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from cudatma.errors import ArgumentError, WeightFileError, reason_of
from cudatma.quantization.checkpoint import Checkpoint, open_checkpoint
from cudatma.quantization.conversion.expert_groups import (
    ExpertGroup,
    group_experts,
    is_expert,
    misfit,
    sibling,
    stacked_experts,
    stacked_sizes,
)
from cudatma.quantization.conversion.inventory import Inventory, check_others, natural, take_inventory
from cudatma.quantization.layout_v1 import BLOCK
from cudatma.quantization.safetensors_file import FLOAT_DTYPES, check_suffix
from cudatma.quantization.statement import Statement, read_config, read_section, read_statement, statement_files

#: Architectures in which the outputs of gate and up alternate in float experts.
_INTERLEAVED_MODELS = ("gpt_oss",)
#: Architectures that store projections as (K, N), like Conv1D in transformers, under the names of nn.Linear layers.
_CONV1D_MODELS = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp")
#: Beginning of the reason for layers that match a pattern in ``exclude``.
_EXCLUDED = "excluded by"
_SAMPLES, _SAMPLE_BYTES = 64, 4096
#: If peft is installed, transformers applies the adapter that this file describes to the model in the same folder.
ADAPTER = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint to convert, and the use of each of its tensors.

    Attributes
    ----------
    folder : pathlib.Path
        The checkpoint's folder.
    config : dict
        The content of config.json.
    checkpoint : Checkpoint
        The tensors.
    statement : Statement or None
        The quantization configuration, or None for a float checkpoint.
    inventory : Inventory
        The use of each tensor.
    skipped : dict of str to str
        Maps each matrix that is not packed to the reason.
    """

    folder: Path
    config: dict[str, Any]
    checkpoint: Checkpoint
    statement: Statement | None
    inventory: Inventory
    skipped: dict[str, str]

    @property
    def layers(self) -> dict[str, dict[str, str]]:
        """Layers to pack, as in ``Inventory.layers``. Each expert is a separate layer; see ``Inventory.packed``."""
        return self.inventory.layers

    def tensor_bytes(self, names: Iterable[str]) -> int:
        """Return the total size of these tensors in the checkpoint, in bytes."""
        entries = (self.checkpoint.files[name].tensors[name] for name in names)
        return sum(entry.end - entry.begin for entry in entries)

    def sizes(self, packed: str) -> tuple[int, ...]:
        """Return (K, N) of a packed weight, or (experts, K, N) of expert weights."""
        if self.statement is not None:
            return self.inventory.sizes(packed)
        group = self.inventory.experts.get(packed)
        shape = self.checkpoint.shape(self.layers[group.layers[0] if group else packed]["weight"])
        return _expert_sizes(group, shape) if group else shape[::-1]

    def leave(self, reasons: Mapping[str, str]) -> Source:
        """Return a copy of the source in which some layers stay float. ``reasons`` maps each layer to the reason."""
        experts = {name: group for name, group in self.inventory.experts.items() if name not in reasons}
        packed = {layer for name, layers in self.inventory.packed.items() if name not in reasons for layer in layers}
        layers = {name: parts for name, parts in self.layers.items() if name in packed}
        _require_layers(layers, str(self.folder))
        return replace(self, inventory=Inventory(layers, experts), skipped={**self.skipped, **reasons})

    def fingerprint(self) -> dict[str, str]:
        """Return a digest of each file's size, header and data samples.

        The samples distinguish the results of different training runs.
        """
        files = {file.path for file in self.checkpoint.files.values()} | set(statement_files(self.folder))
        return {path.name: _fingerprint(path) for path in sorted(files)}


def open_source(folder: Path, *, quantize: bool, exclude: Iterable[str] = (), vision_tower: bool = False) -> Source:
    """Read and check the headers and the configuration of a checkpoint.

    Parameters
    ----------
    folder : pathlib.Path
        The checkpoint's folder.
    quantize : bool
        Whether to quantize a float checkpoint.
    exclude : iterable of str, optional
        fnmatch patterns for the names of layers that stay float.
    vision_tower : bool, default False
        Whether to also quantize the image, video and audio encoders.

    Returns
    -------
    Source
        The checkpoint.

    Raises
    ------
    WeightFileError, QuantizationError
        If the checkpoint cannot be converted.
    ArgumentError
        If ``quantize`` is True for a quantized checkpoint, or False for a float checkpoint.
    """
    check_suffix(folder)
    if not folder.is_dir():
        remedy = "check the path, or download a model with `hf download MODEL --local-dir FOLDER`"
        allowed = "the folder of a checkpoint, with config.json and .safetensors files"
        raise WeightFileError(str(folder), "a path that is not a folder", allowed, remedy)
    config, (section, where) = read_config(folder), read_section(folder)
    if section.get("quant_method") == "cudatma":
        remedy = "load the folder with transformers after cudatma.integrations.transformers.register()"
        raise WeightFileError(str(folder), "a converted folder", "an unconverted checkpoint", remedy)
    if (folder / ADAPTER).is_file():
        remedy = "move the adapter's two files to another folder, and apply them to the converted model with peft"
        raise WeightFileError(str(folder / ADAPTER), "an adapter", "absent", remedy)
    checkpoint = open_checkpoint(folder)
    for name, file in checkpoint.files.items():
        file.check_bytes(name)
    if not section:
        check_others(checkpoint, {})
    if section and quantize:
        method = section.get("quant_method", "no quant_method")
        raise ArgumentError(
            "quantize",
            True,
            f"False for a checkpoint that is already quantized ({method})",
            "omit the option to keep the codes of the quantized layers",
        )
    if not section and not quantize:
        remedy = "pass --quantize (quantize=True) to round the weights to nearest"
        raise ArgumentError(str(folder), "a float checkpoint", "a quantized checkpoint", remedy)
    if not section:
        inventory, skipped = _float_layers(checkpoint, config, tuple(exclude), vision_tower, str(folder))
        return Source(folder, config, checkpoint, None, inventory, skipped)
    statement = read_statement(section, where)
    inventory = take_inventory(checkpoint, statement, str(folder))
    if statement.unused:
        note = f"{where}: keys that do not affect the stored weights were dropped: {', '.join(statement.unused)}"
        inventory = replace(inventory, notes=(note, *inventory.notes))
    skipped = dict.fromkeys(_matrices(checkpoint), "not quantized in the checkpoint")
    return Source(folder, config, checkpoint, statement, inventory, skipped)


def _float_layers(
    checkpoint: Checkpoint, config: Mapping[str, Any], exclude: tuple[str, ...], vision_tower: bool, where: str
) -> tuple[Inventory, dict[str, str]]:
    if config.get("model_type") in _CONV1D_MODELS:
        remedy = "this model stores transposed matrices; quantize each matrix with cudatma.quantize()"
        raise WeightFileError(
            f"{where}: model_type", config["model_type"], "the type of a model with nn.Linear layers", remedy
        )
    matrices = _matrices(checkpoint)
    shapes = {name: checkpoint.shape(name) for name in checkpoint.files}
    is_interleaved = config.get("model_type") in _INTERLEAVED_MODELS
    experts = group_experts(matrices)[0] | stacked_experts(shapes, is_interleaved)
    members = {layer for group in experts.values() for layer in group.layers}
    names = sorted({*experts, *(layer for layer in matrices if layer not in members)}, key=natural)
    for pattern in exclude:
        if not any(fnmatchcase(layer, pattern) for layer in (*names, *members)):
            remedy = f"pass a pattern for names such as {', '.join(names[:3])}"
            raise ArgumentError("exclude", pattern, "a pattern that matches a layer of the checkpoint", remedy)
    reasons = {layer: _why_not(checkpoint, layer, exclude) for layer in names if layer not in experts}
    reasons |= _why_not_experts(checkpoint, experts, exclude)
    if not vision_tower:
        tower = tower_layers((layer for layer, why in reasons.items() if not why), config.get("model_type"))
        reasons |= dict.fromkeys(tower, "in an image, video or audio encoder")
    kept = {name: group for name, group in experts.items() if not reasons[name]}
    layers = {layer: {"weight": f"{layer}.weight"} for layer in names if not reasons[layer] and layer not in experts}
    for group in kept.values():
        layers |= {layer: {"weight": layer if group.is_stacked else f"{layer}.weight"} for layer in group.layers}
    if not layers and any(why.startswith(_EXCLUDED) for why in reasons.values()):
        allowed = "patterns that leave at least one layer to quantize"
        raise ArgumentError("exclude", ", ".join(exclude), allowed, "omit a pattern (--exclude)")
    _require_layers(layers, where)
    return Inventory(layers, kept), {layer: why for layer, why in reasons.items() if why}


def _require_layers(layers: Mapping[str, object], where: str) -> None:
    """Raise WeightFileError if a float checkpoint has no layer to quantize."""
    if not layers:
        allowed = "a model that has matrices named *.N.*.weight in fp16, bf16 or fp32"
        raise WeightFileError(where, "no such matrix", allowed)


def _matrices(checkpoint: Checkpoint) -> list[str]:
    """Return the modules with a two-dimensional weight, in the model's order."""
    files = checkpoint.files
    weights = (name for name in files if name.endswith(".weight") and len(files[name].tensors[name].shape) == 2)
    return sorted((name.removesuffix(".weight") for name in weights), key=natural)


def _why_not(checkpoint: Checkpoint, layer: str, exclude: tuple[str, ...]) -> str:
    """Return the reason why a matrix is not quantized, or "" if it is quantized."""
    entry = checkpoint.files[f"{layer}.weight"].tensors[f"{layer}.weight"]
    for pattern in exclude:
        if fnmatchcase(layer, pattern):
            return f"{_EXCLUDED} {pattern}"
    if entry.dtype not in FLOAT_DTYPES:
        return f"unsupported type {entry.dtype}"
    return unsuitable(layer, entry.shape)


def _why_not_experts(
    checkpoint: Checkpoint, experts: Mapping[str, ExpertGroup], exclude: tuple[str, ...]
) -> dict[str, str]:
    """Map each group of experts to the reason why it is not quantized, or "".

    Either both weights of a module of experts are quantized, or neither is.
    """
    reasons, sizes = {}, {}
    for name, group in experts.items():
        tensors = [layer if group.is_stacked else f"{layer}.weight" for layer in group.layers]
        entries = [checkpoint.files[tensor].tensors[tensor] for tensor in tensors]
        patterns = (pattern for pattern in exclude for layer in (name, *group.layers) if fnmatchcase(layer, pattern))
        sizes[name] = _expert_sizes(group, entries[0].shape)
        if pattern := next(patterns, ""):
            reasons[name] = f"{_EXCLUDED} {pattern}"
        elif unsupported := {entry.dtype for entry in entries}.difference(FLOAT_DTYPES):
            reasons[name] = f"unsupported type {unsupported.pop()}"
        elif len({entry.shape for entry in entries}) > 1:
            reasons[name] = "experts of different sizes"
        elif biases := [bias for layer in group.layers if (bias := f"{layer}.bias") in checkpoint.files]:
            reasons[name] = f"experts with biases that are not stacked, such as {biases[0]}"
        elif min(sizes[name][1:]) < BLOCK:
            reasons[name] = f"smaller than {BLOCK} x {BLOCK}"
    return {name: reasons.get(name) or reasons.get(sibling(name)) or misfit(sizes, name) for name in experts}


def _expert_sizes(group: ExpertGroup, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return (experts, K, N) of a group whose first float tensor has this shape."""
    k, n = shape[-2:] if group.is_transposed else shape[:-3:-1]
    return stacked_sizes(group, k, n)


def unsuitable(layer: str, shape: tuple[int, ...]) -> str:
    """Return the reason not to quantize a float matrix with this name and shape, or ""."""
    last = layer.rpartition(".")[2]
    if last == "lm_head" or not re.search(r"\.\d+\.", layer):
        return "outside the model's numbered blocks"
    if "embed" in last or "norm" in last:
        return "an embedding or a norm, according to its name"
    if is_expert(layer) or last in ("gate", "router"):
        return "an expert or a router"
    if min(shape) < BLOCK:
        return f"smaller than {BLOCK} x {BLOCK}"
    return ""


#: Words in the names of modules that encode something other than text.
_TOWER_WORDS = {"vision", "visual", "image", "video", "audio", "speech", "vqmodel", "vpm", "apm"}
#: Types of image or audio models whose encoder is simply called ``encoder``.
_ENCODER_MODELS = {
    "granite_speech", "moonshine", "speech-encoder-decoder", "speech_to_text", "vision-encoder-decoder", "whisper",
}  # fmt: skip


def tower_layers(layers: Iterable[str], model_type: object) -> set[str]:
    """Return the layers whose names indicate an image, video or audio encoder, or an empty set if all names do."""
    names = set(layers)
    tower = {layer for layer in names if _TOWER_WORDS & set(re.split(r"[._]", layer))}
    if model_type in _ENCODER_MODELS:
        tower |= {layer for layer in names if re.match(r"(model\.)?encoder\.", layer)}
    return tower if tower != names else set()


def _fingerprint(path: Path) -> str:
    try:
        size = path.stat().st_size
        digest = hashlib.blake2b(str(size).encode(), digest_size=16)
        with path.open("rb") as file:
            if path.suffix == ".safetensors":
                digest.update(file.read(int.from_bytes(file.read(8), "little")))
                for sample in range(_SAMPLES):
                    file.seek(max(0, (size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1)))
                    digest.update(file.read(_SAMPLE_BYTES))
            else:
                digest.update(file.read())
    except OSError as error:
        got = f"a file that cannot be read ({reason_of(error)})"
        raise WeightFileError(str(path), got, "a readable file", "check the path") from error
    return digest.hexdigest()
