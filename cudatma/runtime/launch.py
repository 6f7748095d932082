"""Compiled kernels: their artifacts, loading onto a device, and launches.

A launch checks everything before it calls the driver. After the first launch on a device, a launch does not allocate,
synchronize or compile, and can be captured into a CUDA graph. A kernel cannot be loaded during a capture, so call
``load()`` before the capture begins. Source: CUDA driver API, "Module Management", "Execution Control".
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
from cudatma.errors import ArgumentError, DriverError, LaunchError, check, counted, quoted
from cudatma.library_streams import stream_handle
from cudatma.runtime.compiler_log import log_warnings, register_count, source_lines
from cudatma.runtime.hang import Names, is_debug_ptx
from cudatma.runtime.launch_args import Arguments, Parameter, entries, marshal
from cudatma.runtime.launch_config import LaunchConfig, dim3, make_config
from cudatma.runtime.loading import Function, Resources, load_function, refuse_capture
from cudatma.runtime.streams import order_after
from cudatma.target import Target

if TYPE_CHECKING:
    from cudatma.emulator import EmulatedModule, Report
    from cudatma.review import KernelReport
    from cudatma.runtime.hang.listeners import Listener, ListeningModule


class LaunchPlan:
    """A prepared launch without a stream, returned by ``Kernel.plan``.

    A plan does not keep arrays alive. Only one thread may use a plan at a time.

    Parameters
    ----------
    kernel : Kernel
        The kernel.
    function : Function
        The kernel on its device.
    config : LaunchConfig
        Grid, block, cluster, shared memory and attributes.
    arguments : Arguments
        The marshaled arguments.
    device : int
        CUDA ordinal of the device.

    Attributes
    ----------
    kernel : Kernel
        The kernel.
    arguments : list
        One ctypes object per parameter. Change these objects in place between launches: set ``arguments[0].value =
        pointer`` for an array or scalar, or ``arguments[1][0] = address`` for a tensor map, whose first eight bytes are
        the address.
    config : LaunchConfig
        Shape of the launch.
    device : int
        CUDA ordinal of the device.
    """

    __slots__ = (
        *("_addresses", "_call", "_config", "_handle", "_pointers", "_programmatic", "_shared_bytes", "_stream"),
        *("arguments", "config", "device", "kernel"),
    )

    def __init__(
        self, kernel: Kernel, function: Function, config: LaunchConfig, arguments: Arguments, device: int
    ) -> None:
        driver = context.initialize()
        self.kernel, self.arguments, self.config, self.device = kernel, arguments.values, config, device
        self._pointers = arguments.addresses()
        self._addresses = ctypes.addressof(self._pointers)
        self._config = config.for_driver(driver)
        self._programmatic, self._shared_bytes = config.programmatic, config.shared_bytes
        self._stream = -1
        self._handle, self._call = function.handle, driver.cuLaunchKernelEx

    def twin(self) -> LaunchPlan:
        """Return a copy of the plan with its own arguments, for use by another thread.

        Returns
        -------
        LaunchPlan
            Copy of the plan.
        """
        twin = copy.copy(self)
        values = [type(value).from_buffer_copy(value) for value in self.arguments]
        twin.arguments, twin._pointers = values, Arguments(values, None, "", []).addresses()
        twin._addresses, twin._stream = ctypes.addressof(twin._pointers), -1
        twin._config = self.config.for_driver(context.initialize())
        twin._programmatic, twin._shared_bytes = self.config.programmatic, self.config.shared_bytes
        return twin

    def reshape(self, grid: int | tuple[int, ...], shared_bytes: int, programmatic: bool) -> None:
        """Change the grid, the shared memory and the attributes of the launch, without checks.

        Parameters
        ----------
        grid : int or tuple of int
            Number of CTAs along each grid axis.
        shared_bytes : int
            Dynamic shared memory of a CTA in bytes.
        programmatic : bool
            Whether the kernel may start before the previous kernel ends.
        """
        if programmatic != self._programmatic:
            self._config = replace(self.config, programmatic=programmatic).for_driver(context.initialize())
            self._programmatic, self._stream, self._shared_bytes = programmatic, -1, self.config.shared_bytes
        if grid.__class__ is int:
            self._config.gridDimX = grid
        else:
            self._config.gridDimX, self._config.gridDimY, self._config.gridDimZ = dim3(grid, "grid")
        if shared_bytes != self._shared_bytes:
            self._config.sharedMemBytes = self._shared_bytes = shared_bytes

    def shape(self) -> LaunchConfig:
        """Return the shape of the launch after the latest `reshape`.

        Returns
        -------
        LaunchConfig
            Grid, block, cluster, shared memory and attributes.
        """
        grid = self._config.gridDimX, self._config.gridDimY, self._config.gridDimZ
        return replace(self.config, grid=grid, shared_bytes=self._shared_bytes, programmatic=self._programmatic)

    def launch(self, stream: int) -> None:
        """Launch on a stream with one driver call.

        The caller must order the launch after other work and keep the arrays alive.

        Parameters
        ----------
        stream : int
            Handle of the stream.

        Raises
        ------
        DriverError
            If the driver rejects the launch.
        LaunchError
            If the process is a forked child.
        """
        if stream != self._stream:  # setting the stream takes up to a third as long as the driver call
            self._config.hStream = self._stream = stream
        if context.forked or self._call(self._config, self._handle, self._addresses, 0)[0]:
            self._launch_again()

    def _launch_again(self) -> None:
        """Launch again in the device's context, or raise the driver's error. This method is not on the hot path."""
        with context.using(self.device):
            code = self._call(self._config, self._handle, self._addresses, 0)[0]
            if code:
                raise _launch_failure(int(code))


class DebugPlan(LaunchPlan):
    """A plan for a kernel compiled with ``debug=True``.

    Each launch synchronizes with its stream and may raise PipelineHang.
    """

    __slots__ = ("_listener",)

    def __init__(
        self,
        kernel: Kernel,
        function: Function,
        config: LaunchConfig,
        arguments: Arguments,
        device: int,
        listener: Listener,
    ) -> None:
        super().__init__(kernel, function, config, arguments, device)
        self._listener = listener

    def reshape(self, grid: int | tuple[int, ...], shared_bytes: int, programmatic: bool) -> None:
        """Change the grid and the shared memory. The launch is never programmatic."""
        super().reshape(grid, shared_bytes, False)

    def launch(self, stream: int) -> None:
        """Launch on a stream and wait until the kernel ends.

        Raises PipelineHang if the kernel recorded waits, and LaunchError during a graph capture.
        """
        blocks = self._config.gridDimX * self._config.gridDimY * self._config.gridDimZ
        with context.using(self.device):
            self._listener.run(lambda: super(DebugPlan, self).launch(stream), blocks, stream)


class Kernel:
    """A compiled kernel, returned by ``cudatma.compile``.

    Kernels are thread-safe and can be pickled; each process loads the kernel again. A launch of a kernel compiled with
    ``debug=True`` waits until the kernel ends, and may raise PipelineHang.

    Parameters
    ----------
    cubin : bytes
        Machine code.
    entry : str
        Name of the ``extern "C"`` function.
    target : Target
        Architecture of the cubin.
    ptx : str
        PTX, from which the parameters are read.
    source : str, default: ""
        CUDA source.
    log : str, default: ""
        Compiler log.
    folder : Path, optional
        Folder with the artifacts, or None if they are only in memory.
    smem_layout : sequence of tuple
        (name, offset, bytes) of each part of dynamic shared memory, or empty if unknown.

    Attributes
    ----------
    parameters : tuple of Parameter
        Name, kind and width of each parameter.
    is_debug : bool
        Whether the kernel was compiled with ``debug=True``.

    Raises
    ------
    ArgumentError
        If ``ptx`` has no kernel with this name.

    Examples
    --------
    >>> source = '''
    ... extern "C" __global__ void add_one(float* x, int n) {
    ...     int i = blockIdx.x * blockDim.x + threadIdx.x;
    ...     if (i < n) x[i] += 1;
    ... }
    ... '''
    >>> kernel = cudatma.compile(source, target="sm_90a")
    >>> kernel
    Kernel(add_one, sm_90a, 2 parameters)
    >>> x = np.zeros(100, np.float32)
    >>> kernel.launch(1, 128, (x, 100), backend="emulator")
    >>> x[:3]
    array([1., 1., 1.], dtype=float32)
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
        known = entries(ptx)
        if not known:
            raise ArgumentError("ptx", "no kernel", "text that contains a kernel")
        if entry not in known:
            raise ArgumentError("entry", entry, ", ".join(known))
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
        """Renew the lock and discard the modules in a forked child.

        A thread of the parent may have held the lock, and the modules are not valid in the child.
        """
        self._lock = threading.Lock()
        self._functions = {}
        self._listeners = {}

    def __repr__(self) -> str:
        return f"Kernel({self.entry}, {self.target.name}, {counted(len(self.parameters), 'parameter')})"

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook displays."""
        from cudatma import pages

        kinds = {"int": "integer", "float": "float", "bytes": "structure"}
        rows = [("kernel", self.entry), ("target", self.target.name)]
        for p in self.parameters:
            kind = "pointer or integer" if p.is_pointer_wide else kinds[p.kind]
            rows.append(("parameter", f"{p.name}: {kind}, {counted(p.size_bytes, 'byte')}"))
        rows += [("shared memory", f"{offset}: {name}, {size} bytes") for name, offset, size in self.smem_layout]
        rows += [("warning", warning) for warning in self.warnings]
        return pages.fragment(pages.table(rows))

    def __reduce__(self) -> tuple[Any, ...]:
        kept = (self.cubin, self.entry, self.target, self.ptx, self.source, self.log, self.folder, self.smem_layout)
        return _rebuild, kept

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """Compiler warnings, including wgmma serialization and ignored setmaxnreg."""
        return log_warnings(self.log)

    def load(self, device: int | None = None) -> None:
        """Load the kernel onto a device before its first launch.

        Call this method before a graph capture, during which a kernel cannot be loaded, or before a measurement.

        Parameters
        ----------
        device : int, optional
            CUDA ordinal. Default: the current device.

        Raises
        ------
        LaunchError
            If the target does not match the GPU.
        DriverError
            If the driver fails.
        """
        self._on(context.current_device() if device is None else device)

    def is_loaded(self, device: int) -> bool:
        """Return whether the kernel is loaded on a device.

        Parameters
        ----------
        device : int
            CUDA ordinal.

        Returns
        -------
        bool
            Whether the kernel is loaded on the device.
        """
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
        """Launch on the device of the arguments, or on the current device if no argument is on a device.

        The call returns before the kernel ends.

        Parameters
        ----------
        grid : int or tuple of int
            Number of CTAs along each grid axis.
        block : int or tuple of int
            Number of threads along each CTA axis.
        args : sequence
            One value per parameter: device arrays from any library, None (a null pointer), tensor maps, int, bool,
            float, NumPy scalars, ctypes objects, or bytes for structures.
        cluster : int or tuple of int, optional
            Number of CTAs along each cluster axis. The cluster must divide the grid.
        shared_bytes : int, default: 0
            Dynamic shared memory of a CTA in bytes.
        stream : stream or int, optional
            Stream or its handle. Default: the current stream of the arguments' library.
        programmatic : bool, default: False
            Whether the kernel may start before the previous kernel ends. The kernel must then execute
            griddepcontrol.wait before it accesses memory that the previous kernel writes.
        backend : {"cuda", "emulator"}, optional
            "emulator" runs one schedule on NumPy arrays, like ``emulate``. Default: the emulator if the arrays are on
            the host, no stream is given and the machine has no usable GPU, otherwise "cuda".

        Raises
        ------
        LaunchError
            If the launch is not possible. The error is raised before the driver is called.
        DriverError
            If the driver fails.
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
        """Run the kernel's PTX on the CPU under several schedules, and return a report with its hazards.

        Parameters
        ----------
        grid, block : as in launch
            Shape of the launch.
        args : sequence
            As in ``launch``, with NumPy arrays as device memory.
        cluster, shared_bytes : as in launch
            Cluster and dynamic shared memory.
        schedules : int, default: 2
            Number of schedules.
        seed : int, default: 0
            Seed of the random schedules.
        replay : int, optional
            Run only this schedule.
        hazards : {"raise", "collect"}, default: "raise"
            "raise" raises HazardError if there are hazards, and "collect" only adds them to the report.
        **options
            Other arguments of ``emulator.EmulatedModule.launch``.

        Returns
        -------
        Report
            Hazards, warnings and statistics.

        Raises
        ------
        HazardError, TrapError, ArgumentError, EmulatorError
            As for ``EmulatedModule.launch``.
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
        """Module on the emulator. As on a GPU, its variables keep their values between launches."""
        from cudatma.emulator import load  # slow to import

        module = load(self.ptx, lines=source_lines(self.source, self.ptx), smem_layout=self.smem_layout)
        if not self.is_debug:
            return module
        from cudatma.runtime.hang.listeners import ListeningModule

        return ListeningModule(module, self._names)

    def report(self, *, threads: int | None = None, shared_bytes: int | None = None) -> KernelReport:
        """Return a report on the compiled kernel. Its ``str()`` is a page of text.

        The report contains registers, spills, shared memory, occupancy, tables of the TMA, mbarrier and tensor-core
        instructions with their source lines, and the waits of each loop. SASS needs nvdisasm or cuobjdump (the extra
        ``sass``). Without these programs, a note in the report lists the missing parts.

        Parameters
        ----------
        threads : int, optional
            Number of threads per CTA, which determines the occupancy. Default: from ``__launch_bounds__``.
        shared_bytes : int, optional
            Dynamic shared memory per CTA in bytes. Default: from the config.

        Returns
        -------
        KernelReport
            The report.

        Examples
        --------
        >>> source = 'extern "C" __global__ void __launch_bounds__(128) one(int* x) { *x = 1; }'
        >>> report = cudatma.compile(source, target="sm_90a").report()
        >>> report.threads, report.occupancy[0].ctas, report.occupancy[0].limited_by
        (128, 16, ('threads',))
        """
        from cudatma.review import Image, disassembled, reports  # slow to import

        image = Image(self.entry, self.target.name, self.ptx, self.cubin, log=self.log, notes=self.warnings)
        (result,) = reports(
            disassembled(image),
            entry=self.entry,
            smem=self.smem_layout,
            threads=threads,
            dynamic_smem_bytes=shared_bytes,
        )
        return result

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
        """Prepare a launch that can be repeated: check and marshal its arguments, and load the kernel.

        Launches of the plan do not wait for the producers of the arrays; the caller must order them.

        Parameters
        ----------
        grid, block, args, cluster, shared_bytes, programmatic : as in launch
            The launch.
        device : int, optional
            CUDA ordinal. Default: the device of the arguments, or the current device if they have none.

        Returns
        -------
        LaunchPlan
            The plan.

        Raises
        ------
        LaunchError, DriverError
            As for ``launch``.
        """
        arguments = marshal(self.parameters, args)
        if device is not None and arguments.device not in (None, device):
            raise LaunchError("device", device, f"{arguments.device} (the device of the arguments)")
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
        """Return a LaunchPlan, or a DebugPlan for a debug kernel."""
        if not self.is_debug:
            return LaunchPlan(self, function, config, arguments, device)
        with self._lock:
            if device not in self._listeners:
                from cudatma.runtime.hang.listeners import Listener

                self._listeners[device] = Listener(function.module, self._names, device)
        # A programmatic launch could overwrite the recorded waits before the previous kernel ends.
        alone = replace(config, programmatic=False)
        return DebugPlan(self, function, alone, arguments, device, self._listeners[device])

    def resources(self, *, device: int | None = None) -> Resources:
        """Load the kernel, and return the registers, spills and shared memory that the driver reports.

        Parameters
        ----------
        device : int, optional
            CUDA ordinal. Default: the current device.

        Returns
        -------
        Resources
            Resources per thread and per CTA.
        """
        return self._on(context.current_device() if device is None else device).resources

    def occupancy(self, threads: int, *, shared_bytes: int = 0, device: int | None = None) -> int:
        """Return the maximum number of CTAs that can be resident on one SM.

        Parameters
        ----------
        threads : int
            Number of threads per CTA.
        shared_bytes : int, default: 0
            Dynamic shared memory of a CTA in bytes.
        device : int, optional
            CUDA ordinal. Default: the current device.

        Returns
        -------
        int
            Number of resident CTAs per SM.

        Raises
        ------
        LaunchError
            If a CTA of this size cannot run.

        References
        ----------
        CUDA driver API, cuOccupancyMaxActiveBlocksPerMultiprocessor.
        """
        ordinal = context.current_device() if device is None else device
        function = self._on(ordinal)
        make_config(self.target, 1, threads, shared_bytes=shared_bytes, limits=function.limits)
        call = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
        with context.using(ordinal) as driver:
            return int(check(getattr(driver, call)(function.handle, threads, shared_bytes), call))

    def _on(self, device: int, stream: int | None = None) -> Function:
        """Return the kernel on a device, and load it on the first call. ``stream`` is the stream of the next launch."""
        context.require_no_fork()
        function = self._functions.get(device)
        if function is not None:
            return function
        if type(device) is not int:
            raise LaunchError("device", type(device).__name__, "an int (the ordinal of a device) or None")
        gpu = context.device(device)
        if not self.target.loads_on(gpu.compute_capability):
            shown = f"compute capability {gpu.compute_capability[0]}.{gpu.compute_capability[1]}"
            raise LaunchError("device", shown, f"a GPU that can load {self.target.name} code", "compile for this GPU")
        with self._lock, context.using(device) as driver:
            if device not in self._functions:
                if stream is not None:
                    refuse_capture(driver, stream, self.entry, device)
                self._functions[device] = load_function(
                    driver, self.cubin, self.entry, self.parameters, self.target, gpu
                )
            return self._functions[device]


def _on_host(args: Sequence[object]) -> bool:
    """Return whether an argument is a NumPy array or a tensor map of a NumPy array."""
    if not isinstance(args, Sequence):
        return False  # marshal() reports the error
    return any(isinstance(value, np.ndarray) or isinstance(getattr(value, "owner", None), np.ndarray) for value in args)


def _backend(requested: str | None) -> str:
    chosen = backend_for("Kernel.launch", requested, has_reference=False)
    if chosen == "reference":
        remedy = 'choose "emulator" to run on the CPU; user kernels have no NumPy reference'
        allowed = quoted(("auto", "cuda", "emulator"))
        raise ArgumentError("backend" if requested else BACKEND_VARIABLE, chosen, allowed, remedy)
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
    except ValueError:  # the result code comes from a newer driver
        return DriverError("cuLaunchKernelEx", code, f"CUresult {code}")
    status, text = driver.cuGetErrorString(result)
    return DriverError("cuLaunchKernelEx", code, f"{result.name}: {text.decode()}" if int(status) == 0 else result.name)
