"""The compiled data movement kernels: TMA moves the data, and transposes access 16 bytes per lane."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from ptx_of import kernel_for_emulator

from cudatma.build.kernel import load_kernel
from cudatma.errors import DriverError
from cudatma.kernels.data_movement.configs import RUN, RUN_KINDS, RunConfig, WindowConfig
from cudatma.kernels.data_movement.transpose import TEMPLATE, TransposeConfig, choose_transpose
from cudatma.kernels.registry import REGISTRY
from cudatma.review.cubin import read_cubin
from cudatma.review.nvidia_programs import disassemble
from cudatma.review.sass import count_mnemonics, parse_sass
from cudatma.runtime.launch import Kernel
from cudatma.target import get_target
from cudatma.toolkit import find_program

#: Kernels whose data passes through TMA alone, and what else they may read: a table, or the ends of a run.
BY_TMA = {
    "window_copy": 0,
    "run_copy": 2,
    "gather_boxes": 6,
    "im2col": 0,
    "broadcast": 0,
    "rows": 40,
}


def compiled(template: str, config: Any, target: str = "sm_90a") -> Kernel:
    try:
        return load_kernel(template, config, get_target(target))
    except DriverError as error:
        pytest.skip(f"no NVRTC: {error}")


def accesses(kernel: Kernel) -> Counter[str]:
    """Return the ordinary loads and stores of shared and global memory, by the first two parts of the mnemonic."""
    return Counter(re.findall(r"^\s*(?:@!?%p\d+\s+)?((?:ld|st)\.(?:shared|global|volatile))", kernel.ptx, re.MULTILINE))


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", BY_TMA)
@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_no_thread_moves_data(name: str, target: str) -> None:
    entry = REGISTRY[name]
    for config in entry.configs(target):
        kernel = compiled(entry.template, config, target)
        found = accesses(kernel)
        assert found["ld.shared"] == found["st.shared"] == found["ld.volatile"] == found["st.volatile"] == 0
        assert found["ld.global"] <= BY_TMA[name]
        assert found["st.global"] <= (2 if name == "run_copy" else 0)
        assert kernel.warnings == ()
        used = read_cubin(kernel.cubin, "", kernel.log).kernels[config.entry]
        assert used.spill_store_bytes == used.spill_load_bytes == 0


@pytest.mark.parametrize("rank", range(1, 6))
@pytest.mark.parametrize("target", ["sm_90a", "sm_120a"])
def test_windows_of_every_rank_compile(rank: int, target: str) -> None:
    config = WindowConfig("copy", rank, 16384, 3, 1, "evict_last")
    kernel = kernel_for_emulator("kernels/window_copy.cu.j2", config, get_target(target))
    assert f"cp.async.bulk.tensor.{rank}d.shared::cta.global.tile" in kernel.ptx
    assert "L2::evict_last" in kernel.ptx
    assert len(kernel.parameters) == 2 + 3 * rank + 2


@pytest.mark.parametrize(("op", "kind"), [(op, kind) for op, kinds in RUN_KINDS.items() for kind in kinds[-1:]])
def test_runs_of_every_operation_compile(op: str, kind: str) -> None:
    kernel = kernel_for_emulator(RUN, RunConfig(op, kind, 16384, 6, 3), get_target("sm_90a"))
    stem = "cp.reduce.async.bulk.global.shared::cta.bulk_group"
    noftz = ".noftz" if op == "add" and kind == "bf16" else ""
    wanted = "cp.async.bulk.global.shared::cta.bulk_group " if op == "copy" else f"{stem}.{op}{noftz}.{kind}"
    assert wanted in kernel.ptx


#: Element size -> SASS opcodes that read and write a tile, and how many of each turn one square's part.
TURNING = {1: ("LDSM", "STSM", 4), 2: ("LDSM", "STSM", 2), 4: ("LDS", "STS", 4), 8: ("LDS", "STS", 2)}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("element_bytes", TURNING)
@pytest.mark.parametrize("target", ["sm_90a", "sm_120a"])
def test_a_transpose_reads_and_writes_16_bytes_a_lane(element_bytes: int, target: str) -> None:
    config = choose_transpose(element_bytes, get_target(target))
    kernel = compiled(TEMPLATE, config, target)
    used = read_cubin(kernel.cubin, "", kernel.log).kernels[config.entry]
    assert used.spill_store_bytes == used.spill_load_bytes == 0
    assert 2 * used.registers * config.threads <= 65536
    if find_program("nvdisasm") is None:
        pytest.skip("no disassembler here")
    shown = disassemble(kernel.cubin)
    assert shown.text is not None
    (code,) = parse_sass(shown.text)
    found = count_mnemonics(code.steps)
    read, write, count = TURNING[element_bytes]
    assert found[read] == found[write] > 0
    assert found[read] % count == 0
    plain = [each.opcode for each in code.steps if each.mnemonic in ("LDS", "STS", "LDL", "STL", "LDG", "STG")]
    assert all(opcode in ("LDS.128", "STS.128") for opcode in plain)
    assert found["UTMALDG"] > 0
    assert found["UTMASTG"] > 0


def test_every_square_compiles() -> None:
    """The tiles are those that the benchmark searches."""
    for squares in ((1, 1), (2, 1), (1, 2), (4, 4)):
        config = TransposeConfig(4, *squares, 2, 1)
        assert compiled(TEMPLATE, replace(config, warps=8)).warnings == ()
