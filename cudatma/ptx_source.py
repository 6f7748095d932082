"""A kernel in whatever form somebody has it, as PTX for the emulator: PTX or CUDA text, a file of either, a Kernel."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cudatma.build import emulated_target
from cudatma.compiler import compile_source
from cudatma.errors import ArgumentError, ArgumentTypeError
from cudatma.launch import Kernel
from cudatma.render import render
from cudatma.target import Target, get_target

_PTX = re.compile(r"^\s*\.version\s+\d", re.MULTILINE)
#: What cudatma's templates are recognised by.
_TEMPLATE = re.compile(r"^[ \t]*//%|/\*%|\$\{", re.MULTILINE)
_STATEMENT = re.compile(r"""^[ \t]*//%[-+]?[ \t]*(?:include[ \t]+["'](?P<file>[^"'\n]+)["'])?""")
_CUDA_SUFFIXES, _PTX_SUFFIXES = (".cu", ".cuh", ".j2"), (".ptx",)
#: More is no kernel that somebody wrote or a compiler made.
MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class PtxSource:
    """PTX and what is known of it. entry: "" where the caller has named none. target: what it was compiled for, None
    for PTX that came as PTX. lines: file name -> the lines of the CUDA source, where there is one.
    """

    ptx: str
    entry: str = ""
    target: Target | None = None
    lines: dict[str, list[str]] = field(default_factory=dict)

    def line(self, place: str) -> str:
        """The text of a hazard's source, "name.cu:12" or "name.cu:12, inlined at name.cu:40": the innermost line of the
        sources at hand; empty where there is none."""
        for inner in place.split(", inlined at "):
            name, _, number = inner.rpartition(":")
            lines = self.lines.get(name, [])
            if number.isdigit() and 0 < int(number) <= len(lines):
                return lines[int(number) - 1].strip()
        return ""


def ptx_source(
    kernel: str | Path | Kernel,
    *,
    entry: str | None = None,
    target: str | Target | None = None,
    options: Sequence[str] = (),
) -> PtxSource:
    """PTX of a kernel.

    kernel: PTX text, CUDA C++ text (cudatma's templates among it), the path of a .ptx, .cu or .j2 file, or a Kernel.
    entry: name of the kernel, or a part of it that only one has. target: what CUDA is compiled for; $CUDATMA_TARGET,
    else sm_90a, unless named. options: more NVRTC options.

    Raises ArgumentError for a file that cannot be read, ArgumentTypeError, CompileError, DriverError (no NVRTC).
    """
    if isinstance(kernel, Kernel):
        lines = {"kernel.cu": kernel.source.splitlines()}
        return PtxSource(kernel.ptx, entry or kernel.entry, kernel.target, lines)
    if not isinstance(kernel, str | Path):
        raise ArgumentTypeError("kernel", type(kernel).__name__, "PTX or CUDA text, a path, or a cudatma.Kernel")
    text, name = _read(kernel)
    if _PTX.search(text) and not name.endswith(_CUDA_SUFFIXES):
        return PtxSource(text, entry or "")
    chosen = emulated_target() if target is None else get_target(target)
    name = name or "kernel.cu"
    source = render(_with_lines(text, name), None, chosen, is_source=True) if _TEMPLATE.search(text) else text
    made = compile_source(source, chosen, name=name, options=options)
    return PtxSource(made.ptx, entry or "", chosen, {name: text.splitlines()})


def _with_lines(text: str, name: str) -> str:
    """A template with #line directives, so that what is rendered keeps the numbers that its lines have in the file."""
    quoted = name.replace("\\", "/").replace('"', "'")
    out = [f'#line 1 "{quoted}"']
    for number, line in enumerate(text.splitlines(), 1):
        statement = _STATEMENT.match(line)
        if statement and statement["file"]:
            out.append(f'#line 1 "{statement["file"]}"')
        out.append(line)
        if statement:
            out.append(f'#line {number + 1} "{quoted}"')
    return "\n".join(out) + "\n"


def _read(kernel: str | Path) -> tuple[str, str]:
    """(text, name of the file) of a path; of a text itself the name is empty."""
    if isinstance(kernel, str) and ("\n" in kernel or not kernel.endswith(_CUDA_SUFFIXES + _PTX_SUFFIXES)):
        return kernel, ""
    path = Path(kernel)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ArgumentError("kernel", f"{path}, {path.stat().st_size} bytes", f"at most {MAX_BYTES} bytes")
        # PTX is ASCII; other bytes stand in comments and in the names of files.
        return path.read_text(encoding="utf-8", errors="backslashreplace"), path.name.removesuffix(".j2")
    except (OSError, ValueError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError("kernel", ascii(str(path)), "a file that can be read", str(error)) from error
