"""What the emulator raises besides the errors of the whole package."""

from __future__ import annotations

from typing import Any

from cudatma.errors import CudaTmaError


class PtxError(CudaTmaError, ValueError):
    """PTX that cannot be parsed or that holds an instruction the emulator does not know.

    Attributes: ``line`` (of the PTX text, from 1), ``source`` ("file.cu:12" from .loc, or ""), ``text`` (the
    statement).
    """

    def __init__(self, message: str, line: int = 0, source: str = "", text: str = "") -> None:
        self.message, self.line, self.source, self.text = message, line, source, text
        place = f"PTX line {line}" if line else "PTX"
        if source:
            place += f" ({source})"
        super().__init__(f"{place}: {message}" + (f" in `{text}`" if text else ""))

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.message, self.line, self.source, self.text))


class EmulatorError(CudaTmaError, RuntimeError):
    """A run that cannot go on: a trap of the hardware, the step limit, an unresolved address."""


class TrapError(EmulatorError):
    """What the hardware answers with an illegal instruction or address; the launch is lost, as it is there.

    Attributes: ``error``, the name of the CUresult that a card gives, without ``CUDA_ERROR_``.
    """

    def __init__(self, message: str, error: str = "ILLEGAL_INSTRUCTION") -> None:
        self.error = error
        super().__init__(message)


class StepLimitError(EmulatorError):
    """The kernel ran longer than the step limit: an endless loop, or a limit set too low."""
