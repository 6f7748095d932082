"""Load PTX, launch its kernels on NumPy arrays, get a report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import numpy as np

import cudatma.emulator.instructions  # noqa: F401
from cudatma.emulator.errors import EmulatorError, ResidencyError, StepLimitError, TrapError
from cudatma.emulator.hazards.checks import checks_of
from cudatma.emulator.hazards.findings import Findings, Found, lines_of, report_deadlock, trapped_at
from cudatma.emulator.hazards.global_memory import prepare
from cudatma.emulator.hazards.report import CAUSES, Report
from cudatma.emulator.instructions import unsupported
from cudatma.emulator.machine.arguments import pack_arguments, register_array
from cudatma.emulator.machine.events import Observer
from cudatma.emulator.machine.launch import GridLaunch, Setup
from cudatma.emulator.machine.memory import GlobalMemory
from cudatma.emulator.machine.program import Image
from cudatma.emulator.machine.protocols import Dim, Launch
from cudatma.emulator.machine.scheduler import Deadlock
from cudatma.emulator.machine.state import MAX_LOCAL_BYTES, Cluster
from cudatma.emulator.progress import progress_line
from cudatma.emulator.ptx.names import Variables
from cudatma.emulator.ptx.parser import parse
from cudatma.emulator.ptx.types import Array
from cudatma.emulator.trace import Trace
from cudatma.errors import ArgumentError, ArgumentTypeError, CudaTmaError, HazardError
from cudatma.target import TARGETS, Target, get_target

Lines = Mapping[str, Mapping[int, str]]

#: Segments after which a launch is given up as endless: minutes, where they are short.
STEP_LIMIT = 5_000_000
MAX_THREADS = 1024
MAX_GRID, MAX_BLOCK = (2**31 - 1, 65535, 65535), (1024, 1024, 64)
MAX_PARAM_BYTES = 32764
MAX_SHARED_BYTES = 227 << 10


def load(ptx: str, *, lines: Lines | None = None) -> EmulatedModule:
    """Parse PTX text.

    lines: file name -> line number -> text of the sources that it was compiled from, which hazards then quote.
    Raises PtxError if the text is not PTX.
    """
    return EmulatedModule(ptx, lines=lines)


class EmulatedModule:
    """A PTX module whose kernels run on the CPU. Variables of the module keep their values between launches."""

    def __init__(self, ptx: str, *, lines: Lines | None = None) -> None:
        self.image = Image(parse(ptx))
        self.module = self.image.module
        self._lines = lines or {}

    @property
    def entries(self) -> tuple[str, ...]:
        """Names of the kernels."""
        return tuple(f.name for f in self.module.functions.values() if f.is_entry)

    @property
    def globals(self) -> Variables:
        """The module's ``__device__`` and ``__constant__`` variables: ``module.globals["x"] = array`` sets one."""
        return Variables(self.image.variables)

    def variable(self, name: str) -> Array:
        """The bytes of a global or constant variable, (n,) uint8, writable; ``globals`` has them all."""
        return self.globals[name]

    def launch(
        self,
        name: str,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        args: Sequence[Any] = (),
        *,
        cluster: int | Sequence[int] | None = None,
        shared_bytes: int = 0,
        schedules: int = 2,
        seed: int = 0,
        replay: int | None = None,
        hazards: str = "raise",
        arrays: Sequence[Any] = (),
        programmatic: bool = False,
        produced_by_previous: Sequence[Any] = (),
        target: str | Target | None = None,
        step_limit: int = STEP_LIMIT,
        resident_clusters: int = 132,
        registers: int | None = None,
        trace: Trace | None = None,
        progress: Callable[[int, int], None] | None = None,
        stop_at: Iterable[str] = (),
    ) -> Report:
        """Run a kernel under several schedules and report its hazards.

        name: an entry, mangled or plain, or a part of its name that only one has. grid, block, cluster: thread blocks,
        threads of a thread block, CTAs of a cluster; an int or up to three. args: NumPy arrays (their memory is the
        device's), numbers, structures, bytes, tensor maps. arrays: more memory that the kernel reaches through
        addresses. shared_bytes: dynamic shared memory.
        schedules: how many; number 0 is in order, number 1 most delayed, further ones draw from ``seed``; each starts
        from the same array contents. replay: run this schedule alone. hazards: "raise" (HazardError with all findings),
        "collect" (in the report) or "off". target: whose limits apply; by default the module's. step_limit: segments of
        one schedule. resident_clusters: how many clusters are live at a time, unless all of them wait for clusters that
        have not started.
        registers: of a thread when the kernel begins, as its cubin has them (0: ptxas ignores setmaxnreg); by default
        what .maxnreg and the launch bounds say. trace: records the events of the last schedule, or of the first with
        a hazard. progress: called with the number of finished schedules and the steps of the running one (0 between
        schedules), after each schedule and from time to time during a long one. By default, launches longer than
        5 seconds show their progress on stderr if it is a terminal. stop_at: kinds of hazard; a schedule ends at the
        first one, even if the kernel has not written its results yet.

        programmatic: as in a programmatic dependent launch, the previous grid may still run: all writes to global
        memory, and all reads of the arrays ``produced_by_previous``, must come after griddepcontrol.wait. Arrays there
        imply ``programmatic``; launch_dependents has no effect on its own grid.

        Raises ArgumentError for a launch that cannot work, PtxError, TrapError for what the hardware would stop,
        StepLimitError, ResidencyError and HazardError. After a HazardError of a kernel that ran to its end, arrays and
        variables hold what the last schedule wrote; after any other exception, Ctrl-C included, what they held
        before the launch.
        """
        program = self.image.entry(name)
        if hazards not in ("raise", "collect", "off"):
            raise ArgumentError("hazards", hazards, "raise, collect, off")
        stop_at = tuple(stop_at)
        for kind in stop_at:
            if kind not in CAUSES:
                raise ArgumentError("stop_at", kind, f"a sequence of {', '.join(CAUSES)}")
        schedules, seed = _natural("schedules", schedules, 1), _natural("seed", seed)
        replay = None if replay is None else _natural("replay", replay)
        if trace is not None and not isinstance(trace, Trace):
            raise ArgumentTypeError("trace", type(trace).__name__, "a Trace, or None")
        memory = GlobalMemory()
        self.image.map_into(memory)
        if not isinstance(arrays, Sequence):
            raise ArgumentTypeError("arrays", type(arrays).__name__, "a sequence of arrays")
        for position, array in enumerate(arrays):
            if isinstance(array, np.ndarray):
                memory.add(array, f"arrays[{position}]")
            else:
                register_array(array, f"arrays[{position}]", memory)
        parameters = pack_arguments(program, args, memory)
        self.image.check(program.function.name)
        shape = _shape("cluster", cluster if cluster is not None else _own_cluster(program.function.directives))
        setup = Setup(
            self.image,
            program,
            _shape("grid", grid),
            _shape("block", block),
            shape,
            _natural("shared_bytes", shared_bytes),
            parameters,
            memory,
            _natural("step_limit", step_limit, 1),
            _natural("resident_clusters", resident_clusters, 1),
            None if registers is None else _natural("registers", registers),
        )
        setup.extra.update(_dependence(memory, programmatic, produced_by_previous), track_all=replay is not None)
        setup.extra["target"] = _target_of(target, self.module.target)
        setup.extra["names_cluster"] = cluster is not None or "reqnctapercluster" in program.function.directives
        findings = Findings(program.function.name, stop_at, self._lines)
        chosen = _target_of(target, self.module.target)
        _check_setup(setup, chosen, self.image.shared_layout(program.function.name)[1])
        if chosen is not None:
            for function, at, feature in unsupported(self.image, program.function.name, chosen):
                findings.unsupported(self.image.program(function), at, chosen.name, feature)
        traces = [] if trace is None else [trace]

        def observe(launch: Launch, block_cluster: Cluster) -> list[Observer]:
            checks = [] if hazards == "off" else checks_of(launch, block_cluster, findings)
            return [*checks, *traces]

        setup.observe = observe
        report = Report(program.function.name, 1 if replay is not None else schedules)
        before = _snapshot(memory)
        shown = progress_line(program.function.name, report.schedules) if progress is None else nullcontext(progress)
        with shown as show:
            try:
                for done, number in enumerate([replay] if replay is not None else range(schedules)):
                    if done:
                        memory.restore(before)
                    setup.show_steps = partial(show, done)
                    launch = GridLaunch(setup, number, seed)
                    for each in traces:
                        each.begin(launch)
                    is_endless = False
                    with suppress(Found):
                        is_endless = self._run_one(launch, report, findings, hazards)
                    if findings.hazards():
                        traces.clear()
                    show(done + 1, 0)
                    if is_endless:  # other schedules would search as long for the same loop
                        report.schedules = done + 1
                        break
            except BaseException:
                memory.restore(before)
                raise
        report.hazards, report.warnings = findings.hazards(), findings.warnings()
        if hazards == "raise" and report.hazards:
            raise HazardError(str(report), report.hazards)
        return report

    def _run_one(self, launch: GridLaunch, report: Report, findings: Findings, hazards: str) -> bool:
        """Run one schedule. Return whether it ended in an endless loop."""
        launch.memory.recent.clear()
        if hazards != "off":
            prepare(launch)
        try:
            launch.run()
        except Deadlock as deadlock:
            if hazards == "off":
                shown = "; ".join(lines_of(deadlock)[:4])
                schedule = f"schedule {launch.scheduler.schedule} of seed {launch.scheduler.seed}"
                raise EmulatorError(f"deadlock in {schedule}: {shown}") from None
            report_deadlock(deadlock, findings)
            return deadlock.is_endless
        except TrapError as error:
            for block_cluster in launch.resident if launch.has_idled else ():
                block_cluster.events.trapped()
            if hazards == "collect":
                findings.trapped(launch, error)
                return False
            located = _located(launch, error)
            if not findings.hazards():
                raise located from None
            found = "\n".join(map(str, findings.hazards()))
            raise HazardError(f"{found}\nthen the kernel stopped: {located}", findings.hazards()) from error
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            MemoryError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            if isinstance(error, CudaTmaError):
                raise
            raise EmulatorError(
                f"{launch.program.function.name} cannot be emulated: {type(error).__name__}: {error}"
            ) from error
        except (StepLimitError, ResidencyError) as error:
            if hazards == "raise" and findings.hazards():
                raise HazardError("\n".join(map(str, findings.hazards())) + f"\n{error}", findings.hazards()) from error
            raise
        finally:
            launch.unmap()
            report.steps += launch.scheduler.steps
            report.printed = report.printed or launch.printed
            report.unchecked += [what for what in launch.unchecked if what not in report.unchecked]
        return False


def _located(launch: Launch, error: TrapError) -> TrapError:
    """The error with its instruction, source line, block and warp."""
    split, at = trapped_at(launch, error)
    program = split.frame.program
    instruction = program.instruction(at)
    source = program.module.source_of(instruction)
    place = f"PTX line {instruction.line}" + (f" ({source})" if source else "")
    warp = split.warp
    return TrapError(
        f"{error}; {place} `{instruction.text}`, block {warp.block.index}, warp {warp.index}", error.error, at
    )


def _dependence(memory: GlobalMemory, programmatic: bool, produced: Sequence[Any]) -> dict[str, Any]:
    """Return what hazard checks need to know of the previous grid. Raises ArgumentError for what is no array."""
    bases = set()
    for position, array in enumerate(produced):
        region = memory.find(memory.add(array, f"produced_by_previous[{position}]"))
        if region is not None:
            bases.add(region.base)
    return {"programmatic": bool(programmatic) or bool(bases), "produced": bases}


def _natural(field: str, value: object, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ArgumentError(field, value, f"an integer from {least} on")
    return int(value)


def _snapshot(memory: GlobalMemory) -> dict[int, Array]:
    try:
        return memory.snapshot()
    except MemoryError:
        size = sum(region.size for region in memory.regions() if region.is_writable)
        raise ArgumentError(
            "args", f"{size} writable bytes", "as many as can be held twice", "what a launch starts from is kept"
        ) from None


def _shape(field: str, value: int | Sequence[int]) -> Dim:
    """One to three positive extents as three."""
    parts = (value,) if isinstance(value, int | np.integer) or not isinstance(value, Iterable) else tuple(value)
    if not 1 <= len(parts) <= 3 or any(isinstance(p, bool) or not isinstance(p, int | np.integer) for p in parts):
        raise ArgumentError(field, value, "one to three integers")
    whole = (*(int(p) for p in parts), 1, 1)[:3]
    if min(whole) < 1 or max(whole) >= 1 << 31:
        raise ArgumentError(field, value, "extents of 1 and more, below 2**31")
    return whole[0], whole[1], whole[2]


def _own_cluster(directives: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    return directives.get("reqnctapercluster", (1, 1, 1))


def _target_of(target: str | Target | None, own: str) -> Target | None:
    """The target whose limits apply; None where the module names an architecture that the table lacks."""
    if target is not None:
        return get_target(target)
    return TARGETS.get(own)


def _check_setup(setup: Setup, target: Target | None, static_bytes: int) -> None:
    """What cuLaunchKernelEx would refuse. Raises ArgumentError."""
    threads = setup.block[0] * setup.block[1] * setup.block[2]
    limit = min(MAX_THREADS, *[_product(setup.program.function.directives.get("maxntid", ())) or MAX_THREADS])
    if threads > limit:
        raise ArgumentError("block", setup.block, f"at most {limit} threads")
    for field, shape, largest in (("grid", setup.grid, MAX_GRID), ("block", setup.block, MAX_BLOCK)):
        if any(extent > allowed for extent, allowed in zip(shape, largest, strict=True)):
            raise ArgumentError(field, shape, f"at most {largest}")
    required = setup.program.function.directives.get("reqntid")
    if required and tuple([*required, 1, 1][:3]) != setup.block:
        raise ArgumentError("block", setup.block, f".reqntid {required}")
    blocks = _product(setup.cluster)
    for axis in range(3):
        if setup.grid[axis] % setup.cluster[axis]:
            raise ArgumentError("cluster", setup.cluster, f"a divisor of the grid {setup.grid} on each axis")
    most = target.max_cluster_blocks if target is not None else 8
    if blocks > max(most, 16 if most == 8 else most):
        raise ArgumentError(
            "cluster", setup.cluster, f"at most {most} CTAs on {target.name if target else 'this target'}"
        )
    if setup.program.param_bytes > MAX_PARAM_BYTES:
        raise ArgumentError("args", f"{setup.program.param_bytes} bytes of parameters", f"at most {MAX_PARAM_BYTES}")
    if setup.program.local_bytes > MAX_LOCAL_BYTES:
        raise ArgumentError("local", f"{setup.program.local_bytes} bytes a thread", f"at most {MAX_LOCAL_BYTES}")
    total = static_bytes + setup.dynamic_bytes
    if total > MAX_SHARED_BYTES:
        raise ArgumentError("shared_bytes", f"{total} bytes with the static ones", f"at most {MAX_SHARED_BYTES}")
    if target is not None and total > target.smem_per_block_bytes:
        raise ArgumentError(
            "shared_bytes",
            f"{total} bytes with the static ones",
            f"at most {target.smem_per_block_bytes} on {target.name}",
        )


def _product(values: Sequence[int]) -> int:
    result = 1 if values else 0
    for value in values:
        result *= value
    return result
