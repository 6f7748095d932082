"""A compiled kernel: what it is made of, loading it onto a device, launching it.

Everything is checked before the driver is called. After the first launch on a device a launch allocates nothing,
synchronizes nothing and compiles nothing; it can be captured into a CUDA graph; loading cannot be part of a capture:
call ``load()`` before one begins. Source: CUDA driver API, "Module Management", "Execution Control".
"""

from __future__ import annotations

import copy
import ctypes
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cudatma import context
from cudatma.backend import BACKEND_VARIABLE, backend_for
from cudatma.errors import ArgumentError, DriverError, LaunchError, check, counted
from cudatma.library_streams import stream_handle
from cudatma.runtime.compiler_log import log_warnings, own_lines, register_count
from cudatma.runtime.hang import Names, is_debug_ptx
from cudatma.runtime.launch_args import Arguments, Parameter, entries, marshal
from cudatma.runtime.launch_config import LaunchConfig, dim3, make_config
from cudatma.runtime.loading import Function, Resources, load_function, refuse_capture
from cudatma.runtime.streams import order_after
from cudatma.target import Target

if TYPE_CHECKING:
    from cudatma.emulator import EmulatedModule, Report
    from cudatma.runtime.hang.listeners import Listener, ListeningModule


class LaunchPlan:
    """A launch that is complete but for its stream.

    arguments: one ctypes object a parameter. Change them in place between launches: ``arguments[0].value = pointer``
    for arrays and scalars, ``arguments[1][0] = address`` for a tensor map: its first eight bytes are its address.
    device: the ordinal it is for. config: its shape.

    A plan keeps no array alive and is not for two threads at a time.
    """

    __slots__ = (
        *("_addresses", "_call", "_config", "_handle", "_pointers", "_programmatic", "_shared_bytes", "_stream"),
        *("arguments", "config", "device"),
    )

    def __init__(self, function: Function, config: LaunchConfig, arguments: Arguments, device: int) -> None:
        driver = context.initialise()
        self.arguments, self.config, self.device = arguments.values, config, device
        self._pointers = arguments.addresses()
        self._addresses = ctypes.addressof(self._pointers)
        self._config = config.for_driver(driver)
        self._programmatic, self._shared_bytes = config.programmatic, config.shared_bytes
        self._stream = -1
        self._handle, self._call = function.handle, driver.cuLaunchKernelEx

    def twin(self) -> LaunchPlan:
        """Return a plan of the same launch whose arguments another thread may change."""
        twin = copy.copy(self)
        values = [type(value).from_buffer_copy(value) for value in self.arguments]
        twin.arguments, twin._pointers = values, Arguments(values, None, "", []).addresses()
        twin._addresses, twin._stream = ctypes.addressof(twin._pointers), -1
        twin._config = self.config.for_driver(context.initialise())
        twin._programmatic, twin._shared_bytes = self.config.programmatic, self.config.shared_bytes
        return twin

    def reshape(self, grid: int | tuple[int, ...], shared_bytes: int, programmatic: bool) -> None:
        """Change the grid, the dynamic shared memory and the kind of launch. The caller has checked them."""
        if programmatic != self._programmatic:
            self._config = replace(self.config, programmatic=programmatic).for_driver(context.initialise())
            self._programmatic, self._stream, self._shared_bytes = programmatic, -1, self.config.shared_bytes
        if grid.__class__ is int:
            self._config.gridDimX = grid
        else:
            self._config.gridDimX, self._config.gridDimY, self._config.gridDimZ = dim3(grid, "grid")
        if shared_bytes != self._shared_bytes:
            self._config.sharedMemBytes = self._shared_bytes = shared_bytes

    def launch(self, stream: int) -> None:
        """Launch on a stream, by its handle: one driver call. The caller orders it and keeps the arrays alive.

        Raises DriverError if the driver refuses, LaunchError in a forked child.
        """
        if stream != self._stream:  # setting it costs as much as a third of the call
            self._config.hStream = self._stream = stream
        if context.forked or self._call(self._config, self._handle, self._addresses, 0)[0]:
            self._launch_again()

    def _launch_again(self) -> None:
        """Off the hot path: launch if the thread only lacked the right context, else say why it fails."""
        with context.using(self.device):
            code = self._call(self._config, self._handle, self._addresses, 0)[0]
            if code:
                raise _launch_failure(int(code))


class DebugPlan(LaunchPlan):
    """A launch of a kernel that was compiled with debug=True: it waits for the stream and raises PipelineHang."""

    __slots__ = ("_listener",)

    def __init__(
        self, function: Function, config: LaunchConfig, arguments: Arguments, device: int, listener: Listener
    ) -> None:
        super().__init__(function, config, arguments, device)
        self._listener = listener

    def reshape(self, grid: int | tuple[int, ...], shared_bytes: int, programmatic: bool) -> None:
        """As LaunchPlan's, but never programmatic: its notes would be written before the previous kernel has ended."""
        super().reshape(grid, shared_bytes, False)

    def launch(self, stream: int) -> None:
        """Launch on a stream and wait for its end. Raises PipelineHang, and LaunchError where the stream captures."""
        blocks = self._config.gridDimX * self._config.gridDimY * self._config.gridDimZ
        with context.using(self.device):
            self._listener.run(lambda: super(DebugPlan, self).launch(stream), blocks, stream)


class Kernel:
    """One kernel of a cubin, ready to be read and, on a GPU of its target, launched.

    cubin, ptx, source, log: as the compiler left them. entry: its ``extern "C"`` name. target: what it was compiled
    for. parameters: those of the kernel. folder: of the artifacts, None if they are in memory only.
    smem_layout: (name, offset, bytes) of its dynamic shared memory, empty if it is not known. is_debug: whether it was
    compiled with debug=True; its launches then wait for their end and raise PipelineHang.
    Launching on a GPU is safe from many threads at once. A kernel can be pickled; each process loads it again.
    """

    def __init__(
        self,
        cubin: bytes,
        entry: str,
        target: Target,
        *,
        ptx: str,
        source: str = "",
        log: str = "",
        folder: Path | None = None,
        smem_layout: Sequence[tuple[str, int, int]] = (),
    ) -> None:
        """Raises ArgumentError unless ``entry`` is a kernel of ``ptx``, from which the parameters are read."""
        known = entries(ptx)
        if entry not in known:
            raise ArgumentError("entry", entry, ", ".join(known) or "none: the PTX holds no kernel")
        self.cubin, self.ptx, self.source, self.log = cubin, ptx, source, log
        self.entry, self.target, self.folder = entry, target, folder
        self.parameters: tuple[Parameter, ...] = known[entry]
        self.smem_layout = tuple(smem_layout)
        self.is_debug = is_debug_ptx(ptx)
        self._functions: dict[int, Function] = {}
        self._listeners: dict[int, Listener] = {}
        self._lock = threading.Lock()
        context.after_fork(self, Kernel._forget)

    def _forget(self) -> None:
        """In a forked child: another thread of the parent may have held the lock, and its modules are not ours."""
        self._lock = threading.Lock()
        self._functions = {}
        self._listeners = {}

    def __repr__(self) -> str:
        return f"Kernel({self.entry}, {self.target.name}, {counted(len(self.parameters), 'parameter')})"

    def __reduce__(self) -> tuple[Any, ...]:
        kept = (self.cubin, self.entry, self.target, self.ptx, self.source, self.log, self.folder, self.smem_layout)
        return _rebuild, kept

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """What the compilers warned of, wgmma serialisation and ignored setmaxnreg among it."""
        return log_warnings(self.log)

    def load(self, device: int | None = None) -> None:
        """Load the kernel onto a device (the current one unless named), as its first launch would.

        For use before a graph capture or a measurement. Raises LaunchError for a GPU of another target, DriverError.
        """
        self._on(context.current_device() if device is None else device)

    def is_loaded(self, device: int) -> bool:
        """Whether a launch on the device would find the kernel there."""
        return device in self._functions

    def launch(
        self,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        args: Sequence[object] = (),
        *,
        cluster: int | tuple[int, ...] | None = None,
        shared_bytes: int = 0,
        stream: object = None,
        programmatic: bool = False,
        backend: str | None = None,
    ) -> None:
        """Launch on the device that holds the arguments (the current one if no argument is on a device).

        grid: thread blocks. block: threads of a thread block. args: one value for each parameter, see
        launch_args.marshal.
        cluster: CTAs of a cluster; must divide the grid. shared_bytes: dynamic shared memory of a CTA. stream: a stream
        or its handle; None: the current stream of the arguments' library. programmatic: the kernel may begin before the
        previous kernel has ended; it must then execute griddepcontrol.wait before it touches what that kernel writes.
        backend: "cuda", "emulator" (NumPy arrays, in order, see emulate()), or None: the emulator if the arrays are on
        the host, no stream is named and the machine has no usable GPU.
        Returns at once. Raises LaunchError, before the driver is called, for a launch that cannot work, and
        DriverError.
        """
        may_emulate = backend is not None or (stream is None and _on_host(args))
        if may_emulate and _backend(backend) == "emulator":
            self.emulate(grid, block, args, cluster=cluster, shared_bytes=shared_bytes, schedules=1)
            return
        arguments = marshal(self.parameters, args)
        device = context.current_device() if arguments.device is None else arguments.device
        handle = stream_handle(stream, arguments.kind, device)
        function = self._functions.get(device) or self._on(device, handle)
        config = make_config(
            self.target,
            grid,
            block,
            cluster=cluster,
            shared_bytes=shared_bytes,
            programmatic=programmatic,
            limits=function.limits,
        )
        plan = self._plan(function, config, arguments, device)
        for producer in arguments.producers:
            order_after(handle, producer, device)
        with context.using(device):
            plan.launch(handle)

    def emulate(
        self,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        args: Sequence[Any] = (),
        *,
        cluster: int | tuple[int, ...] | None = None,
        shared_bytes: int = 0,
        schedules: int = 2,
        seed: int = 0,
        replay: int | None = None,
        hazards: str = "raise",
        **options: Any,
    ) -> Report:
        """Run the kernel's PTX on the CPU, under several schedules, and report its hazards.

        args: as in launch(), but arrays are NumPy's, and are the device's memory. Other arguments and options: see
        ``emulator.EmulatedModule.launch``. Raises HazardError, TrapError, ArgumentError, EmulatorError.
        """
        return self.emulated.launch(
            self.entry,
            grid,
            block,
            [0 if value is None else value for value in args],
            cluster=cluster,
            shared_bytes=shared_bytes,
            schedules=schedules,
            seed=seed,
            replay=replay,
            hazards=hazards,
            **({"target": self.target, "registers": register_count(self.log, self.entry)} | options),
        )

    @cached_property
    def emulated(self) -> EmulatedModule | ListeningModule:
        """The module on the emulator; its variables keep their values, as they do on a GPU."""
        from cudatma.emulator import load  # only who emulates pays for it

        lines = own_lines(self.source)
        if not self.is_debug:
            return load(self.ptx, lines=lines)
        from cudatma.runtime.hang.listeners import ListeningModule

        return ListeningModule(load(self.ptx, lines=lines), self._names)

    @property
    def _names(self) -> Names:
        return Names(self.entry, self.source, self.smem_layout)

    def plan(
        self,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        args: Sequence[object] = (),
        *,
        cluster: int | tuple[int, ...] | None = None,
        shared_bytes: int = 0,
        programmatic: bool = False,
        device: int | None = None,
    ) -> LaunchPlan:
        """Check and marshal a launch once for many launches; loads the kernel. Arguments as in launch(), errors too.

        device: where it will run; the arguments' device, else the current one, unless named. Nothing waits for the
        arrays' producers: the caller orders the launches.
        """
        arguments = marshal(self.parameters, args)
        if device is not None and arguments.device not in (None, device):
            raise LaunchError("device", device, f"{arguments.device}, where the arguments live")
        where = arguments.device if device is None else device
        where = context.current_device() if where is None else where
        function = self._on(where)
        config = make_config(
            self.target,
            grid,
            block,
            cluster=cluster,
            shared_bytes=shared_bytes,
            programmatic=programmatic,
            limits=function.limits,
        )
        return self._plan(function, config, arguments, where)

    def _plan(self, function: Function, config: LaunchConfig, arguments: Arguments, device: int) -> LaunchPlan:
        """A plan that only launches, or one that also listens to a debug kernel."""
        if not self.is_debug:
            return LaunchPlan(function, config, arguments, device)
        with self._lock:
            if device not in self._listeners:
                from cudatma.runtime.hang.listeners import Listener

                self._listeners[device] = Listener(function.module, self._names, device)
        # Its notes would be written before the kernel in front has ended.
        alone = replace(config, programmatic=False)
        return DebugPlan(function, alone, arguments, device, self._listeners[device])

    def resources(self, *, device: int | None = None) -> Resources:
        """Registers, spills and shared memory as the driver reports them; loads the kernel."""
        return self._on(context.current_device() if device is None else device).resources

    def occupancy(self, threads: int, *, shared_bytes: int = 0, device: int | None = None) -> int:
        """How many thread blocks of this size, in threads and bytes of dynamic shared memory, one SM holds at a time.

        [CUDA driver API, cuOccupancyMaxActiveBlocksPerMultiprocessor] Raises LaunchError for a block that cannot run.
        """
        ordinal = context.current_device() if device is None else device
        function = self._on(ordinal)
        make_config(self.target, 1, threads, shared_bytes=shared_bytes, limits=function.limits)
        call = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
        with context.using(ordinal) as driver:
            return int(check(getattr(driver, call)(function.handle, threads, shared_bytes), call))

    def _on(self, device: int, stream: int | None = None) -> Function:
        """The kernel on a device, loaded at the first call. ``stream``: the one it is about to be launched on."""
        context.require_no_fork()
        function = self._functions.get(device)
        if function is not None:
            return function
        if type(device) is not int:
            raise LaunchError("device", type(device).__name__, "a device's ordinal, an int, or None")
        gpu = context.device(device)
        if not self.target.loads_on(gpu.compute_capability):
            shown = f"compute capability {gpu.compute_capability[0]}.{gpu.compute_capability[1]}"
            raise LaunchError("device", shown, f"a GPU that {self.target.name} code loads on", "compile for this GPU")
        with self._lock, context.using(device) as driver:
            if device not in self._functions:
                if stream is not None:
                    refuse_capture(driver, stream, self.entry, device)
                self._functions[device] = load_function(
                    driver, self.cubin, self.entry, self.parameters, self.target, gpu
                )
            return self._functions[device]


def _on_host(args: Sequence[object]) -> bool:
    """Whether an argument is, or maps, a NumPy array."""
    if not isinstance(args, Sequence):
        return False  # marshal() says what is wrong with it
    return any(isinstance(value, np.ndarray) or isinstance(getattr(value, "owner", None), np.ndarray) for value in args)


def _backend(named: str | None) -> str:
    chosen = backend_for("Kernel.launch", named, has_reference=False)
    if chosen == "reference":
        remedy = "a kernel of your own has no NumPy reference"
        raise ArgumentError("backend" if named else BACKEND_VARIABLE, chosen, "auto, cuda, emulator", remedy)
    return chosen


def _rebuild(
    cubin: bytes,
    entry: str,
    target: Target,
    ptx: str,
    source: str,
    log: str,
    folder: Path | None,
    smem_layout: Sequence[tuple[str, int, int]] = (),
) -> Kernel:
    return Kernel(cubin, entry, target, ptx=ptx, source=source, log=log, folder=folder, smem_layout=smem_layout)


def _launch_failure(code: int) -> DriverError:
    from cuda.bindings import driver

    try:
        result = driver.CUresult(code)
    except ValueError:  # a newer driver's code
        return DriverError("cuLaunchKernelEx", code, f"CUresult {code}")
    status, said = driver.cuGetErrorString(result)
    return DriverError("cuLaunchKernelEx", code, f"{result.name}: {said.decode()}" if int(status) == 0 else result.name)
