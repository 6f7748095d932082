"""Imports go one way: the layer table of docs/architecture.md, read from the page itself, against the code."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOP = 8  # cli, tools and the pytest plugin: what people use it through
_ROW = re.compile(r"^\|\s*(\d+)\s*\|([^|]*)\|", re.MULTILINE)


def read_table(page: str) -> dict[str, int]:
    """Room -> layer, out of the rows ``| 3 | `descriptor.spec`, `cache` | ... |``."""
    return {
        name: int(row[1]) for row in _ROW.finditer(page) for name in re.findall(r"`([^`]+)`", row[2]) if name.strip()
    }


@dataclass(frozen=True)
class Rooms:
    """The layer table, asked by module name (without ``cudatma.``)."""

    table: dict[str, int]

    def layer(self, module: str) -> int | None:
        """A module has the layer of its nearest listed ancestor; a package whose parts are listed, of its highest."""
        parts = module.split(".")
        for end in range(len(parts), 0, -1):
            if (name := ".".join(parts[:end])) in self.table:
                return self.table[name]
        inside = [layer for name, layer in self.table.items() if name.startswith(f"{module}.")]
        return max(inside, default=None)

    def allows(self, importer: str, imported: str) -> bool:
        """Strictly downwards, or inside one room; inside a package its parts still go one way."""
        here, there = self.layer(importer), self.layer(imported)
        if here is None or there is None:
            return False
        if importer.split(".")[0] == imported.split(".")[0]:
            return there <= here or here == TOP
        return there < here or here == there == TOP


def module_name(path: Path) -> str:
    """``cudatma/descriptor/spec.py`` -> ``descriptor.spec``; ``tools/sass.py`` -> ``tools.sass``; the facade -> ""."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] == "cudatma":
        parts = parts[1:]
    if parts[-1] == "__init__":
        parts = parts[:-1]
    return ".".join(parts)


def sources() -> list[Path]:
    return sorted(path for folder in ("cudatma", "tools") for path in (ROOT / folder).rglob("*.py"))


def is_module(name: str) -> bool:
    path = ROOT / "cudatma" / Path(*name.split(".")) if name else ROOT / "cudatma"
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def imported(tree: ast.AST, importer: str, is_package: bool) -> set[str]:
    """The modules of cudatma that a file imports, inside functions too, without ``cudatma.``; "" is the facade."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("cudatma").lstrip(".") for alias in node.names if _ours(alias.name)}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = [part for part in importer.split(".") if part]
                up = node.level - 1 if is_package else node.level
                stem = parts[: len(parts) - up] if up else parts
                base = ".".join([*stem, base] if base else stem)
            elif _ours(base):
                base = base.removeprefix("cudatma").lstrip(".")
            else:
                continue
            for alias in node.names:
                inside = f"{base}.{alias.name}" if base else alias.name
                found.add(inside if is_module(inside) else base)
    return found


def _ours(name: str) -> bool:
    return name == "cudatma" or name.startswith("cudatma.")


@pytest.fixture(scope="module")
def rooms() -> Rooms:
    return Rooms(read_table((ROOT / "docs" / "architecture.md").read_text()))


def test_the_page_has_every_layer(rooms: Rooms) -> None:
    assert set(rooms.table.values()) == set(range(TOP + 1))
    assert rooms.table["errors"] == 0
    assert rooms.table["tools"] == TOP


def test_every_module_has_a_layer(rooms: Rooms) -> None:
    missing = sorted(name for name in map(module_name, sources()) if name and rooms.layer(name) is None)
    assert not missing, f"not in the layer table of docs/architecture.md: {', '.join(missing)}"


def test_imports_go_one_way(rooms: Rooms) -> None:
    wrong = []
    for path in sources():
        importer = module_name(path)
        if importer == "" or rooms.layer(importer) is None:
            continue  # the facade imports from every room, and no room imports the facade
        tree = ast.parse(path.read_text(), str(path))
        for name in sorted(imported(tree, importer, path.name == "__init__.py")):
            if name == "":
                if rooms.layer(importer) != TOP:
                    wrong.append(f"{importer} imports the public facade `cudatma`; import the room itself")
            elif rooms.layer(name) is not None and not rooms.allows(importer, name):
                wrong.append(f"{importer} (layer {rooms.layer(importer)}) imports {name} (layer {rooms.layer(name)})")
    assert not wrong, "\n".join(wrong)


def test_the_rule_itself() -> None:
    rooms = Rooms(read_table("| 0 | `errors` | |\n| 3 | `d.spec`, `cache` | |\n| 4 | `render`, `d.encode` | |\n"))
    assert rooms.layer("d") == 4
    assert rooms.allows("render", "cache")
    assert rooms.allows("d.encode", "d.spec")
    assert not rooms.allows("d.spec", "d.encode")
    assert not rooms.allows("render", "d.encode")
    assert not rooms.allows("cache", "render")
    assert not rooms.allows("errors", "unknown")


def test_imports_are_found_wherever_they_stand() -> None:
    code = "import numpy\nimport cudatma.target\ndef f():\n    from cudatma import errors, Anything\n"
    assert imported(ast.parse(code), "tools.x", False) == {"target", "errors", ""}
    assert imported(ast.parse("from .sass import f"), "tools.report", False) == {"tools.sass"}
    assert imported(ast.parse("from . import spec"), "descriptor", True) == {"descriptor.spec"}
    assert imported(ast.parse("from ..target import Target"), "descriptor.spec", False) == {"target"}


def test_importing_cudatma_loads_no_gpu_library() -> None:
    code = (
        "import sys, pkgutil, importlib, cudatma\n"
        "for m in pkgutil.walk_packages(cudatma.__path__, 'cudatma.'):\n"
        "    if '.tools' not in m.name: importlib.import_module(m.name)\n"
        "print([n for n in ('cuda.bindings', 'cupy', 'torch') if n in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
