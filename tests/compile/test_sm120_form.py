"""The sm_120a source of a kernel, compiled for sm_90a, is the same machine code as its sm_90a source.

So what ran on an SM90 card is the SM120 form too, as far as that card can show it. (Marlin's choices for sm_120a differ
from those for sm_90a; they are run by tests/gpu/test_marlin_gpu.py.)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cudatma.build.kernel import compile
from cudatma.build.render import render
from cudatma.errors import TargetError
from cudatma.kernels.registry import REGISTRY
from cudatma.target import get_target
from tools.sass import disassemble, find_program, without_encodings


def runs_on_sm90(spec: Any) -> bool:
    """Whether SM90 has the instructions: not the mma.sync of fp8."""
    try:
        spec.check_target(get_target("sm_90a"))
    except TargetError:
        return False
    return True


#: Every other kernel that dumps show for SM120; SM90 has room for all.
#: Kernels of instructions that SM90 lacks (gather4) have no SM90 form.
JOBS = [
    (entry.template, spec)
    for entry in REGISTRY.values()
    if entry.specs("sm_90a")
    for spec in entry.specs("sm_120a")[::2]
    if runs_on_sm90(spec)
]


def machine_code(source: str, entry: str, folder: Path) -> list[str]:
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compile(source, target="sm_90a", entry=entry).cubin)
    shown = disassemble(cubin)
    assert shown.text is not None, shown
    text = without_encodings(shown.text)
    return [line.strip() for line in text.splitlines() if line.strip().startswith("/*")]


@pytest.mark.sweep(5)
@pytest.mark.parametrize(("template", "spec"), JOBS, ids=lambda value: getattr(value, "entry", None))
def test_same_machine_code(template: str, spec: Any, tmp_path: Path) -> None:
    if find_program("nvdisasm") is None:
        pytest.skip("no disassembler here")
    first, second = (render(template, spec, target) for target in ("sm_90a", "sm_120a"))
    assert first != second
    code = machine_code(first, spec.entry, tmp_path)
    assert len(code) > 50
    assert machine_code(second, spec.entry, tmp_path) == code


def test_every_kernel_is_there() -> None:
    sm120 = {entry.template for entry in REGISTRY.values() if entry.specs("sm_120a") and entry.specs("sm_90a")}
    assert {template for template, _ in JOBS} == sm120
