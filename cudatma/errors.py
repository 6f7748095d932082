"""Every error that cudatma raises, and the one place where driver and NVRTC results are checked.

An error says which field was wrong, what it got, what is allowed and what to do about it. Each class is also a
ValueError, TypeError or RuntimeError, so that code which knows nothing of cudatma can catch it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

_Error = TypeVar("_Error", bound="FieldError")

#: What a CompileError shows of a log that names no line.
_LOG_LINES = 12
_LONGEST_NAME = 80
_LONG_INT = 10**40
#: Characters of a text that an error shows.
_LONG_TEXT = 200


def counted(count: int, noun: str) -> str:
    """``"1 block"``, ``"2 blocks"``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def duration(seconds: float) -> str:
    """Return a time with the unit that suits it: ``"4.76 us"``, ``"221 ms"``, ``"43.1 s"``, ``"2 min 5 s"``."""
    if not seconds:
        return "0 s"
    if seconds < 0.9995:
        unit, scale = ("ms", 1e3) if seconds >= 0.9995e-3 else ("us", 1e6)
        value = seconds * scale
        return f"{value:.{2 - (value >= 9.995) - (value >= 99.95)}f} {unit}"
    if seconds < 59.95:
        return f"{seconds:.{1 + (seconds < 9.995)}f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def similar(got: str, known: Iterable[str]) -> str:
    """The name that may be meant, or "" if no name is similar. Names with other numbers do not count as similar:
    sm_80 is no typing error for sm_90."""
    digits = re.sub(r"\D", "", got)
    candidates = [name for name in known if " " not in name and re.sub(r"\D", "", name) == digits]
    close = difflib.get_close_matches(got, candidates, 3) if candidates and len(got) < _LONGEST_NAME else []
    longer = [name for name in close if name.startswith(got)]
    found = [*longer, *close]
    return found[0] if found and found[0] != got else ""


def shown(value: object) -> str:
    """``repr(value)``; of an int too long to be read, its size."""
    if isinstance(value, int) and abs(value) >= _LONG_INT:
        return f"an int of {value.bit_length()} bits"
    return repr(value)


def _given(got: object) -> str:
    """A value in the first line of an error: text as it is, unless it would break the line or is too long."""
    text = shown(got) if not isinstance(got, str) else got if got.isprintable() else repr(got)
    return text if len(text) <= _LONG_TEXT else f"{text[:_LONG_TEXT]}... ({len(text)} characters)"


#: By CUDA release: the packages of PyPI that bring the driver bindings, NVRTC and CuPy, as pyproject.toml's extras do.
CUDA_PACKAGES = {
    12: "'cuda-python>=12.9,<13' 'nvidia-cuda-nvrtc-cu12>=12.9,<13' 'cupy-cuda12x>=13.6'",
    13: "'cuda-python>=13.0,<14' 'nvidia-cuda-nvrtc>=13.0,<14' 'cupy-cuda13x>=14.0'",
}
INSTALL_CUDA = f"pip install {CUDA_PACKAGES[13]}; where the driver stops at CUDA 12: {CUDA_PACKAGES[12]}"


class CudaTmaError(Exception):
    """Base of all errors raised by cudatma."""


class BackendWarning(RuntimeWarning):
    """A public function computes on the CPU because this machine has no usable GPU."""


class TuneFileWarning(RuntimeWarning):
    """What a file of tuned configurations holds is not used, in whole or in part; says what and why."""


class FieldError(CudaTmaError):
    """A value that breaks a rule.

    Attributes: ``field`` (dotted and indexed, ``"box[1]"``), ``got``, ``allowed``, ``remedy``.
    """

    def __init__(self, field: str, got: object, allowed: str, remedy: str = "") -> None:
        self.field, self.got, self.allowed, self.remedy = field, got, allowed, remedy
        is_typed = isinstance(got, str) and not field.endswith(".dtype") and not got.startswith(("torch.", "no "))
        meant = similar(str(got), allowed.split(", ")) if is_typed else ""  # else it is no typing error
        text = f"{field}: got {_given(got)}{f' (did you mean {meant}?)' if meant else ''}; allowed: {allowed}"
        super().__init__(f"{text}. {remedy}" if remedy else text)

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.field, self.got, self.allowed, self.remedy))

    def renamed(self: _Error, names: Mapping[str, str]) -> _Error:
        """The same error of the field as its caller knows it: ``names[field]``, where there is one."""
        return type(self)(names.get(self.field, self.field), self.got, self.allowed, self.remedy)


class ArgumentError(FieldError, ValueError):
    """A wrong value in a call: shape, pitch, alignment, range, device, overlap."""


class ArgumentTypeError(FieldError, TypeError):
    """A wrong type or dtype in a call."""


class DescriptorError(FieldError, ValueError):
    """A tensor map that the driver or the hardware would refuse (CUDA driver API, Tensor Map Object Management)."""


class TargetError(FieldError, ValueError):
    """An unknown architecture, or one that lacks a feature which was asked for."""


class QuantizationError(FieldError, ValueError):
    """Weights, scales or zero points that cannot be quantized, packed or imported."""


class WeightFileError(FieldError, ValueError):
    """A weight file that is corrupt, truncated, of an unknown version or lacks a tensor."""


class TemplateError(CudaTmaError, ValueError):
    """A template that cannot be rendered: unknown name, unprintable value, missing file."""


class CompileError(CudaTmaError, RuntimeError):
    """NVRTC refused the source.

    Shows the first error with the lines around it, and the folder of the artifacts. Attributes: ``log`` and ``source``,
    both whole, ``excerpt`` (what is shown of them), ``folder`` (None where nothing was kept).
    """

    def __init__(
        self, message: str, log: str = "", source: str = "", folder: str | None = None, excerpt: str = ""
    ) -> None:
        self.message, self.log, self.source, self.folder = message, log, source, folder
        self.excerpt = excerpt or "\n".join(log.strip().splitlines()[:_LOG_LINES])
        parts = [message, self.excerpt, f"artifacts: {folder}" if folder else ""]
        super().__init__("\n".join(part for part in parts if part))

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.message, self.log, self.source, self.folder, self.excerpt))


class LaunchError(FieldError, RuntimeError):
    """A launch that cannot work on this device: too much shared memory, a wrong cluster, a wrong argument list."""


class DriverError(CudaTmaError, RuntimeError):
    """A CUDA driver or NVRTC call that failed, or a driver that is not there.

    Attributes: ``call`` (the function's name), ``code`` (the result as an int, None where there is no driver),
    ``detail``, ``remedy``.
    """

    def __init__(self, call: str, code: int | None, detail: str, remedy: str = "") -> None:
        self.call, self.code, self.detail, self.remedy = call, code, detail, remedy
        super().__init__(f"{call} failed: {detail}{f'; {remedy}' if remedy else ''}")

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.call, self.code, self.detail, self.remedy))


class CacheError(CudaTmaError, RuntimeError):
    """The artifact cache cannot be used: not private to its user, not writable, or a lock that never comes free."""


class HazardError(CudaTmaError, RuntimeError):
    """The emulator found a race, a deadlock or a wrong byte count.

    Attribute ``hazards``: what a report's ``hazards`` holds. The arrays hold what the last schedule wrote.
    """

    def __init__(self, message: str, hazards: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.hazards = tuple(hazards)


class PipelineHang(CudaTmaError, RuntimeError):  # noqa: N818
    """A kernel that was compiled with ``debug=True`` waited too long, or asked for what the hardware would stop.

    The message has the table of who waits for what. Attributes: ``waits`` (a ``hang.StuckWait`` each, the one that
    expired or was refused first), ``kernel`` (its name). The kernel has ended and the context is usable; what the
    kernel wrote is not valid.
    """

    def __init__(self, message: str, waits: Sequence[Any] = (), kernel: str = "") -> None:
        self.message, self.waits, self.kernel = message, tuple(waits), kernel
        super().__init__(message)

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.message, self.waits, self.kernel))


class PeerTimeout(CudaTmaError, RuntimeError):  # noqa: N818
    """A rank of a process group did not send its part of an all-reduce in time: it ended, or it is still busy.

    Attributes: ``rank`` (the one that did not send), ``launch`` (the number of the all-reduce), ``seconds`` (of
    waiting). The results since then are NaNs, and the group needs a new AllReduce. A rank that gave up sends
    nothing any more: ``rank`` may itself have waited in vain for another one.
    """

    def __init__(self, rank: int, launch: int, seconds: float) -> None:
        self.rank, self.launch, self.seconds = rank, launch, seconds
        text = f"rank {rank} did not send its part of all-reduce number {launch} within {seconds:g} s"
        super().__init__(f"{text}: it has ended, or it needs more time (timeout_s); results since then are NaNs")

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.rank, self.launch, self.seconds))


def no_driver(call: str, error: Exception) -> NoReturn:
    """Turn cuda.bindings' missing-library exception into a DriverError. [cuda.bindings raises instead of returning]"""
    remedy = "install NVIDIA's driver, or compute on the CPU: NumPy arrays and backend='emulator'"
    raise DriverError(call, None, f"no CUDA driver on this machine ({error})", remedy) from error


def check(result: tuple[Any, ...], call: str) -> Any:
    """Unpack a ``cuda.bindings`` result tuple ``(code, value...)``.

    Returns the value (None, one value, or a tuple); raises DriverError that names ``call`` unless the code is 0.
    """
    code = result[0]
    if int(code) != 0:
        name = getattr(code, "name", str(code))
        raise DriverError(call, int(code), name)
    values = result[1:]
    if not values:
        return None
    return values[0] if len(values) == 1 else values
