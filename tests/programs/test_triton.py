"""Triton's and Gluon's launches on the emulator: arguments, descriptors, autotuning, hazards, and the examples."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cudatma
from cudatma.errors import ArgumentError, ArgumentTypeError, HazardError

triton = pytest.importorskip("triton")
torch = pytest.importorskip("torch")
kernels = importlib.import_module("program_kernels")
nvidia = importlib.import_module("triton._C.libtriton").nvidia
TensorDescriptor = importlib.import_module("triton.tools.tensor_descriptor").TensorDescriptor

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))


@pytest.mark.parametrize(("target", "dtype"), [("sm_90a", "float32"), ("sm_120a", "float16"), ("sm_90a", "int32")])
@pytest.mark.parametrize("make", [lambda x: x, torch.from_numpy], ids=["numpy", "torch"])
def test_arrays_and_numbers_reach_the_kernel(target: str, dtype: str, make: Callable[[Any], Any]) -> None:
    x, y = np.arange(100, dtype=dtype), np.zeros(100, dtype)
    with cudatma.emulate_launches(target=target) as log:
        kernels.scale_kernel[lambda meta: (triton.cdiv(100, meta["BLOCK"]),)](
            make(x), make(y), np.int32(3), 100, BLOCK=64
        )
    np.testing.assert_array_equal(y, 3 * x)
    (entry,) = log
    assert log.is_clean
    assert entry.launch.grid == (2, 1, 1)
    assert entry.launch.entry == "scale_kernel"
    assert entry.launch.names[:4] == ("x_ptr", "y_ptr", "factor", "n")
    assert entry.launch.place.rpartition(":")[0].endswith("test_triton.py")


@pytest.mark.parametrize(("target", "num_ctas"), [("sm_90a", 1), ("sm_90a", 2), ("sm_120a", 1)])
def test_tensor_descriptors_of_the_host_and_of_the_device(target: str, num_ctas: int) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(64, 48, dtype=torch.float16), torch.randn(48, 40, dtype=torch.float16)
    c = torch.zeros(64, 40, dtype=torch.float16)
    a_map, c_map = TensorDescriptor.from_tensor(a, [32, 32]), TensorDescriptor.from_tensor(c, [32, 32])
    with cudatma.emulate_launches(target=target, schedules=2) as log:
        kernels.product_kernel[2, 2](a_map, b, (48, 40), c_map, BLOCK=32, num_ctas=num_ctas)
    torch.testing.assert_close(c, a @ b, atol=0.02, rtol=0)
    assert log[0].launch.cluster == ((2, 1, 1) if num_ctas == 2 else None)
    assert {"a_map", "a_map.shape[0]", "sizes[1]", "global_scratch"} <= set(log[0].launch.names)


def test_a_hazard_raises_and_names_the_line_and_the_argument() -> None:
    x, total = np.ones(256, np.float32), np.zeros(1, np.float32)
    with cudatma.emulate_launches() as log, pytest.raises(HazardError, match="global_race") as caught:
        kernels.total_kernel[2,](x, total, BLOCK=128)
    message = str(caught.value)
    assert "total_ptr[0]" in message
    assert "tl.load(total_ptr) + part" in message
    assert total[0] == 256, "the launch writes its results"
    assert not log.is_clean
    assert len(log) == 1


def test_hazards_are_collected_for_the_kernels_that_only_names() -> None:
    x, total = np.ones(256, np.float32), np.zeros(1, np.float32)
    with cudatma.emulate_launches(hazards="collect", only="total") as log:
        kernels.total_kernel[2,](x, total, BLOCK=128)
        kernels.scale_kernel[2,](x, x, 1, 256, BLOCK=128)
    assert [entry.is_checked for entry in log] == [True, False]
    assert log.hazards
    assert "not checked" in str(log)


def test_autotuning_chooses_the_first_config_that_fits() -> None:
    """Forty stages of a tile do not fit into shared memory. Nothing is measured."""
    configs = [triton.Config({"BLOCK": 64}, num_stages=stages) for stages in (40, 2, 3)]
    kernel = triton.autotune(configs, key=[], do_bench=lambda *_, **__: 1 / 0)(kernels.square_kernel)
    x = torch.randn(64, 128, dtype=torch.float16)
    y = torch.zeros(64, 64)
    with cudatma.emulate_launches(schedules=1) as log:
        kernel[1,](x, y, 128)
    assert len(log) == 1
    assert kernel.best_config.num_stages == 2
    torch.testing.assert_close(y, x.float() @ x.float().T, atol=0.01, rtol=0)


def test_a_table_of_addresses_gives_access_to_the_tensors() -> None:
    tensors = [torch.zeros(32) for _ in range(3)]
    pointers = torch.tensor([tensor.data_ptr() for tensor in tensors])
    with cudatma.emulate_launches():
        kernels.fill_kernel[3,](pointers, 5.0, BLOCK=32)
    assert all((tensor == 5).all() for tensor in tensors)


def test_programs_for_a_gpu_run_on_the_cpu() -> None:
    with cudatma.emulate_launches(target="sm_120a") as log:
        assert torch.cuda.is_available()
        assert torch.cuda.get_device_capability() == (12, 0)
        x = torch.arange(64.0, device="cuda", pin_memory=True).to(torch.device("cuda:0"))
        assert x.is_cuda
        assert x.device == triton.runtime.driver.active.get_active_torch_device()
        y = torch.empty_like(x).cuda()
        torch.cuda.synchronize()
        start, stream = torch.cuda.Event(enable_timing=True), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            start.record()
        assert isinstance(torch.cuda.current_stream(), torch.cuda.Stream)
        assert start.elapsed_time(stream.record_event()) >= 0
        assert torch.cuda.get_device_properties(0).total_memory > 0
        launch = functools.partial(kernels.scale_kernel[1,], x, y, 2, 64, BLOCK=64)
        assert triton.testing.do_bench(launch, quantiles=[0.5, 0.9]) == [1.0, 1.0]
        product = torch.zeros(8, 8, device="cuda", dtype=torch.float16)
        nvidia.cublas.CublasLt(x).matmul(x.view(8, 8), x.view(8, 8), product)
    torch.testing.assert_close(product, (x.view(8, 8) @ x.view(8, 8).T).half())
    assert len(log) == 1
    assert not x.is_cuda
    assert y.tolist() == (2 * x).tolist()


def test_an_argument_that_the_cpu_cannot_read_is_named() -> None:
    x = torch.ones(4, device="meta")
    with cudatma.emulate_launches(), pytest.raises(ArgumentTypeError) as caught:
        kernels.scale_kernel[1,](x, x, 2, 4, BLOCK=64)
    assert "scale_kernel" in str(caught.value)
    assert "got a tensor on meta" in str(caught.value)


X = np.ones(64, np.float32)


@pytest.mark.parametrize(
    ("grid", "args", "error", "text"),
    [
        ((1,), (np.ones(64, np.complex64), X, 2, 64), ArgumentTypeError, "x_ptr.dtype must be .*got complex64"),
        ((1,), (X, np.ones(64, object), 2, 64), ArgumentTypeError, "y_ptr.dtype must be .*got object"),
        ((1,), (X, X, 1j, 64), ArgumentTypeError, "factor must be an array, a number.*got complex"),
        ((1,), (X, X, 2, 1 << 64), ArgumentError, "n must be a 64-bit integer.*got 18446744073709551616"),
        ((1,), (X, X, 2), ArgumentError, "n must be passed .the parameter has no default"),
        (
            (1,),
            (X, X, 2, 64, 64, 3),
            ArgumentError,
            "args must be a sequence of at most 5 values \\(x_ptr, y_ptr, factor.*got 6 values",
        ),
        (
            (-1,),
            (X, X, 2, 64),
            ArgumentError,
            r"grid must be a tuple of one to three nonnegative integers.*got \(-1,\)",
        ),
        ((1, 1, 1, 1), (X, X, 2, 64), ArgumentError, r"grid must be .*got \(1, 1, 1, 1\)"),
        ((1.5,), (X, X, 2, 64), ArgumentError, r"grid must be .*got \(1.5,\)"),
        (lambda meta: 3, (X, X, 2, 64), ArgumentError, "grid must be .*got 3"),
    ],
)
def test_a_wrong_launch_names_the_kernel_and_the_argument(
    grid: Any, args: tuple[Any, ...], error: type[Exception], text: str
) -> None:
    options = {} if len(args) > 4 else {"BLOCK": 64}
    with cudatma.emulate_launches(), pytest.raises(error, match=f"launch of scale_kernel at .*test_triton.py.*{text}"):
        kernels.scale_kernel[grid](*args, **options)


def test_a_grid_of_zero_launches_nothing() -> None:
    with cudatma.emulate_launches() as log:
        kernels.scale_kernel[0,](X, X, 2, 64, BLOCK=64)
    assert len(log) == 0


def test_a_tensor_descriptor_describes_a_numpy_array() -> None:
    a, b, c = np.eye(32, dtype=np.float16), np.ones((32, 32), np.float16), np.zeros((32, 32), np.float16)
    with cudatma.emulate_launches() as log:
        a_map, c_map = TensorDescriptor(a, [32, 32], [32, 1], [32, 32]), TensorDescriptor.from_tensor(c, [32, 32])
        kernels.product_kernel[1, 1](a_map, b, (32, 32), c_map, BLOCK=32)
    assert log.is_clean
    assert (c == 1).all()
    with pytest.raises(AttributeError):
        TensorDescriptor.from_tensor(c, [32, 32])


@pytest.mark.parametrize(
    ("example", "kind", "line"),
    [("triton_kernel", "global_race", "tl.load(sums_ptr"), ("gluon_gemm", "overwritten_while_read", "tma_load(")],
)
def test_the_mistake_of_an_example_is_found(
    example: str, kind: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main = importlib.import_module(example).main
    monkeypatch.setattr(sys, "argv", [example])
    assert main() == 0
    assert "no hazards in 2 schedules" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [example, "--broken"])
    assert main() == 1
    printed = capsys.readouterr().out
    assert f"\n{kind}: " in printed
    assert line in printed
