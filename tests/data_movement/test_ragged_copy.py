"""The ragged copy: its spec's rules, and what it refuses before anything runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cudatma.errors import ArgumentError, ArgumentTypeError
from cudatma.kernels.data_movement.ragged_copy import RaggedCopy, RaggedCopySpec, ragged_copy


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


def test_a_spec_of_another_element() -> None:
    with pytest.raises(ArgumentError) as caught:
        RaggedCopy([zeros(2, 4)], [zeros(2, 4)], spec=RaggedCopySpec(2), backend="emulator")
    assert caught.value.field == "spec.element_bytes"
