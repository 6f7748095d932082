"""Read and write folders of recorded launches, and run the launches on the emulator.

A folder contains `launches.json` and the files to which it refers. The name of each of these files is the digest of
its contents:

    launches.json
    text/DIGEST.txt      PTX of a module, or a source file that reports quote
    memory/DIGEST.npz    contents of an allocation before or after a launch
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

import ml_dtypes
import numpy as np

from cudatma.emulator import EmulatedModule, Report
from cudatma.emulator.machine.memory import address_of
from cudatma.emulator.ptx.types import Array
from cudatma.errors import RecordingError, reason_of
from cudatma.programs.host_memory import POINTER_BYTES, aligned_bytes
from cudatma.programs.launch import Dim, LaunchFields, ProgramLaunch, load_module

FILE = "launches.json"
_FORMAT, _VERSION = "cudatma-recording", 1
_DIGEST = re.compile(r"[0-9a-f]{40}")
_MAX_PARAMETER_BYTES = 1 << 16
_MAX_SHARED_BYTES, _MAX_MEMORY_BYTES = 1 << 20, 1 << 40
_MAX_LINES = 10
#: Name of the array in an .npz file, and maximum size of its header in bytes.
_MEMBER, _HEADER_BYTES = "data.npy", 4096
_CUSTOM_TYPES = {"bfloat16", "float8_e4m3fn", "float8_e5m2"}
TYPES = _CUSTOM_TYPES | {
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
}


def numpy_type(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype for the name of an element type in a recording."""
    return np.dtype(getattr(ml_dtypes, name) if name in _CUSTOM_TYPES else name)


@dataclass(frozen=True, slots=True)
class Pointer:
    """A pointer at byte ``at`` of a parameter. It points to byte ``offset`` of the allocation with index ``memory``."""

    at: int
    memory: int
    offset: int


@dataclass(frozen=True, slots=True)
class RecordedParameter:
    """The name and the bytes of a kernel parameter, and the pointers that the bytes contain."""

    name: str
    data: bytes
    pointers: tuple[Pointer, ...]


@dataclass(frozen=True, slots=True)
class RecordedMemory:
    """An allocation that a launch can access.

    ``name`` is the name of the first parameter that points to the allocation. ``dtype`` is None if the element type is
    unknown. ``before`` and ``after`` are digests of the contents, or None for scratch memory, which is initially zero
    and contains no results.
    """

    name: str
    size_bytes: int
    dtype: str | None
    before: str | None
    after: str | None


@dataclass(frozen=True, slots=True)
class MemoryComparison:
    """A comparison of an allocation's contents after the emulated and after the recorded launch.

    Parameters
    ----------
    name : str
        Name of the first parameter that points to the allocation.
    dtype : str or None
        Element type, or None if it is unknown and bytes were compared.
    elements, different : int
        Number of elements, and number of elements that differ.
    max_difference : float or None
        Maximum absolute difference, or None if `relative` is None.
    relative : float or None
        ``||difference|| / ||expected||``. None if the element type is unknown, a difference is not finite, or the
        recorded result is zero and the emulator's result is not.
    """

    name: str
    dtype: str | None
    elements: int
    different: int
    max_difference: float | None
    relative: float | None

    @property
    def is_exact(self) -> bool:
        """Whether the results must be equal. True for integers and for bytes of unknown type."""
        return self.dtype is None or numpy_type(self.dtype).kind in "biu"

    def passes(self, tolerance: float) -> bool:
        """Return whether the results are equal within a tolerance.

        Parameters
        ----------
        tolerance : float
            Maximum value of `relative` for floating-point results. Other results must be equal.

        Returns
        -------
        bool
            True if the results are equal within the tolerance.
        """
        if not self.different:
            return True
        return not self.is_exact and self.relative is not None and self.relative <= tolerance

    def __str__(self) -> str:
        kind = f"{self.dtype} elements" if self.dtype else "bytes of unknown type"
        if not self.different:
            return f"{self.name}: {self.elements} {kind}, equal to the recording"
        text = f"{self.name}: {self.different} of {self.elements} {kind} differ"
        if self.max_difference is None or self.relative is None:
            return text
        return f"{text} (max. {self.max_difference:.3g}, relative error {self.relative:.2e})"


@dataclass(frozen=True, slots=True)
class Replay:
    """The outcome of running a recorded launch on the emulator.

    Parameters
    ----------
    launch : ProgramLaunch
        The launch, with the results in its arrays.
    report : Report
        Hazards and warnings.
    comparisons : tuple of MemoryComparison
        One comparison for each allocation that changed on the GPU or on the emulator.
    """

    launch: ProgramLaunch
    report: Report
    comparisons: tuple[MemoryComparison, ...]

    def passes(self, tolerance: float = 0.0) -> bool:
        """Return whether there are no hazards and all results are within a tolerance.

        Parameters
        ----------
        tolerance : float, default 0
            Maximum value of ``||difference|| / ||expected||`` for floating-point results. Other results must be equal.

        Returns
        -------
        bool
            True if the emulated launch reproduces the recorded one.
        """
        return self.report.is_clean and all(comparison.passes(tolerance) for comparison in self.comparisons)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedLaunch(LaunchFields):
    """A recorded launch, which `run` runs on the emulator.

    Parameters
    ----------
    library, entry, grid, block, cluster : see ProgramLaunch
        Library, kernel and shape of the launch.
    shared_bytes, programmatic, place, registers, from_compiler : see ProgramLaunch
        Other properties of the launch.
    folder : Path
        Folder of the recording.
    modules : dict
        Modules that the recording has loaded. Their variables keep their values between launches.
    module : str
        Digest of the PTX.
    parameters : tuple of RecordedParameter
        Parameters of the kernel.
    memory : tuple of RecordedMemory
        Allocations to which the parameters point.
    sources : tuple of (str, str)
        Name and digest of each source file that reports quote.
    """

    folder: Path
    modules: dict[Any, EmulatedModule] = field(repr=False)
    module: str
    parameters: tuple[RecordedParameter, ...]
    memory: tuple[RecordedMemory, ...]
    sources: tuple[tuple[str, str], ...]

    def launch(self) -> ProgramLaunch:
        """Return the launch with new copies of the recorded memory.

        Returns
        -------
        ProgramLaunch
            The launch. Its arrays are copies of the allocations, in the order of `memory`.

        Raises
        ------
        RecordingError
            If a file is missing or damaged.
        """
        arrays = tuple(map(self._initial, self.memory))
        args = []
        for parameter in self.parameters:
            raw = bytearray(parameter.data)
            for pointer in parameter.pointers:
                address = address_of(arrays[pointer.memory]) + pointer.offset
                raw[pointer.at : pointer.at + POINTER_BYTES] = address.to_bytes(POINTER_BYTES, "little")
            args.append(bytes(raw))
        ptx = _read_text(self.folder, self.module)
        sources = tuple((name, _read_text(self.folder, digest)) for name, digest in self.sources)
        key = self.module, self.sources
        if key not in self.modules:
            self.modules[key] = load_module(ptx, sources)
        return ProgramLaunch(
            **self.fields(),
            ptx=ptx,
            args=tuple(args),
            arrays=arrays,
            names=(*(parameter.name for parameter in self.parameters), *(memory.name for memory in self.memory)),
            sources=sources,
            loaded=self.modules[key],
        )

    def run(self, **options: Any) -> Replay:
        """Run the launch on the emulator, and compare the results with the recorded ones.

        Parameters
        ----------
        **options
            Options of `EmulatedModule.launch`, such as `schedules`. `hazards` defaults to "collect".

        Returns
        -------
        Replay
            The report and the comparisons.

        Raises
        ------
        RecordingError
            If a file is missing or damaged.
        """
        launch = self.launch()
        report = launch.run(**{"hazards": "collect"} | options)
        return Replay(launch, report, self.compare(launch.arrays))

    def compare(self, arrays: Sequence[Array]) -> tuple[MemoryComparison, ...]:
        """Compare the arrays of an emulated launch with the recorded results.

        Parameters
        ----------
        arrays : sequence of ndarray
            Arrays of the launch from `launch()`, after it has run.

        Returns
        -------
        tuple of MemoryComparison
            One comparison for each allocation that changed on the GPU or on the emulator.
        """
        comparisons = []
        for memory, array in zip(self.memory, arrays, strict=True):
            if memory.before is None or memory.after is None:
                continue
            expected = _read_memory(self.folder, memory.after, memory.size_bytes)
            is_input = memory.before == memory.after and bool((array == expected).all())
            if not is_input:
                comparisons.append(_compare(memory, array, expected))
        return tuple(comparisons)

    def _initial(self, memory: RecordedMemory) -> Array:
        array = aligned_bytes(memory.size_bytes)
        if memory.before is not None:
            array[:] = _read_memory(self.folder, memory.before, memory.size_bytes)
        return array


class Recording(Sequence[RecordedLaunch]):
    """The recorded launches of a program, in order.

    Parameters
    ----------
    folder : Path
        Folder of the recording.
    launches : sequence of RecordedLaunch
        Recorded launches, in order.
    device : str
        Name of the GPU.
    refused : sequence of (str, str)
        Description of each launch that was not recorded, and the reason.
    other_kernels : mapping of str to int
        Number of launches, by name, of the kernels from libraries that cannot be recorded, such as cuBLAS.
    """

    def __init__(
        self,
        folder: Path,
        launches: Sequence[RecordedLaunch],
        device: str,
        refused: Sequence[tuple[str, str]],
        other_kernels: Mapping[str, int],
    ) -> None:
        self.folder, self._launches, self.device = folder, tuple(launches), device
        self.refused, self.other_kernels = tuple(refused), dict(other_kernels)

    @overload
    def __getitem__(self, index: int) -> RecordedLaunch: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RecordedLaunch]: ...
    def __getitem__(self, index: int | slice) -> RecordedLaunch | Sequence[RecordedLaunch]:
        return self._launches[index]

    def __len__(self) -> int:
        return len(self._launches)

    def __str__(self) -> str:
        lines = [f"launches recorded on {self.device}: {len(self)}"]
        for number, launch in enumerate(self):
            size = sum(memory.size_bytes for memory in launch.memory) / (1 << 20)
            grid = "x".join(map(str, launch.grid))
            lines.append(f"{number:4} {launch.entry} ({launch.library}), grid {grid}, {size:.1f} MiB, {launch.place}")
        return "\n".join([*lines, *self.not_recorded()])

    def not_recorded(self) -> list[str]:
        """Describe the first ten launches that were not recorded, and count the others.

        Returns
        -------
        list of str
            One line for each of these launches, and a line with the number of other launches if there are any.
        """
        lines = [f"not recorded: {what}: {reason}" for what, reason in self.refused]
        lines += [f"not recorded: {name}, {count} times" for name, count in self.other_kernels.items()]
        more = len(lines) - _MAX_LINES
        last = [f"not recorded: {more} more"] if more > 0 else []
        return [*lines[:_MAX_LINES], *last]


def digest_of(data: bytes) -> str:
    """Return the digest of a file's contents, which is the file's name in a recording."""
    return hashlib.blake2b(data, digest_size=20).hexdigest()


def write_file(folder: Path, kind: str, suffix: str, data: bytes) -> str:
    """Write a file whose name is the digest of its contents, unless it already exists. Return the digest."""
    digest = digest_of(data)
    path = folder / kind / f"{digest}{suffix}"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_aside(path, data)
    return digest


def write_aside(path: Path, data: bytes) -> None:
    """Write a file under a temporary name, then rename it. Remove the temporary file on failure."""
    aside = path.with_suffix(".part")
    try:
        aside.write_bytes(data)
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def write_text(folder: Path, text: str) -> str:
    """Store PTX or a source file, and return the digest."""
    return write_file(folder, "text", ".txt", text.encode("utf-8", "surrogateescape"))


def write_memory(folder: Path, data: Array) -> str:
    """Store the contents of an allocation, and return the digest."""
    # ZipInfo has a fixed date, so that equal contents have equal digests.
    plain, file = io.BytesIO(), io.BytesIO()
    np.save(plain, data, allow_pickle=False)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr(zipfile.ZipInfo(_MEMBER), plain.getvalue(), zipfile.ZIP_DEFLATED)
    return write_file(folder, "memory", ".npz", file.getvalue())


def describe_recording(
    launches: Sequence[RecordedLaunch],
    device: str,
    refused: Sequence[tuple[str, str]],
    other_kernels: Mapping[str, int],
) -> str:
    """Return the text of launches.json."""
    return json.dumps(
        {
            "format": _FORMAT,
            "version": _VERSION,
            "device": device,
            "launches": list(map(_describe_launch, launches)),
            "refused": [list(pair) for pair in refused],
            "other_kernels": dict(other_kernels),
        },
        indent=1,
    )


def _describe_launch(launch: RecordedLaunch) -> dict[str, Any]:
    return launch.fields() | {
        "module": launch.module,
        "sources": launch.sources,
        "parameters": [
            {"name": p.name, "data": p.data.hex(), "pointers": [[q.at, q.memory, q.offset] for q in p.pointers]}
            for p in launch.parameters
        ],
        "memory": [{name: getattr(m, name) for name in RecordedMemory.__slots__} for m in launch.memory],
    }


def read_recording(folder: str | Path) -> Recording:
    """Read the launches that `record` wrote.

    Parameters
    ----------
    folder : str or Path
        Folder that `record` wrote.

    Returns
    -------
    Recording
        The launches. The contents of memory are read when a launch runs.

    Raises
    ------
    RecordingError
        If a file is missing or damaged, or its version is not supported.

    Examples
    --------
    >>> for launch in cudatma.read_recording("attention.rec"):  # doctest: +SKIP
    ...     print(launch.entry, launch.run().passes(tolerance=1e-3))
    """
    path = Path(folder)
    try:
        content = json.loads((path / FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecordingError(
            "folder", str(folder), f"a folder that contains {FILE}, written by `cudatma record`"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        got = f"a file that cannot be read ({reason_of(error)})"
        raise RecordingError(FILE, got, "a readable JSON file", "record the program again") from None
    top = _Reader(FILE, content)
    if top.get("format", str) != _FORMAT or top.get("version", int) != _VERSION:
        got = f"{content.get('format')!r} version {content.get('version')!r}"
        raise RecordingError(
            FILE,
            got,
            f"in format {_FORMAT!r} version {_VERSION}",
            "read the recording with the version of cudatma that wrote it",
        )
    modules: dict[Any, EmulatedModule] = {}
    launches = [_read_launch(path, modules, reader) for reader in top.readers("launches")]
    others = top.get("other_kernels", dict)
    if not all(type(count) is int for count in others.values()):
        raise top.error("other_kernels", others, "an object that maps names to integers")
    return Recording(path, launches, top.get("device", str), top.pairs("refused"), others)


class _Reader:
    """A JSON object and its location in the file, for error messages."""

    def __init__(self, place: str, content: Any) -> None:
        self.place = place
        if not isinstance(content, dict):
            raise RecordingError(place, type(content).__name__, "a JSON object", "record the program again")
        self._content = content

    def error(self, name: str, got: object, allowed: str) -> RecordingError:
        return RecordingError(
            f"{self.place}: {name}", got, allowed, "record the program again, because the recording is corrupt"
        )

    def get(self, name: str, kind: type) -> Any:
        value: Any = self._content.get(name)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.error(
                name,
                type(value).__name__ if name in self._content else "no value",
                f"{'an' if kind is int else 'a'} {kind.__name__}",
            )
        return value

    def size(self, name: str, maximum: int) -> int:
        value: int = self.get(name, int)
        if not 0 <= value <= maximum:
            raise self.error(name, value, f"0 to {maximum}")
        return value

    def readers(self, name: str) -> Iterator[_Reader]:
        for number, content in enumerate(self.get(name, list)):
            yield _Reader(f"{self.place}: {name}[{number}]", content)

    def integers(self, name: str, values: Any, length: int, minimum: int) -> tuple[int, ...]:
        if (
            not isinstance(values, list)
            or len(values) != length
            or not all(type(v) is int and v >= minimum for v in values)
        ):
            raise self.error(name, values, f"a list of {length} integers, each at least {minimum}")
        return tuple(values)

    def pairs(self, name: str) -> tuple[tuple[str, str], ...]:
        pairs = self.get(name, list)
        for number, pair in enumerate(pairs):
            if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
                raise self.error(f"{name}[{number}]", pair, "a list of two strings")
        return tuple((first, second) for first, second in pairs)

    def dim(self, name: str) -> Dim:
        x, y, z = self.integers(name, self._content.get(name), 3, 1)
        return x, y, z

    def has(self, name: str) -> bool:
        """Return whether the value is not null. Raise RecordingError if the name is missing."""
        if name not in self._content:
            raise self.error(name, "no value", "a value or null")
        return self._content[name] is not None

    def digest(self, name: str, value: Any = None) -> str:
        value = self._content.get(name) if value is None else value
        if not isinstance(value, str) or not _DIGEST.fullmatch(value):
            raise self.error(name, value, "a digest of 40 hexadecimal digits")
        return value


def _read_launch(folder: Path, modules: dict[Any, EmulatedModule], reader: _Reader) -> RecordedLaunch:
    memory = tuple(map(_read_memory_entry, reader.readers("memory")))
    return RecordedLaunch(
        folder=folder,
        modules=modules,
        library=reader.get("library", str),
        entry=reader.get("entry", str),
        place=reader.get("place", str),
        module=reader.digest("module"),
        grid=reader.dim("grid"),
        block=reader.dim("block"),
        cluster=reader.dim("cluster") if reader.has("cluster") else None,
        shared_bytes=reader.size("shared_bytes", _MAX_SHARED_BYTES),
        programmatic=reader.get("programmatic", bool),
        parameters=tuple(_read_parameter(part, memory) for part in reader.readers("parameters")),
        memory=memory,
        sources=tuple((name, reader.digest("sources", digest)) for name, digest in reader.pairs("sources")),
        from_compiler=reader.pairs("from_compiler"),
        registers=reader.size("registers", 255) if reader.has("registers") else None,
    )


def _read_memory_entry(reader: _Reader) -> RecordedMemory:
    dtype = reader.get("dtype", str) if reader.has("dtype") else None
    if dtype is not None and dtype not in TYPES:
        raise reader.error("dtype", dtype, ", ".join(sorted(TYPES)))
    before, after = (reader.digest(name) if reader.has(name) else None for name in ("before", "after"))
    if (before is None) != (after is None):
        raise reader.error("before, after", (before, after), "two digests, or null for both")
    return RecordedMemory(
        name=reader.get("name", str),
        size_bytes=reader.size("size_bytes", _MAX_MEMORY_BYTES),
        dtype=dtype,
        before=before,
        after=after,
    )


def _read_parameter(reader: _Reader, memory: Sequence[RecordedMemory]) -> RecordedParameter:
    text = reader.get("data", str)
    if len(text) > 2 * _MAX_PARAMETER_BYTES or not re.fullmatch(r"(?:[0-9a-f]{2})*", text):
        raise reader.error("data", text[:40], f"at most {_MAX_PARAMETER_BYTES} bytes in hexadecimal")
    data, pointers = bytes.fromhex(text), []
    for number, values in enumerate(reader.get("pointers", list)):
        at, index, offset = reader.integers(f"pointers[{number}]", values, 3, 0)
        if at + POINTER_BYTES > len(data) or index >= len(memory) or offset > memory[index].size_bytes:
            allowed = f"an offset in the {len(data)} bytes, the index of an allocation and an offset in the allocation"
            raise reader.error(f"pointers[{number}]", values, allowed)
        pointers.append(Pointer(at, index, offset))
    return RecordedParameter(reader.get("name", str), data, tuple(pointers))


def _read_file(folder: Path, name: str, digest: str) -> bytes:
    try:
        data = (folder / name).read_bytes()
    except OSError as error:
        got = f"a file that cannot be read ({reason_of(error)})"
        raise RecordingError(name, got, "a readable file", "copy the whole folder") from None
    if digest_of(data) != digest:
        raise RecordingError(name, "a file with different contents", "the recorded file", "copy the folder again")
    return data


def _read_text(folder: Path, digest: str) -> str:
    return _read_file(folder, f"text/{digest}.txt", digest).decode("utf-8", "surrogateescape")


def _read_memory(folder: Path, digest: str, size: int) -> Array:
    name = f"memory/{digest}.npz"
    data = _read_file(folder, name, digest)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive, archive.open(_MEMBER) as member:
            array = np.load(io.BytesIO(member.read(size + _HEADER_BYTES)), allow_pickle=False)
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile) as error:
        got = f"a file that cannot be read ({reason_of(error)})"
        raise RecordingError(name, got, f"an archive with an array of {size} bytes") from None
    if not isinstance(array, np.ndarray) or array.dtype != np.uint8 or array.shape != (size,):
        raise RecordingError(name, f"{array.dtype}{array.shape}", f"an array of {size} bytes, as stated in {FILE}")
    return array


def _compare(memory: RecordedMemory, array: Array, expected: Array) -> MemoryComparison:
    dtype = None if memory.dtype is None else numpy_type(memory.dtype)
    if dtype is None or memory.size_bytes % dtype.itemsize:
        different = int((array != expected).sum())
        return MemoryComparison(memory.name, None, memory.size_bytes, different, None, None)
    got, right = array.view(dtype), expected.view(dtype)
    words = f"u{dtype.itemsize}" if dtype.itemsize in (1, 2, 4, 8) else None
    same_bits = array.view(words) == expected.view(words) if words else got == right
    kind = np.complex128 if dtype.kind == "c" else np.float64
    with np.errstate(all="ignore"):
        wide_got, wide_right = got.astype(kind), right.astype(kind)
        difference = np.where(same_bits | (np.isnan(wide_got) & np.isnan(wide_right)), 0, np.abs(wide_got - wide_right))
        difference = np.where(np.isnan(difference), np.inf, difference)
        norm = float(np.linalg.norm(np.where(np.isfinite(wide_right), wide_right, 0)))
        distance = float(np.linalg.norm(difference))
    different, largest = int((difference != 0).sum()), float(difference.max(initial=0))
    if not np.isfinite(largest) or (distance and not norm):
        return MemoryComparison(memory.name, memory.dtype, got.size, different, None, None)
    return MemoryComparison(memory.name, memory.dtype, got.size, different, largest, distance / norm if norm else 0.0)
