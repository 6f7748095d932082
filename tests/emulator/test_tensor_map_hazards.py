"""Requirements on tensor maps and addresses of copies: traps, and hazards of swizzles and overlapping stores."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from ptx_of import module_of

from cudatma.descriptor import TensorMap, TiledSpec
from cudatma.descriptor.codec import encode
from cudatma.emulator import TrapError

TILE = """
extern "C" __global__ void k(const __grid_constant__ TensorMap map, u32* out) {
    extern __shared__ __align__(1024) u8 smem[];
    __shared__ __align__(8) u64 barrier;
#ifdef BUG
    u8* box = smem + 128;
#else
    u8* box = smem;
#endif
    const u32 bar = shared_address(&barrier);
    if (threadIdx.x == 0) {
        mbarrier_init(bar, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(bar, 2048);
        cp_async_bulk_tensor_2d_load(shared_address(box), &map, bar, 0, 0);
    }
    __syncthreads();
    mbarrier_wait_parity(bar, 0);
    const u32 row = threadIdx.x / 8, chunk = threadIdx.x % 8;   // the usual swizzle, of offsets into the tile
    out[threadIdx.x] = *(const u32*)(box + row * 128 + (chunk ^ row % 8) * 16);
}"""


@pytest.mark.parametrize("bug", [False, True])
def test_a_swizzled_tile_that_is_not_aligned_to_its_pattern(bug: bool) -> None:
    source = np.arange(16 * 32, dtype=np.uint32).reshape(16, 32)
    map_ = TensorMap.from_array(source, (16, 32), swizzle="128B", encoder="codec")
    out = np.zeros(128, np.uint32)
    module = module_of(("#define BUG\n" if bug else "") + TILE)
    report = module.launch("k", 1, 128, (map_, out), shared_bytes=4096, schedules=3, hazards="collect")
    assert report.kinds == ({"swizzle_alignment"} if bug else set())
    assert (out == source[:, ::4].reshape(-1)).all() is not np.bool_(bug)


LOAD = """
extern "C" __global__ void k(const __grid_constant__ TensorMap map, int c0, int c1, u32 store, u32 shift) {
    extern __shared__ __align__(128) u8 box[];
    __shared__ __align__(8) u64 barrier;
    const u32 bar = shared_address(&barrier), to = shared_address(box) + shift;
    mbarrier_init(bar, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect_tx(bar, 512);
    cp_async_bulk_tensor_2d_load(to, &map, bar, c0, c1);
    mbarrier_wait_parity(bar, 0);
    if (store) {
        cp_async_bulk_tensor_2d_store(&map, to, c0, c1);
        cp_async_bulk_commit_group();
        cp_async_bulk_wait_group<0>();
    }
}"""


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((2, 0, 0, 0), r"coords\[0\] must be a multiple of 4 .*got 2"),
        ((-4, 0, 1, 0), r"coords\[0\] must be at least 0 in a store.*got -4"),
        ((0, -1, 1, 0), r"coords\[1\] must be at least 0 in a store.*got -1"),
        ((0, 0, 0, 64), "128-byte aligned"),
    ],
)
def test_what_the_hardware_traps(arguments: tuple[Any, ...], match: str) -> None:
    source = np.zeros((16, 16), np.float32)
    map_ = TensorMap.from_array(source, (8, 16), encoder="codec")
    module = module_of(LOAD)
    module.launch("k", 1, 1, (map_, 0, 0, 1, 0), shared_bytes=1024)
    module.launch("k", 1, 1, (map_, -4, -3, 0, 0), shared_bytes=1024)
    with pytest.raises(TrapError, match=match):
        module.launch("k", 1, 1, (map_, *arguments), shared_bytes=1024)


MATRIX = """
extern "C" __global__ void k(const __grid_constant__ TensorMap map, u32* out) {
    extern __shared__ __align__(1024) u8 box[];
    __shared__ __align__(8) u64 barrier;
    const u32 bar = shared_address(&barrier);
    if (threadIdx.x == 0) {
        mbarrier_init(bar, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(bar, 2048);
        cp_async_bulk_tensor_2d_load(shared_address(box), &map, bar, 0, 0);
    }
    __syncwarp();
    mbarrier_wait_parity(bar, 0);
    u32 r[4];
    const u32 row = threadIdx.x % 16, chunk = threadIdx.x / 16 + 2;
    ldmatrix_x4(r, shared_address(box) + row * 128 + (chunk ^ row % 8) * 16);
    for (u32 i = 0; i < 4; ++i) out[32 * i + threadIdx.x] = r[i];
}"""


@pytest.mark.parametrize("mode", ["128B", "none"])
def test_ldmatrix_under_another_swizzle_than_the_map(mode: str) -> None:
    source = np.arange(16 * 64, dtype=np.uint16).reshape(16, 64)
    map_ = TensorMap.from_array(source, (16, 64), swizzle=mode, encoder="codec")
    out = np.zeros(128, np.uint32)
    report = module_of(MATRIX).launch("k", 1, 32, (map_, out), shared_bytes=4096, schedules=2, hazards="collect")
    assert ("swizzle_mismatch" in report.kinds) is (mode != "128B"), str(report)
    if mode == "128B":
        tile = source[:, 16:32].reshape(2, 8, 2, 4, 2).transpose(2, 0, 1, 3, 4)
        assert (out.view(np.uint16) == tile.reshape(-1)).all()


# ---- addresses of another memory

PLACE = """
extern "C" __global__ void k(HOW map, const TensorMap* other, u32* out) {
    __shared__ __align__(128) u32 box[256];
    __shared__ __align__(128) TensorMap copy;
    __shared__ __align__(8) u64 barrier;
    const u32 bar = shared_address(&barrier);
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < 128; ++i) copy.bytes[i] = other->bytes[i];
        fence_proxy_async();
        mbarrier_init(bar, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(bar, 1024);
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                     " [%0], [%1, {%3, %3}], [%2];"
                     :: "r"(shared_address(box)), "l"(WHERE), "r"(bar), "r"(0) : "memory");
    }
    __syncwarp();
    mbarrier_wait_parity(bar, 0);
    for (u32 i = threadIdx.x; i < 256; i += 32) out[i] = box[i];
}"""
GRID_CONSTANT = "const __grid_constant__ TensorMap"


@pytest.mark.parametrize(
    ("how", "where", "memory"),
    [
        (GRID_CONSTANT, "&map", ""),
        (GRID_CONSTANT, "other", ""),
        ("TensorMap", "&map", "local memory"),
        (GRID_CONSTANT, "&copy", "shared memory"),
        (GRID_CONSTANT, "(u64)shared_address(&copy)", "shared memory"),
    ],
)
def test_where_a_tensor_map_may_be(how: str, where: str, memory: str) -> None:
    source, out = np.arange(256, dtype=np.uint32).reshape(8, 32), np.zeros((8, 32), np.uint32)
    map_ = TensorMap.from_array(source, (8, 32), encoder="codec")
    room = np.zeros(192, np.uint8)
    other = room[-int(room.__array_interface__["data"][0]) % 64 :][:128]
    other[:] = np.frombuffer(bytes(map_), np.uint8)
    module = module_of(PLACE.replace("HOW", how).replace("WHERE", where))
    report = module.launch("k", 1, 32, (map_, other, out), arrays=(source,), hazards="collect")
    if not memory:
        assert report.is_clean, str(report)
        assert (out == source).all()
        return
    assert report.kinds == {"trap"}, str(report)
    assert memory in report.hazards[0].message
    assert "__grid_constant__" in report.hazards[0].message


ASYNC_STORE = """
extern "C" __global__ void __cluster_dims__(2, 1, 1) k(u32 offset) {
    __shared__ __align__(16) u8 box[64];
    __shared__ __align__(8) u64 barrier;
    const u32 bar = shared_address(&barrier), peer = cluster_ctarank() ^ 1;
    for (u32 i = threadIdx.x; i < 64; i += 32) box[i] = 0;
    if (threadIdx.x == 0) { mbarrier_init(bar, 1); fence_mbarrier_init(); mbarrier_arrive_expect_tx(bar, BYTES); }
    barrier_cluster_arrive(); barrier_cluster_wait();
    if (threadIdx.x == 0)
        asm volatile("INSTRUCTION" :: "r"(mapa_shared_cluster(shared_address(box) + offset, peer)), "r"(0),
                     "r"(mapa_shared_cluster(bar, peer)), "l"(1ull) : "memory");
    __syncwarp();
    mbarrier_wait_parity(bar, 0);
}"""


@pytest.mark.parametrize(
    ("instruction", "size"),
    [
        ("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %1, %1, %1}, [%2];", 16),
        ("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %3, [%2];", 8),
        ("red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u64 [%0], %3, [%2];", 8),
    ],
)
def test_alignment_of_asynchronous_stores(instruction: str, size: int) -> None:
    module = module_of(ASYNC_STORE.replace("INSTRUCTION", instruction).replace("BYTES", str(size)))
    assert module.launch("k", 2, 32, (size,)).is_clean
    with pytest.raises(TrapError, match="misaligned"):
        module.launch("k", 2, 32, (size // 2,))


SPREAD = """
extern "C" __global__ void k(const __grid_constant__ TensorMap map) {
    __shared__ __align__(128) float box[128];
    for (u32 i = threadIdx.x; i < 128; i += 32) box[i] = 1.0f;
    fence_proxy_async();
    __syncwarp();
    if (threadIdx.x == 0) {
        asm volatile("INSTRUCTION.bulk_group [%0, {%2, %2}], [%1];" :: "l"(&map), "r"(shared_address(box)), "r"(0)
                     : "memory");
        cp_async_bulk_commit_group();
        cp_async_bulk_wait_group<0>();
    }
}"""


@pytest.mark.parametrize(("stride", "overlaps"), [(128, False), (64, True), (0, True)])
def test_stores_whose_elements_land_on_each_other(stride: int, overlaps: bool) -> None:
    out = np.zeros((4, 32), np.float32)
    address = int(out.__array_interface__["data"][0])
    map_ = encode(TiledSpec(dtype="float32", dims=(32, 4), strides_bytes=(stride,), box=(32, 4), address=address))
    store, add = (
        module_of(SPREAD.replace("INSTRUCTION", f"cp.{what}.2d.global.shared::cta{tail}"))
        for what, tail in (("async.bulk.tensor", ""), ("reduce.async.bulk.tensor", ".add.tile"))
    )
    report = store.launch("k", 1, 32, (map_,), arrays=(out,), hazards="collect")
    assert report.kinds == ({"write_race"} if overlaps else set()), str(report)
    out[:] = 0
    report = add.launch("k", 1, 32, (map_,), arrays=(out,))
    assert [warning.kind for warning in report.warnings] == ["write_race"] * overlaps
    assert out.sum() == 128


REPLACE = """
extern "C" __global__ void k(u8* edited) {
    __shared__ __align__(128) u8 map[128];
    map[4 * threadIdx.x] = 0;
    __syncwarp();
    if (threadIdx.x == 0)
        asm volatile("tensormap.replace.tile.rankSPACE.b1024.b32 [%0], %1;" :: "l"((u64)ADDRESS), "r"(1) : "memory");
}"""


@pytest.mark.parametrize(
    ("space", "address", "outcome"),
    [
        (".shared::cta", "shared_address(map)", "clean"),
        (".shared::cta", "(const void*)map", "warning"),  # hardware reads the low half of the address
        (".shared::cta", "edited", "trap"),
        (".global", "edited", "clean"),
        (".global", "(const void*)map", "trap"),
        ("", "edited", "clean"),
        ("", "(const void*)map", "clean"),
    ],
)
def test_an_edited_tensor_map_must_be_in_the_state_space_of_the_instruction(
    space: str, address: str, outcome: str
) -> None:
    edited = np.zeros(256, np.uint8)
    edited = edited[-edited.ctypes.data % 128 :][:128]
    module = module_of(REPLACE.replace("SPACE", space).replace("ADDRESS", address))
    with pytest.raises(TrapError) if outcome == "trap" else nullcontext():
        report = module.launch("k", 1, 32, (edited,), schedules=1)
        assert bool(report.warnings) is (outcome == "warning")


VALUE = """
extern "C" __global__ void k() {
    __shared__ __align__(128) u8 map[128];
    map[4 * threadIdx.x] = 0;
    __syncwarp();
    if (threadIdx.x == 0)
        asm volatile("tensormap.replace.tile.FIELD.shared::cta.b1024.bSIZE [%0], ORDINAL%1;"
                     :: "r"(shared_address(map)), "BOUND"(VALUE) : "memory");
}"""


@pytest.mark.parametrize(
    ("field", "value", "fits"),
    [
        ("rank", 7, True),
        ("rank", 8, False),
        ("box_dim", 256, True),
        ("box_dim", 257, False),
        ("box_dim", 0, False),
        ("element_stride", 9, False),
        ("global_stride", (1 << 40) - 16, True),
        ("global_stride", 1 << 40, False),
        ("global_stride", 24, False),
    ],
)
def test_a_value_that_a_field_of_a_tensor_map_cannot_hold(field: str, value: int, fits: bool) -> None:
    size, bound = ("64", "l") if field == "global_stride" else ("32", "r")
    changes = {"FIELD": field, "SIZE": size, "BOUND": bound, "VALUE": f"{value}ull" if size == "64" else str(value)}
    source = VALUE.replace("ORDINAL", "" if field == "rank" else "0, ")
    for name, text in changes.items():
        source = source.replace(name, text)
    report = module_of(source).launch("k", 1, 32, (), schedules=1, hazards="collect")
    assert report.kinds == (set() if fits else {"out_of_bounds"})


@pytest.mark.parametrize("step", [0, 128])
def test_each_lane_copies_its_word_of_a_tensor_map(step: int) -> None:
    source = """
    extern "C" __global__ void k(u8* to, u32 step) {
        __shared__ __align__(128) u32 map[32];
        map[threadIdx.x] = threadIdx.x + 1;
        __syncwarp();
        asm volatile("tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned "
                     "[%0], [%1], 128;" :: "l"(to + step * threadIdx.x), "r"(shared_address(map)) : "memory");
    }"""
    raw = np.zeros(33 * 128, np.uint8)
    to = raw[-raw.ctypes.data % 128 :][: 32 * 128].view(np.uint32).reshape(32, 32)
    module_of(source).launch("k", 1, 32, (to, step), schedules=1)
    words = np.arange(1, 33)
    assert (to == (np.diag(words) if step else np.eye(32, 1, dtype=int) * words)).all()
