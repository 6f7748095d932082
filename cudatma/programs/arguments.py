"""Arguments of kernels, as libraries pass them: by the Python type of the value, or as addresses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from cudatma.emulator.ptx.model import Variable
from cudatma.errors import ArgumentError, counted
from cudatma.programs.host_memory import HostMemory, host_array, words_of
from cudatma.programs.launch import ProgramLaunch
from cudatma.programs.log import LaunchLog, naming


def argument_of(value: Any, parameter: Variable, field: str) -> Any:
    """Return an argument for the emulator. Raise ArgumentError if the kernel would read other bytes than it declares.

    CuPy and cuda.core pass a Python float as a double and the bytes of a NumPy scalar as they are.
    """
    array = host_array(value)
    if array is not None:
        return array
    if isinstance(value, float) and not isinstance(value, np.generic) and parameter.kind == "f32":
        remedy = "a Python float is passed as a double, but the parameter is a float: pass numpy.float32"
        raise ArgumentError(field, value, "a float of 4 bytes", remedy)
    if isinstance(value, np.generic) and value.nbytes < parameter.size_bytes:
        remedy = "the kernel would read past the value: convert the scalar"
        raise ArgumentError(field, f"{value!r}", f"a value of {parameter.size_bytes} bytes", remedy)
    return value


def run_with_memory(log: LaunchLog, launch: ProgramLaunch, memory: HostMemory) -> None:
    """Run a launch with all memory that its arguments may reach: allocations, and arrays of the callers at addresses.

    Raises ArgumentError if an argument is an address of other memory.
    """
    __tracebackhide__ = True
    with naming(launch.library, launch.entry, launch.place):
        numbers = (int(value) for value in launch.args if isinstance(value, int | np.integer))
        reached = memory.reached([*numbers, *words_of(value for value in launch.args if isinstance(value, bytes))])
    args = (f"args[{index}]" for index in range(len(launch.args)))
    blocks = (f"an allocation of {counted(block.size, 'byte')}" for block in memory.blocks)
    arrays = (*memory.blocks, *(array for _, array in reached))
    log.run(replace(launch, arrays=arrays, names=(*args, *blocks, *(name for name, _ in reached))))
