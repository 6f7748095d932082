"""Runs PTX on the CPU: warps, TMA, mbarriers, tensor cores, adversarial schedules, and what is wrong with a kernel.

>>> module = load(ptx_text)
>>> report = module.launch("my_kernel", grid=1, block=128, args=(array, 64), schedules=10)
"""

from cudatma.emulator.api import EmulatedModule, load
from cudatma.emulator.errors import EmulatorError, PtxError, ResidencyError, StepLimitError, TrapError
from cudatma.emulator.hazards.report import CAUSES, Hazard, Report
from cudatma.emulator.instructions import Coverage, coverage
from cudatma.emulator.trace import Trace

__all__ = [
    "CAUSES",
    "Coverage",
    "EmulatedModule",
    "EmulatorError",
    "Hazard",
    "PtxError",
    "Report",
    "ResidencyError",
    "StepLimitError",
    "Trace",
    "TrapError",
    "coverage",
    "load",
]
