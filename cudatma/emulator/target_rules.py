"""What a target cannot run, found before a launch starts. Source: PTX ISA, "Target ISA Notes" of each instruction."""

from __future__ import annotations

from cudatma.emulator.machine.image import Image
from cudatma.emulator.ptx.model import Instruction
from cudatma.target import Target


def missing_feature(instruction: Instruction, target: Target) -> str:
    """The feature of cudatma.target.FEATURES that an instruction needs and the target lacks; "" where it has all."""
    parts = instruction.parts
    needed = []
    if parts[0] in ("wgmma", "setmaxnreg", "stmatrix"):
        needed.append(parts[0])
    if "multicast::cluster" in parts:
        needed.append("multicast")
    if parts[:2] == ("tensormap", "replace"):
        needed.append("tensormap_replace")
    if "bulk" in parts and "tensor" in parts:
        needed.append("tma")
        modes = {"tile::gather4": "gather4", "tile::scatter4": "scatter4", "im2col::w": "im2col_w"}
        needed += [feature for mode, feature in modes.items() if mode in parts]
    return next((feature for feature in needed if not target.has(feature)), "")


def unsupported(image: Image, entry: str, target: Target) -> list[tuple[str, int, str]]:
    """(function, index in its body, feature) of every instruction that an entry reaches and the target lacks."""
    found = []
    for name in image.reachable(entry):
        for at, instruction in enumerate(image.module.functions[name].body):
            feature = missing_feature(instruction, target)
            if feature:
                found.append((name, at, feature))
    return found
