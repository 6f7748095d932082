"""Hugging Face folders of tiny Llamas, in float or quantized in the formats of other tools.

This module packs integers with plain loops over nibbles instead of cudatma's functions. Each writer returns the weights
that its integers represent, so that tests can compare them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

HIDDEN, FFN, HEADS, KV_HEADS, VOCAB, BLOCKS = 128, 192, 4, 2, 96, 2
TYPES: dict[str, Any] = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
Tensors = dict[str, NDArray[Any]]


def linear_shapes() -> dict[str, tuple[int, int]]:
    """Return the (K, N) of each layer."""
    kv = HIDDEN * KV_HEADS // HEADS
    inside = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (HIDDEN, kv),
        "self_attn.v_proj": (HIDDEN, kv),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (HIDDEN, FFN),
        "mlp.up_proj": (HIDDEN, FFN),
        "mlp.down_proj": (FFN, HIDDEN),
    }
    return {f"model.layers.{b}.{name}": shape for b in range(BLOCKS) for name, shape in inside.items()}


def config(dtype: str = "float16", quantization: dict[str, Any] | None = None) -> dict[str, Any]:
    found = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": BLOCKS,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": dtype,
    }
    return found if quantization is None else {**found, "quantization_config": quantization}


def other_tensors(dtype: str, seed: int) -> Tensors:
    """Return the embedding, head and norms."""
    rng = np.random.default_rng(seed)
    kind = TYPES[dtype]
    norms = ["model.norm"] + [
        f"model.layers.{b}.{n}" for b in range(BLOCKS) for n in ("input_layernorm", "post_attention_layernorm")
    ]
    return {
        "model.embed_tokens.weight": rng.standard_normal((VOCAB, HIDDEN)).astype(kind),
        "lm_head.weight": (rng.standard_normal((VOCAB, HIDDEN)) / (2 * HIDDEN**0.5)).astype(kind),
        **{f"{name}.weight": (1 + 0.1 * rng.standard_normal(HIDDEN)).astype(kind) for name in norms},
    }


def write_folder(folder: Path, tensors: Tensors, config_json: dict[str, Any], shards: int = 1) -> None:
    """Write the weights to one or more files, and add the configuration and the other files of a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    names = list(tensors)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        files = {name: f"model-{i * shards // len(names) + 1:05}-of-{shards:05}.safetensors"
                 for i, name in enumerate(names)}  # fmt: skip
        for file in set(files.values()):
            part = {name: tensors[name] for name in names if files[name] == file}
            save_file(part, folder / file, metadata={"format": "pt"})
        index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": files}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config_json))
    (folder / "generation_config.json").write_text(json.dumps({"max_new_tokens": 4}))


def write_float(folder: Path, dtype: str = "float16", *, shards: int = 1, seed: int = 0) -> Tensors:
    """Write a float model, and return the weights (N, K) of its linear layers in float32."""
    rng = np.random.default_rng(seed)
    weights = {
        f"{layer}.weight": (rng.standard_normal((n, k)) / k**0.5).astype(TYPES[dtype])
        for layer, (k, n) in linear_shapes().items()
    }
    write_folder(folder, {**weights, **other_tensors(dtype, seed + 1)}, config(dtype), shards)
    return {name: weight.astype(np.float32) for name, weight in weights.items()}


class Quantized:
    """Random integers q (K, N), scales and zero points (G, N), and the group of each row."""

    def __init__(self, rng: np.random.Generator, k: int, n: int, group: int, sym: bool, order: bool, dtype: str):
        size = k if group == -1 else group
        groups = -(-k // size)
        self.q = rng.integers(0, 16, (k, n), dtype=np.uint8)
        self.zeros = np.full((groups, n), 8, np.uint8) if sym else rng.integers(1, 16, (groups, n), dtype=np.uint8)
        self.scales = ((0.5 + rng.random((groups, n))) * 0.2 / k**0.5).astype(TYPES[dtype])
        self.index = (np.arange(k) // size).astype(np.int32)
        if order:
            rng.shuffle(self.index)

    def weight(self) -> NDArray[Any]:
        """The weight (N, K) in float32."""
        level = self.q.astype(np.float32) - self.zeros[self.index].astype(np.float32)
        return np.ascontiguousarray((level * self.scales[self.index].astype(np.float32)).T)


def words(values: NDArray[Any], order: tuple[int, ...] = tuple(range(8))) -> NDArray[np.int32]:
    """Pack (R, 8 C) into int32 (R, C). Column 8 c + order[i] is in nibble i."""
    rows, columns = values.shape
    out = np.zeros((rows, columns // 8), np.uint32)
    for nibble, column in enumerate(order):
        out |= values[:, column::8].astype(np.uint32) << np.uint32(4 * nibble)
    return out.view(np.int32)


def _write(
    folder: Path,
    section: dict[str, Any],
    tensors_of: Callable[[Quantized], Tensors],
    *,
    group: int,
    sym: bool,
    order: bool,
    dtype: str,
    shards: int,
    seed: int,
) -> Tensors:
    rng = np.random.default_rng(seed)
    tensors: Tensors = {}
    weights: Tensors = {}
    for layer, (k, n) in linear_shapes().items():
        made = Quantized(rng, k, n, group, sym, order, dtype)
        tensors |= {f"{layer}.{name}": np.ascontiguousarray(array) for name, array in tensors_of(made).items()}
        weights[f"{layer}.weight"] = made.weight()
    write_folder(folder, {**tensors, **other_tensors(dtype, seed + 1)}, config(dtype, section), shards)
    return weights


def write_gptq(
    folder: Path,
    *,
    form: str = "v1",
    group: int = 32,
    sym: bool = False,
    order: bool = False,
    dtype: str = "float16",
    shards: int = 1,
    seed: int = 0,
) -> Tensors:
    """Write a GPTQ model with zero points in the form "v1", "v2" or "v1_borrow" (GPTQModel)."""
    section: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": order, "sym": sym}
    section["checkpoint_format"] = "gptq_v2" if form == "v2" else "gptq"
    if form == "v1_borrow":
        section["meta"] = {"quantizer": ["gptqmodel:5.6.0"]}
    tensors_of = partial(gptq_tensors, form=form)
    return _write(folder, section, tensors_of, group=group, sym=sym, order=order, dtype=dtype, shards=shards, seed=seed)


def gptq_tensors(made: Quantized, form: str = "v1") -> Tensors:
    """Return the tensors of a GPTQ layer, keyed by their names without the layer's name."""
    plain = words(made.zeros).view(np.uint32)
    stored = {"v1": words((made.zeros - 1) & 15), "v2": plain, "v1_borrow": plain - np.uint32(0x11111111)}[form]
    return {"qweight": words(made.q.T).T, "qzeros": stored.view(np.int32), "scales": made.scales, "g_idx": made.index}


def quantize_layers(
    folder: Path, shapes: dict[str, tuple[int, int]], *, form: str = "gptq", sym: bool = False, **config_json: Any
) -> Tensors:
    """Quantize the layers with these (K, N) in a float folder with GPTQ, AWQ or compressed-tensors.

    Return the weights that the quantized layers represent.
    """
    path, rng = folder / "model.safetensors", np.random.default_rng(0)
    tensors_of, section = {
        "gptq": (gptq_tensors, {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": sym}),
        "awq": (
            awq_tensors,
            {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        ),
        "compressed": (partial(compressed_tensors, sym=sym), compressed_section(32, sym)),
    }[form]
    tensors, weights = load_file(path), {}
    for layer, (k, n) in shapes.items():
        made = Quantized(rng, k, n, 32, sym, False, "float16")
        tensors.pop(f"{layer}.weight", None)
        tensors |= {f"{layer}.{name}": np.ascontiguousarray(array) for name, array in tensors_of(made).items()}
        weights[layer] = made.weight()
    written = json.loads((folder / "config.json").read_text())
    write_folder(folder, tensors, {**written, "quantization_config": section, **config_json})
    return weights


def awq_tensors(made: Quantized) -> Tensors:
    """Return the tensors of an AWQ layer, keyed by their names without the layer's name."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {"qweight": words(made.q, order), "qzeros": words(made.zeros, order), "scales": made.scales}


def write_awq(folder: Path, *, group: int = 64, dtype: str = "float16", shards: int = 1, seed: int = 0) -> Tensors:
    """Write an asymmetric AWQ model."""
    section = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return _write(
        folder, section, awq_tensors, group=group, sym=False, order=False, dtype=dtype, shards=shards, seed=seed
    )


def write_auto_round(folder: Path, *, packing: str, sym: bool, seed: int = 0) -> Tensors:
    """Write a model in AutoRound's own format (quant_method auto-round), with the tensors that ``packing`` names."""
    form = "v2" if packing == "auto_round" else "v1"
    is_awq = "awq" in packing
    weights = write_awq(folder, seed=seed) if is_awq else write_gptq(folder, form=form, group=64, sym=sym, seed=seed)
    section = {"quant_method": "auto-round", "packing_format": packing, "bits": 4, "group_size": 64, "sym": sym}
    (folder / "config.json").write_text(json.dumps(config("float16", section | {"data_type": "int", "iters": 0})))
    return weights


def marlin_tensors(q: NDArray[Any], scales: NDArray[Any]) -> Tensors:
    """Return B and s of the original Marlin for integers q (K, N), in the order in which the kernel reads them."""
    k, n = np.indices(q.shape)
    lane = 4 * (n % 8) + k % 8 // 2
    column = n // 64 * 128 + 4 * lane + n % 64 // 16
    nibble = k % 16 // 8 + 2 * (n % 16 // 8) + 4 * (k % 2)
    b = np.zeros((q.shape[0] // 16, 2 * q.shape[1]), np.uint32)
    np.bitwise_or.at(b, (k // 16, column), q.astype(np.uint32) << (4 * nibble).astype(np.uint32))
    block, inside = np.divmod(np.arange(q.shape[1]), 64 if len(scales) > 1 else 32)
    u, rest = np.divmod(inside, 8)
    place = 64 * block + 8 * rest + u if len(scales) > 1 else 32 * block + 8 * (rest // 2) + 2 * u + rest % 2
    s = np.empty_like(scales)
    s[:, place] = scales
    return {"B": b.view(np.int32), "s": s}


def write_marlin(folder: Path, *, group: int = 64, seed: int = 0) -> Tensors:
    """Write a symmetric model in the original Marlin's format, with the kernel's workspace, which some tools save."""

    def tensors_of(made: Quantized) -> Tensors:
        return {**marlin_tensors(made.q, made.scales), "workspace": np.zeros(16, np.int32)}

    section = {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": True, "checkpoint_format": "marlin"}
    return _write(folder, section, tensors_of, group=group, sym=True, order=False, dtype="float16", shards=1, seed=seed)


def write_compressed(
    folder: Path,
    *,
    group: int = 64,
    sym: bool = True,
    order: bool = False,
    unpacked: bool = False,
    dtype: str = "bfloat16",
    shards: int = 1,
    seed: int = 0,
) -> Tensors:
    """Write a compressed-tensors model (pack-quantized). With ``unpacked``, zero points have one byte, as formerly."""
    tensors_of = partial(compressed_tensors, sym=sym, order=order, unpacked=unpacked)
    section = compressed_section(group, sym, order)
    return _write(folder, section, tensors_of, group=group, sym=sym, order=order, dtype=dtype, shards=shards, seed=seed)


def compressed_tensors(made: Quantized, sym: bool, order: bool = False, unpacked: bool = False) -> Tensors:
    """Return the tensors of a compressed-tensors layer, keyed by their names without the layer's name."""
    k, n = made.q.shape
    found = {
        "weight_packed": words(made.q.T),
        "weight_scale": made.scales.T,
        "weight_shape": np.array([n, k], np.int64),
    }
    if not sym:
        found["weight_zero_point"] = (made.zeros.T.astype(np.int8) - 8) if unpacked else words(made.zeros).T
    if order:
        found["weight_g_idx"] = made.index
    return found


def compressed_section(group: int, sym: bool, order: bool = False) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "symmetric": sym, "strategy": "channel" if group == -1 else "group"}
    weights["group_size"] = None if group == -1 else group
    weights["actorder"] = "group" if order else None
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": ["lm_head"],
    }


EXPERTS, INTERMEDIATE = 4, 64
#: Name of the experts' module in a block, names of gate, up and down, and keys of config.json.
MOE: dict[str, tuple[str, tuple[str, str, str], dict[str, Any]]] = {
    "qwen3_moe": (
        "mlp",
        ("gate_proj", "up_proj", "down_proj"),
        {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": EXPERTS, "moe_intermediate_size": INTERMEDIATE,
         "num_experts_per_tok": 2, "norm_topk_prob": True, "head_dim": HIDDEN // HEADS},
    ),
    "mixtral": (
        "block_sparse_moe",
        ("w1", "w3", "w2"),
        {"architectures": ["MixtralForCausalLM"], "num_local_experts": EXPERTS, "intermediate_size": INTERMEDIATE},
    ),
}  # fmt: skip


def moe_shapes(model: str) -> dict[str, tuple[int, int]]:
    """Return the (K, N) of each linear layer and of each matrix of an expert."""
    block, (gate, up, down), _ = MOE[model]
    attention = {name: shape for name, shape in linear_shapes().items() if ".mlp." not in name}
    sizes = {gate: (HIDDEN, INTERMEDIATE), up: (HIDDEN, INTERMEDIATE), down: (INTERMEDIATE, HIDDEN)}
    return attention | {
        f"model.layers.{b}.{block}.experts.{e}.{name}": shape
        for b in range(BLOCKS) for e in range(EXPERTS) for name, shape in sizes.items()
    }  # fmt: skip


def moe_tensors(model: str) -> Tensors:
    """Return the routers and the norms of queries and keys."""
    rng, tensors = np.random.default_rng(3), {}
    for b in range(BLOCKS):
        router = rng.standard_normal((EXPERTS, HIDDEN)).astype(np.float16)
        tensors[f"model.layers.{b}.{MOE[model][0]}.gate.weight"] = router
        if model == "qwen3_moe":
            for name in ("q_norm", "k_norm"):
                tensors[f"model.layers.{b}.self_attn.{name}.weight"] = np.ones(HIDDEN // HEADS, np.float16)
    return tensors


def write_moe(folder: Path, model: str = "qwen3_moe", form: str = "float", *, sym: bool = False) -> Tensors:
    """Write a model with experts in float, in float with ``stacked`` experts, or in a format of quantize_layers().

    Return the float32 weights (N, K) of the linear layers and (experts, K, N) of the experts, by their names after a
    conversion.
    """
    block, naming, settings = MOE[model]
    rng = np.random.default_rng(0)
    shapes = moe_shapes(model)
    matrices = {layer: (rng.standard_normal((n, k)) / k**0.5).astype(np.float16) for layer, (k, n) in shapes.items()}
    tensors = {f"{layer}.weight": weight for layer, weight in matrices.items()} | other_tensors("float16", 1)
    tensors |= moe_tensors(model)
    write_folder(folder, tensors, {**config(), "model_type": model, **settings})
    if form in ("float", "stacked"):
        weights = {layer: weight.astype(np.float32) for layer, weight in matrices.items()}
    else:
        weights = quantize_layers(folder, shapes, form=form, sym=sym)
    for b in range(BLOCKS):
        module = f"model.layers.{b}.{block}.experts"
        gate, up, down = (np.stack([weights.pop(f"{module}.{e}.{name}").T for e in range(EXPERTS)]) for name in naming)
        weights |= {f"{module}.gate_up_proj": np.concatenate([gate, up], axis=2), f"{module}.down_proj": down}
    if form == "stacked":
        path = folder / "model.safetensors"
        kept = {name: tensor for name, tensor in load_file(path).items() if ".experts." not in name}
        stacked = {name: weight.transpose(0, 2, 1) for name, weight in weights.items() if ".experts." in name}
        kept |= {name: np.ascontiguousarray(weight, np.float16) for name, weight in stacked.items()}
        save_file(kept, path, metadata={"format": "pt"})
    return weights
