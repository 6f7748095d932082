"""Compile kernels with nvcc if their source also contains host code."""

from __future__ import annotations

import re
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cudatma.build.includes import STANDARD_FLAG, option_values
from cudatma.errors import CompileError
from cudatma.target import Target
from cudatma.toolkit import find_program

#: Matches comments, strings, and a kernel launch or main() as ``host``.
_HOST = re.compile(
    r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|(?P<host><<<|\b(?:int|void|auto)\s+main\s*\()""",
    re.DOTALL,
)
#: Headers of the C++ standard library and of Linux.
_HOST_HEADER = re.compile(
    r"[a-z_]+|(sys|bits|linux|arpa|netinet)/\w+\.h|(unistd|pthread|getopt|signal|errno|fcntl|dlfcn|omp)\.h"
)
#: Options that make nvcc behave like NVRTC, which always allows constexpr host functions in kernels.
_FLAGS = ("-lineinfo", "-Xptxas=-v", "-diag-suppress=177", "--expt-relaxed-constexpr", "--expt-extended-lambda")
_SHOWN_CHARACTERS = 60


def host_line(source: str) -> int | None:
    """Return the number of the first line with a kernel launch or main(), or None if there is neither."""
    start = next((match.start() for match in _HOST.finditer(source) if match["host"]), None)
    return None if start is None else source.count("\n", 0, start) + 1


def is_host_header(name: str) -> bool:
    """Return whether a header belongs to the C++ standard library or to Linux."""
    return _HOST_HEADER.fullmatch(name) is not None


def nvcc_fingerprint() -> tuple[str, int, int] | None:
    """Return nvcc's path, its size in bytes and its modification time in ns, or None if nvcc is missing."""
    path = find_program("nvcc")
    state = path.stat() if path else None
    return (str(path), state.st_size, state.st_mtime_ns) if state else None


def compile_with_nvcc(
    source: str, target: Target, options: Sequence[str], name: str, folder: str, place: str
) -> tuple[str, str, bytes]:
    """Compile the kernels of a source in a folder. Return the log, the PTX, and the cubin (empty after an error).

    If nvcc is missing, raise CompileError with ``place``, the "file:line" of the host code.
    """
    nvcc = find_program("nvcc")
    if nvcc is None:
        file, _, number = place.rpartition(":")
        line = source.splitlines()[int(number) - 1].strip()[:_SHOWN_CHARACTERS] if file == name else ""
        command = shlex.join(["nvcc", "-ptx", "-lineinfo", f"-arch={target.name}", *options, name])
        raise CompileError(
            f"{place}: {f'`{line}` ' if line else ''}is host code, which NVRTC cannot compile, and nvcc is"
            f" not installed; run `{command}` on a machine with the CUDA toolkit and use {Path(name).stem}.ptx",
            source=source,
        )
    with tempfile.TemporaryDirectory(prefix="cudatma-") as scratch:
        path, cubin = Path(scratch, name), Path(scratch, "out.cubin")
        path.write_text(f'#line 1 "/{name}"\n{source}', encoding="utf-8")
        flags = [f"-arch={target.name}", *_FLAGS, *options]
        if not option_values(options, "-std", "--std"):
            flags.append(STANDARD_FLAG)
        if folder != "/":
            flags.append(f"-Xcompiler=-iquote{folder}")
        command_line = [str(nvcc), "-cubin", *flags, "--keep", "--keep-dir", scratch, "-o", str(cubin), str(path)]
        process = subprocess.run(command_line, capture_output=True, text=True, errors="replace")
        log = (process.stderr + process.stdout).replace(str(path), name).replace(f"/{name}:", f"{name}:").strip()
        ptx = path.with_suffix(".ptx")
        text = ptx.read_text(encoding="utf-8", errors="replace") if ptx.is_file() else ""
        return log, text, cubin.read_bytes() if process.returncode == 0 else b""
