"""What every file of this folder shares: run a kernel with its mistake, or mended, and show what cudatma says."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cudatma
from cudatma.emulator import Report
from cudatma.errors import CudaTmaError


@dataclass(frozen=True)
class Mistake:
    """A kernel whose text holds ``wrong`` once; with ``right`` in its place it is correct.

    says: the hazard's kind, or the name of the error. run: launches the kernel on the emulator, hazards collected.
    """

    kernel: str
    wrong: str
    right: str
    says: str
    run: Callable[[cudatma.Kernel], Report]

    def try_it(self, mended: bool = False) -> str:
        """Everything that cudatma says: empty if nothing."""
        text = self.kernel.replace(self.wrong, self.right, 1) if mended else self.kernel
        try:
            report = self.run(cudatma.compile(text, target="sm_90a", template=True))
        except CudaTmaError as error:
            return f"{type(error).__name__}: {error}"
        return "" if report.is_clean else str(report)

    def main(self) -> None:
        options = _options()
        said = self.try_it(options.mended)
        print(said or "nothing wrong")
        if said:
            print(f"\nInstead of\n    {self.wrong}\nwrite\n    {self.right or '(nothing)'}")


@dataclass(frozen=True)
class HostMistake:
    """Lines of Python that cudatma refuses, and those that it takes. says: the name of the error."""

    wrong: str
    right: str
    says: str

    def try_it(self, mended: bool = False) -> str:
        try:
            exec(self.right if mended else self.wrong, {})
        except CudaTmaError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def main(self) -> None:
        said = self.try_it(_options().mended)
        print(said or "nothing wrong")
        if said:
            print(f"\nInstead of\n{_indented(self.wrong)}\nwrite\n{_indented(self.right)}")


def collect(kernel: cudatma.Kernel, block: int, args: tuple[Any, ...], **options: Any) -> Report:
    """One or more blocks of a kernel on the emulator, under 8 schedules, hazards collected rather than raised."""
    return kernel.emulate(options.pop("grid", 1), block, args, schedules=8, hazards="collect", **options)


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.strip().splitlines())


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Shows what cudatma says of a mistake.")
    parser.add_argument("--mended", action="store_true", help="run it with the mistake mended")
    return parser.parse_args()
