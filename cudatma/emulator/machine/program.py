"""A function made runnable: segments compiled to Python on first use, and where its variables lie."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache
from types import CodeType
from typing import Any

import numpy as np

from cudatma.emulator.ptx.flow import Flow, bit_set
from cudatma.emulator.ptx.model import Function, Instruction, Module, Variable
from cudatma.emulator.ptx.types import LANES, NUMPY, Array
from cudatma.emulator.ptx.unfenced import unfenced_wgmmas
from cudatma.emulator.ptx.unwritten import unwritten_reads
from cudatma.emulator.ptx.writer import RUNTIME, SegmentWriter, storage_classes

SegmentFunction = Callable[[Any, list[Array], Any], int]


def lay_out(variables: list[Variable], start: int = 0) -> tuple[dict[str, int], int]:
    """Offsets of variables placed one after the other at their alignment, and the end."""
    offsets, at = {}, start
    for variable in variables:
        at = -(-at // max(1, variable.align)) * max(1, variable.align)
        offsets[variable.name] = at
        at += variable.size_bytes
    return offsets, at


class Program:
    """One function of a module.

    local_bytes: of one lane, a multiple of 16. param_offsets: of an entry's parameters in its buffer.
    """

    def __init__(self, function: Function, module: Module) -> None:
        self.function, self.module = function, module
        self.is_entry = function.is_entry
        self.flow = Flow(function)
        self.classes = storage_classes(self.flow)
        self.initial_registers = [_zeros(code) for code in self.classes]
        local = [v for v in function.variables.values() if v.space == "local"]
        self.local_offsets, local_end = lay_out(local)
        self.local_bytes = -(-local_end // 16) * 16
        self.param_offsets, self.param_bytes = lay_out(function.params)
        count = len(self.flow.segments)
        self.full: list[SegmentFunction | None] = [None] * count
        self.masked: list[SegmentFunction | None] = [None] * count
        self.unwritten = unwritten_reads(self.flow)
        self._accesses: dict[int, tuple[int, int]] = {}
        self._live: dict[int, list[int]] = {}
        self.touched = [segment.touched for segment in self.flow.segments]

    @cached_property
    def unfenced(self) -> dict[int, int]:
        """Index of a wgmma -> its registers that some path writes with no wgmma.fence after it."""
        return unfenced_wgmmas(self.flow)

    def compile_full(self, index: int) -> SegmentFunction:
        """The form of a segment for 32 active lanes."""
        found = self.full[index] = self._compile(index, masked=False)
        return found

    def compile_masked(self, index: int) -> SegmentFunction:
        """The form of a segment that takes a mask of lanes."""
        found = self.masked[index] = self._compile(index, masked=True)
        return found

    def source(self, index: int, masked: bool) -> str:
        """The Python of a segment, for debugging the emulator."""
        writer = SegmentWriter(self.flow, self.flow.segments[index], self.classes, self.module, masked)
        return writer.write()

    def check(self) -> None:
        """Raise PtxError at the first instruction that cannot be emulated."""
        for segment in self.flow.segments:
            SegmentWriter(self.flow, segment, self.classes, self.module, True).write()

    def instruction(self, at: int) -> Instruction:
        return self.function.body[at]

    def live_registers(self, segment: int) -> list[int]:
        """Indices of the registers that a segment, or one after it, reads before they are written."""
        found = self._live.get(segment)
        if found is None:
            live = self.flow.segments[segment].live_in
            found = self._live[segment] = [index for index in range(live.bit_length()) if live >> index & 1]
        return found

    def accesses(self, at: int) -> tuple[int, int]:
        """(read, written) registers of an instruction, as bit sets."""
        found = self._accesses.get(at)
        if found is None:
            written, read = self.flow.accesses[at]
            found = self._accesses[at] = (bit_set(read), bit_set(written))
        return found

    def _compile(self, index: int, masked: bool) -> SegmentFunction:
        writer = SegmentWriter(self.flow, self.flow.segments[index], self.classes, self.module, masked)
        source = writer.write()
        names = {**RUNTIME, **writer.constants}
        exec(_code(source, f"<ptx {self.function.name} segment {index}>"), names)
        function: SegmentFunction = names["segment"]
        return function


@lru_cache(maxsize=4096)
def _code(source: str, name: str) -> CodeType:
    """Compiled once: kernels that are loaded again, and mutants of one kernel, have most segments in common."""
    return compile(source, name, "exec")


def _zeros(code: str) -> Array:
    vector: Array = np.zeros((2, LANES), np.uint64) if code == "b128" else np.zeros(LANES, NUMPY[code])
    vector.flags.writeable = False
    return vector
