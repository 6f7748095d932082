"""A plan made ready once, its kernel loaded and its arguments marshalled: for other arrays only addresses change."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from cudatma import context
from cudatma.arrays import ArrayInfo
from cudatma.descriptor import TensorMap
from cudatma.descriptor.driver import replace_address
from cudatma.kernels.data_movement.place import CopyPlan, Place
from cudatma.kernels.host import host_bytes
from cudatma.runtime.launch import Kernel, LaunchPlan
from cudatma.runtime.launch_args import marshal
from cudatma.runtime.loading import refuse_capture

_Word = ctypes.c_uint64 * 1


class Launch:
    """A CopyPlan for any arrays that lie like those it was made for, at addresses that are equal to theirs modulo 16.

    Keeps no array alive. Safe from many threads.
    """

    __slots__ = ("_by_driver", "_emulate", "_lock", "_plan", "_touched", "_words")

    def __init__(self, planned: CopyPlan, arrays: Sequence[ArrayInfo], place: Place, stream: int = 0) -> None:
        """arrays: the arrays of the plan, one for each address among its arguments. stream: handle of the one
        that it is about to run on.

        Raises TargetError, CompileError, DriverError, LaunchError (a kernel to be loaded in the midst of a capture).
        """
        planned.spec.check_target(place.target)
        kernel = planned.kernel(place.target)
        args = [value.pointer if isinstance(value, ArrayInfo) else value for value in planned.args]
        shape = {"cluster": planned.cluster if planned.cluster > 1 else None, "shared_bytes": planned.spec.smem_bytes}
        self._lock = threading.Lock()
        self._plan: LaunchPlan | None = None
        if place.device is not None:
            _refuse_capture(kernel, place.device, stream)
            self._plan = kernel.plan(planned.grid, planned.spec.threads, args, device=place.device, **shape)
            values = self._plan.arguments
        else:
            values = marshal(kernel.parameters, args).values
            self._emulate = partial(kernel.emulate, planned.grid, planned.spec.threads, values, schedules=1, **shape)
            self._touched = [beside(info, array) for info, array in zip(planned.touched, arrays, strict=True)]
        # Each address is an array's and what the plan adds to it. A tensor map begins with its address; where it holds
        # more of the allocation than that, only the driver may change it.
        self._words: list[tuple[Any, int, int]] = []
        self._by_driver: list[tuple[int, int, int]] = []
        only_driver = place.device is not None and place.target.tensormap_knows_allocation
        moving = [pair for pair in zip(values, planned.args, strict=True) if isinstance(pair[1], ArrayInfo | TensorMap)]
        for index, ((value, given), array) in enumerate(zip(moving, arrays, strict=True)):
            if isinstance(given, ArrayInfo):
                self._words.append((_Word.from_buffer(value), index, given.pointer - array.pointer))
            elif only_driver:
                self._by_driver.append((ctypes.addressof(value), index, given.address - array.pointer))
            else:
                self._words.append((_Word.from_buffer(value), index, given.address - array.pointer))

    def run(self, arrays: Sequence[ArrayInfo], stream: int = 0) -> None:
        """Launch it on a stream, by its handle, or run one schedule on the emulator.

        arrays: as many, in the same order and layouts. Raises DriverError, LaunchError (a forked process), PipelineHang
        (debug), HazardError (emulator).
        """
        with self._lock:
            for word, index, offset in self._words:
                word[0] = arrays[index].pointer + offset
            if self._plan is not None:
                if self._by_driver:
                    self._ask_driver(self._plan.device, arrays)
                self._plan.launch(stream)
                return
            pairs = zip(self._touched, arrays, strict=True)
            reached = (replace(part, pointer=array.pointer + part.pointer) for part, array in pairs)
            self._emulate(arrays=tuple(host_bytes(info) for info in reached if info.size_elems))

    def _ask_driver(self, device: int, arrays: Sequence[ArrayInfo]) -> None:
        # It looks the allocation up, in whatever context is current.
        with context.using(device):
            for map_address, index, offset in self._by_driver:
                replace_address(map_address, arrays[index].pointer + offset)


def beside(info: ArrayInfo, array: ArrayInfo) -> ArrayInfo:
    """An array by its place relative to another one; keeps nothing alive."""
    return replace(info, pointer=info.pointer - array.pointer, owner=None)


def _refuse_capture(kernel: Kernel, device: int, stream: int) -> None:
    """LaunchError where the kernel would have to be loaded while the stream captures a graph."""
    if not kernel.is_loaded(device):
        with context.using(device) as driver:
            refuse_capture(driver, stream, kernel.entry, device)
