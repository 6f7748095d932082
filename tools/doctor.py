"""Check the driver, GPUs, NVRTC, CuPy, the emulator, the templates, the cache and the disassemblers.

Each line shows the result of one check. If a check fails, the line also shows the effect and the remedy.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # run the subcommand, even if the checkout is not installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from cudatma.cli import main as cudatma_main

    raise SystemExit(cudatma_main(["doctor", *sys.argv[1:]]))

import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict

from .checks import Check, Machine, examine
from .command_line import Parser

EXAMPLES = """examples:
  cudatma doctor            report a missing GPU only as a warning
  cudatma doctor --gpu      fail unless kernels can be launched on this machine
  cudatma doctor --json
"""

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


#: Checks on which each ability depends.
_NEEDS = {
    "CPU reference and packing": ("python",),
    "render, compile and dump": ("python", "cuda-bindings", "NVRTC", "templates"),
    "run PTX on the emulator": ("python", "emulator"),
    "run kernels on the emulator": ("python", "cuda-bindings", "NVRTC", "templates", "emulator"),
    "dump SASS": ("cuda-bindings", "NVRTC", "templates", "disassembler"),
    "launch kernels": ("driver", "GPU", "cuda-bindings", "NVRTC", "CuPy", "templates"),
}


def abilities(checks: Sequence[Check]) -> dict[str, tuple[bool, str]]:
    """Return, for each ability, whether it works on this machine, and the first check that prevents it, or "".

    If several checks have the same name, such as those of several GPUs, the success of one check is sufficient.
    """
    result = {}
    present = {check.name for check in checks if not check.missing}
    for ability, needs in _NEEDS.items():
        missing = [check for check in checks if check.name in needs and check.name not in present]
        result[ability] = (not missing, f"{missing[0].name}: {missing[0].found}" if missing else "")
    return result


def passed(checks: Sequence[Check], *, gpu: bool) -> bool:
    """Return True if no check failed. If ``gpu`` is True, also require that the machine can launch kernels."""
    broken = any(check.status == "fail" for check in checks)
    return not broken and (not gpu or abilities(checks)["launch kernels"][0])


def _print(checks: Sequence[Check], gpu: bool) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console()

    def say(start: Text | str, text: str, style: str = "") -> None:
        """Print a text after ``start`` and indent the continuation lines. Long words, such as paths, are not split."""
        indent = " " * len(start)
        width = max(console.width - len(indent), 20)
        lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]
        for number, line in enumerate(lines):
            console.print(Text.assemble(indent if number else start, (line, style)), soft_wrap=True)

    remedies = {""}
    for check in checks:
        say(Text.assemble((f"{check.status:<5}", _STYLES[check.status]), f"{check.name:<14}"), check.found)
        if check.remedy not in remedies:  # Several checks may have the same remedy.
            say(" " * 19, check.remedy, "italic")
            remedies.add(check.remedy)
    print()
    for ability, (works, why) in abilities(checks).items():
        say(f"{'can' if works else 'cannot':<7}", f"{ability}{f' ({why})' if why else ''}")
    if not passed(checks, gpu=gpu):
        say("", "At least one check failed.", "bold red")


def parser() -> Parser:
    """Return the parser of ``cudatma doctor``."""
    result = Parser("cudatma doctor", __doc__, EXAMPLES)
    result.add_argument("--gpu", action="store_true", help="fail unless kernels can be launched on this machine")
    result.add_argument("--json", action="store_true", help="print JSON")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``cudatma doctor`` and return the exit status: 1 if a check failed."""
    options = parser().parse_args(argv)
    checks = examine(Machine())
    good = passed(checks, gpu=options.gpu)
    if options.json:
        able = {name: {"works": works, "why_not": why} for name, (works, why) in abilities(checks).items()}
        print(json.dumps({"ok": good, "checks": [asdict(check) for check in checks], "abilities": able}, indent=2))
    else:
        _print(checks, options.gpu)
    return 0 if good else 1
