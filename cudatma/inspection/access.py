"""Report what an access at given coordinates does: bytes, fill values, clipping, or a trap.

The rules are defined in descriptor.access. The emulator computes the geometry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from cudatma.descriptor.access import (
    REDUCE_TYPES,
    check_load,
    check_reduce,
    check_store,
    check_traps,
    check_write_traps,
)
from cudatma.descriptor.rules import OobFill
from cudatma.descriptor.spec import AnySpec, Im2colWideSpec
from cudatma.errors import DescriptorError, counted
from cudatma.inspection.fields import WIDE_NOTE
from cudatma.inspection.placement import Placement, check_size

#: Maximum number of overwritten rows in a report.
MAX_ROWS = 16
_TRAPS = "traps with an illegal instruction, which destroys the context"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Reason why an access is illegal: the field, the violated rule and the effect of the access."""

    field: str
    rule: str
    effect: str


@dataclass(frozen=True, slots=True)
class Overwrite:
    """Bytes that a store writes past the end of a box row. ``first_offset`` is relative to the tensor's base."""

    row: int
    coords: tuple[int, ...]
    first_offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class AccessReport:
    """Effects of a load, a store and reductions at given coordinates. ``str()`` returns them as text.

    Parameters
    ----------
    coords, offsets : tuple of int
        Coordinates in TMA order, and im2col offsets, W first.
    load_refusal, store_refusal : Refusal or None
        Reason why a load or a store is illegal, or None if it is legal.
    expected_bytes : int
        Number of bytes by which a load advances the mbarrier's transaction count.
    footprint_bytes : int
        Number of bytes of shared memory that the box occupies.
    elements, inside, outside : int or None
        Number of elements of the box in total, inside the tensor, and outside it.
    fill : str or None
        Fill value of the elements outside the tensor, or None if all elements are inside.
    gmem_range : tuple of int or None
        Offsets from the tensor's base of the first byte read and of the byte after the last, or None if the box is
        outside the tensor.
    stored : int or None
        Number of elements that a store writes. Im2col offsets do not apply to stores.
    overwrites : tuple of Overwrite
        Bytes that a store writes past the ends of rows, for at most MAX_ROWS rows.
    overwritten_rows, overwritten_bytes : int
        Total number of rows and bytes that a store overwrites.
    reductions : tuple of str
        Legal reductions for the element type.
    note : str
        Limitation of the report, or "".
    """

    coords: tuple[int, ...]
    offsets: tuple[int, ...]
    load_refusal: Refusal | None
    store_refusal: Refusal | None
    expected_bytes: int
    footprint_bytes: int
    elements: int | None
    inside: int | None
    outside: int | None
    fill: str | None
    gmem_range: tuple[int, int] | None
    stored: int | None
    overwrites: tuple[Overwrite, ...]
    overwritten_rows: int
    overwritten_bytes: int
    reductions: tuple[str, ...]
    note: str = ""

    @property
    def is_clean(self) -> bool:
        """Whether loads and stores are legal, and a store writes only inside the tensor."""
        return self.load_refusal is None and self.store_refusal is None and not self.overwritten_bytes

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON-compatible data."""
        return asdict(self) | {"is_clean": self.is_clean}

    def __str__(self) -> str:
        lines = [f"access at ({', '.join(map(str, self.coords))})"]
        return "\n".join([*lines, *(f"  {kind:<12}{text}" for kind, text in access_lines(self))])


def access_at(spec: AnySpec, coords: Sequence[int], offsets: Sequence[int] | None = None) -> AccessReport:
    """Return the effect of accesses at ``coords``.

    ``offsets`` applies only to im2col loads, W first. Raises DescriptorError if ``coords`` or ``offsets`` has the wrong
    length or contains a value that is not an integer.
    """
    place = _well_formed(spec, coords, offsets)
    load = _refusal(lambda: check_load(spec, place, offsets), lambda: check_traps(spec, place))
    store = _refusal(lambda: _check_direction(spec, place), lambda: check_write_traps(spec, place))
    try:
        check_size(spec)
    except DescriptorError as error:
        load = store = Refusal(error.field, _rule(error), "the box exceeds the shared memory of a block")
    box = None
    if load is None and not isinstance(spec, Im2colWideSpec):
        box = Placement(spec, place, offsets).box
    elements = inside = outside = None
    span = None
    if box is not None:
        bits = spec.dtype.element_bits
        elements = box.valid.size * box.unit_bytes * 8 // bits
        inside = int(box.valid.sum()) * 8 // bits
        outside = elements - inside
        held = box.valid > 0
        span = (int(box.gmem[held].min()), int((box.gmem + box.valid)[held].max())) if held.any() else None
    target = None if store is not None or isinstance(spec, Im2colWideSpec) else Placement(spec, place)
    rows, overwrites = (0, []) if target is None else _overwrites(target)
    return AccessReport(
        place,
        tuple(offsets or ()),
        load,
        store,
        spec.expected_bytes,
        spec.footprint_bytes,
        elements,
        inside,
        outside,
        ("NaN, 0x7FF7 in every 16 bits" if spec.oob_fill is OobFill.NAN else "zeros") if outside else None,
        span,
        None if target is None else int(target.box.valid.sum()) * 8 // spec.dtype.element_bits,
        tuple(overwrites[:MAX_ROWS]),
        rows,
        sum(part.size_bytes for part in overwrites),
        () if store is not None else _reductions(spec, place),
        WIDE_NOTE if isinstance(spec, Im2colWideSpec) else "",
    )


def _well_formed(spec: AnySpec, coords: Sequence[int], offsets: Sequence[int] | None) -> tuple[int, ...]:
    """Return the coordinates as ints.

    Raises DescriptorError if they cannot be operands of an instruction. If the instruction would trap, the function
    returns normally, and the report describes the trap.
    """
    try:
        check_load(spec, coords, offsets)
    except DescriptorError as error:
        if error.field == "coords" or "integer" in error.allowed or error.field.startswith("offsets"):
            raise
    return tuple(int(c) for c in coords)


def _rule(error: DescriptorError) -> str:
    return str(type(error)(error.field, error.got, error.allowed))


def _refusal(check: Callable[[], object], trap: Callable[[], object]) -> Refusal | None:
    """Return the rule that an access violates according to ``check``, or None.

    If ``trap`` also raises an error, measurements show that the access traps.
    """
    try:
        check()
    except DescriptorError as error:
        try:
            trap()
        except DescriptorError:
            return Refusal(error.field, _rule(error), _TRAPS)
        return Refusal(error.field, _rule(error), "illegal according to NVIDIA's documentation")
    return None


def _check_direction(spec: AnySpec, place: Sequence[int]) -> None:
    """Run check_store() but ignore its rule about the end of a row, which the report describes separately."""
    check_write_traps(spec, place)
    try:
        check_store(spec, place)
    except DescriptorError as error:
        if error.field != "dims[0]":
            raise


def _overwrites(placed: Placement) -> tuple[int, list[Overwrite]]:
    """Return the number of rows that a store overruns, and the bytes that it overwrites after each row."""
    box = placed.box
    past = np.where((box.valid > 0) & (box.valid < box.unit_bytes), box.unit_bytes - box.valid, 0)
    rows = np.nonzero(past.any(axis=1))[0].tolist()
    overwrites: list[Overwrite] = []
    for row in rows:
        chunk = int(np.nonzero(past[row])[0][0])
        end = int(box.gmem[row, chunk] + box.valid[row, chunk])
        coords = placed.row_coords(row) if len(overwrites) < MAX_ROWS else ()
        overwrites.append(Overwrite(row, coords, end, int(past[row].sum())))
    return len(rows), overwrites


def _reductions(spec: AnySpec, place: Sequence[int]) -> tuple[str, ...]:
    """Return the reductions for the element type, including those that are illegal only because of 16-byte clipping."""
    legal = []
    for op in REDUCE_TYPES:
        try:
            check_reduce(spec, op, place)
        except DescriptorError as error:
            if error.field != "dims[0]":
                continue
        legal.append(op)
    return tuple(legal)


def access_lines(report: AccessReport, address: int | None = None) -> list[tuple[str, str]]:
    """Return a report as pairs of the kind of access and a description.

    ``address`` is the address of the tensor. If it is None, the descriptions contain offsets from the tensor's base.
    """

    def place(offset: int) -> str:
        return f"byte {offset}" if address is None else f"{(address + offset) % (1 << 64):#x}"

    lines = []
    if report.load_refusal is not None:
        lines.append(("load", f"{report.load_refusal.effect}: {report.load_refusal.rule}"))
    else:
        text = f"the mbarrier counts {report.expected_bytes} bytes; the box occupies {report.footprint_bytes} bytes"
        lines.append(("load", text))
        if report.elements is not None:
            where = f"{report.inside} of {counted(report.elements, 'element')} are inside the tensor"
            where += f"; the other {report.outside} are filled with {report.fill}" if report.outside else ""
            lines.append(("", where))
        if report.gmem_range is not None:
            low, high = map(place, report.gmem_range)
            what = "bytes" if address is None else "addresses"
            lines.append(("", f"the load reads {what} {low.removeprefix('byte ')} to {high.removeprefix('byte ')}"))
    if report.store_refusal is not None:
        lines.append(("store", f"{report.store_refusal.effect}: {report.store_refusal.rule}"))
    else:
        lines.append(("store", _store_line(report)))
        for part in report.overwrites[:3]:
            size, first = counted(part.size_bytes, "byte"), place(part.first_offset)
            lines.append(("", f"row {part.row}: {size} after the end of the row, from {first}"))
        if report.overwritten_rows > 3:
            lines.append(
                ("", f"in total, {report.overwritten_bytes} bytes in {counted(report.overwritten_rows, 'row')}")
            )
        lines.append(("reductions", ", ".join(report.reductions) or "none for this element type"))
    return [*lines, *([("note", report.note)] if report.note else [])]


def _store_line(report: AccessReport) -> str:
    if report.overwritten_bytes:
        bytes_past = counted(report.overwritten_bytes, "byte")
        return f"overwrites {bytes_past} outside the tensor, because the hardware clips rows in units of 16 bytes"
    if report.stored is None:
        return "writes the box"
    if not report.stored:
        return "writes nothing, because the box is outside the tensor"
    clipped = (report.elements or report.stored) - report.stored
    return f"writes {counted(report.stored, 'element')}" + (
        f" and clips {counted(clipped, 'element')} outside the tensor" if clipped else ""
    )
