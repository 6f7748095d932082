"""Check a layer's tensors against the configuration, and determine how to decode them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from cudatma.errors import FieldError, QuantizationError, WeightFileError
from cudatma.quantization.checkpoint import Checkpoint, open_checkpoint
from cudatma.quantization.formats import (
    FP8_BLOCK_COMPRESSED,
    FP8_CHANNEL,
    Extent,
    Format,
    check_layer,
    check_zero_points,
    recognized,
)
from cudatma.quantization.importing import (
    act_order,
    check_file_group_size,
    codes_along_columns,
    compressed_zero_points,
    file_group_size,
    weight_extents,
)
from cudatma.quantization.layout_v1 import group_count
from cudatma.quantization.safetensors_file import TensorEntry
from cudatma.quantization.statement import LayerStatement, Statement, read_section, read_statement
from cudatma.quantization.weight_format import weight_format

_AGREE = "correct the configuration, or use tensors that match the configuration"


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """Facts that determine how to decode a layer's tensors.

    Attributes
    ----------
    extent : Extent
        K, N and the number of groups.
    group_size : int or None
        Number of rows per group, or None or -1 for a single group.
    zero_point_format : str
        Encoding of the zero points; see ``from_gptq``.
    note : str
        Note for the report, or "".
    act_order : bool
        Whether the rows are in activation order.
    """

    extent: Extent
    group_size: int | None
    zero_point_format: str = "v2"
    note: str = ""
    act_order: bool = False


def layer_facts(checkpoint: Checkpoint, layer: str, parts: Mapping[str, str], statement: Statement) -> LayerFacts:
    """Check a layer's tensors against the configuration, and return the facts needed to decode them.

    Only small tensors are read.

    Parameters
    ----------
    checkpoint : Checkpoint
        The checkpoint that holds the layer.
    layer : str
        The layer's name.
    parts : mapping of str to str
        Maps the name of each tensor, without the layer's prefix, to the tensor's name in the checkpoint.
    statement : Statement
        The model's quantization configuration.

    Returns
    -------
    LayerFacts
        The facts.

    Raises
    ------
    QuantizationError
        If the tensors contradict the configuration. The error states both values.
    WeightFileError
        If a tensor is missing.
    """
    entries = {part: checkpoint.files[name].tensors[name] for part, name in parts.items()}
    try:
        return _compare(entries, lambda part: checkpoint.read(parts[part]), layer, statement)
    except FieldError as error:
        field = error.field if error.field.startswith(statement.where) else f"{layer}.{error.field}".rstrip(".")
        raise error.renamed({error.field: field}) from error


def read_layer(
    path: str | os.PathLike[str] | Checkpoint,
    layer: str,
    kind: Format,
    group_size: int | None,
    zero_point_format: str | None = None,
) -> tuple[list[Any], int | None, str | None]:
    """Return a layer's tensors (in the order of the importer's arguments), group_size and zero_point_format.

    If group_size or zero_point_format is None, the value comes from the folder's configuration, if one exists. The
    configuration is not read if zero_point_format is passed.

    Raises
    ------
    WeightFileError
        If a file cannot be read, lacks a tensor or has a different format.
    QuantizationError
        If the tensors contradict the configuration.
    """
    checkpoint = open_checkpoint(path)
    check_layer(checkpoint, layer, kind)
    if zero_point_format is None and (facts := _folder_facts(checkpoint, layer, kind)):
        zero_point_format = facts.zero_point_format
        group_size = facts.group_size if group_size is None else group_size
    tensors: list[Any] = [checkpoint.read(f"{layer}.{part}") for part in kind.required]
    tensors += [checkpoint.read_if_present(f"{layer}.{part}") for part in kind.optional]
    return tensors, group_size, zero_point_format


def _folder_facts(checkpoint: Checkpoint, layer: str, expected: Format) -> LayerFacts | None:
    """Return layer_facts() for the folder's configuration, or None if there is no configuration.

    Raises WeightFileError if the configuration specifies a format other than ``expected``.
    """
    section, where = read_section(checkpoint.path.parent)
    if not section:
        return None
    statement = read_statement({"quant_method": expected.name.replace("_", "-"), **section}, where)
    if statement.format is not expected:
        remedy = statement.format.import_remedy("read the layer with load_")
        raise WeightFileError(f"{where}: quant_method", str(section.get("quant_method")), expected.title, remedy)
    names = {part: f"{layer}.{part}" for part in (*expected.required, *expected.optional)}
    parts = {part: name for part, name in names.items() if name in checkpoint.files}
    if missing := [part for part in expected.required if part not in parts]:
        checkpoint.read(names[missing[0]])  # Raises an error that lists similar names.
    return layer_facts(checkpoint, layer, parts, statement)


def _compare(
    entries: Mapping[str, TensorEntry], read: Callable[[str], NDArray[Any]], layer: str, whole: Statement
) -> LayerFacts:
    kind = whole.format
    statement = whole.of(layer)
    if statement is None:
        remedy = "add the layer's name or class to the targets of a group"
        raise QuantizationError(
            f"{whole.where}: config_groups", f"no target for {layer}", "groups with a target for each layer", remedy
        )
    if not statement.quantized:
        remedy = f"{statement.where} lists {layer} as not quantized; {_AGREE}"
        raise QuantizationError(kind.required[0], "a quantized weight", "a float weight", remedy)
    if statement.bits not in (None, kind.bits):
        remedy = f"quantize {layer} again with {kind.bits} bits, or leave the layer unquantized"
        raise QuantizationError(f"{statement.where}: bits", statement.bits, str(kind.bits), remedy)
    detected = recognized({part: entry.shape for part, entry in entries.items()})
    is_same = detected is None or detected.name == kind.name or {detected, kind} == {FP8_BLOCK_COMPRESSED, FP8_CHANNEL}
    if detected is not None and not is_same:
        got = f"a tensor that looks like {detected.title}"
        raise QuantizationError(
            kind.required[0], got, f"a tensor of {kind.title} (the format in {whole.where})", _AGREE
        )
    dtypes_of = {kind.zeros: (*kind.dtypes, "I8"), **dict.fromkeys(kind.integers, kind.dtypes)}
    dtypes_of[kind.scales] = kind.scale_dtypes
    for part, dtypes in dtypes_of.items():
        if part in entries and entries[part].dtype not in dtypes:
            raise QuantizationError(f"{part}.dtype", entries[part].dtype, ", ".join(dtypes))
    extent = _extent(kind, entries, read, statement)
    if kind.group_size:
        return LayerFacts(extent, kind.group_size)
    size = _group_size(kind, extent, statement)
    ordered = _check_order(kind, entries, read, extent, size, statement)
    zero_point_format, note = _zero_points(kind, entries, read, extent, whole, statement)
    return LayerFacts(extent, size, zero_point_format, note, ordered)


def _extent(
    kind: Format, entries: Mapping[str, TensorEntry], read: Callable[[str], NDArray[Any]], statement: LayerStatement
) -> Extent:
    shapes = {part: entry.shape for part, entry in entries.items()}
    k = n = None
    if "weight_shape" in shapes:
        n, k = weight_extents(read("weight_shape"))
    elif shapes.get("g_idx", (0,)) != (0,):
        k = shapes["g_idx"][0]
    try:
        return kind.extent(shapes, k, n)
    except QuantizationError as error:
        said = "" if statement.bits is None else f"{statement.where} specifies {statement.bits} bits"
        remedy = "; ".join(filter(None, (error.remedy, said)))
        raise type(error)(error.field, error.got, error.allowed, remedy) from error


def _group_size(kind: Format, extent: Extent, statement: LayerStatement) -> int | None:
    size = statement.group_size
    if size is None:
        file_group_size(extent.k, extent.groups, None)
        return None
    reason = f"{statement.where} specifies group_size {size}"
    if extent.groups > 1 or size == 0 or size < -1:
        check_file_group_size(size, f"{statement.where}: group_size")
    if (expected := group_count(extent.k, size)) != extent.groups:
        got = f"{extent.groups} groups for K = {extent.k}"
        raise QuantizationError(kind.scales, got, f"divided into {expected} groups", f"{reason}; {_AGREE}")
    return size if extent.groups > 1 else None


def _check_order(
    kind: Format,
    entries: Mapping[str, TensorEntry],
    read: Callable[[str], NDArray[Any]],
    extent: Extent,
    size: int | None,
    statement: LayerStatement,
) -> bool:
    """Return whether the rows are in activation order.

    Raises QuantizationError or WeightFileError if g_idx contradicts the configuration.
    """
    if not kind.g_idx:
        if statement.act_order and extent.groups > 1:
            got, remedy = (
                f"a tensor of {kind.title}",
                f"{statement.where} specifies desc_act, which {kind.title} does not support; {_AGREE}",
            )
            raise QuantizationError(kind.required[0], got, "a tensor of GPTQ", remedy)
        return False
    if kind.g_idx not in entries or entries[kind.g_idx].shape == (0,):
        if statement.act_order and extent.groups > 1:
            remedy = f"{statement.where} specifies activation order; copy or download the checkpoint again"
            raise WeightFileError(kind.g_idx, "no such tensor", "a tensor of the layer", remedy)
        return False
    groups = file_group_size(extent.k, extent.groups, size)
    perm = act_order(read(kind.g_idx), extent.k, extent.groups, groups)
    if perm is not None and statement.act_order is False:
        remedy = f"{statement.where} specifies no activation order; {_AGREE}"
        raise QuantizationError(kind.g_idx, "group indices in activation order", "in ascending order", remedy)
    return perm is not None


def _zero_points(
    kind: Format,
    entries: Mapping[str, TensorEntry],
    read: Callable[[str], NDArray[Any]],
    extent: Extent,
    whole: Statement,
    statement: LayerStatement,
) -> tuple[str, str]:
    """Check the zero points against the configured symmetry, and return their format and a note."""
    form, symmetric = whole.zero_point_format, statement.symmetric
    reason = f"{statement.where} specifies {'' if symmetric else 'a'}symmetric quantization"
    if kind.bits == 8:
        symmetric, reason = True, "8-bit weights have no zero points"
    elif whole.borrows and symmetric is False:
        return "v1_borrow", ""
    part = kind.zeros
    if part not in entries:
        if symmetric is False:
            raise QuantizationError(kind.zeros, "no such tensor", "a tensor of the layer", f"{reason}; {_AGREE}")
        return form, ""
    if part == "weight_zero_point":
        is_unpacked = entries[part].dtype == "I8"
        check_zero_points(entries[part].shape, is_unpacked, extent.n, extent.groups)
        if not symmetric and not is_unpacked:
            return form, ""
        zeros = compressed_zero_points(read(part), extent.n, extent.groups)
    else:
        if symmetric is False or (symmetric is None and form != "v1"):
            return form, ""
        zeros = codes_along_columns(read(part), part, kind.bits)[:, : extent.n]
    middle = weight_format(kind.weight_format).zero_code
    midpoint = middle - 1 if form == "v1" else middle
    if bool((zeros == midpoint).all()):
        return form, ""
    if form == "v1" and bool((zeros == middle).all()):
        note = f"zero points that are all stored as {middle} in the format gptq are read as {middle}, not {middle + 1}"
        return "v2", f"{whole.where}: {note}"
    if symmetric:
        low, high = int(zeros.min()), int(zeros.max())
        got = f"{low} everywhere" if low == high else f"stored values from {low} to {high}"
        raise QuantizationError(part, got, f"{midpoint} everywhere", f"{reason}; {_AGREE}")
    return form, ""
