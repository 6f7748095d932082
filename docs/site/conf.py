"""Sphinx's configuration: `make docs` builds the site out of the Markdown of this repository and the docstrings.

The repository is the source folder, so that the links between pages work on the site as they do in a checkout. A source
file that a page links to becomes a page of its own. The pages of the guide can be downloaded as notebooks.
"""

from __future__ import annotations

import inspect
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from sphinx.util.inspect import signature, stringify_signature

import cudatma
from tools.dev import guide, site_cli
from tools.dev.site_docstrings import to_rst

ROOT = Path(__file__).resolve().parents[2]

#: Page -> captions of the sidebar -> pages below it. A page that is nowhere fails the build.
CONTENTS: dict[str, dict[str, list[str]]] = {
    "README": {
        "Start": ["docs/guide/README", "docs/guide/mistakes", "docs/reference/environment"],
        "Int4 GEMM": [
            "docs/howto/quantize_weights",
            "docs/howto/tune",
            "docs/design/choosing_a_kernel",
            "docs/design/packed_weights",
            "docs/design/marlin",
            "docs/design/cost_model",
        ],
        "Dense GEMM and attention": ["docs/design/gemm", "docs/design/attention"],
        "In a model": [  # those that there are
            "docs/howto/pytorch*",
            "docs/howto/several_gpus*",
            "docs/howto/transformers*",
            "docs/howto/convert_a_checkpoint*",
            "docs/howto/serve_with_vllm*",
        ],
        "Arrays": ["docs/howto/move_data", "docs/howto/streams_and_graphs", "docs/design/data_movement"],
        "Kernels of your own": [
            "docs/howto/compile_and_dump",
            "docs/howto/build_a_tensor_map",
            "docs/howto/inspect_a_descriptor",
            "docs/reference/tensor_map_format",
            "docs/reference/device_functions",
            "docs/adding_a_kernel",
        ],
        "Testing and debugging": [
            "docs/howto/test_a_kernel",
            "docs/howto/emulate_a_kernel",
            "docs/reference/emulator_coverage",
            "docs/howto/mutate_a_kernel",
            "docs/howto/debug_a_hang",
            "docs/design/emulator",
            "docs/design/debug_kernels",
        ],
        "Reference": [
            "docs/reference/weights",
            "docs/reference/int4_gemm",
            "docs/reference/gemm_attention",
            "docs/reference/torch",
            "docs/reference/transformers",
            "docs/reference/arrays",
            "docs/reference/tensor_maps",
            "docs/reference/kernels",
            "docs/reference/emulator",
            "docs/reference/targets",
            "docs/reference/errors",
            "docs/reference/command_line",
        ],
        "Lab": ["docs/lab/index", "docs/lab/*"],
        "Development": ["docs/architecture", "docs/path_of_a_call", "CONTRIBUTING", "CHANGELOG"],
    },
    "docs/guide/README": {"": ["docs/guide/0*"]},
}
#: Pages for developers of cudatma alone, which the repository has and the site does not.
LEFT_OUT = ["docs/status.md"]
LANGUAGES = {".py": "python", ".j2": "cuda"}


def linked_sources() -> list[str]:
    """The files in LANGUAGES that a page links to, by their paths in the repository."""
    found = set()
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            file = (page.parent / link).resolve()
            if file.suffix in LANGUAGES and file.is_file():
                found.add(file.relative_to(ROOT).as_posix())
    return sorted(found)


project = "cudatma"
version = release = cudatma.__version__
copyright = "the authors of cudatma"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "docs/*/*.md", "docs/reference/*.rst", *linked_sources()]
exclude_patterns = [*LEFT_OUT, ".*", "build", "dist", "out", "tests", "benchmarks"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext", **dict.fromkeys(LANGUAGES, "restructuredtext")}
myst_heading_anchors = 4

nitpicky = True
# Types in signatures are often those of other libraries or of modules that are not public.
nitpick_ignore_regex = [("py:class", ".*")]
autodoc_member_order = "bysource"
autodoc_mock_imports = ["torch", "transformers"]  # the site is built without them
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 72
python_use_unqualified_type_names = True
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = "cudatma"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {"navigation_with_keys": True}
highlight_language = "none"
smartquotes = False  # what is quoted is often to be typed
pygments_style = "friendly"
pygments_dark_style = "github-dark"


def role_of(name: str) -> str:
    """How Sphinx's Python domain calls what a public name stands for."""
    value = getattr(cudatma, name)
    if inspect.isclass(value):
        return "exc" if issubclass(value, BaseException) else "class"
    return "func" if callable(value) else "data"


PUBLIC = {name: role_of(name) for name in cudatma.__all__}


def read_page(app: Any, docname: str, source: list[str]) -> None:
    """Add the contents of CONTENTS, the commands, and the code of files that pages link to."""
    path = Path(app.env.doc2path(docname))
    if path.suffix in LANGUAGES:
        source[0] = code_page(path, source[0])
    if docname == "docs/reference/command_line":
        source[0] = site_cli.page()
    if path in guide.PAGES:
        title, _, text = source[0].partition("\n")
        link = f'<a href="{path.stem}.ipynb" download>Download this page as a Jupyter notebook</a>'
        source[0] = f"{title}\n\n{link}\n{text}"
    if path.suffix == ".md":  # a link whose text is a file's name shows the page's title
        source[0] = re.sub(r"\[[\w./]+\.md\](?=\()", "[]", source[0])
    for caption, patterns in CONTENTS.get(docname, {}).items():
        pages = [pattern for pattern in patterns if any(ROOT.glob(f"{pattern}.*"))]
        options = [":hidden:", ":glob:", *([f":caption: {caption}"] if caption else [])]
        source[0] += "\n".join(["\n\n```{toctree}", *options, "", *(f"/{page}" for page in pages), "```\n"])


def code_page(path: Path, text: str) -> str:
    """Return a page that shows a file."""
    title = path.relative_to(ROOT).as_posix()
    lines = [":orphan:", "", title, "=" * len(title), "", f".. code-block:: {LANGUAGES[path.suffix]}", ""]
    return "\n".join([*lines, *(f"   {line}" for line in text.splitlines()), ""])


def read_docstring(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Make reStructuredText of a docstring. What has the name of something public (a method, a class of an integration)
    is not linked to that."""
    owner = getattr(cudatma, name.split(".")[1], None)
    own = set(dir(owner)) if inspect.isclass(owner) else {name.split(".")[1]}
    own |= set(getattr(sys.modules.get(".".join(name.split(".")[:3])), "__all__", ()))
    try:
        parameters = set(inspect.signature(value).parameters)
    except (TypeError, ValueError):
        parameters = set()
    if inspect.isclass(value):
        attributes = set(re.findall(r"\bself\.(\w+)", inspect.getsource(value)))
        parameters |= {*attributes, *getattr(value, "__slots__", ()), *getattr(value, "__annotations__", ())}
    lines[:] = to_rst(lines, parameters, {public: role for public, role in PUBLIC.items() if public not in own})


def read_signature(app: Any, what: str, name: str, value: Any, options: Any, arguments: str, returns: str) -> Any:
    """That of __init__ where the base class is a mock, whose signature autodoc would show."""
    if what != "class" or not name.startswith("cudatma.integrations."):
        return None
    return stringify_signature(signature(value.__init__, bound_method=True), show_return_annotation=False), ""


def link_type(app: Any, env: Any, node: Any, content: Any) -> Any:
    """A type in a signature is named as its module calls it: the public name leads to its entry."""
    name = str(node.get("reftarget", "")).rpartition(".")[2]
    if node.get("refdomain") != "py" or name not in PUBLIC or node["reftarget"] == f"cudatma.{name}":
        return None
    python = env.get_domain("py")
    return python.resolve_xref(env, node["refdoc"], app.builder, PUBLIC[name], f"cudatma.{name}", node, content)


def write_files(app: Any, error: Exception | None) -> None:
    """Write the notebooks, and the first page under the name that servers look for."""
    if error is None and app.builder.name == "html":
        guide.write_notebooks(Path(app.outdir) / "docs" / "guide")
        shutil.copy(Path(app.outdir) / "README.html", Path(app.outdir) / "index.html")


def setup(app: Any) -> None:
    app.connect("source-read", read_page)
    app.connect("autodoc-process-docstring", read_docstring)
    app.connect("autodoc-process-signature", read_signature)
    app.connect("missing-reference", link_type)
    app.connect("build-finished", write_files)
