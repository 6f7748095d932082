"""The emulator as a Device of tests/emulator/kernel_cases.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from ptx_of import ptx_of_template

from cudatma.descriptor import TensorMap
from cudatma.emulator import load
from cudatma.kernels.marlin.gemm import marlin_gemm
from cudatma.target import get_target

Array = np.ndarray[Any, np.dtype[Any]]


class EmulatedDevice:
    """Arrays in host memory, launches on the emulator; a hazard is an error."""

    def __init__(self, target: str = "sm_90a", schedules: int = 1) -> None:
        self.target, self.schedules = get_target(target), schedules
        self._arrays: list[Array] = []

    def put(self, array: Array) -> Array:
        raw = np.zeros(array.nbytes + 128, np.uint8)
        raw = raw[-raw.ctypes.data % 128 :][: array.nbytes]
        raw[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        made = raw.view(array.dtype).reshape(array.shape)
        self._arrays.append(made)
        return made

    def get(self, array: Array) -> Array:
        return array.copy()

    def address(self, array: Array) -> int:
        return int(array.ctypes.data)

    def map(self, spec: Any, array: Array) -> TensorMap:
        return TensorMap(spec, owner=array, encoder="codec")

    def launch(
        self, template: str, config: Any, grid: int, block: int, args: Sequence[Any], cluster: int = 1, shared: int = 0
    ) -> None:
        module = load(ptx_of_template(template, config, self.target.name))
        module.launch(
            config.entry,
            grid,
            block,
            args,
            cluster=cluster,
            shared_bytes=shared,
            schedules=self.schedules,
            arrays=self._arrays,
        )

    def gemm(self, x: Array, weight: Any) -> Array:
        return np.asarray(marlin_gemm(x, weight, backend="emulator"))
