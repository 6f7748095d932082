"""Search for CUDA's headers, such as cuda_fp16.h, mma.h, cuda/ptx and cub."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from cudatma.toolkit import toolkit_homes

#: One header from each part of CUDA: the runtime, libcu++, CUB, Thrust and the compiler.
_PARTS = ("cuda_runtime_api.h", "cuda/std/version", "cub/version.cuh", "thrust/version.h", "crt/mma.h")
#: Include folders of NVIDIA's wheels of CUDA 12, below site-packages.
_WHEELS_OF_12 = ("nvidia/cuda_runtime/include", "nvidia/cuda_nvcc/include", "nvidia/cuda_cccl/include")
_CUPY_FOLDERS = ("libcudacxx", "cub", "thrust")
#: Extra of pyproject.toml -> its pip packages, which contain the headers.
HEADER_PACKAGES = {
    "headers": "nvidia-cuda-runtime nvidia-cuda-cccl nvidia-cuda-crt",
    "headers12": "nvidia-cuda-runtime-cu12 nvidia-cuda-cccl-cu12 nvidia-cuda-nvcc-cu12",
}
#: Number of characters at the start of a header in which the version is searched.
_HEAD_CHARACTERS = 1 << 16
_VERSION = re.compile(r"#define\s+CUDART_VERSION\s+(\d+)")
#: Names of CUDA's headers, as programs include them.
_CUDA_NAME = re.compile(
    r"(cuda|cub|thrust|nv|crt|cooperative_groups)/|cu(da|Complex)\w*\.h|(mma|cooperative_groups)\.h"
)


def cuda_headers(major: int) -> tuple[str, ...]:
    """Return the include folders of CUDA's headers, preferably for this major version of CUDA.

    The function searches $CUDA_HOME, $CUDA_PATH, NVIDIA's wheels, an installed toolkit, the toolkit of the nvcc on
    PATH, and CuPy, and takes each part of CUDA from the first of these places that contains it. The result is empty if
    no place contains any headers.
    """
    found: dict[str, str] = {}
    for is_any_version in (False, True):
        for folder in _candidates(major):
            if len(found) == len(_PARTS):
                break
            if is_any_version or _major(folder) in (major, None):
                for part in _PARTS:
                    holder = next((at for at in (folder, folder / "cccl") if (at / part).is_file()), None)
                    if holder is not None:
                        found.setdefault(part, str(holder))
    return tuple(dict.fromkeys(found[part] for part in _PARTS if part in found))


def _candidates(major: int) -> Iterator[Path]:
    """Yield include folders, the preferred ones first."""
    yield from (home / "include" for home in toolkit_homes())
    for wheel in _WHEELS_OF_12 if major == 12 else (f"nvidia/cu{major}/include",):
        yield from (Path(place) / wheel for place in sys.path if place)
    with suppress(ImportError):
        from cuda.pathfinder import locate_nvidia_header_directory

        for name in ("cudart", "nvcc", "cccl"):
            if (located := locate_nvidia_header_directory(name)) is not None and located.abs_path:
                yield Path(located.abs_path)
    if nvcc := shutil.which("nvcc"):
        yield Path(nvcc).resolve().parents[1] / "include"
    if (cupy := find_spec("cupy")) is not None and cupy.origin:
        yield from (Path(cupy.origin).parent / "_core/include/cupy/_cccl" / name for name in _CUPY_FOLDERS)


def _major(folder: Path) -> int | None:
    """Return the major version of the CUDA runtime headers in a folder, or None if the folder contains none."""
    try:
        with open(folder / "cuda_runtime_api.h", encoding="utf-8", errors="replace") as file:
            match = _VERSION.search(file.read(_HEAD_CHARACTERS))
    except OSError:
        return None
    return int(match[1]) // 1000 if match else None


def missing_header_remedy(name: str, major: int) -> str:
    """Return the remedy for an included file that is in no include folder."""
    folders = cuda_headers(major)
    has_all = all(any(os.path.isfile(f"{folder}/{part}") for folder in folders) for part in _PARTS)
    if _CUDA_NAME.match(name) and not has_all:
        return f"install CUDA's headers: pip install {HEADER_PACKAGES['headers12' if major == 12 else 'headers']}"
    return "pass its folder with -I (include_dirs= in Python)"
