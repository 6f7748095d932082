"""Attention's main loop after ptxas: nothing is spilled, and the softmax overlaps with the MMAs with the values."""

from __future__ import annotations

import re

import pytest

from cudatma.build.nvrtc import compile_source
from cudatma.build.render import render
from cudatma.kernels.attention.sample import small_config
from cudatma.review.nvidia_programs import disassemble
from cudatma.target import get_target
from cudatma.toolkit import find_program

_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?([A-Z0-9][^;]*)", re.MULTILINE)


def exponentials_between_waits(sass: str) -> list[int]:
    """Count the exponentials between each wait for all groups except the last one and the following wait for the last
    group."""
    found, count = [], -1
    for instruction in _INSTRUCTION.findall(sass):
        if instruction.startswith("WARPGROUP.DEPBAR"):
            if "gsb0, 0x1" in instruction:
                count = 0
            elif count >= 0:
                found.append(count)
                count = -1
        elif instruction.startswith("MUFU.EX2") and count >= 0:
            count += 1
    return found


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("version", "head_dim", "tile_m", "tile_n", "is_causal"),
    [
        ("a3", 128, 128, 128, True),
        ("a4", 64, 192, 128, False),
        ("a4", 128, 128, 176, True),
        ("a4", 256, 128, 80, False),
    ],
)
def test_exponentials_come_before_the_wait_for_the_output(
    version: str, head_dim: int, tile_m: int, tile_n: int, is_causal: bool
) -> None:
    """ptxas moves a wait up if it can. The warps would then wait for the MMAs with the values before the
    exponentials."""
    dims = {"head_dim": head_dim, "v_head_dim": head_dim}
    config = small_config(version, dtype="bfloat16", **dims, is_causal=is_causal, tile_m=tile_m, tile_n=tile_n)
    made = compile_source(render(config.template, config, "sm_90a"), get_target("sm_90a"))
    assert "0 bytes spill stores, 0 bytes spill loads" in made.log
    assert not made.warnings
    if find_program("nvdisasm") is None:
        pytest.skip("no disassembler here: the SASS was not looked at")
    sass = disassemble(made.cubin).text
    assert sass is not None
    # Two values a lane of every 8 keys, in two rows; two factors of earlier sums.
    assert exponentials_between_waits(sass) == [tile_n // 2 + 2] * (1 + is_causal)
