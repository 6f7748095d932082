"""vLLM's calls of our kernel for experts on a GPU. vLLM need not be installed.

PackedExpertsLayer and pack_layer() contain all code that runs after the selection.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cudatma.build import kernel as build
from cudatma.context import Runtime, using_runtime
from cudatma.integrations.vllm.experts import (
    LoadedFormat,
    PackedExpertsLayer,
    pack_layer,
    prepare_layer,
)
from cudatma.quantization.experts import gate_then_up
from cudatma.quantization.weight_format import WEIGHT_FORMATS

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, GROUP = 16, 4, 512, 256, 64
NAMES = "qweight", "scales", "qzeros"
MAX_TOKENS = 600


@pytest.fixture(autouse=True, scope="module")
def _own_runtime() -> Iterator[None]:
    """Use a separate Runtime, because a layer lets all graphs share a workspace."""
    with using_runtime(Runtime()):
        yield


class Layer(torch.nn.Module):  # type: ignore[name-defined]
    """A layer of experts as vLLM loads it from a GPTQ checkpoint."""

    def __init__(self, dtype: Any) -> None:
        super().__init__()
        generator = torch.Generator(DEVICE).manual_seed(1)
        self.dense = {}
        for prefix, k, n in (("w13", HIDDEN, 2 * INTERMEDIATE), ("w2", INTERMEDIATE, HIDDEN)):
            words = torch.randint(-(2**31), 2**31, (EXPERTS, k // 8, n), generator=generator, device=DEVICE).int()
            scales = torch.rand(EXPERTS, k // GROUP, n, generator=generator, device=DEVICE)
            scales = ((scales / 2 + 0.75) / (4.6 * k**0.5)).to(dtype)
            zeros = torch.zeros(EXPERTS, k // GROUP, n // 8, dtype=torch.int32, device=DEVICE)
            for name, tensor in zip(NAMES, (words, scales, zeros), strict=True):
                self.register_parameter(f"{prefix}_{name}", torch.nn.Parameter(tensor, requires_grad=False))
            places = torch.arange(0, 32, 4, device=DEVICE)
            q = (words[:, :, None] >> places[None, None, :, None]) & 15
            self.dense[prefix] = (q.reshape(EXPERTS, k, n) - 8) * scales.double().repeat_interleave(GROUP, 1)
        facts = {"hidden_dim": HIDDEN, "intermediate_size_per_partition": INTERMEDIATE, "in_dtype": dtype}
        self.moe_config: Any = SimpleNamespace(**facts, experts_per_token=TOP_K)
        self.expert_map: Any = None

    def pack(self) -> PackedExpertsLayer:
        loaded = LoadedFormat("gptq", NAMES, GROUP, False)
        pack_layer(self, loaded, lambda layer, name, tensor: setattr(layer, name, _parameter(tensor)))
        prepare_layer(self, loaded, MAX_TOKENS)
        kernel = PackedExpertsLayer()
        kernel.moe_config = self.moe_config
        kernel.w1_scale, kernel.w2_scale = self.w13_scales, self.w2_scales
        kernel.w1_zp = kernel.w2_zp = kernel.w1_bias = kernel.w2_bias = None
        return kernel

    def expected(self, x: Any, factors: Any, ids: Any) -> Any:
        both = torch.einsum("mk,mjkn->mjn", x.double(), self.dense["w13"][ids])
        gate, up = both.chunk(2, -1)
        results = torch.einsum("mjk,mjkn->mjn", torch.nn.functional.silu(gate) * up, self.dense["w2"][ids])
        return (factors.double()[:, :, None] * results).sum(1)


def _parameter(tensor: Any) -> Any:
    return None if tensor is None else torch.nn.Parameter(tensor, requires_grad=False)


def batch(m: int, dtype: Any) -> tuple[Any, Any, Any]:
    generator = torch.Generator(DEVICE).manual_seed(m)
    x = torch.randn(m, HIDDEN, generator=generator, device=DEVICE).to(dtype)
    scores = torch.rand(m, EXPERTS, generator=generator, device=DEVICE).softmax(-1)
    factors, ids = scores.topk(TOP_K, -1)
    return x, factors, ids.int()


def run(kernel: PackedExpertsLayer, layer: Any, x: Any, factors: Any, ids: Any) -> Any:
    y = torch.empty_like(x)
    kernel.run(y, x, layer.w13_weight, layer.w2_weight, factors, ids, layer.expert_map, False)
    return y


class GptOssKernel(PackedExpertsLayer):
    format = "mxfp4"
    activation_name = "swiglu_oai"


class GptOssLayer(torch.nn.Module):  # type: ignore[name-defined]
    """A layer of experts as vLLM loads it from a checkpoint of gpt-oss, where gate and up alternate."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator(DEVICE).manual_seed(1)
        values = torch.from_numpy(WEIGHT_FORMATS["mxfp4"].values).double().to(DEVICE)
        self.dense, self.bias = {}, {}
        for prefix, k, n in (("w13", HIDDEN, 2 * INTERMEDIATE), ("w2", INTERMEDIATE, HIDDEN)):
            codes = torch.randint(0, 16, (EXPERTS, n, k), generator=generator, device=DEVICE, dtype=torch.uint8)
            scales = torch.randint(
                120, 123, (EXPERTS, n, k // 32), generator=generator, device=DEVICE, dtype=torch.uint8
            )
            factors = torch.exp2(scales.double() - 127).repeat_interleave(32, -1)
            self.dense[prefix] = (values[codes.long()] * factors).transpose(1, 2)
            self.bias[prefix] = torch.randn(EXPERTS, n, generator=generator, device=DEVICE).bfloat16()
            loaded = {"weight": codes[..., ::2] | codes[..., 1::2] << 4, "weight_scale": scales}
            for name, tensor in loaded.items():
                self.register_parameter(f"{prefix}_{name}", _parameter(tensor))
        facts = {"hidden_dim": HIDDEN, "intermediate_size_per_partition": INTERMEDIATE, "in_dtype": torch.bfloat16}
        self.moe_config: Any = SimpleNamespace(**facts, experts_per_token=TOP_K)
        self.expert_map: Any = None

    def pack(self) -> PackedExpertsLayer:
        loaded = LoadedFormat("n_major_interleaved", ("weight", "weight_scale", "zero_point"), 32, False, "mxfp4")
        pack_layer(self, loaded, lambda layer, name, tensor: setattr(layer, name, _parameter(tensor)))
        prepare_layer(self, loaded, MAX_TOKENS, activation="swiglu_oai")
        kernel = GptOssKernel()
        kernel.moe_config = self.moe_config
        kernel.w1_scale, kernel.w2_scale = self.w13_weight_scale, self.w2_weight_scale
        kernel.w1_zp = kernel.w2_zp = None
        kernel.w1_bias, kernel.w2_bias = gate_then_up(self.bias["w13"]), self.bias["w2"]
        return kernel

    def expected(self, x: Any, factors: Any, ids: Any) -> Any:
        both = torch.einsum("mk,mjkn->mjn", x.double(), self.dense["w13"][ids]) + self.bias["w13"][ids]
        gate, up = both[..., ::2].clamp(max=7), both[..., 1::2].clamp(-7, 7)
        hidden = gate * torch.sigmoid(1.702 * gate) * (up + 1)
        results = torch.einsum("mjk,mjkn->mjn", hidden, self.dense["w2"][ids]) + self.bias["w2"][ids]
        return (factors.double()[:, :, None] * results).sum(1)


@pytest.mark.parametrize("layer_of", [lambda: Layer(torch.float16), lambda: Layer(torch.bfloat16), GptOssLayer])
def test_a_layer_computes_the_results_of_what_was_loaded_without_compiling(
    layer_of: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDATMA_CACHE_DIR", str(tmp_path))
    with using_runtime(Runtime()):
        layer = layer_of()
        dtype, kernel = layer.moe_config.in_dtype, layer.pack()
        monkeypatch.setattr(build, "compile_source", lambda *_, **__: pytest.fail("a call compiles a kernel"))
        for m in (1, 2, 3, 5, 16, 37, 100, 300, MAX_TOKENS):
            x, factors, ids = batch(m, dtype)
            expected = layer.expected(x, factors, ids)
            assert (run(kernel, layer, x, factors, ids) - expected).abs().max() < 2e-2 * expected.abs().max()


def test_only_the_packed_weights_stay_in_memory() -> None:
    gc.collect()
    before = torch.cuda.memory_allocated()
    layer = Layer(torch.float16)
    layer.dense.clear()
    kernel = layer.pack()
    gc.collect()
    values = EXPERTS * 3 * HIDDEN * INTERMEDIATE
    assert torch.cuda.memory_allocated() - before == values // 2 + values // GROUP * 2
    del kernel


@pytest.mark.parametrize("m", [1, 64])
def test_a_graph_replays_the_layer_with_other_routes(m: int) -> None:
    layer = Layer(torch.bfloat16)
    kernel = layer.pack()
    x, factors, ids = batch(m, torch.bfloat16)
    run(kernel, layer, x, factors, ids)  # vLLM warms each size up before it captures it
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run(kernel, layer, x, factors, ids)
    x.mul_(-0.5)
    ids.copy_((ids + 1) % EXPERTS)
    graph.replay()
    assert torch.equal(y, run(kernel, layer, x, factors, ids))


def test_choices_of_other_ranks_are_skipped() -> None:
    layer = Layer(torch.bfloat16)
    layer.expert_map = torch.full((2 * EXPERTS,), -1, dtype=torch.int32, device=DEVICE)
    layer.expert_map[EXPERTS:] = torch.arange(EXPERTS, dtype=torch.int32, device=DEVICE)
    kernel = layer.pack()
    x, factors, ids = batch(20, torch.bfloat16)
    expected = layer.expected(x, factors * (ids % 2), ids)
    y = run(kernel, layer, x, factors, torch.where(ids % 2 == 1, ids + EXPERTS, ids))
    assert (y - expected).abs().max() < 2e-2 * expected.abs().max()
