"""Every form in the tables is emulated or refused by name, as the document says."""

from __future__ import annotations

import pytest
from instruction_table import current, missing, section

from cudatma.emulator.instructions import coverage
from cudatma.emulator.ptx import forms
from cudatma.emulator.ptx.forms import REFUSED

#: Forms that are refused, by the part of the opcode that makes them so.
LEFT_OUT = ("cp_mask", "im2col::w", "cta_group::1")


@pytest.mark.parametrize("chapter", sorted(forms.FORMS))
def test_every_form_is_emulated(chapter: str) -> None:
    refused = {form: why for form in forms.forms(chapter) if (why := missing(form))}
    unexpected = {form: why for form, why in refused.items() if not any(part in form for part in LEFT_OUT)}
    assert not unexpected


def test_the_document_is_up_to_date() -> None:
    assert current() == section(), "run `python tests/emulator/instruction_table.py`"


@pytest.mark.parametrize("opcode", ["add.fast.f32 r1, r2, r3", "ld.shared.nearby.b32 r1, [r2]", "bar.sync.now 0"])
def test_a_modifier_that_does_not_exist_is_named(opcode: str) -> None:
    (found,) = coverage(forms.module_of(opcode)).missing
    assert "unknown modifier" in str(found[1])
    assert "PTX line 6" in str(found[1])


@pytest.mark.parametrize("root", sorted(REFUSED))
def test_what_is_not_emulated_says_why(root: str) -> None:
    (found,) = coverage(forms.module_of(f"{root}.something.b32 r1, r2")).missing
    assert f"`{root}` is not emulated" in str(found[1])


def test_expansion() -> None:
    assert list(forms.expand("a{,.x}.{f,g} {r1..3}, {r7}")) == [
        "a.f {r1, r2, r3}, {r7}",
        "a.g {r1, r2, r3}, {r7}",
        "a.x.f {r1, r2, r3}, {r7}",
        "a.x.g {r1, r2, r3}, {r7}",
    ]
