"""The Marlin kernel compiled for each architecture: spills, shared memory, instructions that it has and that it lacks.

Artifacts come from the cache where they are known: a second run compiles nothing.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from itertools import product

import pytest
from marlin_builders import BY_CP_ASYNC

from cudatma.build.kernel import load_kernel
from cudatma.errors import DriverError
from cudatma.kernels.gpu import imagined_gpu
from cudatma.kernels.launch_struct import size_bytes
from cudatma.kernels.marlin.candidates import choose_mma_sync, dump_configs
from cudatma.kernels.marlin.config import LOAD_PATHS, MarlinConfig
from cudatma.kernels.marlin.problem import LinearShape, Problem
from cudatma.runtime.launch import Kernel
from cudatma.target import get_target
from tools.sass import disassemble, find_program, parse_ptxas, parse_sass, uses_cluster

TARGETS = ("sm_90a", "sm_120a")
SM120 = ("sm_120a",)
REPRESENTATIVE = [(name, config) for name in TARGETS for config in dump_configs("mma_sync", get_target(name))[::2]]
#: Local memory of a thread, spills included.
MOST_LOCAL_BYTES = 96
TENSOR_MAP_BYTES = 128


def ids(value: object) -> str:
    return value.entry if isinstance(value, MarlinConfig) else str(value)


def compiled(config: MarlinConfig, target: str) -> Kernel:
    try:
        return load_kernel(config.template, config, target)
    except DriverError as error:
        pytest.skip(f"no NVRTC: {error}")


@lru_cache(maxsize=64)
def opcodes(config: MarlinConfig, target: str) -> tuple[Counter[str], tuple[str, ...]]:
    """How often each mnemonic occurs, and the opcodes that only a cluster has; skips without a disassembler."""
    if find_program("nvdisasm") is None:
        pytest.skip("no disassembler here: the SASS was not looked at")
    folder = compiled(config, target).folder
    assert folder is not None
    found = disassemble(folder / "kernel.cubin")
    if found.text is None:
        pytest.skip(found.note)
    instructions = parse_sass(found.text)
    return Counter(i.mnemonic for i in instructions), tuple(uses_cluster(instructions))


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("name", "config"), REPRESENTATIVE, ids=ids)
def test_resources(name: str, config: MarlinConfig) -> None:
    kernel, target = compiled(config, name), get_target(name)
    assert kernel.warnings == ()
    used = parse_ptxas(kernel.log)[config.entry]
    print(f"{config.entry} {name}: {used.registers} registers, {used.stack_bytes} local bytes")
    assert used.stack_bytes <= MOST_LOCAL_BYTES, f"{used.stack_bytes} local bytes"
    assert used.registers * config.threads * config.ctas_per_sm <= 65536, (
        "fewer blocks would be resident than asked for"
    )
    assert used.static_smem_bytes == 0, "the offsets in shared memory begin at the dynamic part"
    assert config.smem_bytes <= min(99 * 1024, target.smem_per_block_bytes)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("name", "config"), REPRESENTATIVE, ids=ids)
def test_parameters(name: str, config: MarlinConfig) -> None:
    """A map for each operand that TMA loads, a pointer for each other one, four more, the problem."""
    sizes = [parameter.size_bytes for parameter in compiled(config, name).parameters]
    tables = 1 + config.has_zeros if config.group_size != -1 and config.scale_load_path == "tma" else 0
    maps = (config.weight_load_path == "tma") + tables + (config.activation_load_path == "tma")
    by_threads = (1 + config.has_zeros) * (config.group_size == -1 or config.scale_load_path != "tma")
    arrays = (config.weight_load_path != "tma") + by_threads + (config.activation_load_path != "tma") + 4
    assert sizes == [TENSOR_MAP_BYTES] * maps + [8] * arrays + [size_bytes(config.problem_members)]


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("name", "config"), [case for case in REPRESENTATIVE if case[0] in SM120], ids=ids)
def test_sm120_code(name: str, config: MarlinConfig) -> None:
    mnemonics, cluster = opcodes(config, name)
    assert cluster == ()
    assert mnemonics["HMMA"] > 0
    assert (mnemonics["UTMALDG"] > 0) == config.uses_tma
    assert (mnemonics["LDGSTS"] > 0) == config.uses_cp_async
    assert not [m for m in mnemonics if m.startswith(("HGMMA", "UTCHMMA", "UTCQMMA"))]
    ptx = compiled(config, name).ptx
    assert "shared::cluster" not in ptx
    assert "multicast" not in ptx


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", TARGETS)
def test_tma_takes_the_place_of_loads(name: str) -> None:
    """With TMA alone no thread computes addresses of, or copies, what is multiplied."""
    layer, gpu = LinearShape(8192, 28672, 128, True, "float16"), imagined_gpu(name, 132)
    both = [
        choose_mma_sync(Problem(layer, 16), gpu, **dict.fromkeys(BY_CP_ASYNC, load_path)) for load_path in LOAD_PATHS
    ]
    (tma, _), (by_hand, _) = (opcodes(config, name) for config in both)
    assert tma["LDGSTS"] == by_hand["UTMALDG"] == 0
    # A box for each 64 of N, scales and zero points, both before griddepcontrol.wait and after it; one for each 64 of
    # K of the activations.
    constants = both[0].tile_n // 64 + 2
    assert tma["UTMALDG"] == 2 * constants + both[0].tile_k // 64
    assert by_hand["LDGSTS"] > 0


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("weight", "scale", "activation", "group_size", "has_zeros"),
    [
        (*load_paths, group_size, zeros)
        for load_paths, (group_size, zeros) in zip(
            product(LOAD_PATHS, LOAD_PATHS, LOAD_PATHS),
            2 * [(-1, True), (32, True), (-1, False), (64, False)],
            strict=True,
        )
    ],
)
def test_every_mixture_of_load_paths(
    weight: str, scale: str, activation: str, group_size: int, has_zeros: bool
) -> None:
    layer = LinearShape(4096, 4096, group_size, has_zeros, "bfloat16")
    paths = dict(zip(BY_CP_ASYNC, (weight, scale, activation), strict=True))
    config = choose_mma_sync(Problem(layer, 64), imagined_gpu("sm_120a", 132), **paths)
    assert compiled(config, "sm_120a").warnings == ()
