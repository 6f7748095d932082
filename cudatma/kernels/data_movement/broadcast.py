"""Broadcast an array to several copies. A cluster loads every tile once, and each of its CTAs writes one copy.

[PTX ISA, cp.async.bulk, .multicast::cluster]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from cudatma.arrays import ArrayInfo
from cudatma.descriptor import multicast_mask
from cudatma.errors import ArgumentError, DescriptorError
from cudatma.kernels.arguments import Arguments, At, Sizes
from cudatma.kernels.checks import check_field_types
from cudatma.kernels.data_movement.checks import as_key, check_out, check_size, described
from cudatma.kernels.data_movement.movement import LaunchLimits, Movement, checked
from cudatma.kernels.data_movement.plans import chunk_place, run_plan
from cudatma.kernels.data_movement.ring import MIN_STAGES, SLOT_BYTES, CopyRing, stages_for
from cudatma.kernels.data_movement.window import Axis, Window
from cudatma.kernels.engine import run
from cudatma.kernels.host import host_array
from cudatma.kernels.operation import Checked
from cudatma.pipeline import MBARRIER_BYTES, Operand, PipelineSpec
from cudatma.target import Target

TEMPLATE = "kernels/broadcast.cu.j2"
#: Cluster sizes in CTAs, beginning with the largest portable size. Only powers of two are used.
SIZES = (8, 4, 2)
#: The size of each part of a tile is a multiple of this number of bytes, because TMA needs this alignment in shared
#: memory.
_PART_UNIT = 128
#: Number of waves of clusters per launch.
_WAVES = 4


@dataclass(frozen=True, slots=True)
class BroadcastConfig(CopyRing):
    """A configuration of ``kernels/broadcast.cu.j2``.

    Attributes
    ----------
    copies : int
        Number of CTAs per cluster, 2, 4 or 8.
    stage_bytes : int
        Bytes per tile, a multiple of 128 * copies.
    stages, in_flight : int
        See CopyRing.

    Raises
    ------
    ArgumentError
        If a field is invalid.
    """

    copies: int
    stage_bytes: int
    stages: int
    in_flight: int
    entry: str = "broadcast"

    def __post_init__(self) -> None:
        check_field_types(self)
        if self.copies not in SIZES:
            raise ArgumentError("copies", self.copies, "2, 4 or 8")
        if self.stage_bytes % (_PART_UNIT * self.copies):
            raise ArgumentError("stage_bytes", self.stage_bytes, f"a multiple of {_PART_UNIT * self.copies}")
        self.check_ring()

    @property
    def ring(self) -> PipelineSpec:
        """Ring with one tile per stage.

        All CTAs of a cluster send data to each slot, so one thread of each CTA releases a slot to all of these CTAs.
        """
        tile = Operand("tile", self.stage_bytes, self.stage_bytes)
        return PipelineSpec(self.stages, (tile,), consumer_arrivals=1, cluster=self.copies)

    @property
    def part_bytes(self) -> int:
        """Bytes of a tile that one CTA loads."""
        return self.stage_bytes // self.copies

    @property
    def mask(self) -> int:
        return multicast_mask((self.copies,))

    def check_target(self, target: Target) -> None:
        """Raise TargetError if the target lacks a required feature, and ArgumentError if the ring does not fit."""
        for feature in ("tma", "cluster", "multicast"):
            target.require(feature, "broadcast")
        self.ring.check_fits(target, min_stages=MIN_STAGES)


def broadcast(src: Any, copies: int, *, out: Any = None, stream: Any = None, backend: str | None = None) -> Any:
    """Make several copies of an array while reading each tile only once.

    Parameters
    ----------
    src : array
        The source, in C order without gaps. Its address and size must be multiples of 16 bytes.
    copies : int
        Number of copies, at least 1. Clusters of 8, 4 and 2 CTAs write the copies, and ``copy`` writes a remaining
        copy.
    out : array (copies, ...), optional
        The result, in C order. Default: a new array.
    stream : stream, optional
        Stream of the launch. Default: the current stream of the source's library.
    backend : str, optional
        Where to run: ``"cuda"``, ``"emulator"``, ``"reference"`` or ``"auto"``; see ``marlin_gemm``.

    Returns
    -------
    array
        ``out``.

    Raises
    ------
    ArgumentError, ArgumentTypeError, DescriptorError, LaunchError, TargetError, CompileError, DriverError, HazardError
        If an argument is invalid, if the GPU does not support multicast (SM120), or if the kernel cannot run; see
        ``copy``.

    Examples
    --------
    >>> cudatma.broadcast(np.arange(4, dtype=np.int32), 2, backend="reference").tolist()
    [[0, 1, 2, 3], [0, 1, 2, 3]]
    """
    return run(BROADCAST, (src,), out, as_key(copies), stream=stream, backend=backend)


class _Problem(NamedTuple):
    src: ArrayInfo
    out: ArrayInfo


class Broadcast(Movement[_Problem]):
    """Operation of broadcast(), whose option is the number of copies."""

    name: ClassVar[str] = "broadcast"

    def check(self, inputs: tuple[Any, ...], out: Any, options: tuple[Any, ...], resource: Any) -> Checked[_Problem]:
        info, (copies,) = described(inputs[0], "src"), options
        if isinstance(copies, bool) or not isinstance(copies, int) or copies < 1:
            raise ArgumentError("copies", copies, "a positive int")
        if not info.is_contiguous:
            raise ArgumentError(
                "src", f"strides {info.strides_bytes}", "an array in C order without gaps", "pass a contiguous copy"
            )
        shape = (copies, *info.shape)
        check_size(shape, info.dtype, "copies")
        return checked(_Problem, (info,), check_out(out, info, shape, dense=True), shape)

    def plan(self, problem: _Problem, limits: LaunchLimits) -> tuple[Arguments, ...]:
        return plan_broadcast(problem.src, problem.out, limits)

    def reference(self, problem: _Problem, arrays: Mapping[str, ArrayInfo]) -> None:
        host_array(arrays["out"])[...] = host_array(arrays["src"])


BROADCAST = Broadcast()


def plan_broadcast(src: ArrayInfo, out: ArrayInfo, limits: LaunchLimits) -> tuple[Arguments, ...]:
    """Return one launch for every eight copies, followed by launches for four, two and one remaining copies.

    Raises DescriptorError if bulk copies cannot read or write the arrays.
    """
    nbytes, copies = src.size_elems * src.dtype.itemsize, out.shape[0]
    if src.pointer % 16 or out.pointer % 16 or nbytes % 16:
        got = f"{nbytes} bytes from {chunk_place(src.pointer)} to {chunk_place(out.pointer)}"
        allowed = "a multiple of 16 bytes, like the address of out and the size"
        raise DescriptorError("src.address", got, allowed, "call copy(), which accepts any array")
    plans: list[Arguments] = []
    first = 0
    while first < copies:
        count = next((size for size in SIZES if size <= copies - first), 1)
        to = first * nbytes
        first += count
        if count == 1:
            axis = Axis(0, nbytes, nbytes, 1, 1)
            plans.append(run_plan(Window(src.pointer, out.pointer + to, 1, (axis,)), (src, out), limits))
            continue
        config = choose_broadcast(count, limits.target)
        # Start more clusters than can run at the same time. That number depends on the GPU's groups of SMs, and a
        # single remaining cluster might otherwise run alone.
        clusters = min(max(1, _WAVES * limits.ctas // count), -(-nbytes // config.stage_bytes))
        parameters = At("src"), At("out", to), nbytes
        plans.append(Arguments(TEMPLATE, config, parameters, Sizes(clusters * count), cluster=count))
    return tuple(plans)


def choose_broadcast(copies: int, target: Target) -> BroadcastConfig:
    """Return a ring of the usual size, with a second mbarrier for each slot."""
    stages = stages_for(target, SLOT_BYTES + MBARRIER_BYTES)
    return BroadcastConfig(copies, SLOT_BYTES, stages, stages // 2)


def dump_configs(target: Target) -> list[BroadcastConfig]:
    """Return the configs for dumps and compile checks, or an empty list if the target cannot run them."""
    able = all(target.has(feature) for feature in ("tma", "cluster", "multicast"))
    return [choose_broadcast(4, target)] if able else []
