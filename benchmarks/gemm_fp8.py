"""Time scaled fp8 products with `gemm`, torch's scaled_mm (cuBLASLt) and DeepGEMM, with one scale per tensor or block.

A (M, K) is row-major, and B (K, N) is column-major. Both are float8_e4m3fn, and the result is bf16. Blocks are 1 x 128
in A and 128 x 128 in B, as in DeepSeek-V3. All contenders with the same kind of scales read bitwise identical operands.
Before the measurement, the scales are converted to the layout that each contender requires.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.contest import (
    AUTO,
    BEST,
    Entrant,
    Rival,
    add_errors,
    add_times,
    chosen_results,
    find_entrants,
    measure_calls,
    present,
    summary_line,
    times_as_fast,
    with_best,
)
from benchmarks.gemm import Product, errors, rates_line, size_of, tflops
from benchmarks.harness import Contender, Method, measuring_stream
from benchmarks.report import Cell, Result, Table, shown
from cudatma.kernels.gemm.gemm import gemm

FP8 = "float8_e4m3fn"
#: (M, N, K) of the layers of DeepSeek-V3 in DeepGEMM's README, and of a layer with few rows.
SHAPES = ((4096, 7168, 16384), (4096, 24576, 1536), (4096, 4096, 7168), (64, 7168, 16384))
TENSOR, BLOCK = "tensor", "1x128, 128x128"
SCALINGS = (TENSOR, BLOCK)
FAST, EXACT, TORCH_BLOCK, DEEPGEMM = "scaled_mm fast", "scaled_mm", "scaled_mm blocks", "DeepGEMM"
RIVALS = (EXACT, FAST, TORCH_BLOCK, DEEPGEMM)
#: Allowed error relative to the product's root mean square. Tensor cores add fp8 products with reduced precision.
ALLOWED = 2e-2
_BLOCK, _LARGEST = 128, 448.0
#: Ratio of the rates of fp8 and fp16, for estimating times.
_TWICE = 2


@dataclass(frozen=True, slots=True)
class Fp8Product(Product):
    """A product and the scaling of its operands."""

    scaling: str = TENSOR

    def __str__(self) -> str:
        return f"{self.m} x {self.n} x {self.k} {self.dtype}, scales: {self.scaling}"

    @property
    def expected_us(self) -> float:
        return super(Fp8Product, self).expected_us / _TWICE


def quantized(matrix: Any, rows: int, columns: int) -> tuple[Any, Any]:
    """Quantize a matrix (R, C) to float8_e4m3fn and float32 scales (R / rows, C / columns), one per block."""
    import torch

    blocks = matrix.float().view(matrix.shape[0] // rows, rows, matrix.shape[1] // columns, columns)
    scales = blocks.abs().amax((1, 3)).clamp(1e-4) / _LARGEST
    values = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return values.view(matrix.shape), scales


def widened(values: Any, scales: Any) -> Any:
    """Return values times scales in float32. The shape of the scales determines the block size."""
    rows, columns = (values.shape[axis] // scales.shape[axis] for axis in (0, 1))
    return values.float() * scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)


class Fp8Operands:
    """Operands and scales of one product.

    b is (K, N), column-major. b_scale has shape (K / 128, N / 128) or, like a_scale, one element. ``wide`` holds the
    operands times their scales, in float32.
    """

    def __init__(self, product: Fp8Product, is_cold: bool) -> None:
        import torch

        self.product, self.copies = product, product.copies(is_cold)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        m, n, k = product.m, product.n, product.k
        rows, weight = torch.randn((m, k), device=device), torch.randn((n, k), device=device)
        whole = product.scaling == TENSOR
        a, self.a_scale = quantized(rows, m if whole else 1, k if whole else _BLOCK)
        b, b_scale = quantized(weight, n if whole else _BLOCK, k if whole else _BLOCK)
        self.b_scale = b_scale.T.contiguous()
        self.a = [a, *(a.clone() for _ in range(self.copies - 1))]
        self.b = [each.T for each in (b, *(b.clone() for _ in range(self.copies - 1)))]

    @property
    def wide(self) -> tuple[Any, Any]:
        return widened(self.a[0], self.a_scale), widened(self.b[0], self.b_scale)

    @property
    def a_scale_columns(self) -> Any:
        """The scales of a in column-major order, the fastest layout for all contenders."""
        return self.a_scale.T.contiguous().T

    def pair(self, index: int) -> tuple[Any, Any]:
        return self.a[index % self.copies], self.b[index % self.copies]

    def entrant(self, name: str, call: Callable[[Any, Any, Any], object]) -> Entrant:
        """Return an entrant that is called with a, b and its own result array, initially filled with NaN."""
        import torch

        shape = self.product.m, self.product.n
        out = torch.full(shape, math.nan, dtype=torch.bfloat16, device=self.a[0].device)

        def run(index: int) -> None:
            call(*self.pair(index), out)

        return Entrant(name, Contender(name, run, self.copies, self.product.launches(self.copies)), out)


def ours(operands: Fp8Operands) -> Entrant:
    scales = {"a_scale": operands.a_scale_columns, "b_scale": operands.b_scale}
    if operands.product.scaling == TENSOR:
        scales = {name: scale.reshape(()) for name, scale in scales.items()}
    options: dict[str, Any] = {**scales, "out_dtype": "bfloat16"}

    def call(a: Any, b: Any, out: Any) -> object:
        return gemm(a, b, out=out, **options)

    return operands.entrant(AUTO, call)


def scaled_mm(operands: Fp8Operands, *, fast: bool) -> list[Entrant]:
    """Return the entrants for torch._scaled_mm with one scale per tensor. ``fast`` sets ``use_fast_accum``."""
    import torch

    a_scale, b_scale = operands.a_scale.reshape(()), operands.b_scale.reshape(())

    def call(a: Any, b: Any, out: Any) -> object:
        return torch._scaled_mm(
            a, b, scale_a=a_scale, scale_b=b_scale, out_dtype=torch.bfloat16, use_fast_accum=fast, out=out
        )

    return [operands.entrant(FAST if fast else EXACT, call)]


def scaled_mm_blocks(operands: Fp8Operands) -> list[Entrant]:
    """Return cuBLASLt's block scaling through torch, with the columns of B's scales padded to a multiple of four."""
    import torch
    from torch.nn.functional import ScalingType

    recipes = [[int(kind.value)] for kind in (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128)]
    a_scale = operands.a_scale_columns
    along_k, along_n = operands.b_scale.shape
    padded = torch.zeros((along_n, -(-along_k // 4) * 4), dtype=torch.float32, device=a_scale.device)
    padded[:, :along_k] = operands.b_scale.T

    # Scales, recipes and swizzles of a, then of b. There is no bias.
    options: tuple[Any, ...] = ([a_scale], recipes[0], [], [padded.T], recipes[1], [], None, torch.bfloat16)

    def call(a: Any, b: Any, out: Any) -> object:
        return torch.ops.aten._scaled_mm_v2.out(a, b, *options, out=out)

    return [operands.entrant(TORCH_BLOCK, call)]


def deepgemm(operands: Fp8Operands) -> list[Entrant]:
    import deep_gemm

    a_scale = deep_gemm.get_mn_major_tma_aligned_tensor(operands.a_scale)
    b_scale = operands.b_scale.T.contiguous()

    def call(a: Any, b: Any, out: Any) -> object:
        return deep_gemm.fp8_gemm_nt((a, a_scale), (b.T, b_scale), out)

    return [operands.entrant(DEEPGEMM, call)]


def field_of(scaling: str, versions: Mapping[str, str]) -> dict[str, Rival]:
    """Return the competing libraries for this scaling. ``versions`` contains the optional libraries."""
    if scaling == TENSOR:
        return {
            EXACT: lambda _, operands: scaled_mm(operands, fast=False),
            FAST: lambda _, operands: scaled_mm(operands, fast=True),
        }
    optional: dict[str, Rival] = {DEEPGEMM: lambda _, operands: deepgemm(operands)} if DEEPGEMM in versions else {}
    return {TORCH_BLOCK: lambda _, operands: scaled_mm_blocks(operands), **optional}


def measure(stream: Any, product: Fp8Product, versions: Mapping[str, str], method: Method, is_cold: bool) -> Cell:
    """Measure one product with all contenders."""
    operands = Fp8Operands(product, is_cold)
    entrants, refused = find_entrants(stream, operands, field_of(product.scaling, versions))
    entrants.append(ours(operands))
    cell = _facts(product)
    add_times(method, entrants, cell, refused, (AUTO,))
    add_errors(cell, errors(*operands.wide, chosen_results(cell, entrants)), ALLOWED)
    return cell


def _facts(product: Fp8Product) -> Cell:
    return {**product.facts, "scaling": product.scaling, "us": {}}


def fp8_table(cells: Sequence[Cell], operands: str = "") -> Table:
    """Return the TFLOP/s of each contender, and the speedup over the fastest competing library."""
    names = [*present(cells, RIVALS), AUTO]
    rows = []
    for cell in cells:
        rates = [shown(tflops(cell, name), 0) for name in names]
        rows.append((size_of(cell), cell["scaling"], *rates, shown(times_as_fast(with_best(cell, RIVALS), BEST), 3)))
    columns = ("M x N x K", "scales", *names, f"{AUTO} / {BEST}")
    return Table(columns, tuple(rows), f"TFLOP/s; {operands}" if operands else "TFLOP/s")


def fp8_summary(cells: Sequence[Cell]) -> list[str]:
    """Compare ``auto`` with each competing library, for each scaling."""
    groups = {scaling: [cell for cell in cells if cell["scaling"] == scaling] for scaling in SCALINGS}
    return [
        line
        for scaling, members in groups.items()
        for rival in present(members, RIVALS)
        for line in summary_line(f"fp8, scales: {scaling}", members, rival, size_of)
    ]


def run(options: argparse.Namespace, settings: Mapping[str, Any], method_of: Callable[[Any, Product], Method]) -> int:
    """Run the benchmark with ``--fp8`` and return its exit status. ``method_of`` returns a product's timing method."""
    operands, versions = settings["operands"], settings["rivals"]
    result = Result(settings, partial(fp8_table, operands=operands), options.json, fp8_summary)
    products = [Fp8Product(*shape, "RC", FP8, scaling=scaling) for shape in SHAPES for scaling in SCALINGS]
    with measuring_stream() as stream:
        measure_calls(
            result,
            products,
            lambda product: measure(stream, product, versions, method_of(stream, product), options.cold),
            _facts,
            rates_line,
        )
    return result.finish(f"Scaled fp8 GEMM, {operands}")
