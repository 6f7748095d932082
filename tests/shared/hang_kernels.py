"""Kernels with deliberate hangs and illegal accesses, for tests on the emulator and on a GPU.

The parameter ``bug`` selects the bug at run time, so that one compilation suffices. 0 selects the correct kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cudatma.runtime.hang import StuckWait

STAGES, TILES, TILE_BYTES, CONSUMERS = 2, 5, 1024, 2
THREADS, BLOCKS = 32 * (CONSUMERS + 1), 2


@dataclass(frozen=True, slots=True)
class RingSpec:
    """Shared memory of RING."""

    entry: str = "ring"

    def smem_layout(self) -> list[tuple[str, int, int]]:
        tiles = STAGES * TILE_BYTES
        return [("tiles", 0, tiles), ("full", tiles, 8 * STAGES), ("empty", tiles + 8 * STAGES, 8 * STAGES)]

    @property
    def smem_bytes(self) -> int:
        return STAGES * TILE_BYTES + 16 * STAGES


#: A kernel with a producer warp and two consumer warps. Each thread of a block adds one byte of every tile.
RING = """
//% include "primitives/bulk_copy.cuh.j2"
//% include "primitives/cluster.cuh.j2"
//% include "primitives/mbarrier.cuh.j2"
//% include "primitives/sync.cuh.j2"
using namespace cudatma;

constexpr u32 STAGES = 2, BYTES = 1024, CONSUMERS = 2;
enum Bug : u32 {
    NONE, WRONG_BYTES, MISSING_ARRIVE, WRONG_PARITY, WRONG_COUNT, MISSING_EXPECT, CONSUMER_LEAVES, SKIPPED_STAGE,
    WRONG_BARRIER, UNINITIALIZED, NAMED_COUNT, MISALIGNED_BARRIER, BULK_SIZE, PEER
};

extern "C" __global__ void ring(const u8* source, u32* sums, u32 tiles, u32 bug) {
    extern __shared__ __align__(128) u8 smem[];
    const u32 base = shared_address(smem), full = base + STAGES * BYTES, empty = full + 8 * STAGES;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 blocks = bug == PEER ? 2 : 1;   // that give a slot back, in a cluster

    if (threadIdx.x == 0) {
        for (u32 s = 0; s < (bug == UNINITIALIZED ? STAGES - 1 : STAGES); ++s) {
            mbarrier_init(full + 8 * s + (bug == MISALIGNED_BARRIER ? 4 : 0), bug == WRONG_COUNT ? 2 : 1);
            mbarrier_init(empty + 8 * s, CONSUMERS * blocks);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
//% if target.has("cluster")
    if (bug == PEER) {
        barrier_cluster_arrive();
        barrier_cluster_wait();
    }
//% endif
    u32 stage = 0, phase = 0, sum = 0;
    if (warp == CONSUMERS) {
        for (u32 t = 0; lane == 0 && t < tiles; ++t) {
            if (bug != SKIPPED_STAGE || t != 1) {
                mbarrier_wait_parity(empty + 8 * stage, bug == WRONG_PARITY ? phase : phase ^ 1);   // producer
                if (bug == MISSING_EXPECT)
                    mbarrier_arrive(full + 8 * stage);
                else
                    mbarrier_arrive_expect_tx(full + 8 * stage, bug == WRONG_BYTES ? 2 * BYTES : BYTES);
                const u32 told = bug == WRONG_BARRIER ? (stage + 1) % STAGES : stage;
                const u32 bytes = bug == BULK_SIZE ? BYTES - 8 : BYTES;
                cp_async_bulk_load(base + stage * BYTES, source + t * BYTES, bytes, full + 8 * told);
            }
            if (++stage == STAGES) stage = 0, phase ^= 1;
        }
        __syncwarp();
    } else {
        for (u32 t = 0; t < tiles; ++t) {
            mbarrier_wait_parity(full + 8 * stage, phase);   // consumer
            for (u32 i = threadIdx.x; i < BYTES; i += 32 * CONSUMERS) sum += smem[stage * BYTES + i];
            __syncwarp();
            if (lane == 0 && !(bug == MISSING_ARRIVE && warp == 1 && stage == 1)) {
                mbarrier_arrive(empty + 8 * stage);
//% if target.has("cluster")
                if (bug == PEER && cluster_ctarank() == 0)   // the other block never says that it has read the slot
                    mbarrier_arrive_shared_cluster(mapa_shared_cluster(empty + 8 * stage, 1));
//% endif
            }
            if (bug == CONSUMER_LEAVES && warp == 1) break;
            if (++stage == STAGES) stage = 0, phase ^= 1;
        }
        bar_sync(1, bug == NAMED_COUNT ? 96 : 32 * CONSUMERS);
        sums[blockIdx.x * 32 * CONSUMERS + threadIdx.x] = sum;
    }
//% if target.has("cluster")
    if (bug == PEER) {
        barrier_cluster_arrive();
        barrier_cluster_wait();
    }
//% endif
}
"""


@dataclass(frozen=True, slots=True)
class Planted:
    """A bug, and the wait that its report must contain.

    The wait has this state, one of these barriers and this parity, and its cause and source line contain these texts.
    ``leads`` says whether it is the first wait of the report. If several barriers wait for each other, any of them may
    expire first on a GPU, and the others are then "waiting". ``races`` says whether barrier and parity depend on the
    time at which copies complete.
    """

    name: str
    state: str
    barrier: str
    cause: str
    text: str
    parity: int | None = None
    rule: str = ""
    cluster: int | None = None
    leads: bool = True
    races: bool = False


_PRODUCER, _CONSUMER = "// producer", "// consumer"
PLANTED: tuple[Planted, ...] = (
    Planted("WRONG_BYTES", "expired", "full[0]", "1024 announced bytes never arrived", _CONSUMER, 0),
    Planted("MISSING_ARRIVE", "expired", "empty[1]", "1 of 2 arrivals are missing", _PRODUCER, 0),
    Planted("WRONG_PARITY", "expired", "empty[0]", "no thread has arrived", _PRODUCER, 0, leads=False),
    Planted("WRONG_COUNT", "expired", "full[0]", "1 of 2 arrivals are missing", _CONSUMER, 0),
    Planted("MISSING_EXPECT", "expired", "full[0]", "more bytes arrived than were announced", _CONSUMER, 1, races=True),
    Planted("CONSUMER_LEAVES", "expired", "empty[1]", "1 of 2 arrivals are missing", _PRODUCER, 0, leads=False),
    Planted("SKIPPED_STAGE", "expired", "full[1]", "no thread has arrived", _CONSUMER, 0, leads=False),
    Planted("WRONG_BARRIER", "expired", "full[0]", "1024 announced bytes never arrived", _CONSUMER, 0),
    Planted("UNINITIALIZED", "refused", "empty[1]|full[1]", "was not called", "", rule="barrier_uninitialized"),
    Planted("NAMED_COUNT", "expired", "named barrier 1", "64 of 96 threads", "bar_sync(1"),
    Planted(
        "MISALIGNED_BARRIER", "refused", "full[0] + 4 B", "8-byte aligned", "mbarrier_init", rule="barrier_alignment"
    ),
    Planted("BULK_SIZE", "refused", "tiles[0]", "1016 bytes", "cp_async_bulk_load", rule="bulk_bytes"),
    Planted("PEER", "expired", "empty[0]", "2 of 4 arrivals are missing", _PRODUCER, 0, cluster=2),
)


def matches(planted: Planted, wait: StuckWait) -> bool:
    """Return whether a wait identifies the bug."""
    exact = (planted.state, planted.parity, planted.rule)
    same = (wait.state, wait.parity, wait.rule) == exact and wait.barrier in planted.barrier.split("|")
    return same and planted.cause in wait.cause and planted.text in wait.text


#: Maps each bug to the value of the kernel's parameter.
NUMBERS: dict[str, int] = {"NONE": 0} | {planted.name: number for number, planted in enumerate(PLANTED, 1)}


def operands() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the tiles as bytes, the array for the sums, and the correct sums."""
    tiles = np.random.default_rng(0).integers(0, 256, (TILES, TILE_BYTES), dtype=np.uint8)
    right = tiles.reshape(TILES, -1, 32 * CONSUMERS).sum(axis=(0, 1), dtype=np.uint32)
    return tiles.reshape(-1), np.zeros(BLOCKS * 32 * CONSUMERS, np.uint32), np.tile(right, BLOCKS)
