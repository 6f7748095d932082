"""Compile many kernels at once in several processes.

NVRTC compiles one kernel at a time in a process, even if several threads call it. The workers are new processes instead
of forks, because a forked process cannot use the CUDA context of its parent.
"""

from __future__ import annotations

import os
import pickle
import queue
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from typing import IO, Any, TypeVar, cast

from cudatma.build.kernel import load_kernel, wants_debug
from cudatma.build.nvrtc import Compiled, compile_source
from cudatma.errors import ArgumentError, CompileError
from cudatma.target import Target, get_target

Done = Callable[[Any, CompileError | None], None]
Item = TypeVar("Item")
Result = TypeVar("Result")


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def compile_all(orders: Iterable[tuple[str, Any]], target: str | Target, jobs: int, done: Done) -> None:
    """Compile kernels into the cache with ``jobs`` processes, or in this process if ``jobs`` is 1.

    ``orders`` contains pairs (template, config) as for load_kernel(). The classes of the configs must be importable,
    and duplicates are compiled once. ``done`` is called for each compiled config, in any order, with the config and
    either None or the compiler's error. The caller's debug mode applies. After a KeyboardInterrupt, running
    compilations are finished and no others are started. Raises ArgumentError if ``jobs`` is invalid, CompileError if a
    process dies, and any error from load_kernel() that does not come from the compiler.
    """
    compile_one = partial(_refusal, target=get_target(target).name, debug=wants_debug(None))
    for (_, config), refusal in each(compile_one, dict.fromkeys(orders), jobs):
        done(config, refusal)


def each(do: Callable[[Item], Result], items: Iterable[Item], jobs: int) -> Iterator[tuple[Item, Result]]:
    """Call ``do`` for each item in ``jobs`` new processes, and yield (item, do(item)) in the order of completion.

    If ``jobs`` is 1, the calls run in this process and in order. ``do``, the items and the results must support
    pickling. Raises ArgumentError if ``jobs`` is invalid, CompileError if a process dies, and any error from ``do``.
    """
    if jobs < 1:
        raise ArgumentError("jobs", jobs, "at least 1")
    pending = list(items)
    if jobs == 1 or not pending:
        for item in pending:
            yield item, do(item)
        return
    count = min(jobs, len(pending))
    idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
    workers = [_Worker() for _ in range(count)]
    for worker in workers:
        idle.put(worker)

    def run(item: Item) -> Result:
        worker = idle.get()
        try:
            return worker.call(do, item)
        finally:
            idle.put(worker)

    pool = ThreadPoolExecutor(count)
    try:
        under_way = {pool.submit(run, item): item for item in pending}
        for future in as_completed(under_way):
            yield under_way[future], future.result()
    except _WorkerDiedError as error:
        message = f"one of the {jobs} compiler processes died, possibly because memory ran out; use fewer jobs"
        message += " or restrict this process to fewer cores with taskset"
        raise CompileError(message) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        for worker in workers:
            worker.close()


_PROGRAM = """
import pickle, sys
sys.path[:] = pickle.load(sys.stdin.buffer)
from cudatma.build.prebuild import _serve
_serve()
"""


class _WorkerDiedError(Exception):
    """A worker process ended without an answer."""


class _Worker:
    """A Python subprocess that runs functions on request, one at a time.

    Unlike a worker of multiprocessing, it can be started by a daemonic process, such as a vLLM worker, and does not
    import the program's main file.
    """

    def __init__(self) -> None:
        # The worker gets a new session, because the terminal sends Ctrl-C to the whole process group and the parent
        # handles it.
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self._calls = cast("IO[bytes]", self._process.stdin)
        self._answers = cast("IO[bytes]", self._process.stdout)
        self._send(sys.path)

    def call(self, do: Callable[[Item], Result], item: Item) -> Result:
        """Return do(item).

        Raises any error from ``do``, and _WorkerDiedError if the process has ended.
        """
        try:
            self._send((do, item))
            succeeded, result = pickle.load(self._answers)
        except (BrokenPipeError, EOFError, pickle.UnpicklingError) as error:
            raise _WorkerDiedError from error
        if not succeeded:
            raise result
        return cast("Result", result)

    def _send(self, value: object) -> None:
        pickle.dump(value, self._calls)
        self._calls.flush()

    def close(self) -> None:
        """End the process by closing its input."""
        self._process.communicate()


def _serve() -> None:
    """Answer the calls of a parent process until it closes the pipe or ends."""
    calls = sys.stdin.buffer
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # libraries must not print into the stream of answers
        while True:
            try:
                do, item = pickle.load(calls)
            except EOFError:
                return
            try:
                answer = pickle.dumps((True, do(item)))
            except Exception as error:
                answer = pickle.dumps((False, _picklable(error)))
            answers.write(answer)
            answers.flush()


def _picklable(error: Exception) -> Exception:
    """Return the error itself if it can be sent to the parent, otherwise a CompileError with the same text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return CompileError(f"{type(error).__name__}: {error}")
    return error


def compiled(order: tuple[str, str, str]) -> Compiled | CompileError:
    """Compile an order (source, target, file name), and return the result or NVRTC's error.

    Callers pass this function to each().
    """
    source, target, name = order
    try:
        return compile_source(source, get_target(target), name=name)
    except CompileError as error:
        return error


def _refusal(order: tuple[str, Any], target: str, debug: bool) -> CompileError | None:
    """Compile one kernel or load it from the cache, and return the compiler's error or None."""
    template, config = order
    try:
        load_kernel(template, config, target, debug=debug)
    except CompileError as error:
        return error
    return None
