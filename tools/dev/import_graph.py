"""Read the imports among cudatma's packages from the source, and draw the packages as layers for docs/architecture.md.

python -m tools.dev.import_graph            # writes docs/pictures/architecture.svg
python -m tools.dev.import_graph --check    # exit status 1 if the file is not current
"""

from __future__ import annotations

import ast
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tools.dev.drawing import BLUE, GREEN, GREY, ORANGE, ROOT, Drawing, write_picture

PICTURE = ROOT / "docs" / "pictures" / "architecture.svg"

#: The packages of cudatma/, lowest first. Each package imports only from the packages before it. The first entry
#: represents the modules that are not in a package.
LAYERS: tuple[tuple[str, str], ...] = (
    ("facts", "errors, element types, targets, contexts, arrays of any library, shared-memory layouts, pipelines"),
    ("pages", "HTML: templates and style of pages and notebook views"),
    ("descriptor", "tensor maps: rules, codec, driver"),
    ("emulator", "runs PTX on the CPU and reports hazards"),
    ("review", "reports of compiled kernels: resources, SASS, differences"),
    ("runtime", "memory, streams, loaded kernels"),
    ("build", "compiles templates to PTX and cubins, with a cache"),
    ("inspection", "explains tensor maps"),
    ("quantization", "int4 weights: pack, import, store"),
    ("kernels", "the path of a call; marlin, gemm, attention, data_movement, all_reduce"),
    ("mutants", "removes synchronization from kernels"),
    ("programs", "launches of Triton, Gluon, CuPy, cuda.core and cuda-python"),
    ("integrations", "torch, transformers, PEFT, vLLM"),
    ("tools", "one file for each command"),
)
FACTS = (
    *("errors", "dtypes", "target", "toolkit", "context", "layout", "pipeline"),
    *("mbarrier_bits", "library_streams", "arrays", "backend"),
)
TOP = ("cli", "__main__", "pytest_plugin")
#: The emulator's packages, lowest first. "" represents the modules next to these packages, which import all of them.
EMULATOR = ("errors", "ptx", "arithmetic", "machine", "async_copy", "tensor_core", "hazards", "trace", "")


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Return the files of cudatma and tools by dotted name. A package has the name of its folder."""
    paths = {}
    for folder in ("cudatma", "tools"):
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements in a node. Unlike ast.walk(), this function skips expressions, which takes half the time."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield child
            yield from _statements(child)


def imported(text: str, importer: str, is_package: bool, known: Iterable[str]) -> set[str]:
    """Return the ``known`` modules that a source imports, including imports inside functions and for type checkers."""
    names = set(known)
    imports: set[str] = set()
    for node in _statements(ast.parse(text)):
        if isinstance(node, ast.Import):
            imports |= {alias.name for alias in node.names if alias.name in names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = importer.split(".")
                stem = parts[: len(parts) - node.level + is_package]
                base = ".".join([*stem, base] if base else stem)
            for alias in node.names:
                inside = f"{base}.{alias.name}"
                imports |= {inside} if inside in names else {base} & names
    return imports - {importer}


@lru_cache(maxsize=1)
def import_graph(root: Path = ROOT) -> dict[str, set[str]]:
    """Return the modules that each module imports."""
    files = modules(root)
    return {
        name: imported(path.read_text(encoding="utf-8"), name, path.name == "__init__.py", files)
        for name, path in files.items()
    }


def cycle(graph: Mapping[str, set[str]]) -> list[str]:
    """Return modules that import each other in a cycle, with the first module repeated at the end, or an empty list."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def layer_of(module: str) -> str:
    """Return the layer of a module, or "" for the facade ``cudatma``."""
    top, _, rest = module.partition(".")
    if top == "tools":
        return "tools"
    name = rest.split(".")[0]
    if name in FACTS:
        return "facts"
    return "tools" if name in TOP else name


def emulator_part(module: str) -> str:
    """Return the part of the emulator that a module belongs to."""
    name = module.removeprefix("cudatma.emulator").lstrip(".").split(".")[0]
    return name if name in EMULATOR else ""


def levels(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the layers by level, lowest first. A layer is one level above the highest layer that it imports."""
    level: dict[str, int] = {}
    for name, _ in LAYERS:
        targets = {layer_of(t) for module, imports in graph.items() if layer_of(module) == name for t in imports}
        level[name] = 1 + max((level[target] for target in targets if target in level), default=-1)
    return [[name for name in level if level[name] == row] for row in range(max(level.values()) + 1)]


_WIDTH, _MARGIN, _GAP, _BOX, _ROW = 500, 12, 10, 66, 78
_LABELS = {"facts": "cudatma/*.py", "tools": "tools/, cli, pytest_plugin"}
#: Fill and outline of the levels that describe, execute, generate and use kernels.
_COLORS = (("#eef1f7", GREY), ("#eef4fc", BLUE), ("#f1f8e6", GREEN), ("#fff5ea", ORANGE))


def picture(graph: Mapping[str, set[str]]) -> str:
    """Return an SVG with one row of boxes for each level. The lowest level is at the bottom."""
    out, rows, about = Drawing(), levels(graph), dict(LAYERS)
    for number, names in enumerate(reversed(rows)):
        width = (_WIDTH - 2 * _MARGIN - _GAP * (len(names) - 1)) / len(names)
        fill, stroke = _COLORS[(len(rows) - 1 - number) // 2]
        for column, name in enumerate(names):
            x, y = _MARGIN + column * (width + _GAP), _MARGIN + number * _ROW
            lines = textwrap.wrap(about[name], int(width / 7.5))
            out.box(x, y, width, _BOX, fill, stroke, _LABELS.get(name, f"{name}/"), lines)
    height = _MARGIN + _ROW * len(rows) + 24
    out.text(_WIDTH / 2, height - 14, "Each package imports only from the rows below it.", size=13)
    return out.document("The packages of cudatma as layers", _WIDTH, height)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the picture, or with --check compare it with the file."""
    return write_picture(PICTURE, picture(import_graph()), __doc__ or "", argv)


if __name__ == "__main__":
    sys.exit(main())
