"""A kernel launch of a program, independent of the library that launched the kernel."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from dataclasses import fields as dataclass_fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from cudatma.emulator import EmulatedModule, Hazard, Report, load
from cudatma.errors import HazardError
from cudatma.mutants import Call, Trial
from cudatma.programs.patches import LIBRARIES

Dim = tuple[int, int, int]

#: Matches a directive such as `.file 1 "path"`.
_FILE = re.compile(r'^\s*\.file\s+\d+\s+"((?:[^"\\]|\\.)*)"', re.MULTILINE)
#: Maximum number of parsed modules in the cache.
_MAX_MODULES = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LaunchFields:
    """Fields that program launches and recorded launches share."""

    library: str
    entry: str
    grid: Dim
    block: Dim
    cluster: Dim | None = None
    shared_bytes: int = 0
    programmatic: bool = False
    place: str = ""
    registers: int | None = None
    from_compiler: tuple[tuple[str, str], ...] = ()

    def fields(self) -> dict[str, Any]:
        """Return a dict of the fields of `LaunchFields`."""
        return {name: getattr(self, name) for name in LAUNCH_FIELDS}


LAUNCH_FIELDS = tuple(each.name for each in dataclass_fields(LaunchFields))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProgramLaunch(LaunchFields):
    """A kernel launch that the emulator can run.

    Parameters
    ----------
    library : str
        Library that launched the kernel, such as "triton".
    entry : str
        Name of the kernel in the PTX.
    grid, block : tuple of int
        Number of CTAs along each axis of the grid, and number of threads along each axis of a CTA.
    cluster : tuple of int, optional
        Number of CTAs along each axis of a cluster. Default: the cluster size that the kernel declares, or one CTA.
    shared_bytes : int, default 0
        Number of bytes of dynamic shared memory per CTA.
    programmatic : bool, default False
        Whether the launch is a programmatic dependent launch.
    place : str, default ""
        Source line that launches the kernel, such as "file.py:12".
    registers : int, optional
        Number of registers per thread in the cubin.
    from_compiler : tuple of (str, str)
        Kind and opcode of each hazard that the library's compiler causes. The program cannot avoid these hazards, so
        they are reported as warnings.
    ptx : str
        PTX of the module.
    args : tuple
        One value for each kernel parameter, as in `EmulatedModule.launch`.
    arrays : tuple of ndarray
        Arrays that the kernel can access through addresses in its arguments or in memory.
    names : tuple of str
        Names of the elements of `args`, followed by those of `arrays`, for reports.
    sources : tuple of (str, str)
        Path and text of each source file that reports quote. Default: the existing files that the PTX names.
    loaded : EmulatedModule, optional
        Loaded module, whose variables keep their values between launches. Default: a new module for each launch.
    """

    ptx: str = field(repr=False)
    args: tuple[Any, ...] = field(default=(), repr=False)
    arrays: tuple[Any, ...] = field(default=(), repr=False)
    names: tuple[str, ...] = ()
    sources: tuple[tuple[str, str], ...] | None = field(default=None, repr=False)
    loaded: EmulatedModule | None = field(default=None, repr=False)

    @property
    def module(self) -> EmulatedModule:
        """The loaded module, or a new module whose variables have their initial values."""
        return self.loaded or load_module(self.ptx, self.sources)

    def run(self, **options: Any) -> Report:
        """Run the launch on the emulator.

        Parameters
        ----------
        **options
            Options of `EmulatedModule.launch`, such as `schedules`.

        Returns
        -------
        Report
            Hazards and warnings from all schedules.

        Raises
        ------
        HazardError
            If there are hazards and `hazards` is "raise", the default.
        """
        __tracebackhide__ = True
        is_raising = options.get("hazards", "raise") == "raise"
        report = self.module.launch(
            self.entry,
            self.grid,
            self.block,
            self.args,
            cluster=self.cluster,
            shared_bytes=self.shared_bytes,
            programmatic=self.programmatic,
            arrays=self.arrays,
            names=self.names,
            registers=self.registers,
            **options | ({"hazards": "collect"} if is_raising else {}),
        )
        report.warnings += [hazard for hazard in report.hazards if self._is_from_compiler(hazard)]
        report.hazards = [hazard for hazard in report.hazards if not self._is_from_compiler(hazard)]
        if is_raising and report.hazards:
            raise HazardError(str(report), report.hazards, report)
        return report

    def trial(self) -> Trial:
        """Return mutants of the launch, each with one synchronization removed or changed.

        Each mutant starts with the contents that the arrays have when this method is called.

        Returns
        -------
        Trial
            ``trial.outcomes()`` runs the mutants.
        """
        owners = [getattr(value, "owner", value) for value in (*self.args, *self.arrays)]
        saved = [(owner, owner.copy()) for owner in owners if isinstance(owner, np.ndarray)]
        options = (("programmatic", self.programmatic), ("registers", self.registers))

        def make() -> Call:
            for array, values in saved:
                array[...] = values
            return Call(
                self.entry, self.grid, self.block, self.args, self.cluster, self.shared_bytes, self.arrays, options
            )

        return Trial(self.ptx, make)

    def _is_from_compiler(self, hazard: Hazard) -> bool:
        return not hazard.consequences and any(
            hazard.kind == kind and opcode in hazard.instruction for kind, opcode in self.from_compiler
        )


def load_module(ptx: str, sources: tuple[tuple[str, str], ...] | None = None) -> EmulatedModule:
    """Return a module with its own variables. The parsed PTX is cached."""
    return _parsed(ptx, sources).twin()


@lru_cache(maxsize=_MAX_MODULES)
def _parsed(ptx: str, sources: tuple[tuple[str, str], ...] | None) -> EmulatedModule:
    texts = files_of(ptx) if sources is None else sources
    lines = {os.path.basename(path): dict(enumerate(text.splitlines(), 1)) for path, text in texts}
    module = load(ptx, lines=lines)
    paths = {os.path.basename(path): path for path, _ in texts}
    module.sources = replace(module.sources, paths={**module.sources.paths, **paths})
    return module


def files_of(ptx: str, without: str = "\0") -> tuple[tuple[str, str], ...]:
    """Return the path and text of each existing file that the PTX names, except files in the folder ``without``."""
    return read_sources(name for name in dict.fromkeys(_FILE.findall(ptx)) if not name.startswith(without))


def read_sources(paths: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Return the path and text of each file that exists."""
    return tuple(
        (path, Path(path).read_text(encoding="utf-8", errors="replace")) for path in paths if os.path.isfile(path)
    )


def calling_place() -> str:
    """Return the program line that called the library, as "file:line"."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in LIBRARIES and frame.f_code.co_filename != "<string>":  # generated code
            break
        frame = frame.f_back
    path = frame.f_code.co_filename
    relative = os.path.relpath(path) if os.path.isabs(path) else path
    return f"{path if relative.startswith(os.pardir) else relative}:{frame.f_lineno}"
