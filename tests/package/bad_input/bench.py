"""What the table of wrong calls is made with: right calls of which one thing is changed, and a bench to work on.

Device arrays are stood in for by ArrayInfo objects on device 0: whatever is checked is checked before the driver is
asked for anything.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cudatma as c
from cudatma import backend, context
from cudatma.arrays import ArrayInfo, dense_strides
from cudatma.descriptor.driver import has_driver
from cudatma.errors import CudaTmaError
from cudatma.quantization import pack
from cudatma.runtime.launch_config import FunctionLimits
from cudatma.runtime.loading import Function, Resources
from cudatma.target import _detect

BF16 = np.dtype(ml_dtypes.bfloat16)
X_ADDRESS, OUT_ADDRESS, BIAS_ADDRESS = 0x7F0000000000, 0x7F1000000000, 0x7F2000000000
K, N = 64, 64


class OnDevice(c.PackedWeight):
    """A weight that says that it lies on device 0; its arrays are on the host."""

    __slots__ = ()

    @property
    def device(self) -> int | None:
        return 0


def host_weight(**changes: Any) -> c.PackedWeight:
    """A weight in groups of 32. changes: fields of PackedWeight."""
    packed = pack(np.full((K, N), 7, np.uint8), np.ones((K // 32, N), np.float16), group_size=32)
    return replace(packed, **changes) if changes else packed


def device_weight(dtype: Any = np.float16) -> OnDevice:
    host = host_weight()
    scales = host.scales.astype(dtype)
    return OnDevice(host.qweight, scales, None, None, host.shape, host.group_size, scales.dtype.name)


def on_device(shape: tuple[int, ...] = (4, K), pointer: int = X_ADDRESS, **changes: Any) -> ArrayInfo:
    """A fake array on device 0. changes: other fields of ArrayInfo, ``strides`` in bytes."""
    dtype = np.dtype(changes.pop("dtype", np.float16))
    strides = changes.pop("strides", dense_strides(shape, dtype))
    return replace(ArrayInfo(pointer, shape, strides, dtype, 0, None, "cai"), **changes)


def gemm(**changes: Any) -> Any:
    """marlin_gemm with everything right but ``changes``; stream 0, since CuPy may lack a driver to ask for its own."""
    arrays = {"x": on_device(), "w": device_weight(), "out": on_device((4, N), OUT_ADDRESS)}
    return c.marlin_gemm(**(arrays | {"backend": "cuda", "stream": 0} | changes))


def host_gemm(**changes: Any) -> Any:
    call = {"x": np.zeros((4, K), np.float16), "w": host_weight(), "backend": "reference"}
    return c.marlin_gemm(**(call | changes))


class Interface:
    """An object with ``__cuda_array_interface__``, right but for ``changes``."""

    def __init__(self, **changes: Any) -> None:
        right = {"shape": (4, K), "typestr": "<f2", "data": (X_ADDRESS, False), "version": 3}
        self.__cuda_array_interface__ = {
            name: value for name, value in (right | changes).items() if value != "left out"
        }


class Dlpack:
    def __init__(self, device: Any) -> None:
        self.device = device

    def __dlpack_device__(self) -> Any:
        return self.device

    def __dlpack__(self, **_: Any) -> Any:
        raise BufferError("strides that cannot be exported")


PTX = ".visible .entry k(.param .u64 x, .param .u32 n, .param .f32 f, .param .align 64 .b8 map[128])\n{ ret; }\n"
#: The smallest kernel.
KERNEL_PTX = ".visible .entry k(.param .u64 x)\n{ ret; }\n"
RIGHT_ARGS = (on_device(), 1, 1.0, bytes(128))


def launch(args: Any = RIGHT_ARGS, grid: Any = 1, block: Any = 32, target: str = "sm_90a", **options: Any) -> None:
    """Launch a kernel that device 0 has loaded already, with 256 threads and 48 KiB of shared memory at most."""
    made = c.Kernel(b"", "k", c.get_target(target), ptx=PTX)
    made._functions[0] = Function(None, None, Resources(32, 0, 0, 0, 256, 49152), FunctionLimits(256, 49152))
    made.launch(grid, block, args, **{"stream": 0} | options)


class TensorMapOf:
    """What a launch takes for a tensor map."""

    def __init__(self, size_bytes: int = 128, device: int = 0) -> None:
        self.data, self.device = (ctypes.c_ubyte * size_bytes)(), device


def tiled(**changes: Any) -> c.TiledSpec:
    right = {"dtype": "float16", "dims": (256, 64), "strides_bytes": (512,), "box": (64, 32), "swizzle": "128B"}
    return c.TiledSpec(**(right | changes))


def im2col(**changes: Any) -> c.Im2colSpec:
    right = {"dtype": "float16", "dims": (64, 8, 8, 2), "strides_bytes": (128, 1024, 8192), "lower_corner": (-1, -1)}
    right |= {"upper_corner": (-1, -1), "channels_per_pixel": 64, "pixels_per_column": 64}
    return c.Im2colSpec(**(right | changes))


SOURCE = 'extern "C" __global__ void k(float* x) { *x = 1; }'


def compile_text(text: Any = SOURCE, target: Any = "sm_90a", **options: Any) -> c.Kernel:
    return c.compile(text, target=target, **options)


@dataclass(frozen=True)
class Case:
    """A wrong call and its answer.

    field: the error's, exactly (of a file its end, for the path stands before it); where an error has none (templates,
    compilers, the driver, the cache) the first thing that its message says. says: more that the message says.
    """

    name: str
    error: type[CudaTmaError]
    field: str
    says: str
    call: Callable[[Bench], object]


@dataclass
class Bench:
    """What a case may use: a folder of its own, and changes to the process that are taken back."""

    folder: Path
    patch: pytest.MonkeyPatch

    def variable(self, name: str, value: str) -> None:
        self.patch.setenv(name, value)

    def saved(self, cut: int | None = None, metadata: dict[str, str] | None = None, **facts: Any) -> Path:
        """A weight's file: cut short, or with other metadata, or with other facts on the weight."""
        path = self.folder / "weight.safetensors"
        host_weight().save(path)
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        header["__metadata__"] |= metadata or {}
        if facts:
            told = json.loads(header["__metadata__"]["weights"])
            header["__metadata__"]["weights"] = json.dumps({name: fact | facts for name, fact in told.items()})
        text = json.dumps(header).encode()
        path.write_bytes((len(text).to_bytes(8, "little") + text + content[8 + length :])[:cut])
        return path

    def file(self, content: bytes) -> Path:
        path = self.folder / "file.safetensors"
        path.write_bytes(content)
        return path

    def entry(self, **changes: Any) -> Path:
        """A file with one tensor ``x``, whose header entry is changed."""
        told = {"x": {"dtype": "F16", "shape": [4], "data_offsets": [0, 8]} | changes}
        header = json.dumps(told).encode()
        return self.file(len(header).to_bytes(8, "little") + header + bytes(8))

    def world_writable(self) -> str:
        self.folder.chmod(0o777)
        return str(self.folder)

    def without_driver(self, said: Callable[..., Any] | None = None, gpus: int = 0) -> None:
        """No libcuda, as cuda.bindings reports it; or a driver that answers cuInit with ``said`` and has no GPUs."""
        driver = pytest.importorskip("cuda.bindings.driver")

        def absent(*_: Any) -> Any:
            raise RuntimeError("libcuda.so.1 was not found")

        self.patch.setattr(driver, "cuInit", said or absent)
        self.patch.setattr(driver, "cuDeviceGetCount", lambda: (driver.CUresult.CUDA_SUCCESS, gpus))
        self.patch.setattr(context, "_initialized", False)
        self.patch.setattr(context, "_devices", {})
        self.patch.setattr(context, "_contexts", {})
        forget_the_driver()

    def without_gpu(self, answer: str) -> None:
        """A driver that answers cuInit with a CUresult, and has no GPUs."""
        driver = pytest.importorskip("cuda.bindings.driver")
        self.without_driver(lambda *_: (driver.CUresult[answer],))

    def without_cupy(self) -> None:
        self.patch.setitem(sys.modules, "cupy", None)  # an import of it fails

    def cupy_without_driver(self) -> None:
        class CUDARuntimeError(RuntimeError):
            status = 35

        def refuse(*_: object) -> None:
            raise CUDARuntimeError("cudaErrorInsufficientDriver")

        runtime = SimpleNamespace(CUDARuntimeError=CUDARuntimeError)
        cuda = SimpleNamespace(Device=refuse, get_current_stream=refuse, runtime=runtime)
        self.patch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda, ndarray=type("ndarray", (), {})))

    def nvrtc_of(self, major: int, minor: int) -> None:
        nvrtc = pytest.importorskip("cuda.bindings.nvrtc")
        self.patch.setattr(nvrtc, "nvrtcVersion", lambda: (nvrtc.nvrtcResult.NVRTC_SUCCESS, major, minor))

    def without_nvrtc(self) -> None:
        def absent() -> None:
            raise RuntimeError("libnvrtc.so was not found")

        self.patch.setattr(pytest.importorskip("cuda.bindings.nvrtc"), "nvrtcVersion", absent)


def forget_the_driver() -> None:
    for remembered in (_detect, has_driver, backend._has_usable_gpu):
        remembered.cache_clear()
