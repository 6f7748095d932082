"""The checks of SASS find ring slots that are released too early, and registers that are written too early."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest
from marlin_builders import wgmma

from cudatma.build.nvrtc import compile_source
from cudatma.build.render import render
from cudatma.kernels.marlin.config import MarlinConfig
from cudatma.kernels.registry import REGISTRY
from cudatma.review.nvidia_programs import disassemble
from cudatma.review.release_hazards import ReleaseHazard, release_hazards
from cudatma.review.sass import Code, parse_sass
from cudatma.review.wgmma_hazards import wgmma_hazards
from cudatma.target import get_target
from cudatma.toolkit import find_program
from tools.dump_kernels import dump, jobs_for

pytestmark = pytest.mark.skipif(find_program("nvdisasm") is None, reason="nvdisasm is not installed here")

#: `value` is read before the arrival and used after it: nothing makes the arrival wait for the read.
RELEASE = 'asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(bar) : "memory");'
USE = "sum += value * (k + 1);"
KERNEL = """
extern "C" __global__ void NAME(unsigned* out, unsigned count) {
    __shared__ unsigned long long barrier;
    __shared__ unsigned slots[1024];
    const unsigned bar = (unsigned)__cvta_generic_to_shared(&barrier);
    const unsigned at = (unsigned)__cvta_generic_to_shared(slots + threadIdx.x);
    unsigned sum = 0;
#pragma unroll 1
    for (unsigned k = 0; k < count; ++k) {
        unsigned value;
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(at + k * 128) : "memory");
        FIRST
        SECOND
    }
    out[threadIdx.x] = sum;
}
"""
#: A branch that depends on the value cannot be issued before the value is there.
USE_AND_BRANCH = USE + ' if (value == 77) asm volatile("trap;");'


def disassembled(source: str, target: str) -> str:
    text = disassemble(compile_source(source, get_target(target)).cubin).text
    assert text is not None
    return text


def code_of(text: str) -> Code:
    (code,) = parse_sass(text)
    return code


#: First and second statement of each kernel's loop.
RINGS = {
    "used_after": (RELEASE, USE),
    "used_before": (USE_AND_BRANCH, RELEASE),
    "fenced": ('asm volatile("fence.acq_rel.cta;" ::: "memory");' + RELEASE, USE),
}


@lru_cache
def rings(target: str) -> dict[str, Code]:
    """Return the code of each kernel of RINGS, by name."""
    sources = (
        KERNEL.replace("NAME", name).replace("FIRST", first).replace("SECOND", second)
        for name, (first, second) in RINGS.items()
    )
    return {code.function: code for code in parse_sass(disassembled("".join(sources), target))}


@pytest.mark.parametrize("target", ["sm_90a", "sm_120a"])
def test_a_read_that_is_used_after_the_release_is_found(target: str) -> None:
    code = rings(target)["used_after"]
    (hazard,) = release_hazards(code)
    opcodes = {step.address: step.opcode for step in code.steps}
    load, arrive = [
        next(address for address, opcode in opcodes.items() if opcode.startswith(name)) for name in ("LDS", "SYNCS.ARR")
    ]
    assert load < arrive
    assert hazard == ReleaseHazard("used_after", arrive, opcodes[arrive], load, opcodes[load])


@pytest.mark.parametrize("name", ["used_before", "fenced"])
def test_a_read_that_is_complete_before_the_release_is_no_hazard(name: str) -> None:
    code = rings("sm_90a")[name]
    assert any(step.opcode.startswith("SYNCS.ARRIVE") for step in code.steps)
    assert release_hazards(code) == ()


@lru_cache
def wgmma_kernel(tile_k: int, in_flight: int) -> str:
    """Return a kernel in which a commit group covers a 64-deep block, so that a stage has tile_k / 64 groups."""
    config = wgmma(
        tile_m=64, tile_n=128, tile_k=tile_k, warpgroups=2, stages=4, mmas_per_commit=4, commits_in_flight=in_flight
    )
    return disassembled(render(config.template, config, get_target("sm_90a")), "sm_90a")


def test_fragments_of_a_group_that_the_loop_leaves_in_flight_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """MarlinConfig rejects this config: the loop has one group of 16 registers, which the next weights overwrite."""
    monkeypatch.setattr(MarlinConfig, "_check_groups", lambda _: None)
    text = wgmma_kernel(tile_k=64, in_flight=1)
    code = code_of(text)
    wgmmas = [step for step in code.steps if step.mnemonic == "HGMMA"]
    first_registers = [int(step.operands.split(", ")[1].removeprefix("R")) for step in wgmmas]
    hazards = wgmma_hazards(code_of(text))
    assert {hazard.operand for hazard in hazards} == {"A"}
    assert {hazard.wgmma for hazard in hazards} == {step.address for step in wgmmas}
    assert {hazard.register for hazard in hazards} == {r + i for r in first_registers for i in range(4)}
    # Over the back edge only: behind the wgmmas the loop writes none of them.
    assert max(hazard.write for hazard in hazards) < wgmmas[0].address


def test_fragments_of_groups_within_the_loop_are_kept_apart() -> None:
    text = wgmma_kernel(tile_k=128, in_flight=1)
    assert "WARPGROUP.DEPBAR.LE gsb0, 0x1" in text
    assert wgmma_hazards(code_of(text)) == ()


@pytest.mark.parametrize("wait", ["WARPGROUP.DEPBAR.LE gsb0, 0x1", "WARPGROUP.DEPBAR.LE gsb0, 0x0"])
def test_a_real_kernel_needs_its_waits(wait: str) -> None:
    """The test removes one kind of wait from the kernel: for the next fragments or for the accumulators."""
    text = wgmma_kernel(128, 1)
    operands = {hazard.operand for hazard in wgmma_hazards(code_of(text.replace(wait, "NOP")))}
    assert operands == {"A" if wait.endswith("0x1") else "D"}


def test_the_report_says_so(tmp_path: Path) -> None:
    (job, *_) = jobs_for(REGISTRY["tile_copy"], get_target("sm_90a"), {})
    report = dump(job, tmp_path)
    assert report.release_hazards == report.wgmma_hazards == ()
    page = (tmp_path / f"{report.name}.report.txt").read_text()
    assert "release hazards: none" in page
    assert "wgmma hazards: none" in page
    assert "/* 0x" not in (tmp_path / f"{report.name}.sass").read_text()
