"""The wgmma Marlin kernel compiled: no spills, nothing serialised, and the instructions that its template promises."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest
from marlin_builders import wgmma

from cudatma.build.kernel import load_kernel
from cudatma.errors import DriverError
from cudatma.kernels.launch_struct import size_bytes
from cudatma.kernels.marlin.candidates import WGMMA_TILES, dump_configs, fitted
from cudatma.kernels.marlin.config import MarlinConfig
from cudatma.kernels.marlin.problem import LinearShape
from cudatma.runtime.launch import Kernel
from cudatma.target import get_target
from tools.sass import disassemble, find_program, parse_ptxas, parse_sass

TARGET = get_target("sm_90a")
LAYER = LinearShape(8192, 28672, 128, False, "float16")
#: Every tile with its largest tile_m, which needs the most registers, in fp16 and bf16 by turns.
TILES = [
    fitted(tile.config(replace(LAYER, dtype=("float16", "bfloat16")[number % 2]), tile.max_m), TARGET)
    for number, tile in enumerate(WGMMA_TILES)
]
#: Features, every tile of the list, and one whose last rows are stored by 8.
CONFIGS = list(
    dict.fromkeys(
        [
            *dump_configs("wgmma", TARGET)[::3],
            *(tile.in_form("as_stored") for tile in TILES),
            wgmma(tile_m=88, tile_n=128, tile_k=128, warpgroups=2, stages=4),
        ]
    )
)
TENSOR_MAP_BYTES = 128


def compiled(config: MarlinConfig) -> Kernel:
    try:
        return load_kernel(config.template, config, TARGET)
    except DriverError as error:
        pytest.skip(f"no NVRTC: {error}")


def saves_one(config: MarlinConfig) -> bool:
    """A tile that is 1 % faster with a register saved in front of its loop than with setmaxnreg. [H200]"""
    return config.is_fused and (config.tile_m, config.tile_n, config.tile_k, config.mmas_per_commit) == (
        64,
        256,
        256,
        2,
    )


@pytest.mark.sweep(2)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.entry)
def test_resources(config: MarlinConfig) -> None:
    """A log that speaks of serialised wgmmas or an ignored setmaxnreg is a warning."""
    kernel = compiled(config)
    assert kernel.warnings == ()
    used = parse_ptxas(kernel.log)[config.entry]
    assert (used.stack_bytes, used.spill_store_bytes, used.spill_load_bytes) == (
        (8, 4, 4) if saves_one(config) else (0, 0, 0)
    )
    assert used.registers * config.threads * config.ctas_per_sm <= 65536
    assert used.static_smem_bytes == 0, "the offsets in shared memory begin at the dynamic part"
    barriers = re.search(r"used (\d+) barriers", kernel.log)
    assert barriers is not None
    named = config.warpgroups * (1 if config.slice_k == 1 else 2) if not config.pingpong else 4
    assert int(barriers[1]) == 1 + named


@pytest.mark.sweep(2)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.entry)
def test_parameters(config: MarlinConfig) -> None:
    sizes = [parameter.size_bytes for parameter in compiled(config).parameters]
    maps = 2 + config.has_stage_scales + config.has_stage_zeros
    arrays = 2 + (0 if config.has_stage_scales else 1 + config.has_zeros) + 2 * (config.cluster_k == 1)
    assert sizes == [TENSOR_MAP_BYTES] * maps + [8] * arrays + [size_bytes(config.problem_members)]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.entry)
def test_instructions(config: MarlinConfig) -> None:
    if find_program("nvdisasm") is None:
        pytest.skip("no disassembler here: the SASS was not looked at")
    folder = compiled(config).folder
    assert folder is not None
    shown = disassemble(folder / "kernel.cubin")
    assert shown.text is not None
    found = Counter(instruction.mnemonic for instruction in parse_sass(shown.text))
    assert found["HGMMA"] == config.tile_k // 16 * config.stack // config.slice_k
    assert found["HMMA"] == found["LDGSTS"] == 0
    # Weights, scales and zero points: before griddepcontrol.wait, after it, and when the ring wraps;
    # activations by 64 of K. ptxas knows that one thread issues them: no loop, which would vote, around any copy.
    constants = 1 + config.has_stage_scales + config.has_stage_zeros
    assert found["UTMALDG"] == 3 * constants + 2 * (config.tile_k // 64)
    assert found["ELECT"] == 2
    assert found["USETMAXREG"] == (2 if config.consumer_registers else 0)
    assert ("MULTICAST" in shown.text) == (config.cluster > 1)
    # What threads read back from the staging rows, and store. CTAs that divide K have rows of their own each.
    own = 8 * -(-config.tile_m // (8 * config.cluster_k))
    stored = config.tile_m // own * -(-own // 16) + -(-(config.tile_m % own) // 16)
    assert found["STSM"] == stored * config.stack
    assert found["UTMASTG"] == 0


@pytest.mark.slow
def test_what_two_forms_save_is_not_in_their_loops() -> None:
    """From the wait for a stage to the last product; with zero points of whole columns there are more of them."""
    if find_program("nvdisasm") is None:
        pytest.skip("no disassembler here: the SASS was not looked at")
    column = wgmma(group_size=-1, has_zeros=True, tile_m=64, tile_n=256, tile_k=256, warpgroups=2, stages=3)
    long = wgmma(
        group_size=-1,
        has_zeros=True,
        tile_m=80,
        tile_n=256,
        tile_k=128,
        warpgroups=2,
        stages=5,
        mmas_per_commit=1,
        commits_in_flight=3,
    )
    saving = [config for config in CONFIGS if saves_one(config)]
    assert saving
    for config in (*saving, column, replace(column, dtype="bfloat16"), long, replace(long, dtype="bfloat16")):
        folder = compiled(config).folder
        assert folder is not None
        found = [each.mnemonic for each in parse_sass(disassemble(folder / "kernel.cubin").text or "")]
        first, last = found.index("HGMMA"), len(found) - found[::-1].index("HGMMA")
        wait = max(index for index, name in enumerate(found[:first]) if name == "SYNCS")
        saved = [index for index, name in enumerate(found) if name in ("STL", "LDL")]
        assert saved
        assert not any(wait <= index < last for index in saved), config.entry


@pytest.mark.slow
def test_one_multiply_add_shortens_the_main_loop() -> None:
    """Eight weights take nine instructions, or ten where they are shifted, instead of thirteen; fifteen of bf16."""
    if find_program("nvdisasm") is None:
        pytest.skip("no disassembler here: the SASS was not looked at")
    # The loop's instructions depend neither on tile_m nor on tile_n.
    by_form = {(s.tile_k, s.stack, s.slice_k, s.scale_form): s for s in CONFIGS if s.is_fused}
    fused = list(by_form.values())
    fused += [replace(config, dtype="bfloat16") for config in fused if config.scale_form == "as_stored"]
    for config in dict.fromkeys(fused):
        of_eight = 3 if config.scale_form == "shifted" else 6 if config.is_bf16 else 4
        saved = of_eight * config.stack * config.tile_k // 16 // config.slice_k
        spared = _loop_length(config.in_form("none")) - _loop_length(config)
        assert spared > 0.6 * saved, config.entry


def _loop_length(config: MarlinConfig) -> int:
    folder = compiled(config).folder
    assert folder is not None
    text = disassemble(folder / "kernel.cubin").text
    assert text is not None
    names = [instruction.mnemonic for instruction in parse_sass(text)]
    places = [at for at, name in enumerate(names) if name == "HGMMA"]
    wait = max(at for at, name in enumerate(names) if name == "SYNCS" and at < places[0])
    return names.index("BRA", places[-1]) - wait
