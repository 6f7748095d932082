"""Preset, Config and KernelConfig, the base classes for the configurations of the kernel families."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, ClassVar, Literal, TypeVar

from cudatma.errors import ArgumentError, alternatives, counted, quoted
from cudatma.kernels.checks import check_field_types
from cudatma.kernels.cost import Cost
from cudatma.kernels.gpu import Gpu
from cudatma.kernels.launch_struct import Member, in_order
from cudatma.pipeline import MBARRIER_BYTES
from cudatma.target import Target

C = TypeVar("C", bound="KernelConfig")


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A version of a family's kernel.

    Attributes
    ----------
    summary : str
        Description in lists of kernels.
    template : str, default ""
        Version whose template this version shares, or "" if it has its own template.
    loader : {"threads", "cp_async", "consumers", "producer_warp"}, default "producer_warp"
        How operands are loaded into shared memory: by all threads with plain loads, by all threads with cp.async, by a
        consumer thread with TMA, or by a dedicated producer warp with TMA.
    schedule : {"one_tile", "persistent", "pingpong", "stream_k"}, default "one_tile"
        How tiles are assigned to CTAs. Each CTA computes one tile ("one_tile") or several tiles in turn ("persistent").
        With "pingpong", the two warpgroups of a CTA alternate, and each computes its own tiles. With "stream_k", CTAs
        divide the tiles of the last wave.
    mma : {"scalar", "wgmma", "mma_sync"}, default "wgmma"
        Instruction that computes the products. "scalar" means FMA instructions.
    allowed : mapping of str to sequence
        Allowed values of a config's fields, by name. ``__post_init__`` validates all other fields.
    """

    summary: str
    template: str = ""
    loader: Literal["threads", "cp_async", "consumers", "producer_warp"] = "producer_warp"
    schedule: Literal["one_tile", "persistent", "pingpong", "stream_k"] = "one_tile"
    mma: Literal["scalar", "wgmma", "mma_sync"] = "wgmma"
    allowed: Mapping[str, Sequence[Any]]


class Config(ABC):
    """Base class of the configs from which a family chooses. A config determines the kernels of a call.

    A family's config is a flat, frozen dataclass that tuning files store.

    Attributes
    ----------
    version : str
        One of the family's ``kernels``.
    tile_m : int
        Number of rows of a tile.
    """

    __slots__ = ()

    #: Revision of the kernels. Increment it when a kernel's time changes by more than 2%, the smallest gain for which
    #: a tuning entry is shipped.
    revision: ClassVar[int]
    version: str
    tile_m: int

    @property
    @abstractmethod
    def entry(self) -> str:
        """Name of the kernel's ``extern "C"`` function, or of the configuration if a call launches several kernels."""

    @abstractmethod
    def check(self, problem: Any, target: Target) -> None:
        """Raise ArgumentError or TargetError if the kernels cannot run a problem on a target."""

    @abstractmethod
    def adapted(self, problem: Any) -> Any:
        """Return the config with this tile for another problem, or None if its measured speedup does not apply."""

    @abstractmethod
    def cost_at(self, m: Any, problem: Any, gpu: Gpu) -> Cost:
        """Return the predicted time for M = ``m``, an int or int64 array. The problem's own M is ignored."""

    def cost(self, problem: Any, gpu: Gpu) -> Cost:
        """Return the predicted time of one call."""
        return self.cost_at(problem.m, problem, gpu)

    def launches(self, problem: Any, target: Target) -> tuple[Any, ...]:
        """Return the configs of the kernels that a call launches, in order. Each config has a ``template``."""
        return (self,)

    def work(self, m: int) -> Hashable:
        """Return a key that is equal for configs that divide M rows in the same way."""
        return self

    def variants(self, problem: Any) -> Iterator[Mapping[str, Any]]:
        """Yield changes to fields other than the tile that are worth measuring."""
        yield from ()


class KernelConfig(Config):
    """Base class of the config of one kernel. All kernels of a family use the same dataclass.

    A family implements the abstract methods and properties, and validates the fields in ``__post_init__``. ``check()``
    raises an error if the config does not support a problem or a target.

    Attributes
    ----------
    version : str
        A key of ``presets``.
    tile_m, tile_n : int
        Tile size of a CTA.
    stages : int
        Number of stages of the ring.
    cluster_m, cluster_n : int
        Number of CTAs per cluster along M and N. These CTAs share loads.
    cluster_k : int
        Number of CTAs per cluster that split K.
    ctas_per_sm : int
        Number of CTAs per SM.
    """

    __slots__ = ()

    #: Name of the public function.
    function: ClassVar[str]
    presets: ClassVar[Mapping[str, Preset]]
    tile_n: int
    stages: int
    ctas_per_sm: int

    @property
    def cluster_m(self) -> int:
        return 1

    @property
    def cluster_n(self) -> int:
        return 1

    @property
    def cluster_k(self) -> int:
        return 1

    @property
    @abstractmethod
    def template(self) -> str:
        """Path of the template below ptx_templates/."""

    @property
    @abstractmethod
    def features(self) -> tuple[str, ...]:
        """Names of the features that the target must have."""

    @property
    @abstractmethod
    def consumer_warps(self) -> int:
        """Number of warps that compute."""

    @property
    @abstractmethod
    def producer_warps(self) -> int:
        """Number of warps that only load."""

    @property
    @abstractmethod
    def struct_members(self) -> Mapping[str, Member]:
        """Members of ``Problem`` that the family's kernels may read, in the order of the struct."""

    @property
    @abstractmethod
    def problem_names(self) -> tuple[str, ...]:
        """Names of the members of ``Problem`` that this kernel reads, in any order."""

    @property
    @abstractmethod
    def barriers(self) -> tuple[str, ...]:
        """Names of the barriers that each stage has."""

    @abstractmethod
    def stage_arrays(self) -> tuple[tuple[str, int], ...]:
        """Return (name, bytes) of a stage's arrays.

        Slots are aligned if the size of the array is a multiple of the alignment.
        """

    @abstractmethod
    def epilogue_parts(self) -> tuple[tuple[str, int], ...]:
        """Return (name, bytes) of each array between the ring and its barriers."""

    @abstractmethod
    def stage_layout(self) -> list[tuple[str, int]]:
        """Return (description, bytes) for each array in a stage, for reports."""

    @abstractmethod
    def check_problem(self, problem: Any) -> None:
        """Raise ArgumentError if the kernel cannot run a problem."""

    # ---- Version

    @property
    def preset(self) -> Preset:
        """Preset of this version."""
        return self.presets[self.version]

    @property
    def has_wgmma(self) -> bool:
        return self.preset.mma == "wgmma"

    # ---- Validity

    def check_values(self) -> None:
        """Raise ArgumentError for an unknown version, or for a value that the preset does not allow."""
        if not isinstance(self.version, str) or self.version not in self.presets:
            raise ArgumentError("version", self.version, quoted(self.presets))
        for name, values in self.preset.allowed.items():
            value = getattr(self, name)
            if type(value) is not type(values[0]) or value not in values:
                raise ArgumentError(name, value, _text(values))
        check_field_types(self)

    def check(self, problem: Any, target: Target) -> None:
        self.check_problem(problem)
        self.check_target(target)

    def check_target(self, target: Target) -> None:
        """Raise ArgumentError or TargetError if the kernel does not run on a target."""
        for feature in self.features:
            target.require(feature, f"version {self.version} of {self.function}")
        if self.smem_bytes > (limit := target.smem_share_bytes(self.ctas_per_sm)):
            several = f" for each of {self.ctas_per_sm} CTAs on an SM" if self.ctas_per_sm > 1 else ""
            allowed = f"small enough for the ring to fit in {limit} bytes of shared memory on {target.name}{several}"
            remedy = f"reduce stages or the tile; this configuration needs {self.smem_bytes} bytes"
            raise ArgumentError("stages", self.stages, allowed, remedy)

    # ---- Launch

    @property
    def problem_members(self) -> tuple[Member, ...]:
        """Members of ``Problem`` that the kernel reads, in the order of the struct."""
        return in_order(self.struct_members, self.problem_names)

    @property
    def problem_has_divisor(self) -> bool:
        return any(member.type == "Divisor" for member in self.problem_members)

    @property
    def cluster(self) -> int:
        """Number of CTAs per cluster that share loads."""
        return self.cluster_m * self.cluster_n

    @property
    def cluster_tile_m(self) -> int:
        """Number of rows in a cluster's tile."""
        return self.tile_m * self.cluster_m

    @property
    def cluster_tile_n(self) -> int:
        """Number of columns in a cluster's tile."""
        return self.tile_n * self.cluster_n

    @property
    def launch_cluster(self) -> int:
        """Number of CTAs per cluster in the launch."""
        return self.cluster * self.cluster_k

    @property
    def threads(self) -> int:
        return 32 * (self.consumer_warps + self.producer_warps)

    # Shared memory contains an array of slots for each operand, then the arrays of the epilogue, then the barriers.

    def smem_layout(self) -> list[tuple[str, int, int]]:
        """Return (name, offset, bytes) of each array."""
        parts = [(name, self.stages * size) for name, size in self.stage_arrays()]
        parts += self.epilogue_parts()
        parts += [(f"{name}_barriers", self.stages * MBARRIER_BYTES) for name in self.barriers]
        ends = accumulate(size for _, size in parts)
        return [(name, end - size, size) for (name, size), end in zip(parts, ends, strict=True)]

    @property
    def smem_bytes(self) -> int:
        """Bytes of dynamic shared memory per CTA."""
        return self._slot_bytes * self.stages + self._epilogue_bytes

    def max_stages(self, smem_bytes: int) -> int:
        """Return the number of stages that fit in ``smem_bytes``, or a number below 1 if no stage fits."""
        return (smem_bytes - self._epilogue_bytes) // self._slot_bytes

    def with_longest_ring(self: C, smem_bytes: int, max_stages: int) -> C | None:
        """Return the config with the most stages that fit in shared memory, or None if fewer than two fit."""
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

    # ---- Choice, tuning and reports

    def work(self, m: int) -> Hashable:
        config: Any = self
        tile = config.tile_n, config.tile_k, config.threads, config.ctas_per_sm, config.cluster, config.cluster_k
        return self.template, *tile, -(-m // self.tile_m)

    def variants(self, problem: Any) -> Iterator[Mapping[str, Any]]:
        """Yield changes to fields other than the tile that are worth measuring. By default, they shorten the ring."""
        yield from ({"stages": self.stages - fewer} for fewer in (1, 2))

    @property
    def notes(self) -> list[str]:
        """Lines that follow the fields in the opening comment of the generated source."""
        stage = [f"  {size:6d} bytes: {name}" for name, size in self.stage_layout()]
        producers = counted(self.producer_warps, "producer warp") if self.producer_warps else "no producer warps"
        return [
            f"{counted(self.consumer_warps, 'consumer warp')} and {producers}; "
            f"{self.smem_bytes} bytes of shared memory per CTA.",
            "Arrays of a stage:",
            *stage,
        ]


def _text(values: Sequence[Any]) -> str:
    """Return a description of allowed values."""
    if not isinstance(values, range) or len(values) < 3:
        return quoted(values) if isinstance(values[0], str) else alternatives(values)
    return f"{'' if values.step == 1 else f'a multiple of {values.step} from '}{values[0]} to {values[-1]}"
