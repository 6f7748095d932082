"""Which version of the kernel a call asks for: its argument, else the environment, else a file."""

from __future__ import annotations

import os
import sys
from functools import lru_cache
from pathlib import Path

from cudatma.build.regular_file import read_regular
from cudatma.errors import ArgumentError
from cudatma.kernels.gemm.versions import VERSIONS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

VARIABLE = "CUDATMA_GEMM_VERSION"
FILE = "cudatma.toml"
ANY = "auto"


def chosen_version(version: object) -> tuple[int | str, str]:
    """(the version, 0 for any; what asks for it).

    version: of the call; ``"auto"`` leaves it to $CUDATMA_GEMM_VERSION, and that to ``version`` in section ``[gemm]``
    of cudatma.toml in the working directory, else in $XDG_CONFIG_HOME/cudatma or ~/.config/cudatma. The file is read
    once a process. Raises ArgumentError.
    """
    if not isinstance(version, str) or version != ANY:
        return _number("version", version), "the call"
    if named := os.environ.get(VARIABLE, ""):
        known = {str(number): number for number in VERSIONS}
        return _number(VARIABLE, known.get(named, named)), f"${VARIABLE}"
    return _of_file()


def _number(field: str, value: object) -> int | str:
    if not isinstance(value, (int, str)) or isinstance(value, bool) or value not in (ANY, *VERSIONS):
        shown = (str(known) if isinstance(known, int) else f'"{known}"' for known in (ANY, *VERSIONS))
        raise ArgumentError(field, repr(value) if isinstance(value, str) else value, ", ".join(shown))
    return 0 if value == ANY else value


@lru_cache(maxsize=1)
def _of_file() -> tuple[int | str, str]:
    base = os.environ.get("XDG_CONFIG_HOME", "")
    config = Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~/.config"))
    for path in (Path(FILE), config / "cudatma" / FILE):
        try:
            content = tomllib.loads(read_regular(path).decode())
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            continue
        except (OSError, ValueError, RecursionError) as error:  # no TOML is a ValueError, and so is no UTF-8
            raise ArgumentError(str(path.absolute()), "an unreadable file", "TOML", str(error)) from error
        section = content.get("gemm", {})
        if not isinstance(section, dict):
            raise ArgumentError(f"{path.absolute()}: gemm", section, "a section, [gemm]")
        return _number(f"{path.absolute()}: gemm.version", section.get("version", ANY)), str(path.absolute())
    return 0, ""
