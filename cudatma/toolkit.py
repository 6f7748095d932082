"""Find the programs and headers of NVIDIA's CUDA toolkit.

The search order is the same for programs and headers: $CUDA_HOME and $CUDA_PATH, NVIDIA's wheels, PATH,
/usr/local/cuda, and other packages that contain copies.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

_SYSTEM_TOOLKIT = "/usr/local/cuda"
#: Other names of a program. Triton's wheel has a newer ptxas for Blackwell.
_OTHER_NAMES = {"ptxas": ("ptxas-blackwell",)}


def find_programs(name: str) -> Iterator[Path]:
    """Yield the paths of a program in order of preference. The last path is in Triton's wheel."""
    folders = [root / "bin" for root in (*_homes(), *_below_sites("nvidia/*"))]
    last = [Path(_SYSTEM_TOOLKIT, "bin"), *_below_sites("triton/backends/nvidia/bin")]
    for each in (name, *_OTHER_NAMES.get(name, ())):
        on_path = [Path(path)] if (path := shutil.which(each)) else []
        paths = [*(folder / each for folder in folders), *on_path, *(folder / each for folder in last)]
        programs = {path.resolve(): path for path in reversed(paths) if os.access(path, os.X_OK)}
        yield from reversed(programs.values())


def find_program(name: str) -> Path | None:
    """Return the first path that find_programs() yields, or None."""
    return next(find_programs(name), None)


def include_folders(major: int) -> list[Path]:
    """Return the folders that may contain CUDA's headers, in order of preference for a major version of CUDA.

    The last folders are those of conda, of CuPy, and of wheels for other versions.
    """
    nvcc = shutil.which("nvcc")
    conda = os.environ.get("CONDA_PREFIX")
    roots = [
        *_homes(),
        *_below_sites("nvidia/cuda_*" if major == 12 else f"nvidia/cu{major}"),
        *([Path(nvcc).resolve().parents[1]] if nvcc else []),
        Path(_SYSTEM_TOOLKIT),
        *(sorted(Path(conda, "targets").glob("*")) if conda else []),
    ]
    cupy, wheels = _below_sites("cupy/_core/include/cupy/_cccl/*"), _below_sites("nvidia/*/include")
    return [*(root / "include" for root in roots), *cupy, *wheels]


def _homes() -> list[Path]:
    """Return the folders that $CUDA_HOME and $CUDA_PATH name."""
    return [Path(home) for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")) if home]


def _below_sites(pattern: str) -> list[Path]:
    """Return the folders that match a pattern below the folders on sys.path."""
    return _matches(tuple(sys.path), pattern)


@lru_cache(maxsize=16)
def _matches(sites: tuple[str, ...], pattern: str) -> list[Path]:
    return [folder for site in dict.fromkeys(sites) if site for folder in sorted(Path(site).glob(pattern))]
