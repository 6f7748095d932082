"""Cache of an operation's calls, for repeated calls and for calls that differ only in sizes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from operator import attrgetter, methodcaller
from typing import Any, Generic, NamedTuple

from cudatma import context
from cudatma.build.kernel import wants_debug
from cudatma.context import Cache
from cudatma.kernels.checks import has_tangents
from cudatma.kernels.operation import C, Checked, Operation, P, Weight
from cudatma.kernels.plans import NO_SPACES, Launch, Plan
from cudatma.kernels.tuning import pinned_scope
from cudatma.library_streams import current_stream, stream_handle, working_on

#: Maximum number of calls and of plans that are cached per operation. A call takes about 2 KB.
_MAX_CALLS, _MAX_PLANS = 4096, 512
#: Maximum number of plans that are tried for new sizes.
_MAX_PLANS_OF_SHAPE = 4


class Calls(Generic[P, C]):
    """Calls and plans of one operation, owned by the Runtime."""

    #: choice.forget() drops this cache.
    holds_choices = True

    def __init__(self, operation: Operation[P, C]) -> None:
        self._operation = operation
        self.calls: Cache[Call] = Cache(_MAX_CALLS)
        self.plans: Cache[Plan[P, C]] = Cache(_MAX_PLANS)
        #: A shape may have several plans. For example, a window needs no mask if it is longer than the sequence.
        self._shapes: Cache[tuple[_Shape, ...]] = Cache(_MAX_PLANS)

    def plan(self, problem: P, device: int) -> Plan[P, C]:
        """Return the plan of a problem on a device, and create it at the first use."""
        context.require_no_fork()
        key = device, self._operation.plan_key(problem), wants_debug(None), pinned_scope.get()
        plan = self.plans.get(key)
        if plan is None:
            plan = Plan(self._operation, device)
            self.plans.put(key, plan)
        return plan

    def keep(
        self, key: tuple[Any, ...], plan: Plan[P, C], launch: Launch, checked: Checked[P], dtypes: tuple[Any, Any]
    ) -> None:
        """Cache a call, and cache its shape for calls with other sizes.

        ``dtypes`` contains the dtypes of out and lse in the arrays' library.
        """
        operation, infos = self._operation, (*checked.arrays, checked.out)
        alignment_masks = operation.alignment_masks(checked.problem)
        if any(info is not None and info.pointer & mask for info, mask in zip(infos, alignment_masks, strict=True)):
            return  # A plan for misaligned arrays would also work for aligned arrays, but more slowly.
        present = [at for at, info in enumerate(checked.arrays) if info is not None]
        common = _Common(
            key[0], launch.device, _ADDRESS[key[0]], present, alignment_masks, dtypes, [0] * len(operation.names)
        )
        spans = None
        if checked.out is not None:
            spans = [None if i is None else _span(i.shape, i.strides_bytes, i.dtype.itemsize) for i in infos]
        self.calls.put(key, Call(common, launch, checked.shape, checked.lse, spans))
        shape_key = _shape_key(operation, key)
        if shape_key is not None:
            itemsizes = tuple([0 if info is None else info.dtype.itemsize for info in infos])
            shape = _Shape(common, plan, checked.problem, itemsizes)
            others = [shape for shape in self._shapes.get(shape_key, ()) if shape.plan is not plan]
            self._shapes.put(shape_key, (shape, *others[: _MAX_PLANS_OF_SHAPE - 1]))

    def resized_call(self, key: tuple[Any, ...]) -> Call | None:
        """Return and cache the call if it differs from a cached call only in sizes, otherwise None."""
        operation = self._operation
        shape_key = _shape_key(operation, key)
        shapes = None if shape_key is None else self._shapes.get(shape_key)
        if shapes is None:
            return None
        facts = key[1]
        extents, strides, has_out = facts[::4], facts[1::4], facts[-4] is not None
        if key[0] == "torch" and (has_out or not operation.joins_axes):
            strides = [
                given and [stride * size for stride in given]
                for given, size in zip(strides, shapes[0].itemsizes)  # noqa: B905 (a keyword takes time)
            ]
        for shape in shapes:
            resized = operation.resized(shape.problem, extents, strides, key[2])
            if resized is not None:
                break
        else:
            return None
        problem, result, lse = resized
        launch = shape.plan.loaded_launch(problem)
        if launch is None:
            return None
        spans = [_span(*bounds) for bounds in zip(extents, strides, shape.itemsizes)] if has_out else None  # noqa: B905
        call = Call(shape.common, launch, result, lse, spans)
        self.calls.put(key, call)
        return call


def calls_of(operation: Operation[P, C]) -> Calls[P, C]:
    """Return the calls and plans of an operation in the Runtime in use."""
    calls: Calls[P, C] = context.runtime().part(operation, lambda: Calls(operation))
    return calls


class _Common(NamedTuple):
    """Properties that all calls with one shape have in common.

    Attributes
    ----------
    address : callable
        Function that returns the address of an array.
    present : list[int]
        Indices of the inputs that are not None.
    masks : tuple[int, ...]
        Result of Operation.alignment_masks().
    dtypes : tuple[Any, Any]
        Dtypes of out and lse, as objects of the library.
    places : list[int]
        List of zeros, one for each address of a launch.
    """

    library: str
    device: int
    address: Callable[[Any], int]
    present: list[int]
    alignment_masks: tuple[int, ...]
    dtypes: tuple[Any, Any]
    places: list[int]


class _Shape(NamedTuple):
    """Plan and problem of a call whose sizes may change."""

    common: _Common
    plan: Plan[Any, Any]
    problem: Any
    itemsizes: tuple[int, ...]


class Call:
    """A cached launch with the alignment and overlap checks that a repeated call needs."""

    __slots__ = ("_common", "_launch", "_lse", "_reads", "_shape", "_single", "_written")

    def __init__(
        self,
        common: _Common,
        launch: Launch,
        shape: tuple[int, ...] | None,
        lse: tuple[int, ...] | None,
        spans: list[tuple[int, int] | None] | None,
    ) -> None:
        """Prepare the checks that a repeated call needs.

        ``shape`` and ``lse`` are the shapes of the results, or None for a missing result. For a call with ``out``,
        ``spans`` contains the first byte and the end of each input and of out, relative to the address of the array.
        """
        self._common, self._launch, self._shape, self._lse = common, launch, shape, lse
        # Most calls launch one kernel without a workspace.
        self._single = launch.replays[0] if launch.partials_bytes is None and len(launch.replays) == 1 else None
        self._reads = None
        if spans is not None:
            self._written = spans[-1]
            self._reads = [(at, common.alignment_masks[at], *span) for at in common.present if (span := spans[at])]

    def run(self, inputs: tuple[Any, ...], out: Any, stream: Any, weight: Weight | None) -> Any:
        """Launch and return the results, or return NotImplemented if check() must validate the addresses."""
        library, device, address, present, alignment_masks, dtypes, places = self._common
        places, result, reads = places[:], len(inputs), self._reads
        try:
            if reads is None:
                for at in present:
                    places[at] = place = address(inputs[at])
                    if not place or place & alignment_masks[at]:
                        return NotImplemented
            else:
                places[result] = to = address(out)
                low, high = self._written  # type: ignore[misc]
                begin, end = to + low, to + high
                if not to or to & alignment_masks[result]:
                    return NotImplemented
                for at, mask, low, high in reads:
                    places[at] = place = address(inputs[at])
                    if not place or place & mask or (place + low < end and begin < place + high):
                        return NotImplemented
                if weight is not None and begin < weight.end and weight.begin < end:
                    for low, high in weight.extents:
                        if low < end and begin < high:
                            return NotImplemented
        except RuntimeError:  # A sparse tensor has no address.
            return NotImplemented
        handle = current_stream(library, device) if stream is None else stream_handle(stream, library, device)
        if out is None and self._shape is not None:
            out = _new(library, inputs[0], self._shape, dtypes[0], stream, handle)
            places[result] = address(out)
        done = out
        if self._lse is not None:
            lse = _new(library, inputs[0], self._lse, dtypes[1], stream, handle)
            places[result + 1] = address(lse)
            done = out, lse
        if self._single is not None:
            self._single.run(self._launch.sizes[0], places, handle, NO_SPACES, weight.addresses if weight else ())
        else:
            self._launch.run(places, handle, weight)
        return done


#: Maps each library to a function that returns the address of an array.
_ADDRESS: dict[str, Callable[[Any], int]] = {"cupy": attrgetter("data.ptr"), "torch": methodcaller("data_ptr")}
#: Maps each known array class to its library. The map is not part of the Runtime, because the library of a class
#: never changes.
libraries: dict[type, str] = {}


def library_of(array: Any) -> str:
    """Return ``"cupy"``, ``"torch"``, or ``""`` for an array that only describe() can read."""
    kind = array.__class__
    known = libraries.get(kind)
    if known is None:
        modules = sys.modules
        if "cupy" in modules and kind is modules["cupy"].ndarray:
            known = "cupy"
        elif "torch" in modules and kind in (modules["torch"].Tensor, modules["torch"].nn.Parameter):
            known = "torch"
        else:
            return ""
        libraries[kind] = known
    return known


def facts_of(library: str, arrays: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return shape, strides, dtype and device of each array in one tuple, or None if check() must validate the arrays.

    The function returns None if the arrays belong to different libraries, if torch records or computes a derivative, or
    if a tensor is lazily negated or conjugated. Only the attributes that a launch depends on are read, because
    describe() takes longer than a launch.
    """
    facts: list[Any] = []
    kind, is_torch = arrays[0].__class__, library == "torch"
    if is_torch and has_tangents():
        return None
    try:
        for array in arrays:
            if array.__class__ is not kind:
                if array is None:
                    facts += _NO_FACTS
                    continue
                if library_of(array) != library:
                    return None
            if not is_torch:
                facts += array.shape, array.strides, array.dtype, array.data.device_id
            elif array.requires_grad and sys.modules["torch"].is_grad_enabled():
                return None
            else:
                dtype = array.dtype
                if array.is_neg() or (dtype.is_complex and array.is_conj()):
                    return None
                facts += array.shape, array.stride(), dtype, array.get_device()
    except RuntimeError:  # A nested tensor has no strides.
        return None
    return tuple(facts)


_NO_FACTS = (None, None, None, None)


def _shape_key(operation: Operation[P, C], key: tuple[Any, ...]) -> Hashable:
    """Return a call's key without the sizes of the axes that are not fixed, or None if the call has no such key."""
    fixed_axes, joins = operation.fixed_axes, operation.joins_axes
    if not fixed_axes:
        return None
    _, facts, _, *parts = key  # Dtypes differ between libraries.
    place = iter(facts)
    for shape, strides, dtype, device, fixed in zip(place, place, place, place, fixed_axes):  # noqa: B905 (slower)
        if shape is None or fixed is None or len(shape) < (fixed or 1):
            parts += shape, strides, dtype, device
            continue
        free = (len(shape) - fixed) or 1
        sizes = shape[:free]
        if 0 in sizes:
            return None
        ones = tuple(map((1).__eq__, sizes)) if 1 in sizes else ()
        if joins and free > 1:
            for axis in range(free - 1):
                # Leading axes of one element may have any stride.
                has_begun = not ones or False in ones[: axis + 1]
                if has_begun and strides[axis] != shape[axis + 1] * strides[axis + 1]:
                    return None
        # If a fixed axis is outermost in memory, its stride depends on the sizes that are not fixed.
        parts += free, ones, shape[free:], strides[free - 1 :] if joins else strides[free - 1], dtype, device
    return tuple(parts)


def _span(shape: Sequence[int] | None, strides_bytes: Sequence[int], itemsize: int) -> tuple[int, int] | None:
    """Return the first byte and the end of an array, relative to its first element, or None without an array."""
    if shape is None:
        return None
    low, end = 0, itemsize
    for extent, stride in zip(shape, strides_bytes):  # noqa: B905
        if stride > 0:
            end += (extent - 1) * stride
        else:
            low += (extent - 1) * stride
    return low, end


def _new(library: str, like: Any, shape: tuple[int, ...], dtype: Any, stream: Any, handle: int) -> Any:
    """Return an uninitialized result on an array's device, allocated on the stream of the launch."""
    if library == "torch":
        if stream is None:
            return like.new_empty(shape, dtype=dtype)
        with working_on(library, like.device.index, handle):
            return like.new_empty(shape, dtype=dtype)
    cupy = sys.modules["cupy"]
    device = like.data.device_id
    if stream is None and cupy.cuda.runtime.getDevice() == device:
        return cupy.empty(shape, dtype)
    with cupy.cuda.Device(device), working_on(library, device, handle):
        return cupy.empty(shape, dtype)
