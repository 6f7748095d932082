"""What the cost model knows of a GPU: asked of the driver, or imagined."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from cudatma.context import Runtime, using_runtime
from cudatma.kernels import gpu as gpu_module
from cudatma.kernels.gpu import H200, Gpu, gpu_of, imagined_gpu
from cudatma.target import get_target


def test_an_imagined_gpu_is_the_known_one_or_scaled_from_it() -> None:
    assert imagined_gpu("sm_90a", 132) == H200
    small = imagined_gpu("sm_120a", 85)
    assert small.sm_count == 85
    assert small.memory_bytes_per_us == pytest.approx(imagined_gpu("sm_120a", 170).memory_bytes_per_us / 2)
    assert imagined_gpu("sm_90", 132).target == "sm_90"
    assert replace(H200, sm_clock_mhz=1965).clock_class_mhz == H200.clock_class_mhz == 2000


@pytest.mark.parametrize(
    ("answers", "wanted"),
    [
        ((1980000, 3201000, 6144), H200),
        ((1755000, 2619000, 5120), Gpu("sm_90a", 132, 1755, 2619, 5120)),
        ((1980000, 0, 0), H200),  # what a driver may say of memory that is the host's
    ],
)
def test_an_installed_gpu_is_asked_in_khz(
    monkeypatch: pytest.MonkeyPatch, answers: tuple[int, int, int], wanted: Gpu
) -> None:
    names = ("CLOCK_RATE", "MEMORY_CLOCK_RATE", "GLOBAL_MEMORY_BUS_WIDTH")
    attributes = SimpleNamespace(**{f"CU_DEVICE_ATTRIBUTE_{name}": name for name in names})
    driver = SimpleNamespace(
        CUdevice_attribute=attributes,
        cuDeviceGet=lambda ordinal: (0, ordinal),
        cuDeviceGetAttribute=lambda name, handle: (0, answers[names.index(name)]),
    )
    monkeypatch.setattr(gpu_module, "detect", lambda device: get_target("sm_90a"))
    monkeypatch.setattr(gpu_module.context, "initialise", lambda: driver)
    monkeypatch.setattr(gpu_module.context, "device", lambda device: SimpleNamespace(sm_count=132))
    with using_runtime(Runtime()):
        assert gpu_of(0) == wanted
