"""Compile one CUDA C++ source with NVRTC to PTX, cubin and log, or with nvcc if the source has host code.

The text, the options and the included files determine the result. The architecture is always real, never virtual, so
NVRTC assembles the cubin itself, and a driver older than NVRTC does not need to compile PTX. Source: NVRTC
documentation, "Supported Compile Options".
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from cudatma.build.headers import missing_header_remedy
from cudatma.build.includes import STANDARD_FLAG, Includes, includes_of, option_values
from cudatma.build.nvcc import compile_with_nvcc, host_line, is_host_header
from cudatma.errors import INSTALL_CUDA, ArgumentError, ArgumentTypeError, CompileError, DriverError, TargetError, check
from cudatma.runtime.compiler_log import excerpt, log_warnings, shortened
from cudatma.target import Target

#: Maps PTX ISA versions to the first CUDA release whose NVRTC generates them. [PTX ISA, "Release Notes"]
_CUDA_OF_PTX_ISA: dict[tuple[int, int], tuple[int, int]] = {
    (7, 8): (11, 8),
    (8, 0): (12, 0),
    (8, 6): (12, 7),
    (8, 7): (12, 8),
    (8, 8): (12, 9),
    (9, 0): (13, 0),
}
#: Flags of every compilation. Line information relates PTX and SASS to the source and does not change the code. -v adds
#: registers, spills and barriers of each kernel to the log. Diagnostic 177, "declared but never referenced", is off,
#: because the constants of a generated kernel document the kernel even if it does not use all of them. The option
#: --diag-warn=177 enables this diagnostic.
_FIXED_FLAGS = ("--generate-line-info", "--ptxas-options=-v", "--diag-suppress=177")
#: Headers such as cuda.h declare host functions, which NVRTC rejects without this option.
_HEADER_FLAG = "--device-as-default-execution-space"
#: Options that are not allowed, because they choose another target or replace the cubin with another kind of output.
_REFUSED_OPTIONS = (
    *("-arch", "--gpu-architecture", "--pch", "-pch"),
    *("-dlto", "--dlink-time-opt", "-rdc=true", "--relocatable-device-code=true", "-dc", "--device-c"),
    *("--create-pch", "-create-pch", "--use-pch", "-use-pch", "-optix-ir", "--optix-ir", "-time", "--time"),
)
#: Folders of NVRTC in NVIDIA's wheels of CUDA 13 and 12, below site-packages.
_WHEEL_FOLDERS = ("nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib")
_MISSING_HEADER = re.compile(
    r'^(?P<file>.*?)\((?P<line>\d+)\): .*(?:cannot|could not) open source file "(?P<name>[^"]*)"', re.MULTILINE
)
#: NVRTC's messages about host code.
_HOST_CODE = re.compile(r"^(?P<file>.*?)\((?P<line>\d+)\): .*not allowed in JIT mode", re.MULTILINE)
_PLACE = re.compile(r"^/(?P<path>[^\n(]+)(?=\(\d+\): )", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Compiled:
    """Result of compiling a source.

    Attributes
    ----------
    ptx : str
        PTX text.
    cubin : bytes
        ELF image for one architecture.
    log : str
        Messages from the compilers, including the resource usage that ptxas reports.
    nvrtc_version : tuple of int
        Version (major, minor) of NVRTC.
    seconds : float
        Duration of the compilation in seconds.
    """

    ptx: str
    cubin: bytes
    log: str
    nvrtc_version: tuple[int, int]
    seconds: float

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings from the log, as compiler_log.log_warnings() returns them."""
        return log_warnings(self.log)


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        _no_nvrtc(error)
    return nvrtc


def _no_nvrtc(error: Exception) -> NoReturn:
    detail = f"NVRTC is not installed ({error}). {INSTALL_CUDA}"
    raise DriverError("nvrtcVersion", None, detail) from error


def nvrtc_version() -> tuple[int, int]:
    """Return the version (major, minor) of the NVRTC that compile_source() uses.

    The first call loads the library but compiles nothing. Raises DriverError if NVRTC is missing.
    """
    nvrtc = _nvrtc()
    try:
        major, minor = check(nvrtc.nvrtcVersion(), "nvrtcVersion")
    except (RuntimeError, ImportError) as error:
        if isinstance(error, DriverError):
            raise
        # cuda.bindings raises a RuntimeError or ImportError if it does not find the library.
        _no_nvrtc(error)
    return int(major), int(minor)


def nvrtc_fingerprint() -> tuple[tuple[str, int, int], ...]:
    """Return path, size in bytes and modification time in ns of NVRTC's wheels and of cuda.bindings on ``sys.path``.

    While these values stay the same, so does the result of nvrtc_version(), which is slower because it loads the
    library. The result is empty if NVRTC does not come from a wheel.
    """
    libraries: list[Path] = []
    bindings: list[Path] = []
    for place in map(Path, filter(None, sys.path)):
        for folder in _WHEEL_FOLDERS:
            libraries.extend(sorted((place / folder).glob("libnvrtc.so.*")))
        bindings.extend(path for path in [place / "cuda" / "bindings" / "_version.py"] if path.is_file())
    if not libraries or not bindings:
        return ()
    return tuple((str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in (*libraries, *bindings))


def source_options(
    options: Sequence[str] = (),
    include_dirs: Sequence[str | os.PathLike[str]] = (),
    defines: Mapping[str, object] | Sequence[str] = (),
) -> tuple[str, ...]:
    """Return the compiler's options for include folders and macros, followed by ``options``.

    ``defines`` is a mapping from names to values, or a sequence of "NAME" and "NAME=VALUE". Raises ArgumentTypeError if
    an argument has another type, and ArgumentError if a folder does not exist.
    """
    if isinstance(include_dirs, str | os.PathLike) or not all(isinstance(at, str | os.PathLike) for at in include_dirs):
        raise ArgumentTypeError("include_dirs", include_dirs, "a sequence of paths")
    if missing := [folder for folder in include_dirs if not os.path.isdir(folder)]:
        raise ArgumentError("include_dirs", os.fspath(missing[0]), "a sequence of existing folders")
    if isinstance(defines, Mapping):
        defines = [f"{name}={int(value) if isinstance(value, bool) else value}" for name, value in defines.items()]
    if isinstance(defines, str) or not all(isinstance(define, str) for define in defines):
        raise ArgumentTypeError("defines", defines, "a mapping or a sequence of 'NAME=VALUE'")
    _check_options(options)
    folders = (f"--include-path={os.fspath(folder)}" for folder in include_dirs)
    return (*folders, *(f"--define-macro={define}" for define in defines), *options)


def _check_options(options: Sequence[str]) -> None:
    if not isinstance(options, Sequence) or isinstance(options, str) or not all(isinstance(o, str) for o in options):
        raise ArgumentTypeError("options", options, "a sequence of strings")
    for index, option in enumerate(options):
        _require_utf8(f"options[{index}]", option)
        if option.split("=")[0] in _REFUSED_OPTIONS or option in _REFUSED_OPTIONS:
            raise ArgumentError(
                f"options[{index}]",
                option,
                "an option that changes neither the target nor the output",
                "select the target with the argument `target`",
            )


def compile_flags(target: Target, options: Sequence[str] = (), includes: Includes | None = None) -> tuple[str, ...]:
    """Return the NVRTC options for a compilation, which are part of the cache key.

    Raises ArgumentTypeError if the caller's options are not strings, and ArgumentError if an option changes the
    architecture or the kind of output.
    """
    _check_options(options)
    standard = () if option_values(options, "-std", "--std") else (STANDARD_FLAG,)
    headers = (_HEADER_FLAG, *(f"--include-path={folder}" for folder in includes.folders)) if includes else ()
    return (f"--gpu-architecture={target.name}", *standard, *_FIXED_FLAGS, *options, *headers)


def _require_utf8(field: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        got = f"the unpaired surrogate {text[error.start]!r} at position {error.start}"
        raise ArgumentError(
            field, got, "text that can be encoded as UTF-8", "read the file with encoding='utf-8'"
        ) from None


def require_nvrtc_for(target: Target, version: tuple[int, int] | None = None) -> None:
    """Raise TargetError unless this NVRTC compiles for the target."""
    version = nvrtc_version() if version is None else version
    needed = min((cuda for isa, cuda in _CUDA_OF_PTX_ISA.items() if isa >= target.ptx_isa), default=(13, 0))
    if version < needed:
        raise TargetError(
            "target",
            f"{target.name}, which needs NVRTC {needed[0]}.{needed[1]} or newer",
            f"a target that NVRTC {version[0]}.{version[1]} supports",
            f"pip install 'nvidia-cuda-nvrtc{'-cu12' if needed[0] == 12 else ''}>={needed[0]}.{needed[1]}'",
        )


def compile_source(
    source: str,
    target: Target,
    *,
    name: str = "kernel.cu",
    options: Sequence[str] = (),
    keep: Callable[[Mapping[str, bytes]], Path | None] | None = None,
    folder: str = "/",
) -> Compiled:
    """Compile one source for one architecture.

    ``source`` is CUDA C++ text, ``name`` is the file name for errors, and ``folder`` is where ``#include "..."``
    searches first. nvcc compiles sources with host code. If the compilation fails, ``keep`` receives the artifacts by
    file name (source, log, and PTX if there is any) and returns the folder that contains them. Raises TargetError if
    this NVRTC does not support the target, CompileError if the compiler rejects the source or nvcc is needed but
    missing, and DriverError if NVRTC is missing.
    """
    if "\0" in source:
        raise ArgumentError("source", "text with a NUL character", "CUDA C++ text without NUL characters")
    _require_utf8("source", source)
    version = nvrtc_version()
    require_nvrtc_for(target, version)
    includes = includes_of(source, options, folder, version[0])
    began, compiler = time.perf_counter(), f"NVRTC {version[0]}.{version[1]}"
    log, ptx, cubin = _run(source, os.path.join(folder, name), compile_flags(target, options, includes), includes)
    log = _own_names(log, folder, name)
    if not cubin and (place := _host_place(source, name, log)):
        compiler = "nvcc"
        log, ptx, cubin = compile_with_nvcc(source, target, options, name, folder, place)
        log = _own_names(log, folder, name)
    if not cubin:
        kept = None
        if keep is not None:
            kept = keep({"kernel.cu": source.encode(), "kernel.ptx": ptx.encode(), "log.txt": log.encode()})
        errors = (line for line in log.splitlines() if "error" in line)
        message = f"{compiler} rejected {name} for {target.name}: {shortened(next(errors, 'no message'))}"
        if missing := _MISSING_HEADER.search(log):
            searched = [*option_values(options, "-I", "--include-path"), *(includes.folders if includes else ())]
            where = (
                f"not found in {', '.join(searched)}" if searched else "not found because there are no include folders"
            )
            message = (
                f"{_place(missing)} includes {missing['name']}, which is {where}; "
                f"{missing_header_remedy(missing['name'], version[0])}\n{message}"
            )
        shown = excerpt(log, source, name, ptx)
        raise CompileError(message, log, source, None if kept is None else str(kept), shown)
    return Compiled(ptx, cubin, log, version, time.perf_counter() - began)


def _host_place(source: str, name: str, log: str) -> str:
    """Return "file:line" of the host code that makes NVRTC fail, or "" if NVRTC fails for another reason."""
    if (line := host_line(source)) is not None:
        return f"{name}:{line}"
    missing = _MISSING_HEADER.search(log)
    match = missing if missing and is_host_header(missing["name"]) else _HOST_CODE.search(log)
    return _place(match) if match else ""


def _place(match: re.Match[str]) -> str:
    """Return "file:line" for the compiler's "file(line)"."""
    return f"{match['file']}:{match['line']}"


def _own_names(log: str, folder: str, name: str) -> str:
    """Remove the folder from the source's name, and the prefix that render.line_name() adds from other names."""
    log = log.replace(os.path.join(folder, name), name)
    return _PLACE.sub(lambda match: match[0] if os.path.isfile(match[0]) else match["path"], log)


def _run(source: str, name: str, flags: Sequence[str], includes: Includes | None) -> tuple[str, str, bytes]:
    """Create, compile and destroy an NVRTC program.

    Return the log, the PTX, and the cubin, which is empty after an error.
    """
    nvrtc = _nvrtc()
    standard = includes.standard if includes else ()
    names, texts = [name.encode() for name, _ in standard], [text.encode() for _, text in standard]
    program = check(
        nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), len(names), texts, names), "nvrtcCreateProgram"
    )
    try:
        code = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])[0]
        log = _fetch(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        # Fetch the PTX even if ptxas rejected it, because the messages of ptxas refer to its lines.
        ptx = _fetch(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
        cubin = _fetch(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program) if int(code) == 0 else b""
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    text = _text(log).strip()
    if int(code) != 0 and "error" not in text:
        text = f"{text}\nerror: {getattr(code, 'name', code)}".strip()
    return text, _text(ptx), cubin


def _fetch(size_of: Any, get: Any, program: Any) -> bytes:
    result = size_of(program)
    if int(result[0]) != 0 or int(result[1]) == 0:
        return b""
    # Use a bytearray, because CPython shares bytes objects of length 1, and NVRTC would overwrite the shared object.
    buffer = bytearray(int(result[1]))
    return bytes(buffer) if int(get(program, buffer)[0]) == 0 else b""


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode("utf-8", "replace")
