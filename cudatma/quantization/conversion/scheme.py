"""How a checkpoint's layers become packed weights, by its quantization configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cudatma.quantization.agreement import LayerFacts
from cudatma.quantization.awq import from_awq
from cudatma.quantization.compressed_tensors import from_compressed_tensors
from cudatma.quantization.formats import Format
from cudatma.quantization.gptq import from_gptq
from cudatma.quantization.marlin_layout import from_marlin
from cudatma.quantization.packed import PackedWeight
from cudatma.quantization.statement import METHODS, Section, Statement, read_statement

__all__ = ["METHODS", "Scheme", "read_scheme"]

_IMPORTERS: dict[str, Callable[..., PackedWeight]] = {
    "gptq": from_gptq,
    "awq": from_awq,
    "compressed_tensors": from_compressed_tensors,
    "marlin": from_marlin,
}


@dataclass(frozen=True, slots=True)
class Scheme:
    """A configuration's statement, and the importer of its format."""

    statement: Statement

    @property
    def format(self) -> Format:
        """The format of the layers' tensors."""
        return self.statement.format

    def pack(self, tensors: Mapping[str, Any], facts: LayerFacts, *, dtype: Any = None) -> PackedWeight:
        """Pack a layer's tensors (NumPy or torch), given by their names without the layer's.

        facts: from layer_facts(). dtype: of the scales; None keeps theirs. Raises QuantizationError,
        ArgumentTypeError.
        """
        values = [tensors.get(name) for name in self.format.required]
        more = [tensors.get(name) for name in self.format.optional]
        options = {"zero_point_format": facts.zero_point_format} if self.format.name == "gptq" else {}
        importer = _IMPORTERS[self.format.name]
        return importer(*values, *more, group_size=facts.group_size, dtype=dtype, **options)


def read_scheme(section: Section, where: str) -> Scheme:
    """Return the Scheme of a quantization_config.

    where: the file and key that it came from, for errors. Raises WeightFileError and QuantizationError for what cannot
    be packed.
    """
    return Scheme(read_statement(section, where))
