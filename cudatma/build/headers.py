"""Find CUDA's headers, such as cuda_fp16.h, mma.h, cuda/ptx and cub."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

from cudatma.toolkit import include_folders

#: One header of each part of CUDA, in the order runtime, libcu++, CUB, Thrust and compiler.
_PARTS = ("cuda_runtime_api.h", "cuda/std/version", "cub/version.cuh", "thrust/version.h", "crt/mma.h")
#: Extra in pyproject.toml -> its pip packages, which contain the headers.
HEADER_PACKAGES = {
    "headers": "nvidia-cuda-runtime nvidia-cuda-cccl nvidia-cuda-crt",
    "headers12": "nvidia-cuda-runtime-cu12 nvidia-cuda-cccl-cu12 nvidia-cuda-nvcc-cu12",
}
#: Number of characters at the start of a header that may contain the version.
_HEAD_CHARACTERS = 1 << 16
_VERSION = re.compile(r"#define\s+CUDART_VERSION\s+(\d+)")
#: Names of CUDA's headers in #include directives.
_CUDA_NAME = re.compile(
    r"(cuda|cub|thrust|nv|crt|cooperative_groups)/|cu(da|Complex)\w*\.h|(mma|cooperative_groups)\.h"
)


def cuda_headers(major: int) -> tuple[str, ...]:
    """Return the include folders of CUDA's headers, preferably for this major version of CUDA.

    For each part of CUDA, the result contains the first folder of toolkit.include_folders() that contains the part.
    """
    folders: dict[str, str] = {}
    for is_any_version in (False, True):
        for folder in include_folders(major):
            if len(folders) == len(_PARTS):
                break
            if is_any_version or _major(folder) in (major, None):
                for place, part in itertools.product((folder, folder / "cccl"), _PARTS):
                    if (place / part).is_file():
                        folders.setdefault(part, str(place))
    return tuple(dict.fromkeys(folders[part] for part in _PARTS if part in folders))


def _major(folder: Path) -> int | None:
    """Return the major version of the CUDA runtime headers in a folder, or None if the folder contains none."""
    try:
        with open(folder / "cuda_runtime_api.h", encoding="utf-8", errors="replace") as file:
            match = _VERSION.search(file.read(_HEAD_CHARACTERS))
    except OSError:
        return None
    return int(match[1]) // 1000 if match else None


def missing_header_remedy(name: str, major: int) -> str:
    """Return the remedy for an included file that does not exist in any include folder."""
    folders = cuda_headers(major)
    has_all = all(any(os.path.isfile(f"{folder}/{part}") for folder in folders) for part in _PARTS)
    if _CUDA_NAME.match(name) and not has_all:
        return f"install CUDA's headers: pip install {HEADER_PACKAGES['headers12' if major == 12 else 'headers']}"
    return "pass its folder with -I (include_dirs= in Python)"
