"""Common base of the specs of kernels that compute tiles of a result from a ring of stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from cudatma.errors import ArgumentError
from cudatma.kernels.cost import Cost
from cudatma.kernels.gpu import Gpu
from cudatma.kernels.launch_struct import MEMBERS, Member, in_order
from cudatma.kernels.schedule import ceil_div, fits_workspace
from cudatma.pipeline import MBARRIER_BYTES, Operand, PipelineSpec, align_up
from cudatma.target import Target

TENSOR_MAP = "const __grid_constant__ cudatma::TensorMap"
PROBLEM = "const __grid_constant__ cudatma::Problem"


class TiledKernel:
    """Base of these specs. block_m, block_n, block_k: of a CTA's tile and of one stage. stages: of the ring.

    cluster: CTAs side by side, in N unless cluster_m and cluster_n say otherwise. cluster_k: CTAs that divide K.
    blocks_per_sm: CTAs that share an SM. warp_tiles: parts of a tile that have a flag of their own in the workspace.
    """

    __slots__ = ()

    #: Launch parameters by name, and their types in CUDA.
    parameter_types: ClassVar[Mapping[str, str]] = {}
    #: The members of ``Problem`` that the family's kernels may read, by name, in the order of the struct.
    struct_members: ClassVar[Mapping[str, Member]] = MEMBERS
    #: Arrays of shared memory that some instances of the template do not have.
    optional_arrays: ClassVar[tuple[str, ...]] = ()

    if TYPE_CHECKING:  # What a spec adds: fields, or properties of its own.

        @property
        def template(self) -> str: ...
        @property
        def entry(self) -> str: ...
        @property
        def block_m(self) -> int: ...
        @property
        def block_n(self) -> int: ...
        @property
        def block_k(self) -> int: ...
        @property
        def stages(self) -> int: ...
        @property
        def cluster(self) -> int: ...
        @property
        def cluster_k(self) -> int: ...
        @property
        def blocks_per_sm(self) -> int: ...
        @property
        def warp_tiles(self) -> int: ...
        @property
        def consumer_warps(self) -> int: ...
        @property
        def producer_warps(self) -> int: ...
        def cost_at(self, m: Any, problem: Any, gpu: Gpu) -> Cost:
            """Return the predicted time at M, an int or an int64 array, instead of the problem's."""

    def check_values(self, allowed: Mapping[str, tuple[Any, ...]]) -> None:
        """Raise ArgumentError for a field that is none of these values, or of another type."""
        for name, values in allowed.items():
            value = getattr(self, name)
            if type(value) is not type(values[0]) or value not in values:
                raise ArgumentError(name, value, ", ".join(map(str, values)))

    # What the kernel is launched with.

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """The launch parameters in order: those that the kernel reads."""
        raise NotImplementedError

    @property
    def parameters(self) -> tuple[tuple[str, str], ...]:
        """(name, type) of each."""
        return tuple((name, self.parameter_types[name]) for name in self.parameter_names)

    @property
    def parameter_list(self) -> str:
        """The same in CUDA."""
        return ",\n    ".join(f"{kind} {name}" for name, kind in self.parameters)

    @property
    def problem_names(self) -> tuple[str, ...]:
        """The members of ``Problem`` that the kernel reads, in any order."""
        raise NotImplementedError

    @property
    def problem_members(self) -> tuple[Member, ...]:
        """The same in the order of the struct."""
        return in_order(self.struct_members, self.problem_names)

    @property
    def problem_has_divisor(self) -> bool:
        return any(member.type == "Divisor" for member in self.problem_members)

    @property
    def launch_cluster(self) -> int:
        """CTAs of a cluster of the launch."""
        return self.cluster * self.cluster_k

    @property
    def cluster_m(self) -> int:
        """Rows of M of a cluster's tile."""
        return self.block_m

    @property
    def cluster_n(self) -> int:
        """Columns of N of a cluster's tile."""
        return self.block_n * self.cluster

    @property
    def threads(self) -> int:
        return 32 * (self.consumer_warps + self.producer_warps)

    # What schedule() and the tuner read.

    @property
    def is_persistent(self) -> bool:
        """Whether a CTA takes several tiles where tiles are never divided."""
        return False

    @property
    def loaded_stage_bytes(self) -> int:
        """What one CTA loads for a stage."""
        raise NotImplementedError

    @property
    def partial_bytes(self) -> int:
        """fp32 partial tile that one CTA may leave in the workspace."""
        return self.block_m * self.block_n * 4

    def division(self, others: int, tiles_m: int) -> tuple[float, float]:
        """In stages of whole tiles: what dividing costs a CTA once, and what a stage of a divided tile takes.

        Partial sums are stored and loaded again, which takes about as long as stages of as many bytes. others: CTAs
        that share a tile with the one that stores it. tiles_m: rows of tiles.
        """
        return self.partial_bytes // self.loaded_stage_bytes, 1.0

    def cost(self, problem: Any, gpu: Gpu) -> Cost:
        """Return the predicted time of one launch."""
        return self.cost_at(problem.m, problem, gpu)

    def times_at(self, ms: NDArray[np.int64], serves: NDArray[np.bool_], problem: Any, gpu: Gpu) -> NDArray[np.float64]:
        """Return the predicted microseconds at each M; inf where the tile does not serve."""
        us = np.full(len(ms), np.inf)
        us[serves] = self.cost_at(ms[serves], problem, gpu).us
        return us

    def variants(self, problem: Any) -> Iterator[Mapping[str, Any]]:
        """Changes of fields that are worth measuring for the same tile: by default shorter rings, for rings have
        as many stages as fit."""
        yield from ({"stages": self.stages - fewer} for fewer in (1, 2))

    def check(self, problem: Any, target: Target) -> None:
        """Raise ArgumentError or TargetError unless the kernel can run the problem on the target, with
        ``blocks_per_sm`` CTAs on an SM and a workspace that holds their partial sums."""
        if ceil_div(problem.k, self.block_k) < self.cluster_k:
            raise ArgumentError("spec.cluster_k", self.cluster_k, f"at most the stages of k = {problem.k}")
        if not fits_workspace(self, self.blocks_per_sm):
            raise ArgumentError("spec.blocks_per_sm", self.blocks_per_sm, "CTAs whose partial sums fit the workspace")
        self.check_target(target)
        if self.smem_bytes > (most := target.smem_share_bytes(self.blocks_per_sm)):
            raise ArgumentError("spec.stages", self.stages, f"stages of at most {most} bytes, an SM's for each CTA")

    def check_target(self, target: Target) -> None:
        """Raise unless the target has what the kernel uses and a CTA's shared memory fits."""
        raise NotImplementedError

    # Shared memory: an array of slots for each operand, then what the epilogue needs, then the barriers.

    def stage_operands(self) -> tuple[Operand, ...]:
        """What a stage holds, in the order of the arrays."""
        raise NotImplementedError

    def epilogue_parts(self) -> tuple[tuple[str, int], ...]:
        """(name, bytes) of what the epilogue needs."""
        raise NotImplementedError

    @property
    def full_arrivals(self) -> int:
        """Arrivals that complete a stage: the producer's expect_tx."""
        return 1

    @property
    def releasing_warps(self) -> int:
        """Consumer warps that read a slot: each of them releases it."""
        return self.consumer_warps

    @property
    def ring(self) -> PipelineSpec:
        """The ring of stages. A slot that CTAs of a cluster fill together is released in each of them."""
        arrivals = self.full_arrivals, self.releasing_warps
        return PipelineSpec(self.stages, self.stage_operands(), *arrivals, cluster=self.cluster, by_operand=True)

    @property
    def transaction_bytes(self) -> int:
        """Bytes that a stage's full barrier expects. What lies outside of a tensor is filled and counted."""
        return self.ring.stage_tx_bytes

    @property
    def empty_arrivals(self) -> int:
        """Arrivals that release a slot."""
        return self.ring.empty_arrivals

    def smem_layout(self) -> list[tuple[str, int, int]]:
        """(name, offset, bytes) of each array."""
        ring = self.ring
        layout = [(o.name, ring.offset(o.name), ring.slot_distance(o.name) * self.stages) for o in ring.operands]
        offset = sum(size for _, _, size in layout)
        for name, size in self.epilogue_parts():
            layout.append((name, offset, size))
            offset += size
        return layout + ring.barrier_layout(base=offset)

    def smem_offset(self, name: str) -> int:
        """Of an array, bytes; 0 for one of ``optional_arrays`` that only discarded code of the kernel names."""
        offsets = dict.fromkeys(self.optional_arrays, 0) | {part: offset for part, offset, _ in self.smem_layout()}
        return offsets[name]

    @property
    def _slot_bytes(self) -> int:
        """A slot of the ring and its two barriers."""
        slots = sum(align_up(o.footprint_bytes, o.alignment) for o in self.stage_operands())
        return slots + 2 * MBARRIER_BYTES

    @property
    def _epilogue_bytes(self) -> int:
        return sum(size for _, size in self.epilogue_parts())

    @property
    def smem_bytes(self) -> int:
        """The end of smem_layout()."""
        return self._slot_bytes * self.stages + self._epilogue_bytes

    def max_stages(self, smem_bytes: int) -> int:
        """Return the number of stages that this much shared memory of a CTA holds; 0 or less if it holds none."""
        return (smem_bytes - self._epilogue_bytes) // self._slot_bytes

    def check_smem(self, target: Target) -> None:
        """Raise ArgumentError unless a CTA's shared memory fits."""
        if self.smem_bytes > target.smem_per_block_bytes:
            raise ArgumentError(
                "stages",
                self.stages,
                f"shared memory of at most {target.smem_per_block_bytes} bytes on {target.name}",
                f"this configuration takes {self.smem_bytes}; use fewer stages or a smaller tile",
            )

    def stage_layout(self) -> list[tuple[str, int]]:
        """(what, bytes) that one stage holds."""
        raise NotImplementedError

    @property
    def notes(self) -> list[str]:
        """Lines of the opening comment of the generated source, after the fields."""
        held = [f"  {size:6d} B  {what}" for what, size in self.stage_layout()]
        parts = [f"  {offset:6d}  {name}, {size} B" for name, offset, size in self.smem_layout() if size]
        return [
            f"{self.consumer_warps} warps consume, {self.producer_warps} produce; a CTA takes {self.smem_bytes} B.",
            "One stage holds",
            *held,
            "Shared memory, by offset",
            *parts,
        ]
