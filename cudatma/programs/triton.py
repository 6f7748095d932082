"""Launches of Triton and Gluon kernels."""

from __future__ import annotations

from cudatma.programs.log import LaunchLog


class TritonInterceptor:
    """Makes Triton compile for the log's target, and sends its launches to the log."""

    def install(self, log: LaunchLog) -> None: ...

    def remove(self) -> None: ...
