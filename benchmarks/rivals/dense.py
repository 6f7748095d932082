"""Rivals of the dense GEMM: torch.mm, the best of cuBLASLt's algorithms, CuPy; on request Triton, DeepGEMM and QuACK.

Each writes into an array of its own. A rival that is not installed, or does not take a product, raises the reason.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

from benchmarks.gemm_products import Operands
from benchmarks.harness import quick
from benchmarks.rivals.cublas import current_stream
from benchmarks.rivals.cublaslt import CublasLt
from benchmarks.turns import Entrant, Rival

TORCH, CUBLASLT, CUPY = "torch.mm", "cuBLASLt", "CuPy"
#: Algorithms asked of cuBLASLt, and the workspace that they may use.
ALGORITHMS, WORKSPACE_BYTES = 16, 64 << 20
#: Of those, and of Triton's configurations, the fastest in a first pass take part in the turns; the faster one counts.
FINALISTS = 2
#: A graph of the first pass takes about this long.
_FIRST_PASS_US = 1000.0
#: Launches by calls: so many at most, and two turns of no more than the driver queues without waiting.
_CALLS, _QUEUED_CALLS = 200, 1000


def torch_mm(stream: Any, operands: Operands) -> list[Entrant]:
    import torch

    out = operands.out()

    def run(index: int) -> None:
        a, b = operands.pair(index)
        torch.mm(a, b, out=out)

    return [Entrant(TORCH, operands.contender(TORCH, run), out)]


def cupy_matmul(stream: Any, operands: Operands) -> list[Entrant]:
    """CuPy refuses to capture its cuBLAS calls: they are enqueued behind a delay."""
    import cupy
    import torch

    out = operands.out()
    pairs = [(_as_cupy(a), _as_cupy(b)) for a, b in zip(operands.a, operands.b, strict=True)]
    to = _as_cupy(out)

    def run(index: int) -> None:
        cupy.matmul(*pairs[index % len(pairs)], out=to)

    def delay(us: float) -> None:
        torch.cuda._sleep(int(2000 * us))  # clocks, at 2 GHz

    contender = operands.contender(CUPY, run, delay, _CALLS)
    if 2 * contender.launches > _QUEUED_CALLS:
        raise RuntimeError(f"{contender.launches} calls, which cannot be captured, do not fit into the driver's queue")
    run(0)  # raises where CuPy has no product of this type
    return [Entrant(CUPY, contender, out)]


def _as_cupy(tensor: Any) -> Any:
    """A CuPy array over the memory of a torch tensor of 16-bit floats."""
    import cupy
    import torch

    from cudatma.dtypes import BFLOAT16

    kind = BFLOAT16 if tensor.dtype == torch.bfloat16 else "float16"
    return cupy.asarray(tensor.view(torch.int16)).view(kind)


@lru_cache(maxsize=1)
def _cublaslt() -> CublasLt:
    return CublasLt()


@lru_cache(maxsize=1)
def _workspace() -> Any:
    import torch

    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


def cublaslt(stream: Any, operands: Operands) -> list[Entrant]:
    """The fastest of the algorithms that cuBLASLt's heuristic returns."""
    lt, product, out = _cublaslt(), operands.product, operands.out()
    problem = lt.problem(product.m, product.n, product.k, product.dtype, product.layout)
    pointers = [(int(a.data_ptr()), int(b.data_ptr())) for a, b in zip(operands.a, operands.b, strict=True)]
    to, space = int(out.data_ptr()), int(_workspace().data_ptr())

    def run(algorithm: Any, index: int) -> None:
        a, b = pointers[index % len(pointers)]
        problem.run(algorithm, a, b, to, space, WORKSPACE_BYTES, current_stream())

    algorithms = problem.algorithms(ALGORITHMS, WORKSPACE_BYTES)
    count = len(algorithms)
    candidates = {f"algorithm {number} of {count}": partial(run, each) for number, each in enumerate(algorithms, 1)}
    configurations = {}
    with contextlib.suppress(Exception):  # an older library names fewer attributes
        configurations = {name: lt.described(each) for name, each in zip(candidates, algorithms, strict=True)}
    found = fastest(stream, operands, CUBLASLT, candidates, out)
    return [
        Entrant(each.rival, each.contender, out, f"{each.detail}: {configurations.get(each.detail, 'unknown')}")
        for each in found
    ]


def triton(stream: Any, operands: Operands) -> list[Entrant]:
    """The fastest configurations of a persistent kernel with tensor descriptors."""
    from benchmarks.rivals.triton_matmul import variants

    out = operands.out()
    return fastest(stream, operands, "Triton", variants(operands, out), out)


def deepgemm(stream: Any, operands: Operands) -> list[Entrant]:
    """DeepGEMM's bf16 kernel, which takes b as (N, K)."""
    import deep_gemm

    if operands.product.dtype != "bfloat16":
        raise TypeError("DeepGEMM multiplies bf16, not fp16")
    out = operands.out()

    def run(index: int) -> None:
        a, b = operands.pair(index)
        deep_gemm.bf16_gemm_nt(a, b.T, out)

    run(0)  # compiles, outside of any capture
    return [Entrant("DeepGEMM", operands.contender("DeepGEMM", run), out)]


def quack(stream: Any, operands: Operands) -> list[Entrant]:
    """QuACK's dense GEMM, autotuned by itself."""
    from quack.gemm_interface import gemm

    out = operands.out()

    def run(index: int) -> None:
        a, b = operands.pair(index)
        gemm(a, b, out=out, tuned=True)

    run(0)
    return [Entrant("QuACK", operands.contender("QuACK", run), out)]


#: In every run, by the names that the table has.
ALWAYS: dict[str, Rival] = {TORCH: torch_mm, CUBLASLT: cublaslt, CUPY: cupy_matmul}
#: By the names that --rivals takes: how the table calls them, the package that has to be there, and the function.
OPTIONAL: dict[str, tuple[str, str, Rival]] = {
    "triton": ("Triton", "triton", triton),
    "deepgemm": ("DeepGEMM", "deep_gemm", deepgemm),
    "quack": ("QuACK", "quack", quack),
}


def fastest(
    stream: Any, operands: Operands, rival: str, candidates: Mapping[str, Callable[[int], object]], out: Any
) -> list[Entrant]:
    """The fastest of a rival's candidates in a short run of each. Raises RuntimeError where none runs."""
    launches = operands.product.launches(operands.copies, graph_us=_FIRST_PASS_US)
    took: dict[str, float] = {}
    reasons: list[str] = []
    for detail, run in candidates.items():
        measured = quick(stream, operands.contender(detail, run), launches)
        if (us := measured.us(detail)) is not None:
            took[detail] = us
        reasons += measured.errors.values()
    if not took:
        raise RuntimeError(reasons[0] if reasons else "nothing that runs was proposed")
    return [_entrant(operands, rival, detail, candidates[detail], out) for detail in best(took)]


def best(took: dict[str, float], count: int = FINALISTS) -> Sequence[str]:
    """The names of the least, the least first."""
    return sorted(took, key=lambda name: took[name])[:count]


def _entrant(operands: Operands, rival: str, detail: str, run: Callable[[int], object], out: Any) -> Entrant:
    return Entrant(rival, operands.contender(f"{rival} {detail}", run), out, detail)
