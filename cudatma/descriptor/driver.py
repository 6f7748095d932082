"""Wrappers for the driver's tensor map functions.

The functions are cuTensorMapEncodeTiled, cuTensorMapEncodeIm2col, cuTensorMapEncodeIm2colWide and
cuTensorMapReplaceAddress. No other module of the descriptor package calls the driver. This module imports cuda.bindings
when one of its functions is first called. Source: CUDA driver API, Tensor Map Object Management.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from cudatma.descriptor.spec import AnySpec, Im2colSpec, TiledSpec
from cudatma.errors import DriverError, check, no_driver


def encode(spec: AnySpec, device: int | None = None) -> bytes:
    """Return the 128 bytes that the driver encodes for a spec.

    The call uses the primary context of ``device``, or the current context if ``device`` is None. Raises DriverError if
    the driver fails, or if cuda.bindings or the driver does not provide the function.
    """
    driver = _driver()
    with _context(driver, device):
        if isinstance(spec, TiledSpec):
            opaque = _call(driver, "cuTensorMapEncodeTiled", spec, (_u32s(driver, spec.box),))
        elif isinstance(spec, Im2colSpec):
            corners = list(spec.lower_corner), list(spec.upper_corner)
            opaque = _call(
                driver, "cuTensorMapEncodeIm2col", spec, (*corners, spec.channels_per_pixel, spec.pixels_per_column)
            )
        else:
            corners_w = spec.lower_corner_w, spec.upper_corner_w
            opaque = _call(
                driver,
                "cuTensorMapEncodeIm2colWide",
                spec,
                (*corners_w, spec.channels_per_pixel, spec.pixels_per_column),
                mode="CUtensorMapIm2ColWideMode",
            )
    return b"".join(int(word).to_bytes(8, "little") for word in opaque.opaque)


def _call(driver: Any, name: str, spec: AnySpec, extents: tuple[Any, ...], mode: str | None = None) -> Any:
    """Call a cuTensorMapEncode function.

    The argument lists of the three functions differ only between the strides and the element strides, except that the
    wide function also takes a mode.
    """
    function: Callable[..., Any] | None = getattr(driver, name, None)
    if function is None:
        raise DriverError(
            name, None, "the installed cuda.bindings lacks this function; install cuda-python 13 or later"
        )
    # A map of rank 1 has no strides, but the driver rejects a null pointer. It ignores the value of this stride.
    strides = [driver.cuuint64_t(stride) for stride in spec.strides_bytes or (16,)]
    wide = () if mode is None else (getattr(driver, mode)(int(spec.mode)),)  # type: ignore[union-attr]
    result = function(
        driver.CUtensorMapDataType(spec.dtype.driver_value),
        spec.rank,
        spec.address,
        [driver.cuuint64_t(dim) for dim in spec.dims],
        strides,
        *extents,
        _u32s(driver, spec.element_strides),
        driver.CUtensorMapInterleave(int(spec.interleave)),
        *wide,
        driver.CUtensorMapSwizzle(int(spec.swizzle)),
        driver.CUtensorMapL2promotion(int(spec.l2_promotion)),
        driver.CUtensorMapFloatOOBfill(int(spec.oob_fill)),
    )
    return check(result, name)


def _u32s(driver: Any, values: Sequence[int]) -> list[Any]:
    return [driver.cuuint32_t(value) for value in values]


def _driver() -> Any:
    """Initialize CUDA and return the driver module of cuda.bindings. Raises DriverError if there is no driver."""
    try:
        from cuda.bindings import driver

        check(driver.cuInit(0), "cuInit")
    except (ImportError, RuntimeError) as error:
        if isinstance(error, DriverError):
            raise
        no_driver("cuInit", error)
    return driver


@lru_cache(maxsize=1)
def has_driver() -> bool:
    """Return whether a CUDA driver and at least one device are available."""
    try:
        return int(check(_driver().cuDeviceGetCount(), "cuDeviceGetCount")) > 0
    except DriverError:
        return False


@contextmanager
def _context(driver: Any, device: int | None) -> Iterator[None]:
    """Make the primary context of ``device``, if given, current within the block."""
    if device is None:
        yield
        return
    handle = check(driver.cuDeviceGet(device), "cuDeviceGet")
    context = check(driver.cuDevicePrimaryCtxRetain(handle), "cuDevicePrimaryCtxRetain")
    try:
        check(driver.cuCtxPushCurrent(context), "cuCtxPushCurrent")
        try:
            yield
        finally:
            check(driver.cuCtxPopCurrent(), "cuCtxPopCurrent")
    finally:
        check(driver.cuDevicePrimaryCtxRelease(handle), "cuDevicePrimaryCtxRelease")


def current_device() -> int:
    """Return the CUDA ordinal of the calling thread's current device, or 0 if the thread has no context."""
    driver = _driver()
    code, device = driver.cuCtxGetDevice()
    return int(device) if int(code) == 0 else 0


def replace_address(pointer: int, address: int) -> None:
    """Replace the global address in the tensor map at host address ``pointer``."""
    from cuda.bindings import driver

    check(driver.cuTensorMapReplaceAddress(driver.CUtensorMap(pointer), address), "cuTensorMapReplaceAddress")
