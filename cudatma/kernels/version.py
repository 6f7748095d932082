"""Select a kernel version by a call's argument, an environment variable or a file, in this order."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cudatma import context
from cudatma.build.files import read_regular
from cudatma.errors import ArgumentError, FieldError, alternatives, quoted, reason_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE = "cudatma.toml"
ANY = "auto"
_CALL = "the call"
#: Sections of the file, one for each family whose kernels have versions.
SECTIONS = ("gemm", "attention")


@dataclass(frozen=True, slots=True)
class Versions:
    """Versions of a family's kernels, by name.

    Attributes
    ----------
    family : str
        Name of the section in cudatma.toml.
    variable : str
        Name of the environment variable.
    """

    family: str
    variable: str
    names: tuple[str, ...]

    def chosen(self, version: object) -> tuple[str, str]:
        """Return the selected version ("" for any) and the source of the selection.

        ``version`` is the argument of the call. ``"auto"`` selects the version in the environment variable if it is
        set, otherwise ``version`` in the family's section of cudatma.toml. cudatma.toml is searched for in the working
        directory, and then in $XDG_CONFIG_HOME/cudatma or ~/.config/cudatma. The file is read once per process. Raises
        ArgumentError for an unknown version.
        """
        if not isinstance(version, str) or version != ANY:
            return self._known("version", version), _CALL
        if named := os.environ.get(self.variable, ""):
            return self._known(self.variable, named), f"${self.variable}"
        path, content = context.in_use.parts.get(_File) or context.runtime().part(_File, _read_file)
        if not path:
            return "", ""
        for name in content:
            if name not in SECTIONS:
                raise ArgumentError(f"{path}: section name", name, alternatives(SECTIONS))
        section = content.get(self.family, {})
        if not isinstance(section, dict):
            raise ArgumentError(f"{path}: {self.family}", section, f"a section [{self.family}]")
        for name in section:
            if name != "version":
                raise ArgumentError(f"{path}: key in [{self.family}]", name, "version")
        return self._known(f"{path}: {self.family}.version", section.get("version", ANY)), path

    def _known(self, field: str, value: object) -> str:
        if not isinstance(value, str) or value not in (ANY, *self.names):
            raise ArgumentError(field, repr(value) if isinstance(value, str) else value, quoted((ANY, *self.names)))
        return "" if value == ANY else value


class naming:  # noqa: N801 (used as a function; a generator-based context manager would take 1 us)
    """Name the environment variable or file that selected the version in errors about the version.

    Errors about a version passed in the call stay unchanged. ``selected_by`` is the source that chosen() returned.
    """

    __slots__ = ("_selected_by",)

    def __init__(self, selected_by: str) -> None:
        self._selected_by = selected_by

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if isinstance(error, FieldError) and error.field == "version" and self._selected_by not in ("", _CALL):
            remedy = "change this setting, or pass the version argument"
            raise type(error)(f"version of {self._selected_by}", error.got, error.allowed, remedy) from error


class _File(NamedTuple):
    """Contents of the file that selects versions, which the Runtime holds.

    ``path`` is "" if there is no file.
    """

    path: str
    content: dict[str, Any]


def _read_file() -> _File:
    base = os.environ.get("XDG_CONFIG_HOME", "")
    config = Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~/.config"))
    for path in (Path(FILE), config / "cudatma" / FILE):
        try:
            return _File(str(path.absolute()), tomllib.loads(read_regular(path).decode()))
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            continue
        except (OSError, ValueError, RecursionError) as error:  # Invalid TOML or UTF-8 raises ValueError.
            got = f"a file that cannot be read ({reason_of(error)})"
            raise ArgumentError(str(path.absolute()), got, "a TOML file", "correct the file") from error
    return _File("", {})
