"""Streams of CuPy, torch and other libraries by their handles: the current stream of a library, and work on another."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from typing import Any

from cudatma.errors import ArgumentError, ArgumentTypeError, DriverError

_HANDLES = 1 << 64


def current_stream(kind: str, device: int) -> int:
    """Handle of the stream that the array's library works on now: torch's for "torch", else CuPy's (0 without CuPy)."""
    if kind == "torch":
        try:
            # What torch's own code generator calls; a Stream object would cost ten times as much.
            return sys.modules["torch"]._C._cuda_getCurrentRawStream(device)  # type: ignore[no-any-return]
        except AttributeError:
            return int(sys.modules["torch"].cuda.current_stream(device).cuda_stream)
    cupy = sys.modules.get("cupy")
    if cupy is None:
        return 0
    try:
        return int(cupy.cuda.get_current_stream(device).ptr)
    except RuntimeError as error:  # CuPy asks the runtime, which needs a driver and a GPU
        raise DriverError("cupy.cuda.get_current_stream", getattr(error, "status", None), str(error)) from error


@dataclass(frozen=True, slots=True)
class _Foreign:
    """A stream by its handle, as the CUDA stream protocol wants it."""

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


def _cupy_stream(library: Any, stream: int, device: int) -> Any:
    """CuPy's stream of a handle on the current device, which owns nothing. library: ``cupy.cuda``."""
    made = getattr(getattr(library, "Stream", None), "from_external", None)
    return made(_Foreign(stream)) if made else library.ExternalStream(stream, device)  # CuPy 13 has only the latter


def working_on(kind: str, device: int | None, stream: int | None) -> contextlib.AbstractContextManager[Any]:
    """A context in which torch (kind "torch") or CuPy works on a stream, by its handle. None, or the stream that it
    works on anyway: nothing is entered."""
    if stream is None or device is None or stream == current_stream(kind, device):
        return contextlib.nullcontext()
    library: Any = sys.modules[kind].cuda
    if kind != "torch":
        return _cupy_stream(library, stream, device)  # type: ignore[no-any-return]
    # torch takes an external stream of handle 0 for a new one.
    known = library.ExternalStream(stream, device=device) if stream else library.default_stream(device)
    return library.stream(known)  # type: ignore[no-any-return]


def stream_handle(stream: object, kind: str, device: int) -> int:
    """Handle of an explicit stream: an int, a CuPy or torch stream, cuda.bindings' CUstream, anything with
    ``__cuda_stream__``. None is current_stream(kind, device). Raises ArgumentTypeError for anything else, ArgumentError
    for a number that is no handle."""
    if stream is None:
        return current_stream(kind, device)
    name = _handle_names.get(type(stream))
    if name is not None:
        handle: int = getattr(stream, name)
    else:
        handle = stream if isinstance(stream, int) and not isinstance(stream, bool) else _handle_of(stream)
    if not 0 <= handle < _HANDLES:
        raise ArgumentError("stream", handle, "a handle, 0 and up in 64 bits")
    return handle


#: CuPy's classes of streams and torch's, once they have been seen, and where their handle is.
_handle_names: dict[type, str] = {}


def _handle_of(stream: object) -> int:
    """What a stream object says its handle is."""
    for name in ("cuda_stream", "ptr"):
        handle = getattr(stream, name, None)
        if isinstance(handle, int):
            if type(stream).__module__.split(".")[0] in ("cupy", "torch"):
                _handle_names[type(stream)] = name
            return handle
    allowed = "None, an int handle, a CuPy, torch or cuda.core stream"
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        # A method by the protocol; early producers made it an attribute.
        try:
            return int((protocol() if callable(protocol) else protocol)[1])
        except (TypeError, ValueError, LookupError) as error:
            raise ArgumentTypeError("stream", f"a broken __cuda_stream__ ({error})", allowed) from error
    if type(stream).__module__.startswith("cuda.bindings") and hasattr(stream, "__int__"):
        return int(stream)
    raise ArgumentTypeError("stream", type(stream).__name__, allowed)
