"""Errors and warnings of cudatma, and a function that checks the results of CUDA driver and NVRTC calls.

An error message states the field, the value received, the allowed values and the remedy. Each class also derives from
ValueError, TypeError or RuntimeError, so that code that does not import cudatma can catch the error.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

_Error = TypeVar("_Error", bound="FieldError")

#: Number of log lines that a CompileError shows if the log does not mention a source line.
_LOG_LINES = 12
_LONGEST_NAME = 80
_LONG_INT = 10**40
#: Maximum length, in characters, of a text that an error message shows in full.
_LONG_TEXT = 200
#: Maximum number of allowed names that an error lists if it suggests one of them.
_LONG_LIST = 12


def counted(count: int, noun: str) -> str:
    """Return a count followed by its noun in the singular or plural, such as ``"1 block"`` or ``"2 blocks"``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def alternatives(names: Iterable[object]) -> str:
    """Return names joined by commas and "or", such as ``"a"``, ``"a or b"`` or ``"a, b or c"``."""
    *others, last = map(str, names)
    return f"{', '.join(others)} or {last}" if others else last


def quoted(names: Iterable[object]) -> str:
    """Return quoted names joined by commas and "or", such as ``'"a", "b" or "c"'``."""
    return alternatives(f'"{name}"' for name in names)


def whole_number(minimum: int) -> str:
    """Return a phrase such as ``"a nonnegative integer"`` for the integers that are not less than a minimum."""
    return {0: "a nonnegative integer", 1: "a positive integer"}.get(minimum, f"an integer of at least {minimum}")


def reason_of(error: BaseException) -> str:
    """Return the cause of an exception in one line, without the path that an OSError appends."""
    text = str(getattr(error, "strerror", None) or error) or type(error).__name__
    return text.strip().splitlines()[0]


def duration(seconds: float) -> str:
    """Return a time in a suitable unit, such as ``"4.76 us"``, ``"221 ms"``, ``"43.1 s"`` or ``"2 min 5 s"``."""
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
    """Return the known name that ``got`` probably misspells, or "" if there is none.

    Names with different numbers are not similar. For example, sm_80 is not a misspelling of sm_90.
    """
    digits = re.sub(r"\D", "", got)
    candidates = [name for name in known if " " not in name and re.sub(r"\D", "", name) == digits]
    close = difflib.get_close_matches(got, candidates, 3) if candidates and len(got) < _LONGEST_NAME else []
    longer = [name for name in close if name.startswith(got)]
    names = [*longer, *close]
    return names[0] if names and names[0] != got else ""


def shown(value: object) -> str:
    """Return ``repr(value)``, or the number of bits of an int that is too long to read."""
    if isinstance(value, int) and abs(value) >= _LONG_INT:
        return f"an int of {value.bit_length()} bits"
    return repr(value)


def _given(got: object) -> str:
    """Return a value as printable text for the first line of an error message.

    The text has no quotes and is truncated if it is long.
    """
    text = shown(got) if not isinstance(got, str) else got if got.isprintable() else repr(got)
    return text if len(text) <= _LONG_TEXT else f"{text[:_LONG_TEXT]}... ({len(text)} characters)"


def _complement(allowed: str, meant: str) -> str:
    """Return the allowed values as the end of a sentence that begins with "must be".

    Names in a long list are counted instead of listed if ``meant``, the suggested name, is not "".
    """
    names = allowed.split(", ")
    if len(names) > 1 and all(re.fullmatch(r"[^\s()]+", name) for name in names):
        if meant and len(names) > _LONG_LIST:
            return f"one of {len(names)} names"
        return " or ".join(names) if len(names) == 2 else f"one of {allowed}"
    return f"from {allowed}" if re.match(r"-?\d\S* to ", allowed) else allowed


#: Maps each CUDA release to the packages with the driver bindings, NVRTC and CuPy. The extras in pyproject.toml list
#: the same packages.
CUDA_PACKAGES = {
    12: "'cuda-python>=12.9,<13' 'nvidia-cuda-nvrtc-cu12>=12.9,<13' 'cupy-cuda12x>=13.6'",
    13: "'cuda-python>=13.0,<14' 'nvidia-cuda-nvrtc>=13.0,<14' 'cupy-cuda13x>=14.0'",
}
INSTALL_CUDA = f"pip install {CUDA_PACKAGES[13]}; if the driver supports only CUDA 12, pip install {CUDA_PACKAGES[12]}"


class CudaTmaError(Exception):
    """Base class of all errors that cudatma raises."""


class BackendWarning(RuntimeWarning):
    """A function computes on the CPU because this machine has no usable GPU."""


class TuneFileWarning(RuntimeWarning):
    """A file of tuned configurations is ignored, entirely or in part, for the stated reason."""


class FieldError(CudaTmaError):
    """Base class of the errors that report an invalid value.

    Parameters
    ----------
    field : str
        Name of the argument or field, dotted and indexed: ``"box[1]"``.
    got : object
        Value received, or a text that begins with "no " if there is no value. The message omits ``...``.
    allowed : str
        Allowed values, as the end of a sentence that begins with "must be": ``"a multiple of 16 bytes"``.
        A list of names, such as ``"float16, bfloat16"``, is also accepted.
    remedy : str, default: ""
        Imperative clause that states what the caller can do.

    Notes
    -----
    The parameters are also attributes. The message is ``"{field} must be {allowed}, got {got}; {remedy}"``.
    """

    def __init__(self, field: str, got: object, allowed: str, remedy: str = "") -> None:
        self.field, self.got, self.allowed, self.remedy = field, got, allowed, remedy
        is_typed = isinstance(got, str) and not field.endswith(".dtype") and not got.startswith(("torch.", "no "))
        # Suggest a correction only for a name that the user has typed.
        meant = similar(str(got), re.split(", | or ", allowed.replace('"', ""))) if is_typed else ""
        hint = f" (did you mean {meant}?)" if meant else ""
        verb = "found" if isinstance(got, str) and got.startswith("no ") else "got"
        received = "" if got is ... else f", {verb} {_given(got)}{hint}"
        text = f"{field} must be {_complement(allowed, meant)}{received}"
        super().__init__(f"{text}; {remedy}" if remedy else text)

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.field, self.got, self.allowed, self.remedy))

    def renamed(self: _Error, names: Mapping[str, str]) -> _Error:
        """Return this error with the field name from the caller's signature.

        Parameters
        ----------
        names : mapping of str to str
            Name in the caller's signature for each field. Fields that are not keys keep their names.

        Returns
        -------
        FieldError
            Error of the same class.
        """
        return type(self)(names.get(self.field, self.field), self.got, self.allowed, self.remedy)


class ArgumentError(FieldError, ValueError):
    """An argument has a wrong shape, pitch, alignment, value or device, or overlaps another argument."""


class ArgumentTypeError(FieldError, TypeError):
    """An argument has a wrong type or dtype."""


class DescriptorError(FieldError, ValueError):
    """The driver or the hardware does not accept a tensor map, or an access through it."""


class TargetError(FieldError, ValueError):
    """An architecture is unknown or lacks a required feature."""


class QuantizationError(FieldError, ValueError):
    """Weights, scales or zero points cannot be quantized, packed or imported."""


class WeightFileError(FieldError, ValueError):
    """A weight file is corrupt or truncated, has an unknown version, or lacks a tensor."""


class RecordingError(FieldError, ValueError):
    """A recording of launches is damaged, incomplete, or has an unknown version."""


class TemplateError(CudaTmaError, ValueError):
    """A template cannot be rendered because of an unknown name, an unprintable value or a missing file."""


class CompileError(CudaTmaError, RuntimeError):
    """NVRTC cannot compile the source. The message shows the first error with the lines around it.

    The parameters are also attributes.

    Parameters
    ----------
    message : str
        First line of the error.
    log : str, default: ""
        Complete compiler log.
    source : str, default: ""
        Complete CUDA source.
    folder : str, optional
        Folder with the artifacts, or None if nothing was kept.
    excerpt : str, default: ""
        Excerpt from the log and the source for the message. If it is empty, the message shows the first lines of the
        log.
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
    """A launch is not possible on this device, for example because of its shared memory, cluster or arguments."""


class DriverError(CudaTmaError, RuntimeError):
    """A call to the CUDA driver or NVRTC failed, or there is no driver.

    The parameters are also attributes.

    Parameters
    ----------
    call : str
        Name of the function.
    code : int or None
        Result code of the function, or None if there is no driver.
    detail : str
        Name of the result code, or a description of the missing component.
    remedy : str, default: ""
        Imperative clause that states what the caller can do.
    """

    def __init__(self, call: str, code: int | None, detail: str, remedy: str = "") -> None:
        self.call, self.code, self.detail, self.remedy = call, code, detail, remedy
        super().__init__(f"{call} failed: {detail}{f'; {remedy}' if remedy else ''}")

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.call, self.code, self.detail, self.remedy))


class CacheError(CudaTmaError, RuntimeError):
    """The kernel cache is not private or not writable, or another process holds its lock."""


class HazardError(CudaTmaError, RuntimeError):
    """The emulator found a race, a deadlock or another hazard.

    The arrays contain the results of the last schedule. ``hazards`` and ``report`` are also attributes.

    Parameters
    ----------
    message : str
        Report of the hazards.
    hazards : sequence of Hazard
        Hazards, as in ``Report.hazards``.
    report : Report, optional
        The report of the launch, if the launch ended normally.
    """

    def __init__(self, message: str, hazards: Sequence[Any] = (), report: Any = None) -> None:
        super().__init__(message)
        self.hazards, self.report = tuple(hazards), report


class PipelineHang(CudaTmaError, RuntimeError):  # noqa: N818
    """A kernel compiled with ``debug=True`` waited too long, or attempted an operation that the hardware would trap.

    The message lists the waiting threads and what they wait for. The kernel has completed and the context is usable,
    but the results of the kernel are not valid.

    The parameters are also attributes.

    Parameters
    ----------
    message : str
        Hang report.
    waits : sequence of StuckWait
        Waits that did not end. The first wait timed out or was rejected.
    kernel : str, default: ""
        Name of the kernel.
    """

    def __init__(self, message: str, waits: Sequence[Any] = (), kernel: str = "") -> None:
        self.message, self.waits, self.kernel = message, tuple(waits), kernel
        super().__init__(message)

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.message, self.waits, self.kernel))


class PeerTimeout(CudaTmaError, RuntimeError):  # noqa: N818
    """A rank of a process group did not send its part of an all-reduce in time.

    The rank has exited, or it is still busy. All later results are NaN, and the group needs a new AllReduce. A rank
    that gives up stops sending, so ``rank`` may itself have waited for another rank.

    The parameters are also attributes.

    Parameters
    ----------
    rank : int
        Rank that did not send.
    launch : int
        Sequence number of the all-reduce.
    seconds : float
        Time waited.
    """

    def __init__(self, rank: int, launch: int, seconds: float) -> None:
        self.rank, self.launch, self.seconds = rank, launch, seconds
        text = f"rank {rank} did not send its part of all-reduce number {launch} within {seconds:g} s"
        super().__init__(f"{text}; increase timeout_s if the rank is still running; all later results are NaNs")

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.rank, self.launch, self.seconds))


def no_driver(call: str, error: Exception) -> NoReturn:
    """Raise a DriverError in place of the exception that cuda.bindings raises for a missing library."""
    remedy = "install NVIDIA's driver, or compute on the CPU by passing NumPy arrays and backend='emulator'"
    raise DriverError(call, None, f"no CUDA driver on this machine ({error})", remedy) from error


def check(result: tuple[Any, ...], call: str) -> Any:
    """Unpack a cuda.bindings result ``(code, value...)`` into None, one value or a tuple.

    Raises a DriverError with the name ``call`` if the code is not 0.
    """
    code = result[0]
    if int(code) != 0:
        name = getattr(code, "name", str(code))
        raise DriverError(call, int(code), name)
    values = result[1:]
    if not values:
        return None
    return values[0] if len(values) == 1 else values
