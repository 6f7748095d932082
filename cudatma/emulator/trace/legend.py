"""What the marks of a trace's picture mean. Stages explain themselves."""

from __future__ import annotations

from cudatma.emulator.trace import svg
from cudatma.emulator.trace.svg import FLYING, WORKING, Svg, stage_colour, text_width, tint

_LEFT, _LINE, _SIZE = 18.0, 19, 11.5


def draw_legend(out: Svg, y: float, right: float, kinds: set[str], has_stages: bool) -> float:
    """Draw the marks that a picture has, from y on; kinds: of its events. Where the legend ends."""
    x = _LEFT
    work = "a warp works on a stage" + ("; dark: tensor-core instructions" if kinds & {"mma", "wgmma"} else "")
    entries = (
        ("tick", "a thread issues a copy or a store", bool(kinds & {"copy", "cp.async", "store"})),
        ("flying", "copies in flight into a stage", has_stages),
        ("solid", "stage full, with the phase of its barrier", has_stages),
        ("work", work, has_stages),
        ("hatch", "a warp waits", "wait" in kinds),
        ("line", "what ends a wait", has_stages),
        ("flag", "hazard", "hazard" in kinds),
    )
    for mark, text, is_there in entries:
        if not is_there:
            continue
        if x + 24 + text_width(text, _SIZE) > right:
            x, y = _LEFT, y + _LINE
        _mark(out, mark, x, y)
        out.text(x + 22, y + 10, text, size=_SIZE, fill=svg.FAINT_INK)
        x += 42 + text_width(text, _SIZE)
    return y + 14


def _mark(out: Svg, mark: str, x: float, y: float) -> None:
    colour = stage_colour(0)
    if mark == "tick":
        out.rect(x + 6, y, 3, 13, colour)
    elif mark == "flying":
        out.rect(x, y, 16, 13, tint(colour, FLYING))
        out.rect(x, y + 2, 12, 3, colour)
        out.rect(x, y + 8, 16, 3, colour)
    elif mark == "solid":
        out.rect(x, y, 16, 13, colour, radius=2)
    elif mark == "work":
        out.rect(x, y, 16, 13, tint(colour, WORKING), radius=2)
        out.rect(x + 6, y + 9, 6, 4, colour)
    elif mark == "hatch":
        out.rect(x, y, 16, 13, f"url(#{svg.HATCH})", radius=2)
    elif mark == "line":
        out.line(x + 8, y, x + 8, y + 11, colour, width=0.8)
        out.circle(x + 8, y + 11, 2.2, colour)
    else:
        out.flag(x + 8, y + 12, "")
