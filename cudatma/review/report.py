"""Report the resources, occupancy, shared memory, instructions, loops and SASS hazards of compiled kernels."""

from __future__ import annotations

import hashlib
import re
import textwrap
from collections import Counter
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from typing import Any

from cudatma import pages
from cudatma.errors import ArgumentError, duration
from cudatma.review.cubin import Resources, read_cubin
from cudatma.review.images import Image
from cudatma.review.occupancy import Occupancy, occupancy, target_of
from cudatma.review.release_hazards import release_hazards
from cudatma.review.sass import CLASSES, Code, by_class, count_mnemonics, parse_sass, uses_cluster
from cudatma.review.tables import Loop, Row, loops_of, ptx_function, ptx_rows, sass_rows, shown_places
from cudatma.review.wgmma_hazards import wgmma_hazards

#: Name, offset in bytes and size in bytes of a part of shared memory.
Span = tuple[str, int, int]

_ENTRY = re.compile(r"^[ \t]*(?:\.visible|\.weak)?[ \t]*\.entry[ \t]+([\w$%]+)", re.MULTILINE)
_THREADS = re.compile(r"\.(?:maxntid|reqntid)\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?")
#: CTA sizes for which a report shows the occupancy if the kernel's number of threads per CTA is unknown.
_TYPICAL_THREADS = (128, 256, 512, 1024)
#: Maximum number of rows and of loops in the printed text. ``--json`` has no limit.
_SHOWN_ROWS, _SHOWN_LOOPS = 60, 30


@dataclass(frozen=True, slots=True)
class KernelReport:
    """Report of a compiled kernel. ``str()`` returns it as text.

    Parameters
    ----------
    name : str
        Name of the module, such as the name of its file without suffix.
    entry : str
        Name of the kernel.
    kernel, template : str
        Registry name and template of one of cudatma's kernels, or "" for other kernels.
    target, compiler : str
        Architecture, and the compiler if it is known.
    compile_seconds : float or None
        Duration of the compilation, or None for a previously compiled kernel.
    config : dict
        Fields of the config, or Triton's options.
    resources : Resources or None
        Registers, spills, shared memory and barriers, or None if there is no cubin.
    threads : int or None
        Number of threads per CTA, or None if neither the config nor the code specifies it.
    dynamic_smem_bytes : int or None
        Dynamic shared memory in bytes, or None if it is unknown.
    smem_limit_bytes : int or None
        Maximum sum of static and dynamic shared memory of a CTA, or None for an unknown target.
    occupancy : tuple of Occupancy
        Resident CTAs per SM, for ``threads``, or for several sizes of a CTA if ``threads`` is None.
    smem, stage : tuple
        Layout of dynamic shared memory, and parts of a pipeline stage, if the config contains them.
    sass : dict of str to int, or None
        Number of instructions with each mnemonic, or None if there is no SASS (``notes`` contains the reason).
    opcodes : dict of str to int
        Number of instructions with each SASS opcode, including modifiers.
    cluster_opcodes : tuple of str
        Opcodes that require a cluster.
    rows : tuple of Row
        TMA, mbarrier and tensor-core instructions with their source lines, from the SASS, or from the PTX if there is
        no SASS.
    loops : tuple of Loop
        Loops with the events that they wait for.
    release_hazards, wgmma_hazards : tuple of str, or None
        Releases of ring slots while a read may be in flight, and writes to registers that a wgmma in flight may be
        using. None if there is no SASS. If there is no config, releases of earlier slots are also listed.
    notes : tuple of str
        Compiler warnings, and reasons for missing parts.
    digest : str
        SHA-256 of the cubin, or of the PTX if there is no cubin.
    code : Code or None
        Parsed SASS, which ``as_dict()`` omits.
    """

    name: str
    entry: str
    kernel: str
    template: str
    target: str
    compiler: str
    compile_seconds: float | None
    config: dict[str, Any]
    resources: Resources | None
    threads: int | None
    dynamic_smem_bytes: int | None
    smem_limit_bytes: int | None
    occupancy: tuple[Occupancy, ...]
    smem: tuple[Span, ...]
    stage: tuple[tuple[str, int], ...]
    sass: dict[str, int] | None
    opcodes: dict[str, int]
    cluster_opcodes: tuple[str, ...]
    rows: tuple[Row, ...]
    loops: tuple[Loop, ...]
    release_hazards: tuple[str, ...] | None
    wgmma_hazards: tuple[str, ...] | None
    notes: tuple[str, ...]
    digest: str
    code: Code | None = field(default=None, repr=False, compare=False)

    @property
    def smem_total_bytes(self) -> int | None:
        """Static and dynamic shared memory per CTA in bytes, or None if either is unknown."""
        if self.resources is None or self.dynamic_smem_bytes is None:
            return None
        return self.resources.static_smem_bytes + self.dynamic_smem_bytes

    def as_dict(self) -> dict[str, Any]:
        """Return the content as JSON-serializable data.

        Returns
        -------
        dict
            The attributes except ``code``, and ``smem_total_bytes``.
        """
        result = asdict(replace(self, code=None)) | {"smem_total_bytes": self.smem_total_bytes}
        del result["code"]
        return result

    @property
    def _blocks(self) -> list[list[str]]:
        """Sections of the text, each a heading followed by lines."""
        blocks = [_heading(self), _resources(self), _layout(self), _instructions(self), _rows(self), _loops(self)]
        blocks += [["notes", *(f"  {note}" for note in self.notes)]] if self.notes else []
        return [block for block in blocks if block]

    def __str__(self) -> str:
        return "\n\n".join(map("\n".join, self._blocks)) + "\n"

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook displays."""
        sections = [(heading, pages.text(textwrap.dedent("\n".join(lines)))) for heading, *lines in self._blocks]
        return pages.fragment(pages.parts(sections), style="report.css")


def reports(
    image: Image,
    *,
    entry: str | None = None,
    config: object = None,
    kernel: str = "",
    template: str = "",
    smem: tuple[Span, ...] = (),
    threads: int | None = None,
    dynamic_smem_bytes: int | None = None,
) -> tuple[KernelReport, ...]:
    """Return a report on each kernel in an image.

    Parameters
    ----------
    image : Image
        A module. Only reports of modules with SASS contain all sections.
    entry : str, optional
        Name of a kernel. Default: all kernels.
    config : object, optional
        Config of the kernel. Reports show its fields, threads and shared memory.
    kernel, template : str, default: ""
        Names of cudatma's kernel and template.
    smem : tuple of (str, int, int)
        Layout of dynamic shared memory: name, offset and size in bytes. Default: the layout of the config.
    threads, dynamic_smem_bytes : int, optional
        Threads and dynamic shared memory per CTA. Default: from the config, the code, or Triton's metadata.

    Returns
    -------
    tuple of KernelReport
        One report for each kernel.

    Raises
    ------
    ArgumentError
        If the image contains no kernel, or no kernel with this name, or if the cubin is corrupt.
    """
    cubin = read_cubin(image.cubin, image.name, image.log) if image.cubin else None
    entries = list(cubin.kernels if cubin else dict.fromkeys(_ENTRY.findall(image.ptx)))
    if not entries:
        raise ArgumentError("file", f"{image.name}, which contains no kernel", "a module with a kernel")
    if entry is not None and entry not in entries:
        raise ArgumentError("entry", entry, ", ".join(entries))
    codes = {code.function: code for code in parse_sass(image.sass or "")}
    smem = smem or tuple(_offered(config, "smem_layout") or ())
    known = (dynamic_smem_bytes, _offered(config, "smem_bytes"), image.dynamic_smem_bytes)
    dynamic = next((size for size in known if size is not None), None)
    if dynamic is None and smem:
        dynamic = max(offset + size for _, offset, size in smem)
    target = target_of(image.target)
    result = []
    for name in entries if entry is None else [entry]:
        use = cubin.kernels[name] if cubin else None
        block = threads or _offered(config, "threads") or (use.max_threads if use else _ptx_threads(image.ptx, name))
        sizes = (block,) if block else _TYPICAL_THREADS
        code = codes.get(name)
        steps = code.steps if code else []
        opcodes = Counter(step.opcode for step in steps if step.mnemonic != "NOP")
        late = getattr(config, "releases_one_stage_late", False)
        result.append(
            KernelReport(
                name=image.name,
                entry=name,
                kernel=kernel,
                template=template,
                target=image.target,
                compiler=image.compiler,
                compile_seconds=None if image.compile_seconds is None else round(image.compile_seconds, 3),
                config=dict(image.options) | config_fields(config),
                resources=use,
                threads=block,
                dynamic_smem_bytes=dynamic,
                smem_limit_bytes=target.smem_per_block_bytes if target else None,
                occupancy=tuple(occupancy(use, target, size, dynamic or 0) for size in sizes) if use and target else (),
                smem=smem,
                stage=tuple(_offered(config, "stage_layout") or ()),
                sass=count_mnemonics(steps) if code else None,
                opcodes=dict(sorted(opcodes.items())),
                cluster_opcodes=tuple(uses_cluster(steps)),
                rows=sass_rows(code) if code else ptx_rows(image.ptx, name),
                loops=loops_of(code) if code else (),
                release_hazards=_texts(release_hazards(code, releases_one_stage_late=late)) if code else None,
                wgmma_hazards=_texts(wgmma_hazards(code)) if code else None,
                notes=image.notes,
                digest=hashlib.sha256(image.cubin or image.ptx.encode()).hexdigest(),
                code=code,
            )
        )
    return tuple(result)


def _texts(hazards: tuple[object, ...]) -> tuple[str, ...]:
    return tuple(map(str, hazards))


def config_fields(config: object) -> dict[str, Any]:
    """Return the init fields of a config. Values other than numbers and booleans are converted to strings."""
    if not is_dataclass(config):
        return {}
    values = {field.name: getattr(config, field.name) for field in fields(config) if field.init}
    return {name: value if isinstance(value, (bool, int, float)) else str(value) for name, value in values.items()}


def _offered(config: object, name: str) -> Any:
    """Return an optional attribute of a config or the result of an optional method, or None if the config lacks it."""
    value = getattr(config, name, None)
    return value() if callable(value) else value


def _ptx_threads(ptx: str, entry: str) -> int | None:
    """Return the number of threads per CTA in a kernel's PTX (PTX ISA, "Performance-Tuning Directives")."""
    threads = _THREADS.search(ptx_function(ptx, entry))
    if threads is None:
        return None
    x, y, z = (int(part) if part else 1 for part in threads.groups())
    return x * y * z


def _heading(report: KernelReport) -> list[str]:
    lines = [report.name]
    lines += [f"  template  {report.template}"] if report.template else []
    compiler = f", {report.compiler}" if report.compiler else ""
    seconds = "" if report.compile_seconds is None else f", compiled in {duration(report.compile_seconds)}"
    lines += [f"  entry     {report.entry}", f"  target    {report.target}{compiler}{seconds}"]
    words = ", ".join(f"{name} = {value}" for name, value in report.config.items())
    return lines + textwrap.wrap(words, 110, initial_indent="  config    ", subsequent_indent=" " * 12)


def _resources(report: KernelReport) -> list[str]:
    lines = []
    if (use := report.resources) is not None:
        lines.append(f"  registers per thread   {use.registers:>8}")
        if use.spill_store_bytes is not None:
            stored, loaded = use.spill_store_bytes, use.spill_load_bytes
            lines.append(f"  spills per thread      {stored:>8} bytes stored, {loaded} bytes loaded")
        lines += [
            f"  stack per thread       {use.stack_bytes:>8} bytes",
            f"  named barriers         {use.named_barriers:>8}",
            f"  static shared memory   {use.static_smem_bytes:>8} bytes per CTA",
        ]
    if report.dynamic_smem_bytes is not None:
        lines.append(f"  dynamic shared memory  {report.dynamic_smem_bytes:>8} bytes per CTA")
    if (total := report.smem_total_bytes) is not None and report.smem_limit_bytes is not None:
        fits = "fits" if total <= report.smem_limit_bytes else "DOES NOT FIT"
        lines.append(f"  total shared memory    {total:>8} of {report.smem_limit_bytes} bytes: {fits}")
    if report.threads is not None:
        lines.append(f"  threads per CTA        {report.threads:>8}")
    for each in report.occupancy:
        label = "CTAs per SM" if report.threads is not None else f"with {each.threads} threads"
        dynamic = ", without dynamic shared memory" if report.dynamic_smem_bytes is None else ""
        limit = f"({each.warps} warps), limited by {' and '.join(each.limited_by)}{dynamic}"
        lines.append(f"  {label:<22} {each.ctas:>8} {'' if report.threads is not None else 'CTAs per SM '}{limit}")
    return ["resources", *lines] if lines else []


def _layout(report: KernelReport) -> list[str]:
    lines = []
    if report.smem:
        lines.append("dynamic shared memory (bytes: from .. to, size)")
        spans = [span for span in report.smem if span[2]]
        lines += [f"  {offset:>8} .. {offset + size:<8} {size:>8}  {name}" for name, offset, size in spans]
    if report.stage:
        lines.append(f"one stage ({sum(size for _, size in report.stage)} bytes)")
        lines += [f"  {size:>30}  {what}" for what, size in report.stage]
    return lines


def _instructions(report: KernelReport) -> list[str]:
    if report.sass is None:
        return []
    lines = [f"static instruction count: {sum(report.sass.values())}"]
    for name, counts in by_class(report.sass).items():
        present = {mnemonic: count for mnemonic, count in counts.items() if count}
        absent = [mnemonic for mnemonic, count in counts.items() if not count]
        lines.append(f"  {name}")
        lines += [f"    {mnemonic:<14}{count:>6}  {CLASSES[name][mnemonic]}" for mnemonic, count in present.items()]
        if absent:
            lines.append(f"    none of: {', '.join(absent)}")
    cluster = ", ".join(report.cluster_opcodes) or "none"
    lines.append(f"  cluster and multicast: {cluster}")
    # If there is no config, it is unknown whether an arrival releases the last slot or an earlier slot.
    release = "release" if report.kernel else "possible release"
    for kind, hazards in ((release, report.release_hazards or ()), ("wgmma", report.wgmma_hazards or ())):
        lines.append(f"  {kind} hazards: {len(hazards) or 'none'}")
        lines += [f"    {hazard}" for hazard in hazards]
    return lines


def _rows(report: KernelReport) -> list[str]:
    if not report.rows:
        return []
    width, file = max(len(row.opcode) for row in report.rows), _only_file(report)
    language = "PTX" if report.sass is None else "SASS"
    about = f"line of {file}" if file else "line" if any(row.places for row in report.rows) else ""
    about = f"{about} < line of the call" if about else "no lines; compile with -lineinfo"
    lines = [f"TMA, mbarrier and tensor-core instructions in the {language} ({about})"]
    for row in report.rows[:_SHOWN_ROWS]:
        place = shown_places(row.places, file)
        lines.append(f"  {row.kind:<12}{row.count:>5}  {row.opcode:<{width}}  {place}".rstrip())
    if (rest := len(report.rows) - _SHOWN_ROWS) > 0:
        lines.append(f"  and {rest} more rows, which --json lists")
    return lines


def _only_file(report: KernelReport) -> str:
    """Return the file to which all places in a report belong, or "" if there are several."""
    files = {file for row in report.rows for file, _ in row.places}
    files |= {file for loop in report.loops for file, _ in loop.places}
    return files.pop() if len(files) == 1 else ""


def _loops(report: KernelReport) -> list[str]:
    loops = [loop for loop in report.loops if not loop.is_spin]
    if not loops:
        return []
    file = _only_file(report)
    lines = [
        f"loops (addresses{f', line of {file}' if file else ''}), with the number of waiting instructions by event"
    ]
    for loop in loops[:_SHOWN_LOOPS]:
        indent = "  " * (loop.depth + 1)
        words = [f"{count} {name}" for name, count in loop.classes.items()]
        about = ", ".join([f"{loop.instructions} instructions", *words])
        place = f", line {shown_places(loop.places, file)}" if loop.places else ""
        waits = ", ".join(f"{what} {count}" for what, count in loop.waits.items()) or "nothing"
        lines.append(f"{indent}{loop.first:#06x} .. {loop.last:#06x}: {about}{place}")
        first, others = f"{indent}  waits for: ", f"{indent}    "
        lines += textwrap.wrap(waits, 110, initial_indent=first, subsequent_indent=others, break_on_hyphens=False)
    if (rest := len(loops) - _SHOWN_LOOPS) > 0:
        lines.append(f"  and {rest} more loops, which --json lists")
    if spins := len(report.loops) - len(loops):
        lines.append(f"  loops that only repeat an mbarrier wait: {spins}")
    return lines
