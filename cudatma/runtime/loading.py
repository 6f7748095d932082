"""Functions that load a kernel from a cubin onto a device.

Source: CUDA driver API, "Module Management", "Execution Control".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cudatma import context
from cudatma.context import Device
from cudatma.errors import LaunchError, check
from cudatma.runtime.launch_args import Parameter
from cudatma.runtime.launch_config import FunctionLimits
from cudatma.target import Target


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources of a loaded kernel.

    Attributes
    ----------
    registers : int
        Number of registers per thread.
    local_bytes : int
        Local memory (spills and stack) per thread in bytes.
    static_shared_bytes : int
        Static shared memory per CTA in bytes.
    constant_bytes : int
        Constant memory of the kernel in bytes.
    max_threads : int
        Maximum number of threads per CTA.
    max_dynamic_shared_bytes : int
        Maximum dynamic shared memory per CTA in bytes.
    """

    registers: int
    local_bytes: int
    static_shared_bytes: int
    constant_bytes: int
    max_threads: int
    max_dynamic_shared_bytes: int


@dataclass(frozen=True, slots=True)
class Function:
    """A kernel loaded on a device, with its CUfunction and the module that keeps the function valid."""

    handle: Any
    module: Any
    resources: Resources
    limits: FunctionLimits


def refuse_capture(driver: Any, stream: int, entry: str, device: int) -> None:
    """Raise LaunchError if the stream is being captured, because modules cannot be loaded during a capture."""
    if context.is_capturing(driver, stream):
        remedy = f"call kernel.load({device}) or launch the kernel once before the capture begins"
        raise LaunchError(
            "stream", "a stream under graph capture", f"outside a graph capture until {entry} is loaded", remedy
        )


def load_function(
    driver: Any, cubin: bytes, entry: str, parameters: Sequence[Parameter], target: Target, gpu: Device
) -> Function:
    """Load a kernel into the GPU's context, which must be current, and set the kernel's dynamic shared memory limit.

    Raises DriverError if the driver fails, and LaunchError if the parameters in the cubin differ from ``parameters``.
    """
    with context.outside_captures(driver):
        module = check(driver.cuModuleLoadData(cubin), "cuModuleLoadData")
        handle = check(driver.cuModuleGetFunction(module, entry.encode()), "cuModuleGetFunction")
        _compare_parameters(driver, handle, parameters)
        resources = _resources(driver, handle, min(gpu.smem_per_block_bytes, target.smem_per_block_bytes))
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(driver.cuFuncSetAttribute(handle, attribute, resources.max_dynamic_shared_bytes), "cuFuncSetAttribute")
    limits = FunctionLimits(resources.max_threads, resources.max_dynamic_shared_bytes)
    return Function(handle, module, resources, limits)


def _resources(driver: Any, handle: Any, shared_limit_bytes: int) -> Resources:
    names = driver.CUfunction_attribute
    registers, local, static, constant, threads = (
        int(check(driver.cuFuncGetAttribute(name, handle), "cuFuncGetAttribute"))
        for name in (
            names.CU_FUNC_ATTRIBUTE_NUM_REGS,
            names.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES,
            names.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
            names.CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES,
            names.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK,
        )
    )
    return Resources(registers, local, static, constant, threads, max(0, shared_limit_bytes - static))


def _compare_parameters(driver: Any, handle: Any, parameters: Sequence[Parameter]) -> None:
    """Raise LaunchError unless the PTX and the cubin have the same parameters.

    If a width were wrong, the driver would read beyond the arguments. The check is skipped for drivers before CUDA
    12.4, which lack cuFuncGetParamInfo.
    """
    for index, parameter in enumerate(parameters):
        try:
            result = driver.cuFuncGetParamInfo(handle, index)
        except RuntimeError:
            return
        size = result[2] if int(result[0]) == 0 else None
        if size != parameter.size_bytes:
            got = f"{parameter.size_bytes} bytes in the PTX, but {size} in the cubin"
            raise LaunchError(f"parameters[{index}]", got, "of equal size in PTX and cubin", "recompile the kernel")
