"""Risks of a tensor map by severity. Each finding states its rule, the source of the rule, and a remedy.

An error means that every access through the map fails, or that the target cannot use the map. A warning means a
probable mistake, and a note is information. The rules come from descriptor.rules and descriptor.access.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from cudatma.descriptor.access import check_load, check_store, check_target, check_traps
from cudatma.descriptor.bits import ALLOCATION_BIT
from cudatma.descriptor.codec import Decoded, decode, encode
from cudatma.descriptor.rules import L2Promotion, OobFill
from cudatma.descriptor.spec import AnySpec, Im2colSpec, Im2colWideSpec, TiledSpec
from cudatma.errors import DescriptorError, FieldError, TargetError
from cudatma.inspection.banks import read_costs
from cudatma.inspection.fields import WIDE_NOTE
from cudatma.inspection.placement import MAX_SMEM_BYTES, origin
from cudatma.layout import Interleave, Swizzle, traversed
from cudatma.target import TARGETS, Target

#: All severities, the most severe first.
SEVERITIES = ("error", "warning", "note")


@dataclass(frozen=True, slots=True)
class Finding:
    """A risk of a tensor map.

    name: the rule's name. severity: one of SEVERITIES. message: the finding for this map. rule: the requirement.
    source: the document that states the rule. remedy: what the user can do.
    """

    name: str
    severity: str
    message: str
    rule: str
    source: str
    remedy: str

    def __str__(self) -> str:
        lines = [f"{self.severity}: {self.name}: {self.message}", f"  rule: {self.rule} [{self.source}]"]
        return "\n".join([*lines, *([f"  remedy: {self.remedy}"] if self.remedy else [])])


_SECTOR_BYTES = 32
#: Drivers for Blackwell described smaller allocations wrongly. [NVIDIA driver 595.71.05, release notes]
_SMALL_ALLOCATION_BYTES = 128 << 10
_RELEASE_NOTES = "NVIDIA driver 595.71.05, release notes, known issues; Triton issue 10442 and pull request 11011"


def _inner_bytes(spec: AnySpec) -> int:
    """Return the number of bytes in one row of the tensor."""
    if spec.interleave is not Interleave.NONE:
        return spec.dims[0] * spec.interleave.slice_bytes
    return spec.dims[0] * spec.dtype.element_bits // 8


def overlap(spec: AnySpec) -> Iterator[Finding]:
    """Find strides with which elements share bytes, because a stride is 0 or less than the extent inside it."""
    extent = _inner_bytes(spec)
    for index, (dim, stride) in enumerate(zip(spec.dims[1:], spec.strides_bytes, strict=True)):
        if dim > 1 and stride < extent:
            zero = stride == 0
            yield Finding(
                "stride-zero" if zero else "overlapping-strides",
                "note" if zero else "warning",
                f"strides_bytes[{index}] is {stride}, dimension {index + 1} steps over {extent} bytes: "
                + ("every step reads the same bytes" if zero else "its elements overlap"),
                "the driver accepts it; loads work, but stores and reductions write some bytes more than once",
                "measured on an H200",
                "use a broadcast for loads only" if zero else "check that the pitch is in bytes and not in elements",
            )
        extent = max(extent, stride * dim)


def l2(spec: AnySpec) -> Iterator[Finding]:
    """Find missing L2 promotion and rows that do not start at a sector."""
    if spec.l2_promotion is L2Promotion.NONE and spec.box_layout.row_bytes >= 64:
        row = spec.box_layout.row_bytes if spec.interleave is Interleave.NONE else spec.expected_bytes
        promotion = max(size for size in (64, 128, 256) if size <= max(64, row))
        yield Finding(
            "no-l2-promotion",
            "note",
            f"L2 fetches only the sectors that a row touches; rows of the box have {row} bytes",
            "l2_promotion rounds a fetch from memory up to 64, 128 or 256 bytes",
            "CUDA driver API, CUtensorMapL2promotion",
            f"l2_promotion='{promotion}B' if neighboring boxes are read soon; measure it",
        )
    outer = zip(spec.dims[1:], spec.strides_bytes, strict=True)
    odd = [stride for dim, stride in outer if dim > 1 and stride % _SECTOR_BYTES]
    if spec.address % _SECTOR_BYTES or odd:
        what = f"strides_bytes {odd[0]}" if odd else f"address {spec.address:#x}"
        yield Finding(
            "rows-across-sectors",
            "note",
            f"{what} is not a multiple of {_SECTOR_BYTES}: rows begin inside a sector and fetch one more",
            "memory is read in sectors of 32 bytes",
            "CUDA C++ Best Practices Guide, coalesced access",
            f"pad the pitch to a multiple of {_SECTOR_BYTES} bytes, better 128" if odd else "align the first element",
        )


def outside(spec: AnySpec) -> Iterator[Finding]:
    """Find boxes that extend beyond the tensor, and report the fill value."""
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
                "the last box of a dimension reaches beyond the tensor; the mbarrier counts the filled elements",
                "measured on an H200",
                "expect the same bytes from every box",
            )
    if spec.oob_fill is OobFill.NAN:
        yield Finding(
            "nan-fill",
            "note",
            "outside the tensor, loads write 0x7FF7 into every 16 bits, for every type",
            "the NaN fill is one 16-bit pattern",
            "measured on an H200",
            "use zeros unless the consumer checks for this NaN",
        )


def address(spec: AnySpec) -> Iterator[Finding]:
    """Find a null address."""
    if spec.address == 0:
        yield Finding(
            "null-address",
            "warning",
            "the global address is 0",
            "the driver accepts it; an access inside the tensor then fails",
            "measured on an H200",
            "set it with TensorMap.replace_address() or tensormap.replace before the launch",
        )


def bits(decoded: Decoded, target: Target | None) -> Iterator[Finding]:
    """Find bits that do not follow from the config. On some targets, drivers derive such bits from the allocation."""
    spec, unknown = decoded.spec, decoded.unknown
    if unknown >> ALLOCATION_BIT & 1:
        yield Finding(
            "allocation-bit",
            "warning",
            f"bit {ALLOCATION_BIT} is set, as by drivers for sm_100 and up",
            "for allocations below 128 KiB that are not dense, the bit must be cleared, or accesses may fault",
            _RELEASE_NOTES,
            "clear it for memory of this kind, or use a fixed driver; do not copy the map to another address",
        )
    elif target is not None and target.tensormap_knows_allocation and _is_small_and_sparse(spec):
        yield Finding(
            "small-allocation",
            "note",
            f"the tensor spans less than {_SMALL_ALLOCATION_BYTES >> 10} KiB and is not dense",
            f"drivers for {target.name} may set bit {ALLOCATION_BIT} for it, and accesses then fault occasionally",
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
            "20000 maps encoded by an H200's driver",
            "list them with --bits, and check that all 128 bytes were copied in the right order",
        )
    if decoded.version:
        yield Finding(
            "version",
            "note",
            f"version is {decoded.version}; an H200's driver writes 0",
            "other drivers may write other bits; on an H200 it changes nothing",
            "measured on an H200",
            "encode the map with the driver of the GPU that uses it",
        )
    expected = decode(encode(spec))
    if (decoded.smem_bytes, decoded.smem_pattern) != (expected.smem_bytes, expected.smem_pattern):
        yield Finding(
            "derived-fields",
            "note",
            f"smem_bytes {decoded.smem_bytes} and smem_pattern {decoded.smem_pattern} differ from the driver's values, "
            f"{expected.smem_bytes} and {expected.smem_pattern}",
            "tensormap.replace does not change them, and loads ignore them",
            "measured on an H200",
            "nothing, if the map was edited on the GPU",
        )


def _is_small_and_sparse(spec: AnySpec) -> bool:
    """Return whether the tensor spans less than 128 KiB and has gaps or overlaps."""
    row = _inner_bytes(spec)
    span, dense = row, row
    for dim, stride in zip(spec.dims[1:], spec.strides_bytes, strict=True):
        span += stride * (dim - 1)
        dense *= dim
    return span < _SMALL_ALLOCATION_BYTES and span != dense


_TMA_ALIGNMENT = 128
#: Smaller boxes cannot keep the memory busy if one thread issues them.
_SMALL_BOX_BYTES = 4096


def padding(spec: AnySpec) -> Iterator[Finding]:
    """Find rows that are narrower than the swizzle span, which TMA pads."""
    layout = spec.box_layout
    if layout.footprint_bytes == layout.expected_bytes:
        return
    yield Finding(
        "padded-rows",
        "warning",
        f"rows of {layout.row_bytes} bytes are {layout.pitch_bytes} bytes apart: the box needs "
        f"{layout.footprint_bytes} bytes, the mbarrier counts {layout.expected_bytes}",
        f"shared memory holds the rows at a pitch of the swizzle span, {spec.swizzle.span_bytes} bytes",
        "measured on an H200; docs/reference/tensor_map_format.md",
        "reserve footprint_bytes, and expect expected_bytes; a narrower swizzle or a wider box wastes nothing",
    )


def alignment(spec: AnySpec) -> Iterator[Finding]:
    """Find boxes whose size breaks the alignment of the next box."""
    need = spec.smem_alignment_bytes
    if need > _TMA_ALIGNMENT:
        yield Finding(
            "smem-alignment",
            "note",
            f"swizzle {spec.swizzle.label} repeats after {need} bytes: start the box at a multiple of {need}",
            "TMA itself requires 128 bytes; the XOR applies to absolute addresses, so elsewhere the pattern is shifted",
            "PTX ISA 5.5.7; measured on an H200",
            f"declare the buffer __align__({need}), or round the dynamic shared memory's address up",
        )
    for step, severity, why in (
        (_TMA_ALIGNMENT, "warning", "a box right after it traps with a misaligned address"),
        (need, "warning", "a box right after it has its pattern shifted"),
    ):
        if spec.footprint_bytes % step:
            yield Finding(
                "stage-alignment",
                severity,
                f"{spec.footprint_bytes} bytes are not a multiple of {step}: {why}",
                f"each box of a ring of stages starts at a multiple of {step} bytes",
                "cp.async.bulk.tensor, PTX ISA; measured on an H200",
                f"place stages {-(-spec.footprint_bytes // step) * step} bytes apart",
            )
            return


def banks(spec: AnySpec) -> Iterator[Finding]:
    """Find reads with bank conflicts."""
    if spec.footprint_bytes > MAX_SMEM_BYTES:
        return
    costs = {cost.pattern: cost for cost in read_costs(spec)}
    for pattern, what in (("ldmatrix", "ldmatrix (8 rows of 16 bytes)"), ("column", "a column (32 rows, one element)")):
        cost = costs.get(pattern)
        if cost is None or cost.ways <= 1:
            continue
        severe = pattern == "ldmatrix" or cost.ways > 8
        wider = spec.swizzle is not Swizzle.B128 and not spec.swizzle.is_atom
        remedy = (
            f"swizzle 128B with rows of {min(128, spec.box_layout.row_bytes)} bytes spreads eight rows over all banks"
            if wider
            else "read it with ldmatrix or in rows; a swizzle spreads at most eight rows over the banks"
        )
        yield Finding(
            f"{pattern}-conflicts",
            "warning" if severe else "note",
            f"{what} takes {cost.wavefronts} wavefronts instead of {cost.min_wavefronts}: {cost.ways:g}-way conflicts",
            "lanes that access different words of one of the 32 banks are served one after another",
            "CUDA C++ Programming Guide, shared memory; cudatma.layout.wavefronts",
            remedy,
        )


def steps(spec: AnySpec) -> Iterator[Finding]:
    """Find traversal steps that have no effect."""
    if spec.interleave is Interleave.NONE and spec.element_strides[0] > 1:
        yield Finding(
            "inner-step-ignored",
            "warning",
            f"element_strides[0] is {spec.element_strides[0]}, and is ignored: the whole row of the box arrives",
            "without interleave the innermost step has no effect; only the driver's smem_bytes divides by it",
            "CUDA driver API, cuTensorMapEncodeTiled; measured on an H200",
            "set it to 1; to skip elements, describe them as another dimension",
        )


def size(spec: AnySpec) -> Iterator[Finding]:
    """Find boxes that are too small for one copy, or larger than the tensor."""
    if spec.expected_bytes < _SMALL_BOX_BYTES:
        yield Finding(
            "small-box",
            "note",
            f"one copy moves {spec.expected_bytes} bytes",
            "a thread issues one copy at a time: 4 KiB copies reach about half of the bandwidth of 32 KiB ones",
            "measured on an H200, one thread block per SM",
            "enlarge the box, or let more blocks or threads issue copies",
        )
    if not isinstance(spec, TiledSpec):
        return
    counts = traversed(spec.box, spec.element_strides, spec.interleave)
    wide = [i for i, (count, dim) in enumerate(zip(counts, spec.dims, strict=True)) if count > dim]
    if spec.interleave is not Interleave.NONE:
        wide = [i for i in wide if i != spec.rank - 2]  # there the box counts channels and the tensor slices
    if wide:
        shown = ", ".join(f"box[{i}] {spec.box[i]} of {spec.dims[i]}" for i in wide)
        yield Finding(
            "box-beyond-tensor",
            "note",
            f"the box is larger than the tensor ({shown}): the rest is always filled, and counted",
            "elements outside the tensor count for the mbarrier and take shared memory",
            "measured on an H200",
            "shrink the box if the tensor is never larger",
        )


RULES = (padding, alignment, banks, steps, size, overlap, l2, outside, address)


@dataclass(frozen=True, slots=True)
class Lint:
    """Findings, the most severe first. target: the architecture for which the map was checked, or None for all."""

    findings: tuple[Finding, ...]
    target: str | None

    @property
    def worst(self) -> str | None:
        """Worst severity, or None if there are no findings."""
        return self.findings[0].severity if self.findings else None

    def to_json(self) -> dict[str, Any]:
        """Return plain data: target, worst and the findings."""
        return {"target": self.target, "worst": self.worst, "findings": [asdict(f) for f in self.findings]}

    def __str__(self) -> str:
        return "\n".join(map(str, self.findings)) or "no risks"


def lint(spec: AnySpec, decoded: Decoded | None = None, target: Target | None = None) -> Lint:
    """Return the findings about a map.

    ``decoded`` holds the fields of the map's bytes that the config does not contain, if there are bytes. ``target`` is
    the architecture for which the map is checked. By default, a map is an error only if no target can use it.
    """
    findings: list[Finding] = []
    for rule in (_targets(target), _accesses, _stores, *RULES):
        findings += rule(spec)
    if decoded is not None:
        findings += bits(decoded, target)
    findings += _evidence(spec)
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return Lint(tuple(findings), target.name if target is not None else None)


def _targets(target: Target | None) -> Callable[[AnySpec], Iterable[Finding]]:
    def rule(spec: AnySpec) -> Iterator[Finding]:
        refused: dict[str, FieldError] = {}
        for candidate in [target] if target is not None else TARGETS.values():
            try:
                check_target(spec, candidate)
            except (DescriptorError, TargetError) as error:
                refused[candidate.name] = error
        if not refused:
            return
        names, first = ", ".join(refused), next(iter(refused.values()))
        everywhere = target is not None or len(refused) == len(TARGETS)
        yield Finding(
            "target",
            "error" if everywhere else "note",
            f"{'cannot be used on' if everywhere else 'not for'} {names}: {first.field} is {first.got}",
            f"{first.field}: {first.allowed}",
            "descriptor.access.check_target: CUDA driver API, PTX ISA target notes, shared memory of a block",
            first.remedy or "choose another target, or change the map",
        )

    return rule


def _accesses(spec: AnySpec) -> Iterator[Finding]:
    """Find a map that traps at its first box, or that loads cannot use."""
    try:
        check_traps(spec, origin(spec))
        check_load(spec, origin(spec))
    except DescriptorError as error:
        if error.field == "swizzle":
            yield Finding(
                "stores-only",
                "note",
                f"{error.field} is {error.got}: loads are ruled out",
                f"{error.field}: {error.allowed}",
                "PTX ISA 5.5.1.1 and 5.5.7",
                "use another swizzle for loads",
            )
            return
        yield Finding(
            "every-access-traps",
            "error",
            f"{error.field} is {error.got}: every access traps",
            f"{error.field}: {error.allowed}",
            "descriptor.access.check_traps, measured on an H200",
            error.remedy or "describe a part of the tensor",
        )


def _stores(spec: AnySpec) -> Iterator[Finding]:
    """Find stores and reductions that are illegal or write outside the tensor."""
    if isinstance(spec, Im2colWideSpec):
        return
    try:
        check_store(spec)
    except DescriptorError as error:
        clips = error.field == "dims[0]"
        effect = "a store that reaches the end of a row overwrites what follows" if clips else "stores are ruled out"
        yield Finding(
            "store-clips-at-16-bytes" if clips else "loads-only",
            "warning" if clips else "note",
            f"{error.field} is {error.got}: {effect}",
            f"{error.field}: {error.allowed}",
            "measured on an H200; Triton issue 11583" if clips else "PTX ISA 5.5.1.1 and 5.5.7",
            error.remedy,
        )
    if isinstance(spec, Im2colSpec) and (min(spec.lower_corner) < 0 or max(spec.upper_corner) > 0):
        yield Finding(
            "im2col-store-traps",
            "note",
            f"corners {list(spec.lower_corner)} and {list(spec.upper_corner)} reach beyond the tensor: stores trap",
            "stores and reductions: no lower corner below 0, no upper corner above 0",
            "descriptor.access.check_write_traps, measured on an H200",
            "store through a map without padding",
        )


def _evidence(spec: AnySpec) -> Iterator[Finding]:
    """Find features that were not verified on any GPU."""
    parts = []
    if isinstance(spec, Im2colWideSpec):
        parts.append("im2col wide")
    if spec.dtype.packed:
        parts.append(f"the packed type {spec.dtype.name}")
    if spec.swizzle.is_atom:
        parts.append(f"swizzle {spec.swizzle.label}")
    if parts:
        what = " and ".join(parts)
        yield Finding(
            "documents-only",
            "note",
            WIDE_NOTE if parts == ["im2col wide"] else f"{what}: from NVIDIA's documents only, verified on no GPU",
            "its description follows the CUDA driver API and the PTX ISA",
            "CUDA driver API, cuTensorMapEncode*; PTX ISA 5.5",
            "compare with the driver on such a GPU: TensorMap.compare()",
        )
