// cudatma: kernels/prefetch.cu.j2 for sm_90a
// config: PrefetchConfig
//   rank = 2

// primitives.cu contains
// u8, u16, u32, u64, TensorMap, cp_async_bulk_prefetch_tensor_2d

using namespace cudatma;

// Prefetch a tensor into L2, box by box. Axis 0 is the innermost. Along axis i, `box_i` is the extent of a box in elements, and `tiles_i`
// is the number of boxes.
extern "C" __global__ void __launch_bounds__(32)
prefetch(const __grid_constant__ TensorMap source,
    int box0, u32 tiles0,
    int box1, u32 tiles1,
    u32 boxes) {
    if (threadIdx.x != 0) return;
    for (u32 box = blockIdx.x; box < boxes; box += gridDim.x) {
        u32 rest = box;
        const int at0 = static_cast<int>(rest % tiles0) * box0;
        rest /= tiles0;
        const int at1 = static_cast<int>(rest % tiles1) * box1;
        rest /= tiles1;
        cp_async_bulk_prefetch_tensor_2d(&source, at0, at1);
    }
}
