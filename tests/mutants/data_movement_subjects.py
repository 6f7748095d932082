"""The operations over arrays as subjects: short rings of small slots, which wrap within some kilobytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from subject import Subject

from cudatma.arrays import describe
from cudatma.kernels.arguments import Arguments
from cudatma.kernels.data_movement.broadcast import BroadcastConfig, plan_broadcast
from cudatma.kernels.data_movement.copy import plan_copy, window_of
from cudatma.kernels.data_movement.gather import plan_boxes
from cudatma.kernels.data_movement.im2col import convolution, plan_im2col
from cudatma.kernels.data_movement.movement import LaunchLimits
from cudatma.kernels.data_movement.plans import plain_plan, window_plan
from cudatma.kernels.data_movement.prefetch import PREFETCH
from cudatma.kernels.data_movement.reduce import plan_reduce
from cudatma.kernels.data_movement.rows import plan_rows
from cudatma.kernels.data_movement.transpose import TransposeConfig, tile_plan
from cudatma.kernels.host import host_bytes
from cudatma.mutants.mutant import Call
from cudatma.target import get_target

_BLOCKS = 2
Array = np.ndarray[Any, Any]


def _limits(target: str) -> LaunchLimits:
    return LaunchLimits(get_target(target), _BLOCKS)


def _numbers(*shape: int) -> Array:
    return np.random.default_rng(3).integers(0, 1000, shape).astype(np.uint32)


def _short(planned: Arguments, **fields: Any) -> Arguments:
    """Return the launch with a ring of three slots, one of which may be in a store."""
    return replace(planned, config=replace(planned.config, **({"stages": 3, "in_flight": 1} | fields)))


def _with_grid(planned: Arguments, grid: int) -> Arguments:
    return replace(planned, sizes=planned.sizes._replace(grid=grid))


#: A launch, and its arrays by name.
_Made = tuple[Arguments, dict[str, Array]]


def _window_copy() -> _Made:
    source, result = _numbers(40, 64), np.ones((45, 72), np.uint32)
    window = window_of(describe(source), describe(result), (-2, -4))
    planned = window_plan(window, (describe(source), describe(result)), _limits("sm_90a"), slot=512)
    return _with_grid(_short(planned), _BLOCKS), {"src": source, "out": result}


def _window_add() -> _Made:
    source, result = _numbers(44, 64), _numbers(48, 80)[:44, :64]
    planned = plan_reduce(describe(result), describe(source), (0, 0), "add", _limits("sm_90a"), slot=512)
    return _short(planned), {"src": source, "out": result}


def _run_copy() -> _Made:
    source, result = _numbers(1200)[1:-2], np.ones(1200, np.uint32)[1:-2]
    planned = plan_copy(describe(source), describe(result), (0,), _limits("sm_90a"))
    return _with_grid(_short(planned, stage_bytes=256), _BLOCKS), {"src": source, "out": result}


def _plain_copy() -> _Made:
    source, result = _numbers(9, 7), np.ones((9, 7), np.uint32)
    infos = describe(source), describe(result)
    return plain_plan(window_of(*infos, (1, -1)), infos, _limits("sm_90a")), {"src": source, "out": result}


def _transpose(element_bytes: int) -> Callable[[], _Made]:
    def make() -> _Made:
        config = TransposeConfig(element_bytes, 1, 1, 2, 1, warps=2, raster_group=2)
        rows, columns = 3 * config.side + 16, 3 * config.side - 16
        source = _numbers(rows, columns).astype(f"uint{8 * element_bytes}")
        result = np.ones((columns, rows), source.dtype)
        planned = tile_plan(describe(source), describe(result), _limits("sm_90a"), config)
        return planned, {"src": source, "out": result}

    return make


def _gather() -> _Made:
    source, result = _numbers(40, 160), np.ones((22, 3, 64), np.uint32)
    starts = np.array([(2 * i - 4, 8 * i - 4) for i in range(22)], np.int32)
    planned = plan_boxes(describe(source), describe(result), (3, 64), None, (), _limits("sm_90a"))
    return _short(planned, stage_bytes=3 * 64 * 4), {"src": source, "out": result, "starts": starts}


def _im2col() -> _Made:
    source, conv = _numbers(2, 5, 6, 8), convolution((5, 6), 2, 1, 1, 1)
    result = np.ones((2, *conv.out, *conv.taps, 8), np.uint32)
    planned = plan_im2col(describe(source), describe(result), conv, _limits("sm_90a"), 512)
    return _short(planned), {"src": source, "out": result}


def _broadcast() -> _Made:
    source, result = _numbers(3000), np.ones((2, 3000), np.uint32)
    (planned,) = plan_broadcast(describe(source), describe(result), _limits("sm_90a"))
    planned = replace(planned, config=BroadcastConfig(2, 512, 3, 1))
    return _with_grid(planned, 2 * _BLOCKS), {"src": source, "out": result}


def _prefetch() -> _Made:
    source = _numbers(20000)
    problem = PREFETCH.check((source,), None, (None, None), None).problem
    (planned,) = PREFETCH.plan(problem, _limits("sm_90a"))
    return planned, {"src": source}


def _rows(op: str) -> Callable[[], _Made]:
    def make() -> _Made:
        source, result = _numbers(330, 16), np.ones((330, 16), np.uint32)
        index = np.random.default_rng(1).permutation(330).astype(np.int32)
        planned = plan_rows(op, describe(source), describe(result), len(index), _limits("sm_100a"))
        return _short(planned, stage_bytes=1024), {"src": source, "out": result, "index": index}

    return make


_MAKERS: dict[str, tuple[Callable[[], _Made], str]] = {
    "window_copy/copy": (_window_copy, "sm_90a"),
    "window_copy/add": (_window_add, "sm_90a"),
    "run_copy/copy": (_run_copy, "sm_90a"),
    "plain_copy/window": (_plain_copy, "sm_90a"),
    "transpose/1": (_transpose(1), "sm_90a"),
    "transpose/4": (_transpose(4), "sm_90a"),
    "gather_boxes/table": (_gather, "sm_90a"),
    "im2col/2d": (_im2col, "sm_90a"),
    "broadcast/2": (_broadcast, "sm_90a"),
    "prefetch/run": (_prefetch, "sm_90a"),
    "rows/gather": (_rows("gather"), "sm_100a"),
    "rows/scatter": (_rows("scatter"), "sm_100a"),
}


def call_of(planned: Arguments, arrays: Mapping[str, Any], **options: Any) -> Call:
    """Return a launch as a subject's call. arrays: NumPy arrays or ArrayInfo by name. options: of Call."""
    infos = {name: describe(array) for name, array in arrays.items()}
    return Call(
        planned.config.entry,
        planned.sizes.grid,
        planned.config.threads,
        tuple(planned.filled(infos)),
        cluster=planned.cluster if planned.cluster > 1 else None,
        shared_bytes=planned.shared_bytes,
        arrays=tuple(host_bytes(info) for info in infos.values()),
        keep=(planned, arrays),
        **options,
    )


def data_movement_subjects() -> list[Subject]:
    """Every kernel of cudatma.kernels.data_movement."""
    found = []
    for name, (make, target) in _MAKERS.items():
        planned, _ = make()
        call = partial(lambda make: call_of(*make()), make)
        found.append(Subject(name, planned.template, planned.config, call, target))
    return found
