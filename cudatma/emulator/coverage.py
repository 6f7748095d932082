"""Which instructions of a PTX file the emulator runs: what ``cudatma emulate --coverage FILE.ptx`` prints."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import cudatma.emulator.instructions  # noqa: F401
from cudatma.emulator.errors import PtxError
from cudatma.emulator.ptx.flow import Flow
from cudatma.emulator.ptx.parser import parse
from cudatma.emulator.ptx.writer import SegmentWriter, storage_classes


@dataclass(frozen=True, slots=True)
class Coverage:
    """covered: opcode -> how often it occurs in the file. missing: (function, what is wrong) of every instruction that
    cannot be emulated."""

    covered: dict[str, int]
    missing: tuple[tuple[str, PtxError], ...]

    def __str__(self) -> str:
        total = sum(self.covered.values())
        lines = [f"{total} instructions of {len(self.covered)} kinds are covered, {len(self.missing)} are not"]
        lines += [f"  {count:6d}  {opcode}" for opcode, count in sorted(self.covered.items())]
        lines += [f"  missing in {function}: {error}" for function, error in self.missing]
        return "\n".join(lines)


def coverage(ptx: str) -> Coverage:
    """Try every instruction of every function. Raises PtxError where the file cannot be parsed at all."""
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
