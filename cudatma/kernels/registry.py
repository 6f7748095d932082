"""Every kernel by name: its template, and the specs that stand for it in dumps, goldens and compile checks.

A kernel is added with one line below. Nothing is imported until a kernel's specs are asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from cudatma.errors import ArgumentError
from cudatma.kernels.family import Family, KernelSpec, imported
from cudatma.target import Target, get_target


@dataclass(frozen=True, slots=True)
class KernelEntry:
    """One kernel.

    template: path below ptx_templates/. source: ``"module:function"``, a function that returns the representative specs
    for a Target, none if the target cannot run the kernel. emulated: the same for a function that returns a Sample, of
    a Target and of sizes that its keyword arguments name. version: the first argument of both functions, if not empty.
    """

    name: str
    template: str
    source: str
    summary: str
    emulated: str = ""
    version: str = ""

    def specs(self, target: str | Target) -> list[KernelSpec]:
        """The representative specs for a target, in a fixed order. TargetError for an unknown name."""
        return list(self._function(self.source)(get_target(target)))

    @property
    def sample(self) -> Callable[..., Any] | None:
        """``sample(target, **sizes) -> Sample``: the kernel with made-up operands; None where it has none."""
        return self._function(self.emulated) if self.emulated else None

    def _function(self, place: str) -> Callable[..., Any]:
        function: Callable[..., Any] = imported(place)
        return partial(function, self.version) if self.version else function


def _entry(
    name: str, summary: str, specs: str, emulated: str = "", version: str = "", template: str = ""
) -> KernelEntry:
    """Return an entry.

    specs, emulated: ``"module:function"`` below cudatma.kernels. template: the kernel whose template it shares.
    """
    made = f"cudatma.kernels.{emulated}" if emulated else ""
    return KernelEntry(name, f"kernels/{template or name}.cu.j2", f"cudatma.kernels.{specs}", summary, made, version)


def _versions(family: str, summaries: dict[str, str], sample: str = "sample", template: str = "") -> list[KernelEntry]:
    """Return the entries of a family whose kernels are versions."""
    dumped, emulated = f"{family}.choose:dump_specs", f"{family}.sample:{sample}"
    return [
        _entry(f"{family}_{version}", summary, dumped, emulated, version, template)
        for version, summary in summaries.items()
    ]


_GEMM = {
    "v1": "dense GEMM, wgmma, version v1: operands by cp.async",
    "v2": "dense GEMM, wgmma, version v2: a ring filled by TMA",
    "v3": "dense GEMM, wgmma, version v3: a producer warp",
    "v4": "dense GEMM, wgmma, version v4: persistent, results by TMA where the tile allows it",
    "v5": "dense GEMM, wgmma, version v5: clusters that share tiles of A or B",
    "v6": "dense GEMM, wgmma, version v6: clusters that divide K",
    "v7": "dense GEMM, wgmma, version v7: a tile for each warpgroup",
    "mma_sync": "dense GEMM, mma.sync: for SM120, a producer warp, persistent",
}
_ATTENTION = {
    "scalar": "attention, scalar loops: the baseline",
    "a1": "attention, wgmma, version a1: keys and values by cp.async",
    "a2": "attention, wgmma, version a2: keys and values by TMA",
    "a3": "attention, wgmma, version a3: a producer warp, softmax beside products",
    "a4": "attention, wgmma, version a4: persistent, stores by TMA",
}
_ATTENTION_MMA_SYNC = {"mma_sync": "attention, mma.sync: for SM120, a producer warp"}
_DECODE = {
    "decode": "attention of a few queries to a cache, wgmma, keys divided among CTAs",
    "decode_mma_sync": "attention of a few queries to a cache, mma.sync: for SM120, keys divided among CTAs",
    "decode_fp8": "attention of a few queries to an e4m3 cache, mma.sync, keys divided among CTAs and warps",
}

REGISTRY: dict[str, KernelEntry] = {
    entry.name: entry
    for entry in (
        _entry(
            "marlin_mma_sync",
            "W4A16 GEMM, mma.sync, operands by TMA or cp.async",
            "marlin.mma_sync_candidates:dump_specs",
            "marlin.sample:mma_sync_sample",
        ),
        _entry(
            "marlin_wgmma",
            "W4A16 GEMM for large M, wgmma, operands by TMA",
            "marlin.wgmma_candidates:dump_specs",
            "marlin.sample:wgmma_sample",
        ),
        _entry(
            "marlin_skinny",
            "W4A16 GEMM for small M, mma.sync, operands by TMA",
            "marlin.skinny_candidates:dump_specs",
            "marlin.sample:skinny_sample",
        ),
        *_versions("gemm", _GEMM),
        *_versions("attention", _ATTENTION),
        *_versions("attention", _ATTENTION_MMA_SYNC, template="attention_a3"),
        *_versions("attention", _DECODE, "decode_sample", "attention_decode"),
        _entry(
            "tile_copy", "pipelined 2D copy", "data_movement.tile_copy:dump_specs", "data_movement.tile_copy:sample"
        ),
        _entry(
            "window_copy",
            "copy of, or reduction into, a window of 1 to 5 axes, by boxes",
            "data_movement.specs:window_specs",
            "data_movement.samples:window_sample",
        ),
        _entry(
            "run_copy",
            "copy of, or reduction into, a run of bytes, by 1D bulk copies",
            "data_movement.specs:run_specs",
            "data_movement.samples:run_sample",
        ),
        _entry("plain_copy", "copy of any window, by plain loads and stores", "data_movement.specs:plain_specs"),
        _entry(
            "transpose",
            "transpose of a batch of matrices, through swizzled shared memory",
            "data_movement.transpose:dump_specs",
            "data_movement.samples:transpose_sample",
        ),
        _entry(
            "gather_boxes",
            "boxes at given places, or tiles with a halo",
            "data_movement.gather:dump_specs",
            "data_movement.samples:gather_sample",
        ),
        _entry(
            "im2col",
            "columns of a convolution, by TMA's im2col mode",
            "data_movement.im2col:dump_specs",
            "data_movement.samples:im2col_sample",
        ),
        _entry(
            "broadcast",
            "one array to several, by multicast in clusters",
            "data_movement.broadcast:dump_specs",
            "data_movement.samples:broadcast_sample",
        ),
        _entry("prefetch", "a window brought to L2", "data_movement.prefetch:dump_specs"),
        _entry("rows", "rows by number, gather4 and scatter4", "data_movement.rows:dump_specs"),
        _entry(
            "ragged_copy",
            "copies of many 2D arrays, tensor maps edited on the GPU",
            "data_movement.ragged_copy:dump_specs",
            "data_movement.ragged_copy:sample",
        ),
        _entry(
            "permute_columns",
            "columns of 16-bit rows permuted into aligned rows",
            "marlin.permute_columns:dump_specs",
            "marlin.permute_columns:sample",
        ),
        _entry(
            "dequantize",
            "packed int4 weight to a dense matrix",
            "marlin.dequantize:dump_specs",
            "marlin.dequantize:sample",
        ),
        _entry(
            "all_reduce",
            "one-shot all-reduce over memory of other GPUs",
            "all_reduce.spec:dump_specs",
            "all_reduce.spec:sample",
        ),
    )
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


def kernel(name: str) -> KernelEntry:
    """The entry of a kernel; ArgumentError that lists the known ones."""
    if name not in REGISTRY:
        raise ArgumentError("kernel", name, ", ".join(REGISTRY), "`cudatma dump --list` shows them with their specs")
    return REGISTRY[name]
