"""Modules for ``cudatma dump`` and ``cudatma diff``, from files and folders. Sources and templates are compiled."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cudatma.build.kernel import TEMPLATE_SUFFIX, hinting
from cudatma.build.nvrtc import Compiled, compile_source
from cudatma.build.render import render
from cudatma.errors import ArgumentError
from cudatma.review import Image, assembled, read
from cudatma.target import Target

_SOURCE_SUFFIXES = (".cu", ".cuh", TEMPLATE_SUFFIX)


def is_file(argument: str) -> bool:
    """Return whether an argument names a file or folder rather than a kernel of the registry."""
    return "/" in argument or Path(argument).suffix != "" or Path(argument).exists()


def compiled_image(name: str, target: Target, result: Compiled, notes: Sequence[str] = ()) -> Image:
    """Return the module that NVRTC compiled."""
    return Image(
        name,
        target.name,
        ptx=result.ptx,
        cubin=result.cubin,
        log=result.log,
        compiler=f"NVRTC {'.'.join(map(str, result.nvrtc_version))}",
        compile_seconds=result.seconds,
        notes=(*notes, *result.warnings),
    )


def images_of(path: str, targets: Sequence[Target], options: Sequence[str] = ()) -> list[Image]:
    """Return the modules of a file or folder. Sources are compiled for each target, and PTX is assembled."""
    if not path.endswith(_SOURCE_SUFFIXES):
        return [assembled(image) for image in read(path)]
    try:
        text = Path(path).read_text(encoding="utf-8", errors="backslashreplace")
    except (OSError, ValueError) as error:
        raise ArgumentError("file", ascii(path), "a file that can be read", str(error)) from error
    is_template = path.endswith(TEMPLATE_SUFFIX)
    name = Path(path).name.removesuffix(TEMPLATE_SUFFIX)
    images = []
    for target in targets:
        source = render(text, None, target, is_source=True, name=name) if is_template else text
        with hinting(text, target, is_template):
            result = compile_source(source, target, name=name, options=options)
        suffix = f"_{target.name}" if len(targets) > 1 else ""
        images.append(compiled_image(f"{Path(name).stem}{suffix}", target, result))
    return images
