"""Folders of tiny models with fp8, NVFP4 and 8-bit weights, and their values, which ml_dtypes decodes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from model_folders import MOE, config, linear_shapes, moe_shapes, moe_tensors, other_tensors, write_folder
from numpy.typing import NDArray

Tensors = dict[str, NDArray[Any]]
BF16, E4M3, E2M1 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn


def codes(rng: Any, n: int, k: int) -> NDArray[Any]:
    """Return random e4m3 numbers (N, K)."""
    return (64 * rng.standard_normal((n, k))).astype(E4M3)


def fp8_block(rng: Any, n: int, k: int) -> tuple[Tensors, NDArray[Any]]:
    weight, scale = codes(rng, n, k), np.exp(rng.standard_normal((-(-n // 128), -(-k // 128))) - 6).astype(np.float32)
    rounded = scale.astype(BF16).astype(np.float32)
    spread = np.repeat(np.repeat(rounded, 128, axis=0), 128, axis=1)[:n, :k]
    tensors = {"weight": weight, "weight_scale_inv": scale, "input_scale": np.ones(1, np.float32)}
    return tensors, weight.astype(np.float32) * spread


def fp8_block_compressed(rng: Any, n: int, k: int) -> tuple[Tensors, NDArray[Any]]:
    tensors, values = fp8_block(rng, n, k)
    return {"weight": tensors["weight"], "weight_scale": tensors["weight_scale_inv"]}, values


def fp8_channel(rng: Any, n: int, k: int) -> tuple[Tensors, NDArray[Any]]:
    weight, scale = codes(rng, n, k), np.exp(rng.standard_normal((n, 1)) - 6).astype(BF16)
    return {"weight": weight, "weight_scale": scale}, weight.astype(np.float32) * scale.astype(np.float32)


def fp8_tensor(rng: Any, n: int, k: int) -> tuple[Tensors, NDArray[Any]]:
    weight, scale = codes(rng, n, k), np.float32(rng.random() / 64)
    tensors = {"weight": weight, "weight_scale": np.array(scale), "input_scale": np.array(scale)}
    return tensors, weight.astype(np.float32) * scale.astype(BF16).astype(np.float32)


def nvfp4(rng: Any, n: int, k: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return packed codes, e4m3 scales, and their product."""
    packed = rng.integers(0, 256, (n, k // 2), dtype=np.uint8)
    scale = np.exp(rng.standard_normal((n, k // 16))).astype(E4M3)
    nibbles = np.stack([packed & 15, packed >> 4], axis=2).reshape(n, k)
    return packed, scale, nibbles.view(E2M1).astype(np.float32) * np.repeat(scale.astype(np.float32), 16, axis=1)


def nvfp4_modelopt(rng: Any, n: int, k: int) -> tuple[Tensors, NDArray[Any]]:
    packed, scale, values = nvfp4(rng, n, k)
    factor = np.float32(0.003 * np.exp(rng.standard_normal()))
    tensors = {"weight": packed, "weight_scale": scale, "weight_scale_2": np.array(factor)}
    return tensors | {"input_scale": np.array(factor)}, values * factor


def nvfp4_compressed(rng: Any, n: int, k: int) -> tuple[Tensors, NDArray[Any]]:
    packed, scale, values = nvfp4(rng, n, k)
    factor = np.array([2.0 ** rng.integers(6, 10)], np.float32)  # Its inverse is exact.
    tensors = {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": factor}
    return tensors | {"input_global_scale": factor}, values / factor


def gptq8(rng: Any, n: int, k: int, order: bool = False) -> tuple[Tensors, NDArray[Any]]:
    """Return symmetric 8-bit GPTQ tensors with groups of 64 rows. Their zero points, 128, are stored as 127."""
    q, index = rng.integers(0, 256, (k, n), dtype=np.uint8), np.arange(k, dtype=np.int32) // 64
    if order:
        rng.shuffle(index)
    scales = (rng.random((k // 64, n)) / 1024 + 2**-12).astype(BF16)
    words = q.reshape(k // 4, 4, n).transpose(0, 2, 1).copy().view(np.int32)[..., 0]
    zeros = np.full((k // 64, n // 4), 0x7F7F7F7F, np.int32)
    values = (q.astype(np.float32) - 128) * scales.astype(np.float32)[index]
    return {"qweight": words.copy(), "qzeros": zeros, "scales": scales, "g_idx": index}, values.T


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "float", "symmetric": True, **weights},
             "input_activations": {"num_bits": 8, "type": "float", "dynamic": True}}  # fmt: skip
    section = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    return {**section, "ignore": ["lm_head", "re:.*mlp.gate$"]}


#: Tensors of a layer, and the quantization configuration of the model.
KINDS: dict[str, tuple[Callable[[Any, int, int], tuple[Tensors, NDArray[Any]]], dict[str, Any]]] = {
    "fp8, blocks": (
        fp8_block,
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
         "modules_to_not_convert": ["lm_head", "gate"]},
    ),
    "fp8, blocks of compressed-tensors": (
        fp8_block_compressed,
        compressed("float-quantized", num_bits=8, strategy="block", block_structure=[128, 128]),
    ),
    "fp8, channels": (fp8_channel, compressed("float-quantized", num_bits=8, strategy="channel")),
    "fp8, one scale": (fp8_tensor, {"quant_method": "fp8", "activation_scheme": "static"}),
    "fp8, ModelOpt": (fp8_tensor, {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}),
    "NVFP4, ModelOpt": (
        nvfp4_modelopt,
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "model.layers.*.mlp.gate"],
         "kv_cache_scheme": {"num_bits": 8, "type": "float"}, "producer": {"name": "modelopt"}},
    ),
    "NVFP4, compressed-tensors": (
        nvfp4_compressed,
        compressed("nvfp4-pack-quantized", num_bits=4, strategy="tensor_group", group_size=16),
    ),
    "GPTQ, 8 bits": (gptq8, {"quant_method": "gptq", "bits": 8, "group_size": 64, "sym": True, "desc_act": False}),
    "GPTQ, 8 bits, act-order": (
        partial(gptq8, order=True), {"quant_method": "gptq", "bits": 8, "group_size": 64, "sym": True, "desc_act": True}
    ),
}  # fmt: skip


def write(folder: Path, kind: str, model: str = "llama") -> Tensors:
    """Write a model in a format, and return the values (N, K) of its layers in float32."""
    tensors_of, section = KINDS[kind]
    rng = np.random.default_rng(0)
    shapes = linear_shapes() if model == "llama" else moe_shapes(model)
    tensors, values = other_tensors("bfloat16", 1), {}
    for layer, (k, n) in shapes.items():
        parts, values[layer] = tensors_of(rng, n, k)
        tensors |= {f"{layer}.{name}": array for name, array in parts.items()}
    settings = config("bfloat16", section)
    if model != "llama":
        settings |= {"model_type": model, **MOE[model][2]}
        tensors |= {name: array.astype(BF16) for name, array in moe_tensors(model).items()}
    write_folder(folder, tensors, settings)
    return values
