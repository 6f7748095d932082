"""Compilation of one self-contained CUDA C++ source with NVRTC to PTX, cubin and log.

The source includes no file, because render() has inserted the primitives. The text and the options therefore determine
the result. The architecture is always real, never virtual, so NVRTC assembles the cubin itself, and a driver older than
NVRTC does not need to compile PTX. Source: NVRTC documentation, "Supported Compile Options".
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from cudatma.errors import INSTALL_CUDA, ArgumentError, ArgumentTypeError, CompileError, DriverError, TargetError, check
from cudatma.runtime.compiler_log import excerpt, log_warnings
from cudatma.target import Target

#: PTX ISA version -> the first CUDA release whose NVRTC writes it [PTX ISA, "Release Notes"].
_CUDA_OF_PTX_ISA: dict[tuple[int, int], tuple[int, int]] = {
    (7, 8): (11, 8),
    (8, 0): (12, 0),
    (8, 6): (12, 7),
    (8, 7): (12, 8),
    (8, 8): (12, 9),
    (9, 0): (13, 0),
}
#: Line information keeps PTX and SASS readable next to the source and does not change the code; -v puts registers,
#: spills and barriers of each kernel into the log. Diagnostic 177, "declared but never referenced", is off: constants
#: at the top of a generated kernel document it, whether or not this instance uses each. The option --diag-warn=177
#: brings it back.
_FIXED_FLAGS = ("--std=c++17", "--generate-line-info", "--ptxas-options=-v", "--diag-suppress=177")
#: Options that would make the result depend on other files, or replace the cubin by another kind of output.
_REFUSED_OPTIONS = (
    *("-arch", "--gpu-architecture", "-I", "--include-path", "-include", "--pre-include", "--pch", "-pch"),
    *("-dlto", "--dlink-time-opt", "-rdc=true", "--relocatable-device-code=true", "-dc", "--device-c"),
    *("--create-pch", "-create-pch", "--use-pch", "-use-pch", "-optix-ir", "--optix-ir", "-time", "--time"),
)
#: Folders of NVRTC in NVIDIA's wheels of CUDA 13 and 12, below site-packages.
_WHEEL_FOLDERS = ("nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib")
#: NVRTC puts the working directory in front of a relative name and writes it into the PTX; "/" prevents that.
_NAME_PREFIX = "/"
_MISSING_HEADER = re.compile(r'could not open source file "([^"]*)"')
_PREFIXED_PLACE = re.compile(r"^/(?=[^\n(]+\(\d+\): )", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Compiled:
    """Result of compiling a source.

    ptx: PTX text. cubin: ELF image for one architecture. log: messages from the compilers, with the resource usage that
    ptxas reports. nvrtc_version: (major, minor). seconds: wall time of the compilation.
    """

    ptx: str
    cubin: bytes
    log: str
    nvrtc_version: tuple[int, int]
    seconds: float

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings from the log; see compiler_log.log_warnings()."""
        return log_warnings(self.log)


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        _no_nvrtc(error)
    return nvrtc


def _no_nvrtc(error: Exception) -> NoReturn:
    detail = f"no NVRTC in this environment ({error}). {INSTALL_CUDA}"
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
        # cuda.bindings raises its own exception if it does not find the library.
        _no_nvrtc(error)
    return int(major), int(minor)


def nvrtc_fingerprint() -> tuple[tuple[str, int, int], ...]:
    """Return path, size in bytes and modification time in ns of the NVRTC wheels and of cuda.bindings on ``sys.path``.

    While these values stay the same, nvrtc_version() does too. Loading the library would take longer than loading a
    cached kernel. The result is empty if NVRTC does not come from a wheel.
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


def compile_flags(target: Target, options: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the NVRTC options for a compilation, which are part of the cache key.

    Raises ArgumentTypeError unless the caller's options are strings, and ArgumentError for an option that names another
    architecture, reads other files, or changes the kind of output.
    """
    if not isinstance(options, Sequence) or isinstance(options, str) or not all(isinstance(o, str) for o in options):
        raise ArgumentTypeError("options", options, "a sequence of strings")
    for index, option in enumerate(options):
        _require_utf8(f"options[{index}]", option)
        # Covers `-I/path`, `--include-path=/path` and `-I /path`.
        if option.split("=")[0] in _REFUSED_OPTIONS or option in _REFUSED_OPTIONS or option.startswith("-I"):
            remedy = "name the target with target=, and bring code in with //% include"
            raise ArgumentError(
                f"options[{index}]", option, "an option that keeps source and target as they are", remedy
            )
    return (f"--gpu-architecture={target.name}", *_FIXED_FLAGS, *options)


def _require_utf8(field: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        got = f"half of a surrogate pair, {text[error.start]!r}, at position {error.start}"
        raise ArgumentError(field, got, "text that UTF-8 can hold", "read the file with encoding='utf-8'") from None


def require_nvrtc_for(target: Target, version: tuple[int, int] | None = None) -> None:
    """Raise TargetError, which names the required release, unless this NVRTC compiles for the target."""
    version = nvrtc_version() if version is None else version
    needed = min((cuda for isa, cuda in _CUDA_OF_PTX_ISA.items() if isa >= target.ptx_isa), default=(13, 0))
    if version < needed:
        raise TargetError(
            "target",
            f"{target.name} with NVRTC {version[0]}.{version[1]}",
            f"NVRTC {needed[0]}.{needed[1]} or newer for {target.name}",
            f"pip install 'nvidia-cuda-nvrtc{'-cu12' if needed[0] == 12 else ''}>={needed[0]}.{needed[1]}'",
        )


def compile_source(
    source: str,
    target: Target,
    *,
    name: str = "kernel.cu",
    options: Sequence[str] = (),
    keep: Callable[[Mapping[str, bytes]], Path | None] | None = None,
) -> Compiled:
    """Compile one source for one architecture.

    ``source`` is CUDA C++ text without #include, and ``name`` is the file name for errors. If the compilation fails,
    ``keep`` receives the artifacts by file name (source, log, PTX if there is any) and returns the folder that holds
    them. Raises TargetError if this NVRTC does not support the target, CompileError if NVRTC rejects the source, and
    DriverError if NVRTC is missing.
    """
    if "\0" in source:
        raise ArgumentError("source", "a text with a NUL character", "CUDA C++ text")
    _require_utf8("source", source)
    version = nvrtc_version()
    require_nvrtc_for(target, version)
    flags = compile_flags(target, options)
    began = time.perf_counter()
    code, log, ptx, cubin = _run(_nvrtc(), source, _NAME_PREFIX + name, flags)
    # Remove the prefix of the name, and of the names in #line directives (render.line_name).
    log = _PREFIXED_PLACE.sub("", log.replace(_NAME_PREFIX + name, name))
    if int(code) != 0 or not cubin:
        kept = None
        if keep is not None:
            kept = keep({"kernel.cu": source.encode(), "kernel.ptx": ptx.encode(), "log.txt": log.encode()})
        errors = (line for line in log.splitlines() if "error" in line)
        cause = next(errors, getattr(code, "name", str(code)))
        message = f"NVRTC {version[0]}.{version[1]} refused {name} for {target.name}: {cause}"
        if missing := _MISSING_HEADER.search(log):
            message = (
                f"{name} includes {missing[1]}, and cudatma compiles without header folders. Compile the file with "
                f"`nvcc -ptx -lineinfo -arch={target.name}` and emulate the .ptx file; a template includes cudatma's "
                f"primitives with //% include\n{message}"
            )
        shown = excerpt(log, source, name, ptx)
        raise CompileError(message, log, source, None if kept is None else str(kept), shown)
    return Compiled(ptx, cubin, log, version, time.perf_counter() - began)


def _run(nvrtc: Any, source: str, name: str, flags: Sequence[str]) -> tuple[Any, str, str, bytes]:
    """Create, compile and destroy a program. Return result code, log, PTX, and the cubin (empty after an error)."""
    program = check(nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), 0, [], []), "nvrtcCreateProgram")
    try:
        code = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])[0]
        log = _fetch(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        # PTX exists even if ptxas refused it, and ptxas' messages refer to its lines.
        ptx = _fetch(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
        cubin = _fetch(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program) if int(code) == 0 else b""
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return code, _text(log).strip(), _text(ptx), cubin


def _fetch(size_of: Any, get: Any, program: Any) -> bytes:
    result = size_of(program)
    if int(result[0]) != 0 or int(result[1]) == 0:
        return b""
    # Not `b" " * n`: if n is 1, that is CPython's shared one-byte object, which NVRTC would overwrite.
    buffer = bytearray(int(result[1]))
    return bytes(buffer) if int(get(program, buffer)[0]) == 0 else b""


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode("utf-8", "replace")
