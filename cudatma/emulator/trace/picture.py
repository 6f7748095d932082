"""Picture of a trace, with producers, TMA, the ring of stages and consumers over time.

A stage has the same color everywhere. Waits are hatched. A thin line connects the phase that ended a wait to the
waiting warp. Labels are placed last, at positions that no line crosses.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass

from cudatma.emulator.machine.memory import SHARED_START
from cudatma.emulator.trace import svg
from cudatma.emulator.trace.recording import Event, Recording
from cudatma.emulator.trace.stages import BlockView, Stage, views
from cudatma.emulator.trace.svg import FLYING, WORKING, Svg, draw_legend, ink_on, stage_colour, text_width, tint
from cudatma.errors import ArgumentError, counted

MIN_WIDTH, LEFT, RIGHT = 480, 150, 22
WARP_ROW, STAGE_ROW, LANE_GAP, GROUP_GAP, BYTES_ROW = 22, 24, 5, 26, 44
#: Maximum number of stage fills, and of bars per warp, in the default window. Larger windows would not be readable.
MAX_FILLS, MAX_BARS = 30, 70
AXIS_TITLE = "scheduler steps: the order of events in the emulator, not time"
#: Font sizes of bar labels and axis labels.
_LABEL, _TICK = 11, 11


def picture(trace: Recording, width: int, blocks: int, window: tuple[int, int] | None, title: str = "") -> str:
    """Return an SVG document of the first CTAs of a trace. Raise ArgumentError if an argument is invalid."""
    if isinstance(width, bool) or not isinstance(width, int) or width < MIN_WIDTH:
        raise ArgumentError("width", width, f"an int of at least {MIN_WIDTH} pixels")
    if isinstance(blocks, bool) or not isinstance(blocks, int) or blocks < 1:
        raise ArgumentError("blocks", blocks, "a positive int")
    shown = views(trace, blocks)
    first, last = window or _readable(shown[0] if shown else None, trace.steps)
    hazard = next((event.begin for event in trace.events if event.kind == "hazard"), 0)
    if window is None and hazard >= last:
        first, last = hazard - (last - first) // 2, hazard + (last - first + 1) // 2
    if not 0 <= first < last:
        raise ArgumentError("window", (first, last), "a pair (first, last) with 0 <= first < last")
    return _Picture(trace, width, first, last).draw(shown, title)


def _readable(view: BlockView | None, steps: int) -> tuple[int, int]:
    """Return a readable window that starts at the first event of the CTA."""
    if view is None or not view.events:
        return 0, max(1, steps)
    first = min(event.begin for event in view.events if event.kind != "phase" or not view.stages)
    ends = [max(event.end or steps, event.begin) for event in view.events] + [first + 1]
    fills = sorted(fill.begin for stage in view.stages for fill in stage.fills)
    limits = [max(ends), *fills[MAX_FILLS : MAX_FILLS + 1]]
    for warp in view.warps:
        bars = sorted(e.begin for kind in ("wait", "mma", "wgmma") for e in view.of_warp(warp, kind))
        limits += bars[MAX_BARS : MAX_BARS + 1]
    return first, max(first + 1, min(limits))


def size_text(size: int) -> str:
    """Return a number of bytes as readable text."""
    return f"{size / 1024:g} KB" if size % 512 == 0 and size >= 1024 else f"{size} B"


@dataclass(frozen=True, slots=True)
class _Label:
    """A bar to be labeled, with its rectangle, alternative texts, the text color, and a color behind the text."""

    x: float
    y: float
    width: float
    height: float
    texts: tuple[str, ...]
    ink: str
    backing: str = ""


@dataclass(frozen=True, slots=True)
class _Obstacle:
    """A rectangle that must not overlap any label."""

    x: float
    y: float
    to_x: float
    to_y: float


class _Picture:
    """Builder that draws the picture from top to bottom. ``y`` is the top of the next lane."""

    def __init__(self, trace: Recording, width: int, first: int, last: int) -> None:
        self.trace, self.width, self.first, self.last = trace, width, first, last
        self.scale = (width - LEFT - RIGHT) / (last - first)
        self.out = Svg()
        self.y = 0.0
        self._row_of_stage: dict[int, float] = {}
        self._row_of_warp: dict[int, float] = {}
        self._labels: list[_Label] = []
        self._obstacles: list[_Obstacle] = []

    def x(self, step: float) -> float:
        """Return the x coordinate of a step, clamped to the window."""
        return LEFT + (min(max(step, self.first), self.last) - self.first) * self.scale

    def draw(self, shown: list[BlockView], title: str) -> str:
        trace, out = self.trace, self.out
        kernel = trace.kernel or "no kernel"
        title, named = (title, f"{kernel}, ") if title else (f"Pipeline of {kernel}", "")
        self.y = 30.0
        self._heading(title, 16, 20, svg.INK, bold=True)
        is_whole = self.first == 0 and self.last >= trace.steps
        about = named + (
            counted(trace.steps, "emulated step") if is_whole else f"emulated steps {self.first} to {self.last}"
        )
        about += f"{'' if is_whole else f' of {trace.steps}'}, schedule {trace.schedule} of seed {trace.seed}"
        if trace.dropped:
            about += f"; {counted(trace.dropped, 'event')} omitted"
        self.y -= 1
        self._heading(about, 12, 16, svg.FAINT_INK)
        self.y -= 5
        for view in shown:
            self._block(view, len(shown) > 1 or view.block != (0, 0, 0))
        kinds = {event.kind for view in shown for event in view.events}
        self.y = draw_legend(out, self.y + 4, self.width - RIGHT, kinds, any(view.stages for view in shown))
        return out.document(self.width, self.y + 14, title)

    def _heading(self, text: str, size: float, pitch: float, fill: str, bold: bool = False) -> None:
        """Draw wrapped text across the picture, with the first baseline at y."""
        wide, space = (1.1 if bold else 1.0), self.width - 18 - RIGHT
        size = min(size, max(11.0, space / text_width(text or "x", wide)))
        max_characters = int(space / text_width("x", size * wide) + 1e-6)
        for line in textwrap.wrap(text, max_characters):
            self.out.text(18, self.y, line, size=size, fill=fill, bold=bold)
            self.y += pitch

    def _block(self, view: BlockView, is_named: bool) -> None:
        top, axis = self.y, len(self.out.parts)
        self._labels, self._obstacles = [], []
        if is_named:
            self.y += 22
            self.out.text(18, self.y, f"block {', '.join(map(str, view.block))}", size=13, bold=True)
        self._row_of_stage, self._row_of_warp = {}, {}
        producers = [warp for warp in view.warps if "producer" in view.role(warp)]
        others = [warp for warp in view.warps if warp not in producers]
        plural = "s" if len(producers) > 1 else ""
        also = f", also consumer{plural}" if any("consumer" in view.role(warp) for warp in producers) else ""
        self._warps(view, producers, f"producer{plural}{also}")
        self._bytes_in_flight(view)
        for ring in view.rings:
            self._ring(ring, len(view.rings) == 1)
        consumers = [warp for warp in others if "consumer" in view.role(warp)]
        storing = [warp for warp in others if view.role(warp) == "stores"] if consumers else []
        self._warps(view, consumers, "consumers")
        self._warps(view, storing, "stores")
        rest = [warp for warp in others if warp not in (*consumers, *storing)]
        self._warps(view, rest, "other warps" if consumers else "warps")
        if not producers:
            self._stores(view)
        self._connect(view)
        self._place_labels()
        self._axis(top, axis)

    # ---- lanes

    def _group(self, name: str) -> None:
        self.y += GROUP_GAP
        self.out.text(18, self.y - 7, name, fill=svg.FAINT_INK, bold=True, size=11.5)

    def _lane(self, label: str, height: float) -> float:
        """Draw a labeled track and return its y coordinate."""
        y = self.y
        self.out.text(26, y + height / 2 + 4, label)
        self.out.rect(LEFT, y, self.width - LEFT - RIGHT, height, svg.TRACK, radius=2)
        self.y += height + LANE_GAP
        return y

    def _bar(self, event: Event, y: float, height: float, fill: str, label: Iterable[str], backing: str = "") -> None:
        end = self.last if event.end is None else event.end
        self._span(event.begin, end, y, height, fill, label, self._about(event), backing)

    def _span(
        self,
        begin: int,
        end: int,
        y: float,
        height: float,
        fill: str,
        labels: Iterable[str],
        title: str = "",
        backing: str = "",
    ) -> None:
        """Draw a bar and label it with the longest label that fits. ``backing`` is a color behind the label."""
        if end < self.first or begin >= self.last:
            return
        x = self.x(begin)
        width = max(1.0, self.x(end) - x)
        self.out.rect(x, y, width, height, fill, radius=min(3.0, width / 4), title=title)
        texts = tuple(labels)
        if texts:
            self._labels.append(_Label(x, y, width, height, texts, ink_on(backing or fill), backing))

    def _place_labels(self) -> None:
        """Draw the longest text that fits into each bar, as close to the middle of the bar as possible.

        The text must not touch lines and other elements that cross the bar.
        """
        for label in self._labels:
            place = self._free_place(label)
            if place is None:
                continue
            text, middle = place
            half, y = text_width(text, _LABEL) / 2, label.y + label.height / 2
            if label.backing:
                self.out.rect(middle - half - 2, y - 7, 2 * half + 4, 14, label.backing, radius=2, is_on_top=True)
            self.out.text(middle, y + 4, text, size=_LABEL, fill=label.ink, anchor="middle", is_on_top=True)
            self._obstacles.append(_Obstacle(middle - half, label.y, middle + half, label.y + label.height))

    def _free_place(self, label: _Label) -> tuple[str, float] | None:
        """Return the text of a label and the x coordinate of its middle, or None if no text fits."""
        middle, to_x = label.x + label.width / 2, label.x + label.width
        in_the_way = sorted(
            (o.x, o.to_x)
            for o in self._obstacles
            if o.x <= to_x and o.to_x >= label.x and o.y < label.y + label.height and o.to_y > label.y
        )
        gaps, begin = [], label.x
        for left, right in (*in_the_way, (to_x, to_x)):
            if left > begin:
                gaps.append((begin, left))
            begin = max(begin, right)
        for text in label.texts:
            half = text_width(text, _LABEL) / 2 + 4
            fits = [min(max(middle, left + half), right - half) for left, right in gaps if right - left >= 2 * half]
            if fits:
                return text, min(fits, key=lambda x: (abs(x - middle), x))
        return None

    def _about(self, event: Event) -> str:
        end = "not finished" if event.end is None else str(event.end)
        place = f", {event.source or f'PTX line {event.line}'}" if event.line else ""
        return f"{event.name}{place}, steps {event.begin} to {end}"

    def _warps(self, view: BlockView, warps: list[int], group: str) -> None:
        if not warps:
            return
        self._group(group)
        for warp in warps:
            self._warp(view, warp)

    def _warp(self, view: BlockView, warp: int) -> None:
        y = self._lane(f"warp {warp}", WARP_ROW)
        self._row_of_warp[warp] = y
        for life in view.of_warp(warp, "warp"):
            begin, end = self.x(life.begin), self.x(self.last if life.end is None else life.end)
            self.out.line(begin, y + WARP_ROW / 2, end, y + WARP_ROW / 2, "#a7afbd", width=1.5)
        for wait in view.of_warp(warp, "wait"):
            stage = view.stage_of_full.get(wait.barrier) or view.stage_of_empty.get(wait.barrier)
            fill = f"url(#{svg.HATCH})"
            labels = [] if stage is None else [f"waits for stage {stage.label}", f"stage {stage.label}"]
            if stage is not None and wait.barrier == stage.empty:
                labels[0] = f"waits until stage {stage.label} is free"
            if wait.barrier < 0:
                labels = [wait.name.split(" (")[0].split(":")[0]]
            self._bar(wait, y, WARP_ROW, fill, labels, svg.HATCH_GROUND)
        for work in view.works(warp):
            count = sum(event.count for event in work.products)
            labels = [f"{count} {work.products[0].kind}", str(count)] if work.products else []
            title = f"works on stage {work.stage.label}, steps {work.begin} to {work.end}"
            colour = tint(stage_colour(work.stage.number), WORKING)
            self._span(work.begin, work.end, y, WARP_ROW, colour, labels, title)
        self._ticks(view, warp, y)

    def _ticks(self, view: BlockView, warp: int, y: float) -> None:
        """Draw events that last one step: tensor-core instructions, issued copies and stores, and hazards."""
        products = [(event, view.stage_of_products(event)) for event in view.products(warp)]
        issued = (*view.of_warp(warp, "copy"), *view.of_warp(warp, "cp.async"))
        copies = [(event, view.stage_of_full.get(event.barrier)) for event in issued]
        stores = [(event, view.stage_of_store(event)) for event in view.of_warp(warp, "store")]
        for event, stage in (*products, *copies, *stores):
            if self.first <= event.begin < self.last:
                colour = stage_colour(None if stage is None else stage.number)
                end = event.begin + 1 if event.issuer or event.end is None else event.end
                width = min(max(2.0, (end - event.begin) * self.scale), max(3.0, self.x(end) - self.x(event.begin)))
                height = WARP_ROW if event.issuer else 4
                what = f"issues {self._about(event)}" if event.issuer else f"{event.count} {self._about(event)}"
                x = self.x(event.begin)
                self.out.rect(x, y + WARP_ROW - height, width, height, colour, title=what)
                if height == WARP_ROW:
                    self._obstacles.append(_Obstacle(x - 1, y, x + width + 1, y + height))
        for event in view.of_warp(warp, "hazard"):
            if self.first <= event.begin <= self.last:
                x = self.x(event.begin)
                self.out.flag(x, y + 8, f"{event.name} at step {event.begin}")
                self._obstacles.append(_Obstacle(x - 6, y - 3, x + 6, y + 8))

    def _bytes_in_flight(self, view: BlockView) -> None:
        """Draw the bytes of TMA and cp.async copies in flight, stacked by stage."""
        copies = [(stage.number, copy) for stage in view.stages for fill in stage.fills for copy in fill.copies]
        groups = [(len(view.stages), event) for event in view.events if event.kind == "cp.async"]
        if not copies and not groups:
            return
        self._group(" and ".join(name for name, has in (("TMA", copies), ("cp.async", groups)) if has))
        changes: dict[int, list[tuple[int, int]]] = {}
        for number, copy in (*copies, *groups):
            changes.setdefault(copy.begin, []).append((number, copy.size_bytes))
            if copy.end is not None:
                changes.setdefault(copy.end, []).append((number, -copy.size_bytes))
        colours = [*(stage_colour(stage.number) for stage in view.stages), svg.NEUTRAL]
        flying = [0] * len(colours)
        heights: list[tuple[int, int, list[int]]] = []
        steps = sorted(changes)
        for step, following in zip(steps, [*steps[1:], self.last], strict=False):
            for number, size in changes[step]:
                flying[number] += size
            if following > self.first and step < self.last and any(flying):
                heights.append((step, following, list(flying)))
        max_bytes = max([sum(sizes) for _, _, sizes in heights], default=1)
        y = self._lane("bytes in flight", BYTES_ROW)
        about = f"up to {size_text(max_bytes)}" if heights else "copies complete immediately"
        self.out.text(26, y + BYTES_ROW - 3, about, size=10.5, fill=svg.FAINT_INK)
        for begin, end, sizes in heights:
            bottom = y + BYTES_ROW
            for number, size in enumerate(sizes):
                if size:
                    height = size / max_bytes * (BYTES_ROW - 4)
                    bottom -= height
                    x = self.x(begin)
                    self.out.rect(x, bottom, max(0.6, self.x(end) - x), height, colours[number], is_crisp=True)

    def _ring(self, ring: list[Stage], is_only: bool) -> None:
        name = "stage" if len(ring) == 1 else "ring of stages"
        if not is_only:
            name = f"{'buffer' if len(ring) == 1 else 'ring'} {ring[0].label.rstrip('0123456789')}"
        self._group(name)
        for stage in ring:
            self._stage(stage)

    def _stage(self, stage: Stage) -> None:
        """Draw copies in flight as thin bars on a tint, followed by the full slot until it is free again."""
        y = self._lane(f"stage {stage.label}", STAGE_ROW)
        self._row_of_stage[stage.number] = y
        colour = stage_colour(stage.number)
        for fill in stage.fills:
            landed = self.last if fill.full is None else fill.full
            if landed >= self.first and fill.begin < self.last:
                x = self.x(fill.begin)
                self.out.rect(x, y, max(1.0, self.x(landed) - x), STAGE_ROW, tint(colour, FLYING))
                pitch = STAGE_ROW / len(fill.copies)
                thick = min(5.0, max(1.0, pitch - 2))
                for number, copy in enumerate(fill.copies):
                    self._bar(copy, y + (number + 0.5) * pitch - thick / 2, thick, colour, ())
            if fill.full is not None:
                freed = self.last if fill.freed is None else fill.freed
                barrier = f"mbarrier {stage.barrier + SHARED_START:#x}"
                title = f"stage {stage.label} full: phase {fill.lap} of {barrier}, steps {fill.full} to {freed}"
                labels = (f"full, phase {fill.lap}", f"phase {fill.lap}", str(fill.lap))
                self._span(fill.full, freed, y, STAGE_ROW, colour, labels, title=title)

    def _stores(self, view: BlockView) -> None:
        """Draw stores in flight if no copy writes shared memory."""
        if view.stages:
            return
        stores = [event for event in view.events if event.kind == "store"]
        if stores:
            self._group("TMA")
            y = self._lane("stores in flight", WARP_ROW)
            for store in stores:
                self._bar(store, y, WARP_ROW, svg.NEUTRAL, [size_text(store.size_bytes)])

    def _connect(self, view: BlockView) -> None:
        """Draw a line from each phase that ended a wait to the waiting warp."""
        for warp, y in self._row_of_warp.items():
            for wait in view.of_warp(warp, "wait"):
                stage = view.stage_of_full.get(wait.barrier) or view.stage_of_empty.get(wait.barrier)
                if stage is None or wait.end is None or not self.first <= wait.end <= self.last:
                    continue
                if view.phase_ends(wait.barrier).get(wait.phase) != wait.end:
                    continue
                row, x = self._row_of_stage[stage.number], self.x(wait.end)
                ends = (row + STAGE_ROW, y) if y > row else (row, y + WARP_ROW)
                self.out.line(x, ends[0], x, ends[1], stage_colour(stage.number), width=0.8)
                self.out.circle(x, ends[1], 2.2, stage_colour(stage.number))
                self._obstacles.append(_Obstacle(x - 1.5, min(ends), x + 1.5, max(ends)))

    # ---- around

    def _axis(self, top: float, position: int) -> None:
        """Draw the axis, and insert grid lines below the elements from index ``position``."""
        grid = Svg()
        self.y += 4
        span = self.last - self.first
        widest = text_width(_spaced(self.last), _TICK) + 12
        unit = next(u for u in _nice() if span / u <= 12 and u * self.scale >= widest)
        for step in range(-(-self.first // unit) * unit, self.last + 1, unit):
            x, text = self.x(step), _spaced(step)
            grid.line(x, top + 8, x, self.y, svg.GRID)
            x = min(x, self.width - 4 - text_width(text, _TICK) / 2)
            self.out.text(x, self.y + 14, text, size=_TICK, anchor="middle")
        x = min(LEFT, self.width - RIGHT - text_width(AXIS_TITLE, _TICK))
        self.out.text(x, self.y + 31, AXIS_TITLE, size=_TICK, fill=svg.FAINT_INK)
        self.out.parts[position:position] = grid.parts
        self.y += 44


def _spaced(step: int) -> str:
    """Format a number with spaces between groups of three digits."""
    return f"{step:,}".replace(",", " ")


def _nice() -> Iterable[int]:
    """Yield 1, 2, 5, 10, 20, 50, ..."""
    unit = 1
    while True:
        yield from (unit, 2 * unit, 5 * unit)
        unit *= 10
