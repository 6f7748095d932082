"""Values that a tensor copy transfers, including fill values, conversions, clipping and reductions.

The results match an H200 bit for bit. Memories are uint8 arrays, and ``origin`` is the offset of the tensor's base in
global memory. This module does not depend on warps or schedules.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from cudatma.emulator.async_copy.tensor_box import CHUNK, Box, MapSpec
from cudatma.emulator.machine import atomics
from cudatma.emulator.ptx.types import NUMPY, Array

_NUMPY_OF: dict[str, Any] = {
    "float32_ftz": np.float32,
    "tfloat32": np.float32,
    "tfloat32_ftz": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
}
#: Bits of the NaN fill. The hardware uses the same 16-bit pattern for every element type (measured).
_NAN_FILL = 0x7FF77FF77FF77FF7
_TF32_NAN = np.uint32(0x7FFFE000)


def raw_type(size: int) -> np.dtype[Any]:
    """Return the unsigned type with this number of bytes."""
    return NUMPY[f"u{8 * size}"]


def fill_word(spec: MapSpec) -> int:
    """Return the fill value for elements outside the tensor, repeated to 64 bits."""
    return _NAN_FILL if int(spec.oob_fill) else 0


def round_to_tf32(bits: Array) -> Array:
    """Round fp32 to the nearest tf32 value (10 mantissa bits), with ties to even.

    NaNs become canonical. Subnormals are not flushed to zero, even for .ftz types.
    """
    exponent, low = np.uint32(0x7F800000), np.uint32(0x1FFF)
    rounded = (bits + np.uint32(0xFFF) + ((bits >> 13) & np.uint32(1))) & ~low
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > exponent
    result: Array = np.where(is_nan, _TF32_NAN, rounded)
    return result


def _chunks(memory: Array, at: int) -> Array:
    """Return the 16-byte chunks of a memory from byte ``at``, as 64-bit words of shape (n, 2)."""
    size = (memory.size - at) // CHUNK * CHUNK
    return memory[at : at + size].view(np.uint64).reshape(-1, 2)


def loaded_words(box: Box, memory: Array, origin: int) -> Array:
    """Return the words that a load writes to shared memory, shape (rows, chunks, 2)."""
    words = np.full((*box.gmem.shape, 2), fill_word(box.spec), np.uint64)
    whole = box.valid == CHUNK
    if whole.all():
        words[...] = np.take(_chunks(memory, origin % CHUNK), (box.gmem + origin) // CHUNK, axis=0)
    elif whole.any():
        words[whole] = np.take(_chunks(memory, origin % CHUNK), (box.gmem[whole] + origin) // CHUNK, axis=0)
    for length in np.unique(box.valid[~whole & (box.valid > 0)]).tolist():
        here = box.valid == length
        part = words[here].view(np.uint8)
        part[:, :length] = memory[(box.gmem[here] + origin)[:, None] + np.arange(length)]
        words[here] = part.view(np.uint64)
    if box.spec.dtype.name.startswith("tfloat32"):
        bits = words.view(np.uint32)
        inside = 4 * np.arange(CHUNK // 4) < box.valid[..., None]
        bits[inside] = round_to_tf32(bits[inside])
    if box.flipped is not None:
        words[box.flipped] = words[box.flipped][:, ::-1]
    return words


def shared_chunks(memory: Array) -> Array:
    """Return a CTA's shared memory as chunks of 64-bit words, shape (n, 2)."""
    return _chunks(memory, 0)


def written_chunks(box: Box) -> Array:
    """Return a mask of the chunks that a store or reduction writes, shape (rows, chunks).

    The hardware writes all 16 bytes of each chunk that starts inside the tensor.
    """
    return box.valid > 0


def write(memory: Array, offsets: Array, words: Array, unit_bytes: int = CHUNK) -> None:
    """Write chunks of shape (n, 2) at byte offsets of a memory, and discard bytes past the end of the memory.

    Only the first ``unit_bytes`` bytes of each chunk are written.
    """
    if unit_bytes < CHUNK:
        memory[offsets[:, None] + np.arange(unit_bytes)] = words.view(np.uint8).reshape(-1, CHUNK)[:, :unit_bytes]
        return
    fits = offsets + CHUNK <= memory.size
    if fits.all():
        _chunks(memory, int(offsets[0]) % CHUNK)[offsets // CHUNK] = words
        return
    for offset, word in zip(offsets[~fits].tolist(), words[~fits], strict=True):
        memory[offset:] = word.view(np.uint8)[: memory.size - offset]
    if fits.any():
        write(memory, offsets[fits], words[fits])


def read(memory: Array, offsets: Array) -> Array:
    """Return the chunks at byte offsets of a memory, shape (n, 2), with zeros past the end of the memory."""
    fits = offsets + CHUNK <= memory.size
    if fits.all():
        result: Array = np.take(_chunks(memory, int(offsets[0]) % CHUNK), offsets // CHUNK, axis=0)
        return result
    words = np.zeros((len(offsets), 2), np.uint64)
    for row, offset in zip(words[~fits], offsets[~fits].tolist(), strict=True):
        row.view(np.uint8)[: memory.size - offset] = memory[offset:]
    if fits.any():
        words[fits] = read(memory, offsets[fits])
    return words


def combine(operation: str, old: Array, new: Array) -> Array:
    """Return the elementwise result of a bulk or tensor reduction.

    Float sums are rounded once, to nearest even, and keep subnormals. NaN results are canonical, with all bits except
    the sign set. If one operand of min or max is NaN, the result is the other operand. -0 is less than +0.
    """
    with np.errstate(all="ignore"):
        result = atomics.apply(operation, old, new)
        return result if old.dtype.kind in "iu" else _float_result(operation, old, new, result)


def _float_result(operation: str, old: Array, new: Array, result: Array) -> Array:
    bits = raw_type(old.dtype.itemsize)
    if operation in ("min", "max"):
        signs = (old.view(bits) & new.view(bits)) if operation == "max" else (old.view(bits) | new.view(bits))
        result = np.where((old == 0) & (new == 0), signs.view(old.dtype), result)
    # A NaN result is an unchanged NaN operand. If both are NaN, it is the new operand.
    if bits.itemsize == 8 and operation == "add":
        result = np.where(np.isnan(new), new, np.where(np.isnan(old), old, result))
        invalid = np.isnan(result) & ~np.isnan(old) & ~np.isnan(new)
        return np.where(invalid, np.array([0xFFF8 << 48], bits).view(old.dtype), result)
    canonical = np.array([(1 << (8 * old.dtype.itemsize - 1)) - 1], bits).view(old.dtype)
    return np.where(np.isnan(result), canonical, result)


def flush_subnormals(values: Array) -> Array:
    """Replace fp32 subnormals with zeros of the same sign."""
    bits = values.view(np.uint32)
    result: Array = np.where((bits & np.uint32(0x7F800000)) == 0, bits & np.uint32(0x80000000), bits).view(np.float32)
    return result


def reduce(memory: Array, offsets: Array, words: Array, spec: MapSpec, operation: str) -> None:
    """Apply a reduction to chunks of a memory.

    If a stride of 0 maps several chunks to the same address, they are reduced one after another.
    """
    dtype = np.dtype(_NUMPY_OF.get(spec.dtype.name) or spec.dtype.numpy)
    while len(offsets):
        _, first = np.unique(offsets, return_index=True)
        old, new = read(memory, offsets[first]).view(dtype), words[first].view(dtype)
        if spec.dtype.name.endswith("_ftz"):
            result = flush_subnormals(combine(operation, flush_subnormals(old), flush_subnormals(new)))
        else:
            result = combine(operation, old, new)
        write(memory, offsets[first], np.ascontiguousarray(result).view(np.uint64))
        rest = np.ones(len(offsets), bool)
        rest[first] = False
        offsets, words = offsets[rest], words[rest]
