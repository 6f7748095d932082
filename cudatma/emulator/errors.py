"""Errors of the emulator alone."""

from __future__ import annotations

from typing import Any

from cudatma.errors import CudaTmaError


class PtxError(CudaTmaError, ValueError):
    """PTX cannot be parsed, or contains an instruction that the emulator does not support.

    Attributes
    ----------
    line : int
        Line of the PTX, from 1; 0 if the error concerns no line.
    source : str
        Place in the source from ``.loc``, such as "file.cu:12", or "".
    text : str
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
    """A run cannot continue: a trap, the step limit, or an address that cannot be resolved."""


class TrapError(EmulatorError):
    """The kernel did what causes a trap on a GPU, such as an illegal instruction or address.

    Attributes
    ----------
    error : str
        Name of the CUresult that a GPU gives, without ``CUDA_ERROR_``.
    at : int
        Index of the instruction in the body of its function; -1 for the last one of its segment.
    """

    def __init__(self, message: str, error: str = "ILLEGAL_INSTRUCTION", at: int = -1) -> None:
        self.error, self.at = error, at
        super().__init__(message)


class StepLimitError(EmulatorError):
    """The kernel ran longer than the step limit: it has an endless loop, or the limit is too low."""


class ResidencyError(EmulatorError):
    """CTAs wait for CTAs that have not started, and no more fit into memory; a GPU would not keep them resident."""

    def __init__(self, live: int, live_bytes: int, most_bytes: int) -> None:
        self.live, self.live_bytes, self.most_bytes = live, live_bytes, most_bytes
        super().__init__(
            f"grid: {live} CTAs are live, take {live_bytes >> 20} MiB, and all wait for CTAs that have not started; "
            f"live CTAs may take {most_bytes >> 20} MiB. Wait only for CTAs that a GPU keeps resident at the same time"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.live, self.live_bytes, self.most_bytes))
