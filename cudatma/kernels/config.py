"""KernelConfig: what the configurations of gemm, attention and marlin_gemm have in common."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from cudatma.errors import ArgumentError
from cudatma.kernels.cost import Cost
from cudatma.kernels.gpu import Gpu
from cudatma.kernels.launch_struct import Member, in_order
from cudatma.pipeline import MBARRIER_BYTES
from cudatma.target import Target

C = TypeVar("C", bound="KernelConfig")


class KernelConfig:
    """Base of a family's config: one flat, frozen dataclass for all kernels of the family.

    ``version`` is a key of ``presets``. A preset states what distinguishes a version, and the values allowed for each
    field. ``__post_init__`` of a config validates its fields; ``check()`` raises an error if the config does not fit a
    problem or a target. Fields that all configs have: tile_m, tile_n and tile_k are a CTA's tile and the K of a stage;
    cluster_m and cluster_n are the CTAs of a cluster along M and N, and cluster_k those that divide K; ctas_per_sm
    are the CTAs on an SM.
    """

    __slots__ = ()

    #: The name of the public function.
    family: ClassVar[str]
    presets: ClassVar[Mapping[str, Any]]
    #: Increment this when a kernel's time changes by more than 2 %, the smallest gain for which a tuning entry is kept.
    revision: ClassVar[int]

    if TYPE_CHECKING:  # fields and properties of each config

        @property
        def version(self) -> str: ...
        @property
        def template(self) -> str: ...
        @property
        def entry(self) -> str: ...
        @property
        def tile_m(self) -> int: ...
        @property
        def tile_n(self) -> int: ...
        @property
        def tile_k(self) -> int: ...
        @property
        def stages(self) -> int: ...
        @property
        def cluster_m(self) -> int: ...
        @property
        def cluster_n(self) -> int: ...
        @property
        def cluster_k(self) -> int: ...
        @property
        def ctas_per_sm(self) -> int: ...
        @property
        def consumer_warps(self) -> int: ...
        @property
        def producer_warps(self) -> int: ...
        @property
        def features(self) -> tuple[str, ...]:
            """Features that the target must have."""
            ...

        @property
        def struct_members(self) -> Mapping[str, Member]:
            """The members of ``Problem`` that the family's kernels may read, in the order of the struct."""
            ...

        @property
        def problem_names(self) -> tuple[str, ...]:
            """The members of ``Problem`` that the kernel reads, in any order."""
            ...

        def stage_arrays(self) -> tuple[tuple[str, int], ...]:
            """Return (name, bytes) of a stage's arrays.

            A slot is aligned if the array's size is a multiple of the alignment.
            """
            ...

        def epilogue_parts(self) -> tuple[tuple[str, int], ...]:
            """Return (name, bytes) of the shared memory between the ring and its barriers."""
            ...

        @property
        def barriers(self) -> tuple[str, ...]:
            """Names of the barriers that each stage has."""
            ...

        def stage_layout(self) -> list[tuple[str, int]]:
            """Return (what, bytes) of a stage, for reports."""
            ...

        def check_problem(self, problem: Any) -> None:
            """Raise ArgumentError if the kernel cannot run a problem."""
            ...

        def adapted(self, problem: Any) -> Any:
            """Return the same tile for another problem's fields, or None if its gain does not carry over."""
            ...

        def cost_at(self, m: Any, problem: Any, gpu: Gpu) -> Cost:
            """Return the predicted time. ``m``, an int or int64 array, replaces the problem's M."""
            ...

    # Validity.

    @property
    def allowed(self) -> Mapping[str, Sequence[Any]]:
        """The values that the preset lists for fields of the config."""
        kind: Any = type(self)
        return _listed(kind, self.version)

    def check_values(self) -> None:
        """Raise ArgumentError for an unknown version, and for a field with a value that its preset does not list."""
        if not isinstance(self.version, str) or self.version not in self.presets:
            raise ArgumentError("version", self.version, ", ".join(self.presets))
        for name, values in self.allowed.items():
            value = getattr(self, name)
            if type(value) is not type(values[0]) or value not in values:
                raise ArgumentError(name, value, _text(values))

    def check(self, problem: Any, target: Target) -> None:
        """Raise ArgumentError or TargetError if the kernel cannot run a problem on a target."""
        self.check_problem(problem)
        self.check_target(target)

    def check_target(self, target: Target) -> None:
        """Raise ArgumentError or TargetError if the kernel does not run on a target."""
        for feature in self.features:
            target.require(feature, f"version {self.version} of {self.family}")
        if self.smem_bytes > (limit := target.smem_share_bytes(self.ctas_per_sm)):
            several = f" for each of {self.ctas_per_sm} CTAs on an SM" if self.ctas_per_sm > 1 else ""
            allowed = f"shared memory of at most {limit} bytes on {target.name}{several}"
            remedy = f"this configuration takes {self.smem_bytes}; use fewer stages or a smaller tile"
            raise ArgumentError("stages", self.stages, allowed, remedy)

    # The launch.

    @property
    def problem_members(self) -> tuple[Member, ...]:
        """The members of ``Problem`` that the kernel reads, in the order of the struct."""
        return in_order(self.struct_members, self.problem_names)

    @property
    def problem_has_divisor(self) -> bool:
        return any(member.type == "Divisor" for member in self.problem_members)

    @property
    def cluster(self) -> int:
        """CTAs of a cluster that share loads."""
        return self.cluster_m * self.cluster_n

    @property
    def cluster_tile_m(self) -> int:
        """Rows of M of a cluster's tile."""
        return self.tile_m * self.cluster_m

    @property
    def cluster_tile_n(self) -> int:
        """Columns of N of a cluster's tile."""
        return self.tile_n * self.cluster_n

    @property
    def launch_cluster(self) -> int:
        """CTAs of a cluster of the launch."""
        return self.cluster * self.cluster_k

    @property
    def threads(self) -> int:
        return 32 * (self.consumer_warps + self.producer_warps)

    # Shared memory: an array of slots for each operand, then the epilogue's parts, then the barriers.

    def smem_layout(self) -> list[tuple[str, int, int]]:
        """Return (name, offset, bytes) of each array."""
        parts = [(name, self.stages * size) for name, size in self.stage_arrays()]
        parts += self.epilogue_parts()
        parts += [(f"{name}_barriers", self.stages * MBARRIER_BYTES) for name in self.barriers]
        ends = accumulate(size for _, size in parts)
        return [(name, end - size, size) for (name, size), end in zip(parts, ends, strict=True)]

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""
        return self._slot_bytes * self.stages + self._epilogue_bytes

    def max_stages(self, smem_bytes: int) -> int:
        """Return the number of stages that this much shared memory holds; 0 or less if it holds none."""
        return (smem_bytes - self._epilogue_bytes) // self._slot_bytes

    def with_longest_ring(self: C, smem_bytes: int, max_stages: int) -> C | None:
        """Return the config with the most stages that shared memory holds; None if it does not hold two."""
        stages = min(max_stages, self.max_stages(smem_bytes))
        if stages < 2:
            return None
        return self if stages == self.stages else replace(self, stages=stages)  # type: ignore[type-var]

    @property
    def _slot_bytes(self) -> int:
        return sum([size for _, size in self.stage_arrays()]) + len(self.barriers) * MBARRIER_BYTES

    @property
    def _epilogue_bytes(self) -> int:
        return sum([size for _, size in self.epilogue_parts()])

    # Choosing, tuning and reports.

    def cost(self, problem: Any, gpu: Gpu) -> Cost:
        """Return the predicted time of one launch."""
        return self.cost_at(problem.m, problem, gpu)

    def variants(self, problem: Any) -> Iterator[Mapping[str, Any]]:
        """Yield changes of fields that are worth measuring for the same tile: by default, shorter rings."""
        yield from ({"stages": self.stages - fewer} for fewer in (1, 2))

    @property
    def notes(self) -> list[str]:
        """Lines of the opening comment of the generated source, after the fields."""
        held = [f"  {size:6d} B  {what}" for what, size in self.stage_layout()]
        return [
            f"{self.consumer_warps} warps consume, {self.producer_warps} produce; a CTA takes {self.smem_bytes} B.",
            "One stage holds",
            *held,
        ]


@lru_cache(maxsize=64)
def _listed(kind: Any, version: str) -> dict[str, Sequence[Any]]:
    """Return the values that the preset of a version lists for fields of a config."""
    preset = kind.presets[version]
    names = [name for name in type(preset).__dataclass_fields__ if name in vars(kind)["__dataclass_fields__"]]
    return {name: getattr(preset, name) for name in names}


def _text(values: Sequence[Any]) -> str:
    """Return allowed values in words."""
    if not isinstance(values, range) or len(values) < 3:
        return ", ".join(str(value) or '""' for value in values)
    return f"{'' if values.step == 1 else f'a multiple of {values.step} from '}{values[0]} to {values[-1]}"
