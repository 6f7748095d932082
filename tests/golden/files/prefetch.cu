// cudatma: kernels/prefetch.cu.j2 for sm_90a
// config: PrefetchConfig
//   rank = 2

namespace cudatma {

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// [PTX ISA, Tensor-map] The 128 opaque bytes of a tensor map, which cuTensorMapEncode* fills. A kernel takes a tensor map as a parameter of
// type `const __grid_constant__ TensorMap`.
struct alignas(64) TensorMap {
    u8 bytes[128];
};

// [PTX ISA, cp.async.bulk.prefetch.tensor] Prefetch the box that begins at element (c0, c1, ...) into L2. No barrier signals its
// completion.
__device__ __forceinline__ void cp_async_bulk_prefetch_tensor_2d(const TensorMap* map, int c0, int c1) {
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];"
                 :: "l"(map), "r"(c0), "r"(c1) : "memory");
}

}  // namespace cudatma

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
