"""Convert a checkpoint's folder, file by file, into a folder with packed linear layers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from cudatma.dtypes import ACTIVATION_TYPES, activation_type
from cudatma.errors import ArgumentError, ArgumentTypeError, FieldError, counted
from cudatma.quantization.conversion.folder import (
    Journal,
    Shard,
    check_disk,
    check_folders,
    copy_files,
    write_config,
    write_index,
)
from cudatma.quantization.conversion.importers import check_scales, pack_layer
from cudatma.quantization.conversion.model_class import Match, match_class
from cudatma.quantization.conversion.report import Conversion, LayerReport, scale_error, weight_error
from cudatma.quantization.conversion.shards import ARRAYS, ShardPlan, ShardWriter, Unit, plan_shards
from cudatma.quantization.conversion.source import Source, open_source
from cudatma.quantization.experts import PackedExperts, pack_experts
from cudatma.quantization.float_formats import scale_values
from cudatma.quantization.layout_v1 import LAYOUT_VERSION
from cudatma.quantization.packed import PackedWeight
from cudatma.quantization.rounding import quantize_linear
from cudatma.quantization.safetensors_file import as_path
from cudatma.quantization.weight_format import weight_format

SHARD_BYTES = 1_000_000_000

#: Function that receives the current step, the number of source bytes that have been processed, and the total number of
#: source bytes.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class _Options:
    """Options of a conversion. ``left`` lists the layers that stay float because of the model class."""

    quantize: bool
    format: str
    group_size: int
    symmetric: bool
    clip_search: bool
    dtype: str
    exclude: tuple[str, ...]
    vision_tower: bool
    left: tuple[str, ...]


def convert_checkpoint(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    quantize: bool = False,
    format: str = "int4",
    group_size: int | None = None,
    symmetric: bool = True,
    clip_search: bool = False,
    dtype: str | None = None,
    exclude: Sequence[str] = (),
    vision_tower: bool = False,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> Conversion:
    """Convert the folder of a Hugging Face checkpoint into another folder with packed linear layers.

    The source is a checkpoint that another tool quantized (docs/howto/convert_a_checkpoint.md lists the formats), or a
    float checkpoint if ``quantize`` is True. The codes of a quantized checkpoint are kept, and its tensors must match
    its configuration. All other tensors are copied unchanged.

    Parameters
    ----------
    source : str or os.PathLike
        The checkpoint's folder.
    out : str or os.PathLike
        The new folder. If it exists, it must be empty or contain the result of an interrupted conversion.
    quantize : bool, default False
        Whether to quantize the matrices in the numbered blocks of a float model.
    format : str, default "int4"
        Format of the weights that ``quantize`` creates; see ``cudatma.quantize``.
    group_size : int, optional
        Number of rows per scale for a float checkpoint; see ``cudatma.quantize``. Default: 128, or the only size that
        the format supports.
    symmetric : bool, default True
        Whether to quantize a float checkpoint without zero points; see ``cudatma.quantize``.
    clip_search : bool, default False
        Whether to try smaller ranges for each group of a float checkpoint; see ``cudatma.quantize``.
    dtype : str, optional
        Type of the scales and activations, "float16" or "bfloat16". Default: the model's type if it is one of these,
        otherwise the type of the first layer's scales if it is bfloat16, otherwise float16.
    exclude : sequence of str, optional
        Patterns (fnmatch) of layers that stay float. Requires ``quantize``.
    vision_tower : bool, default False
        Whether to also quantize the image, video and audio encoders. Requires ``quantize``.
    shard_bytes : int, default 1,000,000,000
        Maximum size of a file in bytes. A larger layer or tensor has its own file.
    progress : callable, optional
        Function that is called regularly with the current step, the number of source bytes that have been processed,
        and the total number of source bytes.

    Returns
    -------
    Conversion
        The converted layers, their rounding errors, and notes.

    Raises
    ------
    ArgumentError
        If the options do not match the checkpoint, or if one folder contains the other.
    WeightFileError
        If the checkpoint cannot be converted, if the model class cannot load it, or if there is too little disk space.
    QuantizationError
        If tensors are invalid or contradict the configuration.

    Notes
    -----
    If transformers is installed, the layers are compared with the model class that config.json names. WeightFileError
    is raised if this class cannot load a layer that the checkpoint quantized, or if the checkpoint lacks a parameter of
    the class or stores it in a different shape. A layer of a float checkpoint stays float if the class cannot load it
    quantized.

    The folders, the configuration, the model class, the scales and the free disk space are checked before anything is
    written. An interrupted call can be repeated. The repeated call checks the finished files and keeps them. At most
    one layer is in memory at a time.
    """
    folder, target = as_path(source), as_path(out)
    check_folders(folder, target)
    kind = weight_format(format)
    group_size = kind.default_group_size if group_size is None else group_size
    kind.check_group_size(group_size)
    kind.check_symmetric(symmetric)
    if isinstance(exclude, str):
        raise ArgumentTypeError("exclude", "str", "a list of patterns", "put the pattern in a list")
    for name, value in (("exclude", list(exclude)), ("vision_tower", vision_tower)):
        if value and not quantize:
            raise ArgumentError(
                name, value, "omitted if quantize is False", "pass quantize=True if the model is not quantized"
            )
    if type(shard_bytes) is not int or shard_bytes < 1:
        raise ArgumentError("shard_bytes", shard_bytes, "a positive int")
    origin = open_source(folder, quantize=quantize, exclude=exclude, vision_tower=vision_tower)
    match = match_class(origin)
    left: dict[str, str] = {}
    if quantize:
        unfit = [layer for layer in origin.inventory.packed if layer in match.refused]
        replace(match, refused={name: match.refused[name] for name in match.refused if name not in unfit}).require()
        left = dict.fromkeys(unfit, f"{match.class_name} cannot load the layer quantized")
        left |= dict.fromkeys(match.ignored, f"{match.class_name} does not load the layer")
        origin = origin.leave(left)
    else:
        match.require()
    options = _Options(
        quantize=quantize,
        format=format,
        group_size=group_size,
        symmetric=symmetric,
        clip_search=clip_search,
        dtype=_dtype(origin, dtype),
        exclude=tuple(sorted(exclude)),
        vision_tower=vision_tower,
        left=tuple(sorted(left)),
    )
    if origin.statement is not None:
        for parts in origin.layers.values():
            name = parts[origin.statement.format.scales]
            check_scales(name, origin.checkpoint.read(name), options.dtype)
    shards = plan_shards(origin, shard_bytes, kind, group_size)
    journal = Journal(target, _identity(origin, options, shard_bytes), origin.folder.resolve().name)
    check_disk(target, sum(shard.max_bytes for shard in shards if shard.name not in journal.shards))
    with journal.begin():
        report = progress or (lambda what, done, total: None)
        total = sum(origin.tensor_bytes(unit.source) for shard in shards for unit in shard.units)
        done = _verify(journal, origin, shards, report, total)
        kept = len(journal.shards)
        for shard in shards:
            if shard.name not in journal.shards:
                journal.add(shard.name, _write_shard(shard, target, origin, options, report, done, total))
                done += _shard_source_bytes(shard, origin)
        not_copied = copy_files(folder, target, (file.path.name for file in origin.checkpoint.files.values()))
        finished = [journal.shards[shard.name] for shard in shards]
        layers = tuple(layer for shard in finished for layer in shard.layers)
        write_index(target, {shard.name: journal.shards[shard.name].tensors for shard in shards})
        write_config(target, origin.config, layers, options.dtype)
    return Conversion(
        source=str(folder),
        out=str(target),
        method=origin.statement.format.title if origin.statement else "float",
        dtype=options.dtype,
        layers=layers,
        skipped=origin.skipped,
        ignored=() if quantize else tuple(match.ignored),
        not_compared=match.unknown,
        not_copied=not_copied,
        left_out=origin.inventory.left_out,
        notes=(*origin.inventory.notes, *_unloaded(match, origin)),
        source_bytes=total,
        out_bytes=sum(sum(shard.tensors.values()) for shard in finished),
        shards=len(shards),
        kept_shards=kept,
    )


def _unloaded(match: Match, source: Source) -> Iterator[str]:
    """Yield a note about copied tensors that the model class does not load."""
    left_out = source.inventory.left_out
    copied = [name for name in match.unloaded if name.rpartition(".")[0] not in source.layers and name not in left_out]
    if copied:
        first, others = ", ".join(copied[:3]), len(copied) - 3
        more = f" and {counted(others, 'other')}" if others > 0 else ""
        yield f"copied, but not loaded by {match.class_name}: {first}{more}"


def _dtype(source: Source, dtype: str | None) -> str:
    if dtype is not None:
        return activation_type(dtype).name
    text = source.config.get("text_config")
    for config in (source.config, text if isinstance(text, dict) else {}):
        named = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
        if named in ACTIVATION_TYPES:
            return named
    if source.statement is not None:
        scales = next(iter(source.layers.values()))[source.statement.format.scales]
        stored = source.checkpoint.files[scales].tensors[scales].dtype
        return "bfloat16" if stored == "BF16" else "float16"
    return "float16"


def _identity(source: Source, options: _Options, shard_bytes: int) -> dict[str, Any]:
    chosen = asdict(options) if options.quantize else {"dtype": options.dtype}
    chosen |= {"shard_bytes": shard_bytes, "layout_version": LAYOUT_VERSION}
    return {"source": source.fingerprint(), "options": chosen}


def _verify(journal: Journal, source: Source, shards: Sequence[ShardPlan], report: Progress, total: int) -> int:
    """Check the finished files, and return the number of source bytes that they contain."""
    size = {shard.name: _shard_source_bytes(shard, source) for shard in shards}
    done = 0
    for name in journal.keep_intact():
        done += size.get(name, 0) if name in journal.shards else 0
        report(f"checked {name}", done, total)
    return done


def _shard_source_bytes(shard: ShardPlan, source: Source) -> int:
    return sum(source.tensor_bytes(unit.source) for unit in shard.units)


def _write_shard(
    shard: ShardPlan, out: Path, source: Source, options: _Options, report: Progress, done: int, total: int
) -> Shard:
    layers, tensors = [], {}
    with ShardWriter(out / shard.name, shard.room_bytes) as writer:
        for unit in shard.units:
            report(unit.name, done, total)
            if unit.layers:
                layer, weight = _pack(unit, source, options)
                layers.append(layer)
                for part, array in (_arrays(weight) | _bias(unit, source)).items():
                    writer.add(f"{unit.name}.{part}", array)
                    tensors[f"{unit.name}.{part}"] = array.nbytes
            else:
                writer.copy(unit.name, source.checkpoint.files[unit.name])
                tensors[unit.name] = unit.max_bytes
            done += source.tensor_bytes(unit.source)
            report(unit.name, done, total)
        size, digest = writer.finish()
    return Shard(size, digest, tensors, tuple(layers))


def _arrays(packed: PackedWeight | PackedExperts) -> dict[str, Any]:
    """Return the arrays of a weight by name. The tensor scale is also an array, as in a torch module's state_dict."""
    if isinstance(packed, PackedExperts):
        weight, tensor_scale = packed.weight, packed.tensor_scales
    else:
        has_tensor_scale = weight_format(packed.format).has_tensor_scale
        weight, tensor_scale = packed, np.array(packed.tensor_scale, np.float32) if has_tensor_scale else None
    arrays = {part: getattr(weight, part) for part in ARRAYS} | {"tensor_scale": tensor_scale}
    return {part: array for part, array in arrays.items() if array is not None}


def _bias(unit: Unit, source: Source) -> dict[str, Any]:
    """Return the biases of experts in the order of the packed weight, which differs from their order in the file."""
    group = source.inventory.experts.get(unit.name)
    return {"bias": group.arrange(source.checkpoint.read(group.bias))} if group and group.bias else {}


def _pack(unit: Unit, source: Source, options: _Options) -> tuple[LayerReport, PackedWeight | PackedExperts]:
    packed: list[PackedWeight] = []
    pairs = _matrices(unit, source, options, packed)
    if source.statement is None:
        errors = weight_error(pairs)
    else:
        errors = scale_error((scales for scales, _ in pairs), ACTIVATION_TYPES[options.dtype].numpy)
    weight: PackedWeight | PackedExperts = packed[0]
    if group := source.inventory.experts.get(unit.name):
        pairs_of_gate = group.gated and not group.is_stacked
        parts = list(zip(packed[::2], packed[1::2], strict=True)) if pairs_of_gate else packed
        weight = pack_experts(parts, gated=group.gated)
    report = LayerReport(
        name=unit.name,
        shape=weight.shape,
        group_size=weight.group_size,
        symmetric=weight.symmetric,
        act_order=isinstance(weight, PackedWeight) and weight.perm is not None,
        format=weight.format,
        source_bytes=source.tensor_bytes(name for layer in unit.layers for name in source.layers[layer].values()),
        packed_bytes=weight.nbytes,
        max_error=errors[0],
        mean_error=errors[1],
    )
    return report, weight


def _matrices(
    unit: Unit, source: Source, options: _Options, packed: list[PackedWeight]
) -> Iterator[tuple[Any, PackedWeight]]:
    """Append the packed matrices of a unit to ``packed``, and yield pairs of source (weight or scales) and result."""
    group = source.inventory.experts.get(unit.name)
    for layer in unit.layers:
        parts = {part: source.checkpoint.read(name) for part, name in source.layers[layer].items()}
        try:
            split = {part: group.split(array) if group else iter((array,)) for part, array in parts.items()}
            if source.statement is not None:
                kind = source.statement.format
                for arrays in zip(*split.values(), strict=True):
                    tensors = dict(zip(split, arrays, strict=True))
                    packed.append(pack_layer(kind, tensors, source.inventory.facts[layer], dtype=options.dtype))
                    yield scale_values(tensors[kind.scales], kind.scales), packed[-1]
                continue
            for weight in split["weight"]:
                packed.append(
                    quantize_linear(
                        weight,
                        group_size=options.group_size,
                        symmetric=options.symmetric,
                        dtype=options.dtype,
                        clip_search=options.clip_search,
                        format=options.format,
                    )
                )
                yield weight, packed[-1]
        except FieldError as error:
            raise error.renamed({error.field: f"{layer}: {error.field}"}) from error
