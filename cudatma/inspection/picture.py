"""A box in the tensor and in shared memory, cell by cell: which element lands where, in which banks, and what is
padding.

A cell is 16 bytes. Its colour is that of the four banks it lands in, in both pictures: cells of one colour in a column
of the left one are bank conflicts of a column read.
"""

from __future__ import annotations

from cudatma.descriptor.spec import TiledSpec
from cudatma.errors import counted
from cudatma.inspection.banks import ReadCost, read_costs
from cudatma.inspection.drawing import Drawing, check_theme
from cudatma.inspection.fields import headline
from cudatma.inspection.minimap import draw_minimap
from cudatma.inspection.placement import CHUNK, Element, Placement
from cudatma.layout import BANK_BYTES, BANKS, Interleave

WIDTH, MARGIN = 1040, 28
LEFT_LABEL, LEFT_CELLS, RIGHT_LABEL, RIGHT_CELLS = 28, 124, 556, 616
CELL, ROW, GRID_WIDTH = 49, 23, 392
#: Rows of a box and lines of shared memory that are drawn at most.
MOST_ROWS, MOST_LINES, MOST_COLUMNS = 16, 24, 16
LINE_BYTES = BANKS * BANK_BYTES
_GROUPS = LINE_BYTES // CHUNK
_READS = {
    "row": "along a row, an element for each lane",
    "column": "down a column, an element for each lane",
    "ldmatrix": "ldmatrix, 8 rows of 16 bytes",
}


def picture(placed: Placement, theme: str = "auto", mark: Element | None = None) -> str:
    """An SVG document. theme: ``"auto"`` follows the reader, ``"light"`` and ``"dark"`` are fixed. mark: an element
    that is outlined. ArgumentError for another theme."""
    return _Picture(placed, mark).draw(check_theme(theme))


class _Picture:
    """Draws downwards; ``y`` is where the next part begins."""

    def __init__(self, placed: Placement, mark: Element | None) -> None:
        self.placed, self.mark, self.out = placed, mark, Drawing()
        layout = placed.spec.box_layout
        self.pitch = layout.pitch_bytes if placed.spec.interleave is Interleave.NONE else placed.chunks * CHUNK
        most = max(1, min(MOST_ROWS, MOST_LINES * LINE_BYTES // max(1, self.pitch)))
        self.rows = min(placed.rows, most)
        self.columns = min(placed.chunks, MOST_COLUMNS)
        self.lines = min(MOST_LINES, -(-self.rows * self.pitch // LINE_BYTES))
        self.y = 0.0

    def draw(self, theme: str) -> str:
        spec, out = self.placed.spec, self.out
        title = headline(spec)
        out.text(MARGIN, 40, title[0].upper() + title[1:], "ink h", size=19)
        self._facts()
        self.y = 250
        bottom = max(self._tensor_grid(), self._shared_grid())
        self.y = bottom + 26
        self._reads(read_costs(spec, self.placed.base))
        self._legend()
        return out.document(WIDTH, self.y + 12, title, theme)

    # ---- what it is

    def _facts(self) -> None:
        spec, placed, out = self.placed.spec, self.placed, self.out
        draw_minimap(out, placed, MARGIN, 62, 270, 150)
        at = ", ".join(map(str, placed.coords))
        layout = spec.box_layout
        bytes_text = f"{spec.expected_bytes} counted by the mbarrier"
        if spec.footprint_bytes != spec.expected_bytes:
            bytes_text += f", {spec.footprint_bytes} in shared memory"
        facts = [
            ("address", f"{spec.address:#x}"),
            ("strides", ", ".join(map(str, spec.strides_bytes)) + " bytes" if spec.strides_bytes else "none"),
            ("box at", f"({at})" + (f", offsets {', '.join(map(str, placed.offsets))}" if any(placed.offsets) else "")),
            ("bytes", bytes_text),
            ("rows", f"{placed.rows} of {self.pitch if spec.interleave else layout.row_bytes} bytes"
             + (f", {self.pitch} apart" if self.pitch != layout.row_bytes and not spec.interleave else "")),
            ("alignment", f"{spec.smem_alignment_bytes} bytes, here at {placed.base:#x}"),
            ("outside", "NaN (0x7FF7 in every 16 bits)" if int(spec.oob_fill) else "zeros"),
        ]  # fmt: skip
        steps = [step for step in spec.element_strides if step > 1]
        if steps:
            facts.insert(3, ("steps", ", ".join(map(str, spec.element_strides))))
        if self.mark is not None:
            mark = self.mark
            text = f"({mark.row}, {mark.index}) lands at {mark.smem_address:#x}, bank {mark.bank}"
            facts.append(("element", text))
        for index, (name, value) in enumerate(facts):
            y = 78 + 20 * index
            out.text(336, y, name, "faint", size=12.5)
            out.text(424, y, value, "ink m", size=12)

    # ---- the two grids

    def _tensor_grid(self) -> float:
        out, placed = self.out, self.placed
        y, width = self.y, GRID_WIDTH / max(8, self.columns)
        out.text(LEFT_LABEL, y, "In the tensor", "ink h", size=14)
        out.text(LEFT_LABEL, y + 18, "A cell is 16 bytes; its number is its shared address.", "faint", size=11.5)
        y += 42
        out.text(LEFT_LABEL, y, "r", "faint m", size=11)
        out.text(LEFT_CELLS - 8, y, self._row_names(), "faint m", size=10, anchor="end")
        for column in range(self.columns):
            every = 1 if self.columns <= 8 else 2
            if column % every == 0:
                out.text(LEFT_CELLS + (column + 0.5) * width, y, self._index_text(column), "faint m", size=10.5,
                         anchor="middle")  # fmt: skip
        y += 8
        for row in range(self.rows):
            middle = y + ROW * row + 15
            out.text(LEFT_LABEL, middle, str(row), "ink m", size=11)
            out.text(LEFT_CELLS - 8, middle, self._row_text(row), "faint m", size=10, anchor="end")
            for column in range(self.columns):
                address = int(placed.box.smem[row, column])
                text = f"{address - placed.base:03x}" if width > 22 else ""
                self._cell(LEFT_CELLS + column * width, y + ROW * row, width, row, column, text)
        end = y + ROW * self.rows
        hidden = []
        if placed.rows > self.rows:
            hidden.append(counted(placed.rows - self.rows, "more row"))
        if placed.chunks > self.columns:
            hidden.append(f"{counted(placed.chunks - self.columns, 'more cell')} in each row")
        return self._more(LEFT_CELLS, end, " and ".join(hidden))

    def _shared_grid(self) -> float:
        out, placed = self.out, self.placed
        y = self.y
        out.text(RIGHT_LABEL, y, "In shared memory", "ink h", size=14)
        out.text(
            RIGHT_LABEL,
            y + 18,
            "A line is 128 bytes; a cell shows (r, c) of its first element.",
            "faint",
            size=11.5,
        )
        y += 42
        out.text(RIGHT_CELLS - 8, y, "banks", "faint", size=10, anchor="end")
        for group in range(_GROUPS):
            text = f"{4 * group}–{4 * group + 3}"
            out.text(RIGHT_CELLS + (group + 0.5) * CELL, y, text, "faint m", size=10.5, anchor="middle")
        y += 8
        held = {
            int(placed.box.smem[row, column]): (row, column)
            for row in range(self.rows)
            for column in range(placed.chunks)
        }
        end_of_rows = placed.base + self.rows * self.pitch
        for line in range(self.lines):
            start = placed.base + LINE_BYTES * line
            out.text(RIGHT_CELLS - 8, y + ROW * line + 15, f"{start:#x}", "faint m", size=10.5, anchor="end")
            for group in range(_GROUPS):
                x, address = RIGHT_CELLS + group * CELL, start + CHUNK * group
                if address in held:
                    row, column = held[address]
                    text = f"{row},{self._index_text(column)}"
                    self._cell(x, y + ROW * line, CELL, row, column, text)
                elif address < end_of_rows:
                    self.out.begin(
                        f"padding at {address:#x}: rows are {self.pitch} bytes apart; nothing is written here"
                    )
                    hatch = 'fill="url(#cudatma-hatch)"'
                    out.rect(x + 1, y + ROW * line + 1, CELL - 2, ROW - 2, "s-rule", radius=3, more=hatch)
                    out.end()
        rest = placed.spec.footprint_bytes - self.lines * LINE_BYTES
        return self._more(RIGHT_CELLS, y + ROW * self.lines, counted(rest, "more byte") if rest > 0 else "")

    def _more(self, x: float, y: float, text: str) -> float:
        if not text:
            return y
        self.out.text(x + 4, y + 16, f"⋯ {text}", "faint", size=11.5)
        return y + 20

    def _cell(self, x: float, y: float, width: float, row: int, column: int, text: str) -> None:
        """One chunk: its colour is its banks; what is outside of the tensor, or is clipped, is marked."""
        out, box = self.out, self.placed.box
        valid, unit = int(box.valid[row, column]), box.unit_bytes
        group = int(box.smem[row, column]) // CHUNK % _GROUPS
        out.begin(self._title(row, column), classes="out" if valid == 0 else "", key=f"{row},{column}")
        dash = 'stroke-dasharray="3 2"' if valid == 0 else ""
        out.rect(x + 1, y + 1, width - 2, ROW - 2, f"b{group} s-rule", radius=3, more=dash)
        if 0 < valid < unit:
            inside = (width - 2) * valid / unit
            clip = 'fill="url(#cudatma-clip)"'
            out.rect(x + 1 + inside, y + ROW - 4, width - 2 - inside, 3, "", more=clip)
        if text:
            size = 10.5 if 7 * len(text) < width else 9.5 if 6.5 * len(text) < width else 8.5
            out.text(x + width / 2, y + 15, text, "ink m", size=size, anchor="middle")
        if self.mark is not None and self.mark.row == row and self.mark.index // self.placed.chunk_elems == column:
            out.rect(x + 1, y + 1, width - 2, ROW - 2, "clear s-ink", radius=3, more='stroke-width="2.5"')
        out.end()

    def _title(self, row: int, column: int) -> str:
        """What the pointer shows."""
        placed, box = self.placed, self.placed.box
        first = placed.element(row, column * placed.chunk_elems)
        last = first.index + placed.chunk_elems - 1
        valid, address = int(box.valid[row, column]), int(box.smem[row, column])
        size = placed.spec.dtype.element_bits
        where = (placed.spec.address + first.gmem_offset) % (1 << 64)
        lines = [
            f"elements ({row}, {first.index}) to ({row}, {last}), coordinates ({', '.join(map(str, first.coords))})",
            f"global {where:#x}, {first.gmem_offset} bytes from the tensor's base",
            f"shared {address:#x}, banks {address // 4 % BANKS} to {address // 4 % BANKS + 3}",
        ]
        if size >= 8:
            lines.append(f"element ({row}, {first.index} + i) at {address:#x} + {size // 8} i")
        if valid == 0:
            lines.append("outside of the tensor: loads fill it, stores leave it out")
        elif valid < box.unit_bytes:
            lines.append(
                f"{valid} bytes in the tensor: loads fill the rest, stores overwrite {box.unit_bytes - valid} bytes"
            )
        return "\n".join(lines)

    # ---- names

    def _index_text(self, column: int) -> str:
        return str(column * self.placed.chunk_elems)

    def _row_names(self) -> str:
        spec = self.placed.spec
        if isinstance(spec, TiledSpec):
            return ",".join(f"c{axis}" for axis in range(1, spec.rank))
        return ",".join(("w", "h", "d")[: spec.rank - 2]) + ",n"

    def _row_text(self, row: int) -> str:
        spec, coords = self.placed.spec, self.placed.row_coords(row)
        if isinstance(spec, TiledSpec):
            shown = coords[1:]
        else:
            first = 0 if spec.interleave is not Interleave.NONE else 1
            shown = (*coords[first : first + spec.rank - 2], coords[-1])
        return ",".join(map(str, shown))

    # ---- below

    def _reads(self, costs: tuple[ReadCost, ...]) -> None:
        out = self.out
        if not costs:
            return
        out.line(MARGIN, self.y - 12, WIDTH - MARGIN, self.y - 12, "s-rule")
        out.text(MARGIN, self.y + 12, "What a warp pays to read it", "ink h", size=14)
        out.text(330, self.y + 12, "A square is a wavefront; the red ones are bank conflicts.", "faint", size=11.5)
        self.y += 24
        for cost in costs:
            out.text(MARGIN, self.y + 12, _READS[cost.pattern], "ink", size=12)
            for index in range(cost.wavefronts):
                kind = "good" if index < cost.least else "bad"
                out.rect(330 + 13 * index, self.y + 2, 11, 11, kind, radius=2)
            text = "free of conflicts" if cost.ways <= 1 else f"{cost.ways:g}-way conflicts"
            word = "wavefront" if cost.wavefronts == 1 else "wavefronts"
            out.text(342 + 13 * cost.wavefronts, self.y + 12, f"{cost.wavefronts} {word}, {text}", "faint", size=12)
            self.y += 20
        self.y += 10

    def _legend(self) -> None:
        out, y = self.out, self.y + 6
        out.line(MARGIN, y - 10, WIDTH - MARGIN, y - 10, "s-rule")
        y += 14
        out.text(MARGIN, y, "banks", "faint", size=11.5)
        for group in range(_GROUPS):
            x = MARGIN + 44 + 62 * group
            out.rect(x, y - 11, 15, 14, f"b{group} s-rule", radius=3)
            out.text(x + 20, y, f"{4 * group}–{4 * group + 3}", "faint m", size=10.5)
        box = self.placed.box
        entries = []
        if self.pitch > self.placed.chunks * CHUNK:
            entries.append(("padding, not written", "s-rule", 'fill="url(#cudatma-hatch)"'))
        if (box.valid == 0).any():
            entries.append(("outside of the tensor", "b5 s-rule", 'stroke-dasharray="3 2" opacity="0.4"'))
        if ((box.valid > 0) & (box.valid < box.unit_bytes)).any():
            entries.append(("overwritten by stores", "s-rule", 'fill="url(#cudatma-clip)"'))
        place, y = MARGIN + 44.0, y + 24 * bool(entries)
        for name, classes, more in entries:
            out.rect(place, y - 11, 15, 14, classes, radius=3, more=more)
            out.text(place + 21, y, name, "faint", size=11.5)
            place += 46 + 6.6 * len(name)
        self.y = y + 8
