"""Many kernels compiled at once, by several new processes; into the artifact cache, or wherever a caller puts them.

NVRTC compiles one kernel at a time in a process, whatever its threads do. The workers are started anew, not forked: a
CUDA context of this process is not theirs.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any, TypeVar

from cudatma.build.kernel import load_kernel
from cudatma.build.nvrtc import Compiled, compile_source
from cudatma.errors import ArgumentError, CompileError
from cudatma.target import Target, get_target

Tell = Callable[[Any, CompileError | None], None]
Item = TypeVar("Item")
Result = TypeVar("Result")


def usable_cores() -> int:
    """Those that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def compile_all(orders: Iterable[tuple[str, Any]], target: str | Target, jobs: int, tell: Tell) -> None:
    """Compile the kernels into the cache with ``jobs`` processes; 1: in this process.

    orders: (template, spec) as load_kernel() takes them, specs of importable classes; equal ones count once.
    tell: is given each spec when it is done, in any order, with None, or why the compiler refuses it.
    On KeyboardInterrupt nothing more is begun, and what is under way is finished. Raises ArgumentError (jobs),
    CompileError where a process dies, and what load_kernel() does, save for the compiler's refusals.
    """
    chosen = get_target(target)
    for (_, spec), refusal in each(partial(_refusal, target=chosen.name), dict.fromkeys(orders), jobs):
        tell(spec, refusal)


def each(do: Callable[[Item], Result], items: Iterable[Item], jobs: int) -> Iterator[tuple[Item, Result]]:
    """(item, do(item)) as each is done, in any order, by ``jobs`` new processes; 1: by this one, in order.

    do, items and results are pickled. Raises ArgumentError (jobs), CompileError where a process dies, and what ``do``
    raises.
    """
    if jobs < 1:
        raise ArgumentError("jobs", jobs, "1 and up")
    wanted = list(items)
    if jobs == 1 or not wanted:
        for item in wanted:
            yield item, do(item)
        return
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(jobs, len(wanted)), mp_context=spawn, initializer=_end_with_parent)
    try:
        with _deaf_children(), _no_main_file():
            under_way = {pool.submit(do, item): item for item in wanted}
        for future in as_completed(under_way):
            yield under_way[future], future.result()
    except BrokenExecutor as error:
        message = f"one of {jobs} processes that compile died, maybe for want of memory; take fewer"
        raise CompileError(message) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def compiled(order: tuple[str, str, str]) -> Compiled | CompileError:
    """(source, target, file name) -> what NVRTC makes of it, or why it refuses. For each()."""
    source, target, name = order
    try:
        return compile_source(source, get_target(target), name=name)
    except CompileError as error:
        return error


def _refusal(order: tuple[str, Any], target: str) -> CompileError | None:
    """Compile one kernel, or find it in the cache."""
    template, spec = order
    try:
        load_kernel(template, spec, target)
    except CompileError as error:
        return error
    return None


def _end_with_parent() -> None:
    """In a worker: a parent that was killed tells nobody, and the worker would wait for work for ever."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def _deaf_children() -> Iterator[None]:
    """Processes started inside inherit a mask, and Ctrl-C, which the terminal sends to all, is this one's to handle.

    The pool must be there before: its locks start multiprocessing's resource tracker, which lifts the mask.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _no_main_file() -> Iterator[None]:
    """Processes started inside do not run the program's main file again, be it a script without a guard. They need
    nothing of it."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
