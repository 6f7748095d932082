"""TensorMap: a spec turned into the 128 bytes that a kernel takes, by the driver or by the codec.

A kernel takes a TensorMap as ``const __grid_constant__`` parameter; its bytes are copied when the launch is recorded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from cudatma.descriptor import codec, driver, rules
from cudatma.descriptor.access import check_target
from cudatma.descriptor.bits import Comparison, compare
from cudatma.descriptor.rules import L2Promotion, OobFill
from cudatma.descriptor.spec import (
    AnySpec,
    Im2colSpec,
    Im2colWideSpec,
    TiledSpec,
    array_axes,
    array_fields,
    tma_strides,
)
from cudatma.dtypes import TmaType, tma_type
from cudatma.errors import ArgumentError, ArgumentTypeError, DescriptorError
from cudatma.layout import Interleave, Swizzle
from cudatma.target import Target, detect, get_target

ENCODERS = ("auto", "driver", "codec")
#: CUDA 12 asks for 64 bytes, CUDA 13 for 128.
_ALIGNMENT = 128


class TensorMap:
    """A tensor map: 128 bytes, the spec they were made from, and the array they point into.

    Make one with from_array(), from_address(), tiled(), im2col() or im2col_wide(). The map keeps its array alive.
    replace_address() is the only thing that changes it; do not call it while another thread launches with the map.

    data: the 128 bytes as a ctypes buffer, 128-byte aligned. device: CUDA ordinal, None for host memory and where it
    was not given. owner: what keeps the memory alive. encoder: ``"driver"`` or ``"codec"``. target: the architecture
    that the map was checked against, None if it was not.
    """

    __slots__ = ("_address", "_axes", "_spec", "_storage", "data", "device", "encoder", "owner", "target")

    def __init__(
        self,
        spec: AnySpec,
        *,
        device: int | None = None,
        owner: object = None,
        target: Target | str | None = None,
        encoder: str = "auto",
        on_host: bool = False,
    ) -> None:
        """tiled() and from_array() say what the arguments mean; on_host forbids the driver."""
        self.encoder = _choose(encoder, on_host)
        self.target = get_target(target) if target is not None else None
        if self.encoder == "driver":
            device = driver.current_device() if device is None else device
            self.target = self.target or detect(device)
        if self.target is not None:
            check_target(spec, self.target)
        self._spec, self._address, self.device, self.owner = spec, spec.address, device, owner
        self._axes: tuple[int, ...] | None = None
        self._storage = ctypes.create_string_buffer(codec.DESCRIPTOR_BYTES + _ALIGNMENT - 1)
        offset = -ctypes.addressof(self._storage) % _ALIGNMENT
        self.data = (ctypes.c_ubyte * codec.DESCRIPTOR_BYTES).from_buffer(self._storage, offset)
        raw = codec.encode(spec) if self.encoder == "codec" else driver.encode(spec, self.device)
        ctypes.memmove(self.pointer, raw, codec.DESCRIPTOR_BYTES)

    @classmethod
    def from_array(
        cls,
        array: object,
        box: Sequence[int],
        *,
        dtype: object = None,
        axes: Sequence[int] | None = None,
        element_strides: Sequence[int] | None = None,
        interleave: Interleave | str = Interleave.NONE,
        swizzle: Swizzle | str = Swizzle.NONE,
        l2_promotion: L2Promotion | str = L2Promotion.NONE,
        oob_fill: OobFill | str = OobFill.ZEROS,
        target: Target | str | None = None,
        encoder: str = "auto",
    ) -> TensorMap:
        """A tiled map over an array: CuPy, torch, ``__cuda_array_interface__``, DLPack, or NumPy (codec only).

        box, element_strides: one value for each axis of the array, in the array's order.
        dtype: another TMA type of the same width (``"tfloat32"`` for fp32); by default the array's.
        axes: the array's axes from innermost to outermost; by default C or Fortran order, whichever the array is in.
        Others: tiled(). Raises DescriptorError, which counts axes as the array does, ArgumentTypeError, TargetError,
        DriverError.
        """
        from cudatma.arrays import describe

        info = describe(array)
        kind = tma_type(info.dtype) if dtype is None else tma_type(dtype)
        if kind.packed or kind.element_bytes != info.dtype.itemsize:
            raise DescriptorError("dtype", kind.name, f"a type of {info.dtype.itemsize} bytes", "view the array first")
        order = array_axes(info.shape, info.strides_bytes, kind, axes)
        spec = TiledSpec.from_strided(
            info.pointer,
            info.shape,
            strides_bytes=info.strides_bytes,
            dtype=kind,
            box=box,
            axes=order,
            element_strides=element_strides,
            interleave=interleave,
            swizzle=swizzle,
            l2_promotion=l2_promotion,
            oob_fill=oob_fill,
        )
        host = info.device is None
        with _counted_as(order):
            made = cls(spec, device=info.device, owner=info.owner, target=target, encoder=encoder, on_host=host)
        made._axes = order
        return made

    @classmethod
    def from_address(
        cls,
        address: int,
        shape: Sequence[int],
        box: Sequence[int],
        *,
        dtype: object,
        strides_bytes: Sequence[int] | None = None,
        axes: Sequence[int] | None = None,
        device: int | None = None,
        owner: object = None,
        target: Target | str | None = None,
        encoder: str = "auto",
        **options: Any,
    ) -> TensorMap:
        """A tiled map over raw device memory.

        shape, strides_bytes (bytes; C order without gaps if left out), box: in NumPy order, outermost first.
        options: the other fields of TiledSpec, element_strides in NumPy order. Others: from_array() and tiled().
        """
        kind = tma_type(dtype)
        sizes = rules.as_ints(shape, "shape")
        strides = _dense_strides(sizes, kind) if strides_bytes is None else strides_bytes
        spec = TiledSpec.from_strided(address, sizes, strides_bytes=strides, dtype=kind, box=box, axes=axes, **options)
        with _counted_as(array_axes(sizes, rules.as_ints(strides, "strides_bytes"), kind, axes)):
            return cls(spec, device=device, owner=owner, target=target, encoder=encoder)

    @classmethod
    def tiled(
        cls,
        spec: TiledSpec,
        *,
        device: int | None = None,
        owner: object = None,
        target: Target | str | None = None,
        encoder: str = "auto",
    ) -> TensorMap:
        """A map of a tiled spec.

        device: CUDA ordinal of the memory; by default the current device. owner: kept alive with the map.
        target: checked against (features, shared memory of a block); by default the device's own with the driver, and
        nothing without. encoder: ``"driver"``, ``"codec"``, or ``"auto"``: the driver where there is one.
        Raises DescriptorError, TargetError, DriverError.
        """
        _expect(spec, TiledSpec)
        return cls(spec, device=device, owner=owner, target=target, encoder=encoder)

    @classmethod
    def im2col(
        cls,
        spec: Im2colSpec,
        *,
        device: int | None = None,
        owner: object = None,
        target: Target | str | None = None,
        encoder: str = "auto",
    ) -> TensorMap:
        """A map of an im2col spec; arguments and errors as in tiled()."""
        _expect(spec, Im2colSpec)
        return cls(spec, device=device, owner=owner, target=target, encoder=encoder)

    @classmethod
    def im2col_wide(
        cls,
        spec: Im2colWideSpec,
        *,
        device: int | None = None,
        owner: object = None,
        target: Target | str | None = None,
    ) -> TensorMap:
        """A map of an im2col wide spec (sm_100 and up): the driver only, DriverError where it has no such function."""
        _expect(spec, Im2colWideSpec)
        return cls(spec, device=device, owner=owner, target=target, encoder="driver")

    @property
    def spec(self) -> AnySpec:
        """What the map was made from, with its present address."""
        if self._spec.address != self._address:
            self._spec = replace(self._spec, address=self._address)
        return self._spec

    @property
    def address(self) -> int:
        """Global address of the tensor."""
        return self._address

    @property
    def expected_bytes(self) -> int:
        """What the mbarrier counts for one load."""
        return self._spec.expected_bytes

    @property
    def footprint_bytes(self) -> int:
        """Shared memory of one box, padding included."""
        return self._spec.footprint_bytes

    @property
    def smem_alignment_bytes(self) -> int:
        """Alignment of the box in shared memory."""
        return self._spec.smem_alignment_bytes

    @property
    def pointer(self) -> int:
        """Host address of the 128 bytes."""
        return ctypes.addressof(self.data)

    def __bytes__(self) -> bytes:
        return bytes(self.data)

    def __repr__(self) -> str:
        return f"TensorMap({self.spec!r}, device={self.device}, encoder={self.encoder!r})"

    def compare(self) -> Comparison:
        """The driver's 128 bytes against the codec's, bit for bit, with the names of the fields that differ.

        A map that the driver made is compared as it is; for one of the codec the driver is asked. Of an im2col wide map
        (sm_100 and up) only the shared fields are known: all other bits that the driver set are listed as they are.
        Raises DriverError where there is no driver, or where it refuses the map.
        """
        made = bytes(self) if self.encoder == "driver" else driver.encode(self.spec, self.device)
        if isinstance(self.spec, Im2colWideSpec):
            note = "im2col wide: from documents only; its own fields and the places of the shared ones are not verified"
            return compare(made, codec.encode_shared(self.spec), ("driver", "codec, shared fields"), note)
        return compare(made, codec.encode(self.spec), ("driver", "codec"))

    def replace_address(self, array: object) -> None:
        """Point the map at other memory of the same shape. [CUDA driver API, cuTensorMapReplaceAddress]

        array: a device address (an int), or an array whose dtype width, shape, strides and device are those of the
        array that the map was made from. The map then keeps the new array alive; with an address its owner is the
        caller's business. Raises ArgumentError, DescriptorError, DriverError.
        """
        if isinstance(array, int) and not isinstance(array, bool):
            address, owner = array, None
        else:
            address, owner = self._same_shape(array)
        rules.check_address(address, self._spec.dtype, self._spec.interleave)
        if self.encoder == "codec":
            ctypes.memmove(self.pointer, address.to_bytes(8, "little"), 8)
        else:
            driver.replace_address(self.pointer, address)
        self._address, self.owner = address, owner

    def _same_shape(self, array: object) -> tuple[int, object]:
        """Address and owner of an array that fits the map; ArgumentError if it does not."""
        from cudatma.arrays import describe

        info, spec = describe(array), self._spec
        if info.device != self.device:
            raise ArgumentError("array", f"device {info.device}", f"device {self.device}", "make a map for each device")
        if info.dtype.itemsize != spec.dtype.element_bytes or spec.dtype.packed:
            raise ArgumentError("array", str(info.dtype), f"a dtype as wide as {spec.dtype.name}")
        order = array_axes(info.shape, info.strides_bytes, spec.dtype, self._axes if self._fits(info.shape) else None)
        dims = tuple(info.shape[axis] for axis in order)
        strides = tma_strides(info.shape, info.strides_bytes, spec.dtype, order)
        if (dims, strides) != (spec.dims, spec.strides_bytes):
            shown, allowed = (f"dims {d}, strides {s}" for d, s in ((dims, strides), (spec.dims, spec.strides_bytes)))
            raise ArgumentError("array", shown, f"{allowed} (innermost first)", "make a new TensorMap")
        return info.pointer, info.owner

    def _fits(self, shape: Sequence[int]) -> bool:
        return self._axes is not None and len(shape) == len(self._axes)


@contextmanager
def _counted_as(order: Sequence[int]) -> Iterator[None]:
    """DescriptorErrors about a spec count the axes of the array that it describes."""
    try:
        yield
    except DescriptorError as error:
        raise error.renamed(array_fields(order)) from None


def _choose(encoder: str, on_host: bool) -> str:
    if encoder not in ENCODERS:
        raise ArgumentError("encoder", encoder, ", ".join(ENCODERS))
    if on_host and encoder == "driver":
        raise ArgumentError("array", "host memory", "device memory with encoder 'driver'", "copy the array to the GPU")
    if encoder == "auto":
        return "driver" if not on_host and driver.has_driver() else "codec"
    return encoder


def _dense_strides(sizes: Sequence[int], dtype: TmaType) -> tuple[int, ...]:
    if dtype.packed:
        raise DescriptorError("dtype", dtype.name, "an unpacked type", "make a TiledSpec: dims there count values")
    strides = [dtype.element_bytes]
    for size in reversed(sizes[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))


def _expect(spec: object, kind: type) -> None:
    if not isinstance(spec, kind):
        raise ArgumentTypeError("spec", type(spec).__name__, kind.__name__)
