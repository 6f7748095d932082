"""PackedWeight: layout version 1, pack and unpack, files, sharding, and everything that it refuses."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import pickle
import re
import stat
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from cudatma.dtypes import BFLOAT16
from cudatma.errors import ArgumentError, ArgumentTypeError, CudaTmaError, QuantizationError, WeightFileError
from cudatma.quantization import (
    GROUP_SIZES,
    LAYOUT_VERSION,
    PackedWeight,
    load_gptq,
    load_weights,
    open_checkpoint,
    pack,
    save_weights,
    shard,
    unpack,
)
from cudatma.quantization.storage import CONVERTERS, StoredWeight, supported_versions

BF16 = np.dtype(ml_dtypes.bfloat16)


def groups_of(depth: int, size: int) -> int:
    return 1 if size == -1 else -(-depth // size)


def logical(
    depth: int, width: int, size: int, seed: int = 0, zeros: bool = False, perm: bool = False, dtype: Any = np.float16
) -> dict[str, Any]:
    """Random arguments of pack()."""
    rng = np.random.default_rng(seed)
    rows = groups_of(depth, size)
    return {
        "q": rng.integers(0, 16, (depth, width), dtype=np.uint8),
        "scales": rng.uniform(-0.05, 0.05, (rows, width)).astype(dtype),
        "zeros": rng.integers(0, 17, (rows, width), dtype=np.uint8) if zeros else None,
        "group_size": size,
        "perm": rng.permutation(depth).astype(np.int32) if perm else None,
    }


weights = st.builds(
    logical,
    depth=st.integers(1, 200),
    width=st.integers(1, 200),
    size=st.sampled_from(GROUP_SIZES),
    seed=st.integers(0, 2**32 - 1),
    zeros=st.booleans(),
    perm=st.booleans(),
    dtype=st.sampled_from([np.float16, BF16]),
)


@given(weights)
def test_unpack_is_the_inverse_of_pack(given_weight: dict[str, Any]) -> None:
    weight = pack(**given_weight)
    found = unpack(weight)
    for name in ("q", "scales", "zeros", "perm"):
        got, wanted = getattr(found, name), given_weight[name]
        assert (got is None) == (wanted is None), name
        if wanted is not None:
            np.testing.assert_array_equal(got, wanted, err_msg=name, strict=True)
    assert weight.symmetric == (given_weight["zeros"] is None)
    assert weight.dtype == given_weight["scales"].dtype.name


@settings(deadline=None, max_examples=50)
@given(weights)
def test_dequantize_is_the_formula_in_the_order_of_the_activations(given_weight: dict[str, Any]) -> None:
    depth, width = given_weight["q"].shape
    size = depth if given_weight["group_size"] == -1 else given_weight["group_size"]
    wanted = np.zeros((depth, width))
    for k in range(depth):
        zero = np.full(width, 8) if given_weight["zeros"] is None else given_weight["zeros"][k // size]
        row = (given_weight["q"][k].astype(int) - zero) * given_weight["scales"][k // size].astype(np.float64)
        wanted[k if given_weight["perm"] is None else given_weight["perm"][k]] = row
    weight = pack(**given_weight)
    np.testing.assert_array_equal(weight.dequantize(), wanted)
    np.testing.assert_array_equal(weight.dequantize(dtype=np.float32), wanted.astype(np.float32), strict=True)
    np.testing.assert_array_equal(weight.dequantize(dtype="bfloat16"), wanted.astype(BF16), strict=True)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("depth", "width", "size"), [(64, 64, 64), (200, 150, 32), (33, 129, 128), (130, 65, -1)])
def test_every_byte_is_where_the_layout_says(depth: int, width: int, size: int, zeros: bool) -> None:
    """The definition of docs/design/packed_weights.md, register by register."""
    given_weight = logical(depth, width, size, seed=5, zeros=zeros)
    weight = pack(**given_weight)
    k_blocks, n_blocks = -(-depth // 64), -(-width // 64)
    assert weight.qweight.shape == (n_blocks * k_blocks, 2048)
    for row in range(n_blocks * k_blocks):
        n64, k64 = divmod(row, k_blocks)
        words = weight.qweight[row].view("<u4").reshape(4, 32, 4)
        for c, lane, j, r, h in np.ndindex(4, 32, 4, 4, 2):
            column = 64 * n64 + 16 * c + (lane >> 2) + 8 * (r & 1)
            k = 64 * k64 + 16 * j + 2 * (lane & 3) + h + 8 * (r >> 1)
            value = int(words[c, lane, j]) >> (4 * (r + 4 * h)) & 15
            if k < depth and column < width:
                assert value == given_weight["q"][k, column], (column, k)
            else:
                group = 0 if size == -1 else k // size
                inside = zeros and column < width and group < weight.groups
                assert value == (min(15, given_weight["zeros"][group, column]) if inside else 8), (column, k)


@pytest.mark.parametrize("width", [64, 65, 200])
def test_scales_and_zeros_stand_where_the_layout_says(width: int) -> None:
    given_weight = logical(96, width, 32, seed=6, zeros=True)
    weight = pack(**given_weight)
    padded = -(-width // 64) * 64
    assert weight.scales.shape == weight.zeros.shape == (3, padded)
    for column in range(padded):
        block, inside = divmod(column, 64)
        c, r, g = inside // 16, inside % 16 // 8, inside % 8
        stands = 64 * block + 8 * g + 2 * c + r
        expected = (given_weight["scales"][:, column], given_weight["zeros"][:, column]) if column < width else (0, 8)
        np.testing.assert_array_equal(weight.scales[:, stands], expected[0])
        np.testing.assert_array_equal(weight.zeros[:, stands], expected[1])


def test_facts_of_a_weight() -> None:
    weight = pack(**logical(200, 100, 128, perm=True))
    assert (weight.groups, weight.symmetric, weight.device, weight.layout_version) == (2, True, None, 1)
    assert weight.nbytes == 4 * 2 * 2048 + 2 * 128 * 2 + 200 * 4
    assert "symmetric, act-order, host" in repr(weight)
    assert weight.to_host() is weight
    assert weight in {weight}
    assert weight != pack(**logical(200, 100, 128, perm=True))
    with pytest.raises(dataclasses.FrozenInstanceError):
        weight.group_size = 64  # type: ignore[misc]
    for twin in (copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))):
        np.testing.assert_array_equal(twin.dequantize(), weight.dequantize())


def test_a_transposed_view_is_packed_like_its_copy() -> None:
    q = np.random.default_rng(1).integers(0, 16, (96, 64), dtype=np.uint8)
    scales = np.ones((1, 64), np.float16)
    turned = np.asfortranarray(q)
    np.testing.assert_array_equal(pack(turned, scales).qweight, pack(q, scales).qweight)


def _pack(**changes: Any) -> PackedWeight:
    return pack(**{**logical(100, 72, 32, zeros=True, perm=True), **changes})


def _poisoned(value: float, dtype: Any = np.float16) -> Any:
    scales = np.ones((4, 72), dtype)
    scales[2, 37] = value
    return scales


_PERM_TWICE = np.zeros(100, np.int32)
PACK_REFUSALS: dict[str, tuple[dict[str, Any], type[CudaTmaError], str]] = {
    "q is a list": ({"q": [[1]]}, ArgumentTypeError, "q"),
    "q signed": ({"q": np.zeros((100, 72), np.int8)}, QuantizationError, "q"),
    "q one-dimensional": ({"q": np.zeros(100, np.uint8)}, QuantizationError, "q"),
    "q empty": ({"q": np.zeros((0, 72), np.uint8)}, QuantizationError, "q"),
    "q over 15": ({"q": np.full((100, 72), 16, np.uint8)}, QuantizationError, "q"),
    "group size 16": ({"group_size": 16}, QuantizationError, "group_size"),
    "group size 0": ({"group_size": 0}, QuantizationError, "group_size"),
    "group size True": ({"group_size": True}, QuantizationError, "group_size"),
    "group size text": ({"group_size": "128"}, QuantizationError, "group_size"),
    "scales of other groups": ({"scales": np.ones((3, 72), np.float16)}, QuantizationError, "scales"),
    "scales of other width": ({"scales": np.ones((4, 71), np.float16)}, QuantizationError, "scales"),
    "scales float32": ({"scales": np.ones((4, 72), np.float32)}, QuantizationError, "dtype"),
    "scales text": ({"scales": "ones"}, ArgumentTypeError, "scales"),
    "NaN scale": ({"scales": _poisoned(np.nan)}, QuantizationError, "scales[2, 37]"),
    "infinite scale": ({"scales": _poisoned(np.inf)}, QuantizationError, "scales[2, 37]"),
    "NaN bf16 scale": ({"scales": _poisoned(np.nan, BF16)}, QuantizationError, "scales[2, 37]"),
    "zeros over 16": ({"zeros": np.full((4, 72), 17)}, QuantizationError, "zeros"),
    "zeros negative": ({"zeros": np.full((4, 72), -1)}, QuantizationError, "zeros"),
    "zeros wrapped": ({"zeros": np.full((4, 72), 264)}, QuantizationError, "zeros"),
    "zeros float": ({"zeros": np.full((4, 72), 8.0)}, QuantizationError, "zeros"),
    "zeros transposed": ({"zeros": np.full((72, 4), 8)}, QuantizationError, "zeros"),
    "perm repeated": ({"perm": _PERM_TWICE}, QuantizationError, "perm"),
    "perm outside": ({"perm": np.arange(1, 101)}, QuantizationError, "perm"),
    "perm negative": ({"perm": np.arange(-1, 99)}, QuantizationError, "perm"),
    "perm short": ({"perm": np.arange(99)}, QuantizationError, "perm"),
    "perm float": ({"perm": np.arange(100.0)}, QuantizationError, "perm"),
    "perm wraps in 32 bits": ({"perm": np.arange(100) + 2**32}, QuantizationError, "perm"),
}


@pytest.mark.parametrize("case", PACK_REFUSALS)
def test_pack_refuses(case: str) -> None:
    changes, error, field = PACK_REFUSALS[case]
    with pytest.raises(error) as caught:
        _pack(**changes)
    assert caught.value.field == field  # type: ignore[attr-defined]
    assert isinstance(caught.value, (ValueError, TypeError))


GOOD = _pack()
BLOCKS = GOOD.qweight.shape
WEIGHT_REFUSALS: dict[str, tuple[dict[str, Any], type[CudaTmaError], str]] = {
    "qweight missing": ({"qweight": None}, ArgumentTypeError, "qweight"),
    "qweight a list": ({"qweight": [1, 2]}, ArgumentTypeError, "qweight"),
    "qweight of another size": ({"qweight": np.zeros((3, 2048), np.uint8)}, QuantizationError, "qweight"),
    "qweight int8": ({"qweight": np.zeros(BLOCKS, np.int8)}, QuantizationError, "qweight"),
    "qweight in Fortran order": ({"qweight": np.zeros(BLOCKS, np.uint8, order="F")}, QuantizationError, "qweight"),
    "qweight with gaps": ({"qweight": np.zeros((BLOCKS[0], 4096), np.uint8)[:, ::2]}, QuantizationError, "qweight"),
    "scales missing": ({"scales": None}, ArgumentTypeError, "scales"),
    "scales unpadded": ({"scales": np.ones((4, 72), np.float16)}, QuantizationError, "scales"),
    "scales of the other type": ({"scales": np.ones((4, 128), BF16)}, QuantizationError, "scales"),
    "scales big-endian": ({"scales": np.ones((4, 128), ">f2")}, QuantizationError, "scales"),
    "zeros over 16": ({"zeros": np.full((4, 128), 17, np.uint8)}, QuantizationError, "zeros[0, 0]"),
    "zeros int32": ({"zeros": np.full((4, 128), 8, np.int32)}, QuantizationError, "zeros"),
    "perm int64": ({"perm": np.arange(100)}, QuantizationError, "perm"),
    "perm padded": ({"perm": np.arange(128, dtype=np.int32)}, QuantizationError, "perm"),
    "shape a list": ({"shape": [100, 72]}, QuantizationError, "shape"),
    "shape of three": ({"shape": (100, 72, 1)}, QuantizationError, "shape"),
    "shape with floats": ({"shape": (100.0, 72)}, QuantizationError, "shape"),
    "shape with zero": ({"shape": (0, 72)}, QuantizationError, "shape"),
    "shape too large": ({"shape": (2**31, 72)}, QuantizationError, "shape"),
    "group size 256": ({"group_size": 256}, QuantizationError, "group_size"),
    "dtype float32": ({"dtype": "float32"}, QuantizationError, "dtype"),
    "layout version 2": ({"layout_version": 2}, QuantizationError, "layout_version"),
    "layout version text": ({"layout_version": "1"}, QuantizationError, "layout_version"),
}


@pytest.mark.parametrize("case", WEIGHT_REFUSALS)
def test_packed_weight_refuses(case: str) -> None:
    changes, error, field = WEIGHT_REFUSALS[case]
    with pytest.raises(error) as caught:
        dataclasses.replace(GOOD, **changes)
    assert caught.value.field == field  # type: ignore[attr-defined]


def test_a_broken_scale_is_named_by_its_column() -> None:
    scales = GOOD.scales.copy()
    scales[1, 64 + 8 * 5 + 2 * 0 + 1] = np.nan  # of channels 64 ..: 16 * 0 + 8 * 1 + 5
    with pytest.raises(QuantizationError, match=r"scales\[1, 77\]"):
        dataclasses.replace(GOOD, scales=scales)


def test_copies_and_pickles_leave_what_kernels_attached_behind() -> None:
    weight = pack(**logical(100, 70, 32, zeros=True, perm=True))
    weight.attachments["plan"] = lambda: None  # cannot be pickled, and holds this weight's addresses
    for twin in (copy.copy(weight), copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))):
        assert twin.attachments == {}
        np.testing.assert_array_equal(twin.dequantize(), weight.dequantize())
    assert weight.attachments


def weight_of(
    k: int, n: int, group_size: int, *, zeros: bool = True, perm: bool = False, dtype: Any = np.float16
) -> PackedWeight:
    draw = np.random.default_rng(k + n)
    groups = 1 if group_size == -1 else -(-k // group_size)
    q = draw.integers(0, 16, (k, n), dtype=np.uint8)
    scales = draw.uniform(-1, 1, (groups, n)).astype(dtype)
    points = draw.integers(0, 17, (groups, n), dtype=np.uint8) if zeros else None
    return pack(q, scales, points, group_size=group_size, perm=draw.permutation(k) if perm else None)


# Whole blocks of 64; parts that begin within one; a tail within the last block; a last group that is shorter.
COLUMNS = [(128, 256, 2), (100, 384, 3), (128, 72, 3), (64, 10, 5), (130, 200, 1)]
ROWS = [(256, 100, 64, 2), (384, 64, 128, 3), (192, 70, 32, 6), (96, 64, 32, 3), (90, 64, -1, 3), (256, 64, -1, 2)]


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16])
@pytest.mark.parametrize(("zeros", "perm"), [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize(("k", "n", "count"), COLUMNS)
def test_parts_by_columns_are_slices_of_the_whole(
    k: int, n: int, count: int, zeros: bool, perm: bool, dtype: Any
) -> None:
    weight = weight_of(k, n, 32, zeros=zeros, perm=perm, dtype=dtype)
    parts = [shard(weight, index, count, by="columns") for index in range(count)]
    assert {part.shape for part in parts} == {(k, n // count)}
    assert all(part.symmetric == weight.symmetric and part.dtype == weight.dtype for part in parts)
    np.testing.assert_array_equal(np.concatenate([part.dequantize() for part in parts], 1), weight.dequantize())


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("k", "n", "group_size", "count"), ROWS)
def test_parts_by_rows_are_slices_of_the_whole(k: int, n: int, group_size: int, count: int, zeros: bool) -> None:
    weight = weight_of(k, n, group_size, zeros=zeros)
    parts = [shard(weight, index, count, by="rows") for index in range(count)]
    assert {part.shape for part in parts} == {(k // count, n)}
    assert {part.group_size for part in parts} == {group_size}
    np.testing.assert_array_equal(np.concatenate([part.dequantize() for part in parts]), weight.dequantize())


@pytest.mark.parametrize(("k", "n", "by"), [(128, 256, "columns"), (256, 100, "rows")])
def test_a_part_of_whole_blocks_is_what_packing_its_values_gives(k: int, n: int, by: str) -> None:
    whole = unpack(weight_of(k, n, 64))
    part = (slice(None), slice(n // 2, n)) if by == "columns" else (slice(k // 2, k), slice(None))
    groups = (slice(None), part[1]) if by == "columns" else (slice(k // 128, None), slice(None))
    wanted = pack(whole.q[part], whole.scales[groups], whole.zeros[groups], group_size=64)
    found = shard(weight_of(k, n, 64), 1, 2, by=by)
    for name in ("qweight", "scales", "zeros"):
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name))


@pytest.mark.parametrize("by", ["columns", "rows"])
def test_a_part_has_memory_of_its_own(by: str) -> None:
    weight = weight_of(128, 128, 64)
    part = shard(weight, 0, 2, by=by)
    pairs = ((getattr(weight, name), getattr(part, name)) for name in ("qweight", "scales", "zeros"))
    assert not any(np.shares_memory(whole, own) for whole, own in pairs)


@pytest.mark.parametrize(
    ("arguments", "by", "error", "message"),
    [
        ((0, 3), "columns", ArgumentError, r"^count must be a divisor of the number of columns \(128\).*got 3"),
        ((2, 2), "columns", ArgumentError, r"^index must be from 0 to 1.*got 2"),
        ((0, 0), "columns", ArgumentError, r"^count must be .*got 0"),
        ((0, 2.0), "columns", ArgumentError, r"^count must be .*got 2\.0"),
        ((0, 2), "N", ArgumentError, r'^by must be "columns" or "rows".*got N'),
        (
            (0, 4),
            "rows",
            QuantizationError,
            r"multiple of 64 rows \(the group size.*got .*shards of 48 rows.*group_size of -1, or choose fewer",
        ),
    ],
)
def test_wrong_divisions_are_named(arguments: tuple[Any, Any], by: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        shard(weight_of(192, 128, 64), *arguments, by=by)


def test_group_sizes_that_would_fit_are_named() -> None:
    with pytest.raises(QuantizationError, match=r"group_size of 32 or -1, or choose fewer GPUs"):
        shard(weight_of(384, 64, 64), 0, 4, by="rows")


def test_activation_order_by_rows_is_refused_with_a_remedy() -> None:
    weight = weight_of(128, 64, 32, perm=True)
    with pytest.raises(
        QuantizationError, match=r"^weight must be .*got a weight with activation order.*shard the weight by columns"
    ):
        shard(weight, 0, 2, by="rows")
    np.testing.assert_array_equal(shard(weight, 0, 1, by="rows").dequantize(), weight.dequantize())
    with pytest.raises(ArgumentTypeError, match=r"^weight must be .*got ndarray"):
        shard(weight.qweight, 0, 2, by="rows")  # type: ignore[arg-type]


FIXTURES = Path(__file__).parents[1] / "fixtures" / "quantization"


def weight(depth: int = 100, width: int = 72, dtype: Any = np.float16, asymmetric: bool = False) -> PackedWeight:
    rng = np.random.default_rng(depth)
    return pack(
        rng.integers(0, 16, (depth, width), dtype=np.uint8),
        rng.uniform(0.01, 0.02, (-(-depth // 32), width)).astype(dtype),
        rng.integers(0, 17, (-(-depth // 32), width)) if asymmetric else None,
        group_size=32,
        perm=rng.permutation(depth) if asymmetric else None,
    )


def same(one: PackedWeight, other: PackedWeight) -> None:
    for name in ("shape", "group_size", "dtype", "layout_version"):
        assert getattr(one, name) == getattr(other, name)
    for name in ("qweight", "scales", "zeros", "perm"):
        if getattr(one, name) is None:
            assert getattr(other, name) is None
        else:
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), strict=True)


@pytest.mark.parametrize("dtype", [np.float16, BF16])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_a_weight_there_and_back(tmp_path: Path, dtype: Any, asymmetric: bool) -> None:
    path = tmp_path / "weight.safetensors"
    original = weight(dtype=dtype, asymmetric=asymmetric)
    original.save(path)
    same(PackedWeight.load(path), original)
    with safe_open(path, framework="np") as file:
        assert (file.metadata()["format"], file.metadata()["layout_version"]) == ("cudatma-packed-weight", "1")
        assert file.get_slice("weight.scales").get_dtype() == ("BF16" if dtype == BF16 else "F16")
    assert os.listdir(tmp_path) == ["weight.safetensors"]


def test_several_weights(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    originals = {"layers.0.q_proj": weight(64, 64), "layers.0.up": weight(70, 9, BF16, True), "Ω": weight(33, 1)}
    save_weights(originals, path)
    loaded = load_weights(str(path))
    assert list(loaded) == list(originals)
    for name, original in originals.items():
        same(loaded[name], original)
    with pytest.raises(WeightFileError, match="one weight, got 3 "):
        PackedWeight.load(path)
    save_weights({}, path)
    assert load_weights(path) == {}


def test_files_have_the_mode_that_the_umask_leaves(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    weight().save(tmp_path / "weight.safetensors")
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("other", "weight.safetensors")}
    assert len(modes) == 1


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "weight.safetensors"
    weight().save(path)
    before = path.read_bytes()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.numpy.save_file", full)
    with pytest.raises(WeightFileError, match="No space left"):
        weight(200).save(path)
    assert (path.read_bytes(), os.listdir(tmp_path)) == (before, ["weight.safetensors"])


#: Paths that no file can have. "loop" is a symbolic link to itself.
IMPOSSIBLE_PATHS = ["a" * 300, "a\0b", "\ud800", "loop", "loop/x"]


@pytest.mark.parametrize("name", [*IMPOSSIBLE_PATHS, "", ".", "/", ".."])
def test_paths_that_no_file_can_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    calls = [weight().save, lambda path: save_weights({}, path), PackedWeight.load, open_checkpoint]
    for call in calls:
        with pytest.raises(WeightFileError) as caught:
            call(name)  # type: ignore[operator]
        assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == ["loop"]


def test_the_longest_name(tmp_path: Path) -> None:
    weight().save(tmp_path / ("a" * 255))
    same(PackedWeight.load(tmp_path / ("a" * 255)), weight())


def test_the_target_of_a_symbolic_link_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder" / "weight")
    for columns in (9, 70):
        weight(64, columns).save(tmp_path / "link")
        assert (tmp_path / "link").is_symlink()
        same(PackedWeight.load(tmp_path / "folder" / "weight"), weight(64, columns))
    assert os.listdir(tmp_path / "folder") == ["weight"]


def test_what_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(WeightFileError):
        weight().save(tmp_path / "missing" / "weight.safetensors")
    with pytest.raises(ArgumentTypeError):
        save_weights({"a": np.zeros(3)}, tmp_path / "x")  # type: ignore[dict-item]
    with pytest.raises(ArgumentTypeError):
        save_weights({1: weight()}, tmp_path / "x")  # type: ignore[dict-item]
    with pytest.raises(ArgumentError, match="names that UTF-8 can encode"):
        save_weights({"\udcff": weight()}, tmp_path / "x")


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    path = tmp_path / "weight.safetensors"
    weight(asymmetric=True).save(path)
    return path


def rewrite(path: Path, metadata: dict[str, Any] | None = None, **arrays: Any) -> None:
    """Write the file again with changed metadata and arrays (None leaves one out)."""
    tensors = load_file(path)
    with safe_open(path, framework="np") as file:
        facts = {**file.metadata(), **(metadata or {})}
    tensors.update({f"weight.{name}": array for name, array in arrays.items()})
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, path, {name: text for name, text in facts.items() if text is not None})


def test_truncated_anywhere(stored: Path) -> None:
    content = stored.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    for length in (0, 1, 7, 8, 9, header // 2, header - 1, header, header + 1, len(content) // 2, len(content) - 1):
        stored.write_bytes(content[:length])
        with pytest.raises(WeightFileError):
            load_weights(stored)


@pytest.mark.parametrize(
    "content",
    [
        b"not a safetensors file at all",
        b"\xff" * 64,
        (2).to_bytes(8, "little") + b"[]",
        (4).to_bytes(8, "little") + b"nul\xff",
        (20000).to_bytes(8, "little") + b"[" * 20000,
        (12).to_bytes(8, "little") + b'{"a": [1,2]}',
        (21).to_bytes(8, "little") + b'{"__metadata__": [1]}',
        (24).to_bytes(8, "little") + b'{"__metadata__":{"a":1}}',
    ],
)
def test_corrupt_headers(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "weight.safetensors"
    path.write_bytes(content)
    with pytest.raises(WeightFileError) as caught:
        load_weights(path)
    assert str(path) in str(caught.value)


def test_a_name_that_occurs_twice(tmp_path: Path) -> None:
    header = b'{"y": 1, "x": 1, "x": 1}'
    (tmp_path / "file.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(WeightFileError, match="'x' occurs twice"):
        open_checkpoint(tmp_path / "file.safetensors")


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F16", "shape": [2], "data_offsets": [0, 2]},
        {"dtype": "F16", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F16", "shape": [-2], "data_offsets": [0, 4]},
        {"dtype": "F16", "shape": [2.0], "data_offsets": [0, 4]},
        {"dtype": "F16", "shape": [2], "data_offsets": [4, 0]},
        {"dtype": "F16", "shape": [2], "data_offsets": [-4, 0]},
        {"dtype": "F16", "shape": [2], "data_offsets": [0]},
        {"dtype": "F16", "shape": [2]},
        {"dtype": "F8_E5M2", "shape": [4], "data_offsets": [0, 4]},
        {"dtype": 16, "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F16", "shape": [0, 10**30], "data_offsets": [0, 0]},
        {"dtype": "F16", "shape": [1] * 64 + [2], "data_offsets": [0, 4]},
    ],
)
def test_contradicting_entries(tmp_path: Path, entry: dict[str, Any]) -> None:
    header = json.dumps({"x": entry}).encode()
    path = tmp_path / "file.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(entry.get("data_offsets", [0, 4])[-1] or 0))
    with pytest.raises(WeightFileError):
        open_checkpoint(path).read("x")


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        ([(0, 4), (0, 4)], "y must be data from byte {4} (the end of the previous tensor), got data from byte {0}"),
        ([(0, 4), (6, 10)], "y must be data from byte {4} (the end of the previous tensor), got data from byte {6}"),
        ([(2, 4), (4, 8)], "x must be data from byte {0} (the end of the previous tensor), got data from byte {2}"),
        ([(0, 4), (4, 6)], "must be {6} bytes (the size in its header), got {10} bytes"),
    ],
)
def test_data_that_overlaps_or_leaves_gaps(tmp_path: Path, ends: list[tuple[int, int]], message: str) -> None:
    named = zip("xy", ends, strict=True)
    entries = {name: {"dtype": "U8", "shape": [b - a], "data_offsets": [a, b]} for name, (a, b) in named}
    header, path = json.dumps(entries).encode(), tmp_path / "file.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(10))
    with pytest.raises(WeightFileError, match=re.escape(message.format(*range(8 + len(header), 30 + len(header))))):
        open_checkpoint(path)


def _facts(**changes: Any) -> dict[str, str]:
    facts = {"shape": [100, 72], "group_size": 32, "dtype": "float16", "arrays": ["qweight", "scales", "zeros", "perm"]}
    return {"weights": json.dumps({"weight": {**facts, **changes}})}


WRONG_FILES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no format": ({"format": None}, {}, "format"),
    "another format": ({"format": "pt"}, {}, "load_gptq"),
    "no version": ({"layout_version": None}, {}, "layout_version"),
    "version text": ({"layout_version": "one"}, {}, "layout_version"),
    "version 2": ({"layout_version": "2"}, {}, "layout_version must be 1"),
    "version 0": ({"layout_version": "0"}, {}, "layout_version must be 1"),
    "no facts": ({"weights": None}, {}, "JSON"),
    "facts a list": ({"weights": "[]"}, {}, "JSON object"),
    "facts without shape": ({"weights": '{"weight": {}}'}, {}, "shape, group_size"),
    "facts null": ({"weights": '{"weight": null}'}, {}, "shape, group_size"),
    "shape of another weight": (_facts(shape=[100, 200]), {}, "qweight"),
    "shape text": (_facts(shape=["100", "72"]), {}, "shape"),
    "shape of three": (_facts(shape=[1, 2, 3]), {}, "shape"),
    "group size 7": (_facts(group_size=7), {}, "group_size"),
    "group size of another weight": (_facts(group_size=64), {}, "scales"),
    "unknown dtype": (_facts(dtype="float8"), {}, "dtype"),
    "dtype a list": (_facts(dtype=["float16"]), {}, "dtype"),
    "no scales listed": (_facts(arrays=["qweight"]), {}, "no scales"),
    "an array that is not there": (_facts(arrays=["qweight", "scales", "extra"]), {}, "weight.extra"),
    "an array named by a list": (_facts(arrays=["qweight", "scales", ["x"]]), {}, "weight.['x']"),
    "scales missing": ({}, {"scales": None}, "weight.scales"),
    "zeros missing": ({}, {"zeros": None}, "weight.zeros"),
    "scales float32": ({}, {"scales": np.ones((4, 128), np.float32)}, "scales"),
    "scales NaN": ({}, {"scales": np.full((4, 128), np.nan, np.float16)}, "scales"),
    "qweight int8": ({}, {"qweight": np.zeros((4, 2048), np.int8)}, "qweight"),
    "zeros over 16": ({}, {"zeros": np.full((4, 128), 99, np.uint8)}, "zeros"),
    "perm repeated": ({}, {"perm": np.zeros(100, np.int32)}, "perm"),
}


@pytest.mark.parametrize("case", WRONG_FILES)
def test_wrong_files(stored: Path, case: str) -> None:
    metadata, arrays, text = WRONG_FILES[case]
    rewrite(stored, metadata, **arrays)
    with pytest.raises(WeightFileError) as caught:
        load_weights(stored)
    assert text in str(caught.value)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.safetensors", tmp_path):
        with pytest.raises(WeightFileError):
            load_weights(path)
    with pytest.raises(WeightFileError, match=r"no \.safetensors file"):
        open_checkpoint(tmp_path)


def test_an_earlier_version_goes_through_its_converters(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two made-up earlier versions: 0 knew no 'zeros' but stored them minus one, -1 cannot be reached."""
    original = PackedWeight.load(stored)

    def from_0(old: StoredWeight) -> StoredWeight:
        arrays = dict(old.arrays)
        arrays["zeros"] = arrays.pop("offsets") + np.uint8(1)
        return StoredWeight(old.name, 1, old.shape, old.group_size, old.dtype, arrays)

    zeros = original.zeros
    assert zeros is not None
    zeros[zeros == 0] = 1
    arrays = ["qweight", "scales", "offsets", "perm"]
    rewrite(stored, {**_facts(arrays=arrays), "layout_version": "0"}, offsets=zeros - 1, zeros=None)
    monkeypatch.setitem(CONVERTERS, 0, from_0)
    assert supported_versions() == (0, LAYOUT_VERSION)
    same(PackedWeight.load(stored), original)
    rewrite(stored, {"layout_version": "2"})
    with pytest.raises(WeightFileError, match="layout_version must be 0 or 1"):
        load_weights(stored)


def test_a_converter_that_leads_nowhere(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONVERTERS, 0, lambda old: old)
    rewrite(stored, {"layout_version": "0"})
    with pytest.raises(WeightFileError, match="from 0 to 0"):
        load_weights(stored)


def test_the_reader_agrees_with_the_library() -> None:
    for path in FIXTURES.glob("*.safetensors"):
        checkpoint = open_checkpoint(path)
        with safe_open(path, framework="np") as file:
            assert set(file.keys()) == set(checkpoint.names)
            for name in checkpoint.names:
                if file.get_slice(name).get_dtype() != "BF16":  # which the library's NumPy side does not read
                    np.testing.assert_array_equal(checkpoint.read(name), file.get_tensor(name), strict=True)


def shards(folder: Path) -> Path:
    """The first GPTQ fixture, dealt out to two files and an index."""
    checkpoint = open_checkpoint(FIXTURES / "gptq_v1.safetensors")
    where = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(checkpoint.names)}
    for file in set(where.values()):
        save_file({name: checkpoint.read(name) for name in where if where[name] == file}, folder / file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return index


def test_sharded_checkpoints(tmp_path: Path) -> None:
    index = shards(tmp_path)
    wanted = load_gptq(FIXTURES / "gptq_v1.safetensors", "act")
    for path in (index, tmp_path, str(tmp_path), open_checkpoint(index)):
        same(load_gptq(path, "act"), wanted)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{", "JSON"),
        ("[]", "weight_map"),
        ('{"weight_map": {"a": 1}}', "weight_map"),
        ('{"weight_map": {"a": "../secret.safetensors"}}', "in the index's folder"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "in the index's folder"),
        ('{"weight_map": {"a": "missing.safetensors"}}', "readable"),
        ('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}', "no such tensor"),
    ],
)
def test_wrong_indices(tmp_path: Path, content: str, text: str) -> None:
    index = shards(tmp_path)
    index.write_text(content)
    with pytest.raises(WeightFileError, match=text):
        open_checkpoint(index)


def test_a_folder_with_two_checkpoints(tmp_path: Path) -> None:
    for name in ("a", "b"):
        weight().save(tmp_path / f"{name}.safetensors")
    with pytest.raises(WeightFileError, match="one checkpoint"):
        open_checkpoint(tmp_path)
