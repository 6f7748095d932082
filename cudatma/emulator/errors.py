"""Exceptions of the emulator."""

from __future__ import annotations

from typing import Any

from cudatma.errors import CudaTmaError


class PtxError(CudaTmaError, ValueError):
    """Raised for PTX that is malformed or contains an instruction that the emulator does not support.

    Parameters
    ----------
    message : str
        What is wrong.
    line : int, default 0
        Line of the PTX text, counted from 1, or 0 if unknown.
    source : str, default ""
        Source line from ``.loc``, such as ``"file.cu:12"``.
    text : str, default ""
        The statement.
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
    """Raised when a run cannot continue, for example at a deadlock with hazard checks off."""


class TrapError(EmulatorError):
    """Raised for an instruction or address that stops the kernel on a GPU.

    As on a GPU, the launch is lost.

    Parameters
    ----------
    message : str
        What is wrong.
    error : str, default "ILLEGAL_INSTRUCTION"
        The CUresult that a GPU returns, without the prefix ``CUDA_ERROR_``.
    at : int, default -1
        Index of the instruction in the body of its function, or -1 for the last instruction of the segment.
    """

    def __init__(self, message: str, error: str = "ILLEGAL_INSTRUCTION", at: int = -1) -> None:
        self.error, self.at = error, at
        super().__init__(message)


class StepLimitError(EmulatorError):
    """Raised when a schedule exceeds the step limit: the kernel has an infinite loop, or the limit is too low."""


class ResidencyError(EmulatorError):
    """Raised when running CTAs fill the memory and all wait for CTAs that have not started.

    No GPU can keep that many CTAs co-resident.

    Parameters
    ----------
    live : int
        Number of live CTAs.
    live_bytes, max_bytes : int
        Number of bytes of emulated state that live CTAs occupy, and the maximum.
    """

    def __init__(self, live: int, live_bytes: int, max_bytes: int) -> None:
        self.live, self.live_bytes, self.max_bytes = live, live_bytes, max_bytes
        super().__init__(
            f"grid: {live} live CTAs occupy {live_bytes >> 20} MiB and all wait for CTAs that have not started; "
            f"live CTAs may occupy {max_bytes >> 20} MiB. Wait only for CTAs that are co-resident on a GPU"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.live, self.live_bytes, self.max_bytes))
