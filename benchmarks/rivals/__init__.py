"""Libraries that compete with the Marlin GEMM.

If a library is absent, the cell shows the reason and the run continues.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from benchmarks.harness import Contender
from benchmarks.layer import Layer
from benchmarks.report import failure

#: Module and class of each library, by name. cuBLAS is first, because all libraries are compared with cuBLAS.
RIVALS = {
    "cublas": ("benchmarks.rivals.cublas", "Cublas"),
    "humming": ("benchmarks.rivals.humming", "Humming"),
    "marlin": ("benchmarks.rivals.vllm", "Marlin"),
    "machete": ("benchmarks.rivals.vllm", "Machete"),
    "quack": ("benchmarks.rivals.quack", "Quack"),
    "tinygemm": ("benchmarks.rivals.tinygemm", "Tinygemm"),
}
#: Libraries that support only bf16.
BF16_ONLY = ("quack", "tinygemm")
#: Competing libraries whose kernels come from the libraries in vLLM's wheel.
VLLM = ("marlin", "machete")


class Rival(Protocol):
    """A library on one layer.

    Attributes
    ----------
    name : str
        A key of RIVALS.
    errors : dict of str to str
        Maps each part that cannot run to the reason.
    """

    name: str
    errors: dict[str, str]

    def contenders(self, stream: Any, m: int, count: int) -> list[Contender]:
        """Return at most ``count`` of the library's fastest variants for M = ``m``, checked against a reference.

        The list is empty if the library is not measured at this M. Raises an error with the reason if it cannot run.
        """
        ...


@dataclass(slots=True)
class Field:
    """The libraries on one layer, and the reasons why other libraries are absent."""

    rivals: list[Rival] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)

    def contenders(self, stream: Any, m: int, count: int) -> tuple[dict[str, list[Contender]], dict[str, str]]:
        """Return each library's contenders for M = ``m``, and the reason for each library without contenders."""
        contenders: dict[str, list[Contender]] = {}
        errors = dict(self.errors)
        for rival in self.rivals:
            try:
                if variants := rival.contenders(stream, m, count):
                    contenders[rival.name] = variants
            except Exception as error:
                errors[rival.name] = failure(error)
            errors |= rival.errors
        return contenders, errors


def make_field(names: Sequence[str], layer: Layer, m_values: Sequence[int], vllm: Path | None = None) -> Field:
    """Return the libraries with these names on a layer.

    ``m_values`` contains the values of M of all calls, so that a library can compile all of its kernels together.
    ``vllm`` is the folder with the libraries of vLLM's wheel.
    """
    rivals = Field()
    for name in names:
        module, kind = RIVALS[name]
        try:
            folder = (vllm,) if name in VLLM else ()
            rivals.rivals.append(getattr(importlib.import_module(module), kind)(layer, m_values, *folder))
        except Exception as error:
            rivals.errors[name] = failure(error)
    return rivals
