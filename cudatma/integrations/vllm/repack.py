"""Weights from vLLM's layout to cudatma's, by torch, on their device.

vLLM's q is int32 (K / 8, N), eight consecutive rows in a word, lowest nibble first; its zero points are int32 (G, N /
8), eight consecutive columns in a word. The result equals that of ``quantization.pack``, which works on one byte for
each value; quantization/layout_v1.py defines the layout.
"""

from __future__ import annotations

from typing import Any

import torch

from cudatma.errors import QuantizationError
from cudatma.quantization.layout_v1 import BLOCK, BLOCK_BYTES, SYMMETRIC_ZERO, blocks, group_count

#: Values of four bits in a 32-bit word.
WORD_VALUES = 8
#: A nibble in both halves of a byte.
_TWICE = 0x11


def repack(
    words: Any, scales: Any, zero_words: Any | None = None, *, n: int, group_size: int
) -> tuple[Any, Any, Any | None]:
    """qweight, scales and zeros of a PackedWeight (K, N), as new tensors that share no memory with the arguments.

    words: int32 (K / 8, N). scales: fp16 or bf16 (G, N). zero_words: int32 (G, ceil(N / 8)), None where every zero
    point is 8. Any strides. Raises QuantizationError where the shapes contradict each other.
    """
    k = words.shape[0] * WORD_VALUES
    groups = group_count(k, group_size)
    _require("words", words, (k // WORD_VALUES, n))
    _require("scales", scales, (groups, n))
    zeros = None
    if zero_words is not None:
        _require("zero_words", zero_words, (groups, -(-n // WORD_VALUES)))
        zeros = _nibbles(zero_words)[:, :n]
    padding = zeros[0] if zeros is not None and group_size == -1 else None
    packed_zeros = None if zeros is None else _ordered(zeros, SYMMETRIC_ZERO)
    return _packed(words, padding), _ordered(scales, 0), packed_zeros


def _require(field: str, tensor: Any, shape: tuple[int, int]) -> None:
    if tuple(tensor.shape) != shape:
        raise QuantizationError(field, tuple(tensor.shape), str(shape), "it has to fit the layer's other tensors")


def _bytes(words: Any) -> Any:
    """int32 (R, C) -> uint8 (R, C, 4), least significant first."""
    words = words.clone(memory_format=torch.contiguous_format)  # contiguous() would keep a single column's stride
    return words.view(torch.uint8).reshape(*words.shape, 4)


def _nibbles(words: Any) -> Any:
    """int32 (R, C) -> uint8 (R, 8 C), lowest nibble first."""
    data = _bytes(words)
    return torch.stack((data & 15, data >> 4), dim=-1).reshape(len(words), -1)


def _packed(words: Any, padding: Any | None) -> Any:
    """int32 (K / 8, N) -> uint8 (N64 K64, 2048). padding: (N,), what rows beyond K hold; None is 8."""
    rows, n = words.shape
    k64, n64 = blocks(rows * WORD_VALUES), blocks(n)
    data = _bytes(words)
    if (rows, n) != (k64 * WORD_VALUES, n64 * BLOCK):
        padded = data.new_full((k64 * WORD_VALUES, n64 * BLOCK, 4), SYMMETRIC_ZERO * _TWICE)
        padded[:rows, :n] = data
        if padding is not None:
            padded[rows:, :n] = (padding * _TWICE)[:, None]
        data = padded
    # A byte of a word has k = ... + 2 t and, in its high nibble, 2 t + 1; a packed byte, columns r0 = 0 and r0 = 1.
    split = data.view(k64, 4, 2, n64, 4, 2, 8, 4)  # k64 j r1 n64 c r0 g t
    left, right = split[:, :, :, :, :, 0], split[:, :, :, :, :, 1]
    pairs = torch.stack(((left & 15) | (right << 4), (left >> 4) | (right & 240)))  # h k64 j r1 n64 c g t
    return pairs.permute(4, 1, 5, 6, 7, 2, 0, 3).reshape(n64 * k64, BLOCK_BYTES)  # n64 k64 c g t j h r1


def _ordered(rows: Any, padding: int) -> Any:
    """(G, N) -> (G, 64 N64), padded, every 64 columns in stored order."""
    groups, n = rows.shape
    n64 = blocks(n)
    padded = rows.new_full((groups, n64 * BLOCK), padding)
    padded[:, :n] = rows
    return padded.view(groups, n64, 4, 2, 8).permute(0, 1, 4, 2, 3).reshape(groups, n64 * BLOCK)
