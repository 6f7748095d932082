"""The Marlin kernel for few tokens compiled: next to no spills, the plan's parameters, instructions of its stages."""

from __future__ import annotations

import ctypes
from collections import Counter
from dataclasses import replace

import pytest

from benchmarks import strip_code
from cudatma.build import load_kernel
from cudatma.errors import DriverError
from cudatma.kernels.marlin.layer import Layer
from cudatma.kernels.marlin.problem import ProblemStruct
from cudatma.kernels.marlin.strip_config import choose_strip, dump_specs
from cudatma.kernels.marlin.strip_spec import StripSpec
from cudatma.launch import Kernel
from cudatma.target import get_target
from tools.sass import disassemble, find_program, parse_ptxas, parse_sass

CASES = [(name, spec) for name in ("sm_90a", "sm_120a") for spec in dump_specs(get_target(name))]
#: Warps of 64 channels.
WIDE = [(name, spec) for name, spec in CASES if spec.strips_per_warp > 1]
#: Activations in boxes of other dimensions than the choice takes.
OTHER_BOX = [
    (name, replace(spec, deep_box=not spec.deep_box, block_m=spec.columns)) for name, spec in CASES[:1] + CASES[-1:]
]
WIDE_SM121 = [("sm_121a", spec) for spec in dump_specs(get_target("sm_121a")) if spec.strips_per_warp > 1]
TENSOR_MAP_BYTES = 128


def ids(case: object) -> str:
    return case.entry if isinstance(case, StripSpec) else str(case)


def compiled(spec: StripSpec, target: str) -> Kernel:
    try:
        return load_kernel(spec.template, spec, get_target(target))
    except DriverError as error:
        pytest.skip(f"no NVRTC: {error}")


@pytest.mark.sweep(10)
@pytest.mark.parametrize(("target", "spec"), CASES + OTHER_BOX + WIDE_SM121, ids=ids)
def test_resources_and_parameters(target: str, spec: StripSpec) -> None:
    kernel = compiled(spec, target)
    assert kernel.warnings == ()
    used = parse_ptxas(kernel.log)[spec.entry]
    # Addresses of bf16's instance for 32 tokens are kept in local memory on sm_90a, which leaves these to wgmma.
    rare = target == "sm_90a" and spec.is_bf16 and spec.block_m == 32 and spec.strips_per_warp == 1
    spills = 16 if rare else 0
    assert max(used.stack_bytes, used.spill_store_bytes, used.spill_load_bytes) <= spills
    assert used.registers * spec.threads * spec.blocks_per_sm <= 65536
    maps = 1 + (spec.whole_rows > 0) + spec.has_half_row + spec.has_stage_scales + spec.has_stage_zeros
    sizes = [parameter.size_bytes for parameter in kernel.parameters]
    assert sizes == [TENSOR_MAP_BYTES] * maps + [8] * 9 + [ctypes.sizeof(ProblemStruct)]


@pytest.mark.parametrize("n", [36864, 46000])
@pytest.mark.parametrize("group_size", [64, 128])
def test_two_blocks_of_32_tokens_keep_their_sums(n: int, group_size: int) -> None:
    """Warps that divided the depth would spill 250 bytes and more of each thread."""
    choice = choose_strip(Layer(2048, n, group_size, False, "float16"), 32, get_target("sm_90a"), 132)
    assert (choice.blocks_per_sm, choice.spec.block_m) == (2, 32)
    used = parse_ptxas(compiled(choice.spec, "sm_90a").log)[choice.spec.entry]
    assert used.spill_store_bytes <= 128
    assert used.registers * choice.spec.threads * 2 <= 65536


@pytest.mark.parametrize(("target", "spec"), CASES[:1] + WIDE[:3] + CASES[-1:] + OTHER_BOX, ids=ids)
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
    activations = 1 if spec.deep_box else spec.block_k // 64
    assert found["UTMALDG"] == 3 * constants + 2 * activations
    # A lone strip has code of its own, with half of the multiplications and all of the activations.
    strips, copies = spec.strips_per_warp + spec.has_lone_strip, 1 + spec.has_lone_strip
    assert found["HMMA"] == spec.k64_per_warp * 4 * 2 * strips * spec.columns // 8
    assert found["LDSM"] == spec.k64_per_warp * copies * spec.columns // 4
    # One thread issues copies, which ptxas knows: no loop over others, which would vote, around any of them.
    assert found["ELECT"] == 2
    assert found["LDGSTS"] == found["HGMMA"] == 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_what_a_warp_of_64_channels_saves(dtype: str) -> None:
    """Half of the ldmatrix, nothing more of anything else; scales on weights cost four multiplications a word."""
    if find_program("nvdisasm") is None:
        pytest.skip("no disassembler here: the SASS was not looked at")
    target = get_target("sm_90a")
    compiled(strip_code.spec_of(dtype, 16, 1, "accumulator"), "sm_90a")  # skips where there is no NVRTC
    narrow, wide, on_weights = (
        strip_code.compile_and_analyse(strip_code.spec_of(dtype, 16, strips, scale_on), target)
        for strips, scale_on in ((1, "accumulator"), (2, "accumulator"), (2, "weight"))
    )
    assert (narrow.counts["LDSM"], wide.counts["LDSM"]) == (8, 4)
    assert all(wide.counts[name] <= narrow.counts[name] for name in strip_code.CLASSES)
    assert wide.instructions < 0.95 * narrow.instructions
    assert on_weights.counts["FFMA"] == 0 < wide.counts["FFMA"] == 16
    assert on_weights.counts["H*2"] == 128
    assert wide.floors_us["shared"] < narrow.floors_us["shared"]
    assert wide.floors_us["tensor"] == pytest.approx(32 * 1.705 * 448 / 1755)
