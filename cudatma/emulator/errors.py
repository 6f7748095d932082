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

    Attributes: ``error``, the name of the CUresult that a GPU gives, without ``CUDA_ERROR_``; ``at``, the index of the
    instruction in its function's body, -1 where it is the last of its segment.
    """

    def __init__(self, message: str, error: str = "ILLEGAL_INSTRUCTION", at: int = -1) -> None:
        self.error, self.at = error, at
        super().__init__(message)


class StepLimitError(EmulatorError):
    """The kernel ran longer than the step limit: an endless loop, or a limit set too low."""


class ResidencyError(EmulatorError):
    """More CTAs wait for CTAs that have not started than fit into memory; no GPU keeps so many resident."""

    def __init__(self, live: int, live_bytes: int, most_bytes: int) -> None:
        self.live, self.live_bytes, self.most_bytes = live, live_bytes, most_bytes
        super().__init__(
            f"grid: {live} CTAs are live, take {live_bytes >> 20} MiB, and all wait for CTAs that have not started; "
            f"live CTAs may take {most_bytes >> 20} MiB. Wait only for CTAs that a GPU keeps resident at the same time"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.live, self.live_bytes, self.most_bytes))
