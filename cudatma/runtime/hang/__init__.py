"""Hang reports: the host side of kernels rendered with ``debug=True``.

The device code is ``ptx_templates/parts/debug_panel.cuh.j2`` and ``debug.cuh.j2``; docs/design/debug_kernels.md
describes both sides.
"""

from cudatma.runtime.hang.records import PANEL_NAME, is_debug_ptx, timeout_seconds
from cudatma.runtime.hang.report import Names, StuckWait, hang_of

__all__ = ["PANEL_NAME", "Names", "StuckWait", "hang_of", "is_debug_ptx", "timeout_seconds"]
