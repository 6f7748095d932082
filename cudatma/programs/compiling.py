"""Compile a program's CUDA C++ source to PTX with the program's compiler options."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from cudatma.build.headers import cuda_headers
from cudatma.build.nvrtc import nvrtc_version, require_nvrtc_for
from cudatma.errors import ArgumentError, CompileError, check
from cudatma.target import get_target

#: Prefixes of options that select an architecture or the kind of output.
_IGNORED_OPTIONS = ("-arch", "--gpu-architecture", "-dlto", "--dlink-time-opt", "-rdc", "--relocatable-device-code")
_MAX_PROGRAMS = 128
_ANONYMOUS = "kernel.cu"


@lru_cache(maxsize=_MAX_PROGRAMS)
def compile_to_ptx(
    source: str, target: str, options: tuple[str, ...] = (), names: tuple[str, ...] = (), file_name: str = _ANONYMOUS
) -> tuple[str, dict[str, str]]:
    """Compile CUDA C++. Return the PTX, and a dict that maps C++ name expressions to names in the PTX.

    Ignore options that select an architecture or the kind of output. In the line information of the PTX, the source is
    called ``file_name``. Raise CompileError with the compiler log if the source cannot be compiled.
    """
    from cuda.bindings import nvrtc

    version = nvrtc_version()
    require_nvrtc_for(get_target(target), version)
    flags = [f"--gpu-architecture={target}", "--generate-line-info"]
    flags += [option for option in options if not option.startswith(_IGNORED_OPTIONS)]
    flags += [f"--include-path={folder}" for folder in cuda_headers(version[0])]
    program = check(
        nvrtc.nvrtcCreateProgram(source.encode(), f"/{file_name}".encode(), 0, [], []), "nvrtcCreateProgram"
    )
    try:
        for name in names:
            check(nvrtc.nvrtcAddNameExpression(program, name.encode()), "nvrtcAddNameExpression")
        code = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])[0]
        if int(code):
            log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).replace(
                f"/{file_name}", file_name
            )
            first = next((line for line in log.splitlines() if "error" in line), code.name)
            raise CompileError(f"NVRTC cannot compile {file_name} for {target}: {first}", log, source)
        ptx = _text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
        lowered = {
            name: check(nvrtc.nvrtcGetLoweredName(program, name.encode()), "nvrtcGetLoweredName").decode()
            for name in names
        }
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return ptx, lowered


def entry_of(ptx_entries: tuple[str, ...], name: str, lowered: dict[str, str]) -> str:
    """Return a kernel's PTX name from its name in the program. Raise ArgumentError if the PTX does not contain it."""
    entry = lowered.get(name, name)
    if entry not in ptx_entries:
        remedy = 'declare the kernel extern "C" or list its name in name_expressions'
        if not ptx_entries:
            raise ArgumentError("module", "a module without kernels", "a module with at least one kernel", remedy)
        raise ArgumentError("name", name, ", ".join(ptx_entries), remedy)
    return entry


def _text(size_of: Any, get: Any, program: Any) -> str:
    buffer = bytearray(int(check(size_of(program), size_of.__name__)))
    check(get(program, buffer), get.__name__)
    return buffer.decode("utf-8", "replace").rstrip("\0")
