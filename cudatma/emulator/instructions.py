"""Register all instructions, and determine which of them the emulator or a target supports.

Source: PTX ISA, "Target ISA Notes" of each instruction.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from cudatma.emulator.arithmetic import (  # noqa: F401
    numeric,
    ops_bits,
    ops_convert,
    ops_float,
    ops_move,
    ops_video,
)
from cudatma.emulator.async_copy import ops_async  # noqa: F401
from cudatma.emulator.errors import PtxError
from cudatma.emulator.machine import divergence, ops_control, ops_memory, ops_warp  # noqa: F401
from cudatma.emulator.machine.program import Image
from cudatma.emulator.ptx.flow import Flow
from cudatma.emulator.ptx.parser import parse
from cudatma.emulator.ptx.writer import SegmentWriter, storage_classes
from cudatma.emulator.tensor_core import ops_tensor  # noqa: F401
from cudatma.target import Target


@dataclass(frozen=True, slots=True)
class Coverage:
    """Supported and unsupported instructions of a PTX file.

    Parameters
    ----------
    covered : dict of str to int
        Number of occurrences of each supported opcode.
    missing : tuple of (str, PtxError)
        Function name and error of each unsupported instruction.
    """

    covered: dict[str, int]
    missing: tuple[tuple[str, PtxError], ...]

    def __str__(self) -> str:
        total = sum(self.covered.values())
        lines = [f"{total} instructions of {len(self.covered)} kinds are supported, {len(self.missing)} are not"]
        lines += [f"  {count:6d}  {opcode}" for opcode, count in sorted(self.covered.items())]
        lines += [f"  not supported in {function}: {error}" for function, error in self.missing]
        return "\n".join(lines)


def coverage(ptx: str) -> Coverage:
    """Determine which instructions of a PTX file the emulator supports, without running a kernel.

    Parameters
    ----------
    ptx : str
        Text of the PTX file.

    Returns
    -------
    Coverage
        Instructions of all functions in the file.

    Raises
    ------
    PtxError
        If the text is not valid PTX.

    Examples
    --------
    >>> from cudatma import emulator
    >>> result = emulator.coverage(".version 8.0 .target sm_90 .address_size 64 .entry f() { ret; }")
    >>> result.covered, result.missing
    ({'ret': 1}, ())
    """
    module = parse(ptx)
    covered: Counter[str] = Counter()
    missing: list[tuple[str, PtxError]] = []
    for function in module.functions.values():
        if not function.is_defined:
            continue
        try:
            flow = Flow(function)
        except PtxError as error:
            missing.append((function.name, error))
            continue
        classes = storage_classes(flow)
        for segment in flow.segments:
            writer = SegmentWriter(flow, segment, classes, module, masked=True)
            for at in range(segment.start, segment.stop):
                instruction = function.body[at]
                error_here = writer.try_one(at)
                if error_here is None:
                    covered[instruction.opcode] += 1
                else:
                    missing.append((function.name, error_here))
    return Coverage(dict(covered), tuple(missing))


def missing_feature(opcode: str, target: Target) -> str:
    """Return the feature of `cudatma.target.FEATURES` that an opcode requires but the target lacks, or ""."""
    parts = opcode.split(".")
    needed = []
    if parts[0] in ("wgmma", "setmaxnreg", "stmatrix"):
        needed.append(parts[0])
    if "multicast::cluster" in parts:
        needed.append("multicast")
    if parts[:2] == ["tensormap", "replace"]:
        needed.append("tensormap_replace")
    if "bulk" in parts and "tensor" in parts:
        needed.append("tma")
        modes = {"tile::gather4": "gather4", "tile::scatter4": "scatter4", "im2col::w": "im2col_w"}
        needed += [feature for mode, feature in modes.items() if mode in parts]
    return next((feature for feature in needed if not target.has(feature)), "")


def unsupported(image: Image, entry: str, target: Target) -> list[tuple[str, int, str]]:
    """Return the function, body index and missing feature of each reachable instruction that a target lacks."""
    features = {opcode: missing_feature(opcode, target) for opcode in image.opcodes(entry)}
    if not any(features.values()):
        return []
    return [
        (name, at, features[instruction.opcode])
        for name in image.reachable(entry)
        for at, instruction in enumerate(image.module.functions[name].body)
        if features[instruction.opcode]
    ]
