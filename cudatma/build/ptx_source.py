"""Function that returns a kernel's PTX for the emulator from PTX or CUDA text, a file, or a Kernel."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cudatma.build.files import read_source
from cudatma.build.kernel import CUDA_SUFFIXES, TEMPLATE_SUFFIX, default_target, load_ptx, source_order
from cudatma.build.nvrtc import source_options
from cudatma.errors import ArgumentTypeError
from cudatma.runtime.compiler_log import Lines, source_lines
from cudatma.runtime.launch import Kernel
from cudatma.target import Target, get_target

_PTX = re.compile(r"^\s*\.version\s+\d", re.MULTILINE)
_CUDA_SUFFIXES = (*CUDA_SUFFIXES, TEMPLATE_SUFFIX)


@dataclass(frozen=True, slots=True)
class PtxSource:
    """PTX text and its properties.

    Attributes
    ----------
    ptx : str
        PTX text.
    entry : str, default: ""
        Name of the kernel, or "" if the caller gave none.
    target : Target or None, default: None
        Target for which CUDA was compiled, or None if the source was PTX.
    lines : dict, default: {}
        Lines of the CUDA source; empty if the source was PTX.
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
    include_dirs: Sequence[str | os.PathLike[str]] = (),
    defines: Mapping[str, object] | Sequence[str] = (),
) -> PtxSource:
    """Return the PTX of a kernel.

    ``kernel`` is PTX text, CUDA C++ text, the path of a .ptx, .cu or .j2 file, or a Kernel. ``entry`` is the kernel's
    name, or an unambiguous part of the name. CUDA is compiled for ``target``, by default default_target(). If
    ``template`` is true, CUDA text is rendered first, as by cudatma.compile(); a .j2 file is always rendered.
    ``options``, ``include_dirs`` and ``defines`` are as for cudatma.compile(). Raises ArgumentError if a file cannot be
    read, DriverError if NVRTC is missing, and ArgumentTypeError, TemplateError and CompileError as compile() does.
    """
    if isinstance(kernel, Kernel):
        return PtxSource(kernel.ptx, entry or kernel.entry, kernel.target, source_lines(kernel.source, kernel.ptx))
    if not isinstance(kernel, str | Path):
        raise ArgumentTypeError("kernel", type(kernel).__name__, "PTX text, CUDA text, a path or a cudatma.Kernel")
    text = str(kernel)
    is_path = isinstance(kernel, Path) or ("\n" not in text and text.endswith((*_CUDA_SUFFIXES, ".ptx")))
    if not (is_path and text.endswith(_CUDA_SUFFIXES)):
        text = read_source(text, "kernel") if is_path else text
        if _PTX.search(text):
            return PtxSource(text, entry or "")
    chosen = default_target() if target is None else get_target(target)
    options = source_options(options, include_dirs, defines)
    source, ptx = load_ptx(source_order(text, None, chosen, entry, options, is_template=template, field="kernel"))
    return PtxSource(ptx, entry or "", chosen, source_lines(source, ptx))
