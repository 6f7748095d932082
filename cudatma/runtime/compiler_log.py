"""Parser for compiler logs: warnings, performance losses, register counts, and source lines."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from cudatma.errors import counted

#: Maps file names (without the folder, as in the emulator) to the text of each line by line number.
Lines = dict[str, dict[int, str]]

_DIRECTIVE = re.compile(r'#line (?P<number>\d+) "(?P<file>[^"]*)"')
_ERROR = re.compile(r"^(?P<file>\S[^(\n]*)\((?P<number>\d+)\): (?:catastrophic )?error\b.*", re.MULTILINE)
_PTXAS_ERROR = re.compile(r"^ptxas .*?, line (?P<number>\d+); (?:error|fatal)\b.*", re.MULTILINE)
_PTX_FILE = re.compile(r'^\s*\.file\s+\d+\s+"([^"]+)"', re.MULTILINE)
_COMPLAINT_LINES, _AROUND = 8, 3
_LONG_LINE = 400


def lines_of(source: str, name: str = "kernel.cu") -> Lines:
    """Return the lines of a source, numbered according to its #line directives.

    The file of the first directive is the first key of the result. Without directives, all lines belong to ``name``.
    """
    plain = dict(enumerate(source.splitlines(), 1))
    if _DIRECTIVE.search(source) is None:
        return {name: plain}
    files: Lines = {}
    file, number = "", 0
    for line in plain.values():
        if directive := _DIRECTIVE.fullmatch(line):
            file, number = directive["file"].rsplit("/", 1)[-1], int(directive["number"])
        elif file:
            lines = files.setdefault(file, {})
            lines[number] = lines.get(number) or line
            number += 1
    return files


def own_lines(source: str, name: str = "kernel.cu") -> Lines:
    """Return the lines of a source as lines_of() does, without the lines of included files."""
    file, lines = next(iter(lines_of(source, name).items()))
    return {file: lines}


def source_lines(source: str, ptx: str, name: str = "kernel.cu") -> Lines:
    """Return the lines of a source and of each existing file whose name is in the PTX."""
    files = own_lines(source, name)
    paths: dict[str, set[str]] = {}
    for path in _PTX_FILE.findall(ptx):
        paths.setdefault(path.rpartition("/")[2], set()).add(path)
    for file, (path, *others) in paths.items():
        # Skip names that several files share, because the emulator does not distinguish folders.
        if file not in files and not others:
            with suppress(OSError):
                text = Path(path).read_text(encoding="utf-8", errors="backslashreplace")
                files[file] = dict(enumerate(text.splitlines(), 1))
    return files


def excerpt(log: str, source: str, name: str, ptx: str = "") -> str:
    """Return the first error of a log with three source lines before and after it, or "" if the log has no line number.

    If ptxas rejected the PTX, the lines come from the PTX.
    """
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
    shown = [shortened(line) for line in complaint.strip().splitlines()[:_COMPLAINT_LINES]]
    for at in range(number - _AROUND, number + _AROUND + 1):
        if at in lines:
            shown.append(f"{'>' if at == number else ' '} {at:5d} | {lines[at]}".rstrip())
    if len(errors) > 1:
        shown.append(f"and {counted(len(errors) - 1, 'more error')}")
    return "\n".join(shown)


def shortened(line: str) -> str:
    """Return a line of a log, without its middle if it is long."""
    half = _LONG_LINE // 2
    return line if len(line) <= _LONG_LINE else f"{line[:half]} ... {line[-half:]}"


_LOSS = "Potential Performance Loss"
_WARNING = re.compile(rf"warning|{_LOSS}|is injected in around line", re.IGNORECASE)


def log_warnings(log: str) -> tuple[str, ...]:
    """Return the lines with warnings and performance losses from an NVRTC log.

    These lines are compiler warnings, "Potential Performance Loss" from ptxas (serialized wgmma or ignored setmaxnreg),
    and waits and arrives that ptxas injected around wgmma.
    """
    return tuple(line.strip() for line in log.splitlines() if _WARNING.search(line) and "Remark:" not in line)


def performance_losses(log: str) -> tuple[str, ...]:
    """Return the lines in which ptxas reports a performance loss (serialized wgmma or ignored setmaxnreg)."""
    return tuple(line.strip() for line in log.splitlines() if _LOSS in line)


def register_count(log: str, entry: str) -> int | None:
    """Return the number of registers per thread of an entry, from a log with ``--ptxas-options=-v``.

    The result is 0 if ptxas ignores setmaxnreg, and None if the log does not contain the number.
    """
    if any("'setmaxnreg' ignored" in line for line in log.splitlines()):
        return 0
    _, _, after = log.partition(f"Compiling entry function '{entry}'")
    match = re.search(r"Used (\d+) registers", after.partition("Compiling entry function")[0])
    return int(match[1]) if match else None
