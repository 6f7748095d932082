"""Run a program's kernel launches on the emulator, and log their reports."""

from __future__ import annotations

import importlib
import importlib.abc
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, overload

from cudatma.build.kernel import default_target
from cudatma.context import Runtime, using_runtime
from cudatma.emulator import Hazard, Report, Trace
from cudatma.emulator.api import STEP_LIMIT, natural
from cudatma.emulator.ptx.names import plain_name
from cudatma.errors import (
    ArgumentError,
    ArgumentTypeError,
    CudaTmaError,
    HazardError,
    LaunchError,
    counted,
    duration,
    quoted,
)
from cudatma.programs.launch import ProgramLaunch, calling_place
from cudatma.programs.patches import Patches
from cudatma.target import Target, get_target

#: Maps a module of a library to the function that sends the library's launches to a log, as "module:function". The
#: function is called with Patches and the log when the program imports the module, so that unused libraries cost
#: nothing.
INTERCEPTORS: dict[str, str] = {
    "torch": "cudatma.programs.torch:intercept",
    "triton": "cudatma.programs.triton:intercept",
    "cutlass.utils.hardware_info": "cudatma.programs.cute_dsl:intercept",
    "cupy": "cudatma.programs.cupy:intercept",
    "cuda.core": "cudatma.programs.cuda_core:intercept",
    "cuda.bindings.driver": "cudatma.programs.driver:intercept",
    "multiprocessing.process": "cudatma.programs.processes:count_multiprocessing",
    "subprocess": "cudatma.programs.processes:count_subprocesses",
}


@dataclass(frozen=True, slots=True)
class LaunchEntry:
    """A launch and its report.

    Parameters
    ----------
    launch : ProgramLaunch
        The launch without its arguments, so that the log does not keep the program's arrays alive.
    report : Report
        Hazards and warnings.
    seconds : float
        Duration of the emulation.
    is_checked : bool, default True
        Whether the launch was checked for hazards (see `only` in `emulate_launches`).
    """

    launch: ProgramLaunch
    report: Report
    seconds: float
    is_checked: bool = True

    def __str__(self) -> str:
        launch, report = self.launch, self.report
        if not self.is_checked:
            result = "not checked"
        elif report.is_clean:
            result = f"no hazards in {counted(report.schedules, 'schedule')}"
        else:
            result = f"{counted(len(report.hazards), 'hazard')}: {', '.join(sorted(report.kinds))}"
        grid = "x".join(map(str, launch.grid))
        kernel = f"{plain_name(launch.entry)} ({launch.library})"
        return f"{launch.place}: {kernel}, grid {grid}: {result}, {duration(self.seconds)}"


@contextmanager
def naming(library: str, entry: str, place: str) -> Iterator[None]:
    """Prefix error messages with the library, the kernel and the source line of a launch."""
    try:
        yield
    except CudaTmaError as error:
        error.args = (f"{library} launch of {plain_name(entry)} at {place}: {error}",)
        raise


class LaunchLog(Sequence[LaunchEntry]):
    """The launches that a program has run on the emulator, in order. `emulate_launches` creates this log.

    Parameters
    ----------
    target : Target
        Architecture of the kernels.
    options : dict
        Options of `EmulatedModule.launch` for checked launches.
    hazards, only, on_launch, trace : see emulate_launches
        Options of `emulate_launches`.
    """

    def __init__(
        self,
        *,
        target: Target,
        options: dict[str, Any],
        hazards: str,
        only: str | None,
        on_launch: Callable[[LaunchEntry], None] | None,
        trace: bool = False,
    ) -> None:
        self.target, self._trace = target, trace
        self._options, self._hazards, self._only, self._on_launch = options, hazards, only, on_launch
        self._entries: list[LaunchEntry] = []
        #: Held during a launch, because the emulator restores the arrays before each schedule.
        self._lock = threading.RLock()
        #: Whether the emulate_launches block is still open.
        self.is_open = True
        #: Number of Python processes that the program has started.
        self.child_processes = 0

    @overload
    def __getitem__(self, index: int) -> LaunchEntry: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[LaunchEntry]: ...
    def __getitem__(self, index: int | slice) -> LaunchEntry | Sequence[LaunchEntry]:
        return self._entries[index]

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def hazards(self) -> list[Hazard]:
        """Hazards of all launches."""
        return [hazard for entry in self for hazard in entry.report.hazards]

    @property
    def is_clean(self) -> bool:
        """Whether no launch has hazards. True for an empty log."""
        return not self.hazards

    def __str__(self) -> str:
        return "\n".join([*map(str, self), *map(str, self.hazards)]) or "no launches"

    def run(self, launch: ProgramLaunch) -> Report:
        """Run a launch, and add it to the log. Launches from different threads run one at a time.

        Parameters
        ----------
        launch : ProgramLaunch
            The launch.

        Returns
        -------
        Report
            Hazards and warnings.

        Raises
        ------
        HazardError
            If there are hazards and `hazards` is "raise". The arrays then contain the results.
        LaunchError
            If the `emulate_launches` block has ended.
        """
        __tracebackhide__ = True
        with self._lock:
            return self._run(launch)

    def _selects(self, entry: str) -> bool:
        """Return whether the mangled name or the C++ name of a kernel contains `only`."""
        return self._only is None or self._only in entry or self._only in plain_name(entry)

    def _run(self, launch: ProgramLaunch) -> Report:
        __tracebackhide__ = True
        if not self.is_open:
            with naming(launch.library, launch.entry, launch.place):
                allowed = "inside the emulate_launches() block that created the kernel"
                raise LaunchError("launch", "a launch after the end of the block", allowed)
        is_checked = self._hazards != "off" and self._selects(launch.entry)
        options = self._options if is_checked else self._options | {"schedules": 1}
        options = options | {"trace": Trace()} if is_checked and self._trace else options
        started = time.perf_counter()
        with naming(launch.library, launch.entry, launch.place):
            report = launch.run(hazards="collect" if is_checked else "off", **options)
        seconds = time.perf_counter() - started
        report.title, report.place = f"{plain_name(launch.entry)} ({launch.library})", launch.place
        if report.is_clean:
            report.trace = None
        entry = LaunchEntry(replace(launch, args=(), arrays=(), loaded=None), report, seconds, is_checked)
        self._entries.append(entry)
        if self._on_launch is not None:
            self._on_launch(entry)
        if self._hazards == "raise" and report.hazards:
            raise HazardError("\n".join(map(str, [entry, *report.hazards])), report.hazards, report)
        return report


#: Maps each function with an open block to the program line that opened the block.
_open: dict[str, str] = {}
_open_lock = threading.Lock()


@contextmanager
def only_block(function: str) -> Iterator[None]:
    """Raise LaunchError if another block of this function is open in any thread of the process."""
    with _open_lock:
        if function in _open:
            command = f"cudatma {function.partition('_')[0]}"
            remedy = f"exit the block opened at {_open[function]} first (`{command} PROGRAM.py` also opens one)"
            raise LaunchError(function, ..., "open at most once per process", remedy)
        _open[function] = calling_place()
    try:
        yield
    finally:
        del _open[function]


@contextmanager
def emulate_launches(
    *,
    target: str | Target | None = None,
    schedules: int = 2,
    seed: int = 0,
    replay: int | None = None,
    hazards: str = "raise",
    only: str | None = None,
    on_launch: Callable[[LaunchEntry], None] | None = None,
    trace: bool = False,
    step_limit: int = STEP_LIMIT,
) -> Iterator[LaunchLog]:
    """Run the kernel launches in a ``with`` block on the emulator.

    The launches may come from Triton, Gluon, the CuTe DSL, CuPy, cuda.core or cuda-python.

    Parameters
    ----------
    target : str or Target, optional
        Architecture for which kernels are compiled. Default: $CUDATMA_TARGET if it is set, otherwise the target of
        the GPU, or sm_90a if there is no GPU.
    schedules : int, default 2
        Number of schedules per launch.
    seed : int, default 0
        Seed of the random schedules.
    replay : int, optional
        Run only the schedule with this number.
    hazards : {"raise", "collect", "off"}, default "raise"
        "raise" raises HazardError after a launch with hazards, "collect" only adds the hazards to the log, and "off"
        disables the checks. In all cases, the launch writes its results.
    only : str, optional
        Check only kernels whose names contain this text. Other kernels run in one schedule, without checks.
    on_launch : callable, optional
        Function to call with the LaunchEntry of each launch.
    trace : bool, default False
        Whether to add a trace to the report of each launch with hazards, for `Report.to_html`. Tracing slows launches
        down.
    step_limit : int, default 5000000
        Maximum number of steps in a schedule. A launch that exceeds it raises StepLimitError.

    Yields
    ------
    LaunchLog
        The launches so far.

    Raises
    ------
    HazardError
        If a launch in the block has hazards and `hazards` is "raise".
    ArgumentError, ArgumentTypeError, TargetError
        If an option is invalid.
    LaunchError
        If another block is open in any thread.

    Notes
    -----
    Launches from all threads run on the emulator, one at a time. torch uses the CPU as its CUDA device in the thread
    that opens the block, and in threads that the program starts with `threading` inside the block.
    """
    if hazards not in ("raise", "collect", "off"):
        raise ArgumentError("hazards", hazards, quoted(("raise", "collect", "off")))
    if not isinstance(only, str | None):
        raise ArgumentTypeError("only", type(only).__name__, "a str or None")
    if not (on_launch is None or callable(on_launch)):
        raise ArgumentTypeError("on_launch", type(on_launch).__name__, "a function that takes a LaunchEntry")
    if not isinstance(trace, bool):
        raise ArgumentTypeError("trace", type(trace).__name__, "True or False")
    options = {"schedules": natural("schedules", schedules, 1), "seed": natural("seed", seed)}
    options["step_limit"] = natural("step_limit", step_limit, 1)
    if replay is not None:
        options["replay"] = natural("replay", replay)
    architecture = default_target() if target is None else get_target(target)
    log = LaunchLog(target=architecture, options=options, hazards=hazards, only=only, on_launch=on_launch, trace=trace)
    # A new Runtime contains no plans for the real driver, and is discarded with its plans for the emulated driver.
    with only_block("emulate_launches"), using_runtime(Runtime()), intercepting(INTERCEPTORS, log):
        try:
            yield log
        finally:
            log.is_open = False


@contextmanager
def intercepting(installers: Mapping[str, str], sink: Any) -> Iterator[None]:
    """Install the patches of each library when the program imports it, or immediately if it is already imported."""
    with Patches() as patches:

        def install(name: str) -> None:
            module, _, function = installers[name].partition(":")
            getattr(importlib.import_module(module), function)(patches, sink)

        imported = [name for name in installers if name in sys.modules]
        pending = set(installers) - set(imported)

        def install_late(name: str) -> None:
            install(name)
            patches.replace_variables()

        hook = _ImportHook(pending, install_late)
        sys.meta_path.insert(0, hook)
        patches.callback(pending.clear)
        patches.callback(sys.meta_path.remove, hook)
        for name in imported:
            install(name)
        patches.replace_variables()
        yield


class _ImportHook(importlib.abc.MetaPathFinder):
    """Import hook that calls a function after the import of each pending module."""

    def __init__(self, pending: set[str], then: Callable[[str], None]) -> None:
        self._pending, self._then = pending, then

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        if name not in self._pending:
            return None
        later = [finder for finder in sys.meta_path[sys.meta_path.index(self) + 1 :] if hasattr(finder, "find_spec")]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in later)), None)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if name in self._pending:
                self._pending.remove(name)
                self._then(name)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
