"""cudatma.build.library: a source holds the primitives that its template uses, and no others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cudatma.build.render import render, template_root
from cudatma.errors import TemplateError
from cudatma.kernels.registry import REGISTRY
from cudatma.target import get_target

_FUNCTION = re.compile(r"^ *(?:template.*\s+)?__device__ __forceinline__ [^;{}]*?(\w+)\(", re.MULTILINE)
_CONSTANT = re.compile(r"^(?:static )?constexpr \w+ (\w+) =|^constexpr .*?, (\w+) =", re.MULTILINE)


def text(source: str, target: str = "sm_90a", debug: bool = False) -> str:
    return render(source, None, target, is_source=True, debug=debug)


def functions(source: str) -> list[str]:
    return _FUNCTION.findall(source)


def test_a_used_primitive_comes_with_those_that_it_calls() -> None:
    source = text('//% use "mbarrier_wait_parity", "mbarrier_wait_parity"\nint own;\n')
    assert functions(source) == ["mbarrier_try_wait_parity", "mbarrier_wait_parity"]
    assert source.index("mbarrier_wait_parity(") < source.index("int own;")


def test_a_text_that_names_shared_address_has_it() -> None:
    assert functions(text('//% use "mbarrier_init"\nint own = shared_address(0);\n')) == [
        "shared_address",
        "mbarrier_init",
    ]


@pytest.mark.parametrize("name", ["5", "none", '["mbarrier_init"]'])
def test_names_are_strings(name: str) -> None:
    with pytest.raises(TemplateError, match=r":1: use got .*; allowed: names in quotes"):
        text(f"//% use {name}\n")


def test_a_template_that_uses_nothing_has_no_library() -> None:
    assert text("int own;\n").endswith("\n\nint own;\n")


def test_a_family_shows_its_comment_once() -> None:
    comment = "[PTX ISA, cp.async.bulk.tensor] Load the box"
    names = [f"cp_async_bulk_tensor_{rank}d_load" for rank in (2, 3)]
    assert functions(source := text(f'//% use "{names[0]}", "{names[1]}"\n')) == names
    assert source.count(comment) == 1
    assert comment not in text('//% use "mbarrier_init"\n')


def test_a_ring_has_the_methods_that_are_used() -> None:
    used = functions(text('//% use "TmaPipeline", "TmaPipeline::release"\n'))
    assert {"release", "wait", "advance", "fence_acq_rel_cta"} <= set(used)
    assert not {"acquire", "try_wait", "mbarrier_init"} & set(used)


def test_an_included_file_is_used_as_a_whole() -> None:
    every = text('//% include "primitives/sync.cuh.j2"\n//% use "bar_sync"\n')
    assert len(functions(every)) == len(set(functions(every))) == 9
    assert every == text('//% use "bar_sync"\n//% include "primitives/sync.cuh.j2"\n')


@pytest.mark.parametrize(
    ("name", "target", "hint"),
    [
        ("mbarier_init", "sm_90a", "Did you mean mbarrier_init"),
        ("cp_async_bulk_tensor_6d_load", "sm_90a", "Did you mean cp_async_bulk_tensor_"),
        ("wgmma_fence", "sm_120a", "allowed: a primitive of the target"),
        ("zz", "sm_90a", "See the files that primitives/library.j2 includes"),
    ],
)
def test_an_unknown_primitive_is_refused_at_its_place(name: str, target: str, hint: str) -> None:
    with pytest.raises(TemplateError, match=f"^<source>:2: use got {name!r}.*{hint}"):
        text(f'int own;\n//% use "{name}"\n', target)


@pytest.mark.sweep(12)
@pytest.mark.parametrize("name", REGISTRY)
def test_a_kernel_needs_all_that_its_source_declares(name: str) -> None:
    """A primitive that no template calls, a function or a constant of a part that this kernel does not need."""
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
