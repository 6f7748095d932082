// cudatma: kernels/plain_copy.cu.j2 for sm_90a
// config: PlainConfig
//   element_bytes = 4
//   rank = 3
//   index_bits = 32

// primitives.cu contains
// u8, u16, u32, u64

using namespace cudatma;

typedef u32 Element;
typedef u32 Index;   // can represent the index of the last element plus one grid stride

constexpr int RANK = 3;

// An axis of the window. Strides are in bytes, and the other members are in elements.
struct Axis {
    long long start, extent, size, source_stride, destination_stride;
};

struct Axes {
    Axis axis[RANK];   // outermost axis first
};

// Copy a window of the source element by element. This kernel handles windows that TMA cannot describe. Elements outside the source become
// `fill`.
extern "C" __global__ void __launch_bounds__(256)
plain_copy(const u8* source, u8* destination, Axes axes, u64 elements, u64 fill) {
    const Index threads = static_cast<Index>(gridDim.x) * blockDim.x;
    for (Index element = static_cast<Index>(blockIdx.x) * blockDim.x + threadIdx.x; element < elements; element += threads) {
        Index rest = element;
        long long from = 0, to = 0;
        bool inside = true;
#pragma unroll
        for (int i = RANK - 1; i >= 0; --i) {
            const Axis& axis = axes.axis[i];
            const Index extent = static_cast<Index>(axis.extent);
            const long long position = static_cast<long long>(rest % extent);
            rest /= extent;
            const long long at = axis.start + position;
            inside = inside && at >= 0 && at < axis.size;
            from += at * axis.source_stride;
            to += position * axis.destination_stride;
        }
        Element value = static_cast<Element>(fill);
        if (inside) value = *reinterpret_cast<const Element*>(source + from);
        *reinterpret_cast<Element*>(destination + to) = value;
    }
}
