"""A named kernel whose mutants are tested."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ptx_of import ptx_alone

from cudatma.build.render import render
from cudatma.mutants.mutant import Call
from cudatma.mutants.trial import Trial
from cudatma.target import get_target


@dataclass(frozen=True, slots=True)
class Subject:
    """A template with a config, and a launch in which every synchronization of the kernel is needed.

    ``name`` has the form ``kernel/variant``. ``make`` returns a Call with new arrays.
    """

    name: str
    template: str
    config: object
    make: Callable[[], Call]
    target: str = "sm_90a"

    @property
    def kernel(self) -> str:
        """The part of the name before the slash."""
        return self.name.partition("/")[0]

    def ptx(self) -> str:
        """The PTX of the template. Raises CompileError, or DriverError without NVRTC."""
        target = get_target(self.target)
        return ptx_alone(render(self.template, self.config, target), target)

    def trial(self) -> Trial:
        """Return the subject's mutants, ready to run."""
        return Trial(self.ptx(), self.make)
