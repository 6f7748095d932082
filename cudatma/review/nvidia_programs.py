"""Calls to NVIDIA's command-line programs, which disassemble cubins, assemble PTX, and extract code from files."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cudatma.toolkit import find_program, find_programs

#: pip packages of the disassemblers. The extra ``sass`` in pyproject.toml lists the same packages.
SASS_PACKAGES = "nvidia-cuda-nvdisasm nvidia-cuda-cuobjdump"
_TIMEOUT_S = 300
_CAUSE = re.compile(r"\b(?:error|fatal)\b")


@dataclass(frozen=True, slots=True)
class Output:
    """stdout and stderr of the first program that succeeded, or None and the reason for the failure."""

    text: str | None
    log: str = ""
    note: str = ""


def _first_success(name: str, arguments: Sequence[str], folder: str) -> Output:
    """Run the installed programs of a name until one succeeds. Old programs do not support new targets."""
    failures = []
    for program in find_programs(name):
        try:
            process = subprocess.run(
                [str(program), *arguments],
                cwd=folder,
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                timeout=_TIMEOUT_S,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            failures.append(f"{program}: {error}")
            continue
        if process.returncode == 0:
            return Output(process.stdout, process.stderr)
        words = (process.stderr.strip() or process.stdout.strip()).splitlines() or [f"exit status {process.returncode}"]
        failures.append(f"{program}: {next(filter(_CAUSE.search, words), words[-1])}")
    return Output(None, "", "; ".join(failures))


def disassemble(cubin: bytes) -> Output:
    """Disassemble a cubin and print instruction encodings. nvdisasm is preferred, because it prints source lines."""
    failures = []
    options = ("--print-code", "--print-instruction-encoding", "--print-line-info-inline")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "kernel.cubin").write_bytes(cubin)
        for name, arguments in (("nvdisasm", options), ("cuobjdump", ("--dump-sass",))):
            output = _first_success(name, (*arguments, "kernel.cubin"), folder)
            if output.text is not None:
                return output
            failures += [output.note] if output.note else []
    if failures:
        note = f"{'; '.join(failures)}. To install newer programs: pip install --upgrade {SASS_PACKAGES}"
        return Output(None, note=note)
    note = f"neither nvdisasm nor cuobjdump was found. Install them: pip install {SASS_PACKAGES}"
    return Output(None, note=note)


def assemble(ptx: str, target: str) -> tuple[bytes, Output]:
    """Assemble PTX with ptxas. Return the cubin, which is empty after a failure, and the output."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "kernel.ptx").write_text(ptx, encoding="utf-8")
        arguments = ("-v", "-lineinfo", f"-arch={target}", "kernel.ptx", "-o", "kernel.cubin")
        output = _first_success("ptxas", arguments, folder)
        if output.text is not None:
            return (Path(folder) / "kernel.cubin").read_bytes(), output
    note = output.note or "no ptxas was found in CUDA_HOME, on PATH or in Triton's wheel"
    return b"", Output(None, note=note)


def extract(path: Path) -> tuple[dict[str, bytes], dict[str, bytes], str]:
    """Return the cubins and PTX texts in a fatbin or host ELF file, by name, and a note after a failure."""
    members: list[dict[str, bytes]] = []
    failures = []
    for option, ending in (("--extract-elf", "*.cubin"), ("--extract-ptx", "*.ptx")):
        with tempfile.TemporaryDirectory() as folder:
            output = _first_success("cuobjdump", (option, "all", str(path.resolve())), folder)
            members.append({each.name: each.read_bytes() for each in sorted(Path(folder).glob(ending))})
            failures += [output.note] if output.note else []
    note = "; ".join(dict.fromkeys(failures)) or ("" if find_program("cuobjdump") else "cuobjdump was not found")
    return members[0], members[1], note
