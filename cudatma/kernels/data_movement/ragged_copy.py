"""Copy many 2D arrays of different shapes in one launch. The kernel edits some tensor maps while it uses others.

Each CTA copies consecutive boxes of several arrays. For each array, it writes the address, the sizes and the pitch to a
tensor map, and publishes the map while boxes of earlier arrays are still being copied. Source: PTX ISA,
"tensormap.replace", "tensormap.cp_fenceproxy"; CUDA C++ Programming Guide, "Modifying a Tensor Map".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from cudatma import context
from cudatma.arrays import ArrayInfo, describe, overlaps, place_name
from cudatma.backend import backend_for, device_remedy
from cudatma.build.kernel import default_target
from cudatma.descriptor.rules import TMA_ALIGNMENT_BYTES
from cudatma.errors import ArgumentError, ArgumentTypeError, check, counted
from cudatma.kernels.arguments import Arguments, At, Sizes, map_over
from cudatma.kernels.checks import check_field_types
from cudatma.kernels.data_movement.ring import BOX_THREADS, BoxRing
from cudatma.kernels.replay import Replay
from cudatma.kernels.sample import Sample, sample_dtype
from cudatma.library_streams import stream_handle
from cudatma.runtime.device_memory import DeviceMemory
from cudatma.runtime.streams import wait_for_producers
from cudatma.target import Target, detect, get_target

if TYPE_CHECKING:
    from cudatma.emulator import Report

TEMPLATE = "kernels/ragged_copy.cu.j2"
#: Number of CTAs, two per SM of an H200.
CTAS = 264
#: Names of the launch's arrays: the first pair, the table of all pairs, and the memory for edited tensor maps.
_ARRAYS = "source", "destination", "table", "maps"
_MAP_BYTES = 128
#: Maximum number of boxes, because the kernel counts boxes in 32 bits.
_MAX_BOXES = 2**31 - 1

#: Members of the struct ``Pair`` in the template.
_PAIR = np.dtype(
    [
        ("source", "<u8"),
        ("destination", "<u8"),
        ("source_pitch", "<u8"),
        ("destination_pitch", "<u8"),
        ("rows", "<u4"),
        ("columns", "<u4"),
        ("first_box", "<u4"),
        ("boxes_x", "<u4"),
    ]
)


@dataclass(frozen=True, slots=True)
class RaggedCopyConfig(BoxRing):
    """A configuration of ``kernels/ragged_copy.cu.j2``.

    Attributes
    ----------
    element_bytes : int
        Bytes per element, 1, 2, 4 or 8.
    box_rows, box_columns : int
        Number of rows and columns per box, at most 256 each. Rows must be multiples of 16 bytes.
    stages : int
        Number of boxes in flight, at least 2.
    maps : int
        Number of tensor maps that each warp edits in turn, at least the number of stages.

    Raises
    ------
    ArgumentError
        If a field is invalid.
    """

    element_bytes: int
    box_rows: int = 64
    box_columns: int = 64
    stages: int = 4
    maps: int = 4
    entry: str = "ragged_copy"

    def __post_init__(self) -> None:
        check_field_types(self)
        self.check_box()
        if self.maps < self.stages:
            allowed = f"at least {self.stages} (one per stage, because a map must not be edited while copies use it)"
            raise ArgumentError("maps", self.maps, allowed)

    def check_target(self, target: Target) -> None:
        """Raise TargetError unless the target can edit tensor maps, and ArgumentError unless the ring fits in a CTA."""
        target.require("tma", "the ragged copy")
        target.require("tensormap_replace", "the ragged copy")
        self.ring.check_fits(target)

    def maps_bytes(self, blocks: int) -> int:
        """Return the number of bytes of global memory for the tensor maps of ``blocks`` CTAs."""
        return blocks * 2 * self.maps * _MAP_BYTES


class RaggedCopy:
    """Repeatable copy of many 2D arrays to arrays of the same shapes in one launch.

    Runs of one object share tensor maps and must not overlap. Order them on a stream, or create several objects. run()
    can be captured into a graph.

    Parameters
    ----------
    sources, destinations : sequence of array (rows, columns)
        Pairs of arrays: CuPy arrays, torch tensors, or objects that support DLPack or ``__cuda_array_interface__``. On
        the emulator, also NumPy arrays. The constructor waits for the streams in ``__cuda_array_interface__``. The
        arrays of a pair must have the same shape. All arrays must have the same dtype of 1, 2, 4 or 8 bytes and be on
        the same device. Rows must be contiguous, and their address, pitch and length must be multiples of 16 bytes.
        Arrays may be empty. A destination must not share a byte with another array. The object keeps all arrays alive.
    config : RaggedCopyConfig, optional
        Configuration of the kernel. Its element size must be that of the arrays. Default: the usual box and ring.
    backend : str, optional
        ``"cuda"``, ``"emulator"`` or ``"auto"``; see ``marlin_gemm``. ``"reference"`` is not supported.
    target : Target or str, optional
        Target of the kernel for host arrays.

    Raises
    ------
    ArgumentError, ArgumentTypeError, TargetError, CompileError, DriverError
        If an argument is invalid, if no kernel exists for the GPU, or if the kernel does not compile or load.

    Notes
    -----
    On SM100 and SM120, tensor maps depend on the size of the allocation. All maps use the properties of the first pair,
    so allocate all arrays from one pool.
    """

    def __init__(
        self,
        sources: Sequence[Any],
        destinations: Sequence[Any],
        *,
        config: RaggedCopyConfig | None = None,
        backend: str | None = None,
        target: Target | str | None = None,
    ) -> None:
        chosen = backend_for("ragged_copy", backend)
        if chosen == "reference":
            raise ArgumentError("backend", chosen, '"auto", "cuda" or "emulator"', "copy host arrays with numpy.copyto")
        pairs = _check_pairs(sources, destinations)
        self.kind = pairs[0][0].kind if pairs else "numpy"
        self.device = pairs[0][0].device if pairs else None
        if pairs and (self.device is None) != (chosen == "emulator"):
            allowed = f"{'a CUDA device' if chosen == 'cuda' else 'the host'} for backend {chosen!r}"
            raise ArgumentError(
                "sources[0].device",
                place_name(self.device),
                allowed,
                device_remedy("move the array with cupy.asarray", self.device),
            )
        pairs = [pair for pair in pairs if pair[0].size_elems]
        self._pairs = pairs
        self.blocks = 0
        if not pairs:
            return
        if self.device is not None:
            self._target = detect(self.device)
        else:
            self._target = default_target() if target is None else get_target(target)
        itemsize = pairs[0][0].dtype.itemsize
        config = config or RaggedCopyConfig(itemsize)
        if config.element_bytes != itemsize:
            raise ArgumentError(
                "config.element_bytes", config.element_bytes, f"{itemsize} (the size of {pairs[0][0].dtype})"
            )
        config.check_target(self._target)
        self._table, boxes = _table(pairs, config)
        self.blocks = min(CTAS, boxes)
        self._arguments = _arguments(pairs, config, boxes, self.blocks)
        self.kernel = self._arguments.kernel(self._target)
        if self.device is not None:
            self._replay, self._addresses = self._on_device(self.device, config.maps_bytes(self.blocks))

    def _on_device(self, device: int, maps_bytes: int) -> tuple[Replay, tuple[int, ...]]:
        """Upload the table, and return the launch and the addresses of its arrays."""
        # Place the maps first, because each map must be 128-byte aligned.
        self._memory = memory = DeviceMemory(maps_bytes + self._table.nbytes, device)
        wait_for_producers(device, *(side for pair in self._pairs for side in pair))
        memory.write(bytes(maps_bytes) + self._table.tobytes())
        source, destination = self._pairs[0]
        addresses = source.pointer, destination.pointer, memory.pointer + maps_bytes, memory.pointer
        named = dict(zip(_ARRAYS, addresses, strict=True))
        return Replay(self._arguments, self.kernel, device, _ARRAYS, named), addresses

    def run(self, *, stream: Any = None) -> None:
        """Copy all arrays. On a GPU, return without waiting for the copy.

        Parameters
        ----------
        stream : stream, optional
            Stream of the launch. Default: the current stream of the arrays' library.
        """
        if not self.blocks:
            return
        if self.device is None:
            self.emulate(schedules=1)
            return
        handle = stream_handle(stream, self.kind, self.device)
        self._replay.run(self._arguments.sizes, self._addresses, handle)

    def emulate(self, *, blocks: int | None = None, **options: Any) -> Report:
        """Run the launch on the CPU with host arrays.

        Parameters
        ----------
        blocks : int, optional
            Maximum number of CTAs. Default: the number of CTAs of a launch on a GPU.
        **options
            Options of ``Kernel.emulate``.

        Returns
        -------
        Report
            Report of ``Kernel.emulate``.
        """
        if self.device is not None or not self.blocks:
            raise ArgumentError("sources", "arrays that are empty or on a GPU", "nonempty NumPy arrays")
        arguments, arrays = self.on_host(self.blocks if blocks is None else blocks)
        return arguments.emulate(self._target, arrays, kernel=self.kernel, **options)

    def on_host(self, blocks: int) -> tuple[Arguments, dict[str, ArrayInfo]]:
        """Return the arguments of a launch on host arrays, and the arrays.

        Parameters
        ----------
        blocks : int
            Maximum number of CTAs.

        Returns
        -------
        launch : Arguments
            Arguments of the kernel.
        arrays : dict of str to ArrayInfo
            The arrays by name.
        """
        grid = min(blocks, self.blocks)
        # Tensor maps must be 128-byte aligned, but NumPy guarantees only 16 bytes.
        memory = np.zeros(self._arguments.config.maps_bytes(grid) + _MAP_BYTES, np.uint8)
        maps = memory[-memory.ctypes.data % _MAP_BYTES :]
        first = (*self._pairs[0], describe(self._table.view(np.uint8)), describe(maps))
        arrays = dict(zip(_ARRAYS, first, strict=True))
        arrays |= {f"array {i}": side for i, side in enumerate(side for pair in self._pairs[1:] for side in pair)}
        return replace(self._arguments, sizes=Sizes(grid)), arrays


def ragged_copy(
    sources: Sequence[Any], destinations: Sequence[Any], *, stream: Any = None, backend: str | None = None
) -> Sequence[Any]:
    """Copy many 2D arrays to arrays of the same shapes in one launch, with TMA.

    The call waits for the copy and then frees its tensor maps. To repeat a copy, use ``RaggedCopy``.

    Parameters
    ----------
    sources, destinations : sequence of array (rows, columns)
        Pairs of arrays; see ``RaggedCopy``.
    stream : stream, optional
        Stream of the launch. Default: the current stream of the arrays' library.
    backend : str, optional
        Where to run; see ``RaggedCopy``.

    Returns
    -------
    sequence of array
        The destinations.

    Raises
    ------
    ArgumentError, ArgumentTypeError, TargetError, CompileError, DriverError, HazardError
        If an argument is invalid or the kernel cannot run; see ``RaggedCopy``.
    """
    copy = RaggedCopy(sources, destinations, backend=backend)
    copy.run(stream=stream)
    if copy.blocks and copy.device is not None:
        with context.using(copy.device) as driver:
            handle = stream_handle(stream, copy.kind, copy.device)
            check(driver.cuStreamSynchronize(handle), "cuStreamSynchronize")
    return destinations


def _arguments(
    pairs: Sequence[tuple[ArrayInfo, ArrayInfo]], config: RaggedCopyConfig, boxes: int, grid: int
) -> Arguments:
    """Return the launch. All maps have the element type and the box of the first pair's maps."""
    maps = [
        map_over(
            name,
            replace(info, strides_bytes=(_pitch(info), info.dtype.itemsize)),
            (config.box_rows, config.box_columns),
        )
        for name, info in zip(_ARRAYS, pairs[0], strict=False)
    ]
    return Arguments(TEMPLATE, config, (*maps, At("table"), len(pairs), boxes, At("maps")), Sizes(grid))


def _check_pairs(sources: Sequence[Any], destinations: Sequence[Any]) -> list[tuple[ArrayInfo, ArrayInfo]]:
    """Return the pairs of arrays.

    Raises ArgumentError unless the arrays of each pair match, all pairs have the same dtype and device, and no
    destination shares memory with another array.
    """
    for field, arrays in (("sources", sources), ("destinations", destinations)):
        if not isinstance(arrays, Sequence) or isinstance(arrays, str | bytes):
            raise ArgumentTypeError(field, type(arrays).__name__, "a sequence of arrays")
    if len(sources) != len(destinations):
        raise ArgumentError(
            "destinations",
            f"{len(destinations)} arrays",
            f"a sequence of {len(sources)} arrays (the number of sources)",
        )
    pairs = [
        (_described(source, f"sources[{i}]"), _described(destination, f"destinations[{i}]"))
        for i, (source, destination) in enumerate(zip(sources, destinations, strict=True))
    ]
    for i, (source, destination) in enumerate(pairs):
        if source.shape != destination.shape:
            raise ArgumentError(
                f"destinations[{i}].shape", destination.shape, f"{source.shape} (the shape of its source)"
            )
        if destination.readonly:
            raise ArgumentError(f"destinations[{i}]", "a read-only array", "a writable array")
        for field, info in ((f"sources[{i}]", source), (f"destinations[{i}]", destination)):
            first = pairs[0][0]
            if (info.dtype, info.device) != (first.dtype, first.device):
                got, allowed = (f"{array.dtype} on {place_name(array.device)}" for array in (info, first))
                raise ArgumentError(field, got, f"{allowed} to match the first source")
    _check_overlaps(pairs)
    return pairs


def _described(array: Any, field: str) -> ArrayInfo:
    info = describe(array, field)
    if len(info.shape) != 2:
        raise ArgumentError(f"{field}.shape", info.shape, "(rows, columns)")
    if info.dtype.itemsize not in (1, 2, 4, 8):
        raise ArgumentError(f"{field}.dtype", info.dtype, "1, 2, 4 or 8 bytes wide")
    if not info.size_elems:
        return info
    rows, columns = info.shape
    width = columns * info.dtype.itemsize
    if columns > 1 and info.strides_bytes[1] != info.dtype.itemsize:
        got = f"a stride of {info.strides_bytes[1]} bytes between elements"
        raise ArgumentError(f"{field}.strides", got, "contiguous within rows", "pass a copy in C order")
    if width % TMA_ALIGNMENT_BYTES:
        remedy = "pad the rows, because TMA stores whole 16-byte chunks"
        raise ArgumentError(
            f"{field}.shape", f"rows of {width} bytes", "a shape whose rows are a multiple of 16 bytes", remedy
        )
    if info.pointer % TMA_ALIGNMENT_BYTES:
        raise ArgumentError(f"{field}.pointer", hex(info.pointer), "a multiple of 16 bytes", "pass an aligned copy")
    pitch = info.strides_bytes[0]
    if rows > 1 and (pitch % TMA_ALIGNMENT_BYTES or not width <= pitch < 2**40):
        allowed = "a pitch that is a multiple of 16 bytes, at least the row length, and less than 2**40"
        raise ArgumentError(f"{field}.strides", f"a pitch of {pitch} bytes", allowed)
    return info


def _check_overlaps(pairs: Iterable[tuple[ArrayInfo, ArrayInfo]]) -> None:
    """Raise ArgumentError if a destination shares a byte with another array, because the copies are not ordered."""
    arrays: list[tuple[ArrayInfo, str, bool]] = []
    for i, (source, destination) in enumerate(pairs):
        arrays += [(source, f"sources[{i}]", False), (destination, f"destinations[{i}]", True)]
    # The arrays are sorted by their first byte. `reaching` holds the earlier arrays that end after the first byte of
    # the current array.
    reaching: list[tuple[ArrayInfo, str, bool]] = []
    for info, field, is_written in sorted(arrays, key=lambda entry: entry[0].extent):
        reaching = [entry for entry in reaching if entry[0].extent[1] > info.extent[0]]
        for other, name, other_is_written in reaching:
            if (is_written or other_is_written) and overlaps(info, other):
                raise ArgumentError(field, f"memory that overlaps {name}", "an array with its own memory")
        reaching.append((info, field, is_written))


def _boxes(rows: Any, columns: Any, config: RaggedCopyConfig) -> Any:
    return -(-rows.astype(np.int64) // config.box_rows) * -(-columns.astype(np.int64) // config.box_columns)


def _table(pairs: Sequence[tuple[ArrayInfo, ArrayInfo]], config: RaggedCopyConfig) -> tuple[np.ndarray[Any, Any], int]:
    """Return the table that the kernel reads, and the number of boxes of all pairs."""
    table = np.zeros(len(pairs), _PAIR)
    table["source"], table["destination"] = zip(*((a.pointer, b.pointer) for a, b in pairs), strict=True)
    table["source_pitch"], table["destination_pitch"] = zip(*((_pitch(a), _pitch(b)) for a, b in pairs), strict=True)
    for i, (source, _) in enumerate(pairs):
        if max(source.shape) > _MAX_BOXES:
            raise ArgumentError(
                f"sources[{i}].shape", source.shape, f"small enough for at most {_MAX_BOXES} boxes along each axis"
            )
    table["rows"], table["columns"] = zip(*(source.shape for source, _ in pairs), strict=True)
    boxes = _boxes(table["rows"], table["columns"], config)
    total = int(boxes.sum())
    if total > _MAX_BOXES:
        raise ArgumentError(
            "sources",
            f"{total} boxes",
            f"small enough for at most {_MAX_BOXES} boxes",
            "split the arrays into several launches",
        )
    table["first_box"] = boxes.cumsum() - boxes
    table["boxes_x"] = -(-table["columns"].astype(np.int64) // config.box_columns)
    return table, total


def _pitch(info: ArrayInfo) -> int:
    """Return the pitch of the rows. A single row has the pitch of a dense array."""
    return info.strides_bytes[0] if info.shape[0] > 1 else info.shape[1] * info.dtype.itemsize


def dump_configs(target: Target) -> list[RaggedCopyConfig]:
    """Return the representative config, or an empty list if the target cannot edit tensor maps."""
    return [RaggedCopyConfig(2)] if target.has("tma") and target.has("tensormap_replace") else []


def sample(target: Target, *, arrays: int = 12, dtype: str = "float16", blocks: int = 2, seed: int = 0) -> Sample:
    """Return a copy of random arrays with at most ``blocks`` CTAs, for `cudatma emulate ragged_copy`."""
    kind = sample_dtype(dtype)
    if min(arrays, blocks) < 1:
        raise ArgumentError("arrays, blocks", (arrays, blocks), "at least 1 each")
    rng = np.random.default_rng(seed)
    unit = max(1, TMA_ALIGNMENT_BYTES // kind.itemsize)
    shapes = [(int(rng.integers(1, 150)), unit * int(rng.integers(1, 160 // unit + 1))) for _ in range(arrays)]
    sources = [rng.integers(0, 100, shape).astype(kind) for shape in shapes]
    destinations = [np.zeros_like(source) for source in sources]
    copy = RaggedCopy(sources, destinations, backend="emulator", target=target)

    def wrong() -> float:
        return float(np.mean([(a != b).mean() for a, b in zip(sources, destinations, strict=True)]))

    grid = f"{counted(min(blocks, copy.blocks), 'block')} of {BOX_THREADS} threads"
    title = f"ragged copy, {counted(arrays, 'array')} of {kind}, {grid}"
    return Sample(title, copy.kernel, partial(copy.emulate, blocks=blocks), wrong, 0.0)
