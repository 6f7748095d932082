"""Run by test_data_movement.py: operations over arrays on the fake driver.

Usage: python movement_on_fake_driver.py [CASE]. Prints what went wrong.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import fake_card
import numpy as np
from fake_card import (
    MIB,
    Foreign,
    allocated_on,
    capability,
    counts,
    current,
    encoded,
    heap,
    record,
    replaced,
    setup,
    streams,
    waits,
)
from fake_driver import in_a_forked_child, raises, run_cases

import cudatma as c
from cudatma import context
from cudatma.kernels import arguments, choice, engine, plans
from cudatma.kernels.all_reduce.config import ALL_REDUCE, Group, Problem
from cudatma.kernels.all_reduce.config import TEMPLATE as ALL_REDUCE_TEMPLATE
from cudatma.kernels.arguments import At, Map, Value
from cudatma.kernels.data_movement import movement, ragged_copy
from cudatma.kernels.gpu import H200
from cudatma.kernels.marlin.dequantize import DEQUANTIZE, DenseProblem, check_dense, dequantize_arguments
from cudatma.kernels.marlin.dequantize import TEMPLATE as DEQUANTIZE_TEMPLATE
from cudatma.runtime.launch import Kernel
from cudatma.target import Target


def Array(mib: int, shape: Sequence[int], dtype: Any = np.float32, *, more: int = 0, **options: Any) -> fake_card.Array:  # noqa: N802
    """Return an array whose address is given in MiB plus bytes."""
    return fake_card.Array(shape, dtype, address=mib * MIB + more, **options)


#: Parameters of the planned launches, and kernels that take them, by template, configuration and target.
parameters: dict[tuple[Any, ...], tuple[Any, ...]] = {}
kernels: dict[tuple[Any, ...], Kernel] = {}
planned = movement._planned


def plan(*arguments: Any) -> Any:
    launches = planned(*arguments)
    parameters.update({(one.template, one.config): one.parameters for one in launches})
    return launches


def kernel_of(template: str, config: Any, target: Target) -> Kernel:
    """Return a kernel that accepts the plan's arguments, because NVRTC does not run next to the fake driver."""
    key = template, config, target.name
    if key not in kernels:
        kinds = [_parameter(value) for value in parameters[template, config]]
        ptx = f".visible .entry {config.entry}({', '.join(kinds)})\n{{\n}}\n"
        kernels[key] = Kernel(b"\177ELF", config.entry, target, ptx=ptx)
    setup.parameters = len(kernels[key].parameters)
    for number, parameter in enumerate(kernels[key].parameters):
        setup.sizes[number] = parameter.size_bytes
    return kernels[key]


def _parameter(value: object) -> str:
    size = len(value) if isinstance(value, bytes) else 128
    many = isinstance(value, bytes | Map)
    return f".param .align 64 .b8 p[{size}]" if many else ".param .u64 p"


movement._planned = plan  # type: ignore[assignment]
plans.load_kernel = arguments.load_kernel = kernel_of  # type: ignore[assignment]
plans.known_kernel = lambda template, config, target: kernels.get((template, config, target.name))  # type: ignore[assignment, misc, union-attr]


def calls() -> int:
    """Return the number of cached calls."""
    return sum(len(known.calls) for known in context.runtime().parts.values() if hasattr(known, "calls"))


def forget() -> None:
    choice.forget()


def launched() -> tuple[Any, ...]:
    """Return everything that the last launch passed to the driver."""
    attributes = [list(each) for each in record.attributes][: record.attribute_count]
    return (
        bytes(record.arguments)[: record.argument_bytes],
        list(record.shape),
        attributes,
        record.stream,
        record.device,
    )


def images(at: int) -> fake_card.Array:
    return Array(at, (2, 9, 9, 8))


#: Operations on arrays at so many MiB: every kernel, and what decides among them.
OPERATIONS: dict[str, Callable[[int, int], object]] = {
    "run": lambda a, b: c.copy(Array(a, (5000,)), out=Array(b, (5000,))),
    "run, odd": lambda a, b: c.copy(Array(a, (5000,), more=4), out=Array(b, (5000,), more=20)),
    "run, offset": lambda a, b: c.copy(Array(a, (90, 64)), out=Array(b, (40, 64)), offset=(7, 0), shape=(40, 64)),
    "window": lambda a, b: c.copy(Array(a, (64, 80)), out=Array(b, (40, 48)), offset=(3, 8), shape=[40, 48]),
    "window, padded": lambda a, b: c.copy(
        Array(a, (64, 80)), out=Array(b, (70, 88)), offset=(-3, -4), shape=(70, 88), pad="nan"
    ),
    "plain": lambda a, b: c.copy(Array(a, (64, 80)), out=Array(b, (60, 77)), offset=(3, 1), shape=(60, 77)),
    "transpose": lambda a, b: c.transpose(Array(a, (64, 80)), out=Array(b, (80, 64))),
    "transpose, plain": lambda a, b: c.transpose(Array(a, (63, 35)), out=Array(b, (35, 63)), via="plain"),
    "reduce run": lambda a, b: c.reduce_into(Array(a, (64, 64)), Array(b, (64, 64)), "add"),
    "reduce window": lambda a, b: c.reduce_into(Array(a, (64, 80)), Array(b, (64, 64)), "add", offset=(-1, 8)),
    "gather": lambda a, b: c.gather(Array(a, (64, 80)), [(0, 0), (3, 4)], (2, 8), out=Array(b, (2, 2, 8))),
    "gather, table": lambda a, b: c.gather(
        Array(a, (64, 80)), Array(a + b, (2, 2), np.int32), (2, 8), out=Array(b, (2, 2, 8)), check=False
    ),
    "halo_tiles": lambda a, b: c.halo_tiles(Array(a, (64, 80)), (16, 16), (1, 4), out=Array(b, (4, 5, 18, 24))),
    "im2col": lambda a, b: c.im2col(images(a), 3, out=Array(b, (2, 7, 7, 3, 3, 8))),
    "broadcast": lambda a, b: c.broadcast(Array(a, (4096,)), 12, out=Array(b, (12, 4096))),
    "tile_copy": lambda a, b: c.tile_copy(Array(a, (64, 80)), Array(b, (64, 80))),
    "prefetch": lambda a, b: c.prefetch(Array(a, (64, 80), more=8)),
    "prefetch window": lambda a, b: c.prefetch(Array(a, (64, 80)), offset=(1, 4), shape=(30, 40)),
}
#: These go through the checks every time and find their plan.
MISALIGNED = {"run, odd", "prefetch"}
ON_SM120 = {
    "run",
    "window",
    "window, padded",
    "transpose",
    "reduce window",
    "gather",
    "im2col",
    "tile_copy",
    "prefetch window",
}


def compare(names: Sequence[str]) -> None:
    """Check that a repeated call with other arrays passes the same arguments to the driver as a first call."""
    for name in names:
        call = OPERATIONS[name]
        forget()
        heap[0] = 1 << 32
        call(32, 64)
        first, maps, count = launched(), encoded.value, record.launches
        assert calls() == (0 if name in MISALIGNED else 1), name
        heap[0] = 1 << 33
        call(48, 96)
        again = launched()
        assert encoded.value == maps, name
        assert record.launches == 2 * count - before_first[0], name
        assert again[0] != first[0], name
        assert again[1:] == first[1:], name
        forget()
        heap[0] = 1 << 33
        call(48, 96)
        assert launched() == again, name
        before_first[0] = record.launches


before_first = [0]


def case_a_repeated_call_launches_what_a_first_one_would() -> None:
    compare(list(OPERATIONS))


def case_where_maps_know_their_allocation_the_driver_changes_them() -> None:
    capability.value = 120
    compare(sorted(ON_SM120))
    # Two maps each, but one of gathers and prefetches and none of runs; three launches each.
    assert replaced.value == 3 * (2 * 6 + 2)
    assert c.detect().name == "sm_120a"


def case_results_are_made_anew() -> None:
    source = Array(32, (64, 80))
    found = [c.copy(source), c.copy(source), c.transpose(source), c.transpose(source)]
    assert len({result.data.ptr for result in found}) == 4
    assert [result.shape for result in found] == [(64, 80)] * 2 + [(80, 64)] * 2
    assert calls() == 2


def case_addresses_are_still_looked_at() -> None:
    source = Array(32, (64, 80))
    c.copy(source, out=Array(64, (64, 80)), via="tma")
    before = record.launches
    raises(c.ArgumentError, "with its own memory", lambda: c.copy(source, out=Array(32, (64, 80), more=160), via="tma"))
    raises(c.DescriptorError, "16", lambda: c.copy(source, out=Array(64, (64, 80), more=4), via="tma"))
    raises(c.DescriptorError, "16", lambda: c.copy(Array(32, (64, 80), more=8), out=Array(64, (64, 80)), via="tma"))
    raises(c.ArgumentError, "device 0 (the device of src)", lambda: c.copy(source, out=Array(64, (64, 80), device=1)))
    raises(
        c.ArgumentError, "src.device", lambda: c.copy(source, out=Array(64, (64, 80)), via="tma", backend="emulator")
    )
    assert record.launches == before
    # The two halves of a matrix: not one after the other, but apart.
    halves = [Array(32, (64, 40), more=160 * i, strides=(320, 4)) for i in range(2)]
    c.copy(halves[0], out=halves[1], via="tma")
    c.copy(halves[1], out=halves[0], via="tma")
    c.copy(halves[0], out=Array(48, (64, 40), strides=(320, 4)), via="tma")
    assert calls() == 2
    moved = Array(32, (64, 40), more=80, strides=(320, 4))
    raises(c.ArgumentError, "with its own memory", lambda: c.copy(halves[0], out=moved, via="tma"))
    # A window of an array may go to another part of the same array.
    whole, below = Array(32, (64, 80)), Array(32, (32, 80), more=32 * 320)
    for _ in range(2):
        c.copy(whole, out=below, shape=(32, 80))
    raises(
        c.ArgumentError, "with its own memory", lambda: c.copy(whole, out=Array(32, (32, 80), more=320), shape=(32, 80))
    )
    assert record.launches == before + 5


def case_streams_and_devices() -> None:
    for _ in range(2):
        c.copy(Array(32, (64,)), out=Array(64, (64,)))
        assert (record.stream, record.device) == (7, 0)
        c.copy(Array(32, (64,)), out=Array(64, (64,)), stream=0x55)
        assert (record.stream, record.device) == (0x55, 0)
        c.copy(Array(32, (64,), device=1), out=Array(64, (64,), device=1), stream=0x66)
        assert (record.stream, record.device) == (0x66, 1)
    assert calls() == 2
    assert record.loads == 2


#: Operations that make their result.
MAKERS: dict[str, Callable[..., object]] = {
    "copy": lambda src, stream: c.copy(src, stream=stream),
    "transpose": lambda src, stream: c.transpose(src, stream=stream),
    "gather": lambda src, stream: c.gather(src, [(0, 0)], (2, 8), stream=stream),
    "halo_tiles": lambda src, stream: c.halo_tiles(src, (16, 16), (1, 4), stream=stream),
    "broadcast": lambda src, stream: c.broadcast(src, 4, stream=stream),
}


def case_results_are_allocated_on_the_stream_of_the_launch() -> None:
    for name, make in MAKERS.items():
        for _ in range(2):  # a first call and a repeated one
            for stream, wanted in ((None, 7), (7, 7), (0x55, 0x55), (0, 0)):
                allocated_on.clear()
                make(Array(32, (64, 80)), stream)
                assert set(allocated_on) == {wanted}, name
                assert record.stream == wanted, name
    assert current[0] == 7


def case_a_producers_stream_is_waited_for_by_the_launchs_stream() -> None:
    given, out, starts = Foreign((64, 80), 0x66), Array(64, (64, 80)), Foreign((1, 2), 0x68, np.int32)
    calls: dict[str, Callable[[int | None], object]] = {
        name: lambda stream, make=make: make(given, stream)  # type: ignore[misc]
        for name, make in MAKERS.items()
    } | {
        "out": lambda stream: c.copy(Array(64, (64, 80)), out=given, stream=stream),
        "reduce_into": lambda stream: c.reduce_into(given, out, "add", stream=stream),
        "tile_copy": lambda stream: c.tile_copy(given, out, stream=stream),
        "prefetch": lambda stream: c.prefetch(given, stream=stream),
    }
    for name, call in calls.items():
        for _ in range(2):
            assert waits(lambda call=call: call(0x55)) == (0x55, 0x66), name  # type: ignore[misc]
            assert waits(lambda call=call: call(None)) == (7, 0x66), name  # type: ignore[misc]
            assert waits(lambda call=call: call(0x66)) is None, name  # type: ignore[misc]
    for _ in range(2):
        assert waits(lambda: c.copy(out, out=Array(96, (64, 80)), stream=0x55)) is None
        found = waits(lambda: c.gather(out, starts, (2, 8), check=False, stream=0x55))
        assert found == (0x55, 0x68), "a table on the device"


def case_a_ragged_copy_waits_where_it_is_made() -> None:
    def plan(*given: Any) -> Any:
        launch = planned_ragged(*given)
        parameters[launch.template, launch.config] = launch.parameters
        return launch

    planned_ragged, ragged_copy._arguments = ragged_copy._arguments, plan  # type: ignore[assignment]
    copy = c.RaggedCopy([Foreign((64, 64), 0x66)], [Array(64, (64, 64))])
    assert counts.synchronized == 0x66
    streams[0].handle, streams[0].id, streams[0].capture = 0x67, 7, 100
    c.RaggedCopy([Foreign((64, 64), 0x67)], [Array(64, (64, 64))])
    assert counts.synchronized != 0x67, "a stream that is captured cannot be waited for"
    assert waits(lambda: copy.run(stream=0x50)) is None
    assert (record.stream, record.launches) == (0x50, 1)


def case_dequantize() -> None:
    c.PackedWeight.device = property(lambda self: 0)  # type: ignore[assignment, method-assign]
    w = c.quantize(np.ones((128, 64), np.float16), group_size=64)
    out = Array(64, (128, 64), np.float16)
    problem = DenseProblem.of(w, check_dense(out, w))
    spec = DEQUANTIZE.configure(problem, H200, {})
    parameters[DEQUANTIZE_TEMPLATE, spec] = dequantize_arguments(problem, spec, 1).parameters
    for _ in range(2):
        for stream, wanted in ((None, 7), (0x50, 0x50), (0, 0)):
            allocated_on.clear()
            c.dequantize(w, stream=stream)
            assert (allocated_on, record.stream) == ([wanted], wanted)
            c.dequantize(w, out=out, stream=stream)
            assert record.stream == wanted
    given = Foreign((128, 64), 0x66, np.float16)
    assert waits(lambda: c.dequantize(w, out=given, stream=0x50)) == (0x50, 0x66)


def case_all_reduce() -> None:
    """Messages of other lengths reuse the launch with another number of words; other groups have their own launches."""
    groups = [Group(2, bytes([number] * 64)) for number in (1, 2)]
    spec = ALL_REDUCE.configure(Problem(groups[0], "float16", 4), H200, {})
    parameters[ALL_REDUCE_TEMPLATE, spec] = groups[0].member, At("x"), Value(0)
    for turn, (number, elements) in enumerate(((1, 8), (1, 8), (1, 16), (2, 8), (1, 16)), 1):
        x = Array(32 * turn, (elements,), np.float16)
        assert engine.run(ALL_REDUCE, (x,), None, (number,), resource=groups[number - 1]) is None
        words = x.data.ptr, elements // 2
        expected = bytes([number] * 64) + b"".join(word.to_bytes(8, "little") for word in words)
        assert (launched()[0], record.launches, record.loads) == (expected, turn, 1)
    assert calls() == 3


def case_captures() -> None:
    setup.capturing = 1
    call = OPERATIONS["window"]
    raises(c.LaunchError, "under graph capture", lambda: call(32, 64))
    assert (record.loads, calls()) == (0, 0)
    setup.capturing = 0
    call(32, 64)
    setup.capturing = 1
    call(48, 96)
    c.copy(Array(32, (64, 80)), out=Array(64, (20, 24)), offset=(3, 8), shape=(20, 24), stream=5)
    assert (record.loads, record.launches, calls()) == (1, 3, 2)


def case_no_array_is_kept() -> None:
    source, out = Array(32, (64, 80)), Array(64, (80, 64))
    c.transpose(source, out=out)
    gone = weakref.ref(source), weakref.ref(out)
    del source, out
    gc.collect()
    assert [each() for each in gone] == [None, None]
    assert calls() == 1


def case_fork() -> None:
    OPERATIONS["run"](32, 64)

    def refused() -> None:
        assert calls() == 0
        raises(c.LaunchError, "spawn", lambda: OPERATIONS["run"](32, 64))

    in_a_forked_child(refused)
    OPERATIONS["run"](32, 64)


if __name__ == "__main__":
    run_cases(globals(), sys.argv[1:])
