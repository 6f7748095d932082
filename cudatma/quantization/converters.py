"""Files of other layout versions, brought to the current one step by step.

A later layout raises layout_v1.LAYOUT_VERSION and registers here, for each version before it, a function that turns the
arrays of that version into those of a later one. Version 1 is the first, so that nothing is registered yet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from cudatma.errors import WeightFileError
from cudatma.quantization.layout_v1 import LAYOUT_VERSION


@dataclass(frozen=True, slots=True, eq=False)
class StoredWeight:
    """A weight as a file of some version holds it. arrays: by name, ``"qweight"``, ``"scales"`` ..."""

    name: str
    layout_version: int
    shape: tuple[int, int]
    group_size: int
    dtype: str
    arrays: dict[str, NDArray[Any]]


Converter = Callable[[StoredWeight], StoredWeight]

#: From which layout version -> the function that leads to a later one.
CONVERTERS: dict[int, Converter] = {}


def supported_versions() -> tuple[int, ...]:
    """The layout versions that can be loaded."""
    return tuple(sorted({LAYOUT_VERSION, *CONVERTERS}))


def check_version(version: int, field: str) -> None:
    """WeightFileError unless files of this layout version can be loaded."""
    if version not in supported_versions():
        allowed = f"layout version {', '.join(map(str, supported_versions()))}"
        raise WeightFileError(field, version, allowed, "install a newer cudatma, or pack the weight again")


def upgrade(stored: StoredWeight) -> StoredWeight:
    """``stored`` in the current layout version. WeightFileError where no converter leads there."""
    while stored.layout_version != LAYOUT_VERSION:
        check_version(stored.layout_version, f"{stored.name}.layout_version")
        converted = CONVERTERS[stored.layout_version](stored)
        if not stored.layout_version < converted.layout_version <= LAYOUT_VERSION:
            got = f"a converter from {stored.layout_version} to {converted.layout_version}"
            raise WeightFileError(f"{stored.name}.layout_version", got, f"a later version, {LAYOUT_VERSION} at most")
        stored = converted
    return stored
