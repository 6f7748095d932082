"""Tensor maps for the operands of a W4A16 GEMM, and the coordinates of their boxes.

The packed weights use version 1 of the packed layout (docs/design/packed_weights.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cudatma.descriptor import rules
from cudatma.descriptor.encode import TensorMap
from cudatma.descriptor.rules import L2Promotion
from cudatma.descriptor.spec import AnySpec, TiledSpec
from cudatma.dtypes import tma_type
from cudatma.errors import DescriptorError
from cudatma.layout import Swizzle
from cudatma.target import Target

if TYPE_CHECKING:
    from cudatma.arrays import ArrayInfo

#: Size of a packed 64 x 64 block of weights in bytes.
BLOCK_BYTES = 2048
BLOCK_WORDS = BLOCK_BYTES // 8


def create_weight_tma_desc(
    qweight: object, block_k64: int, *, target: Target | str | None = None, encoder: str = "auto"
) -> TensorMap:
    """Create a 2D tensor map over packed int4 weights.

    TMA has no 4-bit type before sm_100, and a box has at most 256 elements per dimension. The map therefore describes
    each 64 x 64 block of weights as a row of 256 uint64 elements. It has dims (256, rows) and box (256, block_k64), and
    block (n64, k64) is at coordinates (0, n64 * K64 + k64). Unless block_k64 divides K64, the last box of a row of
    blocks also loads blocks of the next n64, which the kernel must ignore.

    Parameters
    ----------
    qweight : array of uint8, shape (rows, 2048)
        Packed weights. Row n64 * K64 + k64 is a 64 x 64 block. Each row must be contiguous, and the pitch must be a
        multiple of 16 bytes.
    block_k64 : int
        Number of blocks along K per load, 1 to 256. Each block occupies 2048 bytes of shared memory.
    target, encoder : optional
        See ``TensorMap``.

    Returns
    -------
    TensorMap
        Tensor map over ``qweight``.

    Raises
    ------
    DescriptorError, TargetError, DriverError
        See ``TensorMap``.

    Examples
    --------
    >>> qweight = np.zeros((4 * 16, 2048), np.uint8)  # N = 256, K = 1024
    >>> cudatma.create_weight_tma_desc(qweight, block_k64=2).expected_bytes
    4096
    """
    info = _packed_rows(qweight)
    spec = weight_map_spec(info.shape[0], block_k64, info.strides_bytes[0], info.pointer)
    return _map(info, spec, target, encoder)


def weight_map_spec(rows: int, block_k64: int, pitch_bytes: int = BLOCK_BYTES, address: int = 0) -> TiledSpec:
    """Return the spec that create_weight_tma_desc() encodes for weights with ``rows`` packed rows."""
    box = {"block_k64": block_k64, "box": BLOCK_WORDS}
    shape, strides = (rows, BLOCK_WORDS), (pitch_bytes, 8)
    return _spec(address, shape, strides, "uint64", box, l2_promotion=L2Promotion.B256)


def create_weight_tile_tma_desc(
    qweight: object,
    k64: int,
    block_k64: int,
    block_n64: int,
    *,
    half_rows: bool = False,
    target: Target | str | None = None,
    encoder: str = "auto",
) -> TensorMap:
    """Create a 3D tensor map over packed weights that loads a whole tile at a time.

    The map has dims (256, K64, N64) of uint64, box (256, block_k64, block_n64) and coordinates (0, k64, n64). TMA fills
    blocks outside the weights with zeros.

    Parameters
    ----------
    qweight : array of uint8, shape (rows, 2048)
        Packed weights as for ``create_weight_tma_desc``. The number of rows must be a multiple of ``k64``.
    k64 : int
        Number of blocks along K, ceil(K / 64).
    block_k64, block_n64 : int
        Number of blocks along K and along N per load, 1 to 256 each.
    half_rows : bool, default: False
        Whether a load fetches 32 instead of 64 columns of each block. The box is then (128, ...), and coordinate 0 is
        0 or 128.
    target, encoder : optional
        See ``TensorMap``.

    Returns
    -------
    TensorMap
        Tensor map over ``qweight``.

    Raises
    ------
    DescriptorError, TargetError, DriverError
        See ``TensorMap``.
    """
    info = _packed_rows(qweight)
    if k64 < 1 or info.shape[0] % k64:
        raise DescriptorError(
            "k64", k64, f"a divisor of {info.shape[0]} (the number of rows of qweight)", "pass ceil(K / 64)"
        )
    blocks = k64, info.shape[0] // k64, block_k64, block_n64
    spec = weight_tile_map_spec(*blocks, half_rows=half_rows, pitch_bytes=info.strides_bytes[0], address=info.pointer)
    return _map(info, spec, target, encoder)


def weight_tile_map_spec(
    k64: int,
    n64: int,
    block_k64: int,
    block_n64: int,
    *,
    half_rows: bool = False,
    pitch_bytes: int = BLOCK_BYTES,
    address: int = 0,
) -> TiledSpec:
    """Return the spec that create_weight_tile_tma_desc() encodes for weights of ``n64`` x ``k64`` blocks."""
    shape, strides = (n64, k64, BLOCK_WORDS), (pitch_bytes * k64, pitch_bytes, 8)
    words = BLOCK_WORDS // 2 if half_rows else BLOCK_WORDS
    box = {"block_n64": block_n64, "block_k64": block_k64, "box": words}
    names = {"strides_bytes[1]": "strides_bytes[0]"}
    return _spec(address, shape, strides, "uint64", box, names, l2_promotion=L2Promotion.B256)


def _packed_rows(qweight: object) -> ArrayInfo:
    """Return the ArrayInfo of packed weights, which must be uint8 of shape (rows, 2048) with contiguous rows."""
    from cudatma.arrays import describe

    info = describe(qweight, "qweight")
    if info.dtype != "uint8":
        raise DescriptorError("qweight.dtype", str(info.dtype), "uint8", "pack the weight first")
    if len(info.shape) != 2 or info.shape[1] != BLOCK_BYTES:
        raise DescriptorError("qweight.shape", info.shape, f"(rows, {BLOCK_BYTES})", "pack the weight first")
    if info.strides_bytes[1] != 1:
        raise DescriptorError("qweight.strides_bytes[1]", info.strides_bytes[1], "1", "make the rows contiguous")
    return info


def create_scale_tma_desc(
    scales: object,
    tile_n: int,
    block_groups: int = 1,
    *,
    whole_column: bool | None = None,
    target: Target | str | None = None,
    encoder: str = "auto",
) -> TensorMap:
    """Create a tensor map over scales (fp16, bf16) or zero points (uint8).

    Parameters
    ----------
    scales : array, shape (N,), (1, N) or (groups, N)
        Scales or zero points. If there is one row, the map is 1D with box (tile_n,) and coordinate (n,). Otherwise, it
        is 2D with box (tile_n, block_groups) and coordinates (n, group).
    tile_n : int
        Number of columns per load, 1 to 256. A box row must be a multiple of 16 bytes long.
    block_groups : int, default: 1
        Number of groups per load, 1 to 256.
    whole_column : bool, optional
        Whether the map is 1D. Default: True if ``scales`` has one row.
    target, encoder : optional
        See ``TensorMap``.

    Returns
    -------
    TensorMap
        Tensor map over ``scales``.

    Raises
    ------
    DescriptorError, TargetError, DriverError
        See ``TensorMap``.

    Examples
    --------
    >>> cudatma.create_scale_tma_desc(np.ones((8, 256), np.float16), tile_n=64).spec.box
    (64, 1)
    """
    from cudatma.arrays import describe

    info = describe(scales, "scales")
    if info.dtype.name not in ("float16", "bfloat16", "uint8"):
        raise DescriptorError("scales.dtype", str(info.dtype), "float16 or bfloat16 (uint8 for zero points)")
    if len(info.shape) not in (1, 2):
        raise DescriptorError("scales.shape", info.shape, "(N,), (1, N) or (groups, N)")
    if whole_column is None:
        whole_column = len(info.shape) == 1 or info.shape[0] == 1
    if whole_column != (len(info.shape) == 1) and info.shape[0] != 1:
        allowed = "(N,) or (1, N) if whole_column is True" if whole_column else "(groups, N) if whole_column is False"
        raise DescriptorError("scales.shape", info.shape, allowed)
    if whole_column and block_groups != 1:
        raise DescriptorError("block_groups", block_groups, "1 if whole_column is True")
    if whole_column:
        size, stride = info.shape[-1:], info.strides_bytes[-1:]
        return _map(info, _spec(info.pointer, size, stride, info.dtype, {"tile_n": tile_n}), target, encoder)
    spec = scale_map_spec(info.shape, info.dtype, tile_n, block_groups, info.strides_bytes, info.pointer)
    return _map(info, spec, target, encoder)


def scale_map_spec(
    shape: Sequence[int],
    dtype: object,
    tile_n: int,
    block_groups: int,
    strides_bytes: Sequence[int] | None = None,
    address: int = 0,
) -> TiledSpec:
    """Return the spec that create_scale_tma_desc() encodes for scales of shape (groups, N), C-contiguous by default."""
    size = tma_type(dtype).element_bytes
    strides = (shape[1] * size, size) if strides_bytes is None else strides_bytes
    return _spec(address, shape, strides, dtype, {"block_groups": block_groups, "tile_n": tile_n})


def create_activation_tma_desc(
    x: object,
    tile_m: int,
    tile_k: int = 64,
    *,
    blocks: int = 1,
    swizzle: Swizzle | str = Swizzle.B128,
    target: Target | str | None = None,
    encoder: str = "auto",
) -> TensorMap:
    """Create a tensor map over activations, with K as the innermost dimension.

    The map has box (tile_k, tile_m) and coordinates (k, m). TMA fills elements outside ``x`` with zeros.

    Parameters
    ----------
    x : array of fp16 or bf16, shape (M, K)
        Activations. The pitch must be a multiple of 16 bytes.
    tile_m : int
        Number of rows per load, 1 to 256.
    tile_k : int, default: 64
        Number of elements along K per load. Their size must not exceed the swizzle span, which is 64 elements for
        "128B".
    blocks : int, default: 1
        Number of blocks of ``tile_k`` elements per load. If it is greater than 1, tile_k must divide K, and the map is
        3D with box (tile_k, tile_m, blocks) and coordinates (0, m, k / tile_k). The blocks are consecutive in shared
        memory.
    swizzle : Swizzle or str, default: "128B"
        Permutation of the 16-byte chunks in shared memory.
    target, encoder : optional
        See ``TensorMap``.

    Returns
    -------
    TensorMap
        Tensor map over ``x``.

    Raises
    ------
    DescriptorError, TargetError, DriverError
        See ``TensorMap``.

    Examples
    --------
    >>> x = np.zeros((32, 1024), np.float16)
    >>> tensor_map = cudatma.create_activation_tma_desc(x, tile_m=16)
    >>> tensor_map.spec.box, tensor_map.spec.swizzle.label
    ((64, 16), '128B')
    """
    from cudatma.arrays import describe

    info = describe(x, "x")
    if info.dtype.name not in ("float16", "bfloat16"):
        raise DescriptorError("x.dtype", str(info.dtype), "float16, bfloat16")
    if len(info.shape) != 2:
        raise DescriptorError("x.shape", info.shape, "(M, K)", "reshape the leading dimensions into M")
    if type(blocks) is not int or blocks < 1:
        raise DescriptorError("blocks", blocks, "a positive int")
    options: dict[str, Any] = {"swizzle": swizzle, "l2_promotion": L2Promotion.B128}
    if blocks > 1:
        shape, strides = _blocks_of_depths(info, tile_k)
        box = {"blocks": blocks, "tile_m": tile_m, "tile_k": tile_k}
        names = {"strides_bytes[0]": "tile_k", "strides_bytes[1]": "strides_bytes[0]"}
        names |= {"shape[0]": "shape[1]", "shape[1]": "shape[0]"}
        return _map(info, _spec(info.pointer, shape, strides, info.dtype, box, names, **options), target, encoder)
    box = {"tile_m": tile_m, "tile_k": tile_k}
    spec = _spec(info.pointer, info.shape, info.strides_bytes, info.dtype, box, **options)
    return _map(info, spec, target, encoder)


def _blocks_of_depths(info: ArrayInfo, tile_k: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape and strides of an (M, K) array viewed as (K / tile_k, M, tile_k)."""
    m, k = info.shape
    if type(tile_k) is not int or tile_k < 1 or k % tile_k:
        raise DescriptorError("tile_k", tile_k, f"a divisor of K = {k} if blocks is greater than 1", "pass blocks=1")
    pitch, step = info.strides_bytes
    return (k // tile_k, m, tile_k), (tile_k * step, pitch, step)


def _spec(
    address: int,
    shape: Sequence[int],
    strides: Sequence[int],
    dtype: object,
    box: dict[str, int],
    names: Mapping[str, str] | None = None,
    **options: Any,
) -> TiledSpec:
    """Return the TiledSpec of an array in C order.

    ``box`` maps argument names of the public function to box extents, outermost first. ``names`` maps other fields to
    argument names. Errors report these argument names.
    """
    axes = tuple(reversed(range(len(shape))))
    names = {f"box[{axis}]": name for axis, name in enumerate(box)} | dict(names or {})
    try:
        return TiledSpec.from_strided(
            address, shape, strides_bytes=strides, dtype=dtype, box=tuple(box.values()), axes=axes, **options
        )
    except DescriptorError as error:
        raise error.renamed(names) from None


def _map(info: ArrayInfo, spec: TiledSpec, target: Target | str | None, encoder: str) -> TensorMap:
    return TensorMap(
        spec, device=info.device, owner=info.owner, target=target, encoder=encoder, on_host=info.device is None
    )


def _box_extent(spec: AnySpec) -> tuple[int, ...]:
    """Return the number of elements that a box spans in each dimension, in TMA order.

    Raises DescriptorError unless the map is tiled.
    """
    if not isinstance(spec, TiledSpec):
        raise DescriptorError(
            "spec", type(spec).__name__, "a TiledSpec (the positions of im2col boxes do not form a grid)"
        )
    return spec.box


def tile_counts(spec: AnySpec) -> tuple[int, ...]:
    """Return the number of boxes that cover each dimension of the tensor, ceil(dims[i] / box[i]), in TMA order."""
    return tuple(-(-dim // size) for dim, size in zip(spec.dims, _box_extent(spec), strict=True))


def box_coordinates(spec: AnySpec, tile: Sequence[int]) -> tuple[int, ...]:
    """Return the coordinates of a box, tile[i] * box[i], in TMA order.

    Raises DescriptorError unless 0 <= tile[i] < tile_counts(spec)[i].
    """
    indices = rules.as_ints(tile, "tile")
    rules.check_length(indices, spec.rank, "tile", spec.rank)
    for i, (index, count) in enumerate(zip(indices, tile_counts(spec), strict=True)):
        if not 0 <= index < count:
            raise DescriptorError(f"tile[{i}]", index, f"0 to {count - 1}")
    return tuple(index * size for index, size in zip(indices, _box_extent(spec), strict=True))
