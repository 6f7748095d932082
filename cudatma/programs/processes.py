"""Count the Python processes that a program starts. The log does not contain their launches."""

from __future__ import annotations

import os
import sys
from typing import Any

from cudatma.programs.log import LaunchLog
from cudatma.programs.patches import Patches


def count_multiprocessing(patches: Patches, log: LaunchLog) -> None:
    """Count the processes that multiprocessing starts, including those of pools."""
    from multiprocessing.process import BaseProcess

    def start(process: Any) -> None:
        log.child_processes += 1
        original(process)

    original = patches.set(BaseProcess, "start", start)


def count_subprocesses(patches: Patches, log: LaunchLog) -> None:
    """Count the Python processes that subprocess starts."""
    import subprocess

    def init(process: Any, args: Any, *rest: Any, **options: Any) -> None:
        command = args if isinstance(args, str | bytes | os.PathLike) or not args else args[0]
        program = os.path.basename(os.fsdecode(command))
        log.child_processes += command == sys.executable or program.startswith(("python", "cudatma", "torchrun"))
        original(process, args, *rest, **options)

    original = patches.set(subprocess.Popen, "__init__", init)
