"""The launch of a Marlin kernel: its arguments by name, the same for a GPU and for the emulator."""

from __future__ import annotations

from cudatma.arrays import ArrayInfo, describe
from cudatma.descriptor import (
    TensorMap,
    create_activation_tma_desc,
    create_scale_tma_desc,
    create_weight_tile_tma_desc,
    create_weight_tma_desc,
)
from cudatma.errors import ArgumentError
from cudatma.kernels.launch import Launch
from cudatma.kernels.launch_struct import pack
from cudatma.kernels.marlin.operands import Rows
from cudatma.kernels.marlin.problem_struct import problem_values
from cudatma.kernels.marlin.specs import AnyMarlinSpec
from cudatma.kernels.schedule import Schedule, ceil_div
from cudatma.quantization import PackedWeight
from cudatma.target import Target


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
