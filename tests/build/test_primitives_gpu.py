"""The primitives on a GPU, against NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import probe_configs as probes
import pytest
from primitive_tests import *  # noqa: F403
from primitive_tests import POISON, Array, Machine, poisoned

from cudatma.build.kernel import load_kernel
from cudatma.target import detect

pytestmark = pytest.mark.gpu


class Gpu:
    encoder = "driver"

    def __init__(self) -> None:
        self.target = detect()

    def upload(self, array: Array) -> Any:
        """Copy an array to the GPU with the same dtype; CuPy has a bf16 of its own."""
        import cupy

        return cupy.asarray(array)

    def download(self, array: Any) -> Array:
        import cupy

        return np.asarray(cupy.asnumpy(array))

    def launch(self, name: str, config: Any, grid: int, block: int, args: Sequence[Any], **options: Any) -> None:
        load_kernel(f"probes/{name}.cu.j2", config, self.target).launch(grid, block, tuple(args), **options)


@pytest.fixture(scope="module")
def machine() -> Machine:
    return Gpu()


def test_a_bulk_copy_of_64_kib(machine: Machine) -> None:
    test_bulk_copies(machine, 65536)  # noqa: F405


def test_a_programmatic_launch(machine: Machine) -> None:
    values, out = np.arange(32, dtype=np.uint32), poisoned(machine, 32, np.uint32)
    args = (machine.upload(np.zeros(1, np.uint32)), machine.upload(values), out)
    machine.launch("sync", probes.Plain("sync"), 1, 128, args, programmatic=True)
    assert (machine.download(out) == values[::-1]).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint8, np.int64], ids=str)
@pytest.mark.parametrize("shape", [(1, 16), (64, 64), (65, 80), (1000, 1040), (4099, 2064)])
@pytest.mark.parametrize("stages", [2, 3, 5])
def test_the_tile_copy_example(
    machine: Machine, load_example: Callable[[str], ModuleType], dtype: Any, shape: tuple[int, int], stages: int
) -> None:
    source = np.random.default_rng(8).integers(0, 100, shape).astype(dtype)
    destination = poisoned(machine, (shape[0] + 1, shape[1]), dtype)
    load_example("tile_copy").tile_copy(machine.upload(source), destination[: shape[0]], stages=stages)
    result = machine.download(destination)
    assert (result[: shape[0]] == source).all()
    assert (result[shape[0] :].view(np.uint8) == POISON).all()
