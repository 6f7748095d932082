"""Every TMA operation as a small function over arrays."""

from cudatma.kernels.data_movement.broadcast import broadcast
from cudatma.kernels.data_movement.copy import copy
from cudatma.kernels.data_movement.gather import gather, halo_tiles
from cudatma.kernels.data_movement.im2col import im2col
from cudatma.kernels.data_movement.prefetch import prefetch
from cudatma.kernels.data_movement.reduce import reduce_into
from cudatma.kernels.data_movement.rows import gather_rows, scatter_rows
from cudatma.kernels.data_movement.transpose import transpose

__all__ = [
    "broadcast",
    "copy",
    "gather",
    "gather_rows",
    "halo_tiles",
    "im2col",
    "prefetch",
    "reduce_into",
    "scatter_rows",
    "transpose",
]
