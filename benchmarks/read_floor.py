"""Measure F, the time of a TMA kernel that only streams a layer's weight, in ordinary and in dependent launches.

One thread of each CTA issues 1D bulk copies into a ring of slots. Four warps XOR the bytes and release the slots. F is
the minimum time over all copy sizes, ring sizes, CTA counts per SM and copy orders.

In a chain of programmatic dependent launches, a kernel issues the copies for its whole ring while the previous kernel
is still running, and reads the slots after that kernel has completed. A GEMM does the same, because its weights are
available before its activations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.harness import Contender, cold, copies_for, launches_for
from benchmarks.operands import filled, random_words

KIB = 1024
THREADS = 160
_COPY_KIB = (4, 8, 16, 32)
_RING_KIB = (32, 64, 96, 192)
_CTAS_PER_SM = (1, 2, 3, 4)
_MAX_STAGES = 32
#: Number of turns per configuration during the search, and number of configurations that are then measured fully.
_SEARCH_REPLAYS, _FINALISTS = 3, 4

SOURCE = """
//% include "primitives/mbarrier.cuh.j2"
//% include "primitives/bulk_copy.cuh.j2"
//% include "primitives/cache_policy.cuh.j2"
//% include "primitives/sync.cuh.j2"

using namespace cudatma;

constexpr u32 MAX_STAGES = 32;
constexpr u32 CONSUMER_WARPS = 4;   // Each warp arrives once on `empty`.
constexpr u32 CONSUMERS = 32 * CONSUMER_WARPS;

// Stream `bytes` bytes (a multiple of 16) from `source` through a ring of `stages` slots of `copy_bytes`. CTAs take the
// copies in turn (interleaved != 0), or each CTA takes a contiguous part. `sink` is written only for one sum out of
// 2^32, which prevents the compiler from removing the loads.
extern "C" __global__ void __launch_bounds__(160)
read_floor(const u8* source, u32* sink, u64 bytes, u32 copy_bytes, u32 stages, u32 interleaved) {
    extern __shared__ __align__(128) u8 ring[];
    __shared__ u64 full_barriers[MAX_STAGES], empty_barriers[MAX_STAGES];
    const u32 slots = shared_address(ring);
    const u32 full = shared_address(full_barriers), empty = shared_address(empty_barriers);
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < stages; ++i) {
            mbarrier_init(full + 8 * i, 1);
            mbarrier_init(empty + 8 * i, CONSUMER_WARPS);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    griddepcontrol_launch_dependents();   // In a chain, the next kernel may now fill its ring.

    const u32 copies = (u32)((bytes + copy_bytes - 1) / copy_bytes);
    const u32 range = (copies + gridDim.x - 1) / gridDim.x;
    const u32 begin = interleaved ? blockIdx.x : blockIdx.x * range;
    const u32 step = interleaved ? gridDim.x : 1;
    const u32 end = interleaved ? copies : min(copies, begin + range);
    u32 stage = 0, phase = 0, sum = 0;
    if (threadIdx.x == CONSUMERS) {
        const u64 policy = createpolicy_evict_first();
        for (u32 copy = begin; copy < end; copy += step) {
            const u64 offset = (u64)copy * copy_bytes;
            const u32 size = (u32)min((u64)copy_bytes, bytes - offset);
            mbarrier_wait_parity(empty + 8 * stage, phase ^ 1);
            mbarrier_arrive_expect_tx(full + 8 * stage, size);
            cp_async_bulk_load_hint(slots + stage * copy_bytes, source + offset, size, full + 8 * stage, policy);
            if (++stage == stages) stage = 0, phase ^= 1;
        }
    } else if (threadIdx.x < CONSUMERS) {
        griddepcontrol_wait();   // In a chain, the previous kernel has now ended.
        for (u32 copy = begin; copy < end; copy += step) {
            const u32 size = (u32)min((u64)copy_bytes, bytes - (u64)copy * copy_bytes);
            mbarrier_wait_parity(full + 8 * stage, phase);
            for (u32 at = threadIdx.x * 16; at < size; at += CONSUMERS * 16) {
                const uint4 chunk = *(const uint4*)(ring + stage * copy_bytes + at);
                sum ^= chunk.x ^ chunk.y ^ chunk.z ^ chunk.w;
            }
            __syncwarp();
            if (threadIdx.x % 32 == 0) mbarrier_arrive(empty + 8 * stage);
            if (++stage == stages) stage = 0, phase ^= 1;
        }
        if (sum == 0x5bd1e995u) *sink = sum;
    }
}
"""


@dataclass(frozen=True, slots=True)
class FloorConfig:
    """Configuration of the kernel.

    Attributes
    ----------
    copy_bytes : int
        Number of bytes per bulk copy.
    stages : int
        Number of slots in the ring.
    ctas_per_sm : int
        Number of resident CTAs per SM.
    interleaved : bool
        Whether CTAs take the copies in turn. Otherwise, each CTA takes a contiguous part.
    """

    copy_bytes: int
    stages: int
    ctas_per_sm: int
    interleaved: bool

    @property
    def ring_bytes(self) -> int:
        return self.copy_bytes * self.stages

    def __str__(self) -> str:
        order = "in turn" if self.interleaved else "in parts"
        return f"{self.copy_bytes // KIB} KiB x {self.stages}, {self.ctas_per_sm} per SM, {order}"


def configurations(smem_per_block_bytes: int, smem_per_sm_bytes: int) -> list[FloorConfig]:
    """Return all configurations that fit in shared memory with 1 KiB for the system and 1 KiB for barriers per CTA."""
    configs = []
    for copy in _COPY_KIB:
        for ring in _RING_KIB:
            stages = min(_MAX_STAGES, ring // copy)
            smem_bytes = stages * copy * KIB + 2 * KIB
            for blocks in _CTAS_PER_SM:
                if stages >= 2 and smem_bytes <= smem_per_block_bytes and smem_bytes * blocks <= smem_per_sm_bytes:
                    configs += [FloorConfig(copy * KIB, stages, blocks, order) for order in (False, True)]
    return list(dict.fromkeys(configs))


@dataclass(frozen=True, slots=True)
class Floor:
    """The minimum time for one size in microseconds, and the configuration that reached it."""

    us: float
    config: FloorConfig


class FloorBench:
    """The compiled kernel, and a pool of random bytes as its source, on the current device and stream."""

    def __init__(self, largest_bytes: int) -> None:
        import cupy

        import cudatma
        from cudatma.context import current_device, device

        self.device = current_device()
        self.sm_count = device(self.device).sm_count
        self.kernel = cudatma.compile(SOURCE, template=True)
        self.kernel.load(self.device)
        size = (copies_for(largest_bytes) + 1) * largest_bytes
        self.pool: Any = filled(cupy, (size,), random_words(cupy, 1 << 22, 7).view(cupy.uint8))
        self.sink: Any = cupy.zeros(1, dtype=cupy.uint32)

    def contender(
        self, nbytes: int, config: FloorConfig, name: str = "floor", *, programmatic: bool = False
    ) -> Contender:
        """Return a contender whose launches stream ``nbytes`` bytes (a multiple of 16) each and rotate over the pool.

        If ``programmatic``, the launches use programmatic dependent launch.
        """
        import cupy

        copies = min(copies_for(nbytes), self.pool.nbytes // nbytes)
        plan = self.kernel.plan(
            self.sm_count * config.ctas_per_sm,
            THREADS,
            (self.pool, self.sink, nbytes, config.copy_bytes, config.stages, int(config.interleaved)),
            shared_bytes=config.ring_bytes,
            programmatic=programmatic,
        )
        base = int(self.pool.data.ptr)

        def run(index: int) -> None:
            plan.arguments[0].value = base + index % copies * nbytes
            plan.launch(int(cupy.cuda.get_current_stream().ptr))

        return Contender(name, run, copies, launches_for(nbytes, copies))

    def resident(self, config: FloorConfig) -> bool:
        """Return whether ``ctas_per_sm`` CTAs can be resident on an SM."""
        return self.kernel.occupancy(THREADS, shared_bytes=config.ring_bytes, device=self.device) >= config.ctas_per_sm

    def search(self, stream: Any, nbytes: int, replays: int, *, programmatic: bool = False) -> Floor:
        """Return the best configuration for a size. Raises RuntimeError if no configuration ran."""
        target = self.kernel.target
        times: dict[FloorConfig, float] = {}
        errors: set[str] = set()
        for config in configurations(target.smem_per_block_bytes, target.smem_per_sm_bytes):
            if self.resident(config):
                contender = self.contender(nbytes, config, programmatic=programmatic)
                quick = cold(stream, [contender], _SEARCH_REPLAYS, rest_s=0.0)
                errors |= set(quick.errors.values())
                if (us := quick.us("floor")) is not None:
                    times[config] = us
        best = {str(config): config for config in sorted(times, key=lambda c: times[c])[:_FINALISTS]}
        finalists = [self.contender(nbytes, config, name, programmatic=programmatic) for name, config in best.items()]
        again = cold(stream, finalists, replays, rest_s=0.0)
        if not again.timings:
            raise RuntimeError(f"no configuration of the read floor ran: {'; '.join(sorted(errors)) or again.errors}")
        name = min(again.timings, key=lambda config: again.timings[config].us)
        return Floor(again.timings[name].us, best[name])
