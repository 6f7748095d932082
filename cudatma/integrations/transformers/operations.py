"""Tensors of a checkpoint to the buffers of MarlinLinear, one layer at a time, as transformers loads them."""

from __future__ import annotations

from typing import Any

import torch
from transformers.core_model_loading import ConversionOps, WeightConverter

from cudatma.backend import selected_backend
from cudatma.integrations.torch import MarlinLinear
from cudatma.integrations.torch.weights import weight_tensors
from cudatma.integrations.transformers.config import CudatmaConfig
from cudatma.quantization import PackedWeight, quantize_linear
from cudatma.quantization.conversion.scheme import Scheme


class Pack(ConversionOps):  # type: ignore[misc]
    """The tensors of a GPTQ, AWQ or compressed-tensors layer to ours."""

    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme

    def convert(self, input_dict: dict[str, Any], *, full_layer_name: str, model: Any, **_: Any) -> dict[str, Any]:
        """input_dict: the layer's tensors by the patterns that they matched."""
        tensors = {pattern[2:-1]: found[0] for pattern, found in input_dict.items()}
        layer = full_layer_name.rpartition(".")[0]
        module = model.get_submodule(layer)
        dtype = str(module.dtype).removeprefix("torch.")
        return _fill(module, layer, self.scheme.pack(tensors, dtype=dtype), next(iter(tensors.values())).device)


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


def packing_conversion(scheme: Scheme) -> Any:
    """What transformers collects a layer's tensors with: each is found by the end of its name."""
    endings = [rf"\.{name}$" for name in (*scheme.required, *scheme.optional)]
    return WeightConverter(source_patterns=endings, target_patterns=".qweight", operations=[Pack(scheme)])


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
