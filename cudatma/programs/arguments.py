"""Convert kernel arguments from other libraries for the emulator, and find the memory to which they point."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from cudatma.emulator import KernelParameter
from cudatma.errors import ArgumentError, LaunchError, counted
from cudatma.programs.device import SHARED_BYTES
from cudatma.programs.host_memory import HostMemory, host_array, words_of
from cudatma.programs.launch import ProgramLaunch
from cudatma.programs.log import LaunchLog, naming


def argument_of(value: Any, parameter: KernelParameter, field: str) -> Any:
    """Return an argument in the form that the emulator accepts. Raise ArgumentError if a number has the wrong type.

    CuPy and cuda.core do not convert a number to the type of its parameter. They pass a Python float as a double, a
    Python int as an integer, and the bytes of a NumPy scalar unchanged.
    """
    size, kind = parameter.size_bytes, parameter.kind
    array = host_array(value)
    if array is not None:
        is_struct = array.dtype.names is not None and kind.startswith("b") and array.nbytes == size
        return array.tobytes() if is_struct else array  # the libraries pass a NumPy array of structs by value
    if isinstance(value, np.generic):
        value_bytes = value.nbytes
    elif isinstance(value, bool):
        value_bytes = 1
    else:  # the libraries pass an int with at least the size of the parameter
        value_bytes = 8 if isinstance(value, float) else size
    is_float = isinstance(value, float | np.floating)
    is_number = is_float or isinstance(value, int | np.integer | np.bool_)
    if is_number and kind in ("f16", "f32", "f64") and not (is_float and value_bytes == size):
        remedy = f"pass a numpy.float{8 * size}, because the library does not convert the value"
        raise ArgumentError(field, f"{value!r} ({type(value).__name__})", f"a float of {size} bytes", remedy)
    if is_number and not is_float and value_bytes != size:
        remedy = f"pass a NumPy scalar of {size} bytes, because the library does not convert the value"
        raise ArgumentError(field, f"{value!r} ({counted(value_bytes, 'byte')})", f"a value of {size} bytes", remedy)
    return value


def require_opt_in(launch: ProgramLaunch, opt_in: int | None, remedy: str) -> None:
    """Raise LaunchError if the dynamic shared memory exceeds ``opt_in`` or, if it is None, the default maximum."""
    static = launch.module.resources(launch.entry).static_shared_bytes
    limit = SHARED_BYTES - static if opt_in is None else opt_in
    if launch.shared_bytes > limit:
        allowed = f"at most {limit}" + (
            " bytes without an opt-in" if opt_in is None else " bytes (the maximum that the program has set)"
        )
        raise LaunchError("dynamic shared memory", counted(launch.shared_bytes, "byte"), allowed, remedy)


def run_with_memory(log: LaunchLog, launch: ProgramLaunch, memory: HostMemory) -> None:
    """Run a launch that can access the device's allocations and the program's arrays to which its arguments point.

    Raise ArgumentError if an argument points to other memory.
    """
    __tracebackhide__ = True
    with naming(launch.library, launch.entry, launch.place):
        numbers = (int(value) for value in launch.args if isinstance(value, int | np.integer))
        program_arrays = memory.program_arrays(
            [*numbers, *words_of(value for value in launch.args if isinstance(value, bytes))]
        )
    args = (f"args[{index}]" for index in range(len(launch.args)))
    blocks = (f"an allocation of {counted(block.size, 'byte')}" for block in memory.blocks)
    arrays = (*memory.blocks, *(array for _, array in program_arrays))
    log.run(replace(launch, arrays=arrays, names=(*args, *blocks, *(name for name, _ in program_arrays))))
