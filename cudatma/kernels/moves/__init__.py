"""Every TMA operation as a small function over arrays."""

from cudatma.kernels.moves.broadcast import broadcast
from cudatma.kernels.moves.copy import copy
from cudatma.kernels.moves.gather import gather, halo_tiles
from cudatma.kernels.moves.im2col import im2col
from cudatma.kernels.moves.prefetch import prefetch
from cudatma.kernels.moves.reduce import reduce_into
from cudatma.kernels.moves.rows import gather_rows, scatter_rows
from cudatma.kernels.moves.transpose import transpose

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
