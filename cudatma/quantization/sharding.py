"""Shard a packed weight across GPUs, either along the columns (N) or along the rows (K) at group boundaries."""

from __future__ import annotations

from typing import Any

from cudatma.errors import ArgumentError, ArgumentTypeError, QuantizationError, quoted
from cudatma.quantization.layout_v1 import BLOCK, BLOCK_BYTES, blocks, row_blocks
from cudatma.quantization.namespaces import namespace_of, on_device_of
from cudatma.quantization.packed import PackedWeight, pack, unpack
from cudatma.quantization.weight_format import weight_format


def shard(weight: PackedWeight, index: int, count: int, *, by: str) -> PackedWeight:
    """Return one of ``count`` equal shards of a weight.

    Parameters
    ----------
    weight : PackedWeight
        The weight, of shape (K, N).
    index : int
        Index of the shard, from 0 to count - 1.
    count : int
        Number of shards.
    by : {"columns", "rows"}
        "columns" shards N, the outputs of a layer, so the shard has shape (K, N / count). "rows" shards K, the inputs
        of a layer, so the shard has shape (K / count, N).

    Returns
    -------
    PackedWeight
        The shard, on the same device as ``weight``, in its own memory.

    Raises
    ------
    ArgumentError
        If ``count`` does not divide the columns or rows, or if ``index`` is out of range.
    ArgumentTypeError
        If ``weight`` is not a PackedWeight.
    QuantizationError
        If the weight is sharded by rows and a shard would not have a whole number of groups, or the weight has an
        activation order, which can spread a group's rows over all shards.

    Notes
    -----
    Shards that begin or end inside a 64 x 64 block must be packed again, which takes longer.

    Examples
    --------
    >>> from cudatma.quantization import shard
    >>> weight = cudatma.quantize(np.ones((256, 128), dtype=np.float32))
    >>> shard(weight, 0, 2, by="columns").shape
    (256, 64)
    """
    if not isinstance(weight, PackedWeight):
        raise ArgumentTypeError(
            "weight", type(weight).__name__, "PackedWeight", "create a weight with quantize() or an importer"
        )
    if type(count) is not int or count < 1:
        raise ArgumentError("count", count, "a positive int")
    if type(index) is not int or not 0 <= index < count:
        raise ArgumentError("index", index, f"0 to {count - 1}")
    if by not in ("columns", "rows"):
        raise ArgumentError("by", by, quoted(("columns", "rows")))
    extent = weight.shape[by == "columns"]
    if extent % count:
        raise ArgumentError(
            "count", count, f"a divisor of the number of {by} ({extent})", "choose another number of GPUs"
        )
    size = extent // count
    if by == "columns":
        return _columns(weight, index * size, (index + 1) * size)
    _check_rows(weight, size, count)
    return _rows(weight, index * size, (index + 1) * size)


def _check_rows(weight: PackedWeight, size: int, count: int) -> None:
    if count == 1:
        return
    if weight.perm is not None:
        remedy = "shard the weight by columns, or quantize without activation order (desc_act=False)"
        raise QuantizationError(
            "weight",
            "a weight with activation order",
            'a weight without activation order if by is "rows"',
            remedy,
        )
    if weight.group_size != -1 and size % weight.group_size:
        sizes = [str(other) for other in weight_format(weight.format).group_sizes if other == -1 or size % other == 0]
        remedy = f"quantize with a group_size of {' or '.join(sizes)}, or choose fewer GPUs"
        allowed = f"a number that gives shards of a multiple of {weight.group_size} rows (the group size)"
        raise QuantizationError("count", f"{count}, which gives shards of {size} rows", allowed, remedy)


def _columns(weight: PackedWeight, begin: int, end: int) -> PackedWeight:
    k, n = weight.shape
    if begin % BLOCK or (end % BLOCK and end != n):
        whole = unpack(weight)
        part = slice(begin, end)
        zeros = None if whole.zeros is None else whole.zeros[:, part]
        return _packed(weight, whole.q[:, part], whole.scales[:, part], zeros, whole.perm)
    first, last = begin // BLOCK, blocks(end)
    per_column = row_blocks(k, weight_format(weight.format).bits)
    values = weight.qweight[first * per_column : last * per_column]
    return _cut(weight, values, (slice(None), slice(first * BLOCK, last * BLOCK)), (k, end - begin))


def _rows(weight: PackedWeight, begin: int, end: int) -> PackedWeight:
    k, n = weight.shape
    size = weight.group_size
    groups = slice(None) if size == -1 else slice(begin // size, -(-end // size))
    if begin % BLOCK or (end % BLOCK and end != k):
        whole = unpack(weight)
        zeros = None if whole.zeros is None else whole.zeros[groups]
        return _packed(weight, whole.q[begin:end], whole.scales[groups], zeros, whole.perm)
    split = weight.qweight.reshape(blocks(n), blocks(k), -1)[:, begin // BLOCK : blocks(end)]
    values = split.reshape(-1, BLOCK_BYTES)
    return _cut(weight, values, (groups, slice(None)), (end - begin, n))


def _cut(weight: PackedWeight, qweight: Any, part: tuple[slice, slice], shape: tuple[int, int]) -> PackedWeight:
    """Return a shard that consists of whole blocks, with copies of its scales and zero points.

    The shard shares no memory with the weight, so that the weight can be freed.
    """
    with on_device_of(weight.qweight):
        return PackedWeight(
            qweight=qweight.copy(),
            scales=weight.scales[part].copy(),
            zeros=None if weight.zeros is None else weight.zeros[part].copy(),
            perm=None if weight.perm is None else weight.perm.copy(),
            shape=shape,
            group_size=weight.group_size,
            dtype=weight.dtype,
            format=weight.format,
            tensor_scale=weight.tensor_scale,
        )


def _packed(weight: PackedWeight, q: Any, scales: Any, zeros: Any, perm: Any) -> PackedWeight:
    with on_device_of(weight.qweight):
        values = namespace_of(weight.qweight).ascontiguousarray(q)
        facts: dict[str, Any] = {"format": weight.format, "tensor_scale": weight.tensor_scale}
        return pack(values, scales, zeros, group_size=weight.group_size, perm=perm, **facts)
