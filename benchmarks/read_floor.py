"""F: how long a TMA kernel takes merely to stream a layer's weight bytes, in plain launches and in dependent ones.

One thread of each block issues 1D bulk copies into a ring of stages; four warps XOR what arrives and release the
stages; nothing else happens. The best time over copy size, ring size, blocks per SM and the order in which blocks
take the copies is the floor for a layer that is bound by its weights.

In a chain of programmatic dependent launches a kernel asks for its first ring of copies while the one before it still
runs, and looks at them once that one has ended: as a GEMM must, whose weights are known before its activations.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # the checkout need not be installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import Contender, cold, copies_for, launches_for, measuring_stream, require_gpu
from benchmarks.operands import filled, packed_bytes, random_words
from benchmarks.report import Cell, Result, Table, failure, print_table, shown
from benchmarks.shapes import FIVE

KIB = 1024
THREADS = 160
_COPY_KIB = (4, 8, 16, 32)
_RING_KIB = (32, 64, 96, 192)
_BLOCKS_PER_SM = (1, 2, 3, 4)
_MAX_STAGES = 32
#: Turns a configuration gets while the best is searched; the best ones are then measured again with all.
_SEARCH_REPLAYS, _FINALISTS = 3, 4

SOURCE = """
//% include "primitives/mbarrier.cuh.j2"
//% include "primitives/bulk_copy.cuh.j2"
//% include "primitives/cache_policy.cuh.j2"
//% include "primitives/sync.cuh.j2"

using namespace cudatma;

constexpr u32 MAX_STAGES = 32;
constexpr u32 CONSUMER_WARPS = 4;   // each arrives once at `empty`
constexpr u32 CONSUMERS = 32 * CONSUMER_WARPS;

// Streams `bytes` bytes (a multiple of 16) from `source` through a ring of `stages` slots of `copy_bytes`. Blocks take
// the copies in turn (interleaved != 0) or a contiguous part each. `sink` is written only for one sum out of 2^32,
// which keeps the loads alive.
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
    griddepcontrol_launch_dependents();   // in a chain: the next kernel may fill its ring

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
        griddepcontrol_wait();   // in a chain: the kernel before this one has ended, and there would be activations
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
    """copy_bytes: of one bulk copy. stages: slots of the ring. blocks_per_sm: resident blocks. interleaved: whether
    blocks take copies in turn instead of a contiguous part each."""

    copy_bytes: int
    stages: int
    blocks_per_sm: int
    interleaved: bool

    @property
    def ring_bytes(self) -> int:
        return self.copy_bytes * self.stages

    def __str__(self) -> str:
        order = "in turn" if self.interleaved else "in parts"
        return f"{self.copy_bytes // KIB} KiB x {self.stages}, {self.blocks_per_sm} per SM, {order}"


def configurations(smem_per_block_bytes: int, smem_per_sm_bytes: int) -> list[FloorConfig]:
    """All that fit: the ring, 1 KiB for the system and 1 KiB for the barriers of each block."""
    found = []
    for copy in _COPY_KIB:
        for ring in _RING_KIB:
            stages = min(_MAX_STAGES, ring // copy)
            taken = stages * copy * KIB + 2 * KIB
            for blocks in _BLOCKS_PER_SM:
                if stages >= 2 and taken <= smem_per_block_bytes and taken * blocks <= smem_per_sm_bytes:
                    found += [FloorConfig(copy * KIB, stages, blocks, order) for order in (False, True)]
    return list(dict.fromkeys(found))


@dataclass(frozen=True, slots=True)
class Floor:
    """The floor of one size: microseconds and the configuration that reached it."""

    nbytes: int
    us: float
    config: FloorConfig

    @property
    def terabytes_per_second(self) -> float:
        return self.nbytes / self.us / 1e6


class FloorBench:
    """The compiled kernel and a pool of random bytes to stream from; made on the current device and stream."""

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
        """Launches that stream ``nbytes`` (a multiple of 16) each, rotating over the pool.

        programmatic: each is a dependent of the one before it.
        """
        import cupy

        copies = min(copies_for(nbytes), self.pool.nbytes // nbytes)
        plan = self.kernel.plan(
            self.sm_count * config.blocks_per_sm,
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
        """Whether an SM really holds that many of its thread blocks."""
        return (
            self.kernel.occupancy(THREADS, shared_bytes=config.ring_bytes, device=self.device) >= config.blocks_per_sm
        )

    def search(
        self, stream: Any, nbytes: int, replays: int, *, programmatic: bool = False
    ) -> tuple[Floor, dict[FloorConfig, float]]:
        """The best configuration for a size, and what each took in a short run (microseconds).

        Raises RuntimeError where none could be run.
        """
        target = self.kernel.target
        found: dict[FloorConfig, float] = {}
        errors: set[str] = set()
        for config in configurations(target.smem_per_block_bytes, target.smem_per_sm_bytes):
            if self.resident(config):
                one = self.contender(nbytes, config, programmatic=programmatic)
                quick = cold(stream, [one], _SEARCH_REPLAYS, rest_s=0.0)
                errors |= set(quick.errors.values())
                if (us := quick.us("floor")) is not None:
                    found[config] = us
        best = {str(config): config for config in sorted(found, key=lambda c: found[c])[:_FINALISTS]}
        finalists = [self.contender(nbytes, each, name, programmatic=programmatic) for name, each in best.items()]
        again = cold(stream, finalists, replays, rest_s=0.0)
        if not again.timings:
            raise RuntimeError(f"no configuration of the read floor ran: {'; '.join(sorted(errors)) or again.errors}")
        name = min(again.timings, key=lambda each: again.timings[each].us)
        return Floor(nbytes, again.timings[name].us, best[name]), found


def floor_table(cells: Sequence[Cell]) -> Table:
    rows = [
        (
            *(f"{c['k']} x {c['n']}", shown(c["bytes"] / 1e6, 1), shown(c["us"]), shown(c["tb_s"]), c["config"]),
            shown(c.get("programmatic_us")),
        )
        for c in cells
        if not c.get("error")
    ]
    note = (
        "F: a kernel that only streams a layer's int4 weights and scales (group 128) by bulk copies, cold in L2; last, "
        "in a chain of programmatic dependent launches."
    )
    return Table(("K x N", "MB", "us", "TB/s", "copy x slots, blocks, order", "chained us"), tuple(rows), note)


def main(argv: Sequence[str] | None = None) -> int:
    """``cudatma bench read_floor``; returns the exit status: 1 if a size could not be measured."""
    parser = argparse.ArgumentParser(prog="cudatma bench read_floor", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    parser.add_argument("--replays", type=int, default=11, help="timed replays (default: 11)")
    options = parser.parse_args(argv)
    require_gpu(parser)
    result = Result({"replays": options.replays}, floor_table, options.json)
    with measuring_stream() as stream:
        bench = FloorBench(max(packed_bytes(k, n) for k, n in FIVE))
        for k, n in FIVE:
            result.add(*_cell(bench, stream, k, n, options.replays))
    print_table(result.console, floor_table(result.cells), "Read floor")
    return int(any(cell.get("error") for cell in result.cells))


def _cell(bench: FloorBench, stream: Any, k: int, n: int, replays: int) -> tuple[Cell, str]:
    nbytes = packed_bytes(k, n)
    cell: Cell = {"k": k, "n": n, "bytes": nbytes}
    try:
        floor, found = bench.search(stream, nbytes, replays)
        chained, _ = bench.search(stream, nbytes, replays, programmatic=True)
    except Exception as error:
        return cell | {"error": failure(error)}, f"{k} x {n}"
    cell |= {"us": floor.us, "tb_s": floor.terabytes_per_second, "config": str(floor.config)}
    cell |= {"programmatic_us": chained.us, "programmatic_config": str(chained.config)}
    cell["search"] = {str(config): us for config, us in sorted(found.items(), key=lambda item: item[1])}
    line = f"{k} x {n}: {floor.us:.2f} us, {floor.terabytes_per_second:.2f} TB/s, {floor.config}"
    return cell, f"{line}; chained {chained.us:.2f} us, {chained.config}"


if __name__ == "__main__":
    raise SystemExit(main())
