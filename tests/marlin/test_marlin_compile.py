"""Marlin's kernels compiled: spills, shared memory, parameters, and the instructions that their templates promise.

Artifacts come from the cache where they are known: a second run compiles nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from functools import lru_cache

import pytest
from marlin_builders import BY_CP_ASYNC, wgmma

from cudatma.build.kernel import load_kernel
from cudatma.errors import DriverError
from cudatma.kernels.cost import cheapest_first
from cudatma.kernels.gpu import H200, imagined_gpu
from cudatma.kernels.launch_struct import size_bytes
from cudatma.kernels.marlin.candidates import WGMMA_TILES, choose_mma_sync, dump_configs, fitted, skinny_times
from cudatma.kernels.marlin.config import LOAD_PATHS, MarlinConfig
from cudatma.kernels.marlin.problem import LinearShape, Problem
from cudatma.review.cubin import read_cubin
from cudatma.review.nvidia_programs import disassemble
from cudatma.review.sass import Step, parse_sass, uses_cluster
from cudatma.runtime.launch import Kernel
from cudatma.target import get_target
from cudatma.toolkit import find_program

TARGETS = ("sm_90a", "sm_120a")
TENSOR_MAP_BYTES = 128


def ids(value: object) -> str:
    return value.entry if isinstance(value, MarlinConfig) else str(value)


def compiled(config: MarlinConfig, target: str = "sm_90a") -> Kernel:
    try:
        return load_kernel(config.template, config, target)
    except DriverError as error:
        pytest.skip(f"no NVRTC: {error}")


@lru_cache(maxsize=64)
def instructions(config: MarlinConfig, target: str = "sm_90a") -> list[Step]:
    if find_program("nvdisasm") is None:
        pytest.skip("no disassembler here: the SASS was not looked at")
    text = disassemble(compiled(config, target).cubin).text
    assert text is not None
    (code,) = parse_sass(text)
    return code.steps


def counts(config: MarlinConfig, target: str = "sm_90a") -> Counter[str]:
    return Counter(instruction.mnemonic for instruction in instructions(config, target))


def check_resources(config: MarlinConfig, target: str, *, local_bytes: int = 0) -> None:
    """Check warnings, which a log of serialized wgmmas or of an ignored setmaxnreg has, local memory and registers."""
    kernel = compiled(config, target)
    assert kernel.warnings == ()
    used = read_cubin(kernel.cubin, "", kernel.log).kernels[config.entry]
    assert used.spill_store_bytes is not None
    assert used.spill_load_bytes is not None
    assert max(used.stack_bytes, used.spill_store_bytes, used.spill_load_bytes) <= local_bytes
    assert used.registers * config.threads * config.ctas_per_sm <= 65536, "fewer CTAs on an SM than the plan has"
    assert used.static_smem_bytes == 0, "the offsets in shared memory begin at the dynamic part"


def check_parameters(config: MarlinConfig, target: str, *, maps: int, arrays: int) -> None:
    sizes = [parameter.size_bytes for parameter in compiled(config, target).parameters]
    assert sizes == [TENSOR_MAP_BYTES] * maps + [8] * arrays + [size_bytes(config.problem_members)]


# ---- mma.sync

MMA_SYNC = [(name, config) for name in TARGETS for config in dump_configs("mma_sync", get_target(name))[::3]]
#: A config for each mixture of load paths.
BY_SIZE = sorted((c for name, c in MMA_SYNC if name == "sm_120a"), key=lambda c: -c.tile_m * c.tile_n)
SM120 = list({(c.uses_tma, c.uses_cp_async): c for c in BY_SIZE}.values())


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("target", "config"), MMA_SYNC, ids=ids)
def test_mma_sync(target: str, config: MarlinConfig) -> None:
    """The parameters are a map per operand that TMA loads, a pointer per other operand, four more pointers, and the
    problem."""
    check_resources(config, target, local_bytes=96)
    assert config.smem_bytes <= min(99 * 1024, get_target(target).smem_per_block_bytes)
    tables = 1 + config.has_zeros if config.group_size != -1 and config.scale_load_path == "tma" else 0
    maps = (config.weight_load_path == "tma") + tables + (config.activation_load_path == "tma")
    by_threads = (1 + config.has_zeros) * (config.group_size == -1 or config.scale_load_path != "tma")
    arrays = (config.weight_load_path != "tma") + by_threads + (config.activation_load_path != "tma") + 4
    check_parameters(config, target, maps=maps, arrays=arrays)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("config", SM120, ids=ids)
def test_sm120_code(config: MarlinConfig) -> None:
    assert uses_cluster(instructions(config, "sm_120a")) == []
    found = counts(config, "sm_120a")
    assert found["HMMA"] > 0
    assert (found["UTMALDG"] > 0) == config.uses_tma
    assert (found["LDGSTS"] > 0) == config.uses_cp_async
    assert not [name for name in found if name.startswith(("HGMMA", "UTCHMMA", "UTCQMMA"))]
    ptx = compiled(config, "sm_120a").ptx
    assert "shared::cluster" not in ptx
    assert "multicast" not in ptx


def test_tma_takes_the_place_of_loads() -> None:
    """If TMA loads all operands, no thread copies operands or computes their addresses."""
    name = "sm_120a"
    problem, gpu = Problem(LinearShape(4096, 4096, 128, True, "float16"), 8), imagined_gpu(name, 132)
    both = [choose_mma_sync(problem, gpu, **dict.fromkeys(BY_CP_ASYNC, load_path)) for load_path in LOAD_PATHS]
    tma, by_hand = (counts(config, name) for config in both)
    assert tma["LDGSTS"] == by_hand["UTMALDG"] == 0
    # A box for each 64 of N, scales and zero points, both before griddepcontrol.wait and after it; one for each 64 of
    # K of the activations.
    assert tma["UTMALDG"] == 2 * (both[0].tile_n // 64 + 2) + both[0].tile_k // 64
    assert by_hand["LDGSTS"] > 0


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("paths", "group_size", "has_zeros"),
    [
        (("tma", "tma", "cp_async"), -1, True),
        (("tma", "cp_async", "tma"), 32, True),
        (("cp_async", "tma", "tma"), 64, False),
        (("cp_async", "cp_async", "cp_async"), -1, False),
    ],
)
def test_mixtures_of_load_paths(paths: tuple[str, str, str], group_size: int, has_zeros: bool) -> None:
    layer = LinearShape(4096, 4096, group_size, has_zeros, "bfloat16")
    given = dict(zip(BY_CP_ASYNC, paths, strict=True))
    config = choose_mma_sync(Problem(layer, 64), imagined_gpu("sm_120a", 132), **given)
    assert compiled(config, "sm_120a").warnings == ()


# ---- wgmma

SM90A = get_target("sm_90a")
LAYER = LinearShape(8192, 28672, 128, False, "float16")
#: Every tile with its largest tile_m, which needs the most registers, in fp16 and bf16 by turns.
TILES = [
    fitted(tile.config(replace(LAYER, dtype=("float16", "bfloat16")[number % 2]), tile.max_m), SM90A)
    for number, tile in enumerate(WGMMA_TILES)
]
#: Configs with several features, one config whose last rows are stored by 8, and every tile of the list.
FEATURES = [*dump_configs("wgmma", SM90A)[::5], wgmma(tile_m=88, tile_n=128, tile_k=128, warpgroups=2, stages=4)]
WGMMA = list(dict.fromkeys([*FEATURES, *(tile.in_form("as_stored") for tile in TILES)]))
#: A tile that is 1 % faster with a register saved in front of its loop than with setmaxnreg. [H200]
SAVES_ONE = wgmma(tile_m=64, tile_n=256, tile_k=256, warpgroups=2, stages=3, scale_form="as_stored")


def saves_one(config: MarlinConfig) -> bool:
    fields = ("is_fused", "tile_m", "tile_n", "tile_k", "mmas_per_commit")
    return all(getattr(config, name) == getattr(SAVES_ONE, name) for name in fields)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("config", WGMMA, ids=ids)
def test_resources_of_wgmma(config: MarlinConfig) -> None:
    check_resources(config, "sm_90a", local_bytes=8 if saves_one(config) else 0)
    barriers = re.search(r"used (\d+) barriers", compiled(config).log)
    assert barriers is not None
    assert int(barriers[1]) == 1 + (4 if config.pingpong else config.warpgroups * (1 if config.slice_k == 1 else 2))
    constants = config.has_stage_scales + config.has_stage_zeros
    arrays = 2 + (0 if config.has_stage_scales else 1 + config.has_zeros) + 2 * (config.cluster_k == 1)
    check_parameters(config, "sm_90a", maps=2 + constants, arrays=arrays)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("config", FEATURES, ids=ids)
def test_instructions_of_wgmma(config: MarlinConfig) -> None:
    constants = config.has_stage_scales + config.has_stage_zeros
    found = counts(config)
    assert found["HGMMA"] == config.tile_k // 16 * config.stack // config.slice_k
    assert found["HMMA"] == found["LDGSTS"] == 0
    # Weights, scales and zero points: before griddepcontrol.wait, after it, and when the ring wraps; activations by 64
    # of K. ptxas knows that one thread issues them: no loop, which would vote, around any copy.
    assert found["UTMALDG"] == 3 * (1 + constants) + 2 * (config.tile_k // 64)
    assert found["ELECT"] == 2
    assert found["USETMAXREG"] == (2 if config.consumer_registers else 0)
    assert any("MULTICAST" in step.opcode for step in instructions(config)) == (config.cluster > 1)
    # What threads read back from the staging rows, and store. CTAs that divide K have rows of their own each.
    own = 8 * -(-config.tile_m // (8 * config.cluster_k))
    stored = config.tile_m // own * -(-own // 16) + -(-(config.tile_m % own) // 16)
    assert found["STSM"] == stored * config.stack
    assert found["UTMASTG"] == 0


def loop_of(config: MarlinConfig) -> tuple[list[str], int, int]:
    """Return the mnemonics, and the main loop in them: the wait for a stage, and the end of the last product."""
    names = [step.mnemonic for step in instructions(config)]
    first, last = names.index("HGMMA"), len(names) - names[::-1].index("HGMMA")
    return names, max(index for index, name in enumerate(names[:first]) if name == "SYNCS"), last


@pytest.mark.slow
def test_what_two_forms_save_is_not_in_their_loops() -> None:
    """With zero points of whole columns, the loops have more instructions."""
    column = wgmma(group_size=-1, has_zeros=True, tile_m=64, tile_n=256, tile_k=256, warpgroups=2, stages=3)
    long = replace(column, tile_m=80, tile_k=128, stages=5, mmas_per_commit=1, commits_in_flight=3)
    saving = [config for config in WGMMA if saves_one(config)]
    assert saving
    for config in (*saving, column, replace(long, dtype="bfloat16")):
        names, wait, last = loop_of(config)
        saved = [index for index, name in enumerate(names) if name in ("STL", "LDL")]
        assert saved
        assert not any(wait <= index < last for index in saved), config.entry


@pytest.mark.slow
def test_one_multiply_add_shortens_the_main_loop() -> None:
    """Eight weights take nine instructions, or ten if they are shifted, instead of thirteen (fifteen for bf16)."""

    def length(config: MarlinConfig) -> int:
        names, wait, last = loop_of(config)
        return names.index("BRA", last) - wait

    # The loop's instructions depend neither on tile_m nor on tile_n; small tiles compile faster.
    tiles = (s for s in WGMMA if s.scale_form == "as_stored" and not s.is_bf16 and s.stack == s.slice_k == 1)
    plain = min(tiles, key=lambda s: s.tile_m)
    for config in (plain, replace(plain, dtype="bfloat16"), plain.in_form("shifted")):
        of_eight = 3 if config.scale_form == "shifted" else 6 if config.is_bf16 else 4
        saved = of_eight * config.stack * config.tile_k // 16 // config.slice_k
        assert length(config.in_form("none")) - length(config) > 0.6 * saved, config.entry


# ---- The skinny GEMM

SKINNY = [(name, config) for name in TARGETS for config in dump_configs("skinny", get_target(name))[::3]]
#: Activations in boxes of other dimensions than the choice takes.
OTHER_BOX = [
    (name, replace(config, deep_box=not config.deep_box, tile_m=max(8, config.tile_m)))
    for name, config in (SKINNY[0], SKINNY[-1])
]


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("target", "config"), SKINNY + OTHER_BOX, ids=ids)
def test_skinny(target: str, config: MarlinConfig) -> None:
    # Addresses of bf16's instance for M = 32 are kept in local memory on sm_90a, which leaves these to wgmma.
    is_rare = target == "sm_90a" and config.is_bf16 and config.tile_m == 32
    check_resources(config, target, local_bytes=16 if is_rare else 0)
    maps = 1 + (config.whole_rows > 0) + config.has_half_row + config.has_stage_scales + config.has_stage_zeros
    check_parameters(config, target, maps=maps, arrays=2 + (0 if config.has_stage_scales else 1 + config.has_zeros))


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("n", "group_size"), [(36864, 128), (46000, 64)])
def test_two_ctas_of_32_rows_keep_their_sums(n: int, group_size: int) -> None:
    """With slice_k > 1, ptxas would spill 250 bytes or more per thread."""
    found = cheapest_first(skinny_times, Problem(LinearShape(2048, n, group_size, False, "float16"), 32), H200)
    config = next(one for one, _ in found if one.version == "skinny" and one.ctas_per_sm == 2)
    assert config.tile_m == 32
    check_resources(config, "sm_90a", local_bytes=128)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("target", "config"), [SKINNY[0], SKINNY[-1], *OTHER_BOX], ids=ids)
def test_instructions_of_the_skinny_gemm(target: str, config: MarlinConfig) -> None:
    """TMA alone loads the operands: before the wait, for the first lap, and for all later laps."""
    found = counts(config, target)
    constants = (config.whole_rows > 0) + config.has_half_row + config.has_stage_scales + config.has_stage_zeros
    assert found["UTMALDG"] == 3 * constants + 2 * (1 if config.deep_box else config.tile_k // 64)
    k64_per_warp = config.tile_k // 64 // config.slice_k
    assert found["HMMA"] == k64_per_warp * 4 * 2 * max(8, config.tile_m) // 8
    assert found["LDSM"] == k64_per_warp * max(8, config.tile_m) // 4
    # One thread issues copies, which ptxas knows: no loop over the threads of a warp, which would vote, around any of
    # them.
    assert found["ELECT"] == 2
    assert found["LDGSTS"] == found["HGMMA"] == 0
