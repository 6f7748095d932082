"""A GEMM ready to launch but for its addresses: configuration chosen, kernel loaded, arguments by name and marshalled.
gemm_launch() serves the GPU and the emulator."""

from __future__ import annotations

from typing import Any, NamedTuple

from cudatma import context
from cudatma.arrays import ArrayInfo, describe
from cudatma.build.kernel import known_kernel, load_kernel
from cudatma.descriptor import (
    TensorMap,
    create_activation_tma_desc,
    create_scale_tma_desc,
    create_weight_tile_tma_desc,
    create_weight_tma_desc,
)
from cudatma.errors import ArgumentError
from cudatma.kernels.gpu import gpu_of
from cudatma.kernels.launch import Launch, Replay
from cudatma.kernels.launch_struct import pack
from cudatma.kernels.marlin.choose import AnyMarlinSpec, choose, resolve_fused
from cudatma.kernels.marlin.operands import Rows
from cudatma.kernels.marlin.problem import Problem, problem_values
from cudatma.kernels.schedule import Schedule, ceil_div, schedule
from cudatma.kernels.workspace import MarlinWorkspace, refuse_in_capture
from cudatma.quantization import PackedWeight
from cudatma.runtime.launch import Kernel
from cudatma.target import Target, detect


def gemm_launch(
    x: Rows,
    w: PackedWeight,
    out: Rows,
    bias: ArrayInfo | None,
    spec: AnyMarlinSpec,
    work: Schedule,
    target: Target,
    *,
    partials: ArrayInfo | None = None,
    flags: ArrayInfo | None = None,
    programmatic: bool = False,
) -> Launch:
    """out = x W + bias. x: aligned rows. partials, flags: the workspace; None where it is not known yet, or not used.

    programmatic: a dependent launch, in which the kernel loads weights before it waits for activations.
    """
    memory = {
        "weight": describe(w.qweight),
        "scales": describe(w.scales),
        "zeros": None if w.zeros is None else describe(w.zeros),
        "activations": x.info,
        "bias": bias,
        "output": out.info,
        "partials": partials,
        "flags": flags,
    }
    values = {
        **{name: 0 if info is None else info.pointer for name, info in memory.items()},
        **_tensor_maps(w, x, spec, target),
        "problem": _problem(x, w, out, spec, work, programmatic),
    }
    return Launch(
        spec.template,
        spec,
        work.ctas,
        tuple(values[name] for name in spec.parameter_names),
        tuple(info for info in memory.values() if info is not None),
        cluster=spec.launch_cluster,
        shared_bytes=_dependent_smem_bytes(spec, target) if programmatic else 0,
        programmatic=programmatic,
    )


def _problem(x: Rows, w: PackedWeight, out: Rows, spec: AnyMarlinSpec, work: Schedule, programmatic: bool) -> bytes:
    """The kernel's Problem struct."""
    k, n = w.shape
    values = problem_values(
        spec,
        work,
        x.rows,
        n,
        k,
        w.groups,
        activation_pitch=x.pitch_bytes // 2,
        output_pitch=out.pitch_bytes // 2,
        output_vectors=out.is_aligned,
        programmatic=programmatic,
        scale_exponent=_scale_exponent(w, spec),
    )
    return pack(spec.problem_members, values)


def _scale_exponent(w: PackedWeight, spec: AnyMarlinSpec) -> int:
    """p of 2^-p, by which the kernel multiplies scales. ArgumentError for a fused kernel in another form than the
    weight's scales allow: call resolve_fused() first."""
    if spec.scale_form == "none":
        return 0
    if spec.scale_form != w.scale_fit.form:
        why = "the range of these scales decides (quantization/scale_range.py)"
        raise ArgumentError("spec.fused", spec.scale_form, f"{w.scale_fit.form!r} or 'none' for this weight", why)
    return w.scale_fit.exponent


def _dependent_smem_bytes(spec: AnyMarlinSpec, target: Target) -> int:
    """Dynamic shared memory of a CTA in a dependent launch, enlarged where more than ``blocks_per_sm`` CTAs would fit
    on an SM, including those of the previous launch.

    The GPU places a dependent launch's CTAs on any SM that holds them. While CTAs of the previous launch still occupy
    SMs, some would get too many and some none: measured, 43 us instead of 30 (docs/performance/marlin_skinny.md).
    """
    too_much = target.smem_share_bytes(spec.blocks_per_sm + 1) + 1
    return max(spec.smem_bytes, min(target.smem_share_bytes(spec.blocks_per_sm), too_much))


def _tensor_maps(w: PackedWeight, x: Rows, spec: AnyMarlinSpec, target: Target) -> dict[str, TensorMap]:
    """The maps that a kernel takes, by its parameters' names.

    Weights: a whole tile a box, and half a row where N tiles begin inside of a row of 64 columns of N; the mma.sync
    kernel loads the blocks of 64 columns one by one.
    """
    blocks_k, blocks = spec.block_k // 64, ceil_div(w.shape[0], 64)

    def weight(rows: int, *, half_rows: bool = False) -> TensorMap:
        return create_weight_tile_tma_desc(w.qweight, blocks, blocks_k, rows, half_rows=half_rows, target=target)

    def table(values: object) -> TensorMap:
        rows = spec.groups_per_stage
        return create_scale_tma_desc(values, spec.scale_row, rows, whole_column=False, target=target)

    def weights() -> TensorMap:
        if spec.loads_weight_tiles:
            return weight(spec.block_n // 64)
        return create_weight_tma_desc(w.qweight, blocks_k, target=target)

    def activations() -> TensorMap:
        # Each CTA of a cluster loads a part of the rows for all.
        rows, blocks = spec.block_m // spec.cluster, spec.activation_box_blocks
        return create_activation_tma_desc(x.as_matrix(), rows, blocks=blocks, target=target)

    makers = {
        "weight_map": weights,
        "half_weight_map": lambda: weight(1, half_rows=True),
        "scale_map": lambda: table(w.scales),
        "zero_map": lambda: table(w.zeros),
        "activation_map": activations,
    }
    return {name: makers[name]() for name in spec.parameter_names if name in makers}


def configure(
    w: PackedWeight, m: int, device: int, stream: int | None = None, *, batch_invariant: bool = False
) -> tuple[Kernel, AnyMarlinSpec, Schedule]:
    """The kernel for M rows of x, compiled if need be and loaded onto the device, and its schedule.

    stream: the one it is about to be launched on; LaunchError if that is under capture and the kernel not yet loaded.
    """
    problem, gpu = Problem.of(w, m, batch_invariant=batch_invariant), gpu_of(device)
    spec = resolve_fused(choose(problem, gpu), w.scale_fit.form)
    kernel, resident = loaded(spec.template, spec, device, stream)
    ctas = context.device(device).sm_count * min(spec.blocks_per_sm, resident)
    return kernel, spec, schedule(spec, m, problem.n, problem.k, ctas, divide=not batch_invariant)


def loaded(template: str, spec: Any, device: int, stream: int | None) -> tuple[Kernel, int]:
    """A spec's kernel on the device, compiled if need be, and how many of its CTAs an SM holds.

    stream: as in configure().
    """
    target = detect(device)
    known = known_kernel(template, spec, target)
    if stream is not None and (known is None or not known.is_loaded(device)):
        refuse_in_capture(device, stream, "a stream that has its kernel loaded")
    kernel = known or load_kernel(template, spec, target)
    kernel.load(device)
    resident = kernel.occupancy(spec.threads, shared_bytes=spec.smem_bytes, device=device)
    if resident < 1:
        raise ArgumentError("device", device, f"a GPU that holds a CTA of {spec.entry}")
    return kernel, resident


#: The kernel parameters that may hold each address: x, out, bias, partials, flags, then the fields of WeightAddresses.
_ADDRESS_PARAMETERS = (
    ("activation_map", "activations"),
    ("output",),
    ("bias",),
    ("partials",),
    ("flags",),
    ("weight_map",),
    ("half_weight_map",),
    ("scale_map", "scales"),
    ("zero_map", "zeros"),
    (),
)


class WeightAddresses(NamedTuple):
    """The addresses of a weight's arrays on its device; 0 for an array that it lacks.

    half_qweight is the same as qweight: the skinny GEMM has a second tensor map over it.
    """

    qweight: int
    half_qweight: int
    scales: int
    zeros: int
    perm: int

    @classmethod
    def of(cls, w: PackedWeight) -> WeightAddresses:
        arrays = w.qweight, w.qweight, w.scales, w.zeros, w.perm
        return cls(*(0 if array is None else describe(array).pointer for array in arrays))


class Plan:
    """The launch for one shape and format of weight, one M, and one layout of the activations and the result.

    Weights of the same shape, format and scale fit share it: only addresses differ. x: aligned rows. Safe from many
    threads; keeps no array alive.
    """

    __slots__ = ("_replay", "device", "needs_workspace", "out_extent", "partials_bytes", "schedule", "spec", "x_extent")

    def __init__(
        self, w: PackedWeight, x: Rows, out: Rows, programmatic: bool, batch_invariant: bool, stream: int
    ) -> None:
        device = x.info.device
        if device is None:
            raise ArgumentError("x.device", "the host", "a CUDA device")
        kernel, spec, work = configure(w, x.rows, device, stream, batch_invariant=batch_invariant)
        launch = gemm_launch(x, w, out, None, spec, work, detect(device), programmatic=programmatic)
        bases = (x.info.pointer, out.info.pointer, 0, 0, 0, *WeightAddresses.of(w))
        index = {name: place for place, name in enumerate(spec.parameter_names)}
        places = [next((index[name] for name in names if name in index), None) for names in _ADDRESS_PARAMETERS]
        self._replay = Replay(launch, kernel, device, bases, places, steady=len(WeightAddresses._fields))
        self.device, self.spec, self.schedule = device, spec, work
        self.partials_bytes = work.partial_ctas * spec.partial_bytes
        self.needs_workspace = self.partials_bytes > 0
        self.x_extent, self.out_extent = (rows.info.extent[1] - rows.info.pointer for rows in (x, out))

    def run(
        self, weight: WeightAddresses, x: int, out: int, bias: int, workspace: MarlinWorkspace | None, stream: int
    ) -> None:
        """Launch for arrays at these addresses, of the shapes and layouts that the plan was made for. workspace: None
        unless ``needs_workspace``."""
        if workspace is None:
            self._replay.run((x, out, bias, 0, 0), stream, weight)
        else:
            addresses = x, out, bias, workspace.partials_pointer, workspace.flags_pointer
            self._replay.run(addresses, stream, weight)
