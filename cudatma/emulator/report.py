"""Report launches as text, as HTML pages, and as SARIF for code scanning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cudatma.emulator.hazards.hazard import Hazard
from cudatma.emulator.hazards.sources import Sources
from cudatma.emulator.hazards.variables import SharedVariables
from cudatma.emulator.sarif import sarif_log, sarif_results
from cudatma.emulator.trace import Trace
from cudatma.emulator.views import HazardView, view
from cudatma.errors import counted, duration
from cudatma.pages import document, figure, fragment, render


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result of comparing an array with its expected value.

    Parameters
    ----------
    name : str
        Name of the array.
    error : float
        ||difference|| / ||expected||.
    tolerance : float
        Maximum allowed error.
    """

    name: str
    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether the error is within the tolerance."""
        return self.error <= self.tolerance


@dataclass(slots=True)
class Report:
    """Hazards and warnings of a launch, over all its schedules.

    Parameters
    ----------
    kernel : str
        Name of the kernel.
    schedules : int
        Number of schedules that ran.
    hazards : list of Hazard
        Root causes in order of importance. Their `consequences` contain the other hazards.
    steps : int
        Number of steps. In each step, one warp runs a segment of nonblocking instructions.
    printed : list of str
        Output of printf in the first schedule that called it.
    warnings : list of Hazard
        Suspicious code that may be intended. Warnings do not affect `is_clean`.
    unchecked : list of str
        Parts of the kernel that were not checked, with the reasons.
    seconds : float
        Duration of the launch in seconds.
    title, place : str
        Heading of the report, and the line of the program that launches the kernel. Callers may set both.
    shape : str
        Grid, block and cluster of the launch, and the target.
    compared : list of Comparison
        Comparisons of arrays with expected values. Callers may add comparisons.
    trace : Trace, optional
        Trace of the launch, from which `to_html` shows the pipeline and the order of events.
    sources : Sources
        PTX and source lines for the report.
    variables : SharedVariables
        Names of places in shared memory.
    """

    kernel: str
    schedules: int
    hazards: list[Hazard] = field(default_factory=list)
    steps: int = 0
    printed: list[str] = field(default_factory=list)
    warnings: list[Hazard] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    seconds: float = 0.0
    title: str = ""
    place: str = ""
    shape: str = ""
    compared: list[Comparison] = field(default_factory=list)
    trace: Trace | None = field(default=None, repr=False, compare=False)
    sources: Sources = field(default_factory=Sources, repr=False, compare=False)
    variables: SharedVariables = field(default_factory=SharedVariables, repr=False, compare=False)

    @property
    def is_clean(self) -> bool:
        """True if there are no hazards."""
        return not self.hazards

    @property
    def findings(self) -> list[Hazard]:
        """All hazards, each followed by other places with the same cause and by its consequences."""
        return [finding for hazard in self.hazards for finding in (hazard, *hazard.also, *hazard.consequences)]

    @property
    def kinds(self) -> set[str]:
        """Kinds of all hazards, including consequences."""
        return {finding.kind for finding in self.findings}

    @property
    def hint(self) -> str:
        """Advice on how to get source lines, or "" if findings contain them."""
        findings = [*self.findings, *self.warnings]
        if not findings or any(finding.source for finding in findings):
            return ""
        return "the PTX contains no source lines; compile with `nvcc -lineinfo` (or cudatma.compile) to see them here"

    @property
    def more(self) -> str:
        """Command that explains the kinds of hazards and warnings, or "" if there are none."""
        kinds = dict.fromkeys(finding.kind for finding in [*self.hazards, *self.warnings])
        return f"cudatma explain {' '.join(kinds)}" if kinds else ""

    def __str__(self) -> str:
        lines = [str(hazard) for hazard in self.hazards]
        if self.is_clean:
            lines.append(f"{self.kernel}: no hazards in {counted(self.schedules, 'schedule')}")
        lines += [f"warning: {warning}" for warning in self.warnings]
        lines += [f"unchecked: {note}" for note in self.unchecked]
        lines += [f"hint: {self.hint}"] if self.hint else []
        lines += [f"more: {self.more}"] if self.more else []
        return "\n".join(lines)

    @property
    def passed(self) -> bool:
        """True if there are no hazards and all comparisons passed."""
        return self.is_clean and all(comparison.passed for comparison in self.compared)

    def as_dict(self) -> dict[str, Any]:
        """Return the content as JSON-serializable data.

        Returns
        -------
        dict
            ``passed`` and the attributes, except ``trace``, ``sources`` and ``variables``. ``seconds`` is rounded to
            milliseconds.
        """
        return {
            "title": self.title,
            "place": self.place,
            "kernel": self.kernel,
            "shape": self.shape,
            "passed": self.passed,
            "schedules": self.schedules,
            "steps": self.steps,
            "seconds": round(self.seconds, 3),
            "hazards": [hazard.as_dict() for hazard in self.hazards],
            "warnings": [warning.as_dict() for warning in self.warnings],
            "unchecked": self.unchecked,
            "printed": self.printed,
            "compared": [asdict(comparison) | {"passed": comparison.passed} for comparison in self.compared],
        }

    def to_html(self) -> str:
        """Return the report as a self-contained HTML page.

        Returns
        -------
        str
            HTML with the hazards, their source lines and the results. If the launch has a trace, the page also shows
            the order of events and the pipeline.
        """
        return report_page([self])

    def save_html(self, path: str | Path) -> None:
        """Write the report as a self-contained HTML page.

        Parameters
        ----------
        path : str or Path
            Path of the file.
        """
        Path(path).write_text(self.to_html(), encoding="utf-8")

    def to_sarif(self) -> str:
        """Return the hazards and warnings in SARIF 2.1.0, for code scanning.

        Returns
        -------
        str
            JSON text.
        """
        return report_sarif([self])

    def save_sarif(self, path: str | Path) -> None:
        """Write the hazards and warnings in SARIF 2.1.0, for code scanning.

        Parameters
        ----------
        path : str or Path
            Path of the file.
        """
        Path(path).write_text(self.to_sarif(), encoding="utf-8")

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook displays."""
        return fragment(
            render("report.html.j2", launches=[_LaunchView(self, 1)], is_page=False, title=""), style="report.css"
        )


def report_page(reports: Sequence[Report], title: str = "") -> str:
    """Combine the reports of several launches into one HTML page.

    Parameters
    ----------
    reports : sequence of Report
        The reports, in the order of the launches.
    title : str, optional
        Heading of the page. Default: the title or the kernel of the first report.

    Returns
    -------
    str
        A self-contained HTML document.
    """
    launches = [_LaunchView(report, number) for number, report in enumerate(reports, 1)]
    sections: dict[object, int] = {}
    for launch in launches if len(launches) > 1 else ():
        launch.section = sections.setdefault(launch.content, launch.number) if launch.content else 0
    if not title:
        title = launches[0].title if len(launches) == 1 else f"{len(launches)} launches"
    body = render("report.html.j2", launches=launches, is_page=True, title=title)
    return document(title, body, style="report.css")


def report_sarif(reports: Sequence[Report]) -> str:
    """Return the hazards and warnings of several launches in SARIF 2.1.0, for code scanning.

    Parameters
    ----------
    reports : sequence of Report
        The reports. A hazard that occurs in several reports appears once.

    Returns
    -------
    str
        JSON text.
    """
    results = [
        result
        for report in reports
        for result in sarif_results(report.hazards, report.warnings, report.sources, report.place)
    ]
    return sarif_log(results)


class _LaunchView:
    """View of a report for its page."""

    def __init__(self, report: Report, number: int) -> None:
        self.report, self.number = report, number
        #: Number of the launch whose section shows this report. Equal reports share a section. 0 means no section.
        self.section = number
        self.title = report.title or report.kernel
        self.seconds = duration(report.seconds)
        self.verdict = counted(len(report.hazards), "hazard") if report.hazards else "no hazards"
        self.wrong = [comparison.name for comparison in report.compared if not comparison.passed]

    @property
    def content(self) -> tuple[object, ...]:
        """Content of the section, used to compare launches, or () if the launch has no section."""
        report = self.report
        hazards = [(h.kind, h.ptx_line, h.source) for h in (*report.hazards, *report.warnings)]
        results = [(comparison.name, comparison.error) for comparison in report.compared]
        parts = (hazards, results, report.printed, report.unchecked)
        return (self.title, repr(parts)) if any(parts) else ()

    def _views(self, hazards: list[Hazard]) -> list[HazardView]:
        report = self.report
        return [view(hazard, report.sources, report.variables, report.trace) for hazard in hazards]

    @property
    def hazards(self) -> list[HazardView]:
        return self._views(self.report.hazards)

    @property
    def warnings(self) -> list[HazardView]:
        return self._views(self.report.warnings)

    @property
    def picture(self) -> str:
        """The pipeline as HTML, or "" if the trace contains no pipeline."""
        trace = self.report.trace
        is_drawn = trace is not None and any(event.kind in ("copy", "cp.async", "wait") for event in trace.events)
        is_global = self.report.hazards and all(hazard.kind.startswith("global_") for hazard in self.report.hazards)
        return figure(trace.to_svg(width=1080)) if trace is not None and is_drawn and not is_global else ""
