"""cuBLAS through torch.mm and through cuBLASLt's own list of algorithms, with both orientations of the dense weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from benchmarks.harness import Contender, launches_for
from benchmarks.layer import Layer
from benchmarks.operands import to_torch
from benchmarks.report import failure
from benchmarks.rivals.common import check, fastest
from benchmarks.rivals.cublaslt import CublasLt

#: Orientations of the weight: (K, N), or the transpose of (N, K).
ORIENTATIONS = ("kn", "nk")
#: Number of algorithms requested from cuBLASLt for each orientation, in cuBLASLt's order of expected speed.
ALGORITHMS = 16
#: Minimum M at which launches take at least a millisecond and the first few algorithms are equally fast, and number of
#: algorithms to request for these M.
FEWER_FROM, FEWER_ALGORITHMS = 2048, 6
WORKSPACE_BYTES = 32 << 20


class Cublas:
    """cuBLAS on one layer. ``errors`` contains cuBLASLt if only cuBLASLt cannot run."""

    name = "cublas"

    def __init__(self, layer: Layer, m_values: Sequence[int], lt: CublasLt | None = None) -> None:
        import torch

        self.layer, self.errors = layer, dict[str, str]()
        self.x = to_torch(layer.x)
        self.out = torch.zeros((len(layer.x), layer.n), dtype=self.x.dtype, device=self.x.device)
        self.weights = {
            "kn": [weight.view(layer.k, layer.n) for weight in layer.dense],
            "nk": [weight.view(layer.n, layer.k).t() for weight in layer.dense],
        }
        self.workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=self.x.device)
        self.lt = lt
        if lt is None:
            try:
                torch.mm(self.x[:1], self.weights["kn"][0], out=self.out[:1])  # Importing torch loads the library.
                self.lt = CublasLt()
            except Exception as error:
                self.errors["cublaslt"] = failure(error)

    def contenders(self, stream: Any, m: int, count: int) -> list[Contender]:
        """Return the ``count`` fastest of torch.mm and cuBLASLt's algorithms, in both orientations."""
        all_ways = [self._torch(m, orientation) for orientation in ORIENTATIONS]
        if self.lt is not None:
            for orientation in ORIENTATIONS:
                try:
                    all_ways += self._lt(self.lt, m, orientation)
                except Exception as error:
                    self.errors["cublaslt"] = failure(error)
        expected_us = self.layer.expected_us(m, self.layer.dense_bytes)
        refused: dict[str, str] = {}
        contenders = fastest(stream, {way.name: partial(_same, way) for way in all_ways}, expected_us, count, refused)
        # An algorithm that cannot run is not an error, but torch.mm must run.
        self.errors |= {name: why for name, why in refused.items() if name.startswith("cublas ")}
        return contenders

    def _torch(self, m: int, orientation: str) -> Contender:
        import torch

        x, out, weights = self.x[:m], self.out[:m], self.weights[orientation]

        def run(index: int) -> None:
            torch.mm(x, weights[index % len(weights)], out=out)

        return self._contender(f"cublas {orientation}", run, m)

    def _lt(self, lt: CublasLt, m: int, orientation: str) -> list[Contender]:
        """Return a contender for each algorithm, and check the result of the first one."""
        layer, weights, out = self.layer, self.weights[orientation], self.out[:m]
        problem = lt.problem(m, layer.n, layer.k, layer.dtype, "RC" if orientation == "nk" else "RR")
        count = ALGORITHMS if m < FEWER_FROM else FEWER_ALGORITHMS
        pointers = [int(weight.data_ptr()) for weight in weights]
        x, target = int(self.x.data_ptr()), int(out.data_ptr())
        space = int(self.workspace.data_ptr())

        def contender(number: int, algorithm: Any) -> Contender:
            def run(index: int) -> None:
                problem.run(
                    algorithm, x, pointers[index % len(pointers)], target, space, WORKSPACE_BYTES, current_stream()
                )

            return self._contender(f"cublaslt {orientation} {number}", run, m)

        algorithms = problem.algorithms(count, WORKSPACE_BYTES)
        contenders = [contender(number, algorithm) for number, algorithm in enumerate(algorithms)]
        if contenders:
            out.zero_()
            contenders[0].run(0)
            check(out, self.x[:m], weights[0])
        return contenders

    def _contender(self, name: str, run: Callable[[int], None], m: int) -> Contender:
        layer = self.layer
        count, nbytes = len(layer.dense), layer.dense_bytes
        return Contender(name, run, count, launches_for(nbytes, count, layer.expected_us(m, nbytes)))


def _same(contender: Contender) -> Contender:
    return contender


def current_stream() -> int:
    """Return the handle of CuPy's current stream."""
    import cupy

    return int(cupy.cuda.get_current_stream().ptr)
