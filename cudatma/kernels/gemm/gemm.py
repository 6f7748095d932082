"""The function gemm, which computes c = a b in fp16, bf16 or fp8."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, ClassVar

import numpy as np

from cudatma.arrays import ArrayInfo
from cudatma.backend import backend_for
from cudatma.errors import ArgumentError
from cudatma.kernels.arguments import Arguments, Sizes
from cudatma.kernels.checks import check_backend
from cudatma.kernels.choice import choice_table, choose
from cudatma.kernels.engine import run
from cudatma.kernels.explain import Explanation, explained, explained_gpu
from cudatma.kernels.family import MAX_EXTENT
from cudatma.kernels.gemm.arguments import gemm_arguments, sizes_for
from cudatma.kernels.gemm.choose import GEMM
from cudatma.kernels.gemm.config import VERSIONS, GemmConfig
from cudatma.kernels.gemm.copies import copied, copy_kernels, layouts_up_to, readable
from cudatma.kernels.gemm.matrices import letter_of, matrix_of
from cudatma.kernels.gemm.problem import NO_OPERANDS, NUMPY, SCALE_BLOCK, Problem, call_of, check_call, element_bytes
from cudatma.kernels.gpu import Gpu
from cudatma.kernels.host import host_array
from cudatma.kernels.operation import Checked, Operation
from cudatma.kernels.version import naming
from cudatma.target import Target


def gemm(
    a: Any,
    b: Any,
    *,
    out: Any = None,
    bias: Any = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    activation: str | None = None,
    out_dtype: Any = None,
    a_scale: Any = None,
    b_scale: Any = None,
    batch_invariant: bool = False,
    version: str = "auto",
    backend: str | None = None,
    stream: Any = None,
) -> Any:
    """Compute c = activation(alpha a_scale b_scale a b + beta c + bias) with fp32 accumulation and one rounding.

    There is no backward pass. The function raises an error for tensors that require grad while autograd is recording.

    Parameters
    ----------
    a : array (M, K) or (batch, M, K)
        Left operand in fp16, bf16 or fp8 (float8_e4m3fn, float8_e5m2): a CuPy array, a torch tensor, or an object that
        supports DLPack or ``__cuda_array_interface__``. The emulator also accepts a NumPy array.
    b : array (K, N) or (batch, K, N)
        Right operand, with the same dtype, from the same library and on the same device as ``a``. All matrices in a
        batch of ``a`` may share one matrix ``b``.
    out : array (M, N) or (batch, M, N), optional
        The result c, with contiguous rows. ``out`` is required if ``beta`` is not 0. Default: a new array from the
        library of ``a``.
    bias : array (N,), optional
        Bias with the dtype of the result, which is added to each row.
    alpha, beta : float
        Scalars that multiply the product and the previous values of ``out``.
    activation : str, optional
        ``"relu"``, ``"gelu"`` (computed with erf), ``"gelu_tanh"`` or ``"silu"``.
    out_dtype : dtype, optional
        One of float16, bfloat16 and float32. Default: the dtype of ``out`` if it is given, otherwise the dtype of a, or
        bfloat16 for fp8.
    a_scale, b_scale : float or fp32 array, optional
        One number, or one scale per row (M,) and per column (N,). fp8 on SM90 also supports one scale per block, with
        shapes (M, ceil(K / 128)) and (ceil(K / 128), ceil(N / 128)), preceded by the batch if the matrices have
        different scales. TMA reads the block scales of a if the scales of neighboring rows are adjacent and the scales
        of each block of K begin at a multiple of 16 bytes.
    batch_invariant : bool, default False
        Whether the result of each row is bitwise identical at every M.
    version : {"auto", "v1", ..., "v7", "mma_sync"}
        Version of the kernel (docs/design/gemm.md). ``$CUDATMA_GEMM_VERSION`` or cudatma.toml can also set it.
    backend : str, optional
        Where to run: ``"cuda"``, ``"emulator"``, ``"reference"`` or ``"auto"``; see ``marlin_gemm``.
    stream : stream, optional
        Stream of the launch. Default: the current stream of the library of ``a``.

    Returns
    -------
    array (M, N) or (batch, M, N)
        The result c.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If arguments are invalid or do not match each other.
    TargetError
        If no kernel supports the problem on the GPU.
    LaunchError
        If the first call, or a call that must copy an operand, is made during graph capture.
    CompileError, DriverError, HazardError
        If a kernel does not compile or load, or if the emulator finds a hazard.

    Notes
    -----
    Kernels read row-major and column-major operands whose rows or columns begin at multiples of 16 bytes. fp8 requires
    a row-major a and a column-major b. Other operands are copied first; gemm_explain() reports this.

    wgmma accumulates fp8 products with less than fp32 precision. With block scales, this affects only the sums over 128
    elements of K.

    Examples
    --------
    >>> a, b = np.ones((2, 64), np.float16), np.ones((64, 8), np.float16)
    >>> float(cudatma.gemm(a, b, alpha=0.5, backend="reference")[0, 0])
    32.0
    """
    name, selected_by = VERSIONS.chosen(version)
    inputs, options = call_of(a, b, bias, alpha, beta, activation, out_dtype, a_scale, b_scale, batch_invariant, name)
    with naming(selected_by):
        return run(GEMM_CALL, inputs, out, options, stream, backend)


class Gemm(Operation[Problem, GemmConfig]):
    """Operation of gemm()."""

    name: ClassVar[str] = "gemm"
    inputs: ClassVar[tuple[str, ...]] = ("a", "b", "a_scale", "b_scale", "bias")
    fixed_axes: ClassVar[tuple[int | None, ...]] = (1, None, 1, None, None, 1)

    def check(self, inputs: tuple[Any, ...], out: Any, options: Any, resource: Any) -> Checked[Problem]:
        """Validate a call."""
        return check_call(inputs, out, options)

    def resized(
        self, problem: Problem, shapes: Sequence[Any], strides_bytes: Sequence[Any], size_options: tuple[int, ...]
    ) -> tuple[Problem, tuple[int, ...], None] | None:
        """Return the problem with another M, or None for a batch or for block scales."""
        a, b, a_scale, _, _, out = shapes
        if problem.batch > 1 or len(b) > 2 or problem.block_scales:
            return None
        m = a[0] if len(a) == 2 else a[0] * a[1]
        if m > MAX_EXTENT or (out is not None and out[:-1] != a[:-1]):
            return None
        if problem.layout[0] == "C" and m * element_bytes(problem.dtype) > problem.operands.a.pitch_bytes:
            return None  # The columns of a overlap, or a has only one column.
        if a_scale and a_scale[0] not in (1, m):
            return None
        return problem.with_m(m), (*a[:-1], problem.n), None

    def alignment_masks(self, problem: Problem) -> tuple[int, ...]:
        """Return 15 for arrays that TMA may access, and for other arrays a mask for the alignment of one element."""
        bias = NUMPY[problem.result_dtype].itemsize - 1
        return 15, 15, 15 if problem.block_scales else 3, 3, bias, 15

    def with_readable_inputs(self, checked: Checked[Problem], backend: str, stream: int | None) -> Checked[Problem]:
        """Copy operands that the kernels cannot read."""
        named, problem = self.named(checked), checked.problem
        a, b = (readable(named[field], field, backend, stream) for field in ("a", "b"))
        if a is named["a"] and b is named["b"]:
            return checked
        a_matrix, b_matrix = (matrix_of(info, letter) for info, letter in zip((a, b), problem.layout, strict=True))
        operands = problem.operands._replace(a=a_matrix, b=b_matrix)
        return checked._replace(problem=replace(problem, operands=operands), arrays=(a, b, *checked.arrays[2:]))

    def plan_key(self, problem: Problem) -> Hashable:
        """Return all fields except M, alpha and beta, which are members of the struct."""
        return problem.fixed, problem.operands._replace(alpha=1.0, beta=0.0)

    def configure(self, problem: Problem, gpu: Gpu, memo: dict[Any, Any]) -> GemmConfig:
        """Return the configuration for a problem."""
        return choose(GEMM, problem, gpu, memo)

    def kernels(self, problem: Problem, config: GemmConfig) -> tuple[tuple[str, Any], ...]:
        """Return the template and the configuration of the kernel."""
        return ((config.template, config),)

    def kernels_up_to(self, checked: Checked[Problem], max_m: int, gpu: Gpu) -> Iterator[tuple[str, Any]]:
        """Yield the kernels of each choice table that calls up to ``max_m`` use, and the kernels that copy operands."""
        problem, named = _with_elements(checked), self.named(checked)
        a, b = named["a"], named["b"]
        layouts = list(layouts_up_to(a, max_m))
        letters = sorted({letter_of(layout, "a") for layout in layouts})
        # A batch that shares b becomes one matrix if the layout and the scales of its a allow it.
        batches = sorted({problem.batch, problem.batch if b.strides_bytes[0] else 1})
        # Whether TMA can read A's block scales depends on M, unless the caller pads them.
        by_tma = (False, True) if problem.block_scales else (False,)
        for letter, batch, scales_by_tma in product(letters, batches, by_tma):
            shape = replace(problem, m=1, layout=letter + problem.layout[1], batch=batch, operands=NO_OPERANDS)
            table = choice_table(GEMM, replace(shape, scales_by_tma=scales_by_tma), gpu, max_m)
            yield from ((config.template, config) for config in table.configs_up_to(max_m))
        yield from copy_kernels(layouts, "a", gpu)
        yield from copy_kernels([b], "b", gpu)

    def problems_up_to(self, checked: Checked[Problem], max_m: int, gpu: Gpu) -> Iterable[Problem]:
        """Return one problem for each M up to ``max_m`` at which the configuration may change."""
        problem, operands = checked.problem, checked.problem.operands
        if not (operands.a.is_aligned and operands.b.is_aligned):
            return ()  # The launch reads copies of the operands and therefore has another plan.
        if problem.batch > 1 or problem.block_scales:
            return (problem,)
        return map(problem.with_m, choice_table(GEMM, problem, gpu, max_m).ms_up_to(max_m))

    def arguments(
        self, problem: Problem, config: GemmConfig, gpu: Gpu, resident: tuple[int, ...]
    ) -> tuple[Arguments, ...]:
        """Return the launch arguments of a problem."""
        return (gemm_arguments(problem, config, gpu),)

    def sizes_for(
        self, problem: Problem, config: GemmConfig, gpu: Gpu, resident: tuple[int, ...]
    ) -> Callable[[Problem], tuple[Sizes, ...]]:
        """Return a function that maps a problem to the sizes of its launch."""
        sizes = sizes_for(problem, config, gpu)
        return lambda problem: (sizes(problem),)

    def reference(self, problem: Problem, arrays: Mapping[str, ArrayInfo]) -> None:
        """Compute the result in fp32, and round once."""
        host = {name: host_array(info) for name, info in arrays.items()}
        a, b, out = host["a"].astype(np.float32), host["b"].astype(np.float32), host["out"]
        unit = np.ones((1, 1), np.float32)
        scales = (host.get(name, unit) for name in ("a_scale", "b_scale"))
        a_scale, b_scale = (scale.reshape(1, 1) if scale.size == 1 else scale for scale in scales)
        with np.errstate(all="ignore"):  # Infinities and NaNs are valid results, as on the GPU.
            if problem.block_scales:
                a = a * np.repeat(a_scale, SCALE_BLOCK, -1)[..., : problem.k]
                b_scale = np.repeat(b_scale, SCALE_BLOCK, -1)[..., : problem.n]
                b = b * np.repeat(b_scale, SCALE_BLOCK, -2)[..., : problem.k, :]
                a_scale = b_scale = unit
            values = np.float32(problem.operands.alpha) * (a @ b) * a_scale.reshape(-1, 1) * b_scale.reshape(1, -1)
            if problem.operands.beta:
                values += np.float32(problem.operands.beta) * out.astype(np.float32)
            if "bias" in host:
                values += host["bias"].astype(np.float32)
            out[...] = _activated(values, problem.epilogue).reshape(out.shape).astype(out.dtype)


GEMM_CALL = Gemm()


def gemm_explain(
    a: Any,
    b: Any,
    *,
    out: Any = None,
    bias: Any = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    activation: str | None = None,
    out_dtype: Any = None,
    a_scale: Any = None,
    b_scale: Any = None,
    batch_invariant: bool = False,
    version: str = "auto",
    backend: str | None = None,
    stream: Any = None,
    target: str | Target | None = None,
) -> Explanation:
    """Explain which kernel gemm() would run and its predicted time, without compiling or launching it.

    Parameters
    ----------
    a, b, out, bias, alpha, beta, activation, out_dtype, a_scale, b_scale, batch_invariant, version : arguments
        The arguments of ``gemm``.
    backend, stream : optional
        Ignored. Accepted so that the arguments of ``gemm`` can be passed unchanged.
    target : str or Target, optional
        Target to assume, such as ``"sm_120a"``. Default: the target of the GPU that holds the arrays. For host arrays,
        the default is ``$CUDATMA_TARGET``, or an H200 if this variable is not set.

    Returns
    -------
    Explanation
        The explanation. The predicted time does not include copies of operands.

    Raises
    ------
    ArgumentError, ArgumentTypeError, TargetError
        If the arguments are invalid, if no kernel supports the problem, or if the result has no elements.

    Examples
    --------
    >>> a, b = np.ones((4096, 4096), np.float16), np.ones((4096, 4096), np.float16)
    >>> cudatma.gemm_explain(a, b, version="v4", target="sm_90a").kernel
    'v4'
    """
    name, selected_by = VERSIONS.chosen(version)
    inputs, options = call_of(a, b, bias, alpha, beta, activation, out_dtype, a_scale, b_scale, batch_invariant, name)
    checked = check_call(inputs, out, options)
    named = GEMM_CALL.named(checked)
    left, right = named["a"], named["b"]
    if backend is not None:
        check_backend(left, "a", backend_for("gemm", backend))
    problem = _with_elements(checked)
    gpu = explained_gpu(left.device, target)
    with naming(selected_by):
        explanation = explained(GEMM, problem, gpu)
    why = explanation.decision.why + (f" by {selected_by}" if name else "")
    why += f"; {reasons}" if (reasons := copied(a=left, b=right)) else ""
    return replace(explanation, decision=replace(explanation.decision, why=why))


def _with_elements(checked: Checked[Problem]) -> Problem:
    """Return the problem of a call. Raises ArgumentError if the result has no elements."""
    if checked.problem is None:
        raise ArgumentError(
            "a.shape, b.shape", f"an empty result of shape {checked.shape}", "shapes of operands with a nonempty result"
        )
    return checked.problem


def _activated(x: Any, name: str) -> Any:
    if name == "relu":
        return np.where(x < 0, np.float32(0), x)
    if name == "gelu":
        scaled = np.float32(0.5) * x * (1 + np.vectorize(math.erf, otypes=[np.float32])(x * np.float32(math.sqrt(0.5))))
        return np.where(np.isneginf(x), np.float32(0), scaled)  # The kernels return the same limit.
    if name == "gelu_tanh":
        return (
            np.float32(0.5) * x * (1 + np.tanh(np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x**3)))
        )
    return x / (1 + np.exp(-x)) if name == "silu" else x
