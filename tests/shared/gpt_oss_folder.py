"""A folder of a tiny gpt-oss with experts in MXFP4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.numpy import load_file, save_file

SIZES = {
    "hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32,
    "num_hidden_layers": 2, "vocab_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip


def write_float_gpt_oss(folder: Path) -> None:
    """Write a float16 model with random weights and biases."""
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**SIZES))
    with torch.no_grad():
        for parameter in model.parameters():  # transformers initializes biases with zeros
            parameter.normal_(0, 0.1)
    model.half().save_pretrained(folder)


def write_gpt_oss(folder: Path) -> Any:
    """Write a model with experts in MXFP4, and return the float32 model with values that transformers decodes."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    write_float_gpt_oss(folder)
    options = {"dtype": torch.float32, "experts_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    path, generator = folder / "model.safetensors", torch.Generator().manual_seed(0)
    tensors = load_file(path)
    for name, parameter in model.named_parameters():
        if name.endswith("_proj") and ".experts." in name:
            experts, k, n = parameter.shape
            blocks = torch.randint(0, 256, (experts, n, k // 32, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(121, 126, (experts, n, k // 32), dtype=torch.uint8, generator=generator)
            parameter.data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            del tensors[name]
            tensors |= {f"{name}_blocks": blocks.numpy(), f"{name}_scales": scales.numpy()}
        if name.endswith("gate_up_proj_bias"):
            tensors[name][:, :6] *= 80  # beyond the limits of gate and up
            parameter.data = torch.from_numpy(tensors[name]).float()
    save_file(tensors, path, metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    section = {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    (folder / "config.json").write_text(json.dumps({**settings, "quantization_config": section}))
    return model
