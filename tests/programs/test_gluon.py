"""Gluon kernels on the emulator: asynchronous copies, wgmma, warp specialization, clusters, and their mutants."""

# mypy: disable-error-code="attr-defined,name-defined,no-untyped-def,untyped-decorator"
from __future__ import annotations

import importlib
from typing import Any

import pytest

import cudatma
from cudatma.mutants import EXEMPT, REPORTED
from cudatma.programs import LaunchLog, ProgramLaunch

triton = pytest.importorskip("triton", "3.9")
torch = pytest.importorskip("torch")
gluon = importlib.import_module("triton.experimental.gluon")
gl = importlib.import_module("triton.experimental.gluon.language")
hopper = importlib.import_module("triton.experimental.gluon.language.nvidia.hopper")
TensorDescriptor = importlib.import_module("triton.experimental.gluon.nvidia.hopper").TensorDescriptor
mbarrier, tma, fence_async_shared = hopper.mbarrier, hopper.tma, hopper.fence_async_shared

TILE = 64


@gluon.jit
def load_tiles(source, tiles, empty, full, count):
    stages: gl.constexpr = tiles.type.shape[0]
    for i in range(count):
        mbarrier.wait(empty.index(i % stages), (i // stages & 1) ^ 1)
        mbarrier.expect(full.index(i % stages), source.block_type.nbytes)
        tma.async_load(source, [i * source.block_type.shape[0], 0], full.index(i % stages), tiles.index(i % stages))


@gluon.jit
def add_tiles(result, total, tiles, empty, full, count, layout: gl.constexpr):
    stages: gl.constexpr = tiles.type.shape[0]
    rows: gl.constexpr = tiles.type.shape[1]
    columns: gl.constexpr = tiles.type.shape[2]
    sum = gl.zeros((rows, columns), gl.float32, layout)
    for i in range(count):
        mbarrier.wait(full.index(i % stages), i // stages & 1)
        sum += tiles.index(i % stages).load(layout)
        mbarrier.arrive(empty.index(i % stages), count=1)
    total.store(sum)
    fence_async_shared()
    tma.async_store(result, [0, 0], total)
    tma.store_wait(pendings=0)


@gluon.jit
def sum_kernel(source, result, count, stages: gl.constexpr):
    """Add the tiles of a column with one warp that loads and four warps that add."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    tiles = gl.allocate_shared_memory(gl.float32, [stages] + source.block_type.shape, source.layout)  # noqa: RUF005 - Gluon has no unpacking
    total = gl.allocate_shared_memory(gl.float32, result.block_type.shape, result.layout)
    empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(stages):
        mbarrier.init(empty.index(i), count=1)
        mbarrier.init(full.index(i), count=1)
    gl.warp_specialize(
        [
            (add_tiles, (result, total, tiles, empty, full, count, layout)),
            (load_tiles, (source, tiles, empty, full, count)),
        ],
        [1],
        [24],
    )


@gluon.jit
def product_kernel(a_map, b_map, c_map, early: gl.constexpr):
    """Multiply with one buffer, which the next load overwrites before the wgmma has read it if early is true."""
    tile: gl.constexpr = a_map.block_type.shape
    a = gl.allocate_shared_memory(gl.float16, tile, a_map.layout)
    b = gl.allocate_shared_memory(gl.float16, tile, b_map.layout)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    total = hopper.warpgroup_mma_init(gl.zeros(tile, gl.float32, layout))
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    for i in range(a_map.shape[1] // tile[1]):
        if not early:
            total = hopper.warpgroup_mma_wait(0, (total,))
        mbarrier.expect(full, a_map.block_type.nbytes + b_map.block_type.nbytes)
        tma.async_load(a_map, [0, i * tile[1]], full, a)
        tma.async_load(b_map, [i * tile[1], 0], full, b)
        mbarrier.wait(full, i & 1)
        if early:
            total = hopper.warpgroup_mma_wait(0, (total,))
        total = hopper.warpgroup_mma(a, b, total, is_async=True)
    total = hopper.warpgroup_mma_wait(0, (total,))
    mbarrier.invalidate(full)
    c = gl.allocate_shared_memory(gl.float16, tile, c_map.layout)
    c.store(total.to(gl.float16))
    fence_async_shared()
    tma.async_store(c_map, [0, 0], c)
    tma.store_wait(pendings=0)


@gluon.jit
def softmax_kernel(x_ptr, y_ptr, columns: gl.constexpr):
    """Compute the softmax of a row that two CTAs share."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [2], [0], cga_layout=((1,),))
    at = gl.program_id(0) * columns + gl.arange(0, columns, layout)
    x = gl.load(x_ptr + at)
    y = gl.exp(x - gl.max(x, axis=0))
    gl.store(y_ptr + at, y / gl.sum(y, axis=0))


def descriptor(tensor: Any, dtype: Any, rows: int = TILE) -> Any:
    block = [rows, tensor.shape[1] if tensor.dtype == torch.float32 else TILE]
    return TensorDescriptor.from_tensor(tensor, block, gl.NVMMASharedLayout.get_default_for(block, dtype))


def run_sum(count: int = 5) -> tuple[Any, Any]:
    source, result = torch.randn(8 * count, 32), torch.zeros(8, 32)
    maps = [descriptor(tensor, gl.float32, rows=8) for tensor in (source, result)]
    sum_kernel[1,](*maps, count, stages=2, num_warps=4, maxnreg=128)
    return source, result


def test_a_warp_specialized_kernel_is_clean() -> None:
    with cudatma.emulate_launches(schedules=3) as log:
        source, result = run_sum()
    torch.testing.assert_close(result, source.view(5, 8, 32).sum(0))
    assert log[0].launch.block == (256, 1, 1)


def test_each_missing_synchronization_of_it_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The barrier after the last tile may be missing: the next barrier, which every warp reaches, takes its place."""
    launches: list[ProgramLaunch] = []
    monkeypatch.setattr(LaunchLog, "run", lambda log, launch: launches.append(launch))
    with cudatma.emulate_launches():
        tensors = run_sum()
    trial = launches[0].trial()
    chosen = [mutant for mutant in trial.mutants if mutant.operator.startswith("drop")]
    missed = [outcome for outcome in trial.outcomes(3, chosen) if outcome.verdict not in (REPORTED, EXEMPT)]
    assert [outcome.mutant.text for outcome in missed] in ([], ["barrier.sync 1"]), missed
    assert len(chosen) > 20
    del tensors  # the launch has only their addresses


@pytest.mark.parametrize("early", [False, True])
def test_a_load_over_the_operand_of_a_wgmma_in_flight(early: bool) -> None:
    a, b, c = torch.randn(TILE, 192).half(), torch.randn(192, TILE).half(), torch.zeros(TILE, TILE).half()
    with cudatma.emulate_launches(hazards="collect") as log:
        product_kernel[1,](*[descriptor(tensor, gl.float16) for tensor in (a, b, c)], early=early, num_warps=4)
    assert {hazard.kind for hazard in log.hazards} == ({"overwritten_while_read"} if early else set()), str(log)
    torch.testing.assert_close(c, a @ b, atol=0.05, rtol=0.01)


def test_a_reduction_over_a_cluster() -> None:
    x, y = torch.randn(2, 256), torch.zeros(2, 256)
    with cudatma.emulate_launches() as log:
        softmax_kernel[2,](x, y, columns=256, num_warps=2, num_ctas=2)
    torch.testing.assert_close(y, x.softmax(1))
    assert log[0].launch.cluster == (2, 1, 1)
