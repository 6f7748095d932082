"""Several packed weights in one file, by name."""

from __future__ import annotations

import os
from collections.abc import Mapping

from cudatma.errors import ArgumentTypeError
from cudatma.quantization.packed import PackedWeight
from cudatma.quantization.safetensors_file import as_path
from cudatma.quantization.storage import StoredWeight, read_weights, write_weights


def save_weights(weights: Mapping[str, PackedWeight], path: str | os.PathLike[str]) -> None:
    """Write weights by name to one safetensors file; weights on a device are copied to the host.

    The file is written aside and renamed into place, so that a reader finds the old file, or the new one, whole.
    Raises WeightFileError where it cannot be written, ArgumentTypeError for what is no path or no PackedWeight.
    """
    path = as_path(path)
    if not isinstance(weights, Mapping):
        raise ArgumentTypeError("weights", type(weights).__name__, "a mapping from name to PackedWeight")
    stored: dict[str, StoredWeight] = {}
    for name, weight in weights.items():
        if not isinstance(weight, PackedWeight) or not isinstance(name, str):
            raise ArgumentTypeError(f"weights[{name!r}]", type(weight).__name__, "a PackedWeight by its name, a str")
        stored[name] = weight.stored(name)
    write_weights(path, stored)


def load_weights(path: str | os.PathLike[str]) -> dict[str, PackedWeight]:
    """Read all weights of a file that save_weights() wrote, by name, on the host.

    Files of an earlier layout version go through the converters. Raises WeightFileError for files that are truncated
    or corrupt, of another format or an unknown version, or that lack a tensor.
    """
    return {name: PackedWeight.from_stored(path, stored) for name, stored in read_weights(path).items()}
