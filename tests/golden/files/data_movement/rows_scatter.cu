// cudatma: kernels/rows.cu.j2 for sm_100a
// spec: RowsSpec
//   op = 'scatter'
//   stage_bytes = 16384
//   stages = 6
//   in_flight = 3
//   rows = 16
// ring: 6 slots of 16384 bytes, 3 of them may be in stores; 98352 bytes of shared memory

using namespace cudatma;

constexpr u32 STAGES = 6;
constexpr u32 STORES_IN_FLIGHT = 3;   // stores that may still read their slots
constexpr u32 STAGE_BYTES = 16384;    // from one slot to the next
constexpr u32 BARRIERS = 98304;       // after the slots
constexpr u32 ROWS = 16;                // of a box, a multiple of 4: each scatter4 instruction takes four

// destination[index[i]] = source[i], `count` rows, in boxes of ROWS rows and `columns` columns. Rows that the destination does not
// have are left out.
// outside: a row number that neither of the two has. four_bytes: bytes of four rows of a box.
extern "C" __global__ void __launch_bounds__(32)
scatter_rows(const __grid_constant__ TensorMap source, const __grid_constant__ TensorMap destination, const int* index,
    u32 count, int outside, int columns, u32 column_boxes, u32 four_bytes, u32 boxes) {
    extern __shared__ __align__(128) u8 shared[];
    const u32 slots = shared_address(shared);
    if (threadIdx.x != 0) return;
    prefetch_tensormap(&source);
    prefetch_tensormap(&destination);

    // Entry i of the index. Entries after its end, and negative ones, are outside.
    const auto row_at = [&](u32 i) {
        const int row = i < count ? index[i] : outside;
        return row < 0 ? outside : row;
    };
    const auto load = [&](u32 box, u32 slot, u32 barrier) {
        const int column = static_cast<int>(box % column_boxes) * columns;
        const u32 first = box / column_boxes * ROWS;
        mbarrier_arrive_expect_tx(barrier, ROWS / 4 * four_bytes);
        cp_async_bulk_tensor_2d_load(slot, &source, barrier, column, static_cast<int>(first));
    };
    const auto store = [&](u32 box, u32 slot) {
        const int column = static_cast<int>(box % column_boxes) * columns;
        const u32 first = box / column_boxes * ROWS;
        for (u32 four = 0; four < ROWS / 4; ++four) {
            const u32 i = first + 4 * four;
            cp_async_bulk_tensor_2d_scatter4_store(&destination, slot + four * four_bytes, column, row_at(i), row_at(i + 1),
                                                   row_at(i + 2), row_at(i + 3));
        }
    };
    copy_units<STAGES, STORES_IN_FLIGHT, STAGE_BYTES>(slots, slots + BARRIERS, boxes, load, store);
}
