"""pytest plugin whose fixture ``emulate`` runs a kernel on the emulator and reports races and hangs.

pytest loads the plugin if cudatma is installed. docs/howto/test_a_kernel.md shows how to use the fixture.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from cudatma.build.ptx_source import PtxSource
    from cudatma.emulator import EmulatedModule, Report, Trace
    from cudatma.runtime.launch import Kernel

#: Number of schedules per launch if neither the test nor the command line sets it.
SCHEDULES = 10


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("cudatma", "cudatma emulator")
    group.addoption(
        "--emulator-schedules", type=int, metavar="N", help=f"number of schedules per launch (default: {SCHEDULES})"
    )
    group.addoption("--emulator-seed", type=int, metavar="S", help="seed of the random schedules (default: 0)")
    group.addoption("--emulator-replay", type=int, metavar="K", help="run only schedule K of the seed")
    group.addoption("--emulator-trace", type=Path, metavar="DIR", help="write failing schedules to DIR as SVG and JSON")
    group.addoption(
        "--emulator-html", type=Path, metavar="DIR", help="write an HTML page for each failing launch to DIR"
    )


@pytest.fixture
def emulate(request: pytest.FixtureRequest) -> Emulate:
    """Return ``emulate(kernel, grid, block, args, ...) -> Report``, which runs a kernel on the CPU."""
    return Emulate(request)


class Emulate:
    """Function that the fixture ``emulate`` returns."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._test, self._folder = request.node.nodeid, request.path.parent
        self._option = request.config.getoption
        self._launches = 0

    def __call__(
        self,
        kernel: str | Path | Kernel | EmulatedModule,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        args: Sequence[Any] = (),
        *,
        entry: str | None = None,
        cluster: int | Sequence[int] | None = None,
        shared_bytes: int = 0,
        schedules: int | None = None,
        seed: int | None = None,
        target: Any = None,
        hazards: str = "fail",
        template: bool = False,
        options: Sequence[str] = (),
        include_dirs: Sequence[str | Path] = (),
        defines: Mapping[str, object] | Sequence[str] = (),
        trace: Trace | None = None,
        **more: Any,
    ) -> Report:
        """Run a kernel under several schedules, and leave the results of the last schedule in the arrays.

        Parameters
        ----------
        kernel : str, Path, Kernel or EmulatedModule
            Kernel to run. A str is PTX text, CUDA text, or the path of a .ptx or .cu file, relative to the test's
            folder or the working directory.
        grid, block, entry, cluster, shared_bytes, target
            As in ``EmulatedModule.launch``.
        args : sequence
            NumPy arrays, numbers and tensor maps.
        schedules, seed : int, optional
            Number of schedules, and seed of the random schedules. Default: 10 and 0. The command line overrides both.
        hazards : {"fail", "collect"}, default: "fail"
            "fail" fails the test with a list of the hazards if there are any. "collect" only adds them to the report.
        template : bool, default: False
            Whether CUDA text is a template, as in cudatma.compile(). A .j2 file is always a template.
        options : sequence of str
            NVRTC options.
        include_dirs : sequence of path
            Include directories, relative to the folder of the test or the working directory.
        defines : mapping or sequence of str
            Macro definitions, as in cudatma.compile().
        trace : Trace, optional
            Trace in which to record the launch. Default: a new Trace if --emulator-trace or --emulator-html is given.
        **more
            Other keyword arguments of ``EmulatedModule.launch``, such as ``arrays`` and ``step_limit``.

        Returns
        -------
        Report
            The report of the launch.

        Raises
        ------
        ArgumentError, CompileError, PtxError, StepLimitError
            As in ``EmulatedModule.launch``.
        """
        from cudatma.errors import ArgumentError, quoted

        if hazards not in ("fail", "collect"):
            raise ArgumentError("hazards", hazards, quoted(("fail", "collect")))
        folders = [self._here(folder) for folder in include_dirs]
        module, source = self._load(
            kernel,
            entry=entry,
            target=target,
            template=template,
            options=options,
            include_dirs=folders,
            defines=defines,
        )
        self._launches += 1
        trace = trace or self._trace()
        report = module.launch(
            source.entry,
            grid,
            block,
            args,
            cluster=cluster,
            shared_bytes=shared_bytes,
            schedules=self._first("--emulator-schedules", schedules, SCHEDULES),
            seed=self._first("--emulator-seed", seed, 0),
            replay=self._option("--emulator-replay"),
            hazards="collect",
            target=target or source.target,
            trace=trace,
            **more,
        )
        if report.hazards and hazards == "fail":
            pytest.fail(self._failure(report, trace), pytrace=False)
        return report

    def _first(self, option: str, test_value: int | None, default: int) -> int:
        """Return the first of these that is set: the command-line option, the test's value, the default."""
        numbers = (self._option(option), test_value, default)
        return next(number for number in numbers if number is not None)

    def _here(self, path: str | Path) -> str | Path:
        """Return the path relative to the test's folder if it exists there, otherwise the path itself."""
        return self._folder / path if os.path.exists(self._folder / path) else path

    def _load(self, kernel: Any, *, entry: str | None, **source: Any) -> tuple[EmulatedModule, PtxSource]:
        from cudatma.build.ptx_source import PtxSource, ptx_source
        from cudatma.emulator import EmulatedModule, load

        if isinstance(kernel, EmulatedModule):
            return kernel, PtxSource("", entry or "")
        if isinstance(kernel, str | Path) and "\n" not in str(kernel):
            kernel = self._here(kernel)
        loaded = ptx_source(kernel, entry=entry, **source)
        return load(loaded.ptx, lines=loaded.lines), loaded

    # ---- failures

    def _trace(self) -> Trace | None:
        if self._option("--emulator-trace") is None and self._option("--emulator-html") is None:
            return None
        from cudatma.emulator import Trace

        return Trace()

    def _failure(self, report: Report, trace: Trace | None) -> str:
        """Write the files, and return a message with all hazards and a command that reproduces the first one."""
        from cudatma.errors import counted

        hazards = report.hazards
        more = f" and {counted(len(hazards) - 1, 'more hazard')}" if len(hazards) > 1 else ""
        first = hazards[0]
        lines = [f"{report.kernel}: {first.kind} at {first.source or first.place}{more} on the emulator", ""]
        for number, hazard in enumerate(hazards, 1):
            shown = str(hazard).splitlines()
            lines += [f"{number}. {line}" if not at else f"   {line}" for at, line in enumerate(shown)]
        lines += [f"warning: {warning}" for warning in report.warnings]
        lines += ["", f"hint: {report.hint}"] if report.hint else []
        lines += ["", f"more: {report.more}"]
        again = f'pytest "{self._test}" --emulator-seed {first.seed} --emulator-replay {first.schedule}'
        lines += ["", "to reproduce the first hazard with a picture:", f"  {again} --emulator-trace traces"]
        written = self._write("--emulator-html", {".html": report.to_html})
        if trace is not None:
            written += self._write("--emulator-trace", {".svg": trace.to_svg, ".json": trace.to_json})
        lines += ["", *(f"wrote {path}" for path in written)] if written else []
        return "\n".join(lines)

    def _write(self, option: str, contents: Mapping[str, Callable[[], str]]) -> list[Path]:
        """Write a file for each suffix to the folder that a command-line option sets, and return the paths."""
        folder = self._option(option)
        if folder is None:
            return []
        folder.mkdir(parents=True, exist_ok=True)
        stem = re.sub(r"[^\w.-]+", "_", self._test).strip("_")[-120:]
        stem += f"_{self._launches}" if self._launches > 1 else ""
        paths = []
        for suffix, content in contents.items():
            paths.append(folder / f"{stem}{suffix}")
            paths[-1].write_text(content(), encoding="utf-8")
        return paths
