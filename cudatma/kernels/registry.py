"""Every kernel by name: its template, and the specs that stand for it in dumps, goldens and compile checks.

A kernel is added with one line below. Nothing is imported until a kernel's specs are asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cudatma.deprecation import warn_deprecated
from cudatma.errors import ArgumentError
from cudatma.kernels.family import Family, KernelSpec, imported
from cudatma.target import Target, get_target


@dataclass(frozen=True, slots=True)
class KernelEntry:
    """One kernel. ``template``: path below ptx_templates/. ``source``: ``"module:function"``, a function that gives the
    representative specs for a Target, none where the target cannot run the kernel. ``emulated``: the same for a
    function that gives a Sample, of a Target and of sizes that its keyword arguments name."""

    name: str
    template: str
    source: str
    summary: str
    emulated: str = ""

    def specs(self, target: str | Target) -> list[KernelSpec]:
        """The representative specs for a target, in a fixed order. TargetError for an unknown name."""
        return list(imported(self.source)(get_target(target)))

    @property
    def sample(self) -> Callable[..., Any] | None:
        """``sample(target, **sizes) -> Sample``: the kernel with made-up operands; None where it has none."""
        return imported(self.emulated) if self.emulated else None


REGISTRY: dict[str, KernelEntry] = {
    entry.name: entry
    for entry in (
        KernelEntry(
            "marlin_mma_sync",
            "kernels/marlin_mma_sync.cu.j2",
            "cudatma.kernels.marlin.mma_sync_candidates:dump_specs",
            "W4A16 GEMM, mma.sync, operands by TMA or cp.async",
            "cudatma.kernels.marlin.sample:mma_sync_sample",
        ),
        KernelEntry(
            "marlin_wgmma",
            "kernels/marlin_wgmma.cu.j2",
            "cudatma.kernels.marlin.wgmma_candidates:dump_specs",
            "W4A16 GEMM for large M, wgmma, operands by TMA",
            "cudatma.kernels.marlin.sample:wgmma_sample",
        ),
        KernelEntry(
            "marlin_skinny",
            "kernels/marlin_skinny.cu.j2",
            "cudatma.kernels.marlin.skinny_candidates:dump_specs",
            "W4A16 GEMM for small M, mma.sync, operands by TMA",
            "cudatma.kernels.marlin.sample:skinny_sample",
        ),
        KernelEntry(
            "gemm_v1",
            "kernels/gemm_v1.cu.j2",
            "cudatma.kernels.gemm.choose:v1_specs",
            "dense GEMM, wgmma, version 1: operands by cp.async",
            "cudatma.kernels.gemm.sample:v1_sample",
        ),
        KernelEntry(
            "gemm_v2",
            "kernels/gemm_v2.cu.j2",
            "cudatma.kernels.gemm.choose:v2_specs",
            "dense GEMM, wgmma, version 2: a ring filled by TMA",
            "cudatma.kernels.gemm.sample:v2_sample",
        ),
        KernelEntry(
            "gemm_v3",
            "kernels/gemm_v3.cu.j2",
            "cudatma.kernels.gemm.choose:v3_specs",
            "dense GEMM, wgmma, version 3: a producer warp",
            "cudatma.kernels.gemm.sample:v3_sample",
        ),
        KernelEntry(
            "gemm_v4",
            "kernels/gemm_v4.cu.j2",
            "cudatma.kernels.gemm.choose:v4_specs",
            "dense GEMM, wgmma, version 4: persistent, results by TMA where the tile allows it",
            "cudatma.kernels.gemm.sample:v4_sample",
        ),
        KernelEntry(
            "gemm_v5",
            "kernels/gemm_v5.cu.j2",
            "cudatma.kernels.gemm.choose:v5_specs",
            "dense GEMM, wgmma, version 5: clusters that share tiles of B",
            "cudatma.kernels.gemm.sample:v5_sample",
        ),
        KernelEntry(
            "gemm_v6",
            "kernels/gemm_v6.cu.j2",
            "cudatma.kernels.gemm.choose:v6_specs",
            "dense GEMM, wgmma, version 6: clusters that divide K",
            "cudatma.kernels.gemm.sample:v6_sample",
        ),
        KernelEntry(
            "gemm_v7",
            "kernels/gemm_v7.cu.j2",
            "cudatma.kernels.gemm.choose:v7_specs",
            "dense GEMM, wgmma, version 7: a tile for each warpgroup",
            "cudatma.kernels.gemm.sample:v7_sample",
        ),
        KernelEntry(
            "gemm_p1",
            "kernels/gemm_p1.cu.j2",
            "cudatma.kernels.gemm.choose:p1_specs",
            "dense GEMM, mma.sync, version p1: for SM120, a producer warp, persistent",
            "cudatma.kernels.gemm.sample:p1_sample",
        ),
        KernelEntry(
            "attention_phase1",
            "kernels/attention_phase1.cu.j2",
            "cudatma.kernels.attention.choose:phase1_specs",
            "attention, phase 1: scalar loops",
            "cudatma.kernels.attention.sample:phase1_sample",
        ),
        KernelEntry(
            "attention_a1",
            "kernels/attention_a1.cu.j2",
            "cudatma.kernels.attention.choose:a1_specs",
            "attention, wgmma, version a1: keys and values by cp.async",
            "cudatma.kernels.attention.sample:a1_sample",
        ),
        KernelEntry(
            "attention_a2",
            "kernels/attention_a2.cu.j2",
            "cudatma.kernels.attention.choose:a2_specs",
            "attention, wgmma, version a2: keys and values by TMA",
            "cudatma.kernels.attention.sample:a2_sample",
        ),
        KernelEntry(
            "attention_a3",
            "kernels/attention_a3.cu.j2",
            "cudatma.kernels.attention.choose:a3_specs",
            "attention, wgmma, version a3: a producer warp, softmax beside products",
            "cudatma.kernels.attention.sample:a3_sample",
        ),
        KernelEntry(
            "attention_a4",
            "kernels/attention_a4.cu.j2",
            "cudatma.kernels.attention.choose:a4_specs",
            "attention, wgmma, version a4: persistent, stores by TMA",
            "cudatma.kernels.attention.sample:a4_sample",
        ),
        KernelEntry(
            "attention_p1",
            "kernels/attention_p1.cu.j2",
            "cudatma.kernels.attention.choose:p1_specs",
            "attention, mma.sync, version p1: for SM120, a producer warp",
            "cudatma.kernels.attention.sample:p1_sample",
        ),
        KernelEntry(
            "attention_decode",
            "kernels/attention_decode.cu.j2",
            "cudatma.kernels.attention.decode_sample:dump_specs",
            "attention of a few queries to a cache, wgmma or mma.sync, keys divided among CTAs",
            "cudatma.kernels.attention.decode_sample:decode_sample",
        ),
        KernelEntry(
            "attention_decode_fp8",
            "kernels/attention_decode_fp8.cu.j2",
            "cudatma.kernels.attention.decode_sample:fp8_dump_specs",
            "attention of a few queries to an e4m3 cache, mma.sync, keys divided among CTAs and warps",
            "cudatma.kernels.attention.decode_sample:fp8_sample",
        ),
        KernelEntry(
            "tile_copy",
            "kernels/tile_copy.cu.j2",
            "cudatma.kernels.data_movement.tile_copy:dump_specs",
            "pipelined 2D copy",
            "cudatma.kernels.data_movement.tile_copy:sample",
        ),
        KernelEntry(
            "window_copy",
            "kernels/window_copy.cu.j2",
            "cudatma.kernels.data_movement.specs:window_specs",
            "copy of, or reduction into, a window of 1 to 5 axes, by boxes",
            "cudatma.kernels.data_movement.samples:window_sample",
        ),
        KernelEntry(
            "run_copy",
            "kernels/run_copy.cu.j2",
            "cudatma.kernels.data_movement.specs:run_specs",
            "copy of, or reduction into, a run of bytes, by 1D bulk copies",
            "cudatma.kernels.data_movement.samples:run_sample",
        ),
        KernelEntry(
            "plain_copy",
            "kernels/plain_copy.cu.j2",
            "cudatma.kernels.data_movement.specs:plain_specs",
            "copy of any window, by plain loads and stores",
        ),
        KernelEntry(
            "transpose",
            "kernels/transpose.cu.j2",
            "cudatma.kernels.data_movement.transpose:dump_specs",
            "transpose of a batch of matrices, through swizzled shared memory",
            "cudatma.kernels.data_movement.samples:transpose_sample",
        ),
        KernelEntry(
            "gather_boxes",
            "kernels/gather_boxes.cu.j2",
            "cudatma.kernels.data_movement.gather:dump_specs",
            "boxes at given places, or tiles with a halo",
            "cudatma.kernels.data_movement.samples:gather_sample",
        ),
        KernelEntry(
            "im2col",
            "kernels/im2col.cu.j2",
            "cudatma.kernels.data_movement.im2col:dump_specs",
            "columns of a convolution, by TMA's im2col mode",
            "cudatma.kernels.data_movement.samples:im2col_sample",
        ),
        KernelEntry(
            "broadcast",
            "kernels/broadcast.cu.j2",
            "cudatma.kernels.data_movement.broadcast:dump_specs",
            "one array to several, by multicast in clusters",
            "cudatma.kernels.data_movement.samples:broadcast_sample",
        ),
        KernelEntry(
            "prefetch",
            "kernels/prefetch.cu.j2",
            "cudatma.kernels.data_movement.prefetch:dump_specs",
            "a window brought to L2",
        ),
        KernelEntry(
            "rows",
            "kernels/rows.cu.j2",
            "cudatma.kernels.data_movement.rows:dump_specs",
            "rows by number, gather4 and scatter4",
        ),
        KernelEntry(
            "ragged_copy",
            "kernels/ragged_copy.cu.j2",
            "cudatma.kernels.data_movement.ragged_copy:dump_specs",
            "copies of many 2D arrays, tensor maps edited on the GPU",
            "cudatma.kernels.data_movement.ragged_copy:sample",
        ),
        KernelEntry(
            "permute_columns",
            "kernels/permute_columns.cu.j2",
            "cudatma.kernels.marlin.permute_columns:dump_specs",
            "columns of 16-bit rows permuted into aligned rows",
            "cudatma.kernels.marlin.permute_columns:sample",
        ),
        KernelEntry(
            "dequantize",
            "kernels/dequantize.cu.j2",
            "cudatma.kernels.marlin.dequantize:dump_specs",
            "packed int4 weight to a dense matrix",
            "cudatma.kernels.marlin.dequantize:sample",
        ),
        KernelEntry(
            "all_reduce",
            "kernels/all_reduce.cu.j2",
            "cudatma.kernels.all_reduce.spec:dump_specs",
            "one-shot all-reduce over memory of other GPUs",
            "cudatma.kernels.all_reduce.sample:sample",
        ),
    )
}


#: Names that kernels had before, which still find them, with a DeprecationWarning, until the next release.
FORMER_NAMES = {
    "marlin": "marlin_mma_sync",
    "marlin_strip": "marlin_skinny",
    "window_move": "window_copy",
    "run_move": "run_copy",
}


#: Families whose configurations are chosen, by name: ``"module:family"``.
FAMILIES = {
    "marlin": "cudatma.kernels.marlin.choose:MARLIN",
    "gemm": "cudatma.kernels.gemm.choose:GEMM",
    "attention": "cudatma.kernels.attention.choose:ATTENTION",
}


def family(name: str) -> Family[Any, Any]:
    """A family by its name, a key of FAMILIES."""
    found: Family[Any, Any] = imported(FAMILIES[name])
    return found


def current_name(name: str) -> str:
    """The kernel's present name; any other text unchanged."""
    if name not in FORMER_NAMES:
        return name
    warn_deprecated(f"cudatma: the kernel {name} is now called {FORMER_NAMES[name]}")
    return FORMER_NAMES[name]


def kernel(name: str) -> KernelEntry:
    """The entry of a kernel; ArgumentError that lists the known ones."""
    name = current_name(name)
    if name not in REGISTRY:
        raise ArgumentError("kernel", name, ", ".join(REGISTRY), "`cudatma dump --list` shows them with their specs")
    return REGISTRY[name]
