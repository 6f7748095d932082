"""The function marlin_gemm, which computes y = x W + bias with a quantized W."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar, NamedTuple

import numpy as np

from cudatma import context
from cudatma.arrays import ArrayInfo, describe
from cudatma.build.kernel import debugging
from cudatma.descriptor.rules import TMA_ALIGNMENT_BYTES
from cudatma.errors import ArgumentError, ArgumentTypeError
from cudatma.kernels.arguments import Arguments, Sizes
from cudatma.kernels.choice import choice_table, choose
from cudatma.kernels.engine import run
from cudatma.kernels.gpu import Gpu
from cudatma.kernels.host import host_array
from cudatma.kernels.marlin.arguments import copy_sizes, gemm_arguments, sizes_for
from cudatma.kernels.marlin.choose import MARLIN
from cudatma.kernels.marlin.config import MarlinConfig
from cudatma.kernels.marlin.operands import MAX_ROWS, check_bias, check_input, check_output, check_weight
from cudatma.kernels.marlin.permute_columns import ELEMENT_BYTES, PermuteColumnsConfig, choose_copy, permute_arguments
from cudatma.kernels.marlin.permute_columns import TEMPLATE as COPY
from cudatma.kernels.marlin.problem import LinearShape, Problem
from cudatma.kernels.operation import Checked, Operation, Weight
from cudatma.kernels.schedule import Schedule, schedule
from cudatma.kernels.workspace import Workspace, check_workspace
from cudatma.quantization import PackedWeight
from cudatma.target import get_target

#: Name of the attachment in which a weight stores its arrays for launches.
_WEIGHT = "launch"


def marlin_gemm(
    x: Any,
    w: PackedWeight,
    *,
    out: Any = None,
    bias: Any = None,
    stream: Any = None,
    backend: str | None = None,
    workspace: Workspace | None = None,
    programmatic: bool = False,
    batch_invariant: bool = False,
    debug: bool | None = None,
) -> Any:
    """Compute y = x W + bias with a quantized weight and fp32 accumulation.

    Results are bitwise reproducible. The function has no backward pass, so it raises an error for tensors that require
    grad while autograd is recording.

    Parameters
    ----------
    x : array (..., K)
        Activations, fp16 or bf16, with the same dtype and on the same device as the weight: a CuPy array, a torch
        tensor, or an object that supports DLPack or ``__cuda_array_interface__``. The launch waits for the stream in
        ``__cuda_array_interface__``. If the address or the pitch is not a multiple of 16 bytes, or if the weight is in
        activation order, a kernel first copies the activations.
    w : PackedWeight
        The weight (K, N). Use ``w.to_device()`` to move it to a device.
    out : array (..., N), optional
        The result, with the same dtype as ``x``. Default: a new array from the library of ``x``, allocated on the
        stream of the launch.
    bias : array (N,), optional
        Bias with the same dtype as ``x``, which is added to each row.
    stream : stream, optional
        Stream of the launch. Default: the current stream of the library of ``x``.
    backend : str, optional
        Where to run. ``"cuda"`` runs on the GPU. For host arrays, ``"emulator"`` runs the generated kernel slowly on
        the CPU and raises an error if it finds a hazard, and ``"reference"`` computes with NumPy. ``"auto"`` selects
        the GPU, or the emulator with a BackendWarning if there is no GPU. Default: ``$CUDATMA_BACKEND`` if it is set,
        otherwise ``"auto"``.
    workspace : Workspace, optional
        Memory for partial sums and copied activations. It must outlive every captured graph that uses it. Default: the
        stream's workspace; during capture, one workspace per graph branch, which is freed with the graph.
    programmatic : bool, default False
        Whether to use programmatic dependent launch. The GEMM may then read the weight and the bias before the previous
        kernel has completed, so the previous kernel must not write them. The GEMM accesses activations, workspace and
        out only after the previous kernel has completed.
    batch_invariant : bool, default False
        Whether the result of each row is bitwise identical at every M, at the cost of speed.
    debug : bool, optional
        Whether to run debug builds, whose waits time out and report the barrier (docs/howto/debug_a_hang.md). The call
        then waits for the kernels. Default: the setting of ``cudatma.debugging()``, or of ``$CUDATMA_DEBUG`` at the
        first call of a kind.

    Returns
    -------
    array (..., N)
        The result y.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If a shape, dtype, device or layout is invalid, or if arrays overlap.
    LaunchError
        If the first call is made during graph capture, or if the process was forked.
    TargetError, CompileError, DriverError
        If no kernel exists for the GPU, or if a kernel does not compile or load.
    HazardError
        If the emulator finds a hazard.
    PipelineHang
        If a wait times out in a debug kernel.

    Examples
    --------
    >>> w = cudatma.quantize(np.ones((128, 64), np.float32), group_size=128)
    >>> x = np.ones((1, 128), np.float16)
    >>> cudatma.marlin_gemm(x, w, backend="reference").shape
    (1, 64)
    """
    options = _NO_OPTIONS
    if programmatic is not False or batch_invariant is not False:
        options = MarlinOptions(programmatic, batch_invariant)
        for name, flag in options._asdict().items():
            if not isinstance(flag, bool):
                raise ArgumentTypeError(name, type(flag).__name__, "bool")
    space = None if workspace is None else check_workspace(workspace, check_weight(w).device or 0)
    try:
        weight = w.attachments[_WEIGHT]
    except (AttributeError, KeyError):
        weight = None
    if weight is None:
        weight = weight_of(w)
    if debug is None:
        return run(MARLIN_GEMM, (x, bias), out, options, stream, backend, weight, w, space)
    with debugging(debug):
        return run(MARLIN_GEMM, (x, bias), out, options, stream, backend, weight, w, space)


class MarlinOptions(NamedTuple):
    """Options of marlin_gemm, which are part of a call's key."""

    programmatic: bool
    batch_invariant: bool


#: Options of most calls, created once because creating a tuple takes as long as finding the call.
_NO_OPTIONS = MarlinOptions(programmatic=False, batch_invariant=False)


@dataclass(frozen=True, slots=True)
class Config:
    """Kernels of a call.

    Attributes
    ----------
    gemm : MarlinConfig
        The GEMM, in the form that the weight's scales allow.
    copy : PermuteColumnsConfig or None
        The copy kernel for activations, or None.
    """

    gemm: MarlinConfig
    copy: PermuteColumnsConfig | None


class MarlinGemm(Operation[Problem, Config]):
    """Operation of marlin_gemm()."""

    name: ClassVar[str] = "marlin_gemm"
    inputs: ClassVar[tuple[str, ...]] = ("x", "bias")
    weight_arrays: ClassVar[tuple[str, ...]] = ("qweight", "scales", "zeros", "perm")
    fixed_axes: ClassVar[tuple[int | None, ...]] = (1, None, 1)

    def check(self, inputs: tuple[Any, ...], out: Any, options: Any, resource: Any) -> Checked[Problem]:
        """Validate a call. ``options`` is a MarlinOptions object, and ``resource`` the weight."""
        w, (x, bias) = resource, inputs
        rows = check_input(x, w)
        shape = *rows.info.shape[:-1], w.shape[1]
        result = None if out is None else check_output(out, rows, w)
        addend = None if bias is None else check_bias(bias, w, None if result is None else result.info)
        problem = Problem.of(
            w,
            max(rows.rows, 1),
            batch_invariant=options.batch_invariant,
            x_pitch_bytes=rows.pitch_bytes,
            out_pitch_bytes=w.shape[1] * ELEMENT_BYTES if result is None else result.pitch_bytes,
            has_aligned_x=rows.is_aligned,
            has_aligned_out=w.shape[1] % 8 == 0 if result is None else result.is_aligned,
            programmatic=options.programmatic,
        )
        return Checked(problem, (rows.info, addend), None if result is None else result.info, shape, rows.info.dtype)

    def resized(
        self, problem: Problem, shapes: Sequence[Any], strides_bytes: Sequence[Any], size_options: tuple[int, ...]
    ) -> tuple[Problem, tuple[int, ...], None] | None:
        """Return the problem with another M."""
        x, _, out = shapes
        rows = x[:-1]
        m = rows[0] if len(rows) == 1 else prod(rows)
        # The call has no M axis, only K.
        if not rows or m > MAX_ROWS or (out is not None and out[:-1] != rows):
            return None
        return problem.with_m(m), (*rows, problem.layer.n), None

    def alignment_masks(self, problem: Problem) -> tuple[int, ...]:
        """Return the alignment masks of x, which TMA reads, and of out, which is written in vectors.

        Threads read the bias element by element.
        """
        return 15, 1, 15

    def plan_key(self, problem: Problem) -> Hashable:
        """Return all fields except M and the scale exponent, which are members of the struct."""
        return problem.plan_key

    def configure(self, problem: Problem, gpu: Gpu, memo: dict[Any, Any]) -> Config:
        """Return the configurations for a problem."""
        chosen = choose(MARLIN, problem, gpu, memo)
        copy = choose_copy(problem, get_target(gpu.target), gpu.sm_count) if problem.copies_x else None
        key = id(chosen), copy
        _, config = memo.get(key) or (None, None)
        if config is None:
            _, config = memo[key] = (
                chosen,
                Config(chosen.in_form(problem.scale_form), copy),
            )  # This reference keeps the chosen config alive, so that its id is not reused.
        return config

    def kernels(self, problem: Problem, config: Config) -> tuple[tuple[str, Any], ...]:
        """Return the copy kernel for activations, if there is one, and the GEMM."""
        gemm = config.gemm.template, config.gemm
        return (gemm,) if config.copy is None else ((COPY, config.copy), gemm)

    def kernels_up_to(self, checked: Checked[Problem], max_m: int, gpu: Gpu) -> Iterator[tuple[str, Any]]:
        """Yield the GEMMs of the weight's choice table, and the copy kernels for aligned and misaligned x."""
        problem, target = checked.problem, get_target(gpu.target)
        for config in choice_table(MARLIN, problem, gpu, max_m).configs_up_to(max_m):
            yield config.template, config.in_form(problem.scale_form)
        for m in (1, max_m):  # The copy kernel depends on whether there are few rows.
            for is_aligned in (False, True):
                copied = replace(problem, m=m, has_aligned_x=is_aligned)
                if copied.copies_x:
                    yield COPY, choose_copy(copied, target, gpu.sm_count)

    def problems_up_to(self, checked: Checked[Problem], max_m: int, gpu: Gpu) -> Iterable[Problem]:
        """Return problems for values of M up to ``max_m`` that cover all configurations and numbers of tiles."""
        table = choice_table(MARLIN, checked.problem, gpu, max_m)
        return map(checked.problem.with_m, table.ms_up_to(max_m))

    def arguments(self, problem: Problem, config: Config, gpu: Gpu, resident: tuple[int, ...]) -> tuple[Arguments, ...]:
        """Return the launch arguments of a problem."""
        work = _schedules(problem, config, resident)(problem.m)
        gemm = gemm_arguments(problem, config.gemm, work, get_target(gpu.target))
        if config.copy is None:
            return (gemm,)
        return permute_arguments(config.copy, copy_sizes(problem, config.copy, resident[0])), gemm

    def sizes_for(
        self, problem: Problem, config: Config, gpu: Gpu, resident: tuple[int, ...]
    ) -> Callable[[Problem], tuple[Sizes, ...]]:
        """Return a function that maps a problem to the sizes of its launches."""
        copy = config.copy
        sizes = sizes_for(problem, config.gemm, _schedules(problem, config, resident), get_target(gpu.target))
        if copy is None:
            return lambda problem: (sizes(problem),)
        return lambda problem: (copy_sizes(problem, copy, resident[0]), sizes(problem))

    def reference(self, problem: Problem, arrays: Mapping[str, ArrayInfo]) -> None:
        """Multiply by the dequantized weight in fp64, with one rounding.

        Sums of values in the range of bf16 may exceed the range of fp32.
        """
        named: dict[str, Any] = {name: host_array(info) for name, info in arrays.items()}
        w = host_weight(problem.layer, arrays, problem.tensor_scale)
        with np.errstate(all="ignore"):  # Infinities and NaNs are valid results, as on the GPU.
            values = named["x"].astype(np.float64) @ w.dequantize()
            if "bias" in named:
                values += named["bias"].astype(np.float64)
            named["out"][...] = values.astype(arrays["out"].dtype)


MARLIN_GEMM = MarlinGemm()


def _schedules(problem: Problem, config: Config, resident: tuple[int, ...]) -> Callable[[int], Schedule]:
    """Return a function that maps M to the schedule of the problem with that M."""
    n, k, divide = problem.n, problem.k, not problem.batch_invariant
    return lambda m: schedule(config.gemm, m, n, k, resident[-1], divide=divide)


def host_weight(layer: LinearShape, arrays: Mapping[str, ArrayInfo], tensor_scale: float = 1.0) -> PackedWeight:
    """Return a weight that consists of these host arrays."""
    parts: dict[str, Any] = {
        name: host_array(arrays[name]) if name in arrays else None for name in MarlinGemm.weight_arrays
    }
    parts |= {"group_size": layer.group_size, "dtype": layer.dtype, "format": layer.format}
    return PackedWeight(**parts, shape=(layer.k, layer.n), tensor_scale=tensor_scale)


class _Format:
    """The part of a plan's key that comes from a weight.

    Weights with the same shape, format and scale fit share this object.
    """


class _Formats(dict[Hashable, _Format]):
    """Formats of all weights in a process, which the Runtime holds."""


def weight_of(w: object) -> Weight:
    """Return a weight's arrays for a launch.

    Raises ArgumentTypeError for an object that is not a weight, and ArgumentError for misaligned arrays.
    """
    weight = check_weight(w)
    known: Weight | None = weight.attachments.get(_WEIGHT)
    if known is not None:
        return known
    arrays = {name: getattr(weight, name) for name in MarlinGemm.weight_arrays}
    infos = {name: describe(array, name) for name, array in arrays.items() if array is not None}
    for name, info in infos.items():
        if weight.device is not None and info.pointer % TMA_ALIGNMENT_BYTES:
            raise ArgumentError(
                f"w.{name}.pointer",
                hex(info.pointer),
                f"a multiple of {TMA_ALIGNMENT_BYTES} bytes",
                "pack the weight again",
            )
    key = weight.device, LinearShape.of(weight), weight.scale_fit, weight.tensor_scale, weight.perm is None
    formats: _Formats = context.runtime().part(_Formats)
    launched = weight.attachments[_WEIGHT] = Weight.of(formats.setdefault(key, _Format()), arrays, infos)
    return launched
