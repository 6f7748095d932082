"""Checks of ``cudatma doctor``. They query the machine through a Machine object, which tests replace."""

from __future__ import annotations

import importlib
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cudatma.build.cache import Cache, default_root
from cudatma.errors import (
    CUDA_PACKAGES,
    INSTALL_CUDA,
    CudaTmaError,
    DriverError,
    TargetError,
    check,
    counted,
    duration,
    no_driver,
)
from cudatma.kernels.registry import REGISTRY
from cudatma.review.nvidia_programs import SASS_PACKAGES
from cudatma.target import TARGETS, Target, target_for
from cudatma.toolkit import find_program

from .artifacts import megabytes, usage
from .version import package_version

#: PTX for the emulator, in which every thread writes its index.
EMULATED_PROBE = """.version 8.0
.target sm_90
.address_size 64
.visible .entry probe(.param .u64 out) {
  .reg .b32 %r<2>;
  .reg .b64 %rd<4>;
  ld.param.u64 %rd1, [out];
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %rd2, %r1, 4;
  add.s64 %rd3, %rd1, %rd2;
  st.global.u32 [%rd3], %r1;
  ret;
}
"""
#: CUDA source to compile for every target. It uses an mbarrier and a bulk copy with a .shared::cta destination, like
#: every kernel.
PROBE = """extern "C" __global__ void probe(const char* source) {
  __shared__ alignas(128) char tile[128];
  __shared__ unsigned long long barrier;
  unsigned bar = (unsigned)__cvta_generic_to_shared(&barrier), dst = (unsigned)__cvta_generic_to_shared(tile);
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(bar) : "memory");
  asm volatile("cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%0], [%1], 128, [%2];"
               :: "r"(dst), "l"(source), "r"(bar) : "memory");
}
"""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the doctor's report.

    Attributes
    ----------
    name : str
        The subject of the check.
    status : str
        ``"ok"``, ``"warn"`` (an optional feature will not work) or ``"fail"`` (something is broken).
    found : str
        Result of the check and its effect.
    remedy : str
        Suggested action, or "".
    missing : bool
        Whether the subject is absent or unusable.
    """

    name: str
    status: str
    found: str
    remedy: str = ""
    missing: bool = False


@dataclass(frozen=True, slots=True)
class Gpu:
    """Name, compute capability, opt-in shared memory per block and device memory of a CUDA device."""

    index: int
    name: str
    compute_capability: tuple[int, int]
    smem_optin_bytes: int
    memory_bytes: int


class Machine:
    """Facts about this machine. Each method raises the errors of the functions that it calls."""

    def python(self) -> tuple[int, int, int]:
        return sys.version_info[:3]

    def import_module(self, name: str) -> Any:
        return importlib.import_module(name)

    def cuda_version(self) -> tuple[int, int]:
        """Return the CUDA version that the driver supports. Raise DriverError if there is no driver."""
        version = int(self._driver("cuDriverGetVersion"))
        return version // 1000, version % 1000 // 10

    def gpus(self) -> list[Gpu]:
        """Return the devices without creating a context. Raise DriverError if there is no driver or no device."""
        self._driver("cuInit", 0)
        return [self._gpu(index) for index in range(int(self._driver("cuDeviceGetCount")))]

    def nvrtc_version(self) -> tuple[int, int]:
        from cudatma.build.nvrtc import nvrtc_version

        return nvrtc_version()

    def compile_probe(self, target: Target) -> float:
        """Return the time in seconds to compile PROBE. Raise CompileError or TargetError if the compilation fails."""
        from cudatma.build.nvrtc import compile_source

        return compile_source(PROBE, target, name="probe.cu").seconds

    def emulate_probe(self) -> list[int]:
        """Return the indices that the threads of a warp write when the emulator runs EMULATED_PROBE."""
        from cudatma import emulator

        out = np.zeros(32, np.uint32)
        emulator.load(EMULATED_PROBE).launch("probe", 1, 32, (out,))
        return [int(value) for value in out]

    def _gpu(self, index: int) -> Gpu:
        from cuda.bindings import driver

        device, names = self._driver("cuDeviceGet", index), driver.CUdevice_attribute
        major, minor, smem = (
            int(self._driver("cuDeviceGetAttribute", attribute, device))
            for attribute in (
                names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
                names.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
            )
        )
        name = bytes(self._driver("cuDeviceGetName", 128, device)).split(b"\0")[0].decode("utf-8", "replace")
        return Gpu(index, name, (major, minor), smem, int(self._driver("cuDeviceTotalMem", device)))

    def _driver(self, call: str, *arguments: Any) -> Any:
        from cuda.bindings import driver

        try:
            return check(getattr(driver, call)(*arguments), call)
        except DriverError:
            raise
        except RuntimeError as error:
            no_driver(call, error)


def examine(machine: Machine, root: Path | None = None) -> list[Check]:
    """Run all checks, prerequisites first. ``root`` is the cache folder, by default default_root()."""
    checks: list[Check] = []
    for run_check in (check_python, check_bindings, check_driver, check_gpus, check_nvrtc, check_cupy, check_emulator):
        checks += _guarded(run_check, machine)
    return [*checks, check_templates(), check_cache(root), check_disassembler()]


def _guarded(run_check: Callable[[Machine], list[Check]], machine: Machine) -> list[Check]:
    """Run a check. Report an unexpected error as a failed check, without a traceback."""
    try:
        return run_check(machine)
    except Exception as error:  # a broken installation may raise anything
        name = run_check.__name__.removeprefix("check_")
        return [Check(name, "fail", f"{type(error).__name__}: {error}", missing=True)]


def check_python(machine: Machine) -> list[Check]:
    version = machine.python()
    text = f"{'.'.join(map(str, version))} on {platform.system()} {platform.machine()}"
    if version < (3, 10):
        return [Check("python", "fail", text, "use Python 3.10 or later", missing=True)]
    return [Check("python", "ok", text)]


def check_bindings(machine: Machine) -> list[Check]:
    try:
        machine.import_module("cuda.bindings.driver")
    except ImportError as error:
        result = f"cannot be imported ({error}); kernels cannot be compiled or launched"
        return [Check("cuda-bindings", "fail", result, INSTALL_CUDA, missing=True)]
    return [Check("cuda-bindings", "ok", package_version("cuda-bindings") or "installed, version unknown")]


def check_driver(machine: Machine) -> list[Check]:
    try:
        version = machine.cuda_version()
    except (DriverError, ImportError) as error:
        # A missing GPU is an error if the user has selected the GPU.
        status = "fail" if os.environ.get("CUDATMA_BACKEND") == "cuda" else "warn"
        remedy = "install NVIDIA's driver to launch kernels; compilation and the emulator do not require a driver"
        return [Check("driver", status, f"none; no kernel can be launched ({_why(error)})", remedy, missing=True)]
    result = f"CUDA {version[0]}.{version[1]}"
    if version < (12, 0):
        return [Check("driver", "fail", f"{result}; TMA requires CUDA 12.0", "install a newer driver", missing=True)]
    return [Check("driver", "ok", result)]


def _why(error: DriverError | ImportError) -> str:
    """Return the driver's error without its remedy."""
    if isinstance(error, DriverError):
        return f"{error.call}: {'no driver library' if error.code is None else error.detail}"
    return str(error)


def check_gpus(machine: Machine) -> list[Check]:
    try:
        gpus = machine.gpus()
    except (DriverError, ImportError) as error:
        return [Check("GPU", "warn", f"none ({_why(error)})", missing=True)]
    if not gpus:
        remedy = "check CUDA_VISIBLE_DEVICES, or give the container access to a GPU"
        return [Check("GPU", "warn", "the driver reports no GPU", remedy, missing=True)]
    return [_gpu_check(gpu) for gpu in gpus]


def _gpu_check(gpu: Gpu) -> Check:
    capability = ".".join(map(str, gpu.compute_capability))
    result = f"{gpu.index}: {gpu.name}, compute capability {capability}, {gpu.memory_bytes / 2**30:.0f} GiB, "
    result += f"{gpu.smem_optin_bytes} bytes of shared memory per block"
    try:
        target = target_for(gpu.compute_capability)
    except TargetError as error:
        return Check("GPU", "warn", result, str(error), missing=True)
    result += f", target {target.name}"
    if gpu.smem_optin_bytes < target.smem_per_block_bytes:
        remedy = (
            f"choose configs with at most {gpu.smem_optin_bytes} bytes; "
            f"kernels for {target.name} may use up to {target.smem_per_block_bytes} bytes"
        )
        return Check("GPU", "warn", result, remedy)
    return Check("GPU", "ok", result)


def check_nvrtc(machine: Machine) -> list[Check]:
    try:
        version = machine.nvrtc_version()
    except (DriverError, ImportError) as error:
        why = str(error).partition(". ")[0]  # the remedy follows
        return [Check("NVRTC", "fail", f"none; kernels cannot be compiled ({why})", INSTALL_CUDA, missing=True)]
    checks = [_nvrtc_check(version, _cuda_of_driver(machine))]
    needed = _targets_of_gpus(machine)
    for target in TARGETS.values():
        try:
            seconds = machine.compile_probe(target)
            checks.append(Check(f"  {target.name}", "ok", f"compiles ({duration(seconds)})"))
        except CudaTmaError as error:
            status = "fail" if target.name in needed else "warn"
            checks.append(Check(f"  {target.name}", status, str(error).splitlines()[0]))
    return checks


def _nvrtc_check(version: tuple[int, int], driver: tuple[int, int] | None) -> Check:
    result = f"{version[0]}.{version[1]}"
    if driver is not None and version[0] > driver[0]:
        packages = CUDA_PACKAGES[12 if driver[0] < 13 else 13]
        remedy = f"pip install {packages} instead of the packages of CUDA {version[0]}, or install a newer driver"
        result += f"; its cubins might not load on this driver (CUDA {driver[0]}.{driver[1]})"
        return Check("NVRTC", "fail", result, remedy)
    return Check("NVRTC", "ok", result)


def _cuda_of_driver(machine: Machine) -> tuple[int, int] | None:
    try:
        return machine.cuda_version()
    except (DriverError, ImportError):
        return None


def _targets_of_gpus(machine: Machine) -> set[str]:
    needed = set()
    try:
        for gpu in machine.gpus():
            needed.add(target_for(gpu.compute_capability).name)
    except (DriverError, TargetError, ImportError):
        pass
    return needed


def check_cupy(machine: Machine) -> list[Check]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # CuPy warns if there is no CUDA toolkit, but arrays do not require one.
            cupy = machine.import_module("cupy")
    except ImportError as error:
        result = f"cannot be imported ({error}); CuPy arrays and weights on the GPU do not work"
        return [Check("CuPy", "warn", result, INSTALL_CUDA, missing=True)]
    return [Check("CuPy", "ok", str(cupy.__version__))]


def check_emulator(machine: Machine) -> list[Check]:
    started = time.perf_counter()
    try:
        is_right = machine.emulate_probe() == list(range(32))
    except CudaTmaError as error:
        return [Check("emulator", "fail", str(error).splitlines()[0], missing=True)]
    if not is_right:
        return [Check("emulator", "fail", "a probe gave wrong results", "report this bug", missing=True)]
    return [Check("emulator", "ok", f"runs PTX on the CPU ({duration(time.perf_counter() - started)})")]


def check_templates() -> Check:
    from cudatma.build.render import template_files

    try:
        files = {path for entry in REGISTRY.values() for path in template_files(entry.template)}
    except CudaTmaError as error:
        remedy = "reinstall cudatma to restore its templates"
        return Check("templates", "fail", str(error).splitlines()[0], remedy, missing=True)
    return Check("templates", "ok", f"{len(files)} files for {counted(len(REGISTRY), 'kernel')}")


def check_cache(root: Path | None = None) -> Check:
    started = time.perf_counter()
    try:
        folder = default_root() if root is None else root
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            cache = Cache(folder)
        used = usage(folder)
    except CudaTmaError as error:
        return Check("cache", "fail", str(error), "set CUDATMA_CACHE_DIR to a folder that you own")
    if cache.folder is None:
        result = f"{folder} is not writable; each process compiles its kernels again"
        return Check("cache", "warn", result, "set CUDATMA_CACHE_DIR to a folder that you own")
    took = duration(time.perf_counter() - started)
    size = f"{megabytes(used.size_bytes)} of {megabytes(used.limit_bytes)}"
    return Check("cache", "ok", f"{folder}: {counted(used.entries, 'kernel')}, {size}, private, opened in {took}")


def check_disassembler() -> Check:
    result = [str(path) for path in (find_program("nvdisasm"), find_program("cuobjdump")) if path]
    if not result:
        return Check(
            "disassembler", "warn", "none; dumps contain no SASS", f"pip install {SASS_PACKAGES}", missing=True
        )
    return Check("disassembler", "ok", ", ".join(result))
