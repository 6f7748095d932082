"""Convert a tensor map to the plain data that ``cudatma inspect --json`` prints."""

from __future__ import annotations

from typing import Any

from cudatma.descriptor.codec import DESCRIPTOR_BYTES, Decoded, decode
from cudatma.descriptor.spec import AnySpec, Im2colSpec, Im2colWideSpec, TiledSpec

#: Note in the description of every im2col wide map.
WIDE_NOTE = "im2col wide (sm_100 and later): based on NVIDIA's documentation, not verified on a GPU"


def describe_descriptor(data: bytes) -> dict[str, Any]:
    """Return the fields of a tensor map as plain data.

    Parameters
    ----------
    data : bytes
        The 128 bytes of the map.

    Returns
    -------
    dict
        Fields by name. Lists are in TMA order. ``strides`` contains rank - 1 pitches in bytes. ``shape``, ``box`` and
        the corners are in elements. For im2col maps, ``box`` is None, and corners, channels and pixels replace it.
        ``unknown_bits`` lists the indices of the set bits outside all fields.

    Raises
    ------
    DescriptorError
        If the bytes are not a tensor map.
    """
    decoded = decode(data)
    return describe_config(decoded.spec) | describe_derived(decoded)


def describe_derived(decoded: Decoded) -> dict[str, Any]:
    """Return the fields of a map that its spec does not contain: derived fields and unknown bits."""
    return {
        "version": decoded.version,
        "smem_bytes": decoded.smem_bytes,
        "smem_pattern": decoded.smem_pattern,
        "unknown_bits": [bit for bit in range(8 * DESCRIPTOR_BYTES) if decoded.unknown >> bit & 1],
    }


def describe_config(spec: AnySpec) -> dict[str, Any]:
    """Return the fields that follow from a spec, named as in describe_descriptor().

    For an im2col wide spec, the fields include the mode, the two corners along W, and a note about the evidence.
    """
    fields: dict[str, Any] = {
        "kind": "tiled" if isinstance(spec, TiledSpec) else "im2col" if isinstance(spec, Im2colSpec) else "im2col_wide",
        "dtype": spec.dtype.name,
        "rank": spec.rank,
        "address": spec.address,
        "shape": list(spec.dims),
        "strides": list(spec.strides_bytes),
        "box": list(spec.box) if isinstance(spec, TiledSpec) else None,
        "element_strides": list(spec.element_strides),
        "interleave": spec.interleave.label,
        "swizzle": spec.swizzle.label,
        "l2_promotion": spec.l2_promotion.label,
        "oob_fill": spec.oob_fill.label,
    }
    if isinstance(spec, Im2colSpec):
        fields |= {"lower_corner": list(spec.lower_corner), "upper_corner": list(spec.upper_corner)}
    elif isinstance(spec, Im2colWideSpec):
        fields |= {
            "mode": spec.mode.label,
            "lower_corner_w": spec.lower_corner_w,
            "upper_corner_w": spec.upper_corner_w,
        }
    if not isinstance(spec, TiledSpec):
        fields |= {"channels_per_pixel": spec.channels_per_pixel, "pixels_per_column": spec.pixels_per_column}
    fields |= {
        "expected_bytes": spec.expected_bytes,
        "footprint_bytes": spec.footprint_bytes,
        "smem_alignment_bytes": spec.smem_alignment_bytes,
    }
    return fields | ({"note": WIDE_NOTE} if isinstance(spec, Im2colWideSpec) else {})


def headline(spec: AnySpec) -> str:
    """Return a one-line summary of a map: type, shape, box and swizzle, innermost dimension first."""
    shape = " × ".join(map(str, spec.dims))
    if isinstance(spec, TiledSpec):
        part = f"box {' × '.join(map(str, spec.box))}"
    else:
        part = f"{spec.pixels_per_column} pixels × {spec.channels_per_pixel} channels"
    kind = {"TiledSpec": "tiled", "Im2colSpec": "im2col"}.get(type(spec).__name__, "im2col wide")
    line = f"{kind} {spec.dtype.name} {shape}, {part}"
    line += f", swizzle {spec.swizzle.label}" if int(spec.swizzle) else ", no swizzle"
    return line + (f", interleave {spec.interleave.label}" if int(spec.interleave) else "")
