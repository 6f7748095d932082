"""Humming (package humming-kernels): W4A16 kernels compiled for each layer and M by its own heuristics."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Sequence
from typing import Any

from benchmarks.harness import Contender
from benchmarks.layer import Layer
from benchmarks.operands import GROUP_SIZE
from benchmarks.rivals.common import Int4Rival


class Humming(Int4Rival):
    """A Humming layer. Raises ImportError if the package is absent."""

    name = "humming"

    def __init__(self, layer: Layer, m_values: Sequence[int]) -> None:
        import torch
        from humming.layer import HummingLayer

        super().__init__(layer)
        first = HummingLayer(
            shape_n=layer.n,
            shape_k=layer.k,
            weight_config={"dtype": "int4", "group_size": GROUP_SIZE},
            torch_dtype=self.x.dtype,
        ).cuda()
        tensors = {"weight": self.codes.view(torch.int32), "weight_scale": self.scales.t().contiguous()}
        #: Humming's dequantized weight (K, N).
        self.reference = first.weight_schema.dequant_tensors(tensors).to(self.x.dtype).t()
        first.load_from_tensors(tensors)
        first.transform()
        self.rotate(first, copy.deepcopy)
        self._compile_together(m_values)

    def tuning(self, m: int) -> Any:
        """Return the configuration that Humming's heuristic chooses for this M."""
        from humming.tune import get_heuristics_config

        return get_heuristics_config(layer_config=self.weights[0].humming_config, shape_m=m)

    def _compile_together(self, m_values: Sequence[int]) -> None:
        """Compile the kernels for all these M on all cores. If this step fails, kernels are compiled at first use."""
        with contextlib.suppress(Exception):
            from humming.kernel.humming import HummingKernel

            configs = {json.dumps(self.tuning(m), sort_keys=True) for m in m_values}
            ranges = [[0, 1 << 30, json.loads(config)] for config in sorted(configs)]
            HummingKernel.prepare_kernels(self.weights[0].humming_config.to_str(), None, ranges)

    def contenders(self, stream: Any, m: int, count: int) -> list[Contender]:
        x, out, layers = self.x[:m], self.out[:m], self.weights
        tuning = json.dumps(self.tuning(m))

        def run(index: int) -> Any:
            layers[index % len(layers)](x, outputs=out, tuning_config=tuning)
            return out

        return [self.checked(self.name, m, run)]
