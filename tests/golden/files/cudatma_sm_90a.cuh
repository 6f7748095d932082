// cudatma.cuh: TMA, mbarrier, ldmatrix, mma.sync and wgmma primitives for sm_90a.
// Written by `cudatma header`. One function is one PTX instruction and named after it.
#pragma once

namespace cudatma {

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// The 128 opaque bytes that cuTensorMapEncode* wrote; a kernel takes them as `const __grid_constant__ TensorMap`.
// [PTX ISA, Tensor-map] The object is aligned to 64 bytes.
struct alignas(64) TensorMap {
    u8 bytes[128];
};

// [PTX ISA, cvta] A generic pointer into shared memory as the 32-bit address that the other primitives take.
__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

}  // namespace cudatma
namespace cudatma {

// [PTX ISA, cp.async.bulk] One thread asks for `bytes` contiguous bytes at `src` to be written to shared address `dst`;
// both addresses and the size are multiples of 16. `bar` receives the bytes.
//   _hint       the L2 policy of createpolicy_*.
//   _multicast  to the same offset in every block of the cluster whose bit is set in `mask`.
__device__ __forceinline__ void cp_async_bulk_load(u32 dst, const void* src, u32 bytes, u32 bar) {
    asm volatile("cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :
                 : "r"(dst), "l"(__cvta_generic_to_global(src)), "r"(bytes), "r"(bar)
                 : "memory");
}

__device__ __forceinline__ void cp_async_bulk_load_hint(u32 dst, const void* src, u32 bytes, u32 bar, u64 policy) {
    asm volatile("cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
                 :
                 : "r"(dst), "l"(__cvta_generic_to_global(src)), "r"(bytes), "r"(bar), "l"(policy)
                 : "memory");
}

__device__ __forceinline__ void cp_async_bulk_load_multicast(u32 dst, const void* src, u32 bytes, u32 bar, u16 mask) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;"
        :
        : "r"(dst), "l"(__cvta_generic_to_global(src)), "r"(bytes), "r"(bar), "h"(mask)
        : "memory");
}

// [PTX ISA, cp.async.bulk] The way back; part of the issuing thread's current bulk group.
__device__ __forceinline__ void cp_async_bulk_store(void* dst, u32 src, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 :
                 : "l"(__cvta_generic_to_global(dst)), "r"(src), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void cp_async_bulk_store_hint(void* dst, u32 src, u32 bytes, u64 policy) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;"
                 :
                 : "l"(__cvta_generic_to_global(dst)), "r"(src), "r"(bytes), "l"(policy)
                 : "memory");
}

}  // namespace cudatma
namespace cudatma {

// [PTX ISA, cp.async.bulk.commit_group] Closes the group of this thread's stores and reductions since the last one.
__device__ __forceinline__ void cp_async_bulk_commit_group() {
    asm volatile("cp.async.bulk.commit_group;" : : : "memory");
}

// [PTX ISA, cp.async.bulk.wait_group] Waits until at most Pending of this thread's groups are unfinished: the others
// have written global memory. Groups belong to the thread that issued them.
template <u32 Pending>
__device__ __forceinline__ void cp_async_bulk_wait_group() {
    asm volatile("cp.async.bulk.wait_group %0;" : : "n"(Pending) : "memory");
}

// [PTX ISA, cp.async.bulk.wait_group.read] The same, but only until shared memory has been read and may be reused.
template <u32 Pending>
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" : : "n"(Pending) : "memory");
}

}  // namespace cudatma

namespace cudatma {

// [PTX ISA, cp.reduce.async.bulk] Like cp_async_bulk_store(), but each element at `dst` becomes op(old, new); each element
// is atomic by itself. Addresses and `bytes` are multiples of 16. Part of the issuing thread's current bulk group.
// inc: old >= new ? 0 : old + 1; dec: old == 0 or old > new ? new : old - 1.
__device__ __forceinline__ void cp_reduce_async_bulk_add_u32(void* dst, u32 src, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%0], [%1], %2;"
                 :
                 : "l"(__cvta_generic_to_global(dst)), "r"(src), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_add_s32(void* dst, u32 src, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.s32 [%0], [%1], %2;"
                 :
                 : "l"(__cvta_generic_to_global(dst)), "r"(src), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_add_u64(void* dst, u32 src, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u64 [%0], [%1], %2;"
                 :
                 : "l"(__cvta_generic_to_global(dst)), "r"(src), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_add_f32(void* dst, u32 src, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
                 :
                 : "l"(__cvta_generic_to_global(dst)), "r"(src), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_add_f64(void* dst, u32 src, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f64 [%0], [%1], %2;"
                 :
                 : "l"(__cvta_generic_to_global(dst)), "r"(src), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_add_f16(void* dst, u32 src, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.f16 [%0], [%1], %2;"
                 :
                 : "l"(__cvta_generic_to_global(dst)), "r"(src), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_add_bf16(void* dst, u32 src, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.bf16 [%0], [%1], %2;"
                 :
                 : "l"(__cvta_generic_to_global(dst)), "r"(src), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_min_u32(void* dst, u32 src, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.min.u32 [%0], [%1], %2;"
                 :
                 : "l"(__cvta_generic_to_global(dst)), "r"(src), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_min_s32(void* dst, u32 src, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.min.s32 [%0], [%1], %2;"
                 :
                 : "l"(__cvta_generic_to_global(dst)), "r"(src), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_min_u64(void* dst, u32 src, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.min.u64 [%0], [%1], %2;"
                 :
                 : "l"(__cvta_generic_to_global(dst)), "r"(src), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_min_s64(void* dst, u32 src, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.min.s64 [%0], [%1], %2;"
                 :
                 : "l"(__cvta_generic_to_global(dst)), "r"(src), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_min_f16(void* dst, u32 src, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.min.f16 [%0], [%1], %2;"
                 :
                 : "l"(__cvta_generic_to_global(dst)), "r"(src), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_min_bf16(void* dst, u32 src, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.min.bf16 [%0], [%1], %2;"
                 :
                 : "l"(__cvta_generic_to_global(dst)), "r"(src), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_max_u32(void* dst, u32 src, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.max.u32 [%0], [%1], %2;"
                 :
                 : "l"(__cvta_generic_to_global(dst)), "r"(src), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_max_s32(void* dst, u32 src, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.max.s32 [%0], [%1], %2;"
                 :
                 : "l"(__cvta_generic_to_global(dst)), "r"(src), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_max_u64(void* dst, u32 src, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.max.u64 [%0], [%1], %2;"
                 :
                 : "l"(__cvta_generic_to_global(dst)), "r"(src), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_max_s64(void* dst, u32 src, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.max.s64 [%0], [%1], %2;"
                 :
                 : "l"(__cvta_generic_to_global(dst)), "r"(src), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_max_f16(void* dst, u32 src, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.max.f16 [%0], [%1], %2;"
                 :
                 : "l"(__cvta_generic_to_global(dst)), "r"(src), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_max_bf16(void* dst, u32 src, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.max.bf16 [%0], [%1], %2;"
                 :
                 : "l"(__cvta_generic_to_global(dst)), "r"(src), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_inc_u32(void* dst, u32 src, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.inc.u32 [%0], [%1], %2;"
                 :
                 : "l"(__cvta_generic_to_global(dst)), "r"(src), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_dec_u32(void* dst, u32 src, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.dec.u32 [%0], [%1], %2;"
                 :
                 : "l"(__cvta_generic_to_global(dst)), "r"(src), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_and_b32(void* dst, u32 src, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.and.b32 [%0], [%1], %2;"
                 :
                 : "l"(__cvta_generic_to_global(dst)), "r"(src), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_and_b64(void* dst, u32 src, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.and.b64 [%0], [%1], %2;"
                 :
                 : "l"(__cvta_generic_to_global(dst)), "r"(src), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_or_b32(void* dst, u32 src, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.or.b32 [%0], [%1], %2;"
                 :
                 : "l"(__cvta_generic_to_global(dst)), "r"(src), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_or_b64(void* dst, u32 src, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.or.b64 [%0], [%1], %2;"
                 :
                 : "l"(__cvta_generic_to_global(dst)), "r"(src), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_xor_b32(void* dst, u32 src, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.xor.b32 [%0], [%1], %2;"
                 :
                 : "l"(__cvta_generic_to_global(dst)), "r"(src), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_xor_b64(void* dst, u32 src, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.xor.b64 [%0], [%1], %2;"
                 :
                 : "l"(__cvta_generic_to_global(dst)), "r"(src), "r"(bytes)
                 : "memory");
}

}  // namespace cudatma
namespace cudatma {

// [PTX ISA, createpolicy] The L2 policy evict_first for all of the lines that an access with it touches.
__device__ __forceinline__ u64 createpolicy_evict_first() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// [PTX ISA, createpolicy] The L2 policy evict_last for all of the lines that an access with it touches.
__device__ __forceinline__ u64 createpolicy_evict_last() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// [PTX ISA, createpolicy] The L2 policy evict_normal for all of the lines that an access with it touches.
__device__ __forceinline__ u64 createpolicy_evict_normal() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

}  // namespace cudatma
namespace cudatma {
// [PTX ISA, Special Registers, %cluster_ctarank] This CTA's rank in its cluster.
__device__ __forceinline__ u32 cluster_ctarank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// [PTX ISA, mapa] The address, in the cluster's window, of shared address `addr` in the CTA of rank `rank`.
__device__ __forceinline__ u32 mapa_shared_cluster(u32 addr, u32 rank) {
    u32 remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(addr), "r"(rank));
    return remote;
}

// [PTX ISA, mbarrier.arrive] One arrival at a barrier of any CTA of the cluster; `bar` is from mapa_shared_cluster. Its order
// is PTX's default, a release within this CTA: right for giving back a slot that was only read.
__device__ __forceinline__ void mbarrier_arrive_shared_cluster(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" : : "r"(bar) : "memory");
}

// [PTX ISA, mbarrier.arrive] The same, and what this thread wrote is seen by the waiters of all CTAs. On SM90 it waits for a
// membar of the whole GPU, some 2 us: not for every slot of a ring.
__device__ __forceinline__ void mbarrier_arrive_release_cluster(u32 bar) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" : : "r"(bar) : "memory");
}

// [PTX ISA, barrier.cluster] All threads of the cluster arrive, with release order; barrier_cluster_wait() waits for them.
__device__ __forceinline__ void barrier_cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" : : : "memory");
}

// [PTX ISA, barrier.cluster] The same without an order for memory, where a fence or nothing is to be ordered.
__device__ __forceinline__ void barrier_cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" : : : "memory");
}

// [PTX ISA, st.async] Four values to `addr` in a CTA of the cluster; when they are there, 16 bytes are counted at its barrier
// `bar`. Both are from mapa_shared_cluster, in the same CTA; or this CTA's own. An illegal instruction in a kernel that is launched
// without clusters [H200]; __cluster_dims__(1, 1, 1) is enough.
__device__ __forceinline__ void st_async_v4_f32(u32 addr, const float (&value)[4], u32 bar) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
                 :
                 : "r"(addr), "f"(value[0]), "f"(value[1]), "f"(value[2]), "f"(value[3]), "r"(bar)
                 : "memory");
}

// [PTX ISA, mbarrier.try_wait] Waits until the phase of this parity has ended, with acquire order in the cluster: what other
// CTAs sent by st.async can be read afterwards.
__device__ __forceinline__ void mbarrier_wait_parity_acquire_cluster(u32 bar, u32 parity) {
    u32 done;
    do {
        asm volatile(
            "{\n"
            ".reg .pred p;\n"
            "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n"
            "}"
            : "=r"(done)
            : "r"(bar), "r"(parity)
            : "memory");
    } while (!done);
}

// [PTX ISA, barrier.cluster] Waits, with acquire order, until all threads of the cluster have arrived.
__device__ __forceinline__ void barrier_cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" : : : "memory");
}
}  // namespace cudatma
namespace cudatma {

// [PTX ISA, cp.async] 16 bytes from global memory to shared address `dst`, past L1; the first `src_bytes` (0..16) are
// read, the rest is zero. Both addresses are aligned to 16.
__device__ __forceinline__ void cp_async_16(u32 dst, const void* src, u32 src_bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(dst), "l"(__cvta_generic_to_global(src)), "r"(src_bytes)
                 : "memory");
}

// [PTX ISA, cp.async.commit_group] Closes the group of this thread's cp.asyncs since the last one.
__device__ __forceinline__ void cp_async_commit_group() {
    asm volatile("cp.async.commit_group;" : : : "memory");
}

// [PTX ISA, cp.async.wait_group] Waits until at most Pending of this thread's groups have not landed.
template <u32 Pending>
__device__ __forceinline__ void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;" : : "n"(Pending) : "memory");
}

}  // namespace cudatma
namespace cudatma {

// [PTX ISA, membar / fence, .proxy.async] Orders this thread's plain accesses to shared memory before TMA's later
// ones: before a tile store of what was written, and before a slot that plain stores wrote is filled again.
__device__ __forceinline__ void fence_proxy_async_shared_cta() {
    asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
}

// [PTX ISA, membar / fence, .proxy.async] The same for global memory.
__device__ __forceinline__ void fence_proxy_async_global() {
    asm volatile("fence.proxy.async.global;" : : : "memory");
}

// [PTX ISA, membar / fence, .proxy.async] The same for all state spaces.
__device__ __forceinline__ void fence_proxy_async() {
    asm volatile("fence.proxy.async;" : : : "memory");
}

// [PTX ISA, membar / fence, .acq_rel.cta] Orders this thread's memory accesses within the CTA. ptxas may issue a later
// mbarrier.arrive while earlier ld.shared are under way; it waits for them at this fence.
__device__ __forceinline__ void fence_acq_rel_cta() {
    asm volatile("fence.acq_rel.cta;" : : : "memory");
}

// [PTX ISA, membar / fence, .proxy.tensormap::generic] Releases a tensor map in global memory that this thread wrote
// or changed with plain accesses, for those who acquire it on the whole GPU.
__device__ __forceinline__ void fence_proxy_tensormap_release_gpu() {
    asm volatile("fence.proxy.tensormap::generic.release.gpu;" : : : "memory");
}

// [PTX ISA, membar / fence, .proxy.tensormap::generic] Acquires the 128 bytes of such a map before it is used by TMA.
__device__ __forceinline__ void fence_proxy_tensormap_acquire_gpu(const TensorMap* map) {
    asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" : : "l"(map) : "memory");
}

}  // namespace cudatma

namespace cudatma {

// [PTX ISA, ldmatrix] A warp loads 8 x 8 matrices of 16-bit elements: lanes 8 i .. 8 i + 7 hold the shared addresses
// (aligned to 16) of the rows of matrix i; lane l receives in r[i] elements 2 (l % 4), 2 (l % 4) + 1 of row l / 4.
// [PTX ISA, stmatrix] The way back, with the same distribution.
//   _trans  of the transposed matrices.
__device__ __forceinline__ void ldmatrix_x1(u32 (&r)[1], u32 addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
                 : "=r"(r[0])
                 : "r"(addr)
                 : "memory");
}

__device__ __forceinline__ void stmatrix_x1(u32 addr, const u32 (&r)[1]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};"
                 :
                 : "r"(addr), "r"(r[0])
                 : "memory");
}

__device__ __forceinline__ void ldmatrix_x1_trans(u32 (&r)[1], u32 addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
                 : "=r"(r[0])
                 : "r"(addr)
                 : "memory");
}

__device__ __forceinline__ void stmatrix_x1_trans(u32 addr, const u32 (&r)[1]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};"
                 :
                 : "r"(addr), "r"(r[0])
                 : "memory");
}

__device__ __forceinline__ void ldmatrix_x2(u32 (&r)[2], u32 addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(addr)
                 : "memory");
}

__device__ __forceinline__ void stmatrix_x2(u32 addr, const u32 (&r)[2]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};"
                 :
                 : "r"(addr), "r"(r[0]), "r"(r[1])
                 : "memory");
}

__device__ __forceinline__ void ldmatrix_x2_trans(u32 (&r)[2], u32 addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(addr)
                 : "memory");
}

__device__ __forceinline__ void stmatrix_x2_trans(u32 addr, const u32 (&r)[2]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};"
                 :
                 : "r"(addr), "r"(r[0]), "r"(r[1])
                 : "memory");
}

__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], u32 addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(addr)
                 : "memory");
}

__device__ __forceinline__ void stmatrix_x4(u32 addr, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 :
                 : "r"(addr), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&r)[4], u32 addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(addr)
                 : "memory");
}

__device__ __forceinline__ void stmatrix_x4_trans(u32 addr, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 :
                 : "r"(addr), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

// [PTX ISA, movmatrix] Transposes one 8 x 8 matrix of 16-bit elements across the registers of a warp.
__device__ __forceinline__ u32 movmatrix_trans(u32 r) {
    u32 transposed;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(r));
    return transposed;
}

}  // namespace cudatma
namespace cudatma {

// [PTX ISA, mbarrier.init] A barrier at shared address `bar` (8 bytes, aligned to 8) whose phases need `count` arrivals.
// Other threads may use it after fence_mbarrier_init() by this thread and a block-wide (or cluster-wide) barrier.
__device__ __forceinline__ void mbarrier_init(u32 bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(bar), "r"(count) : "memory");
}

// [PTX ISA, mbarrier.inval] Ends the barrier's life: its 8 bytes are ordinary memory again.
__device__ __forceinline__ void mbarrier_inval(u32 bar) {
    asm volatile("mbarrier.inval.shared::cta.b64 [%0];" : : "r"(bar) : "memory");
}

// [PTX ISA, mbarrier.arrive] One arrival, with release order: what this thread did before is seen by the waiters.
__device__ __forceinline__ void mbarrier_arrive(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(bar) : "memory");
}

// [PTX ISA, mbarrier.arrive] `count` arrivals at once.
__device__ __forceinline__ void mbarrier_arrive_count(u32 bar, u32 count) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" : : "r"(bar), "r"(count) : "memory");
}

// [PTX ISA, mbarrier.expect_tx] The current phase also waits for `bytes` bytes; no arrival.
__device__ __forceinline__ void mbarrier_expect_tx(u32 bar, u32 bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" : : "r"(bar), "r"(bytes) : "memory");
}

// [PTX ISA, mbarrier.arrive] expect_tx(bytes), then one arrival: the phase ends with the last byte, not before.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" : : "r"(bar), "r"(bytes) : "memory");
}

// [PTX ISA, mbarrier.try_wait] Whether the phase of this parity has ended; the thread may be suspended for a while
// first. On a fresh barrier parity 1 counts as ended and parity 0 does not.
__device__ __forceinline__ bool mbarrier_try_wait_parity(u32 bar, u32 parity) {
    u32 done;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(done)
        : "r"(bar), "r"(parity)
        : "memory");
    return done != 0;
}

// [PTX ISA, mbarrier.try_wait] The same, and the thread may stay suspended for up to `ns` nanoseconds.
__device__ __forceinline__ bool mbarrier_try_wait_parity_hint(u32 bar, u32 parity, u32 ns) {
    u32 done;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2, %3;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(done)
        : "r"(bar), "r"(parity), "r"(ns)
        : "memory");
    return done != 0;
}

// [PTX ISA, mbarrier.test_wait] Whether the phase of this parity has ended; returns at once.
__device__ __forceinline__ bool mbarrier_test_wait_parity(u32 bar, u32 parity) {
    u32 done;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(done)
        : "r"(bar), "r"(parity)
        : "memory");
    return done != 0;
}

// [PTX ISA, mbarrier.try_wait] Waits until the phase of this parity has ended, with acquire order: the bytes that TMA
// delivered and what the arriving threads wrote can be read afterwards.
__device__ __forceinline__ void mbarrier_wait_parity(u32 bar, u32 parity) {
    while (!mbarrier_try_wait_parity(bar, parity)) {
    }
}

// The same, and the thread may sleep for up to `ns` nanoseconds at a time.
__device__ __forceinline__ void mbarrier_wait_parity_hint(u32 bar, u32 parity, u32 ns) {
    while (!mbarrier_try_wait_parity_hint(bar, parity, ns)) {
    }
}

// [PTX ISA, membar / fence] Makes this thread's mbarrier.init visible to the async proxy and to the cluster.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
}

// [PTX ISA, cp.async.mbarrier.arrive] An arrival that happens when this thread's cp.asyncs so far have landed; .noinc:
// it is one of the arrivals that mbarrier_init counted.
__device__ __forceinline__ void cp_async_mbarrier_arrive_noinc(u32 bar) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" : : "r"(bar) : "memory");
}

}  // namespace cudatma
namespace cudatma {

// [PTX ISA, mma.m16n8k16] d += a b for a warp: a is 16 x 16 by rows, b 16 x 8 by columns, both f16 in 32-bit words; d is
// 16 x 8 fp32. Lane l holds d[0..1] at row l / 4, columns 2 (l % 4) + 0..1, and d[2..3] eight rows below.
__device__ __forceinline__ void mma_m16n8k16_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
        " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// [PTX ISA, mma.m16n8k16] d += a b for a warp: a is 16 x 16 by rows, b 16 x 8 by columns, both bf16 in 32-bit words; d is
// 16 x 8 fp32. Lane l holds d[0..1] at row l / 4, columns 2 (l % 4) + 0..1, and d[2..3] eight rows below.
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
        " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// [PTX ISA, mma.m16n8k32] d += a b for a warp: a is 16 x 32 by rows, b 32 x 8 by columns, both e4m3 in 32-bit words; d is
// 16 x 8 fp32. Lane l holds d[0..1] at row l / 4, columns 2 (l % 4) + 0..1, and d[2..3] eight rows below.
__device__ __forceinline__ void mma_m16n8k32_e4m3(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32"
        " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// [PTX ISA, mma.m16n8k32] d += a b for a warp: a is 16 x 32 by rows, b 32 x 8 by columns, both e5m2 in 32-bit words; d is
// 16 x 8 fp32. Lane l holds d[0..1] at row l / 4, columns 2 (l % 4) + 0..1, and d[2..3] eight rows below.
__device__ __forceinline__ void mma_m16n8k32_e5m2(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.f32.e5m2.e5m2.f32"
        " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace cudatma
namespace cudatma {

// [PTX ISA, Special Registers, %laneid] This thread's place in its warp. ptxas reads it again rather than keep it in a register.
__device__ __forceinline__ u32 laneid() {
    u32 lane;
    asm("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

// [PTX ISA, elect.sync] True in exactly one lane of a warp whose 32 lanes all come here.
__device__ __forceinline__ bool elect_sync() {
    u32 elected;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "elect.sync _|p, 0xffffffff;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(elected));
    return elected != 0;
}

// [PTX ISA, bar] Named barrier `id` (0..15; 0 is __syncthreads'): waits until `threads` threads, whole warps, have come.
__device__ __forceinline__ void bar_sync(u32 id, u32 threads) {
    asm volatile("bar.sync %0, %1;" : : "r"(id), "r"(threads) : "memory");
}

// [PTX ISA, bar] Counts towards such a barrier without waiting; others wait with bar_sync and the same `threads`.
__device__ __forceinline__ void bar_arrive(u32 id, u32 threads) {
    asm volatile("bar.arrive %0, %1;" : : "r"(id), "r"(threads) : "memory");
}
// [PTX ISA, griddepcontrol] Waits until the kernels before this one in the stream are finished and their writes visible.
// Returns at once unless the launch was a programmatic dependent one.
__device__ __forceinline__ void griddepcontrol_wait() {
    asm volatile("griddepcontrol.wait;" : : : "memory");
}

// [PTX ISA, griddepcontrol] The next kernel may start once all CTAs have said so or ended.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" : : : "memory");
}
// [PTX ISA, setmaxnreg] A whole warpgroup raises its registers a thread to Registers (24..256, a multiple of 8); waits
// until the CTA's pool has them.
template <u32 Registers>
__device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(Registers));
}

// [PTX ISA, setmaxnreg] A whole warpgroup gives registers back to the CTA's pool.
template <u32 Registers>
__device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(Registers));
}
}  // namespace cudatma
namespace cudatma {

// [PTX ISA, tensormap.cp_fenceproxy] A whole warp copies a tensor map from shared address `src` to global memory and
// releases it; readers execute fence_proxy_tensormap_acquire_gpu(dst).
__device__ __forceinline__ void tensormap_cp_fenceproxy_release_gpu(TensorMap* dst, u32 src) {
    asm volatile("tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%0], [%1], 128;"
                 :
                 : "l"(__cvta_generic_to_global(dst)), "r"(src)
                 : "memory");
}
// [PTX ISA, tensormap.replace] Changes one field of the tensor map at shared address `map`. No load may be using it.
__device__ __forceinline__ void tensormap_replace_global_address(u32 map, const void* address) {
    asm volatile("tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%0], %1;"
                 :
                 : "r"(map), "l"(__cvta_generic_to_global(address))
                 : "memory");
}

// [PTX ISA, tensormap.replace] The rank less one.
__device__ __forceinline__ void tensormap_replace_rank(u32 map, u32 rank_less_one) {
    asm volatile("tensormap.replace.tile.rank.shared::cta.b1024.b32 [%0], %1;" : : "r"(map), "r"(rank_less_one) : "memory");
}

// [PTX ISA, tensormap.replace] Dimension Ordinal (0 is innermost) of the box, elements.
template <u32 Ordinal>
__device__ __forceinline__ void tensormap_replace_box_dim(u32 map, u32 value) {
    asm volatile("tensormap.replace.tile.box_dim.shared::cta.b1024.b32 [%0], %1, %2;"
                 :
                 : "r"(map), "n"(Ordinal), "r"(value)
                 : "memory");
}

// [PTX ISA, tensormap.replace] Dimension Ordinal (0 is innermost) of the tensor, elements.
template <u32 Ordinal>
__device__ __forceinline__ void tensormap_replace_global_dim(u32 map, u32 value) {
    asm volatile("tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%0], %1, %2;"
                 :
                 : "r"(map), "n"(Ordinal), "r"(value)
                 : "memory");
}

// [PTX ISA, tensormap.replace] Dimension Ordinal (0 is innermost) of the step, elements.
template <u32 Ordinal>
__device__ __forceinline__ void tensormap_replace_element_stride(u32 map, u32 value) {
    asm volatile("tensormap.replace.tile.element_stride.shared::cta.b1024.b32 [%0], %1, %2;"
                 :
                 : "r"(map), "n"(Ordinal), "r"(value)
                 : "memory");
}

// [PTX ISA, tensormap.replace] The stride of dimension Ordinal + 1, bytes.
template <u32 Ordinal>
__device__ __forceinline__ void tensormap_replace_global_stride(u32 map, u64 stride_bytes) {
    asm volatile("tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [%0], %1, %2;"
                 :
                 : "r"(map), "n"(Ordinal), "l"(stride_bytes)
                 : "memory");
}

// [PTX ISA, tensormap.replace] elemtype, by the number that PTX gives it.
template <u32 Value>
__device__ __forceinline__ void tensormap_replace_elemtype(u32 map) {
    asm volatile("tensormap.replace.tile.elemtype.shared::cta.b1024.b32 [%0], %1;" : : "r"(map), "n"(Value) : "memory");
}

// [PTX ISA, tensormap.replace] interleave_layout, by the number that PTX gives it.
template <u32 Value>
__device__ __forceinline__ void tensormap_replace_interleave_layout(u32 map) {
    asm volatile("tensormap.replace.tile.interleave_layout.shared::cta.b1024.b32 [%0], %1;" : : "r"(map), "n"(Value) : "memory");
}

// [PTX ISA, tensormap.replace] swizzle_mode, by the number that PTX gives it.
template <u32 Value>
__device__ __forceinline__ void tensormap_replace_swizzle_mode(u32 map) {
    asm volatile("tensormap.replace.tile.swizzle_mode.shared::cta.b1024.b32 [%0], %1;" : : "r"(map), "n"(Value) : "memory");
}

// [PTX ISA, tensormap.replace] fill_mode, by the number that PTX gives it.
template <u32 Value>
__device__ __forceinline__ void tensormap_replace_fill_mode(u32 map) {
    asm volatile("tensormap.replace.tile.fill_mode.shared::cta.b1024.b32 [%0], %1;" : : "r"(map), "n"(Value) : "memory");
}

}  // namespace cudatma
namespace cudatma {
}  // namespace cudatma

namespace cudatma {

// [PTX ISA, cp.async.bulk.tensor, .im2col] The columns of a convolution's window: c0 is the channel, then w, (h, (d,))
// and n of the first pixel; offset0.. are the filter's position along w, (h, (d)). Pixels outside of the map's
// bounding box are zero, `bar` receives all the bytes.
//   _im2col_store     the way back, without offsets.
//   _im2col_prefetch  to L2 only; see tma_prefetch.
__device__ __forceinline__ void cp_async_bulk_tensor_3d_im2col_load(
    u32 dst, const TensorMap* map, u32 bar, int c0, int c1, int c2, u16 offset0) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cta.global.im2col.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5}], [%2], {%6};"
        :
        : "r"(dst), "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "h"(offset0)
        : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_3d_im2col_store(
    const TensorMap* map, u32 src, int c0, int c1, int c2) {
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.im2col_no_offs.bulk_group"
        " [%0, {%2, %3, %4}], [%1];"
        :
        : "l"(map), "r"(src), "r"(c0), "r"(c1), "r"(c2)
        : "memory");
}

__device__ __forceinline__ void cp_async_bulk_prefetch_tensor_3d_im2col(
    const TensorMap* map, int c0, int c1, int c2, u16 offset0) {
    asm volatile(
        "cp.async.bulk.prefetch.tensor.3d.L2.global.im2col [%0, {%1, %2, %3}], {%4};"
        :
        : "l"(map), "r"(c0), "r"(c1), "r"(c2), "h"(offset0)
        : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_4d_im2col_load(
    u32 dst, const TensorMap* map, u32 bar, int c0, int c1, int c2, int c3, u16 offset0, u16 offset1) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cta.global.im2col.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8};"
        :
        : "r"(dst), "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(offset0), "h"(offset1)
        : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_4d_im2col_store(
    const TensorMap* map, u32 src, int c0, int c1, int c2, int c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.im2col_no_offs.bulk_group"
        " [%0, {%2, %3, %4, %5}], [%1];"
        :
        : "l"(map), "r"(src), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}

__device__ __forceinline__ void cp_async_bulk_prefetch_tensor_4d_im2col(
    const TensorMap* map, int c0, int c1, int c2, int c3, u16 offset0, u16 offset1) {
    asm volatile(
        "cp.async.bulk.prefetch.tensor.4d.L2.global.im2col [%0, {%1, %2, %3, %4}], {%5, %6};"
        :
        : "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(offset0), "h"(offset1)
        : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_5d_im2col_load(
    u32 dst, const TensorMap* map, u32 bar, int c0, int c1, int c2, int c3, int c4, u16 offset0, u16 offset1, u16 offset2) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cta.global.im2col.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5, %6, %7}], [%2], {%8, %9, %10};"
        :
        : "r"(dst), "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "h"(offset0), "h"(offset1), "h"(offset2)
        : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_5d_im2col_store(
    const TensorMap* map, u32 src, int c0, int c1, int c2, int c3, int c4) {
    asm volatile(
        "cp.async.bulk.tensor.5d.global.shared::cta.im2col_no_offs.bulk_group"
        " [%0, {%2, %3, %4, %5, %6}], [%1];"
        :
        : "l"(map), "r"(src), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
        : "memory");
}

__device__ __forceinline__ void cp_async_bulk_prefetch_tensor_5d_im2col(
    const TensorMap* map, int c0, int c1, int c2, int c3, int c4, u16 offset0, u16 offset1, u16 offset2) {
    asm volatile(
        "cp.async.bulk.prefetch.tensor.5d.L2.global.im2col [%0, {%1, %2, %3, %4, %5}], {%6, %7, %8};"
        :
        : "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "h"(offset0), "h"(offset1), "h"(offset2)
        : "memory");
}

}  // namespace cudatma

namespace cudatma {

// [PTX ISA, cp.async.bulk.tensor] One thread asks for the box of `map` at (c0, c1, ..), c0 innermost, counted in
// elements, to be written to shared address `dst` (aligned to 128 bytes, to 1024 under the 128-byte swizzle).
// Elements outside of the tensor arrive as the fill value. `bar` receives the box's bytes, those outside included.
//   _hint       the L2 policy of createpolicy_*.
//   _multicast  to the same offset in every CTA of the cluster whose bit is set in `mask`; each such CTA's
//               barrier at the offset of `bar` receives the bytes, and must be armed before.
__device__ __forceinline__ void cp_async_bulk_tensor_1d_load(
    u32 dst, const TensorMap* map, u32 bar, int c0) {
    asm volatile(
        "cp.async.bulk.tensor.1d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3}], [%2];"
        :
        : "r"(dst), "l"(map), "r"(bar), "r"(c0)
        : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_1d_load_hint(
    u32 dst, const TensorMap* map, u32 bar, int c0, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.1d.shared::cta.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%4}], [%2], %3;"
        :
        : "r"(dst), "l"(map), "r"(bar), "l"(policy), "r"(c0)
        : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_1d_load_multicast(
    u32 dst, const TensorMap* map, u32 bar, int c0, u16 mask) {
    asm volatile(
        "cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%4}], [%2], %3;"
        :
        : "r"(dst), "l"(map), "r"(bar), "h"(mask), "r"(c0)
        : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_1d_load_multicast_hint(
    u32 dst, const TensorMap* map, u32 bar, int c0, u16 mask, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster.L2::cache_hint [%0], [%1, {%5}], [%2], %3, %4;"
        :
        : "r"(dst), "l"(map), "r"(bar), "h"(mask), "l"(policy), "r"(c0)
        : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_2d_load(
    u32 dst, const TensorMap* map, u32 bar, int c0, int c1) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4}], [%2];"
        :
        : "r"(dst), "l"(map), "r"(bar), "r"(c0), "r"(c1)
        : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_2d_load_hint(
    u32 dst, const TensorMap* map, u32 bar, int c0, int c1, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%4, %5}], [%2], %3;"
        :
        : "r"(dst), "l"(map), "r"(bar), "l"(policy), "r"(c0), "r"(c1)
        : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_2d_load_multicast(
    u32 dst, const TensorMap* map, u32 bar, int c0, int c1, u16 mask) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%4, %5}], [%2], %3;"
        :
        : "r"(dst), "l"(map), "r"(bar), "h"(mask), "r"(c0), "r"(c1)
        : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_2d_load_multicast_hint(
    u32 dst, const TensorMap* map, u32 bar, int c0, int c1, u16 mask, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster.L2::cache_hint [%0], [%1, {%5, %6}], [%2], %3, %4;"
        :
        : "r"(dst), "l"(map), "r"(bar), "h"(mask), "l"(policy), "r"(c0), "r"(c1)
        : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_3d_load(
    u32 dst, const TensorMap* map, u32 bar, int c0, int c1, int c2) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5}], [%2];"
        :
        : "r"(dst), "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2)
        : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_3d_load_hint(
    u32 dst, const TensorMap* map, u32 bar, int c0, int c1, int c2, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cta.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%4, %5, %6}], [%2], %3;"
        :
        : "r"(dst), "l"(map), "r"(bar), "l"(policy), "r"(c0), "r"(c1), "r"(c2)
        : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_3d_load_multicast(
    u32 dst, const TensorMap* map, u32 bar, int c0, int c1, int c2, u16 mask) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%4, %5, %6}], [%2], %3;"
        :
        : "r"(dst), "l"(map), "r"(bar), "h"(mask), "r"(c0), "r"(c1), "r"(c2)
        : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_3d_load_multicast_hint(
    u32 dst, const TensorMap* map, u32 bar, int c0, int c1, int c2, u16 mask, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster.L2::cache_hint [%0], [%1, {%5, %6, %7}], [%2], %3, %4;"
        :
        : "r"(dst), "l"(map), "r"(bar), "h"(mask), "l"(policy), "r"(c0), "r"(c1), "r"(c2)
        : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_4d_load(
    u32 dst, const TensorMap* map, u32 bar, int c0, int c1, int c2, int c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5, %6}], [%2];"
        :
        : "r"(dst), "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_4d_load_hint(
    u32 dst, const TensorMap* map, u32 bar, int c0, int c1, int c2, int c3, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cta.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%4, %5, %6, %7}], [%2], %3;"
        :
        : "r"(dst), "l"(map), "r"(bar), "l"(policy), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_4d_load_multicast(
    u32 dst, const TensorMap* map, u32 bar, int c0, int c1, int c2, int c3, u16 mask) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%4, %5, %6, %7}], [%2], %3;"
        :
        : "r"(dst), "l"(map), "r"(bar), "h"(mask), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_4d_load_multicast_hint(
    u32 dst, const TensorMap* map, u32 bar, int c0, int c1, int c2, int c3, u16 mask, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster.L2::cache_hint [%0], [%1, {%5, %6, %7, %8}], [%2], %3, %4;"
        :
        : "r"(dst), "l"(map), "r"(bar), "h"(mask), "l"(policy), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_5d_load(
    u32 dst, const TensorMap* map, u32 bar, int c0, int c1, int c2, int c3, int c4) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];"
        :
        : "r"(dst), "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
        : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_5d_load_hint(
    u32 dst, const TensorMap* map, u32 bar, int c0, int c1, int c2, int c3, int c4, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cta.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%4, %5, %6, %7, %8}], [%2], %3;"
        :
        : "r"(dst), "l"(map), "r"(bar), "l"(policy), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
        : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_5d_load_multicast(
    u32 dst, const TensorMap* map, u32 bar, int c0, int c1, int c2, int c3, int c4, u16 mask) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%4, %5, %6, %7, %8}], [%2], %3;"
        :
        : "r"(dst), "l"(map), "r"(bar), "h"(mask), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
        : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_5d_load_multicast_hint(
    u32 dst, const TensorMap* map, u32 bar, int c0, int c1, int c2, int c3, int c4, u16 mask, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster.L2::cache_hint [%0], [%1, {%5, %6, %7, %8, %9}], [%2], %3, %4;"
        :
        : "r"(dst), "l"(map), "r"(bar), "h"(mask), "l"(policy), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
        : "memory");
}

}  // namespace cudatma
namespace cudatma {

// [PTX ISA, cp.async.bulk.prefetch.tensor] Brings the box at (c0, c1, ..) to L2; nobody is told when it is there.
__device__ __forceinline__ void cp_async_bulk_prefetch_tensor_1d(
    const TensorMap* map, int c0) {
    asm volatile(
        "cp.async.bulk.prefetch.tensor.1d.L2.global.tile [%0, {%1}];"
        :
        : "l"(map), "r"(c0)
        : "memory");
}

__device__ __forceinline__ void cp_async_bulk_prefetch_tensor_2d(
    const TensorMap* map, int c0, int c1) {
    asm volatile(
        "cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];"
        :
        : "l"(map), "r"(c0), "r"(c1)
        : "memory");
}

__device__ __forceinline__ void cp_async_bulk_prefetch_tensor_3d(
    const TensorMap* map, int c0, int c1, int c2) {
    asm volatile(
        "cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];"
        :
        : "l"(map), "r"(c0), "r"(c1), "r"(c2)
        : "memory");
}

__device__ __forceinline__ void cp_async_bulk_prefetch_tensor_4d(
    const TensorMap* map, int c0, int c1, int c2, int c3) {
    asm volatile(
        "cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];"
        :
        : "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}

__device__ __forceinline__ void cp_async_bulk_prefetch_tensor_5d(
    const TensorMap* map, int c0, int c1, int c2, int c3, int c4) {
    asm volatile(
        "cp.async.bulk.prefetch.tensor.5d.L2.global.tile [%0, {%1, %2, %3, %4, %5}];"
        :
        : "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
        : "memory");
}

// [PTX ISA, prefetch] Brings the 128 bytes of a tensor map to the descriptor cache before the first load needs them.
__device__ __forceinline__ void prefetch_tensormap(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" : : "l"(map) : "memory");
}

// [PTX ISA, cp.async.bulk.prefetch] Brings `bytes` bytes at `src` to L2; address and size are multiples of 16.
__device__ __forceinline__ void cp_async_bulk_prefetch(const void* src, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;"
                 :
                 : "l"(__cvta_generic_to_global(src)), "r"(bytes)
                 : "memory");
}

}  // namespace cudatma

namespace cudatma {

// [PTX ISA, cp.reduce.async.bulk.tensor] Like the tile store, but each element of `map` becomes op(old, new); each
// element is atomic by itself. add: u32 s32 u64 f32 f16 bf16; min, max: u32 s32 u64 s64 f16 bf16; and, or, xor: 32-
// and 64-bit unsigned; inc, dec: u32 (inc: old >= new ? 0 : old + 1; dec: old == 0 or old > new ? new : old - 1).
__device__ __forceinline__ void cp_reduce_async_bulk_tensor_1d_add(
    const TensorMap* map, u32 src, int c0) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.1d.global.shared::cta.add.tile.bulk_group"
        " [%0, {%2}], [%1];"
        :
        : "l"(map), "r"(src), "r"(c0)
        : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_tensor_2d_add(
    const TensorMap* map, u32 src, int c0, int c1) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group"
        " [%0, {%2, %3}], [%1];"
        :
        : "l"(map), "r"(src), "r"(c0), "r"(c1)
        : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_tensor_3d_add(
    const TensorMap* map, u32 src, int c0, int c1, int c2) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group"
        " [%0, {%2, %3, %4}], [%1];"
        :
        : "l"(map), "r"(src), "r"(c0), "r"(c1), "r"(c2)
        : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_tensor_4d_add(
    const TensorMap* map, u32 src, int c0, int c1, int c2, int c3) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group"
        " [%0, {%2, %3, %4, %5}], [%1];"
        :
        : "l"(map), "r"(src), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_tensor_5d_add(
    const TensorMap* map, u32 src, int c0, int c1, int c2, int c3, int c4) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.5d.global.shared::cta.add.tile.bulk_group"
        " [%0, {%2, %3, %4, %5, %6}], [%1];"
        :
        : "l"(map), "r"(src), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
        : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_tensor_1d_min(
    const TensorMap* map, u32 src, int c0) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.1d.global.shared::cta.min.tile.bulk_group"
        " [%0, {%2}], [%1];"
        :
        : "l"(map), "r"(src), "r"(c0)
        : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_tensor_2d_min(
    const TensorMap* map, u32 src, int c0, int c1) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.min.tile.bulk_group"
        " [%0, {%2, %3}], [%1];"
        :
        : "l"(map), "r"(src), "r"(c0), "r"(c1)
        : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_tensor_3d_min(
    const TensorMap* map, u32 src, int c0, int c1, int c2) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.3d.global.shared::cta.min.tile.bulk_group"
        " [%0, {%2, %3, %4}], [%1];"
        :
        : "l"(map), "r"(src), "r"(c0), "r"(c1), "r"(c2)
        : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_tensor_4d_min(
    const TensorMap* map, u32 src, int c0, int c1, int c2, int c3) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.4d.global.shared::cta.min.tile.bulk_group"
        " [%0, {%2, %3, %4, %5}], [%1];"
        :
        : "l"(map), "r"(src), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_tensor_5d_min(
    const TensorMap* map, u32 src, int c0, int c1, int c2, int c3, int c4) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.5d.global.shared::cta.min.tile.bulk_group"
        " [%0, {%2, %3, %4, %5, %6}], [%1];"
        :
        : "l"(map), "r"(src), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
        : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_tensor_1d_max(
    const TensorMap* map, u32 src, int c0) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.1d.global.shared::cta.max.tile.bulk_group"
        " [%0, {%2}], [%1];"
        :
        : "l"(map), "r"(src), "r"(c0)
        : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_tensor_2d_max(
    const TensorMap* map, u32 src, int c0, int c1) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.max.tile.bulk_group"
        " [%0, {%2, %3}], [%1];"
        :
        : "l"(map), "r"(src), "r"(c0), "r"(c1)
        : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_tensor_3d_max(
    const TensorMap* map, u32 src, int c0, int c1, int c2) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.3d.global.shared::cta.max.tile.bulk_group"
        " [%0, {%2, %3, %4}], [%1];"
        :
        : "l"(map), "r"(src), "r"(c0), "r"(c1), "r"(c2)
        : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_tensor_4d_max(
    const TensorMap* map, u32 src, int c0, int c1, int c2, int c3) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.4d.global.shared::cta.max.tile.bulk_group"
        " [%0, {%2, %3, %4, %5}], [%1];"
        :
        : "l"(map), "r"(src), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_tensor_5d_max(
    const TensorMap* map, u32 src, int c0, int c1, int c2, int c3, int c4) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.5d.global.shared::cta.max.tile.bulk_group"
        " [%0, {%2, %3, %4, %5, %6}], [%1];"
        :
        : "l"(map), "r"(src), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
        : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_tensor_1d_inc(
    const TensorMap* map, u32 src, int c0) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.1d.global.shared::cta.inc.tile.bulk_group"
        " [%0, {%2}], [%1];"
        :
        : "l"(map), "r"(src), "r"(c0)
        : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_tensor_2d_inc(
    const TensorMap* map, u32 src, int c0, int c1) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.inc.tile.bulk_group"
        " [%0, {%2, %3}], [%1];"
        :
        : "l"(map), "r"(src), "r"(c0), "r"(c1)
        : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_tensor_3d_inc(
    const TensorMap* map, u32 src, int c0, int c1, int c2) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.3d.global.shared::cta.inc.tile.bulk_group"
        " [%0, {%2, %3, %4}], [%1];"
        :
        : "l"(map), "r"(src), "r"(c0), "r"(c1), "r"(c2)
        : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_tensor_4d_inc(
    const TensorMap* map, u32 src, int c0, int c1, int c2, int c3) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.4d.global.shared::cta.inc.tile.bulk_group"
        " [%0, {%2, %3, %4, %5}], [%1];"
        :
        : "l"(map), "r"(src), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_tensor_5d_inc(
    const TensorMap* map, u32 src, int c0, int c1, int c2, int c3, int c4) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.5d.global.shared::cta.inc.tile.bulk_group"
        " [%0, {%2, %3, %4, %5, %6}], [%1];"
        :
        : "l"(map), "r"(src), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
        : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_tensor_1d_dec(
    const TensorMap* map, u32 src, int c0) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.1d.global.shared::cta.dec.tile.bulk_group"
        " [%0, {%2}], [%1];"
        :
        : "l"(map), "r"(src), "r"(c0)
        : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_tensor_2d_dec(
    const TensorMap* map, u32 src, int c0, int c1) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.dec.tile.bulk_group"
        " [%0, {%2, %3}], [%1];"
        :
        : "l"(map), "r"(src), "r"(c0), "r"(c1)
        : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_tensor_3d_dec(
    const TensorMap* map, u32 src, int c0, int c1, int c2) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.3d.global.shared::cta.dec.tile.bulk_group"
        " [%0, {%2, %3, %4}], [%1];"
        :
        : "l"(map), "r"(src), "r"(c0), "r"(c1), "r"(c2)
        : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_tensor_4d_dec(
    const TensorMap* map, u32 src, int c0, int c1, int c2, int c3) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.4d.global.shared::cta.dec.tile.bulk_group"
        " [%0, {%2, %3, %4, %5}], [%1];"
        :
        : "l"(map), "r"(src), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_tensor_5d_dec(
    const TensorMap* map, u32 src, int c0, int c1, int c2, int c3, int c4) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.5d.global.shared::cta.dec.tile.bulk_group"
        " [%0, {%2, %3, %4, %5, %6}], [%1];"
        :
        : "l"(map), "r"(src), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
        : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_tensor_1d_and(
    const TensorMap* map, u32 src, int c0) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.1d.global.shared::cta.and.tile.bulk_group"
        " [%0, {%2}], [%1];"
        :
        : "l"(map), "r"(src), "r"(c0)
        : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_tensor_2d_and(
    const TensorMap* map, u32 src, int c0, int c1) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.and.tile.bulk_group"
        " [%0, {%2, %3}], [%1];"
        :
        : "l"(map), "r"(src), "r"(c0), "r"(c1)
        : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_tensor_3d_and(
    const TensorMap* map, u32 src, int c0, int c1, int c2) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.3d.global.shared::cta.and.tile.bulk_group"
        " [%0, {%2, %3, %4}], [%1];"
        :
        : "l"(map), "r"(src), "r"(c0), "r"(c1), "r"(c2)
        : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_tensor_4d_and(
    const TensorMap* map, u32 src, int c0, int c1, int c2, int c3) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.4d.global.shared::cta.and.tile.bulk_group"
        " [%0, {%2, %3, %4, %5}], [%1];"
        :
        : "l"(map), "r"(src), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_tensor_5d_and(
    const TensorMap* map, u32 src, int c0, int c1, int c2, int c3, int c4) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.5d.global.shared::cta.and.tile.bulk_group"
        " [%0, {%2, %3, %4, %5, %6}], [%1];"
        :
        : "l"(map), "r"(src), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
        : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_tensor_1d_or(
    const TensorMap* map, u32 src, int c0) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.1d.global.shared::cta.or.tile.bulk_group"
        " [%0, {%2}], [%1];"
        :
        : "l"(map), "r"(src), "r"(c0)
        : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_tensor_2d_or(
    const TensorMap* map, u32 src, int c0, int c1) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.or.tile.bulk_group"
        " [%0, {%2, %3}], [%1];"
        :
        : "l"(map), "r"(src), "r"(c0), "r"(c1)
        : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_tensor_3d_or(
    const TensorMap* map, u32 src, int c0, int c1, int c2) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.3d.global.shared::cta.or.tile.bulk_group"
        " [%0, {%2, %3, %4}], [%1];"
        :
        : "l"(map), "r"(src), "r"(c0), "r"(c1), "r"(c2)
        : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_tensor_4d_or(
    const TensorMap* map, u32 src, int c0, int c1, int c2, int c3) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.4d.global.shared::cta.or.tile.bulk_group"
        " [%0, {%2, %3, %4, %5}], [%1];"
        :
        : "l"(map), "r"(src), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_tensor_5d_or(
    const TensorMap* map, u32 src, int c0, int c1, int c2, int c3, int c4) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.5d.global.shared::cta.or.tile.bulk_group"
        " [%0, {%2, %3, %4, %5, %6}], [%1];"
        :
        : "l"(map), "r"(src), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
        : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_tensor_1d_xor(
    const TensorMap* map, u32 src, int c0) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.1d.global.shared::cta.xor.tile.bulk_group"
        " [%0, {%2}], [%1];"
        :
        : "l"(map), "r"(src), "r"(c0)
        : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_tensor_2d_xor(
    const TensorMap* map, u32 src, int c0, int c1) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.xor.tile.bulk_group"
        " [%0, {%2, %3}], [%1];"
        :
        : "l"(map), "r"(src), "r"(c0), "r"(c1)
        : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_tensor_3d_xor(
    const TensorMap* map, u32 src, int c0, int c1, int c2) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.3d.global.shared::cta.xor.tile.bulk_group"
        " [%0, {%2, %3, %4}], [%1];"
        :
        : "l"(map), "r"(src), "r"(c0), "r"(c1), "r"(c2)
        : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_tensor_4d_xor(
    const TensorMap* map, u32 src, int c0, int c1, int c2, int c3) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.4d.global.shared::cta.xor.tile.bulk_group"
        " [%0, {%2, %3, %4, %5}], [%1];"
        :
        : "l"(map), "r"(src), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_tensor_5d_xor(
    const TensorMap* map, u32 src, int c0, int c1, int c2, int c3, int c4) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.5d.global.shared::cta.xor.tile.bulk_group"
        " [%0, {%2, %3, %4, %5, %6}], [%1];"
        :
        : "l"(map), "r"(src), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
        : "memory");
}

}  // namespace cudatma
namespace cudatma {

// [PTX ISA, cp.async.bulk.tensor] One thread asks for the box at shared address `src` to be written to `map` at
// (c0, c1, ..), none of them negative; part of the issuing thread's current bulk group. The innermost dimension is
// clipped at 16 bytes, not at the element: keep dim[0] a multiple of 16 bytes. The threads that wrote `src` execute
// fence_proxy_async_shared_cta() before the block-wide barrier that precedes this call.
//   _hint  the L2 policy of createpolicy_*.
__device__ __forceinline__ void cp_async_bulk_tensor_1d_store(
    const TensorMap* map, u32 src, int c0) {
    asm volatile(
        "cp.async.bulk.tensor.1d.global.shared::cta.tile.bulk_group"
        " [%0, {%2}], [%1];"
        :
        : "l"(map), "r"(src), "r"(c0)
        : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_1d_store_hint(
    const TensorMap* map, u32 src, int c0, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.1d.global.shared::cta.tile.bulk_group.L2::cache_hint"
        " [%0, {%3}], [%1], %2;"
        :
        : "l"(map), "r"(src), "l"(policy), "r"(c0)
        : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_2d_store(
    const TensorMap* map, u32 src, int c0, int c1) {
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"
        " [%0, {%2, %3}], [%1];"
        :
        : "l"(map), "r"(src), "r"(c0), "r"(c1)
        : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_2d_store_hint(
    const TensorMap* map, u32 src, int c0, int c1, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group.L2::cache_hint"
        " [%0, {%3, %4}], [%1], %2;"
        :
        : "l"(map), "r"(src), "l"(policy), "r"(c0), "r"(c1)
        : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_3d_store(
    const TensorMap* map, u32 src, int c0, int c1, int c2) {
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group"
        " [%0, {%2, %3, %4}], [%1];"
        :
        : "l"(map), "r"(src), "r"(c0), "r"(c1), "r"(c2)
        : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_3d_store_hint(
    const TensorMap* map, u32 src, int c0, int c1, int c2, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group.L2::cache_hint"
        " [%0, {%3, %4, %5}], [%1], %2;"
        :
        : "l"(map), "r"(src), "l"(policy), "r"(c0), "r"(c1), "r"(c2)
        : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_4d_store(
    const TensorMap* map, u32 src, int c0, int c1, int c2, int c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group"
        " [%0, {%2, %3, %4, %5}], [%1];"
        :
        : "l"(map), "r"(src), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_4d_store_hint(
    const TensorMap* map, u32 src, int c0, int c1, int c2, int c3, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group.L2::cache_hint"
        " [%0, {%3, %4, %5, %6}], [%1], %2;"
        :
        : "l"(map), "r"(src), "l"(policy), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_5d_store(
    const TensorMap* map, u32 src, int c0, int c1, int c2, int c3, int c4) {
    asm volatile(
        "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group"
        " [%0, {%2, %3, %4, %5, %6}], [%1];"
        :
        : "l"(map), "r"(src), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
        : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_5d_store_hint(
    const TensorMap* map, u32 src, int c0, int c1, int c2, int c3, int c4, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group.L2::cache_hint"
        " [%0, {%3, %4, %5, %6, %7}], [%1], %2;"
        :
        : "l"(map), "r"(src), "l"(policy), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
        : "memory");
}

}  // namespace cudatma
namespace cudatma {
// [PTX ISA, Asynchronous Warpgroup Level Matrix, Matrix Descriptor] Where an operand lies in shared memory. For rows of K under
// a swizzle: stride_bytes from 8 rows to the next 8, leading_bytes unused. swizzle: 0 none, 1 128B, 2 64B, 3 32B: the numbers run
// the other way than a tensor map's. A later k16 step of the same rows is 32 bytes further: 2 in the descriptor's low bits.
// For rows of M or N (a transposed operand): stride_bytes from 8 of K to the next 8, leading_bytes from 64 of M or N to the next.
__device__ __forceinline__ u64 matrix_descriptor(u32 address, u32 leading_bytes, u32 stride_bytes, u32 swizzle) {
    return static_cast<u64>((address & 0x3ffff) >> 4) | static_cast<u64>(leading_bytes >> 4) << 16 |
           static_cast<u64>(stride_bytes >> 4) << 32 | static_cast<u64>(swizzle) << 62;
}

// [PTX ISA, wgmma.fence] Registers that the warpgroup wrote before may be operands of the wgmmas behind it.
__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" : : : "memory");
}

// [PTX ISA, wgmma.commit_group] The wgmmas issued since the last one become a group.
__device__ __forceinline__ void wgmma_commit_group() {
    asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory");
}

// [PTX ISA, wgmma.wait_group] Waits until at most the Newest (0..7) latest groups are in flight.
template <u32 Newest>
__device__ __forceinline__ void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(Newest) : "memory");
}
}  // namespace cudatma
namespace cudatma {
// [PTX ISA, wgmma.mma_async] d += a b for a warpgroup, or d = a b, whatever d was, where `accumulates` is false (the same in all threads): a is 64 x 16 by rows, b 16 x n by columns, both 16-bit; d is fp32. Warp i of
// the warpgroup holds rows 16 i ..: a as operand A of mma.m16n8k16, d[j] as its accumulators of columns 8 j ... b is a matrix
// descriptor; so is a in the functions that end in _ss. Between wgmma_fence and wgmma_wait_group nothing else may touch a or d.
__device__ __forceinline__ void wgmma_m64n8k16_f32_f16(float (&d)[1][4], const u32 (&a)[4], u64 b, bool accumulates = true) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %9, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {"
        "%0, %1, %2, %3"
        "}, {%4, %5, %6, %7}, %8, p, 1, 1, 0;\n"
        "}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((u32)accumulates)
        : "memory");
}

__device__ __forceinline__ void wgmma_m64n8k16_f32_f16_ss(float (&d)[1][4], u64 a, u64 b, bool accumulates = true) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %6, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {"
        "%0, %1, %2, %3"
        "}, %4, %5, p, 1, 1, 0, 0;\n"
        "}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3])
        : "l"(a), "l"(b), "r"((u32)accumulates)
        : "memory");
}

__device__ __forceinline__ void wgmma_m64n16k16_f32_f16(float (&d)[2][4], const u32 (&a)[4], u64 b, bool accumulates = true) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %13, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7"
        "}, {%8, %9, %10, %11}, %12, p, 1, 1, 0;\n"
        "}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((u32)accumulates)
        : "memory");
}

__device__ __forceinline__ void wgmma_m64n16k16_f32_f16_ss(float (&d)[2][4], u64 a, u64 b, bool accumulates = true) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %10, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7"
        "}, %8, %9, p, 1, 1, 0, 0;\n"
        "}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3])
        : "l"(a), "l"(b), "r"((u32)accumulates)
        : "memory");
}

__device__ __forceinline__ void wgmma_m64n32k16_f32_f16(float (&d)[4][4], const u32 (&a)[4], u64 b, bool accumulates = true) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %21, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
        "}, {%16, %17, %18, %19}, %20, p, 1, 1, 0;\n"
        "}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((u32)accumulates)
        : "memory");
}

__device__ __forceinline__ void wgmma_m64n32k16_f32_f16_ss(float (&d)[4][4], u64 a, u64 b, bool accumulates = true) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
        "}, %16, %17, p, 1, 1, 0, 0;\n"
        "}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3])
        : "l"(a), "l"(b), "r"((u32)accumulates)
        : "memory");
}

__device__ __forceinline__ void wgmma_m64n64k16_f32_f16(float (&d)[8][4], const u32 (&a)[4], u64 b, bool accumulates = true) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n"
        "}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((u32)accumulates)
        : "memory");
}

__device__ __forceinline__ void wgmma_m64n64k16_f32_f16_ss(float (&d)[8][4], u64 a, u64 b, bool accumulates = true) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, %32, %33, p, 1, 1, 0, 0;\n"
        "}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
        : "l"(a), "l"(b), "r"((u32)accumulates)
        : "memory");
}

__device__ __forceinline__ void wgmma_m64n96k16_f32_f16(float (&d)[12][4], const u32 (&a)[4], u64 b, bool accumulates = true) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %53, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n96k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
        "}, {%48, %49, %50, %51}, %52, p, 1, 1, 0;\n"
        "}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]),
          "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]), "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]), "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((u32)accumulates)
        : "memory");
}

__device__ __forceinline__ void wgmma_m64n96k16_f32_f16_ss(float (&d)[12][4], u64 a, u64 b, bool accumulates = true) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %50, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n96k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
        "}, %48, %49, p, 1, 1, 0, 0;\n"
        "}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]),
          "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]), "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]), "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3])
        : "l"(a), "l"(b), "r"((u32)accumulates)
        : "memory");
}

__device__ __forceinline__ void wgmma_m64n128k16_f32_f16(float (&d)[16][4], const u32 (&a)[4], u64 b, bool accumulates = true) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, {%64, %65, %66, %67}, %68, p, 1, 1, 0;\n"
        "}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]),
          "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]), "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]), "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3]),
          "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]), "+f"(d[13][0]), "+f"(d[13][1]), "+f"(d[13][2]), "+f"(d[13][3]), "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]), "+f"(d[15][0]), "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((u32)accumulates)
        : "memory");
}

__device__ __forceinline__ void wgmma_m64n128k16_f32_f16_ss(float (&d)[16][4], u64 a, u64 b, bool accumulates = true) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, %64, %65, p, 1, 1, 0, 0;\n"
        "}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]),
          "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]), "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]), "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3]),
          "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]), "+f"(d[13][0]), "+f"(d[13][1]), "+f"(d[13][2]), "+f"(d[13][3]), "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]), "+f"(d[15][0]), "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3])
        : "l"(a), "l"(b), "r"((u32)accumulates)
        : "memory");
}

__device__ __forceinline__ void wgmma_m64n192k16_f32_f16(float (&d)[24][4], const u32 (&a)[4], u64 b, bool accumulates = true) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %101, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n192k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
        "}, {%96, %97, %98, %99}, %100, p, 1, 1, 0;\n"
        "}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]),
          "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]), "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]), "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3]),
          "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]), "+f"(d[13][0]), "+f"(d[13][1]), "+f"(d[13][2]), "+f"(d[13][3]), "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]), "+f"(d[15][0]), "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3]),
          "+f"(d[16][0]), "+f"(d[16][1]), "+f"(d[16][2]), "+f"(d[16][3]), "+f"(d[17][0]), "+f"(d[17][1]), "+f"(d[17][2]), "+f"(d[17][3]), "+f"(d[18][0]), "+f"(d[18][1]), "+f"(d[18][2]), "+f"(d[18][3]), "+f"(d[19][0]), "+f"(d[19][1]), "+f"(d[19][2]), "+f"(d[19][3]),
          "+f"(d[20][0]), "+f"(d[20][1]), "+f"(d[20][2]), "+f"(d[20][3]), "+f"(d[21][0]), "+f"(d[21][1]), "+f"(d[21][2]), "+f"(d[21][3]), "+f"(d[22][0]), "+f"(d[22][1]), "+f"(d[22][2]), "+f"(d[22][3]), "+f"(d[23][0]), "+f"(d[23][1]), "+f"(d[23][2]), "+f"(d[23][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((u32)accumulates)
        : "memory");
}

__device__ __forceinline__ void wgmma_m64n192k16_f32_f16_ss(float (&d)[24][4], u64 a, u64 b, bool accumulates = true) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %98, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n192k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
        "}, %96, %97, p, 1, 1, 0, 0;\n"
        "}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]),
          "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]), "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]), "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3]),
          "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]), "+f"(d[13][0]), "+f"(d[13][1]), "+f"(d[13][2]), "+f"(d[13][3]), "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]), "+f"(d[15][0]), "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3]),
          "+f"(d[16][0]), "+f"(d[16][1]), "+f"(d[16][2]), "+f"(d[16][3]), "+f"(d[17][0]), "+f"(d[17][1]), "+f"(d[17][2]), "+f"(d[17][3]), "+f"(d[18][0]), "+f"(d[18][1]), "+f"(d[18][2]), "+f"(d[18][3]), "+f"(d[19][0]), "+f"(d[19][1]), "+f"(d[19][2]), "+f"(d[19][3]),
          "+f"(d[20][0]), "+f"(d[20][1]), "+f"(d[20][2]), "+f"(d[20][3]), "+f"(d[21][0]), "+f"(d[21][1]), "+f"(d[21][2]), "+f"(d[21][3]), "+f"(d[22][0]), "+f"(d[22][1]), "+f"(d[22][2]), "+f"(d[22][3]), "+f"(d[23][0]), "+f"(d[23][1]), "+f"(d[23][2]), "+f"(d[23][3])
        : "l"(a), "l"(b), "r"((u32)accumulates)
        : "memory");
}

__device__ __forceinline__ void wgmma_m64n256k16_f32_f16(float (&d)[32][4], const u32 (&a)[4], u64 b, bool accumulates = true) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %133, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
        "}, {%128, %129, %130, %131}, %132, p, 1, 1, 0;\n"
        "}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]),
          "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]), "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]), "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3]),
          "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]), "+f"(d[13][0]), "+f"(d[13][1]), "+f"(d[13][2]), "+f"(d[13][3]), "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]), "+f"(d[15][0]), "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3]),
          "+f"(d[16][0]), "+f"(d[16][1]), "+f"(d[16][2]), "+f"(d[16][3]), "+f"(d[17][0]), "+f"(d[17][1]), "+f"(d[17][2]), "+f"(d[17][3]), "+f"(d[18][0]), "+f"(d[18][1]), "+f"(d[18][2]), "+f"(d[18][3]), "+f"(d[19][0]), "+f"(d[19][1]), "+f"(d[19][2]), "+f"(d[19][3]),
          "+f"(d[20][0]), "+f"(d[20][1]), "+f"(d[20][2]), "+f"(d[20][3]), "+f"(d[21][0]), "+f"(d[21][1]), "+f"(d[21][2]), "+f"(d[21][3]), "+f"(d[22][0]), "+f"(d[22][1]), "+f"(d[22][2]), "+f"(d[22][3]), "+f"(d[23][0]), "+f"(d[23][1]), "+f"(d[23][2]), "+f"(d[23][3]),
          "+f"(d[24][0]), "+f"(d[24][1]), "+f"(d[24][2]), "+f"(d[24][3]), "+f"(d[25][0]), "+f"(d[25][1]), "+f"(d[25][2]), "+f"(d[25][3]), "+f"(d[26][0]), "+f"(d[26][1]), "+f"(d[26][2]), "+f"(d[26][3]), "+f"(d[27][0]), "+f"(d[27][1]), "+f"(d[27][2]), "+f"(d[27][3]),
          "+f"(d[28][0]), "+f"(d[28][1]), "+f"(d[28][2]), "+f"(d[28][3]), "+f"(d[29][0]), "+f"(d[29][1]), "+f"(d[29][2]), "+f"(d[29][3]), "+f"(d[30][0]), "+f"(d[30][1]), "+f"(d[30][2]), "+f"(d[30][3]), "+f"(d[31][0]), "+f"(d[31][1]), "+f"(d[31][2]), "+f"(d[31][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((u32)accumulates)
        : "memory");
}

__device__ __forceinline__ void wgmma_m64n256k16_f32_f16_ss(float (&d)[32][4], u64 a, u64 b, bool accumulates = true) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
        "}, %128, %129, p, 1, 1, 0, 0;\n"
        "}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]),
          "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]), "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]), "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3]),
          "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]), "+f"(d[13][0]), "+f"(d[13][1]), "+f"(d[13][2]), "+f"(d[13][3]), "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]), "+f"(d[15][0]), "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3]),
          "+f"(d[16][0]), "+f"(d[16][1]), "+f"(d[16][2]), "+f"(d[16][3]), "+f"(d[17][0]), "+f"(d[17][1]), "+f"(d[17][2]), "+f"(d[17][3]), "+f"(d[18][0]), "+f"(d[18][1]), "+f"(d[18][2]), "+f"(d[18][3]), "+f"(d[19][0]), "+f"(d[19][1]), "+f"(d[19][2]), "+f"(d[19][3]),
          "+f"(d[20][0]), "+f"(d[20][1]), "+f"(d[20][2]), "+f"(d[20][3]), "+f"(d[21][0]), "+f"(d[21][1]), "+f"(d[21][2]), "+f"(d[21][3]), "+f"(d[22][0]), "+f"(d[22][1]), "+f"(d[22][2]), "+f"(d[22][3]), "+f"(d[23][0]), "+f"(d[23][1]), "+f"(d[23][2]), "+f"(d[23][3]),
          "+f"(d[24][0]), "+f"(d[24][1]), "+f"(d[24][2]), "+f"(d[24][3]), "+f"(d[25][0]), "+f"(d[25][1]), "+f"(d[25][2]), "+f"(d[25][3]), "+f"(d[26][0]), "+f"(d[26][1]), "+f"(d[26][2]), "+f"(d[26][3]), "+f"(d[27][0]), "+f"(d[27][1]), "+f"(d[27][2]), "+f"(d[27][3]),
          "+f"(d[28][0]), "+f"(d[28][1]), "+f"(d[28][2]), "+f"(d[28][3]), "+f"(d[29][0]), "+f"(d[29][1]), "+f"(d[29][2]), "+f"(d[29][3]), "+f"(d[30][0]), "+f"(d[30][1]), "+f"(d[30][2]), "+f"(d[30][3]), "+f"(d[31][0]), "+f"(d[31][1]), "+f"(d[31][2]), "+f"(d[31][3])
        : "l"(a), "l"(b), "r"((u32)accumulates)
        : "memory");
}

__device__ __forceinline__ void wgmma_m64n8k16_f32_bf16(float (&d)[1][4], const u32 (&a)[4], u64 b, bool accumulates = true) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %9, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3"
        "}, {%4, %5, %6, %7}, %8, p, 1, 1, 0;\n"
        "}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((u32)accumulates)
        : "memory");
}

__device__ __forceinline__ void wgmma_m64n8k16_f32_bf16_ss(float (&d)[1][4], u64 a, u64 b, bool accumulates = true) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %6, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3"
        "}, %4, %5, p, 1, 1, 0, 0;\n"
        "}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3])
        : "l"(a), "l"(b), "r"((u32)accumulates)
        : "memory");
}

__device__ __forceinline__ void wgmma_m64n16k16_f32_bf16(float (&d)[2][4], const u32 (&a)[4], u64 b, bool accumulates = true) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %13, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7"
        "}, {%8, %9, %10, %11}, %12, p, 1, 1, 0;\n"
        "}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((u32)accumulates)
        : "memory");
}

__device__ __forceinline__ void wgmma_m64n16k16_f32_bf16_ss(float (&d)[2][4], u64 a, u64 b, bool accumulates = true) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %10, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7"
        "}, %8, %9, p, 1, 1, 0, 0;\n"
        "}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3])
        : "l"(a), "l"(b), "r"((u32)accumulates)
        : "memory");
}

__device__ __forceinline__ void wgmma_m64n32k16_f32_bf16(float (&d)[4][4], const u32 (&a)[4], u64 b, bool accumulates = true) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %21, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
        "}, {%16, %17, %18, %19}, %20, p, 1, 1, 0;\n"
        "}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((u32)accumulates)
        : "memory");
}

__device__ __forceinline__ void wgmma_m64n32k16_f32_bf16_ss(float (&d)[4][4], u64 a, u64 b, bool accumulates = true) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
        "}, %16, %17, p, 1, 1, 0, 0;\n"
        "}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3])
        : "l"(a), "l"(b), "r"((u32)accumulates)
        : "memory");
}

__device__ __forceinline__ void wgmma_m64n64k16_f32_bf16(float (&d)[8][4], const u32 (&a)[4], u64 b, bool accumulates = true) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n"
        "}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((u32)accumulates)
        : "memory");
}

__device__ __forceinline__ void wgmma_m64n64k16_f32_bf16_ss(float (&d)[8][4], u64 a, u64 b, bool accumulates = true) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, %32, %33, p, 1, 1, 0, 0;\n"
        "}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
        : "l"(a), "l"(b), "r"((u32)accumulates)
        : "memory");
}

__device__ __forceinline__ void wgmma_m64n96k16_f32_bf16(float (&d)[12][4], const u32 (&a)[4], u64 b, bool accumulates = true) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %53, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
        "}, {%48, %49, %50, %51}, %52, p, 1, 1, 0;\n"
        "}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]),
          "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]), "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]), "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((u32)accumulates)
        : "memory");
}

__device__ __forceinline__ void wgmma_m64n96k16_f32_bf16_ss(float (&d)[12][4], u64 a, u64 b, bool accumulates = true) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %50, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
        "}, %48, %49, p, 1, 1, 0, 0;\n"
        "}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]),
          "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]), "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]), "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3])
        : "l"(a), "l"(b), "r"((u32)accumulates)
        : "memory");
}

__device__ __forceinline__ void wgmma_m64n128k16_f32_bf16(float (&d)[16][4], const u32 (&a)[4], u64 b, bool accumulates = true) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, {%64, %65, %66, %67}, %68, p, 1, 1, 0;\n"
        "}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]),
          "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]), "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]), "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3]),
          "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]), "+f"(d[13][0]), "+f"(d[13][1]), "+f"(d[13][2]), "+f"(d[13][3]), "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]), "+f"(d[15][0]), "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((u32)accumulates)
        : "memory");
}

__device__ __forceinline__ void wgmma_m64n128k16_f32_bf16_ss(float (&d)[16][4], u64 a, u64 b, bool accumulates = true) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, %64, %65, p, 1, 1, 0, 0;\n"
        "}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]),
          "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]), "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]), "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3]),
          "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]), "+f"(d[13][0]), "+f"(d[13][1]), "+f"(d[13][2]), "+f"(d[13][3]), "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]), "+f"(d[15][0]), "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3])
        : "l"(a), "l"(b), "r"((u32)accumulates)
        : "memory");
}

__device__ __forceinline__ void wgmma_m64n192k16_f32_bf16(float (&d)[24][4], const u32 (&a)[4], u64 b, bool accumulates = true) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %101, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
        "}, {%96, %97, %98, %99}, %100, p, 1, 1, 0;\n"
        "}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]),
          "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]), "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]), "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3]),
          "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]), "+f"(d[13][0]), "+f"(d[13][1]), "+f"(d[13][2]), "+f"(d[13][3]), "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]), "+f"(d[15][0]), "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3]),
          "+f"(d[16][0]), "+f"(d[16][1]), "+f"(d[16][2]), "+f"(d[16][3]), "+f"(d[17][0]), "+f"(d[17][1]), "+f"(d[17][2]), "+f"(d[17][3]), "+f"(d[18][0]), "+f"(d[18][1]), "+f"(d[18][2]), "+f"(d[18][3]), "+f"(d[19][0]), "+f"(d[19][1]), "+f"(d[19][2]), "+f"(d[19][3]),
          "+f"(d[20][0]), "+f"(d[20][1]), "+f"(d[20][2]), "+f"(d[20][3]), "+f"(d[21][0]), "+f"(d[21][1]), "+f"(d[21][2]), "+f"(d[21][3]), "+f"(d[22][0]), "+f"(d[22][1]), "+f"(d[22][2]), "+f"(d[22][3]), "+f"(d[23][0]), "+f"(d[23][1]), "+f"(d[23][2]), "+f"(d[23][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((u32)accumulates)
        : "memory");
}

__device__ __forceinline__ void wgmma_m64n192k16_f32_bf16_ss(float (&d)[24][4], u64 a, u64 b, bool accumulates = true) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %98, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
        "}, %96, %97, p, 1, 1, 0, 0;\n"
        "}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]),
          "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]), "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]), "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3]),
          "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]), "+f"(d[13][0]), "+f"(d[13][1]), "+f"(d[13][2]), "+f"(d[13][3]), "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]), "+f"(d[15][0]), "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3]),
          "+f"(d[16][0]), "+f"(d[16][1]), "+f"(d[16][2]), "+f"(d[16][3]), "+f"(d[17][0]), "+f"(d[17][1]), "+f"(d[17][2]), "+f"(d[17][3]), "+f"(d[18][0]), "+f"(d[18][1]), "+f"(d[18][2]), "+f"(d[18][3]), "+f"(d[19][0]), "+f"(d[19][1]), "+f"(d[19][2]), "+f"(d[19][3]),
          "+f"(d[20][0]), "+f"(d[20][1]), "+f"(d[20][2]), "+f"(d[20][3]), "+f"(d[21][0]), "+f"(d[21][1]), "+f"(d[21][2]), "+f"(d[21][3]), "+f"(d[22][0]), "+f"(d[22][1]), "+f"(d[22][2]), "+f"(d[22][3]), "+f"(d[23][0]), "+f"(d[23][1]), "+f"(d[23][2]), "+f"(d[23][3])
        : "l"(a), "l"(b), "r"((u32)accumulates)
        : "memory");
}

__device__ __forceinline__ void wgmma_m64n256k16_f32_bf16(float (&d)[32][4], const u32 (&a)[4], u64 b, bool accumulates = true) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %133, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
        "}, {%128, %129, %130, %131}, %132, p, 1, 1, 0;\n"
        "}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]),
          "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]), "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]), "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3]),
          "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]), "+f"(d[13][0]), "+f"(d[13][1]), "+f"(d[13][2]), "+f"(d[13][3]), "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]), "+f"(d[15][0]), "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3]),
          "+f"(d[16][0]), "+f"(d[16][1]), "+f"(d[16][2]), "+f"(d[16][3]), "+f"(d[17][0]), "+f"(d[17][1]), "+f"(d[17][2]), "+f"(d[17][3]), "+f"(d[18][0]), "+f"(d[18][1]), "+f"(d[18][2]), "+f"(d[18][3]), "+f"(d[19][0]), "+f"(d[19][1]), "+f"(d[19][2]), "+f"(d[19][3]),
          "+f"(d[20][0]), "+f"(d[20][1]), "+f"(d[20][2]), "+f"(d[20][3]), "+f"(d[21][0]), "+f"(d[21][1]), "+f"(d[21][2]), "+f"(d[21][3]), "+f"(d[22][0]), "+f"(d[22][1]), "+f"(d[22][2]), "+f"(d[22][3]), "+f"(d[23][0]), "+f"(d[23][1]), "+f"(d[23][2]), "+f"(d[23][3]),
          "+f"(d[24][0]), "+f"(d[24][1]), "+f"(d[24][2]), "+f"(d[24][3]), "+f"(d[25][0]), "+f"(d[25][1]), "+f"(d[25][2]), "+f"(d[25][3]), "+f"(d[26][0]), "+f"(d[26][1]), "+f"(d[26][2]), "+f"(d[26][3]), "+f"(d[27][0]), "+f"(d[27][1]), "+f"(d[27][2]), "+f"(d[27][3]),
          "+f"(d[28][0]), "+f"(d[28][1]), "+f"(d[28][2]), "+f"(d[28][3]), "+f"(d[29][0]), "+f"(d[29][1]), "+f"(d[29][2]), "+f"(d[29][3]), "+f"(d[30][0]), "+f"(d[30][1]), "+f"(d[30][2]), "+f"(d[30][3]), "+f"(d[31][0]), "+f"(d[31][1]), "+f"(d[31][2]), "+f"(d[31][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((u32)accumulates)
        : "memory");
}

__device__ __forceinline__ void wgmma_m64n256k16_f32_bf16_ss(float (&d)[32][4], u64 a, u64 b, bool accumulates = true) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
        "}, %128, %129, p, 1, 1, 0, 0;\n"
        "}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]),
          "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]), "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]), "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3]),
          "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]), "+f"(d[13][0]), "+f"(d[13][1]), "+f"(d[13][2]), "+f"(d[13][3]), "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]), "+f"(d[15][0]), "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3]),
          "+f"(d[16][0]), "+f"(d[16][1]), "+f"(d[16][2]), "+f"(d[16][3]), "+f"(d[17][0]), "+f"(d[17][1]), "+f"(d[17][2]), "+f"(d[17][3]), "+f"(d[18][0]), "+f"(d[18][1]), "+f"(d[18][2]), "+f"(d[18][3]), "+f"(d[19][0]), "+f"(d[19][1]), "+f"(d[19][2]), "+f"(d[19][3]),
          "+f"(d[20][0]), "+f"(d[20][1]), "+f"(d[20][2]), "+f"(d[20][3]), "+f"(d[21][0]), "+f"(d[21][1]), "+f"(d[21][2]), "+f"(d[21][3]), "+f"(d[22][0]), "+f"(d[22][1]), "+f"(d[22][2]), "+f"(d[22][3]), "+f"(d[23][0]), "+f"(d[23][1]), "+f"(d[23][2]), "+f"(d[23][3]),
          "+f"(d[24][0]), "+f"(d[24][1]), "+f"(d[24][2]), "+f"(d[24][3]), "+f"(d[25][0]), "+f"(d[25][1]), "+f"(d[25][2]), "+f"(d[25][3]), "+f"(d[26][0]), "+f"(d[26][1]), "+f"(d[26][2]), "+f"(d[26][3]), "+f"(d[27][0]), "+f"(d[27][1]), "+f"(d[27][2]), "+f"(d[27][3]),
          "+f"(d[28][0]), "+f"(d[28][1]), "+f"(d[28][2]), "+f"(d[28][3]), "+f"(d[29][0]), "+f"(d[29][1]), "+f"(d[29][2]), "+f"(d[29][3]), "+f"(d[30][0]), "+f"(d[30][1]), "+f"(d[30][2]), "+f"(d[30][3]), "+f"(d[31][0]), "+f"(d[31][1]), "+f"(d[31][2]), "+f"(d[31][3])
        : "l"(a), "l"(b), "r"((u32)accumulates)
        : "memory");
}

}  // namespace cudatma

namespace cudatma {

// A ring of Stages slots in shared memory, filled by one producer and read by many consumers.
//
// Each slot has two mbarriers: `full` (the producer's arrivals and bytes end a phase; consumers wait for it) and `empty`
// (the consumers' arrivals end a phase; the producer waits for it before it fills the slot again). A thread keeps where
// it stands, `stage` and `phase`, in registers; producer and consumers both start at (0, 0) and advance() once a slot:
//
//     producer   acquire()   expect_tx(bytes)   load(.., get_barrier(), ..)   advance()
//     consumer   wait()      read the slot      release()                     advance()
//
// The expected bytes are exactly those that the loads deliver: with one more wait() never returns, with one less it may
// return before the data. A consumer that wrote the slot with plain stores fences (fence_proxy_async_shared_cta)
// before release().
//
// The forms with a slot number act on that slot in the current lap and leave `stage` alone; next_lap() follows the last.
template <u32 Stages>
struct TmaPipeline {
    static constexpr u32 barrier_bytes = 16 * Stages;  // shared memory at base_address, aligned to 8

    u32 base;   // full[0..Stages), then empty[0..Stages); 8 bytes each
    u32 stage;  // the slot this thread is at
    u32 phase;  // parity of the current lap; toggles when `stage` wraps

    // All threads of the CTA call it: attach(), init_barriers() in the first thread, and __syncthreads(). In a cluster, no CTA
    // may touch the barriers of another one before a cluster barrier follows.
    __device__ __forceinline__ void init(u32 base_address, u32 producer_arrivals, u32 consumer_arrivals) {
        attach(base_address);
        if (threadIdx.x == 0 && threadIdx.y == 0 && threadIdx.z == 0) init_barriers(producer_arrivals, consumer_arrivals);
        __syncthreads();
    }

    // Starts at slot 0 of a ring at base_address; leaves the barriers alone.
    __device__ __forceinline__ void attach(u32 base_address) {
        base = base_address;
        stage = 0;
        phase = 0;
    }

    // One thread calls it after attach(); that thread may use the ring at once. Other threads may use it after a barrier that
    // they share with this thread: of the CTA, or of the cluster. producer_arrivals: calls of expect_tx() or arrive() that
    // complete a slot. consumer_arrivals: calls of release*() that free it; in a cluster, those of all its CTAs.
    __device__ __forceinline__ void init_barriers(u32 producer_arrivals, u32 consumer_arrivals) const {
        for (u32 slot = 0; slot < Stages; ++slot) {
            mbarrier_init(get_barrier(slot), producer_arrivals);
            mbarrier_init(empty_barrier(slot), consumer_arrivals);
        }
        fence_mbarrier_init();   // the async proxy and the cluster see initialized barriers
    }

    // One thread calls it instead of init_barriers() for a ring without `empty` barriers, which takes 8 * Stages bytes. The
    // producer then knows without them when a slot may be filled again; acquire() and release*() may not be called.
    __device__ __forceinline__ void init_full_barriers(u32 producer_arrivals) const {
        for (u32 slot = 0; slot < Stages; ++slot) mbarrier_init(get_barrier(slot), producer_arrivals);
        fence_mbarrier_init();   // the async proxy sees initialized barriers
    }

    // The barrier that the loads of a slot report their bytes to.
    __device__ __forceinline__ u32 get_barrier(u32 slot) const { return base + 8 * slot; }
    __device__ __forceinline__ u32 get_barrier() const { return get_barrier(stage); }

    // The barrier that the consumers of a slot arrive at.
    __device__ __forceinline__ u32 empty_barrier(u32 slot) const { return base + 8 * (Stages + slot); }
    __device__ __forceinline__ u32 empty_barrier() const { return empty_barrier(stage); }

    // Producer: waits for the consumers to release the slot. The first lap finds every slot empty: on a fresh barrier
    // the phase of parity 1 counts as ended.
    __device__ __forceinline__ void acquire(u32 slot) const { mbarrier_wait_parity(empty_barrier(slot), phase ^ 1); }
    __device__ __forceinline__ void acquire() const { acquire(stage); }

    // Producer: one arrival, and the slot is full when `bytes` more bytes have come. Before the loads it counts.
    __device__ __forceinline__ void expect_tx(u32 slot, u32 bytes) const { mbarrier_arrive_expect_tx(get_barrier(slot), bytes); }
    __device__ __forceinline__ void expect_tx(u32 bytes) const { expect_tx(stage, bytes); }

    // Producer: one arrival without bytes, for threads that fill the slot with plain stores.
    __device__ __forceinline__ void arrive(u32 slot) const { mbarrier_arrive(get_barrier(slot)); }
    __device__ __forceinline__ void arrive() const { arrive(stage); }

    // Consumer: waits for the slot to be full.
    __device__ __forceinline__ void wait(u32 slot) const { mbarrier_wait_parity(get_barrier(slot), phase); }
    __device__ __forceinline__ void wait() const { wait(stage); }

    // Consumer: whether the slot is full; returns at once or after a short suspension.
    __device__ __forceinline__ bool try_wait(u32 slot) const { return mbarrier_try_wait_parity(get_barrier(slot), phase); }
    __device__ __forceinline__ bool try_wait() const { return try_wait(stage); }

    // Consumer: this arrival's share of the slot has been read; the producer waits for consumer_arrivals of them.
    // The fence keeps the arrival behind the reads, which ptxas alone does not: TMA could refill the slot under them.
    __device__ __forceinline__ void release(u32 slot) const {
        fence_acq_rel_cta();
        mbarrier_arrive(empty_barrier(slot));
    }
    __device__ __forceinline__ void release() const { release(stage); }

    // Consumer: this arrival's share of the slot has been read; without a fence. Right only if instructions issued before the
    // call have used every value that was read from the slot; then no read can still be under way. A loop that releases each
    // slot one iteration after it read it has that property. release_used_by_warp(): one arrival for the warp, whose lanes all
    // call it.
    __device__ __forceinline__ void release_used(u32 slot) const { mbarrier_arrive(empty_barrier(slot)); }
    __device__ __forceinline__ void release_used_by_warp(u32 slot, u32 lane) const {
        __syncwarp();
        if (lane == 0) release_used(slot);
    }

    // Consumer: release_used_by_warp() in a cluster whose CTAs all fill the slot, by multicast: lane r arrives at the barrier of CTA r.
    template <u32 ClusterSize>
    __device__ __forceinline__ void release_used_to_cluster(u32 slot, u32 lane) const {
        __syncwarp();
        if (lane < ClusterSize) mbarrier_arrive_shared_cluster(mapa_shared_cluster(empty_barrier(slot), lane));
    }

    // Both: go on to the next slot; the parity toggles when the ring wraps.
    __device__ __forceinline__ void advance() {
        if (++stage == Stages) {
            stage = 0;
            next_lap();
        }
    }

    // Both: what the wrap does, for those who number the slots themselves.
    __device__ __forceinline__ void next_lap() { phase ^= 1; }
};

}  // namespace cudatma
