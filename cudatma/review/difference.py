"""Compare two builds of kernels."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import SequenceMatcher
from itertools import zip_longest
from typing import Any

from cudatma.review.cubin import Resources
from cudatma.review.report import KernelReport
from cudatma.review.sass import CLASSES, Place, Step, class_of
from cudatma.review.tables import Loop, shown_places

#: Maximum number of changed places in the printed text. ``--json`` has no limit.
_SHOWN_CHANGES = 40
#: Maximum product of the lengths of two ranges that are compared instruction by instruction.
_MAX_PRODUCT = 1_000_000
_LABEL = re.compile(r"`\([^)]*\)|\b0x[0-9a-f]+$")
_JUMPS = ("BRA", "BRX", "JMP", "CALL", "RET", "EXIT", "BSYNC")


@dataclass(frozen=True, slots=True)
class Change:
    """Instructions that differ between two builds.

    Attributes
    ----------
    before, after : int or None
        Address of the first instruction in each build, in bytes, or None at the end of the code.
    places_before, places_after : tuple of Place
        Places of these instructions in the source. Empty if there is no line information.
    opcodes : dict of str to int
        Number of instructions in the second build minus that in the first build, by opcode.
    """

    before: int | None
    after: int | None
    places_before: tuple[Place, ...]
    places_after: tuple[Place, ...]
    opcodes: dict[str, int]


@dataclass(frozen=True, slots=True)
class KernelDifference:
    """Difference between two builds of a kernel.

    Attributes
    ----------
    name : str
        Name of the kernel, or both names if they differ.
    values : dict of str to tuple
        Fields of the config, resources and occupancy that differ, with both values.
    classes : dict of str to tuple of int
        Number of instructions in both builds, for each class that differs.
    mnemonics : dict of str to tuple of int
        Number of instructions in both builds, for each mnemonic that differs.
    loops : tuple of (Loop or None, Loop or None)
        Loops that differ, or exist in only one build.
    changes : tuple of Change
        Changed places in order of address.
    operands : int
        Number of instructions outside ``changes`` whose registers, constants or addresses differ.
    is_code_changed : bool
        Whether the cubin or the PTX differs. Always False if both builds have SASS.
    """

    name: str
    values: dict[str, tuple[Any, Any]]
    classes: dict[str, tuple[int, int]]
    mnemonics: dict[str, tuple[int, int]]
    loops: tuple[tuple[Loop | None, Loop | None], ...]
    changes: tuple[Change, ...]
    operands: int
    is_code_changed: bool

    @property
    def equal(self) -> bool:
        """Whether the builds of the kernel are equal."""
        return not (self.values or self.changes or self.operands or self.is_code_changed)


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference between two builds. ``str()`` is the text that ``cudatma diff`` prints.

    Parameters
    ----------
    kernels : tuple of KernelDifference
        Kernels in both builds.
    only_before, only_after : tuple of str
        Kernels in only one build.
    """

    kernels: tuple[KernelDifference, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether both builds have the same kernels with equal code and resources."""
        return not (self.only_before or self.only_after) and all(kernel.equal for kernel in self.kernels)

    def as_dict(self) -> dict[str, Any]:
        """Return the content as JSON-serializable data.

        Returns
        -------
        dict
            The attributes, and ``equal``.
        """
        return asdict(self) | {"equal": self.equal}

    def __str__(self) -> str:
        lines = [f"only in the first build: {name}" for name in self.only_before]
        lines += [f"only in the second build: {name}" for name in self.only_after]
        changed = [kernel for kernel in self.kernels if not kernel.equal]
        for kernel in changed:
            lines += _shown(kernel)
        if same := len(self.kernels) - len(changed):
            lines.append(f"{same} {'kernel is' if same == 1 else 'kernels are'} equal in both builds")
        return "\n".join(lines)


def compare(before: Sequence[KernelReport], after: Sequence[KernelReport]) -> Difference:
    """Compare two builds.

    Parameters
    ----------
    before, after : sequence of KernelReport
        Kernels of the builds. If each build has exactly one kernel, the names may differ. Otherwise, kernels are
        matched by entry and target, and kernels with the same entry and target are matched in order.

    Returns
    -------
    Difference
        Differences of kernels in both builds, and kernels in only one build.
    """
    if len(before) == len(after) == 1:
        return Difference((_compare(before[0], after[0]),), (), ())
    first, second = _by_key(before), _by_key(after)
    if not first.keys() & second.keys():  # builds for different targets
        first, second = _by_key(before, with_target=False), _by_key(after, with_target=False)
    return Difference(
        tuple(_compare(first[key], second[key]) for key in first if key in second),
        tuple(_title(report) for key, report in first.items() if key not in second),
        tuple(_title(report) for key, report in second.items() if key not in first),
    )


def _by_key(reports: Sequence[KernelReport], with_target: bool = True) -> dict[tuple[str, str, int], KernelReport]:
    """Return reports by entry, target and a number that distinguishes kernels with the same entry and target."""
    seen = Counter[tuple[str, str]]()
    result = {}
    for report in reports:
        key = (report.entry, report.target if with_target else "")
        result[key[0], key[1], seen[key]] = report
        seen[key] += 1
    return result


def _title(report: KernelReport) -> str:
    return f"{report.entry} ({report.target})"


def _compare(before: KernelReport, after: KernelReport) -> KernelDifference:
    names = dict.fromkeys(map(_title, (before, after)))
    has_code = before.code is not None and after.code is not None
    changes, operands = _changes(before, after) if has_code else ((), 0)
    return KernelDifference(
        name=" -> ".join(names),
        values={name: pair for name, pair in _pairs(_values(before), _values(after)).items() if None not in pair},
        classes=_pairs(_class_counts(before), _class_counts(after), 0) if has_code else {},
        mnemonics=_pairs(before.sass or {}, after.sass or {}, 0) if has_code else {},
        loops=_changed_loops(before.loops, after.loops) if has_code else (),
        changes=changes,
        operands=operands,
        is_code_changed=not has_code and before.digest != after.digest,
    )


def _values(report: KernelReport) -> dict[str, Any]:
    """Return the values of a report to compare, except unknown values."""
    values: dict[str, Any] = {f"config.{name}": value for name, value in report.config.items()}
    if report.resources is not None:
        values |= {name: getattr(report.resources, name) for name in Resources.__slots__ if name != "max_threads"}
    values |= {"threads": report.threads, "dynamic_smem_bytes": report.dynamic_smem_bytes}
    for each in report.occupancy:
        smem = "" if report.dynamic_smem_bytes is None else f" and {each.dynamic_smem_bytes} bytes"
        values[f"CTAs per SM ({each.threads} threads{smem})"] = each.ctas
    for name in ("release_hazards", "wgmma_hazards"):
        hazards = getattr(report, name)
        values[name] = None if hazards is None else len(hazards)
    return {name: value for name, value in values.items() if value is not None}


def _class_counts(report: KernelReport) -> dict[str, int]:
    """Return the number of instructions of each class. Forms for the uniform datapath count as ordinary forms."""
    counts = Counter[str]()
    for mnemonic, count in (report.sass or {}).items():
        counts[class_of(mnemonic) or "other"] += count
    return {name: counts[name] for name in (*CLASSES, "other")}


def _pairs(before: Mapping[str, Any], after: Mapping[str, Any], absent: Any = None) -> dict[str, tuple[Any, Any]]:
    """Return the values that differ."""
    pairs = {name: (before.get(name, absent), after.get(name, absent)) for name in {**before, **after}}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _changed_loops(before: Sequence[Loop], after: Sequence[Loop]) -> tuple[tuple[Loop | None, Loop | None], ...]:
    """Match loops in order and return the pairs that differ in more than addresses and places."""

    def content(loop: Loop) -> tuple[Any, ...]:
        return loop.depth, loop.instructions, loop.is_spin, tuple(loop.waits.items()), tuple(loop.classes.items())

    contents = [[content(loop) for loop in loops] for loops in (before, after)]
    matcher = SequenceMatcher(None, contents[0], contents[1], autojunk=False)
    pairs: list[tuple[Loop | None, Loop | None]] = []
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        if tag != "equal":
            pairs += zip_longest(before[i1:i2], after[j1:j2])
    return tuple(pairs)


def _changes(before: KernelReport, after: KernelReport) -> tuple[tuple[Change, ...], int]:
    """Return the changed places of the code, and the number of other instructions with changed operands."""
    first, second = ([s for s in r.code.steps if s.mnemonic != "NOP"] if r.code else [] for r in (before, after))
    changes, operands = [], 0
    for i1, i2, j1, j2 in _hunks(first, second):
        if [_form(step) for step in first[i1:i2]] == [_form(step) for step in second[j1:j2]]:
            pairs = zip(first[i1:i2], second[j1:j2], strict=True)
            operands += sum(_operands(old) != _operands(new) for old, new in pairs)
            continue
        counts = Counter(step.opcode for step in second[j1:j2])
        counts.subtract(step.opcode for step in first[i1:i2])
        old, new = first[i1] if i1 < len(first) else None, second[j1] if j1 < len(second) else None
        changes.append(
            Change(
                before=old.address if old else None,
                after=new.address if new else None,
                places_before=old.places if old else (),
                places_after=new.places if new else (),
                opcodes={opcode: count for opcode, count in sorted(counts.items()) if count},
            )
        )
    return tuple(changes), operands


def _hunks(first: list[Step], second: list[Step]) -> Iterator[tuple[int, int, int, int]]:
    """Yield ranges of both builds that correspond to each other. Compare blocks first, for speed."""
    before, after = _blocks(first), _blocks(second)
    forms = [tuple(map(_form, first[begin:end])) for begin, end in before]
    others = [tuple(map(_form, second[begin:end])) for begin, end in after]
    for tag, a1, a2, b1, b2 in SequenceMatcher(None, forms, others, autojunk=False).get_opcodes():
        i1, i2 = _extent(before, a1, a2, len(first))
        j1, j2 = _extent(after, b1, b2, len(second))
        if tag == "equal" or (i2 - i1) * (j2 - j1) > _MAX_PRODUCT:
            yield i1, i2, j1, j2
            continue
        inner = SequenceMatcher(None, list(map(_form, first[i1:i2])), list(map(_form, second[j1:j2])), autojunk=False)
        for _, k1, k2, l1, l2 in inner.get_opcodes():
            yield i1 + k1, i1 + k2, j1 + l1, j1 + l2


def _blocks(steps: list[Step]) -> list[tuple[int, int]]:
    """Return the ranges of steps that end with a jump."""
    ends = [index + 1 for index, step in enumerate(steps) if step.mnemonic in _JUMPS]
    ends += [len(steps)] if steps and (not ends or ends[-1] < len(steps)) else []
    return list(zip([0, *ends], ends, strict=False))


def _extent(blocks: list[tuple[int, int]], begin: int, end: int, size: int) -> tuple[int, int]:
    start = blocks[begin][0] if begin < len(blocks) else size
    return start, blocks[end - 1][1] if end > begin else start


def _form(step: Step) -> tuple[str, bool]:
    """Return an instruction without its registers, constants and addresses."""
    return step.opcode, bool(step.predicate)


def _operands(step: Step) -> tuple[str, str]:
    return step.predicate, _LABEL.sub("label", step.operands)


def _shown(kernel: KernelDifference) -> list[str]:
    lines = [kernel.name]
    for title, pairs in (("", kernel.values), ("instructions", kernel.classes), ("instructions", kernel.mnemonics)):
        lines += [f"  {title}" for _ in [0] if title and pairs and f"  {title}" not in lines]
        indent = "    " if title else "  "
        lines += [f"{indent}{name:<24} {old} -> {new}" for name, (old, new) in pairs.items()]
    if kernel.loops:
        lines.append("  loops")
        for old, new in kernel.loops:
            lines += [f"    {sign} {_loop(loop)}" for sign, loop in (("-", old), ("+", new)) if loop]
    if kernel.changes:
        lines.append("  changed code")
    for change in kernel.changes[:_SHOWN_CHANGES]:
        addresses = " -> ".join("end" if at is None else f"{at:#06x}" for at in (change.before, change.after))
        places = dict.fromkeys(shown_places(places) for places in (change.places_before, change.places_after) if places)
        place = f" ({' -> '.join(places)})" if places else ""
        opcodes = ", ".join(f"{count:+} {opcode}" for opcode, count in change.opcodes.items()) or "different order"
        lines += textwrap.wrap(f"{addresses}{place}: {opcodes}", 116, initial_indent="    ", subsequent_indent="      ")
    if (rest := len(kernel.changes) - _SHOWN_CHANGES) > 0:
        lines.append(f"    and {rest} more places, which --json lists")
    if kernel.operands:
        lines.append(f"  {kernel.operands} other instructions have different registers, constants or addresses")
    if kernel.is_code_changed:
        lines.append("  the code differs; the instructions are not compared, because one build has no SASS")
    return lines


def _loop(loop: Loop) -> str:
    words = [f"{loop.instructions} instructions", *(f"{count} {name}" for name, count in loop.classes.items())]
    waits = ", ".join(f"{what} {count}" for what, count in loop.waits.items()) or "nothing"
    return f"{loop.first:#06x} .. {loop.last:#06x}: {', '.join(words)}; waits for: {waits}"
