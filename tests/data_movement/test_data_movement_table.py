"""Tables of ints for a kernel: sources, rejected values, and the stream of the upload."""

from __future__ import annotations

import contextlib
import sys
import types
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cudatma.arrays import ArrayInfo, describe
from cudatma.errors import ArgumentError, ArgumentTypeError
from cudatma.kernels.data_movement.table import int_table

HOST = describe(np.ones((4, 4), np.float32))
CARD = replace(HOST, device=0, kind="cupy")
STARTS = ArrayInfo(1 << 20, (3, 2), (8, 4), np.dtype(np.int32), 0, None, "cupy")


@pytest.mark.parametrize("values", [[(1, 2), (3, 4)], np.array([[1, 2], [3, 4]], np.uint8), ((1, 2), (3, 4))])
def test_host_tables_are_copied(values: Any) -> None:
    table = int_table(values, 2, HOST, True)
    words = table.on_device(HOST, None, None)
    assert (words.tolist(), words.dtype) == ([[1, 2], [3, 4]], np.int32)


def test_empty_tables() -> None:
    for values, columns, shape in (([], 3, (0, 3)), (np.zeros((0, 3)), 3, (0, 3)), ([], None, (0,))):
        assert int_table(values, columns, HOST, True).on_device(HOST, None, None).shape == shape


@pytest.mark.parametrize(
    ("values", "columns", "beside", "error", "field"),
    [
        ([1, 2], 2, HOST, ArgumentError, "starts.shape"),
        ([[1, 2]], 3, HOST, ArgumentError, "starts.shape"),
        ([[1], [1, 2]], 2, HOST, ArgumentError, "starts"),
        ([[1, 2]], None, HOST, ArgumentError, "starts.shape"),
        ([[1.0, 2.0]], 2, HOST, ArgumentTypeError, "starts"),
        ([[True, False]], 2, HOST, ArgumentTypeError, "starts"),
        ("12", 2, HOST, ArgumentTypeError, "starts"),
        ([[0, 2**31]], 2, HOST, ArgumentError, "starts"),
        ([[0, -(2**31) - 1]], 2, HOST, ArgumentError, "starts"),
        ([2**64], None, HOST, ArgumentError, "starts"),
        (np.array([2**63 + 1], np.uint64), None, HOST, ArgumentError, "starts"),
        (STARTS, 2, HOST, ArgumentError, "starts"),
        (STARTS, 3, CARD, ArgumentError, "starts.shape"),
        (replace(STARTS, device=1), 2, CARD, ArgumentError, "starts"),
        (replace(STARTS, dtype=np.dtype(np.int64), strides_bytes=(16, 8)), 2, CARD, ArgumentError, "starts"),
        (replace(STARTS, strides_bytes=(16, 4)), 2, CARD, ArgumentError, "starts"),
    ],
)
def test_what_is_refused(values: Any, columns: int | None, beside: ArrayInfo, error: Any, field: str) -> None:
    with pytest.raises(error) as caught:
        int_table(values, columns, beside, False)
    assert caught.value.field == field


def test_a_table_on_the_card_stays_there() -> None:
    table = int_table(STARTS, 2, CARD, False)
    assert table.values is None
    assert table.on_device(CARD, None, 5) is STARTS


class Stream:
    """A fake stream that is current inside its ``with`` block."""

    current = 7

    def __init__(self, handle: int, *_: Any, **__: Any) -> None:
        self.ptr = self.cuda_stream = handle

    def __enter__(self) -> None:
        self.before, Stream.current = Stream.current, self.ptr

    def __exit__(self, *_: Any) -> None:
        Stream.current = self.before


@pytest.fixture(params=["cupy", "torch"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, list[int]]:
    """Return (kind, streams of the uploads) of a fake CuPy or torch without a GPU."""
    uploads: list[int] = []

    def upload(*_: Any) -> ArrayInfo:
        uploads.append(Stream.current)
        return STARTS

    fake: Any = types.ModuleType(request.param)
    fake.ndarray = fake.Tensor = type("none", (), {})
    fake.cuda = types.SimpleNamespace(
        ExternalStream=Stream,
        Device=contextlib.nullcontext,
        get_current_stream=lambda device: Stream(Stream.current),
        current_stream=lambda device: Stream(Stream.current),
        default_stream=lambda device: Stream(0),
        stream=lambda stream: stream,
        runtime=types.SimpleNamespace(CUDARuntimeError=RuntimeError),
    )
    fake.asarray = upload
    fake.from_numpy = lambda words: types.SimpleNamespace(to=upload)
    monkeypatch.setitem(sys.modules, request.param, fake)
    return request.param, uploads


@pytest.mark.parametrize(("stream", "where"), [(7, 7), (9, 9), (0, 0)])
def test_uploads_are_in_the_order_of_the_launch(library: tuple[str, list[int]], stream: int, where: int) -> None:
    kind, uploads = library
    src = replace(CARD, kind=kind)
    assert int_table([(1, 2)], 2, src, True).on_device(src, None, stream) is STARTS
    assert uploads == [where]
    assert Stream.current == 7
