"""Arguments that libraries pass by the Python type of the value, without knowing the kernel's parameters."""

from __future__ import annotations

from typing import Any

import numpy as np

from cudatma.emulator.ptx.model import Variable
from cudatma.errors import ArgumentError
from cudatma.programs.host_memory import host_array


def argument_of(value: Any, parameter: Variable, field: str) -> Any:
    """Return an argument for the emulator. Raise ArgumentError if the kernel would read other bytes than it declares.

    CuPy and cuda.core pass a Python float as a double and the bytes of a NumPy scalar as they are.
    """
    array = host_array(value)
    if array is not None:
        return array
    if isinstance(value, float) and not isinstance(value, np.generic) and parameter.kind == "f32":
        remedy = "a Python float is passed as a double, of which the kernel reads one half: pass numpy.float32"
        raise ArgumentError(field, value, "a float of 4 bytes", remedy)
    if isinstance(value, np.generic) and value.nbytes < parameter.size_bytes:
        remedy = "the kernel would read past the value: convert the scalar"
        raise ArgumentError(field, f"{value!r}", f"a value of {parameter.size_bytes} bytes", remedy)
    return value
