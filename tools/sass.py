"""Run disassemblers, parse SASS and ptxas output, and classify instructions.

Sources: CUDA Binary Utilities, "Instruction Set Reference" (Hopper and Blackwell tables) for the mnemonics, and the
output of cuobjdump 13, nvdisasm 13 and ptxas ``-v`` for the formats.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

#: Instructions that a report counts, by class, with their meanings. Zero counts are reported too.
CLASSES: dict[str, dict[str, str]] = {
    "TMA": {
        "UTMALDG": "tensor tile, global to shared",
        "UTMASTG": "tensor tile, shared to global",
        "UTMAREDG": "tensor tile, reduced into global",
        "UTMAPF": "tensor tile prefetch to L2",
        "UTMACCTL": "tensor map prefetch or fence",
        "UTMACMDFLUSH": "bulk group commit",
        "UBLKCP": "bulk copy",
        "UBLKRED": "bulk reduction",
        "UBLKPF": "bulk prefetch to L2",
    },
    "global": {
        "LDG": "load",
        "STG": "store",
        "LDGSTS": "cp.async, global to shared",
        "LDGDEPBAR": "cp.async commit",
        "RED": "reduction",
        "REDG": "reduction",
        "ATOM": "atomic",
        "ATOMG": "atomic",
    },
    "shared": {
        "LDS": "load",
        "STS": "store",
        "LDSM": "ldmatrix",
        "STSM": "stmatrix",
        "MOVM": "movmatrix",
        "ATOMS": "atomic",
    },
    "local": {"LDL": "load (spill or indexed array)", "STL": "store (spill or indexed array)"},
    "tensor core": {
        "HMMA": "mma.sync, 16-bit floats",
        "IMMA": "mma.sync, integers",
        "QMMA": "mma.sync, 8-bit floats",
        "HGMMA": "wgmma, 16-bit floats",
        "IGMMA": "wgmma, integers",
        "QGMMA": "wgmma, 8-bit floats",
        "WARPGROUP": "wgmma fence and wait",
        "UTCHMMA": "tcgen05, 16-bit floats",
    },
    "barrier": {
        "SYNCS": "mbarrier",
        "ARRIVES": "mbarrier arrive by cp.async",
        "BAR": "block barrier",
        "DEPBAR": "wait for bulk or cp.async groups",
        "UTMADEPBAR": "wait for bulk groups",
        "FENCE": "proxy fence",
        "MEMBAR": "memory fence",
        "ELECT": "elect one lane",
        "WARPSYNC": "warp barrier",
        "UCGABAR_ARV": "cluster barrier arrive",
        "UCGABAR_WAIT": "cluster barrier wait",
        "ACQBULK": "wait for the previous kernel (griddepcontrol.wait)",
        "PREEXIT": "let the next kernel start (griddepcontrol.launch_dependents)",
        "USETMAXREG": "setmaxnreg",
    },
    "arithmetic": {
        "LOP3": "logic",
        "PRMT": "byte permute",
        "SHF": "shift",
        "HADD2": "packed half add",
        "HMUL2": "packed half multiply",
        "HFMA2": "packed half fma",
        "FADD": "float add",
        "FMUL": "float multiply",
        "FFMA": "float fma",
        "MUFU": "special function",
        "F2FP": "float to half or bfloat",
        "IMAD": "integer multiply-add, move, address",
        "IADD": "integer add, address",
        "IADD3": "integer add, address",
        "LEA": "shift and add, address",
        "ISETP": "integer compare",
        "BRA": "branch",
    },
}

#: pip packages of the disassemblers; the extra ``sass`` of pyproject.toml lists them too.
SASS_PACKAGES = "nvidia-cuda-nvdisasm nvidia-cuda-cuobjdump"

_INSTRUCTION = re.compile(
    r"^\s*/\*(?P<address>[0-9a-fA-F]{4,})\*/\s+\{?\s*(?:@(?P<predicate>!?U?P\w+)\s+)?(?P<opcode>[A-Z][A-Z0-9_]*(?:\.[\w]+)*)"
)
_ENCODING = re.compile(r"\s*/\*\s*0x[0-9a-f]{16}\s*\*/\s*$")
_ENCODING_ONLY = re.compile(r"^\s*/\*\s*0x[0-9a-f]{16}\s*\*/\s*$")
_FUNCTION = re.compile(r"^\s*(?:Function\s*:\s*(?P<cuobjdump>\S+)|\.section\s+\.text\.(?P<nvdisasm>[^,\s]+))")


@dataclass(frozen=True, slots=True)
class Instruction:
    """A SASS instruction: its function, byte address, guard predicate ("" if none) and opcode with modifiers."""

    function: str
    address: int
    predicate: str
    opcode: str

    @property
    def mnemonic(self) -> str:
        """Opcode without modifiers, for example ``"UTMALDG"`` for ``"UTMALDG.2D"``."""
        return self.opcode.partition(".")[0]


def function_heading(line: str) -> str:
    """Return the function that begins with this line of a disassembly, or ""."""
    heading = _FUNCTION.match(line)
    return (heading["cuobjdump"] or heading["nvdisasm"]) if heading else ""


def parse_sass(text: str) -> tuple[Instruction, ...]:
    """Return all instructions except NOPs in the output of ``cuobjdump --dump-sass`` or ``nvdisasm``, in order."""
    instructions: list[Instruction] = []
    function = ""
    for line in text.splitlines():
        if heading := function_heading(line):
            function = heading
        elif (part := _INSTRUCTION.match(line)) and part["opcode"] != "NOP":
            instructions.append(
                Instruction(function, int(part["address"], 16), part["predicate"] or "", part["opcode"])
            )
    return tuple(instructions)


def count_mnemonics(instructions: Iterable[Instruction]) -> dict[str, int]:
    """Count how often each mnemonic occurs in the code. Sort by decreasing count, then by name."""
    counts = Counter(instruction.mnemonic for instruction in instructions)
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def by_class(counts: dict[str, int]) -> dict[str, dict[str, int]]:
    """Group counts by CLASSES, including zeros. Count uniform-datapath forms (ULOP3) as the ordinary forms (LOP3)."""
    return {
        name: {mnemonic: counts.get(mnemonic, 0) + counts.get(f"U{mnemonic}", 0) for mnemonic in members}
        for name, members in CLASSES.items()
    }


def uses_cluster(instructions: Iterable[Instruction]) -> list[str]:
    """Return the sorted opcodes that require a cluster: multicast copies and cluster barriers."""
    return sorted(
        {i.opcode for i in instructions if "MULTICAST" in i.opcode.split(".") or i.mnemonic.startswith("UCGABAR")}
    )


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources of a kernel in ptxas's output. Stack and spills are per thread. Shared memory is per block."""

    entry: str
    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    static_smem_bytes: int
    named_barriers: int


_COMPILING = re.compile(r"Compiling entry function '(?P<entry>[^']+)' for '(?P<target>[^']+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")


def parse_ptxas(log: str) -> dict[str, Resources]:
    """Return the resources of each entry in a log of ``--ptxas-options=-v``."""
    resources: dict[str, Resources] = {}
    entry, stack = "", (0, 0, 0)
    for line in log.splitlines():
        if compiling := _COMPILING.search(line):
            entry, stack = compiling["entry"], (0, 0, 0)
        elif frame := _STACK.search(line):
            stack = (int(frame[1]), int(frame[2]), int(frame[3]))
        elif entry and (used := _USED.search(line)):
            barriers, smem = re.search(r"used (\d+) barriers", line), re.search(r"(\d+) bytes smem", line)
            resources[entry] = Resources(
                entry, int(used[1]), *stack, int(smem[1]) if smem else 0, int(barriers[1]) if barriers else 0
            )
            entry = ""
    return resources


def find_program(name: str) -> Path | None:
    """Find ``nvdisasm`` or ``cuobjdump`` in the pip packages (nvidia/*/bin), then CUDA_HOME/bin, then PATH."""
    packages = {Path(sysconfig.get_paths()[key]) for key in ("purelib", "platlib")}
    folders = [folder for root in sorted(packages) for folder in sorted((root / "nvidia").glob("*/bin"))]
    folders += [Path(home) / "bin" for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")) if home]
    for folder in folders:
        if os.access(folder / name, os.X_OK):
            return folder / name
    on_path = shutil.which(name)
    return Path(on_path) if on_path else None


@dataclass(frozen=True, slots=True)
class Disassembly:
    """SASS of a cubin with encodings, or None and a note with the reason and the remedy."""

    text: str | None
    note: str = ""


def disassemble(cubin: Path) -> Disassembly:
    """Disassemble a cubin with nvdisasm, otherwise with cuobjdump. Both fail if they are older than the target."""
    failures = []
    programs = (("nvdisasm", ("--print-code", "--print-instruction-encoding")), ("cuobjdump", ("--dump-sass",)))
    for name, options in programs:
        if program := find_program(name):
            process = subprocess.run([str(program), *options, str(cubin)], capture_output=True, text=True, check=False)
            if process.returncode == 0:
                return Disassembly(process.stdout)
            words = (process.stderr.strip() or process.stdout.strip()).splitlines()
            failures.append(f"{program}: {words[-1] if words else f'exit status {process.returncode}'}")
    if failures:
        return Disassembly(
            None, f"{'; '.join(failures)}. A newer one comes with: pip install --upgrade {SASS_PACKAGES}"
        )
    return Disassembly(None, f"neither nvdisasm nor cuobjdump was found. Install them: pip install {SASS_PACKAGES}")


def without_encodings(text: str) -> str:
    """Remove the columns that contain the two encoding words of each instruction."""
    lines = (_ENCODING.sub("", line) for line in text.splitlines() if not _ENCODING_ONLY.match(line))
    return "".join(f"{line}\n" for line in lines)
