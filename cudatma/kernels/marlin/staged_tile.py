"""What a stage of the ring holds, and where it stands in shared memory: alike in all Marlin kernels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cudatma.dtypes import ActivationType, activation_type
from cudatma.errors import ArgumentError
from cudatma.kernels.launch_struct import Member
from cudatma.kernels.marlin.problem_struct import members
from cudatma.target import KIB, Target

GROUP_SIZES = (32, 64, 128, -1)
#: Most elements of a box in each dimension. [CUDA driver API, cuTensorMapEncodeTiled]
MAX_BOX = 256
#: Blocks of a cluster, as many as every card takes. [CUDA C++ programming guide, Thread Block Clusters]
MAX_CLUSTER_K = 8
#: Weights of so many bytes are long: two prefetched stages delay the first activations less than they win. [H200]
LONG_BYTES = 27 * 1024 * KIB
_MAP = "const __grid_constant__ cudatma::TensorMap"
#: Launch parameters of the kernels, and their types in CUDA.
_PARAMETER_TYPES = {
    "weight_map": _MAP,
    "half_weight_map": _MAP,
    "scale_map": _MAP,
    "zero_map": _MAP,
    "activation_map": _MAP,
    "weight": "const cudatma::u8*",
    "scales": "const cudatma::u16*",
    "zeros": "const cudatma::u8*",
    "activations": "const cudatma::u16*",
    "bias": "const cudatma::u16*",
    "output": "cudatma::u16*",
    "partials": "float4*",
    "flags": "cudatma::u32*",
    "problem": "const __grid_constant__ cudatma::Problem",
}
#: The members of ``Operands`` that each kernel has; and the parameters that its ``workspace`` holds.
_OPERAND_MAPS = ("weight_map", "scale_map", "zero_map", "activation_map")
_WORKSPACE = ("partials", "flags")


class StagedTile:
    """A block's tile of block_m tokens, block_n channels and block_k depths a stage. Base of the kernels' specs.

    dtype, group_size, has_zeros: as in MmaSyncSpec. template: the kernel's. cluster: blocks that work side by side
    in N. cluster_k: of a cluster that divide the depth.
    warp_tiles: parts of a tile that have a flag of their own in the workspace.
    """

    __slots__ = ()

    if TYPE_CHECKING:  # What a spec adds: fields, or properties of its own.

        @property
        def template(self) -> str: ...
        @property
        def entry(self) -> str: ...
        @property
        def dtype(self) -> str: ...
        @property
        def group_size(self) -> int: ...
        @property
        def has_zeros(self) -> bool: ...
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

    # What the kernel is launched with.

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """The launch parameters in order: those that the kernel reads."""
        raise NotImplementedError

    @property
    def problem_names(self) -> tuple[str, ...]:
        """The members of ``Problem`` that the kernel reads, in any order."""
        raise NotImplementedError

    @property
    def problem_members(self) -> tuple[Member, ...]:
        """The same in the order of the struct."""
        return members(self.problem_names)

    @property
    def problem_has_divisor(self) -> bool:
        return any(member.type == "Divisor" for member in self.problem_members)

    # ---- what kernels differ in, as most have it

    @property
    def scale_form(self) -> str:
        """How the kernel's code scales weights in one multiply-add (quantization/scale_range.py), or "none"."""
        return "none"

    def in_form(self, form: str) -> Any:
        """The spec with that ``scale_form`` where the kernel has it, else with "none"."""
        return self

    def with_weights(self, dtype: str, group_size: int, has_zeros: bool) -> Any:
        """The same tile for weights of another kind; None where a tile says nothing of those."""
        return replace(self, dtype=dtype, group_size=group_size, has_zeros=has_zeros)  # type: ignore[type-var]

    def check_layer(self, k: int) -> None:
        """Raises ArgumentError for a layer that the kernel cannot run."""

    def variants(self, k: int) -> Iterator[Mapping[str, Any]]:
        """Changes of fields that are worth measuring for the same tile: by default shorter rings, for rings are as deep
        as can be."""
        yield from ({"stages": self.stages - fewer} for fewer in (1, 2))

    @property
    def activation_box_blocks(self) -> int:
        """64-deep blocks of activations that one load brings."""
        return 1

    @property
    def loads_weight_tiles(self) -> bool:
        """Whether one load brings the weights of a whole tile, and not of 64 channels."""
        return True

    @property
    def parameters(self) -> tuple[tuple[str, str], ...]:
        """(name, type) of each."""
        return tuple((name, _PARAMETER_TYPES[name]) for name in self.parameter_names)

    @property
    def parameter_list(self) -> str:
        """The same in CUDA."""
        return ",\n    ".join(f"{kind} {name}" for name, kind in self.parameters)

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
        """Of scales and zero points that travel with their stage by TMA."""
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
        """Of the products: a tile's tokens."""
        return self.block_m

    @property
    def launch_cluster(self) -> int:
        """Blocks of a cluster of the launch."""
        return self.cluster * self.cluster_k

    @property
    def threads(self) -> int:
        return 32 * (self.consumer_warps + self.producer_warps)

    @property
    def has_stage_scales(self) -> bool:
        """Whole-column scales are read once, in the epilogue; all others travel with their stage."""
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
        """Rows of the scale table that a stage brings; a group deeper than the stage is brought again by the next."""
        return 1 if self.group_size == -1 else max(1, self.block_k // self.group_size)

    @property
    def scale_row(self) -> int:
        """Channels of one row of a stage's scales."""
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
        """Distance between the slots: a TMA destination is aligned to 128 bytes, 64 channels' zero points are not."""
        return -(-self.zero_stage_bytes // 128) * 128

    def prefetch_stages(self, weight_bytes: int) -> int:
        """Stages whose weights a dependent launch asks for before it waits for the one before it: with more, too many
        weights delay the first activations. [docs/performance/marlin_skinny.md, "Chains of dependent launches"]"""
        return 2 if self.block_m < 8 or (self.block_m == 8 and weight_bytes >= LONG_BYTES) else 1

    @property
    def partial_bytes(self) -> int:
        """fp32 partial tile that one block may leave in the workspace."""
        return self.block_m * self.block_n * 4

    def division(self, others: int) -> tuple[float, float]:
        """In stages of whole tiles: what dividing costs a block once, and what a stage of a divided tile takes.

        Partial sums go out and come in again, which takes about as long as stages of as many bytes. others: blocks that
        share a tile with the one that stores it.
        """
        return self.partial_bytes // self.loaded_stage_bytes, 1.0

    # Shared memory: an array an operand, then what the epilogue needs, then the barriers.

    def epilogue_parts(self) -> tuple[tuple[str, int], ...]:
        """(name, bytes) of what the epilogue needs."""
        raise NotImplementedError

    def smem_layout(self) -> list[tuple[str, int, int]]:
        """(name, offset, bytes) of each array. Activations first: their 128-byte swizzle wants 1024-byte alignment."""
        parts = (
            ("activations", self.activation_stage_bytes * self.stages),
            ("weights", self.weight_stage_bytes * self.stages),
            ("scales", self.scale_stage_bytes * self.stages),
            ("zeros", self.zero_slot_bytes * self.stages),
            *self.epilogue_parts(),
            ("full_barriers", 8 * self.stages),
            ("empty_barriers", 8 * self.stages),
        )
        layout, offset = [], 0
        for name, size in parts:
            layout.append((name, offset, size))
            offset += size
        return layout

    def smem_offset(self, name: str) -> int:
        return next(offset for part, offset, _ in self.smem_layout() if part == name)

    @property
    def smem_bytes(self) -> int:
        _, offset, size = self.smem_layout()[-1]
        return offset + size

    def check_smem(self, target: Target) -> None:
        """Raise ArgumentError unless a block's shared memory fits."""
        if self.smem_bytes > target.smem_per_block_bytes:
            raise ArgumentError(
                "stages",
                self.stages,
                f"shared memory of at most {target.smem_per_block_bytes} bytes on {target.name}",
                f"this configuration takes {self.smem_bytes}; use fewer stages or a smaller tile",
            )

    def stage_layout(self) -> list[tuple[str, int]]:
        """(what, bytes) that one stage holds."""
        held = [
            (f"activations {self.block_m} x {self.block_k} {self.dtype}, 128B swizzle", self.activation_stage_bytes),
            (f"weights {self.block_n} x {self.block_k} int4, packed layout 1", self.weight_stage_bytes),
            (f"scales {self.groups_per_stage} x {self.scale_row} {self.dtype}", self.scale_stage_bytes),
            (f"zero points {self.groups_per_stage} x {self.scale_row} uint8", self.zero_stage_bytes),
        ]
        return [(what, size) for what, size in held if size]

    @property
    def notes(self) -> list[str]:
        """What the opening comment of the generated source says beside the fields."""
        held = [f"  {size:6d} B  {what}" for what, size in self.stage_layout()]
        parts = [f"  {offset:6d}  {name}, {size} B" for name, offset, size in self.smem_layout() if size]
        return [
            f"{self.consumer_warps} warps consume, {self.producer_warps} produce; a block takes {self.smem_bytes} B.",
            "One stage holds",
            *held,
            "Shared memory, by offset",
            *parts,
        ]
