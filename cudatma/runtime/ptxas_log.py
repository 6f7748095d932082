"""The parts of a compilation's log that require action. Pure."""

from __future__ import annotations

import re

_LOSS = "Potential Performance Loss"
_WARNING = re.compile(rf"warning|{_LOSS}|is injected in around line", re.IGNORECASE)


def log_warnings(log: str) -> tuple[str, ...]:
    """The lines of an NVRTC log that say something is wrong, or slower than written.

    Compiler warnings; ptxas' "Potential Performance Loss" (wgmma serialised, setmaxnreg ignored); waits and arrives
    that ptxas injected around wgmma.
    """
    return tuple(line.strip() for line in log.splitlines() if _WARNING.search(line) and "Remark:" not in line)


def performance_losses(log: str) -> tuple[str, ...]:
    """The lines in which ptxas reports a loss of performance: wgmma serialised, setmaxnreg ignored."""
    return tuple(line.strip() for line in log.splitlines() if _LOSS in line)


def register_count(log: str, entry: str) -> int | None:
    """Registers a thread of an entry, by a log written under ``--ptxas-options=-v``; 0 where ptxas ignores setmaxnreg,
    None where the log does not say."""
    if any("'setmaxnreg' ignored" in line for line in log.splitlines()):
        return 0
    _, _, behind = log.partition(f"Compiling entry function '{entry}'")
    found = re.search(r"Used (\d+) registers", behind.partition("Compiling entry function")[0])
    return int(found[1]) if found else None
