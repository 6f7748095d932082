"""Wrong calls of the data movement operations raise their typed errors before anything is compiled."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cudatma as c
from cudatma import backend as backend_module
from cudatma.arrays import ArrayInfo, describe
from cudatma.kernels import arguments as arguments_module
from cudatma.kernels.data_movement import ring as rings
from cudatma.kernels.data_movement.broadcast import BroadcastConfig
from cudatma.kernels.data_movement.configs import PlainConfig, RunConfig, WindowConfig
from cudatma.kernels.data_movement.copy import plan_copy
from cudatma.kernels.data_movement.gather import GatherConfig
from cudatma.kernels.data_movement.im2col import Im2colCopyConfig
from cudatma.kernels.data_movement.movement import LaunchLimits
from cudatma.kernels.data_movement.plans import plain_plan, run_plan, window_plan
from cudatma.kernels.data_movement.prefetch import PrefetchConfig
from cudatma.kernels.data_movement.ring import Setting, stages_for
from cudatma.kernels.data_movement.rows import RowsConfig
from cudatma.kernels.data_movement.window import Axis, Window
from cudatma.kernels.registry import REGISTRY
from cudatma.target import TARGETS, get_target

Array = np.ndarray[Any, Any]
KIB = 1024
F32 = np.ones((32, 64), np.float32)
I8 = np.ones((32, 64), np.int8)
READONLY = np.ones((32, 64), np.float32)
READONLY.setflags(write=False)
CROOKED = np.frombuffer(bytes(41), np.uint8)[1:].view(np.float32)
STUCK = np.lib.stride_tricks.as_strided(np.ones(64, np.float32), (32, 64), (0, 4))
WOVEN = np.lib.stride_tricks.as_strided(np.ones(256, np.float32), (32, 64), (16, 4))


@pytest.fixture(autouse=True)
def nothing_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> Any:
        pytest.fail("a wrong call was compiled")

    monkeypatch.setattr(arguments_module, "load_kernel", refuse)


def fresh(shape: tuple[int, ...] = (32, 64), dtype: Any = np.float32) -> Array:
    return np.zeros(shape, dtype)


Call = Callable[[dict[str, Any]], object]
#: what is called, the error, its field, a part of its message
WRONG: list[tuple[Call, type[Exception], str, str]] = [
    # copy
    (lambda o: c.copy("text", **o), c.ArgumentTypeError, "src", "str"),
    (lambda o: c.copy(np.array([None]), **o), c.ArgumentTypeError, "src.dtype", "without Python objects"),
    (lambda o: c.copy(F32, offset=(1,), **o), c.ArgumentError, "offset", "2 ints"),
    (lambda o: c.copy(F32, offset=(1.5, 0), **o), c.ArgumentTypeError, "offset", "2 ints"),
    (lambda o: c.copy(F32, offset=(0, 8), shape=(32, 64), **o), c.ArgumentError, "offset[1]", "pass pad"),
    (lambda o: c.copy(F32, offset=(-1, 0), shape=(3, 64), **o), c.ArgumentError, "offset[0]", "pass pad"),
    (lambda o: c.copy(F32, shape=(33, 64), **o), c.ArgumentError, "offset[0]", "at most 32"),
    (lambda o: c.copy(F32, shape=(-1, 64), **o), c.ArgumentError, "shape[0]", "at least 0"),
    (lambda o: c.copy(F32, pad="ones", **o), c.ArgumentError, "pad", '"zeros" or "nan"'),
    (lambda o: c.copy(I8, pad="nan", **o), c.ArgumentError, "pad", "float16"),
    (lambda o: c.copy(F32, cache="evict", **o), c.ArgumentError, "cache", "evict_first"),
    (lambda o: c.copy(F32, via="dma", **o), c.ArgumentError, "via", '"auto", "tma" or "plain"'),
    (lambda o: c.copy(F32, out=fresh((32, 32)), **o), c.ArgumentError, "out", "(32, 64)"),
    (lambda o: c.copy(F32, out=fresh(dtype=np.int32), **o), c.ArgumentError, "out", "float32"),
    (lambda o: c.copy(F32, out=F32, **o), c.ArgumentError, "out", "an array with its own memory"),
    (lambda o: c.copy(F32, out=READONLY, **o), c.ArgumentError, "out", "writable"),
    (lambda o: c.copy(F32, out=STUCK, **o), c.ArgumentError, "out.strides", "free of overlaps"),
    (lambda o: c.copy(F32, out=WOVEN, **o), c.ArgumentError, "out.strides", "(16, 4)"),
    (lambda o: c.copy(F32, offset=(10**30, 0), pad="zeros", **o), c.ArgumentError, "offset[0]", "64-bit"),
    (lambda o: c.copy(F32, offset=(-(2**61), 0), pad="zeros", **o), c.ArgumentError, "offset", "2**63 bytes"),
    (lambda o: c.copy(F32, shape=(10**12, 10**12), pad="zeros", **o), c.ArgumentError, "shape", "2**63 bytes"),
    (lambda o: c.copy(F32, shape=(0, 10**30), pad="zeros", **o), c.ArgumentError, "shape", "2**63 bytes"),
    *[(lambda o, cache=cache: c.copy(F32, cache=cache, **o), c.ArgumentError, "cache", f"got {cache}")
      for cache in (0, False, 0.0, "")],
    (lambda o: c.copy(F32[:, :63], via="tma", **o), c.DescriptorError, "strides_bytes[0]", "16 bytes"),
    (lambda o: c.copy(F32[:, 1:61], via="tma", **o), c.DescriptorError, "address", "16 bytes"),
    (lambda o: c.copy(F32[:, ::2], via="tma", **o), c.DescriptorError, "strides_bytes[0]", "along the innermost axis"),
    (lambda o: c.copy(F32[::-1], via="tma", **o), c.DescriptorError, "strides_bytes[0]", "negative strides"),
    (
        lambda o: c.copy(F32, offset=(0, -1), shape=(32, 64), pad="zeros", via="tma", **o),
        c.DescriptorError,
        "coords[0]",
        "16 bytes",
    ),
    (
        lambda o: c.copy(F32, offset=(99, 0), shape=(3, 64), pad="zeros", via="tma", **o),
        c.DescriptorError,
        "offset",
        "outside",
    ),
    (
        lambda o: c.copy(CROOKED, offset=(-1,), shape=(9,), pad="nan", via="plain", **o),
        c.DescriptorError,
        "address",
        "4 bytes",
    ),
    # transpose
    (lambda o: c.transpose(F32[0], **o), c.ArgumentError, "src.shape", "two or more extents"),
    (lambda o: c.transpose(F32, out=fresh(), **o), c.ArgumentError, "out", "(64, 32)"),
    (lambda o: c.transpose(F32.T, out=WOVEN, **o), c.ArgumentError, "out.strides", "free of overlaps"),
    (lambda o: c.transpose(F32[:31], via="tma", **o), c.DescriptorError, "out.strides_bytes[0]", "16 bytes"),
    (lambda o: c.transpose(fresh((4, 4), np.complex128), via="tma", **o), c.DescriptorError, "dtype", "1, 2, 4 or 8"),
    (
        lambda o: c.transpose(fresh((4, 4, 32, 32))[:, :3], via="tma", **o),
        c.DescriptorError,
        "src.strides",
        "batch axes",
    ),
    # reduce_into
    (lambda o: c.reduce_into(fresh(), F32, "mul", **o), c.ArgumentError, "op", '"add", "min"'),
    (lambda o: c.reduce_into(fresh(), I8, "add", **o), c.ArgumentError, "src", "float32"),
    (lambda o: c.reduce_into(fresh(), F32[0], "add", **o), c.ArgumentError, "src", "2 axes"),
    (lambda o: c.reduce_into(fresh(dtype=np.int8), I8, "add", **o), c.ArgumentTypeError, "src.dtype", "uint32"),
    (lambda o: c.reduce_into(fresh(), F32, "min", **o), c.ArgumentTypeError, "src.dtype", "bfloat16"),
    (lambda o: c.reduce_into(fresh(), F32, "xor", **o), c.ArgumentTypeError, "src.dtype", "integer type"),
    (lambda o: c.reduce_into(fresh(dtype=">f4"), F32.astype(">f4"), "add", **o), c.ArgumentTypeError, "src.dtype",
     "byte order"),
    (lambda o: c.reduce_into(fresh(dtype=np.uint16), np.ones((32, 64), np.uint16), "max", **o),
     c.ArgumentTypeError, "src.dtype", "uint32"),
    (lambda o: c.reduce_into(fresh(dtype=np.int32), np.ones((32, 64), np.int32), "inc", **o),
     c.ArgumentTypeError, "src.dtype", "uint32 for inc"),
    (lambda o: c.reduce_into(F32, F32, "add", **o), c.ArgumentError, "dst", "an array with its own memory"),
    (lambda o: c.reduce_into(READONLY, F32, "add", **o), c.ArgumentError, "dst", "writable"),
    (lambda o: c.reduce_into(fresh((5,)), np.ones(5, np.float32), "add", **o), c.DescriptorError, "address, size",
     "pad"),
    (lambda o: c.reduce_into(fresh(), F32, "add", offset=(0, 1), **o), c.DescriptorError, "address", "16 bytes"),
    (lambda o: c.reduce_into(fresh((32, 128)), F32[:, :62], "add", **o), c.DescriptorError, "dims[0]", "overwrite"),
    (lambda o: c.reduce_into(fresh(dtype=np.int8)[:, :8], I8[:, :8], "xor", **o), c.DescriptorError, "dims[0]", ""),
    (lambda o: c.reduce_into(WOVEN, F32, "add", **o), c.ArgumentError, "dst.strides", "free of overlaps"),
    (lambda o: c.reduce_into(fresh(), F32, "add", cache=0, **o), c.ArgumentError, "cache", "got 0"),
    # tile_copy
    (lambda o: c.tile_copy(F32, WOVEN, **o), c.ArgumentError, "dst.strides", "free of overlaps"),
    (lambda o: c.tile_copy(F32, READONLY, **o), c.ArgumentError, "dst", "writable"),
    *[(lambda o, stages=stages: c.tile_copy(F32, fresh(), stages=stages, **o), error, "stages", "")
      for error, values in ((c.ArgumentTypeError, ("2", None, [2], 2.0, True)), (c.ArgumentError, (-1, 1, 10**9)))
      for stages in values],
    # gather, halo_tiles
    (lambda o: c.gather(F32, [(0, 0)], (4, 6), **o), c.ArgumentError, "box[1]", "16-byte chunks"),
    (lambda o: c.gather(F32, [(0, 0)], (257, 4), **o), c.ArgumentError, "box[0]", "1 to 256"),
    (lambda o: c.gather(F32, [(0, 0)], (4,), **o), c.ArgumentError, "box", "2 ints"),
    (lambda o: c.gather(F32, [(0, 0), (1, 2)], (4, 8), **o), c.ArgumentError, "starts[1][1]", "a multiple of 4"),
    (lambda o: c.gather(F32, [(0, 2**40)], (4, 8), **o), c.ArgumentError, "starts", "32-bit"),
    (lambda o: c.gather(F32, [0, 1], (4, 8), **o), c.ArgumentError, "starts.shape", "(rows, 2)"),
    (lambda o: c.gather(F32, [(0.0, 0.0)], (4, 8), **o), c.ArgumentTypeError, "starts", "integers"),
    (lambda o: c.gather(fresh((4, 4), np.complex128), [(0, 0)], (2, 2), **o), c.ArgumentError, "src.dtype", "bytes"),
    (lambda o: c.gather(fresh((1,) * 6), [(0,) * 6], (1,) * 6, **o), c.ArgumentError, "rank", "1 to 5"),
    (lambda o: c.gather(F32, [(0, 0)], (4, 8), out=fresh((1, 4, 16))[..., :8], **o), c.ArgumentError, "out", "C order"),
    (lambda o: c.gather(F32[:, 1:], [(0, 0)], (4, 8), **o), c.DescriptorError, "address", "16 bytes"),
    (lambda o: c.gather(fresh((0, 64)), [(0, 0)], (4, 8), **o), c.DescriptorError, "src.shape", "nonempty"),
    (lambda o: c.gather(F32, [(0, 0)], (128, 256), **o), c.ArgumentError, "stages", "smaller box"),
    (lambda o: c.halo_tiles(F32, (8, 16), (1, 2), **o), c.ArgumentError, "halo, tile[0][1]", "a multiple of 4"),
    (lambda o: c.halo_tiles(F32, (8, 16), (-1, 4), **o), c.ArgumentError, "halo[0]", "at least 0"),
    (lambda o: c.halo_tiles(F32, (0, 16), (1, 4), **o), c.ArgumentError, "tile[0]", "at least 1"),
    (lambda o: c.halo_tiles(F32, (256, 16), (1, 4), **o), c.ArgumentError, "tile + 2 halo[0]", "1 to 256"),
    # im2col
    (lambda o: c.im2col(F32, 3, **o), c.ArgumentError, "src.shape", "3 to 5 extents"),
    (lambda o: c.im2col(fresh((1, 5, 5, 4)), (3, 3, 3), **o), c.ArgumentError, "kernel", "2 ints"),
    (lambda o: c.im2col(fresh((1, 5, 5, 4)), 0, **o), c.ArgumentError, "kernel[0]", "at least 1"),
    (lambda o: c.im2col(fresh((1, 5, 5, 4)), 3, stride=True, **o), c.ArgumentTypeError, "stride", "an int"),
    (lambda o: c.im2col(fresh((1, 5, 5, 4)), 3, padding=-1, **o), c.ArgumentError, "padding[0]", "at least 0"),
    (lambda o: c.im2col(fresh((1, 5, 5, 3)), 3, **o), c.DescriptorError, "strides_bytes[0]", "16 bytes"),
    (lambda o: c.im2col(fresh((1, 50, 50, 4)), 3, stride=9, **o), c.DescriptorError, "element_strides[1]", "1 to 8"),
    (lambda o: c.im2col(fresh((1, 9, 9, 9, 4)), 3, padding=17, **o), c.DescriptorError, "lower_corner[0]", "-16 to 15"),
    (lambda o: c.im2col(fresh((1, 5, 5, 8))[..., ::2], 3, **o), c.DescriptorError, "src.strides", "channel"),
    *[(lambda o, args=args: c.im2col(fresh((1, 5, 5, 4)), **args, **o), c.ArgumentError, field, "less than 2**31")
      for args, field in (({"kernel": 10**30}, "kernel[0]"), ({"kernel": 3, "padding": 10**30}, "padding[0]"),
                          ({"kernel": 3, "stride": 10**30}, "stride[0]"))],
    (lambda o: c.im2col(fresh((1, 5, 5, 4)), 2**31 - 1, padding=2**30, **o), c.ArgumentError, "kernel, padding",
     "2**63 bytes"),
    # broadcast, prefetch, rows
    (lambda o: c.broadcast(F32, 0, **o), c.ArgumentError, "copies", "positive int"),
    (lambda o: c.broadcast(F32, 10**5000, **o), c.ArgumentError, "copies", "2**63 bytes"),
    (lambda o: c.broadcast(F32[:, :8], 2, **o), c.ArgumentError, "src", "C order"),
    (lambda o: c.broadcast(np.ones(5, np.float32), 2, **o), c.DescriptorError, "src.address", "a multiple of 16"),
    (lambda o: c.prefetch(F32, offset=(0, 60), shape=(2, 8), **o), c.ArgumentError, "offset[1]", "pass pad"),
    (lambda o: c.prefetch(F32[:, 1:60], **o), c.DescriptorError, "address", "16 bytes"),
    (lambda o: c.gather_rows(F32[0], [0], **o), c.ArgumentError, "src.shape", "(rows, columns)"),
    (lambda o: c.gather_rows(F32, [[0]], **o), c.ArgumentError, "rows.shape", "(rows,)"),
    (lambda o: c.gather_rows(F32, [10**5000], **o), c.ArgumentError, "rows", "32-bit"),
    (lambda o: c.scatter_rows(fresh(), [2**32 + 1], F32[:1], **o), c.ArgumentError, "rows", "32-bit"),
    (lambda o: c.scatter_rows(WOVEN, [0], F32[:1], **o), c.ArgumentError, "dst.strides", "free of overlaps"),
    (lambda o: c.scatter_rows(fresh(), [0], F32, **o), c.ArgumentError, "rows.shape", "32"),
    (lambda o: c.scatter_rows(fresh((32, 32)), [0] * 32, F32, **o), c.ArgumentError, "src", "32 columns"),
    # where it runs
    (lambda o: c.copy(F32, backend="gpu"), c.ArgumentError, "backend", "emulator"),
    (lambda o: c.copy(F32, backend="cuda"), c.ArgumentError, "src.device", "CUDA device"),
]  # fmt: skip


@pytest.mark.parametrize("index", range(len(WRONG)), ids=lambda i: f"{WRONG[i][2]}-{i}")
def test_a_wrong_call_is_answered(index: int) -> None:
    call, error, field, part = WRONG[index]
    with pytest.raises(error) as caught:
        call({"backend": "emulator"})
    assert getattr(caught.value, "field", None) == field
    assert part in str(caught.value)


def test_reference_refuses_what_the_emulator_refuses() -> None:
    """The checks of arguments are the same, except for the limits of TMA."""
    for call, error, field, part in WRONG:
        if error is not c.DescriptorError and field not in ("backend", "src.device") and part != "smaller box":
            with pytest.raises(error):
                call({"backend": "reference"})


def test_arrays_of_another_device() -> None:
    info = replace(describe(F32), device=0, kind="cupy")
    with pytest.raises(c.ArgumentError) as caught:
        c.copy(info, out=fresh(), backend="cuda")
    assert caught.value.field == "out"
    with pytest.raises(c.ArgumentError) as caught:
        c.reduce_into(fresh(), info, "add", backend="cuda")
    assert caught.value.field == "dst"


def test_without_a_card_it_says_where_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_module, "_has_usable_gpu", lambda: False)
    monkeypatch.delenv("CUDATMA_BACKEND", raising=False)
    empty = fresh((0, 64))
    calls: list[Callable[[], object]] = [
        lambda: c.copy(empty),
        lambda: c.copy(empty, out=fresh((0, 64))),
        lambda: c.transpose(empty),
        lambda: c.reduce_into(fresh(), empty, "add"),
        lambda: c.gather(F32, [], (4, 8)),
        lambda: c.gather(F32, [], (4, 8), out=fresh((0, 4, 8))),
        lambda: c.broadcast(empty, 2),
        lambda: c.prefetch(empty),
    ]
    for call in calls:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        assert [(w.category, w.filename) for w in caught] == [(c.BackendWarning, __file__)]


# ---- plans of arrays that no machine here holds


def card(blocks: int = 264) -> LaunchLimits:
    return LaunchLimits(get_target("sm_90a"), blocks)


def info(shape: tuple[int, ...], strides: tuple[int, ...], pointer: int = 1 << 20) -> ArrayInfo:
    return ArrayInfo(pointer, shape, strides, np.dtype(np.float32), None, None, "numpy")


def test_huge_runs_and_windows_are_planned() -> None:
    nbytes = 1 << 41
    window = Window(1 << 20, 1 << 45, 1, (Axis(0, nbytes, nbytes, 1, 1),))
    planned = run_plan(window, (info((1,), (4,)), info((1,), (4,))), card(), setting=Setting())
    assert planned.sizes.grid == 264
    assert planned.parameters[2] == nbytes
    side, pitch = 16384, 65536
    window = Window(1 << 20, 1 << 40, 4, (Axis(100, 12000, side, pitch, 48000), Axis(200, 12000, side, 4, 4)))
    arrays = info((side, side), (pitch, 4)), info((12000, 12000), (48000, 4))
    planned = window_plan(window, arrays, card(), setting=Setting())
    assert planned.parameters[0].spec.dims == (12000, 12000)
    assert planned.parameters[0].offset_bytes == 100 * pitch + 800
    assert planned.parameters[2:] == (0, 256, 47, 0, 16, 750, 16384, 47 * 750)
    window = Window(1 << 20, 1 << 50, 4, (Axis(0, 1 << 33, 1 << 33, 16, 16), Axis(0, 4, 4, 4, 4)))
    with pytest.raises(c.DescriptorError, match=r"2\*\*32"):
        window_plan(window, (info((1, 4), (16, 4)), info((1, 4), (16, 4))), card())


def test_a_window_goes_as_boxes_of_8_byte_elements() -> None:
    """A row of a box has twice as many bytes as with float32. A window with an odd number of columns keeps its
    elements."""
    for columns, box, width in ((12000, (250, 4), 8), (11999, (256, 8), 4)):
        arrays = info((16384, columns + 1000), (65536, 4)), info((12000, 12000), (48000, 4), 1 << 40)
        planned = plan_copy(*arrays, (100, 1000), card(), via="tma")
        assert planned.parameters[0].spec.dtype.element_bytes == width
        assert (planned.parameters[3], planned.parameters[6]) == box
        assert (planned.config.stage_bytes, planned.config.stages, planned.config.in_flight, planned.sizes.grid) == (
            8 * KIB,
            10,
            5,
            132,
        )


def test_plain_code_counts_in_as_many_bits_as_it_needs() -> None:
    for rows, bits in ((1 << 20, 32), (1 << 22, 64)):
        axes = (Axis(0, rows, rows, 4100, 4104), Axis(1, 1024, 1025, 4, 4))
        planned = plain_plan(Window(1 << 20, 1 << 45, 4, axes), (info((1,), (4,)), info((1,), (4,))), card())
        assert (planned.config.index_bits, planned.parameters[3]) == (bits, rows * 1024)


def test_small_runs_take_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rings, "RUN", Setting())
    for nbytes, stage, grid in ((64, 4 * KIB, 1), (1 << 20, 4 * KIB, 256), (264 * 16 * KIB, 16 * KIB, 264)):
        window = Window(1 << 20, 1 << 45, 1, (Axis(0, nbytes, nbytes, 1, 1),))
        planned = run_plan(window, (info((1,), (4,)), info((1,), (4,))), card())
        assert (planned.config.stage_bytes, planned.sizes.grid) == (stage, grid)


def test_runs_too_short_for_large_slots_take_the_usual_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    large = Setting(slot_bytes=64 * KIB, ctas_per_sm=1, max_stages=3)
    monkeypatch.setattr(rings, "RUN", large)
    cases = (
        (132 * 64, 64 * KIB, 3, 132),
        (132 * 64 - 1, 16 * KIB, 6, 264),
        (264 * 16, 16 * KIB, 6, 264),
        (264 * 16 - 1, 4 * KIB, 6, 264),
    )
    for slots, stage, stages, grid in cases:
        window = Window(1 << 20, 1 << 45, 1, (Axis(0, slots * KIB, slots * KIB, 1, 1),))
        arrays = info((1,), (4,)), info((1,), (4,))
        planned = run_plan(window, arrays, card())
        assert (planned.config.stage_bytes, planned.config.stages, planned.sizes.grid) == (stage, stages, grid)
        assert run_plan(window, arrays, card(), "add", "u32").config.stage_bytes < 64 * KIB
        assert run_plan(window, arrays, card(), setting=large).config.stage_bytes == 64 * KIB


# ---- configs


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: WindowConfig("mul", 2, 1024, 3, 1), "op"),
        (lambda: WindowConfig("copy", 6, 1024, 3, 1), "rank"),
        (lambda: WindowConfig("copy", 2, 1000, 3, 1), "stage_bytes"),
        (lambda: WindowConfig("copy", 2, 1024, 1, 1), "stages"),
        (lambda: WindowConfig("copy", 2, 1024, 3, 3), "in_flight"),
        (lambda: WindowConfig("copy", 2, 1024, 3, 1, "hot"), "load_cache"),
        (lambda: WindowConfig("add", 2, 1024, 3, 1, "", "evict_first"), "store_cache"),
        (lambda: Setting(ctas_per_sm=0), "ctas_per_sm"),
        (lambda: Setting(max_stages=1), "max_stages"),
        (lambda: Setting(in_flight=-1), "in_flight"),
        (lambda: RunConfig("add", "b32", 1024, 3, 1), "kind"),
        (lambda: RunConfig("copy", "b8", 1 << 21, 3, 1), "operands"),
        (lambda: PlainConfig(16, 1), "element_bytes"),
        (lambda: PlainConfig(4, 0), "rank"),
        (lambda: PlainConfig(4, 2, 16), "index_bits"),
        (lambda: GatherConfig(2, "list", 1024, 3, 1), "places"),
        (lambda: Im2colCopyConfig(2, 1024, 3, 1), "rank"),
        (lambda: BroadcastConfig(9, 1152, 3, 1), "copies"),
        (lambda: BroadcastConfig(3, 1152, 3, 1), "copies"),
        (lambda: BroadcastConfig(4, 1152, 3, 1), "stage_bytes"),
        (lambda: PrefetchConfig(6), "rank"),
        (lambda: PrefetchConfig(0, 100), "segment_bytes"),
        (lambda: RowsConfig("sum", 1024, 3, 1), "op"),
        (lambda: RowsConfig("gather", 1024, 3, 1, 6), "rows"),
    ],
)
def test_a_config_that_its_kernel_cannot_run(make: Callable[[], object], field: str) -> None:
    with pytest.raises(c.ArgumentError) as caught:
        make()
    assert caught.value.field == field


@pytest.mark.parametrize("target", TARGETS)
def test_two_rings_share_a_multiprocessor(target: str) -> None:
    chosen = get_target(target)
    config = RunConfig("copy", "b8", 16 * KIB, stages_for(chosen, 16 * KIB), 1)
    assert 2 * (config.smem_bytes + KIB) <= chosen.smem_per_sm_bytes
    slots = config.stages * 16 * KIB
    assert config.smem_layout() == [("slots", 0, slots), ("barriers", slots, 8 * config.stages)]
    for entry in REGISTRY.values():
        if ".data_movement." in entry.source:
            for each in entry.configs(target):
                each.check_target(chosen)  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("error")
def test_infinities_reduce_without_a_warning() -> None:
    """As on the GPU, infinities are valid results."""
    up, down = np.full((4, 32), np.inf, np.float16), np.full((4, 32), -np.inf, np.float16)
    assert np.isnan(c.reduce_into(up, down, "add", backend="reference")).all()
