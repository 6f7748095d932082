"""Activations copied to aligned rows, in the order of the weight's permutation, right before the GEMM reads them.

For activations that TMA cannot load as they lie: GPTQ's act-order, a pitch or an address off 16 bytes. There are two
launches: the GEMM is a programmatic dependent of the copy, and loads its weights while the copy runs. Aligned
activations get the same GEMM, and the same bits of the result.
"""

from __future__ import annotations

from dataclasses import replace

from cudatma import context
from cudatma.errors import ArgumentError, LaunchError
from cudatma.kernels.launch import Launch
from cudatma.kernels.marlin.operands import Rows
from cudatma.kernels.marlin.permute_columns import (
    ELEMENT_BYTES,
    TEMPLATE,
    PermuteColumnsSpec,
    choose_permute,
    permute_arguments,
    permute_grid,
    result_pitch_bytes,
)
from cudatma.kernels.marlin.plan import Plan, loaded
from cudatma.kernels.replay import Replay
from cudatma.kernels.workspace import MarlinWorkspace
from cudatma.quantization import PackedWeight
from cudatma.runtime.launch import Kernel
from cudatma.target import Target, detect


def needs_arranging(w: PackedWeight, x: Rows) -> bool:
    """Whether x has to be copied first."""
    return w.perm is not None or not x.is_aligned


def arranged_bytes(rows: int, k: int) -> int:
    """Memory that arranged activations take."""
    return rows * result_pitch_bytes(k)


def arranged_rows(x: Rows, pointer: int, owner: object = None) -> Rows:
    """The rows that a copy of x leaves at an address; owner: what keeps their memory."""
    k, pitch = x.info.shape[-1], result_pitch_bytes(x.info.shape[-1])
    info = replace(
        x.info,
        pointer=pointer,
        shape=(x.rows, k),
        strides_bytes=(pitch, ELEMENT_BYTES),
        owner=x.info.owner if owner is None else owner,
    )
    return Rows(info, x.rows, pitch)


def choose_arrangement(
    w: PackedWeight, rows: int, is_aligned: bool, target: Target, sm_count: int
) -> PermuteColumnsSpec:
    """The copying kernel for a weight and a batch. is_aligned: whether the caller's activations are."""
    return choose_permute(
        rows,
        w.shape[0],
        has_permutation=w.perm is not None,
        is_aligned=is_aligned,
        target=target,
        sm_count=sm_count,
    )


def configure_arrangement(
    w: PackedWeight, rows: int, is_aligned: bool, device: int, stream: int | None = None
) -> tuple[Kernel, PermuteColumnsSpec, tuple[int, int]]:
    """The copying kernel, loaded onto the device, and its grid. stream: as for plan.configure()."""
    sm_count = context.device(device).sm_count
    spec = choose_arrangement(w, rows, is_aligned, detect(device), sm_count)
    kernel, resident = loaded(TEMPLATE, spec, device, stream)
    return kernel, spec, permute_grid(spec, rows, w.shape[0], sm_count * resident)


class ArrangedPlan(Plan):
    """A plan of two launches: activations are copied to the workspace, the GEMM reads them there.

    Made for x whose rows are all aligned to 16 bytes, or for any x; a plan of the latter kind serves aligned rows, too.
    """

    __slots__ = ("_arrange", "_rows_bytes")

    def __init__(
        self,
        w: PackedWeight,
        x: Rows,
        out: Rows,
        programmatic: bool,
        batch_invariant: bool,
        stream: int,
        workspace: MarlinWorkspace,
    ) -> None:
        device, k = x.info.device, w.shape[0]
        if device is None:
            raise ArgumentError("x.device", "the host", "a CUDA device")
        self._rows_bytes = arranged_bytes(x.rows, k)
        kernel, spec, grid = configure_arrangement(w, x.rows, x.is_aligned, device, stream)
        with workspace.rows.lock:
            rows = arranged_rows(x, workspace.rows.room(self._rows_bytes))
        super().__init__(w, rows, out, True, batch_invariant, stream)
        self.needs_workspace = True
        self.x_extent = x.info.extent[1] - x.info.pointer
        bases = x.info.pointer, rows.info.pointer
        args = permute_arguments(bases[0], w.perm, bases[1], x.rows, k, x.pitch_bytes)
        launch = Launch(TEMPLATE, spec, grid, args, (), programmatic=programmatic)
        first = int(spec.has_permutation)
        self._arrange = Replay(launch, kernel, device, bases, (first, first + 1))

    def run(self, x: int, out: int, bias: int, workspace: MarlinWorkspace | None, stream: int) -> None:
        """As Plan.run(), in two launches. DriverError where the workspace has no memory to grow."""
        if workspace is None:
            raise LaunchError("workspace", "None", "a workspace, which holds the copied activations")
        with workspace.rows.lock:
            rows = workspace.rows.room(self._rows_bytes)
            self._arrange.run((x, rows), stream)
            super().run(rows, out, bias, workspace, stream)
