"""Emulate or record the launches of Triton and Gluon kernels.

Triton accesses a GPU only through its active driver. For the emulator, this module replaces this driver with a driver
that reports the log's target and sends each launch to the log. The module supports Triton 3.6 and later.
"""

from __future__ import annotations

import ctypes
import operator
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from cudatma.arrays import is_torch
from cudatma.descriptor import Swizzle, TensorMap, TiledSpec
from cudatma.dtypes import TMA_TYPES
from cudatma.emulator.machine.memory import address_of
from cudatma.errors import ArgumentError, ArgumentTypeError, counted
from cudatma.programs.device import MAX_THREADS, REGISTERS, SM_COUNT, WARP_SIZE, device_name
from cudatma.programs.host_memory import POINTER_BYTES, aligned_bytes, arrays_at, host_array
from cudatma.programs.launch import ProgramLaunch, calling_place, files_of, read_sources
from cudatma.programs.log import LaunchLog, naming
from cudatma.programs.patches import Patches
from cudatma.programs.recorder import Recorder, Scratch
from cudatma.review.cubin import read_cubin

_LIBRARY = "triton"
#: Hazards in code that the compiler generates. Triton and Gluon initialize mbarriers without a fence. Triton 3.6 does
#: not generate a proxy fence between cp.async and wgmma. In Gluon, the program must contain this fence.
_FROM_COMPILER = (("missing_init_fence", "mbarrier.init"),)
_FROM_TRITON = (*_FROM_COMPILER, ("missing_proxy_fence", "wgmma.mma_async"))
#: Element types by their number in tensormap.replace, which Triton's metadata also uses.
_TMA_TYPE = {t.descriptor_format: t for t in TMA_TYPES.values() if t.name not in ("tfloat32", "tfloat32_ftz")}


def intercept(patches: Patches, log: LaunchLog) -> None:
    """Make Triton compile for the log's target, send its launches to the log, and run each benchmark once."""
    import triton.testing
    from triton._C.libtriton import nvidia
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
    from triton.runtime import driver
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction
    from triton.tools.tensor_descriptor import TensorDescriptor

    tuners: list[Any] = []

    def clear() -> None:
        for tuner in tuners:
            tuner.cache.clear()

    def run_wrapped(jit: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        named = partial(naming, _LIBRARY, jit.__name__, calling_place())
        with named():
            args, kwargs = _checked_call(jit, args, kwargs)
            grid = kwargs.get("grid")
            if callable(grid):
                kwargs["grid"] = lambda meta: _grid(grid(meta), named)
            elif not kwargs.get("warmup"):
                kwargs["grid"] = _grid(grid)
        return run(jit, *args, **kwargs)

    def first_config(tuner: Any, kwargs: dict[str, Any]) -> Sequence[Any]:
        tuners.append(tuner)
        return _first_config(tuner, prune(tuner, kwargs), kwargs)

    patches.callback(clear)
    patches.set(driver, "_active", _Driver(log))
    run = patches.set(JITFunction, "run", run_wrapped)
    prune = patches.set(Autotuner, "prune_configs", first_config)
    patches.set(Autotuner, "_bench", lambda *args, **options: [1.0])  # Triton 3.6 benchmarks even a single config
    for name in ("do_bench", "do_bench_cudagraph"):
        patches.set(triton.testing, name, _call_once)
    patches.set(nvidia.cublas, "CublasLt", _CublasLt)
    patches.set(triton.testing.Mark, "run", lambda *args, **options: None)  # perf_report has no effect
    for descriptor in (TensorDescriptor, GluonDescriptor):
        _accept_arrays(patches, descriptor)


def _first_config(tuner: Any, configs: Sequence[Any], kwargs: dict[str, Any]) -> Sequence[Any]:
    """Return the first config that compiles and fits the target, because the emulator cannot compare speeds."""
    from triton.compiler.errors import CompileTimeAssertionFailure
    from triton.runtime.errors import OutOfResources, PTXASError

    for config in configs:
        values = {**tuner.nargs, **kwargs, **config.all_kwargs()}
        if config.pre_hook is not None:
            config.pre_hook(values)
        try:
            tuner.fn.run(**{**values, "warmup": True})._init_handles()
        except (OutOfResources, CompileTimeAssertionFailure, PTXASError):
            continue
        return [config]
    return configs


def _call_once(
    function: Callable[[], Any],
    *args: Any,
    quantiles: Sequence[float] | None = None,
    **options: Any,
) -> Any:
    """Call the function once, and return 1 ms, or a list with 1 ms for each quantile."""
    function()
    return [1.0] * len(quantiles) if quantiles else 1.0


class _CublasLt:
    """Replacement for Triton's cuBLAS interface, with which programs compute reference results."""

    def __init__(self, workspace: Any) -> None: ...

    def matmul(self, a: Any, b: Any, out: Any) -> None:
        """Write the product of ``a`` and the transpose of ``b`` to ``out``."""
        out.copy_(a.float() @ b.float().T)


class _Pointer:
    """A NumPy array with the tensor attributes that Triton uses."""

    __slots__ = ("array", "dtype", "shape")

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array, self.dtype, self.shape = array, array.dtype, array.shape

    def data_ptr(self) -> int:
        return address_of(self.array)

    def stride(self) -> tuple[int, ...]:
        return tuple(stride // self.dtype.itemsize for stride in self.array.strides)


def _accept_arrays(patches: Patches, descriptor: Any) -> None:
    """Make a tensor descriptor class accept NumPy arrays."""
    check, make = descriptor.__post_init__, descriptor.from_tensor

    def check_wrapped(value: Any) -> None:
        value.base = _wrapped("base", value.base)
        check(value)

    def make_wrapped(tensor: Any, *args: Any, **options: Any) -> Any:
        return make(_wrapped("tensor", tensor), *args, **options)

    patches.set(descriptor, "__post_init__", check_wrapped)
    patches.set(descriptor, "from_tensor", staticmethod(make_wrapped))


def _checked_call(jit: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments in the form that Triton accepts. If an argument is invalid, raise an error that names it."""
    names = [parameter.name for parameter in jit.params]
    if len(args) > len(names):
        raise ArgumentError(
            "args", f"{len(args)} values", f"a sequence of at most {counted(len(names), 'value')} ({', '.join(names)})"
        )
    missing = [p.name for p in jit.params[len(args) :] if not p.has_default and p.name not in kwargs]
    if missing:
        raise ArgumentError(missing[0], ..., "passed (the parameter has no default)")
    constants = {parameter.name for parameter in jit.params if parameter.is_constexpr}
    wrapped = {
        name: value if name in constants else _wrapped(name, value)
        for name, value in (*zip(names, args, strict=False), *((n, v) for n, v in kwargs.items() if n in names))
    }
    options = {name: value for name, value in kwargs.items() if name not in names}
    positional = tuple(wrapped.pop(name) for name in names[: len(args)])
    return positional, wrapped | options


def _grid(value: Any, named: Callable[[], Any] = nullcontext) -> tuple[int, ...]:
    """Return the grid as a tuple. A grid with an extent of 0 is valid and launches nothing."""
    try:
        extents = tuple(map(operator.index, value))
    except TypeError:
        extents = ()
    if not 1 <= len(extents) <= 3 or min(extents) < 0:
        with named():
            raise ArgumentError("grid", value, "a tuple of one to three nonnegative integers")
    return extents


def _wrapped(name: str, value: Any) -> Any:
    """Return an argument in the form that Triton accepts. Raise an error if Triton does not support its type."""
    from triton._utils import canonicalize_dtype

    if isinstance(value, np.ndarray):
        value = _Pointer(value)
    elif isinstance(value, np.generic) and value.dtype.kind in "biuf" and value.dtype.itemsize <= POINTER_BYTES:
        value = value.item()
    elif isinstance(value, tuple):
        parts = [_wrapped(f"{name}[{index}]", part) for index, part in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, complex | str | bytes | list | dict | np.generic):
        raise ArgumentTypeError(name, type(value).__name__, "an array, a number, or a tuple of arrays and numbers")
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        raise ArgumentError(name, value, "a 64-bit integer")
    if isinstance(value, _Pointer) or is_torch(value):
        try:
            canonicalize_dtype(value.dtype)
        except KeyError:
            raise ArgumentTypeError(f"{name}.dtype", str(value.dtype), "a dtype that Triton supports") from None
    return value


class _Driver:
    """Replacement for Triton's active driver. Its device is a str, so that Triton does not confuse it with a GPU."""

    def __init__(self, log: LaunchLog) -> None:
        self.log = log
        self.launcher_cls = _Launcher
        properties = {
            "max_shared_mem": log.target.smem_per_block_bytes,
            "max_num_regs": REGISTERS,
            "multiprocessor_count": SM_COUNT,
            "warpSize": WARP_SIZE,
            "sm_clock_rate": 1_000_000,
            "mem_clock_rate": 1_000_000,
            "mem_bus_width": 1024,
        }
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: properties,
            load_binary=_load_binary,
            unload_module=lambda module: None,
        )

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        major, minor = self.log.target.compute_capability
        return GPUTarget("cuda", 10 * major + minor, WARP_SIZE)

    def get_current_device(self) -> str:
        return device_name(self.log.target)

    def set_current_device(self, device: Any) -> None: ...

    def get_current_stream(self, device: Any) -> int:
        return 0

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        return self.log.target.compute_capability

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        import torch

        return torch.cuda

    def get_benchmarker(self) -> Any:
        return _call_once

    def get_empty_cache_for_benchmark(self) -> None: ...

    def clear_cache(self, cache: Any) -> None: ...


def _load_binary(name: str, cubin: bytes, shared_bytes: int, device: Any) -> tuple[None, str, int, int, int]:
    """Return (module, function, registers, spills, maximum number of threads), as Triton's driver does."""
    return None, name, read_cubin(cubin, name).kernels[name].registers, 0, MAX_THREADS


class _Launcher:
    """Launches a compiled kernel on the emulator."""

    def __init__(self, src: Any, metadata: Any) -> None:
        from triton.runtime.cache import get_cache_manager

        self._src, self._metadata = src, metadata
        path = get_cache_manager(metadata.hash).get_file(f"{src.name[:150]}.ptx")
        with open(path, encoding="utf-8") as file:
            self._ptx = file.read()
        self._sources = sources_of(self._ptx, src)

    def __call__(
        self,
        grid_x: int,
        grid_y: int,
        grid_z: int,
        stream: Any,
        function: Any,
        packed: Any,
        launch_metadata: Any,
        enter_hook: Any,
        exit_hook: Any,
        *args: Any,
    ) -> None:
        __tracebackhide__ = True
        from triton.runtime import driver

        log, metadata = driver.active.log, self._metadata
        place = calling_place()
        if min(grid_x, grid_y, grid_z) < 1:
            return
        with naming(_LIBRARY, metadata.name, place):
            values = KernelParameters(getattr(metadata, "tensordesc_meta", None) or ())
            grid = grid_x, grid_y, grid_z
            launch = describe_launch(self._ptx, self._src, metadata, grid, args, values, _zeros)
        log.run(replace(launch, place=place, sources=self._sources))


def sources_of(ptx: str, src: Any) -> tuple[tuple[str, str], ...]:
    """Return the path and text of each program file that contains a kernel's code."""
    import triton

    files = files_of(ptx, without=os.path.dirname(triton.__file__))
    function = getattr(src, "fn", None)
    # Cached PTX can name a file in another folder that contains the same kernel.
    return files if function is None else (*files, *read_sources([function.fn.__code__.co_filename]))


def describe_launch(
    ptx: str,
    src: Any,
    metadata: Any,
    grid: tuple[int, int, int],
    args: Sequence[Any],
    values: KernelParameters,
    allocate: Callable[[int, int], Any],
) -> ProgramLaunch:
    """Return a launch of a compiled kernel. ``src`` is the Python source or the IR of the kernel.

    ``values`` converts the arguments. ``allocate`` returns scratch memory of a given size and alignment.
    """
    ctas = metadata.num_ctas
    function = getattr(src, "fn", None)  # None if the kernel was compiled from IR
    is_gluon = function is not None and function.is_gluon()
    for (name, kind), value in zip(src.signature.items(), args, strict=True):
        values.add(str(name), kind, value)
    blocks = grid[0] * grid[1] * grid[2] * ctas
    for scratch in ("global_scratch", "profile_scratch"):
        size, alignment = getattr(metadata, f"{scratch}_size"), getattr(metadata, f"{scratch}_align")
        values.append(scratch, allocate(blocks * size, alignment))
    return ProgramLaunch(
        ptx=ptx,
        entry=metadata.name,
        grid=(grid[0] * ctas, grid[1], grid[2]),
        block=(WARP_SIZE * metadata.num_warps, 1, 1),
        args=tuple(values.args),
        library=_LIBRARY,
        cluster=(ctas, 1, 1) if ctas > 1 else None,
        shared_bytes=metadata.shared,
        programmatic=bool(metadata.launch_pdl),
        arrays=tuple(values.arrays.values()),
        names=(*values.names, *(name for name, _ in values.arrays)),
        from_compiler=_FROM_COMPILER if is_gluon else _FROM_TRITON,
    )


class KernelParameters:
    """The kernel parameters of a launch, in the order in which Triton's launcher passes them.

    A tensor descriptor becomes a tensor map, followed by its shape and strides. Each element of a tuple becomes a
    parameter. Constants are omitted.
    """

    def __init__(self, maps: Sequence[dict[str, Any]]) -> None:
        self._maps: Iterator[dict[str, Any]] = iter(maps)
        self.names: list[str] = []
        self.args: list[Any] = []
        #: Storage of torch tensors, by name and address.
        self.arrays: dict[tuple[str, int], np.ndarray[Any, Any]] = {}

    def append(self, name: str, value: Any) -> None:
        self.names.append(name)
        self.args.append(value)

    def add(self, name: str, kind: Any, value: Any) -> None:
        """Add an argument. ``kind`` is its type in Triton's signature."""
        if isinstance(kind, tuple):
            labels = [f".{field}" for field in getattr(value, "_fields", ())] or [f"[{i}]" for i in range(len(kind))]
            for label, part, element in zip(labels, kind, value, strict=True):
                self.add(name + label, part, element)
        elif kind.startswith("tensordesc"):
            self._add_descriptor(name, value)
        elif kind[0] == "*":
            self._add_pointer(name, value)
        elif kind != "constexpr":
            self.append(name, _number(kind, value))

    def _add_pointer(self, name: str, value: Any) -> None:
        address, memory = self.memory(name, value)
        self.append(name, memory if isinstance(value, _Pointer) else address)

    def _add_descriptor(self, name: str, value: Any) -> None:
        fields = next(self._maps)
        if fields.get("is_im2col"):
            raise ArgumentTypeError(name, "an im2col descriptor", "a tiled descriptor")
        dtype = TMA_TYPES["tfloat32"] if getattr(value, "round_f32_to_tf32", False) else _TMA_TYPE[fields["elem_type"]]
        address, memory = self.memory(name, value.base)
        shape, strides = list(value.shape), list(value.strides)
        spec = TiledSpec.from_strided(
            address,
            [*shape[:-1], shape[-1] * (2 if fields["fp4_padded"] else 1)],
            strides_bytes=[stride * fields["elem_size"] for stride in strides],
            dtype=dtype,
            box=fields["block_size"],
            axes=range(len(shape))[::-1],
            swizzle=Swizzle(fields["swizzle"]),
            l2_promotion="128B",
            oob_fill="nan" if value.padding == "nan" else "zeros",
        )
        self.append(name, TensorMap(spec, owner=memory, encoder="codec"))
        for field, kind, extents in (("shape", "i32", shape), ("strides", "i64", strides)):
            for axis, extent in enumerate(extents):
                self.append(f"{name}.{field}[{axis}]", _number(kind, extent))

    def memory(self, name: str, value: Any) -> tuple[int, np.ndarray[Any, Any] | None]:
        """Return an address and the array in host memory that contains it."""
        if isinstance(value, int) or value is None:
            return value or 0, None
        if isinstance(value, _Pointer):
            return value.data_ptr(), value.array
        tensor = getattr(value, "base", value)  # triton.reinterpret
        if not is_torch(tensor) or tensor.device.type != "cpu":
            got = f"a tensor on {tensor.device}" if is_torch(tensor) else type(value).__name__
            raise ArgumentTypeError(name, got, "a NumPy array or a torch tensor on the CPU")
        return tensor.data_ptr(), self._storage(name, tensor)

    def _storage(self, name: str, tensor: Any) -> np.ndarray[Any, Any] | None:
        """Return the memory of a torch tensor, and add it to the arrays of the launch."""
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        known = [array for (_, base), array in self.arrays.items() if base == address]
        if known or not size:
            return known[0] if known else None
        memory = np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)
        if size % tensor.element_size() == 0:  # so that reports refer to elements instead of bytes
            memory = memory.view(f"V{tensor.element_size()}")
        if tensor.is_contiguous() and tensor.numel() == memory.size:
            memory = memory.reshape(tuple(tensor.shape))
        self.arrays[name, address] = memory
        if str(tensor.dtype) in ("torch.int64", "torch.uint64"):
            self._add_pointees(name, memory[: size - size % 8].view(np.uint64))
        return memory

    def _add_pointees(self, name: str, table: np.ndarray[Any, Any]) -> None:
        """Add the tensors whose addresses are in a table, such as the operands of a grouped GEMM."""
        addresses = np.unique(table[(table >> 32 != 0) & (table >> 48 == 0)])
        for _, info in arrays_at(map(int, addresses)):
            array = host_array(info.owner)
            if is_torch(info.owner) and array is not None:
                self._storage(f"{name}[...]", info.owner)
            elif array is not None:
                self.arrays[f"{name}[...]", info.extent[0]] = array


def _number(kind: str, value: Any) -> Any:
    """Convert a number to a NumPy scalar of a type such as "i32" or "fp16"."""
    if kind in ("fp32", "f32", "fp64", "fp16"):
        return np.dtype(f"float{kind.lstrip('fp')}").type(value)
    if kind == "bf16":  # Triton truncates instead of rounding
        return np.uint16(np.float32(value).view(np.uint32) >> 16)
    size = max(int(kind[1:]) // 8, 1)
    return np.frombuffer(int(value).to_bytes(size, "little", signed=value < 0), f"{kind[0]}{size}")[0]


def record(patches: Patches, recorder: Recorder) -> None:
    """Record the launches of Triton and torch.compile, except during autotuning."""
    from triton.compiler.compiler import CompiledKernel
    from triton.runtime.autotuner import Autotuner

    original = CompiledKernel.run

    def run(kernel: Any) -> Callable[..., Any]:
        execute = original.fget(kernel)

        def launch(x: int, y: int, z: int, stream: Any, *rest: Any) -> Any:
            def describe() -> ProgramLaunch:
                ptx, args = kernel.asm["ptx"], rest[5:]
                values = _DeviceParameters(getattr(kernel.metadata, "tensordesc_meta", None) or ())
                description = describe_launch(ptx, kernel.src, kernel.metadata, (x, y, z), args, values, _scratch)
                return replace(
                    description,
                    place=calling_place(),
                    arrays=(*description.arrays, *values.tensors),
                    sources=sources_of(ptx, kernel.src),
                )

            if min(x, y, z) < 1:
                return execute(x, y, z, stream, *rest)
            return recorder.around(
                describe,
                lambda: execute(x, y, z, stream, *rest),
                entry=kernel.metadata.name,
                library=_LIBRARY,
                stream=int(stream or 0),
            )

        return launch

    patches.set(CompiledKernel, "run", property(run))
    recorder.pause_during(patches, Autotuner, "_bench")


class _DeviceParameters(KernelParameters):
    """The kernel parameters of a launch whose tensors may be on a GPU."""

    def __init__(self, maps: Any) -> None:
        super().__init__(maps)
        self.tensors: list[Any] = []

    def memory(self, name: str, value: Any) -> tuple[int, Any]:
        tensor = getattr(value, "base", value)
        if is_torch(tensor) and tensor.device.type == "cuda":
            self.tensors.append(tensor)
            return tensor.data_ptr(), None
        return super().memory(name, value)


def _zeros(size: int, alignment: int) -> np.ndarray[Any, Any] | None:
    return aligned_bytes(size, alignment) if size else None


def _scratch(size: int, alignment: int) -> Scratch | None:
    return Scratch(size) if size else None
