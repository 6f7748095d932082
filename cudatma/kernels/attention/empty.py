"""The results of queries that see no key, which need no kernel."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from cudatma.arrays import ArrayInfo, with_cupy
from cudatma.kernels.host import host_array
from cudatma.library_streams import working_on


def fill_empty(arrays: Mapping[str, ArrayInfo], stream: int | None) -> None:
    """Write zeros to ``out``, and -inf or the heads' sinks to ``lse``; on a device on a stream, by its handle."""
    _fill(arrays["out"], 0.0, stream)
    if "lse" in arrays:
        _fill(arrays["lse"], arrays.get("sink", -math.inf), stream)


def _fill(info: ArrayInfo, value: float | ArrayInfo, stream: int | None) -> None:
    """Write a number, or one for each head, the last dimension but one, to all elements of an array."""
    if info.device is None:
        host_array(info)[...] = host_array(value)[:, None] if isinstance(value, ArrayInfo) else value
        return

    def write(array: Any, of_heads: Any) -> None:
        array[...] = value if of_heads is None else of_heads[:, None]

    owner = value.owner if isinstance(value, ArrayInfo) else None
    if info.kind == "torch":
        with working_on("torch", info.device, stream):
            write(info.owner, owner)
        return

    def of_cupy(cupy: Any) -> None:
        with cupy.cuda.Device(info.device), working_on("cupy", info.device, stream):
            write(cupy.asarray(info.owner), None if owner is None else cupy.asarray(owner))

    with_cupy("cupy.ndarray.fill", of_cupy)
