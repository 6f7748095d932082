// cudatma: kernels/im2col.cu.j2 for sm_90a
// spec: Im2colCopySpec
//   rank = 4
//   stage_bytes = 16384
//   stages = 6
//   in_flight = 3
//   entry = 'im2col'
// ring: 6 slots of 16384 bytes, 3 of them may be in stores; 98352 bytes of shared memory

using namespace cudatma;

constexpr u32 STAGES = 6;
constexpr u32 STORES_IN_FLIGHT = 3;   // stores that may still read their slots
constexpr u32 STAGE_BYTES = 16384;    // from one slot to the next; a box is at most as large
constexpr u32 BARRIERS = 98304;       // after the slots

// destination[pixel][tap][channel]: for each pixel of a convolution's result and each tap of its filter, the channels of the
// source that they multiply; pixels and taps are numbered with w innermost. A box is `channels` channels of `pixels` pixels under
// one tap: TMA goes from pixel to pixel by itself, across the ends of rows and images.
//   out_w, ..: extents of the result. taps_w, ..: extents of the filter; taps: their product. stride_w, ..: of the convolution.
//   before_w, ..: its padding before the image. step_w, ..: its dilation. channel_boxes: boxes along the channels.
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
