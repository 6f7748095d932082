"""MarlinConfig: rules, shared memory, bytes that barriers expect, registers and targets, for each of the kernels."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from operator import attrgetter
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from marlin_builders import mma_sync, skinny, wgmma

from cudatma.descriptor import (
    TensorMap,
    create_activation_tma_desc,
    create_scale_tma_desc,
    create_weight_tile_tma_desc,
    create_weight_tma_desc,
)
from cudatma.dtypes import activation_type
from cudatma.errors import ArgumentError, ArgumentTypeError, CudaTmaError, TargetError
from cudatma.kernels.cost import cheapest_first
from cudatma.kernels.gpu import imagined_gpu
from cudatma.kernels.marlin.arguments import dependent_smem_bytes
from cudatma.kernels.marlin.candidates import WGMMA_TILES, dump_configs, fitted, skinny_times, tile_rows
from cudatma.kernels.marlin.config import LOAD_PATHS, MarlinConfig
from cudatma.kernels.marlin.problem import LinearShape, Problem
from cudatma.layout import Swizzle
from cudatma.quantization import GROUP_SIZES
from cudatma.target import SMEM_RESERVED_BYTES, TARGETS, get_target

SM90A, SM120A = get_target("sm_90a"), get_target("sm_120a")
MMA_SYNC = mma_sync(tile_m=64, tile_n=128, tile_k=128, warps_n=4, stages=3)
WGMMA = wgmma(tile_m=64, tile_n=128, tile_k=128, warpgroups=2, stages=4)
TALL = wgmma(
    tile_m=256,
    tile_n=128,
    tile_k=64,
    warpgroups=2,
    stages=5,
    mmas_per_commit=1,
    commits_in_flight=3,
    consumer_registers=232,
)
SKINNY = skinny(tile_m=8, tile_n=96, tile_k=256, slice_k=2, stages=4)
WEIGHTS = {
    "dtype": st.sampled_from(("float16", "bfloat16")),
    "group_size": st.sampled_from(GROUP_SIZES),
    "has_zeros": st.booleans(),
}


def valid(build: Callable[..., MarlinConfig], fields: dict[str, Any]) -> MarlinConfig:
    """Return the config. If a rule forbids it, hypothesis draws another one."""
    try:
        return build(**fields)
    except ArgumentError:
        assume(False)
        raise


@st.composite
def mma_syncs(draw: st.DrawFn) -> MarlinConfig:
    choices = {
        "tile_m": (8, 16, 32, 48, 64, 128),
        "tile_n": (64, 128, 256),
        "tile_k": (64, 128, 256),
        "warps_n": (1, 2, 4, 8),
        "slice_k": (1, 2, 4),
        "stages": range(2, 17),
        **dict.fromkeys(("weight_load_path", "scale_load_path", "activation_load_path"), LOAD_PATHS),
        "scale_on": ("weight", "accumulator"),
    }
    fields = draw(st.fixed_dictionaries(WEIGHTS | {name: st.sampled_from(values) for name, values in choices.items()}))
    return valid(mma_sync, fields | ({"scale_on": "epilogue"} if fields["group_size"] == -1 else {}))


@st.composite
def wgmmas(draw: st.DrawFn) -> MarlinConfig:
    stack, warpgroups = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    commits = draw(st.sampled_from(((1, 3), (2, 1), (1, 1))))
    choices = {"tile_k": (64, 128, 256), "consumer_registers": (0, 0, 152, 232), "slice_k": (1, 2), "cluster_n": (1, 2)}
    fields = draw(st.fixed_dictionaries(WEIGHTS | {name: st.sampled_from(values) for name, values in choices.items()}))
    fields |= {"tile_m": 8 * draw(st.integers(1, 32 // stack)), "stages": draw(st.integers(2, 16))}
    fields |= {"tile_n": 64 * warpgroups * stack, "warpgroups": warpgroups}
    return valid(wgmma, fields | {"mmas_per_commit": commits[0], "commits_in_flight": commits[1]})


@st.composite
def skinnies(draw: st.DrawFn) -> MarlinConfig:
    choices = {"tile_m": (8, 16, 32), "tile_k": (128, 256, 512, 1024), "slice_k": (1, 2, 4, 8, 16)}
    fields = draw(st.fixed_dictionaries(WEIGHTS | {name: st.sampled_from(values) for name, values in choices.items()}))
    return valid(skinny, fields | {"tile_n": 32 * draw(st.integers(1, 8)), "stages": 2})


configs = st.one_of(mma_syncs(), wgmmas(), skinnies())


# ---- Rules


@pytest.mark.parametrize(
    ("base", "field", "values"),
    [
        (MMA_SYNC, "group_size", (96,)),
        (MMA_SYNC, "weight_load_path", ("plain",)),
        (MMA_SYNC, "activation_load_path", ("gather", "ldg")),
        (MMA_SYNC, "scale_on", ("epilogue",)),
        (MMA_SYNC, "tile_n", (96,)),
        (MMA_SYNC, "tile_k", (32,)),
        (MMA_SYNC, "consumer_registers", (240,)),
        (MMA_SYNC, "warps_n", (16,)),
        (MMA_SYNC, "slice_k", (8,)),
        (MMA_SYNC, "tile_m", (12, 0, 256, 40)),
        (MMA_SYNC, "stages", (1, 17)),
        (WGMMA, "group_size", (96,)),
        (WGMMA, "tile_k", (32,)),
        (WGMMA, "warpgroups", (0, 4)),
        (WGMMA, "slice_k", (3,)),
        (WGMMA, "tile_n", (96,)),
        (WGMMA, "cluster_n", (4,)),
        (WGMMA, "mmas_per_commit", (3,)),
        (WGMMA, "commits_in_flight", (0, 2)),
        (WGMMA, "consumer_registers", (236,)),
        (WGMMA, "scale_form", ("somehow", True)),
        (WGMMA, "tile_m", (12, 0, 264, 64.0)),
        (WGMMA, "stages", (1, 17)),
        (WGMMA, "cluster_k", (0, 9)),
        (SKINNY, "group_size", (16,)),
        (SKINNY, "tile_m", (24,)),
        (SKINNY, "tile_n", (0, 288)),
        (SKINNY, "tile_k", (64,)),
        (SKINNY, "slice_k", (3, 8)),
        (SKINNY, "stages", (1, 17, True)),
        (SKINNY, "ctas_per_sm", (3,)),
        (SKINNY, "deep_box", (1,)),
        (SKINNY, "cluster_k", (0, 9)),
        # Fields of the other kernels.
        (WGMMA, "version", ("wmma",)),
        (WGMMA, "deep_box", (True,)),
        (WGMMA, "ctas_per_sm", (2,)),
        (WGMMA, "warps_n", (4,)),
        (WGMMA, "scale_on", ("weight",)),
        (WGMMA, "scale_load_path", ("cp_async",)),
        (SKINNY, "warpgroups", (1,)),
        (SKINNY, "cluster_n", (2,)),
        (SKINNY, "consumer_registers", (232,)),
        (MMA_SYNC, "cluster_k", (2,)),
        (MMA_SYNC, "pingpong", (True,)),
        (MMA_SYNC, "scale_form", ("as_stored",)),
        (MMA_SYNC, "mmas_per_commit", (1,)),
    ],
    ids=lambda value: getattr(value, "version", str(value)),
)
def test_a_wrong_field_is_named(base: MarlinConfig, field: str, values: tuple[Any, ...]) -> None:
    for value in values:
        with pytest.raises((ArgumentError, ArgumentTypeError)) as caught:
            replace(base, **{field: value})
        assert field in caught.value.field
        if base.version != "skinny":
            assert caught.value.got == value


@pytest.mark.parametrize("base", [MMA_SYNC, WGMMA, SKINNY], ids=lambda base: base.version)
def test_an_unknown_dtype(base: MarlinConfig) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError)):
        replace(base, dtype="float32")


@pytest.mark.parametrize(
    ("base", "changes", "field", "why"),
    [
        (MMA_SYNC, {"tile_n": 256, "warps_n": 1}, "warps_n", ""),
        (MMA_SYNC, {"tile_n": 64, "warps_n": 8}, "warps_n", ""),
        (MMA_SYNC, {"tile_k": 64, "slice_k": 2}, "slice_k", ""),
        (MMA_SYNC, {"warps_n": 2, "consumer_registers": 232}, "consumer_registers", ""),
        (MMA_SYNC, {"tile_n": 256, "tile_k": 256, "warps_n": 8, "slice_k": 4}, "slice_k", ""),
        (MMA_SYNC, {"group_size": -1}, "scale_on", ""),
        (SKINNY, {"tile_n": 160, "slice_k": 4}, "", "at most 16 warps"),
        (SKINNY, {"tile_m": 4}, "", "deep_box"),  # a box of 64 elements of K has the mma's eight rows
        (SKINNY, {"tile_m": 1, "deep_box": True}, "", "at least 2 for tile_k = 256"),
        (WGMMA, {"tile_m": 24, "cluster_n": 2}, "tile_m", "swizzle"),
        (WGMMA, {"warpgroups": 3}, "tile_n", "192 or 384"),
        (WGMMA, {"warpgroups": 2, "slice_k": 2}, "warpgroups * slice_k", "at most 3"),
        (WGMMA, {"tile_k": 64, "slice_k": 2}, "slice_k", "64 elements"),
        (
            WGMMA,
            {"warpgroups": 1, "tile_n": 64, "slice_k": 2, "commits_in_flight": 3},
            "commits_in_flight",
            "a stage has 2 commit groups",
        ),
        (WGMMA, {"tile_m": 200, "tile_n": 256}, "tile_m", "accumulators"),
        (WGMMA, {"tile_m": 256}, "consumer_registers", "setmaxnreg"),
        (WGMMA, {"tile_m": 128, "tile_n": 256}, "consumer_registers", "setmaxnreg"),
        (
            WGMMA,
            {"consumer_registers": 240},
            "consumer_registers",
            "setmaxnreg.inc waits|wait forever|waits forever|lacks",
        ),
        (
            WGMMA,
            {"warpgroups": 3, "tile_n": 192, "consumer_registers": 160},
            "consumer_registers",
            "setmaxnreg.inc waits|wait forever|waits forever|lacks",
        ),
        (WGMMA, {"tile_m": 128, "consumer_registers": 64}, "consumer_registers", "setmaxnreg"),
        # The loop's body holds too few groups for ptxas to keep the fragments of those in flight apart.
        (WGMMA, {"tile_k": 64, "mmas_per_commit": 4}, "commits_in_flight", "a stage has 1 commit group"),
        (WGMMA, {"tile_k": 64, "mmas_per_commit": 2, "commits_in_flight": 3}, "commits_in_flight", "2 commit groups"),
        (WGMMA, {"tile_k": 128, "mmas_per_commit": 4, "commits_in_flight": 3}, "commits_in_flight", "increase tile_k"),
        (WGMMA, {"cluster_k": 2, "cluster_n": 2}, "cluster_k", "shares activations or splits K"),
    ],
    ids=lambda value: getattr(value, "version", str(value)),
)
def test_fields_that_do_not_go_together(base: MarlinConfig, changes: dict[str, Any], field: str, why: str) -> None:
    with pytest.raises(ArgumentError, match=why or None) as caught:
        replace(base, **changes)
    assert field in caught.value.field


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        (
            MMA_SYNC,
            [
                {"dtype": "bfloat16"},
                {"group_size": 64},
                {"has_zeros": True},
                {"tile_m": 32},
                {"stages": 4},
                {"weight_load_path": "cp_async"},
                {"scale_load_path": "cp_async"},
                {"activation_load_path": "cp_async"},
                {"warps_n": 8, "consumer_registers": 232},
                {"warps_n": 8},
            ],
        ),
        (
            WGMMA,
            [
                {"dtype": "bfloat16"},
                {"group_size": 64},
                {"group_size": -1},
                {"has_zeros": True},
                {"tile_m": 32},
                {"tile_k": 256},
                {"stages": 5},
                {"tile_n": 256},
                {"warpgroups": 3, "tile_n": 192},
                {"warpgroups": 1, "tile_n": 64, "slice_k": 2},
                {"cluster_n": 2},
                {"mmas_per_commit": 1},
                {"commits_in_flight": 3},
                {"consumer_registers": 232},
                {"cluster_k": 2},
                {"cluster_k": 3},
            ],
        ),
        (SKINNY, [{"deep_box": True}, *({"cluster_k": ctas} for ctas in range(2, 9))]),
    ],
    ids=lambda value: getattr(value, "version", ""),
)
def test_entries_tell_operands_and_tiles_apart(base: MarlinConfig, changes: list[dict[str, Any]]) -> None:
    entries = [base.entry, *(replace(base, **change).entry for change in changes)]
    assert len(set(entries)) == len(entries)


@given(configs)
def test_the_entry_is_a_c_identifier(config: MarlinConfig) -> None:
    assert config.entry.isidentifier()
    assert config.entry.isascii()


# ---- Shared memory and barriers


@given(configs)
def test_shared_memory_has_no_overlap_and_slots_are_aligned(config: MarlinConfig) -> None:
    """PTX ISA, cp.async.bulk.tensor: a destination is aligned to 128 bytes, with the 128-byte swizzle to 1024; 16 for
    vector accesses and stmatrix, 8 for mbarriers."""
    layout = config.smem_layout()
    offsets = {name: offset for name, offset, _ in layout}
    assert len(offsets) == len(layout)
    for (_, offset, size), (_, following, _) in pairwise(layout):
        assert offset + size <= following
    assert layout[0][1] == 0
    assert config.smem_bytes == max(offset + size for _, offset, size in layout)
    boxes = config.tile_k // 64 * config.cluster
    for stage in range(config.stages):
        activations = offsets["activations"] + stage * config.activation_stage_bytes
        assert all((activations + box * config.tile_m * 128 // config.cluster) % 1024 == 0 for box in range(boxes))
        assert (offsets["weights"] + stage * config.weight_stage_bytes) % 128 == 0
        assert (offsets.get("scales", 0) + stage * config.scale_stage_bytes) % 128 == 0
        assert (offsets.get("zeros", 0) + stage * config.zero_slot_bytes) % 128 == 0
    assert config.zero_slot_bytes >= config.zero_stage_bytes
    assert (offsets.get("slice_sums", 0) | offsets.get("cluster_sums", 0)) % 16 == 0
    assert (offsets["full_barriers"] | offsets["empty_barriers"]) % 8 == 0
    if config.version != "skinny":
        assert (offsets["staging"] | config.staging_bytes | config.staging_pitch_bytes) % 16 == 0


def boxes_of(config: MarlinConfig) -> list[TensorMap]:
    """Return the boxes that TMA loads for a stage."""
    options: dict[str, Any] = {"encoder": "codec", "target": SM90A}
    kind, k64 = activation_type(config.dtype).numpy, config.tile_k // 64
    qweight, boxes = np.zeros((16 * 16, 2048), np.uint8), []
    if config.version == "skinny":
        if config.whole_rows:
            boxes.append(create_weight_tile_tma_desc(qweight, 16, k64, config.whole_rows, **options))
        if config.has_half_row:
            boxes.append(create_weight_tile_tma_desc(qweight, 16, k64, 1, half_rows=True, **options))
    elif config.version == "wgmma":
        boxes.append(create_weight_tile_tma_desc(qweight, 16, k64, config.tile_n // 64, **options))
    elif config.weight_load_path == "tma":
        boxes += [create_weight_tma_desc(qweight, k64, **options)] * (config.tile_n // 64)
    if config.scale_load_path != "cp_async":
        dtypes = [kind] * config.has_stage_scales + [np.uint8] * config.has_stage_zeros
        width = config.scale_row if config.version == "skinny" else config.tile_n
        options_of = options | {"whole_column": False}
        groups = config.groups_per_stage
        boxes += [create_scale_tma_desc(np.zeros((32, 512), dtype), width, groups, **options_of) for dtype in dtypes]
    if config.activation_load_path != "cp_async":
        rows = config.loaded_m if config.version == "wgmma" else config.tile_m
        box = create_activation_tma_desc(np.zeros((256, 1024), kind), rows, **options)
        assert box.spec.swizzle == Swizzle.B128
        assert box.footprint_bytes == box.expected_bytes == rows * 128
        boxes += [box] * (k64 * config.cluster)
    return boxes


@given(configs)
def test_a_stage_expects_what_its_boxes_deliver(config: MarlinConfig) -> None:
    assert config.transaction_bytes == sum(box.expected_bytes for box in boxes_of(config))
    assert config.transaction_bytes < 1 << 20, "mbarrier's tx-count is limited to 2^20 - 1"
    if config.version == "skinny":
        x, k64 = np.zeros((256, 1024), activation_type(config.dtype).numpy), config.tile_k // 64
        deep = create_activation_tma_desc(x, config.tile_m, blocks=k64, target=SM90A, encoder="codec")
        assert deep.expected_bytes == config.activation_stage_bytes
        assert replace(config, deep_box=True).transaction_bytes == config.transaction_bytes


@given(mma_syncs())
def test_a_stages_bytes_are_the_parts_of_its_slot(config: MarlinConfig) -> None:
    parts = (
        config.weight_stage_bytes,
        config.activation_stage_bytes,
        config.scale_stage_bytes,
        config.zero_stage_bytes,
    )
    assert sum(size for _, size in config.stage_layout()) == sum(parts)
    if config.all_tma:
        assert config.transaction_bytes == sum(parts)
    assert parts[0] == config.tile_n * config.tile_k * 4 // 8
    assert parts[1] == config.tile_m * config.tile_k * 16 // 8


@given(mma_syncs())
def test_arrivals_and_threads(config: MarlinConfig) -> None:
    """A stage expects one arrival for all loads of TMA, or one per producer thread if cp.async loads."""
    scales = {config.scale_load_path} if config.group_size != -1 else set()
    stage = {config.weight_load_path, config.activation_load_path} | scales
    by_hand = "cp_async" in stage
    producers = 32 if config.all_tma else 128
    assert config.full_arrivals == ("tma" in stage) + by_hand * producers
    assert config.full_arrivals >= 1
    assert config.threads == 32 * config.warps_n * config.slice_k + producers <= 1024


# ---- wgmma


def test_a_workspace_holds_the_sums_of_a_tile() -> None:
    tall: dict[str, Any] = {"mmas_per_commit": 1, "commits_in_flight": 3, "consumer_registers": 152, "stages": 2}
    with pytest.raises(ArgumentError, match="at most 168") as caught:
        wgmma(tile_m=176, tile_k=64, warpgroups=3, **tall)
    assert caught.value.field == "tile_m"
    assert wgmma(tile_m=176, tile_k=64, warpgroups=3, cluster_k=2, **tall).partial_bytes == 0


@given(wgmmas())
def test_the_registers_that_setmaxnreg_assigns_exist(config: MarlinConfig) -> None:
    """PTX ISA, setmaxnreg: inc waits until the CTA's register pool has them."""
    launched = min(255, 65536 // config.threads) // 8 * 8 * config.threads
    if config.consumer_registers:
        assert config.producer_warps == 4
        taken = 128 * config.producer_registers + 32 * config.consumer_warps * config.consumer_registers
        assert taken <= max(launched, 65536 // config.threads // 8 * 8 * config.threads)
    assert config.threads <= 1024


@given(wgmmas())
def test_the_released_slot_is_read_by_no_wgmma(config: MarlinConfig) -> None:
    """A model of the loop: groups are committed in order, and all but the last
    commits_in_flight are complete after a wait."""
    committed: list[int] = []
    for stage in range(3):
        for k64 in range(config.k64_per_warpgroup):
            committed += [stage] * (4 // config.mmas_per_commit)
            running = committed[len(committed) - config.commits_in_flight :]
            if k64 == config.release_k64:
                assert stage - 1 not in running
                break
        else:
            pytest.fail("the slot is never released")
        committed += [stage] * (4 // config.mmas_per_commit) * (config.k64_per_warpgroup - 1 - config.release_k64)


@given(wgmmas())
def test_the_staging_rows_hold_a_chunk_and_chunks_make_up_a_tile(config: MarlinConfig) -> None:
    """The number of rows is a multiple of 16 or of a smaller tile_m, and the rows of all warpgroups take at most 20
    KB."""
    assert config.staging_rows % min(16, config.tile_m) == 0
    assert config.staging_bytes == config.staging_rows * (64 * 2 * config.stack + 16)
    most = 20480 if config.tile_m <= 128 else 10240
    assert config.staging_rows <= 16 or config.warpgroups * config.staging_bytes <= most
    assert min(config.tile_m, 16) <= config.staging_rows <= config.tile_m


@given(st.integers(1, 20), st.integers(1, 3), st.integers(2, 8))
def test_the_ctas_of_a_cluster_own_all_rows_and_hold_the_sums_of_each_other(
    eights: int, warpgroups: int, cluster_k: int
) -> None:
    of = wgmma(
        tile_m=8 * eights,
        tile_n=64 * warpgroups,
        tile_k=64,
        warpgroups=warpgroups,
        stages=2,
        cluster_k=cluster_k,
    )
    owned = [range(8 * eights)[rank * of.own_rows : (rank + 1) * of.own_rows] for rank in range(cluster_k)]
    assert sum(map(len, owned)) == of.tile_m
    # Whole fragments, as even as they can be; from every other CTA fp32 sums of each element.
    assert len(owned[0]) % 8 == 0
    assert len(owned[0]) < of.tile_m / cluster_k + 8
    layout = {name: size for name, _, size in of.smem_layout()}
    assert layout["cluster_sums"] == (cluster_k - 1) * len(owned[0]) * 64 * warpgroups * 4
    assert (layout["cluster_barrier"], of.partial_bytes) == (8, 0)
    assert of.launch_cluster == cluster_k


def test_chunks_of_staging_rows() -> None:
    """As many rows as the limit allows: a row of 64 columns takes 144 bytes, one of 128 takes 272."""
    tiles = ((8, 1, 1), (24, 1, 1), (40, 1, 2), (64, 1, 2), (88, 2, 1), (96, 2, 2), (64, 3, 1))
    found = [
        wgmma(tile_m=m, tile_n=64 * groups * stack, tile_k=64, warpgroups=groups, stages=2).staging_rows
        for m, groups, stack in tiles
    ]
    assert found == [8, 16, 32, 64, 64, 32, 32]
    assert TALL.staging_rows == 32
    assert replace(TALL, warpgroups=3, tile_n=192, consumer_registers=152, tile_m=160).staging_rows == 16


# ---- The skinny GEMM


BASE: dict[str, Any] = {"tile_m": 8, "tile_n": 96, "tile_k": 256, "slice_k": 2, "stages": 4}


@pytest.mark.parametrize(
    ("m", "tile_k", "wanted"),
    [
        (1, 1024, 1), (1, 256, 2), (1, 128, 4), (2, 512, 2), (3, 512, 4),
        (4, 128, 4), (5, 1024, 8), (9, 512, 16), (17, 512, 32),
    ],
)  # fmt: skip
def test_tiles_for_small_m(m: int, tile_k: int, wanted: int) -> None:
    """The tile size is a power of two. Each stage consists of whole periods of the swizzle, which are eight rows of 64
    elements."""
    layer = LinearShape(4096, 4096, 128, False, "float16")
    assert tile_rows(layer, m, tile_k) == wanted
    assert tile_rows(replace(layer, k=4100), m, tile_k) == max(8, wanted)  # no deep box: K has a part of a block
    of = skinny(**{**BASE, "tile_k": tile_k, "tile_m": wanted, "deep_box": True})
    assert of.activation_stage_bytes == wanted * tile_k * 2
    assert of.activation_stage_bytes % 1024 == 0
    assert of.epilogue_parts() == replace(of, tile_m=max(8, wanted)).epilogue_parts()


@pytest.mark.parametrize(
    ("n_tiles", "tile_m", "cluster_k", "size"),
    [
        # Owned N tiles x other CTAs x fragments (two of an N tile, for each 8 rows) x 512 bytes.
        (1, 8, 4, 1 * 3 * 2 * 512),
        (3, 8, 2, 2 * 1 * 2 * 512),  # three N tiles for two CTAs: two and one
        (3, 16, 8, 1 * 7 * 4 * 512),  # some CTAs have none
        (7, 8, 3, 3 * 2 * 2 * 512),
        (8, 32, 2, 4 * 1 * 8 * 512),
        (8, 32, 1, 0),
    ],
)
def test_sums_of_a_cluster_by_hand(n_tiles: int, tile_m: int, cluster_k: int, size: int) -> None:
    fields = {**BASE, "tile_n": 32 * n_tiles, "tile_m": tile_m, "slice_k": 1}
    of = skinny(cluster_k=cluster_k, **fields)
    layout = {name: held for name, _, held in of.smem_layout()}
    assert layout["cluster_sums"] == size
    assert layout["cluster_barrier"] == (8 if cluster_k > 1 else 0)
    assert of.smem_bytes == replace(of, cluster_k=1).smem_bytes + size + layout["cluster_barrier"]


@given(
    n_tiles=st.integers(1, 8), tile_m=st.sampled_from((8, 16, 32)), cluster_k=st.integers(1, 8),
    group_size=st.sampled_from((128, -1)),
)  # fmt: skip
def test_each_n_tile_has_one_owner_with_memory_for_all_sums(
    n_tiles: int, tile_m: int, cluster_k: int, group_size: int
) -> None:
    """The CTAs of a cluster own N tiles in turn; each receives the sums of all other CTAs for its own."""
    fields = {**BASE, "tile_n": 32 * n_tiles, "tile_m": tile_m, "slice_k": 1}
    of = skinny(cluster_k=cluster_k, **{**fields, "group_size": group_size})
    owned = [[n_tile for n_tile in range(n_tiles) if n_tile % cluster_k == rank] for rank in range(cluster_k)]
    assert sorted(n_tile for mine in owned for n_tile in mine) == list(range(n_tiles))
    assert of.column_bytes == 32 * tile_m * 4
    most = max(map(len, owned)) * (cluster_k - 1) * of.column_bytes
    assert {name: size for name, _, size in of.smem_layout()}["cluster_sums"] == most


def test_clusters_need_a_target_that_has_them() -> None:
    narrow = skinny(cluster_k=2, **{**BASE, "tile_n": 32})
    narrow.check_target(SM90A)
    with pytest.raises(TargetError, match="with cluster"):
        narrow.check_target(SM120A)
    replace(narrow, cluster_k=1).check_target(SM120A)


@pytest.mark.parametrize("name", ["sm_90a", "sm_120a"])
def test_no_more_dependent_ctas_on_an_sm_than_ctas_per_sm(name: str) -> None:
    """If one SM held more than ctas_per_sm CTAs of two launches, another SM would have none."""
    target = get_target(name)
    for layer in (LinearShape(4096, 4096, 128, False, "float16"), LinearShape(8192, 57344, 128, False, "float16")):
        for chosen, _ in cheapest_first(skinny_times, Problem(layer, 1), imagined_gpu(target, 132)):
            config = replace(chosen, stages=2)
            asked = dependent_smem_bytes(config, target)
            assert config.smem_bytes <= asked <= target.smem_per_block_bytes
            assert target.smem_per_sm_bytes // (asked + SMEM_RESERVED_BYTES) == config.ctas_per_sm


# ---- Targets


def test_check_target() -> None:
    big = replace(MMA_SYNC, stages=8)
    assert 99 * 1024 < big.smem_bytes <= 227 * 1024
    wide = replace(SKINNY, tile_n=224, stages=6)
    for config in (big, wide, WGMMA):
        config.check_target(SM90A)
    for config, target in ((big, SM120A), (wide, SM120A), (replace(TALL, stages=7), SM90A)):
        with pytest.raises(ArgumentError, match="reduce stages"):
            config.check_target(target)
    for name in ("sm_90", "sm_100a", "sm_120a"):
        with pytest.raises(TargetError, match="wgmma"):
            WGMMA.check_target(get_target(name))
    with pytest.raises(TargetError, match="setmaxnreg"):
        replace(MMA_SYNC, warps_n=8, consumer_registers=232).check_target(get_target("sm_90"))
    with pytest.raises(TargetError):
        SKINNY.check_target(replace(SM90A, features=SM90A.features - {"tma"}))


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_every_target_takes_a_small_config_or_says_why(name: str) -> None:
    target = TARGETS[name]
    if all(target.has(f) for f in ("tma", "shared_cta_destination", "mma_sync", "stmatrix", "griddepcontrol")):
        MMA_SYNC.check_target(target)
    else:
        with pytest.raises(CudaTmaError):
            MMA_SYNC.check_target(target)


@pytest.mark.parametrize("name", TARGETS)
def test_dump_configs(name: str) -> None:
    target = get_target(name)
    configs = dump_configs("skinny", target)
    assert bool(configs) == (target.has("tma") and target.has("mma_sync"))
    for config in configs:
        config.check_target(target)
    assert len({config.entry for config in configs}) == len(configs)


def test_every_tile_has_three_stages_unless_scales_take_their_memory() -> None:
    """A ring of two loads nothing while a stage is computed. Three tiles have stages of 64 and 72 KB: with small groups
    shared memory does not hold the scales and zero points of a third stage."""
    shorter = set()
    for tile in WGMMA_TILES:
        for group_size, has_zeros in itertools.product(GROUP_SIZES, (False, True)):
            layer = LinearShape(8192, 28672, group_size, has_zeros, "float16")
            for size in (tile.min_m, tile.max_m):
                made = fitted(tile.config(layer, size), SM90A)
                assert made.stages <= tile.stages
                if made.stages < 3:
                    shorter.add((size, made.tile_n, made.tile_k, group_size, has_zeros))
                    assert replace(made, stages=3).smem_bytes > SM90A.smem_per_block_bytes
    assert shorter == {
        (64, 256, 256, 32, True), (256, 128, 128, 32, False), (256, 128, 128, 32, True), (256, 128, 128, 64, True),
        (128, 64, 256, 32, False), (128, 64, 256, 32, True), (128, 64, 256, 64, True),
    }  # fmt: skip


def test_dumped_configs_hold_every_tile_of_the_list() -> None:
    """Each tile is dumped with its largest tile_m, and with 40 or, if that is larger, its smallest tile_m."""
    dumped = dump_configs("wgmma", SM90A)
    assert len({config.entry for config in dumped}) == len(dumped)
    fields = attrgetter(
        "tile_n", "tile_k", "cluster_n", "warpgroups", "slice_k", "mmas_per_commit", "commits_in_flight"
    )
    found = {(config.tile_m, *fields(config)) for config in dumped}
    layer = LinearShape(8192, 28672, 128, False, "float16")
    wanted = {
        (size, *fields(tile.config(layer, size))) for tile in WGMMA_TILES for size in (max(40, tile.min_m), tile.max_m)
    }
    assert wanted <= found
    assert {shape[1:] for shape in found} == {shape[1:] for shape in wanted}, "no tile that is not in the list"
    assert {config.cluster_k for config in dumped} > {1}
    assert {config.group_size for config in dumped} >= set(GROUP_SIZES)
    assert {(config.dtype, config.has_zeros) for config in dumped} >= {("bfloat16", True), ("float16", True)}
    assert dump_configs("wgmma", get_target("sm_120a")) == []
