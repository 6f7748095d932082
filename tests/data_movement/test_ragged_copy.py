"""The ragged copy: many arrays in one launch, tensor maps that are edited while others are in use, and rejected
calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from movement_cases import check_ragged, ragged_arrays

import cudatma
from cudatma.build.render import template_files
from cudatma.errors import ArgumentError, ArgumentTypeError, HazardError
from cudatma.kernels.data_movement.ragged_copy import TEMPLATE, RaggedCopy, RaggedCopyConfig, ragged_copy
from cudatma.target import get_target


def zeros(*shape: int, dtype: Any = np.float32) -> Any:
    return np.zeros(shape, dtype)


BAD: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "no sequence": (3, [], ArgumentTypeError, "sources"),
    "a string": ([], "ab", ArgumentTypeError, "destinations"),
    "counts": ([zeros(2, 4)], [], ArgumentError, "destinations"),
    "not an array": ([None], [zeros(2, 4)], ArgumentTypeError, "sources[0]"),
    "rank": ([zeros(2, 4)], [zeros(2, 4, 1)], ArgumentError, "destinations[0].shape"),
    "shape": ([zeros(2, 4), zeros(2, 8)], [zeros(2, 4), zeros(2, 4)], ArgumentError, "destinations[1].shape"),
    "dtype": ([zeros(2, 4), zeros(2, 4, dtype="i4")], [zeros(2, 4)] * 2, ArgumentError, "sources[1]"),
    "wide elements": ([zeros(2, 4, dtype="c16")], [zeros(2, 4, dtype="c16")], ArgumentError, "sources[0].dtype"),
    "short rows": ([zeros(2, 3)], [zeros(2, 3)], ArgumentError, "sources[0].shape"),
    "columns apart": ([zeros(4, 8)[:, ::2]], [zeros(4, 4)], ArgumentError, "sources[0].strides"),
    "upside down": ([zeros(4, 8)[::-1]], [zeros(4, 8)], ArgumentError, "sources[0].strides"),
    "pitch": ([zeros(4, 9)[:, :8]], [zeros(4, 8)], ArgumentError, "sources[0].strides"),
    "broadcast": ([np.broadcast_to(zeros(1, 8), (4, 8))], [zeros(4, 8)], ArgumentError, "sources[0].strides"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arrays_are_named(name: str) -> None:
    sources, destinations, error, field = BAD[name]
    with pytest.raises(error) as caught:
        RaggedCopy(sources, destinations, backend="emulator")
    assert caught.value.field == field  # type: ignore[attr-defined]


def test_an_address_off_16_bytes() -> None:
    odd = zeros(9)[1:].reshape(2, 4)
    with pytest.raises(ArgumentError) as caught:
        RaggedCopy([odd], [zeros(2, 4)], backend="emulator")
    assert caught.value.field == "sources[0].pointer"


def test_destinations_share_nothing() -> None:
    buffer, other = zeros(8, 16), zeros(8, 8)
    with pytest.raises(ArgumentError, match="overlaps destinations"):
        RaggedCopy([other, other.copy()], [buffer[:, :8], buffer[:, 4:12]], backend="emulator")
    with pytest.raises(ArgumentError, match="overlaps sources"):
        RaggedCopy([buffer[:, :8]], [buffer[:, 4:12]], backend="emulator")
    RaggedCopy([other, other], [buffer[:, :8], buffer[:, 8:]], backend="emulator")  # windows side by side, one source


def test_a_destination_that_cannot_be_written() -> None:
    frozen = zeros(2, 4)
    frozen.flags.writeable = False
    with pytest.raises(ArgumentError, match="read-only"):
        RaggedCopy([zeros(2, 4)], [frozen], backend="emulator")


def test_nothing_to_copy() -> None:
    assert ragged_copy([], [], backend="emulator") == []
    ragged_copy([zeros(0, 4), zeros(3, 0)], [zeros(0, 4), zeros(3, 0)], backend="emulator")


def test_a_config_of_another_element() -> None:
    with pytest.raises(ArgumentError) as caught:
        RaggedCopy([zeros(2, 4)], [zeros(2, 4)], config=RaggedCopyConfig(2), backend="emulator")
    assert caught.value.field == "config.element_bytes"


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("target", "dtype"), [("sm_90a", "uint8"), ("sm_120a", "float64")])
def test_every_array_arrives_and_nothing_else_changes(target: str, dtype: str) -> None:
    sources, destinations, buffers = ragged_arrays(np, dtype, count=12, max_rows=40, max_chunks=6, seed=3)
    config = RaggedCopyConfig(np.dtype(dtype).itemsize, box_rows=16, box_columns=16, stages=2, maps=2)
    copy = RaggedCopy(sources, destinations, config=config, backend="emulator", target=get_target(target))
    report = copy.emulate(blocks=3, schedules=2)
    assert report.is_clean
    check_ragged(sources, destinations, buffers)


def test_the_public_function_on_the_host() -> None:
    sources, destinations, buffers = ragged_arrays(np, "float32", count=5, max_rows=40, max_chunks=6, seed=4)
    assert ragged_copy(sources, destinations, backend="emulator") is destinations
    check_ragged(sources, destinations, buffers)


def test_one_map_for_all_would_be_a_hazard(monkeypatch: pytest.MonkeyPatch) -> None:
    """The config and the template prevent this: a map is edited while a load through it may be in flight."""
    sources, destinations, _ = ragged_arrays(np, "float32", count=12, max_rows=40, max_chunks=6, seed=5)
    copy = RaggedCopy(
        sources, destinations, config=RaggedCopyConfig(4, box_rows=16, box_columns=16), backend="emulator"
    )
    monkeypatch.setattr(RaggedCopyConfig, "__post_init__", lambda _: None)
    unguarded = template_files(TEMPLATE)[0].read_text().replace("static_assert(MAPS >= STAGES);", "")
    copy.kernel = cudatma.compile(
        unguarded, RaggedCopyConfig(4, box_rows=16, box_columns=16, maps=1), target="sm_90a", template=True
    )
    with pytest.raises(HazardError, match="tensor_map_in_use"):
        copy.emulate(blocks=1)
