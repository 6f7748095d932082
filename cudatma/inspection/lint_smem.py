"""Risks on the side of shared memory: padding, alignment of what follows, bank conflicts, ignored steps."""

from __future__ import annotations

from collections.abc import Iterator

from cudatma.descriptor.spec import AnySpec, TiledSpec
from cudatma.inspection.banks import read_costs
from cudatma.inspection.finding import Finding
from cudatma.inspection.placement import MOST_SMEM_BYTES
from cudatma.layout import Interleave, Swizzle, traversed

_TMA_ALIGNMENT = 128
#: Boxes below this cannot keep the memory busy when one thread issues them.
_SMALL_BOX_BYTES = 4096


def padding(spec: AnySpec) -> Iterator[Finding]:
    """Rows narrower than the swizzle span are padded to it."""
    layout = spec.box_layout
    if layout.footprint_bytes == layout.expected_bytes:
        return
    yield Finding(
        "padded-rows",
        "warning",
        f"rows of {layout.row_bytes} bytes lie {layout.pitch_bytes} bytes apart: the box needs "
        f"{layout.footprint_bytes} bytes, the mbarrier counts {layout.expected_bytes}",
        f"shared memory holds the rows at a pitch of the swizzle span, {spec.swizzle.span_bytes} bytes",
        "measured on an H200; docs/descriptors.md",
        "set footprint_bytes aside, and expect expected_bytes; a narrower swizzle or a wider box wastes nothing",
    )


def alignment(spec: AnySpec) -> Iterator[Finding]:
    """Where the box may begin, and whether boxes one after another keep it."""
    need = spec.smem_alignment_bytes
    if need > _TMA_ALIGNMENT:
        yield Finding(
            "smem-alignment",
            "note",
            f"swizzle {spec.swizzle.label} repeats after {need} bytes: begin the box on a multiple of {need}",
            "TMA itself asks for 128 bytes; the XOR is on absolute addresses, so that elsewhere the pattern is shifted",
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
                f"{spec.footprint_bytes} bytes are no multiple of {step}: {why}",
                f"each box of a ring of stages begins on a multiple of {step} bytes",
                "cp.async.bulk.tensor, PTX ISA; measured on an H200",
                f"put stages {-(-spec.footprint_bytes // step) * step} bytes apart",
            )
            return


def banks(spec: AnySpec) -> Iterator[Finding]:
    """Reads that many lanes want of one bank."""
    if spec.footprint_bytes > MOST_SMEM_BYTES:
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
            else "read it with ldmatrix or in rows; eight rows are as many as a swizzle keeps apart"
        )
        yield Finding(
            f"{pattern}-conflicts",
            "warning" if severe else "note",
            f"{what} takes {cost.wavefronts} wavefronts where {cost.least} would do: {cost.ways:g}-way conflicts",
            "lanes that want different words of one of the 32 banks are served one after the other",
            "CUDA C++ Programming Guide, shared memory; cudatma.layout.wavefronts",
            remedy,
        )


def steps(spec: AnySpec) -> Iterator[Finding]:
    """Traversal steps that do nothing, and those that fetch for naught."""
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
    """Boxes too small to be worth a copy, and boxes larger than the tensor."""
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
        wide = [i for i in wide if i != spec.rank - 2]  # the box counts channels there, the tensor slices
    if wide:
        shown = ", ".join(f"box[{i}] {spec.box[i]} of {spec.dims[i]}" for i in wide)
        yield Finding(
            "box-beyond-tensor",
            "note",
            f"the box is larger than the tensor ({shown}): the rest is always filled, and counted",
            "elements outside of the tensor count for the mbarrier and take shared memory",
            "measured on an H200",
            "shrink the box where the tensor is never larger",
        )


RULES = (padding, alignment, banks, steps, size)
