"""The PackedWeight of a weight's tensors: made at the first call, found at later ones, replaced if the tensors change.

An operator gets tensors, and the kernels need a PackedWeight. A table holds one for the address of qweight. It serves
tensors of the same shapes, strides and dtypes whose values were read from the same memory and have the same version
counters. The values of qweight are not read: for it, the address suffices. The table keeps weak references to the
storages: no other storage gets the address of one that is alive or weakly referenced. Entries whose storages were freed
are removed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from cudatma import context
from cudatma.arrays import ArrayInfo, describe, with_cupy
from cudatma.dtypes import ACTIVATION_TYPES, BFLOAT16
from cudatma.errors import ArgumentTypeError
from cudatma.kernels.checks import check_gradient
from cudatma.kernels.host import host_array
from cudatma.kernels.marlin.gemm import weight_of
from cudatma.kernels.operation import Weight
from cudatma.kernels.workspace import refuse_in_capture
from cudatma.library_streams import current_stream
from cudatma.quantization import PackedWeight
from cudatma.quantization.namespaces import bfloat16_view

_ALIGNMENT = 16


class _Known(NamedTuple):
    """A weight, its arrays for a launch, and the facts and storages of the tensors that it was made of."""

    facts: tuple[Any, ...]
    weight: PackedWeight
    launched: Weight
    storages: tuple[StorageWeakRef, ...]


#: Address of qweight -> weight. There is no lock: a forked child could find it locked, and so could a finalizer that
#: calls forget().
_known: dict[int, _Known] = {}


def packed_weight(qweight: Any, scales: Any, zeros: Any, perm: Any, k: int, n: int, group_size: int) -> PackedWeight:
    """Return the PackedWeight over a weight's tensors, which it does not copy; layout and dtypes as in PackedWeight.

    Inference tensors have no version counters: after changing them in place, call forget(). Raises what PackedWeight
    raises for wrong shapes and values, ArgumentTypeError, ArgumentError if torch records a gradient of the scales or if
    memory is misaligned, and LaunchError if the weight is not known yet and the current stream is being captured,
    because the values have to be read.
    """
    return known_weight(qweight, scales, zeros, perm, k, n, group_size)[0]


def known_weight(
    qweight: Any, scales: Any, zeros: Any, perm: Any, k: int, n: int, group_size: int
) -> tuple[PackedWeight, Weight]:
    """Return packed_weight(), and its arrays for a launch. Raises as packed_weight()."""
    if scales.requires_grad:
        check_gradient(scales, "scales", "marlin_gemm")
    address = qweight.data_ptr()
    facts = (
        qweight.shape,
        qweight.stride(),
        qweight.dtype,
        k,
        n,
        group_size,
        scales.untyped_storage()._cdata,  # _facts(scales): a call costs 0.1 us
        scales.data_ptr(),
        -1 if scales.is_inference() else scales._version,
        scales.shape,
        scales.stride(),
        scales.dtype,
        None if zeros is None else _facts(zeros),
        None if perm is None else _facts(perm),
    )
    known = _known.get(address)
    if known is not None and known.facts == facts:
        return known.weight, known.launched
    weight = _made(qweight, scales, zeros, perm, k, n, group_size)
    launched = weight_of(weight)
    tensors = [tensor for tensor in (qweight, scales, zeros, perm) if tensor is not None]
    storages = tuple([StorageWeakRef(tensor.untyped_storage()) for tensor in tensors])
    for other, held in list(_known.items()):
        if any(storage.expired() for storage in held.storages):
            _known.pop(other, None)
    if weight.device is not None or address % _ALIGNMENT == 0:  # else the weight holds a copy of qweight
        _known[address] = _Known(facts, weight, launched, storages)
    return weight, launched


def forget(qweight: Any) -> None:
    """Make the next call with this weight read its values again."""
    _known.pop(qweight.data_ptr(), None)


def weight_tensors(weight: PackedWeight) -> dict[str, Any]:
    """Copies of a weight's arrays on its device: qweight, scales, zeros and perm, of which the last two may be None."""
    tensors = {name: _as_tensor(getattr(weight, name)) for name in ("qweight", "scales", "zeros", "perm")}
    if weight.device is not None:  # CuPy may use the memory again once the weight is dropped
        torch.cuda.current_stream(weight.device).synchronize()
    return tensors


def _facts(tensor: Any) -> tuple[Any, ...]:
    """Return what identifies memory and its values; inference tensors have no version counter."""
    version = -1 if tensor.is_inference() else tensor._version
    return tensor.untyped_storage()._cdata, tensor.data_ptr(), version, tensor.shape, tensor.stride(), tensor.dtype


def _made(qweight: Any, scales: Any, zeros: Any, perm: Any, k: int, n: int, group_size: int) -> PackedWeight:
    given = {"qweight": qweight, "scales": scales, "zeros": zeros, "perm": perm}
    infos = {name: describe(tensor, name) for name, tensor in given.items() if tensor is not None}
    dtype, device = infos["scales"].dtype.name, infos["qweight"].device
    if dtype not in ACTIVATION_TYPES:
        raise ArgumentTypeError("scales.dtype", dtype, ", ".join(ACTIVATION_TYPES))
    with contextlib.nullcontext() if device is None else _reading(device):
        arrays = {name: _view(info) for name, info in infos.items()}
        return PackedWeight(
            qweight=arrays["qweight"],
            scales=arrays["scales"],
            zeros=arrays.get("zeros"),
            perm=arrays.get("perm"),
            shape=(int(k), int(n)),
            group_size=int(group_size),
            dtype=dtype,
        )


@contextlib.contextmanager
def _reading(device: int) -> Iterator[None]:
    """A context in which CuPy may read, on a stream of its own, what torch's current stream has written."""
    stream = current_stream("torch", device)
    refuse_in_capture(device, stream, "a weight whose values were read before the capture")
    with context.using(device) as driver, context.outside_captures(driver):
        torch.cuda.current_stream(device).synchronize()
        yield


def _view(info: ArrayInfo) -> Any:
    """Return a NumPy or CuPy array over a tensor's memory, which it does not keep alive: the operator's caller does.

    Host memory that does not begin at a multiple of 16 bytes, as in safetensors files, is copied: TMA cannot read it.
    """
    if info.device is None:
        array = host_array(info)
        return array.copy() if info.pointer % _ALIGNMENT else array

    def of_cupy(cupy: Any) -> Any:
        kind = "uint16" if info.dtype == BFLOAT16 else info.dtype
        memory = cupy.cuda.UnownedMemory(info.pointer, info.size_elems * info.dtype.itemsize, None, info.device)
        start = cupy.cuda.MemoryPointer(memory, 0)
        array = cupy.ndarray(info.shape, kind, start, strides=info.strides_bytes)
        return bfloat16_view(array) if info.dtype == BFLOAT16 else array

    return with_cupy("cupy.ndarray", of_cupy)


def _as_tensor(array: Any) -> Any:
    if array is None:
        return None
    is_bfloat16 = array.dtype == BFLOAT16
    bits = array.view("int16") if is_bfloat16 else array
    tensor = torch.from_numpy(bits.copy()) if isinstance(bits, np.ndarray) else torch.from_dlpack(bits).clone()
    return tensor.view(torch.bfloat16) if is_bfloat16 else tensor
