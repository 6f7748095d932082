"""Compilation of kernels by several processes: cache contents, progress reports and termination."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cudatma.build import kernel as build
from cudatma.build.kernel import Kernels, debugging, load_kernel
from cudatma.build.prebuild import compile_all, usable_cores
from cudatma.context import runtime
from cudatma.errors import ArgumentError, CompileError, TemplateError
from cudatma.kernels.data_movement.tile_copy import TEMPLATE, TileCopyConfig

ROOT = Path(__file__).resolve().parents[2]
GOOD = [TileCopyConfig(4, stages=stages) for stages in (2, 3)]
BAD = TileCopyConfig(4, entry="1st")  # no name in C++


class Deadly:
    """An object that ends any process that unpickles it."""

    def __reduce__(self) -> Any:
        return os._exit, (1,)


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use an empty cache folder and an empty in-memory cache."""
    monkeypatch.setenv("CUDATMA_CACHE_DIR", str(tmp_path / "cache"))
    runtime().parts[Kernels] = Kernels()


def told(orders: list[tuple[str, Any]], jobs: int) -> dict[Any, CompileError | None]:
    heard: list[tuple[Any, CompileError | None]] = []
    compile_all(orders, "sm_90a", jobs, lambda config, refusal: heard.append((config, refusal)))
    assert len(dict(heard)) == len(heard), "each once"
    return dict(heard)


@pytest.mark.parametrize(("jobs", "debug"), [(1, False), (2, True)])
def test_the_cache_has_all_but_what_is_refused(jobs: int, debug: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes compile in the same mode as this one."""
    with debugging(debug):
        heard = told([(TEMPLATE, config) for config in (*GOOD, BAD, GOOD[0])], jobs)
    assert [heard[config] for config in GOOD] == [None, None]
    refusal = heard[BAD]
    assert refusal is not None
    assert refusal.message.startswith("NVRTC")
    assert "1st" in refusal.source

    runtime().parts[Kernels] = Kernels()
    compiled = []
    monkeypatch.setattr(build, "compile_source", lambda *args, **options: compiled.append(args))
    for config in GOOD:
        assert load_kernel(TEMPLATE, config, "sm_90a", debug=debug).source.count("Stages") > 0
    assert not compiled


@pytest.mark.parametrize("jobs", [1, 2])
def test_what_is_no_refusal_is_raised(jobs: int) -> None:
    with pytest.raises(TemplateError, match="kernels/nothing"):
        told([("kernels/nothing.cu.j2", GOOD[0])], jobs)


def test_a_process_that_dies_is_an_error_with_a_remedy() -> None:
    with pytest.raises(CompileError, match=r"one of the 2 compiler processes died.*use fewer jobs"):
        told([(TEMPLATE, Deadly())], 2)


def test_numbers_of_jobs() -> None:
    assert usable_cores() >= 1
    assert told([], 4) == {}
    with pytest.raises(ArgumentError, match=r"jobs must be .*got 0"):
        told([], 0)


def test_a_script_without_a_guard_is_run_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "print('begun')\n"
        "from cudatma.kernels.data_movement.tile_copy import TEMPLATE, TileCopyConfig\n"
        "from cudatma.build.prebuild import compile_all\n"
        "compile_all([(TEMPLATE, TileCopyConfig(8))], 'sm_90a', 2, lambda config, refusal: print(refusal))\n"
        "print(__import__('__main__').__file__)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=environment, timeout=60, check=False
    )
    assert done.stdout.split() == ["begun", "None", str(script)], done.stderr
