"""Build fake_driver.c, and read its record of launches with ctypes."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

#: Environment variables that change the behavior of cudatma or cuda.bindings.
_OF_THE_CALLER = (
    *("CUDATMA_TARGET", "CUDATMA_BACKEND", "CUDATMA_DEBUG", "CUDATMA_CACHE_DIR"),
    "CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM",
)


def build_driver(folder: Path) -> None:
    """Build libcuda.so.1 in a folder. Without a C compiler, the test is skipped."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to build the fake driver with")
    flags = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(folder / "libcuda.so.1")]
    subprocess.run([compiler, *flags, str(Path(__file__).with_name("fake_driver.c")), "-ldl"], check=True)


class Record(ctypes.Structure):
    """fake_record of fake_driver.c."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("launches", "device", "attribute_count", "loads")),
        *((name, ctypes.c_int32) for name in ("argument_bytes", "dynamic_shared_bytes")),
        ("shape", ctypes.c_uint32 * 7),
        ("attributes", ctypes.c_uint32 * 18 * 4),
        *((name, ctypes.c_uint64) for name in ("stream", "recorded_on", "waited_on")),
        ("events", ctypes.c_int64),
        ("arguments", ctypes.c_ubyte * 4096),
    )


class Setup(ctypes.Structure):
    """fake_setup of fake_driver.c."""

    _fields_ = (("parameters", ctypes.c_int32), ("capturing", ctypes.c_int32), ("sizes", ctypes.c_uint64 * 64))


class Stream(ctypes.Structure):
    """An element of fake_streams of fake_driver.c: a stream's handle, its id and its capture."""

    _fields_ = (("handle", ctypes.c_uint64), ("id", ctypes.c_uint64), ("capture", ctypes.c_uint64))


class Counts(ctypes.Structure):
    """fake_counts of fake_driver.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("allocations", "in_capture", "frees", "questions")),
        ("synchronized", ctypes.c_uint64),
        ("held_bytes", ctypes.c_int64),
    )


def run_cases(namespace: dict[str, Any], names: Sequence[str] = ()) -> None:
    """Run the functions ``case_NAME`` of a script, and print their errors by name as JSON.

    Each function runs in a forked child in which the driver is not initialized. By default, all functions run.
    """
    cases = {name[len("case_") :]: value for name, value in list(namespace.items()) if name.startswith("case_")}
    wrong = {}
    for name in names or cases:
        sys.stdout.flush()
        with tempfile.TemporaryFile("w+") as told:
            child = os.fork()
            if child == 0:
                try:
                    cases[name]()
                except BaseException:
                    traceback.print_exc(file=told)
                    told.flush()
                    os._exit(1)
                sys.stdout.flush()
                os._exit(0)
            status = os.waitpid(child, 0)[1]
            told.seek(0)
            if status:
                wrong[name] = f"status {status}\n{told.read()}"
    print(json.dumps({"ran": len(names or cases), "wrong": wrong}))


def wrong_cases(script: Path, folder: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> str:
    """Return the errors of a script's cases with the driver in ``folder``.

    One process runs all cases, because starting Python and importing cudatma takes longer than most cases.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in _OF_THE_CALLER}
    paths = {"LD_LIBRARY_PATH": str(folder), "PYTHONPATH": f"{script.parents[2]}{os.pathsep}{Path(__file__).parent}"}
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(
        command, env=inherited | paths | dict(environment or {}), capture_output=True, text=True, timeout=240
    )
    if done.returncode:
        return done.stderr
    *shown, last = done.stdout.splitlines()
    print("\n".join(shown))
    found = json.loads(last)
    assert found["ran"] > 0
    return "\n".join(f"{name}: {text}" for name, text in found["wrong"].items())


def in_a_forked_child(work: Callable[[], object]) -> None:
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:
            print(error, file=sys.stderr)
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def raises(kind: type[Exception], text: str, call: Any) -> None:
    try:
        call()
    except kind as error:
        if text not in str(error):
            raise AssertionError(f"no {text!r} in: {error}") from error
    else:
        raise AssertionError(f"no {kind.__name__} with {text!r}")
