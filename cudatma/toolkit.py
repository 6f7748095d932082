"""Search for NVIDIA's programs: nvcc, ptxas and the disassemblers.

Programs and headers (build/headers.py) have the same order: $CUDA_HOME and $CUDA_PATH, NVIDIA's wheels, PATH, and
other places.
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


def toolkit_homes() -> list[Path]:
    """Return the folders that $CUDA_HOME and $CUDA_PATH name."""
    return [Path(home) for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")) if home]


def find_programs(name: str) -> Iterator[Path]:
    """Yield the paths of a program: $CUDA_HOME, $CUDA_PATH, NVIDIA's wheels, PATH, /usr/local/cuda, Triton's wheel."""
    sites = tuple(sys.path)
    folders = [*(home / "bin" for home in toolkit_homes()), *_wheel_folders(sites, "nvidia/*/bin")]
    last = [Path(_SYSTEM_TOOLKIT, "bin"), *_wheel_folders(sites, "triton/backends/nvidia/bin")]
    for each in (name, *_OTHER_NAMES.get(name, ())):
        on_path = [Path(path)] if (path := shutil.which(each)) else []
        paths = [*(folder / each for folder in folders), *on_path, *(folder / each for folder in last)]
        yield from (path for path in dict.fromkeys(paths) if os.access(path, os.X_OK))


def find_program(name: str) -> Path | None:
    """Return the first path that find_programs() yields, or None."""
    return next(find_programs(name), None)


@lru_cache(maxsize=16)
def _wheel_folders(sites: tuple[str, ...], pattern: str) -> list[Path]:
    return [folder for site in dict.fromkeys(sites) if site for folder in sorted(Path(site).glob(pattern))]
