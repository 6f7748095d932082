"""The tensor as a whole, small, and where in it the box is."""

from __future__ import annotations

from cudatma.descriptor.access import bounding_box, first_pixel_dim
from cudatma.descriptor.spec import Im2colSpec, TiledSpec
from cudatma.inspection.drawing import Drawing
from cudatma.inspection.placement import Placement
from cudatma.layout import Interleave

#: Images up to this many pixels on a side are drawn pixel by pixel.
_MOST_PIXELS = 48


def draw_minimap(out: Drawing, placed: Placement, x: float, y: float, width: float, height: float) -> None:
    """The plane of dimensions 0 and 1, or of W and H, inside of a rectangle, with a caption below it."""
    if isinstance(placed.spec, Im2colSpec):
        _image(out, placed, placed.spec, x, y, width, height)
    else:
        _plane(out, placed, placed.spec, x, y, width, height)


def _fit(across: float, down: float, width: float, height: float) -> tuple[float, float]:
    """A rectangle of about these proportions; neither side gets too thin to see."""
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
        out.begin(f"padding of the pitch: {spec.strides_bytes[0] - int(row)} bytes after each row")
        out.rect(x + body, top, wide - body, tall, "s-rule", more='fill="url(#cudatma-hatch)"')
        out.end()
    out.rect(x, top, body, tall, "panel s-rule", radius=2)
    box_wide = max(5.0, min(1.2, spec.box[0] / inner) * body)
    box_tall = max(5.0, min(1.2, (spec.box[1] if spec.rank > 1 else 1) / outer) * tall)
    at_x = x + min(max(placed.coords[0] / inner, -0.1), 1.05) * body
    at_y = top + (min(max(placed.coords[1] / outer, -0.1), 1.05) * tall if spec.rank > 1 else 0)
    # A box that is drawn larger than it is must not stick out for that reason alone.
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
    """The image of the first pixel: bounding box, and the pixels of the column in it."""
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
    if max(extent) <= _MOST_PIXELS:
        here = placed.row_coords(0)
        for row in range(placed.rows):
            pixel = placed.row_coords(row)
            # Other images, and other depths, lie in other planes.
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
    out.begin("the bounding box: a column begins inside of it, and walks through it")
    box = (high[0] - low[0] + 1) * unit[0], (high[1] - low[1] + 1) * unit[1]
    out.rect(left, top, *box, "clear s-ink", more='stroke-dasharray="4 3" stroke-width="1.5"')
    out.end()
    shape = f"W {across}" + (f" × H {down}" if spatial > 1 else "")
    out.text(x, y + 4 + tall + 17, f"image {shape}; dashed: bounding box", "faint", size=11)


def _coords(coords: tuple[int, ...]) -> str:
    return "(" + ", ".join(map(str, coords)) + ")"
