"""Libraries that compete with the dense GEMM: torch.mm, cuBLASLt, and optionally DeepGEMM and QuACK.

Each library writes into its own array. A library that is not installed or does not support a product raises an error
with the reason.
"""

from __future__ import annotations

import contextlib
from functools import lru_cache, partial
from typing import Any

from benchmarks.contest import Entrant, Rival
from benchmarks.gemm import CUBLASLT, TORCH, Operands
from benchmarks.rivals.common import fastest
from benchmarks.rivals.cublas import current_stream
from benchmarks.rivals.cublaslt import CublasLt

#: Number of algorithms requested from cuBLASLt, and size of their workspace in bytes.
ALGORITHMS, WORKSPACE_BYTES = 16, 64 << 20
#: Number of algorithms, the fastest of a first pass, that take turns.
FINALISTS = 2


def torch_mm(stream: Any, operands: Operands) -> list[Entrant]:
    import torch

    out = operands.out()

    def run(index: int) -> None:
        a, b = operands.pair(index)
        torch.mm(a, b, out=out)

    return [Entrant(TORCH, operands.contender(TORCH, run), out)]


@lru_cache(maxsize=1)
def _cublaslt() -> CublasLt:
    return CublasLt()


@lru_cache(maxsize=1)
def _workspace() -> Any:
    import torch

    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


def cublaslt(stream: Any, operands: Operands) -> list[Entrant]:
    """Return the fastest of cuBLASLt's proposed algorithms. Raises RuntimeError if no algorithm runs."""
    lt, product, out = _cublaslt(), operands.product, operands.out()
    problem = lt.problem(product.m, product.n, product.k, product.dtype, product.layout)
    pointers = [(int(a.data_ptr()), int(b.data_ptr())) for a, b in zip(operands.a, operands.b, strict=True)]
    target, space = int(out.data_ptr()), int(_workspace().data_ptr())

    def run(algorithm: Any, index: int) -> None:
        a, b = pointers[index % len(pointers)]
        problem.run(algorithm, a, b, target, space, WORKSPACE_BYTES, current_stream())

    algorithms = problem.algorithms(ALGORITHMS, WORKSPACE_BYTES)
    makers, details, errors = {}, dict[str, str](), dict[str, str]()
    for number, algorithm in enumerate(algorithms, 1):
        name, detail = f"{CUBLASLT} {number}", f"algorithm {number} of {len(algorithms)}"
        makers[name] = partial(operands.contender, name, partial(run, algorithm))
        with contextlib.suppress(Exception):  # Older libraries have fewer attributes.
            detail += f": {lt.describe(algorithm)}"
        details[name] = detail
    contenders = fastest(stream, makers, product.expected_us, FINALISTS, errors)
    if not contenders:
        raise RuntimeError(next(iter(errors.values()), "none of the proposed algorithms runs"))
    return [Entrant(CUBLASLT, contender, out, details[contender.name]) for contender in contenders]


def deepgemm(stream: Any, operands: Operands) -> list[Entrant]:
    """Return the entrant for DeepGEMM's bf16 kernel, which takes b as (N, K)."""
    import deep_gemm

    if operands.product.dtype != "bfloat16":
        raise TypeError("DeepGEMM supports bf16 but not fp16")
    out = operands.out()

    def run(index: int) -> None:
        a, b = operands.pair(index)
        deep_gemm.bf16_gemm_nt(a, b.T, out)

    run(0)  # Compile outside of captures.
    return [Entrant("DeepGEMM", operands.contender("DeepGEMM", run), out)]


def quack(stream: Any, operands: Operands) -> list[Entrant]:
    """Return the entrant for QuACK's dense GEMM, which is tuned at the first call."""
    from quack.gemm_interface import gemm

    out = operands.out()

    def run(index: int) -> None:
        a, b = operands.pair(index)
        gemm(a, b, out=out, tuned=True)

    run(0)
    return [Entrant("QuACK", operands.contender("QuACK", run), out)]


#: Libraries that are measured in every run, by their names in the table.
ALWAYS: dict[str, Rival] = {TORCH: torch_mm, CUBLASLT: cublaslt}
#: Values of --rivals, each with its name in the table, its package and its function.
OPTIONAL: dict[str, tuple[str, str, Rival]] = {
    "deepgemm": ("DeepGEMM", "deep_gemm", deepgemm),
    "quack": ("QuACK", "quack", quack),
}
