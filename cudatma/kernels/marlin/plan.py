"""A GEMM ready to launch but for its addresses: configuration chosen, kernel loaded, arguments marshalled."""

from __future__ import annotations

from typing import Any

from cudatma import context
from cudatma.build.kernel import known_kernel, load_kernel
from cudatma.errors import ArgumentError
from cudatma.kernels.gpu import gpu_of
from cudatma.kernels.marlin.choose import decide
from cudatma.kernels.marlin.launch import gemm_launch
from cudatma.kernels.marlin.operands import Rows
from cudatma.kernels.marlin.problem import Problem
from cudatma.kernels.marlin.specs import AnyMarlinSpec, resolve_fused
from cudatma.kernels.replay import Replay
from cudatma.kernels.schedule import Schedule, schedule
from cudatma.kernels.workspace import MarlinWorkspace, refuse_in_capture
from cudatma.quantization import PackedWeight
from cudatma.runtime.launch import Kernel
from cudatma.target import detect


def configure(
    w: PackedWeight, m: int, device: int, stream: int | None = None, *, batch_invariant: bool = False
) -> tuple[Kernel, AnyMarlinSpec, Schedule]:
    """The kernel for M rows of x, compiled if need be and loaded onto the device, and its schedule.

    stream: the one it is about to be launched on; LaunchError if that is under capture and the kernel not yet loaded.
    """
    problem, gpu = Problem.of(w, m, batch_invariant=batch_invariant), gpu_of(device)
    spec = resolve_fused(decide(problem, gpu).spec, w.scale_fit.form)
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


class Plan:
    """One (weight, M, layouts, device). x: aligned rows. Safe from many threads; keeps no activation array alive."""

    __slots__ = ("_replay", "device", "needs_workspace", "out_extent", "partials_bytes", "schedule", "spec", "x_extent")

    def __init__(
        self, w: PackedWeight, x: Rows, out: Rows, programmatic: bool, batch_invariant: bool, stream: int
    ) -> None:
        device = x.info.device
        if device is None:
            raise ArgumentError("x.device", "the host", "a CUDA device")
        kernel, spec, work = configure(w, x.rows, device, stream, batch_invariant=batch_invariant)
        launch = gemm_launch(x, w, out, None, spec, work, detect(device), programmatic=programmatic)
        named = {name: index for index, name in enumerate(spec.parameter_names)}
        activations = named.get("activation_map", named.get("activations"))
        others = (named.get(name) for name in ("output", "bias", "partials", "flags"))
        bases = (x.info.pointer, out.info.pointer, 0, 0, 0)
        self._replay = Replay(launch, kernel, device, bases, (activations, *others))
        self.device, self.spec, self.schedule = device, spec, work
        self.partials_bytes = work.partial_ctas * spec.partial_bytes
        self.needs_workspace = self.partials_bytes > 0
        self.x_extent, self.out_extent = (rows.info.extent[1] - rows.info.pointer for rows in (x, out))

    def run(self, x: int, out: int, bias: int, workspace: MarlinWorkspace | None, stream: int) -> None:
        """Launch for arrays at these addresses, of the shapes and layouts that the plan was made for. workspace: None
        unless ``needs_workspace``."""
        if workspace is None:
            self._replay.run((x, out, bias, 0, 0), stream)
        else:
            self._replay.run((x, out, bias, workspace.partials_pointer, workspace.flags_pointer), stream)
