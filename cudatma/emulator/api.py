"""Functions that load PTX and launch its kernels on NumPy arrays."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import cudatma.emulator.instructions  # noqa: F401
from cudatma.emulator.errors import EmulatorError, ResidencyError, StepLimitError, TrapError
from cudatma.emulator.hazards.checks import checks_of
from cudatma.emulator.hazards.findings import Findings, StopRun, lines_of, report_deadlock, trapped_at
from cudatma.emulator.hazards.global_memory import prepare
from cudatma.emulator.hazards.hazard import CAUSES
from cudatma.emulator.hazards.sources import Lines, Sources
from cudatma.emulator.hazards.variables import SharedVariables
from cudatma.emulator.instructions import unsupported
from cudatma.emulator.machine.arguments import pack_arguments, register_array
from cudatma.emulator.machine.events import Observer
from cudatma.emulator.machine.launch import GridLaunch, Setup
from cudatma.emulator.machine.memory import GlobalMemory
from cudatma.emulator.machine.program import Image, Program
from cudatma.emulator.machine.protocols import Dim, Launch
from cudatma.emulator.machine.scheduler import Deadlock
from cudatma.emulator.machine.state import MAX_LOCAL_BYTES, Cluster
from cudatma.emulator.progress import progress_line
from cudatma.emulator.ptx.names import Variables
from cudatma.emulator.ptx.parser import parse
from cudatma.emulator.ptx.types import Array
from cudatma.emulator.report import Report
from cudatma.emulator.trace import Trace
from cudatma.errors import ArgumentError, ArgumentTypeError, CudaTmaError, HazardError, whole_number
from cudatma.target import TARGETS, Target, get_target

#: Default maximum number of segments in a schedule. A kernel with short segments reaches this limit after minutes.
STEP_LIMIT = 5_000_000
MAX_THREADS = 1024
MAX_GRID, MAX_BLOCK = (2**31 - 1, 65535, 65535), (1024, 1024, 64)
MAX_PARAM_BYTES = 32764
MAX_SHARED_BYTES = 227 << 10


def load(ptx: str, *, lines: Lines | None = None, smem_layout: Sequence[tuple[str, int, int]] = ()) -> EmulatedModule:
    """Parse PTX and prepare its kernels for execution on the CPU.

    Parameters
    ----------
    ptx : str
        Text of a PTX module.
    lines : mapping, optional
        Source lines, as a mapping from file name to a mapping from line number to text. Reports quote these lines.
    smem_layout : sequence of tuple, optional
        (name, offset, size in bytes) of each part of dynamic shared memory, for reports.

    Returns
    -------
    EmulatedModule
        The module, whose variables have their initial values.

    Raises
    ------
    PtxError
        If the text is not valid PTX.

    Examples
    --------
    >>> from cudatma import emulator
    >>> ptx = '''
    ... .version 8.0
    ... .target sm_90
    ... .address_size 64
    ... .visible .entry twice(.param .u64 x)
    ... {
    ...     .reg .b32 %r<3>;
    ...     .reg .b64 %rd<4>;
    ...     ld.param.u64 %rd1, [x];
    ...     mov.u32 %r1, %tid.x;
    ...     mul.wide.u32 %rd2, %r1, 4;
    ...     add.s64 %rd3, %rd1, %rd2;
    ...     ld.global.u32 %r2, [%rd3];
    ...     add.s32 %r2, %r2, %r2;
    ...     st.global.u32 [%rd3], %r2;
    ...     ret;
    ... }
    ... '''
    >>> x = np.arange(4, dtype=np.int32)
    >>> print(emulator.load(ptx).launch("twice", grid=1, block=4, args=(x,)))
    twice: no hazards in 2 schedules
    >>> x
    array([0, 2, 4, 6], dtype=int32)
    """
    return EmulatedModule(ptx, lines=lines, smem_layout=smem_layout)


@dataclass(frozen=True, slots=True)
class KernelParameter:
    """A parameter of a kernel.

    Parameters
    ----------
    name : str
        Name in the PTX.
    kind : str
        PTX type, such as "u64".
    offset_bytes, size_bytes : int
        Position in the parameter buffer.
    """

    name: str
    kind: str
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class KernelResources:
    """Memory that a kernel uses on a GPU.

    Parameters
    ----------
    static_shared_bytes : int
        Static shared memory of a CTA in bytes, up to the start of dynamic shared memory.
    local_bytes : int
        Local memory of a thread in bytes.
    """

    static_shared_bytes: int
    local_bytes: int


class EmulatedModule:
    """A PTX module whose kernels run on the CPU.

    Create a module with `load`. Its variables keep their values between launches.

    Parameters
    ----------
    ptx : str
        Text of a PTX module.
    lines : mapping, optional
        Source lines, as a mapping from file name to a mapping from line number to text.
    smem_layout : sequence of tuple, optional
        (name, offset, size in bytes) of each part of dynamic shared memory.
    """

    def __init__(
        self, ptx: str, *, lines: Lines | None = None, smem_layout: Sequence[tuple[str, int, int]] = ()
    ) -> None:
        self.image = Image(parse(ptx))
        self.module = self.image.module
        paths = {path.rsplit("/", 1)[-1]: path for path in self.module.files.values()}
        self.sources = Sources(ptx, lines or {}, paths)
        self._smem_layout = tuple(smem_layout)

    @property
    def entries(self) -> tuple[str, ...]:
        """Names of the kernels."""
        return tuple(f.name for f in self.module.functions.values() if f.is_entry)

    @property
    def globals(self) -> Variables:
        """Mapping of names to ``__device__`` and ``__constant__`` variables. Assign an array to change a variable."""
        return Variables(self.image.variables)

    def twin(self) -> EmulatedModule:
        """Return a copy of the module whose variables have their initial values.

        Returns
        -------
        EmulatedModule
            The copy, which shares the parsed PTX with this module.
        """
        twin = copy.copy(self)
        twin.image = self.image.twin()
        return twin

    def parameters(self, name: str) -> tuple[KernelParameter, ...]:
        """Return the parameters of a kernel.

        Parameters
        ----------
        name : str
            Kernel name, as for `launch`.

        Returns
        -------
        tuple of KernelParameter
            The parameters in the order of their declaration.
        """
        program = self.image.entry(name)
        return tuple(
            KernelParameter(parameter.name, parameter.kind, program.param_offsets[parameter.name], parameter.size_bytes)
            for parameter in program.function.params
        )

    def pack(self, name: str, args: Sequence[Any], *, names: Sequence[str] = ()) -> tuple[bytes, ...]:
        """Convert arguments to the bytes of a kernel's parameters.

        Parameters
        ----------
        name : str
            Kernel name, as for `launch`.
        args : sequence
            Kernel arguments, as for `launch`.
        names : sequence of str, optional
            Names of the arguments in messages.

        Returns
        -------
        tuple of bytes
            The bytes of each parameter.

        Raises
        ------
        ArgumentError
            If an argument does not fit its parameter.
        """
        names = names or [f"args[{index}]" for index in range(len(args))]
        buffer = pack_arguments(self.image.entry(name), args, GlobalMemory(), names)
        spans = ((p.offset_bytes, p.offset_bytes + p.size_bytes) for p in self.parameters(name))
        return tuple(buffer[start:end] for start, end in spans)

    def resources(self, name: str) -> KernelResources:
        """Return the memory that a kernel uses.

        Parameters
        ----------
        name : str
            Kernel name, as for `launch`.

        Returns
        -------
        KernelResources
            Static shared memory and local memory.
        """
        program = self.image.entry(name)
        return KernelResources(self.image.shared_layout(program.function.name)[1], program.local_bytes)

    def variable(self, name: str) -> Array:
        """Return the memory of a global or constant variable as an array.

        Parameters
        ----------
        name : str
            Name of the variable.

        Returns
        -------
        ndarray
            Bytes of the variable, shape (n,), dtype uint8. Writing to the array changes the variable.
        """
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
        names: Sequence[str] = (),
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

        Parameters
        ----------
        name : str
            Mangled or plain name of the kernel, or an unambiguous part of it.
        grid, block : int or sequence of int
            Number of CTAs along each axis of the grid, and number of threads along each axis of a CTA. Each has one to
            three axes.
        args : sequence, optional
            Kernel arguments: NumPy arrays (passed by address), numbers, structures, bytes or tensor maps.
        cluster : int or sequence of int, optional
            Number of CTAs along each axis of a cluster. Default: the cluster shape that the kernel declares, or one
            CTA.
        shared_bytes : int, default: 0
            Number of bytes of dynamic shared memory per CTA.
        schedules : int, default: 2
            Number of schedules. Schedule 0 runs in order, schedule 1 delays asynchronous work as much as possible, and
            later schedules are random. Every schedule starts with the same array contents.
        seed : int, default: 0
            Seed of the random schedules.
        replay : int, optional
            Number of the only schedule to run. Default: run all schedules.
        hazards : {"raise", "collect", "off"}, default: "raise"
            Whether to raise a HazardError, to return hazards in the report, or to skip the checks.
        arrays : sequence of ndarray, optional
            Additional arrays that the kernel accesses through pointers in memory.
        names : sequence of str, optional
            Names of the elements of `args`, followed by those of `arrays`, for messages. Default: the names of the
            parameters in the source or the PTX if they are known, otherwise "args[0]", "arrays[0]", ...
        programmatic : bool, default: False
            Whether to check the kernel as a programmatic dependent launch. The previous grid may then still be running,
            so all writes to global memory and all reads of `produced_by_previous` must follow griddepcontrol.wait.
        produced_by_previous : sequence of ndarray, optional
            Arrays that the previous grid writes. Implies `programmatic`.
        target : str or Target, optional
            Architecture whose limits apply. Default: the target of the PTX module.
        step_limit : int, default: 5000000
            Maximum number of segments in a schedule.
        resident_clusters : int, default: 132
            Maximum number of live clusters. More clusters start only if all live clusters are waiting.
        registers : int, optional
            Number of registers per thread at the start of the kernel, as in its cubin. If it is 0, setmaxnreg has no
            effect, as when ptxas ignores it. Default: the number that .maxnreg and the launch bounds imply.
        trace : Trace, optional
            Trace that records the events of the last schedule, or of the first schedule with a hazard.
        progress : callable, optional
            Function to call with the number of finished schedules and the number of steps of the current schedule.
            Default: launches that take more than 5 seconds show their progress on stderr if it is a terminal.
        stop_at : iterable of str, optional
            Kinds of hazards that end a schedule, possibly before the kernel has written its results.

        Returns
        -------
        Report
            Hazards and warnings of all schedules.

        Raises
        ------
        ArgumentError
            If an argument or the launch configuration is invalid.
        PtxError
            If the kernel contains an instruction that the emulator does not support.
        TrapError
            If an instruction would stop the kernel on a GPU.
        StepLimitError
            If a schedule exceeds `step_limit`.
        ResidencyError
            If the live CTAs fill the host memory and all of them wait for CTAs that have not started.
        HazardError
            If hazards are found and `hazards` is "raise".

        Notes
        -----
        If a kernel that runs to completion causes a HazardError, arrays and variables contain the results of the last
        schedule. After any other exception, including KeyboardInterrupt, their previous contents are restored.
        griddepcontrol.launch_dependents has no effect.
        """
        program = self.image.entry(name)
        if hazards not in ("raise", "collect", "off"):
            raise ArgumentError("hazards", hazards, "raise, collect, off")
        remedy = "run `cudatma explain` to list the kinds"
        if isinstance(stop_at, str):
            raise ArgumentTypeError("stop_at", "str", "a sequence of hazard kinds", remedy)
        stop_at = tuple(stop_at)
        for kind in stop_at:
            if kind not in CAUSES:
                raise ArgumentError("stop_at", kind, "a sequence of hazard kinds, such as ('data_race',)", remedy)
        schedules, seed = natural("schedules", schedules, 1), natural("seed", seed)
        replay = None if replay is None else natural("replay", replay)
        if trace is not None and not isinstance(trace, Trace):
            raise ArgumentTypeError("trace", type(trace).__name__, "a Trace or None")
        memory = GlobalMemory()
        self.image.map_into(memory)
        arg_names, array_names = _names(names, args, arrays)
        for label, array in zip(array_names, arrays, strict=True):
            if isinstance(array, np.ndarray):
                memory.add(array, label)
            else:
                register_array(array, label, memory)
        parameters = pack_arguments(program, args, memory, arg_names)
        if not names:
            _name_regions(memory, self.sources, program)
        self.image.check(program.function.name)
        shape = _shape("cluster", cluster if cluster is not None else _own_cluster(program.function.directives))
        setup = Setup(
            self.image,
            program,
            _shape("grid", grid),
            _shape("block", block),
            shape,
            natural("shared_bytes", shared_bytes),
            parameters,
            memory,
            natural("step_limit", step_limit, 1),
            natural("resident_clusters", resident_clusters, 1),
            None if registers is None else natural("registers", registers),
        )
        setup.extra.update(_dependence(memory, programmatic, produced_by_previous), track_all=replay is not None)
        setup.extra["target"] = _target_of(target, self.module.target)
        setup.extra["names_cluster"] = cluster is not None or "reqnctapercluster" in program.function.directives
        variables = SharedVariables.of(self.image, program.function.name, self._smem_layout)
        findings = Findings(program.function.name, stop_at, self.sources, variables)
        chosen = _target_of(target, self.module.target)
        _check_setup(setup, chosen, self.image.shared_layout(program.function.name)[1])
        if chosen is not None:
            for function, at, feature in unsupported(self.image, program.function.name, chosen):
                findings.unsupported(self.image.program(function), at, chosen.name, feature)
        traces = [] if trace is None else [trace]

        def observe(launch: Launch, block_cluster: Cluster) -> list[Observer]:
            checks = [] if hazards == "off" else checks_of(launch, block_cluster, findings)
            return [*traces, *checks]

        setup.observe = observe
        report = Report(program.function.name, 1 if replay is not None else schedules)
        report.shape = _shape_text(setup, chosen)
        report.sources, report.variables, report.trace = self.sources, variables, trace
        began = time.perf_counter()
        initial = _snapshot(memory)
        display = progress_line(program.function.name, report.schedules) if progress is None else nullcontext(progress)
        with display as show:
            try:
                for done, number in enumerate([replay] if replay is not None else range(schedules)):
                    if done:
                        memory.restore(initial)
                    setup.show_steps = partial(show, done)
                    launch = GridLaunch(setup, number, seed)
                    for recording in traces:
                        recording.begin(launch)
                    is_endless = False
                    with suppress(StopRun):
                        is_endless = self._run_one(launch, report, findings, hazards)
                    if findings.hazards():
                        traces.clear()
                    show(done + 1, 0)
                    if is_endless:  # Other schedules would spend as much time in the same loop.
                        report.schedules = done + 1
                        break
            except BaseException:
                memory.restore(initial)
                raise
            finally:
                if trace is not None:
                    trace.end()
        report.hazards, report.warnings = findings.hazards(), findings.warnings()
        report.seconds = time.perf_counter() - began
        if hazards == "raise" and report.hazards:
            raise HazardError(str(report), report.hazards, report)
        return report

    def _run_one(self, launch: GridLaunch, report: Report, findings: Findings, hazards: str) -> bool:
        """Run one schedule. Return whether it ended in an infinite loop."""
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
            hazards_text = "\n".join(map(str, findings.hazards()))
            raise HazardError(
                f"{hazards_text}\nafter which the kernel stopped: {located}", findings.hazards()
            ) from error
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
            report.unchecked += [note for note in launch.unchecked if note not in report.unchecked]
        return False


def _located(launch: Launch, error: TrapError) -> TrapError:
    """Return the error with its location added: instruction, source line, CTA and warp."""
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
    """Return the arrays and flags that describe the previous grid. Raise ArgumentError if an argument is invalid."""
    bases = set()
    for position, array in enumerate(produced):
        region = memory.find(memory.add(array, f"produced_by_previous[{position}]"))
        if region is not None:
            bases.add(region.base)
    return {"programmatic": bool(programmatic) or bool(bases), "produced": bases}


def _names(names: Sequence[str], args: Sequence[Any], arrays: Sequence[Any]) -> tuple[Sequence[str], Sequence[str]]:
    """Return the names of the arguments and the additional arrays."""
    if not isinstance(args, Sequence) or isinstance(args, str | bytes):
        raise ArgumentTypeError("args", type(args).__name__, "a sequence with one value per parameter")
    if not isinstance(arrays, Sequence):
        raise ArgumentTypeError("arrays", type(arrays).__name__, "a sequence of arrays")
    if not names:
        return [f"args[{i}]" for i in range(len(args))], [f"arrays[{i}]" for i in range(len(arrays))]
    if len(names) != len(args) + len(arrays):
        raise ArgumentError(
            "names", f"{len(names)} names", f"a sequence with {len(args)} names for args and {len(arrays)} for arrays"
        )
    return names[: len(args)], names[len(args) :]


def _name_regions(memory: GlobalMemory, sources: Sources, program: Program) -> None:
    """Name the array arguments after the parameters of the kernel."""
    entry, parameters = program.function.name, program.function.params
    declared = [parameter.name for parameter in parameters]
    if all(re.search(r"_param_\d+$", name) for name in declared):  # The compiler generated these names.
        declared = sources.parameters(entry, len(parameters)) or [f"args[{i}]" for i in range(len(parameters))]
    names = {f"args[{position}]": name for position, name in enumerate(declared)}
    for region in memory.regions():
        region.name = names.get(region.name, region.name)


def natural(field: str, value: object, minimum: int = 0) -> int:
    """Validate an integer argument. Raise ArgumentError if the value is not an integer or is too small."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < minimum:
        raise ArgumentError(field, value, whole_number(minimum))
    return int(value)


def _snapshot(memory: GlobalMemory) -> dict[int, Array]:
    try:
        return memory.snapshot()
    except MemoryError:
        size = sum(region.size for region in memory.regions() if region.is_writable)
        raise ArgumentError(
            "args",
            f"{size} writable bytes",
            "small enough to fit in memory twice (a launch copies its arrays)",
            "pass smaller arrays",
        ) from None


def _shape(field: str, value: int | Sequence[int]) -> Dim:
    """Return one to three positive extents as a tuple of three extents."""
    parts = (value,) if isinstance(value, int | np.integer) or not isinstance(value, Iterable) else tuple(value)
    if not 1 <= len(parts) <= 3 or any(isinstance(p, bool) or not isinstance(p, int | np.integer) for p in parts):
        raise ArgumentError(field, value, "a sequence of one to three integers")
    extents = (*(int(p) for p in parts), 1, 1)[:3]
    if min(extents) < 1 or max(extents) >= 1 << 31:
        raise ArgumentError(field, value, "a sequence of extents from 1 to 2**31 - 1")
    return extents[0], extents[1], extents[2]


def _own_cluster(directives: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    return directives.get("reqnctapercluster", (1, 1, 1))


def _target_of(target: str | Target | None, own: str) -> Target | None:
    """Return the target whose limits apply, or None if the module's architecture is unknown."""
    if target is not None:
        return get_target(target)
    return TARGETS.get(own)


def _check_setup(setup: Setup, target: Target | None, static_bytes: int) -> None:
    """Raise ArgumentError if cuLaunchKernelEx would reject the launch."""
    threads = setup.block[0] * setup.block[1] * setup.block[2]
    limit = min(MAX_THREADS, *[_product(setup.program.function.directives.get("maxntid", ())) or MAX_THREADS])
    if threads > limit:
        raise ArgumentError("block", setup.block, f"at most {limit} threads")
    for field, shape, max_shape in (("grid", setup.grid, MAX_GRID), ("block", setup.block, MAX_BLOCK)):
        if any(extent > allowed for extent, allowed in zip(shape, max_shape, strict=True)):
            raise ArgumentError(field, shape, f"at most {max_shape}")
    required = setup.program.function.directives.get("reqntid")
    if required and tuple([*required, 1, 1][:3]) != setup.block:
        raise ArgumentError("block", setup.block, f"{required} (the kernel's .reqntid)")
    blocks = _product(setup.cluster)
    for axis in range(3):
        if setup.grid[axis] % setup.cluster[axis]:
            raise ArgumentError("cluster", setup.cluster, f"a divisor of the grid {setup.grid} along each axis")
    max_blocks = target.max_cluster_blocks if target is not None else 8
    if blocks > max(max_blocks, 16 if max_blocks == 8 else max_blocks):
        raise ArgumentError(
            "cluster", setup.cluster, f"at most {max_blocks} CTAs on {target.name if target else 'this target'}"
        )
    if setup.program.param_bytes > MAX_PARAM_BYTES:
        raise ArgumentError("args", f"{setup.program.param_bytes} bytes", f"at most {MAX_PARAM_BYTES} bytes in total")
    if setup.program.local_bytes > MAX_LOCAL_BYTES:
        raise ArgumentError(
            "local memory", f"{setup.program.local_bytes} bytes", f"at most {MAX_LOCAL_BYTES} bytes per thread"
        )
    total = static_bytes + setup.dynamic_bytes
    if total > MAX_SHARED_BYTES:
        raise ArgumentError(
            "shared_bytes", f"{total} bytes", f"at most {MAX_SHARED_BYTES} bytes, including static shared memory"
        )
    if target is not None and total > target.smem_per_block_bytes:
        raise ArgumentError(
            "shared_bytes",
            f"{total} bytes",
            f"at most {target.smem_per_block_bytes} bytes on {target.name}, including static shared memory",
        )


def _shape_text(setup: Setup, target: Target | None) -> str:
    """Return the grid, block and cluster shapes and the target of a launch as text."""
    shapes = {"grid": setup.grid, "block": setup.block, "cluster": setup.cluster}
    shown = [
        f"{name} {'x'.join(map(str, shape))}" for name, shape in shapes.items() if name != "cluster" or max(shape) > 1
    ]
    return ", ".join([*shown, target.name] if target is not None else shown)


def _product(values: Sequence[int]) -> int:
    result = 1 if values else 0
    for value in values:
        result *= value
    return result
