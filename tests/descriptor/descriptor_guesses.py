"""Guesses at the fields of a tensor map that a driver derives by itself, and how well each holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from cudatma.descriptor import Im2colSpec, TiledSpec, codec
from cudatma.errors import DescriptorError

#: What may happen to a size before it is stored.
TRANSFORMS: dict[str, Callable[[int], int]] = {
    "": lambda n: n,
    " - 1": lambda n: n - 1,
    " * 8": lambda n: n * 8,
    " / 16": lambda n: n // 16,
    " / 32": lambda n: n // 32,
    " / 128 up": lambda n: -(-n // 128),
    " to 128": lambda n: -(-n // 128) * 128,
}


@dataclass(frozen=True)
class Known:
    """A spec, the driver's bytes for it, and where its address comes from."""

    spec: TiledSpec | Im2colSpec
    raw: bytes
    memory: str

    @property
    def kind(self) -> str:
        return "tiled" if isinstance(self.spec, TiledSpec) else "im2col"

    @cached_property
    def read(self) -> dict[str, int]:
        """The fields of the bytes, read by the spec's kind."""
        value = int.from_bytes(self.raw, "little")
        return {name: value >> first & ((1 << bits) - 1) for name, (first, bits) in codec.FIELDS[self.kind].items()}

    @cached_property
    def unknown_bits(self) -> frozenset[int]:
        """Set bits that the spec does not account for; none where the bytes do not decode."""
        try:
            unknown = codec.decode(self.raw).unknown
        except DescriptorError:
            return frozenset()
        return frozenset(bit for bit in range(unknown.bit_length()) if unknown >> bit & 1)

    @cached_property
    def extents(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Box and steps; channels and pixels of im2col, which steps do not change."""
        if isinstance(self.spec, TiledSpec):
            return self.spec.box, self.spec.element_strides
        return (self.spec.channels_per_pixel, self.spec.pixels_per_column), (1, 1)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Sizes of the box, by what they mean."""
        spec, (box, steps) = self.spec, self.extents
        size, span, piece = spec.dtype.element_bytes, spec.swizzle.span_bytes, spec.interleave.slice_bytes
        ceil, floor = ([op(b, s) for b, s in zip(box, steps, strict=True)] for op in (_up, int.__floordiv__))
        inner, rows = box[0] * size, prod(ceil[1:])
        found = {
            "expected": spec.expected_bytes,
            "footprint": spec.footprint_bytes,
            "box bytes": prod(box) * size,
            "stepped box bytes": prod(ceil) * size,
            "floored box bytes": prod(floor) * size,
            "row x stepped rows": inner * rows,
            "row x floored rows": inner * prod(floor[1:]),
            "row x all rows": inner * prod(box[1:]),
            "pitch x stepped rows": max(inner, span) * rows,
            "pitch x all rows": max(inner, span) * prod(box[1:]),
            "row": inner,
            "stepped row": ceil[0] * size,
            "pitch": max(inner, span),
            "span": span,
            "span x 8 or 16": 8 * span or 16,
            "box[0]": box[0],
            "box[0] x box[1]": prod(box[:2]),
            "row x box[1]": prod(box[:2]) * size,
            "pitch x box[1]": max(inner, span) * prod(box[1:2]),
            "rows": rows,
            "all rows": prod(box[1:]),
            "element": size,
        }
        if piece:
            slices = _up(inner, piece)
            found |= {
                "slice": piece,
                "slices in row": slices,
                "slices x slice": slices * piece,
                "slices x slice x rows": slices * piece * rows,
                "slice x all rows": piece * prod(box[1:]),
                "slice x prod(box)": piece * prod(box),
                "slice x stepped box": piece * prod(ceil),
                "slice x box[1]": piece * prod(box[1:2]),
            }
        return found

    def guesses(self, name: str) -> dict[str, bool]:
        """Which guesses give the value of a derived field, cut to its width."""
        mask, value = (1 << codec.FIELDS[self.kind][name][1]) - 1, self.read[name]
        hits = {
            size + change: function(number) & mask == value
            for size, number in self.sizes.items()
            for change, function in TRANSFORMS.items()
        }
        return hits | {"0": value == 0}

    @cached_property
    def facts(self) -> dict[str, bool]:
        """What may decide a single bit."""
        spec, size = self.spec, self.spec.dtype.element_bytes
        extents = [d * s for d, s in zip(spec.dims, (size, *spec.strides_bytes), strict=True)]
        dense = all(s == e for s, e in zip(spec.strides_bytes, extents[:-1], strict=True))
        found = {f"elements >= 2**{n}": prod(spec.dims) >= 1 << n for n in (15, 16, 17, 18)}
        found |= {f"bytes >= 2**{n}": prod(spec.dims) * size >= 1 << n for n in (16, 17, 18)}
        found |= {f"extent >= 2**{n}": max(extents) >= 1 << n for n in (16, 17, 18)}
        found |= {f"extent > 2**{n}": max(extents) > 1 << n for n in (17,)}
        found |= {f"outermost extent >= 2**{n}": extents[-1] >= 1 << n for n in (16, 17, 18)}
        found |= {f"sum of extents >= 2**{n}": sum(extents) >= 1 << n for n in (16, 17, 18)}
        found |= {f"row >= 2**{n}": extents[0] >= 1 << n for n in (16, 17, 18)}
        found |= {f"expected >= 2**{n}": spec.expected_bytes >= 1 << n for n in range(10, 18)}
        found |= {f"memory {name}": self.memory == name for name in ("made_up", "alloc_64K", "alloc_1M", "alloc_64M")}
        found |= {
            "always": True,
            "dense": dense,
            "dense or extent >= 2**17": dense or max(extents) >= 1 << 17,
            "stride 0": 0 in spec.strides_bytes,
            "im2col": self.kind == "im2col",
            "interleaved": spec.interleave > 0,
            "swizzled": spec.swizzle > 0,
            "steps": max(spec.element_strides) > 1,
            "L2 promotion": spec.l2_promotion > 0,
            "fill": spec.oob_fill > 0,
            "rank > 1": spec.rank > 1,
            "address >= 2**47": spec.address >> 47 > 0,
        }
        return found | {f"not {name}": not value for name, value in found.items()}


def _up(number: int, divisor: int) -> int:
    return -(-number // divisor)


def count_guesses(known: Sequence[Known], name: str) -> Counter[str]:
    """How often each guess at a derived field holds; among equals the one that was made first is the most common."""
    hits: Counter[str] = Counter()
    for k in known:
        hits.update({guess: int(hit) for guess, hit in k.guesses(name).items()})
    return hits


def best_predictors(known: Sequence[Known], bit: int) -> list[tuple[str, tuple[int, int, int, int]]]:
    """Facts and how they go with an unaccounted bit: cases with both, only the bit, only the fact, neither."""
    tables: dict[str, list[int]] = {}
    for k in known:
        is_set = bit in k.unknown_bits
        for name, fact in k.facts.items():
            tables.setdefault(name, [0] * 4)[2 * (not is_set) + (not fact)] += 1
    ranked = sorted(tables.items(), key=lambda item: -(item[1][0] + item[1][3]))
    return [(name, (t[0], t[1], t[2], t[3])) for name, t in ranked]


def conflicts(known: Sequence[Known], name: str) -> list[str]:
    """For sets of properties: how many of their repeated values come with more than one value of the field."""

    def keys(k: Known) -> dict[str, tuple[Any, ...]]:
        (box, steps), modes = k.extents, (k.kind, int(k.spec.interleave), int(k.spec.swizzle))
        size = k.spec.dtype.element_bytes
        return {
            "kind+interleave+swizzle": modes,
            "row+modes": (*modes, box[0] * size),
            "row+box[1]+modes": (*modes, box[0] * size, box[1:2]),
            "row+step[1]+box[1]+modes": (*modes, box[0] * size, box[1:2], steps[1:2]),
            "expected+modes": (*modes, k.spec.expected_bytes),
            "box+bytes+modes": (*modes, box, size),
            "box+steps+bytes+modes": (*modes, box, steps, size),
            "box+type+modes": (*modes, box, k.spec.dtype.name),
            "dims+modes": (*modes, k.spec.dims),
        }

    seen: dict[str, dict[tuple[Any, ...], list[int]]] = {}
    for k in known:
        for label, key in keys(k).items():
            seen.setdefault(label, {}).setdefault(key, []).append(k.read[name])
    return [
        f"{label} {sum(len(set(v)) > 1 for v in table.values())}/{sum(len(v) > 1 for v in table.values())}"
        for label, table in seen.items()
    ]
