"""Read compiled modules from PTX, cubins, fatbins, host files with embedded kernels, and folders.

The layout of Triton's cache follows ``triton/compiler/compiler.py`` in Triton 3.9.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cudatma.errors import ArgumentError, TargetError, reason_of
from cudatma.review.cubin import AMD_MACHINE, CUDA_MACHINE, ELF_MAGIC, machine_of, read_cubin
from cudatma.review.nvidia_programs import SASS_PACKAGES, assemble, disassemble, extract

#: Maximum size of a file in bytes.
MAX_BYTES = 1 << 30
#: Oldest architecture that NVIDIA's current programs support.
_OLDEST = 75
_FATBIN_MAGIC = b"\x50\xed\x55\xba"
_ALLOWED = "a .cu, .j2, .ptx, .cubin or .fatbin file, an ELF file with kernels, or a folder of .ptx and .cubin files"
_VERSION = re.compile(r"^\s*\.version\s+\d", re.MULTILINE)
_TARGET = re.compile(r"^\s*\.target\s+(sm_\d+[af]?)", re.MULTILINE)
#: Comments and strings of PTX, in which braces have no meaning.
_TEXT = re.compile(r'//[^\n]*|/\*.*?\*/|"[^"\n]*"', re.DOTALL)
#: Error message for invalid PTX. It does not match the message of a ptxas that is too old for the PTX.
_PTX_ERROR = re.compile(r"line (?P<line>\d+); (?:error|fatal)\s*: (?!Unsupported \.version)(?P<cause>[^;]*)")
#: Options of Triton that a report shows.
_TRITON_OPTIONS = ("num_warps", "num_ctas", "num_stages", "maxnreg", "triton_version")


@dataclass(frozen=True, slots=True)
class Image:
    """A compiled module for one target.

    Parameters
    ----------
    name : str
        Name for reports and files.
    target : str
        Architecture, such as ``"sm_90a"``.
    ptx, cubin : str, bytes
        PTX and machine code, or empty.
    sass : str or None
        Disassembly of the cubin with the encodings of instructions, or None if the cubin was not disassembled.
    log : str
        Log of ptxas with ``-v``, or "".
    compiler : str
        Compiler and its version, or "".
    compile_seconds : float or None
        Duration of the compilation.
    options : mapping of str to object
        Options of the compilation, for example Triton's ``num_warps``.
    dynamic_smem_bytes : int or None
        Dynamic shared memory of a launch, or None if the files do not state it.
    notes : tuple of str
        Compiler warnings, and reasons for missing parts.
    """

    name: str
    target: str
    ptx: str = ""
    cubin: bytes = b""
    sass: str | None = None
    log: str = ""
    compiler: str = ""
    compile_seconds: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    dynamic_smem_bytes: int | None = None
    notes: tuple[str, ...] = ()


def read_images(path: str | Path) -> tuple[Image, ...]:
    """Return the modules in a file or folder.

    Parameters
    ----------
    path : str or Path
        A .ptx, .cubin or .fatbin file, an ELF file with embedded kernels, or a folder: Triton's cache, one of its
        entries, or the output of ``cudatma dump``.

    Returns
    -------
    tuple of Image
        At least one module. PTX is not assembled, and cubins are not disassembled.

    Raises
    ------
    ArgumentError
        If the file is corrupt or has another format, or if the folder contains no kernel.
    TargetError
        If the code is for a GPU that NVIDIA's current programs do not support.
    """
    path = Path(path)
    if path.is_dir():
        return _read_folder(path)
    data = _content(path)
    if data.startswith(ELF_MAGIC):
        if (machine := machine_of(data)) == CUDA_MACHINE:
            return (_of_cubin(path.stem, data, path.name),)
        if machine == AMD_MACHINE:
            raise ArgumentError("file", f"{path.name}, which is an AMD code object", _ALLOWED)
        return _extracted(path)
    if data.startswith(_FATBIN_MAGIC):
        length = int.from_bytes(data[6:8], "little") + int.from_bytes(data[8:16], "little")
        if len(data) < max(16, length):
            raise ArgumentError(
                "file",
                f"{path.name} with {len(data)} bytes",
                f"complete ({length} bytes according to its header)",
            )
        return _extracted(path)
    return (_of_ptx(path.stem, data, path.name),)


def _content(path: Path) -> bytes:
    try:
        if path.exists() and not path.is_file():
            raise ArgumentError("file", ascii(str(path)), "a regular file")
        if (size := path.stat().st_size) > MAX_BYTES:
            raise ArgumentError("file", f"{path.name} with {size} bytes", f"at most {MAX_BYTES} bytes")
        return path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError("file", f"{str(path)!a} ({reason_of(error)})", "a readable file") from error


def _of_cubin(name: str, data: bytes, file: str) -> Image:
    target = read_cubin(data, file).target
    _check_target(target, file)
    return Image(name, target, cubin=data)


def _of_ptx(name: str, data: bytes, file: str) -> Image:
    text = data.rstrip(b"\0").decode("utf-8", "backslashreplace")
    if not _VERSION.search(text):
        raise ArgumentError("file", f"{file}, which has an unknown format", _ALLOWED)
    target = _TARGET.search(text)
    if target is None:
        raise ArgumentError("file", f"{file}, which has no .target directive", "complete PTX")
    code = _TEXT.sub("", text)
    if code.count("{") != code.count("}"):
        raise ArgumentError("file", f"{file}, which is truncated", "complete PTX")
    _check_target(target[1], file)
    return Image(name, target[1], ptx=text)


def _check_target(target: str, file: str) -> None:
    if int(target.removeprefix("sm_").rstrip("af")) < _OLDEST:
        raise TargetError("target", f"{target} in {file}", f"sm_{_OLDEST} or later", "compile the file for a newer GPU")


def _extracted(path: Path) -> tuple[Image, ...]:
    """Return the modules that cuobjdump extracts from a fatbin or from an ELF file for the host."""
    cubins, texts, note = extract(path)
    images = []
    for file, data in cubins.items():
        image = _of_cubin(file.removesuffix(".cubin"), data, file)
        text = texts.pop(f"{image.name}.ptx", None)
        images.append(replace(image, ptx=_of_ptx(image.name, text, file).ptx) if text else image)
    images += [_of_ptx(file.removesuffix(".ptx"), text, file) for file, text in texts.items()]
    if not images:
        why = f" ({note})" if note else ""
        remedy = f"install cuobjdump: pip install {SASS_PACKAGES}" if "not found" in note else ""
        raise ArgumentError("file", f"{path.name}, in which cuobjdump finds no kernel{why}", _ALLOWED, remedy)
    return tuple(images)


def _read_folder(folder: Path) -> tuple[Image, ...]:
    """Return the modules of a folder and its subfolders. Files with the same stem belong to one module."""
    files = [path for pattern in ("*", "*/*") for path in folder.glob(pattern) if path.suffix in (".ptx", ".cubin")]
    images = []
    for stem in sorted({path.with_suffix("") for path in files}):
        cubin, ptx, about = (stem.with_name(f"{stem.name}.{ending}") for ending in ("cubin", "ptx", "json"))
        parts = [_of_cubin(stem.name, _content(cubin), cubin.name)] if cubin in files else []
        parts += [_of_ptx(stem.name, _content(ptx), ptx.name)] if ptx in files else []
        image = replace(parts[0], target=parts[-1].target, ptx=parts[-1].ptx)  # PTX states the complete target
        images.append(_with_metadata(image, about) if about.is_file() else image)
    if not images:
        raise ArgumentError("file", f"{folder}, which contains no .ptx or .cubin file", _ALLOWED)
    return tuple(images)


def _with_metadata(image: Image, path: Path) -> Image:
    """Add the options and the shared memory from Triton's JSON file."""
    try:
        about = json.loads(_content(path))
    except (ValueError, RecursionError) as error:
        raise ArgumentError(
            path.name,
            f"a file that cannot be read ({reason_of(error)})",
            "a JSON file with Triton's metadata",
            "delete the file, or dump the kernel again",
        ) from error
    if not isinstance(about, dict) or not isinstance(about.get("shared"), int):
        return image
    options = {name: about[name] for name in _TRITON_OPTIONS if about.get(name) is not None}
    return replace(image, compiler="Triton", options=options, dynamic_smem_bytes=about["shared"])


def assembled(image: Image) -> Image:
    """Return a module with a cubin, which ptxas assembles from PTX if necessary.

    If no available ptxas supports the target, return the module with a note.

    Parameters
    ----------
    image : Image
        A module.

    Returns
    -------
    Image
        The module with its cubin, log and compiler.

    Raises
    ------
    ArgumentError
        If the PTX contains an error.
    """
    if image.cubin:
        return image
    cubin, output = assemble(image.ptx, image.target)
    if error := _PTX_ERROR.search(output.note):
        got = f"{image.name} with an error in line {error['line']}: {error['cause']}"
        raise ArgumentError("file", got, "valid PTX")
    if output.text is None:
        return replace(image, notes=(*image.notes, f"registers, shared memory and SASS are unknown: {output.note}"))
    warnings = (line.strip() for line in output.log.splitlines() if "warning" in line)
    return replace(image, cubin=cubin, log=output.log, compiler="ptxas", notes=(*image.notes, *warnings))


def disassembled(image: Image) -> Image:
    """Return a module with its SASS, or with a note if no disassembler supports the cubin.

    Parameters
    ----------
    image : Image
        A module.

    Returns
    -------
    Image
        The module with its SASS.
    """
    if not image.cubin or image.sass is not None:
        return image
    output = disassemble(image.cubin)
    notes = image.notes if output.text is not None else (*image.notes, f"no SASS: {output.note}")
    return replace(image, sass=output.text, notes=notes)
