"""Every kernel of the registry, dumped for every architecture that cudatma launches on, and what its SASS must show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cudatma.build.kernel import compile as compile_kernel
from cudatma.build.render import render
from cudatma.kernels.registry import REGISTRY
from cudatma.runtime.launch_args import entries
from cudatma.target import get_target
from tools.dump_kernels import Job, dump, jobs_for
from tools.report import Report
from tools.sass import find_program

TARGETS = ("sm_90a", "sm_120a", "sm_121a")


def all_jobs(target: str) -> list[Job]:
    return [job for entry in REGISTRY.values() for job in jobs_for(entry, get_target(target), {})]


def jobs_to_compile() -> list[Job]:
    """Each kernel, of entries with many every second one. Every second entry for sm_121a, whose sources are those of
    sm_120a."""
    found: list[Job] = []
    for name in ("sm_90a", "sm_120a"):
        for entry in REGISTRY.values():
            jobs = jobs_for(entry, get_target(name), {})
            found += jobs[:: 2 if len(jobs) > MANY else 1]
    first = {job.entry.name: job for job in reversed(all_jobs("sm_121a"))}
    return [*found, *list(first.values())[::2]]


#: Instances of an entry.
MANY = 5
JOBS = jobs_to_compile()


#: Of one thread; an accumulator or operand array would be hundreds.
MOST_SPILL_BYTES = 160


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dump")


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    """Each kernel is compiled once."""
    return {}


def unread_parameters(ptx: str, entry: str) -> list[str]:
    """Launch parameters that the kernel's instructions do not name."""
    body = ptx[ptx.index("{", ptx.index(f".entry {entry}(")) :]
    return [one.name for one in entries(ptx)[entry] if not re.search(rf"\b{re.escape(one.name)}\b", body)]


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


@pytest.mark.sweep(3)
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_kernel(job: Job, folder: Path, reports: dict[str, Report]) -> None:
    report = dump(job, folder)
    assert report.resources is not None, "ptxas said nothing about the entry"
    # The widest tiles keep a few addresses in local memory (docs/performance/marlin_mma_sync.md), never accumulators.
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
    assert bool({"HGMMA", "QGMMA"} & report.sass.keys()) == ("wgmma" in job.entry.summary and job.target.has_wgmma)
    if not job.target.has_multicast:
        assert report.cluster_opcodes == ()


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", TARGETS)
def test_marlin_uses_tma_and_tensor_cores(name: str, folder: Path) -> None:
    """The kernel that is fed by TMA alone has no other loads into shared memory."""
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
