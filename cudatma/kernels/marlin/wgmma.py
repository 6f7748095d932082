"""What the SM90 Marlin template needs to know: one frozen dataclass, every rule stated once.

The GEMM is computed transposed, C^T = W^T X^T: N is the M dimension of wgmma.m64nNk16, and M its N dimension. A
warpgroup dequantizes its weights into operand A's registers; activations are operand B, read from shared memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from cudatma.dtypes import activation_type
from cudatma.errors import ArgumentError
from cudatma.kernels.cost import Cost
from cudatma.kernels.gpu import Gpu
from cudatma.kernels.launch_struct import RASTER, RESULT, STREAM_K
from cudatma.kernels.marlin.cost import wgmma_cost, wgmma_division, wgmma_stage_clocks
from cudatma.kernels.marlin.problem import GROUP_SIZES, Problem
from cudatma.kernels.marlin.staged_tile import LONG_BYTES, MAX_BOX, MAX_CLUSTER_K, StagedTile
from cudatma.quantization.scale_range import FORMS
from cudatma.target import KIB, Target

WARPGROUP_THREADS = 128
#: What setmaxnreg leaves a producer thread.
PRODUCER_REGISTERS = 40
_REGISTERS_PER_CTA = 65536
#: With more accumulators a thread, what two warpgroups and more get without setmaxnreg is too little.
_MOST_PLAIN_ACCUMULATORS = 96
#: What a consumer thread needs in addition to its accumulators: for weights, fragments, scales and addresses.
_WORKING_REGISTERS = 64
_K16_PER_K64 = 4
#: Most staging bytes of all warpgroups, in tiles of at most _SHORT_M rows; longer tiles get half of it.
_STAGING_BYTES, _SHORT_M = 20 * KIB, 128
#: Four warpgroups have too few registers each: in 91 layers at 13 values of M, four are never faster by 2 %. [H200]
_MOST_WARPGROUPS = 3
#: Worth measuring: (wgmmas of a commit group, outstanding groups); (warpgroups, warpgroups_k).
_PIPELINES = ((1, 3), (2, 1), (1, 1), (4, 1))
_WARPGROUPS = ((1, 1), (2, 1), (3, 1), (1, 2))


@dataclass(frozen=True, slots=True)
class WgmmaSpec(StagedTile):
    """One instance of ``kernels/marlin_wgmma.cu.j2``. Every operand comes by TMA.

    dtype, group_size, has_zeros: as in MmaSyncSpec.
    block_m, block_k: M and K of a CTA's tile; its N is 64 * warpgroups * stack.
    warpgroups: warpgroups that divide N. stack: times 64, the columns of W of each.
    warpgroups_k: warpgroups that compute the same columns and divide the K of each stage; their sums are added up in
    shared memory.
    stages: slots of the ring.
    cluster: CTAs side by side in N that share their activations: each loads 1 / cluster of them for all.
    mmas_per_commit: wgmmas of each accumulator in a commit group, each over a K of 16.
    commits_in_flight: groups that the tensor cores work on while the weights of the next one are dequantized.
    consumer_registers: registers that setmaxnreg gives a consumer thread, from the producer's warpgroup; 0: none.
    fused: scale and offset of a weight in one multiply-add, for symmetric weights in groups: ``"as_stored"`` or, for
    fp16, ``"shifted"``, as quantization/scale_range.py finds for the scales; ``"none"``. The result has the same bits;
    in bf16 with scales taken times 2^-p only where no product or sum, times 2^-p or not, leaves fp32's normal range.
    cluster_k: CTAs of a cluster that divide the K of its only tile by whole stages; each adds up, and stores, a part of
    the rows. For layers of few tiles, instead of sums that go through global memory.
    pingpong: two warpgroups take the CTA's tiles in turn: while one stores its tile, the other one multiplies.
    """

    dtype: str
    group_size: int
    has_zeros: bool
    block_m: int
    block_k: int
    warpgroups: int
    stack: int
    stages: int
    cluster: int = 1
    mmas_per_commit: int = 2
    commits_in_flight: int = 1
    consumer_registers: int = 0
    warpgroups_k: int = 1
    fused: str = "none"
    cluster_k: int = 1
    pingpong: bool = False

    template: ClassVar[str] = "kernels/marlin_wgmma.cu.j2"
    revision: ClassVar[int] = 1
    blocks_per_sm: ClassVar[int] = 1
    #: The consumers release a slot in the middle of the next stage. [tools/sass_hazards.py]
    gives_back_previous: ClassVar[bool] = True

    def __post_init__(self) -> None:
        activation_type(self.dtype)
        one_of = {
            "group_size": GROUP_SIZES,
            "block_k": (64, 128, 256),
            "warpgroups": (1, 2, 3),
            "warpgroups_k": (1, 2),
            "stack": (1, 2),
            "cluster": (1, 2),
            "mmas_per_commit": (1, 2, 4),
            "commits_in_flight": (1, 3),
            "consumer_registers": (0, *range(PRODUCER_REGISTERS, 241, 8)),
            "fused": ("none", *FORMS),
            "cluster_k": tuple(range(1, MAX_CLUSTER_K + 1)),
            "pingpong": (False, True),
        }
        self.check_values(one_of)
        for field in ("block_m", "stages"):
            if type(getattr(self, field)) is not int:
                raise ArgumentError(field, getattr(self, field), "an int")
        if not 2 <= self.stages <= 16:
            raise ArgumentError("stages", self.stages, "2 to 16")
        self._check_tile()
        self._check_groups()
        self._check_registers()
        self._check_fused()

    def _check_tile(self) -> None:
        if self.block_m % 8 or not 8 <= self.block_m <= MAX_BOX:
            raise ArgumentError("block_m", self.block_m, f"a multiple of 8 from 8 to {MAX_BOX}")
        if self.block_m % (8 * self.cluster):
            why = "the 128-byte swizzle repeats after 8 rows, and each CTA loads its part of the rows"
            raise ArgumentError("block_m", self.block_m, f"a multiple of {8 * self.cluster} with cluster 2", why)
        if self.cluster_k > 1 and self.cluster > 1:
            why = "the CTAs of a cluster share activations, or divide K"
            raise ArgumentError("cluster_k", self.cluster_k, "1 with cluster 2", why)
        if self.pingpong:
            for field in ("warpgroups", "warpgroups_k", "cluster_k"):
                if getattr(self, field) > 1:
                    raise ArgumentError(field, getattr(self, field), "1 with pingpong: one warpgroup has a tile")
        if self.warpgroups * self.warpgroups_k > _MOST_WARPGROUPS:
            allowed = f"at most {_MOST_WARPGROUPS} together"
            raise ArgumentError("warpgroups * warpgroups_k", self.consumer_warps // 4, allowed)
        if self.block_n > MAX_BOX:
            allowed = f"at most {MAX_BOX // 64} together"
            raise ArgumentError("warpgroups * stack", self.block_n // 64, allowed, f"a box of scales has {MAX_BOX}")

    def _check_groups(self) -> None:
        """Every group must be complete when the next iteration begins: ptxas knows which registers a wgmma in flight
        reads only inside of the loop's body. It would give A's registers to the next weights, and results be wrong."""
        if self.k64_per_warpgroup < 1:
            why = "each warpgroup takes a multiple of 64 of K"
            raise ArgumentError("warpgroups_k", self.warpgroups_k, f"at most block_k / 64 = {self.block_k // 64}", why)
        groups = self.k64_per_warpgroup * self.groups_per_k64
        if groups < self.commits_in_flight + 1:
            remedy = "take a larger block_k or fewer wgmmas a group, or keep fewer groups in flight"
            raise ArgumentError(
                "commits_in_flight", self.commits_in_flight, f"at most {groups - 1}: a stage is {groups} groups", remedy
            )

    def _check_registers(self) -> None:
        if self.accumulators > 128:
            raise ArgumentError(
                "stack * block_m", self.stack * self.block_m, "at most 256", "a thread holds half as many accumulators"
            )
        if not self.consumer_registers:
            if self.accumulators > _MOST_PLAIN_ACCUMULATORS and self.consumer_warps > 4:
                allowed = f"not 0 with {self.accumulators} accumulators a thread"
                raise ArgumentError("consumer_registers", 0, allowed, "setmaxnreg provides registers for them")
            return
        least = self.accumulators + _WORKING_REGISTERS
        pool = _REGISTERS_PER_CTA // self.threads // 8 * 8 * self.threads
        most = (pool // WARPGROUP_THREADS - PRODUCER_REGISTERS) // (self.consumer_warps // 4) // 8 * 8
        if not least <= self.consumer_registers <= most:
            remedy = "fewer spill; setmaxnreg.inc waits forever for registers that the CTA does not have"
            warpgroups = self.consumer_warps // 4
            allowed = f"0, or {least} to {most} with {warpgroups} warpgroups of {self.accumulators} accumulators"
            raise ArgumentError("consumer_registers", self.consumer_registers, allowed, remedy)

    def _check_fused(self) -> None:
        if self.fused != "none" and not self.allows(self.fused):
            why = "nibbles are taken for subnormals, and 8 for the zero point; shifted ones leave bf16's"
            raise ArgumentError("fused", self.fused, "none but for symmetric weights in groups; bf16: as_stored", why)

    @property
    def is_fused(self) -> bool:
        return self.fused != "none"

    @property
    def nibble_shift(self) -> int:
        """Bits up from where the lowest nibbles are stored, to where they are multiplied."""
        return FORMS.get(self.fused, 0)

    def allows(self, fused: str) -> bool:
        """Whether ``fused`` may have this value, whatever the values of the scales."""
        return not self.has_zeros and self.has_stage_scales and not (self.is_bf16 and fused == "shifted")

    @property
    def scale_form(self) -> str:
        return self.fused

    def variants(self, problem: Problem) -> Iterator[Mapping[str, Any]]:
        yield from ({"mmas_per_commit": mmas, "commits_in_flight": groups} for mmas, groups in _PIPELINES)
        for warpgroups, warpgroups_k in _WARPGROUPS:
            if self.block_n % (64 * warpgroups) == 0:
                stack = self.block_n // (64 * warpgroups)
                yield {"warpgroups": warpgroups, "stack": stack, "warpgroups_k": warpgroups_k}
        yield from StagedTile.variants(self, problem)

    def in_form(self, fused: str) -> WgmmaSpec:
        """The spec with ``fused`` where that may be set, else with ``"none"``."""
        fused = fused if self.allows(fused) else "none"
        return self if fused == self.fused else replace(self, fused=fused)

    @property
    def parameter_names(self) -> tuple[str, ...]:
        tables = () if self.has_stage_scales else self.tables()
        sums = () if self.cluster_k > 1 else ("partials", "flags")
        return ("weight_map", *self.table_maps(), "activation_map", *tables, "bias", "output", *sums, "problem")

    @property
    def problem_names(self) -> tuple[str, ...]:
        work = ("k_iterations", *RASTER) if self.cluster_k > 1 else STREAM_K
        scales = () if self.has_stage_scales else ("scale_pitch",)
        factors = ("scale_offset", "scale_back") if self.is_fused else ()
        return (*work, "prefetch_stages", *scales, *factors, *RESULT)

    # What a reader of the generated source finds as named constants.

    @property
    def slices(self) -> int:
        return self.warpgroups_k

    @property
    def entry(self) -> str:
        scales = "column" if self.group_size == -1 else f"g{self.group_size}"
        zeros = "_zeros" if self.has_zeros else ""
        fused = {"none": "", "as_stored": "_fused", "shifted": "_shifted"}[self.fused]
        slices = f"_k{self.warpgroups_k}" if self.warpgroups_k > 1 else ""
        tile = f"{self.block_m}x{self.block_n}x{self.block_k}_w{self.warpgroups}{slices}"
        ring = f"s{self.stages}_g{self.mmas_per_commit}{self.commits_in_flight}"
        registers = f"_r{self.consumer_registers}" if self.consumer_registers else ""
        cluster = f"_c{self.cluster}" if self.cluster > 1 else ""
        divided = f"_x{self.cluster_k}" if self.cluster_k > 1 else ""
        pingpong = "_pp" if self.pingpong else ""
        weights = f"{self.activation.short}_{scales}{zeros}{fused}"
        return f"marlin_wgmma_{weights}_{tile}_{ring}{registers}{cluster}{divided}{pingpong}"

    @property
    def block_n(self) -> int:
        return 64 * self.warpgroups * self.stack

    @property
    def tiles_at_once(self) -> int:
        """Tiles that a CTA's warpgroups hold."""
        return 2 if self.pingpong else 1

    @property
    def consumer_warps(self) -> int:
        return 4 * self.warpgroups * self.warpgroups_k * self.tiles_at_once

    @property
    def releasing_warps(self) -> int:
        return self.consumer_warps // self.tiles_at_once

    @property
    def k64_per_warpgroup(self) -> int:
        return self.block_k // 64 // self.warpgroups_k

    @property
    def producer_warps(self) -> int:
        """One thread produces; setmaxnreg takes registers from a whole warpgroup."""
        return 4 if self.consumer_registers else 1

    @property
    def producer_registers(self) -> int:
        return PRODUCER_REGISTERS

    def prefetch_stages(self, weight_bytes: int) -> int:
        """Two for long layers up to M = 16 as well, unless a cluster divides K: 0 to 4 % faster. [H200]"""
        if self.block_m <= 16 and self.cluster_k == 1 and weight_bytes >= LONG_BYTES:
            return 2
        return StagedTile.prefetch_stages(self, weight_bytes)

    @property
    def warp_tiles(self) -> int:
        return 4 * self.warpgroups

    @property
    def accumulators(self) -> int:
        """fp32 values that a thread holds: 64 x block_m over 128 threads, times ``stack``."""
        return self.stack * self.block_m // 2

    @property
    def groups_per_k64(self) -> int:
        """Commit groups over a K of 64."""
        return _K16_PER_K64 // self.mmas_per_commit

    @property
    def release_k64(self) -> int:
        """Index of the 64 of K in a stage after which the previous stage's slot is released: all groups in flight then
        belong to this stage."""
        return max(0, -(-self.commits_in_flight // self.groups_per_k64) - 1)

    @property
    def loaded_m(self) -> int:
        """Rows of x that one CTA of the cluster loads for all."""
        return self.block_m // self.cluster

    @property
    def cluster_mask(self) -> int:
        return (1 << self.cluster) - 1

    def epilogue_parts(self) -> tuple[tuple[str, int], ...]:
        sums = (self.warpgroups_k - 1) * self.block_n * self.block_m * 4
        return (
            ("slice_sums", sums),
            ("staging", self.warpgroups * self.tiles_at_once * self.staging_bytes),
            ("cluster_sums", (self.cluster_k - 1) * self.own_rows * self.block_n * 4),
            ("cluster_barrier", 8 if self.cluster_k > 1 else 0),
        )

    @property
    def own_rows(self) -> int:
        """Rows of the tile that one CTA of the cluster adds up and stores; the last CTAs may have fewer."""
        return 8 * -(-self.block_m // (8 * self.cluster_k))

    @property
    def staging_rows(self) -> int:
        """Rows that a warpgroup stores together. Many save barriers; the limit leaves shared memory to the stages."""
        if self.cluster_k > 1:
            return self.own_rows
        most = _STAGING_BYTES if self.block_m <= _SHORT_M else _STAGING_BYTES // 2
        pitch = self.warpgroups * self.tiles_at_once * self.staging_pitch_bytes
        fitting = (rows for rows in (64, 32) if rows <= self.block_m and rows * pitch <= most)
        return next(fitting, min(16, self.block_m))

    @property
    def staging_pitch_bytes(self) -> int:
        """One row of a warpgroup's result, and 16 bytes that keep stmatrix free of bank conflicts."""
        return 128 * self.stack + 16

    @property
    def staging_bytes(self) -> int:
        return self.staging_rows * self.staging_pitch_bytes

    @property
    def partial_bytes(self) -> int:
        """0 where clusters divide K: nothing goes through the workspace."""
        return 0 if self.cluster_k > 1 else self.block_m * self.block_n * 4

    @property
    def stage_clocks(self) -> float:
        """Predicted clocks of one stage."""
        return wgmma_stage_clocks(self)

    def division(self, others: int, tiles_m: int) -> tuple[float, float]:
        return wgmma_division(self, others, tiles_m)

    @property
    def fix_up_unroll(self) -> int:
        """Partial sums whose loads are in flight together in a fix-up: what some 64 registers hold."""
        return max(1, 64 // self.accumulators)

    def cost_at(self, m: Any, problem: Problem, gpu: Gpu) -> Cost:
        return wgmma_cost(self, m, problem.n, problem.k, gpu)

    def check_target(self, target: Target) -> None:
        """Raise unless the target has what the kernel uses and a CTA's shared memory fits."""
        for feature in ("tma", "shared_cta_destination", "wgmma", "stmatrix", "griddepcontrol"):
            target.require(feature, "the wgmma Marlin kernel")
        if self.consumer_registers:
            target.require("setmaxnreg", "consumer_registers")
        if self.cluster > 1:
            target.require("multicast", "cluster")
        if self.cluster_k > 1:
            target.require("cluster", "cluster_k > 1")
        self.check_smem(target)
