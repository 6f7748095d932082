"""The documentation site: the API reference lists every public name once, and the command-line reference every
option."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

import cudatma
from cudatma import cli
from tools.dev import site_cli, site_errors, site_hazards
from tools.dev.site_docstrings import linked_sections, to_rst

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference"
PUBLIC = {"copy": "func", "TensorMap": "class", "ArgumentError": "exc"}


def test_every_public_name_is_in_the_reference_once() -> None:
    pages = "\n".join([*(page.read_text() for page in REFERENCE.glob("*.rst")), *site_errors.error_pages().values()])
    listed = Counter(re.findall(r"^\.\. auto\w+:: cudatma\.(\w+)$", pages, re.MULTILINE))
    assert set(listed) == set(cudatma.__all__)
    assert max(listed.values()) == 1


def test_every_name_for_torch_is_in_the_reference() -> None:
    listed = re.findall(
        r"^\.\. auto\w+:: cudatma\.integrations\.torch\.(\w+)$", (REFERENCE / "torch.rst").read_text(), re.M
    )
    package = Path(cudatma.__path__[0], "integrations", "torch", "__init__.py").read_text()
    names = re.search(r"^__all__ = (\[.*?\])$", package, re.M | re.S)
    assert names
    assert ast.literal_eval(names[1]) == sorted(listed)


def test_what_is_said_of_parameters_becomes_a_list() -> None:
    docstring = ["x: rows; any pitch. w,", "b (optional): more. Raises ArgumentError.", "", "Of y: nothing."]
    assert to_rst(docstring, {"x", "w", "b"}, PUBLIC) == [
        *("- **x**: rows; any pitch.", ""),
        *("- **w**, **b** (optional): more.", ""),
        *("Raises :py:exc:`~cudatma.ArgumentError`.", ""),
        *("Of y: nothing.", ""),
    ]


def test_numpydoc_sections_keep_their_names_and_link_their_prose() -> None:
    docstring = ["Copy x.", "", "Raises", "------", "ArgumentError", "    See TensorMap. x*y fails."]
    assert linked_sections(docstring, PUBLIC) == [
        *docstring[:5],
        r"    See :py:class:`~cudatma.TensorMap`. x\*y fails.",
    ]


def test_the_page_of_an_error_has_its_messages() -> None:
    pages, value = site_errors.error_pages(), "\N{HORIZONTAL ELLIPSIS}"
    message = (
        f"strides_bytes[{value}] must be a multiple of {value} bytes, got {value}; pad the rows or use ordinary loads"
    )
    assert message in pages["DescriptorError"].replace("\\", "")
    assert all(f":doc:`errors/{name}`" in site_errors.index_page() for name in pages)


def test_the_table_of_hazards_is_current() -> None:
    page = site_hazards.PAGE.read_text(encoding="utf-8")
    assert page == site_hazards.with_table(page), "run python -m tools.dev.site_hazards"
    assert all(f"/{kind}.md)" in page for kind in site_hazards.hazard_pages())


def test_blocks_of_code_are_left_alone() -> None:
    assert to_rst([">>> f(*x)", "", "    a | b"], {"x"}, {}) == [">>> f(*x)", "", "    a | b", ""]


@pytest.fixture(scope="module")
def sections() -> dict[str, str]:
    """Return the section of each command in the command-line reference."""
    parts = re.split(r"^\.\. _cudatma-(\w+):$", site_cli.page(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_command_has_a_section(sections: dict[str, str]) -> None:
    assert list(sections) == list(cli.COMMANDS)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_option_of_a_command_is_listed(
    command: str, sections: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    shown = set(re.findall(r"^  (--?[A-Za-z][\w-]*)", capsys.readouterr().out, re.MULTILINE)) - {"-h"}
    listed = re.findall(r"^\.\. option:: (-[\w-]+)", sections[command], re.MULTILINE)
    assert set(listed) == shown
    assert len(listed) == len(shown)


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")], ids=lambda page: page.stem)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        if not link.startswith("http"):
            target = page.parent / path if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link
