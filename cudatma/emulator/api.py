"""Load PTX, launch its kernels on NumPy arrays, get a report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cudatma.emulator.arguments import pack_arguments, register_array
from cudatma.emulator.cluster import Dim
from cudatma.emulator.errors import EmulatorError, StepLimitError, TrapError
from cudatma.emulator.image import Image
from cudatma.emulator.launch import Launch, Setup
from cudatma.emulator.memory import GlobalMemory
from cudatma.emulator.observer import Findings, Observer, report_deadlock
from cudatma.emulator.parser import parse
from cudatma.emulator.report import Report
from cudatma.emulator.scheduler import Deadlock
from cudatma.emulator.target_rules import unsupported
from cudatma.errors import ArgumentError, CudaTmaError, HazardError
from cudatma.target import TARGETS, Target, get_target

#: Segments after which a launch is given up as endless.
STEP_LIMIT = 20_000_000
MAX_THREADS = 1024
MAX_PARAM_BYTES = 32764
MAX_LOCAL_BYTES = 512 << 10
MAX_SHARED_BYTES = 227 << 10


def load(ptx: str) -> EmulatedModule:
    """Parse PTX text. Raises PtxError, which names the line, for text that is no PTX."""
    return EmulatedModule(ptx)


class EmulatedModule:
    """A PTX module whose kernels run on the CPU. Variables of the module keep their values between launches."""

    def __init__(self, ptx: str) -> None:
        self.image = Image(parse(ptx))
        self.module = self.image.module

    @property
    def entries(self) -> tuple[str, ...]:
        """Names of the kernels."""
        return tuple(f.name for f in self.module.functions.values() if f.is_entry)

    def variable(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The bytes of a global or constant variable, writable."""
        if name not in self.image.variables:
            raise ArgumentError("name", name, ", ".join(self.image.variables) or "none: the module has no variables")
        return self.image.variables[name]

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
        target: str | Target | None = None,
        step_limit: int = STEP_LIMIT,
        resident_clusters: int = 132,
        trace: Any = None,
    ) -> Report:
        """Run a kernel under several schedules and report what is wrong with it.

        name: an entry, or a part of its name that only one has. grid, block, cluster: blocks, threads, blocks a
        cluster; an int or up to three. args: NumPy arrays (their own memory is the device's), numbers, bytes, tensor
        maps. arrays: more memory that the kernel reaches through addresses. shared_bytes: dynamic shared memory.
        schedules: how many; number 0 is in order, number 1 most delayed, further ones draw from ``seed``; each starts
        from the same array contents. replay: run this schedule alone. hazards: "raise" (HazardError with all findings),
        "collect" (in the report) or "off". target: whose limits apply; by default the module's. step_limit: segments of
        one schedule.

        Raises ArgumentError for a launch that cannot work, PtxError, TrapError for what the hardware would stop,
        StepLimitError and HazardError.
        """
        program = self.image.entry(name)
        if hazards not in ("raise", "collect", "off"):
            raise ArgumentError("hazards", hazards, "raise, collect, off")
        if not isinstance(schedules, int) or schedules < 1:
            raise ArgumentError("schedules", schedules, "1 and more")
        memory = GlobalMemory()
        self.image.map_into(memory)
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
            step_limit,
            resident_clusters,
            trace=trace,
        )
        findings = Findings(program.function.name)
        chosen = _target_of(target, self.module.target)
        _check_setup(setup, chosen, self.image.shared_layout(program.function.name)[1])
        if chosen is not None:
            for function, at, feature in unsupported(self.image, program.function.name, chosen):
                findings.unsupported(self.image.program(function), at, chosen.name, feature)
        if hazards != "off":
            setup.observe = lambda launch, block_cluster: Observer(launch, block_cluster, findings)
        report = Report(program.function.name, 1 if replay is not None else schedules)
        before = memory.snapshot() if replay is None and schedules > 1 else None
        for number in [replay] if replay is not None else range(schedules):
            if number and before is not None:
                memory.restore(before)
            self._run_one(setup, number, seed, report, findings, hazards)
        report.hazards = findings.hazards()
        if hazards == "raise" and report.hazards:
            raise HazardError(str(report))
        return report

    def _run_one(
        self, setup: Setup, schedule: int, seed: int, report: Report, findings: Findings, hazards: str
    ) -> None:
        setup.memory.last = None
        launch = Launch(setup, schedule, seed)
        try:
            launch.run()
        except Deadlock as deadlock:
            if hazards == "off":
                raise EmulatorError(f"deadlock in schedule {schedule} of seed {seed}: {deadlock}") from None
            report_deadlock(launch, deadlock, findings)
        except TrapError as error:
            if hazards == "collect":
                findings.trapped(launch, str(error))
            elif findings.hazards():
                found = "\n".join(map(str, findings.hazards()))
                raise HazardError(f"{found}\nthen the kernel stopped: {error}") from error
            else:
                raise
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
                f"{setup.program.function.name} cannot be emulated: {type(error).__name__}: {error}"
            ) from error
        except StepLimitError as error:
            if hazards == "raise" and findings.hazards():
                raise HazardError("\n".join(map(str, findings.hazards())) + f"\n{error}") from error
            raise
        finally:
            setup.memory.remove(launch.param_base)
        report.steps += launch.scheduler.steps
        report.printed += launch.printed


def _natural(field: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0:
        raise ArgumentError(field, value, "an integer from 0 on")
    return int(value)


def _shape(field: str, value: int | Sequence[int]) -> Dim:
    """One to three positive extents as three."""
    parts = (value,) if isinstance(value, int | np.integer) else tuple(value)
    if not 1 <= len(parts) <= 3 or any(isinstance(p, bool) or not isinstance(p, int | np.integer) for p in parts):
        raise ArgumentError(field, value, "one to three integers")
    whole = (*(int(p) for p in parts), 1, 1)[:3]
    if min(whole) < 1 or max(whole) >= 1 << 31:
        raise ArgumentError(field, value, "extents of 1 and more")
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
            "cluster", setup.cluster, f"at most {most} blocks on {target.name if target else 'this target'}"
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
