"""Every primitive compiles for every target, and its PTX and SASS contain the instruction that its name promises."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from itertools import product
from pathlib import Path
from types import ModuleType

import pytest

from cudatma.build.nvrtc import Compiled, compile_source
from cudatma.build.render import render
from cudatma.errors import DriverError
from cudatma.target import TARGETS, get_target
from cudatma.tools.export_header import export_header

COMPILED_TARGETS = ("sm_90a", "sm_100a", "sm_120a", "sm_121a")
RANKS = (1, 2, 3, 4, 5)
OPS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")
COMPLETE = "mbarrier::complete_tx::bytes"
FUNCTION = re.compile(r"^__device__ __forceinline__ \w+ (\w+)\(", re.MULTILINE)
#: Functions that are C++ around other primitives, or no asm at all.
NOT_AN_INSTRUCTION = {"shared_address", "mbarrier_wait_parity", "mbarrier_wait_parity_hint", "matrix_descriptor"}


def expected_instructions(target: str) -> dict[str, str]:
    """Return the start of each function's PTX instruction. The table comes from the PTX ISA, not from the templates."""
    has = TARGETS[target].has
    table = {
        "mbarrier_init": "mbarrier.init.shared::cta.b64",
        "mbarrier_inval": "mbarrier.inval.shared::cta.b64",
        "mbarrier_arrive": "mbarrier.arrive.shared::cta.b64",
        "mbarrier_arrive_count": "mbarrier.arrive.shared::cta.b64",
        "mbarrier_expect_tx": "mbarrier.expect_tx.relaxed.cta.shared::cta.b64",
        "mbarrier_arrive_expect_tx": "mbarrier.arrive.expect_tx.shared::cta.b64",
        "mbarrier_try_wait_parity": "mbarrier.try_wait.parity.shared::cta.b64",
        "mbarrier_try_wait_parity_hint": "mbarrier.try_wait.parity.shared::cta.b64",
        "mbarrier_test_wait_parity": "mbarrier.test_wait.parity.shared::cta.b64",
        "fence_mbarrier_init": "fence.mbarrier_init.release.cluster",
        "cp_async_mbarrier_arrive_noinc": "cp.async.mbarrier.arrive.noinc.shared::cta.b64",
        "prefetch_tensormap": "prefetch.tensormap",
        "cp_async_bulk_prefetch": "cp.async.bulk.prefetch.L2.global",
        "cp_async_bulk_load": f"cp.async.bulk.shared::cta.global.{COMPLETE}",
        "cp_async_bulk_load_hint": f"cp.async.bulk.shared::cta.global.{COMPLETE}.L2::cache_hint",
        "cp_async_bulk_store": "cp.async.bulk.global.shared::cta.bulk_group",
        "cp_async_bulk_store_hint": "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint",
        "cp_async_bulk_commit_group": "cp.async.bulk.commit_group",
        "cp_async_bulk_wait_group": "cp.async.bulk.wait_group",
        "cp_async_bulk_wait_group_read": "cp.async.bulk.wait_group.read",
        "createpolicy_evict_first": "createpolicy.fractional.L2::evict_first.b64",
        "createpolicy_evict_last": "createpolicy.fractional.L2::evict_last.b64",
        "createpolicy_evict_normal": "createpolicy.fractional.L2::evict_normal.b64",
        "fence_proxy_async_shared_cta": "fence.proxy.async.shared::cta",
        "fence_proxy_async_global": "fence.proxy.async.global",
        "fence_acq_rel_cta": "fence.acq_rel.cta",
        "fence_proxy_async": "fence.proxy.async",
        "fence_proxy_tensormap_release_gpu": "fence.proxy.tensormap::generic.release.gpu",
        "fence_proxy_tensormap_acquire_gpu": "fence.proxy.tensormap::generic.acquire.gpu",
        "tensormap_cp_fenceproxy_release_gpu": (
            "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned"
        ),
        "cp_async_16": "cp.async.cg.shared.global",
        "cp_async_commit_group": "cp.async.commit_group",
        "cp_async_wait_group": "cp.async.wait_group",
        "movmatrix_trans": "movmatrix.sync.aligned.m8n8.trans.b16",
        "mma_m16n8k16_f16": "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
        "mma_m16n8k16_bf16": "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
        "mma_m16n8k32_e4m3": "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32",
        "mma_m16n8k32_e5m2": "mma.sync.aligned.m16n8k32.row.col.f32.e5m2.e5m2.f32",
        "laneid": "mov.u32",
        "elect_sync": "elect.sync",
        "bar_sync": "bar.sync",
        "bar_arrive": "bar.arrive",
        "ex2_approx_ftz": "ex2.approx.ftz.f32",
        "lop3_and_or": "lop3.b32",
        "griddepcontrol_wait": "griddepcontrol.wait",
        "griddepcontrol_launch_dependents": "griddepcontrol.launch_dependents",
    }
    loads = ("u16", "b32", "f32", "v2.b32", "v2.f32", "v2.b64", "v4.b32", "v4.f32")
    stores = ("b32", "v2.f32", "v2.b64", "v4.b32", "v4.f32")
    for instruction in (*(f"ld.shared.{kind}" for kind in loads), *(f"st.shared.{kind}" for kind in stores)):
        table[instruction.replace(".", "_")] = instruction
    for n in (1, 2, 4):
        for suffix, modifier in (("", ""), ("_trans", ".trans")):
            table[f"ldmatrix_x{n}{suffix}"] = f"ldmatrix.sync.aligned.m8n8.x{n}{modifier}.shared.b16"
            table[f"stmatrix_x{n}{suffix}"] = f"stmatrix.sync.aligned.m8n8.x{n}{modifier}.shared.b16"
    table |= _tensor_instructions(target)
    table |= _bulk_reductions()
    if has("multicast"):
        stem = f"cp.async.bulk.shared::cluster.global.{COMPLETE}.multicast::cluster"
        table["cp_async_bulk_load_multicast"] = stem
    if has("cluster"):
        table["cluster_ctarank"] = "mov.u32"
        table["mapa_shared_cluster"] = "mapa.shared::cluster.u32"
        table["ld_shared_cluster_b32"] = "ld.shared::cluster.b32"
        table["mbarrier_arrive_shared_cluster"] = "mbarrier.arrive.shared::cluster.b64"
        table["mbarrier_arrive_release_cluster"] = "mbarrier.arrive.release.cluster.shared::cluster.b64"
        table["barrier_cluster_arrive"] = "barrier.cluster.arrive.release.aligned"
        table["barrier_cluster_arrive_relaxed"] = "barrier.cluster.arrive.relaxed.aligned"
        wait = "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64"
        table["mbarrier_wait_parity_acquire_cluster"] = wait
        table["st_async_v4_f32"] = f"st.async.weak.shared::cluster.{COMPLETE}.v4.f32"
        table["barrier_cluster_wait"] = "barrier.cluster.wait.acquire.aligned"
    if has("setmaxnreg"):
        table["setmaxnreg_inc"] = "setmaxnreg.inc.sync.aligned.u32"
        table["setmaxnreg_dec"] = "setmaxnreg.dec.sync.aligned.u32"
    if has("wgmma"):
        table |= {f"wgmma_{what}": f"wgmma.{what}.sync.aligned" for what in ("fence", "commit_group", "wait_group")}
        for n, kind in product((8, 16, 32, 64, 96, 128, 192, 256), ("f16", "bf16")):
            mma = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind}"
            table |= {f"wgmma_m64n{n}k16_f32_{kind}{suffix}": mma for suffix in ("", "_ss")}
    if has("tensormap_replace"):
        wide = ("global_address", "global_stride")
        narrow = ("rank", "box_dim", "global_dim", "element_stride")
        modes = ("elemtype", "interleave_layout", "swizzle_mode", "fill_mode")
        for field in (*wide, *narrow, *modes):
            width = "b64" if field in wide else "b32"
            table[f"tensormap_replace_{field}"] = f"tensormap.replace.tile.{field}.shared::cta.b1024.{width}"
    return table


def _bulk_reductions() -> dict[str, str]:
    ordered = ("u32", "s32", "u64", "s64", "f16", "bf16")
    types = {"add": ("u32", "s32", "u64", "f32", "f64", "noftz.f16", "noftz.bf16"), "min": ordered, "max": ordered}
    types |= {"inc": ("u32",), "dec": ("u32",)} | dict.fromkeys(("and", "or", "xor"), ("b32", "b64"))
    stem = "cp.reduce.async.bulk.global.shared::cta.bulk_group"
    return {
        f"cp_reduce_async_bulk_{op}_{kind.split('.')[-1]}": f"{stem}.{op}.{kind}"
        for op, kinds in types.items()
        for kind in kinds
    }


def _tensor_instructions(target: str) -> dict[str, str]:
    has = TARGETS[target].has
    table = {}
    for r in RANKS:
        tensor, load = f"cp.async.bulk.tensor.{r}d", f"cp_async_bulk_tensor_{r}d_load"
        table[load] = f"{tensor}.shared::cta.global.tile.{COMPLETE}"
        table[f"{load}_hint"] = f"{tensor}.shared::cta.global.tile.{COMPLETE}.L2::cache_hint"
        table[f"cp_async_bulk_tensor_{r}d_store"] = f"{tensor}.global.shared::cta.tile.bulk_group"
        table[f"cp_async_bulk_tensor_{r}d_store_hint"] = f"{tensor}.global.shared::cta.tile.bulk_group.L2::cache_hint"
        table[f"cp_async_bulk_prefetch_tensor_{r}d"] = f"cp.async.bulk.prefetch.tensor.{r}d.L2.global.tile"
        for op in OPS:
            reduce = f"cp.reduce.async.bulk.tensor.{r}d.global.shared::cta.{op}.tile.bulk_group"
            table[f"cp_reduce_async_bulk_tensor_{r}d_{op}"] = reduce
        if has("multicast"):
            stem = f"{tensor}.shared::cluster.global.tile.{COMPLETE}.multicast::cluster"
            table[f"{load}_multicast"] = stem
            table[f"{load}_multicast_hint"] = f"{stem}.L2::cache_hint"
    for r in RANKS[2:]:
        tensor, name = f"cp.async.bulk.tensor.{r}d", f"cp_async_bulk_tensor_{r}d"
        table[f"{name}_im2col_load"] = f"{tensor}.shared::cta.global.im2col.{COMPLETE}"
        table[f"{name}_im2col_store"] = f"{tensor}.global.shared::cta.im2col_no_offs.bulk_group"
        table[f"cp_async_bulk_prefetch_tensor_{r}d_im2col"] = f"cp.async.bulk.prefetch.tensor.{r}d.L2.global.im2col"
        if has("im2col_w"):
            table[f"{name}_im2col_w_load"] = f"{tensor}.shared::cta.global.im2col::w.{COMPLETE}"
    if has("gather4"):
        gather = f"cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.{COMPLETE}"
        table["cp_async_bulk_tensor_2d_gather4_load"] = gather
    if has("scatter4"):
        scatter = "cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group"
        table["cp_async_bulk_tensor_2d_scatter4_store"] = scatter
    return table


@lru_cache(maxsize=8)
def compiled(target: str) -> Compiled:
    try:
        return compile_source(render("probes/every_primitive.cu.j2", None, target), get_target(target))
    except DriverError as error:
        pytest.skip(f"no NVRTC: {error}")


def ptx_mnemonics(ptx: str) -> Counter[str]:
    """Count mnemonics, without predicates, braces and operands."""
    return Counter(re.findall(r"^\s*(?:@!?%p\d+\s+)?([a-z]\w*(?:[.:]+\w+)+)[\s;]", ptx, re.MULTILINE))


def sass(target: str, folder: Path) -> str:
    tool = shutil.which("nvdisasm", path=str(Path(sysconfig.get_paths()["purelib"], "nvidia", "cu13", "bin")))
    tool = tool or shutil.which("nvdisasm")
    if tool is None:
        pytest.skip("no nvdisasm: pip install nvidia-cuda-nvdisasm")
    (folder / "k.cubin").write_bytes(compiled(target).cubin)
    return subprocess.run([tool, str(folder / "k.cubin")], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("target", COMPILED_TARGETS)
def test_the_table_and_the_probe_cover_every_function(target: str) -> None:
    functions = set(FUNCTION.findall(export_header(target)))
    assert functions - NOT_AN_INSTRUCTION == set(expected_instructions(target))
    kernel = render("probes/every_primitive.cu.j2", None, target).split('extern "C"', 1)[1]
    uncalled = {name for name in functions if not re.search(rf"\b{name}(<\d+>)?\(", kernel)}
    assert not uncalled


@pytest.mark.parametrize("target", COMPILED_TARGETS)
def test_every_function_is_the_instruction_of_its_name(target: str) -> None:
    found = ptx_mnemonics(compiled(target).ptx)
    wanted = Counter(expected_instructions(target).values())
    lacking = {name: (count, found[name]) for name, count in wanted.items() if found[name] < count}
    assert not lacking
    # Functions that share no mnemonic with another one are called once, hence stand there once.
    for name in ("cp.async.bulk.commit_group", "prefetch.tensormap", "movmatrix.sync.aligned.m8n8.trans.b16"):
        assert found[name] == 1


@pytest.mark.parametrize("target", COMPILED_TARGETS)
def test_the_compiler_warns_of_nothing(target: str) -> None:
    assert compiled(target).warnings == ()


@pytest.mark.sweep(1)
@pytest.mark.parametrize("target", ["sm_90a", "sm_100a", "sm_120a"])
def test_sass(target: str, tmp_path: Path) -> None:
    found = Counter(re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", sass(target, tmp_path)))
    has = TARGETS[target].has
    for r in RANKS:
        assert found[f"UTMALDG.{r}D"] == 2
        assert found[f"UTMASTG.{r}D"] == 2
        assert found[f"UTMAPF.L2.{r}D"] == 1
        assert found[f"UTMALDG.{r}D.MULTICAST"] == (2 if has("multicast") else 0)
        assert all(found[f"UTMAREDG.{r}D.{op.upper()}"] == 1 for op in OPS)
    for r in RANKS[2:]:
        assert found[f"UTMALDG.{r}D.IM2COL"] == found[f"UTMASTG.{r}D.IM2COL"] == found[f"UTMAPF.L2.{r}D.IM2COL"] == 1
        assert found[f"UTMALDG.{r}D.W"] == has("im2col_w")
    assert found["UTMALDG.2D.GATHER4"] == has("gather4")
    assert found["UTMASTG.2D.SCATTER4"] == has("scatter4")
    assert (found["UBLKCP.S.G"], found["UBLKCP.G.S"], found["UBLKPF.L2"], found["UTMACCTL.PF"]) == (2, 2, 1, 1)
    for name in ("LDSM.16.M88", "LDSM.16.MT88", "STSM.16.M88", "STSM.16.MT88"):
        assert [found[name], found[f"{name}.2"], found[f"{name}.4"]] == [1, 1, 1]
    assert found["HMMA.16816.F32"] == 1 + 4 * (not has("mma_sync_fp8"))  # fp8 is converted there, half of K at a time
    assert found["HMMA.16816.F32.BF16"] == found["MOVM.16.MT88"] == 1
    assert found["LDGSTS.E.BYPASS.128.ZFILL"] == found["ACQBULK"] == found["PREEXIT"] == 1
    assert sum(count for name, count in found.items() if name.startswith("USETMAXREG")) == 2 * has("setmaxnreg")


def test_without_clusters_nothing_names_one() -> None:
    assert "shared::cluster" not in compiled("sm_120a").ptx
    assert "multicast" not in compiled("sm_120a").ptx


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_the_header_compiles_alone_and_twice(target: str) -> None:
    header = export_header(target)
    assert header.count("#pragma once") == 1
    assert "#include" not in header
    kernel = 'extern "C" __global__ void k(unsigned* out) { out[0] = cudatma::shared_address(out); }\n'
    try:
        assert compile_source(header.replace("#pragma once\n", "") + kernel, get_target(target)).cubin
    except DriverError as error:
        pytest.skip(f"no NVRTC: {error}")


def test_the_header_compiles_with_nvcc(tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc on this machine")
    (tmp_path / "cudatma.cuh").write_text(export_header("sm_90a"))
    body = render("probes/every_primitive.cu.j2", None, "sm_90a").split("using namespace cudatma;", 1)[1]
    source = '#include "cudatma.cuh"\n#include "cudatma.cuh"\nusing namespace cudatma;\n' + body
    (tmp_path / "k.cu").write_text(source)
    command = [nvcc, "-arch=compute_90a", "-std=c++17", "-ptx", "-o", str(tmp_path / "k.ptx"), str(tmp_path / "k.cu")]
    subprocess.run(command, check=True, capture_output=True)
    found = ptx_mnemonics((tmp_path / "k.ptx").read_text())
    assert not {name for name in expected_instructions("sm_90a").values() if not found[name]}


@pytest.mark.parametrize("target", COMPILED_TARGETS)
def test_the_example_kernel_is_tma_only(target: str, load_example: Callable[[str], ModuleType]) -> None:
    config = load_example("tile_copy").TileCopyConfig(4)
    chosen = get_target(target)
    config.ring.check_fits(chosen)
    try:
        result = compile_source(render("kernels/tile_copy.cu.j2", config, target), chosen)
    except DriverError as error:
        pytest.skip(f"no NVRTC: {error}")
    found = ptx_mnemonics(result.ptx)
    assert found[f"cp.async.bulk.tensor.2d.shared::cta.global.tile.{COMPLETE}"] == 1
    assert found["cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"] == 1
    assert not [name for name in found if name.startswith(("ld.global", "st.global", "ld.shared", "st.shared"))]
    assert result.warnings == ()
    assert "0 bytes spill stores" in result.log
