"""Instructions that exist and are not emulated: each is refused with the reason. Source: PTX ISA, "Instruction Set"."""

from __future__ import annotations

from cudatma.emulator.ptx.forms import REFUSED
from cudatma.emulator.ptx.model import Instruction
from cudatma.emulator.ptx.writer import SegmentWriter, emitter


@emitter(*REFUSED)
def refuse(e: SegmentWriter, i: Instruction) -> None:
    raise e.error(f"`{i.parts[0]}` is not emulated: {REFUSED[i.parts[0]]}")
