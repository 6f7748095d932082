"""Members of the launch struct of dense GEMMs."""

from __future__ import annotations

from cudatma.kernels.launch_struct import Member
from cudatma.kernels.work_struct import MEMBERS as WORK_MEMBERS

MEMBERS = WORK_MEMBERS | {
    member.name: member
    for member in (
        Member("output_by_tma", "u32", "1: TMA can write the result"),
        Member("alternates", "u32", "1: every other tile of a CTA goes through K backwards"),
        Member("matrix_tiles_m", "u32", "tiles along M of one matrix of the batch"),
        Member("alpha", "float", "factor of the products"),
        Member("beta", "float", "factor of what the result held before"),
        Member("by_matrix_tiles_m", "Divisor", "divides by matrix_tiles_m"),
        Member("output_batch", "u64", "elements from one matrix of the result to the next"),
        Member("a_box_rows", "u32", "rows of a box of A"),
        Member("stage_bytes", "u32", "that the boxes of a stage deliver"),
        Member("a_pitch", "u64", "elements from one row of A to the next, or from one column"),
        Member("b_pitch", "u64", "elements from one row of B to the next, or from one column"),
        Member("a_batch", "u64", "elements from one matrix of A to the next"),
        Member("b_batch", "u64", "elements from one matrix of B to the next"),
        Member("a_scale_row", "u64", "elements from one row's scale to the next; 0: one for all"),
        Member(
            "b_scale_column",
            "u64",
            "elements from the scale of one column, or block of them, to the next; 0: one for all",
        ),
        Member("a_scale_k", "u64", "elements from the scale of one block of K to the next"),
        Member("b_scale_k", "u64", "the same of B"),
        Member("a_scale_batch", "u64", "elements from the scales of one matrix to the next"),
        Member("b_scale_batch", "u64", "the same of B"),
    )
}
