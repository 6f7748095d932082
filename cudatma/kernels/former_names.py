"""Names that recorded data still has: tuning files of schemas 2 and 3, and benchmarks/results/."""

from __future__ import annotations

from typing import Any

#: Kernels of tuning entries.
KERNELS = {"strip": "skinny", "portable": "mma_sync"}
#: Fields of specs.
SPEC_FIELDS = {
    "strips": "n_tiles",
    "blocks_k": "cluster_k",
    "steps": "mmas_per_commit",
    "in_flight": "commits_in_flight",
    "warps_k": "slice_k",
    "feed_weight": "weight_load_path",
    "feed_scale": "scale_load_path",
    "feed_activation": "activation_load_path",
}


def renamed(fields: dict[str, Any], names: dict[str, str] = SPEC_FIELDS) -> dict[str, Any]:
    """Fields under their present names."""
    return {names.get(name, name): value for name, value in fields.items()}


def renamed_entry(entry: dict[str, Any]) -> dict[str, Any]:
    """A tuning entry of schema 2 or 3 under present names. Damaged fields stay unchanged: the reader reports them."""
    kernel, spec = entry.get("kernel"), entry.get("spec")
    found = {"family": "marlin"} | entry
    if isinstance(kernel, str):
        found["kernel"] = KERNELS.get(kernel, kernel)
    if isinstance(spec, dict):
        found["spec"] = renamed(spec)
    return found


def renamed_section(section: dict[str, Any]) -> dict[str, Any]:
    """A section of a tuning file of schema 2 or 3, its GPU and entries under present names."""
    gpu = renamed(section["gpu"], {"multiprocessors": "sm_count"})
    return section | {"gpu": gpu, "entries": [renamed_entry(raw) for raw in section["entries"]]}
