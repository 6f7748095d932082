"""The skinny GEMM compiled: next to no spills, the plan's parameters, instructions of its stages."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from cudatma.build.kernel import load_kernel
from cudatma.errors import DriverError
from cudatma.kernels.cost import cheapest_first
from cudatma.kernels.gpu import H200
from cudatma.kernels.launch_struct import size_bytes
from cudatma.kernels.marlin.candidates import dump_specs, skinny_times
from cudatma.kernels.marlin.config import MarlinConfig
from cudatma.kernels.marlin.problem import LinearShape, Problem
from cudatma.runtime.launch import Kernel
from cudatma.target import get_target
from tools.sass import disassemble, find_program, parse_ptxas, parse_sass

CASES = [(name, spec) for name in ("sm_90a", "sm_120a") for spec in dump_specs("skinny", get_target(name))]
#: Activations in boxes of other dimensions than the choice takes.
OTHER_BOX = [
    (name, replace(spec, deep_box=not spec.deep_box, tile_m=max(8, spec.tile_m)))
    for name, spec in CASES[:1] + CASES[-1:]
]
TENSOR_MAP_BYTES = 128


def ids(case: object) -> str:
    return case.entry if isinstance(case, MarlinConfig) else str(case)


def compiled(spec: MarlinConfig, target: str) -> Kernel:
    try:
        return load_kernel(spec.template, spec, get_target(target))
    except DriverError as error:
        pytest.skip(f"no NVRTC: {error}")


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("target", "spec"), CASES + OTHER_BOX, ids=ids)
def test_resources_and_parameters(target: str, spec: MarlinConfig) -> None:
    kernel = compiled(spec, target)
    assert kernel.warnings == ()
    used = parse_ptxas(kernel.log)[spec.entry]
    # Addresses of bf16's instance for M = 32 are kept in local memory on sm_90a, which leaves these to wgmma.
    rare = target == "sm_90a" and spec.is_bf16 and spec.tile_m == 32
    spills = 16 if rare else 0
    assert max(used.stack_bytes, used.spill_store_bytes, used.spill_load_bytes) <= spills
    assert used.registers * spec.threads * spec.blocks_per_sm <= 65536
    maps = 1 + (spec.whole_rows > 0) + spec.has_half_row + spec.has_stage_scales + spec.has_stage_zeros
    arrays = 2 + (0 if spec.has_stage_scales else 1 + spec.has_zeros)
    sizes = [parameter.size_bytes for parameter in kernel.parameters]
    assert sizes == [TENSOR_MAP_BYTES] * maps + [8] * arrays + [size_bytes(spec.problem_members)]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("n", [36864, 46000])
@pytest.mark.parametrize("group_size", [64, 128])
def test_two_blocks_of_32_tokens_keep_their_sums(n: int, group_size: int) -> None:
    """With slice_k > 1 ptxas would spill 250 bytes and more of each thread."""
    found = cheapest_first(skinny_times, Problem(LinearShape(2048, n, group_size, False, "float16"), 32), H200)
    spec = next(one for one, _ in found if one.version == "skinny" and one.blocks_per_sm == 2)
    assert spec.tile_m == 32
    used = parse_ptxas(compiled(spec, "sm_90a").log)[spec.entry]
    assert used.spill_store_bytes <= 128
    assert used.registers * spec.threads * 2 <= 65536


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("target", "spec"), CASES[:1] + CASES[-1:] + OTHER_BOX, ids=ids)
def test_instructions(target: str, spec: MarlinConfig) -> None:
    """TMA alone loads the operands: before the wait, for the first lap, and for all later laps."""
    if find_program("nvdisasm") is None:
        pytest.skip("no disassembler here: the SASS was not looked at")
    folder = compiled(spec, target).folder
    assert folder is not None
    shown = disassemble(folder / "kernel.cubin")
    assert shown.text is not None
    found = Counter(instruction.mnemonic for instruction in parse_sass(shown.text))
    constants = (spec.whole_rows > 0) + spec.has_half_row + spec.has_stage_scales + spec.has_stage_zeros
    activations = 1 if spec.deep_box else spec.tile_k // 64
    assert found["UTMALDG"] == 3 * constants + 2 * activations
    k64_per_warp = spec.tile_k // 64 // spec.slice_k
    assert found["HMMA"] == k64_per_warp * 4 * 2 * max(8, spec.tile_m) // 8
    assert found["LDSM"] == k64_per_warp * max(8, spec.tile_m) // 4
    # One thread issues copies, which ptxas knows: no loop over the threads of a warp, which would vote, around any of
    # them.
    assert found["ELECT"] == 2
    assert found["LDGSTS"] == found["HGMMA"] == 0
