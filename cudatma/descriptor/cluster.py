"""Clusters of CTAs: the ctaMask of a multicast load, and the validation of cluster shapes.

Sources: PTX ISA, cp.async.bulk.tensor (ctaMask) and %cluster_ctarank; CUDA C++ Programming Guide, "Thread Block
Clusters"; CUDA driver API, cuLaunchKernelEx.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from cudatma.errors import LaunchError
from cudatma.target import Target, get_target

#: Number of bits in the ctaMask operand, which limits the number of CTAs that a multicast can reach.
MASK_BITS = 16
_AXES = {"x": 0, "y": 1, "z": 2}


def multicast_mask(
    cluster: Sequence[int],
    *,
    axis: str | None = None,
    block: Sequence[int] = (0, 0, 0),
    ranks: Iterable[int] | None = None,
) -> int:
    """Return the 16-bit ctaMask of a multicast load.

    Bit r selects the CTA with rank r = x + cluster_x * (y + cluster_y * z). By default, the mask selects all CTAs of
    the cluster. Only one of ``axis`` and ``ranks`` may be given.

    Parameters
    ----------
    cluster : sequence of int
        Shape (x, y, z) of the cluster in CTAs. Missing dimensions are 1.
    axis : {"x", "y", "z"}, optional
        Select only the CTAs on the line through ``block`` along this axis.
    block : sequence of int, default: (0, 0, 0)
        Position (x, y, z) of a CTA in the cluster. Ignored unless ``axis`` is given.
    ranks : iterable of int, optional
        Select the CTAs with these ranks.

    Returns
    -------
    int
        The mask, from 1 to 0xFFFF.

    Raises
    ------
    LaunchError
        If an argument is invalid, or if the cluster has more than 16 CTAs.

    Examples
    --------
    >>> bin(cudatma.multicast_mask((2, 2), axis="x", block=(0, 1)))
    '0b1100'
    """
    shape = _shape(cluster, "cluster")
    size = prod(shape)
    if size > MASK_BITS:
        raise LaunchError("cluster", shape, f"at most {MASK_BITS} CTAs")
    if axis is not None and ranks is not None:
        raise LaunchError("ranks", ..., "omitted if axis is passed")
    if ranks is not None:
        if not isinstance(ranks, Iterable):
            raise LaunchError("ranks", ranks, "a sequence of CTA ranks in the cluster")
        chosen = list(ranks)
    elif axis is None:
        chosen = list(range(size))
    else:
        chosen = _line(shape, axis, block)
    if not chosen:
        raise LaunchError("ranks", chosen, "a nonempty sequence")
    mask = 0
    for index, rank in enumerate(chosen):
        if type(rank) is not int or not 0 <= rank < size:
            raise LaunchError(f"ranks[{index}]", rank, f"0 to {size - 1}")
        mask |= 1 << rank
    return mask


def check_cluster(grid: Sequence[int], cluster: Sequence[int], *, target: Target | str) -> tuple[int, int, int]:
    """Check that a grid can be launched in clusters of a given shape.

    The target must support clusters if a cluster has more than one CTA. A cluster may have at most
    ``max_cluster_blocks`` CTAs and must divide the grid in every dimension.

    Parameters
    ----------
    grid, cluster : sequence of int
        Shapes (x, y, z) in CTAs. Missing dimensions are 1.
    target : Target or str
        Target architecture.

    Returns
    -------
    tuple of int
        Shape (x, y, z) of the cluster.

    Raises
    ------
    LaunchError
        If the cluster is too large or does not divide the grid.
    TargetError
        If the target does not support clusters.

    Examples
    --------
    >>> cudatma.check_cluster((8, 4), (2,), target="sm_90a")
    (2, 1, 1)
    """
    blocks, shape, gpu = _shape(grid, "grid"), _shape(cluster, "cluster"), get_target(target)
    size = prod(shape)
    if size > 1:
        gpu.require("cluster", f"a cluster of {size} CTAs")
    if size > gpu.max_cluster_blocks:
        raise LaunchError("cluster", shape, f"at most {gpu.max_cluster_blocks} CTAs on {gpu.name}")
    for index, (whole, part) in enumerate(zip(blocks, shape, strict=True)):
        if whole % part:
            raise LaunchError(
                f"grid[{index}]",
                whole,
                f"a multiple of {part}",
                "round the grid up and return early from the surplus CTAs",
            )
    return shape


def _shape(values: Sequence[int], field: str) -> tuple[int, int, int]:
    """Return a shape as three positive ints, with 1 for each missing dimension."""
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise LaunchError(field, values, "a sequence of 1 to 3 ints")
    if not 1 <= len(values) <= 3:
        raise LaunchError(field, values, "a sequence of 1 to 3 ints")
    for index, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise LaunchError(f"{field}[{index}]", value, "a positive int")
    x, y, z = (*values, 1, 1)[:3]
    return x, y, z


def _line(shape: tuple[int, int, int], axis: str, block: Sequence[int]) -> list[int]:
    """Return the ranks of the CTAs on the line through ``block`` along an axis."""
    if axis not in _AXES:
        raise LaunchError("axis", axis, ", ".join(_AXES))
    if not isinstance(block, Sequence) or len(block) > 3:
        raise LaunchError("block", block, "a sequence of 1 to 3 ints")
    place = list(block) + [0] * (3 - len(block))
    for index, (value, size) in enumerate(zip(place, shape, strict=True)):
        if type(value) is not int or not 0 <= value < size:
            raise LaunchError(f"block[{index}]", value, f"0 to {size - 1}")
    ranks = []
    for value in range(shape[_AXES[axis]]):
        place[_AXES[axis]] = value
        ranks.append(place[0] + shape[0] * (place[1] + shape[1] * place[2]))
    return ranks
