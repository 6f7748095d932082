"""Match a checkpoint's quantized layers with the modules of a transformers model.

During loading, the layers are matched with the loaded model. Before a conversion writes any file, the layers are
matched with a model of the class that config.json names, on the meta device. torch and transformers are imported only
in the functions that use them.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from cudatma.errors import WeightFileError, counted
from cudatma.quantization.checkpoint import Checkpoint
from cudatma.quantization.conversion.expert_groups import is_expert_weight, misfit
from cudatma.quantization.conversion.source import Source

#: (in_features, out_features) of a layer, or (experts, in_features, out_features) of expert weights. None if the
#: checkpoint does not specify the sizes.
Sizes = tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Match:
    """Result of matching a checkpoint's quantized layers with a model class.

    Attributes
    ----------
    class_name : str
        The model class.
    modules : dict of str to str
        Module name of each layer.
    ignored : list of str
        Layers that the class does not load, such as layers for multi-token prediction.
    refused : dict of str to WeightFileError
        Errors, by name, for layers that the class cannot load, and for parameters that the checkpoint lacks or stores
        in another shape.
    unloaded : list of str
        Other tensors that the class does not load.
    unknown : str
        Reason why the layers were not matched, or "".
    """

    class_name: str = ""
    modules: dict[str, str] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    refused: dict[str, WeightFileError] = field(default_factory=dict)
    unloaded: list[str] = field(default_factory=list)
    unknown: str = ""

    def require(self) -> None:
        """Raise the error of the first layer that the class cannot load."""
        for error in self.refused.values():
            others = len(self.refused) - 1
            raise error.renamed({error.field: f"{error.field} and {counted(others, 'other')}"}) if others else error


def match_layers(model: Any, layers: Mapping[str, Sizes], checkpoint: Checkpoint) -> Match:
    """Match a checkpoint's quantized layers, by name, with the modules of a model with float layers."""
    rename, match = renaming(model), Match(type(model).__name__)
    known = dict(model.named_modules())
    ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    loaded, unchanged = _held_parameters(model, checkpoint)
    is_base = bool(model.base_model_prefix) and model.base_model is model
    for layer, sizes in layers.items():
        name = rename(layer)
        module = known.get(name.rpartition(".")[0] if is_expert_weight(layer) else name)
        is_other_head = is_base and "." not in name  # A base model can load the folder of a model with a head.
        if module is None and (is_other_head or any(pattern.search(f"{name}.weight") for pattern in ignored)):
            match.ignored.append(layer)
            continue
        match.modules[layer] = name
        if is_expert_weight(layer):
            error = _expert_misfit(layer, module, sizes, match.class_name)
            error = error or _expert_bias_misfit(layer, module, match.class_name, checkpoint)
        else:
            error = _misfit(layer, module, sizes, match.class_name)
            error = error or _bias_misfit(module, match.class_name, checkpoint, loaded.get(f"{name}.bias"))
            error = error or _tie_misfit(layer, name, model, loaded)
        if error:
            match.refused[layer] = error
    parameters = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name, shape in parameters.items():
        tensor = unchanged.get(name)
        if tensor is None or checkpoint.files[tensor].tensors[tensor].dtype == "U8":  # Two codes per element.
            continue
        if checkpoint.shape(tensor) != shape:
            allowed = f"{shape} (the shape in {match.class_name})"
            remedy = "correct config.json, or download the checkpoint again"
            match.refused[tensor] = WeightFileError(tensor, f"shape {checkpoint.shape(tensor)}", allowed, remedy)
    for name in _absent_parameters(model, set(match.modules.values()), loaded):
        remedy = f"{match.class_name} has this parameter; copy or download the checkpoint again"
        match.refused[name] = WeightFileError(name, "no such tensor", "a tensor of the checkpoint", remedy)
    match.unloaded.extend(
        tensor
        for name, tensor in loaded.items()
        if name not in parameters
        and tensor.rpartition(".")[0] not in layers
        and not any(pattern.search(name) for pattern in ignored)
    )
    return match


def match_class(source: Source) -> Match:
    """Match a checkpoint's layers with the model class that its config.json names."""
    model, unknown = _empty_model(source)
    if model is None:
        return Match(unknown=unknown)
    layers = {name: source.sizes(name) for name in source.inventory.packed}
    match = match_layers(model, layers, source.checkpoint)
    if match.refused and "auto_map" in source.config:
        cause = (
            f"the model uses custom code, and its layers differ from the layers of {match.class_name} in transformers"
        )
        return Match(unknown=cause)
    return match


def is_linear(module: Any) -> bool:
    """Return whether a module is an nn.Linear, or a class of transformers that computes the same function."""
    import torch

    return type(module) is torch.nn.Linear or type(module).__name__ == "FalconLinear"


def linear_sizes(module: Any) -> Sizes:
    """Return (in_features, out_features) of a linear layer or transformers' Conv1D, or None for any other module."""
    from transformers.pytorch_utils import Conv1D

    if is_linear(module):
        return module.in_features, module.out_features
    return (module.nx, module.nf) if type(module) is Conv1D else None


def expert_sizes(module: Any) -> dict[str, tuple[int, int, int]]:
    """Return (experts, K, N) of both weights of a module of gated experts, or {} for any other module.

    transformers sets is_transposed on every class of experts whose implementation can be replaced.
    """
    weights = {name: module._parameters.get(name) for name in ("gate_up_proj", "down_proj")}
    if not hasattr(module, "is_transposed") or any(weight is None or weight.dim() != 3 for weight in weights.values()):
        return {}
    axes = (0, 1, 2) if module.is_transposed else (0, 2, 1)
    return {name: tuple(weight.shape[axis] for axis in axes) for name, weight in weights.items()}


def experts_activation(module: Any) -> str | None:
    """Return marlin_moe's name for the activation that a module of experts computes, or None for other activations.

    The function evaluates the module's activation on a grid of gate and up values.
    """
    import torch

    values = torch.linspace(-30, 30, 61, dtype=torch.float64, device="cpu")
    gate, up = (each.reshape(1, -1) for each in torch.meshgrid(values, values, indexing="ij"))
    joined = torch.cat([gate, up], dim=1) if module.is_concatenated else torch.stack([gate, up], dim=2).reshape(1, -1)
    try:
        result = module._apply_gate(joined).double()
    except Exception:  # The model's code may raise any error.
        return None
    if result.shape != gate.shape:
        return None
    low, clipped = gate.clamp(max=7), up.clamp(-7, 7)
    expected = {
        "silu_glu": gate * torch.sigmoid(gate) * up,
        "swiglu_oai": low * torch.sigmoid(1.702 * low) * (clipped + 1),
    }
    return next((name for name, value in expected.items() if torch.allclose(result, value, rtol=1e-6)), None)


def unsupported_experts(module: Any) -> str:
    """Return the reason why marlin_moe does not support a module of experts, or "". The sizes are not checked."""
    if experts_activation(module) is None:
        return "experts with an activation other than silu(gate) * up or that of gpt-oss"
    return ""


def renaming(model: Any) -> Callable[[str], str]:
    """Return a function that maps a layer's name in a checkpoint to its name in a model with float layers."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    known = model.state_dict()
    rules = [rule for rule in deepcopy(get_model_conversion_mapping(model)) if isinstance(rule, WeightRenaming)]

    def rename(layer: str) -> str:
        weight = layer if is_expert_weight(layer) else f"{layer}.weight"
        key, _ = rename_source_key(weight, rules, [], model.base_model_prefix, known)
        if key not in known and weight in known:  # The layer already has the model's name.
            return layer
        return str(key).removesuffix(".weight")

    return rename


def _misfit(layer: str, module: Any, sizes: Sizes, class_name: str) -> WeightFileError | None:
    """Return an error if a layer does not match the module, otherwise None."""
    allowed = "nn.Linear or Conv1D"
    if module is None:
        remedy = "remove its tensors from the checkpoint, or correct `architectures` in config.json"
        return WeightFileError(layer, "no such module", f"{allowed} in {class_name}", remedy)
    expected = linear_sizes(module)
    if expected is None:
        remedy = "quantize the model again without this module"
        return WeightFileError(layer, f"a quantized {type(module).__name__} in {class_name}", allowed, remedy)
    # Some tools store words of eight integers, so K or N may be padded by up to seven elements.
    if sizes is not None and any(not b <= a <= -(-b // 8) * 8 for a, b in zip(sizes, expected, strict=True)):
        got, allowed = (f"{k} x {n}" for k, n in (sizes, expected))
        return WeightFileError(f"{layer}: K x N", got, f"{allowed} (the size in {class_name})", "correct config.json")
    return None


def _expert_misfit(layer: str, module: Any, sizes: Sizes, class_name: str) -> WeightFileError | None:
    """Return an error if packed expert weights do not match the module of experts, otherwise None."""
    expected = expert_sizes(module) if module is not None else {}
    if not expected:
        got = f"no module of gated experts in {class_name}"
        remedy = "remove its tensors from the checkpoint, or correct `architectures` in config.json"
        return WeightFileError(layer, got, "experts that transformers stores in stacked tensors", remedy)
    if got := unsupported_experts(module):
        allowed = "experts that compute silu(gate) * up or the activation of gpt-oss"
        return WeightFileError(layer, f"{got}, in {class_name}", allowed, "keep the experts of this model float")
    own = expected[layer.rpartition(".")[2]]
    if sizes is not None and sizes != own:
        allowed = f"{own} (the size in {class_name})"
        return WeightFileError(f"{layer}: (experts, K, N)", str(sizes), allowed, "correct config.json")
    if why := misfit(expected, layer.rpartition(".")[2]):
        return WeightFileError(
            layer, f"{why}, in {class_name}", "experts with sizes that marlin_moe supports", "keep the experts float"
        )
    return None


def _bias_misfit(module: Any, class_name: str, checkpoint: Checkpoint, name: str | None) -> WeightFileError | None:
    """Return an error if the checkpoint has a nonzero bias and the module has no bias."""
    if module.bias is None and name is not None and checkpoint.read(name).any():
        remedy = f"{class_name} has no such bias; set the model's option for biases in config.json"
        return WeightFileError(name, "nonzero values", "absent or all zeros", remedy)
    return None


def _expert_bias_misfit(layer: str, module: Any, class_name: str, checkpoint: Checkpoint) -> WeightFileError | None:
    """Return an error if the checkpoint has biases of experts and the module has none."""
    if module.has_bias or f"{layer}_bias" not in checkpoint.files:
        return None
    remedy = f"the experts of {class_name} have no biases; correct config.json"
    return WeightFileError(f"{layer}_bias", "biases of experts", "absent", remedy)


def _tie_misfit(layer: str, name: str, model: Any, loaded: Mapping[str, str]) -> WeightFileError | None:
    """Return an error if another weight is tied to the layer's weight and is missing from the checkpoint."""
    pairs = [*model.all_tied_weights_keys.items()]
    for own, other in (*pairs, *(pair[::-1] for pair in pairs)):
        if own == f"{name}.weight" and other not in loaded:
            reason = f"{type(model).__name__} ties this weight to {other}, which is absent"
            remedy = f"{reason}; quantize the model again without this layer"
            return WeightFileError(layer, "a quantized weight", "a float weight", remedy)
    return None


def _held_parameters(model: Any, checkpoint: Checkpoint) -> tuple[dict[str, str], dict[str, str]]:
    """Return two maps from parameters to source tensors: for all parameters, and for parameters loaded unchanged."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    known, rules = model.state_dict(), deepcopy(get_model_conversion_mapping(model))
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    targets = {pattern: rule.target_patterns for rule in converters for pattern in rule.source_patterns}
    loaded, unchanged = {}, {}
    for tensor in checkpoint.names:
        key, pattern = rename_source_key(tensor, renamings, converters, model.base_model_prefix, known)
        if key not in known and tensor in known:  # The tensor already has the model's name.
            key, pattern = tensor, None
        for target in targets.get(pattern, [""]):
            loaded[key.replace(targets[pattern][0], target) if target else key] = tensor
        if pattern not in targets:
            unchanged[key] = tensor
    return loaded, unchanged


def _absent_parameters(model: Any, modules: set[str], sources: Mapping[str, str]) -> list[str]:
    """Return the parameters that are missing from the checkpoint.

    A checkpoint may omit poolers that are not in numbered blocks. A checkpoint of a different class may omit any
    parameter that is not in a numbered block, for example a classification head, because transformers initializes such
    parameters for training.
    """
    present = sources.keys() | {f"{module}.weight" for module in modules} | modules
    # A converted folder stores the biases of experts with their packed weights.
    present |= {f"{module}_bias" for module in modules if is_expert_weight(module) and f"{module}.bias" in sources}
    patterns = "|".join(f"({pattern})" for pattern in model._keys_to_ignore_on_load_missing or ())
    is_own_class = type(model).__name__ in (model.config.architectures or ())
    tied = model.all_tied_weights_keys
    loaded = {tied.get(name, name) for name in present}  # A tied parameter is represented by its target.
    return [
        name
        for name, _ in model.named_parameters()
        if name not in present
        and tied.get(name, name) not in loaded
        and (
            (is_own_class and "pooler" not in name.split("."))
            or name.rpartition(".")[0] in modules
            or re.search(r"\.\d+\.", name)
        )
        and not (patterns and re.search(patterns, name))
    ]


def _empty_model(source: Source) -> tuple[Any, str]:
    """Build the model that config.json names on the meta device.

    Returns the model and "", or None and the reason for a failure.
    """
    architectures = source.config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        return None, "config.json names no architecture"
    if missing := [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]:
        return None, f"{' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} not installed"
    import torch
    import transformers

    architecture = getattr(transformers, str(architectures[0]), None)
    if architecture is None:
        return None, f"transformers {transformers.__version__} has no class {architectures[0]}"
    try:
        config = transformers.AutoConfig.from_pretrained(source.folder, trust_remote_code=False)
        with torch.device("meta"):
            return architecture._from_config(config, attn_implementation="eager"), ""
    except Exception as error:  # The model's code may raise any error.
        cause = (str(error).strip() or type(error).__name__).splitlines()[0]
        return None, f"{architectures[0]} cannot be built: {cause}"
