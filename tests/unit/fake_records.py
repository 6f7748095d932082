"""What fake_driver.c keeps of a launch, as ctypes, and how it is built."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest


def build_driver(folder: Path) -> None:
    """libcuda.so.1 in a folder; skips the test where there is no C compiler."""
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


def raises(kind: type[Exception], text: str, call: Any) -> None:
    try:
        call()
    except kind as error:
        if text not in str(error):
            raise AssertionError(f"no {text!r} in: {error}") from error
    else:
        raise AssertionError(f"no {kind.__name__} with {text!r}")
