"""The Marlin kernel for few tokens compiled: next to no spills, the plan's parameters, the loads its stages want."""

from __future__ import annotations

import ctypes
from collections import Counter

import pytest

from cudatma.build import load_kernel
from cudatma.errors import DriverError
from cudatma.kernels.marlin.problem import ProblemStruct
from cudatma.kernels.marlin.strip_config import dump_specs
from cudatma.kernels.marlin.strip_spec import StripSpec
from cudatma.launch import Kernel
from cudatma.target import get_target
from tools.sass import disassemble, find_program, parse_ptxas, parse_sass

CASES = [(name, spec) for name in ("sm_90a", "sm_120a") for spec in dump_specs(get_target(name))]
TENSOR_MAP_BYTES = 128


def ids(case: object) -> str:
    return case.entry if isinstance(case, StripSpec) else str(case)


def compiled(spec: StripSpec, target: str) -> Kernel:
    try:
        return load_kernel(spec.template, spec, get_target(target))
    except DriverError as error:
        pytest.skip(f"no NVRTC: {error}")


@pytest.mark.parametrize(("target", "spec"), CASES, ids=ids)
def test_resources_and_parameters(target: str, spec: StripSpec) -> None:
    kernel = compiled(spec, target)
    assert kernel.warnings == ()
    used = parse_ptxas(kernel.log)[spec.entry]
    # One address of bf16's instance for 32 tokens is kept in local memory.
    assert max(used.stack_bytes, used.spill_store_bytes, used.spill_load_bytes) <= 8
    assert used.registers * spec.threads * spec.blocks_per_sm <= 65536
    maps = 1 + (spec.whole_rows > 0) + spec.has_half_row + spec.has_stage_scales + spec.has_stage_zeros
    sizes = [parameter.size_bytes for parameter in kernel.parameters]
    assert sizes == [TENSOR_MAP_BYTES] * maps + [8] * 9 + [ctypes.sizeof(ProblemStruct)]


@pytest.mark.parametrize(("target", "spec"), CASES[:1] + CASES[-1:], ids=ids)
def test_instructions(target: str, spec: StripSpec) -> None:
    """TMA alone brings what is multiplied: ahead of the wait, for the first lap, and for all others."""
    if find_program("nvdisasm") is None:
        pytest.skip("no disassembler here: the SASS was not looked at")
    folder = compiled(spec, target).folder
    assert folder is not None
    shown = disassemble(folder / "kernel.cubin")
    assert shown.text is not None
    found = Counter(instruction.mnemonic for instruction in parse_sass(shown.text))
    constants = (spec.whole_rows > 0) + spec.has_half_row + spec.has_stage_scales + spec.has_stage_zeros
    activations = spec.block_k // 64
    assert found["UTMALDG"] == 3 * constants + 2 * activations
    assert found["HMMA"] == spec.k64_per_warp * 4 * 2 * spec.block_m // 8
    assert found["LDGSTS"] == found["HGMMA"] == 0
