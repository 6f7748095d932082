"""Whom the Marlin GEMM is measured against. Each is optional: who is absent or fails says why, and the run goes on."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from benchmarks.harness import Contender
from benchmarks.layer import Layer
from benchmarks.report import failure

#: Name -> (module, class). cuBLAS first: it is what everything is compared with.
RIVALS = {
    "cublas": ("benchmarks.rivals.cublas", "Cublas"),
    "humming": ("benchmarks.rivals.humming", "Humming"),
    "marlin": ("benchmarks.rivals.vllm", "Marlin"),
    "machete": ("benchmarks.rivals.vllm", "Machete"),
    "quack": ("benchmarks.rivals.quack", "Quack"),
    "tinygemm": ("benchmarks.rivals.tinygemm", "Tinygemm"),
}
#: Those that take bf16 alone.
BF16_ONLY = ("quack", "tinygemm")
#: Rivals whose kernels come from the libraries of vLLM's wheel.
VLLM = ("marlin", "machete")


class Rival(Protocol):
    """One rival on one layer. name: of RIVALS. errors: what of it cannot run, by part."""

    name: str
    errors: dict[str, str]

    def contenders(self, stream: Any, m: int, count: int) -> list[Contender]:
        """At most ``count`` of its fastest variants for M = ``m``, checked against a reference; none where it does not
        take part at this M. Raises whatever keeps it from running."""
        ...


@dataclass(slots=True)
class Field:
    """The rivals of one layer. errors: by rival, why it is not among them."""

    rivals: list[Rival] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)

    def contenders(self, stream: Any, m: int, count: int) -> tuple[dict[str, list[Contender]], dict[str, str]]:
        """By rival, its contenders for M = ``m``; and by rival, why it has none."""
        found: dict[str, list[Contender]] = {}
        errors = dict(self.errors)
        for rival in self.rivals:
            try:
                if chosen := rival.contenders(stream, m, count):
                    found[rival.name] = chosen
            except Exception as error:
                errors[rival.name] = failure(error)
            errors |= rival.errors
        return found, errors


def make_field(names: Sequence[str], layer: Layer, m_values: Sequence[int], vllm: Path | None = None) -> Field:
    """The named rivals on a layer.

    m_values: what they will run, so that they can compile it all at once. vllm: the folder with the libraries of vLLM's
    wheel.
    """
    made = Field()
    for name in names:
        module, kind = RIVALS[name]
        try:
            folder = (vllm,) if name in VLLM else ()
            made.rivals.append(getattr(importlib.import_module(module), kind)(layer, m_values, *folder))
        except Exception as error:
            made.errors[name] = failure(error)
    return made
