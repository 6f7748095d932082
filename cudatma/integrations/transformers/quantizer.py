"""The quantizer that transformers calls while it loads a model: its linear layers become MarlinLinear.

Three kinds of checkpoints: packed layers, as `cudatma convert` and save_pretrained() write them; layers of GPTQ, AWQ or
compressed-tensors, which are packed as they are read; and float layers, which are quantized as they are read.
transformers renames tensors of some architectures as it loads, so that a layer has one name in the checkpoint and one
in the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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
from cudatma.integrations.torch import MarlinLinear
from cudatma.integrations.torch.weights import weight_tensors
from cudatma.integrations.transformers.config import CudatmaConfig
from cudatma.quantization import PackedWeight, quantize_linear
from cudatma.quantization.agreement import LayerFacts
from cudatma.quantization.checkpoint import Checkpoint, files_by_tensor
from cudatma.quantization.conversion.importers import check_scales, pack_layer
from cudatma.quantization.conversion.inventory import take_inventory
from cudatma.quantization.conversion.model_class import Sizes, is_linear, linear_sizes, match_layers, renaming
from cudatma.quantization.conversion.source import tower_layers, unsuitable
from cudatma.quantization.formats import Format
from cudatma.quantization.safetensors_file import open_safetensors
from cudatma.quantization.statement import Statement, read_statement


class Pack(ConversionOps):  # type: ignore[misc]
    """The tensors of another tool's layer to ours. facts: by the module's name."""

    def __init__(self, kind: Format, facts: Mapping[str, LayerFacts]) -> None:
        self.kind, self.facts = kind, facts

    def __deepcopy__(self, memo: Any) -> Pack:
        return self  # transformers copies it for each layer, and it does not change

    def convert(self, input_dict: dict[str, Any], *, full_layer_name: str, model: Any, **_: Any) -> dict[str, Any]:
        """input_dict: the layer's tensors by the patterns that they matched."""
        tensors = {pattern.rpartition(".")[2][:-1]: found[0] for pattern, found in input_dict.items()}
        layer = full_layer_name.rpartition(".")[0]
        module = model.get_submodule(layer)
        dtype = str(module.dtype).removeprefix("torch.")
        packed = pack_layer(self.kind, tensors, self.facts[layer], dtype=dtype)
        return _fill(module, layer, packed, next(iter(tensors.values())).device)


class Quantize(ConversionOps):  # type: ignore[misc]
    """A float weight to ours."""

    def __init__(self, config: CudatmaConfig) -> None:
        self.config = config

    def convert(
        self, input_dict: dict[str, Any], *, full_layer_name: str, model: Any, missing_keys: Any = None, **_: Any
    ) -> dict[str, Any]:
        """input_dict: the weight (N, K)."""
        (found,) = input_dict.values()
        weight = found[0] if isinstance(found, list) else found
        layer = full_layer_name.rpartition(".")[0]
        module = model.get_submodule(layer)
        packed = quantize_linear(
            weight.to(_quantization_device(weight)),
            group_size=self.config.group_size,
            symmetric=self.config.symmetric,
            clip_search=self.config.clip_search,
            dtype=str(module.dtype).removeprefix("torch."),
        )
        del module._parameters["weight"]
        if missing_keys is not None:
            missing_keys.discard(full_layer_name)
        return _fill(module, layer, packed, weight.device)


def _quantization_device(weight: Any) -> Any:
    """The GPU where a weight is, which device_map chose; torch's current GPU for one on the CPU, where NumPy would take
    50 times as long; the CPU without a GPU, or where $CUDATMA_BACKEND names another backend."""
    if weight.is_cuda or not torch.cuda.is_available() or selected_backend() != "cuda":
        return weight.device
    return torch.device("cuda", torch.cuda.current_device())


def check_ranks(options: Mapping[str, Any]) -> None:
    """Raise ArgumentError for options of from_pretrained() that divide layers among processes."""
    distributed = options.get("distributed_config")
    if not isinstance(distributed, DistributedConfig):
        named = distributed or {name: options.get(name) for name in ("tp_plan", "tp_size")}
        distributed = DistributedConfig.from_dict(named)
    if (count := distributed.tp_size or 1) > 1:
        remedy = "load the model on one GPU, or serve it by vLLM; ColumnParallel and RowParallel divide single layers"
        raise ArgumentError("tp_size", count, "1: int4 layers are not divided among processes", remedy)


def packing_conversion(kind: Format, facts: Mapping[str, LayerFacts]) -> Any:
    """What transformers collects a layer's tensors with: each is found by the end of its name."""
    # Whole names: transformers replaces the first occurrence of what matched, and ".s" begins ".self_attn" too.
    names = [rf"^(.+)\.{name}$" for name in (*kind.required, *kind.optional)]
    return WeightConverter(source_patterns=names, target_patterns=r"\1.qweight", operations=[Pack(kind, facts)])


def _fill(module: MarlinLinear, layer: str, weight: PackedWeight, device: Any) -> dict[str, Any]:
    """The layer's buffers by their full names. The module gets them too: its shapes are compared."""
    found = {}
    module.group_size = weight.group_size
    for name, tensor in weight_tensors(weight).items():
        tensor = None if tensor is None else tensor.to(device)
        setattr(module, name, tensor)
        if tensor is not None:
            found[f"{layer}.{name}"] = tensor
    return found


_DTYPES = (torch.float16, torch.bfloat16)
_log = logging.get_logger(__name__)


class CudatmaHfQuantizer(HfQuantizer):  # type: ignore[misc]
    """quantization_config: a CudatmaConfig; what it lacks is filled in when the model is loaded."""

    requires_calibration = False
    quantization_config: CudatmaConfig

    def __init__(self, quantization_config: CudatmaConfig, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        source = quantization_config.source
        self.statement: Statement | None = None if source is None else read_statement(source, "quantization_config")
        self.layer_facts: dict[str, LayerFacts] = {}

    def update_dtype(self, dtype: Any) -> Any:
        """That of converted layers; otherwise the model's, float16 where that is neither fp16 nor bf16."""
        named = self.quantization_config.dtype
        wanted = getattr(torch, named) if named else dtype if dtype in _DTYPES else torch.float16
        if wanted != dtype:
            _log.warning_once(f"cudatma: the model is loaded in {wanted}, the type of its int4 layers, not in {dtype}.")
        return wanted

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Iterable[str] | None = None, **_: Any
    ) -> None:
        check_ranks({"distributed_config": getattr(model.config, "distributed_config", None)})
        config = self.quantization_config
        files = list(checkpoint_files or ())
        if not self.pre_quantized:
            if files and all(str(file).endswith(".safetensors") for file in files):
                match_layers(model, {}, opened_files(files)).require()
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
            if not linears:
                got = f"no layer of {type(model).__name__} to quantize"
                raise ArgumentError("quantization_config", got, "nn.Linear in numbered blocks, from 64 x 64 up")
            for name in () if config.vision_tower else tower_layers(linears, model.config.model_type):
                del linears[name]
            for name, linear in linears.items():
                layer = _replace(model, name, linear, config.facts(name))
                # The float weight is read under this name.
                layer.register_parameter("weight", torch.nn.Parameter(linear.weight.to("meta"), False))
            return
        checkpoint = opened_files(files)
        facts: dict[str, dict[str, Any]] = {name: config.facts(name) for name in config.layers or ()}
        sizes: dict[str, Sizes] = dict.fromkeys(facts)
        if self.statement is not None:
            inventory = take_inventory(checkpoint, self.statement, "the checkpoint")
            for note in inventory.notes:
                _log.warning_once(f"cudatma: {note}")
            for name, read in inventory.facts.items():
                facts[name], sizes[name] = {}, (read.extent.k, read.extent.n)
        match = match_layers(model, sizes, checkpoint)
        match.require()
        modules = {module: facts[layer] for layer, module in match.modules.items()}
        if self.statement is None:
            require_arrays(checkpoint, modules, renaming(model))
        else:
            self.layer_facts |= {module: inventory.facts[layer] for layer, module in match.modules.items()}
            for name, module in match.modules.items():
                scales = inventory.layers[name][self.statement.format.scales]
                dtype = str(model.get_submodule(module).weight.dtype).removeprefix("torch.")
                check_scales(scales, checkpoint.read(scales), dtype)
        for module, known in modules.items():
            _replace(model, module, model.get_submodule(module), known)
        _untie(model, modules)

    def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
        """Whether a tensor is the float weight of a layer that becomes a MarlinLinear."""
        layer, tensor = param_name.rpartition(".")[::2]
        return tensor == "weight" and isinstance(model.get_submodule(layer), MarlinLinear)

    def param_element_size(self, model: Any, param_name: str, param: Any) -> float:
        """Bytes of an element in the loaded model, for device_map="auto": a float weight does not stay."""
        if self.param_needs_quantization(model, param_name):
            return 0
        return float(super().param_element_size(model, param_name, param))

    def get_quantize_ops(self) -> Any:
        """What turns such a weight into the layer's arrays."""
        return Quantize(self.quantization_config)

    def get_new_dtype(self, converter: Any, param: Any, dtype: Any) -> Any:
        """The type in which a tensor is read; None keeps that of the file. transformers before 5.21 does not ask."""
        return None if _packs(converter) else super().get_new_dtype(converter, param, dtype)

    def get_weight_conversions(self) -> list[Any]:
        """What turns the tensors of another tool's layers into ours."""
        return [] if self.statement is None else [packing_conversion(self.statement.format, self.layer_facts)]

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        layers = {name: module for name, module in model.named_modules() if isinstance(module, MarlinLinear)}
        if left := [name for name, layer in layers.items() if "weight" in layer._parameters]:
            raise WeightFileError(
                ", ".join(left[:4]), "no weights for these layers", "a whole checkpoint", "see the load report"
            )
        dtypes = {str(layer.dtype).removeprefix("torch.") for layer in layers.values()}
        self.quantization_config.describe(
            {name: _facts(layer) for name, layer in layers.items()}, next(iter(dtypes), "float16")
        )
        self.statement = None
        # What was converted is saved as it is now, not as it was.
        model._weight_conversions = [one for one in model._weight_conversions or () if not _packs(one)]
        return model

    def is_serializable(self) -> bool:
        """Whether save_pretrained() works."""
        return True

    @property
    def is_trainable(self) -> bool:
        """There is no backward pass."""
        return False

    @property
    def is_compileable(self) -> bool:
        """Whether generate() may compile the model."""
        return True


def _replace(model: Any, name: str, linear: Any, facts: dict[str, Any]) -> MarlinLinear:
    """Replace an nn.Linear or Conv1D by a MarlinLinear on the meta device."""
    sizes: Any = linear_sizes(linear)
    layer = MarlinLinear(sizes[0], sizes[1], linear.bias is not None, dtype=linear.weight.dtype, device="meta", **facts)
    model.set_submodule(name, layer)
    # transformers initializes every module that is not marked, and reads .weight of what it takes for nn.Linear.
    layer._is_hf_initialized = True
    parent = model.get_submodule(name.rpartition(".")[0])
    if not [*parent.parameters(recurse=False), *parent.buffers(recurse=False)]:
        parent._is_hf_initialized = True
    return layer


def _untie(model: Any, modules: Iterable[str]) -> None:
    """Keep transformers from tying weights of packed modules, such as a quantized head to the float embedding."""
    packed = {f"{module}.weight" for module in modules}
    tied = model.all_tied_weights_keys.items()
    model.all_tied_weights_keys = {one: other for one, other in tied if packed.isdisjoint((one, other))}


def _facts(layer: MarlinLinear) -> dict[str, Any]:
    order = layer.perm is not None
    return {"group_size": layer.group_size, "symmetric": layer.zeros is None, "act_order": order}


def _packs(conversion: Any) -> bool:
    return any(isinstance(operation, Pack) for operation in getattr(conversion, "operations", ()))


_ARRAYS = ("qweight", "scales", "zeros", "perm")


def opened_files(files: Iterable[str]) -> Checkpoint:
    """Open the files that transformers is about to load. Raises WeightFileError."""
    opened = [open_safetensors(file) for file in files]
    return Checkpoint(opened[0].path if opened else Path(), files_by_tensor(opened))


def require_arrays(
    checkpoint: Checkpoint, layers: Mapping[str, Mapping[str, Any]], renamed: Callable[[str], str]
) -> None:
    """Raise WeightFileError where a packed layer lacks a tensor: transformers would initialize it at random.

    layers: the facts of each by the module's name.
    """
    held = {f"{renamed(layer)}.{part}" for layer, _, part in (name.rpartition(".") for name in checkpoint.files)
            if part in _ARRAYS}  # fmt: skip
    for layer, facts in layers.items():
        left_out = {"zeros": facts["symmetric"], "perm": not facts["act_order"]}
        wanted = [part for part in _ARRAYS if not left_out.get(part)]
        missing = [part for part in wanted if f"{layer}.{part}" not in held]
        if missing:
            raise WeightFileError(layer, f"no {' and no '.join(missing)}", ", ".join(wanted), "convert the model again")
