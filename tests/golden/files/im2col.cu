// cudatma: kernels/im2col.cu.j2 for sm_90a
// config: Im2colCopyConfig
//   rank = 4
//   stage_bytes = 16384
//   stages = 6
//   in_flight = 3
// ring: 6 slots of 16384 bytes; stores may still be reading up to 3 of them; 98352 bytes of shared memory in total

// primitives.cu contains
// u8, u16, u32, u64, TensorMap, shared_address, mbarrier_init, mbarrier_arrive_expect_tx, mbarrier_try_wait_parity,
// mbarrier_wait_parity, fence_mbarrier_init, cp_async_bulk_tensor_3d_store, prefetch_tensormap,
// cp_async_bulk_tensor_4d_im2col_load, cp_async_bulk_commit_group, cp_async_bulk_wait_group,
// cp_async_bulk_wait_group_read, TmaPipeline

namespace cudatma {

// Copy work units blockIdx.x, blockIdx.x + gridDim.x, ... below `units` through a ring of Stages slots. Call this function from one thread.
//
// load(unit, slot address, barrier) makes the barrier expect the unit's bytes and loads them. store(unit, slot address) stores the slot.
//
// No proxy fence is needed because TMA both writes and reads the slots. No `empty` barriers are needed because the loading thread also
// stores, and waits for its bulk groups before it reuses a slot. The thread first fills all slots. After each store, the thread refills the
// slot that it stored StoresInFlight stores earlier, which TMA has read by then. TMA may still be reading the slots of later stores.
// The function returns after all stores have written global memory. `barriers` is the shared-memory address of the 8 * Stages bytes of the
// ring's barriers.
template <u32 Stages, u32 StoresInFlight, u32 StageBytes, typename Load, typename Store>
__device__ __forceinline__ void copy_units(u32 slots, u32 barriers, u32 units, Load load, Store store) {
    static_assert(StoresInFlight > 0 && StoresInFlight < Stages, "a slot must be left to load into");
    TmaPipeline<Stages> ring;   // its current stage is the slot of the next store
    ring.attach(barriers);
    ring.init_full_barriers(1);

    const u32 own_units = blockIdx.x < units ? (units - blockIdx.x - 1) / gridDim.x + 1 : 0;
    u32 loads = 0;                // number of loads issued
    u32 load_unit = blockIdx.x;   // the unit of the next load
    for (; loads < Stages && loads < own_units; ++loads, load_unit += gridDim.x)
        load(load_unit, slots + loads * StageBytes, ring.get_barrier(loads));
    u32 load_stage = 0;           // the slot of the next load
    u32 store_unit = blockIdx.x;
    for (u32 stores = 0; stores < own_units; ++stores, store_unit += gridDim.x) {
        ring.wait();
        store(store_unit, slots + ring.stage * StageBytes);
        cp_async_bulk_commit_group();
        ring.advance();
        if (stores >= StoresInFlight && loads < own_units) {
            cp_async_bulk_wait_group_read<StoresInFlight>();
            load(load_unit, slots + load_stage * StageBytes, ring.get_barrier(load_stage));
            if (++load_stage == Stages) load_stage = 0;
            ++loads;
            load_unit += gridDim.x;
        }
    }
    cp_async_bulk_wait_group<0>();   // TMA must read shared memory before the CTA exits and finish its writes before the kernel ends
}

}  // namespace cudatma
using namespace cudatma;

constexpr u32 STAGES = 6;
constexpr u32 STORES_IN_FLIGHT = 3;   // stores that may still be reading their slots
constexpr u32 STAGE_BYTES = 16384;   // bytes from one slot to the next, and maximum size of a box
constexpr u32 BARRIERS = 98304;   // offset of the barriers, after the slots

// For each output pixel and each filter tap of a convolution, copy the channels of the source pixel to destination[pixel][tap][channel].
// Pixels and taps are numbered with w innermost. A box contains `channels` channels of `pixels` pixels for one tap. The pixels of a box may
// continue in the next row or the next image.
// Along each axis (here w), `out_w` is the extent of the result, `taps_w` is the extent of the filter, `stride_w` is the stride of the
// convolution, `before_w` is the padding before the image, and `step_w` is the dilation. `taps` is the number of taps of the filter, and
// `channel_boxes` is the number of boxes along the channels.
extern "C" __global__ void __launch_bounds__(32)
im2col(const __grid_constant__ TensorMap source, const __grid_constant__ TensorMap destination,
    u32 out_w, u32 taps_w, int stride_w, int before_w, u32 step_w,
    u32 out_h, u32 taps_h, int stride_h, int before_h, u32 step_h,
    u32 channels, u32 channel_boxes, u32 taps, u32 pixels, u32 box_bytes, u32 boxes) {
    extern __shared__ __align__(128) u8 shared[];
    const u32 slots = shared_address(shared);
    if (threadIdx.x != 0) return;
    prefetch_tensormap(&source);
    prefetch_tensormap(&destination);

    const auto load = [&](u32 box, u32 slot, u32 barrier) {
        const int channel = static_cast<int>(box % channel_boxes * channels);
        u32 tap = box / channel_boxes % taps;
        u32 pixel = box / channel_boxes / taps * pixels;
        const int w = static_cast<int>(pixel % out_w) * stride_w - before_w;
        pixel /= out_w;
        const u16 offset_w = static_cast<u16>(tap % taps_w * step_w);
        tap /= taps_w;
        const int h = static_cast<int>(pixel % out_h) * stride_h - before_h;
        pixel /= out_h;
        const u16 offset_h = static_cast<u16>(tap % taps_h * step_h);
        tap /= taps_h;
        mbarrier_arrive_expect_tx(barrier, box_bytes);
        cp_async_bulk_tensor_4d_im2col_load(slot, &source, barrier, channel, w, h, static_cast<int>(pixel),
                                       offset_w, offset_h);
    };
    const auto store = [&](u32 box, u32 slot) {
        const int channel = static_cast<int>(box % channel_boxes * channels);
        const int tap = static_cast<int>(box / channel_boxes % taps);
        const int pixel = static_cast<int>(box / channel_boxes / taps * pixels);
        cp_async_bulk_tensor_3d_store(&destination, slot, channel, tap, pixel);
    };
    copy_units<STAGES, STORES_IN_FLIGHT, STAGE_BYTES>(slots, slots + BARRIERS, boxes, load, store);
}
