"""Exceptions of the emulator."""

from __future__ import annotations

from typing import Any

from cudatma.errors import CudaTmaError


class PtxError(CudaTmaError, ValueError):
    """PTX is malformed or contains an instruction that the emulator does not support.

    Parameters
    ----------
    message : str
        Description of the error.
    line : int, default: 0
        Line number in the PTX text, starting at 1, or 0 if unknown.
    source : str, default: ""
        Source location from ``.loc``, such as ``"file.cu:12"``.
    text : str, default: ""
        PTX statement.
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
    """The emulator cannot continue, for example because of a deadlock with hazard checks disabled."""


class TrapError(EmulatorError):
    """An instruction or address would stop the kernel on a GPU.

    As on a GPU, the results of the launch are lost.

    Parameters
    ----------
    message : str
        Description of the error.
    error : str, default: "ILLEGAL_INSTRUCTION"
        CUresult on a GPU, without the prefix ``CUDA_ERROR_``.
    at : int, default: -1
        Index of the instruction in the function's body; -1 for the last instruction of the segment.
    """

    def __init__(self, message: str, error: str = "ILLEGAL_INSTRUCTION", at: int = -1) -> None:
        self.error, self.at = error, at
        super().__init__(message)


class StepLimitError(EmulatorError):
    """A schedule exceeds the step limit because the kernel has an infinite loop or the limit is too low."""


class ResidencyError(EmulatorError):
    """The live CTAs fill the host memory while all of them wait for CTAs that have not started.

    On a GPU, these CTAs could not be resident at the same time.

    Parameters
    ----------
    live : int
        Number of live CTAs.
    live_bytes, max_bytes : int
        Host memory of the live CTAs in bytes, and its limit.
    """

    def __init__(self, live: int, live_bytes: int, max_bytes: int) -> None:
        self.live, self.live_bytes, self.max_bytes = live, live_bytes, max_bytes
        super().__init__(
            f"grid: {live} live CTAs occupy {live_bytes >> 20} MiB of host memory (limit {max_bytes >> 20} MiB) and "
            "wait for CTAs that have not started; change the kernel to wait only for CTAs that are co-resident on a GPU"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.live, self.live_bytes, self.max_bytes))
