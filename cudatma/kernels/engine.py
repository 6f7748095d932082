"""Process a call, from its arrays to the launch.

A call is handled by the first level that recognizes it. The levels differ only in how much they reuse from earlier
calls:

1. A call with the same layouts and options as an earlier call reuses that call's launch with new addresses.
2. A call that differs from an earlier call only in sizes reuses the plan of the shape with new sizes and addresses.
3. Any other call runs the family's checks, configuration and arguments, and creates a plan.

calls.py implements the cache for the first two levels, and plans.py implements plans. Only this module handles backends
and stream ordering.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import numpy as np

from cudatma import context
from cudatma.arrays import ArrayInfo, describe, empty_like_library
from cudatma.backend import backend_for
from cudatma.build.kernel import debug_scope, default_target
from cudatma.errors import ArgumentError
from cudatma.kernels.arguments import FLAGS, PARTIALS, ROWS, Sizes
from cudatma.kernels.calls import calls_of, facts_of, libraries, library_of
from cudatma.kernels.checks import check_backend, check_own_memory
from cudatma.kernels.gpu import imagined_gpu
from cudatma.kernels.operation import C, Checked, Operation, P, Weight
from cudatma.kernels.plans import Launch, ctas_on_sm
from cudatma.kernels.tuning import pinned_scope
from cudatma.kernels.workspace import Workspace
from cudatma.library_streams import stream_handle
from cudatma.runtime.streams import order_after_producers
from cudatma.target import Target

#: Function that receives each validated call instead of the launch. warm_up() sets it.
intercept: ContextVar[Callable[[Operation[Any, Any], Checked[Any], int, Weight | None], None] | None]
intercept = ContextVar("cudatma_intercept", default=None)


def run(
    operation: Operation[P, C],
    inputs: tuple[Any, ...],
    out: Any,
    options: tuple[Any, ...],
    stream: Any = None,
    backend: str | None = None,
    weight: Weight | None = None,
    resource: Any = None,
    workspace: Workspace | None = None,
    size_options: tuple[int, ...] = (),
) -> Any:
    """Compute an operation and return its result: ``out``, (out, lse), or None.

    Parameters
    ----------
    operation : Operation
        The operation to compute.
    inputs : tuple
        Arrays in the operation's order, or None for each missing array.
    out : array or None
        The result. Default: a new array.
    options : tuple
        Further arguments, which are part of the call's key. Options that compare equal, such as 1 and True, must have
        the same meaning. If an option is not hashable, check() validates every call.
    stream : stream, optional
        Stream of the launch. Default: the current stream of the first array's library.
    backend : str, optional
        ``"cuda"``, ``"emulator"``, ``"reference"`` or ``"auto"``. Default: ``$CUDATMA_BACKEND`` if it is set, otherwise
        ``"auto"``.
    weight : Weight, optional
        Weight whose arrays are inputs of many calls.
    resource : object, optional
        Object that check() needs to validate the call, such as a weight.
    workspace : Workspace, optional
        Memory for partial sums and flags. Default: the stream's workspace; during capture, one workspace per graph
        branch.
    size_options : tuple of int
        Options that are sizes, which check() receives before the other options.
    """
    key = None
    if backend is None and workspace is None and debug_scope.get() is None and pinned_scope.get() is None:
        first = inputs[0] if inputs else out
        library = libraries.get(first.__class__) or library_of(first)
        facts = facts_of(library, (*inputs, out)) if library else None
        if facts is not None:
            known = context.in_use.parts.get(operation) or calls_of(operation)
            key = library, facts, size_options, options, weight and weight.format
            try:
                call = known.calls.get(key)
            except TypeError:  # an unhashable option
                key = None
            else:
                call = call or known.resized_call(key)
                if call is not None:
                    done = call.run(inputs, out, stream, weight)
                    if done is not NotImplemented:
                        return done
    if size_options:
        options = *size_options, *options
    return _run_checked(operation, inputs, out, options, stream, backend, weight, resource, workspace, key)


def _run_checked(
    operation: Operation[P, C],
    inputs: tuple[Any, ...],
    out: Any,
    options: tuple[Any, ...],
    stream: Any,
    backend: str | None,
    weight: Weight | None,
    resource: Any,
    workspace: Workspace | None,
    key: tuple[Any, ...] | None,
) -> Any:
    """Compute an operation with all checks, and cache its launch for later calls."""
    chosen = backend_for(operation.name, backend)
    given = operation.check(inputs, out, options, resource)
    if weight is not None and given.out is not None:
        check_own_memory(given.out, {f"{name} of the weight": info for name, info in weight.arrays.items()})
    first = next(info for info in (*given.arrays, given.out) if info is not None)
    field, device = (*operation.inputs, "out")[0], first.device
    if (instead := intercept.get()) is not None:
        if device is None:
            raise ArgumentError(f"{field}.device", "the host", "a CUDA device", "pass arrays on a GPU")
        return instead(operation, given, device, weight)
    check_backend(first, field, chosen)
    handle = None if device is None else stream_handle(stream, library_for(first, given.out), device)
    if device is None and stream is not None:
        stream_handle(stream, first.kind, 0)  # An invalid stream is an error even if the call runs on the host.
    result = given.out
    if result is None and given.shape is not None:
        out = empty_like_library(first, given.shape, given.dtype, handle)
        result = describe(out)
    given_out, given = given.out, given._replace(out=result)
    lse = None if given.lse is None else empty_like_library(first, given.lse, np.float32, handle)
    done = out if lse is None else (out, lse)
    if result is not None and not result.size_elems:
        return done
    if device is not None and handle is not None:
        order_after_producers(handle, device, result, *given.arrays)
    checked = operation.with_readable_inputs(given, chosen, handle)
    named = operation.named(checked)
    if lse is not None:
        named["lse"] = describe(lse)
    if weight is not None:
        named |= weight.arrays
    if chosen == "reference":
        operation.reference(checked.problem, named)
    elif operation.compute_without_kernel(checked.problem, named, handle):
        pass
    elif device is None or handle is None:
        emulate(operation, checked.problem, named)
    else:
        calls = calls_of(operation)
        plan = calls.plan(checked.problem, device)
        launch = plan.load(checked.problem, handle, named, weight)
        launch.run(operation.addresses(named), handle, weight, workspace)
        if key is not None and checked is given:
            dtypes = None if out is None else out.dtype, None if lse is None else lse.dtype
            calls.keep(key, plan, launch, given._replace(out=given_out), dtypes)
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
    """Run a call's launches on the emulator, and return the report of the last launch.

    ``arrays`` contains inputs, results and a weight's arrays by name. The arrays must be in host memory. By default,
    ``target`` is default_target(). ``options`` are options of ``EmulatedModule.launch``. Raises HazardError if there is
    a hazard, and CompileError if a kernel does not compile.
    """
    target = default_target() if target is None else target
    gpu = imagined_gpu(target, operation.emulated_sm_count)
    config = operation.configure(problem, gpu, {})
    kernels = operation.kernels(problem, config)
    # The emulator does not model occupancy, so one CTA runs per SM unless the config requests more.
    resident = tuple([gpu.sm_count * ctas_on_sm(kernel_config, 1) for _, kernel_config in kernels])
    report = None
    arrays = dict(arrays)
    for launch in operation.arguments(problem, config, gpu, resident):
        launch.config.check_target(target)
        arrays |= {name: info for name, info in host_workspace(launch.sizes).items() if name not in arrays}
        report = launch.emulate(target, arrays, schedules=schedules, **options)
    return report


def host_workspace(sizes: Sizes) -> dict[str, ArrayInfo]:
    """Return a workspace in host memory for one launch.

    Flags are 0. All other bytes read as NaN in every floating-point type.
    """
    needed = {PARTIALS: sizes.partials_bytes, FLAGS: sizes.flags_bytes, ROWS: sizes.rows_bytes}
    return {
        name: describe(np.full(nbytes, 0 if name == FLAGS else 0xFF, np.uint8))
        for name, nbytes in needed.items()
        if nbytes
    }


def launch_of(
    operation: Operation[P, C],
    problem: P,
    device: int,
    stream: int,
    named: Mapping[str, ArrayInfo] | None = None,
    weight: Weight | None = None,
) -> Launch:
    """Return the launches of a problem on a device. Missing kernels are compiled and loaded, and the plan is cached.

    ``named`` contains the arrays of the call, whose addresses the tensor maps contain. Raises LaunchError if a kernel
    is missing while the stream is being captured, CompileError if a kernel does not compile, and DriverError if a
    kernel does not load.
    """
    return calls_of(operation).plan(problem, device).load(problem, stream, named or {}, weight)


def library_for(first: ArrayInfo, out: ArrayInfo | None) -> str:
    """Return the library whose current stream is the default of a call."""
    return "torch" if out is not None and out.kind == "torch" and first.kind not in ("cupy", "torch") else first.kind
