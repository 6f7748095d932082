"""Run the kernel launches of other libraries' programs on the emulator: Triton, Gluon, CuPy, cuda.core, cuda-python."""

from cudatma.programs.launch import ProgramLaunch
from cudatma.programs.log import LaunchEntry, LaunchLog, emulate_launches

__all__ = ["LaunchEntry", "LaunchLog", "ProgramLaunch", "emulate_launches"]
