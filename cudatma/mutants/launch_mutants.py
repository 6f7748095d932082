"""Mutants of a launch that change a tensor map, the shared memory size, or the alignment of a shared array."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from cudatma.descriptor.spec import TiledSpec
from cudatma.emulator.async_copy.tensor_map import edit
from cudatma.emulator.ptx.names import find_name
from cudatma.emulator.ptx.parser import parse
from cudatma.layout import Swizzle, required_alignment
from cudatma.mutants.mutant import Call, Mutant
from cudatma.mutants.operators import OPERATORS
from cudatma.mutants.ptx_text import loaded_parameters, without_comments

_SHARED = re.compile(r"\.shared\s+\.align\s+(\d+)\s+\.b\d+\s+([\w$]+)\s*\[(\d*)\]")
_MISPLACED = frozenset({"trap", "barrier_misaligned", "swizzle_alignment", "swizzle_mismatch", "uninitialized_shared"})
#: Half of the alignment in bytes that tensor copies and bulk copies require.
_HALF_TENSOR, _HALF_BULK = 64, 8


def mutants_of_call(ptx: str, call: Call) -> list[Mutant]:
    """Return all mutants of a launch."""
    mutants = list(_bases(ptx, call))
    functions = parse(ptx).functions
    entries = [function.name for function in functions.values() if function.is_entry]
    entry = find_name(call.entry, entries, "entry", "kernels")
    loaded = loaded_parameters(functions[entry])
    for position, value in enumerate(call.args):
        if isinstance(getattr(value, "spec", None), TiledSpec):
            mutants += _maps(position, value.spec)
            mutants += _boxes(position, value.spec) if position in loaded else ()
    if call.shared_bytes:
        mutants.append(
            _launch_mutant(
                "less_shared",
                f"{call.shared_bytes - 16} bytes",
                lambda c: replace(c, shared_bytes=c.shared_bytes - 16),
                frozenset({"out_of_bounds"}),
            )
        )
    return mutants


def _launch_mutant(operator: str, text: str, change: Callable[[Call], Call], expected: frozenset[str]) -> Mutant:
    return Mutant(operator, 0, text, f"{OPERATORS[operator]}: {text}", expected, change=change)


def _maps(position: int, spec: TiledSpec) -> Iterator[Mutant]:
    """Yield mutants of a tensor map with another swizzle or a misaligned address."""
    for mode in (Swizzle.NONE, Swizzle.B32, Swizzle.B64, Swizzle.B128):
        if mode is not spec.swizzle:
            yield _launch_mutant(
                "map_swizzle",
                f"argument {position}: {spec.swizzle.label} becomes {mode.label}",
                _field(position, "swizzle_mode", 0, int(mode)),
                frozenset({"swizzle_mismatch", "swizzle_alignment", "uninitialized_shared", "trap", "out_of_bounds"}),
            )
    yield _launch_mutant(
        "map_base",
        f"argument {position}: address + 8",
        _field(position, "global_address", 0, 0),
        frozenset({"trap"}),
    )


def _boxes(position: int, spec: TiledSpec) -> Iterator[Mutant]:
    """Yield mutants in which loads transfer one row less or more than the mbarrier expects."""
    outer = spec.rank - 1
    for step in (-1, 1):
        if outer and 1 <= spec.box[outer] + step <= 256:
            yield _launch_mutant(
                "map_box",
                f"argument {position}: {spec.box[outer]} rows become {spec.box[outer] + step}",
                _field(position, "box_dim", outer, spec.box[outer] + step),
                frozenset({"byte_count", "out_of_bounds"}),
            )


def _field(position: int, field: str, ordinal: int, value: int) -> Callable[[Call], Call]:
    def change(call: Call) -> Call:
        tensor_map = call.args[position]
        new = tensor_map.spec.address + 8 if field == "global_address" else value
        raw = edit(bytes(tensor_map), field, ordinal, new)
        args = (*call.args[:position], raw, *call.args[position + 1 :])
        return replace(call, args=args, arrays=(*call.arrays, tensor_map))

    return change


def _bases(ptx: str, call: Call) -> Iterator[Mutant]:
    """Yield mutants in which a shared array starts at half of the required alignment."""
    text = without_comments(ptx)
    swizzles = [value.spec.swizzle for value in call.args if isinstance(getattr(value, "spec", None), TiledSpec)]
    pattern = max((required_alignment(mode) for mode in swizzles if mode), default=0)
    for array in _SHARED.finditer(text):
        align, name = int(array[1]), array[2]
        needed = _HALF_TENSOR if "cp.async.bulk.tensor" in text else _HALF_BULK
        steps = [min(align // 2, needed)]
        if align // 2 > _HALF_TENSOR and pattern:
            steps.append(pattern // 2)
        uses = re.compile(rf"(?<![\w$%.]){re.escape(name)}(?![\w$])")
        places = [use.end() for use in uses.finditer(text, array.end())]
        for step in steps:
            if step >= 4 and places:
                yield _base(text, array, step, places)


def _base(text: str, array: re.Match[str], step: int, places: Sequence[int]) -> Mutant:
    """Return a mutant in which an array is moved by ``step`` bytes.

    The array grows by as much. If it has no size, the launch's shared memory grows instead.
    """
    name, size = array[2], array[3]
    grown = [(array.start(3), array.end(3), str(int(size) + step))] if size else []
    return Mutant(
        "move_base",
        text.count("\n", 0, array.start()) + 1,
        f"{name} + {step}",
        f"{OPERATORS['move_base']}: `{name}` is moved by {step} bytes",
        _MISPLACED,
        edits=(*grown, *((place, place, f"+{step}") for place in places)),
        change=None if size else lambda call: replace(call, shared_bytes=call.shared_bytes + step),
    )
