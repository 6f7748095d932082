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
        ),
        "u32",
    ),
    "gridid": "u64",
    "envreg0": "u32",
}
