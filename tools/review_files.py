"""Read or compile the modules in files and folders, for ``cudatma dump`` and ``cudatma diff``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cudatma.build.kernel import CUDA_SUFFIXES, TEMPLATE_SUFFIX, hinting, source_order
from cudatma.build.nvrtc import Compiled, compile_source, source_options
from cudatma.review import Image, read_images
from cudatma.target import Target


def is_file(argument: str) -> bool:
    """Return whether an argument names a file or folder rather than a registered kernel."""
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


def images_of(path: str, targets: Sequence[Target], source: Mapping[str, Any]) -> list[Image]:
    """Return the modules of a file or folder. PTX is not assembled.

    Sources are compiled for each target with the options that source_arguments() returns.
    """
    if not path.endswith((*CUDA_SUFFIXES, TEMPLATE_SUFFIX)):
        return list(read_images(path))
    options = source_options(source["options"], source["include_dirs"], source["defines"])
    images = []
    for target in targets:
        order = source_order(path, None, target, None, options, is_template=source["template"], field="file")
        text = order.source()
        with hinting(text, target, not order.is_plain):
            result = compile_source(text, target, name=order.file, options=order.options, folder=order.folder)
        suffix = f"_{target.name}" if len(targets) > 1 else ""
        images.append(compiled_image(f"{Path(order.file).stem}{suffix}", target, result))
    return images
