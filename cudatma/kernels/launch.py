"""One launch of a family's kernel, with its arguments: the same for a GPU and for the emulator."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from cudatma import context
from cudatma.arrays import ArrayInfo
from cudatma.build.kernel import load_kernel, wants_debug
from cudatma.descriptor import TensorMap
from cudatma.kernels.host import host_bytes
from cudatma.runtime.launch import Kernel, LaunchPlan
from cudatma.runtime.loading import refuse_capture
from cudatma.target import Target

if TYPE_CHECKING:
    from cudatma.emulator import Report


@dataclass(frozen=True, slots=True)
class Launch:
    """template, spec: of the kernel; the spec has ``entry``, ``threads`` and ``smem_bytes``.

    grid: CTAs. args: in the kernel's order: numbers, bytes, tensor maps, addresses, and ArrayInfo, whose ``pointer`` is
    passed. touched: arrays that the kernel reaches. cluster: CTAs of a cluster, 1 for none. shared_bytes: dynamic
    shared memory of a CTA where it is to have more than ``spec.smem_bytes``. programmatic: a programmatic dependent of
    the launch before it.
    """

    template: str
    spec: Any
    grid: int | tuple[int, ...]
    args: tuple[Any, ...]
    touched: tuple[ArrayInfo, ...]
    cluster: int = 1
    shared_bytes: int = 0
    programmatic: bool = False

    @property
    def moving(self) -> tuple[int, ...]:
        """Indices of the arguments that are tensor maps or arrays."""
        return tuple(index for index, value in enumerate(self.args) if isinstance(value, ArrayInfo | TensorMap))

    def kernel(self, target: Target) -> Kernel:
        """Compiled, or found in the cache."""
        return _kernel(self.template, self.spec, target, wants_debug(None))

    def loaded(self, target: Target, device: int, stream: int) -> Kernel:
        """The kernel, which plan() loads on a device. LaunchError if it is not there yet and the stream, by its handle,
        is capturing a graph."""
        kernel = self.kernel(target)
        if not kernel.is_loaded(device):
            with context.using(device) as driver:
                refuse_capture(driver, stream, kernel.entry, device)
        return kernel

    def plan(self, kernel: Kernel, device: int) -> LaunchPlan:
        """Checked and marshalled for a device, with ``kernel`` loaded there."""
        return kernel.plan(
            self.grid, self.spec.threads, self.values, programmatic=self.programmatic, device=device, **self._shape()
        )

    def emulate(self, target: Target, *, kernel: Kernel | None = None, **options: Any) -> Report:
        """Run it on the emulator. kernel: None compiles it. options: of ``EmulatedModule.launch``. A programmatic
        dependent runs as if the kernel before it wrote each of its arrays, unless the options name them."""
        arrays = tuple(host_bytes(info) for info in self.touched if info.size_elems)
        chosen = self.kernel(target) if kernel is None else kernel
        given: dict[str, Any] = {"arrays": arrays, "target": target} | self._shape()
        if self.programmatic:
            given["produced_by_previous"] = arrays
        given |= options
        return chosen.emulate(self.grid, self.spec.threads, self.values, **given)

    @property
    def values(self) -> list[Any]:
        """The arguments, arrays as their addresses."""
        return [value.pointer if isinstance(value, ArrayInfo) else value for value in self.args]

    def _shape(self) -> dict[str, Any]:
        shared = max(self.spec.smem_bytes, self.shared_bytes)
        return {"cluster": self.cluster if self.cluster > 1 else None, "shared_bytes": shared}


@lru_cache(maxsize=256)
def _kernel(template: str, spec: Any, target: Target, debug: bool) -> Kernel:
    """load_kernel() without the digests of all that a kernel depends on, which cost more than a launch."""
    return load_kernel(template, spec, target, debug=debug)
