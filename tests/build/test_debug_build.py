"""Ways to request debug=True (argument, variable, context manager), and its effect on a kernel and its key."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from threads import in_threads

import cudatma
from cudatma.build import kernel as build
from cudatma.build.kernel import Kernels, debugging, known_kernel, load_kernel, wants_debug
from cudatma.build.render import render
from cudatma.context import runtime
from cudatma.errors import ArgumentError, ArgumentTypeError

SOURCE = """
//% include "primitives/mbarrier.cuh.j2"
extern "C" __global__ void waits(unsigned parity) {
    __shared__ unsigned long long barrier;
    const unsigned bar = cudatma::shared_address(&barrier);
    if (threadIdx.x == 0) cudatma::mbarrier_init(bar, 1);
    __syncthreads();
    cudatma::mbarrier_wait_parity(bar, parity);
}
"""


@dataclass(frozen=True, slots=True)
class Layout:
    entry: str = "waits"

    def smem_layout(self) -> list[tuple[str, int, int]]:
        return [("full", 0, 16)]


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDATMA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv(build.DEBUG_VARIABLE, raising=False)
    runtime().parts[Kernels] = Kernels()


def test_a_template_sees_it_and_the_opening_says_so() -> None:
    source = "//% if debug\nint checked;\n//% endif\nint x;"
    assert render(source, None, "sm_90a", is_source=True) == "// cudatma: <source> for sm_90a\n\nint x;\n"
    checked = render(source, None, "sm_90a", is_source=True, debug=True)
    assert checked.startswith("// cudatma: <source> for sm_90a\n// debug: ")
    assert "int checked;\nint x;" in checked


def test_it_is_another_kernel_with_the_configs_names() -> None:
    plain, debug = (
        cudatma.compile(SOURCE, Layout(), target="sm_90a", template=True, debug=flag) for flag in (False, True)
    )
    assert (plain.is_debug, debug.is_debug) == (False, True)
    assert plain.folder != debug.folder
    assert plain.parameters == debug.parameters  # the panel is no parameter
    assert debug.smem_layout == plain.smem_layout == (("full", 0, 16),)
    again = pickle.loads(pickle.dumps(debug))
    assert (again.is_debug, again.smem_layout) == (True, debug.smem_layout)
    assert cudatma.compile(SOURCE, Layout(), target="sm_90a", template=True) is plain


def test_a_template_is_known_by_what_was_asked() -> None:
    arguments = ("kernels/tile_copy.cu.j2", cudatma.kernels.data_movement.tile_copy.TileCopyConfig(4), "sm_90a")
    assert known_kernel(*arguments) is None
    plain = load_kernel(*arguments)
    assert known_kernel(*arguments, debug=True) is None
    debug = load_kernel(*arguments, debug=True)
    assert known_kernel(*arguments) is plain
    assert known_kernel(*arguments, debug=True) is debug
    assert (plain.is_debug, debug.is_debug) == (False, True)
    stages = 8 * 4
    at = debug.smem_layout[-1][1] - stages
    assert debug.smem_layout[1:] == (("full_barriers", at, stages), ("empty_barriers", at + stages, stages))
    runtime().parts[Kernels] = Kernels()
    assert load_kernel(*arguments, debug=True).smem_layout == debug.smem_layout  # out of the cache folder


def test_the_variable_the_block_and_the_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wants_debug(None) is False
    with debugging():
        assert wants_debug(None) is True
        assert wants_debug(False) is False
        with debugging(False):
            assert wants_debug(None) is False
        assert wants_debug(None) is True
        assert in_threads(1, lambda _: wants_debug(None)) == [False]  # a block of this thread's
    for text, wanted in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv(build.DEBUG_VARIABLE, text)
        assert wants_debug(None) is wanted
        with debugging(False):
            assert wants_debug(None) is False
    monkeypatch.setenv(build.DEBUG_VARIABLE, "yes")
    with pytest.raises(ArgumentError, match=build.DEBUG_VARIABLE):
        wants_debug(None)


@pytest.mark.parametrize("value", ["yes", 1, 0.5])
def test_what_is_no_bool_is_refused(value: Any) -> None:
    for call in (
        lambda: wants_debug(value),
        lambda: cudatma.compile(SOURCE, debug=value),
        lambda: debugging(value).__enter__(),
    ):
        with pytest.raises(ArgumentTypeError, match="debug"):
            call()
