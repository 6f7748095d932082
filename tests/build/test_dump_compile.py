"""Kernels of the registry, dumped for every architecture on which cudatma launches, and checks of their SASS."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from cudatma.build.kernel import compile as compile_kernel
from cudatma.build.render import render
from cudatma.errors import TargetError
from cudatma.kernels.registry import FAMILIES, REGISTRY
from cudatma.review.flow import successors
from cudatma.review.sass import Code
from cudatma.runtime.launch_args import entries
from cudatma.target import get_target
from cudatma.toolkit import find_program
from tools.dump_kernels import Job, dump, jobs_for


def all_jobs(target: str) -> list[Job]:
    return [job for entry in REGISTRY.values() for job in jobs_for(entry, get_target(target), {})]


def jobs_to_compile() -> list[Job]:
    """Return one kernel of each registry entry for sm_90a, and for sm_120a if this is another kernel.

    Only the sources of families depend on the target (test_same_source).
    """
    jobs = []
    for name in ("sm_90a", "sm_120a"):
        for entry in REGISTRY.values():
            available = jobs_for(entry, get_target(name), {})
            if name == "sm_90a" or entry.name.startswith(tuple(FAMILIES)) or not entry.configs("sm_90a"):
                jobs += available[len(available) // 2 :][:1]
    return jobs


JOBS = jobs_to_compile()

#: Kernels that wait for cp.async groups, or for plain loads.
WITHOUT_RING = ("gemm_v1", "attention_scalar", "attention_a1")
#: Of one thread; an accumulator or operand array would be hundreds.
MOST_SPILL_BYTES = 160


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dump")


def unread_parameters(ptx: str, entry: str) -> list[str]:
    """Return the launch parameters that no instruction of the kernel reads."""
    body = ptx[ptx.index("{", ptx.index(f".entry {entry}(")) :]
    return [one.name for one in entries(ptx)[entry] if not re.search(rf"\b{re.escape(one.name)}\b", body)]


def assert_all_is_reached(code: Code) -> None:
    """Check that all instructions are reachable. ptxas leaves no dead code except a jump to itself and NOPs at the
    end."""
    following = successors(code)
    reached, queue = {0}, [0]
    while queue:
        new = set(following[queue.pop()]) - reached
        reached |= new
        queue += new
    dead = [step.mnemonic for index, step in enumerate(code.steps) if index not in reached]
    assert set(dead) <= {"BRA", "NOP"}
    assert dead.count("BRA") <= 1


def test_an_unread_parameter_is_found() -> None:
    source = 'extern "C" __global__ void one(int* read, int unread) { *read = 1; }'
    assert unread_parameters(compile_kernel(source, target="sm_90a").ptx, "one") == ["one_param_1"]


@pytest.mark.slow
def test_sm_121a_has_the_sources_of_sm_120a() -> None:
    sources = [
        [render(job.entry.template, job.config, job.target).partition("\n")[2] for job in all_jobs(name)]
        for name in ("sm_120a", "sm_121a")
    ]
    assert sources[0] == sources[1]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_kernel(job: Job, folder: Path) -> None:
    report = dump(job, folder)
    assert report.resources is not None
    assert report.resources.spill_store_bytes is not None, "ptxas said nothing about the entry"
    assert report.resources.spill_load_bytes is not None
    # The widest tiles keep a few addresses in local memory (docs/design/marlin.md), never accumulators.
    assert max(report.resources.spill_store_bytes, report.resources.spill_load_bytes) <= MOST_SPILL_BYTES
    assert report.resources.registers <= 255
    assert report.threads is not None
    assert report.resources.registers * report.threads <= 65536, "one block would not fit the register file"
    assert report.smem_total_bytes is not None
    assert report.smem_total_bytes <= job.target.smem_per_block_bytes
    assert unread_parameters((folder / f"{job.name}.ptx").read_text(), report.entry) == []
    if find_program("nvdisasm") is None:
        pytest.skip("no disassembler here: the SASS was not looked at")
    assert report.sass is not None, report.notes
    assert report.release_hazards == report.wgmma_hazards == ()
    code = report.code
    assert code is not None
    has_ring = getattr(job.config, "smem_bytes", 1) > 0 and job.entry.name not in WITHOUT_RING
    assert any(step.opcode.startswith("SYNCS.ARRIVE") for step in code.steps) == has_ring
    assert_all_is_reached(code)
    assert bool({"HGMMA", "QGMMA"} & report.sass.keys()) == ("wgmma" in job.entry.summary and job.target.has_wgmma)
    if not job.target.has_multicast:
        assert report.cluster_opcodes == ()


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", ["sm_90a", "sm_120a"])
def test_marlin_uses_tma_and_tensor_cores(name: str, folder: Path) -> None:
    """The kernel whose operands come only by TMA has no other loads into shared memory."""
    if find_program("nvdisasm") is None:
        pytest.skip("no disassembler here")
    jobs = [job for job in jobs_for(REGISTRY["marlin_mma_sync"], get_target(name), {}) if job.config.all_tma]
    assert jobs, "no representative config is fed by TMA alone"
    sass = dump(jobs[0], folder).sass
    assert sass is not None
    assert sass["UTMALDG"] > 0
    assert sass["HMMA"] > 0
    assert "LDGSTS" not in sass


def test_names_are_distinct() -> None:
    names = [job.name for job in JOBS]
    assert len(names) == len(set(names)) > 0


def runs_on_sm90(config: Any) -> bool:
    """Return whether SM90 has the kernel's instructions. It lacks the fp8 mma.sync."""
    try:
        config.check_target(get_target("sm_90a"))
    except TargetError:
        return False
    return True


#: Kernels that dumps show for SM120; SM90 has room for all.
#: Kernels of instructions that SM90 lacks (gather4) have no SM90 form.
SM120_CONFIGS = [
    (entry.template, config)
    for entry in REGISTRY.values()
    if entry.configs("sm_90a")
    for config in entry.configs("sm_120a")
    if runs_on_sm90(config)
]


@pytest.mark.sweep(20)
@pytest.mark.parametrize(("template", "config"), SM120_CONFIGS, ids=lambda value: getattr(value, "entry", None))
def test_same_source(template: str, config: Any) -> None:
    sources = [render(template, config, target) for target in ("sm_90a", "sm_120a")]
    assert sources[0] != sources[1]
    first, second = ([line for line in text.splitlines() if not line.startswith("//")] for text in sources)
    assert len(first) > 20
    assert first == second


def test_every_kernel_is_there() -> None:
    sm120 = {entry.template for entry in REGISTRY.values() if entry.configs("sm_120a") and entry.configs("sm_90a")}
    assert {template for template, _ in SM120_CONFIGS} == sm120
