"""Tensor maps for the arrays of a W4A16 GEMM, and the coordinates of their boxes.

The shapes follow version 1 of the packed weight layout (docs/design/packed_weights.md).
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

#: Size of a packed 64 x 64 block of weights, in bytes and in uint64 elements.
BLOCK_BYTES = 2048
BLOCK_WORDS = BLOCK_BYTES // 8


def create_weight_tma_desc(
    qweight: object, block_k64: int, *, target: Target | str | None = None, encoder: str = "auto"
) -> TensorMap:
    """Return a 2D map over packed int4 weights.

    There is no 4-bit type below sm_100, and a box has at most 256 elements per dimension. The map therefore describes a
    64 x 64 block of weights as 256 uint64 elements. It has dims (256, rows), box (256, block_k64) and coordinates (0,
    n64 * K64 + k64). Unless block_k64 divides K64, a box may continue into the next n64. The kernel must ignore the
    surplus blocks.

    Parameters
    ----------
    qweight : array of uint8, shape (rows, 2048)
        Packed weights. Row n64 * K64 + k64 is a 64 x 64 block. Rows must be dense, with a pitch that is a multiple of
        16 bytes.
    block_k64 : int
        Number of blocks along K per load, 1 to 256. Each block takes 2048 bytes of shared memory.
    target, encoder : optional
        As in TensorMap.

    Returns
    -------
    TensorMap
        The map.

    Raises
    ------
    DescriptorError, TargetError, DriverError
        As in TensorMap.

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
    """Return the spec of create_weight_tma_desc() for ``rows`` packed rows."""
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
    """Return a 3D map over packed weights whose loads fetch a whole tile.

    The map has dims (256, K64, N64) of uint64, box (256, block_k64, block_n64) and coordinates (0, k64, n64). Blocks
    outside the weight arrive as zeros.

    Parameters
    ----------
    qweight : array of uint8, shape (rows, 2048)
        Packed weights as for ``create_weight_tma_desc``, in whole rows of ``k64`` blocks.
    k64 : int
        Number of blocks along K.
    block_k64, block_n64 : int
        Number of blocks along K and N per load, 1 to 256 each.
    half_rows : bool, default: False
        Whether a load fetches only 32 of the 64 columns of each block, with box (128, ...) and coordinate 0 or 128.
    target, encoder : optional
        As in TensorMap.

    Returns
    -------
    TensorMap
        The map.

    Raises
    ------
    DescriptorError, TargetError, DriverError
        As in TensorMap.
    """
    info = _packed_rows(qweight)
    if k64 < 1 or info.shape[0] % k64:
        raise DescriptorError("k64", k64, f"a divisor of {info.shape[0]}, the rows of qweight", "ceil(K / 64)")
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
    """Return the spec of create_weight_tile_tma_desc() for ``n64`` rows of ``k64`` blocks."""
    shape, strides = (n64, k64, BLOCK_WORDS), (pitch_bytes * k64, pitch_bytes, 8)
    words = BLOCK_WORDS // 2 if half_rows else BLOCK_WORDS
    box = {"block_n64": block_n64, "block_k64": block_k64, "box": words}
    names = {"strides_bytes[1]": "strides_bytes[0]"}
    return _spec(address, shape, strides, "uint64", box, names, l2_promotion=L2Promotion.B256)


def _packed_rows(qweight: object) -> ArrayInfo:
    """Return the ArrayInfo of packed weights; require uint8 (rows, 2048) with dense rows."""
    from cudatma.arrays import describe

    info = describe(qweight, "qweight")
    if info.dtype != "uint8":
        raise DescriptorError("qweight.dtype", str(info.dtype), "uint8", "pack the weight first")
    if len(info.shape) != 2 or info.shape[1] != BLOCK_BYTES:
        raise DescriptorError("qweight.shape", info.shape, f"(rows, {BLOCK_BYTES})", "pack the weight first")
    if info.strides_bytes[1] != 1:
        raise DescriptorError("qweight.strides_bytes[1]", info.strides_bytes[1], "1: dense rows")
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
    """Return a map over scales (fp16, bf16) or zero points (uint8).

    Parameters
    ----------
    scales : array, shape (N,), (1, N) or (groups, N)
        One row holds one scale per column and gives a 1D map with box (tile_n,) and coordinate (n,). Several rows give
        a 2D map with box (tile_n, block_groups) and coordinates (n, group).
    tile_n : int
        Number of columns per load, 1 to 256. The size of these columns must be a multiple of 16 bytes.
    block_groups : int, default: 1
        Number of groups per load.
    whole_column : bool, optional
        Whether the map is 1D. Default: whether there is only one row.
    target, encoder : optional
        As in TensorMap.

    Returns
    -------
    TensorMap
        The map.

    Raises
    ------
    DescriptorError, TargetError, DriverError
        As in TensorMap.

    Examples
    --------
    >>> cudatma.create_scale_tma_desc(np.ones((8, 256), np.float16), tile_n=64).spec.box
    (64, 1)
    """
    from cudatma.arrays import describe

    info = describe(scales, "scales")
    if info.dtype.name not in ("float16", "bfloat16", "uint8"):
        raise DescriptorError("scales.dtype", str(info.dtype), "float16, bfloat16, or uint8 for zero points")
    if len(info.shape) not in (1, 2):
        raise DescriptorError("scales.shape", info.shape, "(N,), (1, N) or (groups, N)")
    if whole_column is None:
        whole_column = len(info.shape) == 1 or info.shape[0] == 1
    if whole_column != (len(info.shape) == 1) and info.shape[0] != 1:
        raise DescriptorError("scales.shape", info.shape, "(N,) or (1, N)" if whole_column else "(groups, N)")
    if whole_column and block_groups != 1:
        raise DescriptorError("block_groups", block_groups, "1 with whole-column scales")
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
    """Return the spec of create_scale_tma_desc() for scales (groups, N), dense by default."""
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
    """Return a map over activations, K innermost.

    Rows and columns outside x arrive as zeros. The map has box (tile_k, tile_m) and coordinates (k, m).

    Parameters
    ----------
    x : array of fp16 or bf16, shape (M, K)
        Activations. The pitch must be a multiple of 16 bytes.
    tile_m : int
        Number of rows per load, 1 to 256.
    tile_k : int, default: 64
        Number of elements along K per load. These elements must fit into the swizzle span (at most 64 elements with
        128B).
    blocks : int, default: 1
        If more than 1, a load fetches ``blocks * tile_k`` elements along K, and tile_k must divide K. The map is then
        3D, with box (tile_k, tile_m, blocks) and coordinates (0, m, k / tile_k). Shared memory holds one block after
        another.
    swizzle : Swizzle or str, default: "128B"
        Permutation of 16-byte chunks.
    target, encoder : optional
        As in TensorMap.

    Returns
    -------
    TensorMap
        The map.

    Raises
    ------
    DescriptorError, TargetError, DriverError
        As in TensorMap.

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
        raise DescriptorError("blocks", blocks, "an int, 1 or more")
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
    """Return the shape and the strides of an (M, K) array viewed as (K / tile_k, M, tile_k)."""
    m, k = info.shape
    if type(tile_k) is not int or tile_k < 1 or k % tile_k:
        why = "TMA does not clip inside a block; use blocks=1"
        raise DescriptorError("tile_k", tile_k, f"a divisor of K = {k}", why)
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
    """Return a TiledSpec in C order.

    ``box`` maps the caller's arguments to extents, outermost first, and ``names`` maps other fields to arguments.
    Errors name the caller's argument.
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
    """Return the number of elements that one box spans in each dimension, in TMA order.

    Raise DescriptorError unless the map is tiled.
    """
    if not isinstance(spec, TiledSpec):
        raise DescriptorError("spec", type(spec).__name__, "TiledSpec", "im2col boxes have no fixed extent")
    return spec.box


def tile_counts(spec: AnySpec) -> tuple[int, ...]:
    """Return the number of boxes that cover the tensor in each dimension, in TMA order: ceil(dims[i] / box[i])."""
    return tuple(-(-dim // size) for dim, size in zip(spec.dims, _box_extent(spec), strict=True))


def box_coordinates(spec: AnySpec, tile: Sequence[int]) -> tuple[int, ...]:
    """Return the coordinates of the box with index ``tile`` in each dimension, in TMA order: tile[i] * box[i].

    Raises DescriptorError unless 0 <= tile[i] < tile_counts(spec)[i].
    """
    indices = rules.as_ints(tile, "tile")
    rules.check_length(indices, spec.rank, "tile", spec.rank)
    for i, (index, count) in enumerate(zip(indices, tile_counts(spec), strict=True)):
        if not 0 <= index < count:
            raise DescriptorError(f"tile[{i}]", index, f"0 to {count - 1}")
    return tuple(index * size for index, size in zip(indices, _box_extent(spec), strict=True))
