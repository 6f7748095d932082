"""Operands and references of the Marlin GEMM on a GPU: weights of known integers, poison, float64, comparison."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from marlin_builders import BY_CP_ASYNC

from cudatma import context
from cudatma.dtypes import activation_type
from cudatma.kernels import choice
from cudatma.kernels.engine import launch_of
from cudatma.kernels.gpu import gpu_of
from cudatma.kernels.marlin import gemm as marlin
from cudatma.kernels.marlin.arguments import gemm_arguments
from cudatma.kernels.marlin.candidates import choose_mma_sync
from cudatma.kernels.marlin.config import MarlinConfig
from cudatma.kernels.marlin.gemm import MARLIN_GEMM, weight_of
from cudatma.kernels.marlin.problem import Problem
from cudatma.kernels.tuning import pinned
from cudatma.quantization import PackedWeight, pack, quantize

DTYPES = ("float16", "bfloat16")
#: Load paths of the mma.sync kernel.
LOAD_PATHS: dict[str, dict[str, str]] = {
    "tma": {},
    "cp_async": BY_CP_ASYNC,
    **{f"{operand} by cp_async": {f"{operand}_load_path": "cp_async"} for operand in ("scale", "weight", "activation")},
}
#: ||out - reference|| / ||reference||.
TOLERANCE = {"float16": 1e-3, "bfloat16": 6e-3}
#: Of one element: (in units of the reference's root mean square, relative to the element). One wrong element in a large
#: result would not show in the norm. The second is two roundings, of the weight and of the result.
ELEMENT_TOLERANCE = {"float16": (5e-3, 2.0**-10), "bfloat16": (4e-2, 2.0**-7)}
#: A NaN in both types: what a kernel forgets to write, or reads where it should not, spoils the norm.
POISON = 0xFFFF
#: Random values are taken in turn from a pool whose length is prime, so that no two rows or columns are equal.
_POOL_ELEMS = 1_048_573
#: Keeps 0 / 0 from being a NaN where a reference is zero altogether, as a 1 x 1 weight may be.
_TINY = 1e-200


@contextmanager
def use_load_path(weight: PackedWeight, m: int, load_path: str) -> Iterator[None]:
    """While the context is active, a GEMM with M = ``m`` runs the mma.sync kernel with one of LOAD_PATHS. "tma" keeps
    the usual choice."""
    if load_path == "tma" or not m:  # a call without rows launches nothing
        yield
        return
    with pinned(choose_mma_sync(Problem.of(weight, m), gpu_of(context.current_device()), **LOAD_PATHS[load_path])):
        yield


def serve_with(monkeypatch: pytest.MonkeyPatch, choose: Callable[..., MarlinConfig]) -> list[MarlinConfig]:
    """Make each GEMM run the config that ``choose(problem, gpu)`` returns. Returns a list to which each planned config
    is added."""
    planned: list[MarlinConfig] = []

    def noted(problem: Problem, config: MarlinConfig, *others: Any) -> Any:
        planned.append(config)
        return gemm_arguments(problem, config, *others)

    monkeypatch.setattr(marlin, "choose", lambda family, problem, gpu, memo: choose(problem, gpu))
    monkeypatch.setattr(marlin, "gemm_arguments", noted)
    choice.forget()
    return planned


def partials_bytes(weight: PackedWeight, m: int) -> int:
    """Return the bytes of partial sums that a GEMM leaves in the workspace: 0 if no CTAs share a tile there."""
    launch = launch_of(MARLIN_GEMM, Problem.of(weight, m), weight.device or 0, 0, weight=weight_of(weight))
    return launch.partials_bytes or 0


@dataclass(frozen=True, slots=True)
class Options:
    """All options of a case except the shape. load_path: a key of LOAD_PATHS."""

    dtype: str = "float16"
    group_size: int = 128
    symmetric: bool = True
    load_path: str = "tma"
    act_order: bool = False
    bias: bool = False
    format: str = "int4"


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """packed: on the GPU. dense: the same values as float64 (K, N) in the order of the activations' columns, computed
    from the integers that were packed and not from the packed layout."""

    packed: PackedWeight
    dense: Any


@dataclass(frozen=True, slots=True)
class Outcome:
    """error: relative, in norm. element: the worst element's error as a part of what is allowed. untouched: whether the
    rows after the result kept their poison."""

    error: float
    element: float
    untouched: bool

    def problem(self, dtype: str) -> str:
        """Description of what is wrong, or "". A NaN counts as greater than any tolerance."""
        found = [] if self.untouched else ["rows behind the result were written"]
        if not self.error <= TOLERANCE[dtype]:
            found.append(f"relative error {self.error:.3g}, allowed {TOLERANCE[dtype]:g}")
        if not self.element <= 1:
            found.append(f"one element is off by {self.element:.3g} times what is allowed")
        return "; ".join(found)


@lru_cache(maxsize=4)
def _pool(kind: str) -> Any:
    """On the GPU: "values": uint8 0..15; a dtype's name: the bits of normal values of that type."""
    import cupy

    rng = np.random.default_rng(20)
    if kind == "values":
        return cupy.asarray(rng.integers(0, 16, _POOL_ELEMS, dtype=np.uint8))
    normal = rng.standard_normal(_POOL_ELEMS, dtype=np.float32)
    return cupy.asarray(normal.astype(activation_type(kind).numpy).view(np.uint16))


def _drawn(kind: str, shape: tuple[int, ...], seed: int) -> Any:
    import cupy

    places = cupy.arange(math.prod(shape), dtype=np.int64) + 7919 * seed
    return _pool(kind)[places % _POOL_ELEMS].reshape(shape)


def activations(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Any:
    """Normal values on the GPU."""
    return _drawn(dtype, shape, seed).view(activation_type(dtype).numpy)


def make_weight(k: int, n: int, options: Options = Options(), seed: int = 0) -> Weight:
    """Return a weight of random integers with zero points 0 to 16. Its scales differ by up to a factor of three and
    bring results close to 1. Weights of other formats than int4 are quantized normal values."""
    import cupy

    if options.format != "int4":
        dense = activations((k, n), "float16", seed).astype(np.float32) / math.sqrt(k)
        packed = quantize(dense, format=options.format, group_size=options.group_size, dtype=options.dtype)
        return Weight(packed, cupy.asarray(packed.dequantize().astype(np.float64)))
    rng = np.random.default_rng((k, n, seed))
    groups = 1 if options.group_size == -1 else -(-k // options.group_size)
    q = _drawn("values", (k, n), seed)
    scales = rng.uniform(0.5, 1.5, (groups, n)) / (4.8 * math.sqrt(k))
    scales = scales.astype(activation_type(options.dtype).numpy)
    zeros = None if options.symmetric else rng.integers(0, 17, (groups, n), dtype=np.uint8)
    perm = rng.permutation(k) if options.act_order else None
    packed = pack(q, scales, zeros, group_size=options.group_size, perm=perm)
    dense = q.astype(np.float64)
    size = k if groups == 1 else options.group_size
    for group in range(groups):
        rows = dense[group * size : (group + 1) * size]
        rows -= 8 if zeros is None else cupy.asarray(zeros[group].astype(np.float64))
        rows *= cupy.asarray(scales[group].astype(np.float64))
    if perm is not None:
        ordered = cupy.empty_like(dense)
        ordered[cupy.asarray(perm)] = dense
        dense = ordered
    return Weight(packed, dense)


def make_bias(n: int, dtype: str) -> Any:
    return activations((n,), dtype, seed=5)


def bits(array: Any) -> Any:
    return array.view(np.uint16)


def differences(out: Any, wanted: Any) -> Any:
    """Count, on the GPU, elements whose bits differ."""
    return (bits(out) != bits(wanted)).sum()


def new_stream() -> Any:
    """Wait for the work in the default stream, and return a stream that does not wait for the default stream."""
    import cupy

    cupy.cuda.Device().synchronize()
    return cupy.cuda.Stream(non_blocking=True)


def to_float64(array: Any) -> Any:
    """Convert fp16 or bf16 on the GPU to float64. bf16 is converted from its bits, because not every CuPy supports
    it."""
    if array.dtype == np.float16:
        return array.astype(np.float64)
    return (bits(array).astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def poisoned(shape: tuple[int, ...], dtype: str) -> Any:
    import cupy

    return cupy.full(shape, POISON, np.uint16).view(activation_type(dtype).numpy)


def is_poison(array: Any) -> bool:
    """Return whether no element has changed since poisoned(). An array without elements gives True."""
    return bool((bits(array) == POISON).all())


def compare(out: Any, reference: Any, untouched: bool = True) -> Outcome:
    """Compare out (fp16 or bf16) with float64, both on the GPU. Synchronizes."""
    import cupy

    if out.size == 0:
        return Outcome(0.0, 0.0, untouched)
    near, relative = ELEMENT_TOLERANCE[out.dtype.name]
    difference = cupy.abs(to_float64(out) - reference)
    power = (reference * reference).sum() + _TINY
    allowed = near * cupy.sqrt(power / out.size) + relative * cupy.abs(reference)
    error = cupy.sqrt((difference * difference).sum() / power)
    return Outcome(float(error), float((difference / allowed).max()), untouched)
