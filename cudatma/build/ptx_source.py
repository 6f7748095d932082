"""Function that returns a kernel's PTX for the emulator, from PTX or CUDA text, a file, or a Kernel."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cudatma.build.kernel import TEMPLATE_SUFFIX, default_target, hinting
from cudatma.build.nvrtc import compile_source
from cudatma.build.render import render
from cudatma.errors import ArgumentError, ArgumentTypeError
from cudatma.runtime.compiler_log import Lines, own_lines
from cudatma.runtime.launch import Kernel
from cudatma.target import Target, get_target

_PTX = re.compile(r"^\s*\.version\s+\d", re.MULTILINE)
_CUDA_SUFFIXES, _PTX_SUFFIXES = (".cu", ".cuh", ".j2"), (".ptx",)
#: Maximum file size, larger than any kernel.
MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class PtxSource:
    """PTX text and its properties.

    entry: name of the kernel, or "" if the caller gave none. target: target for which CUDA was compiled, or None if the
    source was PTX. lines: lines of the CUDA source, if there is one.
    """

    ptx: str
    entry: str = ""
    target: Target | None = None
    lines: Lines = field(default_factory=dict)


def ptx_source(
    kernel: str | Path | Kernel,
    *,
    entry: str | None = None,
    target: str | Target | None = None,
    template: bool = False,
    options: Sequence[str] = (),
) -> PtxSource:
    """Return the PTX of a kernel.

    ``kernel`` is PTX text, CUDA C++ text, the path of a .ptx, .cu or .j2 file, or a Kernel. ``entry`` is the kernel's
    name, or an unambiguous part of the name. ``target``, by default default_target(), is the target for which CUDA is
    compiled. ``template`` says whether CUDA text is rendered first, as by cudatma.compile(); a .j2 file is always
    rendered. ``options`` holds further options for NVRTC. Raises ArgumentError for a file that cannot be read,
    ArgumentTypeError, TemplateError, CompileError, and DriverError if NVRTC is missing.
    """
    if isinstance(kernel, Kernel):
        return PtxSource(kernel.ptx, entry or kernel.entry, kernel.target, own_lines(kernel.source))
    if not isinstance(kernel, str | Path):
        raise ArgumentTypeError("kernel", type(kernel).__name__, "PTX or CUDA text, a path, or a cudatma.Kernel")
    text, name = _read(kernel)
    if _PTX.search(text) and not name.endswith(_CUDA_SUFFIXES):
        return PtxSource(text, entry or "")
    chosen = default_target() if target is None else get_target(target)
    is_template = template or name.endswith(TEMPLATE_SUFFIX)
    name = name.removesuffix(TEMPLATE_SUFFIX) or "kernel.cu"
    source = render(text, None, chosen, is_source=True, name=name) if is_template else text
    with hinting(text, chosen, is_template):
        result = compile_source(source, chosen, name=name, options=options)
    return PtxSource(result.ptx, entry or "", chosen, own_lines(source, name))


def _read(kernel: str | Path) -> tuple[str, str]:
    """Return the text and file name of the file at a path, or a text itself with an empty name."""
    if isinstance(kernel, str) and ("\n" in kernel or not kernel.endswith(_CUDA_SUFFIXES + _PTX_SUFFIXES)):
        return kernel, ""
    path = Path(kernel)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ArgumentError("kernel", f"{path}, {path.stat().st_size} bytes", f"at most {MAX_BYTES} bytes")
        # PTX is ASCII; other bytes occur in comments and in the names of files.
        return path.read_text(encoding="utf-8", errors="backslashreplace"), path.name
    except (OSError, ValueError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError("kernel", ascii(str(path)), "a file that can be read", str(error)) from error
