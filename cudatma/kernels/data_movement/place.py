"""Where an operation runs, and what its arrays must be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from cudatma import context
from cudatma.arrays import ArrayInfo, describe, overlaps, place_name
from cudatma.backend import backend_for, device_remedy
from cudatma.build.kernel import default_target
from cudatma.descriptor import TensorMap
from cudatma.errors import ArgumentError, ArgumentTypeError
from cudatma.kernels.data_movement.ring import BLOCKS_PER_SM
from cudatma.target import Target, detect

#: CTAs of a launch on the emulator: enough to divide the work, few enough for rings to wrap.
_EMULATED_BLOCKS = 4
BACKENDS = ("cuda", "emulator", "reference")


@dataclass(frozen=True, slots=True)
class Place:
    """backend: "cuda", "emulator" or "reference". device: CUDA ordinal, None on the host. target: what kernels are
    compiled for. ctas: most CTAs of a persistent kernel's launch."""

    backend: str
    device: int | None
    target: Target
    ctas: int


def place_of(function: str, backend: str | None, first: ArrayInfo, *others: tuple[str, ArrayInfo]) -> Place:
    """Where the arrays lie and what runs there. ``first``'s argument is called "src" in errors.

    Raises ArgumentError for arrays of several places or of another place than the backend's; TargetError, DriverError.
    """
    chosen = backend_for(function, backend)
    for name, info in others:
        if info.device != first.device:
            raise ArgumentError(name, place_name(info.device), f"{place_name(first.device)}, where src lies")
    if (first.device is None) != (chosen != "cuda"):
        allowed = "the host with backend 'emulator' or 'reference', a CUDA device with 'cuda'"
        raise ArgumentError(
            "src.device", place_name(first.device), allowed, device_remedy("cupy.asarray moves it", first.device)
        )
    if first.device is None:
        return Place(chosen, None, default_target(), _EMULATED_BLOCKS)
    return _on_gpu(first.device)


@lru_cache(maxsize=64)
def _on_gpu(device: int) -> Place:
    return Place("cuda", device, detect(device), BLOCKS_PER_SM * sm_count(device))


def sm_count(device: int) -> int:
    """The SMs of a GPU."""
    return context.device(device).sm_count


def described(array: object, field: str) -> ArrayInfo:
    """An array whose elements are plain bytes. Raises ArgumentTypeError for Python objects."""
    info = describe(array, field)
    if info.dtype.hasobject:
        raise ArgumentTypeError(f"{field}.dtype", str(info.dtype), "a dtype of plain bytes")
    return info


def check_out(out: ArrayInfo, source: ArrayInfo, shape: Sequence[int], field: str = "out") -> None:
    """ArgumentError unless ``out`` can take a result of this shape and the source's dtype: writable, no element twice,
    no byte of the source."""
    if out.shape != tuple(shape) or out.dtype != source.dtype:
        raise ArgumentError(field, f"{out.shape} of {out.dtype}", f"{tuple(shape)} of {source.dtype}")
    check_written(out, source, field)


def check_written(out: ArrayInfo, source: ArrayInfo, field: str) -> None:
    """ArgumentError for an array that may not be written to, has elements twice, or shares bytes with the source."""
    if out.readonly:
        raise ArgumentError(field, "a read-only array", "a writable array")
    if out.size_elems and any(s == 0 and n > 1 for n, s in zip(out.shape, out.strides_bytes, strict=True)):
        raise ArgumentError(field, f"strides {out.strides_bytes}", "an array whose elements lie apart")
    if overlaps(source, out):
        raise ArgumentError(field, "memory that overlaps the source", "memory of its own")


def tensor_map(info: ArrayInfo, box: Sequence[int], place: Place, **options: Any) -> TensorMap:
    """A tiled map over an array in its own order of axes, innermost last; options of TensorMap.from_array()."""
    axes = tuple(reversed(range(len(info.shape))))
    return TensorMap.from_array(info, box, axes=axes, target=place.target, **options)
