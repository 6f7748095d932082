"""vLLM's layers with int8, MXFP4 and NVFP4 weights, from vLLM's choice of a kernel to results, on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

import vllm_layers
from vllm.model_executor.kernels import linear
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config
from vllm.platforms import PlatformEnum

from cudatma.integrations.vllm import register
from cudatma.quantization.weight_format import WEIGHT_FORMATS

K, N = 256, 144
VALUES = torch.from_numpy(WEIGHT_FORMATS["mxfp4"].values)


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("CUDATMA_BACKEND", "reference")
    register()
    vllm_layers.join_one_rank()
    with vllm_layers.configured(), vllm_layers.pretended_gpu(9):
        yield


def compressed_tensors(form: str, weights: dict[str, Any], activations: Any) -> Any:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    said = {"config_groups": {"group_0": group}, "format": form, "ignore": [], "quant_method": "compressed-tensors"}
    return CompressedTensorsConfig.from_config(said)


def nvfp4(dynamic: bool = False) -> dict[str, Any]:
    strategy = {"strategy": "tensor_group", "group_size": 16}
    return {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": "local" if dynamic else False, **strategy}


def layer_of(config: Any, dtype: Any = torch.bfloat16) -> Any:
    return ReplicatedLinear(K, N, bias=False, quant_config=config, params_dtype=dtype, prefix="model.up_proj")


def kernel_name(layer: Any) -> str:
    return type(vllm_layers.kernel_of(layer)).__name__


def check(layer: Any, dense: Any, dtype: Any = torch.bfloat16) -> None:
    """Compare the layer's results with those of the dense weight (N, K)."""
    x = torch.randn(3, K, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = x.double() @ dense.T.double()
    torch.testing.assert_close(layer(x)[0].double(), expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max()))


def fp4_weight(group_size: int) -> tuple[Any, Any, Any]:
    """Return bytes (N, K / 2), scales 2^-3 to 2^2 (N, G), and the product of values and scales (N, K)."""
    rng = np.random.default_rng(0)
    q = rng.integers(0, 16, (N, K), dtype=np.uint8)
    scales = torch.from_numpy(2.0 ** rng.integers(-3, 3, (N, K // group_size))).float()
    dense = VALUES[torch.from_numpy(q).int()] * scales.repeat_interleave(group_size, 1)
    return torch.from_numpy(q[:, ::2] | q[:, 1::2] << 4), scales, dense


def test_a_layer_of_mxfp4() -> None:
    strategy = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
    weights = {**strategy, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
    layer = layer_of(compressed_tensors("mxfp4-pack-quantized", weights, None))
    assert kernel_name(layer) == "CudatmaMxFp4LinearKernel"
    packed, scales, dense = fp4_weight(32)
    vllm_layers.load(
        layer, {"weight_packed": packed, "weight_scale": scales.to(torch.float8_e8m0fnu).view(torch.uint8)}
    )
    check(layer, dense)


@pytest.mark.parametrize("tool", ["compressed-tensors", "modelopt"])
def test_a_layer_of_nvfp4_with_quantized_activations_is_weight_only(tool: str) -> None:
    packed, scales, dense = fp4_weight(16)
    tensors = {"weight_scale": scales.to(torch.float8_e4m3fn)}
    if tool == "modelopt":
        config: Any = ModelOptNvFp4Config.from_config(
            {
                "quantization": {
                    "quant_algo": "NVFP4",
                    "group_size": 16,
                    "kv_cache_quant_algo": None,
                    "exclude_modules": [],
                }
            }
        )
        tensors |= {"weight": packed, "weight_scale_2": torch.tensor(0.25), "input_scale": torch.tensor(1.0)}
    else:
        config = compressed_tensors("nvfp4-pack-quantized", nvfp4(), nvfp4(dynamic=True))
        tensors |= {"weight_packed": packed, "weight_global_scale": torch.tensor([4.0])}
        tensors |= {"input_global_scale": torch.tensor([1.0])}
    layer = layer_of(config)
    assert kernel_name(layer) == "CudatmaNvFp4LinearKernel"
    vllm_layers.load(layer, tensors)
    check(layer, 0.25 * dense)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    check(compiled, 0.25 * dense)


@pytest.mark.parametrize("size", [128, -1])
@pytest.mark.parametrize("tool", ["compressed-tensors", "gptq"])
def test_a_layer_of_int8(tool: str, size: int) -> None:
    rng = np.random.default_rng(1)
    q = rng.integers(0, 256, (N, K), dtype=np.uint8)
    scales = torch.from_numpy(rng.uniform(0.001, 0.002, (N, 1 if size == -1 else K // size))).half()
    dense = (torch.from_numpy(q).float() - 128) * scales.float().repeat_interleave(K // scales.shape[1], 1)
    words = torch.from_numpy(q.view(np.int32))
    if tool == "gptq":
        config: Any = AutoGPTQConfig.from_config({"bits": 8, "group_size": size, "desc_act": False, "sym": True})
        zeros = torch.full((scales.shape[1], N // 4), 0x7F7F7F7F, dtype=torch.int32)
        tensors = {"qweight": words.t(), "scales": scales.t(), "qzeros": zeros}
    else:
        strategy = {"strategy": "channel"} if size == -1 else {"strategy": "group", "group_size": size}
        weights = {"num_bits": 8, "type": "int", "symmetric": True, **strategy}
        config = compressed_tensors("pack-quantized", weights, None)
        tensors = {"weight_packed": words, "weight_scale": scales, "weight_shape": torch.tensor([N, K])}
    layer = layer_of(config, torch.float16)
    assert kernel_name(layer) == "CudatmaWNA16LinearKernel"
    vllm_layers.load(layer, tensors)
    check(layer, dense, torch.float16)


@pytest.mark.parametrize("capability", [100, 120])
def test_newer_gpus_keep_the_fp4_kernels_of_vllm(capability: int) -> None:
    lists = linear._POSSIBLE_MXFP4_KERNELS, linear._POSSIBLE_NVFP4_KERNELS
    with vllm_layers.pretended_gpu(*divmod(capability, 10)):
        for kernels in lists:
            kernel = kernels[PlatformEnum.CUDA][0]
            assert kernel.__name__.startswith("Cudatma")
            assert kernel.is_supported()[0] is False
