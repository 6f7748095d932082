"""Write the PTX, cubin, SASS and a report of kernels. No GPU is needed.

KERNEL is one of cudatma's kernels or families. FILE is one of the following:

- a .cu or .j2 file, which is compiled;
- a .ptx, .cubin or .fatbin file, or an ELF file (.o, .so) with kernels;
- a folder of .ptx and .cubin files, such as Triton's cache or one of its entries.

For a single kernel, the command also prints the report.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # run the subcommand, even if the checkout is not installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from cudatma.cli import main as cudatma_main

    raise SystemExit(cudatma_main(["dump", *sys.argv[1:]]))

import argparse
import ast
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cudatma.build import render as rendering
from cudatma.build.kernel import default_target
from cudatma.build.nvrtc import Compiled
from cudatma.build.prebuild import compiled, each, usable_cores
from cudatma.errors import ArgumentError, CompileError, FieldError, alternatives, counted, duration
from cudatma.kernels.choice import decide
from cudatma.kernels.config import KernelConfig
from cudatma.kernels.gpu import imagined_gpu
from cudatma.kernels.registry import FAMILIES, REGISTRY, KernelEntry, entry_of, family, family_entries, kernel
from cudatma.review import Image, KernelReport, assembled, disassembled, reports
from cudatma.review.sass import without_encodings
from cudatma.target import Target, get_target

from .command_line import DEFAULT_TARGET, Parser, add_source_options, integer, output_folder, source_arguments
from .problem_options import add_problem_options, add_size_options, given_sizes, problem_options
from .review_files import compiled_image, images_of, is_file

_KERNELS = f"{', '.join((*FAMILIES, *REGISTRY))}, all"
#: Maximum number of configs per kernel that --list prints without --json.
_SHOWN_CONFIGS = 3
_OPTIONS_OF_LIST = ("list", "target", "json")
#: Options that apply only to files.
_FOR_FILES = ("block", "shared_bytes", "include_dir", "define", "std", "include", "template")
_OPTIONS_OF_FILES = (*_OPTIONS_OF_LIST, "out", "no_sass", *_FOR_FILES)
EXAMPLES = """examples:
  cudatma dump --list                                       list every kernel with its configs for each target
  cudatma dump marlin --target sm_120a --out out            dump representative configs of the Marlin kernels
  cudatma dump all --target sm_90a --target sm_120a         dump every kernel for two architectures
  cudatma dump tile_copy --target sm_90a --config stages=3  change a field of each config
  cudatma dump marlin --m 16 --n 28672 --k 8192             dump the kernel that marlin_gemm selects on an H200
  cudatma dump gemm --m 4096 --n 4096 --k 4096 --layout RR  dump the kernel that gemm selects
  cudatma dump attention --q-length 4096 --k-length 4096 --head-dim 128 --heads 16 --batch 4
                                                            dump the kernel that attention selects
  cudatma dump experts --m 64 --n 768 --k 2048 --experts 128 --top-k 8
                                                            dump the kernels that marlin_moe selects
  cudatma dump kernel.cu --target sm_90a --block 256        compile a file; report the occupancy for 256 threads
  cudatma dump ~/.triton/cache --out out                    disassemble every kernel in Triton's cache
"""


#: A function that prints a report.
Show = Callable[[KernelReport], None]


@dataclass(frozen=True, slots=True)
class Job:
    """A kernel to compile. ``name`` is the stem of the file names, and ``note`` is a line for the report."""

    name: str
    entry: KernelEntry
    config: Any
    target: Target
    note: str = ""


def parse_config(pairs: Sequence[str]) -> dict[str, object]:
    """Parse fields, for example ``["stages=3", "dtype=bfloat16"]`` into ``{"stages": 3, "dtype": "bfloat16"}``.

    A value that is not a Python literal becomes a string. Raise ArgumentError for a field without "=".
    """
    config: dict[str, object] = {}
    for pair in pairs:
        field, equals, text = pair.partition("=")
        if not equals or not field:
            raise ArgumentError("--config", pair, "in the form FIELD=VALUE", "for example, --config stages=3")
        try:
            config[field] = ast.literal_eval(text.capitalize() if text in ("true", "false") else text)
        except (ValueError, SyntaxError):
            config[field] = text
    return config


def configured(config: Any, changes: dict[str, object], target: Target) -> Any:
    """Return a copy of a config in which some fields have other values.

    Raise ArgumentError for an unknown field and for an invalid value. The error lists the values that are valid on the
    target in combination with the other fields.
    """
    known = [field.name for field in fields(config) if field.init and field.name not in ("version", "entry")]
    for field in changes:
        if field not in known:
            raise ArgumentError("--config", field, f"a field of {type(config).__name__} ({', '.join(known)})")
    try:
        return replace(config, **changes)
    except ArgumentError as error:
        values = config.preset.allowed.get(error.field, ()) if isinstance(config, KernelConfig) else ()
        valid = [value for value in values if _is_valid(config, {**changes, error.field: value}, target)]
        if len(valid) in (0, len(values)):
            raise
        rest = ", ".join(
            f"{name}={changes.get(name, getattr(config, name))!r}" for name in known if name != error.field
        )
        remedy = f"choose one of these values, which are valid on {target.name} with {rest}"
        raise ArgumentError(error.field, error.got, ", ".join(map(str, valid)), remedy) from error


def _is_valid(config: Any, changes: dict[str, object], target: Target) -> bool:
    try:
        replace(config, **changes).check_target(target)
    except FieldError:
        return False
    return True


def jobs_for(entry: KernelEntry, target: Target, changes: dict[str, object]) -> list[Job]:
    """Return a job for each distinct config of a kernel for a target. The names of the jobs are distinct."""
    configs: list[Any] = []
    for config in entry.configs(target):
        changed = configured(config, changes, target)
        if changed not in configs:
            configs.append(changed)
    stems = [
        config.entry if config.entry.startswith(entry.name) else f"{entry.name}_{config.entry}" for config in configs
    ]
    if len(set(stems)) < len(stems):
        stems = [f"{stem}_{i}" for i, stem in enumerate(stems)]
    return [Job(f"{stem}_{target.name}", entry, config, target) for stem, config in zip(stems, configs, strict=True)]


def dump(job: Job, folder: Path, *, sass: bool = True, debug: bool = False) -> KernelReport:
    """Run dump_all() for one job in this process."""
    return dump_all([job], folder, 1, sass=sass, debug=debug)[0]


def dump_all(
    jobs: Sequence[Job],
    folder: Path,
    processes: int,
    *,
    sass: bool,
    debug: bool,
    show: Show = lambda report: None,
) -> list[KernelReport]:
    """Compile jobs and write NAME.cu, .ptx, .cubin, .sass and .report.txt for each job into an existing folder.

    Call ``show`` with each report after its files have been written. Raise TargetError and ArgumentError before the
    first compilation. If NVRTC cannot compile a job, raise CompileError after the other jobs, and leave the source in
    the folder.
    """
    orders: dict[tuple[str, str, str], Job] = {}
    for job in jobs:
        if (check_target := getattr(job.config, "check_target", None)) is not None:
            check_target(job.target)
        source = rendering.render(job.entry.template, job.config, job.target, debug=debug)
        _file(folder / job.name, "cu").write_text(source)
        orders[source, job.target.name, f"{job.name}.cu"] = job
    done: dict[str, KernelReport] = {}
    errors: list[CompileError] = []
    with _progress("compiling", len(jobs)) as advance:
        for order, result in each(compiled, orders, processes):
            job = orders[order]
            if isinstance(result, CompileError):
                message = f"{job.name}: {result.message}"
                errors.append(CompileError(message, result.log, result.source, str(folder), result.excerpt))
                advance([], show)
            else:
                done[job.name] = _write(job, result, folder, sass)
                advance([done[job.name]], show)
    if errors:
        raise errors[0]
    return [done[job.name] for job in jobs]


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[Sequence[KernelReport], Show], None]]:
    """Show a progress bar on stderr if it is a terminal.

    Yield a function that takes the reports of one step and a function that prints a report, and advances the bar.
    """
    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    is_hidden = total == 1 or not console.is_terminal
    with Progress(*columns, console=console, disable=is_hidden, transient=True, redirect_stdout=False) as progress:
        bar = progress.add_task("", total=total)

        def advance(reports: Sequence[KernelReport], show: Show) -> None:
            progress.stop()  # The bar and stdout may share a terminal.
            for report in reports:
                show(report)
            progress.start()
            progress.advance(bar)

        yield advance


def _write(job: Job, result: Compiled, folder: Path, sass: bool) -> KernelReport:
    image = compiled_image(job.name, job.target, result, [job.note] if job.note else [])
    image = disassembled(image) if sass else image
    (report,) = reports(
        image, entry=job.config.entry, config=job.config, kernel=job.entry.name, template=job.entry.template
    )
    write_image(image, [report], folder)
    return report


def write_image(image: Image, kernels: Sequence[KernelReport], folder: Path) -> None:
    """Write the PTX, cubin and SASS of a module, and the reports of its kernels."""
    path = folder / image.name
    if image.ptx:
        _file(path, "ptx").write_text(image.ptx, encoding="utf-8")
    if image.cubin:
        _file(path, "cubin").write_bytes(image.cubin)
    if image.sass is not None:
        _file(path, "sass").write_text(without_encodings(image.sass))
    _file(path, "report.txt").write_text("\n".join(map(str, kernels)))


def entries_of(name: str) -> list[KernelEntry]:
    """Return the kernel or the kernels of the family with this name, or every kernel for "all"."""
    if name == "all":
        return list(REGISTRY.values())
    if name in FAMILIES:
        return family_entries(name)
    if name not in REGISTRY:
        raise ArgumentError("kernel", name, _KERNELS, "run `cudatma dump --list` for a list of kernels and configs")
    return [kernel(name)]


def family_and_version(name: str) -> tuple[str, str] | None:
    """Return the family and the version for the name of a family, or of a kernel that callers may select by version.

    Return None for other kernels.
    """
    if name in FAMILIES:
        return name, "auto"
    for kernel_family in map(family, FAMILIES):
        for version in kernel_family.versions.names if kernel_family.versions else ():
            if name == f"{kernel_family.name}_{version}":
                return kernel_family.name, version
    return None


def jobs_of_problem(
    name: str, problem: dict[str, Any], target: Target, sm_count: int | None, version: Any = "auto"
) -> list[Job]:
    """Return the kernels that a family runs for a problem on a GPU with ``sm_count`` SMs.

    Default: the number of SMs of imagined_gpu(). Raise ArgumentError or TargetError if no kernel fits.
    """
    kernel_family = family(name)
    selected, selected_by = kernel_family.versions.chosen(version) if kernel_family.versions else ("", "")
    described = kernel_family.read_problem(problem | ({"version": selected} if selected else {}))
    gpu = imagined_gpu(target, sm_count)
    decision = decide(kernel_family, described, gpu)
    configs = kernel_family.launched(decision.config).launches(described, target)
    call = f"{described.description}, {target.name}, {counted(gpu.sm_count, 'SM')}"
    note = f"chosen for {call}: {decision.source}: {decision.why}{f' by {selected_by}' if selected else ''}"
    return [Job(f"{config.entry}_{target.name}", entry_of(config), config, target, note) for config in configs]


def _problem_of(options: argparse.Namespace) -> tuple[str, dict[str, Any], Any] | None:
    """Return the family, the sizes and options of its problem, and the version, or None if there are no sizes.

    Raise ArgumentError if the sizes are incomplete or do not fit the kernel.
    """
    sizes = given_sizes(options)
    if sizes is None:
        return None
    selected = family_and_version(options.kernel)
    if selected is None:
        allowed = f"{alternatives(FAMILIES)}, or a kernel of one of their versions"
        raise ArgumentError("kernel", options.kernel, allowed, "omit --m, --n and --k to dump this kernel")
    if options.config:
        raise ArgumentError("--config", ..., "omitted if --m, --n and --k select the config")
    name, version = selected
    return name, sizes | problem_options(name, options), version


def _file(path: Path, ending: str) -> Path:
    return path.with_name(f"{path.name}.{ending}")


def _dump_files(options: argparse.Namespace, targets: Sequence[Target], show: Show) -> list[KernelReport]:
    """Write the files and return the reports of the kernels in a file or folder."""
    result: list[KernelReport] = []
    names = Counter[str]()
    images = images_of(options.kernel, targets, source_arguments(options))
    with _progress("disassembling", len(images)) as advance:
        for image in map(assembled, images):
            names[image.name] += 1
            if names[image.name] > 1:  # Triton's cache has a folder for each version of a kernel
                image = replace(image, name=f"{image.name}_{names[image.name]}")
            image = image if options.no_sass else disassembled(image)
            kernels = reports(image, threads=options.block, dynamic_smem_bytes=options.shared_bytes)
            write_image(image, kernels, options.out)
            result += kernels
            advance(kernels, show)
    return result


def _listing(entries: Sequence[KernelEntry], targets: Sequence[Target]) -> list[dict[str, Any]]:
    return [
        {
            "kernel": entry.name,
            "summary": entry.summary,
            "template": entry.template,
            "configs": {t.name: [job.name for job in jobs_for(entry, t, {})] for t in targets},
        }
        for entry in entries
    ]


def _print_listing(listing: list[dict[str, Any]]) -> None:
    for item in listing:
        print(f"{item['kernel']}: {item['summary']} ({item['template']})")
        for target, names in item["configs"].items():
            shown = ", ".join(names[:_SHOWN_CONFIGS]) + (", ..." if len(names) > _SHOWN_CONFIGS else "")
            print(f"  {target}: {counted(len(names), 'config')}{f': {shown}' if names else ''}")


def _print_summary(report: KernelReport, folder: Path) -> None:
    use = report.resources
    shown = [counted(use.registers, "register")] if use else []
    if use and use.spill_store_bytes is not None:
        shown.append(f"{use.spill_store_bytes} B spilled")
    if report.smem_total_bytes is not None:
        shown.append(f"{report.smem_total_bytes} B shared memory")
    if report.compile_seconds is not None:
        shown.append(f"compiled in {duration(report.compile_seconds)}")
    entry = "" if report.kernel else f" {report.entry}:"
    print(f"{folder / report.name}.report.txt:{entry} {', '.join(shown) or 'PTX only'}", flush=True)
    for note in report.notes:
        print(f"  {note}", file=sys.stderr)


def parser() -> Parser:
    """Return the parser of ``cudatma dump``."""
    result = Parser("cudatma dump", __doc__, EXAMPLES)
    help = f"a file or folder, or {_KERNELS} (kernel families: {', '.join(FAMILIES)})"
    result.add_argument("kernel", nargs="?", metavar="KERNEL|FILE", help=help)
    add = result.add_argument
    add(
        "--target",
        action="append",
        metavar="NAME",
        help=f"architecture; repeatable ({DEFAULT_TARGET})",
    )
    add("--out", type=output_folder, default=Path("out"), metavar="DIR", help="output folder (default: out)")
    add(
        "--config", action="append", default=[], metavar="FIELD=VALUE", help="change a field of each config; repeatable"
    )
    sizes = result.add_argument_group("problem options", f"Problem for {', '.join(FAMILIES)} or one of their versions.")
    add_size_options(sizes.add_argument)
    add_problem_options(sizes.add_argument)
    help_jobs = "number of compiler processes (default: one per core)"
    add("--jobs", type=integer(1), default=usable_cores(), metavar="N", help=help_jobs)
    files = result.add_argument_group("file options", "Launch parameters for the occupancy in the report.")
    add_source_options(result)
    files.add_argument("--block", type=integer(1, 1024), metavar="N", help="number of threads per CTA")
    files.add_argument("--shared-bytes", type=integer(0), metavar="N", help="dynamic shared memory per CTA in bytes")
    help_debug = "compile a debug build, which limits waits and checks accesses (docs/howto/debug_a_hang.md)"
    add("--debug", action="store_true", help=help_debug)
    add("--no-sass", action="store_true", help="do not disassemble")
    add(
        "--list",
        action="store_true",
        help="list kernels and configs without compiling them; with --json, list all configs",
    )
    add("--json", action="store_true", help="print the reports as JSON")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``cudatma dump`` and return the exit status."""
    command = parser()
    options = command.parse_args(argv)
    if options.list:
        command.require_only(options, _OPTIONS_OF_LIST, "--list")
        names = options.target or ["sm_90a", "sm_120a", "sm_121a"]
        listing = _listing(entries_of(options.kernel or "all"), [get_target(name) for name in names])
        print(json.dumps(listing, indent=2)) if options.json else _print_listing(listing)
        return 0
    if options.kernel is None:
        raise ArgumentError("kernel", "no value", _KERNELS, "run `cudatma dump --list` to list kernels and configs")
    targets = [get_target(name) for name in options.target] if options.target else [default_target()]

    def show(report: KernelReport) -> None:
        if not options.json:
            _print_summary(report, options.out)

    if options.kernel not in ("all", *FAMILIES, *REGISTRY) and is_file(options.kernel):
        command.require_only(options, _OPTIONS_OF_FILES, "a file")
        options.out.mkdir(parents=True, exist_ok=True)
        result = _dump_files(options, targets, show)
    else:
        result = _dump_registry(command, options, targets, show)
    if options.json:
        print(json.dumps([report.as_dict() for report in result], indent=2))
    elif len(result) == 1:
        print(f"\n{result[0]}", end="")
    return 0


def _dump_registry(
    command: Parser, options: argparse.Namespace, targets: Sequence[Target], show: Show
) -> list[KernelReport]:
    """Write the files and return the reports of registered kernels."""
    of_kernels = [action.dest for action in command.options if action.dest not in _FOR_FILES]
    command.require_only(options, of_kernels, f"{options.kernel}, one of cudatma's own kernels")
    entries = entries_of(options.kernel)
    config = parse_config(options.config)
    problem = _problem_of(options)
    if problem is not None:
        name, sizes, version = problem
        jobs = [job for target in targets for job in jobs_of_problem(name, sizes, target, options.sm_count, version)]
    else:
        jobs = [job for target in targets for entry in entries for job in jobs_for(entry, target, config)]
    if not jobs:
        got = f"{options.kernel} for {', '.join(target.name for target in targets)}"
        raise ArgumentError(
            "kernel", got, "supported by the target", "run `cudatma dump --list` for the targets of each kernel"
        )
    options.out.mkdir(parents=True, exist_ok=True)
    return dump_all(jobs, options.out, options.jobs, sass=not options.no_sass, debug=options.debug, show=show)
