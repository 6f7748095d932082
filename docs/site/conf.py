"""Configuration of Sphinx: `make docs` builds the site from the Markdown of this repository and the docstrings.

The repository is the source folder, so that links between pages work on the site as in a checkout. A template or
Python file that a page links to becomes a page.
"""

from __future__ import annotations

import inspect
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from pygments.lexers.c_like import CudaLexer
from pygments.lexers.python import PythonLexer
from sphinx.ext.napoleon import Config, NumpyDocstring
from sphinx.util.inspect import signature, stringify_signature

import cudatma
from tools.dev import guide, site_cli, site_errors, site_hazards
from tools.dev.site_docstrings import has_sections, linked_sections, to_rst

ROOT = Path(__file__).resolve().parents[2]

#: Page -> pages below it in the sidebar, "*" for those that are not named. A page that is nowhere fails the build.
CONTENTS: dict[str, list[str]] = {
    "README": [
        "Guide </docs/guide/README>",
        "How-to </docs/howto/README>",
        "Reference </docs/reference/README>",
        "Design </docs/architecture>",
        "Lab </docs/lab/index>",
        "Comparison </docs/comparison>",
        "Contributing </CONTRIBUTING>",
        "/CHANGELOG",
    ],
    "docs/guide/README": ["/docs/guide/*"],
    "docs/howto/README": [
        "/docs/howto/quantize_weights",
        "/docs/howto/convert_a_checkpoint",
        "/docs/howto/pytorch",
        "/docs/howto/transformers",
        "/docs/howto/serve_with_vllm",
        "/docs/howto/gemm_and_attention",
        "/docs/howto/move_data",
        "/docs/howto/tune",
        "/docs/howto/streams_and_graphs",
        "/docs/howto/several_gpus",
        "/docs/howto/build_a_tensor_map",
        "/docs/howto/inspect_a_descriptor",
        "/docs/howto/compile_and_dump",
        "/docs/howto/emulate_a_kernel",
        "/docs/howto/emulate_a_program",
        "/docs/howto/record_and_replay",
        "/docs/howto/test_a_kernel",
        "/docs/howto/mutate_a_kernel",
        "/docs/howto/debug_a_hang",
        "/docs/howto/*",
    ],
    "docs/reference/README": [
        "/docs/reference/weights",
        "/docs/reference/int4_gemm",
        "/docs/reference/gemm_attention",
        "/docs/reference/arrays",
        "/docs/reference/tensor_maps",
        "/docs/reference/kernels",
        "/docs/reference/emulator",
        "/docs/reference/targets",
        "/docs/reference/torch",
        "/docs/reference/transformers",
        "/docs/reference/errors",
        "/docs/reference/hazards",
        "/docs/reference/command_line",
        "/docs/reference/*",
    ],
    "docs/reference/errors": ["/docs/reference/errors/*"],
    "docs/reference/hazards": ["/docs/reference/hazards/*"],
    "docs/architecture": ["/docs/design/path_of_a_call", "/docs/design/*"],
    "docs/lab/index": ["/docs/lab/benchmarks", "/docs/lab/*"],
}
#: Pages for maintainers, which the site does not show.
LEFT_OUT = ["docs/status.md"]
LANGUAGES = {".py": "python", ".j2": "cuda"}


def linked_sources() -> list[str]:
    """Return the paths in the repository of files in LANGUAGES that a page links to."""
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

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "sphinx_copybutton"]
root_doc = "README"
include_patterns = [
    "*.md",
    "docs/*.md",
    "docs/*/*.md",
    "docs/reference/*.rst",
    "docs/reference/errors/*.rst",
    "docs/reference/hazards/*.md",
    *linked_sources(),
]
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
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
highlight_language = "none"
smartquotes = False  # what is quoted is often to be typed
pygments_style = "friendly"
pygments_dark_style = "github-dark"


def role_of(name: str) -> str:
    """Return the role of a public name in Sphinx's Python domain."""
    value = getattr(cudatma, name)
    if inspect.isclass(value):
        return "exc" if issubclass(value, BaseException) else "class"
    return "func" if callable(value) else "data"


PUBLIC = {name: role_of(name) for name in cudatma.__all__}


#: Pages whose files in the repository are placeholders.
GENERATED = {
    "docs/reference/command_line": site_cli.page,
    "docs/reference/errors": site_errors.index_page,
}


def write_pages(app: Any) -> None:
    """Write the pages of error classes and of kinds of hazards; git ignores their folders."""
    reference = ROOT / "docs" / "reference"
    pages = {f"errors/{name}.rst": page for name, page in site_errors.error_pages().items()}
    pages |= {f"hazards/{kind}.md": page for kind, page in site_hazards.hazard_pages().items()}
    for name, page in pages.items():
        (reference / name).parent.mkdir(exist_ok=True)
        (reference / name).write_text(page, encoding="utf-8")


class PythonWithCuda(PythonLexer):  # type: ignore[misc]
    """Python whose triple-quoted strings are highlighted as CUDA if they contain a kernel or a device function."""

    def get_tokens_unprocessed(self, text: str, stack: Iterable[str] = ("root",)) -> Iterator[tuple[int, Any, str]]:
        strings = re.finditer(r'"""(.*?)"""', text, re.DOTALL)
        cuda = {match.start(1): match for match in strings if re.search(r"\b__(global|device)__\b", match[1])}
        end = 0
        for at, kind, value in super().get_tokens_unprocessed(text, stack):
            if at in cuda:
                end = cuda[at].end(1)
                yield from ((at + i, kind, value) for i, kind, value in CudaLexer().get_tokens_unprocessed(cuda[at][1]))
            if at >= end:
                yield at, kind, value


def read_page(app: Any, docname: str, source: list[str]) -> None:
    """Add the contents of CONTENTS, generated pages, and the code of files that pages link to."""
    path = Path(app.env.doc2path(docname))
    if path.suffix in LANGUAGES:
        source[0] = code_page(path, source[0])
    if docname in GENERATED:
        source[0] = GENERATED[docname]()
    if path in guide.PAGES:
        title, _, text = source[0].partition("\n")
        link = f'<a href="{path.stem}.ipynb" download>Download this page as a Jupyter notebook</a>'
        source[0] = f"{title}\n\n{link}\n{text}"
    source[0] = source[0].replace(f"]({site_hazards.EXPLANATIONS}", f"]({site_hazards.GENERATED}")
    if path.suffix == ".md":  # a link whose text is a file's name shows the page's title
        source[0] = re.sub(r"\[[\w./]+\.md\](?=\()", "[]", source[0])
    if docname in CONTENTS:
        pages = [page for page in CONTENTS[docname] if exists(page)]
        if path.suffix == ".md":
            source[0] += "\n".join(["\n\n```{toctree}", ":hidden:", ":glob:", "", *pages, "```\n"])
        else:
            source[0] += "\n".join(
                ["\n\n.. toctree::", "   :hidden:", "   :glob:", "", *(f"   {p}" for p in pages), ""]
            )


def exists(entry: str) -> bool:
    """Return whether there is a page for an entry of CONTENTS."""
    return any(ROOT.glob(f"{re.sub(r'^.*<|>$', '', entry)[1:]}.*"))


def code_page(path: Path, text: str) -> str:
    """Return a page that shows a file."""
    title = path.relative_to(ROOT).as_posix()
    lines = [":orphan:", "", title, "=" * len(title), "", f".. code-block:: {LANGUAGES[path.suffix]}", ""]
    return "\n".join([*lines, *(f"   {line}" for line in text.splitlines()), ""])


def read_docstring(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Convert a docstring to reStructuredText. A name of the object's own class or module is not linked to a public
    name that is equal."""
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
    public = {public: role for public, role in PUBLIC.items() if public not in own}
    if has_sections(lines):
        config = Config(napoleon_use_ivar=True, napoleon_use_param=False)  # one entry for each heading
        lines[:] = NumpyDocstring(linked_sections(lines, public), config, app, what, name, value, options).lines()
    else:
        lines[:] = to_rst(lines, parameters, public)


def read_signature(app: Any, what: str, name: str, value: Any, options: Any, arguments: str, returns: str) -> Any:
    """Return the signature of __init__ if the base class is a mock, whose signature autodoc would show."""
    if what != "class" or not name.startswith("cudatma.integrations."):
        return None
    return stringify_signature(signature(value.__init__, bound_method=True), show_return_annotation=False), ""


def link_type(app: Any, env: Any, node: Any, content: Any) -> Any:
    """Resolve a type in a signature, which has the name of its module, to the entry of the public name."""
    name = str(node.get("reftarget", "")).rpartition(".")[2]
    if node.get("refdomain") != "py" or name not in PUBLIC or node["reftarget"] == f"cudatma.{name}":
        return None
    python = env.get_domain("py")
    return python.resolve_xref(env, node["refdoc"], app.builder, PUBLIC[name], f"cudatma.{name}", node, content)


def write_colons(app: Any, doctree: nodes.document, docname: str) -> None:
    """Write a colon, not two hyphens, between a parameter and its description."""
    for text in list(doctree.findall(nodes.Text)):
        if text.startswith((" -- ", ") -- ")):
            text.parent.replace(text, nodes.Text(text.replace(" -- ", ": ", 1)))


def write_index(app: Any, error: Exception | None) -> None:
    if error is None and app.builder.name == "html":
        guide.write_notebooks(Path(app.outdir) / "docs" / "guide")
        shutil.copy(Path(app.outdir) / "README.html", Path(app.outdir) / "index.html")


def setup(app: Any) -> None:
    app.add_lexer("python", PythonWithCuda)
    app.connect("builder-inited", write_pages)
    app.connect("source-read", read_page)
    app.connect("autodoc-process-docstring", read_docstring)
    app.connect("autodoc-process-signature", read_signature)
    app.connect("missing-reference", link_type)
    app.connect("doctree-resolved", write_colons)
    app.connect("build-finished", write_index)
