"""The one-page report of a compiled kernel: resources, shared memory and SASS instructions."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any

from cudatma.errors import duration
from cudatma.target import Target

from .sass import CLASSES, Resources, by_class, count_mnemonics, parse_sass, uses_cluster
from .sass_hazards import release_hazards
from .sass_wgmma import wgmma_hazards

#: Name, offset in bytes and size in bytes of a part of shared memory.
Span = tuple[str, int, int]

_MAXNTID = re.compile(r"^\s*\.maxntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Report:
    """Content of a report. ``--json`` prints ``as_dict()``.

    Attributes
    ----------
    threads : int or None
        Number of threads per block, or None if neither the config nor the PTX states it.
    dynamic_smem_bytes : int or None
        Size of dynamic shared memory in bytes, or None if the config does not state it.
    smem : tuple of Span
        Layout of dynamic shared memory.
    stage : tuple of (str, int)
        Parts of a pipeline stage and their sizes in bytes.
    sass : dict of str to int, or None
        Count of each mnemonic, or None if the cubin was not disassembled (``notes`` has the reason).
    release_hazards : tuple of str, or None
        Releases of ring slots that may still be read, or None if there is no SASS.
    wgmma_hazards : tuple of str, or None
        Writes to registers that a wgmma may still use, or None if there is no SASS.
    """

    name: str
    kernel: str
    template: str
    entry: str
    target: str
    nvrtc: str
    compile_seconds: float
    config: dict[str, Any]
    resources: Resources | None
    threads: int | None
    dynamic_smem_bytes: int | None
    smem_limit_bytes: int
    smem: tuple[Span, ...]
    stage: tuple[tuple[str, int], ...]
    sass: dict[str, int] | None
    opcodes: dict[str, int]
    cluster_opcodes: tuple[str, ...]
    release_hazards: tuple[str, ...] | None
    wgmma_hazards: tuple[str, ...] | None
    notes: tuple[str, ...]

    @property
    def smem_total_bytes(self) -> int | None:
        """Size of static and dynamic shared memory per block in bytes, or None if either is unknown."""
        if self.resources is None or self.dynamic_smem_bytes is None:
            return None
        return self.resources.static_smem_bytes + self.dynamic_smem_bytes

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "smem_total_bytes": self.smem_total_bytes}


def config_fields(config: object) -> dict[str, Any]:
    """Return the init fields of a config in order. Values other than numbers and flags become text."""
    if not is_dataclass(config):
        return {}
    values = {field.name: getattr(config, field.name) for field in fields(config) if field.init}
    return {name: value if isinstance(value, (bool, int, float)) else str(value) for name, value in values.items()}


def offered(config: object, name: str) -> Any:
    """Return an optional attribute of a config or the result of an optional method, or None if the config lacks it."""
    value = getattr(config, name, None)
    return value() if callable(value) else value


def maxntid(ptx: str) -> int | None:
    """Return the threads per block from the PTX directive ``.maxntid`` (PTX ISA, "Performance-Tuning Directives")."""
    match = _MAXNTID.search(ptx)
    if match is None:
        return None
    x, y, z = (int(part) if part else 1 for part in match.groups())
    return x * y * z


def make_report(
    *,
    name: str,
    kernel: str,
    template: str,
    config: Any,
    target: Target,
    ptx: str,
    nvrtc: str,
    compile_seconds: float,
    resources: Resources | None,
    sass_text: str | None,
    notes: tuple[str, ...] = (),
) -> Report:
    """Build the report of a compiled kernel. ``sass_text`` must have encodings, or be None without a disassembler."""
    instructions = [i for i in parse_sass(sass_text or "") if i.function in (config.entry, "")]
    counted = sass_text is not None
    previous = getattr(config, "releases_one_stage_late", False)
    hazards = release_hazards(sass_text or "", releases_one_stage_late=previous)
    releases = tuple(str(h) for h in hazards if h.function in (config.entry, ""))
    wgmmas = tuple(str(h) for h in wgmma_hazards(sass_text or "") if h.function in (config.entry, ""))
    smem: tuple[Span, ...] = tuple(offered(config, "smem_layout") or ())
    dynamic = offered(config, "smem_bytes")
    if dynamic is None and smem:
        dynamic = max(offset + size for _, offset, size in smem)
    return Report(
        name=name,
        kernel=kernel,
        template=template,
        entry=config.entry,
        target=target.name,
        nvrtc=nvrtc,
        compile_seconds=round(compile_seconds, 3),
        config=config_fields(config),
        resources=resources,
        threads=offered(config, "threads") or maxntid(ptx),
        dynamic_smem_bytes=dynamic,
        smem_limit_bytes=target.smem_per_block_bytes,
        smem=smem,
        stage=tuple(offered(config, "stage_layout") or ()),
        sass=count_mnemonics(instructions) if counted else None,
        opcodes=dict(sorted(Counter(i.opcode for i in instructions).items())),
        cluster_opcodes=tuple(uses_cluster(instructions)),
        release_hazards=releases if counted else None,
        wgmma_hazards=wgmmas if counted else None,
        notes=notes,
    )


def report_text(report: Report) -> str:
    """Return the report as one page of plain text. Only the compile time changes between runs."""
    blocks = [_heading(report), _resources(report), _layout(report), _instructions(report)]
    if report.notes:
        blocks.append(["notes", *(f"  {note}" for note in report.notes)])
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def _heading(report: Report) -> list[str]:
    lines = [
        report.name,
        f"  template  {report.template}",
        f"  entry     {report.entry}",
        f"  target    {report.target}, NVRTC {report.nvrtc}, compiled in {duration(report.compile_seconds)}",
    ]
    words = ", ".join(f"{name} = {value}" for name, value in report.config.items())
    return lines + textwrap.wrap(words, 110, initial_indent="  config      ", subsequent_indent=" " * 12)


def _resources(report: Report) -> list[str]:
    lines = ["resources"]
    if (use := report.resources) is not None:
        lines += [
            f"  registers              {use.registers:>8} a thread",
            f"  spilled                {use.spill_store_bytes:>8} bytes stored, {use.spill_load_bytes} loaded a thread",
            f"  stack                  {use.stack_bytes:>8} bytes a thread",
            f"  named barriers         {use.named_barriers:>8}",
            f"  static shared memory   {use.static_smem_bytes:>8} bytes a block",
        ]
    if report.dynamic_smem_bytes is not None:
        lines.append(f"  dynamic shared memory  {report.dynamic_smem_bytes:>8} bytes a block")
    if (total := report.smem_total_bytes) is not None:
        fits = "fits" if total <= report.smem_limit_bytes else "DOES NOT FIT"
        lines.append(f"  together               {total:>8} bytes of {report.smem_limit_bytes}: {fits}")
    if report.threads is not None:
        lines.append(f"  threads                {report.threads:>8} a block")
    return lines


def _layout(report: Report) -> list[str]:
    lines = []
    if report.smem:
        lines.append("dynamic shared memory (bytes: from .. to, size)")
        spans = [span for span in report.smem if span[2]]
        lines += [f"  {offset:>8} .. {offset + size:<8} {size:>8}  {name}" for name, offset, size in spans]
    if report.stage:
        lines.append(f"one stage ({sum(size for _, size in report.stage)} bytes)")
        lines += [f"  {size:>30}  {what}" for what, size in report.stage]
    return lines


def _instructions(report: Report) -> list[str]:
    if report.sass is None:
        return []
    lines = [f"instructions in the code ({sum(report.sass.values())}; counted once, no matter how often they run)"]
    for name, counts in by_class(report.sass).items():
        present = {mnemonic: count for mnemonic, count in counts.items() if count}
        absent = [mnemonic for mnemonic, count in counts.items() if not count]
        lines.append(f"  {name}")
        lines += [f"    {mnemonic:<14}{count:>6}  {CLASSES[name][mnemonic]}" for mnemonic, count in present.items()]
        if absent:
            lines.append(f"    none of: {', '.join(absent)}")
    cluster = ", ".join(report.cluster_opcodes) or "none"
    lines.append(f"  cluster and multicast: {cluster}")
    for kind, hazards in (("release", report.release_hazards or ()), ("wgmma", report.wgmma_hazards or ())):
        lines.append(f"  {kind} hazards: {len(hazards) or 'none'}")
        lines += [f"    {hazard}" for hazard in hazards]
    return lines
