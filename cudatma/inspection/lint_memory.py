"""Risks on the side of global memory: overlap, L2, sectors, allocation; and bits that belong to no field."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from cudatma.descriptor.bits import ALLOCATION_BIT
from cudatma.descriptor.codec import Decoded, decode, encode
from cudatma.descriptor.modes import L2Promotion, OobFill
from cudatma.descriptor.spec import AnySpec, TiledSpec
from cudatma.inspection.finding import Finding
from cudatma.layout import Interleave, traversed
from cudatma.target import Target

_SECTOR_BYTES = 32
#: Below this, drivers for Blackwell described memory wrongly. [NVIDIA driver 595.71.05, release notes]
_SMALL_ALLOCATION_BYTES = 128 << 10
_RELEASE_NOTES = "NVIDIA driver 595.71.05, release notes, known issues; Triton issue 10442 and pull request 11011"


def _inner_bytes(spec: AnySpec) -> int:
    """Bytes of one row of the tensor."""
    if spec.interleave is not Interleave.NONE:
        return spec.dims[0] * spec.interleave.slice_bytes
    return spec.dims[0] * spec.dtype.element_bits // 8


def overlap(spec: AnySpec) -> Iterator[Finding]:
    """Strides that make elements share bytes: 0, or less than what they step over."""
    extent = _inner_bytes(spec)
    for index, (dim, stride) in enumerate(zip(spec.dims[1:], spec.strides_bytes, strict=True)):
        if dim > 1 and stride < extent:
            zero = stride == 0
            yield Finding(
                "stride-zero" if zero else "overlapping-strides",
                "note" if zero else "warning",
                f"strides_bytes[{index}] is {stride}, dimension {index + 1} steps over {extent} bytes: "
                + ("every step reads the same bytes" if zero else "its elements overlap"),
                "the driver accepts it; loads read what is there, stores and reductions meet in the same bytes",
                "measured on an H200",
                "meant as a broadcast, load only" if zero else "check that the pitch is in bytes and not in elements",
            )
        extent = max(extent, stride * dim)


def l2(spec: AnySpec) -> Iterator[Finding]:
    """L2 promotion and the sectors that rows begin in."""
    if spec.l2_promotion is L2Promotion.NONE and spec.box_layout.row_bytes >= 64:
        row = spec.box_layout.row_bytes if spec.interleave is Interleave.NONE else spec.expected_bytes
        wanted = max(size for size in (64, 128, 256) if size <= max(64, row))
        yield Finding(
            "no-l2-promotion",
            "note",
            f"L2 fetches what a row touches and no more; rows of the box have {row} bytes",
            "l2_promotion rounds a fetch from memory up to 64, 128 or 256 bytes",
            "CUDA driver API, CUtensorMapL2promotion",
            f"l2_promotion='{wanted}B' where neighbouring boxes are read soon; measure it",
        )
    outer = zip(spec.dims[1:], spec.strides_bytes, strict=True)
    odd = [stride for dim, stride in outer if dim > 1 and stride % _SECTOR_BYTES]
    if spec.address % _SECTOR_BYTES or odd:
        what = f"strides_bytes {odd[0]}" if odd else f"address {spec.address:#x}"
        yield Finding(
            "rows-across-sectors",
            "note",
            f"{what} is no multiple of {_SECTOR_BYTES}: rows begin inside of a sector, and fetch one more",
            "memory is read in sectors of 32 bytes",
            "CUDA C++ Best Practices Guide, coalesced access",
            "pad the pitch to a multiple of 128 bytes where memory allows it",
        )


def outside(spec: AnySpec) -> Iterator[Finding]:
    """What the box leaves over at the tensor's ends, and how it is filled."""
    if isinstance(spec, TiledSpec) and spec.interleave is Interleave.NONE:
        spans = spec.box
        tails = [i for i, (dim, span) in enumerate(zip(spec.dims, spans, strict=True)) if dim % span]
        if tails:
            counts = traversed(spec.box, spec.element_strides, spec.interleave)
            boxes = prod(-(-dim // span) for dim, span in zip(spec.dims, spans, strict=True))
            moved = boxes * prod(counts)
            shown = ", ".join(f"dims[{i}] {spec.dims[i]} by {spans[i]}" for i in tails)
            yield Finding(
                "tail-boxes",
                "note",
                f"boxes do not divide the tensor ({shown}); covering it moves {moved} elements",
                "the last box of a dimension reaches beyond it; the rest is filled, and counted by the mbarrier",
                "measured on an H200",
                "expect the same bytes from every box",
            )
    if spec.oob_fill is OobFill.NAN:
        yield Finding(
            "nan-fill",
            "note",
            "outside of the tensor loads put 0x7FF7 into every 16 bits, for every type",
            "NaN fill is one pattern of 16 bits",
            "measured on an H200",
            "take zeros unless the consumer looks for this NaN",
        )


def address(spec: AnySpec) -> Iterator[Finding]:
    """An address that no tensor has."""
    if spec.address == 0:
        yield Finding(
            "null-address",
            "warning",
            "the global address is 0",
            "the driver accepts it; an access inside of the tensor then fails",
            "measured on an H200",
            "set it with TensorMap.replace_address() or tensormap.replace before the launch",
        )


def bits(decoded: Decoded, target: Target | None) -> Iterator[Finding]:
    """What the 128 bytes hold besides the spec. target: for some, drivers derive bits from the allocation."""
    spec, unknown = decoded.spec, decoded.unknown
    if unknown >> ALLOCATION_BIT & 1:
        yield Finding(
            "allocation-bit",
            "warning",
            f"bit {ALLOCATION_BIT} is set, as drivers for sm_100 and up do",
            "in allocations below 128 KiB that are not dense the bit is to be cleared, or accesses may fault",
            _RELEASE_NOTES,
            "clear it for memory of this kind, or use a driver with the repair; do not copy the map to another address",
        )
    elif target is not None and target.tensormap_knows_allocation and _is_small_and_sparse(spec):
        yield Finding(
            "small-allocation",
            "note",
            f"the tensor spans less than {_SMALL_ALLOCATION_BYTES >> 10} KiB and is not dense",
            f"drivers for {target.name} may set bit {ALLOCATION_BIT} for it, and accesses then fault now and then",
            _RELEASE_NOTES,
            f"clear bit {ALLOCATION_BIT} after encoding, or allocate more than 128 KiB",
        )
    if unknown & ~(1 << ALLOCATION_BIT):
        shown = [bit for bit in range(1024) if unknown >> bit & 1 and bit != ALLOCATION_BIT]
        more = f" and {len(shown) - 8} more" if len(shown) > 8 else ""
        yield Finding(
            "unknown-bits",
            "warning",
            f"bits {', '.join(map(str, shown[:8]))}{more} are set and belong to no field of this map",
            "a driver of sm_90 sets none of them",
            "20000 maps of an H200's driver",
            "see them with --bits; were the 128 bytes copied whole, and in the right order?",
        )
    if decoded.version:
        yield Finding(
            "version",
            "note",
            f"version is {decoded.version}; an H200's driver writes 0",
            "other drivers may write other bits; on an H200 it changes nothing",
            "measured on an H200",
            "make the map with the driver of the GPU that it is for",
        )
    expected = decode(encode(spec))
    if (decoded.smem_bytes, decoded.smem_pattern) != (expected.smem_bytes, expected.smem_pattern):
        yield Finding(
            "derived-fields",
            "note",
            f"smem_bytes {decoded.smem_bytes} and smem_pattern {decoded.smem_pattern} are not what the driver derives, "
            f"{expected.smem_bytes} and {expected.smem_pattern}",
            "tensormap.replace leaves them as they are; loads do not look at them",
            "measured on an H200",
            "nothing, where the map was edited on the GPU",
        )


def _is_small_and_sparse(spec: AnySpec) -> bool:
    """Whether the tensor's bytes span less than 128 KiB and have gaps or overlap."""
    row = _inner_bytes(spec)
    span, dense = row, row
    for dim, stride in zip(spec.dims[1:], spec.strides_bytes, strict=True):
        span += stride * (dim - 1)
        dense *= dim
    return span < _SMALL_ALLOCATION_BYTES and span != dense


RULES = (overlap, l2, outside, address)
