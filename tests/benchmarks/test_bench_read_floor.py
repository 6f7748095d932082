"""The read floor's kernel and configurations: what fits, what compiles, and that the emulator finds no hazard."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import read_floor
from cudatma.target import get_target


@pytest.mark.parametrize("name", ["sm_90a", "sm_120a"])
def test_floor_configurations_fit(name: str) -> None:
    target = get_target(name)
    found = read_floor.configurations(target.smem_per_block_bytes, target.smem_per_sm_bytes)
    assert len(found) == len(set(found)) > 10
    for config in found:
        block = config.ring_bytes + 1024  # what the system keeps
        assert config.ring_bytes + 512 <= target.smem_per_block_bytes
        assert block * config.ctas_per_sm <= target.smem_per_sm_bytes
        assert 2 <= config.stages <= 32, "the kernel's barriers"


@pytest.mark.parametrize("name", ["sm_90a", "sm_120a"])
def test_the_floor_kernel_compiles(name: str) -> None:
    from cudatma.build.kernel import compile

    kernel = compile(read_floor.SOURCE, target=name, template=True)
    assert [parameter.size_bytes for parameter in kernel.parameters] == [8, 8, 8, 4, 4, 4]
    assert "cp.async.bulk.shared::cta.global" in kernel.ptx
    assert kernel.ptx.count("griddepcontrol.") == 2, "launched in a chain, it lets the next one in and waits"
    assert f".maxntid {read_floor.THREADS}" in kernel.ptx


def test_the_floor_kernel_has_no_hazard() -> None:
    from cudatma.build.kernel import compile

    kernel = compile(read_floor.SOURCE, target="sm_90a", template=True)
    source, sink = np.arange(8192, dtype=np.uint32).view(np.uint8), np.zeros(1, np.uint32)
    nbytes = source.nbytes - 48  # the last copy is shorter; two blocks go round a ring of two slots
    for interleaved in (0, 1):
        arguments = (source, sink, nbytes, 4096, 2, interleaved)
        report = kernel.emulate(2, read_floor.THREADS, arguments, shared_bytes=2 * 4096, schedules=3)
        assert not report.hazards, str(report)
    assert sink[0] == 0
