"""Emulator that runs PTX on the CPU, including TMA, mbarriers and tensor cores, and reports hazards.

A kernel runs under several adversarial schedules, which expose races and missing waits. `load` parses PTX, and
`EmulatedModule.launch` runs a kernel on NumPy arrays and returns a `Report`.
"""

from cudatma.emulator.api import EmulatedModule, KernelParameter, KernelResources, load
from cudatma.emulator.errors import EmulatorError, PtxError, ResidencyError, StepLimitError, TrapError
from cudatma.emulator.hazards.hazard import CAUSES, Access, Hazard
from cudatma.emulator.instructions import Coverage, coverage
from cudatma.emulator.report import Comparison, Report, report_page, report_sarif
from cudatma.emulator.trace import Trace

__all__ = [
    "CAUSES",
    "Access",
    "Comparison",
    "Coverage",
    "EmulatedModule",
    "EmulatorError",
    "Hazard",
    "KernelParameter",
    "KernelResources",
    "PtxError",
    "Report",
    "ResidencyError",
    "StepLimitError",
    "Trace",
    "TrapError",
    "coverage",
    "load",
    "report_page",
    "report_sarif",
]
