"""Forms of instructions that move data (registers, memory, atomics, asynchronous copies), in the notation of forms.py.

Source: PTX ISA 9.1.
"""

from __future__ import annotations

FORMS: dict[str, str] = {
    "Moves and addresses": """
mov.{b16,u16,s16} h1, h2
mov.{b32,u32,s32,f32} r1, r2
mov.{b64,u64,s64,f64} d1, d2
mov.pred p1, p2
mov.b128 q1, {d2, d3}
mov.b128 {d1, d2}, q3
mov.b32 r1, {h2, h3}
mov.b32 {h1, h2}, r3
mov.b64 d1, {r2, r3}
mov.b64 {r1, _}, d3
mov.b64 d1, {h2..5}
mov.b64 {h1..4}, d5
mov.b32 r1, {b2, b3, b4, b5}
mov.b32 {b1, b2, b3, b4}, r5
cvta.{const,global,local,shared,shared::cta,shared::cluster,param,param::entry}.u64 d1, d2
cvta.to.{const,global,local,shared,shared::cta,shared::cluster,param,param::entry}.u64 d1, d2
isspacep.{const,global,local,shared,shared::cta,shared::cluster,param,param::entry} p1, d2
mapa.u64 d1, d2, r3
mapa.shared::cluster.u32 r1, r2, r3
getctarank.u64 r1, d2
getctarank.shared::cluster.u32 r1, r2
shfl.sync.{up,down,bfly,idx}.b32 r1, r2, r3, r4, r5
shfl.sync.{up,down,bfly,idx}.b32 r1|p1, r2, 1, 31, -1
""",
    "Special registers": """
mov.u32 r1, {%tid.x,%ntid.y,%ctaid.z,%nctaid.x,%laneid,%warpid,%nwarpid,%smid,%nsmid,%clusterid.x,%nclusterid.y,\
%cluster_ctaid.z,%cluster_nctaid.x,%cluster_ctarank,%cluster_nctarank}
mov.u32 r1, {%lanemask_eq,%lanemask_le,%lanemask_lt,%lanemask_ge,%lanemask_gt,%clock,%clock_hi,%globaltimer_lo,\
%globaltimer_hi,%total_smem_size,%dynamic_smem_size,%aggr_smem_size,%envreg0,%envreg31,%pm0,%pm7,\
%reserved_smem_offset_begin,%reserved_smem_offset_end,%reserved_smem_offset_cap,%reserved_smem_offset_0}
mov.u64 d1, {%gridid,%clock64,%globaltimer,%pm0_64,%current_graph_exec}
mov.pred p1, %is_explicit_cluster
""",
    "Stack": """
stacksave.u64 d1
stackrestore.u64 d1
alloca.u64 d1, d2
alloca.u64 d1, d2, 64
""",
    "Memory": """
ld.{const,global,local,param,param::entry,shared,shared::cta,shared::cluster}.b32 r1, [d2+4]
ld{,.weak,.volatile}{,.global,.shared}.{u32,s32,f32,b32} r1, [d2]
ld.global{.ca,.cg,.cs,.lu,.cv}.{u8,s8,u16,s16,b16,b8} h1, [d2]
ld.{relaxed,acquire}.{cta,cluster,gpu,sys}{,.global,.shared}.{b64,f64,u64} d1, [d2]
ld.mmio.relaxed.sys{,.global}.u32 r1, [d2]
ld.global{.nc,.ca.nc,.cg.nc,.cs.nc,.nc.L1::no_allocate}{,.L2::64B,.L2::128B,.L2::256B}.u32 r1, [d2]
ld.global.{L1::evict_first,L1::evict_last,L1::evict_normal,L1::evict_unchanged}.u32 r1, [d2]
ld.global.{L2::evict_first,L2::evict_last,L2::evict_normal}.v8.b32 {r1..8}, [d9]
ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {r1..4}, [d5], d6
ld{,.global,.shared}.v2.{b16,u16,s16} {h1, h2}, [d3]
ld{,.global,.shared}.v4.{b32,f32} {r1..4}, [d5]
ld.v2.{b64,f64} {d1, d2}, [d3]
ld.global.v8.{b32,f32} {r1..8}, [d9]
ld.global.v4.{b64,f64} {d1..4}, [d5]
ld.relaxed.gpu.global.b128 q1, [d2]
ldu.global.{u32,f32} r1, [d2]
ldu.global.v4.f32 {r1..4}, [d5]
st.{global,local,shared,shared::cta,shared::cluster}.b32 [d2+-4], r1
st{,.weak,.volatile}{,.global,.shared}.{u32,s32,f32,b32} [d2], r1
st.global.{wb,cg,cs,wt}.{u8,s8,u16,s16,b16,b8} [d2], h1
st.{relaxed,release}.{cta,cluster,gpu,sys}{,.global,.shared}.{b64,f64,u64} [d2], d1
st.mmio.relaxed.sys{,.global}.u32 [d2], r1
st.global.L1::no_allocate.L2::cache_hint.v4.f32 [d5], {r1..4}, d6
st{,.global,.shared}.v2.{b16,u16} [d3], {h1, h2}
st{,.global,.shared}.v4.{b32,f32} [d5], {r1..4}
st.global.v8.{b32,f32} [d9], {r1..8}
st.global.v4.{b64,f64} [d9], {d1..4}
st.relaxed.gpu.global.b128 [d2], q1
st.async{,.weak}.shared::cluster.mbarrier::complete_tx::bytes.{b32,u32,s32,f32} [r1], r2, [r3]
st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.{b64,u64,s64,f64} [r1], d2, [r3]
st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.{b64,f64} [r1], {d2, d4}, [r3]
st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.{b32,f32} [r1], {r2, r4, r5, r6}, [r3]
st.async.release.{gpu,sys}.global.{b32,u32,s32,f32} [d1], r2
st.async.mmio.release.sys.global.u32 [d1], r2
st.bulk{,.weak}{,.shared::cta} [d1], d2, 0
prefetch{,.global,.local}.{L1,L2} [d1]
prefetch.global.{L2::evict_last,L2::evict_normal} [d1]
prefetchu.L1 [d1]
prefetch{,.const,.param}.tensormap [d1]
applypriority{,.global}.L2::evict_normal [d1], 128
discard{,.global}.L2 [d1], 128
createpolicy.range{,.global}.L2::evict_last.L2::evict_unchanged.b64 d1, [d2], r3, r4
createpolicy.fractional.{L2::evict_last,L2::evict_first,L2::evict_normal,L2::evict_unchanged}.b64 d1, 0.5
createpolicy.fractional.L2::evict_last.b64 d1
createpolicy.cvt.L2.b64 d1, d2
""",
    "Atomics": """
atom{,.relaxed,.acquire,.release,.acq_rel}{,.cta,.cluster,.gpu,.sys}{,.global,.shared}.add.u32 r1, [d2], r3
atom.{and,or,xor,exch}.b32 r1, [d2], r3
atom.{and,or,xor,exch}.b64 d1, [d2], d3
atom.{add,min,max}.{u32,s32} r1, [d2], r3
atom.{inc,dec}.u32 r1, [d2], r3
atom.{min,max}.{u64,s64} d1, [d2], d3
atom.add.u64 d1, [d2], d3
atom.add.f32 r1, [d2], r3
atom.add.f64 d1, [d2], d3
atom{,.shared::cta,.shared::cluster,.global}.cas.b32 r1, [d2], r3, r4
atom.cas.b64 d1, [d2], d3, d4
atom.cas.b16 h1, [d2], h3, h4
atom.relaxed.gpu.global.cas.b128 q1, [d2], q3, q4
atom.relaxed.gpu.global.exch.b128 q1, [d2], q3
atom{,.global,.shared}.add.noftz.{f16,bf16} h1, [d2], h3
atom.add.noftz.{f16x2,bf16x2} r1, [d2], r3
atom.global.v2.f32.add {r1, r2}, [d2], {r3, r4}
atom.global.add.v2.f32 {r1, r2}, [d2], {r3, r4}
atom.global.add.v4.f32 {r1, r2, r5, r6}, [d2], {r3, r4, r7, r8}
atom.global.{add,min,max}.noftz.v2.{f16,bf16} {h1, h2}, [d2], {h3, h4}
atom.global.{add,min,max}.noftz.v8.f16 {h1..8}, [d2], {h1..8}
atom.global.{add,min,max}.noftz.v4.{f16x2,bf16x2} {r1, r2, r5, r6}, [d2], {r3, r4, r7, r8}
red{,.relaxed,.release}{,.cta,.cluster,.gpu,.sys}{,.global,.shared}.add.u32 [d2], r3
red.{and,or,xor}.b32 [d2], r3
red.{add,min,max}.{u32,s32} [d2], r3
red.{add,min,max}.u64 [d2], d3
red.{min,max}.s64 [d2], d3
red.{inc,dec}.u32 [d2], r3
red.add.f32 [d2], r3
red.add.f64 [d2], d3
red.add.noftz.{f16,bf16} [d2], h3
red.add.noftz.{f16x2,bf16x2} [d2], r3
red.relaxed.gpu.global.add.L2::cache_hint.u32 [d2], r3, d4
red.global.add.v4.f32 [d2], {r3, r4, r7, r8}
red.global.{add,min,max}.noftz.v4.bf16x2 [d2], {r3, r4, r7, r8}
red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.{inc,dec,min,max,add}.u32 [r1], r2, [r3]
red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.{and,or,xor}.b32 [r1], r2, [r3]
red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u64 [r1], d2, [r3]
red.async.release.gpu.global.add.{u32,s32} [d1], r2
red.async.mmio.release.sys.global.add.u32 [d1], r2
""",
    "Asynchronous copies": """
cp.async.{ca,cg}.shared{,::cta}.global{,.L2::64B,.L2::128B,.L2::256B} [r1], [d2], 16
cp.async.ca.shared.global [r1], [d2], {4,8}
cp.async.ca.shared.global.L2::cache_hint [r1], [d2], 16, d3
cp.async.ca.shared.global [r1], [d2], 16, r3
cp.async.ca.shared.global [r1], [d2], 16, p3
cp.async.commit_group
cp.async.wait_group 1
cp.async.wait_all
cp.async.bulk.shared::{cluster,cta}.global.mbarrier::complete_tx::bytes [r1], [d2], r3, [r4]
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [r1], [d2], r3, [r4], d5
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [r1], [d2], r3, [r4], h5
cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [r1], [r2], r3, [r4]
cp.async.bulk.global.shared::cta.bulk_group [d1], [r2], r3
cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [d1], [r2], r3, d4
cp.async.bulk.global.shared::cta.bulk_group.cp_mask [d1], [r2], r3, h4
cp.reduce.async.bulk.global.shared::cta.bulk_group.add.{u32,s32,u64,f32,f64,noftz.f16,noftz.bf16} [d1], [r2], r3
cp.reduce.async.bulk.global.shared::cta.bulk_group.{min,max}.{u32,s32,u64,s64,f16,bf16} [d1], [r2], r3
cp.reduce.async.bulk.global.shared::cta.bulk_group.{inc,dec}.u32 [d1], [r2], r3
cp.reduce.async.bulk.global.shared::cta.bulk_group.{and,or,xor}.{b32,b64} [d1], [r2], r3
cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.{u32,s32,u64} [r1], [r2], r3, [r4]
cp.async.bulk.prefetch.L2.global [d1], r2
cp.async.bulk.prefetch.L2.global.L2::cache_hint [d1], r2, d3
cp.async.bulk.commit_group
cp.async.bulk.wait_group{,.read} 0
cp.async.bulk.tensor.1d.shared::{cluster,cta}.global.mbarrier::complete_tx::bytes [r1], [d2, {r3}], [r4]
cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [r1], [d2, {r3, r5}], [r4]
cp.async.bulk.tensor.4d.shared::cta.global.tile.mbarrier::complete_tx::bytes [r1], [d2, {r3, r5, r6, r7}], [r4]
cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint [r1], \
[d2, {r3, r5, r6, r7, r8}], [r4], h1, d3
cp.async.bulk.tensor.3d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [r1], [d2, {r3, r5, r6}], [r4], {h1}
cp.async.bulk.tensor.3d.shared::cta.global.im2col::w.mbarrier::complete_tx::bytes [r1], [d2, {r3, r5, r6}], [r4], {h1,\
 h2}
cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes [r1], [d2, {r3, r5, r6, r7, \
r8}], [r4]
cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.cta_group::1 [r1], [d2, {r3, r5}], [r4]
cp.async.bulk.tensor.3d.global.shared::cta{,.tile}.bulk_group [d1, {r2..4}], [r5]
cp.async.bulk.tensor.3d.global.shared::cta.im2col_no_offs.bulk_group [d1, {r2..4}], [r5]
cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group [d1, {r2, r3, r4, r6, r7}], [r5]
cp.reduce.async.bulk.tensor.2d.global.shared::cta.{add,min,max,inc,dec,and,or,xor}.tile.bulk_group [d1, {r2, r3}], [r5]
cp.async.bulk.prefetch.tensor.2d.L2.global{,.tile} [d1, {r2, r3}]
cp.async.bulk.prefetch.tensor.3d.L2.global.im2col [d1, {r2..4}], {h1}
tensormap.replace.tile.global_address.{global,shared::cta}.b1024.b64 [d1], d2
tensormap.replace.tile.rank.shared::cta.b1024.b32 [d1], r2
tensormap.replace.tile.{global_dim,box_dim,element_stride}.shared::cta.b1024.b32 [d1], 0, r2
tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [d1], 0, d2
tensormap.replace.tile.{elemtype,interleave_layout,swizzle_mode,fill_mode}.shared::cta.b1024.b32 [d1], 1
tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [d1], [d2], 128
clusterlaunchcontrol.try_cancel.async{,.shared::cta}.mbarrier::complete_tx::bytes{,.multicast::cluster::all}.b128 \
[r1], [r2]
clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 p1, q2
clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {r1, r2, r3, _}, q2
clusterlaunchcontrol.query_cancel.get_first_ctaid::{x,y,z}.b32.b128 r1, q2
""",
}
