"""The table of wrong calls: each is answered by its typed error, which says field, value and rule, and reaches no GPU.

The rows stand in bad_input/; tests/package/test_bad_input_gpu.py makes the mistakes that need real arrays.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from bad_input.bench import (
    BIAS_ADDRESS,
    OUT_ADDRESS,
    SOURCE,
    Bench,
    Case,
    K,
    N,
    compile_text,
    forget_the_driver,
    gemm,
    host_gemm,
    im2col,
    launch,
    on_device,
    tiled,
)
from bad_input.environment import COMMANDS, ENVIRONMENT
from bad_input.gemm import GEMM, LAYERS
from bad_input.kernels import COMPILING, DESCRIPTORS, LAUNCHES
from bad_input.weights import FILES, WEIGHTS, awq, compressed, gptq

import cudatma as c
from cudatma import cli
from cudatma.errors import (
    ArgumentError,
    ArgumentTypeError,
    CacheError,
    CompileError,
    CudaTmaError,
    DescriptorError,
    DriverError,
    FieldError,
    LaunchError,
    QuantizationError,
    TargetError,
    TemplateError,
    WeightFileError,
)
from cudatma.quantization import open_checkpoint
from cudatma.runtime.launch import LaunchPlan

TABLE = [*GEMM, *LAYERS, *WEIGHTS, *FILES, *DESCRIPTORS, *LAUNCHES, *COMPILING, *ENVIRONMENT]
#: Beginnings of the driver functions that create a context, allocate, copy, load or launch.
_FORBIDDEN = (
    *("cuLaunch", "cuGraphLaunch", "cuMem", "cuModuleLoad", "cuLibraryLoad", "cuCtxCreate", "cuDevicePrimaryCtx"),
)
#: The builtin that each class also is, as Python's users expect it.
BUILTINS: dict[type[CudaTmaError], type[Exception]] = {
    ArgumentError: ValueError,
    ArgumentTypeError: TypeError,
    DescriptorError: ValueError,
    TargetError: ValueError,
    QuantizationError: ValueError,
    WeightFileError: ValueError,
    TemplateError: ValueError,
    CompileError: RuntimeError,
    LaunchError: RuntimeError,
    DriverError: RuntimeError,
    CacheError: RuntimeError,
}


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    for name in [name for name in os.environ if name.startswith("CUDATMA_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CUDATMA_CACHE_DIR", str(tmp_path / "cache"))
    with monkeypatch.context() as patch:
        yield Bench(tmp_path, patch)
    forget_the_driver()


@pytest.fixture(autouse=True)
def nothing_reaches_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test when a call gets as far as the driver's contexts, memory, modules or launches."""

    def refuse(*_: object, **__: object) -> None:
        pytest.fail("a wrong call reached the driver")  # no Exception: nothing on the way swallows it

    monkeypatch.setattr(LaunchPlan, "__init__", refuse)
    monkeypatch.setattr(LaunchPlan, "launch", refuse)
    driver = pytest.importorskip("cuda.bindings.driver")
    for name in dir(driver):
        if name.startswith(_FORBIDDEN):
            monkeypatch.setattr(driver, name, refuse)


@pytest.mark.parametrize("wrong", TABLE, ids=lambda wrong: wrong.name)
def test_a_wrong_call_is_answered(wrong: Case, bench: Bench) -> None:
    with pytest.raises(wrong.error) as caught:
        wrong.call(bench)
    error, message = caught.value, str(caught.value)
    assert type(error) is wrong.error
    assert isinstance(error, BUILTINS[wrong.error])
    assert wrong.says in message
    if isinstance(error, FieldError):
        assert error.field == wrong.field or (wrong.error is WeightFileError and error.field.endswith(wrong.field))
        assert message.startswith(f"{error.field} must be ")
        assert error.got is ... or re.search(", (got|found) ", message)
        assert error.allowed
    else:
        assert wrong.field in message


@pytest.mark.parametrize("name", COMMANDS)
def test_a_wrong_command_ends_with_2_and_one_line(name: str, bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, says = COMMANDS[name]
    try:
        status: object = cli.main(arguments)
    except SystemExit as ended:  # argparse's way
        status = ended.code
    said = capsys.readouterr().err
    assert status == 2
    assert says in said
    assert "Traceback" not in said
    assert said.startswith("cudatma: ")
    assert len(said.splitlines()) == 1


def test_every_kind_of_error_is_also_a_builtin_one() -> None:
    for error, builtin in BUILTINS.items():
        assert issubclass(error, builtin)
        assert issubclass(error, CudaTmaError)


class Passed(Exception):  # noqa: N818  (no error: the call came through its checks)
    pass


def test_the_right_calls_pass_the_checks(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the table changes one thing of is right: it goes on to the first step after the checks."""

    def passed(*_: object, **__: object) -> None:
        raise Passed

    monkeypatch.setattr("cudatma.kernels.calls.Calls.plan", passed)
    monkeypatch.setattr(LaunchPlan, "__init__", passed)
    row = on_device((3, 1, K), strides=(0, 7, 2))  # a broadcast row is right, and so is any stride of one element
    for changes in ({}, {"bias": on_device((N,), BIAS_ADDRESS)}, {"x": row, "out": on_device((3, 1, N), OUT_ADDRESS)}):
        with pytest.raises(Passed):
            gemm(**changes)
    for options in ({}, {"grid": (4, 2), "cluster": (2, 1), "shared_bytes": 49152}):
        with pytest.raises(Passed):
            launch(**options)
    assert host_gemm().shape == (4, N)
    for made in (gptq(), awq(), compressed()):
        assert made.shape == (K, N)
    assert list(c.load_weights(bench.saved())) == ["weight"]
    assert open_checkpoint(bench.entry()).read("x").shape == (4,)
    assert (tiled().rank, im2col().rank) == (2, 4)
    assert compile_text().entry == "k"


def test_the_guard_sees_a_launch() -> None:
    with pytest.raises(pytest.fail.Exception, match="reached the driver"):
        launch()


def test_a_cache_that_is_a_file_is_replaced_by_memory(bench: Bench) -> None:
    """It costs compilations, not the call: a warning names the variable."""
    bench.variable("CUDATMA_CACHE_DIR", str(bench.file(b"")))
    with pytest.warns(RuntimeWarning, match="CUDATMA_CACHE_DIR"):
        kernel = compile_text(SOURCE + "  // kept in memory")
    assert kernel.folder is None
