"""Many arrays of random shapes in one launch on the CPU, tensor maps edited while others are in use."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cudatma
from cudatma.build.render import template_files
from cudatma.errors import HazardError
from cudatma.kernels.data_movement.ragged_copy import TEMPLATE, RaggedCopy, RaggedCopySpec, ragged_copy
from cudatma.target import get_target


def arrays(count: int, dtype: str, seed: int) -> tuple[list[Any], list[Any], list[Any]]:
    """Sources, destinations with gaps between rows, and the buffers that hold those."""
    rng = np.random.default_rng(seed)
    unit = 16 // np.dtype(dtype).itemsize
    sources, destinations, buffers = [], [], []
    for _ in range(count):
        rows, columns = int(rng.integers(0, 40)), unit * int(rng.integers(1, 6))
        gap = unit * int(rng.integers(0, 3))
        sources.append(rng.integers(0, 100, (rows, columns)).astype(dtype))
        buffers.append(np.full((rows, columns + gap), 77, dtype))
        destinations.append(buffers[-1][:, :columns])
    return sources, destinations, buffers


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("target", "dtype"), [("sm_90a", "uint8"), ("sm_120a", "float64")])
def test_every_array_arrives_and_nothing_else_changes(target: str, dtype: str) -> None:
    sources, destinations, buffers = arrays(12, dtype, 3)
    spec = RaggedCopySpec(np.dtype(dtype).itemsize, box_rows=16, box_columns=16, stages=2, maps=2)
    copy = RaggedCopy(sources, destinations, spec=spec, backend="emulator", target=get_target(target))
    report = copy.emulate(blocks=3, schedules=6)
    assert report.is_clean
    for source, destination, buffer in zip(sources, destinations, buffers, strict=True):
        np.testing.assert_array_equal(destination, source)
        assert (buffer[:, source.shape[1] :] == 77).all()


def test_the_public_function_on_the_host() -> None:
    sources, destinations, _ = arrays(5, "float32", 4)
    assert ragged_copy(sources, destinations, backend="emulator") is destinations
    for source, destination in zip(sources, destinations, strict=True):
        np.testing.assert_array_equal(destination, source)


def test_one_map_for_all_would_be_a_hazard(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the spec and the template refuse: a map is edited while a load through it may be in flight."""
    sources, destinations, _ = arrays(12, "float32", 5)
    copy = RaggedCopy(sources, destinations, spec=RaggedCopySpec(4, box_rows=16, box_columns=16), backend="emulator")
    monkeypatch.setattr(RaggedCopySpec, "__post_init__", lambda _: None)
    unguarded = template_files(TEMPLATE)[0].read_text().replace("static_assert(MAPS >= STAGES);", "")
    copy.kernel = cudatma.compile(
        unguarded, RaggedCopySpec(4, box_rows=16, box_columns=16, maps=1), target="sm_90a", template=True
    )
    with pytest.raises(HazardError, match="tensor_map_in_use"):
        copy.emulate(blocks=1)
