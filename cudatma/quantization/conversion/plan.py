"""Which tensors go into which file of a conversion, and how many bytes that takes at most."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cudatma.quantization.conversion.shard_writer import header_room
from cudatma.quantization.conversion.source import Source, natural
from cudatma.quantization.layout_v1 import BLOCK, BLOCK_BYTES, blocks, group_count

#: The arrays of a packed layer, by their names without the layer's, and the dimensions of each.
ARRAYS = {"qweight": 2, "scales": 2, "zeros": 2, "perm": 1}
#: The largest group size of packed weights: files with larger groups have fewer scales.
_LARGEST_GROUP = 128


@dataclass(frozen=True, slots=True)
class Unit:
    """A layer that is packed, or a tensor that is copied. source: the names of the tensors that it is made of."""

    name: str
    is_layer: bool
    source: tuple[str, ...]
    most_bytes: int


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """A file, its units in order, and the bytes that are kept for its header."""

    name: str
    units: tuple[Unit, ...]
    room_bytes: int

    @property
    def most_bytes(self) -> int:
        """What the file takes at most."""
        return 8 + self.room_bytes + sum(unit.most_bytes for unit in self.units)


def plan_shards(source: Source, shard_bytes: int, group_size: int) -> list[ShardPlan]:
    """Files of about ``shard_bytes`` at most, in the model's order; a unit is never divided.

    group_size: of a float checkpoint's layers. The same source and options give the same plan.
    """
    packed = {name for parts in source.layers.values() for name in parts.values()}
    units = [
        Unit(layer, True, tuple(parts.values()), _packed_bytes(source, layer, group_size))
        for layer, parts in source.layers.items()
    ]
    others = [name for name in source.checkpoint.names if name not in packed]
    units += [Unit(name, False, (name,), source.tensor_bytes([name])) for name in others]
    shards: list[list[Unit]] = []
    filled = shard_bytes
    for unit in sorted(units, key=lambda unit: natural(unit.name)):
        if filled + unit.most_bytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(unit)
        filled += unit.most_bytes
    return [
        ShardPlan(_file_name(number, len(shards)), tuple(shard), header_room(_tensors(source, shard)))
        for number, shard in enumerate(shards, 1)
    ]


def _packed_bytes(source: Source, layer: str, group_size: int) -> int:
    shapes = source.shapes(layer)
    if source.scheme is None:
        n, k = shapes["weight"]
        groups = group_count(k, group_size)
    else:
        k, n, groups = source.scheme.extent(shapes)
        groups = max(groups, group_count(k, _LARGEST_GROUP)) if groups > 1 else 1
    columns = blocks(n) * BLOCK
    return blocks(n) * blocks(k) * BLOCK_BYTES + groups * columns * 3 + 4 * k  # scales of two bytes, zeros of one


def _tensors(source: Source, shard: list[Unit]) -> list[tuple[str, int]]:
    files: Mapping[str, object] = source.checkpoint.files
    found = [(f"{unit.name}.{part}", size) for unit in shard if unit.is_layer for part, size in ARRAYS.items()]
    for unit in shard:
        if not unit.is_layer and unit.name in files:
            found.append((unit.name, len(source.checkpoint.files[unit.name].tensors[unit.name].shape)))
    return found


def _file_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
