"""cudatma convert of fp8, NVFP4, MXFP4 and 8-bit GPTQ, against the decoders of ml_dtypes and transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from float_folders import BF16, E4M3, KINDS, Tensors, nvfp4, write
from model_folders import (
    BLOCKS,
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    MOE,
    config,
    linear_shapes,
    other_tensors,
    write_folder,
)

from cudatma.errors import QuantizationError, WeightFileError
from cudatma.quantization import PackedExperts, PackedWeight, open_checkpoint
from cudatma.quantization.conversion import convert_checkpoint


def packed(out: Path, layer: str, shape: tuple[int, int]) -> PackedWeight:
    section = json.loads((out / "config.json").read_text())["quantization_config"]
    facts, checkpoint = {**section, **section["layers"][layer]}, open_checkpoint(out)
    scale = checkpoint.read_if_present(f"{layer}.tensor_scale")
    arrays = {part: checkpoint.read_if_present(f"{layer}.{part}") for part in ("qweight", "scales", "zeros", "perm")}
    named = {name: facts[name] for name in ("dtype", "group_size", "format")}
    factor = 1.0 if scale is None or scale.ndim else float(scale)
    return PackedWeight(**arrays, shape=shape, **named, tensor_scale=factor)


def packed_experts(out: Path, layer: str, k: int, n: int) -> PackedExperts:
    scales = open_checkpoint(out).read_if_present(f"{layer}.tensor_scale")
    weight = packed(out, layer, (k, EXPERTS * n))
    return PackedExperts(weight, EXPERTS, n, layer.endswith("gate_up_proj"), scales)


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_the_checkpoint(tmp_path: Path, kind: str) -> None:
    values = write(tmp_path / "in", kind)
    done = convert_checkpoint(tmp_path / "in", tmp_path / "out", shard_bytes=100_000)
    assert {layer.name for layer in done.layers} == set(values)
    assert any("activations are not quantized" in note for note in done.notes) == ("GPTQ" not in kind)
    assert set(done.left_out.values()) <= {"scales of quantized activations"}
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (section["format"], section["bits"]) == {"fp": ("fp8", 8), "NV": ("nvfp4", 4), "GP": ("int8", 8)}[kind[:2]]
    for layer in done.layers:
        weight = packed(tmp_path / "out", layer.name, linear_shapes()[layer.name])
        np.testing.assert_allclose(weight.dequantize(dtype=np.float32), values[layer.name].T, rtol=1e-6)
        assert (layer.format, layer.group_size) == (weight.format, weight.group_size)
        assert 0 <= layer.max_error <= 2**-8


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "act-order" not in kind])
@pytest.mark.parametrize("model", MOE)
def test_experts_of_these_formats(tmp_path: Path, model: str, kind: str) -> None:
    values = write(tmp_path / "in", kind, model)
    convert_checkpoint(tmp_path / "in", tmp_path / "out")
    block, naming, _ = MOE[model]
    for b in range(BLOCKS):
        module = f"model.layers.{b}.{block}.experts"
        gate, up, down = (np.stack([values[f"{module}.{e}.{name}"].T for e in range(EXPERTS)]) for name in naming)
        for name, expected in (("gate_up_proj", np.concatenate([gate, up], axis=2)), ("down_proj", down)):
            experts = packed_experts(tmp_path / "out", f"{module}.{name}", *expected.shape[1:])
            np.testing.assert_allclose(experts.dequantize(dtype=np.float32), expected, rtol=1e-6)


def test_compressed_tensors_decodes_the_same_values(tmp_path: Path) -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")
    import torch

    rng = np.random.default_rng(0)
    bytes_, scale, values = nvfp4(rng, 64, 96)
    decoded = helpers.unpack_fp4_from_uint8(torch.from_numpy(bytes_), 64, 96, dtype=torch.float32).numpy()
    np.testing.assert_array_equal(decoded * np.repeat(scale.astype(np.float32), 16, axis=1), values)


def gpt_oss(folder: Path, rng: Any) -> Tensors:
    """Write the experts of gpt-oss, and return their tensors."""
    sizes = {"gate_up_proj": (2 * INTERMEDIATE, HIDDEN), "down_proj": (HIDDEN, INTERMEDIATE)}
    tensors: Tensors = {}
    for name, (n, k) in sizes.items():
        prefix = f"model.layers.0.mlp.experts.{name}"
        tensors[f"{prefix}_blocks"] = rng.integers(0, 256, (EXPERTS, n, k // 32, 16), dtype=np.uint8)
        tensors[f"{prefix}_scales"] = rng.integers(115, 130, (EXPERTS, n, k // 32), dtype=np.uint8)
        tensors[f"{prefix}_bias"] = rng.standard_normal((EXPERTS, n)).astype(BF16)
    section = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
    }
    settings = config("bfloat16", section)
    del settings["architectures"]
    write_folder(folder, tensors | other_tensors("bfloat16", 1), {**settings, "model_type": "gpt_oss"})
    return tensors


def test_mxfp4_of_gpt_oss(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    decode = pytest.importorskip("transformers.integrations.mxfp4").convert_moe_packed_tensors
    tensors = gpt_oss(tmp_path / "in", np.random.default_rng(0))
    done = convert_checkpoint(tmp_path / "in", tmp_path / "out")
    assert len(done.layers) == 2
    for layer in done.layers:
        parts = (torch.from_numpy(tensors[f"{layer.name}_{part}"]) for part in ("blocks", "scales"))
        expected = decode(*parts, dtype=torch.float32).numpy()  # (experts, K, N)
        gated = layer.name.endswith("gate_up_proj")
        if gated:
            expected = np.concatenate([expected[:, :, ::2], expected[:, :, 1::2]], axis=2)
        k, n = expected.shape[1:]
        assert (layer.shape, layer.format, layer.max_error) == ((EXPERTS, k, n), "mxfp4", 0.0)
        experts = packed_experts(tmp_path / "out", layer.name, k, n)
        np.testing.assert_array_equal(experts.dequantize(dtype=np.float32), expected)
        bias = tensors[f"{layer.name}_bias"]
        ordered = np.concatenate([bias[:, ::2], bias[:, 1::2]], axis=1) if gated else bias
        np.testing.assert_array_equal(open_checkpoint(tmp_path / "out").read(f"{layer.name}.bias"), ordered)
    assert not [name for name in open_checkpoint(tmp_path / "out").names if name.endswith("_bias")]
    small = np.full((EXPERTS, layer.shape[2], layer.shape[1] // 32), 90, np.uint8)
    change(tmp_path / "in", {f"{layer.name}_scales": small})
    with pytest.raises(QuantizationError, match=r"_scales\[.* must be a finite value in the range of float16"):
        convert_checkpoint(tmp_path / "in", tmp_path / "half", dtype="float16")


@pytest.mark.parametrize(
    ("kind", "tensor", "value"), [("fp8, blocks", "weight_scale_inv", 1e4), ("NVFP4, ModelOpt", "weight_scale_2", 1e30)]
)
def test_values_beyond_the_range_of_the_dtype(tmp_path: Path, kind: str, tensor: str, value: float) -> None:
    layer = min(write(tmp_path / "in", kind))
    scale = open_checkpoint(tmp_path / "in").read(f"{layer}.{tensor}")
    change(tmp_path / "in", {f"{layer}.{tensor}": np.full_like(scale, value)})
    with pytest.raises(QuantizationError, match=rf"^{layer}: scales\[.*--dtype bfloat16"):
        convert_checkpoint(tmp_path / "in", tmp_path / "half", dtype="float16")
    assert not (tmp_path / "half").exists()
    convert_checkpoint(tmp_path / "in", tmp_path / "brain", dtype="bfloat16")


def change(folder: Path, tensors: Tensors) -> None:
    """Replace tensors in a folder with one file. None removes a tensor."""
    checkpoint = open_checkpoint(folder)
    kept = {name: checkpoint.read(name) for name in checkpoint.names} | tensors
    settings = json.loads((folder / "config.json").read_text())
    write_folder(folder, {name: array for name, array in kept.items() if array is not None}, settings)


LAYER = "model.layers.0.mlp.up_proj"
#: A change of the tensors or of the configuration, and the error.
REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "other blocks": (
        "fp8, blocks",
        {},
        {"weight_block_size": [64, 64]},
        r"weight_block_size must be .*got blocks \[64, 64\]",
    ),
    "fewer scales": (
        "fp8, blocks",
        {f"{LAYER}.weight_scale_inv": np.ones((1, 1), np.float32)},
        {},
        rf"{LAYER}\.weight_scale_inv must be \(2, 1\), got \(1, 1\)",
    ),
    "scales of groups": (
        "fp8, channels",
        {f"{LAYER}.weight_scale": np.ones((192, 2), np.float32)},
        {},
        rf"{LAYER}\.weight_scale must be .*got \(192, 2\)",
    ),
    "no weight": ("fp8, channels", {f"{LAYER}.weight": None}, {}, f"{LAYER} must .*found no weight"),
    "floats": (
        "fp8, channels",
        {f"{LAYER}.weight": np.ones((192, 128), BF16)},
        {},
        rf"{LAYER}\.weight\.dtype must be F8_E4M3, got BF16",
    ),
    "NaN": (
        "fp8, channels",
        {f"{LAYER}.weight": np.full((192, 128), np.nan, E4M3)},
        {},
        rf"{LAYER}: qweight must be .*got NaN codes",
    ),
    "a scale of zero": (
        "NVFP4, ModelOpt",
        {f"{LAYER}.weight_scale_2": np.zeros((), np.float32)},
        {},
        rf"{LAYER}: weight_scale_2 must be .*got \[0\.0\]",
    ),
    "another algorithm": (
        "NVFP4, ModelOpt",
        {},
        {"quant_algo": "W4A8_AWQ"},
        "quant_algo must be one of NVFP4, FP8, .*got W4A8_AWQ",
    ),
    "zero points of 8 bits": (
        "GPTQ, 8 bits",
        {f"{LAYER}.qzeros": np.full((2, 48), 0x7F7F7F7E, np.int32)},
        {},
        rf"{LAYER}\.qzeros must be 127 everywhere.*got stored values from 126 to 127",
    ),
    "four bits": ("GPTQ, 8 bits", {}, {"bits": 4}, r"qzeros must be .*quantize with four bits instead of 8"),
    "a layer that is not quantized": (
        "fp8, blocks",
        {},
        {"modules_to_not_convert": ["up_proj"]},
        rf"{LAYER}\.weight_scale_inv must be a float weight, got a quantized weight.*modules_to_not_convert",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_contradictions_are_refused(tmp_path: Path, what: str) -> None:
    kind, tensors, section, says = REFUSED[what]
    write(tmp_path / "in", kind)
    path = tmp_path / "in" / "config.json"
    settings = json.loads(path.read_text())
    settings["quantization_config"] |= section
    path.write_text(json.dumps(settings))
    change(tmp_path / "in", tensors)
    with pytest.raises((QuantizationError, WeightFileError), match=says):
        convert_checkpoint(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out" / "config.json").exists()


def test_the_configuration_of_modelopt_in_its_own_file(tmp_path: Path) -> None:
    write(tmp_path / "in", "NVFP4, ModelOpt")
    path = tmp_path / "in" / "config.json"
    settings = json.loads(path.read_text())
    del settings["quantization_config"]
    path.write_text(json.dumps(settings))
    quantization = {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "FP8",
        "group_size": 16,
        "exclude_modules": ["lm_head"],
    }
    (tmp_path / "in" / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    change(tmp_path / "in", {"model.layers.0.self_attn.k_proj.k_scale": np.ones((), np.float32)})
    done = convert_checkpoint(tmp_path / "in", tmp_path / "out")
    assert any("the KV cache is not quantized" in note for note in done.notes)
    assert done.left_out["model.layers.0.self_attn.k_proj.k_scale"] == "scales of a quantized KV cache"
    assert done.not_copied["hf_quant_config.json"] == "describes the original quantization"
