"""One of two ranks of vLLM's tensor parallelism with gloo on the CPU: python vllm_rank.py RANK MEETING_FILE

The model is a column-parallel layer followed by a row-parallel layer, and layers of experts whose ranks have shards of
all experts or some of the experts. The exit status is 0 if each rank has the result
of the undivided weights.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import vllm_layers
from vllm.config import ParallelConfig
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.model_executor.layers.fused_moe.oracle import mxfp4 as oracle
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm.v1.worker.workspace import init_workspace_manager
from vllm_layers import integers, kernel_of, load

from cudatma.integrations.vllm import register
from cudatma.integrations.vllm.kernel import CudatmaWNA16LinearKernel
from cudatma.integrations.vllm.moe import CudatmaWNA16Experts
from cudatma.integrations.vllm.moe_mxfp4 import CudatmaMxfp4Experts

RANKS = 2
K, INNER, N = 256, 512, 144
EXPERT_CASES = [("gptq", 64, False), ("awq", 128, True), ("compressed-tensors", 32, True)]
CASES = [("gptq", 128, False), ("gptq", -1, False), ("awq", 64, True), ("compressed-tensors", -1, True)]


def check(form: str, size: int, asymmetric: bool) -> None:
    quant_config = vllm_layers.quant_config(form, size, asymmetric)
    options = {"bias": False, "quant_config": quant_config, "params_dtype": torch.bfloat16}
    with vllm_layers.pretended_gpu(9):
        up = ColumnParallelLinear(K, INNER, prefix="model.up_proj", **options)
        down = RowParallelLinear(INNER, N, prefix="model.down_proj", **options)
    for layer, part in ((up, (K, INNER // RANKS)), (down, (INNER // RANKS, N))):
        assert type(kernel_of(layer)) is CudatmaWNA16LinearKernel
        assert kernel_of(layer).config.partition_weight_shape == part
    weights = [integers(k, n, size, asymmetric, torch.bfloat16, seed=n) for k, n in ((K, INNER), (INNER, N))]
    for layer, weight in zip((up, down), weights, strict=True):
        load(layer, weight.tensors(form))
    x = torch.randn(5, K, generator=torch.Generator().manual_seed(1)).bfloat16()
    y = down(up(x)[0])[0].double().numpy()
    expected = x.double().numpy() @ weights[0].dense() @ weights[1].dense()
    assert np.abs(y - expected).max() < 1e-2 * np.abs(expected).max()


def check_experts(layer: Any, experts: Any, expected_class: type) -> None:
    """Compare the sum of the ranks' results with the whole weights."""
    layer.quant_method.process_weights_after_loading(layer)
    assert type(layer.quant_method.moe_kernel.fused_experts) is expected_class
    x, factors, ids = vllm_layers.batch(torch.bfloat16)
    y = tensor_model_parallel_all_reduce(vllm_layers.apply(layer, x, factors, ids)).double().numpy()
    expected = experts.result(x, factors, ids)
    assert np.abs(y - expected).max() < 2e-2 * np.abs(expected).max()


def main() -> None:
    register()
    rank = int(sys.argv[1])
    vllm_layers.join_ranks(rank, RANKS, Path(sys.argv[2]))
    init_workspace_manager(torch.device("cpu"))
    with vllm_layers.configured():
        for case in CASES:
            check(*case)
    oracle._user_moe_activation_override = lambda: None  # This function reads the configuration of a model.
    for is_expert_parallel in (False, True):
        parallel = ParallelConfig(tensor_parallel_size=RANKS, rank=rank, enable_expert_parallel=is_expert_parallel)
        with vllm_layers.configured(parallel_config=parallel), vllm_layers.pretended_gpu(9):
            for form, size, asymmetric in EXPERT_CASES:
                layer = vllm_layers.experts_layer(form, size, asymmetric, torch.bfloat16, intermediate_size=INNER)
                experts = vllm_layers.Experts(INNER, size, asymmetric, torch.bfloat16)
                experts.fill(layer, form, asymmetric)
                check_experts(layer, experts, CudatmaWNA16Experts)
            # vLLM rounds the shard of 96 rows up to 128, so the ranks have 128 and 64 rows.
            layer, gpt_oss = vllm_layers.gpt_oss_layer(intermediate_size=192), vllm_layers.GptOssExperts(192)
            gpt_oss.fill(layer)
            check_experts(layer, gpt_oss, CudatmaMxfp4Experts)


if __name__ == "__main__":
    main()
