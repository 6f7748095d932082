"""The launcher against a fake driver: what reaches cuLaunchKernelEx, and what never does. Needs a C compiler, no GPU.

They run in a process of their own, because cuda.bindings binds to libcuda once.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from fake_driver import build_driver, wrong_cases

from cudatma.build.nvrtc import compile_source
from cudatma.errors import DriverError
from cudatma.runtime.launch import Kernel
from cudatma.target import get_target

HERE = Path(__file__).parent
SOURCE = """
struct alignas(64) Map { unsigned long long opaque[16]; };
extern "C" __global__ void k(float* x, int n, float f, const __grid_constant__ Map map) { x[n] = f + map.opaque[0]; }
"""


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with libcuda.so.1 and the kernel."""
    folder = tmp_path_factory.mktemp("fake_driver")
    build_driver(folder)
    target = get_target("sm_90a")
    made = compile_source(SOURCE, target)
    kernel = Kernel(made.cubin, "k", target, ptx=made.ptx, source=SOURCE, log=made.log)
    (folder / "kernel.pickle").write_bytes(pickle.dumps(kernel))
    return folder


def test_on_the_fake_driver(workshop: Path) -> None:
    script, cache = HERE / "launch_on_fake_driver.py", {"CUDATMA_CACHE_DIR": str(workshop / "cache")}
    assert not (wrong := wrong_cases(script, workshop, str(workshop / "kernel.pickle"), environment=cache)), wrong


def test_a_kernel_survives_pickling(workshop: Path) -> None:
    kernel = pickle.loads((workshop / "kernel.pickle").read_bytes())
    assert (kernel.entry, kernel.source, kernel.target.name) == ("k", SOURCE, "sm_90a")
    assert kernel.cubin[:4] == b"\x7fELF"
    assert repr(kernel) == "Kernel(k, sm_90a, 4 parameters)"


def test_without_a_driver(workshop: Path) -> None:
    """Reading works, launching says what is missing."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        pass
    else:
        pytest.skip("this machine has a driver")
    code = (
        "import pickle, sys; kernel = pickle.load(open(sys.argv[1], 'rb'))\n"
        "try: kernel.launch(1, 1, (None, 1, 1.0, bytes(128)))\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1])}
    command = [sys.executable, "-c", code, str(workshop / "kernel.pickle")]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60).stdout
    assert said.startswith(DriverError.__name__)
    assert "driver" in said
