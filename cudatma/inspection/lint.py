"""Checks of a tensor map. Each finding states a severity, the violated rule, the source of the rule, and a remedy.

An error means that every access through the map fails, or that the target does not support the map. A warning means a
probable mistake, and a note is information. The rules are defined in descriptor.rules and descriptor.access.
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

#: All severities in descending order.
SEVERITIES = ("error", "warning", "note")


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding about a tensor map.

    Parameters
    ----------
    name : str
        Name of the rule.
    severity : str
        "error", "warning" or "note".
    message : str
        Description of the problem in this map.
    rule : str
        General statement of the rule.
    source : str
        Document or measurement on which the rule is based.
    remedy : str
        Suggested change, or "".
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
#: Drivers set bit 85 incorrectly for smaller allocations on Blackwell. [NVIDIA driver 595.71.05, release notes]
_SMALL_ALLOCATION_BYTES = 128 << 10
_RELEASE_NOTES = "NVIDIA driver 595.71.05, release notes, known issues; Triton issue 10442 and pull request 11011"


def _inner_bytes(spec: AnySpec) -> int:
    """Return the number of bytes in a row of the tensor."""
    if spec.interleave is not Interleave.NONE:
        return spec.dims[0] * spec.interleave.slice_bytes
    return spec.dims[0] * spec.dtype.element_bits // 8


def overlap(spec: AnySpec) -> Iterator[Finding]:
    """Find dimensions whose elements overlap because the stride is smaller than the extent of the inner dimensions."""
    extent = _inner_bytes(spec)
    for index, (dim, stride) in enumerate(zip(spec.dims[1:], spec.strides_bytes, strict=True)):
        if dim > 1 and stride < extent:
            zero = stride == 0
            yield Finding(
                "stride-zero" if zero else "overlapping-strides",
                "note" if zero else "warning",
                f"strides_bytes[{index}] is {stride} but the inner dimensions span {extent} bytes, so "
                + f"dimension {index + 1} {'repeats the same bytes' if zero else 'overlaps itself'}",
                "the driver accepts the stride; loads work, but stores and reductions write some bytes repeatedly",
                "measured on an H200",
                "use the map only for loads" if zero else "check that the pitch is in bytes, not elements",
            )
        extent = max(extent, stride * dim)


def l2(spec: AnySpec) -> Iterator[Finding]:
    """Find a missing L2 promotion and rows that do not start at a sector boundary."""
    if spec.l2_promotion is L2Promotion.NONE and spec.box_layout.row_bytes >= 64:
        row = spec.box_layout.row_bytes if spec.interleave is Interleave.NONE else spec.expected_bytes
        promotion = max(size for size in (64, 128, 256) if size <= max(64, row))
        yield Finding(
            "no-l2-promotion",
            "note",
            f"l2_promotion is none, so L2 fetches only the sectors that a box row touches ({row} bytes per row)",
            "l2_promotion rounds each fetch from DRAM up to 64, 128 or 256 bytes",
            "CUDA driver API, CUtensorMapL2promotion",
            f"try l2_promotion='{promotion}B' if neighboring boxes are loaded soon after each other",
        )
    outer = zip(spec.dims[1:], spec.strides_bytes, strict=True)
    odd = [stride for dim, stride in outer if dim > 1 and stride % _SECTOR_BYTES]
    if spec.address % _SECTOR_BYTES or odd:
        what = f"strides_bytes {odd[0]}" if odd else f"address {spec.address:#x}"
        yield Finding(
            "rows-across-sectors",
            "note",
            f"{what} is not a multiple of {_SECTOR_BYTES}, so a row can span one more sector than necessary",
            "memory is read in sectors of 32 bytes",
            "CUDA C++ Best Practices Guide, coalesced access",
            f"pad the pitch to a multiple of {_SECTOR_BYTES} bytes, preferably 128"
            if odd
            else "align the first element",
        )


def outside(spec: AnySpec) -> Iterator[Finding]:
    """Find boxes that extend beyond the tensor, and report a NaN fill value."""
    if isinstance(spec, TiledSpec) and spec.interleave is Interleave.NONE:
        spans = spec.box
        tails = [i for i, (dim, span) in enumerate(zip(spec.dims, spans, strict=True)) if dim % span]
        if tails:
            counts = traversed(spec.box, spec.element_strides, spec.interleave)
            boxes = prod(-(-dim // span) for dim, span in zip(spec.dims, spans, strict=True))
            moved = boxes * prod(counts)
            shown = "; ".join(f"dims[{i}] is {spec.dims[i]}, box[{i}] is {spans[i]}" for i in tails)
            yield Finding(
                "tail-boxes",
                "note",
                f"the box does not divide the tensor ({shown}); the boxes that cover it have {moved} elements in total",
                "the last box of a dimension extends beyond the tensor, and the mbarrier counts the filled elements",
                "measured on an H200",
                "expect the same number of bytes from every box",
            )
    if spec.oob_fill is OobFill.NAN:
        yield Finding(
            "nan-fill",
            "note",
            "loads fill every 16 bits outside the tensor with 0x7FF7, regardless of the element type",
            "the NaN fill value is a pattern of 16 bits",
            "measured on an H200",
            "fill with zeros unless the consumer checks for this NaN",
        )


def address(spec: AnySpec) -> Iterator[Finding]:
    """Find a null address."""
    if spec.address == 0:
        yield Finding(
            "null-address",
            "warning",
            "the global address is 0",
            "the driver accepts address 0, but an access inside the tensor fails",
            "measured on an H200",
            "set the address with TensorMap.replace_address() or tensormap.replace before the launch",
        )


def bits(decoded: Decoded, target: Target | None) -> Iterator[Finding]:
    """Find bits that are set although the spec does not require them."""
    spec, unknown = decoded.spec, decoded.unknown
    if unknown >> ALLOCATION_BIT & 1:
        yield Finding(
            "allocation-bit",
            "warning",
            f"bit {ALLOCATION_BIT} is set; drivers set it on sm_100 and later",
            "accesses may fault if the bit is set, the allocation is below 128 KiB and the tensor is not contiguous",
            _RELEASE_NOTES,
            "clear the bit for such a tensor, or use a driver with the fix; do not change the address of the map",
        )
    elif target is not None and target.tensormap_knows_allocation and _is_small_and_sparse(spec):
        yield Finding(
            "small-allocation",
            "note",
            f"the tensor spans less than {_SMALL_ALLOCATION_BYTES >> 10} KiB and is not contiguous",
            f"drivers for {target.name} may set bit {ALLOCATION_BIT} for such a tensor, and some accesses then fault",
            _RELEASE_NOTES,
            f"clear bit {ALLOCATION_BIT} after encoding, or allocate more than 128 KiB",
        )
    if unknown & ~(1 << ALLOCATION_BIT):
        shown = [bit for bit in range(1024) if unknown >> bit & 1 and bit != ALLOCATION_BIT]
        more = f" and {len(shown) - 8} more" if len(shown) > 8 else ""
        yield Finding(
            "unknown-bits",
            "warning",
            f"bits {', '.join(map(str, shown[:8]))}{more} are set but are outside all fields of this map",
            "drivers set none of these bits on sm_90",
            "20000 maps encoded by an H200's driver",
            "list all bits with --bits, and check that all 128 bytes were copied in order",
        )
    if decoded.version:
        yield Finding(
            "version",
            "note",
            f"version is {decoded.version}, but an H200's driver writes 0",
            "other drivers may write other values; an H200 ignores the field",
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
            "tensormap.replace does not update these fields, and loads ignore them",
            "measured on an H200",
            "ignore this note if a kernel has modified the map; otherwise, encode the map again",
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
#: Copies of smaller boxes do not saturate memory bandwidth if a single thread issues them.
_SMALL_BOX_BYTES = 4096


def padding(spec: AnySpec) -> Iterator[Finding]:
    """Find rows that TMA pads because they are narrower than the swizzle span."""
    layout = spec.box_layout
    if layout.footprint_bytes == layout.expected_bytes:
        return
    yield Finding(
        "padded-rows",
        "warning",
        f"rows of {layout.row_bytes} bytes have a pitch of {layout.pitch_bytes} bytes, so the box occupies "
        f"{layout.footprint_bytes} bytes but the mbarrier counts {layout.expected_bytes}",
        f"the pitch of the rows in shared memory is the swizzle span, {spec.swizzle.span_bytes} bytes",
        "measured on an H200; docs/reference/tensor_map_format.md",
        "allocate footprint_bytes and expect expected_bytes, or avoid padding with a narrower swizzle or a wider box",
    )


def alignment(spec: AnySpec) -> Iterator[Finding]:
    """Find box sizes that misalign the next box in shared memory."""
    need = spec.smem_alignment_bytes
    if need > _TMA_ALIGNMENT:
        yield Finding(
            "smem-alignment",
            "note",
            f"swizzle {spec.swizzle.label} repeats every {need} bytes, so the box must start at a multiple of {need}",
            "TMA requires only 128 bytes, but the swizzle XORs absolute addresses, so the pattern would be shifted",
            "PTX ISA 5.5.7; measured on an H200",
            f"declare the buffer with __align__({need}), or round up the address of dynamic shared memory",
        )
    for step, severity, why in (
        (_TMA_ALIGNMENT, "warning", "a copy to the next box traps with a misaligned address"),
        (need, "warning", "the swizzle pattern of the next box is shifted"),
    ):
        if spec.footprint_bytes % step:
            yield Finding(
                "stage-alignment",
                severity,
                f"the box occupies {spec.footprint_bytes} bytes, which is not a multiple of {step}, so {why}",
                f"each stage of a ring must start at a multiple of {step} bytes",
                "cp.async.bulk.tensor, PTX ISA; measured on an H200",
                f"place the stages {-(-spec.footprint_bytes // step) * step} bytes apart",
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
            f"use swizzle 128B with rows of {min(128, spec.box_layout.row_bytes)} bytes, which spreads 8 rows over all "
            "banks"
            if wider
            else "read the box with ldmatrix or in rows, because a swizzle spreads at most eight rows over the banks"
        )
        yield Finding(
            f"{pattern}-conflicts",
            "warning" if severe else "note",
            f"{what} takes {cost.wavefronts} wavefronts instead of {cost.min_wavefronts} ({cost.ways:g}-way conflicts)",
            "accesses by different lanes to different words in the same bank are serialized",
            "CUDA C++ Programming Guide, shared memory; cudatma.layout.wavefronts",
            remedy,
        )


def steps(spec: AnySpec) -> Iterator[Finding]:
    """Find traversal strides that have no effect."""
    if spec.interleave is Interleave.NONE and spec.element_strides[0] > 1:
        yield Finding(
            "inner-step-ignored",
            "warning",
            f"element_strides[0] is {spec.element_strides[0]} but has no effect, because a load copies whole box rows",
            "without interleaving, the innermost traversal stride changes only the driver's smem_bytes",
            "CUDA driver API, cuTensorMapEncodeTiled; measured on an H200",
            "set element_strides[0] to 1, and describe skipped elements as another dimension",
        )


def size(spec: AnySpec) -> Iterator[Finding]:
    """Find boxes that are too small for high bandwidth, or larger than the tensor."""
    if spec.expected_bytes < _SMALL_BOX_BYTES:
        yield Finding(
            "small-box",
            "note",
            f"one copy transfers only {spec.expected_bytes} bytes",
            "copies of 4 KiB that one thread issues reach about half of the bandwidth of 32 KiB copies",
            "measured on an H200, one thread block per SM",
            "enlarge the box, or issue copies from more blocks or threads",
        )
    if not isinstance(spec, TiledSpec):
        return
    counts = traversed(spec.box, spec.element_strides, spec.interleave)
    wide = [i for i, (count, dim) in enumerate(zip(counts, spec.dims, strict=True)) if count > dim]
    if spec.interleave is not Interleave.NONE:
        wide = [i for i in wide if i != spec.rank - 2]  # There, box counts channels, and dims counts slices.
    if wide:
        shown = "; ".join(f"box[{i}] is {spec.box[i]}, dims[{i}] is {spec.dims[i]}" for i in wide)
        yield Finding(
            "box-beyond-tensor",
            "note",
            f"the box is larger than the tensor ({shown}), so every load fills the remaining elements",
            "elements outside the tensor count toward expected_bytes and occupy shared memory",
            "measured on an H200",
            "reduce the box if the tensor is never larger",
        )


RULES = (padding, alignment, banks, steps, size, overlap, l2, outside, address)


@dataclass(frozen=True, slots=True)
class Lint:
    """Result of ``lint``.

    Parameters
    ----------
    findings : tuple of Finding
        Findings in descending order of severity.
    target : str or None
        Architecture for which the map was checked, or None for all architectures.
    """

    findings: tuple[Finding, ...]
    target: str | None

    @property
    def worst(self) -> str | None:
        """Highest severity among the findings, or None if there are no findings."""
        return self.findings[0].severity if self.findings else None

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON-compatible data."""
        return {"target": self.target, "worst": self.worst, "findings": [asdict(f) for f in self.findings]}

    def __str__(self) -> str:
        return "\n".join(map(str, self.findings)) or "no risks"


def lint(spec: AnySpec, decoded: Decoded | None = None, target: Target | None = None) -> Lint:
    """Return the findings about a map.

    ``decoded`` is the decoded map, or None if the map has no bytes. If it is given, the function also checks its
    derived fields and unknown bits. ``target`` is the architecture for which the map is checked. If it is None, only a
    map that no target supports is an error.
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
            f"not supported on {names}: {first.field} is {first.got}",
            f"{first.field}: {first.allowed}",
            "descriptor.access.check_target: CUDA driver API, PTX ISA target notes, shared memory per block",
            first.remedy or "choose another target, or change the map",
        )

    return rule


def _accesses(spec: AnySpec) -> Iterator[Finding]:
    """Find a map whose first box traps, or that does not support loads."""
    try:
        check_traps(spec, origin(spec))
        check_load(spec, origin(spec))
    except DescriptorError as error:
        if error.field == "swizzle":
            yield Finding(
                "stores-only",
                "note",
                f"{error.field} is {error.got}, which loads do not support",
                f"{error.field}: {error.allowed}",
                "PTX ISA 5.5.1.1 and 5.5.7",
                "use another swizzle for loads",
            )
            return
        yield Finding(
            "every-access-traps",
            "error",
            f"{error.field} is {error.got}, so every access traps",
            f"{error.field}: {error.allowed}",
            "descriptor.access.check_traps, measured on an H200",
            error.remedy or "create a map of a part of the tensor",
        )


def _stores(spec: AnySpec) -> Iterator[Finding]:
    """Find stores and reductions that are illegal or write outside the tensor."""
    if isinstance(spec, Im2colWideSpec):
        return
    try:
        check_store(spec)
    except DescriptorError as error:
        clips = error.field == "dims[0]"
        effect = (
            "a store that reaches the end of a row overwrites the bytes after it" if clips else "stores are illegal"
        )
        yield Finding(
            "store-clips-at-16-bytes" if clips else "loads-only",
            "warning" if clips else "note",
            f"{error.field} is {error.got}, so {effect}",
            f"{error.field}: {error.allowed}",
            "measured on an H200; Triton issue 11583" if clips else "PTX ISA 5.5.1.1 and 5.5.7",
            error.remedy,
        )
    if isinstance(spec, Im2colSpec) and (min(spec.lower_corner) < 0 or max(spec.upper_corner) > 0):
        yield Finding(
            "im2col-store-traps",
            "note",
            f"corners {list(spec.lower_corner)} and {list(spec.upper_corner)} extend beyond the tensor, so stores trap",
            "for stores and reductions, lower corners must be at least 0, and upper corners at most 0",
            "descriptor.access.check_write_traps, measured on an H200",
            "store through a map without padding",
        )


def _evidence(spec: AnySpec) -> Iterator[Finding]:
    """Find features that have not been verified on a GPU."""
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
            WIDE_NOTE
            if parts == ["im2col wide"]
            else f"{what}: based on NVIDIA's documentation, not verified on a GPU",
            "the description follows the CUDA driver API and the PTX ISA",
            "CUDA driver API, cuTensorMapEncode*; PTX ISA 5.5",
            "run TensorMap.compare() on a GPU that supports the feature",
        )
