"""Forms of arithmetic, comparison, logic, conversion and video instructions, in the notation of forms.py.

Source: PTX ISA 9.1.
"""

from __future__ import annotations

FORMS: dict[str, str] = {
    "Integer arithmetic": """
add.{u16,s16} h1, h2, h3
add.{u32,s32,u16x2,s16x2} r1, r2, r3
add.{u64,s64} d1, d2, d3
add.sat.s32 r1, r2, r3
sub.{u16,s16} h1, h2, h3
sub.{u32,s32,sat.s32} r1, r2, r3
sub.{u64,s64} d1, d2, d3
mul.{lo,hi}.{u16,s16} h1, h2, h3
mul.{lo,hi}.{u32,s32} r1, r2, r3
mul.{lo,hi}.{u64,s64} d1, d2, d3
mul.wide.{u16,s16} r1, h2, h3
mul.wide.{u32,s32} d1, r2, r3
mad.{lo,hi}.{u16,s16} h1, h2, h3, h4
mad.{lo,hi}.{u32,s32} r1, r2, r3, r4
mad.{lo,hi}.{u64,s64} d1, d2, d3, d4
mad.wide.{u16,s16} r1, h2, h3, r4
mad.wide.{u32,s32} d1, r2, r3, d4
mad.hi.sat.s32 r1, r2, r3, r4
mul24.{lo,hi}.{u32,s32} r1, r2, r3
mad24.{lo,hi}.{u32,s32} r1, r2, r3, r4
mad24.hi.sat.s32 r1, r2, r3, r4
sad.{u16,s16} h1, h2, h3, h4
sad.{u32,s32} r1, r2, r3, r4
sad.{u64,s64} d1, d2, d3, d4
{div,rem}.{u16,s16} h1, h2, h3
{div,rem}.{u32,s32} r1, r2, r3
{div,rem}.{u64,s64} d1, d2, d3
{abs,neg}.s16 h1, h2
{abs,neg}.s32 r1, r2
{abs,neg}.s64 d1, d2
{min,max}.{u16,s16} h1, h2, h3
{min,max}.{u32,s32,relu.s32,u16x2,s16x2,relu.s16x2} r1, r2, r3
{min,max}.{u64,s64} d1, d2, d3
{popc,clz,brev}.b32 r1, r2
{popc,clz}.b64 r1, d2
brev.b64 d1, d2
bfind{,.shiftamt}.{u32,s32} r1, r2
bfind{,.shiftamt}.{u64,s64} r1, d2
fns.b32 r1, r2, r3, r4
bfe.{u32,s32} r1, r2, r3, r4
bfe.{u64,s64} d1, d2, r3, r4
bfi.b32 r1, r2, r3, r4, r5
bfi.b64 d1, d2, d3, r4, r5
szext.{clamp,wrap}.{u32,s32} r1, r2, r3
bmsk.{clamp,wrap}.b32 r1, r2, r3
dp4a.{u32,s32}.{u32,s32} r1, r2, r3, r4
dp2a.{lo,hi}.{u32,s32}.{u32,s32} r1, r2, r3, r4
""",
    "Extended-precision integer arithmetic": """
{add.cc,addc,addc.cc,sub.cc,subc,subc.cc}.{u32,s32} r1, r2, r3
{add.cc,addc,addc.cc,sub.cc,subc,subc.cc}.{u64,s64} d1, d2, d3
{mad.lo.cc,mad.hi.cc,madc.lo,madc.hi,madc.lo.cc,madc.hi.cc}.{u32,s32} r1, r2, r3, r4
{mad.lo.cc,mad.hi.cc,madc.lo,madc.hi,madc.lo.cc,madc.hi.cc}.{u64,s64} d1, d2, d3, d4
""",
    "Floating point": """
testp.{finite,infinite,number,notanumber,normal,subnormal}.f32 p1, r2
testp.{finite,infinite,number,notanumber,normal,subnormal}.f64 p1, d2
copysign.f32 r1, r2, r3
copysign.f64 d1, d2, d3
{add,sub,mul}{,.rn,.rz,.rm,.rp}{,.ftz}{,.sat}.f32 r1, r2, r3
{add,sub,mul}{,.rn,.rz,.rm,.rp}.f64 d1, d2, d3
{add,sub,mul}{,.rn,.rz,.rm,.rp}{,.ftz}.f32x2 d1, d2, d3
fma.{rn,rz,rm,rp}{,.ftz}{,.sat}.f32 r1, r2, r3, r4
fma.{rn,rz,rm,rp}.f64 d1, d2, d3, d4
fma.{rn,rz,rm,rp}{,.ftz}.f32x2 d1, d2, d3, d4
mad.{rn,rz,rm,rp}{,.ftz}{,.sat}.f32 r1, r2, r3, r4
mad.{rn,rz,rm,rp}.f64 d1, d2, d3, d4
div.{approx,full,rn,rz,rm,rp}{,.ftz}.f32 r1, r2, r3
div.{rn,rz,rm,rp}.f64 d1, d2, d3
{abs,neg}{,.ftz}.f32 r1, r2
{abs,neg}.f64 d1, d2
{min,max}{,.ftz}{,.NaN}{,.xorsign.abs}.f32 r1, r2, r3
{min,max}{,.ftz}{,.NaN}{,.abs}.f32 r1, r2, r3, r4
{min,max}.f64 d1, d2, d3
{rcp,sqrt}.{approx,rn,rz,rm,rp}{,.ftz}.f32 r1, r2
{rcp,sqrt}.{rn,rz,rm,rp}.f64 d1, d2
rcp.approx.ftz.f64 d1, d2
{rsqrt,sin,cos,lg2,ex2}.approx{,.ftz}.f32 r1, r2
rsqrt.approx{,.ftz}.f64 d1, d2
tanh.approx.f32 r1, r2
""",
    "Half precision": """
{add,sub,mul}{,.rn}{,.ftz}{,.sat}.f16 h1, h2, h3
{add,sub,mul}{,.rn}{,.ftz}{,.sat}.f16x2 r1, r2, r3
{add,sub,mul}{,.rn}.bf16 h1, h2, h3
{add,sub,mul}{,.rn}.bf16x2 r1, r2, r3
fma.rn{,.ftz}{,.sat,.relu}.f16 h1, h2, h3, h4
fma.rn{,.ftz}{,.sat,.relu}.f16x2 r1, r2, r3, r4
fma.rn{,.relu,.oob,.oob.relu}.bf16 h1, h2, h3, h4
fma.rn{,.relu,.oob,.oob.relu}.bf16x2 r1, r2, r3, r4
fma.rn.oob{,.relu}.f16 h1, h2, h3, h4
fma.rn.oob{,.relu}.f16x2 r1, r2, r3, r4
{neg,abs}{,.ftz}.f16 h1, h2
{neg,abs}{,.ftz}.f16x2 r1, r2
{neg,abs}.bf16 h1, h2
{neg,abs}.bf16x2 r1, r2
{min,max}{,.ftz}{,.NaN}{,.xorsign.abs}.f16 h1, h2, h3
{min,max}{,.ftz}{,.NaN}{,.xorsign.abs}.f16x2 r1, r2, r3
{min,max}{,.NaN}{,.xorsign.abs}.bf16 h1, h2, h3
{min,max}{,.NaN}{,.xorsign.abs}.bf16x2 r1, r2, r3
tanh.approx.{f16,bf16} h1, h2
tanh.approx.{f16x2,bf16x2} r1, r2
ex2.approx.{f16,ftz.bf16} h1, h2
ex2.approx.{f16x2,ftz.bf16x2} r1, r2
{add,sub}{,.rn,.rz,.rm,.rp}{,.sat}.f32.{f16,bf16} r1, h2, r3
fma.{rn,rz,rm,rp}{,.sat}.f32.{f16,bf16} r1, h2, h3, r4
""",
    "Comparison and selection": """
set.{eq,ne,lt,le,gt,ge,equ,neu,ltu,leu,gtu,geu,num,nan}.{u32,s32,f32}.f32 r1, r2, r3
set.{eq,ne,lt,le,gt,ge,lo,ls,hi,hs}.{u32,s32,f32}.u32 r1, r2, r3
set.{eq,ne,lt,le,gt,ge}.{u32,s32,f32}.{u16,s16} r1, h2, h3
set.{eq,ne,lt}.{u32,s32,f32}.{u64,s64,f64} r1, d2, d3
set.{eq,ne}.u32.b16 r1, h2, h3
set.{eq,ne}.u32.b32 r1, r2, r3
set.lt.{and,or,xor}{,.ftz}.u32.f32 r1, r2, r3, p4
set.lt{,.ftz}.{f16,u16,s16}.f16 h1, h2, h3
set.lt{,.ftz}.{u32,s32}.f16 r1, h2, h3
set.lt.{bf16,u16}.bf16 h1, h2, h3
set.lt.{f16,bf16}.{s32,f32} h1, r2, r3
set.lt{,.ftz}.{f16x2,u32,s32}.f16x2 r1, r2, r3
set.lt.{bf16x2,u32,s32}.bf16x2 r1, r2, r3
set.lt.and.f16x2.f16x2 r1, r2, r3, p4
setp.{eq,ne,lt,le,gt,ge,equ,neu,ltu,leu,gtu,geu,num,nan}.f32 p1, r2, r3
setp.{eq,ne,lt,le,gt,ge,equ,neu,ltu,leu,gtu,geu,num,nan}.f64 p1, d2, d3
setp.{eq,ne,lt,le,gt,ge,equ,neu,ltu,leu,gtu,geu,num,nan}.{f16,bf16} p1, h2, h3
setp.{eq,ne,lt,le,gt,ge,equ,neu,ltu,leu,gtu,geu,num,nan}.{f16x2,bf16x2} p1|p2, r2, r3
setp.{eq,ne,lt,le,gt,ge,lo,ls,hi,hs}.u32 p1, r2, r3
setp.{eq,ne,lt,le,gt,ge}.{u16,s16} p1, h2, h3
setp.{eq,ne,lt,le,gt,ge}.{u64,s64} p1, d2, d3
setp.{eq,ne}.b16 p1, h2, h3
setp.{eq,ne}.b32 p1, r2, r3
setp.{eq,ne}.b64 p1, d2, d3
setp.{eq,ne,lt,le,gt,ge}.s32 p1, r2, r3
setp.lt.{and,or,xor}.s32 p1|p2, r2, r3, !p4
setp.lt.{and,or,xor}{,.ftz}.f32 p1|p2, r2, r3, p4
setp.lt.and.f16x2 p1|p2, r2, r3, p4
selp.{b16,u16,s16} h1, h2, h3, p4
selp.{b32,u32,s32,f32} r1, r2, r3, p4
selp.{b64,u64,s64,f64} d1, d2, d3, p4
slct.{b16,u16,s16}.s32 h1, h2, h3, r4
slct{,.ftz}.{b32,u32,s32,f32}.f32 r1, r2, r3, r4
slct.{b64,u64,s64,f64}.s32 d1, d2, d3, r4
""",
    "Logic and shift": """
{and,or,xor}.b16 h1, h2, h3
{and,or,xor}.b32 r1, r2, r3
{and,or,xor}.b64 d1, d2, d3
{and,or,xor}.pred p1, p2, p3
not.pred p1, p2
{not,cnot}.b16 h1, h2
{not,cnot}.b32 r1, r2
{not,cnot}.b64 d1, d2
lop3.b32 r1, r2, r3, r4, 0x96
lop3.{or,and}.b32 r1|p1, r2, r3, r4, 0x96, p2
shf.{l,r}.{clamp,wrap}.b32 r1, r2, r3, r4
shl.b16 h1, h2, r3
shl.b32 r1, r2, r3
shl.b64 d1, d2, r3
shr.{b16,u16,s16} h1, h2, r3
shr.{b32,u32,s32} r1, r2, r3
shr.{b64,u64,s64} d1, d2, r3
prmt.b32{,.f4e,.b4e,.rc8,.ecl,.ecr,.rc16} r1, r2, r3, r4
""",
    "Conversion": """
cvt.{u8,s8,u16,s16}.{u8,s8,u16,s16} h1, h2
cvt.{u32,s32}.{u8,s8,u16,s16} r1, h2
cvt.{u64,s64}.{u8,s8,u16,s16} d1, h2
cvt{,.sat}.{u8,s8,u16,s16}.{u32,s32} h1, r2
cvt{,.sat}.{u8,s8,u16,s16}.{u64,s64} h1, d2
cvt{,.sat}.{u32,s32}.{u64,s64} r1, d2
cvt.{u64,s64}.{u32,s32} d1, r2
cvt.{rni,rzi,rmi,rpi}{,.ftz}.{u8,s8,u16,s16}.f32 h1, r2
cvt.{rni,rzi,rmi,rpi}{,.ftz}.{u32,s32}.f32 r1, r2
cvt.{rni,rzi,rmi,rpi}{,.ftz}.{u64,s64}.f32 d1, r2
cvt.{rni,rzi,rmi,rpi}.{u8,s8,u16,s16}.f64 h1, d2
cvt.{rni,rzi,rmi,rpi}.{u32,s32}.f64 r1, d2
cvt.{rni,rzi,rmi,rpi}.{u64,s64}.f64 d1, d2
cvt.{rni,rzi,rmi,rpi}.{u16,s16}.{f16,bf16} h1, h2
cvt.{rni,rzi,rmi,rpi}.{u8,s8}.f16 h1, h2
cvt.{rni,rzi,rmi,rpi}.{u8,s8}.bf16 b1, h2
cvt.{rni,rzi,rmi,rpi}.{u32,s32}.{f16,bf16} r1, h2
cvt.{rni,rzi,rmi,rpi}.{u64,s64}.{f16,bf16} d1, h2
cvt.{rn,rz,rm,rp}.{f16,bf16}.{u16,s16} h1, h2
cvt.{rn,rz,rm,rp}.f16.{u8,s8} h1, h2
cvt.{rn,rz,rm,rp}.bf16.{u8,s8} h1, b2
cvt.{rn,rz,rm,rp}.{f16,bf16}.{u32,s32} h1, r2
cvt.{rn,rz,rm,rp}.{f16,bf16}.{u64,s64} h1, d2
cvt.{rn,rz,rm,rp}.f32.{u8,s8,u16,s16} r1, h2
cvt.{rn,rz,rm,rp}{,.sat}.f32.{u32,s32} r1, r2
cvt.{rn,rz,rm,rp}.f32.{u64,s64} r1, d2
cvt.{rn,rz,rm,rp}.f64.{u32,s32} d1, r2
cvt.{rn,rz,rm,rp}.f64.{u64,s64} d1, d2
cvt{,.ftz}.f32.{f16,bf16} r1, h2
cvt.f64.{f16,bf16} d1, h2
cvt{,.ftz}.f64.f32 d1, r2
cvt.{rn,rz,rm,rp}{,.ftz}{,.sat}.f32.f64 r1, d2
cvt.{rn,rz,rm,rp}.{f16,bf16}.f64 h1, d2
cvt.{rn,rz}{,.relu}{,.satfinite}.{f16,bf16}.f32 h1, r2
cvt.{rm,rp}.f16.f32 h1, r2
cvt.{rn,rz,rm,rp}.bf16.f16 h1, h2
cvt.{rn,rz,rm,rp}.f16.bf16 h1, h2
cvt{,.sat,.ftz,.rni,.rzi,.rmi,.rpi}.f32.f32 r1, r2
cvt{,.sat,.rni,.rzi,.rmi,.rpi}.f64.f64 d1, d2
cvt{,.rni,.rzi,.rmi,.rpi}.f16.f16 h1, h2
cvt.{rni,rzi,rmi,rpi}.bf16.bf16 h1, h2
cvt.{rn,rz}{,.relu}{,.satfinite}.{f16x2,bf16x2}.f32 r1, r2, r3
cvt.rs{,.relu}{,.satfinite}.{f16x2,bf16x2}.f32 r1, r2, r3, r4
cvt.{rna,rn,rz}{,.satfinite}.tf32.f32 r1, r2
cvt.{rn,rz}{,.satfinite}.relu.tf32.f32 r1, r2
cvt.rn.satfinite{,.relu}.{e4m3x2,e5m2x2,e2m3x2,e3m2x2}.f32 h1, r2, r3
cvt.rn.satfinite{,.relu}.{e4m3x2,e5m2x2,e2m3x2,e3m2x2}.{f16x2,bf16x2} h1, r2
cvt.rn{,.relu}.f16x2.{e4m3x2,e5m2x2,e2m3x2,e3m2x2} r1, h2
cvt.rn.satfinite{,.relu}.e2m1x2.f32 b1, r2, r3
cvt.rn.satfinite{,.relu}.e2m1x2.{f16x2,bf16x2} b1, r2
cvt.rn{,.relu}.f16x2.e2m1x2 r1, b2
cvt.rs{,.relu}.satfinite.{e4m3x4,e5m2x4,e2m3x4,e3m2x4}.f32 r1, {r2..5}, r6
cvt.rs{,.relu}.satfinite.e2m1x4.f32 h1, {r2..5}, r6
cvt.{rz,rp}{,.satfinite}.ue8m0x2.f32 h1, r2, r3
cvt.{rz,rp}{,.satfinite}.ue8m0x2.bf16x2 h1, r2
cvt.rn.bf16x2.ue8m0x2 r1, h2
cvt.rn.satfinite{,.relu}.s2f6x2.f32 h1, r2, r3
cvt.rn.satfinite{,.relu}.scaled::n2::ue8m0.s2f6x2.f32 h1, r2, r3, h4
cvt.rn.satfinite{,.relu}.s2f6x2.bf16x2 h1, r2
cvt.rn.satfinite{,.relu}.scaled::n2::ue8m0.s2f6x2.bf16x2 h1, r2, h3
cvt.rn{,.satfinite}{,.relu}.bf16x2.s2f6x2 r1, h2
cvt.rn{,.satfinite}{,.relu}.scaled::n2::ue8m0.bf16x2.s2f6x2 r1, h2, h3
cvt.pack.sat.{u16,s16}.s32 r1, r2, r3
cvt.pack.sat.{u8,s8,u4,s4,u2,s2}.s32.b32 r1, r2, r3, r4
""",
    "Video": """
{vadd,vsub,vabsdiff,vmin,vmax}.{u32,s32}.{u32,s32}.{u32,s32}{,.sat} r1, r2.b1, r3.h1
{vadd,vsub,vabsdiff,vmin,vmax}.s32.s32.s32{,.sat}{.add,.min,.max} r1, r2.h0, r3, r4
{vadd,vmax}.s32.s32.s32.sat r1.b2, r2.h0, r3, r4
{vshl,vshr}.{u32,s32}.{u32,s32}.u32{,.sat}.{clamp,wrap} r1, r2, r3.b0
{vshl,vshr}.u32.u32.u32.clamp.{add,min,max} r1, r2, r3, r4
vmad.{u32,s32}.{u32,s32}.{u32,s32}{,.sat}{,.shr7,.shr15} r1, r2.h0, r3.h1, r4
vmad.u32.u32.u32.po.shr7 r1, r2.b0, r3.b1, r4
vset.{u32,s32}.{u32,s32}.{eq,ne,lt,le,gt,ge} r1, r2.h0, r3.b1
vset.s32.s32.lt.{add,min,max} r1, r2, r3, r4
{vadd2,vsub2,vavrg2,vabsdiff2,vmin2,vmax2}.{u32,s32}.{u32,s32}.{u32,s32}{,.sat,.add} r1, r2, r3, r4
{vadd4,vsub4,vavrg4,vabsdiff4,vmin4,vmax4}.{u32,s32}.{u32,s32}.{u32,s32}{,.sat,.add} r1, r2, r3, r4
vadd2.s32.s32.s32 r1.h1, r2.h13, r3.h02, r4
vadd4.u32.u32.u32 r1.b20, r2.b7610, r3.b0246, r4
{vset2,vset4}.{u32,s32}.{u32,s32}.{eq,ne,lt,le,gt,ge}{,.add} r1, r2, r3, r4
""",
}
