"""Wrong variables and command lines, and machines that lack something."""

from __future__ import annotations

import os

import cudatma as c
from bad_input.bench import KERNEL_PTX, SOURCE, Case, Interface, compile_text, device_weight, gemm, host_weight, tiled
from cudatma import context
from cudatma.build.cache import Cache
from cudatma.build.nvrtc import compile_source
from cudatma.errors import ArgumentError, CacheError, DriverError, LaunchError, TargetError
from cudatma.target import detect, target_for

# One row a line, wrapped by hand: the table is read by columns.
# fmt: off

#: Environment variables, the cache folder; no driver, no GPU, no CuPy, no NVRTC.
ENVIRONMENT = [
    Case("backend variable", ArgumentError, "CUDATMA_BACKEND", "tpu",
         lambda b: (b.variable("CUDATMA_BACKEND", "tpu"), gemm(backend=None))),
    Case("weight on the host, backend variable", ArgumentError, "weight.device", "to_device()",
         lambda b: (b.variable("CUDATMA_BACKEND", "cuda"), c.MarlinLinear(host_weight()).warm_up([1]))),
    Case("target variable", TargetError, "CUDATMA_TARGET", "sm_75",
         lambda b: (b.variable("CUDATMA_TARGET", "sm_75"), compile_text(target=None))),
    Case("cache in a relative folder", CacheError, "CUDATMA_CACHE_DIR", "absolute",
         lambda b: (b.variable("CUDATMA_CACHE_DIR", "here"), compile_text())),
    Case("cache that others may write", CacheError, "CUDATMA_CACHE_DIR", "mode 0777",
         lambda b: (b.variable("CUDATMA_CACHE_DIR", b.world_writable()), compile_text())),
    Case("cache of another user", CacheError, "CUDATMA_CACHE_DIR", "belongs to user",
         lambda b: (b.patch.setattr(os, "geteuid", lambda: os.getuid() + 1), Cache())),
    Case("cache of some size", CacheError, "CUDATMA_CACHE_SIZE_MB", "big",
         lambda b: (b.variable("CUDATMA_CACHE_SIZE_MB", "big"), Cache())),
    Case("cache key", ArgumentError, "key", "64 hexadecimal", lambda b: Cache().get("../../etc")),
    Case("no driver: detect", DriverError, "cuInit", "libcuda", lambda b: (b.without_driver(), detect())),
    Case("no driver: GEMM", DriverError, "cuInit", "backend='emulator'", lambda b: (b.without_driver(), gemm())),
    Case("no driver: GEMM of an interface", DriverError, "cuInit", "libcuda",
         lambda b: (b.without_driver(), gemm(x=Interface()))),
    Case("no driver: workspace", DriverError, "cuInit", "libcuda", lambda b: (b.without_driver(), c.Workspace())),
    Case("no driver: warming up", DriverError, "cuInit", "libcuda",
         lambda b: (b.without_driver(), c.MarlinLinear(device_weight()).warm_up([1]))),
    Case("no driver: loading a kernel", DriverError, "cuInit", "libcuda",
         lambda b: (b.without_driver(), c.Kernel(b"", "k", c.get_target("sm_90a"), ptx=KERNEL_PTX).load())),
    Case("no driver: a map by the driver", DriverError, "cuInit", "libcuda",
         lambda b: (b.without_driver(), c.TensorMap.tiled(tiled(), encoder="driver"))),
    Case("no GPU: detect", DriverError, "cuInit", "CUDA_ERROR_NO_DEVICE",
         lambda b: (b.without_gpu("CUDA_ERROR_NO_DEVICE"), detect())),
    Case("no GPU: detect, driver present", TargetError, "device", "no CUDA device",
         lambda b: (b.without_gpu("CUDA_SUCCESS"), detect())),
    Case("no GPU: workspace", LaunchError, "device", "no CUDA device",
         lambda b: (b.without_gpu("CUDA_SUCCESS"), c.Workspace(0))),
    Case("driver too old", DriverError, "cuInit", "SYSTEM_DRIVER_MISMATCH",
         lambda b: (b.without_gpu("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"), gemm())),
    Case("a GPU before Hopper", TargetError, "device", "8.0", lambda b: target_for((8, 0))),
    Case("a GPU of tomorrow", TargetError, "device", "99.0", lambda b: target_for((99, 0))),
    Case("no CuPy", DriverError, "PackedWeight.to_device", "cupy-cuda13x",
         lambda b: (b.without_cupy(), host_weight().to_device())),
    Case("CuPy without a driver", DriverError, "PackedWeight.to_device", "no NVIDIA driver",
         lambda b: (b.cupy_without_driver(), host_weight().to_device())),
    Case("CuPy without a driver: the current stream", DriverError, "get_current_stream", "InsufficientDriver",
         lambda b: (b.cupy_without_driver(), gemm(stream=None))),
    Case("no CuPy for the result", DriverError, "cupy.empty", "no CuPy", lambda b: (b.without_cupy(), gemm(out=None))),
    Case("NVRTC is not installed", DriverError, "nvrtcVersion", "NVRTC is not installed",
         lambda b: (b.without_nvrtc(), compile_source(SOURCE, c.get_target("sm_90a")))),
    Case("NVRTC too old", TargetError, "target", "NVRTC 12.9",
         lambda b: (b.nvrtc_of(12, 0), compile_source(SOURCE, c.get_target("sm_121a")))),
    Case("after a fork", LaunchError, "process", "spawn",
         lambda b: (b.patch.setattr(context, "forked", True), gemm())),
]

#: Arguments of the command line, and what stderr says.
COMMANDS: dict[str, tuple[list[str], str]] = {
    "unknown command": (["juggle"], "juggle"),
    "unknown option": (["targets", "--fast"], "--fast"),
    "no kernel": (["dump"], "--list"),
    "unknown kernel": (
        ["dump", "marlin_skinn", "--target", "sm_90a"],
        "did you mean marlin_skinny?",
    ),
    "unknown target": (["dump", "marlin_mma_sync", "--target", "sm_75"], "target must be one of sm_90"),
    "target to show": (["targets", "sm_75"], "target must be one of sm_90"),
    "field without a value": (
        ["dump", "marlin_mma_sync", "--target", "sm_90a", "--config", "stages"],
        "got stages",
    ),
    "unknown field": (["dump", "marlin_mma_sync", "--target", "sm_90a", "--config", "depth=3"], "got depth"),
    "value out of range": (
        ["dump", "marlin_mma_sync", "--target", "sm_90a", "--config", "stages=99"],
        "got 99",
    ),
    "output below a file": (
        ["dump", "marlin_mma_sync", "--target", "sm_90a", "--out", "/dev/null/x"],
        "got /dev/null/x",
    ),
    "header below a file": (["header", "--out", "/dev/null/x.cuh"], "got /dev/null/x.cuh"),
    "unknown backend": (["demo", "--backend", "tpu"], "tpu"),
    "left-over argument": (["version", "please"], "please"),
}
