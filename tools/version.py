"""Show the versions of cudatma, Python, NVRTC and the libraries that cudatma uses."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # run the subcommand, even if the checkout is not installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from cudatma.cli import main as cudatma_main

    raise SystemExit(cudatma_main(["version", *sys.argv[1:]]))

import json
import platform
from collections.abc import Sequence
from importlib import metadata

from cudatma import __version__
from cudatma.errors import CudaTmaError

from .command_line import Parser

EXAMPLES = """examples:
  cudatma version
  cudatma version --json
"""


def package_version(*names: str) -> str | None:
    """Return the version of the first distribution in ``names`` that is installed, or None."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def nvrtc_version_text() -> str | None:
    """Return NVRTC's version, for example ``"13.0"``, or None if NVRTC cannot be loaded."""
    try:
        from cudatma.build.nvrtc import nvrtc_version

        return ".".join(map(str, nvrtc_version()))
    except (CudaTmaError, ImportError):
        return None


def versions() -> dict[str, str | None]:
    """Return the version of each package, or None if it is not installed. This function does not use a GPU."""
    return {
        "cudatma": __version__,
        "python": platform.python_version(),
        "nvrtc": nvrtc_version_text(),
        "cuda-bindings": package_version("cuda-bindings"),
        "cupy": package_version("cupy-cuda13x", "cupy-cuda12x", "cupy"),
        "numpy": package_version("numpy"),
        "ml_dtypes": package_version("ml_dtypes"),
        "torch": package_version("torch"),
    }


def parser() -> Parser:
    """Return the parser of ``cudatma version``."""
    result = Parser("cudatma version", __doc__, EXAMPLES)
    result.add_argument("--json", action="store_true", help="print JSON")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``cudatma version`` and return the exit status."""
    options = parser().parse_args(argv)
    installed = versions()
    if options.json:
        print(json.dumps(installed, indent=2))
    else:
        for name, version in installed.items():
            print(f"{name:<14} {version or 'not installed'}")
    return 0
