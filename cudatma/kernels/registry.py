"""Every kernel by name: its template, and the configs that stand for it in dumps, goldens and compile checks.

PRESETS lists the versions of gemm, attention and marlin_gemm; other kernels have an entry below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from cudatma.errors import ArgumentError
from cudatma.kernels.attention.config import PRESETS as ATTENTION
from cudatma.kernels.family import AnyConfig, Family, imported
from cudatma.kernels.gemm.config import PRESETS as GEMM
from cudatma.kernels.marlin.config import PRESETS as MARLIN
from cudatma.target import Target, get_target


@dataclass(frozen=True, slots=True)
class KernelEntry:
    """One kernel.

    template: path below ptx_templates/. source: ``"module:function"``, returns the representative configs
    for a Target, none if the target cannot run the kernel. emulated: the same for a function that returns a Sample, of
    a Target and of sizes that its keyword arguments name. version: the first argument of both functions, if not empty.
    """

    name: str
    template: str
    source: str
    summary: str
    emulated: str = ""
    version: str = ""

    def configs(self, target: str | Target) -> list[AnyConfig]:
        """The representative configs for a target, in a fixed order. TargetError for an unknown name."""
        return list(self._function(self.source)(get_target(target)))

    @property
    def sample(self) -> Callable[..., Any] | None:
        """``sample(target, **sizes) -> Sample``: the kernel with made-up operands; None where it has none."""
        return self._function(self.emulated) if self.emulated else None

    def _function(self, place: str) -> Callable[..., Any]:
        function: Callable[..., Any] = imported(place)
        return partial(function, self.version) if self.version else function


def _entry(
    name: str, summary: str, configs: str, emulated: str = "", version: str = "", template: str = ""
) -> KernelEntry:
    """Return an entry.

    configs, emulated: ``"module:function"`` below cudatma.kernels. template: the kernel whose template it shares.
    """
    made = f"cudatma.kernels.{emulated}" if emulated else ""
    return KernelEntry(name, f"kernels/{template or name}.cu.j2", f"cudatma.kernels.{configs}", summary, made, version)


def _versions(
    family: str,
    presets: Mapping[str, Any],
    configs: str = "choose:dump_configs",
    sample: str = "sample:sample",
) -> list[KernelEntry]:
    """Return the entries of a family's versions.

    configs, sample: ``"module:function"`` below the family, in which {} is replaced by the version.
    """
    return [
        _entry(
            f"{family}_{version}",
            preset.summary,
            f"{family}.{configs}",
            f"{family}.{sample.format(version)}",
            version,
            f"{family}_{shared}" if (shared := getattr(preset, "template", "")) else "",
        )
        for version, preset in presets.items()
    ]


_DECODE = {version: preset for version, preset in ATTENTION.items() if preset.is_decode}
REGISTRY: dict[str, KernelEntry] = {
    entry.name: entry
    for entry in (
        *_versions("marlin", MARLIN, "candidates:dump_configs", "sample:{}_sample"),
        *_versions("gemm", GEMM),
        *_versions("attention", {version: ATTENTION[version] for version in ATTENTION if version not in _DECODE}),
        *_versions("attention", _DECODE, sample="sample:decode_sample"),
        _entry(
            "tile_copy", "pipelined 2D copy", "data_movement.tile_copy:dump_configs", "data_movement.tile_copy:sample"
        ),
        _entry(
            "window_copy",
            "copy of, or reduction into, a window of 1 to 5 axes, by boxes",
            "data_movement.configs:window_configs",
            "data_movement.samples:window_sample",
        ),
        _entry(
            "run_copy",
            "copy of, or reduction into, a run of bytes, by 1D bulk copies",
            "data_movement.configs:run_configs",
            "data_movement.samples:run_sample",
        ),
        _entry("plain_copy", "copy of any window, by plain loads and stores", "data_movement.configs:plain_configs"),
        _entry(
            "transpose",
            "transpose of a batch of matrices, through swizzled shared memory",
            "data_movement.transpose:dump_configs",
            "data_movement.samples:transpose_sample",
        ),
        _entry(
            "gather_boxes",
            "boxes at given places, or tiles with a halo",
            "data_movement.gather:dump_configs",
            "data_movement.samples:gather_sample",
        ),
        _entry(
            "im2col",
            "columns of a convolution, by TMA's im2col mode",
            "data_movement.im2col:dump_configs",
            "data_movement.samples:im2col_sample",
        ),
        _entry(
            "broadcast",
            "one array to several, by multicast in clusters",
            "data_movement.broadcast:dump_configs",
            "data_movement.samples:broadcast_sample",
        ),
        _entry("prefetch", "a window brought to L2", "data_movement.prefetch:dump_configs"),
        _entry("rows", "rows by number, gather4 and scatter4", "data_movement.rows:dump_configs"),
        _entry(
            "ragged_copy",
            "copies of many 2D arrays, tensor maps edited on the GPU",
            "data_movement.ragged_copy:dump_configs",
            "data_movement.ragged_copy:sample",
        ),
        _entry(
            "permute_columns",
            "columns of 16-bit rows permuted into aligned rows",
            "marlin.permute_columns:dump_configs",
            "marlin.permute_columns:sample",
        ),
        _entry(
            "dequantize",
            "packed int4 weight to a dense matrix",
            "marlin.dequantize:dump_configs",
            "marlin.dequantize:sample",
        ),
        _entry(
            "all_reduce",
            "one-shot all-reduce over memory of other GPUs",
            "all_reduce.config:dump_configs",
            "all_reduce.config:sample",
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
        raise ArgumentError("kernel", name, ", ".join(REGISTRY), "`cudatma dump --list` shows them with their configs")
    return REGISTRY[name]
