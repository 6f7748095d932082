"""vLLM's calls of our linear kernel on a GPU. vLLM need not be installed.

PackedLayer contains all code of CudatmaWNA16LinearKernel that runs after the selection. Kernel sets the attributes that
vLLM's base class sets. tests/integrations/test_vllm_layers.py makes the same calls with vLLM on the CPU.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cudatma.context import Runtime, using_runtime
from cudatma.integrations.vllm.layer import PackedLayer

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


@pytest.fixture(autouse=True, scope="module")
def _own_runtime() -> Iterator[None]:
    """Use a separate Runtime, because a layer lets all graphs share a workspace."""
    with using_runtime(Runtime()):
        yield


class Kernel(PackedLayer):
    """A kernel with the attributes that vLLM's base class sets."""

    def __init__(self, k: int, n: int, group_size: int, asymmetric: bool) -> None:
        facts = {"partition_weight_shape": (k, n), "group_size": group_size, "zero_points": asymmetric}
        self.config: Any = SimpleNamespace(**facts, weight_type="uint4" if asymmetric else "uint4b8")
        self.w_q_name, self.w_s_name, self.w_zp_name = "weight_packed", "weight_scale", "weight_zero_point"


def loaded_layer(k: int, n: int, group_size: int, asymmetric: bool, dtype: Any) -> tuple[Any, Any]:
    """Return a layer as vLLM loads it from a compressed-tensors checkpoint (N first), and W (K, N) in float64."""
    generator = torch.Generator(DEVICE).manual_seed(k + n)
    groups = 1 if group_size == -1 else k // group_size

    def words(rows: int, columns: int) -> Any:
        return torch.randint(-(2**31), 2**31, (rows, columns), generator=generator, device=DEVICE).int()

    scale = (torch.rand(n, groups, generator=generator, device=DEVICE) / 64 + 1 / 64).to(dtype)
    parts = {"weight_packed": words(n, k // 8), "weight_scale": scale}
    if asymmetric:
        parts["weight_zero_point"] = words(n // 8, groups)
    layer = torch.nn.Module()
    for name, tensor in parts.items():
        parameter = torch.nn.Parameter(tensor, requires_grad=False)
        parameter.output_dim = 0
        layer.register_parameter(name, parameter)
    q = nibbles(parts["weight_packed"]).T.astype(np.float64)
    group = np.arange(k) // (k if group_size == -1 else group_size)
    zeros = nibbles(parts["weight_zero_point"].T).astype(np.float64)[group] if asymmetric else 8
    return layer, (q - zeros) * scale.T.double().cpu().numpy()[group]


def nibbles(words: Any) -> Any:
    """Unpack int32 (R, C) into (R, 8 C), lowest nibble first."""
    unsigned = words.cpu().numpy().view(np.uint32)
    return np.stack([unsigned >> np.uint32(4 * place) & np.uint32(15) for place in range(8)], -1).reshape(
        len(words), -1
    )


def rows(m: int, k: int, dtype: Any) -> Any:
    return torch.randn(m, k, generator=torch.Generator(DEVICE).manual_seed(m), device=DEVICE).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("k", "n", "group_size", "asymmetric"),
    [(1024, 768, 128, False), (1024, 776, 32, True), (544, 512, 32, False), (520, 512, -1, True), (512, 768, 64, True)],
)
def test_a_layer_computes_the_product_of_what_was_loaded(
    k: int, n: int, group_size: int, asymmetric: bool, dtype: Any
) -> None:
    layer, dense = loaded_layer(k, n, group_size, asymmetric, dtype)
    kernel = Kernel(k, n, group_size, asymmetric)
    kernel.process_weights_after_loading(layer)
    bias = rows(1, n, dtype)[0]
    for m in (1, 16, 100, 512):
        x = rows(m, k, dtype)
        y = kernel.apply_weights(layer, x, bias).double().cpu().numpy()
        expected = x.double().cpu().numpy() @ dense + bias.double().cpu().numpy()
        assert np.abs(y - expected).max() < 1e-2 * np.abs(expected).max()


def test_only_the_packed_weight_stays_in_memory() -> None:
    k, n = 4096, 8192
    gc.collect()
    before = torch.cuda.memory_allocated()
    layer, dense = loaded_layer(k, n, 128, False, torch.float16)
    del dense
    Kernel(k, n, 128, False).process_weights_after_loading(layer)
    gc.collect()
    held = sum(tensor.nbytes for tensor in layer.parameters())
    assert held == k * n // 2 + k // 128 * n * 2
    assert torch.cuda.memory_allocated() - before == held


@pytest.mark.parametrize("m", [1, 64, 512])
def test_a_graph_replays_the_layer_with_other_activations(m: int) -> None:
    k, n = 1024, 2048
    layer, _ = loaded_layer(k, n, 128, True, torch.bfloat16)
    kernel = Kernel(k, n, 128, True)
    kernel.process_weights_after_loading(layer)
    x = rows(m, k, torch.bfloat16)
    kernel.apply_weights(layer, x)  # vLLM warms each size up before it captures it
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = kernel.apply_weights(layer, x)
    x.mul_(-0.5)
    graph.replay()
    assert torch.equal(y, kernel.apply_weights(layer, x))
