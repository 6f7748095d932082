"""TensorMap without a GPU: the codec, arrays, addresses, and what the driver functions would be called with."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cudatma.arrays import ArrayInfo
from cudatma.descriptor import Im2colSpec, Im2colWideSpec, TensorMap, TiledSpec, codec
from cudatma.descriptor import driver as map_driver
from cudatma.errors import (
    ArgumentError,
    ArgumentTypeError,
    DescriptorError,
    DriverError,
    TargetError,
)

CONFIG = TiledSpec(dtype="float16", dims=(256, 64), strides_bytes=(512,), box=(64, 8), swizzle="128B", address=4096)
COLUMN = Im2colSpec(
    dtype="bfloat16",
    dims=(64, 14, 9, 4),
    strides_bytes=(128, 1792, 16128),
    lower_corner=(-1, -2),
    upper_corner=(1, 2),
    channels_per_pixel=64,
    pixels_per_column=32,
)
WIDE = Im2colWideSpec(
    dtype="bfloat16",
    dims=(64, 14, 4),
    strides_bytes=(128, 1792),
    swizzle="64B",
    lower_corner_w=-3,
    upper_corner_w=3,
    channels_per_pixel=32,
    pixels_per_column=16,
    mode="W128",
)


def aligned(shape: tuple[int, ...], dtype: Any = np.float16, order: Any = "C") -> np.ndarray[Any, Any]:
    """A NumPy array on a 128-byte boundary."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + 128, np.uint8)
    start = -raw.ctypes.data % 128
    return raw[start : start + size].view(dtype).reshape(shape, order=order)


def test_the_codec_makes_the_bytes() -> None:
    made = TensorMap.tiled(CONFIG, encoder="codec", target="sm_90a")
    assert bytes(made) == codec.encode(CONFIG) == bytes(made.data)
    assert made.spec is CONFIG
    assert (made.encoder, made.device, made.owner) == ("codec", None, None)
    assert (made.expected_bytes, made.footprint_bytes, made.smem_alignment_bytes) == (1024, 1024, 1024)
    assert made.pointer % 128 == 0 == ctypes.addressof(made.data) % 128
    assert ctypes.sizeof(made.data) == 128
    assert "codec" in repr(made)
    assert bytes(TensorMap.im2col(COLUMN, encoder="codec")) == codec.encode(COLUMN)


def test_from_array_describes_what_numpy_shows() -> None:
    array = aligned((64, 256))
    made = TensorMap.from_array(array, (8, 64), swizzle="128B")
    assert made.spec == TiledSpec(
        dtype="float16", dims=(256, 64), strides_bytes=(512,), box=(64, 8), swizzle="128B", address=array.ctypes.data
    )
    assert made.owner is array
    assert made.encoder == "codec", "host memory never goes to the driver"
    window = array[8:40, 64:192]
    spec = TensorMap.from_array(window, (8, 64), element_strides=(2, 1)).spec
    assert (spec.dims, spec.strides_bytes, spec.element_strides) == ((128, 32), (512,), (1, 2))
    assert spec.address == array.ctypes.data + 8 * 512 + 128


def test_from_array_follows_the_order_of_the_array() -> None:
    spec = TensorMap.from_array(aligned((256, 64), order="F"), (64, 8)).spec
    assert (spec.dims, spec.strides_bytes) == ((256, 64), (512,))
    assert isinstance(spec, TiledSpec)
    assert spec.box == (64, 8)
    swapped = TensorMap.from_array(aligned((4, 8, 64)), (2, 4, 64), axes=(2, 0, 1)).spec
    assert (swapped.dims, swapped.strides_bytes) == ((64, 4, 8), (1024, 128))


def test_from_array_can_rename_the_type() -> None:
    array = aligned((64, 64), np.float32)
    assert TensorMap.from_array(array, (8, 32), dtype="tfloat32").spec.dtype.name == "tfloat32"
    for wrong in ("float16", "16u4_align8b"):
        with pytest.raises(DescriptorError) as caught:
            TensorMap.from_array(array, (8, 32), dtype=wrong)
        assert caught.value.field == "dtype"


def test_from_address() -> None:
    owner = object()
    made = TensorMap.from_address(
        1 << 40, (4, 64, 256), (1, 8, 64), dtype="bfloat16", owner=owner, device=1, encoder="codec", swizzle="128B"
    )
    assert made.spec == TiledSpec(
        dtype="bfloat16",
        dims=(256, 64, 4),
        strides_bytes=(512, 32768),
        box=(64, 8, 1),
        swizzle="128B",
        address=1 << 40,
    )
    assert (made.owner, made.device) == (owner, 1)
    strided = TensorMap.from_address(
        0, (4, 64), (1, 64), dtype="uint8", strides_bytes=(0, 1), encoder="codec", element_strides=(2, 1)
    )
    assert strided.spec.strides_bytes == (0,)
    with pytest.raises(DescriptorError) as caught:
        TensorMap.from_address(0, (4, 128), (1, 128), dtype="16u4_align8b", encoder="codec")
    assert caught.value.field == "dtype"


def test_targets_are_checked() -> None:
    big = TiledSpec(dtype="float16", dims=(256, 256), strides_bytes=(512,), box=(256, 256))
    assert TensorMap.tiled(big, encoder="codec", target="sm_90a").target is not None
    with pytest.raises(DescriptorError, match="sm_120a"):
        TensorMap.tiled(big, encoder="codec", target="sm_120a")
    with pytest.raises(TargetError):
        TensorMap.tiled(CONFIG, encoder="codec", target="sm_80")


@pytest.mark.parametrize(
    ("call", "error", "field"),
    [
        (lambda: TensorMap.tiled(CONFIG, encoder="gpu"), ArgumentError, "encoder"),
        (lambda: TensorMap.tiled(COLUMN), ArgumentTypeError, "spec"),  # type: ignore[arg-type]
        (lambda: TensorMap.im2col(CONFIG), ArgumentTypeError, "spec"),  # type: ignore[arg-type]
        (lambda: TensorMap.im2col_wide(COLUMN), ArgumentTypeError, "spec"),  # type: ignore[arg-type]
        (lambda: TensorMap.from_array(aligned((8, 64)), (8, 64), encoder="driver"), ArgumentError, "array"),
        (lambda: TensorMap.from_array(aligned((8, 64))[:, ::2], (8, 32)), DescriptorError, "strides_bytes[1]"),
        (lambda: TensorMap.from_array(aligned((8, 64))[::-1], (8, 64)), DescriptorError, "strides_bytes[0]"),
        (lambda: TensorMap.from_array(aligned((8, 64))[:, 1:], (8, 64)), DescriptorError, "address"),
        (lambda: TensorMap.from_array(aligned((8, 60)), (8, 32)), DescriptorError, "strides_bytes[0]"),
        (lambda: TensorMap.from_array(aligned((0, 64)), (8, 64)), DescriptorError, "shape[0]"),
        (lambda: TensorMap.from_array(aligned((8, 64)), (8, 64), swizzle="1B"), DescriptorError, "swizzle"),
        (lambda: TensorMap.from_array(aligned((8, 64)), (8,)), DescriptorError, "box"),
        (lambda: TensorMap.from_array(np.float16(1), ()), (DescriptorError, ArgumentTypeError), None),
        (lambda: TensorMap.from_array([1, 2, 3], (3,)), ArgumentTypeError, "array"),
        (lambda: TensorMap.from_array(aligned((8, 64), np.complex128), (8, 64)), DescriptorError, "dtype"),
        (lambda: TensorMap.from_array(aligned((8, 64), np.complex64), (8, 64)), DescriptorError, "dtype"),
        # Axes as the array counts them, in any order that they lie in memory.
        (lambda: TensorMap.from_array(aligned((512, 64)), (257, 64)), DescriptorError, "box[0]"),
        (lambda: TensorMap.from_array(aligned((512, 64)), (8, 60)), DescriptorError, "box[1]"),
        (lambda: TensorMap.from_array(aligned((512, 64)).T, (60, 8)), DescriptorError, "box[0]"),
        (lambda: TensorMap.from_array(aligned((4, 512, 64)), (1, 257, 64)), DescriptorError, "box[1]"),
        (
            lambda: TensorMap.from_array(aligned((4, 8, 64)), (1, 8, 64), element_strides=(9, 1, 1)),
            DescriptorError,
            "element_strides[0]",
        ),
        (lambda: TensorMap.from_array(aligned((4, 8, 60)), (1, 8, 64)), DescriptorError, "strides_bytes[1]"),
        (lambda: TensorMap.from_address(4096, (8, 0), (8, 64), dtype="float16"), DescriptorError, "shape[1]"),
        (
            lambda: TensorMap.from_address(
                4096, (2, 9, 3, 4, 8), (1, 9, 1, 1, 8), dtype="float16", strides_bytes=(4096, 256, 64, 16, 2),
                interleave="16B", target="sm_90a",
            ),
            DescriptorError,
            "box[1]",
        ),
    ],
)  # fmt: skip
def test_wrong_calls(call: Any, error: Any, field: str | None) -> None:
    with pytest.raises(error) as caught:
        call()
    assert field is None or caught.value.field == field


@pytest.mark.parametrize(("swizzle", "has_wider"), [("32B", True), ("64B", True), ("128B", False)])
def test_a_wider_swizzle_is_suggested_where_there_is_one(swizzle: str, has_wider: bool) -> None:
    with pytest.raises(DescriptorError, match=r"box\[1\]: got 256 bytes; .* elements\)") as caught:
        TensorMap.from_array(aligned((8, 128)), (8, 128), swizzle=swizzle)
    assert ("wider swizzle" in str(caught.value)) is has_wider
    assert "issue several boxes" in str(caught.value)


def test_complex_numbers_are_described_only_where_it_is_said() -> None:
    array = aligned((8, 64), np.complex64)
    with pytest.raises(DescriptorError, match='dtype="uint64"'):
        TensorMap.from_array(array, (8, 32))
    assert TensorMap.from_array(array, (8, 32), dtype="uint64").spec.dtype.name == "uint64"


def test_replace_address_with_the_codec() -> None:
    first, second = aligned((64, 256)), aligned((64, 256))
    made = TensorMap.from_array(first, (8, 64))
    made.replace_address(second)
    assert made.owner is second
    assert made.address == second.ctypes.data
    assert made.spec.address == second.ctypes.data
    assert bytes(made) == codec.encode(TensorMap.from_array(second, (8, 64)).spec)
    made.replace_address(1 << 33)
    assert made.owner is None
    assert codec.decode(bytes(made)).spec == made.spec


@pytest.mark.parametrize(
    ("other", "error", "field"),
    [
        (lambda: aligned((64, 128)), ArgumentError, "array"),
        (lambda: aligned((64, 512))[:, :256], ArgumentError, "array"),
        (lambda: aligned((64, 256), np.float32), ArgumentError, "array"),
        (lambda: aligned((64, 264)).reshape(-1)[4 : 4 + 64 * 256].reshape(64, 256), DescriptorError, "address"),
        (lambda: 8, DescriptorError, "address"),
        (lambda: -16, DescriptorError, "address"),
        (lambda: aligned((16384,)), ArgumentError, "array"),
        (lambda: ArrayInfo(4096, (64, 256), (512, 2), np.dtype("float16"), 1, None, "cai"), ArgumentError, "array"),
        (lambda: "4096", ArgumentTypeError, "array"),
    ],
)
def test_replace_address_refuses_and_changes_nothing(other: Any, error: Any, field: str) -> None:
    made = TensorMap.from_array(aligned((64, 256)), (8, 64))
    before, owner = bytes(made), made.owner
    with pytest.raises(error) as caught:
        made.replace_address(other())
    assert caught.value.field == field
    assert bytes(made) == before
    assert made.owner is owner


class FakeDriver(SimpleNamespace):
    """Records the encode calls; the enumerations and integer types are cuda.bindings' own."""

    def __init__(self) -> None:
        real = pytest.importorskip("cuda.bindings.driver", reason="the CUDA bindings are not installed")
        names = [name for name in dir(real) if name.startswith(("CUtensorMap", "cuuint"))]
        super().__init__(**{name: getattr(real, name) for name in names})
        self.calls: list[tuple[Any, ...]] = []
        self.code = 0

    def _answer(self, *args: Any) -> tuple[Any, ...]:
        self.calls.append(args)
        made = self.CUtensorMap()
        made.opaque = [7] * 16
        return (self.code, made)

    cuTensorMapEncodeTiled = cuTensorMapEncodeIm2col = cuTensorMapEncodeIm2colWide = _answer  # noqa: N815


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    made = FakeDriver()
    monkeypatch.setattr(map_driver, "_driver", lambda: made)
    return made


def plain(value: Any) -> Any:
    return [int(item) for item in value] if isinstance(value, list) else int(value)


def test_arguments_of_the_tiled_call(fake: FakeDriver) -> None:
    raw = map_driver.encode(CONFIG)
    assert raw == b"\7\0\0\0\0\0\0\0" * 16
    assert [plain(value) for value in fake.calls[0]] == [6, 2, 4096, [256, 64], [512], [64, 8], [1, 1], 0, 3, 0, 0]


def test_rank_1_passes_a_stride_that_is_not_needed(fake: FakeDriver) -> None:
    map_driver.encode(TiledSpec(dtype="float32", dims=(1 << 32,), box=(256,)))
    assert len(fake.calls[0][4]) == 1, "an empty list would become a null pointer"
    assert plain(fake.calls[0][3]) == [1 << 32]


def test_arguments_of_the_im2col_calls(fake: FakeDriver) -> None:
    map_driver.encode(COLUMN)
    assert [plain(value) for value in fake.calls[0]] == [
        *(9, 4, 0, [64, 14, 9, 4], [128, 1792, 16128], [-1, -2], [1, 2], 64, 32, [1, 1, 1, 1], 0, 0, 0, 0),
    ]
    map_driver.encode(WIDE)
    assert [plain(value) for value in fake.calls[1]] == [
        *(9, 3, 0, [64, 14, 4], [128, 1792], -3, 3, 32, 16, [1, 1, 1], 0, 1, 2, 0, 0),
    ]


def test_driver_results_are_checked(fake: FakeDriver) -> None:
    fake.code = 1
    with pytest.raises(DriverError) as caught:
        map_driver.encode(CONFIG)
    assert (caught.value.call, caught.value.code) == ("cuTensorMapEncodeTiled", 1)


def test_an_old_cuda_python_lacks_wide_maps(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(FakeDriver, "cuTensorMapEncodeIm2colWide")
    with pytest.raises(DriverError) as caught:
        map_driver.encode(WIDE)
    assert (caught.value.call, caught.value.code) == ("cuTensorMapEncodeIm2colWide", None)


@pytest.mark.skipif(map_driver.has_driver(), reason="this machine has a driver")
def test_without_a_driver() -> None:
    assert TensorMap.tiled(CONFIG).encoder == "codec"
    for call in (lambda: TensorMap.tiled(CONFIG, encoder="driver"), lambda: TensorMap.im2col_wide(WIDE)):
        with pytest.raises(DriverError) as caught:
            call()
        assert caught.value.code is None


def test_the_driver_writes_addresses_in_place() -> None:
    driver = pytest.importorskip("cuda.bindings.driver", reason="the CUDA bindings are not installed")
    made = TensorMap.tiled(CONFIG, encoder="codec")
    assert driver.CUtensorMap(made.pointer).getPtr() == made.pointer
