"""What a stage of the ring holds, and where in shared memory: common to all Marlin kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from cudatma.dtypes import ActivationType, activation_type
from cudatma.kernels.launch_struct import Member
from cudatma.kernels.marlin.problem import MEMBERS, Problem
from cudatma.kernels.tiled_kernel import PROBLEM, TENSOR_MAP, TiledKernel
from cudatma.pipeline import MBARRIER_BYTES, Operand
from cudatma.target import KIB, Target

#: Most elements of a box in each dimension. [CUDA driver API, cuTensorMapEncodeTiled]
MAX_BOX = 256
#: CTAs of a cluster, as many as every GPU takes. [CUDA C++ programming guide, Thread Block Clusters]
MAX_CLUSTER_K = 8
#: From so many bytes of weights on, two prefetched stages delay the first activations less than they save. [H200]
LONG_BYTES = 27 * 1024 * KIB
#: Launch parameters of the kernels, and their types in CUDA.
_PARAMETER_TYPES = {
    "weight_map": TENSOR_MAP,
    "half_weight_map": TENSOR_MAP,
    "scale_map": TENSOR_MAP,
    "zero_map": TENSOR_MAP,
    "activation_map": TENSOR_MAP,
    "weight": "const cudatma::u8*",
    "scales": "const cudatma::u16*",
    "zeros": "const cudatma::u8*",
    "activations": "const cudatma::u16*",
    "bias": "const cudatma::u16*",
    "output": "cudatma::u16*",
    "partials": "float4*",
    "flags": "cudatma::u32*",
    "problem": PROBLEM,
}
#: The members of ``Operands`` that each kernel has; and the parameters that its ``workspace`` holds.
_OPERAND_MAPS = ("weight_map", "scale_map", "zero_map", "activation_map")
_WORKSPACE = ("partials", "flags")


class StagedTile(TiledKernel):
    """A tile of M x N x K that a CTA computes out of int4 weights. Base of the Marlin kernels' specs.

    dtype, group_size, has_zeros: as in MmaSyncSpec.
    """

    __slots__ = ()

    parameter_types: ClassVar[Mapping[str, str]] = _PARAMETER_TYPES
    struct_members: ClassVar[Mapping[str, Member]] = MEMBERS
    optional_arrays: ClassVar[tuple[str, ...]] = ("scales", "zeros")

    if TYPE_CHECKING:  # What a spec adds.

        @property
        def dtype(self) -> str: ...
        @property
        def group_size(self) -> int: ...
        @property
        def has_zeros(self) -> bool: ...

    # ---- what kernels differ in, as most have it

    @property
    def scale_form(self) -> str:
        """How the kernel's code scales weights in one multiply-add (quantization/scale_range.py), or "none"."""
        return "none"

    def in_form(self, form: str) -> Any:
        """The spec with that ``scale_form`` where the kernel has it, else with "none"."""
        return self

    def adapted(self, problem: Problem) -> Any:
        """The same tile for weights of another dtype, with other groups or zero points. None for a tile that was
        measured with zero points: its gain comes from their cost, which depends on dtype and groups. A gain without
        them comes from how the work is divided, which is the same."""
        layer = problem.layer
        if self.has_zeros:
            return None
        return replace(self, dtype=layer.dtype, group_size=layer.group_size, has_zeros=layer.has_zeros)  # type: ignore[type-var]

    def check_k(self, k: int) -> None:
        """Raises ArgumentError for a K that the kernel cannot run."""

    def check(self, problem: Problem, target: Target) -> None:
        """As TiledKernel's, and check_k()."""
        self.check_k(problem.k)
        super().check(problem, target)

    @property
    def activation_box_blocks(self) -> int:
        """Blocks of 64 of K that one load of activations fills."""
        return 1

    @property
    def loads_weight_tiles(self) -> bool:
        """Whether one load fills the weights of a whole tile, and not of 64 columns."""
        return True

    @property
    def slices(self) -> int:
        """Warps or warpgroups that have the same part of the tile and divide the K of a stage."""
        return 1

    @property
    def has_workspace(self) -> bool:
        """Whether CTAs add up partial sums through global memory."""
        return "partials" in self.parameter_names

    @property
    def operand_arrays(self) -> tuple[tuple[str, str], ...]:
        """(type, name) of the launch parameters that are arrays, but for the workspace, as in ``Operands``."""
        arrays = ((kind, name) for name, kind in self.parameters if kind.endswith("*"))
        return tuple((kind.replace("cudatma::", ""), name) for kind, name in arrays if name not in _WORKSPACE)

    @property
    def operands(self) -> str:
        """The initializers of ``Operands`` in CUDA."""
        maps = (f"&{name}" if name in self.parameter_names else "nullptr" for name in _OPERAND_MAPS)
        workspace = ("{partials, flags}",) if self.has_workspace else ()
        return ", ".join((*maps, *(name for _, name in self.operand_arrays), *workspace))

    def table_maps(self) -> tuple[str, ...]:
        """The maps of scales and zero points that TMA loads with their stage."""
        return ("scale_map",) * self.has_stage_scales + ("zero_map",) * self.has_stage_zeros

    def tables(self) -> tuple[str, ...]:
        """Scales and zero points as arrays, which are read once where they are of whole columns."""
        return ("scales", "zeros") if self.has_zeros else ("scales",)

    # What a reader of the generated source finds as named constants.

    @property
    def activation(self) -> ActivationType:
        return activation_type(self.dtype)

    @property
    def is_bf16(self) -> bool:
        return self.dtype == "bfloat16"

    @property
    def columns(self) -> int:
        """Of the products: rows of M of a tile."""
        return self.block_m

    @property
    def has_stage_scales(self) -> bool:
        """Scales of groups are loaded with their stage; whole-column scales are read once, in the epilogue."""
        return self.group_size != -1

    @property
    def stage_group_size(self) -> int:
        """K that shares a scale in a stage: the whole stage where its scales are of whole columns."""
        return self.group_size if self.has_stage_scales else self.block_k

    @property
    def has_stage_zeros(self) -> bool:
        return self.has_zeros and self.has_stage_scales

    @property
    def groups_per_stage(self) -> int:
        """Rows of the scale table in a stage; a group longer than the stage's K is loaded again by the next."""
        return 1 if self.group_size == -1 else max(1, self.block_k // self.group_size)

    @property
    def scale_row(self) -> int:
        """Columns of one row of a stage's scales."""
        return self.block_n

    @property
    def weight_stage_bytes(self) -> int:
        return self.block_n * self.block_k // 2

    @property
    def activation_stage_bytes(self) -> int:
        return self.block_m * self.block_k * 2

    @property
    def loaded_stage_bytes(self) -> int:
        """Weights and activations that one CTA loads for a stage; the CTAs of a cluster share the activations."""
        return self.weight_stage_bytes + self.activation_stage_bytes // self.cluster

    @property
    def scale_stage_bytes(self) -> int:
        return self.groups_per_stage * self.scale_row * 2 if self.has_stage_scales else 0

    @property
    def zero_stage_bytes(self) -> int:
        return self.groups_per_stage * self.scale_row if self.has_stage_zeros else 0

    @property
    def zero_slot_bytes(self) -> int:
        """Distance between the slots: a TMA destination is aligned to 128 bytes."""
        return -(-self.zero_stage_bytes // 128) * 128

    def prefetch_stages(self, weight_bytes: int) -> int:
        """Stages whose weights a dependent launch loads before it waits for the launch before it: with more, too many
        weights delay the first activations. [docs/performance/marlin_skinny.md, "Chains of dependent launches"]"""
        return 2 if self.block_m < 8 or (self.block_m == 8 and weight_bytes >= LONG_BYTES) else 1

    def loaded_by_tma(self, operand: str) -> bool:
        """Whether TMA loads activations, weights, scales or zeros."""
        return True

    def _stage_arrays(self) -> list[tuple[str, int, int]]:
        """Return (name, bytes, alignment) of each operand of a stage.

        Activations come first: their 128-byte swizzle needs 1024-byte alignment.
        """
        arrays = (
            ("activations", self.activation_stage_bytes, 1024),
            ("weights", self.weight_stage_bytes, 128),
            ("scales", self.scale_stage_bytes, 128),
            ("zeros", self.zero_stage_bytes, 128),
        )
        return [one for one in arrays if one[1]]

    def stage_operands(self) -> tuple[Operand, ...]:
        return tuple(
            Operand(name, size, size if self.loaded_by_tma(name) else 0, alignment)
            for name, size, alignment in self._stage_arrays()
        )

    @property
    def _slot_bytes(self) -> int:
        """Return TiledKernel's, without building Operands: a choice computes it for each configuration."""
        slots = sum([-(-size // alignment) * alignment for _, size, alignment in self._stage_arrays()])
        return slots + 2 * MBARRIER_BYTES

    def stage_layout(self) -> list[tuple[str, int]]:
        """(what, bytes) that one stage holds."""
        held = [
            (f"activations {self.block_m} x {self.block_k} {self.dtype}, 128B swizzle", self.activation_stage_bytes),
            (f"weights {self.block_n} x {self.block_k} int4, packed layout 1", self.weight_stage_bytes),
            (f"scales {self.groups_per_stage} x {self.scale_row} {self.dtype}", self.scale_stage_bytes),
            (f"zero points {self.groups_per_stage} x {self.scale_row} uint8", self.zero_stage_bytes),
        ]
        return [(what, size) for what, size in held if size]
