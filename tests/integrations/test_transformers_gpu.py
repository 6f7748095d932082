"""Models and attention of transformers on a GPU: against dequantized models, sdpa and eager, and in CUDA graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.17")

from float_folders import write
from gpt_oss_folder import write_gpt_oss
from model_folders import VOCAB, write_awq, write_compressed, write_float, write_gptq

import cudatma
from cudatma.integrations.torch import MarlinLinear
from cudatma.integrations.transformers import CudatmaConfig, load, quantizer, register
from cudatma.integrations.transformers.experts import expert_calls
from cudatma.quantization import open_checkpoint

pytestmark = pytest.mark.gpu

WRITERS: dict[str, Any] = {
    "gptq": lambda path: write_gptq(path, order=True),
    "awq": write_awq,
    "compressed-tensors": lambda path: write_compressed(path, sym=False),
}
TOKENS = torch.arange(3, 3 + 36).reshape(3, 12)
LEFT = torch.tensor([[0] * (12 - n) + [1] * n for n in (12, 7, 1)])
SIZES = {
    "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "vocab_size": VOCAB, "head_dim": 64, "pad_token_id": 0, "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture(autouse=True)
def registered() -> None:
    register()


def logits(model: Any, **options: Any) -> Any:
    with torch.no_grad():
        return model(TOKENS.to(model.device), **options).logits.float().cpu()


def dense(folder: Path, weights: dict[str, Any]) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model, checkpoint = transformers.LlamaForCausalLM(config).float(), open_checkpoint(folder)
    values = {name: weights[name] if name in weights else checkpoint.read(name).astype(np.float32)
              for name in model.state_dict()}  # fmt: skip
    model.load_state_dict({name: torch.from_numpy(value) for name, value in values.items()})
    return model.eval()


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("attention", ["sdpa", "cudatma"])
def test_a_quantized_model_computes_what_its_integers_stand_for(tmp_path: Path, kind: str, attention: str) -> None:
    weights = WRITERS[kind](tmp_path / "in")
    model = load(tmp_path / "in", dtype=torch.float16, attn_implementation=attention).cuda()
    expected = logits(dense(tmp_path / "in", weights))
    assert (logits(model) - expected).abs().max() < 1e-2 * expected.abs().max()


@pytest.mark.parametrize("kind", ["gpt-oss", "NVFP4, ModelOpt", "fp8, blocks", "fp8, channels"])
def test_experts_compute_what_their_codes_stand_for(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "in"
    if kind == "gpt-oss":
        expected = logits(write_gpt_oss(folder))
    else:
        write(folder, kind, "qwen3_moe")
        with monkeypatch.context() as context:
            context.setenv("CUDATMA_BACKEND", "reference")
            expected = logits(load(folder, dtype=torch.float16))
    model = load(folder, dtype=torch.float16).cuda()
    for function, operands, options in expert_calls(model):
        cudatma.warm_up(function, operands, max_m=TOKENS.numel(), **options)
    assert (logits(model) - expected).abs().max() < 2e-2 * expected.abs().max()


def test_a_float_model_is_quantized_on_the_gpu(tmp_path: Path) -> None:
    weights = write_float(tmp_path / "in")
    pytest.importorskip("accelerate", reason="transformers needs it for device_map")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "in", quantization_config=CudatmaConfig(group_size=64), device_map="cuda"
    )
    for name, layer in model.named_modules():
        if isinstance(layer, MarlinLinear):
            assert layer.qweight.is_cuda
            weights[f"{name}.weight"] = layer.dequantize(dtype=torch.float32).cpu().numpy().copy()
    expected = logits(dense(tmp_path / "in", weights))
    assert (logits(model) - expected).abs().max() < 1e-2 * expected.abs().max()


def test_a_model_on_the_cpu_gets_the_integers_of_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_float(tmp_path / "in", "bfloat16")
    states, devices, quantize = [], [], quantizer.quantize_linear

    def recorded(weight: Any, **options: Any) -> Any:
        devices.append(weight.device.type)
        return quantize(weight, **options)

    monkeypatch.setattr(quantizer, "quantize_linear", recorded)
    for backend in ("cuda", "reference"):
        monkeypatch.setenv("CUDATMA_BACKEND", backend)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "in", quantization_config=CudatmaConfig(group_size=64, symmetric=False)
        )
        states.append(model.state_dict())
    assert devices == ["cuda"] * (len(devices) // 2) + ["cpu"] * (len(devices) // 2)
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("mask", [None, LEFT], ids=["whole", "left"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_attention_gives_what_sdpa_gives(name: str, mask: Any, dtype: Any) -> None:
    torch.manual_seed(0)
    configs = {
        "llama": lambda: transformers.LlamaConfig(**SIZES),
        "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=5),
        "gemma2": lambda: transformers.Gemma2Config(**SIZES, sliding_window=5, attn_logit_softcapping=2.0),
    }
    model = transformers.AutoModelForCausalLM.from_config(configs[name]()).to(dtype).eval().cuda()
    options = {} if mask is None else {"attention_mask": mask.cuda()}
    found = {}
    for implementation in ("eager", "cudatma"):
        model.set_attn_implementation(implementation)
        found[implementation] = logits(model, **options)
    off = (found["cudatma"] - found["eager"]).abs()[slice(None) if mask is None else mask.bool()]
    assert off.max() < (1e-2 if dtype == torch.float16 else 8e-2)


@pytest.mark.parametrize("mask", [torch.ones_like(LEFT), LEFT], ids=["whole", "left"])
@pytest.mark.parametrize("cache", [None, "static"])
def test_generation_gives_what_sdpa_gives(mask: Any, cache: Any) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SIZES)).half().eval().cuda()
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "disable_compile": True,
               "return_dict_in_generate": True, "output_logits": True, "cache_implementation": cache,
               "attention_mask": mask.cuda()}  # fmt: skip
    found = {}
    for implementation in ("sdpa", "cudatma"):
        model.set_attn_implementation(implementation)
        found[implementation] = model.generate(TOKENS.cuda(), **options).logits
    for ours, theirs in zip(found["cudatma"], found["sdpa"], strict=True):
        assert (ours - theirs).abs().max() < 2e-2


def test_a_captured_decoding_step_follows_the_cache(tmp_path: Path) -> None:
    """Replays read the cache's length from the device, so each step gives the same result as without a graph."""
    write_gptq(tmp_path / "in")
    model = load(tmp_path / "in", attn_implementation="cudatma").cuda()

    def decoded(capture: bool) -> Any:
        cache = transformers.StaticCache(config=model.config, max_cache_len=40)
        token = TOKENS[:, -1:].cuda()

        def step() -> None:
            token.copy_(model(token, past_key_values=cache).logits[:, -1:].argmax(-1))

        with torch.no_grad():
            model(TOKENS.cuda(), past_key_values=cache)
            side, found = torch.cuda.Stream(), []
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                step()
                step()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            if capture:
                with torch.cuda.graph(graph):
                    step()
            for _ in range(8):
                graph.replay() if capture else step()
                found.append(token.cpu().clone())
        return torch.cat(found, 1)

    assert torch.equal(decoded(True), decoded(False))
