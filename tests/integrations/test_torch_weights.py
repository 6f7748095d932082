"""The PackedWeight of tensors is reused while their memory and values stay the same, and created again otherwise."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.multiprocessing.reductions import StorageWeakRef

import cudatma
from cudatma.arrays import ArrayInfo
from cudatma.dtypes import BFLOAT16
from cudatma.errors import ArgumentTypeError, QuantizationError
from cudatma.integrations.torch import weights
from cudatma.integrations.torch.weights import forget, packed_weight, weight_tensors

K, N = 128, 64
SIZES: Any = (K, N, 32)


def tensors(seed: int = 0, *, dtype: str = "float16", symmetric: bool = True) -> list[Any]:
    dense = np.random.default_rng(seed).standard_normal((K, N), np.float32)
    packed = cudatma.quantize(dense, group_size=32, symmetric=symmetric, dtype=dtype)
    return list(weight_tensors(packed).values())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_tensors_hold_a_weights_arrays(dtype: str) -> None:
    dense = np.random.default_rng(0).standard_normal((K, N), np.float32)
    packed = cudatma.quantize(dense, group_size=32, symmetric=False, dtype=dtype)
    parts = weight_tensors(packed)
    again = packed_weight(*parts.values(), *SIZES)
    np.testing.assert_array_equal(again.dequantize(), packed.dequantize())
    assert (again.dtype, again.scale_fit) == (dtype, packed.scale_fit)


def test_the_same_tensors_and_other_objects_for_them_find_the_same_weight() -> None:
    parts = tensors(symmetric=False)
    first = packed_weight(*parts, *SIZES)
    assert packed_weight(*parts, *SIZES) is first
    assert packed_weight(*[None if part is None else part.detach() for part in parts], *SIZES) is first
    assert (
        packed_weight(*[None if part is None else torch.nn.Parameter(part, False) for part in parts], *SIZES) is first
    )


@pytest.mark.parametrize("changed", [1, 2])
def test_a_change_in_place_makes_a_new_weight_that_replaces_the_old_one(changed: int) -> None:
    parts = tensors(symmetric=False)
    first = packed_weight(*parts, *SIZES)
    known = len(weights._known)
    parts[changed].copy_(tensors(1, symmetric=False)[changed])
    second = packed_weight(*parts, *SIZES)
    assert second is not first
    assert packed_weight(*parts, *SIZES) is second
    assert len(weights._known) == known


def test_a_change_of_inference_tensors_is_seen_after_forget() -> None:
    with torch.inference_mode():
        parts = [None if part is None else part.clone() for part in tensors()]
        first = packed_weight(*parts, *SIZES)
        assert packed_weight(*parts, *SIZES) is first
        forget(parts[0])
        assert packed_weight(*parts, *SIZES) is not first


def test_other_memory_at_the_same_address_is_another_weight() -> None:
    parts = tensors()
    memory = parts[1].numpy().copy()
    qweight, scales = parts[0], torch.from_numpy(memory)
    first = packed_weight(qweight, scales, None, None, *SIZES)
    address = scales.data_ptr()
    scales.data = torch.from_numpy(memory)  # the same object, at the same address, over another storage
    assert (scales.data_ptr(), scales._version) == (address, 0)
    second = packed_weight(qweight, scales, None, None, *SIZES)
    assert second is not first
    for _ in range(8):  # a new storage is likely to be where the freed one was
        del scales
        scales = torch.from_numpy(memory)
        assert packed_weight(qweight, scales, None, None, *SIZES) is not second
        second = packed_weight(qweight, scales, None, None, *SIZES)


def test_a_change_of_values_that_a_weight_had_to_copy_is_seen() -> None:
    """TMA cannot read host memory that is misaligned."""
    (qweight, scales, *_), (other, *_) = tensors(), tensors(1)
    memory = torch.empty(qweight.numel() + 16, dtype=torch.uint8)
    start = (8 - memory.data_ptr()) % 16
    misaligned = memory[start : start + qweight.numel()].view(qweight.shape)
    for values in (qweight, other):
        found = packed_weight(misaligned.copy_(values), scales, None, None, *SIZES)
        expected = packed_weight(values, scales, None, None, *SIZES)
        np.testing.assert_array_equal(found.dequantize(), expected.dequantize())


def test_transposed_tensors_are_not_the_weight_that_is_known() -> None:
    square: Any = (8192, 64, 128)
    qweight, scales = torch.zeros(128, 2048, dtype=torch.uint8), torch.ones(64, 64).half()
    packed_weight(qweight, scales, None, None, *square)
    with pytest.raises(QuantizationError, match=r"^scales must be .*got strides"):
        packed_weight(qweight, scales.T, None, None, *square)
    square = (8192, 1024, -1)
    qweight, scales = torch.zeros(2048, 2048, dtype=torch.uint8), torch.ones(1, 1024).half()
    packed_weight(qweight, scales, None, None, *square)
    with pytest.raises(QuantizationError, match=r"^qweight must be .*got strides"):
        packed_weight(qweight.T, scales, None, None, *square)


def test_freed_weights_are_forgotten_and_nothing_keeps_them_alive() -> None:
    weights._known.clear()
    several = [tensors(seed) for seed in range(6)]
    for parts in several:
        packed_weight(*parts, *SIZES)
    references = [StorageWeakRef(part.untyped_storage()) for parts in several for part in parts[:2]]
    del parts, several
    gc.collect()
    assert all(reference.expired() for reference in references)
    kept = tensors()
    packed_weight(*kept, *SIZES)
    assert len(weights._known) == 1


def test_a_finalizer_may_forget_a_weight_while_another_one_is_looked_for() -> None:
    weights._known.clear()
    parts, others = tensors(), tensors(1)
    packed_weight(*parts, *SIZES)

    class Finalized:
        def expired(self) -> bool:
            forget(parts[0])
            return True

    address = parts[0].data_ptr()
    finalized: Any = Finalized()
    weights._known[address] = weights._known[address]._replace(storages=(finalized,))
    looking = threading.Thread(target=packed_weight, args=(*others, *SIZES), daemon=True)
    looking.start()
    looking.join(timeout=20)
    assert list(weights._known) == [others[0].data_ptr()]


@pytest.mark.parametrize("dtype", [np.dtype(np.uint8), np.dtype(np.float16), BFLOAT16, np.dtype(np.int32)])
def test_memory_of_a_device_is_seen_as_a_cupy_array(dtype: np.dtype[Any]) -> None:
    pytest.importorskip("cupy")
    info = ArrayInfo(0x7000_0100, (3, 8), (8 * dtype.itemsize, dtype.itemsize), dtype, 1, None, "torch")
    array = weights._view(info)
    assert (array.data.ptr, array.shape, array.strides, array.dtype) == (
        info.pointer,
        (3, 8),
        info.strides_bytes,
        dtype,
    )
    assert (array.device.id, array.flags.c_contiguous) == (1, True)


def test_wrong_tensors_are_named() -> None:
    qweight, scales, *rest = tensors()
    with pytest.raises(QuantizationError, match=r"^qweight must be .*got uint8"):
        packed_weight(qweight[:1], scales, *rest, *SIZES)
    with pytest.raises(ArgumentTypeError, match=r"^scales.dtype must be .*got float32"):
        packed_weight(qweight, scales.float(), *rest, *SIZES)
    with pytest.raises(QuantizationError, match=r"^scales must be .*got strides|^scales: got float16"):
        packed_weight(qweight, scales.T, *rest, *SIZES)
    with pytest.raises(QuantizationError, match=r"^perm"):
        packed_weight(qweight, scales, None, torch.zeros(K, dtype=torch.int32), *SIZES)
