"""What a compiler's log says: warnings, losses of performance, registers, and the lines of the source that it means."""

from __future__ import annotations

import re
from collections.abc import Mapping

from cudatma.errors import counted

#: File -> number -> text. The file's name has no folder, as the names that the emulator gives.
Lines = dict[str, dict[int, str]]

_DIRECTIVE = re.compile(r'#line (?P<number>\d+) "(?P<file>[^"]*)"')
_ERROR = re.compile(r"^(?P<file>\S[^(\n]*)\((?P<number>\d+)\): (?:catastrophic )?error\b.*", re.MULTILINE)
_PTXAS_ERROR = re.compile(r"^ptxas .*?, line (?P<number>\d+); (?:error|fatal)\b.*", re.MULTILINE)
_COMPLAINT_LINES, _AROUND = 8, 3


def lines_of(source: str, name: str = "kernel.cu") -> Lines:
    """The lines of a source as its #line directives number them, the file of the first directive first; without any,
    those of ``name``."""
    plain = dict(enumerate(source.splitlines(), 1))
    if _DIRECTIVE.search(source) is None:
        return {name: plain}
    found: Lines = {}
    file, number = "", 0
    for line in plain.values():
        if directive := _DIRECTIVE.fullmatch(line):
            file, number = directive["file"].rsplit("/", 1)[-1], int(directive["number"])
        elif file:
            lines = found.setdefault(file, {})
            lines[number] = lines.get(number) or line
            number += 1
    return found


def own_lines(source: str, name: str = "kernel.cu") -> Lines:
    """lines_of() without what was included."""
    file, lines = next(iter(lines_of(source, name).items()))
    return {file: lines}


def excerpt(log: str, source: str, name: str, ptx: str = "") -> str:
    """The first error of a log, and the three lines before and after it of the source, or of the PTX where ptxas
    refused that; "" where the log names no line."""
    errors = list(_ERROR.finditer(log))
    if errors:
        file, number = errors[0]["file"].rsplit("/", 1)[-1], int(errors[0]["number"])
        lines: Mapping[int, str] = lines_of(source, name).get(file, {})
    else:
        errors = list(_PTXAS_ERROR.finditer(log))
        if not errors:
            return ""
        number, lines = int(errors[0]["number"]), dict(enumerate(ptx.splitlines(), 1))
    end = errors[1].start() if len(errors) > 1 else len(log)
    complaint = log[errors[0].start() : end].split("\n\n", 1)[0]
    shown = complaint.strip().splitlines()[:_COMPLAINT_LINES]
    for at in range(number - _AROUND, number + _AROUND + 1):
        if at in lines:
            shown.append(f"{'>' if at == number else ' '} {at:5d} | {lines[at]}".rstrip())
    if len(errors) > 1:
        shown.append(f"and {counted(len(errors) - 1, 'more error')}")
    return "\n".join(shown)


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
