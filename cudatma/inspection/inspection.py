"""The function ``cudatma.inspect``, which explains a tensor map, and the class Inspection, its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from cudatma.descriptor.bits import BitRange, Comparison, Evidence, compare, explain
from cudatma.descriptor.codec import Decoded, decode, encode
from cudatma.descriptor.spec import AnySpec, Im2colWideSpec
from cudatma.errors import DescriptorError
from cudatma.inspection.fields import describe_config, describe_derived, headline
from cudatma.inspection.reading import content_of
from cudatma.target import Target, get_target

if TYPE_CHECKING:
    from cudatma.inspection.access import AccessReport
    from cudatma.inspection.lint import Lint
    from cudatma.inspection.placement import Element, Placement


def inspect(source: object, *, device: int | None = None) -> Inspection:
    """Explain a tensor map.

    Parameters
    ----------
    source : object
        One of the following. If the map is in GPU memory, the function synchronizes the GPU and copies the map once.

        - a TensorMap or its spec
        - the 128 bytes as bytes, a ctypes object, or a CuPy, torch or NumPy array
        - text in a format that ``cudatma inspect`` reads
        - a device pointer (int), together with ``device``
    device : int, optional
        CUDA ordinal of the device that holds the memory at a device pointer.

    Returns
    -------
    Inspection
        Explanation, which can be printed or displayed in a notebook.

    Raises
    ------
    DescriptorError
        If the bytes are not a tensor map.
    ArgumentError, ArgumentTypeError
        If the type of the source is not supported, or if ``device`` is missing or superfluous.
    DriverError
        If GPU memory cannot be read.

    Examples
    --------
    >>> x = np.zeros((512, 1024), np.float16)
    >>> tensor_map = cudatma.TensorMap.from_array(x, box=(128, 64), swizzle="128B")
    >>> info = cudatma.inspect(bytes(tensor_map))
    >>> info.fields["box"], info.fields["swizzle"]
    ([64, 128], '128B')
    >>> info.place().element(1, 0).smem_address
    144
    """
    content = content_of(source, device)
    if isinstance(content, bytes):
        return Inspection(content)
    return Inspection(None if isinstance(content, Im2colWideSpec) else encode(content), content)


class Inspection:
    """Explanation of a tensor map, returned by ``cudatma.inspect``.

    Parameters
    ----------
    data : bytes or None
        The 128 bytes, or None for an im2col wide map, which only a driver for sm_100 or later can encode.
    spec : TiledSpec, Im2colSpec or Im2colWideSpec, optional
        Specification of a map without bytes.
    """

    def __init__(self, data: bytes | None, spec: AnySpec | None = None) -> None:
        self.data = data
        self._decoded: Decoded | None = None if data is None else decode(data)
        described = spec if self._decoded is None else self._decoded.spec
        if described is None:
            raise DescriptorError("source", None, "a tensor map of 128 bytes or a spec")
        self.spec: AnySpec = described

    @property
    def fields(self) -> dict[str, Any]:
        """Fields as the plain data that ``cudatma inspect --json`` prints."""
        derived = describe_derived(self._decoded) if self._decoded is not None else {}
        return describe_config(self.spec) | derived

    @property
    def bits(self) -> tuple[BitRange, ...]:
        """All 1024 bits by field, or an empty tuple if the bytes of the map are unknown."""
        return explain(self.data) if self.data is not None else ()

    def at(self, coords: Sequence[int], offsets: Sequence[int] | None = None) -> AccessReport:
        """Return the effect of a load, store or reduction at given coordinates.

        Parameters
        ----------
        coords : sequence of int
            Coordinates of the box in TMA order, innermost first.
        offsets : sequence of int, optional
            Im2col offsets, W first.

        Returns
        -------
        AccessReport
            Transferred bytes, elements outside the tensor, clipping, or a trap.

        Raises
        ------
        DescriptorError
            If the number of coordinates or offsets is wrong, or if a value is not an integer.
        """
        from cudatma.inspection.access import access_at

        return access_at(self.spec, coords, offsets)

    def place(
        self, coords: Sequence[int] | None = None, offsets: Sequence[int] | None = None, *, base: int = 0
    ) -> Placement:
        """Return each box element's position in the tensor and in shared memory.

        Parameters
        ----------
        coords : sequence of int, optional
            Coordinates of the box in TMA order. Default: the first coordinates at which a box can be loaded.
        offsets : sequence of int, optional
            Im2col offsets, W first.
        base : int, default: 0
            Shared-memory address of the box. It must be a multiple of 128.

        Returns
        -------
        Placement
            Layout of the box.

        Raises
        ------
        DescriptorError
            If the access is illegal.
        ArgumentError
            If ``base`` is not a multiple of 128.
        """
        from cudatma.inspection.placement import Placement

        return Placement(self.spec, coords, offsets, base)

    def lint(self, *, target: Target | str | None = None) -> Lint:
        """Find probable mistakes in the map.

        Parameters
        ----------
        target : Target or str, optional
            Architecture for which the map is checked. By default, all targets are considered, and only a map that no
            target supports is an error.

        Returns
        -------
        Lint
            Findings in descending order of severity.

        Raises
        ------
        TargetError
            If the target is unknown.
        """
        from cudatma.inspection.lint import lint

        return lint(self.spec, self._decoded, None if target is None else get_target(target))

    def compare(self, other: object) -> Comparison:
        """Compare this map with another one bit by bit.

        Parameters
        ----------
        other : object
            Any source that ``cudatma.inspect`` supports.

        Returns
        -------
        Comparison
            Fields that differ.

        Raises
        ------
        DescriptorError
            If the bytes of one of the maps are unknown.
        """
        theirs = other if isinstance(other, Inspection) else inspect(other)
        if self.data is None or theirs.data is None:
            raise DescriptorError(
                "source",
                "an im2col wide spec",
                "a map whose bytes are known",
                "pass the bytes of a map that the driver encoded",
            )
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
        """Draw the position of a box in the tensor and in the banks of shared memory.

        Parameters
        ----------
        coords, offsets, base : as in place
            Position of the box. See ``place``.
        element : tuple of int, optional
            (row, index) of the element to outline, which must be in the box. Default: none.
        theme : {"auto", "light", "dark"}, default: "auto"
            Color theme. "auto" follows the color scheme of the viewer.

        Returns
        -------
        str
            An SVG document.

        Raises
        ------
        ArgumentError
            If the theme is unknown.
        DescriptorError
            If the map is im2col wide or the access is illegal.
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
        """Return an HTML page with the picture, the fields, the effect of accesses, the findings and all bits.

        Parameters
        ----------
        coords, offsets, base, element, theme : as in svg
            Contents of the picture. See ``svg``.
        target : Target or str, optional
            Architecture for which the map is checked. See ``lint``.

        Returns
        -------
        str
            An HTML document.
        """
        from cudatma import pages

        parts = self._parts(coords, offsets, base, element, theme, target)
        parts.append(("All bits", pages.table(self._bit_rows(), ("bits", "field", "value", "evidence", ""))))
        return pages.document(headline(self.spec), pages.parts(parts), theme, script="map.js")

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook displays."""
        from cudatma import pages

        return pages.fragment(pages.parts(self._parts(None, None, 0, None, "auto", None)))

    def _parts(
        self,
        coords: Sequence[int] | None,
        offsets: Sequence[int] | None,
        base: int,
        element: tuple[int, int] | None,
        theme: str,
        target: Target | str | None,
    ) -> list[tuple[str, str]]:
        from cudatma import pages
        from cudatma.inspection.access import access_lines
        from cudatma.inspection.picture import check_theme
        from cudatma.inspection.placement import origin

        check_theme(theme)
        parts: list[tuple[str, str]] = []
        try:
            parts.append(("", pages.figure(self.svg(coords, offsets, base=base, element=element, theme=theme))))
        except DescriptorError as error:
            parts.append((headline(self.spec), pages.table([("no picture", str(error))])))
        place = origin(self.spec) if coords is None else coords
        report = self.at(place, offsets)
        shown = ", ".join(map(str, place))
        parts.append((f"An access at ({shown})", pages.table(access_lines(report, self.spec.address))))
        findings = self.lint(target=target).findings
        rows = [(f.severity, f"{f.name}: {f.message}\n{f.rule} [{f.source}]\n{f.remedy}") for f in findings]
        parts.append(("Risks", pages.table(rows) if rows else "none found"))
        parts.append(("Fields", pages.table(self.rows())))
        return parts

    def _mark(self, placed: Placement, element: tuple[int, int] | None) -> Element | None:
        return None if element is None else placed.element(*element)

    def rows(self) -> list[tuple[str, str]]:
        """Return the fields as table rows.

        Returns
        -------
        list of tuple
            (name, value) of each field, as text.
        """
        shown = {name: value for name, value in self.fields.items() if value is not None}
        return [(name, cell(name, value)) for name, value in shown.items()]

    def _bit_rows(self) -> list[tuple[str, ...]]:
        return [
            (part.place, part.name, f"{part.value:#x}", part.evidence.value, part.note)
            for part in self.bits
            if part.value or part.evidence is not Evidence.UNKNOWN or part.note
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the fields and all bits as JSON-compatible data.

        Returns
        -------
        dict
            The fields, and all bits under the key ``"bits"``.
        """
        parts = [asdict(part) | {"evidence": part.evidence.value} for part in self.bits]
        return self.fields | {"bits": parts}

    def __repr__(self) -> str:
        width = max(len(name) for name, _ in self.rows())
        lines = [f"  {name:<{width}}  {value}" for name, value in self.rows()]
        return "\n".join([headline(self.spec), *lines])


def cell(name: str, value: Any) -> str:
    """Return a value as the text of a table cell."""
    if name == "address":
        return hex(value)
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value)
