"""Captures tensor maps from a card's driver and compares them with the codec and the rules.

    python tests/gpu/capture_descriptors.py --count 20000 --out FILE.jsonl.gz [--seed 1] [--lines 3000] [--invalid 0.25]

Random specs, tiled and im2col, go to the driver; a share of them is mutated so that one rule is broken (or bent). The
file gets one JSON object a line: ``fields``, ``mutation`` (null for valid specs), ``memory`` (where the address comes
from), ``code`` (the driver's result), ``verdict`` (``"ok"`` or the field that our rules refuse), ``hex`` (128 bytes in
memory order); the last line holds the summary that is also printed. All cases count in the summary, those that differ
are kept in the file first. The driver reads no memory when it encodes, so most addresses are made up.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import sys
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

# The checkout's package and the generator beside this file, wherever it is started from.
sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from descriptor_cases import Fields, cases

from cudatma.descriptor import Im2colSpec, TiledSpec, check_target, codec
from cudatma.dtypes import TMA_TYPES
from cudatma.errors import DescriptorError, TargetError, check
from cudatma.layout import Interleave
from cudatma.target import Target, detect

EXAMPLES = 3


def ask_driver(driver: Any, fields: Fields) -> tuple[int, bytes | None]:
    """The driver's result code and, where it is 0, the 128 bytes. Independent of cudatma.descriptor.driver."""
    wide, narrow = driver.cuuint64_t, driver.cuuint32_t
    head = (
        driver.CUtensorMapDataType(TMA_TYPES[fields["dtype"]].driver_value),
        len(fields["dims"]),
        fields["address"],
        [wide(dim) for dim in fields["dims"]],
        [wide(stride) for stride in fields["strides_bytes"] or [16]],
    )
    tail = (
        [narrow(step) for step in fields["element_strides"]],
        driver.CUtensorMapInterleave(fields["interleave"]),
        driver.CUtensorMapSwizzle(fields["swizzle"]),
        driver.CUtensorMapL2promotion(fields["l2_promotion"]),
        driver.CUtensorMapFloatOOBfill(fields["oob_fill"]),
    )
    if fields["kind"] == "tiled":
        code, made = driver.cuTensorMapEncodeTiled(*head, [narrow(size) for size in fields["box"]], *tail)
    else:
        counts = fields["channels_per_pixel"], fields["pixels_per_column"]
        code, made = driver.cuTensorMapEncodeIm2col(
            *head, fields["lower_corner"], fields["upper_corner"], *counts, *tail
        )
    if int(code):
        return int(code), None
    return 0, b"".join(int(word).to_bytes(8, "little") for word in made.opaque)


def ask_rules(fields: Fields, target: Target) -> tuple[str, TiledSpec | Im2colSpec | None]:
    """``"ok"``, ``"smem"`` (the box does not fit a block, which the driver need not mind), or the refused field."""
    values = {name: value for name, value in fields.items() if name != "kind"}
    try:
        spec = TiledSpec(**values) if fields["kind"] == "tiled" else Im2colSpec(**values)
    except DescriptorError as error:
        return error.field, None
    try:
        check_target(spec, target)
    except DescriptorError:
        return "smem", spec
    except TargetError as error:
        return error.field, spec
    return "ok", spec


def derived_guesses(spec: TiledSpec | Im2colSpec) -> dict[str, int]:
    """Candidates for bits 512-543, by name."""
    size, piece = spec.dtype.element_bytes, spec.interleave.slice_bytes
    if isinstance(spec, TiledSpec):
        box, steps = spec.box, spec.element_strides
    else:
        box, steps = (spec.channels_per_pixel, spec.pixels_per_column), (1, 1)
    pairs = list(zip(box, steps, strict=True))
    ceil, floor = [-(-b // s) for b, s in pairs], [b // s for b, s in pairs]
    guesses = {"expected_bytes": spec.expected_bytes, "footprint_bytes": spec.footprint_bytes}
    for unit, weight in (("element", size), ("slice", piece))[: 2 if piece else 1]:
        guesses |= {
            f"prod(box) * {unit}": prod(box) * weight,
            f"prod(ceil(box / step)) * {unit}": prod(ceil) * weight,
            f"prod(floor(box / step)) * {unit}": prod(floor) * weight,
            f"box[0] * prod(ceil(box / step)[1:]) * {unit}": box[0] * prod(ceil[1:]) * weight,
            f"box[0] * prod(floor(box / step)[1:]) * {unit}": box[0] * prod(floor[1:]) * weight,
        }
    return guesses


class Summary:
    """Counts over all cases, with a few examples of whatever differs."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = {}
        self.examples: dict[str, list[Any]] = {}

    def add(self, table: str, key: object) -> None:
        self.counts.setdefault(table, Counter())[str(key)] += 1

    def example(self, key: str, case: Any) -> None:
        if len(self.examples.setdefault(key, [])) < EXAMPLES:
            self.examples[key].append(case)

    def compare_bytes(self, spec: TiledSpec | Im2colSpec, raw: bytes, memory: str) -> bool:
        """Codec against driver in both directions; whether they agree in all known bits."""
        kind = "tiled" if isinstance(spec, TiledSpec) else "im2col"
        interleaved = "" if spec.interleave is Interleave.NONE else f", interleave {spec.interleave.label}"
        group = f"{kind}{interleaved}"
        value, ours = int.from_bytes(raw, "little"), int.from_bytes(codec.encode(spec), "little")
        wrong = (value ^ ours) & codec.KNOWN[kind]
        for name, (first, bits) in codec.FIELDS[kind].items():
            if wrong >> first & ((1 << bits) - 1):
                self.add("codec: fields that differ from the driver", f"{kind} {name}")
                self.example(
                    f"codec {kind} {name}", {"spec": repr(spec), "hex": raw.hex(), "ours": codec.encode(spec).hex()}
                )
        self.add("codec: descriptors", "differ" if wrong else "equal in all known bits")
        try:
            decoded = codec.decode(raw)
        except DescriptorError as error:
            self.add("decode", f"refused: {error.field}")
            self.example(f"decode {error.field}", {"spec": repr(spec), "hex": raw.hex()})
            return False
        self.add("decode", "equal" if decoded.spec == spec else "another spec")
        self.add("version (bits 65-67)", decoded.version)
        self.derived_bits(spec, decoded, group, memory)
        return not wrong and decoded.spec == spec

    def derived_bits(self, spec: TiledSpec | Im2colSpec, decoded: codec.Decoded, group: str, memory: str) -> None:
        """What the driver writes beyond the spec, against guesses."""
        table = f"bits 512-543, {group}: guesses that hold"
        for name, guess in derived_guesses(spec).items():
            if guess == decoded.smem_bytes:
                self.add(table, name)
        self.add(table, "(total)")
        self.add("bits 576-591 by swizzle", f"{spec.swizzle.label}, {group}: {decoded.smem_pattern:#x}")
        for bit in range(decoded.unknown.bit_length()):
            if decoded.unknown >> bit & 1:
                self.add("set bits that the spec does not account for", f"bit {bit:4d}, {group}")
        row_bytes = spec.dims[0] * spec.dtype.element_bytes
        outer = [dim * stride for dim, stride in zip(spec.dims[1:], spec.strides_bytes, strict=True)]
        facts = {
            "2**16 elements or more": prod(spec.dims) >= 1 << 16,
            "extent of 128 KiB or more": max([row_bytes, *outer]) >= 1 << 17,
            "memory": memory,
        }
        for fact, value in facts.items():
            self.add("bit 85", f"bit 85 is {decoded.unknown >> 85 & 1}, {fact}: {value}")

    def as_dict(self) -> dict[str, Any]:
        tables = {table: dict(sorted(counter.items())) for table, counter in sorted(self.counts.items())}
        return {"counts": tables, "examples": self.examples}


def capture(count: int, invalid: float, seed: int, device: int = 0) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """All cases (those that differ first) and the summary, in the primary context of a device."""
    from cuda.bindings import driver

    check(driver.cuInit(0), "cuInit")
    handle = check(driver.cuDeviceGet(device), "cuDeviceGet")
    check(
        driver.cuCtxSetCurrent(check(driver.cuDevicePrimaryCtxRetain(handle), "cuDevicePrimaryCtxRetain")),
        "cuCtxSetCurrent",
    )
    blocks = {"alloc_64K": 1 << 16, "alloc_1M": 1 << 20, "alloc_64M": 1 << 26}
    bases = {name: int(check(driver.cuMemAlloc(size), "cuMemAlloc")) for name, size in blocks.items()}
    made_up = random.Random(seed + 1)
    addresses = {name: [base, base + 32 * 100] for name, base in bases.items()}
    addresses["made_up"] = [made_up.randrange(1 << 44) * 32 for _ in range(1000)]
    target, summary = detect(device), Summary()
    differing: list[dict[str, Any]] = []
    agreeing: list[dict[str, Any]] = []
    for fields, mutation, memory in cases(count, invalid, seed, addresses):
        code, raw = ask_driver(driver, fields)
        verdict, spec = ask_rules(fields, target)
        same = (code == 0) == (verdict in ("ok", "smem"))
        summary.add("cases", f"{fields['kind']} rank {len(fields['dims'])}, {'mutated' if mutation else 'valid'}")
        shown = verdict if verdict in ("ok", "smem") else f"refuse {verdict}"
        table = f"{'agree' if same else 'DIFFER'}: mutation, driver, rules"
        summary.add(table, f"{mutation}, driver {code}, rules {shown}")
        if not same:
            summary.example(f"rules {mutation} driver {code} rules {shown}", fields)
        if raw is not None and spec is not None and verdict in ("ok", "smem"):
            same = summary.compare_bytes(spec, raw, memory) and same
        line = {"fields": fields, "mutation": mutation, "memory": memory, "code": code, "verdict": verdict}
        (agreeing if same else differing).append(line | {"hex": raw.hex() if raw else None})
    for base in bases.values():
        check(driver.cuMemFree(base), "cuMemFree")
    return differing + agreeing, summary.as_dict()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20000)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lines", type=int, default=3000, help="most cases kept in the file")
    parser.add_argument("--invalid", type=float, default=0.25, help="share of mutated specs")
    arguments = parser.parse_args()
    lines, summary = capture(arguments.count, arguments.invalid, arguments.seed)
    with gzip.open(arguments.out, "wt", encoding="utf-8") as out:
        for line in lines[: arguments.lines]:
            out.write(json.dumps(line, separators=(",", ":")) + "\n")
        out.write(json.dumps({"summary": summary}) + "\n")
    for table, counter in summary["counts"].items():
        print(f"\n{table}")
        for key, number in counter.items():
            print(f"  {number:7d}  {key}")
    if summary["examples"]:
        print("\nexamples")
        for key, found in summary["examples"].items():
            print(f"  {key}: {json.dumps(found[0])}")


if __name__ == "__main__":
    main()
