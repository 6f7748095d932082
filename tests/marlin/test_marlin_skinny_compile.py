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
from cudatma.kernels.marlin.candidates import dump_configs, skinny_times
from cudatma.kernels.marlin.config import MarlinConfig
from cudatma.kernels.marlin.problem import LinearShape, Problem
from cudatma.runtime.launch import Kernel
from cudatma.target import get_target
from tools.sass import disassemble, find_program, parse_ptxas, parse_sass

CASES = [(name, config) for name in ("sm_90a", "sm_120a") for config in dump_configs("skinny", get_target(name))]
#: Activations in boxes of other dimensions than the choice takes.
OTHER_BOX = [
    (name, replace(config, deep_box=not config.deep_box, tile_m=max(8, config.tile_m)))
    for name, config in CASES[:1] + CASES[-1:]
]
TENSOR_MAP_BYTES = 128


def ids(case: object) -> str:
    return case.entry if isinstance(case, MarlinConfig) else str(case)


def compiled(config: MarlinConfig, target: str) -> Kernel:
    try:
        return load_kernel(config.template, config, get_target(target))
    except DriverError as error:
        pytest.skip(f"no NVRTC: {error}")


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("target", "config"), CASES + OTHER_BOX, ids=ids)
def test_resources_and_parameters(target: str, config: MarlinConfig) -> None:
    kernel = compiled(config, target)
    assert kernel.warnings == ()
    used = parse_ptxas(kernel.log)[config.entry]
    # Addresses of bf16's instance for M = 32 are kept in local memory on sm_90a, which leaves these to wgmma.
    rare = target == "sm_90a" and config.is_bf16 and config.tile_m == 32
    spills = 16 if rare else 0
    assert max(used.stack_bytes, used.spill_store_bytes, used.spill_load_bytes) <= spills
    assert used.registers * config.threads * config.ctas_per_sm <= 65536
    maps = 1 + (config.whole_rows > 0) + config.has_half_row + config.has_stage_scales + config.has_stage_zeros
    arrays = 2 + (0 if config.has_stage_scales else 1 + config.has_zeros)
    sizes = [parameter.size_bytes for parameter in kernel.parameters]
    assert sizes == [TENSOR_MAP_BYTES] * maps + [8] * arrays + [size_bytes(config.problem_members)]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("n", [36864, 46000])
@pytest.mark.parametrize("group_size", [64, 128])
def test_two_blocks_of_32_tokens_keep_their_sums(n: int, group_size: int) -> None:
    """With slice_k > 1 ptxas would spill 250 bytes and more of each thread."""
    found = cheapest_first(skinny_times, Problem(LinearShape(2048, n, group_size, False, "float16"), 32), H200)
    config = next(one for one, _ in found if one.version == "skinny" and one.ctas_per_sm == 2)
    assert config.tile_m == 32
    used = parse_ptxas(compiled(config, "sm_90a").log)[config.entry]
    assert used.spill_store_bytes <= 128
    assert used.registers * config.threads * 2 <= 65536


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("target", "config"), CASES[:1] + CASES[-1:] + OTHER_BOX, ids=ids)
def test_instructions(target: str, config: MarlinConfig) -> None:
    """TMA alone loads the operands: before the wait, for the first lap, and for all later laps."""
    if find_program("nvdisasm") is None:
        pytest.skip("no disassembler here: the SASS was not looked at")
    folder = compiled(config, target).folder
    assert folder is not None
    shown = disassemble(folder / "kernel.cubin")
    assert shown.text is not None
    found = Counter(instruction.mnemonic for instruction in parse_sass(shown.text))
    constants = (config.whole_rows > 0) + config.has_half_row + config.has_stage_scales + config.has_stage_zeros
    activations = 1 if config.deep_box else config.tile_k // 64
    assert found["UTMALDG"] == 3 * constants + 2 * activations
    k64_per_warp = config.tile_k // 64 // config.slice_k
    assert found["HMMA"] == k64_per_warp * 4 * 2 * max(8, config.tile_m) // 8
    assert found["LDSM"] == k64_per_warp * max(8, config.tile_m) // 4
    # One thread issues copies, which ptxas knows: no loop over the threads of a warp, which would vote, around any of
    # them.
    assert found["ELECT"] == 2
    assert found["LDGSTS"] == found["HGMMA"] == 0
