"""Picture of a box in the tensor and in shared memory, with addresses, banks and padding.

Each cell of the two grids represents 16 bytes, and its color identifies its four banks. If a warp reads a column of the
left grid, cells of the same color conflict.
"""

from __future__ import annotations

from xml.sax.saxutils import escape, quoteattr

from cudatma.descriptor.access import bounding_box, first_pixel_dim
from cudatma.descriptor.spec import Im2colSpec, TiledSpec
from cudatma.errors import ArgumentError, counted
from cudatma.inspection.banks import ReadCost, read_costs
from cudatma.inspection.fields import headline
from cudatma.inspection.placement import CHUNK, Element, Placement
from cudatma.layout import BANK_BYTES, BANKS, Interleave

THEMES = ("auto", "light", "dark")
#: Color of each 16 bytes (four banks) of a 128-byte line. The colors also differ in lightness for color-blind readers.
_BANKS = {
    "light": ("#ffbcb5", "#e6b285", "#efe3a2", "#9fcc99", "#a9ece5", "#86c7ed", "#d3d2ff", "#e1a9d4"),
    "dark": ("#8f4a45", "#6b3a00", "#7d6c10", "#265421", "#0b7a73", "#004e73", "#5d599b", "#66325c"),
}
_COLORS = {
    "light": {
        "paper": "#ffffff", "panel": "#f6f7f9", "ink": "#1d2330", "faint": "#5a6475", "rule": "#ccd2dc",
        "accent": "#2f62b0", "bad": "#c0262d", "good": "#2c7a4b", "hatch": "#aab2c0", "gap": "#eceff4",
    },
    "dark": {
        "paper": "#14171d", "panel": "#1c2129", "ink": "#e9ecf2", "faint": "#9aa5b7", "rule": "#39414e",
        "accent": "#7fb2ff", "bad": "#ff6b6b", "good": "#63c78d", "hatch": "#566172", "gap": "#222832",
    },
}  # fmt: skip
_FONT = "system-ui, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif"
_MONO = "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
#: Class of the root element. All CSS selectors start with it so that a picture does not affect the rest of the page.
ROOT = "cudatma-map"


def number(value: float) -> str:
    """Format a number for SVG with as few characters as possible."""
    return f"{value:.1f}".removesuffix(".0")


def check_theme(theme: str) -> str:
    """Return the theme. Raises ArgumentError if it is unknown."""
    if theme not in THEMES:
        raise ArgumentError("theme", theme, ", ".join(THEMES))
    return theme


def style(theme: str) -> str:
    """Return the CSS for a theme."""
    fixed = (
        f".{ROOT}{{font-family:{_FONT}}}.{ROOT} .m{{font-family:{_MONO}}}.{ROOT} .h{{font-weight:600}}"
        f".{ROOT} .clear{{fill:none}}.{ROOT} .hot rect{{stroke-width:2.5}}.{ROOT} .out rect:first-of-type{{opacity:.4}}"
    )
    if theme == "auto":
        return fixed + _colors("light") + f"@media(prefers-color-scheme:dark){{{_colors('dark')}}}"
    return fixed + _colors(theme)


def _colors(theme: str) -> str:
    rules = [f".{name}{{fill:{color}}}" for name, color in _COLORS[theme].items()]
    rules += [f".s-{name}{{stroke:{color}}}" for name, color in _COLORS[theme].items()]
    rules += [f".b{index}{{fill:{color}}}" for index, color in enumerate(_BANKS[theme])]
    ink = _COLORS[theme]["ink"]
    rules += [f".hot rect{{stroke:{ink}}}", f".out text{{fill:{_COLORS[theme]['faint']}}}"]
    return "".join(f".{ROOT} {rule}" for rule in rules)


class Drawing:
    """Builder of an SVG document. Coordinates are in pixels; style() defines the CSS classes."""

    def __init__(self) -> None:
        self.parts: list[str] = []

    def rect(
        self, x: float, y: float, width: float, height: float, classes: str, *, radius: float = 0, more: str = ""
    ) -> None:
        """Draw a rectangle. ``more`` is a string of further attributes."""
        place = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
        corner = f' rx="{number(radius)}"' if radius else ""
        self.parts.append(f'<rect {place}{corner} class="{classes}"{f" {more}" if more else ""}/>')

    def text(self, x: float, y: float, text: str, classes: str = "ink", *, size: float = 12, anchor: str = "") -> None:
        """Draw a line of text. ``anchor`` is ``"middle"`` or ``"end"``."""
        side = f' text-anchor="{anchor}"' if anchor else ""
        self.parts.append(
            f'<text x="{number(x)}" y="{number(y)}" font-size="{size:g}" class="{classes}"{side}>{escape(text)}</text>'
        )

    def line(self, x: float, y: float, to_x: float, to_y: float, classes: str, *, width: float = 1) -> None:
        ends = f'x1="{number(x)}" y1="{number(y)}" x2="{number(to_x)}" y2="{number(to_y)}"'
        self.parts.append(f'<line {ends} class="{classes}" stroke-width="{width:g}"/>')

    def begin(self, title: str, *, classes: str = "", key: str = "") -> None:
        """Start a group with a tooltip. Groups with the same ``key`` are highlighted together."""
        name = f' class="{classes}"' if classes else ""
        mark = f" data-key={quoteattr(key)}" if key else ""
        self.parts.append(f"<g{name}{mark}><title>{escape(title)}</title>")

    def end(self) -> None:
        self.parts.append("</g>")

    def document(self, width: float, height: float, title: str, theme: str) -> str:
        """Return the drawing on a background as an SVG document."""
        size = f'width="{number(width)}" height="{number(height)}"'
        hatch = (
            '<pattern id="cudatma-hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
            'patternTransform="rotate(45)"><rect width="6" height="6" class="gap"/>'
            '<rect width="1.6" height="6" class="hatch"/></pattern>'
            '<pattern id="cudatma-clip" width="5" height="5" patternUnits="userSpaceOnUse" '
            'patternTransform="rotate(-45)"><rect width="5" height="5" class="paper"/>'
            '<rect width="2.4" height="5" class="bad"/></pattern>'
        )
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="{ROOT}" {size} '
            f'viewBox="0 0 {number(width)} {number(height)}" role="img" aria-label={quoteattr(title)}>',
            f"<title>{escape(title)}</title>",
            f"<style>{style(theme)}</style><defs>{hatch}</defs>",
            f'<rect x="0.5" y="0.5" width="{number(width - 1)}" height="{number(height - 1)}" rx="10" '
            'class="paper s-rule"/>',
        )
        return "\n".join([*head, *self.parts, "</svg>"]) + "\n"


#: Maximum width and height of an image whose pixels are drawn individually.
_MAX_PIXELS = 48


def draw_minimap(out: Drawing, placed: Placement, x: float, y: float, width: float, height: float) -> None:
    """Draw the plane of dimensions 0 and 1 (or W and H) in a rectangle with a caption."""
    if isinstance(placed.spec, Im2colSpec):
        _image(out, placed, placed.spec, x, y, width, height)
    else:
        _plane(out, placed, placed.spec, x, y, width, height)


def _fit(across: float, down: float, width: float, height: float) -> tuple[float, float]:
    """Return the size of a rectangle within ``width`` x ``height`` with about the proportions ``across`` : ``down``."""
    ratio = min(max(across / down, 0.22), 6.0)
    wide = min(width, height * ratio)
    return wide, max(10.0, min(height, wide / ratio))


def _plane(out: Drawing, placed: Placement, spec: TiledSpec, x: float, y: float, width: float, height: float) -> None:
    inner = spec.dims[0]
    outer = spec.dims[1] if spec.rank > 1 else 1
    row = inner * (spec.interleave.slice_bytes or spec.dtype.element_bits / 8)
    gap = max(0.0, spec.strides_bytes[0] / row - 1) if spec.rank > 1 else 0.0
    gap = min(gap, 0.6)
    layers = min(2, spec.rank - 2) if spec.rank > 2 else 0
    wide, tall = _fit(inner * (1 + gap), outer, width - 10 * layers - 14, height - 30 - 8 * layers)
    body = wide / (1 + gap)
    top = y + 8 * layers + 4
    for layer in range(layers, 0, -1):
        out.rect(x + 9 * layer, top - 7 * layer, wide, tall, "panel s-rule", radius=2)
    if gap:
        out.begin(f"pitch padding: {spec.strides_bytes[0] - int(row)} bytes after each row")
        out.rect(x + body, top, wide - body, tall, "s-rule", more='fill="url(#cudatma-hatch)"')
        out.end()
    out.rect(x, top, body, tall, "panel s-rule", radius=2)
    box_wide = max(5.0, min(1.2, spec.box[0] / inner) * body)
    box_tall = max(5.0, min(1.2, (spec.box[1] if spec.rank > 1 else 1) / outer) * tall)
    at_x = x + min(max(placed.coords[0] / inner, -0.1), 1.05) * body
    at_y = top + (min(max(placed.coords[1] / outer, -0.1), 1.05) * tall if spec.rank > 1 else 0)
    # A small box is drawn larger than it is. Keep the drawn box inside the plane if the real box is inside.
    if placed.coords[0] + spec.box[0] <= inner:
        at_x = min(at_x, x + body - box_wide)
    if spec.rank > 1 and placed.coords[1] + spec.box[1] <= outer:
        at_y = min(at_y, top + tall - box_tall)
    out.begin(f"the box at {_coords(placed.coords)}")
    out.rect(at_x, at_y, box_wide, box_tall, "accent s-accent", radius=1, more='fill-opacity="0.45" stroke-width="1.5"')
    out.end()
    names = ("W", "H" if spec.rank > 3 else "C") if spec.interleave is not Interleave.NONE else ("dim 0", "dim 1")
    caption = f"{names[0]}: {inner}" + (f", {names[1]}: {outer}" if spec.rank > 1 else "")
    if spec.rank > 2:
        caption += f", one plane of {' × '.join(map(str, spec.dims[2:]))}"
    elif gap:
        caption += "; hatched: padding"
    below = max(top + tall, at_y + box_tall)
    out.text(x, below + 17, caption, "faint", size=11)


def _image(out: Drawing, placed: Placement, spec: Im2colSpec, x: float, y: float, width: float, height: float) -> None:
    """Draw the image that contains the first pixel, with the bounding box and the pixels of the column."""
    first, spatial = first_pixel_dim(spec), spec.rank - 2
    across = spec.dims[first]
    down = spec.dims[first + 1] if spatial > 1 else 1
    low, high = bounding_box(spec)
    low, high = [*low, 0][:2], [*high, 0][:2]
    start = [min(0, low[0]), min(0, low[1])]
    extent = [max(across - 1, high[0]) - start[0] + 1, max(down - 1, high[1]) - start[1] + 1]
    wide, tall = _fit(extent[0], extent[1], width - 14, height - 30)
    unit = (wide / extent[0], tall / extent[1])

    def place(w: int, h: int) -> tuple[float, float]:
        return x + (w - start[0]) * unit[0], y + 4 + (h - start[1]) * unit[1]

    left, top = place(0, 0)
    out.rect(left, top, across * unit[0], down * unit[1], "panel s-rule")
    if max(extent) <= _MAX_PIXELS:
        here = placed.row_coords(0)
        for row in range(placed.rows):
            pixel = placed.row_coords(row)
            # Draw only pixels of the same image and depth.
            if pixel[-1] != here[-1] or (spatial > 2 and pixel[first + 2] != here[first + 2]):
                break
            w, h = pixel[first], pixel[first + 1] if spatial > 1 else 0
            px, py = place(w, h)
            if x - 1 <= px < x + wide and y <= py < y + tall + 4:
                out.begin(f"pixel {row}: w {w}" + (f", h {h}" if spatial > 1 else ""))
                strength = 0.85 - 0.6 * row / max(1, placed.rows)
                out.rect(px, py, unit[0], unit[1], "accent s-paper", more=f'fill-opacity="{strength:.2f}"')
                out.end()
    left, top = place(low[0], low[1])
    out.begin("bounding box, in which every column starts and advances")
    box = (high[0] - low[0] + 1) * unit[0], (high[1] - low[1] + 1) * unit[1]
    out.rect(left, top, *box, "clear s-ink", more='stroke-dasharray="4 3" stroke-width="1.5"')
    out.end()
    shape = f"W {across}" + (f" × H {down}" if spatial > 1 else "")
    out.text(x, y + 4 + tall + 17, f"image {shape}; dashed: bounding box", "faint", size=11)


def _coords(coords: tuple[int, ...]) -> str:
    return "(" + ", ".join(map(str, coords)) + ")"


WIDTH, MARGIN = 1040, 28
LEFT_LABEL, LEFT_CELLS, RIGHT_LABEL, RIGHT_CELLS = 28, 124, 556, 616
CELL, ROW, GRID_WIDTH = 49, 23, 392
#: Maximum number of box rows, shared-memory lines and box columns in the drawing.
MAX_ROWS, MAX_LINES, MAX_COLUMNS = 16, 24, 16
LINE_BYTES = BANKS * BANK_BYTES
_GROUPS = LINE_BYTES // CHUNK
_READS = {
    "row": "along a row, one element per lane",
    "column": "down a column, one element per lane",
    "ldmatrix": "ldmatrix, 8 rows of 16 bytes",
}


def picture(placed: Placement, theme: str = "auto", mark: Element | None = None) -> str:
    """Return an SVG document of a placed box.

    ``theme`` is ``"light"``, ``"dark"``, or ``"auto"`` to follow the reader's settings. ``mark`` is an element to
    outline. Raises ArgumentError for an unknown theme.
    """
    return _Picture(placed, mark).draw(check_theme(theme))


class _Picture:
    """Builder that draws the picture from top to bottom. ``y`` is the top of the next part."""

    def __init__(self, placed: Placement, mark: Element | None) -> None:
        self.placed, self.mark, self.out = placed, mark, Drawing()
        layout = placed.spec.box_layout
        self.pitch = layout.pitch_bytes if placed.spec.interleave is Interleave.NONE else placed.chunks * CHUNK
        max_rows = max(1, min(MAX_ROWS, MAX_LINES * LINE_BYTES // max(1, self.pitch)))
        self.rows = min(placed.rows, max_rows)
        self.columns = min(placed.chunks, MAX_COLUMNS)
        self.lines = min(MAX_LINES, -(-self.rows * self.pitch // LINE_BYTES))
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

    # ---- facts

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
            text = f"({mark.row}, {mark.index}) is at {mark.smem_address:#x}, bank {mark.bank}"
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
        out.text(LEFT_LABEL, y + 18, "A cell is 16 bytes, labeled with its shared-memory offset.", "faint", size=11.5)
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
            "A line is 128 bytes. A cell is labeled with (r, c) of its first element.",
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
                        f"padding at {address:#x}: the row pitch is {self.pitch} bytes; loads do not write here"
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
        """Draw a chunk in the color of its banks. Mark it if it is outside the tensor or clipped."""
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
        """Return the tooltip of a chunk."""
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
            lines.append("outside the tensor: loads fill it, stores skip it")
        elif valid < box.unit_bytes:
            lines.append(
                f"{valid} bytes inside the tensor: loads fill the rest, stores overwrite {box.unit_bytes - valid} bytes"
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

    # ---- below the grids

    def _reads(self, costs: tuple[ReadCost, ...]) -> None:
        out = self.out
        if not costs:
            return
        out.line(MARGIN, self.y - 12, WIDTH - MARGIN, self.y - 12, "s-rule")
        out.text(MARGIN, self.y + 12, "Cost of a read by one warp", "ink h", size=14)
        out.text(330, self.y + 12, "A square is a wavefront. Red squares are bank conflicts.", "faint", size=11.5)
        self.y += 24
        for cost in costs:
            out.text(MARGIN, self.y + 12, _READS[cost.pattern], "ink", size=12)
            for index in range(cost.wavefronts):
                kind = "good" if index < cost.min_wavefronts else "bad"
                out.rect(330 + 13 * index, self.y + 2, 11, 11, kind, radius=2)
            text = "no conflicts" if cost.ways <= 1 else f"{cost.ways:g}-way conflicts"
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
            entries.append(("outside the tensor", "b5 s-rule", 'stroke-dasharray="3 2" opacity="0.4"'))
        if ((box.valid > 0) & (box.valid < box.unit_bytes)).any():
            entries.append(("overwritten by stores", "s-rule", 'fill="url(#cudatma-clip)"'))
        place, y = MARGIN + 44.0, y + 24 * bool(entries)
        for name, classes, more in entries:
            out.rect(place, y - 11, 15, 14, classes, radius=3, more=more)
            out.text(place + 21, y, name, "faint", size=11.5)
            place += 46 + 6.6 * len(name)
        self.y = y + 8
