// cudatma: kernels/run_copy.cu.j2 for sm_90a
// spec: RunSpec
//   op = 'max'
//   kind = 'bf16'
//   stage_bytes = 16384
//   stages = 6
//   in_flight = 3
//   load_cache = 'evict_last'
//   store_cache = ''
// ring: 6 slots of 16384 bytes, 3 of them may be in stores; 98352 bytes of shared memory

using namespace cudatma;

constexpr u32 STAGES = 6;
constexpr u32 STORES_IN_FLIGHT = 3;   // stores that may still read their slots
constexpr u32 STAGE_BYTES = 16384;    // of a segment; the last one may be shorter
constexpr u32 BARRIERS = 98304;       // after the slots

// destination = max(destination, source), elements of bf16; both addresses and `bytes` are multiples of 16.
extern "C" __global__ void __launch_bounds__(32)
run_max_bf16(const u8* source, u8* destination, u64 bytes) {
    extern __shared__ __align__(128) u8 shared[];
    const u32 slots = shared_address(shared);
    if (threadIdx.x != 0) return;
    const u64 load_policy = createpolicy_evict_last();
    const u32 segments = static_cast<u32>((bytes + STAGE_BYTES - 1) / STAGE_BYTES);
    const auto size_of = [&](u64 offset) {
        const u64 rest = bytes - offset;
        return rest < STAGE_BYTES ? static_cast<u32>(rest) : STAGE_BYTES;
    };
    const auto load = [&](u32 segment, u32 slot, u32 barrier) {
        const u64 offset = static_cast<u64>(segment) * STAGE_BYTES;
        const u32 size = size_of(offset);
        mbarrier_arrive_expect_tx(barrier, size);
        cp_async_bulk_load_hint(slot, source + offset, size, barrier, load_policy);
    };
    const auto store = [&](u32 segment, u32 slot) {
        const u64 offset = static_cast<u64>(segment) * STAGE_BYTES;
        cp_reduce_async_bulk_max_bf16(destination + offset, slot, size_of(offset));
    };
    copy_units<STAGES, STORES_IN_FLIGHT, STAGE_BYTES>(slots, slots + BARRIERS, segments, load, store);
}
