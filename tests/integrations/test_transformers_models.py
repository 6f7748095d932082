"""Models in transformers: converted, quantized by other tools, and quantized while they are loaded, on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.17")

from float_folders import KINDS, write
from model_folders import (
    FFN,
    HIDDEN,
    VOCAB,
    linear_shapes,
    quantize_layers,
    write_auto_round,
    write_awq,
    write_compressed,
    write_float,
    write_gptq,
    write_marlin,
)
from safetensors.numpy import load_file, save_file
from transformers.integrations.accelerate import compute_module_sizes

from cudatma.errors import ArgumentError, QuantizationError, WeightFileError
from cudatma.integrations import transformers as integration
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
    "auto-round": lambda path: write_auto_round(path, packing="auto_round", sym=False),
    "marlin": write_marlin,
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
    """Return the float32 model with the dequantized weights."""
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


@pytest.mark.parametrize(
    "options", [{"group_size": 32, "symmetric": False}, {"format": "nvfp4"}, {"format": "fp8", "group_size": -1}]
)
def test_a_float_model_is_quantized_while_it_is_loaded(tmp_path: Path, options: dict[str, Any]) -> None:
    weights = write_float(tmp_path / "in", "bfloat16", shards=2)
    config = CudatmaConfig(**options, modules_to_not_convert=["v_proj", "model.layers.1.mlp"])
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
        assert layer.format == options.get("format", "int4")
    assert (logits(model) - logits(dense(tmp_path / "in", weights))).abs().max() < 1e-2
    model.save_pretrained(tmp_path / "saved")
    section = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    assert section["bits"] == (8 if options.get("format") == "fp8" else 4)
    assert torch.equal(logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")), logits(model))


@pytest.mark.parametrize("backend", ["cuda", "reference"])
def test_weights_on_the_cpu_are_quantized_on_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """The GPU is a fake that records moves of weights without moving them."""
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


@pytest.mark.sweep(4)
@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_other_formats_are_packed(tmp_path: Path, kind: str) -> None:
    write(tmp_path / "in", kind)
    convert_checkpoint(tmp_path / "in", tmp_path / "out")
    loaded = load(tmp_path / "in")
    expect_packed(loaded)
    converted = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(loaded), logits(converted))


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
    write_float(tmp_path / "in")
    quantize_layers(tmp_path / "in", {**linear_shapes(), "lm_head": (HIDDEN, VOCAB)})
    convert_checkpoint(tmp_path / "in", tmp_path / "out")
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    base = transformers.AutoModel.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(base(TOKENS).last_hidden_state, whole.model(TOKENS).last_hidden_state)


@pytest.mark.parametrize("vision_tower", [False, True])
def test_layers_that_transformers_renames(tmp_path: Path, vision_tower: bool) -> None:
    """Files of models for text and images use the names of earlier classes. The vision tower stays float by default."""
    vision = transformers.SiglipVisionConfig(
        hidden_size=128, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, image_size=28, patch_size=14
    )
    text = transformers.LlamaConfig(
        hidden_size=128, intermediate_size=128, num_attention_heads=4, num_hidden_layers=1, vocab_size=VOCAB
    )
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=VOCAB - 1)
    transformers.LlavaForConditionalGeneration(config).half().save_pretrained(tmp_path / "in")
    auto = transformers.AutoModelForImageTextToText
    options = {"quantization_config": CudatmaConfig(vision_tower=vision_tower)}
    loaded = auto.from_pretrained(tmp_path / "in", **options)
    done = convert_checkpoint(tmp_path / "in", tmp_path / "converted", quantize=True, vision_tower=vision_tower)
    assert any("vision" in layer.name for layer in done.layers) == vision_tower
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


def write_trocr(path: Path) -> None:
    """Write a model whose encoder of images is called "encoder", without the pooler that its class adds."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128}
    vision = transformers.ViTConfig(**sizes, image_size=28, patch_size=14)
    text = transformers.BertConfig(**sizes, vocab_size=VOCAB, is_decoder=True, add_cross_attention=True)
    transformers.VisionEncoderDecoderModel(
        encoder=transformers.ViTModel(vision, add_pooling_layer=False), decoder=transformers.BertLMHeadModel(text)
    ).half().save_pretrained(path)


def test_an_encoder_of_images_without_a_name_of_its_own_stays_float(tmp_path: Path) -> None:
    write_trocr(tmp_path / "in")
    done = convert_checkpoint(tmp_path / "in", tmp_path / "converted", quantize=True)
    auto, options = transformers.VisionEncoderDecoderModel, {"quantization_config": CudatmaConfig()}
    loaded = auto.from_pretrained(tmp_path / "in", **options)
    packed = {name for name, module in loaded.named_modules() if isinstance(module, MarlinLinear)}
    assert {layer.name for layer in done.layers} == packed
    assert {name.split(".")[0] for name in packed} == {"decoder"}
    assert any(".crossattention." in name for name in packed)
    auto.from_pretrained(tmp_path / "converted")


def write_tied(path: Path) -> dict[str, Any]:
    """Write a model whose head, tied by config.json, is quantized and has values of its own."""
    write_float(path)
    return quantize_layers(path, {**linear_shapes(), "lm_head": (HIDDEN, VOCAB)}, tie_word_embeddings=True)


def write_gpt2(path: Path, *, quantized: bool = True) -> dict[str, Any]:
    """Write a model of Conv1D, which keeps float weights as (K, N)."""
    sizes = {"n_embd": HIDDEN, "n_layer": 1, "n_head": 4, "vocab_size": VOCAB, "n_positions": 32}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).half().save_pretrained(path)
    block = "transformer.h.0"
    shapes = {
        f"{block}.attn.c_attn": (HIDDEN, 3 * HIDDEN),
        f"{block}.attn.c_proj": (HIDDEN, HIDDEN),
        f"{block}.mlp.c_fc": (HIDDEN, 4 * HIDDEN),
        f"{block}.mlp.c_proj": (4 * HIDDEN, HIDDEN),
    }
    return quantize_layers(path, shapes) if quantized else {}


def write_mtp(path: Path, *, quantized: bool = True) -> dict[str, Any]:
    """Write a model with a block for multi-token prediction, which its class does not load."""
    config = transformers.Qwen3_5TextConfig(
        hidden_size=HIDDEN, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4,
        head_dim=32, vocab_size=VOCAB, layer_types=["full_attention"], tie_word_embeddings=False,
    )  # fmt: skip
    transformers.Qwen3_5ForCausalLM(config).half().save_pretrained(path)
    shapes = {f"mtp.layers.0.mlp.{name}_proj": (HIDDEN, HIDDEN) for name in ("gate", "up", "down")}
    if quantized:
        return quantize_layers(path, {"model.layers.0.mlp.up_proj": (HIDDEN, 128), **shapes})
    tensors = load_file(path / "model.safetensors")
    tensors |= {f"{layer}.weight": np.ones(shape, np.float16) for layer, shape in shapes.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return {}


@pytest.mark.parametrize("write", [write_tied, write_gpt2, write_mtp])
def test_layers_that_need_care_have_their_weights(tmp_path: Path, write: Any) -> None:
    weights = write(tmp_path / "in")
    done = convert_checkpoint(tmp_path / "in", tmp_path / "out")
    assert {layer.name for layer in done.layers} == set(weights)
    assert not done.not_compared
    direct, converted = (
        load(tmp_path / "in", dtype=torch.float16),
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out"),
    )
    direct.save_pretrained(tmp_path / "saved")
    for model in (direct, converted, transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")):
        packed = {name: module for name, module in model.named_modules() if isinstance(module, MarlinLinear)}
        assert packed.keys() == set(weights) - set(done.ignored)
        for name, module in packed.items():
            np.testing.assert_array_equal(module.dequantize(dtype=torch.float32), weights[name])
        assert torch.isfinite(logits(model)).all()
    assert all(name.startswith("mtp.") for name in done.ignored)
    assert set(done.ignored) <= {name.rpartition(".")[0] for name in open_checkpoint(tmp_path / "out").names}


def test_float_layers_that_the_class_does_not_load_stay_float(tmp_path: Path) -> None:
    write_mtp(tmp_path / "in", quantized=False)
    done = convert_checkpoint(tmp_path / "in", tmp_path / "out", quantize=True)
    assert done.skipped["mtp.layers.0.mlp.up_proj"] == "Qwen3_5ForCausalLM does not load the layer"
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_lora_adapters_of_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    write_gptq(tmp_path / "in")
    base = load(tmp_path / "in")
    expected = logits(base)
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=4, init_lora_weights=False)
    model = peft.get_peft_model(base, config)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    x = torch.randn(3, HIDDEN, dtype=torch.float16)
    with torch.no_grad():
        wanted = layer.base_layer(x) + layer.scaling["default"] * layer.lora_B["default"](
            layer.lora_A["default"](x.float())
        )
        assert torch.equal(layer(x), wanted.half())
        with model.disable_adapter():
            assert torch.equal(logits(model), expected)
    model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(load(tmp_path / "in"), tmp_path / "adapter")
    assert torch.equal(logits(again), logits(model))
    with pytest.raises(ArgumentError, match="merge"):
        model.merge_and_unload()
    with pytest.raises(ArgumentError, match="no backward pass"):
        model(TOKENS)
    with pytest.raises(ArgumentError, match="use_dora"):
        peft.get_peft_model(load(tmp_path / "in"), peft.LoraConfig(target_modules=["q_proj"], use_dora=True))


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


def test_a_bound_warms_the_loaded_model_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gptq(tmp_path)
    warmed: list[Any] = []
    monkeypatch.setattr(integration, "warm_up", lambda *arguments: warmed.append(arguments))
    assert [(load(tmp_path, max_m=64), 64)] == warmed
    load(tmp_path)
    assert len(warmed) == 1
    with pytest.raises(ArgumentError, match=r"max_m must be .*got 0"):
        load(tmp_path / "no folder", max_m=0)


def test_a_layer_that_cannot_be_packed_ends_the_load(tmp_path: Path) -> None:
    write_gptq(tmp_path / "in", order=True)
    path, name = tmp_path / "in" / "model.safetensors", "model.layers.0.mlp.up_proj"
    tensors = load_file(path)
    g_idx = tensors.pop(f"{name}.g_idx")
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(WeightFileError, match=f"{name}.g_idx must be a tensor of the layer"):
        load(tmp_path / "in")
    tensors[f"{name}.g_idx"] = np.zeros_like(g_idx)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(QuantizationError, match=f"{name}.g_idx must be .*got groups of unequal size"):
        load(tmp_path / "in")


@pytest.mark.parametrize("model", ["./missing", "~/missing", "/a/b", "models/of/mine", Path("missing")])
def test_a_folder_that_does_not_exist_is_not_asked_of_the_hub(model: Any) -> None:
    with pytest.raises(ArgumentError, match="an existing folder"):
        load(model)


def test_the_configuration_of_a_subfolder_is_read(tmp_path: Path) -> None:
    write_awq(tmp_path / "in")
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 32, "desc_act": True}))
    expect_packed(load(tmp_path, subfolder="in"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda path: (path / "config.json").write_text("[]"), r"config\.json must be .*got list"),
        (lambda path: (path / "config.json").write_text("{", encoding="utf-8-sig"), r"config\.json must be .*BOM"),
        (
            lambda path: (path / "config.json").write_text('{"quantization_config": [4]}'),
            "quantization_config must be an object",
        ),
        (lambda path: (path / "config.json").unlink(), r"config\.json must be .*got .*No such file"),
        (lambda path: (path / "model.safetensors").rename(path / "gptq-4bit.safetensors"), "cudatma convert"),
        (lambda path: (path / "model.safetensors").unlink(), r"found no \.safetensors file"),
        (
            lambda path: (
                (path / "model.safetensors").rename(path / "all.safetensors"),
                (path / "model.safetensors.index.json").write_text(
                    '{"weight_map": {"lm_head.weight": "all.safetensors"}}'
                ),
            ),
            "metadata must be .*found no value",
        ),
        (lambda path: (path / "adapter_config.json").write_text("{}"), "package peft must be installed"),
    ],
)
def test_folders_that_transformers_cannot_load_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, says: str
) -> None:
    monkeypatch.setattr("cudatma.integrations.transformers.find_spec", lambda name: None)
    write_awq(tmp_path / "in")
    change(tmp_path / "in")
    with pytest.raises(WeightFileError, match=says):
        load(tmp_path / "in")


def test_to_dict_keeps_every_stated_value() -> None:
    stated = {"layers": {}, "modules_to_not_convert": []}
    assert CudatmaConfig(**stated).to_dict().items() >= stated.items()
    assert CudatmaConfig().to_dict().keys().isdisjoint((*stated, "vision_tower", "source", "dtype"))


def test_other_methods_and_wrong_configurations_are_refused(tmp_path: Path) -> None:
    write_gptq(tmp_path / "in")
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    for changed, error, says in (
        ({"bits": 8}, QuantizationError, "bits"),
        ({"quant_method": "hqq"}, ArgumentError, "hqq"),
        ({"rotation": "hadamard"}, WeightFileError, "rotation must be .*got hadamard"),
    ):
        changed = {**config, "quantization_config": {**config["quantization_config"], **changed}}
        (tmp_path / "in" / "config.json").write_text(json.dumps(changed))
        with pytest.raises(error, match=says):
            load(tmp_path / "in")
    config["quantization_config"]["rotation"] = ""
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    (tmp_path / "in" / "quantize_config.json").write_text(json.dumps({"bits": 4, "rotation": "hadamard"}))
    with pytest.raises(WeightFileError, match=r"rotation must be .*got hadamard"):
        load(tmp_path / "in")
    (tmp_path / "in" / "model.safetensors").rename(tmp_path / "in" / "pytorch_model.bin")
    with pytest.raises(WeightFileError, match="a torch pickle file"):
        load(tmp_path / "in")
    for arguments in (
        {"group_size": 48},
        {"format": "fp4"},
        {"symmetric": 1},
        {"bits": 8},
        {"layout_version": 99},
        {"layers": {"x": 3}},
        {"layers": [1]},
        {"modules_to_not_convert": [1]},
    ):
        with pytest.raises((ValueError, TypeError), match=next(iter(arguments))):
            CudatmaConfig(**arguments)


MISFITS: dict[str, tuple[dict[str, tuple[int, int]], dict[str, Any], dict[str, Any], str]] = {
    "an embedding": (
        {"model.embed_tokens": (HIDDEN, VOCAB)},
        {},
        {},
        "model.embed_tokens must be .*got a quantized Embedding",
    ),
    "no such module": (
        {"mtp.layers.0.fc": (HIDDEN, 64)},
        {},
        {},
        "mtp.layers.0.fc must be .* in LlamaForCausalLM, found no such module",
    ),
    "two of them": (
        {f"mtp.{i}.fc": (HIDDEN, 64) for i in (0, 1)},
        {},
        {},
        "mtp.0.fc and 1 other must be .*found no such module",
    ),
    "another size": ({}, {}, {"intermediate_size": 256}, r"mlp.*: K x N and 5 others must be .*got 192 x 128"),
    "a bias too many": ({}, {"model.layers.0.mlp.up_proj.bias": np.ones(192, np.float16)}, {}, "no such bias"),
    "a bias too few": ({}, {}, {"mlp_bias": True}, r"proj\.bias and 5 others must be .*found no such tensor"),
    "fewer rows": (
        {},
        {"model.layers.0.mlp.up_proj.g_idx": np.arange(124, dtype=np.int32) // 32},
        {},
        "K x N must be .*got 124",
    ),
    "a norm of one value": (
        {},
        {"model.norm.weight": np.ones(1, np.float16)},
        {},
        r"norm\.weight must be .*got shape \(1,\)",
    ),
    "half a head": (
        {},
        {"lm_head.weight": np.ones((48, HIDDEN), np.float16)},
        {},
        r"must be \(96, .*got shape \(48, 128\)",
    ),
    "no head": ({}, {"lm_head.weight": None}, {}, r"lm_head\.weight must be .*found no such tensor"),
    "no tied embedding": (
        {},
        {"lm_head.weight": None, "model.embed_tokens.weight": None},
        {"tie_word_embeddings": True},
        r"model\.embed_tokens\.weight.* must be .*found no such tensor",
    ),
    "a layer without tensors": (
        {},
        {f"model.layers.1.mlp.up_proj.{part}": None for part in ("qweight", "qzeros", "scales", "g_idx")},
        {},
        r"up_proj\.weight must be .*found no such tensor",
    ),
    "one of two tied weights": (
        {"lm_head": (HIDDEN, VOCAB)},
        {"model.embed_tokens.weight": None},
        {"tie_word_embeddings": True},
        r"lm_head must be a float weight, got .* ties this weight to model\.embed_tokens\.weight",
    ),
}


@pytest.mark.parametrize("what", MISFITS)
def test_layers_that_the_class_cannot_take_are_refused_before_anything_is_written(tmp_path: Path, what: str) -> None:
    layers, tensors, config, says = MISFITS[what]
    write_float(tmp_path / "in")
    quantize_layers(tmp_path / "in", {**linear_shapes(), **layers}, **config)
    path = tmp_path / "in" / "model.safetensors"
    changed = {name: tensor for name, tensor in (load_file(path) | tensors).items() if tensor is not None}
    save_file(changed, path, metadata={"format": "pt"})
    with pytest.raises(WeightFileError, match=says):
        convert_checkpoint(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(WeightFileError, match=says):
        load(tmp_path / "in")


@pytest.mark.parametrize(
    ("config", "tensor", "says"),
    [
        (
            {},
            "model.layers.1.mlp.up_proj.weight",
            r"^model\.layers\.1\.mlp\.up_proj\.weight must be .*found no such tensor",
        ),
        (
            {},
            "model.layers.0.input_layernorm.weight",
            r"^model\.layers\.0\.input_layernorm\.weight must be .*found no such",
        ),
        ({}, "lm_head.weight", r"^lm_head\.weight must be .*found no such tensor"),
        ({"mlp_bias": True}, "", r"^model\..*_proj\.bias and 5 others must be .*found no such tensor"),
        ({"intermediate_size": FFN + 4}, "", r"proj\.weight and 5 others must be .*got shape .*192"),
    ],
)
def test_a_float_checkpoint_that_lacks_a_parameter_of_its_class_is_refused(
    tmp_path: Path, config: dict[str, Any], tensor: str, says: str
) -> None:
    write_float(tmp_path / "in")
    path = tmp_path / "in" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    path = tmp_path / "in" / "model.safetensors"
    tensors = {name: array for name, array in load_file(path).items() if name != tensor}
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(WeightFileError, match=says):
        convert_checkpoint(tmp_path / "in", tmp_path / "out", quantize=True)
    assert not (tmp_path / "out").exists()
    with pytest.raises(WeightFileError, match=says):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "in", quantization_config=CudatmaConfig())


def test_what_cannot_be_loaded_by_its_options_is_refused(tmp_path: Path) -> None:
    write_gpt2(tmp_path / "gpt2", quantized=False)
    write_float(tmp_path / "in")
    quantized = {"quantization_config": CudatmaConfig()}
    with pytest.raises(ArgumentError, match="no such layer in GPT2LMHeadModel"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "gpt2", **quantized)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "in")
    config.distributed_config = transformers.distributed.DistributedConfig(tp_size=2)
    for call in (
        lambda: load(tmp_path / "in", tp_plan="auto", tp_size=2),
        lambda: transformers.LlamaForCausalLM.from_pretrained(tmp_path / "in", config=config, **quantized),
    ):
        with pytest.raises(ArgumentError, match=r"^tp_size must be .*got 2"):
            call()


def test_weights_that_are_missing_are_named(tmp_path: Path) -> None:
    write_awq(tmp_path / "in")
    convert_checkpoint(tmp_path / "in", tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.scales"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(WeightFileError, match=r"model\.layers\.1\.mlp\.up_proj"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
