"""GemmSpec: the base of all versions of the dense GEMM, with their tile, stages, parameters and predicted time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from cudatma.errors import ArgumentError
from cudatma.kernels.cost import Cost
from cudatma.kernels.gemm.cost import CostModel, wgmma_cost_model
from cudatma.kernels.gemm.problem import (
    EPILOGUES,
    KIND_FIELDS,
    MEMBERS,
    OPERAND_TYPES,
    SCALE_BLOCK,
    WGMMA_M,
    Problem,
    check_kind,
    default_result,
    kernel_name,
)
from cudatma.kernels.gpu import Gpu
from cudatma.kernels.launch_struct import RASTER, RESULT, Member
from cudatma.kernels.schedule import Schedule, ceil_div, schedule
from cudatma.kernels.tiled_kernel import PROBLEM, TENSOR_MAP, TiledKernel
from cudatma.pipeline import Operand, align_up
from cudatma.target import Target

_SPAN_BYTES = 128
#: A slot's two mbarriers; stages beyond which nothing is gained.
_RING_BYTES, _MOST_STAGES = 16, 8
#: Shared memory beyond which L1 has 28 KiB and not 60: too few for scales of blocks. Tiles of 256 x 128 are 12 % slower
#: then at K of 16384, 11 % at 7168, not at 1536. [H100]
_MOST_BYTES_BESIDE_L1 = 195 << 10
#: Columns of a tile of three warpgroups with a producer: their threads have 128 registers, including the sums.
_MOST_COLUMNS_OF_THREE = 192
_SHORT = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}
_EPILOGUE = ("alpha", "beta")
_VECTOR_SCALES = ("a_scale_row", "b_scale_column")
_B_BLOCK_SCALES = ("b_scale_column", "b_scale_k", "b_scale_batch")
_A_BLOCK_SCALES = ("a_scale_row", "a_scale_k", "a_scale_batch")
PLACES = (*RASTER, *RESULT, "matrix_tiles_m", "by_matrix_tiles_m", "output_batch")
_ALLOWED: Mapping[str, tuple[Any, ...]] = {
    "block_m": (64, 128, 192, 256),
    "block_n": (64, 128, 192, 256),
    "block_k": (64, 128, 256),
    "stages": tuple(range(2, 13)),
    "warpgroups": (1, 2, 3),
    "cluster": (1, 2),
    "block_scales": (False, True),
}


@dataclass(frozen=True, slots=True)
class GemmSpec(TiledKernel):
    """One instance of a version's template.

    dtype, out_dtype, layout, epilogue, block_scales, scales_by_tma: as in Problem. block_m, block_n: tile of a CTA.
    stages: stages of the ring, of block_k elements of K each. warpgroups: consumer warpgroups, which divide the tile
    along M. Raises ArgumentError, ArgumentTypeError.
    """

    dtype: str
    layout: str
    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    stages: int = 3
    warpgroups: int = 2
    out_dtype: str = ""
    epilogue: str = "none"
    block_scales: bool = False
    scales_by_tma: bool = False

    version: ClassVar[int | str]
    template: ClassVar[str]
    struct_members: ClassVar[Mapping[str, Member]] = MEMBERS
    allowed: ClassVar[Mapping[str, tuple[Any, ...]]] = _ALLOWED
    revision: ClassVar[int] = 6
    #: Features that the target needs.
    features: ClassVar[tuple[str, ...]] = ("tma", "wgmma", "stmatrix")
    #: CTAs of a cluster that share the loads of B, or of A; CTAs that divide K.
    cluster: ClassVar[int] = 1
    cluster_k: ClassVar[int] = 1
    blocks_per_sm: ClassVar[int] = 1
    producer_warps: ClassVar[int] = 1
    #: Sums of the tile that a thread may hold in registers.
    most_sums: ClassVar[int] = 128
    #: block_k of an operand is a multiple of this many bytes.
    least_k_bytes: ClassVar[int] = _SPAN_BYTES
    #: Whether the template has the main loop for scales of blocks.
    scales_blocks: ClassVar[bool] = False
    partial_bytes: ClassVar[int] = 0
    #: Buffers of 64 rows x 128 bytes per warpgroup, from which TMA stores.
    staging_buffers: ClassVar[int] = 1
    stages_whole_tile: ClassVar[bool] = False
    #: Nanoseconds that a wait for a slot may sleep for at a time; 0: the GPU decides.
    suspend_ns: ClassVar[int] = 0
    #: Microseconds of a launch, and clocks between two stages of one warpgroup in which it does not multiply. [H200]
    launch_us: ClassVar[float] = 0.3
    stage_gap: ClassVar[int] = 0
    operand_names: ClassVar[tuple[str, ...]] = ("a_map", "b_map", "output")
    work_names: ClassVar[tuple[str, ...]] = ("k_iterations",)
    box_names: ClassVar[tuple[str, ...]] = ("a_box_rows", "stage_bytes")

    def __post_init__(self) -> None:
        check_kind(self)
        self.check_values(self.allowed)
        if self.block_m % (rows := WGMMA_M * self.warpgroups):
            raise ArgumentError("block_m", self.block_m, f"a multiple of {rows}, {WGMMA_M} a warpgroup")
        if self.block_m * self.block_n > self.most_sums * 128 * self.warpgroups:
            least = ceil_div(self.block_m * self.block_n, self.most_sums * 128)
            raise ArgumentError("warpgroups", self.warpgroups, f"{least}: a thread holds at most {self.most_sums} sums")
        if self.warpgroups == 3 and self.producer_warps and self.block_n > _MOST_COLUMNS_OF_THREE:
            allowed = f"at most {_MOST_COLUMNS_OF_THREE} for three warpgroups: a thread has 128 registers"
            raise ArgumentError("block_n", self.block_n, allowed)
        if self.block_k * self.element_bytes % self.least_k_bytes:
            raise ArgumentError("block_k", self.block_k, f"a multiple of {self.least_k_bytes // self.element_bytes}")
        if self.block_scales:
            self._check_block_scales()

    def _check_block_scales(self) -> None:
        if not self.scales_blocks:
            raise ArgumentError("version", self.version, "4 or 5 for scales of blocks")
        if self.block_k != SCALE_BLOCK or SCALE_BLOCK % self.block_n:
            raise ArgumentError("block_n", self.block_n, f"64 or {SCALE_BLOCK}, with block_k of {SCALE_BLOCK}")
        if self.warpgroups > 2:
            raise ArgumentError("warpgroups", self.warpgroups, "1 or 2: registers of three hold no second sums")

    # Parameters of a launch.

    @property
    def parameter_names(self) -> tuple[str, ...]:
        names = tuple(name for name in self.operand_names if name != "output_map" or self.stores_by_tma)
        names += ("bias",) if self.has_epilogue else ()
        names += ("a_scale_map" if self.ring_has_scales else "a_scale", "b_scale") if self.has_scales else ()
        return (*names, "problem")

    @property
    def parameters(self) -> tuple[tuple[str, str], ...]:
        out = self.out_cuda.replace("u16", "cudatma::u16")
        kinds = {"output": f"{out}*", "bias": f"const {out}*", "problem": PROBLEM}
        kinds |= dict.fromkeys(("a", "b"), "const cudatma::u8*") | dict.fromkeys(("a_scale", "b_scale"), "const float*")
        return tuple((name, kinds.get(name, TENSOR_MAP)) for name in self.parameter_names)

    @property
    def problem_names(self) -> tuple[str, ...]:
        names = (*self.work_names, *self.box_names, *PLACES)
        names += ("output_by_tma",) if "output_map" in self.parameter_names else ()
        names += _EPILOGUE if self.has_epilogue else ()
        if self.has_scales:
            names += _B_BLOCK_SCALES if self.block_scales else _VECTOR_SCALES
            names += _A_BLOCK_SCALES if self.block_scales and not self.ring_has_scales else ()
        return tuple(dict.fromkeys(names))

    @property
    def entry(self) -> str:
        tile = f"{self.block_m}x{self.block_n}x{self.block_k}_w{self.warpgroups}_s{self.stages}"
        tile += f"_b{self.blocks_per_sm}" if self.blocks_per_sm > 1 else ""
        tile += f"_c{self.cluster}" if self.cluster > 1 else ""
        tile += f"_k{self.cluster_k}" if self.cluster_k > 1 else ""
        kinds = [self.mma_type]
        kinds += [_SHORT[self.out_dtype]] if self.out_dtype else []
        kinds += [self.layout.lower()]
        kinds += [self.epilogue] if self.has_epilogue else []
        kinds += ["blocks"] if self.block_scales else []
        kinds += ["tma"] if self.ring_has_scales else []
        return f"gemm_{kernel_name(self.version)}_{'_'.join(kinds)}_{tile}"

    # Properties of the kernel.

    @property
    def mma_type(self) -> str:
        """The type of A and B in the names of wgmmas."""
        return OPERAND_TYPES[self.dtype]

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of A and B."""
        return 1 if self.dtype.startswith("float8") else 2

    @property
    def result_dtype(self) -> str:
        """The dtype of C."""
        return self.out_dtype or default_result(self.dtype)

    @property
    def out_cuda(self) -> str:
        """The type of C in CUDA, as its bits where CUDA has no arithmetic for it."""
        return "float" if self.result_dtype == "float32" else "u16"

    @property
    def out_bytes(self) -> int:
        return 4 if self.result_dtype == "float32" else 2

    @property
    def is_bf16(self) -> bool:
        """Whether C is bf16."""
        return self.result_dtype == "bfloat16"

    @property
    def has_epilogue(self) -> bool:
        """Whether something is applied to the sums before they are rounded."""
        return self.epilogue != "none"

    @property
    def activation(self) -> str:
        """The activation's name, empty for none."""
        return self.epilogue if self.epilogue not in EPILOGUES[:2] else ""

    @property
    def has_scales(self) -> bool:
        """Whether the kernel takes scales of A and B."""
        return self.has_epilogue or self.block_scales

    @property
    def ring_has_scales(self) -> bool:
        """Whether TMA loads A's block scales into the stages. Threads of warpgroups with 64 rows load their few."""
        return self.scales_by_tma and self.block_m > WGMMA_M * self.warpgroups

    @property
    def result(self) -> str:
        """The kernel's Result in CUDA."""
        names = ("output", *(name for name in ("bias", "a_scale", "b_scale") if name in self.parameter_names))
        return f"Result{{{', '.join(names)}}}"

    @property
    def maps(self) -> str:
        """The kernel's Maps in CUDA."""
        names = [name for name in ("a_map", "b_map", "a_scale_map") if name in self.parameter_names]
        return f"Maps{{{', '.join(f'&{name}' for name in names)}}}"

    @property
    def is_a_k_major(self) -> bool:
        """Whether K is contiguous in A; if not, M is."""
        return self.layout[0] == "R"

    @property
    def is_b_k_major(self) -> bool:
        """Whether K is contiguous in B; if not, N is."""
        return self.layout[1] == "C"

    @property
    def mma(self) -> str:
        """The name of the wgmma in primitives/wgmma_shapes.j2."""
        transposed = "_" + ("n" if self.is_a_k_major else "t") + ("n" if self.is_b_k_major else "t")
        suffix = "" if transposed == "_nn" else transposed
        return f"wgmma_m64n{self.block_n}k{32 // self.element_bytes}_f32_{self.mma_type}_ss{suffix}"

    @property
    def span(self) -> int:
        """Elements of A and B in a row of the 128-byte swizzle."""
        return _SPAN_BYTES // self.element_bytes

    def a_box(self, m: int) -> tuple[int, int, int]:
        """Matrices, rows and columns of a box of A, or of A transposed where that has the contiguous rows. m: of A."""
        if not self.is_a_k_major:
            return (1, self.block_k // (self.cluster if self.shares_a else 1), self.a_box_rows(m))
        return (1, self.a_box_rows(m), self.span_k)

    @property
    def slot_n(self) -> int:
        """Columns of B in a slot: of an N-major one whole boxes."""
        return self.block_n if self.layout[1] == "C" else ceil_div(self.block_n, self.span) * self.span

    @property
    def shares_a(self) -> bool:
        """Whether the CTAs of a cluster are neighbors along N and share the loads of A; if not, along M, and of B."""
        return self.cluster > 1 and self.block_m > self.block_n

    @property
    def loaded_rows(self) -> tuple[int, int]:
        """Rows of A's tile and of B's, transposed, that one CTA loads."""
        if self.shares_a:
            return self.block_m // self.cluster, self.slot_n
        return self.block_m, self.slot_n // self.cluster

    @property
    def max_a_box_rows(self) -> int:
        """Rows of A in a box where A has enough."""
        return self.loaded_rows[0] if self.is_a_k_major else self.span

    def a_box_rows(self, m: int) -> int:
        """Rows of A in a box: whole vectors of 16 bytes where they are contiguous, and no more than A has."""
        return min(self.max_a_box_rows, ceil_div(m, 8) * 8)

    @property
    def b_box(self) -> tuple[int, int, int]:
        """Matrices, rows and columns of a box of B transposed, or of B where that has the contiguous rows."""
        if not self.is_b_k_major:
            return (1, self.block_k // (1 if self.shares_a else self.cluster), self.span)
        return (1, self.loaded_rows[1], self.span_k)

    def boxes_bytes(self, a_box_rows: int) -> int:
        """Return the bytes that the boxes of a stage deliver to a CTA. ``a_box_rows``: rows of each box of A."""
        rows = a_box_rows * (self.block_m // self.max_a_box_rows)
        scales = 4 * self.block_m if self.ring_has_scales else 0
        return self.element_bytes * self.block_k * (rows + self.slot_n) + scales

    @property
    def span_k(self) -> int:
        """Elements of K in a row of a box of a K-major operand."""
        return min(self.span, self.block_k)

    def swizzle(self, is_k_major: bool) -> str:
        """Return the swizzle of an operand. TMA pads the rows of narrow M-major and N-major boxes to 128 bytes."""
        return f"{self.span_k * self.element_bytes if is_k_major else _SPAN_BYTES}B"

    @property
    def staged_n(self) -> int:
        """Columns of the result that are staged at a time."""
        return _SPAN_BYTES // self.out_bytes

    @property
    def stores_by_tma(self) -> bool:
        """Whether TMA stores whole boxes where it can."""
        return self.block_n % self.staged_n == 0

    @property
    def output_box(self) -> tuple[int, int, int]:
        """Matrices, rows and columns that TMA stores at a time, of a warpgroup."""
        return (1, self.block_m // self.warpgroups if self.stages_whole_tile else WGMMA_M, self.staged_n)

    def schedule(self, problem: Problem, sm_count: int) -> Schedule:
        """How the tiles of all matrices of the batch are divided among CTAs."""
        m = problem.batch * ceil_div(problem.m, self.cluster_m) * self.cluster_m
        return schedule(self, m, problem.n, problem.k, sm_count * self.blocks_per_sm)

    @property
    def cluster_m(self) -> int:
        """Rows of M of a cluster's tile."""
        return self.block_m if self.shares_a else self.block_m * self.cluster

    @property
    def cluster_n(self) -> int:
        """Columns of N of a cluster's tile."""
        return self.block_n * self.cluster if self.shares_a else self.block_n

    @property
    def consumer_warps(self) -> int:
        return 4 * self.warpgroups

    @property
    def warp_tiles(self) -> int:
        return self.consumer_warps

    @property
    def loaded_stage_bytes(self) -> int:
        return self.element_bytes * self.block_k * sum(self.loaded_rows)

    def stage_operands(self) -> tuple[Operand, ...]:
        k_bytes = self.element_bytes * self.block_k
        sizes = {"a": k_bytes * self.block_m, "b": k_bytes * self.slot_n}
        sizes |= {"a_scale": 4 * self.block_m} if self.ring_has_scales else {}
        return tuple([Operand(name, align_up(size, 1024), size, 1024) for name, size in sizes.items()])

    @property
    def _slot_bytes(self) -> int:
        """The same as in TiledKernel, but fast: the choice needs it for every candidate."""
        scales = align_up(4 * self.block_m, 1024) if self.ring_has_scales else 0
        return self.element_bytes * self.block_k * (self.block_m + self.slot_n) + scales + _RING_BYTES

    def epilogue_parts(self) -> tuple[tuple[str, int], ...]:
        return (("staging", self.consumer_warps * self.staging_buffers * 16 * _SPAN_BYTES),)

    def stage_layout(self) -> list[tuple[str, int]]:
        """(what, bytes) that one stage holds."""
        a, b, *scales = (operand.footprint_bytes for operand in self.stage_operands())
        majors = "K" if self.is_a_k_major else "M", "K" if self.is_b_k_major else "N"
        swizzles = [self.swizzle(is_k_major) for is_k_major in (self.is_a_k_major, self.is_b_k_major)]
        return [
            (f"a {self.block_m} x {self.block_k} {self.dtype}, {majors[0]}-major, {swizzles[0]} swizzle", a),
            (f"b {self.block_k} x {self.slot_n} {self.dtype}, {majors[1]}-major, {swizzles[1]} swizzle", b),
            *((f"scales of {self.block_m} rows of a, float32", size) for size in scales),
        ]

    def check_target(self, target: Target) -> None:
        """Raise unless the target has what the kernel uses and a CTA's shared memory fits."""
        for feature in self.features:
            target.require(feature, "gemm")
        self.check_smem(target)

    def most_stages(self, target: Target) -> int:
        """Return the number of stages that are useful and fit shared memory; less than 2 if the tile does not fit."""
        share = target.smem_share_bytes(self.blocks_per_sm)
        if self.block_scales and not self.ring_has_scales:
            share = min(share, _MOST_BYTES_BESIDE_L1)
        return min(_MOST_STAGES, self.max_stages(share))

    def adapted(self, problem: Problem) -> GemmSpec:
        """Return the same tile for another kind of problem."""
        return replace(self, **{name: getattr(problem, name) for name in KIND_FIELDS})

    def store_clocks(self, tiles: Any, stored: float, products: Any) -> Any:
        """Return the clocks in which a CTA stores its tiles and does not multiply.

        ``stored`` and ``products`` are clocks of one tile.
        """
        return tiles * stored

    def cost_model(self, gpu: Gpu) -> CostModel:
        """Return the predicted time as a function of M and a problem."""
        return wgmma_cost_model(self, gpu)

    def cost_at(self, m: Any, problem: Problem, gpu: Gpu) -> Cost:
        """Return the predicted time at M, an int or an int64 array, instead of the problem's."""
        return self.cost_model(gpu)(m, problem)
