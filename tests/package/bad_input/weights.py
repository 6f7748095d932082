"""Wrong calls of the quantizer, the importers and the weights' files."""

from __future__ import annotations

from typing import Any

import numpy as np

import cudatma as c
from bad_input.bench import Case, K, N, host_weight
from cudatma.errors import ArgumentTypeError, QuantizationError, WeightFileError
from cudatma.quantization import open_checkpoint, pack

ONES = np.ones((K, N), np.float32)
Q, SCALES = np.full((K, N), 7, np.uint8), np.ones((2, N), np.float16)
WORDS, ZERO_WORDS = np.zeros((8, N), np.int32), np.zeros((2, 8), np.int32)


def spoiled(value: float) -> Any:
    changed = ONES.copy()
    changed[5, 7] = value
    return changed


def gptq(**changes: Any) -> c.PackedWeight:
    return c.from_gptq(**{"qweight": WORDS, "qzeros": ZERO_WORDS, "scales": SCALES} | changes)


def awq(**changes: Any) -> c.PackedWeight:
    return c.from_awq(**{"qweight": WORDS.T, "qzeros": ZERO_WORDS, "scales": SCALES} | changes)


def compressed(**changes: Any) -> c.PackedWeight:
    right = {"weight_packed": WORDS.T, "weight_scale": SCALES.T, "weight_shape": (N, K)}
    return c.from_compressed_tensors(**(right | changes))


# One row a line, wrapped by hand: the table is read by columns.
# fmt: off

#: Dense weights, packed ones, and those of other tools.
WEIGHTS = [
    Case("group size 48", QuantizationError, "group_size", "32, 64, 128 or -1",
         lambda b: c.quantize(ONES, group_size=48)),
    Case("group size 0", QuantizationError, "group_size", "got 0", lambda b: c.quantize(ONES, group_size=0)),
    Case("group size a float", QuantizationError, "group_size", "32.0", lambda b: c.quantize(ONES, group_size=32.0)),
    Case("scales in int8", ArgumentTypeError, "dtype", 'or "bfloat16"', lambda b: c.quantize(ONES, dtype="int8")),
    Case("symmetric by name", ArgumentTypeError, "symmetric", "'no'", lambda b: c.quantize(ONES, symmetric="no")),
    Case("clip search by name", ArgumentTypeError, "clip_search", "'mse'",
         lambda b: c.quantize(ONES, clip_search="mse")),
    Case("dense weight a list", ArgumentTypeError, "weight", "list", lambda b: c.quantize([[1.0]])),
    Case("dense weight of ints", QuantizationError, "weight", "int32", lambda b: c.quantize(ONES.astype(np.int32))),
    Case("dense weight of three dimensions", QuantizationError, "weight", "(1, 64, 64)",
         lambda b: c.quantize(ONES[None])),
    Case("dense weight empty", QuantizationError, "weight", "(0, 64)", lambda b: c.quantize(ONES[:0])),
    Case("dense weight masked", ArgumentTypeError, "weight", "mask", lambda b: c.quantize(np.ma.masked_array(ONES))),
    Case("dense weight NaN", QuantizationError, "weight[5, 7]", "nan", lambda b: c.quantize(spoiled(np.nan))),
    Case("dense weight inf", QuantizationError, "weight[5, 7]", "inf", lambda b: c.quantize(spoiled(np.inf))),
    Case("dense weight beyond fp16", QuantizationError, "weight[group 0, column 7]", "bfloat16",
         lambda b: c.quantize(spoiled(1e6), group_size=32)),
    Case("integers over 15", QuantizationError, "q", "0 to 15", lambda b: pack(Q + 9, SCALES, group_size=32)),
    Case("integers signed", QuantizationError, "q", "int8", lambda b: pack(Q.astype(np.int8), SCALES, group_size=32)),
    Case("scales of other groups", QuantizationError, "scales", "(2, 64)",
         lambda b: pack(Q, SCALES[:1], group_size=32)),
    Case("scales NaN", QuantizationError, "scales[0, 0]", "nan",
         lambda b: pack(Q, SCALES * np.float16(np.nan), group_size=32)),
    Case("scales float32", QuantizationError, "dtype", "float32",
         lambda b: pack(Q, SCALES.astype(np.float32), group_size=32)),
    Case("zero points over 16", QuantizationError, "zeros", "0 to 16",
         lambda b: pack(Q, SCALES, np.full((2, N), 17, np.uint8), group_size=32)),
    Case("zero points of floats", QuantizationError, "zeros", "float16",
         lambda b: pack(Q, SCALES, SCALES, group_size=32)),
    Case("perm that repeats", QuantizationError, "perm", "repeated values",
         lambda b: pack(Q, SCALES, group_size=32, perm=np.zeros(K, np.int32))),
    Case("perm outside of K", QuantizationError, "perm", "1 to 64",
         lambda b: pack(Q, SCALES, group_size=32, perm=np.arange(1, K + 1))),
    Case("unknown layout version", QuantizationError, "layout_version", "got 2",
         lambda b: host_weight(layout_version=2)),
    Case("shape of another weight", QuantizationError, "qweight", "(2, 2048)", lambda b: host_weight(shape=(K, 2 * N))),
    Case("shape a list", QuantizationError, "shape", "[64, 64]", lambda b: host_weight(shape=[K, N])),
    Case("dtype of other scales", QuantizationError, "scales", "bfloat16",
         lambda b: host_weight(dtype="bfloat16")),
    Case("packed bytes with gaps", QuantizationError, "qweight", "C-contiguous",
         lambda b: host_weight(qweight=np.zeros((1, 4096), np.uint8)[:, ::2])),
    Case("packed bytes a list", ArgumentTypeError, "qweight", "list", lambda b: host_weight(qweight=[[0] * 2048])),
    Case("GPTQ in eight bits", QuantizationError, "bits", "got 8", lambda b: gptq(bits=8)),
    Case("GPTQ, int64 words", QuantizationError, "qweight", "int64",
         lambda b: gptq(qweight=np.zeros((8, N), np.int64))),
    Case("GPTQ, other columns", QuantizationError, "qweight", "(8, 32)",
         lambda b: gptq(qweight=np.zeros((8, 32), np.int32))),
    Case("GPTQ, other zero points", QuantizationError, "qzeros", "(2, 8)",
         lambda b: gptq(qzeros=np.zeros((3, 8), np.int32))),
    Case("GPTQ, unknown format", QuantizationError, "zero_point_format", '"v1", "v1_borrow" or "v2"',
         lambda b: gptq(zero_point_format="v3")),
    Case("GPTQ, groups outside", QuantizationError, "g_idx", "0 to 1", lambda b: gptq(g_idx=np.full(K, 2))),
    Case("GPTQ, unequal groups", QuantizationError, "g_idx", "unequal", lambda b: gptq(g_idx=np.zeros(K, np.int32))),
    Case("GPTQ, K and groups", QuantizationError, "scales", "128", lambda b: gptq(group_size=128)),
    Case("GPTQ, float32 scales", QuantizationError, "scales", "dtype='float16'",
         lambda b: gptq(scales=np.ones((2, N), np.float32))),
    Case("GPTQ, scales beyond fp16", QuantizationError, "scales[0, 0]", "1e+06",
         lambda b: gptq(scales=np.full((2, N), 1e6), dtype="float16")),
    Case("AWQ, other columns", QuantizationError, "qweight", "(64, 8)",
         lambda b: awq(qweight=np.zeros((K, 4), np.int32))),
    Case("AWQ, scales a vector", QuantizationError, "scales", "(64,)", lambda b: awq(scales=np.ones(N, np.float16))),
    Case("compressed, shape of three", QuantizationError, "weight_shape", "(N, K)",
         lambda b: compressed(weight_shape=(1, N, K))),
    Case("compressed, other K", QuantizationError, "weight_packed", "(64, 16)",
         lambda b: compressed(weight_shape=(N, 2 * K))),
    Case("compressed, other rows", QuantizationError, "weight_scale", "(64, G)",
         lambda b: compressed(weight_scale=np.ones((32, 2), np.float16))),
    Case("Marlin, N not of 64", QuantizationError, "B", "multiple of 64",
         lambda b: c.from_marlin(np.zeros((4, 64), np.int32), np.ones((2, 32), np.float16))),
]

#: Corrupt, truncated, foreign and missing files.
FILES = [
    Case("no such file", WeightFileError, "gone", "check the path", lambda b: c.load_weights(b.folder / "gone")),
    Case("a folder", WeightFileError, "", "directory", lambda b: c.load_weights(b.folder)),
    Case("an empty folder", WeightFileError, "", "no .safetensors file", lambda b: open_checkpoint(b.folder)),
    Case("a path with a NUL", WeightFileError, "", "null", lambda b: c.load_weights("a\0b")),
    Case("no path", ArgumentTypeError, "path", "NoneType", lambda b: c.load_weights(None)),
    Case("a checkpoint by number", ArgumentTypeError, "path", "int", lambda b: c.load_gptq(3, "layer")),
    Case("an empty file", WeightFileError, "", "0 bytes", lambda b: c.load_weights(b.file(b""))),
    Case("not safetensors", WeightFileError, "", "header", lambda b: c.load_weights(b.file(b"PK\3\4" + bytes(64)))),
    Case("a header that is no JSON", WeightFileError, "", "JSON",
         lambda b: c.load_weights(b.file(b"\4" + bytes(7) + b"{]]}"))),
    Case("a header that is a list", WeightFileError, "", "JSON object",
         lambda b: c.load_weights(b.file(b"\2" + bytes(7) + b"[]"))),
    Case("cut inside the header", WeightFileError, "", "complete header", lambda b: c.load_weights(b.saved(cut=100))),
    Case("cut inside the data", WeightFileError, "", "ends at byte", lambda b: c.load_weights(b.saved(cut=-1))),
    Case("shape against bytes", WeightFileError, "x", "8 bytes",
         lambda b: open_checkpoint(b.entry(shape=[5])).read("x")),
    Case("negative offsets", WeightFileError, "x", "data_offsets",
         lambda b: open_checkpoint(b.entry(data_offsets=[-8, 0]))),
    Case("an element type of tomorrow", WeightFileError, "x", "F4",
         lambda b: open_checkpoint(b.entry(dtype="F4")).read("x")),
    Case("a layer that is not there", WeightFileError, "q.qweight", "no such tensor",
         lambda b: c.load_awq(b.saved(), "q")),
    Case("another tool's file", WeightFileError, "format", "load_gptq",
         lambda b: c.load_weights(b.saved(metadata={"format": "pt"}))),
    Case("layout version 2", WeightFileError, "layout_version", "newer cudatma",
         lambda b: c.load_weights(b.saved(metadata={"layout_version": "2"}))),
    Case("layout version in words", WeightFileError, "layout_version", "one",
         lambda b: c.load_weights(b.saved(metadata={"layout_version": "one"}))),
    Case("layout version of a thousand digits", WeightFileError, "layout_version", "999",
         lambda b: c.load_weights(b.saved(metadata={"layout_version": "9" * 5000}))),
    Case("file with group size 7", WeightFileError, "group_size", "32, 64",
         lambda b: c.load_weights(b.saved(group_size=7))),
    Case("file with another shape", WeightFileError, "qweight", "(2, 2048)",
         lambda b: c.load_weights(b.saved(shape=[64, 128]))),
    Case("file that lists a missing array", WeightFileError, "weight.perm", "no such tensor",
         lambda b: c.load_weights(b.saved(arrays=["qweight", "scales", "perm"]))),
    Case("saving a list", ArgumentTypeError, "weights", "list",
         lambda b: c.save_weights([host_weight()], b.folder / "w")),
    Case("saving an array", ArgumentTypeError, "weights['a']", "ndarray",
         lambda b: c.save_weights({"a": Q}, b.folder / "w")),
    Case("saving into no folder", WeightFileError, "w", "writable",
         lambda b: host_weight().save(b.folder / "gone" / "w")),
]
