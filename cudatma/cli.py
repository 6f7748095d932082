"""The console script ``cudatma``, with one subcommand for each module in COMMANDS.

If a command raises a cudatma error, the script prints one line to stderr and exits with status 2. If the output pipe is
closed, the script exits silently.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from cudatma.errors import ArgumentError, CompileError, CudaTmaError, TuneFileWarning
from cudatma.runtime.compiler_log import shortened

_formatwarning = warnings.formatwarning

#: Maps each subcommand to its module in tools/ and its description. A subcommand exists if its module exists.
COMMANDS: dict[str, tuple[str, str]] = {
    "doctor": ("doctor", "check the driver, GPU, NVRTC, cache and tools, and explain problems"),
    "demo": ("demo", "quantize a layer and run its GEMM on the GPU or the CPU"),
    "dump": ("dump_kernels", "compile or disassemble kernels and write PTX, cubin, SASS and a report, without a GPU"),
    "diff": ("diff_builds", "compare two builds of kernels"),
    "inspect": ("inspect_descriptor", "explain a tensor map: fields, layout, accesses and risks"),
    "emulate": ("emulate", "run a kernel on the CPU under many schedules and report its hazards"),
    "record": ("record", "record the kernel launches of a program for cudatma emulate"),
    "mutants": (
        "mutants",
        "remove each synchronization of a kernel and check that the emulator reports a hazard",
    ),
    "explain": ("explain", "explain a kind of hazard or the choice of a kernel for a problem"),
    "header": ("export_header", "export the primitives as a self-contained .cuh file"),
    "bench": ("bench", "run a benchmark from a checkout"),
    "tune": ("tune", "measure GEMM or attention configurations on this GPU and store the fastest"),
    "targets": ("targets", "list architectures and their features"),
    "convert": ("convert", "convert a Hugging Face model to packed int4 layers"),
    "cache": ("artifacts", "show the location and size of the kernel cache, or clear it"),
    "completion": ("completion", "print a completion script for bash or zsh"),
    "version": ("version", "show the versions of cudatma and its dependencies"),
}

EXAMPLES = """examples:
  cudatma doctor
  cudatma demo
  cudatma dump marlin_mma_sync --target sm_120a --out out
  cudatma emulate marlin_mma_sync --m 16 --n 256 --k 512 --trace marlin.svg
  cudatma emulate copy.cu -I include -D STAGES=4 --block 128 --arg x:float32[512]=arange --arg y:float32[512]
  cudatma COMMAND --help
"""


def tools_package() -> ModuleType:
    """Return the package ``cudatma.tools``, which is the folder tools/ in a checkout."""
    try:
        return importlib.import_module("cudatma.tools")
    except ModuleNotFoundError as error:
        if error.name != "cudatma.tools":
            raise
    folder = Path(__file__).resolve().parents[1] / "tools"
    init = folder / "__init__.py"
    spec = importlib.util.spec_from_file_location("cudatma.tools", init, submodule_search_locations=[str(folder)])
    if spec is None or spec.loader is None or not init.is_file():
        raise ModuleNotFoundError(f"cudatma.tools is neither installed nor at {folder}", name="cudatma.tools")
    module = importlib.util.module_from_spec(spec)
    sys.modules["cudatma.tools"] = module
    spec.loader.exec_module(module)
    return module


def available() -> dict[str, str]:
    """Return the description of each subcommand whose module exists."""
    package = tools_package().__name__
    return {
        command: summary
        for command, (module, summary) in COMMANDS.items()
        if importlib.util.find_spec(f"{package}.{module}") is not None
    }


def one_line(error: CudaTmaError) -> str:
    """Return an error as one line: its first line and, for a CompileError, the first error from NVRTC."""
    lines = str(error).strip().splitlines() or [""]
    parts = [f"cudatma: {type(error).__name__}: {lines[0]}"]
    if isinstance(error, CompileError):
        errors = [line.strip() for line in error.log.splitlines() if "error" in line.lower()]
        parts += map(shortened, errors[:1])
        parts += [f"artifacts: {error.folder}"] if error.folder else []
    return " | ".join(parts)


def _parser(commands: dict[str, str]) -> argparse.ArgumentParser:
    listing = "\n".join(f"  {command:<10} {summary}" for command, summary in commands.items())
    parser = argparse.ArgumentParser(
        prog="cudatma",
        description=f"Program NVIDIA's Tensor Memory Accelerator from Python.\n\ncommands:\n{listing}",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", metavar="COMMAND", help="one of the commands above")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the command")
    return parser


def _run(argv: Sequence[str]) -> int:
    commands = available()
    if not argv:
        _parser(commands).print_help()
        return 2
    if argv[0] in ("--version", "-V"):
        argv = ["version"]
    if argv[0] in ("--help", "-h"):
        _parser(commands).print_help()
        return 0
    command, *arguments = argv
    if command not in commands:
        raise ArgumentError("COMMAND", command, ", ".join(commands))
    module = importlib.import_module(f"cudatma.tools.{COMMANDS[command][0]}")
    return int(module.main(arguments) or 0)


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Format a TuneFileWarning without the source line that issued it."""
    if issubclass(category, TuneFileWarning):
        return f"cudatma: {message}\n"
    return _formatwarning(message, category, filename, lineno, line)


def _discard_output() -> None:
    """Discard output that cannot be written. Otherwise, Python prints a traceback if it cannot flush stdout at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``cudatma`` and return the exit status.

    The status is 0 for success, 1 if a check failed, and 2 for invalid arguments or other errors.
    """
    warnings.formatwarning = _format_warning
    try:
        status = _run(sys.argv[1:] if argv is None else argv)
        if sys.stdout is not None:  # stdout may be closed
            sys.stdout.flush()
        return status
    except CudaTmaError as error:
        print(one_line(error), file=sys.stderr)
        return 2
    except MemoryError as error:
        print(f"cudatma: out of memory: {error or 'the operands are too large for this machine'}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        _discard_output()
        return 1
    except OSError as error:
        print(f"cudatma: {error}", file=sys.stderr)
        _discard_output()
        return 2
    except KeyboardInterrupt:
        print("cudatma: interrupted", file=sys.stderr)
        return 130
    finally:
        warnings.formatwarning = _formatwarning


if __name__ == "__main__":
    raise SystemExit(main())
