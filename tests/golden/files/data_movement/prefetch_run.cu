// cudatma: kernels/prefetch.cu.j2 for sm_90a
// spec: PrefetchSpec
//   rank = 0
//   segment_bytes = 16384
//   entry = 'prefetch'

using namespace cudatma;

constexpr u32 SEGMENT_BYTES = 16384;

// Prefetches `bytes` bytes into L2; address and size are multiples of 16.
extern "C" __global__ void __launch_bounds__(32)
prefetch(const u8* source, u64 bytes) {
    if (threadIdx.x != 0) return;
    for (u64 at = static_cast<u64>(blockIdx.x) * SEGMENT_BYTES; at < bytes; at += static_cast<u64>(gridDim.x) * SEGMENT_BYTES) {
        const u64 rest = bytes - at;
        cp_async_bulk_prefetch(source + at, rest < SEGMENT_BYTES ? static_cast<u32>(rest) : SEGMENT_BYTES);
    }
}
