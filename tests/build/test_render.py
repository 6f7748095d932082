"""cudatma.build.render: delimiters, strictness, inclusion, the opening comment, and primitives that a source uses."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import jinja2.meta
import jinja2.nodes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudatma.build import render as module
from cudatma.build.library import LIBRARY
from cudatma.build.render import is_like_template, render, template_files, template_root
from cudatma.dtypes import ACTIVATION_TYPES
from cudatma.errors import TargetError, TemplateError
from cudatma.kernels.registry import REGISTRY
from cudatma.pipeline import Operand, PipelineSpec
from cudatma.runtime.compiler_log import lines_of
from cudatma.target import get_target

TEMPLATES = sorted(path.relative_to(template_root()).as_posix() for path in template_root().rglob("*.j2"))


@dataclass(frozen=True, slots=True)
class Config:
    stages: int = 3
    name: str = "weight"
    entry: str = "kernel"


def text(source: str, config: object = None, target: str = "sm_90a") -> str:
    """Return the rendered body without the opening comment."""
    return render(source, config, target, is_source=True).split("\n\n", 1)[1]


def test_cuda_and_ptx_pass_through_untouched() -> None:
    source = (
        'asm volatile("{%0, %1}, {{0}}, {# no comment #}" :: "r"(x)); // 100 % {% not a tag %}\n'
        "int y = a/*plain*/ %b; /* % */ template <int N> struct S {};\n"
        "#pragma unroll\n"
    )
    assert text(source) == source


def test_values_statements_and_notes() -> None:
    source = (
        "//# a note\n//% if config.stages > 2\nint s = ${ config.stages }; //# why\n//% endif\n"
        "int v[]={/*% for i in range(3) %*/${ i },/*% endfor %*/};/*# gone #*/\n"
    )
    assert text(source, Config()) == "int s = 3;\nint v[]={0,1,2,};\n"


@pytest.mark.parametrize(
    ("value", "shown"),
    [(True, "True"), (1.5, "1.5"), (None, "None"), ((1,), "(1,)"), (np.int64(3), "np.int64(3)"), (b"x", "b'x'")],
)
def test_only_str_and_int_are_printed(value: object, shown: str) -> None:
    with pytest.raises(TemplateError, match=r"<source>:2: .*must be a str or an int") as caught:
        render("a\n${ config.v }\n", type("S", (), {"v": value})(), "sm_90a", is_source=True)
    assert shown in str(caught.value)


def test_an_int_enum_is_refused_because_it_prints_differently_from_python_to_python() -> None:
    value = enum.IntEnum("E", ["A"]).A  # type: ignore[attr-defined]
    with pytest.raises(TemplateError, match="must be a str or an int"):
        text("${ config.v }", type("S", (), {"v": value})())


@pytest.mark.parametrize(
    ("source", "line", "reason"),
    [
        ("a\nb\n${ nothing }\n", 3, "'nothing' is undefined"),
        ("a\n${ config.nothing }\n", 2, "no attribute 'nothing'"),
        ("//% if config.nothing\n//% endif\n", 1, "no attribute 'nothing'"),
        ("a\n\n//% if\n//% endif\n", 3, "Expected an expression"),
        ("//% for x in range(2)\nb\n", 2, "Unexpected end of template"),
        ("x\n${ config.stages | default(1) }\n", 2, "No filter named 'default'"),
        ("x\n${ dict() }\n", 2, "'dict' is undefined"),
        ("x\n${ config.stages + 'a' }\n", 2, "unsupported operand"),
        ('x\n//% include "primitives/none.cuh.j2"\n', 2, "primitives/none.cuh.j2"),
        ("x\n//% include config.name\n", 2, "`include` must be followed by a path in quotes"),
        ("x\n//% include\n", 2, 'If it is a comment, write "// %", or compile the text without template=True'),
        ("x\n//% of peak\n", 2, "unknown tag 'of'. If it is a comment, write \"// %\", or compile"),
        ("x\n${ 'a' * 10**15 }\n", 2, "rendering the template exhausts the available memory"),
    ],
)
def test_errors_name_template_and_line(source: str, line: int, reason: str) -> None:
    with pytest.raises(TemplateError) as caught:
        render(source, Config(), "sm_90a", is_source=True)
    assert str(caught.value).startswith(f"<source>:{line}: ")
    assert reason in str(caught.value)


def test_an_error_inside_an_include_names_the_included_file(tmp_path: Path) -> None:
    (tmp_path / "primitives").mkdir()
    (tmp_path / "primitives" / "bad.j2").write_text("ok\n${ missing }\n")
    (tmp_path / "top.j2").write_text('one\n//% include "primitives/bad.j2"\n')
    with rendering_from(tmp_path), pytest.raises(TemplateError, match=r"^primitives/bad\.j2:2: 'missing'"):
        render("top.j2", None, "sm_90a")


@contextmanager
def rendering_from(folder: Path) -> Iterator[None]:
    """Render from another template folder until the block ends."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "template_root", lambda: folder)
        yield


def test_an_unknown_template_and_an_unknown_target_are_refused() -> None:
    with pytest.raises(TemplateError, match=r"kernels/none\.cu\.j2"):
        render("kernels/none.cu.j2", None, "sm_90a")
    with pytest.raises(TargetError, match="sm_70"):
        render("x", None, "sm_70", is_source=True)
    for name in ("../pyproject.toml", "/etc/passwd", "", "primitives", "primitives//types.cuh.j2"):
        with pytest.raises(TemplateError, match="must be the path of a file in"):
            template_files(name)


def test_an_include_renders_once_in_one_output_and_again_in_the_next() -> None:
    twice = '//% include "primitives/types.cuh.j2"\n' * 2 + '//% include "primitives/mbarrier.cuh.j2"\n'
    for _ in range(2):
        assert text(twice).count("struct alignas(64) TensorMap") == 1


def test_a_file_that_is_only_met_in_a_branch_not_taken_still_renders_later() -> None:
    include = '//% include "primitives/types.cuh.j2"\n'
    source = f"//% if config.stages > 9\n{include}//% endif\n{include}"
    assert text(source, Config()).count("struct alignas(64) TensorMap") == 1


def test_macros_come_in_by_import_and_include_nothing_twice(tmp_path: Path) -> None:
    (tmp_path / "m.j2").write_text("/*% macro twice(x) %*/${ x }${ x }/*% endmacro %*/")
    (tmp_path / "top.j2").write_text('//% from "m.j2" import twice\n${ twice("ab") }\n')
    with rendering_from(tmp_path):
        assert render("top.j2", None, "sm_90a").endswith("\nabab\n")
        assert [path.name for path in template_files("top.j2")] == ["top.j2", "m.j2"]


def test_an_include_that_is_only_a_comment_is_none(tmp_path: Path) -> None:
    (tmp_path / "top.j2").write_text(
        'int x; //% include "gone.j2"\n//# //% include "gone.j2"\n/*% include "b.j2" %*/\n'
    )
    (tmp_path / "b.j2").write_text("")
    with rendering_from(tmp_path):
        assert [path.name for path in template_files("top.j2")] == ["top.j2", "b.j2"]


# --- the sandbox


@pytest.mark.parametrize(
    "expression",
    [
        "''.__class__.__mro__[1].__subclasses__()",
        "config.__class__.__init__.__globals__",
        "range.__init__",
        "target.has.__globals__['__builtins__']",
        "target.has.__func__.__code__.co_code",
        "config.method.__self__",
        "''['__class__']",
        "(''|map(attribute='__class__')|list)",
        "'{0.__class__.__mro__}'.format(config)",
        "'{x.__class__}'.format_map({'x': 1})",
        "self.__init__.__globals__.__builtins__",
        "self._TemplateReference__context",
        "([].append(1))",
        "range(10000000)",
    ],
)
def test_a_template_reaches_nothing_of_python(expression: str) -> None:
    class Named:
        stages = 3

        def method(self) -> int:
            return 1

    with pytest.raises(TemplateError) as caught:
        render("\n${ " + expression + " }", Named(), "sm_90a", is_source=True)
    assert str(caught.value).startswith("<source>:2: ")
    assert not any(name in str(caught.value) for name in ("subprocess", "<class 'str'>, <class 'object'>"))


def test_the_sandbox_lets_configs_compute() -> None:
    assert text("${ config.name.upper() } ${ target.has('tma') | int if false else 1 }", Config()) == "WEIGHT 1\n"


# --- lines

NUMBERED = """\
line 1
//% include "primitives/types.cuh.j2"
//% set x = 4

line 5 /*# a note
of two lines #*/

line 8: ${ x }
//# a note
//% for i in range(2)
line 11
//% endfor
/*% if x == 3 %*/
gone
/*% endif %*/
line 16
#define LINE_17 \\
  /*% if x %*/ line 18 \\
  line 19 /*% endif %*/ \\
  line 20
line 21
//% macro twice(a)
printed ${ a } anywhere
//% endmacro
head ${ twice(5) }
line 26


line 29
"""


def test_a_named_source_keeps_its_line_numbers() -> None:
    out = render(NUMBERED, None, "sm_90a", is_source=True, name="folder/mine.cu")
    lines = lines_of(out)
    assert next(iter(lines)) == "mine.cu"
    for number, line in enumerate(NUMBERED.splitlines(), 1):
        if line.startswith("line"):
            assert lines["mine.cu"][number].startswith(f"line {number}")
    template = (template_root() / "primitives" / "types.cuh.j2").read_text().splitlines()
    shared = [number for number, line in enumerate(template, 1) if "shared_address(" in line]
    assert all(lines["types.cuh.j2"][number] == template[number - 1] for number in shared)
    assert "printed 5 anywhere" in out
    unnamed = render(NUMBERED, None, "sm_90a", is_source=True)
    assert "#line" not in unnamed


def test_a_statement_with_nothing_in_it() -> None:
    with pytest.raises(TemplateError, match=r"^mine\.cu:2: tag name expected"):
        render("a\n//%\nb\n", None, "sm_90a", is_source=True, name="mine.cu")


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ('//% include "primitives/mbarrier.cuh.j2"', True),
        ("  //%- if x\n", True),
        ("int x = ${ config.x };", True),
        ("int x; //% of peak", False),
        ("int x; // ${HOME}/x", False),
        ("//% of peak\n//% includes nothing\n", False),
        ("int x = a /*per*/ % b;", False),
    ],
)
def test_what_looks_like_a_template(source: str, wanted: bool) -> None:
    assert is_like_template(source) is wanted


def test_the_opening_comment_names_template_config_and_target() -> None:
    @dataclass(frozen=True)
    class Whole:
        ring: PipelineSpec
        dtype: object
        box: tuple[int, ...]
        odd: str = "x"
        plain: int = 3
        derived: int = field(init=False, default=7)

        @property
        def notes(self) -> tuple[str, ...]:
            return (*self.ring.notes(), "ends in a backslash \\")

    ring = PipelineSpec(2, (Operand("tile", 256, 256),))
    out = render("int x;", Whole(ring, ACTIVATION_TYPES["float16"], (8, 16), "a\\\nb"), "sm_120a", is_source=True)
    comment, body = out.split("\n\n", 1)
    assert body == "int x;\n"
    lines = comment.splitlines()
    assert all(line.startswith("//") and not line.endswith("\\") for line in lines)
    assert lines[:2] == ["// cudatma: <source> for sm_120a", "// config: Whole"]
    assert "//   dtype = float16" in lines
    assert "//   box = (8, 16)" in lines
    assert r"//   odd = 'a\\\nb'" in lines
    assert not any("derived" in line or "plain" in line for line in lines), "fields with their defaults"
    assert "//   +0 tile: 256 bytes, 256 loaded by TMA" in lines


def test_a_config_value_without_a_stable_text_is_refused() -> None:
    @dataclass(frozen=True)
    class Loose:
        thing: object

    with pytest.raises(TemplateError, match=r"config\.thing must be .*got object"):
        text("x", Loose(object()))


@given(st.text(alphabet="{}%#$ \nabc/*", max_size=80))
def test_any_text_renders_to_itself_or_raises_a_template_error(source: str) -> None:
    try:
        first = render(source, None, "sm_90a", is_source=True)
    except TemplateError:
        return
    assert first == render(source, None, "sm_90a", is_source=True)


@cache
def references(name: str) -> list[str]:
    """Return the templates to which a template refers, as Jinja parses it."""
    tree = module._environment(template_root()).parse((template_root() / name).read_text())
    called = {node.name for node in tree.find_all(jinja2.nodes.ExtensionAttribute)}
    return [*map(str, jinja2.meta.find_referenced_templates(tree)), *[LIBRARY] * bool(called & {"use", "is_used"})]


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_files_of_a_template_are_those_that_jinja_finds(name: str) -> None:
    found, waiting = set(), [name]
    while waiting:
        current = waiting.pop()
        if current not in found:
            found.add(current)
            waiting.extend(references(current))
    files = template_files(name)
    assert files[0] == template_root() / name
    assert {path.relative_to(template_root()).as_posix() for path in files} == found
    assert len(set(files)) == len(files)


_FUNCTION = re.compile(r"^ *(?:template.*\s+)?__device__ __forceinline__ [^;{}]*?(\w+)\(", re.MULTILINE)
_CONSTANT = re.compile(r"^(?:static )?constexpr \w+ (\w+) =|^constexpr .*?, (\w+) =", re.MULTILINE)


def rendered(source: str, target: str = "sm_90a", debug: bool = False) -> str:
    return render(source, None, target, is_source=True, debug=debug)


def functions(source: str) -> list[str]:
    return _FUNCTION.findall(source)


def test_a_used_primitive_comes_with_those_that_it_calls() -> None:
    source = rendered('//% use "mbarrier_wait_parity", "mbarrier_wait_parity"\nint own;\n')
    assert functions(source) == ["mbarrier_try_wait_parity", "mbarrier_wait_parity"]
    assert source.index("mbarrier_wait_parity(") < source.index("int own;")


def test_a_text_that_names_shared_address_has_it() -> None:
    assert functions(rendered('//% use "mbarrier_init"\nint own = shared_address(0);\n')) == [
        "shared_address",
        "mbarrier_init",
    ]


@pytest.mark.parametrize("name", ["5", "none", '["mbarrier_init"]'])
def test_names_are_strings(name: str) -> None:
    with pytest.raises(TemplateError, match=r":1: `use` must be followed by names in quotes, got .*"):
        rendered(f"//% use {name}\n")


def test_a_template_that_uses_nothing_has_no_library() -> None:
    assert rendered("int own;\n").endswith("\n\nint own;\n")


def test_a_family_shows_its_comment_once() -> None:
    comment = "[PTX ISA, cp.async.bulk.tensor] Load the box"
    names = [f"cp_async_bulk_tensor_{rank}d_load" for rank in (2, 3)]
    assert functions(source := rendered(f'//% use "{names[0]}", "{names[1]}"\n')) == names
    assert source.count(comment) == 1
    assert comment not in rendered('//% use "mbarrier_init"\n')


def test_a_ring_has_the_methods_that_are_used() -> None:
    used = functions(rendered('//% use "TmaPipeline", "TmaPipeline::release"\n'))
    assert {"release", "wait", "advance", "fence_acq_rel_cta"} <= set(used)
    assert not {"acquire", "try_wait", "mbarrier_init"} & set(used)


def test_an_included_file_is_used_as_a_whole() -> None:
    every = rendered('//% include "primitives/sync.cuh.j2"\n//% use "bar_sync"\n')
    assert len(functions(every)) == len(set(functions(every))) == 9
    assert every == rendered('//% use "bar_sync"\n//% include "primitives/sync.cuh.j2"\n')


@pytest.mark.parametrize(
    ("name", "target", "hint"),
    [
        ("mbarier_init", "sm_90a", "did you mean mbarrier_init"),
        ("cp_async_bulk_tensor_6d_load", "sm_90a", "did you mean cp_async_bulk_tensor_"),
        ("wgmma_fence", "sm_120a", "a primitive that sm_120a supports; compile for sm_90a"),
        ("zz", "sm_90a", "see the files that primitives/library.j2 includes"),
    ],
)
def test_an_unknown_primitive_is_refused_at_its_place(name: str, target: str, hint: str) -> None:
    with pytest.raises(TemplateError, match=f"^<source>:2: {name!r} (is|must be).*{hint}"):
        rendered(f'int own;\n//% use "{name}"\n', target)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", REGISTRY)
def test_a_kernel_needs_all_that_its_source_declares(name: str) -> None:
    """A dump contains no primitive, function or constant that its kernel does not use."""
    entry = REGISTRY[name]
    target = next(one for one in map(get_target, ("sm_90a", "sm_100a")) if entry.configs(one))
    for config in entry.configs(target)[::3]:
        source = re.sub(r'//.*|"(?:[^"\\\n]|\\.)*"', "", render(entry.template, config, target))
        declared = {*functions(source), *(one for pair in _CONSTANT.findall(source) for one in pair if one)}
        assert declared or name == "plain_copy"
        assert [one for one in sorted(declared) if len(re.findall(rf"\b{one}\b", source)) < 2] == [], config


def test_every_file_of_the_folder_is_in_the_library() -> None:
    library = (template_root() / "primitives" / "library.j2").read_text()
    files = {path.name for path in Path(template_root() / "primitives").glob("*.cuh.j2")}
    assert set(re.findall(r'include "primitives/([\w.]+)"', library)) == files
