"""Record the events of a launch, and export them as a Chrome trace or a picture."""

from __future__ import annotations

from cudatma.emulator.trace.chrome import chrome_trace
from cudatma.emulator.trace.picture import picture
from cudatma.emulator.trace.recording import Recording
from cudatma.pages import figure, fragment


class Trace(Recording):
    """Recorder of the events of one schedule, for ``launch(trace=...)``.

    A trace contains the last schedule that ran, or the first one with a hazard. `kernel`, `schedule` and `seed`
    identify the run, `steps` is its length, and `events` are in the order in which they began.

    Examples
    --------
    >>> from cudatma import emulator
    >>> module = emulator.load(".version 8.0 .target sm_90 .address_size 64 .entry f() { ret; }")
    >>> trace = emulator.Trace()
    >>> report = module.launch("f", grid=1, block=32, trace=trace)
    >>> [event.name for event in trace.events]
    ['warp 0']
    """

    def to_json(self) -> str:
        """Return the trace in Chrome's trace event format, for ui.perfetto.dev or chrome://tracing.

        Returns
        -------
        str
            JSON text in which one scheduler step is one microsecond.
        """
        return chrome_trace(self)

    def to_svg(self, width: int = 1200, blocks: int = 1, window: tuple[int, int] | None = None, title: str = "") -> str:
        """Draw producers, copies, stages and consumers over time.

        Parameters
        ----------
        width : int, default: 1200
            Width in pixels, at least 480.
        blocks : int, default: 1
            Number of CTAs to draw. CTAs that issue copies come first.
        window : tuple of int, optional
            First and last step to draw. Default: a readable part from the beginning of the schedule or, if this part
            does not contain the first hazard, a part around this hazard.
        title : str, optional
            Heading of the picture. Default: the name of the kernel.

        Returns
        -------
        str
            An SVG document.

        Raises
        ------
        ArgumentError
            If an argument is invalid.
        """
        return picture(self, width, blocks, window, title)

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook displays."""
        return fragment(figure(self.to_svg(width=1080)), style="report.css")
