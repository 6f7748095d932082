"""A Trace is handed to launch(trace=...); it writes what happened as a Chrome trace or a picture."""

from __future__ import annotations

from cudatma.emulator.trace.chrome import chrome_trace
from cudatma.emulator.trace.picture import picture
from cudatma.emulator.trace.recording import Recording


class Trace(Recording):
    """Keeps the events of the last schedule that ran, or of the first one that showed a hazard.

    kernel, schedule, seed: which run it was. steps: how long it took. events: in the order in which they began.
    """

    def to_json(self) -> str:
        """Chrome trace JSON, for ui.perfetto.dev or chrome://tracing; one step is one microsecond."""
        return chrome_trace(self)

    def to_svg(self, width: int = 1200, blocks: int = 1, window: tuple[int, int] | None = None, title: str = "") -> str:
        """A picture of the first ``blocks`` CTAs that copy something.

        width: in pixels. window: (first, last) step to show; by default the beginning, as much as can be read.
        title: what was run; by default the kernel's name.
        Raises ArgumentError for an empty window or a picture that is too narrow.
        """
        return picture(self, width, blocks, window, title)
