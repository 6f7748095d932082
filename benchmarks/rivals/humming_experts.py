"""Humming's experts with W4A16 weights, as vLLM 0.33 runs them: alignment, two products, activation, weighted sum.

The packages humming-kernels and vllm are required. vLLM provides the alignment and the sum.
"""

from __future__ import annotations

import json
from typing import Any

from benchmarks.operands import GROUP_SIZE

_COMPUTE = json.dumps({"use_batch_invariant": False, "use_f16_accum": False, "gemm_type": "indexed"})
_SILU = {"activation_type": "binary_split", "activation_impl": "(a / (1.f + expf(-a))) * b"}
#: K and N are padded to multiples of these numbers.
_PAD_K, _PAD_N = 128, 256


class HummingExperts:
    """Copies of a layer with random weights. Raises ImportError if a package is absent."""

    def __init__(self, experts: int, k: int, intermediate: int, copies: int) -> None:
        import torch
        from humming.schema import HummingWeightSchema
        from humming.transform import prepare_and_transform_humming_tensors
        from vllm import _custom_ops  # noqa: F401  registers moe_align_block_size

        self.experts = experts
        self.k, self.intermediate = (-(-size // _PAD_K) * _PAD_K for size in (k, intermediate))
        schema = HummingWeightSchema(b_dtype="uint4", weight_scale_group_size=GROUP_SIZE)
        self.products = []
        for n, depth in ((2 * self.intermediate, self.k), (self.k, self.intermediate)):
            words = torch.randint(-(2**31), 2**31, (experts, n, depth // 8), dtype=torch.int32, device="cuda")
            scales = (torch.rand((experts, n, depth // GROUP_SIZE), device="cuda") + 0.5) / (4.8 * depth**0.5)
            config, tensors = prepare_and_transform_humming_tensors(
                {"weight": words, "weight_scale": scales.to(torch.bfloat16)},
                shape_n=n,
                shape_k=depth,
                weight_schema=schema,
                num_experts=experts,
                pad_n_to_multiple=_PAD_N,
                pad_k_to_multiple=_PAD_K,
                torch_dtype=torch.bfloat16,
                device=torch.device("cuda", 0),
            )
            first = tensors["weight"], tensors["weight_scale"]
            self.products.append((config, [first, *(tuple(t.clone() for t in first) for _ in range(copies - 1))]))
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        self.locks = torch.zeros(8 * sms, dtype=torch.int32, device="cuda")

    def caller(self, x: Any, topk_weights: Any, ids: Any, out: Any) -> Any:
        """Return a function that computes the layer from the copy with a given index.

        ``x`` and ``out`` have K padded columns.
        """
        import torch
        from humming.forward import humming_forward, may_process_input
        from humming.kernel.humming import HummingKernel
        from humming.tune import get_heuristics_config
        from vllm.model_executor.layers.fused_moe.moe_fused_mul_sum import moe_fused_mul_sum

        m, top_k = ids.shape
        rows = m * top_k
        tunings = [
            get_heuristics_config(layer_config=config, shape_m=rows, gemm_type="indexed", device=0)
            for config, _ in self.products
        ]
        ranges = [[[0, 1 << 30, tuning]] for tuning in tunings]
        for (config, _), tuning in zip(self.products, ranges, strict=True):
            HummingKernel.prepare_kernels(config.to_str(), _COMPUTE, json.dumps(tuning, default=_plain), 0)
        sizes = 2 * self.intermediate, self.intermediate, self.k
        up, hidden, down = (torch.empty((rows, n), dtype=torch.bfloat16, device="cuda") for n in sizes)
        blocks = [tuning["block_shape"][0] for tuning in tunings]

        def product(index: int, number: int, inputs: Any, outputs: Any, routed: Any, choices: int) -> None:
            config, copies = self.products[number]
            weight, scale = copies[index % len(copies)]
            humming_forward(
                config,
                inputs=inputs,
                weight=weight,
                weight_scale=scale,
                outputs=outputs,
                sorted_ids=routed[0],
                expert_ids=routed[1],
                num_tokens_padded=routed[2],
                locks=self.locks,
                top_k=choices,
                valid_shape_m=rows,
                compute_config=_COMPUTE,
                tuning_config=json.dumps(ranges[number], default=_plain),
            )

        def run(index: int) -> Any:
            routed = [self._aligned(ids, block) for block in dict.fromkeys(blocks)]
            product(index, 0, x, up, routed[0], top_k)
            may_process_input(self.products[1][0], inputs=up, outputs=hidden, **_SILU)
            product(index, 1, hidden, down, routed[-1], 1)
            moe_fused_mul_sum(down.view(m, top_k, self.k), topk_weights, out, ids)
            return out

        return run

    def _aligned(self, ids: Any, block: int) -> tuple[Any, Any, Any]:
        """Sort the pairs by expert and pad each expert to whole blocks, as vLLM does."""
        import torch

        limit = ids.numel() + self.experts * (block - 1)
        if ids.numel() < self.experts:
            limit = min(ids.numel() * block, limit)
        sorted_ids, expert_ids, padded = (
            torch.empty((size,), dtype=torch.int32, device="cuda") for size in (limit, -(-limit // block), 1)
        )
        torch.ops._moe_C.moe_align_block_size(ids, self.experts, block, sorted_ids, expert_ids, padded, None)
        return sorted_ids, expert_ids, padded


def _plain(value: Any) -> Any:
    return value.value if hasattr(value, "value") else list(value)
