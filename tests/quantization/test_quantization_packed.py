"""PackedWeight: layout version 1 value by value, pack and unpack, dequantisation, and everything it refuses."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cudatma.errors import ArgumentTypeError, CudaTmaError, QuantizationError
from cudatma.quantization import GROUP_SIZES, PackedWeight, pack, unpack

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
