"""What ships: every package and template is in the wheel, versions are pinned, and the README is current."""

from __future__ import annotations

import ast
import re
import shlex
import sys
import zipfile
from pathlib import Path

import pytest

import cudatma
from cudatma.build.headers import HEADER_PACKAGES
from cudatma.cli import COMMANDS
from cudatma.errors import CUDA_PACKAGES
from tools.dev import readme_tables, release

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONSTRAINTS = ("cuda13", "cuda12")


def pins(name: str) -> dict[str, list[str]]:
    """Return the pins of each distribution in a constraints file and in the files that it reads."""
    found: dict[str, list[str]] = {}
    for line in (ROOT / "constraints" / f"{name}.txt").read_text().splitlines():
        if line.startswith("-c "):
            found |= pins(line.removeprefix("-c ").strip().removesuffix(".txt"))
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


@pytest.mark.parametrize("cuda", [12, 13])
def test_the_packages_that_errors_name_are_those_of_the_project(cuda: int) -> None:
    assert shlex.split(CUDA_PACKAGES[cuda]) == PROJECT["project"]["optional-dependencies"][f"cuda{cuda}"]


@pytest.mark.parametrize(("extra", "packages"), HEADER_PACKAGES.items())
def test_the_packages_of_headers_are_those_of_the_project(extra: str, packages: str) -> None:
    listed = PROJECT["project"]["optional-dependencies"][extra]
    assert packages.split() == [package.partition(">=")[0] for package in listed]


@pytest.mark.parametrize("cuda", CONSTRAINTS)
def test_everything_that_is_installed_is_pinned(cuda: str) -> None:
    headers = "headers12" if cuda == "cuda12" else "headers"
    assert required(cuda, headers, "sass", "dev", "docs", "release") - set(pins(cuda)) == set()


@pytest.mark.slow
def test_the_wheel_holds_templates_and_tools(tmp_path: Path) -> None:
    """Built as pip builds it, from a copy, so that nothing is left in the checkout."""
    import shutil
    import subprocess

    pytest.importorskip("setuptools", minversion="77", reason="building needs the setuptools of pyproject.toml")
    copy = tmp_path / "copy"
    for folder in ("cudatma", "tools", "ptx_templates"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, copy / file)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [*command, "--wheel-dir", str(tmp_path), str(copy)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    templates = {f"cudatma/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "ptx_templates").rglob("*.j2")}
    templates = {name for name in templates if not name.startswith("cudatma/ptx_templates/probes/")}
    assert templates
    assert templates <= names
    assert {f"cudatma/tools/{path.name}" for path in (ROOT / "tools").glob("*.py")} <= names
    release.check_wheel(wheel)
    assert {"cudatma/py.typed", "cudatma/kernels/marlin/tuned.json"} <= names
    about = zipfile.ZipFile(wheel).read(f"cudatma-{cudatma.__version__}.dist-info/METADATA").decode()
    assert "![" not in about, "package indexes have no pictures"
    assert not re.search(r"\]\((?!https?:)", about), "nor the files that README.md links to"


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
    assert shipped - reached <= set(), "move them to tools/dev"


def test_the_generated_tables_are_current() -> None:
    assert readme_tables.main(["--check"]) == 0


PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", text)
    assert links or page.name != "README.md"
    for file, heading in links:
        target = page.parent / file if file else page
        assert target.exists(), file
        assert not heading or heading in headings(target), f"{file}#{heading}"


def headings(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
