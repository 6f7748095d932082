"""The rungs of the ladder, each with the one idea that it adds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from cudatma.errors import ArgumentError
from cudatma.kernels.attention.problem import Problem
from cudatma.kernels.attention.spec import OUTPUT_ROWS, AttentionSpec, Clocks
from cudatma.kernels.gpu import Gpu
from cudatma.kernels.schedule import ceil_div
from cudatma.kernels.version import Versions
from cudatma.pipeline import MBARRIER_BYTES
from cudatma.target import Target

#: Strides of operands that threads read by themselves.
_OPERAND_ROWS = tuple(f"{name}_{step}" for name in ("q", "k", "v") for step in ("pitch", "head", "batch"))
#: Registers for scores, probabilities and output that ptxas does not spill, by warpgroups that multiply; fewer where
#: scores are capped.
_MOST_HELD, _MOST_HELD_WITH_CAP = {1: 176, 2: 200, 3: 128}, {1: 160, 2: 188, 3: 120}
_ONE_RING = ("full_barriers", "empty_barriers")


@dataclass(frozen=True, slots=True)
class AttentionPhase1(AttentionSpec):
    """Scalar loops over keys and values in shared memory: the baseline."""

    version: ClassVar[str] = "phase1"
    template: ClassVar[str] = "kernels/attention_phase1.cu.j2"
    clocks_of: ClassVar[Mapping[tuple[int, int], Clocks]] = {(1, 1): Clocks(around=2000, products=40)}
    operand_names: ClassVar[tuple[str, ...]] = ("q", "k", "v")
    work_names: ClassVar[tuple[str, ...]] = (*OUTPUT_ROWS, *_OPERAND_ROWS)
    features: ClassVar[tuple[str, ...]] = ("griddepcontrol",)
    consumer_warps: ClassVar[int] = 4
    allowed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **AttentionSpec.allowed,
        "has_sink": (False,),
        "block_m": (32,),
        "block_n": (16, 32),
        "stages": (1,),
        "warpgroups": (1,),
    }

    def check_block_m(self) -> None:
        """Four of 128 threads share a query."""

    def smem_layout(self) -> list[tuple[str, int, int]]:
        """A block of keys and one of values."""
        k, v = (operand.footprint_bytes for operand in self.stage_operands())
        return [("k", 0, k), ("v", k, v)]


@dataclass(frozen=True, slots=True)
class AttentionA1(AttentionSpec):
    """cp.async fills two slots in turn; all warps load and multiply."""

    version: ClassVar[str] = "a1"
    template: ClassVar[str] = "kernels/attention_a1.cu.j2"
    clocks_of: ClassVar[Mapping[tuple[int, int], Clocks]] = {
        (1, 1): Clocks(around=2307, products=1.943, scores=345, block=227, shared=0.373),
        (2, 1): Clocks(around=3954, products=1.75, shared=0.274),
    }
    operand_names: ClassVar[tuple[str, ...]] = ("q", "k", "v")
    work_names: ClassVar[tuple[str, ...]] = (*OUTPUT_ROWS, *_OPERAND_ROWS)
    features: ClassVar[tuple[str, ...]] = ("griddepcontrol", "wgmma", "stmatrix")
    allowed: ClassVar[Mapping[str, tuple[Any, ...]]] = {**AttentionSpec.allowed, "stages": (2,), "warpgroups": (1, 2)}

    def __post_init__(self) -> None:
        super(AttentionA1, self).__post_init__()
        rows = 128 * self.warpgroups // (self.span_bytes // 16)
        if self.block_n % rows:
            raise ArgumentError("block_n", self.block_n, f"a multiple of {rows}, rows that all threads copy at a time")

    def smem_layout(self) -> list[tuple[str, int, int]]:
        """As TiledKernel's, without barriers."""
        layout = super(AttentionA1, self).smem_layout()
        return [part for part in layout if not part[0].endswith(("_barrier", "_barriers"))]


@dataclass(frozen=True, slots=True)
class AttentionA2(AttentionSpec):
    """TMA fills a ring of slots; the warps that multiply also ask for the loads."""

    version: ClassVar[str] = "a2"
    template: ClassVar[str] = "kernels/attention_a2.cu.j2"
    clocks_of: ClassVar[Mapping[tuple[int, int], Clocks]] = {
        (1, 1): Clocks(around=2572, products=1.867, scores=1678, block=13, shared=0.448),
        (2, 1): Clocks(around=4662, products=1.486, shared=0.15),
    }
    allowed: ClassVar[Mapping[str, tuple[Any, ...]]] = {**AttentionSpec.allowed, "warpgroups": (1, 2)}


@dataclass(frozen=True, slots=True)
class AttentionWithProducer(AttentionSpec):
    """One warp loads, the others multiply; keys and values have separate rings.
    is_varlen: whether sequences of different lengths lie one after the other."""

    is_varlen: bool = False  # type: ignore[misc]

    producer_warps: ClassVar[int] = 1
    allowed: ClassVar[Mapping[str, tuple[Any, ...]]] = {**AttentionSpec.allowed, "is_varlen": (False, True)}

    def ring_barriers(self) -> tuple[tuple[str, int], ...]:
        """(name, bytes) of the barriers of the rings of keys and of values."""
        size = self.stages * MBARRIER_BYTES
        return tuple((f"{of}_{kind}_barriers", size) for of in ("k", "v") for kind in ("full", "empty"))

    def smem_layout(self) -> list[tuple[str, int, int]]:
        """As TiledKernel's, with barriers for each of the two rings."""
        layout = [part for part in super(AttentionWithProducer, self).smem_layout() if part[0] not in _ONE_RING]
        _, offset, size = layout[-1]
        for name, its in self.ring_barriers():
            offset += size
            layout.append((name, offset, size := its))
        return layout


@dataclass(frozen=True, slots=True)
class AttentionA3(AttentionWithProducer):
    """A producer; warpgroups overlap softmax and products. blocks_per_sm: CTAs that share an SM, with one warpgroup
    each."""

    blocks_per_sm: int = 1  # type: ignore[misc]

    version: ClassVar[str] = "a3"
    template: ClassVar[str] = "kernels/attention_a3.cu.j2"
    clocks_of: ClassVar[Mapping[tuple[int, int], Clocks]] = {
        (1, 1): Clocks(around=1842, products=1.139, scores=682, block=70, start=1067),
        (2, 1): Clocks(around=5880, products=0.904, scores=314, block=442),
        (3, 1): Clocks(around=4972, products=0.473, scores=750, block=590),
    }
    #: One loads; setmaxnreg acts on whole warpgroups.
    producer_warps: ClassVar[int] = 4
    allowed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **AttentionWithProducer.allowed,
        "blocks_per_sm": (1, 2),
    }
    features: ClassVar[tuple[str, ...]] = (*AttentionSpec.features, "setmaxnreg")

    def __post_init__(self) -> None:
        super(AttentionA3, self).__post_init__()
        if self.blocks_per_sm > 1 and self.warpgroups > 1:
            raise ArgumentError("blocks_per_sm", self.blocks_per_sm, "1 for several warpgroups")

    def waves(self, tiles: Any, gpu: Gpu) -> tuple[Any, Any]:
        """As AttentionSpec's; where tiles take the same time, the last ones hold up all SMs."""
        if self.is_causal:
            return super(AttentionA3, self).waves(tiles, gpu)
        share = np.minimum(self.blocks_per_sm, ceil_div(tiles, gpu.sm_count))
        return 1.0 * ceil_div(tiles, gpu.sm_count * share) * share, 1.0

    @property
    def tile_name(self) -> str:
        name = super(AttentionA3, self).tile_name
        return name + (f"_b{self.blocks_per_sm}" if self.blocks_per_sm > 1 else "")

    @property
    def consumer_registers(self) -> int:
        """Of a thread that multiplies, as setmaxnreg asks for; 0: ptxas has enough for all threads."""
        return {1: 208 if self.blocks_per_sm > 1 else 0, 2: 240, 3: 160}[self.warpgroups]

    @property
    def producer_registers(self) -> int:
        """Of a thread of the other warpgroup."""
        return {1: 40, 2: 24, 3: 32}[self.warpgroups]

    @property
    def held_registers(self) -> int:
        """Of a thread that multiplies: the scores and the probabilities of a block, and the output."""
        return self.block_n // 2 + self.block_n // 4 + self.v_head_dim // 2

    def check(self, problem: Problem, target: Target) -> None:
        """As AttentionSpec's; ptxas must not spill."""
        most = (_MOST_HELD_WITH_CAP if self.has_softcap else _MOST_HELD)[self.warpgroups]
        if self.held_registers > most:
            allowed = f"scores, probabilities and output of at most {most} registers, not {self.held_registers}"
            raise ArgumentError("spec.block_n", self.block_n, allowed)
        super(AttentionA3, self).check(problem, target)


@dataclass(frozen=True, slots=True)
class AttentionA4(AttentionA3):
    """Persistent CTAs, the longest causal tiles first; results leave by TMA while the next tile is computed. q_stages:
    tiles of queries in shared memory."""

    q_stages: int = 1  # type: ignore[misc]

    version: ClassVar[str] = "a4"
    template: ClassVar[str] = "kernels/attention_a4.cu.j2"
    is_persistent: ClassVar[bool] = True
    stores_by_tma: ClassVar[bool] = True
    allowed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **AttentionA3.allowed,
        "warpgroups": (2, 3),
        "blocks_per_sm": (1,),
        "is_varlen": (False,),
        "q_stages": (1, 2),
    }
    work_names: ClassVar[tuple[str, ...]] = ()
    #: With a second slot of queries a tile begins while the one before is stored.
    clocks_of: ClassVar[Mapping[tuple[int, int], Clocks]] = {
        (2, 1): Clocks(around=7149, products=1.06, scores=244),
        (2, 2): Clocks(around=2575, products=0.62, scores=1063, block=135, start=3209),
        (3, 1): Clocks(around=4972, products=0.473, scores=750, block=590),
        (3, 2): Clocks(around=2228, products=0.768, scores=711, block=100, start=3840),
    }

    @property
    def tile_name(self) -> str:
        return super(AttentionA4, self).tile_name + f"_q{self.q_stages}"

    def ctas(self, problem: Problem, sm_count: int) -> int:
        """CTAs of a launch: one an SM, unless there are fewer tiles."""
        return min(self.tiles(problem), sm_count)

    def epilogue_parts(self) -> tuple[tuple[str, int], ...]:
        """Queries, whose place the results take, the numbers of their tiles, and the barriers of all."""
        size = self.q_stages * MBARRIER_BYTES
        barriers = (("q_full_barriers", size), ("q_empty_barriers", size), ("staged_barriers", size))
        return (("q", self.q_stages * 2 * self.block_m * self.head_dim), ("tiles", 8), *barriers)


@dataclass(frozen=True, slots=True)
class AttentionP1(AttentionWithProducer):
    """mma.sync instead of wgmma; for 99 KB of shared memory."""

    version: ClassVar[str] = "p1"
    template: ClassVar[str] = "kernels/attention_p1.cu.j2"
    #: An estimate: mma.sync of a GeForce, which has an eighth of the rate. Not measured.
    clocks_of: ClassVar[Mapping[tuple[int, int], Clocks]] = {
        (1, 1): Clocks(around=2000, products=12),
        (2, 1): Clocks(around=2000, products=10),
    }
    has_wgmma: ClassVar[bool] = False
    features: ClassVar[tuple[str, ...]] = ("griddepcontrol", "tma", "mma_sync", "stmatrix")
    allowed: ClassVar[Mapping[str, tuple[Any, ...]]] = {**AttentionWithProducer.allowed, "warpgroups": (1, 2)}


VERSIONS: dict[str, type[AttentionSpec]] = {
    kind.version: kind for kind in (AttentionPhase1, AttentionA1, AttentionA2, AttentionA3, AttentionA4, AttentionP1)
}


#: "": any.
CHOICE = Versions("attention", "CUDATMA_ATTENTION_VERSION", tuple(VERSIONS))
chosen_version = CHOICE.chosen
