"""Risks of a tensor map, by severity: each with its rule, where the rule comes from, and what to do.

An error is a map that no access survives, or that the target cannot use; a warning is likely to be a mistake; a note is
worth knowing. The rules themselves are in descriptor.rules and descriptor.access; this module calls them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from cudatma.descriptor.access import check_load, check_store, check_target, check_traps
from cudatma.descriptor.codec import Decoded
from cudatma.descriptor.spec import AnySpec, Im2colSpec, Im2colWideSpec
from cudatma.errors import DescriptorError, FieldError, TargetError
from cudatma.inspection import lint_rules
from cudatma.inspection.fields import WIDE_NOTE
from cudatma.inspection.lint_rules import SEVERITIES, Finding
from cudatma.inspection.placement import origin
from cudatma.target import TARGETS, Target


@dataclass(frozen=True, slots=True)
class Lint:
    """Findings, the most severe first. target: the architecture that the map was judged for, None for all."""

    findings: tuple[Finding, ...]
    target: str | None

    @property
    def worst(self) -> str | None:
        """The worst severity, None where nothing was found."""
        return self.findings[0].severity if self.findings else None

    def to_json(self) -> dict[str, Any]:
        """Plain data: target, worst, and the findings."""
        return {"target": self.target, "worst": self.worst, "findings": [asdict(f) for f in self.findings]}


def lint(spec: AnySpec, decoded: Decoded | None = None, target: Target | None = None) -> Lint:
    """Everything that is worth saying about a map.

    decoded: what its bytes hold besides the spec, where there are bytes. target: the architecture to judge it for; by
    default a map is an error only where no target can use it.
    """
    found: list[Finding] = []
    for rule in (_targets(target), _accesses, _stores, *lint_rules.RULES):
        found += rule(spec)
    if decoded is not None:
        found += lint_rules.bits(decoded, target)
    found += _evidence(spec)
    found.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return Lint(tuple(found), target.name if target is not None else None)


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
    """A map whose very first access is stopped, or that loads cannot use."""
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
                "take another swizzle for loads",
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
    """What a store, or a reduction, through this map does beyond writing the tensor."""
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
            "stores and reductions: no lower corner below 0, no upper one above 0",
            "descriptor.access.check_write_traps, measured on an H200",
            "store through a map without padding",
        )


def _evidence(spec: AnySpec) -> Iterator[Finding]:
    """What was verified on no GPU."""
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
            "what is shown of it follows the CUDA driver API and the PTX ISA",
            "CUDA driver API, cuTensorMapEncode*; PTX ISA 5.5",
            "compare with the driver on such a GPU: TensorMap.compare()",
        )
