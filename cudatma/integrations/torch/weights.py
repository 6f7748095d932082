"""Cache that maps weight tensors to PackedWeight objects.

Operators take tensors, but the kernels need a PackedWeight. The first call creates a PackedWeight, and later calls look
it up in a table by the address of qweight. A table entry is valid for tensors with the same shapes, strides, dtypes,
addresses and version counters. Otherwise, the entry is replaced. For qweight, the address is sufficient, because the
values of qweight are not read. The table keeps weak references to the storages, because torch does not reuse the
address of a storage that is alive or weakly referenced. Entries whose storages were freed are removed.
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
from cudatma.descriptor.rules import TMA_ALIGNMENT_BYTES
from cudatma.dtypes import ACTIVATION_TYPES, BFLOAT16
from cudatma.errors import ArgumentTypeError
from cudatma.integrations.torch.fakes import check_tensor_scale
from cudatma.kernels.checks import check_gradient
from cudatma.kernels.host import host_array
from cudatma.kernels.marlin.gemm import weight_of
from cudatma.kernels.operation import Weight
from cudatma.kernels.workspace import check_not_capturing
from cudatma.library_streams import current_stream
from cudatma.pipeline import align_up
from cudatma.quantization import PackedExperts, PackedWeight
from cudatma.quantization.layout_v1 import BLOCK
from cudatma.quantization.namespaces import bfloat16_view
from cudatma.quantization.weight_format import weight_format

#: Key, in a weight's attachments, of the weight's PackedExperts and the facts from which it was created.
_EXPERTS = "experts"


class _Known(NamedTuple):
    """A weight and its launch arrays, with the properties and storages of its tensors."""

    facts: tuple[Any, ...]
    weight: PackedWeight
    launched: Weight
    storages: tuple[StorageWeakRef, ...]


#: Maps the address of qweight to its weight. There is no lock, because a forked child, or a finalizer that calls
#: forget(), could deadlock on it.
_known: dict[int, _Known] = {}


def packed_weight(
    qweight: Any,
    scales: Any,
    zeros: Any,
    perm: Any,
    k: int,
    n: int,
    group_size: int,
    format: str = "int4",
    tensor_scale: Any = None,
) -> PackedWeight:
    """Return a PackedWeight that uses the memory of a weight's tensors.

    The tensors must have the layout and dtypes of PackedWeight. ``tensor_scale`` is a zero-dimensional fp32 tensor, or
    None for 1.

    Call forget() after changing inference tensors in place, because they have no version counters. Raises the errors of
    PackedWeight for invalid shapes and values. Raises ArgumentError if autograd would record the scales or if memory is
    misaligned. Raises LaunchError if the weight is new and the current stream is being captured, because values cannot
    be read during capture.
    """
    return known_weight(qweight, scales, zeros, perm, k, n, group_size, format, tensor_scale)[0]


def known_weight(
    qweight: Any,
    scales: Any,
    zeros: Any,
    perm: Any,
    k: int,
    n: int,
    group_size: int,
    format: str = "int4",
    tensor_scale: Any = None,
) -> tuple[PackedWeight, Weight]:
    """Return the result of packed_weight() and its launch arrays. Raises the errors of packed_weight()."""
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
        format,
        tensor_scale,
        scales.untyped_storage()._cdata,  # The next lines are _facts(scales), inlined because a call takes 0.1 us.
        scales.data_ptr(),
        -1 if scales.is_inference() else scales._version,
        scales.shape,
        scales.stride(),
        scales.dtype,
        None if zeros is None else _facts(zeros),
        None if perm is None else _facts(perm),
        format,
        None if tensor_scale is None else _facts(tensor_scale),
    )
    entry = _known.get(address)
    if entry is not None and entry.facts == facts:
        return entry.weight, entry.launched
    weight = _create(qweight, scales, zeros, perm, k, n, group_size, format, tensor_scale)
    launched = weight_of(weight)
    tensors = [tensor for tensor in (qweight, scales, zeros, perm, tensor_scale) if tensor is not None]
    storages = tuple([StorageWeakRef(tensor.untyped_storage()) for tensor in tensors])
    for other, old in list(_known.items()):
        if any(storage.expired() for storage in old.storages):
            _known.pop(other, None)
    if (
        weight.device is not None or address % TMA_ALIGNMENT_BYTES == 0
    ):  # Otherwise, the weight holds a copy of qweight.
        _known[address] = _Known(facts, weight, launched, storages)
    return weight, launched


def known_experts(
    w1: tuple[Any, Any, Any],
    w2: tuple[Any, Any, Any],
    experts: int,
    k: int,
    intermediate: int,
    group_sizes: tuple[int, int],
    format: str = "int4",
    tensor_scales: tuple[Any, Any] = (None, None),
) -> tuple[PackedExperts, PackedExperts]:
    """Return both weights of an MoE layer, which use the memory of their tensors.

    ``w1`` and ``w2`` are tuples of qweight, scales and zeros. ``tensor_scales`` contains the tensor scales of each
    weight, float32 (experts, 2) and (experts, 1), or None. Raises the errors of packed_weight().
    """
    packed = []
    for index, (parts, rows, columns, gated) in enumerate(
        ((w1, k, 2 * intermediate, True), (w2, intermediate, k, False))
    ):
        weight = known_weight(*parts, None, rows, experts * align_up(columns, BLOCK), group_sizes[index], format)[0]
        scale = tensor_scales[index]
        key = experts, columns, gated, None if scale is None else _facts(scale)
        known = weight.attachments.get(_EXPERTS)
        if known is None or known[0] != key:
            view = None
            if scale is not None:
                check_tensor_scale(scale, parts[1], format, f"w{index + 1}_tensor_scale", (experts, 1 + gated))
                view = _view(describe(scale, "tensor_scale"))
            known = weight.attachments[_EXPERTS] = key, PackedExperts(weight, experts, columns, gated, view)
        packed.append(known[1])
    return packed[0], packed[1]


def forget(qweight: Any) -> None:
    """Discard the cached properties of a weight, so that the next call reads its values again.

    Parameters
    ----------
    qweight : torch.Tensor
        The packed integers of the weight.
    """
    _known.pop(qweight.data_ptr(), None)


def weight_tensors(weight: PackedWeight) -> dict[str, Any]:
    """Return copies of qweight, scales, zeros and perm, by name, as tensors on the weight's device.

    The value is None if the weight does not have the array. There is an entry tensor_scale if the format has tensor
    scales.
    """
    tensors = {name: _as_tensor(getattr(weight, name)) for name in ("qweight", "scales", "zeros", "perm")}
    if weight_format(weight.format).has_tensor_scale:
        tensors["tensor_scale"] = torch.tensor(weight.tensor_scale, device=tensors["scales"].device)
    if weight.device is not None:  # CuPy may reuse the memory as soon as the weight is deleted.
        torch.cuda.current_stream(weight.device).synchronize()
    return tensors


def expert_tensors(experts: PackedExperts) -> dict[str, Any]:
    """Return copies of the arrays of a PackedExperts, as weight_tensors() does.

    The entry tensor_scale has shape (experts, 2) if the weight is gated, otherwise (experts, 1).
    """
    tensors = weight_tensors(experts.weight)
    if "tensor_scale" in tensors:
        whole = tensors["tensor_scale"].expand(experts.experts, 1 + experts.gated)
        own = _as_tensor(experts.tensor_scales)
        tensors["tensor_scale"] = (whole if own is None else whole * own).contiguous()
    return tensors


def _facts(tensor: Any) -> tuple[Any, ...]:
    """Return values that identify a tensor's memory and contents. Inference tensors have no version counter."""
    version = -1 if tensor.is_inference() else tensor._version
    return tensor.untyped_storage()._cdata, tensor.data_ptr(), version, tensor.shape, tensor.stride(), tensor.dtype


def _create(
    qweight: Any,
    scales: Any,
    zeros: Any,
    perm: Any,
    k: int,
    n: int,
    group_size: int,
    format: str,
    tensor_scale: Any,
) -> PackedWeight:
    tensors = {"qweight": qweight, "scales": scales, "zeros": zeros, "perm": perm}
    infos = {name: describe(tensor, name) for name, tensor in tensors.items() if tensor is not None}
    dtype, device = infos["scales"].dtype.name, infos["qweight"].device
    if dtype not in ACTIVATION_TYPES:
        raise ArgumentTypeError("scales.dtype", dtype, ", ".join(ACTIVATION_TYPES))
    if tensor_scale is not None:
        check_tensor_scale(tensor_scale, scales, format)
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
            format=format,
            tensor_scale=1.0 if tensor_scale is None else tensor_scale.item(),
        )


@contextlib.contextmanager
def _reading(device: int) -> Iterator[None]:
    """Wait for torch's current stream, because CuPy reads the tensors on a different stream."""
    stream = current_stream("torch", device)
    check_not_capturing(device, stream, "outside a graph capture on a weight's first use")
    with context.using(device) as driver, context.outside_captures(driver):
        torch.cuda.current_stream(device).synchronize()
        yield


def _view(info: ArrayInfo) -> Any:
    """Return a NumPy or CuPy array that shares a tensor's memory. The operator's caller must keep the tensor alive.

    A host tensor that is not 16-byte aligned is copied because TMA cannot read it. Tensors in mapped safetensors files
    are an example.
    """
    if info.device is None:
        array = host_array(info)
        return array.copy() if info.pointer % TMA_ALIGNMENT_BYTES else array

    def create(cupy: Any) -> Any:
        kind = "uint16" if info.dtype == BFLOAT16 else info.dtype
        memory = cupy.cuda.UnownedMemory(info.pointer, info.size_elems * info.dtype.itemsize, None, info.device)
        start = cupy.cuda.MemoryPointer(memory, 0)
        array = cupy.ndarray(info.shape, kind, start, strides=info.strides_bytes)
        return bfloat16_view(array) if info.dtype == BFLOAT16 else array

    return with_cupy("cupy.ndarray", create)


def _as_tensor(array: Any) -> Any:
    if array is None:
        return None
    is_bfloat16 = array.dtype == BFLOAT16
    bits = array.view("int16") if is_bfloat16 else array
    tensor = torch.from_numpy(bits.copy()) if isinstance(bits, np.ndarray) else torch.from_dlpack(bits).clone()
    return tensor.view(torch.bfloat16) if is_bfloat16 else tensor
