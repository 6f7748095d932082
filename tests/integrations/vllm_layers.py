"""vLLM layers on the CPU with weights in the formats that vLLM loads, and the fakes that they need."""

from __future__ import annotations

import contextlib
import functools
import itertools
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import torch
import vllm.model_executor.layers.quantization.online.fp8  # noqa: F401  asks vLLM's CUDA library where it sees a GPU
from numpy.typing import NDArray
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory
from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig
from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.moe_wna16 import MoeWNA16Config
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config
from vllm.model_executor.models.gpt_oss import GptOssRoutedExperts
from vllm.platforms import PlatformEnum, current_platform
from vllm.platforms.interface import DeviceCapability

from cudatma.quantization.weight_format import WEIGHT_FORMATS

EXPERTS, TOP_K, HIDDEN = 5, 2, 256
_E2M1 = WEIGHT_FORMATS["mxfp4"].values.astype(np.float64)
_prefixes = (f"model.layers.{i}.mlp.experts" for i in itertools.count())
#: The column that AWQ stores in each nibble of a word.
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


@contextlib.contextmanager
def pretended_gpu(major: int, minor: int = 0) -> Iterator[None]:
    """Make vLLM's platform report CUDA and this compute capability on a machine without a GPU."""

    def capability(cls: Any, device_id: int = 0) -> DeviceCapability:
        return DeviceCapability(major, minor)

    answers = {"_enum": PlatformEnum.CUDA, "get_device_capability": classmethod(capability)}
    with mock.patch.multiple(type(current_platform), **answers):
        yield


def join_ranks(rank: int, ranks: int, meeting_file: Path) -> None:
    """Create vLLM's process groups with gloo for tensor parallelism."""
    with configured():
        init_distributed_environment(ranks, rank, f"file://{meeting_file}", rank, "gloo")
        initialize_model_parallel(ranks)


@functools.cache
def join_one_rank() -> None:
    """Create the groups for one rank, once per process."""
    with tempfile.TemporaryDirectory() as folder:
        join_ranks(0, 1, Path(folder, "meeting"))


@contextlib.contextmanager
def configured(**options: Any) -> Iterator[VllmConfig]:
    config = VllmConfig(device_config=DeviceConfig("cpu"), **options)
    with set_current_vllm_config(config):
        yield config


@dataclass(frozen=True)
class Integers:
    """Integers of a weight: q uint8 (K, N), scales fp16 or bf16 (G, N), zeros uint8 (G, N) or None; group_size -1 means
    whole columns."""

    q: NDArray[np.uint8]
    scales: NDArray[Any]
    zeros: NDArray[np.uint8] | None
    group_size: int
    bits: int = 4

    def dense(self) -> NDArray[np.float64]:
        """Return W (K, N)."""
        group = np.arange(len(self.q)) // (len(self.q) if self.group_size == -1 else self.group_size)
        middle = 2.0 ** (self.bits - 1)
        zeros = np.full(self.scales.shape, middle) if self.zeros is None else self.zeros.astype(np.float64)
        return (self.q - zeros[group]) * self.scales[group].astype(np.float64)

    def product(self, x: Any) -> NDArray[np.float64]:
        """Return x W."""
        product: NDArray[np.float64] = x.double().numpy() @ self.dense()
        return product

    def tensors(self, form: str) -> dict[str, Any]:
        """Return the weight's tensors in a checkpoint."""
        return {"gptq": self._gptq, "awq": self._awq, "compressed-tensors": self._compressed_tensors}[form]()

    def _gptq(self) -> dict[str, Any]:
        stored = np.full(self.scales.shape, 2 ** (self.bits - 1) - 1, np.uint8)  # zero points minus one
        words = {"qweight": _words(self.q.T, self.bits).T, "qzeros": _words(stored, self.bits)}
        return {**words, "scales": _tensor(self.scales)}

    def _awq(self) -> dict[str, Any]:
        def awq_order(rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
            return rows.reshape(len(rows), -1, 8)[:, :, _AWQ_COLUMNS].reshape(rows.shape)

        assert self.zeros is not None
        words = {"qweight": _words(awq_order(self.q)), "qzeros": _words(awq_order(self.zeros))}
        return {**words, "scales": _tensor(self.scales)}

    def _compressed_tensors(self) -> dict[str, Any]:
        shape = torch.tensor(self.q.T.shape)
        parts = {"weight_packed": _words(self.q.T, self.bits), "weight_shape": shape}
        parts["weight_scale"] = _tensor(self.scales).T
        return parts if self.zeros is None else {**parts, "weight_zero_point": _words(self.zeros).T}


def integers(
    k: int, n: int, group_size: int, asymmetric: bool, dtype: Any, *, seed: int = 0, bits: int = 4
) -> Integers:
    rng = np.random.default_rng(seed)
    groups = 1 if group_size == -1 else k // group_size
    kind = ml_dtypes.bfloat16 if dtype == torch.bfloat16 else np.float16
    scales = rng.uniform(0.01, 0.03, (groups, n)).astype(kind)
    zeros = rng.integers(0, 16, (groups, n), dtype=np.uint8) if asymmetric else None
    if bits == 8:
        scales = (scales / 16).astype(kind)
    return Integers(rng.integers(0, 2**bits, (k, n), dtype=np.uint8), scales, zeros, group_size, bits)


def quant_config(form: str, group_size: int, asymmetric: bool, bits: int = 4) -> Any:
    """Return vLLM's configuration for the content of a checkpoint's config.json."""
    if form == "gptq":
        method = {"quant_method": "gptq", "desc_act": False, "sym": not asymmetric}
        said: dict[str, Any] = {"bits": bits, "group_size": group_size, **method}
        return AutoGPTQConfig.from_config(said)
    if form == "gpt-oss":
        return GptOssMxfp4Config()
    if form == "awq":
        return AutoAWQConfig.from_config({"bits": 4, "group_size": group_size, "zero_point": asymmetric})
    if form == "moe_wna16":
        method = {"quant_method": "awq", "zero_point": True} if asymmetric else {"quant_method": "gptq", "sym": True}
        return MoeWNA16Config.from_config({"bits": 4, "group_size": group_size, **method})
    strategy = {"strategy": "channel"} if group_size == -1 else {"strategy": "group", "group_size": group_size}
    weights = {"num_bits": bits, "type": "int", "symmetric": not asymmetric, **strategy}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    said = {"config_groups": {"group_0": group}, "format": "pack-quantized", "ignore": []}
    return CompressedTensorsConfig.from_config({**said, "quant_method": "compressed-tensors"})


def kernel_of(layer: Any) -> Any:
    """Return the linear kernel that vLLM chose for a layer."""
    return layer.scheme.kernel if hasattr(layer, "scheme") else layer.quant_method.kernel


def load(layer: Any, tensors: dict[str, Any]) -> None:
    """Load each tensor with its parameter's weight_loader, which selects the rank's shard, and then pack, as vLLM
    does."""
    fill(layer, tensors)
    layer.quant_method.process_weights_after_loading(layer)


def fill(layer: Any, tensors: dict[str, Any]) -> None:
    for name, tensor in tensors.items():
        parameter = getattr(layer, name)
        parameter.weight_loader(parameter, tensor.contiguous())


def _tensor(array: NDArray[Any]) -> Any:
    if array.dtype == np.float16:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


def _words(values: NDArray[np.uint8], bits: int = 4) -> Any:
    """Pack uint8 (R, C) into int32 words of consecutive columns, lowest bits first."""
    per_word = 32 // bits
    words = np.zeros((len(values), values.shape[1] // per_word), np.uint32)
    for place in range(per_word):
        words |= values[:, place::per_word].astype(np.uint32) << np.uint32(bits * place)
    return torch.from_numpy(words.view(np.int32))


def experts_layer(form: str, size: int, asymmetric: bool, dtype: Any, *, bits: int = 4, **options: Any) -> Any:
    """Return vLLM's module with the parameters of a layer's experts, which has loaded nothing."""
    facts: dict[str, Any] = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden_size": HIDDEN, "params_dtype": dtype}
    quantized = quant_config(form, size, asymmetric, bits)
    return FusedMoEFactory(quant_config=quantized, prefix=next(_prefixes), **(facts | options)).routed_experts


class Experts:
    """The gate, up and down weights of each expert."""

    def __init__(
        self, intermediate: int, size: int, asymmetric: bool, dtype: Any, *, seed: int = 0, bits: int = 4
    ) -> None:
        shapes = {"w1": (HIDDEN, intermediate), "w3": (HIDDEN, intermediate), "w2": (intermediate, HIDDEN)}

        def weight(shard: str, expert: int) -> Integers:
            seed_of = 100 * seed + 10 * expert + int(shard[1])
            return integers(*shapes[shard], size, asymmetric, dtype, seed=seed_of, bits=bits)

        self.biases: list[dict[str, NDArray[np.float64]]] | None = None
        self.weights = [{shard: weight(shard, expert) for shard in shapes} for expert in range(EXPERTS)]

    def fill(self, layer: Any, form: str, asymmetric: bool) -> None:
        """Load each tensor with its parameter's weight_loader, as vLLM's models do."""
        stored = ("awq" if asymmetric else "gptq") if form == "moe_wna16" else form
        for expert, shards in enumerate(self.weights):
            for shard, weight in shards.items():
                for name, tensor in weight.tensors(stored).items():
                    parameter = getattr(layer, f"{'w2' if shard == 'w2' else 'w13'}_{name}", None)
                    if parameter is not None:
                        parameter.weight_loader(
                            parameter, tensor.contiguous(), f"experts.{expert}.{name}", shard, expert
                        )

    def result(self, x: Any, factors: Any, ids: Any) -> NDArray[np.float64]:
        """Return the weighted sums of the results of each token's experts."""
        rows, total = x.double().numpy(), np.zeros(x.shape)
        for token, choice in np.ndindex(*ids.shape):
            expert = int(ids[token, choice])
            dense = {shard: weight.dense() for shard, weight in self.weights[expert].items()}
            bias = {shard: np.float64(0) for shard in dense} if self.biases is None else self.biases[expert]
            gate, up = (rows[token] @ dense[shard] + bias[shard] for shard in ("w1", "w3"))
            result = (gate / (1 + np.exp(-gate)) * up) @ dense["w2"] + bias["w2"]
            total[token] += float(factors[token, choice]) * result
        return total


def gpt_oss_layer(**options: Any) -> Any:
    """Return vLLM's module with the parameters of the experts of a layer of gpt-oss, which has loaded nothing."""
    facts = {"activation": "swigluoai", "has_bias": True, "routed_experts_cls": GptOssRoutedExperts}
    return experts_layer("gpt-oss", 32, False, torch.bfloat16, **(facts | options))


class GptOssExperts:
    """The weights and biases of all experts as in a checkpoint of gpt-oss, where gate and up alternate."""

    def __init__(self, intermediate: int, *, seed: int = 0, exponent: int = 120) -> None:
        rng = np.random.default_rng(seed)
        self.tensors: dict[str, NDArray[Any]] = {}
        self.dense = {}
        for prefix, k, n in (("w13", HIDDEN, 2 * intermediate), ("w2", intermediate, HIDDEN)):
            q = rng.integers(0, 16, (EXPERTS, n, k), dtype=np.uint8)
            scales = rng.integers(exponent, exponent + 4, (EXPERTS, n, k // 32), dtype=np.uint8)
            self.tensors[f"{prefix}_weight"] = (q[..., ::2] | q[..., 1::2] << 4).reshape(EXPERTS, n, k // 32, 16)
            self.tensors[f"{prefix}_weight_scale"] = scales
            self.tensors[f"{prefix}_bias"] = rng.standard_normal((EXPERTS, n)).astype(np.float32)
            self.dense[prefix] = _E2M1[q] * np.exp2(scales.repeat(32, -1).astype(np.float64) - 127)

    def fill(self, layer: Any) -> None:
        """Load each tensor with its parameter's weight_loader, as vLLM's model does."""
        for name, array in self.tensors.items():
            parameter = getattr(layer, name)
            for expert in range(EXPERTS):
                tensor = torch.from_numpy(array[expert]).to(parameter.dtype)
                shard = f"gpt_oss_{name.split('_')[0]}"
                parameter.weight_loader(parameter, tensor, f"experts.{name}", shard, expert)

    def result(self, x: Any, factors: Any, ids: Any) -> NDArray[np.float64]:
        """Return the weighted sums of the results of each token's experts."""
        rows, total = x.double().numpy(), np.zeros(x.shape)
        for token, choice in np.ndindex(*ids.shape):
            expert = int(ids[token, choice])
            both = self.dense["w13"][expert] @ rows[token] + self.tensors["w13_bias"][expert]
            gate, up = np.minimum(both[::2], 7), np.clip(both[1::2], -7, 7)
            hidden = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
            result = self.dense["w2"][expert] @ hidden + self.tensors["w2_bias"][expert]
            total[token] += float(factors[token, choice]) * result
        return total


def batch(dtype: Any, tokens: int = 7, top_k: int = TOP_K) -> tuple[Any, Any, Any]:
    """Return activations, weights and ids of the choices."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, generator=generator).to(dtype) / 4
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:top_k] for _ in range(tokens)]).to(torch.int32)
    return x, torch.rand(tokens, top_k, generator=generator) + 0.5, ids


def apply(layer: Any, x: Any, factors: Any, ids: Any) -> Any:
    return layer.quant_method.apply(layer, x, factors, ids, shared_experts=None, shared_experts_input=None)
