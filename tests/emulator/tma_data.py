"""Contents of memory before an operation: deterministic bytes, including the special values of arithmetic."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

#: Special values: zeros, subnormals, the edges of the normal range, halves for ties, infinities, NaNs.
_SPECIAL: dict[str, str] = {
    "f16": "0 8000 1 8001 3ff 83ff 400 8400 3c00 bc00 7bff fbff 7c00 fc00 7e00 7fff fe01 7c01 fd55 6c00 1400",
    "bf16": "0 8000 1 8001 7f 807f 80 8080 3f80 bf80 7f7f ff7f 7f80 ff80 7fc0 7fff ffc1 7f81 ffa5 4b80 3380",
    "f32": "0 80000000 1 80000001 7fffff 807fffff 800000 80800000 3f800000 bf800000 7f7fffff ff7fffff 7f800000 "
    "ff800000 7fc00000 7fffffff ffc00001 7f800001 ffa55a5a 3f801000 3f803000 3f801fff 7f7ff000 7f7fefff 1000 fff "
    "33800000 4b800000",
    "f64": "0 8000000000000000 1 fffffffffffff 10000000000000 3ff0000000000000 bff0000000000000 7fefffffffffffff "
    "7ff0000000000000 fff0000000000000 7ff8000000000000 ffffffffffffffff 7ff0000000000001 3ca0000000000000",
    "u8": "0 1 7f 80 ff",
    "u16": "0 1 7fff 8000 ffff",
    "u32": "0 1 2 7fffffff 80000000 80000001 fffffffe ffffffff",
    "u64": "0 1 2 7fffffffffffffff 8000000000000000 8000000000000001 fffffffffffffffe ffffffffffffffff 100000000 "
    "ffffffff",
}
_KIND = {
    "float16": "f16",
    "bfloat16": "bf16",
    "float32": "f32",
    "float32_ftz": "f32",
    "tfloat32": "f32",
    "tfloat32_ftz": "f32",
    "float64": "f64",
    "s32": "u32",
    "b32": "u32",
    "s64": "u64",
    "b64": "u64",
}
#: (first bit of the exponent, bias) of floats, to choose exponents whose sums round without overflow.
_EXPONENT = {"f16": (10, 15, 4), "bf16": (7, 127, 12), "f32": (23, 127, 30), "f64": (52, 1023, 60)}


def value_kind(dtype: str) -> str:
    """Return the kind of values of a tensor map's or a bulk reduction's type."""
    if dtype in _KIND:
        return _KIND[dtype]
    return dtype.replace("uint", "u").replace("int", "u")


def contents(size: int, style: str, dtype: str, seed: int) -> Bytes:
    """Return ``size`` bytes (a multiple of 16).

    ``style`` is "index" (32-bit word n holds 2**30 + n, so that every chunk identifies its source), "random", "special"
    (half of the elements are special values) or "near" (floats whose sums round, small integers).
    """
    if style == "index":
        return (np.arange(size // 4, dtype=np.uint32) + np.uint32(1 << 30)).view(np.uint8)
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, size, dtype=np.uint8)
    kind = value_kind(dtype)
    special = np.array([int(bits, 16) for bits in _SPECIAL[kind].split()], dtype=f"u{_width(kind)}")
    view = data.view(special.dtype)
    if style == "special":
        chosen = rng.integers(0, len(special), view.size)
        view[:] = np.where(rng.random(view.size) < 0.5, special[chosen], view)
    elif style == "near" and kind in _EXPONENT:
        first, bias, spread = _EXPONENT[kind]
        exponent = (bias + rng.integers(-spread, spread, view.size)).astype(view.dtype)
        sign = view & view.dtype.type(1 << (8 * view.itemsize - 1))
        view[:] = sign | (view & view.dtype.type((1 << first) - 1)) | (exponent << view.dtype.type(first))
    elif style == "near":
        view[:] = (view % view.dtype.type(7)) - view.dtype.type(3)
    return data


def _width(kind: str) -> int:
    return {"f16": 2, "bf16": 2, "f32": 4, "f64": 8, "u8": 1, "u16": 2, "u32": 4, "u64": 8}[kind]


def before(case: dict[str, Any]) -> tuple[Bytes, Bytes]:
    """Return (global buffer, windows of shared memory of all blocks) before the operation."""
    seed, dtype = case["seed"], case["dtype"]
    gmem = contents(case["gmem_bytes"], case["style"], dtype, 2 * seed)
    style = "random" if case["style"] == "index" else case["style"]
    blocks = max(1, case.get("cluster", 0))
    return gmem, contents(blocks * case["window"], style, dtype, 2 * seed + 1)


def digest(data: Bytes) -> str:
    """Return half of the SHA-256 of some bytes."""
    return hashlib.sha256(data.tobytes()).hexdigest()[:32]
