"""The quantizer that replaces linear layers with MarlinLinear while transformers loads a model.

The quantizer supports checkpoints with three kinds of layers:

- Packed layers that `cudatma convert` or save_pretrained() wrote.
- Layers from other tools, which are packed during loading.
- Float layers, which are quantized during loading.

transformers renames the tensors of some architectures. A layer may therefore have different names in the checkpoint and
in the model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.distributed import DistributedConfig
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils import logging

from cudatma.backend import selected_backend
from cudatma.errors import ArgumentError, WeightFileError
from cudatma.integrations.torch import ExpertWeights, MarlinLinear
from cudatma.integrations.torch.weights import expert_tensors, weight_tensors
from cudatma.integrations.transformers.config import CudatmaConfig
from cudatma.integrations.transformers.experts import concatenated, replace_experts, take_biases
from cudatma.quantization import PackedExperts, PackedWeight, pack_experts, quantize_experts, quantize_linear
from cudatma.quantization.agreement import LayerFacts
from cudatma.quantization.checkpoint import Checkpoint, files_by_tensor
from cudatma.quantization.conversion.expert_groups import NAMINGS, ExpertGroup, is_expert_weight, misfit
from cudatma.quantization.conversion.importers import check_scales, pack_layer
from cudatma.quantization.conversion.inventory import take_inventory
from cudatma.quantization.conversion.model_class import (
    Sizes,
    expert_sizes,
    is_linear,
    linear_sizes,
    match_layers,
    renaming,
    unsupported_experts,
)
from cudatma.quantization.conversion.source import tower_layers, unsuitable
from cudatma.quantization.formats import Format
from cudatma.quantization.namespaces import host_array
from cudatma.quantization.safetensors_file import open_safetensors
from cudatma.quantization.statement import Statement, read_statement
from cudatma.quantization.weight_format import weight_format


class Pack(ConversionOps):  # type: ignore[misc]
    """Operation that packs a layer from another tool. ``facts`` maps the name of each module to its facts."""

    def __init__(self, kind: Format, facts: Mapping[str, LayerFacts]) -> None:
        self.kind, self.facts = kind, facts

    def __deepcopy__(self, memo: Any) -> Pack:
        return self  # transformers copies the operation for each layer.

    def convert(self, input_dict: dict[str, Any], *, full_layer_name: str, model: Any, **_: Any) -> dict[str, Any]:
        """Pack one layer. ``input_dict`` maps the patterns to the matching tensors."""
        tensors = {pattern.rpartition(".")[2][:-1]: matches[0] for pattern, matches in input_dict.items()}
        layer = full_layer_name.rpartition(".")[0]
        module = model.get_submodule(layer)
        dtype = str(module.dtype).removeprefix("torch.")
        packed = pack_layer(self.kind, tensors, self.facts[layer], dtype=dtype)
        return _fill(module, layer, packed, next(iter(tensors.values())).device)


class PackExperts(Pack):
    """Operation that packs the experts of a layer from another tool.

    ``facts`` maps the name of each expert weight in the model to the facts of its matrices, expert by expert.
    """

    def __init__(self, kind: Format, facts: Mapping[str, Sequence[LayerFacts]]) -> None:
        super().__init__(kind, {})
        self.experts = facts

    def convert(self, input_dict: dict[str, Any], *, full_layer_name: str, model: Any, **_: Any) -> dict[str, Any]:
        """Pack one weight. ``input_dict`` maps the patterns to the matching tensors of all experts."""
        name = full_layer_name.rpartition(".")[0]
        weights = model.get_submodule(name)
        dtype = str(weights.dtype).removeprefix("torch.")
        matrices: dict[str, list[dict[str, Any]]] = {}
        for pattern, matches in input_dict.items():
            matrix, part = pattern[:-1].split(r"\.")[-2:]
            for tensors, match in zip(matrices.setdefault(matrix, [{} for _ in matches]), matches, strict=True):
                tensors[part] = match
        facts = iter(self.experts[name])
        experts = [
            tuple([pack_layer(self.kind, tensors, next(facts), dtype=dtype) for tensors in parts])
            for parts in zip(*(matrices[matrix] for matrix in sorted(matrices)), strict=True)  # Gate precedes up.
        ]
        packed = pack_experts(experts, gated=weights.gated)  # type: ignore[arg-type]
        return _fill(weights, name, packed, next(iter(input_dict.values()))[0].device)


class PackStacked(Pack):
    """Operation that packs the stacked experts of gpt-oss.

    ``groups`` maps the name of each expert weight in the model to its matrices.
    """

    def __init__(
        self, kind: Format, facts: Mapping[str, Sequence[LayerFacts]], groups: Mapping[str, ExpertGroup]
    ) -> None:
        super().__init__(kind, {})
        self.experts, self.groups = facts, groups

    def convert(self, input_dict: dict[str, Any], *, full_layer_name: str, model: Any, **_: Any) -> dict[str, Any]:
        """Pack one weight. ``input_dict`` maps the patterns to the stacked tensors."""
        name = full_layer_name.rpartition(".")[0]
        weights, group = model.get_submodule(name), self.groups[name]
        dtype = str(weights.dtype).removeprefix("torch.")
        parts = {pattern.rpartition("_")[2][:-1]: matches[0] for pattern, matches in input_dict.items()}
        matrices = zip(*(group.split(host_array(tensor, part)) for part, tensor in parts.items()), strict=True)
        experts = [
            pack_layer(self.kind, dict(zip(parts, arrays, strict=True)), self.experts[name][0], dtype=dtype)
            for arrays in matrices
        ]
        packed = pack_experts(experts, gated=weights.gated)
        return _fill(weights, name, packed, next(iter(parts.values())).device)


class Keep(ConversionOps):  # type: ignore[misc]
    """Operation that loads an array of packed experts unchanged.

    It takes precedence over transformers' conversions of float experts, because their patterns match the same names.
    """

    def convert(self, input_dict: dict[str, Any], *, full_layer_name: str, **_: Any) -> dict[str, Any]:
        """Return a dict that maps the tensor's full name to the tensor."""
        ((tensor,),) = input_dict.values()
        return {full_layer_name: tensor}


class Quantize(ConversionOps):  # type: ignore[misc]
    """Operation that quantizes a float weight, or stacked float expert weights."""

    def __init__(self, config: CudatmaConfig) -> None:
        self.config = config

    def convert(
        self, input_dict: dict[str, Any], *, full_layer_name: str, model: Any, missing_keys: Any = None, **_: Any
    ) -> dict[str, Any]:
        """Quantize one weight (N, K), or one expert weight."""
        (value,) = input_dict.values()
        weight = value[0] if isinstance(value, list) else value
        layer, name = full_layer_name.rpartition(".")[::2]
        module = model.get_submodule(layer)
        config = self.config
        options: dict[str, Any] = {
            "group_size": config.group_size, "symmetric": config.symmetric, "clip_search": config.clip_search,
            "format": config.format,
        }  # fmt: skip
        moved = weight.to(_quantization_device(weight))
        if missing_keys is not None:
            missing_keys.discard(full_layer_name)
        if isinstance(module, MarlinLinear):
            packed = quantize_linear(moved, **options, dtype=str(module.dtype).removeprefix("torch."))
            del module._parameters["weight"]
            return _fill(module, layer, packed, weight.device)
        stacked = concatenated(module, name, moved if module.is_transposed else moved.transpose(1, 2))
        weights = replace_experts(module, name, config.facts(full_layer_name))
        dtype = str(weights.dtype).removeprefix("torch.")
        experts = quantize_experts(stacked, gated=weights.gated, dtype=dtype, **options)
        return _fill(weights, full_layer_name, experts, weight.device)


def _quantization_device(weight: Any) -> Any:
    """Return the device on which to quantize a weight.

    A weight on a GPU is quantized on this GPU, which device_map chose. A weight on the CPU is quantized on torch's
    current GPU, because NumPy would take 50 times as long, or on the CPU if there is no GPU or if $CUDATMA_BACKEND
    names another backend.
    """
    if weight.is_cuda or not torch.cuda.is_available() or selected_backend() != "cuda":
        return weight.device
    return torch.device("cuda", torch.cuda.current_device())


def check_ranks(options: Mapping[str, Any]) -> None:
    """Raise ArgumentError for options of from_pretrained() that shard layers across processes."""
    distributed = options.get("distributed_config")
    if not isinstance(distributed, DistributedConfig):
        settings = distributed or {name: options.get(name) for name in ("tp_plan", "tp_size")}
        distributed = DistributedConfig.from_dict(settings)
    if (count := distributed.tp_size or 1) > 1:
        remedy = "load the model on one GPU, serve it with vLLM, or shard layers with ColumnParallel and RowParallel"
        raise ArgumentError("tp_size", count, "1 for packed layers", remedy)


def packing_conversions(
    kind: Format,
    facts: Mapping[str, LayerFacts],
    expert_facts: Mapping[str, Sequence[LayerFacts]],
    groups: Mapping[str, ExpertGroup],
    base: str,
) -> list[Any]:
    """Return the converters that transformers uses to collect and pack the tensors of a layer, or of its experts.

    The patterns match only the full names of packed layers, because float layers may also have a tensor ``weight``. The
    names in the checkpoint may lack the prefix ``base``, or have this prefix although the names in the model lack it.
    """

    def pattern(names: Iterable[str]) -> str:
        prefix = f"{base}." if base else ""
        return rf"^((?:{re.escape(prefix)})?(?:{'|'.join(re.escape(name.removeprefix(prefix)) for name in names)}))"

    parts = (*kind.required, *kind.optional)
    if groups and kind.separator == "_":
        names = [rf"{pattern(groups)}_{part}$" for part in parts]
        return [WeightConverter(names, r"\1.qweight", [PackStacked(kind, expert_facts, groups)])]
    converters = []
    if modules := dict.fromkeys(name.rpartition(".")[0] for name in groups):
        converters = [
            WeightConverter(
                source_patterns=[rf"{pattern(modules)}\.\d+\.{name}\.{part}$" for name in names for part in parts],
                target_patterns=rf"\1.{target}.qweight",
                operations=[PackExperts(kind, expert_facts)],
            )
            for gate, up, down in NAMINGS
            for target, names in (("gate_up_proj", (gate, up)), ("down_proj", (down,)))
        ]
    if facts:
        names = [rf"{pattern(facts)}\.{part}$" for part in parts]
        converters.append(WeightConverter(names, r"\1.qweight", [Pack(kind, facts)]))
    return converters


def _fill(
    module: MarlinLinear | ExpertWeights, layer: str, weight: PackedWeight | PackedExperts, device: Any
) -> dict[str, Any]:
    """Set the layer's buffers and return them by their full names. transformers checks the shapes of the buffers."""
    buffers = {}
    module.group_size, module.format = weight.group_size, weight.format
    tensors = expert_tensors(weight) if isinstance(weight, PackedExperts) else weight_tensors(weight)
    for name, tensor in tensors.items():
        if name in module._buffers:
            tensor = None if tensor is None else tensor.to(device)
            setattr(module, name, tensor)
            if tensor is not None:
                buffers[f"{layer}.{name}"] = tensor
    return buffers


_DTYPES = (torch.float16, torch.bfloat16)
_log = logging.get_logger(__name__)


class CudatmaHfQuantizer(HfQuantizer):  # type: ignore[misc]
    """Quantizer that replaces linear layers during loading, and completes ``quantization_config``."""

    requires_calibration = False
    quantization_config: CudatmaConfig

    def __init__(self, quantization_config: CudatmaConfig, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        source = quantization_config.source
        self.statement: Statement | None = None if source is None else read_statement(source, "quantization_config")
        self.layer_facts: dict[str, LayerFacts] = {}
        self.expert_facts: dict[str, list[LayerFacts]] = {}
        self.expert_groups: dict[str, ExpertGroup] = {}
        self.base = ""
        self.float_experts: set[str] = set()

    def update_dtype(self, dtype: Any) -> Any:
        """Return the dtype for loading the model.

        The result is the dtype of the converted layers if there are any, otherwise ``dtype`` if it is fp16 or bf16,
        otherwise float16.
        """
        stated = self.quantization_config.dtype
        chosen = getattr(torch, stated) if stated else dtype if dtype in _DTYPES else torch.float16
        if chosen != dtype:
            _log.warning_once(
                f"cudatma loads the model in {chosen}, the type of its packed layers, instead of {dtype}."
            )
        return chosen

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Iterable[str] | None = None, **_: Any
    ) -> None:
        check_ranks({"distributed_config": getattr(model.config, "distributed_config", None)})
        config = self.quantization_config
        files = list(checkpoint_files or ())
        if not self.pre_quantized:
            if files and all(str(file).endswith(".safetensors") for file in files):
                match_layers(model, {}, open_files(files)).require()
            skipped = self.get_modules_to_not_convert(
                model, config.modules_to_not_convert, model._keep_in_fp32_modules, add_default_skips=True
            )
            linears = {
                name: module
                for name, module in model.named_modules()
                if is_linear(module)
                and should_convert_module(name, skipped)
                and not unsuitable(name, tuple(module.weight.shape))
            }
            experts = self._float_experts(model, skipped)
            if not linears and not experts:
                allowed = "a model with nn.Linear layers of at least 64 x 64 in numbered blocks"
                remedy = "omit quantization_config"
                raise ArgumentError("model", f"no such layer in {type(model).__name__}", allowed, remedy)
            for name in () if config.vision_tower else tower_layers((*linears, *experts), model.config.model_type):
                linears.pop(name, None)
                experts.pop(name, None)
            self.float_experts = {f"{name}.{weight}" for name, sizes in experts.items() for weight in sizes}
            for name, linear in linears.items():
                layer = _replace(model, name, linear, config.facts(name))
                # transformers loads the float weight under this name.
                layer.register_parameter("weight", torch.nn.Parameter(linear.weight.to("meta"), False))
            return
        checkpoint = open_files(files)
        facts: dict[str, dict[str, Any]] = {name: config.facts(name) for name in config.layers or ()}
        sizes: dict[str, Sizes] = dict.fromkeys(facts)
        if self.statement is not None:
            inventory = take_inventory(checkpoint, self.statement, "the checkpoint")
            for note in inventory.notes:
                _log.warning_once(f"cudatma: {note}")
            for name in inventory.packed:
                facts[name], sizes[name] = {}, inventory.sizes(name)
        match = match_layers(model, sizes, checkpoint)
        match.require()
        self.base = model.base_model_prefix
        modules = {module: facts[layer] for layer, module in match.modules.items()}
        if self.statement is None:
            require_arrays(checkpoint, modules, renaming(model))
        else:
            packed = inventory.packed
            for name, module in match.modules.items():
                layer_facts = [inventory.facts[layer] for layer in packed[name]]
                if is_expert_weight(module):
                    self.expert_facts[module], self.expert_groups[module] = layer_facts, inventory.experts[name]
                    dtype = model.get_parameter(module).dtype
                else:
                    self.layer_facts[module] = layer_facts[0]
                    dtype = model.get_submodule(module).weight.dtype
                for part in packed[name]:
                    scales = inventory.layers[part][self.statement.format.scales]
                    check_scales(scales, checkpoint.read(scales), str(dtype).removeprefix("torch."))
        for module, module_facts in modules.items():
            if is_expert_weight(module):
                experts_module, weight = module.rpartition(".")[::2]
                is_converted = self.statement is None
                replace_experts(model.get_submodule(experts_module), weight, module_facts, packs_bias=is_converted)
            else:
                _replace(model, module, model.get_submodule(module), module_facts)
        _untie(model, modules)

    def _float_experts(self, model: Any, skipped: list[str]) -> dict[str, dict[str, tuple[int, int, int]]]:
        """Return the modules of experts to quantize, with the sizes of both weights."""
        experts = {}
        for name, module in model.named_modules():
            sizes = expert_sizes(module)
            if not sizes or not should_convert_module(name, skipped) or not re.search(r"\.\d+\.", name):
                continue
            if why := unsupported_experts(module) or misfit(sizes, "down_proj"):
                _log.warning_once(f"cudatma leaves the experts of {type(module).__name__} float: {why}")
            else:
                experts[name] = sizes
        return experts

    def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
        """Return whether a tensor is the float weight of a layer or of experts to quantize."""
        if param_name in self.float_experts:
            return True
        layer, tensor = param_name.rpartition(".")[::2]
        return tensor == "weight" and isinstance(model.get_submodule(layer), MarlinLinear)

    def param_element_size(self, model: Any, param_name: str, param: Any) -> float:
        """Return the element size in bytes of a loaded parameter, for device_map="auto".

        The float weight of a layer to quantize counts as 0 bytes, because the layer's packed arrays are counted. For
        experts, the result is an estimate of the packed size.
        """
        if param_name in self.float_experts:
            config = self.quantization_config
            rows = config.group_size if config.group_size > 0 else param.shape[-1]
            return weight_format(config.format).bits / 8 + (2 if config.symmetric else 3) / rows
        if self.param_needs_quantization(model, param_name):
            return 0
        return float(super().param_element_size(model, param_name, param))

    def get_quantize_ops(self) -> Any:
        """Return the operation that quantizes a float weight."""
        return Quantize(self.quantization_config)

    def get_new_dtype(self, converter: Any, param: Any, dtype: Any) -> Any:
        """Return the dtype that a tensor is converted to when it is loaded, or None to keep the file's dtype.

        transformers 5.21 and later call this method.
        """
        return None if _packs(converter) else super().get_new_dtype(converter, param, dtype)

    def get_weight_conversions(self) -> list[Any]:
        """Return the converters that pack layers from another tool, or that load packed experts."""
        if self.statement is not None:
            kind = self.statement.format
            return packing_conversions(kind, self.layer_facts, self.expert_facts, self.expert_groups, self.base)
        pattern = r"^(.+\.experts\.(?:gate_up_proj|down_proj)\.(?:qweight|scales|zeros|tensor_scale|bias))$"
        return [WeightConverter(source_patterns=pattern, target_patterns=r"\1", operations=[Keep()])]

    def update_weight_conversions(self, weight_conversions: list[Any], *_: Any) -> list[Any]:
        """Return all converters. The first converter with a matching pattern applies.

        transformers' patterns for float experts also match longer names, such as weight_packed. transformers 5.23 and
        later also pass the model.
        """
        return [*self.get_weight_conversions(), *weight_conversions]

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        for module in model.modules():
            take_biases(module)
        layers = {
            name: module for name, module in model.named_modules() if isinstance(module, MarlinLinear | ExpertWeights)
        }
        missing = [name for name, layer in layers.items() if "weight" in layer._parameters]
        if missing := [*missing, *(name for name in sorted(self.float_experts) if name not in layers)]:
            raise WeightFileError(
                ", ".join(missing[:4]),
                ...,
                "in the checkpoint",
                "see the load report of transformers",
            )
        dtypes = {str(layer.dtype).removeprefix("torch.") for layer in layers.values()}
        self.quantization_config.describe(
            {name: _facts(layer) for name, layer in layers.items()}, next(iter(dtypes), "float16")
        )
        self.statement = None
        # The converters are not needed for saving, because packed layers are saved in their new form.
        experts = {name for name, layer in layers.items() if isinstance(layer, ExpertWeights)}
        model._weight_conversions = [
            part for part in model._weight_conversions or () if not _packs(part) and not _stacks(part, experts)
        ]
        return model

    def is_serializable(self) -> bool:
        """Return True, because save_pretrained() supports packed layers."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether the model can be trained. The value is False, because there is no backward pass."""
        return False

    @property
    def is_compileable(self) -> bool:
        """Whether generate() may compile the model."""
        return True


def _replace(model: Any, name: str, linear: Any, facts: dict[str, Any]) -> MarlinLinear:
    """Replace an nn.Linear or Conv1D with a MarlinLinear on the meta device."""
    sizes: Any = linear_sizes(linear)
    layer = MarlinLinear(sizes[0], sizes[1], linear.bias is not None, dtype=linear.weight.dtype, device="meta", **facts)
    model.set_submodule(name, layer)
    # transformers initializes every module without this attribute, and reads .weight of any module that it treats as an
    # nn.Linear.
    layer._is_hf_initialized = True
    parent = model.get_submodule(name.rpartition(".")[0])
    if not [*parent.parameters(recurse=False), *parent.buffers(recurse=False)]:
        parent._is_hf_initialized = True
    return layer


def _untie(model: Any, modules: Iterable[str]) -> None:
    """Prevent transformers from tying the weights of packed modules, such as a quantized head and a float embedding."""
    packed = {f"{module}.weight" for module in modules}
    tied = model.all_tied_weights_keys.items()
    model.all_tied_weights_keys = {name: other for name, other in tied if packed.isdisjoint((name, other))}


def _facts(layer: MarlinLinear | ExpertWeights) -> dict[str, Any]:
    order = isinstance(layer, MarlinLinear) and layer.perm is not None
    facts = {"group_size": layer.group_size, "symmetric": layer.zeros is None, "act_order": order}
    return facts | {"format": layer.format}


def _packs(conversion: Any) -> bool:
    return any(isinstance(operation, Pack | Keep) for operation in getattr(conversion, "operations", ()))


def _stacks(conversion: Any, experts: Iterable[str]) -> bool:
    """Return whether a converter of transformers combines the float weights of these packed experts."""
    targets = conversion.target_patterns if isinstance(conversion, WeightConverter) else ()
    return any(target.lstrip("^").rstrip("$") in name for target in targets for name in experts)


_ARRAYS = ("qweight", "scales", "zeros", "perm", "tensor_scale")


def open_files(files: Iterable[str]) -> Checkpoint:
    """Open the files that transformers will load. Raises WeightFileError if a file cannot be read."""
    opened = [open_safetensors(file) for file in files]
    return Checkpoint(opened[0].path if opened else Path(), files_by_tensor(opened))


def require_arrays(
    checkpoint: Checkpoint, layers: Mapping[str, Mapping[str, Any]], rename: Callable[[str], str]
) -> None:
    """Raise WeightFileError if a tensor of a packed layer is missing (transformers would initialize it at random).

    ``layers`` maps each module's name to its facts.
    """
    stored = {f"{rename(layer)}.{part}" for layer, _, part in (name.rpartition(".") for name in checkpoint.files)
            if part in _ARRAYS}  # fmt: skip
    for layer, facts in layers.items():
        absent = {"zeros": facts["symmetric"], "perm": not facts["act_order"]}
        absent["tensor_scale"] = not weight_format(facts["format"]).has_tensor_scale
        required = [part for part in _ARRAYS if not absent.get(part)]
        missing = [part for part in required if f"{layer}.{part}" not in stored]
        if missing:
            raise WeightFileError(
                layer,
                f"no {' and no '.join(missing)}",
                f"stored as {' and '.join(required)}",
                "convert the model again",
            )
