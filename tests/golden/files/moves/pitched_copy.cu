// cudatma: kernels/pitched_copy.cu.j2 for sm_90a
// spec: PitchedSpec
//   stage_bytes = 16384
//   stages = 6
//   in_flight = 3
//   load_cache = ''
//   store_cache = 'evict_first'
//   entry = 'pitched_copy'
// ring: 6 slots of 16384 bytes, 3 of them may be in stores; 98352 bytes of shared memory

using namespace cudatma;

constexpr u32 STAGES = 6;
constexpr u32 IN_FLIGHT = 3;        // stores that may still read their slots
constexpr u32 STAGE_BYTES = 16384;  // from one slot to the next; a piece is at most as large
constexpr u32 BARRIERS = 98304;     // behind the slots

// destination = source, row by row. A row is cut into `parts` pieces of `piece_bytes`, the last one of what is left; a piece
// is one bulk copy, where a box of a tensor map would be many short rows. Neighbouring blocks take neighbouring pieces, so
// that all of them together stream through the rows. pitches: bytes from one row to the next. pieces: of all rows.
// Addresses, pitches, piece_bytes and row_bytes are multiples of 16.
extern "C" __global__ void __launch_bounds__(32)
pitched_copy(const u8* source, u8* destination, long long source_pitch, long long destination_pitch, u64 row_bytes,
    u32 piece_bytes, u32 parts, u32 pieces) {
    extern __shared__ __align__(128) u8 shared[];
    const u32 slots = shared_address(shared);
    if (threadIdx.x != 0) return;
    const u64 store_policy = createpolicy_evict_first();
    const auto offset_in_row = [&](u32 piece) { return static_cast<u64>(piece % parts) * piece_bytes; };
    const auto size_from = [&](u64 offset) {
        const u64 rest = row_bytes - offset;
        return rest < piece_bytes ? static_cast<u32>(rest) : piece_bytes;
    };
    const auto load = [&](u32 piece, u32 slot, u32 barrier) {
        const u64 offset = offset_in_row(piece);
        const u8* from = source + static_cast<long long>(piece / parts) * source_pitch + offset;
        const u32 size = size_from(offset);
        mbarrier_arrive_expect_tx(barrier, size);
        cp_async_bulk_load(slot, from, size, barrier);
    };
    const auto store = [&](u32 piece, u32 slot) {
        const u64 offset = offset_in_row(piece);
        u8* to = destination + static_cast<long long>(piece / parts) * destination_pitch + offset;
        cp_async_bulk_store_hint(to, slot, size_from(offset), store_policy);
    };
    move_pieces<STAGES, IN_FLIGHT, STAGE_BYTES>(slots, slots + BARRIERS, pieces, load, store);
}
