"""`.pragma "used_bytes_mask"`: the bytes of a load that a program does not use are not checked."""

from __future__ import annotations

import numpy as np
import pytest

from cudatma.emulator import Report, load

HEADER = ".version 8.8\n.target sm_90a\n.address_size 64\n"
# Twelve of sixteen bytes have been written.
SHARED = """.visible .entry k(.param .u64 o) {
 .reg .b64 %rd<2>; .reg .b32 %r<9>;
 .shared .align 16 .b8 s[16];
 ld.param.u64 %rd1, [o];
 st.shared.v2.u32 [s], {1, 2};
 st.shared.u32 [s+8], 3;
 PRAGMA
 ld.shared.v4.u32 {%r1, %r2, %r3, %r4}, [s];
 add.u32 %r1, %r1, %r3;
 st.global.u32 [%rd1], %r1;
 ret;
}
"""
# Block 1 reads sixteen bytes, of which block 0 writes the first four.
GLOBAL = """.visible .entry k(.param .u64 o) {
 .reg .b64 %rd<2>; .reg .b32 %r<9>; .reg .pred %p;
 ld.param.u64 %rd1, [o];
 mov.u32 %r1, %ctaid.x;
 setp.eq.u32 %p, %r1, 0;
 @%p st.global.u32 [%rd1], 7;
 @%p ret;
 PRAGMA
 ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1];
 st.global.u32 [%rd1+16], %r4;
 ret;
}
"""


def run(body: str, pragma: str, grid: int = 1) -> Report:
    ptx = HEADER + body.replace("PRAGMA", pragma)
    return load(ptx).launch("k", grid, 1, (np.zeros(8, np.uint32),), schedules=3, hazards="collect")


@pytest.mark.parametrize("mask", ["4095", "0xfff", "0xF0F", "0"])
def test_bytes_outside_the_mask_are_not_checked(mask: str) -> None:
    report = run(SHARED, f'.pragma "used_bytes_mask {mask}";')
    assert report.is_clean, str(report)


@pytest.mark.parametrize(
    "pragma",
    [
        "",
        '.pragma "nounroll";',
        '.pragma "used_bytes_mask 0xffff";',
        '.pragma "used_bytes_mask 0x1000";',
        '.pragma "used_bytes_mask 010";',
        '.pragma "used_bytes_mask 0xfff"; mov.u32 %r1, 0;',
    ],
)
def test_used_bytes_are_checked(pragma: str) -> None:
    assert run(SHARED, pragma).kinds == {"uninitialised_shared"}


def test_a_race_concerns_used_bytes_alone() -> None:
    assert run(GLOBAL, "", grid=2).kinds == {"global_race"}
    assert run(GLOBAL, '.pragma "used_bytes_mask 0xf";', grid=2).kinds == {"global_race"}
    assert run(GLOBAL, '.pragma "used_bytes_mask 0xf000";', grid=2).is_clean
