"""Streams of CuPy, torch and other libraries: handles, the current stream, and a context that selects a stream."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from typing import Any

from cudatma.errors import ArgumentError, ArgumentTypeError, DriverError

_HANDLES = 1 << 64


def current_stream(kind: str, device: int) -> int:
    """Return the handle of the current stream in torch (kind "torch") or in CuPy (0 if CuPy is not imported)."""
    if kind == "torch":
        try:
            # torch's code generator also calls this function. Creating a Stream object takes ten times longer.
            return sys.modules["torch"]._C._cuda_getCurrentRawStream(device)  # type: ignore[no-any-return]
        except AttributeError:
            return int(sys.modules["torch"].cuda.current_stream(device).cuda_stream)
    cupy = sys.modules.get("cupy")
    if cupy is None:
        return 0
    try:
        return int(cupy.cuda.get_current_stream(device).ptr)
    except RuntimeError as error:  # CuPy calls the CUDA runtime, which needs a driver and a GPU
        raise DriverError("cupy.cuda.get_current_stream", getattr(error, "status", None), str(error)) from error


@dataclass(frozen=True, slots=True)
class _Foreign:
    """A stream handle that implements the CUDA stream protocol."""

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


def _cupy_stream(library: Any, stream: int, device: int) -> Any:
    """Return a CuPy stream that wraps a handle on the current device without owning it.

    ``library`` is ``cupy.cuda``.
    """
    from_handle = getattr(getattr(library, "Stream", None), "from_external", None)
    if from_handle is None:  # CuPy 13
        return library.ExternalStream(stream, device)
    return from_handle(_Foreign(stream))


def working_on(kind: str, device: int | None, stream: int | None) -> contextlib.AbstractContextManager[Any]:
    """Return a context that makes the stream with this handle current in torch (kind "torch") or CuPy.

    The context does nothing if the stream is None or already current.
    """
    if stream is None or device is None or stream == current_stream(kind, device):
        return contextlib.nullcontext()
    library: Any = sys.modules[kind].cuda
    if kind != "torch":
        return _cupy_stream(library, stream, device)  # type: ignore[no-any-return]
    # torch.cuda.ExternalStream(0) would create a new stream.
    known = library.ExternalStream(stream, device=device) if stream else library.default_stream(device)
    return library.stream(known)  # type: ignore[no-any-return]


def stream_handle(stream: object, kind: str, device: int) -> int:
    """Return the handle of a stream.

    ``stream`` may be an int, a CuPy or torch stream, a CUstream, an object with ``__cuda_stream__``, or None for
    current_stream(kind, device). Raises ArgumentTypeError for any other object, and ArgumentError if an int is not a
    valid handle.
    """
    if stream is None:
        return current_stream(kind, device)
    name = _handle_names.get(type(stream))
    if name is not None:
        handle: int = getattr(stream, name)
    else:
        handle = stream if isinstance(stream, int) and not isinstance(stream, bool) else _handle_of(stream)
    if not 0 <= handle < _HANDLES:
        raise ArgumentError("stream", handle, "0 to 2**64 - 1")
    return handle


#: Maps a stream class of CuPy or torch to the attribute that contains the handle. Filled on first use.
_handle_names: dict[type, str] = {}


def _handle_of(stream: object) -> int:
    for name in ("cuda_stream", "ptr"):
        handle = getattr(stream, name, None)
        if isinstance(handle, int):
            if type(stream).__module__.split(".")[0] in ("cupy", "torch"):
                _handle_names[type(stream)] = name
            return handle
    allowed = "None, an int handle, or a CuPy, torch or cuda.core stream"
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        # The protocol specifies a method, but early producers have an attribute.
        try:
            return int((protocol() if callable(protocol) else protocol)[1])
        except (TypeError, ValueError, LookupError) as error:
            raise ArgumentTypeError("stream", f"an invalid __cuda_stream__ ({error})", allowed) from error
    if type(stream).__module__.startswith("cuda.bindings") and hasattr(stream, "__int__"):
        return int(stream)
    raise ArgumentTypeError("stream", type(stream).__name__, allowed)
