"""``cudatma.inspect``: a tensor map, wherever it is, explained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from cudatma.descriptor.bits import BitRange, Comparison, Evidence, compare, explain
from cudatma.descriptor.codec import Decoded, decode, encode
from cudatma.descriptor.spec import AnySpec, Im2colWideSpec
from cudatma.errors import DescriptorError
from cudatma.inspection.fields import WIDE_NOTE, describe_config, describe_derived, headline
from cudatma.inspection.reading import content_of
from cudatma.target import Target, get_target

if TYPE_CHECKING:
    from cudatma.inspection.access import AccessReport
    from cudatma.inspection.lint import Lint
    from cudatma.inspection.placement import Element, Placement


def inspect(source: object, *, device: int | None = None) -> Inspection:
    """A tensor map, explained: print it, or let a notebook show it.

    source: a TensorMap or a spec; its 128 bytes as bytes, ctypes object, or an array on the host or on a GPU (CuPy,
    torch, NumPy); text as ``cudatma inspect`` reads it; or a device pointer (int) with ``device``, the CUDA ordinal of
    its memory. Memory of a GPU is copied once, after its work is done.

    Raises DescriptorError where the bytes are no tensor map, ArgumentError, ArgumentTypeError, and DriverError where a
    GPU's memory cannot be read.
    """
    content = content_of(source, device)
    if isinstance(content, bytes):
        return Inspection(content)
    return Inspection(None if isinstance(content, Im2colWideSpec) else encode(content), content)


class Inspection:
    """One tensor map; make it with inspect().

    data: its 128 bytes, None for an im2col wide spec, whose bytes only a driver of sm_100 and up knows. spec: what they
    describe.
    """

    def __init__(self, data: bytes | None, spec: AnySpec | None = None) -> None:
        self.data = data
        self._decoded: Decoded | None = None if data is None else decode(data)
        found = spec if self._decoded is None else self._decoded.spec
        if found is None:
            raise DescriptorError("source", None, "128 bytes or a spec")
        self.spec: AnySpec = found

    @property
    def fields(self) -> dict[str, Any]:
        """Plain data, as ``cudatma inspect --json`` prints it."""
        derived = describe_derived(self._decoded) if self._decoded is not None else {}
        return describe_config(self.spec) | derived

    @property
    def bits(self) -> tuple[BitRange, ...]:
        """All 1024 bits by name; empty where there are no bytes."""
        return explain(self.data) if self.data is not None else ()

    def at(self, coords: Sequence[int], offsets: Sequence[int] | None = None) -> AccessReport:
        """What a load, a store or a reduction at coordinates does (TMA order); offsets: im2col, W first."""
        from cudatma.inspection.access import access_at

        return access_at(self.spec, coords, offsets)

    def place(
        self, coords: Sequence[int] | None = None, offsets: Sequence[int] | None = None, *, base: int = 0
    ) -> Placement:
        """Where each element of a box lands; by default of the first box, at shared address 0."""
        from cudatma.inspection.placement import Placement

        return Placement(self.spec, coords, offsets, base)

    def lint(self, *, target: Target | str | None = None) -> Lint:
        """Risks of the map; target: the architecture to judge it for. TargetError for an unknown one."""
        from cudatma.inspection.lint import lint

        return lint(self.spec, self._decoded, None if target is None else get_target(target))

    def compare(self, other: object) -> Comparison:
        """This map against another one, bit for bit. other: any source that inspect() takes. Raises as inspect() does,
        and DescriptorError where one of the two has no bytes."""
        theirs = other if isinstance(other, Inspection) else inspect(other)
        if self.data is None or theirs.data is None:
            raise DescriptorError("source", "an im2col wide spec", "maps that have bytes", WIDE_NOTE)
        return compare(self.data, theirs.data, ("A", "B"))

    def svg(
        self,
        coords: Sequence[int] | None = None,
        offsets: Sequence[int] | None = None,
        *,
        base: int = 0,
        element: tuple[int, int] | None = None,
        theme: str = "auto",
    ) -> str:
        """The picture of a box: in the tensor, in shared memory, and its banks.

        coords, offsets, base: as place(). element: (r, c) that is outlined, row and index in the box.
        theme: ``"auto"``, ``"light"`` or ``"dark"``. ArgumentError for another
        one, DescriptorError where there is nothing to draw.
        """
        from cudatma.inspection.picture import picture

        placed = self.place(coords, offsets, base=base)
        return picture(placed, theme, self._mark(placed, element))

    def html(
        self,
        coords: Sequence[int] | None = None,
        offsets: Sequence[int] | None = None,
        *,
        base: int = 0,
        element: tuple[int, int] | None = None,
        theme: str = "auto",
        target: Target | str | None = None,
    ) -> str:
        """A document with the picture, the fields, what accesses do, risks and all bits; arguments as in svg() and
        lint()."""
        from cudatma.inspection import page

        parts = self._parts(coords, offsets, base, element, theme, target)
        parts.append(("Every bit", page.table(self._bit_rows(), ("bits", "field", "value", "known from", ""))))
        return page.page(headline(self.spec), parts, theme)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from cudatma.inspection import page

        return page.fragment(self._parts(None, None, 0, None, "auto", None), "auto")

    def _parts(
        self,
        coords: Sequence[int] | None,
        offsets: Sequence[int] | None,
        base: int,
        element: tuple[int, int] | None,
        theme: str,
        target: Target | str | None,
    ) -> list[tuple[str, str]]:
        from cudatma.inspection import page
        from cudatma.inspection.access import access_lines
        from cudatma.inspection.picture import check_theme
        from cudatma.inspection.placement import origin

        check_theme(theme)
        parts: list[tuple[str, str]] = []
        try:
            parts.append(("", self.svg(coords, offsets, base=base, element=element, theme=theme)))
        except DescriptorError as error:
            parts.append((headline(self.spec), page.table([("no picture", str(error))])))
        place = origin(self.spec) if coords is None else coords
        report = self.at(place, offsets)
        shown = ", ".join(map(str, place))
        parts.append((f"An access at ({shown})", page.table(access_lines(self.spec, report))))
        findings = self.lint(target=target).findings
        rows = [(f.severity, f"{f.name}: {f.message}\n{f.rule} [{f.source}]\n{f.remedy}") for f in findings]
        parts.append(("Risks", page.table(rows) if rows else "none found"))
        parts.append(("Fields", page.table(self.rows())))
        return parts

    def _mark(self, placed: Placement, element: tuple[int, int] | None) -> Element | None:
        return None if element is None else placed.element(*element)

    def rows(self) -> list[tuple[str, str]]:
        """Names and values of the fields, as a table shows them."""
        shown = {name: value for name, value in self.fields.items() if value is not None}
        return [(name, cell(name, value)) for name, value in shown.items()]

    def _bit_rows(self) -> list[tuple[str, ...]]:
        return [
            (part.place, part.name, f"{part.value:#x}", part.evidence.value, part.note)
            for part in self.bits
            if part.value or part.evidence is not Evidence.UNKNOWN or part.note
        ]

    def to_json(self) -> dict[str, Any]:
        """The fields and, under ``"bits"``, every bit."""
        parts = [asdict(part) | {"evidence": part.evidence.value} for part in self.bits]
        return self.fields | {"bits": parts}

    def __repr__(self) -> str:
        width = max(len(name) for name, _ in self.rows())
        lines = [f"  {name:<{width}}  {value}" for name, value in self.rows()]
        return "\n".join([headline(self.spec), *lines])


def cell(name: str, value: Any) -> str:
    """A value as a table shows it."""
    if name == "address":
        return hex(value)
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value)
