"""Random operands for benchmarks: words and approximately normal numbers from a hash, and packed and dense weights.

The functions take the array library as an argument, so that tests can use NumPy. Contents repeat every few megabytes.
Caches do not benefit from the repetition, because they are indexed by addresses.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cudatma.dtypes import BFLOAT16
from cudatma.quantization import PackedWeight

GROUP_SIZE = 128
#: Number of words in one block of random contents.
_BLOCK_WORDS = 1 << 22
#: Standard deviation and mean of the sum of four random bytes.
_FOUR_BYTES_SIGMA, _FOUR_BYTES_MEAN = 147.8, 510.0


def random_words(xp: Any, count: int, seed: int) -> Any:
    """Return a uint32 array (count,) of ``xp`` that contains a hash of seed and index.

    The array is the same on every machine.
    """
    words = xp.arange(count, dtype=xp.uint32) * xp.uint32(0x9E3779B1) + xp.uint32(seed * 0x85EBCA6B & 0xFFFFFFFF)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        words ^= words >> xp.uint32(shift)
        words *= xp.uint32(factor)
    return words


def random_numbers(xp: Any, count: int, dtype: str, seed: int, scale: float = 1.0) -> Any:
    """Return an fp16 or bf16 array (count,) of approximately normal numbers with standard deviation ``scale``."""
    four = random_words(xp, count, seed).view(xp.uint8).reshape(count, 4).astype(xp.float32).sum(axis=1)
    return _narrow(xp, (four - xp.float32(_FOUR_BYTES_MEAN)) * xp.float32(scale / _FOUR_BYTES_SIGMA), dtype)


def _narrow(xp: Any, values: Any, dtype: str) -> Any:
    """Convert float32 to fp16, or to bf16 by truncation."""
    if dtype == "float16":
        return values.astype(xp.float16)
    return (values.view(xp.uint32) >> xp.uint32(16)).astype(xp.uint16).view(BFLOAT16)


def filled(xp: Any, shape: tuple[int, ...], block: Any) -> Any:
    """Return an array of ``shape`` that repeats the 1D ``block``."""
    # Copy the bits as integers, because copying bf16 would require a compiler.
    bits = block.view(f"uint{8 * block.dtype.itemsize}")
    out = xp.empty(shape, dtype=bits.dtype)
    flat = out.reshape(-1)
    for begin in range(0, flat.size, bits.size):
        part = flat[begin : begin + bits.size]
        part[...] = bits[: part.size]
    return out.view(block.dtype)


def random_packed(xp: Any, k: int, n: int, dtype: str, copies: int) -> list[PackedWeight]:
    """Return ``copies`` symmetric int4 weights (K, N) in separate memory, with groups of 128.

    K and N must be multiples of 64.
    """
    block = random_words(xp, _BLOCK_WORDS, 1).view(xp.uint8)
    scale_block = abs(random_numbers(xp, 1 << 16, "float16", 2, 1 / 64)).astype(xp.float32) + xp.float32(1 / 256)
    scales = _narrow(xp, scale_block, dtype)
    groups = -(-k // GROUP_SIZE)
    return [
        PackedWeight(
            filled(xp, (n // 64 * (k // 64), 2048), block),
            filled(xp, (groups, n), scales),
            None,
            None,
            (k, n),
            GROUP_SIZE,
            dtype,
        )
        for _ in range(copies)
    ]


def packed_bytes(k: int, n: int) -> int:
    """Return the size in bytes of a packed weight (int4 values and 16-bit scales), the basis of F and TB/s."""
    return k * n // 2 + -(-k // GROUP_SIZE) * n * 2


def to_torch(array: Any) -> Any:
    """Return a torch tensor that shares the memory of a CuPy array of 16-bit floats."""
    import torch

    dtype = torch.bfloat16 if array.dtype == BFLOAT16 else torch.float16
    return torch.as_tensor(array.view(np.int16), device="cuda").view(dtype)
