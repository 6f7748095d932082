"""Run the kernel launches of Triton, Gluon, CuTe DSL, CuPy, cuda.core and cuda-python programs on the emulator."""

from cudatma.programs.launch import ProgramLaunch
from cudatma.programs.log import LaunchEntry, LaunchLog, emulate_launches
from cudatma.programs.recorder import record
from cudatma.programs.recording import MemoryComparison, RecordedLaunch, Recording, Replay, read_recording

__all__ = [
    "LaunchEntry",
    "LaunchLog",
    "MemoryComparison",
    "ProgramLaunch",
    "RecordedLaunch",
    "Recording",
    "Replay",
    "emulate_launches",
    "read_recording",
    "record",
]
