"""Read the imports among cudatma's packages from the source, and draw them for docs/architecture.md.

python -m tools.dev.import_graph            # writes docs/pictures/architecture.svg
python -m tools.dev.import_graph --check    # exit status 1 if the file differs
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "pictures" / "architecture.svg"

#: Parts of cudatma/, lowest first: each imports only from earlier ones. The first row holds single modules.
LAYERS: tuple[tuple[str, str], ...] = (
    ("facts", "errors, element types, targets, contexts, arrays and streams of other libraries, layouts, pipelines"),
    ("descriptor", "tensor maps: spec, rules, codec (128 bytes to fields and back), driver"),
    ("emulator", "runs PTX on the CPU and reports hazards"),
    ("runtime", "launch arguments, streams, device memory, a loaded kernel, hang reports"),
    ("build", "template to source to PTX and cubin to cache to kernel"),
    ("inspection", "a tensor map explained"),
    ("quantization", "weights: quantize, pack, import, store"),
    ("kernels", "kernel families, and what they share"),
    ("mutants", "synchronization mistakes planted in a kernel"),
    ("integrations", "operators and modules of other libraries, which each module imports"),
    ("tools", "the commands, the pytest plugin"),
)
FACTS = (
    *("errors", "dtypes", "target", "context", "layout", "pipeline"),
    *("mbarrier_bits", "library_streams", "arrays", "backend"),
)
TOP = ("cli", "__main__", "pytest_plugin")
#: The emulator's packages in the same order; "" stands for its top-level modules, which use all packages.
EMULATOR = ("errors", "ptx", "arithmetic", "machine", "async_copy", "tensor_core", "hazards", "trace", "")


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Return the file of each module of cudatma and tools by dotted name; a package has the name of its folder."""
    files = {}
    for folder in ("cudatma", "tools"):
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


def imported(text: str, importer: str, is_package: bool, known: Iterable[str]) -> set[str]:
    """Return the ``known`` modules that a source imports, including imports in functions and for type checkers."""
    names = set(known)
    targets: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            targets |= {alias.name for alias in node.names if alias.name in names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = importer.split(".")
                stem = parts[: len(parts) - node.level + is_package]
                base = ".".join([*stem, base] if base else stem)
            for alias in node.names:
                inside = f"{base}.{alias.name}"
                targets |= {inside} if inside in names else {base} & names
    return targets - {importer}


def import_graph(root: Path = ROOT) -> dict[str, set[str]]:
    """Return the modules that each module imports."""
    files = modules(root)
    return {
        name: imported(path.read_text(encoding="utf-8"), name, path.name == "__init__.py", files)
        for name, path in files.items()
    }


def cycle(graph: Mapping[str, set[str]]) -> list[str]:
    """Return a cycle of imports, with the same first and last module, or an empty list."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def layer_of(module: str) -> str:
    """Return the row of LAYERS that contains a module; "" for the facade ``cudatma``."""
    top, _, rest = module.partition(".")
    if top == "tools":
        return "tools"
    name = rest.split(".")[0]
    if name in FACTS:
        return "facts"
    return "tools" if name in TOP else name


def emulator_part(module: str) -> str:
    """Return the row of EMULATOR that contains a module of the emulator."""
    name = module.removeprefix("cudatma.emulator").lstrip(".").split(".")[0]
    return name if name in EMULATOR else ""


# ---- the picture

_ROW, _BOX, _LEFT, _TOP, _WIDTH = 56, 40, 24, 20, 1080
_BOX_WIDTH, _FAINT = 700, "#52606d"


def picture(graph: Mapping[str, set[str]]) -> str:
    """Return an SVG with a box for each layer, lowest at the bottom, and an arc for the imports between two layers."""
    names = [name for name, _ in LAYERS]
    layers = {(layer_of(importer), layer_of(target)) for importer, targets in graph.items() for target in targets}
    pairs = sorted(pair for pair in layers if pair[0] != pair[1] and "" not in pair and "cudatma" not in pair)
    height = 2 * _TOP + _ROW * len(names) + 28
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif">',
        "<title>Packages of cudatma and the imports between them</title>",
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" '
        'markerWidth="9" markerHeight="9" markerUnits="userSpaceOnUse" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="#829ab1"/></marker></defs>',
    ]
    middle = {name: _TOP + _ROW * (len(names) - 1 - row) + _BOX // 2 for row, name in enumerate(names)}
    right = _LEFT + _BOX_WIDTH
    for importer, target in pairs:
        begin, end = middle[importer], middle[target]
        bulge = right + 20 + abs(end - begin) * 0.62
        path = f"M{right},{begin + 6} C{bulge:.0f},{begin + 6} {bulge:.0f},{end - 6} {right + 2},{end - 6}"
        title = f"{importer} imports {target}"
        lines.append(
            f'<path d="{path}" fill="none" stroke="#829ab1" stroke-width="1.4" marker-end="url(#head)">'
            f"<title>{title}</title></path>"
        )
    for name, what in LAYERS:
        y = middle[name] - _BOX // 2
        label = {"facts": "cudatma/*.py", "tools": "tools/, cli, pytest plugin"}.get(name, f"{name}/")
        lines += [
            f'<rect x="{_LEFT}" y="{y}" width="{_BOX_WIDTH}" height="{_BOX}" rx="5" fill="#f0f4f8" stroke="#9fb3c8"/>',
            f'<text x="{_LEFT + 12}" y="{y + 17}" font-size="14" font-weight="bold">{escape(label)}</text>',
            f'<text x="{_LEFT + 12}" y="{y + 33}" font-size="12" fill="{_FAINT}">{escape(what)}</text>',
        ]
    foot = "An arrow leads from a package to one that it imports."
    lines += [f'<text x="{_LEFT}" y="{height - 14}" font-size="12" fill="{_FAINT}">{foot}</text>', "</svg>", ""]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the picture; with --check, compare it with the file."""
    parser = argparse.ArgumentParser(prog="tools.dev.import_graph", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit status 1 if the file differs")
    options = parser.parse_args(argv)
    text = picture(import_graph())
    if options.check:
        return int(not PICTURE.is_file() or PICTURE.read_text(encoding="utf-8") != text)
    PICTURE.write_text(text, encoding="utf-8")
    print(f"wrote {PICTURE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
