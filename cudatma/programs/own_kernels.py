"""Record the launches of cudatma's kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from cudatma.programs.launch import ProgramLaunch, calling_place
from cudatma.programs.patches import Patches
from cudatma.programs.recorder import Recorder
from cudatma.runtime.compiler_log import own_lines, register_count
from cudatma.runtime.launch import LaunchPlan


def record(patches: Patches, recorder: Recorder) -> None:
    """Record the calls to LaunchPlan.launch, which launches all of cudatma's kernels."""
    original = LaunchPlan.launch

    def launch(plan: LaunchPlan, stream: int) -> None:
        recorder.around(
            lambda: _describe(plan),
            lambda: original(plan, stream),
            entry=plan.kernel.entry,
            library="cudatma",
            stream=stream,
        )

    patches.set(LaunchPlan, "launch", launch)


def _describe(plan: LaunchPlan) -> ProgramLaunch:
    kernel = plan.kernel
    return ProgramLaunch(
        **asdict(plan.shape()),
        ptx=kernel.ptx,
        entry=kernel.entry,
        args=tuple(map(bytes, plan.arguments)),
        library="cudatma",
        place=calling_place(),
        sources=tuple((name, _text_of(lines)) for name, lines in own_lines(kernel.source).items()),
        registers=register_count(kernel.log, kernel.entry),
    )


def _text_of(lines: Mapping[int, str]) -> str:
    """Return a text that contains each line at its line number."""
    return "\n".join(lines.get(number, "") for number in range(1, max(lines, default=0) + 1))
