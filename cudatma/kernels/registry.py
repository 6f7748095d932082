"""Every kernel by name: its template, and the specs that stand for it in dumps, goldens and compile checks.

A kernel is added with one line below. Nothing is imported until a kernel's specs are asked for.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from cudatma.errors import ArgumentError
from cudatma.target import Target, get_target


@runtime_checkable
class KernelSpec(Protocol):
    """What every kernel's spec has. A spec is a frozen dataclass; ``entry`` names its ``extern "C"`` function.

    A spec may also offer, and reports show:
    ``threads`` (int: threads of one block), ``smem_bytes`` (int: dynamic shared memory of one block),
    ``smem_layout()`` -> list of (name, offset_bytes, size_bytes): what stands where in dynamic shared memory,
    ``stage_layout()`` -> list of (what, size_bytes): what one pipeline stage holds,
    ``check_target(target)``: raises where the target cannot run it.
    """

    @property
    def entry(self) -> str: ...


@dataclass(frozen=True, slots=True)
class KernelEntry:
    """One kernel. ``template``: path below ptx_templates/. ``source``: ``"module:function"``, a function that gives the
    representative specs for a Target, none where the target cannot run the kernel."""

    name: str
    template: str
    source: str
    summary: str

    def specs(self, target: str | Target) -> list[KernelSpec]:
        """The representative specs for a target, in a fixed order. TargetError for an unknown name."""
        module, _, function = self.source.partition(":")
        found: Any = getattr(importlib.import_module(module), function)
        return list(found(get_target(target)))


REGISTRY: dict[str, KernelEntry] = {
    entry.name: entry
    for entry in (
        KernelEntry(
            "marlin",
            "kernels/marlin_portable.cu.j2",
            "cudatma.kernels.marlin.config:dump_specs",
            "W4A16 GEMM, mma.sync, fed by TMA or cp.async",
        ),
        KernelEntry(
            "tile_copy", "kernels/tile_copy.cu.j2", "cudatma.kernels.tile_copy:dump_specs", "pipelined 2D copy"
        ),
    )
}


def kernel(name: str) -> KernelEntry:
    """The entry of a kernel; ArgumentError that lists the known ones."""
    if name not in REGISTRY:
        raise ArgumentError("kernel", name, ", ".join(REGISTRY), "`cudatma dump --list` shows them with their specs")
    return REGISTRY[name]
