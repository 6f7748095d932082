"""Fixtures and options for all tests. Without a GPU, GPU tests are skipped, and the reason is shown."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import cudatma
from cudatma.build import nvrtc
from cudatma.build.kernel import Kernels
from cudatma.cli import tools_package
from cudatma.context import Runtime, runtime, using_runtime

os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch and OpenBLAS: pytest runs one process per core
os.environ["CUDATMA_TUNE_FILE"] = "none"  # tests must not depend on the user's tuning file
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each process that a test starts compiles all modules again

with suppress(ImportError):  # gpu-test needs no hypothesis
    from hypothesis import HealthCheck, settings

    # A slow machine is not a failure. Most random configs violate a rule, so filters reject most examples.
    forgiven = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    settings.register_profile("tests", max_examples=25, deadline=None, suppress_health_check=forgiven)
    settings.load_profile("tests")

# pytest rewrites the assertions of all modules of a plugin's package. These packages have no tests.
for finder in sys.meta_path:
    getattr(finder, "_must_rewrite", set()).difference_update({"cudatma", "hypothesis"})
gc.disable()  # Collection creates many objects and frees few. Without garbage collection, it takes 25 % less time.
tools_package()  # provides cudatma.tools in a checkout that is not installed
for public in cudatma.__all__:  # pytester unloads modules that a test imports first
    getattr(cudatma, public)


KERNEL_TESTS = ("all_reduce", "attention", "data_movement", "experts", "gemm", "marlin")


def pytest_addoption(parser: pytest.Parser) -> None:
    what = "write the golden files from what the tests get instead of comparing"
    parser.addoption("--update-golden", action="store_true", help=what)


@lru_cache(maxsize=1)
def missing_gpu() -> str:
    """Return why GPU tests cannot run here, or "" if they can."""
    from cudatma.errors import CudaTmaError
    from cudatma.target import detect

    try:
        detect()
    except CudaTmaError as error:
        return str(error)
    except ImportError as error:
        return f"the CUDA bindings are not installed: {error}"
    return ""


@pytest.fixture(autouse=True)
def own_runtime() -> Iterator[None]:
    """Give each test its own plans, because plans of another test may contain its fakes.

    Kernels are shared, because reading a kernel from disk takes longer than most tests.
    """
    made = Runtime()
    made.parts[Kernels] = runtime().part(Kernels)
    with using_runtime(made):
        yield


@pytest.fixture(autouse=True)
def without_cubins(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In tests of the kernel families, calls on the emulator compile no cubins, which saves half of the time.

    The tests of cudatma.kernels and cudatma.integrations run such calls with the kernels that users get.
    """
    if request.path.parent.name in KERNEL_TESTS:
        from ptx_of import kernel_for_call

        monkeypatch.setattr("cudatma.kernels.arguments.load_kernel", kernel_for_call)


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark_sweeps(items)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = missing_gpu() if marked else ""
    if reason:
        skip = pytest.mark.skip(reason=f"needs a GPU: {reason}")
        for item in marked:
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Exempt the collected tests from garbage collection, which otherwise scans them all the time."""
    gc.collect()
    gc.freeze()
    gc.enable()


def mark_sweeps(items: list[pytest.Item]) -> None:
    """Mark all but n evenly spaced cases of a test with ``sweep(n)`` as slow."""
    sweeps: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sweep"):
            sweeps.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in sweeps.values():
        marker = cases[0].get_closest_marker("sweep")
        assert marker is not None
        (count,) = marker.args
        kept = {number * len(cases) // count for number in range(count)}
        for number, case in enumerate(cases):
            if number not in kept:
                case.add_marker("slow")


@pytest.fixture(scope="session")
def load_example() -> Callable[[str], ModuleType]:
    """Return a function that imports an example: ``load_example("tile_copy")`` is ``examples/tile_copy.py``."""

    def load(name: str) -> ModuleType:
        path = Path(__file__).resolve().parents[1] / "examples" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(f"examples_{name}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look up their module
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="session")
def kernels_without_cubins(tmp_path_factory: pytest.TempPathFactory) -> tuple[Kernels, Path]:
    """Return the kernels that without_ptxas has compiled, and their cache folder."""
    return Kernels(), tmp_path_factory.mktemp("without_ptxas")


@pytest.fixture
def without_ptxas(
    own_runtime: None, kernels_without_cubins: tuple[Kernels, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compile to PTX only, in a test that only emulates. ptxas takes almost half of the time of a compilation."""
    compile_all = nvrtc._run

    def compile_ptx(source: str, name: str, flags: Sequence[str], includes: Any) -> tuple[str, str, bytes]:
        virtual = [flag.replace("--gpu-architecture=sm", "--gpu-architecture=compute") for flag in flags]
        log, ptx, _ = compile_all(source, name, virtual, includes)
        return log, ptx, b"\177ELF" if ptx else b""

    kernels, cache = kernels_without_cubins
    monkeypatch.setattr(nvrtc, "_run", compile_ptx)
    monkeypatch.setenv("CUDATMA_CACHE_DIR", str(cache))
    monkeypatch.setitem(runtime().parts, Kernels, kernels)
