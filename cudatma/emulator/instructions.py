"""Registers what writes each instruction: import this module before a PTX function is translated."""

from cudatma.emulator.arithmetic import (  # noqa: F401
    numeric,
    ops_bits,
    ops_compare,
    ops_convert,
    ops_float,
    ops_move,
    ops_video,
)
from cudatma.emulator.async_copy import ops_async  # noqa: F401
from cudatma.emulator.machine import divergence, ops_control, ops_memory, ops_refused, ops_warp  # noqa: F401
from cudatma.emulator.tensor_core import ops_tensor, ops_wgmma  # noqa: F401
