"""Where the steps of the guide run: on the GPU with CuPy if there is one, else on the emulator with NumPy."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

import cudatma
from cudatma.arrays import describe

warnings.simplefilter("ignore", cudatma.BackendWarning)  # check() says where it ran


def library() -> Any:
    """cupy, or numpy where the machine has no usable GPU (launches then run on the emulator)."""
    if cudatma.selected_backend() != "cuda":
        return np
    import cupy

    return cupy


def target() -> str | None:
    """What kernels are compiled for: None: the GPU of this machine. Without one: what is emulated."""
    return "sm_90a" if library() is np else None


def address(array: Any) -> int:
    """The address of an array, in the GPU's memory or, for the emulator, in the host's."""
    return describe(array).pointer


def check(name: str, got: Any, wanted: Any) -> None:
    """Print whether two arrays are equal, and end the program if they are not."""
    xp = library()
    if not bool(xp.array_equal(xp.asarray(got), xp.asarray(wanted))):
        raise SystemExit(f"{name}: wrong")
    print(f"{name}: right, on {'the GPU' if xp is not np else 'the emulator'}")
