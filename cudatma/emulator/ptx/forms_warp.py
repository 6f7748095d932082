"""Forms of warp-wide instructions (synchronization, mbarrier, matrices), in the notation of forms.py.

Source: PTX ISA 9.1.
"""

from __future__ import annotations

FORMS: dict[str, str] = {
    "Warp and block synchronization": """
vote.sync.{all,any,uni}.pred p1, p2, r3
vote.sync.ballot.b32 r1, !p2, r3
match.any.sync.b32 r1, r2, r3
match.any.sync.b64 r1, d2, r3
match.all.sync.b32 r1|p1, r2, r3
match.all.sync.b64 r1, d2, r3
activemask.b32 r1
redux.sync.{add,min,max}.{u32,s32} r1, r2, r3
redux.sync.{and,or,xor}.b32 r1, r2, r3
redux.sync.{min,max}{,.abs}{,.NaN}.f32 r1, r2, r3
elect.sync r1|p1, r2
elect.sync _|p1, -1
bar.warp.sync r1
bar{,.cta}.sync 0
bar{,.cta}.sync r1, r2
bar.arrive 1, 64
bar{,.cta}.red.popc.u32 r1, 0, p1
bar.red.popc.u32 r1, 0, 64, !p1
bar.red.{and,or}.pred p1, 0, p2
barrier{,.cta}.sync{,.aligned} 0
barrier{,.cta}.sync{,.aligned} 1, 64
barrier{,.cta}.arrive{,.aligned} 1, 64
barrier{,.cta}.red.popc{,.aligned}.u32 r1, 0, p1
barrier{,.cta}.red.{and,or}{,.aligned}.pred p1, 0, p2
barrier.cluster.arrive{,.release,.relaxed}{,.aligned}
barrier.cluster.wait{,.acquire}{,.aligned}
membar.{cta,gl,sys}
membar.proxy.{alias,async,async.global}
fence{,.sc,.acq_rel,.acquire,.release}.{cta,cluster,gpu,sys}
fence.acquire.sync_restrict::shared::cluster.cluster
fence.release.sync_restrict::shared::cta.cluster
fence.mbarrier_init.release.cluster
fence.proxy.{alias,async,async.global,async.shared::cta,async.shared::cluster}
fence.proxy.tensormap::generic.release.{cta,cluster,gpu,sys}
fence.proxy.tensormap::generic.acquire.{cta,cluster,gpu,sys} [d1], 128
fence.proxy.async::generic.acquire.sync_restrict::shared::cluster.cluster
fence.proxy.async::generic.release.sync_restrict::shared::cta.cluster
griddepcontrol.{launch_dependents,wait}
setmaxnreg.{inc,dec}.sync.aligned.u32 64
nanosleep.u32 r1
nanosleep.u32 100
pmevent 1
pmevent.mask 3
brkpt
""",
    "mbarrier": """
mbarrier.init{,.shared,.shared::cta}.b64 [d1], r2
mbarrier.inval{,.shared,.shared::cta}.b64 [d1]
mbarrier.expect_tx{,.relaxed.cta,.relaxed.cluster}{,.shared,.shared::cta,.shared::cluster}.b64 [d1], r2
mbarrier.complete_tx{,.relaxed.cta,.relaxed.cluster}{,.shared,.shared::cta,.shared::cluster}.b64 [d1], r2
mbarrier.{arrive,arrive_drop}{,.release.cta,.release.cluster,.relaxed.cta}{,.shared,.shared::cta}.b64 d1, [d2]
mbarrier.{arrive,arrive_drop}.release.cluster.shared::cluster.b64 _, [d2], r3
mbarrier.{arrive,arrive_drop}.expect_tx{,.release.cta,.relaxed.cluster}{,.shared,.shared::cta}.b64 d1, [d2], r3
mbarrier.{arrive,arrive_drop}.expect_tx.release.cluster.shared::cluster.b64 _, [d2], r3
mbarrier.{arrive,arrive_drop}.noComplete{,.release.cta}{,.shared,.shared::cta}.b64 d1, [d2], r3
mbarrier.{test_wait,try_wait}{,.acquire.cta,.acquire.cluster,.relaxed.cta}{,.shared,.shared::cta}.b64 p1, [d2], d3
mbarrier.{test_wait,try_wait}.parity{,.acquire.cta,.relaxed.cluster}{,.shared,.shared::cta}.b64 p1, [d2], r3
mbarrier.try_wait.b64 p1, [d2], d3, r4
mbarrier.try_wait.parity.b64 p1, [d2], r3, 1000
mbarrier.pending_count.b64 r1, d2
cp.async.mbarrier.arrive{,.noinc}{,.shared,.shared::cta}.b64 [d1]
""",
    "Matrices": """
ldmatrix.sync.aligned.m8n8.x1{,.trans}{,.shared,.shared::cta}.b16 {r1}, [r2]
ldmatrix.sync.aligned.m8n8.x2{,.trans}.shared.b16 {r1, r2}, [r3]
ldmatrix.sync.aligned.m8n8.x4{,.trans}.shared.b16 {r1..4}, [r5]
ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {r1, r2}, [r5]
ldmatrix.sync.aligned.m16n16.x2.trans.shared{.b8,.b8x16.b6x16_p32,.b8x16.b4x16_p64} {r1..4}, [r5]
ldmatrix.sync.aligned.m8n16.x2.shared.b8x16.{b6x16_p32,b4x16_p64} {r1, r2}, [r5]
stmatrix.sync.aligned.m8n8.x1{,.trans}{,.shared,.shared::cta}.b16 [r2], {r1}
stmatrix.sync.aligned.m8n8.x2{,.trans}.shared.b16 [r5], {r1..2}
stmatrix.sync.aligned.m8n8.x2{,.trans}.shared.b16 [r5], {r1, r2}
stmatrix.sync.aligned.m8n8.x4{,.trans}.shared.b16 [r5], {r1..4}
stmatrix.sync.aligned.m16n8.x1.trans.shared.b8 [r5], {r1}
stmatrix.sync.aligned.m16n8.x4.trans.shared.b8 [r5], {r1..4}
movmatrix.sync.aligned.m8n8.trans.b16 r1, r2
mma.sync.aligned.m8n8k4.{row,col}.{row,col}.f32.f16.f16.f32 {r1..8}, {r1, r2}, {r3, r4}, {r1..8}
mma.sync.aligned.m8n8k4.row.col.f16.f16.f16.f16 {r1..4}, {r1, r2}, {r3, r4}, {r1..4}
mma.sync.aligned.m16n8k8.row.col.f32.{f16.f16,bf16.bf16}.f32 {r1..4}, {r1, r2}, {r3}, {r1..4}
mma.sync.aligned.m16n8k16.row.col.f32.{f16.f16,bf16.bf16}.f32 {r1..4}, {r1..4}, {r3, r4}, {r1..4}
mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {r1, r2}, {r1..4}, {r3, r4}, {r1, r2}
mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32 {r1..4}, {r1, r2}, {r3}, {r1..4}
mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {r1..4}, {r1..4}, {r3, r4}, {r1..4}
mma.sync.aligned.m16n8k32.row.col.f32.{e4m3,e5m2}.{e4m3,e5m2}.f32 {r1..4}, {r1..4}, {r3, r4}, {r1..4}
mma.sync.aligned.m16n8k16.row.col.f16.{e4m3,e5m2}.{e4m3,e5m2}.f16 {r1, r2}, {r1, r2}, {r3}, {r1, r2}
mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.{e4m3,e5m2,e3m2,e2m3,e2m1}.{e4m3,e5m2,e3m2,e2m3,e2m1}.f32 {r1..4}, \
{r1..4}, {r3, r4}, {r1..4}
mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale{,.scale_vec::1X}.f32.{e4m3,e2m1}.{e5m2,e3m2}.f32.ue8m0 \
{r1..4}, {r1..4}, {r3, r4}, {r1..4}, r5, {0, 0}, r6, {0, 0}
mma.sync.aligned.m16n8k64.row.col.kind::mxf4.block_scale{,.scale_vec::2X}.f32.e2m1.e2m1.f32.ue8m0 {r1..4}, {r1..4}, \
{r3, r4}, {r1..4}, r5, {0, 0}, r6, {0, 0}
mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.{scale_vec::2X.f32.e2m1.e2m1.f32.ue8m0,scale_vec::4X.f32\
.e2m1.e2m1.f32.ue4m3} {r1..4}, {r1..4}, {r3, r4}, {r1..4}, r5, {0, 0}, r6, {0, 0}
mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64{,.rn,.rz,.rm,.rp} {d1, d2}, {d3}, {d4}, {d1, d2}
mma.sync.aligned.m16n8k4.row.col.f64.f64.f64.f64 {d1..4}, {d3, d4}, {d4}, {d1..4}
mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 {d1..4}, {d1..8}, {d1..4}, {d1..4}
mma.sync.aligned.m8n8k16.row.col{,.satfinite}.s32.{s8,u8}.{s8,u8}.s32 {r1, r2}, {r3}, {r4}, {r1, r2}
mma.sync.aligned.m16n8k16.row.col{,.satfinite}.s32.{s8,u8}.{s8,u8}.s32 {r1..4}, {r3, r4}, {r4}, {r1..4}
mma.sync.aligned.m16n8k32.row.col{,.satfinite}.s32.{s8,u8}.{s8,u8}.s32 {r1..4}, {r1..4}, {r3, r4}, {r1..4}
mma.sync.aligned.m8n8k32.row.col.s32.{s4,u4}.{s4,u4}.s32 {r1, r2}, {r3}, {r4}, {r1, r2}
mma.sync.aligned.m16n8k64.row.col{,.satfinite}.s32.{s4,u4}.{s4,u4}.s32 {r1..4}, {r1..4}, {r3, r4}, {r1..4}
mma.sync.aligned.m8n8k128.row.col.s32.b1.b1.s32.{xor,and}.popc {r1, r2}, {r3}, {r4}, {r1, r2}
mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.{xor,and}.popc {r1..4}, {r1..4}, {r3, r4}, {r1..4}
mma.sp{,::ordered_metadata}.sync.aligned.m16n8k16.row.col.f32.{f16.f16,bf16.bf16}.f32 {r1..4}, {r1, r2}, {r3, r4}, \
{r1..4}, r5, 0x3
mma.sp{,::ordered_metadata}.sync.aligned.m16n8k32.row.col.f32.{f16.f16,bf16.bf16}.f32 {r1..4}, {r1..4}, {r1..4}, {r1.\
.4}, r5, 0x1
mma.sp{,::ordered_metadata}.sync.aligned.m16n8k16.row.col.f32.tf32.tf32.f32 {r1..4}, {r1..4}, {r1..4}, {r1..4}, r5, 0x1
mma.sp{,::ordered_metadata}.sync.aligned.m16n8k64.row.col.s32.{s8,u8}.{s8,u8}.s32 {r1..4}, {r1..4}, {r1..4}, {r1..4}, \
r5, 0x0
mma.sp{,::ordered_metadata}.sync.aligned.m16n8k128.row.col.s32.{s4.s4,u4.u4}.s32 {r1..4}, {r1..4}, {r1..4}, {r1..4}, \
r5, 0x0
mma.sp::ordered_metadata.sync.aligned.m16n8k64.row.col.kind::f8f6f4.f32.{e4m3,e2m1}.{e5m2,e3m2}.f32 {r1..4}, {r1..4}, \
{r1..4}, {r1..4}, r5, 0x0
mma.sp::ordered_metadata.sync.aligned.m16n8k64.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e5m2.f32\
.ue8m0 {r1..4}, {r1..4}, {r1..4}, {r1..4}, r5, 0x0, r6, {0, 0}, r7, {0, 0}
mma.sp::ordered_metadata.sync.aligned.m16n8k128.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32\
.ue4m3 {r1..4}, {r1..4}, {r1..4}, {r1..4}, r5, 0x0, r6, {0, 0}, r7, {0, 0}
wmma.load.{a,b}.sync.aligned.{row,col}.{m16n16k16,m8n32k16,m32n8k16}{,.global,.shared}.f16 {r1..8}, [d9], r9
wmma.load.c.sync.aligned.{row,col}.m16n16k16.shared.f32 {r1..8}, [d9]
wmma.load.c.sync.aligned.row.m16n16k16.f16 {r1..4}, [d9], 16
wmma.load.a.sync.aligned.row.m16n16k16.{s8,u8} {r1, r2}, [d9], r9
wmma.load.a.sync.aligned.row.m16n16k16.bf16 {r1..4}, [d9], r9
wmma.load.a.sync.aligned.row.m16n16k8.tf32 {r1..4}, [d9], r9
wmma.load.a.sync.aligned.row.m8n8k4.f64 {d1}, [d9], r9
wmma.load.{a.sync.aligned.row,b.sync.aligned.col}.{m8n8k32.s4,m8n8k32.u4,m8n8k128.b1} {r1}, [d9], r9
wmma.mma.sync.aligned.{row,col}.{row,col}.m16n16k16.f32.f32 {r1..8}, {r1..8}, {r1..8}, {r1..8}
wmma.mma.sync.aligned.row.col.m16n16k16.s32.s8.s8.s32{,.satfinite} {r1..8}, {r1, r2}, {r1, r2}, {r1..8}
wmma.mma.{xor,and}.popc.sync.aligned.row.col.m8n8k128.s32.b1.b1.s32 {r1, r2}, {r3}, {r4}, {r1, r2}
wmma.store.d.sync.aligned.{row,col}.m16n16k16{,.global,.shared}.f32 [d9], {r1..8}, r9
wmma.store.d.sync.aligned.row.m16n16k16.f16 [d9], {r1..4}
wgmma.fence.sync.aligned
wgmma.commit_group.sync.aligned
wgmma.wait_group.sync.aligned 0
wgmma.mma_async.sync.aligned.m64n8k16.f32.{f16.f16,bf16.bf16} {r1..4}, d1, d2, p1, 1, -1, 0, 1
wgmma.mma_async.sync.aligned.m64n8k16.f16.f16.f16 {r1, r2}, {r3..6}, d2, 1, 1, 1, 0
wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32 {r1..4}, d1, d2, p1, 1, 1
wgmma.mma_async.sync.aligned.m64n8k32.f32.{e4m3,e5m2}.{e4m3,e5m2} {r1..4}, d1, d2, p1, 1, 1
wgmma.mma_async.sync.aligned.m64n8k32{,.satfinite}.s32.{s8,u8}.{s8,u8} {r1..4}, d1, d2, p1
wgmma.mma_async.sync.aligned.m64n8k256.s32.b1.b1.and.popc {r1..4}, d1, d2, p1
wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.f16.f16 {r1..4}, d1, d2, r5, 1, p1, 1, 1, 0, 0
wgmma.mma_async.sp.sync.aligned.m64n8k64.s32.s8.s8 {r1..4}, {r5..8}, d2, r9, 0, p1
""",
}
