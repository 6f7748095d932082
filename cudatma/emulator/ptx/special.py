"""Special registers of a thread. Source: PTX ISA, "Special Registers"."""

from __future__ import annotations

_AXES = ("x", "y", "z")
#: Special register -> the emulator type of its value.
WIDTHS: dict[str, str] = {
    **{
        f"{name}.{axis}": "u32"
        for name in ("tid", "ntid", "ctaid", "nctaid", "clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid")
        for axis in _AXES
    },
    **dict.fromkeys(
        (
            "laneid",
            "warpid",
            "nwarpid",
            "smid",
            "nsmid",
            "cluster_ctarank",
            "cluster_nctarank",
            "lanemask_eq",
            "lanemask_le",
            "lanemask_lt",
            "lanemask_ge",
            "lanemask_gt",
            "dynamic_smem_size",
            "total_smem_size",
            "aggr_smem_size",
            "envreg1",
            "envreg2",
            "reserved_smem_offset_1",
        ),
        "u32",
    ),
    "gridid": "u64",
}
#: Special registers that always hold the same here: what a driver or a profiler would set.
CONSTANTS: dict[str, int] = {
    **{f"envreg{k}": 0 for k in range(32) if k not in (1, 2)},
    **{f"pm{k}": 0 for k in range(8)},
    **{f"pm{k}_64": 0 for k in range(8)},
    "current_graph_exec": 0,
    "reserved_smem_offset_begin": 0,
    "reserved_smem_offset_end": 1024,
    "reserved_smem_offset_cap": 1024,
    "reserved_smem_offset_0": 0,
}
