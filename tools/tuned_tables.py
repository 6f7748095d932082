"""The tuned configurations that ship: put a tuner's cells among them, or carry them over to changed templates.

A cell holds for the machine code that was measured. When templates change, cells whose kernels compile to the same
instructions as before are carried over; the others are dropped, and named for the tuner.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # the checkout need not be installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    __package__ = "tools"

import argparse
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cudatma.compiler import compile_source
from cudatma.errors import ArgumentError, CudaTmaError
from cudatma.kernels.marlin.layer import AnyMarlinSpec, resolve_fused
from cudatma.kernels.marlin.tune_file import parse_cell, put_cell, read_sections, templates_digest, write_sections
from cudatma.kernels.marlin.tuning import SHIPPED, shipped_file
from cudatma.prebuild import usable_cores
from cudatma.quantization.scale_range import FORMS
from cudatma.render import render
from cudatma.target import Target, get_target

from .sass import disassemble

EXAMPLES = """examples:
  python tools/tuned_tables.py add h200 tuned.json ...        cells for today's templates, in place of older ones
  python tools/tuned_tables.py carry h200 ../before/ptx_templates    after a change of templates: the old ones' folder
"""


def add(table: str, files: Sequence[Path]) -> str:
    """Put the cells of these files into a table. Raises ArgumentError for cells of other templates, or that cannot be
    run, before anything is written; OSError, ValueError for what is no file of a tuner's."""
    cells = [(section["key"], raw) for file in files for section in read_sections(file) for raw in section["cells"]]
    for key, raw in cells:
        if key.get("templates") != templates_digest():
            raise ArgumentError("templates", key.get("templates"), templates_digest(), "tune again, or carry first")
        parse_cell(raw, get_target(key["target"]))
    for path, (k, n) in sorted({(shipped_file(table, raw["k"], raw["n"]), (raw["k"], raw["n"])) for _, raw in cells}):
        sections = read_sections(path) if path.exists() else []
        for key, raw in cells:
            if (raw["k"], raw["n"]) == (k, n):
                put_cell(sections, key, raw)
        _write(path, sections)
    return f"{len(cells)} cells of {len({(raw['k'], raw['n']) for _, raw in cells})} layers"


def carry(table: str, before: Path) -> str:
    """Move cells of other templates to today's where their kernel's code is the same; drop the rest.

    before: the folder of the templates that the cells were measured with. Nothing is written before all are looked at.
    Raises TemplateError, CompileError, DriverError (no NVRTC), ArgumentError (no disassembler), OSError.
    """
    now = templates_digest()
    tables = {path: read_sections(path) for path in sorted((SHIPPED / table).glob("*.json"))}
    old = {
        _kernel(section, raw)
        for sections in tables.values()
        for section in sections
        for raw in section["cells"]
        if section["key"]["templates"] != now
    }
    with ThreadPoolExecutor(usable_cores()) as pool:  # NVRTC and the disassembler run side by side
        same = dict(zip(old, pool.map(lambda kernel: is_same(kernel[0], kernel[1], before), old), strict=True))
    kept, dropped = 0, []
    for path, sections in tables.items():
        carried: list[dict[str, Any]] = []
        # Today's cells last, in place of what is carried over for the same layer and tokens.
        for section in sorted(sections, key=lambda section: section["key"]["templates"] == now):
            for raw in section["cells"]:
                if section["key"]["templates"] == now or same[_kernel(section, raw)]:
                    put_cell(carried, section["key"] | {"templates": now}, raw)
                else:
                    dropped.append(raw)
        kept += sum(len(section["cells"]) for section in carried)
        _write(path, carried)
    lines = [f"{kept} cells kept, {len(dropped)} dropped"]
    for m in sorted({raw["m"] for raw in dropped}):
        shapes = " ".join(f"--shape {raw['k']}x{raw['n']}" for raw in dropped if raw["m"] == m)
        lines.append(f"cudatma tune --tokens {m} {shapes}")
    return "\n".join(lines)


def _kernel(section: dict[str, Any], raw: dict[str, Any]) -> tuple[AnyMarlinSpec, Target]:
    target = get_target(section["key"]["target"])
    return parse_cell(raw, target).choice.spec, target


def is_same(spec: AnyMarlinSpec, target: Target, before: Path) -> bool:
    """Whether a kernel, in each form that weights may have, is what the templates of ``before`` make of it: by its
    source, or else by its instructions, encodings included."""
    for one in dict.fromkeys(resolve_fused(spec, form) for form in ("none", *FORMS)):
        sources = [render(one.template, one, target, root=root) for root in (None, before)]
        if _code(sources[0]) != _code(sources[1]) and len({_instructions(text, target) for text in sources}) > 1:
            return False
    return True


def _code(source: str) -> list[str]:
    """Lines of a source, without those that are comments."""
    return [line for line in map(str.strip, source.splitlines()) if line and not line.startswith("//")]


def _instructions(source: str, target: Target) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compile_source(source, target).cubin)
        file.flush()
        found = disassemble(Path(file.name))
    if found.text is None:
        raise ArgumentError("disassembler", "none", "nvdisasm or cuobjdump", found.note)
    return found.text


def _write(path: Path, sections: list[dict[str, Any]]) -> None:
    for section in sections:
        section["cells"].sort(key=lambda raw: (raw["dtype"], raw["group_size"], raw["has_zeros"], raw["m"]))
    path.parent.mkdir(parents=True, exist_ok=True)
    if any(section["cells"] for section in sections):
        write_sections(path, sections)
        path.chmod(0o644)  # packages are read by everybody
    else:
        path.unlink(missing_ok=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 2 nothing changed, for the reason that is printed."""
    parser = argparse.ArgumentParser(
        prog="tuned_tables.py", description=__doc__, epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    ways = parser.add_subparsers(dest="way", required=True)
    adding = ways.add_parser("add", help="cells of a tuner")
    carrying = ways.add_parser("carry", help="to changed templates")
    for way in (adding, carrying):
        way.add_argument("table", help="its name: h200")
    adding.add_argument("files", type=Path, nargs="+", metavar="FILE")
    carrying.add_argument("before", type=Path, metavar="FOLDER", help="the templates that were measured")
    options = parser.parse_args(argv)
    try:
        said = add(options.table, options.files) if options.way == "add" else carry(options.table, options.before)
    except (CudaTmaError, OSError, ValueError, KeyError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(said)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
