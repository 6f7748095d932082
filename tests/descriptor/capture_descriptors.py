"""Captures tensor maps from a GPU's driver and compares them with the codec and the rules.

    python tests/descriptor/capture_descriptors.py --count 20000 --out FILE.jsonl.gz [--lines 20000] [--invalid 0.25]

Random configs, tiled and im2col, go to the driver; a share of them is mutated so that one rule is broken (or bent). The
file gets one JSON object a line: ``fields``, ``mutation`` (null for valid configs), ``memory`` (where the address comes
from), ``code`` (the driver's result, or "bindings"), ``verdict`` (of ask_rules), ``hex`` (128 bytes in memory order).
Cases that differ come first. The report of descriptor_report.py over all cases is printed.
The driver reads no memory when it encodes, so most addresses are made up.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import sys
from pathlib import Path
from typing import Any

# The checkout's package and the shared helpers, wherever it is started from.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from descriptor_cases import Fields, cases
from descriptor_report import Answer, report

from cudatma.descriptor import Im2colSpec, TiledSpec, check_target
from cudatma.descriptor.access import check_described_bytes
from cudatma.dtypes import TMA_TYPES
from cudatma.errors import DescriptorError, TargetError, check
from cudatma.target import Target, detect


def ask_driver(driver: Any, fields: Fields) -> tuple[int | str, bytes | None]:
    """Return the driver's result code and, if it is 0, the 128 bytes. Independent of cudatma.descriptor.driver.

    The code is ``"bindings"`` where cuda.bindings refuses the values before the driver sees them.
    """
    try:
        code, made = call_driver(driver, fields)
    except (ValueError, TypeError, OverflowError):
        return "bindings", None
    if int(code):
        return int(code), None
    return 0, b"".join(int(word).to_bytes(8, "little") for word in made.opaque)


def call_driver(driver: Any, fields: Fields) -> Any:
    """Return (code, CUtensorMap or None) from cuda.bindings, which raises an error for values that it cannot pass."""
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
        return driver.cuTensorMapEncodeTiled(*head, [narrow(size) for size in fields["box"]], *tail)
    corners = fields["lower_corner"], fields["upper_corner"]
    counts = fields["channels_per_pixel"], fields["pixels_per_column"]
    return driver.cuTensorMapEncodeIm2col(*head, *corners, *counts, *tail)


def ask_rules(fields: Fields, target: Target) -> tuple[str, TiledSpec | Im2colSpec | None]:
    """Return ``"ok"``, the field that breaks a driver rule, or ``"access"`` if only a rule of the hardware is
    broken."""
    values = {name: value for name, value in fields.items() if name != "kind"}
    try:
        spec = TiledSpec(**values) if fields["kind"] == "tiled" else Im2colSpec(**values)
        check_described_bytes(spec, target)
    except DescriptorError as error:
        return error.field, None
    try:
        check_target(spec, target)
    except DescriptorError:
        return "access", spec
    except TargetError as error:
        return error.field, spec
    return "ok", spec


def capture(count: int, invalid: float, seed: int, device: int = 0) -> list[Answer]:
    """Return all cases with the answers of the driver and the rules, in the primary context of a device."""
    from cuda.bindings import driver

    check(driver.cuInit(0), "cuInit")
    handle = check(driver.cuDeviceGet(device), "cuDeviceGet")
    context = check(driver.cuDevicePrimaryCtxRetain(handle), "cuDevicePrimaryCtxRetain")
    check(driver.cuCtxSetCurrent(context), "cuCtxSetCurrent")
    blocks = {"alloc_64K": 1 << 16, "alloc_1M": 1 << 20, "alloc_64M": 1 << 26}
    bases = {name: int(check(driver.cuMemAlloc(size), "cuMemAlloc")) for name, size in blocks.items()}
    made_up = random.Random(seed + 1)
    addresses = {name: [base, base + 32 * 100] for name, base in bases.items()}
    addresses["made_up"] = [made_up.randrange(1 << 44) * 32 for _ in range(1000)]
    target, answers = detect(device), []
    for fields, mutation, memory in cases(count, invalid, seed, addresses):
        code, raw = ask_driver(driver, fields)
        answers.append(Answer(fields, mutation, memory, code, *ask_rules(fields, target), raw))
    for base in bases.values():
        check(driver.cuMemFree(base), "cuMemFree")
    return answers


def write(answers: list[Answer], path: Path, most: int) -> None:
    """Write the first ``most`` cases as JSON lines, beginning with those that differ."""
    with gzip.open(path, "wt", encoding="utf-8") as out:
        for answer in sorted(answers, key=lambda answer: answer.agrees)[:most]:
            names = ("fields", "mutation", "memory", "code", "verdict")
            line = {name: getattr(answer, name) for name in names} | {"hex": answer.raw.hex() if answer.raw else None}
            out.write(json.dumps(line, separators=(",", ":")) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20000)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lines", type=int, default=20000, help="most cases kept in the file")
    parser.add_argument("--invalid", type=float, default=0.25, help="share of mutated configs")
    arguments = parser.parse_args()
    answers = capture(arguments.count, arguments.invalid, arguments.seed)
    write(answers, arguments.out, arguments.lines)
    print(report(answers))


if __name__ == "__main__":
    main()
