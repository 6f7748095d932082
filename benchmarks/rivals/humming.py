"""Humming (package humming-kernels): W4A16 kernels compiled for each layer and M by its own heuristics."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Sequence
from typing import Any

from benchmarks.harness import Contender, copies_for, launches_for
from benchmarks.layer import Layer
from benchmarks.operands import GROUP_SIZE, filled, packed_bytes, random_words, to_torch
from benchmarks.plan import expected_us
from benchmarks.rivals.check import check
from benchmarks.rivals.tinygemm import abs_scales


class Humming:
    """A HummingLayer in as many copies as it takes to leave L2. Raises ImportError where the package is absent."""

    name = "humming"

    def __init__(self, layer: Layer, m_values: Sequence[int]) -> None:
        import cupy
        import torch
        from humming.layer import HummingLayer

        self.layer, self.errors = layer, dict[str, str]()
        k, n = layer.k, layer.n
        self.x = to_torch(layer.x)
        self.out = torch.zeros((len(layer.x), n), dtype=self.x.dtype, device=self.x.device)
        first = HummingLayer(
            shape_n=n,
            shape_k=k,
            weight_config={"dtype": "int4", "group_size": GROUP_SIZE},
            torch_dtype=self.x.dtype,
        ).cuda()
        # Eight codes a word along K; any code is a valid weight. Scales in a band like that of our own weights.
        codes = filled(cupy, (n, k // 8), random_words(cupy, 1 << 20, 6)).view(cupy.int32)
        tensors = {
            "weight": torch.as_tensor(codes, device="cuda"),
            "weight_scale": to_torch(filled(cupy, (n, k // GROUP_SIZE), abs_scales(cupy, layer.dtype))),
        }
        #: (K, N), as Humming's own dequantisation has it.
        self.reference = first.weight_schema.dequant_tensors(tensors).to(self.x.dtype).t()
        first.load_from_tensors(tensors)
        first.transform()
        copies = copies_for(packed_bytes(k, n))
        self.layers = [first, *(copy.deepcopy(first) for _ in range(copies - 1))]
        self._compile_together(m_values)

    def tuning(self, m: int) -> Any:
        """What its heuristic chooses for M = ``m``."""
        from humming.tune import get_heuristics_config

        return get_heuristics_config(layer_config=self.layers[0].humming_config, shape_m=m)

    def _compile_together(self, m_values: Sequence[int]) -> None:
        """Its kernels for all these M at once, on all cores. Where that fails, each compiles when it is used."""
        with contextlib.suppress(Exception):
            from humming.kernel.humming import HummingKernel

            configs = {json.dumps(self.tuning(m), sort_keys=True) for m in m_values}
            ranges = [[0, 1 << 30, json.loads(config)] for config in sorted(configs)]
            HummingKernel.prepare_kernels(self.layers[0].humming_config.to_str(), None, ranges)

    def contenders(self, stream: Any, m: int, count: int) -> list[Contender]:
        x, out, layers = self.x[:m], self.out[:m], self.layers
        tuning = json.dumps(self.tuning(m))

        def run(index: int) -> None:
            layers[index % len(layers)](x, outputs=out, tuning_config=tuning)

        out.zero_()
        run(0)
        check(out, x, self.reference)
        nbytes = packed_bytes(self.layer.k, self.layer.n)
        return [Contender(self.name, run, len(layers), launches_for(nbytes, len(layers), self._expected(m)))]

    def _expected(self, m: int) -> float:
        return expected_us(self.layer.k, self.layer.n, m)
