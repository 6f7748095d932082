"""Write packed weights to safetensors files, and read them.

A weight named ``layer`` is stored as the tensors ``layer.qweight`` and ``layer.scales`` and, if the weight has them,
``layer.zeros`` and ``layer.perm``. The file's metadata consists of strings with the keys format, layout_version and
weights. The value of weights is JSON that maps each name to its shape, group_size, dtype and arrays and, for formats
other than int4, to its format and tensor_scale. Expert weights have the shape (experts, K, N) and the additional entry
gated. nvfp4 expert weights have the tensor ``layer.tensor_scales``.

To add a layout version, increment layout_v1.LAYOUT_VERSION and register in CONVERTERS, for each earlier version, a
function that converts the arrays to a later version. CONVERTERS is empty because version 1 is the first version.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from cudatma.errors import WeightFileError, alternatives, counted, reason_of
from cudatma.quantization.layout_v1 import LAYOUT_VERSION
from cudatma.quantization.safetensors_file import SafetensorsFile, as_path, open_safetensors, replaced


@dataclass(frozen=True, slots=True, eq=False)
class StoredWeight:
    """Content of a weight in a file. The arrays are keyed by names such as ``"qweight"`` and ``"scales"``.

    ``shape`` is (K, N), or (experts, K, N) for expert weights. ``gated`` applies only to expert weights.
    """

    name: str
    layout_version: int
    shape: tuple[int, ...]
    group_size: int
    dtype: str
    arrays: dict[str, NDArray[Any]]
    format: str = "int4"
    tensor_scale: float = 1.0
    gated: bool = False

    @property
    def are_experts(self) -> bool:
        """Whether these are expert weights."""
        return len(self.shape) == 3


Converter = Callable[[StoredWeight], StoredWeight]

#: Maps each earlier layout version to a function that converts weights to a later version.
CONVERTERS: dict[int, Converter] = {}


def supported_versions() -> tuple[int, ...]:
    """Return the layout versions that can be loaded."""
    return tuple(sorted({LAYOUT_VERSION, *CONVERTERS}))


def check_version(version: int, field: str) -> None:
    """Raise WeightFileError unless files of this layout version can be loaded."""
    if version not in supported_versions():
        allowed = alternatives(supported_versions())
        raise WeightFileError(field, version, allowed, "install a newer cudatma, or pack the weight again")


def upgrade(stored: StoredWeight) -> StoredWeight:
    """Convert a weight to the current layout version, or raise WeightFileError."""
    while stored.layout_version != LAYOUT_VERSION:
        check_version(stored.layout_version, f"{stored.name}.layout_version")
        converted = CONVERTERS[stored.layout_version](stored)
        if not stored.layout_version < converted.layout_version <= LAYOUT_VERSION:
            got = f"a conversion from {stored.layout_version} to {converted.layout_version}"
            raise WeightFileError(f"{stored.name}.layout_version", got, f"a later version, at most {LAYOUT_VERSION}")
        stored = converted
    return stored


FORMAT = "cudatma-packed-weight"
_MAX_VERSION_DIGITS = 9


def write_weights(path: str | os.PathLike[str], weights: Mapping[str, StoredWeight]) -> None:
    """Write weights to one file. Their arrays must be in host memory.

    A temporary file is renamed into place, so that readers see either the complete old file or the complete new file.
    Raises WeightFileError if the file cannot be written, and ArgumentTypeError if ``path`` is not a path.
    """
    path = as_path(path)
    tensors: dict[str, NDArray[Any]] = {}
    facts: dict[str, dict[str, Any]] = {}
    for name, weight in weights.items():
        tensors.update({f"{name}.{array}": value for array, value in weight.arrays.items()})
        facts[name] = {
            "shape": list(weight.shape),
            "group_size": weight.group_size,
            "dtype": weight.dtype,
            "arrays": list(weight.arrays),
        }
        if weight.are_experts:
            facts[name]["gated"] = weight.gated
        if weight.format != "int4":
            facts[name] |= {"format": weight.format, "tensor_scale": weight.tensor_scale}
    metadata = {"format": FORMAT, "layout_version": str(LAYOUT_VERSION), "weights": json.dumps(facts)}
    _write(path, tensors, metadata)


def read_weights(path: str | os.PathLike[str]) -> dict[str, StoredWeight]:
    """Return all weights in a file by name, in the current layout version.

    Raises WeightFileError if the file is truncated or corrupt, has a different format or an unknown version, or lacks a
    tensor.
    """
    file = open_safetensors(path)
    return {name: _weight(file, name, facts) for name, facts in _facts(file).items()}


def read_weight(path: str | os.PathLike[str]) -> StoredWeight:
    """Return the only weight in a file.

    Raises the errors of read_weights(), and WeightFileError unless the file contains exactly one weight.
    """
    weights = read_weights(path)
    if len(weights) != 1:
        shown = ", ".join(list(weights)[:4]) or "none"
        raise WeightFileError(
            str(path), f"{counted(len(weights), 'weight')} ({shown})", "a file with one weight", "call load_weights()"
        )
    return next(iter(weights.values()))


def _write(path: Path, tensors: dict[str, NDArray[Any]], metadata: dict[str, str]) -> None:
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    with replaced(path) as aside:
        aside.touch(exist_ok=False)
        mode = stat.S_IMODE(aside.stat().st_mode)  # touch() respects the umask, but save_file() creates private files.
        try:
            save_file(tensors, aside, metadata=metadata)
        except SafetensorError as error:
            raise OSError(str(error)) from error
        aside.chmod(mode)
        with aside.open("rb") as file:
            os.fsync(file.fileno())


def _facts(file: SafetensorsFile) -> dict[str, Any]:
    """Check the format and the version, and return the metadata of each weight."""
    kind = file.metadata.get("format")
    if kind != FORMAT:
        remedy = "import checkpoints from other tools with load_gptq, load_awq, load_compressed_tensors or load_marlin"
        raise WeightFileError(f"{file.path}: format", repr(kind), FORMAT, remedy)
    version = file.metadata.get("layout_version", "")
    if not version.isdecimal() or len(version) > _MAX_VERSION_DIGITS:
        raise WeightFileError(
            f"{file.path}: layout_version", repr(version)[:80], "a decimal number", "pack the weight again"
        )
    check_version(int(version), f"{file.path}: layout_version")
    try:
        facts = json.loads(file.metadata.get("weights", ""))
    except (ValueError, RecursionError) as error:
        got = f"a text that cannot be parsed ({reason_of(error)})"
        raise WeightFileError(f"{file.path}: weights", got, "a JSON object", "pack the weight again") from error
    if not isinstance(facts, dict):
        raise WeightFileError(f"{file.path}: weights", type(facts).__name__, "a JSON object", "pack the weight again")
    return facts


def _weight(file: SafetensorsFile, name: str, facts: Any) -> StoredWeight:
    field = f"{file.path}: {name}"
    try:
        shape = tuple(facts["shape"])
        group_size, dtype, names = facts["group_size"], facts["dtype"], [str(array) for array in facts["arrays"]]
        gated = facts["gated"] if len(shape) == 3 else False
    except (KeyError, TypeError) as error:
        raise WeightFileError(
            field, repr(facts)[:80], "an object with shape, group_size, dtype and arrays", "pack the weight again"
        ) from error
    arrays = {array: file.read(f"{name}.{array}") for array in names}
    version = int(file.metadata["layout_version"])
    kind, tensor_scale = facts.get("format", "int4"), facts.get("tensor_scale", 1.0)
    stored = upgrade(StoredWeight(name, version, shape, group_size, dtype, arrays, kind, tensor_scale, gated))
    parts = stored.arrays
    missing = [array for array in ("qweight", "scales") if array not in parts]
    if missing:
        raise WeightFileError(
            field, f"no {' and no '.join(missing)}", "a weight with qweight and scales", "pack the weight again"
        )
    return stored
