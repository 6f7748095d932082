"""Configurations of marlin_gemm's kernels. PRESETS describes the kernels.

Every kernel computes the transposed product, C^T = W^T X^T. Therefore, the columns of W are the M dimension of the MMA,
and the rows of x are the N dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from cudatma.dtypes import ActivationType, activation_type
from cudatma.errors import ArgumentError, counted, quoted
from cudatma.kernels.config import KernelConfig, Preset
from cudatma.kernels.cost import Cost
from cudatma.kernels.gpu import Gpu
from cudatma.kernels.launch_struct import RASTER, RESULT, STREAM_K, Member
from cudatma.kernels.marlin.cost import COST_MODELS, DEQUANTIZE_FACTORS, wgmma_division, wgmma_stage_clocks
from cudatma.kernels.marlin.problem import GROUP_SIZES, MEMBERS, PROBLEM_FIELDS, Problem, check_format
from cudatma.kernels.schedule import PARTIALS_PER_SM_BYTES, ceil_div
from cudatma.pipeline import align_up
from cudatma.quantization.scale_range import FORMS
from cudatma.quantization.weight_format import WEIGHT_FORMATS, WeightFormat
from cudatma.target import KIB

#: Cluster sizes that every GPU supports. [CUDA C++ programming guide, Thread Block Clusters]
_CLUSTERS = range(1, 9)
_PRODUCER_REGISTERS = 40


#: Paths from global to shared memory. Calls always use TMA; docs/lab/marlin.md compares the two paths.
LOAD_PATHS = ("tma", "cp_async")
#: Allowed values of fields, unless a kernel overrides them. A field that a kernel does not use has only one allowed
#: value.
_ALLOWED: Mapping[str, Sequence[Any]] = {
    "stages": range(2, 17),
    "group_size": GROUP_SIZES,
    "cluster_n": (1,),
    "cluster_k": (1,),
    "ctas_per_sm": (1,),
    "consumer_registers": (0,),
    "deep_box": (False,),
    "warpgroups": (0,),
    "mmas_per_commit": (0,),
    "commits_in_flight": (0,),
    "scale_form": ("none",),
    "pingpong": (False,),
    "warps_n": (0,),
    "scale_on": ("",),
    "weight_load_path": ("tma",),
    "scale_load_path": ("tma",),
    "activation_load_path": ("tma",),
}
#: Every kernel, keyed by name. Dumps, tuning files and reports call the name a version, as in the other families.
PRESETS: Mapping[str, Preset] = {
    "skinny": Preset(
        summary="W4A16 GEMM for small M, mma.sync, operands by TMA",
        mma="mma_sync",
        allowed={
            "tile_m": (1, 2, 4, 8, 16, 32),
            "tile_n": range(32, 257, 32),
            "tile_k": (128, 256, 512, 1024),
            "slice_k": (1, 2, 4, 8, 16),
            **_ALLOWED,
            "cluster_k": _CLUSTERS,
            "ctas_per_sm": (1, 2),
            "deep_box": (False, True),
        },
    ),
    "wgmma": Preset(
        summary="W4A16 GEMM for large M, wgmma, operands by TMA",
        schedule="stream_k",
        allowed={
            "tile_m": range(8, 257, 8),
            "tile_n": (64, 128, 192, 256),
            "tile_k": (64, 128, 256),
            "slice_k": (1, 2),
            **_ALLOWED,
            "cluster_n": (1, 2),
            "cluster_k": _CLUSTERS,
            "consumer_registers": (0, *range(_PRODUCER_REGISTERS, 241, 8)),
            "warpgroups": (1, 2, 3),
            "mmas_per_commit": (1, 2, 4),
            "commits_in_flight": (1, 3),
            "scale_form": ("none", *FORMS),
            "pingpong": (False, True),
        },
    ),
    "mma_sync": Preset(
        summary="W4A16 GEMM, mma.sync, operands by TMA or cp.async",
        schedule="stream_k",
        mma="mma_sync",
        allowed={
            "tile_m": (8, 16, 32, 48, 64, 128),
            "tile_n": (64, 128, 256),
            "tile_k": (64, 128, 256),
            "slice_k": (1, 2, 4),
            **_ALLOWED,
            "consumer_registers": (0, 208, 216, 224, 232),
            "warps_n": (1, 2, 4, 8),
            "scale_on": ("accumulator", "weight", "epilogue"),
            "weight_load_path": LOAD_PATHS,
            "scale_load_path": LOAD_PATHS,
            "activation_load_path": LOAD_PATHS,
        },
    ),
}
#: Number of columns of W per N tile of the skinny kernel. A warp holds two fragments of 16 columns.
N_TILE = 32
#: Number of columns of an mma, which are rows of x.
MMA_COLUMNS = 8
_MAX_WARPS = 16
_WARPGROUP_THREADS = 128
_REGISTERS_PER_CTA = 65536
#: Maximum number of warpgroups. With four warpgroups, a thread has too few registers: none of 91 layers is at
#: least 2% faster at any of 13 values of M. [H200]
_MAX_WARPGROUPS = 3
#: Maximum number of accumulators per thread with wgmma, and the maximum for two or more warpgroups without setmaxnreg.
_MAX_ACCUMULATORS, _MAX_PLAIN_ACCUMULATORS = 128, 96
#: Number of registers that a consumer thread needs for weights, fragments, scales and addresses, in addition to its
#: accumulators.
_WORKING_REGISTERS = 64
#: Number of wgmmas per 64 elements of K.
_K16_PER_K64 = 4
#: Number of staging bytes of all warpgroups for tiles of at most _SHORT_M rows. Larger tiles have half as many.
_MAX_STAGING_BYTES, _SHORT_M = 20 * KIB, 128
#: The 128-byte swizzle repeats after this number of rows, each with 64 elements of a row of x.
_SWIZZLE_ROWS = 8
#: Number of bytes of the fp32 sums of 16 columns of W and 8 rows of x. Each lane holds four sums.
_FRAGMENT_BYTES = 32 * 16
#: Minimum number of bytes of weights for which prefetching two stages saves more time than it costs by delaying the
#: first activations. [H200]
_LONG_BYTES = 27 * 1024 * KIB
#: Values that are worth measuring: the longest ring of the skinny kernel; (mmas_per_commit, commits_in_flight) and
#: (warpgroups, slice_k) of the wgmma kernel.
_MAX_MEASURED_STAGES = 12
_PIPELINES = ((1, 3), (2, 1), (1, 1), (4, 1))
_WARPGROUPS = ((1, 1), (2, 1), (3, 1), (1, 2))


def min_tile_m(tile_k: int) -> int:
    """Return the smallest tile_m for a tile_k. A stage must hold a whole number of swizzle periods."""
    return max(1, _SWIZZLE_ROWS * 64 // tile_k)


@dataclass(frozen=True, slots=True, kw_only=True)
class MarlinConfig(KernelConfig):
    """A configuration of a kernel's template.

    Attributes
    ----------
    version : str
        A key of PRESETS.
    dtype, group_size, has_zeros, format
        See LinearShape.
    tile_m, tile_n, tile_k : int
        Tile size of a CTA, and number of elements of K per stage. If tile_m is less than 8, the columns of the mma
        repeat rows of x.
    stages : int
        Number of stages of the ring.
    slice_k : int
        Number of warps, or of warpgroups with wgmma, that compute the same columns and split the K of each stage. Their
        sums are added in shared memory.
    cluster_n : int
        Number of CTAs per cluster along N, which share loads of activations.
    cluster_k : int
        Number of CTAs per cluster that split the K of a tile into whole stages and exchange sums.
    ctas_per_sm : int
        Number of CTAs per SM.
    consumer_registers : int
        Number of registers that setmaxnreg moves from the producer's warpgroup to each consumer thread, or 0 without
        setmaxnreg.
    deep_box : bool
        Whether one three-dimensional box loads a stage's activations, which requires a K that is a multiple of 64.
        Only the skinny kernel uses this field.
    warpgroups : int
        Number of warpgroups that divide N. Only the wgmma kernel uses this field and the next four.
    mmas_per_commit : int
        Number of wgmmas per accumulator in a commit group.
    commits_in_flight : int
        Number of commit groups that the tensor cores execute while the next weights are dequantized.
    scale_form : str
        Form in which one multiply-add applies scale and offset to a weight (quantization/scale_range.py), or "none".
        The results of all forms are bitwise identical.
    pingpong : bool
        Whether two warpgroups compute tiles alternately, so that one stores its tile while the other multiplies.
    warps_n : int
        Number of warps that divide N. Only the mma.sync kernel uses this field and the next four.
    scale_on : str
        Values that the scales multiply: the fp32 sums of a group ("accumulator"), the dequantized weights ("weight"),
        or the result ("epilogue", only with one scale per column).
    weight_load_path, scale_load_path, activation_load_path : str
        Elements of LOAD_PATHS. Zero points use scale_load_path.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If a field is invalid.
    """

    version: str
    dtype: str
    group_size: int
    has_zeros: bool
    tile_m: int
    tile_n: int
    tile_k: int
    stages: int
    slice_k: int = 1
    cluster_n: int = 1
    cluster_k: int = 1
    ctas_per_sm: int = 1
    consumer_registers: int = 0
    deep_box: bool = False
    warpgroups: int = 0
    mmas_per_commit: int = 0
    commits_in_flight: int = 0
    scale_form: str = "none"
    pingpong: bool = False
    warps_n: int = 0
    scale_on: str = ""
    weight_load_path: str = "tma"
    scale_load_path: str = "tma"
    activation_load_path: str = "tma"
    format: str = "int4"

    function: ClassVar[str] = "marlin_gemm"
    presets: ClassVar[Mapping[str, Preset]] = PRESETS
    struct_members: ClassVar[Mapping[str, Member]] = MEMBERS
    barriers: ClassVar[tuple[str, ...]] = ("full", "empty")
    revision: ClassVar[int] = 1

    def __post_init__(self) -> None:
        self.check_values()
        activation_type(self.dtype)
        kind = check_format(self.format, self.group_size, self.has_zeros)
        if kind.bits == 8 and self.weight_load_path != "tma":
            raise ArgumentError("weight_load_path", self.weight_load_path, f"'tma' for format {self.format!r}")
        if self.tile_k // 64 % self.slice_k:
            allowed = f"a divisor of tile_k / 64 = {self.tile_k // 64} (warps process 64 elements of K at a time)"
            raise ArgumentError("slice_k", self.slice_k, allowed)
        if self.has_wgmma:
            self._check_wgmma()
        elif self.is_skinny:
            self._check_boxes()
        else:
            self._check_warps()
        if self.consumer_warps > _MAX_WARPS:
            raise ArgumentError(
                "slice_k",
                self.slice_k,
                f"small enough for at most {_MAX_WARPS} warps (this config has {self.consumer_warps})",
            )
        if self.partial_bytes > PARTIALS_PER_SM_BYTES:
            rows = PARTIALS_PER_SM_BYTES // (4 * self.tile_n) // 8 * 8
            raise ArgumentError(
                "tile_m", self.tile_m, f"at most {rows} (a workspace holds partial sums of 128 x 256 elements)"
            )

    def _check_boxes(self) -> None:
        if self.tile_m < MMA_COLUMNS and not self.deep_box:
            remedy = "increase tile_m or set deep_box; other boxes must have one row per column of the mma"
            raise ArgumentError("deep_box", self.deep_box, f"True for tile_m < {MMA_COLUMNS}", remedy)
        if self.tile_m < (rows := min_tile_m(self.tile_k)):
            allowed = (
                f"at least {rows} for tile_k = {self.tile_k} (a stage holds whole periods of the 128-byte swizzle)"
            )
            raise ArgumentError("tile_m", self.tile_m, allowed)

    def _check_warps(self) -> None:
        allowed: tuple[str, ...] = ("epilogue",) if self.group_size == -1 else ("accumulator", "weight")
        if self.weight.has_exact_products:
            allowed = ("weight",)
        if self.scale_on not in allowed:
            raise ArgumentError("scale_on", self.scale_on, quoted(allowed))
        if self.warp_n not in (16, 32, 64):
            raise ArgumentError(
                "warps_n", self.warps_n, "a divisor of tile_n that gives each warp 16, 32 or 64 columns"
            )
        if self.consumer_registers and self.consumer_warps != 8:
            required = "0 unless there are 8 consumer warps (setmaxnreg applies to whole warpgroups)"
            raise ArgumentError("consumer_registers", self.consumer_registers, required)

    def _check_wgmma(self) -> None:
        if self.tile_m % (8 * self.cluster_n):
            reason = "each CTA loads whole 8-row periods of the 128-byte swizzle"
            allowed = f"a multiple of {8 * self.cluster_n} with cluster_n = {self.cluster_n} ({reason})"
            raise ArgumentError("tile_m", self.tile_m, allowed)
        if self.cluster_k > 1 and self.cluster_n > 1:
            allowed = f"1 with cluster_n = {self.cluster_n} (a cluster either shares activations or splits K)"
            raise ArgumentError("cluster_k", self.cluster_k, allowed, "set cluster_n or cluster_k to 1")
        if self.pingpong:
            for field in ("warpgroups", "slice_k", "cluster_k"):
                if getattr(self, field) > 1:
                    raise ArgumentError(
                        field, getattr(self, field), "1 with pingpong (each warpgroup has its own tile)"
                    )
        if self.warpgroups * self.slice_k > _MAX_WARPGROUPS:
            allowed = f"at most {_MAX_WARPGROUPS}"
            raise ArgumentError("warpgroups * slice_k", self.warpgroups * self.slice_k, allowed)
        if self.tile_n not in (columns := (64 * self.warpgroups, 128 * self.warpgroups)):
            allowed = (
                f"{columns[0]} or {columns[1]} for warpgroups = {self.warpgroups} (64 or 128 columns per warpgroup)"
            )
            raise ArgumentError("tile_n", self.tile_n, allowed)
        self._check_groups()
        self._check_registers()
        if not self.allows(self.scale_form):
            why = (
                'use "none", because the other forms require the zero point 8, and "shifted" exceeds the range of '
                "bf16's subnormal numbers"
            )
            allowed = '"none", or, for symmetric group-wise weights, "as_stored" or (only in fp16) "shifted"'
            raise ArgumentError("scale_form", self.scale_form, allowed, why)

    def _check_groups(self) -> None:
        """Raise ArgumentError unless every commit group is complete when the next iteration begins.

        ptxas tracks the registers that a wgmma in flight reads only within the body of a loop. Across iterations, it
        would assign the registers of operand A to the next weights, and results would be wrong.
        """
        groups = self.k64_per_warpgroup * self.groups_per_k64
        if groups < self.commits_in_flight + 1:
            remedy = "increase tile_k, or reduce mmas_per_commit or commits_in_flight"
            allowed = f"at most {groups - 1} (a stage has {counted(groups, 'commit group')})"
            raise ArgumentError("commits_in_flight", self.commits_in_flight, allowed, remedy)

    def _check_registers(self) -> None:
        if self.accumulators > _MAX_ACCUMULATORS:
            allowed = f"at most {256 // self.stack} for {64 * self.stack} columns per warpgroup"
            reason = f"a thread holds at most {_MAX_ACCUMULATORS} accumulators"
            raise ArgumentError("tile_m", self.tile_m, f"{allowed} ({reason})")
        if not self.consumer_registers:
            if self.accumulators > _MAX_PLAIN_ACCUMULATORS and self.consumer_warps > 4:
                allowed = f"above 0 with {self.accumulators} accumulators per thread"
                raise ArgumentError(
                    "consumer_registers",
                    0,
                    allowed,
                    "pass a number of registers for setmaxnreg",
                )
            return
        min_registers, warpgroups = self.accumulators + _WORKING_REGISTERS, self.consumer_warps // 4
        pool = _REGISTERS_PER_CTA // self.threads // 8 * 8 * self.threads
        max_registers = (pool // _WARPGROUP_THREADS - _PRODUCER_REGISTERS) // warpgroups // 8 * 8
        if not min_registers <= self.consumer_registers <= max_registers:
            remedy = "choose one of these values; otherwise, setmaxnreg.inc waits forever"
            groups = f"{warpgroups} warpgroups with {self.accumulators} accumulators per thread"
            allowed = f"0 or a number from {min_registers} to {max_registers} for {groups}"
            raise ArgumentError("consumer_registers", self.consumer_registers, allowed, remedy)

    def check_problem(self, problem: Problem) -> None:
        """Raise ArgumentError if the kernel cannot run a problem."""
        if self.deep_box and problem.k % 64:
            raise ArgumentError("deep_box", True, f"False (K = {problem.k} is not a multiple of 64)")
        if ceil_div(problem.k, self.tile_k) < self.cluster_k:
            raise ArgumentError("cluster_k", self.cluster_k, f"at most the number of stages along K = {problem.k}")

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features that the target must have."""
        names = ["tma", "shared_cta_destination", self.preset.mma, "griddepcontrol"]
        names += ["stmatrix"] if self.version != "skinny" else []
        names += ["setmaxnreg"] if self.consumer_registers else []
        names += ["multicast"] if self.cluster_n > 1 else []
        names += ["cluster"] if self.cluster_k > 1 else []
        return tuple(names)

    # ---- Kernel

    @property
    def template(self) -> str:
        return f"kernels/marlin_{self.version}.cu.j2"

    @property
    def releases_one_stage_late(self) -> bool:
        """Whether a slot is released during the MMAs of the next stage (see cudatma/review/release_hazards.py)."""
        return self.has_wgmma

    @property
    def entry(self) -> str:
        names = [self.version, self.activation.short, "column" if self.group_size == -1 else f"g{self.group_size}"]
        names += ["zeros"] if self.has_zeros else []
        names += [] if self.format == "int4" else [self.format]
        names += {"none": [], "as_stored": ["fused"], "shifted": ["shifted"]}[self.scale_form]
        names += [f"{self.tile_m}x{self.tile_n}x{self.tile_k}"]
        slices = [f"k{self.slice_k}"] if self.slice_k > 1 or self.version == "skinny" else []
        registers = [f"r{self.consumer_registers}"] if self.consumer_registers else []
        if self.version == "mma_sync":
            paths = (self.weight_load_path, self.scale_load_path, self.activation_load_path)
            load_path = paths[0] if len(set(paths)) == 1 else "w_{}_s_{}_x_{}".format(*paths)
            names += [f"w1{self.warps_n}{self.slice_k}", f"s{self.stages}", *registers, load_path]
        elif self.version == "skinny":
            names += [*slices, f"s{self.stages}"]
            names += [f"b{self.ctas_per_sm}"] if self.ctas_per_sm > 1 else []
            names += ["d"] if self.deep_box else []
            names += [f"c{self.cluster_k}"] if self.cluster_k > 1 else []
        else:
            names += [f"w{self.warpgroups}", *slices, f"s{self.stages}"]
            names += [f"g{self.mmas_per_commit}{self.commits_in_flight}", *registers]
            names += [f"c{self.cluster_n}"] if self.cluster_n > 1 else []
            names += [f"x{self.cluster_k}"] if self.cluster_k > 1 else []
            names += ["pp"] if self.pingpong else []
        return f"marlin_{'_'.join(names)}"

    @property
    def is_skinny(self) -> bool:
        """Whether this is the skinny kernel.

        A warp of this kernel computes one N tile, or one K slice of an N tile, and each stage contains all operands.
        """
        return self.version == "skinny"

    @property
    def has_staging(self) -> bool:
        """Whether results are transposed in shared memory before they are stored."""
        return not self.is_skinny

    @property
    def gathers_rows(self) -> bool:
        """Whether rows of activations are loaded one by one."""
        return False

    @property
    def copies_rows(self) -> bool:
        """Whether producer warps copy rows of activations with cp.async."""
        return False

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Row counts for which a wgmma kernel has main loops, or () if the kernel always computes tile_m rows."""
        return ()

    # ---- Weight format and scales

    @property
    def weight(self) -> WeightFormat:
        """Format of the weight."""
        return WEIGHT_FORMATS[self.format]

    @property
    def weight_bits(self) -> int:
        """Number of bits of a weight's code."""
        return self.weight.bits

    @property
    def dequantize_factor(self) -> float:
        return DEQUANTIZE_FACTORS[self.format]

    @property
    def stage_row_blocks(self) -> int:
        """Number of blocks of 2 KB along K in a stage of packed weights."""
        return self.tile_k // 64 * self.weight_bits // 4

    @property
    def bias_correction(self) -> str:
        """Literal of the power of two that corrects a float format's exponent bias, in both 16-bit halves."""
        return self.weight.bias_correction(self.dtype)

    @property
    def scales_floats(self) -> bool:
        """Whether the scales of groups multiply floating-point codes instead of sums.

        The same multiplication corrects the exponent bias of the codes.
        """
        is_possible = self.weight.is_float and self.has_stage_scales
        return is_possible and (self.has_wgmma or self.weight.has_exact_products)

    @property
    def has_scale_back(self) -> bool:
        """Whether scales were multiplied by a power of two, so that the sums must be divided by it."""
        return self.is_fused or self.scales_floats

    @property
    def activation(self) -> ActivationType:
        return activation_type(self.dtype)

    @property
    def is_bf16(self) -> bool:
        return self.dtype == "bfloat16"

    @property
    def is_fused(self) -> bool:
        """Whether one multiply-add applies scale and offset to a weight."""
        return self.scale_form != "none"

    @property
    def nibble_shift(self) -> int:
        """Left shift from the stored position of the lowest nibbles to their position in the multiplication."""
        return FORMS.get(self.scale_form, 0)

    def allows(self, form: str) -> bool:
        """Return whether the kernel and the weight's format allow this ``scale_form``."""
        if form == "none":
            return True
        is_symmetric = self.format == "int4" and not self.has_zeros and self.has_stage_scales
        return self.has_wgmma and is_symmetric and not (self.is_bf16 and form == "shifted")

    def in_form(self, form: str) -> MarlinConfig:
        """Return the config with this ``scale_form`` if it is allowed, otherwise with "none".

        Choosing and tuning ignore the form, which does not affect results.
        """
        form = form if self.allows(form) else "none"
        return self if form == self.scale_form else replace(self, scale_form=form)

    @property
    def has_stage_scales(self) -> bool:
        """Whether scales are loaded with each stage.

        With one scale per column, the epilogue reads the scales instead.
        """
        return self.group_size != -1

    @property
    def has_stage_zeros(self) -> bool:
        return self.has_zeros and self.has_stage_scales

    @property
    def stage_group_size(self) -> int:
        """Number of elements of K in a stage that share a scale. With one scale per column, this is the whole stage."""
        return self.group_size if self.has_stage_scales else self.tile_k

    @property
    def groups_per_stage(self) -> int:
        """Number of rows of the scale table per stage.

        Scales of a group that spans several stages are loaded with each stage.
        """
        return 1 if self.group_size == -1 else max(1, self.tile_k // self.group_size)

    @property
    def scale_row(self) -> int:
        """Number of scales per row of a stage.

        Scales are loaded for whole rows of packed weights, whose columns are permuted.
        """
        return align_up(self.tile_n, 64)

    # ---- Launch parameters

    @property
    def has_workspace(self) -> bool:
        """Whether CTAs exchange partial sums through global memory."""
        return self.preset.schedule == "stream_k" and self.cluster_k == 1

    @property
    def copies_scales(self) -> bool:
        """Whether cp.async loads scales and zero points with their stage."""
        return self.has_stage_scales and self.scale_load_path == "cp_async"

    @property
    def parameter_names(self) -> tuple[str, ...]:
        scales_by_tma = self.has_stage_scales and not self.copies_scales
        weights_by_tma, activations_by_tma = self.weight_load_path == "tma", self.activation_load_path == "tma"
        read = {
            "weight_map": weights_by_tma and self.whole_rows > 0,
            "half_weight_map": self.has_half_row,
            "scale_map": scales_by_tma,
            "zero_map": scales_by_tma and self.has_zeros,
            "activation_map": activations_by_tma,
            "weight": not weights_by_tma,
            "scales": not scales_by_tma,
            "zeros": not scales_by_tma and self.has_zeros,
            "activations": not activations_by_tma,
            "bias": True,
            "output": True,
            "partials": self.has_workspace,
            "flags": self.has_workspace,
            "problem": True,
        }
        return tuple(name for name, is_read in read.items() if is_read)

    @property
    def problem_names(self) -> tuple[str, ...]:
        work = STREAM_K if self.has_workspace else ("k_iterations", *RASTER)
        copies_activations = self.activation_load_path == "cp_async"
        read = {
            "prefetch_stages": self.all_tma,
            "weight_row_blocks": self.version == "mma_sync",
            "weight_rows": self.weight_load_path == "cp_async",
            "scale_rows": self.copies_scales,
            "scale_pitch": self.copies_scales or not self.has_stage_scales,
            "k": copies_activations,
            "activation_pitch": copies_activations,
            "scale_offset": self.has_scale_back,
            "scale_back": self.has_scale_back,
        }
        names = (name for name, is_read in read.items() if is_read)
        return (*(work if self.version != "skinny" else ("k_iterations", "tiles_n")), *names, *RESULT)

    def prefetch_stages(self, weight_bytes: int) -> int:
        """Return the number of stages of weights that a dependent launch loads before it waits for the previous launch.

        More stages would delay the first activations. [docs/lab/marlin.md, "Chains of dependent launches"] With wgmma,
        two stages are 0 to 4% faster than one for long layers up to M = 16. [H200]
        """
        max_rows = 16 if self.has_wgmma and self.cluster_k == 1 else MMA_COLUMNS
        return 2 if self.tile_m < 8 or (self.tile_m <= max_rows and weight_bytes >= _LONG_BYTES) else 1

    # ---- Warps and registers

    @property
    def warp_tiles(self) -> int:
        """Number of parts of a tile that one warp, or a group of warps that split K, computes.

        Each part has a flag in the workspace.
        """
        return self.n_tiles if self.is_skinny else 4 * self.warpgroups or self.warps_n

    @property
    def tiles_at_once(self) -> int:
        """Number of tiles that the warpgroups of a CTA compute at the same time."""
        return 2 if self.pingpong else 1

    @property
    def consumer_warps(self) -> int:
        return self.warp_tiles * self.slice_k * self.tiles_at_once

    @property
    def producer_warps(self) -> int:
        """Number of producer warps.

        TMA needs one thread, cp.async needs many threads, and setmaxnreg needs a whole warpgroup.
        """
        return 1 if self.all_tma and not self.consumer_registers else 4

    @property
    def producer_threads(self) -> int:
        return 32 * self.producer_warps

    @property
    def producer_registers(self) -> int:
        return _PRODUCER_REGISTERS

    @property
    def n_tiles(self) -> int:
        """Number of N tiles per CTA of the skinny kernel.

        An N tile is computed by one warp or by several warps that split K.
        """
        return self.tile_n // N_TILE

    @property
    def whole_rows(self) -> int:
        """Number of rows of packed weights (64 columns of W) that a CTA computes completely."""
        return self.tile_n // 64

    @property
    def has_half_row(self) -> bool:
        """Whether a CTA's columns begin or end in the middle of a row of packed weights."""
        return self.tile_n % 64 > 0

    @property
    def stack(self) -> int:
        """Number of accumulator tiles per warpgroup. Each tile has 64 columns of W."""
        return self.tile_n // (64 * self.warpgroups)

    @property
    def warp_n(self) -> int:
        """Number of columns of W per warp, or per warpgroup with wgmma."""
        return self.tile_n // (self.warpgroups or self.warps_n)

    @property
    def accumulators(self) -> int:
        """Number of fp32 sums per thread."""
        return self.tile_m * self.tile_n // (32 * self.warp_tiles)

    @property
    def fix_up_unroll(self) -> int:
        """Number of partial tiles that a fix-up loads at a time. The tiles take about 64 registers."""
        return max(1, 64 // self.accumulators)

    @property
    def k64_per_warpgroup(self) -> int:
        return self.tile_k // 64 // self.slice_k

    @property
    def groups_per_k64(self) -> int:
        """Number of commit groups per 64 elements of K."""
        return _K16_PER_K64 // self.mmas_per_commit

    @property
    def release_k64(self) -> int:
        """Index of the block of 64 elements of K in a stage after which the previous stage's slot is released.

        At that point, all commit groups in flight belong to the current stage.
        """
        return max(0, ceil_div(self.commits_in_flight, self.groups_per_k64) - 1)

    # ---- Loads of a stage

    @property
    def all_tma(self) -> bool:
        return self.weight_load_path == self.scale_load_path == self.activation_load_path == "tma"

    @property
    def _stage_load_paths(self) -> dict[str, str]:
        """Return the load path of each array in a stage."""
        paths = {"activations": self.activation_load_path, "weights": self.weight_load_path}
        return paths | (dict.fromkeys(("scales", "zeros"), self.scale_load_path) if self.has_stage_scales else {})

    @property
    def uses_cp_async(self) -> bool:
        return "cp_async" in self._stage_load_paths.values()

    @property
    def uses_tma(self) -> bool:
        return "tma" in self._stage_load_paths.values()

    @property
    def full_arrivals(self) -> int:
        """Number of arrivals that fill a stage: one with expect_tx, and one from each thread that uses cp.async."""
        return int(self.uses_tma) + self.producer_threads * self.uses_cp_async

    @property
    def empty_arrivals(self) -> int:
        """Number of arrivals that release a slot. Consumer warps in every CTA of the cluster arrive."""
        return self.cluster_n * self.consumer_warps // self.tiles_at_once

    @property
    def transaction_bytes(self) -> int:
        """Number of bytes that a stage's full barrier expects, including out-of-bounds bytes, which TMA fills."""
        paths = self._stage_load_paths
        return sum(size for name, size in self._stage_bytes() if paths[name] == "tma")

    @property
    def activation_box_blocks(self) -> int:
        """Number of blocks of 64 elements of K per load of activations."""
        return self.tile_k // 64 if self.deep_box else 1

    @property
    def loads_weight_tiles(self) -> bool:
        """Whether one load reads the weights of a whole tile instead of 64 columns."""
        return self.version != "mma_sync"

    @property
    def loaded_m(self) -> int:
        """Number of rows of x that one CTA loads for all CTAs of its cluster."""
        return self.tile_m // self.cluster_n

    @property
    def cluster_mask(self) -> int:
        return (1 << self.cluster_n) - 1

    @property
    def loaded_stage_bytes(self) -> int:
        """Bytes of weights and activations that one CTA loads per stage. CTAs of a cluster share the activations."""
        return self.weight_stage_bytes + self.activation_stage_bytes // self.cluster_n

    # ---- Shared memory

    @property
    def weight_stage_bytes(self) -> int:
        return self.tile_n * self.tile_k * self.weight_bits // 8

    @property
    def activation_stage_bytes(self) -> int:
        return self.tile_m * self.tile_k * 2

    @property
    def scale_stage_bytes(self) -> int:
        return self.groups_per_stage * self.scale_row * 2 if self.has_stage_scales else 0

    @property
    def zero_stage_bytes(self) -> int:
        return self.groups_per_stage * self.scale_row if self.has_stage_zeros else 0

    @property
    def zero_slot_bytes(self) -> int:
        """Bytes per slot of zero points, rounded up because a TMA destination must be 128-byte aligned."""
        return align_up(self.zero_stage_bytes, 128)

    def _stage_bytes(self) -> list[tuple[str, int]]:
        """Return (name, bytes) for each load of a stage.

        Activations come first, because their 128-byte swizzle requires 1024-byte alignment.
        """
        sizes = [("activations", self.activation_stage_bytes), ("weights", self.weight_stage_bytes)]
        sizes += [("scales", self.scale_stage_bytes)] if self.has_stage_scales else []
        return sizes + ([("zeros", self.zero_stage_bytes)] if self.has_stage_zeros else [])

    def stage_arrays(self) -> tuple[tuple[str, int], ...]:
        return tuple([(name, align_up(size, 128)) for name, size in self._stage_bytes()])

    def epilogue_parts(self) -> tuple[tuple[str, int], ...]:
        if self.is_skinny:
            slice_sums = (self.slice_k - 1) * self.n_tiles * self.column_bytes
            cluster_sums = (self.cluster_k - 1) * ceil_div(self.n_tiles, self.cluster_k) * self.column_bytes
        else:
            slice_sums = (self.slice_k - 1) * self.tile_m * self.tile_n * 4
            cluster_sums = (self.cluster_k - 1) * self.own_rows * self.tile_n * 4
        slices = ("slice_sums", slice_sums)
        cluster = (("cluster_sums", cluster_sums), ("cluster_barrier", 8 if self.cluster_k > 1 else 0))
        if self.is_skinny:
            return (slices, *cluster)
        if self.version == "mma_sync":
            return (("staging", self.warps_n * self.staging_bytes), slices)
        return (slices, ("staging", self.warpgroups * self.tiles_at_once * self.staging_bytes), *cluster)

    @property
    def column_bytes(self) -> int:
        """Bytes of the partial sums of an N tile, which warps and CTAs of the skinny kernel add in shared memory."""
        return N_TILE // 16 * max(MMA_COLUMNS, self.tile_m) // 8 * _FRAGMENT_BYTES

    @property
    def own_rows(self) -> int:
        """Number of rows of a tile that each CTA of the cluster reduces and stores. The last CTAs may have fewer."""
        return 8 * ceil_div(self.tile_m, 8 * self.cluster_k)

    @property
    def staging_rows(self) -> int:
        """Number of rows that a warp or a warpgroup stores at a time.

        More rows need fewer barriers, but leave less memory for the stages.
        """
        if self.version == "mma_sync":
            return 8
        if self.cluster_k > 1:
            return self.own_rows
        limit = _MAX_STAGING_BYTES if self.tile_m <= _SHORT_M else _MAX_STAGING_BYTES // 2
        pitch = self.warpgroups * self.tiles_at_once * self.staging_pitch_bytes
        fitting = (rows for rows in (64, 32) if rows <= self.tile_m and rows * pitch <= limit)
        return next(fitting, min(16, self.tile_m))

    @property
    def staging_pitch_bytes(self) -> int:
        """Bytes per staging row, including 16 bytes of padding to avoid stmatrix bank conflicts."""
        return self.warp_n * 2 + 16

    @property
    def staging_bytes(self) -> int:
        return self.staging_rows * self.staging_pitch_bytes

    def stage_layout(self) -> list[tuple[str, int]]:
        """Return (description, bytes) for each array in a stage."""
        words = {
            "activations": f"activations {self.tile_m} x {self.tile_k} {self.dtype}, 128B swizzle",
            "weights": f"weights {self.tile_n} x {self.tile_k} {self.weight.title}, packed layout 1",
            "scales": f"scales {self.groups_per_stage} x {self.scale_row} {self.dtype}",
            "zeros": f"zero points {self.groups_per_stage} x {self.scale_row} uint8",
        }
        return [(words[name], size) for name, size in self._stage_bytes()]

    # ---- Choice, division and tuning

    @property
    def partial_bytes(self) -> int:
        """Maximum bytes of fp32 sums that a CTA stores in the workspace, or 0 if the kernel does not divide tiles."""
        return self.tile_m * self.tile_n * 4 if self.has_workspace else 0

    @property
    def stage_clocks(self) -> float:
        """Predicted clock cycles per stage of the wgmma kernel."""
        return wgmma_stage_clocks(self)

    def division(self, others: int, tiles_m: int) -> tuple[float, float]:
        """Return a CTA's one-time cost for dividing tiles and the time of a divided stage.

        Both are in units of the time of a stage of a whole tile. ``others`` is the number of CTAs that share a tile
        with the CTA that stores it, and ``tiles_m`` is the number of rows of tiles. By default, storing and loading
        partial sums is assumed to take as long as stages with the same number of bytes.
        """
        if self.has_wgmma:
            return wgmma_division(self, others, tiles_m)
        return self.partial_bytes // self.loaded_stage_bytes, 1.0

    def cost_at(self, m: Any, problem: Problem, gpu: Gpu) -> Cost:
        """Return the predicted time for M = ``m``, an int or int64 array. The problem's own M is ignored."""
        return COST_MODELS[self.version](self, m, problem.n, problem.k, gpu)

    def adapted(self, problem: Problem) -> MarlinConfig | None:
        """Return this tile for a problem with another dtype, other groups or other zero points, or None.

        Tiles that were measured with zero points and tiles of the mma.sync kernel are not adapted. The speedup of every
        other tile comes from the division of work, which also applies to the other problem.
        """
        if self.has_zeros or self.version == "mma_sync" or problem.layer.weight.bits != self.weight_bits:
            return None
        return replace(self, **{name: getattr(problem.layer, name) for name in PROBLEM_FIELDS})

    def variants(self, problem: Problem) -> Iterator[Mapping[str, Any]]:
        """Yield changes to fields other than the tile that are worth measuring."""
        if self.version == "skinny":
            yield from self._skinny_variants(problem.k)
            return
        if self.has_wgmma:
            yield from ({"mmas_per_commit": mmas, "commits_in_flight": groups} for mmas, groups in _PIPELINES)
            yield from ({"warpgroups": groups, "slice_k": slice_k} for groups, slice_k in _WARPGROUPS)
        yield from super(MarlinConfig, self).variants(problem)

    def _skinny_variants(self, k: int) -> Iterator[Mapping[str, Any]]:
        if k % 64 == 0:
            yield {"deep_box": not self.deep_box}
        # The ring must wrap around at least once, because more outstanding weight loads would delay the first stage.
        own_stages = ceil_div(ceil_div(k, self.cluster_k), self.tile_k)
        deepest = max(self.stages, min(_MAX_MEASURED_STAGES, own_stages - 1))
        yield from ({"stages": self.stages + more} for more in (1, -1, 2) if self.stages + more <= deepest)
