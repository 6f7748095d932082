"""128 bytes, or a spec, out of a Python object: a TensorMap, bytes, an array on the host or on a GPU, a pointer.

Memory of a GPU is copied to the host once, after the GPU's work is done. Nothing is imported that the object
does not bring along.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Sequence
from typing import Any

from cudatma.descriptor.codec import DESCRIPTOR_BYTES
from cudatma.descriptor.encode import TensorMap
from cudatma.descriptor.spec import AnySpec, Im2colSpec, Im2colWideSpec, TiledSpec
from cudatma.errors import ArgumentError, ArgumentTypeError, DescriptorError, check
from cudatma.inspection.reading import parse_content

_ACCEPTED = "a TensorMap, a spec, 128 bytes, an array of 128 bytes, text as `cudatma inspect` reads it, or a pointer"


def content_of(source: object, device: int | None = None) -> bytes | AnySpec:
    """What an object says of a tensor map: its 128 bytes, or the spec itself where the object is one.

    source: TensorMap, TiledSpec, Im2colSpec, Im2colWideSpec; bytes, bytearray, memoryview or a ctypes object; a CuPy,
    torch or NumPy array of 128 bytes that holds the map; cuda.bindings' CUtensorMap; text in any form of reading.py; or
    a pointer (int) with ``device``, the CUDA ordinal of the memory. Raises ArgumentTypeError, ArgumentError,
    DescriptorError, DriverError.
    """
    if isinstance(source, bool) or source is None:
        raise ArgumentTypeError("source", repr(source), _ACCEPTED)
    if isinstance(source, TensorMap):
        return bytes(source)
    if isinstance(source, TiledSpec | Im2colSpec | Im2colWideSpec):
        return source
    if isinstance(source, int):
        return _at_pointer(source, device)
    if device is not None:
        raise ArgumentError("device", device, "None unless the source is a pointer", "an object knows its own device")
    if isinstance(source, str):
        return parse_content(source.encode("utf-8", "surrogatepass"))
    words = getattr(source, "opaque", None)
    if isinstance(words, Sequence):  # cuda.bindings' CUtensorMap: sixteen words
        return b"".join(int(word).to_bytes(8, "little") for word in words)
    if hasattr(source, "__array_interface__") or not _has_buffer(source):
        return _of_array(source)
    data = memoryview(source).tobytes()  # type: ignore[arg-type]
    # Sizes other than the map's may still be text in bytes.
    return data if len(data) == DESCRIPTOR_BYTES else parse_content(data)


def load_object(name: str) -> object:
    """The object that ``module:attribute`` names; the module is imported: name only code that you trust.

    Raises ArgumentError where the name has no such form, or there is no such module or attribute.
    """
    module, separator, attribute = name.partition(":")
    if not separator or not all(part.isidentifier() for part in (*module.split("."), *attribute.split("."))):
        raise ArgumentError("--object", ascii(name), "MODULE:NAME, as in my_kernels.gemm:weight_map")
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:  # the module may raise anything when it is imported
        detail = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ArgumentError(
            "--object", ascii(name), "a module that can be imported and a name in it", detail
        ) from error
    return found


def _has_buffer(source: object) -> bool:
    try:
        memoryview(source)  # type: ignore[arg-type]
    except (TypeError, BufferError):
        return False
    return True


def _of_array(source: object) -> bytes:
    """The bytes of an array that holds a tensor map."""
    from cudatma.arrays import describe

    try:
        info = describe(source, "source")
    except ArgumentTypeError as error:
        raise ArgumentTypeError("source", type(source).__name__, _ACCEPTED, error.remedy) from error
    size = info.size_elems * info.dtype.itemsize
    if size != DESCRIPTOR_BYTES or not info.is_contiguous:
        raise DescriptorError(
            "source",
            f"an array of {size} bytes",
            f"a contiguous one of {DESCRIPTOR_BYTES}, which holds a tensor map",
            "to describe an array itself, make TensorMap.from_array(array, box) and inspect that",
        )
    if info.device is None:
        return ctypes.string_at(info.pointer, DESCRIPTOR_BYTES)
    return _at_pointer(info.pointer, info.device)


def _at_pointer(pointer: int, device: int | None) -> bytes:
    """128 bytes of a GPU's memory. [CUDA driver API, cuMemcpyDtoH]"""
    if device is None:
        raise ArgumentError("device", None, "the CUDA ordinal of the memory that the pointer is in")
    if isinstance(device, bool) or not isinstance(device, int) or device < 0:
        raise ArgumentError("device", device, "a CUDA ordinal, 0 and up")
    if not 0 < pointer < 1 << 64:
        raise ArgumentError("source", hex(pointer), "a device address")
    from cudatma import context

    raw = ctypes.create_string_buffer(DESCRIPTOR_BYTES)
    with context.using(device) as driver:
        check(driver.cuCtxSynchronize(), "cuCtxSynchronize")
        check(driver.cuMemcpyDtoH(ctypes.addressof(raw), pointer, DESCRIPTOR_BYTES), "cuMemcpyDtoH")
    return raw.raw
