"""TensorMap, a kernel argument of 128 bytes that the driver or the codec encodes from a spec.

A kernel takes a TensorMap as a ``const __grid_constant__`` parameter. A launch copies the map's bytes.
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
from cudatma.errors import ArgumentError, ArgumentTypeError, DescriptorError, counted
from cudatma.layout import Interleave, Swizzle
from cudatma.target import Target, detect, get_target

ENCODERS = ("auto", "driver", "codec")
#: Alignment of the map in bytes. CUDA 13 requires 128, CUDA 12 requires 64.
_ALIGNMENT = 128


class TensorMap:
    """A tensor map with its spec and the array that it describes.

    Create a map with ``from_array``, ``from_address``, ``tiled``, ``im2col`` or ``im2col_wide``. The map keeps the
    array alive. ``replace_address`` modifies the map, so do not call it while another thread launches a kernel with the
    map.

    Parameters
    ----------
    spec : TiledSpec, Im2colSpec or Im2colWideSpec
        Specification of the map.
    device : int, optional
        CUDA ordinal of the device that holds the memory. Default: the current device if the driver encodes the map,
        otherwise None.
    owner : object, optional
        Object that owns the memory. The map keeps this object alive.
    target : Target or str, optional
        Architecture that must support the map. Default: the device's architecture if the driver encodes the map,
        otherwise none.
    encoder : {"auto", "driver", "codec"}, default: "auto"
        Encoder to use. "auto" selects the driver if one is available, otherwise the codec.
    on_host : bool, default: False
        Whether the memory is on the host. The driver cannot encode maps over host memory.

    Attributes
    ----------
    data : ctypes array
        The 128 bytes, aligned to 128 bytes.
    device, owner, target : see Parameters
        Device ordinal, owner of the memory, and architecture for which the map was validated. Each may be None.
    encoder : str
        Encoder of the bytes, "driver" or "codec".

    Examples
    --------
    >>> x = np.zeros((512, 1024), np.float16)
    >>> tensor_map = cudatma.TensorMap.from_array(x, box=(128, 64), swizzle="128B", target="sm_90a")
    >>> tensor_map.expected_bytes, tensor_map.smem_alignment_bytes, len(bytes(tensor_map))
    (16384, 1024, 128)
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
        """Create a tiled map over an array.

        Parameters
        ----------
        array : array
            CuPy, torch or NumPy array (NumPy only with the codec), or an object that supports
            ``__cuda_array_interface__`` or DLPack.
        box : sequence of int
            Extent of the box along each axis in elements, in NumPy order.
        dtype : TmaType, str or dtype, optional
            TMA type of the same size as the array's type, such as ``"tfloat32"`` for fp32. Default: the array's type.
        axes : sequence of int, optional
            Axes of the array, from innermost to outermost. Default: the array's C or Fortran order.
        element_strides : sequence of int, optional
            Traversal stride of each axis in elements. Default: 1 along each axis.
        interleave, swizzle, l2_promotion, oob_fill : enumeration member or str, optional
            Modes of the map. See ``TiledSpec``.
        target : Target or str, optional
            Architecture that must support the map. Default: the device's architecture if the driver encodes the map,
            otherwise none.
        encoder : {"auto", "driver", "codec"}, default: "auto"
            Encoder to use. "auto" selects the driver if one is available and the array is on a device, otherwise the
            codec.

        Returns
        -------
        TensorMap
            Map over the array.

        Raises
        ------
        DescriptorError
            If a field is invalid. The error numbers axes in the order of the array.
        ArgumentTypeError, TargetError, DriverError
            If ``array`` is not an array, if the target does not support the map, or if the driver fails.

        Examples
        --------
        >>> tensor_map = cudatma.TensorMap.from_array(np.zeros((64, 256), np.float32), box=(16, 32))
        >>> tensor_map.spec.dims, tensor_map.spec.box
        ((256, 64), (32, 16))
        """
        from cudatma.arrays import describe

        info = describe(array)
        kind = tma_type(info.dtype) if dtype is None else tma_type(dtype)
        if kind.packed or kind.element_bytes != info.dtype.itemsize:
            raise DescriptorError(
                "dtype",
                kind.name,
                f"a type of {counted(info.dtype.itemsize, 'byte')} (the item size of the array)",
                "pass a view of the array with a matching item size",
            )
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
            tensor_map = cls(spec, device=info.device, owner=info.owner, target=target, encoder=encoder, on_host=host)
        tensor_map._axes = order
        return tensor_map

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
        """Create a tiled map over device memory at an address.

        Parameters
        ----------
        address : int
            Device address of the first element.
        shape : sequence of int
            Size of each axis in elements, outermost first.
        box : sequence of int
            Extent of the box along each axis in elements.
        dtype : TmaType, str or dtype
            Element type.
        strides_bytes : sequence of int, optional
            Pitch of each axis in bytes. Default: the pitches of a C-contiguous array.
        axes : sequence of int, optional
            Axes of the array, from innermost to outermost. See ``from_array``.
        device, owner, target, encoder : optional
            See ``TensorMap``.
        **options
            Other fields of TiledSpec. ``element_strides`` is in NumPy order.

        Returns
        -------
        TensorMap
            Map over the memory.
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
        """Create a map from a TiledSpec.

        Parameters
        ----------
        spec : TiledSpec
            Specification of the map.
        device, owner, target, encoder : optional
            See ``TensorMap``.

        Returns
        -------
        TensorMap
            Map with this spec.

        Raises
        ------
        DescriptorError, TargetError, DriverError
            If a field is invalid, if the target does not support the map, or if the driver fails.
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
        """Create a map from an Im2colSpec.

        Parameters
        ----------
        spec : Im2colSpec
            Specification of the map.
        device, owner, target, encoder : optional
            See ``TensorMap``.

        Returns
        -------
        TensorMap
            Map with this spec.
        """
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
        """Create a map from an Im2colWideSpec, which requires sm_100 or later.

        Parameters
        ----------
        spec : Im2colWideSpec
            Specification of the map.
        device, owner, target : optional
            See ``TensorMap``.

        Returns
        -------
        TensorMap
            Map with this spec.

        Raises
        ------
        DriverError
            If no driver with cuTensorMapEncodeIm2colWide is available. The codec does not support these maps.
        """
        _expect(spec, Im2colWideSpec)
        return cls(spec, device=device, owner=owner, target=target, encoder="driver")

    @property
    def spec(self) -> AnySpec:
        """Specification of the map with the current address."""
        if self._spec.address != self._address:
            self._spec = replace(self._spec, address=self._address)
        return self._spec

    @property
    def address(self) -> int:
        """Global address of the tensor in bytes."""
        return self._address

    @property
    def expected_bytes(self) -> int:
        """Number of bytes by which one load advances the mbarrier's transaction count."""
        return self._spec.expected_bytes

    @property
    def footprint_bytes(self) -> int:
        """Number of bytes of shared memory that a box occupies, including padding."""
        return self._spec.footprint_bytes

    @property
    def smem_alignment_bytes(self) -> int:
        """Required alignment of a box in shared memory, in bytes."""
        return self._spec.smem_alignment_bytes

    @property
    def pointer(self) -> int:
        """Host address of the map's 128 bytes."""
        return ctypes.addressof(self.data)

    def __bytes__(self) -> bytes:
        return bytes(self.data)

    def __repr__(self) -> str:
        spec, axes = self._spec, self._axes or range(self._spec.rank)[::-1]
        extents = {"shape": spec.dims} | ({"box": spec.box} if isinstance(spec, TiledSpec) else {})
        in_array_order = {name: tuple(x for _, x in sorted(zip(axes, extents[name], strict=True))) for name in extents}
        shown = ", ".join(f"{name}={extent}" for name, extent in in_array_order.items())
        return f"{type(self).__name__}({spec.dtype.name}, {shown}, swizzle={spec.swizzle.label!r})"

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook displays."""
        from cudatma import pages

        spec = self._spec
        rows: list[tuple[str, object]] = [("map", repr(self)), ("address", hex(self.address))]
        rows += [("bytes of a box", spec.expected_bytes), ("alignment in shared memory", spec.smem_alignment_bytes)]
        rows += [("encoded by", self.encoder + (f" for {self.target.name}" if self.target else ""))]
        return pages.fragment(pages.table(rows))

    def compare(self) -> Comparison:
        """Compare the driver's 128 bytes with the codec's, bit by bit.

        If the driver did not encode this map, this method first encodes its spec with the driver. For an im2col wide
        map (sm_100 and later), only the fields that it shares with other maps are compared, and the result lists all
        other bits that the driver set.

        Returns
        -------
        Comparison
            Fields that differ.

        Raises
        ------
        DriverError
            If there is no driver, or if the driver rejects the map.
        """
        encoded = bytes(self) if self.encoder == "driver" else driver.encode(self.spec, self.device)
        if isinstance(self.spec, Im2colWideSpec):
            note = "im2col wide: the positions of the shared fields are assumed; those of all other fields are unknown"
            return compare(encoded, codec.encode_shared(self.spec), ("driver", "codec, shared fields"), note)
        return compare(encoded, codec.encode(self.spec), ("driver", "codec"))

    def replace_address(self, array: object) -> None:
        """Replace the map's global address with that of another array of the same shape.

        The map keeps the new array alive. If ``array`` is an address, the caller must keep the memory alive.

        Parameters
        ----------
        array : array or int
            Device address, or an array with the original element size, shape, strides and device.

        Raises
        ------
        ArgumentError, DescriptorError, DriverError
            If the array does not match the map, if the address is not aligned, or if the driver fails.

        References
        ----------
        CUDA driver API, cuTensorMapReplaceAddress.
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
        """Return the address and owner of an array. Raises ArgumentError unless the array matches the map."""
        from cudatma.arrays import describe

        info, spec = describe(array), self._spec
        if info.device != self.device:
            raise ArgumentError(
                "array", f"an array {_place(info.device)}", _place(self.device), "create one map per device"
            )
        if info.dtype.itemsize != spec.dtype.element_bytes or spec.dtype.packed:
            raise ArgumentError(
                "array", str(info.dtype), f"an array with a dtype of the same size as {spec.dtype.name}"
            )
        order = array_axes(info.shape, info.strides_bytes, spec.dtype, self._axes if self._fits(info.shape) else None)
        dims = tuple(info.shape[axis] for axis in order)
        strides = tma_strides(info.shape, info.strides_bytes, spec.dtype, order)
        if (dims, strides) != (spec.dims, spec.strides_bytes):
            shown, allowed = (
                f"an array with dims {d} and strides {s}" for d, s in ((dims, strides), (spec.dims, spec.strides_bytes))
            )
            raise ArgumentError("array", shown, f"{allowed} (innermost first)", "create a new TensorMap")
        return info.pointer, info.owner

    def _fits(self, shape: Sequence[int]) -> bool:
        return self._axes is not None and len(shape) == len(self._axes)


@contextmanager
def _counted_as(order: Sequence[int]) -> Iterator[None]:
    """Convert the indices in DescriptorErrors from dimensions of the map to axes of the array."""
    try:
        yield
    except DescriptorError as error:
        raise error.renamed(array_fields(order)) from None


def _place(device: int | None) -> str:
    return "in host memory" if device is None else f"on device {device}"


def _choose(encoder: str, on_host: bool) -> str:
    if encoder not in ENCODERS:
        raise ArgumentError("encoder", encoder, ", ".join(ENCODERS))
    if on_host and encoder == "driver":
        raise ArgumentError(
            "array", "host memory", "an array in device memory with encoder='driver'", "copy the array to the GPU"
        )
    if encoder == "auto":
        return "driver" if not on_host and driver.has_driver() else "codec"
    return encoder


def _dense_strides(sizes: Sequence[int], dtype: TmaType) -> tuple[int, ...]:
    if dtype.packed:
        raise DescriptorError(
            "dtype", dtype.name, "an unpacked type", "pass a TiledSpec to TensorMap.tiled(), with dims in packed values"
        )
    strides = [dtype.element_bytes]
    for size in reversed(sizes[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))


def _expect(spec: object, kind: type) -> None:
    if not isinstance(spec, kind):
        raise ArgumentTypeError("spec", type(spec).__name__, kind.__name__)
