"""Decide whether each tensor of a checkpoint is packed, copied or left out."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NoReturn

from cudatma.errors import WeightFileError, alternatives
from cudatma.quantization.agreement import LayerFacts, layer_facts
from cudatma.quantization.checkpoint import Checkpoint
from cudatma.quantization.conversion.expert_groups import (
    ExpertGroup,
    check_alike,
    group_experts,
    interleaved_experts,
    misfit,
    stacked_sizes,
)
from cudatma.quantization.formats import FORMATS, FROM_FLOAT, MARLIN, MXFP4, recognized
from cudatma.quantization.safetensors_file import FLOAT_DTYPES, TensorEntry
from cudatma.quantization.statement import Statement


@dataclass(frozen=True, slots=True)
class Inventory:
    """How each tensor in a checkpoint is used. Tensors that the inventory does not list are copied.

    Attributes
    ----------
    layers : dict of str to dict of str to str
        Linear layers, and matrices of experts, in the model's order. Each value maps the names of the layer's tensors,
        without the layer's prefix, to their names in the checkpoint.
    experts : dict of str to ExpertGroup
        Matrices of experts that are packed as one weight, by the name of the weight.
    facts : dict of str to LayerFacts
        Facts that determine how to decode each layer.
    left_out : dict of str to str
        Maps each tensor that is neither packed nor copied to the reason.
    notes : tuple of str
        Notes for the report.
    """

    layers: dict[str, dict[str, str]]
    experts: dict[str, ExpertGroup] = field(default_factory=dict)
    facts: dict[str, LayerFacts] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def packed(self) -> dict[str, tuple[str, ...]]:
        """The layers of each packed weight, by the weight's name. Only expert weights have several layers."""
        members = {layer for group in self.experts.values() for layer in group.layers}
        alone = {layer: (layer,) for layer in self.layers if layer not in members}
        return alone | {name: group.layers for name, group in self.experts.items()}

    def sizes(self, name: str) -> tuple[int, ...]:
        """Return (K, N) of a packed weight, or (experts, K, N) of expert weights, in a quantized checkpoint."""
        group = self.experts.get(name)
        extent = self.facts[group.layers[0] if group else name].extent
        return stacked_sizes(group, extent.k, extent.n) if group else (extent.k, extent.n)


def take_inventory(checkpoint: Checkpoint, statement: Statement, where: str) -> Inventory:
    """Find the quantized layers, compare the layers with the configuration, and check all other tensors.

    ``where`` names the checkpoint in error messages. Raises WeightFileError or QuantizationError if a check fails.
    """
    kind = statement.format
    ending = f"{kind.separator}{kind.required[0]}"
    names = sorted((name.removesuffix(ending) for name in checkpoint.names if name.endswith(ending)), key=natural)
    if not names:
        ends = {name.rpartition(".")[2] for name in checkpoint.files}
        others = [other for other in FORMATS if other.required[0] in ends]
        got = f"layers of {others[0].title}" if others else "no quantized layer"
        remedy = f"{statement.where} specifies {kind.title}" + ("; correct the configuration" if others else "")
        raise WeightFileError(where, got, f"a model with tensors named *{ending}", remedy)
    layers: dict[str, dict[str, str]] = {}
    facts: dict[str, LayerFacts] = {}
    for layer in names:
        tensors = {part: f"{layer}{kind.separator}{part}" for part in (*kind.required, *kind.optional)}
        layers[layer] = {part: name for part, name in tensors.items() if name in checkpoint.files}
        if missing := [part for part in kind.required if part not in layers[layer]]:
            allowed = f"a {kind.title} layer with {', '.join(kind.required)}"
            remedy = "copy or download the checkpoint again"
            raise WeightFileError(layer, f"no {' and no '.join(missing)}", allowed, remedy)
        facts[layer] = layer_facts(checkpoint, layer, layers[layer], statement)
    if kind is MXFP4:
        shapes = {name: checkpoint.shape(name) for name in checkpoint.files}
        experts = interleaved_experts({layer: shapes[parts["blocks"]] for layer, parts in layers.items()}, shapes)
    else:
        experts, errors = group_experts(names)
        for error in errors.values():
            raise error
    unused = (f"{layer}.{part}" for layer in layers for part in kind.left_out)
    left_out = {name: "scales of quantized activations" for name in unused if name in checkpoint.files}
    if kind.group_size:
        caches = (name for name in checkpoint.files if _CACHE_SCALE.fullmatch(name))
        left_out |= dict.fromkeys(caches, "scales of a quantized KV cache")
    if kind is MARLIN:
        buffers = (f"{layer}.workspace" for layer in layers)
        left_out |= {name: "scratch memory of the Marlin kernel" for name in buffers if name in checkpoint.files}
    inventory = Inventory(layers, experts, facts)
    left_out |= _check_experts(checkpoint, inventory)
    check_others(checkpoint, layers, left_out)
    counts = Counter(fact.note for fact in facts.values() if fact.note)
    notes = [f"{note} ({count} of {len(layers)} layers)" for note, count in counts.items()]
    return replace(inventory, left_out=left_out, notes=(*statement.notes, *notes))


def _check_experts(checkpoint: Checkpoint, inventory: Inventory) -> dict[str, str]:
    """Check quantized experts, and map their biases, which must be zeros, to the reason to leave them out.

    Raises QuantizationError or WeightFileError if a check fails.
    """
    left_out = {}
    for name, group in inventory.experts.items():
        check_alike(name, group, inventory.facts)
        parts = inventory.layers[group.layers[0]].keys()
        for layer in group.layers:
            if inventory.layers[layer].keys() != parts:
                got, allowed = (", ".join(names) for names in (inventory.layers[layer], parts))
                raise WeightFileError(layer, got, f"a layer with {allowed}, as in {group.layers[0]}", FROM_FLOAT)
        for bias in (f"{layer}.bias" for layer in group.layers):
            if bias in checkpoint.files:
                if checkpoint.read(bias).any():
                    raise WeightFileError(bias, "nonzero values", "absent or all zeros", FROM_FLOAT)
                left_out[bias] = "zeros"
    sizes = {name: inventory.sizes(name) for name in inventory.experts}
    for name in sizes:
        if why := misfit(sizes, name):
            raise WeightFileError(name, why, "experts with sizes that marlin_moe supports", FROM_FLOAT)
    return left_out


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key that orders layer 2 before layer 10."""
    parts = name.split(".")
    return tuple((0, int(part), "") if part.isascii() and part.isdecimal() else (1, 0, part) for part in parts)


#: Integer buffers that also occur in models without quantization.
_BUFFERS = re.compile(
    r"(^|.*\.)(position_ids|num_batches_tracked|relative_position_index|token_type_ids|cache_position|tid2eid"
    r"|att(entio)?n\.(bias|masked_bias)|\w*_(index|indices|mask))"
)
#: Tensors that occur only in quantized modules.
_PARTS = re.compile(
    r"(^|.*[._])(qweight|qzeros|g_idx|zero_point|packed|weight_scale_\w+|weight_global_scale|pre_quant_scale)"
    r"|.*\.(scales|weight\.(absmax|quant_map|nested_\w+|quant_state\..*|_data|_scale|_shift))"
)
_SCALE = re.compile(r"(.*\.)?([^.]*)_scales?")
#: If X is one of these names, a tensor `X_scale` belongs to a quantized module, even if the file has no tensor X.
_SCALED = frozenset(
    ["weight", "input", "output", "act", "q", "k", "v", "kv", "kv_cache", "prob", "w1", "w2", "w3", "w13"]
)
#: Scales of a quantized KV cache.
_CACHE_SCALE = re.compile(r".*\.(k_scale|v_scale|kv_scale|[kv]_proj\.output_scale)")
#: Modules that may share another module's weight but have their own bias.
_TIED = re.compile(r"(.*[._])?(lm_head|predictions|decoder)")


@dataclass(frozen=True, slots=True)
class _Names:
    """Number of tensors in each module, and the stems of the tensor names."""

    modules: Counter[str]
    stems: frozenset[str]


def check_others(checkpoint: Checkpoint, layers: Mapping[str, Mapping[str, str]], left_out: Iterable[str] = ()) -> None:
    """Raise WeightFileError for a tensor outside of ``layers`` that does not look like a float parameter."""
    names = _names(checkpoint.files)
    known = {name for parts in layers.values() for name in parts.values()} | set(left_out)
    for name, file in checkpoint.files.items():
        if name not in known:
            _check_inside(name, layers)
            _check_other(name, file.tensors[name], names, checkpoint)


def _check_inside(name: str, layers: Mapping[str, object]) -> None:
    """Raise WeightFileError for a tensor inside a packed layer, unless it is the layer's bias."""
    parts = name.split(".")
    inside = next((end for end in range(1, len(parts)) if ".".join(parts[:end]) in layers), None)
    if inside is not None and parts[inside:] != ["bias"]:
        layer = ".".join(parts[:inside])
        got = f"another tensor in the packed layer {layer}"
        raise WeightFileError(name, got, "a tensor of the layer's format, or the layer's bias", FROM_FLOAT)


def _names(tensors: Iterable[str]) -> _Names:
    modules: Counter[str] = Counter()
    stems = set()
    for name in tensors:
        parts = name.split(".")
        modules.update(".".join(parts[:end]) for end in range(1, len(parts)))
        stems |= {name, name.rpartition(".")[0], re.sub(r"_(packed|shape|blocks|zero_point|qweight)$", "", name)}
    return _Names(modules, frozenset(stems))


def _check_other(name: str, entry: TensorEntry, names: _Names, checkpoint: Checkpoint) -> None:
    module, _, part = name.rpartition(".")
    is_float = entry.dtype in FLOAT_DTYPES
    if part == "scales" and len(entry.shape) == 1 and names.modules[module] == 1:
        remedy = f"activation scales are not supported; {FROM_FLOAT}"
        raise WeightFileError(name, "activation scales (AWQ's ScaledActivation)", "absent", remedy)
    if not _BUFFERS.fullmatch(name) and (_PARTS.fullmatch(name) or not (is_float or entry.dtype == "BOOL")):
        _raise_unknown(name, entry, checkpoint)
    if scale := _SCALE.fullmatch(name):
        prefix, scaled = scale[1] or "", scale[2]
        if scaled in _SCALED or f"{prefix}{scaled}" in names.stems or len(entry.shape) > 1:
            _raise_unknown(name, entry, checkpoint)
    if part == "bias" and is_float and names.modules[module] == 1 and not _TIED.fullmatch(module):
        remedy = "copy or download the checkpoint again"
        raise WeightFileError(
            name, f"the bias of {module}, a module without a weight", "the bias of a module with a weight", remedy
        )


def _raise_unknown(name: str, entry: TensorEntry, checkpoint: Checkpoint) -> NoReturn:
    """Raise WeightFileError for a tensor that does not belong to a packed layer.

    The error names the format that the tensor resembles.
    """
    siblings = checkpoint.shapes(name.rpartition(".")[0])
    remedy = f"this tensor is not supported; {FROM_FLOAT}"
    got = f"{entry.dtype} {entry.shape}, which does not belong to a packed layer"
    if re.search(r"(^|\.)experts\b", name):
        got += " and contains the weights of several experts"
    elif {"scales", "biases"} <= siblings.keys():
        got += " and has MLX's format"
    elif kind := recognized(siblings):
        got += f" and looks like {kind.title}"
        remedy = (
            "describe the format in config.json: quantization_config with at least quant_method, bits and group_size"
        )
    formats = alternatives(kind.title for kind in FORMATS)
    allowed = f"a float tensor, or part of a quantized layer ({formats})"
    raise WeightFileError(name, got, allowed, remedy)
