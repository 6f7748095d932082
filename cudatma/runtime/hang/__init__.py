"""What a kernel that was rendered with ``debug=True`` says when one of its waits expires, and the host that listens.

The device half is ``ptx_templates/parts/debug_panel.cuh.j2`` and ``debug.cuh.j2``; docs/howto/debug_a_hang.md tells the whole.
"""

from cudatma.runtime.hang.records import PANEL_NAME, is_debug_ptx, timeout_seconds
from cudatma.runtime.hang.report import Names, StuckWait, hang_of

__all__ = ["PANEL_NAME", "Names", "StuckWait", "hang_of", "is_debug_ptx", "timeout_seconds"]
