"""What ships: every package and template is in the wheel, versions are pinned, and the README is current."""

from __future__ import annotations

import ast
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from cudatma.cli import COMMANDS
from tools.dev import readme_tables

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONSTRAINTS = ("constraints.txt", "constraints-cuda12.txt")


def pins(name: str) -> dict[str, list[str]]:
    """Distribution -> its pins, of a constraints file and of those that it reads."""
    found: dict[str, list[str]] = {}
    for line in (ROOT / name).read_text().splitlines():
        if line.startswith("-c "):
            found |= pins(line.removeprefix("-c ").strip())
        elif line and not line.startswith("#"):
            distribution, _, version = line.partition("==")
            assert version, f"{name}: {line!r} pins nothing"
            found.setdefault(normal(distribution), []).append(version)
    return found


def normal(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution.strip()).lower()


def required(*groups: str) -> set[str]:
    extras = PROJECT["project"]["optional-dependencies"]
    lists = [PROJECT["project"]["dependencies"], *(extras[group] for group in groups)]
    return {normal(re.split(r"[<>=;\[ ]", requirement)[0]) for group in lists for requirement in group}


def test_every_package_is_listed() -> None:
    setuptools = PROJECT["tool"]["setuptools"]
    inside = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "cudatma").rglob("__init__.py")}
    assert set(setuptools["packages"]) == inside | {"cudatma.ptx_templates", "cudatma.tools"}
    assert setuptools["package-dir"]["cudatma.tools"] == "tools"
    assert setuptools["package-dir"]["cudatma.ptx_templates"] == "ptx_templates"


@pytest.mark.parametrize(("name", "cuda"), list(zip(CONSTRAINTS, ("cuda13", "cuda12"), strict=True)))
def test_everything_that_is_installed_is_pinned(name: str, cuda: str) -> None:
    assert required(cuda, "sass", "dev") - set(pins(name)) == set()


def test_the_pins_of_cuda_13_are_those_of_the_measured_machines() -> None:
    assert pins("constraints.txt")["nvidia-cuda-nvrtc"] == ["13.0.88"]
    assert pins("constraints.txt")["cuda-bindings"] == pins("constraints.txt")["cuda-python"] == ["13.0.3"]


def test_linters_are_pinned_alike_everywhere() -> None:
    extras = dict(requirement.split("==") for requirement in PROJECT["project"]["optional-dependencies"]["dev"]
                  if "==" in requirement)  # fmt: skip
    assert {name: [version] for name, version in extras.items()} == {
        name: pins("constraints.txt")[name] for name in extras
    }


def test_the_wheel_holds_templates_and_tools(tmp_path: Path) -> None:
    """Built as pip builds it, from a copy, so that nothing is left in the checkout."""
    import shutil
    import subprocess

    pytest.importorskip("setuptools", minversion="77", reason="building needs the setuptools of pyproject.toml")
    copy = tmp_path / "copy"
    for folder in ("cudatma", "tools", "ptx_templates"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, copy / file)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [*command, "--wheel-dir", str(tmp_path), str(copy)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    templates = {f"cudatma/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "ptx_templates").rglob("*.j2")}
    assert templates
    assert templates <= names
    assert {f"cudatma/tools/{path.name}" for path in (ROOT / "tools").glob("*.py")} <= names
    assert not [name for name in names if name.startswith("cudatma/tools/dev/")]
    assert {"cudatma/py.typed", "cudatma/kernels/marlin/tuned/h200/4096x4096.json"} <= names
    assert {name.split("/")[0] for name in names} <= {"cudatma", f"cudatma-{PROJECT['project']['version']}.dist-info"}


def test_every_shipped_tool_serves_a_subcommand() -> None:
    """What no subcommand imports is for this repository alone, and belongs into tools/dev."""
    reached: set[str] = set()
    new = {module for module, _ in COMMANDS.values()}
    while new:
        reached |= new
        trees = [ast.parse((ROOT / "tools" / f"{name}.py").read_text()) for name in new]
        nodes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level)
        new = {name for node in nodes for name in ([node.module] if node.module else [a.name for a in node.names])}
        new -= reached
    shipped = {path.stem for path in (ROOT / "tools").glob("*.py")} - {"__init__"}
    assert shipped - reached <= {"tuned_tables"}, "move them to tools/dev"


def test_the_figures_of_the_readme_are_current() -> None:
    assert readme_tables.main(["--check"]) == 0


def test_the_readme_names_only_files_that_exist() -> None:
    text = (ROOT / "README.md").read_text()
    links = {target for target in re.findall(r"\]\(([^)#:]+)\)", text) if not target.startswith("http")}
    assert links
    assert [target for target in sorted(links) if not (ROOT / target).exists()] == []


def test_the_code_of_the_readme_is_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block parses; the one that compiles a kernel without a card does so."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    programs = [compile(block, f"README.md, block {i}", "exec") for i, block in enumerate(blocks)]
    without_card = [program for program, block in zip(programs, blocks, strict=True) if "cupy" not in block]
    assert without_card
    monkeypatch.setenv("CUDATMA_CACHE_DIR", str(tmp_path / "cache"))
    for program in without_card:
        names: dict[str, Any] = {}
        exec(program, names)
        assert "cp.async.bulk.tensor.2d" in names["kernel"].ptx
