"""Fixture for the tests of reports."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from cudatma.review import images, nvidia_programs


@cache
def disassembled(cubin: bytes, programs: tuple[Path, ...]) -> nvidia_programs.Output:
    return nvidia_programs.disassemble(cubin)


@pytest.fixture(autouse=True)
def one_disassembly_of_each_cubin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disassemble equal cubins once, because each run of nvdisasm takes at least half a second."""

    def disassemble(cubin: bytes) -> nvidia_programs.Output:
        return disassembled(cubin, tuple(nvidia_programs.find_programs("nvdisasm")))

    monkeypatch.setattr(images, "disassemble", disassemble)
