"""Arguments of a launch: a number, an array or a tensor map for each parameter of a kernel.

Arguments name their arrays and contain no address. ``Sizes`` holds everything that changes with the sizes of a call.
All other fields depend only on a shape and a configuration. replay.py launches them on a GPU, and ``emulate()`` runs
them on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from cudatma.arrays import ArrayInfo
from cudatma.build.kernel import load_kernel
from cudatma.descriptor import AnySpec, TensorMap, TiledSpec
from cudatma.dtypes import tma_type
from cudatma.kernels.host import host_bytes
from cudatma.runtime.launch import Kernel
from cudatma.target import Target

if TYPE_CHECKING:
    from cudatma.emulator import Report

#: Names of arrays that the engine provides: partial sums, flags (zero between launches), and copied rows.
PARTIALS, FLAGS, ROWS = "partials", "flags", "rows"
#: A field of a tensor map, given by its kind ("dim", "stride" or "box") and its index in TMA order.
Field = tuple[str, int]


class At(NamedTuple):
    """Address ``offset_bytes`` past the first element of a named array, or null if the call lacks this array."""

    array: str
    offset_bytes: int = 0


class Map(NamedTuple):
    """Tensor map over a named array. The address in ``spec`` is 0; ``sized`` lists the size-dependent fields."""

    array: str
    spec: AnySpec
    sized: tuple[Field, ...] = ()
    offset_bytes: int = 0


class Value(NamedTuple):
    """Parameter whose value is ``Sizes.values[place]``."""

    place: int


class Sizes(NamedTuple):
    """Arguments that differ between calls with the same shape and configuration.

    Parameters
    ----------
    grid : int or tuple of int
        Number of CTAs, or the number along each grid axis.
    values : tuple
        Values indexed by ``Value.place``: numbers, or structs packed into bytes.
    fields : tuple of int
        Size-dependent fields of every tensor map (see ``Map.sized``), in parameter order.
    shared_bytes : int
        Dynamic shared memory per CTA in bytes, or 0 if ``config.smem_bytes`` suffices.
    programmatic : bool
        Whether to use programmatic dependent launch.
    partials_bytes, flags_bytes : int
        Bytes of workspace for partial sums and for flags. No workspace is used if both are 0.
    rows_bytes : int
        Bytes of memory for copied rows.
    early_rows_at : int
        Offset in this memory of the arrays that the kernel may read before the previous kernel has completed, or 0.
    """

    grid: int | tuple[int, ...]
    values: tuple[Any, ...] = ()
    fields: tuple[int, ...] = ()
    shared_bytes: int = 0
    programmatic: bool = False
    partials_bytes: int = 0
    flags_bytes: int = 0
    rows_bytes: int = 0
    early_rows_at: int = 0


@dataclass(frozen=True, slots=True)
class Arguments:
    """Arguments of one launch of a kernel.

    Attributes
    ----------
    template, config
        The kernel. ``config`` has ``entry``, ``threads`` and ``smem_bytes``.
    parameters : tuple[Any, ...]
        One number, bytes, At, Map or Value for each parameter, in the kernel's order.
    cluster : int
        Number of CTAs per cluster, or 1 without clusters.
    early : tuple[str, ...]
        Names of arrays that the kernel may read before the previous kernel has completed.
    """

    template: str
    config: Any
    parameters: tuple[Any, ...]
    sizes: Sizes
    cluster: int = 1
    early: tuple[str, ...] = ()

    @property
    def shared_bytes(self) -> int:
        """Bytes of dynamic shared memory per CTA."""
        return max(int(self.config.smem_bytes), self.sizes.shared_bytes)

    @property
    def maps(self) -> list[Map]:
        """Tensor maps in parameter order, with the size-dependent fields from Sizes."""
        values, maps = iter(self.sizes.fields), []
        for parameter in self.parameters:
            if isinstance(parameter, Map):
                maps.append(with_fields(parameter, [next(values) for _ in parameter.sized]))
        return maps

    def kernel(self, target: Target) -> Kernel:
        """Return the kernel from the cache, or compile it."""
        return load_kernel(self.template, self.config, target)

    def at(self, addresses: Mapping[str, int], encode: Callable[[AnySpec], Any]) -> list[Any]:
        """Return the arguments for arrays at these addresses.

        An array without an address is passed as null. ``encode`` encodes tensor maps.
        """
        maps, values = iter(self.maps), []
        for parameter in self.parameters:
            if isinstance(parameter, Map):
                tensor_map = next(maps)
                values.append(
                    encode(replace(tensor_map.spec, address=addresses[tensor_map.array] + tensor_map.offset_bytes))
                )
            elif isinstance(parameter, At):
                address = addresses.get(parameter.array, 0)
                values.append(address + parameter.offset_bytes if address else 0)
            else:
                values.append(self.sizes.values[parameter.place] if isinstance(parameter, Value) else parameter)
        return values

    def filled(self, arrays: Mapping[str, ArrayInfo]) -> list[Any]:
        """Return the arguments for these arrays, with tensor maps from the codec."""
        addresses = {name: info.pointer for name, info in arrays.items()}
        return self.at(addresses, lambda spec: TensorMap(spec, encoder="codec", on_host=True))

    def emulate(
        self, target: Target, arrays: Mapping[str, ArrayInfo], *, kernel: Kernel | None = None, **options: Any
    ) -> Report:
        """Run the launch on the emulator.

        Parameters
        ----------
        target : Target
            Target of the kernel.
        arrays : mapping of str to ArrayInfo
            Arrays in host memory, by name. A missing array has the address 0.
        kernel : Kernel, optional
            The compiled kernel.
        **options
            Options of ``EmulatedModule.launch``. By default, a programmatic dependent launch runs as if the previous
            kernel had written all arrays except the early ones. ``produced_by_previous`` specifies a different set of
            arrays.
        """
        reached = {name: host_bytes(info) for name, info in arrays.items() if info.size_elems}
        early = set(self.early)
        if at := self.sizes.early_rows_at:
            early.add("early_rows")
            reached |= {ROWS: reached[ROWS][:at], "early_rows": reached[ROWS][at:]}
        given: dict[str, Any] = {"arrays": tuple(reached.values()), "target": target}
        given |= {"shared_bytes": self.shared_bytes, "cluster": self.cluster if self.cluster > 1 else None}
        if self.sizes.programmatic:
            given["produced_by_previous"] = tuple([held for name, held in reached.items() if name not in early])
        chosen = self.kernel(target) if kernel is None else kernel
        return chosen.emulate(self.sizes.grid, self.config.threads, self.filled(arrays), **(given | options))


def with_fields(tensor_map: Map, values: Sequence[int]) -> Map:
    """Return the map with these values for its size-dependent fields."""
    if not values:
        return tensor_map
    spec: Any = tensor_map.spec
    lists = {"dim": list(spec.dims), "stride": list(spec.strides_bytes), "box": list(getattr(spec, "box", ()))}
    for (kind, index), value in zip(tensor_map.sized, values, strict=True):
        lists[kind][index] = value
    changed: dict[str, Any] = {"dims": tuple(lists["dim"]), "strides_bytes": tuple(lists["stride"])}
    if lists["box"]:
        changed["box"] = tuple(lists["box"])
    return tensor_map._replace(spec=replace(spec, **changed))


def map_over(
    array: str,
    info: ArrayInfo,
    box: Sequence[int],
    *,
    dtype: object = None,
    axes: Sequence[int] | None = None,
    sized: tuple[Field, ...] = (),
    offset_bytes: int = 0,
    **options: Any,
) -> Map:
    """Return a tiled tensor map over a named array.

    ``info`` provides the shape, strides and dtype of the array. ``box`` contains the number of elements along each
    axis, in NumPy order. ``dtype`` is the TMA type, by default that of the array. ``axes`` lists the array's axes from
    innermost to outermost. ``options`` are other fields of TiledSpec. Raises DescriptorError, with axes numbered in the
    array's order, if a rule is violated.
    """
    kind = tma_type(info.dtype) if dtype is None else tma_type(dtype)
    spec = TiledSpec.from_strided(
        0, info.shape, strides_bytes=info.strides_bytes, dtype=kind, box=box, axes=axes, **options
    )
    return Map(array, spec, sized, offset_bytes)
