"""Select the backend that computes a result: the GPU, the emulator or the NumPy reference."""

from __future__ import annotations

import os
import sys
import warnings
from functools import lru_cache

from cudatma.errors import ArgumentError, ArgumentTypeError, BackendWarning, DriverError, TargetError
from cudatma.target import detect

BACKENDS = ("auto", "cuda", "reference", "emulator")
BACKEND_VARIABLE = "CUDATMA_BACKEND"
# Warn once per process, unless the program has its own filter.
warnings.simplefilter("once", BackendWarning, append=True)


def selected_backend(backend: str | None = None) -> str:
    """Return the backend that a call uses.

    Parameters
    ----------
    backend : {"auto", "cuda", "reference", "emulator"}, optional
        The caller's choice. Default: the environment variable ``CUDATMA_BACKEND`` if it is set, otherwise "auto".

    Returns
    -------
    str
        ``"cuda"``, ``"reference"`` or ``"emulator"``. "auto" becomes "cuda" if cudatma can launch on the first GPU,
        otherwise "emulator". "cuda" is not checked, so a missing driver raises an error only at the first launch.

    Raises
    ------
    ArgumentError
        If the name is unknown.

    Examples
    --------
    >>> cudatma.selected_backend("emulator")
    'emulator'
    """
    requested = _requested(backend)
    if requested == "auto":
        return "cuda" if _has_usable_gpu() else "emulator"
    return requested


def backend_for(function: str, explicit: str | None, *, has_reference: bool = True) -> str:
    """Return selected_backend(), and warn if it falls back to the CPU.

    There is no warning if the call or $CUDATMA_BACKEND selects the CPU.
    """
    chosen = selected_backend(explicit)
    if chosen != "cuda" and _requested(explicit) == "auto":
        faster = f"Set {BACKEND_VARIABLE}=reference (NumPy) for a faster result. " if has_reference else ""
        warnings.warn(
            f"{function} computes on the CPU ({chosen}), because this machine has no usable NVIDIA GPU. {faster}"
            f"To silence this warning, set {BACKEND_VARIABLE}={chosen}, call "
            f"warnings.filterwarnings('ignore', category=cudatma.BackendWarning), or pass "
            f"backend={chosen!r} to cudatma's functions",
            BackendWarning,
            stacklevel=_user_stacklevel(),
        )
    return chosen


def _user_stacklevel() -> int:
    """Return the ``stacklevel`` of the nearest frame outside cudatma and torch, which is the user's code."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("cudatma", "torch"):
        frame, level = frame.f_back, level + 1
    return level


def device_remedy(remedy: str, device: int | None = None) -> str:
    """Return the remedy for an error about a host array where a device array is required.

    Return ``remedy`` if the machine has a usable GPU, otherwise a suggestion to use the emulator. Return "" if
    ``device`` is not None, because the array is then on a device and only the backend is wrong.
    """
    if device is not None:
        return ""
    if _has_usable_gpu():
        return remedy
    requested = os.environ.get(BACKEND_VARIABLE)
    unset = f"unset {BACKEND_VARIABLE}, which is {requested}, or " if requested else ""
    return f"{unset}pass backend='emulator' for host arrays, because this machine has no usable NVIDIA GPU"


def _requested(explicit: str | None) -> str:
    requested, field = explicit, "backend"
    if requested is None:
        requested, field = os.environ.get(BACKEND_VARIABLE) or "auto", BACKEND_VARIABLE
    if not isinstance(requested, str):
        raise ArgumentTypeError(field, type(requested).__name__, ", ".join(BACKENDS))
    if requested not in BACKENDS:
        raise ArgumentError(field, requested, ", ".join(BACKENDS))
    return requested


@lru_cache(maxsize=1)
def _has_usable_gpu() -> bool:
    try:
        return detect().runs_here
    except (DriverError, TargetError, ImportError):
        return False
