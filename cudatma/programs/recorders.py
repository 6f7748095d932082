"""What each library contributes to a recording: the Python code that launches its kernels, wrapped by the recorder."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from cudatma.arrays import is_torch
from cudatma.errors import ArgumentError, CudaTmaError
from cudatma.programs.cuda_core import Kernel as EmulatedCoreKernel
from cudatma.programs.cupy import EmulatedKernel, EmulatedModule, RawCode
from cudatma.programs.driver import config_shape, parameter_bytes, ptx_of
from cudatma.programs.launch import ProgramLaunch, calling_place, module_of
from cudatma.programs.patches import Patches
from cudatma.programs.recorder import Recorder, Scratch
from cudatma.programs.triton import Arguments, describe_launch, sources_of
from cudatma.runtime.compiler_log import own_lines, register_count
from cudatma.runtime.launch_config import dim3

_NO_PTX = "the module has no PTX"


class _LibraryRecorder:
    """Patches of one library that are undone at the end of the recording."""

    def __init__(self) -> None:
        self._patches = Patches()

    def install(self, recorder: Recorder) -> None:
        """Wrap the launches of the library. It has been imported."""
        raise NotImplementedError

    def remove(self) -> None:
        """Undo ``install``."""
        self._patches.undo()


class TritonRecorder(_LibraryRecorder):
    """Records Triton's and Gluon's launches, including those of torch.compile."""

    def install(self, recorder: Recorder) -> None:
        """Wrap the launcher of compiled kernels, and pause the recording while Triton measures configurations."""
        from triton.compiler.compiler import CompiledKernel
        from triton.runtime.autotuner import Autotuner

        original = CompiledKernel.run

        def run(kernel: Any) -> Callable[..., Any]:
            execute = original.fget(kernel)

            def launch(x: int, y: int, z: int, stream: Any, *rest: Any) -> Any:
                def describe() -> ProgramLaunch:
                    ptx, args = kernel.asm["ptx"], rest[5:]
                    values = _DeviceArguments(getattr(kernel.metadata, "tensordesc_meta", None) or ())
                    described = describe_launch(ptx, kernel.src, kernel.metadata, (x, y, z), args, values, _scratch)
                    return replace(
                        described,
                        place=calling_place("triton", "torch"),
                        arrays=(*described.arrays, *values.tensors),
                        sources=sources_of(ptx, kernel.src),
                    )

                if min(x, y, z) < 1:
                    return execute(x, y, z, stream, *rest)
                return recorder.around(
                    describe,
                    lambda: execute(x, y, z, stream, *rest),
                    entry=kernel.metadata.name,
                    library="triton",
                    stream=int(stream or 0),
                )

            return launch

        self._patches.set(CompiledKernel, "run", property(run))
        _pause(self._patches, recorder, Autotuner, "_bench")


class InductorConfigRecorder(_LibraryRecorder):
    """Makes torch.compile launch its kernels through Triton, instead of from C++."""

    def install(self, recorder: Recorder) -> None:
        """Switch off the static launcher."""
        import torch._inductor.config as config

        for name in ("use_static_cuda_launcher", "use_static_triton_launcher"):
            if hasattr(config, name):
                self._patches.set(config, name, False)


class InductorRecorder(_LibraryRecorder):
    """Pauses the recording while torch.compile measures configurations."""

    def install(self, recorder: Recorder) -> None:
        """Wrap the measurement."""
        from torch._inductor.runtime.triton_heuristics import CachingAutotuner

        _pause(self._patches, recorder, CachingAutotuner, "bench")


class TorchRecorder(_LibraryRecorder):
    """Lists the kernels of the GPU by name with torch's profiler."""

    def install(self, recorder: Recorder) -> None:
        """Start the profiler if there is a GPU and the program does not use the profiler itself."""
        import torch

        self._recorder, self._profile = recorder, None
        try:
            activity = torch.profiler.ProfilerActivity.CUDA
            if torch.cuda.is_available() and activity in torch.profiler.supported_activities():
                profile = torch.profiler.profile(activities=[activity], acc_events=True)
                profile.start()
                self._profile = profile
        except (RuntimeError, AssertionError, TypeError) as error:  # TypeError: a version without acc_events
            recorder.refuse("kernels of other libraries", f"torch's profiler failed: {error}")

    def remove(self) -> None:
        """Stop the profiler, and count the kernels."""
        if self._profile is None:
            return
        import torch

        try:
            torch.cuda.synchronize()
            self._profile.stop()
            for event in self._profile.events():
                is_kernel = str(event.device_type).endswith("CUDA") and not event.name.startswith(("Memcpy", "Memset"))
                self._recorder.other_kernels[event.name] += int(is_kernel)
        except (RuntimeError, AssertionError) as error:
            self._recorder.refuse("kernels of other libraries", f"torch's profiler failed: {error}")
        for name in [name for name, count in self._recorder.other_kernels.items() if not count]:
            del self._recorder.other_kernels[name]


class CupyRecorder(_LibraryRecorder):
    """Records the launches of CuPy's RawKernel and RawModule, whose sources are compiled to PTX again."""

    def install(self, recorder: Recorder) -> None:
        """Replace the classes, and the kernels in variables of the program's modules."""
        import cupy

        original_kernel, original_module = cupy.RawKernel, cupy.RawModule

        class RawKernel(_RecordedKernel):
            def __init__(self, *args: Any, **options: Any) -> None:
                kernel = original_kernel(*args, **options)
                super().__init__(recorder, kernel, RawCode.of(kernel))

        class RawModule(_RecordedModule):
            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(recorder, original_module(*args, **options))

        def convert(value: object) -> object | None:
            if isinstance(value, original_kernel | EmulatedKernel):
                return _RecordedKernel(recorder, value, RawCode.of(value))
            return _RecordedModule(recorder, value) if isinstance(value, original_module | EmulatedModule) else None

        self._patches.set_everywhere(cupy, {"RawKernel": RawKernel, "RawModule": RawModule}, convert)


class _RecordedKernel:
    """CuPy's kernel with recorded calls. All other attributes are the kernel's."""

    def __init__(self, recorder: Recorder, kernel: Any, raw: RawCode) -> None:
        self._recorder, self._kernel, self._raw = recorder, kernel, raw

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def __call__(self, grid: Any, block: Any, args: Any, **options: Any) -> None:
        name, target = self._kernel.name, self._recorder.target.name
        self._recorder.around(
            lambda: self._raw.describe(name, target, grid, block, args, options.get("shared_mem", 0)),
            lambda: self._kernel(grid, block, args, **options),
            entry=name,
            library="cupy",
            stream=_cupy_stream(options.get("stream")),
        )


class _RecordedModule:
    """CuPy's module, whose kernels are recorded."""

    def __init__(self, recorder: Recorder, module: Any) -> None:
        self._recorder, self._module = recorder, module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def get_function(self, name: str) -> _RecordedKernel:
        return _RecordedKernel(self._recorder, self._module.get_function(name), RawCode.of(self._module))


def _cupy_stream(stream: Any) -> int:
    """Return the handle of the stream of a launch."""
    import cupy

    if stream is None and cupy.cuda.is_available():
        stream = cupy.cuda.get_current_stream()
    return int(getattr(stream, "ptr", 0))


class CoreRecorder(_LibraryRecorder):
    """Records cuda.core's launches of programs that are compiled during the recording."""

    def install(self, recorder: Recorder) -> None:
        """Replace launch and Program."""
        import cuda.core as core

        original_launch, original_program = core.launch, core.Program
        modules: list[tuple[Any, str]] = []

        class Program(original_program):  # type: ignore[misc, valid-type]
            def __init__(self, code: Any, code_type: Any, options: Any = None) -> None:
                super().__init__(code, code_type, options)
                self._recorded = code, code_type, options

            def compile(self, target_type: Any, *args: Any, **options: Any) -> Any:
                compiled = super().compile(target_type, *args, **options)
                is_ptx = str(target_type).lower() == "ptx"
                twin = compiled if is_ptx else original_program(*self._recorded).compile("ptx", *args, **options)
                modules.append((compiled, ptx_of(twin.code)))
                return compiled

        def launch(stream: Any, config: Any, kernel: Any, *args: Any) -> Any:
            return recorder.around(
                lambda: _describe_core(modules, config, kernel, args),
                lambda: original_launch(stream, config, kernel, *args),
                entry=_core_entry(kernel),
                library="cuda.core",
                stream=int(getattr(stream, "handle", 0) or 0),
            )

        self._patches.set_everywhere(core, {"launch": launch, "Program": Program})


def _core_entry(kernel: Any) -> str:
    if isinstance(kernel, EmulatedCoreKernel):
        return kernel.entry
    from cuda.bindings import driver

    return bytes(driver.cuKernelGetName(kernel.handle)[1]).decode()


def _describe_core(modules: list[tuple[Any, str]], config: Any, kernel: Any, args: tuple[Any, ...]) -> ProgramLaunch:
    if isinstance(kernel, EmulatedCoreKernel):
        ptx, sources = kernel.ptx, kernel.sources
    else:
        from cuda.bindings import driver

        library = int(driver.cuKernelGetLibrary(kernel.handle)[1])
        ptx, sources = next((text for code, text in modules if int(code.handle) == library), ""), None
    if not ptx:
        raise ArgumentError("kernel", _NO_PTX, "a kernel of a Program that was compiled during the recording")
    cluster = config.cluster and dim3(config.cluster, "cluster")
    grid = tuple(
        extent * factor for extent, factor in zip(dim3(config.grid, "grid"), cluster or (1, 1, 1), strict=True)
    )
    return ProgramLaunch(
        ptx=ptx,
        entry=_core_entry(kernel),
        grid=dim3(grid, "grid"),
        block=dim3(config.block, "block"),
        cluster=cluster,
        shared_bytes=config.shmem_size,
        programmatic=bool(getattr(config, "programmatic_stream_serialization", False)),
        args=tuple(int(arg.handle) if hasattr(arg, "memory_resource") else arg for arg in args),
        library="cuda.core",
        place=calling_place("cuda"),
        sources=sources,
    )


class DriverRecorder(_LibraryRecorder):
    """Records cuda-python's launches of modules that are loaded from PTX during the recording."""

    def install(self, recorder: Recorder) -> None:
        """Wrap the functions that load modules, return kernels, and launch."""
        from cuda.bindings import driver

        #: Handles of modules and libraries -> PTX, and of functions and kernels -> (PTX, entry).
        modules: dict[int, str] = {}
        entries: dict[int, tuple[str, str]] = {}

        def remember(call: Callable[..., Any], note: Callable[[int, tuple[Any, ...]], None]) -> Callable[..., Any]:
            def wrapped(*args: Any) -> Any:
                result = call(*args)
                if int(result[0]) == 0:
                    note(int(result[1]), args)
                return result

            return wrapped

        def loaded(handle: int, args: tuple[Any, ...]) -> None:
            try:
                modules[handle] = ptx_of(args[0])
            except CudaTmaError:
                modules.pop(handle, None)

        def found(handle: int, args: tuple[Any, ...]) -> None:
            entries[handle] = modules.get(int(args[0]), ""), bytes(args[1]).decode()

        def converted(handle: int, args: tuple[Any, ...]) -> None:
            entries[handle] = entries.get(int(args[0]), ("", ""))

        def around(call: str, function: Any, stream: Any, describe: Any, execute: Callable[[], Any]) -> Any:
            ptx, entry = entries.get(int(function), ("", f"a function of {call}"))

            def launch() -> ProgramLaunch:
                if not ptx:
                    raise ArgumentError("module", _NO_PTX, "a module that is loaded from PTX during the recording")
                return describe(ptx, entry)  # type: ignore[no-any-return]

            return recorder.around(launch, execute, entry=entry, library="cuda-python", stream=int(stream))

        def launch_kernel(function: Any, *rest: Any) -> Any:
            def describe(ptx: str, entry: str) -> ProgramLaunch:
                return _describe_driver(ptx, entry, rest[:6], int(rest[6]), rest[8])

            return around(
                "cuLaunchKernel", function, rest[7], describe, lambda: original["cuLaunchKernel"](function, *rest)
            )

        def launch_kernel_ex(config: Any, function: Any, params: Any, extra: Any) -> Any:
            def describe(ptx: str, entry: str) -> ProgramLaunch:
                shape, cluster, programmatic = config_shape(driver, config)
                return _describe_driver(ptx, entry, shape, config.sharedMemBytes, params, cluster, programmatic)

            return around(
                "cuLaunchKernelEx",
                function,
                config.hStream,
                describe,
                lambda: original["cuLaunchKernelEx"](config, function, params, extra),
            )

        notes = {
            **dict.fromkeys(("cuModuleLoadData", "cuModuleLoadDataEx", "cuLibraryLoadData"), loaded),
            **dict.fromkeys(("cuModuleGetFunction", "cuLibraryGetKernel"), found),
            "cuKernelGetFunction": converted,
        }
        launches = {"cuLaunchKernel": launch_kernel, "cuLaunchKernelEx": launch_kernel_ex}
        original = {name: getattr(driver, name) for name in (*notes, *launches)}
        wrapped = {name: remember(original[name], note) for name, note in notes.items()}
        self._patches.set_everywhere(driver, wrapped | launches)


def _describe_driver(
    ptx: str,
    entry: str,
    shape: Any,
    shared_bytes: int,
    params: Any,
    cluster: tuple[int, int, int] | None = None,
    programmatic: bool = False,
) -> ProgramLaunch:
    declared = module_of(ptx, None).image.entry(entry).function.params
    return ProgramLaunch(
        ptx=ptx,
        entry=entry,
        grid=dim3(tuple(map(int, shape[:3])), "grid"),
        block=dim3(tuple(map(int, shape[3:])), "block"),
        cluster=cluster,
        shared_bytes=shared_bytes,
        programmatic=programmatic,
        args=tuple(parameter_bytes(params, [parameter.size_bytes for parameter in declared])),
        library="cuda-python",
        place=calling_place("cuda"),
    )


class CudatmaRecorder(_LibraryRecorder):
    """Records the launches of cudatma's own kernels."""

    def install(self, recorder: Recorder) -> None:
        """Wrap the launch of a plan."""
        from cudatma.runtime.launch import Kernel, LaunchPlan

        original = LaunchPlan.launch
        kernels: dict[int, Kernel] = {}

        def kernel_of(plan: Any) -> Kernel | None:
            handle = int(plan._handle)
            if handle not in kernels:
                for kernel in [found for found in gc.get_objects() if type(found) is Kernel]:
                    kernels.update({int(function.handle): kernel for function in kernel._functions.values()})
            return kernels.get(handle)

        def launch(plan: Any, stream: int) -> None:
            kernel = kernel_of(plan)

            def describe() -> ProgramLaunch:
                if kernel is None:
                    raise ArgumentError("kernel", _NO_PTX, "a kernel that cudatma compiled")
                return _describe_plan(kernel, plan)

            name = "a kernel" if kernel is None else kernel.entry
            recorder.around(describe, lambda: original(plan, stream), entry=name, library="cudatma", stream=stream)

        self._patches.set(LaunchPlan, "launch", launch)


def _describe_plan(kernel: Any, plan: Any) -> ProgramLaunch:
    config = plan._config
    return ProgramLaunch(
        ptx=kernel.ptx,
        entry=kernel.entry,
        grid=(config.gridDimX, config.gridDimY, config.gridDimZ),
        block=(config.blockDimX, config.blockDimY, config.blockDimZ),
        cluster=plan.config.cluster,
        shared_bytes=config.sharedMemBytes,
        programmatic=plan._programmatic,
        args=tuple(map(bytes, plan.arguments)),
        library="cudatma",
        place=calling_place("torch"),
        sources=tuple((name, _text_of(lines)) for name, lines in own_lines(kernel.source).items()),
        registers=register_count(kernel.log, kernel.entry),
    )


def _text_of(lines: Mapping[int, str]) -> str:
    """Return a text with these lines at their numbers."""
    return "\n".join(lines.get(number, "") for number in range(1, max(lines, default=0) + 1))


class _DeviceArguments(Arguments):
    """The parameters of a Triton launch whose tensors may be on a GPU."""

    def __init__(self, maps: Any) -> None:
        super().__init__(maps)
        self.tensors: list[Any] = []

    def memory(self, name: str, value: Any) -> tuple[int, Any]:
        tensor = getattr(value, "base", value)
        if is_torch(tensor) and tensor.device.type == "cuda":
            self.tensors.append(tensor)
            return tensor.data_ptr(), None
        return super().memory(name, value)


def _scratch(size: int, alignment: int) -> Scratch | None:
    return Scratch(size) if size else None


def _pause(patches: Patches, recorder: Recorder, owner: Any, name: str) -> None:
    """Pause the recording during calls of a method."""
    original = getattr(owner, name)

    def paused(*args: Any, **options: Any) -> Any:
        with recorder.paused():
            return original(*args, **options)

    patches.set(owner, name, paused)
