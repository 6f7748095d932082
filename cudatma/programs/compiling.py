"""Compile the CUDA C++ source of a program to PTX with the options of the program."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from cudatma.build.headers import cuda_headers
from cudatma.build.nvrtc import nvrtc_version, require_nvrtc_for
from cudatma.errors import ArgumentError, CompileError, check
from cudatma.target import get_target

#: Options with these beginnings name an architecture or the kind of output.
_REPLACED = ("-arch", "--gpu-architecture", "-dlto", "--dlink-time-opt", "-rdc", "--relocatable-device-code")
_MAX_PROGRAMS = 128
_ANONYMOUS = "kernel.cu"


@lru_cache(maxsize=_MAX_PROGRAMS)
def compile_to_ptx(
    source: str, target: str, options: tuple[str, ...] = (), names: tuple[str, ...] = (), file_name: str = _ANONYMOUS
) -> tuple[str, dict[str, str]]:
    """Compile CUDA C++ and return the PTX, and a dict of C++ name expressions to names in the PTX.

    Replace options for the architecture and the kind of output. The PTX contains line information in which the source
    is called ``file_name``. Raise CompileError with the compiler's messages.
    """
    from cuda.bindings import nvrtc

    version = nvrtc_version()
    require_nvrtc_for(get_target(target), version)
    flags = [f"--gpu-architecture={target}", "--generate-line-info"]
    flags += [option for option in options if not option.startswith(_REPLACED)]
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
    """Return the PTX name of a kernel from its name in the program, or raise ArgumentError."""
    entry = lowered.get(name, name)
    if entry not in ptx_entries:
        remedy = 'declare the kernel extern "C" or list its name in name_expressions'
        raise ArgumentError(
            "name", name, ", ".join(ptx_entries) or "the name of a kernel (the module contains no kernel)", remedy
        )
    return entry


def _text(size_of: Any, get: Any, program: Any) -> str:
    buffer = bytearray(int(check(size_of(program), size_of.__name__)))
    check(get(program, buffer), get.__name__)
    return buffer.decode("utf-8", "replace").rstrip("\0")
