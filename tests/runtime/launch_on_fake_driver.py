"""Run by test_launch.py: launches a pickled kernel through the fake driver.

Usage: python launch_on_fake_driver.py KERNEL.pickle [CASE]. Prints what went wrong.
"""

from __future__ import annotations

import ctypes
import pickle
import struct
import sys
from pathlib import Path
from typing import Any

from fake_driver import Record, Setup, in_a_forked_child, raises, run_cases
from threads import in_threads

from cudatma import context
from cudatma.build.kernel import default_target
from cudatma.errors import ArgumentError, DriverError, LaunchError, PipelineHang
from cudatma.runtime.hang import PANEL_NAME
from cudatma.runtime.launch import Kernel


class Array:
    """A device array; the fake driver tells its device by bit 40 of its address."""

    def __init__(self, pointer: int) -> None:
        self.__cuda_array_interface__ = {"shape": (4,), "typestr": "<f4", "data": (pointer, False), "version": 3}


class Map:
    def __init__(self, device: int = 0) -> None:
        self.data, self.device, self.owner = (ctypes.c_ubyte * 128)(*range(128)), device, None


ON_1 = 1 << 40
library = ctypes.CDLL("libcuda.so.1")
record, setup = Record.in_dll(library, "fake_record"), Setup.in_dll(library, "fake_setup")
kernel = pickle.loads(Path(sys.argv[1]).read_bytes())
setup.parameters = len(kernel.parameters)
for number, parameter in enumerate(kernel.parameters):
    setup.sizes[number] = parameter.size_bytes


def args(base: int = 0, device: int = 0) -> tuple[Any, ...]:
    return Array(base + 0x7000), -3, 1.5, Map(device)


def packed(pointer: int) -> bytes:
    return struct.pack("<Qif", pointer, -3, 1.5) + bytes(range(128))


def sent() -> bytes:
    return bytes(record.arguments)[: record.argument_bytes]


def debug_kernel() -> Kernel:
    """The same kernel, as one that was rendered with debug=True tells by its PTX."""
    ptx = f"{kernel.ptx}\n.visible .global .align 8 .b8 {PANEL_NAME}[48];\n"
    layout = [("full", 0, 16)]
    return Kernel(kernel.cubin, kernel.entry, kernel.target, ptx=ptx, source="a\nb\nwait(full);\n", smem_layout=layout)


def case_debug_launches_wait_and_tell() -> None:
    debug, hangs = debug_kernel(), ctypes.c_int.in_dll(library, "fake_hangs")
    assert debug.is_debug
    assert not kernel.is_debug
    debug.launch((6, 2), 64, args(), stream=0x55, programmatic=True)
    assert (record.launches, record.stream, record.attribute_count) == (1, 0x55, 0)  # no programmatic one
    hangs.value = 1
    for launch in (
        lambda: debug.launch(6, 64, args(), stream=0x55),
        lambda: debug.plan(6, 64, args()).launch(0x55),
        lambda: pickle.loads(pickle.dumps(debug)).launch(6, 64, args(), stream=0x55),
    ):
        raises(PipelineHang, "full[1], parity 1, by warp 1 lane 1 of block (2, 0, 0)", launch)
        raises(PipelineHang, "line 3: wait(full);", launch)
    hangs.value = 0
    debug.launch(6, 64, args(), stream=0x55)
    before = record.launches
    setup.capturing = 1
    raises(LaunchError, "under graph capture", lambda: debug.launch(6, 64, args(), stream=0x55))
    assert record.launches == before


def case_launch() -> None:
    kernel.launch((6, 2), 64, args(), cluster=2, shared_bytes=50000, stream=0x55, programmatic=True)
    assert sent() == packed(0x7000)
    assert list(record.shape) == [6, 2, 1, 64, 1, 1, 50000]
    assert (record.stream, record.device, record.attribute_count) == (0x55, 0, 2)
    assert list(record.attributes[0])[:5] == [4, 0, 2, 1, 1]
    assert list(record.attributes[1])[:3] == [6, 0, 1]
    assert record.dynamic_shared_bytes == 227 * 1024 - 1024
    kernel.launch(1, 1, args())
    assert (record.stream, record.attribute_count, record.loads) == (0, 0, 1)
    assert default_target().name == "sm_90a"


def case_devices() -> None:
    kernel.launch(1, 1, args())
    kernel.launch(1, 1, args(ON_1, 1))
    assert (record.device, record.loads, context.current_device()) == (1, 2, 0)
    raises(LaunchError, "device", lambda: kernel.launch(1, 1, (*args(ON_1)[:3], Map(0))))
    raises(ArgumentError, "got 0xbad", lambda: kernel.launch(1, 1, (Array(0xBAD), *args()[1:])))
    raises(LaunchError, "device", lambda: kernel.plan(1, 1, args(), device=1))
    raises(LaunchError, "0 to 1", lambda: kernel.load(2))
    # The plan is for device 1 while device 0 is current: the first try fails, the second has the right context.
    plan = kernel.plan(1, 1, args(ON_1, 1))
    plan.launch(0)
    assert (record.device, context.current_device()) == (1, 0)


def case_plan() -> None:
    plan = kernel.plan(3, 32, args(), shared_bytes=16)
    before = record.launches
    plan.launch(7)
    assert (sent(), record.stream) == (packed(0x7000), 7)
    plan.arguments[0].value = 0x9000
    plan.arguments[1].value = 5
    plan.arguments[3][0] = 0x1122334455667788
    plan.launch(8)
    expected = struct.pack("<QifQ", 0x9000, 5, 1.5, 0x1122334455667788) + bytes(range(8, 128))
    assert (sent(), record.stream, record.launches) == (expected, 8, before + 2)
    raises(DriverError, "CUDA_ERROR_LAUNCH_FAILED: said by the fake", lambda: plan.launch(0xDEAD))
    # A thread without a context.
    in_threads(1, lambda _: plan.launch(9))
    assert record.stream == 9


def case_threads() -> None:
    in_threads(8, lambda _: kernel.launch(1, 1, args()))
    assert (record.launches, record.loads) == (8, 1)


def case_refused_before_the_driver() -> None:
    calls: list[tuple[str, dict[str, Any]]] = [
        ("256", {"block": 257}),
        ("shared_bytes", {"shared_bytes": 226 * 1024 + 1}),
        ("cluster", {"grid": 3, "cluster": 2}),
        ("args", {"args": args()[:3]}),
        ("stream", {"stream": "default"}),
    ]
    for text, change in calls:
        call = {"grid": 1, "block": 1, "args": args()} | change
        raises(Exception, text, lambda call=call: kernel.launch(**call))
    assert record.launches == 0
    setup.sizes[1] = 8
    kernel._functions.clear()
    raises(LaunchError, "8 in the cubin", lambda: kernel.launch(1, 1, args()))


def case_capture() -> None:
    setup.capturing = 1
    raises(LaunchError, "kernel.load(0)", lambda: kernel.launch(1, 1, args(), stream=5))
    kernel.load(0)
    kernel.launch(1, 1, args(), stream=5)
    assert record.launches == 1


def case_fork() -> None:
    plan = kernel.plan(1, 1, args())

    def refused() -> None:
        for call in (lambda: kernel.launch(1, 1, args()), lambda: plan.launch(0), lambda: kernel.load(0)):
            raises(LaunchError, "spawn", call)

    in_a_forked_child(refused)
    plan.launch(0)


def case_fork_before_the_first_launch() -> None:
    in_a_forked_child(lambda: kernel.launch(1, 1, args()))


def case_fork_of_another_librarys_process() -> None:
    library.cuInit(0)
    in_a_forked_child(lambda: raises(DriverError, "spawn", lambda: kernel.launch(1, 1, args())))


def case_a_producers_stream() -> None:
    array = Array(0x7000)
    array.__cuda_array_interface__["stream"] = 1  # the default stream, which is the current one
    kernel.launch(1, 1, (array, *args()[1:]))
    assert (record.recorded_on, record.waited_on) == (0, 0)
    array.__cuda_array_interface__["stream"] = 0x66
    kernel.launch(1, 1, (array, *args()[1:]))
    assert (record.recorded_on, record.waited_on, record.events) == (0x66, 1 + 1, 0)
    kernel.launch(1, 1, (array, *args()[1:]), stream=0x55)
    assert (record.recorded_on, record.waited_on, record.events) == (0x66, 0x55 + 1, 0)
    # That of the array of a tensor map, as the array says it now.
    described, owner = Map(), Array(0x7000)
    described.owner = owner  # type: ignore[assignment]
    owner.__cuda_array_interface__["stream"] = 0x67
    kernel.launch(1, 1, (*args()[:3], described), stream=0x55)
    assert (record.recorded_on, record.waited_on, record.events) == (0x67, 0x55 + 1, 0)


def case_facts() -> None:
    found = kernel.resources(device=1)
    assert (found.registers, found.static_shared_bytes, found.max_threads) == (40, 1024, 256)
    assert kernel.occupancy(128) == 16
    raises(LaunchError, "block", lambda: kernel.occupancy(512))


if __name__ == "__main__":
    run_cases(globals(), sys.argv[2:])
