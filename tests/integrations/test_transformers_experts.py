"""Mixtures of experts in transformers: converted, quantized by other tools, and quantized while they are loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.17")

from float_folders import KINDS, write
from gpt_oss_folder import write_float_gpt_oss, write_gpt_oss
from model_folders import BLOCKS, HIDDEN, MOE, VOCAB, quantize_layers, write_moe
from safetensors.numpy import load_file, save_file

from cudatma.errors import WeightFileError
from cudatma.integrations.torch import ExpertWeights, MarlinLinear
from cudatma.integrations.transformers import CudatmaConfig, load, register
from cudatma.quantization import open_checkpoint
from cudatma.quantization.conversion import convert_checkpoint

TOKENS = torch.arange(3, 3 + 18).reshape(2, 9)
SIZES = {
    "hidden_size": HIDDEN, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4,
    "num_hidden_layers": 2, "vocab_size": VOCAB,
}  # fmt: skip
ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip


@pytest.fixture(autouse=True)
def on_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDATMA_BACKEND", "reference")
    register()


def logits(model: Any, tokens: Any = TOKENS) -> Any:
    with torch.no_grad():
        return model(tokens).logits.float()


def packed_experts(model: Any) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, ExpertWeights)}


def from_pretrained(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


def dense(folder: Path, weights: dict[str, Any]) -> Any:
    """Return the float32 model with these weights, which transformers computes without cudatma."""
    config = transformers.AutoConfig.from_pretrained(folder)
    config.quantization_config = None
    del config.quantization_config
    model = getattr(transformers, config.architectures[0])._from_config(config, experts_implementation="eager").float()
    read = open_checkpoint(folder).read
    values = {}
    for name in model.state_dict():
        stored = name if config.model_type != "mixtral" else name.replace(".mlp.", ".block_sparse_moe.")
        layer = stored.removesuffix(".weight")
        if ".experts." in stored:
            values[name] = np.ascontiguousarray(weights[stored].transpose(0, 2, 1))
        else:
            values[name] = weights[layer] if layer in weights else read(stored).astype(np.float32)
    model.load_state_dict({name: torch.from_numpy(value) for name, value in values.items()})
    return model.eval()


@pytest.mark.sweep(3)
@pytest.mark.parametrize("form", ["gptq", "awq", "compressed"])
@pytest.mark.parametrize("model", MOE)
def test_quantized_experts_compute_what_their_integers_represent(tmp_path: Path, model: str, form: str) -> None:
    weights = write_moe(tmp_path / "in", model, form, sym=form == "compressed")
    expected = logits(dense(tmp_path / "in", weights))
    convert_checkpoint(tmp_path / "in", tmp_path / "converted", dtype="float16")
    converted = from_pretrained(tmp_path / "converted")
    assert len(packed_experts(converted)) == 2 * BLOCKS
    assert converted.config._experts_implementation == "cudatma"
    assert type(converted.model.layers[0].mlp.gate).__name__.endswith("Router")
    assert (logits(converted) - expected).abs().max() < 2e-2

    loaded = load(tmp_path / "in", dtype=torch.float16)
    assert torch.equal(logits(loaded), logits(converted))
    loaded.save_pretrained(tmp_path / "saved", max_shard_size="80KB")
    assert torch.equal(logits(from_pretrained(tmp_path / "saved")), logits(converted))


@pytest.mark.sweep(4)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "act-order" not in kind])
@pytest.mark.parametrize("model_type", MOE)
def test_experts_of_other_formats(tmp_path: Path, model_type: str, kind: str) -> None:
    values = write(tmp_path / "in", kind, model_type)
    convert_checkpoint(tmp_path / "in", tmp_path / "out")
    model = from_pretrained(tmp_path / "out")
    block, naming, _ = MOE[model_type]
    for b in range(BLOCKS):
        module = f"model.layers.{b}.{block}.experts"
        gate, up, down = (np.stack([values.pop(f"{module}.{e}.{name}").T for e in range(4)]) for name in naming)
        values |= {f"{module}.gate_up_proj": np.concatenate([gate, up], axis=2), f"{module}.down_proj": down}
    expected = logits(dense(tmp_path / "in", values))
    assert (logits(model) - expected).abs().mean() < 0.05 * expected.abs().mean()  # bf16
    assert torch.equal(logits(load(tmp_path / "in", dtype=torch.bfloat16)), logits(model))


@pytest.mark.parametrize(("form", "group_size"), [("fp8", 128), ("nvfp4", 16), ("mxfp4", 32), ("int8", 32)])
def test_a_float_model_is_quantized_to_other_formats(tmp_path: Path, form: str, group_size: int) -> None:
    write_moe(tmp_path / "in")
    config = CudatmaConfig(group_size=group_size, format=form)
    model = from_pretrained(tmp_path / "in", quantization_config=config, dtype=torch.float16)
    exact = logits(from_pretrained(tmp_path / "in", dtype=torch.float32))
    off = (logits(model) - exact).abs().mean() / exact.abs().mean()
    assert 0 < off < {"fp8": 0.1, "nvfp4": 0.3, "mxfp4": 0.4, "int8": 0.05}[form]
    model.save_pretrained(tmp_path / "out")
    assert torch.equal(logits(from_pretrained(tmp_path / "out")), logits(model))
    options = {"quantize": True, "format": form, "group_size": group_size}
    convert_checkpoint(tmp_path / "in", tmp_path / "converted", **options)
    assert torch.equal(logits(from_pretrained(tmp_path / "converted")), logits(model))


def write_class(folder: Path, model: str) -> None:
    """Write a float model of transformers with experts that have GLM's or DeepSeek's names."""
    torch.manual_seed(0)
    if model == "glm4_moe":
        made = transformers.Glm4MoeForCausalLM(transformers.Glm4MoeConfig(**SIZES, **ROUTED, head_dim=32))
    else:
        ranks = {"kv_lora_rank": 64, "q_lora_rank": 64, "qk_rope_head_dim": 32, "v_head_dim": 32,
                 "qk_nope_head_dim": 32}  # fmt: skip
        made = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**SIZES, **ROUTED, **ranks))
    made.half().save_pretrained(folder)


def test_gpt_oss_in_mxfp4(tmp_path: Path) -> None:
    expected = logits(write_gpt_oss(tmp_path / "in"))
    done = convert_checkpoint(tmp_path / "in", tmp_path / "converted")
    assert {(layer.format, layer.max_error) for layer in done.layers} == {("mxfp4", 0.0)}
    converted = from_pretrained(tmp_path / "converted")
    assert len(packed_experts(converted)) == 4
    assert (logits(converted) - expected).abs().max() < 2e-2 * expected.abs().max()

    loaded = load(tmp_path / "in", dtype=torch.float16)
    assert torch.equal(logits(loaded), logits(converted))
    assert not [name for name, _ in loaded.named_parameters() if name.endswith("proj_bias")]
    loaded.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(from_pretrained(tmp_path / "saved")), logits(converted))


def test_gpt_oss_is_quantized(tmp_path: Path) -> None:
    write_float_gpt_oss(tmp_path / "in")
    exact = logits(from_pretrained(tmp_path / "in", dtype=torch.float32, experts_implementation="eager"))
    convert_checkpoint(tmp_path / "in", tmp_path / "converted", quantize=True, group_size=32)
    converted = from_pretrained(tmp_path / "converted")
    assert 0 < (logits(converted) - exact).abs().mean() < 0.2 * exact.abs().mean()
    config = CudatmaConfig(group_size=32)
    loaded = from_pretrained(tmp_path / "in", quantization_config=config, dtype=torch.float16)
    assert torch.equal(logits(loaded), logits(converted))
    compiled = torch.compile(loaded.model.layers[0].mlp.experts, fullgraph=True, backend="aot_eager")
    x, ids = torch.randn(3, HIDDEN, dtype=torch.float16), torch.tensor([[0, 2], [1, 3], [3, 0]])
    with torch.no_grad():
        call = x, ids, torch.full((3, 2), 0.5, dtype=torch.float16)
        torch.testing.assert_close(compiled(*call), loaded.model.layers[0].mlp.experts(*call), rtol=0, atol=0)


def test_biases_of_gpt_oss_that_do_not_match_are_refused(tmp_path: Path) -> None:
    write_gpt_oss(tmp_path / "in")
    path, name = tmp_path / "in" / "model.safetensors", "model.layers.1.mlp.experts.gate_up_proj"
    tensors = load_file(path)
    save_file(tensors | {f"{name}_bias": tensors[f"{name}_bias"][:, 1:]}, path, metadata={"format": "pt"})
    for call in (convert_checkpoint, lambda folder, _: load(folder)):
        with pytest.raises(WeightFileError, match=rf"^{name}_bias must be \(4, 256\) \(one bias"):
            call(tmp_path / "in", tmp_path / "out")
    save_file(tensors, path, metadata={"format": "pt"})
    convert_checkpoint(tmp_path / "in", tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    tensors = load_file(path)
    del tensors[f"{name}.bias"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(WeightFileError, match=rf"^{name}_bias must be .*found no such tensor"):
        from_pretrained(tmp_path / "out")


@pytest.mark.parametrize("model", ["glm4_moe", "deepseek_v3"])
def test_float_experts_are_quantized(tmp_path: Path, model: str) -> None:
    write_class(tmp_path / "in", model)
    done = convert_checkpoint(tmp_path / "in", tmp_path / "converted", quantize=True, group_size=32)
    assert done.skipped["model.layers.1.mlp.gate"] == "an expert or a router"
    converted = from_pretrained(tmp_path / "converted")
    options = {"quantization_config": CudatmaConfig(group_size=32), "dtype": torch.float16}
    loaded = from_pretrained(tmp_path / "in", **options)
    name = "model.layers.1.mlp.experts"
    for each in (converted, loaded):
        assert packed_experts(each) == {f"{name}.gate_up_proj", f"{name}.down_proj"}
        assert isinstance(each.model.layers[1].mlp.shared_experts.up_proj, MarlinLinear)
    assert torch.equal(logits(converted), logits(loaded))
    loaded.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(from_pretrained(tmp_path / "saved")), logits(loaded))
    exact = from_pretrained(tmp_path / "in", dtype=torch.float32)
    assert 0 < (logits(loaded) - logits(exact)).abs().max() < 0.3 * logits(exact).abs().max()


def test_layers_may_keep_float_experts(tmp_path: Path) -> None:
    write_moe(tmp_path / "in")
    convert_checkpoint(tmp_path / "in", tmp_path / "out", quantize=True, group_size=32, exclude=["model.layers.1.*"])
    model = from_pretrained(tmp_path / "out")
    assert packed_experts(model) == {f"model.layers.0.mlp.experts.{name}_proj" for name in ("gate_up", "down")}
    skipped = ["model.layers.1.mlp", "model.layers.1.self_attn"]
    config = CudatmaConfig(group_size=32, modules_to_not_convert=skipped)
    assert torch.equal(logits(from_pretrained(tmp_path / "in", quantization_config=config)), logits(model))


def test_experts_compile_into_one_graph(tmp_path: Path) -> None:
    write_moe(tmp_path / "in")
    options = {"quantization_config": CudatmaConfig(group_size=32), "dtype": torch.float16}
    block = from_pretrained(tmp_path / "in", **options).model.layers[0].mlp
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad():
        for tokens in (3, 7):
            x = torch.randn(1, tokens, HIDDEN, dtype=torch.float16)
            torch.testing.assert_close(compiled(x), block(x), rtol=0, atol=0)


def test_experts_whose_class_has_no_biases_stay_float(tmp_path: Path) -> None:
    write_moe(tmp_path / "in", form="stacked")
    path, name = tmp_path / "in" / "model.safetensors", "model.layers.0.mlp.experts"
    biases = {f"{name}.gate_up_proj_bias": np.ones((4, 128), np.float16)}
    save_file(load_file(path) | biases, path, metadata={"format": "pt"})
    done = convert_checkpoint(tmp_path / "in", tmp_path / "out", quantize=True)
    assert "cannot load the layer quantized" in done.skipped[f"{name}.gate_up_proj"]
    assert f"{name}.gate_up_proj_bias" in " ".join(done.notes)


def test_other_activations_stay_float_or_are_refused(tmp_path: Path) -> None:
    write_moe(tmp_path / "in")
    convert_checkpoint(tmp_path / "in", tmp_path / "out", quantize=True)
    for folder in ("in", "out"):
        path = tmp_path / folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "hidden_act": "gelu"}))
    done = convert_checkpoint(tmp_path / "in", tmp_path / "gelu", quantize=True)
    assert "cannot load the layer quantized" in done.skipped["model.layers.0.mlp.experts.gate_up_proj"]
    with pytest.raises(
        WeightFileError, match=r"experts\.\w+_proj and 3 others must .*got experts with an activation other"
    ):
        from_pretrained(tmp_path / "out")


def test_packed_experts_that_do_not_match_the_model_are_refused(tmp_path: Path) -> None:
    write_moe(tmp_path / "in", form="gptq")
    convert_checkpoint(tmp_path / "in", tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.experts.down_proj.zeros"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(WeightFileError, match=r"experts\.down_proj must .*found no zeros"):
        from_pretrained(tmp_path / "out")
    path = tmp_path / "in" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_experts": 8}))
    for call in (
        lambda: load(tmp_path / "in"),
        lambda: convert_checkpoint(tmp_path / "in", tmp_path / "another"),
    ):
        with pytest.raises(WeightFileError, match=r"\(experts, K, N\) and 5 others must be \(8, .*got \(4, "):
            call()


def test_gptq_layers_of_deepseek(tmp_path: Path) -> None:
    write_class(tmp_path / "in", "deepseek_v3")
    layers = {
        name.removesuffix(".weight"): tensor.shape[::-1]
        for name, tensor in load_file(tmp_path / "in" / "model.safetensors").items()
        if ".mlp." in name and "gate." not in name
    }
    weights = quantize_layers(tmp_path / "in", layers)
    loaded = load(tmp_path / "in")
    convert_checkpoint(tmp_path / "in", tmp_path / "out")
    assert torch.equal(logits(from_pretrained(tmp_path / "out")), logits(loaded))
    shared = loaded.model.layers[1].mlp.shared_experts.down_proj.dequantize(dtype=torch.float32)
    np.testing.assert_array_equal(shared, weights["model.layers.1.mlp.shared_experts.down_proj"])
