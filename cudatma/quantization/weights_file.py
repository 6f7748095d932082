"""Save and load several named weights in one file."""

from __future__ import annotations

import os
from collections.abc import Mapping

from cudatma.errors import ArgumentError, ArgumentTypeError
from cudatma.quantization.experts import PackedExperts
from cudatma.quantization.packed import PackedWeight
from cudatma.quantization.safetensors_file import as_path
from cudatma.quantization.storage import StoredWeight, read_weights, write_weights


def save_weights(weights: Mapping[str, PackedWeight | PackedExperts], path: str | os.PathLike[str]) -> None:
    """Save packed weights to one safetensors file.

    A temporary file is renamed into place, so that readers see either the complete old file or the complete new file.

    Parameters
    ----------
    weights : mapping of str to PackedWeight or PackedExperts
        The weights, by name. Weights on a device are copied to the host.
    path : str or os.PathLike
        Path of the file.

    Raises
    ------
    WeightFileError
        If the file cannot be written.
    ArgumentError
        If a name cannot be encoded in UTF-8.
    ArgumentTypeError
        If ``path`` is not a path, or if ``weights`` has a different type.
    """
    path = as_path(path)
    if not isinstance(weights, Mapping):
        raise ArgumentTypeError("weights", type(weights).__name__, "a mapping of str to PackedWeight or PackedExperts")
    stored: dict[str, StoredWeight] = {}
    for name, weight in weights.items():
        if not isinstance(weight, PackedWeight | PackedExperts) or not isinstance(name, str):
            got = type(weight).__name__ if isinstance(name, str) else f"a key of type {type(name).__name__}"
            raise ArgumentTypeError(f"weights[{name!r}]", got, "a PackedWeight or PackedExperts with a str as its key")
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise ArgumentError(
                "weights", f"the name {name!r}", "a mapping with names that UTF-8 can encode"
            ) from error
        stored[name] = weight.stored(name)
    write_weights(path, stored)


def load_weights(path: str | os.PathLike[str]) -> dict[str, PackedWeight | PackedExperts]:
    """Load all packed weights from a file.

    Parameters
    ----------
    path : str or os.PathLike
        A file that ``save_weights`` or the ``save`` method of a weight wrote. Weights in earlier layout versions are
        converted.

    Returns
    -------
    dict of str to PackedWeight or PackedExperts
        The weights, by name, in host memory.

    Raises
    ------
    WeightFileError
        If the file is truncated or corrupt, has a different format or an unknown version, or lacks a tensor.
    """
    return {
        name: (PackedExperts if stored.are_experts else PackedWeight).from_stored(path, stored)
        for name, stored in read_weights(path).items()
    }
