"""The effect of an operation as a JSON record, the same from a GPU and from the emulator."""

from __future__ import annotations

from typing import Any

from tma_data import Bytes, digest

from cudatma.descriptor import Im2colSpec, TiledSpec
from cudatma.errors import DescriptorError


def make_spec(fields: dict[str, Any], address: int) -> TiledSpec | Im2colSpec:
    """Return the spec of a case's map, or raise DescriptorError if the rules refuse it."""
    values = {name: value for name, value in fields.items() if name != "kind"}
    return (TiledSpec if fields["kind"] == "tiled" else Im2colSpec)(**values, address=address)


def expected_bytes(case: dict[str, Any]) -> int:
    """Return the codec's byte count for the barrier; a wrong count shows as an incomplete copy."""
    if case["op"] in ("bulk_load", "bulk_multicast") or case["op"].startswith("shared_"):
        return int(case["size"])
    if "_load" not in case["op"] and "_multicast" not in case["op"]:
        return 0
    try:
        return make_spec(case["map"], 0).expected_bytes
    except DescriptorError:
        return 1 << 16


def set_bits(raw: bytes, first: int, bits: int, value: int) -> bytes:
    """Return 128 bytes with a run of bits replaced."""
    mask = ((1 << bits) - 1) << first
    return (int.from_bytes(raw, "little") & ~mask | value << first & mask).to_bytes(len(raw), "little")


def finished(
    case: dict[str, Any],
    reports: list[list[int]],
    expected: int,
    memories: tuple[tuple[Bytes, Bytes], tuple[Bytes, Bytes]],
    edited: bytes,
) -> dict[str, Any]:
    """Return the answer of an operation that ended.

    ``reports`` are (done, missing bytes, balanced) of each block. ``memories`` are (before, after) of the global buffer
    and of the windows of all blocks.
    """
    answer: dict[str, Any] = {"n": case["n"], "result": "ok"}
    if expected:
        receiving = [r for rank, r in enumerate(reports) if case.get("targets", 1) >> rank & 1]
        answer["counted"] = [expected - missing if balanced else "over" for _, missing, balanced in receiving]
        answer["done"] = min(done for done, _, _ in receiving)
    for name, (_, after) in zip(("gmem", "smem"), memories, strict=True):
        answer[name] = digest(after)
    if case.get("edits"):
        words = edited[8:].hex()  # the address depends on the buffer's
        answer["map"] = words
    return answer
