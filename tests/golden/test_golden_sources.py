"""The rendered source of each kernel template, for review, and the golden fixture itself.

Configurations are written out, so that golden files do not depend on the choice of a configuration. The options are
distributed over the kernels of a family. A kernel's golden file lists the names of its primitives, whose code is in
primitives.cu, so that a changed primitive changes one file.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from gemm_builders import config as gemm
from marlin_builders import mma_sync, skinny, wgmma

from cudatma.build.render import render
from cudatma.kernels.all_reduce.config import AllReduceConfig
from cudatma.kernels.attention.sample import small_config
from cudatma.kernels.data_movement.broadcast import BroadcastConfig
from cudatma.kernels.data_movement.configs import PlainConfig, RunConfig, WindowConfig
from cudatma.kernels.data_movement.gather import GatherConfig
from cudatma.kernels.data_movement.im2col import Im2colCopyConfig
from cudatma.kernels.data_movement.prefetch import PrefetchConfig
from cudatma.kernels.data_movement.ragged_copy import RaggedCopyConfig
from cudatma.kernels.data_movement.rows import RowsConfig
from cudatma.kernels.data_movement.tile_copy import TileCopyConfig
from cudatma.kernels.data_movement.transpose import TransposeConfig
from cudatma.kernels.experts.config import ExpertsConfig, RouteConfig, SumConfig
from cudatma.kernels.marlin.dequantize import DequantizeConfig
from cudatma.kernels.marlin.permute_columns import PermuteColumnsConfig
from cudatma.kernels.registry import REGISTRY

Golden = Callable[[str, str], None]
FILES = Path(__file__).parent / "files"
SLOT = 16384
GEMM: dict[str, Any] = {"tile_m": 128, "tile_n": 256, "stages": 3, "warpgroups": 2}
BLOCK_SCALES: dict[str, Any] = {"dtype": "float8_e4m3fn", "block_scales": True, "scales_by_tma": True}


def attention(version: str, **fields: Any) -> Any:
    return small_config(version, dtype="bfloat16", **fields)


#: Name of the kernel -> its configuration.
CONFIGS: dict[str, Any] = {
    "all_reduce": AllReduceConfig(2, "float16"),
    "attention_scalar": attention("scalar", is_causal=True),
    "attention_a1": attention("a1"),
    "attention_a2": attention("a2", has_softcap=True),
    "attention_a3": attention("a3", is_causal=True, has_window=True, is_varlen=True),
    "attention_a4": attention("a4", is_causal=True),
    "attention_mma_sync": attention("mma_sync", is_causal=True),
    "attention_decode": attention("decode", has_sink=True, is_paged=True, box_rows=16),
    "window_copy": WindowConfig("copy", 2, SLOT, 6, 3, "evict_first", "evict_first"),
    "run_copy": RunConfig("copy", "b8", SLOT, 6, 3),
    "plain_copy": PlainConfig(4, 3, 32),
    "transpose": TransposeConfig(1, 1, 1, 3, 2),
    "gather_boxes": GatherConfig(3, "table", SLOT, 6, 3),
    "im2col": Im2colCopyConfig(4, SLOT, 6, 3),
    "broadcast": BroadcastConfig(4, SLOT, 6, 3),
    "prefetch": PrefetchConfig(2),
    "rows": RowsConfig("gather", SLOT, 6, 3),
    "ragged_copy": RaggedCopyConfig(2),
    "tile_copy": TileCopyConfig(4, box_rows=32, stages=3),
    "gemm_v1": gemm("v1", **GEMM | {"layout": "RR"}),
    "gemm_v2": gemm("v2", **GEMM | {"layout": "CR"}),
    "gemm_v3": gemm("v3", **GEMM | {"layout": "CC"}),
    "gemm_v4": gemm("v4", **GEMM),
    "gemm_v5": gemm("v5", **GEMM | BLOCK_SCALES | {"tile_m": 256, "tile_n": 128}),
    "gemm_v6": gemm("v6", **GEMM | {"layout": "CR"}),
    "gemm_v7": gemm("v7", **GEMM | {"layout": "CC", "tile_n": 128, "stages": 4, "warpgroups": 1}),
    "gemm_mma_sync": gemm("mma_sync", **GEMM | {"layout": "CC", "stages": 4}),
    # M of 8, weights streamed by TMA, groups scaled in the accumulators, slice-K.
    "marlin_mma_sync": mma_sync(
        has_zeros=True, tile_m=8, tile_n=128, tile_k=256, warps_n=4, slice_k=2, stages=4, scale_on="accumulator"
    ),
    # A cluster that divides K, groups that end within 64 of K, half a row of weights.
    "marlin_skinny": skinny(
        dtype="bfloat16",
        group_size=64,
        has_zeros=True,
        cluster_k=2,
        tile_m=16,
        tile_n=96,
        tile_k=256,
        slice_k=2,
        stages=3,
    ),
    # Two warpgroups in turn, a cluster, scale and offset in one multiply-add.
    "marlin_wgmma": wgmma(
        tile_m=128,
        tile_n=128,
        tile_k=128,
        warpgroups=1,
        stages=4,
        cluster_n=2,
        mmas_per_commit=1,
        commits_in_flight=3,
        consumer_registers=232,
        scale_form="as_stored",
        pingpong=True,
    ),
    # The first product with slices of K and zero points.
    "experts_skinny_up": ExpertsConfig(
        version="skinny",
        product="up",
        dtype="bfloat16",
        group_size=64,
        has_zeros=True,
        tile_m=8,
        tile_n=128,
        tile_k=256,
        slice_k=2,
        stages=4,
        deep_box=True,
    ),
    "experts_wgmma_down": ExpertsConfig(
        version="wgmma",
        product="down",
        dtype="float16",
        group_size=128,
        has_zeros=False,
        tile_m=64,
        tile_n=256,
        tile_k=128,
        stages=6,
        warpgroups=2,
        mmas_per_commit=2,
        commits_in_flight=1,
        consumer_registers=232,
    ),
    "experts_route": RouteConfig(8),
    "experts_sum": SumConfig("bfloat16"),
    "permute_columns": PermuteColumnsConfig(True, 8192, rows=2),
    "dequantize": DequantizeConfig("bfloat16", 32, True, True),
}


#: The primitives at the beginning of a source; what separates them; and the names that they declare.
LIBRARY = re.compile(r"\nnamespace cudatma \{\n\n(.*?)\n+\}  // namespace cudatma\n", re.DOTALL)
BETWEEN = re.compile(r"\n\n+(?=\S)")
DECLARED = re.compile(
    r"^(?:__device__ __forceinline__ [^(\n]*?(\w+)\(|typedef [\w ]*?(\w+);|struct (?:alignas\(\d+\) )?(\w+))",
    re.MULTILINE,
)


def declared(code: str) -> str:
    return ", ".join("".join(names) for names in DECLARED.findall(code))


@cache
def parts(name: str) -> tuple[list[str], str]:
    """Return the primitives of a kernel, and its source with their names instead of their code."""
    target = "sm_100a" if name == "rows" else "sm_120a" if "attention_mma" in name or "gemm_mma" in name else "sm_90a"
    text = render(REGISTRY[name].template, CONFIGS[name], target)
    library = LIBRARY.search(text)
    assert library is not None
    primitives = BETWEEN.split(library[1])
    names = textwrap.fill(", ".join(map(declared, primitives)), 116, initial_indent="// ", subsequent_indent="// ")
    return primitives, f"{text[: library.start()]}\n// primitives.cu contains\n{names}\n{text[library.end() :]}"


@pytest.mark.parametrize("name", CONFIGS)
def test_the_source(golden: Golden, name: str) -> None:
    golden(f"{name}.cu", parts(name)[1])


def test_the_primitives(golden: Golden) -> None:
    """Each primitive appears once, or once for each of its forms, with the names of the kernels that have the form."""
    forms: dict[str, dict[str, list[str]]] = {}
    for name in CONFIGS:
        for code in parts(name)[0]:
            assert declared(code), code
            forms.setdefault(declared(code), {}).setdefault(code, []).append(name)
    texts = (
        code
        if len(of) == 1
        else textwrap.fill(", ".join(kernels), 116, initial_indent="// Used in ", subsequent_indent="// ") + f"\n{code}"
        for of in forms.values()
        for code, kernels in of.items()
    )
    golden("primitives.cu", "\n\n".join(texts) + "\n")


def test_every_template_has_a_golden() -> None:
    assert {REGISTRY[name].template for name in CONFIGS} == {entry.template for entry in REGISTRY.values()}


def test_a_changed_text_fails(golden: Golden, pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--update-golden"):
        pytest.skip("this run writes the files")
    text = (FILES / "tile_copy.cu").read_text()
    with pytest.raises(pytest.fail.Exception, match="-using namespace cudatma;"):
        golden("tile_copy.cu", text.replace("using namespace cudatma;\n", ""))
    with pytest.raises(pytest.fail.Exception, match="no golden file"):
        golden("none.cu", "")
