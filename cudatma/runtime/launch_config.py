"""Grid, block, cluster and attributes of a launch: their rules and their conversion for the driver.

Source: CUDA driver API, CUlaunchConfig, CUlaunchAttribute, cuLaunchKernelEx; CUDA C++ Programming Guide, "Compute
Capabilities".
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from cudatma.errors import LaunchError
from cudatma.target import Target

Dim3 = tuple[int, int, int]

_GRID_LIMITS: Dim3 = (2**31 - 1, 65535, 65535)
_BLOCK_LIMITS: Dim3 = (1024, 1024, 64)
_BLOCK_THREADS = 1024
_AXES = "xyz"


@dataclass(frozen=True, slots=True)
class FunctionLimits:
    """Limits of a kernel on a device.

    Attributes
    ----------
    max_threads : int
        Maximum number of threads per CTA, which depends on registers and ``__launch_bounds__``.
    max_dynamic_shared_bytes : int
        Maximum dynamic shared memory per CTA, which is the opt-in limit minus static shared memory.
    """

    max_threads: int
    max_dynamic_shared_bytes: int


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """Shape and attributes of a launch, without its stream and arguments.

    ``cluster`` is None for a launch without clusters.
    """

    grid: Dim3
    block: Dim3
    cluster: Dim3 | None
    shared_bytes: int
    programmatic: bool

    def for_driver(self, driver: Any) -> Any:
        """Return the CUlaunchConfig for stream 0. The config keeps its attributes alive."""
        names, attributes = driver.CUlaunchAttributeID, []
        if self.cluster is not None:
            value = driver.CUlaunchAttributeValue()
            value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = self.cluster
            attributes.append(_attribute(driver, names.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, value))
        if self.programmatic:
            value = driver.CUlaunchAttributeValue()
            value.programmaticStreamSerializationAllowed = 1
            name = names.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attributes.append(_attribute(driver, name, value))
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = self.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = self.block
        config.sharedMemBytes = self.shared_bytes
        if attributes:
            config.attrs = attributes
            config.numAttrs = len(attributes)
        return config


def _attribute(driver: Any, name: Any, value: Any) -> Any:
    attribute = driver.CUlaunchAttribute()
    attribute.id, attribute.value = name, value
    return attribute


def dim3(value: object, field: str) -> Dim3:
    """Convert an int or a tuple of one to three ints to (x, y, z).

    Raises LaunchError if an extent is not a positive int.
    """
    parts: Any = value if isinstance(value, tuple | list) else (value,)
    try:
        whole = tuple(operator.index(part) for part in parts)
    except TypeError:
        whole = ()
    if not 1 <= len(whole) <= 3 or any(isinstance(part, bool) for part in parts):
        raise LaunchError(field, value, "an int or a tuple of one to three ints")
    for index, extent in enumerate(whole):
        if extent < 1:
            remedy = "skip the launch if the grid is empty" if field == "grid" else ""
            raise LaunchError(f"{field}[{index}]", extent, "at least 1", remedy)
    x, y, z = (*whole, 1, 1)[:3]
    return x, y, z


def make_config(
    target: Target,
    grid: object,
    block: object,
    *,
    cluster: object = None,
    shared_bytes: int = 0,
    programmatic: bool = False,
    limits: FunctionLimits | None = None,
) -> LaunchConfig:
    """Check the shape of a launch against the target and, if ``limits`` is given, the kernel and device.

    A cluster of one CTA becomes None. Raises a LaunchError with the name of the invalid field.
    """
    grid3, block3 = dim3(grid, "grid"), dim3(block, "block")
    _within("grid", grid3, _GRID_LIMITS)
    _within("block", block3, _BLOCK_LIMITS)
    threads = block3[0] * block3[1] * block3[2]
    if threads > _BLOCK_THREADS:
        raise LaunchError("block", f"{threads} threads", f"at most {_BLOCK_THREADS} threads in total")
    if limits is not None and threads > limits.max_threads:
        remedy = "increase the kernel's __launch_bounds__ or launch fewer threads"
        raise LaunchError("block", f"{threads} threads", f"at most {limits.max_threads} for this kernel", remedy)
    _check_shared(target, shared_bytes, limits)
    cluster3 = None if cluster is None else _cluster(target, cluster, grid3)
    return LaunchConfig(grid3, block3, cluster3, int(shared_bytes), bool(programmatic))


def _within(field: str, value: Dim3, limits: Dim3) -> None:
    for axis, extent, limit in zip(_AXES, value, limits, strict=True):
        if extent > limit:
            raise LaunchError(f"{field}.{axis}", extent, f"at most {limit}")


def _check_shared(target: Target, shared_bytes: object, limits: FunctionLimits | None) -> None:
    if isinstance(shared_bytes, bool) or not hasattr(shared_bytes, "__index__"):
        raise LaunchError("shared_bytes", shared_bytes, "an int")
    limit, whose = target.smem_per_block_bytes, target.name
    if limits is not None and limits.max_dynamic_shared_bytes < limit:
        limit, whose = limits.max_dynamic_shared_bytes, "this kernel on this device"
    if not 0 <= operator.index(shared_bytes) <= limit:
        remedy = "use fewer stages or smaller tiles"
        raise LaunchError("shared_bytes", shared_bytes, f"0 to {limit} for {whose}", remedy)


def _cluster(target: Target, cluster: object, grid: Dim3) -> Dim3 | None:
    shape = dim3(cluster, "cluster")
    blocks = shape[0] * shape[1] * shape[2]
    if blocks > target.max_cluster_blocks:
        raise LaunchError("cluster", shape, f"at most {target.max_cluster_blocks} CTAs for {target.name}")
    for axis, of_grid, of_cluster in zip(_AXES, grid, shape, strict=True):
        if of_grid % of_cluster:
            allowed = f"a multiple of cluster.{axis} = {of_cluster}"
            raise LaunchError(
                f"grid.{axis}", of_grid, allowed, "round the grid up and return early from the surplus CTAs"
            )
    return shape if blocks > 1 else None
