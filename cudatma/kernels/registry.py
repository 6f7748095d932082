"""Registry of all kernels, with their templates and with configs for dumps, goldens and compile checks.

Each version in the PRESETS of gemm, attention and marlin_gemm is a kernel. Every other kernel has an entry below.
Functions are given as object references, ``"package.module:name"``, so that modules are imported only when needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pkgutil import resolve_name
from typing import Any

from cudatma.errors import ArgumentError
from cudatma.kernels.attention.config import PRESETS as ATTENTION
from cudatma.kernels.experts.config import PRESETS as EXPERTS
from cudatma.kernels.family import Family
from cudatma.kernels.gemm.config import PRESETS as GEMM
from cudatma.kernels.marlin.config import PRESETS as MARLIN
from cudatma.target import Target, get_target


@dataclass(frozen=True, slots=True)
class KernelEntry:
    """Registry entry of a kernel.

    Attributes
    ----------
    name : str
        Name of the kernel.
    template : str
        Path below ptx_templates/.
    source : str
        Reference to a function that takes a Target and returns the representative configs, or an empty list if the
        target cannot run the kernel. A config has ``entry``, ``threads``, ``smem_bytes`` and ``check_target(target)``.
        Reports also show the config's ``smem_layout()`` and ``stage_layout()``.
    summary : str
        One-line description.
    emulated : str, default ""
        Reference to a function that takes a Target and sizes as keyword arguments, and returns a Sample.
    version : str, default ""
        First argument of ``source`` and ``emulated``, or "" if they take no version.
    """

    name: str
    template: str
    source: str
    summary: str
    emulated: str = ""
    version: str = ""

    def configs(self, target: str | Target) -> list[Any]:
        """Return the representative configs for a target, in a fixed order. Raises TargetError for an unknown name."""
        return list(self._function(self.source)(get_target(target)))

    @property
    def sample(self) -> Callable[..., Any] | None:
        """Function ``sample(target, **sizes) -> Sample`` with random operands, or None if the kernel has no sample."""
        return self._function(self.emulated) if self.emulated else None

    def _function(self, reference: str) -> Callable[..., Any]:
        function: Callable[..., Any] = resolve_name(reference)
        return partial(function, self.version) if self.version else function


REGISTRY: dict[str, KernelEntry] = {
    entry.name: entry
    for entry in (
        *(
            KernelEntry(
                f"marlin_{version}",
                f"kernels/marlin_{version}.cu.j2",
                "cudatma.kernels.marlin.candidates:dump_configs",
                preset.summary,
                f"cudatma.kernels.marlin.sample:{version}_sample",
                version,
            )
            for version, preset in MARLIN.items()
        ),
        *(
            KernelEntry(
                f"gemm_{version}",
                f"kernels/gemm_{version}.cu.j2",
                "cudatma.kernels.gemm.choose:dump_configs",
                preset.summary,
                "cudatma.kernels.gemm.sample:sample",
                version,
            )
            for version, preset in GEMM.items()
        ),
        *(
            KernelEntry(
                f"attention_{version}",
                f"kernels/attention_{preset.template or version}.cu.j2",
                "cudatma.kernels.attention.choose:dump_configs",
                preset.summary,
                f"cudatma.kernels.attention.sample:{'decode_sample' if preset.is_decode else 'sample'}",
                version,
            )
            for version, preset in ATTENTION.items()
        ),
        KernelEntry(
            "tile_copy",
            "kernels/tile_copy.cu.j2",
            "cudatma.kernels.data_movement.tile_copy:dump_configs",
            "copy a 2D array with a pipeline of boxes",
            "cudatma.kernels.data_movement.tile_copy:sample",
        ),
        KernelEntry(
            "window_copy",
            "kernels/window_copy.cu.j2",
            "cudatma.kernels.data_movement.configs:window_configs",
            "copy or reduce a window of 1 to 5 axes, box by box",
            "cudatma.kernels.data_movement.samples:window_sample",
        ),
        KernelEntry(
            "run_copy",
            "kernels/run_copy.cu.j2",
            "cudatma.kernels.data_movement.configs:run_configs",
            "copy or reduce a run of bytes with 1D bulk copies",
            "cudatma.kernels.data_movement.samples:run_sample",
        ),
        KernelEntry(
            "plain_copy",
            "kernels/plain_copy.cu.j2",
            "cudatma.kernels.data_movement.configs:plain_configs",
            "copy any window with plain loads and stores",
        ),
        KernelEntry(
            "transpose",
            "kernels/transpose.cu.j2",
            "cudatma.kernels.data_movement.transpose:dump_configs",
            "transpose a batch of matrices through swizzled shared memory",
            "cudatma.kernels.data_movement.samples:transpose_sample",
        ),
        KernelEntry(
            "gather_boxes",
            "kernels/gather_boxes.cu.j2",
            "cudatma.kernels.data_movement.gather:dump_configs",
            "gather boxes at given positions, or tiles with a halo",
            "cudatma.kernels.data_movement.samples:gather_sample",
        ),
        KernelEntry(
            "im2col",
            "kernels/im2col.cu.j2",
            "cudatma.kernels.data_movement.im2col:dump_configs",
            "arrange the inputs of a convolution in columns with TMA's im2col mode",
            "cudatma.kernels.data_movement.samples:im2col_sample",
        ),
        KernelEntry(
            "broadcast",
            "kernels/broadcast.cu.j2",
            "cudatma.kernels.data_movement.broadcast:dump_configs",
            "copy one array to several destinations by multicast in clusters",
            "cudatma.kernels.data_movement.samples:broadcast_sample",
        ),
        KernelEntry(
            "prefetch",
            "kernels/prefetch.cu.j2",
            "cudatma.kernels.data_movement.prefetch:dump_configs",
            "prefetch a window into L2",
        ),
        KernelEntry(
            "rows",
            "kernels/rows.cu.j2",
            "cudatma.kernels.data_movement.rows:dump_configs",
            "gather or scatter rows by index with gather4 and scatter4",
        ),
        KernelEntry(
            "ragged_copy",
            "kernels/ragged_copy.cu.j2",
            "cudatma.kernels.data_movement.ragged_copy:dump_configs",
            "copy many 2D arrays with tensor maps edited on the GPU",
            "cudatma.kernels.data_movement.ragged_copy:sample",
        ),
        KernelEntry(
            "permute_columns",
            "kernels/permute_columns.cu.j2",
            "cudatma.kernels.marlin.permute_columns:dump_configs",
            "copy 16-bit rows to aligned rows with permuted columns",
            "cudatma.kernels.marlin.permute_columns:sample",
        ),
        KernelEntry(
            "dequantize",
            "kernels/dequantize.cu.j2",
            "cudatma.kernels.marlin.dequantize:dump_configs",
            "convert a packed int4 weight to a dense matrix",
            "cudatma.kernels.marlin.dequantize:sample",
        ),
        KernelEntry(
            "experts_route",
            "kernels/experts_route.cu.j2",
            "cudatma.kernels.experts.choose:route_configs",
            "sort (token, expert) pairs by expert",
            "cudatma.kernels.experts.sample:route_sample",
        ),
        *(
            KernelEntry(
                f"experts_{version}_{product}",
                f"kernels/experts_{version}.cu.j2",
                "cudatma.kernels.experts.choose:dump_configs",
                f"{preset.summary}; {what}",
                "cudatma.kernels.experts.sample:sample",
                f"{version}_{product}",
            )
            for version, preset in EXPERTS.items()
            for product, what in (("up", "gated activation"), ("down", "second product"))
        ),
        KernelEntry(
            "experts_sum",
            "kernels/experts_sum.cu.j2",
            "cudatma.kernels.experts.choose:sum_configs",
            "add up the weighted results of each token's experts",
            "cudatma.kernels.experts.sample:sum_sample",
        ),
        KernelEntry(
            "all_reduce",
            "kernels/all_reduce.cu.j2",
            "cudatma.kernels.all_reduce.config:dump_configs",
            "sum the messages of all GPUs with a one-shot all-reduce",
            "cudatma.kernels.all_reduce.config:sample",
        ),
    )
}

#: References to the families whose configurations are chosen, keyed by name.
FAMILIES = {
    "marlin": "cudatma.kernels.marlin.choose:MARLIN",
    "gemm": "cudatma.kernels.gemm.choose:GEMM",
    "attention": "cudatma.kernels.attention.choose:ATTENTION",
    "experts": "cudatma.kernels.experts.choose:EXPERTS",
}


def family(name: str) -> Family[Any, Any]:
    """Return the family with this name, which must be a key of FAMILIES."""
    kernel_family: Family[Any, Any] = resolve_name(FAMILIES[name])
    return kernel_family


def entry_of(config: Any) -> KernelEntry:
    """Return the entry with the longest name that begins the config's entry."""
    entries = (entry for entry in REGISTRY.values() if config.entry.startswith(entry.name))
    return max(entries, key=lambda entry: len(entry.name))


def family_entries(family_name: str) -> list[KernelEntry]:
    """Return the entries of a family's kernels."""
    return [entry for name, entry in REGISTRY.items() if name.startswith(f"{family_name}_")]


def kernel(name: str) -> KernelEntry:
    """Return the entry of a kernel. Raises ArgumentError for an unknown name."""
    if name not in REGISTRY:
        raise ArgumentError(
            "kernel", name, ", ".join(REGISTRY), "run `cudatma dump --list` for a list of kernels and configs"
        )
    return REGISTRY[name]
