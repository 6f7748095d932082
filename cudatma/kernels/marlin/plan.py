"""A GEMM with everything settled but its pointers: what a hot call changes, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from ctypes import addressof, c_uint64
from typing import Any

from cudatma import context
from cudatma.build.kernel import known_kernel, load_kernel
from cudatma.descriptor import (
    TensorMap,
    create_activation_tma_desc,
    create_scale_tma_desc,
    create_weight_tile_tma_desc,
    create_weight_tma_desc,
)
from cudatma.descriptor.driver import replace_address
from cudatma.errors import ArgumentError
from cudatma.kernels.gpu import gpu_of
from cudatma.kernels.launch_struct import pack
from cudatma.kernels.marlin.choose import decide
from cudatma.kernels.marlin.operands import Rows
from cudatma.kernels.marlin.problem import AnyMarlinSpec, LinearShape, resolve_fused
from cudatma.kernels.marlin.problem_struct import problem_values
from cudatma.kernels.schedule import Schedule, ceil_div, schedule
from cudatma.kernels.workspace import MarlinWorkspace, refuse_in_capture
from cudatma.quantization import PackedWeight
from cudatma.runtime.launch import Kernel
from cudatma.target import Target, detect


def scale_exponent_of(w: PackedWeight, spec: AnyMarlinSpec) -> int:
    """p of 2^-p, which the kernel takes scales times. ArgumentError for a fused one in another form than the
    weight's scales allow: resolve_fused() comes first."""
    if spec.scale_form == "none":
        return 0
    if spec.scale_form != w.scale_fit.form:
        why = "the range of these scales decides (quantization/scale_range.py)"
        raise ArgumentError("spec.fused", spec.scale_form, f"{w.scale_fit.form!r} or 'none' for this weight", why)
    return w.scale_fit.exponent


def configure(
    w: PackedWeight,
    m: int,
    device: int,
    stream: int | None = None,
    *,
    batch_invariant: bool = False,
) -> tuple[Kernel, AnyMarlinSpec, Schedule]:
    """The kernel for ``m`` tokens, compiled if need be and loaded onto the device, and its schedule.

    stream: the one it is about to be launched on; LaunchError if that is under capture and the kernel not yet loaded.
    """
    k, n = w.shape
    decision = decide(LinearShape.of(w), m, gpu_of(device), batch_invariant=batch_invariant)
    spec = resolve_fused(decision.spec, w.scale_fit.form)
    kernel, resident = loaded(spec.template, spec, device, stream)
    blocks = context.device(device).multiprocessors * min(spec.blocks_per_sm, resident)
    return kernel, spec, schedule(spec, m, n, k, blocks, divide=decision.divide)


def loaded(template: str, spec: Any, device: int, stream: int | None) -> tuple[Kernel, int]:
    """A spec's kernel on the device, compiled if need be, and how many of its blocks a multiprocessor holds.

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
        raise ArgumentError("device", device, f"a card that holds a block of {spec.entry}")
    return kernel, resident


def dependent_smem_bytes(spec: AnyMarlinSpec, target: Target) -> int:
    """Dynamic shared memory of a block in a dependent launch, with room added where more than ``blocks_per_sm`` would
    fit on a multiprocessor, those of the launch before among them.

    A dependent launch's blocks come in where there is room. Beside blocks of the launch before, some multiprocessors
    get too many of them and others none: measured, 43 us where 30 are needed (docs/performance/marlin_skinny.md).
    """
    too_much = target.smem_share_bytes(spec.blocks_per_sm + 1) + 1
    return max(spec.smem_bytes, min(target.smem_share_bytes(spec.blocks_per_sm), too_much))


class Plan:
    """One (weight, tokens, layouts, device): descriptors made, kernel loaded, arguments marshalled. x: aligned rows.

    run() writes the pointers that changed and launches. Safe from many threads; keeps no activation array alive.
    """

    __slots__ = (
        "_bias",
        "_flags",
        "_last_bias",
        "_lock",
        "_map",
        "_map_address",
        "_output",
        "_partials",
        "_plan",
        "_space",
        "_x",
        "device",
        "needs_workspace",
        "out_extent",
        "partials_bytes",
        "schedule",
        "spec",
        "x_extent",
    )

    def __init__(
        self,
        w: PackedWeight,
        x: Rows,
        out: Rows,
        programmatic: bool,
        batch_invariant: bool,
        stream: int,
    ) -> None:
        device = x.info.device
        if device is None:
            raise ArgumentError("x.device", "the host", "a CUDA device")
        self.device, target = device, detect(device)
        kernel, spec, self.schedule = configure(w, x.rows, device, stream, batch_invariant=batch_invariant)
        self.spec, self.partials_bytes = spec, self.schedule.partial_blocks * spec.partial_bytes
        self.needs_workspace = self.partials_bytes > 0
        k, n = w.shape
        values = problem_values(
            spec,
            self.schedule,
            x.rows,
            n,
            k,
            w.groups,
            activation_pitch=x.pitch_bytes // 2,
            output_pitch=out.pitch_bytes // 2,
            output_vectors=out.is_vectorised,
            programmatic=programmatic,
            scale_exponent=scale_exponent_of(w, spec),
        )
        problem = pack(spec.problem_members, values)
        maps = tensor_maps(w, x, spec, target)
        arrays = {"weight": w.qweight, "scales": w.scales, "zeros": w.zeros, "activations": x.info.pointer}
        later = dict.fromkeys(("bias", "output", "partials", "flags"), 0)
        self._plan = kernel.plan(
            self.schedule.blocks,
            spec.threads,
            bound(spec, {**maps, **arrays, **later, "problem": problem}),
            cluster=spec.launch_cluster if spec.launch_cluster > 1 else None,
            shared_bytes=dependent_smem_bytes(spec, target) if programmatic else spec.smem_bytes,
            programmatic=programmatic,
            device=device,
        )
        named = dict(zip(spec.parameter_names, self._plan.arguments, strict=True))
        # What a kernel does not take is written as well: a branch would cost each call more.
        self._x, self._bias, self._output, self._partials, self._flags = (
            named.get(name, c_uint64()) for name in ("activations", "bias", "output", "partials", "flags")
        )
        # The map of activations among the arguments, and its host address where only the driver may change it.
        self._map = named.get("activation_map")
        self._map_address = addressof(self._map) if self._map and target.tensormap_knows_allocation else 0
        # What the arguments hold of the last call, beside the pointers that always change.
        self._space = 0
        self._last_bias = 0
        self._lock = threading.Lock()
        self.x_extent, self.out_extent = (rows.info.extent[1] - rows.info.pointer for rows in (x, out))

    def run(self, x: int, out: int, bias: int, workspace: MarlinWorkspace | None, stream: int) -> None:
        """Launch for arrays at these addresses, of the shapes and layouts that the plan was made for. workspace: None
        unless ``needs_workspace``."""
        with self._lock:
            self._output.value = out
            if self._map is None:
                self._x.value = x
            elif self._map_address:
                replace_address(self._map_address, x)
            else:
                self._map[0] = x
            if bias != self._last_bias:
                self._last_bias = self._bias.value = bias
            if workspace is not None and workspace.partials_pointer != self._space:
                # The address, not the object: a plan must not keep a workspace, nor free it in the midst of a capture.
                self._space = self._partials.value = workspace.partials_pointer
                self._flags.value = workspace.flags_pointer
            self._plan.launch(stream)


def bound(spec: AnyMarlinSpec, values: Mapping[str, Any]) -> list[Any]:
    """A kernel's arguments in order, of values by the parameters' names."""
    return [values[name] for name in spec.parameter_names]


def tensor_maps(w: PackedWeight, x: Rows, spec: AnyMarlinSpec, target: Target) -> dict[str, TensorMap]:
    """The maps that a kernel takes, by its parameters' names.

    Weights: a whole tile a box, and where N tiles begin inside of a 64-channel row half a row; the mma.sync kernel
    loads the blocks of 64 channels one by one.
    """
    depth, blocks = spec.block_k // 64, ceil_div(w.shape[0], 64)

    def weight(rows: int, *, half_rows: bool = False) -> TensorMap:
        return create_weight_tile_tma_desc(w.qweight, blocks, depth, rows, half_rows=half_rows, target=target)

    def table(values: Any) -> TensorMap:
        rows = spec.groups_per_stage
        return create_scale_tma_desc(values, spec.scale_row, rows, whole_column=False, target=target)

    def weights() -> TensorMap:
        if spec.loads_weight_tiles:
            return weight(spec.block_n // 64)
        return create_weight_tma_desc(w.qweight, depth, target=target)

    def activations() -> TensorMap:
        # Each block of a cluster loads a part of the tokens for all.
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
