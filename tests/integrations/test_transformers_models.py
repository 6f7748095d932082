"""Models in transformers: converted, quantized by other tools, and quantized while they are loaded, on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.17")

from model_folders import VOCAB, linear_shapes, write_awq, write_compressed, write_float, write_gptq
from safetensors.numpy import load_file, save_file
from transformers.integrations.accelerate import compute_module_sizes

from cudatma.errors import ArgumentError, QuantizationError, WeightFileError
from cudatma.integrations.torch import MarlinLinear
from cudatma.integrations.transformers import CudatmaConfig, load, register
from cudatma.integrations.transformers.quantizer import CudatmaHfQuantizer
from cudatma.quantization import open_checkpoint
from cudatma.quantization.conversion import convert_checkpoint

TOKENS = torch.arange(3, 3 + 18).reshape(2, 9)
WRITERS: dict[str, Any] = {
    "gptq v1": lambda path: write_gptq(path, order=True),
    "gptq v2": lambda path: write_gptq(path, form="v2", order=True, group=64, shards=2),
    "gptqmodel": lambda path: write_gptq(path, form="v1_borrow", group=64),
    "gptq symmetric": lambda path: write_gptq(path, group=-1, sym=True),
    "awq": write_awq,
    "compressed-tensors": write_compressed,
    "compressed-tensors, zeros, act-order": lambda path: write_compressed(path, sym=False, order=True),
}


@pytest.fixture(autouse=True)
def on_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDATMA_BACKEND", "reference")
    register()


def logits(model: Any, tokens: Any = TOKENS) -> Any:
    with torch.no_grad():
        return model(tokens).logits.float()


def dense(folder: Path, weights: dict[str, Any]) -> Any:
    """The model with the weights that the integers stand for, in float32."""
    config = transformers.AutoConfig.from_pretrained(folder)
    config.quantization_config = None
    del config.quantization_config
    model, checkpoint = transformers.LlamaForCausalLM(config).float(), open_checkpoint(folder)
    values = {name: weights[name] if name in weights else checkpoint.read(name).astype(np.float32)
              for name in model.state_dict()}  # fmt: skip
    model.load_state_dict({name: torch.from_numpy(value) for name, value in values.items()})
    return model.eval()


def expect_packed(model: Any) -> None:
    packed = {name for name, module in model.named_modules() if isinstance(module, MarlinLinear)}
    assert packed == set(linear_shapes())
    assert type(model.lm_head) is torch.nn.Linear


@pytest.mark.sweep(3)
@pytest.mark.parametrize("kind", WRITERS)
def test_a_quantized_model_computes_what_its_integers_stand_for(tmp_path: Path, kind: str) -> None:
    weights = WRITERS[kind](tmp_path / "in")
    expected = logits(dense(tmp_path / "in", weights))
    model = load(tmp_path / "in", dtype=torch.float16)
    expect_packed(model)
    assert (logits(model) - expected).abs().max() < 1e-2

    convert_checkpoint(tmp_path / "in", tmp_path / "converted", shard_bytes=60_000, dtype="float16")
    converted = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "converted")
    expect_packed(converted)
    assert torch.equal(logits(converted), logits(model))

    model.save_pretrained(tmp_path / "saved", max_shard_size="80KB")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    expect_packed(again)
    assert torch.equal(logits(again), logits(model))
    facts = [json.loads((tmp_path / name / "config.json").read_text())["quantization_config"]
             for name in ("converted", "saved")]  # fmt: skip
    assert {**facts[0], "clip_search": False} == facts[1]


def test_a_float_model_is_quantized_while_it_is_loaded(tmp_path: Path) -> None:
    weights = write_float(tmp_path / "in", "bfloat16", shards=2)
    config = CudatmaConfig(group_size=32, symmetric=False, modules_to_not_convert=["v_proj", "model.layers.1.mlp"])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "in", quantization_config=config, dtype=torch.float16
    )
    packed = {name: module for name, module in model.named_modules() if isinstance(module, MarlinLinear)}
    left = {name for name in linear_shapes() if name.endswith("v_proj") or ".1.mlp." in name}
    assert set(packed) == set(linear_shapes()) - left
    assert {name for name, _ in model.named_parameters()} == {
        f"{name}.weight" for name in (*left, "lm_head", "model.embed_tokens", "model.norm")
    } | {name for name, _ in model.named_parameters() if "layernorm" in name}
    for name, layer in packed.items():
        weights[f"{name}.weight"] = layer.dequantize(dtype=torch.float32).numpy().copy()
    assert (logits(model) - logits(dense(tmp_path / "in", weights))).abs().max() < 1e-2
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")), logits(model))


@pytest.mark.parametrize("backend", ["cuda", "reference"])
def test_weights_on_the_cpu_are_quantized_on_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """With a pretended GPU: what moves a weight there is recorded, and the weight stays."""
    write_float(tmp_path / "in")
    moved: list[Any] = []
    monkeypatch.setenv("CUDATMA_BACKEND", backend)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    to = torch.Tensor.to

    def recorded(tensor: Any, *where: Any, **options: Any) -> Any:
        if where and isinstance(where[0], torch.device) and where[0].type == "cuda":
            moved.append((tuple(tensor.shape), where[0].index))
            return tensor
        return to(tensor, *where, **options)

    monkeypatch.setattr(torch.Tensor, "to", recorded)
    options = {"quantization_config": CudatmaConfig(group_size=64)}
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "in", **options)
    expect_packed(model)
    assert all(tensor.device.type == "cpu" for tensor in model.state_dict().values())
    assert sorted(moved) == sorted((shape[::-1], 3) for shape in linear_shapes().values() if backend == "cuda")


def test_a_device_map_counts_the_packed_weights(tmp_path: Path) -> None:
    write_float(tmp_path / "in")
    options = {"quantization_config": CudatmaConfig(group_size=64)}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "in", **options)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "in")
    with torch.device("meta"):
        planned = transformers.LlamaForCausalLM._from_config(config, dtype=torch.float16)
    quantizer = CudatmaHfQuantizer(CudatmaConfig(group_size=64), pre_quantized=False)
    quantizer.preprocess_model(planned)
    sizes, _ = compute_module_sizes(planned, quantizer)
    assert sizes[""] == sum(tensor.nbytes for tensor in (*loaded.parameters(), *loaded.buffers()))


def test_tied_embeddings_and_biases(tmp_path: Path) -> None:
    config = transformers.Qwen2Config(
        hidden_size=128, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1,
        vocab_size=VOCAB, tie_word_embeddings=True,
    )  # fmt: skip
    made = transformers.Qwen2ForCausalLM(config).to(torch.float16)
    torch.nn.init.normal_(made.model.layers[0].self_attn.q_proj.bias)
    made.save_pretrained(tmp_path / "in")
    convert_checkpoint(tmp_path / "in", tmp_path / "converted", quantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "converted")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "in", quantization_config=CudatmaConfig())
    assert torch.equal(model.model.layers[0].self_attn.q_proj.bias, made.model.layers[0].self_attn.q_proj.bias)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(logits(model), logits(loaded))


def test_the_base_model_of_a_converted_folder(tmp_path: Path) -> None:
    write_awq(tmp_path / "in")
    convert_checkpoint(tmp_path / "in", tmp_path / "out")
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    base = transformers.AutoModel.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(base(TOKENS).last_hidden_state, whole.model(TOKENS).last_hidden_state)


def test_layers_that_transformers_renames(tmp_path: Path) -> None:
    """Files of models for text and images keep the names of former classes."""
    vision = transformers.SiglipVisionConfig(
        hidden_size=128, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, image_size=28, patch_size=14
    )
    text = transformers.LlamaConfig(
        hidden_size=128, intermediate_size=128, num_attention_heads=4, num_hidden_layers=1, vocab_size=VOCAB
    )
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=VOCAB - 1)
    transformers.LlavaForConditionalGeneration(config).half().save_pretrained(tmp_path / "in")
    auto = transformers.AutoModelForImageTextToText
    loaded = auto.from_pretrained(tmp_path / "in", quantization_config=CudatmaConfig())
    done = convert_checkpoint(tmp_path / "in", tmp_path / "converted", quantize=True)
    model = auto.from_pretrained(tmp_path / "converted")
    packed = {name for name, module in model.named_modules() if isinstance(module, MarlinLinear)}
    assert packed == {name for name, module in loaded.named_modules() if isinstance(module, MarlinLinear)}
    assert len(packed) == len(done.layers) > 0
    assert packed.isdisjoint(layer.name for layer in done.layers)
    model.save_pretrained(tmp_path / "saved")
    again = auto.from_pretrained(tmp_path / "saved")
    for other in (model, again):
        for name in packed:
            assert torch.equal(other.get_submodule(name).qweight, loaded.get_submodule(name).qweight)


def test_a_head_that_the_checkpoint_quantized(tmp_path: Path) -> None:
    weights = write_gptq(tmp_path / "in", group=64)
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    del tensors["lm_head.weight"]
    donor = "model.layers.0.mlp.gate_proj"  # 128 x 192
    cut = {"qweight": VOCAB, "qzeros": VOCAB // 8, "scales": VOCAB, "g_idx": None}
    tensors |= {f"lm_head.{part}": tensors[f"{donor}.{part}"][..., :size].copy() for part, size in cut.items()}
    save_file(tensors, tmp_path / "in" / "model.safetensors", metadata={"format": "pt"})
    weights["lm_head.weight"] = weights[f"{donor}.weight"][:VOCAB].copy()
    convert_checkpoint(tmp_path / "in", tmp_path / "out")
    expected = logits(dense(tmp_path / "in", weights))
    converted = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for model in (load(tmp_path / "in"), converted):
        assert isinstance(model.lm_head, MarlinLinear)
        assert (logits(model) - expected).abs().max() < 1e-2
    converted.save_pretrained(tmp_path / "saved")


@pytest.mark.slow
def test_it_compiles_as_one_graph(tmp_path: Path) -> None:
    weights = write_gptq(tmp_path / "in", order=True)
    model = load(tmp_path / "in", attn_implementation="cudatma")
    expected = logits(dense(tmp_path / "in", weights))
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    assert (logits(compiled) - expected).abs().max() < 1e-2
    longer = torch.arange(3, 3 + 26).reshape(2, 13)
    assert (logits(compiled, longer) - logits(dense(tmp_path / "in", weights), longer)).abs().max() < 1e-2


def test_generate_gives_what_the_dense_model_gives(tmp_path: Path) -> None:
    weights = write_compressed(tmp_path / "in", dtype="float16")
    wanted = dense(tmp_path / "in", weights).generate(TOKENS, max_new_tokens=8, do_sample=False)
    for attention in ("sdpa", "cudatma"):
        model = load(tmp_path / "in", attn_implementation=attention)
        assert torch.equal(model.generate(TOKENS, max_new_tokens=8, do_sample=False), wanted)


# ---- what is refused


def test_a_layer_that_cannot_be_packed_ends_the_load(tmp_path: Path) -> None:
    write_gptq(tmp_path / "in", order=True)
    path, name = tmp_path / "in" / "model.safetensors", "model.layers.0.mlp.up_proj"
    tensors = load_file(path)
    g_idx = tensors.pop(f"{name}.g_idx")
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(WeightFileError, match=f"{name}: got no g_idx"):
        load(tmp_path / "in")
    tensors[f"{name}.g_idx"] = np.zeros_like(g_idx)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(RuntimeError, match="conver"):
        load(tmp_path / "in")


@pytest.mark.parametrize("model", ["./missing", "~/missing", "/a/b", "models/of/mine", Path("missing")])
def test_a_folder_that_does_not_exist_is_not_asked_of_the_hub(model: Any) -> None:
    with pytest.raises(ArgumentError, match="a folder that exists"):
        load(model)


def test_other_methods_and_wrong_configurations_are_refused(tmp_path: Path) -> None:
    write_gptq(tmp_path / "in")
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    for changed, error, says in (
        ({"bits": 8}, QuantizationError, "bits"),
        ({"quant_method": "hqq"}, ArgumentError, "hqq"),
    ):
        changed = {**config, "quantization_config": {**config["quantization_config"], **changed}}
        (tmp_path / "in" / "config.json").write_text(json.dumps(changed))
        with pytest.raises(error, match=says):
            load(tmp_path / "in")
    for arguments in ({"group_size": 48}, {"symmetric": 1}, {"bits": 8}, {"layout_version": 99}, {"layers": {"x": 3}}):
        with pytest.raises((ValueError, TypeError), match=next(iter(arguments))):
            CudatmaConfig(**arguments)


def test_a_layer_that_the_model_does_not_have_is_named(tmp_path: Path) -> None:
    write_awq(tmp_path / "in")
    convert_checkpoint(tmp_path / "in", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config["quantization_config"]["layers"]["model.layers.7.mlp.up_proj"] = {}
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightFileError, match=r"model\.layers\.7\.mlp\.up_proj: got no nn\.Linear"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_weights_that_are_missing_are_named(tmp_path: Path) -> None:
    write_awq(tmp_path / "in")
    convert_checkpoint(tmp_path / "in", tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.scales"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(WeightFileError, match=r"model\.layers\.1\.mlp\.up_proj"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
