"""The path of a call: what a family supplies, and ``run()``, which takes a call from its arrays to a launch.

A call is served by the first of these that knows it; they differ only in how much was kept of earlier calls:

1. A call with the layouts and options of an earlier one: its launch, with other addresses.
2. A call that differs from an earlier one in sizes only: the plan of the shape, with new sizes and addresses.
3. Any other call: the family's checks, configuration and arguments, and a plan that is kept.

Only this module knows keys, plans, workspaces, backends and the order of streams.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from operator import attrgetter, methodcaller
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np

from cudatma import context
from cudatma.arrays import ArrayInfo, describe, empty_like_library
from cudatma.backend import backend_for
from cudatma.build.kernel import debug_scope, default_target, known_kernel, load_kernel, wants_debug
from cudatma.errors import ArgumentError, LaunchError
from cudatma.kernels.arguments import FLAGS, PARTIALS, ROWS, Arguments, Sizes
from cudatma.kernels.checks import check_backend
from cudatma.kernels.choosing import pinned_scope
from cudatma.kernels.gpu import H200, Gpu, gpu_of, imagined_gpu
from cudatma.kernels.replay import Replay
from cudatma.kernels.stream_workspaces import stream_workspace
from cudatma.kernels.workspace import MarlinWorkspace, is_capturing
from cudatma.library_streams import current_stream, stream_handle, working_on
from cudatma.runtime.streams import order_after_producers
from cudatma.target import Target, detect

P = TypeVar("P", bound=Hashable)
C = TypeVar("C", bound=Hashable)
T = TypeVar("T")
#: Names of the results, and of the memory that the engine provides.
_RESULTS, _SPACES = ("out", "lse"), (PARTIALS, FLAGS, ROWS)
#: Calls and plans that an operation keeps: a call takes some 2 KB.
_MAX_CALLS, _MAX_PLANS = 4096, 512
#: Plans that are tried for a call that differs from earlier ones in sizes only.
_MAX_PLANS_OF_SHAPE = 4


class Checked(NamedTuple, Generic[P]):
    """A call that is valid.

    problem: what has to be computed. arrays: the inputs in the operation's order. out: the caller's result, or None to
    allocate one. shape, dtype: shape and dtype of the result; a shape of None means no result. lse: shape of a second
    result in fp32, or None. source: data for arranged().
    """

    problem: P
    arrays: tuple[ArrayInfo | None, ...]
    out: ArrayInfo | None
    shape: tuple[int, ...] | None
    dtype: Any
    lse: tuple[int, ...] | None = None
    source: Any = None


class Weight(NamedTuple):
    """Arrays that stay from call to call. format: what a plan depends on, hashed by identity. addresses: in the order
    of the operation's ``steady``. arrays: the same by name."""

    format: Hashable
    addresses: tuple[int, ...]
    arrays: dict[str, ArrayInfo]


class Operation(ABC, Generic[P, C]):
    """The interface of a public function: a family implements it, and run() calls it.

    A problem is frozen and hashable and holds no address. Everything but check() and reference() is pure.
    """

    #: The public function.
    name: ClassVar[str]
    #: Names of the inputs in the order of run(), and of a weight's arrays.
    inputs: ClassVar[tuple[str, ...]]
    steady: ClassVar[tuple[str, ...]] = ()
    #: The number of trailing axes of each input and of out that are part of a shape. The leading axes may differ from
    #: call to call. None: all axes are part of the shape.
    fixed_axes: ClassVar[tuple[int | None, ...]] = ()
    #: Whether a launch treats the leading axes as one, which requires that they follow each other without gaps.
    #: If not, resized() checks the strides of all axes but the last leading one.
    joins_axes: ClassVar[bool] = True
    #: SMs of the GPU that the emulator imagines.
    emulated_sm_count: ClassVar[int] = H200.sm_count

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arrays whose addresses differ from call to call, in the order of a launch."""
        return (*self.inputs, *_RESULTS, *_SPACES)

    def named(self, checked: Checked[P]) -> dict[str, ArrayInfo]:
        """Return the inputs and the result of a call by name."""
        arrays = dict(zip(self.inputs, checked.arrays, strict=True)) | {"out": checked.out}
        return {name: info for name, info in arrays.items() if info is not None}

    def addresses(self, named: Mapping[str, ArrayInfo]) -> tuple[int, ...]:
        """Return the addresses of inputs and results in the order of a launch, 0 for what the call lacks."""
        return tuple([info.pointer if (info := named.get(name)) else 0 for name in (*self.inputs, *_RESULTS)])

    @abstractmethod
    def check(self, inputs: tuple[Any, ...], out: Any, options: tuple[Any, ...], subject: Any) -> Checked[P]:
        """Validate a call. ``subject`` is run()'s. Raises ArgumentError, ArgumentTypeError."""

    @abstractmethod
    def configure(self, problem: P, gpu: Gpu, memo: dict[Any, Any]) -> C:
        """Return the configuration for a problem, in constant time for a new M of a known shape.

        ``memo`` is kept for problems of the same plan_key().
        """

    @abstractmethod
    def kernels(self, problem: P, config: C) -> tuple[tuple[str, Any], ...]:
        """Return (template, spec) of the kernels that a call launches, in order."""

    @abstractmethod
    def arguments(self, problem: P, config: C, gpu: Gpu, resident: tuple[int, ...]) -> tuple[Arguments, ...]:
        """Return the launches in order, if any. ``resident`` holds the CTAs of each kernel that run at a time."""

    @abstractmethod
    def reference(self, problem: P, arrays: Mapping[str, ArrayInfo]) -> None:
        """Compute the result with NumPy. The arrays are in host memory."""

    def sizes(
        self, problem: P, config: C, gpu: Gpu, resident: tuple[int, ...], memo: dict[Any, Any]
    ) -> tuple[Sizes, ...]:
        """Return the sizes of arguments(), which is all that differs between problems of one plan_key().

        ``memo`` is kept for problems of the same plan_key() and configuration.
        """
        return tuple([one.sizes for one in self.arguments(problem, config, gpu, resident)])

    def plan_key(self, problem: P) -> Hashable:
        """Return what all problems that share a plan have in common."""
        return problem

    def resized(
        self, problem: P, shapes: Sequence[Any], strides_bytes: Sequence[Any], numbers: tuple[int, ...]
    ) -> tuple[P, tuple[int, ...], tuple[int, ...] | None] | None:
        """Return the problem with other sizes and the shapes of its results, or None to have check() look at the call.

        ``shapes`` and ``strides_bytes`` describe the inputs and out, None for arrays that the call lacks. Only leading
        axes differ from the call with this problem, and an axis of one element remains one. ``numbers``: as in run().
        """
        return None

    def kernels_up_to(self, checked: Checked[P], max_m: int, gpu: Gpu) -> Iterable[tuple[str, Any]]:
        """Yield (template, spec) of every kernel that calls like this one, with any size up to a bound, may launch.

        Kernels may be repeated. Only operations that warm_up() takes have this.
        """
        raise NotImplementedError

    def masks(self, problem: P) -> tuple[int, ...]:
        """Return, for each input and for out, the bits of its address that have to be 0 in a repeated call."""
        return (15,) * (len(self.inputs) + 1)

    def arranged(self, checked: Checked[P], backend: str, stream: int | None) -> Checked[P]:
        """Return the call with inputs that the kernels can read, copied on a stream where needed."""
        return checked

    def without_kernel(self, problem: P, arrays: Mapping[str, ArrayInfo], stream: int | None) -> bool:
        """Compute a result that needs no kernel; return whether it was one."""
        return False


#: Gets the operation, the valid call and the device of each call in this context whose backend is named, instead of
#: a launch: warm_up() is such a call.
takes_calls: ContextVar[Callable[[Operation[Any, Any], Checked[Any], int], None] | None]
takes_calls = ContextVar("cudatma_takes_calls", default=None)


def run(
    operation: Operation[P, C],
    inputs: tuple[Any, ...],
    out: Any,
    options: tuple[Any, ...],
    stream: Any = None,
    backend: str | None = None,
    weight: Weight | None = None,
    subject: Any = None,
    workspace: MarlinWorkspace | None = None,
    numbers: tuple[int, ...] = (),
) -> Any:
    """Compute an operation; return ``out``, (out, lse), or None for an operation without a result.

    Parameters
    ----------
    operation : Operation
        What to compute.
    inputs : tuple
        Arrays in the operation's order, None for those that the call lacks.
    out : array or None
        The result. None makes one.
    options : tuple
        What the result depends on besides the arrays. Equal options have to mean the same: 1, 1.0 and True are equal.
        check() judges options without a hash in every call.
    stream : stream, optional
        Default: the current stream of the first array's library.
    backend : str, optional
        ``"cuda"``, ``"emulator"``, ``"reference"`` or ``"auto"``. Default: ``$CUDATMA_BACKEND``, else ``"auto"``.
    weight : Weight, optional
        Arrays that stay from call to call.
    subject : object, optional
        The object that check() validates the call against.
    workspace : MarlinWorkspace, optional
        Default: the stream's own; during capture, one per graph branch.
    numbers : tuple of int
        Options that may differ from call to call like sizes. check() gets them in front of the options.
    """
    key = None
    if backend is None and workspace is None and debug_scope.get() is None and pinned_scope.get() is None:
        first = inputs[0] if inputs else out
        library = _libraries.get(first.__class__) or library_of(first)
        facts = _facts(library, (*inputs, out)) if library else None
        if facts is not None:
            known = context.in_use.parts.get(operation) or calls_of(operation)
            key = library, facts, numbers, options, weight and weight.format
            try:
                call = known.calls.get(key) or known.resized_call(key)
            except TypeError:  # an option that has no hash, which check() judges
                call = key = None
            if call is not None:
                done = call.run(library, inputs, out, stream, weight)
                if done is not NotImplemented:
                    return done
    return _first(operation, inputs, out, (*numbers, *options), stream, backend, weight, subject, workspace, key)


def _first(
    operation: Operation[P, C],
    inputs: tuple[Any, ...],
    out: Any,
    options: tuple[Any, ...],
    stream: Any,
    backend: str | None,
    weight: Weight | None,
    subject: Any,
    workspace: MarlinWorkspace | None,
    key: tuple[Any, ...] | None,
) -> Any:
    """Compute an operation with all checks, and keep its launch for later calls."""
    chosen = backend_for(operation.name, backend)
    given = operation.check(inputs, out, options, subject)
    first = next(info for info in (*given.arrays, given.out) if info is not None)
    check_backend(first, (*operation.inputs, "out")[0], chosen)
    device = first.device
    if (take := takes_calls.get()) is not None and device is not None:
        return take(operation, given, device)
    handle = None if device is None else stream_handle(stream, library_for(first, given.out), device)
    result = given.out
    if result is None and given.shape is not None:
        out = empty_like_library(first, given.shape, given.dtype, handle)
        result = describe(out)
        given = given._replace(out=result)
    lse = None if given.lse is None else empty_like_library(first, given.lse, np.float32, handle)
    done = out if lse is None else (out, lse)
    if result is not None and not result.size_elems:
        return done
    if device is not None and handle is not None:
        order_after_producers(handle, device, result, *given.arrays)
    checked = operation.arranged(given, chosen, handle)
    named = operation.named(checked)
    if lse is not None:
        named["lse"] = describe(lse)
    if weight is not None:
        named |= weight.arrays
    if chosen == "reference":
        operation.reference(checked.problem, named)
    elif operation.without_kernel(checked.problem, named, handle):
        pass
    elif device is None or handle is None:
        emulate(operation, checked.problem, named)
    else:
        launch = launch_of(operation, checked.problem, device, handle, named, weight)
        launch.run(operation.addresses(named), handle, weight, workspace)
        if key is not None and checked is given:
            dtypes = None if out is None else out.dtype, None if lse is None else lse.dtype
            calls_of(operation).keep(key, launch, checked, dtypes)
    return done


def emulate(
    operation: Operation[P, C],
    problem: P,
    arrays: Mapping[str, ArrayInfo],
    *,
    target: Target | None = None,
    schedules: int = 1,
    **options: Any,
) -> Any:
    """Run a call's launches on the emulator; return the last one's report.

    arrays: inputs, results and a weight's arrays by name, in host memory. target: None is default_target().
    options: of ``EmulatedModule.launch``. Raises HazardError, CompileError.
    """
    target = default_target() if target is None else target
    gpu = imagined_gpu(target, operation.emulated_sm_count)
    config = operation.configure(problem, gpu, {})
    kernels = operation.kernels(problem, config)
    resident = tuple([gpu.sm_count * getattr(spec, "blocks_per_sm", 1) for _, spec in kernels])
    report = None
    arrays = dict(arrays)
    for one in operation.arguments(problem, config, gpu, resident):
        one.config.check_target(target)
        arrays |= {name: info for name, info in host_workspace(one.sizes).items() if name not in arrays}
        report = one.emulate(target, arrays, schedules=schedules, **options)
    return report


def host_workspace(sizes: Sizes) -> dict[str, ArrayInfo]:
    """Return workspace in host memory for one launch: flags are 0, everything else is NaN in every type."""
    needed = {PARTIALS: sizes.partials_bytes, FLAGS: sizes.flags_bytes, ROWS: sizes.rows_bytes}
    return {
        name: describe(np.full(nbytes, 0 if name == FLAGS else 0xFF, np.uint8))
        for name, nbytes in needed.items()
        if nbytes
    }


class Launch(NamedTuple):
    """The launches of a call but for addresses and stream. partials_bytes: None if no workspace is used."""

    replays: tuple[Replay, ...]
    sizes: tuple[Sizes, ...]
    device: int
    partials_bytes: int | None
    rows_bytes: int

    def run(
        self, addresses: tuple[int, ...], stream: int, weight: Weight | None, workspace: MarlinWorkspace | None = None
    ) -> None:
        """Launch with the inputs and results at these addresses."""
        steady = weight.addresses if weight else ()
        if self.partials_bytes is None:
            space: Any = _NO_SPACE
        elif workspace is None:
            space = stream_workspace(self.device, stream, self.partials_bytes)
        else:
            space = workspace
            for sizes in self.sizes:
                workspace.require_room(sizes.partials_bytes, sizes.flags_bytes)
        if not self.rows_bytes:
            addresses = *addresses, space.partials_pointer, space.flags_pointer, 0
            for replay, sizes in zip(self.replays, self.sizes):  # noqa: B905 (a keyword takes time)
                replay.run(sizes, addresses, stream, steady)
            return
        with space.rows.lock:
            addresses = *addresses, space.partials_pointer, space.flags_pointer, space.rows.room(self.rows_bytes)
            for replay, sizes in zip(self.replays, self.sizes):  # noqa: B905
                replay.run(sizes, addresses, stream, steady)


class _NoSpace(NamedTuple):
    """The workspace of a launch that uses none."""

    partials_pointer: int = 0
    flags_pointer: int = 0


_NO_SPACE = _NoSpace()


class _Loaded(NamedTuple):
    """The kernels of a configuration on a device. resident: CTAs of each that the GPU runs at a time."""

    config: Any
    replays: tuple[Replay, ...]
    resident: tuple[int, ...]
    memo: dict[Any, Any]


class Plan(Generic[P, C]):
    """The loaded kernels and marshalled arguments for calls that differ in sizes and addresses only."""

    __slots__ = ("_gpu", "_loaded", "_memo", "_operation", "_target", "device")

    def __init__(self, operation: Operation[P, C], device: int) -> None:
        self._operation, self.device = operation, device
        self._gpu, self._target = gpu_of(device), detect(device)
        #: The keys are configurations and their identities.
        self._loaded: dict[Any, _Loaded] = {}
        self._memo: dict[Any, Any] = {}

    def launch(self, problem: P) -> Launch | None:
        """Return the launches of a problem whose kernels are loaded, else None."""
        config = self._operation.configure(problem, self._gpu, self._memo)
        loaded = self._loaded.get(id(config))
        if loaded is None:
            loaded = self._loaded.get(config)
            if loaded is None:
                return None
            self._keep(config, loaded)
        sizes = self._operation.sizes(problem, loaded.config, self._gpu, loaded.resident, loaded.memo)
        return self._launch(loaded, sizes)

    def load(self, problem: P, stream: int, named: Mapping[str, ArrayInfo], weight: Weight | None) -> Launch:
        """Return the launches of a problem; compile and load what is missing.

        named: the arrays of the call, at whose addresses tensor maps are encoded. Raises LaunchError if a kernel is
        missing and the stream is under capture.
        """
        operation, gpu, target = self._operation, self._gpu, self._target
        config = operation.configure(problem, gpu, self._memo)
        loaded = self._loaded.get(config)
        if loaded is None:
            kernels, resident = [], []
            for template, spec in operation.kernels(problem, config):
                kernels.append(loaded_kernel(template, spec, target, self.device, stream, operation.name))
                held = kernels[-1].occupancy(spec.threads, shared_bytes=spec.smem_bytes, device=self.device)
                if held < 1:
                    raise ArgumentError("device", self.device, f"a GPU that holds a CTA of {spec.entry}")
                resident.append(gpu.sm_count * min(held, getattr(spec, "blocks_per_sm", held)))
            arguments = operation.arguments(problem, config, gpu, tuple(resident))
            addresses = [info.pointer if (info := named.get(name)) else _ANY_ADDRESS for name in operation.names]
            addresses += () if weight is None else weight.addresses
            names = *operation.names, *operation.steady
            replays = tuple(
                [
                    Replay(one, kernel, self.device, names, addresses, len(operation.steady))
                    for one, kernel in zip(arguments, kernels, strict=True)
                ]
            )
            loaded = self._loaded[config] = _Loaded(config, replays, tuple(resident), {})
        self._keep(config, loaded)
        return self._launch(loaded, operation.sizes(problem, config, gpu, loaded.resident, loaded.memo))

    def _keep(self, config: C, loaded: _Loaded) -> None:
        """Find loaded kernels by the identity of their configuration, too."""
        if len(self._loaded) >= _MAX_PLANS:
            for known in [known for known in self._loaded if known.__class__ is int]:
                self._loaded.pop(known, None)
        self._loaded[id(config)] = loaded._replace(config=config)  # which keeps the identity

    def _launch(self, loaded: _Loaded, sizes: tuple[Sizes, ...]) -> Launch:
        partials = flags = rows = 0
        for one in sizes:
            partials, flags, rows = partials + one.partials_bytes, flags + one.flags_bytes, rows + one.rows_bytes
        return Launch(loaded.replays, sizes, self.device, partials if partials or flags or rows else None, rows)


#: An aligned address for tensor maps whose array does not exist yet.
_ANY_ADDRESS = 1 << 20


def loaded_kernel(template: str, spec: Any, target: Target, device: int, stream: int, function: str) -> Any:
    """Return a loaded kernel. Raises LaunchError if the stream is under capture and the kernel is not loaded."""
    kernel = known_kernel(template, spec, target)
    if (kernel is None or not kernel.is_loaded(device)) and is_capturing(device, stream):
        allowed = f"a stream that captures nothing, for the first {function} of this kind"
        remedy = f"call {function} once, or warm it up, before the capture"
        raise LaunchError("stream", "a stream under graph capture", allowed, remedy)
    kernel = load_kernel(template, spec, target)
    kernel.load(device)
    return kernel


def launch_of(
    operation: Operation[P, C],
    problem: P,
    device: int,
    stream: int,
    named: Mapping[str, ArrayInfo] | None = None,
    weight: Weight | None = None,
) -> Launch:
    """Return the launches of a problem on a device; compile and load what is missing, and keep the plan.

    named: the arrays of the call, at whose addresses tensor maps are encoded. Raises LaunchError if a kernel is missing
    and the stream is under capture, CompileError, DriverError.
    """
    context.require_no_fork()
    key = device, operation.plan_key(problem), wants_debug(None), pinned_scope.get()
    plans = calls_of(operation).plans
    plan = plans.get(key)
    if plan is None:
        plan = Plan(operation, device)
        plans.put(key, plan)
    return plan.launch(problem) or plan.load(problem, stream, named or {}, weight)


class Call:
    """A launch, and what a repeated call can still get wrong: where its arrays are."""

    __slots__ = (
        *("_address", "_device", "_dtype", "_launch", "_lse", "_mask", "_out", "_out_end", "_out_low", "_places"),
        *("_present", "_shape", "_single"),
    )

    def __init__(
        self,
        library: str,
        launch: Launch,
        shape: tuple[int, ...] | None,
        lse: tuple[int, ...] | None,
        dtypes: tuple[Any, Any],
        extents: Sequence[tuple[int, int] | None],
        masks: tuple[int, ...],
    ) -> None:
        """shape, lse: shapes of the results. dtypes: dtypes of both, as objects of the arrays' library. extents: first
        byte and end of each input and of out, relative to its address, or None. masks: as Operation.masks()."""
        self._address, self._launch, self._device = _ADDRESS[library], launch, launch.device
        self._shape, self._dtype = shape, dtypes[0]
        self._lse = None if lse is None else (lse, dtypes[1])
        *read, written = extents
        self._out, self._mask = len(read), masks[-1]
        self._out_low, self._out_end = written or (0, 0)
        self._places = [0] * (len(read) + len(_RESULTS) + len(_SPACES))
        self._present = [(at, *one, mask) for at, (one, mask) in enumerate(zip(read, masks, strict=False)) if one]
        is_single = launch.partials_bytes is None and len(launch.replays) == 1
        self._single = (launch.replays[0].run, launch.sizes[0]) if is_single else None

    def run(self, library: str, inputs: tuple[Any, ...], out: Any, stream: Any, weight: Weight | None) -> Any:
        """Launch; return the results, or NotImplemented if check() has to look at the addresses."""
        device, address = self._device, self._address
        handle = current_stream(library, device) if stream is None else stream_handle(stream, library, device)
        if out is None and self._shape is not None:
            out = _new(library, inputs[0], self._shape, self._dtype, stream, handle)
        to = 0 if out is None else address(out)
        if to & self._mask:
            return NotImplemented
        begin, end, places = to + self._out_low, to + self._out_end, self._places[:]
        for at, low, high, mask in self._present:
            places[at] = place = address(inputs[at])
            if place & mask or (place + low < end and begin < place + high):
                return NotImplemented
        at = self._out
        places[at] = to
        if self._lse is None:
            done = out
        else:
            lse = _new(library, inputs[0], *self._lse, stream, handle)
            places[at + 1] = address(lse)
            done = out, lse
        if self._single is not None:
            replay, sizes = self._single
            replay(sizes, tuple(places), handle, weight.addresses if weight else ())
        else:
            self._launch.run(tuple(places[: at + 2]), handle, weight)
        return done


#: Functions that return the address of an array, by its library.
_ADDRESS: dict[str, Callable[[Any], int]] = {"cupy": attrgetter("data.ptr"), "torch": methodcaller("data_ptr")}


class _Shape(NamedTuple):
    """A call whose sizes may change: its plan, its problem, and what calls with other sizes have in common with it."""

    plan: Plan[Any, Any]
    problem: Any
    dtypes: tuple[Any, Any]
    itemsizes: tuple[int, ...]
    masks: tuple[int, ...]


class _OfOperation(Generic[P, C]):
    """The calls and plans of one operation, a part of the Runtime."""

    #: forget() of choice_table drops it.
    holds_choices = True

    def __init__(self, operation: Operation[P, C]) -> None:
        self._operation = operation
        self.calls: PlanCache[Call] = PlanCache(_MAX_CALLS)
        self.plans: PlanCache[Plan[P, C]] = PlanCache(_MAX_PLANS)
        #: A shape may have several plans: a window that is longer than a sequence excludes none of its keys.
        self._shapes: PlanCache[tuple[_Shape, ...]] = PlanCache(_MAX_PLANS)

    def keep(self, key: tuple[Any, ...], launch: Launch, checked: Checked[P], dtypes: tuple[Any, Any]) -> None:
        """Keep a call, and its shape for calls with other sizes."""
        operation, infos = self._operation, (*checked.arrays, checked.out)
        masks = operation.masks(checked.problem)
        if any(info is not None and info.pointer & mask for info, mask in zip(infos, masks, strict=True)):
            return  # a plan for misaligned arrays serves aligned ones, too, but slower
        extents = [None if info is None else _relative(info) for info in infos]
        self.calls.put(key, Call(key[0], launch, checked.shape, checked.lse, dtypes, extents, masks))
        shape = _shape_key(operation, key)
        plan = self.plans.get((launch.device, operation.plan_key(checked.problem), wants_debug(None), None))
        if shape is not None and plan is not None:
            itemsizes = tuple([0 if info is None else info.dtype.itemsize for info in infos])
            others = [one for one in self._shapes.get(shape, ()) if one.plan is not plan]
            made = _Shape(plan, checked.problem, dtypes, itemsizes, masks)
            self._shapes.put(shape, (made, *others[: _MAX_PLANS_OF_SHAPE - 1]))

    def resized_call(self, key: tuple[Any, ...]) -> Call | None:
        """Return, and keep, the call that differs from a known one in its sizes only."""
        operation = self._operation
        shape_key = _shape_key(operation, key)
        alike = None if shape_key is None else self._shapes.get(shape_key)
        if alike is None:
            return None
        known = alike[0]
        is_torch = key[0] == "torch"
        extents: list[tuple[int, int] | None] = []
        shapes: list[Any] = []
        strides_bytes: list[Any] = []
        facts = key[1]
        for shape, strides, itemsize in zip(facts[::4], facts[1::4], known.itemsizes):  # noqa: B905
            if shape is None:
                shapes.append(None)
                strides_bytes.append(None)
                extents.append(None)
                continue
            if is_torch:
                strides = [stride * itemsize for stride in strides]
            low, high = 0, itemsize
            for extent, stride in zip(shape, strides):  # noqa: B905
                if stride > 0:
                    high += (extent - 1) * stride
                else:
                    low += (extent - 1) * stride
            shapes.append(shape)
            strides_bytes.append(strides)
            extents.append((low, high))
        for known in alike:
            resized = operation.resized(known.problem, shapes, strides_bytes, key[2])
            if resized is not None:
                break
        else:
            return None
        problem, shape, lse = resized
        launch = known.plan.launch(problem)
        if launch is None:
            return None
        if shapes[-1] is None:
            nbytes = known.itemsizes[-1]
            for extent in shape:
                nbytes *= extent
            extents[-1] = 0, nbytes
        call = Call(key[0], launch, shape, lse, known.dtypes, extents, known.masks)
        self.calls.put(key, call)
        return call


def calls_of(operation: Operation[P, C]) -> _OfOperation[P, C]:
    """Return the calls and plans of an operation in the Runtime in use."""
    made: _OfOperation[P, C] = context.runtime().part(operation, lambda: _OfOperation(operation))
    return made


class PlanCache(dict[Hashable, T]):
    """The newest values by their keys, at most ``limit`` of them. Read without a lock; safe from many threads."""

    __slots__ = ("limit",)

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def put(self, key: Hashable, value: T) -> None:
        """Keep a value. Drops the older half if there are ``limit`` already."""
        if len(self) >= self.limit:
            for old in list(self)[: max(1, self.limit // 2)]:
                self.pop(old, None)
        self[key] = value


#: CuPy's array class and torch's, once they have been seen, by their library.
_libraries: dict[type, str] = {}


def library_of(array: Any) -> str:
    """Return ``"cupy"``, ``"torch"``, or ``""`` for an array that only describe() can read."""
    kind = array.__class__
    known = _libraries.get(kind)
    if known is None:
        modules = sys.modules
        if "cupy" in modules and kind is modules["cupy"].ndarray:
            known = "cupy"
        elif "torch" in modules and kind in (modules["torch"].Tensor, modules["torch"].nn.Parameter):
            known = "torch"
        else:
            return ""
        _libraries[kind] = known
    return known


def _facts(library: str, arrays: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return shape, strides, dtype and device of each array, one after the other.

    None if they are not all of one library, if torch records a gradient, or if a tensor is lazily negated or
    conjugated, which check() refuses. Reads the few attributes that a launch depends on and nothing else: describe()
    costs more than a launch.
    """
    facts: list[Any] = []
    kind, is_torch = arrays[0].__class__, library == "torch"
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
    except RuntimeError:  # a nested tensor has no strides
        return None
    return tuple(facts)


_NO_FACTS = (None, None, None, None)


def _shape_key(operation: Operation[P, C], key: tuple[Any, ...]) -> Hashable:
    """Return a call's key without the sizes of the axes that are not fixed; None if the call has no such key."""
    fixed_axes, joins = operation.fixed_axes, operation.joins_axes
    if not fixed_axes:
        return None
    _, facts, _, *parts = key
    place = iter(facts)
    for shape, strides, dtype, device, fixed in zip(place, place, place, place, fixed_axes):  # noqa: B905 (slower)
        if shape is None or fixed is None:
            parts += shape, strides, dtype, device
            continue
        free = (len(shape) - fixed) or 1
        if free == 1:
            if (extent := shape[0]) < 2 and not extent:
                return None
            parts += 1, extent == 1, shape[1:], strides, dtype, device
            continue
        ones = 0
        for axis in range(free):
            if (extent := shape[axis]) < 2:
                if not extent:
                    return None
                ones |= 1 << axis
            # Leading axes of one element may have any stride.
            is_joined = joins and axis < free - 1 and ones + 1 != 2 << axis
            if is_joined and strides[axis] != shape[axis + 1] * strides[axis + 1]:
                return None
        # The stride of a fixed axis that is outside of the free ones in memory follows from their sizes.
        steps = strides[free - 1 :] if joins else strides[free - 1]
        parts += free, ones, shape[free:], steps, dtype, device
    return tuple(parts)


def _relative(info: ArrayInfo) -> tuple[int, int]:
    """Return the first byte and the end of an array, relative to its first element."""
    low, end = info.extent
    return low - info.pointer, end - info.pointer


def library_for(first: ArrayInfo, out: ArrayInfo | None) -> str:
    """Return the library whose current stream a call without a stream uses."""
    return "torch" if out is not None and out.kind == "torch" and first.kind not in ("cupy", "torch") else first.kind


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
