"""Texts for the operations that a debug kernel refuses to issue. Numbers as in ``enum Rule`` of
parts/debug_panel.cuh.j2."""

from __future__ import annotations

from collections.abc import Callable

_INT32 = 1 << 32


def _signed(value: int) -> int:
    return value - _INT32 if value >> 31 else value


def _mode(number: int) -> str:
    return ("tiled", "im2col", "im2col wide")[number] if number < 3 else f"mode {number}"


#: Rule -> (name, what it says of the two numbers that its record holds).
RULES: dict[int, tuple[str, Callable[[int, int], str]]] = {
    1: ("barrier_alignment", lambda a, b: f"an mbarrier is aligned to {a} bytes"),
    2: ("barrier_uninitialised", lambda a, b: "no mbarrier_init was seen at this address in this block"),
    3: ("barrier_count", lambda a, b: f"mbarrier_init with {a} arrivals; 1..{b} are allowed"),
    4: ("expected_bytes", lambda a, b: f"expect_tx of {a} bytes; a phase counts at most {b}"),
    5: ("map_alignment", lambda a, b: f"tensor map at {b << 32 | a:#x}; it is aligned to 64 bytes"),
    6: ("map_rank", lambda a, b: f"a tensor map of rank {a} in an instruction for rank {b}"),
    7: ("map_mode", lambda a, b: f"the tensor map is {_mode(a)}, the instruction for {_mode(b)} ones"),
    8: (
        "coordinate_alignment",
        lambda a, b: f"coordinate 0 is {_signed(a)}, elements of {b} bytes; a box begins at a multiple of 16 bytes",
    ),
    9: ("negative_coordinate", lambda a, b: f"coordinate {b} is {_signed(a)}; stores and reductions begin at 0 and up"),
    10: ("shared_alignment", lambda a, b: f"a box in shared memory is aligned to {a} bytes"),
    11: ("swizzle_alignment", lambda a, b: f"a box in swizzle {16 << b}B is aligned to its pattern of {a} bytes"),
    12: ("reduce_type", lambda a, b: f"element format {a} of the tensor map has no such reduction"),
    13: ("bulk_shared", lambda a, b: f"the shared address of a bulk copy is a multiple of {a}"),
    14: ("bulk_global", lambda a, b: f"a bulk copy at global address {b << 32 | a:#x}; it is a multiple of 16"),
    15: ("bulk_bytes", lambda a, b: f"a bulk copy of {a} bytes; it takes a multiple of {b}"),
    16: ("dimension", lambda a, b: f"dimension {b} of the tensor map has {a + 1} elements; an access takes 2**31"),
    17: ("bounding_box", lambda a, b: f"coordinate {b} is {_signed(a)}, outside of the im2col map's bounding box"),
    18: ("padded_store", lambda a, b: f"a store through an im2col map with corners {_signed(a)} and {_signed(b)}"),
}
